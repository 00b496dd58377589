/* The CUDA contexts of the process: what the device is, our kernels in it, the memory we may take.
 * Contexts are told apart by the driver's id, because a handle can be used again after a reset. */
#include "device/device.h"

#include <stdlib.h>

#include "kernels/compare.h"
#include "kernels/hash.h"
#include "kernels/nf4.h"
#include "kernels/quantise.h"
#include "kernels/sample.h"
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

static size_t bytes_of(const struct qs_memory *memory, size_t total)
{
	return (size_t)(memory->percent ? (double)total * memory->value / 100.0
	                                : memory->value * 1048576.0);
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
	context->limit = bytes_of(&options->max_mib, context->total);
	context->measuring_limit = bytes_of(&options->tune_mib, context->total);
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

/* A kernel's name and where its function goes. */
struct kernel {
	const char *name;
	CUfunction *function;
};

static CUresult load(CUmodule *module, const void *image, const struct kernel *kernels,
                     size_t count)
{
	CUresult error = qs_driver_get()->cuModuleLoadData(module, image);
	for (size_t i = 0; i < count && !error; i++)
		error = load_function(*module, kernels[i].name, kernels[i].function);
	return error;
}

#define COUNT(table) (sizeof(table) / sizeof *(table))

static CUresult load_quantise(struct qs_context *context)
{
	CUmodule module;
	const struct kernel kernels[] = {
	        {QS_KERNEL_QUANTISE, &context->quantise},
	        {QS_KERNEL_REPAIR, &context->repair},
	        {QS_KERNEL_QUANTISE_ROWS, &context->rows},
	        {QS_KERNEL_AMAX_COLUMNS, &context->amax_columns},
	        {QS_KERNEL_CAST_COLUMNS, &context->cast_columns},
	        {QS_KERNEL_FP8_SAMPLE, &context->fp8_sample},
	};
	return load(&module, qs_fatbin_quantise, kernels, COUNT(kernels));
}

static CUresult load_hash(struct qs_context *context)
{
	CUmodule module;
	const struct kernel kernels[] = {
	        {QS_KERNEL_HASH, &context->hash},
	        {QS_KERNEL_HASH_JUDGE, &context->hash_judge},
	        {QS_KERNEL_HASH_COMMIT, &context->hash_commit},
	};
	return load(&module, qs_fatbin_hash, kernels, COUNT(kernels));
}

static CUresult load_compare(struct qs_context *context)
{
	CUmodule module;
	const struct kernel kernels[] = {{QS_KERNEL_COMPARE, &context->compare}};
	return load(&module, qs_fatbin_compare, kernels, COUNT(kernels));
}

/* How many clusters of 1, 2 and 4 blocks of this kernel run at once. */
static CUresult count_clusters(CUfunction function, struct qs_product_device *device)
{
	CUlaunchAttribute cluster = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION};
	CUlaunchConfig config = {
	        .gridDimX = (unsigned)device->sms * 4,
	        .gridDimY = 1,
	        .gridDimZ = 1,
	        .blockDimX = QS_HOPPER_THREADS,
	        .blockDimY = 1,
	        .blockDimZ = 1,
	        .sharedMemBytes = QS_HOPPER_SHARED,
	        .attrs = &cluster,
	        .numAttrs = 1,
	};
	CUresult error = CUDA_SUCCESS;
	cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1;
	for (int i = 0; i < 3 && !error; i++) {
		cluster.value.clusterDim.x = 1u << i;
		error = qs_driver_get()->cuOccupancyMaxActiveClusters(&device->clusters[i],
		                                                      function, &config);
	}
	return error;
}

/* Kernels of products, which want more shared memory than a launch may have by default. */
static CUresult load_products(CUmodule module, int shared, const char *const *names,
                              CUfunction *functions, int count)
{
	CUresult error = CUDA_SUCCESS;
	for (int i = 0; i < count && !error; i++) {
		error = load_function(module, names[i], &functions[i]);
		if (!error)
			error = qs_driver_get()->cuFuncSetAttribute(
			        functions[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
			        shared);
	}
	return error;
}

static bool load_all_products(struct qs_context *context, CUmodule module)
{
	const struct qs_driver *cu = qs_driver_get();
	context->products.sms = context->sms;
	context->products.hopper = context->cc == 90;
	const int shared = context->products.hopper ? QS_HOPPER_SHARED : QS_SHARED_BYTES;
	if (!cu->cuLaunchKernelEx || !cu->cuOccupancyMaxActiveClusters ||
	    load_products(module, shared, qs_kernel_w4a16, context->w4a16, QS_PRODUCT_KINDS) ||
	    load_products(module, shared, qs_kernel_w8a16, context->w8a16, QS_PRODUCT_KINDS))
		return false;
	return !context->products.hopper || !count_clusters(context->w4a16[0], &context->products);
}

/* Those for more tokens, which only Hopper runs. */
static bool load_wide(struct qs_context *context, CUmodule module)
{
	return context->products.hopper && qs_driver_get()->cuTensorMapEncodeTiled &&
	       !load_products(module, QS_WIDE_SHARED, qs_kernel_wide, context->wide, QS_WIDE_KINDS);
}

/* Where a driver cannot launch clusters, or a device has too little shared memory, there are no
 * products of few tokens, and all else works. */
static CUresult load_nf4(struct qs_context *context)
{
	CUmodule module;
	const struct kernel kernels[] = {
	        {QS_KERNEL_NF4_PACK, &context->nf4_pack},
	        {QS_KERNEL_FP8_PACK, &context->fp8_pack},
	        {QS_KERNEL_NF4_EXPAND, &context->nf4_expand},
	        {QS_KERNEL_NF4_SAMPLE, &context->nf4_sample},
	};
	CUresult error = load(&module, qs_fatbin_nf4, kernels, COUNT(kernels));
	context->few_tokens = !error && load_all_products(context, module);
	context->many_tokens = context->few_tokens && load_wide(context, module);
	return error;
}

/* Kernels wait for the work ahead of them themselves if they were compiled for 9.0 or later; what a
 * driver translates for newer devices may have been compiled for less. */
static bool starts_early(CUfunction kernel)
{
	const struct qs_driver *cu = qs_driver_get();
	int version = 0;
	return cu->cuLaunchKernelEx &&
	       !cu->cuFuncGetAttribute(&version, CU_FUNC_ATTRIBUTE_PTX_VERSION, kernel) &&
	       version >= 90;
}

/* Edges have had a kind since the driver of CUDA 12.3. */
#define EDGES_SINCE 12030

static bool knows_edges(void)
{
	const struct qs_driver *cu = qs_driver_get();
	int version = 0;
	return cu->cuGraphNodeGetType && cu->cuDriverGetVersion &&
	       !cu->cuDriverGetVersion(&version) && version >= EDGES_SINCE;
}

/* The kernels of all modules were compiled for the same devices. */
static void allow_early(struct qs_context *context, enum qs_early early)
{
	context->starts_early = early != QS_EARLY_NEVER && starts_early(context->repair);
	context->captures_early =
	        context->starts_early && early == QS_EARLY_ALWAYS && knows_edges();
}

static void load_kernels(struct qs_context *context, const struct qs_options *options)
{
	const struct qs_driver *cu = qs_driver_get();
	/* Another thread may be capturing in global mode, which forbids what a load may do. */
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	cu->cuThreadExchangeStreamCaptureMode(&mode);
	CUresult error = load_quantise(context);
	if (!error)
		error = load_hash(context);
	if (!error)
		error = load_compare(context);
	if (!error)
		error = load_nf4(context);
	if (error)
		fail(context, "loading the kernels", error);
	else
		make_history(context);
	if (!error)
		allow_early(context, options->early);
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
		load_kernels(context, options);
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

static bool current(CUcontext *handle, uint64_t *id)
{
	const struct qs_driver *cu = qs_driver_get();
	unsigned long long told = 0;
	*handle = NULL;
	if (!cu || cu->cuCtxGetCurrent(handle) || !*handle)
		return false;
	if (cu->cuCtxGetId && cu->cuCtxGetId(*handle, &told))
		return false;
	*id = cu->cuCtxGetId ? told : (uintptr_t)*handle;
	return true;
}

bool qs_context_id(uint64_t *id)
{
	CUcontext handle;
	return current(&handle, id);
}

struct qs_context *qs_context_current(const struct qs_options *options, bool may_create,
                                      enum qs_reason *why)
{
	CUcontext handle;
	uint64_t id;
	*why = QS_REASON_CONTEXT;
	if (!current(&handle, &id))
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

bool qs_is_device_memory(const void *p)
{
	const struct qs_driver *cu = qs_driver_get();
	unsigned type = 0, managed = 1;
	CUdeviceptr pointer = (CUdeviceptr)(uintptr_t)p;
	return !cu->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) &&
	       type == CU_MEMORYTYPE_DEVICE &&
	       !cu->cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer) &&
	       !managed;
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
