/* Waiting for a lock that may never come free: its holder may have been ended, or wait for us. */
#include <time.h>

#include "note/note.h"

bool qs_lock_within_a_second(pthread_mutex_t *lock)
{
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec++;
	return !pthread_mutex_timedlock(lock, &until);
}
