/* The snippets: C[i] = alpha A' B[i] + beta C[i] for two small C of bf16, by one call of one
 * function (those that take one product make the first). Too small to be replaced: with and without
 * the shim the bits must be the same. */
#include "tests/intercept/snippet.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef BY_DLSYM
look_up_function *snippet_look_up;
#define FUN(function) ((__typeof__(function) *)snippet_look_up(#function))
#else
#define FUN(function) function
#endif

/* No two alike, so that exchanged arguments change the result. */
#define M 48
#define N 24
#define K 40
#define T CUBLAS_OP_T
#define O CUBLAS_OP_N

#define A_COUNT (M * K)
#define B_COUNT (N * K * 2)
#define C_COUNT (M * N * 2)

#define BF16   CUDA_R_16BF
#define FP32   CUBLAS_COMPUTE_32F
#define NORMAL CUBLAS_GEMM_DEFAULT

/* What a call is made with; all zero in mode "null". */
struct scene {
	cublasHandle_t handle;
	uint16_t *a, *b, *c;   /* device                                       */
	const void **as, **bs; /* device, two pointers                         */
	void **cs;             /* device, two pointers                         */
	float alpha[2], beta[2];
	cublasLtMatmulDesc_t desc;
	cublasLtMatrixLayout_t la, lb, lc;
};

typedef cublasStatus_t call_function(const struct scene *s);

static cublasStatus_t gemm_ex(const struct scene *s)
{
	return FUN(cublasGemmEx)(s->handle, T, O, M, N, K, s->alpha, s->a, BF16, K, s->b, BF16, K,
	                         s->beta, s->c, BF16, M, FP32, NORMAL);
}

static cublasStatus_t gemm_ex_64(const struct scene *s)
{
	return FUN(cublasGemmEx_64)(s->handle, T, O, M, N, K, s->alpha, s->a, BF16, K, s->b, BF16,
	                            K, s->beta, s->c, BF16, M, FP32, NORMAL);
}

static cublasStatus_t strided(const struct scene *s)
{
	return FUN(cublasGemmStridedBatchedEx)(s->handle, T, O, M, N, K, s->alpha, s->a, BF16, K, 0,
	                                       s->b, BF16, K, N * K, s->beta, s->c, BF16, M, M * N,
	                                       2, FP32, NORMAL);
}

static cublasStatus_t strided_64(const struct scene *s)
{
	return FUN(cublasGemmStridedBatchedEx_64)(s->handle, T, O, M, N, K, s->alpha, s->a, BF16, K,
	                                          0, s->b, BF16, K, N * K, s->beta, s->c, BF16, M,
	                                          M * N, 2, FP32, NORMAL);
}

static cublasStatus_t lt_matmul(const struct scene *s)
{
	return FUN(cublasLtMatmul)((cublasLtHandle_t)s->handle, s->desc, s->alpha, s->a, s->la,
	                           s->b, s->lb, s->beta, s->c, s->lc, s->c, s->lc, NULL, NULL, 0,
	                           NULL);
}

static cublasStatus_t batched(const struct scene *s)
{
	return FUN(cublasGemmBatchedEx)(s->handle, T, O, M, N, K, s->alpha, s->as, BF16, K, s->bs,
	                                BF16, K, s->beta, s->cs, BF16, M, 2, FP32, NORMAL);
}

static cublasStatus_t batched_64(const struct scene *s)
{
	return FUN(cublasGemmBatchedEx_64)(s->handle, T, O, M, N, K, s->alpha, s->as, BF16, K,
	                                   s->bs, BF16, K, s->beta, s->cs, BF16, M, 2, FP32,
	                                   NORMAL);
}

static cublasStatus_t grouped(const struct scene *s)
{
	const cublasOperation_t ta[] = {T, T}, tb[] = {O, O};
	const int m[] = {M, M}, n[] = {N, N}, k[] = {K, K}, sizes[] = {1, 1};
	return FUN(cublasGemmGroupedBatchedEx)(s->handle, ta, tb, m, n, k, s->alpha, s->as, BF16, k,
	                                       s->bs, BF16, k, s->beta, s->cs, BF16, m, 2, sizes,
	                                       FP32);
}

static cublasStatus_t grouped_64(const struct scene *s)
{
	const cublasOperation_t ta[] = {T, T}, tb[] = {O, O};
	const int64_t m[] = {M, M}, n[] = {N, N}, k[] = {K, K}, sizes[] = {1, 1};
	return FUN(cublasGemmGroupedBatchedEx_64)(s->handle, ta, tb, m, n, k, s->alpha, s->as, BF16,
	                                          k, s->bs, BF16, k, s->beta, s->cs, BF16, m, 2,
	                                          sizes, FP32);
}

static cublasStatus_t sgemm_ex(const struct scene *s)
{
	return FUN(cublasSgemmEx)(s->handle, T, O, M, N, K, s->alpha, s->a, BF16, K, s->b, BF16, K,
	                          s->beta, s->c, BF16, M);
}

static cublasStatus_t sgemm_ex_64(const struct scene *s)
{
	return FUN(cublasSgemmEx_64)(s->handle, T, O, M, N, K, s->alpha, s->a, BF16, K, s->b, BF16,
	                             K, s->beta, s->c, BF16, M);
}

static const struct {
	const char *api;
	call_function *call;
} snippets[] = {
        {"cublasGemmEx", gemm_ex},
        {"cublasGemmEx_64", gemm_ex_64},
        {"cublasGemmStridedBatchedEx", strided},
        {"cublasGemmStridedBatchedEx_64", strided_64},
        {"cublasLtMatmul", lt_matmul},
        {"cublasGemmBatchedEx", batched},
        {"cublasGemmBatchedEx_64", batched_64},
        {"cublasGemmGroupedBatchedEx", grouped},
        {"cublasGemmGroupedBatchedEx_64", grouped_64},
        {"cublasSgemmEx", sgemm_ex},
        {"cublasSgemmEx_64", sgemm_ex_64},
};

/* ---- the scene ---- */

static void need(bool good, const char *step)
{
	if (good)
		return;
	fprintf(stderr, "snippet: %s failed\n", step);
	exit(3);
}

/* Multiples of 1/64 below 4: exact in bf16, most of them not in fp8. */
static uint16_t *operand(size_t count, unsigned seed)
{
	uint16_t *device = NULL;
	uint16_t *host = malloc(count * sizeof *host);
	need(host && !cudaMalloc((void **)&device, count * sizeof *host), "cudaMalloc");
	for (size_t i = 0; i < count; i++) {
		float value = (float)((int)((i * 37 + seed) % 255) - 127) / 64.0f;
		uint32_t bits;
		memcpy(&bits, &value, sizeof bits);
		host[i] = (uint16_t)(bits >> 16);
	}
	need(!cudaMemcpy(device, host, count * sizeof *host, cudaMemcpyHostToDevice), "cudaMemcpy");
	free(host);
	return device;
}

static void *pointers(const void *first, const void *second)
{
	const void *host[] = {first, second};
	void *device = NULL;
	need(!cudaMalloc(&device, sizeof host), "cudaMalloc");
	need(!cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice), "cudaMemcpy");
	return device;
}

static void set_up_lt(struct scene *s)
{
	cublasOperation_t t = T;
	need(!FUN(cublasLtMatmulDescCreate)(&s->desc, FP32, CUDA_R_32F) &&
	             !FUN(cublasLtMatmulDescSetAttribute)(s->desc, CUBLASLT_MATMUL_DESC_TRANSA, &t,
	                                                  sizeof t) &&
	             !FUN(cublasLtMatrixLayoutCreate)(&s->la, BF16, K, M, K) &&
	             !FUN(cublasLtMatrixLayoutCreate)(&s->lb, BF16, K, N, K) &&
	             !FUN(cublasLtMatrixLayoutCreate)(&s->lc, BF16, M, N, M),
	     "describing the matrices");
}

static void set_up(struct scene *s)
{
	need(!FUN(cublasCreate_v2)(&s->handle), "cublasCreate");
	s->alpha[0] = s->alpha[1] = 0.5f;
	s->beta[0] = s->beta[1] = 0.25f;
	s->a = operand(A_COUNT, 1);
	s->b = operand(B_COUNT, 2);
	s->c = operand(C_COUNT, 3);
	s->as = pointers(s->a, s->a);
	s->bs = pointers(s->b, s->b + N * K);
	s->cs = pointers(s->c, s->c + M * N);
	set_up_lt(s);
}

/* FNV-1a of the output. */
static uint64_t finish(struct scene *s)
{
	uint16_t host[C_COUNT];
	uint64_t hash = 0xcbf29ce484222325u;
	need(!cudaDeviceSynchronize(), "cudaDeviceSynchronize");
	need(!cudaMemcpy(host, s->c, sizeof host, cudaMemcpyDeviceToHost), "cudaMemcpy");
	for (size_t i = 0; i < C_COUNT; i++)
		hash = (hash ^ host[i]) * 0x100000001b3u;
	need(!FUN(cublasDestroy_v2)(s->handle), "cublasDestroy");
	return hash;
}

int snippet(const char *label, const char *api, const char *mode)
{
	struct scene s = {0};
	bool product = !strcmp(mode, "product");
	for (size_t i = 0; i < sizeof snippets / sizeof *snippets; i++) {
		if (strcmp(snippets[i].api, api))
			continue;
		if (product)
			set_up(&s);
		cublasStatus_t status = snippets[i].call(&s);
		uint64_t sum = product ? finish(&s) : 0;
		printf("%s %s status %d sum %016llx\n", label, api, (int)status,
		       (unsigned long long)sum);
		return 0;
	}
	return 2;
}
