"""Submissions that qshim counts in a training step against the GPU operations a profiler sees.

What a step submits is the difference between a run of a few steps and one of some more, as the line
at exit gives it ("submissions seen", level info): those of the program and those inside cuBLAS. The
profiler's figure (kernels, copies, fills; torch.profiler, which sees the whole process, JAX too) is
of a run without qshim. Every product is passed, so that both runs do the same. qshim may count
more, as waits and frees count too, but never less; an eager PyTorch step has neither, and must be equal.
Runs without the preload itself.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from support import SKIPPED, bare_environment, need, skip

WARM, MORE = 4, 5  # steps of the shorter run, and how many more the longer one has
LINE = re.compile(r"submissions seen: (\d+) by the program, (\d+) inside cuBLAS, "
                  r"(\d+) products passed; (.*)")


def torch_step(compiled):
    torch = need("torch")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512),
              torch.nn.LayerNorm(512)]
    model = torch.nn.Sequential(*layers).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    forward = torch.compile(model) if compiled else model

    def step():
        forward(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step, torch.cuda.synchronize


def jax_step():
    # Work in a command buffer is one submission and many operations: nothing to compare.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax = need("jax")
    jnp = jax.numpy
    if jax.default_backend() != "gpu":
        skip("JAX has no GPU")
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((256, 512), (512, 2048), (2048, 512))
    x, *weights = (jax.random.normal(k, s, dtype=jnp.bfloat16) * 0.05 for k, s in zip(keys, shapes))
    state = [weights]

    def loss(weights):
        return jnp.square((jax.nn.gelu(x @ weights[0]) @ weights[1]).astype(jnp.float32)).mean()

    @jax.jit
    def update(weights):
        return [w - 0.01 * g for w, g in zip(weights, jax.grad(loss)(weights))]

    def step():
        state[0] = update(state[0])
    return step, lambda: jax.block_until_ready(state[0])


PROGRAMS = {"eager": lambda: torch_step(False), "compiled": lambda: torch_step(True),
            "jax": jax_step}


def operations(step, wait):
    """GPU operations of one step, as the profiler sees them."""
    torch = need("torch")
    torch.cuda.init()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        wait()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") for event in events)


def child(program, steps):
    """Runs so many steps; 0 stands for a warm-up and a step that is profiled and counted."""
    step, wait = PROGRAMS[program]()
    for _ in range(steps or WARM):
        step()
    wait()
    if not steps:
        print("operations", operations(step, wait))


def run(program, steps):
    """What a child printed (output, errors), preloaded if it is to count; None if it skipped."""
    environment = bare_environment()
    with tempfile.TemporaryDirectory() as folder:
        if steps:
            environment |= {"LD_PRELOAD": os.environ["QS_TEST_LIBRARY"], "QSHIM_LOG": "info",
                            "QSHIM_OUT": folder, "QSHIM_SET": "default.action=native"}
        result = subprocess.run([sys.executable, __file__, program, str(steps)], text=True,
                                env=environment, capture_output=True)
    if result.returncode == SKIPPED:
        return None
    assert result.returncode == 0, f"{program}: {result.stderr}"
    return result.stdout, result.stderr


def seen(program, steps):
    """Submissions in all, and what is said of the epoch."""
    match = LINE.search(run(program, steps)[1])
    assert match, f"{program}: nothing was said at exit"
    outside, inside, passed, doubt = match.groups()
    assert int(passed) > 0 and int(inside) > 0, f"{program}: no product was seen"
    return int(outside) + int(inside), doubt


def compare(program):
    """The line on one program, or None if it cannot be run here."""
    profiled = run(program, 0)
    expected = int(re.search(r"operations (\d+)", profiled[0])[1]) if profiled else 0
    if not expected:
        return None
    (few, _), (many, doubt) = seen(program, WARM), seen(program, WARM + MORE)
    counted = (many - few) / MORE
    line = f"{program} {counted:g} of {expected}"
    assert counted >= expected, f"{line}: submissions escape"
    assert program != "eager" or counted == expected, f"{line}: something else was counted"
    assert doubt == "none is known to escape", f"{program}: {doubt}"
    return line


if len(sys.argv) == 3:
    child(sys.argv[1], int(sys.argv[2]))
    sys.exit()
need("torch")
lines = [compare(program) for program in PROGRAMS]
assert lines[0], "the profiler saw nothing of an eager step"
print("submissions counted of operations profiled: " + ", ".join(filter(None, lines)))
