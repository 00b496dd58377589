/* Two copies of cuBLAS in one process, as when a program of CUDA 13 loads a library made for
 * CUDA 12. */
#define _GNU_SOURCE
#include "tests/softcuda/help.h"

#include <dlfcn.h>
#include <stdio.h>

/* The copy of major version 12, which lies beside the directory of libcuda. */
static void *open12(const char *name)
{
	Dl_info info;
	char path[4096];
	ck_assert_int_ne(dladdr((void *)cuInit, &info), 0);
	char *slash = strrchr(info.dli_fname, '/');
	ck_assert_ptr_nonnull(slash);
	snprintf(path, sizeof path, "%.*s/../softcuda12/%s", (int)(slash - info.dli_fname),
	         info.dli_fname, name);
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	ck_assert_msg(library != NULL, "%s", dlerror());
	return library;
}

static void *library, *lt_library;
static __typeof__(cublasCreate_v2) *create12;
static __typeof__(cublasGemmEx) *gemm12;
static __typeof__(cublasLtMatmulAlgoGetHeuristic) *heuristic12;
static __typeof__(cublasLtGetVersion) *version12;
static __typeof__(softcuda_cublas_calls) *calls12;
static cublasHandle_t old, new;

static void start(void)
{
	library = open12("libcublas.so.12");
	lt_library = open12("libcublasLt.so.12");
	create12 = dlsym(library, "cublasCreate_v2");
	gemm12 = dlsym(library, "cublasGemmEx");
	calls12 = dlsym(library, "softcuda_cublas_calls");
	version12 = dlsym(lt_library, "cublasLtGetVersion");
	heuristic12 = dlsym(lt_library, "cublasLtMatmulAlgoGetHeuristic");
	ck_cuda(create12(&old));
	ck_cuda(cublasCreate(&new));
}

static cublasStatus_t call(__typeof__(cublasGemmEx) *gemm, cublasHandle_t handle,
                           const struct matrix *a, const struct matrix *c)
{
	float one = 1, zero = 0;
	return gemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 8, 8, 8, &one, a->device, a->type, 8,
	            a->device, a->type, 8, &zero, c->device, c->type, 8, CUBLAS_COMPUTE_32F,
	            CUBLAS_GEMM_DEFAULT);
}

START_TEST(both_copies_work_and_count_their_own_calls)
{
	start();
	struct matrix a = make_matrix(CUDA_R_16BF, 8, 8, 8, 1),
	              c = make_matrix(CUDA_R_16BF, 8, 8, 8, 2);
	double *wanted = reference(&a, false, &a, false);
	ck_cuda(call(cublasGemmEx, new, &a, &c));
	ck_matrix(&c, wanted);
	ck_cuda(cudaMemset(c.device, 0, 128));
	ck_cuda(call(gemm12, old, &a, &c));
	ck_cuda(call(gemm12, old, &a, &c));
	ck_matrix(&c, wanted);
	ck_assert_int_eq(softcuda_cublas_calls("cublasGemmEx"), 1);
	ck_assert_int_eq(calls12("cublasGemmEx"), 2);
	ck_assert_uint_eq(version12(), 120900);
	ck_assert_uint_eq(cublasLtGetVersion(), 130100);
}
END_TEST

START_TEST(a_copy_refuses_the_handle_of_the_other)
{
	start();
	struct matrix a = make_matrix(CUDA_R_16BF, 8, 8, 8, 1);
	ck_assert_int_eq(call(gemm12, new, &a, &a), CUBLAS_STATUS_NOT_INITIALIZED);
	ck_assert_int_eq(call(cublasGemmEx, old, &a, &a), CUBLAS_STATUS_NOT_INITIALIZED);
	ck_assert_int_eq(heuristic12((cublasLtHandle_t) new, NULL, NULL, NULL, NULL, NULL, NULL, 1,
	                             NULL, NULL),
	                 CUBLAS_STATUS_NOT_INITIALIZED);
}
END_TEST

START_TEST(an_inner_call_stays_within_its_copy)
{
	start();
	struct matrix a = make_matrix(CUDA_R_16BF, 8, 8, 8, 1);
	__typeof__(softcuda_cublaslt_calls) *lt_calls12 =
	        dlsym(lt_library, "softcuda_cublaslt_calls");
	softcuda_set("inner_lt", 1);
	ck_cuda(call(gemm12, old, &a, &a));
	ck_assert_int_eq(lt_calls12("cublasLtMatmul"), 1);
	ck_assert_int_eq(softcuda_cublaslt_calls("cublasLtMatmul"), 0);
}
END_TEST

START_TEST(symbols_carry_the_version_of_their_library)
{
	start();
	ck_assert_ptr_nonnull(dlvsym(library, "cublasGemmEx", "libcublas.so.12"));
	ck_assert_ptr_null(dlvsym(library, "cublasGemmEx", "libcublas.so.13"));
	ck_assert_ptr_nonnull(dlvsym(RTLD_DEFAULT, "cublasGemmEx", "libcublas.so.13"));
	ck_assert_ptr_nonnull(dlvsym(RTLD_DEFAULT, "cublasLtMatmul", "libcublasLt.so.13"));
	ck_assert_ptr_nonnull(dlvsym(RTLD_DEFAULT, "cudaMalloc", "libcudart.so.13"));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("softcuda copies");
	TCase *tests = tcase_create("copies");
	tcase_add_test(tests, both_copies_work_and_count_their_own_calls);
	tcase_add_test(tests, a_copy_refuses_the_handle_of_the_other);
	tcase_add_test(tests, an_inner_call_stays_within_its_copy);
	tcase_add_test(tests, symbols_carry_the_version_of_their_library);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
