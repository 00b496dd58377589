/* The policy's file is edited while the program runs: what takes effect, what stays, and that
 * neither counts nor threads suffer; and rules by training step. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "softcuda/softcuda.h"

#define LEAST_DB 26.0
#define PATIENCE 6.0 /* s within which an edit must show                    */
#define QUIET    2.6 /* s in which an edit that takes effect would have shown */
#define PAUSE_NS 2000000
#define THREADS  6

static const struct product shapes[] = {
        {.ta = CUBLAS_OP_T, .m = 64, .n = 24, .k = 96},
        {.ta = CUBLAS_OP_N, .m = 32, .n = 40, .k = 64},
};

/* ---- policies -----------------------------------------------------------------------------------
 */

#define HEAD "[qshim]\nversion = 1\n"

static const struct {
	const char *name, *text;
} policies[] = {
        {"fp8", HEAD "[rule all]\naction = fp8\n"},
        {"native", HEAD "[rule all]\naction = native\n"},
        {"renamed", HEAD "[rule every]\naction = fp8\n"},
        {"more", HEAD "[rule none]\nm = 7\naction = bf16\n[rule all]\naction = fp8\n"},
        {"off", HEAD "mode = off\n[rule all]\naction = fp8\n"},
        {"elsewhere", HEAD "process = python*\n[rule all]\naction = fp8\n"},
        {"broken", HEAD "[rule all]\naction = fp9\n"},
        {"narrow", HEAD "[rule all]\nm = 64\naction = fp8\n[default]\naction = native\n"},
        {"late", HEAD "[rule late]\nsteps = 2000..\naction = fp8\n[default]\naction = native\n"},
        {"window", HEAD "[rule window]\nsteps = 1500..1999\naction = fp8\n"
                        "[default]\naction = native\n"},
        {"tenth", HEAD "[rule tenth]\nsteps = %10\naction = fp8\n[default]\naction = native\n"},
};

static const char *text_of(const char *name)
{
	for (size_t i = 0; i < sizeof policies / sizeof *policies; i++)
		if (!strcmp(policies[i].name, name))
			return policies[i].text;
	fprintf(stderr, "no policy %s\n", name);
	exit(4);
}

static void put(const char *path, const char *name)
{
	FILE *file = fopen(path, "we");
	must(!file, "policy file");
	fputs(text_of(name), file);
	must(fclose(file), "policy file");
}

/* As most editors do it. */
static void put_by_rename(const char *name)
{
	char beside[300];
	snprintf(beside, sizeof beside, "%s.new", getenv("QSHIM_POLICY"));
	put(beside, name);
	must(rename(beside, getenv("QSHIM_POLICY")), "rename");
}

/* ---- scenes -------------------------------------------------------------------------------------
 */

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void pause_a_little(void)
{
	nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}

static long count_fp8(void)
{
	long count = softcuda_get("products_fp8");
	return count > 0 ? count : 0;
}

/* True if the product was made in fp8. */
static bool call(struct made *made, const struct session *session)
{
	long before = count_fp8();
	must((int)product_call(made, session), "product");
	must(cudaStreamSynchronize(session->stream), "synchronise");
	return count_fp8() > before;
}

struct program {
	struct session session;
	struct made made[2];
	long calls, replaced; /* so far */
	bool fp8[2];          /* in the last round */
};

static void open_program(struct program *program)
{
	memset(program, 0, sizeof *program);
	session_open(&program->session);
	for (int i = 0; i < 2; i++)
		product_make(&program->made[i], &shapes[i], (uint64_t)i + 1);
}

static void round_of(struct program *program)
{
	for (int i = 0; i < 2; i++) {
		program->fp8[i] = call(&program->made[i], &program->session);
		program->calls++;
		program->replaced += program->fp8[i];
	}
}

/* Runs until both shapes are as they should be, or patience ends; with "=", for a time in which a
 * change would show. */
static void run_phase(struct program *program, bool still, const bool fp8[2])
{
	const double begin = now();
	bool met = false;
	while (now() - begin < (still ? QUIET : PATIENCE) && (still || !met)) {
		round_of(program);
		met = program->fp8[0] == fp8[0] && program->fp8[1] == fp8[1];
		pause_a_little();
	}
	printf("phase %d\n", met);
}

/* Arguments are phases of three: what is done to the file, whether something shows (+) or nothing
 * does (=), and for each shape whether it is in fp8 then (f) or not (-). */
static int edits(int argc, char **argv)
{
	struct program program;
	const char *path = getenv("QSHIM_POLICY");
	open_program(&program);
	for (int i = 0; i + 2 < argc; i += 3) {
		const bool fp8[2] = {argv[i + 2][0] == 'f', argv[i + 2][1] == 'f'};
		if (!strcmp(argv[i], "gone"))
			unlink(path);
		else if (*argv[i] == '>')
			put_by_rename(argv[i] + 1);
		else if (*argv[i])
			put(path, argv[i]);
		run_phase(&program, argv[i + 1][0] == '=', fp8);
	}
	printf("calls %ld\nreplaced %ld\n", program.calls, program.replaced);
	printf("heuristics %ld\n", softcuda_get("heuristics"));
	return 0;
}

static double worst = INFINITY;
static long calls; /* of all threads */
static _Atomic bool stop;
static pthread_mutex_t verdict_lock = PTHREAD_MUTEX_INITIALIZER;

static void *hammer(void *seed)
{
	struct program program;
	must(cudaSetDevice(0), "cudaSetDevice");
	open_program(&program);
	double least = INFINITY;
	while (!atomic_load(&stop)) {
		round_of(&program);
		for (int i = 0; i < 2; i++) {
			product_fetch(&program.made[i]);
			least = fmin(least, product_sqnr(&program.made[i]));
			product_poison(&program.made[i]);
		}
	}
	pthread_mutex_lock(&verdict_lock);
	worst = fmin(worst, least);
	calls += program.calls;
	pthread_mutex_unlock(&verdict_lock);
	return seed;
}

/* Every edit is in effect for a while. The shim is started before the threads are. */
static int flips(int argc, char **argv)
{
	static const char *const names[] = {"native", "fp8", "renamed", "narrow", "native", "fp8"};
	pthread_t thread[THREADS];
	struct program program;
	(void)argc, (void)argv;
	open_program(&program);
	round_of(&program);
	calls = program.calls;
	for (int i = 0; i < THREADS; i++)
		must(pthread_create(&thread[i], NULL, hammer, NULL), "thread");
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		nanosleep(&(struct timespec){.tv_sec = 2, .tv_nsec = 400000000}, NULL);
		put_by_rename(names[i]);
	}
	nanosleep(&(struct timespec){.tv_sec = 2, .tv_nsec = 400000000}, NULL);
	atomic_store(&stop, true);
	for (int i = 0; i < THREADS; i++)
		must(pthread_join(thread[i], NULL), "join");
	printf("worst %.3f\ncalls %ld\n", worst, calls);
	return 0;
}

/* A worker that is forked after an edit begins with the file as it is. */
static int fork_after_edit(int argc, char **argv)
{
	struct program program;
	(void)argc, (void)argv;
	open_program(&program);
	round_of(&program);
	put(getenv("QSHIM_POLICY"), "native");
	pid_t child = fork();
	if (!child) {
		for (int i = 0; i < 3; i++) /* fails, as it would without the shim */
			product_call(&program.made[0], &program.session);
		exit(0);
	}
	int status = -1;
	waitpid(child, &status, 0);
	run_phase(&program, false, (const bool[2]){false, false});
	printf("failed %d\n", status != 0);
	return 0;
}

/* The products of `argv[1]` steps of `argv[0]` products; prints the calls that began and ended fp8.
 */
static int training(int argc, char **argv)
{
	struct program program;
	const long length = argc > 0 ? atol(argv[0]) : 1, steps = argc > 1 ? atol(argv[1]) : 1;
	long first = -1, last = -1, count = 0;
	open_program(&program);
	for (long i = 0; i < steps * length; i++) {
		/* one of the second shape ends a step */
		const int which = length > 1 && i % length == length - 1;
		if (call(&program.made[which], &program.session)) {
			first = first < 0 ? i : first;
			last = i;
			count++;
		}
	}
	printf("first %ld\nlast %ld\ncount %ld\n", first, last, count);
	return 0;
}

static int aimless(int argc, char **argv)
{
	struct program program;
	uint64_t state = 1;
	(void)argc, (void)argv;
	open_program(&program);
	for (int i = 0; i < 4000; i++) {
		normal(&state);
		round_of(&program);
		call(&program.made[state >> 62 & 1], &program.session);
	}
	printf("replaced %ld\n", program.replaced);
	return 0;
}

const struct scene scenes[] = {
        {"edits", edits},       {"flips", flips},     {"fork_after_edit", fork_after_edit},
        {"training", training}, {"aimless", aimless}, {NULL, NULL},
};

/* ---- tests --------------------------------------------------------------------------------------
 */

static struct outcome outcome;
static char folder[256], file[300], variable[320];

static void set_up(void)
{
	make_directory(folder);
	snprintf(file, sizeof file, "%s/policy.ini", folder);
	snprintf(variable, sizeof variable, "QSHIM_POLICY=%s", file);
}

static void tear_down(void)
{
	remove_directory(folder);
}

static const char *const *environment(const char *policy)
{
	static const char *env[4];
	put(file, policy);
	env[0] = variable;
	env[1] = "QSHIM_LOG=info";
	env[2] = "QSHIM_SUMMARY=0";
	return env;
}

#define edit(policy, ...)                                                                          \
	run_scene(&outcome, SHIMMED, environment(policy), "edits", __VA_ARGS__, NULL)

static int count_of(const char *text, const char *what)
{
	int count = 0;
	for (; (text = strstr(text, what)); text += strlen(what))
		count++;
	return count;
}

static void every_phase_as_wanted(int phases)
{
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	ck_assert_msg(count_of(outcome.out, "phase 1\n") == phases, "%s%.2000s", outcome.out,
	              outcome.err);
	ck_assert_int_eq(outcome.counters, 2);
	ck_assert_uint_eq(total_calls(&outcome), (uint64_t)printed(&outcome, "calls"));
	ck_assert_uint_eq(total_replaced(&outcome), (uint64_t)printed(&outcome, "replaced"));
}

START_TEST(an_edit_takes_effect_and_loses_no_count)
{
	edit("fp8", "", "+", "ff", "native", "+", "--");
	every_phase_as_wanted(2);
	ck_assert_int_eq(count_of(outcome.err, "read again; 2 products are decided"), 1);
	ck_assert_int_eq(outcome.decisions, 4);
	ck_assert_str_eq(outcome.decision[3].action, "native");
	ck_assert_str_eq(outcome.decision[3].rule, "all");
	for (int i = 0; i < 2; i++) {
		ck_assert_int_eq(outcome.counter[i].action, QS_ACTION_NATIVE);
		ck_assert_int_eq(outcome.counter[i].reason, QS_REASON_RULE);
	}
}
END_TEST

START_TEST(a_decision_that_comes_back_is_prepared_already)
{
	edit("fp8", "", "+", "ff");
	const double once = printed(&outcome, "heuristics");
	ck_assert_double_gt(once, 0);
	edit("fp8", "", "+", "ff", "native", "+", "--", "fp8", "+", "ff");
	every_phase_as_wanted(3);
	ck_assert_double_eq(printed(&outcome, "heuristics"), once);
	ck_assert_int_eq(outcome.decisions, 6);
	ck_assert_str_eq(outcome.decision[5].action, "fp8");
	ck_assert_int_eq(outcome.counter[0].action, QS_ACTION_FP8);
}
END_TEST

START_TEST(a_plan_whose_decision_stands_is_kept)
{
	edit("fp8", "", "+", "ff");
	const double once = printed(&outcome, "heuristics");
	edit("fp8", "", "+", "ff", "more", "=", "ff", "narrow", "+", "f-");
	every_phase_as_wanted(3);
	ck_assert_int_eq(count_of(outcome.err, "read again; 0 products are decided"), 1);
	ck_assert_int_eq(count_of(outcome.err, "read again; 1 product is decided"), 1);
	ck_assert_double_eq(printed(&outcome, "heuristics"), once);
	ck_assert_int_eq(outcome.decisions, 3);
}
END_TEST

START_TEST(another_name_of_the_rule_is_another_decision)
{
	edit("fp8", "", "+", "ff", "renamed", "=", "ff");
	every_phase_as_wanted(2);
	ck_assert_int_eq(outcome.decisions, 4);
	ck_assert_str_eq(outcome.decision[3].rule, "every");
	ck_assert_str_eq(outcome.counter[0].rule, "every");
}
END_TEST

START_TEST(a_broken_edit_is_told_and_changes_nothing)
{
	edit("fp8", "", "+", "ff", "broken", "=", "ff", "native", "+", "--");
	every_phase_as_wanted(3);
	ck_assert_int_eq(count_of(outcome.err, "unusable value 'fp9'"), 1);
	ck_assert_int_eq(count_of(outcome.err, "the policy read before stays in effect"), 1);
	ck_assert_int_eq(count_of(outcome.err, "read again"), 1);
}
END_TEST

START_TEST(a_file_that_vanishes_changes_nothing_until_it_is_back)
{
	edit("fp8", "", "+", "ff", "gone", "=", "ff", "native", "+", "--");
	every_phase_as_wanted(3);
	ck_assert_int_eq(count_of(outcome.err, "No such file"), 1);
}
END_TEST

START_TEST(an_editor_may_replace_the_file)
{
	edit("fp8", "", "+", "ff", ">native", "+", "--", ">fp8", "+", "ff");
	every_phase_as_wanted(3);
}
END_TEST

START_TEST(a_policy_that_was_broken_at_the_start_is_mended_while_running)
{
	edit("broken", "", "+", "--", "fp8", "+", "ff");
	every_phase_as_wanted(2);
	ck_assert_int_eq(decisions_with(&outcome, "policy"), 2);
}
END_TEST

START_TEST(mode_off_and_another_process_pass_with_their_reasons)
{
	edit("fp8", "", "+", "ff", "off", "+", "--", "elsewhere", "=", "--", "fp8", "+", "ff");
	every_phase_as_wanted(4);
	ck_assert_int_eq(decisions_with(&outcome, "off"), 2);
	ck_assert_int_eq(decisions_with(&outcome, "process"), 2);
}
END_TEST

START_TEST(settings_over_the_policy_stay_on_top)
{
	const char *env[] = {variable, "QSHIM_SET=tune.budget_ms=0;rule all.action=fp8", NULL};
	put(file, "fp8");
	run_scene(&outcome, SHIMMED, env, "edits", "", "+", "ff", "native", "=", "ff", NULL);
	ck_assert_int_eq(count_of(outcome.out, "phase 1\n"), 2);
}
END_TEST

START_TEST(threads_that_run_while_the_policy_changes_get_right_results)
{
	run_scene(&outcome, SHIMMED, environment("fp8"), "flips", NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	ck_assert_double_ge(printed(&outcome, "worst"), LEAST_DB);
	ck_assert_int_ge(count_of(outcome.err, "read again"), 5);
	ck_assert_int_eq(outcome.counters, 2);
	ck_assert_uint_gt(total_replaced(&outcome), 0);
	ck_assert_uint_lt(total_replaced(&outcome), total_calls(&outcome));
	ck_assert_uint_eq(total_calls(&outcome), (uint64_t)printed(&outcome, "calls"));
	ck_assert_uint_eq(total_late(&outcome), 0);
}
END_TEST

START_TEST(a_forked_worker_begins_with_the_file_as_it_is)
{
	run_scene(&outcome, SHIMMED, environment("fp8"), "fork_after_edit", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_int_eq(count_of(outcome.out, "phase 1\n"), 1);
	ck_assert_double_eq(printed(&outcome, "failed"), 0);
	ck_assert_int_eq(count_of(outcome.err, "read again"), 1);
	ck_assert_int_eq(outcome.logs, 2);
}
END_TEST

/* ---- steps --------------------------------------------------------------------------------------
 */

static void train(const char *policy, const char *length, const char *steps)
{
	run_scene(&outcome, SHIMMED, environment(policy), "training", length, steps, NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
}

START_TEST(a_rule_takes_effect_at_its_step)
{
	train("late", _i ? "7" : "1", "2100");
	const double length = _i ? 7 : 1;
	ck_assert_double_eq(printed(&outcome, "first"), 2000 * length);
	ck_assert_double_eq(printed(&outcome, "count"), 100 * length);
	for (int i = 0; i < outcome.counters; i++)
		ck_assert_str_eq(outcome.counter[i].rule, "late");
	ck_assert_ptr_null(strstr(outcome.err, "matched none"));
}
END_TEST

START_TEST(a_rule_ends_with_its_steps)
{
	train("window", "3", "2500");
	ck_assert_double_eq(printed(&outcome, "first"), 1500 * 3);
	ck_assert_double_eq(printed(&outcome, "last"), 2000 * 3 - 1);
	ck_assert_double_eq(printed(&outcome, "count"), 500 * 3);
}
END_TEST

/* Back and forth, with two plans for each product. */
START_TEST(a_rule_may_ask_for_every_tenth_step)
{
	train("tenth", "4", "1000");
	ck_assert_double_eq(fmod(printed(&outcome, "first"), 40), 0);
	ck_assert_double_eq(printed(&outcome, "last"), 990 * 4 + 3);
	ck_assert_double_eq(printed(&outcome, "count"),
	                    (printed(&outcome, "last") + 1 - printed(&outcome, "first") + 36) / 10);
	ck_assert_int_eq(outcome.decisions, 4);
}
END_TEST

START_TEST(without_a_period_no_rule_by_step_matches_and_that_is_said)
{
	run_scene(&outcome, SHIMMED, environment("late"), "aimless", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_double_eq(printed(&outcome, "replaced"), 0);
	ck_assert_ptr_nonnull(strstr(outcome.err,
	                             "rule 'late' matched none of 2 products: steps are "
	                             "unknown"));
}
END_TEST

START_TEST(the_summary_tells_the_time_of_a_step)
{
	const char *env[] = {variable, "QSHIM_SUMMARY=1", NULL};
	put(file, "native");
	run_scene(&outcome, SHIMMED, env, "training", "7", "400", NULL);
	ck_assert_ptr_nonnull(strstr(outcome.err, "qshim: 399 steps of 7 products, "));
	run_scene(&outcome, SHIMMED, env, "training", "7", "20", NULL);
	ck_assert_ptr_null(strstr(outcome.err, " steps of "));
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("live policy, steps");
	TCase *live = tcase_create("live"), *steps = tcase_create("steps");
	tcase_set_timeout(live, 120);
	tcase_add_checked_fixture(live, set_up, tear_down);
	tcase_add_test(live, an_edit_takes_effect_and_loses_no_count);
	tcase_add_test(live, a_decision_that_comes_back_is_prepared_already);
	tcase_add_test(live, a_plan_whose_decision_stands_is_kept);
	tcase_add_test(live, another_name_of_the_rule_is_another_decision);
	tcase_add_test(live, a_broken_edit_is_told_and_changes_nothing);
	tcase_add_test(live, a_file_that_vanishes_changes_nothing_until_it_is_back);
	tcase_add_test(live, an_editor_may_replace_the_file);
	tcase_add_test(live, a_policy_that_was_broken_at_the_start_is_mended_while_running);
	tcase_add_test(live, mode_off_and_another_process_pass_with_their_reasons);
	tcase_add_test(live, settings_over_the_policy_stay_on_top);
	tcase_add_test(live, threads_that_run_while_the_policy_changes_get_right_results);
	tcase_add_test(live, a_forked_worker_begins_with_the_file_as_it_is);
	tcase_set_timeout(steps, 120);
	tcase_add_checked_fixture(steps, set_up, tear_down);
	tcase_add_loop_test(steps, a_rule_takes_effect_at_its_step, 0, 2);
	tcase_add_test(steps, a_rule_ends_with_its_steps);
	tcase_add_test(steps, a_rule_may_ask_for_every_tenth_step);
	tcase_add_test(steps, without_a_period_no_rule_by_step_matches_and_that_is_said);
	tcase_add_test(steps, the_summary_tells_the_time_of_a_step);
	suite_add_tcase(suite, live);
	suite_add_tcase(suite, steps);
	return engine_main(argc, argv, suite);
}
