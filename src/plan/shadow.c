/* Shadow mode: the program always gets its own product; beside the first ones of a key, and one in
 * check_every later, what the policy would have done is done into memory of ours and compared.
 *
 * Everything is submitted to the program's stream before its own call, and read at a later product
 * of the key or at exit: the program waits for nothing but its own GPU. Nothing is timed, and no
 * weight is kept, so a product of few tokens with a weight that would have been kept in fp8 is
 * measured with both operands in fp8, which is less accurate than what it would have been.
 */
#include "plan/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/label.h"

#define CANDIDATES_MAX 2
#define FIRST_CHECKS   3 /* of a key, at its first uses if the device keeps up */

struct qs_shadow {
	_Atomic uint64_t uses;   /* of the key                                */
	_Atomic uint64_t next;   /* use from which on a check is wanted       */
	_Atomic uint64_t checks; /* tried so far                              */
	int count;               /* of candidates                             */
	struct qs_candidate candidate[CANDIDATES_MAX];
};

/* Where the policy leaves it to us, rows are the next choice where one scale is not accurate. */
static int list_scalings(const struct qs_plan *plan, enum qs_scaling scaling[CANDIDATES_MAX])
{
	const struct qs_choice *choice = &plan->choice;
	const bool open = choice->action == QS_ACTION_AUTO || !choice->eager;
	scaling[0] = choice->scaling;
	scaling[1] = QS_SCALING_ROW;
	return plan->engine->action == QS_ACTION_FP8 && open && scaling[0] == QS_SCALING_AUTO ? 2
	                                                                                      : 1;
}

static void describe(const struct qs_plan *plan, const struct qs_choice *choice, char text[24])
{
	const uint8_t role = plan->key.role;
	const bool gradient = role == QS_ROLE_DGRAD || role == QS_ROLE_WGRAD;
	if (plan->engine->action == QS_ACTION_FP8)
		snprintf(text, 24, "fp8 %s%s", choice->scaling == QS_SCALING_ROW ? "row" : "tensor",
		         gradient && choice->format == QS_FORMAT_E5M2 ? " e5m2" : "");
	else
		snprintf(text, 24, "%s", qs_action_name(plan->engine->action));
}

/* Adds "fp8 row" or "no fp8 row (arch)" to what is told of the key. */
static void tell(char *text, size_t size, const char *name, const struct qs_failure *failure)
{
	const size_t used = strlen(text);
	snprintf(text + used, size - used, "%s%s%s%s%s%s", used ? ", " : "", failure ? "no " : "",
	         name, failure ? " (" : "", failure ? qs_reason_code(failure->reason) : "",
	         failure ? ")" : "");
}

static bool prepare(struct qs_candidate *candidate, const struct qs_plan *plan,
                    const struct qs_gemm *g, struct qs_context *context,
                    const struct qs_stream *stream, const struct qs_choice *choice,
                    const char *name, struct qs_failure *failure)
{
	candidate->engine = plan->engine;
	candidate->accuracy.name = plan->accuracy->name;
	candidate->accuracy.layer = plan->accuracy->layer;
	candidate->accuracy.described = plan->engine->describe != NULL;
	candidate->accuracy.row =
	        qs_note_shadow_row(&plan->key, qs_label_name(plan->key.layer), name);
	if (!candidate->accuracy.row)
		return qs_failed(failure, QS_REASON_MEMORY, "host memory");
	candidate->state = plan->engine->prepare(g, context, stream, choice, failure);
	return candidate->state;
}

struct qs_shadow *qs_shadow_make(const struct qs_plan *plan, const struct qs_gemm *g,
                                 struct qs_context *context, const struct qs_stream *stream,
                                 struct qs_failure *failure)
{
	enum qs_scaling scaling[CANDIDATES_MAX];
	struct qs_choice choice = plan->choice;
	struct qs_failure told = {.reason = QS_REASON_SHADOW};
	struct qs_shadow *shadow = calloc(1, sizeof *shadow);
	const int count = list_scalings(plan, scaling);
	choice.trial = true;
	if (!shadow)
		qs_failed(failure, QS_REASON_MEMORY, "host memory");
	for (int i = 0; shadow && i < count; i++) {
		struct qs_candidate *candidate = &shadow->candidate[shadow->count];
		char name[24];
		choice.scaling = scaling[i];
		describe(plan, &choice, name);
		const bool done =
		        prepare(candidate, plan, g, context, stream, &choice, name, failure);
		tell(told.detail, sizeof told.detail, name, done ? NULL : failure);
		shadow->count += done;
	}
	if (shadow && shadow->count) {
		*failure = told;
		return shadow;
	}
	free(shadow);
	return NULL;
}

bool qs_shadow_is_due(struct qs_shadow *shadow, const struct qs_context *context)
{
	bool pending = false;
	for (int i = 0; i < shadow->count; i++) {
		struct qs_accuracy *accuracy = &shadow->candidate[i].accuracy;
		qs_accuracy_look(accuracy, context);
		pending |= atomic_load_explicit(&accuracy->pending, memory_order_relaxed) != 0;
	}
	const uint64_t use = atomic_fetch_add_explicit(&shadow->uses, 1, memory_order_relaxed);
	return !pending && use >= atomic_load_explicit(&shadow->next, memory_order_relaxed);
}

static void put_off(struct qs_shadow *shadow)
{
	const uint64_t every = (uint64_t)qs_process()->options->check_every;
	const uint64_t uses = atomic_load(&shadow->uses);
	if (atomic_fetch_add(&shadow->checks, 1) + 1 < FIRST_CHECKS)
		return;
	atomic_store(&shadow->next, every ? uses + every - 1 : UINT64_MAX);
}

bool qs_shadow_measure(struct qs_shadow *shadow, const struct qs_gemm *g,
                       struct qs_context *context, const struct qs_stream *stream,
                       struct qs_failure *failure)
{
	if (stream->capturing)
		return true;
	const bool any =
	        qs_accuracy_shadow(shadow->candidate, shadow->count, g, context, stream, failure);
	if (any || failure->reason != QS_REASON_AUTO)
		put_off(shadow);
	return failure->reason == QS_REASON_AUTO;
}
