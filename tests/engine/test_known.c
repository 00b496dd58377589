/* What a run measured, in the runs after it: nothing is timed again and the same is decided, unless
 * the machine, the file or the policy says otherwise. */
#define _GNU_SOURCE
#include "tuning.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softcuda/softcuda.h"

/* `many COUNT`: a weight and more tokens than a kernel of ours multiplies. */
static int many(int argc, char **argv)
{
	const struct product p = {.ta = CUBLAS_OP_T, .m = 64, .n = 280, .k = 128};
	struct session session;
	struct made made;
	session_open(&session);
	product_make(&made, &p, 1);
	for (int i = 0; argc == 1 && i < atoi(argv[0]); i++) {
		const struct work before = work_done();
		call(&made, &session);
		must(cudaDeviceSynchronize(), "synchronize");
		print_work("call", i, &before);
	}
	return verdict();
}

/* New products for longer than anybody waits, and a line after the third one. */
static int endless(int argc, char **argv)
{
	struct session session;
	(void)argc, (void)argv;
	session_open(&session);
	for (int i = 0; i < 100000; i++) {
		const struct product p = shape(i);
		struct made made;
		product_make(&made, &p, 1);
		whole_call(&made, &session);
		product_free(&made);
		if (i == 3) {
			puts("going");
			fflush(stdout);
		}
	}
	return verdict();
}

const struct scene scenes[] = {
        {"calls", scene_calls}, {"large", scene_large}, {"many", many},
        {"endless", endless},   {NULL, NULL},
};

/* ---- the file -------------------------------------------------------------------------------- */

static char directory[256], path[300], text[65536];

static void set_up(void)
{
	make_directory(directory);
	snprintf(path, sizeof path, "%s/tuned.ini", directory);
}

static void tear_down(void)
{
	remove_directory(directory);
}

/* The file's text; "" if there is none. */
static char *content(void)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t length = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
	ck_assert_int_ge(length, 0);
	text[length] = '\0';
	if (fd >= 0)
		close(fd);
	return text;
}

static void write_file(const char *all)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(write(fd, all, strlen(all)), (ssize_t)strlen(all));
	close(fd);
}

static int rows_in_file(void)
{
	int found = 0;
	for (char *at = content(); (at = strstr(at, "\n[product]\n")); at++)
		found++;
	return found;
}

/* Gives the lines of this name another value in every row; NULL = takes them out. */
static void edit(const char *name, const char *value)
{
	static char all[2 * sizeof text];
	size_t used = 0, length = strlen(name);
	bool met = false;
	for (char *line = content(), *end; *line; line = end + 1) {
		end = strchr(line, '\n');
		ck_assert_ptr_nonnull(end);
		const bool here = !strncmp(line, name, length) && line[length] == ' ';
		met |= here;
		if (here && value)
			used += (size_t)sprintf(all + used, "%s = %s\n", name, value);
		else if (!here)
			used += (size_t)sprintf(all + used, "%.*s\n", (int)(end - line), line);
	}
	ck_assert_msg(met, "no line of %s", name);
	write_file(all);
}

/* ---- runs ------------------------------------------------------------------------------------ */

#define KEEPING    "log.quiet=1;tune.budget_ms=60000;cache.validity=adjacent;tune.file="
#define KEEP(more) more ";" KEEPING

enum program {
	SMALL, /* a product that the size model leaves alone, for rules */
	LARGE, /* one that it wants in fp8                              */
	TOKENS,
};

/* What is known is used at once, what is not at the third use. */
static const char *uses(void)
{
	return *content() ? "1" : "3";
}

/* Runs the product of a program, or both of them; a policy ends with the beginning of the file's
 * name. */
static void run(enum program program, const char *policy, struct times times)
{
	char set[512];
	snprintf(set, sizeof set, "%s%s", policy, path);
	if (program == SMALL)
		run_scene(&outcome, SHIMMED, with(set, times, NULL), "calls", "0", "2", NULL);
	else if (program == TOKENS)
		run_scene(&outcome, SHIMMED, with(set, times, IDLE), "many", "2", NULL);
	else
		run_scene(&outcome, SHIMMED, with(set, times, IDLE), "large", "2", uses(), NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	if (program == SMALL)
		check_unharmed(policy);
}

static const struct {
	const char *name;
	enum program program;
	const char *policy;
	struct times times;
	const char *action;
	int rows; /* in the file: times of each product, and again with its error */
} runs[] = {
        {"bf16", SMALL, KEEP("default.action=bf16"), {1000, 1000, 800, 0, 0}, "bf16", 1},
        {"bf16 slower", SMALL, KEEP("default.action=bf16"), {1000, 1000, 990, 0, 0}, "native", 1},
        {"bf16 exact", SMALL, KEEP("default.action=bf16"), {1030, 0, 1000, 0, 0}, "bf16", 1},
        {"fp8", SMALL, KEEP("default.action=fp8"), {1000, 1000, 800, 0, 0}, "fp8", 1},
        {"fp8 anyway", SMALL, KEEP("default.action=fp8"), {500, 1000, 800, 0, 0}, "fp8", 1},
        {"auto", LARGE, KEEP("default.action=auto"), {900, 500, 400, 100, 0}, "fp8", 6},
        {"auto slower", LARGE, KEEP("default.action=auto"), {600, 500, 400, 100, 0}, "native", 4},
        {"auto in bf16", LARGE, KEEP("default.action=auto"), {900, 500, 400, 100, 550}, "bf16", 6},
        {"nf4", TOKENS, KEEP("default.action=nf4"), {1000, 500, 400, 100, 0}, "nf4", 1},
        {"nf4 if faster",
         TOKENS,
         KEEP("default.action=nf4;default.strategy=performant"),
         {600, 500, 450, 100, 0},
         "native",
         1},
};

#define RUNS ((int)(sizeof runs / sizeof *runs))

static void run_row(int row)
{
	run(runs[row].program, runs[row].policy, runs[row].times);
}

/* The keys that a run met, with what was decided and why. */
static void decided(char all[4096])
{
	size_t used = 0;
	*all = '\0';
	for (int i = 0; i < outcome.decisions; i++) {
		const struct decision *d = &outcome.decision[i];
		used += (size_t)snprintf(all + used, 4096 - used, "%s: %s %s %s\n", d->key,
		                         d->action, d->reason, d->detail);
	}
}

START_TEST(a_second_run_times_nothing_and_decides_the_same)
{
	static char first[4096], second[4096];
	const char *action = runs[_i].action;
	run_row(_i);
	ck_timed("call0");
	ck_assert_str_eq(outcome.decision[0].action, action);
	decided(first);
	const int rows_then = rows_in_file();
	ck_assert_int_eq(rows_then, runs[_i].rows);
	ck_assert_str_eq(outcome.err, "");
	ck_assert_ptr_nonnull(strstr(text, "\ngpu = softcuda"));
	ck_assert_ptr_nonnull(strstr(text, "\ndriver = 1"));
	run_row(_i);
	decided(second);
	ck_assert_str_eq(first, second);
	if (strcmp(action, "native"))
		ck_second("call0");
	else
		ck_native("call0");
	ck_assert_int_eq(rows_in_file(), rows_then);
	ck_assert_str_eq(outcome.err, "");
}
END_TEST

START_TEST(what_is_known_needs_no_budget)
{
	char set[512];
	run_row(0);
	snprintf(set, sizeof set, "tune.budget_ms=0;default.action=bf16;tune.file=%s", path);
	run_scene(&outcome, SHIMMED, with(set, second_faster, NULL), "calls", "0", "1", NULL);
	ck_decision("bf16", "rule");
	ck_second("call0");
}
END_TEST

START_TEST(known_times_are_judged_by_the_policy_of_the_day)
{
	run_row(0); /* 25 % */
	run(SMALL, KEEP("default.action=bf16;tune.min_gain=30%"), second_faster);
	ck_decision("native", "not-faster");
	ck_native("call0");
	run(SMALL, KEEP("default.action=bf16;tune.min_gain=20%"), second_faster);
	ck_decision("bf16", "rule");
	ck_second("call0");
	ck_assert_int_eq(rows_in_file(), 1);
}
END_TEST

/* Of the same product, but measured as something else. */
START_TEST(each_candidate_is_measured_for_itself)
{
	run_row(0);
	run(SMALL, KEEP("default.action=fp8"), second_faster);
	ck_timed("call0");
	run(SMALL, KEEP("default.action=fp8;default.format=e4m3"), second_faster);
	ck_timed("call0");
	run(SMALL, KEEP("default.action=fp8;default.scale=row"), second_faster);
	ck_timed("call0");
	run(SMALL, KEEP("default.action=bf16;default.format=e4m3"), second_faster);
	ck_second("call0"); /* which has neither */
	ck_assert_int_eq(rows_in_file(), 4);
}
END_TEST

static const char *const places[][2] = {{"gpu", "GPU"},
                                        {"driver", "driver"},
                                        {"cublaslt", "cuBLASLt"},
                                        {"qshim", "qshim"},
                                        {"numerics", "[numerics]"}};

START_TEST(what_another_machine_measured_is_measured_again)
{
	char message[128];
	run_row(0);
	ck_assert_int_eq(rows_in_file(), 1);
	edit(places[_i][0], "another");
	run_row(0);
	ck_timed("call0");
	snprintf(message, sizeof message, ": rows of another %s (another, here ", places[_i][1]);
	ck_assert_msg(strstr(outcome.err, message), "%s", outcome.err);
	ck_assert_ptr_eq(strchr(outcome.err, '\n'), strrchr(outcome.err, '\n'));
	ck_assert_int_eq(rows_in_file(), 2);
	run_row(0);
	ck_second("call0");
	ck_assert_str_eq(outcome.err, "");
}
END_TEST

START_TEST(an_algorithm_that_is_not_offered_is_chosen_anew)
{
	run_row(0);
	edit("algorithm", "0123456789abcdef");
	run_row(0);
	ck_timed("call0");
	ck_second("call1");
	run_row(0);
	ck_second("call0");
}
END_TEST

/* Nothing but what was measured can be judged. */
START_TEST(a_row_without_times_is_measured_anew)
{
	run_row(0);
	edit(_i ? "native_us" : "ours_us", "0");
	run_row(0);
	ck_timed("call0");
	ck_decision("bf16", "rule");
	ck_second("call1");
}
END_TEST

/* Which a pin makes an order. */
START_TEST(a_row_says_what_was_faster)
{
	static const char *const faster[] = {"bf16", "native", "bf16", "fp8", "native"};
	char line[32];
	run_row(_i);
	ck_assert_int_eq(rows_in_file(), 1);
	snprintf(line, sizeof line, "\naction = %s\n", faster[_i]);
	ck_assert_msg(strstr(text, line), "%s: %s", runs[_i].name, text);
}
END_TEST

START_TEST(a_row_has_the_tokens_of_a_product_with_a_role)
{
	char set[512];
	run_row(0);
	ck_assert_ptr_nonnull(strstr(content(), "\ntokens = 48\n"));
	write_file("");
	snprintf(set, sizeof set, KEEP("default.action=bf16") "%s", path);
	run_scene(&outcome, SHIMMED, with(set, second_faster, NULL), "calls", "2", "1", NULL);
	ck_timed("call0");
	ck_assert_ptr_nonnull(strstr(content(), "\nkey = NN m=64 n=48 k=128 "));
	ck_assert_ptr_null(strstr(text, "\ntokens"));
}
END_TEST

/* ---- pins ------------------------------------------------------------------------------------ */

static void pin(const char *action, const char *measured)
{
	char row[512];
	snprintf(row, sizeof row, "[product]\nkey = %s\nmeasured = %s\npinned = yes\naction = %s\n",
	         outcome.decision[0].key, measured, action);
	write_file(row);
}

START_TEST(a_pin_to_native_keeps_what_is_faster_away)
{
	run_row(_i);
	ck_assert_str_ne(outcome.decision[0].action, "native");
	pin("native", runs[_i].action);
	run_row(_i);
	ck_assert_str_eq(outcome.decision[0].action, "native");
	ck_assert_str_eq(outcome.decision[0].reason, "tuned");
	ck_assert_str_eq(outcome.decision[0].detail, "pinned in the tuned file");
	ck_native("call0");
	ck_assert_str_eq(outcome.err, "");
}
END_TEST

START_TEST(a_pin_to_an_action_takes_what_is_slower)
{
	run_row(_i);
	ck_assert_str_eq(outcome.decision[0].action, "native");
	const char *action = runs[_i].program == LARGE ? "fp8" : "bf16";
	pin(action, action);
	run_row(_i);
	ck_assert_str_eq(outcome.decision[0].action, action);
	ck_first("call0"); /* the pin names no algorithm */
}
END_TEST

START_TEST(a_pinned_algorithm_is_used)
{
	run_row(0);
	edit("driver", "another\npinned = yes");
	if (_i)
		edit("ours_us", "0");
	run_row(0);
	ck_decision("bf16", "rule");
	ck_second("call0");
	ck_assert_str_eq(outcome.err, "");
}
END_TEST

/* A rule that names its action asks nobody. */
START_TEST(a_pin_does_not_overrule_a_rule)
{
	run_row(3);
	pin("native", "fp8");
	run_row(3);
	ck_decision("fp8", "rule");
	ck_assert_str_eq(only_decision(&outcome)->detail, "");
	ck_first("call0");
}
END_TEST

/* ---- files that are not there -----------------------------------------------------------------
 */

START_TEST(without_a_file_nothing_is_kept_or_said)
{
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "calls", "0", "1", NULL);
	ck_timed("call0");
	ck_assert_str_eq(outcome.err, "");
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "calls", "0", "1", NULL);
	ck_timed("call0");
}
END_TEST

START_TEST(without_a_home_that_is_said_once_it_matters)
{
	const char *const nothing = "tune.budget_ms=0;default.action=fp8";
	const char *const something = "tune.budget_ms=60000;default.action=auto";
	run_scene(&outcome, SHIMMED, with(nothing, second_faster, NULL), "calls", "0", "1", NULL);
	ck_assert_ptr_null(strstr(outcome.err, "HOME"));
	run_scene(&outcome, SHIMMED, with(something, runs[5].times, IDLE), "large", "2", "3", NULL);
	const char *said = strstr(outcome.err, "HOME is not set (what is measured is not kept)");
	ck_assert_msg(said && !strstr(said + 1, "HOME"), "%s", outcome.err);
	ck_assert_int_eq(decisions_for("fp8"), 2);
}
END_TEST

START_TEST(a_process_killed_while_it_measures_leaves_a_good_file)
{
	char set[512];
	for (int i = 0; i < 5; i++) {
		snprintf(set, sizeof set, "default.action=bf16;" KEEPING "%s", path);
		run_scene_and_kill(&outcome, with(set, second_faster, NULL), "endless");
		ck_assert_int_eq(outcome.exit, -9);
	}
	ck_assert_int_ge(rows_in_file(), 4);
	run_row(0);
	run_row(0);
	ck_second("call0");
	ck_assert_str_eq(outcome.err, "");
}
END_TEST

/* ---- errors ---------------------------------------------------------------------------------- */

static void run_one_large_with(const char *policy, const char *knob, const char *count)
{
	char set[512];
	const struct times times = {900, 500, 400, 100, 0};
	snprintf(set, sizeof set, "%s;" KEEPING "%s", policy, path);
	run_scene(&outcome, SHIMMED, with(set, times, knob), "large", "1", count, NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
}

static void run_one_large(const char *policy)
{
	run_one_large_with(policy, IDLE, uses());
}

/* The emulation's idle products are all zero, which is no error: others are written by hand. */
START_TEST(measured_error_is_kept)
{
	run_one_large("default.action=auto");
	ck_decision("fp8", "auto");
	ck_assert_ptr_nonnull(strstr(content(), "\nsqnr = 200\n"));
}
END_TEST

START_TEST(rows_are_tried_where_one_scale_is_known_to_be_too_coarse)
{
	run_one_large("default.action=auto");
	edit("sqnr", "12.5");
	run_one_large("default.action=auto");
	ck_decision("fp8", "auto");
	ck_assert_ptr_nonnull(strstr(content(), "\nscale = row\n"));
	run_one_large("default.action=auto");
	ck_second("call0");
	edit("sqnr", "12.5");
	run_one_large("default.action=auto");
	ck_decision("native", "sqnr");
	ck_assert_str_eq(only_decision(&outcome)->detail, "fp8 by rows 12.50 dB, wanted 20");
	ck_native("call0");
}
END_TEST

START_TEST(known_error_decides_where_there_is_one_scaling_only)
{
	run_one_large("default.action=auto;default.scale=tensor");
	edit("sqnr", "12.5");
	run_one_large("default.action=auto;default.scale=tensor");
	ck_decision("native", "sqnr");
	ck_assert_str_eq(only_decision(&outcome)->detail, "fp8 12.50 dB, wanted 20");
	ck_native("call0");
	run_one_large("default.action=auto;default.scale=tensor;default.min_sqnr=12.5");
	ck_decision("fp8", "auto");
	ck_second("call0");
}
END_TEST

/* The row with this error has this action, which a pin would make an order. */
static void ck_row(const char *error, const char *action)
{
	char line[32];
	const char *row = strstr(content(), error);
	ck_assert_msg(row != NULL, "no %s: %s", error, text);
	row = strstr(row, "\naction = ");
	snprintf(line, sizeof line, "\naction = %s\n", action);
	ck_assert_msg(row && !strncmp(row, line, strlen(line)), "not %s: %s", action, text);
}

START_TEST(an_error_that_is_just_allowed_is_allowed)
{
	run_one_large("default.action=auto;default.min_sqnr=200");
	ck_decision("fp8", "auto");
	ck_row("\nsqnr = 200\n", "fp8");
}
END_TEST

/* Noise ten times the product. */
START_TEST(an_error_below_0_db_is_kept)
{
	static const char *const tensor = "default.action=auto;default.scale=tensor";
	run_one_large_with(tensor, "SOFTCUDA_FP8_ERROR=1000", "3");
	ck_decision("native", "sqnr");
	const int rows_then = rows_in_file();
	run_one_large_with(tensor, "SOFTCUDA_FP8_ERROR=1000", "1");
	ck_decision("native", "sqnr");
	ck_native("call0");
	ck_assert_int_eq(rows_in_file(), rows_then);
	ck_row("\nsqnr = 0\n", "native");
}
END_TEST

/* What is left to measure waits for the third use, as if nothing were known. */
/* Such as what a version that measured fp8 alone has left. */
START_TEST(a_file_without_rows_of_bf16_is_completed)
{
	run_one_large("default.action=auto");
	char *last = strstr(content(), "\nmeasured = bf16\n");
	ck_assert_ptr_nonnull(last);
	while (strncmp(last, "\n[product]\n", 11) != 0)
		last--;
	last[1] = '\0';
	write_file(text);
	ck_assert_int_eq(rows_in_file(), 2);
	run_one_large_with("default.action=auto", IDLE, "2");
	ck_decision("native", "untuned");
	run_one_large_with("default.action=auto", IDLE, "3");
	ck_decision("fp8", "auto");
	ck_assert_int_eq(rows_in_file(), 3);
}
END_TEST

START_TEST(what_is_known_in_part_is_measured_at_the_third_use)
{
	run_one_large("default.action=auto");
	edit(_i ? "ours_us" : "sqnr", _i ? "0" : NULL);
	const int rows_then = rows_in_file();
	run_one_large_with("default.action=auto", IDLE, "2");
	ck_native("call0");
	ck_decision("native", "untuned");
	ck_assert_int_eq(rows_in_file(), rows_then);
	run_one_large_with("default.action=auto", IDLE, "3");
	ck_decision("fp8", "auto");
	ck_assert_int_gt(rows_in_file(), rows_then);
	run_one_large_with("default.action=auto", IDLE, "1");
	ck_second("call0");
}
END_TEST

START_TEST(a_pin_overrules_a_known_error)
{
	run_one_large("default.action=auto;default.scale=tensor");
	edit("sqnr", "12.5\npinned = yes");
	run_one_large("default.action=auto;default.scale=tensor");
	ck_decision("fp8", "auto");
	ck_second("call0");
}
END_TEST

/* Under auto both are candidates, and fp8 is measured to be faster; a pin to native is no choice.
 */
START_TEST(a_pin_of_bf16_is_obeyed_where_fp8_is_faster)
{
	static char all[2 * sizeof text];
	run_one_large("default.action=auto");
	ck_decision("fp8", "auto");
	snprintf(all, sizeof all,
	         "%s\n[product]\nkey = %s\nmeasured = bf16\npinned = yes\naction = %s\n", content(),
	         only_decision(&outcome)->key, _i ? "native" : "bf16");
	write_file(all);
	run_one_large("default.action=auto");
	ck_decision(_i ? "fp8" : "bf16", "auto");
}
END_TEST

static void add_errors(TCase *tcase)
{
	tcase_add_test(tcase, measured_error_is_kept);
	tcase_add_test(tcase, rows_are_tried_where_one_scale_is_known_to_be_too_coarse);
	tcase_add_test(tcase, known_error_decides_where_there_is_one_scaling_only);
	tcase_add_test(tcase, an_error_that_is_just_allowed_is_allowed);
	tcase_add_test(tcase, an_error_below_0_db_is_kept);
	tcase_add_test(tcase, a_file_without_rows_of_bf16_is_completed);
	tcase_add_loop_test(tcase, what_is_known_in_part_is_measured_at_the_third_use, 0, 2);
	tcase_add_test(tcase, a_pin_overrules_a_known_error);
	tcase_add_loop_test(tcase, a_pin_of_bf16_is_obeyed_where_fp8_is_faster, 0, 2);
}

static void add_runs(TCase *tcase)
{
	tcase_add_loop_test(tcase, a_second_run_times_nothing_and_decides_the_same, 0, RUNS);
	tcase_add_test(tcase, what_is_known_needs_no_budget);
	tcase_add_test(tcase, known_times_are_judged_by_the_policy_of_the_day);
	tcase_add_test(tcase, each_candidate_is_measured_for_itself);
	tcase_add_loop_test(tcase, what_another_machine_measured_is_measured_again, 0, 5);
	tcase_add_test(tcase, an_algorithm_that_is_not_offered_is_chosen_anew);
	tcase_add_loop_test(tcase, a_row_without_times_is_measured_anew, 0, 2);
	tcase_add_loop_test(tcase, a_row_says_what_was_faster, 0, 5);
	tcase_add_test(tcase, a_row_has_the_tokens_of_a_product_with_a_role);
}

static void add_pins(TCase *tcase)
{
	tcase_add_test(tcase, a_pin_to_native_keeps_what_is_faster_away);
	tcase_add_loop_test(tcase, a_pin_to_native_keeps_what_is_faster_away, 5, 6);
	tcase_add_loop_test(tcase, a_pin_to_an_action_takes_what_is_slower, 1, 2);
	tcase_add_loop_test(tcase, a_pin_to_an_action_takes_what_is_slower, 6, 7);
	tcase_add_loop_test(tcase, a_pinned_algorithm_is_used, 0, 2);
	tcase_add_test(tcase, a_pin_does_not_overrule_a_rule);
}

int main(int argc, char **argv)
{
	Suite *suite = suite_create("known measurements");
	TCase *tcase = tcase_create("known");
	tcase_add_checked_fixture(tcase, set_up, tear_down);
	tcase_set_timeout(tcase, 120);
	suite_add_tcase(suite, tcase);
	add_runs(tcase);
	add_pins(tcase);
	add_errors(tcase);
	tcase_add_test(tcase, without_a_file_nothing_is_kept_or_said);
	tcase_add_test(tcase, without_a_home_that_is_said_once_it_matters);
	tcase_add_test(tcase, a_process_killed_while_it_measures_leaves_a_good_file);
	return engine_main(argc, argv, suite);
}
