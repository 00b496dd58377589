/* Scenes and checks of the tests of timing; see tuning.h. */
#include "tuning.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "softcuda/softcuda.h"

#define N_    CUBLAS_OP_N
#define T_    CUBLAS_OP_T
#define SHAPE .m = 64, .n = 48, .k = 128

const struct product rows[] = {
        {.name = "TN", SHAPE, .ta = T_},
        {.name = "beta 1, in place", SHAPE, .tb = T_, .beta = 1.0f},
        {.name = "beta 1, fp32", SHAPE, .beta = 1.0f, .fp32_out = true},
        {.name = "beta 0.5, Lt, in place", SHAPE, .lt = true, .ta = T_, .beta = 0.5f},
        {.name = "beta 1, Lt, C apart", SHAPE, .lt = true, .beta = 1.0f, .apart = true},
        {.name = "gelu, bias", SHAPE, .lt = true, .epilogue = CUBLASLT_EPILOGUE_GELU_BIAS},
        {.name = "padded", SHAPE, .ta = T_, .pad_a = 8, .pad_d = 16},
};

struct product shape(int number)
{
	return (struct product){.ta = T_, .m = 64, .n = 48, .k = 64 + 16 * number};
}

struct work work_done(void)
{
	struct work work = {.first = softcuda_get("products_first"),
	                    .second = softcuda_get("products_second"),
	                    .calls = softcuda_cublas_calls("cublasGemmEx") +
	                             softcuda_cublaslt_calls("cublasLtMatmul"),
	                    .heuristics = softcuda_get("heuristics"),
	                    .allocations = softcuda_get("allocations")};
	work.native = softcuda_get("products") - work.first - work.second;
	return work;
}

void print_work(const char *what, int number, const struct work *before)
{
	const struct work now = work_done();
	const struct {
		const char *name;
		long count;
	} lines[] = {{"native", now.native - before->native},
	             {"first", now.first - before->first},
	             {"second", now.second - before->second},
	             {"calls", now.calls - before->calls},
	             {"heuristics", now.heuristics - before->heuristics},
	             {"allocations", now.allocations - before->allocations}};
	for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
		printf("%s%d.%s %ld\n", what, number, lines[i].name, lines[i].count);
}

static double worst = INFINITY;
static int failed, padding = 1;

void judge(struct made *made)
{
	product_fetch(made);
	worst = fmin(worst, product_sqnr(made));
	padding &= made->padding_untouched;
}

void call(struct made *made, const struct session *session)
{
	failed += product_call(made, session) != CUBLAS_STATUS_SUCCESS;
}

void whole_call(struct made *made, const struct session *session)
{
	product_poison(made);
	call(made, session);
	judge(made);
}

void watched_call(struct made *made, const struct session *session, int number)
{
	const struct work before = work_done();
	whole_call(made, session);
	print_work("call", number, &before);
}

bool all_right(void)
{
	return !failed && worst >= LEAST_DB;
}

int verdict(void)
{
	printf("worst %.3f\nfailed %d\npadding %d\nevents %ld\n", worst, failed, padding,
	       softcuda_get("events"));
	return 0;
}

int scene_calls(int argc, char **argv)
{
	struct session session;
	struct made made;
	session_open(&session);
	product_make(&made, &rows[atoi(argv[0])], 1);
	if (argc == 4)
		softcuda_set(argv[2], atol(argv[3]));
	for (int i = 0; i < atoi(argv[1]); i++) {
		watched_call(&made, &session, i);
		printf("hash%d %llu\n", i, (unsigned long long)product_hash(&made) >> 12);
	}
	return verdict();
}

static int large(int argc, char **argv, int first)
{
	enum {
		SIDE = 4096,
		K = 640
	};
	const float one = 1.0f, zero = 0.0f;
	struct session session;
	void *a, *b, *d;
	if (argc != 2 && argc != 4)
		return 1;
	session_open(&session);
	must(cudaMalloc(&a, (size_t)SIDE * 2 * K * 2), "A");
	must(cudaMalloc(&b, (size_t)SIDE * 2 * K * 2), "B");
	must(cudaMalloc(&d, (size_t)SIDE * SIDE * 2), "D");
	const int uses = atoi(argv[1]);
	for (int i = 0; i < atoi(argv[0]) * uses; i++) {
		const struct work before = work_done();
		const int k = first + 16 * (i / uses);
		if (argc == 4)
			softcuda_set("idle_products", i < atoi(argv[2]) || i >= atoi(argv[3]));
		failed += cublasGemmEx(session.blas, T_, N_, SIDE, SIDE, k, &one, a, CUDA_R_16BF, k,
		                       b, CUDA_R_16BF, k, &zero, d, CUDA_R_16BF, SIDE,
		                       CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) != 0;
		must(cudaDeviceSynchronize(), "synchronize");
		if (i % uses == uses - 1)
			print_work("call", i / uses, &before);
	}
	return verdict();
}

int scene_large(int argc, char **argv)
{
	return large(argc, argv, 640);
}

int scene_doubtful(int argc, char **argv)
{
	return large(argc, argv, 512);
}

enum {
	SIDE = 4096,
	K = 640,
};

/* Large enough for the size model to want fp8; what comes out is not looked at. */
struct large {
	struct session session;
	void *a, *b, *d;
	int failed;
	int thread_calls; /* of submit_in_thread() */
};

static void open_large(struct large *l)
{
	cudaStream_t stream;
	session_open(&l->session);
	must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
	session_use(&l->session, stream);
	must(cudaMalloc(&l->a, (size_t)SIDE * K * 2), "A");
	must(cudaMalloc(&l->b, (size_t)SIDE * K * 2), "B");
	must(cudaMalloc(&l->d, (size_t)SIDE * SIDE * 2), "D");
}

static void multiply_some(struct large *l, int m, int n)
{
	const float one = 1.0f, zero = 0.0f;
	l->failed += cublasGemmEx(l->session.blas, T_, N_, m, n, K, &one, l->a, CUDA_R_16BF, K,
	                          l->b, CUDA_R_16BF, K, &zero, l->d, CUDA_R_16BF, SIDE,
	                          CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) != 0;
}

static void multiply(struct large *l)
{
	multiply_some(l, SIDE, SIDE);
}

/* With any of 64 numbers of tokens, as batches of texts have. */
static void multiply_varying(struct large *l, int count)
{
	static uint32_t state = 1;
	for (int i = 0; i < count; i++) {
		state = state * 1664525 + 1013904223;
		multiply_some(l, SIDE, SIDE - 16 * (int)(state >> 26) - count % 2 * 8);
		must(cudaDeviceSynchronize(), "synchronize");
	}
}

/* This product and two others, never the same twice, as random numbers say. */
static void multiply_at_random(struct large *l, int count)
{
	uint32_t state = 1, product = 0;
	for (int i = 0; i < count; i++) {
		state = state * 1664525 + 1013904223;
		product = (product + 1 + (state >> 31)) % 3;
		multiply_some(l, SIDE >> product, SIDE);
		must(cudaDeviceSynchronize(), "synchronize");
	}
}

static void use_another_stream(struct large *l)
{
	cudaStream_t stream;
	must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
	session_use(&l->session, stream);
}

static void submit(struct large *l, int count)
{
	for (int i = 0; i < count; i++) {
		multiply(l);
		must(cudaDeviceSynchronize(), "synchronize");
	}
}

static void *run_thread(void *data)
{
	struct large *l = data;
	must(cudaSetDevice(0), "cudaSetDevice");
	submit(l, l->thread_calls);
	return NULL;
}

static void submit_in_thread(struct large *l, int count)
{
	pthread_t thread;
	l->thread_calls = count;
	must(pthread_create(&thread, NULL, run_thread, l), "thread");
	must(pthread_join(thread, NULL), "join");
}

/* The first call of a thread looks at the clock, and at a file that is left alone for a second. */
static void edit(struct large *l, const char *policy)
{
	FILE *file = fopen(getenv("QSHIM_POLICY"), "we");
	must(!file, "policy file");
	fputs(policy, file);
	must(fclose(file), "policy file");
	nanosleep(&(struct timespec){.tv_sec = 2, .tv_nsec = 200000000}, NULL);
	submit_in_thread(l, 1);
}

static void start_over(struct large *l)
{
	must(cudaDeviceReset(), "reset");
	open_large(l);
}

static void capture(struct large *l, int count)
{
	cudaGraph_t graph;
	must(cudaStreamBeginCapture(l->session.stream, cudaStreamCaptureModeGlobal), "capture");
	for (int i = 0; i < count; i++)
		multiply(l);
	must(cudaStreamEndCapture(l->session.stream, &graph), "end of capture");
	must(cudaGraphDestroy(graph), "graph");
}

static void turn_knob(const char *setting)
{
	char name[32];
	long value;
	if (sscanf(setting, "%31[^=]=%ld", name, &value) != 2)
		exit(1);
	softcuda_set(name, value);
}

int scene_loop(int argc, char **argv)
{
	struct large l = {.failed = 0};
	open_large(&l);
	for (int i = 0; i + 1 < argc; i += 2) {
		const char *how = argv[i], *what = argv[i + 1];
		const struct work before = work_done();
		if (!strcmp(how, CAPTURED))
			capture(&l, atoi(what));
		else if (!strcmp(how, RANDOM))
			multiply_at_random(&l, atoi(what));
		else if (!strcmp(how, VARYING))
			multiply_varying(&l, atoi(what));
		else if (!strcmp(how, STREAM))
			use_another_stream(&l);
		else if (!strcmp(how, OWN))
			session_use(&l.session, cudaStreamPerThread);
		else if (!strcmp(how, THREAD))
			submit_in_thread(&l, atoi(what));
		else if (!strcmp(how, RESET))
			start_over(&l);
		else if (!strcmp(how, EDIT))
			edit(&l, what);
		else if (!strcmp(how, KNOB))
			turn_knob(what);
		else
			submit(&l, atoi(what));
		print_work("part", i / 2, &before);
	}
	printf("failed %d\nevents %ld\n", l.failed, softcuda_get("events"));
	return 0;
}

/* ---- tests ------------------------------------------------------------------------------------
 */

struct outcome outcome;

const struct times second_faster = {.product = 1000, .fp8 = 1000, .second = 800};
const struct times second_slower = {.product = 1000, .fp8 = 1000, .second = 1300};

const char *const *with(const char *policy, struct times times, const char *more)
{
	static char text[6][256];
	static const char *env[8];
	const bool is_auto = strstr(policy, "action=auto");
	snprintf(text[0], sizeof text[0], "QSHIM_SET=%s", policy);
	snprintf(text[1], sizeof text[1], "SOFTCUDA_PRODUCT_US=%ld", times.product);
	snprintf(text[2], sizeof text[2], "SOFTCUDA_FP8_US=%ld", times.fp8);
	snprintf(text[3], sizeof text[3], "SOFTCUDA_SECOND_US=%ld", times.second);
	snprintf(text[4], sizeof text[4], "SOFTCUDA_KERNEL_US=%ld", times.kernel);
	snprintf(text[5], sizeof text[5], "SOFTCUDA_WIDE_SECOND_US=%ld",
	         times.wide || !is_auto ? times.wide : times.product);
	for (int i = 0; i < 6; i++)
		env[i] = text[i];
	env[6] = more;
	env[7] = NULL;
	return env;
}

void check_unharmed(const char *what)
{
	ck_assert_msg(outcome.exit == 0, "%s: exit %d: %.2000s", what, outcome.exit, outcome.err);
	ck_assert_msg(printed(&outcome, "failed") == 0, "%s: %s", what, outcome.out);
	ck_assert_msg(printed(&outcome, "worst") >= LEAST_DB, "%s: %.2f dB", what,
	              printed(&outcome, "worst"));
	ck_assert_msg(printed(&outcome, "padding") == 1, "%s: wrote between columns of D", what);
	ck_assert_msg(printed(&outcome, "events") == 0, "%s: events are left", what);
}

long count(const char *call, const char *what)
{
	char name[48];
	snprintf(name, sizeof name, "%s.%s", call, what);
	return (long)printed(&outcome, name);
}

void ck_products(const char *call, long native, long first, long second)
{
	ck_assert_msg(count(call, "native") == native && count(call, "first") == first &&
	                      count(call, "second") == second,
	              "%s is not %ld native, %ld first, %ld second: %s", call, native, first,
	              second, outcome.out);
}

void ck_native(const char *call)
{
	ck_products(call, 1, 0, 0);
}

void ck_first(const char *call)
{
	ck_products(call, 0, 1, 0);
}

void ck_second(const char *call)
{
	ck_products(call, 0, 0, 1);
}

void ck_timed(const char *call)
{
	long trials = count(call, "native") + count(call, "first") + count(call, "second") - 1;
	ck_assert_msg(trials >= 5, "%s is not timed: %s", call, outcome.out);
}

void ck_decision(const char *action, const char *reason)
{
	const struct decision *d = only_decision(&outcome);
	ck_assert_msg(!strcmp(d->action, action) && !strcmp(d->reason, reason), "%s because %s: %s",
	              d->action, d->reason, d->detail);
}

int decisions_for(const char *action)
{
	int sum = 0;
	for (int i = 0; i < outcome.decisions; i++)
		sum += !strcmp(outcome.decision[i].action, action);
	return sum;
}
