"""The tuned file between processes: written by four at once, by killed ones, and read by later runs.

Four processes measure shapes of their own and shapes that all have, at the same time, into one file:
as many rows as their decisions tell must be in it, each whole and none twice. Processes killed while
they measure leave a file that the next run reads and completes. A second run measures nothing
and decides the same; rows of another driver, cuBLASLt or qshim are not used, which is said in one
line, and measured anew; a pinned row is obeyed. Runs without the preload itself.
"""
import collections
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from support import decisions, need, preloaded, shape, tuned_rows

TOKENS, IN, USES = 4096, 4096, 4
COMMON = (4096, 5120)
WRITERS, OWN, VICTIMS = 4, 3, 4
SEVERAL = tuple(range(4096, 8192, 512))  # what a process that is to be killed measures
FOREIGN = {"driver": "1010", "cublaslt": "10101", "qshim": "0.0.0"}
NAMES = {"driver": "driver", "cublaslt": "cuBLASLt", "qshim": "qshim"}  # as a message has them
LIMIT_S = 60


def work(before, outs):
    """One linear product of each width, `before` of them at once, the rest once the parent says so
    on stdin."""
    torch = need("torch")
    x = torch.randn(TOKENS, IN, device="cuda").bfloat16()
    weights = [torch.randn(out, IN, device="cuda").bfloat16() for out in outs]

    def multiply(these):
        for weight in these:
            for _ in range(USES):
                torch.nn.functional.linear(x, weight)
        torch.cuda.synchronize()

    with torch.no_grad():
        multiply(weights[:before])
        print("ready", flush=True)
        sys.stdin.readline()
        multiply(weights[before:])


class Worker:
    """A process that is ready to run its products under the preload, and waits. The file is read
    at the first product."""

    def __init__(self, folder, name, file, outs, before=0):
        self.folder, self.outs = folder / name, outs
        env = preloaded(self.folder, QSHIM_SET=f"tune.budget_ms=1e6;tune.file={file}")
        self.process = subprocess.Popen(
            [sys.executable, __file__, *map(str, (before, *outs))], env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def wait_until_ready(self):
        line = self.process.stdout.readline()
        assert line == "ready\n", self.process.communicate()[1][-2000:]

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        """What it said on stderr."""
        said = self.process.communicate(timeout=LIMIT_S)[1]
        assert self.process.returncode == 0, said[-2000:]
        return said

    def run(self):
        self.go()
        return self.end()

    def kill(self):
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)

    def decided(self):
        """Width -> its decision."""
        return {shape(line["key"])[1]: line for line in decisions(self.folder)}


def rows_of(line):
    """The fewest and most rows that a decision leaves in the file: the times of fp8, where these beat
    the program's own its error, and the times of bf16. Which of the two bf16 beat is not told."""
    if line["reason"] == "auto":
        return {"fp8": (3, 3), "bf16": (2, 3)}[line["action"]]
    assert line["reason"] == "not-faster", f"not measured: {line}"
    return 2, 2


def by_width(rows):
    return collections.Counter(shape(row["key"])[1] for row in rows)


def judge_writers(rows, decided):
    """What is wrong with a file of several processes; `decided` of each."""
    least, most, wrong = collections.Counter(), collections.Counter(), []
    for of_process in decided:
        for width, line in of_process.items():
            least[width] += rows_of(line)[0]
            most[width] += rows_of(line)[1]
    found = by_width(rows)
    if not least <= found <= most:
        wrong.append(f"rows by width: {dict(found)}, measured: {dict(least)} to {dict(most)}")
    texts = collections.Counter(json.dumps(row, sort_keys=True) for row in rows)
    wrong += [f"written twice: {text}" for text, times in texts.items() if times > 1]
    return wrong


def whole_rows(written):
    """The rows of a file that a killed process has left, and if its last one is torn."""
    try:
        return tuned_rows(written), False
    except ValueError:
        head, _, _ = written.rpartition("[product]\n")
        return tuned_rows(head), True


def edited(written, **values):
    """A tuned file's text with these values in every row."""
    lines = []
    for line in written.splitlines():
        name = line.partition(" = ")[0]
        lines.append(f"{name} = {values[name]}" if name in values else line)
    return "\n".join(lines) + "\n"


def pinned(written, width):
    """The text with the rows of a width pinned to native."""
    rows = written.split("[product]\n")
    for i, row in enumerate(rows):
        if f" m={width} " in row:
            rows[i] = edited(row, action="native").replace("action =", "pinned = yes\naction =")
    return "[product]\n".join(rows)


def fates(decided):
    return {width: (line["action"], line["reason"], line.get("detail"))
            for width, line in decided.items()}


def lines_on(said, file):
    return [line for line in said.splitlines() if str(file) in line]


def wait_for_rows(file, count, worker):
    """Until the file has so many rows; False if the process ended before."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and worker.process.poll() is None:
        if file.exists() and file.read_text().count("[product]") >= count:
            return True
    return False


def show_writers(writers, file):
    for writer in writers:
        writer.go()
    for writer in writers:
        writer.end()
    rows = tuned_rows(file.read_text())
    wrong = judge_writers(rows, [writer.decided() for writer in writers])
    assert not wrong, "; ".join(wrong)
    return f"{len(writers)} processes wrote {len(rows)} rows, none torn, lost or doubled"


def show_killed(victims, heir, file):
    """One after the other: each finds the rows of those before it, so the moments differ."""
    torn, killed, known = 0, 0, []
    for i, victim in enumerate(victims):
        victim.go()
        killed += wait_for_rows(file, len(known) + 1 + i % 2, victim)
        time.sleep(0.004 * i)
        victim.kill()
        rows, is_torn = whole_rows(file.read_text() if file.exists() else "")
        assert rows[:len(known)] == known, "rows of an earlier process are gone"
        known, torn = rows, torn + is_torn
    assert killed, "no process was killed while it measured"
    heir.run()
    completed = by_width(tuned_rows(file.read_text()))
    assert set(completed) == set(heir.outs), "the next run did not go on"
    return f"SIGKILL at {killed} moments of tuning: {len(known)} rows whole, {torn} torn; completed"


def show_second(second, heir, file):
    before = file.read_text()
    second.run()
    assert file.read_text() == before, "the second run measured again"
    assert fates(second.decided()) == fates(heir.decided()), "the second run decided otherwise"
    return "second run: no row more, same decisions"


def show_foreign(worker, name, file, written):
    """One file, each of whose rows is of another driver, cuBLASLt or qshim."""
    file.write_text(edited(written, **{name: FOREIGN[name]}))
    file.chmod(0o600)
    before = file.read_text()
    said = lines_on(worker.run(), file)
    after = file.read_text()
    assert len(said) == 1 and f"rows of another {NAMES[name]} ({FOREIGN[name]}," in said[0], said
    assert after.startswith(before), "rows were taken out"
    wrong = judge_writers(tuned_rows(after[len(before):]), [worker.decided()])
    assert not wrong, f"{name}: {'; '.join(wrong)}"


def show_pinned(worker, width, file, written):
    file.write_text(pinned(written, width))
    file.chmod(0o600)
    worker.run()
    line = worker.decided()[width]
    assert (line["action"], line["reason"]) == ("native", "tuned"), line
    return "pinned row obeyed"


def show(folder, file, workers):
    """What there is to say; `workers` gets every process that is started."""
    def start(name, into, outs=SEVERAL, before=0):
        workers.append(Worker(folder, name, file[into], outs, before))
        return workers[-1]

    # All have the file open, and find it empty, before any measures what the others do too.
    own = [tuple(6144 + 256 * (i * OWN + j) for j in range(OWN)) for i in range(WRITERS)]
    writers = [start(f"writer{i}", "shared", (own[i][0], *COMMON, *own[i][1:]), before=1)
               for i in range(WRITERS)]
    victims = [start(f"victim{i}", "killed") for i in range(VICTIMS)]
    heir, second = start("heir", "killed"), start("second", "killed")
    others = {which: start(which, which) for which in ("pinned", *FOREIGN)}
    for worker in workers:
        worker.wait_until_ready()
    shown = [show_writers(writers, file["shared"]), show_killed(victims, heir, file["killed"]),
             show_second(second, heir, file["killed"])]
    written = file["killed"].read_text()
    for which in FOREIGN:
        show_foreign(others[which], which, file[which], written)
    shown.append(f"rows of another {', '.join(NAMES.values())} not used")
    fast = [width for width, fate in fates(second.decided()).items() if fate[0] == "fp8"]
    assert fast, "nothing is served in fp8, so a pin has nothing to forbid"
    shown.append(show_pinned(others["pinned"], fast[0], file["pinned"], written))
    return "; ".join(shown)


def main():
    workers = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        file = {what: folder / f"{what}.ini" for what in ("shared", "killed", "pinned", *FOREIGN)}
        try:
            print(show(folder, file, workers))
        finally:
            for worker in workers:
                if worker.process.poll() is None:
                    worker.kill()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(int(sys.argv[1]), tuple(map(int, sys.argv[2:])))
    else:
        need("torch")
        main()
