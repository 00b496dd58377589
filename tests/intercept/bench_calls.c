/* Nanoseconds of one call of cublasGemmEx and of cublasLtMatmul, as the program sees it: the median
 * of many batches. Meant for libraries whose products do nothing (softcuda's knob null_products),
 * with and without the shim; what is made of the difference is the caller's business. */
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define BATCHES 1000
#define CALLS   1000 /* of a batch */
#define SIDE    64

static cublasHandle_t handle;
static cublasLtMatmulDesc_t desc;
static cublasLtMatrixLayout_t layout;
static uint16_t *a, *b, *c; /* device */

static int gemm_ex(void)
{
	const float one = 1.0f, zero = 0.0f;
	return (int)cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, SIDE, SIDE, SIDE, &one, a,
	                         CUDA_R_16BF, SIDE, b, CUDA_R_16BF, SIDE, &zero, c, CUDA_R_16BF,
	                         SIDE, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

static int lt_matmul(void)
{
	const float one = 1.0f, zero = 0.0f;
	return (int)cublasLtMatmul((cublasLtHandle_t)handle, desc, &one, a, layout, b, layout,
	                           &zero, c, layout, c, layout, NULL, NULL, 0, NULL);
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int compare(const void *x, const void *y)
{
	double a_ns = *(const double *)x, b_ns = *(const double *)y;
	return (a_ns > b_ns) - (a_ns < b_ns);
}

/* False if a call failed. */
static int measure(const char *name, int (*call)(void))
{
	static double batch[BATCHES];
	int failed = call(); /* the first call decides and is no measure */
	for (int i = 0; i < BATCHES; i++) {
		double start = now();
		for (int j = 0; j < CALLS; j++)
			failed |= call();
		batch[i] = (now() - start) / CALLS;
	}
	qsort(batch, BATCHES, sizeof *batch, compare);
	printf("%s %.1f\n", name, batch[BATCHES / 2]);
	return failed;
}

static int set_up(void)
{
	const size_t bytes = SIDE * SIDE * sizeof(uint16_t);
	return cudaMalloc((void **)&a, bytes) || cudaMalloc((void **)&b, bytes) ||
	       cudaMalloc((void **)&c, bytes) || cublasCreate(&handle) ||
	       cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) ||
	       cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, SIDE, SIDE, SIDE);
}

int main(void)
{
	if (set_up())
		return EXIT_FAILURE;
	return measure("cublasGemmEx", gemm_ex) || measure("cublasLtMatmul", lt_matmul);
}
