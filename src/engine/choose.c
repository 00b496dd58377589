/* Which algorithm is fastest: cuBLASLt's first choice is up to a third off, so its candidates are
 * timed on the live operands, interleaved with each other and with what they compete with, into an
 * output of ours. Events on the program's stream, one wait at the end of each; rounds, and the
 * median of them, because a device changes its clock while we look. */
#include <stdlib.h>
#include <time.h>

#include "engine/lt.h"

#define ROUNDS 4 /* the first warms up and is not counted */
#define LANES  (QS_LT_CANDIDATES + 2)

/* Seconds that a measurement waits for the stream before it is given up. */
#define PATIENCE 1

/* A later candidate must be this much faster than the first to be worth leaving it. */
#define MIN_GAIN 1.01f

/* A candidate whose fastest run is so much slower than the best one's is timed no more. Each runs
 * twice before: the first run may have loaded its kernel, and any may have been disturbed. */
#define FAR_OFF 1.1f

/* The times of one lane: a candidate or a rival. */
struct lane {
	float ms[ROUNDS];
	float least; /* of them       */
	bool failed; /* or far off    */
};

static int compare(const void *x, const void *y)
{
	float a = *(const float *)x, b = *(const float *)y;
	return (a > b) - (a < b);
}

static float median(struct lane *lane)
{
	if (lane->failed)
		return -1;
	qsort(lane->ms + 1, ROUNDS - 1, sizeof *lane->ms, compare);
	return lane->ms[1 + (ROUNDS - 1) / 2];
}

struct stopwatch {
	CUevent start, stop;
	CUstream stream;
	bool late; /* waited in vain: nothing more is timed */
};

static bool open_stopwatch(struct stopwatch *watch, CUstream stream)
{
	const struct qs_driver *cu = qs_driver_get();
	watch->stream = stream;
	watch->start = watch->stop = NULL;
	watch->late = false;
	return !cu->cuEventCreate(&watch->start, CU_EVENT_DEFAULT) &&
	       !cu->cuEventCreate(&watch->stop, CU_EVENT_DEFAULT);
}

static void close_stopwatch(struct stopwatch *watch)
{
	const struct qs_driver *cu = qs_driver_get();
	if (watch->start)
		cu->cuEventDestroy_v2(watch->start);
	if (watch->stop)
		cu->cuEventDestroy_v2(watch->stop);
}

/* Waits for the stop event, but not for ever: the stream may be held up by something that this very
 * thread is to do next. */
static bool wait(struct stopwatch *watch)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	const time_t until = time.tv_sec + PATIENCE;
	CUresult error;
	while ((error = qs_driver_get()->cuEventQuery(watch->stop)) == CUDA_ERROR_NOT_READY) {
		clock_gettime(CLOCK_MONOTONIC, &time);
		if (time.tv_sec > until)
			break;
	}
	watch->late = error == CUDA_ERROR_NOT_READY;
	return !error;
}

/* Milliseconds of what was submitted since the start event; negative on an error. */
static float lap(struct stopwatch *watch)
{
	const struct qs_driver *cu = qs_driver_get();
	float ms = -1;
	if (cu->cuEventRecord(watch->stop, watch->stream) || !wait(watch) ||
	    cu->cuEventElapsedTime(&ms, watch->start, watch->stop))
		return -1;
	return ms;
}

static void time_lane(struct lane *lane, int round, struct stopwatch *watch, struct qs_lt *lt,
                      const struct qs_lt_call *call, const struct qs_rival *rival, int candidate)
{
	if (lane->failed)
		return;
	lane->failed = qs_driver_get()->cuEventRecord(watch->start, watch->stream) ||
	               (rival ? rival->run(rival->data) : (int)qs_lt_run(lt, call, candidate));
	float ms = lane->failed ? -1 : lap(watch);
	lane->failed |= ms < 0;
	lane->ms[round] = ms;
	lane->least = round && lane->least < ms ? lane->least : ms;
}

static void drop_slow(struct lane *lanes, int count)
{
	float best = -1;
	for (int i = 0; i < count; i++)
		if (!lanes[i].failed && (best < 0 || lanes[i].least < best))
			best = lanes[i].least;
	for (int i = 0; i < count; i++)
		lanes[i].failed |= lanes[i].least > best * FAR_OFF;
}

static void summarise(struct qs_lt *lt, struct lane *lanes, int rival_count,
                      struct qs_timing *timing)
{
	timing->best = median(&lanes[0]);
	for (int i = 1; i < lt->count; i++) {
		float ms = median(&lanes[i]);
		if (ms >= 0 && (timing->best < 0 || ms * MIN_GAIN < timing->best)) {
			timing->best = ms;
			atomic_store(&lt->best, i);
		}
	}
	for (int i = 0; i < 2; i++)
		timing->rival[i] = i < rival_count ? median(&lanes[lt->count + i]) : -1;
}

bool qs_lt_choose(struct qs_lt *lt, const struct qs_lt_call *call, const struct qs_rival *rivals,
                  int rival_count, struct qs_timing *timing)
{
	struct lane lanes[LANES] = {0};
	struct stopwatch watch;
	bool open = open_stopwatch(&watch, call->stream);
	for (int round = 0; open && round < ROUNDS; round++) {
		for (int i = 0; i < lt->count + rival_count && !watch.late; i++)
			time_lane(&lanes[i], round, &watch, lt, call,
			          i < lt->count ? NULL : &rivals[i - lt->count], i);
		if (round)
			drop_slow(lanes, lt->count);
	}
	close_stopwatch(&watch);
	open &= !watch.late;
	if (open)
		summarise(lt, lanes, rival_count, timing);
	return open && timing->best >= 0;
}
