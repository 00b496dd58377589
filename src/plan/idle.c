/* Whether the device waits for the CPU where a product is called: what is saved on the device is
 * lost then, and what quantising takes of the CPU is not.
 *
 * At some of its calls the stream is asked if it has nothing left to do, and the call is timed on
 * the CPU. With a share p of calls that find the stream idle, replacing a product loses p times
 * that time for (1 - p) times what it saves on the device. All of the time counts, although the
 * program's own call takes some of it too: what is in doubt stays native. Not where a call saves
 * LARGE times what it takes: a program that waits for each of its products finds the stream idle as
 * well, and has the gain all the same.
 */
#include "plan/idle.h"

#include <stdio.h>
#include <time.h>

#include "device/device.h"

#define WARM_UP 32 /* calls before the first look: the program's and ours     */
#define SOON    2  /* calls from one look to the next before the first verdict */
#define LATER   16 /* and after it                                             */
#define LOOKS   32 /* for a verdict                                            */
#define LARGE   3

static bool is_due(struct qs_idle *idle)
{
	const uint64_t call = atomic_fetch_add_explicit(&idle->calls, 1, memory_order_relaxed);
	return call >= WARM_UP && call % (atomic_load(&idle->judged) ? LATER : SOON) == 0;
}

enum qs_look qs_idle_look(struct qs_idle *idle, const struct qs_stream *stream)
{
	const struct qs_driver *cu = qs_driver_get();
	if (!(idle->saved_us > 0) || !cu->cuStreamQuery || stream->capturing || !is_due(idle))
		return QS_LOOK_NONE;
	const CUresult error = cu->cuStreamQuery(stream->handle);
	if (error && error != CUDA_ERROR_NOT_READY)
		return QS_LOOK_NONE;
	return error ? QS_LOOK_BUSY : QS_LOOK_IDLE;
}

uint64_t qs_idle_clock(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Microseconds of a call, without the longest: a thread is held up now and then. */
static double time_of(const struct qs_idle *idle)
{
	const uint64_t ns = atomic_load(&idle->sum) - atomic_load(&idle->longest);
	return (double)ns / (LOOKS - 1) / 1e3;
}

/* For the verdict and to begin anew. */
static bool is_lost(struct qs_idle *idle, char *detail, size_t size)
{
	const int found = atomic_load(&idle->found);
	const double takes = time_of(idle), saves = idle->saved_us;
	snprintf(detail, size,
	         "the device was idle at %d of %d calls, which save it %.1f us and take %.1f us "
	         "of the CPU",
	         found, LOOKS, saves, takes);
	return found * takes > (LOOKS - found) * saves && saves < LARGE * takes;
}

/* Another thread may add a look to those of the next verdict while this one is reached. */
bool qs_idle_add(struct qs_idle *idle, enum qs_look look, uint64_t ns, char *detail, size_t size)
{
	uint64_t longest = atomic_load(&idle->longest);
	while (ns > longest && !atomic_compare_exchange_weak(&idle->longest, &longest, ns))
		;
	atomic_fetch_add(&idle->sum, ns);
	atomic_fetch_add(&idle->found, look == QS_LOOK_IDLE);
	if (atomic_fetch_add(&idle->looks, 1) + 1 != LOOKS)
		return false;
	const bool lost = is_lost(idle, detail, size);
	atomic_store(&idle->found, 0);
	atomic_store(&idle->sum, 0);
	atomic_store(&idle->longest, 0);
	atomic_store(&idle->looks, 0);
	atomic_store(&idle->judged, true);
	return lost && !atomic_exchange(&idle->lost, true);
}
