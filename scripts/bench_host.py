#!/usr/bin/env python3
"""What one call costs the calling thread, natively and under qshim, in one run.

A C program (tests/intercept/bench_calls.c) submits batches of small products to an idle GPU: the time
per call is the CPU's alone. Passed is a call that qshim leaves to cuBLAS, replaced one whose operands
are quantised each time (tensor and row scaling), reused one that finds them quantised. The processes
take turns; figures are medians over the rounds, each of them a median over batches.
"""
import subprocess

import bench_lib
import bench_tables
import bench_worker

ROUNDS = 7
# Batches that fit into the driver's queue, and products as small as fp8 has any use for.
PROGRAM = ("512", "64", "200")
EACH = "default.action=fp8;cache.validity=each"
SIDES = {
    "native": None,
    "passed": {"QSHIM_SET": "default.action=native"},
    "replaced": {"QSHIM_SET": EACH},
    "replaced, row": {"QSHIM_SET": EACH + ";default.scale=row"},
    "reused": {"QSHIM_SET": "default.action=fp8"},
}


def program():
    return bench_lib.built("intercept", "bench_calls", "tests")


# ---- in the children ----------------------------------------------------------------------------


def run_program():
    """Entry point -> microseconds of a call; the program inherits this process's preload."""
    lines = subprocess.run([program(), *PROGRAM], capture_output=True, text=True, check=True,
                           timeout=120).stdout.split("\n")
    return {name: float(ns) / 1000 for name, ns in (line.split() for line in lines if line)}


def build(_):
    return {}, {"host": run_program}, {}


# ---- in the parent ------------------------------------------------------------------------------


def measure(sides, rounds):
    """Entry point -> side -> microseconds of each round."""
    times = {}
    for number in range(rounds):
        for name in list(SIDES)[::1 if number % 2 == 0 else -1]:
            answer = sides[name].tell("host")
            if answer is None:
                raise bench_lib.Failed(f"{name}: {program()} failed: run make tests first")
            for entry, us in answer.items():
                times.setdefault(entry, {}).setdefault(name, []).append(us)
    return times


def main():
    arguments = bench_lib.parse(bench_lib.parser(__doc__))
    program()  # or its absence is told before anything is started
    rounds = 3 if arguments.quick else ROUNDS
    with bench_lib.Sides(__file__, SIDES, arguments.library) as sides:
        for side in sides.sides.values():
            side.ask("load", case={})
        report = bench_lib.Report(__file__, arguments, sides, bench_lib.Effort(blocks=rounds))
        for entry, times in measure(sides, rounds).items():
            report.add({"entry": entry, "columns": bench_lib.host_figures(times)})
        report.finish()
    print(bench_tables.table("host", report.data))


if __name__ == "__main__":
    if bench_worker.is_worker():
        bench_worker.serve(build)
    else:
        bench_lib.run(main)
