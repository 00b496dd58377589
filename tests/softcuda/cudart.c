/* The runtime API over the driver API, as the real one is: it initialises the driver and makes the
 * primary context of the thread's device current at first use, and keeps the last error of each
 * thread. Runtime and driver errors share their numbers since CUDA 10.1, handles their types. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#define DEVICES 2

static _Thread_local int current_device;
static _Thread_local cudaError_t last_error;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool retained[DEVICES];

/* What submits work is looked up as the real library looks up the whole driver: by dlsym, which
 * finds cuGetProcAddress_v2, which finds the rest. */
#define LOOKED_UP(X)                                                                               \
	X(GraphLaunch)                                                                             \
	X(LaunchHostFunc)                                                                          \
	X(MemFree)                                                                                 \
	X(MemFreeAsync)                                                                            \
	X(MemFreeHost)                                                                             \
	X(Memcpy)                                                                                  \
	X(MemcpyAsync)                                                                             \
	X(MemcpyDtoD)                                                                              \
	X(MemcpyDtoDAsync)                                                                         \
	X(MemcpyDtoH)                                                                              \
	X(MemcpyDtoHAsync)                                                                         \
	X(MemcpyHtoD)                                                                              \
	X(MemcpyHtoDAsync)                                                                         \
	X(MemsetD8)                                                                                \
	X(MemsetD8Async)                                                                           \
	X(StreamWaitEvent)

static struct driver {
#define MEMBER(name) __typeof__(cu##name) *name;
	LOOKED_UP(MEMBER)
#undef MEMBER
} looked_up;

static void look_up(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	__typeof__(cuGetProcAddress) *ask = NULL;
	if (library)
		ask = (__typeof__(ask))dlsym(library, "cuGetProcAddress_v2");
	if (!ask)
		return;
#define FIND(name)                                                                                 \
	ask("cu" #name, (void **)&looked_up.name, CUDA_VERSION, CU_GET_PROC_ADDRESS_LEGACY_STREAM, \
	    NULL);
	LOOKED_UP(FIND)
#undef FIND
}

static const struct driver *driver(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	pthread_once(&once, look_up);
	return &looked_up;
}

static cudaError_t keep(cudaError_t error)
{
	if (error && error != cudaErrorNotReady)
		last_error = error;
	return error;
}

static cudaError_t done(CUresult result)
{
	return keep((cudaError_t)result);
}

static CUresult make_current(int device)
{
	CUcontext context = NULL;
	pthread_mutex_lock(&lock);
	CUresult result = cuDevicePrimaryCtxRetain(&context, device);
	if (!result && retained[device])
		result = cuDevicePrimaryCtxRelease(device);
	retained[device] = retained[device] || !result;
	pthread_mutex_unlock(&lock);
	return result ? result : cuCtxSetCurrent(context);
}

/* Every call that needs a context begins with this. */
static CUresult start(void)
{
	CUcontext context = NULL;
	CUresult result = cuInit(0);
	if (!result)
		result = cuCtxGetCurrent(&context);
	return result || context ? result : make_current(current_device);
}

static CUdeviceptr address(const void *pointer)
{
	return (CUdeviceptr)(uintptr_t)pointer;
}

cudaError_t CUDARTAPI cudaGetLastError(void)
{
	cudaError_t error = last_error;
	last_error = cudaSuccess;
	return error;
}

cudaError_t CUDARTAPI cudaPeekAtLastError(void)
{
	return last_error;
}

static const struct {
	cudaError_t error;
	const char *name;
} names[] = {
        {cudaSuccess, "cudaSuccess"},
        {cudaErrorInvalidValue, "cudaErrorInvalidValue"},
        {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation"},
        {cudaErrorInitializationError, "cudaErrorInitializationError"},
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice"},
        {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection"},
        {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized"},
        {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle"},
        {cudaErrorIllegalState, "cudaErrorIllegalState"},
        {cudaErrorNotReady, "cudaErrorNotReady"},
        {cudaErrorIllegalAddress, "cudaErrorIllegalAddress"},
        {cudaErrorContextIsDestroyed, "cudaErrorContextIsDestroyed"},
        {cudaErrorNotSupported, "cudaErrorNotSupported"},
        {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported"},
        {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated"},
        {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge"},
        {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched"},
        {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined"},
        {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation"},
        {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit"},
        {cudaErrorCapturedEvent, "cudaErrorCapturedEvent"},
        {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread"},
};

const char *CUDARTAPI cudaGetErrorName(cudaError_t error)
{
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (names[i].error == error)
			return names[i].name;
	return "unrecognized error code";
}

const char *CUDARTAPI cudaGetErrorString(cudaError_t error)
{
	const char *text = NULL;
	cuGetErrorString((CUresult)error, &text);
	return text ? text : "unrecognized error code";
}

cudaError_t CUDARTAPI cudaRuntimeGetVersion(int *version)
{
	*version = CUDART_VERSION;
	return cudaSuccess;
}

cudaError_t CUDARTAPI cudaDriverGetVersion(int *version)
{
	return done(cuDriverGetVersion(version));
}

cudaError_t CUDARTAPI cudaGetDeviceCount(int *count)
{
	CUresult result = cuInit(0);
	return done(result ? result : cuDeviceGetCount(count));
}

cudaError_t CUDARTAPI cudaSetDevice(int device)
{
	CUresult result = cuInit(0);
	if (!result && (device < 0 || device >= DEVICES))
		result = CUDA_ERROR_INVALID_DEVICE;
	if (!result)
		result = make_current(device);
	if (!result)
		current_device = device;
	return done(result);
}

cudaError_t CUDARTAPI cudaGetDevice(int *device)
{
	CUcontext context = NULL;
	CUresult result = cuInit(0);
	*device = current_device;
	if (!result)
		result = cuCtxGetCurrent(&context);
	return done(result || !context ? result : cuCtxGetDevice(device));
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
	CUresult result = cuInit(0);
	return done(result ? result
	                   : cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device));
}

static int attribute(CUdevice_attribute which, int device)
{
	int value = 0;
	cuDeviceGetAttribute(&value, which, device);
	return value;
}

cudaError_t CUDARTAPI cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
	CUresult result = cuInit(0);
	memset(p, 0, sizeof *p);
	if (!result)
		result = cuDeviceGetName(p->name, sizeof p->name, device);
	if (!result)
		result = cuDeviceTotalMem(&p->totalGlobalMem, device);
	if (result)
		return done(result);
	p->major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
	p->minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
	p->multiProcessorCount = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
	p->maxThreadsPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, device);
	p->warpSize = attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE, device);
	p->l2CacheSize = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device);
	p->sharedMemPerBlock =
	        (size_t)attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, device);
	p->unifiedAddressing = attribute(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, device);
	return cudaSuccess;
}

cudaError_t CUDARTAPI cudaDeviceSynchronize(void)
{
	CUresult result = start();
	return done(result ? result : cuCtxSynchronize());
}

cudaError_t CUDARTAPI cudaDeviceReset(void)
{
	CUresult result = start();
	return done(result ? result : cuDevicePrimaryCtxReset(current_device));
}

cudaError_t CUDARTAPI cudaMalloc(void **pointer, size_t bytes)
{
	CUdeviceptr memory = 0;
	CUresult result = start();
	if (!result && bytes)
		result = cuMemAlloc(&memory, bytes);
	if (!result)
		*pointer = (void *)(uintptr_t)memory;
	return done(result);
}

cudaError_t CUDARTAPI cudaFree(void *pointer)
{
	CUresult result = start();
	return done(result || !pointer ? result : driver()->MemFree(address(pointer)));
}

cudaError_t CUDARTAPI cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream)
{
	CUdeviceptr memory = 0;
	CUresult result = start();
	if (!result)
		result = cuMemAllocAsync(&memory, bytes, stream);
	if (!result)
		*pointer = (void *)(uintptr_t)memory;
	return done(result);
}

cudaError_t CUDARTAPI cudaFreeAsync(void *pointer, cudaStream_t stream)
{
	CUresult result = start();
	return done(result ? result : driver()->MemFreeAsync(address(pointer), stream));
}

cudaError_t CUDARTAPI cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
	CUresult result = start();
	return done(result ? result : cuMemHostAlloc(pointer, bytes, flags));
}

cudaError_t CUDARTAPI cudaMallocHost(void **pointer, size_t bytes)
{
	return cudaHostAlloc(pointer, bytes, 0);
}

cudaError_t CUDARTAPI cudaFreeHost(void *pointer)
{
	CUresult result = start();
	return done(result || !pointer ? result : driver()->MemFreeHost(pointer));
}

cudaError_t CUDARTAPI cudaMemGetInfo(size_t *available, size_t *total)
{
	CUresult result = start();
	return done(result ? result : cuMemGetInfo(available, total));
}

cudaError_t CUDARTAPI cudaMemcpy(void *target, const void *source, size_t bytes,
                                 enum cudaMemcpyKind kind)
{
	CUresult result = start();
	if (result)
		return done(result);
	switch (kind) {
	case cudaMemcpyHostToDevice:
		return done(driver()->MemcpyHtoD(address(target), source, bytes));
	case cudaMemcpyDeviceToHost:
		return done(driver()->MemcpyDtoH(target, address(source), bytes));
	case cudaMemcpyDeviceToDevice:
		return done(driver()->MemcpyDtoD(address(target), address(source), bytes));
	case cudaMemcpyHostToHost:
	case cudaMemcpyDefault:
		return done(driver()->Memcpy(address(target), address(source), bytes));
	default:
		return keep(cudaErrorInvalidMemcpyDirection);
	}
}

cudaError_t CUDARTAPI cudaMemcpyAsync(void *target, const void *source, size_t bytes,
                                      enum cudaMemcpyKind kind, cudaStream_t stream)
{
	CUresult result = start();
	if (result)
		return done(result);
	switch (kind) {
	case cudaMemcpyHostToDevice:
		return done(driver()->MemcpyHtoDAsync(address(target), source, bytes, stream));
	case cudaMemcpyDeviceToHost:
		return done(driver()->MemcpyDtoHAsync(target, address(source), bytes, stream));
	case cudaMemcpyDeviceToDevice:
		return done(
		        driver()->MemcpyDtoDAsync(address(target), address(source), bytes, stream));
	case cudaMemcpyHostToHost:
	case cudaMemcpyDefault:
		return done(driver()->MemcpyAsync(address(target), address(source), bytes, stream));
	default:
		return keep(cudaErrorInvalidMemcpyDirection);
	}
}

cudaError_t CUDARTAPI cudaMemset(void *target, int value, size_t bytes)
{
	CUresult result = start();
	return done(result ? result
	                   : driver()->MemsetD8(address(target), (unsigned char)value, bytes));
}

cudaError_t CUDARTAPI cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream)
{
	CUresult result = start();
	return done(result ? result
	                   : driver()->MemsetD8Async(address(target), (unsigned char)value, bytes,
	                                             stream));
}

cudaError_t CUDARTAPI cudaPointerGetAttributes(struct cudaPointerAttributes *out,
                                               const void *pointer)
{
	unsigned type = 0;
	int device = -2;
	void *device_pointer = NULL, *host_pointer = NULL;
	CUpointer_attribute asked[] = {
	        CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
	        CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_HOST_POINTER};
	void *answers[] = {&type, &device, &device_pointer, &host_pointer};
	CUresult result = start();
	if (!result)
		result = cuPointerGetAttributes(4, asked, answers, address(pointer));
	if (result)
		return done(result);
	memset(out, 0, sizeof *out);
	out->type = (enum cudaMemoryType)type; /* 0 unregistered, 1 host, 2 device in both APIs */
	out->device = device;
	out->devicePointer = device_pointer;
	out->hostPointer = type ? host_pointer : (void *)(uintptr_t)pointer;
	return cudaSuccess;
}

cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags,
                                                   int priority)
{
	CUresult result = start();
	return done(result ? result : cuStreamCreateWithPriority(stream, flags, priority));
}

cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
	return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t CUDARTAPI cudaStreamCreate(cudaStream_t *stream)
{
	return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream)
{
	CUresult result = start();
	return done(result ? result : cuStreamDestroy(stream));
}

cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream)
{
	CUresult result = start();
	return done(result ? result : cuStreamSynchronize(stream));
}

cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t stream)
{
	CUresult result = start();
	return done(result ? result : cuStreamQuery(stream));
}

cudaError_t CUDARTAPI cudaStreamGetId(cudaStream_t stream, unsigned long long *id)
{
	CUresult result = start();
	return done(result ? result : cuStreamGetId(stream, id));
}

cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                          unsigned int flags)
{
	CUresult result = start();
	return done(result ? result : driver()->StreamWaitEvent(stream, event, flags));
}

cudaError_t CUDARTAPI cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
	CUresult result = start();
	return done(result ? result : driver()->LaunchHostFunc(stream, function, data));
}

cudaError_t CUDARTAPI cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
	CUresult result = start();
	return done(result ? result : cuStreamBeginCapture(stream, (CUstreamCaptureMode)mode));
}

cudaError_t CUDARTAPI cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
	CUresult result = start();
	return done(result ? result : cuStreamEndCapture(stream, graph));
}

cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t stream,
                                            enum cudaStreamCaptureStatus *status)
{
	CUstreamCaptureStatus answer = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult result = start();
	if (!result)
		result = cuStreamIsCapturing(stream, &answer);
	*status = (enum cudaStreamCaptureStatus)answer;
	return done(result);
}

#if CUDART_VERSION >= 13000
cudaError_t CUDARTAPI cudaStreamGetCaptureInfo(cudaStream_t stream,
                                               enum cudaStreamCaptureStatus *status,
                                               unsigned long long *id, cudaGraph_t *graph,
                                               const cudaGraphNode_t **dependencies,
                                               const cudaGraphEdgeData **edges, size_t *count)
#else
cudaError_t CUDARTAPI cudaStreamGetCaptureInfo(cudaStream_t stream,
                                               enum cudaStreamCaptureStatus *status,
                                               unsigned long long *id, cudaGraph_t *graph,
                                               const cudaGraphNode_t **dependencies, size_t *count)
#endif
{
	CUstreamCaptureStatus answer = CU_STREAM_CAPTURE_STATUS_NONE;
	cuuint64_t capture = 0;
	CUresult result = start();
#if CUDART_VERSION >= 13000
	if (edges)
		*edges = NULL;
	if (!result)
		result = cuStreamGetCaptureInfo(stream, &answer, &capture, graph, dependencies,
		                                NULL, count);
#else
	if (!result)
		result = cuStreamGetCaptureInfo(stream, &answer, &capture, graph, dependencies,
		                                count);
#endif
	*status = (enum cudaStreamCaptureStatus)answer;
	if (id)
		*id = capture;
	return done(result);
}

cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
	CUstreamCaptureMode exchanged = (CUstreamCaptureMode)*mode;
	CUresult result = start();
	if (!result)
		result = cuThreadExchangeStreamCaptureMode(&exchanged);
	*mode = (enum cudaStreamCaptureMode)exchanged;
	return done(result);
}

cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
	CUresult result = start();
	return done(result ? result : cuEventCreate(event, flags));
}

#undef cudaEventCreate
cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t *event)
{
	return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event)
{
	CUresult result = start();
	return done(result ? result : cuEventDestroy(event));
}

cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
	CUresult result = start();
	return done(result ? result : cuEventRecord(event, stream));
}

cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event)
{
	CUresult result = start();
	return done(result ? result : cuEventQuery(event));
}

cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event)
{
	CUresult result = start();
	return done(result ? result : cuEventSynchronize(event));
}

cudaError_t CUDARTAPI cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
	CUresult result = start();
	return done(result ? result : cuEventElapsedTime(milliseconds, begin, end));
}

cudaError_t CUDARTAPI cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                           unsigned long long flags)
{
	CUresult result = start();
	return done(result ? result : cuGraphInstantiateWithFlags(executable, graph, flags));
}

cudaError_t CUDARTAPI cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                                    unsigned long long flags)
{
	return cudaGraphInstantiate(executable, graph, flags);
}

cudaError_t CUDARTAPI cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
	CUresult result = start();
	return done(result ? result : driver()->GraphLaunch(executable, stream));
}

cudaError_t CUDARTAPI cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
	CUresult result = start();
	return done(result ? result : cuGraphGetNodes(graph, nodes, count));
}

cudaError_t CUDARTAPI cudaGraphDestroy(cudaGraph_t graph)
{
	CUresult result = start();
	return done(result ? result : cuGraphDestroy(graph));
}

cudaError_t CUDARTAPI cudaGraphExecDestroy(cudaGraphExec_t executable)
{
	CUresult result = start();
	return done(result ? result : cuGraphExecDestroy(executable));
}

cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char *symbol, void **function,
                                                       unsigned int version,
                                                       unsigned long long flags,
                                                       enum cudaDriverEntryPointQueryResult *status)
{
	CUdriverProcAddressQueryResult answer = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	CUresult result = cuInit(0);
	if (result)
		return done(result);
	cuGetProcAddress(symbol, function, (int)version, flags, &answer);
	if (status)
		*status = (enum cudaDriverEntryPointQueryResult)answer;
	return cudaSuccess;
}
