/* A key that nothing forbids, for tests to spoil in one respect: forward product of a linear layer,
 * bf16, fp32 arithmetic, everything aligned. */
#ifndef QS_TESTS_UNIT_KEY_H
#define QS_TESTS_UNIT_KEY_H

#include <cublasLt.h>

#include "gemm/gemm.h"

static inline struct qs_key plain_key(int64_t m, int64_t n, int64_t k)
{
	return (struct qs_key){
	        .m = m,
	        .n = n,
	        .k = k,
	        .lda = k,
	        .ldb = k,
	        .ldc = m,
	        .ldd = m,
	        .batch = 1,
	        .compute = CUBLAS_COMPUTE_32F,
	        .scale_type = CUDA_R_32F,
	        .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
	        .atype = CUDA_R_16BF,
	        .btype = CUDA_R_16BF,
	        .ctype = CUDA_R_16BF,
	        .dtype = CUDA_R_16BF,
	        .bias_type = QS_TYPE_NONE,
	        .ta = CUBLAS_OP_T,
	        .tb = CUBLAS_OP_N,
	        .alpha = QS_SCALAR_ONE,
	        .beta = QS_SCALAR_ZERO,
	        .in_place = 1,
	        .align = QS_ALIGN_A | QS_ALIGN_B | QS_ALIGN_C | QS_ALIGN_D | QS_ALIGN_BIAS,
	        .entry = QS_ENTRY_GEMM_EX,
	};
}

#endif
