#!/usr/bin/env python3
"""One nn.Linear without bias, natively and under qshim, in one run.

Forward and backward (or :fwd, forward only) in eager PyTorch, as ms of a call and as ratios to the
native one: qshim's own decision, qshim told to use fp8, and as the ceiling the same products by
torch._scaled_mm from operands that are fp8 already. torchao's float8 training and TransformerEngine
have columns where they are installed. --sweep asks the other question: is there any size, of all
that models have, at which the shim makes a forward product slower?

Most sizes of the sweep are so small that the CPU is what bounds a call, and a process keeps the luck
of its start for life: where its memory lies, what its cores share. So a size that looks slower as
called is measured again in fresh processes, and there the least times of both sides are compared: a
busy machine only ever adds.
"""
import contextlib
import itertools

import bench_lib
import bench_tables
import bench_worker
from bench_lib import Column

FULL = ("2048x2048x2048,4096x4096x4096,512x4096x4096,2048x4096x4096,4096x4096x128,8192x4096x8192,"
        "8192x4096x14336,8192x14336x4096,8192x8192x8192,8192x16384x16384,16384x8192x1280,"
        "16384x8192x7168,16384x16384x128,2048x1024x32000:fwd,8192x4096x128256:fwd")
QUICK = ("2048x2048x2048,4096x4096x4096,8192x4096x14336,8192x8192x8192,16384x8192x1280,"
         "16384x16384x128,2048x1024x32000:fwd")
SWEEP = ((1, 8, 32, 128, 512, 2048, 8192, 32000), (128, 1024, 2048, 4096, 8192, 14336),
         (1024, 4096, 14336))
QUICK_SWEEP = ((1, 32, 512, 2048, 8192), (128, 1024, 4096, 14336), (1024, 4096))
FORCED = {"QSHIM_SET": "default.action=fp8"}
LIMIT = 0.98  # a ratio below it breaks the promise never to be slower
PAIRS = 4     # of processes, at most, in which a size of the sweep is measured
PAIR = [Column("native", "native", "linear"), Column("qshim", "qshim", "linear")]
COLUMNS = PAIR + [Column("fp8", "fp8", "linear"), Column("ceiling", "native", "ceiling")]
PEERS = {"torchao": "torchao", "torchao compiled": "torchao", "te": "transformer-engine"}


# ---- in the children ----------------------------------------------------------------------------


def call(case, layers, around=contextlib.nullcontext):
    """Returns a function that calls the next of the layers, with the backward pass unless the case
    is forward only; gradients are dropped, as an optimiser does."""
    import torch
    m, k, n = case["m"], case["k"], case["n"]
    tick = bench_worker.ticker()
    sets = itertools.cycle([(layer, bench_worker.normal(m, k).requires_grad_(),
                             None if case["forward"] else bench_worker.normal(m, n))
                            for layer in layers])

    def forward():
        layer, x, _ = next(sets)
        with torch.no_grad(), around():
            layer(x)
        tick()

    def both():
        layer, x, dy = next(sets)
        with around():
            y = layer(x)
        tick()
        y.backward(dy)
        tick()
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None

    return forward if case["forward"] else both


def count(case):
    m, k, n = case["m"], case["k"], case["n"]
    return bench_worker.sets_of(2 * (m * k + k * n + m * n))


def plain_layers(case):
    import torch
    layers = [torch.nn.Linear(case["k"], case["n"], bias=False, device="cuda",
                              dtype=torch.bfloat16) for _ in range(count(case))]
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=case["k"] ** -0.5)
    return layers


def torchao_layers(case, compiled):
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    layers = [convert_to_float8_training(torch.nn.Sequential(layer), config=config)
              for layer in plain_layers(case)]
    return [torch.compile(layer, dynamic=False) for layer in layers] if compiled else layers


def transformer_engine_call(case):
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling
    layers = [te.Linear(case["k"], case["n"], bias=False, params_dtype=torch.bfloat16,
                        device="cuda") for _ in range(count(case))]
    recipe = Float8CurrentScaling()
    return call(case, layers, lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe))


def ceiling_call(case):
    """The products of the layer and nothing else."""
    m, k, n = case["m"], case["k"], case["n"]
    product = bench_worker.fp8_product

    def one():
        fprop = product(m, n, k, fast=True)
        return [fprop] if case["forward"] else [fprop, product(m, k, n, fast=False),
                                                product(n, k, m, fast=False)]
    sets = itertools.cycle([one() for _ in range(count(case))])

    tick = bench_worker.ticker()

    def run():
        for multiply in next(sets):
            multiply()
        tick()
    run()  # sizes it does not take are refused here
    return run


MAKE = {
    "linear": lambda case: call(case, plain_layers(case)),
    "ceiling": ceiling_call,
    "torchao": lambda case: call(case, torchao_layers(case, compiled=False)),
    "torchao compiled": lambda case: call(case, torchao_layers(case, compiled=True)),
    "te": transformer_engine_call,
}


def build(case):
    return bench_worker.make_all(MAKE, case)


def facts():
    return bench_worker.machine() | {package: bench_worker.version_of(package)
                                     for package in sorted(set(PEERS.values()))}


# ---- in the parent ------------------------------------------------------------------------------


def shape(text):
    (m, k, n), word = bench_lib.sizes(text, words=("fwd",))
    return {"m": m, "k": k, "n": n, "forward": word == "fwd"}


def columns_for(arguments, machine):
    """What is measured: peers only where they are installed, compiling only if there is time."""
    if arguments.sweep:
        return PAIR
    peers = [name for name, package in PEERS.items() if machine.get(package)]
    return COLUMNS + [Column(name, "native", name) for name in peers
                      if not (arguments.quick and "compiled" in name)]


def measure(sides, columns, case, effort, earlier=None):
    """The report's row of a case, and its blocks. `earlier` are blocks of other processes, which
    count as much."""
    wanted = {side: sorted({c.variant for c in columns if c.side == side}) for side in sides.sides}
    missing = bench_lib.load(sides, case, wanted)
    present = [c for c in columns if (c.side, c.variant) not in missing]
    before = sides["qshim"].counters()
    blocks = bench_lib.joined(earlier or {}, bench_lib.measure(sides, present, effort))
    results = bench_lib.figures(blocks, "native")
    results |= {c.label: {"error": missing[c.side, c.variant]}
                for c in columns if c not in present}
    return {**case, "columns": results,
            "products": bench_lib.served(before, sides["qshim"].counters())}, blocks


def cases_for(arguments):
    if arguments.shapes:
        return arguments.shapes
    if not arguments.sweep:
        return [shape(text) for text in (QUICK if arguments.quick else FULL).split(",")]
    return [{"m": m, "k": k, "n": n, "forward": True}
            for m, k, n in itertools.product(*(QUICK_SWEEP if arguments.quick else SWEEP))]


def effort_for(arguments):
    if arguments.sweep:
        return bench_lib.Effort(blocks=6, block_ms=4, warm_ms=5)
    return bench_lib.Effort(blocks=4, warm_ms=30) if arguments.quick else bench_lib.Effort()


def least(row):
    """Of the sweep: the ratio by the clock that is worse for qshim; 0 where it has none."""
    figures = row["columns"]["qshim"]
    return min(figures["least_ratio"], figures["gpu_ratio"]["median"]) if "ms" in figures else 0


def doubtful(row):
    figures = row["columns"]["qshim"]
    return "ms" in figures and min(figures["least_ratio"], figures["ratio"]["median"]) < LIMIT


def summary(rows):
    """Of a sweep: the worst size, and all that are slower than allowed, by either clock."""
    ordered = sorted(rows, key=least)
    return {"limit": LIMIT, "worst": ordered[0], "below": [r for r in ordered if least(r) < LIMIT]}


def measure_doubtful(settings, arguments, effort, report, cases, blocks):
    """Measures sizes that look slower as called again, in fresh processes each time. `cases` and
    `blocks` are those of the report's rows."""
    results = report.data["results"]
    for pair in range(2, PAIRS + 1):
        again = [i for i, row in enumerate(results) if doubtful(row)]
        if not again:
            return
        with bench_lib.Sides(__file__, settings, arguments.library) as sides:
            for i in again:
                results[i], blocks[i] = measure(sides, PAIR, cases[i], effort, blocks[i])
                results[i]["pairs"] = pair
                bench_tables.progress(results[i])
            report.write()


def main():
    p = bench_lib.parser(__doc__, "MxKxN or MxKxN:fwd (tokens, in, out), comma-separated")
    p.add_argument("--sweep", action="store_true", help="forward products of 144 sizes")
    arguments = bench_lib.parse(p, shape)
    settings = {"native": None, "qshim": bench_lib.policy_of(arguments)}
    if not arguments.sweep:
        settings["fp8"] = FORCED
    effort = effort_for(arguments)
    with bench_lib.Sides(__file__, settings, arguments.library) as sides:
        columns = columns_for(arguments, sides["native"].facts)
        report = bench_lib.Report(__file__, arguments, sides, effort)
        cases, blocks = cases_for(arguments), []
        for case in cases:
            row, of_case = measure(sides, columns, case, effort)
            report.add(row)
            blocks.append(of_case)
            bench_tables.progress(row)
    if arguments.sweep:
        measure_doubtful(settings, arguments, effort, report, cases, blocks)
    report.finish(**(summary(report.data["results"]) if arguments.sweep else {}))
    print(bench_tables.table("sweep" if arguments.sweep else "linear", report.data))
    bench_lib.end(report)


if __name__ == "__main__":
    if bench_worker.is_worker():
        bench_worker.serve(build, facts=facts)
    else:
        bench_lib.run(main)
