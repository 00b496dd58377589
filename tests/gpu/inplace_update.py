"""Weights changed in place in every way PyTorch has: the next product uses the new values.

Each column of the result is checked, so a stale copy of one row of the weight shows. The weight is
used several times before each change, long enough for any copy of it to be thought permanent.
"""
from support import need, normal, served, sqnr

torch = need("torch")
F = torch.nn.functional
TOKENS, WIDTH, OUT = 128, 1024, 256
USES, LIMIT = 6, 22.0

x = normal(TOKENS, WIDTH, seed=1)
weight = torch.nn.Parameter(normal(OUT, WIDTH, seed=2))
other = normal(OUT, WIDTH, seed=3)


def check(what):
    """Every output column, that is every row of the weight, must be current."""
    with torch.no_grad():
        for use in range(USES):
            y, exact = F.linear(x, weight).double(), x.double() @ weight.double().t()
            worst = min(sqnr(y[:, i], exact[:, i]) for i in range(OUT))
            assert worst >= LIMIT, f"{what}, use {use} after it: {worst:.1f} dB"


def optimizer(kind, **options):
    def update():
        step = kind([weight], lr=0.5, **options)
        weight.grad = normal(OUT, WIDTH, seed=4)
        step.step()
        weight.grad = None
    return update


def one_element():
    weight[7, 9] = 50.0


def graph_replay():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        weight.mul_(1.0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.mul_(-0.5)
    graph.replay()


def other_stream():
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        weight.copy_(other.flip(0))
    torch.cuda.current_stream().wait_stream(stream)


def recycled_address():
    """A new tensor at the address that the old one had, as the caching allocator gives."""
    old = weight.data_ptr()
    weight.data = torch.empty(0, dtype=torch.bfloat16).cuda()
    weight.data = torch.empty(OUT, WIDTH, dtype=torch.bfloat16, device="cuda")
    weight.normal_()
    if weight.data_ptr() != old:
        print("note: the allocator did not recycle the address")


UPDATES = {
    "SGD": optimizer(torch.optim.SGD, foreach=False),
    "SGD, foreach": optimizer(torch.optim.SGD, foreach=True),
    "AdamW, fused": optimizer(torch.optim.AdamW, fused=True),
    "neg_": lambda: weight.neg_(),
    "copy_ on the device": lambda: weight.copy_(other),
    "copy_ from the host": lambda: weight.copy_(torch.randn(OUT, WIDTH).bfloat16()),
    "copy_ from pinned memory": lambda: weight.copy_(
        torch.randn(OUT, WIDTH).bfloat16().pin_memory(), non_blocking=True),
    "one row": lambda: weight[3].copy_(other[5]),
    "one element": one_element,
    "index_add_": lambda: weight.index_add_(0, torch.arange(3).cuda(), other[:3]),
    "masked_fill_": lambda: weight.masked_fill_(other > 0, 0.25),
    "out=": lambda: torch.mul(other, -2.0, out=weight.data),
    "foreach": lambda: torch._foreach_copy_([weight], [other.float()]),
    "a captured graph": graph_replay,
    "another stream": other_stream,
    "a recycled address": recycled_address,
}

check("the first product")
for what, update in UPDATES.items():
    with torch.no_grad():
        update()
    check(what)
total = USES * (1 + len(UPDATES))
assert served() == total, f"{served()} of {total} products served by fp8"
