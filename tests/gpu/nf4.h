/* The kernels of kernels/nf4.cu as their test and their benchmark launch them. */
#ifndef QS_TESTS_GPU_NF4_H
#define QS_TESTS_GPU_NF4_H

#include "kernels/map.h"
#include "kernels/nf4.h"
#include "tests/gpu/gpu.h"

struct nf4_gpu {
	__typeof__(cuFuncSetAttribute) *cuFuncSetAttribute;
	__typeof__(cuLaunchKernelEx) *cuLaunchKernelEx;
	__typeof__(cuOccupancyMaxActiveClusters) *cuOccupancyMaxActiveClusters;
	__typeof__(cuTensorMapEncodeTiled) *cuTensorMapEncodeTiled;
	__typeof__(cuStreamCreate) *cuStreamCreate;
	__typeof__(cuStreamDestroy) *cuStreamDestroy;
	__typeof__(cuStreamBeginCapture) *cuStreamBeginCapture;
	__typeof__(cuStreamEndCapture) *cuStreamEndCapture;
	CUresult (*cuGraphInstantiate)(CUgraphExec *, CUgraph, unsigned long long);
	__typeof__(cuGraphLaunch) *cuGraphLaunch;
	__typeof__(cuGraphDestroy) *cuGraphDestroy;
	__typeof__(cuGraphExecDestroy) *cuGraphExecDestroy;
	struct qs_product_device device;
	CUfunction pack, fp8_pack, expand;
	CUfunction product[2][QS_PRODUCT_KINDS]; /* by fp8, T */
	CUfunction wide[QS_WIDE_KINDS];          /* on Hopper */
};

static struct nf4_gpu nf4;

static inline CUfunction nf4_function(CUmodule module, const char *name)
{
	CUfunction function;
	GPU_CHECK(gpu.cuModuleGetFunction(&function, module, name));
	return function;
}

/* Products take more shared memory than a kernel gets unasked. */
static inline CUfunction nf4_product_function(CUmodule module, const char *name, int shared)
{
	const CUfunction function = nf4_function(module, name);
	GPU_CHECK(nf4.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
	                                 shared));
	return function;
}

/* A launch of a product; `attributes` has room for two. `early`: it may begin before the work ahead
 * in the stream has ended. */
static inline CUlaunchConfig nf4_config(const struct qs_product_geometry *geometry,
                                        CUlaunchAttribute *attributes, int early, CUstream stream)
{
	CUlaunchConfig config = {.gridDimX = geometry->blocks, .gridDimY = 1, .gridDimZ = 1};
	config.blockDimX = geometry->threads;
	config.blockDimY = config.blockDimZ = 1;
	config.sharedMemBytes = geometry->shared;
	config.hStream = stream;
	config.attrs = attributes;
	attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
	attributes[0].value.clusterDim.x = geometry->cluster;
	attributes[0].value.clusterDim.y = attributes[0].value.clusterDim.z = 1;
	attributes[1].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
	attributes[1].value.programmaticStreamSerializationAllowed = 1;
	config.numAttrs = nf4.device.hopper ? 1 + (early != 0) : 0;
	return config;
}

/* `mapped`: X is read through a map if it can be. */
static inline CUresult nf4_launch(const struct qs_product_args *product,
                                  const struct qs_product_geometry *geometry, int fp8, int mapped,
                                  int early, CUstream stream)
{
	CUlaunchAttribute attributes[2];
	struct qs_mapped_args args = {.product = *product};
	void *params[] = {&args};
	const CUlaunchConfig config = nf4_config(geometry, attributes, early, stream);
	if (nf4.device.hopper && mapped)
		qs_thin_map(nf4.cuTensorMapEncodeTiled, &args, geometry->kind);
	return nf4.cuLaunchKernelEx(&config, nf4.product[fp8][geometry->kind], params, NULL);
}

static inline CUresult nf4_launch_wide(const struct qs_product_args *product,
                                       const struct qs_product_geometry *geometry, int early,
                                       CUstream stream)
{
	CUlaunchAttribute attributes[2];
	struct qs_mapped_args args = {.product = *product};
	void *params[] = {&args};
	const CUlaunchConfig config = nf4_config(geometry, attributes, early, stream);
	const CUresult error = qs_wide_map(nf4.cuTensorMapEncodeTiled, &args, geometry->kind);
	return error ? error
	             : nf4.cuLaunchKernelEx(&config, nf4.wide[geometry->kind], params, NULL);
}

static inline void nf4_describe_device(void)
{
	for (int i = 0; i < 3; i++) {
		const struct qs_product_geometry geometry = {.blocks = 1u << i,
		                                             .threads = QS_HOPPER_THREADS,
		                                             .cluster = 1u << i,
		                                             .shared = QS_HOPPER_SHARED};
		CUlaunchAttribute attributes[2];
		const CUlaunchConfig config = nf4_config(&geometry, attributes, 0, NULL);
		GPU_CHECK(nf4.cuOccupancyMaxActiveClusters(&nf4.device.clusters[i],
		                                           nf4.product[0][0], &config));
	}
}

static inline void *nf4_symbol(void *library, const char *name)
{
	void *address = library ? dlsym(library, name) : NULL;
	if (!address) {
		fprintf(stderr, "%s is missing\n", name);
		exit(EXIT_FAILURE);
	}
	return address;
}

static inline void nf4_load_driver(void)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
#define NF4_LOAD(function, name) *(void **)&nf4.function = nf4_symbol(driver, name)
	NF4_LOAD(cuFuncSetAttribute, "cuFuncSetAttribute");
	NF4_LOAD(cuLaunchKernelEx, "cuLaunchKernelEx");
	NF4_LOAD(cuOccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters");
	NF4_LOAD(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
	NF4_LOAD(cuStreamCreate, "cuStreamCreate");
	NF4_LOAD(cuStreamDestroy, "cuStreamDestroy_v2");
	NF4_LOAD(cuStreamBeginCapture, "cuStreamBeginCapture_v2");
	NF4_LOAD(cuStreamEndCapture, "cuStreamEndCapture");
	NF4_LOAD(cuGraphInstantiate, "cuGraphInstantiateWithFlags");
	NF4_LOAD(cuGraphLaunch, "cuGraphLaunch");
	NF4_LOAD(cuGraphDestroy, "cuGraphDestroy");
	NF4_LOAD(cuGraphExecDestroy, "cuGraphExecDestroy");
#undef NF4_LOAD
}

static inline void nf4_open(void)
{
	CUmodule module;
	gpu_open();
	nf4_load_driver();
	nf4.device.sms = gpu.sms;
	nf4.device.hopper = gpu_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) == 9;
	const int shared = nf4.device.hopper ? QS_HOPPER_SHARED : QS_SHARED_BYTES;
	GPU_CHECK(gpu.cuModuleLoadData(&module, qs_fatbin_nf4));
	nf4.pack = nf4_function(module, QS_KERNEL_NF4_PACK);
	nf4.fp8_pack = nf4_function(module, QS_KERNEL_FP8_PACK);
	nf4.expand = nf4_function(module, QS_KERNEL_NF4_EXPAND);
	for (int i = 0; i < QS_PRODUCT_KINDS; i++) {
		nf4.product[0][i] = nf4_product_function(module, qs_kernel_w4a16[i], shared);
		nf4.product[1][i] = nf4_product_function(module, qs_kernel_w8a16[i], shared);
	}
	for (int i = 0; i < QS_WIDE_KINDS && nf4.device.hopper; i++)
		nf4.wide[i] = nf4_product_function(module, qs_kernel_wide[i], QS_WIDE_SHARED);
	if (nf4.device.hopper)
		nf4_describe_device();
}

#endif
