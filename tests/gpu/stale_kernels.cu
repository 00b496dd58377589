// Writers of a weight for stale_weights.py, built into a library with the runtime linked
// statically: the address is an argument, lies inside a struct, or is found in device memory. All
// multiply bf16 elements [from, from + count) by -1/2, which is exact. Each returns what
// cudaGetLastError() says.
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
