"""A torch.compile'd layer pair, forward and backward in fp8: equals eager, and both fp64."""
from support import need, normal, served, sqnr

torch = need("torch")
SIZES = (512, 1024, 2048)  # tokens, width, hidden


def pair():
    torch.manual_seed(1)
    tokens, width, hidden = SIZES
    return torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.GELU("tanh"),
                               torch.nn.Linear(hidden, width)).bfloat16().cuda()


def step(run, model, x, dy):
    """Output and every gradient of one forward and backward pass."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = run(x)
    y.backward(dy)
    return [t.detach().double() for t in (y, x.grad, *(p.grad for p in model.parameters()))]


model, exact_model = pair(), pair().double()
x, dy = normal(*SIZES[:2], seed=1), normal(*SIZES[:2], seed=2)
exact = step(exact_model, exact_model, x.double(), dy.double())
start = served()
eager = step(model, model, x, dy)
middle = served()
compiled = step(torch.compile(model), model, x, dy)
end = served()
assert middle - start == 6, f"{middle - start} of 6 products served by fp8 in eager mode"
assert end - middle >= 6, f"{end - middle} of 6 products served by fp8 when compiled"
for i, (e, c, truth) in enumerate(zip(eager, compiled, exact)):
    assert sqnr(c, e) >= 26, f"result {i}: compiled and eager agree to {sqnr(c, e):.1f} dB"
    assert sqnr(c, truth) >= 22, f"result {i}: compiled is right to {sqnr(c, truth):.1f} dB"
