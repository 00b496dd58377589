/* Device and pinned memory, copies and memsets.
 *
 * The table of allocations is sorted by address. Fresh memory holds 0xA5, so that reading what
 * nobody wrote gives a wrong answer rather than zero, and is followed by guard bytes. Addresses
 * that are in no allocation are pageable host memory where a copy allows that, and errors
 * elsewhere. */
#include "tests/softcuda/inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGNMENT ((size_t)512)
#define GUARD     ((size_t)64)
#define POISON    0xA5
#define GUARDED   0xC3

long sc_allocations_until_failure;

static struct sc_memory **table;
static size_t count;

/* Position of the first allocation that starts above the address. */
static size_t above(const unsigned char *address)
{
	size_t low = 0, high = count;
	while (low < high) {
		size_t middle = (low + high) / 2;
		if (table[middle]->base > address)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

static unsigned char *address_of(CUdeviceptr pointer)
{
	return (unsigned char *)(uintptr_t)pointer;
}

struct sc_memory *sc_memory_find(CUdeviceptr pointer)
{
	size_t position = above(address_of(pointer));
	if (!position)
		return NULL;
	struct sc_memory *memory = table[position - 1];
	return address_of(pointer) < memory->base + memory->size ? memory : NULL;
}

/* What is mapped beside each other is one. */
bool sc_memory_covers(CUdeviceptr pointer, size_t bytes)
{
	const struct sc_memory *memory = sc_memory_find(pointer);
	while (memory) {
		const unsigned char *end = memory->base + memory->size;
		if (address_of(pointer) + bytes <= end)
			return true;
		memory = memory->range ? sc_memory_find((CUdeviceptr)(uintptr_t)end) : NULL;
	}
	return false;
}

static void insert(struct sc_memory *memory)
{
	size_t position = above(memory->base);
	table = sc_grow(table, (count + 1) * sizeof *table);
	memmove(table + position + 1, table + position, (count - position) * sizeof *table);
	table[position] = memory;
	count++;
}

static size_t used(int device)
{
	size_t bytes = 0;
	for (size_t i = 0; i < count; i++)
		if (table[i]->type == SC_DEVICE && table[i]->context->device == device)
			bytes += table[i]->size;
	return bytes;
}

static bool must_fail(void)
{
	if (sc_allocations_until_failure <= 0)
		return false;
	if (sc_allocations_until_failure > 1) {
		sc_allocations_until_failure--;
		return false;
	}
	return true;
}

static size_t padded_size(size_t bytes)
{
	return (bytes + GUARD + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* With the knob `reuse`: the device memory that was freed last, if nobody has it yet. */
static struct {
	void *base;
	size_t bytes;
} freed;

static void *obtain_device(size_t bytes)
{
	void *base = freed.base;
	if (!base || freed.bytes != bytes)
		return aligned_alloc(ALIGNMENT, bytes);
	freed.base = NULL;
	return base;
}

static void release_device(void *base, size_t bytes)
{
	if (!softcuda_knobs.reuse) {
		free(base);
		return;
	}
	free(freed.base);
	freed.base = base;
	freed.bytes = bytes;
}

/* Host memory is not mapped any more once it is freed or its context gone: a look at it faults. */
static void *obtain(size_t bytes, enum sc_memory_type type)
{
	if (type != SC_HOST)
		return obtain_device(bytes);
	void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return base == MAP_FAILED ? NULL : base;
}

static void release(struct sc_memory *memory)
{
	if (memory->range)
		mmap(memory->base, memory->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
		     -1, 0);
	else if (memory->type == SC_HOST)
		munmap(memory->base, padded_size(memory->size));
	else
		release_device(memory->base, padded_size(memory->size));
}

static struct sc_memory *make(CUcontext context, size_t bytes, enum sc_memory_type type)
{
	const size_t padded = padded_size(bytes);
	unsigned char *base = obtain(padded, type);
	if (!base)
		return NULL;
	memset(base, POISON, bytes);
	memset(base + bytes, GUARDED, padded - bytes);
	struct sc_memory *memory = sc_alloc(sizeof *memory);
	*memory = (struct sc_memory){
	        .base = base, .size = bytes, .type = type, .context = context, .id = sc_new_id()};
	insert(memory);
	return memory;
}

void sc_memory_map(CUcontext context, unsigned char *base, size_t bytes, unsigned char *range,
                   size_t range_size)
{
	struct sc_memory *memory = sc_alloc(sizeof *memory);
	*memory = (struct sc_memory){.base = base,
	                             .size = bytes,
	                             .type = SC_DEVICE,
	                             .context = context,
	                             .id = sc_new_id(),
	                             .range = range,
	                             .range_size = range_size};
	insert(memory);
	softcuda_counters.allocations++;
	softcuda_counters.live++;
	softcuda_counters.bytes += (long)bytes;
}

static CUresult allocate(CUcontext context, CUdeviceptr *pointer, size_t bytes)
{
	size_t total = (size_t)softcuda_knobs.memory_mib << 20;
	if (!pointer || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (must_fail() || bytes > total || used(context->device) + bytes > total)
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct sc_memory *memory = make(context, bytes, SC_DEVICE);
	if (!memory)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*pointer = (CUdeviceptr)(uintptr_t)memory->base;
	softcuda_counters.allocations++;
	softcuda_counters.live++;
	softcuda_counters.bytes += (long)bytes;
	return CUDA_SUCCESS;
}

static void check_guard(const struct sc_memory *memory)
{
	for (size_t i = 0; i < GUARD && !memory->range; i++) {
		if (memory->base[memory->size + i] == GUARDED)
			continue;
		softcuda_counters.overruns++;
		fprintf(stderr, "softcuda: written past the end of an allocation of %zu bytes\n",
		        memory->size);
		return;
	}
}

void sc_memory_free(struct sc_memory *memory)
{
	size_t position = above(memory->base) - 1;
	check_guard(memory);
	memmove(table + position, table + position + 1, (count - position - 1) * sizeof *table);
	count--;
	if (memory->type == SC_DEVICE) {
		softcuda_counters.frees++;
		softcuda_counters.live--;
		softcuda_counters.bytes -= (long)memory->size;
	}
	release(memory);
	free(memory);
}

void sc_memory_drop_context(CUcontext context)
{
	for (size_t i = count; i-- > 0;)
		if (table[i]->context == context && !table[i]->graph)
			sc_memory_free(table[i]);
}

bool softcuda_covers(uint64_t pointer, size_t bytes)
{
	return sc_memory_covers(pointer, bytes);
}

CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	error = sc_unsafe();
	return sc_leave(error ? error : allocate(context, pointer, bytes));
}

/* Freeing waits for the context: nothing that could still use the memory is left. */
static CUresult give_back(CUdeviceptr pointer, enum sc_memory_type type)
{
	CUresult error = sc_unsafe();
	struct sc_memory *memory = sc_memory_find(pointer);
	if (error)
		return error;
	if (!memory || memory->base != address_of(pointer) || memory->type != type ||
	    memory->graph || memory->range)
		return CUDA_ERROR_INVALID_VALUE;
	error = sc_drain(memory->context);
	sc_memory_free(memory);
	return error;
}

CUresult CUDAAPI cuMemFree_v2(CUdeviceptr pointer)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	return error ? error : sc_leave(give_back(pointer, SC_DEVICE));
}

CUresult CUDAAPI cuMemGetInfo_v2(size_t *available, size_t *total)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	*total = (size_t)softcuda_knobs.memory_mib << 20;
	*available = *total - used(context->device);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	const struct sc_memory *memory = sc_memory_find(pointer);
	if (!memory)
		return sc_leave(CUDA_ERROR_NOT_FOUND);
	if (base)
		*base = (CUdeviceptr)(uintptr_t)memory->base;
	if (bytes)
		*bytes = memory->size;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	(void)flags;
	if (error)
		return error;
	error = sc_unsafe();
	if (error || !pointer || !bytes)
		return sc_leave(error ? error : CUDA_ERROR_INVALID_VALUE);
	struct sc_memory *memory = make(context, bytes, SC_HOST);
	if (!memory)
		return sc_leave(CUDA_ERROR_OUT_OF_MEMORY);
	*pointer = memory->base;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemAllocHost_v2(void **pointer, size_t bytes)
{
	return cuMemHostAlloc(pointer, bytes, 0);
}

CUresult CUDAAPI cuMemFreeHost(void *pointer)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	return error ? error : sc_leave(give_back((CUdeviceptr)(uintptr_t)pointer, SC_HOST));
}

/* Copies. */
struct copy {
	unsigned char *target;
	const unsigned char *source; /* NULL: the bytes follow this struct */
	size_t bytes;
};

static CUresult run_copy(const void *args)
{
	const struct copy *copy = args;
	memmove(copy->target, copy->source ? copy->source : (const unsigned char *)(copy + 1),
	        copy->bytes);
	return CUDA_SUCCESS;
}

/* Pageable memory may change or vanish as soon as the call has returned. */
static struct sc_work *stage(const struct copy *copy)
{
	struct sc_work *work =
	        sc_work_new(run_copy, NULL, sizeof *copy + copy->bytes, CU_GRAPH_NODE_TYPE_MEMCPY);
	struct copy *args = (struct copy *)work->args;
	*args = *copy;
	args->source = NULL;
	memcpy(args + 1, copy->source, copy->bytes);
	return work;
}

/* Which sides of a copy must be known memory. */
enum {
	TARGET = 1,
	SOURCE = 2
};

static CUresult submit_copy(CUstream stream, const struct copy *copy, bool wait)
{
	bool from_host = !sc_memory_find((CUdeviceptr)(uintptr_t)copy->source);
	bool to_host = !sc_memory_find((CUdeviceptr)(uintptr_t)copy->target);
	bool captured = stream->capture;
	struct sc_work *work = from_host && !captured ? stage(copy)
	                                              : sc_work_new(run_copy, copy, sizeof *copy,
	                                                            CU_GRAPH_NODE_TYPE_MEMCPY);
	CUresult error = sc_submit(stream, work);
	if (error || captured || !(wait || to_host))
		return error;
	softcuda_counters.syncs += wait;
	sc_run_until(sc_last(stream));
	return stream->context->broken;
}

static CUresult copy(CUdeviceptr target, CUdeviceptr source, size_t bytes, int known,
                     CUstream handle, bool synchronous, bool wait)
{
	CUstream stream;
	struct copy args = {address_of(target), address_of(source), bytes};
	CUresult error = sc_stream_find(handle, &stream);
	if (!error)
		error = sc_capture_check(stream);
	if (!error && synchronous)
		error = sc_unsafe();
	if (error || !bytes)
		return error;
	if ((known & TARGET && !sc_memory_covers(target, bytes)) ||
	    (known & SOURCE && !sc_memory_covers(source, bytes)))
		return CUDA_ERROR_INVALID_VALUE;
	return submit_copy(stream, &args, wait);
}

/* A synchronous copy goes through the legacy stream; one within the device does not wait. */
static CUresult copy_now(CUdeviceptr target, CUdeviceptr source, size_t bytes, int known)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	return sc_leave(copy(target, source, bytes, known, CU_STREAM_LEGACY, true,
	                     known != (TARGET | SOURCE)));
}

static CUresult copy_later(CUdeviceptr target, CUdeviceptr source, size_t bytes, int known,
                           CUstream stream)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	return error ? error : sc_leave(copy(target, source, bytes, known, stream, false, false));
}

CUresult CUDAAPI cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t bytes)
{
	return copy_now(target, (CUdeviceptr)(uintptr_t)source, bytes, TARGET);
}

CUresult CUDAAPI cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t bytes)
{
	return copy_now((CUdeviceptr)(uintptr_t)target, source, bytes, SOURCE);
}

CUresult CUDAAPI cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes)
{
	return copy_now(target, source, bytes, TARGET | SOURCE);
}

CUresult CUDAAPI cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t bytes)
{
	return copy_now(target, source, bytes, 0);
}

CUresult CUDAAPI cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t bytes,
                                      CUstream stream)
{
	return copy_later(target, (CUdeviceptr)(uintptr_t)source, bytes, TARGET, stream);
}

CUresult CUDAAPI cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t bytes,
                                      CUstream stream)
{
	return copy_later((CUdeviceptr)(uintptr_t)target, source, bytes, SOURCE, stream);
}

CUresult CUDAAPI cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes,
                                      CUstream stream)
{
	return copy_later(target, source, bytes, TARGET | SOURCE, stream);
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes,
                               CUstream stream)
{
	return copy_later(target, source, bytes, 0, stream);
}

/* All addresses are valid everywhere, whosever they are. */
CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                                   CUcontext source_context, size_t bytes, CUstream stream)
{
	if (!target_context || !source_context)
		return CUDA_ERROR_INVALID_CONTEXT;
	return copy_later(target, source, bytes, TARGET | SOURCE, stream);
}

/* Within devices, row by row. */
CUresult CUDAAPI cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream)
{
	if (copy->srcMemoryType != CU_MEMORYTYPE_DEVICE ||
	    copy->dstMemoryType != CU_MEMORYTYPE_DEVICE)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUdeviceptr target = copy->dstDevice + copy->dstY * copy->dstPitch + copy->dstXInBytes;
	CUdeviceptr source = copy->srcDevice + copy->srcY * copy->srcPitch + copy->srcXInBytes;
	CUresult error = CUDA_SUCCESS;
	for (size_t row = 0; row < copy->Height && !error; row++)
		error = copy_later(target + row * copy->dstPitch, source + row * copy->srcPitch,
		                   copy->WidthInBytes, TARGET | SOURCE, stream);
	return error;
}

#if CUDA_VERSION >= 13000
/* One after the other, which is one of the orders that a batch may have. */
CUresult CUDAAPI cuMemcpyBatchAsync_v2(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes,
                                       size_t copies, CUmemcpyAttributes *attributes,
                                       size_t *attribute_of, size_t attribute_count,
                                       CUstream stream)
{
	CUresult error = CUDA_SUCCESS;
	if (!stream || stream == CU_STREAM_LEGACY || !attributes || !attribute_of ||
	    !attribute_count || attribute_of[0])
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < copies && !error; i++)
		error = copy_later(targets[i], sources[i], sizes[i], 0, stream);
	return error;
}
#endif

/* Memsets: never waited for. */
struct fill {
	unsigned char *target;
	uint32_t value;
	uint32_t width; /* bytes of an element */
	size_t count;   /* elements            */
};

static CUresult run_fill(const void *args)
{
	const struct fill *fill = args;
	for (size_t i = 0; i < fill->count; i++)
		memcpy(fill->target + i * fill->width, &fill->value, fill->width);
	return CUDA_SUCCESS;
}

static CUresult submit_fill(const struct fill *fill, CUstream handle)
{
	CUstream stream;
	CUresult error = sc_stream_find(handle, &stream);
	if (!error)
		error = sc_capture_check(stream);
	if (error || !fill->count)
		return error;
	if ((uintptr_t)fill->target % fill->width ||
	    !sc_memory_covers((CUdeviceptr)(uintptr_t)fill->target, fill->count * fill->width))
		return CUDA_ERROR_INVALID_VALUE;
	return sc_submit(stream,
	                 sc_work_new(run_fill, fill, sizeof *fill, CU_GRAPH_NODE_TYPE_MEMSET));
}

static CUresult fill(CUdeviceptr target, uint32_t value, uint32_t width, size_t elements,
                     CUstream stream)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	struct fill args = {address_of(target), value, width, elements};
	return error ? error : sc_leave(submit_fill(&args, stream));
}

CUresult CUDAAPI cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t n)
{
	return fill(target, value, 1, n, CU_STREAM_LEGACY);
}

CUresult CUDAAPI cuMemsetD16_v2(CUdeviceptr target, unsigned short value, size_t n)
{
	return fill(target, value, 2, n, CU_STREAM_LEGACY);
}

CUresult CUDAAPI cuMemsetD32_v2(CUdeviceptr target, unsigned int value, size_t n)
{
	return fill(target, value, 4, n, CU_STREAM_LEGACY);
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t n, CUstream stream)
{
	return fill(target, value, 1, n, stream);
}

CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr target, unsigned short value, size_t n,
                                  CUstream stream)
{
	return fill(target, value, 2, n, stream);
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr target, unsigned int value, size_t n, CUstream stream)
{
	return fill(target, value, 4, n, stream);
}

/* Copies and fills as nodes. */
void sc_copy_node(const void *args, CUDA_MEMCPY3D *out)
{
	const struct copy *node = args;
	*out = (CUDA_MEMCPY3D){.srcMemoryType = CU_MEMORYTYPE_UNIFIED,
	                       .srcDevice = (CUdeviceptr)(uintptr_t)node->source,
	                       .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
	                       .dstDevice = (CUdeviceptr)(uintptr_t)node->target,
	                       .WidthInBytes = node->bytes,
	                       .Height = 1,
	                       .Depth = 1};
}

struct sc_work *sc_copy_work(const CUDA_MEMCPY3D *params)
{
	const struct copy node = {address_of(params->dstDevice), address_of(params->srcDevice),
	                          params->WidthInBytes};
	return sc_work_new(run_copy, &node, sizeof node, CU_GRAPH_NODE_TYPE_MEMCPY);
}

void sc_fill_node(const void *args, CUDA_MEMSET_NODE_PARAMS *out)
{
	const struct fill *node = args;
	*out = (CUDA_MEMSET_NODE_PARAMS){.dst = (CUdeviceptr)(uintptr_t)node->target,
	                                 .value = node->value,
	                                 .elementSize = node->width,
	                                 .width = node->count,
	                                 .height = 1};
}

struct sc_work *sc_fill_work(const CUDA_MEMSET_NODE_PARAMS *params)
{
	const struct fill node = {address_of(params->dst), params->value, params->elementSize,
	                          params->width};
	return sc_work_new(run_fill, &node, sizeof node, CU_GRAPH_NODE_TYPE_MEMSET);
}

/* Stream-ordered allocation: the address is known at once, its content and its end are not. */
static CUresult run_poison(const void *args)
{
	const struct sc_memory *memory = sc_memory_find(*(const CUdeviceptr *)args);
	memset(memory->base, POISON, memory->size);
	return CUDA_SUCCESS;
}

static CUresult run_free(const void *args)
{
	sc_memory_free(sc_memory_find(*(const CUdeviceptr *)args));
	return CUDA_SUCCESS;
}

/* Memory of a capture belongs to the graph, which poisons it whenever it "allocates" or "frees". */
static CUresult allocate_in_stream(CUcontext context, CUdeviceptr *pointer, size_t bytes,
                                   CUstream stream)
{
	CUresult error = sc_capture_check(stream);
	if (!error)
		error = allocate(context, pointer, bytes);
	if (error)
		return error;
	if (stream->capture) {
		sc_memory_find(*pointer)->graph = true;
		sc_graph_keep_memory(stream->capture->graph, *pointer);
	}
	return sc_submit(stream, sc_work_new(run_poison, pointer, sizeof *pointer,
	                                     CU_GRAPH_NODE_TYPE_MEM_ALLOC));
}

CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream handle)
{
	CUcontext context;
	CUstream stream;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	error = sc_stream_find(handle, &stream);
	return sc_leave(error ? error : allocate_in_stream(context, pointer, bytes, stream));
}

CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr pointer, CUstream handle)
{
	CUcontext context;
	CUstream stream;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	const struct sc_memory *memory = sc_memory_find(pointer);
	error = sc_stream_find(handle, &stream);
	if (!error)
		error = sc_capture_check(stream);
	if (!error && (!memory || memory->base != address_of(pointer) ||
	               memory->graph != (stream->capture != NULL)))
		error = CUDA_ERROR_INVALID_VALUE;
	if (error)
		return sc_leave(error);
	return sc_leave(
	        sc_submit(stream, sc_work_new(memory->graph ? run_poison : run_free, &pointer,
	                                      sizeof pointer, CU_GRAPH_NODE_TYPE_MEM_FREE)));
}

/* Pointer attributes; false if the attribute is not offered. */
static bool attribute_of(const struct sc_memory *memory, CUpointer_attribute attribute,
                         CUdeviceptr pointer, void *data)
{
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)data = memory->context;
		return true;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned *)data =
		        memory->type == SC_DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
		return true;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)data = pointer;
		return true;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		*(void **)data = memory->type == SC_HOST ? address_of(pointer) : NULL;
		return memory->type == SC_HOST;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(unsigned long long *)data = memory->id;
		return true;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(unsigned *)data = 0; /* documented as boolean; the driver writes 4 bytes */
		return true;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)data = memory->context->device;
		return true;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)data =
		        (CUdeviceptr)(uintptr_t)(memory->range ? memory->range : memory->base);
		return true;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)data = memory->range ? memory->range_size : memory->size;
		return true;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*(unsigned *)data = 1;
		return true;
	default:
		return false;
	}
}

CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute,
                                       CUdeviceptr pointer)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	const struct sc_memory *memory = sc_memory_find(pointer);
	bool known = data && memory && attribute_of(memory, attribute, pointer, data);
	return sc_leave(known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

/* What an address that CUDA does not know gets: no error here, unlike the singular form. */
static void attribute_of_nothing(CUpointer_attribute attribute, void *data)
{
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)data = -2;
		break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*(unsigned *)data = 0;
		break;
	default:
		*(uint64_t *)data = 0;
	}
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned int attributes_count,
                                        CUpointer_attribute *attributes, void **data,
                                        CUdeviceptr pointer)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	const struct sc_memory *memory = sc_memory_find(pointer);
	for (unsigned i = 0; i < attributes_count; i++)
		if (!memory || !attribute_of(memory, attributes[i], pointer, data[i]))
			attribute_of_nothing(attributes[i], data[i]);
	return sc_leave(CUDA_SUCCESS);
}
