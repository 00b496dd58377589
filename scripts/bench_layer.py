#!/usr/bin/env python3
"""The twelve products of one transformer layer, natively and under qshim, in one run.

Four linear layers (h -> 3h, h -> h, h -> f, f -> h), each with fprop, dgrad and wgrad, as plain
matrix products: the layer of TransformerEngine's gemm_profiling example (15872 tokens, h 4096,
f 16384), which publishes 32.0 ms in bf16, 20.3 in fp8 with current scaling and 16.8 without any
quantisation for an H200 NVL. Measured are the three groups by themselves, and all twelve in the order
of a training step, in which dgrad and wgrad of a layer read the same dY one after the other.
"""
import bench_lib
import bench_tables
import bench_worker
from bench_lib import Column

DEFAULT = "15872x4096x16384"
GROUPS = ("fprop", "dgrad", "wgrad", "layer")
SIDES = (("native", "native", ""), ("qshim", "qshim", ""), ("fp8", "fp8", ""),
         ("ceiling", "native", "ceiling "))
FORCED = {"QSHIM_SET": "default.action=fp8"}


# ---- in the children ----------------------------------------------------------------------------


def layers_of(case):
    """(in, out) of the four linear layers."""
    h, f = case["hidden"], case["ffn"]
    return ((h, 3 * h), (h, h), (h, f), (f, h))


def ordered(products):
    """The functions of each group, from [{"fprop", "dgrad", "wgrad", "tick"}] of the layers in order.
    What else a layer does stands between its forward products, and between the layers of the
    backward pass: there is nothing between the two products of one."""
    groups = {g: [f for p in products for f in (p[g], p["tick"])] for g in GROUPS[:3]}
    backward = [f for p in reversed(products) for f in (p["dgrad"], p["wgrad"], p["tick"])]
    return {**groups, "layer": groups["fprop"] + backward}


def bf16_products(tokens, k, n):
    import torch
    x, w = bench_worker.normal(tokens, k), bench_worker.normal(n, k, scale=k ** -0.5)
    dy = bench_worker.normal(tokens, n)
    return {"fprop": lambda: torch.matmul(x, w.t()), "dgrad": lambda: torch.matmul(dy, w),
            "wgrad": lambda: torch.matmul(dy.t(), x), "tick": bench_worker.ticker()}


def fp8_products(tokens, k, n):
    """The same products from operands that are fp8 already, each laid out as its product needs."""
    product = bench_worker.fp8_product
    return {"fprop": product(tokens, n, k, fast=True), "dgrad": product(tokens, k, n, fast=False),
            "wgrad": product(n, k, tokens, fast=False), "tick": bench_worker.ticker()}


def calls(make, case, prefix):
    """Name of each group -> function that runs it."""
    def runner(functions):
        def run():
            for function in functions:
                function()
        return run
    groups = ordered([make(case["tokens"], k, n) for k, n in layers_of(case)])
    return {prefix + name: runner(functions) for name, functions in groups.items()}


def build(case):
    steps = calls(bf16_products, case, "")
    if any(v.startswith("ceiling") for v in case["variants"]):
        steps |= calls(fp8_products, case, "ceiling ")
    return steps, {}, {}


# ---- in the parent ------------------------------------------------------------------------------


def shape(text):
    (tokens, hidden, ffn), _ = bench_lib.sizes(text)
    return {"tokens": tokens, "hidden": hidden, "ffn": ffn}


def measure(sides, case, effort):
    """Ms of each group on each side; the groups are measured one after the other, the sides of one
    in turns."""
    columns = [Column(label, side, prefix + GROUPS[0]) for label, side, prefix in SIDES]
    bench_lib.load(sides, case, {s: [c.variant for c in columns if c.side == s]
                                 for s in sides.sides})
    groups, before = {}, sides["qshim"].counters()
    for group in GROUPS:
        columns = [Column(label, side, prefix + group) for label, side, prefix in SIDES]
        groups[group] = bench_lib.figures(bench_lib.measure(sides, columns, effort), "native")
    return {**case, "groups": groups,
            "products": bench_lib.served(before, sides["qshim"].counters())}


def main():
    p = bench_lib.parser(__doc__, "TOKENSxHIDDENxFFN, comma-separated")
    arguments = bench_lib.parse(p, shape)
    settings = {"native": None, "qshim": bench_lib.policy_of(arguments), "fp8": FORCED}
    effort = bench_lib.Effort(blocks=4 if arguments.quick else 8, warm_ms=40, warm_reps=4,
                              least_reps=1)
    with bench_lib.Sides(__file__, settings, arguments.library) as sides:
        report = bench_lib.Report(__file__, arguments, sides, effort)
        for case in arguments.shapes or [shape(DEFAULT)]:
            report.add(measure(sides, case, effort))
        report.finish()
    print(bench_tables.table("layer", report.data))
    bench_lib.end(report)


if __name__ == "__main__":
    if bench_worker.is_worker():
        bench_worker.serve(build)
    else:
        bench_lib.run(main)
