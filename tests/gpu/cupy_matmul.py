"""CuPy calls cublasGemmEx itself: fp16 passes untouched with its reason, bf16 runs in fp8."""
from support import decisions, need, served, sqnr

cp, np = need("cupy", "numpy")
from cupy.cuda import cublas, device  # noqa: E402

R_32F, R_16BF, COMPUTE_32F = 0, 14, 68  # cudaDataType_t, cublasComputeType_t
OP_N, DEFAULT = 0, -1


def bf16(shape, seed):
    """Normal data as bf16 bits on the device (truncated fp32), and its value in float64."""
    data = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    bits = (data.view(np.uint32) >> 16).astype(np.uint16)
    return cp.asarray(bits), (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def gemm_ex(a, b, m, n, k):
    """Column-major fp32 D[m x n] = A[m x k] B[k x n] of bf16; row-major [n][m] here."""
    d = cp.full((n, m), cp.nan, dtype=cp.float32)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    handle = device.get_cublas_handle()
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
    cublas.gemmEx(handle, OP_N, OP_N, m, n, k, one.ctypes.data, a.data.ptr, R_16BF, m,
                  b.data.ptr, R_16BF, k, zero.ctypes.data, d.data.ptr, R_32F, m,
                  COMPUTE_32F, DEFAULT)
    return cp.asnumpy(d).astype(np.float64)


a, A = bf16((512, 768), 1)  # [k][m]: column-major m x k
b, B = bf16((256, 512), 2)  # [n][k]
db = sqnr(gemm_ex(a, b, 768, 256, 512), B @ A)
assert db >= 26, f"bf16: {db:.1f} dB"
assert served() == 1

half = cp.random.standard_normal((256, 256)).astype(cp.float16)
result, truth = cp.asnumpy(half @ half), cp.asnumpy(half).astype(np.float64)
assert sqnr(result.astype(np.float64), truth @ truth) > 50
assert served() == 1
assert "dtype" in {d["reason"] for d in decisions()}, "CuPy's own product was not seen"
