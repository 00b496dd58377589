/* The model of time that decides where nothing was measured: the shapes it must get right, because
 * they were timed, and the properties that hold whatever its constants are. */
#include "plan/plan.h"
#include "tests/support/suite.h"

START_TEST(large_training_products_gain)
{
	ck_assert_double_gt(qs_fp8_gain(4096, 4096, 4096), 0.05);
	ck_assert_double_gt(qs_fp8_gain(14336, 8192, 4096), 0.3);
	ck_assert_double_gt(qs_fp8_gain(8192, 8192, 8192), 0.5);
	ck_assert_double_gt(qs_fp8_gain(16384, 8192, 16384), 0.6);
}
END_TEST

START_TEST(a_short_reduction_never_pays)
{
	ck_assert_double_lt(qs_fp8_gain(16384, 16384, 128), 0.0);
	ck_assert_double_lt(qs_fp8_gain(4096, 4096, 511), 0.0);
	ck_assert_double_lt(qs_fp8_gain(65536, 65536, 511), 0.0);
}
END_TEST

START_TEST(few_tokens_never_pay)
{
	for (int64_t n = 1; n <= 512; n *= 2) {
		ck_assert_double_lt(qs_fp8_gain(16384, n, 16384), 0.0);
		ck_assert_double_lt(qs_fp8_gain(n, 16384, 16384), 0.0);
	}
}
END_TEST

START_TEST(small_products_never_pay)
{
	ck_assert_double_lt(qs_fp8_gain(512, 512, 512), 0.0);
	ck_assert_double_lt(qs_fp8_gain(1024, 1024, 1024), 0.0);
	ck_assert_double_lt(qs_fp8_gain(1, 1, 1), 0.0);
}
END_TEST

START_TEST(gain_is_the_same_with_m_and_n_exchanged)
{
	ck_assert_double_eq(qs_fp8_gain(14336, 2048, 4096), qs_fp8_gain(2048, 14336, 4096));
}
END_TEST

START_TEST(gain_grows_with_the_product_and_stays_below_the_ratio_of_rates)
{
	double before = -1.0;
	for (int64_t side = 1024; side <= INT32_MAX; side *= 2) {
		double gain = qs_fp8_gain(side, side, side);
		ck_assert_double_ge(gain, before);
		ck_assert_double_lt(gain, 1.0);
		before = gain;
	}
	ck_assert_double_gt(before, 0.8);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("size");
	TCase *tcase = tcase_create("size");
	tcase_add_test(tcase, large_training_products_gain);
	tcase_add_test(tcase, a_short_reduction_never_pays);
	tcase_add_test(tcase, few_tokens_never_pay);
	tcase_add_test(tcase, small_products_never_pay);
	tcase_add_test(tcase, gain_is_the_same_with_m_and_n_exchanged);
	tcase_add_test(tcase, gain_grows_with_the_product_and_stays_below_the_ratio_of_rates);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
