/* Both operands of a product, quantised anew for this call: one launch for the maxima, one for the
 * casts, into the scratch block that the caller holds. */
#include "operand/operand.h"

#include <cublas_v2.h>

#define ALIGNMENT 256

static size_t align(size_t offset)
{
	return (offset + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* cuBLASLt wants K contiguous: A as op T, B as op N. A stored k x m (the program's T) and B stored
 * k x n (its N) are so already; the others are transposed. */
static void describe(struct qs_quantise_operand *operand, bool straight, int64_t k, int64_t rows,
                     int64_t ld)
{
	operand->ld = ld;
	operand->inner = straight ? k : rows;
	operand->outer = straight ? rows : k;
	operand->k_padded = qs_k_padded(k);
	operand->transpose = !straight;
}

void qs_operands_plan(struct qs_operands *operands, const struct qs_key *key,
                      const struct qs_context *context, size_t base)
{
	struct qs_quantise_operand *operand = operands->args.quantise.operand;
	size_t offset = align(base);
	describe(&operand[0], key->ta != CUBLAS_OP_N, key->k, key->m, key->lda);
	describe(&operand[1], key->tb == CUBLAS_OP_N, key->k, key->n, key->ldb);
	operands->k_padded = operand[0].k_padded;
	operands->amax_blocks = operands->cast_blocks = 0;
	operands->partials_offset = offset;
	offset = align(offset + 2 * QS_AMAX_BLOCKS * sizeof(uint32_t));
	for (int i = 0; i < 2; i++) {
		operand[i].blocks = qs_cast_blocks(&operand[i], context->sms);
		operands->args.partial_blocks[i] = qs_amax_blocks(&operand[i], context->sms);
		operands->amax_blocks += operands->args.partial_blocks[i];
		operands->cast_blocks += operand[i].blocks;
		operands->bytes[i] =
		        (size_t)qs_quantise_rows(&operand[i]) * (size_t)operands->k_padded;
		operands->scale_offset[i] = offset;
		operands->offset[i] = align(offset + sizeof(float));
		offset = align(operands->offset[i] + operands->bytes[i]);
	}
	operands->total = offset;
}

static CUresult launch(CUfunction function, unsigned blocks, unsigned threads, CUstream stream,
                       void *argument)
{
	void *arguments[] = {argument};
	return qs_driver_get()->cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream,
	                                       arguments, NULL);
}

CUresult qs_operands_launch(const struct qs_operands *operands, const struct qs_context *context,
                            const struct qs_stream *stream, const struct qs_scratch *scratch,
                            const void *a, const void *b)
{
	struct qs_cast_args cast = operands->args;
	cast.quantise.partials = scratch->base + operands->partials_offset;
	cast.quantise.operand[0].source = (uint64_t)(uintptr_t)a;
	cast.quantise.operand[1].source = (uint64_t)(uintptr_t)b;
	for (int i = 0; i < 2; i++) {
		cast.quantise.operand[i].target = scratch->base + operands->offset[i];
		cast.quantise.operand[i].scale = scratch->base + operands->scale_offset[i];
	}
	struct qs_quantise_args amax = cast.quantise;
	amax.operand[0].blocks = cast.partial_blocks[0];
	amax.operand[1].blocks = cast.partial_blocks[1];
	CUresult error = launch(context->amax, operands->amax_blocks, QS_AMAX_THREADS,
	                        stream->handle, &amax);
	if (!error)
		error = launch(context->cast, operands->cast_blocks, QS_CAST_THREADS,
		               stream->handle, &cast);
	return error;
}
