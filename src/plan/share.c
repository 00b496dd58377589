/* Timing a few calls of each plan; see share.h.
 *
 * The GPU time of all calls is that of the timed ones times their number, without the longest one
 * where there are several: an event before a product on an idle device comes about as soon as it is
 * submitted, so a thread that was held up before the product seems to be the product's time. The
 * smaller error of this kind that every call of an idle device has is left in. Steps are marked at
 * growing distances: what came after the last mark, at most a fifth of the steps, does not count.
 *
 * A sample is one of a fixed number of places, taken and given back by its state alone. Its events
 * are made in the current context and looked at only while that is current, as its end would be
 * theirs: those of a context that is gone keep their places.
 */
#include "plan/share.h"

#include "device/device.h"
#include "note/note.h"
#include "plan/plan.h"

#define SAMPLES 64 /* calls under way                              */
#define TIMES   4  /* calls of a plan that are timed               */
#define WARM_UP 4  /* calls of a new plan before the first of them */
#define NEVER   UINT64_MAX

enum state {
	FREE,
	HELD,    /* by the thread that times a call, or looks at it */
	PENDING, /* both events are recorded                        */
};

struct qs_sample {
	_Atomic enum state state;
	struct qs_plan *plan;
	uint64_t context; /* id                    */
	CUstream stream;  /* of the call           */
	CUevent begin, end;
};

static struct qs_sample samples[SAMPLES];
static _Atomic int pending; /* samples in that state              */
static _Atomic bool on;     /* calls are timed                    */

/* What the last mark found, under the lock of the steps. */
static struct found {
	double part;            /* of the time until then                */
	int64_t timed, untimed; /* plans that had calls until then       */
} found;

__thread struct qs_sample *qs_share_sample;

static CUstreamCaptureMode exchange(CUstreamCaptureMode mode)
{
	qs_driver_get()->cuThreadExchangeStreamCaptureMode(&mode);
	return mode;
}

/* ---- calls --------------------------------------------------------------------------------------
 */

static uint64_t calls_of(const struct qs_plan *plan)
{
	return atomic_load_explicit(&plan->counter->calls, memory_order_relaxed);
}

/* Keys that share the counter of those that found none have no calls of their own to count. */
static bool is_counted(const struct qs_plan *plan)
{
	return plan->counter->flops > 0;
}

/* One that takes effect now and then is not made to wait anew each time. */
void qs_share_enter(struct qs_plan *plan)
{
	struct qs_share *share = &plan->share;
	const uint64_t next = atomic_load(&share->next);
	const bool timed = atomic_load(&on) && is_counted(plan);
	share->since = calls_of(plan);
	if (!next || (next == NEVER && !atomic_load(&share->taken)))
		atomic_store(&share->next, timed ? share->since + WARM_UP : NEVER);
}

void qs_share_leave(struct qs_plan *plan)
{
	const uint64_t now = calls_of(plan);
	plan->share.calls += now - plan->share.since;
	plan->share.since = now;
}

void qs_share_again(struct qs_plan *plan)
{
	struct qs_share *share = &plan->share;
	if (!atomic_load(&on) || !is_counted(plan))
		return;
	atomic_store(&share->taken, 0);
	atomic_store(&share->timed, 0);
	atomic_store(&share->sum, 0);
	atomic_store(&share->longest, 0);
	atomic_store(&share->next, calls_of(plan));
}

/* A plan in use has gone through its warm-up long before steps are known. */
static void start(struct qs_plan *plan, bool in_use)
{
	plan->share.calls = 0;
	plan->share.since = calls_of(plan);
	if (in_use && is_counted(plan))
		atomic_store(&plan->share.next, plan->share.since);
}

void qs_share_start(void)
{
	if (!qs_note_summary_wanted())
		return;
	atomic_store(&on, true);
	qs_plans_each(start);
}

/* ---- the share ----------------------------------------------------------------------------------
 */

/* ns of a call, 0 = unknown. */
static double time_of(const struct qs_share *share)
{
	const int timed = atomic_load(&share->timed);
	const uint64_t sum = atomic_load(&share->sum);
	if (timed < 2)
		return (double)sum;
	return (double)(sum - atomic_load(&share->longest)) / (timed - 1);
}

/* Adds up ns. */
static void add(struct qs_plan *plan, bool in_use)
{
	if (in_use)
		qs_share_leave(plan);
	if (!plan->share.calls)
		return;
	const bool timed = atomic_load(&plan->share.timed);
	found.part += (double)plan->share.calls * time_of(&plan->share);
	found.timed += timed;
	found.untimed += !timed;
}

void qs_share_mark(double seconds)
{
	if (!atomic_load(&on))
		return;
	found = (struct found){0};
	qs_plans_each(add);
	found.part *= 1e-9 / seconds;
}

void qs_share_report(void)
{
	qs_note_share(found.part, found.timed, found.untimed);
}

/* ---- samples ------------------------------------------------------------------------------------
 */

static void give(struct qs_sample *sample)
{
	const struct qs_driver *cu = qs_driver_get();
	if (sample->begin)
		cu->cuEventDestroy_v2(sample->begin);
	if (sample->end)
		cu->cuEventDestroy_v2(sample->end);
	sample->begin = sample->end = NULL;
	atomic_store_explicit(&sample->state, FREE, memory_order_release);
}

static void take_note(struct qs_share *share, float milliseconds)
{
	const uint64_t ns = (uint64_t)(milliseconds * 1e6f);
	uint64_t longest = atomic_load(&share->longest);
	while (ns > longest && !atomic_compare_exchange_weak(&share->longest, &longest, ns))
		;
	atomic_fetch_add(&share->sum, ns);
	atomic_fetch_add(&share->timed, 1);
}

/* A held sample, to be looked at again if its time has not come. */
static void look_at(struct qs_sample *sample, uint64_t context)
{
	const struct qs_driver *cu = qs_driver_get();
	float milliseconds;
	CUresult error = CUDA_ERROR_NOT_READY;
	if (sample->context == context)
		error = cu->cuEventQuery(sample->end);
	if (error == CUDA_ERROR_NOT_READY) {
		atomic_store_explicit(&sample->state, PENDING, memory_order_release);
		return;
	}
	if (!error && !cu->cuEventElapsedTime(&milliseconds, sample->begin, sample->end))
		take_note(&sample->plan->share, milliseconds);
	atomic_fetch_sub(&pending, 1);
	give(sample);
}

static struct qs_sample *hold(enum state state, int *from)
{
	for (; *from < SAMPLES; ++*from) {
		enum state was = state;
		struct qs_sample *sample = &samples[*from];
		if (atomic_load_explicit(&sample->state, memory_order_relaxed) == state &&
		    atomic_compare_exchange_strong(&sample->state, &was, HELD)) {
			++*from;
			return sample;
		}
	}
	return NULL;
}

/* In relaxed mode: another thread may be capturing in global mode. */
void qs_share_look(void)
{
	uint64_t context;
	struct qs_sample *sample;
	if (!atomic_load_explicit(&pending, memory_order_relaxed) || !qs_context_id(&context))
		return;
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	for (int i = 0; (sample = hold(PENDING, &i));)
		look_at(sample, context);
	exchange(mode);
}

static bool make_events(struct qs_sample *sample)
{
	const struct qs_driver *cu = qs_driver_get();
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	const bool made = !cu->cuEventCreate(&sample->begin, CU_EVENT_DEFAULT) &&
	                  !cu->cuEventCreate(&sample->end, CU_EVENT_DEFAULT);
	exchange(mode);
	return made;
}

/* True if the call at hand will be timed. */
static bool begin(struct qs_plan *plan, const struct qs_gemm *g)
{
	struct qs_stream stream;
	struct qs_sample *sample;
	uint64_t context;
	int from = 0;
	if (g->key.odd & QS_ODD_OPAQUE || atomic_load(&qs_worth_turn) == QS_TURN_WITHOUT ||
	    qs_policy_options(atomic_load(&qs_process()->policy))->mode == QS_MODE_OFF ||
	    !qs_context_id(&context) || !qs_stream_describe(g->stream, &stream) || stream.capturing)
		return false;
	qs_share_look();
	if (!(sample = hold(FREE, &from)))
		return false;
	sample->plan = plan;
	sample->context = context;
	sample->stream = stream.handle;
	if (make_events(sample)) {
		qs_share_sample = sample;
		return true;
	}
	give(sample);
	return false;
}

/* Calls to the next one that is timed: 4, 16, 64. */
static uint64_t distance_after(int taken)
{
	return (uint64_t)1 << 2 * taken;
}

/* Without success it is tried again, at a growing distance. */
void qs_share_take(struct qs_plan *plan, const struct qs_gemm *g, uint64_t call)
{
	struct qs_share *share = &plan->share;
	uint64_t due = atomic_load(&share->next);
	if (call < due || !atomic_compare_exchange_strong(&share->next, &due, NEVER))
		return;
	uint64_t next = call + call / 2 + 1;
	if (begin(plan, g)) {
		const int taken = atomic_fetch_add(&share->taken, 1) + 1;
		next = taken < TIMES ? call + distance_after(taken) : NEVER;
	}
	atomic_store(&share->next, next);
}

void qs_share_record_begin(void)
{
	struct qs_sample *sample = qs_share_sample;
	if (!qs_driver_get()->cuEventRecord(sample->begin, sample->stream))
		return;
	qs_share_sample = NULL;
	give(sample);
}

void qs_share_record_end(bool done)
{
	struct qs_sample *sample = qs_share_sample;
	qs_share_sample = NULL;
	if (!done || qs_driver_get()->cuEventRecord(sample->end, sample->stream)) {
		give(sample);
		return;
	}
	atomic_fetch_add(&pending, 1);
	atomic_store_explicit(&sample->state, PENDING, memory_order_release);
}

void qs_share_forked(void)
{
	for (int i = 0; i < SAMPLES; i++) {
		samples[i].begin = samples[i].end = NULL;
		atomic_store(&samples[i].state, FREE);
	}
	qs_share_sample = NULL;
	atomic_store(&pending, 0);
	atomic_store(&on, false);
	found = (struct found){0};
}
