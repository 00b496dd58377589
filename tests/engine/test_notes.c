/* What a run leaves and says: one notice, the table at exit, files that outlive SIGKILL, and never
 * a byte on stdout. */
#include "child.h"
#include "product.h"

#include "softcuda/softcuda.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define N_ CUBLAS_OP_N
#define T_ CUBLAS_OP_T

#define FORCE "QSHIM_SET=tune.budget_ms=0;default.action=fp8"

static const struct product shapes[] = {
        {.ta = T_, .m = 64, .n = 24, .k = 96},
        {.ta = N_, .tb = T_, .m = 32, .n = 8, .k = 16},
        {.ta = T_, .m = 60, .n = 24, .k = 96}, /* not eligible: m */
};

/* Each shape is called as often as its number says, from 1. */
static void work(void)
{
	struct session session;
	session_open(&session);
	for (int i = 0; i < 3; i++) {
		struct made made;
		product_make(&made, &shapes[i], 1);
		for (int call = 0; call <= i; call++)
			must((int)product_call(&made, &session), "product");
		product_fetch(&made);
		product_free(&made);
	}
	session_close(&session);
}

static int products(int argc, char **argv)
{
	(void)argc, (void)argv;
	work();
	fputs("only this", stdout);
	return 0;
}

static int endless(int argc, char **argv)
{
	(void)argc, (void)argv;
	work();
	puts("working");
	fflush(stdout);
	pause();
	return 1;
}

static int nothing(int argc, char **argv)
{
	(void)argc, (void)argv;
	return 0;
}

/* A weight that is kept, with few tokens and with many; what the device has less since. */
static int memory(int argc, char **argv)
{
	static const struct product uses[] = {{.ta = T_, .m = 4096, .n = 8, .k = 1024},
	                                      {.ta = T_, .m = 4096, .n = 80, .k = 1024}};
	struct session session;
	struct made made[2];
	(void)argc, (void)argv;
	session_open(&session);
	for (uint64_t i = 0; i < 2; i++)
		product_make(&made[i], &uses[i], i);
	made[1].da = made[0].da;
	const long before = softcuda_get("bytes");
	for (int i = 0; i < 8; i++) {
		must((int)product_call(&made[i % 2], &session), "product");
		must((int)cudaDeviceSynchronize(), "synchronise");
	}
	printf("taken %ld\n", softcuda_get("bytes") - before);
	return 0;
}

const struct scene scenes[] = {
        {"products", products}, {"memory", memory}, {"endless", endless},
        {"nothing", nothing},   {NULL, NULL},
};

static struct outcome outcome;

static const struct qs_counter *counter_of(const char *key)
{
	for (int i = 0; i < outcome.counters; i++)
		if (!strncmp(outcome.counter[i].key, key, strlen(key)))
			return &outcome.counter[i];
	ck_abort_msg("no counter of %s", key);
	return NULL;
}

static const struct decision *decision_of(const char *key)
{
	for (int i = 0; i < outcome.decisions; i++)
		if (!strncmp(outcome.decision[i].key, key, strlen(key)))
			return &outcome.decision[i];
	ck_abort_msg("no decision of %s", key);
	return NULL;
}

static void check_files(void)
{
	ck_assert_int_eq(outcome.logs, 1);
	ck_assert_int_eq(outcome.maps, 1);
	ck_assert_int_eq(outcome.broken, 0);
	ck_assert_int_eq(outcome.decisions, 3);
	ck_assert_str_eq(decision_of("TN m=64 n=24 k=96 bf16")->action, "fp8");
	ck_assert_str_eq(decision_of("TN m=64 n=24 k=96 bf16")->rule, "default");
	ck_assert_str_eq(decision_of("TN m=64 n=24 k=96 bf16")->role, "fwd");
	ck_assert_str_eq(decision_of("NT m=32 n=8 k=16 bf16")->action, "fp8");
	ck_assert_str_eq(decision_of("TN m=60 n=24 k=96 bf16")->reason, "align");
	ck_assert_uint_eq(counter_of("TN m=64 n=24 k=96 bf16")->replaced, 1);
	ck_assert_uint_eq(counter_of("NT m=32 n=8 k=16 bf16")->replaced, 2);
	ck_assert_uint_eq(counter_of("TN m=60 n=24 k=96 bf16")->replaced, 0);
	ck_assert_uint_eq(counter_of("TN m=60 n=24 k=96 bf16")->calls, 3);
	ck_assert_double_eq(counter_of("TN m=60 n=24 k=96 bf16")->flops, 2.0 * 60 * 24 * 96);
}

START_TEST(notice_is_printed_once_and_nothing_else)
{
	static const char *const env[] = {FORCE, NULL};
	run_scene(&outcome, SHIMMED, env, "products", NULL);
	ck_assert_str_eq(
	        outcome.err,
	        "qshim: bf16 products run in fp8 where faster or where the policy says so; "
	        "QSHIM=off disables, QSHIM_QUIET=1 hides this line\n");
	ck_assert_str_eq(outcome.out, "only this");
}
END_TEST

START_TEST(quiet_says_nothing)
{
	static const char *const env[] = {FORCE, "QSHIM_QUIET=1", NULL};
	run_scene(&outcome, SHIMMED, env, "products", NULL);
	ck_assert_str_eq(outcome.err, "");
	ck_assert_uint_eq(total_replaced(&outcome), 3);
}
END_TEST

START_TEST(no_notice_where_nothing_is_replaced)
{
	run_scene(&outcome, SHIMMED, NULL, "products", NULL);
	ck_assert_str_eq(outcome.err, "");
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_assert_int_eq(decisions_with(&outcome, "small"), 2);
}
END_TEST

START_TEST(every_kind_of_message_together_leaves_stdout_alone)
{
	static const char *const env[] = {FORCE, "QSHIM_LOG=all", "QSHIM_SUMMARY=1", "QSHIM_TYPO=1",
	                                  NULL};
	run_scene(&outcome, SHIMMED, env, "products", NULL);
	ck_assert_str_eq(outcome.out, "only this");
	ck_assert_int_eq(outcome.exit, 0);
	for (const char *line = outcome.err; *line; line = strchr(line, '\n') + 1)
		ck_assert_msg(!strncmp(line, "qshim: ", 7), "%s", line);
}
END_TEST

START_TEST(files_tell_every_product)
{
	static const char *const env[] = {FORCE, NULL};
	run_scene(&outcome, SHIMMED, env, "products", NULL);
	check_files();
}
END_TEST

START_TEST(files_are_complete_after_SIGKILL)
{
	static const char *const env[] = {FORCE, NULL};
	run_scene_and_kill(&outcome, env, "endless");
	ck_assert_int_eq(outcome.exit, -9);
	check_files();
}
END_TEST

START_TEST(program_without_products_leaves_nothing)
{
	static const char *const env[] = {FORCE, "QSHIM_LOG=all", NULL};
	run_scene(&outcome, SHIMMED, env, "nothing", NULL);
	ck_assert_str_eq(outcome.err, "");
	ck_assert_str_eq(outcome.out, "");
	ck_assert_int_eq(outcome.logs + outcome.maps, 0);
}
END_TEST

/* The line of the table for a key. */
static const char *table_line(const char *key)
{
	static char line[512];
	for (const char *p = outcome.err; *p; p = strchr(p, '\n') + 1) {
		snprintf(line, sizeof line, "%.*s", (int)strcspn(p, "\n"), p);
		if (strstr(line, key))
			return line;
	}
	ck_abort_msg("no line for %s in %s", key, outcome.err);
	return NULL;
}

START_TEST(summary_lists_shape_calls_action_reason_and_bytes)
{
	static const char *const env[] = {FORCE, "QSHIM_SUMMARY=1", "QSHIM_QUIET=1", NULL};
	unsigned long long calls = 0, replaced = 0, late = 9;
	double share = 0, mib = -1;
	char action[16] = "", why[32] = "", name[32] = "";
	run_scene(&outcome, SHIMMED, env, "products", NULL);
	ck_assert_ptr_nonnull(strstr(outcome.err, "6 products seen by "));
	ck_assert_ptr_nonnull(strstr(outcome.err, ", 3 replaced ("));
	int fields = sscanf(table_line("NT m=32 n=8 k=16"),
	                    "qshim: %lf %llu %llu %llu %lf %15s %31s %31s", &share, &calls,
	                    &replaced, &late, &mib, action, why, name);
	ck_assert_int_eq(fields, 8);
	ck_assert_uint_eq(calls, 2);
	ck_assert_uint_eq(replaced, 2);
	ck_assert_uint_eq(late, 0);
	ck_assert_str_eq(action, "fp8");
	ck_assert_str_eq(why, "rule");
	ck_assert_str_eq(name, "default");
	ck_assert_ptr_nonnull(strstr(table_line("TN m=60 n=24 k=96"), " align "));
	ck_assert_ptr_nonnull(strstr(table_line("TN m=60 n=24 k=96"), " native "));
}
END_TEST

/* By form, and all of it, as the device has it. */
START_TEST(summary_tells_all_memory_that_is_ours)
{
	static const char *const actions[] = {"nf4", "fp8"};
	char set[128];
	double all = -1, kept = -1, rest = -1;
	snprintf(set, sizeof set,
	         "QSHIM_SET=tune.budget_ms=0;default.action=%s;cache.validity=verified",
	         actions[_i]);
	const char *const env[] = {set, "SOFTCUDA_IDLE_PRODUCTS=1", "QSHIM_SUMMARY=1",
	                           "QSHIM_QUIET=1", NULL};
	run_scene(&outcome, SHIMMED, env, "memory", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_int_eq(sscanf(table_line(" of device memory "),
	                        "qshim: %lf MiB of device memory beside the program's own: %lf MiB "
	                        "of kept weights, %lf MiB to work in",
	                        &all, &kept, &rest),
	                 3);
	ck_assert_double_eq_tol(all, printed(&outcome, "taken") / (1 << 20), 0.051);
	ck_assert_double_eq_tol(all, kept + rest, 0.11);
	ck_assert_double_gt(kept, _i ? 7.9 : 2); /* of 8 MiB in bf16 */
	ck_assert_double_gt(rest, 1);
}
END_TEST

START_TEST(summary_can_be_switched_off)
{
	static const char *const env[] = {FORCE, "QSHIM_SUMMARY=0", "QSHIM_QUIET=1", NULL};
	run_scene(&outcome, SHIMMED, env, "products", NULL);
	ck_assert_str_eq(outcome.err, "");
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("notes");
	TCase *tcase = tcase_create("notes");
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, notice_is_printed_once_and_nothing_else);
	tcase_add_test(tcase, quiet_says_nothing);
	tcase_add_test(tcase, no_notice_where_nothing_is_replaced);
	tcase_add_test(tcase, every_kind_of_message_together_leaves_stdout_alone);
	tcase_add_test(tcase, files_tell_every_product);
	tcase_add_test(tcase, files_are_complete_after_SIGKILL);
	tcase_add_test(tcase, program_without_products_leaves_nothing);
	tcase_add_test(tcase, summary_lists_shape_calls_action_reason_and_bytes);
	tcase_add_loop_test(tcase, summary_tells_all_memory_that_is_ours, 0, 2);
	tcase_add_test(tcase, summary_can_be_switched_off);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
