/* libcublas: handles and the Gemm family. Every entry point becomes one struct call; the argument
 * checks and their status codes are those of the real library. The same source gives the copies of
 * major version 12 and 13: SOFTCUDA_MAJOR decides which handles a copy takes for its own. */
#include "tests/softcuda/inside.h"

#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

/* How often each entry point was called. */
static struct {
	const char *name;
	long count;
} calls[] = {
        {"cublasGemmEx", 0},
        {"cublasGemmEx_64", 0},
        {"cublasGemmStridedBatchedEx", 0},
        {"cublasGemmStridedBatchedEx_64", 0},
        {"cublasGemmBatchedEx", 0},
        {"cublasGemmBatchedEx_64", 0},
        {"cublasGemmGroupedBatchedEx", 0},
        {"cublasGemmGroupedBatchedEx_64", 0},
        {"cublasSgemmEx", 0},
        {"cublasSgemmEx_64", 0},
        {"cublasSgemm_v2", 0},
        {"cublasSgemm_v2_64", 0},
        {"cublasCreate_v2", 0},
        {"cublasDestroy_v2", 0},
};

static void called(const char *name)
{
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
		if (!strcmp(calls[i].name, name))
			softcuda_count(&calls[i].count);
}

long softcuda_cublas_calls(const char *function)
{
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
		if (!strcmp(calls[i].name, function))
			return calls[i].count;
	return -1;
}

static struct sc_handle *own(cublasHandle_t handle)
{
	struct sc_handle *h = (struct sc_handle *)handle;
	return h && h->magic == SC_HANDLE && h->blas ? h : NULL;
}

cublasStatus_t CUBLASWINAPI cublasCreate_v2(cublasHandle_t *handle)
{
	CUcontext context = NULL;
	called("cublasCreate_v2");
	if (!handle)
		return CUBLAS_STATUS_INVALID_VALUE;
	if (cudaFree(NULL) || cuCtxGetCurrent(&context)) /* makes a context current */
		return CUBLAS_STATUS_NOT_INITIALIZED;
	struct sc_handle *h = calloc(1, sizeof *h);
	if (!h)
		return CUBLAS_STATUS_ALLOC_FAILED;
	*h = (struct sc_handle){.magic = SC_HANDLE, .blas = 1, .context = context};
	*handle = (cublasHandle_t)h;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasDestroy_v2(cublasHandle_t handle)
{
	struct sc_handle *h = own(handle);
	called("cublasDestroy_v2");
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	h->magic = 0;
	free(h);
	return CUBLAS_STATUS_SUCCESS;
}

/* Setting the stream puts the workspace back to the library's own, as documented. */
cublasStatus_t CUBLASWINAPI cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	h->stream = stream;
	h->workspace = NULL;
	h->workspace_bytes = 0;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	*stream = h->stream;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace,
                                                  size_t bytes)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if ((uintptr_t)workspace % 256)
		return CUBLAS_STATUS_INVALID_VALUE;
	h->workspace = workspace;
	h->workspace_bytes = bytes;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasSetPointerMode_v2(cublasHandle_t handle,
                                                    cublasPointerMode_t value)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (value != CUBLAS_POINTER_MODE_HOST && value != CUBLAS_POINTER_MODE_DEVICE)
		return CUBLAS_STATUS_INVALID_VALUE;
	h->pointer_mode = (int)value;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasGetPointerMode_v2(cublasHandle_t handle,
                                                    cublasPointerMode_t *value)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	*value = (cublasPointerMode_t)h->pointer_mode;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasSetMathMode(cublasHandle_t handle, cublasMath_t value)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if ((int)value & ~0x1f)
		return CUBLAS_STATUS_INVALID_VALUE;
	h->math_mode = (int)value;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasGetMathMode(cublasHandle_t handle, cublasMath_t *value)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	*value = (cublasMath_t)h->math_mode;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasSetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t value)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (value != CUBLAS_ATOMICS_ALLOWED && value != CUBLAS_ATOMICS_NOT_ALLOWED)
		return CUBLAS_STATUS_INVALID_VALUE;
	h->atomics_mode = (int)value;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasGetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t *value)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	*value = (cublasAtomicsMode_t)h->atomics_mode;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasSetSmCountTarget(cublasHandle_t handle, int value)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (value < 0)
		return CUBLAS_STATUS_INVALID_VALUE;
	h->sm_count = (int)value;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasGetSmCountTarget(cublasHandle_t handle, int *value)
{
	struct sc_handle *h = own(handle);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	*value = (int)h->sm_count;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasGetVersion_v2(cublasHandle_t handle, int *version)
{
	if (!own(handle))
		return CUBLAS_STATUS_NOT_INITIALIZED;
	*version = (int)cublasLtGetVersion();
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasGetProperty(libraryPropertyType type, int *value)
{
	return cublasLtGetProperty(type, value);
}

size_t CUBLASWINAPI cublasGetCudartVersion(void)
{
	return cublasLtGetCudartVersion();
}

const char *CUBLASWINAPI cublasGetStatusName(cublasStatus_t status)
{
	return cublasLtGetStatusName(status);
}

const char *CUBLASWINAPI cublasGetStatusString(cublasStatus_t status)
{
	return cublasLtGetStatusString(status);
}

/* A call of the Gemm family. */
struct call {
	cublasOperation_t ta, tb;
	int64_t m, n, k;
	const void *alpha, *beta;    /* as the handle's pointer mode says              */
	const void *a, *b;           /* matrices, or device arrays of their pointers   */
	void *c;                     /* likewise                                       */
	cudaDataType_t at, bt, ct;   /* types                                          */
	int64_t lda, ldb, ldc;       /* elements                                       */
	int64_t sa, sb, sc;          /* elements between products of a batch           */
	int64_t batch;               /* products                                       */
	bool arrays;                 /* a, b and c are arrays of pointers              */
	cublasComputeType_t compute; /* fp32 in all its varieties                      */
};

static bool valid_op(cublasOperation_t op)
{
	return op == CUBLAS_OP_N || op == CUBLAS_OP_T || op == CUBLAS_OP_C;
}

static bool fits(int64_t ld, int64_t rows)
{
	return ld >= (rows > 1 ? rows : 1);
}

static cublasStatus_t check(const struct call *c)
{
	if (!valid_op(c->ta) || !valid_op(c->tb) || c->m < 0 || c->n < 0 || c->k < 0 ||
	    c->batch < 0 || !fits(c->lda, c->ta == CUBLAS_OP_N ? c->m : c->k) ||
	    !fits(c->ldb, c->tb == CUBLAS_OP_N ? c->k : c->n) || !fits(c->ldc, c->m))
		return CUBLAS_STATUS_INVALID_VALUE;
	switch (c->compute) {
	case CUBLAS_COMPUTE_32F:
	case CUBLAS_COMPUTE_32F_PEDANTIC:
	case CUBLAS_COMPUTE_32F_FAST_16F:
	case CUBLAS_COMPUTE_32F_FAST_16BF:
	case CUBLAS_COMPUTE_32F_FAST_TF32:
		break;
	default:
		return CUBLAS_STATUS_NOT_SUPPORTED;
	}
	bool known = c->at == CUDA_R_16BF || c->at == CUDA_R_16F || c->at == CUDA_R_32F;
	if (!known || c->at != c->bt || (c->ct != c->at && c->ct != CUDA_R_32F))
		return CUBLAS_STATUS_NOT_SUPPORTED;
	return CUBLAS_STATUS_SUCCESS;
}

static struct sc_matrix matrix(const struct call *c, const void *pointer, cudaDataType_t type,
                               int64_t ld, int64_t stride, bool transposed)
{
	return (struct sc_matrix){.pointer = (uint64_t)(uintptr_t)pointer,
	                          .row = transposed ? ld : 1,
	                          .column = transposed ? 1 : ld,
	                          .stride = stride,
	                          .type = (uint32_t)type,
	                          .pointer_array = c->arrays};
}

static struct sc_product describe(const struct sc_handle *h, const struct call *c)
{
	struct sc_product p = {.m = c->m, .n = c->n, .k = c->k, .batch = c->batch};
	p.a = matrix(c, c->a, c->at, c->lda, c->sa, c->ta != CUBLAS_OP_N);
	p.b = matrix(c, c->b, c->bt, c->ldb, c->sb, c->tb != CUBLAS_OP_N);
	p.c = p.d = matrix(c, c->c, c->ct, c->ldc, c->sc, false);
	if (h->pointer_mode == CUBLAS_POINTER_MODE_DEVICE) {
		p.alpha_at = (uint64_t)(uintptr_t)c->alpha;
		p.beta_at = (uint64_t)(uintptr_t)c->beta;
	} else {
		p.alpha = *(const float *)c->alpha;
		p.beta = *(const float *)c->beta;
	}
	return p;
}

static cublasStatus_t gemm(cublasHandle_t handle, const char *name, const struct call *c)
{
	struct sc_handle *h = own(handle);
	called(name);
	if (!h)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	cublasStatus_t status = check(c);
	if (status)
		return status;
	if (!c->m || !c->n || !c->batch)
		return CUBLAS_STATUS_SUCCESS;
	if (!c->alpha || !c->beta || !c->c || (c->k && (!c->a || !c->b)))
		return CUBLAS_STATUS_INVALID_VALUE;
	struct sc_product product = describe(h, c);
	return sc_product_launch(&product, h->context, h->stream) ? CUBLAS_STATUS_EXECUTION_FAILED
	                                                          : CUBLAS_STATUS_SUCCESS;
}

/* cublasLtMatmul as an inner step: this object imports it, so a preloaded library sees the call. */
static cublasStatus_t by_lt(cublasHandle_t handle, const struct call *c)
{
	cublasLtMatmulDesc_t desc = NULL;
	cublasLtMatrixLayout_t a = NULL, b = NULL, d = NULL;
	const int32_t mode = own(handle)->pointer_mode, ta = c->ta, tb = c->tb;
	uint64_t m = (uint64_t)c->m, n = (uint64_t)c->n, k = (uint64_t)c->k;
	bool na = c->ta == CUBLAS_OP_N, nb = c->tb == CUBLAS_OP_N;
	cublasLtMatmulDescCreate(&desc, c->compute, CUDA_R_32F);
	cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode);
	cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta);
	cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb);
	cublasLtMatrixLayoutCreate(&a, c->at, na ? m : k, na ? k : m, c->lda);
	cublasLtMatrixLayoutCreate(&b, c->bt, nb ? k : n, nb ? n : k, c->ldb);
	cublasLtMatrixLayoutCreate(&d, c->ct, m, n, c->ldc);
	cublasStatus_t status =
	        cublasLtMatmul((cublasLtHandle_t)handle, desc, c->alpha, c->a, a, c->b, b, c->beta,
	                       c->c, d, c->c, d, NULL, NULL, 0, own(handle)->stream);
	cublasLtMatrixLayoutDestroy(d);
	cublasLtMatrixLayoutDestroy(b);
	cublasLtMatrixLayoutDestroy(a);
	cublasLtMatmulDescDestroy(desc);
	return status;
}

static cublasStatus_t gemm_ex(cublasHandle_t handle, const char *name, const struct call *c)
{
	if (!softcuda_knobs.inner_lt || !own(handle) || check(c) || !c->m || !c->n || !c->k)
		return gemm(handle, name, c);
	called(name);
	return by_lt(handle, c);
}

/* Each pair of entry points, int and int64_t, shares one function that fills the call. */
static cublasStatus_t ex(cublasHandle_t handle, const char *name, cublasOperation_t ta,
                         cublasOperation_t tb, int64_t m, int64_t n, int64_t k, const void *alpha,
                         const void *a, cudaDataType at, int64_t lda, const void *b,
                         cudaDataType bt, int64_t ldb, const void *beta, void *c, cudaDataType ct,
                         int64_t ldc, cublasComputeType_t compute)
{
	const struct call call = {ta, tb, m,   n,   k,   alpha, beta, a, b, c,     at,
	                          bt, ct, lda, ldb, ldc, 0,     0,    0, 1, false, compute};
	return gemm_ex(handle, name, &call);
}

cublasStatus_t CUBLASWINAPI cublasGemmEx(cublasHandle_t handle, cublasOperation_t ta,
                                         cublasOperation_t tb, int m, int n, int k,
                                         const void *alpha, const void *a, cudaDataType at, int lda,
                                         const void *b, cudaDataType bt, int ldb, const void *beta,
                                         void *c, cudaDataType ct, int ldc,
                                         cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
	if (softcuda_knobs.null_products)
		return handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
	(void)algo;
	return ex(handle, "cublasGemmEx", ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c,
	          ct, ldc, compute);
}

cublasStatus_t CUBLASWINAPI cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t ta,
                                            cublasOperation_t tb, int64_t m, int64_t n, int64_t k,
                                            const void *alpha, const void *a, cudaDataType at,
                                            int64_t lda, const void *b, cudaDataType bt,
                                            int64_t ldb, const void *beta, void *c, cudaDataType ct,
                                            int64_t ldc, cublasComputeType_t compute,
                                            cublasGemmAlgo_t algo)
{
	if (softcuda_knobs.null_products)
		return handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
	(void)algo;
	return ex(handle, "cublasGemmEx_64", ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta,
	          c, ct, ldc, compute);
}

static cublasStatus_t strided(cublasHandle_t handle, const char *name, cublasOperation_t ta,
                              cublasOperation_t tb, int64_t m, int64_t n, int64_t k,
                              const void *alpha, const void *a, cudaDataType at, int64_t lda,
                              long long int sa, const void *b, cudaDataType bt, int64_t ldb,
                              long long int sb, const void *beta, void *c, cudaDataType ct,
                              int64_t ldc, long long int sc, int64_t batch,
                              cublasComputeType_t compute)
{
	const struct call call = {ta, tb, m,   n,   k,   alpha, beta, a,  b,     c,     at,
	                          bt, ct, lda, ldb, ldc, sa,    sb,   sc, batch, false, compute};
	return gemm(handle, name, &call);
}

cublasStatus_t CUBLASWINAPI cublasGemmStridedBatchedEx(
        cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
        const void *alpha, const void *a, cudaDataType at, int lda, long long int sa, const void *b,
        cudaDataType bt, int ldb, long long int sb, const void *beta, void *c, cudaDataType ct,
        int ldc, long long int sc, int batch, cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
	(void)algo;
	return strided(handle, "cublasGemmStridedBatchedEx", ta, tb, m, n, k, alpha, a, at, lda, sa,
	               b, bt, ldb, sb, beta, c, ct, ldc, sc, batch, compute);
}

cublasStatus_t CUBLASWINAPI cublasGemmStridedBatchedEx_64(
        cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int64_t m, int64_t n,
        int64_t k, const void *alpha, const void *a, cudaDataType at, int64_t lda, long long int sa,
        const void *b, cudaDataType bt, int64_t ldb, long long int sb, const void *beta, void *c,
        cudaDataType ct, int64_t ldc, long long int sc, int64_t batch, cublasComputeType_t compute,
        cublasGemmAlgo_t algo)
{
	(void)algo;
	return strided(handle, "cublasGemmStridedBatchedEx_64", ta, tb, m, n, k, alpha, a, at, lda,
	               sa, b, bt, ldb, sb, beta, c, ct, ldc, sc, batch, compute);
}

static cublasStatus_t batched(cublasHandle_t handle, const char *name, cublasOperation_t ta,
                              cublasOperation_t tb, int64_t m, int64_t n, int64_t k,
                              const void *alpha, const void *const a[], cudaDataType at,
                              int64_t lda, const void *const b[], cudaDataType bt, int64_t ldb,
                              const void *beta, void *const c[], cudaDataType ct, int64_t ldc,
                              int64_t batch, cublasComputeType_t compute)
{
	const struct call call = {ta,
	                          tb,
	                          m,
	                          n,
	                          k,
	                          alpha,
	                          beta,
	                          (const void *)a,
	                          (const void *)b,
	                          (void *)(uintptr_t)c,
	                          at,
	                          bt,
	                          ct,
	                          lda,
	                          ldb,
	                          ldc,
	                          0,
	                          0,
	                          0,
	                          batch,
	                          true,
	                          compute};
	return gemm(handle, name, &call);
}

cublasStatus_t CUBLASWINAPI cublasGemmBatchedEx(
        cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
        const void *alpha, const void *const a[], cudaDataType at, int lda, const void *const b[],
        cudaDataType bt, int ldb, const void *beta, void *const c[], cudaDataType ct, int ldc,
        int batch, cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
	(void)algo;
	return batched(handle, "cublasGemmBatchedEx", ta, tb, m, n, k, alpha, a, at, lda, b, bt,
	               ldb, beta, c, ct, ldc, batch, compute);
}

cublasStatus_t CUBLASWINAPI
cublasGemmBatchedEx_64(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int64_t m,
                       int64_t n, int64_t k, const void *alpha, const void *const a[],
                       cudaDataType at, int64_t lda, const void *const b[], cudaDataType bt,
                       int64_t ldb, const void *beta, void *const c[], cudaDataType ct, int64_t ldc,
                       int64_t batch, cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
	(void)algo;
	return batched(handle, "cublasGemmBatchedEx_64", ta, tb, m, n, k, alpha, a, at, lda, b, bt,
	               ldb, beta, c, ct, ldc, batch, compute);
}

static cublasStatus_t sex(cublasHandle_t handle, const char *name, cublasOperation_t ta,
                          cublasOperation_t tb, int64_t m, int64_t n, int64_t k, const float *alpha,
                          const void *a, cudaDataType at, int64_t lda, const void *b,
                          cudaDataType bt, int64_t ldb, const float *beta, void *c, cudaDataType ct,
                          int64_t ldc)
{
	const struct call call = {
	        ta, tb, m,   n,   k,   alpha, beta, a, b, c,     at,
	        bt, ct, lda, ldb, ldc, 0,     0,    0, 1, false, CUBLAS_COMPUTE_32F};
	return gemm(handle, name, &call);
}

cublasStatus_t CUBLASWINAPI cublasSgemmEx(cublasHandle_t handle, cublasOperation_t ta,
                                          cublasOperation_t tb, int m, int n, int k,
                                          const float *alpha, const void *a, cudaDataType at,
                                          int lda, const void *b, cudaDataType bt, int ldb,
                                          const float *beta, void *c, cudaDataType ct, int ldc)
{
	return sex(handle, "cublasSgemmEx", ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c,
	           ct, ldc);
}

cublasStatus_t CUBLASWINAPI cublasSgemmEx_64(cublasHandle_t handle, cublasOperation_t ta,
                                             cublasOperation_t tb, int64_t m, int64_t n, int64_t k,
                                             const float *alpha, const void *a, cudaDataType at,
                                             int64_t lda, const void *b, cudaDataType bt,
                                             int64_t ldb, const float *beta, void *c,
                                             cudaDataType ct, int64_t ldc)
{
	return sex(handle, "cublasSgemmEx_64", ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta,
	           c, ct, ldc);
}

cublasStatus_t CUBLASWINAPI cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t ta,
                                           cublasOperation_t tb, int m, int n, int k,
                                           const float *alpha, const float *a, int lda,
                                           const float *b, int ldb, const float *beta, float *c,
                                           int ldc)
{
	return sex(handle, "cublasSgemm_v2", ta, tb, m, n, k, alpha, a, CUDA_R_32F, lda, b,
	           CUDA_R_32F, ldb, beta, c, CUDA_R_32F, ldc);
}

cublasStatus_t CUBLASWINAPI cublasSgemm_v2_64(cublasHandle_t handle, cublasOperation_t ta,
                                              cublasOperation_t tb, int64_t m, int64_t n, int64_t k,
                                              const float *alpha, const float *a, int64_t lda,
                                              const float *b, int64_t ldb, const float *beta,
                                              float *c, int64_t ldc)
{
	return sex(handle, "cublasSgemm_v2_64", ta, tb, m, n, k, alpha, a, CUDA_R_32F, lda, b,
	           CUDA_R_32F, ldb, beta, c, CUDA_R_32F, ldc);
}

static cublasStatus_t grouped_check(cublasHandle_t handle, const char *name, int64_t groups)
{
	called(name);
	if (!own(handle))
		return CUBLAS_STATUS_NOT_INITIALIZED;
	return groups < 0 ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}

/* One launch per group; the pointers of all groups follow one another on the device. */
cublasStatus_t CUBLASWINAPI cublasGemmGroupedBatchedEx(
        cublasHandle_t handle, const cublasOperation_t ta[], const cublasOperation_t tb[],
        const int m[], const int n[], const int k[], const void *alpha, const void *const a[],
        cudaDataType_t at, const int lda[], const void *const b[], cudaDataType_t bt,
        const int ldb[], const void *beta, void *const c[], cudaDataType_t ct, const int ldc[],
        int groups, const int sizes[], cublasComputeType_t compute)
{
	cublasStatus_t status = grouped_check(handle, "cublasGemmGroupedBatchedEx", groups);
	for (int g = 0; g < groups && !status; g++) {
		const struct call call = {ta[g],
		                          tb[g],
		                          m[g],
		                          n[g],
		                          k[g],
		                          (const float *)alpha + g,
		                          (const float *)beta + g,
		                          (const void *)a,
		                          (const void *)b,
		                          (void *)(uintptr_t)c,
		                          at,
		                          bt,
		                          ct,
		                          lda[g],
		                          ldb[g],
		                          ldc[g],
		                          0,
		                          0,
		                          0,
		                          sizes[g],
		                          true,
		                          compute};
		status = gemm(handle, "", &call);
		a += sizes[g];
		b += sizes[g];
		c += sizes[g];
	}
	return status;
}

cublasStatus_t CUBLASWINAPI cublasGemmGroupedBatchedEx_64(
        cublasHandle_t handle, const cublasOperation_t ta[], const cublasOperation_t tb[],
        const int64_t m[], const int64_t n[], const int64_t k[], const void *alpha,
        const void *const a[], cudaDataType_t at, const int64_t lda[], const void *const b[],
        cudaDataType_t bt, const int64_t ldb[], const void *beta, void *const c[],
        cudaDataType_t ct, const int64_t ldc[], int64_t groups, const int64_t sizes[],
        cublasComputeType_t compute)
{
	cublasStatus_t status = grouped_check(handle, "cublasGemmGroupedBatchedEx_64", groups);
	for (int64_t g = 0; g < groups && !status; g++) {
		const struct call call = {ta[g],
		                          tb[g],
		                          m[g],
		                          n[g],
		                          k[g],
		                          (const float *)alpha + g,
		                          (const float *)beta + g,
		                          (const void *)a,
		                          (const void *)b,
		                          (void *)(uintptr_t)c,
		                          at,
		                          bt,
		                          ct,
		                          lda[g],
		                          ldb[g],
		                          ldc[g],
		                          0,
		                          0,
		                          0,
		                          sizes[g],
		                          true,
		                          compute};
		status = gemm(handle, "", &call);
		a += sizes[g];
		b += sizes[g];
		c += sizes[g];
	}
	return status;
}
