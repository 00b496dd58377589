/* fp8 products in CUDA graphs: a graph owns its scratch memory from capture to destruction, so it
 * may be replayed on any stream, beside any other work, and gives back what it held. The emulation
 * picks the order of independent streams by a seed; the races are looked for over many seeds. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "softcuda/softcuda.h"

#define N_ CUBLAS_OP_N
#define T_ CUBLAS_OP_T

#define SEEDS    12
#define LEAST_DB 26.0

static const char *const fp8[] = {"QSHIM_SET=tune.budget_ms=0;default.action=fp8", NULL};

static const struct product shape = {.ta = T_, .m = 64, .n = 40, .k = 96};
static const struct product large = {.ta = N_, .m = 256, .n = 256, .k = 4096};

static double worst = INFINITY, best = -INFINITY;

/* Fetches D, remembers its quality, and poisons it for the next round. */
static void judge(struct made *made)
{
	product_fetch(made);
	double sqnr = product_sqnr(made);
	worst = sqnr < worst ? sqnr : worst;
	best = sqnr > best ? sqnr : best;
	product_poison(made);
}

static int verdict(void)
{
	printf("worst %.3f\nbest %.3f\n", worst, best);
	return 0;
}

static cudaStream_t new_stream(void)
{
	cudaStream_t stream;
	must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
	return stream;
}

static void begin(const struct session *session)
{
	must(cudaStreamBeginCapture(session->stream, cudaStreamCaptureModeGlobal), "begin");
}

static cudaGraphExec_t end(const struct session *session)
{
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	must(cudaStreamEndCapture(session->stream, &graph), "end");
	must(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
	must(cudaGraphDestroy(graph), "destroy");
	return executable;
}

static void call(struct made *made, const struct session *session)
{
	must((int)product_call(made, session), "product");
}

static cudaGraphExec_t capture(struct made *made, const struct session *session)
{
	begin(session);
	call(made, session);
	return end(session);
}

static void launch(cudaGraphExec_t executable, cudaStream_t stream)
{
	must(cudaGraphLaunch(executable, stream), "launch");
}

/* A session with one product that was called once. */
static void warm(struct session *session, struct made *made)
{
	session_open(session);
	product_make(made, &shape, 1);
	call(made, session);
	judge(made);
}

/* ---- scenes -----------------------------------------------------------------------------------
 */

static int replays(int argc, char **argv)
{
	struct session session;
	struct made made;
	(void)argc, (void)argv;
	warm(&session, &made);
	cudaGraphExec_t graph = capture(&made, &session);
	for (uint64_t round = 0; round < 4; round++) {
		product_refill(&made, 100 + round);
		launch(graph, session.stream);
		judge(&made);
	}
	return verdict();
}

/* Same shape, so same plan and same size of scratch; other memory. */
static int two_graphs(int argc, char **argv)
{
	struct session session;
	struct made made[2];
	(void)argc, (void)argv;
	warm(&session, &made[0]);
	product_make(&made[1], &shape, 2);
	cudaGraphExec_t graph[2] = {capture(&made[0], &session), capture(&made[1], &session)};
	cudaStream_t streams[2] = {new_stream(), new_stream()};
	for (int round = 0; round < 4; round++) {
		launch(graph[0], streams[round % 2]);
		launch(graph[1], streams[1 - round % 2]);
		judge(&made[0]);
		judge(&made[1]);
	}
	return verdict();
}

/* One graph with several products, beside eager products on the stream it was captured from. */
static int eager_beside_replay(int argc, char **argv)
{
	struct session session;
	struct made made[4];
	(void)argc, (void)argv;
	warm(&session, &made[0]);
	for (uint64_t i = 1; i < 4; i++)
		product_make(&made[i], &shape, 1 + i);
	begin(&session);
	call(&made[0], &session);
	call(&made[1], &session);
	cudaGraphExec_t graph = end(&session);
	cudaStream_t other = new_stream();
	for (int round = 0; round < 4; round++) {
		launch(graph, other);
		call(&made[2], &session);
		call(&made[3], &session);
		for (int i = 0; i < 4; i++)
			judge(&made[i]);
	}
	return verdict();
}

/* Two branches of one capture run beside each other; the second branch is on another stream. */
static int forked_capture(int argc, char **argv)
{
	struct session session;
	struct made made[3];
	cudaEvent_t fork_event, join_event;
	(void)argc, (void)argv;
	warm(&session, &made[0]);
	product_make(&made[1], &shape, 2);
	product_make(&made[2], &shape, 3);
	must(cudaEventCreateWithFlags(&fork_event, cudaEventDisableTiming), "event");
	must(cudaEventCreateWithFlags(&join_event, cudaEventDisableTiming), "event");
	struct session branch = session;
	cudaStream_t trunk = session.stream, side = new_stream();
	begin(&session);
	must(cudaEventRecord(fork_event, trunk), "record");
	must(cudaStreamWaitEvent(side, fork_event, 0), "wait");
	call(&made[0], &session);
	session_use(&branch, side); /* the handle is shared: one stream at a time */
	call(&made[1], &branch);
	session_use(&branch, trunk);
	call(&made[2], &session);
	must(cudaEventRecord(join_event, side), "record");
	must(cudaStreamWaitEvent(trunk, join_event, 0), "wait");
	cudaGraphExec_t graph = end(&session);
	for (int round = 0; round < 4; round++) {
		launch(graph, trunk);
		for (int i = 0; i < 3; i++)
			judge(&made[i]);
	}
	return verdict();
}

static int many_captures(int argc, char **argv)
{
	struct session session;
	struct made made;
	long before = 0;
	(void)argc, (void)argv;
	warm(&session, &made);
	for (int round = 0; round < 100; round++) {
		cudaGraphExec_t graph = capture(&made, &session);
		launch(graph, session.stream);
		judge(&made);
		must(cudaGraphExecDestroy(graph), "destroy");
		if (round == 1)
			before = softcuda_get("bytes");
	}
	printf("before %ld\ngrowth %ld\n", before, softcuda_get("bytes") - before);
	return verdict();
}

/* One product on another thread. */
struct job {
	struct made made;
	struct session session;
};

/* Runs while a capture in global mode, which forbids every thread to allocate, is under way. */
static void *grow_scratch(void *argument)
{
	struct job *job = argument;
	must(cudaSetDevice(0), "cudaSetDevice");
	call(&job->made, &job->session);
	return NULL;
}

static int growth_beside_capture(int argc, char **argv)
{
	struct session session;
	struct made made;
	struct job job;
	pthread_t thread;
	(void)argc, (void)argv;
	warm(&session, &made);
	session_open(&job.session);
	product_make(&job.made, &large, 2);
	begin(&session);
	call(&made, &session);
	must(pthread_create(&thread, NULL, grow_scratch, &job), "thread");
	must(pthread_join(thread, NULL), "join");
	cudaGraphExec_t graph = end(&session);
	launch(graph, session.stream);
	judge(&made);
	judge(&job.made);
	return verdict();
}

static void *first_product(void *data)
{
	struct job *job = data;
	must((int)cudaSetDevice(0), "device");
	call(&job->made, &job->session);
	return NULL;
}

/* The first product of a context loads kernels and sets up memory, while another thread captures a
 * stream that the legacy stream waits for. */
static int first_product_beside_capture(int argc, char **argv)
{
	struct job job;
	pthread_t thread;
	cudaStream_t blocking;
	cudaGraph_t graph;
	(void)argc, (void)argv;
	session_open(&job.session);
	product_make(&job.made, &large, 2);
	must((int)cudaStreamCreate(&blocking), "stream");
	must((int)cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal), "begin");
	must(pthread_create(&thread, NULL, first_product, &job), "thread");
	must(pthread_join(thread, NULL), "join");
	must((int)cudaStreamEndCapture(blocking, &graph), "end");
	judge(&job.made);
	return verdict();
}

/* A graph that lives keeps its scratch while eager work outgrows everything. */
static int growth_after_capture(int argc, char **argv)
{
	struct session session;
	struct made made, other;
	(void)argc, (void)argv;
	warm(&session, &made);
	product_make(&other, &large, 2);
	cudaGraphExec_t graph = capture(&made, &session);
	for (int round = 0; round < 3; round++) {
		call(&other, &session);
		launch(graph, session.stream);
		judge(&made);
		judge(&other);
	}
	return verdict();
}

/* Launches that may start early: of eager products, and of captured ones. */
static int early(int argc, char **argv)
{
	struct session session;
	struct made made;
	(void)argc, (void)argv;
	warm(&session, &made);
	const long eager = softcuda_get("early_launches"), all = softcuda_get("launches");
	cudaGraphExec_t graph = capture(&made, &session);
	launch(graph, session.stream);
	judge(&made);
	printf("launches %ld\neager %ld\ncaptured %ld\n", all, eager,
	       softcuda_get("early_launches") - eager);
	return verdict();
}

const struct scene scenes[] = {
        {"replays", replays},
        {"two_graphs", two_graphs},
        {"eager_beside_replay", eager_beside_replay},
        {"forked_capture", forked_capture},
        {"many_captures", many_captures},
        {"growth_beside_capture", growth_beside_capture},
        {"growth_after_capture", growth_after_capture},
        {"first_product_beside_capture", first_product_beside_capture},
        {"early", early},
        {NULL, NULL},
};

/* ---- tests ------------------------------------------------------------------------------------
 */

static struct outcome outcome;

/* Runs the scene; everything it called was served by fp8 and is right. */
static void all_right(const char *scene, int seed, int calls)
{
	char knob[64];
	snprintf(knob, sizeof knob, "SOFTCUDA_SEED=%d", seed);
	const char *const env[] = {fp8[0], knob, NULL};
	run_scene(&outcome, SHIMMED, env, scene, NULL);
	ck_assert_msg(outcome.exit == 0, "%s, seed %d: exit %d: %.2000s", scene, seed, outcome.exit,
	              outcome.err);
	ck_assert_uint_eq(total_calls(&outcome), (uint64_t)calls);
	ck_assert_uint_eq(total_replaced(&outcome), (uint64_t)calls);
	ck_assert_msg(printed(&outcome, "worst") >= LEAST_DB, "%s, seed %d: %.2f dB", scene, seed,
	              printed(&outcome, "worst"));
	ck_assert_double_lt(printed(&outcome, "best"), 45.0);
}

START_TEST(first_product_of_a_context_does_not_invalidate_a_capture_elsewhere)
{
	all_right("first_product_beside_capture", 1, 1);
}
END_TEST

START_TEST(warm_capture_is_served_and_replays_with_new_inputs)
{
	all_right("replays", 1, 2);
}
END_TEST

START_TEST(graphs_from_one_stream_replay_beside_each_other)
{
	all_right("two_graphs", _i, 3);
}
END_TEST

START_TEST(eager_products_do_not_disturb_a_replay)
{
	all_right("eager_beside_replay", _i, 11);
}
END_TEST

START_TEST(branches_of_a_capture_do_not_disturb_each_other)
{
	all_right("forked_capture", _i, 4);
}
END_TEST

START_TEST(scratch_of_destroyed_graphs_is_used_again)
{
	all_right("many_captures", 1, 101);
	ck_assert_double_gt(printed(&outcome, "before"), 0.0);
	ck_assert_double_eq(printed(&outcome, "growth"), 0.0);
}
END_TEST

START_TEST(growing_scratch_does_not_invalidate_a_capture_elsewhere)
{
	all_right("growth_beside_capture", 1, 3);
}
END_TEST

START_TEST(live_graph_keeps_its_scratch_when_eager_work_grows)
{
	all_right("growth_after_capture", _i, 5);
}
END_TEST

/* A graph gets only edges that every program can read. */
START_TEST(kernels_start_early_except_in_a_graph)
{
	all_right("early", 1, 2);
	ck_assert_double_ge(printed(&outcome, "launches"), 2);
	ck_assert_double_eq(printed(&outcome, "eager"), printed(&outcome, "launches"));
	ck_assert_double_eq(printed(&outcome, "captured"), 0);
}
END_TEST

static void run_early(const char *set)
{
	const char *const env[] = {set, NULL};
	run_scene(&outcome, SHIMMED, env, "early", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_uint_eq(total_replaced(&outcome), 2);
	ck_assert_double_ge(printed(&outcome, "worst"), LEAST_DB);
}

/* The first node of a graph has nothing ahead of it. */
START_TEST(kernels_start_early_where_the_policy_says_so)
{
	run_early("QSHIM_SET=tune.budget_ms=0;default.action=fp8;engine.early=never");
	ck_assert_double_eq(printed(&outcome, "eager"), 0);
	ck_assert_double_eq(printed(&outcome, "captured"), 0);
	run_early("QSHIM_SET=tune.budget_ms=0;default.action=fp8;engine.early=always");
	ck_assert_double_eq(printed(&outcome, "eager"), printed(&outcome, "launches"));
	ck_assert_double_eq(printed(&outcome, "captured"), 1);
}
END_TEST

/* What the driver translates from older code does not wait for the work ahead of it. */
START_TEST(kernels_compiled_for_older_devices_do_not_start_early)
{
	const char *const env[] = {fp8[0], "SOFTCUDA_PTX=89", NULL};
	run_scene(&outcome, SHIMMED, env, "early", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_uint_eq(total_replaced(&outcome), 2);
	ck_assert_double_eq(printed(&outcome, "eager"), 0);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("graphs");
	TCase *tcase = tcase_create("capture");
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, warm_capture_is_served_and_replays_with_new_inputs);
	tcase_add_loop_test(tcase, graphs_from_one_stream_replay_beside_each_other, 0, SEEDS);
	tcase_add_loop_test(tcase, eager_products_do_not_disturb_a_replay, 0, SEEDS);
	tcase_add_loop_test(tcase, branches_of_a_capture_do_not_disturb_each_other, 0, SEEDS);
	tcase_add_test(tcase, scratch_of_destroyed_graphs_is_used_again);
	tcase_add_test(tcase, first_product_of_a_context_does_not_invalidate_a_capture_elsewhere);
	tcase_add_test(tcase, growing_scratch_does_not_invalidate_a_capture_elsewhere);
	tcase_add_loop_test(tcase, live_graph_keeps_its_scratch_when_eager_work_grows, 0,
	                    SEEDS / 3);
	tcase_add_test(tcase, kernels_start_early_except_in_a_graph);
	tcase_add_test(tcase, kernels_start_early_where_the_policy_says_so);
	tcase_add_test(tcase, kernels_compiled_for_older_devices_do_not_start_early);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
