/* cuBLASLt of softcuda: descriptors, products and epilogues against fp64, and each refusal. */
#include "tests/softcuda/help.h"

#define E4 CUDA_R_8F_E4M3
#define E5 CUDA_R_8F_E5M2
#define BF CUDA_R_16BF
#define HF CUDA_R_16F
#define FP CUDA_R_32F

#define OK          CUBLAS_STATUS_SUCCESS
#define INVALID     CUBLAS_STATUS_INVALID_VALUE
#define UNSUPPORTED CUBLAS_STATUS_NOT_SUPPORTED

static cublasLtHandle_t handle;

/* A product in the making; tests change what they are about. */
static struct call {
	cublasLtMatmulDesc_t desc;
	cublasLtMatrixLayout_t la, lb, lc, ld;
	struct matrix a, b, c, d;
	const void *pa, *pb; /* operands, if not a.device and b.device */
	float alpha, beta;
	const cublasLtMatmulAlgo_t *algo;
	void *workspace;
	size_t workspace_bytes;
} call;

static void set(cublasLtMatmulDescAttributes_t attribute, const void *value, size_t size)
{
	ck_cuda(cublasLtMatmulDescSetAttribute(call.desc, attribute, value, size));
}

static void set_int(cublasLtMatmulDescAttributes_t attribute, int32_t value)
{
	set(attribute, &value, sizeof value);
}

static void set_pointer(cublasLtMatmulDescAttributes_t attribute, const void *value)
{
	set(attribute, &value, sizeof value);
}

static cublasLtMatrixLayout_t layout(const struct matrix *m)
{
	cublasLtMatrixLayout_t result = NULL;
	ck_cuda(cublasLtMatrixLayoutCreate(&result, m->type, (uint64_t)m->rows,
	                                   (uint64_t)m->columns, m->ld));
	return keep(result);
}

static void prepare(cudaDataType a, cudaDataType b, cudaDataType out, bool ta, bool tb, int m,
                    int n, int k)
{
	if (!handle)
		ck_cuda(cublasLtCreate(&handle));
	call = (struct call){.alpha = 1};
	ck_cuda(cublasLtMatmulDescCreate(&call.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
	keep(call.desc);
	set_int(CUBLASLT_MATMUL_DESC_TRANSA, ta ? CUBLAS_OP_T : CUBLAS_OP_N);
	set_int(CUBLASLT_MATMUL_DESC_TRANSB, tb ? CUBLAS_OP_T : CUBLAS_OP_N);
	call.a = ta ? make_matrix(a, k, m, k, 1) : make_matrix(a, m, k, m, 1);
	call.b = tb ? make_matrix(b, n, k, n, 2) : make_matrix(b, k, n, k, 2);
	call.c = make_matrix(out, m, n, m, 3);
	call.d = make_matrix(out, m, n, m, 4);
	call.la = layout(&call.a);
	call.lb = layout(&call.b);
	call.lc = layout(&call.c);
	call.ld = layout(&call.d);
}

/* The usual fp8 product: TN, all dimensions multiples of 16. */
static void prepare_fp8(void)
{
	prepare(E4, E4, BF, true, false, 32, 16, 48);
}

static cublasStatus_t run(void)
{
	return cublasLtMatmul(handle, call.desc, &call.alpha, call.pa ? call.pa : call.a.device,
	                      call.la, call.pb ? call.pb : call.b.device, call.lb, &call.beta,
	                      call.c.device, call.lc, call.d.device, call.ld, call.algo,
	                      call.workspace, call.workspace_bytes, NULL);
}

static int offers(uint64_t workspace, cublasLtMatmulHeuristicResult_t results[4])
{
	cublasLtMatmulPreference_t preference;
	int count = -1;
	ck_cuda(cublasLtMatmulPreferenceCreate(&preference));
	ck_cuda(cublasLtMatmulPreferenceSetAttribute(preference,
	                                             CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
	                                             &workspace, sizeof workspace));
	cublasStatus_t status =
	        cublasLtMatmulAlgoGetHeuristic(handle, call.desc, call.la, call.lb, call.lc,
	                                       call.ld, preference, 4, results, &count);
	ck_assert_int_eq(status == OK, count > 0);
	ck_cuda(cublasLtMatmulPreferenceDestroy(preference));
	return count;
}

/* The product and the heuristic must agree. */
static void ck_answers(cublasStatus_t wanted)
{
	cublasLtMatmulHeuristicResult_t results[4];
	ck_assert_int_eq(run(), wanted);
	ck_assert_int_eq(offers(0, results), wanted == OK ? 1 : 0);
}

static void ck_result(double (*finish)(double sum, int i, int j))
{
	int ta, tb;
	size_t size;
	ck_cuda(cublasLtMatmulDescGetAttribute(call.desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta,
	                                       sizeof ta, &size));
	ck_cuda(cublasLtMatmulDescGetAttribute(call.desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb,
	                                       sizeof tb, &size));
	double *wanted = reference(&call.a, ta, &call.b, tb);
	for (int j = 0; j < call.d.columns; j++)
		for (int i = 0; i < call.d.rows; i++) {
			double *d = &wanted[i + j * call.d.rows];
			*d = call.alpha * *d + call.beta * at(&call.c, i, j);
			*d = finish ? finish(*d, i, j) : *d;
		}
	ck_matrix(&call.d, wanted);
}

START_TEST(attributes_are_kept_and_their_sizes_checked)
{
	size_t written = 0;
	int32_t epilogue = 0;
	prepare_fp8();
	ck_assert_int_eq(cublasLtMatmulDescSetAttribute(call.desc, CUBLASLT_MATMUL_DESC_TRANSA,
	                                                &epilogue, 8),
	                 INVALID);
	ck_assert_int_eq(cublasLtMatmulDescSetAttribute(call.desc, 99, &epilogue, 4), INVALID);
	set_int(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_GELU);
	ck_cuda(cublasLtMatmulDescGetAttribute(call.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, NULL, 0,
	                                       &written));
	ck_assert_uint_eq(written, 4);
	ck_assert_int_eq(cublasLtMatmulDescGetAttribute(call.desc, CUBLASLT_MATMUL_DESC_EPILOGUE,
	                                                &epilogue, 2, &written),
	                 INVALID);
	ck_cuda(cublasLtMatmulDescGetAttribute(call.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
	                                       4, &written));
	ck_assert_int_eq(epilogue, CUBLASLT_EPILOGUE_GELU);
	ck_assert_int_eq(cublasLtMatrixLayoutSetAttribute((cublasLtMatrixLayout_t)(void *)call.desc,
	                                                  CUBLASLT_MATRIX_LAYOUT_TYPE, &epilogue,
	                                                  4),
	                 INVALID);
}
END_TEST

START_TEST(descriptors_can_live_in_the_callers_memory)
{
	cublasLtMatmulDescOpaque_t desc;
	cublasLtMatrixLayoutOpaque_t a;
	prepare(BF, BF, BF, false, false, 16, 16, 16);
	ck_cuda(cublasLtMatmulDescInit(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
	ck_cuda(cublasLtMatrixLayoutInit(&a, BF, 16, 16, 16));
	call.desc = &desc;
	call.la = &a;
	ck_cuda(run());
	ck_result(NULL);
}
END_TEST

START_TEST(wide_products_match_fp64)
{
	static const cudaDataType types[][2] = {{BF, BF}, {BF, FP}, {HF, HF}, {FP, FP}};
	for (int i = 0; i < 4; i++)
		for (int ops = 0; ops < 4; ops++) {
			prepare(types[i][0], types[i][0], types[i][1], ops & 1, ops & 2, 11, 6, 19);
			call.alpha = 0.5f;
			call.beta = 2;
			ck_answers(OK);
			ck_result(NULL);
		}
}
END_TEST

START_TEST(fp8_products_match_fp64_and_apply_the_scales)
{
	static const cudaDataType types[][2] = {{E4, E4}, {E4, E5}, {E5, E4}};
	float scales[5] = {0.5f, [4] = 4}; /* 16 bytes apart */
	for (int i = 0; i < 3; i++)
		for (int out = 0; out < 3; out++) {
			prepare(types[i][0], types[i][1],
			        out == 0   ? BF
			        : out == 1 ? FP
			                   : HF,
			        true, false, 32, 16, 48);
			float *on_device = device_copy(scales, sizeof scales);
			set_pointer(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, on_device);
			set_pointer(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, on_device + 4);
			call.beta = 0.5f;
			ck_answers(OK);
			call.alpha = 2; /* what the scales come to */
			ck_result(NULL);
		}
	ck_assert_int_eq(softcuda_get("products_fp8"), 9);
}
END_TEST

static double bias_of(int i)
{
	return (i % 5 - 2) / 2.0;
}

static double plain_bias(double sum, int i, int j)
{
	(void)j;
	return sum + bias_of(i);
}

static double relu_bias(double sum, int i, int j)
{
	return fmax(plain_bias(sum, i, j), 0);
}

static double gelu_bias(double sum, int i, int j)
{
	double x = plain_bias(sum, i, j);
	return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
}

static void set_bias(cudaDataType type, int rows)
{
	char *host = calloc((size_t)rows, size_of(type));
	for (int i = 0; i < rows; i++)
		put(type, host, (size_t)i, bias_of(i));
	set_pointer(CUBLASLT_MATMUL_DESC_BIAS_POINTER,
	            device_copy(host, (size_t)rows * size_of(type)));
	set_int(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)type);
	free(host);
}

START_TEST(bias_and_activations_are_fused_in_bf16_and_fp8)
{
	for (int fp8 = 0; fp8 < 2; fp8++) {
		prepare(fp8 ? E4 : BF, fp8 ? E4 : BF, BF, true, false, 32, 16, 48);
		call.alpha = 0.125f;
		set_bias(BF, 32);
		set_int(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
		ck_answers(OK);
		ck_result(plain_bias);
		set_int(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_RELU_BIAS);
		ck_answers(OK);
		ck_result(relu_bias);
		set_int(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_GELU_BIAS);
		ck_answers(OK);
		ck_result(gelu_bias);
	}
}
END_TEST

START_TEST(gelu_stores_what_it_was_applied_to_and_its_gradient_reads_it)
{
	int64_t ld = 32;
	prepare(BF, BF, FP, false, false, 32, 16, 48);
	struct matrix aux = make_matrix(FP, 32, 16, 32, 9);
	set_pointer(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.device);
	set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld, sizeof ld);
	set_int(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_GELU_AUX);
	ck_cuda(run());
	ck_matrix(&aux, reference(&call.a, false, &call.b, false));
	const float x = 0.5f, t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
	for (int i = 0; i < 32 * 16; i++)
		((float *)aux.device)[i] = x;
	set_int(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DGELU);
	ck_cuda(run());
	call.alpha = 0.5f * (1 + t) +
	             0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
	ck_result(NULL);
}
END_TEST

START_TEST(a_bias_that_was_not_given_is_invalid)
{
	prepare_fp8();
	set_int(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
	ck_assert_int_eq(run(), INVALID);
}
END_TEST

START_TEST(fp8_takes_only_TN)
{
	prepare(E4, E4, BF, false, false, 32, 32, 32);
	ck_answers(UNSUPPORTED);
	prepare(E4, E4, BF, false, true, 32, 32, 32);
	ck_answers(UNSUPPORTED);
	prepare(E4, E4, BF, true, true, 32, 32, 32);
	ck_answers(UNSUPPORTED);
	prepare(E4, E4, BF, true, false, 32, 32, 32);
	ck_answers(OK);
}
END_TEST

START_TEST(fp8_refuses_types_that_hardware_refuses)
{
	prepare(E5, E5, BF, true, false, 32, 32, 32);
	ck_answers(UNSUPPORTED);
	prepare(E4, BF, BF, true, false, 32, 32, 32);
	ck_answers(UNSUPPORTED);
	prepare(E4, E4, E4, true, false, 32, 32, 32);
	ck_answers(UNSUPPORTED);
	prepare(E4, E4, FP, true, false, 32, 32, 32);
	uint32_t type = BF; /* C bf16, D fp32 */
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.lc, CUBLASLT_MATRIX_LAYOUT_TYPE, &type, 4));
	ck_answers(UNSUPPORTED);
}
END_TEST

START_TEST(the_bias_of_fp8_has_the_type_of_D_or_bf16_for_fp32)
{
	static const struct {
		cudaDataType out, bias;
		cublasStatus_t answer;
	} cases[] = {{BF, BF, OK},          {HF, HF, OK},          {FP, BF, OK},
	             {FP, FP, UNSUPPORTED}, {BF, FP, UNSUPPORTED}, {HF, BF, UNSUPPORTED}};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		prepare(E4, E4, cases[i].out, true, false, 32, 16, 48);
		set_bias(cases[i].bias, 32);
		set_int(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
		ck_answers(cases[i].answer);
	}
}
END_TEST

START_TEST(gradient_and_mask_epilogues_are_refused)
{
	static const int epilogues[] = {CUBLASLT_EPILOGUE_BGRADA, CUBLASLT_EPILOGUE_BGRADB,
	                                CUBLASLT_EPILOGUE_RELU_AUX, CUBLASLT_EPILOGUE_DRELU,
	                                CUBLASLT_EPILOGUE_DGELU_BGRAD};
	for (size_t i = 0; i < sizeof epilogues / sizeof *epilogues; i++) {
		prepare_fp8();
		set_int(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogues[i]);
		ck_answers(UNSUPPORTED);
	}
}
END_TEST

START_TEST(fp8_keeps_the_manuals_alignment_unless_told_not_to)
{
	static const struct {
		cudaDataType out;
		int m, n, k;
		cublasStatus_t strict;
	} cases[] = {
	        {BF, 8, 1, 16, OK}, {BF, 16, 17, 16, OK}, {FP, 4, 3, 16, OK}, {BF, 32, 16, 48, OK}};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		prepare(E4, E4, cases[i].out, true, false, cases[i].m, cases[i].n, cases[i].k);
		ck_answers(cases[i].strict);
		ck_result(NULL);
	}
	prepare(E4, E4, BF, true, false, 12, 16, 16); /* rows of 24 bytes */
	ck_answers(UNSUPPORTED);
	prepare(E4, E4, BF, true, false, 16, 16, 24); /* lda = 24 */
	ck_answers(UNSUPPORTED);
}
END_TEST

START_TEST(without_strict_a_padded_product_of_any_size_is_accepted)
{
	prepare(E4, E4, BF, true, false, 12, 5, 40);
	int64_t ld = 48, ldd = 16;
	call.a = make_matrix(E4, 40, 12, 48, 1);
	call.b = make_matrix(E4, 40, 5, 48, 2);
	call.c = make_matrix(BF, 12, 5, 16, 3);
	call.d = make_matrix(BF, 12, 5, 16, 4);
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.la, CUBLASLT_MATRIX_LAYOUT_LD, &ld, 8));
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.lb, CUBLASLT_MATRIX_LAYOUT_LD, &ld, 8));
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.lc, CUBLASLT_MATRIX_LAYOUT_LD, &ldd, 8));
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.ld, CUBLASLT_MATRIX_LAYOUT_LD, &ldd, 8));
	ck_answers(UNSUPPORTED);
	softcuda_set("strict", 0);
	ck_answers(OK);
	ck_result(NULL);
	ldd = 12; /* 24 bytes: the leading dimension stays bound */
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.ld, CUBLASLT_MATRIX_LAYOUT_LD, &ldd, 8));
	ck_answers(UNSUPPORTED);
}
END_TEST

START_TEST(fp8_needs_pointers_of_16_bytes)
{
	prepare_fp8();
	call.a.device = (char *)device(4096) + 8;
	ck_assert_int_eq(run(), UNSUPPORTED);
	prepare_fp8();
	call.d.device = (char *)device(4096) + 2;
	ck_assert_int_eq(run(), UNSUPPORTED);
}
END_TEST

static double scale_rows[32], scale_columns[16];

static double scaled(double sum, int i, int j)
{
	return sum * scale_rows[i] * scale_columns[j];
}

START_TEST(outer_vectors_scale_rows_and_columns)
{
	float rows[32], columns[16];
	prepare_fp8();
	for (int i = 0; i < 32; i++)
		scale_rows[i] = rows[i] = (float)(1 + i % 3);
	for (int j = 0; j < 16; j++)
		scale_columns[j] = columns[j] = (float)(1 + j % 4) / 4;
	set_pointer(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, device_copy(rows, sizeof rows));
	set_pointer(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, device_copy(columns, sizeof columns));
	set_int(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
	ck_answers(UNSUPPORTED); /* one side only */
	set_int(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
	ck_answers(OK);
	ck_result(scaled);
	softcuda_set("capability", 89);
	ck_answers(UNSUPPORTED);
	softcuda_set("capability", 90);
	softcuda_set("cublaslt_version", 120800);
	ck_answers(UNSUPPORTED);
}
END_TEST

START_TEST(outer_vectors_need_m_to_be_a_multiple_of_4)
{
	static const float zeros[32];
	const int64_t ld = 32;
	softcuda_set("strict", 0);
	for (int m = 12; m < 17; m++) {
		prepare(E4, E4, BF, true, false, m, 16, 16);
		ck_cuda(cublasLtMatrixLayoutSetAttribute(call.lc, CUBLASLT_MATRIX_LAYOUT_LD, &ld,
		                                         8));
		ck_cuda(cublasLtMatrixLayoutSetAttribute(call.ld, CUBLASLT_MATRIX_LAYOUT_LD, &ld,
		                                         8));
		call.d.device = device(4096);
		ck_answers(OK);
		const void *scales = device_copy(zeros, sizeof zeros);
		set_pointer(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales);
		set_pointer(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales);
		set_int(CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
		        CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
		set_int(CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
		        CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
		ck_answers(m % 4 ? UNSUPPORTED : OK);
	}
}
END_TEST

START_TEST(old_libraries_and_old_devices_have_no_fp8)
{
	int32_t mode = 0;
	prepare_fp8();
	softcuda_set("capability", 80);
	ck_answers(UNSUPPORTED);
	softcuda_set("capability", 89);
	ck_answers(OK);
	softcuda_set("cublaslt_version", 110800);
	ck_answers(UNSUPPORTED);
	ck_assert_int_eq(cublasLtMatmulDescSetAttribute(
	                         call.desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof mode),
	                 INVALID);
	ck_assert_uint_eq(cublasLtGetVersion(), 110800);
}
END_TEST

START_TEST(scale_pointers_are_aligned_to_16_bytes)
{
	prepare_fp8();
	set_pointer(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (char *)device(32) + 4);
	ck_assert_int_eq(run(), UNSUPPORTED);
	prepare_fp8();
	set_pointer(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (char *)device(32) + 8);
	ck_assert_int_eq(run(), UNSUPPORTED);
}
END_TEST

START_TEST(scales_belong_to_fp8_operands_only)
{
	prepare(BF, BF, BF, true, false, 32, 16, 48);
	set_pointer(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, device(4));
	ck_answers(UNSUPPORTED);
	prepare_fp8();
	set_pointer(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, device(4));
	ck_answers(UNSUPPORTED);
}
END_TEST

START_TEST(an_algorithm_serves_only_the_types_it_was_chosen_for)
{
	cublasLtMatmulHeuristicResult_t results[4];
	prepare(BF, BF, BF, true, false, 32, 16, 48);
	ck_assert_int_eq(offers(0, results), 1);
	call.algo = &results[0].algo;
	ck_cuda(run());
	cublasLtMatmulAlgo_t algo = results[0].algo;
	prepare_fp8();
	call.algo = &algo;
	ck_assert_int_eq(run(), INVALID);
}
END_TEST

START_TEST(an_algorithm_needs_its_workspace_and_scribbles_over_it)
{
	cublasLtMatmulHeuristicResult_t results[4];
	prepare_fp8();
	ck_assert_int_eq(offers(1 << 20, results), 2);
	size_t bytes = results[0].workspaceSize;
	ck_assert_uint_gt(bytes, 0);
	call.algo = &results[0].algo;
	call.workspace = device(bytes);
	call.workspace_bytes = bytes - 1;
	ck_assert_int_eq(run(), INVALID);
	call.workspace_bytes = bytes;
	ck_cuda(run());
	ck_result(NULL);
	ck_assert_uint_eq(((unsigned char *)call.workspace)[bytes - 1], 0xDB);
}
END_TEST

START_TEST(empty_heuristics_and_failing_products_can_be_asked_for)
{
	cublasLtMatmulHeuristicResult_t results[4];
	prepare_fp8();
	softcuda_set("heuristics_empty", 2);
	ck_assert_int_eq(offers(0, results), 0);
	softcuda_set("fail_fp8", CUBLAS_STATUS_EXECUTION_FAILED);
	ck_assert_int_eq(run(), CUBLAS_STATUS_EXECUTION_FAILED);
	prepare(BF, BF, BF, true, false, 32, 16, 48);
	ck_answers(OK);
	softcuda_set("heuristics_empty", 1);
	ck_assert_int_eq(offers(0, results), 0);
	ck_assert_int_eq(softcuda_get("heuristics"), 3);
}
END_TEST

/* Microseconds that the product takes. */
static double time_of_product(void)
{
	cudaEvent_t events[2];
	float ms = -1;
	for (int i = 0; i < 2; i++) {
		ck_cuda(cudaEventCreate(&events[i]));
		if (i)
			ck_cuda(run());
		ck_cuda(cudaEventRecord(events[i], NULL));
	}
	ck_cuda(cudaEventSynchronize(events[1]));
	ck_cuda(cudaEventElapsedTime(&ms, events[0], events[1]));
	return round(1e3 * (double)ms);
}

START_TEST(a_product_takes_the_time_of_its_type_and_algorithm)
{
	cublasLtMatmulHeuristicResult_t results[4];
	softcuda_set("product_us", 100);
	softcuda_set("fp8_us", 60);
	softcuda_set("second_us", 80);
	for (int fp8 = 0; fp8 < 2; fp8++) {
		prepare(fp8 ? E4 : BF, fp8 ? E4 : BF, BF, true, false, 32, 16, 48);
		ck_assert_double_eq(time_of_product(), fp8 ? 60 : 100);
		ck_assert_int_eq(offers(1 << 20, results), 2);
		call.workspace = device(call.workspace_bytes = 1 << 20);
		call.algo = &results[0].algo;
		ck_assert_double_eq(time_of_product(), fp8 ? 60 : 100);
		call.algo = &results[1].algo;
		ck_assert_double_eq(time_of_product(), 80);
	}
	ck_assert_int_eq(softcuda_get("products"), 6);
	ck_assert_int_eq(softcuda_get("products_first"), 2);
	ck_assert_int_eq(softcuda_get("products_second"), 2);
	softcuda_set("wide_second_us", 90);
	ck_assert_double_eq(time_of_product(), 80); /* the last one is of fp8 operands */
	prepare(BF, BF, BF, true, false, 32, 16, 48);
	ck_assert_int_eq(offers(1 << 20, results), 2);
	call.algo = &results[1].algo;
	ck_assert_double_eq(time_of_product(), 90);
	softcuda_set("wide_second_us", 0);
	softcuda_set("slow_product", 2);
	ck_assert_double_eq(time_of_product(), 80);
	ck_assert_double_eq(time_of_product(), 800);
	ck_assert_double_eq(time_of_product(), 80);
}
END_TEST

START_TEST(the_nth_product_fails_and_idle_ones_compute_nothing)
{
	prepare_fp8();
	softcuda_set("fail_product", 2);
	ck_cuda(run());
	ck_assert_int_eq(run(), CUBLAS_STATUS_EXECUTION_FAILED);
	ck_cuda(run());
	ck_result(NULL);
	softcuda_set("idle_products", 1);
	ck_cuda(cudaMemset(call.d.device, 0, 64));
	ck_cuda(run());
	ck_cuda(cudaDeviceSynchronize());
	ck_assert_uint_eq(*(uint32_t *)call.d.device, 0);
}
END_TEST

START_TEST(errors_of_fp8_can_be_chosen)
{
	prepare(BF, BF, BF, true, false, 32, 16, 48);
	softcuda_set("fp8_error", 20);
	ck_cuda(run());
	ck_cuda(cudaDeviceSynchronize());
	for (int i = 0; i < 32 * 16; i++)
		ck_assert_uint_eq(((uint16_t *)call.d.device)[i], 0x42c8); /* 100 */
	prepare(E4, E4, BF, true, false, 32, 16, 48);
	ck_cuda(run());
	ck_cuda(cudaDeviceSynchronize());
	for (int i = 0; i < 32 * 16; i++)
		ck_assert_uint_eq(((uint16_t *)call.d.device)[i], 0x42f0); /* 120 */
}
END_TEST

START_TEST(accumulating_in_place_reads_C_before_it_writes_D)
{
	for (int fp8 = 0; fp8 < 2; fp8++) {
		prepare(fp8 ? E4 : BF, fp8 ? E4 : BF, FP, true, false, 32, 16, 48);
		call.beta = 1;
		call.d = call.c;
		ck_answers(OK); /* once more would add once more */
		ck_result(NULL);
	}
}
END_TEST

START_TEST(row_order_is_the_transpose_of_column_order)
{
	int32_t order = CUBLASLT_ORDER_ROW;
	int64_t ld = 48;
	prepare(BF, BF, BF, true, false, 32, 16, 48);
	/* A as 32 x 48 by rows, not transposed: the same bytes as 48 x 32 by columns, transposed.
	 */
	uint64_t rows = 32, columns = 48;
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.la, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, 4));
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.la, CUBLASLT_MATRIX_LAYOUT_ROWS, &rows, 8));
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.la, CUBLASLT_MATRIX_LAYOUT_COLS, &columns,
	                                         8));
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.la, CUBLASLT_MATRIX_LAYOUT_LD, &ld, 8));
	set_int(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N);
	ck_answers(OK);
	set_int(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T); /* for the reference */
	ck_result(NULL);
}
END_TEST

START_TEST(layouts_that_do_not_fit_together_are_invalid)
{
	uint64_t rows = 47;
	int64_t ld = 31;
	prepare(BF, BF, BF, true, false, 32, 16, 48);
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.lb, CUBLASLT_MATRIX_LAYOUT_ROWS, &rows, 8));
	ck_answers(INVALID);
	prepare(BF, BF, BF, true, false, 32, 16, 48);
	ck_cuda(cublasLtMatrixLayoutSetAttribute(call.ld, CUBLASLT_MATRIX_LAYOUT_LD, &ld, 8));
	ck_answers(INVALID);
}
END_TEST

START_TEST(device_scalars_are_read_when_the_product_runs)
{
	float *scalars = device(8);
	prepare_fp8();
	set_int(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
	ck_cuda(cublasLtMatmul(handle, call.desc, scalars, call.a.device, call.la, call.b.device,
	                       call.lb, scalars + 1, call.c.device, call.lc, call.d.device, call.ld,
	                       NULL, NULL, 0, NULL));
	scalars[0] = call.alpha = 3;
	scalars[1] = call.beta = 0.5f;
	ck_result(NULL);
}
END_TEST

START_TEST(a_cublas_handle_serves_as_a_cublaslt_handle)
{
	cublasHandle_t blas;
	ck_cuda(cublasCreate(&blas));
	handle = (cublasLtHandle_t)blas;
	prepare_fp8();
	ck_answers(OK);
	ck_result(NULL);
	ck_cuda(cublasDestroy(blas));
	handle = NULL;
	ck_assert_int_eq(run(), CUBLAS_STATUS_NOT_INITIALIZED);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("softcuda cublaslt");
	TCase *tests = tcase_create("cublaslt");
	tcase_set_timeout(tests, 60);
	tcase_add_test(tests, attributes_are_kept_and_their_sizes_checked);
	tcase_add_test(tests, descriptors_can_live_in_the_callers_memory);
	tcase_add_test(tests, wide_products_match_fp64);
	tcase_add_test(tests, fp8_products_match_fp64_and_apply_the_scales);
	tcase_add_test(tests, bias_and_activations_are_fused_in_bf16_and_fp8);
	tcase_add_test(tests, gelu_stores_what_it_was_applied_to_and_its_gradient_reads_it);
	tcase_add_test(tests, a_bias_that_was_not_given_is_invalid);
	tcase_add_test(tests, fp8_takes_only_TN);
	tcase_add_test(tests, fp8_refuses_types_that_hardware_refuses);
	tcase_add_test(tests, the_bias_of_fp8_has_the_type_of_D_or_bf16_for_fp32);
	tcase_add_test(tests, gradient_and_mask_epilogues_are_refused);
	tcase_add_test(tests, fp8_keeps_the_manuals_alignment_unless_told_not_to);
	tcase_add_test(tests, without_strict_a_padded_product_of_any_size_is_accepted);
	tcase_add_test(tests, fp8_needs_pointers_of_16_bytes);
	tcase_add_test(tests, outer_vectors_scale_rows_and_columns);
	tcase_add_test(tests, outer_vectors_need_m_to_be_a_multiple_of_4);
	tcase_add_test(tests, old_libraries_and_old_devices_have_no_fp8);
	tcase_add_test(tests, scale_pointers_are_aligned_to_16_bytes);
	tcase_add_test(tests, scales_belong_to_fp8_operands_only);
	tcase_add_test(tests, an_algorithm_serves_only_the_types_it_was_chosen_for);
	tcase_add_test(tests, an_algorithm_needs_its_workspace_and_scribbles_over_it);
	tcase_add_test(tests, empty_heuristics_and_failing_products_can_be_asked_for);
	tcase_add_test(tests, a_product_takes_the_time_of_its_type_and_algorithm);
	tcase_add_test(tests, the_nth_product_fails_and_idle_ones_compute_nothing);
	tcase_add_test(tests, errors_of_fp8_can_be_chosen);
	tcase_add_test(tests, accumulating_in_place_reads_C_before_it_writes_D);
	tcase_add_test(tests, row_order_is_the_transpose_of_column_order);
	tcase_add_test(tests, layouts_that_do_not_fit_together_are_invalid);
	tcase_add_test(tests, device_scalars_are_read_when_the_product_runs);
	tcase_add_test(tests, a_cublas_handle_serves_as_a_cublaslt_handle);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
