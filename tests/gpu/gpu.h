/* The GPU as the tests and benchmarks of our own kernels use it: the driver by dlopen, the first
 * device's primary context, and the kernels embedded in the library.
 *
 * No CUDA runtime and no cuBLAS. Calls that fail end the program: there is nothing to test then.
 */
#ifndef QS_TESTS_GPU_H
#define QS_TESTS_GPU_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cuda.h>

#include "device/device.h"
#include "kernels/quantise.h"

#define GPU_API(X)                                                                                 \
	X(cuInit)                                                                                  \
	X(cuDeviceGetCount)                                                                        \
	X(cuDeviceGet)                                                                             \
	X(cuDeviceGetName)                                                                         \
	X(cuDeviceGetAttribute)                                                                    \
	X(cuDevicePrimaryCtxRetain)                                                                \
	X(cuCtxSetCurrent)                                                                         \
	X(cuGetErrorName)                                                                          \
	X(cuModuleLoadData)                                                                        \
	X(cuModuleGetFunction)                                                                     \
	X(cuFuncGetAttribute)                                                                      \
	X(cuLaunchKernel)                                                                          \
	X(cuLaunchKernelEx)                                                                        \
	X(cuMemAlloc_v2)                                                                           \
	X(cuMemFree_v2)                                                                            \
	X(cuMemGetInfo_v2)                                                                         \
	X(cuMemcpyHtoD_v2)                                                                         \
	X(cuMemcpyDtoH_v2)                                                                         \
	X(cuMemcpyDtoDAsync_v2)                                                                    \
	X(cuMemsetD8_v2)                                                                           \
	X(cuMemsetD16_v2)                                                                          \
	X(cuStreamSynchronize)                                                                     \
	X(cuEventCreate)                                                                           \
	X(cuEventRecord)                                                                           \
	X(cuEventSynchronize)                                                                      \
	X(cuEventElapsedTime)

struct gpu {
#define GPU_MEMBER(function) __typeof__(function) *function;
	GPU_API(GPU_MEMBER)
#undef GPU_MEMBER
	CUdevice device;             /* the first             */
	int sms;                     /* its multiprocessors   */
	int l2;                      /* bytes of its L2 cache */
	unsigned early;              /* 1 = kernels of quantise.cu wait for the work ahead */
	CUfunction quantise, repair; /* kernels/quantise.cu   */
	CUfunction rows, amax_columns, cast_columns;
};

static struct gpu gpu;

#define GPU_CHECK(call) gpu_check(call, #call, __FILE__, __LINE__)

static inline void gpu_check(CUresult result, const char *call, const char *file, int line)
{
	const char *name = NULL;
	if (result == CUDA_SUCCESS)
		return;
	if (gpu.cuGetErrorName)
		gpu.cuGetErrorName(result, &name);
	fprintf(stderr, "%s:%d: %s: %s (%d)\n", file, line, call, name ? name : "?", (int)result);
	exit(EXIT_FAILURE);
}

static inline int gpu_attribute(CUdevice_attribute attribute)
{
	int value = 0;
	GPU_CHECK(gpu.cuDeviceGetAttribute(&value, attribute, gpu.device));
	return value;
}

/* NULL, or why there is no GPU to work with. */
static inline const char *gpu_load(void)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	int count = 0;
	if (!driver)
		return "no libcuda.so.1";
#define GPU_LOAD(function)                                                                         \
	gpu.function = (__typeof__(gpu.function))dlsym(driver, #function);                         \
	if (!gpu.function)                                                                         \
		return "libcuda.so.1 lacks " #function;
	GPU_API(GPU_LOAD)
#undef GPU_LOAD
	if (gpu.cuInit(0) || gpu.cuDeviceGetCount(&count) || count == 0)
		return "no GPU";
	return NULL;
}

static inline void gpu_open(void)
{
	CUcontext context;
	CUmodule module;
	const char *missing = gpu_load();
	if (missing) {
		fprintf(stderr, "%s\n", missing);
		exit(EXIT_FAILURE);
	}
	GPU_CHECK(gpu.cuDeviceGet(&gpu.device, 0));
	GPU_CHECK(gpu.cuDevicePrimaryCtxRetain(&context, gpu.device));
	GPU_CHECK(gpu.cuCtxSetCurrent(context));
	gpu.sms = gpu_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
	gpu.l2 = gpu_attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
	GPU_CHECK(gpu.cuModuleLoadData(&module, qs_fatbin_quantise));
	GPU_CHECK(gpu.cuModuleGetFunction(&gpu.quantise, module, QS_KERNEL_QUANTISE));
	GPU_CHECK(gpu.cuModuleGetFunction(&gpu.repair, module, QS_KERNEL_REPAIR));
	GPU_CHECK(gpu.cuModuleGetFunction(&gpu.rows, module, QS_KERNEL_QUANTISE_ROWS));
	GPU_CHECK(gpu.cuModuleGetFunction(&gpu.amax_columns, module, QS_KERNEL_AMAX_COLUMNS));
	GPU_CHECK(gpu.cuModuleGetFunction(&gpu.cast_columns, module, QS_KERNEL_CAST_COLUMNS));
	int ptx = 0;
	GPU_CHECK(gpu.cuFuncGetAttribute(&ptx, CU_FUNC_ATTRIBUTE_PTX_VERSION, gpu.repair));
	gpu.early = ptx >= 90;
}

/* Ends the program with status 77, which means skipped, if there is no GPU. Asks in a child: a
 * process that has initialised the driver cannot use it in children of its own, and Check forks. */
static inline void gpu_require(void)
{
	int status = 0;
	fflush(NULL);
	const pid_t child = fork();
	if (child == 0) {
		const char *missing = gpu_load();
		if (missing)
			dprintf(STDOUT_FILENO, "%s\n", missing);
		_exit(missing ? 77 : 0);
	}
	if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) {
		fprintf(stderr, "asking for a GPU failed\n");
		exit(EXIT_FAILURE);
	}
	if (WEXITSTATUS(status))
		exit(WEXITSTATUS(status));
}

static inline CUdeviceptr gpu_alloc(size_t bytes)
{
	CUdeviceptr memory = 0;
	GPU_CHECK(gpu.cuMemAlloc_v2(&memory, bytes));
	return memory;
}

/* Launches on the legacy default stream, with the one argument that every kernel takes. */
static inline void gpu_launch(CUfunction kernel, unsigned blocks, unsigned threads, void *argument)
{
	void *params[] = {argument};
	GPU_CHECK(gpu.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, NULL, params, NULL));
}

/* A kernel of quantise.cu, started before the work ahead ends where it allows that, as the library
 * does. */
static inline void gpu_launch_early(CUfunction kernel, unsigned blocks, unsigned threads,
                                    struct qs_quantise_args *args)
{
	CUlaunchAttribute early = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
	                           .value.programmaticStreamSerializationAllowed = 1};
	const CUlaunchConfig config = {.gridDimX = blocks,
	                               .gridDimY = 1,
	                               .gridDimZ = 1,
	                               .blockDimX = threads,
	                               .blockDimY = 1,
	                               .blockDimZ = 1,
	                               .attrs = &early,
	                               .numAttrs = gpu.early};
	void *params[] = {args};
	GPU_CHECK(gpu.cuLaunchKernelEx(&config, kernel, params, NULL));
}

#endif
