/* Kept copies from use to use: finding one, making it good for a stream, and what is learnt from
 * the checks that are over.
 *
 * Checks of a copy are submitted one after the other: a stream other than that of the last one
 * first waits for its event, unless it is known to be over, which the host sees in mapped memory;
 * not so of samples, which say nothing as long as all is well. So a hit asks the driver nothing. A
 * graph cannot wait for what happened outside: it gets only copies whose last check is over, and
 * checks of its own that are right beside any other (kernels/hash.h).
 */
#include "operand/cache.h"

#include <string.h>

#include "intercept/intercept.h"
#include "intercept/launch.h"
#include "note/note.h"
#include "operand/kept.h"

#define DOUBTFUL_USES 2  /* after a suspicion, see cache.h                           */
#define USES_A_CHANGE 16 /* a copy must be used this often for each time it is made  */
#define SWEEP_TURNS   16 /* between attempts to free what is retired                 */
#define PAUSE         64 /* uses until a copy that found no memory is tried again    */
#define PAUSE_WATCH   1024

static _Atomic int holds; /* of graphs on copies, in the whole process */

/* ---- what is known of a copy ---------------------------------------------------------------- */

static bool is_blind(const struct qs_kept *kept)
{
	return atomic_load_explicit(&kept->cache->blind, memory_order_relaxed) ||
	       !qs_epoch_trusted();
}

/* The level in force: where writes escape, tracking is not enough. */
static enum qs_validity level_of(const struct qs_kept *kept)
{
	return kept->level == QS_VALIDITY_TRACKED && is_blind(kept) ? QS_VALIDITY_VERIFIED
	                                                            : kept->level;
}

static bool is_complete(const struct qs_kept *kept)
{
	return kept->submitted && qs_check_done(kept->outcome) == kept->submitted;
}

/* Samples, which have no number, may have made it anew; graphs that check it may at any time. */
static bool is_settled(const struct qs_kept *kept)
{
	return is_complete(kept) && !kept->sampled && !kept->in_graphs;
}

static void report_escape(struct qs_kept *kept)
{
	atomic_store(&kept->cache->blind, true);
	qs_message_once(QS_REASON_UNTRACKED,
	                "a weight was written by something that was not seen; from now on every "
	                "use of a kept weight is verified");
}

static void report_frozen(struct qs_kept *kept)
{
	if (!atomic_exchange(&kept->cache->reported, true))
		qs_message(QS_LOG_WARN, "[cache] validity = frozen, but a weight has changed: its "
		                        "copy is dropped; validity = tracked keeps up");
}

/* An audit is submitted when nothing speaks for a change. What it found is known if no check has
 * been submitted since. */
static void judge_audit(struct qs_kept *kept)
{
	if (!kept->audit || kept->seen < kept->audit)
		return;
	const bool changed = kept->seen == kept->submitted && kept->seen == kept->audit &&
	                     kept->outcome->differs;
	kept->audit = 0;
	if (changed && kept->watch && qs_watch_suspects(kept->watch) == kept->audit_suspects)
		report_escape(kept);
}

/* Tells the watch what came of the last check, if it waits for that. */
static void tell_watch(struct qs_kept *kept, bool changed)
{
	kept->changed_since = kept->changed_since || changed;
	if (!kept->due || kept->seen != kept->submitted)
		return;
	qs_watch_readers(kept->watch, !kept->changed_since);
	kept->due = kept->changed_since = false;
}

/* Whether the making found what admission had; asked once, when no later check is under way that
 * may write the hash meanwhile. */
static void judge_admission(struct qs_kept *kept)
{
	if (!kept->admitted || kept->seen != kept->submitted)
		return;
	kept->admitted = false;
	kept->misjudged = !kept->changes &&
	                  memcmp(kept->outcome->hash, kept->expected, sizeof kept->expected) != 0;
}

/* Samples are taken, and products compare, when nothing speaks for a change, or after a check.
 * Where one was found the copy was made anew, or products go to the source, but neither its hash
 * nor its descriptor is good: the next uses check it. */
static void judge_samples(struct qs_kept *kept)
{
	const uint32_t escapes = __atomic_load_n(&kept->outcome->escapes, __ATOMIC_RELAXED);
	if (escapes == kept->escapes)
		return;
	qs_counter_escaped(kept->form->kind, escapes - kept->escapes);
	kept->escapes = escapes;
	atomic_store(&kept->doubt, DOUBTFUL_USES);
	if (qs_watch_state(kept->watch) == QS_WATCH_CLEAN && !qs_watch_readers(kept->watch, false))
		report_escape(kept);
}

/* Those of graphs that check the copy themselves; the others are counted when they are launched. */
static void count_replays(struct qs_kept *kept)
{
	const uint32_t replays = __atomic_load_n(&kept->outcome->replays, __ATOMIC_RELAXED);
	if ((int32_t)(replays - kept->replays) <= 0)
		return;
	atomic_fetch_add_explicit(&kept->uses, replays - kept->replays, memory_order_relaxed);
	kept->replays = replays;
}

/* Reads what checks have found since the last time, waiting for none. */
static void poll(struct qs_kept *kept)
{
	const struct qs_hash_outcome *outcome = kept->outcome;
	const uint64_t done = qs_check_done(outcome);
	if (!kept->submitted || done < kept->first)
		return;
	count_replays(kept);
	judge_samples(kept);
	const uint32_t changes = __atomic_load_n(&outcome->changes, __ATOMIC_RELAXED);
	if (done == kept->seen && changes == kept->changes)
		return;
	const uint32_t found = changes - kept->changes;
	kept->seen = done;
	kept->changes = changes;
	kept->changed += found;
	kept->infinite = __atomic_load_n(&outcome->infinite, __ATOMIC_RELAXED);
	judge_admission(kept);
	judge_audit(kept);
	tell_watch(kept, found);
}

/* Why a copy is of no more use; QS_REASON_AUTO = it is. */
static enum qs_reason verdict(const struct qs_kept *kept)
{
	if (kept->broken)
		return QS_REASON_ERROR;
	if (kept->infinite && kept->form->finite)
		return QS_REASON_NONFINITE;
	if (kept->misjudged || (kept->changed && kept->level == QS_VALIDITY_FROZEN))
		return QS_REASON_CHANGING;
	if (kept->changed * USES_A_CHANGE > kept->uses + USES_A_CHANGE)
		return QS_REASON_CHANGING;
	if (kept->level == QS_VALIDITY_TRACKED && !qs_epoch_trusted())
		return QS_REASON_UNTRACKED;
	return QS_REASON_AUTO;
}

static bool is_gone(const struct qs_kept *kept)
{
	return kept->watch && qs_watch_state(kept->watch) == QS_WATCH_GONE;
}

/* Takes the copy out of the cache, and remembers for its source why. */
static void drop(struct qs_kept *kept, enum qs_reason why)
{
	qs_message(QS_LOG_CACHE, "a copy of %lld x %lld is dropped: %s",
	           (long long)kept->source.rows, (long long)kept->source.cols,
	           is_gone(kept) ? "its source is gone" : qs_reason_code(why));
	if (kept->changed && kept->level == QS_VALIDITY_FROZEN)
		report_frozen(kept);
	qs_cache_drop(kept);
	if (is_gone(kept))
		qs_admission_gone(kept->cache, &kept->source);
	else
		qs_admission_hopeless(kept->cache, &kept->source, why == QS_REASON_NONFINITE);
}

/* ---- finding -------------------------------------------------------------------------------- */

static bool is_of(const struct qs_kept *kept, const struct qs_matrix *source,
                  const struct qs_form *form)
{
	const struct qs_matrix *own = &kept->source;
	return own->data == source->data && own->rows == source->rows &&
	       own->cols == source->cols && own->ld == source->ld && kept->form == form;
}

/* The least recently touched is driven out first. */
static void touch(struct qs_kept *kept)
{
	atomic_store_explicit(&kept->turn,
	                      atomic_load_explicit(&kept->cache->turn, memory_order_relaxed),
	                      memory_order_relaxed);
}

/* Under the cache's lock. */
static struct qs_kept *find(struct qs_cache *cache, const struct qs_matrix *source,
                            const struct qs_form *form)
{
	struct qs_kept *kept = *qs_cache_bucket(cache, source, form);
	while (kept && !is_of(kept, source, form))
		kept = kept->next;
	if (kept) {
		atomic_fetch_add(&kept->users, 1);
		touch(kept);
	}
	return kept;
}

/* The copy in the cache, held; and now and then a look at what is to be freed. */
static struct qs_kept *look_up(struct qs_cache *cache, const struct qs_stream *stream,
                               const struct qs_matrix *source, const struct qs_form *form)
{
	pthread_mutex_lock(&cache->lock);
	const uint64_t turn = atomic_load_explicit(&cache->turn, memory_order_relaxed) + 1;
	atomic_store_explicit(&cache->turn, turn, memory_order_relaxed);
	struct qs_kept *kept = find(cache, source, form);
	bool sweep = cache->wanting && turn % SWEEP_TURNS == 0 && !stream->capturing;
	pthread_mutex_unlock(&cache->lock);
	if (sweep)
		qs_cache_sweep(cache, stream);
	return kept;
}

/* A graph gets a copy only if nothing is under way, and one that it will not check itself only if
 * there is nothing to check. */
static bool may_capture(const struct qs_kept *kept)
{
	if (!is_complete(kept) || kept->seen != kept->submitted)
		return false;
	return !kept->descriptor || level_of(kept) != QS_VALIDITY_TRACKED ||
	       qs_watch_state(kept->watch) == QS_WATCH_CLEAN;
}

/* A copy that was found, if it may be used here; else it is let go, and dropped if it is of no more
 * use to anybody. */
static struct qs_kept *check_found(struct qs_kept *kept, const struct qs_stream *stream,
                                   enum qs_reason *why)
{
	pthread_mutex_lock(&kept->lock);
	poll(kept);
	*why = is_gone(kept) ? QS_REASON_CHANGING : verdict(kept);
	const bool useless = *why != QS_REASON_AUTO;
	if (!useless && stream->capturing && !may_capture(kept))
		*why = QS_REASON_CAPTURE_COLD;
	pthread_mutex_unlock(&kept->lock);
	if (*why == QS_REASON_AUTO)
		return kept;
	if (useless)
		drop(kept, *why);
	qs_kept_used(kept);
	return NULL;
}

static void hash(struct qs_cache *cache, struct qs_candidate *candidate, uint64_t sequence,
                 const struct qs_matrix *source, const struct qs_stream *stream)
{
	struct qs_hash_outcome *outcome = &cache->outcomes[candidate - cache->candidate];
	struct qs_work *work = qs_work_take(cache, stream);
	if (!work) {
		qs_admission_done(cache, candidate, 1);
		return;
	}
	CUresult error = qs_check_hash(cache, source, stream, work->base, outcome, sequence);
	qs_work_give(cache, work, error ? NULL : outcome, sequence);
	qs_admission_done(cache, candidate, error ? PAUSE : 0);
}

/* Puts a new copy into the table, held, unless another thread was faster. */
static struct qs_kept *insert(struct qs_kept *kept)
{
	struct qs_cache *cache = kept->cache;
	pthread_mutex_lock(&cache->lock);
	struct qs_kept *other = find(cache, &kept->source, kept->form);
	if (!other) {
		struct qs_kept **head = qs_cache_bucket(cache, &kept->source, kept->form);
		touch(kept);
		kept->next = *head;
		*head = kept;
		atomic_store(&kept->users, 1);
		qs_counter_kept(kept->form->kind, (int64_t)kept->bytes);
	}
	pthread_mutex_unlock(&cache->lock);
	if (other)
		qs_kept_free(kept);
	return other ? other : kept;
}

/* Uses until it is tried again: at once if memory is about to become free. */
static uint64_t pause_of(struct qs_cache *cache, enum qs_reason why)
{
	pthread_mutex_lock(&cache->lock);
	const bool freeing = qs_cache_freeing(cache);
	pthread_mutex_unlock(&cache->lock);
	return why == QS_REASON_UNTRACKED ? PAUSE_WATCH : freeing ? 1 : PAUSE;
}

/* `known` is the candidate as it was when it was admitted. */
static struct qs_kept *make(struct qs_cache *cache, struct qs_candidate *candidate,
                            const struct qs_candidate *known, const struct qs_form *form,
                            const struct qs_options *options, enum qs_reason *why)
{
	struct qs_kept *kept =
	        qs_kept_new(cache, &known->source, form, options, known->distance, why);
	qs_admission_done(cache, candidate, kept ? 0 : pause_of(cache, *why));
	if (!kept)
		return NULL;
	kept->admitted = known->equal;
	memcpy(kept->expected, known->hash, sizeof kept->expected);
	return insert(kept);
}

static struct qs_kept *admit(struct qs_cache *cache, const struct qs_stream *stream,
                             const struct qs_matrix *source, const struct qs_form *form,
                             const struct qs_options *options, enum qs_reason *why)
{
	struct qs_candidate *candidate, known = {.infinite = false};
	const bool frozen = options->validity == QS_VALIDITY_FROZEN;
	pthread_mutex_lock(&cache->lock);
	enum qs_admission what =
	        qs_admission_consider(cache, source, frozen, stream->capturing, &candidate);
	if (candidate)
		known = *candidate;
	pthread_mutex_unlock(&cache->lock);
	*why = stream->capturing                ? QS_REASON_CAPTURE_COLD
	       : known.infinite && form->finite ? QS_REASON_NONFINITE
	                                        : QS_REASON_CHANGING;
	if (what == QS_ADMISSION_HASH)
		hash(cache, candidate, known.sequence, source, stream);
	if (what != QS_ADMISSION_MAKE)
		return NULL;
	if (*why != QS_REASON_NONFINITE)
		return make(cache, candidate, &known, form, options, why);
	qs_admission_done(cache, candidate, 0);
	qs_admission_hopeless(cache, source, true);
	return NULL;
}

struct qs_kept *qs_kept_find(struct qs_context *context, const struct qs_stream *stream,
                             const struct qs_matrix *source, const struct qs_form *form,
                             const struct qs_options *options, enum qs_reason *why)
{
	struct qs_form_size size;
	const bool known = atomic_load_explicit(&context->cache, memory_order_acquire);
	const bool possible = options->validity >= QS_VALIDITY_VERIFIED &&
	                      (options->validity != QS_VALIDITY_TRACKED || qs_epoch_trusted());
	*why = QS_REASON_UNTRACKED;
	if (!possible && !known)
		return NULL;
	struct qs_cache *cache = qs_cache_of(context, stream, why);
	if (!cache)
		return NULL;
	struct qs_kept *kept = look_up(cache, stream, source, form);
	if (kept)
		return check_found(kept, stream, why);
	*why = possible ? QS_REASON_UNAVAILABLE : QS_REASON_UNTRACKED;
	if (!possible || !form->size(source, &size))
		return NULL;
	return admit(cache, stream, source, form, options, why);
}

/* ---- using ---------------------------------------------------------------------------------- */

/* What is to be done before a copy is used. */
enum need {
	NOTHING,
	MAKE,
	CHECK, /* and make anew if it is old               */
	AUDIT, /* the same, though nothing speaks for it   */
};

static bool is_doubtful(const struct qs_kept *kept)
{
	return qs_watch_state(kept->watch) != QS_WATCH_CLEAN ||
	       atomic_load_explicit(&kept->doubt, memory_order_relaxed);
}

static bool is_due(const struct qs_kept *kept)
{
	return kept->check_every && kept->uses - kept->checked >= kept->check_every;
}

static enum need need_of(const struct qs_kept *kept)
{
	const enum qs_validity level = level_of(kept);
	if (!kept->submitted)
		return MAKE;
	if (level == QS_VALIDITY_VERIFIED || (level == QS_VALIDITY_TRACKED && is_doubtful(kept)))
		return CHECK;
	return is_due(kept) ? AUDIT : NOTHING;
}

static uint32_t flags_of(const struct qs_kept *kept, enum need need)
{
	if (need == MAKE)
		return QS_HASH_MAKE;
	return need == AUDIT && kept->level == QS_VALIDITY_FROZEN ? QS_HASH_LOOK : 0;
}

/* The watch's state is read before the launches and cleared after them, as it wants. */
static CUresult check(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work,
                      enum need need)
{
	const uint32_t suspects = kept->watch ? qs_watch_suspects(kept->watch) : 0;
	const bool suspect = kept->watch && qs_watch_state(kept->watch) != QS_WATCH_CLEAN;
	CUresult error = qs_check_submit(kept, stream, work, flags_of(kept, need));
	if (error)
		return error;
	if (suspect) {
		qs_watch_clear(kept->watch, suspects);
		atomic_store(&kept->doubt, DOUBTFUL_USES);
		kept->due = need != MAKE;
	} else if (atomic_load(&kept->doubt)) {
		atomic_fetch_sub(&kept->doubt, 1);
	}
	if (need == AUDIT) {
		kept->audit = kept->submitted;
		kept->audit_suspects = suspects;
	}
	return CUDA_SUCCESS;
}

/* A part of what the use itself does not look at. */
static bool is_to_sample(const struct qs_kept *kept, bool heeds_descriptor)
{
	return kept->form->sample && level_of(kept) == QS_VALIDITY_TRACKED &&
	       !(kept->descriptor && heeds_descriptor);
}

/* Orders the stream after the last check or sample. */
static CUresult follow(const struct qs_kept *kept, const struct qs_stream *stream)
{
	if (!kept->submitted || kept->stream == stream->id || (is_complete(kept) && !kept->sampled))
		return CUDA_SUCCESS;
	return qs_driver_get()->cuStreamWaitEvent(stream->handle, kept->event, 0);
}

static CUresult use_eager(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work,
                          bool heeds_descriptor, uint64_t *written)
{
	CUresult error = follow(kept, stream);
	const enum need need = need_of(kept);
	if (!error && need != NOTHING)
		error = check(kept, stream, work, need);
	if (!error && need == NOTHING && is_to_sample(kept, heeds_descriptor))
		error = qs_check_sample(kept, stream, work);
	*written = need == MAKE ? kept->bytes : 0;
	return error;
}

/* The driver calls this when a graph and its executables are destroyed; CUDA may not be called from
 * here. Until now the copy was in use, and could not be driven out. It may be freed as soon as the
 * last graph is off. */
static void graph_gone(void *data)
{
	struct qs_kept *kept = data;
	touch(kept);
	atomic_fetch_sub(&holds, 1);
	atomic_fetch_sub(&kept->graphs, 1);
}

/* Ties the copy's life to the graph being captured. */
static CUresult hold(struct qs_kept *kept, const struct qs_stream *stream)
{
	const struct qs_driver *cu = qs_driver_get();
	CUuserObject object;
	if (kept->capture == stream->capture)
		return CUDA_SUCCESS;
	qs_cache_own_kernels(kept->cache->context);
	CUresult error = cu->cuUserObjectCreate(&object, kept, graph_gone, 1,
	                                        CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
	if (error)
		return error;
	atomic_fetch_add(&holds, 1);
	atomic_fetch_add(&kept->graphs, 1);
	error = cu->cuGraphRetainUserObject(stream->graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
	if (error)
		cu->cuUserObjectRelease(object, 1); /* runs graph_gone() */
	else
		kept->capture = stream->capture;
	return error;
}

/* Its kernels read the descriptor, so it is enough to check before each launch of the graph. */
static bool is_checked_at_launch(const struct qs_kept *kept)
{
	return kept->descriptor && level_of(kept) == QS_VALIDITY_TRACKED;
}

static CUresult use_captured(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work,
                             bool heeds_descriptor)
{
	CUresult error = may_capture(kept) ? hold(kept, stream) : CUDA_ERROR_NOT_READY;
	if (error || kept->level == QS_VALIDITY_FROZEN ||
	    (heeds_descriptor && is_checked_at_launch(kept)))
		return error;
	return qs_check_submit(kept, stream, work, QS_HASH_GRAPH);
}

static void list_held(struct qs_kept *kept)
{
	struct qs_cache *cache = kept->cache;
	pthread_mutex_lock(&cache->lock);
	if (!kept->is_held && !kept->is_dropped && kept->descriptor &&
	    kept->level != QS_VALIDITY_VERIFIED) {
		struct qs_kept **head = qs_cache_held(cache, kept->descriptor);
		kept->is_held = true;
		kept->next_held = *head;
		*head = kept;
	}
	pthread_mutex_unlock(&cache->lock);
}

/* Another thread may have dropped it since it was found: a check after it was switched off would
 * say that it is good, and where a check failed nobody knows what it is. */
static CUresult use(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work,
                    bool heeds_descriptor, struct qs_kept_view *view)
{
	*view = (struct qs_kept_view){
	        .data = kept->data, .scale = kept->scale, .descriptor = kept->descriptor};
	pthread_mutex_lock(&kept->lock);
	CUresult error = kept->broken || kept->marked ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
	const uint64_t last = kept->submitted;
	atomic_fetch_add_explicit(&kept->uses, 1, memory_order_relaxed);
	if (!error)
		error = stream->capturing
		                ? use_captured(kept, stream, work, heeds_descriptor)
		                : use_eager(kept, stream, work, heeds_descriptor, &view->bytes);
	const bool checked = kept->submitted != last && !view->bytes;
	view->settled = is_settled(kept);
	pthread_mutex_unlock(&kept->lock);
	if (!error && stream->capturing)
		list_held(kept);
	if (!error)
		qs_counter_kept_use(kept->form->kind, checked);
	return error;
}

CUresult qs_kept_use(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work,
                     struct qs_kept_view *view)
{
	return use(kept, stream, work, true, view);
}

CUresult qs_kept_use_data(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work,
                          struct qs_kept_view *view)
{
	return use(kept, stream, work, false, view);
}

void qs_kept_used(struct qs_kept *kept)
{
	atomic_fetch_sub_explicit(&kept->users, 1, memory_order_release);
}

/* ---- graphs --------------------------------------------------------------------------------- */

#define BATCH 32

/* What is to be done before a launch of a graph. */
struct launch {
	CUgraphExec exec;
	uint64_t number;
	bool audits; /* a copy: one at a launch, so that none takes long */
	int count;
	struct qs_kept *copy[BATCH]; /* `count`, held */
	enum need need[BATCH];
};

/* Changes that the host has not been told of. */
static bool has_news(const struct qs_kept *kept)
{
	const struct qs_hash_outcome *outcome = kept->outcome;
	return __atomic_load_n(&outcome->escapes, __ATOMIC_RELAXED) != kept->escapes ||
	       __atomic_load_n(&outcome->changes, __ATOMIC_RELAXED) != kept->changes;
}

static enum need need_at_launch(const struct qs_kept *kept)
{
	const bool frozen = kept->level == QS_VALIDITY_FROZEN;
	if (!atomic_load(&kept->graphs))
		return NOTHING;
	if (has_news(kept))
		return frozen ? AUDIT : CHECK;
	if (!frozen && (is_blind(kept) || is_doubtful(kept)))
		return CHECK;
	return is_due(kept) ? AUDIT : NOTHING;
}

/* A kernel of the graph uses the copy. Under the cache's lock. */
static void look_at(struct qs_kept *kept, struct launch *launch)
{
	atomic_fetch_add_explicit(&kept->uses, 1, memory_order_relaxed);
	if (kept->looked_for == launch->number)
		return;
	kept->looked_for = launch->number;
	const enum need need = need_at_launch(kept);
	if (need == NOTHING || (need == AUDIT && launch->audits))
		return;
	launch->audits = launch->audits || need == AUDIT;
	launch->copy[launch->count] = kept;
	launch->need[launch->count++] = need;
	atomic_fetch_add(&kept->users, 1);
}

/* Those of these descriptors, at most BATCH. */
static void look_at_these(struct qs_cache *cache, const uint64_t *descriptors, size_t count,
                          struct launch *launch)
{
	pthread_mutex_lock(&cache->lock);
	for (size_t i = 0; i < count; i++) {
		struct qs_kept *kept = *qs_cache_held(cache, descriptors[i]);
		while (kept && kept->descriptor != descriptors[i])
			kept = kept->next_held;
		if (kept)
			look_at(kept, launch);
	}
	pthread_mutex_unlock(&cache->lock);
}

/* Those that were not looked at for this launch, until there is no room. */
static void look_at_all(struct qs_cache *cache, struct launch *launch)
{
	pthread_mutex_lock(&cache->lock);
	for (int i = 0; i < QS_HELD_BUCKETS; i++)
		for (struct qs_kept *kept = cache->held[i]; kept && launch->count < BATCH;
		     kept = kept->next_held)
			if (kept->looked_for != launch->number)
				look_at(kept, launch);
	pthread_mutex_unlock(&cache->lock);
}

/* The same of those dropped that a graph reads by their descriptor. */
static struct qs_kept *take_retired(struct qs_cache *cache, CUgraphExec exec, uint64_t launch)
{
	pthread_mutex_lock(&cache->lock);
	struct qs_kept *kept = cache->retired;
	while (kept &&
	       (kept->switched_for == launch || !kept->descriptor || !atomic_load(&kept->graphs) ||
	        atomic_load(&kept->is_off) || !qs_graph_uses(exec, kept->descriptor)))
		kept = kept->next;
	if (kept) {
		kept->switched_for = launch;
		atomic_fetch_add(&kept->users, 1);
	}
	pthread_mutex_unlock(&cache->lock);
	return kept;
}

/* What cannot be checked is dropped: the graph then computes from the source. */
static void check_for_graph(struct qs_kept *kept, const struct qs_stream *stream, enum need need)
{
	struct qs_work *work = is_gone(kept) ? NULL : qs_work_take(kept->cache, stream);
	CUresult error = work ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
	enum qs_reason why = QS_REASON_ERROR;
	pthread_mutex_lock(&kept->lock);
	poll(kept);
	if (work)
		error = follow(kept, stream);
	if (work && !error)
		error = check(kept, stream, work->base, need);
	if (!error)
		why = verdict(kept);
	const uint64_t sequence = kept->submitted;
	pthread_mutex_unlock(&kept->lock);
	if (work)
		qs_work_give(kept->cache, work, error ? NULL : kept->outcome, sequence);
	if (why != QS_REASON_AUTO)
		drop(kept, why);
}

/* Empties the batch; true if there was something in it. */
static bool check_batch(struct launch *launch, const struct qs_stream *stream)
{
	const int count = launch->count;
	for (int i = 0; i < count; i++) {
		check_for_graph(launch->copy[i], stream, launch->need[i]);
		qs_kept_used(launch->copy[i]);
	}
	launch->count = 0;
	return count;
}

/* Each copy at most once: one that stays doubtful would come for ever. Of a graph that is not known
 * all are taken to be its own. */
static void check_held(struct qs_cache *cache, struct launch *launch,
                       const struct qs_stream *stream)
{
	uint64_t descriptors[BATCH];
	size_t from = 0, count;
	bool known;
	do {
		count = BATCH;
		known = qs_graph_copies(launch->exec, from, descriptors, &count);
		look_at_these(cache, descriptors, count, launch);
		check_batch(launch, stream);
		from += count;
	} while (count == BATCH);
	if (!known)
		do
			look_at_all(cache, launch);
		while (check_batch(launch, stream));
}

/* Those that are dropped on the way are among the retired then. */
static void prepare(struct qs_cache *cache, CUgraphExec exec, const struct qs_stream *stream)
{
	struct qs_kept *kept;
	struct launch launch = {.exec = exec};
	pthread_mutex_lock(&cache->lock);
	launch.number = ++cache->launches;
	pthread_mutex_unlock(&cache->lock);
	check_held(cache, &launch, stream);
	while ((kept = take_retired(cache, exec, launch.number))) {
		qs_kept_switch_off(kept, stream);
		qs_kept_used(kept);
	}
}

void qs_kept_before_graph(CUgraphExec exec, CUstream handle)
{
	enum qs_reason why;
	struct qs_stream stream;
	if (!atomic_load_explicit(&holds, memory_order_relaxed))
		return;
	const struct qs_driver *cu = qs_driver_get();
	CUcontext of_stream, before;
	const bool pushed = cu && !cu->cuStreamGetCtx(handle, &of_stream) &&
	                    !cu->cuCtxPushCurrent_v2(of_stream);
	struct qs_context *context = qs_context_current(NULL, false, &why);
	struct qs_cache *cache =
	        context ? atomic_load_explicit(&context->cache, memory_order_acquire) : NULL;
	if (cache && cache->outcomes && qs_stream_describe(handle, &stream) && !stream.capturing)
		prepare(cache, exec, &stream);
	if (pushed)
		cu->cuCtxPopCurrent_v2(&before);
}

void qs_kept_forked(void)
{
	atomic_store(&holds, 0);
	qs_caches_forked();
}
