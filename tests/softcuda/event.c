/* Events. What a wait refers to is fixed when it is submitted: the work last recorded then. An
 * event recorded in a capturing stream stands for graph nodes instead, and only captures can use
 * it. */
#include "tests/softcuda/inside.h"

#include <stdlib.h>

struct CUevent_st {
	bool live;                  /* false once destroyed: reused                      */
	unsigned flags;             /* as created                                        */
	CUcontext context;          /* current when it was made                          */
	uint64_t records;           /* how often it was recorded, over all its lives     */
	struct sc_point point;      /* in the stream of the last record                  */
	int64_t time;               /* ns, when that record ran                          */
	bool recorded;              /* ever, outside capture                             */
	unsigned long long capture; /* id of the capture it was last recorded in, or 0    */
	struct sc_nodes nodes;      /* what it stands for there                          */
	CUevent next;               /* list of all                                       */
};

static CUevent events;

static bool known(CUevent event)
{
	for (CUevent e = events; e; e = e->next)
		if (e == event)
			return e->live;
	return false;
}

static CUresult enter_event(CUevent event)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	return known(event) ? CUDA_SUCCESS : sc_leave(CUDA_ERROR_INVALID_HANDLE);
}

static CUevent unused(void)
{
	for (CUevent e = events; e; e = e->next)
		if (!e->live)
			return e;
	CUevent event = sc_alloc(sizeof *event);
	*event = (struct CUevent_st){.next = events};
	events = event;
	return event;
}

CUresult CUDAAPI cuEventCreate(CUevent *event, unsigned int flags)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	if (!event || flags > 7)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	if (sc_nth(&softcuda_knobs.fail_event))
		return sc_leave(CUDA_ERROR_OUT_OF_MEMORY);
	CUevent e = unused();
	*e = (struct CUevent_st){.live = true,
	                         .flags = flags,
	                         .context = context,
	                         .records = e->records,
	                         .next = e->next};
	*event = e;
	softcuda_counters.events++;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuEventDestroy_v2(CUevent event)
{
	CUresult error = enter_event(event);
	if (error)
		return error;
	sc_nodes_clear(&event->nodes);
	event->live = false;
	softcuda_counters.events--;
	return sc_leave(CUDA_SUCCESS);
}

struct record {
	CUevent event;
	uint64_t number; /* which of its records: an older one must not set the time */
	CUstream stream; /* in which                                                 */
};

static CUresult run_record(const void *args)
{
	const struct record *record = args;
	if (record->event->records == record->number)
		record->event->time = sc_clock(record->stream);
	return CUDA_SUCCESS;
}

static CUresult record(CUevent event, CUstream stream)
{
	event->records++;
	sc_nodes_clear(&event->nodes);
	event->capture = 0;
	if (stream->capture) {
		event->capture = stream->capture->id;
		sc_nodes_merge(&event->nodes, &stream->tips);
		return CUDA_SUCCESS;
	}
	struct record args = {event, event->records, stream};
	sc_push(stream,
	        sc_work_new(run_record, &args, sizeof args, CU_GRAPH_NODE_TYPE_EVENT_RECORD),
	        (struct sc_point){0});
	event->point = sc_last(stream);
	event->recorded = true;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned int flags)
{
	CUstream stream;
	CUresult error = enter_event(event);
	if (error)
		return error;
	error = sc_stream_find(handle, &stream);
	if (!error)
		error = sc_capture_check(stream);
	if (!error && flags > CU_EVENT_RECORD_EXTERNAL)
		error = CUDA_ERROR_INVALID_VALUE;
	if (!error && flags == CU_EVENT_RECORD_EXTERNAL)
		error = CUDA_ERROR_NOT_SUPPORTED;
	if (!error && event->context != stream->context)
		error = CUDA_ERROR_INVALID_HANDLE;
	if (!error && sc_nth(&softcuda_knobs.fail_event))
		error = CUDA_ERROR_OUT_OF_MEMORY;
	return sc_leave(error ? error : record(event, stream));
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream)
{
	return cuEventRecordWithFlags(event, stream, CU_EVENT_RECORD_DEFAULT);
}

static CUresult may_wait(CUevent event)
{
	if (!event->capture)
		return sc_unsafe();
	struct sc_capture *capture = sc_capture_find(event->capture);
	if (capture)
		sc_capture_spoil(capture);
	return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult CUDAAPI cuEventQuery(CUevent event)
{
	CUresult error = enter_event(event);
	if (error)
		return error;
	error = may_wait(event);
	if (error)
		return sc_leave(error);
	bool done = sc_done(event->point);
	if (!done)
		sc_progress();
	return sc_leave(done ? event->context->broken : CUDA_ERROR_NOT_READY);
}

CUresult CUDAAPI cuEventSynchronize(CUevent event)
{
	CUresult error = enter_event(event);
	if (error)
		return error;
	error = may_wait(event);
	if (error)
		return sc_leave(error);
	softcuda_counters.syncs++;
	sc_run_until(event->point);
	return sc_leave(event->context->broken);
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end)
{
	if (!known(start) || !known(end) || !start->recorded || !end->recorded ||
	    (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!sc_done(start->point) || !sc_done(end->point))
		return CUDA_ERROR_NOT_READY;
	*milliseconds = (float)(end->time - start->time) * 1e-6f;
	return CUDA_SUCCESS;
}

/* Both forms are looked up by name; cuda.h declares one of them, depending on its version. */
CUresult CUDAAPI cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end);
CUresult CUDAAPI cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
	CUresult error = sc_enter();
	return error ? error : sc_leave(elapsed(milliseconds, start, end));
}

#undef cuEventElapsedTime
CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
	return cuEventElapsedTime_v2(milliseconds, start, end);
}

static CUresult run_nothing(const void *args)
{
	(void)args;
	return CUDA_SUCCESS;
}

/* An event of a capture pulls the stream into it. */
static CUresult wait_captured(CUstream stream, CUevent event)
{
	struct sc_capture *capture = sc_capture_find(event->capture);
	if (!capture)
		return CUDA_ERROR_CAPTURED_EVENT;
	if (stream->legacy || capture->invalid) {
		sc_capture_spoil(capture);
		return stream->legacy ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
		                      : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	}
	if (stream->capture && stream->capture != capture) {
		sc_capture_spoil(stream->capture);
		sc_capture_spoil(capture);
		return CUDA_ERROR_STREAM_CAPTURE_MERGE;
	}
	stream->capture = capture;
	sc_nodes_merge(&stream->tips, &event->nodes);
	return CUDA_SUCCESS;
}

static CUresult wait_event(CUstream stream, CUevent event)
{
	if (event->capture)
		return wait_captured(stream, event);
	if (!event->recorded)
		return CUDA_SUCCESS;
	if (stream->capture) {
		sc_capture_spoil(stream->capture);
		return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
	}
	sc_push(stream, sc_work_new(run_nothing, NULL, 0, CU_GRAPH_NODE_TYPE_WAIT_EVENT),
	        event->point);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags)
{
	CUstream stream;
	CUresult error = enter_event(event);
	if (error)
		return error;
	error = flags ? CUDA_ERROR_NOT_SUPPORTED : sc_stream_find(handle, &stream);
	if (!error)
		error = sc_capture_check(stream);
	return sc_leave(error ? error : wait_event(stream, event));
}
