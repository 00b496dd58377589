#!/usr/bin/env python3
"""A square nn.Linear whose weight stays quantised, natively and under qshim, in one run.

Forward, no bias, few tokens: qshim told to keep weights in NF4, qshim told to keep them in fp8
unverified (validity = frozen), qshim as a bare preload has it (the default policy), and where they
are installed bitsandbytes and torchao, whose weights are NF4 from the start. A step calls as many
layers as it takes for no weight, nor its 4-bit form, to be in the L2 when its turn comes. It is timed
as a replayed CUDA graph and launched eagerly; times are per call. Memory is what a process has on the
device for one layer beyond its input: weight, temporaries, and what qshim keeps beside the weight.
"""
import functools
import itertools
import math

import bench_lib
import bench_tables
import bench_worker
from bench_lib import Column

TOKENS, HIDDEN = (1, 8, 32, 128, 512), (1024, 2048, 4096, 8192)
QUICK_TOKENS, QUICK_HIDDEN = (1, 32, 128, 512), (4096, 8192)
ROTATED = 512 << 20  # bytes of bf16 weights in a step; in NF4 they are 136 MiB, twice an H200's L2
NF4 = {"QSHIM_SET": "default.action=nf4"}
FROZEN = {"QSHIM_SET": "default.action=fp8;cache.validity=frozen"}
PEERS = {"bitsandbytes": "bitsandbytes", "torchao": "torchao", "torchao compiled": "torchao"}
SHIMMED = ("nf4", "fp8", "auto")
OWN = tuple((side, side, "linear") for side in ("native", *SHIMMED))
MODES = ("graph", "eager")


# ---- in the children ----------------------------------------------------------------------------


def layers_of(hidden):
    """How many layers a step calls."""
    return max(2, math.ceil(ROTATED / (2 * hidden * hidden)))


def weight(hidden):
    return bench_worker.normal(hidden, hidden, scale=hidden ** -0.5)


def linear(hidden):
    import torch
    layer = torch.nn.Linear(hidden, hidden, bias=False, device="cuda", dtype=torch.bfloat16)
    torch.nn.init.normal_(layer.weight, std=hidden ** -0.5)
    return layer


def bitsandbytes(hidden):
    """Blocks of 64 with fp32 maxima: the faster of its two forms."""
    import bitsandbytes as bnb
    packed, state = bnb.functional.quantize_4bit(weight(hidden), blocksize=64, quant_type="nf4")
    return lambda x: bnb.matmul_4bit(x, packed.t(), quant_state=state)


def torchao_functions():
    try:
        from torchao.dtypes.nf4tensor import linear_nf4, to_nf4
    except ImportError:  # where newer versions have it
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4
    return linear_nf4, to_nf4


def torchao(hidden, compiled=False):
    import torch
    multiply, to_nf4 = torchao_functions()
    packed = to_nf4(weight(hidden), 64, 256)
    if compiled:
        torch._dynamo.config.recompile_limit = 64  # one code for each size
        multiply = torch.compile(multiply, dynamic=False)
    return lambda x: multiply(x, packed)


MAKE = {"linear": linear, "bitsandbytes": bitsandbytes, "torchao": torchao,
        "torchao compiled": functools.partial(torchao, compiled=True)}


@functools.cache
def layers(kind, hidden):
    """(layers, bytes they take). Never freed: what qshim keeps of them stays theirs."""
    import torch
    before = torch.cuda.memory_allocated()
    made = [MAKE[kind](hidden) for _ in range(layers_of(hidden))]
    return made, torch.cuda.memory_allocated() - before


def temporaries(step):
    """Peak bytes that a step takes and gives back, after a first one has taken what stays."""
    import torch
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def prepare(case, kind):
    """A step, and the bytes it takes beyond its inputs. Each layer has an input of its own: none is
    found quantised."""
    import torch
    made, size = layers(kind, case["hidden"])
    inputs = [bench_worker.normal(case["tokens"], case["hidden"]) for _ in made]

    def step():
        with torch.no_grad():
            for layer, x in zip(made, inputs):
                layer(x)

    return step, size + temporaries(step)


def build(case):
    steps, answers, missing = {}, {}, {}
    for kind in case["variants"]:
        try:
            step, size = prepare(case, kind)
            answers[f"memory {kind}"] = functools.partial(int, size)
            steps[f"{kind} eager"] = step
            steps[f"{kind} graph"] = bench_worker.captured(step)
        except Exception as error:
            why = bench_worker.first_line(error)
            missing |= {name: why for mode in MODES if (name := f"{kind} {mode}") not in steps}
    return steps, answers, missing


def facts():
    return bench_worker.machine() | {package: bench_worker.version_of(package)
                                     for package in sorted(set(PEERS.values()))}


# ---- in the parent ------------------------------------------------------------------------------


def shape(text):
    (tokens, hidden), _ = bench_lib.sizes(text, count=2)
    return {"tokens": tokens, "hidden": hidden}


def columns_for(machine, quick):
    """(label, side, kind) of what is measured: peers only where they are installed."""
    peers = [name for name, package in PEERS.items() if machine.get(package)]
    return OWN + tuple((name, "native", name) for name in peers
                       if not (quick and "compiled" in name))


def measure_mode(sides, mode, columns, missing, calls, effort):
    present = [Column(label, side, f"{kind} {mode}") for label, side, kind in columns
               if (side, f"{kind} {mode}") not in missing]
    results = bench_lib.figures(bench_lib.measure(sides, present, effort), "native")
    results = bench_lib.per_call(results, calls)
    return results | {label: {"error": missing[side, f"{kind} {mode}"]}
                      for label, side, kind in columns if label not in results}


def kept_bytes(sides):
    return {name: sum(size for size, _ in side.kept().values())
            for name, side in sides.sides.items()}


def memory(sides, columns, kept):
    """Label -> bytes of a step, with what its side keeps of the layers; None if it was not to be
    had."""
    own = {label: sides[side].tell(f"memory {kind}") for label, side, kind in columns}
    return {label: None if own[label] is None else own[label] + kept[side]
            for label, side, _ in columns}


def measure(sides, columns, case, effort, kept):
    """A row of the report. `kept`: side -> bytes it keeps of this case's layers, brought up to
    date."""
    wanted = {side: [kind for _, s, kind in columns if s == side] for side in sides.sides}
    before = kept_bytes(sides)
    missing = bench_lib.load(sides, case, wanted)
    calls = layers_of(case["hidden"])
    row = {**case, "calls": calls}
    row["graph"] = measure_mode(sides, "graph", columns, missing, calls, effort)
    counters = {name: sides[name].counters() for name in SHIMMED}
    row["eager"] = measure_mode(sides, "eager", columns, missing, calls, effort)
    row["served"] = {name: bench_lib.served(counters[name], sides[name].counters())
                     for name in counters}
    for name, size in kept_bytes(sides).items():
        kept[name] = kept.get(name, 0) + size - before[name]
    row["memory"] = {label: None if size is None else size / calls
                     for label, size in memory(sides, columns, kept).items()}
    row["uses"] = {name: {form: uses for form, (_, uses) in sides[name].kept().items()}
                   for name in counters}
    return row


def cases_for(arguments):
    if arguments.shapes:
        return arguments.shapes
    hidden, tokens = (QUICK_HIDDEN, QUICK_TOKENS) if arguments.quick else (HIDDEN, TOKENS)
    return [{"tokens": t, "hidden": h} for h, t in itertools.product(hidden, tokens)]


def main():
    p = bench_lib.parser(__doc__, "TOKENSxHIDDEN, comma-separated")
    arguments = bench_lib.parse(p, shape)
    settings = {"native": None, "nf4": bench_lib.policy_of(arguments) or NF4, "fp8": FROZEN,
                "auto": {}}
    effort = bench_lib.Effort(blocks=4 if arguments.quick else 8, block_ms=10, warm_ms=10,
                              warm_reps=2, apart=False, wake=True)
    with bench_lib.Sides(__file__, settings, arguments.library) as sides:
        machine = sides["native"].facts
        columns = columns_for(machine, arguments.quick)
        report = bench_lib.Report(__file__, arguments, sides, effort)
        kept = {}  # of the layers of each width
        for case in cases_for(arguments):
            report.add(measure(sides, columns, case, effort, kept.setdefault(case["hidden"], {})))
            bench_tables.nf4_progress(report.data["results"][-1])
        report.finish(absent=sorted({p for p in PEERS.values() if not machine.get(p)}))
    print(bench_tables.table("nf4", report.data))
    bench_lib.end(report)


if __name__ == "__main__":
    if bench_worker.is_worker():
        bench_worker.serve(build, facts=facts)
    else:
        bench_lib.run(main)
