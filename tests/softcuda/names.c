/* Names: of errors, and of the driver's functions for cuGetProcAddress, which gives the form of a
 * function that belongs to the CUDA version asked for. The per-thread default stream forms (_ptsz)
 * are left out. */
#include "tests/softcuda/inside.h"

#include <string.h>

static const struct {
	CUresult error;
	const char *name, *text;
} errors[] = {
        {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
        {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
        {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
        {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
        {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
        {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
        {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
        {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
        {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
        {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
         "no kernel image is available for execution on the device"},
        {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
        {CUDA_ERROR_INVALID_SOURCE, "CUDA_ERROR_INVALID_SOURCE", "device kernel image is invalid"},
        {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
        {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
         "the operation cannot be performed in the present state"},
        {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
        {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
        {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
         "an illegal memory access was encountered"},
        {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
         "too many resources requested for launch"},
        {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED",
         "context is destroyed"},
        {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
        {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
        {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
        {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
         "operation not permitted when stream is capturing"},
        {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
         "operation failed due to a previous error during capture"},
        {CUDA_ERROR_STREAM_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
         "operation would result in a merge of separate capture sequences"},
        {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
         "capture was not ended in the same stream as it began"},
        {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
         "capturing stream has unjoined work"},
        {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
         "dependency created on uncaptured work in another stream"},
        {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
         "operation would make the legacy stream depend on a capturing blocking stream"},
        {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
         "operation not permitted on an event last recorded in a capturing stream"},
        {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
         "attempt to terminate a thread-local capture sequence from another thread"},
        {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

#define ERRORS (sizeof errors / sizeof *errors)

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **name)
{
	*name = NULL;
	for (size_t i = 0; i < ERRORS; i++)
		if (errors[i].error == error)
			*name = errors[i].name;
	return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text)
{
	*text = NULL;
	for (size_t i = 0; i < ERRORS; i++)
		if (errors[i].error == error)
			*text = errors[i].text;
	return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Forms that cuda.h does not declare under these names in every version. */
CUresult CUDAAPI cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device);
CUresult CUDAAPI cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status,
                                           cuuint64_t *id, CUgraph *graph,
                                           const CUgraphNode **dependencies, size_t *count);
#undef cuEventElapsedTime
CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
CUresult CUDAAPI cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end);

static const struct entry {
	const char *name; /* without version                      */
	int since;        /* CUDA version of this form            */
	void *function;   /* the form                             */
} entries[] = {
        {"cuInit", 2000, (void *)cuInit},
        {"cuDriverGetVersion", 2020, (void *)cuDriverGetVersion},
        {"cuDeviceGetCount", 2000, (void *)cuDeviceGetCount},
        {"cuDeviceGet", 2000, (void *)cuDeviceGet},
        {"cuDeviceGetName", 2000, (void *)cuDeviceGetName},
        {"cuDeviceTotalMem", 3020, (void *)cuDeviceTotalMem_v2},
        {"cuDeviceGetUuid", 11040, (void *)cuDeviceGetUuid_v2},
        {"cuDeviceGetAttribute", 2000, (void *)cuDeviceGetAttribute},
        {"cuDevicePrimaryCtxRetain", 7000, (void *)cuDevicePrimaryCtxRetain},
        {"cuDevicePrimaryCtxRelease", 11000, (void *)cuDevicePrimaryCtxRelease_v2},
        {"cuDevicePrimaryCtxReset", 11000, (void *)cuDevicePrimaryCtxReset_v2},
        {"cuDevicePrimaryCtxGetState", 7000, (void *)cuDevicePrimaryCtxGetState},
        {"cuDevicePrimaryCtxSetFlags", 11000, (void *)cuDevicePrimaryCtxSetFlags_v2},
        {"cuCtxCreate", 3020, (void *)cuCtxCreate_v2},
        {"cuCtxDestroy", 4000, (void *)cuCtxDestroy_v2},
        {"cuCtxPushCurrent", 4000, (void *)cuCtxPushCurrent_v2},
        {"cuCtxPopCurrent", 4000, (void *)cuCtxPopCurrent_v2},
        {"cuCtxSetCurrent", 4000, (void *)cuCtxSetCurrent},
        {"cuCtxGetCurrent", 4000, (void *)cuCtxGetCurrent},
        {"cuCtxGetDevice", 2000, (void *)cuCtxGetDevice},
        {"cuCtxGetId", 12000, (void *)cuCtxGetId},
        {"cuCtxGetFlags", 7000, (void *)cuCtxGetFlags},
        {"cuCtxGetApiVersion", 3020, (void *)cuCtxGetApiVersion},
        {"cuCtxGetStreamPriorityRange", 5050, (void *)cuCtxGetStreamPriorityRange},
        {"cuCtxSynchronize", 2000, (void *)cuCtxSynchronize},
        {"cuMemAlloc", 3020, (void *)cuMemAlloc_v2},
        {"cuMemFree", 3020, (void *)cuMemFree_v2},
        {"cuMemGetInfo", 3020, (void *)cuMemGetInfo_v2},
        {"cuMemGetAllocationGranularity", 10020, (void *)cuMemGetAllocationGranularity},
        {"cuMemAddressReserve", 10020, (void *)cuMemAddressReserve},
        {"cuMemAddressFree", 10020, (void *)cuMemAddressFree},
        {"cuMemCreate", 10020, (void *)cuMemCreate},
        {"cuMemRelease", 10020, (void *)cuMemRelease},
        {"cuMemMap", 10020, (void *)cuMemMap},
        {"cuMemUnmap", 10020, (void *)cuMemUnmap},
        {"cuMemSetAccess", 10020, (void *)cuMemSetAccess},
        {"cuMemGetAddressRange", 3020, (void *)cuMemGetAddressRange_v2},
        {"cuMemHostAlloc", 2020, (void *)cuMemHostAlloc},
        {"cuMemAllocHost", 3020, (void *)cuMemAllocHost_v2},
        {"cuMemFreeHost", 2000, (void *)cuMemFreeHost},
        {"cuMemcpy", 4000, (void *)cuMemcpy},
        {"cuMemcpyHtoD", 3020, (void *)cuMemcpyHtoD_v2},
        {"cuMemcpyDtoH", 3020, (void *)cuMemcpyDtoH_v2},
        {"cuMemcpyDtoD", 3020, (void *)cuMemcpyDtoD_v2},
        {"cuMemcpyAsync", 4000, (void *)cuMemcpyAsync},
        {"cuMemcpyHtoDAsync", 3020, (void *)cuMemcpyHtoDAsync_v2},
        {"cuMemcpyDtoHAsync", 3020, (void *)cuMemcpyDtoHAsync_v2},
        {"cuMemcpyDtoDAsync", 3020, (void *)cuMemcpyDtoDAsync_v2},
        {"cuMemcpyPeerAsync", 4000, (void *)cuMemcpyPeerAsync},
        {"cuMemcpy2DAsync", 3020, (void *)cuMemcpy2DAsync_v2},
#if CUDA_VERSION >= 13000
        {"cuMemcpyBatchAsync", 13000, (void *)cuMemcpyBatchAsync_v2},
#endif
        {"cuMemsetD8", 3020, (void *)cuMemsetD8_v2},
        {"cuMemsetD16", 3020, (void *)cuMemsetD16_v2},
        {"cuMemsetD32", 3020, (void *)cuMemsetD32_v2},
        {"cuMemsetD8Async", 3020, (void *)cuMemsetD8Async},
        {"cuMemsetD16Async", 3020, (void *)cuMemsetD16Async},
        {"cuMemsetD32Async", 3020, (void *)cuMemsetD32Async},
        {"cuMemAllocAsync", 11020, (void *)cuMemAllocAsync},
        {"cuMemFreeAsync", 11020, (void *)cuMemFreeAsync},
        {"cuPointerGetAttribute", 4000, (void *)cuPointerGetAttribute},
        {"cuPointerGetAttributes", 7000, (void *)cuPointerGetAttributes},
        {"cuStreamCreate", 2000, (void *)cuStreamCreate},
        {"cuStreamCreateWithPriority", 5050, (void *)cuStreamCreateWithPriority},
        {"cuStreamDestroy", 4000, (void *)cuStreamDestroy_v2},
        {"cuStreamSynchronize", 2000, (void *)cuStreamSynchronize},
        {"cuStreamQuery", 2000, (void *)cuStreamQuery},
        {"cuStreamGetId", 12000, (void *)cuStreamGetId},
        {"cuStreamGetCtx", 9020, (void *)cuStreamGetCtx},
        {"cuStreamGetFlags", 5050, (void *)cuStreamGetFlags},
        {"cuStreamGetPriority", 5050, (void *)cuStreamGetPriority},
        {"cuStreamWaitEvent", 3020, (void *)cuStreamWaitEvent},
        {"cuStreamBeginCapture", 10010, (void *)cuStreamBeginCapture_v2},
        {"cuStreamEndCapture", 10000, (void *)cuStreamEndCapture},
        {"cuStreamIsCapturing", 10000, (void *)cuStreamIsCapturing},
        {"cuStreamGetCaptureInfo", 11030, (void *)cuStreamGetCaptureInfo_v2},
        {"cuStreamGetCaptureInfo", 12030, (void *)cuStreamGetCaptureInfo_v3},
        {"cuThreadExchangeStreamCaptureMode", 10010, (void *)cuThreadExchangeStreamCaptureMode},
        {"cuLaunchHostFunc", 10000, (void *)cuLaunchHostFunc},
        {"cuEventCreate", 2000, (void *)cuEventCreate},
        {"cuEventDestroy", 4000, (void *)cuEventDestroy_v2},
        {"cuEventRecord", 2000, (void *)cuEventRecord},
        {"cuEventRecordWithFlags", 11010, (void *)cuEventRecordWithFlags},
        {"cuEventQuery", 2000, (void *)cuEventQuery},
        {"cuEventSynchronize", 2000, (void *)cuEventSynchronize},
        {"cuEventElapsedTime", 2000, (void *)cuEventElapsedTime},
        {"cuEventElapsedTime", 12080, (void *)cuEventElapsedTime_v2},
        {"cuGraphCreate", 10000, (void *)cuGraphCreate},
        {"cuGraphDestroy", 10000, (void *)cuGraphDestroy},
        {"cuGraphGetNodes", 10000, (void *)cuGraphGetNodes},
        {"cuGraphNodeGetType", 10000, (void *)cuGraphNodeGetType},
        {"cuGraphKernelNodeGetParams", 12000, (void *)cuGraphKernelNodeGetParams_v2},
        {"cuGraphMemcpyNodeGetParams", 10000, (void *)cuGraphMemcpyNodeGetParams},
        {"cuGraphMemsetNodeGetParams", 10000, (void *)cuGraphMemsetNodeGetParams},
        {"cuGraphMemAllocNodeGetParams", 11040, (void *)cuGraphMemAllocNodeGetParams},
        {"cuGraphMemFreeNodeGetParams", 11040, (void *)cuGraphMemFreeNodeGetParams},
        {"cuGraphChildGraphNodeGetGraph", 10000, (void *)cuGraphChildGraphNodeGetGraph},
        {"cuGraphAddKernelNode", 12000, (void *)cuGraphAddKernelNode_v2},
        {"cuGraphAddMemcpyNode", 10000, (void *)cuGraphAddMemcpyNode},
        {"cuGraphAddMemsetNode", 10000, (void *)cuGraphAddMemsetNode},
        {"cuGraphAddChildGraphNode", 10000, (void *)cuGraphAddChildGraphNode},
        {"cuGraphExecUpdate", 12000, (void *)cuGraphExecUpdate_v2},
        {"cuGraphExecKernelNodeSetParams", 12000, (void *)cuGraphExecKernelNodeSetParams_v2},
        {"cuGraphInstantiate", 12000, (void *)cuGraphInstantiateWithFlags},
        {"cuGraphInstantiateWithFlags", 11040, (void *)cuGraphInstantiateWithFlags},
        {"cuGraphInstantiateWithParams", 12000, (void *)cuGraphInstantiateWithParams},
        {"cuGraphLaunch", 10000, (void *)cuGraphLaunch},
        {"cuGraphUpload", 11010, (void *)cuGraphUpload},
        {"cuGraphExecDestroy", 10000, (void *)cuGraphExecDestroy},
        {"cuUserObjectCreate", 11030, (void *)cuUserObjectCreate},
        {"cuUserObjectRetain", 11030, (void *)cuUserObjectRetain},
        {"cuUserObjectRelease", 11030, (void *)cuUserObjectRelease},
        {"cuGraphRetainUserObject", 11030, (void *)cuGraphRetainUserObject},
        {"cuGraphReleaseUserObject", 11030, (void *)cuGraphReleaseUserObject},
        {"cuModuleLoadData", 2000, (void *)cuModuleLoadData},
        {"cuModuleLoadDataEx", 2010, (void *)cuModuleLoadDataEx},
        {"cuModuleLoadFatBinary", 2000, (void *)cuModuleLoadFatBinary},
        {"cuModuleUnload", 2000, (void *)cuModuleUnload},
        {"cuModuleGetFunction", 2000, (void *)cuModuleGetFunction},
        {"cuLibraryLoadData", 12000, (void *)cuLibraryLoadData},
        {"cuLibraryUnload", 12000, (void *)cuLibraryUnload},
        {"cuLibraryGetKernel", 12000, (void *)cuLibraryGetKernel},
        {"cuKernelGetFunction", 12000, (void *)cuKernelGetFunction},
        {"cuKernelGetName", 12030, (void *)cuKernelGetName},
        {"cuKernelGetParamInfo", 12040, (void *)cuKernelGetParamInfo},
        {"cuFuncGetAttribute", 2020, (void *)cuFuncGetAttribute},
        {"cuFuncSetAttribute", 9000, (void *)cuFuncSetAttribute},
        {"cuOccupancyMaxActiveClusters", 11070, (void *)cuOccupancyMaxActiveClusters},
        {"cuTensorMapEncodeTiled", 12000, (void *)cuTensorMapEncodeTiled},
        {"cuFuncLoad", 12040, (void *)cuFuncLoad},
        {"cuFuncGetName", 12030, (void *)cuFuncGetName},
        {"cuFuncGetParamInfo", 12040, (void *)cuFuncGetParamInfo},
        {"cuLaunchKernel", 4000, (void *)cuLaunchKernel},
        {"cuLaunchKernelEx", 11060, (void *)cuLaunchKernelEx},
        {"cuGetErrorName", 6000, (void *)cuGetErrorName},
        {"cuGetErrorString", 6000, (void *)cuGetErrorString},
        {"cuGetProcAddress", 12000, (void *)cuGetProcAddress_v2},
};

static const struct entry *find(const char *name, int version, bool *known)
{
	const struct entry *best = NULL;
	*known = false;
	for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
		if (strcmp(entries[i].name, name))
			continue;
		*known = true;
		if (entries[i].since <= version && (!best || entries[i].since > best->since))
			best = &entries[i];
	}
	return best;
}

CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **function, int version,
                                     cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
	bool known = false;
	const struct entry *entry = NULL;
	if (!symbol || !function)
		return CUDA_ERROR_INVALID_VALUE;
	if (!(flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM))
		entry = find(symbol, version, &known);
	*function = entry ? entry->function : NULL;
	if (status && entry)
		*status = CU_GET_PROC_ADDRESS_SUCCESS;
	else if (status)
		*status = known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
		                : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return entry ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress
CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **function, int version,
                                  cuuint64_t flags);
CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **function, int version,
                                  cuuint64_t flags)
{
	return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
