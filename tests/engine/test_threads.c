/* fp8 products from many threads, streams, devices and processes: scratch and plans are shared by
 * all of them, so results are checked while calls overlap, over many orders of the emulation's
 * streams. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "softcuda/softcuda.h"

#define N_ CUBLAS_OP_N
#define T_ CUBLAS_OP_T

#define LEAST_DB 26.0
#define SEEDS    10
#define THREADS  8
#define ROUNDS   12
#define STREAMS  6
#define FORKS    8

static const struct product shapes[] = {
        {.ta = T_, .m = 64, .n = 24, .k = 96},
        {.ta = N_, .m = 32, .n = 40, .k = 64},
        {.lt = true, .ta = T_, .m = 64, .n = 24, .k = 96, .epilogue = CUBLASLT_EPILOGUE_BIAS},
};

static double worst = INFINITY, best = -INFINITY;
static pthread_mutex_t verdict_lock = PTHREAD_MUTEX_INITIALIZER;

static void judge(struct made *made)
{
	product_fetch(made);
	double sqnr = product_sqnr(made);
	pthread_mutex_lock(&verdict_lock);
	worst = sqnr < worst ? sqnr : worst;
	best = sqnr > best ? sqnr : best;
	pthread_mutex_unlock(&verdict_lock);
}

static int verdict(void)
{
	printf("worst %.3f\nbest %.3f\n", worst, best);
	return 0;
}

static void call(struct made *made, const struct session *session)
{
	must((int)product_call(made, session), "product");
}

/* ---- threads ----------------------------------------------------------------------------------
 */

static void *products_of_thread(void *argument)
{
	uint64_t seed = (uint64_t)(uintptr_t)argument;
	struct session session;
	struct made made[3];
	must(cudaSetDevice(0), "cudaSetDevice");
	session_open(&session);
	for (int i = 0; i < 3; i++)
		product_make(&made[i], &shapes[i], seed * 100 + (uint64_t)i);
	for (int round = 0; round < ROUNDS; round++) {
		for (int i = 0; i < 3; i++)
			call(&made[i], &session);
		if (round % 4 == 3)
			for (int i = 0; i < 3; i++)
				judge(&made[i]);
	}
	session_close(&session);
	return NULL;
}

static int threads(int argc, char **argv)
{
	pthread_t thread[THREADS];
	(void)argc, (void)argv;
	for (uintptr_t i = 0; i < THREADS; i++)
		must(pthread_create(&thread[i], NULL, products_of_thread, (void *)(i + 1)),
		     "thread");
	for (int i = 0; i < THREADS; i++)
		must(pthread_join(thread[i], NULL), "join");
	return verdict();
}

/* What a new thread is given. */
struct job {
	struct session session;
	struct made made;
};

/* The first thing this thread does with CUDA is a product, and then another. */
static void *products_without_context(void *argument)
{
	struct job *job = argument;
	call(&job->made, &job->session);
	judge(&job->made);
	product_poison(&job->made);
	call(&job->made, &job->session);
	judge(&job->made);
	return NULL;
}

static int thread_without_context(int argc, char **argv)
{
	struct job job;
	pthread_t thread;
	(void)argc, (void)argv;
	session_open(&job.session);
	product_make(&job.made, &shapes[0], 1);
	must(pthread_create(&thread, NULL, products_without_context, &job), "thread");
	must(pthread_join(thread, NULL), "join");
	return verdict();
}

/* ---- streams ----------------------------------------------------------------------------------
 */

/* Nothing is waited for until every stream has several products in flight. */
static int streams(int argc, char **argv)
{
	struct session session;
	struct made made[STREAMS][2];
	(void)argc, (void)argv;
	session_open(&session);
	for (int i = 0; i < STREAMS; i++)
		for (int j = 0; j < 2; j++)
			product_make(&made[i][j], &shapes[0], (uint64_t)(2 * i + j));
	for (int i = 0; i < STREAMS; i++) {
		cudaStream_t stream;
		must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
		session_use(&session, stream);
		call(&made[i][0], &session);
		call(&made[i][1], &session);
	}
	for (int i = 0; i < STREAMS; i++)
		for (int j = 0; j < 2; j++)
			judge(&made[i][j]);
	return verdict();
}

/* More streams than there are blocks of scratch, each destroyed with its product in flight. */
static int streams_come_and_go(int argc, char **argv)
{
	struct session session;
	struct made made;
	(void)argc, (void)argv;
	session_open(&session);
	product_make(&made, &shapes[0], 1);
	cudaStream_t own = session.stream;
	for (int i = 0; i < 200; i++) {
		cudaStream_t stream;
		must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
		session_use(&session, stream);
		call(&made, &session);
		must(cudaStreamDestroy(stream), "destroy");
		if (i % 20 == 19) {
			judge(&made);
			product_poison(&made);
		}
	}
	session_use(&session, own);
	return verdict();
}

/* ---- devices ----------------------------------------------------------------------------------
 */

static int devices(int argc, char **argv)
{
	struct session session[2];
	struct made made[2];
	(void)argc, (void)argv;
	for (int i = 0; i < 2; i++) {
		must(cudaSetDevice(i), "cudaSetDevice");
		session_open(&session[i]);
		product_make(&made[i], &shapes[0], (uint64_t)i);
	}
	for (int round = 0; round < 4; round++)
		for (int i = 0; i < 2; i++) {
			must(cudaSetDevice(i), "cudaSetDevice");
			product_poison(&made[i]);
			call(&made[i], &session[i]);
			judge(&made[i]);
		}
	return verdict();
}

/* ---- fork -------------------------------------------------------------------------------------
 */

static _Atomic bool stop;

static void *products_until_stopped(void *argument)
{
	(void)argument;
	while (!atomic_load(&stop))
		products_of_thread((void *)7);
	return NULL;
}

/* The child must neither hang nor write; 0 = it got the driver's own refusal. */
static int in_child(struct made *made, const struct session *session)
{
	alarm(60);
	return product_call(made, session) == CUBLAS_STATUS_SUCCESS;
}

static int fork_beside_products(int argc, char **argv)
{
	struct session session;
	struct made made;
	pthread_t thread;
	int failed = 0;
	(void)argc, (void)argv;
	session_open(&session);
	product_make(&made, &shapes[0], 1);
	call(&made, &session); /* the shim has started before the first fork */
	must(pthread_create(&thread, NULL, products_until_stopped, NULL), "thread");
	for (int i = 0; i < FORKS; i++) {
		usleep(3000);
		pid_t child = fork();
		if (!child)
			_exit(in_child(&made, &session));
		int status = -1;
		waitpid(child, &status, 0);
		failed += status != 0;
	}
	atomic_store(&stop, true);
	must(pthread_join(thread, NULL), "join");
	call(&made, &session);
	judge(&made);
	printf("failed %d\n", failed);
	return verdict();
}

/* As a data loader's worker does: it computes nothing on the GPU. */
static int fork_without_products(int argc, char **argv)
{
	struct session session;
	struct made made;
	(void)argc, (void)argv;
	session_open(&session);
	product_make(&made, &shapes[0], 1);
	call(&made, &session);
	pid_t child = fork();
	if (!child)
		exit(0);
	int status = -1;
	waitpid(child, &status, 0);
	judge(&made);
	printf("failed %d\n", status != 0);
	return verdict();
}

const struct scene scenes[] = {
        {"threads", threads},
        {"thread_without_context", thread_without_context},
        {"streams", streams},
        {"streams_come_and_go", streams_come_and_go},
        {"devices", devices},
        {"fork_beside_products", fork_beside_products},
        {"fork_without_products", fork_without_products},
        {NULL, NULL},
};

/* ---- tests ------------------------------------------------------------------------------------
 */

static struct outcome outcome;

static void all_right(const char *scene, int seed)
{
	char knob[64];
	snprintf(knob, sizeof knob, "SOFTCUDA_SEED=%d", seed);
	const char *const env[] = {
	        "QSHIM_SET=tune.budget_ms=0;default.action=fp8;cache.max_mib=50%", knob, NULL};
	run_scene(&outcome, SHIMMED, env, scene, NULL);
	ck_assert_msg(outcome.exit == 0, "%s, seed %d: exit %d: %.2000s", scene, seed, outcome.exit,
	              outcome.err);
	ck_assert_msg(printed(&outcome, "worst") >= LEAST_DB, "%s, seed %d: %.2f dB", scene, seed,
	              printed(&outcome, "worst"));
}

static void all_served(const char *scene, int seed, int calls)
{
	all_right(scene, seed);
	ck_assert_uint_eq(total_calls(&outcome), (uint64_t)calls);
	ck_assert_uint_eq(total_replaced(&outcome), (uint64_t)calls);
	ck_assert_double_lt(printed(&outcome, "best"), 45.0);
}

/* While one thread starts the shim, others' first calls pass uncounted: all but those are served.
 */
START_TEST(threads_share_plans_and_get_right_results)
{
	all_right("threads", _i);
	ck_assert_int_eq(outcome.counters, 3);
	ck_assert_uint_eq(total_replaced(&outcome), total_calls(&outcome));
	ck_assert_uint_ge(total_calls(&outcome), 3 * ROUNDS);
}
END_TEST

START_TEST(thread_without_a_context_is_looked_at_again)
{
	all_right("thread_without_context", _i);
	ck_assert_int_eq(decisions_with(&outcome, "context"), 1);
	ck_assert_uint_eq(only_counter(&outcome)->calls, 2);
	ck_assert_uint_eq(only_counter(&outcome)->late, 1);
	ck_assert_uint_eq(only_counter(&outcome)->replaced, 1);
}
END_TEST

START_TEST(streams_with_products_in_flight_do_not_disturb_each_other)
{
	all_served("streams", _i, 2 * STREAMS);
}
END_TEST

START_TEST(scratch_of_streams_that_are_gone_serves_new_ones)
{
	all_served("streams_come_and_go", _i, 200);
}
END_TEST

/* Each stream's scratch is 34 MiB, so eleven have room. Those that are gone make room in time. */
START_TEST(scratch_of_streams_that_are_gone_gives_way_at_the_limit)
{
	static const char *const env[] = {
	        "QSHIM_SET=tune.budget_ms=0;default.action=fp8;cache.max_mib=400", NULL};
	run_scene(&outcome, SHIMMED, env, "streams_come_and_go", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_double_ge(printed(&outcome, "worst"), LEAST_DB);
	ck_assert_uint_ge(total_replaced(&outcome), 22);
	ck_assert_uint_eq(total_replaced(&outcome) + total_late(&outcome), 200);
}
END_TEST

START_TEST(two_devices_are_served_each_with_its_own_memory)
{
	all_served("devices", _i, 8);
}
END_TEST

START_TEST(fork_beside_products_neither_hangs_nor_harms)
{
	all_right("fork_beside_products", _i);
	ck_assert_double_eq(printed(&outcome, "failed"), 0.0);
	ck_assert_uint_gt(total_replaced(&outcome), 0);
	for (int i = 0; i < outcome.decisions; i++)
		ck_assert_msg(!strcmp(outcome.decision[i].reason, "rule") ||
		                      !strcmp(outcome.decision[i].reason, "fork"),
		              "%s", outcome.decision[i].reason);
}
END_TEST

START_TEST(forked_worker_without_products_leaves_and_says_nothing)
{
	all_served("fork_without_products", 1, 1);
	ck_assert_double_eq(printed(&outcome, "failed"), 0.0);
	ck_assert_int_eq(outcome.logs, 1);
	ck_assert_int_eq(outcome.maps, 1);
	const char *notice = strstr(outcome.err, "qshim:");
	ck_assert_ptr_nonnull(notice);
	ck_assert_ptr_null(strstr(notice + 1, "qshim:"));
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("threads, streams, devices");
	TCase *tcase = tcase_create("concurrency");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, threads_share_plans_and_get_right_results, 0, 3);
	tcase_add_test(tcase, thread_without_a_context_is_looked_at_again);
	tcase_add_loop_test(tcase, streams_with_products_in_flight_do_not_disturb_each_other, 0,
	                    SEEDS);
	tcase_add_test(tcase, scratch_of_streams_that_are_gone_serves_new_ones);
	tcase_add_test(tcase, scratch_of_streams_that_are_gone_gives_way_at_the_limit);
	tcase_add_test(tcase, two_devices_are_served_each_with_its_own_memory);
	tcase_add_loop_test(tcase, fork_beside_products_neither_hangs_nor_harms, 0, 2);
	tcase_add_test(tcase, forked_worker_without_products_leaves_and_says_nothing);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
