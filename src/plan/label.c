/* The named ranges of each thread, and the table of names.
 *
 * A thread's ranges are in memory of its own, made at its first range and freed when it ends. A
 * name is entered in the table when a product is made inside its range, so that the many ranges
 * around other work take no room there. The table is read without locks, written under one, never
 * shrunk.
 */
#include "plan/label.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "note/note.h"

#define SLOTS 8192 /* power of two, more than the names */

/* An open range. */
struct range {
	const void *domain;         /* whose pop ends it                        */
	bool known;                 /* `label` was looked up                    */
	uint16_t label;             /* number of the name                       */
	char name[QS_LABEL_LENGTH]; /* terminated, "" = none                    */
};

/* The open ranges of a thread. */
struct ranges {
	int depth; /* those beyond the bound included          */
	struct range open[QS_LABEL_DEPTH];
};

static _Atomic bool used;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t thread_key;
static bool thread_key_made;

static const char *_Atomic names[QS_LABELS_MAX + 1]; /* by number; 0 is no name       */
static _Atomic uint16_t slots[SLOTS];                /* numbers by hash, 0 = empty    */
static uint16_t count;                               /* of names, under the lock      */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void make_thread_key(void)
{
	thread_key_made = pthread_key_create(&thread_key, free) == 0;
}

/* NULL if memory is out. */
static struct ranges *ranges_of_thread(void)
{
	pthread_once(&once, make_thread_key);
	struct ranges *ranges = thread_key_made ? pthread_getspecific(thread_key) : NULL;
	if (ranges || !thread_key_made)
		return ranges;
	int saved = errno;
	ranges = calloc(1, sizeof *ranges);
	if (ranges && pthread_setspecific(thread_key, ranges)) {
		free(ranges);
		ranges = NULL;
	}
	errno = saved;
	return ranges;
}

int qs_label_enter(const void *domain, const char *name)
{
	struct ranges *ranges = ranges_of_thread();
	if (!ranges)
		return -1;
	if (!atomic_load_explicit(&used, memory_order_relaxed))
		atomic_store_explicit(&used, true, memory_order_relaxed);
	if (ranges->depth < QS_LABEL_DEPTH) {
		struct range *range = &ranges->open[ranges->depth];
		size_t length = name ? strnlen(name, QS_LABEL_LENGTH - 1) : 0;
		*range = (struct range){.domain = domain};
		if (length)
			memcpy(range->name, name, length);
	}
	return ranges->depth++;
}

/* Domains may overlap without nesting: a pop ends the last range of its own. */
int qs_label_leave(const void *domain)
{
	struct ranges *ranges = ranges_of_thread();
	if (!ranges)
		return -1;
	if (ranges->depth > QS_LABEL_DEPTH)
		return --ranges->depth;
	for (int i = ranges->depth - 1; i >= 0; i--) {
		if (ranges->open[i].domain != domain)
			continue;
		ranges->depth--;
		memmove(&ranges->open[i], &ranges->open[i + 1],
		        (size_t)(ranges->depth - i) * sizeof *ranges->open);
		return i;
	}
	return -1;
}

/* The domain of what has none. */
static const char plain;

__attribute__((visibility("default"))) void qs_label_push(const char *name)
{
	qs_label_enter(&plain, name);
}

__attribute__((visibility("default"))) void qs_label_pop(void)
{
	qs_label_leave(&plain);
}

bool qs_labels_used(void)
{
	return atomic_load_explicit(&used, memory_order_relaxed);
}

/* FNV-1a. */
static uint32_t hash_of(const char *name)
{
	uint32_t hash = 2166136261u;
	for (; *name; name++)
		hash = (hash ^ (unsigned char)*name) * 16777619u;
	return hash;
}

/* The slot of the name, or the empty one where it belongs; there always is one. */
static _Atomic uint16_t *find(const char *name)
{
	for (uint32_t i = hash_of(name);; i++) {
		_Atomic uint16_t *slot = &slots[i & (SLOTS - 1)];
		uint16_t label = atomic_load_explicit(slot, memory_order_acquire);
		if (!label || !strcmp(qs_label_name(label), name))
			return slot;
	}
}

/* Under the lock. The name is complete before its number is published. */
static uint16_t add(_Atomic uint16_t *slot, const char *name)
{
	static bool told;
	char *copy = count < QS_LABELS_MAX ? strdup(name) : NULL;
	if (count == QS_LABELS_MAX && !told) {
		told = true;
		qs_message(QS_LOG_WARN,
		           "more than %d layer names; products of further ones have none",
		           QS_LABELS_MAX);
	}
	if (!copy)
		return 0;
	count++;
	atomic_store_explicit(&names[count], copy, memory_order_relaxed);
	atomic_store_explicit(slot, count, memory_order_release);
	return count;
}

static uint16_t number_of(const char *name)
{
	uint16_t label = atomic_load_explicit(find(name), memory_order_acquire);
	if (label)
		return label;
	int saved = errno;
	pthread_mutex_lock(&lock);
	_Atomic uint16_t *slot = find(name);
	label = atomic_load(slot);
	if (!label)
		label = add(slot, name);
	pthread_mutex_unlock(&lock);
	errno = saved;
	return label;
}

uint16_t qs_label_current(void)
{
	struct ranges *ranges = ranges_of_thread();
	int depth = ranges ? ranges->depth : 0;
	if (depth > QS_LABEL_DEPTH)
		depth = QS_LABEL_DEPTH;
	while (depth > 0 && !*ranges->open[depth - 1].name)
		depth--;
	if (!depth)
		return 0;
	struct range *range = &ranges->open[depth - 1];
	if (!range->known) {
		range->label = number_of(range->name);
		range->known = true;
	}
	return range->label;
}

const char *qs_label_name(uint16_t label)
{
	return label <= QS_LABELS_MAX ? atomic_load_explicit(&names[label], memory_order_relaxed)
	                              : NULL;
}

void qs_label_forked(void)
{
	pthread_mutex_init(&lock, NULL);
}
