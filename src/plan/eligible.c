/* What may be replaced at all: a whitelist of what was seen to be accepted and right. Anything else
 * passes with the reason that a user can act on first. Pure functions of the key.
 *
 * Alignment, types, transposes and epilogues: what cuBLASLt 13.1 accepted for fp8 operands on
 * sm_90.
 */
#include <cublasLt.h>
#include <stdint.h>

#include "plan/plan.h"

static bool is_operation(uint8_t operation)
{
	return operation == CUBLAS_OP_N || operation == CUBLAS_OP_T;
}

static enum qs_reason check_entry(const struct qs_key *key)
{
	switch (key->entry) {
	case QS_ENTRY_GEMM_BATCHED_EX:
	case QS_ENTRY_GEMM_BATCHED_EX_64:
	case QS_ENTRY_GEMM_GROUPED_BATCHED_EX:
	case QS_ENTRY_GEMM_GROUPED_BATCHED_EX_64:
		return QS_REASON_BATCH;
	case QS_ENTRY_SGEMM_EX:
	case QS_ENTRY_SGEMM_EX_64:
		return QS_REASON_UNAVAILABLE;
	default:
		return QS_REASON_AUTO;
	}
}

static enum qs_reason check_types(const struct qs_key *key)
{
	if (key->atype != CUDA_R_16BF || key->btype != CUDA_R_16BF ||
	    (key->dtype != CUDA_R_16BF && key->dtype != CUDA_R_32F))
		return QS_REASON_DTYPE;
	if ((key->compute != CUBLAS_COMPUTE_32F && key->compute != CUBLAS_COMPUTE_32F_FAST_16BF) ||
	    key->scale_type != CUDA_R_32F || (key->odd & QS_ODD_PEDANTIC))
		return QS_REASON_COMPUTE;
	return QS_REASON_AUTO;
}

/* Leading dimensions that cuBLAS itself would refuse are left for it to refuse. */
static enum qs_reason check_shape(const struct qs_key *key)
{
	int64_t rows_a = key->ta == CUBLAS_OP_N ? key->m : key->k;
	int64_t rows_b = key->tb == CUBLAS_OP_N ? key->k : key->n;
	if (!is_operation(key->ta) || !is_operation(key->tb))
		return QS_REASON_OP;
	if (key->batch != 1)
		return QS_REASON_BATCH;
	if ((key->odd & (QS_ODD_ORDER | QS_ODD_SHAPE)) || key->m < 0 || key->n < 0 || key->k < 0 ||
	    key->m > INT32_MAX || key->n > INT32_MAX || key->k > INT32_MAX || key->lda < rows_a ||
	    key->ldb < rows_b || key->ldd < key->m)
		return QS_REASON_ORDER;
	return QS_REASON_AUTO;
}

static enum qs_reason check_scalars(const struct qs_key *key)
{
	if (key->alpha == QS_SCALAR_DEVICE || key->beta == QS_SCALAR_DEVICE)
		return QS_REASON_POINTER_MODE;
	if (key->alpha == QS_SCALAR_ZERO || key->alpha == QS_SCALAR_NONFINITE ||
	    key->beta == QS_SCALAR_NONFINITE)
		return QS_REASON_ALPHA;
	return QS_REASON_AUTO;
}

/* Epilogues with an auxiliary output, gradients, and fp32 bias were refused or never proven. */
static enum qs_reason check_epilogue(const struct qs_key *key)
{
	switch (key->epilogue) {
	case CUBLASLT_EPILOGUE_DEFAULT:
	case CUBLASLT_EPILOGUE_RELU:
	case CUBLASLT_EPILOGUE_GELU:
		break;
	case CUBLASLT_EPILOGUE_BIAS:
	case CUBLASLT_EPILOGUE_RELU_BIAS:
	case CUBLASLT_EPILOGUE_GELU_BIAS:
		if (key->bias_type != CUDA_R_16BF)
			return QS_REASON_EPILOGUE;
		break;
	default:
		return QS_REASON_EPILOGUE;
	}
	return key->odd & QS_ODD_ATTR ? QS_REASON_EPILOGUE : QS_REASON_AUTO;
}

static enum qs_reason check_output(const struct qs_key *key)
{
	uint8_t needed = QS_ALIGN_D;
	if (key->beta != QS_SCALAR_ZERO) {
		if (key->ctype != key->dtype || key->ldc < key->m)
			return QS_REASON_BETA;
		needed |= QS_ALIGN_C;
	}
	if (key->bias_type != QS_TYPE_NONE)
		needed |= QS_ALIGN_BIAS;
	if (key->m % (key->dtype == CUDA_R_32F ? 4 : 8) || (key->align & needed) != needed)
		return QS_REASON_ALIGN;
	return QS_REASON_AUTO;
}

enum qs_reason qs_eligible(const struct qs_key *key)
{
	static enum qs_reason (*const checks[])(const struct qs_key *) = {
	        check_types, check_shape, check_scalars, check_epilogue, check_output,
	};
	if (key->odd & QS_ODD_OPAQUE)
		return QS_REASON_HANDLE;
	enum qs_reason reason = check_entry(key);
	if (reason != QS_REASON_AUTO)
		return reason;
	if (!key->m || !key->n || !key->k)
		return QS_REASON_EMPTY;
	for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
		reason = checks[i](key);
		if (reason != QS_REASON_AUTO)
			return reason;
	}
	return QS_REASON_AUTO;
}

/* A range of device memory. */
struct extent {
	uintptr_t first, end; /* [first, end) */
};

static struct extent extent(const void *p, int64_t rows, int64_t cols, int64_t ld, size_t size)
{
	uintptr_t first = (uintptr_t)p;
	return (struct extent){first, first + (size_t)((cols - 1) * ld + rows) * size};
}

static bool meet(struct extent x, struct extent y)
{
	return x.first < y.end && y.first < x.end;
}

bool qs_overlap(const struct qs_gemm *g)
{
	const struct qs_key *key = &g->key;
	size_t size = key->dtype == CUDA_R_32F ? 4 : 2;
	bool nota = key->ta == CUBLAS_OP_N, notb = key->tb == CUBLAS_OP_N;
	struct extent d = extent(g->d, key->m, key->n, key->ldd, size);
	struct extent a = extent(g->a, nota ? key->m : key->k, nota ? key->k : key->m, key->lda, 2);
	struct extent b = extent(g->b, notb ? key->k : key->n, notb ? key->n : key->k, key->ldb, 2);
	if (meet(d, a) || meet(d, b))
		return true;
	if (g->bias && meet(d, extent(g->bias, key->m, 1, key->m, 2)))
		return true;
	if (key->beta == QS_SCALAR_ZERO || (g->c == g->d && key->ldc == key->ldd))
		return false;
	return meet(d, extent(g->c, key->m, key->n, key->ldc, size));
}
