/* Locks that may stay taken: cuBLAS is called under some of ours, and a C++ exception, longjmp() or
 * the end of the thread may pass through such a call (src/intercept/guard.c). */
#include "device/device.h"
#include "note/note.h"

bool qs_lock_in_time(pthread_mutex_t *lock, _Atomic bool *in_vain)
{
	bool taken = !pthread_mutex_trylock(lock);
	const bool before = atomic_load_explicit(in_vain, memory_order_relaxed);
	if (!taken && !before)
		taken = qs_lock_within_a_second(lock);
	if (taken == before)
		atomic_store(in_vain, !taken);
	return taken;
}
