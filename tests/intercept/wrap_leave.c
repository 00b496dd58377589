/* A library between the shim and cuBLAS whose calls do not always return: once told to, the next
 * one ends in longjmp() or in a function that throws a C++ exception, its product submitted. */
#define _GNU_SOURCE
#include <cublasLt.h>
#include <cublas_v2.h>
#include <dlfcn.h>
#include <setjmp.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT jmp_buf *leave_to; /* both NULL = return */
EXPORT void (*leave_by)(void);

static cublasStatus_t end(cublasStatus_t status)
{
	jmp_buf *to = leave_to;
	void (*by)(void) = leave_by;
	leave_to = NULL;
	leave_by = NULL;
	if (by)
		by();
	if (to)
		longjmp(*to, 1);
	return status;
}

EXPORT cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t ta,
                                   cublasOperation_t tb, int m, int n, int k, const void *alpha,
                                   const void *a, cudaDataType at, int lda, const void *b,
                                   cudaDataType bt, int ldb, const void *beta, void *c,
                                   cudaDataType ct, int ldc, cublasComputeType_t compute,
                                   cublasGemmAlgo_t algo)
{
	__typeof__(cublasGemmEx) *next = (__typeof__(next))dlsym(RTLD_NEXT, "cublasGemmEx");
	return end(next(handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc,
	                compute, algo));
}

/* Also where an engine of the shim calls it. */
EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                     const void *alpha, const void *a, cublasLtMatrixLayout_t la,
                                     const void *b, cublasLtMatrixLayout_t lb, const void *beta,
                                     const void *c, cublasLtMatrixLayout_t lc, void *d,
                                     cublasLtMatrixLayout_t ld, const cublasLtMatmulAlgo_t *algo,
                                     void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
	__typeof__(cublasLtMatmul) *next = (__typeof__(next))dlsym(RTLD_NEXT, "cublasLtMatmul");
	return end(next(handle, desc, alpha, a, la, b, lb, beta, c, lc, d, ld, algo, workspace,
	                workspace_bytes, stream));
}
