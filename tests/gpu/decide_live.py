"""A policy file that is edited while a PyTorch program runs: decisions follow within seconds.

One product, again and again. The file leaves it native at first, then demands fp8, is broken, which
must be told and change nothing, and leaves it native again, when the product must be the program's
own bit for bit. No product may be missing in the counters. Runs without the preload itself.
"""
import json
import os
import pathlib
import sys
import tempfile
import time

from support import counters, decisions, digest, need, preloaded, report, served, shape, sqnr

TOKENS, IN, OUT = 512, 2048, 1024
LIMIT_S = 10   # in which an edit must be in effect
WHILE_S = 3    # in which one that must not be would be
PAUSE_S = 0.02  # between products: a thread that is slow reads the clock more often
LEAST = 26     # dB


def edit(action):
    """Another file in the place of the policy's, as editors do it."""
    policy = pathlib.Path(os.environ["QSHIM_POLICY"])
    new = policy.with_suffix(".new")
    new.write_text(f"[qshim]\nversion = 1\n[default]\n{action}\n")
    new.rename(policy)


class Program:
    def __init__(self, torch):
        torch.manual_seed(0)
        self.torch, self.calls = torch, 0
        self.x, self.weight = (torch.randn(rows, IN, device="cuda").bfloat16()
                               for rows in (TOKENS, OUT))
        self.exact = self.x.double() @ self.weight.double().t()

    def multiply(self):
        """The product, and if it was served."""
        before = served()
        y = self.torch.nn.functional.linear(self.x, self.weight)
        self.torch.cuda.synchronize()
        self.calls += 1
        time.sleep(PAUSE_S)
        return y, served() > before

    def phase(self, action, wanted, seconds):
        """After an edit: the last product, and the seconds until one is served, or is not, as
        `wanted`; None if that is not so in time."""
        edit(action)
        begin = time.monotonic()
        while (past := time.monotonic() - begin) < seconds:
            y, was = self.multiply()
            if was == wanted:
                return y, past
        return y, None

    def stays(self, seconds):
        """If every product is served for so long."""
        begin, kept = time.monotonic(), True
        while time.monotonic() - begin < seconds:
            kept &= self.multiply()[1]
        return kept


def work():
    program = Program(need("torch"))
    with program.torch.no_grad():
        own, _ = program.multiply()
        fast, fp8_s = program.phase("action = fp8", True, LIMIT_S)
        edit("actoin = native")
        kept = program.stays(WHILE_S)
        again, native_s = program.phase("action = native", False, LIMIT_S)
        print(json.dumps({"calls": program.calls, "fp8_s": fp8_s, "sqnr": sqnr(fast, program.exact),
                          "kept": kept, "native_s": native_s, "same": digest(own) == digest(again),
                          "differs": digest(own) != digest(fast)}))


def judge(told, said, lines, slots):
    """What is wrong with a run; `lines` and `slots` are the decisions and counters of it."""
    ours = ("TN", OUT, TOKENS, IN)
    wrong, fates = [], [line["action"] for line in lines if shape(line["key"]) == ours]
    calls = sum(slot["calls"] for slot in slots if shape(slot["key"]) == ours)
    if fates != ["native", "fp8", "native"]:
        wrong.append(f"decided: {fates}")
    if calls != told["calls"]:
        wrong.append(f"{told['calls']} products were made, {calls} counted")
    if told["fp8_s"] is None or told["native_s"] is None:
        wrong.append("an edit had no effect in time")
    if told["sqnr"] < LEAST or not told["differs"]:
        wrong.append(f"not in fp8: {told['sqnr']:.1f} dB")
    if not told["kept"]:
        wrong.append("a broken edit changed something")
    if "did you mean 'action'" not in said:
        wrong.append("a broken edit was not told")
    if not told["same"]:
        wrong.append("native again, but not the program's own bits")
    return wrong


def main():
    need("torch")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        policy = folder / "policy.ini"
        policy.write_text("[qshim]\nversion = 1\n[default]\naction = native\n")
        told, said = report([sys.executable, __file__, "work"], preloaded(
            folder / "run", QSHIM_POLICY=str(policy),
            QSHIM_SET="tune.file=;tune.budget_ms=0;cache.validity=adjacent"))
        wrong = judge(told, said, decisions(folder / "run"), counters(folder / "run"))
        assert not wrong, "; ".join(wrong)
        print(f"fp8 {told['fp8_s']:.1f} s after an edit, {told['sqnr']:.1f} dB; a broken one told, "
              f"and without effect; native {told['native_s']:.1f} s after the next, "
              f"{told['calls']} products")


if __name__ == "__main__":
    work() if len(sys.argv) > 1 else main()
