/* What a call that is passed through costs. The bound is generous, as machines that run tests are
 * busy; the figure itself is printed, and scripts/bench_overhead prints it on its own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/intercept/run.h"
#include "tests/support/suite.h"

#define BOUND  1000.0 /* ns */
#define ROUNDS 3

static struct run result;

/* The least of several rounds: what disturbs only ever adds. */
static double cost(const char *preload, const char *name)
{
	const char *argv[] = {"bench_calls", NULL}, *env[] = {"SOFTCUDA_NULL_PRODUCTS=1", NULL};
	double least = 1e30;
	for (int i = 0; i < ROUNDS; i++) {
		run(&result, &(struct setting){.preload = preload, .env = env}, argv);
		ck_assert_int_eq(result.status, 0);
		const char *line = strstr(result.out, name);
		ck_assert_ptr_nonnull(line);
		double ns = strtod(line + strlen(name), NULL);
		ck_assert_double_gt(ns, 0.0);
		least = ns < least ? ns : least;
	}
	return least;
}

START_TEST(a_passed_call_costs_little)
{
	static const char *const names[] = {"cublasGemmEx", "cublasLtMatmul"};
	double direct = cost(NULL, names[_i]), passed = cost(SHIM, names[_i]);
	printf("%s: %.0f ns direct, %.0f ns more when passed\n", names[_i], direct,
	       passed - direct);
	ck_assert_uint_gt(calls(&result, _i ? QS_ENTRY_LT_MATMUL : QS_ENTRY_GEMM_EX), 1000000);
	if (!*preload_first()) /* a sanitizer's cost is not ours */
		ck_assert_double_lt(passed - direct, BOUND);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("cost");
	TCase *tcase = tcase_create("cost");
	tcase_set_timeout(tcase, 300);
	tcase_add_checked_fixture(tcase, NULL, remove_scratch);
	tcase_add_loop_test(tcase, a_passed_call_costs_little, 0, 2);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
