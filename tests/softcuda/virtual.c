/* Virtual memory: addresses that are reserved, and memory of its own that is mapped there, in
 * pieces and more than once. Memory is a file without a name, as several mappings share it. One
 * reservation is one range to whoever asks for a pointer's attributes. Memory that is not mapped,
 * or that nobody was given access to, faults.
 */
#define _GNU_SOURCE
#include "tests/softcuda/inside.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULARITY ((size_t)16 << 10) /* small, for small tests; devices have 2 MiB */

/* What a handle of memory is. */
struct piece {
	int fd;
	size_t size; /* bytes */
};

static struct range {
	unsigned char *base;
	size_t size; /* bytes */
	struct range *next;
} * ranges;

static unsigned char *address_of(CUdeviceptr pointer)
{
	return (unsigned char *)(uintptr_t)pointer;
}

/* The reservation that has all of the bytes. */
static const struct range *range_of(CUdeviceptr pointer, size_t bytes)
{
	const unsigned char *first = address_of(pointer);
	for (const struct range *range = ranges; range; range = range->next)
		if (first >= range->base && first + bytes <= range->base + range->size)
			return range;
	return NULL;
}

static bool is_whole(size_t bytes)
{
	return bytes && bytes % GRANULARITY == 0;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity,
                                               const CUmemAllocationProp *properties,
                                               CUmemAllocationGranularity_flags option)
{
	(void)option;
	if (!granularity || !properties)
		return CUDA_ERROR_INVALID_VALUE;
	*granularity = GRANULARITY;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment,
                                     CUdeviceptr address, unsigned long long flags)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	(void)alignment, (void)address, (void)flags;
	if (error)
		return error;
	if (!pointer || !is_whole(size))
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	void *base = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (base == MAP_FAILED)
		return sc_leave(CUDA_ERROR_OUT_OF_MEMORY);
	struct range *range = sc_alloc(sizeof *range);
	*range = (struct range){base, size, ranges};
	ranges = range;
	*pointer = (CUdeviceptr)(uintptr_t)base;
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr pointer, size_t size)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	for (struct range **at = &ranges; *at; at = &(*at)->next) {
		struct range *range = *at;
		if (range->base != address_of(pointer) || range->size != size)
			continue;
		*at = range->next;
		munmap(range->base, range->size);
		free(range);
		return sc_leave(CUDA_SUCCESS);
	}
	return sc_leave(CUDA_ERROR_INVALID_VALUE);
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                             const CUmemAllocationProp *properties, unsigned long long flags)
{
	(void)flags;
	if (!handle || !properties || !is_whole(size))
		return CUDA_ERROR_INVALID_VALUE;
	const int fd = memfd_create("softcuda", MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)size))
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct piece *piece = sc_alloc(sizeof *piece);
	*piece = (struct piece){fd, size};
	*handle = (CUmemGenericAllocationHandle)(uintptr_t)piece;
	return CUDA_SUCCESS;
}

/* What is mapped stays. */
CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
	struct piece *piece = (struct piece *)(uintptr_t)handle;
	close(piece->fd);
	free(piece);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	CUcontext context;
	const struct piece *piece = (const struct piece *)(uintptr_t)handle;
	CUresult error = sc_enter_context(&context);
	(void)flags;
	if (error)
		return error;
	const struct range *range = range_of(pointer, size);
	if (!range || !is_whole(size) || offset % GRANULARITY || offset + size > piece->size ||
	    sc_memory_find(pointer))
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	if (mmap(address_of(pointer), size, PROT_NONE, MAP_SHARED | MAP_FIXED, piece->fd,
	         (off_t)offset) == MAP_FAILED)
		return sc_leave(CUDA_ERROR_OUT_OF_MEMORY);
	sc_memory_map(context, address_of(pointer), size, range->base, range->size);
	return sc_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access,
                                size_t accesses)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	if (!access || !accesses || !sc_memory_covers(pointer, size))
		return sc_leave(CUDA_ERROR_INVALID_VALUE);
	return sc_leave(mprotect(address_of(pointer), size, PROT_READ | PROT_WRITE)
	                        ? CUDA_ERROR_UNKNOWN
	                        : CUDA_SUCCESS);
}

/* Of whole pieces. Waits for whoever could still use them. */
CUresult CUDAAPI cuMemUnmap(CUdeviceptr pointer, size_t size)
{
	CUcontext context;
	CUresult error = sc_enter_context(&context);
	if (error)
		return error;
	error = sc_drain(context);
	for (size_t done = 0; done < size && !error;) {
		struct sc_memory *memory = sc_memory_find(pointer + done);
		if (!memory || !memory->range || memory->base != address_of(pointer + done) ||
		    memory->size > size - done)
			return sc_leave(CUDA_ERROR_INVALID_VALUE);
		done += memory->size;
		sc_memory_free(memory);
	}
	return sc_leave(error);
}
