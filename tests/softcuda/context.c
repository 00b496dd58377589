/* Initialisation, devices and contexts. Contexts are never freed: a handle that is used after its
 * context was destroyed is told so, and a primary context that comes back is the same handle with a
 * new id, as the driver does it. */
#include "tests/softcuda/inside.h"

#include <stdio.h>
#include <string.h>

static CUcontext contexts;
static CUcontext primaries[SC_DEVICES];

CUcontext sc_current(void)
{
	return sc_thread.depth ? sc_thread.stack[sc_thread.depth - 1] : NULL;
}

bool sc_context_known(CUcontext context)
{
	for (CUcontext c = contexts; c; c = c->next)
		if (c == context)
			return c->live;
	return false;
}

static void bring_up(CUcontext context, unsigned flags)
{
	context->live = true;
	context->id = sc_new_id();
	context->broken = CUDA_SUCCESS;
	context->flags = flags;
	context->legacy = sc_stream_add(context);
	context->legacy->legacy = true;
}

static CUcontext make(int device, bool primary)
{
	CUcontext context = sc_alloc(sizeof *context);
	*context = (struct CUctx_st){.primary = primary, .device = device, .next = contexts};
	contexts = context;
	return context;
}

static void tear_down(CUcontext context)
{
	sc_drain(context);
	sc_streams_drop_context(context);
	sc_memory_drop_context(context);
	context->live = false;
}

CUresult CUDAAPI cuInit(unsigned int flags)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : sc_initialise();
}

CUresult CUDAAPI cuDriverGetVersion(int *version)
{
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = (int)softcuda_knobs.driver;
	return CUDA_SUCCESS;
}

static CUresult enter_device(CUdevice device)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	return device < 0 || device >= SC_DEVICES ? sc_leave(CUDA_ERROR_INVALID_DEVICE)
	                                          : CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int *count)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	*count = SC_DEVICES;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal)
{
	CUresult error = enter_device(ordinal);
	if (error)
		return error;
	*device = ordinal;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGetName(char *name, int length, CUdevice device)
{
	CUresult error = enter_device(device);
	if (error)
		return error;
	snprintf(name, (size_t)length, "softcuda");
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	CUresult error = enter_device(device);
	if (error)
		return error;
	*bytes = (size_t)softcuda_knobs.memory_mib << 20;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	CUresult error = enter_device(device);
	if (error)
		return error;
	memset(uuid, 0, sizeof *uuid);
	uuid->bytes[15] = (char)(device + 1);
	return sc_leave(CUDA_SUCCESS);
}

/* The shape of an H100; attributes that are not listed are 0, which mostly means "cannot". */
static const struct {
	CUdevice_attribute attribute;
	int value;
} attributes[] = {
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 << 10},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
        {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
};

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
	CUresult error = enter_device(device);
	if (error)
		return error;
	*value = 0;
	if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
		*value = (int)(softcuda_knobs.capability / 10);
	if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
		*value = (int)(softcuda_knobs.capability % 10);
	for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
		if (attributes[i].attribute == attribute)
			*value = attributes[i].value;
	return sc_leave(attribute < CU_DEVICE_ATTRIBUTE_MAX ? CUDA_SUCCESS
	                                                    : CUDA_ERROR_INVALID_VALUE);
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	CUresult error = enter_device(device);
	if (error)
		return error;
	if (!primaries[device])
		primaries[device] = make(device, true);
	if (!primaries[device]->retained++)
		bring_up(primaries[device], 0);
	*context = primaries[device];
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	CUresult error = enter_device(device);
	if (error)
		return error;
	CUcontext context = primaries[device];
	if (!context || !context->retained)
		return sc_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (!--context->retained)
		tear_down(context);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice device)
{
	CUresult error = enter_device(device);
	if (error)
		return error;
	CUcontext context = primaries[device];
	if (context && context->retained) {
		tear_down(context);
		bring_up(context, context->flags);
	}
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
	CUresult error = enter_device(device);
	if (error)
		return error;
	*flags = 0;
	*active = primaries[device] && primaries[device]->retained;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags)
{
	CUresult error = enter_device(device);
	(void)flags;
	return error ? error : sc_leave(CUDA_SUCCESS);
}

/* cuda.h of CUDA 13 declares only the newest form; programs use this one. */
CUresult CUDAAPI cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device);
CUresult CUDAAPI cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
	CUresult error = enter_device(device);
	if (error)
		return error;
	if (sc_thread.depth == SC_STACK)
		return sc_leave(CUDA_ERROR_OUT_OF_MEMORY);
	*context = make(device, false);
	bring_up(*context, flags);
	sc_thread.stack[sc_thread.depth++] = *context;
	return sc_leave(CUDA_SUCCESS);
}

#if CUDA_VERSION >= 13000
CUresult CUDAAPI cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags,
                                CUdevice device)
{
	return params ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(context, flags, device);
}
#endif

CUresult CUDAAPI cuCtxDestroy_v2(CUcontext context)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!sc_context_known(context) || context->primary)
		return sc_leave(CUDA_ERROR_INVALID_CONTEXT);
	tear_down(context);
	if (sc_current() == context)
		sc_thread.depth--;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext context)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!sc_context_known(context) || sc_thread.depth == SC_STACK)
		return sc_leave(CUDA_ERROR_INVALID_CONTEXT);
	sc_thread.stack[sc_thread.depth++] = context;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *context)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!sc_thread.depth)
		return sc_leave(CUDA_ERROR_INVALID_CONTEXT);
	CUcontext top = sc_thread.stack[--sc_thread.depth];
	if (context)
		*context = top;
	return sc_leave(CUDA_SUCCESS);
}

/* Replaces the top of the stack; NULL pops it. */
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (context && !sc_context_known(context))
		return sc_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (sc_thread.depth)
		sc_thread.depth--;
	if (context)
		sc_thread.stack[sc_thread.depth++] = context;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	*context = sc_current();
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice *device)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	*device = context->device;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxGetId(CUcontext context, unsigned long long *id)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (!context)
		context = sc_current();
	if (!sc_context_known(context))
		return sc_leave(CUDA_ERROR_CONTEXT_IS_DESTROYED);
	*id = context->id;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxGetFlags(unsigned int *flags)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	*flags = context->flags;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxGetApiVersion(CUcontext context, unsigned int *version)
{
	CUresult error = sc_enter();
	if (error)
		return error;
	if (context && !sc_context_known(context))
		return sc_leave(CUDA_ERROR_INVALID_CONTEXT);
	*version = 3020;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxSynchronize(void)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	error = sc_context_capturing(context);
	if (!error)
		error = sc_unsafe();
	if (error)
		return sc_leave(error);
	softcuda_counters.syncs++;
	return sc_leave(sc_drain(context));
}
