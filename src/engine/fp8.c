/* The fp8 engine: both operands quantised to e4m3 with one scale each, the product by cuBLASLt.
 *
 * cuBLASLt takes fp8 operands on Ada and Hopper only as op(A) = T, op(B) = N, so both are written
 * with K contiguous (and zero-padded to 16), transposed while being cast where the program has them
 * the other way.
 */
#include <stdlib.h>

#include "engine/lt.h"
#include "engine/tune.h"
#include "operand/operand.h"

/* One product in one context, complete but for the pointers. */
struct fp8 {
	struct qs_lt *lt;
	struct qs_operands operands; /* quantisation and scratch layout */
};

static struct qs_lt_call call_of(const struct fp8 *fp8, const struct qs_gemm *g,
                                 const struct qs_stream *stream, const struct qs_scratch *scratch)
{
	unsigned char *base = (unsigned char *)(uintptr_t)scratch->base;
	return (struct qs_lt_call){
	        .handle = g->handle,
	        .alpha = g->alpha,
	        .beta = g->beta,
	        .a = base + fp8->operands.offset[0],
	        .b = base + fp8->operands.offset[1],
	        .c = g->key.beta == QS_SCALAR_ZERO ? g->d : g->c,
	        .d = g->d,
	        .bias = g->bias,
	        .scale_a = base + fp8->operands.scale_offset[0],
	        .scale_b = base + fp8->operands.scale_offset[1],
	        .workspace = base,
	        .stream = stream->handle,
	};
}

/* The conversion of both operands, as each call pays it. */
struct conversion {
	const struct fp8 *fp8;
	const struct qs_gemm *g;
	const struct qs_context *context;
	const struct qs_stream *stream;
	const struct qs_scratch *scratch;
};

static int convert(void *data)
{
	const struct conversion *c = data;
	return (int)qs_operands_launch(&c->fp8->operands, c->context, c->stream, c->scratch,
	                               c->g->a, c->g->b);
}

/* Chooses the algorithm, and where the policy leaves the choice to us says whether fp8 pays. What
 * could not be measured is left to the size model that brought us here. */
static bool tune(struct fp8 *fp8, struct conversion *conversion, bool must_win,
                 struct qs_context *context, struct qs_failure *failure)
{
	struct qs_timing timing;
	struct qs_lt_call call =
	        call_of(fp8, conversion->g, conversion->stream, conversion->scratch);
	const struct qs_rival preparation = {convert, conversion};
	if (convert(conversion) ||
	    !qs_tune(fp8->lt, conversion->g, context, &call, &preparation, &timing))
		return true;
	const float ours = timing.best + timing.rival[1], native = timing.rival[0];
	qs_failed(failure, QS_REASON_NOT_FASTER, "fp8 %.1f + %.1f us, native %.1f us",
	          1e3 * (double)timing.best, 1e3 * (double)timing.rival[1], 1e3 * (double)native);
	return !must_win || timing.rival[1] < 0 || native < 0 || qs_tune_wins(ours, native);
}

static bool tune_in_scratch(struct fp8 *fp8, const struct qs_gemm *g, struct qs_context *context,
                            const struct qs_stream *stream, bool must_win,
                            struct qs_failure *failure)
{
	enum qs_reason why;
	struct qs_scratch *scratch = qs_scratch_lock(context, stream, fp8->operands.total, &why);
	if (!scratch) /* the run will say so, or find some by then */
		return true;
	struct conversion conversion = {fp8, g, context, stream, scratch};
	bool wins = tune(fp8, &conversion, must_win, context, failure);
	qs_scratch_unlock(scratch);
	return wins;
}

static void destroy(struct fp8 *fp8)
{
	if (fp8->lt)
		qs_lt_destroy(fp8->lt);
	free(fp8);
}

/* Fast accumulation (no promotion to fp32 within a tile) is worth 10 % and is what every trainer
 * uses forward and none backward; where the role is unknown the accurate form is used. */
static struct qs_lt *make_product(const struct qs_gemm *g, int64_t k_padded,
                                  struct qs_failure *failure)
{
	const struct qs_lt_operands operands = {
	        .type = CUDA_R_8F_E4M3,
	        .ta = CUBLAS_OP_T,
	        .tb = CUBLAS_OP_N,
	        .k = k_padded,
	        .lda = k_padded,
	        .ldb = k_padded,
	        .fast = g->key.role == QS_ROLE_FWD,
	};
	return qs_lt_create(g, &operands, failure);
}

static void *prepare(const struct qs_gemm *g, struct qs_context *context,
                     const struct qs_stream *stream, const struct qs_choice *choice,
                     struct qs_failure *failure)
{
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
	qs_operands_plan(&fp8->operands, &g->key, context, QS_LT_WORKSPACE);
	fp8->lt = make_product(g, fp8->operands.k_padded, failure);
	bool must_win = choice->action == QS_ACTION_AUTO || !choice->eager;
	if (!fp8->lt || !tune_in_scratch(fp8, g, context, stream, must_win, failure)) {
		destroy(fp8);
		return NULL;
	}
	return fp8;
}

static bool run(void *state, const struct qs_gemm *g, struct qs_context *context,
                const struct qs_stream *stream, uint64_t *bytes, struct qs_failure *failure)
{
	struct fp8 *fp8 = state;
	enum qs_reason why;
	struct qs_scratch *scratch = qs_scratch_lock(context, stream, fp8->operands.total, &why);
	if (!scratch)
		return qs_failed(failure, why, "%zu MiB of scratch", fp8->operands.total >> 20);
	cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
	CUresult error = qs_operands_launch(&fp8->operands, context, stream, scratch, g->a, g->b);
	struct qs_lt_call call = call_of(fp8, g, stream, scratch);
	if (!error)
		status = qs_lt_run(fp8->lt, &call, atomic_load(&fp8->lt->best));
	qs_scratch_unlock(scratch);
	*bytes = fp8->operands.bytes[0] + fp8->operands.bytes[1];
	if (error)
		return qs_failed(failure, QS_REASON_ERROR, "quantising: %s", qs_error_name(error));
	if (status)
		return qs_failed(failure, QS_REASON_ERROR, "cublasLtMatmul: status %d",
		                 (int)status);
	return true;
}

const struct qs_engine qs_engine_fp8 = {
        .action = QS_ACTION_FP8,
        .prepare = prepare,
        .run = run,
};
