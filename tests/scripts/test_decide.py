#!/usr/bin/env python3
"""What the GPU suite's decide_*.py conclude from logs, counters and tuned files, without a GPU."""

import pathlib
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "gpu"))

import decide_file
import decide_live
import decide_outliers
import decide_roles
from support import DGRAD, FP8, FWD, LT_MATMUL, SLOT, UNKNOWN, WGRAD, counters, shape, tuned_rows

ROW = """
[product]
key = TN m=4096 n=3946..4931 k=4096 bf16 fwd
measured = fp8
scale = auto
ours_us = 80
native_us = 180
driver = 13000
action = fp8
"""
ABOUT = "; What qshim measured.\n; 'action = native' leaves the product to the program.\n"
SECOND = ROW.replace("action =", "sqnr = 28.5\naction =")


def decision(action, reason, width=4096, detail="x"):
    return {"key": f"TN m={width} n=4096 k=4096 bf16", "action": action, "reason": reason,
            "detail": detail}


class Rows(unittest.TestCase):
    def test_whole_rows_are_read(self):
        rows = tuned_rows(ABOUT + ROW + SECOND)
        self.assertEqual([row.get("sqnr") for row in rows], [None, "28.5"])
        self.assertEqual(shape(rows[0]["key"]), ("TN", 4096, 4931, 4096))
        self.assertEqual(shape("NT m=256 n=512 k=21..25 bf16 wgrad"), ("NT", 256, 512, 25))
        self.assertIsNone(shape("other"))

    def test_anything_else_is_refused(self):
        for text in (ROW[:-15], ROW + "action = fp8\n", "key = x\n", ROW + "[prod", ROW + "x\n",
                     ROW.replace("scale = auto", "key = y")):
            with self.assertRaises(ValueError, msg=text):
                tuned_rows(text)


class Counters(unittest.TestCase):
    def test_slots_are_read(self):
        slot = SLOT.pack(b"TN m=1 n=2 k=3", b"wide", b"model.head", FP8, 0, FWD, LT_MATMUL, 1,
                         12.0, 7, 6, 5, 4)
        unused = bytes(SLOT.size)
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "counters.0.17.bin"
            file.write_bytes(bytes(SLOT.size) + slot + unused)
            (only,) = counters(folder, 17)
            self.assertEqual(counters(folder, 18), [])
        self.assertIsInstance(only.pop("reason"), str)
        self.assertEqual(only, {
            "key": "TN m=1 n=2 k=3", "rule": "wide", "layer": "model.head", "action": FP8,
            "role": FWD, "entry": LT_MATMUL, "flops": 12.0, "calls": 7, "replaced": 6, "bytes": 5,
            "late": 4})


class File(unittest.TestCase):
    def test_rows_must_be_as_many_as_were_measured(self):
        first = tuned_rows(ROW + SECOND + ROW.replace("= fp8", "= bf16"))
        rows = first + [{**row, "ours_us": "81"} for row in first]
        decided = [{4096: decision("fp8", "auto")}] * 2
        self.assertEqual(decide_file.judge_writers(rows, decided), [])
        self.assertIn("rows by width", decide_file.judge_writers(rows[1:], decided)[0])
        self.assertIn("written twice", decide_file.judge_writers(first * 2, decided)[0])
        bf16 = [{4096: decision("bf16", "auto")}]
        self.assertEqual(decide_file.judge_writers(first, bf16), [])
        self.assertEqual(decide_file.judge_writers(first[1:], bf16), [])
        self.assertIn("rows by width", decide_file.judge_writers(first[:1], bf16)[0])
        self.assertIn("rows by width", decide_file.judge_writers(rows[:4], bf16)[0])
        slow = [{4096: decision("native", "not-faster")}]
        self.assertEqual(decide_file.judge_writers(rows[:2], slow), [])
        self.assertIn("rows by width", decide_file.judge_writers(rows[:1], slow)[0])
        with self.assertRaises(AssertionError):
            decide_file.rows_of(decision("native", "untuned"))

    def test_a_torn_end_is_told_from_a_whole_one(self):
        self.assertEqual(decide_file.whole_rows(ABOUT + ROW), (tuned_rows(ROW), False))
        self.assertEqual(decide_file.whole_rows(ROW + ROW[:60]), (tuned_rows(ROW), True))
        self.assertEqual(decide_file.whole_rows(""), ([], False))
        with self.assertRaises(ValueError):
            decide_file.whole_rows(ROW[:60] + ROW + ROW[:60])

    def test_edits(self):
        text = ABOUT + ROW + ROW.replace("m=4096", "m=5120")
        rows = tuned_rows(decide_file.edited(text, driver="1"))
        self.assertEqual([row["driver"] for row in rows], ["1", "1"])
        first, second = tuned_rows(decide_file.pinned(text, 4096))
        self.assertEqual((first["pinned"], first["action"]), ("yes", "native"))
        self.assertEqual(second, tuned_rows(text)[1])


OUT = decide_outliers.OUT
SCALES = {"normal": "tensor", "column": None, "tokens": "row"}
GOOD = {"normal": ("fp8", "auto"), "column": ("native", "sqnr"), "tokens": ("fp8", "auto")}


def outlier_rows():
    def row(kind, scale, action, sqnr):
        return {"key": f"TN m={OUT[kind]} n=3946..4931 k=8192 bf16 fwd", "measured": "fp8",
                "scale": scale, "action": action, "sqnr": sqnr}
    return [row("normal", "auto", "fp8", "28.5"), row("column", "auto", "native", "0.1"),
            row("column", "row", "native", "2.3"), row("tokens", "auto", "native", "0.3"),
            row("tokens", "row", "fp8", "26.2")]


class Outliers(unittest.TestCase):
    def judge(self, fates=GOOD, rows=None, sqnr=26.0, has_rows=True, bits=None, scales=SCALES):
        lines = [{"key": f"TN m={OUT[kind]} n=4096 k=8192 bf16", "action": fate[0],
                  "reason": fate[1], "scale": scales[kind]} for kind, fate in fates.items()]
        told = {kind: {"sqnr": sqnr, "digest": int(fate[0] == "fp8")}
                for kind, fate in fates.items()}
        told = {kind: {**figures, **(bits or {})} for kind, figures in told.items()}
        native = {kind: {"digest": 0} for kind in OUT}
        return decide_outliers.judge_layers(
            told, native, lines, outlier_rows() if rows is None else rows, has_rows)

    def test_the_gate_is_judged(self):
        self.assertEqual(self.judge(), [])
        self.assertTrue(self.judge({**GOOD, "column": ("fp8", "auto")}))
        self.assertTrue(self.judge({**GOOD, "normal": ("native", "not-faster")}))
        self.assertTrue(self.judge({**GOOD, "tokens": ("native", "not-faster")}))
        self.assertEqual(self.judge({**GOOD, "column": ("bf16", "auto")}), [])
        self.assertTrue(self.judge({**GOOD, "normal": ("bf16", "auto")}))
        self.assertTrue(self.judge(sqnr=19.9))
        self.assertTrue(self.judge(bits={"digest": 0}))
        self.assertTrue(self.judge(scales={**SCALES, "tokens": "tensor"}))
        self.assertTrue(self.judge(scales={**SCALES, "normal": "row"}))
        for missing in (1, 3, 4):
            rows = outlier_rows()
            del rows[missing]
            self.assertTrue(self.judge(rows=rows), missing)

    def test_without_rows_outlier_tokens_stay_native(self):
        fates = {**GOOD, "tokens": ("native", "sqnr")}
        self.assertEqual(self.judge(fates, outlier_rows()[:4], has_rows=False), [])
        self.assertTrue(self.judge(fates))

    def demote(self, served=6, early=0, last=True, said=None, fates=None, sqnr=40.0):
        good, bad = decide_outliers.GOOD, decide_outliers.BAD
        same = [False] * good + [False] * served + [True] * (bad - served)
        same[decide_outliers.WARM] = bool(early)
        same[-1] = last
        key = f"TN m={decide_outliers.DEGRADED} n=4096 k=8192 bf16"
        lines = [{"key": key, "action": a, "reason": r}
                 for a, r in fates or [("fp8", "auto"), ("native", "sqnr")]]
        said = said or (f"qshim: {key}: 0.1 dB ...; native for the rest of the run\n"
                        f"qshim:   99.0  32  14  0  9.5  native  sqnr   {key}\n")
        return decide_outliers.judge_degrade(
            {"digests": [int(s) for s in same], "sqnr": sqnr}, {"digests": [1] * len(same)},
            lines, said)

    def test_the_demotion_is_judged(self):
        self.assertEqual(self.demote(), ([], 6))
        for wrong in ({"served": 0}, {"served": 9}, {"early": 1}, {"last": False},
                      {"fates": [("fp8", "auto")]}, {"sqnr": 3.0},
                      {"said": "native for the rest of the run"},
                      {"said": "qshim: 9 1 1 0 9 native sqnr TN m=5120 n=1"}):
            self.assertTrue(self.demote(**wrong)[0], wrong)


LAYERS = {"a.up": ("Linear", 64, 256), "a.gate": ("Linear", 64, 256), "h.fc": ("Conv1D", 64, 32)}


def slots(steps):
    made = []
    for name, (kind, inputs, outputs) in LAYERS.items():
        for role in (FWD, DGRAD, WGRAD):
            operations, m, n, k = decide_roles.form_of(role, kind, inputs, outputs)
            label = "a.gate" if name == "a.up" and role == WGRAD else name
            made.append({"layer": label, "role": role, "calls": steps,
                         "key": f"{operations} m={m} n={n} k={k} bf16"})
    made[6]["calls"] -= 1  # the Conv1D's first forward product
    return made + [{**made[6], "role": UNKNOWN, "calls": 1}]


class Roles(unittest.TestCase):
    def test_forms(self):
        self.assertEqual(decide_roles.form_of(WGRAD, "Linear", 1, 2),
                         ("NT", 1, 2, decide_roles.TOKENS))
        self.assertEqual(decide_roles.form_of(WGRAD, "Conv1D", 1, 2),
                         ("NT", 2, 1, decide_roles.TOKENS))
        self.assertEqual(decide_roles.form_of(DGRAD, "Conv1D", 1, 2),
                         ("TN", 1, decide_roles.TOKENS, 2))
        self.assertEqual(decide_roles.form_of(FWD, "Linear", 1, 2),
                         ("TN", 2, decide_roles.TOKENS, 1))

    def test_counts_are_judged(self):
        self.assertEqual(decide_roles.judge_roles(LAYERS, slots(6), 6), [])
        self.assertEqual(decide_roles.named(LAYERS, slots(6), 6), 100)
        for i in range(len(slots(6))):
            fewer, other = slots(6), slots(6)
            fewer[i]["calls"] -= 1
            other[i]["key"] = "NN m=1 n=2 k=3 bf16"
            self.assertTrue(decide_roles.judge_roles(LAYERS, fewer, 6), i)
            self.assertTrue(decide_roles.judge_roles(LAYERS, other, 6), i)
        unknown = slots(6)
        unknown[-1]["calls"], unknown[6]["calls"] = 2, 4
        self.assertTrue(decide_roles.judge_roles(LAYERS, unknown, 6))

    def test_names_of_gradients(self):
        astray = slots(6)
        astray[8]["layer"] = "elsewhere"
        self.assertEqual(decide_roles.judge_roles(LAYERS, astray, 6), [])
        self.assertAlmostEqual(decide_roles.named(LAYERS, astray, 6), 200 / 3)

    def test_shares(self):
        said = "qshim: 47 steps of 87 products, 31.500 ms each, 41.3 % of it in products\n"
        self.assertEqual(decide_roles.share_said(said), 41.3)
        self.assertIsNone(decide_roles.share_said(said.split(", 41")[0]))
        times = {"aten::mm": 3e5, "aten::addmm": 1e5, "aten::add": 5e5}
        self.assertAlmostEqual(decide_roles.share_of(times, 2), 20)


class Live(unittest.TestCase):
    RIGHT = {"calls": 9, "fp8_s": 1.0, "sqnr": 28.0, "kept": True, "native_s": 1.0, "same": True,
             "differs": True}

    def judge(self, calls=9, fates=("native", "fp8", "native"), said="did you mean 'action'?", **told):
        key = f"TN m={decide_live.OUT} n={decide_live.TOKENS} k={decide_live.IN} bf16"
        lines = [{"key": key, "action": fate} for fate in fates]
        slots = [{"key": key, "calls": calls}, {"key": "NN m=1 n=1 k=1", "calls": 3}]
        return decide_live.judge({**self.RIGHT, **told}, said, lines, slots)

    def test_edits_are_judged(self):
        self.assertEqual(self.judge(), [])
        for wrong in ({"calls": 8}, {"fates": ("native", "fp8")}, {"said": ""}, {"fp8_s": None},
                      {"native_s": None}, {"sqnr": 3.0}, {"kept": False}, {"same": False},
                      {"differs": False}):
            self.assertEqual(len(self.judge(**wrong)), 1, wrong)


if __name__ == "__main__":
    program = unittest.main(exit=False, verbosity=0)
    failed = len(program.result.failures) + len(program.result.errors)
    print(f"{program.result.testsRun - failed} passed, {failed} failed")
    sys.exit(failed > 0)
