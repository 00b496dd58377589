/* The cublas* entry points: each try_<function>() fills one struct qs_gemm and asks qs_dispatch(),
 * nothing else. True means that the product was launched; otherwise export.c makes the program's
 * own call. Nothing of the program's is dereferenced but what cuBLAS itself reads on the host. */
#include "intercept/intercept.h"

#include "plan/plan.h"

/* A gemm call of any width, as the program wrote it. */
struct call {
	cublasHandle_t handle;
	cublasOperation_t ta, tb;
	int64_t m, n, k;          /* elements            */
	const void *alpha, *beta; /* host or device      */
	const void *a, *b;        /* device              */
	void *c;                  /* device, in place    */
	cudaDataType at, bt, ct;
	int64_t lda, ldb, ldc; /* elements            */
	int64_t count;         /* products            */
	cublasComputeType_t compute;
};

/* cudaDataType_t that alpha and beta have for a compute type of GemmEx. */
static int32_t scale_type_of(cublasComputeType_t compute)
{
	switch (compute) {
	case CUBLAS_COMPUTE_32F:
	case CUBLAS_COMPUTE_32F_PEDANTIC:
	case CUBLAS_COMPUTE_32F_FAST_16F:
	case CUBLAS_COMPUTE_32F_FAST_16BF:
	case CUBLAS_COMPUTE_32F_FAST_TF32:
		return CUDA_R_32F;
	default:
		return QS_TYPE_NONE;
	}
}

/* What only the handle knows: stream, pointer mode, math mode. */
static void describe_handle(struct qs_gemm *g, const struct qs_library *library,
                            cublasHandle_t handle)
{
	cudaStream_t stream = NULL;
	cublasPointerMode_t mode = CUBLAS_POINTER_MODE_DEVICE;
	cublasMath_t math = CUBLAS_DEFAULT_MATH;
	g->handle = handle;
	if (!handle || !library->cublasGetStream_v2 || !library->cublasGetPointerMode_v2 ||
	    !library->cublasGetMathMode || library->cublasGetStream_v2(handle, &stream) ||
	    library->cublasGetPointerMode_v2(handle, &mode) ||
	    library->cublasGetMathMode(handle, &math)) {
		g->key.odd |= QS_ODD_OPAQUE;
		g->key.alpha = g->key.beta = QS_SCALAR_DEVICE; /* perhaps not host pointers */
		return;
	}
	g->stream = stream;
	if (((unsigned)math & 0xf) == CUBLAS_PEDANTIC_MATH)
		g->key.odd |= QS_ODD_PEDANTIC;
	if ((unsigned)math & CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)
		g->key.odd |= QS_ODD_REDUCED;
	if (mode != CUBLAS_POINTER_MODE_HOST)
		g->key.alpha = g->key.beta = QS_SCALAR_DEVICE;
}

/* An enumerator in the byte the key has for it; a value out of its range must not become a valid
 * one, as cuBLAS will refuse it. */
static uint8_t narrow(int value)
{
	return value >= 0 && value < QS_TYPE_NONE ? (uint8_t)value : QS_TYPE_NONE;
}

static void describe(struct qs_gemm *g, const struct qs_library *library, enum qs_entry entry,
                     const struct call *call)
{
	struct qs_key *key = &g->key;
	describe_handle(g, library, call->handle);
	g->library = library;
	g->alpha = call->alpha;
	g->beta = call->beta;
	g->a = call->a;
	g->b = call->b;
	g->c = g->d = call->c;
	key->entry = (uint8_t)entry;
	key->library = (uint16_t)library->index;
	key->ta = narrow((int)call->ta);
	key->tb = narrow((int)call->tb);
	key->m = call->m;
	key->n = call->n;
	key->k = call->k;
	key->lda = call->lda;
	key->ldb = call->ldb;
	key->ldc = key->ldd = call->ldc;
	key->atype = narrow((int)call->at);
	key->btype = narrow((int)call->bt);
	key->ctype = key->dtype = narrow((int)call->ct);
	key->bias_type = QS_TYPE_NONE;
	key->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
	key->compute = (int32_t)call->compute;
	key->scale_type = scale_type_of(call->compute);
	key->batch = call->count;
}

/* The single products, whatever their entry point, are this call of GemmEx. */
static int repeat(const struct qs_gemm *g, void *d)
{
	const struct call *call = g->call;
	__typeof__(cublasGemmEx) *gemm_ex =
	        (__typeof__(cublasGemmEx) *)g->library->original[QS_ENTRY_GEMM_EX];
	if (!gemm_ex)
		return CUBLAS_STATUS_NOT_SUPPORTED;
	return (int)gemm_ex(call->handle, call->ta, call->tb, (int)call->m, (int)call->n,
	                    (int)call->k, call->alpha, call->a, call->at, (int)call->lda, call->b,
	                    call->bt, (int)call->ldb, call->beta, d, call->ct, (int)call->ldc,
	                    call->compute, CUBLAS_GEMM_DEFAULT);
}

static bool dispatch(const struct qs_library *library, enum qs_entry entry, const struct call *call)
{
	struct qs_gemm g = {.repeat = repeat, .call = call};
	describe(&g, library, entry, call);
	return qs_dispatch(&g);
}

#define QS_STRIP(...) __VA_ARGS__
#define QS_DECLARE_TRY(entry, function, params, args)                                              \
	bool try_##function(const struct qs_library *library, QS_STRIP params);
QS_ENTRIES(QS_DECLARE_TRY)
#undef QS_DECLARE_TRY

/* The fields that every kind of call names alike in entries.h. */
#define CALL(...)                                                                                  \
	&(const struct call)                                                                       \
	{                                                                                          \
		.handle = handle, .alpha = alpha, .beta = beta, .at = at, .bt = bt, .ct = ct,      \
		__VA_ARGS__                                                                        \
	}
#define SHAPE .ta = ta, .tb = tb, .m = m, .n = n, .k = k, .lda = lda, .ldb = ldb, .ldc = ldc

bool try_cublasGemmEx(const struct qs_library *library, cublasHandle_t handle, cublasOperation_t ta,
                      cublasOperation_t tb, int m, int n, int k, const void *alpha, const void *a,
                      cudaDataType at, int lda, const void *b, cudaDataType bt, int ldb,
                      const void *beta, void *c, cudaDataType ct, int ldc,
                      cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
	(void)algo; /* a choice among bf16 algorithms */
	return dispatch(library, QS_ENTRY_GEMM_EX,
	                CALL(SHAPE, .a = a, .b = b, .c = c, .count = 1, .compute = compute));
}

bool try_cublasGemmEx_64(const struct qs_library *library, cublasHandle_t handle,
                         cublasOperation_t ta, cublasOperation_t tb, int64_t m, int64_t n,
                         int64_t k, const void *alpha, const void *a, cudaDataType at, int64_t lda,
                         const void *b, cudaDataType bt, int64_t ldb, const void *beta, void *c,
                         cudaDataType ct, int64_t ldc, cublasComputeType_t compute,
                         cublasGemmAlgo_t algo)
{
	(void)algo;
	return dispatch(library, QS_ENTRY_GEMM_EX_64,
	                CALL(SHAPE, .a = a, .b = b, .c = c, .count = 1, .compute = compute));
}

bool try_cublasGemmStridedBatchedEx(const struct qs_library *library, cublasHandle_t handle,
                                    cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                    const void *alpha, const void *a, cudaDataType at, int lda,
                                    long long int sa, const void *b, cudaDataType bt, int ldb,
                                    long long int sb, const void *beta, void *c, cudaDataType ct,
                                    int ldc, long long int sc, int count,
                                    cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
	(void)sa, (void)sb, (void)sc; /* of no effect when count is 1, and other counts pass */
	(void)algo;
	return dispatch(library, QS_ENTRY_GEMM_STRIDED_BATCHED_EX,
	                CALL(SHAPE, .a = a, .b = b, .c = c, .count = count, .compute = compute));
}

bool try_cublasGemmStridedBatchedEx_64(const struct qs_library *library, cublasHandle_t handle,
                                       cublasOperation_t ta, cublasOperation_t tb, int64_t m,
                                       int64_t n, int64_t k, const void *alpha, const void *a,
                                       cudaDataType at, int64_t lda, long long int sa,
                                       const void *b, cudaDataType bt, int64_t ldb,
                                       long long int sb, const void *beta, void *c, cudaDataType ct,
                                       int64_t ldc, long long int sc, int64_t count,
                                       cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
	(void)sa, (void)sb, (void)sc;
	(void)algo;
	return dispatch(library, QS_ENTRY_GEMM_STRIDED_BATCHED_EX_64,
	                CALL(SHAPE, .a = a, .b = b, .c = c, .count = count, .compute = compute));
}

/* From here on: counted, and passed whatever they hold (plan/eligible.c). */

bool try_cublasGemmBatchedEx(const struct qs_library *library, cublasHandle_t handle,
                             cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                             const void *alpha, const void *const a[], cudaDataType at, int lda,
                             const void *const b[], cudaDataType bt, int ldb, const void *beta,
                             void *const c[], cudaDataType ct, int ldc, int count,
                             cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
	(void)a, (void)b, (void)c; /* arrays in device memory */
	(void)algo;
	return dispatch(library, QS_ENTRY_GEMM_BATCHED_EX,
	                CALL(SHAPE, .count = count, .compute = compute));
}

bool try_cublasGemmBatchedEx_64(const struct qs_library *library, cublasHandle_t handle,
                                cublasOperation_t ta, cublasOperation_t tb, int64_t m, int64_t n,
                                int64_t k, const void *alpha, const void *const a[],
                                cudaDataType at, int64_t lda, const void *const b[],
                                cudaDataType bt, int64_t ldb, const void *beta, void *const c[],
                                cudaDataType ct, int64_t ldc, int64_t count,
                                cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
	(void)a, (void)b, (void)c;
	(void)algo;
	return dispatch(library, QS_ENTRY_GEMM_BATCHED_EX_64,
	                CALL(SHAPE, .count = count, .compute = compute));
}

/* A grouped call is counted under its number of groups; the shapes differ from group to group. */
bool try_cublasGemmGroupedBatchedEx(const struct qs_library *library, cublasHandle_t handle,
                                    const cublasOperation_t ta[], const cublasOperation_t tb[],
                                    const int m[], const int n[], const int k[], const void *alpha,
                                    const void *const a[], cudaDataType_t at, const int lda[],
                                    const void *const b[], cudaDataType_t bt, const int ldb[],
                                    const void *beta, void *const c[], cudaDataType_t ct,
                                    const int ldc[], int groups, const int sizes[],
                                    cublasComputeType_t compute)
{
	(void)ta, (void)tb, (void)m, (void)n, (void)k, (void)lda, (void)ldb, (void)ldc;
	(void)a, (void)b, (void)c, (void)sizes;
	return dispatch(library, QS_ENTRY_GEMM_GROUPED_BATCHED_EX,
	                CALL(.count = groups, .compute = compute));
}

bool try_cublasGemmGroupedBatchedEx_64(const struct qs_library *library, cublasHandle_t handle,
                                       const cublasOperation_t ta[], const cublasOperation_t tb[],
                                       const int64_t m[], const int64_t n[], const int64_t k[],
                                       const void *alpha, const void *const a[], cudaDataType_t at,
                                       const int64_t lda[], const void *const b[],
                                       cudaDataType_t bt, const int64_t ldb[], const void *beta,
                                       void *const c[], cudaDataType_t ct, const int64_t ldc[],
                                       int64_t groups, const int64_t sizes[],
                                       cublasComputeType_t compute)
{
	(void)ta, (void)tb, (void)m, (void)n, (void)k, (void)lda, (void)ldb, (void)ldc;
	(void)a, (void)b, (void)c, (void)sizes;
	return dispatch(library, QS_ENTRY_GEMM_GROUPED_BATCHED_EX_64,
	                CALL(.count = groups, .compute = compute));
}

bool try_cublasSgemmEx(const struct qs_library *library, cublasHandle_t handle,
                       cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                       const float *alpha, const void *a, cudaDataType at, int lda, const void *b,
                       cudaDataType bt, int ldb, const float *beta, void *c, cudaDataType ct,
                       int ldc)
{
	return dispatch(
	        library, QS_ENTRY_SGEMM_EX,
	        CALL(SHAPE, .a = a, .b = b, .c = c, .count = 1, .compute = CUBLAS_COMPUTE_32F));
}

bool try_cublasSgemmEx_64(const struct qs_library *library, cublasHandle_t handle,
                          cublasOperation_t ta, cublasOperation_t tb, int64_t m, int64_t n,
                          int64_t k, const float *alpha, const void *a, cudaDataType at,
                          int64_t lda, const void *b, cudaDataType bt, int64_t ldb,
                          const float *beta, void *c, cudaDataType ct, int64_t ldc)
{
	return dispatch(
	        library, QS_ENTRY_SGEMM_EX_64,
	        CALL(SHAPE, .a = a, .b = b, .c = c, .count = 1, .compute = CUBLAS_COMPUTE_32F));
}

/* Hooked for the lifetime of what later engines keep per handle; nothing is kept per handle yet. */
bool try_cublasDestroy_v2(const struct qs_library *library, cublasHandle_t handle)
{
	(void)library;
	(void)handle;
	return false;
}
