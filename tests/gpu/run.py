#!/usr/bin/env python3
"""Runs the Python programs of the GPU suite under qshim, one line each.

Usage: run.py [NAME...]. QS_TEST_BUILD is the build folder (default: build). A program passes if it
exits with 0, what it logged is well-formed and none of qshim's own steps failed; 77 means skipped.
The exit status is 1 if anything failed.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from support import ROOT, SKIPPED, decisions

HERE = pathlib.Path(__file__).resolve().parent
BUILD = pathlib.Path(os.environ.get("QS_TEST_BUILD", ROOT / "build")).resolve()
LIBRARY = BUILD / "libqshim.so"
LIMIT_S = 600
FP8 = {"QSHIM_SET": "default.action=fp8"}
PARENT = None  # starts children with and without the preload by itself

PROGRAMS = {
    "torch_products": FP8,
    "torch_rows": {"QSHIM_SET": "default.action=fp8;default.scale=row"},
    "torch_compile": FP8,
    "torch_graph": FP8,
    "torch_streams_threads": FP8,
    "inplace_update": FP8,
    "fork_worker": FP8,
    "jax_matmul": FP8,
    "cupy_matmul": FP8,
    "epoch_profiler": PARENT,
    "stale_weights": PARENT,
    "stale_nccl": PARENT,
    "off_identical": PARENT,
    "llama_reuse": PARENT,
    "decide_llama": PARENT,
    "decide_outliers": PARENT,
    "decide_file": PARENT,
    "decide_roles": PARENT,
    "decide_live": PARENT,
    "decide_lengths": PARENT,
    "gpt_ab": PARENT,
}


def environment(policy, folder):
    """The caller's environment without its own qshim settings, and the preload if wanted."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("QSHIM") and k != "LD_PRELOAD"}
    env["QS_TEST_LIBRARY"] = str(LIBRARY)
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    if policy is not PARENT:
        first = os.environ.get("QS_TEST_PRELOAD_FIRST", "")
        env |= {"LD_PRELOAD": f"{first} {LIBRARY}".strip(), "QSHIM_OUT": folder,
                "QSHIM_QUIET": "1", **policy}
        # Nothing that an earlier run measured, and nothing for a later one.
        env["QSHIM_SET"] = f"{policy.get('QSHIM_SET', '')};tune.file="
    return env


def complaint(result, folder):
    """What is wrong with a run, or None."""
    if result.returncode != 0:
        last = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        return f"exit status {result.returncode}: {last}"
    try:
        failed = [d for d in decisions(folder) if d["reason"] == "error"]
    except ValueError as error:
        return f"the decision log is not JSON lines: {error}"
    return f"a step of qshim failed: {failed[0]}" if failed else None


def run(name, policy):
    """Returns 'ok', 'skip' or 'FAIL' and prints the line."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = subprocess.run([sys.executable, HERE / f"{name}.py"], text=True,
                                    env=environment(policy, folder), capture_output=True,
                                    timeout=LIMIT_S)
            why = complaint(result, folder)
        except subprocess.TimeoutExpired:
            result, why = None, f"still running after {LIMIT_S} s"
    output = result.stdout.strip() if result else ""
    if result and result.returncode == SKIPPED:
        print(f"skip {name}: {output.removeprefix('skip: ')}", flush=True)
        return "skip"
    word, note = ("FAIL", why) if why else ("ok", output.splitlines()[-1] if output else "")
    print(f"{word:4} {name} ({time.monotonic() - start:.0f} s){': ' if note else ''}{note}",
          flush=True)
    if why and result:
        print("".join(f"     | {line}\n" for line in result.stderr.splitlines()[-12:]), end="")
    return word


def main():
    unknown = set(sys.argv[1:]) - set(PROGRAMS)
    if unknown or not LIBRARY.is_file():
        sys.exit(f"run.py: unknown program {', '.join(unknown)}" if unknown else
                 f"run.py: {LIBRARY} is missing; run make first")
    wanted = sys.argv[1:] or PROGRAMS
    outcomes = [run(name, PROGRAMS[name]) for name in wanted]
    failed = outcomes.count("FAIL")
    print(f"{outcomes.count('ok')} passed, {failed} failed, {outcomes.count('skip')} skipped")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
