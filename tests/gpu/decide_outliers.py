"""The accuracy gate on data that fp8 cannot hold, and on data that becomes so in mid-run.

Three linear layers whose inputs differ: normal; one feature of every token 2^20 times the others,
which its weights undo, as trained models have them; and the same in four tokens only. Such an
outlier takes all of the range of a scale: in e4m3 what shares it is rounded to zero. One scale for
the matrix leaves about 0 dB in both; one for each token leaves 2 dB of the second (it must stay
native) and 26 dB of the third (rows are its cure, where the chip has them). Smaller outliers would
not do: e4m3 holds a factor of 2^15 at full precision.

Then a layer in use whose input turns from the first kind into the second: after three checks in a
row its products must be the program's own again, bit for bit. Runs without the preload itself.
"""
import json
import pathlib
import sys
import tempfile

from support import (bare_environment, decisions, digest, need, preloaded, report, shape, sqnr,
                     tuned_rows)

TOKENS, IN = 4096, 8192
OUT = {"normal": 8192, "column": 7168, "tokens": 6144}  # a shape, hence a decision, each
DEGRADED = 5120
FEATURE, OUTLIER, FEW = 7, 2.0 ** 20, 4
LEAST = 20  # dB, the default policy's min_sqnr
CHECK_EVERY = 2         # uses
GOOD, BAD = 8, 24       # calls before the data degrades, and after
WARM = 3                # uses by which a product is decided


def make_weight(torch, out):
    weight = torch.randn(out, IN, device="cuda") / IN ** 0.5
    weight[:, FEATURE] /= OUTLIER
    return weight.bfloat16()


def make_input(torch, kind):
    x = torch.randn(TOKENS, IN, device="cuda")
    if kind == "column":
        x[:, FEATURE] *= OUTLIER
    elif kind == "tokens":
        x[::TOKENS // FEW, FEATURE] = OUTLIER
    return x.bfloat16()


def decibels(torch, y, x, weight):
    return sqnr(y, torch.nn.functional.linear(x.double(), weight.double()))


def layers(torch):
    told = {}
    for kind, out in OUT.items():
        x, weight = make_input(torch, kind), make_weight(torch, out)
        for _ in range(WARM + 1):
            y = torch.nn.functional.linear(x, weight)
        told[kind] = {"sqnr": decibels(torch, y, x, weight), "digest": digest(y)}
    return told


def degrade(torch):
    weight = make_weight(torch, DEGRADED)
    good, bad = make_input(torch, "normal"), make_input(torch, "column")
    told = []
    for call in range(GOOD + BAD):
        x = good if call < GOOD else bad
        y = torch.nn.functional.linear(x, weight)
        torch.cuda.synchronize()
        told.append(digest(y))
    return {"digests": told, "sqnr": decibels(torch, y, x, weight)}


def fate(lines, out):
    """The decisions on the layer with so many outputs, in order."""
    return [line for line in lines if shape(line["key"]) == ("TN", out, TOKENS, IN)]


def measured(rows, out, scale):
    """The last row of the tuned file about the layer in this scaling, None if there is none."""
    found = [row for row in rows if row["key"].startswith(f"TN m={out} ")
             and row["measured"] == "fp8" and row["scale"] == scale]
    return found[-1] if found else None


def is_bf16(line):
    return (line["action"], line["reason"]) == ("bf16", "auto")


def is_refused(row):
    return row is not None and row["action"] == "native" and float(row.get("sqnr", 99)) < LEAST


def judge_layers(told, native, lines, rows, has_rows):
    """What is wrong with a run of layers(); `native` is the same without the preload."""
    wrong, last = [], {kind: (fate(lines, out) or [{"action": "nothing", "reason": "unseen"}])[-1]
                       for kind, out in OUT.items()}

    def want(kind, action, *reasons):
        if action == "native" and is_bf16(last[kind]):
            return  # the program's own precision, by an algorithm that was found faster
        if last[kind]["action"] != action or last[kind]["reason"] not in reasons:
            wrong.append(f"{kind}: {last[kind]}")

    want("normal", "fp8", "auto")
    want("column", "native", "sqnr")
    want("tokens", *(("fp8", "auto") if has_rows else ("native", "sqnr")))
    for kind, scale in (("normal", "tensor"), ("tokens", "row")):
        if last[kind]["action"] == "fp8" and last[kind].get("scale") != scale:
            wrong.append(f"{kind}: scaled by {last[kind].get('scale')}, says the log")
    for kind, figures in told.items():
        if figures["sqnr"] < LEAST:
            wrong.append(f"{kind}: the program got {figures['sqnr']:.1f} dB")
        if not is_bf16(last[kind]) and \
                (figures["digest"] == native[kind]["digest"]) != (last[kind]["action"] == "native"):
            wrong.append(f"{kind}: the result does not fit the decision {last[kind]['action']}")
    for kind in ("column", "tokens"):
        if not is_refused(measured(rows, OUT[kind], "auto")):
            wrong.append(f"{kind}: one scale was not refused: {measured(rows, OUT[kind], 'auto')}")
    row = measured(rows, OUT["tokens"], "row")
    if has_rows and (row is None or row["action"] != "fp8" or float(row["sqnr"]) < LEAST):
        wrong.append(f"tokens: not by rows: {row}")
    return wrong


def judge_degrade(told, native, lines, said):
    """What is wrong with a run of degrade()."""
    same = [a == b for a, b in zip(told["digests"], native["digests"])]
    wrong, fates = [], [(line["action"], line["reason"]) for line in fate(lines, DEGRADED)]
    spoilt = (same[GOOD:] + [True]).index(True)
    if any(same[WARM:GOOD]):
        wrong.append("good data was not served in fp8")
    if not 0 < spoilt <= 4 * CHECK_EVERY:
        wrong.append(f"{spoilt} products of bad data were served")
    if not all(same[GOOD + spoilt:]):
        wrong.append("after the demotion a product was not the program's own")
    if fates != [("fp8", "auto"), ("native", "sqnr")]:
        wrong.append(f"the log has {fates}")
    if told["sqnr"] < LEAST:
        wrong.append(f"at the end the program got {told['sqnr']:.1f} dB")
    if "native for the rest of the run" not in said:
        wrong.append("no message says so")
    if not any(line.split()[6:8] == ["native", "sqnr"] for line in said.splitlines()
               if f" TN m={DEGRADED} " in line):
        wrong.append("the summary does not say so")
    return wrong, spoilt


def ask(env):
    return report([sys.executable, __file__, "work"], env)


def show(folder, has_rows):
    file = folder / "tuned.ini"
    native, _ = ask(bare_environment())
    told, said = ask(preloaded(folder / "run", QSHIM_SUMMARY="1", QSHIM_SET=(
        f"numerics.check_every={CHECK_EVERY};tune.file={file}")))
    lines, rows = decisions(folder / "run"), tuned_rows(file.read_text())
    wrong, spoilt = judge_degrade(told["degrade"], native["degrade"], lines, said)
    wrong += judge_layers(told["layers"], native["layers"], lines, rows, has_rows)
    assert not wrong, "; ".join(wrong)
    one = {kind: measured(rows, OUT[kind], "auto")["sqnr"] for kind in OUT}
    got = {kind: f"{told['layers'][kind]['sqnr']:.1f}" for kind in OUT}
    return (f"normal data {got['normal']} dB in fp8; outlier feature native (one scale: "
            f"{one['column']} dB); outlier tokens {got['tokens']} dB "
            f"{'by rows' if has_rows else 'native'} (one scale: {one['tokens']} dB); degraded "
            f"data: demoted after {spoilt} products, then the program's own bits")


def main():
    torch = need("torch")
    if len(sys.argv) > 1:
        torch.manual_seed(0)
        with torch.no_grad():
            print(json.dumps({"layers": layers(torch), "degrade": degrade(torch)}))
        return
    with tempfile.TemporaryDirectory() as name:
        print(show(pathlib.Path(name), torch.cuda.get_device_capability() == (9, 0)))


if __name__ == "__main__":
    main()
