/* Both operands quantised with a scale for each row along K: rows of the source that are rows of
 * the output in one pass, columns in two. Nothing is used again: the scales are of one orientation
 * only, and a row's maximum costs no second look at memory.
 */
#include "operand/operand.h"

/* Offsets of one operand's parts from the start of its share of the block. */
struct share {
	size_t scale, partials, end;
};

static struct share share_of(const struct qs_operands *operands, int i)
{
	const struct qs_quantise_operand *shape = &operands->shape[i];
	const bool turned = operands->turned[i];
	const int64_t rows = turned ? shape->inner : shape->outer;
	struct share share;
	share.scale = qs_operand_bytes(operands, i, turned);
	share.partials = share.scale + qs_align_part((size_t)rows * sizeof(float));
	share.end = share.partials + qs_align_part(turned ? (size_t)qs_partials_bytes(shape) : 0);
	return share;
}

size_t qs_rows_total(const struct qs_operands *operands)
{
	return operands->base + share_of(operands, 0).end + share_of(operands, 1).end;
}

static CUresult launch(const struct qs_context *context, const struct qs_stream *stream,
                       CUfunction function, const struct qs_quantise_args *args, int which,
                       bool turned, unsigned threads)
{
	struct qs_quantise_args mine = *args;
	unsigned blocks = 0;
	for (int i = 0; i < 2; i++) {
		if (turned != (args->operand[i].turned != 0))
			mine.operand[i].blocks[0] = mine.operand[i].blocks[1] = 0;
		blocks += mine.operand[i].blocks[which];
	}
	if (!blocks)
		return CUDA_SUCCESS;
	return qs_quantise_launch(context, stream, function, blocks, threads, &mine);
}

CUresult qs_rows_make(const struct qs_operands *operands, const struct qs_context *context,
                      const struct qs_stream *stream, struct qs_scratch *scratch,
                      const void *const source[2], struct qs_pair *pair)
{
	struct qs_quantise_args args = {.operand = {operands->shape[0], operands->shape[1]}};
	CUdeviceptr at = scratch->base + operands->base;
	*pair = (struct qs_pair){.bytes = 0};
	for (int i = 0; i < 2; i++) {
		struct qs_quantise_operand *operand = &args.operand[i];
		const struct share share = share_of(operands, i);
		operand->source = (uint64_t)(uintptr_t)source[i];
		*(operands->turned[i] ? &operand->turned : &operand->straight) = at;
		operand->scale = at + share.scale;
		operand->partials = operands->turned[i] ? at + share.partials : 0;
		if (operands->turned[i])
			qs_columns_plan(operand, context->sms);
		else
			qs_rows_plan(operand);
		pair->data[i] = at;
		pair->scale[i] = operand->scale;
		pair->bytes += qs_operand_bytes(operands, i, operands->turned[i]);
		at += share.end;
	}
	qs_operands_forget(scratch);
	CUresult error = launch(context, stream, context->rows, &args, 0, false, QS_ROWS_THREADS);
	if (!error)
		error = launch(context, stream, context->amax_columns, &args, 0, true,
		               QS_QUANTISE_THREADS);
	if (!error)
		error = launch(context, stream, context->cast_columns, &args, 1, true,
		               QS_QUANTISE_THREADS);
	return error;
}
