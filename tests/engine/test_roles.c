/* Roles end to end: a few steps of training as PyTorch makes them, gradients on threads with its
 * names, and what the keys, the rules and the decision log say of each product. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_ CUBLAS_OP_N
#define T_ CUBLAS_OP_T

#define TOKENS  24
#define STEPS   4
#define THREADS 3  /* of each direction           */
#define ROUNDS  40 /* of each thread in the race  */

#define CHILD_CALLS 2000
#define MANY_STEPS  "120" /* in which steps become known */

/* ---- scenes -------------------------------------------------------------------------------------
 */

/* A layer of `in` to `out` features. */
struct linear {
	int in, out;
	bool conv1d;  /* stored by inputs, as GPT-2 does   */
	void *weight; /* device                            */
};

/* A block of GPT-2 and the head, whose weight the embedding shares: rows of it are gathered, which
 * is no product. */
static struct linear gpt2[] = {
        {.in = 32, .out = 96, .conv1d = true},
        {.in = 32, .out = 48, .conv1d = true},
        {.in = 48, .out = 128, .conv1d = true},
        {.in = 128, .out = 64, .conv1d = true},
        {.in = 64, .out = 160},
};
#define GPT2 ((int)(sizeof gpt2 / sizeof *gpt2))

static void *x, *y,
        *gradient; /* device: input, output and its gradient, what a backward product gives */

static void set_up(struct linear *model, int count)
{
	const size_t bytes = 65536;
	must(cudaMalloc(&x, bytes) || cudaMalloc(&y, bytes) || cudaMalloc(&gradient, bytes),
	     "memory");
	must(cudaMemset(x, 0, bytes) || cudaMemset(y, 0, bytes), "zero");
	for (int i = 0; i < count; i++)
		must(cudaMalloc(&model[i].weight, bytes) || cudaMemset(model[i].weight, 0, bytes),
		     "weight");
}

static int gemm(cublasHandle_t blas, cublasOperation_t ta, cublasOperation_t tb, int m, int n,
                int k, const void *a, const void *b, void *d)
{
	const float one = 1, zero = 0;
	return (int)cublasGemmEx(blas, ta, tb, m, n, k, &one, a, CUDA_R_16BF, ta == T_ ? k : m, b,
	                         CUDA_R_16BF, tb == T_ ? n : k, &zero, d, CUDA_R_16BF, m,
	                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

static int forward(cublasHandle_t blas, const struct linear *l)
{
	return gemm(blas, l->conv1d ? N_ : T_, N_, l->out, TOKENS, l->in, l->weight, x, y);
}

static int dgrad(cublasHandle_t blas, const struct linear *l)
{
	return gemm(blas, l->conv1d ? T_ : N_, N_, l->in, TOKENS, l->out, l->weight, y, gradient);
}

/* dW of a Conv1D is X' dY with dY first, of a Linear with X first. */
static int wgrad(cublasHandle_t blas, const struct linear *l)
{
	if (l->conv1d)
		return gemm(blas, N_, T_, l->out, l->in, TOKENS, y, x, gradient);
	return gemm(blas, N_, T_, l->in, l->out, TOKENS, x, y, gradient);
}

/* What a backward thread is given. */
struct backward {
	const struct linear *model;
	int count;
	int rounds;
};

static void *backward(void *argument)
{
	const struct backward *work = argument;
	cublasHandle_t blas;
	pthread_setname_np(pthread_self(), "pt_autograd_0");
	must(cudaSetDevice(0), "cudaSetDevice");
	must((int)cublasCreate(&blas), "cublasCreate");
	for (int round = 0; round < work->rounds; round++)
		for (int i = work->count - 1; i >= 0; i--) {
			must(dgrad(blas, &work->model[i]), "dX");
			must(wgrad(blas, &work->model[i]), "dW");
		}
	must(cudaDeviceSynchronize(), "synchronise");
	must((int)cublasDestroy(blas), "cublasDestroy");
	return NULL;
}

static void backward_pass(const struct linear *model, int count)
{
	struct backward work = {model, count, 1};
	pthread_t thread;
	must(pthread_create(&thread, NULL, backward, &work), "thread");
	must(pthread_join(thread, NULL), "join");
}

static void train(cublasHandle_t blas, const struct linear *model, int count, int steps)
{
	for (int step = 0; step < steps; step++) {
		for (int i = 0; i < count; i++)
			must(forward(blas, &model[i]), "forward product");
		backward_pass(model, count);
	}
}

/* Argument: the number of steps. */
static int gpt2_training(int argc, char **argv)
{
	cublasHandle_t blas;
	must((int)cublasCreate(&blas), "cublasCreate");
	set_up(gpt2, GPT2);
	train(blas, gpt2, GPT2, argc ? atoi(argv[0]) : STEPS);
	return 0;
}

/* More matrices than have a number, in no order that recurs, and then one of them on and on. */
static int many_weights(int argc, char **argv)
{
	struct linear l = {.in = 16, .out = 16};
	cublasHandle_t blas;
	uint64_t random = 1;
	char *memory = NULL;
	(void)argc, (void)argv;
	must((int)cublasCreate(&blas), "cublasCreate");
	set_up(&l, 1);
	must(cudaMalloc((void **)&memory, QS_ORDINALS_MAX * 16 + 4096), "memory");
	for (int i = 0; i < QS_ORDINALS_MAX + 4096; i++) {
		random = random * 6364136223846793005 + 1442695040888963407;
		const int out = i < QS_ORDINALS_MAX ? 8 + (int)(random >> 60) * 8 : 16;
		const int weight = i < QS_ORDINALS_MAX ? i : 0;
		must(gemm(blas, T_, N_, out, 3, 16, memory + 16 * weight, x, y), "product");
	}
	return 0;
}

/* The embedding as a product with one-hot rows, and the head, with one weight. */
static int one_hot(int argc, char **argv)
{
	struct linear tied[] = {{.in = 160, .out = 64, .conv1d = true}, {.in = 64, .out = 160}};
	cublasHandle_t blas;
	(void)argc, (void)argv;
	must((int)cublasCreate(&blas), "cublasCreate");
	set_up(tied, 2);
	tied[0].weight = tied[1].weight;
	train(blas, tied, 2, STEPS);
	return 0;
}

/* The child's driver refuses; what its products are taken for is seen in the counters. */
static int forward_in_child(cublasHandle_t blas, const struct linear *l, int calls)
{
	int status = 0, made = 0;
	pid_t pid = fork();
	if (!pid) {
		alarm(60);
		for (int i = 0; i < calls; i++)
			made += forward(blas, l) == (int)CUBLAS_STATUS_SUCCESS;
		_exit(made > 0);
	}
	waitpid(pid, &status, 0);
	return WEXITSTATUS(status);
}

static int child(int argc, char **argv)
{
	cublasHandle_t blas;
	(void)argc, (void)argv;
	must((int)cublasCreate(&blas), "cublasCreate");
	set_up(gpt2, 1);
	train(blas, gpt2, 1, 2);
	return forward_in_child(blas, &gpt2[0], 1);
}

/* The parent's second weight is the only one of the child, which makes enough products for steps to
 * become known. */
static int child_numbers(int argc, char **argv)
{
	struct linear model[] = {{.in = 32, .out = 96}, {.in = 32, .out = 48}};
	cublasHandle_t blas;
	(void)argc, (void)argv;
	must((int)cublasCreate(&blas), "cublasCreate");
	set_up(model, 2);
	for (int i = 0; i < 2; i++)
		must(forward(blas, &model[i]), "forward product");
	return forward_in_child(blas, &model[1], CHILD_CALLS);
}

static void *forward_thread(void *argument)
{
	cublasHandle_t blas;
	(void)argument;
	must(cudaSetDevice(0), "cudaSetDevice");
	must((int)cublasCreate(&blas), "cublasCreate");
	for (int round = 0; round < ROUNDS; round++)
		for (int i = 0; i < GPT2; i++)
			must(forward(blas, &gpt2[i]), "forward product");
	must(cudaDeviceSynchronize(), "synchronise");
	return NULL;
}

/* Both directions at once, from several threads; then two steps alone. */
static int race(int argc, char **argv)
{
	struct backward work = {gpt2, GPT2, ROUNDS};
	pthread_t thread[2 * THREADS];
	cublasHandle_t blas;
	(void)argc, (void)argv;
	must((int)cublasCreate(&blas), "cublasCreate");
	set_up(gpt2, GPT2);
	must(forward(blas, &gpt2[0]), "first product"); /* starts the library */
	for (int i = 0; i < 2 * THREADS; i++)
		must(pthread_create(&thread[i], NULL, i % 2 ? backward : forward_thread, &work),
		     "thread");
	for (int i = 0; i < 2 * THREADS; i++)
		must(pthread_join(thread[i], NULL), "join");
	train(blas, gpt2, GPT2, 2);
	return 0;
}

const struct scene scenes[] = {
        {"gpt2", gpt2_training},
        {"one_hot", one_hot},
        {"child", child},
        {"child_numbers", child_numbers},
        {"race", race},
        {"many_weights", many_weights},
        {NULL, NULL},
};

/* ---- tests --------------------------------------------------------------------------------------
 */

static struct outcome outcome;

/* A rule for each role, and one for all products whose role is known and not wgrad. */
#define RULES                                                                                      \
	"QSHIM_SET=tune.budget_ms=0;rule f.role=fwd;rule f.action=native;rule d.role=dgrad;"       \
	"rule d.action=native;rule w.role=wgrad;rule w.action=native;rule known.role=!wgrad;"      \
	"rule known.action=native;rule sized.tokens=1..;rule sized.action=native;"                 \
	"default.action=native"

static void run(const char *scene)
{
	static const char *const env[] = {RULES, NULL};
	run_scene(&outcome, SHIMMED, env, scene, NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
}

/* Calls of the products with this text and role; role QS_ROLE_COUNT = any. */
static int calls_as(const char *key, enum qs_role role)
{
	uint64_t calls = 0;
	for (int i = 0; i < outcome.counters; i++)
		if (!strncmp(outcome.counter[i].key, key, strlen(key)) &&
		    (role == QS_ROLE_COUNT || outcome.counter[i].role == role))
			calls += outcome.counter[i].calls;
	return (int)calls;
}

static void text_of(char text[64], const char *op, int m, int n, int k)
{
	snprintf(text, 64, "%s m=%d n=%d k=%d ", op, m, n, k);
}

static int forward_as(const struct linear *l, enum qs_role role)
{
	char text[64];
	text_of(text, l->conv1d ? "NN" : "TN", l->out, TOKENS, l->in);
	return calls_as(text, role);
}

static int dgrad_as(const struct linear *l, enum qs_role role)
{
	char text[64];
	text_of(text, l->conv1d ? "TN" : "NN", l->in, TOKENS, l->out);
	return calls_as(text, role);
}

static int wgrad_as(const struct linear *l, enum qs_role role)
{
	char text[64];
	if (l->conv1d)
		text_of(text, "NT", l->out, l->in, TOKENS);
	else
		text_of(text, "NT", l->in, l->out, TOKENS);
	return calls_as(text, role);
}

START_TEST(gpt2_gets_its_roles)
{
	run("gpt2");
	for (int i = 0; i < GPT2; i++) {
		const int untold = gpt2[i].conv1d; /* in the first step */
		ck_assert_int_eq(forward_as(&gpt2[i], QS_ROLE_UNKNOWN), untold);
		ck_assert_int_eq(forward_as(&gpt2[i], QS_ROLE_FWD), STEPS - untold);
		ck_assert_int_eq(dgrad_as(&gpt2[i], QS_ROLE_DGRAD), STEPS);
		ck_assert_int_eq(wgrad_as(&gpt2[i], QS_ROLE_WGRAD), STEPS);
	}
	ck_assert_uint_eq(total_calls(&outcome), 3 * GPT2 * STEPS);
}
END_TEST

START_TEST(embedding_and_head_with_one_weight_are_no_gradients_of_each_other)
{
	const struct linear embedding = {.in = 160, .out = 64, .conv1d = true};
	const struct linear head = {.in = 64, .out = 160};
	run("one_hot");
	/* What one computes going forward is the other's dX but for the thread. */
	ck_assert_int_eq(forward_as(&embedding, QS_ROLE_UNKNOWN), 2 * STEPS);
	ck_assert_int_eq(forward_as(&head, QS_ROLE_FWD), STEPS);
	ck_assert_int_eq(dgrad_as(&embedding, QS_ROLE_UNKNOWN), STEPS);
}
END_TEST

static const char *rule_of(int role)
{
	static const char *const rules[] = {"default", "f", "d", "w"};
	return rules[role];
}

START_TEST(no_rule_with_a_role_matches_a_product_without)
{
	int unknown = 0;
	run("gpt2");
	for (int i = 0; i < outcome.counters; i++) {
		ck_assert_str_eq(outcome.counter[i].rule, rule_of(outcome.counter[i].role));
		unknown += outcome.counter[i].role == QS_ROLE_UNKNOWN;
	}
	ck_assert_int_eq(unknown, GPT2 - 1);
	for (int i = 0; i < outcome.decisions; i++)
		if (!*outcome.decision[i].role) /* none is written where it is unknown */
			ck_assert_str_eq(outcome.decision[i].rule, "default");
}
END_TEST

START_TEST(forked_child_knows_no_weights_of_its_parent)
{
	run("child");
	ck_assert_int_eq(outcome.maps, 2);
	ck_assert_int_eq(forward_as(&gpt2[0], QS_ROLE_UNKNOWN), 2);
	ck_assert_int_eq(forward_as(&gpt2[0], QS_ROLE_FWD), 1);
}
END_TEST

/* A product may be unknown when threads meet; it is never taken for the other direction. */
START_TEST(threads_that_meet_do_not_mix_up_directions)
{
	run("race");
	for (int i = 0; i < GPT2; i++) {
		ck_assert_int_eq(forward_as(&gpt2[i], QS_ROLE_UNKNOWN) +
		                         forward_as(&gpt2[i], QS_ROLE_FWD),
		                 THREADS * ROUNDS + 2 + (i == 0));
		ck_assert_int_eq(dgrad_as(&gpt2[i], QS_ROLE_UNKNOWN) +
		                         dgrad_as(&gpt2[i], QS_ROLE_DGRAD),
		                 THREADS * ROUNDS + 2);
		ck_assert_int_ge(forward_as(&gpt2[i], QS_ROLE_FWD), 1);
		ck_assert_int_ge(dgrad_as(&gpt2[i], QS_ROLE_DGRAD), 2);
	}
}
END_TEST

/* ---- ordinals of weights ------------------------------------------------------------------------
 */

/* Every product has the rule of its weight, and the weights in `wanted` (bits) are those met. */
static void check_weights(unsigned wanted)
{
	unsigned met = 0;
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	for (int i = 0; i < outcome.counters; i++) {
		const struct qs_counter *counter = &outcome.counter[i];
		ck_assert_str_eq(counter->rule, counter->weight ? "ends" : "default");
		if (counter->weight)
			met |= 1u << (counter->weight - 1);
	}
	ck_assert_uint_eq(met, wanted);
}

static int calls_of_weight(int weight, enum qs_role role)
{
	uint64_t calls = 0;
	for (int i = 0; i < outcome.counters; i++)
		if (outcome.counter[i].weight == (uint64_t)weight + 1 &&
		    outcome.counter[i].role == role)
			calls += outcome.counter[i].calls;
	return (int)calls;
}

#define ENDS(weights)                                                                              \
	"QSHIM_SET=tune.budget_ms=0;rule ends.weight=" weights                                     \
	";rule ends.action=native;default.action=native"

START_TEST(rule_by_weight_takes_the_products_of_a_layer)
{
	static const char *const env[] = {ENDS("0,2"), "QSHIM_SUMMARY=1", "QSHIM_LOG=dispatch",
	                                  NULL};
	int logged = 0;
	run_scene(&outcome, SHIMMED, env, "gpt2", NULL);
	check_weights(1u << 0 | 1u << 2);
	for (int weight = 0; weight <= 2; weight += 2) {
		ck_assert_int_eq(calls_of_weight(weight, QS_ROLE_FWD), STEPS - 1);
		ck_assert_int_eq(calls_of_weight(weight, QS_ROLE_DGRAD), STEPS);
		ck_assert_int_eq(calls_of_weight(weight, QS_ROLE_WGRAD), STEPS);
	}
	for (int i = 0; i < outcome.decisions; i++) {
		const struct decision *d = &outcome.decision[i];
		ck_assert_str_eq(d->rule, d->weight < 0 ? "default" : "ends");
		logged += d->weight == 2;
	}
	ck_assert_int_eq(logged, 3);
	ck_assert_ptr_nonnull(strstr(outcome.err, "  w2\n"));
	ck_assert_ptr_nonnull(strstr(outcome.err, " w2 -> native (rule ends)"));
	ck_assert_ptr_null(strstr(outcome.err, " w1"));
}
END_TEST

/* The embedding is no product: the last weight is the head. */
START_TEST(weights_count_from_the_end_once_steps_are_known)
{
	static const char *const env[] = {ENDS("0,-2..-1"), NULL};
	run_scene(&outcome, SHIMMED, env, "gpt2", NULL);
	check_weights(1u << 0);
	run_scene(&outcome, SHIMMED, env, "gpt2", MANY_STEPS, NULL);
	check_weights(1u << 0 | 1u << (GPT2 - 2) | 1u << (GPT2 - 1));
	ck_assert_int_eq(calls_of_weight(0, QS_ROLE_FWD), atoi(MANY_STEPS) - 1);
	ck_assert_int_gt(calls_of_weight(GPT2 - 1, QS_ROLE_FWD), 10);
	/* they become known anywhere in a step */
	ck_assert_int_le(abs(calls_of_weight(GPT2 - 1, QS_ROLE_FWD) -
	                     calls_of_weight(GPT2 - 2, QS_ROLE_DGRAD)),
	                 1);
}
END_TEST

/* Until then the first rule cannot hold for the first weight; then it is the one that decides. */
START_TEST(number_of_weights_decides_anew)
{
	static const char *const env[] = {
	        "QSHIM_SET=tune.budget_ms=0;rule last.weight=-5;rule last.action=native;"
	        "rule ends.weight=0;rule ends.action=native;default.action=native",
	        NULL};
	run_scene(&outcome, SHIMMED, env, "gpt2", MANY_STEPS, NULL);
	ck_assert_int_eq(outcome.exit, 0);
	for (int i = 0; i < outcome.counters; i++)
		ck_assert_str_eq(outcome.counter[i].rule,
		                 outcome.counter[i].weight == 1 ? "last" : "default");
	ck_assert_int_eq(calls_of_weight(0, QS_ROLE_FWD), atoi(MANY_STEPS) - 1);
}
END_TEST

START_TEST(too_many_weights_have_no_end)
{
	static const char *const env[] = {ENDS("0,-1"), "SOFTCUDA_NULL_PRODUCTS=1", NULL};
	run_scene(&outcome, SHIMMED, env, "many_weights", NULL);
	check_weights(1u << 0);
	const char *told = strstr(outcome.err, "more than 16384 matrices are read as weights");
	ck_assert_msg(told != NULL, "%s", outcome.err);
	ck_assert_ptr_null(strstr(told + 1, "more than"));
}
END_TEST

/* Each thread reads the weights in order, so whoever is first gives them the same numbers. */
START_TEST(threads_that_meet_number_weights_alike)
{
	static const char *const env[] = {ENDS("0.."), NULL};
	char text[64];
	run_scene(&outcome, SHIMMED, env, "race", NULL);
	check_weights((1u << GPT2) - 1);
	for (int i = 0; i < outcome.counters; i++) {
		const struct qs_counter *counter = &outcome.counter[i];
		if (counter->role != QS_ROLE_FWD)
			continue;
		ck_assert_uint_ge(counter->weight, 1);
		const struct linear *l = &gpt2[counter->weight - 1];
		text_of(text, l->conv1d ? "NN" : "TN", l->out, TOKENS, l->in);
		ck_assert_msg(!strncmp(counter->key, text, strlen(text)), "w%d: %s",
		              (int)counter->weight - 1, counter->key);
	}
}
END_TEST

START_TEST(forked_child_numbers_its_weights_anew)
{
	static const char *const env[] = {ENDS("1, -1"), NULL};
	run_scene(&outcome, SHIMMED, env, "child_numbers", NULL);
	check_weights(1u << 1 | 1u << 0);
	ck_assert_int_eq(calls_of_weight(1, QS_ROLE_FWD), 1);
	ck_assert_int_gt(calls_of_weight(0, QS_ROLE_FWD), 1);
}
END_TEST

START_TEST(without_rules_by_weight_no_product_has_one)
{
	static const char *const env[] = {"QSHIM_SET=tune.budget_ms=0;default.action=native", NULL};
	run_scene(&outcome, SHIMMED, env, "gpt2", MANY_STEPS, NULL);
	check_weights(0);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("roles");
	TCase *tcase = tcase_create("roles");
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, gpt2_gets_its_roles);
	tcase_add_test(tcase, embedding_and_head_with_one_weight_are_no_gradients_of_each_other);
	tcase_add_test(tcase, no_rule_with_a_role_matches_a_product_without);
	tcase_add_test(tcase, forked_child_knows_no_weights_of_its_parent);
	tcase_add_test(tcase, threads_that_meet_do_not_mix_up_directions);
	tcase_add_test(tcase, rule_by_weight_takes_the_products_of_a_layer);
	tcase_add_test(tcase, weights_count_from_the_end_once_steps_are_known);
	tcase_add_test(tcase, number_of_weights_decides_anew);
	tcase_add_test(tcase, too_many_weights_have_no_end);
	tcase_add_test(tcase, threads_that_meet_number_weights_alike);
	tcase_add_test(tcase, forked_child_numbers_its_weights_anew);
	tcase_add_test(tcase, without_rules_by_weight_no_product_has_one);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
