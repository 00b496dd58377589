"""What deciding by measurement costs a Llama-like training program, and what it tells of it.

The same program six times: plain, twice; under the default policy with an empty tuned file; again
with that file; and in shadow mode with layers named, once by torch modules and once by NVTX ranges.
Tuning must cost less than 5 s and 1 GiB: what the first of the two runs takes more than the other.
The second must measure nothing (no row is added to the file) and decide the same, and the memory that
its summary claims must be what the device has less than natively, but for kernels. Shadow mode must
return the same losses, bit for bit, as two plain runs do, and, fp8 being asked for, say of every
linear layer what it would have done: the default leaves k and v of this model native, as too small.
Runs without the preload itself.
"""
import json
import pathlib
import re
import sys
import tempfile

from support import bare_environment, decisions, library, need, preloaded, report, tuned_rows

STEPS, LAYERS = 16, 4
MOST_S, MOST_BYTES = 5, 1 << 30
KERNELS = 512 << 20  # bytes of other kernels that cuBLASLt loads, and of the program's own luck
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def name_layers(torch, model):
    """Every linear layer's forward pass in an NVTX range of its name."""
    def enter(name):
        def hook(*_):
            torch.cuda.nvtx.range_push(name)  # whose depth must not become the layer's input
        return hook

    def leave(*_):
        torch.cuda.nvtx.range_pop()

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(enter(name))
            module.register_forward_hook(leave)


def train(ranges):
    import time
    torch, transformers = need("torch", "transformers")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=32000)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager")  # sdpa adds in any order
    if ranges:
        name_layers(torch, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(32000, (4, 1024), device="cuda")
    losses, most = [], 0
    begin = time.monotonic()
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
        free, total = torch.cuda.mem_get_info()
        most = max(most, total - free)
    print(json.dumps({"seconds": time.monotonic() - begin, "bytes": most, "losses": losses}))


def run(folder, tuned=None, shadow=None):
    """The program's report, and what it wrote to stderr."""
    env = bare_environment()
    command = [sys.executable, __file__, "nvtx" if shadow == "nvtx" else "plain"]
    if shadow:
        env |= {"QSHIM_SUMMARY": "1", "QSHIM_SET": "default.action=fp8"}
        command = [pathlib.Path(library()).parent / "qshim", "run", "-m", "shadow",
                   f"--labels={shadow}", "-o", folder, "--", *command]
    elif tuned:
        env = preloaded(folder, QSHIM_SET=f"tune.file={tuned}", QSHIM_SUMMARY="1")
    # Or products may add in any order, too.
    return report(command, env | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})


def decided(folder):
    """Key -> what became of it, in the end."""
    return {line["key"]: line["action"] for line in decisions(folder)}


def claimed(said):
    """Bytes of device memory that the summary says are qshim's."""
    found = re.search(r"^qshim: ([\d.]+) MiB of device memory", said, re.MULTILINE)
    assert found, f"the summary says nothing of memory: {said[:400]}"
    return float(found[1]) * 2**20


def rows(file):
    return tuned_rows(file.read_text())


def shadow_layers(folder):
    """Layer -> least SQNR of its fp8 candidates."""
    least = {}
    for file in folder.glob("decisions.*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            if line.get("t") == "shadow" and line.get("layer"):
                least[line["layer"]] = min(least.get(line["layer"], 1e9), line["sqnr"])
    return least


def mib(size):
    return f"{size / 2**20:.0f} MiB"


def show_tuning(folder, plain):
    file = folder / "tuned.ini"
    first, _ = run(folder / "first", tuned=file)
    known = rows(file)
    second, said = run(folder / "second", tuned=file)
    more, claim = second["bytes"] - plain["bytes"], claimed(said)
    cost, taken = first["seconds"] - second["seconds"], first["bytes"] - second["bytes"]
    print(f"tuning: {len(known)} rows, {cost:.2f} s, {mib(taken)}; second run: "
          f"{len(rows(file)) - len(known)} rows more, {mib(more)} more than natively, "
          f"{mib(claim)} by the summary")
    assert known, "nothing was measured"
    assert 0 < claim and abs(more - claim) < KERNELS, "the summary's memory is not the device's"
    assert cost < MOST_S and taken < MOST_BYTES, "tuning costs too much"
    assert rows(file) == known, "the second run measured again"
    assert decided(folder / "first") == decided(folder / "second"), "the second run decided otherwise"


def show_shadow(folder, plain, labels):
    shadow, said = run(folder / labels, shadow=labels)
    layers = shadow_layers(folder / labels)
    print(f"shadow mode, layers by {labels}: {len(layers)} layers, SQNR "
          f"{min(layers.values()):.1f} to {max(layers.values()):.1f} dB")
    table = [line for line in said.splitlines() if re.match(r"qshim: +-?\d", line)]
    print("\n".join(table[:3]))
    assert shadow["losses"] == plain["losses"], "shadow mode changed the program's numbers"
    for i in range(LAYERS):
        for name in LINEAR:
            assert any(f"layers.{i}." in layer and name in layer for layer in layers), (
                f"nothing is said of {name} of layer {i}: {sorted(layers)}")


if len(sys.argv) > 1:
    train(sys.argv[1] == "nvtx")
else:
    need("torch", "transformers")
    with tempfile.TemporaryDirectory() as name:
        home = pathlib.Path(name)
        native, _ = run(home / "plain")
        again, _ = run(home / "again")
        assert native["losses"] == again["losses"], "the program does not repeat itself"
        show_tuning(home, native)
        for kind in ("torch", "nvtx"):
            show_shadow(home, native, kind)
