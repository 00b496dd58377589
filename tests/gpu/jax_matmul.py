"""JAX finds cuBLAS through dlsym: its products are seen, and right within fp8's error."""
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from support import counters, decisions, need, sqnr  # noqa: E402

jax, np = need("jax", "numpy")
jnp = jax.numpy
if jax.default_backend() != "gpu":
    from support import skip
    skip("JAX has no GPU")


def exact(array):
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


def check(what, result, truth):
    db = sqnr(exact(result), truth)
    assert db >= 24, f"{what}: {db:.1f} dB"


@jax.jit
def product(x, w):
    return x @ w


@jax.jit
def activated(x, w):
    return jax.nn.gelu(x @ w + 1)


@jax.jit
def gradients(x, w, dy):
    return jax.vjp(product, x, w)[1](dy)


def gelu(y):
    return 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y ** 3)))


keys = jax.random.split(jax.random.key(0), 3)
shapes = ((1024, 2048), (2048, 1536), (1024, 1536))
x, w, dy = (jax.random.normal(k, s, dtype=jnp.bfloat16) for k, s in zip(keys, shapes))
X, W, DY = exact(x), exact(w), exact(dy)
for _ in range(3):
    check("product", product(x, w), X @ W)
    dx, dw = gradients(x, w, dy)
    check("dX", dx, DY @ W.T)
    check("dW", dw, X.T @ DY)
    check("gelu", activated(x, w * 0.02), gelu(X @ exact(w * 0.02) + 1))
assert decisions(), "no product of JAX was seen"
assert sum(slot["calls"] for slot in counters()) > 0
