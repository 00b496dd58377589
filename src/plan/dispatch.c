/* The way of one call: start, key, plan, and if the plan has an engine, its instance in the current
 * context, run on the caller's stream. Whatever fails on the way, the answer is "pass", and the
 * program's own call follows.
 */
#include "plan/plan.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/tune.h"
#include "intercept/intercept.h"
#include "operand/track.h"
#include "plan/label.h"

/* Runs that may fail before a key is left alone. */
#define FAILURES_MAX 3

/* cuBLASLt versions with fp8 products that this build knows: 12.0 up to all of 13. */
#define CUBLASLT_FIRST 120000
#define CUBLASLT_END   140000

static void note(const struct qs_plan *plan, const struct qs_gemm *g, enum qs_action action,
                 bool rows, enum qs_reason reason, const char *detail)
{
	qs_note_decision(&(struct qs_decision){
	        .key = &plan->key,
	        .layer = qs_label_name(plan->key.layer),
	        .weight = plan->key.weight - 1,
	        .rule = plan->rule,
	        .action = action,
	        .rows = rows,
	        .reason = reason,
	        .detail = detail && *detail ? detail : NULL,
	        .library = g->library->path,
	        .counter = plan->counter,
	});
}

/* A call that passes although its key has an engine: counted, and logged once per reason. In shadow
 * mode all of them pass, as was planned. */
static bool pass_late(struct qs_plan *plan, const struct qs_gemm *g, enum qs_reason reason,
                      const char *detail)
{
	uint64_t bit = (uint64_t)1 << reason;
	if (!plan->shadow)
		atomic_fetch_add_explicit(&plan->counter->late, 1, memory_order_relaxed);
	if (!(atomic_fetch_or(&plan->told, bit) & bit))
		note(plan, g, QS_ACTION_NATIVE, false, reason, detail);
	return false;
}

static enum qs_reason check_library(const struct qs_library *library)
{
	if (!library->complete || library->version < CUBLASLT_FIRST)
		return QS_REASON_CUBLASLT_OLD;
	if (library->version >= CUBLASLT_END && !qs_process()->options->cublaslt_any)
		return QS_REASON_CUBLASLT_NEW;
	return QS_REASON_AUTO;
}

static struct qs_instance *find_instance(const struct qs_plan *plan,
                                         const struct qs_context *context)
{
	struct qs_instance *instance = atomic_load_explicit(&plan->first, memory_order_acquire);
	while (instance && instance->context != context)
		instance = instance->next;
	return instance;
}

/* Asks the engine, unless the device or the library rules it out, and logs the outcome. */
static void prepare(struct qs_instance *instance, const struct qs_plan *plan,
                    const struct qs_gemm *g, const struct qs_stream *stream)
{
	struct qs_failure failure = {.reason = instance->context->reason};
	if (instance->context->detail)
		qs_failed(&failure, failure.reason, "%s", instance->context->detail);
	if (failure.reason == QS_REASON_AUTO)
		failure.reason = check_library(g->library);
	if (failure.reason == QS_REASON_AUTO && plan->shadow)
		instance->state = qs_shadow_make(plan, g, instance->context, stream, &failure);
	else if (failure.reason == QS_REASON_AUTO)
		qs_best_make(instance, plan, g, stream, &failure);
	instance->reason = instance->state ? plan->reason : failure.reason;
	enum qs_reason reason = instance->reason;
	if (instance->may_be_held && qs_worth_want(instance, &plan->key)) {
		atomic_store(&instance->given_up, true);
		qs_failed(&failure, reason = QS_REASON_STEPS, "found with other tokens");
	}
	enum qs_action action = qs_instance_action(plan, instance);
	qs_plan_outcome(plan, action, reason);
	note(plan, g, action, instance->rows, reason, failure.detail);
}

static pthread_mutex_t prepare_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic bool held_up; /* see qs_lock_in_time() */

static struct qs_instance *make_instance(struct qs_plan *plan, const struct qs_gemm *g,
                                         struct qs_context *context, const struct qs_stream *stream)
{
	/* Another thread may be timing behind work that waits for this very product, or may never
	 * come back: the program's calls are made under the lock. */
	if (!qs_lock_in_time(&prepare_lock, &held_up))
		return NULL;
	struct qs_instance *instance = find_instance(plan, context);
	if (!instance && (instance = calloc(1, sizeof *instance))) {
		instance->context = context;
		instance->engine = plan->engine;
		prepare(instance, plan, g, stream);
		instance->next = atomic_load(&plan->first);
		atomic_store_explicit(&plan->first, instance, memory_order_release);
	}
	pthread_mutex_unlock(&prepare_lock);
	return instance;
}

static bool begin_check(struct qs_check *check, const struct qs_plan *plan,
                        const struct qs_instance *instance, const struct qs_gemm *g,
                        const struct qs_stream *stream)
{
	struct qs_failure failure;
	const bool begun = qs_check_begin(check, plan->accuracy, plan->choice.min_sqnr, g,
	                                  instance->context, stream, &failure);
	if (failure.reason == QS_REASON_MEMORY)
		note(plan, g, instance->engine->action, instance->rows, failure.reason,
		     failure.detail);
	return begun;
}

static bool run(struct qs_plan *plan, struct qs_instance *instance, const struct qs_gemm *g,
                const struct qs_stream *stream)
{
	struct qs_failure failure = {.reason = QS_REASON_ERROR};
	struct qs_check check;
	uint64_t bytes = 0;
	const bool checked = instance->engine->action != QS_ACTION_BF16 &&
	                     begin_check(&check, plan, instance, g, stream);
	qs_share_begin();
	const bool done = instance->engine->run(instance->state, g, instance->context, stream,
	                                        &bytes, &failure);
	if (done)
		qs_share_end(true);
	if (checked)
		qs_check_end(&check, g, stream, done);
	if (done) {
		atomic_fetch_add_explicit(&plan->counter->replaced, 1, memory_order_relaxed);
		atomic_fetch_add_explicit(&plan->counter->bytes, bytes, memory_order_relaxed);
		if (qs_watch_any()) /* D may be somebody's weight */
			qs_track_write(g->d,
			               (size_t)((const char *)qs_gemm_end(g) - (const char *)g->d));
		qs_note_notice(instance->engine->action);
		if (instance->engine->action == QS_ACTION_FP8 && !instance->rows)
			qs_before_end(g, false);
		return true;
	}
	if (failure.reason == QS_REASON_ERROR) {
		atomic_fetch_add(&instance->failures, 1);
		qs_message_once(QS_REASON_ERROR, "%s; the program's own call is made",
		                failure.detail);
	}
	return pass_late(plan, g, failure.reason, failure.detail);
}

/* Nothing the program sees is written: whatever comes of it, its own call follows. */
static bool measure(struct qs_plan *plan, struct qs_instance *instance, const struct qs_gemm *g,
                    const struct qs_stream *stream)
{
	struct qs_failure failure;
	if (qs_shadow_measure(instance->state, g, instance->context, stream, &failure))
		return false;
	if (failure.reason == QS_REASON_ERROR)
		atomic_fetch_add(&instance->failures, 1);
	return pass_late(plan, g, failure.reason, failure.detail);
}

/* The context of this call, set up if new and the stream is not capturing. */
static struct qs_context *find_context(const struct qs_stream *stream, enum qs_reason *why)
{
	return qs_context_current(qs_process()->options, !stream->capturing, why);
}

/* What forbids it for the pointers of this call; QS_REASON_AUTO = nothing. */
static enum qs_reason check_pointers(const struct qs_gemm *g, const struct qs_context *context)
{
	if (!qs_context_owns(context, g->d))
		return QS_REASON_CONTEXT;
	return qs_overlap(g) ? QS_REASON_ALIAS : QS_REASON_AUTO;
}

/* The pointers and the stream of this call, once the key is known to be served in this context. */
static bool replace_here(struct qs_plan *plan, struct qs_instance *instance,
                         const struct qs_gemm *g, const struct qs_stream *stream)
{
	if (atomic_load_explicit(&instance->failures, memory_order_relaxed) >= FAILURES_MAX)
		return pass_late(plan, g, QS_REASON_ERROR, "given up after repeated failures");
	const enum qs_reason why = check_pointers(g, instance->context);
	if (why != QS_REASON_AUTO)
		return pass_late(plan, g, why, NULL);
	return plan->shadow ? measure(plan, instance, g, stream) : run(plan, instance, g, stream);
}

/* A key that is demoted passes as if it had been decided so: told once for each of its plans. */
static bool pass_demoted(struct qs_plan *plan, const struct qs_gemm *g)
{
	const uint64_t bit = (uint64_t)1 << QS_REASON_SQNR;
	if (atomic_fetch_or(&plan->told, bit) & bit)
		return false;
	qs_share_again(plan);
	qs_plan_outcome(plan, QS_ACTION_NATIVE, QS_REASON_SQNR);
	note(plan, g, QS_ACTION_NATIVE, false, QS_REASON_SQNR, "measured in use");
	return false;
}

/* In a step that is made without what auto replaces. A capture lasts longer than that. */
static bool is_held(struct qs_instance *instance, const struct qs_stream *stream)
{
	return atomic_load_explicit(&qs_worth_turn, memory_order_relaxed) != QS_TURN_WITH &&
	       instance->may_be_held && !stream->capturing && qs_worth_hold(instance);
}

/* A forked child has lost its parent's context, and not every function of the driver notices at
 * once: whichever failed, the fork is the reason. */
static bool pass_without_context(struct qs_plan *plan, const struct qs_gemm *g, enum qs_reason why)
{
	bool lost = qs_process_forked() && why != QS_REASON_MEMORY;
	return pass_late(plan, g, lost ? QS_REASON_FORK : why, NULL);
}

/* Where the policy leaves the choice to us, and measuring is what makes it, a product passes until
 * it, or another of its bucket, was used often enough to be worth it. */
static bool waits(struct qs_plan *plan, const struct qs_gemm *g, const struct qs_context *context)
{
	if (plan->shadow || plan->choice.action != QS_ACTION_AUTO ||
	    context->reason != QS_REASON_AUTO || check_library(g->library) != QS_REASON_AUTO ||
	    !qs_may_tune(g) || qs_best_is_known(plan, g, context))
		return false;
	qs_plan_waits(plan); /* before the use counts, so that no decision is overwritten */
	qs_before_count(&plan->shared, g);
	if (qs_uses_add(&plan->key) >= QS_USES_TO_MEASURE)
		return false;
	qs_before_end(g, true);
	return true;
}

/* The product has an engine. A key that is known to pass in this context passes before anything
 * else is asked of the driver. */
static bool replace(struct qs_plan *plan, const struct qs_gemm *g)
{
	enum qs_reason why;
	struct qs_stream stream;
	struct qs_context *context = qs_context_current(qs_process()->options, false, &why);
	struct qs_instance *instance = context ? find_instance(plan, context) : NULL;
	if (instance &&
	    (!instance->state || (plan->shadow && !qs_shadow_is_due(instance->state, context)) ||
	     atomic_load(&instance->given_up)))
		return false;
	qs_accuracy_look(plan->accuracy, context);
	if (qs_plan_demoted(plan, instance))
		return pass_demoted(plan, g);
	if (!context && why == QS_REASON_CONTEXT)
		return pass_without_context(plan, g, why);
	if (!qs_stream_describe(g->stream, &stream))
		return context ? pass_late(plan, g, QS_REASON_CAPTURE_COLD,
		                           "the stream takes no work now")
		               : pass_without_context(plan, g, QS_REASON_CAPTURE_COLD);
	if (!context)
		context = find_context(&stream, &why);
	if (!context)
		return pass_without_context(plan, g, why);
	if (instance && is_held(instance, &stream))
		return false;
	if (!instance && stream.capturing)
		return pass_late(plan, g, QS_REASON_CAPTURE_COLD, NULL);
	if (!instance && (why = check_pointers(g, context)) != QS_REASON_AUTO)
		return pass_late(plan, g, why, NULL); /* what is measured may write D */
	if (!instance && waits(plan, g, context))
		return false;
	if (!instance)
		instance = make_instance(plan, g, context, &stream);
	if (!instance)
		return pass_late(plan, g, QS_REASON_UNTUNED, "another thread is measuring");
	return instance->state && !atomic_load(&instance->given_up) &&
	       replace_here(plan, instance, g, &stream);
}

/* Products beyond the plan table are counted together. */
static struct qs_counter *_Atomic other;

static bool pass_uncharted(const struct qs_gemm *g)
{
	struct qs_counter *counter = atomic_load(&other);
	if (!counter) {
		counter = qs_counter_new("other", &g->key, QS_ACTION_NATIVE, QS_REASON_CACHE_FULL,
		                         NULL, NULL);
		atomic_store(&other, counter);
		qs_message_once(QS_REASON_CACHE_FULL, "%s: %s",
		                qs_reason_text(QS_REASON_CACHE_FULL),
		                qs_reason_cure(QS_REASON_CACHE_FULL));
	}
	atomic_fetch_add_explicit(&counter->calls, 1, memory_order_relaxed);
	return false;
}

bool qs_dispatch(struct qs_gemm *g)
{
	if (!qs_start())
		return false;
	qs_gemm_key(g);
	qs_before_begin();
	bool autograd = qs_thread_is_autograd();
	g->key.role = (uint8_t)qs_role_by_evidence(g, autograd);
	if (qs_labels_used())
		g->key.layer = qs_layer_of(g, autograd);
	if (qs_live_call(&g->key))
		qs_worth_step(g);
	if (qs_weights_asked())
		g->key.weight = qs_weight_of_key(g);
	struct qs_plan *plan = qs_plan_get(&g->key, g->library->path);
	if (!plan)
		return pass_uncharted(g);
	const uint64_t call =
	        atomic_fetch_add_explicit(&plan->counter->calls, 1, memory_order_relaxed);
	if (call >= atomic_load_explicit(&plan->share.next, memory_order_relaxed))
		qs_share_take(plan, g, call);
	if (plan->engine && replace(plan, g))
		return true;
	qs_share_begin(); /* ends in export.c */
	return false;
}

void qs_dispatch_forked(void)
{
	pthread_mutex_init(&prepare_lock, NULL);
	atomic_store(&held_up, false);
	atomic_store(&other, NULL);
}
