/* The share of a step that products take: what is timed, what it adds up to, and that it costs the
 * program nothing. Products take the microseconds of the knobs, steps those of the real clock. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "softcuda/softcuda.h"

#define STEPS   "400"   /* of a run; they are known after some 150 of 7 products */
#define STEP_US 1500    /* that a step takes                                     */
#define MANY    1000000 /* more events than a run makes                          */
#define THREADS 4

/* ---- scenes -------------------------------------------------------------------------------------
 */

static const struct product shapes[] = {
        {.ta = CUBLAS_OP_T, .m = 64, .n = 24, .k = 96},
        {.ta = CUBLAS_OP_N, .m = 32, .n = 40, .k = 64},
        {.ta = CUBLAS_OP_T, .m = 48, .n = 24, .k = 96},
        {.ta = CUBLAS_OP_T, .m = 80, .n = 24, .k = 96},
};

#define SHAPES (int)(sizeof shapes / sizeof *shapes)

struct program {
	struct session session, second; /* on device 0, and on device 1 */
	struct made made[SHAPES], there;
	long failed; /* products */
};

static void open_program(struct program *program)
{
	memset(program, 0, sizeof *program);
	session_open(&program->session);
	for (int i = 0; i < SHAPES; i++)
		product_make(&program->made[i], &shapes[i], (uint64_t)i + 1);
}

static void wait_for(const struct program *program)
{
	must(cudaStreamSynchronize(program->session.stream), "synchronise");
}

static void make_in_graph(struct program *program, struct made *made)
{
	const cudaStream_t stream = program->session.stream;
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin");
	program->failed += product_call(made, &program->session) != CUBLAS_STATUS_SUCCESS;
	must(cudaStreamEndCapture(stream, &graph), "end");
	must(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
	must(cudaGraphLaunch(executable, stream), "launch");
	wait_for(program);
	must(cudaGraphExecDestroy(executable), "destroy");
	must(cudaGraphDestroy(graph), "destroy");
}

/* Waits for it, too: both devices are idle between their products. */
static void make_on_second_device(struct program *program)
{
	static const struct product shape = {.ta = CUBLAS_OP_T, .m = 96, .n = 24, .k = 96};
	must(cudaSetDevice(1), "cudaSetDevice");
	if (!program->there.dd) {
		session_open(&program->second);
		product_make(&program->there, &shape, 1);
	}
	program->failed += product_call(&program->there, &program->second) != CUBLAS_STATUS_SUCCESS;
	must(cudaStreamSynchronize(program->second.stream), "synchronise");
	must(cudaSetDevice(0), "cudaSetDevice");
}

/* The products of a step: "a" to "d" are shapes, a capital is made in a graph, "x" on the second
 * device, "." waits, "w" submits other work. */
static void make_step(struct program *program, const char *plan)
{
	const cudaStream_t stream = program->session.stream;
	for (; *plan; plan++) {
		if (*plan == '.')
			wait_for(program);
		else if (*plan == 'w')
			must(cudaMemsetAsync(program->made[0].dd, 0, 2, stream), "memset");
		else if (*plan == 'x')
			make_on_second_device(program);
		else if (*plan < 'a')
			make_in_graph(program, &program->made[*plan - 'A']);
		else
			program->failed += product_call(&program->made[*plan - 'a'],
			                                &program->session) != CUBLAS_STATUS_SUCCESS;
	}
}

static struct timespec start; /* of the steps, without pauses */

/* Steps are as long as they should be on average, whatever holds one up. */
static void pace(long step)
{
	struct timespec until = start;
	const long us = STEP_US * (step + 1);
	until.tv_sec += us / 1000000;
	until.tv_nsec += us % 1000000 * 1000;
	until.tv_sec += until.tv_nsec / 1000000000;
	until.tv_nsec %= 1000000000;
	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

static void put_policy(const char *text)
{
	FILE *file = fopen(getenv("QSHIM_POLICY"), "we");
	must(!file, "policy file");
	fprintf(file, "[qshim]\nversion = 1\n%s", text);
	must(fclose(file), "policy file");
}

/* What happens at the beginning of a step. */
static void change(const char *what, const char *value, const char **plan)
{
	if (!strcmp(what, "plan"))
		*plan = value;
	else if (!strcmp(what, "policy"))
		put_policy(value);
	else if (!strcmp(what, "pause")) {
		sleep((unsigned)atoi(value));
		start.tv_sec += atoi(value);
	} else if (!strcmp(what, "fork")) {
		int status = -1;
		const pid_t child = fork();
		if (!child)
			exit(0);
		waitpid(child, &status, 0);
		printf("child %d\n", status);
	} else
		softcuda_set(what, atol(value));
}

/* Events that were made or recorded, of all the program and we. */
static long events_used(void)
{
	return MANY - softcuda_get("fail_event");
}

/* `train PLAN STEPS [STEP WHAT VALUE]...` */
static int train(int argc, char **argv)
{
	struct program program;
	const char *plan = argv[0];
	open_program(&program);
	const long used = events_used();
	long launches = 0;
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (long step = 0; step < atol(argv[1]); step++) {
		for (int i = 2; i + 2 < argc; i += 3)
			if (atol(argv[i]) == step)
				change(argv[i + 1], argv[i + 2], &plan);
		launches = softcuda_get("launches");
		make_step(&program, plan);
		pace(step);
	}
	printf("launches %ld\n", softcuda_get("launches") - launches);
	printf("failed %ld\nused %ld\n", program.failed, events_used() - used);
	wait_for(&program);
	printf("events %ld\nsyncs %ld\n", softcuda_get("events"), softcuda_get("syncs"));
	return 0;
}

/* New products all the time, each a few calls. */
static void *hammer(void *data)
{
	struct program program;
	struct made made;
	must(cudaSetDevice(0), "cudaSetDevice");
	session_open(&program.session);
	for (int i = 0; i < 60; i++) {
		const struct product shape = {
		        .ta = CUBLAS_OP_T, .m = 16, .n = 8, .k = 16 * (i + 1)};
		product_make(&made, &shape, 1);
		for (int j = 0; j < 12; j++)
			must((int)product_call(&made, &program.session), "product");
		must(cudaStreamSynchronize(program.session.stream), "synchronise");
		product_free(&made);
	}
	return data;
}

/* Threads come when steps are known. */
static int threads(int argc, char **argv)
{
	struct program program;
	pthread_t thread[THREADS];
	(void)argc, (void)argv;
	open_program(&program);
	for (int step = 0; step < 300; step++) {
		for (int i = 0; i < THREADS && step == 200; i++)
			must(pthread_create(&thread[i], NULL, hammer, NULL), "thread");
		make_step(&program, "aaaaaab.");
	}
	for (int i = 0; i < THREADS; i++)
		must(pthread_join(thread[i], NULL), "join");
	for (int step = 0; step < 600; step++)
		make_step(&program, "aaaaaab.");
	printf("failed %ld\nevents %ld\n", program.failed, softcuda_get("events"));
	return 0;
}

const struct scene scenes[] = {{"train", train}, {"threads", threads}, {NULL, NULL}};

/* ---- tests --------------------------------------------------------------------------------------
 */

#define NATIVE_US 50
#define FP8_US    20
#define KERNEL_US 3

/* Six products of one shape and one of another. */
#define PLAN "aaaaaab."

/* No timing, no checks, no kept operands, whose events would be counted as ours. */
#define PLAIN  "tune.budget_ms=0;tune.file=;cache.validity=adjacent;numerics.check_every=0;"
#define NATIVE PLAIN "default.action=native"
#define FP8    PLAIN "default.action=fp8"

static struct outcome outcome;

/* The environment of a scene; valid until the next call. `more`: one variable more, or NULL. */
static const char *const *with(const char *policy, const char *more)
{
	static char set[256], product[64], fp8[64], kernel[64], event[64];
	static const char *env[9];
	snprintf(set, sizeof set, "QSHIM_SET=%s", policy);
	snprintf(product, sizeof product, "SOFTCUDA_PRODUCT_US=%d", NATIVE_US);
	snprintf(fp8, sizeof fp8, "SOFTCUDA_FP8_US=%d", FP8_US);
	snprintf(kernel, sizeof kernel, "SOFTCUDA_KERNEL_US=%d", KERNEL_US);
	snprintf(event, sizeof event, "SOFTCUDA_FAIL_EVENT=%d", MANY);
	const char *const all[] = {
	        set, product, fp8, kernel, event, "SOFTCUDA_IDLE_PRODUCTS=1", "QSHIM_SUMMARY=1",
	        more};
	memcpy(env, all, sizeof all);
	return env;
}

#define run(env, ...) run_scene(&outcome, SHIMMED, env, "train", __VA_ARGS__, NULL)

/* Nothing failed, and all events were given back. */
static void ck_unharmed(void)
{
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	ck_assert_double_eq(printed(&outcome, "failed"), 0);
	ck_assert_msg(printed(&outcome, "events") == 0, "events are left: %s", outcome.out);
}

static bool is_told(void)
{
	return strstr(outcome.err, " of it in products");
}

static bool all_timed(void)
{
	return is_told() && !strstr(outcome.err, "not timed");
}

/* Microseconds of a step that the summary gives to products. */
static double told_us(void)
{
	double ms, percent;
	const char *line = strstr(outcome.err, "products, ");
	ck_assert_msg(line && sscanf(line, "products, %lf ms each, %lf %% of it in products", &ms,
	                             &percent) == 2,
	              "%.2000s", outcome.err);
	return 10 * ms * percent;
}

/* Within what the real clock may be off. */
static void ck_told(double us)
{
	const double told = told_us();
	ck_assert_msg(fabs(told - us) < 0.1 * us, "%.1f us, not %.1f: %.2000s", told, us,
	              outcome.err);
}

START_TEST(the_time_of_native_products_adds_up)
{
	run(with(NATIVE, NULL), PLAN, STEPS);
	ck_unharmed();
	ck_told(7 * NATIVE_US);
	ck_assert(all_timed());
}
END_TEST

START_TEST(that_of_replaced_ones_has_the_time_to_quantise)
{
	run(with(FP8, NULL), "wawawawawawawb.", STEPS);
	ck_unharmed();
	const double launches = printed(&outcome, "launches");
	ck_assert_double_ge(launches, 7);
	ck_told(7 * FP8_US + launches * KERNEL_US);
}
END_TEST

START_TEST(each_key_counts_as_often_as_it_is_called)
{
	run(with(PLAIN "rule one.m=32;rule one.action=fp8;default.action=native", NULL), PLAN,
	    STEPS);
	ck_unharmed();
	ck_told(6 * NATIVE_US + FP8_US + printed(&outcome, "launches") * KERNEL_US);
}
END_TEST

/* The steps in which the first call of each key is timed. */
START_TEST(one_call_that_was_held_up_does_not_count)
{
	run(with(NATIVE, NULL), "abcd.", STEPS, "256", "product_us", "1000", "259", "product_us",
	    "50");
	ck_unharmed();
	ck_told(4 * NATIVE_US);
}
END_TEST

/* At every other step each product has another plan. */
START_TEST(each_decision_has_times_of_its_own)
{
	run(with(PLAIN "rule odd.steps=%2;rule odd.action=fp8;default.action=native", NULL), PLAN,
	    STEPS);
	ck_unharmed();
	const double fp8 = 7 * FP8_US + printed(&outcome, "launches") * KERNEL_US;
	ck_told((7 * NATIVE_US + fp8) / 2);
	ck_assert(all_timed());
}
END_TEST

/* Of the last steps no more than a fifth is not reckoned. */
START_TEST(a_decision_that_comes_late_counts)
{
	run(with(PLAIN "rule late.steps=300..;rule late.action=fp8;default.action=native", NULL),
	    PLAN, STEPS);
	ck_unharmed();
	ck_assert_double_lt(told_us(), 0.85 * 7 * NATIVE_US);
}
END_TEST

/* Its events are looked at only while it is the current one: the last one never. */
START_TEST(a_second_device_is_timed_too)
{
	run(with(NATIVE, NULL), "aaaxaaab.", STEPS);
	ck_assert_double_eq(printed(&outcome, "failed"), 0);
	ck_assert_double_eq(printed(&outcome, "events"), 2);
	ck_told(8 * NATIVE_US);
	ck_assert(all_timed());
}
END_TEST

/* The product of the graph begins the step: events are looked at while it is captured. */
START_TEST(captured_products_are_left_out_and_that_is_said)
{
	run(with(_i ? FP8 : NATIVE, NULL), "Caaaaaab.", STEPS);
	ck_unharmed();
	ck_told(_i ? 7 * FP8_US + printed(&outcome, "launches") * KERNEL_US * 7 / 8
	           : 7 * NATIVE_US);
	ck_assert_ptr_nonnull(strstr(outcome.err, " (1 of 3 keys was not timed)\n"));
	ck_assert_double_eq(printed(&outcome, "used"), 2 * 4 * 4);
}
END_TEST

START_TEST(four_calls_of_a_key_are_timed)
{
	run(with(NATIVE, NULL), PLAN, STEPS);
	ck_assert_double_eq(printed(&outcome, "used"), 2 * 4 * 4);
}
END_TEST

START_TEST(a_key_that_comes_later_is_timed_once_it_is_warm)
{
	run(with(NATIVE, NULL), PLAN, "600", "200", "plan", "aaaaaabcccc.", "210", "plan",
	    "ddddaaaaaabcccc.", "211", "plan", "aaaaaabcccc.");
	ck_unharmed();
	ck_assert_double_eq(printed(&outcome, "used"), 3 * 4 * 4);
	ck_assert_ptr_nonnull(strstr(outcome.err, " (1 of 4 keys was not timed)\n"));
}
END_TEST

START_TEST(nothing_is_timed_that_nobody_will_read)
{
	run(with(PLAIN "rule late.steps=200..;rule late.action=fp8;default.action=native",
	         "QSHIM_SUMMARY=0"),
	    PLAN, STEPS);
	ck_unharmed();
	ck_assert_double_gt((double)total_replaced(&outcome), 0);
	ck_assert_double_eq(printed(&outcome, "used"), 0);
	run(with(NATIVE, NULL), PLAN, "100");
	ck_unharmed();
	ck_assert_double_eq(printed(&outcome, "used"), 0);
	ck_assert(!is_told());
	run(with(NATIVE, "QSHIM=off"), PLAN, STEPS);
	ck_unharmed();
	ck_assert_double_eq(printed(&outcome, "used"), 0);
}
END_TEST

/* The products of the last shape come when the edit has been seen. */
START_TEST(nothing_is_timed_once_an_edit_has_switched_it_off)
{
	char folder[256], policy[300];
	make_directory(folder);
	snprintf(policy, sizeof policy, "QSHIM_POLICY=%s/policy.ini", folder);
	run(with(PLAIN, policy), PLAN, "2400", "0", "policy", "[default]\naction = fp8\n", "200",
	    "policy", "mode = off\n[default]\naction = fp8\n", "2000", "plan", "aaaaaabdddd.");
	remove_directory(folder);
	ck_unharmed();
	ck_assert_int_eq(decisions_with(&outcome, "off"), 3);
	ck_assert_double_eq(printed(&outcome, "used"), 2 * 4 * 4);
}
END_TEST

/* A product of the first step only, and a decision that is not in effect when steps are known,
 * after 1024 products, but is later. */
START_TEST(what_was_before_steps_are_known_does_not_count)
{
	char folder[256], policy[300];
	make_directory(folder);
	snprintf(policy, sizeof policy, "QSHIM_POLICY=%s/policy.ini", folder);
	run(with(PLAIN, policy), "da.", "2400", "0", "policy", "[default]\naction = fp8\n", "1",
	    "plan", "a.", "1", "policy", "[default]\naction = native\n", "10", "pause", "2", "1100",
	    "policy", "[default]\naction = fp8\n", "1110", "pause", "2");
	remove_directory(folder);
	ck_unharmed();
	ck_assert_double_eq(printed(&outcome, "used"), 2 * 4 * 4);
	ck_assert(all_timed());
}
END_TEST

/* Of the 32 times that an event is made or recorded, one fails. */
START_TEST(whatever_event_fails_only_one_time_is_lost)
{
	char nth[16];
	snprintf(nth, sizeof nth, "%d", _i);
	run(with(_i % 2 ? NATIVE : FP8, NULL), PLAN, STEPS, "1", "fail_event", nth);
	ck_unharmed();
	ck_told(_i % 2 ? 7 * NATIVE_US : 7 * FP8_US + printed(&outcome, "launches") * KERNEL_US);
}
END_TEST

/* With a single key a step is one product. The first that is timed fails: its end is not recorded.
 */
START_TEST(a_product_that_cublas_refuses_is_not_timed)
{
	run(with(NATIVE, NULL), "aaaaaaaa.", STEPS, "128", "fail_product", "1");
	ck_assert_double_eq(printed(&outcome, "failed"), 1);
	ck_assert_double_eq(printed(&outcome, "events"), 0);
	ck_assert_double_eq(printed(&outcome, "used"), 4 * 4 - 1);
	ck_told(NATIVE_US);
}
END_TEST

/* From the first product that is timed on, the engine fails, and is given up. */
START_TEST(a_product_that_an_engine_gives_back_is_timed_as_cublas_makes_it)
{
	run(with(FP8, NULL), "aaaaaaaa.", STEPS, "128", "fail_fp8", "14");
	ck_unharmed();
	ck_assert_uint_eq(total_replaced(&outcome), 8 * 128);
	ck_assert_double_eq(printed(&outcome, "used"), 4 * 4 + 1);
	ck_told(NATIVE_US);
}
END_TEST

START_TEST(a_demoted_key_is_timed_anew)
{
	run(with("tune.budget_ms=0;tune.file=;cache.validity=adjacent;numerics.check_every=600;"
	         "numerics.min_sqnr=60;default.action=fp8",
	         "SOFTCUDA_IDLE_PRODUCTS=0"),
	    PLAN, STEPS);
	ck_unharmed();
	ck_assert_int_eq(decisions_with(&outcome, "sqnr"), 1);
	ck_told(6 * NATIVE_US + FP8_US + printed(&outcome, "launches") * KERNEL_US);
}
END_TEST

START_TEST(nothing_waits)
{
	const char *const *env = with(NATIVE, NULL);
	run_scene(&outcome, BARE, env, "train", "aaaaaab", STEPS, NULL);
	const double syncs = printed(&outcome, "syncs");
	run(env, "aaaaaab", STEPS);
	ck_assert_double_eq(printed(&outcome, "failed"), 0);
	ck_assert_double_eq(printed(&outcome, "syncs"), syncs);
}
END_TEST

/* The last product of a step is done only in the next one. */
START_TEST(an_event_that_has_not_come_about_is_looked_at_again)
{
	run(with(NATIVE, NULL), "aaaaaa.b", STEPS);
	ck_assert_double_eq(printed(&outcome, "failed"), 0);
	ck_told(7 * NATIVE_US);
	ck_assert(all_timed());
}
END_TEST

START_TEST(a_forked_child_leaves_the_parents_times_alone)
{
	run(with(NATIVE, NULL), PLAN, STEPS, "147", "fork", "", "150", "fork", "");
	ck_unharmed();
	ck_assert_double_eq(printed(&outcome, "child"), 0);
	ck_told(7 * NATIVE_US);
}
END_TEST

START_TEST(threads_time_new_keys_at_once)
{
	run_scene(&outcome, SHIMMED, with(NATIVE, NULL), "threads", NULL);
	ck_unharmed();
	ck_assert(is_told());
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("share of a step");
	TCase *tests = tcase_create("share");
	tcase_set_timeout(tests, 120);
	tcase_add_test(tests, the_time_of_native_products_adds_up);
	tcase_add_test(tests, that_of_replaced_ones_has_the_time_to_quantise);
	tcase_add_test(tests, each_key_counts_as_often_as_it_is_called);
	tcase_add_test(tests, one_call_that_was_held_up_does_not_count);
	tcase_add_test(tests, each_decision_has_times_of_its_own);
	tcase_add_test(tests, a_decision_that_comes_late_counts);
	tcase_add_test(tests, a_second_device_is_timed_too);
	tcase_add_loop_test(tests, captured_products_are_left_out_and_that_is_said, 0, 2);
	tcase_add_test(tests, four_calls_of_a_key_are_timed);
	tcase_add_test(tests, a_key_that_comes_later_is_timed_once_it_is_warm);
	tcase_add_test(tests, nothing_is_timed_that_nobody_will_read);
	tcase_add_test(tests, nothing_is_timed_once_an_edit_has_switched_it_off);
	tcase_add_test(tests, what_was_before_steps_are_known_does_not_count);
	tcase_add_loop_test(tests, whatever_event_fails_only_one_time_is_lost, 1, 17);
	tcase_add_test(tests, a_product_that_cublas_refuses_is_not_timed);
	tcase_add_test(tests, a_product_that_an_engine_gives_back_is_timed_as_cublas_makes_it);
	tcase_add_test(tests, a_demoted_key_is_timed_anew);
	tcase_add_test(tests, nothing_waits);
	tcase_add_test(tests, an_event_that_has_not_come_about_is_looked_at_again);
	tcase_add_test(tests, a_forked_child_leaves_the_parents_times_alone);
	tcase_add_test(tests, threads_time_new_keys_at_once);
	suite_add_tcase(suite, tests);
	return engine_main(argc, argv, suite);
}
