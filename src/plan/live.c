/* The policy while the program runs: its file is looked at again, and rules that ask for the
 * training step are heard again when it comes.
 *
 * A call pays a decrement. A thread reads the clock (no system call) ten times a second, or at
 * every STRIDE_MAX-th call if it makes more; whoever finds a second gone looks at the file. What
 * that leaves behind (old policies, and a plan for each decision a key ever had) is never freed, as
 * other threads may be reading it: CHANGES_MAX bounds it (a policy of ten rules takes about 15
 * KiB). The thread that looks waits for the file system, as it did at the start.
 *
 * Steps are counted only where a rule, the summary or a comparison of whole steps (worth.c) wants
 * them: a lock and some 35 ns a call.
 * Rules that count weights from the end do: how many there are is known once whole steps have gone
 * by.
 */
#include "plan/plan.h"

#include <time.h>

#define LOOK_MS     1000 /* between two looks at the file                      */
#define STRIDE_MS   100  /* between two looks of a busy thread at the clock    */
#define STRIDE_MAX  1024 /* calls between two looks of a thread at the clock   */
#define CHANGES_MAX 1000 /* of the policy in a process                         */

/* ---- the file -----------------------------------------------------------------------------------
 */

static _Atomic int64_t due = INT64_MAX; /* when to look at the file, ms; INT64_MAX = never */
static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;
static int changes; /* so far, under `looking` */

static __thread uint32_t left;   /* calls until this thread looks at the clock */
static __thread uint32_t stride; /* calls between two of these                 */
static __thread uint32_t seen;   /* the clock then, ms                         */

static void steps_follow(struct qs_policy *policy);
static pthread_mutex_t stepping = PTHREAD_MUTEX_INITIALIZER; /* the sequence of products */

static int64_t clock_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* A step must not come between the deciding and the steps it holds for. */
static void use(struct qs_policy *policy)
{
	pthread_mutex_lock(&stepping);
	int changed = qs_plans_decide_again(policy);
	steps_follow(policy);
	pthread_mutex_unlock(&stepping);
	qs_note_policy(qs_policy_name(policy), changed);
	if (++changes < CHANGES_MAX)
		return;
	atomic_store(&due, INT64_MAX);
	qs_message(QS_LOG_WARN, "%s: changed %d times; no further change takes effect",
	           qs_policy_name(policy), CHANGES_MAX);
}

static void look(void)
{
	if (pthread_mutex_trylock(&looking)) /* a slow file system: the next look is soon enough */
		return;
	struct qs_policy *policy = qs_policy_look(atomic_load(&qs_process()->policy));
	if (policy)
		use(policy);
	pthread_mutex_unlock(&looking);
}

/* Doubles or halves the stride, whichever comes nearer to STRIDE_MS. */
static void look_at_clock(void)
{
	int64_t now = clock_ms(), when = atomic_load_explicit(&due, memory_order_relaxed);
	uint32_t passed = (uint32_t)now - seen;
	seen = (uint32_t)now;
	stride = passed > STRIDE_MS ? stride / 2 : 2 * stride + 1;
	stride = stride < STRIDE_MAX ? stride : STRIDE_MAX - 1;
	left = stride;
	if (now >= when && atomic_compare_exchange_strong(&due, &when, now + LOOK_MS))
		look();
}

/* ---- steps --------------------------------------------------------------------------------------
 */

static struct qs_period period = {.step = -1};
static _Atomic bool wanted;         /* by a rule, the summary or worth.c                 */
static _Atomic int64_t step = -1;   /* period.step                                       */
static _Atomic int32_t weights;     /* of the program, 0 = unknown                       */
static int64_t step_next;           /* at which a rule may answer otherwise              */
static int64_t weights_due;         /* step at which all weights have been met           */
static int64_t first_step;          /* timed: the first that was seen to begin           */
static int64_t mark_step;           /* at which the share of products is taken again     */
static struct timespec first, last; /* when the first and the last one began             */
static double flops;                /* of all products that were counted                 */
static _Atomic double flops_begun;  /* of those before the step at hand                  */

/* Under `stepping`. */
static void steps_follow(struct qs_policy *policy)
{
	const bool uses = qs_policy_uses_steps(policy);
	step_next = uses ? qs_policy_next_step(policy, period.step) : INT64_MAX;
	weights_due = period.step + 2;
	qs_weights_follow(policy, atomic_load(&weights));
	if (uses || qs_policy_counts_weights(policy))
		atomic_store(&wanted, true);
}

/* True if the number of weights has just become known. A whole step has gone by since rules asked.
 */
static bool count_weights(const struct qs_policy *policy)
{
	const int32_t met = qs_weights_met();
	if (atomic_load(&weights) || !met || period.step < weights_due ||
	    !qs_policy_counts_weights(policy))
		return false;
	if (qs_ordinals_full()) {
		qs_message(QS_LOG_WARN,
		           "more than %d matrices are read as weights: rules that count weights "
		           "from the end match nothing",
		           QS_ORDINALS_MAX);
		weights_due = INT64_MAX;
		return false;
	}
	atomic_store(&weights, met);
	qs_weights_follow(policy, met);
	return true;
}

/* Of all timed steps. */
static double seconds_timed(void)
{
	return (double)(last.tv_sec - first.tv_sec) + 1e-9 * (double)(last.tv_nsec - first.tv_nsec);
}

static void time_steps(bool known)
{
	clock_gettime(CLOCK_MONOTONIC, &last);
	if (!known) {
		first = last;
		first_step = mark_step = period.step;
		qs_share_start();
	} else if (period.step >= mark_step) {
		qs_share_mark(seconds_timed());
	} else {
		return;
	}
	mark_step = period.step + 1 + (period.step - first_step) / 4;
}

/* That steps or the number of weights have become known may change any answer. */
static void step_begins(void)
{
	const bool known = atomic_exchange(&step, period.step) >= 0;
	time_steps(known);
	struct qs_policy *policy = atomic_load(&qs_process()->policy);
	const bool now = (!known || period.step >= step_next) && qs_policy_uses_steps(policy);
	if (!count_weights(policy) && !now)
		return;
	qs_plans_decide_again(NULL);
	step_next = qs_policy_next_step(policy, period.step);
}

/* Steps are the same ones whatever the number of tokens is. */
static bool count(const struct qs_key *key)
{
	const struct qs_key layer = qs_key_of_tokens(key, 0);
	const uint32_t symbol = (uint32_t)qs_key_hash(&layer);
	pthread_mutex_lock(&stepping);
	const bool begins = qs_period_add(&period, symbol);
	if (begins) {
		atomic_store(&flops_begun, flops);
		step_begins();
	}
	flops += qs_gemm_flops(key);
	pthread_mutex_unlock(&stepping);
	if (begins)
		qs_share_look();
	return begins;
}

/* ---- both ---------------------------------------------------------------------------------------
 */

void qs_live_start(void)
{
	struct qs_policy *policy = atomic_load(&qs_process()->policy);
	if (qs_process()->options->summary == QS_SUMMARY_ALWAYS)
		atomic_store(&wanted, true);
	steps_follow(policy);
	if (qs_policy_is_watched(policy))
		atomic_store(&due, clock_ms() + LOOK_MS);
}

bool qs_live_call(const struct qs_key *key)
{
	if (left)
		left--;
	else
		look_at_clock();
	return atomic_load_explicit(&wanted, memory_order_relaxed) && count(key);
}

void qs_live_want_steps(void)
{
	atomic_store(&wanted, true);
}

int64_t qs_live_step(void)
{
	return atomic_load_explicit(&step, memory_order_relaxed);
}

double qs_live_flops(void)
{
	return atomic_load_explicit(&flops_begun, memory_order_relaxed);
}

int32_t qs_live_weights(void)
{
	return atomic_load_explicit(&weights, memory_order_relaxed);
}

/* A product may be under way in another thread, or below a signal handler that calls exit(). */
void qs_live_report(void)
{
	if (pthread_mutex_trylock(&stepping))
		return;
	const int64_t timed = period.step - first_step;
	if (period.step >= 0 && timed > 0) {
		qs_note_steps(period.step, (int64_t)period.accepted,
		              seconds_timed() / (double)timed);
		qs_share_report();
	}
	pthread_mutex_unlock(&stepping);
}

/* The child starts again, with the policy as it is then. */
void qs_live_forked(void)
{
	looking = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	stepping = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	changes = 0;
	atomic_store(&due, INT64_MAX);
	atomic_store(&step, -1);
	atomic_store(&weights, 0);
	if (atomic_exchange(&wanted, false)) /* else it was never written */
		qs_period_reset(&period);
}
