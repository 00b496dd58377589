#!/usr/bin/env python3
"""Trains a small decoder-only transformer on bytes of text: an ordinary PyTorch program.

It knows nothing of qshim: run it with and without LD_PRELOAD=libqshim.so and compare. Weights,
batches and their order depend on --seed alone, so two runs differ only by arithmetic. Parameters
are fp32 under autocast (the usual way), or bf16 with an fp32 master copy (--params bf16).
"""
import argparse
import json
import math
import pathlib
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
AVERAGED = 20  # steps whose mean is the final loss


def parse():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--dim", type=int, default=2048)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--heads", type=int, default=16)
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--warmup", type=int, default=40, help="steps of rising learning rate")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--params", choices=("autocast", "bf16"), default="autocast")
    p.add_argument("--device", default="cuda")
    p.add_argument("--compile", action="store_true", help="train the torch.compile'd model")
    p.add_argument("--text", nargs="+", metavar="FILE", help="default: this repository")
    p.add_argument("--json", metavar="FILE", help="write every step's loss and time")
    return p.parse_args()


def read_text(files):
    """All bytes of the files; by default this repository's README, C sources and tests."""
    if not files:
        files = [ROOT / "README.md"]
        for folder in ("src", "tests", "kernels"):
            files += sorted(f for f in (ROOT / folder).rglob("*.[ch]"))
    data = b"\n".join(pathlib.Path(f).read_bytes() for f in files if pathlib.Path(f).is_file())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.token = nn.Embedding(256, args.dim)
        self.position = nn.Embedding(args.context, args.dim)
        self.blocks = nn.ModuleList(Block(args.dim, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, 256, bias=False)
        self.apply(self.init)
        for block in self.blocks:  # residual branches add up: keep their sum's variance
            for last in (block.proj, block.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * args.layers))

    @staticmethod
    def init(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, 256), targets.reshape(-1))


def batches(data, args):
    """Endless (tokens, targets), drawn on the CPU so that they are the same on every device."""
    generator = torch.Generator().manual_seed(args.seed)
    offsets = torch.arange(args.context + 1)
    while True:
        start = torch.randint(len(data) - args.context, (args.batch, 1), generator=generator)
        chunk = data[start + offsets].long().to(args.device)
        yield chunk[:, :-1], chunk[:, 1:]


class Trainer:
    """One optimiser step at a time; with bf16 parameters AdamW works on fp32 copies of them."""

    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.args, self.bf16 = args, args.params == "bf16"
        self.model = GPT(args).to(args.device)
        self.masters = self.params = list(self.model.parameters())
        if self.bf16:
            self.masters = [p.detach().clone().requires_grad_() for p in self.params]
            self.model.bfloat16()
        fused = args.device.startswith("cuda")
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
        self.run = torch.compile(self.model) if args.compile else self.model

    def rate(self, step):
        """Linear warm-up, then a cosine down to a tenth."""
        warm = min(1.0, (step + 1) / self.args.warmup)
        rest = max(0, step - self.args.warmup) / max(1, self.args.steps - self.args.warmup)
        return self.args.lr * warm * (0.55 + 0.45 * math.cos(math.pi * rest))

    def step(self, step, tokens, targets):
        device = torch.device(self.args.device).type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not self.bf16):
            loss = self.run(tokens, targets)
        loss.backward()
        for master, param in zip(self.masters, self.params):
            if self.bf16:
                master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.param_groups[0]["lr"] = self.rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.bf16:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)
        return loss.item()  # also waits for the step to end


def main():
    args = parse()
    data = read_text(args.text)
    trainer, source = Trainer(args), batches(data, args)
    size = sum(p.numel() for p in trainer.params)
    print(f"{size / 1e6:.1f} M parameters, {len(data) / 1e3:.0f} kB of text, "
          f"{args.batch * args.context} tokens a step")
    losses, seconds = [], []
    for step in range(args.steps):
        tokens, targets = next(source)
        start = time.perf_counter()
        losses.append(trainer.step(step, tokens, targets))
        seconds.append(time.perf_counter() - start)
        if step % 20 == 0 or step == args.steps - 1:
            rate = args.batch * args.context / statistics.median(seconds[-20:])
            print(f"step {step:4d}  loss {losses[-1]:.4f}  {rate:.0f} tokens/s", flush=True)
    peak = torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else 0
    result = {
        "final_loss": statistics.fmean(losses[-AVERAGED:]),
        "tokens_per_second": args.batch * args.context / statistics.median(seconds),
        "peak_bytes": peak,
    }
    print(f"final loss {result['final_loss']:.4f}  {result['tokens_per_second']:.0f} tokens/s  "
          f"peak memory {peak / 2**30:.2f} GiB")
    if args.json:
        report = dict(result, options=vars(args), losses=losses, seconds=seconds)
        pathlib.Path(args.json).write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
