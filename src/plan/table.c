/* The plans by key: open addressing, read without locks, written under one, never shrunk. A plan is
 * complete before it is published and lives as long as the process. */
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
static void announce(const struct qs_plan *plan, const char *library)
{
	if (plan->engine)
		return;
	qs_note_decision(&(struct qs_decision){
	        .key = &plan->key,
	        .layer = qs_label_name(plan->key.layer),
	        .weight = -1,
	        .rule = plan->rule,
	        .action = plan->action,
	        .reason = plan->reason,
	        .library = library,
	});
}

static struct qs_plan *make(const struct qs_key *key, uint64_t hash, const char *library)
{
	char text[112];
	struct qs_plan *plan = calloc(1, sizeof *plan);
	if (!plan)
		return NULL;
	plan->key = *key;
	plan->hash = hash;
	qs_decide(plan, qs_process()->policy);
	qs_key_text(key, text, sizeof text);
	plan->counter = qs_counter_new(text, key, plan->action, plan->reason, plan->rule,
	                               qs_label_name(key->layer));
	announce(plan, library);
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
		plan = make(key, hash, library);
		room -= plan != NULL;
		atomic_store_explicit(slot, plan, memory_order_release);
	}
	pthread_mutex_unlock(&lock);
	return plan;
}
