/* The reference of the kernel of kernels/compare.cu against numbers worked out by hand: the error
 * of a result, what is left out of it, and what quantising an operand lost. */
#include <math.h>
#include <string.h>

#include "kernels/compare.h"
#include "tests/oracle/oracle.h"
#include "tests/support/suite.h"

#define ROWS 3
#define COLS 5
#define LD   7
#define SIZE (ROWS * LD + 1)

static _Alignas(16) struct qs_compare_work work;
static struct qs_compare_outcome outcome;
static float reference[SIZE], candidate[SIZE];
static uint16_t narrow[2][SIZE];
static uint16_t operand[16];
static float scale[4];

static float *at(float *matrix, int row, int col)
{
	return &matrix[row * LD + col];
}

static void setup(void)
{
	for (int i = 0; i < SIZE; i++)
		reference[i] = candidate[i] = NAN; /* between rows */
	for (int row = 0; row < ROWS; row++)
		for (int col = 0; col < COLS; col++)
			*at(reference, row, col) = *at(candidate, row, col) = 2.0f;
	memset(&outcome, 0, sizeof outcome);
}

static void run(struct qs_compare_args *args)
{
	void *params[] = {args};
	work.ticket = 0;
	args->work = (uintptr_t)&work;
	args->outcome = (uintptr_t)&outcome;
	args->sequence++;
	qs_oracle_compare_kernels[0].run(params, qs_compare_grid(args), QS_COMPARE_THREADS);
	ck_assert_uint_eq(outcome.sequence, args->sequence);
}

static struct qs_compare_args args_of(const void *r, const void *c, uint32_t type)
{
	return (struct qs_compare_args){.reference = (uintptr_t)r,
	                                .candidate = (uintptr_t)c,
	                                .rows = ROWS,
	                                .cols = COLS,
	                                .ld_reference = LD,
	                                .ld_candidate = LD,
	                                .type = type,
	                                .blocks = 1};
}

static void compare(void)
{
	struct qs_compare_args args = args_of(reference, candidate, QS_COMPARE_FP32);
	run(&args);
}

START_TEST(equal_results_have_no_error)
{
	compare();
	ck_assert_double_eq(outcome.signal, 4.0 * ROWS * COLS);
	ck_assert_double_eq(outcome.noise, 0);
	ck_assert_double_eq(outcome.sqnr, QS_SQNR_MAX);
	ck_assert_double_eq(outcome.amax, 2);
	ck_assert_uint_eq(outcome.skipped + outcome.spoilt, 0);
}
END_TEST

START_TEST(results_that_are_all_zero_have_no_error)
{
	for (int row = 0; row < ROWS; row++)
		for (int col = 0; col < COLS; col++)
			*at(reference, row, col) = *at(candidate, row, col) = 0;
	compare();
	ck_assert_double_eq(outcome.signal, 0);
	ck_assert_double_eq(outcome.sqnr, QS_SQNR_MAX);
}
END_TEST

START_TEST(error_is_a_ratio_of_sums_in_db)
{
	*at(candidate, 0, 0) = 1.5f;
	*at(candidate, 2, 4) = -1.0f;
	compare();
	ck_assert_double_eq(outcome.noise, 0.25 + 9.0);
	ck_assert_double_eq_tol(outcome.sqnr, 10 * log10(60 / 9.25), 1e-5);
	ck_assert_double_eq(outcome.error, 3);
}
END_TEST

START_TEST(bf16_and_every_ld_are_read_as_they_are)
{
	for (int i = 0; i < SIZE; i++)
		narrow[0][i] = narrow[1][i] = 0x7fc0;
	for (int i = 0; i < ROWS * COLS; i++) {
		narrow[0][1 + i] = 0x4000; /* 2, tight, off any alignment */
		narrow[1][i / COLS * LD + i % COLS] = i == 14 ? 0x4040 : 0x4000;
	}
	struct qs_compare_args args = args_of(narrow[0] + 1, narrow[1], QS_COMPARE_BF16);
	args.ld_reference = COLS;
	run(&args);
	ck_assert_double_eq(outcome.signal, 60);
	ck_assert_double_eq(outcome.noise, 1);
	ck_assert_uint_eq(outcome.skipped + outcome.spoilt, 0);
}
END_TEST

START_TEST(what_is_not_finite_in_the_reference_is_skipped)
{
	*at(reference, 0, 1) = NAN;
	*at(candidate, 0, 1) = NAN;
	*at(reference, 1, 1) = INFINITY;
	*at(candidate, 1, 1) = 7;
	compare();
	ck_assert_uint_eq(outcome.skipped, 2);
	ck_assert_uint_eq(outcome.spoilt, 0);
	ck_assert_double_eq(outcome.signal, 4.0 * (ROWS * COLS - 2));
	ck_assert_double_eq(outcome.sqnr, QS_SQNR_MAX);
}
END_TEST

START_TEST(what_only_the_candidate_spoils_is_the_worst_error)
{
	const float bad[] = {NAN, INFINITY, -INFINITY};
	*at(candidate, 1, 2) = bad[_i];
	compare();
	ck_assert_uint_eq(outcome.spoilt, 1);
	ck_assert_double_eq(outcome.sqnr, -QS_SQNR_MAX);
	ck_assert_double_eq(outcome.signal, 60);
}
END_TEST

START_TEST(an_error_beside_nothing_is_the_worst_error)
{
	for (int i = 0; i < SIZE; i++)
		reference[i] = 0;
	compare();
	ck_assert_double_eq(outcome.sqnr, -QS_SQNR_MAX);
}
END_TEST

/* Two rows of four: scale 1, so that the format's own limits are seen. */
static struct qs_compare_args with_operand(uint32_t format)
{
	static const float x[8] = {448, 449, -57345, 0, 0x1p-10f, 0x1.02p-10f, -0x1p-17f, INFINITY};
	struct qs_compare_args args = args_of(reference, candidate, QS_COMPARE_FP32);
	for (int i = 0; i < 8; i++)
		operand[i / 4 * 8 + i % 4] = qs_oracle_float_to_bf16(x[i]);
	operand[4] = operand[5] = 0x7f00; /* between rows */
	scale[0] = scale[1] = scale[2] = scale[3] = 1;
	args.operand[1] = (struct qs_compare_operand){.source = (uintptr_t)operand,
	                                              .scale = (uintptr_t)scale,
	                                              .rows = 2,
	                                              .cols = 4,
	                                              .ld = 8,
	                                              .format = format,
	                                              .blocks = 1};
	return args;
}

/* 449 is no bf16: it became 448. */
START_TEST(elements_beyond_the_format_are_counted)
{
	struct qs_compare_args args = with_operand(_i ? QS_FP8_E5M2 : QS_FP8_E4M3);
	run(&args);
	ck_assert_uint_eq(outcome.saturated[0] + outcome.flushed[0], 0);
	ck_assert_uint_eq(outcome.saturated[1], _i ? 0 : 1);
	ck_assert_uint_eq(outcome.flushed[1], _i ? 1 : 2);
	ck_assert_double_eq(outcome.operand_amax[1], 57344);
}
END_TEST

START_TEST(each_row_or_column_has_its_own_scale)
{
	struct qs_compare_args args = with_operand(QS_FP8_E4M3);
	scale[1] = 0x1p-8f; /* 0x1p-10 and more are kept in row 1; column 1 saturates */
	args.operand[1].scales = QS_COMPARE_SCALE_OF_ROW;
	run(&args);
	ck_assert_uint_eq(outcome.saturated[1], 1);
	ck_assert_uint_eq(outcome.flushed[1], 0);
	args.operand[1].scales = QS_COMPARE_SCALE_OF_COL;
	run(&args);
	ck_assert_uint_eq(outcome.saturated[1], 2);
	ck_assert_uint_eq(outcome.flushed[1], 2);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("compare");
	TCase *tests = tcase_create("compare");
	tcase_add_checked_fixture(tests, setup, NULL);
	tcase_add_test(tests, equal_results_have_no_error);
	tcase_add_test(tests, results_that_are_all_zero_have_no_error);
	tcase_add_test(tests, error_is_a_ratio_of_sums_in_db);
	tcase_add_test(tests, bf16_and_every_ld_are_read_as_they_are);
	tcase_add_test(tests, what_is_not_finite_in_the_reference_is_skipped);
	tcase_add_loop_test(tests, what_only_the_candidate_spoils_is_the_worst_error, 0, 3);
	tcase_add_test(tests, an_error_beside_nothing_is_the_worst_error);
	tcase_add_loop_test(tests, elements_beyond_the_format_are_counted, 0, 2);
	tcase_add_test(tests, each_row_or_column_has_its_own_scale);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
