/* cuBLAS of softcuda: products against fp64, BLAS's special cases, argument checks, knobs. */
#include "tests/softcuda/help.h"

#define N CUBLAS_OP_N
#define T CUBLAS_OP_T

static cublasHandle_t handle;

static void start(void)
{
	ck_cuda(cublasCreate(&handle));
}

static cublasStatus_t gemm(cublasOperation_t ta, cublasOperation_t tb, const struct matrix *a,
                           const struct matrix *b, const struct matrix *c, float alpha, float beta)
{
	int k = ta == N ? a->columns : a->rows;
	return cublasGemmEx(handle, ta, tb, c->rows, c->columns, k, &alpha, a->device, a->type,
	                    a->ld, b->device, b->type, b->ld, &beta, c->device, c->type, c->ld,
	                    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

/* alpha op(A) op(B) + beta C in fp64. */
static double *wanted(cublasOperation_t ta, cublasOperation_t tb, const struct matrix *a,
                      const struct matrix *b, const struct matrix *c, double alpha, double beta)
{
	double *d = reference(a, ta != N, b, tb != N);
	for (int i = 0; i < c->rows * c->columns; i++)
		d[i] = alpha * d[i] + beta * c->value[i];
	return d;
}

static void check_product(cudaDataType type, cudaDataType out, cublasOperation_t ta,
                          cublasOperation_t tb)
{
	const int m = 13, n = 9, k = 21;
	struct matrix a =
	        ta == N ? make_matrix(type, m, k, m + 3, 1) : make_matrix(type, k, m, k, 1);
	struct matrix b =
	        tb == N ? make_matrix(type, k, n, k + 1, 2) : make_matrix(type, n, k, n, 2);
	struct matrix c = make_matrix(out, m, n, m + 2, 3);
	ck_cuda(gemm(ta, tb, &a, &b, &c, 0.5f, 2));
	ck_matrix(&c, wanted(ta, tb, &a, &b, &c, 0.5, 2));
}

START_TEST(products_of_every_type_and_transposition_match_fp64)
{
	static const cudaDataType types[][2] = {{CUDA_R_16BF, CUDA_R_16BF},
	                                        {CUDA_R_16BF, CUDA_R_32F},
	                                        {CUDA_R_16F, CUDA_R_16F},
	                                        {CUDA_R_32F, CUDA_R_32F}};
	start();
	for (int i = 0; i < 4; i++)
		for (int ops = 0; ops < 4; ops++)
			check_product(types[i][0], types[i][1], ops & 1 ? T : N, ops & 2 ? T : N);
	ck_assert_int_eq(softcuda_get("products_bf16"), 8);
	ck_assert_int_eq(softcuda_get("products"), 16);
}
END_TEST

START_TEST(transposition_does_not_change_a_bit)
{
	start();
	const int m = 17, n = 6, k = 133;
	struct matrix a = make_matrix(CUDA_R_32F, m, k, m, 1),
	              at = make_matrix(CUDA_R_32F, k, m, k, 1);
	struct matrix b = make_matrix(CUDA_R_32F, k, n, k, 2);
	struct matrix c = make_matrix(CUDA_R_32F, m, n, m, 3),
	              d = make_matrix(CUDA_R_32F, m, n, m, 3);
	float *plain = (float *)a.device, *turned = (float *)at.device;
	for (int i = 0; i < m; i++)
		for (int p = 0; p < k; p++) /* values whose sums depend on the order */
			turned[p + i * k] = plain[i + p * m] = 1.0f / (float)(1 + i + 7 * p);
	ck_cuda(gemm(N, N, &a, &b, &c, 1, 0));
	ck_cuda(gemm(T, N, &at, &b, &d, 1, 0));
	ck_cuda(cudaDeviceSynchronize());
	ck_assert_mem_eq(c.device, d.device, (size_t)(m * n) * 4);
}
END_TEST

START_TEST(a_product_waits_in_its_stream)
{
	cudaStream_t stream;
	start();
	ck_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	ck_cuda(cublasSetStream(handle, stream));
	struct matrix a = make_matrix(CUDA_R_32F, 4, 4, 4, 1),
	              c = make_matrix(CUDA_R_32F, 4, 4, 4, 2);
	float before = *(float *)c.device;
	ck_cuda(gemm(N, N, &a, &a, &c, 3, 5));
	ck_assert_float_eq(*(float *)c.device, before);
	ck_cuda(cudaStreamSynchronize(stream));
	ck_matrix(&c, wanted(N, N, &a, &a, &c, 3, 5));
}
END_TEST

START_TEST(zero_factors_and_zero_sizes_follow_blas)
{
	start();
	struct matrix a = make_matrix(CUDA_R_32F, 4, 4, 4, 1),
	              c = make_matrix(CUDA_R_32F, 4, 4, 4, 2);
	struct matrix nan = make_matrix(CUDA_R_32F, 4, 4, 4, 3), empty = c;
	float one = 1, half = 0.5f;
	for (int i = 0; i < 16; i++)
		((float *)nan.device)[i] = NAN;
	ck_cuda(gemm(N, N, &nan, &nan, &c, 0, 2)); /* alpha = 0: A and B are not read */
	ck_matrix(&c, wanted(N, N, &a, &a, &c, 0, 2));
	ck_cuda(gemm(N, N, &a, &a, &nan, 1, 0)); /* beta = 0: C is not read */
	ck_matrix(&nan, wanted(N, N, &a, &a, &c, 1, 0));
	ck_cuda(cublasGemmEx(handle, N, N, 4, 4, 0, &one, NULL, CUDA_R_32F, 4, NULL, CUDA_R_32F, 1,
	                     &half, c.device, CUDA_R_32F, 4, CUBLAS_COMPUTE_32F,
	                     CUBLAS_GEMM_DEFAULT)); /* k = 0 */
	ck_matrix(&c, c.value);
	long submitted = softcuda_get("products");
	empty.rows = 0;
	ck_cuda(gemm(N, N, &a, &a, &empty, 1, 0));
	ck_assert_int_eq(softcuda_get("products"), submitted);
}
END_TEST

START_TEST(nonsense_is_refused_with_the_status_of_cublas)
{
	start();
	float one = 1;
	void *x = device(1024);
#define CALL(h, ta, m, k, alpha, a, type, lda, c, ctype, ldc, compute)                             \
	cublasGemmEx(h, ta, N, m, 4, k, alpha, a, type, lda, x, CUDA_R_16BF, 4, &one, c, ctype,    \
	             ldc, compute, CUBLAS_GEMM_DEFAULT)
#define BF CUDA_R_16BF
#define F  CUBLAS_COMPUTE_32F
	ck_cuda(CALL(handle, N, 4, 4, &one, x, BF, 4, x, BF, 4, F));
	ck_assert_int_eq(CALL(NULL, N, 4, 4, &one, x, BF, 4, x, BF, 4, F), 1);
	ck_assert_int_eq(CALL(handle, 7, 4, 4, &one, x, BF, 4, x, BF, 4, F), 7);
	ck_assert_int_eq(CALL(handle, N, -1, 4, &one, x, BF, 4, x, BF, 4, F), 7);
	ck_assert_int_eq(CALL(handle, N, 4, -1, &one, x, BF, 4, x, BF, 4, F), 7);
	ck_assert_int_eq(CALL(handle, N, 4, 4, &one, x, BF, 3, x, BF, 4, F), 7);
	ck_assert_int_eq(CALL(handle, N, 4, 4, &one, x, BF, 4, x, BF, 3, F), 7);
	ck_assert_int_eq(CALL(handle, N, 0, 4, &one, x, BF, 0, x, BF, 0, F), 7);
	ck_assert_int_eq(CALL(handle, N, 4, 4, NULL, x, BF, 4, x, BF, 4, F), 7);
	ck_assert_int_eq(CALL(handle, N, 4, 4, &one, NULL, BF, 4, x, BF, 4, F), 7);
	ck_assert_int_eq(CALL(handle, N, 4, 4, &one, x, CUDA_R_16F, 4, x, BF, 4, F), 15);
	ck_assert_int_eq(CALL(handle, N, 4, 4, &one, x, BF, 4, x, CUDA_R_16F, 4, F), 15);
	ck_assert_int_eq(CALL(handle, N, 4, 4, &one, x, BF, 4, x, BF, 4, CUBLAS_COMPUTE_64F), 15);
#undef CALL
#undef BF
#undef F
	ck_cuda(cublasDestroy(handle));
	ck_assert_int_eq(cublasDestroy(NULL), CUBLAS_STATUS_NOT_INITIALIZED);
}
END_TEST

START_TEST(host_scalars_are_read_at_the_call_and_device_scalars_when_it_runs)
{
	float alpha = 2, beta = 0, *on_device = device(8);
	start();
	struct matrix a = make_matrix(CUDA_R_32F, 4, 4, 4, 1),
	              c = make_matrix(CUDA_R_32F, 4, 4, 4, 2);
	ck_cuda(cublasSgemm(handle, N, N, 4, 4, 4, &alpha, a.device, 4, a.device, 4, &beta,
	                    c.device, 4));
	alpha = 100;
	ck_matrix(&c, wanted(N, N, &a, &a, &c, 2, 0));
	ck_cuda(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_DEVICE));
	ck_cuda(cublasSgemm(handle, N, N, 4, 4, 4, on_device, a.device, 4, a.device, 4,
	                    on_device + 1, c.device, 4));
	on_device[0] = 3;
	on_device[1] = 0;
	ck_matrix(&c, wanted(N, N, &a, &a, &c, 3, 0));
}
END_TEST

START_TEST(batched_products_equal_single_ones)
{
	float one = 1, zero = 0;
	start();
	struct matrix a = make_matrix(CUDA_R_16BF, 8, 24, 8, 1),
	              b = make_matrix(CUDA_R_16BF, 8, 24, 8, 2);
	struct matrix c[4];
	char *pa = a.device, *pb = b.device;
	for (int i = 0; i < 4; i++)
		c[i] = make_matrix(CUDA_R_16BF, 8, 24, 8, 3);
	void *pointers[9];
	for (int i = 0; i < 3; i++) {
		ck_cuda(cublasGemmEx(handle, N, N, 8, 8, 8, &one, pa + 128 * i, CUDA_R_16BF, 8,
		                     pb + 128 * i, CUDA_R_16BF, 8, &zero,
		                     (char *)c[0].device + 128 * i, CUDA_R_16BF, 8,
		                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
		pointers[i] = pa + 128 * i;
		pointers[3 + i] = pb + 128 * i;
		pointers[6 + i] = (char *)c[2].device + 128 * i;
	}
	void **arrays = device_copy(pointers, sizeof pointers);
	ck_cuda(cublasGemmStridedBatchedEx_64(
	        handle, N, N, 8, 8, 8, &one, pa, CUDA_R_16BF, 8, 64, pb, CUDA_R_16BF, 8, 64, &zero,
	        c[1].device, CUDA_R_16BF, 8, 64, 3, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
	ck_cuda(cublasGemmBatchedEx(handle, N, N, 8, 8, 8, &one, (const void *const *)arrays,
	                            CUDA_R_16BF, 8, (const void *const *)(arrays + 3), CUDA_R_16BF,
	                            8, &zero, arrays + 6, CUDA_R_16BF, 8, 3, CUBLAS_COMPUTE_32F,
	                            CUBLAS_GEMM_DEFAULT));
	ck_cuda(cudaDeviceSynchronize());
	ck_assert_mem_eq(c[0].device, c[1].device, 384);
	ck_assert_mem_eq(c[0].device, c[2].device, 384);
	cublasOperation_t ops[2] = {N, N};
	int sizes[2] = {8, 8}, groups[2] = {1, 2};
	float ones[2] = {1, 1}, zeros[2] = {0, 0};
	ck_cuda(cudaMemset(c[2].device, 0, 384));
	ck_cuda(cublasGemmGroupedBatchedEx(
	        handle, ops, ops, sizes, sizes, sizes, ones, (const void *const *)arrays,
	        CUDA_R_16BF, sizes, (const void *const *)(arrays + 3), CUDA_R_16BF, sizes, zeros,
	        arrays + 6, CUDA_R_16BF, sizes, 2, groups, CUBLAS_COMPUTE_32F));
	ck_cuda(cudaDeviceSynchronize());
	ck_assert_mem_eq(c[0].device, c[2].device, 384);
}
END_TEST

START_TEST(a_captured_product_keeps_its_scalars_and_reads_its_matrices_anew)
{
	cudaStream_t stream;
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	float alpha = 2, beta = 0;
	start();
	ck_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	ck_cuda(cublasSetStream(handle, stream));
	struct matrix a = make_matrix(CUDA_R_32F, 4, 4, 4, 1),
	              b = make_matrix(CUDA_R_32F, 4, 4, 4, 9);
	struct matrix c = make_matrix(CUDA_R_32F, 4, 4, 4, 2);
	ck_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
	ck_cuda(cublasSgemm(handle, N, N, 4, 4, 4, &alpha, a.device, 4, a.device, 4, &beta,
	                    c.device, 4));
	alpha = 77;
	ck_cuda(cudaStreamEndCapture(stream, &graph));
	ck_cuda(cudaGraphInstantiate(&exec, graph, 0));
	ck_cuda(cudaMemcpy(a.device, b.device, 64, cudaMemcpyDeviceToDevice));
	ck_cuda(cudaDeviceSynchronize());
	ck_cuda(cudaGraphLaunch(exec, stream));
	ck_cuda(cudaStreamSynchronize(stream));
	ck_matrix(&c, wanted(N, N, &b, &b, &c, 2, 0));
}
END_TEST

START_TEST(a_host_pointer_among_the_operands_breaks_the_context)
{
	float on_host[16] = {0}, one = 1;
	void *pointer;
	start();
	struct matrix a = make_matrix(CUDA_R_32F, 4, 4, 4, 1);
	ck_cuda(cublasSgemm(handle, N, N, 4, 4, 4, &one, on_host, 4, a.device, 4, &one, a.device,
	                    4));
	ck_assert_int_eq(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
	ck_assert_int_eq(cudaMalloc(&pointer, 4), cudaErrorIllegalAddress);
	ck_assert_int_eq(cublasSgemm(handle, N, N, 4, 4, 4, &one, a.device, 4, a.device, 4, &one,
	                             a.device, 4),
	                 CUBLAS_STATUS_EXECUTION_FAILED);
}
END_TEST

START_TEST(a_matrix_that_leaves_its_allocation_breaks_the_context)
{
	float one = 1;
	start();
	struct matrix a = make_matrix(CUDA_R_32F, 4, 4, 4, 1);
	ck_cuda(cublasSgemm(handle, N, N, 4, 4, 4, &one, a.device, 5, a.device, 4, &one, a.device,
	                    4));
	ck_assert_int_eq(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
}
END_TEST

START_TEST(null_products_succeed_and_do_nothing)
{
	start();
	struct matrix a = make_matrix(CUDA_R_32F, 4, 4, 4, 1),
	              c = make_matrix(CUDA_R_32F, 4, 4, 4, 2);
	softcuda_set("null_products", 1);
	ck_cuda(gemm(N, N, &a, &a, &c, 1, 0));
	ck_matrix(&c, c.value);
	ck_assert_int_eq(softcuda_get("products"), 0);
	ck_cuda(cublasDestroy(handle));
	handle = NULL;
	ck_assert_int_eq(gemm(N, N, &a, &a, &c, 1, 0), CUBLAS_STATUS_NOT_INITIALIZED);
}
END_TEST

START_TEST(failing_launches_can_be_asked_for_and_spare_products)
{
	CUmodule module;
	CUfunction fill;
	uint64_t target, count = 1;
	uint32_t value = 1;
	void *params[] = {&target, &value, &count};
	start();
	struct matrix a = make_matrix(CUDA_R_32F, 4, 4, 4, 1),
	              c = make_matrix(CUDA_R_32F, 4, 4, 4, 2);
	target = (uint64_t)(uintptr_t)c.device;
	ck_cuda(cuModuleLoadData(&module, "image"));
	ck_cuda(cuModuleGetFunction(&fill, module, "softcuda_fill"));
	softcuda_set("fail_launch", CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
	ck_assert_int_eq(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL),
	                 CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
	ck_cuda(gemm(N, N, &a, &a, &c, 1, 0));
	ck_matrix(&c, wanted(N, N, &a, &a, &c, 1, 0));
	ck_assert_int_eq(softcuda_get("launches"), 0);
}
END_TEST

START_TEST(an_inner_product_of_cublaslt_gives_the_same_bits)
{
	start();
	struct matrix a = make_matrix(CUDA_R_16BF, 24, 40, 24, 1),
	              b = make_matrix(CUDA_R_16BF, 40, 16, 40, 2);
	struct matrix c = make_matrix(CUDA_R_16BF, 24, 16, 24, 3),
	              d = make_matrix(CUDA_R_16BF, 24, 16, 24, 3);
	ck_cuda(gemm(N, N, &a, &b, &c, 0.75f, 1));
	ck_assert_int_eq(softcuda_cublaslt_calls("cublasLtMatmul"), 0);
	softcuda_set("inner_lt", 1);
	ck_cuda(gemm(N, N, &a, &b, &d, 0.75f, 1));
	ck_assert_int_eq(softcuda_cublaslt_calls("cublasLtMatmul"), 1);
	ck_assert_int_eq(softcuda_cublas_calls("cublasGemmEx"), 2);
	ck_cuda(cudaDeviceSynchronize());
	ck_assert_mem_eq(c.device, d.device, 24 * 16 * 2);
}
END_TEST

START_TEST(a_handle_remembers_what_it_was_told)
{
	cublasPointerMode_t mode;
	cublasMath_t math;
	cudaStream_t stream, got;
	int version;
	start();
	ck_cuda(cudaStreamCreate(&stream));
	ck_cuda(cublasSetStream(handle, stream));
	ck_cuda(cublasGetStream(handle, &got));
	ck_assert_ptr_eq(got, stream);
	ck_cuda(cublasSetMathMode(handle, CUBLAS_PEDANTIC_MATH));
	ck_cuda(cublasGetMathMode(handle, &math));
	ck_assert_int_eq(math, CUBLAS_PEDANTIC_MATH);
	ck_cuda(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_DEVICE));
	ck_cuda(cublasGetPointerMode(handle, &mode));
	ck_assert_int_eq(mode, CUBLAS_POINTER_MODE_DEVICE);
	ck_cuda(cublasGetVersion(handle, &version));
	ck_assert_int_eq(version, 130100);
	ck_assert_str_eq(cublasGetStatusName(CUBLAS_STATUS_NOT_SUPPORTED),
	                 "CUBLAS_STATUS_NOT_SUPPORTED");
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("softcuda cublas");
	TCase *tests = tcase_create("cublas");
	tcase_set_timeout(tests, 60);
	tcase_add_test(tests, products_of_every_type_and_transposition_match_fp64);
	tcase_add_test(tests, transposition_does_not_change_a_bit);
	tcase_add_test(tests, a_product_waits_in_its_stream);
	tcase_add_test(tests, zero_factors_and_zero_sizes_follow_blas);
	tcase_add_test(tests, nonsense_is_refused_with_the_status_of_cublas);
	tcase_add_test(tests, host_scalars_are_read_at_the_call_and_device_scalars_when_it_runs);
	tcase_add_test(tests, batched_products_equal_single_ones);
	tcase_add_test(tests, a_captured_product_keeps_its_scalars_and_reads_its_matrices_anew);
	tcase_add_test(tests, a_host_pointer_among_the_operands_breaks_the_context);
	tcase_add_test(tests, a_matrix_that_leaves_its_allocation_breaks_the_context);
	tcase_add_test(tests, null_products_succeed_and_do_nothing);
	tcase_add_test(tests, failing_launches_can_be_asked_for_and_spare_products);
	tcase_add_test(tests, an_inner_product_of_cublaslt_gives_the_same_bits);
	tcase_add_test(tests, a_handle_remembers_what_it_was_told);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
