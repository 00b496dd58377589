/* Two lists under a lock: mappings are made and asked for rarely. Where memory for them runs out,
 * everything counts as shared for the rest of the run. */
#include "operand/mapping.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "operand/track.h"

struct mapping {
	uint64_t first, end;
	uint64_t handle; /* 0 = released */
	bool shared;
};

/* An array that grows. */
struct list {
	void *items;
	size_t count, room;
};

static struct list mappings; /* of struct mapping                                  */
static struct list shared;   /* of uint64_t: handles of what others can write      */
static bool lost;            /* something could not be kept                        */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The driver does not survive, and another thread may have been at work on the lists. */
static void in_child(void)
{
	pthread_mutex_init(&lock, NULL);
	mappings.count = shared.count = 0;
}

static void register_fork(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

static void take_lock(void)
{
	pthread_once(&once, register_fork);
	pthread_mutex_lock(&lock);
}

static void give_lock(void)
{
	pthread_mutex_unlock(&lock);
}

static bool add(struct list *list, const void *item, size_t size)
{
	if (list->count == list->room) {
		const size_t room = list->room ? 2 * list->room : 64;
		void *grown = reallocarray(list->items, room, size);
		if (!grown) {
			lost = true;
			return false;
		}
		list->items = grown;
		list->room = room;
	}
	memcpy((char *)list->items + list->count++ * size, item, size);
	return true;
}

static struct mapping *at(size_t i)
{
	return (struct mapping *)mappings.items + i;
}

static uint64_t end_of(uint64_t first, size_t bytes)
{
	return first + bytes < first ? UINT64_MAX : first + bytes;
}

static bool overlaps(const struct mapping *mapping, uint64_t first, uint64_t end)
{
	return mapping->first < end && mapping->end > first;
}

/* The last takes the place of each that is taken out. */
static void take_out(uint64_t first, uint64_t end)
{
	for (size_t i = 0; i < mappings.count;)
		if (overlaps(at(i), first, end))
			*at(i) = *at(--mappings.count);
		else
			i++;
}

static bool is_shared_handle(uint64_t handle)
{
	const uint64_t *handles = shared.items;
	for (size_t i = 0; i < shared.count; i++)
		if (handles[i] == handle)
			return true;
	return false;
}

static void share(struct mapping *mapping)
{
	mapping->shared = true;
	qs_track_gone((const void *)(uintptr_t)mapping->first, mapping->end - mapping->first);
}

static bool share_all_of(uint64_t handle)
{
	bool any = false;
	for (size_t i = 0; i < mappings.count; i++)
		if (handle && at(i)->handle == handle) {
			share(at(i));
			any = true;
		}
	return any;
}

void qs_mapping_add(uint64_t first, size_t bytes, uint64_t handle)
{
	struct mapping mapping = {first, end_of(first, bytes), handle, false};
	take_lock();
	take_out(first, mapping.end);
	mapping.shared = share_all_of(handle) || is_shared_handle(handle);
	add(&mappings, &mapping, sizeof mapping);
	give_lock();
}

void qs_mapping_remove(uint64_t first, size_t bytes)
{
	take_lock();
	take_out(first, end_of(first, bytes));
	give_lock();
}

void qs_mapping_share(uint64_t handle)
{
	take_lock();
	share_all_of(handle);
	if (!is_shared_handle(handle))
		add(&shared, &handle, sizeof handle);
	give_lock();
}

void qs_mapping_share_at(uint64_t address)
{
	take_lock();
	for (size_t i = 0; i < mappings.count; i++)
		if (overlaps(at(i), address, address + 1))
			share(at(i));
	give_lock();
}

/* Under the lock. */
static bool is_shared_whole(uint64_t first, uint64_t end)
{
	for (size_t i = 0; i < mappings.count; i++)
		if (at(i)->shared && at(i)->first <= first && at(i)->end >= end)
			return true;
	return false;
}

void qs_mapping_share_range(uint64_t first, size_t bytes)
{
	struct mapping mapping = {first, end_of(first, bytes), 0, true};
	take_lock();
	if (!is_shared_whole(first, mapping.end))
		add(&mappings, &mapping, sizeof mapping);
	share(&mapping);
	give_lock();
}

void qs_mapping_release(uint64_t handle)
{
	take_lock();
	uint64_t *handles = shared.items;
	for (size_t i = 0; i < mappings.count; i++)
		if (at(i)->handle == handle)
			at(i)->handle = 0;
	for (size_t i = 0; i < shared.count; i++)
		if (handles[i] == handle)
			handles[i--] = handles[--shared.count];
	give_lock();
}

bool qs_mapping_is_shared(uint64_t first, size_t bytes)
{
	take_lock();
	bool found = lost;
	for (size_t i = 0; i < mappings.count && !found; i++)
		found = at(i)->shared && overlaps(at(i), first, end_of(first, bytes));
	give_lock();
	return found;
}
