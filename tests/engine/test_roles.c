/* Roles end to end: a few steps of training as PyTorch makes them, gradients on threads with its
 * names, and what the keys, the rules and the decision log say of each product. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_ CUBLAS_OP_N
#define T_ CUBLAS_OP_T

#define TOKENS  24
#define STEPS   4
#define THREADS 3  /* of each direction           */
#define ROUNDS  40 /* of each thread in the race  */

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

static int gpt2_training(int argc, char **argv)
{
	cublasHandle_t blas;
	(void)argc, (void)argv;
	must((int)cublasCreate(&blas), "cublasCreate");
	set_up(gpt2, GPT2);
	train(blas, gpt2, GPT2, STEPS);
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
static int child(int argc, char **argv)
{
	cublasHandle_t blas;
	int status = 0;
	(void)argc, (void)argv;
	must((int)cublasCreate(&blas), "cublasCreate");
	set_up(gpt2, 1);
	train(blas, gpt2, 1, 2);
	pid_t pid = fork();
	if (!pid) {
		alarm(60);
		_exit(forward(blas, &gpt2[0]) == (int)CUBLAS_STATUS_SUCCESS);
	}
	waitpid(pid, &status, 0);
	return WEXITSTATUS(status);
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
        {"gpt2", gpt2_training}, {"one_hot", one_hot}, {"child", child},
        {"race", race},          {NULL, NULL},
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
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
