/* Modules, libraries, functions and launches. An image is only remembered; its functions are the C
 * references of the same name. As in the driver, a CUkernel (of a library, without a context) may
 * be launched where a CUfunction is expected, but most questions about functions refuse it. */
#include "tests/softcuda/inside.h"

#include "kernels/nf4.h"

#include <stdlib.h>
#include <string.h>

#define STATIC_SHARED (48u << 10)
#define MAX_SHARED    (227 << 10)

struct CUfunc_st {
	struct sc_kernel *kernel; /* what it runs                                      */
	CUcontext context;        /* of a CUfunction; NULL for a CUkernel              */
	const void *owner;        /* module or library                                 */
	int dynamic_shared;       /* bytes allowed                                     */
	CUfunction next;          /* list of all                                       */
};

struct CUmod_st {
	CUcontext context;
	CUmodule next;
};

struct CUlib_st {
	CUlibrary next;
};

struct sc_kernel *sc_kernels;
static CUfunction functions;
static CUmodule modules;
static CUlibrary libraries;
static CUresult fault;

/* softcuda's own kernels, for programs that need one. */
static void fill(void *const *params, unsigned grid, unsigned block)
{
	uint32_t *target = *(uint32_t *const *)params[0];
	(void)grid, (void)block;
	for (uint64_t i = 0; i < *(const uint64_t *)params[2]; i++)
		target[i] = *(const uint32_t *)params[1];
}

static void copy(void *const *params, unsigned grid, unsigned block)
{
	(void)grid, (void)block;
	memmove(*(void *const *)params[0], *(const void *const *)params[1],
	        *(const uint64_t *)params[2]);
}

static void add(void *const *params, unsigned grid, unsigned block)
{
	float *target = *(float *const *)params[0];
	(void)grid, (void)block;
	for (uint64_t i = 0; i < *(const uint64_t *)params[2]; i++)
		target[i] += *(const float *)params[1];
}

/* What a fused kernel gets by value: where to, behind something else. */
struct each {
	uint32_t count;     /* words                     */
	uint32_t value;     /* of each                   */
	uint64_t target[3]; /* 0 = none                  */
};

static void fill_each(void *const *params, unsigned grid, unsigned block)
{
	const struct each *each = params[0];
	(void)grid, (void)block;
	for (int i = 0; i < 3; i++)
		for (uint32_t j = 0; each->target[i] && j < each->count; j++)
			((uint32_t *)(uintptr_t)each->target[i])[j] = each->value;
}

/* As NCCL's kernels get what they are to do: here, or in memory. */
struct collective {
	uint64_t comm, channels;
	uint8_t type; /* 0 = here              */
	uint32_t mask;
	uint64_t work; /* or the address of the target */
	uint64_t target;
	uint32_t value, words;
	uint64_t unused[8];
};

static void collect(void *const *params, unsigned grid, unsigned block)
{
	const struct collective *args = params[0];
	const uint64_t *table = (const uint64_t *)(uintptr_t)args->work;
	uint32_t *target = (uint32_t *)(uintptr_t)(args->type ? *table : args->target);
	(void)grid, (void)block;
	for (uint32_t i = 0; i < args->words; i++)
		target[i] = args->value;
}

static const struct qs_oracle_kernel own[] = {
        {"_Z31ncclDevKernel_Broadcast_RING_LL24ncclDevKernelArgsStorageILm4096EE",
         collect,
         {sizeof(struct collective)}},
        {"_Z30ncclSymkDevKernel_AllGather_LL20ncclSymkDevWorkArgs4", fill, {8, 4, 8}},
        {"_Z20ncclKernel_AllReduceP9ncclDevComm", fill, {8, 4, 8}},
        {"ncclDevKernel_softcuda_fill", fill, {8, 4, 8}},
        {"softcuda_fill_each", fill_each, {sizeof(struct each)}},
        {"softcuda_fill", fill, {8, 4, 8}},
        {"softcuda_copy", copy, {8, 8, 8}},
        {"softcuda_add", add, {8, 4, 8}},
        {0},
};

void softcuda_fault(void)
{
	fault = CUDA_ERROR_ILLEGAL_ADDRESS;
}

static struct sc_kernel *know(const struct qs_oracle_kernel *code)
{
	for (struct sc_kernel *k = sc_kernels; k; k = k->next)
		if (k->code == code)
			return k;
	struct sc_kernel *kernel = sc_alloc(sizeof *kernel);
	*kernel = (struct sc_kernel){.code = code, .next = sc_kernels};
	sc_kernels = kernel;
	return kernel;
}

static struct sc_kernel *find_kernel(const char *name)
{
	const struct qs_oracle_kernel *const tables[] = {qs_oracle_kernels, qs_oracle_nf4_kernels,
	                                                 qs_oracle_hash_kernels,
	                                                 qs_oracle_compare_kernels, own};
	for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
		for (const struct qs_oracle_kernel *code = tables[t]; code->name; code++)
			if (!strcmp(code->name, name))
				return know(code);
	return NULL;
}

static CUfunction make_function(struct sc_kernel *kernel, const void *owner, CUcontext context)
{
	CUfunction f = functions;
	while (f && (f->kernel != kernel || f->owner != owner || f->context != context))
		f = f->next;
	if (f)
		return f;
	f = sc_alloc(sizeof *f);
	*f = (struct CUfunc_st){.kernel = kernel,
	                        .context = context,
	                        .owner = owner,
	                        .dynamic_shared = STATIC_SHARED,
	                        .next = functions};
	functions = f;
	return f;
}

static void drop_functions(const void *owner)
{
	CUfunction *link = &functions;
	while (*link) {
		CUfunction f = *link;
		if (f->owner != owner) {
			link = &f->next;
			continue;
		}
		*link = f->next;
		free(f);
	}
}

static bool known(CUfunction function)
{
	CUfunction f = functions;
	while (f && f != function)
		f = f->next;
	return f;
}

CUfunction softcuda_register(const struct qs_oracle_kernel *code)
{
	sc_lock();
	struct sc_kernel *kernel = know(code);
	kernel->product = true;
	CUfunction function = make_function(kernel, code, NULL);
	sc_unlock();
	return function;
}

/* Loading may have to wait for the device: unsafe during capture. */
static CUresult may_load(const void *handle, const void *image)
{
	CUresult error = sc_unsafe();
	if (error)
		return error;
	if (!handle || !image)
		return CUDA_ERROR_INVALID_VALUE;
	softcuda_counters.modules += !softcuda_knobs.fail_module;
	return (CUresult)softcuda_knobs.fail_module;
}

CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	error = may_load(module, image);
	if (error)
		return sc_leave(error);
	CUmodule loaded = sc_alloc(sizeof *loaded);
	*loaded = (struct CUmod_st){context, modules};
	*module = modules = loaded;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count,
                                    CUjit_option *options, void **values)
{
	(void)count, (void)options, (void)values;
	return cuModuleLoadData(module, image);
}

CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
	return cuModuleLoadData(module, image);
}

static CUresult unload_module(CUmodule module)
{
	CUmodule *link = &modules;
	while (*link && *link != module)
		link = &(*link)->next;
	if (!*link)
		return CUDA_ERROR_INVALID_HANDLE;
	*link = module->next;
	drop_functions(module);
	free(module);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleUnload(CUmodule module)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	error = sc_unsafe();
	return sc_leave(error ? error : unload_module(module));
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	CUmodule m = modules;
	while (m && m != module)
		m = m->next;
	if (!m || !function || !name)
		return sc_leave(m ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
	struct sc_kernel *kernel = find_kernel(name);
	if (!kernel)
		return sc_leave(CUDA_ERROR_NOT_FOUND);
	*function = make_function(kernel, module, module->context);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *jit,
                                   void **jit_values, unsigned int jit_count,
                                   CUlibraryOption *options, void **values,
                                   unsigned int option_count)
{
	(void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values,
	        (void)option_count;
	CUresult error = sc_enter();
	if (error)
		return error;
	error = may_load(library, image);
	if (error)
		return sc_leave(error);
	CUlibrary loaded = sc_alloc(sizeof *loaded);
	*loaded = (struct CUlib_st){libraries};
	*library = libraries = loaded;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuLibraryUnload(CUlibrary library)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	CUlibrary *link = &libraries;
	while (*link && *link != library)
		link = &(*link)->next;
	if (!*link)
		return sc_leave(CUDA_ERROR_INVALID_HANDLE);
	*link = library->next;
	drop_functions(library);
	free(library);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel *result, CUlibrary library, const char *name)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	struct sc_kernel *kernel = find_kernel(name);
	if (!kernel)
		return sc_leave(CUDA_ERROR_NOT_FOUND);
	*result = (CUkernel)make_function(kernel, library, NULL);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction *function, CUkernel handle)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	CUfunction kernel = (CUfunction)handle;
	if (error)
		return error;
	if (!known(kernel))
		return sc_leave(CUDA_ERROR_INVALID_HANDLE);
	*function = make_function(kernel->kernel, kernel->owner, context);
	return sc_leave(CUDA_SUCCESS);
}

static CUresult enter_function(CUfunction function, bool kernel)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!known(function) || kernel == (function->context != NULL))
		return sc_leave(CUDA_ERROR_INVALID_HANDLE);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
	CUresult error = enter_function(function, false);
	if (error)
		return error;
	*value = 0;
	if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
		*value = 1024;
	if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS)
		*value = 32;
	if (attribute == CU_FUNC_ATTRIBUTE_BINARY_VERSION ||
	    attribute == CU_FUNC_ATTRIBUTE_PTX_VERSION)
		*value = (int)softcuda_knobs.capability;
	if (attribute == CU_FUNC_ATTRIBUTE_PTX_VERSION && softcuda_knobs.ptx)
		*value = (int)softcuda_knobs.ptx;
	if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
		*value = function->dynamic_shared;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
	CUresult error = enter_function(function, false);
	if (error)
		return error;
	if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
		return sc_leave(CUDA_SUCCESS);
	if (value < 0 || value > MAX_SHARED)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	function->dynamic_shared = value;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuFuncLoad(CUfunction function)
{
	CUresult error = enter_function(function, false);
	return error ? error : sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuFuncGetName(const char **name, CUfunction function)
{
	CUresult error = enter_function(function, false);
	if (error)
		return error;
	*name = function->kernel->code->name;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuKernelGetName(const char **name, CUkernel kernel)
{
	CUresult error = enter_function((CUfunction)kernel, true);
	if (error)
		return error;
	*name = ((CUfunction)kernel)->kernel->code->name;
	return sc_leave(CUDA_SUCCESS);
}

/* Arguments are laid out as a C struct of them would be; sizes tell the alignment. */
static size_t align_of(size_t size)
{
	return size % 8 == 0 ? 8 : size % 4 == 0 ? 4 : size % 2 == 0 ? 2 : 1;
}

/* Offset of argument `index`; with index = number of arguments, the bytes of all. */
static size_t offset_of(const struct qs_oracle_kernel *code, size_t index)
{
	size_t offset = 0;
	for (size_t i = 0; i <= index && i < SC_PARAMS && code->param_bytes[i]; i++) {
		size_t align = align_of(code->param_bytes[i]);
		offset = (offset + align - 1) / align * align;
		if (i == index)
			return offset;
		offset += code->param_bytes[i];
	}
	return offset;
}

static size_t param_count(const struct qs_oracle_kernel *code)
{
	size_t n = 0;
	while (n < SC_PARAMS && code->param_bytes[n])
		n++;
	return n;
}

static CUresult param_info(const struct qs_oracle_kernel *code, size_t index, size_t *offset,
                           size_t *size)
{
	if (index >= param_count(code))
		return CUDA_ERROR_INVALID_VALUE;
	*offset = offset_of(code, index);
	if (size)
		*size = code->param_bytes[index];
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size)
{
	CUresult error = enter_function(function, false);
	return error ? error : sc_leave(param_info(function->kernel->code, index, offset, size));
}

CUresult CUDAAPI cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size)
{
	CUresult error = enter_function((CUfunction)kernel, true);
	return error ? error
	             : sc_leave(
	                       param_info(((CUfunction)kernel)->kernel->code, index, offset, size));
}

/* What a launch may read before the work ahead of it has ended. */
struct early {
	const uint64_t *first; /* NULL = nothing                  */
	size_t count;          /* words                           */
	uint64_t sum;          /* of them when it was launched    */
};

static uint64_t sum_of(const struct early *early)
{
	uint64_t sum = 0;
	for (size_t i = 0; i < early->count; i++)
		sum = (sum ^ early->first[i]) * 0x9e3779b97f4a7c15u;
	return sum;
}

/* A launch, complete. */
struct launch {
	struct sc_kernel *kernel;            /* never freed                                  */
	CUfunction function;                 /* as launched, for the node's parameters       */
	unsigned grid[3], block[3];          /* blocks, threads                              */
	unsigned shared;                     /* dynamic shared memory, bytes                 */
	struct early early;                  /* must be then what it is when launched        */
	void *pointers[SC_PARAMS];           /* filled when a node's parameters are asked for */
	_Alignas(16) unsigned char params[]; /* the arguments                           */
};

static void point(const struct launch *launch, void **pointers)
{
	for (size_t i = 0; i < param_count(launch->kernel->code); i++)
		pointers[i] =
		        (void *)(uintptr_t)(launch->params + offset_of(launch->kernel->code, i));
}

void sc_kernel_node(const void *args, CUDA_KERNEL_NODE_PARAMS *out)
{
	struct launch *launch = (struct launch *)(uintptr_t)args;
	point(launch, launch->pointers);
	*out = (CUDA_KERNEL_NODE_PARAMS){.func = launch->function,
	                                 .gridDimX = launch->grid[0],
	                                 .gridDimY = launch->grid[1],
	                                 .gridDimZ = launch->grid[2],
	                                 .blockDimX = launch->block[0],
	                                 .blockDimY = launch->block[1],
	                                 .blockDimZ = launch->block[2],
	                                 .sharedMemBytes = launch->shared,
	                                 .kernelParams = launch->pointers};
}

static CUresult run_launch(const void *args)
{
	const struct launch *launch = args;
	void *pointers[SC_PARAMS] = {0};
	point(launch, pointers);
	fault = CUDA_SUCCESS;
	if (launch->early.first && sum_of(&launch->early) != launch->early.sum)
		softcuda_fault();
	if (launch->kernel->product || !softcuda_knobs.idle_kernels)
		launch->kernel->code->run(pointers, launch->grid[0], launch->block[0]);
	if (!launch->kernel->product)
		softcuda_spend(softcuda_knobs.kernel_us);
	return fault;
}

/* Blocks of a cluster; 1 without the attribute. */
static unsigned cluster_of(const CUlaunchConfig *config)
{
	for (unsigned i = 0; i < config->numAttrs; i++)
		if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
			return config->attrs[i].value.clusterDim.x;
	return 1;
}

/* True if it may begin before the work ahead of it has ended. */
static bool begins_early(const CUlaunchConfig *config)
{
	for (unsigned i = 0; i < config->numAttrs; i++)
		if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
			return config->attrs[i].value.programmaticStreamSerializationAllowed;
	return false;
}

/* The tiles of a product of few tokens that says that it reads them so. */
static struct early early_of(const struct launch *launch)
{
	const char *name = launch->kernel->code->name;
	const bool fp8 = !strncmp(name, "qs_w8a16_", strlen("qs_w8a16_"));
	struct qs_product_args args;
	struct early early = {NULL};
	if (!fp8 && strncmp(name, "qs_w4a16_", strlen("qs_w4a16_")) != 0)
		return early;
	memcpy(&args, launch->params, sizeof args);
	if (!(args.flags & QS_PRODUCT_EARLY))
		return early;
	early.first = (const uint64_t *)(uintptr_t)args.packed;
	early.count = (size_t)(fp8 ? qs_fp8_bytes(args.n, args.k) : qs_nf4_bytes(args.n, args.k)) /
	              sizeof *early.first;
	early.sum = sum_of(&early);
	return early;
}

/* One block a multiprocessor, of 132. */
CUresult CUDAAPI cuOccupancyMaxActiveClusters(int *clusters, CUfunction function,
                                              const CUlaunchConfig *config)
{
	CUresult error = enter_function(function, false);
	if (error)
		return error;
	if (!clusters || !config || !cluster_of(config) || cluster_of(config) > 8)
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	*clusters = 132 / (int)cluster_of(config);
	return sc_leave(CUDA_SUCCESS);
}

/* Of what a driver accepts: rows of 2-byte elements, of two or three dimensions, in swizzled boxes
 * of 128 bytes a row. */
static CUresult CUDAAPI encode_tiled(CUtensorMap *to, CUtensorMapDataType type, cuuint32_t rank,
                                     void *address, const cuuint64_t *size,
                                     const cuuint64_t *strides, const cuuint32_t *box,
                                     const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                     CUtensorMapFloatOOBfill fill)
{
	struct qs_oracle_map map = {.address = (uint64_t)(uintptr_t)address};
	(void)promotion;
	_Static_assert(sizeof map == sizeof *to, "fits");
	if (!to || (uintptr_t)to % 64 || type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || rank < 2 ||
	    rank > 3 || !map.address || map.address % 16 || box[0] * 2 != 128 ||
	    interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
	    fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
		return CUDA_ERROR_INVALID_VALUE;
	for (cuuint32_t i = 0; i < rank; i++) {
		if (!size[i] || size[i] >> 32 || !box[i] || box[i] > 256 || steps[i] != 1)
			return CUDA_ERROR_INVALID_VALUE;
		map.size[i] = size[i];
		map.box[i] = box[i];
	}
	for (cuuint32_t i = 0; i + 1 < rank; i++) {
		if (!strides[i] || strides[i] % 16 || strides[i] >> 40)
			return CUDA_ERROR_INVALID_VALUE;
		map.stride[i] = strides[i];
	}
	memcpy(to, &map, sizeof map);
	return CUDA_SUCCESS;
}

/* Drivers before CUDA 12 have no such function: dlsym() answers what this returns. It is called
 * while the library is being loaded too, before a sanitiser's runtime is there. */
typedef __typeof__(encode_tiled) encode_function;
__attribute__((no_sanitize("address", "thread", "undefined"))) static encode_function *
find_encode_tiled(void)
{
	return softcuda_knobs.driver < 12000 ? NULL : encode_tiled;
}

encode_function cuTensorMapEncodeTiled __attribute__((ifunc("find_encode_tiled")));

static CUresult check_geometry(const CUlaunchConfig *config, CUfunction function)
{
	uint64_t threads = (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ;
	if (!config->gridDimX || !config->gridDimY || !config->gridDimZ || !threads ||
	    threads > 1024 || config->gridDimY > 65535 || config->gridDimZ > 65535)
		return CUDA_ERROR_INVALID_VALUE;
	if (config->sharedMemBytes > (unsigned)function->dynamic_shared)
		return CUDA_ERROR_INVALID_VALUE;
	if (!cluster_of(config) || config->gridDimX % cluster_of(config))
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

/* Copies the arguments, given as an array of pointers or as one buffer, of which there may be less
 * than the kernel has parameters: NCCL leaves out what is not in use. */
static CUresult copy_params(struct launch *launch, void **params, void **extra, size_t total)
{
	const struct qs_oracle_kernel *code = launch->kernel->code;
	const void *buffer = NULL;
	size_t bytes = 0;
	if ((params != NULL) == (extra != NULL) && total)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; params && i < param_count(code); i++)
		memcpy(launch->params + offset_of(code, i), params[i], code->param_bytes[i]);
	for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
		if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
			buffer = extra[1];
		if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE)
			bytes = *(const size_t *)extra[1];
	}
	if (!params && total && !buffer)
		return CUDA_ERROR_INVALID_VALUE;
	if (!params && total)
		memcpy(launch->params, buffer, bytes < total ? bytes : total);
	return CUDA_SUCCESS;
}

static CUresult make_launch(const CUlaunchConfig *config, CUfunction function, void **params,
                            void **extra, struct sc_work **made)
{
	const struct qs_oracle_kernel *code = function->kernel->code;
	size_t total = offset_of(code, param_count(code));
	struct sc_work *work = sc_work_new(run_launch, NULL, sizeof(struct launch) + total,
	                                   CU_GRAPH_NODE_TYPE_KERNEL);
	struct launch *launch = (struct launch *)work->args;
	*launch =
	        (struct launch){.kernel = function->kernel,
	                        .function = function,
	                        .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
	                        .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
	                        .shared = config->sharedMemBytes};
	CUresult error = copy_params(launch, params, extra, total);
	if (error)
		sc_work_free(work);
	*made = error ? NULL : work;
	return error;
}

CUresult sc_kernel_work(const CUDA_KERNEL_NODE_PARAMS *params, struct sc_work **work)
{
	const CUlaunchConfig config = {.gridDimX = params->gridDimX,
	                               .gridDimY = params->gridDimY,
	                               .gridDimZ = params->gridDimZ,
	                               .blockDimX = params->blockDimX,
	                               .blockDimY = params->blockDimY,
	                               .blockDimZ = params->blockDimZ,
	                               .sharedMemBytes = params->sharedMemBytes};
	CUfunction function = params->func ? params->func : (CUfunction)params->kern;
	if (!known(function))
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult error = check_geometry(&config, function);
	return error ? error
	             : make_launch(&config, function, params->kernelParams, params->extra, work);
}

/* A capture that did not take a launch is spoilt. */
static CUresult refuse(CUstream stream, struct sc_work *work)
{
	sc_capture_spoil(stream->capture);
	sc_work_free(work);
	return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult submit_launch(const CUlaunchConfig *config, CUfunction function, CUstream stream,
                              void **params, void **extra)
{
	struct sc_work *work;
	CUresult error = make_launch(config, function, params, extra, &work);
	if (error)
		return error;
	const struct early early = early_of((struct launch *)work->args);
	function->kernel->launches++;
	softcuda_counters.launches += !function->kernel->product;
	softcuda_counters.early_launches += begins_early(config);
	softcuda_counters.early_reads += early.first != NULL;
	if (!stream->capture)
		((struct launch *)work->args)->early = early;
	else if (begins_early(config) && !sc_capture_early(stream))
		return refuse(stream, work);
	return sc_submit(stream, work);
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params,
                                  void **extra)
{
	CUcontext context;
	CUstream stream;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	if (!known(function) || (function->context && function->context != context))
		return sc_leave(CUDA_ERROR_INVALID_HANDLE);
	if (!function->kernel->product && softcuda_knobs.fail_launch)
		return sc_leave((CUresult)softcuda_knobs.fail_launch);
	error = sc_stream_find(config->hStream, &stream);
	if (!error && stream->context != context)
		error = CUDA_ERROR_INVALID_HANDLE;
	if (!error)
		error = check_geometry(config, function);
	if (!error)
		error = sc_capture_check(stream);
	return sc_leave(error ? error : submit_launch(config, function, stream, params, extra));
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                unsigned int block_z, unsigned int shared, CUstream stream,
                                void **params, void **extra)
{
	CUlaunchConfig config = {.gridDimX = grid_x,
	                         .gridDimY = grid_y,
	                         .gridDimZ = grid_z,
	                         .blockDimX = block_x,
	                         .blockDimY = block_y,
	                         .blockDimZ = block_z,
	                         .sharedMemBytes = shared,
	                         .hStream = stream};
	return cuLaunchKernelEx(&config, function, params, extra);
}
