"""Products of PyTorch with a scale for each row along K: right to 26 dB, and really served by fp8.

Rows that differ a thousandfold keep their quality under scale = row; channels a hundred times larger
than the rest stay above 20 dB. A NaN in one row of x spoils that row alone.
"""
import itertools

from support import need, normal, served, sqnr

torch = need("torch")


def check(what, result, exact, before, limit=26.0):
    quality = sqnr(result.double(), exact)
    assert served() - before == 1, f"{what}: not served by fp8"
    assert quality >= limit, f"{what}: {quality:.1f} dB"


def all_forms():
    for tokens, k, out in itertools.product((1, 17, 512), (7, 1000, 2048), (16, 1024)):
        x, w = normal(tokens, k, seed=1), normal(out, k, seed=2)
        for tx, tw in itertools.product((False, True), repeat=2):
            xs = x.t().contiguous().t() if tx else x
            ws = w.t().contiguous().t() if tw else w
            before = served()
            check(f"{tokens}x{k}x{out} {tx} {tw}", xs @ ws.t(), x.double() @ w.double().t(), before)


def rows_of_every_size():
    x, w = normal(256, 1024, seed=3), normal(512, 1024, seed=4)
    x *= torch.logspace(-3, 3, 256, device="cuda").bfloat16()[:, None]
    w *= torch.logspace(3, -3, 512, device="cuda").bfloat16()[:, None]
    before = served()
    y, exact = x @ w.t(), x.double() @ w.double().t()
    check("rows", y, exact, before)
    worst = min(sqnr(y[i].double(), exact[i]) for i in range(0, 256, 5))
    assert worst >= 20, f"the worst row has {worst:.1f} dB"


def outlier_channels():
    x, w = normal(512, 1024, seed=5), normal(512, 1024, seed=6)
    x[:, ::64] *= 100
    before = served()
    check("outliers", x @ w.t(), x.double() @ w.double().t(), before, 20.0)


def nan_stays_in_its_row():
    x, w = normal(64, 256, seed=7), normal(128, 256, seed=8)
    x[5, 7] = float("nan")
    y = x @ w.t()
    assert y[5].isnan().all() and not y.isnan()[torch.arange(64) != 5].any()


all_forms()
rows_of_every_size()
outlier_channels()
nan_stays_in_its_row()
