/* Whether whole steps of the program are faster with what auto replaces.
 *
 * What is measured of a product is its time on the device. A program that waits for the CPU, for
 * its data or for other processes does not gain that, and pays for what our launches take of the
 * CPU. So once its steps are known (live.c) and nothing new is being measured, some are made with
 * the products that auto chose and some without, in turns. An event in the program's stream marks
 * where each begins: they tell the same time whether the program runs ahead of the device or behind
 * it, and nothing waits for them. If steps are not faster, the calls that were held back in those
 * without pass for the rest of the run. The tuned file keeps what was found, by the command line
 * and the products that auto replaces in a step; a later run decides by that.
 *
 * The turns go by the sequence of Thue and Morse, so that what comes every second, fourth or eighth
 * step (an optimiser, after so many micro-batches) is equally often on both sides. The first step
 * of a turn is left out. All ranks of a program take the same turns, as far as they make the same
 * products; so the time in which no step is measured, until the events have come about, is counted
 * in steps.
 */
#include "plan/worth.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "device/device.h"
#include "engine/known.h"
#include "plan/plan.h"

#define QUIET    2              /* steps without anything new before the first turn       */
#define TURN     4              /* steps                                                  */
#define TURNS    8              /* of a round, after which there may be a verdict         */
#define ORDER    0x96u          /* bit per turn, from the lowest: made without            */
#define STEPS    (TURN * TURNS) /* of a round                                             */
#define COUNT    ((TURN - 1) * TURNS / 2) /* of them that count, of each kind */
#define ROUNDS   (QS_WORTH_STEPS / COUNT)
#define PAUSE    4             /* steps between two looks at the events of a round       */
#define TRIES    8             /* in a process: whenever there is something new          */
#define HELD     QS_PERIOD_MAX /* calls of a step without: it is none, the program has gone on */
#define SURE     3             /* standard errors                                        */
#define KINDS    1024          /* of products that are remembered                        */
#define STEADIER 0.5           /* of the variance: times by flops are the ones to compare */

/* ---- the verdict --------------------------------------------------------------------------------
 */

static int compare(const void *a, const void *b)
{
	const float x = *(const float *)a, y = *(const float *)b;
	return (x > y) - (x < y);
}

/* The median, and the square of its standard error: of a normal distribution 1.253 s / sqrt(n),
 * where s is 0.741 times the distance of the quartiles. Sorts the values. */
static double median(float *values, int n, double *variance)
{
	qsort(values, (size_t)n, sizeof *values, compare);
	const double range = values[3 * n / 4] - values[n / 4];
	*variance = 0.862 * range * range / n;
	return 0.5 * (values[(n - 1) / 2] + values[n / 2]);
}

/* Of all steps; 0 if nothing was multiplied in some. */
static double mean_flops(const struct qs_step_times *const times[2])
{
	double sum = 0;
	for (int side = 0; side < 2; side++)
		for (int i = 0; i < times[side]->count; i++) {
			if (!(times[side]->flops[i] > 0))
				return 0;
			sum += times[side]->flops[i];
		}
	return sum / (times[0]->count + times[1]->count);
}

/* `flops`: of a step; times are scaled to as many, or, 0, are what they are. Returns the square of
 * the standard error of their difference. */
static double look_at(const struct qs_step_times *const times[2], double flops, double medians[2])
{
	double variance[2];
	for (int side = 0; side < 2; side++) {
		float ms[QS_WORTH_STEPS];
		for (int i = 0; i < times[side]->count; i++)
			ms[i] = times[side]->ms[i] *
			        (flops > 0 ? (float)(flops / times[side]->flops[i]) : 1);
		medians[side] = median(ms, times[side]->count, &variance[side]);
	}
	return variance[0] + variance[1];
}

/* A gain that is neither sure nor worth a setting of its own is none. Where steps are long because
 * much is multiplied in them, batches of any length, times by what is multiplied differ less. */
enum qs_worth qs_worth_verdict(const struct qs_step_times *with,
                               const struct qs_step_times *without, double min_gain, bool last,
                               struct qs_step_medians *medians)
{
	const struct qs_step_times *const times[2] = {with, without};
	const double flops = mean_flops(times);
	double plain[2], scaled[2];
	double variance = look_at(times, 0, plain);
	const double by_flops = flops > 0 ? look_at(times, flops, scaled) : variance;
	const double *found = plain;
	if (by_flops < STEADIER * variance) {
		variance = by_flops;
		found = scaled;
	}
	*medians = (struct qs_step_medians){found[0], found[1]};
	const double gain = found[1] - found[0];
	if (gain * gain > SURE * SURE * variance)
		return gain > 0 ? QS_WORTH_KEEP : QS_WORTH_LOST;
	if (!last)
		return QS_WORTH_OPEN;
	return gain > 0 && gain >= min_gain * found[1] ? QS_WORTH_KEEP : QS_WORTH_LOST;
}

/* ---- turns --------------------------------------------------------------------------------------
 */

enum state {
	RESTING,
	SETTLING, /* `at` steps went by without anything new */
	MARKING,  /* the step at hand shows what auto replaces in each */
	TURNING,  /* `at` events of this round are recorded  */
	PAUSING,  /* all are, and `at` steps went by         */
};

_Atomic int qs_worth_turn;

static _Atomic bool wanted;
static _Atomic bool changed;   /* what is replaced, since the last try began */
static _Atomic int number;     /* of the try, from 1                                        */
static _Atomic int64_t held;   /* calls that were held back, or marked, in the step at hand */
static _Atomic uint64_t marks; /* what stands for those that were marked, in any order */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static enum state state;
static int at, rounds;
static bool in_vain; /* nothing was replaced in the step that was to show it */
static uint64_t context;
static struct qs_stream stream;
static CUevent event[STEPS + 1];
static double begun[STEPS + 1];       /* flops before the step that begins with the event */
static struct qs_step_times times[2]; /* [1]: without */
static struct qs_steps steps;         /* of this try              */
static struct qs_context *here;       /* of `context`             */
static char text[128];                /* what the last verdict was made of */

/* ---- kinds --------------------------------------------------------------------------------------
 */

static struct kind {
	_Atomic uint64_t hash; /* 0 = free */
	_Atomic bool lost;     /* steps are not faster with it */
} kinds[KINDS];

/* In any process, and whatever the layers and their weights are called. */
static uint64_t kind_of(const struct qs_key *key, enum qs_action action)
{
	char name[QS_TUNED_KEY];
	int64_t tokens = 1;
	while (tokens < qs_linear_of(key).tokens && tokens < INT64_MAX / 4)
		tokens *= 4;
	struct qs_key kind = qs_key_of_tokens(key, tokens);
	kind.layer = kind.weight = 0;
	const size_t length = qs_key_text(&kind, name, sizeof name);
	return XXH3_64bits_withSeed(name, length, action) | 1;
}

/* NULL if there is no room. */
static struct kind *kind_at(uint64_t hash, bool *is_new)
{
	*is_new = false;
	for (uint64_t i = 0; i < KINDS; i++) {
		struct kind *kind = &kinds[(hash / 2 + i) % KINDS];
		uint64_t there = 0;
		if (atomic_compare_exchange_strong(&kind->hash, &there, hash))
			*is_new = true;
		else if (there != hash)
			continue;
		return kind;
	}
	return NULL;
}

static bool is_lost(uint64_t hash)
{
	bool is_new;
	const struct kind *kind = kind_at(hash, &is_new);
	return kind && atomic_load(&kind->lost);
}

bool qs_worth_want(struct qs_instance *instance, const struct qs_key *key)
{
	bool is_new;
	instance->kind = kind_of(key, instance->engine->action);
	const struct kind *kind = kind_at(instance->kind, &is_new);
	if (!kind || is_new) {
		atomic_store(&wanted, true);
		qs_live_want_steps();
	}
	return kind && atomic_load(&kind->lost);
}

void qs_worth_begin_anew(void)
{
	atomic_store(&changed, true);
}

bool qs_worth_hold(struct qs_instance *instance)
{
	const int turn = atomic_load(&qs_worth_turn);
	atomic_store_explicit(&instance->held, atomic_load(&number), memory_order_relaxed);
	if (turn == QS_TURN_MARK)
		atomic_fetch_add(&marks, instance->kind);
	if (atomic_fetch_add_explicit(&held, 1, memory_order_relaxed) >= HELD)
		atomic_store(&qs_worth_turn, QS_TURN_WITH);
	return turn == QS_TURN_WITHOUT;
}

static bool is_without(int step)
{
	return ORDER >> step / TURN & 1;
}

/* Another thread may be capturing in global mode. */
static CUstreamCaptureMode exchange(CUstreamCaptureMode mode)
{
	qs_driver_get()->cuThreadExchangeStreamCaptureMode(&mode);
	return mode;
}

static void drop_events(void)
{
	const struct qs_driver *cu = qs_driver_get();
	uint64_t now;
	/* Another context than the current one may be gone, and its events went with it. */
	const bool current = qs_context_id(&now) && now == context;
	for (int i = 0; i <= STEPS && current; i++)
		if (event[i])
			cu->cuEventDestroy_v2(event[i]);
	memset(event, 0, sizeof event);
}

static void end_try(void)
{
	atomic_store(&qs_worth_turn, QS_TURN_WITH);
	drop_events();
	state = RESTING;
}

static void try_again(void)
{
	end_try();
	atomic_store(&wanted, true);
}

static bool make_events(void)
{
	bool made = true;
	for (int i = 0; i <= STEPS && made; i++)
		made = !qs_driver_get()->cuEventCreate(&event[i], CU_EVENT_DEFAULT);
	return made;
}

/* False if the step is not one of the try: of another stream, in another context, captured, or
 * after so much that it cannot have been a step. */
static bool is_here(const struct qs_gemm *g)
{
	uint64_t now;
	struct qs_stream described;
	return g->stream == stream.handle && qs_context_id(&now) && now == context &&
	       qs_stream_describe(g->stream, &described) && described.id == stream.id &&
	       !described.capturing;
}

static void begin_try(void)
{
	state = RESTING;
	if (atomic_load(&number) >= TRIES)
		return;
	atomic_store(&changed, false);
	atomic_fetch_add(&number, 1);
	atomic_store(&held, 0);
	atomic_store(&marks, 0);
	atomic_store(&qs_worth_turn, QS_TURN_MARK);
	state = MARKING;
}

static void begin_turns(void)
{
	atomic_store(&qs_worth_turn, QS_TURN_WITH);
	if (!make_events()) {
		end_try();
		return;
	}
	rounds = at = 0;
	times[0].count = times[1].count = 0;
	state = TURNING;
}

static void record(void)
{
	const bool spoiled =
	        at > 0 && is_without(at - 1) && atomic_load(&qs_worth_turn) == QS_TURN_WITH;
	if (spoiled || qs_driver_get()->cuEventRecord(event[at], stream.handle)) {
		try_again();
		return;
	}
	begun[at] = qs_live_flops();
	atomic_store(&held, 0);
	atomic_store(&qs_worth_turn, at < STEPS && is_without(at) ? QS_TURN_WITHOUT : QS_TURN_WITH);
	if (at++ == STEPS) {
		state = PAUSING;
		at = 0;
	}
}

static bool read_times(void)
{
	for (int i = 0; i < STEPS; i++) {
		struct qs_step_times *to = &times[is_without(i)];
		if (i % TURN == 0)
			continue;
		to->flops[to->count] = (float)(begun[i + 1] - begun[i]);
		if (qs_driver_get()->cuEventElapsedTime(&to->ms[to->count++], event[i],
		                                        event[i + 1]))
			return false;
	}
	return true;
}

static void lose_kinds(struct qs_plan *plan, bool in_use)
{
	bool is_new;
	struct kind *kind;
	(void)in_use;
	struct qs_instance *instance = atomic_load(&plan->first);
	for (; instance; instance = instance->next)
		if (atomic_load(&instance->held) == atomic_load(&number) &&
		    (kind = kind_at(instance->kind, &is_new)))
			atomic_store(&kind->lost, true);
}

/* Said here, as the product may not come again. One that is demoted passes anyway. */
static void give_up(struct qs_plan *plan, bool in_use)
{
	bool lost = false;
	struct qs_instance *instance = atomic_load(&plan->first);
	for (; instance; instance = instance->next) {
		const bool tried = atomic_load(&instance->held) == atomic_load(&number);
		if (instance->may_be_held && (tried || is_lost(instance->kind)) &&
		    !qs_plan_demoted(plan, instance))
			lost |= !atomic_exchange(&instance->given_up, true);
	}
	if (lost && in_use)
		qs_plan_given_up(plan, text);
}

/* `found` names the steps: by measurement, or in an earlier run. */
static void conclude(const struct qs_steps *found, const char *how)
{
	if (found->with_ms > 0 && found->without_ms > 0)
		snprintf(text, sizeof text,
		         "a step takes %.3f ms with what was replaced, %.3f without",
		         found->with_ms, found->without_ms);
	else
		snprintf(text, sizeof text, "pinned in the tuned file");
	qs_message(QS_LOG_INFO, "%s%s: %s", text, how,
	           found->kept ? "kept" : "not replaced any more");
	if (!found->kept) {
		qs_plans_each(lose_kinds);
		qs_plans_each(give_up);
	}
	end_try();
}

/* After the marking step. */
static void look_up(const struct qs_gemm *g)
{
	enum qs_reason why;
	const int64_t calls = atomic_load(&held);
	here = qs_context_current(qs_process()->options, false, &why);
	if (!calls || !here) { /* nothing is replaced in these steps */
		end_try();
		in_vain = true;
		return;
	}
	const uint64_t name = atomic_load(&marks) ^ qs_tuned_program();
	snprintf(steps.name, sizeof steps.name, QS_TUNED_STEP "%lld products, %016llx",
	         (long long)calls, (unsigned long long)name);
	if (qs_known_steps(&steps, g->library, here))
		conclude(&steps, " (known)");
	else
		begin_turns();
}

static void judge(const struct qs_gemm *g)
{
	struct qs_step_medians medians;
	const enum qs_worth worth = qs_worth_verdict(
	        &times[0], &times[1], qs_process()->options->min_gain, rounds == ROUNDS, &medians);
	if (worth == QS_WORTH_OPEN)
		return;
	char how[32];
	steps.with_ms = medians.with;
	steps.without_ms = medians.without;
	steps.kept = worth == QS_WORTH_KEEP;
	snprintf(how, sizeof how, " (medians of %d each)", times[0].count);
	qs_known_add_steps(&steps, g->library, here);
	conclude(&steps, how);
}

/* Every few steps: the events of a round, once all have come about. */
static void look(const struct qs_gemm *g)
{
	if (++at % PAUSE)
		return;
	const CUresult error = qs_driver_get()->cuEventQuery(event[STEPS]);
	if (error == CUDA_ERROR_NOT_READY)
		return;
	if (error || !read_times()) {
		try_again();
		return;
	}
	rounds++;
	at = 0;
	state = TURNING;
	judge(g);
}

static void settle(const struct qs_gemm *g)
{
	if (atomic_exchange(&wanted, false)) {
		state = SETTLING;
		at = 0;
	} else if (state == SETTLING && ++at > QUIET) {
		at = 0;
		if (qs_context_id(&context) && qs_stream_describe(g->stream, &stream) &&
		    !stream.capturing)
			begin_try();
	}
}

static void step(const struct qs_gemm *g)
{
	const CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	if (state >= MARKING && (atomic_load(&changed) || !is_here(g)))
		try_again();
	if (state == MARKING)
		look_up(g);
	else if (state == PAUSING)
		look(g);
	if (state == TURNING)
		record();
	else if (state <= SETTLING)
		settle(g);
	exchange(mode);
}

/* What an edit brings back was prepared before, and is nothing new. */
static void hope_again(void)
{
	in_vain = false;
	atomic_store(&wanted, true);
}

void qs_worth_step(const struct qs_gemm *g)
{
	if (pthread_mutex_trylock(&lock)) /* steps of several threads are none to compare */
		return;
	if (in_vain && atomic_load(&changed))
		hope_again();
	if (state != RESTING || atomic_load(&wanted))
		step(g);
	pthread_mutex_unlock(&lock);
}

void qs_worth_forked(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	state = RESTING;
	in_vain = false;
	memset(event, 0, sizeof event);
	atomic_store(&wanted, false);
	atomic_store(&number, 0);
	memset(kinds, 0, sizeof kinds);
	atomic_store(&qs_worth_turn, QS_TURN_WITH);
}
