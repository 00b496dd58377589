/* The nf4 engine: operand A, the weight of a linear layer, in NF4.
 *
 * Few tokens, on Hopper some hundreds: a kernel of ours multiplies the packed weight with bf16
 * activations. More, and dX = dY W: the packed weight is expanded to fp8, the other operand
 * quantised to fp8, and cuBLASLt multiplies: the errors of fp8 are a fraction of those of NF4, and
 * half the time of bf16.
 *
 * The packed weight is kept between calls once it was seen to stay as it is (operand/cache.h).
 * Before that, and where it never does, it is packed for each call: slower than the native product,
 * and what the rule that names nf4 asks for. Not so in a capture, which would pack at each replay.
 */
#include <stddef.h>
#include <stdlib.h>

#include "engine/lt.h"
#include "engine/thin.h"
#include "engine/tune.h"
#include "intercept/intercept.h"
#include "operand/operand.h"
#include "operand/weight.h"
#include "plan/plan.h"

#define DESCRIPTOR_WORDS (sizeof(struct qs_weight) / sizeof(uint32_t))
#define VALID_OFFSET     offsetof(struct qs_weight, valid)

/* One product in one context, complete but for the pointers. */
struct nf4 {
	struct qs_lt *lt;            /* NULL: one kernel of ours                           */
	struct qs_operands operands; /* A is never quantised by it                         */
	bool keeps;                  /* the packed weight, between calls                   */
};

/* Where things are in a scratch block, in bytes from its start; some may be empty. */
struct layout {
	size_t work, expanded, scale, other; /* of cuBLASLt's workspace on: for the product   */
	size_t descriptor, packed;           /* of a weight that is not kept                   */
	size_t total;
};

static size_t packed_bytes(const struct qs_matrix *weight)
{
	return qs_align_part((size_t)qs_nf4_bytes(weight->rows, weight->cols));
}

static struct layout layout_of(const struct nf4 *nf4, const struct qs_matrix *weight, bool kept)
{
	const struct qs_operands *operands = &nf4->operands;
	struct layout at = {.work = nf4->lt ? QS_LT_WORKSPACE : 0};
	at.expanded = at.work + QS_KEPT_WORK;
	at.scale = at.expanded;
	if (nf4->lt)
		at.scale += qs_operand_bytes(operands, 0, operands->turned[0]);
	at.other = at.scale + qs_align_part(QS_SCALE_STRIDE);
	at.descriptor = at.other;
	if (nf4->lt)
		at.descriptor += qs_operand_total(operands, 1);
	at.packed = at.descriptor + qs_align_part(sizeof(struct qs_weight));
	at.total = at.packed + (kept ? 0 : packed_bytes(weight));
	return at;
}

/* ---- preparing ----------------------------------------------------------------------------------
 */

static void destroy(void *state)
{
	struct nf4 *nf4 = state;
	if (nf4->lt)
		qs_lt_destroy(nf4->lt);
	free(nf4);
}

static bool check(const struct qs_gemm *g, struct qs_failure *failure)
{
	struct qs_matrix weight;
	if (!qs_weight_of(g, &weight))
		return qs_failed(failure, QS_REASON_WEIGHT, "operand A is no weight");
	if (weight.cols % QS_WEIGHT_TILE)
		return qs_failed(failure, QS_REASON_WEIGHT,
		                 "blocks of 64 do not fit into rows of %lld",
		                 (long long)weight.cols);
	return true;
}

/* ---- running ------------------------------------------------------------------------------------
 */

/* What one call works with. */
struct call {
	const struct qs_gemm *g;
	const struct qs_context *context;
	const struct qs_stream *stream;
	struct qs_matrix weight;
	struct layout at;
	CUdeviceptr block; /* scratch */
};

/* Packs the weight for this call. Whether it holds NaN or Inf only the device knows then: see
 * qs_thin_run's kernels and qs_nf4_expand. */
static CUresult pack(const struct call *call, struct qs_kept_view *view)
{
	const struct qs_driver *cu = qs_driver_get();
	const struct qs_making making = {
	        .source = call->weight,
	        .data = call->block + call->at.packed,
	        .descriptor = call->block + call->at.descriptor,
	};
	*view = (struct qs_kept_view){.data = making.data,
	                              .descriptor = making.descriptor,
	                              .bytes = packed_bytes(&call->weight)};
	const CUstream stream = call->stream->handle;
	CUresult error = cu->cuMemsetD32Async(making.descriptor, 0, DESCRIPTOR_WORDS, stream);
	if (!error)
		error = qs_form_nf4.make(call->context, stream, &making);
	if (!error)
		error = cu->cuMemsetD32Async(making.descriptor + VALID_OFFSET, 1, 1, stream);
	return error;
}

static CUresult expand(const struct nf4 *nf4, const struct call *call, CUdeviceptr descriptor,
                       struct qs_pair *pair)
{
	const struct qs_matrix *weight = &call->weight;
	struct qs_expand_args args = {
	        .weight = descriptor,
	        .scale = call->block + call->at.scale,
	        .n = weight->rows,
	        .k = weight->cols,
	};
	void *arguments[] = {&args};
	pair->data[0] = call->block + call->at.expanded;
	pair->scale[0] = args.scale;
	*(nf4->operands.turned[0] ? &args.turned : &args.straight) = pair->data[0];
	return qs_driver_get()->cuLaunchKernel(
	        call->context->nf4_expand,
	        qs_pack_blocks(weight->rows, weight->cols, call->context->sms), 1, 1,
	        QS_PACK_THREADS, 1, 1, 0, call->stream->handle, arguments, NULL);
}

/* Both operands in fp8, from the packed weight. */
static CUresult make_operands(const struct nf4 *nf4, const struct call *call,
                              CUdeviceptr descriptor, struct qs_pair *pair)
{
	*pair = (struct qs_pair){.bytes = 0};
	CUresult error = expand(nf4, call, descriptor, pair);
	if (!error)
		error = qs_operand_make(&nf4->operands, 1, call->context, call->stream,
		                        call->block + call->at.other, call->g->b, pair);
	return error;
}

/* The product by cuBLASLt. */
static bool multiply(struct nf4 *nf4, const struct call *call, CUdeviceptr descriptor,
                     uint64_t *bytes, struct qs_failure *failure)
{
	struct qs_pair pair;
	CUresult error = make_operands(nf4, call, descriptor, &pair);
	if (error)
		return qs_failed(failure, QS_REASON_ERROR, "quantising: %s", qs_error_name(error));
	*bytes += pair.bytes;
	const struct qs_lt_call product =
	        qs_lt_call_fp8(call->g, call->stream->handle, call->block, &pair);
	cublasStatus_t status = qs_lt_run(nf4->lt, &product, atomic_load(&nf4->lt->best));
	return !status ||
	       qs_failed(failure, QS_REASON_ERROR, "cublasLtMatmul: status %d", (int)status);
}

/* The expansion has no source to go to where the copy is not valid. */
static CUresult use(const struct nf4 *nf4, const struct call *call, struct qs_kept *kept,
                    struct qs_kept_view *view)
{
	const CUdeviceptr work = call->block + call->at.work;
	return nf4->lt ? qs_kept_use_data(kept, call->stream, work, view)
	               : qs_kept_use(kept, call->stream, work, view);
}

static bool submit(struct nf4 *nf4, const struct call *call, struct qs_kept *kept, uint64_t *bytes,
                   struct qs_failure *failure)
{
	struct qs_kept_view view;
	CUresult error = kept ? use(nf4, call, kept, &view) : pack(call, &view);
	if (error)
		return qs_failed(failure, qs_reason_of_use(error), "packing: %s",
		                 qs_error_name(error));
	*bytes += view.bytes;
	if (nf4->lt)
		return multiply(nf4, call, view.descriptor, bytes, failure);
	error = qs_thin_run(call->context, call->stream, call->g, QS_FORM_NF4, &view,
	                    kept && qs_process()->options->validity == QS_VALIDITY_TRACKED);
	return !error || qs_failed(failure, QS_REASON_ERROR, "product: %s", qs_error_name(error));
}

/* The scratch block's contents as operand/reuse.c knows them are not what it holds afterwards. */
static bool run_in_scratch(struct nf4 *nf4, struct call *call, struct qs_context *context,
                           struct qs_kept *kept, uint64_t *bytes, struct qs_failure *failure)
{
	enum qs_reason why;
	call->at = layout_of(nf4, &call->weight, kept != NULL);
	struct qs_scratch *scratch = qs_scratch_lock(context, call->stream, call->at.total, &why);
	if (!scratch)
		return qs_failed(failure, why, "%zu MiB of scratch", call->at.total >> 20);
	call->block = scratch->base;
	qs_operands_forget(scratch);
	bool done = submit(nf4, call, kept, bytes, failure);
	qs_operands_wrote(scratch, call->g->d, qs_gemm_end(call->g));
	qs_scratch_unlock(scratch);
	return done;
}

static bool run(void *state, const struct qs_gemm *g, struct qs_context *context,
                const struct qs_stream *stream, uint64_t *bytes, struct qs_failure *failure)
{
	struct nf4 *nf4 = state;
	struct call call = {.g = g, .context = context, .stream = stream};
	enum qs_reason why = QS_REASON_UNTRACKED;
	struct qs_kept *kept = NULL;
	qs_weight_of(g, &call.weight);
	if (nf4->keeps)
		kept = qs_kept_find(context, stream, &call.weight, &qs_form_nf4,
		                    qs_process()->options, &why);
	if (!kept && (why == QS_REASON_NONFINITE || stream->capturing))
		return qs_failed(failure, why, "weight not kept");
	bool done = run_in_scratch(nf4, &call, context, kept, bytes, failure);
	if (kept)
		qs_kept_used(kept);
	return done;
}

/* ---- timing -------------------------------------------------------------------------------------
 */

/* What a call does with a weight that is kept, all but cuBLASLt's product. */
struct trial {
	const struct nf4 *nf4;
	const struct call *call;
	struct qs_kept_view weight;
	struct qs_pair pair;
};

static int convert(void *data)
{
	struct trial *trial = data;
	return (int)make_operands(trial->nf4, trial->call, trial->weight.descriptor, &trial->pair);
}

/* Times the product, and where the rule wants nf4 only if it is faster says whether it is. What
 * could not be measured is done as the rule says. */
static bool time_product(struct nf4 *nf4, struct call *call, struct qs_context *context,
                         bool must_win, struct qs_tuned_row *row, struct qs_failure *failure)
{
	struct trial trial = {.nf4 = nf4, .call = call};
	if (pack(call, &trial.weight) || convert(&trial))
		return true;
	const struct qs_lt_call product =
	        qs_lt_call_fp8(call->g, call->stream->handle, call->block, &trial.pair);
	const struct qs_rival preparation = {convert, &trial};
	return qs_tune_prepared(nf4->lt, call->g, context, &product, &preparation, 0, must_win, row,
	                        failure);
}

static bool time_in_scratch(struct nf4 *nf4, const struct qs_gemm *g, struct qs_context *context,
                            const struct qs_stream *stream, const struct qs_choice *choice,
                            struct qs_failure *failure)
{
	enum qs_reason why;
	struct qs_tuned_row row;
	struct call call = {.g = g, .context = context, .stream = stream};
	const bool must_win = !choice->eager;
	if (qs_known_find(nf4->lt, g, context, QS_ACTION_NF4, choice, &row))
		return qs_known_wins(&row, must_win, failure);
	if (!qs_may_tune(g))
		return true;
	qs_weight_of(g, &call.weight);
	call.at = layout_of(nf4, &call.weight, false);
	struct qs_scratch *scratch = qs_scratch_lock(context, stream, call.at.total, &why);
	if (!scratch && must_win)
		return qs_failed(failure, why, "%zu MiB to measure with", call.at.total >> 20);
	if (!scratch) /* the run will say so, or find some by then */
		return true;
	call.block = scratch->base;
	qs_operands_forget(scratch);
	bool wins = time_product(nf4, &call, context, must_win, &row, failure);
	qs_scratch_unlock(scratch);
	return wins;
}

/* Prepares the product of many tokens. */
static bool prepare_many(struct nf4 *nf4, const struct qs_gemm *g, struct qs_context *context,
                         const struct qs_stream *stream, const struct qs_choice *choice,
                         struct qs_failure *failure)
{
	qs_operands_plan(&nf4->operands, &g->key, false, 0);
	nf4->lt = qs_lt_create_fp8(g, &nf4->operands, false, failure);
	return nf4->lt &&
	       (choice->trial || time_in_scratch(nf4, g, context, stream, choice, failure));
}

/* Tokens up to which our kernel goes through the weight once, and was seen to be faster than the
 * program's own call wherever the weight is large. With 33 to 64 it goes twice, and loses. */
#define SURE_TOKENS QS_SPAN

/* Whether one kernel of ours is to compute it. Where nf4 is wanted only if it is faster, and that
 * is not sure, cuBLASLt's product of the expanded weight is, which is timed. */
static bool is_alone(const struct qs_gemm *g, const struct qs_context *context,
                     const struct qs_choice *choice)
{
	const struct qs_key *key = &g->key;
	const bool sure = choice->eager || choice->trial || key->n <= SURE_TOKENS;
	return sure && (qs_thin_fits(g, context) || qs_thin_fits_nf4(g, context));
}

/* What one kernel of ours computes is not timed: with few tokens it reads a quarter of the bytes.
 * But a program of nothing else must make one native product, or no launch of cuBLAS is ever seen,
 * and without that no weight is kept (qs_epoch_trusted). */
static void *prepare(const struct qs_gemm *g, struct qs_context *context,
                     const struct qs_stream *stream, const struct qs_choice *choice,
                     struct qs_failure *failure)
{
	if (!check(g, failure))
		return NULL;
	struct nf4 *nf4 = calloc(1, sizeof *nf4);
	if (!nf4) {
		qs_failed(failure, QS_REASON_MEMORY, "host memory");
		return NULL;
	}
	nf4->keeps = !choice->trial && qs_process()->options->validity >= QS_VALIDITY_VERIFIED;
	if (!is_alone(g, context, choice)) {
		if (prepare_many(nf4, g, context, stream, choice, failure))
			return nf4;
		destroy(nf4);
		return NULL;
	}
	if (!choice->trial && !qs_epoch_trusted())
		qs_run_native(g, context);
	return nf4;
}

const struct qs_engine qs_engine_nf4 = {
        .action = QS_ACTION_NF4,
        .prepare = prepare,
        .run = run,
        .destroy = destroy,
};
