// Writers of a weight for stale_weights.py, built into a library with the runtime linked
// statically. Kernels multiply bf16 elements [from, from + count) by -1/2, which is exact: the
// address is an argument, lies inside a struct, or is found in device memory. The forms of copies
// and fills are those that PyTorch has no call for. Each returns its CUDA error.
#include <cuda_runtime.h>

struct job {
	int before;             // something in front, so that the address is not the first word
	unsigned short *weight; // bf16
	long from, count;       // elements
};

static __device__ void halve(unsigned short *weight, long from, long count)
{
	long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
	if (i >= count)
		return;
	float value = -0.5f * __uint_as_float((unsigned)weight[from + i] << 16);
	weight[from + i] = (unsigned short)(__float_as_uint(value) >> 16);
}

static __global__ void by_argument(unsigned short *weight, long from, long count)
{
	halve(weight, from, count);
}

static __global__ void by_struct(job work)
{
	halve(work.weight, work.from, work.count);
}

static __global__ void by_table(unsigned short *const *table, long from, long count)
{
	halve(table[1], from, count);
}

static unsigned blocks(long count)
{
	return (unsigned)((count + 255) / 256);
}

extern "C" int halve_by_argument(void *weight, long from, long count, void *stream)
{
	by_argument<<<blocks(count), 256, 0, (cudaStream_t)stream>>>((unsigned short *)weight, from,
	                                                             count);
	return cudaGetLastError();
}

extern "C" int halve_by_struct(void *weight, long from, long count, void *stream)
{
	job work = {1, (unsigned short *)weight, from, count};
	by_struct<<<blocks(count), 256, 0, (cudaStream_t)stream>>>(work);
	return cudaGetLastError();
}

// `table` is in device memory; its second entry is the weight.
extern "C" int halve_by_table(void *table, long from, long count, void *stream)
{
	by_table<<<blocks(count), 256, 0, (cudaStream_t)stream>>>((unsigned short *const *)table,
	                                                          from, count);
	return cudaGetLastError();
}

// ---- copies and fills ----

// Zeros, from element `from` on.
extern "C" int clear_by_memset(void *weight, long from, long count, void *stream)
{
	return cudaMemsetAsync((unsigned short *)weight + from, 0, (size_t)count * 2,
	                       (cudaStream_t)stream);
}

extern "C" int copy_by_peer(void *to, long to_device, const void *from, long from_device,
                            long bytes, void *stream)
{
	return cudaMemcpyPeerAsync(to, (int)to_device, from, (int)from_device, (size_t)bytes,
	                           (cudaStream_t)stream);
}

// Two halves; never in the legacy stream, which batches refuse.
extern "C" int copy_by_batch(void *to, const void *from, long bytes, void *stream)
{
#if CUDART_VERSION >= 13000
	size_t half = (size_t)bytes / 2, sizes[] = {half, (size_t)bytes - half}, first = 0;
	void *targets[] = {to, (char *)to + half};
	const void *sources[] = {from, (const char *)from + half};
	cudaMemcpyAttributes how = {};
	how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
	return cudaMemcpyBatchAsync(targets, sources, sizes, 2, &how, &first, 1,
	                            (cudaStream_t)stream);
#else
	return cudaErrorNotSupported;
#endif
}

// The first `width` bytes of each of `rows` rows of `pitch` bytes.
extern "C" int copy_by_rows(void *to, const void *from, long pitch, long width, long rows,
                            void *stream)
{
	return cudaMemcpy2DAsync(to, (size_t)pitch, from, (size_t)pitch, (size_t)width,
	                         (size_t)rows, cudaMemcpyDeviceToDevice, (cudaStream_t)stream);
}

// The same as a box of two layers, of half of the rows each.
extern "C" int copy_by_box(void *to, const void *from, long pitch, long width, long rows,
                           void *stream)
{
	cudaMemcpy3DParms box = {};
	box.srcPtr =
	        make_cudaPitchedPtr((void *)from, (size_t)pitch, (size_t)pitch, (size_t)rows / 2);
	box.dstPtr = make_cudaPitchedPtr(to, (size_t)pitch, (size_t)pitch, (size_t)rows / 2);
	box.extent = make_cudaExtent((size_t)width, (size_t)rows / 2, 2);
	box.kind = cudaMemcpyDeviceToDevice;
	return cudaMemcpy3DAsync(&box, (cudaStream_t)stream);
}
