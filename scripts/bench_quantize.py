#!/usr/bin/env python3
"""The quantising kernels on this machine's GPU, beside a plain copy in the same run.

A C program (tests/gpu/bench_quantize.c) times each kernel on matrices that are not in the L2 cache;
rates count the bytes that a kernel is meant to move, and are given in percent of the copy's.
"""
import json
import subprocess

import bench_lib
import bench_tables
import bench_worker


def program():
    return bench_lib.built("gpu", "bench_quantize", "gpu")


def run_program():
    return json.loads(subprocess.run([program(), "--json"], stdout=subprocess.PIPE, text=True,
                                     check=True, timeout=240).stdout)


def build(_):
    return {}, {"kernels": run_program}, {}


def main():
    arguments = bench_lib.parse(bench_lib.parser(__doc__))
    program()  # or its absence is told before anything is started
    with bench_lib.Sides(__file__, {"native": None}, arguments.library) as sides:
        sides["native"].ask("load", case={})
        report = bench_lib.Report(__file__, arguments, sides, bench_lib.Effort(blocks=1))
        measured = sides["native"].tell("kernels")
        if measured is None:
            raise bench_lib.Failed(f"{program()} failed")
        for row in measured["results"]:
            report.add(row)
        report.finish()
    print(bench_tables.table("quantize", report.data))


if __name__ == "__main__":
    if bench_worker.is_worker():
        bench_worker.serve(build)
    else:
        bench_lib.run(main)
