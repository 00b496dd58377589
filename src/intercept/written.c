/* What a call of the driver wrote, from its arguments, by name.
 *
 * Read after the call, which is when the work counts as submitted, and while the caller still holds
 * what it passed; before it where the call ends something. A call that failed leaves that unread.
 * Functions that are matched by prefix (driver.c) but are not in the list below, functions newer
 * than those this was written for, and forms with addresses of 32 bits are taken to have written
 * everything.
 *
 * Why some write nothing: waits, queries and events submit no work, and what others do meanwhile is
 * to memory that is not watched (operand/track.h); nodes put into a graph are read when it is
 * instantiated; prefetching moves what it does not change; host functions cannot submit work, and
 * host memory is not watched; pools, when destroyed or trimmed, keep what was not freed.
 */
#include <string.h>

#include "intercept/driver.h"
#include "intercept/intercept.h"
#include "intercept/launch.h"
#include "operand/cache.h"
#include "operand/mapping.h"
#include "operand/track.h"

/* Versions of the driver's interface, of which the functions below are known. */
#define VERSION_WIDE 3020  /* addresses of 64 bits */
#define VERSION_END  14000 /* all of 13            */

static void tell_everything(const struct qs_call *call)
{
	(void)call;
	qs_track_everything();
}

static void write_extent(struct qs_extent extent)
{
	qs_track_write((const void *)(uintptr_t)extent.first, extent.bytes);
}

/* ---- launches ---- */

static void tell_launch(const struct qs_call *call)
{
	qs_launched(qs_pointer(call, 0), qs_pointer(call, 8), qs_pointer(call, 9),
	            qs_pointer(call, 10));
}

static void tell_cooperative(const struct qs_call *call)
{
	qs_launched(qs_pointer(call, 0), qs_pointer(call, 8), qs_pointer(call, 9), NULL);
}

static void tell_launch_ex(const struct qs_call *call)
{
	const CUlaunchConfig *config = qs_pointer(call, 0);
	qs_launched(qs_pointer(call, 1), config->hStream, qs_pointer(call, 2), qs_pointer(call, 3));
}

/* ---- copies ---- */

static void tell_copy(const struct qs_call *call)
{
	qs_track_write(qs_pointer(call, 0), qs_argument(call, 2));
}

static void tell_array_copy(const struct qs_call *call)
{
	qs_track_write(qs_pointer(call, 0), qs_argument(call, 3));
}

static void tell_peer_copy(const struct qs_call *call)
{
	qs_track_write(qs_pointer(call, 0), qs_argument(call, 4));
}

struct qs_extent qs_extent_of_fill(uint64_t first, size_t pitch, size_t row_bytes, size_t rows)
{
	if (!row_bytes || !rows)
		return (struct qs_extent){0, 0};
	return (struct qs_extent){first, (rows - 1) * pitch + row_bytes};
}

/* A pitch or height of 0 is that of what is copied. */
struct qs_extent qs_extent_of_copy(const CUDA_MEMCPY3D *copy)
{
	size_t pitch = copy->dstPitch ? copy->dstPitch : copy->WidthInBytes;
	size_t height = copy->dstHeight ? copy->dstHeight : copy->Height;
	uint64_t first = copy->dstMemoryType == CU_MEMORYTYPE_HOST ? (uintptr_t)copy->dstHost
	                                                           : (uint64_t)copy->dstDevice;
	if (copy->dstMemoryType == CU_MEMORYTYPE_ARRAY || !copy->Height || !copy->Depth)
		return (struct qs_extent){0, 0};
	first += (copy->dstZ * height + copy->dstY) * pitch + copy->dstXInBytes;
	return qs_extent_of_fill(first, pitch, copy->WidthInBytes,
	                         (copy->Depth - 1) * height + copy->Height);
}

static void tell_copy_2d(const struct qs_call *call)
{
	const CUDA_MEMCPY2D *copy = qs_pointer(call, 0);
	write_extent(qs_extent_of_copy(&(CUDA_MEMCPY3D){.dstXInBytes = copy->dstXInBytes,
	                                                .dstY = copy->dstY,
	                                                .dstMemoryType = copy->dstMemoryType,
	                                                .dstHost = copy->dstHost,
	                                                .dstDevice = copy->dstDevice,
	                                                .dstPitch = copy->dstPitch,
	                                                .WidthInBytes = copy->WidthInBytes,
	                                                .Height = copy->Height,
	                                                .Depth = 1}));
}

static void tell_copy_3d(const struct qs_call *call)
{
	write_extent(qs_extent_of_copy(qs_pointer(call, 0)));
}

static void tell_peer_copy_3d(const struct qs_call *call)
{
	const CUDA_MEMCPY3D_PEER *copy = qs_pointer(call, 0);
	write_extent(qs_extent_of_copy(&(CUDA_MEMCPY3D){.dstXInBytes = copy->dstXInBytes,
	                                                .dstY = copy->dstY,
	                                                .dstZ = copy->dstZ,
	                                                .dstMemoryType = copy->dstMemoryType,
	                                                .dstHost = copy->dstHost,
	                                                .dstDevice = copy->dstDevice,
	                                                .dstPitch = copy->dstPitch,
	                                                .dstHeight = copy->dstHeight,
	                                                .WidthInBytes = copy->WidthInBytes,
	                                                .Height = copy->Height,
	                                                .Depth = copy->Depth}));
}

static void write_each(const CUdeviceptr *first, const size_t *bytes, size_t count)
{
	for (size_t i = 0; i < count; i++)
		qs_track_write((const void *)(uintptr_t)first[i], bytes[i]);
}

static void tell_batch(const struct qs_call *call)
{
	write_each(qs_pointer(call, 0), qs_pointer(call, 2), qs_argument(call, 3));
}

static void tell_discard(const struct qs_call *call)
{
	write_each(qs_pointer(call, 0), qs_pointer(call, 1), qs_argument(call, 2));
}

#if CUDA_VERSION >= 12080
/* Extents count elements where the other side is an array, of 16 bytes at most. */
static void tell_batch_3d(const struct qs_call *call)
{
	const CUDA_MEMCPY3D_BATCH_OP *operation = qs_pointer(call, 1);
	for (size_t i = 0; i < qs_argument(call, 0); i++, operation++) {
		const CUmemcpy3DOperand *to = &operation->dst;
		bool array = operation->src.type != CU_MEMCPY_OPERAND_TYPE_POINTER;
		if (to->type != CU_MEMCPY_OPERAND_TYPE_POINTER)
			continue;
		size_t row = to->op.ptr.rowLength ? to->op.ptr.rowLength : operation->extent.width;
		size_t rows =
		        to->op.ptr.layerHeight ? to->op.ptr.layerHeight : operation->extent.height;
		qs_track_write((const void *)(uintptr_t)to->op.ptr.ptr,
		               row * rows * operation->extent.depth * (array ? 16 : 1));
	}
}
#else
#define tell_batch_3d tell_everything
#endif

/* ---- fills ---- */

static void fill(const struct qs_call *call, size_t element)
{
	qs_track_write(qs_pointer(call, 0), qs_argument(call, 2) * element);
}

static void fill_2d(const struct qs_call *call, size_t element)
{
	write_extent(qs_extent_of_fill(qs_argument(call, 0), qs_argument(call, 1),
	                               qs_argument(call, 3) * element, qs_argument(call, 4)));
}

static void tell_fill_8(const struct qs_call *call)
{
	fill(call, 1);
}

static void tell_fill_16(const struct qs_call *call)
{
	fill(call, 2);
}

static void tell_fill_32(const struct qs_call *call)
{
	fill(call, 4);
}

static void tell_fill_2d_8(const struct qs_call *call)
{
	fill_2d(call, 1);
}

static void tell_fill_2d_16(const struct qs_call *call)
{
	fill_2d(call, 2);
}

static void tell_fill_2d_32(const struct qs_call *call)
{
	fill_2d(call, 4);
}

/* ---- streams ---- */

static void tell_value(const struct qs_call *call)
{
	qs_track_write(qs_pointer(call, 1), sizeof(uint64_t));
}

/* Waiting is followed, if at all, by an order of writes; both write nothing of their own. */
static void tell_operations(const struct qs_call *call)
{
	const CUstreamBatchMemOpParams *operation = qs_pointer(call, 2);
	for (unsigned i = 0; i < (unsigned)qs_argument(call, 1); i++, operation++)
		switch (operation->operation) {
		case CU_STREAM_MEM_OP_WRITE_VALUE_32:
		case CU_STREAM_MEM_OP_WRITE_VALUE_64:
			qs_track_write((const void *)(uintptr_t)operation->writeValue.address,
			               sizeof(uint64_t));
			break;
		case CU_STREAM_MEM_OP_WAIT_VALUE_32:
		case CU_STREAM_MEM_OP_WAIT_VALUE_64:
		case CU_STREAM_MEM_OP_BARRIER:
			break;
		default: /* also a flush of remote writes */
			qs_track_everything();
		}
}

/* ---- memory ---- */

/* The driver may free it and report an error of earlier work: whatever the status. */
static void tell_free(const struct qs_call *call)
{
	qs_track_gone(qs_pointer(call, 0), 0);
}

static void tell_access(const struct qs_call *call)
{
	qs_track_gone(qs_pointer(call, 0), qs_argument(call, 1));
}

/* Nothing was there before. */
static void tell_map(const struct qs_call *call)
{
	tell_access(call);
	qs_mapping_add(qs_argument(call, 0), qs_argument(call, 1), qs_argument(call, 3));
}

static void tell_unmap(const struct qs_call *call)
{
	tell_access(call);
	qs_mapping_remove(qs_argument(call, 0), qs_argument(call, 1));
}

static void tell_handle_released(const struct qs_call *call)
{
	qs_mapping_release(qs_argument(call, 0));
}

static void tell_handle_given(const struct qs_call *call)
{
	qs_mapping_share(qs_argument(call, 1));
}

/* The handle is what the call answered. */
static void tell_handle_got(const struct qs_call *call)
{
	const CUmemGenericAllocationHandle *handle = qs_pointer(call, 0);
	qs_mapping_share(*handle);
}

/* A handle of what is mapped there, for whatever use. */
static void tell_handle_retained(const struct qs_call *call)
{
	qs_mapping_share_at(qs_argument(call, 1));
	tell_handle_got(call);
}

static void tell_range_given(const struct qs_call *call)
{
	qs_mapping_share_range(qs_argument(call, 1), qs_argument(call, 2));
}

/* Memory at addresses that only the driver and another API know. */
static void tell_moved(const struct qs_call *call)
{
	(void)call;
	qs_track_gone(NULL, SIZE_MAX);
}

static void tell_all_gone(const struct qs_call *call)
{
	(void)call;
	qs_functions_unloaded();
	qs_track_all_gone();
}

typedef CUresult state_function(CUdevice device, unsigned *flags, int *active);

/* Most releases leave the context to others that hold it. */
static void tell_release(const struct qs_call *call)
{
	unsigned flags;
	int active = 0;
	state_function *state = QS_DRIVER(state_function, cuDevicePrimaryCtxGetState);
	if (state && !state((CUdevice)qs_argument(call, 0), &flags, &active) && active)
		return;
	tell_all_gone(call);
}

/* Given to others, by its address. */
static void tell_export(const struct qs_call *call)
{
	qs_track_shared(qs_pointer(call, 1));
}

/* Got from others: the address is what the call answered. */
static void tell_import(const struct qs_call *call)
{
	const CUdeviceptr *address = qs_pointer(call, 0);
	qs_track_shared((const void *)(uintptr_t)*address);
}

static void tell_close(const struct qs_call *call)
{
	qs_track_gone(qs_pointer(call, 0), 0);
	qs_track_unshared(qs_pointer(call, 0));
}

typedef CUresult pointer_function(void *data, CUpointer_attribute attribute, CUdeviceptr pointer);

static bool is_memory(const void *address)
{
	pointer_function *ask = QS_DRIVER(pointer_function, cuPointerGetAttribute);
	unsigned type;
	return ask && !ask(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)address);
}

/* Where the first version has an address and a size, the second (of 13.1) has an offset and an
 * address. Which one was called is not known here, but offsets and sizes are no addresses. */
static void tell_bind(const struct qs_call *call)
{
	for (int i = 2; i < 4; i++)
		if (is_memory(qs_pointer(call, i)))
			qs_track_shared(qs_pointer(call, i));
}

/* A variable of the module may be a weight, and one of another be where it was. */
/* The first version has the handle where the second (of 13.1) has an offset, and an offset there.
 */
static void tell_bind_handle(const struct qs_call *call)
{
	qs_mapping_share(qs_argument(call, 2));
	qs_mapping_share(qs_argument(call, 3));
	qs_track_everything();
}

static void tell_unload(const struct qs_call *call)
{
	(void)call;
	qs_functions_unloaded();
	qs_track_everything();
}

/* ---- graphs ---- */

static void made(const struct qs_call *call, uint64_t flags)
{
	CUgraphExec *exec = qs_pointer(call, 0);
	if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
		qs_graphs_by_kernels();
	qs_graph_made(*exec, qs_pointer(call, 1));
}

/* The oldest forms have an aligned address in the place of the flags, which sets none that counts.
 */
static void tell_instantiate(const struct qs_call *call)
{
	made(call, qs_argument(call, 2));
}

static void tell_instantiate_by(const struct qs_call *call)
{
	const CUDA_GRAPH_INSTANTIATE_PARAMS *params = qs_pointer(call, 2);
	made(call, params->flags);
}

static void tell_update(const struct qs_call *call)
{
	if ((CUresult)call->result)
		qs_graph_forgotten(qs_pointer(call, 0));
	else
		qs_graph_made(qs_pointer(call, 0), qs_pointer(call, 1));
}

static void tell_edit(const struct qs_call *call)
{
	qs_graph_forgotten(qs_pointer(call, 0));
}

static void tell_graph(const struct qs_call *call)
{
	qs_graph_launched(qs_pointer(call, 0), qs_is_capturing(qs_pointer(call, 1)));
}

void qs_before_graph(const struct qs_call *call)
{
	qs_kept_before_graph(qs_pointer(call, 0), qs_pointer(call, 1));
}

/* ---- by name ---- */

#define FAILED QS_EFFECT_FAILED
#define NARROW QS_EFFECT_NARROW
#define PREFIX QS_EFFECT_PREFIX
#define KEPT   QS_EFFECT_KEPT
#define GRAPH  QS_EFFECT_GRAPH
#define BEFORE QS_EFFECT_BEFORE

/* The first that fits counts. */
static const struct qs_effect effects[] = {
        {"cuLaunchKernel", tell_launch, 0},
        {"cuLaunchKernelEx", tell_launch_ex, 0},
        {"cuLaunchCooperativeKernel", tell_cooperative, 0},
        {"cuLaunchHostFunc", NULL, 0},
        {"cuGraphLaunch", tell_graph, KEPT | GRAPH},
        {"cuMemcpy", tell_copy, 0},
        {"cuMemcpyAsync", tell_copy, 0},
        {"cuMemcpyHtoD", tell_copy, NARROW},
        {"cuMemcpyHtoDAsync", tell_copy, NARROW},
        {"cuMemcpyDtoH", tell_copy, NARROW},
        {"cuMemcpyDtoHAsync", tell_copy, NARROW},
        {"cuMemcpyDtoD", tell_copy, NARROW},
        {"cuMemcpyDtoDAsync", tell_copy, NARROW},
        {"cuMemcpyAtoD", tell_array_copy, NARROW},
        {"cuMemcpyAtoH", tell_array_copy, NARROW},
        {"cuMemcpyAtoHAsync", tell_array_copy, NARROW},
        {"cuMemcpyAtoA", NULL, 0},
        {"cuMemcpyDtoA", NULL, 0},
        {"cuMemcpyHtoA", NULL, 0},
        {"cuMemcpyHtoAAsync", NULL, 0},
        {"cuMemcpyPeer", tell_peer_copy, 0},
        {"cuMemcpyPeerAsync", tell_peer_copy, 0},
        {"cuMemcpy2D", tell_copy_2d, NARROW},
        {"cuMemcpy2DUnaligned", tell_copy_2d, NARROW},
        {"cuMemcpy2DAsync", tell_copy_2d, NARROW},
        {"cuMemcpy3D", tell_copy_3d, NARROW},
        {"cuMemcpy3DAsync", tell_copy_3d, NARROW},
        {"cuMemcpy3DPeer", tell_peer_copy_3d, 0},
        {"cuMemcpy3DPeerAsync", tell_peer_copy_3d, 0},
        {"cuMemcpyBatchAsync", tell_batch, 0},
        {"cuMemcpy3DBatchAsync", tell_batch_3d, 0},
        {"cuMemsetD8", tell_fill_8, NARROW},
        {"cuMemsetD16", tell_fill_16, NARROW},
        {"cuMemsetD32", tell_fill_32, NARROW},
        {"cuMemsetD2D8", tell_fill_2d_8, NARROW},
        {"cuMemsetD2D16", tell_fill_2d_16, NARROW},
        {"cuMemsetD2D32", tell_fill_2d_32, NARROW},
        {"cuMemsetD8Async", tell_fill_8, 0},
        {"cuMemsetD16Async", tell_fill_16, 0},
        {"cuMemsetD32Async", tell_fill_32, 0},
        {"cuMemsetD2D8Async", tell_fill_2d_8, 0},
        {"cuMemsetD2D16Async", tell_fill_2d_16, 0},
        {"cuMemsetD2D32Async", tell_fill_2d_32, 0},
        {"cuMemDiscardBatchAsync", tell_discard, 0},
        {"cuMemDiscardAndPrefetchBatchAsync", tell_discard, 0},
        {"cuMemPrefetch", NULL, PREFIX},
        {"cuStreamWriteValue", tell_value, PREFIX},
        {"cuStreamBatchMemOp", tell_operations, 0},
        {"cuStreamWait", NULL, PREFIX},
        {"cuStreamAddCallback", NULL, 0},
        {"cuStreamSynchronize", NULL, 0},
        {"cuStreamQuery", NULL, 0},
        {"cuStreamUpdateCaptureDependencies", NULL, 0},
        {"cuEventSynchronize", NULL, 0},
        {"cuEventQuery", NULL, 0},
        {"cuCtxSynchronize", NULL, 0},
        {"cuCtxWaitEvent", NULL, 0},
        {"cuGreenCtxWaitEvent", NULL, 0},
        {"cuSignalExternalSemaphores", NULL, PREFIX},
        {"cuGraphAdd", NULL, PREFIX},
        {"cuMemFree", tell_free, NARROW | BEFORE},
        {"cuMemFreeAsync", tell_free, BEFORE},
        {"cuMemFreeHost", NULL, 0},
        {"cuMemMap", tell_map, KEPT},
        {"cuMemUnmap", tell_unmap, BEFORE | KEPT},
        {"cuMemSetAccess", tell_access, BEFORE},
        {"cuMemRelease", tell_handle_released, BEFORE | KEPT},
        {"cuMemExportToShareableHandle", tell_handle_given, FAILED | KEPT},
        {"cuMemImportFromShareableHandle", tell_handle_got, KEPT},
        {"cuMemRetainAllocationHandle", tell_handle_retained, KEPT},
        {"cuMemGetHandleForAddressRange", tell_range_given, FAILED | KEPT},
        {"cuMemMapArrayAsync", NULL, 0},
        {"cuGraphicsMapResources", tell_moved, BEFORE},
        {"cuGraphicsUnmapResources", tell_moved, BEFORE},
        {"cuCtxDestroy", tell_all_gone, BEFORE | KEPT},
        {"cuCtxDetach", tell_all_gone, BEFORE | KEPT},
        {"cuDevicePrimaryCtxReset", tell_all_gone, BEFORE | KEPT},
        {"cuDevicePrimaryCtxRelease", tell_release, FAILED | KEPT},
        {"cuDestroyExternalMemory", NULL, KEPT},
        {"cuExternalMemoryGetMappedBuffer", tell_import, KEPT},
        {"cuExternalMemoryGetMappedMipmappedArray", NULL, KEPT},
        {"cuIpcGetMemHandle", tell_export, FAILED | KEPT},
        {"cuIpcOpenMemHandle", tell_import, KEPT},
        {"cuIpcCloseMemHandle", tell_close, BEFORE | KEPT},
        {"cuMemPoolExportPointer", tell_export, FAILED | KEPT},
        {"cuMemPoolImportPointer", tell_import, KEPT},
        {"cuMulticastBindAddr", tell_bind, FAILED | KEPT},
        {"cuMulticastBindMem", tell_bind_handle, FAILED | KEPT},
        {"cuModuleUnload", tell_unload, BEFORE | KEPT},
        {"cuLibraryUnload", tell_unload, BEFORE | KEPT},
        {"cuGraphInstantiate", tell_instantiate, KEPT},
        {"cuGraphInstantiateWithFlags", tell_instantiate, KEPT},
        {"cuGraphInstantiateWithParams", tell_instantiate_by, KEPT},
        {"cuGraphExecUpdate", tell_update, FAILED | KEPT},
        {"cuGraphExecDestroy", tell_edit, BEFORE | KEPT},
        {"cuGraphExecGetFlags", NULL, KEPT},
        {"cuGraphExecHostNode", NULL, PREFIX | KEPT},
        {"cuGraphExecEvent", NULL, PREFIX | KEPT},
        {"cuGraphExec", tell_edit, PREFIX | FAILED | KEPT},
};

static const struct qs_effect unknown = {"", tell_everything, FAILED};

/* One of those that are told always, in a form that is not known: what is kept may be wrong. */
static void tell_lost(const struct qs_call *call)
{
	qs_graphs_forgotten();
	tell_all_gone(call);
}

static const struct qs_effect lost = {"", tell_lost, FAILED | KEPT};

static bool cut(const char *name, size_t *length, const char *suffix)
{
	size_t more = strlen(suffix);
	if (*length <= more || memcmp(name + *length - more, suffix, more))
		return false;
	*length -= more;
	return true;
}

static bool fits(const struct qs_effect *effect, const char *name, size_t length)
{
	size_t known = strlen(effect->name);
	return (effect->flags & PREFIX ? length >= known : length == known) &&
	       !memcmp(effect->name, name, known);
}

/* cuGetProcAddress gives the newest version that the caller's version knows; a name as exported
 * says which it is. */
const struct qs_effect *qs_effect_of(const char *name, int version)
{
	size_t length = strlen(name);
	if (!cut(name, &length, "_ptsz"))
		cut(name, &length, "_ptds");
	bool first = !cut(name, &length, "_v2") && !cut(name, &length, "_v3");
	if (version)
		first = version < VERSION_WIDE;
	for (size_t i = 0; i < sizeof effects / sizeof *effects; i++) {
		const struct qs_effect *effect = &effects[i];
		if (!fits(effect, name, length))
			continue;
		if (version < VERSION_END && !(effect->flags & NARROW && first))
			return effect;
		return effect->flags & KEPT ? &lost : &unknown;
	}
	return &unknown;
}
