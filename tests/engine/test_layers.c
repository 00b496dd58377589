/* Layer names end to end: a program that marks ranges through NVTX or by the library's functions,
 * the key, the rule, the decision log, the counters and the table at exit. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wchar.h>

#define N_ CUBLAS_OP_N
#define T_ CUBLAS_OP_T

/* ---- an object that contains NVTX ---------------------------------------------------------------
 */

typedef void (*function)(void);

struct callbacks {
	size_t size;
	int (*table)(int module, function ***pointers, unsigned *count);
};

/* nvtxEventAttributes_t */
struct event {
	uint16_t version, size;
	uint32_t rest[7];
	int32_t type;
	const void *message;
};

_Static_assert(sizeof(struct event) == 48, "as NVTX has it");

#define CORE_SIZE  16
#define CORE2_SIZE 16

static function core[CORE_SIZE], core2[CORE2_SIZE];
static unsigned core2_size = CORE2_SIZE; /* what an older NVTX has may be less */

/* What the pointers lead to until an injection has been asked: must not be called by it. */
static void unset(void)
{
	fputs("initialised again\n", stderr);
	_exit(5);
}

static int table(int module, function ***pointers, unsigned *count)
{
	static function *of_core[CORE_SIZE], *of_core2[CORE2_SIZE];
	for (int i = 1; i < CORE_SIZE; i++) {
		of_core[i] = &core[i];
		of_core2[i] = &core2[i];
	}
	*pointers = module == 1 ? of_core : of_core2;
	*count = module == 1 ? CORE_SIZE : core2_size;
	return module == 1 || module == 5;
}

static const void *get_table(uint32_t id)
{
	static const struct callbacks callbacks = {sizeof callbacks, table};
	return id == 1 ? &callbacks : NULL;
}

static const void *get_nothing(uint32_t id)
{
	(void)id;
	return NULL;
}

static int inject(const void *(*get)(uint32_t))
{
	int (*initialise)(const void *(*)(uint32_t)) =
	        (int (*)(const void *(*)(uint32_t)))dlsym(RTLD_DEFAULT, "InitializeInjectionNvtx2");
	for (int i = 0; i < CORE_SIZE; i++)
		core[i] = core2[i] = unset;
	if (!initialise)
		_exit(4);
	return initialise(get);
}

static int push_a(const char *name)
{
	return ((int (*)(const char *))core[9])(name);
}

static int push_w(const wchar_t *name)
{
	return ((int (*)(const wchar_t *))core[10])(name);
}

static int push_ex(int type, const void *message, uint16_t size)
{
	struct event event = {.version = 3, .size = size, .type = type, .message = message};
	return ((int (*)(const struct event *))core[8])(&event);
}

static int pop(void)
{
	return ((int (*)(void))core[11])();
}

static int domain_push(void *domain, int type, const void *message)
{
	struct event event = {.version = 3, .size = 48, .type = type, .message = message};
	return ((int (*)(void *, const struct event *))core2[4])(domain, &event);
}

static int domain_pop(void *domain)
{
	return ((int (*)(void *))core2[5])(domain);
}

static void *register_a(void *domain, const char *text)
{
	return ((void *(*)(void *, const char *))core2[10])(domain, text);
}

static void *register_w(void *domain, const wchar_t *text)
{
	return ((void *(*)(void *, const wchar_t *))core2[11])(domain, text);
}

static void *create_a(const char *name)
{
	return ((void *(*)(const char *))core2[12])(name);
}

static void *create_w(const wchar_t *name)
{
	return ((void *(*)(const wchar_t *))core2[13])(name);
}

/* ---- scenes -------------------------------------------------------------------------------------
 */

static const struct product forward = {.ta = T_, .m = 64, .n = 24, .k = 96};
static struct session session;
static struct made made;

static void begin(void)
{
	session_open(&session);
	product_make(&made, &forward, 1);
}

static void product(void)
{
	must((int)product_call(&made, &session), "product");
}

static int end(void)
{
	product_fetch(&made);
	product_free(&made);
	session_close(&session);
	return 0;
}

/* Every way to name a range, a product in each. */
static int nvtx(int argc, char **argv)
{
	(void)argc, (void)argv;
	begin();
	product();
	printf("injected %d\n", inject(get_table));
	printf("depth %d\n", push_a("by push, seq = 7"));
	product();
	push_w(L"w\u00e9\u20ac\U0001f600");
	product();
	push_ex(1, "by ex", 48);
	product();
	push_ex(2, L"by wide ex", 48);
	product();
	push_ex(0, "no type", 48); /* has the name around it */
	product();
	push_ex(1, "too short", 40);
	product();
	for (int i = 0; i < 5; i++)
		printf("pop %d\n", pop());
	product(); /* by push */
	printf("last %d\n", pop());
	printf("none %d\n", pop());
	void *one = create_a("one"), *two = create_w(L"two");
	printf("domains %d\n", one != two && one && two);
	domain_push(one, 3, register_a(one, "registered, 1"));
	domain_push(two, 3, register_w(two, L"registered wide"));
	product();
	domain_pop(two);
	product();
	domain_push(one, 3, "never registered");
	product();
	domain_pop(one);
	domain_pop(one);
	product();
	return end();
}

/* Tables that lack what is wanted are left alone. */
static int strange(int argc, char **argv)
{
	(void)argc, (void)argv;
	printf("nothing %d\n", inject(get_nothing));
	core2_size = 5;
	printf("short %d\n", inject(get_table));
	printf("untouched %d\n", core2[5] == unset && core2[4] != unset && core[1] == unset);
	return 0;
}

/* A tool behind the library; two objects with NVTX in them. */
static int chained(int argc, char **argv)
{
	(void)argc, (void)argv;
	begin();
	setvbuf(stdout, NULL, _IOLBF, 0);
	inject(get_table);
	inject(get_table);
	printf("push %d\n", push_a("layer"));
	product();
	printf("pop %d\n", pop());
	void *domain = create_a("domain");
	printf("handle %d\n", register_a(domain, "text") == (void *)0x5150);
	domain_push(domain, 3, (void *)0x5150); /* the tool does not hook this one */
	product();
	domain_pop(domain);
	push_w(L"wide");
	product();
	printf("pop %d\n", pop());
	return end();
}

typedef void push_function(const char *);
typedef void pop_function(void);

static push_function *push;
static pop_function *leave;

static void find_functions(void)
{
	push = (push_function *)dlsym(RTLD_DEFAULT, "qs_label_push");
	leave = (pop_function *)dlsym(RTLD_DEFAULT, "qs_label_pop");
}

static int functions(int argc, char **argv)
{
	(void)argc, (void)argv;
	find_functions();
	begin();
	push("model.layers.0.mlp");
	product();
	product();
	leave();
	push("model.lm_head");
	product();
	leave();
	product();
	return end();
}

static int without(int argc, char **argv)
{
	(void)argc, (void)argv;
	begin();
	product();
	product();
	return end();
}

static void call(cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *a,
                 int lda, const void *b, int ldb, void *d)
{
	float one = 1, zero = 0;
	must((int)cublasGemmEx(session.blas, ta, tb, m, n, k, &one, a, CUDA_R_16BF, lda, b,
	                       CUDA_R_16BF, ldb, &zero, d, CUDA_R_16BF, m, CUBLAS_COMPUTE_32F,
	                       CUBLAS_GEMM_DEFAULT),
	     "backward product");
}

/* dX and dW of a Linear with 96 inputs and 64 outputs, on a thread as PyTorch's. */
static void *backward(void *gradients)
{
	char *dx = gradients, *dw = dx + 65536;
	pthread_setname_np(pthread_self(), "pt_autograd_0");
	call(N_, N_, 96, 24, 64, made.da, 96, made.dd, 64, dx);
	call(N_, T_, 96, 64, 24, made.db, 96, made.dd, 64, dw);
	return NULL;
}

static int training(int argc, char **argv)
{
	(void)argc, (void)argv;
	void *gradients = NULL;
	pthread_t thread;
	find_functions();
	begin();
	must((int)cudaMalloc(&gradients, 131072), "memory");
	push("block.fc");
	product();
	leave();
	if (pthread_create(&thread, NULL, backward, gradients))
		return 3;
	pthread_join(thread, NULL);
	return end();
}

static int child(int argc, char **argv)
{
	int status = 0;
	find_functions();
	push("parent");
	leave();
	pid_t pid = fork();
	if (!pid) {
		functions(argc, argv);
		fflush(stdout);
		_exit(0);
	}
	waitpid(pid, &status, 0);
	return WEXITSTATUS(status);
}

const struct scene scenes[] = {
        {"nvtx", nvtx},           {"strange", strange}, {"chained", chained},
        {"functions", functions}, {"without", without}, {"training", training},
        {"child", child},         {NULL, NULL},
};

/* ---- tests --------------------------------------------------------------------------------------
 */

static struct outcome outcome;

/* Calls counted for a layer, "" = none; -1 if there is no such counter. */
static int calls_of(const char *layer)
{
	int calls = -1;
	for (int i = 0; i < outcome.counters; i++)
		if (!strcmp(outcome.counter[i].layer, layer))
			calls = (calls < 0 ? 0 : calls) + (int)outcome.counter[i].calls;
	return calls;
}

/* The decision for a layer. */
static const struct decision *decision_of(const char *layer)
{
	for (int i = 0; i < outcome.decisions; i++)
		if (!strcmp(outcome.decision[i].layer, layer))
			return &outcome.decision[i];
	ck_abort_msg("no decision for layer '%s'", layer);
	return NULL;
}

START_TEST(ranges_of_nvtx_name_layers)
{
	static const char *const env[] = {"QSHIM_SET=tune.budget_ms=0;default.action=native", NULL};
	run_scene(&outcome, SHIMMED, env, "nvtx", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_int_eq(outcome.broken, 0);
	ck_assert_int_eq((int)printed(&outcome, "injected"), 1);
	ck_assert_int_eq((int)printed(&outcome, "depth"), 0);
	ck_assert_int_eq((int)printed(&outcome, "pop"), 5);
	ck_assert_int_eq((int)printed(&outcome, "last"), 0);
	ck_assert_int_eq((int)printed(&outcome, "none"), -1);
	ck_assert_int_eq((int)printed(&outcome, "domains"), 1);
	ck_assert_int_eq(calls_of(""), 2);
	ck_assert_int_eq(calls_of("by push"), 2);
	ck_assert_int_eq(calls_of("w\u00e9\u20ac\U0001f600"), 1);
	ck_assert_int_eq(calls_of("by ex"), 1);
	ck_assert_int_eq(calls_of("by wide ex"), 3);
	ck_assert_int_eq(calls_of("registered"), 2);
	ck_assert_int_eq(calls_of("registered wide"), 1);
	ck_assert_str_eq(outcome.err, "");
}
END_TEST

START_TEST(tables_without_the_functions_are_left_alone)
{
	run_scene(&outcome, SHIMMED, NULL, "strange", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_int_eq((int)printed(&outcome, "nothing"), 1);
	ck_assert_int_eq((int)printed(&outcome, "short"), 1);
	ck_assert_int_eq((int)printed(&outcome, "untouched"), 1);
}
END_TEST

START_TEST(tool_that_was_set_before_sees_every_range)
{
	static const char *const env[] = {"QSHIM_NVTX_NEXT=" INJECTION,
	                                  "QSHIM_SET=tune.budget_ms=0;default.action=native", NULL};
	run_scene(&outcome, SHIMMED, env, "chained", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_str_eq(outcome.out, "tool push layer\npush 100\ntool pop\npop 100\n"
	                              "tool create domain\ntool register 1 text\nhandle 1\n"
	                              "tool pop\npop 100\n");
	ck_assert_str_eq(outcome.err, "");
	ck_assert_int_eq(calls_of("layer"), 1);
	ck_assert_int_eq(calls_of("text"), 1);
	ck_assert_int_eq(calls_of("wide"), 1);
}
END_TEST

START_TEST(tool_that_cannot_be_loaded_is_told)
{
	static const char *const env[] = {"QSHIM_NVTX_NEXT=/nowhere/tool.so",
	                                  "QSHIM_SET=tune.budget_ms=0;default.action=native", NULL};
	run_scene(&outcome, SHIMMED, env, "nvtx", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_ptr_nonnull(strstr(outcome.err, "/nowhere/tool.so: no NVTX injection"));
	ck_assert_int_eq(calls_of("by push"), 2);
}
END_TEST

START_TEST(library_is_not_put_behind_itself)
{
	static const char *const env[] = {"QSHIM_NVTX_NEXT=" LIBRARY,
	                                  "QSHIM_SET=tune.budget_ms=0;default.action=native", NULL};
	run_scene(&outcome, SHIMMED, env, "nvtx", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_int_eq(calls_of("by push"), 2);
}
END_TEST

START_TEST(rules_match_by_layer)
{
	static const char *const env[] = {
	        "QSHIM_SET=tune.budget_ms=0;default.action=fp8;rule head.layer=*lm_head*;"
	        "rule head.action=native",
	        "QSHIM_QUIET=1", "QSHIM_LOG=dispatch", NULL};
	run_scene(&outcome, SHIMMED, env, "functions", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_int_eq(outcome.decisions, 3);
	ck_assert_str_eq(decision_of("model.lm_head")->rule, "head");
	ck_assert_str_eq(decision_of("model.lm_head")->action, "native");
	ck_assert_str_eq(decision_of("model.layers.0.mlp")->rule, "default");
	ck_assert_str_eq(decision_of("model.layers.0.mlp")->action, "fp8");
	ck_assert_str_eq(decision_of("")->action, "fp8");
	ck_assert_str_eq(decision_of("")->key, decision_of("model.lm_head")->key);
	ck_assert_int_eq(calls_of("model.layers.0.mlp"), 2);
	ck_assert_uint_eq(total_replaced(&outcome), 3);
	ck_assert_ptr_nonnull(strstr(outcome.err, " [model.lm_head] -> native (rule head)"));
}
END_TEST

START_TEST(table_at_exit_names_layers)
{
	static const char *const env[] = {"QSHIM_SUMMARY=1", NULL};
	run_scene(&outcome, SHIMMED, env, "functions", NULL);
	ck_assert_ptr_nonnull(strstr(outcome.err, "  model.layers.0.mlp\n"));
	ck_assert_ptr_nonnull(strstr(outcome.err, "  model.lm_head\n"));
}
END_TEST

START_TEST(without_labels_nothing_has_a_layer)
{
	run_scene(&outcome, SHIMMED, NULL, "without", NULL);
	ck_assert_uint_eq(only_counter(&outcome)->calls, 2);
	ck_assert_str_eq(only_counter(&outcome)->layer, "");
	ck_assert_str_eq(only_decision(&outcome)->layer, "");
}
END_TEST

START_TEST(gradients_have_the_layer_of_their_forward_product)
{
	run_scene(&outcome, SHIMMED, NULL, "training", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_int_eq(outcome.decisions, 3);
	for (int i = 0; i < 3; i++)
		ck_assert_str_eq(outcome.decision[i].layer, "block.fc");
	ck_assert_str_eq(outcome.decision[0].role, "fwd");
	ck_assert_str_eq(outcome.decision[1].role, "dgrad");
	ck_assert_str_eq(outcome.decision[2].role, "wgrad");
}
END_TEST

START_TEST(forked_child_names_its_layers)
{
	run_scene(&outcome, SHIMMED, NULL, "child", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_int_eq(calls_of("model.lm_head"), 1);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("layers");
	TCase *tcase = tcase_create("layers");
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, ranges_of_nvtx_name_layers);
	tcase_add_test(tcase, tables_without_the_functions_are_left_alone);
	tcase_add_test(tcase, tool_that_was_set_before_sees_every_range);
	tcase_add_test(tcase, tool_that_cannot_be_loaded_is_told);
	tcase_add_test(tcase, library_is_not_put_behind_itself);
	tcase_add_test(tcase, rules_match_by_layer);
	tcase_add_test(tcase, table_at_exit_names_layers);
	tcase_add_test(tcase, without_labels_nothing_has_a_layer);
	tcase_add_test(tcase, gradients_have_the_layer_of_their_forward_product);
	tcase_add_test(tcase, forked_child_names_its_layers);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
