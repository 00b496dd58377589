/* Waiting for a lock that may never come free: its holder may have been ended, or wait for us. */
#include <time.h>

#include "note/inside.h"

static _Atomic bool ending;

bool qs_lock_within_a_second(pthread_mutex_t *lock)
{
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec++;
	return !pthread_mutex_timedlock(lock, &until);
}

void qs_note_ending(void)
{
	atomic_store(&ending, true);
}

bool qs_note_lock(pthread_mutex_t *lock)
{
	if (atomic_load(&ending))
		return qs_lock_within_a_second(lock);
	pthread_mutex_lock(lock);
	return true;
}
