/* The hooked entry points: adding one is one line here, one in enum qs_entry (gemm/gemm.h), one in
 * qshim.map, and its try_<function>() in cublas.c or cublaslt.c.
 *
 * X(ENTRY, function, (parameters), (arguments)): the signatures are those of the CUDA headers,
 * which the compiler checks because the exported functions are declared there.
 */
#ifndef QS_INTERCEPT_ENTRIES_H
#define QS_INTERCEPT_ENTRIES_H

#define QS_ENTRIES(X)                                                                              \
	X(GEMM_EX, cublasGemmEx,                                                                   \
	  (cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, \
	   const void *alpha, const void *a, cudaDataType at, int lda, const void *b,              \
	   cudaDataType bt, int ldb, const void *beta, void *c, cudaDataType ct, int ldc,          \
	   cublasComputeType_t compute, cublasGemmAlgo_t algo),                                    \
	  (handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute,      \
	   algo))                                                                                  \
	X(GEMM_EX_64, cublasGemmEx_64,                                                             \
	  (cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int64_t m,           \
	   int64_t n, int64_t k, const void *alpha, const void *a, cudaDataType at, int64_t lda,   \
	   const void *b, cudaDataType bt, int64_t ldb, const void *beta, void *c,                 \
	   cudaDataType ct, int64_t ldc, cublasComputeType_t compute, cublasGemmAlgo_t algo),      \
	  (handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute,      \
	   algo))                                                                                  \
	X(GEMM_STRIDED_BATCHED_EX, cublasGemmStridedBatchedEx,                                     \
	  (cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, \
	   const void *alpha, const void *a, cudaDataType at, int lda, long long int sa,           \
	   const void *b, cudaDataType bt, int ldb, long long int sb, const void *beta, void *c,   \
	   cudaDataType ct, int ldc, long long int sc, int count, cublasComputeType_t compute,     \
	   cublasGemmAlgo_t algo),                                                                 \
	  (handle, ta, tb, m, n, k, alpha, a, at, lda, sa, b, bt, ldb, sb, beta, c, ct, ldc, sc,   \
	   count, compute, algo))                                                                  \
	X(GEMM_STRIDED_BATCHED_EX_64, cublasGemmStridedBatchedEx_64,                               \
	  (cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int64_t m,           \
	   int64_t n, int64_t k, const void *alpha, const void *a, cudaDataType at, int64_t lda,   \
	   long long int sa, const void *b, cudaDataType bt, int64_t ldb, long long int sb,        \
	   const void *beta, void *c, cudaDataType ct, int64_t ldc, long long int sc,              \
	   int64_t count, cublasComputeType_t compute, cublasGemmAlgo_t algo),                     \
	  (handle, ta, tb, m, n, k, alpha, a, at, lda, sa, b, bt, ldb, sb, beta, c, ct, ldc, sc,   \
	   count, compute, algo))                                                                  \
	X(LT_MATMUL, cublasLtMatmul,                                                               \
	  (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,   \
	   cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,  \
	   const void *c, cublasLtMatrixLayout_t lc, void *d, cublasLtMatrixLayout_t ld,           \
	   const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,              \
	   cudaStream_t stream),                                                                   \
	  (handle, desc, alpha, a, la, b, lb, beta, c, lc, d, ld, algo, workspace,                 \
	   workspace_bytes, stream))                                                               \
	X(GEMM_BATCHED_EX, cublasGemmBatchedEx,                                                    \
	  (cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, \
	   const void *alpha, const void *const a[], cudaDataType at, int lda,                     \
	   const void *const b[], cudaDataType bt, int ldb, const void *beta, void *const c[],     \
	   cudaDataType ct, int ldc, int count, cublasComputeType_t compute,                       \
	   cublasGemmAlgo_t algo),                                                                 \
	  (handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, count,        \
	   compute, algo))                                                                         \
	X(GEMM_BATCHED_EX_64, cublasGemmBatchedEx_64,                                              \
	  (cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int64_t m,           \
	   int64_t n, int64_t k, const void *alpha, const void *const a[], cudaDataType at,        \
	   int64_t lda, const void *const b[], cudaDataType bt, int64_t ldb, const void *beta,     \
	   void *const c[], cudaDataType ct, int64_t ldc, int64_t count,                           \
	   cublasComputeType_t compute, cublasGemmAlgo_t algo),                                    \
	  (handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, count,        \
	   compute, algo))                                                                         \
	X(GEMM_GROUPED_BATCHED_EX, cublasGemmGroupedBatchedEx,                                     \
	  (cublasHandle_t handle, const cublasOperation_t ta[], const cublasOperation_t tb[],      \
	   const int m[], const int n[], const int k[], const void *alpha, const void *const a[],  \
	   cudaDataType_t at, const int lda[], const void *const b[], cudaDataType_t bt,           \
	   const int ldb[], const void *beta, void *const c[], cudaDataType_t ct, const int ldc[], \
	   int groups, const int sizes[], cublasComputeType_t compute),                            \
	  (handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, groups,       \
	   sizes, compute))                                                                        \
	X(GEMM_GROUPED_BATCHED_EX_64, cublasGemmGroupedBatchedEx_64,                               \
	  (cublasHandle_t handle, const cublasOperation_t ta[], const cublasOperation_t tb[],      \
	   const int64_t m[], const int64_t n[], const int64_t k[], const void *alpha,             \
	   const void *const a[], cudaDataType_t at, const int64_t lda[], const void *const b[],   \
	   cudaDataType_t bt, const int64_t ldb[], const void *beta, void *const c[],              \
	   cudaDataType_t ct, const int64_t ldc[], int64_t groups, const int64_t sizes[],          \
	   cublasComputeType_t compute),                                                           \
	  (handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, groups,       \
	   sizes, compute))                                                                        \
	X(SGEMM_EX, cublasSgemmEx,                                                                 \
	  (cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, \
	   const float *alpha, const void *a, cudaDataType at, int lda, const void *b,             \
	   cudaDataType bt, int ldb, const float *beta, void *c, cudaDataType ct, int ldc),        \
	  (handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc))              \
	X(SGEMM_EX_64, cublasSgemmEx_64,                                                           \
	  (cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int64_t m,           \
	   int64_t n, int64_t k, const float *alpha, const void *a, cudaDataType at, int64_t lda,  \
	   const void *b, cudaDataType bt, int64_t ldb, const float *beta, void *c,                \
	   cudaDataType ct, int64_t ldc),                                                          \
	  (handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc))              \
	X(DESTROY, cublasDestroy_v2, (cublasHandle_t handle), (handle))

#endif
