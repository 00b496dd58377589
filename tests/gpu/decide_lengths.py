"""Batches of any length, whole steps of which are compared with what qshim replaces and without.

The same training loop twice, each batch of another number of tokens: once as fast as the device allows,
where fp8 makes the steps shorter and must stay; and once as a program whose data comes at a fixed rate,
slower than it could take it, where nothing can be gained, so that all of it must be given back, batches of
lengths that come for the first time after that included. Runs without the preload itself.
"""
import collections
import json
import sys
import tempfile
import time

from support import decisions, need, preloaded, report

WIDTH, LAYERS, LONGEST, STEPS = 4096, 4, 8192, 560
RATE_HZ = 30
LATE = 40  # steps at the end, whose products count


def train(waits):
    torch = need("torch")
    torch.manual_seed(0)
    lengths = torch.randint(LONGEST // 4 + 1, LONGEST + 1, (STEPS,)).tolist()
    with torch.device("cuda"):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
                                      for _ in range(LAYERS)))
        x = torch.randn(LONGEST, WIDTH, dtype=torch.bfloat16)
    x.requires_grad_()  # so that each layer has all three products
    due = time.monotonic()
    for tokens in lengths:
        if waits:
            time.sleep(max(0, due - time.monotonic()))
            due = max(due, time.monotonic() - 1 / RATE_HZ) + 1 / RATE_HZ
        model(x[:tokens]).square().mean().backward()  # a sum's gradient is one number, expanded
        model.zero_grad(set_to_none=True)
        x.grad = None
    torch.cuda.synchronize()
    print(json.dumps({"late": sorted(set(lengths[-LATE:]) - set(lengths[:-LATE]))}))


def run(kind):
    """How the products of lengths that came late were decided, action and reason -> how many; and what
    was said of whole steps."""
    with tempfile.TemporaryDirectory() as folder:
        env = preloaded(folder, QSHIM_SET="tune.file=", QSHIM_LOG="info")
        told, said = report([sys.executable, __file__, kind], env)
        fates = {line["key"]: (line["action"], line["reason"]) for line in decisions(folder)}
    late = {f"={tokens}" for tokens in told["late"]}
    counts = collections.Counter(
        fate for key, fate in fates.items()
        if any(word[1:] in late for word in key.split() if word.startswith(("n=", "k="))))
    steps = [line for line in said.splitlines() if "a step takes" in line]
    print(f"{kind}: {', '.join(f'{n} {a} ({r})' for (a, r), n in counts.most_common())}; "
          f"{steps[-1] if steps else 'steps were not compared'}")
    assert steps, "whole steps were not compared"
    return counts


if len(sys.argv) > 1:
    train(sys.argv[1] == "waiting")
else:
    need("torch")
    busy = run("busy")
    assert busy["fp8", "auto"] > busy.total() * 0.9, "steps were shorter in fp8, and it was not kept"
    waiting = run("waiting")
    assert waiting["native", "steps"] > waiting.total() * 0.9, "nothing was gained, and it was kept"
