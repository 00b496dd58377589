/* Hashes, and what follows from them, as launches: of a matrix that may be admitted, and of one
 * with a copy that is to be made, compared with its source, or made anew. Also the scratch for
 * those that no product pays for.
 */
#include <stddef.h>

#include "kernels/sample.h"
#include "operand/kept.h"

static CUresult launch(CUfunction function, unsigned blocks, CUstream stream,
                       struct qs_hash_args *args)
{
	void *arguments[] = {args};
	return qs_driver_get()->cuLaunchKernel(function, blocks, 1, 1, QS_HASH_THREADS, 1, 1, 0,
	                                       stream, arguments, NULL);
}

static CUresult hash(const struct qs_context *context, const struct qs_stream *stream,
                     struct qs_hash_args *args)
{
	CUresult error = launch(context->hash, args->blocks, stream->handle, args);
	return error ? error : launch(context->hash_judge, 1, stream->handle, args);
}

static struct qs_hash_args args_of(const struct qs_context *context, const struct qs_matrix *source,
                                   CUdeviceptr work, const struct qs_hash_outcome *outcome)
{
	return (struct qs_hash_args){
	        .source = (uintptr_t)source->data,
	        .rows = source->rows,
	        .cols = source->cols,
	        .ld = source->ld,
	        .work = work,
	        .outcome = (uintptr_t)outcome,
	        .blocks = qs_hash_blocks(source->rows, source->cols, context->sms),
	};
}

uint64_t qs_check_done(const struct qs_hash_outcome *outcome)
{
	return __atomic_load_n(&outcome->sequence, __ATOMIC_ACQUIRE);
}

CUresult qs_check_hash(struct qs_cache *cache, const struct qs_matrix *source,
                       const struct qs_stream *stream, CUdeviceptr work,
                       struct qs_hash_outcome *outcome, uint64_t sequence)
{
	const struct qs_context *context = cache->context;
	struct qs_hash_args args = args_of(context, source, work, outcome);
	args.sequence = sequence;
	CUresult error = hash(context, stream, &args);
	return error ? error : launch(context->hash_commit, 1, stream->handle, &args);
}

static struct qs_making making_of(const struct qs_kept *kept, CUdeviceptr work)
{
	return (struct qs_making){
	        .source = kept->source,
	        .data = kept->data,
	        .scale = kept->scale,
	        .descriptor = kept->descriptor,
	        .work = work,
	        .outcome = (uintptr_t)kept->outcome,
	};
}

static void describe(struct qs_hash_args *args, const struct qs_kept *kept,
                     const struct qs_making *making)
{
	const struct qs_form *form = kept->form;
	args->descriptor = kept->descriptor;
	args->valid = form->valid;
	args->failed = form->failed;
	args->reset = form->reset | 1u << form->valid;
	args->flags |= form->finite ? QS_HASH_FINITE : 0;
	if (args->flags & QS_HASH_MAKE)
		form->describe(making, args->image);
}

static CUresult submit(const struct qs_kept *kept, const struct qs_stream *stream,
                       struct qs_hash_args *args)
{
	const struct qs_context *context = kept->cache->context;
	const struct qs_making making = making_of(kept, args->work);
	if (kept->descriptor)
		describe(args, kept, &making);
	CUresult error = hash(context, stream, args);
	if (!error && !(args->flags & QS_HASH_LOOK))
		error = kept->form->make(context, stream->handle, &making);
	if (!error)
		error = launch(context->hash_commit, 1, stream->handle, args);
	return error;
}

/* Numbered checks of a copy follow each other: the one before was waited for (cache.c). Those of a
 * graph run when the graph does. */
CUresult qs_check_submit(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work,
                         uint32_t flags)
{
	struct qs_hash_args args =
	        args_of(kept->cache->context, &kept->source, work, kept->outcome);
	args.record = kept->record;
	args.flags = flags;
	if (!(flags & QS_HASH_GRAPH))
		args.sequence = atomic_fetch_add(&kept->cache->sequence, 1) + 1;
	CUresult error = submit(kept, stream, &args);
	kept->broken = kept->broken || error;
	kept->in_graphs = kept->in_graphs || flags & QS_HASH_GRAPH;
	if (flags & QS_HASH_GRAPH)
		return error;
	if (!error)
		error = qs_driver_get()->cuEventRecord(kept->event, stream->handle);
	if (flags & QS_HASH_MAKE)
		kept->first = args.sequence;
	kept->submitted = args.sequence;
	kept->stream = stream->id;
	kept->sampled = false;
	kept->checked = kept->uses;
	kept->broken = kept->broken || error;
	return error;
}

static CUresult compare(const struct qs_kept *kept, const struct qs_stream *stream,
                        CUdeviceptr work)
{
	const struct qs_context *context = kept->cache->context;
	const struct qs_matrix *source = &kept->source;
	struct qs_sample_args args = {
	        .source = (uintptr_t)source->data,
	        .rows = source->rows,
	        .cols = source->cols,
	        .ld = source->ld,
	        .data = kept->data,
	        .scale = kept->scale,
	        .descriptor = kept->descriptor,
	        .work = work,
	        .record = kept->record,
	        .outcome = (uintptr_t)kept->outcome,
	};
	void *arguments[] = {&args};
	const CUfunction function = kept->form->sample(context, &args.flags);
	const uint32_t blocks = qs_sample_blocks(source->rows, source->cols, context->sms);
	return qs_driver_get()->cuLaunchKernel(function, blocks, 1, 1, QS_SAMPLE_THREADS, 1, 1, 0,
	                                       stream->handle, arguments, NULL);
}

CUresult qs_check_sample(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work)
{
	const struct qs_making making = making_of(kept, work);
	CUresult error = compare(kept, stream, work);
	if (!error)
		error = kept->form->make(kept->cache->context, stream->handle, &making);
	if (!error)
		error = qs_driver_get()->cuEventRecord(kept->event, stream->handle);
	kept->stream = stream->id;
	kept->sampled = true;
	kept->broken = kept->broken || error;
	return error;
}

/* ---- scratch -------------------------------------------------------------------------------- */

/* The stream itself keeps its uses apart; another may have it when the last one is over. */
static bool is_free(const struct qs_work *work, const struct qs_stream *stream)
{
	if (work->taken)
		return false;
	return !work->sequence || work->stream == stream->id ||
	       qs_check_done(work->outcome) >= work->sequence;
}

struct qs_work *qs_work_take(struct qs_cache *cache, const struct qs_stream *stream)
{
	struct qs_work *found = NULL;
	pthread_mutex_lock(&cache->lock);
	for (int i = 0; i < QS_WORKS; i++) {
		struct qs_work *work = &cache->work[i];
		if (is_free(work, stream) && (!found || work->stream == stream->id))
			found = work;
	}
	if (found) {
		found->taken = true;
		found->stream = stream->id;
	}
	pthread_mutex_unlock(&cache->lock);
	return found;
}

void qs_work_give(struct qs_cache *cache, struct qs_work *work,
                  const struct qs_hash_outcome *outcome, uint64_t sequence)
{
	pthread_mutex_lock(&cache->lock);
	work->outcome = outcome ? outcome : cache->outcomes;
	work->sequence = outcome ? sequence : UINT64_MAX;
	work->taken = false;
	pthread_mutex_unlock(&cache->lock);
}
