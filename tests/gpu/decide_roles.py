"""Roles and layers of every linear product of Llama-like models and of GPT-2, and the share of a step
that products take.

They train under `qshim run --labels=torch`. In each step every nn.Linear and every Conv1D of GPT-2,
whose weight lies the other way, must make a forward product, a dgrad and a wgrad, by operations and
shape; so must a head whose weight is the embedding too. As README says, a forward product of a
Conv1D may have no role in the first step, and a weight's gradient is named after the layer that
last read its input: how many have the right name is printed.

The share of a step that the summary tells, all products native, must be within ten points of what
PyTorch's profiler says of the same program without the preload. Runs without the preload itself.
"""
import collections
import concurrent.futures
import json
import pathlib
import re
import sys
import tempfile
import time

from support import (DGRAD, FWD, UNKNOWN, WGRAD, bare_environment, counters, library, need, report,
                     shape)

STEPS, LAYERS, BATCH, LENGTH = 6, 4, 4, 1024
TOKENS = BATCH * LENGTH
LONG, PROFILED, WARM = 60, 4, 4  # steps whose share is told, and of the profiler
POINTS = 10
ROLES = {UNKNOWN: "unknown", FWD: "fwd", DGRAD: "dgrad", WGRAD: "wgrad"}
# Operations of a layer's products; nn.Linear stores its weight by outputs, Conv1D by inputs.
OPERATIONS = {"Linear": {FWD: "TN", DGRAD: "NN", WGRAD: "NT"},
              "Conv1D": {FWD: "NN", UNKNOWN: "NN", DGRAD: "TN", WGRAD: "NT"}}


def make_model(torch, transformers, kind):
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=768, n_layer=2, n_head=12, vocab_size=50304,
                                         n_positions=LENGTH)
    else:
        config = transformers.LlamaConfig(
            hidden_size=2048, intermediate_size=5632, num_hidden_layers=LAYERS,
            num_attention_heads=16, num_key_value_heads=4, vocab_size=32000,
            tie_word_embeddings=kind == "tied")
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa")


def linear_layers(model):
    """Name -> (kind, inputs, outputs) of every linear layer."""
    found = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "Linear":
            found[name] = (kind, module.in_features, module.out_features)
        elif kind == "Conv1D":
            found[name] = (kind, *module.weight.shape)
    return found


class Training:
    def __init__(self, kind):
        self.torch, transformers = need("torch", "transformers")
        self.torch.manual_seed(0)
        self.model = make_model(self.torch, transformers, kind)
        self.optimizer = self.torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = self.torch.randint(32000, (BATCH, LENGTH), device="cuda")

    def run(self, steps):
        """Seconds of a step."""
        self.torch.cuda.synchronize()
        begin = time.monotonic()
        for _ in range(steps):
            self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.torch.cuda.synchronize()
        return (time.monotonic() - begin) / steps


def train(kind, steps):
    training = Training(kind)
    training.run(int(steps))
    return {"layers": linear_layers(training.model)}


def profile():
    """The share of a step that PyTorch's own products take on the device. The time of a step is
    that of steps that are not profiled."""
    training = Training("llama")
    training.run(WARM)
    seconds = training.run(LONG // 2)
    profiler = training.torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU,
                                      profiler.ProfilerActivity.CUDA]) as profiled:
        training.run(PROFILED)
    times = {event.key: device_us(event) for event in profiled.key_averages()}
    return {"share": share_of(times, PROFILED * seconds), "seconds": seconds}


def device_us(event):
    """Microseconds on the device in kernels of the operation itself; PyTorch has renamed it."""
    for name in ("self_device_time_total", "self_cuda_time_total"):
        if hasattr(event, name):
            return getattr(event, name)
    raise AttributeError("the profiler tells no times of the device")


def share_of(times, seconds):
    """Percent of the seconds, operation -> microseconds on the device being given."""
    products = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation")
    return 100 * sum(times.get(name, 0) for name in products) / (1e6 * seconds)


def share_said(said):
    """Percent of a step in products, as the summary tells; None if it does not."""
    found = re.search(r"steps of \d+ products, .*?, ([\d.]+) % of it in products", said)
    return float(found[1]) if found else None


def form_of(role, kind, inputs, outputs):
    """(Operations, m, n, k) of a layer's product; no operations if it has none of this role."""
    operations = OPERATIONS[kind].get(role)
    if role in (FWD, UNKNOWN):
        return operations, outputs, TOKENS, inputs
    if role == DGRAD:
        return operations, inputs, TOKENS, outputs
    return (operations, *((inputs, outputs) if kind == "Linear" else (outputs, inputs)), TOKENS)


def calls_of(layers, slots):
    """(Name, role) -> calls, dW's (operations, m, n, k) -> calls, and what is of the wrong form."""
    calls, gradients, wrong = collections.Counter(), collections.Counter(), []
    for slot in slots:
        name, role = slot["layer"], slot["role"]
        if role == WGRAD:
            gradients[shape(slot["key"])] += slot["calls"]
        if name not in layers:
            continue
        calls[name, role] += slot["calls"]
        if role != WGRAD and shape(slot["key"]) != form_of(role, *layers[name]):
            wrong.append(f"{name}: {ROLES[role]} is {slot['key']}")
    return calls, gradients, wrong


def judge_roles(layers, slots, steps):
    """What is wrong with the counters of a run of so many steps."""
    calls, gradients, wrong = calls_of(layers, slots)
    wanted = collections.Counter()
    for name, layer in layers.items():
        wanted[form_of(WGRAD, *layer)] += steps
        unknown = calls[name, UNKNOWN]
        if unknown > (layer[0] == "Conv1D") or calls[name, FWD] + unknown != steps:
            wrong.append(f"{name}: {calls[name, FWD]} products are fwd, {unknown} unknown")
        if calls[name, DGRAD] != steps:
            wrong.append(f"{name}: {calls[name, DGRAD]} products are dgrad")
    if gradients != wanted:
        wrong.append(f"wgrad: {dict(gradients)}, not {dict(wanted)}")
    return wrong


def named(layers, slots, steps):
    """Percent of the weights' gradients that have the name of a layer of theirs: of the same module
    and size, as siblings that read one input are not told apart."""
    calls, _, _ = calls_of(layers, slots)
    groups = collections.defaultdict(list)
    for name, (kind, inputs, outputs) in layers.items():
        groups[name.rpartition(".")[0], kind, inputs * outputs].append(name)
    right = sum(min(sum(calls[name, WGRAD] for name in group), steps * len(group))
                for group in groups.values())
    return 100 * right / (steps * len(layers))


def ask(folder, kind, steps):
    """A training run under `qshim run`, all products left native."""
    command = [str(pathlib.Path(library()).parent / "qshim"), "run", "--labels=torch", "-o",
               str(folder), "--", sys.executable, __file__, "train", kind, str(steps)]
    return report(command, bare_environment() | {
        "QSHIM_SET": "default.action=native;tune.file=", "QSHIM_QUIET": "1", "QSHIM_SUMMARY": "1"})


def show_roles(folder, kind, steps):
    """What there is to say, and what the run's summary says."""
    told, said = ask(folder / kind, kind, steps)
    layers = {name: tuple(layer) for name, layer in told["layers"].items()}
    slots = counters(folder / kind)
    wrong = judge_roles(layers, slots, steps)
    assert not wrong, f"{kind}: {'; '.join(wrong[:5])} ({len(wrong)} errors)"
    return (f"{kind}: roles of {len(layers)} layers right in {steps} steps, "
            f"{named(layers, slots, steps):.0f} % of dW named"), said


def show_share(said):
    native, _ = report([sys.executable, __file__, "profile"], bare_environment())
    share = share_said(said)
    assert share is not None, f"the summary tells no share: {said[:400]}"
    assert abs(share - native["share"]) <= POINTS, (
        f"products take {share} % of a step, says the summary; the profiler: {native['share']:.1f}")
    return f"products take {share:.1f} % of a step (the profiler: {native['share']:.1f} %)"


def show(folder):
    llama, said = show_roles(folder, "llama", LONG)
    share = show_share(said)
    with concurrent.futures.ThreadPoolExecutor() as both:
        others = list(both.map(lambda kind: show_roles(folder, kind, STEPS)[0], ("tied", "gpt2")))
    return "; ".join([llama, *others, share])


def main():
    if len(sys.argv) > 1:
        run = {"train": train, "profile": profile}[sys.argv[1]]
        print(json.dumps(run(*sys.argv[2:])))
        return
    need("torch", "transformers")
    with tempfile.TemporaryDirectory() as name:
        print(show(pathlib.Path(name)))


if __name__ == "__main__":
    main()
