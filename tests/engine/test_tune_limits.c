/* What bounds timing: budget, captures, memory, time to wait, and failures of every step, none of
 * which may cost the program more than the better algorithm. */
#define _GNU_SOURCE
#include "tuning.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "softcuda/softcuda.h"

#define THREADS 4

static void CUDART_CB sleep_ms(void *data)
{
	usleep((useconds_t)(1000 * (uintptr_t)data));
}

/* `keys COUNT MS`: distinct products, all but the first one held up for MS, and then all of them
 * again. */
static int keys(int argc, char **argv)
{
	struct session session;
	struct made made[8];
	const int count = argc == 2 ? atoi(argv[0]) : 0;
	session_open(&session);
	for (int i = 0; i < count; i++) {
		const struct product p = shape(i);
		product_make(&made[i], &p, (uint64_t)i);
	}
	for (int i = 0; i < 2 * count; i++) {
		void *ms = (void *)(uintptr_t)(i && i < count ? atol(argv[1]) : 0);
		must(cudaLaunchHostFunc(session.stream, sleep_ms, ms), "host function");
		const struct work before = work_done();
		call(&made[i % count], &session);
		judge(&made[i % count]);
		product_poison(&made[i % count]);
		print_work("call", i, &before);
	}
	return verdict();
}

/* `captured BEFORE`: captured in global mode, replayed, and called again; after no call, one of
 * another key, or one of its own. */
static int captured(int argc, char **argv)
{
	struct session session;
	struct made made, other;
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	session_open(&session);
	product_make(&made, &rows[0], 1);
	if (argc == 1 && !strcmp(argv[0], "other")) {
		const struct product p = shape(0);
		product_make(&other, &p, 2);
		whole_call(&other, &session);
	}
	if (argc == 1 && !strcmp(argv[0], "own"))
		whole_call(&made, &session);
	const struct work before = work_done();
	product_poison(&made);
	must(cudaStreamBeginCapture(session.stream, cudaStreamCaptureModeGlobal), "begin");
	call(&made, &session);
	must(cudaStreamEndCapture(session.stream, &graph), "end");
	print_work("capture", 0, &before);
	must(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
	must(cudaGraphLaunch(executable, session.stream), "launch");
	judge(&made);
	watched_call(&made, &session, 0);
	watched_call(&made, &session, 1);
	return verdict();
}

/* One product on another thread. */
struct job {
	struct session session;
	struct made made;
	pthread_barrier_t *together;     /* or NULL                                     */
	enum cudaStreamCaptureMode mode; /* of the thread, after the call               */
};

static void *call_of_thread(void *data)
{
	struct job *job = data;
	must(cudaSetDevice(0), "device");
	if (job->together)
		pthread_barrier_wait(job->together);
	call(&job->made, &job->session);
	job->mode = cudaStreamCaptureModeRelaxed;
	must(cudaThreadExchangeStreamCaptureMode(&job->mode), "mode");
	return NULL;
}

static void open_job(struct job *job, int number)
{
	const struct product p = shape(number);
	session_open(&job->session);
	product_make(&job->made, &p, (uint64_t)number);
	job->together = NULL;
}

/* A key is tuned while another thread captures in global mode, which forbids all threads to wait.
 */
static int beside_capture(int argc, char **argv)
{
	struct session session;
	struct made made;
	struct job job;
	pthread_t thread;
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	(void)argc, (void)argv;
	session_open(&session);
	product_make(&made, &rows[0], 1);
	whole_call(&made, &session);
	product_poison(&made);
	open_job(&job, 0);
	must(cudaStreamBeginCapture(session.stream, cudaStreamCaptureModeGlobal), "begin");
	const struct work before = work_done();
	must(pthread_create(&thread, NULL, call_of_thread, &job), "thread");
	must(pthread_join(thread, NULL), "join");
	print_work("call", 0, &before);
	call(&made, &session);
	must(cudaStreamEndCapture(session.stream, &graph), "end");
	must(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
	must(cudaGraphLaunch(executable, session.stream), "launch");
	judge(&made);
	judge(&job.made);
	printf("global %d\n", job.mode == cudaStreamCaptureModeGlobal);
	return verdict();
}

/* Threads that meet a new key at the same time. */
static int threads(int argc, char **argv)
{
	struct job job[THREADS];
	pthread_t thread[THREADS];
	pthread_barrier_t together;
	struct session session;
	struct made made;
	(void)argc, (void)argv;
	session_open(&session);
	product_make(&made, &rows[0], 1);
	whole_call(&made, &session); /* the shim has started */
	must(pthread_barrier_init(&together, NULL, THREADS), "barrier");
	for (int i = 0; i < THREADS; i++) {
		open_job(&job[i], 0);
		job[i].together = &together;
	}
	const struct work before = work_done();
	for (int i = 0; i < THREADS; i++)
		must(pthread_create(&thread[i], NULL, call_of_thread, &job[i]), "thread");
	for (int i = 0; i < THREADS; i++)
		must(pthread_join(thread[i], NULL), "join");
	print_work("call", 0, &before);
	for (int i = 0; i < THREADS; i++)
		judge(&job[i].made);
	return verdict();
}

/* `memory BETA N`: a small product; then one with a larger D, when the Nth allocation fails. With
 * beta, D is read, so what is measured needs memory of its own. */
static int memory(int argc, char **argv)
{
	struct session session;
	struct made made[2];
	struct product less = rows[0];
	struct product more = {.ta = CUBLAS_OP_T, .m = 1024, .n = 1100, .k = 32};
	less.beta = more.beta = (float)atof(argv[0]);
	session_open(&session);
	product_make(&made[0], &less, 1);
	product_make(&made[1], &more, 2);
	watched_call(&made[0], &session, 0);
	if (argc == 2)
		softcuda_set("fail_alloc", atol(argv[1]));
	watched_call(&made[1], &session, 1);
	return verdict();
}

/* Products whose D is larger than 2, 4 and 6 MiB. */
static int growing(int argc, char **argv)
{
	struct session session;
	struct made made;
	(void)argc, (void)argv;
	session_open(&session);
	for (int i = 0; i < 3; i++) {
		const struct product p = {
		        .ta = CUBLAS_OP_T, .m = 1024, .n = 1100 + 1200 * i, .k = 32, .beta = 1.0f};
		product_make(&made, &p, 1);
		watched_call(&made, &session, i);
	}
	return verdict();
}

/* D lies in the middle of A, which nothing but the program's own call may write. */
static int overlapping(int argc, char **argv)
{
	const float one = 1.0f, zero = 0.0f;
	struct session session;
	uint16_t *a;
	void *b;
	(void)argc, (void)argv;
	session_open(&session);
	must(cudaMalloc((void **)&a, 2 * 256 * 256), "A");
	must(cudaMalloc(&b, 2 * 256 * 256), "B");
	for (int i = 0; i < 2; i++) {
		const struct work before = work_done();
		must((int)cublasGemmEx(session.blas, CUBLAS_OP_T, CUBLAS_OP_N, 64, 64, 256, &one, a,
		                       CUDA_R_16BF, 256, b, CUDA_R_16BF, 256, &zero, a + 4096,
		                       CUDA_R_16BF, 64, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
		     "product");
		must((int)cudaDeviceSynchronize(), "synchronize");
		print_work("call", i, &before);
	}
	return 0;
}

static double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void CUDART_CB nothing(void *data)
{
	(void)data;
}

/* Two new keys on a stream that is held up by what this thread does after them. */
static int held(int argc, char **argv)
{
	struct session session;
	struct made made[2];
	(void)argc, (void)argv;
	session_open(&session);
	for (int i = 0; i < 2; i++) {
		const struct product p = shape(i);
		product_make(&made[i], &p, (uint64_t)i);
	}
	softcuda_set("hold_host", 1);
	must(cudaLaunchHostFunc(session.stream, nothing, NULL), "host function");
	for (int i = 0; i < 2; i++) {
		const struct work before = work_done();
		double start = seconds();
		call(&made[i], &session);
		printf("seconds%d %.3f\n", i, seconds() - start);
		print_work("call", i, &before);
	}
	softcuda_set("hold_host", 0);
	judge(&made[0]);
	judge(&made[1]);
	return verdict();
}

/* A measurement gives up at the end of the second after the one it started in: from the start of a
 * second on, it lasts for nearly two. */
static void start_of_second(void)
{
	double now = seconds();
	usleep((useconds_t)(1e6 * (ceil(now) - now)));
}

/* A new key while another thread waits for a stream that is held up, and again when it is not. */
static int held_elsewhere(int argc, char **argv)
{
	struct session session;
	struct made made;
	struct job job;
	pthread_t thread;
	(void)argc, (void)argv;
	session_open(&session);
	product_make(&made, &rows[0], 1);
	open_job(&job, 0);
	must((int)cudaDeviceSynchronize(), "synchronize");
	start_of_second();
	const struct work before = work_done();
	softcuda_set("hold_host", 1);
	must(cudaLaunchHostFunc(job.session.stream, nothing, NULL), "host function");
	must(pthread_create(&thread, NULL, call_of_thread, &job), "thread");
	while (work_done().first == before.first)
		usleep(1000);
	double start = seconds();
	call(&made, &session);
	printf("seconds %.3f\n", seconds() - start);
	must(pthread_join(thread, NULL), "join");
	softcuda_set("hold_host", 0);
	judge(&made);
	judge(&job.made);
	watched_call(&made, &session, 0);
	watched_call(&made, &session, 1);
	return verdict();
}

/* Two calls; returns how many products by the second algorithm the last of them took. */
static long two_calls(void)
{
	struct session session;
	struct made made;
	session_open(&session);
	product_make(&made, &rows[0], 1);
	whole_call(&made, &session);
	const struct work before = work_done();
	whole_call(&made, &session);
	return work_done().second - before.second;
}

static int status_of(pid_t child)
{
	int status = -1;
	must(waitpid(child, &status, 0) != child, "waitpid");
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The child of a process that has not used the GPU yet. */
static int fork_before(int argc, char **argv)
{
	(void)argc, (void)argv;
	pid_t child = fork();
	if (!child)
		exit(two_calls() != 1 || !all_right());
	printf("child %d\n", status_of(child));
	printf("second %ld\n", two_calls());
	return verdict();
}

/* The child of a process that waits for a measurement in another thread. */
static int fork_meanwhile(int argc, char **argv)
{
	struct job job;
	pthread_t thread;
	(void)argc, (void)argv;
	open_job(&job, 0);
	softcuda_set("hold_host", 1);
	must(cudaLaunchHostFunc(job.session.stream, nothing, NULL), "host function");
	must(pthread_create(&thread, NULL, call_of_thread, &job), "thread");
	while (!work_done().first)
		usleep(1000);
	pid_t child = fork();
	if (!child) {
		alarm(30);
		_exit(product_call(&job.made, &job.session) == CUBLAS_STATUS_SUCCESS);
	}
	printf("child %d\n", status_of(child));
	must(pthread_join(thread, NULL), "join");
	softcuda_set("hold_host", 0);
	judge(&job.made);
	return verdict();
}

const struct scene scenes[] = {
        {"calls", scene_calls},
        {"large", scene_large},
        {"doubtful", scene_doubtful},
        {"keys", keys},
        {"captured", captured},
        {"beside_capture", beside_capture},
        {"threads", threads},
        {"memory", memory},
        {"growing", growing},
        {"overlapping", overlapping},
        {"held", held},
        {"held_elsewhere", held_elsewhere},
        {"fork_before", fork_before},
        {"fork_meanwhile", fork_meanwhile},
        {NULL, NULL},
};

/* ---- budget --------------------------------------------------------------------------------- */

START_TEST(without_a_budget_bf16_is_not_timed_and_not_taken)
{
	run_scene(&outcome, SHIMMED,
	          with("tune.budget_ms=0;default.action=bf16", second_faster, NULL), "calls", "0",
	          "2", NULL);
	check_unharmed("no budget");
	ck_decision("native", "budget");
	ck_native("call0");
	ck_native("call1");
}
END_TEST

/* The size model decides, though a measurement would have said no. */
START_TEST(without_a_budget_auto_goes_by_size)
{
	const struct times slow = {.product = 100, .fp8 = 1000, .second = 900, .kernel = 100};
	run_scene(&outcome, SHIMMED, with("tune.budget_ms=0;default.action=auto", slow, IDLE),
	          "large", "1", "1", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_decision("fp8", "auto");
	ck_products("call0", 1, 1, 0); /* its error is looked at */
}
END_TEST

/* What it does not want is measured all the same, where it may be wrong, and not done without. */
static const struct {
	const char *policy, *action, *reason;
	struct times times;
} doubtful[] = {
        {AUTO, "fp8", "auto", {.product = 1000, .fp8 = 500, .second = 500, .kernel = 100}},
        {AUTO, "native", "not-faster", {.product = 1000, .fp8 = 900, .second = 900, .kernel = 100}},
        {"tune.budget_ms=0;default.action=auto", "native", "small", {.product = 1000, .fp8 = 500}},
        {AUTO ";qshim.mode=observe", "native", "small", {.product = 1000, .fp8 = 500}},
        {"tune.budget_ms=0;default.action=fp8", "fp8", "rule", {.product = 1000, .fp8 = 500}},
};

START_TEST(what_size_leaves_in_doubt_is_done_only_if_it_is_measured)
{
	run_scene(&outcome, SHIMMED, with(doubtful[_i].policy, doubtful[_i].times, IDLE),
	          "doubtful", "1", "4", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_decision(doubtful[_i].action, doubtful[_i].reason);
	ck_products("call0", strcmp(doubtful[_i].action, "native") == 0,
	            strcmp(doubtful[_i].action, "fp8") == 0, 0);
}
END_TEST

/* The second and the third key, each held up for 200 ms, spend 300. */
START_TEST(budget_is_shared_by_all_keys)
{
	run_scene(&outcome, SHIMMED,
	          with("tune.budget_ms=300;default.action=bf16", second_faster, NULL), "keys", "5",
	          "200", NULL);
	check_unharmed("keys");
	ck_assert_int_eq(outcome.decisions, 5);
	ck_assert_int_eq(decisions_for("bf16"), 3);
	ck_assert_int_eq(decisions_with(&outcome, "budget"), 2);
	ck_timed("call2");
	ck_native("call3");
	ck_native("call4");
	ck_second("call7");
	ck_native("call8");
}
END_TEST

START_TEST(spent_budget_leaves_auto_to_the_size_model)
{
	const struct times slow = {.product = 100, .fp8 = 1000, .second = 900, .kernel = 100};
	run_scene(&outcome, SHIMMED, with("tune.budget_ms=1;default.action=auto", slow, IDLE),
	          "large", "2", "3", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_int_eq(decisions_with(&outcome, "not-faster"), 1);
	ck_assert_int_eq(decisions_with(&outcome, "auto"), 1);
	ck_timed("call0");
	ck_first("call1");
}
END_TEST

/* ---- captures ------------------------------------------------------------------------------- */

START_TEST(first_call_in_a_capture_is_not_timed_but_the_next_one_is)
{
	const char *const before[] = {"nothing", "other"};
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "captured", before[_i], NULL);
	check_unharmed(before[_i]);
	ck_native("capture0");
	ck_assert_int_eq(count("capture0", "heuristics"), 0);
	ck_assert_int_eq(decisions_with(&outcome, "capture-cold"), 1);
	ck_assert_int_eq(decisions_for("bf16"), 1 + _i);
	ck_timed("call0");
	ck_second("call1");
}
END_TEST

START_TEST(what_was_measured_before_a_capture_is_used_in_it)
{
	run_scene(&outcome, SHIMMED, with(_i ? FP8 : BF16, second_faster, NULL), "captured", "own",
	          NULL);
	check_unharmed("own");
	ck_assert_uint_eq(total_replaced(&outcome), 4);
	ck_second("capture0");
	ck_second("call0");
}
END_TEST

START_TEST(measurement_does_not_spoil_a_capture_beside_it)
{
	run_scene(&outcome, SHIMMED, with(_i ? FP8 : BF16, second_faster, NULL), "beside_capture",
	          NULL);
	check_unharmed("beside_capture");
	ck_timed("call0");
	ck_assert_uint_eq(total_replaced(&outcome), 3);
	ck_assert_double_eq(printed(&outcome, "global"), 1);
}
END_TEST

/* ---- memory --------------------------------------------------------------------------------- */

START_TEST(memory_for_trials_is_used_again)
{
	run_scene(&outcome, SHIMMED, with(_i ? FP8 : BF16, second_faster, NULL), "keys", "3", "0",
	          NULL);
	check_unharmed("keys");
	ck_timed("call1");
	ck_assert_int_gt(count("call0", "allocations"), 1);
	ck_assert_int_eq(count("call1", "allocations"), 0);
	ck_assert_int_eq(count("call2", "allocations"), 0);
}
END_TEST

START_TEST(without_memory_for_trials_a_key_is_not_tuned)
{
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "memory", "1", "0", NULL);
	ck_timed("call1");
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "memory", "1", "1", NULL);
	check_unharmed("bf16");
	ck_assert_int_eq(decisions_with(&outcome, "memory"), 1);
	ck_native("call1");
	ck_assert_int_eq(count("call1", "calls"), 1);
	run_scene(&outcome, SHIMMED, with(FP8, second_faster, NULL), "memory", "1", "1", NULL);
	check_unharmed("fp8");
	ck_assert_uint_eq(total_replaced(&outcome), 2);
	ck_first("call1");
	ck_assert_int_eq(count("call1", "calls"), 1);
}
END_TEST

START_TEST(what_is_overwritten_anyway_needs_no_memory_for_trials)
{
	run_scene(&outcome, SHIMMED, with(_i ? FP8 : BF16, second_faster, NULL), "memory", "0", "1",
	          NULL);
	check_unharmed("beta 0");
	ck_timed("call1");
	ck_assert_int_eq(count("call1", "allocations"), 0);
}
END_TEST

/* What is outgrown is not freed: twice as much each time adds up to little. */
START_TEST(memory_for_trials_grows_twofold)
{
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "growing", NULL);
	check_unharmed("growing");
	ck_assert_int_eq(count("call1", "allocations"), 1);
	ck_timed("call2");
	ck_assert_int_eq(count("call2", "allocations"), 0);
}
END_TEST

START_TEST(output_that_overlaps_an_operand_is_not_written_by_trials)
{
	run_scene(&outcome, SHIMMED, with(_i ? FP8 : BF16, second_faster, NULL), "overlapping",
	          NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_native("call0");
	ck_native("call1");
	ck_decision("native", "alias");
}
END_TEST

/* Workspace of 32 MiB, results of 2 and 4: what is outgrown counts, as it is not freed. */
START_TEST(memory_for_trials_is_bounded)
{
	run_scene(&outcome, SHIMMED, with(BF16 ";tune.max_mib=38", second_faster, NULL), "memory",
	          "1", NULL);
	check_unharmed("38 MiB");
	ck_timed("call1");
	run_scene(&outcome, SHIMMED, with(BF16 ";tune.max_mib=37", second_faster, NULL), "memory",
	          "1", NULL);
	check_unharmed("37 MiB");
	ck_timed("call0");
	ck_native("call1");
	ck_assert_int_eq(decisions_with(&outcome, "memory"), 1);
	run_scene(&outcome, SHIMMED, with(BF16 ";tune.max_mib=31", second_faster, NULL), "memory",
	          "1", NULL);
	check_unharmed("31 MiB");
	ck_native("call0");
	ck_native("call1");
	ck_assert_int_eq(decisions_with(&outcome, "memory"), 2);
}
END_TEST

/* 32 MiB of workspace and 2 x 2.5 of operands; in use twice these, within [cache] max_mib. */
START_TEST(operands_of_trials_are_bounded)
{
	const struct times slow = {.product = 100, .fp8 = 1000, .second = 900, .kernel = 100};
	const struct times fast = {.product = 1000, .fp8 = 500, .second = 400, .kernel = 100};
	run_scene(&outcome, SHIMMED, with(AUTO ";tune.max_mib=38", slow, IDLE), "large", "1", "3",
	          NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_decision("native", "not-faster");
	ck_assert_int_eq(count("call0", "allocations"), 1);
	run_scene(&outcome, SHIMMED, with(AUTO ";tune.max_mib=37", slow, IDLE), "large", "1", "3",
	          NULL);
	ck_decision("native", "memory");
	ck_assert_int_eq(count("call0", "second") + count("call0", "first"),
	                 8); /* bf16 needs none */
	run_scene(&outcome, SHIMMED, with(FP8 ";tune.max_mib=37", fast, IDLE), "large", "1", "1",
	          NULL);
	ck_decision("fp8", "rule");
	ck_timed("call0");
}
END_TEST

/* One result of 32 MiB, as D has the other, and 44 to run in, after the 38 to time in; what cannot
 * be compared is not taken. */
START_TEST(results_that_are_compared_are_bounded)
{
	const struct times fast = {.product = 1000, .fp8 = 500, .second = 400, .kernel = 100};
	run_scene(&outcome, SHIMMED, with(AUTO ";tune.max_mib=116", fast, IDLE), "large", "1", "3",
	          NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_decision("fp8", "auto");
	run_scene(&outcome, SHIMMED, with(AUTO ";tune.max_mib=115", fast, IDLE), "large", "1", "3",
	          NULL);
	ck_decision("native", "memory");
	ck_assert_str_eq(only_decision(&outcome)->detail, "42 MiB of scratch");
	run_scene(&outcome, SHIMMED, with(AUTO ";tune.max_mib=71", fast, IDLE), "large", "1", "3",
	          NULL);
	ck_decision("native", "memory");
	ck_assert_str_eq(only_decision(&outcome)->detail, "32 MiB to compare results");
}
END_TEST

/* ---- failures ------------------------------------------------------------------------------- */

static void run_failing(const char *policy, struct times times, const char *knob, int value)
{
	char text[16];
	snprintf(text, sizeof text, "%d", value);
	run_scene(&outcome, SHIMMED, with(policy, times, NULL), "calls", "1", "2", knob, text,
	          NULL);
	check_unharmed(knob);
}

/* Products 1, 2 and 3 of a measurement are by the first algorithm, the second, and native. */
START_TEST(algorithm_that_fails_is_not_used)
{
	run_failing(BF16, second_faster, "fail_product", 1);
	ck_second("call1");
	run_failing(FP8, second_faster, "fail_product", 1);
	ck_second("call1");
	run_failing(BF16, second_faster, "fail_product", 2);
	ck_decision("native", "not-faster");
	ck_native("call1");
	run_failing(FP8, second_faster, "fail_product", 2);
	ck_decision("fp8", "rule");
	ck_first("call1");
}
END_TEST

START_TEST(without_a_native_time_nothing_is_compared)
{
	run_failing(BF16, second_faster, "fail_product", 3);
	ck_decision("native", "untuned");
	ck_native("call1");
	run_failing(FP8, second_faster, "fail_product", 3);
	ck_decision("fp8", "rule");
	ck_assert_str_eq(only_decision(&outcome)->detail, "");
	ck_second("call1");
}
END_TEST

/* Two events are created, and then recorded before and after each trial: of two algorithms, native
 * and, for fp8, the conversion. The end of the second algorithm's second trial rules it out. */
START_TEST(events_that_fail_harm_nothing)
{
	enum {
		CREATIONS = 2,
		END_BF16 = CREATIONS + 2 * (3 + 2),
		END_FP8 = CREATIONS + 2 * (4 + 2)
	};
	for (int i = 1; i <= END_FP8; i++) {
		run_failing(BF16, second_faster, "fail_event", i);
		if (i <= CREATIONS)
			ck_decision("native", "untuned");
		if (i == END_BF16)
			ck_decision("native", "not-faster");
		run_failing(FP8, second_faster, "fail_event", i);
		ck_decision("fp8", "rule");
		ck_assert_uint_eq(total_replaced(&outcome), 2);
		if (i == END_FP8)
			ck_first("call1");
	}
}
END_TEST

START_TEST(kernels_that_fail_are_not_timed)
{
	run_failing(FP8, second_faster, "fail_launch", 700);
	ck_assert_int_eq(decisions_with(&outcome, "error"), 1);
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_native("call0");
}
END_TEST

START_TEST(fp8_that_fails_leaves_the_programs_call)
{
	run_failing(FP8, second_faster, "fail_fp8", 14);
	ck_assert_int_eq(decisions_with(&outcome, "error"), 1);
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_native("call1");
}
END_TEST

START_TEST(bf16_without_an_algorithm_leaves_the_programs_call)
{
	run_failing(BF16, second_faster, "heuristics_empty", 1);
	ck_decision("native", "algo-none");
	ck_native("call0");
}
END_TEST

/* ---- waiting -------------------------------------------------------------------------------- */

/* Gives up within two seconds, after one trial, and the time counts: the next key is not timed. */
START_TEST(stream_that_is_held_up_is_not_waited_for_for_ever)
{
	const char *const policy[] = {"tune.budget_ms=500;default.action=bf16",
	                              "tune.budget_ms=500;default.action=fp8"};
	run_scene(&outcome, SHIMMED, with(policy[_i], second_faster, NULL), "held", NULL);
	check_unharmed("held");
	ck_assert_double_gt(printed(&outcome, "seconds0"), 0.9);
	ck_assert_double_lt(printed(&outcome, "seconds0"), 5.0);
	ck_assert_double_lt(printed(&outcome, "seconds1"), 0.9);
	if (_i) {
		ck_products("call0", 0, 2, 0);
		ck_first("call1");
		ck_assert_uint_eq(total_replaced(&outcome), 2);
	} else {
		ck_products("call0", 1, 1, 0);
		ck_native("call1");
		ck_assert_int_eq(decisions_with(&outcome, "untuned"), 1);
		ck_assert_int_eq(decisions_with(&outcome, "budget"), 1);
	}
}
END_TEST

START_TEST(key_does_not_wait_for_long_while_another_thread_measures)
{
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "held_elsewhere", NULL);
	check_unharmed("held_elsewhere");
	ck_assert_double_gt(printed(&outcome, "seconds"), 0.9);
	ck_assert_double_lt(printed(&outcome, "seconds"), 1.7);
	ck_assert_uint_eq(total_late(&outcome), 1);
	ck_assert_int_eq(decisions_with(&outcome, "untuned"), 2); /* late here, given up there */
	ck_timed("call0");
	ck_second("call1");
}
END_TEST

START_TEST(one_of_several_threads_tunes_a_key)
{
	run_scene(&outcome, SHIMMED, with(_i ? FP8 : BF16, second_faster, NULL), "threads", NULL);
	check_unharmed("threads");
	ck_assert_uint_eq(total_replaced(&outcome), 1 + THREADS);
	ck_assert_int_eq(outcome.decisions, 2);
	ck_assert_int_eq(count("call0", "heuristics"), 2);
	ck_assert_int_eq(count("call0", "native"), 4);
}
END_TEST

/* ---- fork ----------------------------------------------------------------------------------- */

START_TEST(child_that_uses_the_gpu_itself_tunes_for_itself)
{
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "fork_before", NULL);
	check_unharmed("fork_before");
	ck_assert_double_eq(printed(&outcome, "child"), 0);
	ck_assert_double_eq(printed(&outcome, "second"), 1);
	ck_assert_int_eq(outcome.logs, 2);
	ck_assert_int_eq(decisions_for("bf16"), 2);
}
END_TEST

START_TEST(child_of_a_process_that_measures_does_not_hang)
{
	run_scene(&outcome, SHIMMED, with(BF16, second_faster, NULL), "fork_meanwhile", NULL);
	check_unharmed("fork_meanwhile");
	ck_assert_double_eq(printed(&outcome, "child"), 0);
}
END_TEST

static TCase *add_case(Suite *suite, const char *name)
{
	TCase *tcase = tcase_create(name);
	tcase_set_timeout(tcase, 120);
	suite_add_tcase(suite, tcase);
	return tcase;
}

static void add_limits(TCase *tcase)
{
	tcase_add_test(tcase, without_a_budget_bf16_is_not_timed_and_not_taken);
	tcase_add_test(tcase, without_a_budget_auto_goes_by_size);
	tcase_add_loop_test(tcase, what_size_leaves_in_doubt_is_done_only_if_it_is_measured, 0,
	                    (int)(sizeof doubtful / sizeof *doubtful));
	tcase_add_test(tcase, budget_is_shared_by_all_keys);
	tcase_add_test(tcase, spent_budget_leaves_auto_to_the_size_model);
	tcase_add_loop_test(tcase, first_call_in_a_capture_is_not_timed_but_the_next_one_is, 0, 2);
	tcase_add_loop_test(tcase, what_was_measured_before_a_capture_is_used_in_it, 0, 2);
	tcase_add_loop_test(tcase, measurement_does_not_spoil_a_capture_beside_it, 0, 2);
	tcase_add_loop_test(tcase, memory_for_trials_is_used_again, 0, 2);
	tcase_add_test(tcase, without_memory_for_trials_a_key_is_not_tuned);
	tcase_add_test(tcase, memory_for_trials_grows_twofold);
	tcase_add_loop_test(tcase, what_is_overwritten_anyway_needs_no_memory_for_trials, 0, 2);
	tcase_add_loop_test(tcase, output_that_overlaps_an_operand_is_not_written_by_trials, 0, 2);
	tcase_add_test(tcase, memory_for_trials_is_bounded);
	tcase_add_test(tcase, operands_of_trials_are_bounded);
	tcase_add_test(tcase, results_that_are_compared_are_bounded);
	tcase_add_loop_test(tcase, stream_that_is_held_up_is_not_waited_for_for_ever, 0, 2);
	tcase_add_test(tcase, key_does_not_wait_for_long_while_another_thread_measures);
}

static void add_failures(TCase *tcase)
{
	tcase_add_test(tcase, algorithm_that_fails_is_not_used);
	tcase_add_test(tcase, without_a_native_time_nothing_is_compared);
	tcase_add_test(tcase, events_that_fail_harm_nothing);
	tcase_add_test(tcase, kernels_that_fail_are_not_timed);
	tcase_add_test(tcase, fp8_that_fails_leaves_the_programs_call);
	tcase_add_test(tcase, bf16_without_an_algorithm_leaves_the_programs_call);
	tcase_add_loop_test(tcase, one_of_several_threads_tunes_a_key, 0, 2);
	tcase_add_test(tcase, child_that_uses_the_gpu_itself_tunes_for_itself);
	tcase_add_test(tcase, child_of_a_process_that_measures_does_not_hang);
}

int main(int argc, char **argv)
{
	Suite *suite = suite_create("limits of tuning");
	add_limits(add_case(suite, "limits"));
	add_failures(add_case(suite, "failures"));
	return engine_main(argc, argv, suite);
}
