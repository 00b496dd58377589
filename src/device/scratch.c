/* Scratch memory: quantised operands, scales and workspace of one product at a time per stream.
 *
 * Eager work: one block per stream, grown by doubling, so what a stream outgrew adds up to less
 * than what it has; it is kept, and counted, because freeing waits for the whole device, which may
 * be held up by what the calling thread does next. Captured work: a graph can run at any time on
 * any stream, so each capture (and each stream forked within it) gets a block of its own that no
 * eager product touches. A user object retained by the graph says when the graph and its
 * executables are gone; the block then serves another capture. Blocks that a graph holds are never
 * moved or freed. Streams come and go unseen: blocks that waited long make room when there is none.
 * A block whose user does not come back is given up, and the stream gets another.
 */
#include "device/device.h"

#include <stdlib.h>

#include "note/note.h"

/* The program's own allocations come first: we never take the last of the device's memory. */
#define RESERVE     ((size_t)512 << 20)
#define GRANULARITY ((size_t)2 << 20)

/* Requests of others after which a block counts as left behind. */
#define IDLE_TURNS 64

enum {
	EAGER,
	CAPTURED,
	RELEASED
};

static size_t round_up(size_t bytes)
{
	return (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
}

/* Allocation in a mode that a capture elsewhere in the process neither forbids nor notices. */
static CUresult allocate(CUdeviceptr *base, size_t bytes)
{
	const struct qs_driver *cu = qs_driver_get();
	size_t available = 0, total = 0;
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	cu->cuThreadExchangeStreamCaptureMode(&mode);
	CUresult error = cu->cuMemGetInfo_v2(&available, &total);
	if (!error && available < bytes + (RESERVE < total / 16 ? RESERVE : total / 16))
		error = CUDA_ERROR_OUT_OF_MEMORY;
	if (!error)
		error = cu->cuMemAlloc_v2(base, bytes);
	cu->cuThreadExchangeStreamCaptureMode(&mode);
	return error;
}

static void release(CUdeviceptr base)
{
	const struct qs_driver *cu = qs_driver_get();
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	if (!base)
		return;
	cu->cuThreadExchangeStreamCaptureMode(&mode);
	cu->cuMemFree_v2(base);
	cu->cuThreadExchangeStreamCaptureMode(&mode);
}

/* Replaces the block by one of `wanted` bytes; on failure the scratch is as before. `bytes`: what
 * is needed of them. */
static bool replace(struct qs_context *context, struct qs_scratch *scratch, size_t wanted,
                    size_t bytes)
{
	CUdeviceptr base = 0;
	if (atomic_load(&context->taken) + wanted > context->limit)
		return false;
	CUresult error = allocate(&base, wanted);
	if (error) {
		qs_message(QS_LOG_CACHE, "no %zu MiB of scratch on device %d: %s", wanted >> 20,
		           context->device, qs_error_name(error));
		return false;
	}
	atomic_fetch_add(&context->taken, wanted);
	qs_message(QS_LOG_CACHE, "%zu MiB of scratch on device %d for %zu MiB, was %zu",
	           wanted >> 20, context->device, bytes >> 20, scratch->size >> 20);
	scratch->base = base;
	scratch->size = wanted;
	scratch->generation++;
	return true;
}

/* Replaces the block by one of at least `bytes`, if there is room twice as large as it was. */
static bool grow(struct qs_context *context, struct qs_scratch *scratch, size_t bytes)
{
	size_t wanted = round_up(bytes > 2 * scratch->size ? bytes : 2 * scratch->size);
	if (atomic_load(&context->taken) + wanted > context->limit)
		wanted = round_up(bytes);
	return replace(context, scratch, wanted, bytes);
}

/* The driver calls this when the last graph that holds the block is destroyed; CUDA may not be
 * called from here. */
static void graph_gone(void *data)
{
	struct qs_scratch *scratch = data;
	atomic_store(&scratch->captured, RELEASED);
}

/* Ties the block's life to the graph being captured. */
static bool retain(struct qs_scratch *scratch, CUgraph graph)
{
	const struct qs_driver *cu = qs_driver_get();
	CUuserObject object;
	if (cu->cuUserObjectCreate(&object, scratch, graph_gone, 1,
	                           CU_USER_OBJECT_NO_DESTRUCTOR_SYNC))
		return false;
	atomic_store(&scratch->captured, CAPTURED);
	if (!cu->cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE))
		return true;
	cu->cuUserObjectRelease(object, 1); /* runs graph_gone() */
	return false;
}

/* Not to be used, as somebody may still do, unless it turns out that he has come back. */
static bool is_given_up(struct qs_scratch *scratch)
{
	if (!atomic_load_explicit(&scratch->given_up, memory_order_relaxed))
		return false;
	if (pthread_mutex_trylock(&scratch->lock))
		return true;
	pthread_mutex_unlock(&scratch->lock);
	return false;
}

/* Empties the block that waited longest, for another owner; freeing waits for the work that used
 * it. NULL if all of them were asked for lately: streams that take turns must not drive each other
 * out. */
static struct qs_scratch *reclaim(struct qs_context *context)
{
	struct qs_scratch *oldest = NULL;
	for (int i = 0; i < QS_SCRATCH_MAX; i++) {
		struct qs_scratch *scratch = &context->scratch[i];
		if (scratch->used && atomic_load(&scratch->captured) != CAPTURED &&
		    !is_given_up(scratch) && (!oldest || scratch->turn < oldest->turn))
			oldest = scratch;
	}
	if (!oldest || context->turn - oldest->turn < IDLE_TURNS ||
	    pthread_mutex_trylock(&oldest->lock))
		return NULL;
	release(oldest->base);
	atomic_fetch_sub(&context->taken, oldest->size);
	oldest->base = 0;
	oldest->size = 0;
	oldest->used = false;
	oldest->stream = 0;
	pthread_mutex_unlock(&oldest->lock);
	return oldest;
}

static struct qs_scratch *find_eager(struct qs_context *context, const struct qs_stream *stream)
{
	struct qs_scratch *scratch = NULL;
	for (int i = 0; i < QS_SCRATCH_MAX; i++) {
		struct qs_scratch *each = &context->scratch[i];
		if (each->used && !each->capture && each->stream == stream->id &&
		    !is_given_up(each)) {
			each->turn = context->turn;
			return each;
		}
		if (!each->used && !scratch)
			scratch = each;
	}
	if (!scratch && !(scratch = reclaim(context)))
		return NULL;
	atomic_store(&scratch->captured, EAGER);
	scratch->used = true;
	scratch->generation++;
	scratch->capture = 0;
	scratch->stream = stream->id;
	scratch->turn = context->turn;
	return scratch;
}

/* Gives a free block to a capture. As large as any product wanted so far, if there is memory for
 * it, so that one block serves the whole capture. Allocating is legal here: the thread is in
 * relaxed mode for it, and the graph does not see it. */
static struct qs_scratch *adopt(struct qs_context *context, struct qs_scratch *scratch,
                                const struct qs_stream *stream, size_t bytes)
{
	if (scratch->size < context->largest && !grow(context, scratch, context->largest) &&
	    scratch->size < bytes && !grow(context, scratch, bytes))
		return NULL;
	if (!retain(scratch, stream->graph))
		return NULL;
	scratch->used = true;
	scratch->generation++;
	scratch->capture = stream->capture;
	scratch->stream = stream->id;
	scratch->turn = context->turn;
	return scratch;
}

/* Whether block x serves a capture that may want `bytes` better than y does: large enough before
 * too small, the smaller of two large ones, the larger of two small ones. */
static bool is_better(const struct qs_scratch *x, const struct qs_scratch *y, size_t bytes)
{
	if ((x->size >= bytes) != (y->size >= bytes))
		return x->size >= bytes;
	return x->size >= bytes ? x->size < y->size : x->size > y->size;
}

/* The block of this capture and stream, else the free one that fits best: what grows leaves memory
 * behind, so a small one is not grown while a large one is free. */
static struct qs_scratch *find_captured(struct qs_context *context, const struct qs_stream *stream,
                                        size_t bytes)
{
	struct qs_scratch *best = NULL;
	for (int i = 0; i < QS_SCRATCH_MAX; i++) {
		struct qs_scratch *scratch = &context->scratch[i];
		int captured = atomic_load(&scratch->captured);
		if (is_given_up(scratch))
			continue;
		if (captured == CAPTURED && scratch->capture == stream->capture &&
		    scratch->stream == stream->id && scratch->size >= bytes)
			return scratch;
		if (captured != RELEASED && scratch->used)
			continue;
		if (!best || is_better(scratch, best, context->largest))
			best = scratch;
	}
	if (!best)
		best = reclaim(context);
	return best ? adopt(context, best, stream, bytes) : NULL;
}

/* False if the block went to another stream (reclaim) before the caller had locked it. */
static bool is_owner(const struct qs_scratch *scratch, const struct qs_stream *stream)
{
	return scratch->used && scratch->stream == stream->id &&
	       scratch->capture == (stream->capturing ? stream->capture : 0);
}

/* The lock of a block; without it the block is given up. */
static bool lock_block(const struct qs_context *context, struct qs_scratch *scratch)
{
	const bool locked = qs_lock_in_time(&scratch->lock, &scratch->given_up);
	if (!locked)
		qs_message(QS_LOG_CACHE,
		           "scratch of a stream on device %d is given up: a product did not come "
		           "back",
		           context->device);
	return locked;
}

static struct qs_scratch *find_and_lock(struct qs_context *context, const struct qs_stream *stream,
                                        size_t bytes)
{
	for (;;) {
		pthread_mutex_lock(&context->lock);
		context->turn++;
		if (context->largest < bytes)
			context->largest = bytes;
		struct qs_scratch *scratch = stream->capturing
		                                     ? find_captured(context, stream, bytes)
		                                     : find_eager(context, stream);
		pthread_mutex_unlock(&context->lock);
		if (!scratch)
			return NULL;
		if (!lock_block(context, scratch))
			continue;
		if (is_owner(scratch, stream))
			return scratch;
		pthread_mutex_unlock(&scratch->lock);
	}
}

/* Grows the block, at the cost of those left behind if need be. Taking the table's lock with a
 * block's is safe: whoever holds the table's never waits for a block's. */
static bool grow_eager(struct qs_context *context, struct qs_scratch *scratch, size_t bytes)
{
	while (!grow(context, scratch, bytes)) {
		pthread_mutex_lock(&context->lock);
		bool made_room = reclaim(context);
		pthread_mutex_unlock(&context->lock);
		if (!made_room)
			return false;
	}
	return true;
}

/* As replace(), of the memory for measuring, in which what was outgrown counts too. */
static bool measured(struct qs_context *context, struct qs_scratch *block, size_t wanted,
                     size_t bytes)
{
	wanted = round_up(wanted < bytes ? bytes : wanted);
	if (atomic_fetch_add(&context->measuring, wanted) + wanted <= context->measuring_limit &&
	    replace(context, block, wanted, bytes))
		return true;
	atomic_fetch_sub(&context->measuring, wanted);
	return false;
}

/* Twice as large as it was, so that what is outgrown, and not freed, adds up to little. */
static bool grow_measuring(struct qs_context *context, struct qs_scratch *block, size_t bytes)
{
	return measured(context, block, 2 * block->size, bytes) ||
	       measured(context, block, bytes, bytes);
}

static bool grow_for(struct qs_context *context, struct qs_scratch *scratch,
                     const struct qs_stream *stream, size_t bytes)
{
	if (stream->capturing)
		return false;
	return stream->measuring ? grow_measuring(context, scratch, bytes)
	                         : grow_eager(context, scratch, bytes);
}

struct qs_scratch *qs_scratch_lock(struct qs_context *context, const struct qs_stream *stream,
                                   size_t bytes, enum qs_reason *why)
{
	*why = QS_REASON_MEMORY;
	struct qs_scratch *scratch = find_and_lock(context, stream, bytes);
	if (!scratch)
		return NULL;
	if (scratch->size >= bytes || grow_for(context, scratch, stream, bytes))
		return scratch;
	pthread_mutex_unlock(&scratch->lock);
	return NULL;
}

void qs_scratch_unlock(struct qs_scratch *scratch)
{
	pthread_mutex_unlock(&scratch->lock);
}

CUdeviceptr qs_reserve(struct qs_context *context, struct qs_scratch *block, size_t bytes)
{
	return block->size >= bytes || grow_measuring(context, block, bytes) ? block->base : 0;
}

/* One block per context, grown like scratch: its users take turns (the tuner's lock), and what it
 * holds is of no interest to anybody. */
CUdeviceptr qs_temporary(struct qs_context *context, size_t bytes)
{
	return qs_reserve(context, &context->temporary, bytes);
}
