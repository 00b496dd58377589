/* Checks of the error of what replaces a product: before it is taken, and in use. The reference is
 * the program's own product, so that what is measured here can be had by hand. */
#include "tuning.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "softcuda/softcuda.h"

static const struct product shapes[] = {
        {.ta = CUBLAS_OP_T, .m = 64, .n = 48, .k = 128},
        {.ta = CUBLAS_OP_T, .m = 64, .n = 280, .k = 128, .pad_d = 8},
        {.tb = CUBLAS_OP_T, .m = 64, .n = 48, .k = 128, .beta = 1.0f, .fp32_out = true},
        {.ta = CUBLAS_OP_T, .m = 64, .n = 280, .k = 128, .beta = 1.0f},
};

static void count_products(int number, const struct work *before, long fp8)
{
	const struct work now = work_done();
	printf("native%d %ld\n", number, now.native - before->native);
	printf("fp8%d %ld\n", number, softcuda_get("products_fp8") - fp8);
}

/* `uses SHAPE CALLS`: one letter a call: r = random numbers, z = B is zero, which leaves no error;
 * a line for what was submitted and one for what came out. */
static int uses(int argc, char **argv)
{
	struct session session;
	struct made made;
	if (argc != 2)
		return 1;
	session_open(&session);
	product_make(&made, &shapes[atoi(argv[0])], 1);
	for (int i = 0; argv[1][i]; i++) {
		const struct work before = work_done();
		const long fp8 = softcuda_get("products_fp8");
		made.p.plant = argv[1][i] == 'z' ? PLANT_ZERO_B : PLANT_NOTHING;
		product_refill(&made, 1);
		call(&made, &session);
		product_fetch(&made);
		count_products(i, &before, fp8);
		printf("hash%d %llu\n", i, (unsigned long long)product_hash(&made) >> 12);
		printf("padding%d %d\n", i, made.padding_untouched);
	}
	return 0;
}

/* Products in a stream that is held: nothing may wait for a check. */
static int held(int argc, char **argv)
{
	struct session session;
	struct made made;
	(void)argc, (void)argv;
	session_open(&session);
	product_make(&made, &shapes[0], 1);
	for (int i = 0; i < 8; i++)
		call(&made, &session);
	must(cudaStreamSynchronize(session.stream), "synchronise");
	product_fetch(&made);
	printf("hash0 %llu\n", (unsigned long long)product_hash(&made) >> 12);
	return 0;
}

static void put_policy(const char *rule)
{
	FILE *file = fopen(getenv("QSHIM_POLICY"), "we");
	must(!file, "policy file");
	fprintf(file,
	        "[qshim]\nversion = 1\n[numerics]\ncheck_every = 1\n[tune]\nbudget_ms = 0\n"
	        "file =\n[default]\naction = fp8\n%s",
	        rule);
	must(fclose(file), "policy file");
}

/* Fails its checks until it is demoted; then the policy allows any error, and after a while the
 * second product, which came with that policy, says that it is known. */
static int edited(int argc, char **argv)
{
	struct session session;
	struct made made[2];
	(void)argc, (void)argv;
	session_open(&session);
	for (int i = 0; i < 2; i++)
		product_make(&made[i], &shapes[i], 1);
	put_policy("min_sqnr = 60\n");
	for (int i = 0; i < 8; i++)
		whole_call(&made[0], &session);
	put_policy("min_sqnr = 0\nformat = e4m3\n");
	for (int i = 0; i < 400; i++) {
		whole_call(&made[0], &session);
		nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
	}
	for (int i = 0; i < 8; i++)
		whole_call(&made[1], &session);
	return verdict();
}

/* `reset CALLS`: as many before the device is reset, so that what the last one's check reports is
 * gone, and as many after. */
static int reset(int argc, char **argv)
{
	(void)argc;
	for (int i = 0; i < 2; i++) {
		struct session session;
		struct made made;
		session_open(&session);
		product_make(&made, &shapes[0], 1);
		const long before = softcuda_get("products");
		for (int j = 0; j < atoi(argv[0]); j++)
			whole_call(&made, &session);
		printf("products%d %ld\n", i, softcuda_get("products") - before);
		must(cudaDeviceReset(), "reset");
	}
	return verdict();
}

const struct scene scenes[] = {{"uses", uses},         {"held", held},   {"edited", edited},
                               {"large", scene_large}, {"reset", reset}, {NULL, NULL}};

/* ---- tests ------------------------------------------------------------------------------------
 */

/* No timing, so that every product is counted by hand. */
#define COLD      "tune.budget_ms=0;tune.file=;cache.validity=adjacent;log.quiet=1;"
#define EVERY_2ND COLD "numerics.check_every=2;"

static const struct times fast = {.product = 1000, .fp8 = 500, .second = 400};

static void run(const char *policy, const char *shape, const char *calls)
{
	run_scene(&outcome, SHIMMED, with(policy, fast, NULL), "uses", shape, calls, NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
}

static long of(const char *what, int number)
{
	char name[32];
	snprintf(name, sizeof name, "%s%d", what, number);
	return (long)printed(&outcome, name);
}

/* The calls that were checked, that is made twice, as a string of x and -. */
static const char *checked(int calls)
{
	static char text[64];
	for (int i = 0; i < calls; i++)
		text[i] = of("native", i) && of("fp8", i) ? 'x' : '-';
	text[calls] = '\0';
	return text;
}

static int warnings(void)
{
	int found = 0;
	for (char *at = outcome.err; (at = strstr(at, "native for the rest of the run")); at++)
		found++;
	return found;
}

static void ck_demoted(bool demoted)
{
	const struct qs_counter *counter = only_counter(&outcome);
	ck_assert_msg(warnings() == demoted, "%s", outcome.err);
	ck_assert_int_eq(counter->reason, demoted ? QS_REASON_SQNR : QS_REASON_RULE);
}

START_TEST(accurate_products_are_checked_now_and_then)
{
	char shape[8];
	snprintf(shape, sizeof shape, "%d", _i);
	run(EVERY_2ND "default.action=fp8", shape, "rrrrrrrr");
	ck_assert_str_eq(checked(8), "-x-x-x-x");
	ck_assert_uint_eq(total_replaced(&outcome), 8);
	ck_demoted(false);
	for (int i = 0; i < 8; i++)
		ck_assert_int_eq(of("padding", i), 1);
}
END_TEST

START_TEST(never_is_never)
{
	run(COLD "numerics.check_every=0;numerics.min_sqnr=60;default.action=fp8", "0", "rrrrrrrr");
	ck_assert_str_eq(checked(8), "--------");
	ck_assert_uint_eq(total_replaced(&outcome), 8);
	ck_demoted(false);
}
END_TEST

/* Checks at calls 1, 3 and 5; the next call knows. From there on the program has its own bits. */
START_TEST(three_failures_in_a_row_demote_a_product)
{
	char shape[8], hash[16];
	double bare;
	snprintf(shape, sizeof shape, "%d", _i);
	run_scene(&outcome, BARE, NULL, "uses", shape, "r", NULL);
	bare = printed(&outcome, "hash0");
	run(EVERY_2ND "numerics.min_sqnr=60;default.action=fp8", shape, "rrrrrrrrrr");
	ck_assert_str_eq(checked(10), "-x-x-x----");
	ck_assert_uint_eq(total_replaced(&outcome), 6);
	ck_demoted(true);
	ck_assert_ptr_nonnull(strstr(outcome.err, "below min_sqnr = 60"));
	for (int i = 0; i < 10; i++) {
		snprintf(hash, sizeof hash, "hash%d", i);
		ck_assert_msg((printed(&outcome, hash) == bare) == (i >= 6), "call %d", i);
	}
}
END_TEST

START_TEST(one_good_check_forgives_two_bad_ones)
{
	run(EVERY_2ND "numerics.min_sqnr=60;default.action=fp8", "0", "rrrrrzrrrrrz");
	ck_assert_str_eq(checked(12), "-x-x-x-x-x-x");
	ck_assert_uint_eq(total_replaced(&outcome), 12);
	ck_demoted(false);
}
END_TEST

START_TEST(check_without_memory_is_said_once)
{
	run(EVERY_2ND "tune.max_mib=1;default.action=fp8", "0", "rrrrrrrr");
	ck_assert_str_eq(checked(8), "--------");
	ck_assert_uint_eq(total_replaced(&outcome), 8);
	ck_assert_int_eq(outcome.decisions, 2);
	ck_assert_int_eq(decisions_for("fp8"), 2);
	ck_assert_int_eq(decisions_with(&outcome, "memory"), 1);
	ck_assert_str_eq(outcome.decision[1].detail, "1 MiB to compare results");
	ck_demoted(false);
}
END_TEST

START_TEST(measured_errors_are_logged)
{
	run(EVERY_2ND "log.level=numerics;default.action=fp8", "0", "rrr");
	ck_assert_msg(strstr(outcome.err, " dB") != NULL, "%s", outcome.err);
	run(EVERY_2ND "default.action=fp8", "0", "rrr");
	ck_assert_str_eq(outcome.err, "");
}
END_TEST

/* One's own precision, whatever the limit. */
START_TEST(bf16_is_neither_checked_nor_demoted)
{
	run(ENOUGH "log.quiet=1;numerics.check_every=2;numerics.min_sqnr=200;default.action=bf16",
	    "0", "rrrrrrrr");
	ck_assert_uint_eq(total_replaced(&outcome), 8);
	for (int i = 1; i < 8; i++)
		ck_assert_int_eq(of("native", i), 0);
	ck_demoted(false);
}
END_TEST

START_TEST(nf4_has_no_limit_unless_its_rule_has_one)
{
	const char *const limit = _i ? "default.min_sqnr=60;" : "";
	char policy[256];
	snprintf(policy, sizeof policy, EVERY_2ND "numerics.min_sqnr=60;%sdefault.action=nf4",
	         limit);
	run(policy, _i / 2 ? "1" : "0", "rrrrrrrrrr");
	ck_assert_uint_eq(total_replaced(&outcome), _i ? 6 : 10);
	ck_demoted(_i);
}
END_TEST

/* The rule's own limit, in place of the policy's, both ways. */
START_TEST(rule_has_its_own_limit)
{
	run(EVERY_2ND "default.min_sqnr=60;default.action=fp8", "0", "rrrrrrrrrr");
	ck_demoted(true);
	run(EVERY_2ND "numerics.min_sqnr=60;default.min_sqnr=20;default.action=fp8", "0",
	    "rrrrrrrrrr");
	ck_demoted(false);
}
END_TEST

/* ---- before it is taken -----------------------------------------------------------------------
 */

#define MEASURED    ENOUGH "log.quiet=1;numerics.check_every=0;"
#define IF_FASTER   "default.strategy=performant;default.action=nf4"
#define NOT_BELOW_5 "default.min_sqnr=5;"

START_TEST(what_is_not_accurate_enough_is_not_taken)
{
	const char *const shape = _i ? "3" : "1";
	double bare;
	run_scene(&outcome, BARE, NULL, "uses", shape, "r", NULL);
	bare = printed(&outcome, "hash0");
	run(MEASURED "default.min_sqnr=60;" IF_FASTER, shape, "rr");
	ck_decision("native", "sqnr");
	ck_assert_ptr_nonnull(strstr(only_decision(&outcome)->detail, " dB, wanted 60"));
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_assert(printed(&outcome, "hash0") == bare && printed(&outcome, "hash1") == bare);
	ck_assert_int_eq(of("padding", 0), 1);
	ck_assert_str_eq(outcome.err, "");
}
END_TEST

START_TEST(nf4_that_there_is_no_memory_to_measure_is_not_taken)
{
	run(MEASURED NOT_BELOW_5 "tune.max_mib=31;" IF_FASTER, "1", "rr");
	ck_decision("native", "memory");
	ck_assert_ptr_nonnull(strstr(only_decision(&outcome)->detail, " MiB to measure with"));
	run(MEASURED NOT_BELOW_5 "tune.max_mib=34;" IF_FASTER, "3", "rr");
	ck_decision("native", "memory");
	ck_assert_str_eq(only_decision(&outcome)->detail, "a result to measure with");
	ck_assert_uint_eq(total_replaced(&outcome), 0);
}
END_TEST

START_TEST(what_is_accurate_enough_is_taken_and_says_its_times)
{
	run(MEASURED NOT_BELOW_5 IF_FASTER, _i ? "3" : "1", "rr");
	ck_decision("nf4", "rule");
	ck_assert_ptr_nonnull(strstr(only_decision(&outcome)->detail, " us, native "));
	ck_assert_uint_eq(total_replaced(&outcome), 2);
}
END_TEST

/* Large enough for `auto` to want fp8, so the emulation only says what it would have computed. */
static const struct {
	const char *error;  /* of fp8: 16 = 16 %, by rows a quarter of that      */
	const char *policy; /* beside action = auto                              */
	const char *action, *reason, *detail; /* of the decision; part of the detail */
	const char *scale;
} measured[] = {
        {"SOFTCUDA_FP8_ERROR=8", "", "fp8", "auto", " us, native ", "tensor"},
        {"SOFTCUDA_FP8_ERROR=8", "default.scale=row;", "fp8", "auto", " us, native ", "row"},
        {"SOFTCUDA_FP8_ERROR=16", "", "fp8", "auto", " us, native ", "row"},
        {"SOFTCUDA_FP8_ERROR=16", "default.scale=tensor;", "native", "sqnr",
         "fp8 15.92 dB, wanted 20", ""},
        {"SOFTCUDA_FP8_ERROR=16", "default.min_sqnr=30;", "native", "sqnr",
         "fp8 by rows 27.96 dB, wanted 30", ""},
        {"SOFTCUDA_FP8_ERROR=100", "", "native", "sqnr", "fp8 by rows 12.04 dB, wanted 20", ""},
        {"SOFTCUDA_FP8_ERROR=100", "default.min_sqnr=0;", "fp8", "auto", " us, native ", "tensor"},
};

#define LARGE_ROWS ((int)(sizeof measured / sizeof *measured))

START_TEST(fp8_is_taken_by_rows_or_not_at_all_if_it_is_not_accurate)
{
	char policy[256];
	snprintf(policy, sizeof policy, MEASURED "%sdefault.action=auto", measured[_i].policy);
	run_scene(&outcome, SHIMMED, with(policy, fast, measured[_i].error), "large", "1", "3",
	          NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	ck_decision(measured[_i].action, measured[_i].reason);
	ck_assert_msg(strstr(only_decision(&outcome)->detail, measured[_i].detail) != NULL, "%s",
	              only_decision(&outcome)->detail);
	ck_assert_str_eq(only_decision(&outcome)->scale, measured[_i].scale);
	ck_assert_uint_eq(total_replaced(&outcome), !strcmp(measured[_i].action, "fp8"));
}
END_TEST

/* Although fp8 has come to be by rows until then. */
START_TEST(the_fastest_algorithm_is_told_without_a_scale)
{
	struct times times = fast;
	times.wide = 300;
	run_scene(&outcome, SHIMMED,
	          with(MEASURED "default.action=auto", times, measured[_i].error), "large", "1",
	          "3", NULL);
	ck_decision("bf16", "auto");
	ck_assert_str_eq(only_decision(&outcome)->scale, "");
}
END_TEST

/* Slower than fp8, which must be accurate to be taken. */
START_TEST(a_faster_algorithm_takes_the_place_of_inaccurate_fp8)
{
	char policy[256];
	struct times times = fast;
	times.wide = 900;
	const bool taken = !strcmp(measured[_i].action, "native");
	snprintf(policy, sizeof policy, MEASURED "%sdefault.action=auto", measured[_i].policy);
	run_scene(&outcome, SHIMMED, with(policy, times, measured[_i].error), "large", "1", "3",
	          NULL);
	ck_decision(taken ? "bf16" : "fp8", "auto");
	ck_assert_str_eq(only_decision(&outcome)->scale, measured[_i].scale);
	if (taken)
		ck_assert_str_eq(only_decision(&outcome)->detail,
		                 "bf16 900.0 us, native 1000.0 us");
	ck_assert_uint_eq(total_replaced(&outcome), 1);
}
END_TEST

/* A demanded action is measured in use only. */
START_TEST(a_demanded_action_is_taken_anyway)
{
	run(MEASURED "default.min_sqnr=60;default.action=nf4", "1", "rr");
	ck_decision("nf4", "rule");
	ck_assert_uint_eq(total_replaced(&outcome), 2);
}
END_TEST

START_TEST(what_could_not_be_measured_is_checked_at_its_first_use)
{
	run(COLD "numerics.check_every=100;default.min_sqnr=60;" IF_FASTER, "1", "rrrr");
	ck_assert_str_eq(checked(4), "x---");
	ck_assert_uint_eq(total_replaced(&outcome), 4);
}
END_TEST

START_TEST(calls_that_follow_each_other_wait_for_no_check)
{
	run_scene(&outcome, SHIMMED,
	          with(COLD "numerics.check_every=1;numerics.min_sqnr=60;default.action=fp8", fast,
	               NULL),
	          "held", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_uint_ge(total_replaced(&outcome), 3);
}
END_TEST

/* Each call is two products, the program's own among them. */
START_TEST(what_was_checked_before_a_reset_is_checked_after_it)
{
	run_scene(&outcome, SHIMMED,
	          with(COLD "numerics.check_every=1;default.action=fp8", fast, NULL), "reset", "8",
	          NULL);
	check_unharmed("reset");
	ck_assert_uint_eq(total_replaced(&outcome), 16);
	ck_assert_int_eq(of("products", 0), 16);
	ck_assert_int_eq(of("products", 1), 16);
}
END_TEST

/* A faster algorithm is what `auto` has found when, for some steps, a rule demands fp8. */
START_TEST(what_demotes_fp8_leaves_bf16_alone)
{
	struct times times = fast;
	times.wide = 300;
	run_scene(&outcome, SHIMMED,
	          with(ENOUGH "log.quiet=1;numerics.check_every=1;rule f.steps=1100..1105;"
	                      "rule f.action=fp8;default.action=auto",
	               times, "SOFTCUDA_FP8_ERROR=16"),
	          "large", "1", "1200", "1100", "1106", NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	ck_assert_int_eq(warnings(), 1);
	ck_assert_int_eq(decisions_with(&outcome, "sqnr"), 1);
	ck_second("call0");
	ck_assert_int_eq(only_counter(&outcome)->action, QS_ACTION_BF16);
	ck_assert_int_eq(only_counter(&outcome)->reason, QS_REASON_AUTO);
}
END_TEST

START_TEST(another_policy_does_not_undo_it)
{
	char folder[256], variable[320];
	make_directory(folder);
	snprintf(variable, sizeof variable, "QSHIM_POLICY=%s/policy.ini", folder);
	const char *const env[] = {variable, "QSHIM_SET=log.quiet=1;cache.validity=adjacent", NULL};
	run_scene(&outcome, SHIMMED, env, "edited", NULL);
	remove_directory(folder);
	check_unharmed("edited");
	ck_assert_int_eq(outcome.counters, 2);
	ck_assert_int_eq(warnings(), 1);
	ck_assert_int_eq(outcome.counter[0].reason, QS_REASON_SQNR);
	ck_assert_uint_eq(outcome.counter[0].replaced, 3);
	ck_assert_int_eq(outcome.counter[1].reason, QS_REASON_RULE);
	ck_assert_uint_eq(outcome.counter[1].replaced, 8);
}
END_TEST

static void add_uses(TCase *tcase)
{
	tcase_add_loop_test(tcase, accurate_products_are_checked_now_and_then, 0, 3);
	tcase_add_test(tcase, never_is_never);
	tcase_add_loop_test(tcase, three_failures_in_a_row_demote_a_product, 0, 3);
	tcase_add_test(tcase, one_good_check_forgives_two_bad_ones);
	tcase_add_test(tcase, check_without_memory_is_said_once);
	tcase_add_test(tcase, measured_errors_are_logged);
	tcase_add_test(tcase, bf16_is_neither_checked_nor_demoted);
	tcase_add_loop_test(tcase, nf4_has_no_limit_unless_its_rule_has_one, 0, 3);
	tcase_add_test(tcase, rule_has_its_own_limit);
	tcase_add_test(tcase, what_demotes_fp8_leaves_bf16_alone);
	tcase_add_test(tcase, another_policy_does_not_undo_it);
	tcase_add_test(tcase, calls_that_follow_each_other_wait_for_no_check);
	tcase_add_test(tcase, what_was_checked_before_a_reset_is_checked_after_it);
}

int main(int argc, char **argv)
{
	Suite *suite = suite_create("accuracy");
	TCase *tcase = tcase_create("error");
	tcase_set_timeout(tcase, 120);
	suite_add_tcase(suite, tcase);
	add_uses(tcase);
	tcase_add_loop_test(tcase, what_is_not_accurate_enough_is_not_taken, 0, 2);
	tcase_add_test(tcase, nf4_that_there_is_no_memory_to_measure_is_not_taken);
	tcase_add_loop_test(tcase, what_is_accurate_enough_is_taken_and_says_its_times, 0, 2);
	tcase_add_loop_test(tcase, fp8_is_taken_by_rows_or_not_at_all_if_it_is_not_accurate, 0,
	                    LARGE_ROWS);
	tcase_add_loop_test(tcase, the_fastest_algorithm_is_told_without_a_scale, 2, 3);
	tcase_add_loop_test(tcase, a_faster_algorithm_takes_the_place_of_inaccurate_fp8, 0,
	                    LARGE_ROWS);
	tcase_add_test(tcase, a_demanded_action_is_taken_anyway);
	tcase_add_test(tcase, what_could_not_be_measured_is_checked_at_its_first_use);
	return engine_main(argc, argv, suite);
}
