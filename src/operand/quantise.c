/* Both operands of a product, quantised in two launches: one that casts with a predicted scale
 * while it measures, one that repairs what the prediction got wrong. */
#include "operand/operand.h"

#include <cublas_v2.h>

#define PARTIALS_BYTES (QS_PARTIALS * sizeof(uint32_t))

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
	operands->base = qs_align_part(base);
}

size_t qs_operand_bytes(const struct qs_operands *operands, int i, bool turned)
{
	const struct qs_quantise_operand *shape = &operands->shape[i];
	return qs_align_part((size_t)(turned ? qs_turned_bytes(shape) : qs_straight_bytes(shape)));
}

static size_t fixed_bytes(const struct qs_operands *operands)
{
	return operands->base + 2 * qs_align_part(PARTIALS_BYTES) +
	       qs_align_part(4 * QS_SCALE_STRIDE);
}

size_t qs_operands_total(const struct qs_operands *operands, bool both)
{
	size_t half = 0;
	for (int i = 0; i < 2; i++) {
		half += qs_operand_bytes(operands, i, operands->turned[i]);
		if (both && atomic_load_explicit(&operands->both[i], memory_order_relaxed))
			half += qs_operand_bytes(operands, i, !operands->turned[i]);
	}
	return fixed_bytes(operands) + (operands->once ? 1 : 2) * half;
}

struct qs_parts qs_scratch_parts(const struct qs_operands *operands,
                                 const struct qs_scratch *scratch)
{
	struct qs_parts parts;
	parts.partials[0] = scratch->base + operands->base;
	parts.partials[1] = parts.partials[0] + qs_align_part(PARTIALS_BYTES);
	parts.scale = parts.partials[1] + qs_align_part(PARTIALS_BYTES);
	const unsigned halves = operands->once ? 1 : 2;
	parts.half_bytes = (scratch->size - fixed_bytes(operands)) / halves / 256 * 256;
	parts.half[0] = scratch->base + fixed_bytes(operands);
	parts.half[1] = parts.half[0] + (halves - 1) * parts.half_bytes;
	return parts;
}

/* A slot shared by two matrices costs repairs, not results. */
CUdeviceptr qs_history_of(const struct qs_context *context, const struct qs_quantise_operand *shape,
                          const void *source)
{
	uint64_t hash = (uintptr_t)source ^ ((uint64_t)shape->inner << 44) ^
	                ((uint64_t)shape->outer << 20) ^ (uint64_t)shape->ld;
	hash = (hash * 0x9e3779b97f4a7c15u) >> 32;
	if (!context->history)
		return 0;
	return context->history + (hash & (QS_HISTORY_SLOTS - 1)) * sizeof(uint32_t);
}

CUresult qs_quantise_launch(const struct qs_context *context, const struct qs_stream *stream,
                            CUfunction function, unsigned blocks, unsigned threads,
                            struct qs_quantise_args *args)
{
	CUlaunchAttribute early = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
	                           .value.programmaticStreamSerializationAllowed = 1};
	const CUlaunchConfig config = {.gridDimX = blocks,
	                               .gridDimY = 1,
	                               .gridDimZ = 1,
	                               .blockDimX = threads,
	                               .blockDimY = 1,
	                               .blockDimZ = 1,
	                               .hStream = stream->handle,
	                               .attrs = &early,
	                               .numAttrs = 1};
	const struct qs_driver *cu = qs_driver_get();
	void *arguments[] = {args};
	if (qs_may_begin_early(context, stream))
		return cu->cuLaunchKernelEx(&config, function, arguments, NULL);
	return cu->cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream->handle,
	                          arguments, NULL);
}

CUresult qs_operands_launch(const struct qs_context *context, const struct qs_stream *stream,
                            struct qs_quantise_args *args)
{
	const struct qs_quantise_operand *operand = args->operand;
	CUresult error = qs_quantise_launch(context, stream, context->quantise,
	                                    operand[0].blocks[0] + operand[1].blocks[0],
	                                    QS_QUANTISE_THREADS, args);
	if (!error)
		error = qs_quantise_launch(context, stream, context->repair,
		                           operand[0].blocks[1] + operand[1].blocks[1],
		                           QS_QUANTISE_THREADS, args);
	return error;
}

size_t qs_operand_total(const struct qs_operands *operands, int i)
{
	return qs_align_part(PARTIALS_BYTES) + qs_align_part(QS_SCALE_STRIDE) +
	       qs_operand_bytes(operands, i, operands->turned[i]);
}

CUresult qs_operand_make(const struct qs_operands *operands, int i,
                         const struct qs_context *context, const struct qs_stream *stream,
                         CUdeviceptr at, const void *source, struct qs_pair *pair)
{
	struct qs_quantise_args args = {.operand = {operands->shape[0], operands->shape[1]}};
	struct qs_quantise_operand *operand = &args.operand[i];
	operand->source = (uint64_t)(uintptr_t)source;
	operand->partials = at;
	operand->scale = pair->scale[i] = at + qs_align_part(PARTIALS_BYTES);
	pair->data[i] = operand->scale + qs_align_part(QS_SCALE_STRIDE);
	*(operands->turned[i] ? &operand->turned : &operand->straight) = pair->data[i];
	operand->history = qs_history_of(context, operand, source);
	qs_quantise_plan(operand, context->sms);
	pair->bytes += qs_operand_bytes(operands, i, operands->turned[i]);
	return qs_operands_launch(context, stream, &args);
}
