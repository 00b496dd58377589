/* The CUDA contexts of the process: what the device is, our kernels in it, the memory we may take.
 * Contexts are told apart by the driver's id, because a handle can be used again after a reset. */
#include "device/device.h"

#include <stdlib.h>

#include "kernels/quantise.h"
#include "note/note.h"
#include "policy/policy.h"

#define CONTEXT_MAX 64

static struct qs_context *_Atomic contexts[CONTEXT_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct qs_context *find(uint64_t id)
{
	for (int i = 0; i < CONTEXT_MAX; i++) {
		struct qs_context *context =
		        atomic_load_explicit(&contexts[i], memory_order_acquire);
		if (!context || context->id == id)
			return context;
	}
	return NULL;
}

static void fail(struct qs_context *context, const char *step, CUresult error)
{
	context->reason = QS_REASON_ERROR;
	context->detail = step;
	qs_message_once(QS_REASON_ERROR, "%s failed on device %d: %s; its products pass through",
	                step, context->device, qs_error_name(error));
}

static void ask_device(struct qs_context *context, const struct qs_options *options)
{
	const struct qs_driver *cu = qs_driver_get();
	int major = 0, minor = 0;
	CUresult error = cu->cuCtxGetDevice(&context->device);
	if (!error)
		error = cu->cuDeviceGetAttribute(
		        &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, context->device);
	if (!error)
		error = cu->cuDeviceGetAttribute(
		        &minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, context->device);
	if (!error)
		error = cu->cuDeviceGetAttribute(
		        &context->sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, context->device);
	if (!error)
		error = cu->cuDeviceTotalMem_v2(&context->total, context->device);
	if (error) {
		fail(context, "asking for the device's properties", error);
		return;
	}
	context->cc = major * 10 + minor;
	const struct qs_memory *max = &options->max_mib;
	double limit =
	        max->percent ? (double)context->total * max->value / 100.0 : max->value * 1048576.0;
	context->limit = (size_t)limit;
}

/* Loads a kernel now rather than at its first launch, which may be inside a capture. */
static CUresult load_function(CUmodule module, const char *name, CUfunction *function)
{
	const struct qs_driver *cu = qs_driver_get();
	int binary = 0;
	CUresult error = cu->cuModuleGetFunction(function, module, name);
	if (!error)
		error = cu->cuFuncGetAttribute(&binary, CU_FUNC_ATTRIBUTE_BINARY_VERSION,
		                               *function);
	return error;
}

/* Zeroes memory before any stream's work, on a stream of its own: the legacy stream would wait for
 * the program's, and spoil a capture elsewhere. */
static CUresult zero(CUdeviceptr words, size_t count)
{
	const struct qs_driver *cu = qs_driver_get();
	CUstream stream;
	CUresult error = cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
	if (error)
		return error;
	error = cu->cuMemsetD32Async(words, 0, count, stream);
	if (!error)
		error = cu->cuStreamSynchronize(stream);
	cu->cuStreamDestroy_v2(stream);
	return error;
}

/* Without it the kernels measure before they cast: slower, not wrong. */
static void make_history(struct qs_context *context)
{
	const size_t bytes = QS_HISTORY_SLOTS * sizeof(uint32_t);
	const struct qs_driver *cu = qs_driver_get();
	CUdeviceptr history = 0;
	CUresult error = cu->cuMemAlloc_v2(&history, bytes);
	if (!error)
		error = zero(history, QS_HISTORY_SLOTS);
	if (error) {
		qs_message(QS_LOG_CACHE, "no memory for predictions on device %d: %s",
		           context->device, qs_error_name(error));
		if (history)
			cu->cuMemFree_v2(history);
		return;
	}
	context->history = history;
	atomic_fetch_add(&context->taken, bytes);
}

static void load_kernels(struct qs_context *context)
{
	const struct qs_driver *cu = qs_driver_get();
	CUmodule module;
	/* Another thread may be capturing in global mode, which forbids what a load may do. */
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	cu->cuThreadExchangeStreamCaptureMode(&mode);
	CUresult error = cu->cuModuleLoadData(&module, qs_fatbin_quantise);
	if (!error)
		error = load_function(module, QS_KERNEL_QUANTISE, &context->quantise);
	if (!error)
		error = load_function(module, QS_KERNEL_REPAIR, &context->repair);
	if (!error)
		error = load_function(module, QS_KERNEL_QUANTISE_ROWS, &context->rows);
	if (!error)
		error = load_function(module, QS_KERNEL_AMAX_COLUMNS, &context->amax_columns);
	if (!error)
		error = load_function(module, QS_KERNEL_CAST_COLUMNS, &context->cast_columns);
	if (error)
		fail(context, "loading the kernels", error);
	else
		make_history(context);
	cu->cuThreadExchangeStreamCaptureMode(&mode);
}

/* Below Ada there is no fp8 product; the kernels are not even loaded there. */
static struct qs_context *create(uint64_t id, CUcontext handle, const struct qs_options *options)
{
	struct qs_context *context = calloc(1, sizeof *context);
	if (!context)
		return NULL;
	context->id = id;
	context->handle = handle;
	context->reason = QS_REASON_AUTO;
	pthread_mutex_init(&context->lock, NULL);
	for (int i = 0; i < QS_SCRATCH_MAX; i++)
		pthread_mutex_init(&context->scratch[i].lock, NULL);
	ask_device(context, options);
	if (context->reason == QS_REASON_AUTO && context->cc < 89)
		context->reason = QS_REASON_ARCH;
	if (context->reason == QS_REASON_AUTO)
		load_kernels(context);
	return context;
}

static struct qs_context *add(uint64_t id, CUcontext handle, const struct qs_options *options)
{
	pthread_mutex_lock(&lock);
	struct qs_context *context = find(id);
	for (int i = 0; !context && i < CONTEXT_MAX; i++) {
		if (atomic_load(&contexts[i]))
			continue;
		context = create(id, handle, options);
		atomic_store_explicit(&contexts[i], context, memory_order_release);
		break;
	}
	pthread_mutex_unlock(&lock);
	return context;
}

struct qs_context *qs_context_current(const struct qs_options *options, bool may_create,
                                      enum qs_reason *why)
{
	const struct qs_driver *cu = qs_driver_get();
	CUcontext handle = NULL;
	unsigned long long id = 0;
	*why = QS_REASON_CONTEXT;
	if (!cu || cu->cuCtxGetCurrent(&handle) || !handle)
		return NULL;
	if (!cu->cuCtxGetId)
		id = (uintptr_t)handle;
	else if (cu->cuCtxGetId(handle, &id))
		return NULL;
	struct qs_context *context = find(id);
	if (context)
		return context;
	*why = may_create ? QS_REASON_MEMORY : QS_REASON_CAPTURE_COLD;
	return may_create ? add(id, handle, options) : NULL;
}

/* A product in a default stream would run on the current device even if its memory were another's;
 * cuBLAS goes by its handle, so such a call is not ours. */
bool qs_context_owns(const struct qs_context *context, const void *p)
{
	int device = -1;
	CUresult error = qs_driver_get()->cuPointerGetAttribute(
	        &device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (CUdeviceptr)(uintptr_t)p);
	return !error && device == context->device;
}

size_t qs_device_bytes(void)
{
	size_t bytes = 0;
	for (int i = 0; i < CONTEXT_MAX; i++) {
		struct qs_context *context = atomic_load(&contexts[i]);
		if (context)
			bytes += atomic_load(&context->taken);
	}
	return bytes;
}

void qs_context_forked(void)
{
	pthread_mutex_init(&lock, NULL);
	for (int i = 0; i < CONTEXT_MAX; i++)
		atomic_store(&contexts[i], NULL);
}
