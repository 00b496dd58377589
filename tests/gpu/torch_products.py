"""Single products of PyTorch, forced to fp8: right to 26 dB, and each really served by fp8.

Outputs hold NaN before, so an element not written shows. x is [tokens][k], w is [k][out]; in
cuBLAS's terms m = out, n = tokens. Tensor-scaled e4m3 on normal data gives about 29 dB.
"""
import itertools

from support import decisions, need, normal, served, sqnr

torch = need("torch")
F = torch.nn.functional
LIMIT = 26.0
NAN = float("nan")


def check(what, run, exact, out=None, limit=LIMIT):
    """Runs one product: it must be one that fp8 served, and near `exact`."""
    before = served()
    result = run(out) if out is not None else run()
    count = served() - before
    quality = sqnr(result.double(), exact)
    assert count == 1, f"{what}: {count} products served by fp8, not 1"
    assert quality >= limit, f"{what}: {quality:.1f} dB"


def poisoned(rows, columns, dtype=torch.bfloat16):
    return torch.full((rows, columns), NAN, dtype=dtype).cuda()


def stored(matrix, transposed):
    """The same matrix, kept in memory row by row or column by column."""
    return matrix.t().contiguous().t() if transposed else matrix.contiguous()


def shapes_and_transpositions():
    for tokens, k, out in itertools.product((1, 15, 17, 2047), (1, 7, 1000), (8, 136)):
        x, w, exact = operands(tokens, k, out)
        for tx, tw in itertools.product((False, True), repeat=2):
            xs, ws = stored(x, tx), stored(w, tw)
            check(f"mm {tokens}x{k}x{out} {tx} {tw}",
                  lambda d: torch.mm(xs, ws, out=d), exact, poisoned(tokens, out))


def operands(tokens, k, out):
    x, w = normal(tokens, k, seed=tokens + k), normal(k, out, seed=out)
    return x, w, x.double() @ w.double()


def forms(tokens, k, out):
    """The ways PyTorch asks for a product: bias, activation, accumulation, fp32 output."""
    x, w, exact = operands(tokens, k, out)
    weight, bias = w.t().contiguous(), normal(out, seed=5)
    biased = exact + bias.double()
    check("linear", lambda: F.linear(x, weight), exact)
    check("linear, bias", lambda: F.linear(x, weight, bias), biased)
    check("addmm, bias", lambda d: torch.addmm(bias, x, w, out=d), biased, poisoned(tokens, out))
    for gelu, activation in ((False, F.relu), (True, lambda y: F.gelu(y, approximate="tanh"))):
        check(f"activation, gelu {gelu}",
              lambda d: torch._addmm_activation(bias, x, w, use_gelu=gelu, out=d),
              activation(biased), poisoned(tokens, out))
    c = normal(tokens, out, seed=6) * 8
    total = c.double() + exact
    check("accumulation in place", lambda d: d.addmm_(x, w), total, c.clone())
    check("alpha and beta", lambda d: d.addmm_(x, w, alpha=-0.5, beta=0.25),
          0.25 * c.double() - 0.5 * exact, c.clone())
    check("fp32 output", lambda d: torch.mm(x, w, out_dtype=torch.float32, out=d), exact,
          poisoned(tokens, out, torch.float32))


def padded_and_unaligned_sources():
    tokens, k, out = 100, 200, 64
    wide_x, wide_w = normal(tokens, k + 5, seed=7), normal(k, out + 7, seed=8)
    x, w = wide_x[:, 3:3 + k], wide_w[:, 5:5 + out]
    check("padded rows", lambda d: torch.mm(x, w, out=d), x.double() @ w.double(),
          poisoned(tokens, out))


def nonfinite_values_stay_where_they_are():
    x, w, exact = operands(64, 256, 128)
    for value in (NAN, float("inf"), -float("inf")):
        bad = x.clone()
        bad[5, 17] = value
        before, result = served(), torch.mm(bad, w, out=poisoned(64, 128))
        assert served() == before + 1
        assert not result[5].isfinite().any(), f"{value} did not reach its whole row"
        good = [row for row in range(64) if row != 5]
        assert sqnr(result[good].double(), exact[good]) >= LIMIT, f"{value} spread"
        bad = w.clone()
        bad[100, 9] = value
        result = torch.mm(x, bad, out=poisoned(64, 128))
        assert not result[:, 9].isfinite().any(), f"{value} did not reach its whole column"
        good = [column for column in range(128) if column != 9]
        assert sqnr(result[:, good].double(), exact[:, good]) >= LIMIT, f"{value} spread"


def zeros_give_zeros():
    x, w, _ = operands(64, 256, 128)
    for a, b in ((x * 0, w), (x, w * 0), (x * 0, w * 0)):
        before, result = served(), torch.mm(a, b, out=poisoned(64, 128))
        assert served() == before + 1 and (result == 0).all()


def magnitude_does_not_matter():
    x, w, exact = operands(64, 256, 128)
    for px, pw in ((90, -90), (-80, 60), (90, -60), (-30, -30), (60, 40)):
        check(f"2^{px} 2^{pw}", lambda d: torch.mm(x * 2.0 ** px, w * 2.0 ** pw, out=d),
              exact * 2.0 ** (px + pw), poisoned(64, 128))


def an_output_fp8_cannot_write_passes():
    x, w, exact = operands(64, 256, 33)
    before, result = served(), torch.mm(x, w, out=poisoned(64, 33))
    assert served() == before and sqnr(result.double(), exact) > 40
    assert "align" in {d["reason"] for d in decisions()}


shapes_and_transpositions()
for shape in ((17, 7, 136), (100, 1000, 136), (2048, 4096, 4096)):
    forms(*shape)
padded_and_unaligned_sources()
nonfinite_values_stay_where_they_are()
zeros_give_zeros()
magnitude_does_not_matter()
an_output_fp8_cannot_write_passes()
