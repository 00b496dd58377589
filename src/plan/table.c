/* The plans by key: open addressing, read without locks, written under one, never shrunk. A plan is
 * complete before it is published and lives as long as the process: one for each decision that the
 * policy ever took for its key. */
#include "plan/plan.h"

#include <stdlib.h>
#include <string.h>

#include "plan/label.h"

static struct qs_plan *_Atomic *table; /* `size` slots, power of two               */
static size_t size;
static int64_t room; /* plans that may still be added, under lock */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

bool qs_plan_table_init(int64_t keys)
{
	size = 64;
	while (size < 2 * (size_t)keys)
		size *= 2;
	room = keys;
	table = calloc(size, sizeof *table);
	return table != NULL;
}

void qs_plan_table_forked(void)
{
	pthread_mutex_init(&lock, NULL);
	table = NULL;
}

/* The slot of the key, or the empty one where it belongs; there always is one. */
static struct qs_plan *_Atomic *find(const struct qs_key *key, uint64_t hash)
{
	for (size_t i = hash & (size - 1);; i = (i + 1) & (size - 1)) {
		struct qs_plan *plan = atomic_load_explicit(&table[i], memory_order_acquire);
		if (!plan || (plan->hash == hash && !memcmp(&plan->key, key, sizeof *key)))
			return &table[i];
	}
}

/* Logged here unless an engine is to be prepared: then the outcome is logged (dispatch.c). */
static void announce(const struct qs_plan *plan, enum qs_action action, enum qs_reason reason,
                     const char *detail)
{
	qs_note_decision(&(struct qs_decision){
	        .key = &plan->key,
	        .layer = qs_label_name(plan->key.layer),
	        .weight = plan->key.weight - 1,
	        .rule = plan->rule,
	        .action = action,
	        .reason = reason,
	        .detail = detail,
	        .library = plan->library,
	        .counter = plan->counter,
	});
}

/* All but the counter, which the plans of a key share. */
static struct qs_plan *make(const struct qs_key *key, uint64_t hash, const char *library,
                            bool again)
{
	struct qs_plan *plan = calloc(1, sizeof *plan);
	if (!plan)
		return NULL;
	plan->key = *key;
	plan->hash = hash;
	plan->library = library;
	qs_decide(plan, atomic_load(&qs_process()->policy), again);
	return plan;
}

static struct qs_plan *make_first(const struct qs_key *key, uint64_t hash, const char *library)
{
	char text[112];
	struct qs_plan *plan = make(key, hash, library, false);
	if (!plan || !(plan->accuracy = calloc(1, sizeof *plan->accuracy))) {
		free(plan);
		return NULL;
	}
	qs_key_text(key, text, sizeof text);
	plan->counter = qs_counter_new(text, key, plan->action, plan->reason, plan->rule,
	                               qs_label_name(key->layer));
	plan->accuracy->name = plan->counter->key;
	plan->accuracy->layer = plan->counter->layer;
	qs_share_enter(plan);
	if (!plan->engine)
		announce(plan, plan->action, plan->reason, NULL);
	return plan;
}

struct qs_plan *qs_plan_get(const struct qs_key *key, const char *library)
{
	uint64_t hash = qs_key_hash(key);
	struct qs_plan *_Atomic *slot = find(key, hash);
	struct qs_plan *plan = atomic_load_explicit(slot, memory_order_acquire);
	if (plan)
		return plan;
	pthread_mutex_lock(&lock);
	slot = find(key, hash);
	plan = atomic_load(slot);
	if (!plan && room > 0) {
		plan = make_first(key, hash, library);
		room -= plan != NULL;
		atomic_store_explicit(slot, plan, memory_order_release);
	}
	pthread_mutex_unlock(&lock);
	return plan;
}

/* Tuned products in the program's own precision are not meant: they are not checked either. */
bool qs_plan_demoted(const struct qs_plan *plan, const struct qs_instance *instance)
{
	const enum qs_action action = instance ? instance->engine->action : plan->action;
	return plan->engine && !plan->shadow && action != QS_ACTION_BF16 &&
	       atomic_load_explicit(&plan->accuracy->demoted, memory_order_relaxed);
}

enum qs_action qs_instance_action(const struct qs_plan *plan, const struct qs_instance *instance)
{
	return instance->state && !plan->shadow && !atomic_load(&instance->given_up)
	               ? instance->engine->action
	               : QS_ACTION_NATIVE;
}

/* ---- deciding anew ------------------------------------------------------------------------------
 */

void qs_plan_outcome(const struct qs_plan *plan, enum qs_action action, enum qs_reason reason)
{
	pthread_mutex_lock(&lock);
	if (atomic_load(find(&plan->key, plan->hash)) == plan)
		qs_counter_decide(plan->counter, action, reason, plan->rule);
	pthread_mutex_unlock(&lock);
}

void qs_plan_given_up(struct qs_plan *plan, const char *detail)
{
	qs_share_again(plan);
	qs_counter_decide(plan->counter, QS_ACTION_NATIVE, QS_REASON_STEPS, plan->rule);
	announce(plan, QS_ACTION_NATIVE, QS_REASON_STEPS, detail);
}

void qs_plan_waits(struct qs_plan *plan)
{
	pthread_mutex_lock(&lock);
	if (!atomic_exchange(&plan->waits, true) &&
	    atomic_load(find(&plan->key, plan->hash)) == plan)
		qs_counter_decide(plan->counter, QS_ACTION_NATIVE, QS_REASON_UNTUNED, plan->rule);
	pthread_mutex_unlock(&lock);
}

static bool is_same_text(const char *a, const char *b)
{
	return a == b || (a && b && !strcmp(a, b));
}

/* All that an engine is given, and all that is told. The index of the rule is neither. */
static bool is_same(const struct qs_plan *a, const struct qs_plan *b)
{
	return a->action == b->action && a->reason == b->reason && a->engine == b->engine &&
	       a->choice.action == b->choice.action && a->choice.scaling == b->choice.scaling &&
	       a->choice.format == b->choice.format && a->choice.eager == b->choice.eager &&
	       a->choice.min_sqnr == b->choice.min_sqnr && is_same_text(a->rule, b->rule);
}

/* Takes the plan with this decision out of those that `plan` replaced; NULL = there is none. */
static struct qs_plan *take_other(struct qs_plan *plan, const struct qs_plan *wanted)
{
	struct qs_plan **link = &plan->other;
	while (*link && !is_same(*link, wanted))
		link = &(*link)->other;
	struct qs_plan *found = *link;
	if (found)
		*link = found->other;
	return found;
}

static bool is_waiting(const struct qs_plan *plan)
{
	return atomic_load(&plan->waits) && !atomic_load(&plan->first);
}

/* A plan that was in use before has an outcome already. It is logged where the policy was changed,
 * but not where its rules go back and forth by themselves. */
static void tell(const struct qs_plan *plan, bool log)
{
	const struct qs_instance *instance = atomic_load(&plan->first);
	enum qs_action action = plan->action;
	enum qs_reason reason = plan->reason;
	if (instance) {
		action = qs_instance_action(plan, instance);
		reason = atomic_load(&instance->given_up) ? QS_REASON_STEPS : instance->reason;
	}
	if (is_waiting(plan)) {
		action = QS_ACTION_NATIVE;
		reason = QS_REASON_UNTUNED;
	}
	if (qs_plan_demoted(plan, instance)) {
		action = QS_ACTION_NATIVE;
		reason = QS_REASON_SQNR;
	}
	qs_counter_decide(plan->counter, action, reason, plan->rule);
	if (log && (!plan->engine || instance))
		announce(plan, action, reason, NULL);
}

/* True if the key of the slot has got another plan. Without memory it keeps the one it has. */
static bool decide_slot_again(struct qs_plan *_Atomic *slot, bool again)
{
	struct qs_plan *plan = atomic_load(slot);
	struct qs_plan *next = make(&plan->key, plan->hash, plan->library, again);
	if (!next)
		return false;
	struct qs_plan *known = is_same(plan, next) ? plan : take_other(plan, next);
	if (known) {
		free(next);
		next = known;
	}
	if (next == plan)
		return false;
	next->counter = plan->counter;
	next->accuracy = plan->accuracy;
	next->other = plan;
	qs_share_leave(plan);
	qs_share_enter(next);
	atomic_store_explicit(slot, next, memory_order_release);
	tell(next, !known || !again);
	return true;
}

int qs_plans_decide_again(struct qs_policy *policy)
{
	int changed = 0;
	pthread_mutex_lock(&lock);
	if (policy)
		qs_process_use(policy);
	for (size_t i = 0; i < size; i++)
		if (atomic_load(&table[i]))
			changed += decide_slot_again(&table[i], policy == NULL);
	if (changed)
		qs_worth_begin_anew();
	pthread_mutex_unlock(&lock);
	return changed;
}

void qs_plans_each(void (*see)(struct qs_plan *plan, bool in_use))
{
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < size; i++) {
		struct qs_plan *used = atomic_load(&table[i]);
		for (struct qs_plan *plan = used; plan; plan = plan->other)
			see(plan, plan == used);
	}
	pthread_mutex_unlock(&lock);
}

/* Not if a thread that exit() does not wait for has the table. */
void qs_plans_report(void)
{
	if (pthread_mutex_trylock(&lock))
		return;
	for (size_t i = 0; i < size; i++) {
		const struct qs_plan *plan = atomic_load(&table[i]);
		if (plan && is_waiting(plan))
			announce(plan, QS_ACTION_NATIVE, QS_REASON_UNTUNED,
			         "fewer than three uses");
	}
	pthread_mutex_unlock(&lock);
}
