"""What the programs of the GPU suite share: what qshim recorded, and how wrong a result is.

A program asserts what it wants to know and is silent when all is well; need() ends it as skipped.
Run one by hand as run.py does: LD_PRELOAD=.../libqshim.so QSHIM_OUT=DIR python3 PROGRAM.
"""
import json
import math
import os
import pathlib
import re
import struct
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SKIPPED = 77  # exit status, as automake has it

# struct qs_counter of src/note/note.h, after a header of the same size
SLOT = struct.Struct("<112s32s40s4BId4Q24x")
# struct qs_counter_header up to the words about kept operands, and those: bytes now, uses so far,
# those of them that checked the source, and how often a use found it changed unannounced
KEPT = struct.Struct("<120x4Q4Q4Q4Q")
FORMS = ("fp8", "fp8 turned", "nf4", "fp8 tiles")
NATIVE, BF16, FP8 = range(3)  # enum qs_action
UNKNOWN, FWD, DGRAD, WGRAD = range(4)  # enum qs_role
GEMM_EX, LT_MATMUL = 0, 4     # enum qs_entry


def reasons():
    """Reason codes by their number."""
    text = (ROOT / "src" / "gemm" / "reason.h").read_text()
    return re.findall(r'^\tX\(\w+, "([^"]+)"', text, re.MULTILINE)


def need(*modules):
    """Imports the modules and returns them; ends the program as skipped if one is missing."""
    found = []
    for name in modules:
        try:
            found.append(__import__(name))
        except ImportError as error:
            skip(str(error))
    if "torch" in modules:
        torch = found[modules.index("torch")]
        if not torch.cuda.is_available():
            skip("no CUDA device")
        if torch.cuda.get_device_capability() < (8, 9):
            skip("the GPU has no fp8 products")
    return found[0] if len(found) == 1 else found


def skip(why):
    print(f"skip: {why}")
    sys.exit(SKIPPED)


def counters(folder=None, pid=None):
    """The counter slots in use, as dicts: of one process, or of all that wrote into the folder."""
    names, slots = reasons(), []
    folder = pathlib.Path(folder or os.environ["QSHIM_OUT"])
    for file in sorted(folder.glob(f"counters.*.{pid or '*'}.bin")):
        data = file.read_bytes()
        for offset in range(SLOT.size, len(data) - SLOT.size + 1, SLOT.size):
            (key, rule, layer, action, reason, role, entry, used,
             flops, calls, replaced, written, late) = SLOT.unpack_from(data, offset)
            if used:
                slots.append({"key": text(key), "rule": text(rule), "layer": text(layer),
                              "action": action, "reason": names[reason], "role": role,
                              "entry": entry, "flops": flops, "calls": calls,
                              "replaced": replaced, "bytes": written, "late": late})
    return slots


def kept(folder=None, pid=None):
    """Form -> (bytes, uses) of the operands that stay quantised between calls: what they take on the
    device now, and how many products used one. Of one process, or of all in the folder."""
    return {form: sums[:2] for form, sums in kept_words(folder, pid).items()}


def checked(folder=None, pid=None):
    """Form -> how many of those uses checked the whole source first."""
    return {form: sums[2] for form, sums in kept_words(folder, pid).items()}


def escaped(folder=None, pid=None):
    """Form -> how often a use found that its source had changed and nothing had told."""
    return {form: sums[3] for form, sums in kept_words(folder, pid).items()}


def kept_words(folder, pid):
    sums = dict.fromkeys(FORMS, (0, 0, 0, 0))
    folder = pathlib.Path(folder or os.environ["QSHIM_OUT"])
    for file in sorted(folder.glob(f"counters.*.{pid or '*'}.bin")):
        with file.open("rb") as stream:
            header = stream.read(KEPT.size)
        if len(header) < KEPT.size:  # being made
            continue
        words = KEPT.unpack(header)
        for form, *more in zip(FORMS, words[:4], words[4:8], words[8:12], words[12:]):
            sums[form] = tuple(map(sum, zip(sums[form], more)))
    return sums


def text(field):
    return field.split(b"\0", 1)[0].decode(errors="replace")


def decisions(folder=None):
    """Every decision logged in the folder, in order; raises if a line is not JSON."""
    lines = []
    for file in sorted(pathlib.Path(folder or os.environ["QSHIM_OUT"]).glob("decisions.*.jsonl")):
        lines += [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line.get("t") == "decision"]


def shape(key):
    """(operations, m, n, k) of a key's text; of a range of tokens, as the tuned file has, the last."""
    found = re.match(r"(\S+) m=(\d+) n=(?:\d+\.\.)?(\d+) k=(?:\d+\.\.)?(\d+)", key)
    return (found[1], *map(int, found.groups()[1:])) if found else None


def tuned_rows(written):
    """The rows of a tuned file's text, as dicts; raises ValueError where a reader would complain."""
    rows = []
    for number, line in enumerate(written.splitlines(), 1):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not line or line.startswith(";"):
            continue
        if line == "[product]":
            rows.append({})
        elif not equals or not rows or name in rows[-1] or "action" in rows[-1]:
            raise ValueError(f"line {number} is no part of a row: {line!r}")
        else:
            rows[-1][name] = value
    for row in rows:
        if not {"key", "measured", "action"} <= row.keys():
            raise ValueError(f"a row is torn: {row}")
    return rows


def library():
    return os.environ.get("QS_TEST_LIBRARY", str(ROOT / "build" / "libqshim.so"))


def bare_environment():
    """This process's environment, without anything of qshim's."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("QSHIM", "LD_PRE"))}


def preloaded(folder, **settings):
    """An environment with the preload, recording in the folder; settings as QSHIM_... variables."""
    return bare_environment() | {"LD_PRELOAD": library(), "QSHIM_OUT": str(folder),
                                 "QSHIM_QUIET": "1", **settings}


def report(command, env):
    """Runs a program: what the last line it printed says in JSON, and what it said on stderr."""
    result = subprocess.run(command, env=env, text=True, capture_output=True)
    assert result.returncode == 0, f"exit status {result.returncode}: {result.stderr[-2000:]}"
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def served():
    """How many products of this process our engine has served so far."""
    return sum(slot["replaced"] for slot in counters(pid=os.getpid()))


def sqnr(result, exact):
    """Signal to noise in dB; `exact` is in float64. Anything not finite counts as no signal."""
    noise = float(((result - exact) ** 2).sum())
    if not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(float((exact ** 2).sum()) / noise) if noise else math.inf


def digest(tensor):
    """A number that says whether two bf16 tensors have the same bits: any one change shows."""
    import torch
    bits = tensor.contiguous().view(torch.int16).flatten().long()
    return int((bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum())


def normal(*shape, seed=0):
    """Normal data, the same on every device: bf16 in the GPU's memory."""
    import torch
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16().cuda()
