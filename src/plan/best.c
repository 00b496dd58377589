/* Which engine serves a key in a context: the plan's, if it is fast and accurate enough where that
 * is asked, by one scale or by rows; or, where nothing but the fastest is asked for, an algorithm
 * in the program's own precision.
 */
#include "engine/known.h"
#include "plan/plan.h"

/* Where the policy leaves the choice to us, what is measured below min_sqnr is not taken, nor what
 * there is no memory to measure. What cannot be measured for another reason is checked at its first
 * use. */
static bool is_accurate(void *state, const struct qs_plan *plan, const struct qs_gemm *g,
                        struct qs_context *context, const struct qs_stream *stream,
                        const struct qs_choice *choice, struct qs_failure *failure)
{
	double sqnr;
	const char *name = qs_action_name(plan->action);
	if (!qs_known_error(g, context, plan->action, choice, &sqnr)) {
		struct qs_failure why;
		if (!qs_accuracy_measure(plan->engine, state, g, context, stream, &sqnr, &why)) {
			atomic_store(&plan->accuracy->next, 1);
			if (why.reason != QS_REASON_MEMORY)
				return true;
			*failure = why;
			return false;
		}
		qs_message(QS_LOG_NUMERICS, "%s: %s %.2f dB", plan->accuracy->name, name, sqnr);
		qs_known_add_error(g, context, plan->action, choice, sqnr);
	}
	if (sqnr >= choice->min_sqnr)
		return true;
	return qs_failed(failure, QS_REASON_SQNR, "%s%s %.2f dB, wanted %.4g", name,
	                 choice->scaling == QS_SCALING_ROW ? " by rows" : "", sqnr,
	                 choice->min_sqnr);
}

/* True if it is done only where it is measured to be better, not because a rule demands it. */
static bool is_open(const struct qs_plan *plan)
{
	const struct qs_choice *choice = &plan->choice;
	return choice->action == QS_ACTION_AUTO || choice->action == QS_ACTION_BF16 ||
	       !choice->eager;
}

/* True if error decides: not for the program's own precision, or a policy that allows any error. */
static bool is_gated(const struct qs_plan *plan)
{
	return plan->action != QS_ACTION_BF16 && plan->choice.min_sqnr >= 0 && is_open(plan);
}

static void *try(const struct qs_plan *plan, const struct qs_gemm *g, struct qs_context *context,
                 const struct qs_stream *stream, const struct qs_choice *choice,
                 struct qs_failure *failure)
{
	void *state = plan->engine->prepare(g, context, stream, choice, failure);
	if (!state || !is_gated(plan) ||
	    is_accurate(state, plan, g, context, stream, choice, failure))
		return state;
	plan->engine->destroy(state);
	return NULL;
}

/* Where the policy leaves the scaling to us, rows keep an outlier from spoiling all of its matrix:
 * they are tried when one scale for each operand is not accurate enough. `by_rows`: what it came
 * to. */
static void *make_state(const struct qs_plan *plan, const struct qs_gemm *g,
                        struct qs_context *context, const struct qs_stream *stream, bool *by_rows,
                        struct qs_failure *failure)
{
	struct qs_failure second = {.reason = QS_REASON_AUTO};
	struct qs_choice one = plan->choice, rows = plan->choice;
	struct qs_stream trial = *stream;
	trial.measuring = is_open(plan);
	one.shared = qs_before_share(&plan->shared, &plan->key);
	rows.scaling = QS_SCALING_ROW;
	*by_rows = plan->choice.scaling == QS_SCALING_ROW;
	void *state = try(plan, g, context, &trial, &one, failure);
	if (state || failure->reason != QS_REASON_SQNR || plan->action != QS_ACTION_FP8 ||
	    plan->choice.scaling != QS_SCALING_AUTO)
		return state;
	state = try(plan, g, context, &trial, &rows, &second);
	*by_rows = state;
	if (state || second.reason == QS_REASON_SQNR)
		*failure = second;
	return state;
}

/* True if an algorithm for the program's own precision is to be measured beside the plan's engine:
 * where nothing but the fastest is asked for, unless a pin has the last word. */
static bool has_rival(const struct qs_plan *plan, const struct qs_gemm *g,
                      const struct qs_context *context)
{
	return plan->choice.action == QS_ACTION_AUTO &&
	       !qs_known_pinned(g, context, plan->action, &plan->choice);
}

/* What a call of an engine saves, 0 = unknown. */
static double saving(const struct qs_plan *plan, const struct qs_gemm *g,
                     const struct qs_context *context, enum qs_action action, bool rows)
{
	struct qs_choice choice = plan->choice;
	if (rows)
		choice.scaling = QS_SCALING_ROW;
	return qs_known_saving(g, context, action, &choice);
}

/* True if the plan's engine saves no less than `rival`, whom no pin demands. */
static bool is_as_good(const struct qs_plan *plan, const struct qs_gemm *g,
                       const struct qs_instance *instance, enum qs_action rival)
{
	const struct qs_context *context = instance->context;
	return !qs_known_pinned(g, context, rival, &plan->choice) &&
	       saving(plan, g, context, plan->action, instance->rows) >=
	               saving(plan, g, context, rival, false);
}

/* The plan's engine, or, where the choice is ours, the faster of it and the program's own precision
 * by another algorithm. */
static void make_faster(struct qs_instance *instance, const struct qs_plan *plan,
                        const struct qs_gemm *g, const struct qs_stream *stream,
                        struct qs_failure *failure)
{
	const struct qs_engine *rival = &qs_engine_bf16;
	struct qs_failure second = {.reason = QS_REASON_AUTO};
	struct qs_context *context = instance->context;
	instance->state = make_state(plan, g, context, stream, &instance->rows, failure);
	if (!has_rival(plan, g, context))
		return;
	void *state = rival->prepare(g, context, stream, &plan->choice, &second);
	if (!state)
		return;
	if (instance->state && is_as_good(plan, g, instance, rival->action)) {
		rival->destroy(state);
		return;
	}
	if (instance->state)
		plan->engine->destroy(instance->state);
	instance->engine = rival;
	instance->state = state;
	*failure = second;
}

/* What auto chose and no pin demands is only kept where it makes whole steps faster. */
static bool may_be_held(const struct qs_instance *instance, const struct qs_plan *plan,
                        const struct qs_gemm *g)
{
	return instance->state && plan->choice.action == QS_ACTION_AUTO &&
	       !qs_process()->options->host_bound_kept &&
	       !qs_known_pinned(g, instance->context, instance->engine->action, &plan->choice);
}

void qs_best_make(struct qs_instance *instance, const struct qs_plan *plan, const struct qs_gemm *g,
                  const struct qs_stream *stream, struct qs_failure *failure)
{
	make_faster(instance, plan, g, stream, failure);
	instance->may_be_held = may_be_held(instance, plan, g);
}

bool qs_best_is_known(const struct qs_plan *plan, const struct qs_gemm *g,
                      const struct qs_context *context)
{
	return qs_known_whole(g, context, plan->action, &plan->choice) &&
	       (qs_known_pinned(g, context, plan->action, &plan->choice) ||
	        qs_known_whole(g, context, QS_ACTION_BF16, &plan->choice));
}
