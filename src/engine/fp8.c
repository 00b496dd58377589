/* The fp8 engine: both operands quantised, with one scale each or one for each row along K, the
 * product by cuBLASLt.
 *
 * cuBLASLt takes fp8 operands on Ada, Hopper and the small Blackwells only as op(A) = T, op(B) = N,
 * so both are written with K contiguous (and zero-padded to 16), transposed while being cast where
 * the program has them the other way. The large Blackwells take them as they are.
 *
 * A weight that was seen to stay as it is, is kept in fp8 between calls (operand/cache.h). With few
 * tokens, when reading it is all there is to do, a kernel of ours multiplies it with bf16
 * activations.
 */
#include <stdlib.h>

#include "engine/lt.h"
#include "engine/thin.h"
#include "engine/tune.h"
#include "operand/operand.h"
#include "operand/weight.h"
#include "plan/plan.h"

/* One product in one context, complete but for the pointers. */
struct fp8 {
	struct qs_lt *lt;
	struct qs_operands operands; /* quantisation and scratch layout                   */
	bool rows;                   /* a scale for each row along K, not one an operand  */
	const struct qs_form *form;  /* in which A may be kept, NULL = it may not         */
	bool trial;                  /* run by one at a time, for its error               */
	struct qs_pair last;         /* of a trial: its operands                          */
};

/* Bytes of scratch; `both` as for qs_operands_total(). */
static size_t total_of(const struct fp8 *fp8, bool both)
{
	return fp8->rows ? qs_rows_total(&fp8->operands) : qs_operands_total(&fp8->operands, both);
}

static CUresult make_operands(struct fp8 *fp8, const struct qs_gemm *g,
                              const struct qs_context *context, const struct qs_stream *stream,
                              struct qs_scratch *scratch, bool reuse, struct qs_pair *pair)
{
	const void *const source[2] = {g->a, g->b};
	if (fp8->rows)
		return qs_rows_make(&fp8->operands, context, stream, scratch, source, pair);
	return qs_operands_make(&fp8->operands, context, stream, scratch, source, reuse, pair);
}

/* The conversion of both operands, as a call that finds neither pays it. */
struct conversion {
	struct fp8 *fp8;
	const struct qs_gemm *g;
	const struct qs_context *context;
	const struct qs_stream *stream;
	struct qs_scratch *scratch;
	struct qs_tuned_row *row; /* for what is measured   */
	struct qs_pair pair;      /* of the last conversion */
};

static int convert(void *data)
{
	struct conversion *c = data;
	c->pair = (struct qs_pair){.bytes = 0};
	return (int)make_operands(c->fp8, c->g, c->context, c->stream, c->scratch, false, &c->pair);
}

static bool must_win(const struct qs_choice *choice)
{
	return choice->action == QS_ACTION_AUTO || !choice->eager;
}

/* Whether fp8 is taken unmeasured: the size model says that. */
static bool may_guess(const struct qs_choice *choice, struct qs_failure *failure)
{
	return !must_win(choice) || !choice->unlikely ||
	       qs_failed(failure, QS_REASON_SMALL, "not measured");
}

/* Chooses the algorithm, and where the policy leaves the choice to us says whether fp8 pays. What
 * could not be measured is left to the size model that brought us here. The first conversion finds
 * no prediction and casts twice, the timed ones do as later calls will. */
static bool tune(struct conversion *c, const struct qs_choice *choice, struct qs_context *context,
                 struct qs_failure *failure)
{
	if (convert(c))
		return may_guess(choice, failure);
	const struct qs_lt_call call =
	        qs_lt_call_fp8(c->g, c->stream->handle, c->scratch->base, &c->pair);
	const struct qs_rival preparation = {convert, c};
	return qs_tune_prepared(c->fp8->lt, c->g, context, &call, &preparation,
	                        c->fp8->rows ? 0 : choice->shared, must_win(choice), c->row,
	                        failure) &&
	       (c->row->ours_us > 0 || may_guess(choice, failure));
}

/* A plan that is given up must not be remembered by what it made, nor take more than it needs. */
static bool tune_in_scratch(struct fp8 *fp8, const struct qs_gemm *g, struct qs_context *context,
                            const struct qs_stream *stream, const struct qs_choice *choice,
                            struct qs_failure *failure)
{
	enum qs_reason why;
	struct qs_tuned_row row;
	if (qs_known_find(fp8->lt, g, context, QS_ACTION_FP8, choice, &row))
		return qs_known_wins(&row, must_win(choice), failure);
	if (!qs_may_tune(g))
		return may_guess(choice, failure);
	fp8->operands.once = stream->measuring;
	const size_t total = total_of(fp8, true);
	struct qs_scratch *scratch = qs_scratch_lock(context, stream, total, &why);
	if (!scratch && must_win(choice))
		return qs_failed(failure, why, "%zu MiB to measure with", total >> 20);
	if (!scratch) /* the run will say so, or find some by then */
		return true;
	struct conversion conversion = {fp8, g, context, stream, scratch, &row, {.bytes = 0}};
	bool wins = tune(&conversion, choice, context, failure);
	qs_operands_forget(scratch);
	qs_scratch_unlock(scratch);
	fp8->operands.once = false;
	return wins;
}

static void destroy(void *state)
{
	struct fp8 *fp8 = state;
	if (fp8->lt)
		qs_lt_destroy(fp8->lt);
	free(fp8);
}

/* The gradient is operand B of dgrad and wgrad; cuBLASLt takes e5m2 on one side only. */
static uint32_t format_of_b(const struct qs_key *key, const struct qs_choice *choice)
{
	bool gradient = key->role == QS_ROLE_DGRAD || key->role == QS_ROLE_WGRAD;
	return gradient && choice->format == QS_FORMAT_E5M2 ? QS_FP8_E5M2 : QS_FP8_E4M3;
}

/* Scales by row: Hopper only, from cuBLASLt 12.9 on. */
static bool check_rows(const struct qs_gemm *g, const struct qs_context *context,
                       struct qs_failure *failure)
{
	if (context->cc != 90)
		return qs_failed(failure, QS_REASON_ARCH, "scale = row needs Hopper");
	if (g->library->version < 120900)
		return qs_failed(failure, QS_REASON_CUBLASLT_OLD, "scale = row needs 12.9");
	return true;
}

/* Every layout of fp8 operands: compute capability 10.x and 11.x. K must not need padding, which
 * only rows along K have. */
static bool takes_as_stored(const struct qs_gemm *g, const struct qs_context *context, bool rows)
{
	return context->cc >= 100 && context->cc < 120 && !rows && g->key.k % 16 == 0;
}

/* Operands and product; as the program has them if that may be and cuBLASLt has an algorithm. */
static bool make_parts(struct fp8 *fp8, const struct qs_gemm *g, const struct qs_context *context,
                       const struct qs_choice *choice, struct qs_failure *failure)
{
	const bool layouts[] = {true, false};
	for (int i = !takes_as_stored(g, context, fp8->rows); i < 2 && !fp8->lt; i++) {
		qs_operands_plan(&fp8->operands, &g->key, layouts[i],
		                 QS_LT_WORKSPACE + QS_KEPT_WORK);
		fp8->operands.shape[1].format = format_of_b(&g->key, choice);
		fp8->lt = qs_lt_create_fp8(g, &fp8->operands, fp8->rows, failure);
	}
	return fp8->lt;
}

/* A is kept only where a rule demands fp8, as it takes memory, and where the policy's validity
 * speaks of more than the product before. */
static const struct qs_form *form_of(const struct fp8 *fp8, const struct qs_gemm *g,
                                     const struct qs_context *context,
                                     const struct qs_choice *choice)
{
	struct qs_matrix weight;
	if (choice->trial || choice->action != QS_ACTION_FP8 || !choice->eager ||
	    qs_process()->options->validity < QS_VALIDITY_VERIFIED || !qs_weight_of(g, &weight))
		return NULL;
	if (qs_thin_fits(g, context))
		return &qs_form_fp8_tiles;
	if (fp8->rows)
		return NULL;
	return fp8->operands.turned[0] ? &qs_form_fp8_turned : &qs_form_fp8;
}

static void *prepare(const struct qs_gemm *g, struct qs_context *context,
                     const struct qs_stream *stream, const struct qs_choice *choice,
                     struct qs_failure *failure)
{
	const bool rows = choice->scaling == QS_SCALING_ROW;
	if (rows && !check_rows(g, context, failure))
		return NULL;
	struct fp8 *fp8 = calloc(1, sizeof *fp8);
	if (!fp8) {
		qs_failed(failure, QS_REASON_MEMORY, "host memory");
		return NULL;
	}
	fp8->rows = rows;
	fp8->trial = choice->trial;
	if (!make_parts(fp8, g, context, choice, failure) ||
	    (!choice->trial && !tune_in_scratch(fp8, g, context, stream, choice, failure))) {
		destroy(fp8);
		return NULL;
	}
	fp8->form = form_of(fp8, g, context, choice);
	return fp8;
}

/* Reuse is exact, and yet the policy may forbid it. */
static bool may_reuse(void)
{
	return qs_process()->options->validity != QS_VALIDITY_EACH;
}

/* The product by cuBLASLt, with what `pair` has of the operands already. */
static bool submit(struct fp8 *fp8, const struct qs_gemm *g, const struct qs_context *context,
                   const struct qs_stream *stream, struct qs_scratch *scratch, struct qs_pair *pair,
                   struct qs_failure *failure)
{
	CUresult error = make_operands(fp8, g, context, stream, scratch, may_reuse(), pair);
	if (error)
		return qs_failed(failure, QS_REASON_ERROR, "quantising: %s", qs_error_name(error));
	if (fp8->trial)
		fp8->last = *pair;
	const struct qs_lt_call call = qs_lt_call_fp8(g, stream->handle, scratch->base, pair);
	cublasStatus_t status = qs_lt_run(fp8->lt, &call, atomic_load(&fp8->lt->best));
	qs_operands_wrote(scratch, g->d, qs_gemm_end(g));
	if (status)
		return qs_failed(failure, QS_REASON_ERROR, "cublasLtMatmul: status %d",
		                 (int)status);
	return true;
}

/* The product with the kept copy of A: by our kernel, or as an operand of cuBLASLt's. */
static bool submit_kept(struct fp8 *fp8, const struct qs_gemm *g, const struct qs_context *context,
                        const struct qs_stream *stream, struct qs_scratch *scratch,
                        struct qs_kept *kept, uint64_t *bytes, struct qs_failure *failure)
{
	struct qs_kept_view view;
	CUresult error = qs_kept_use(kept, stream, scratch->base + QS_LT_WORKSPACE, &view);
	if (error)
		return qs_failed(failure, qs_reason_of_use(error), "kept weight: %s",
		                 qs_error_name(error));
	*bytes += view.bytes;
	if (view.descriptor) {
		error = qs_thin_run(context, stream, g, QS_FORM_FP8_TILES, &view,
		                    qs_process()->options->validity == QS_VALIDITY_TRACKED);
		qs_operands_wrote(scratch, g->d, qs_gemm_end(g));
		return !error || qs_failed(failure, QS_REASON_ERROR, "kept weight, product: %s",
		                           qs_error_name(error));
	}
	struct qs_pair pair = {.data = {view.data}, .scale = {view.scale}};
	bool done = submit(fp8, g, context, stream, scratch, &pair, failure);
	*bytes += pair.bytes;
	return done;
}

/* Memory for both orientations is asked for where it can be had; a capture makes do with what the
 * product needs. */
static struct qs_scratch *lock_scratch(const struct fp8 *fp8, struct qs_context *context,
                                       const struct qs_stream *stream, struct qs_failure *failure)
{
	enum qs_reason why;
	size_t total = total_of(fp8, !stream->capturing);
	size_t least = total_of(fp8, false);
	struct qs_scratch *scratch = qs_scratch_lock(context, stream, total, &why);
	if (!scratch && least < total)
		scratch = qs_scratch_lock(context, stream, total = least, &why);
	if (!scratch)
		qs_failed(failure, why, "%zu MiB of scratch", total >> 20);
	return scratch;
}

/* NULL if A is not kept, which has many reasons and is no failure: it is quantised then. */
static struct qs_kept *find_kept(const struct fp8 *fp8, const struct qs_gemm *g,
                                 struct qs_context *context, const struct qs_stream *stream)
{
	struct qs_matrix weight;
	enum qs_reason why;
	if (!fp8->form || !qs_weight_of(g, &weight))
		return NULL;
	return qs_kept_find(context, stream, &weight, fp8->form, qs_process()->options, &why);
}

static bool run(void *state, const struct qs_gemm *g, struct qs_context *context,
                const struct qs_stream *stream, uint64_t *bytes, struct qs_failure *failure)
{
	struct fp8 *fp8 = state;
	struct qs_pair pair = {.bytes = 0};
	bool done = false;
	struct qs_kept *kept = find_kept(fp8, g, context, stream);
	struct qs_scratch *scratch = lock_scratch(fp8, context, stream, failure);
	if (scratch && kept) {
		done = submit_kept(fp8, g, context, stream, scratch, kept, bytes, failure);
	} else if (scratch) {
		done = submit(fp8, g, context, stream, scratch, &pair, failure);
		*bytes = pair.bytes;
	}
	if (kept)
		qs_kept_used(kept);
	if (scratch)
		qs_scratch_unlock(scratch);
	return done;
}

static void describe(const void *state, const struct qs_gemm *g,
                     struct qs_compare_operand operand[2])
{
	const struct fp8 *fp8 = state;
	const void *const source[2] = {g->a, g->b};
	for (int i = 0; i < 2; i++) {
		const struct qs_quantise_operand *shape = &fp8->operands.shape[i];
		operand[i] = (struct qs_compare_operand){
		        .source = (uintptr_t)source[i],
		        .scale = fp8->last.scale[i],
		        .rows = shape->outer,
		        .cols = shape->inner,
		        .ld = shape->ld,
		        .format = shape->format,
		        .scales = !fp8->rows                ? QS_COMPARE_ONE_SCALE
		                  : fp8->operands.turned[i] ? QS_COMPARE_SCALE_OF_COL
		                                            : QS_COMPARE_SCALE_OF_ROW,
		};
	}
}

const struct qs_engine qs_engine_fp8 = {
        .action = QS_ACTION_FP8,
        .prepare = prepare,
        .run = run,
        .describe = describe,
        .destroy = destroy,
};
