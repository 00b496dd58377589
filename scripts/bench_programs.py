#!/usr/bin/env python3
"""Whole training programs under the default policy, beside native and beside policies by hand.

Four programs that learn to predict bytes of this repository's text, or (the MLP) what a random
network says of random numbers: a GPT of nn.Linear under autocast, transformers' GPT-2 (Conv1D, which
asks for other orientations of the same products), a Llama-like model in bf16 and a small MLP bound by
the CPU. Each program has processes of its own. First two native ones and one under the default policy
train from the same weights on the same batches, and their losses are compared at every hundredth step,
each as the mean of the last AVERAGED; two native runs differ too, as sums of gradients are added in any
order. In these steps the default policy measures and decides. Then steps are timed, all sides in turns;
what the two native processes differ by says what a difference of that size is worth. Of a program
that the CPU bounds, one process is faster than another for as long as both live; there several
processes are timed for the default policy and for native, and the medians of them are compared.
"""
import argparse
import statistics
import sys
import time

import bench_lib
import bench_tables
import bench_worker
from bench_lib import Column

PROGRAMS = ("gpt", "gpt2", "llama", "mlp")
BY_HAND = {  # what somebody would write who knows the chip but has not measured the program
    "fp8": "action=fp8;scale=tensor",
    "fp8 by rows": "action=fp8;scale=row",
    "large in fp8": "QSHIM_POLICY=fp8-training",
    "bf16": "QSHIM_POLICY=lossless",
}
TRAINED = ("native", "again", "qshim")
MORE = {"mlp": 4}  # processes of native and of the default policy besides those
STEPS, AVERAGED, LIMIT = 500, 20, 0.02
BLOCKS = 42  # short and many: what disturbs the CPU comes and goes
RATE, RISING = 1e-4, 40  # of learning, and the steps in which it rises to that
BATCH, CONTEXT, VOCABULARY = 16, 512, 256


def hundredths(losses):
    """The mean of the last AVERAGED losses before each hundredth step."""
    return [statistics.mean(losses[end - AVERAGED:end]) for end in range(100, len(losses) + 1, 100)]


# ---- in the children ----------------------------------------------------------------------------


def gpt():
    import train_gpt
    arguments = argparse.Namespace(dim=1024, layers=6, heads=16, context=CONTEXT)
    return train_gpt.GPT(arguments)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=1024, n_layer=6, n_head=16,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=5632, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=CONTEXT)).bfloat16()


def mlp():
    from torch import nn
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                         nn.Linear(512, 10))


class Program:
    """A program, its optimiser and its batches; the same in every process."""

    def __init__(self, name):
        import torch
        self.torch, self.name = torch, name
        self.restart()

    def restart(self):
        torch = self.torch
        torch.manual_seed(1)
        self.model = {"gpt": gpt, "gpt2": gpt2, "llama": llama, "mlp": mlp}[self.name]().cuda()
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        self.steps = 0
        self.batches = self.numbers() if self.name == "mlp" else self.text()

    def text(self):
        import train_gpt
        arguments = argparse.Namespace(seed=1, context=CONTEXT, batch=BATCH, device="cuda")
        data = self.torch.frombuffer(bytearray(train_gpt.read_text(None)), dtype=self.torch.uint8)
        return train_gpt.batches(data, arguments)

    def numbers(self):
        torch = self.torch
        generator = torch.Generator().manual_seed(1)
        teacher = torch.randn(784, 10, generator=generator).cuda()
        while True:
            x = torch.randn(256, 784, generator=generator).cuda()
            yield x, (x @ teacher).argmax(1)

    def loss(self, x, y):
        functional = self.torch.nn.functional
        with self.torch.autocast("cuda", dtype=self.torch.bfloat16, enabled=self.name != "llama"):
            if self.name == "gpt":
                return self.model(x, y)
            if self.name == "mlp":
                return functional.cross_entropy(self.model(x).float(), y)
            logits = self.model(input_ids=x, use_cache=False).logits.float()
        return functional.cross_entropy(logits.view(-1, VOCABULARY), y.reshape(-1))

    def step(self):
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = RATE * min(1.0, self.steps / RISING)
        loss = self.loss(*next(self.batches))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # read later: a read would wait for the GPU

    def curve(self):
        self.restart()
        return hundredths([float(loss) for loss in [self.step() for _ in range(STEPS)]])


def build(case):
    program = Program(case["program"])
    return {"train": program.step}, {"curve": program.curve}, {}


def facts():
    return bench_worker.machine() | {"transformers": bench_worker.version_of("transformers")}


# ---- in the parent ------------------------------------------------------------------------------


def program(text):
    if text not in PROGRAMS:
        raise argparse.ArgumentTypeError(f"no program '{text}' (there are {', '.join(PROGRAMS)})")
    return {"program": text}


def variables(policy):
    """Of qshim, for a policy by hand."""
    name, value = policy.split("=", 1)
    if name == "QSHIM_POLICY":
        return {name: value}
    return {"QSHIM_SET": ";".join(f"default.{part}" for part in policy.split(";"))}


def best_by_hand(columns):
    """(name, ratio) of the fastest policy by hand."""
    found = [(figures["ratio"]["median"], name) for name, figures in columns.items()
             if name in BY_HAND and "ratio" in figures]
    return max(found)[::-1] if found else (None, None)


def worst_difference(one, other):
    """Of two curves, at any hundredth step; None if one is missing."""
    if one is None or other is None:
        return None
    return max(abs(a - b) for a, b in zip(one, other))


def train(sides):
    """The losses of each side of TRAINED, and how they differ. What qshim measures meanwhile wants the
    GPU for itself; the others need not."""
    native = [name for name in TRAINED if name != "qshim"]
    for name in native:
        sides[name].send("tell", what="curve")
    curves = {name: sides[name].answer().get("value") for name in native}
    curves["qshim"] = sides["qshim"].tell("curve")
    return {"curves": curves, "difference": worst_difference(curves["native"], curves["qshim"]),
            "control": worst_difference(curves["native"], curves["again"])}


class Took:
    """Progress of a long run, on stderr: what has just ended, and the seconds it took."""

    def __init__(self, program):
        self.program, self.since = program, time.monotonic()

    def __call__(self, what):
        now = time.monotonic()
        print(f"{self.program}: {what}: {now - self.since:.0f} s", file=sys.stderr)
        self.since = now


def members(name, program):
    """The processes of a side, by name: itself and those that are only timed."""
    more = MORE.get(program, 0) if name in ("native", "qshim") else 0
    return [name, *(f"{name} {i + 2}" for i in range(more))]


def pooled(blocks):
    """Of the processes of a side: of each block the median, or what failed."""
    failed = [b for b in blocks if isinstance(b, dict)]
    if failed:
        return failed[0]
    return [{field: statistics.median(b[field] for b in block) for field in block[0]}
            for block in zip(*blocks)]


def measure(sides, case, effort, curves):
    took = Took(case["program"])
    bench_lib.load(sides, case, {}, together=True)
    row = {**case}
    if curves:
        row |= train(sides)
    for name in members("qshim", case["program"])[1 if curves else 0:]:
        sides[name].ask("warm", variant="train", ms=0, reps=STEPS)
    took(f"{STEPS} steps of {len(TRAINED) if curves else 1}")
    before = sides["qshim"].counters()
    names = {name: members(name, case["program"]) for name in (*TRAINED, *BY_HAND)}
    columns = [Column(name, name, "train") for name in sum(names.values(), [])]
    times = bench_lib.measure(sides, columns, effort)
    columns = bench_lib.figures({name: pooled([times[member] for member in some])
                                 for name, some in names.items()}, "native")
    took("timing")
    return row | {"columns": columns, "best": best_by_hand(columns),
                  "products": bench_lib.served(before, sides["qshim"].counters())}


def main():
    p = bench_lib.parser(__doc__, f"programs, comma-separated: {', '.join(PROGRAMS)}")
    p.add_argument("--no-curves", action="store_true", help="time steps only")
    arguments = bench_lib.parse(p, program)
    settings = {"native": None, "again": None, "qshim": bench_lib.policy_of(arguments),
                **{name: variables(policy) for name, policy in BY_HAND.items()}}
    effort = bench_lib.Effort(blocks=BLOCKS // 3 if arguments.quick else BLOCKS, block_ms=50,
                              warm_ms=200, warm_reps=8, apart=False, wake=True)
    report = None
    for case in arguments.shapes or [program(name) for name in PROGRAMS]:
        sides_of = {member: variables for name, variables in settings.items()
                    for member in members(name, case["program"])}
        with bench_lib.Sides(__file__, sides_of, arguments.library) as sides:
            report = report or bench_lib.Report(__file__, arguments, sides, effort)
            report.sides = sides
            report.add(measure(sides, case, effort, not arguments.no_curves))
    report.finish(limit=LIMIT, steps=STEPS, averaged=AVERAGED, by_hand=BY_HAND, more=MORE)
    print(bench_tables.table("programs", report.data))
    bench_lib.end(report)


if __name__ == "__main__":
    if bench_worker.is_worker():
        bench_worker.serve(build, facts=facts)
    else:
        bench_lib.run(main)
