/* What a stream is doing: asked before anything else touches it, because most of the driver is
 * forbidden to a capturing stream and some of it spoils the capture. cuStreamGetId does (it answers
 * 900 and invalidates the capture, driver 580): in a capture the handle serves, which cannot be
 * used again before the capture ends. */
#include "device/device.h"

/* True if the next node of the capture will depend on a kernel and on nothing else. */
static bool is_after_kernel(CUstream handle)
{
	const struct qs_driver *cu = qs_driver_get();
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	const CUgraphNode *ahead = NULL;
	size_t count = 0;
	CUgraphNodeType type;
	return !cu->cuStreamGetCaptureInfo_v2(handle, &status, NULL, NULL, &ahead, &count) &&
	       count == 1 && !cu->cuGraphNodeGetType(ahead[0], &type) &&
	       type == CU_GRAPH_NODE_TYPE_KERNEL;
}

bool qs_may_begin_early(const struct qs_context *context, const struct qs_stream *stream)
{
	if (!stream->capturing)
		return context->starts_early;
	return context->captures_early && is_after_kernel(stream->handle);
}

bool qs_stream_describe(CUstream handle, struct qs_stream *stream)
{
	const struct qs_driver *cu = qs_driver_get();
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	unsigned long long id = 0;
	cuuint64_t capture = 0;
	*stream = (struct qs_stream){.handle = handle, .id = (uintptr_t)handle};
	/* One handle for the stream of every thread: only the id tells them apart. */
	if (handle == CU_STREAM_PER_THREAD && !cu->cuStreamGetId)
		return false;
	if (cu->cuStreamIsCapturing(handle, &status) ||
	    status == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
		return false;
	stream->capturing = status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
	if (!stream->capturing) {
		if (cu->cuStreamGetId && !cu->cuStreamGetId(handle, &id))
			stream->id = id;
		return true;
	}
	if (cu->cuStreamGetCaptureInfo_v2(handle, &status, &capture, &stream->graph, NULL, NULL))
		return false;
	stream->capture = capture;
	return status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}
