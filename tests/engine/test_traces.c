/* Recorded streams of cuBLAS calls of real programs (tests/traces), replayed through the shim: how
 * many products are told apart, what role each has, and what the default policy does with it.
 *
 * Products compute nothing here. Operands are three ranges of device memory, one for A, B and D, in
 * which a recorded address keeps only its alignment. The recording does not name threads: in the
 * training trace the NN and NT calls are the backward pass and are made by a thread named as
 * PyTorch's; in the others every call is made by the main thread.
 */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "json.h"
#include "softcuda/softcuda.h"

#define LINE_MAX_   1024
#define LINES_MAX   256
#define RANGE_BYTES ((size_t)160 << 20) /* the largest operand recorded has 131 MB */

/* What a replay works with. */
struct replay {
	struct session session;
	unsigned char *a, *b, *d; /* ranges                                     */
	char line[LINES_MAX][LINE_MAX_];
	int lines;
	bool autograd; /* NN and NT calls belong to a backward thread */
};

static struct replay replay;

/* ---- replaying --------------------------------------------------------------------------------
 */

static int64_t integer(const char *line, const char *name)
{
	return (int64_t)json_number(line, name, 0);
}

static void *address(const char *line, const char *name, unsigned char *range)
{
	return range + (uint64_t)json_number(line, name, 0) % 256;
}

static void gemm(const char *line)
{
	const float alpha = (float)json_number(line, "alpha", 1);
	const float beta = (float)json_number(line, "beta", 0);
	cublasOperation_t ta = (cublasOperation_t)integer(line, "ta");
	cublasOperation_t tb = (cublasOperation_t)integer(line, "tb");
	cudaDataType at = (cudaDataType)integer(line, "At"), bt = (cudaDataType)integer(line, "Bt");
	cudaDataType ct = (cudaDataType)integer(line, "Ct");
	int m = (int)integer(line, "m"), n = (int)integer(line, "n"), k = (int)integer(line, "k");
	int lda = (int)integer(line, "lda"), ldb = (int)integer(line, "ldb");
	int ldc = (int)integer(line, "ldc");
	void *a = address(line, "A", replay.a), *b = address(line, "B", replay.b);
	void *c = address(line, "C", replay.d);
	cublasComputeType_t compute = (cublasComputeType_t)integer(line, "compute");
	if (strstr(line, "Strided"))
		must((int)cublasGemmStridedBatchedEx(
		             replay.session.blas, ta, tb, m, n, k, &alpha, a, at, lda,
		             integer(line, "sa"), b, bt, ldb, integer(line, "sb"), &beta, c, ct,
		             ldc, integer(line, "sc"), (int)integer(line, "batch"), compute,
		             CUBLAS_GEMM_DEFAULT_TENSOR_OP),
		     line);
	else
		must((int)cublasGemmEx(replay.session.blas, ta, tb, m, n, k, &alpha, a, at, lda, b,
		                       bt, ldb, &beta, c, ct, ldc, compute,
		                       CUBLAS_GEMM_DEFAULT_TENSOR_OP),
		     line);
}

static cublasLtMatrixLayout_t layout(const char *line, const char *rows, const char *cols,
                                     const char *ld, const char *type)
{
	cublasLtMatrixLayout_t made;
	must(cublasLtMatrixLayoutCreate(&made, (cudaDataType)integer(line, type),
	                                (uint64_t)integer(line, rows),
	                                (uint64_t)integer(line, cols), integer(line, ld)),
	     "layout");
	return made;
}

static cublasLtMatmulDesc_t description(const char *line, void *bias)
{
	cublasLtMatmulDesc_t desc;
	const int32_t ta = (int32_t)integer(line, "ta"), tb = (int32_t)integer(line, "tb");
	const uint32_t epilogue = (uint32_t)integer(line, "epi");
	must(cublasLtMatmulDescCreate(&desc, (cublasComputeType_t)integer(line, "compute"),
	                              (cudaDataType)integer(line, "scale")),
	     "desc");
	must(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta),
	     "ta");
	must(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb),
	     "tb");
	must(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
	                                    sizeof epilogue),
	     "epilogue");
	if (epilogue & CUBLASLT_EPILOGUE_BIAS)
		must(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
		                                    sizeof bias),
		     "bias");
	return desc;
}

static void matmul(const char *line)
{
	const float alpha = (float)json_number(line, "alpha", 1);
	const float beta = (float)json_number(line, "beta", 0);
	void *d = address(line, "D", replay.d);
	/* The bias lies behind the largest A. */
	cublasLtMatmulDesc_t desc = description(line, replay.a + RANGE_BYTES - (1 << 20));
	cublasLtMatrixLayout_t a = layout(line, "Ar", "Ac", "lda", "At");
	cublasLtMatrixLayout_t b = layout(line, "Br", "Bc", "ldb", "Bt");
	cublasLtMatrixLayout_t out = layout(line, "Dr", "Dc", "ldd", "Dt");
	must(cublasLtMatmul(replay.session.lt, desc, &alpha, address(line, "A", replay.a), a,
	                    address(line, "B", replay.b), b, &beta,
	                    integer(line, "inplace") ? d : NULL, out, d, out, NULL, NULL, 0,
	                    replay.session.stream),
	     line);
	cublasLtMatrixLayoutDestroy(a);
	cublasLtMatrixLayoutDestroy(b);
	cublasLtMatrixLayoutDestroy(out);
	cublasLtMatmulDescDestroy(desc);
}

static void call(const char *line)
{
	if (strstr(line, "\"cublasLtMatmul\""))
		matmul(line);
	else if (strstr(line, "\"cublasGemm"))
		gemm(line);
	/* cublasSgemm is fp32 and not hooked */
}

static bool is_backward(const char *line)
{
	return replay.autograd && strstr(line, "\"cublasGemmEx\"") && integer(line, "ta") == 0;
}

static void *backward(void *argument)
{
	int *index = argument;
	prctl(PR_SET_NAME, "pt_autograd_0");
	must(cudaSetDevice(0), "cudaSetDevice");
	for (; *index < replay.lines && is_backward(replay.line[*index]); ++*index)
		call(replay.line[*index]);
	return NULL;
}

static void read_trace(const char *path)
{
	FILE *file = fopen(path, "re");
	must(!file, path);
	while (replay.lines < LINES_MAX && fgets(replay.line[replay.lines], LINE_MAX_, file))
		must(!json_complete(replay.line[replay.lines++]), "a line that is not JSON");
	fclose(file);
}

static int scene_replay(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	replay.autograd = argv[1][0] == '1';
	read_trace(argv[0]);
	session_open(&replay.session);
	must(cudaMalloc((void **)&replay.a, RANGE_BYTES), "cudaMalloc");
	must(cudaMalloc((void **)&replay.b, RANGE_BYTES), "cudaMalloc");
	must(cudaMalloc((void **)&replay.d, RANGE_BYTES), "cudaMalloc");
	softcuda_set("null_products", 1);
	for (int i = 0; i < replay.lines;) {
		pthread_t thread;
		if (!is_backward(replay.line[i])) {
			call(replay.line[i++]);
			continue;
		}
		must(pthread_create(&thread, NULL, backward, &i), "thread");
		must(pthread_join(thread, NULL), "join");
	}
	return 0;
}

const struct scene scenes[] = {{"replay", scene_replay}, {NULL, NULL}};

/* ---- expectations -----------------------------------------------------------------------------
 */

/* A product of a trace. The sizes that run in fp8 are those whose two conversions cost less than
 * the faster product gains: large in m and n alike. */
struct expected {
	const char *key;  /* as in the log        */
	const char *role; /* "" = unknown         */
	const char *action;
	const char *reason;
	int calls;
};

static const struct expected llama[] = {
        {"TN m=1024 n=2048 k=1024 bf16 fwd", "fwd", "native", "small", 8},
        {"TN m=512 n=2048 k=1024 bf16 fwd", "fwd", "native", "small", 8},
        {"TN m=2816 n=2048 k=1024 bf16 fwd", "fwd", "native", "small", 8},
        {"TN m=1024 n=2048 k=2816 bf16 fwd", "fwd", "native", "small", 4},
        {"TN m=32000 n=2048 k=1024 bf16 fwd", "fwd", "fp8", "auto", 2},
        {"NT m=1024 n=32000 k=2048 bf16 wgrad", "wgrad", "fp8", "auto", 2},
        {"NN m=1024 n=2048 k=32000 bf16 dgrad", "dgrad", "native", "small", 2},
        {"NT m=2816 n=1024 k=2048 bf16 wgrad", "wgrad", "native", "small", 4},
        {"NN m=2816 n=2048 k=1024 bf16 dgrad", "dgrad", "native", "small", 4},
        {"NT m=1024 n=2816 k=2048 bf16 wgrad", "wgrad", "native", "small", 8},
        {"NN m=1024 n=2048 k=2816 bf16 dgrad", "dgrad", "native", "small", 8},
        {"NT m=1024 n=1024 k=2048 bf16 wgrad", "wgrad", "native", "small", 8},
        {"NN m=1024 n=2048 k=1024 bf16 dgrad", "dgrad", "native", "small", 8},
        {"NT m=1024 n=512 k=2048 bf16 wgrad", "wgrad", "native", "small", 8},
        {"NN m=1024 n=2048 k=512 bf16 dgrad", "dgrad", "native", "small", 8},
};
static const struct expected generate[] = {
        {"TN m=1024 n=32 k=1024 bf16 fwd", "fwd", "native", "small", 4},
        {"TN m=512 n=32 k=1024 bf16 fwd", "fwd", "native", "small", 4},
        {"TN m=2816 n=32 k=1024 bf16 fwd", "fwd", "native", "small", 4},
        {"TN m=1024 n=32 k=2816 bf16 fwd", "fwd", "native", "small", 2},
        {"TN m=32000 n=1 k=1024 bf16 fwd", "fwd", "native", "small", 4},
        {"TN m=1024 n=1 k=1024 bf16 fwd", "fwd", "native", "small", 12},
        {"TN m=512 n=1 k=1024 bf16 fwd", "fwd", "native", "small", 12},
        {"TN m=2816 n=1 k=1024 bf16 fwd", "fwd", "native", "small", 12},
        {"TN m=1024 n=1 k=2816 bf16 fwd", "fwd", "native", "small", 6},
};
static const struct expected linear[] = {
        {"TN m=1024 n=64 k=512 bf16 fwd", "fwd", "native", "small", 1},
        {"NN m=512 n=1024 k=64 bf16", "", "native", "small", 2},
        {"NN m=512 n=64 k=1024 bf16", "", "native", "small", 2},
        {"TN m=1024 n=256 k=512 bf16 fwd", "fwd", "native", "small", 1},
        {"NN m=512 n=1024 k=256 bf16", "", "native", "small", 2},
        {"NN m=512 n=256 k=1024 bf16", "", "native", "small", 2},
        {"TN m=1024 n=1 k=512 bf16 fwd", "fwd", "native", "small", 1},
        {"NN m=512 n=1024 k=1 bf16 unaligned:B", "", "native", "small", 2},
        {"NN m=512 n=1 k=1024 bf16", "", "native", "small", 2},
        {"TN m=1024 n=4 k=512 bf16 fwd", "fwd", "native", "small", 1},
        {"NN m=512 n=1024 k=4 bf16 unaligned:B", "", "native", "small", 2},
        {"NN m=512 n=4 k=1024 bf16", "", "native", "small", 2},
        {"TN m=4096 n=4096 k=2048 bf16 fwd", "fwd", "fp8", "auto", 1},
        {"NN m=2048 n=4096 k=4096 bf16", "", "fp8", "auto", 4},
        {"TN m=4096 n=16384 k=2048 bf16 fwd", "fwd", "fp8", "auto", 1},
        {"NN m=2048 n=4096 k=16384 bf16", "", "fp8", "auto", 2},
        {"NN m=2048 n=16384 k=4096 bf16", "", "fp8", "auto", 2},
        {"TN m=1024 n=64 k=512 bf16 bias fwd", "fwd", "native", "small", 1},
        {"TN m=1024 n=256 k=512 bf16 bias fwd", "fwd", "native", "small", 1},
        {"TN m=1024 n=1 k=512 bf16 bias fwd", "fwd", "native", "small", 1},
        {"TN m=1024 n=4 k=512 bf16 bias fwd", "fwd", "native", "small", 1},
        {"TN m=4096 n=4096 k=2048 bf16 bias fwd", "fwd", "fp8", "auto", 1},
        {"TN m=4096 n=16384 k=2048 bf16 bias fwd", "fwd", "fp8", "auto", 1},
        {"TN m=128 n=128 k=64 bf16 batch=8 strided", "", "native", "batch", 3},
        {"NN m=256 n=256 k=512 bf16", "", "native", "small", 1},
        {"NN m=512 n=512 k=256 bf16", "", "native", "small", 1},
        {"TT m=512 n=512 k=256 bf16", "", "native", "small", 1},
        {"NN m=256 n=256 k=512 bf16 bias fwd", "fwd", "native", "small", 1},
        {"NN m=256 n=256 k=512 bf16->fp32", "", "native", "small", 1},
        {"TN m=256 n=256 k=512 fp16 fwd", "fwd", "native", "dtype", 1},
        {"NN m=1 n=256 k=512 bf16 unaligned:AD", "", "native", "align", 1},
};
static const struct expected jax[] = {
        {"NN m=4096 n=512 k=2048 bf16 lt", "", "native", "small", 33},
        {"NN m=4096 n=2048 k=512 bf16 ldb=2048 lt", "", "native", "small", 16},
};

static struct outcome outcome;

static const struct decision *decision_of(const char *key)
{
	for (int i = 0; i < outcome.decisions; i++)
		if (!strcmp(outcome.decision[i].key, key))
			return &outcome.decision[i];
	ck_abort_msg("no decision of '%s'; the first is of '%s'", key, outcome.decision[0].key);
	return NULL;
}

static const struct qs_counter *counter_of(const char *key)
{
	for (int i = 0; i < outcome.counters; i++)
		if (!strcmp(outcome.counter[i].key, key))
			return &outcome.counter[i];
	ck_abort_msg("no counter of '%s'", key);
	return NULL;
}

static void check_row(const struct expected *row)
{
	const struct decision *decision = decision_of(row->key);
	const struct qs_counter *counter = counter_of(row->key);
	ck_assert_msg(!strcmp(decision->action, row->action) &&
	                      !strcmp(decision->reason, row->reason),
	              "%s: %s because %s (%s)", row->key, decision->action, decision->reason,
	              decision->detail);
	ck_assert_msg(!strcmp(decision->role, row->role), "%s: role %s", row->key, decision->role);
	ck_assert_msg(counter->calls == (uint64_t)row->calls, "%s: %d calls", row->key,
	              (int)counter->calls);
	uint64_t served = strcmp(row->action, "fp8") ? 0 : counter->calls;
	ck_assert_msg(counter->replaced == served, "%s: %d replaced", row->key,
	              (int)counter->replaced);
}

static void check_trace(const char *name, bool autograd, const struct expected *table, int rows)
{
	char path[512];
	const char *folder = getenv("QS_TEST_TRACES");
	snprintf(path, sizeof path, "%s/%s.jsonl", folder ? folder : TRACES, name);
	run_scene(&outcome, SHIMMED, NULL, "replay", path, autograd ? "1" : "0", NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %s", outcome.exit, outcome.err);
	ck_assert_int_eq(outcome.broken, 0);
	for (int i = 0; i < rows; i++)
		check_row(&table[i]);
	ck_assert_int_eq(outcome.decisions, rows);
	ck_assert_int_eq(outcome.counters, rows);
}

#define CHECK(name, autograd, table)                                                               \
	check_trace(name, autograd, table, (int)(sizeof(table) / sizeof *(table)))

START_TEST(llama_training_has_three_roles_and_its_head_runs_in_fp8)
{
	CHECK("torch-llama", true, llama);
}
END_TEST

START_TEST(generation_is_too_small_throughout)
{
	CHECK("torch-generate", false, generate);
}
END_TEST

START_TEST(every_form_of_linear_has_its_decision)
{
	CHECK("torch-linear", false, linear);
}
END_TEST

START_TEST(jax_calls_are_seen_through_cublasLt)
{
	CHECK("jax", false, jax);
	ck_assert_str_eq(outcome.decision[0].api, "cublasLtMatmul");
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("traces");
	TCase *tcase = tcase_create("traces");
	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, llama_training_has_three_roles_and_its_head_runs_in_fp8);
	tcase_add_test(tcase, generation_is_too_small_throughout);
	tcase_add_test(tcase, every_form_of_linear_has_its_decision);
	tcase_add_test(tcase, jax_calls_are_seen_through_cublasLt);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
