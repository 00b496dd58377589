"""QSHIM=off and mode observe give the very bits that a run without qshim gives.

Starts itself as a child: plain twice (is the program itself reproducible?), off, and observe. Runs
without the preload itself; run.py passes the library's path in QS_TEST_LIBRARY.
"""
import hashlib
import os
import subprocess
import sys

from support import bare_environment, need, normal, skip


def products(torch):
    """A list of products of every kind qshim looks at, and one that it does not."""
    F = torch.nn.functional
    for tokens, width, out in ((1, 512, 1024), (17, 1000, 136), (512, 1024, 4096), (33, 7, 9)):
        x = normal(tokens, width, seed=1).requires_grad_()
        w = normal(out, width, seed=2).requires_grad_()
        bias = normal(out, seed=3)
        y = F.linear(x, w, bias)
        y.backward(normal(tokens, out, seed=4))
        yield from (y, x.grad, w.grad, x @ w.t(), w @ x.t())
        x, w = x.detach(), w.detach()
        yield torch._addmm_activation(bias, x, w.t(), use_gelu=True)
        yield torch.mm(x, w.t(), out_dtype=torch.float32)
        yield x.float() @ w.float().t()
        yield torch.bmm(x.expand(3, -1, -1), w.t().expand(3, -1, -1))


def child():
    digest = hashlib.sha256()
    torch = need("torch")
    for result in products(torch):
        digest.update(result.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    print(digest.hexdigest())


def run(mode):
    environment = bare_environment()
    if mode:
        environment |= {"LD_PRELOAD": os.environ["QS_TEST_LIBRARY"], "QSHIM": mode}
    result = subprocess.run([sys.executable, __file__, "child"], env=environment, text=True,
                            capture_output=True)
    if result.returncode == 77:
        skip(result.stdout.strip().removeprefix("skip: "))
    assert result.returncode == 0, result.stderr
    return result.stdout.strip(), result.stderr


if sys.argv[1:] == ["child"]:
    child()
    sys.exit()
plain, again = run(None), run(None)
assert plain[0] == again[0], "two plain runs differ: nothing can be compared"
for mode in ("off", "observe"):
    assert run(mode)[0] == plain[0], f"QSHIM={mode} changed a result"
assert "qshim:" not in run("off")[1], "QSHIM=off is not silent"
