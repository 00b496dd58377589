/* Streams: creation, the default ones, queries and waits. The struct of a destroyed stream is used
 * again once its work is done, so that handles come back as the driver's do; its id does not. */
#include "tests/softcuda/inside.h"

#include <stdlib.h>

CUstream sc_streams;

static CUstream unused(void)
{
	for (CUstream s = sc_streams; s; s = s->next)
		if (!s->live && !s->head && !s->busy)
			return s;
	CUstream stream = sc_alloc(sizeof *stream);
	*stream = (struct CUstream_st){.next = sc_streams};
	sc_streams = stream;
	return stream;
}

CUstream sc_stream_add(CUcontext context)
{
	CUstream stream = unused();
	/* Points of the past may name this stream: its numbers go on. */
	*stream = (struct CUstream_st){.live = true,
	                               .id = sc_new_id(),
	                               .context = context,
	                               .last = stream->last,
	                               .completed = stream->completed,
	                               .next = stream->next};
	return stream;
}

static CUstream of_thread(CUcontext context)
{
	uint64_t thread = sc_token();
	for (CUstream s = sc_streams; s; s = s->next)
		if (s->live && s->context == context && s->thread == thread)
			return s;
	CUstream stream = sc_stream_add(context);
	stream->thread = thread;
	return stream;
}

CUresult sc_stream_find(CUstream handle, CUstream *stream)
{
	if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
		CUcontext context = sc_current();
		if (!context || !context->live)
			return CUDA_ERROR_INVALID_CONTEXT;
		*stream = handle == CU_STREAM_PER_THREAD ? of_thread(context) : context->legacy;
		return CUDA_SUCCESS;
	}
	for (CUstream s = sc_streams; s; s = s->next) {
		if (s != handle || !s->live)
			continue;
		*stream = s;
		return CUDA_SUCCESS;
	}
	return CUDA_ERROR_INVALID_HANDLE;
}

static void drop(CUstream stream)
{
	if (stream->capture) {
		sc_capture_spoil(stream->capture);
		sc_capture_leave(stream);
	}
	stream->live = false;
}

void sc_streams_drop_context(CUcontext context)
{
	for (CUstream s = sc_streams; s; s = s->next)
		if (s->live && s->context == context)
			drop(s);
}

CUresult sc_enter_stream(CUstream handle, CUstream *stream)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	error = sc_stream_find(handle, stream);
	return error ? sc_leave(error) : CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	if (!stream || flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	*stream = sc_stream_add(context);
	(*stream)->flags = flags;
	(*stream)->nonblocking = flags & CU_STREAM_NON_BLOCKING;
	(*stream)->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags)
{
	return cuStreamCreateWithPriority(stream, flags, 0);
}

/* Returns at once; what was submitted still runs. */
CUresult CUDAAPI cuStreamDestroy_v2(CUstream handle)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	if (stream->legacy || stream->thread)
		return sc_leave(CUDA_ERROR_INVALID_HANDLE);
	drop(stream);
	return sc_leave(CUDA_SUCCESS);
}

/* A capturing stream can be neither asked nor waited for. */
static CUresult may_wait(CUstream stream)
{
	if (stream->capture) {
		sc_capture_spoil(stream->capture);
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	CUresult error = sc_capture_check(stream);
	return error ? error : sc_unsafe();
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	error = may_wait(stream);
	if (error)
		return sc_leave(error);
	softcuda_counters.syncs++;
	sc_run_until(sc_last(stream));
	return sc_leave(stream->context->broken);
}

CUresult CUDAAPI cuStreamQuery(CUstream handle)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	error = may_wait(stream);
	if (error)
		return sc_leave(error);
	bool done = sc_done(sc_last(stream));
	if (!done)
		sc_progress();
	if (stream->context->broken)
		return sc_leave(stream->context->broken);
	return sc_leave(done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

/* Seen with driver 580: asking a capturing stream for its id is an error and ends the capture. */
CUresult CUDAAPI cuStreamGetId(CUstream handle, unsigned long long *id)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	if (stream->capture) {
		sc_capture_spoil(stream->capture);
		return sc_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	}
	*id = stream->id;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext *context)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	*context = stream->context;
	return sc_leave(CUDA_SUCCESS);
}

#if CUDA_VERSION >= 12080
CUresult CUDAAPI cuStreamGetDevice(CUstream handle, CUdevice *device)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	*device = stream->context->device;
	return sc_leave(CUDA_SUCCESS);
}
#endif

CUresult CUDAAPI cuStreamGetFlags(CUstream handle, unsigned int *flags)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	*flags = stream->flags;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamGetPriority(CUstream handle, int *priority)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	*priority = stream->priority;
	return sc_leave(CUDA_SUCCESS);
}

struct host_function {
	CUhostFn function;
	void *data;
};

static CUresult run_host_function(const void *args)
{
	const struct host_function *host = args;
	host->function(host->data);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	error = function ? sc_capture_check(stream) : CUDA_ERROR_INVALID_VALUE;
	if (error)
		return sc_leave(error);
	struct host_function host = {function, data};
	struct sc_work *work =
	        sc_work_new(run_host_function, &host, sizeof host, CU_GRAPH_NODE_TYPE_HOST);
	work->host = true;
	return sc_leave(sc_submit(stream, work));
}
