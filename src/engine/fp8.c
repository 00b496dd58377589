/* The fp8 engine: both operands quantised to e4m3 with one scale each, the product by cuBLASLt.
 *
 * cuBLASLt takes fp8 operands on Ada and Hopper only as op(A) = T, op(B) = N, so both are written
 * with K contiguous (and zero-padded to 16), transposed while being cast where the program has them
 * the other way. D, C, bias, alpha, beta and the epilogue are the program's own. The library and
 * the handle are the program's too: a second cuBLAS in a process is a second set of kernels and
 * state.
 */
#include "engine/engine.h"

#include <stdlib.h>

#include "intercept/intercept.h"
#include "operand/operand.h"

/* The size recommended for Hopper (cuBLAS manual, cublasSetWorkspace); part of the scratch block.
 */
#define WORKSPACE ((size_t)32 << 20)

/* One product in one context, complete but for the pointers. */
struct fp8 {
	pthread_mutex_t lock;        /* of desc: its pointer attributes are set per call   */
	cublasLtMatmulDesc_t desc;   /* TN, fp32 accumulation, epilogue                    */
	cublasLtMatrixLayout_t a, b; /* quantised operands: k_padded x m, k_padded x n     */
	cublasLtMatrixLayout_t c, d; /* as the program has them                            */
	cublasLtMatmulAlgo_t algo;   /* first of the heuristic                             */
	size_t workspace;            /* bytes the algorithm uses                           */
	struct qs_operands operands; /* quantisation and scratch layout                    */
};

static void destroy(struct fp8 *fp8, const struct qs_library *lt)
{
	if (fp8->desc)
		lt->cublasLtMatmulDescDestroy(fp8->desc);
	if (fp8->a)
		lt->cublasLtMatrixLayoutDestroy(fp8->a);
	if (fp8->b)
		lt->cublasLtMatrixLayoutDestroy(fp8->b);
	if (fp8->c)
		lt->cublasLtMatrixLayoutDestroy(fp8->c);
	if (fp8->d)
		lt->cublasLtMatrixLayoutDestroy(fp8->d);
	pthread_mutex_destroy(&fp8->lock);
	free(fp8);
}

static cublasStatus_t set(const struct qs_library *lt, struct fp8 *fp8,
                          cublasLtMatmulDescAttributes_t attribute, const void *value, size_t size)
{
	return lt->cublasLtMatmulDescSetAttribute(fp8->desc, attribute, value, size);
}

/* Fast accumulation (no promotion to fp32 within a tile) is worth 10 % and is what every trainer
 * uses forward and none backward; where the role is unknown the accurate form is used. */
static cublasStatus_t make_desc(const struct qs_library *lt, struct fp8 *fp8,
                                const struct qs_key *key)
{
	const int32_t t = CUBLAS_OP_T, n = CUBLAS_OP_N, epilogue = key->epilogue;
	const int32_t bias_type = key->bias_type;
	const int8_t fast = key->role == QS_ROLE_FWD;
	cublasStatus_t status =
	        lt->cublasLtMatmulDescCreate(&fp8->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
	if (!status)
		status = set(lt, fp8, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t);
	if (!status)
		status = set(lt, fp8, CUBLASLT_MATMUL_DESC_TRANSB, &n, sizeof n);
	if (!status)
		status = set(lt, fp8, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
	if (!status)
		status = set(lt, fp8, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
	if (!status && key->bias_type != QS_TYPE_NONE)
		status = set(lt, fp8, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type,
		             sizeof bias_type);
	return status;
}

static cublasStatus_t make_layouts(const struct qs_library *lt, struct fp8 *fp8,
                                   const struct qs_key *key)
{
	const uint64_t k = (uint64_t)fp8->operands.k_padded;
	const uint64_t m = (uint64_t)key->m, n = (uint64_t)key->n;
	const bool has_c = key->beta != QS_SCALAR_ZERO;
	cublasStatus_t status =
	        lt->cublasLtMatrixLayoutCreate(&fp8->a, CUDA_R_8F_E4M3, k, m, (int64_t)k);
	if (!status)
		status = lt->cublasLtMatrixLayoutCreate(&fp8->b, CUDA_R_8F_E4M3, k, n, (int64_t)k);
	if (!status)
		status = lt->cublasLtMatrixLayoutCreate(&fp8->c, (cudaDataType)key->dtype, m, n,
		                                        has_c ? key->ldc : key->ldd);
	if (!status)
		status = lt->cublasLtMatrixLayoutCreate(&fp8->d, (cudaDataType)key->dtype, m, n,
		                                        key->ldd);
	return status;
}

static cublasStatus_t set_preference(const struct qs_library *lt, cublasLtMatmulPreference_t p)
{
	const uint64_t workspace = WORKSPACE;
	const uint32_t align = 16; /* what eligibility demands of C and D */
	cublasStatus_t status = lt->cublasLtMatmulPreferenceSetAttribute(
	        p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
	if (!status)
		status = lt->cublasLtMatmulPreferenceSetAttribute(
		        p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align, sizeof align);
	if (!status)
		status = lt->cublasLtMatmulPreferenceSetAttribute(
		        p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align, sizeof align);
	return status;
}

static bool choose_algorithm(struct fp8 *fp8, const struct qs_gemm *g, struct qs_failure *failure)
{
	const struct qs_library *lt = g->library;
	cublasLtMatmulPreference_t preference = NULL;
	cublasLtMatmulHeuristicResult_t result = {0};
	int found = 0;
	cublasStatus_t status = lt->cublasLtMatmulPreferenceCreate(&preference);
	if (!status)
		status = set_preference(lt, preference);
	if (!status)
		status = lt->cublasLtMatmulAlgoGetHeuristic(g->handle, fp8->desc, fp8->a, fp8->b,
		                                            fp8->c, fp8->d, preference, 1, &result,
		                                            &found);
	if (preference)
		lt->cublasLtMatmulPreferenceDestroy(preference);
	if (status || !found || result.state || result.workspaceSize > WORKSPACE)
		return qs_failed(failure, QS_REASON_ALGO_NONE, "cuBLASLt status %d",
		                 status ? (int)status : (int)result.state);
	fp8->algo = result.algo;
	fp8->workspace = result.workspaceSize;
	return true;
}

/* The pointer attributes the heuristic and each call need; the bias must be set for both. */
static cublasStatus_t set_pointers(const struct qs_library *lt, struct fp8 *fp8,
                                   const void *scale_a, const void *scale_b, const void *bias)
{
	cublasStatus_t status =
	        set(lt, fp8, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scale_a, sizeof scale_a);
	if (!status)
		status = set(lt, fp8, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scale_b,
		             sizeof scale_b);
	if (!status && bias)
		status = set(lt, fp8, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
	return status;
}

static void *prepare(const struct qs_gemm *g, struct qs_context *context,
                     const struct qs_choice *choice, struct qs_failure *failure)
{
	const struct qs_library *lt = g->library;
	if (choice->scaling == QS_SCALING_ROW || choice->format == QS_FORMAT_E5M2) {
		qs_failed(failure, QS_REASON_UNAVAILABLE, "%s",
		          choice->scaling == QS_SCALING_ROW ? "scale = row" : "format = e5m2");
		return NULL;
	}
	struct fp8 *fp8 = calloc(1, sizeof *fp8);
	if (!fp8) {
		qs_failed(failure, QS_REASON_MEMORY, "host memory");
		return NULL;
	}
	pthread_mutex_init(&fp8->lock, NULL);
	qs_operands_plan(&fp8->operands, &g->key, context, WORKSPACE);
	cublasStatus_t status = make_desc(lt, fp8, &g->key);
	if (!status)
		status = set_pointers(lt, fp8, g->d, g->d, g->bias);
	if (!status)
		status = make_layouts(lt, fp8, &g->key);
	if (status)
		qs_failed(failure, QS_REASON_ERROR, "cuBLASLt descriptors: status %d", (int)status);
	if (status || !choose_algorithm(fp8, g, failure)) {
		destroy(fp8, lt);
		return NULL;
	}
	return fp8;
}

static bool multiply(struct fp8 *fp8, const struct qs_gemm *g, const struct qs_stream *stream,
                     const struct qs_scratch *scratch, struct qs_failure *failure)
{
	const struct qs_library *lt = g->library;
	const struct qs_operands *operands = &fp8->operands;
	unsigned char *base = (unsigned char *)(uintptr_t)scratch->base;
	const void *c = g->key.beta == QS_SCALAR_ZERO ? g->d : g->c;
	pthread_mutex_lock(&fp8->lock);
	cublasStatus_t status = set_pointers(lt, fp8, base + operands->scale_offset[0],
	                                     base + operands->scale_offset[1], g->bias);
	if (!status)
		status = lt->cublasLtMatmul(
		        g->handle, fp8->desc, g->alpha, base + operands->offset[0], fp8->a,
		        base + operands->offset[1], fp8->b, g->beta, c, fp8->c, g->d, fp8->d,
		        &fp8->algo, base, fp8->workspace, (cudaStream_t)stream->handle);
	pthread_mutex_unlock(&fp8->lock);
	if (status)
		return qs_failed(failure, QS_REASON_ERROR, "cublasLtMatmul: status %d",
		                 (int)status);
	return true;
}

static bool run(void *state, const struct qs_gemm *g, struct qs_context *context,
                const struct qs_stream *stream, uint64_t *bytes, struct qs_failure *failure)
{
	struct fp8 *fp8 = state;
	enum qs_reason why;
	struct qs_scratch *scratch = qs_scratch_lock(context, stream, fp8->operands.total, &why);
	if (!scratch)
		return qs_failed(failure, why, "%zu MiB of scratch", fp8->operands.total >> 20);
	CUresult error = qs_operands_launch(&fp8->operands, context, stream, scratch, g->a, g->b);
	bool done =
	        error ? qs_failed(failure, QS_REASON_ERROR, "quantising: %s", qs_error_name(error))
	              : multiply(fp8, g, stream, scratch, failure);
	qs_scratch_unlock(scratch);
	*bytes = fp8->operands.bytes[0] + fp8->operands.bytes[1];
	return done;
}

const struct qs_engine qs_engine_fp8 = {
        .action = QS_ACTION_FP8,
        .prepare = prepare,
        .run = run,
};
