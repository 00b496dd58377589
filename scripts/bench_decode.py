#!/usr/bin/env python3
"""Decoding with a Llama-like model of 8 B parameters, natively and under qshim, in one run.

Random weights, bf16, on three sides: native, qshim with the preset nf4-decode, qshim with fp8
weights that are not verified (validity = frozen). Measured per token: a step of transformers' model
under a CUDA graph with a static cache; the step's products alone under a graph; and plain eager
generate(), which the CPU bounds and no shim may slow. --lean adds a decoder that launches little but
the products: what lies between them is fused by torch.compile. Every step decodes the last position
of a full cache, so all of them do the same work.
"""
import functools
import inspect

import bench_lib
import bench_tables
import bench_worker
from bench_lib import Column

MODEL = {"title": "8 B", "hidden": 4096, "ffn": 14336, "layers": 32, "heads": 32, "kv_heads": 8,
         "vocabulary": 128256}
BATCHES = (1, 8, 32)
CONTEXT = 512     # positions of the static cache
PROMPT = 16       # tokens given to generate()
NEW_TOKENS = 32   # tokens it makes
LIMIT = 0.98      # a ratio of generate() below it breaks the promise never to be slower
AGREE_DB = 20.0   # logits of the lean decoder against the model's: both in bf16, summed differently
SIDES = ("native", "nf4", "fp8")
KINDS = tuple(bench_tables.DECODE_KINDS)
PRESET = {"QSHIM_POLICY": "nf4-decode"}
FROZEN = {"QSHIM_SET": "default.action=fp8;cache.validity=frozen"}


# ---- in the children: transformers' model -------------------------------------------------------


@functools.cache
def model_of():
    """One for all batch sizes: weights stay where they are, and kept."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    config = LlamaConfig(
        vocab_size=MODEL["vocabulary"], hidden_size=MODEL["hidden"],
        intermediate_size=MODEL["ffn"], num_hidden_layers=MODEL["layers"],
        num_attention_heads=MODEL["heads"], num_key_value_heads=MODEL["kv_heads"],
        max_position_embeddings=CONTEXT)
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16,
                                                 attn_implementation="sdpa")
    return model.eval()


class FullCache:
    """Keys and values of all positions but the last, which each step writes anew. What the model
    needs of a cache is update()."""

    def __init__(self, model, batch):
        import torch
        config, like = model.config, model.lm_head.weight
        shape = (batch, config.num_key_value_heads, CONTEXT, config.head_dim)
        self.keys, self.values = (
            [torch.randn(shape, dtype=like.dtype, device=like.device)
             for _ in range(config.num_hidden_layers)] for _ in range(2))

    def update(self, key, value, layer, *_, **__):
        """Takes [batch][kv_heads][1][head_dim]; returns all positions."""
        self.keys[layer][:, :, -1:].copy_(key)
        self.values[layer][:, :, -1:].copy_(value)
        return self.keys[layer], self.values[layer]


def decoder(model, cache, tokens):
    """A function that decodes `tokens`, [batch][1], at the last position and returns the logits."""
    import torch
    position = torch.full((1, 1), CONTEXT - 1, device=tokens.device)
    seen = torch.ones(1, 1, 1, CONTEXT, dtype=torch.bool, device=tokens.device)
    known = inspect.signature(model.model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"  # in newer and older transformers

    def step():
        with torch.no_grad():
            return model(input_ids=tokens, attention_mask=seen, position_ids=position,
                         use_cache=True, **{name: cache}).logits[:, -1]
    return step


def generator(model, batch):
    import torch
    prompt = torch.randint(1, MODEL["vocabulary"], (batch, PROMPT), device=model.device)
    seen = torch.ones_like(prompt)

    def step():
        return model.generate(prompt, attention_mask=seen, max_new_tokens=NEW_TOKENS,
                              min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return step


# ---- in the children: the products, and a decoder of little else --------------------------------


def projections(layer):
    """Weights of a layer in the order of their use, those that read the same input together."""
    attention, mlp = layer.self_attn, layer.mlp
    return [[m.weight for m in group] for group in (
        (attention.q_proj, attention.k_proj, attention.v_proj), (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,))]


def products(model, batch):
    """A function that makes all products of a step, each group from an input of its own."""
    import torch
    groups = [g for layer in model.model.layers for g in projections(layer)]
    groups.append([model.lm_head.weight])
    inputs = [torch.randn(batch, g[0].shape[1], dtype=g[0].dtype, device=g[0].device)
              for g in groups]

    def step():
        with torch.no_grad():
            for x, weights in zip(inputs, groups):
                for weight in weights:
                    torch.nn.functional.linear(x, weight)
    return step


def norm(x, weight, eps):
    import torch
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_norm(x, more, weight, eps):
    """x + more, and its norm."""
    x = x + more
    return x, norm(x, weight, eps)


def gated(gate, up):
    import torch
    return torch.nn.functional.silu(gate) * up


def turned(x, cosine, sine):
    """Rotary embedding of [batch][heads][head_dim]."""
    import torch
    low, high = x.chunk(2, -1)
    return x * cosine + torch.cat((-high, low), -1) * sine


def placed(q, k, v, cosine, sine, key, value):
    """Puts the turned k and v, [batch][kv_heads * head_dim], into their places, [batch][kv_heads]
    [head_dim] of the cache; returns q turned."""
    batch, heads, size = key.shape
    key.copy_(turned(k.view(batch, heads, size), cosine, sine))
    value.copy_(v.view(batch, heads, size))
    return turned(q.view(batch, -1, size), cosine, sine)


class Lean:
    """The same model from the same weights. `compiler` makes one function of each piece between two
    products."""

    def __init__(self, model, cache, tokens, compiler):
        import torch
        self.model, self.cache, self.tokens = model.model, cache, tokens
        self.head, self.eps = model.lm_head.weight, model.config.rms_norm_eps
        last = torch.full((1, 1), CONTEXT - 1, device=tokens.device)
        self.rotary = [part[0] for part in self.model.rotary_emb(self.head, position_ids=last)]
        self.norm, self.add_norm, self.gated, self.placed = map(
            compiler, (norm, add_norm, gated, placed))

    def attention(self, index, x, weights):
        import torch
        linear = torch.nn.functional.linear
        keys, values = self.cache.keys[index], self.cache.values[index]
        q = self.placed(*(linear(x, w) for w in weights), *self.rotary, keys[:, :, -1],
                        values[:, :, -1])
        y = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values,
                                                             enable_gqa=True)
        return y.reshape(x.shape[0], -1)

    def __call__(self):
        import torch
        linear = torch.nn.functional.linear
        with torch.no_grad():
            x = self.model.embed_tokens(self.tokens[:, 0])
            y = self.norm(x, self.model.layers[0].input_layernorm.weight, self.eps)
            following = [layer.input_layernorm for layer in self.model.layers[1:]]
            for index, (layer, then) in enumerate(
                    zip(self.model.layers, [*following, self.model.norm])):
                qkv, (out,), (gate, up), (down,) = projections(layer)
                more = linear(self.attention(index, y, qkv), out)
                x, y = self.add_norm(x, more, layer.post_attention_layernorm.weight, self.eps)
                more = linear(self.gated(linear(y, gate), linear(y, up)), down)
                x, y = self.add_norm(x, more, then.weight, self.eps)
            return linear(y, self.head)


def agreeing(lean, step):
    """`lean`, if it computes what `step` does."""
    ours, theirs = lean().float(), step().float()
    quality = bench_lib.support.sqnr(ours.double(), theirs.double())
    if not quality >= AGREE_DB:
        raise RuntimeError(f"the lean decoder's logits are {quality:.1f} dB from the model's")
    return lean


# ---- in the children: what can be measured ------------------------------------------------------


class Program:
    """What one batch size needs; each kind of step is made when asked for."""

    def __init__(self, batch):
        import torch
        self.model, self.batch = model_of(), batch
        self.cache = FullCache(self.model, batch)
        self.tokens = torch.randint(MODEL["vocabulary"], (batch, 1), device=self.model.device)
        self.step = decoder(self.model, self.cache, self.tokens)

    def graph(self):
        return bench_worker.captured(lambda: self.step().argmax(-1))

    def products(self):
        return bench_worker.captured(products(self.model, self.batch))

    def lean(self):
        import torch
        compiler = functools.partial(torch.compile, dynamic=False, fullgraph=True)
        lean = agreeing(Lean(self.model, self.cache, self.tokens, compiler), self.step)
        return bench_worker.captured(lambda: lean().argmax(-1))

    def generate(self):
        return generator(self.model, self.batch)


def build(case):
    program = Program(case["batch"])
    makers = {kind: lambda _, make=getattr(program, kind): make() for kind in KINDS}
    return bench_worker.make_all(makers, case)


def facts():
    return bench_worker.machine() | {"transformers": bench_worker.version_of("transformers")}


# ---- in the parent ------------------------------------------------------------------------------


def batch_of(text):
    (batch,), _ = bench_lib.sizes(text, count=1)
    return {"batch": batch}


def tokens_of(kind):
    """Tokens of each sequence that a step decodes."""
    return NEW_TOKENS if kind == "generate" else 1


def effort_for(kind, quick):
    if kind == "generate":
        return bench_lib.Effort(blocks=2 if quick else 4, block_ms=0, warm_ms=0,
                                warm_reps=1 if quick else 2, least_reps=1, apart=False)
    return bench_lib.Effort(blocks=4 if quick else 8, block_ms=40 if quick else 80, warm_ms=40,
                            apart=False, wake=True)


def measure_kind(sides, kind, missing, effort):
    columns = [Column(side, side, kind) for side in SIDES if (side, kind) not in missing]
    before = {name: sides[name].counters() for name in SIDES[1:]}
    checked = {name: sum(sides[name].checked().values()) for name in SIDES[1:]}
    results = bench_lib.figures(bench_lib.measure(sides, columns, effort), "native")
    results |= {side: {"error": missing[side, kind]} for side in SIDES if side not in results}
    return {"columns": bench_lib.per_call(results, tokens_of(kind)),
            "served": {name: bench_lib.served(before[name], sides[name].counters())
                       for name in before},
            "checked": {name: sum(sides[name].checked().values()) - count
                        for name, count in checked.items()}}


def measure(sides, case, kinds, quick):
    """Ms a token of each kind on each side, and what each keeps beside the program's own memory."""
    missing = bench_lib.load(sides, case, {side: kinds for side in SIDES})
    row = {**case, "model": MODEL["title"], "context": CONTEXT}
    row["kinds"] = {kind: measure_kind(sides, kind, missing, effort_for(kind, quick))
                    for kind in kinds}
    return row | {"kept": {name: sides[name].kept() for name in SIDES[1:]}}


def slow(rows):
    """[(batch, side, ratio)] of generate() below the limit, or of a side that failed."""
    found = []
    for row in rows:
        for side, figures in row["kinds"]["generate"]["columns"].items():
            ratio = figures.get("ratio", {}).get("median", 0.0)
            if side != "native" and ratio < LIMIT:
                found.append([row["batch"], side, ratio])
    return found


def main():
    p = bench_lib.parser(__doc__, "batch sizes, comma-separated")
    p.add_argument("--lean", action="store_true", help="also a decoder of little but products")
    arguments = bench_lib.parse(p, batch_of)
    settings = {"native": None, "nf4": bench_lib.policy_of(arguments) or PRESET, "fp8": FROZEN}
    kinds = [kind for kind in KINDS if kind != "lean" or arguments.lean]
    with bench_lib.Sides(__file__, settings, arguments.library) as sides:
        report = bench_lib.Report(__file__, arguments, sides,
                                  effort_for("graph", arguments.quick))
        for case in arguments.shapes or [{"batch": batch} for batch in BATCHES]:
            report.add(measure(sides, case, kinds, arguments.quick))
        report.finish(limit=LIMIT, below=slow(report.data["results"]))
    print(bench_tables.table("decode", report.data))
    bench_lib.end(report)


if __name__ == "__main__":
    if bench_worker.is_worker():
        bench_worker.serve(build, facts=facts)
    else:
        bench_lib.run(main)
