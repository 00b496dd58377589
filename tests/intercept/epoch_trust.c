/* A program with products and copies: what moves the submission epoch, and when it may be trusted.
 * Prints one line per step. `epoch_trust [LIBRARY]` opens a further library at the end. */
#define _GNU_SOURCE
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/intercept/epoch_open.h"

#define SIDE 64

static __typeof__(qs_test_epoch) *epoch;
static __typeof__(qs_test_doubt) *doubt;
static __typeof__(qs_test_trusted) *trusted;
static cublasHandle_t handle;
static uint16_t *a, *b, *c; /* device */

static void *find(const char *name)
{
	void *found = dlsym(RTLD_DEFAULT, name);
	if (found)
		return found;
	fprintf(stderr, "epoch_trust: %s\n", dlerror());
	exit(3);
}

static int product(void)
{
	const float one = 1.0f, zero = 0.0f;
	return (int)cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, SIDE, SIDE, SIDE, &one, a,
	                         CUDA_R_16BF, SIDE, b, CUDA_R_16BF, SIDE, &zero, c, CUDA_R_16BF,
	                         SIDE, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

static int copy(void)
{
	return cudaMemcpyAsync(a, b, SIDE * SIDE * sizeof *a, cudaMemcpyDeviceToDevice, NULL);
}

static int nothing(void)
{
	return cudaDeviceSynchronize();
}

static void step(const char *name, int (*run)(void))
{
	uint64_t before = epoch();
	int failed = run();
	printf("%s: status %d, moved %d, trusted %d, %s\n", name, failed, (int)(epoch() - before),
	       trusted(), doubt() ? doubt() : "no doubt");
}

static int set_up(void)
{
	const size_t bytes = SIDE * SIDE * sizeof *a;
	return cudaMalloc((void **)&a, bytes) || cudaMalloc((void **)&b, bytes) ||
	       cudaMalloc((void **)&c, bytes) || cudaMemset(a, 0, bytes) ||
	       cudaMemset(b, 0, bytes) || cublasCreate(&handle);
}

int main(int argc, char **argv)
{
	epoch = (__typeof__(epoch))find("qs_test_epoch");
	doubt = (__typeof__(doubt))find("qs_test_doubt");
	trusted = (__typeof__(trusted))find("qs_test_trusted");
	__typeof__(qs_test_driver_is_real) *is_real =
	        (__typeof__(is_real))find("qs_test_driver_is_real");
	if (set_up())
		return EXIT_FAILURE;
	step("start", nothing);
	step("copy", copy);
	if (argc > 1 && !dlopen(argv[1], RTLD_LOCAL | RTLD_NOW))
		return EXIT_FAILURE;
	step("product", product);
	step("again", product);
	step("wait", nothing);
	printf("driver is real %d\n", is_real());
	return EXIT_SUCCESS;
}
