/* Products that are passed on are the program's own: bit for bit what they are without the shim,
 * with the reason in the log. One row per reason code; a reason code without a row must be listed
 * as one that later engines give. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cuda.h>

#include "softcuda/softcuda.h"

#define N_ CUBLAS_OP_N
#define T_ CUBLAS_OP_T

#define FORCE "QSHIM_SET=tune.budget_ms=0;default.action=fp8"

static const struct product plain = {.ta = T_, .m = 64, .n = 16, .k = 48};

/* ---- scenes: each prints what the program can see ---------------------------------------------
 */

static void report(struct made *made, int status)
{
	product_fetch(made);
	printf("status %d\nhash %llu\n", status, (unsigned long long)product_hash(made));
}

/* A session and a product made in it. */
struct stage {
	struct session session;
	struct made made;
};

static struct stage *stage_open(const struct product *p)
{
	static struct stage stage;
	session_open(&stage.session);
	product_make(&stage.made, p, 1);
	return &stage;
}

static int compute(void)
{
	struct stage *s = stage_open(&plain);
	must(cublasSetMathMode(s->session.blas, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode");
	report(&s->made, product_call(&s->made, &s->session));
	return 0;
}

static int device_scalars(void)
{
	struct stage *s = stage_open(&plain);
	const float host[2] = {1.0f, 0.0f};
	float *device;
	struct made *m = &s->made;
	must(cudaMalloc((void **)&device, sizeof host), "cudaMalloc");
	must(cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice), "cudaMemcpy");
	must(cublasSetPointerMode(s->session.blas, CUBLAS_POINTER_MODE_DEVICE), "pointer mode");
	report(m, cublasGemmEx(s->session.blas, T_, N_, m->p.m, m->p.n, m->p.k, device, m->da,
	                       CUDA_R_16BF, m->lda, m->db, CUDA_R_16BF, m->ldb, device + 1, m->dd,
	                       CUDA_R_16BF, m->ldd, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
	return 0;
}

static int batch(void)
{
	struct stage *s = stage_open(&plain);
	struct made *m = &s->made;
	const float one = 1.0f, zero = 0.0f;
	/* Two products of half the columns of B and D each. */
	report(m, cublasGemmStridedBatchedEx(s->session.blas, T_, N_, m->p.m, m->p.n / 2, m->p.k,
	                                     &one, m->da, CUDA_R_16BF, m->lda, 0, m->db,
	                                     CUDA_R_16BF, m->ldb, m->ldb * m->p.n / 2, &zero, m->dd,
	                                     CUDA_R_16BF, m->ldd, m->ldd * m->p.n / 2, 2,
	                                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
	return 0;
}

static const struct product plain_lt = {.lt = true, .ta = T_, .m = 64, .n = 16, .k = 48};

static int order(void)
{
	struct stage *s = stage_open(&plain_lt);
	const int32_t row = CUBLASLT_ORDER_ROW;
	const int64_t ld = plain_lt.n;
	must(cublasLtMatrixLayoutSetAttribute(s->made.ld, CUBLASLT_MATRIX_LAYOUT_ORDER, &row,
	                                      sizeof row),
	     "order");
	must(cublasLtMatrixLayoutSetAttribute(s->made.ld, CUBLASLT_MATRIX_LAYOUT_LD, &ld,
	                                      sizeof ld),
	     "ld");
	report(&s->made, product_call(&s->made, &s->session));
	return 0;
}

static int beta_of_another_type(void)
{
	static const struct product p = {.lt = true,
	                                 .ta = T_,
	                                 .m = 64,
	                                 .n = 16,
	                                 .k = 48,
	                                 .fp32_out = true,
	                                 .beta = 1.0f,
	                                 .apart = true};
	struct stage *s = stage_open(&p);
	const uint32_t type = CUDA_R_16BF;
	must(cublasLtMatrixLayoutSetAttribute(s->made.lc, CUBLASLT_MATRIX_LAYOUT_TYPE, &type,
	                                      sizeof type),
	     "type");
	report(&s->made, product_call(&s->made, &s->session));
	return 0;
}

static int alias(void)
{
	static const struct product square = {.ta = N_, .m = 64, .n = 64, .k = 64};
	struct stage *s = stage_open(&square);
	must(cudaMemcpy(s->made.dd, s->made.da, s->made.size_d * 2, cudaMemcpyDeviceToDevice),
	     "copy");
	s->made.da = s->made.dd;
	report(&s->made, product_call(&s->made, &s->session));
	return 0;
}

static int no_handle(void)
{
	struct stage *s = stage_open(&plain);
	const struct session none = {0};
	report(&s->made, product_call(&s->made, &none));
	return 0;
}

/* The memory is the second device's, the current context the first's. */
static int memory_of_another_device(void)
{
	struct stage *s = stage_open(&plain);
	void *mine = s->made.dd, *other = NULL;
	size_t bytes = s->made.size_d * 2;
	must(cudaSetDevice(1), "cudaSetDevice");
	must(cudaMalloc(&other, bytes), "cudaMalloc");
	must(cudaSetDevice(0), "cudaSetDevice");
	s->made.dd = other;
	int status = product_call(&s->made, &s->session);
	must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
	s->made.dd = mine;
	if (!status)
		must(cudaMemcpy(mine, other, bytes, cudaMemcpyDefault), "cudaMemcpy");
	report(&s->made, status);
	return 0;
}

static int captured_cold(void)
{
	struct stage *s = stage_open(&plain);
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	must(cudaStreamBeginCapture(s->session.stream, cudaStreamCaptureModeGlobal), "begin");
	int status = product_call(&s->made, &s->session);
	must(cudaStreamEndCapture(s->session.stream, &graph), "end");
	must(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
	must(cudaGraphLaunch(executable, s->session.stream), "launch");
	report(&s->made, status);
	return 0;
}

static int many_keys(void)
{
	struct session session;
	session_open(&session);
	for (int i = 0; i < 17; i++) {
		struct product p = plain;
		struct made made;
		p.n += i;
		product_make(&made, &p, 1);
		report(&made, product_call(&made, &session));
		product_free(&made);
	}
	return 0;
}

/* The parent computes, forks, and the child calls without having a driver. */
static int forked(void)
{
	struct stage *s = stage_open(&plain);
	report(&s->made, product_call(&s->made, &s->session));
	fflush(stdout);
	pid_t child = fork();
	if (!child) {
		printf("child %d\n", (int)product_call(&s->made, &s->session));
		fflush(stdout);
		_exit(0);
	}
	int status = -1;
	waitpid(child, &status, 0);
	printf("child status %d\n", status);
	product_poison(&s->made);
	report(&s->made, product_call(&s->made, &s->session));
	return 0;
}

/* ---- the rows ---------------------------------------------------------------------------------
 */

struct row {
	enum qs_reason reason;
	struct product p;   /* called as it is, unless ...       */
	int (*run)(void);   /* ... there is a scene of its own   */
	const char *env[3]; /* ended by NULL                     */
	int served;         /* products of the scene fp8 serves  */
	bool unseen;        /* nothing is logged                 */
};

#define OUR_OWN(...)                                                                               \
	{                                                                                          \
		.ta = T_, .m = 64, .n = 16, .k = 48, __VA_ARGS__                                   \
	}

static const struct row rows[] = {
        {QS_REASON_DTYPE, OUR_OWN(.type = CUDA_R_16F, .fp32_out = true), .env = {FORCE}},
        {QS_REASON_COMPUTE, .run = compute, .env = {FORCE}},
        {QS_REASON_POINTER_MODE, .run = device_scalars, .env = {FORCE}},
        {QS_REASON_OP, {.ta = CUBLAS_OP_C, .m = 64, .n = 16, .k = 48}, .env = {FORCE}},
        {QS_REASON_BATCH, .run = batch, .env = {FORCE}},
        {QS_REASON_ORDER, .run = order, .env = {FORCE}},
        {QS_REASON_ORDER, OUR_OWN(.pad_a = -8), .env = {FORCE}},
        {QS_REASON_ALIGN, {.ta = T_, .m = 60, .n = 16, .k = 48}, .env = {FORCE}},
        {QS_REASON_ALIGN, {.ta = T_, .m = 66, .n = 16, .k = 48, .fp32_out = true}, .env = {FORCE}},
        {QS_REASON_ALIGN, OUR_OWN(.shift_d = 1), .env = {FORCE}},
        {QS_REASON_ALIGN, OUR_OWN(.pad_d = 4), .env = {FORCE}},
        {QS_REASON_EPILOGUE, OUR_OWN(.lt = true, .epilogue = CUBLASLT_EPILOGUE_BGRADB),
         .env = {FORCE}},
        {QS_REASON_BETA, .run = beta_of_another_type, .env = {FORCE}},
        {QS_REASON_ALPHA, OUR_OWN(.alpha_minus_1 = -1.0f), .env = {FORCE}},
        {QS_REASON_ALIAS, .run = alias, .env = {FORCE}},
        {QS_REASON_EMPTY, {.ta = T_, .m = 64, .n = 16, .k = 0}, .env = {FORCE}},
        {QS_REASON_EMPTY, {.ta = T_, .m = 64, .n = 0, .k = 16}, .env = {FORCE}},
        {QS_REASON_HANDLE, .run = no_handle, .env = {FORCE}},
        {QS_REASON_CONTEXT, .run = memory_of_another_device, .env = {FORCE}},
        {QS_REASON_ARCH, OUR_OWN(), .env = {FORCE, "SOFTCUDA_CAPABILITY=80"}},
        {QS_REASON_CUBLASLT_OLD, OUR_OWN(), .env = {FORCE, "SOFTCUDA_CUBLASLT_VERSION=111100"}},
        {QS_REASON_CUBLASLT_NEW, OUR_OWN(), .env = {FORCE, "SOFTCUDA_CUBLASLT_VERSION=140000"}},
        {QS_REASON_SMALL, OUR_OWN(), .env = {NULL}},
        {QS_REASON_RULE, OUR_OWN(), .env = {"QSHIM_SET=default.action=native"}},
        {QS_REASON_WEIGHT, OUR_OWN(), .env = {"QSHIM_SET=default.action=nf4"}},
        {QS_REASON_ARCH, OUR_OWN(), .env = {FORCE ";default.scale=row", "SOFTCUDA_CAPABILITY=89"}},
        {QS_REASON_CUBLASLT_OLD, OUR_OWN(),
         .env = {FORCE ";default.scale=row", "SOFTCUDA_CUBLASLT_VERSION=120800"}},
        {QS_REASON_CAPTURE_COLD, .run = captured_cold, .env = {FORCE}},
        {QS_REASON_CACHE_FULL, .run = many_keys, .env = {"QSHIM_SET=cache.max_keys=16"}},
        {QS_REASON_MEMORY, OUR_OWN(), .env = {FORCE ";cache.max_mib=1"}},
        {QS_REASON_ALGO_NONE, OUR_OWN(), .env = {FORCE, "SOFTCUDA_HEURISTICS_EMPTY=1"}},
        {QS_REASON_ERROR, OUR_OWN(), .env = {FORCE, "SOFTCUDA_FAIL_LAUNCH=2"}},
        {QS_REASON_FORK, .run = forked, .env = {FORCE}, .served = 2},
        {QS_REASON_OBSERVE, OUR_OWN(), .env = {FORCE, "QSHIM=observe"}},
        {QS_REASON_SHADOW, OUR_OWN(), .env = {FORCE, "QSHIM=shadow"}},
        {QS_REASON_POLICY, OUR_OWN(), .env = {"QSHIM_POLICY=/nonexistent/policy.ini"}},
        {QS_REASON_OFF, OUR_OWN(), .env = {FORCE, "QSHIM=off"}, .unseen = true},
        {QS_REASON_PROCESS, OUR_OWN(), .env = {FORCE ";qshim.process=python*"}, .unseen = true},
};

#define ROWS ((int)(sizeof rows / sizeof *rows))

/* Reasons of products that are served (test_products.c, test_traces.c, test_worth.c),
 * and of engines that this library does not have yet. */
static const enum qs_reason elsewhere[] = {
        QS_REASON_AUTO,      QS_REASON_TUNED,       QS_REASON_NOT_FASTER, QS_REASON_UNTUNED,
        QS_REASON_BUDGET,    QS_REASON_SQNR,        QS_REASON_NONFINITE,  QS_REASON_CHANGING,
        QS_REASON_UNTRACKED, QS_REASON_UNAVAILABLE, QS_REASON_STEPS,
};

static int scene_row(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	const struct row *row = &rows[atoi(argv[0])];
	if (row->run)
		return row->run();
	struct stage *s = stage_open(&row->p);
	report(&s->made, product_call(&s->made, &s->session));
	return 0;
}

const struct scene scenes[] = {{"row", scene_row}, {NULL, NULL}};

/* ---- tests ------------------------------------------------------------------------------------
 */

static const char *const codes[] = {
#define CODE(name, code, what, cure) code,
        QS_REASONS(CODE)
#undef CODE
};

static struct outcome bare, shimmed;

static void run_both(int index, const char *const *env)
{
	char row[16];
	snprintf(row, sizeof row, "%d", index);
	run_scene(&bare, BARE, env, "row", row, NULL);
	run_scene(&shimmed, SHIMMED, env, "row", row, NULL);
	ck_assert_msg(bare.exit == 0, "row %d without the shim: %d %s", index, bare.exit, bare.err);
	ck_assert_msg(shimmed.exit == 0, "row %d: %d %s", index, shimmed.exit, shimmed.err);
}

START_TEST(passed_product_is_bit_identical)
{
	run_both(_i, rows[_i].env);
	if (!rows[_i].served)
		ck_assert_str_eq(shimmed.out, bare.out);
	ck_assert_uint_eq(total_replaced(&shimmed), (uint64_t)rows[_i].served);
}
END_TEST

/* Products beyond the table have no decision each, but a common counter. */
static int told_by_counter(enum qs_reason reason)
{
	int count = 0;
	for (int i = 0; i < shimmed.counters; i++)
		count += shimmed.counter[i].reason == reason;
	return count;
}

START_TEST(passed_product_says_why_once)
{
	const struct row *row = &rows[_i];
	const char *code = codes[row->reason];
	run_both(_i, row->env);
	if (row->unseen) {
		ck_assert_int_eq(shimmed.logs + shimmed.maps, 0);
		return;
	}
	int told = row->reason == QS_REASON_CACHE_FULL ? told_by_counter(row->reason)
	                                               : decisions_with(&shimmed, code);
	ck_assert_msg(told == 1, "%d decisions say %s, first %s (%s): %s", told, code,
	              shimmed.decision[0].reason, shimmed.decision[0].detail, shimmed.err);
}
END_TEST

START_TEST(forked_child_gets_what_the_driver_answers)
{
	for (int i = 0; i < ROWS; i++) {
		if (rows[i].reason != QS_REASON_FORK)
			continue;
		run_both(i, rows[i].env);
		ck_assert_double_ne(printed(&bare, "child"), 0.0);
		ck_assert_double_eq(printed(&shimmed, "child"), printed(&bare, "child"));
		ck_assert_double_eq(printed(&shimmed, "child status"), 0.0);
		ck_assert_int_eq(shimmed.logs, 2); /* each process its own files */
		ck_assert_int_eq(shimmed.maps, 2);
		ck_assert_int_eq(shimmed.broken, 0);
	}
}
END_TEST

START_TEST(every_reason_code_is_covered_or_belongs_elsewhere)
{
	bool covered[QS_REASON_COUNT] = {false};
	for (int i = 0; i < ROWS; i++)
		covered[rows[i].reason] = true;
	for (size_t i = 0; i < sizeof elsewhere / sizeof *elsewhere; i++) {
		ck_assert_msg(!covered[elsewhere[i]], "%s is covered here", codes[elsewhere[i]]);
		covered[elsewhere[i]] = true;
	}
	for (int i = 0; i < QS_REASON_COUNT; i++)
		ck_assert_msg(covered[i], "no test gives the reason %s", codes[i]);
}
END_TEST

START_TEST(newer_cublasLt_is_used_when_the_policy_says_any)
{
	static const char *const env[] = {FORCE ";engine.cublaslt=any",
	                                  "SOFTCUDA_CUBLASLT_VERSION=140000", NULL};
	for (int i = 0; i < ROWS; i++) {
		if (rows[i].reason != QS_REASON_CUBLASLT_NEW)
			continue;
		run_both(i, env);
		ck_assert_uint_eq(total_replaced(&shimmed), 1);
	}
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("passed products");
	TCase *tcase = tcase_create("reasons");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, passed_product_is_bit_identical, 0, ROWS);
	tcase_add_loop_test(tcase, passed_product_says_why_once, 0, ROWS);
	tcase_add_test(tcase, forked_child_gets_what_the_driver_answers);
	tcase_add_test(tcase, every_reason_code_is_covered_or_belongs_elsewhere);
	tcase_add_test(tcase, newer_cublasLt_is_used_when_the_policy_says_any);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
