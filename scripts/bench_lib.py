"""What the PyTorch benchmarks share: child processes in lock step, figures, and the report.

A preload cannot be switched on and off inside a process, so each *side* (native, qshim, ...) is a
child process of its own, all started from the same script. The parent here holds no GPU and imports
no torch: it tells one child after the other to run one block of timed repetitions, in the order
A B B A and then from another one on, so that all sides see the same clocks and temperature, none is
always the one that ran last too, and no two ever run at the same time.
bench_worker.py is the children's end of the pipes.
"""
import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import pathlib
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "gpu"))
import support  # noqa: E402  reads the counters file, for the GPU suite and for us

LIMIT_S = 300       # a child that has not answered by then is given up
LEAVE_S = 20        # and one that does not leave by then is killed
REPLY_FD = "BENCH_REPLY_FD"
FAST_MS = 1.0       # above this, the GPU's own time is not measured apart: launching costs nothing
OURS = ("native", "qshim", "nf4", "fp8", "auto")  # must not fail; other columns may be unavailable
LONGEST_REPS = 32   # repetitions of a block: their launches must fit in the driver's queue
CORES = 8           # that all children share: they never compute at the same time


class Failed(Exception):
    """A child died or refused; the text is for the person at the terminal."""


# ---- sides --------------------------------------------------------------------------------------


def share_cores():
    """In a child before it starts: the same few neighbouring cores for every side. Left to the system,
    one process may live next to the GPU for its whole life and another one far from it, which makes
    calls that the CPU bounds differ by a third."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


class Side:
    """One child process. Every request is a JSON line to its stdin, every answer one from a pipe of
    its own: what libraries print to stdout goes to stderr and disturbs nothing."""

    def __init__(self, name, script, environment, folder=None):
        self.name, self.folder, self.buffer = name, folder, b""
        self.reply, write_end = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=sys.stderr,
            stderr=sys.stderr, pass_fds=[write_end], preexec_fn=share_cores,
            env={**environment, REPLY_FD: str(write_end)})
        os.close(write_end)
        self.facts = None

    def send(self, op, **arguments):
        """Sends a request, whose answer() is to be taken before the next one."""
        try:
            self.process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Failed(f"the {self.name} process is gone: {error}") from error

    def ask(self, op, **arguments):
        """Sends a request and waits for its answer: a dict, with "error" in it if it failed."""
        self.send(op, **arguments)
        return self.answer()

    def answer(self):
        deadline = time.monotonic() + LIMIT_S
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.reply], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise Failed(f"the {self.name} process has not answered for {LIMIT_S} s")
            data = os.read(self.reply, 65536)
            if not data:
                raise Failed(f"the {self.name} process ended with status {self.process.wait()}")
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def tell(self, what):
        """An answer that the loaded case has; None, and a line on stderr from the child, if not."""
        return self.ask("tell", what=what).get("value")

    def counters(self):
        """Key of each product -> (calls, calls served by an engine, reason) so far."""
        slots = support.counters(self.folder) if self.folder else []
        return {s["key"]: (s["calls"], s["replaced"], s["reason"]) for s in slots}

    def kept(self):
        """Form -> (bytes kept beside the program's own, uses so far) of this side's operands."""
        return support.kept(self.folder) if self.folder else {}

    def checked(self):
        """Form -> how many of those uses checked the whole source first."""
        return support.checked(self.folder) if self.folder else {}

    def dismiss(self):
        """The end of its input is the child's sign to leave."""
        try:
            self.process.stdin.close()
        except OSError:
            pass  # gone already

    def end(self):
        self.dismiss()
        try:
            self.process.wait(timeout=LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.reply)


class Sides:
    """The children of one run, by name, as a context manager."""

    def __init__(self, script, settings, library):
        """`settings`: name -> None for a plain process, or qshim's variables for a preloaded one."""
        self.script, self.settings, self.library = script, settings, library
        self.sides, self.folder = {}, None

    def __enter__(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children are ended too
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        try:
            for name, variables in self.settings.items():
                self.sides[name] = self.start(name, variables)
            for side in self.sides.values():  # all import their libraries at the same time
                side.facts = side.answer()
                if "error" in side.facts:
                    raise Failed(f"{side.name}: {side.facts['error']}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, name, variables):
        # The caller's own preload and settings must not reach either side.
        environment = {k: v for k, v in os.environ.items()
                       if not k.startswith("QSHIM") and k != "LD_PRELOAD"}
        folder = None
        if variables is not None:
            folder = pathlib.Path(self.folder.name) / name
            environment |= {"LD_PRELOAD": str(self.library), "QSHIM_OUT": str(folder),
                            "QSHIM_QUIET": "1", "QSHIM_SUMMARY": "0", **variables}
            # Each side decides by what it measures itself, not by what an earlier run did.
            environment["QSHIM_SET"] = f"{variables.get('QSHIM_SET', '')};tune.file="
        return Side(name, self.script, environment, folder)

    def __exit__(self, *_):
        for side in self.sides.values():
            side.dismiss()
        for side in self.sides.values():
            side.end()
        self.folder.cleanup()

    def __getitem__(self, name):
        return self.sides[name]

    def version(self):
        """The library's version as it wrote it itself, once a preloaded side has run a product."""
        for file in sorted(pathlib.Path(self.folder.name).glob("*/decisions.*.jsonl")):
            for line in file.read_text().splitlines():
                record = json.loads(line)
                if record.get("t") == "start":
                    return record["version"]
        return None


# ---- measuring ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Column:
    """One thing to be measured: `variant` of the loaded case, on `side`."""
    label: str    # name of the figure in the report
    side: str     # name of the process
    variant: str  # what is called there


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure. Blocks are an even number, so that A B B A comes out even."""
    blocks: int = 8            # blocks of each column
    block_ms: float = 20.0     # aim for the length of a block, native
    warm_ms: float = 60.0      # warm-up of each column, at least
    warm_reps: int = 5         # repetitions of it, at least: by the third use decisions are settled
    least_reps: int = 2        # repetitions of a block
    apart: bool = True         # measure the GPU's own time too, where launching could show
    wake: bool = False         # bring the GPU back by untimed calls first even if not so measured


def repetitions(effort, ms):
    return max(effort.least_reps, min(LONGEST_REPS, round(effort.block_ms / max(ms, 1e-6))))


def load(sides, case, wanted, together=False):
    """Has each side prepare the case, with the variants `wanted` of it (side -> names). Returns
    (side, variant) -> why, for those that are not to be had. The sides take turns, as a tuner that
    measures while another process computes would measure that; `together`: nothing is multiplied
    while it is prepared, so they need not."""
    missing = {}
    if together:
        for name, side in sides.sides.items():
            side.send("load", case={**case, "variants": wanted.get(name, [])})
    for name, side in sides.sides.items():
        answer = side.answer() if together else \
            side.ask("load", case={**case, "variants": wanted.get(name, [])})
        if "error" in answer:
            raise Failed(f"{name}: {case}: {answer['error']}")
        missing |= {(name, variant): why for variant, why in answer["missing"].items()}
    return missing


def measure(sides, columns, effort):
    """Label -> list of one figure a block ({"ms", "gpu_ms"}), or an {"error"} for a column that
    failed. The first column's speed sets the repetitions of all."""
    results, reps, live = {}, None, []
    for column in columns:
        answer = sides[column.side].ask("warm", variant=column.variant, ms=effort.warm_ms,
                                        reps=effort.warm_reps)
        results[column.label] = answer if "error" in answer else []
        if "error" not in answer:
            live.append(column)
            reps = reps or repetitions(effort, answer["ms"])
    for block in range(effort.blocks):
        first = block // 2 % max(1, len(live))
        order = live[first:] + live[:first]
        for column in (order if block % 2 == 0 else order[::-1]):
            if isinstance(results[column.label], dict):
                continue
            answer = sides[column.side].ask("run", variant=column.variant, reps=reps,
                                            apart_below=FAST_MS if effort.apart else 0,
                                            wake=effort.wake)
            if "error" in answer:
                results[column.label] = answer
            else:
                results[column.label].append(answer)
    return results


def spread(values):
    """Median with the 20th and 80th percentile."""
    values = sorted(values)
    if len(values) == 1:
        return {"p20": values[0], "median": values[0], "p80": values[0]}
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"p20": fifths[0], "median": statistics.median(values), "p80": fifths[3]}


def joined(earlier, later):
    """The blocks of two runs of measure(), as those of one. What failed in either has failed."""
    def both(label, blocks):
        before = earlier.get(label, [])
        failed = [b for b in (before, blocks) if isinstance(b, dict)]
        return failed[0] if failed else before + blocks
    return {label: both(label, blocks) for label, blocks in later.items()}


def figures(results, base):
    """What measure() returned, as figures for the report: ms of each column with its spread, and
    how much faster than the column `base` it was, from the ratios of neighbouring blocks and, as
    `least_ratio`, from the fastest block of either."""
    out = {}
    for label, blocks in results.items():
        if isinstance(blocks, dict):
            out[label] = {"error": blocks["error"]}
            continue
        out[label] = {"ms": spread([b["ms"] for b in blocks]),
                      "gpu_ms": spread([b["gpu_ms"] for b in blocks])}
        reference = results.get(base, {})
        if label != base and not isinstance(reference, dict):
            for field, name in (("ms", "ratio"), ("gpu_ms", "gpu_ratio")):
                out[label][name] = spread([r[field] / b[field] for r, b in zip(reference, blocks)])
            out[label]["least_ratio"] = min(b["ms"] for b in reference) / min(b["ms"] for b in blocks)
    return out


def per_call(columns, calls):
    """figures() of a step that makes `calls` calls, as those of one; ratios stay as they are."""
    out = {label: dict(figures) for label, figures in columns.items()}
    for figures in out.values():
        for field in figures.keys() & {"ms", "gpu_ms"}:
            figures[field] = {name: value / calls for name, value in figures[field].items()}
    return out


def host_figures(times):
    """Side -> microseconds of a call in each round, as figures: those of each side, and how many more
    than natively in the same round."""
    return {side: {"us": spread(us), "more": spread([u - n for u, n in zip(us, times["native"])])}
            for side, us in times.items()}


def served(before, after):
    """Products called between two readings of Side.counters(): which, how often, how many in fp8."""
    rows = []
    for key, (calls, replaced, reason) in after.items():
        old = before.get(key, (0, 0, ""))
        if calls > old[0]:
            rows.append({"product": key, "calls": calls - old[0], "replaced": replaced - old[1],
                         "reason": reason})
    return rows


# ---- report -------------------------------------------------------------------------------------


def git(*arguments):
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


def revision(given):
    """{"commit", "dirty"}; `given` speaks for a copy of the tree that has no repository around it.
    What lies in scripts/results is output, not part of what was measured."""
    commit = git("rev-parse", "HEAD")
    if given or not commit:
        return {"commit": given, "dirty": None}
    changes = git("status", "--porcelain", "--", ".", ":!scripts/results")
    return {"commit": commit, "dirty": bool(changes)}


def digest(report):
    """Of everything but itself: a results file that was edited by hand no longer matches."""
    body = {k: v for k, v in report.items() if k != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Report:
    """The results of one run. Written after every case, so that a run cut short keeps what it has;
    "complete" tells the two apart."""

    def __init__(self, script, arguments, sides, effort):
        self.path = arguments.json
        self.sides = sides
        machine = next(iter(sides.sides.values())).facts
        self.data = {
            "script": pathlib.Path(script).name,
            "quick": arguments.quick,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine,
            **revision(arguments.commit),
            "library": {"sha256": hashlib.sha256(arguments.library.read_bytes()).hexdigest()},
            # A report is published: no path of the machine it was made on.
            "policy": pathlib.Path(arguments.policy or "default").name,
            "effort": dataclasses.asdict(effort),
            "complete": False,
            "results": [],
        }

    def add(self, row):
        self.data["results"].append(row)
        self.write()

    def finish(self, **summary):
        self.data |= summary
        self.data["complete"] = True
        self.write()

    def write(self):
        version = self.sides.version()  # None once they have ended
        self.data["library"]["version"] = version or self.data["library"].get("version")
        self.data["digest"] = digest(self.data)
        if self.path:
            partial = self.path.with_name(self.path.name + ".part")
            partial.write_text(json.dumps(self.data, indent=1) + "\n")
            partial.replace(self.path)


def failures(value, label=""):
    """Every column of ours that failed anywhere in the results: [(label, why)]."""
    if isinstance(value, list):
        return [f for item in value for f in failures(item, label)]
    if not isinstance(value, dict):
        return []
    if label in OURS and "error" in value:
        return [(label, value["error"])]
    return [f for name, item in value.items() for f in failures(item, name)]


def end(report):
    """The script's last step: a figure that is missing because a side failed is status 1."""
    failed = failures(report.data["results"])
    if failed:
        raise Failed(f"{len(failed)} columns failed, the first ({failed[0][0]}): {failed[0][1]}")


# ---- command line -------------------------------------------------------------------------------


def sizes(text, count=3, words=()):
    """'2048x4096x1024' or '2048x4096x1024:word' -> (sizes, word or None)."""
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", text.strip())
    numbers = [int(n) for n in match[1].split("x")] if match else []
    if len(numbers) != count or min(numbers) < 1 or (match[2] and match[2] not in words):
        form = "x".join("MKN"[:count] if count == 3 else ["N"] * count)
        raise argparse.ArgumentTypeError(
            f"'{text}' is not {form}" + "".join(f" or {form}:{w}" for w in words))
    return tuple(numbers), match[2]


def parser(doc, shapes_help=None):
    """Without `shapes_help` the script has neither shapes nor policies to choose."""
    p = argparse.ArgumentParser(description=doc.split("\n\n")[0],
                                epilog="Needs a GPU, PyTorch and a built library.")
    p.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the report there")
    p.add_argument("--quick", action="store_true", help="half the blocks, fewer cases")
    if shapes_help:
        p.add_argument("--policy", metavar="P", help="preset or file for the qshim side")
        p.add_argument("--shapes", metavar="LIST", help=shapes_help)
    else:
        p.set_defaults(policy=None, shapes=None)
    p.add_argument("--library", metavar="FILE", type=pathlib.Path,
                   default=ROOT / "build" / "libqshim.so", help="default: build/libqshim.so")
    p.add_argument("--commit", metavar="HASH",
                   help="what was built, where the tree is a copy without a repository")
    return p


def parse(p, shape_type=None):
    """Reads the command line; whatever is wrong with it ends the program with status 2."""
    arguments = p.parse_args()
    if arguments.shapes is not None:
        try:
            arguments.shapes = [shape_type(s) for s in arguments.shapes.split(",")]
        except argparse.ArgumentTypeError as error:
            p.error(f"argument --shapes: {error}")
    arguments.library = arguments.library.resolve()
    if not arguments.library.is_file():
        p.error(f"{arguments.library} is missing: run make first")
    if arguments.json and not arguments.json.resolve().parent.is_dir():
        p.error(f"argument --json: no folder {arguments.json.parent}")
    return arguments


def built(folder, name, target):
    """Path of a C program in the build folder; `target` is what makes it."""
    file = pathlib.Path(os.environ.get("QS_TEST_BUILD", ROOT / "build")) / folder / name
    if not file.is_file():
        raise Failed(f"{file} is missing: run make {target} first")
    return file


def policy_of(arguments):
    return {"QSHIM_POLICY": arguments.policy} if arguments.policy else {}


def run(main):
    """Runs a script's main(); a failure of a child is one line and status 1."""
    try:
        main()
    except Failed as error:
        sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

