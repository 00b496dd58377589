"""How many operands a training step of a one-layer Llama quantises, without and with reuse.

Predicted for the layer's seven products and the head: 16 forward and 32 backward without reuse (two
for each product). With it the queries' input serves keys and values too (2 fewer), and each dY is
quantised once for dgrad and wgrad (8 fewer); gate and up do not follow each other, as the activation
runs in between. What a step does is the difference between a longer and a shorter run, as the line at
exit gives it. Runs without the preload itself.
"""
import os
import re
import subprocess
import sys
import tempfile

from support import need

WITHOUT, WITH = 48, 38  # operands quantised in a step
SHORT, LONG = 4, 9      # steps


def train(steps):
    torch, transformers = need("torch", "transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=4096)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 4096, (2, 512), device="cuda")
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def quantised(validity, steps):
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"LD_PRELOAD": os.environ["QS_TEST_LIBRARY"], "QSHIM_OUT": folder,
                            "QSHIM_LOG": "info", "QSHIM_QUIET": "1",
                            "QSHIM_SET": "tune.budget_ms=0;default.action=fp8;"
                                         f"cache.validity={validity}"}
        result = subprocess.run([sys.executable, __file__, str(steps)], env=env, text=True,
                                capture_output=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return int(re.search(r"operands: (\d+) quantised", result.stderr)[1])


def a_step(validity):
    return (quantised(validity, LONG) - quantised(validity, SHORT)) / (LONG - SHORT)


if len(sys.argv) > 1:
    train(int(sys.argv[1]))
else:
    need("torch", "transformers")
    without, reusing = a_step("each"), a_step("adjacent")
    print(f"operands quantised in a step: {without:g} without reuse (predicted {WITHOUT}), "
          f"{reusing:g} with (predicted {WITH})")
    assert without == WITHOUT and reusing <= WITH + 2, "not as predicted"
