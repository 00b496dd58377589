/* Which algorithm serves a product, and whether an engine is taken at all, by the times that the
 * emulation is told; and that timing leaves the results as they are. */
#include "tuning.h"

#include <stdio.h>
#include <string.h>

#include "softcuda/softcuda.h"

/* The second algorithm is faster for the even ones of four keys; then all of them again. */
static int different_keys(int argc, char **argv)
{
	struct session session;
	struct made made[4];
	(void)argc, (void)argv;
	session_open(&session);
	for (int i = 0; i < 4; i++) {
		const struct product p = shape(i);
		product_make(&made[i], &p, (uint64_t)i);
	}
	for (int i = 0; i < 8; i++) {
		softcuda_set("second_us", i % 2 ? 2000 : 800);
		watched_call(&made[i % 4], &session, i);
	}
	return verdict();
}

const struct scene scenes[] = {
        {"calls", scene_calls},
        {"large", scene_large},
        {"different_keys", different_keys},
        {NULL, NULL},
};

/* ---- which algorithm ------------------------------------------------------------------------ */

START_TEST(faster_algorithm_is_used_and_not_timed_again)
{
	const char *const policy[] = {BF16, FP8}, *const action[] = {"bf16", "fp8"};
	const char *const again[] = {"call1", "call2"};
	run_scene(&outcome, SHIMMED, with(policy[_i], second_faster, NULL), "calls", "0", "3",
	          NULL);
	check_unharmed(action[_i]);
	ck_decision(action[_i], "rule");
	ck_assert_uint_eq(total_replaced(&outcome), 3);
	ck_timed("call0");
	ck_assert_int_eq(count("call0", "heuristics"), 2); /* with workspace and without */
	for (int i = 0; i < 2; i++) {
		ck_second(again[i]);
		ck_assert_int_eq(count(again[i], "heuristics"), 0);
		ck_assert_int_eq(count(again[i], "allocations"), 0);
	}
}
END_TEST

START_TEST(first_algorithm_is_left_for_one_that_is_1_percent_faster)
{
	const struct times same = {.product = 1, .fp8 = 1000, .second = 1000};
	const struct times little = {.product = 1, .fp8 = 1000, .second = 995};
	const struct times enough = {.product = 1, .fp8 = 1000, .second = 985};
	run_scene(&outcome, SHIMMED, with(FP8, same, NULL), "calls", "0", "2", NULL);
	ck_first("call1");
	run_scene(&outcome, SHIMMED, with(FP8, little, NULL), "calls", "0", "2", NULL);
	ck_first("call1");
	run_scene(&outcome, SHIMMED, with(FP8, enough, NULL), "calls", "0", "2", NULL);
	ck_second("call1");
}
END_TEST

/* Native is timed to the end. */
START_TEST(algorithm_that_is_far_slower_is_timed_twice)
{
	const struct times times[] = {{.product = 3000, .fp8 = 2000, .second = 1000},
	                              {.product = 3000, .fp8 = 1000, .second = 2000}};
	const char *const slow[] = {"first", "second"};
	run_scene(&outcome, SHIMMED, with(FP8, times[_i], NULL), "calls", "0", "1", NULL);
	check_unharmed(slow[_i]);
	ck_assert_int_eq(count("call0", slow[_i]), 2);
	ck_assert_int_gt(count("call0", slow[!_i]), 3);
	ck_assert_int_gt(count("call0", "native"), 2);
}
END_TEST

/* The native product of the second round, which is the first one that counts, takes ten times its
 * time: products 1, 2 and 3 are those of the first round. */
START_TEST(one_disturbed_measurement_decides_nothing)
{
	const struct times times = {.product = 1000, .second = 980};
	run_scene(&outcome, SHIMMED, with(BF16, times, NULL), "calls", "0", "1", "slow_product",
	          "6", NULL);
	check_unharmed("slow_product");
	ck_decision("native", "not-faster");
	ck_assert_str_eq(only_decision(&outcome)->detail, "bf16 980.0 us, native 1000.0 us");
}
END_TEST

/* The second algorithm, which is the fastest, takes ten times its time in the first round, as one
 * does whose kernel is loaded by it, or in the second. */
START_TEST(one_slow_run_does_not_rule_an_algorithm_out)
{
	const char *const product[] = {"2", "5"};
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "calls", "0", "2",
	          "slow_product", product[_i], NULL);
	check_unharmed("slow_product");
	ck_decision("bf16", "rule");
	ck_second("call1");
}
END_TEST

START_TEST(each_key_gets_its_own_algorithm)
{
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "different_keys", NULL);
	check_unharmed("different_keys");
	ck_assert_int_eq(outcome.decisions, 4);
	ck_assert_int_eq(decisions_for("bf16"), 2);
	ck_assert_int_eq(decisions_with(&outcome, "not-faster"), 2);
	ck_second("call4");
	ck_native("call5");
	ck_second("call6");
	ck_native("call7");
}
END_TEST

/* ---- whether at all ------------------------------------------------------------------------- */

/* bf16: the second algorithm against the program's own call at 1000 us. */
static const struct {
	const char *gain;
	long second;
	bool taken;
} gains[] = {
        {"0%", 1000, false}, {"0%", 972, true},   {"3%", 1000, false}, {"3%", 972, false},
        {"3%", 970, true},   {"50%", 700, false}, {"50%", 600, true},
};

#define GAINS ((int)(sizeof gains / sizeof *gains))

START_TEST(bf16_is_taken_where_it_wins_by_min_gain)
{
	char policy[96];
	const struct times times = {.product = 1000, .second = gains[_i].second};
	snprintf(policy, sizeof policy, BF16 ";tune.min_gain=%s", gains[_i].gain);
	run_scene(&outcome, SHIMMED, with(policy, times, NULL), "calls", "0", "2", NULL);
	check_unharmed(gains[_i].gain);
	ck_decision(gains[_i].taken ? "bf16" : "native", gains[_i].taken ? "rule" : "not-faster");
	ck_assert_uint_eq(total_replaced(&outcome), gains[_i].taken ? 2 : 0);
	if (!gains[_i].taken)
		ck_native("call1");
	else if (gains[_i].second == 1000)
		ck_first("call1");
	else
		ck_second("call1");
}
END_TEST

/* fp8 takes 500 us and the two kernels of the conversion what is given. */
static const struct {
	const char *gain;
	long kernel, native;
	bool taken;
	const char *detail;
} wins[] = {
        {"3%", 100, 720, false, "fp8 500.0 + 200.0 us, native 720.0 us"},
        {"3%", 100, 722, true, "fp8 500.0 + 200.0 us, native 722.0 us"},
        {"0%", 100, 701, true, "fp8 500.0 + 200.0 us, native 701.0 us"},
        {"0%", 100, 699, false, "fp8 500.0 + 200.0 us, native 699.0 us"},
        {"50%", 10, 779, false, "fp8 500.0 + 20.0 us, native 779.0 us"},
        {"50%", 10, 781, true, "fp8 500.0 + 20.0 us, native 781.0 us"},
};

#define WINS ((int)(sizeof wins / sizeof *wins))

static void run_large(const char *policy, int row, const char *uses)
{
	char with_gain[128];
	const struct times times = {
	        .product = wins[row].native, .fp8 = 500, .second = 500, .kernel = wins[row].kernel};
	snprintf(with_gain, sizeof with_gain, "%s;tune.min_gain=%s", policy, wins[row].gain);
	run_scene(&outcome, SHIMMED, with(with_gain, times, IDLE), "large", "1", uses, NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	ck_assert(printed(&outcome, "failed") == 0);
	ck_assert_str_eq(only_decision(&outcome)->detail, wins[row].detail);
	ck_timed("call0");
}

START_TEST(auto_takes_fp8_where_it_wins_with_the_conversion)
{
	run_large(AUTO, _i, "3");
	ck_decision(wins[_i].taken ? "fp8" : "native", wins[_i].taken ? "auto" : "not-faster");
	ck_assert_uint_eq(total_replaced(&outcome), wins[_i].taken);
}
END_TEST

/* Of 1000 us, fp8 takes what is given and 200 for the conversion. */
static const struct {
	long fp8, bf16;
	const char *action, *detail;
} rivals[] = {
        {500, 690, "bf16", "bf16 690.0 us, native 1000.0 us"},
        {500, 700, "fp8", "fp8 500.0 + 200.0 us, native 1000.0 us"},
        {900, 900, "bf16", "bf16 900.0 us, native 1000.0 us"},
        {900, 980, "native", "fp8 900.0 + 200.0 us, native 1000.0 us"},
};

/* What is in bf16 is not checked, whatever the policy says of errors. */
START_TEST(auto_takes_the_faster_of_fp8_and_bf16)
{
	const struct times times = {.product = 1000,
	                            .fp8 = rivals[_i].fp8,
	                            .second = rivals[_i].fp8,
	                            .kernel = 100,
	                            .wide = rivals[_i].bf16};
	const bool bf16 = !strcmp(rivals[_i].action, "bf16");
	run_scene(&outcome, SHIMMED, with(AUTO ";numerics.check_every=2", times, IDLE), "large",
	          "1", "4", NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	ck_decision(rivals[_i].action, strcmp(rivals[_i].action, "native") ? "auto" : "not-faster");
	ck_assert_str_eq(only_decision(&outcome)->detail, rivals[_i].detail);
	ck_assert_int_eq(only_counter(&outcome)->action, bf16 ? QS_ACTION_BF16
	                                                 : *rivals[_i].action == 'f'
	                                                         ? QS_ACTION_FP8
	                                                         : QS_ACTION_NATIVE);
	ck_assert_uint_eq(total_replaced(&outcome), *rivals[_i].action == 'n' ? 0 : 2);
	if (bf16)
		ck_second("call0");
	ck_assert_int_eq(strstr(outcome.err, "fp8") != NULL, *rivals[_i].action == 'f');
}
END_TEST

START_TEST(performant_rule_yields_to_the_measurement)
{
	run_large(FP8 ";default.strategy=performant", _i, "1");
	ck_decision(wins[_i].taken ? "fp8" : "native", wins[_i].taken ? "rule" : "not-faster");
	ck_assert_uint_eq(total_replaced(&outcome), wins[_i].taken);
}
END_TEST

START_TEST(eager_rule_takes_fp8_anyway)
{
	ck_assert(!wins[0].taken);
	run_large(FP8, 0, "1");
	ck_decision("fp8", "rule");
	ck_assert_uint_eq(total_replaced(&outcome), 1);
}
END_TEST

/* ---- what the program gets ------------------------------------------------------------------ */

/* In place with beta = 1, a trial into D would be one sum too many. */
START_TEST(tuned_bf16_product_is_the_programs_bit_for_bit)
{
	char row[8];
	double bare[2];
	snprintf(row, sizeof row, "%d", _i);
	run_scene(&outcome, BARE, NULL, "calls", row, "2", NULL);
	bare[0] = printed(&outcome, "hash0");
	bare[1] = printed(&outcome, "hash1");
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "calls", row, "2", NULL);
	check_unharmed(rows[_i].name);
	ck_decision("bf16", "rule");
	ck_timed("call0");
	ck_assert_msg(printed(&outcome, "hash0") == bare[0], "%s, tuning", rows[_i].name);
	ck_assert_msg(printed(&outcome, "hash1") == bare[1], "%s, tuned", rows[_i].name);
}
END_TEST

START_TEST(declined_product_is_the_programs_bit_for_bit)
{
	char row[8];
	snprintf(row, sizeof row, "%d", _i);
	run_scene(&outcome, BARE, NULL, "calls", row, "1", NULL);
	double bare = printed(&outcome, "hash0");
	run_scene(&outcome, SHIMMED, with(BF16, second_slower, NULL), "calls", row, "1", NULL);
	check_unharmed(rows[_i].name);
	ck_decision("native", "not-faster");
	ck_timed("call0");
	ck_assert_msg(printed(&outcome, "hash0") == bare, "%s", rows[_i].name);
}
END_TEST

START_TEST(tuned_fp8_product_is_right)
{
	char row[8];
	snprintf(row, sizeof row, "%d", _i);
	run_scene(&outcome, SHIMMED, with(FP8, second_faster, NULL), "calls", row, "2", NULL);
	check_unharmed(rows[_i].name);
	ck_decision("fp8", "rule");
	ck_timed("call0");
	ck_second("call1");
	ck_assert_double_lt(printed(&outcome, "worst"), 45.0);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("tuning");
	TCase *tcase = tcase_create("choice");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, faster_algorithm_is_used_and_not_timed_again, 0, 2);
	tcase_add_test(tcase, first_algorithm_is_left_for_one_that_is_1_percent_faster);
	tcase_add_loop_test(tcase, algorithm_that_is_far_slower_is_timed_twice, 0, 2);
	tcase_add_test(tcase, one_disturbed_measurement_decides_nothing);
	tcase_add_loop_test(tcase, one_slow_run_does_not_rule_an_algorithm_out, 0, 2);
	tcase_add_test(tcase, each_key_gets_its_own_algorithm);
	tcase_add_loop_test(tcase, bf16_is_taken_where_it_wins_by_min_gain, 0, GAINS);
	tcase_add_loop_test(tcase, auto_takes_fp8_where_it_wins_with_the_conversion, 0, WINS);
	tcase_add_loop_test(tcase, auto_takes_the_faster_of_fp8_and_bf16, 0,
	                    (int)(sizeof rivals / sizeof *rivals));
	tcase_add_loop_test(tcase, performant_rule_yields_to_the_measurement, 0, 2);
	tcase_add_test(tcase, eager_rule_takes_fp8_anyway);
	tcase_add_loop_test(tcase, tuned_bf16_product_is_the_programs_bit_for_bit, 0, ROWS);
	tcase_add_loop_test(tcase, declined_product_is_the_programs_bit_for_bit, 0, ROWS);
	tcase_add_loop_test(tcase, tuned_fp8_product_is_right, 0, ROWS);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
