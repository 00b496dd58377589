/* A quantised operand is used again only while its source is known unchanged: products that follow
 * each other share one, and whatever comes between two of them makes the second see what is there.
 * The operand is B of the product watched: 128 x 48, written by each of the ways in turn. */
#include "child.h"
#include "product.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define LEAST_DB 26.0
#define ROWS     128
#define COLUMNS  48

static const struct product watched = {
        .name = "watched", .ta = CUBLAS_OP_T, .m = 64, .n = COLUMNS, .k = ROWS};
/* Its D has the shape of the watched product's B. */
static const struct product writer = {
        .name = "writer", .ta = CUBLAS_OP_T, .m = ROWS, .n = COLUMNS, .k = 64};

static struct session session;
static struct made x, w;

static void call(struct made *made)
{
	must((int)product_call(made, &session), "product");
}

static size_t bytes(void)
{
	return x.size_b * sizeof(uint16_t);
}

/* ---- ways to write the operand; each leaves its host values in x.b ------------------------------
 */

static void by_host_copy(void)
{
	product_refill(&x, 7);
}

static void by_memset(void)
{
	must((int)cudaMemsetAsync(x.db, 0, bytes(), session.stream), "memset");
	memset(x.b, 0, x.size_b * sizeof *x.b);
}

/* Another product's output. Its host values are fetched at the end (take_over): a copy in between
 * would be one more thing that ends the sharing. */
static void by_product(void)
{
	w.dd = x.db;
	call(&w);
}

static void take_over(void)
{
	if (w.dd != x.db)
		return;
	product_fetch(&w);
	memcpy(x.b, w.d, x.size_b * sizeof *x.b);
}

static void *product_in_thread(void *unused)
{
	(void)unused;
	must((int)cudaSetDevice(0), "device");
	by_product();
	return NULL;
}

static void by_product_in_another_thread(void)
{
	pthread_t thread;
	must(pthread_create(&thread, NULL, product_in_thread, NULL), "thread");
	must(pthread_join(thread, NULL), "join");
}

static void by_device_copy(void)
{
	void *other = NULL;
	must((int)cudaMalloc(&other, bytes()), "malloc");
	must((int)cudaMemsetAsync(other, 0, bytes(), session.stream), "memset");
	must((int)cudaMemcpyAsync(x.db, other, bytes(), cudaMemcpyDeviceToDevice, session.stream),
	     "copy");
	memset(x.b, 0, x.size_b * sizeof *x.b);
}

/* The end of the first product is known to the host, and a writer that no call announces (a network
 * card) follows. Device memory is host memory here. */
static void by_nobody_seen(void)
{
	/* by look-up, as the real runtime library has it */
	void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	int (*wait)(cudaStream_t) = (int (*)(cudaStream_t))dlsym(driver, "cuStreamSynchronize");
	must(wait(session.stream), "synchronise");
	memset(x.db, 0, bytes());
	memset(x.b, 0, x.size_b * sizeof *x.b);
}

static void by_graph(void)
{
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	must((int)cudaStreamBeginCapture(session.stream, cudaStreamCaptureModeRelaxed), "begin");
	must((int)cudaMemsetAsync(x.db, 0, bytes(), session.stream), "memset");
	must((int)cudaStreamEndCapture(session.stream, &graph), "end");
	must((int)cudaGraphInstantiate(&exec, graph, 0), "instantiate");
	call(&x); /* so that only the launch is between this product and the next */
	must((int)cudaGraphLaunch(exec, session.stream), "launch");
	memset(x.b, 0, x.size_b * sizeof *x.b);
}

static const struct way {
	const char *name;
	void (*write)(void);
	bool zero; /* the product is then zero, which has no decibels */
} ways[] = {
        {"host copy", by_host_copy, false},
        {"memset", by_memset, true},
        {"product", by_product, false},
        {"product in another thread", by_product_in_another_thread, false},
        {"device copy", by_device_copy, true},
        {"unseen writer after a wait", by_nobody_seen, true},
        {"graph", by_graph, true},
};

#define WAYS ((int)(sizeof ways / sizeof *ways))

static void open_all(void)
{
	session_open(&session);
	product_make(&x, &watched, 1);
	product_make(&w, &writer, 2);
}

static int scene_write(int argc, char **argv)
{
	double most = 0;
	if (argc != 1)
		return 2;
	open_all();
	call(&x);
	call(&x);
	ways[atoi(argv[0])].write();
	call(&x);
	take_over();
	product_fetch(&x);
	for (size_t i = 0; i < x.size_d; i++)
		most = x.d[i] > most ? x.d[i] : -x.d[i] > most ? -x.d[i] : most;
	printf("sqnr %f\nmost %f\n", product_sqnr(&x), most);
	return 0;
}

/* The product again and again with `between` in between. */
static int scene_repeat(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	open_all();
	for (int i = 0; i < 3; i++) {
		call(&x);
		if (!strcmp(argv[0], "memset"))
			must((int)cudaMemsetAsync(w.db, 0, 2, session.stream), "memset");
	}
	product_fetch(&x);
	printf("sqnr %f\n", product_sqnr(&x));
	return 0;
}

/* dgrad, then wgrad, of one dY, three times, something else after each pair. */
static int scene_backward(int argc, char **argv)
{
	static const struct product dgrad = {.name = "dgrad", .m = 64, .n = 48, .k = 128};
	static const struct product wgrad = {
	        .name = "wgrad", .tb = CUBLAS_OP_T, .m = 64, .n = 128, .k = 48};
	struct made first, second;
	(void)argc, (void)argv;
	session_open(&session);
	product_make(&first, &dgrad, 1);
	product_make(&second, &wgrad, 2);
	second.db = first.db; /* 128 x 48 both times */
	memcpy(second.b, first.b, second.size_b * sizeof *second.b);
	for (int i = 0; i < 3; i++) {
		call(&first);
		call(&second);
		must((int)cudaMemsetAsync(first.dc ? first.dc : first.da, 0, 0, session.stream),
		     "memset");
	}
	product_fetch(&first);
	product_fetch(&second);
	double worst = product_sqnr(&first), other = product_sqnr(&second);
	printf("sqnr %f\n", worst < other ? worst : other);
	return 0;
}

const struct scene scenes[] = {
        {"write", scene_write},
        {"repeat", scene_repeat},
        {"backward", scene_backward},
        {NULL, NULL},
};

/* ---- tests --------------------------------------------------------------------------------------
 */

#define SET "QSHIM_SET=tune.budget_ms=0;default.action=fp8"

static struct outcome outcome;

static void run(const char *set, const char *scene, const char *argument)
{
	const char *const env[] = {set, "QSHIM_LOG=info", "QSHIM_QUIET=1", NULL};
	run_scene(&outcome, SHIMMED, env, scene, argument, NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %s", outcome.exit, outcome.err);
}

static void expect_operands(unsigned made, unsigned reused)
{
	char line[96];
	snprintf(line, sizeof line, "operands: %u quantised, %u used again", made, reused);
	ck_assert_msg(strstr(outcome.err, line), "not '%s': %s", line, outcome.err);
}

static void expect_current(const struct way *way)
{
	if (way->zero)
		ck_assert_msg(printed(&outcome, "most") == 0, "%s: stale", way->name);
	else
		ck_assert_msg(printed(&outcome, "sqnr") >= LEAST_DB, "%s: %.1f dB", way->name,
		              printed(&outcome, "sqnr"));
}

START_TEST(whatever_writes_an_operand_is_seen)
{
	char which[16];
	snprintf(which, sizeof which, "%d", _i);
	run(SET, "write", which);
	expect_current(&ways[_i]);
	ck_assert_uint_ge(total_replaced(&outcome), 3);
}
END_TEST

/* The writer is the program's own call: it has no epoch of ours but the bump after it. */
START_TEST(passed_products_that_write_an_operand_are_seen)
{
	run("QSHIM_SET=tune.budget_ms=0;default.action=fp8;rule w.m=128;rule w.action=native",
	    "write", _i == 0 ? "2" : "3");
	expect_current(&ways[2 + _i]);
}
END_TEST

/* The bf16 engine where it wins, the program's own call where it does not. */
START_TEST(bf16_products_that_write_an_operand_are_seen)
{
	run("QSHIM_SET=tune.min_gain=0%;default.action=fp8;rule w.m=128;rule w.action=bf16",
	    "write", _i == 0 ? "2" : "3");
	expect_current(&ways[2 + _i]);
}
END_TEST

START_TEST(products_that_follow_each_other_share_their_operands)
{
	run(SET, "repeat", "nothing");
	ck_assert_double_ge(printed(&outcome, "sqnr"), LEAST_DB);
	expect_operands(2, 4);
}
END_TEST

START_TEST(any_submission_in_between_ends_the_sharing)
{
	run(SET, "repeat", "memset");
	expect_operands(6, 0);
}
END_TEST

START_TEST(validity_each_shares_nothing)
{
	run(SET ";cache.validity=each", "repeat", "nothing");
	ck_assert_double_ge(printed(&outcome, "sqnr"), LEAST_DB);
	expect_operands(6, 0);
}
END_TEST

/* The first pair makes four and learns; each later pair makes W, dY both ways, and X. */
START_TEST(dy_is_quantised_once_for_dgrad_and_wgrad)
{
	run(SET, "backward", NULL);
	ck_assert_double_ge(printed(&outcome, "sqnr"), LEAST_DB);
	expect_operands(4 + 3 + 3, 2);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("stale operands");
	TCase *tcase = tcase_create("stale");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, whatever_writes_an_operand_is_seen, 0, WAYS);
	tcase_add_loop_test(tcase, passed_products_that_write_an_operand_are_seen, 0, 2);
	tcase_add_loop_test(tcase, bf16_products_that_write_an_operand_are_seen, 0, 2);
	tcase_add_test(tcase, products_that_follow_each_other_share_their_operands);
	tcase_add_test(tcase, any_submission_in_between_ends_the_sharing);
	tcase_add_test(tcase, validity_each_shares_nothing);
	tcase_add_test(tcase, dy_is_quantised_once_for_dgrad_and_wgrad);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
