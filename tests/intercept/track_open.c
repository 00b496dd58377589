/* Ways in for tests of what is tracked: linked into libqshim_open.so. */
#include "tests/intercept/track_open.h"

#include "operand/track.h"

struct qs_watch *qs_test_watch(uintptr_t first, size_t bytes)
{
	return qs_watch_add((const void *)first, (const void *)(first + bytes));
}

struct qs_watch *qs_test_watch_in(uintptr_t first, size_t bytes, uintptr_t region)
{
	return qs_watch_add_in((const void *)first, (const void *)(first + bytes),
	                       (const void *)region);
}

void qs_test_unwatch(struct qs_watch *watch)
{
	qs_watch_remove(watch);
}

int qs_test_state(const struct qs_watch *watch)
{
	return qs_watch_state(watch);
}

void qs_test_clear(struct qs_watch *watch)
{
	qs_watch_clear(watch, qs_watch_suspects(watch));
}

void qs_test_outcome(struct qs_watch *watch, int unchanged)
{
	qs_watch_readers(watch, unchanged);
}

void qs_test_own(const void *function, int written)
{
	qs_track_own_function(function, written);
}
