/* What is to be done with a key: eligibility first, then the policy, then the size model. Decided
 * once per key; what depends on the device is found when an instance is prepared (dispatch.c). */
#define _GNU_SOURCE
#include "plan/label.h"
#include "plan/plan.h"

#include <errno.h>

/* The least predicted gain for which `auto` acts without having measured, and for which it
 * measures. The prediction knows nothing of operands that are converted for another product anyway.
 */
#define MIN_PREDICTED_GAIN 0.05
#define MIN_MEASURED_GAIN  (-0.15)

static void pass(struct qs_plan *plan, enum qs_reason reason)
{
	plan->action = QS_ACTION_NATIVE;
	plan->reason = reason;
	plan->engine = NULL;
}

static void act(struct qs_plan *plan, enum qs_action action, enum qs_reason reason)
{
	plan->action = action;
	plan->reason = reason;
	plan->engine = qs_engine_of(action);
}

/* `auto`, and fp8 "where faster", leave it to the prediction. */
static void decide_by_size(struct qs_plan *plan, enum qs_reason reason)
{
	const struct qs_key *key = &plan->key;
	const double gain = qs_fp8_gain(key->m, key->n, key->k);
	plan->choice.unlikely = gain < MIN_PREDICTED_GAIN;
	if (gain < MIN_MEASURED_GAIN)
		pass(plan, QS_REASON_SMALL);
	else
		act(plan, QS_ACTION_FP8, reason);
}

static void decide_action(struct qs_plan *plan)
{
	switch (plan->choice.action) {
	case QS_ACTION_NATIVE:
		pass(plan, QS_REASON_RULE);
		break;
	case QS_ACTION_AUTO:
		decide_by_size(plan, QS_REASON_AUTO);
		break;
	default:
		if (plan->choice.action == QS_ACTION_FP8 && !plan->choice.eager)
			decide_by_size(plan, QS_REASON_RULE);
		else
			act(plan, plan->choice.action, QS_REASON_RULE);
	}
}

/* The program's own precision has no error to be measured. */
static void shadow(struct qs_plan *plan)
{
	const struct qs_engine *engine = plan->action == QS_ACTION_BF16 ? NULL : plan->engine;
	pass(plan, QS_REASON_SHADOW);
	plan->engine = engine;
	plan->shadow = engine != NULL;
}

/* In a mode that replaces nothing, what would have been replaced says so; the rest keeps its own
 * reason, which is what an observer wants to see. */
static void apply_mode(struct qs_plan *plan, enum qs_mode mode)
{
	if (!plan->engine)
		return;
	if (mode == QS_MODE_OBSERVE)
		pass(plan, plan->choice.unlikely ? QS_REASON_SMALL : QS_REASON_OBSERVE);
	if (mode == QS_MODE_SHADOW)
		shadow(plan);
	if (mode == QS_MODE_OFF) /* since the start */
		pass(plan, QS_REASON_OFF);
}

void qs_decide(struct qs_plan *plan, struct qs_policy *policy, bool again)
{
	struct qs_subject subject = {
	        .key = &plan->key,
	        .layer = qs_label_name(plan->key.layer),
	        .weight = plan->key.weight - 1,
	        .weights = qs_live_weights(),
	        .step = qs_live_step(),
	        .again = again,
	};
	enum qs_reason reason = qs_eligible(&plan->key);
	plan->rule = NULL;
	if (qs_policy_broken(policy)) {
		pass(plan, QS_REASON_POLICY);
		return;
	}
	if (reason != QS_REASON_AUTO) {
		pass(plan, reason);
		return;
	}
	plan->choice = qs_policy_choose(policy, &subject);
	plan->rule = qs_policy_rule_name(policy, plan->choice.rule);
	decide_action(plan);
	if (plan->engine && !qs_policy_process_allowed(policy, program_invocation_short_name))
		pass(plan, QS_REASON_PROCESS);
	apply_mode(plan, qs_policy_options(policy)->mode);
}
