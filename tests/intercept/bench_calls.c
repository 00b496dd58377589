/* Nanoseconds that one call of cublasGemmEx and of cublasLtMatmul takes the calling thread: the
 * median of many batches, each submitted to an idle device. With and without the shim; what is made
 * of the difference is the caller's business.
 *
 * Usage: bench_calls [SIDE CALLS BATCHES], of square products and of batches of calls. The default
 * is for libraries whose products do nothing (softcuda's knob null_products). On a GPU a batch must
 * fit into the driver's queue, or the device would be timed: 1024 launches, three a call. */
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int side = 64, calls = 1000, batches = 1000;

static cublasHandle_t handle;
static cublasLtMatmulDesc_t desc;
static cublasLtMatrixLayout_t layout;
static uint16_t *a, *b, *c; /* device */

static int gemm_ex(void)
{
	const float one = 1.0f, zero = 0.0f;
	return (int)cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, side, side, side, &one, a,
	                         CUDA_R_16BF, side, b, CUDA_R_16BF, side, &zero, c, CUDA_R_16BF,
	                         side, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
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

/* Status of the first call that failed, 0 if none did. */
static int measure(const char *name, int (*call)(void))
{
	double *batch = malloc((size_t)batches * sizeof *batch);
	int failed = batch ? 0 : EXIT_FAILURE;
	for (int i = 0; i < 3 && !failed; i++) /* decisions and timings are no measure */
		failed = call();
	for (int i = 0; i < batches && !failed; i++) {
		cudaDeviceSynchronize();
		double start = now();
		for (int j = 0; j < calls && !failed; j++)
			failed = call();
		batch[i] = (now() - start) / calls;
	}
	if (!failed) {
		qsort(batch, (size_t)batches, sizeof *batch, compare);
		printf("%s %.1f\n", name, batch[batches / 2]);
	}
	free(batch);
	return failed;
}

static int set_up(void)
{
	const size_t bytes = (size_t)side * (size_t)side * sizeof(uint16_t);
	return cudaMalloc((void **)&a, bytes) || cudaMalloc((void **)&b, bytes) ||
	       cudaMalloc((void **)&c, bytes) || cudaMemset(a, 0x3c, bytes) ||
	       cudaMemset(b, 0x3c, bytes) || cublasCreate(&handle) ||
	       cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) ||
	       cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, (uint64_t)side, (uint64_t)side,
	                                  side);
}

static int positive(const char *text)
{
	char *end;
	long value = strtol(text, &end, 10);
	return *end || value < 1 || value > 1 << 20 ? 0 : (int)value;
}

int main(int argc, char **argv)
{
	int *const numbers[] = {&side, &calls, &batches};
	for (int i = 0; i < 3 && argc == 4; i++)
		*numbers[i] = positive(argv[i + 1]);
	if ((argc != 1 && argc != 4) || !side || !calls || !batches) {
		fprintf(stderr, "usage: bench_calls [SIDE CALLS BATCHES]\n");
		return 2;
	}
	if (set_up())
		return EXIT_FAILURE;
	return measure("cublasGemmEx", gemm_ex) || measure("cublasLtMatmul", lt_matmul);
}
