/* The memory of kept copies: what a context's cache takes, blocks within the limit and with some
 * left to the program, and giving them back.
 *
 * A copy that is dropped is retired: nobody finds it any more, but products that were submitted may
 * still read it, and graphs may for ever. Its memory is freed when a new copy is wanted: a use of
 * the cache in a stream that is not capturing records an event, and one that finds this over, no
 * thread holding the copy and no graph either, frees. Streams other than that one may have used it
 * too: cuMemFree waits for all of the device, which is also why memory is not freed for its own
 * sake: the device may be held up by what the calling thread does next.
 *
 * Least recently used goes first, but only if it was not used for more than twice the time that
 * passes between uses of what wants its place: weights that are used in turn and do not all fit
 * would otherwise drive each other out at every turn.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "note/note.h"
#include "operand/kept.h"

#define ALIGNMENT 256
/* Where the parts of a block are; the scale follows. */
#define RECORD_AT     0
#define DESCRIPTOR_AT 64
#define SCALE_AT      ALIGNMENT
/* Share of a device's memory that is left to the program. */
#define RESERVE_SHARE 20
/* Turns that a copy stays in any case. */
#define IDLE_TURNS 64

_Static_assert(sizeof(struct qs_hash_record) <= DESCRIPTOR_AT, "the record has its place");
_Static_assert(DESCRIPTOR_AT + 4 * QS_HASH_IMAGE <= SCALE_AT, "the descriptor has its place");

static size_t align(size_t bytes)
{
	return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Enters a mode that a capture elsewhere in the process neither forbids nor notices, or leaves it
 * again by the mode that this returned. */
static CUstreamCaptureMode exchange(CUstreamCaptureMode mode)
{
	qs_driver_get()->cuThreadExchangeStreamCaptureMode(&mode);
	return mode;
}

/* ---- a context's cache ---------------------------------------------------------------------- */

static CUresult allocate_shared(struct qs_cache *cache)
{
	const struct qs_driver *cu = qs_driver_get();
	const size_t outcomes = (QS_CANDIDATES + QS_CACHE_COPIES) * sizeof *cache->outcomes;
	void *host = NULL;
	CUdeviceptr works = 0;
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	/* With unified addressing, which every GPU here has, it has the same address on the device.
	 */
	CUresult error = cu->cuMemHostAlloc(&host, outcomes, CU_MEMHOSTALLOC_PORTABLE);
	if (!error)
		error = cu->cuMemAlloc_v2(&works, QS_WORKS * QS_KEPT_WORK);
	exchange(mode);
	if (error)
		return error; /* the host memory stays: it is small, and this is asked once */
	memset(host, 0, outcomes);
	cache->outcomes = host;
	atomic_fetch_add(&cache->context->taken, QS_WORKS * QS_KEPT_WORK);
	for (int i = 0; i < QS_WORKS; i++)
		cache->work[i].base = works + (CUdeviceptr)i * QS_KEPT_WORK;
	return CUDA_SUCCESS;
}

#define CACHES_MAX 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list, and of additions to it */
static struct qs_cache *caches[CACHES_MAX];
static int count;

/* So that graphs into which our kernels are captured are not taken to write what these read. */
void qs_cache_own_kernels(const struct qs_context *context)
{
	int written;
	if (qs_track_is_own(context->quantise, &written))
		return; /* the others are too */
	const CUfunction readers[] = {
	        context->quantise,     context->repair,       context->rows,
	        context->cast_columns, context->amax_columns, context->hash,
	        context->hash_judge,   context->hash_commit,  context->nf4_pack,
	        context->fp8_pack,     context->nf4_expand,
	};
	for (size_t i = 0; i < sizeof readers / sizeof *readers; i++)
		qs_track_own_function(readers[i], -1);
	for (int i = 0; i < QS_PRODUCT_KINDS && context->few_tokens; i++) {
		qs_track_own_function(context->w4a16[i],
		                      offsetof(struct qs_mapped_args, product.d));
		qs_track_own_function(context->w8a16[i],
		                      offsetof(struct qs_mapped_args, product.d));
	}
	for (int i = 0; i < QS_WIDE_KINDS && context->many_tokens; i++)
		qs_track_own_function(context->wide[i], offsetof(struct qs_mapped_args, product.d));
}

/* A cache whose memory could not be had has no outcomes, and stays so. */
static struct qs_cache *create(struct qs_context *context)
{
	struct qs_cache *cache = count < CACHES_MAX ? calloc(1, sizeof *cache) : NULL;
	if (!cache)
		return NULL;
	cache->context = context;
	pthread_mutex_init(&cache->lock, NULL);
	for (int i = 0; i < QS_CACHE_COPIES; i++)
		cache->spare[cache->spares++] = (uint16_t)(QS_CACHE_COPIES - 1 - i);
	CUresult error = allocate_shared(cache);
	if (error)
		qs_message(QS_LOG_CACHE, "no weights are kept on device %d: %s", context->device,
		           qs_error_name(error));
	qs_cache_own_kernels(context);
	caches[count++] = cache;
	atomic_store_explicit(&context->cache, cache, memory_order_release);
	return cache;
}

/* The first copy of another cache whose context, or whose source, is gone. A handle that is in use
 * again says that the context which had it before was destroyed. */
static struct qs_kept *find_gone(struct qs_cache *cache, const struct qs_context *context)
{
	const bool destroyed = cache->context->handle == context->handle;
	for (int i = 0; i < QS_CACHE_BUCKETS; i++)
		for (struct qs_kept *kept = cache->bucket[i]; kept; kept = kept->next)
			if (destroyed ||
			    (kept->watch && qs_watch_state(kept->watch) == QS_WATCH_GONE))
				return kept;
	return NULL;
}

/* Nobody looks into the cache of a context that was destroyed, so a new one does it. The driver is
 * not called: in a living context, the next use of its cache frees the memory. */
static void drop_gone(const struct qs_context *context)
{
	for (int i = 0; i < count; i++) {
		struct qs_kept *kept;
		do {
			pthread_mutex_lock(&caches[i]->lock);
			kept = find_gone(caches[i], context);
			pthread_mutex_unlock(&caches[i]->lock);
			if (kept)
				qs_cache_drop(kept);
		} while (kept);
	}
}

struct qs_cache *qs_cache_of(struct qs_context *context, const struct qs_stream *stream,
                             enum qs_reason *why)
{
	struct qs_cache *cache = atomic_load_explicit(&context->cache, memory_order_acquire);
	*why = QS_REASON_CAPTURE_COLD;
	if (!cache && stream->capturing)
		return NULL;
	if (!cache) {
		pthread_mutex_lock(&lock);
		cache = atomic_load(&context->cache);
		if (!cache) {
			drop_gone(context);
			cache = create(context);
		}
		pthread_mutex_unlock(&lock);
	}
	*why = QS_REASON_MEMORY;
	return cache && cache->outcomes ? cache : NULL;
}

void qs_caches_forked(void)
{
	pthread_mutex_init(&lock, NULL);
	count = 0;
}

/* ---- lists ---------------------------------------------------------------------------------- */

struct qs_kept **qs_cache_bucket(struct qs_cache *cache, const struct qs_matrix *source,
                                 const struct qs_form *form)
{
	uint64_t hash = (uintptr_t)source->data ^ (uint64_t)source->rows << 40 ^
	                (uint64_t)source->cols << 20 ^ (uint64_t)source->ld ^
	                (uint64_t)form->kind << 60;
	hash = (hash * 0x9e3779b97f4a7c15u) >> 32;
	return &cache->bucket[hash & (QS_CACHE_BUCKETS - 1)];
}

struct qs_kept **qs_cache_held(struct qs_cache *cache, CUdeviceptr descriptor)
{
	const uint64_t hash = (uint64_t)descriptor * 0x9e3779b97f4a7c15u >> 32;
	return &cache->held[hash & (QS_HELD_BUCKETS - 1)];
}

static void take_out(struct qs_kept **link, const struct qs_kept *kept)
{
	while (*link != kept)
		link = &(*link)->next;
	*link = kept->next;
}

static void release_held(struct qs_kept *kept)
{
	struct qs_kept **link = qs_cache_held(kept->cache, kept->descriptor);
	while (*link != kept)
		link = &(*link)->next_held;
	*link = kept->next_held;
	kept->is_held = false;
}

/* Under the cache's lock. */
static void retire(struct qs_kept *kept)
{
	struct qs_cache *cache = kept->cache;
	take_out(qs_cache_bucket(cache, &kept->source, kept->form), kept);
	if (kept->is_held)
		release_held(kept);
	kept->is_dropped = true;
	kept->next = cache->retired;
	cache->retired = kept;
	qs_counter_kept(kept->form->kind, -(int64_t)kept->bytes);
}

void qs_cache_drop(struct qs_kept *kept)
{
	pthread_mutex_lock(&kept->cache->lock);
	if (!kept->is_dropped)
		retire(kept);
	pthread_mutex_unlock(&kept->cache->lock);
}

/* ---- room ----------------------------------------------------------------------------------- */

/* The copy not used for longest, if that is long; NULL if there is none. Under the lock. */
static struct qs_kept *oldest(const struct qs_cache *cache, uint64_t distance)
{
	struct qs_kept *found = NULL;
	for (int i = 0; i < QS_CACHE_BUCKETS; i++)
		for (struct qs_kept *kept = cache->bucket[i]; kept; kept = kept->next)
			if (!atomic_load(&kept->users) && !atomic_load(&kept->graphs) &&
			    (!found || kept->turn < found->turn))
				found = kept;
	return found && cache->turn - found->turn > 2 * distance + IDLE_TURNS ? found : NULL;
}

size_t qs_cache_freeing(const struct qs_cache *cache)
{
	size_t bytes = 0;
	for (const struct qs_kept *kept = cache->retired; kept; kept = kept->next)
		bytes += atomic_load(&kept->graphs) ? 0 : kept->bytes;
	return bytes;
}

/* Retires copies until `bytes` will become free. */
static void make_room(struct qs_cache *cache, size_t bytes, uint64_t distance)
{
	struct qs_kept *kept;
	pthread_mutex_lock(&cache->lock);
	while (distance && qs_cache_freeing(cache) < bytes && (kept = oldest(cache, distance)))
		retire(kept);
	cache->wanting = cache->retired;
	pthread_mutex_unlock(&cache->lock);
}

static CUresult allocate_block(CUdeviceptr *base, size_t bytes)
{
	const struct qs_driver *cu = qs_driver_get();
	size_t available = 0, total = 0;
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	CUresult error = cu->cuMemGetInfo_v2(&available, &total);
	if (!error && available < bytes + total / RESERVE_SHARE)
		error = CUDA_ERROR_OUT_OF_MEMORY;
	if (!error)
		error = cu->cuMemAlloc_v2(base, bytes);
	exchange(mode);
	return error;
}

/* A matrix that changes now and then would else leave a copy behind each time. */
static void free_retired(struct qs_cache *cache)
{
	pthread_mutex_lock(&cache->lock);
	cache->wanting = cache->retired;
	pthread_mutex_unlock(&cache->lock);
}

static bool allocate(struct qs_kept *kept, uint64_t distance, enum qs_reason *why)
{
	struct qs_context *context = kept->cache->context;
	const size_t after = atomic_fetch_add(&context->taken, kept->bytes) + kept->bytes;
	CUresult error = CUDA_SUCCESS;
	size_t missing = kept->bytes;
	*why = QS_REASON_MEMORY;
	if (after > context->limit) {
		*why = QS_REASON_CACHE_FULL;
		missing = after - context->limit;
	} else {
		error = allocate_block(&kept->block, kept->bytes);
	}
	if (kept->block) {
		free_retired(kept->cache);
		return true;
	}
	atomic_fetch_sub(&context->taken, kept->bytes);
	qs_message(QS_LOG_CACHE, "no %zu MiB for a weight on device %d: %s", kept->bytes >> 20,
	           context->device, error ? qs_error_name(error) : "[cache] max_mib");
	make_room(kept->cache, missing, distance);
	return false;
}

/* ---- copies --------------------------------------------------------------------------------- */

/* Watched before anything is read from it, so that no write is missed. */
static bool watch(struct qs_kept *kept)
{
	const struct qs_matrix *source = &kept->source;
	const uint16_t *first = source->data;
	const uint16_t *end = first + (source->rows - 1) * source->ld + source->cols;
	if (kept->level != QS_VALIDITY_TRACKED)
		return true;
	if (qs_is_device_memory(first))
		kept->watch = qs_watch_add(first, end);
	return kept->watch;
}

static bool make_event(struct qs_kept *kept)
{
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	CUresult error = qs_driver_get()->cuEventCreate(&kept->event, CU_EVENT_DISABLE_TIMING);
	exchange(mode);
	return !error;
}

static bool take_outcome(struct qs_kept *kept)
{
	struct qs_cache *cache = kept->cache;
	pthread_mutex_lock(&cache->lock);
	if (cache->spares)
		kept->outcome = &cache->outcomes[QS_CANDIDATES + cache->spare[--cache->spares]];
	pthread_mutex_unlock(&cache->lock);
	return kept->outcome;
}

static void lay_out(struct qs_kept *kept, const struct qs_form_size *size)
{
	kept->record = kept->block + RECORD_AT;
	kept->descriptor = kept->form->describe ? kept->block + DESCRIPTOR_AT : 0;
	kept->scale = kept->block + SCALE_AT;
	kept->data = kept->scale + align(size->scale);
}

/* What is left of an old outcome at the same place is not ours. */
static bool furnish(struct qs_kept *kept, const struct qs_form_size *size, uint64_t distance,
                    enum qs_reason *why)
{
	*why = QS_REASON_CACHE_FULL;
	if (!take_outcome(kept))
		return false;
	kept->seen = qs_check_done(kept->outcome);
	*why = QS_REASON_UNTRACKED;
	if (!watch(kept))
		return false;
	if (!allocate(kept, distance, why))
		return false;
	lay_out(kept, size);
	*why = QS_REASON_MEMORY;
	return make_event(kept);
}

struct qs_kept *qs_kept_new(struct qs_cache *cache, const struct qs_matrix *source,
                            const struct qs_form *form, const struct qs_options *options,
                            uint64_t distance, enum qs_reason *why)
{
	struct qs_form_size size;
	*why = QS_REASON_UNAVAILABLE;
	if (!form->size(source, &size))
		return NULL;
	*why = QS_REASON_MEMORY;
	struct qs_kept *kept = calloc(1, sizeof *kept);
	if (!kept)
		return NULL;
	pthread_mutex_init(&kept->lock, NULL);
	kept->cache = cache;
	kept->source = *source;
	kept->form = form;
	kept->level = options->validity;
	kept->check_every = (uint64_t)options->check_every;
	kept->bytes = SCALE_AT + align(size.scale) + align(size.data);
	if (furnish(kept, &size, distance, why))
		return kept;
	qs_kept_free(kept);
	return NULL;
}

void qs_kept_free(struct qs_kept *kept)
{
	const struct qs_driver *cu = qs_driver_get();
	struct qs_cache *cache = kept->cache;
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	if (kept->event)
		cu->cuEventDestroy_v2(kept->event);
	if (kept->block) {
		cu->cuMemFree_v2(kept->block);
		atomic_fetch_sub(&cache->context->taken, kept->bytes);
	}
	exchange(mode);
	qs_watch_remove(kept->watch);
	pthread_mutex_lock(&cache->lock);
	if (kept->outcome)
		cache->spare[cache->spares++] =
		        (uint16_t)(kept->outcome - cache->outcomes - QS_CANDIDATES);
	pthread_mutex_unlock(&cache->lock);
	pthread_mutex_destroy(&kept->lock);
	free(kept);
}

/* ---- giving back ---------------------------------------------------------------------------- */

/* What was submitted to this stream is over when the event is. Under the copy's lock, as all that
 * follows up to is_over(). */
static void mark(struct qs_kept *kept, const struct qs_stream *stream)
{
	if (!kept->marked)
		kept->marked = !qs_driver_get()->cuEventRecord(kept->event, stream->handle);
}

static bool is_over(const struct qs_kept *kept)
{
	CUstreamCaptureMode mode = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
	CUresult error = qs_driver_get()->cuEventQuery(kept->event);
	exchange(mode);
	return !error;
}

/* No check comes after the last one, which may say that the copy is good, once it is over. */
static bool is_last_check_over(const struct qs_kept *kept)
{
	return !kept->in_graphs && qs_check_done(kept->outcome) == kept->submitted;
}

/* Launch after launch, until it is known to have come after the last check: waiting for that could
 * hold up a stream that has nothing to do with it. */
void qs_kept_switch_off(struct qs_kept *kept, const struct qs_stream *stream)
{
	pthread_mutex_lock(&kept->lock);
	const bool last = is_last_check_over(kept);
	CUresult error = qs_driver_get()->cuMemsetD32Async(kept->descriptor + 4 * kept->form->valid,
	                                                   0, 1, stream->handle);
	if (!error && last)
		mark(kept, stream);
	atomic_store(&kept->is_off, kept->marked && is_over(kept));
	pthread_mutex_unlock(&kept->lock);
}

/* Takes what nobody uses any more out of the list of the retired; the others are counted as used.
 */
static struct qs_kept *take_idle(struct qs_cache *cache)
{
	struct qs_kept *idle = NULL;
	pthread_mutex_lock(&cache->lock);
	for (struct qs_kept **link = &cache->retired; *link;) {
		struct qs_kept *kept = *link;
		if (atomic_load(&kept->users) || atomic_load(&kept->graphs)) {
			link = &kept->next;
			continue;
		}
		*link = kept->next;
		kept->next = idle;
		idle = kept;
	}
	pthread_mutex_unlock(&cache->lock);
	return idle;
}

static void put_back(struct qs_cache *cache, struct qs_kept *kept)
{
	pthread_mutex_lock(&cache->lock);
	kept->next = cache->retired;
	cache->retired = kept;
	pthread_mutex_unlock(&cache->lock);
}

void qs_cache_sweep(struct qs_cache *cache, const struct qs_stream *stream)
{
	struct qs_kept *next;
	for (struct qs_kept *kept = take_idle(cache); kept; kept = next) {
		next = kept->next;
		pthread_mutex_lock(&kept->lock);
		mark(kept, stream);
		const bool over = kept->marked && is_over(kept);
		pthread_mutex_unlock(&kept->lock);
		if (over)
			qs_kept_free(kept);
		else
			put_back(cache, kept);
	}
	pthread_mutex_lock(&cache->lock);
	cache->wanting = cache->retired;
	pthread_mutex_unlock(&cache->lock);
}
