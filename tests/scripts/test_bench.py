#!/usr/bin/env python3
"""Tests of the benchmarks' machinery: lock step, figures, reports, tables, command lines.

Needs neither a GPU nor PyTorch nor the library: the children here are this file again, with calls
that only pretend, and what is preloaded into them is libm, which they have anyway.
"""
import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
import bench_decode  # noqa: E402
import bench_launch  # noqa: E402
import bench_layer  # noqa: E402
import bench_lib  # noqa: E402
import bench_linear  # noqa: E402
import bench_llama  # noqa: E402
import bench_nf4  # noqa: E402
import bench_programs  # noqa: E402
import bench_tables  # noqa: E402
import bench_worker  # noqa: E402
from bench_lib import Column, Effort  # noqa: E402

HARMLESS = pathlib.Path("libm.so.6")
SIDES = {"native": None, "qshim": {"QSHIM_SET": "one"}, "fp8": {"QSHIM_SET": "two"}}
COLUMNS = [Column("native", "native", "work"), Column("qshim", "qshim", "work"),
           Column("fp8", "fp8", "work")]
LOG, BROKEN = "TEST_BENCH_LOG", "TEST_BENCH_BROKEN"


# ---- the pretended child ------------------------------------------------------------------------


class PretendTimer:
    """Takes the time it says, and writes down when it began and ended and what it ran."""

    def __init__(self):
        self.side = os.environ.get("QSHIM_SET", "plain").removesuffix(";tune.file=")

    def idle(self):
        pass

    def block(self, step, reps, wait_s=0.0):
        begin = time.monotonic()
        for _ in range(reps):
            ms = step()
        with open(os.environ[LOG], "a") as log:
            log.write(json.dumps([self.side, reps, begin, time.monotonic()]) + "\n")
        return ms, 0.001

    def alone(self, step, reps, host_s):
        return self.block(step, reps)[0] / 2


def pretended(case):
    calls = []
    if "keep" in case and "QSHIM_OUT" in os.environ:
        os.makedirs(os.environ["QSHIM_OUT"], exist_ok=True)
        write_kept(os.environ["QSHIM_OUT"], os.getpid(), case["keep"])

    def work():
        calls.append(None)
        time.sleep(0.0005)
        return case.get("ms", 0.5)

    def fail():
        raise ValueError("does not work")

    def noise():
        print('{"ms": 99}', flush=True)
        os.write(1, b"noise\n")
        return 1.0

    steps = {"work": work, "slow": lambda: 10 * work(), "fail": fail, "noise": noise,
             "die": lambda: os._exit(7), "sleep": lambda: time.sleep(60)}
    steps |= {name: work for name in ("linear graph", "linear eager", "graph", "products",
                                      "generate", "peer graph", *bench_launch.OPERATIONS)}
    answers = {"calls": lambda: len(calls), "memory linear": lambda: 6 << 20}
    return steps, answers, {"peer": "not installed", "peer eager": "refused", "lean": "no compiler"}


def environment():
    if os.environ.get(BROKEN):
        raise RuntimeError("no CUDA device")
    return {"preload": os.environ.get("LD_PRELOAD"), "pid": os.getpid(),
            "qshim": sorted(k for k in os.environ if k.startswith("QSHIM"))}


# ---- lock step ----------------------------------------------------------------------------------


class LockStep(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.log = pathlib.Path(self.folder.name) / "log"
        self.addCleanup(self.folder.cleanup)
        os.environ[LOG] = str(self.log)
        self.addCleanup(os.environ.pop, BROKEN, None)
        # What a failing call prints is wanted at a terminal, not here.
        quiet = open(os.devnull, "w")
        self.addCleanup(quiet.close)
        errors, sys.stderr = sys.stderr, quiet
        self.addCleanup(setattr, sys, "stderr", errors)

    def sides(self, names=tuple(SIDES)):
        return bench_lib.Sides(__file__, {n: SIDES[n] for n in names}, HARMLESS)

    def logged(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def measured(self, columns, effort=Effort(blocks=4, warm_ms=1, warm_reps=2), case={}):
        with self.sides() as sides:
            bench_lib.load(sides, case, {})
            return bench_lib.measure(sides, columns, effort)

    def test_all_sides_have_the_same_few_cores(self):
        with self.sides() as sides:
            cores = [os.sched_getaffinity(s.process.pid) for s in sides.sides.values()]
        self.assertEqual(cores[1:], cores[:-1])
        self.assertLessEqual(len(cores[0]), bench_lib.CORES)

    def test_no_two_sides_run_at_the_same_time(self):
        self.measured(COLUMNS)
        spans = sorted((begin, end) for _, _, begin, end in self.logged())
        self.assertGreater(len(spans), 12)
        for (_, end), (begin, _) in zip(spans, spans[1:]):
            self.assertLessEqual(end, begin)

    def test_blocks_alternate_in_the_order_a_b_b_a_from_each_side_on(self):
        self.measured(COLUMNS, Effort(blocks=8, warm_ms=0, warm_reps=1, apart=False))
        order = [side for side, *_ in self.logged()][len(COLUMNS):]
        ways = (["plain", "one", "two"], ["one", "two", "plain"], ["two", "plain", "one"])
        self.assertEqual(order, [side for way in (*ways, ways[0]) for side in way + way[::-1]])

    def test_the_first_column_sets_the_repetitions_of_all(self):
        columns = [COLUMNS[0], Column("slow", "qshim", "slow")]
        results = self.measured(columns, Effort(blocks=2, block_ms=8, warm_ms=0, apart=False),
                                {"ms": 2.0})
        blocks = [reps for _, reps, _, _ in self.logged() if reps > 1]
        self.assertEqual(blocks, [4] * 4)
        self.assertEqual([len(r) for r in results.values()], [2, 2])

    def test_short_calls_are_measured_apart_and_long_ones_not(self):
        effort = Effort(blocks=2, warm_ms=0)
        short = self.measured(COLUMNS, effort, {"ms": 0.5})["native"][0]
        long = self.measured(COLUMNS, effort, {"ms": 5.0})["native"][0]
        self.assertEqual((short["gpu_ms"], long["gpu_ms"]), (0.25, 5.0))

    def test_without_apart_a_block_is_exactly_its_repetitions(self):
        with self.sides(("native",)) as sides:
            bench_lib.load(sides, {"ms": 400.0}, {})
            bench_lib.measure(sides, COLUMNS[:1], Effort(
                blocks=4, block_ms=0, warm_ms=0, warm_reps=3, least_reps=2, apart=False))
            self.assertEqual(sides["native"].tell("calls"), 3 + 4 * 2)

    def test_told_to_wake_a_block_has_untimed_calls_first(self):
        effort = Effort(blocks=2, block_ms=4, warm_ms=0, warm_reps=1, apart=False, wake=True)
        with self.sides(("native",)) as sides:
            bench_lib.load(sides, {"ms": 0.25}, {})
            bench_lib.measure(sides, COLUMNS[:1], effort)
        self.assertEqual([reps for _, reps, _, _ in self.logged()], [1, 4, 16, 4, 16])

    def test_a_failing_column_leaves_the_others(self):
        results = self.measured([COLUMNS[0], Column("bad", "qshim", "fail"), COLUMNS[2]])
        self.assertEqual(results["bad"], {"error": "ValueError: does not work"})
        self.assertEqual((len(results["native"]), len(results["fp8"])), (4, 4))

    def test_what_libraries_print_is_no_answer(self):
        results = self.measured([COLUMNS[0], Column("noisy", "qshim", "noise")])
        self.assertEqual({b["ms"] for b in results["noisy"]}, {1.0})

    def test_what_libraries_print_stays_out_of_the_table(self):
        result = subprocess.run([sys.executable, __file__, "--noise"], capture_output=True)
        self.assertEqual((result.returncode, result.stdout), (0, b""))
        self.assertIn(b"noise", result.stderr)

    def kept_sides(self):
        return bench_lib.Sides(__file__, {"native": None, "nf4": {}, "fp8": {}, "auto": {}},
                               HARMLESS)

    def nf4_row(self, sides, kept, **case):
        columns = bench_nf4.OWN + (("peer", "native", "peer"),)
        return bench_nf4.measure(sides, columns, {"tokens": 1, "hidden": 4096, "ms": 3.2, **case},
                                 Effort(blocks=2, warm_ms=0, warm_reps=1, apart=False), kept)

    def test_nf4_measures_both_modes_of_a_call(self):
        with self.kept_sides() as sides:
            row = self.nf4_row(sides, {})
        self.assertEqual(row["calls"], 16)
        self.assertAlmostEqual(row["graph"]["native"]["ms"]["median"], 3.2 / 16)
        self.assertEqual([row["eager"][side]["ratio"]["median"] for side in bench_nf4.SHIMMED],
                         [1.0] * 3)
        self.assertEqual((row["graph"]["peer"]["ratio"]["median"], row["eager"]["peer"]),
                         (1.0, {"error": "refused"}))
        self.assertEqual(bench_lib.failures(row), [])

    def test_what_is_kept_counts_as_memory_of_the_layers_it_was_made_of(self):
        with self.kept_sides() as sides:
            wide, narrow = {}, {}
            rows = [self.nf4_row(sides, wide, keep=100), self.nf4_row(sides, wide, keep=160),
                    self.nf4_row(sides, narrow, keep=200)]
        own = 6 << 20
        self.assertEqual([row["memory"]["nf4"] * 16 - own for row in rows], [107, 167, 40])
        self.assertEqual((rows[0]["memory"]["native"], rows[0]["memory"]["peer"]),
                         (own / 16, None))
        self.assertEqual([rows[0]["uses"][side]["nf4"] for side in bench_nf4.SHIMMED], [3] * 3)

    def launch_rows(self, **case):
        with self.sides(("native", "qshim")) as sides:
            return list(bench_launch.measure(
                sides, {"weights": 2, "ms": 0.064, **case},
                Effort(blocks=2, block_ms=1, warm_ms=0, warm_reps=1, apart=False)))

    def test_launches_are_measured_one_by_one_and_the_kept_weights_counted(self):
        rows = self.launch_rows(keep=2 * bench_launch.KEPT_BYTES)
        self.assertEqual([row["operation"] for row in rows], list(bench_launch.OPERATIONS))
        for row in rows:
            self.assertAlmostEqual(row["columns"]["native"]["us"]["median"], 4.0)
            self.assertAlmostEqual(row["columns"]["qshim"]["more"]["median"], 0.0)
        bench_launch.check(rows)

    def test_weights_that_are_not_all_kept_or_too_many_fail_the_run(self):
        for size, kept in ((2 * bench_launch.KEPT_BYTES - 1, 1), (3 * bench_launch.KEPT_BYTES, 3)):
            rows = self.launch_rows(keep=size)
            with self.assertRaisesRegex(bench_lib.Failed, f"{kept} of 2 weights were kept"):
                bench_launch.check(rows)

    def test_a_launch_that_fails_is_named(self):
        with self.assertRaisesRegex(bench_lib.Failed, "qshim 2: out of memory"):
            bench_launch.microseconds({"qshim 1": blocks(1), "qshim 2": {"error": "out of memory"}})

    def test_a_launch_takes_the_mean_of_all_processes_of_a_side(self):
        self.assertEqual(bench_launch.microseconds({"native 1": blocks(0.16, 0.32),
                                                    "native 2": blocks(0.32, 0.64)}), [15.0, 30.0])

    def test_decode_measures_every_kind_per_token(self):
        limit, bench_decode.effort_for = bench_decode.effort_for, lambda kind, quick: Effort(
            blocks=2, block_ms=0, warm_ms=0, warm_reps=1, least_reps=1, apart=False)
        self.addCleanup(setattr, bench_decode, "effort_for", limit)
        with self.kept_sides() as sides:
            row = bench_decode.measure(sides, {"batch": 8, "ms": 64.0},
                                       ["graph", "lean", "generate"], True)
        figures = {kind: part["columns"] for kind, part in row["kinds"].items()}
        self.assertEqual(figures["graph"]["nf4"]["ms"]["median"], 64.0)
        self.assertEqual(figures["generate"]["fp8"]["ms"]["median"],
                         64.0 / bench_decode.NEW_TOKENS)
        self.assertEqual(figures["lean"], {side: {"error": "no compiler"}
                                           for side in bench_decode.SIDES})
        self.assertEqual(len(bench_lib.failures(row)), 3)
        self.assertEqual(bench_decode.slow([row]), [])

    def test_variants_that_are_not_to_be_had_are_named(self):
        with self.sides(("native", "qshim")) as sides:
            missing = bench_lib.load(sides, {}, {})
        self.assertEqual(missing[("qshim", "peer")], "not installed")

    def test_a_child_that_dies_ends_the_run_and_the_other_children(self):
        with self.assertRaisesRegex(bench_lib.Failed, "qshim process ended with status 7"):
            with self.sides() as sides:
                bench_lib.load(sides, {}, {})
                bench_lib.measure(sides, [Column("x", "qshim", "die")], Effort())
        for side in sides.sides.values():
            self.assertIsNotNone(side.process.poll())

    def test_a_child_that_does_not_answer_is_given_up(self):
        limit, patience = bench_lib.LIMIT_S, bench_lib.LEAVE_S
        try:
            with self.assertRaisesRegex(bench_lib.Failed, "not answered"):
                with self.sides(("native",)) as sides:
                    bench_lib.load(sides, {}, {})
                    bench_lib.LIMIT_S = bench_lib.LEAVE_S = 0.5  # it has started, however slowly
                    bench_lib.measure(sides, [Column("x", "native", "sleep")], Effort())
        finally:
            bench_lib.LIMIT_S, bench_lib.LEAVE_S = limit, patience
        self.assertEqual(sides["native"].process.poll(), -signal.SIGKILL)

    def test_a_child_with_nothing_to_measure_on_says_so(self):
        os.environ[BROKEN] = "1"
        with self.assertRaisesRegex(bench_lib.Failed, "native: no CUDA device"):
            with self.sides():
                self.fail("started")

    def test_only_the_sides_of_qshim_are_preloaded(self):
        with preserved(QSHIM_POLICY="lossless", QSHIM="off", LD_PRELOAD="libc.so.6"):
            with self.sides() as sides:
                native, qshim = sides["native"].facts, sides["qshim"].facts
        self.assertEqual((native["preload"], native["qshim"]), (None, []))
        self.assertEqual(qshim["preload"], str(HARMLESS))
        self.assertEqual(qshim["qshim"],
                         ["QSHIM_OUT", "QSHIM_QUIET", "QSHIM_SET", "QSHIM_SUMMARY"])

    def test_children_leave_when_the_parent_is_killed(self):
        parent = subprocess.Popen([sys.executable, __file__, "--hold"], stdout=subprocess.PIPE)
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.communicate()
        self.assertTrue(gone_within(pid, 10), f"process {pid} is still there")


@contextlib.contextmanager
def preserved(**variables):
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def write_kept(folder, pid, bytes_of_nf4):
    """A counters file without slots, whose header has words about kept operands."""
    words = [0, 0, bytes_of_nf4, 7, 1, 2, 3, 4, 0, 0, 2, 1]
    pathlib.Path(folder, f"counters.0.{pid}.bin").write_bytes(
        bytes(120) + b"".join(word.to_bytes(8, "little") for word in words) + bytes(40))


def gone_within(pid, seconds):
    """A zombie that nobody reaps has left, too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def alone(what):
    """Runs one child without the tests around it: to be killed, or to be listened to."""
    with tempfile.NamedTemporaryFile() as log, preserved(**{LOG: log.name}):
        with bench_lib.Sides(__file__, {"native": None}, HARMLESS) as sides:
            if what == "--noise":
                bench_lib.load(sides, {}, {})
                sides["native"].ask("warm", variant="noise", ms=0, reps=1)
            else:
                print(sides["native"].facts["pid"], flush=True)
                time.sleep(60)


# ---- figures ------------------------------------------------------------------------------------


def blocks(*values):
    return [{"ms": v, "gpu_ms": v} for v in values]


class Figures(unittest.TestCase):
    def test_the_spread_is_the_median_and_two_percentiles(self):
        self.assertEqual(bench_lib.spread([5, 1, 2, 4, 3, 6]), {"p20": 2, "median": 3.5, "p80": 5})
        self.assertEqual(bench_lib.spread([7.0]), {"p20": 7.0, "median": 7.0, "p80": 7.0})

    def test_ratios_are_those_of_neighbours_and_so_free_of_drift(self):
        out = bench_lib.figures({"native": blocks(1, 2, 4), "qshim": blocks(0.5, 1, 2)}, "native")
        self.assertEqual(out["qshim"]["ratio"], {"p20": 2, "median": 2, "p80": 2})
        self.assertEqual(out["qshim"]["ms"]["median"], 1)
        self.assertNotIn("ratio", out["native"])

    def test_a_failed_base_leaves_times_without_ratios(self):
        out = bench_lib.figures({"native": {"error": "x"}, "qshim": blocks(1, 1)}, "native")
        self.assertEqual(out["native"], {"error": "x"})
        self.assertNotIn("ratio", out["qshim"])

    def test_ratios_are_left_out_where_the_base_is_not_there(self):
        self.assertNotIn("ratio", bench_lib.figures({"qshim": blocks(1, 1)}, "native")["qshim"])

    def test_a_step_of_many_calls_is_divided_and_its_ratio_is_not(self):
        out = bench_lib.per_call(bench_lib.figures(
            {"native": blocks(8, 8), "nf4": blocks(4, 4), "bad": {"error": "x"}}, "native"), 4)
        self.assertEqual((out["nf4"]["ms"]["median"], out["nf4"]["gpu_ms"]["p80"]), (1.0, 1.0))
        self.assertEqual((out["nf4"]["ratio"]["median"], out["bad"]), (2.0, {"error": "x"}))

    def test_bytes_and_uses_of_kept_operands_are_read_by_form(self):
        with tempfile.TemporaryDirectory() as folder:
            for pid in (5, 6):
                write_kept(folder, pid, bytes_of_nf4=35)
            pathlib.Path(folder, "counters.0.7.bin").write_bytes(bytes(100))
            self.assertEqual(bench_lib.support.kept(folder, 5),
                             {"fp8": (0, 1), "fp8 turned": (0, 2), "nf4": (35, 3),
                              "fp8 tiles": (7, 4)})
            self.assertEqual(bench_lib.support.kept(folder)["nf4"], (70, 6))
            self.assertEqual(bench_lib.support.checked(folder),
                             {"fp8": 0, "fp8 turned": 0, "nf4": 4, "fp8 tiles": 2})

    def test_no_weight_in_four_bits_stays_in_the_cache(self):
        for hidden in bench_nf4.HIDDEN:
            packed = bench_nf4.layers_of(hidden) * hidden * hidden * 4.25 / 8
            self.assertGreater(packed, 120e6)

    def test_peers_have_columns_only_where_they_are_installed(self):
        both = {"bitsandbytes": "0.50", "torchao": "0.15"}
        labels = [label for label, *_ in bench_nf4.columns_for(both, quick=False)]
        self.assertEqual(labels, ["native", "nf4", "fp8", "auto", "bitsandbytes", "torchao",
                                  "torchao compiled"])
        self.assertNotIn("torchao compiled",
                         [label for label, *_ in bench_nf4.columns_for(both, quick=True)])
        self.assertEqual(bench_nf4.columns_for({"torchao": None}, quick=False), bench_nf4.OWN)

    def test_generate_below_the_limit_is_named(self):
        def row(batch, **ratios):
            return {"batch": batch, "kinds": {"generate": {"columns": {
                "native": {"ms": {}}, **{side: {"ratio": {"median": value}}
                                         for side, value in ratios.items()}}}}}
        self.assertEqual(bench_decode.slow([row(1, nf4=0.99, fp8=0.97), row(8, nf4=0.98)]),
                         [[1, "fp8", 0.97]])
        failed = {"batch": 1, "kinds": {"generate": {"columns": {"nf4": {"error": "x"}}}}}
        self.assertEqual(bench_decode.slow([failed]), [[1, "nf4", 0.0]])

    def test_loss_curves_are_compared_at_their_worst(self):
        self.assertEqual(bench_programs.hundredths(list(range(250))), [89.5, 189.5])
        self.assertAlmostEqual(bench_programs.worst_difference([2.0, 1.0], [2.01, 0.97]), 0.03)
        self.assertIsNone(bench_programs.worst_difference([1.0], None))

    def test_processes_of_a_side_are_one_column_of_their_medians(self):
        self.assertEqual(bench_programs.members("native", "gpt"), ["native"])
        self.assertEqual(bench_programs.members("again", "mlp"), ["again"])
        names = bench_programs.members("qshim", "mlp")
        self.assertEqual(names[:2], ["qshim", "qshim 2"])
        self.assertEqual(len(names), 1 + bench_programs.MORE["mlp"])
        blocks = [[{"ms": first, "gpu_ms": 1.0}, {"ms": second, "gpu_ms": 1.0}]
                  for first, second in ((1.0, 7.0), (2.0, 5.0), (9.0, 6.0))]
        self.assertEqual([b["ms"] for b in bench_programs.pooled(blocks)], [2.0, 6.0])
        self.assertEqual(bench_programs.pooled([blocks[0], {"error": "gone"}]), {"error": "gone"})

    def test_the_table_of_programs_tells_losses_and_those_of_two_native_runs(self):
        def of(value):
            return {"median": value, "p20": value, "p80": value}
        columns = {"native": {"ms": of(20.0)}, "again": {"ratio": of(1.02)},
                   "qshim": {"ms": of(18.0), "ratio": of(1.1)}, "fp8": {"ms": of(16.0), "ratio": of(1.25)}}
        rows = [{"program": "gpt", "columns": columns, "best": ["fp8", 1.25],
                 "difference": 0.0123, "control": 0.0004},
                {"program": "mlp", "columns": {"native": {"ms": of(1.0)}, "qshim": {"error": "x"}},
                 "best": [None, None]}]
        table = bench_tables.programs({"steps": 500, "results": rows})
        self.assertIn("| gpt | 20.0 | 1.02 (1.02–1.02) | 1.10 (1.10–1.10) | 1.25 (fp8) | 0.88 | 0.0123 | 0.0004 |",
                      table)
        self.assertRegex(table, r"\| mlp \| 1\.000? \| – \| – \| – \| – \| – \| – \|")

    def test_the_best_policy_by_hand_is_the_fastest_that_ran(self):
        def of(value):
            return {"ratio": {"median": value}}
        columns = {"native": {}, "qshim": of(1.5), "fp8": of(1.1), "bf16": of(1.2),
                   "fp8 by rows": {"error": "x"}}
        self.assertEqual(bench_programs.best_by_hand(columns), ("bf16", 1.2))
        self.assertEqual(bench_programs.best_by_hand({"native": {}}), (None, None))

    def test_policies_by_hand_are_variables(self):
        self.assertEqual(bench_programs.variables("action=fp8;scale=row"),
                         {"QSHIM_SET": "default.action=fp8;default.scale=row"})
        self.assertEqual(bench_programs.variables("QSHIM_POLICY=lossless"),
                         {"QSHIM_POLICY": "lossless"})

    def test_served_counts_what_was_called_between_two_readings(self):
        before = {"a": (5, 5, "auto"), "b": (3, 0, "small")}
        after = {"a": (9, 8, "auto"), "b": (3, 0, "small"), "c": (2, 0, "dtype")}
        self.assertEqual(bench_lib.served(before, after), [
            {"product": "a", "calls": 4, "replaced": 3, "reason": "auto"},
            {"product": "c", "calls": 2, "replaced": 0, "reason": "dtype"}])

    def test_only_columns_of_ours_must_not_fail(self):
        rows = [{"columns": {"native": {"ms": {}}, "torchao": {"error": "absent"}}}]
        self.assertEqual(bench_lib.failures(rows), [])
        rows.append({"columns": {"qshim": {"error": "bad"}}})
        self.assertEqual(bench_lib.failures(rows), [("qshim", "bad")])

    def test_enough_sets_are_rotated_for_none_to_stay_in_the_cache(self):
        for size in (1 << 23, 1 << 26, 1 << 30):
            self.assertGreaterEqual(bench_worker.sets_of(size) * size, 180 << 20)
        self.assertEqual(bench_worker.sets_of(1 << 40), 1)

    def test_the_layer_has_twelve_products_of_the_published_work(self):
        case = bench_layer.shape(bench_layer.DEFAULT)
        work = sum(3 * 2 * case["tokens"] * k * n for k, n in bench_layer.layers_of(case))
        # 32.014 ms at 599 TFLOP/s
        self.assertAlmostEqual(work / 32.014e-3, 599e12, delta=1e12)

    def test_dgrad_and_wgrad_of_a_layer_follow_each_other_backwards(self):
        products = [{g: (g, i) for g in ("fprop", "dgrad", "wgrad", "tick")} for i in range(2)]
        self.assertEqual(bench_layer.ordered(products)["layer"], [
            ("fprop", 0), ("tick", 0), ("fprop", 1), ("tick", 1), ("dgrad", 1), ("wgrad", 1),
            ("tick", 1), ("dgrad", 0), ("wgrad", 0), ("tick", 0)])

    def test_the_possible_ratio_is_amdahls(self):
        found = bench_llama.ceiling({"all": 8.0, "products": 5.0}, step_ms=10.0)
        self.assertEqual(found["share"], 0.5)
        self.assertAlmostEqual(found["ratio"], 1 / (0.5 + 0.5 / bench_llama.PRODUCT_RATIO))
        self.assertIsNone(bench_llama.ceiling(None, 10.0))

    def test_attention_is_no_product_and_every_gemm_kernel_is(self):
        def counts(name):
            return bool(bench_llama.PRODUCTS.search(name)
                        and not bench_llama.NOT_PRODUCTS.search(name))
        self.assertTrue(counts("nvjet_sm90_tst_256x128_64x4_2x1_v_bz_TNT"))
        self.assertTrue(counts("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"))
        self.assertTrue(counts("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>"))
        self.assertFalse(counts("fmha_cutlassF_bf16_aligned_64x64_rf_sm80_gemm"))
        self.assertFalse(counts("void at::native::vectorized_elementwise_kernel<4>"))

    def test_a_sweep_names_the_worst_by_either_clock_and_all_below_the_limit(self):
        def row(m, least, gpu_ratio):
            return {"m": m, "columns": {"qshim": {"ms": {}, "ratio": {"median": least},
                                                  "least_ratio": least,
                                                  "gpu_ratio": {"median": gpu_ratio}}}}
        found = bench_linear.summary([row(1, 1.0, 1.0), row(2, 1.2, 0.7), row(3, 0.9, 1.4)])
        self.assertEqual(found["worst"]["m"], 2)
        self.assertEqual([r["m"] for r in found["below"]], [2, 3])

    def test_a_size_is_doubted_by_its_median_and_judged_by_the_fastest_blocks(self):
        def row(ratio, least):
            return {"columns": {"qshim": {"ms": {}, "ratio": {"median": ratio},
                                          "least_ratio": least, "gpu_ratio": {"median": 1.0}}}}
        self.assertTrue(bench_linear.doubtful(row(0.9, 1.0)))
        self.assertTrue(bench_linear.doubtful(row(1.0, 0.9)))
        self.assertFalse(bench_linear.doubtful(row(1.0, 1.0)))
        self.assertFalse(bench_linear.doubtful({"columns": {"qshim": {"error": "x"}}}))
        self.assertEqual(bench_linear.summary([row(0.9, 1.0)])["below"], [])
        self.assertEqual(len(bench_linear.summary([row(1.0, 0.9)])["below"]), 1)

    def test_blocks_of_several_processes_count_together(self):
        def blocks(*times):
            return [{"ms": t, "gpu_ms": 1.0} for t in times]
        joined = bench_lib.joined({"native": blocks(4, 3), "qshim": blocks(6, 5)},
                                  {"native": blocks(5), "qshim": blocks(3)})
        self.assertEqual(bench_lib.figures(joined, "native")["qshim"]["least_ratio"], 1.0)
        self.assertEqual(len(joined["qshim"]), 3)
        self.assertEqual(bench_lib.joined({}, {"native": blocks(1)}), {"native": blocks(1)})
        failed = {"error": "x"}
        self.assertEqual(bench_lib.joined({"a": failed}, {"a": blocks(1)}), {"a": failed})
        self.assertEqual(bench_lib.joined({"a": blocks(1)}, {"a": failed}), {"a": failed})


# ---- reports and tables -------------------------------------------------------------------------


def figure(ms, ratio=None):
    out = {name: {"p20": 0.9 * ms, "median": ms, "p80": 1.1 * ms} for name in ("ms", "gpu_ms")}
    if ratio:
        out |= {name: {"p20": ratio - 0.01, "median": ratio, "p80": ratio + 0.01}
                for name in ("ratio", "gpu_ratio")} | {"least_ratio": ratio}
    return out


def report_of(script, results, **more):
    report = {"script": script, "date": "2026-12-01T10:00:00+00:00", "commit": "0123456789abcdef",
              "dirty": False, "policy": "default", "complete": True, "effort": {"blocks": 8},
              "machine": {"gpu": "GPU X", "driver": "1.2", "cuda": "13.0", "cublas": "13.1.0",
                          "torch": "2.11"}, "results": results, **more}
    return report | {"digest": bench_lib.digest(report)}


def linear_row(m=8192, replaced=3, **columns):
    return {"m": m, "k": 4096, "n": 1024, "forward": False,
            "columns": {"native": figure(4.1), "qshim": figure(2.5, 1.64),
                        "fp8": figure(2.5, 1.63), "ceiling": figure(2.1, 1.95), **columns},
            "products": [{"product": "TN", "calls": 9, "replaced": replaced, "reason": "auto"}]}


def layer_report():
    group = {"native": figure(32.0), "qshim": figure(20.0, 1.6), "fp8": figure(20.5, 1.56),
             "ceiling": figure(17.0, 1.88)}
    return report_of("bench_layer.py", [{"tokens": 15872, "hidden": 4096, "ffn": 16384, "groups": {
        name: group for name in bench_layer.GROUPS}, "products": []}])


def llama_report():
    part = {"columns": {"native": figure(300.0) | {"tokens_per_s": 53000.0},
                        "qshim": figure(250.0, 1.2) | {"tokens_per_s": 64000.0}},
            "products": [], "ceiling": {"share": 0.45, "ratio": 1.27}}
    return report_of("bench_llama.py", [{"title": "1.1 B", "train": part, "prefill": part,
                                         "losses": {"native": [9.0, 8.1], "qshim": [9.0, 8.2]}}])


def nf4_report(**more):
    row = {"tokens": 32, "hidden": 8192, "calls": 4, "uses": {}, "eager": {
        "native": figure(0.04), "nf4": figure(0.02, 2.0), "fp8": {"error": "x"},
        "auto": figure(0.032, 1.25)},
        "graph": {"native": figure(0.0342), "nf4": figure(0.0125, 2.74), "fp8": figure(0.02, 1.7),
                  "auto": figure(0.0285, 1.2)},
        "memory": {"native": 128 << 20, "nf4": 162 << 20, "fp8": None, "auto": 129 << 20},
        "served": {"nf4": [{"calls": 8, "replaced": 6}], "fp8": [],
                   "auto": [{"calls": 8, "replaced": 2}]}}
    return report_of("bench_nf4.py", [row], absent=["bitsandbytes", "torchao"], **more)


def decode_report(below=()):
    columns = {"native": figure(7.83), "nf4": figure(5.0, 1.57), "fp8": figure(6.0, 1.3)}
    row = {"batch": 8, "model": "8 B", "context": 512,
           "kinds": {kind: {"columns": columns} for kind in bench_decode.KINDS},
           "kept": {"nf4": {"nf4": (4 << 30, 9)}, "fp8": {"fp8": (5 << 30, 1),
                                                          "fp8 tiles": (1 << 29, 1)}}}
    return report_of("bench_decode.py", [row], limit=0.98, below=list(below))


class Tables(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def write(self, name, report):
        (pathlib.Path(self.folder.name) / f"{name}.json").write_text(
            report if isinstance(report, str) else json.dumps(report))

    def results_table(self, *arguments):
        result = subprocess.run([sys.executable, "-B", SCRIPTS / "results_table", *arguments],
                                capture_output=True, text=True)
        return result.returncode, result.stdout.strip(), result.stderr.strip()

    def table(self, name, report):
        self.write(name, report)
        status, out, err = self.results_table(name, self.folder.name)
        self.assertEqual((status, err), (0, ""))
        return out

    def test_a_report_that_is_not_there_says_not_measured(self):
        for name in (*bench_tables.TABLES, "summary"):
            self.assertEqual(self.results_table(name, self.folder.name),
                             (0, "not measured on this commit", ""))

    def test_a_report_edited_by_hand_is_refused(self):
        report = layer_report()
        report["results"][0]["groups"]["layer"]["qshim"]["ms"]["median"] = 15.0
        self.write("layer", report)
        status, out, err = self.results_table("layer", self.folder.name)
        self.assertEqual((status, out), (1, ""))
        self.assertIn("measure again", err)

    def test_a_damaged_report_is_refused(self):
        for text in ("{", "[]", "{}"):
            self.write("layer", text)
            self.assertEqual(self.results_table("layer", self.folder.name)[:2], (1, ""))

    def test_an_unknown_table_is_an_error_of_usage(self):
        self.assertEqual(self.results_table("nothing")[0], 2)
        self.assertEqual(self.results_table()[0], 2)

    def test_linear_has_a_row_for_each_size_and_a_dash_for_what_failed(self):
        rows = [linear_row(), linear_row(m=1, replaced=0, ceiling={"error": "refused"},
                                         torchao={"error": "refused"})]
        out = self.table("linear", report_of("bench_linear.py", rows)).splitlines()
        self.assertEqual(out[2], "| 8192 × 4096 × 1024 | 4.100 | 1.64 (1.63–1.65) | 1 of 1 | – "
                                 "| 1.64 | 1.63 | 1.95 |")
        self.assertEqual(out[3], "| 1 × 4096 × 1024 | 4.100 | 1.64 (1.63–1.65) | 0 of 1 | – "
                                 "| 1.64 | 1.63 | – |")
        self.assertEqual(len({line.count("|") for line in out[:4]}), 1)

    def test_every_table_says_where_and_when_and_from_what(self):
        out = self.table("layer", layer_report())
        for word in ("GPU X", "driver 1.2", "CUDA 13.0", "cuBLAS 13.1.0", "0123456789,",
                     "2026-12-01", "scripts/bench_layer.py"):
            self.assertIn(word, out)
        self.assertIn("| all twelve (15872 tokens, 4096, 16384) | 32.0 | 20.0 | 1.60 | 20.5 | 17.0 "
                      "| 1.88 |", out)

    def test_a_run_cut_short_or_of_changed_sources_says_so(self):
        out = self.table("linear", report_of("bench_linear.py", [linear_row()], complete=False,
                                             dirty=True, policy="careful"))
        for word in ("The run did not end", "uncommitted changes", "policy careful"):
            self.assertIn(word, out)

    def test_llama_has_rates_losses_and_what_was_possible(self):
        out = self.table("llama", llama_report()).splitlines()
        self.assertEqual(out[2], "| 1.1 B | training step | 53,000 | 64,000 | 1.20 (1.19–1.21) "
                                 "| 0.45 | 1.27 | 94 % | 8.1000 / 8.2000 |")
        self.assertTrue(out[3].startswith("| 1.1 B | prefill |") and out[3].endswith("| – |"))

    def test_host_has_the_native_time_and_what_each_way_adds(self):
        def spread(median):
            return {"p20": median - 0.1, "median": median, "p80": median + 0.1}
        rows = [{"entry": "cublasGemmEx", "columns": {
            "native": {"us": spread(3.0), "more": spread(0.0)},
            "passed": {"us": spread(3.1), "more": spread(0.1)},
            "replaced": {"us": spread(7.5), "more": spread(4.5)}}}]
        out = self.table("host", report_of("bench_host.py", rows)).splitlines()
        self.assertEqual(out[0], "| µs of the CPU | native | passed | replaced |")
        self.assertEqual(out[2], "| `cublasGemmEx` | 3.00 (2.90–3.10) | +0.10 (0.00–0.20) "
                                 "| +4.50 (4.40–4.60) |")

    def test_launch_has_both_times_and_their_difference_by_the_weights_kept(self):
        times = {"native": [3.0, 3.5, 4.0], "qshim": [3.25, 3.75, 4.5]}
        row = {"weights": 200, "kept": 199, "operation": "add_",
               "columns": bench_lib.host_figures(times)}
        out = self.table("launch", report_of("bench_launch.py", [row])).splitlines()
        self.assertEqual(out[2], "| `add_` | 200 | 199 | 3.50 (3.20–3.80) | 3.75 (3.45–4.20) "
                                 "| +0.25 (0.25–0.40) |")
        self.assertEqual(len({line.count("|") for line in out[:3]}), 1)

    def test_quantize_has_percents_of_the_copy_by_size_and_form(self):
        def row(step, form, gb_s):
            return {"step": step, "form": form, "inner": 4096, "outer": 8192, "gb_s": gb_s}
        rows = [row("copy", "", 4000.0), row("cast", "straight", 3200.0),
                row("all", "straight", 1.0), row("cast", "turned", 3000.0),
                row("cast", "both", 2800.0), row("cast", "rows", 3400.0),
                row("cast", "columns", 1.0), row("all", "columns", 2000.0)]
        out = self.table("quantize", report_of("bench_quantize.py", rows)).splitlines()
        self.assertEqual(out[0], "| % of a copy's 4000 GB/s | straight | turned | both | rows "
                                 "| columns |")
        self.assertEqual(out[2], "| 8192 × 4096 | 80 | 75 | 70 | 85 | 50 |")

    def test_nf4_has_times_ratios_and_memory_and_says_which_peer_is_absent(self):
        out = self.table("nf4", nf4_report()).splitlines()
        self.assertIn("Not installed: bitsandbytes, torchao.", out[0])
        self.assertEqual(out[2].count("default policy"), 3)
        self.assertEqual(out[4], "| 32 | 8192 | 34.2 | 12.5 | 75 % | 2.74 (2.73–2.75) | 1.70 | 1.20 "
                                 "| 40.0 | 2.00 | – | 1.25 | 128.0 | 162.0 | – | 129.0 |")
        self.assertEqual(len({line.count("|") for line in out[2:5]}), 1)

    def test_decode_has_a_row_for_each_kind_and_says_what_is_kept_and_what_is_slow(self):
        out = self.table("decode", decode_report()).splitlines()
        self.assertIn("NF4 4.0 GiB, fp8 5.5 GiB", out[0])
        self.assertIn("generate() below 0.98: none.", out[0])
        self.assertEqual(out[4], "| 8 | CUDA graph | 7.830 | 5.000 | 1.57 (1.56–1.58) | 6.000 "
                                 "| 1.30 (1.29–1.31) |")
        self.assertEqual(len(out[4:-2]), len(bench_decode.KINDS))
        out = self.table("decode", decode_report([[8, "nf4", 0.91], [8, "fp8", 0.9]]))
        self.assertIn("below 0.98: batch 8 nf4 0.91, batch 8 fp8 0.90.", out)

    def test_the_lossless_table_says_what_was_replaced(self):
        out = self.table("lossless", report_of("bench_linear.py", [linear_row()])).splitlines()
        self.assertEqual(out[2], "| 8192 × 4096 × 1024 | 4.100 | 1.64 (1.63–1.65) "
                                 "| 1.64 (1.63–1.65) | 1 of 1 |")

    def test_a_sweep_counts_and_shows_the_worst_by_either_clock(self):
        def passed(m, called):
            row = linear_row(m=m, replaced=0)
            row["columns"]["qshim"]["ratio"] = {"p20": called, "median": called, "p80": called}
            row["columns"]["qshim"]["gpu_ratio"] = {"p20": 1, "median": 1.0, "p80": 1}
            row["columns"]["qshim"]["least_ratio"] = called
            return row
        rows = [linear_row(), passed(7, 0.9), passed(8, 1.0), passed(9, 1.1)]
        rows[1]["pairs"] = 4
        out = self.table("sweep", report_of("bench_linear.py", rows, limit=0.98))
        self.assertIn("4 sizes of a forward product, 1 of them in fp8; 1 were measured in several "
                      "pairs of processes.", out)
        self.assertIn("GPU alone: none below 0.98; where nothing is replaced 1.00,", out)
        self.assertIn("As called: 1 below 0.98, none of them in fp8; where nothing is replaced 1.00, "
                      "half of these 0.90–1.10.", out)
        self.assertIn("| 7 × 4096 × 1024 | As called | 4.100 | 1.00 (1.00–1.00) "
                      "| 0.90 | 0.90 (0.90–0.90) | 0 of 1 |", out)
        self.assertNotIn("| 8192 × 4096 × 1024 |", out)

    def test_a_sweep_without_fastest_blocks_does_not_pass_medians_off_as_such(self):
        row = linear_row(m=7, replaced=0)
        del row["columns"]["qshim"]["least_ratio"]
        out = self.table("sweep", report_of("bench_linear.py", [row], limit=1.7))
        self.assertIn("1 sizes of a forward product, 0 of them in fp8.\n", out)
        self.assertIn("As called: 1 below 1.7", out)
        self.assertIn("| – | 1.64 (1.63–1.65) | 0 of 1 |", out)

    def test_the_summary_takes_what_is_there(self):
        self.write("layer", layer_report())
        _, out, _ = self.results_table("summary", self.folder.name)
        self.assertIn("| 32.0 ms | 20.0 ms | 1.60 |", out)
        self.write("llama", llama_report())
        _, out, _ = self.results_table("summary", self.folder.name)
        self.assertEqual(len(out.splitlines()), 2 + 2 + 1)
        self.write("decode", decode_report())
        _, out, _ = self.results_table("summary", self.folder.name)
        self.assertIn("batch 8, CUDA graph, NF4 | 7.830 ms | 5.000 ms | 1.57 |", out)


class Reports(unittest.TestCase):
    """The report while a run goes on; no child is needed for it."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        folder = pathlib.Path(self.folder.name)
        self.file = folder / "report.json"
        (folder / "library").write_bytes(b"library")
        self.arguments = type("Arguments", (), {
            "json": self.file, "commit": None, "policy": None, "quick": True,
            "library": folder / "library"})

    def report(self):
        side = type("Side", (), {"facts": {"gpu": "GPU X"}})
        sides = type("Sides", (), {"sides": {"native": side}, "version": lambda self: "1.0"})()
        return bench_lib.Report("scripts/bench_x.py", self.arguments, sides, Effort())

    def read(self):
        data = json.loads(self.file.read_text())
        self.assertEqual(data["digest"], bench_lib.digest(data))
        return data

    def test_a_run_cut_short_leaves_what_it_has(self):
        report = self.report()
        report.add({"m": 1})
        data = self.read()
        self.assertEqual((data["complete"], data["results"]), (False, [{"m": 1}]))
        report.finish(worst=1)
        self.assertEqual((self.read()["complete"], self.read()["worst"]), (True, 1))
        self.assertEqual(sorted(f.name for f in self.file.parent.iterdir()),
                         ["library", "report.json"])

    def test_a_report_says_what_was_measured(self):
        self.arguments.commit, self.arguments.policy = "abc", "some/folder/own.ini"
        self.report().finish()
        data = self.read()
        self.assertEqual((data["policy"], data["quick"]), ("own.ini", True))
        self.assertNotIn(str(self.file.parent), json.dumps(data))
        self.assertEqual((data["script"], data["commit"], data["dirty"]), ("bench_x.py", "abc", None))
        self.assertEqual((data["library"]["version"], len(data["library"]["sha256"])), ("1.0", 64))
        self.assertEqual((data["machine"], data["effort"]["blocks"]), ({"gpu": "GPU X"}, 8))


# ---- command lines ------------------------------------------------------------------------------


class CommandLines(unittest.TestCase):
    def refused(self, script, *arguments):
        result = subprocess.run([sys.executable, "-B", SCRIPTS / script, *arguments],
                                capture_output=True, text=True)
        self.assertEqual(result.returncode, 2, result.stderr)
        return result.stderr

    def test_mistakes_end_with_status_2_before_anything_runs(self):
        here = ["--library", __file__]
        for script in ("bench_linear.py", "bench_layer.py", "bench_llama.py", "bench_nf4.py",
                       "bench_decode.py", "bench_programs.py", "bench_launch.py"):
            self.assertIn("--nonsense", self.refused(script, *here, "--nonsense"))
            self.assertIn("no/such is missing", self.refused(script, "--library", "no/such"))
            self.assertIn("--shapes", self.refused(script, *here, "--shapes", "12x"))
            self.assertIn("no folder", self.refused(script, *here, "--json", "no/such/file"))

    def test_shapes_are_read_whole_or_refused(self):
        self.assertEqual(bench_linear.shape("8x16x32:fwd"),
                         {"m": 8, "k": 16, "n": 32, "forward": True})
        for text in ("", "8x16", "8x16x32x64", "8x16x0", "8x16x-1", "8x16x32:bwd", "8x16x32 9"):
            with self.assertRaises(bench_lib.argparse.ArgumentTypeError):
                bench_linear.shape(text)

    def test_sizes_of_a_decode_and_of_a_square_layer(self):
        self.assertEqual(bench_decode.batch_of("8"), {"batch": 8})
        self.assertEqual(bench_nf4.shape("8x4096"), {"tokens": 8, "hidden": 4096})
        for read, text in ((bench_decode.batch_of, "0"), (bench_decode.batch_of, "1x2"),
                           (bench_nf4.shape, "8"), (bench_nf4.shape, "8x16x32")):
            with self.assertRaises(bench_lib.argparse.ArgumentTypeError):
                read(text)

    def test_the_sizes_a_script_has_by_itself_are_valid(self):
        for text in f"{bench_linear.FULL},{bench_linear.QUICK}".split(","):
            bench_linear.shape(text)
        self.assertEqual(set(bench_linear.QUICK.split(",")) - set(bench_linear.FULL.split(",")),
                         set())

    def test_a_quick_run_of_square_layers_has_four_counts_of_tokens_at_two_widths(self):
        arguments = bench_lib.argparse.Namespace(shapes=None, quick=True)
        cases = [(c["hidden"], c["tokens"]) for c in bench_nf4.cases_for(arguments)]
        self.assertEqual(cases, [(h, t) for h in (4096, 8192) for t in (1, 32, 128, 512)])
        arguments.shapes = [{"tokens": 8, "hidden": 64}]
        self.assertEqual(bench_nf4.cases_for(arguments), arguments.shapes)

    def test_progress_of_square_layers_says_what_the_default_policy_served(self):
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            bench_tables.nf4_progress(nf4_report()["results"][0])
        self.assertEqual(err.getvalue(), "32 x 8192: 34.2 us, NF4 x2.74, frozen fp8 x1.70, "
                                         "default policy x1.20 (25 % served)\n")

    def test_progress_goes_to_stderr(self):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            bench_tables.progress(linear_row())
        self.assertEqual((out.getvalue(), err.getvalue()),
                         ("", "8192 × 4096 × 1024: 4.100 ms, x1.64\n"))


def main():
    stream = io.StringIO()
    suite = unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__])
    result = unittest.TextTestRunner(stream).run(suite)
    bad = len(result.failures) + len(result.errors)
    if bad:
        print(stream.getvalue())
    print(f"{result.testsRun - bad} passed, {bad} failed")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    if bench_worker.is_worker():
        bench_worker.serve(pretended, timer=PretendTimer, facts=environment)
    elif sys.argv[1:] in (["--hold"], ["--noise"]):
        alone(sys.argv[1])
    else:
        main()
