/* The bf16 engine: the program's product, in the program's precision, by a faster algorithm.
 *
 * cuBLAS takes the first algorithm its heuristic names; on outputs with one very long dimension
 * that was up to 18 % off. The candidates are timed once per key against the program's own call,
 * and the engine declines where none beats it by min_gain. Without a measurement it declines too.
 */
#include "engine/lt.h"
#include "engine/tune.h"
#include "operand/operand.h"

/* False with *failure filled if nothing is known afterwards. */
static bool measure(struct qs_lt *lt, const struct qs_gemm *g, struct qs_context *context,
                    const struct qs_stream *stream, struct qs_tuned_row *row,
                    struct qs_failure *failure)
{
	struct qs_timing timing;
	enum qs_reason why;
	struct qs_scratch *scratch = qs_scratch_lock(context, stream, QS_LT_WORKSPACE, &why);
	if (!scratch)
		return qs_failed(failure, why, "workspace to measure with");
	struct qs_lt_call call = qs_lt_call_of(g, stream->handle, scratch->base);
	const bool tuned = qs_tune(lt, g, context, &call, NULL, &timing, failure);
	qs_scratch_unlock(scratch);
	if (!tuned)
		return false;
	if (timing.rival[0] < 0)
		return qs_failed(failure, QS_REASON_UNTUNED, "could not be measured");
	qs_known_add(lt, g, &timing, row);
	return true;
}

static bool worth_it(struct qs_lt *lt, const struct qs_gemm *g, struct qs_context *context,
                     const struct qs_stream *stream, const struct qs_choice *choice,
                     struct qs_failure *failure)
{
	struct qs_tuned_row row;
	if (!qs_known_find(lt, g, context, QS_ACTION_BF16, choice, &row) &&
	    !measure(lt, g, context, stream, &row, failure))
		return false;
	return qs_known_wins(&row, true, failure);
}

static void *prepare(const struct qs_gemm *g, struct qs_context *context,
                     const struct qs_stream *stream, const struct qs_choice *choice,
                     struct qs_failure *failure)
{
	const struct qs_key *key = &g->key;
	const struct qs_lt_operands operands = {
	        .type = {CUDA_R_16BF, CUDA_R_16BF},
	        .ta = (cublasOperation_t)key->ta,
	        .tb = (cublasOperation_t)key->tb,
	        .k = key->k,
	        .lda = key->lda,
	        .ldb = key->ldb,
	};
	struct qs_lt *lt = qs_lt_create(g, &operands, failure);
	if (lt && !worth_it(lt, g, context, stream, choice, failure)) {
		qs_lt_destroy(lt);
		lt = NULL;
	}
	return lt;
}

static bool run(void *state, const struct qs_gemm *g, struct qs_context *context,
                const struct qs_stream *stream, uint64_t *bytes, struct qs_failure *failure)
{
	struct qs_lt *lt = state;
	enum qs_reason why;
	struct qs_scratch *scratch = qs_scratch_lock(context, stream, QS_LT_WORKSPACE, &why);
	if (!scratch)
		return qs_failed(failure, why, "workspace");
	struct qs_lt_call call = qs_lt_call_of(g, stream->handle, scratch->base);
	cublasStatus_t status = qs_lt_run(lt, &call, atomic_load(&lt->best));
	qs_operands_wrote(scratch, g->d, qs_gemm_end(g));
	qs_scratch_unlock(scratch);
	*bytes = 0;
	if (status)
		return qs_failed(failure, QS_REASON_ERROR, "cublasLtMatmul: status %d",
		                 (int)status);
	return true;
}

static void destroy(void *state)
{
	qs_lt_destroy(state);
}

const struct qs_engine qs_engine_bf16 = {
        .action = QS_ACTION_BF16,
        .prepare = prepare,
        .run = run,
        .destroy = destroy,
};
