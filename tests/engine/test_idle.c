/* A product that measuring chose is given up in use where the device is found to wait for the CPU:
 * which calls are looked at, what the verdict does, and what it does not touch. When it falls is
 * seen in tests/unit/test_idle.c. */
#include "tuning.h"

#include <stdio.h>
#include <string.h>

const struct scene scenes[] = {{"loop", scene_loop}, {NULL, NULL}};

/* ---- tests --------------------------------------------------------------------------------------
 */

#define GAIN ENOUGH "tune.min_gain=0%;default.action="

/* Of the first verdict: the program's own two calls, 32 of ours, and 32 looks at every second one.
 */
#define BEFORE "96"
#define AFTER  95 /* replaced */

/* Microseconds of the device: less is saved than any call takes of the CPU; the same, and the CPU
 * is far ahead; more is saved than any call takes. */
static const struct times little = {.product = 10, .fp8 = 9, .second = 9};
static const struct times slow = {.product = 5000, .fp8 = 4999, .second = 4999};
static const struct times much = {.product = 50000, .fp8 = 1, .second = 1};

static char directory[256], path[300], variable[320];

static void set_up(void)
{
	make_directory(directory);
}

static void tear_down(void)
{
	remove_directory(directory);
}

static const char *const *idle(const char *policy, struct times times)
{
	return with(policy, times, IDLE);
}

static void ck_given_up(int decision)
{
	const struct decision *d = &outcome.decision[decision];
	int found, looks;
	double saved, taken;
	ck_assert_int_gt(outcome.decisions, decision);
	ck_assert_str_eq(d->action, "native");
	ck_assert_str_eq(d->reason, "idle");
	ck_assert_int_eq(sscanf(d->detail,
	                        "the device was idle at %d of %d calls, which save it %lf us and "
	                        "take %lf us of the CPU",
	                        &found, &looks, &saved, &taken),
	                 4);
	ck_assert_int_eq(looks, 32);
	ck_assert_int_gt(found, 24);
	ck_assert_double_eq(saved, 1.0);
	ck_assert_double_gt(taken, saved);
	ck_assert_int_eq(only_counter(&outcome)->action, QS_ACTION_NATIVE);
	ck_assert_int_eq(only_counter(&outcome)->reason, QS_REASON_IDLE);
	ck_assert_uint_eq(total_replaced(&outcome), AFTER);
	ck_assert_uint_eq(total_late(&outcome), 0);
}

static void ck_unharmed(void)
{
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	ck_assert_int_eq((int)printed(&outcome, "failed"), 0);
}

START_TEST(the_program_gets_its_own_product_back)
{
	run_scene(&outcome, SHIMMED, idle(GAIN "auto", little), "loop", WAITING, BEFORE, WAITING,
	          "1", WAITING, "3", NULL);
	ck_unharmed();
	ck_assert_str_eq(outcome.decision[0].action, "fp8");
	ck_assert_int_eq(outcome.decisions, 2);
	ck_given_up(1);
	ck_products("part1", 0, 1, 0);
	ck_products("part2", 3, 0, 0);
}
END_TEST

/* It takes the program's own product where it has none, a measurement that chose it, a device that
 * waits, and a saving that is not large: without one of them nothing is given up. */
static const struct {
	const char *name, *policy, *how;
	const struct times *times;
} kept[] = {
        {"demanded", GAIN "fp8", WAITING, &little},
        {"policy", "tune.host_bound=keep;" GAIN "auto", WAITING, &little},
        {"busy", GAIN "auto", RUNNING, &slow},
        {"large", GAIN "auto", WAITING, &much},
};

START_TEST(a_product_that_pays_stays)
{
	run_scene(&outcome, SHIMMED, idle(kept[_i].policy, *kept[_i].times), "loop", WAITING, "3",
	          kept[_i].how, "97", WAITING, "3", NULL);
	ck_unharmed();
	ck_assert_msg(outcome.decisions == 1, "%s: %s", kept[_i].name, outcome.decision[1].detail);
	ck_assert_str_eq(outcome.decision[0].action, "fp8");
	ck_assert_int_eq(count("part2", "native"), 0);
}
END_TEST

/* A stream that captures must not be asked: it would be the end of the capture. */
START_TEST(captured_products_are_not_looked_at)
{
	run_scene(&outcome, SHIMMED, idle(GAIN "auto", little), "loop", WAITING, "40", CAPTURED,
	          "200", WAITING, "56", WAITING, "1", WAITING, "3", NULL);
	ck_unharmed();
	ck_products("part1", 0, 200, 0);
	ck_products("part3", 0, 1, 0);
	ck_products("part4", 3, 0, 0);
	ck_assert_str_eq(outcome.decision[1].reason, "idle");
}
END_TEST

/* Also one that was measured: its times are then of no account. */
START_TEST(a_pinned_row_is_obeyed)
{
	char set[512];
	FILE *file;
	snprintf(path, sizeof path, "%s/tuned.ini", directory);
	snprintf(set, sizeof set,
	         "tune.budget_ms=60000;tune.file=%s;cache.validity=adjacent;tune.min_gain=0%%",
	         path);
	run_scene(&outcome, SHIMMED, idle(set, little), "loop", WAITING, "3", NULL);
	ck_assert_ptr_nonnull(file = fopen(path, "w"));
	fprintf(file, "[product]\nkey = %s\nmeasured = fp8\n%spinned = yes\naction = fp8\n",
	        outcome.decision[0].key, _i ? "ours_us = 9\nconvert_us = 0\nnative_us = 10\n" : "");
	fclose(file);
	run_scene(&outcome, SHIMMED, idle(set, little), "loop", WAITING, "110", NULL);
	ck_unharmed();
	ck_assert_int_eq(outcome.decisions, 1);
	ck_assert_uint_eq(total_replaced(&outcome), 110);
}
END_TEST

/* The plan that gave it up is the one that an edit and its undoing bring back. */
START_TEST(it_stays_given_up_when_the_policy_comes_back)
{
	snprintf(path, sizeof path, "%s/policy.ini", directory);
	snprintf(variable, sizeof variable, "QSHIM_POLICY=%s", path);
	FILE *file = fopen(path, "w");
	ck_assert_ptr_nonnull(file);
	fputs("[qshim]\nversion = 1\n[default]\naction = auto\n", file);
	fclose(file);
	const char *const env[] = {"SOFTCUDA_PRODUCT_US=10",
	                           "SOFTCUDA_FP8_US=9",
	                           "SOFTCUDA_SECOND_US=9",
	                           "SOFTCUDA_KERNEL_US=0",
	                           "QSHIM_SET=" ENOUGH "tune.min_gain=0%",
	                           IDLE,
	                           variable,
	                           NULL};
	run_scene(&outcome, SHIMMED, env, "loop", WAITING, "97", POLICY, "native", WAITING, "3",
	          POLICY, "auto", WAITING, "3", NULL);
	ck_unharmed();
	ck_given_up(1);
	ck_products("part4", 3, 0, 0);
	ck_assert_str_eq(outcome.decision[2].reason, "rule");
	ck_assert_str_eq(outcome.decision[3].reason, "idle");
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("idle");
	TCase *tcase = tcase_create("idle");
	tcase_set_timeout(tcase, 120);
	tcase_add_checked_fixture(tcase, set_up, tear_down);
	tcase_add_test(tcase, the_program_gets_its_own_product_back);
	tcase_add_loop_test(tcase, a_product_that_pays_stays, 0, (int)(sizeof kept / sizeof *kept));
	tcase_add_test(tcase, captured_products_are_not_looked_at);
	tcase_add_loop_test(tcase, a_pinned_row_is_obeyed, 0, 2);
	tcase_add_test(tcase, it_stays_given_up_when_the_policy_comes_back);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
