#!/usr/bin/env python3
"""Llama-like models of transformers, natively and under qshim, in one run: whole programs.

Random weights and tokens, bf16, sdpa, eager: training steps with fused AdamW, and prefill without
gradients. A faster product can only shorten the products' share of a step, so that share is taken
from torch.profiler on the native side, and the ratio is also given as a part of what it would be if
every product took 1/1.9 of its time (the rate of fp8 without any quantisation). Both sides train on
the same batches from the same weights: their losses are comparable step by step.
"""
import argparse
import itertools
import re

import bench_lib
import bench_tables
import bench_worker
from bench_lib import Column

MODELS = {
    "1b": {"title": "1.1 B", "hidden": 2048, "ffn": 5632, "layers": 22, "heads": 32,
           "kv_heads": 4, "batch": 8, "context": 2048},
    "8b-8l": {"title": "8 layers of an 8 B", "hidden": 4096, "ffn": 14336, "layers": 8,
              "heads": 32, "kv_heads": 8, "batch": 4, "context": 4096},
}
VOCABULARY = 32000
BATCHES = 4          # drawn once and used in turn
PRODUCT_RATIO = 1.9  # fp8 over bf16 products, nothing quantised: the ceiling of bench_layer.py
PRODUCTS = re.compile(r"gemm|nvjet|xmma|splitk", re.IGNORECASE)
NOT_PRODUCTS = re.compile(r"fmha|flash|attention", re.IGNORECASE)


# ---- in the children ----------------------------------------------------------------------------


def config_of(case):
    from transformers import LlamaConfig
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=case["hidden"], intermediate_size=case["ffn"],
        num_hidden_layers=case["layers"], num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"], max_position_embeddings=case["context"])


class Program:
    """A model, its optimiser and its batches; the same in every process."""

    def __init__(self, case):
        import torch
        from transformers import AutoModelForCausalLM
        self.torch = torch
        torch.manual_seed(1)
        with torch.device("cuda"):
            self.model = AutoModelForCausalLM.from_config(
                config_of(case), dtype=torch.bfloat16, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(1)
        shape = (BATCHES, case["batch"], case["context"])
        tokens = torch.randint(VOCABULARY, shape, generator=generator).cuda()
        self.batches, self.losses = itertools.cycle(tokens), []

    def train(self):
        self.model.train()
        tokens = next(self.batches)
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())  # read later: a read would wait for the GPU

    def prefill(self):
        self.model.eval()
        with self.torch.no_grad():
            self.model(input_ids=next(self.batches), use_cache=True, logits_to_keep=1)

    def parameters(self):
        return sum(p.numel() for p in self.model.parameters())

    def read_losses(self):
        return [float(loss) for loss in self.losses]

    def kernel_ms(self, step):
        """{"all", "products"}: GPU time of one call, by the profiler; None if it saw nothing."""
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
            step()
            self.torch.cuda.synchronize()
        times = [(e.key, e.self_device_time_total / 1e3) for e in trace.key_averages()]
        total = sum(ms for _, ms in times)
        products = sum(ms for name, ms in times
                       if PRODUCTS.search(name) and not NOT_PRODUCTS.search(name))
        return {"all": total, "products": products} if total else None


def build(case):
    program = Program(case)
    steps = {"train": program.train, "prefill": program.prefill}
    answers = {"losses": program.read_losses, "parameters": program.parameters,
               **{f"kernels {name}": lambda step=step: program.kernel_ms(step)
                  for name, step in steps.items()}}
    return steps, answers, {}


def facts():
    return bench_worker.machine() | {"transformers": bench_worker.version_of("transformers")}


# ---- in the parent ------------------------------------------------------------------------------


def model(text):
    if text not in MODELS:
        raise argparse.ArgumentTypeError(f"no model '{text}' (there are {', '.join(MODELS)})")
    return {"model": text, **MODELS[text]}


def ceiling(kernels, step_ms):
    """{"share", "ratio"}: the products' share of a native step, and how much faster the step would
    be if they took 1/PRODUCT_RATIO of their time."""
    if not kernels:
        return None
    share = min(1.0, kernels["products"] / step_ms)
    return {"kernels": kernels, "share": share,
            "product_ratio": PRODUCT_RATIO, "ratio": 1 / (1 - share + share / PRODUCT_RATIO)}


def measure_kind(sides, kind, tokens, effort):
    """Figures of training steps or of prefill, with tokens/s and what was possible."""
    columns = [Column("native", "native", kind), Column("qshim", "qshim", kind)]
    before = sides["qshim"].counters()
    columns = bench_lib.figures(bench_lib.measure(sides, columns, effort), "native")
    for figures in columns.values():
        if "ms" in figures:
            figures["tokens_per_s"] = 1e3 * tokens / figures["ms"]["median"]
    return {"columns": columns,
            "products": bench_lib.served(before, sides["qshim"].counters())}


def add_ceiling(sides, kind, row):
    native = row[kind]["columns"]["native"]
    if "ms" in native:
        kernels = sides["native"].tell(f"kernels {kind}")
        row[kind]["ceiling"] = ceiling(kernels, native["ms"]["median"])


def measure(sides, case, effort):
    bench_lib.load(sides, case, {})
    tokens = case["batch"] * case["context"]
    row = {**case, "train": measure_kind(sides, "train", tokens, effort)}
    row["losses"] = {name: sides[name].tell("losses") for name in ("native", "qshim")}
    row["prefill"] = measure_kind(sides, "prefill", tokens, effort)
    for kind in ("train", "prefill"):  # last: a profiled step is a step that only one side takes
        add_ceiling(sides, kind, row)
    row["parameters"] = sides["native"].tell("parameters")
    return row


def main():
    p = bench_lib.parser(__doc__, f"models, comma-separated: {', '.join(MODELS)}")
    arguments = bench_lib.parse(p, model)
    settings = {"native": None, "qshim": bench_lib.policy_of(arguments)}
    effort = bench_lib.Effort(blocks=4 if arguments.quick else 6, block_ms=0, warm_ms=0,
                              warm_reps=4, least_reps=1 if arguments.quick else 2, apart=False)
    with bench_lib.Sides(__file__, settings, arguments.library) as sides:
        report = bench_lib.Report(__file__, arguments, sides, effort)
        for case in arguments.shapes or [model(name) for name in MODELS]:
            report.add(measure(sides, case, effort))
        report.finish()
    print(bench_tables.table("llama", report.data))
    bench_lib.end(report)


if __name__ == "__main__":
    if bench_worker.is_worker():
        bench_worker.serve(build, facts=facts)
    else:
        bench_lib.run(main)
