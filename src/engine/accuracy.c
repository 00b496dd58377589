/* Measuring the error of products; see accuracy.h.
 *
 * One block of memory in a context holds the program's own result, and for a trial the engine's. It
 * is used in stream order: another stream may have it once the last comparison has reported. A
 * check that finds it in use, or no place to report to, is made at a later product instead.
 */
#define _GNU_SOURCE
#include "engine/accuracy.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/tune.h"
#include "note/note.h"
#include "operand/operand.h"
#include "plan/plan.h"

#define FAILURES_MAX 3     /* checks in a row below min_sqnr                          */
#define SLOTS        64    /* checks under way in a context                           */
#define TRIAL        SLOTS /* where trials report                                  */
#define MIB          ((size_t)1 << 20)
#define PATIENCE     1 /* seconds that a trial waits for its stream, or for another */

/* The outcome is in mapped host memory, which goes with its context. */
struct qs_check_place {
	const struct qs_context *context;
	const struct qs_compare_outcome *outcome;
	struct qs_accuracy *accuracy; /* NULL = not used yet */
	uint64_t sequence;            /* of the last comparison that reports here */
};

/* One context's. Never freed. */
struct qs_checks {
	struct qs_context *context;
	pthread_mutex_t lock;     /* held while a check is submitted                      */
	_Atomic bool held_up;     /* see qs_lock_in_time()                                */
	struct qs_scratch memory; /* struct qs_compare_work, then results                 */
	uint64_t sequence;        /* of the last comparison                               */
	uint64_t stream;          /* id of the stream that used the memory last, 0 = none */
	int last;                 /* slot of that use, -1 = it does not report            */
	struct qs_check_place slot[SLOTS + 1];
	struct qs_compare_outcome *outcome; /* one for each slot                          */
	struct qs_checks *next;             /* of another context                         */
};

static pthread_mutex_t creation = PTHREAD_MUTEX_INITIALIZER;
static struct qs_checks *_Atomic all; /* added to under `creation` */

static CUstreamCaptureMode exchange(CUstreamCaptureMode mode)
{
	qs_driver_get()->cuThreadExchangeStreamCaptureMode(&mode);
	return mode;
}

static bool is_done(const struct qs_compare_outcome *outcome, uint64_t sequence)
{
	return __atomic_load_n(&outcome->sequence, __ATOMIC_ACQUIRE) >= sequence;
}

/* ---- a context's checks -------------------------------------------------------------------------
 */

/* What could not be had stays NULL: nothing is checked in this context. */
static struct qs_checks *create(struct qs_context *context)
{
	const size_t bytes = (SLOTS + 1) * sizeof(struct qs_compare_outcome);
	struct qs_checks *checks = calloc(1, sizeof *checks);
	void *host = NULL;
	if (!checks)
		return NULL;
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	/* With unified addressing it has the same address on the device. */
	CUresult error = qs_driver_get()->cuMemHostAlloc(&host, bytes, CU_MEMHOSTALLOC_PORTABLE);
	exchange(mode);
	if (!error) {
		memset(host, 0, bytes);
		checks->outcome = host;
	}
	for (int i = 0; checks->outcome && i <= SLOTS; i++)
		checks->slot[i] = (struct qs_check_place){context, &checks->outcome[i], NULL, 0};
	checks->context = context;
	pthread_mutex_init(&checks->lock, NULL);
	return checks;
}

static struct qs_checks *checks_of(struct qs_context *context)
{
	struct qs_checks *checks = atomic_load_explicit(&context->checks, memory_order_acquire);
	if (!checks) {
		pthread_mutex_lock(&creation);
		checks = atomic_load(&context->checks);
		if (!checks && (checks = create(context))) {
			checks->next = atomic_load(&all);
			atomic_store(&all, checks);
			atomic_store_explicit(&context->checks, checks, memory_order_release);
		}
		pthread_mutex_unlock(&creation);
	}
	return checks && checks->outcome ? checks : NULL;
}

void qs_accuracy_forked(void)
{
	pthread_mutex_init(&creation, NULL);
	atomic_store(&all, NULL);
}

static bool is_free(const struct qs_checks *checks, const struct qs_stream *stream)
{
	if (!checks->stream || checks->stream == stream->id)
		return true;
	return checks->last >= 0 &&
	       is_done(&checks->outcome[checks->last], checks->slot[checks->last].sequence);
}

static size_t d_bytes(const struct qs_gemm *g)
{
	return (size_t)((const char *)qs_gemm_end(g) - (const char *)g->d);
}

/* The same, so that another result may follow. */
static size_t result_bytes(const struct qs_gemm *g)
{
	return qs_align_part(d_bytes(g));
}

/* The first of `count` results of D's shape, behind the work; 0 if there is no memory. */
static CUdeviceptr results(struct qs_checks *checks, const struct qs_gemm *g,
                           const struct qs_stream *stream, size_t count)
{
	const size_t head = qs_align_part(sizeof(struct qs_compare_work));
	if (!is_free(checks, stream) ||
	    !qs_reserve(checks->context, &checks->memory, head + count * result_bytes(g)))
		return 0;
	checks->stream = stream->id;
	checks->last = -1;
	return checks->memory.base + head;
}

/* ---- comparing ----------------------------------------------------------------------------------
 */

/* The program's own call, into `d`. Where C is read in place, D is copied there first. */
static bool run_native(const struct qs_gemm *g, CUdeviceptr d, const struct qs_stream *stream)
{
	const struct qs_driver *cu = qs_driver_get();
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	bool done = true;
	if (g->key.in_place && g->key.beta != QS_SCALAR_ZERO)
		done = !cu->cuMemcpyDtoDAsync_v2(d, (CUdeviceptr)(uintptr_t)g->d, d_bytes(g),
		                                 stream->handle);
	done = done && !g->repeat(g, (void *)(uintptr_t)d);
	exchange(mode);
	return done;
}

/* Columns of D are what follows each other in memory. `operand` is what was made of A and B, or
 * NULL. */
static bool compare(struct qs_checks *checks, const struct qs_gemm *g,
                    const struct qs_stream *stream, CUdeviceptr reference, CUdeviceptr candidate,
                    const struct qs_compare_operand operand[2], int slot)
{
	const struct qs_driver *cu = qs_driver_get();
	const CUdeviceptr work = checks->memory.base;
	struct qs_compare_args args = {
	        .reference = reference,
	        .candidate = candidate,
	        .rows = g->key.n,
	        .cols = g->key.m,
	        .ld_reference = g->key.ldd,
	        .ld_candidate = g->key.ldd,
	        .type = g->key.dtype == CUDA_R_32F ? QS_COMPARE_FP32 : QS_COMPARE_BF16,
	        .blocks = qs_compare_blocks(g->key.n, g->key.m, checks->context->sms),
	        .work = work,
	        .outcome = (uintptr_t)&checks->outcome[slot],
	        .sequence = checks->sequence + 1,
	};
	for (int i = 0; operand && i < 2; i++) {
		args.operand[i] = operand[i];
		args.operand[i].blocks =
		        qs_compare_blocks(operand[i].rows, operand[i].cols, checks->context->sms);
	}
	void *arguments[] = {&args};
	if (cu->cuMemsetD32Async(work, 0, 1, stream->handle) ||
	    cu->cuLaunchKernel(checks->context->compare, qs_compare_grid(&args), 1, 1,
	                       QS_COMPARE_THREADS, 1, 1, 0, stream->handle, arguments, NULL))
		return false;
	checks->slot[slot].sequence = ++checks->sequence;
	checks->last = slot;
	return true;
}

/* The last comparison is this one's: what it reports will be looked at. One that is given up for it
 * must not be found at its place. */
static void expect(struct qs_checks *checks, struct qs_accuracy *accuracy)
{
	checks->slot[checks->last].accuracy = accuracy;
	atomic_store(&accuracy->pending, 0);
	atomic_store(&accuracy->due, &checks->slot[checks->last]);
	atomic_store_explicit(&accuracy->pending, checks->sequence, memory_order_release);
}

/* ---- trials -------------------------------------------------------------------------------------
 */

static bool wait(CUevent event)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	const time_t until = time.tv_sec + PATIENCE;
	CUresult error;
	while ((error = qs_driver_get()->cuEventQuery(event)) == CUDA_ERROR_NOT_READY) {
		clock_gettime(CLOCK_MONOTONIC, &time);
		if (time.tv_sec > until)
			break;
	}
	return !error;
}

static bool wait_for_stream(const struct qs_stream *stream)
{
	const struct qs_driver *cu = qs_driver_get();
	CUevent event = NULL;
	if (cu->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING))
		return false;
	const bool done = !cu->cuEventRecord(event, stream->handle) && wait(event);
	cu->cuEventDestroy_v2(event);
	return done;
}

/* Operands that a trial has made are of no use to a product: the state they belong to may be given
 * up. */
static void forget_operands(struct qs_context *context, const struct qs_stream *stream)
{
	enum qs_reason why;
	struct qs_scratch *scratch = qs_scratch_lock(context, stream, 1, &why);
	if (!scratch)
		return;
	qs_operands_forget(scratch);
	qs_scratch_unlock(scratch);
}

/* The engine's product, into `d`. */
static bool run_trial(const struct qs_engine *engine, void *state, const struct qs_gemm *g,
                      CUdeviceptr d, struct qs_context *context, const struct qs_stream *stream,
                      struct qs_failure *failure)
{
	struct qs_gemm trial = *g;
	uint64_t bytes = 0;
	trial.d = (void *)(uintptr_t)d;
	if (g->key.in_place)
		trial.c = trial.d;
	if (g->key.in_place && g->key.beta != QS_SCALAR_ZERO &&
	    qs_driver_get()->cuMemcpyDtoDAsync_v2(d, (CUdeviceptr)(uintptr_t)g->d, d_bytes(g),
	                                          stream->handle))
		return qs_failed(failure, QS_REASON_ERROR, "copying C");
	const bool done = engine->run(state, &trial, context, stream, &bytes, failure);
	forget_operands(context, stream);
	return done;
}

/* To hundredths of a dB, as the tuned file and the logs have it. */
static double rounded(double sqnr)
{
	return (double)(int64_t)(100 * sqnr + (sqnr < 0 ? -0.5 : 0.5)) / 100;
}

static bool no_memory(const struct qs_gemm *g, size_t count, struct qs_failure *failure)
{
	return qs_failed(failure, QS_REASON_MEMORY, "%zu MiB to compare results",
	                 (count * result_bytes(g) + MIB - 1) / MIB);
}

/* The reference is what D is to hold anyway, if it may hold it now. */
static bool measure(struct qs_checks *checks, const struct qs_engine *engine, void *state,
                    const struct qs_gemm *g, const struct qs_stream *stream, double *sqnr,
                    struct qs_failure *failure)
{
	const bool in_d = qs_trial_may_write(g);
	const size_t count = in_d ? 1 : 2;
	const CUdeviceptr candidate = results(checks, g, stream, count);
	const CUdeviceptr reference =
	        in_d ? (CUdeviceptr)(uintptr_t)g->d : candidate + result_bytes(g);
	if (!candidate)
		return is_free(checks, stream) ? no_memory(g, count, failure)
		                               : qs_failed(failure, QS_REASON_UNTUNED, "in use");
	if (!run_native(g, reference, stream))
		return qs_failed(failure, QS_REASON_ERROR, "the program's own call, made again");
	if (!run_trial(engine, state, g, candidate, checks->context, stream, failure))
		return false;
	if (!compare(checks, g, stream, reference, candidate, NULL, TRIAL) ||
	    !wait_for_stream(stream))
		return qs_failed(failure, QS_REASON_UNTUNED, "comparing");
	*sqnr = rounded((double)checks->outcome[TRIAL].sqnr);
	return true;
}

bool qs_accuracy_measure(const struct qs_engine *engine, void *state, const struct qs_gemm *g,
                         struct qs_context *context, const struct qs_stream *stream, double *sqnr,
                         struct qs_failure *failure)
{
	if (!qs_may_tune(g))
		return qs_failed(failure, QS_REASON_BUDGET, "not measured");
	struct qs_checks *checks = checks_of(context);
	if (!checks || !qs_lock_in_time(&checks->lock, &checks->held_up))
		return qs_failed(failure, QS_REASON_UNTUNED, "could not be compared");
	const int64_t start = qs_tune_start();
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	const bool done = measure(checks, engine, state, g, stream, sqnr, failure);
	exchange(mode);
	qs_tune_stop(start);
	pthread_mutex_unlock(&checks->lock);
	return done;
}

/* ---- checks in use ------------------------------------------------------------------------------
 */

static void judge(struct qs_accuracy *accuracy, float sqnr)
{
	const double least = atomic_load(&accuracy->least);
	const char *open = *accuracy->layer ? " [" : "", *close = *accuracy->layer ? "]" : "";
	qs_message(QS_LOG_NUMERICS, "%s%s%s%s: %.1f dB", accuracy->name, open, accuracy->layer,
	           close, (double)sqnr);
	if (least < 0 || (double)sqnr >= least) {
		atomic_store(&accuracy->failed, 0);
		return;
	}
	if (atomic_fetch_add(&accuracy->failed, 1) + 1 < FAILURES_MAX ||
	    atomic_exchange(&accuracy->demoted, true))
		return;
	qs_message(QS_LOG_WARN,
	           "%s%s%s%s: %.1f dB at the last of %d checks, below min_sqnr = %.4g; native "
	           "for the rest of the run",
	           accuracy->name, open, accuracy->layer, close, (double)sqnr, FAILURES_MAX, least);
}

/* The larger of the shares that these elements are of A and of B. */
static double share_of(const struct qs_accuracy *accuracy, const uint64_t elements[2])
{
	const struct qs_key *key = accuracy->row->key;
	const double a = (double)elements[0] / ((double)key->m * (double)key->k);
	const double b = (double)elements[1] / ((double)key->n * (double)key->k);
	return a > b ? a : b;
}

static void note(const struct qs_accuracy *accuracy, const struct qs_compare_outcome *outcome)
{
	const char *layer = accuracy->layer;
	const struct qs_shadow_error error = {
	        .sqnr = rounded((double)outcome->sqnr),
	        .error = outcome->amax > 0 ? (double)outcome->error / (double)outcome->amax : 0,
	        .amax = (double)outcome->amax,
	        .saturated = accuracy->described ? share_of(accuracy, outcome->saturated) : -1,
	        .flushed = accuracy->described ? share_of(accuracy, outcome->flushed) : -1,
	};
	qs_note_shadow(accuracy->row, &error);
	qs_message(QS_LOG_NUMERICS, "%s%s%s%s: %s would have %.1f dB", accuracy->name,
	           *layer ? " [" : "", layer, *layer ? "]" : "", accuracy->row->candidate,
	           error.sqnr);
}

/* The place may be used anew once `pending` has changed: what was read before is of no use then. */
static void take(struct qs_accuracy *accuracy, uint64_t pending,
                 const struct qs_compare_outcome *outcome)
{
	if (!atomic_compare_exchange_strong(&accuracy->pending, &pending, 0))
		return;
	if (accuracy->row)
		note(accuracy, outcome);
	else
		judge(accuracy, outcome->sqnr);
}

void qs_accuracy_look(struct qs_accuracy *accuracy, const struct qs_context *context)
{
	const uint64_t pending = atomic_load_explicit(&accuracy->pending, memory_order_acquire);
	if (!pending)
		return;
	const struct qs_check_place *due = atomic_load(&accuracy->due);
	if (due->context != context || !is_done(due->outcome, pending))
		return;
	const struct qs_compare_outcome seen = *due->outcome;
	take(accuracy, pending, &seen);
}

/* A place to report to, -1 if there is none; reports of keys that are not used any more are read
 * here. */
static int take_slot(struct qs_checks *checks)
{
	for (int i = 0; i < SLOTS; i++) {
		const struct qs_check_place *place = &checks->slot[i];
		struct qs_accuracy *owner = place->accuracy;
		if (owner)
			qs_accuracy_look(owner, checks->context);
		if (!owner || atomic_load(&owner->due) != place ||
		    atomic_load(&owner->pending) != place->sequence)
			return i;
	}
	return -1;
}

/* Counts a use. The first one after `next` came makes the check. */
static bool is_due(struct qs_accuracy *accuracy)
{
	const uint64_t every = (uint64_t)qs_process()->options->check_every;
	const uint64_t use = atomic_fetch_add_explicit(&accuracy->uses, 1, memory_order_relaxed);
	const uint64_t next = atomic_load_explicit(&accuracy->next, memory_order_relaxed);
	return every && use + 1 >= (next ? next : every);
}

static void put_off(struct qs_accuracy *accuracy)
{
	const uint64_t every = (uint64_t)qs_process()->options->check_every;
	atomic_store(&accuracy->next, atomic_load(&accuracy->uses) + every);
}

/* One in another context is given up: if that is gone, it will never report. */
static bool is_under_way(const struct qs_accuracy *accuracy, const struct qs_context *context)
{
	return atomic_load(&accuracy->pending) && atomic_load(&accuracy->due)->context == context;
}

/* With the checks locked. What has no place now may have it at the next product. */
static bool begin(struct qs_check *check, const struct qs_gemm *g, const struct qs_stream *stream,
                  struct qs_failure *failure)
{
	if (is_under_way(check->accuracy, check->checks->context))
		return false;
	check->slot = take_slot(check->checks);
	if (check->slot < 0 || !is_free(check->checks, stream))
		return false;
	put_off(check->accuracy);
	check->reference = results(check->checks, g, stream, 1);
	if (!check->reference && !atomic_exchange(&check->accuracy->unchecked, true))
		no_memory(g, 1, failure);
	return check->reference && run_native(g, check->reference, stream);
}

bool qs_check_begin(struct qs_check *check, struct qs_accuracy *accuracy, double least,
                    const struct qs_gemm *g, struct qs_context *context,
                    const struct qs_stream *stream, struct qs_failure *failure)
{
	failure->reason = QS_REASON_AUTO;
	if (!is_due(accuracy) || stream->capturing || !g->repeat)
		return false;
	check->accuracy = accuracy;
	check->least = least;
	check->checks = checks_of(context);
	if (!check->checks || pthread_mutex_trylock(&check->checks->lock))
		return false;
	const bool begun = begin(check, g, stream, failure);
	if (!begun)
		pthread_mutex_unlock(&check->checks->lock);
	return begun;
}

void qs_check_end(struct qs_check *check, const struct qs_gemm *g, const struct qs_stream *stream,
                  bool done)
{
	struct qs_checks *checks = check->checks;
	const CUdeviceptr candidate = (CUdeviceptr)(uintptr_t)g->d;
	if (done && compare(checks, g, stream, check->reference, candidate, NULL, check->slot)) {
		atomic_store(&check->accuracy->least, check->least);
		expect(checks, check->accuracy);
	}
	pthread_mutex_unlock(&checks->lock);
}

/* ---- shadow mode --------------------------------------------------------------------------------
 */

/* One after the other in the same memory, in stream order. */
static bool try(struct qs_checks *checks, struct qs_candidate *candidate, const struct qs_gemm *g,
                const struct qs_stream *stream, CUdeviceptr reference, struct qs_failure *failure)
{
	struct qs_compare_operand operand[2];
	const struct qs_engine *engine = candidate->engine;
	const CUdeviceptr d = reference + result_bytes(g);
	const int slot = take_slot(checks);
	if (slot < 0)
		return false;
	checks->last = -1;
	if (!run_trial(engine, candidate->state, g, d, checks->context, stream, failure))
		return false;
	if (engine->describe)
		engine->describe(candidate->state, g, operand);
	if (!compare(checks, g, stream, reference, d, engine->describe ? operand : NULL, slot))
		return qs_failed(failure, QS_REASON_ERROR, "comparing");
	expect(checks, &candidate->accuracy);
	return true;
}

static bool is_pending(struct qs_candidate *candidates, int count)
{
	for (int i = 0; i < count; i++)
		if (atomic_load(&candidates[i].accuracy.pending))
			return true;
	return false;
}

static bool try_all(struct qs_checks *checks, struct qs_candidate *candidates, int count,
                    const struct qs_gemm *g, const struct qs_stream *stream,
                    struct qs_failure *failure)
{
	bool any = false;
	if (!is_free(checks, stream) || take_slot(checks) < 0 || is_pending(candidates, count))
		return false;
	const CUdeviceptr reference = results(checks, g, stream, 2);
	if (!reference)
		return no_memory(g, 2, failure);
	if (!run_native(g, reference, stream))
		return qs_failed(failure, QS_REASON_ERROR, "the program's own call, made again");
	for (int i = 0; i < count; i++)
		any |= try(checks, &candidates[i], g, stream, reference, failure);
	return any;
}

bool qs_accuracy_shadow(struct qs_candidate *candidates, int count, const struct qs_gemm *g,
                        struct qs_context *context, const struct qs_stream *stream,
                        struct qs_failure *failure)
{
	struct qs_checks *checks = checks_of(context);
	failure->reason = QS_REASON_AUTO;
	if (!checks)
		return qs_failed(failure, QS_REASON_MEMORY, "host memory");
	if (pthread_mutex_trylock(&checks->lock))
		return false;
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	const bool any = try_all(checks, candidates, count, g, stream, failure);
	exchange(mode);
	pthread_mutex_unlock(&checks->lock);
	return any;
}

/* The memory went with its context, if that is gone, which nobody tells us: read through a pipe it
 * is an error and no signal. */
static bool peek(int ends[2], const struct qs_compare_outcome *from, struct qs_compare_outcome *to)
{
	return write(ends[1], from, sizeof *from) == (ssize_t)sizeof *from &&
	       read(ends[0], to, sizeof *to) == (ssize_t)sizeof *to;
}

static void report(int ends[2], const struct qs_checks *checks)
{
	struct qs_compare_outcome seen;
	for (int i = 0; i < SLOTS; i++) {
		struct qs_accuracy *accuracy = checks->slot[i].accuracy;
		const uint64_t sequence = checks->slot[i].sequence;
		if (accuracy && accuracy->row && atomic_load(&accuracy->pending) == sequence &&
		    peek(ends, &checks->outcome[i], &seen) && seen.sequence == sequence)
			take(accuracy, sequence, &seen);
	}
}

void qs_accuracy_report(void)
{
	int ends[2];
	const int saved = errno;
	const struct qs_checks *checks = atomic_load(&all);
	if (checks && !pipe2(ends, O_CLOEXEC | O_NONBLOCK)) {
		for (; checks; checks = checks->next)
			report(ends, checks);
		close(ends[0]);
		close(ends[1]);
	}
	errno = saved;
}
