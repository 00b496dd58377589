"""scripts/train_gpt.py for 300 steps without and with qshim's default policy.

The mean loss of the last 20 steps must agree within 0.02, and of the linear products that are not
too small to pay, 95 % of the flops must have been served in fp8. Runs without the preload itself.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from support import GEMM_EX, LT_MATMUL, ROOT, bare_environment, counters, need

LOSS, SHARE = 0.02, 0.95
STEPS = os.environ.get("QS_TEST_STEPS", "300")


def train(folder, library):
    environment = bare_environment()
    if library:
        environment |= {"LD_PRELOAD": library, "QSHIM_OUT": str(folder), "QSHIM_QUIET": "1"}
    report = folder / ("fp8.json" if library else "plain.json")
    subprocess.run([sys.executable, ROOT / "scripts" / "train_gpt.py", "--steps", STEPS,
                    "--json", report], env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads(report.read_text())


def fp8_share(slots):
    """Share of the flops of single products, leaving out those that are too small to pay."""
    linear = [s for s in slots if s["entry"] in (GEMM_EX, LT_MATMUL) and s["reason"] != "small"]
    total = sum(s["flops"] * s["calls"] for s in linear)
    assert total > 0, "no linear product was seen"
    return sum(s["flops"] * s["replaced"] for s in linear) / total


need("torch")
with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    plain, fp8 = train(folder, None), train(folder, os.environ["QS_TEST_LIBRARY"])
    share = fp8_share(counters(folder))
difference = fp8["final_loss"] - plain["final_loss"]
ratio = fp8["tokens_per_second"] / plain["tokens_per_second"]
print(f"loss {plain['final_loss']:.4f} -> {fp8['final_loss']:.4f}, speed x{ratio:.2f}, "
      f"{100 * share:.1f} % of eligible flops in fp8")
assert abs(difference) <= LOSS, f"final losses differ by {difference:+.4f}"
assert share >= SHARE, f"only {100 * share:.1f} % of the eligible flops were served in fp8"
