/* Stream capture: which streams are part of it, what the next node depends on, and what is
 * prohibited meanwhile. The rules are those of the driver API's documentation
 * (cuStreamBeginCapture, cuThreadExchangeStreamCaptureMode): a prohibited call fails and spoils the
 * capture, which then answers 901 until it is ended. */
#include "tests/softcuda/inside.h"

#include <stdlib.h>

struct sc_capture *sc_captures;

void sc_nodes_add(struct sc_nodes *set, CUgraphNode node)
{
	for (size_t i = 0; i < set->count; i++)
		if (set->list[i] == node)
			return;
	set->list = sc_grow(set->list, (set->count + 1) * sizeof *set->list);
	set->list[set->count++] = node;
}

void sc_nodes_merge(struct sc_nodes *set, const struct sc_nodes *more)
{
	for (size_t i = 0; i < more->count; i++)
		sc_nodes_add(set, more->list[i]);
}

void sc_nodes_clear(struct sc_nodes *set)
{
	free(set->list);
	*set = (struct sc_nodes){0};
}

struct sc_capture *sc_capture_find(unsigned long long id)
{
	for (struct sc_capture *c = sc_captures; c; c = c->next)
		if (c->id == id)
			return c;
	return NULL;
}

void sc_capture_spoil(struct sc_capture *capture)
{
	capture->invalid = true;
}

void sc_capture_leave(CUstream stream)
{
	stream->capture = NULL;
	sc_nodes_clear(&stream->tips);
}

/* The legacy stream is unusable while a blocking stream of its context is being captured: whatever
 * it does would have to be ordered with work that does not run. */
static CUresult check_legacy(CUstream legacy, bool spoil)
{
	CUresult error = CUDA_SUCCESS;
	for (CUstream s = sc_streams; s; s = s->next) {
		if (!s->capture || s->nonblocking || s->context != legacy->context)
			continue;
		if (spoil)
			sc_capture_spoil(s->capture);
		error = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	}
	return error;
}

CUresult sc_capture_check(CUstream stream)
{
	if (stream->context->broken)
		return stream->context->broken;
	if (stream->capture)
		return stream->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
		                                : CUDA_SUCCESS;
	return stream->legacy ? check_legacy(stream, true) : CUDA_SUCCESS;
}

CUresult sc_capture_add(CUstream stream, struct sc_work *work)
{
	CUgraphNode node = sc_graph_add(stream->capture->graph, work, &stream->tips);
	sc_nodes_clear(&stream->tips);
	sc_nodes_add(&stream->tips, node);
	return CUDA_SUCCESS;
}

/* More than one node ahead, or one that is no kernel, is not said to be possible. */
bool sc_capture_early(CUstream stream)
{
	const struct sc_nodes *tips = &stream->tips;
	if (softcuda_knobs.driver < 12030 || tips->count != 1 || !sc_graph_is_kernel(tips->list[0]))
		return false;
	softcuda_counters.early_edges++;
	return true;
}

/* Does this capture forbid the calling thread what might synchronise behind its back? */
static bool forbids(const struct sc_capture *capture)
{
	if (capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
		return false;
	if (capture->owner == sc_token())
		return true;
	return capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
	       sc_thread.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult sc_unsafe(void)
{
	CUresult error = CUDA_SUCCESS;
	if (sc_thread.mode == CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_SUCCESS;
	for (struct sc_capture *c = sc_captures; c; c = c->next) {
		if (!forbids(c))
			continue;
		sc_capture_spoil(c);
		error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	return error;
}

CUresult sc_context_capturing(CUcontext context)
{
	CUresult error = CUDA_SUCCESS;
	for (CUstream s = sc_streams; s; s = s->next) {
		if (!s->capture || s->context != context)
			continue;
		sc_capture_spoil(s->capture);
		error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	return error;
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	CUstreamCaptureMode old = sc_thread.mode;
	sc_thread.mode = *mode;
	*mode = old;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	if (stream->legacy)
		return sc_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if (stream->capture)
		return sc_leave(CUDA_ERROR_ILLEGAL_STATE);
	if (mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	struct sc_capture *capture = sc_alloc(sizeof *capture);
	*capture = (struct sc_capture){.id = sc_new_id(),
	                               .mode = mode,
	                               .owner = sc_token(),
	                               .origin = stream,
	                               .graph = sc_graph_new(),
	                               .next = sc_captures};
	sc_captures = stream->capture = capture;
	softcuda_counters.captures++;
	return sc_leave(CUDA_SUCCESS);
}

/* Every stream that was pulled in must have been waited for. */
static bool joined(const struct sc_capture *capture)
{
	for (CUstream s = sc_streams; s; s = s->next)
		if (s->capture == capture && !sc_graph_joined(&s->tips, &capture->origin->tips))
			return false;
	return true;
}

static void unlink_capture(struct sc_capture *capture)
{
	struct sc_capture **link = &sc_captures;
	while (*link != capture)
		link = &(*link)->next;
	*link = capture->next;
	for (CUstream s = sc_streams; s; s = s->next)
		if (s->capture == capture)
			sc_capture_leave(s);
	free(capture);
}

static CUresult finish(struct sc_capture *capture, CUgraph *graph)
{
	CUresult error = CUDA_SUCCESS;
	if (capture->invalid)
		error = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	else if (!joined(capture))
		error = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
	*graph = error ? NULL : capture->graph;
	if (error)
		sc_graph_destroy(capture->graph);
	unlink_capture(capture);
	return error;
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph *graph)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	struct sc_capture *capture = stream->capture;
	if (!graph)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	*graph = NULL;
	if (!capture)
		return sc_leave(CUDA_ERROR_ILLEGAL_STATE);
	if (capture->origin != stream) {
		sc_capture_spoil(capture);
		return sc_leave(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	}
	if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->owner != sc_token())
		return sc_leave(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
	return sc_leave(finish(capture, graph));
}

static CUstreamCaptureStatus status_of(CUstream stream)
{
	if (!stream->capture)
		return CU_STREAM_CAPTURE_STATUS_NONE;
	return stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
	                                : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* Asking the legacy stream fails while it is unusable, but does no harm. */
CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	if (error)
		return error;
	*status = status_of(stream);
	return sc_leave(stream->legacy ? check_legacy(stream, false) : CUDA_SUCCESS);
}

static CUresult capture_info(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                             CUgraph *graph, const CUgraphNode **after, size_t *count)
{
	*status = status_of(stream);
	if (stream->legacy)
		return check_legacy(stream, false);
	if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
		return CUDA_SUCCESS;
	if (id)
		*id = stream->capture->id;
	if (graph)
		*graph = stream->capture->graph;
	if (after)
		*after = stream->tips.list;
	if (count)
		*count = stream->tips.count;
	return CUDA_SUCCESS;
}

/* In every driver since 11.3; cuda.h of CUDA 13 declares only the next one. */
CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status,
                                           cuuint64_t *id, CUgraph *graph,
                                           const CUgraphNode **dependencies, size_t *count);
CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status,
                                           cuuint64_t *id, CUgraph *graph,
                                           const CUgraphNode **dependencies, size_t *count)
{
	CUstream stream;
	CUresult error = sc_enter_stream(handle, &stream);
	return error ? error
	             : sc_leave(capture_info(stream, status, id, graph, dependencies, count));
}

/* With edge data: there is none, so nobody needs it. */
CUresult CUDAAPI cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status,
                                           cuuint64_t *id, CUgraph *graph,
                                           const CUgraphNode **dependencies,
                                           const CUgraphEdgeData **edges, size_t *count)
{
	if (edges)
		*edges = NULL;
	return cuStreamGetCaptureInfo_v2(handle, status, id, graph, dependencies, count);
}
