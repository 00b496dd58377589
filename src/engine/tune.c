/* Timing within limits: the budget of the process, memory for outputs where the program's own may
 * not be written yet, and the program's own call as the rival to beat. */
#include "engine/tune.h"

#include <time.h>

#include "plan/plan.h"

static _Atomic int64_t spent_us; /* of the process's budget */

int64_t qs_tune_start(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000LL + time.tv_nsec / 1000;
}

void qs_tune_stop(int64_t start)
{
	atomic_fetch_add(&spent_us, qs_tune_start() - start);
}

/* The program's own call, once more, into another output. */
struct native {
	const struct qs_gemm *g;
	void *d;
};

static int run_native(void *data)
{
	const struct native *native = data;
	return native->g->repeat(native->g, native->d);
}

bool qs_trial_may_write(const struct qs_gemm *g)
{
	return g->key.beta == QS_SCALAR_ZERO || !g->key.in_place;
}

/* Memory of D's shape for what trials write, 0 if there is none. */
static CUdeviceptr output(const struct qs_gemm *g, struct qs_context *context)
{
	if (qs_trial_may_write(g))
		return (CUdeviceptr)(uintptr_t)g->d;
	return qs_temporary(context, (size_t)((const char *)qs_gemm_end(g) - (const char *)g->d));
}

void qs_run_native(const struct qs_gemm *g, struct qs_context *context)
{
	const struct qs_driver *cu = qs_driver_get();
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	cu->cuThreadExchangeStreamCaptureMode(&mode);
	CUdeviceptr d = g->repeat ? output(g, context) : 0;
	if (d)
		g->repeat(g, (void *)(uintptr_t)d);
	cu->cuThreadExchangeStreamCaptureMode(&mode);
}

/* In relaxed mode: waiting for an event is forbidden to a thread beside a global capture, and would
 * spoil it. */
static bool measure(struct qs_lt *lt, const struct qs_gemm *g, struct qs_context *context,
                    const struct qs_lt_call *call, const struct qs_rival *preparation,
                    struct qs_timing *timing, struct qs_failure *failure)
{
	CUdeviceptr d = output(g, context);
	if (!d)
		return qs_failed(failure, QS_REASON_MEMORY, "a result to measure with");
	struct qs_lt_call trial = *call;
	trial.d = (void *)(uintptr_t)d;
	if (g->key.in_place)
		trial.c = trial.d;
	struct native native = {g, trial.d};
	struct qs_rival rivals[2] = {{run_native, &native}};
	if (preparation)
		rivals[1] = *preparation;
	return qs_lt_choose(lt, &trial, rivals, preparation ? 2 : 1, timing) ||
	       qs_failed(failure, QS_REASON_UNTUNED, "could not be measured");
}

bool qs_may_tune(const struct qs_gemm *g)
{
	double budget_us = 1000.0 * qs_process()->options->budget_ms;
	return g->repeat && (double)atomic_load(&spent_us) < budget_us;
}

bool qs_tune(struct qs_lt *lt, const struct qs_gemm *g, struct qs_context *context,
             const struct qs_lt_call *call, const struct qs_rival *preparation,
             struct qs_timing *timing, struct qs_failure *failure)
{
	if (!qs_may_tune(g))
		return qs_failed(failure, QS_REASON_BUDGET, "not measured");
	const struct qs_driver *cu = qs_driver_get();
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	int64_t start = qs_tune_start();
	cu->cuThreadExchangeStreamCaptureMode(&mode);
	bool done = measure(lt, g, context, call, preparation, timing, failure);
	cu->cuThreadExchangeStreamCaptureMode(&mode);
	qs_tune_stop(start);
	return done;
}

bool qs_tune_prepared(struct qs_lt *lt, const struct qs_gemm *g, struct qs_context *context,
                      const struct qs_lt_call *call, const struct qs_rival *preparation,
                      double shared, bool must_win, struct qs_tuned_row *row,
                      struct qs_failure *failure)
{
	struct qs_timing timing;
	struct qs_failure why;
	if (!qs_tune(lt, g, context, call, preparation, &timing, &why)) {
		const bool wins = !must_win || why.reason != QS_REASON_MEMORY;
		if (!wins)
			*failure = why;
		return wins;
	}
	if (timing.rival[0] < 0 || timing.rival[1] < 0)
		return true;
	timing.rival[1] *= (float)(1 - shared);
	qs_known_add(lt, g, &timing, row);
	return qs_known_wins(row, must_win, failure);
}
