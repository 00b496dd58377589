#!/usr/bin/env python3
"""What a launch costs the calling thread while qshim watches weights for writes, beside native.

Under the preset nf4-decode each weight that is kept in NF4 is watched: whatever is submitted to the
GPU is looked at for addresses in one. Timed are two of PyTorch's smallest operations, add_ (a kernel)
and copy_ (a copy by the driver), on 16 elements each, with none, some, and many weights kept. Their
tensors were allocated between the weights. A block's launches fit in the driver's queue, so the time
is the CPU's alone. Each side is several processes, as one is faster than the next for its whole life by
more than what is looked for; a figure is their mean in a block.
"""
import functools
import statistics
import time

import bench_lib
import bench_tables
import bench_worker
from bench_lib import Column

WEIGHTS = (0, 16, 200)
HIDDEN = 2048         # the least that the preset keeps; a weight is square
KEPT_BYTES = HIDDEN * HIDDEN * 17 // 32  # of a weight in NF4: 4 bits and a scale of 16 for every 64
OPERATIONS = ("add_", "copy_")
ELEMENTS = 16
LAUNCHES = 16         # of a step, each on tensors of its own: 512 in a block at most
SIDES = {"native": None, "qshim": {"QSHIM_POLICY": "nf4-decode"}}
PROCESSES = 4         # of each side


# ---- in the children ----------------------------------------------------------------------------


class HostTimer(bench_worker.GpuTimer):
    """Milliseconds of the calling thread."""

    def block(self, step, reps, wait_s=0.0):
        begin = time.perf_counter()
        for _ in range(reps):
            step()
        host = time.perf_counter() - begin
        self.idle()
        return 1e3 * host / reps, host


@functools.cache
def weights():
    """Of this process, never freed: what qshim keeps of them stays theirs."""
    return []


def grow(count):
    while len(weights()) < count:
        weights().append(bench_worker.normal(HIDDEN, HIDDEN, scale=HIDDEN ** -0.5))


def use_weights():
    """Each is multiplied by one token."""
    import torch
    x = bench_worker.normal(1, HIDDEN)
    for weight in weights():
        torch.nn.functional.linear(x, weight)


def build(case):
    import torch
    grow((len(weights()) + case["weights"]) // 2)
    tensors = [torch.zeros(ELEMENTS, device="cuda") for _ in range(2 * LAUNCHES)]
    grow(case["weights"])
    with torch.no_grad():
        bench_worker.settle(use_weights, torch.cuda.current_stream())
    pairs = list(zip(tensors[::2], tensors[1::2]))

    def add():
        for x, _ in pairs:
            x.add_(1.0)

    def copy():
        for x, y in pairs:
            x.copy_(y)

    return dict(zip(OPERATIONS, (add, copy))), {}, {}


# ---- in the parent ------------------------------------------------------------------------------


def processes_of(side, sides):
    return [name for name in sides.sides if name.split()[0] == side]


def microseconds(results):
    """What bench_lib.measure() returned for the processes of one side, as microseconds of a launch in
    each block."""
    for name, blocks in results.items():
        if isinstance(blocks, dict):
            raise bench_lib.Failed(f"{name}: {blocks['error']}")
    return [1e3 * statistics.mean(b["ms"] for b in blocks) / LAUNCHES
            for blocks in zip(*results.values())]


def measure(sides, case, effort):
    """A row for each operation. `kept`: how many weights each process of qshim's keeps, and so
    watches, after it; if they differ, the list of them."""
    bench_lib.load(sides, case, {side: OPERATIONS for side in sides.sides}, together=True)
    for operation in OPERATIONS:
        results = bench_lib.measure(sides, [Column(s, s, operation) for s in sides.sides], effort)
        times = {side: microseconds({name: results[name] for name in processes_of(side, sides)})
                 for side in SIDES}
        kept = sorted({sides[name].kept()["nf4"][0] // KEPT_BYTES
                       for name in processes_of("qshim", sides)})
        yield {**case, "operation": operation, "kept": kept[0] if len(kept) == 1 else kept,
               "columns": bench_lib.host_figures(times)}


def check(rows):
    """Figures of weights that were not kept are not what they say."""
    for row in rows:
        if row["kept"] != row["weights"]:
            raise bench_lib.Failed(f"{row['kept']} of {row['weights']} weights were kept")


def main():
    arguments = bench_lib.parse(bench_lib.parser(__doc__))
    effort = bench_lib.Effort(blocks=16 if arguments.quick else 48, block_ms=10, warm_ms=20,
                              apart=False, wake=True)
    settings = {f"{side} {i}": variables for i in range(1, PROCESSES + 1)
                for side, variables in SIDES.items()}
    with bench_lib.Sides(__file__, settings, arguments.library) as sides:
        report = bench_lib.Report(__file__, arguments, sides, effort)
        for count in WEIGHTS:
            for row in measure(sides, {"weights": count}, effort):
                report.add(row)
        report.finish(processes=PROCESSES)
    print(bench_tables.table("launch", report.data))
    check(report.data["results"])


if __name__ == "__main__":
    if bench_worker.is_worker():
        bench_worker.serve(build, timer=HostTimer)
    else:
        bench_lib.run(main)
