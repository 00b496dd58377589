/* Kept copies where streams and graphs are not ordered with each other, only with what they share:
 * what is checked, switched off or freed for the sake of one graph happens in a stream that knows
 * nothing of the others. */
#include "child.h"
#include "product.h"
#include "step.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softcuda/softcuda.h"

#define OUT    128
#define IN     256
#define BYTES  (OUT * IN * sizeof(uint16_t))
#define WARMUP 6 /* calls until a copy is made and no longer doubted */

static const struct product shape = {.ta = CUBLAS_OP_T, .m = OUT, .n = 8, .k = IN};

static struct session session;
static struct made x;

static void open_all(void)
{
	session_open(&session);
	product_make(&x, &shape, 1);
	other_product(&session);
	step_begin();
	for (int i = 0; i < WARMUP; i++)
		step_call(&x, &session);
}

static cudaStream_t new_stream(void)
{
	cudaStream_t stream;
	must((int)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
	return stream;
}

/* What comes after this in `later` waits for what is in `earlier` now. */
static void order(cudaStream_t earlier, cudaStream_t later)
{
	cudaEvent_t event;
	must((int)cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
	must((int)cudaEventRecord(event, earlier), "record");
	must((int)cudaStreamWaitEvent(later, event, 0), "wait");
}

static void begin(cudaStream_t stream)
{
	must((int)cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "begin");
}

static cudaGraphExec_t end(cudaStream_t stream)
{
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	must((int)cudaStreamEndCapture(stream, &graph), "end");
	must((int)cudaGraphInstantiate(&executable, graph, 0), "instantiate");
	must((int)cudaGraphDestroy(graph), "destroy");
	return executable;
}

static cudaGraphExec_t capture_product(void)
{
	begin(session.stream);
	step_submit(&x, &session);
	return end(session.stream);
}

/* A graph that has nothing to do with any product. */
static cudaGraphExec_t capture_fill(void)
{
	void *memory;
	must((int)cudaMalloc(&memory, 256), "malloc");
	begin(session.stream);
	must((int)cudaMemsetAsync(memory, 0, 256, session.stream), "memset");
	return end(session.stream);
}

static void launch(cudaGraphExec_t executable, cudaStream_t stream)
{
	must((int)cudaGraphLaunch(executable, stream), "launch");
}

static void nothing(void *unused)
{
	(void)unused;
}

/* What is submitted to the stream from now on does not run before release(). */
static void hold(cudaStream_t stream)
{
	softcuda_set("hold_host", 1);
	must((int)cudaLaunchHostFunc(stream, nothing, NULL), "host function");
}

static void release(void)
{
	softcuda_set("hold_host", 0);
}

#define CONTENTS 3

/* Made before anything is held: making them waits for the device. */
static struct made contents[CONTENTS];

static void make_contents(void)
{
	for (uint64_t i = 0; i < CONTENTS; i++)
		product_make(&contents[i], &x.p, 100 + i);
}

static void write_all(int which, cudaStream_t stream)
{
	memcpy(x.a, contents[which].a, x.size_a * sizeof *x.a);
	must((int)cudaMemcpyAsync(x.da, contents[which].da, BYTES, cudaMemcpyDeviceToDevice,
	                          stream),
	     "copy");
}

/* One row of 128, far from where the product's kernel happens to look. */
static void write_a_row(cudaStream_t stream)
{
	const size_t row = 77 * IN;
	must((int)cudaMemsetAsync((uint16_t *)x.da + row, 0x41, IN * sizeof(uint16_t), stream),
	     "memset");
	for (size_t i = row; i < row + IN; i++)
		x.a[i] = 0x1.82p3; /* 0x4141 */
}

/* ---- scenes -------------------------------------------------------------------------------------
 */

/* The weight is written behind work that takes long; meanwhile another graph is launched, often, in
 * a stream that does not wait for it; the graph with the product does. */
static int scene_elsewhere(int argc, char **argv)
{
	(void)argc, (void)argv;
	open_all();
	cudaGraphExec_t product = capture_product(), other = capture_fill();
	cudaStream_t writer = new_stream(), side = new_stream();
	product_poison(&x);
	hold(writer);
	write_a_row(writer);
	for (int i = 0; i < 4; i++)
		launch(other, side);
	must((int)cudaStreamSynchronize(side), "synchronise");
	release();
	order(writer, session.stream);
	launch(product, session.stream);
	step_print(&x);
	return 0;
}

/* The copy is dropped while a check that makes it anew has not run yet, and switched off in a
 * stream that does not wait for this check. */
static int scene_dropped(int argc, char **argv)
{
	struct made second;
	struct session beside = {0};
	(void)argc, (void)argv;
	open_all();
	cudaGraphExec_t product = capture_product(), other = capture_fill();
	cudaStream_t side = new_stream();
	session_open(&beside);
	session_use(&beside, new_stream());
	product_make(&second, &shape, 9);
	second.da = x.da;
	make_contents();
	write_all(0, session.stream);
	step_call(&x, &session);
	write_all(1, session.stream);
	step_submit(&x, &session); /* its check will find the second change */
	cudaEvent_t event;
	must((int)cudaEventCreate(&event), "event");
	must((int)cudaEventRecord(event, session.stream), "record");
	hold(session.stream);
	write_all(2, session.stream);
	step_submit(&x, &session);
	must((int)cudaEventSynchronize(event), "synchronise");
	order(session.stream, beside.stream);
	step_submit(&second, &beside); /* finds that the copy changes too often */
	launch(other, side);
	must((int)cudaStreamSynchronize(side), "synchronise");
	release();
	order(beside.stream, session.stream);
	product_fetch(&x);
	product_poison(&x);
	write_a_row(session.stream);
	launch(product, session.stream);
	step_print(&x);
	return 0;
}

#define WEIGHTS 8
#define LONG    300 /* calls after which what was not used meanwhile makes room */

/* A copy is dropped under the graph that holds it, others fill what room there is, and then one
 * more weight is used, and only that. */
static int scene_full(int argc, char **argv)
{
	static const struct product large = {.ta = CUBLAS_OP_T, .m = 512, .n = 1, .k = 1024};
	struct made made[WEIGHTS];
	(void)argc, (void)argv;
	session_open(&session);
	for (uint64_t i = 0; i < WEIGHTS; i++)
		product_make(&made[i], &large, i);
	other_product(&session);
	step_begin();
	for (int i = 0; i < WARMUP; i++)
		step_call(&made[0], &session);
	begin(session.stream);
	step_submit(&made[0], &session);
	end(session.stream);
	for (int i = 0; i < WARMUP; i++) {
		product_refill(&made[0], 50 + (uint64_t)i);
		step_call(&made[0], &session);
	}
	for (int i = 0; i < WARMUP; i++)
		for (int j = 1; j < WEIGHTS - 1; j++)
			step_call(&made[j], &session);
	for (int i = 0; i < LONG; i++) {
		step_submit(&made[WEIGHTS - 1], &session);
		product_fetch(&made[WEIGHTS - 1]);
	}
	step_begin();
	step_call(&made[WEIGHTS - 1], &session);
	return 0;
}

#define PERIOD 7

/* A weight that stays for some uses and then changes, for ever. */
static int scene_seasons(int argc, char **argv)
{
	(void)argc, (void)argv;
	open_all();
	const long before = softcuda_get("live");
	for (int i = 0; i < 3000; i++) {
		if (i % PERIOD == 0)
			product_refill(&x, 100 + (uint64_t)i);
		step_submit(&x, &session);
		product_fetch(&x);
	}
	printf("growth %ld\n", softcuda_get("live") - before);
	return 0;
}

#define SHAPES 12

/* Launches fail at the first use of each of many weights, and never again. */
static int scene_failures(int argc, char **argv)
{
	struct product shapes[SHAPES];
	struct made made[SHAPES];
	(void)argc, (void)argv;
	session_open(&session);
	for (int i = 0; i < SHAPES; i++) {
		shapes[i] = shape;
		shapes[i].m += 8 * i;
		product_make(&made[i], &shapes[i], 1);
	}
	other_product(&session);
	softcuda_set("fail_launch", 701);
	for (int i = 0; i < SHAPES; i++)
		step_submit(&made[i], &session);
	softcuda_set("fail_launch", 0);
	for (int i = 0; i < LONG * SHAPES; i++) {
		step_submit(&made[i % SHAPES], &session);
		product_fetch(&made[i % SHAPES]);
	}
	step_begin();
	for (int i = 0; i < SHAPES; i++)
		step_call(&made[i], &session);
	return 0;
}

const struct scene scenes[] = {
        {"elsewhere", scene_elsewhere}, {"dropped", scene_dropped},   {"full", scene_full},
        {"seasons", scene_seasons},     {"failures", scene_failures}, {NULL, NULL},
};

/* ---- tests --------------------------------------------------------------------------------------
 */

static struct outcome outcome;

static void run(const char *action, const char *more, const char *scene)
{
	char set[512];
	snprintf(set, sizeof set,
	         "QSHIM_SET=tune.budget_ms=0" OTHER ";default.action=%s;cache.validity=tracked%s",
	         action, more);
	const char *const env[] = {set, "QSHIM_LOG=cache", "QSHIM_QUIET=1", NULL};
	run_scene(&outcome, SHIMMED, env, scene, NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %s", outcome.exit, outcome.err);
}

static int count(const char *text)
{
	int found = 0;
	for (const char *at = outcome.err; (at = strstr(at, text)); at++)
		found++;
	return found;
}

static const char *const actions[] = {"nf4", "fp8"};

START_TEST(a_graph_that_does_not_use_a_weight_says_nothing_about_it)
{
	run(actions[_i], "", "elsewhere");
	ck_assert_double_ge(step_at(&outcome, WARMUP).sqnr, 18.5);
}
END_TEST

START_TEST(a_copy_that_is_switched_off_stays_off)
{
	run(actions[_i], "", "dropped");
	ck_assert_int_eq(count("is dropped: changing"), 1);
	ck_assert_double_ge(step_at(&outcome, WARMUP + 1).sqnr, 18.5);
}
END_TEST

/* 68 MiB are scratch, of the stream and of the graph, half a MiB is one copy. */
START_TEST(memory_that_a_graph_holds_is_not_waited_for)
{
	run("fp8", ";cache.max_mib=72", "full");
	ck_assert_int_eq(count("is dropped"), 1);
	ck_assert_int_ge(count("for a weight on device"), 1);
	ck_assert_int_eq(step_at(&outcome, WARMUP * WEIGHTS).uses[FORM_FP8_TILES], 1);
}
END_TEST

START_TEST(copies_that_are_made_and_dropped_again_and_again_take_the_memory_of_few)
{
	run(actions[_i], "", "seasons");
	ck_assert_int_ge(count("is dropped: changing"), 2);
	ck_assert_double_le(printed(&outcome, "growth"), 0);
}
END_TEST

START_TEST(launches_that_failed_once_do_not_end_admission)
{
	run("fp8", "", "failures");
	for (int i = 0; i < SHAPES; i++)
		ck_assert_msg(step_at(&outcome, i).uses[FORM_FP8_TILES] == 1, "weight %d", i);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("kept weights, streams apart");
	TCase *tcase = tcase_create("streams");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, a_graph_that_does_not_use_a_weight_says_nothing_about_it, 0, 2);
	tcase_add_loop_test(tcase, a_copy_that_is_switched_off_stays_off, 0, 2);
	tcase_add_test(tcase, memory_that_a_graph_holds_is_not_waited_for);
	tcase_add_loop_test(tcase,
	                    copies_that_are_made_and_dropped_again_and_again_take_the_memory_of_few,
	                    0, 2);
	tcase_add_test(tcase, launches_that_failed_once_do_not_end_admission);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
