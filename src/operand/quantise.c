/* Both operands of a product, quantised in two launches: one that casts with a predicted scale
 * while it measures, one that repairs what the prediction got wrong. */
#include "operand/operand.h"

#include <cublas_v2.h>

#define ALIGNMENT 256

#define PARTIALS_BYTES (QS_PARTIALS * sizeof(uint32_t))

static size_t align(size_t offset)
{
	return (offset + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Where K is contiguous: A as op T, B as op N. A stored k x m (the program's T) and B stored k x n
 * (its N) are so already; the others are turned, or taken as they are. */
static void describe(struct qs_operands *operands, int i, cublasOperation_t op, int64_t k,
                     int64_t rows, int64_t ld, bool as_stored)
{
	static const cublasOperation_t k_first[2] = {CUBLAS_OP_T, CUBLAS_OP_N};
	struct qs_quantise_operand *shape = &operands->shape[i];
	const bool ready = (op == CUBLAS_OP_N) == (k_first[i] == CUBLAS_OP_N);
	operands->turned[i] = !ready && !as_stored;
	operands->op[i] = as_stored ? op : k_first[i];
	operands->ld[i] = qs_k_padded(ready || !as_stored ? k : rows);
	shape->ld = ld;
	shape->inner = ready ? k : rows;
	shape->outer = ready ? rows : k;
}

void qs_operands_plan(struct qs_operands *operands, const struct qs_key *key, bool as_stored,
                      size_t base)
{
	describe(operands, 0, (cublasOperation_t)key->ta, key->k, key->m, key->lda, as_stored);
	describe(operands, 1, (cublasOperation_t)key->tb, key->k, key->n, key->ldb, as_stored);
	operands->k = as_stored ? key->k : qs_k_padded(key->k);
	operands->base = align(base);
}

size_t qs_operand_bytes(const struct qs_operands *operands, int i, bool turned)
{
	const struct qs_quantise_operand *shape = &operands->shape[i];
	return align((size_t)(turned ? qs_turned_bytes(shape) : qs_straight_bytes(shape)));
}

static size_t fixed_bytes(const struct qs_operands *operands)
{
	return operands->base + 2 * align(PARTIALS_BYTES) + ALIGNMENT;
}

size_t qs_operands_total(const struct qs_operands *operands, bool both)
{
	size_t half = 0;
	for (int i = 0; i < 2; i++) {
		half += qs_operand_bytes(operands, i, operands->turned[i]);
		if (both && atomic_load_explicit(&operands->both[i], memory_order_relaxed))
			half += qs_operand_bytes(operands, i, !operands->turned[i]);
	}
	return fixed_bytes(operands) + 2 * half;
}

struct qs_parts qs_scratch_parts(const struct qs_operands *operands,
                                 const struct qs_scratch *scratch)
{
	struct qs_parts parts;
	parts.partials[0] = scratch->base + operands->base;
	parts.partials[1] = parts.partials[0] + align(PARTIALS_BYTES);
	parts.scale = parts.partials[1] + align(PARTIALS_BYTES);
	parts.half_bytes = (scratch->size - fixed_bytes(operands)) / 2 / ALIGNMENT * ALIGNMENT;
	parts.half[0] = scratch->base + fixed_bytes(operands);
	parts.half[1] = parts.half[0] + parts.half_bytes;
	return parts;
}

static CUresult launch(CUfunction function, unsigned blocks, CUstream stream,
                       struct qs_quantise_args *args)
{
	void *arguments[] = {args};
	return qs_driver_get()->cuLaunchKernel(function, blocks, 1, 1, QS_QUANTISE_THREADS, 1, 1, 0,
	                                       stream, arguments, NULL);
}

CUresult qs_operands_launch(const struct qs_context *context, CUstream stream,
                            struct qs_quantise_args *args)
{
	const struct qs_quantise_operand *operand = args->operand;
	CUresult error = launch(context->quantise, operand[0].blocks[0] + operand[1].blocks[0],
	                        stream, args);
	if (!error)
		error = launch(context->repair, operand[0].blocks[1] + operand[1].blocks[1], stream,
		               args);
	return error;
}
