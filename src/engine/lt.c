/* A product by the program's own cuBLASLt: a second cuBLAS in a process would be a second set of
 * kernels and state. D, C, bias, alpha, beta and the epilogue are the program's.
 *
 * The pointers of a call are attributes of its description, which cuBLASLt reads during the call.
 * So each call under way has a description of its own, and no lock is held: one that does not
 * return (see src/intercept/guard.c) leaves nothing taken but that. */
#include "engine/lt.h"

#include <stdlib.h>
#include <string.h>

/* Of cuBLASLt 12.9 and newer; named here so that older toolkits build this. */
#define A_SCALE_MODE  ((cublasLtMatmulDescAttributes_t)31)
#define B_SCALE_MODE  ((cublasLtMatmulDescAttributes_t)32)
#define OUTER_VEC_32F 3

/* Kept for the next call, in place of any other. */
static void give_desc(struct qs_lt *lt, cublasLtMatmulDesc_t desc)
{
	desc = atomic_exchange(&lt->desc, desc);
	if (desc)
		lt->library->cublasLtMatmulDescDestroy(desc);
}

void qs_lt_destroy(struct qs_lt *lt)
{
	const struct qs_library *library = lt->library;
	cublasLtMatrixLayout_t layouts[] = {lt->a, lt->b, lt->c, lt->d};
	for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
		if (layouts[i])
			library->cublasLtMatrixLayoutDestroy(layouts[i]);
	give_desc(lt, NULL);
	free(lt);
}

static cublasStatus_t set(const struct qs_lt *lt, cublasLtMatmulDesc_t desc,
                          cublasLtMatmulDescAttributes_t attribute, const void *value, size_t size)
{
	return lt->library->cublasLtMatmulDescSetAttribute(desc, attribute, value, size);
}

static cublasStatus_t fill_desc(const struct qs_lt *lt, cublasLtMatmulDesc_t desc)
{
	const struct qs_lt_operands *operands = &lt->operands;
	const int32_t ta = operands->ta, tb = operands->tb, epilogue = lt->epilogue;
	const int32_t bias_type = lt->bias_type;
	const int8_t fast = operands->fast;
	const int32_t rows = OUTER_VEC_32F;
	cublasStatus_t status = set(lt, desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta);
	if (!status)
		status = set(lt, desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb);
	if (!status && fast)
		status = set(lt, desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
	if (!status)
		status = set(lt, desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
	if (!status && operands->rows)
		status = set(lt, desc, A_SCALE_MODE, &rows, sizeof rows);
	if (!status && operands->rows)
		status = set(lt, desc, B_SCALE_MODE, &rows, sizeof rows);
	if (!status && lt->bias_type != QS_TYPE_NONE)
		status = set(lt, desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type,
		             sizeof bias_type);
	return status;
}

/* The one kept, else a new one; to be given back unless that fails. */
static cublasStatus_t take_desc(struct qs_lt *lt, cublasLtMatmulDesc_t *desc)
{
	*desc = atomic_exchange(&lt->desc, NULL);
	if (*desc)
		return CUBLAS_STATUS_SUCCESS;
	cublasStatus_t status =
	        lt->library->cublasLtMatmulDescCreate(desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
	if (status)
		return status;
	status = fill_desc(lt, *desc);
	if (status)
		lt->library->cublasLtMatmulDescDestroy(*desc);
	return status;
}

static cublasStatus_t make_operand(const struct qs_lt *lt, cublasLtMatrixLayout_t *layout,
                                   cudaDataType type, bool k_first, int64_t k, int64_t other,
                                   int64_t ld)
{
	return lt->library->cublasLtMatrixLayoutCreate(
	        layout, type, (uint64_t)(k_first ? k : other), (uint64_t)(k_first ? other : k), ld);
}

static cublasStatus_t make_layouts(struct qs_lt *lt, const struct qs_key *key,
                                   const struct qs_lt_operands *operands)
{
	const struct qs_library *library = lt->library;
	const uint64_t m = (uint64_t)key->m, n = (uint64_t)key->n;
	const cudaDataType type = (cudaDataType)key->dtype;
	const bool has_c = key->beta != QS_SCALAR_ZERO;
	cublasStatus_t status =
	        make_operand(lt, &lt->a, operands->type[0], operands->ta != CUBLAS_OP_N,
	                     operands->k, key->m, operands->lda);
	if (!status)
		status = make_operand(lt, &lt->b, operands->type[1], operands->tb == CUBLAS_OP_N,
		                      operands->k, key->n, operands->ldb);
	if (!status)
		status = library->cublasLtMatrixLayoutCreate(&lt->c, type, m, n,
		                                             has_c ? key->ldc : key->ldd);
	if (!status)
		status = library->cublasLtMatrixLayoutCreate(&lt->d, type, m, n, key->ldd);
	return status;
}

static cublasStatus_t set_preference(const struct qs_library *library, const struct qs_key *key,
                                     const struct qs_lt_operands *operands, uint64_t workspace,
                                     cublasLtMatmulPreference_t p)
{
	static const cublasLtMatmulPreferenceAttributes_t names[] = {
	        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
	        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
	        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
	        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
	};
	const bool ours = operands->type[0] != CUDA_R_16BF;
	const uint32_t align[] = {ours                      ? 256
	                          : key->align & QS_ALIGN_A ? 16
	                                                    : 2,
	                          ours                      ? 256
	                          : key->align & QS_ALIGN_B ? 16
	                                                    : 2,
	                          16, 16};
	/* Parts of a sum over K are added up in fp32 only, if the program wants that. */
	const uint32_t sums = key->odd & QS_ODD_REDUCED ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
	                                                : CUBLASLT_REDUCTION_SCHEME_MASK;
	cublasStatus_t status = library->cublasLtMatmulPreferenceSetAttribute(
	        p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
	if (!status)
		status = library->cublasLtMatmulPreferenceSetAttribute(
		        p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums);
	for (size_t i = 0; !status && i < sizeof names / sizeof *names; i++)
		status = library->cublasLtMatmulPreferenceSetAttribute(p, names[i], &align[i],
		                                                       sizeof align[i]);
	return status;
}

static bool is_known(const struct qs_lt *lt, const cublasLtMatmulAlgo_t *algo)
{
	for (int i = 0; i < lt->count; i++)
		if (!memcmp(&lt->candidate[i].algo, algo, sizeof *algo))
			return true;
	return false;
}

static cublasStatus_t ask(struct qs_lt *lt, const struct qs_gemm *g, cublasLtMatmulDesc_t desc,
                          uint64_t workspace)
{
	const struct qs_library *library = lt->library;
	cublasLtMatmulHeuristicResult_t result[QS_LT_ASKED] = {0};
	cublasLtMatmulPreference_t preference = NULL;
	int found = 0;
	cublasStatus_t status = library->cublasLtMatmulPreferenceCreate(&preference);
	if (!status)
		status = set_preference(library, &g->key, &lt->operands, workspace, preference);
	if (!status)
		status = library->cublasLtMatmulAlgoGetHeuristic(g->handle, desc, lt->a, lt->b,
		                                                 lt->c, lt->d, preference,
		                                                 QS_LT_ASKED, result, &found);
	if (preference)
		library->cublasLtMatmulPreferenceDestroy(preference);
	for (int i = 0; !status && i < found; i++) {
		if (result[i].state || result[i].workspaceSize > QS_LT_WORKSPACE ||
		    is_known(lt, &result[i].algo))
			continue;
		lt->candidate[lt->count].algo = result[i].algo;
		lt->candidate[lt->count++].workspace = result[i].workspaceSize;
	}
	return status;
}

/* Where workspace may be used, cuBLASLt prefers algorithms that clear some of it before each
 * product and hand out tiles as they go; those that need none were up to 13 % faster in fp8. */
static cublasStatus_t ask_heuristic(struct qs_lt *lt, const struct qs_gemm *g,
                                    cublasLtMatmulDesc_t desc)
{
	cublasStatus_t status = ask(lt, g, desc, QS_LT_WORKSPACE);
	if (!status)
		ask(lt, g, desc, 0);
	return status ? status : lt->count ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* The bias must be set for the heuristic too; scales too, so that they are known to be taken. */
static cublasStatus_t set_pointers(const struct qs_lt *lt, cublasLtMatmulDesc_t desc,
                                   const struct qs_lt_call *call)
{
	cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
	if (call->scale_a)
		status = set(lt, desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &call->scale_a,
		             sizeof call->scale_a);
	if (!status && call->scale_b)
		status = set(lt, desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &call->scale_b,
		             sizeof call->scale_b);
	if (!status && call->bias)
		status = set(lt, desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &call->bias,
		             sizeof call->bias);
	return status;
}

/* All that is asked of cuBLASLt before the first call. */
static bool prepare(struct qs_lt *lt, const struct qs_gemm *g, struct qs_failure *failure)
{
	const void *scale = lt->operands.type[0] == CUDA_R_16BF ? NULL : g->d;
	const struct qs_lt_call pointers = {.scale_a = scale, .scale_b = scale, .bias = g->bias};
	cublasLtMatmulDesc_t desc;
	cublasStatus_t status = take_desc(lt, &desc);
	if (!status) {
		give_desc(lt, desc); /* nobody else takes it yet */
		status = set_pointers(lt, desc, &pointers);
	}
	if (!status)
		status = make_layouts(lt, &g->key, &lt->operands);
	if (status)
		return qs_failed(failure, QS_REASON_ERROR, "cuBLASLt descriptors: status %d",
		                 (int)status);
	status = ask_heuristic(lt, g, desc);
	return !status ||
	       qs_failed(failure, QS_REASON_ALGO_NONE, "cuBLASLt status %d", (int)status);
}

struct qs_lt *qs_lt_create(const struct qs_gemm *g, const struct qs_lt_operands *operands,
                           struct qs_failure *failure)
{
	struct qs_lt *lt = calloc(1, sizeof *lt);
	if (!lt) {
		qs_failed(failure, QS_REASON_MEMORY, "host memory");
		return NULL;
	}
	lt->library = g->library;
	lt->operands = *operands;
	lt->epilogue = g->key.epilogue;
	lt->bias_type = g->key.bias_type;
	if (prepare(lt, g, failure))
		return lt;
	qs_lt_destroy(lt);
	return NULL;
}

static cudaDataType type_of(uint32_t format)
{
	return format == QS_FP8_E5M2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3;
}

struct qs_lt *qs_lt_create_fp8(const struct qs_gemm *g, const struct qs_operands *operands,
                               bool rows, struct qs_failure *failure)
{
	const struct qs_lt_operands narrow = {
	        .type = {type_of(operands->shape[0].format), type_of(operands->shape[1].format)},
	        .ta = operands->op[0],
	        .tb = operands->op[1],
	        .k = operands->k,
	        .lda = operands->ld[0],
	        .ldb = operands->ld[1],
	        .rows = rows,
	        .fast = g->key.role == QS_ROLE_FWD,
	};
	return qs_lt_create(g, &narrow, failure);
}

struct qs_lt_call qs_lt_call_of(const struct qs_gemm *g, CUstream stream, CUdeviceptr workspace)
{
	return (struct qs_lt_call){
	        .handle = g->handle,
	        .alpha = g->alpha,
	        .beta = g->beta,
	        .a = g->a,
	        .b = g->b,
	        .c = g->key.beta == QS_SCALAR_ZERO ? g->d : g->c,
	        .d = g->d,
	        .bias = g->bias,
	        .workspace = (void *)(uintptr_t)workspace,
	        .stream = stream,
	};
}

static const void *host(CUdeviceptr p)
{
	return (const void *)(uintptr_t)p;
}

struct qs_lt_call qs_lt_call_fp8(const struct qs_gemm *g, CUstream stream, CUdeviceptr workspace,
                                 const struct qs_pair *pair)
{
	struct qs_lt_call call = qs_lt_call_of(g, stream, workspace);
	call.a = host(pair->data[0]);
	call.b = host(pair->data[1]);
	call.scale_a = host(pair->scale[0]);
	call.scale_b = host(pair->scale[1]);
	return call;
}

cublasStatus_t qs_lt_run(struct qs_lt *lt, const struct qs_lt_call *call, int candidate)
{
	cublasLtMatmulDesc_t desc;
	cublasStatus_t status = take_desc(lt, &desc);
	if (status)
		return status;
	status = set_pointers(lt, desc, call);
	if (!status)
		status = lt->library->cublasLtMatmul(
		        call->handle, desc, call->alpha, call->a, lt->a, call->b, lt->b, call->beta,
		        call->c, lt->c, call->d, lt->d, &lt->candidate[candidate].algo,
		        call->workspace, lt->candidate[candidate].workspace,
		        (cudaStream_t)call->stream);
	give_desc(lt, desc);
	return status;
}
