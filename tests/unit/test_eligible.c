/* What may be replaced at all: one property of the whitelist a test, at its boundaries, and which
 * reason is given when several apply; then the overlap of the output with what is read. */
#include <stdint.h>

#include "plan/plan.h"
#include "tests/support/suite.h"
#include "tests/unit/key.h"

static struct qs_key key;

static void set_up(void)
{
	key = plain_key(4096, 2048, 1024);
}

#define expect(reason) ck_assert_str_eq(qs_reason_code(qs_eligible(&key)), reason)
#define ELIGIBLE       "auto"

START_TEST(plain_product_is_eligible)
{
	expect(ELIGIBLE);
}
END_TEST

/* Entry points ------------------------------------------------------------------------------- */

START_TEST(every_entry_of_single_products_is_eligible)
{
	static const uint8_t entries[] = {QS_ENTRY_GEMM_EX, QS_ENTRY_GEMM_EX_64,
	                                  QS_ENTRY_GEMM_STRIDED_BATCHED_EX,
	                                  QS_ENTRY_GEMM_STRIDED_BATCHED_EX_64, QS_ENTRY_LT_MATMUL};
	key.entry = entries[_i];
	expect(ELIGIBLE);
}
END_TEST

START_TEST(products_by_arrays_of_pointers_are_batches_even_of_one)
{
	static const uint8_t entries[] = {QS_ENTRY_GEMM_BATCHED_EX, QS_ENTRY_GEMM_BATCHED_EX_64,
	                                  QS_ENTRY_GEMM_GROUPED_BATCHED_EX,
	                                  QS_ENTRY_GEMM_GROUPED_BATCHED_EX_64};
	key.entry = entries[_i];
	expect("batch");
	key.m = key.n = key.k = 0; /* as a grouped call is described */
	expect("batch");
}
END_TEST

START_TEST(sgemm_ex_is_counted_only)
{
	key.entry = QS_ENTRY_SGEMM_EX;
	expect("unavailable");
	key.entry = QS_ENTRY_SGEMM_EX_64;
	expect("unavailable");
}
END_TEST

START_TEST(unreadable_handle_comes_before_every_other_reason)
{
	key.odd = QS_ODD_OPAQUE;
	key.entry = QS_ENTRY_GEMM_BATCHED_EX;
	key.m = 0;
	expect("handle");
}
END_TEST

/* Types and arithmetic ----------------------------------------------------------------------- */

START_TEST(only_bf16_operands_are_eligible)
{
	static const uint8_t types[] = {CUDA_R_16F,     CUDA_R_32F,     CUDA_R_64F,  CUDA_C_16BF,
	                                CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, QS_TYPE_NONE};
	key.atype = types[_i];
	expect("dtype");
	key.atype = CUDA_R_16BF;
	key.btype = types[_i];
	expect("dtype");
}
END_TEST

START_TEST(output_is_bf16_or_fp32)
{
	key.ctype = key.dtype = CUDA_R_32F;
	expect(ELIGIBLE);
	key.ctype = key.dtype = CUDA_R_16F;
	expect("dtype");
	key.ctype = key.dtype = CUDA_R_64F;
	expect("dtype");
}
END_TEST

START_TEST(plain_fp32_arithmetic_is_required)
{
	static const struct {
		cublasComputeType_t compute;
		const char *reason;
	} cases[] = {
	        {CUBLAS_COMPUTE_32F, ELIGIBLE},           {CUBLAS_COMPUTE_32F_FAST_16BF, ELIGIBLE},
	        {CUBLAS_COMPUTE_32F_PEDANTIC, "compute"}, {CUBLAS_COMPUTE_32F_FAST_TF32, "compute"},
	        {CUBLAS_COMPUTE_32F_FAST_16F, "compute"}, {CUBLAS_COMPUTE_16F, "compute"},
	        {CUBLAS_COMPUTE_64F, "compute"},          {CUBLAS_COMPUTE_32I, "compute"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		key.compute = cases[i].compute;
		expect(cases[i].reason);
	}
}
END_TEST

START_TEST(other_scalar_types_are_refused)
{
	key.scale_type = CUDA_R_16BF;
	expect("compute");
	key.scale_type = QS_TYPE_NONE;
	expect("compute");
}
END_TEST

START_TEST(pedantic_math_mode_is_refused_and_a_wish_about_reductions_is_not)
{
	key.odd = QS_ODD_REDUCED;
	expect(ELIGIBLE);
	key.odd = QS_ODD_REDUCED | QS_ODD_PEDANTIC;
	expect("compute");
}
END_TEST

/* Shape -------------------------------------------------------------------------------------- */

START_TEST(all_four_transposes_are_eligible)
{
	key.ta = _i & 1 ? CUBLAS_OP_T : CUBLAS_OP_N;
	key.tb = _i & 2 ? CUBLAS_OP_T : CUBLAS_OP_N;
	key.lda = key.ldb = 8192;
	expect(ELIGIBLE);
}
END_TEST

START_TEST(conjugation_and_nonsense_are_refused_on_either_side)
{
	static const uint8_t operations[] = {CUBLAS_OP_C, CUBLAS_OP_CONJG, QS_TYPE_NONE};
	key.ta = operations[_i];
	expect("op");
	key.ta = CUBLAS_OP_T;
	key.tb = operations[_i];
	expect("op");
}
END_TEST

START_TEST(exactly_one_product_is_eligible)
{
	key.batch = 2;
	expect("batch");
	key.batch = 0;
	expect("batch");
	key.batch = -1;
	expect("batch");
}
END_TEST

START_TEST(empty_products_are_left_alone)
{
	int64_t *const sides[] = {&key.m, &key.n, &key.k};
	*sides[_i] = 0;
	expect("empty");
	key.atype = CUDA_R_16F; /* nothing about types matters then */
	expect("empty");
}
END_TEST

START_TEST(sides_must_be_positive_and_fit_32_bits)
{
	int64_t *const sides[] = {&key.m, &key.n, &key.k};
	key.lda = key.ldb = key.ldc = key.ldd = INT64_C(1) << 33;
	*sides[_i] = -8;
	expect("order");
	*sides[_i] = INT64_C(1) << 31;
	expect("order");
	*sides[_i] = (INT64_C(1) << 31) - 8;
	expect(ELIGIBLE);
}
END_TEST

START_TEST(leading_dimensions_cover_the_stored_rows)
{
	key.ta = CUBLAS_OP_N;
	key.lda = key.m;
	expect(ELIGIBLE);
	key.lda = key.m - 1;
	expect("order");
	key.ta = CUBLAS_OP_T;
	key.lda = key.k - 1;
	expect("order");
	key.lda = key.k;
	key.ldb = key.k - 1;
	expect("order");
	key.tb = CUBLAS_OP_T;
	key.ldb = key.n - 1;
	expect("order");
	key.ldb = key.n;
	key.ldd = key.m - 8;
	expect("order");
}
END_TEST

START_TEST(foreign_orders_and_misfits_are_refused)
{
	key.odd = QS_ODD_ORDER;
	expect("order");
	key.odd = QS_ODD_SHAPE;
	expect("order");
}
END_TEST

START_TEST(operands_need_no_alignment)
{
	key.align = QS_ALIGN_C | QS_ALIGN_D | QS_ALIGN_BIAS;
	key.k = 1021;
	key.n = 2047;
	key.lda = key.ldb = 1021;
	expect(ELIGIBLE);
}
END_TEST

/* Scalars ------------------------------------------------------------------------------------ */

START_TEST(scalars_must_be_readable)
{
	key.alpha = QS_SCALAR_DEVICE;
	expect("pointer-mode");
	key.alpha = QS_SCALAR_ONE;
	key.beta = QS_SCALAR_DEVICE;
	expect("pointer-mode");
}
END_TEST

START_TEST(alpha_is_finite_and_not_zero)
{
	key.alpha = QS_SCALAR_OTHER;
	expect(ELIGIBLE);
	key.alpha = QS_SCALAR_ZERO;
	expect("alpha");
	key.alpha = QS_SCALAR_NONFINITE;
	expect("alpha");
}
END_TEST

START_TEST(beta_is_finite)
{
	key.beta = QS_SCALAR_ONE;
	expect(ELIGIBLE);
	key.beta = QS_SCALAR_OTHER;
	expect(ELIGIBLE);
	key.beta = QS_SCALAR_NONFINITE;
	expect("alpha");
}
END_TEST

/* Epilogues ---------------------------------------------------------------------------------- */

START_TEST(epilogues_without_a_second_output_are_eligible)
{
	static const int32_t epilogues[] = {
	        CUBLASLT_EPILOGUE_DEFAULT,   CUBLASLT_EPILOGUE_RELU,
	        CUBLASLT_EPILOGUE_GELU,      CUBLASLT_EPILOGUE_BIAS,
	        CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_GELU_BIAS};
	key.epilogue = epilogues[_i];
	key.bias_type = key.epilogue & CUBLASLT_EPILOGUE_BIAS ? CUDA_R_16BF : QS_TYPE_NONE;
	expect(ELIGIBLE);
}
END_TEST

START_TEST(auxiliary_and_gradient_epilogues_are_refused)
{
	static const int32_t epilogues[] = {CUBLASLT_EPILOGUE_RELU_AUX,
	                                    CUBLASLT_EPILOGUE_RELU_AUX_BIAS,
	                                    CUBLASLT_EPILOGUE_GELU_AUX,
	                                    CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
	                                    CUBLASLT_EPILOGUE_DRELU,
	                                    CUBLASLT_EPILOGUE_DRELU_BGRAD,
	                                    CUBLASLT_EPILOGUE_DGELU,
	                                    CUBLASLT_EPILOGUE_DGELU_BGRAD,
	                                    CUBLASLT_EPILOGUE_BGRADA,
	                                    CUBLASLT_EPILOGUE_BGRADB,
	                                    0,
	                                    1 << 20};
	key.epilogue = epilogues[_i];
	key.bias_type = CUDA_R_16BF;
	expect("epilogue");
}
END_TEST

START_TEST(bias_is_bf16)
{
	key.epilogue = CUBLASLT_EPILOGUE_BIAS;
	key.ctype = key.dtype = CUDA_R_32F;
	key.bias_type = CUDA_R_16BF;
	expect(ELIGIBLE);
	key.bias_type = CUDA_R_32F;
	expect("epilogue");
}
END_TEST

START_TEST(scales_and_other_attributes_are_refused)
{
	key.odd = QS_ODD_ATTR;
	expect("epilogue");
}
END_TEST

/* Output ------------------------------------------------------------------------------------- */

START_TEST(rows_of_the_output_fill_16_bytes)
{
	key.ldc = key.ldd = 8192;
	for (key.m = 4088; key.m <= 4096; key.m++)
		expect(key.m % 8 ? "align" : ELIGIBLE);
	key.ctype = key.dtype = CUDA_R_32F;
	for (key.m = 4088; key.m <= 4096; key.m++)
		expect(key.m % 4 ? "align" : ELIGIBLE);
}
END_TEST

START_TEST(output_is_aligned)
{
	key.align &= (uint8_t)~QS_ALIGN_D;
	expect("align");
}
END_TEST

START_TEST(c_is_aligned_where_it_is_read)
{
	key.align &= (uint8_t)~QS_ALIGN_C;
	expect(ELIGIBLE);
	key.beta = QS_SCALAR_OTHER;
	expect("align");
}
END_TEST

START_TEST(bias_is_aligned_where_there_is_one)
{
	key.align &= (uint8_t)~QS_ALIGN_BIAS;
	expect(ELIGIBLE);
	key.epilogue = CUBLASLT_EPILOGUE_BIAS;
	key.bias_type = CUDA_R_16BF;
	expect("align");
}
END_TEST

START_TEST(c_has_the_type_of_d_where_it_is_read)
{
	key.dtype = CUDA_R_32F;
	expect(ELIGIBLE);
	key.beta = QS_SCALAR_ONE;
	expect("beta");
	key.ctype = CUDA_R_32F;
	expect(ELIGIBLE);
}
END_TEST

START_TEST(c_covers_its_rows_where_it_is_read)
{
	key.ldc = key.m - 8;
	expect(ELIGIBLE);
	key.beta = QS_SCALAR_ONE;
	expect("beta");
}
END_TEST

/* Which reason when several apply: the one that a user can act on first. */
START_TEST(types_come_before_shape_scalars_epilogue_and_output)
{
	key.align = 0;
	expect("align");
	key.epilogue = CUBLASLT_EPILOGUE_BGRADB;
	expect("epilogue");
	key.alpha = QS_SCALAR_DEVICE;
	expect("pointer-mode");
	key.odd = QS_ODD_ORDER;
	expect("order");
	key.batch = 2;
	expect("batch");
	key.ta = CUBLAS_OP_C;
	expect("op");
	key.compute = CUBLAS_COMPUTE_64F;
	expect("compute");
	key.atype = CUDA_R_64F;
	expect("dtype");
}
END_TEST

/* Overlap ------------------------------------------------------------------------------------ */

/* 32 x 16 x 64, TN: A is 64 x 32 (4096 bytes), B 64 x 16 (2048), D 32 x 16 (1024). Addresses are
 * never followed. */
#define A_BYTES 4096
#define B_BYTES 2048
#define D_BYTES 1024

static struct qs_gemm product;

static const void *at(uintptr_t address)
{
	return (const void *)address;
}

static void set_up_product(void)
{
	product = (struct qs_gemm){
	        .key = plain_key(32, 16, 64),
	        .a = at(0x100000),
	        .b = at(0x200000),
	        .c = at(0x300000),
	        .d = (void *)(uintptr_t)0x300000,
	};
}

static bool overlaps_at(uintptr_t d)
{
	product.d = (void *)d;
	product.c = product.d;
	return qs_overlap(&product);
}

START_TEST(separate_matrices_do_not_overlap)
{
	ck_assert(!qs_overlap(&product));
}
END_TEST

START_TEST(output_may_touch_an_operand_and_not_share_a_byte)
{
	ck_assert(!overlaps_at(0x100000 - D_BYTES));
	ck_assert(overlaps_at(0x100000 - D_BYTES + 2));
	ck_assert(overlaps_at(0x100000 + A_BYTES - 2));
	ck_assert(!overlaps_at(0x100000 + A_BYTES));
	ck_assert(!overlaps_at(0x200000 - D_BYTES));
	ck_assert(overlaps_at(0x200000 - D_BYTES + 2));
	ck_assert(overlaps_at(0x200000 + B_BYTES - 2));
	ck_assert(!overlaps_at(0x200000 + B_BYTES));
}
END_TEST

START_TEST(an_operand_inside_the_output_overlaps)
{
	product.key = plain_key(4096, 4096, 16);
	product.b = at(0x400000);
	ck_assert(overlaps_at(0x380000));
}
END_TEST

START_TEST(extent_follows_the_transposes)
{
	/* A not transposed: 32 x 64 with the leading dimension of 64 rows is twice as long. */
	product.key.ta = CUBLAS_OP_N;
	ck_assert(overlaps_at(0x100000 + A_BYTES));
	ck_assert(overlaps_at(0x100000 + 63 * 64 * 2 + 62));
	ck_assert(!overlaps_at(0x100000 + 63 * 64 * 2 + 64));
	/* B transposed: 16 x 64. */
	product.key.tb = CUBLAS_OP_T;
	ck_assert(overlaps_at(0x200000 + 63 * 64 * 2 + 30));
	ck_assert(!overlaps_at(0x200000 + 63 * 64 * 2 + 32));
}
END_TEST

START_TEST(padding_after_the_last_column_is_free)
{
	product.key.lda = 128; /* last of 32 columns: 64 of 128 elements are A's */
	ck_assert(overlaps_at(0x100000 + 31 * 256 + 126));
	ck_assert(!overlaps_at(0x100000 + 31 * 256 + 128));
}
END_TEST

START_TEST(fp32_output_is_twice_as_long)
{
	product.key.ctype = product.key.dtype = CUDA_R_32F;
	ck_assert(overlaps_at(0x100000 - D_BYTES));
	ck_assert(!overlaps_at(0x100000 - 2 * D_BYTES));
	ck_assert(overlaps_at(0x100000 - 2 * D_BYTES + 4));
}
END_TEST

START_TEST(bias_must_lie_outside_the_output)
{
	product.bias = at(0x300000 - 64);
	ck_assert(!qs_overlap(&product));
	product.bias = at(0x300000 - 62);
	ck_assert(qs_overlap(&product));
	product.bias = at(0x300000 + D_BYTES - 2);
	ck_assert(qs_overlap(&product));
	product.bias = at(0x300000 + D_BYTES);
	ck_assert(!qs_overlap(&product));
}
END_TEST

START_TEST(c_that_is_read_is_d_itself_or_apart)
{
	product.key.beta = QS_SCALAR_ONE;
	ck_assert(!qs_overlap(&product));
	product.c = at(0x300000 + D_BYTES);
	ck_assert(!qs_overlap(&product));
	product.c = at(0x300000 + D_BYTES - 2);
	ck_assert(qs_overlap(&product));
	product.c = product.d;
	product.key.ldc = 40; /* same address, other columns */
	ck_assert(qs_overlap(&product));
	product.key.beta = QS_SCALAR_ZERO;
	ck_assert(!qs_overlap(&product));
}
END_TEST

#define add(tcase, test)      tcase_add_test(tcase, test)
#define add_n(tcase, test, n) tcase_add_loop_test(tcase, test, 0, n)

static TCase *eligibility(void)
{
	TCase *tcase = tcase_create("eligible");
	tcase_add_checked_fixture(tcase, set_up, NULL);
	add(tcase, plain_product_is_eligible);
	add_n(tcase, every_entry_of_single_products_is_eligible, 5);
	add_n(tcase, products_by_arrays_of_pointers_are_batches_even_of_one, 4);
	add(tcase, sgemm_ex_is_counted_only);
	add(tcase, unreadable_handle_comes_before_every_other_reason);
	add_n(tcase, only_bf16_operands_are_eligible, 7);
	add(tcase, output_is_bf16_or_fp32);
	add(tcase, plain_fp32_arithmetic_is_required);
	add(tcase, other_scalar_types_are_refused);
	add(tcase, pedantic_math_mode_is_refused_and_a_wish_about_reductions_is_not);
	add_n(tcase, all_four_transposes_are_eligible, 4);
	add_n(tcase, conjugation_and_nonsense_are_refused_on_either_side, 3);
	add(tcase, exactly_one_product_is_eligible);
	add_n(tcase, empty_products_are_left_alone, 3);
	add_n(tcase, sides_must_be_positive_and_fit_32_bits, 3);
	add(tcase, leading_dimensions_cover_the_stored_rows);
	add(tcase, foreign_orders_and_misfits_are_refused);
	add(tcase, operands_need_no_alignment);
	add(tcase, scalars_must_be_readable);
	add(tcase, alpha_is_finite_and_not_zero);
	add(tcase, beta_is_finite);
	add_n(tcase, epilogues_without_a_second_output_are_eligible, 6);
	add_n(tcase, auxiliary_and_gradient_epilogues_are_refused, 12);
	add(tcase, bias_is_bf16);
	add(tcase, scales_and_other_attributes_are_refused);
	add(tcase, rows_of_the_output_fill_16_bytes);
	add(tcase, output_is_aligned);
	add(tcase, c_is_aligned_where_it_is_read);
	add(tcase, bias_is_aligned_where_there_is_one);
	add(tcase, c_has_the_type_of_d_where_it_is_read);
	add(tcase, c_covers_its_rows_where_it_is_read);
	add(tcase, types_come_before_shape_scalars_epilogue_and_output);
	return tcase;
}

static TCase *overlap(void)
{
	TCase *tcase = tcase_create("overlap");
	tcase_add_checked_fixture(tcase, set_up_product, NULL);
	add(tcase, separate_matrices_do_not_overlap);
	add(tcase, output_may_touch_an_operand_and_not_share_a_byte);
	add(tcase, an_operand_inside_the_output_overlaps);
	add(tcase, extent_follows_the_transposes);
	add(tcase, padding_after_the_last_column_is_free);
	add(tcase, fp32_output_is_twice_as_long);
	add(tcase, bias_must_lie_outside_the_output);
	add(tcase, c_that_is_read_is_d_itself_or_apart);
	return tcase;
}

int main(void)
{
	Suite *suite = suite_create("eligible");
	suite_add_tcase(suite, eligibility());
	suite_add_tcase(suite, overlap());
	return qs_suite_main(suite);
}
