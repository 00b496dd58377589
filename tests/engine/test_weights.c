/* Products with kept weights are right: against fp64 of the bf16 weights, for each form in which a
 * weight is kept, with quality, launches and counters as proof of which form answered. Also what is
 * not kept, and says why. How copies follow their sources is test_kept.c's. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"
#include "step.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include "kernels/nf4.h"

#define N_ CUBLAS_OP_N
#define T_ CUBLAS_OP_T

/* Quality with random normal numbers, dB: at least the first, less than the second. */
static const struct range {
	double from, to;
} four_bits = {18.5, 24.5},        /* NF4 weights, the rest in bf16 or fp8: 20 to 21  */
        eight_bits = {26.5, 30.0}, /* both operands in fp8: 28                        */
        tiles = {30.5, 37.0},      /* fp8 weights with a scale for each row: 31 to 32 */
        native = {45.0, 1000.0};   /* the bf16 of D: 55                               */

/* ---- products -----------------------------------------------------------------------------------
 */

#define SHAPE(tokens) .ta = T_, .m = 128, .n = (tokens), .k = 256
/* C and bias are as large as the operands: beta is large and K small, so that they are seen. */
#define LT(tokens, which)                                                                          \
	.lt = true, .ta = T_, .m = 128, .n = (tokens), .k = 64,                                    \
	.epilogue = CUBLASLT_EPILOGUE_##which
#define TURNED(tokens) .ta = N_, .m = 256, .n = (tokens), .k = 128 /* dX = dY W */

/* What a kernel for few tokens computes. */
static const struct product few[] = {
        {.name = "1 token", SHAPE(1)},
        {.name = "8 tokens", SHAPE(8)},
        {.name = "9 tokens", SHAPE(9)},
        {.name = "17 tokens", SHAPE(17)},
        {.name = "33 tokens", SHAPE(33)},
        {.name = "64 tokens", SHAPE(64)},
        {.name = "72 outputs", .ta = T_, .m = 72, .n = 5, .k = 64},
        {.name = "1000 outputs", .ta = T_, .m = 1000, .n = 3, .k = 192},
        {.name = "bias", LT(17, BIAS)},
        {.name = "relu", LT(8, RELU)},
        {.name = "relu, bias", LT(3, RELU_BIAS)},
        {.name = "gelu", LT(8, GELU)},
        {.name = "gelu, bias", LT(64, GELU_BIAS)},
        {.name = "beta -8", SHAPE(8), .beta = -8.0f},
        {.name = "beta 4, Lt", .lt = true, SHAPE(8), .beta = 4.0f},
        {.name = "beta 4, bias", LT(8, BIAS), .beta = 4.0f},
        {.name = "beta 0, C apart", .lt = true, SHAPE(8), .apart = true},
        {.name = "fp32 D", SHAPE(8), .fp32_out = true},
        {.name = "fp32 D, 100 outputs, beta 4",
         .ta = T_,
         .m = 100,
         .n = 7,
         .k = 128,
         .beta = 4.0f,
         .fp32_out = true},
        {.name = "alpha 0.125", SHAPE(8), .alpha_minus_1 = -0.875f},
        {.name = "alpha -3, beta -8", SHAPE(8), .alpha_minus_1 = -4.0f, .beta = -8.0f},
        {.name = "padded", SHAPE(8), .pad_a = 8, .pad_b = 24, .pad_d = 16},
        {.name = "unaligned, odd ld", SHAPE(8), .shift_a = 3, .pad_a = 1, .shift_b = 1, .pad_b = 5},
};

/* What cuBLASLt multiplies, from fp8 operands. */
static const struct product many[] = {
        {.name = "257 tokens", SHAPE(257)},
        {.name = "300 tokens", SHAPE(300)},
        {.name = "65 tokens, unaligned X", SHAPE(65), .shift_b = 1},
        {.name = "65 tokens, odd ld of X", SHAPE(65), .pad_b = 5},
        {.name = "65 tokens, C apart", .lt = true, SHAPE(65), .beta = -8.0f, .apart = true},
        {.name = "dX, 1 token", TURNED(1)},
        {.name = "dX, 17 tokens", TURNED(17)},
        {.name = "dX, 200 tokens", TURNED(200)},
        {.name = "dX, 77 outputs", .ta = N_, .m = 128, .n = 17, .k = 77},
        {.name = "beta -8, C apart", .lt = true, SHAPE(8), .beta = -8.0f, .apart = true},
        {.name = "beta 4", SHAPE(257), .beta = 4.0f},
        {.name = "dX, beta 4", TURNED(65), .beta = 4.0f},
        {.name = "bias", LT(257, BIAS)},
        {.name = "relu, bias", LT(257, RELU_BIAS)},
        {.name = "gelu", LT(257, GELU)},
        {.name = "dX, gelu, bias",
         .lt = true,
         .ta = N_,
         .m = 256,
         .n = 65,
         .k = 64,
         .epilogue = CUBLASLT_EPILOGUE_GELU_BIAS},
        {.name = "fp32 D", SHAPE(257), .fp32_out = true},
        {.name = "dX, fp32 D, beta 4", TURNED(8), .fp32_out = true, .beta = 4.0f},
        {.name = "alpha -3, beta -8", SHAPE(257), .alpha_minus_1 = -4.0f, .beta = -8.0f},
        {.name = "padded", SHAPE(257), .pad_a = 8, .pad_b = 24, .pad_d = 16},
        {.name = "dX, unaligned, odd ld", TURNED(65), .shift_a = 3, .pad_a = 1, .pad_b = 3},
};

/* What a kernel for more tokens computes, on Hopper, with NF4 weights. */
static const struct product wide[] = {
        {.name = "65 tokens", SHAPE(65)},
        {.name = "128 tokens", SHAPE(128)},
        {.name = "129 tokens", SHAPE(129)},
        {.name = "256 tokens", SHAPE(256)},
        {.name = "1000 outputs", .ta = T_, .m = 1000, .n = 80, .k = 192},
        {.name = "bias", LT(65, BIAS)},
        {.name = "relu, bias", LT(65, RELU_BIAS)},
        {.name = "gelu", LT(65, GELU)},
        {.name = "beta 4", SHAPE(65), .beta = 4.0f},
        {.name = "beta 0, C apart", .lt = true, SHAPE(65), .apart = true},
        {.name = "fp32 D", SHAPE(65), .fp32_out = true},
        {.name = "alpha -3, beta -8", SHAPE(65), .alpha_minus_1 = -4.0f, .beta = -8.0f},
        {.name = "padded", SHAPE(65), .pad_a = 8, .pad_b = 24, .pad_d = 16},
        {.name = "unaligned, odd ld of W", SHAPE(65), .shift_a = 3, .pad_a = 1},
};

/* Those that have no NF4 form, and keep fp8 where A can be a weight. */
static const struct product without_nf4[] = {
        {.name = "100 inputs", .ta = T_, .m = 128, .n = 8, .k = 100},
        {.name = "dX, 104 inputs", .ta = N_, .m = 104, .n = 8, .k = 128},
        {.name = "NT", .ta = N_, .tb = T_, .m = 128, .n = 64, .k = 256},
        {.name = "TT", .ta = T_, .tb = T_, .m = 128, .n = 64, .k = 256},
};

static const struct product infinite[] = {
        {.name = "NaN, 8 tokens", SHAPE(8), .plant = PLANT_NAN_A},
        {.name = "Inf, 8 tokens", SHAPE(8), .plant = PLANT_INF_A},
        {.name = "NaN, 257 tokens", SHAPE(257), .plant = PLANT_NAN_A},
        {.name = "Inf, dX", TURNED(8), .plant = PLANT_INF_A},
        {.name = "NaN, 100 tokens", SHAPE(100), .plant = PLANT_NAN_A},
};

#define COUNT(table) ((int)(sizeof(table) / sizeof *(table)))

enum table {
	FEW,
	MANY,
	WITHOUT_NF4,
	INFINITE,
	WIDE
};
static const struct product *const tables[] = {few, many, without_nf4, infinite, wide};

/* ---- scenes -------------------------------------------------------------------------------------
 */

/* `repeat TABLE ROW CALLS [autograd or alone]`: one product, call after call. */
static int scene_repeat(int argc, char **argv)
{
	struct session session;
	struct made made;
	if (argc < 3)
		return 2;
	const char *how = argc == 4 ? argv[3] : "";
	if (!strcmp(how, "autograd"))
		prctl(PR_SET_NAME, "pt_autograd_0");
	session_open(&session);
	product_make(&made, &tables[atoi(argv[0])][atoi(argv[1])], 1);
	if (strcmp(how, "alone"))
		other_product(&session);
	step_begin();
	for (int i = 0; i < atoi(argv[2]); i++)
		step_call(&made, &session);
	product_free(&made);
	return 0;
}

/* Few tokens, many, and dX, of one weight in turn. */
static int scene_layer(int argc, char **argv)
{
	static const struct product shapes[] = {{SHAPE(8)}, {SHAPE(257)}, {TURNED(65)}};
	struct session session;
	struct made made[3];
	(void)argc, (void)argv;
	session_open(&session);
	for (uint64_t i = 0; i < 3; i++)
		product_make(&made[i], &shapes[i], 1 + i);
	for (int i = 1; i < 3; i++) {
		made[i].da = made[0].da;
		memcpy(made[i].a, made[0].a, made[0].size_a * sizeof *made[0].a);
	}
	other_product(&session);
	step_begin();
	for (int i = 0; i < 15; i++)
		step_call(&made[i % 3], &session);
	return 0;
}

/* Whose decisions are looked at, not results: nothing waits, so nothing runs.
 * `decide TRANSPOSED M N K [autograd]` */
static int scene_decide(int argc, char **argv)
{
	struct session session;
	void *a, *b, *d;
	const float one = 1, zero = 0;
	if (argc < 4)
		return 2;
	const bool turned = argv[0][0] == 'T';
	const int m = atoi(argv[1]), n = atoi(argv[2]), k = atoi(argv[3]);
	if (argc == 5)
		prctl(PR_SET_NAME, "pt_autograd_0");
	session_open(&session);
	must((int)cudaMalloc(&a, (size_t)m * (size_t)k * 2), "A");
	must((int)cudaMalloc(&b, (size_t)n * (size_t)k * 2), "B");
	must((int)cudaMalloc(&d, (size_t)m * (size_t)n * 2), "D");
	must((int)cublasGemmEx(session.blas, turned ? T_ : N_, argv[0][1] == 'T' ? T_ : N_, m, n, k,
	                       &one, a, CUDA_R_16BF, turned ? k : m, b, CUDA_R_16BF,
	                       argv[0][1] == 'T' ? n : k, &zero, d, CUDA_R_16BF, m,
	                       CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
	     "product");
	return 0;
}

const struct scene scenes[] = {
        {"repeat", scene_repeat},
        {"layer", scene_layer},
        {"decide", scene_decide},
        {NULL, NULL},
};

/* ---- running ------------------------------------------------------------------------------------
 */

#define SET  "QSHIM_SET=tune.budget_ms=0" OTHER
#define NF4  SET ";default.action=nf4"
#define FP8_ SET ";default.action=fp8"

static struct outcome outcome;

static void repeat_with(const char *const *env, enum table table, int row, int calls,
                        const char *thread)
{
	char which[16], index[16], count[16];
	snprintf(which, sizeof which, "%d", (int)table);
	snprintf(index, sizeof index, "%d", row);
	snprintf(count, sizeof count, "%d", calls);
	run_scene(&outcome, SHIMMED, env, "repeat", which, index, count, thread, NULL);
	ck_assert_msg(outcome.exit == 0, "%s: exit %d: %s", tables[table][row].name, outcome.exit,
	              outcome.err);
	ck_assert_int_eq(steps(&outcome), calls);
}

static void repeat(const char *set, enum table table, int row, int calls)
{
	const char *const env[] = {set, NULL};
	repeat_with(env, table, row, calls, NULL);
}

/* The decision on the product watched; the other one's rule is named. */
static const struct decision *decision(void)
{
	for (int i = 0; i < outcome.decisions; i++)
		if (strcmp(outcome.decision[i].rule, "other"))
			return &outcome.decision[i];
	ck_abort_msg("no decision: %s", outcome.err);
}

static void expect_decision(const char *action, const char *reason)
{
	const struct decision *made = decision();
	ck_assert_msg(!strcmp(made->action, action) && !strcmp(made->reason, reason),
	              "%s: %s because %s (%s)", made->key, made->action, made->reason,
	              made->detail);
}

static void expect_quality(const struct product *p, const struct step *step, int number,
                           struct range range)
{
	ck_assert_msg(step->sqnr >= range.from && step->sqnr < range.to, "%s, step %d: %.2f dB",
	              p->name, number, step->sqnr);
}

static void expect_kept(const struct product *p, const struct step *step, int number, int form,
                        long uses, long bytes)
{
	for (int i = 0; i < QS_KEPT_FORMS; i++) {
		ck_assert_msg(step->uses[i] == (i == form ? uses : 0),
		              "%s, step %d: %ld uses of form %d", p->name, number, step->uses[i],
		              i);
		ck_assert_msg(step->bytes[i] == (i == form ? bytes : 0),
		              "%s, step %d: %ld bytes of form %d", p->name, number, step->bytes[i],
		              i);
	}
}

static void expect_launches(const struct product *p, const struct step *step, int number,
                            enum launches kind, long count)
{
	ck_assert_msg(step->launches[kind] == count,
	              "%s, step %d: %ld launches of kind %d, not %ld", p->name, number,
	              step->launches[kind], (int)kind, count);
}

/* ---- sizes --------------------------------------------------------------------------------------
 */

static long align(int64_t bytes)
{
	return (long)((bytes + 255) / 256 * 256);
}

/* The weight's rows and columns as it lies in memory. */
static int64_t rows_of(const struct product *p)
{
	return p->ta == T_ ? p->m : p->k;
}

static int64_t columns_of(const struct product *p)
{
	return p->ta == T_ ? p->k : p->m;
}

/* Bytes of a kept copy: 256 for what is known of it, its scales, its data. */
static long kept_bytes(const struct product *p, enum form form)
{
	const int64_t rows = rows_of(p), columns = columns_of(p);
	switch (form) {
	case FORM_NF4:
		return 256 + align(qs_nf4_bytes(rows, columns));
	case FORM_FP8_TILES:
		return 256 + align(rows * 4) + align(qs_fp8_bytes(rows, columns));
	case FORM_FP8:
		return 256 + 256 + align(rows * ((columns + 15) / 16 * 16));
	default:
		return 256 + 256 + align(columns * ((rows + 15) / 16 * 16));
	}
}

/* Bytes of X or dY in fp8. */
static long other_bytes(const struct product *p)
{
	return align((int64_t)p->n * ((p->k + 15) / 16 * 16));
}

/* ---- NF4 ----------------------------------------------------------------------------------------
 *
 * Calls 1 and 2 hash the weight, call 3 makes a copy, calls 4 and 5 verify what was suspect when it
 * was made (operand/cache.h), and those that follow submit nothing but the product. Before one by
 * cuBLASLt a part of the copy is compared, and packing is launched for the case that it differs.
 */
#define MADE_AT  2
#define CLEAN_AT 5
#define CALLS    8

static void expect_nf4(const struct product *p, int number, const struct step *step)
{
	const long packed = align(qs_nf4_bytes(rows_of(p), columns_of(p)));
	const bool kept = number >= MADE_AT, clean = number >= CLEAN_AT;
	const bool sampled = clean && step->launches[EXPANSIONS];
	expect_quality(p, step, number, four_bits);
	expect_kept(p, step, number, FORM_NF4, kept, kept ? kept_bytes(p, FORM_NF4) : 0);
	expect_launches(p, step, number, PACKS4, !clean || sampled);
	expect_launches(p, step, number, SAMPLES, sampled);
	expect_launches(p, step, number, HASHES, !clean);
	expect_launches(p, step, number, BF16, 0);
	if (number <= MADE_AT)
		ck_assert_int_ge(step->written, packed);
}

START_TEST(nf4_with_few_tokens_is_one_kernel)
{
	const struct product *p = &few[_i];
	repeat(NF4, FEW, _i, CALLS);
	expect_decision("nf4", "rule");
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_nf4(p, i, &step);
		expect_launches(p, &step, i, THIN4, 1);
		expect_launches(p, &step, i, FP8, 0);
		if (i > MADE_AT)
			ck_assert_int_eq(step.written, 0);
		ck_assert_msg(step.sqnr == step_at(&outcome, 0).sqnr, "%s: a kept copy differs",
		              p->name);
	}
}
END_TEST

START_TEST(nf4_with_more_tokens_is_one_kernel)
{
	const struct product *p = &wide[_i];
	repeat(NF4, WIDE, _i, CALLS);
	expect_decision("nf4", "rule");
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_nf4(p, i, &step);
		expect_launches(p, &step, i, WIDE4, 1);
		expect_launches(p, &step, i, EARLY, i >= CLEAN_AT);
		expect_launches(p, &step, i, EXPANSIONS, 0);
		expect_launches(p, &step, i, FP8, 0);
		if (i > MADE_AT)
			ck_assert_int_eq(step.written, 0);
	}
}
END_TEST

/* cuBLAS launches nothing in such a program, and so shows nothing. */
START_TEST(nf4_is_kept_where_the_program_makes_no_other_products)
{
	const char *const env[] = {NF4, NULL};
	repeat_with(env, FEW, 0, CALLS, "alone");
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	ck_assert_int_eq(step_at(&outcome, CALLS - 1).written, 0);
}
END_TEST

START_TEST(nf4_with_more_tokens_and_backward_is_expanded_to_fp8)
{
	const struct product *p = &many[_i];
	repeat(NF4, MANY, _i, CALLS);
	expect_decision("nf4", "rule");
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_nf4(p, i, &step);
		expect_launches(p, &step, i, EXPANSIONS, 1);
		expect_launches(p, &step, i, THIN4, 0);
		expect_launches(p, &step, i, WIDE4, 0);
		expect_launches(p, &step, i, FP8, 1);
		if (i > MADE_AT)
			ck_assert_int_eq(step.written, other_bytes(p));
	}
}
END_TEST

/* Our kernels cannot be launched: each call is the program's own, and the reason is told. */
START_TEST(launches_that_fail_leave_nf4_to_the_program)
{
	const char *const env[] = {NF4, "SOFTCUDA_FAIL_LAUNCH=701", NULL};
	repeat_with(env, _i ? MANY : FEW, 0, CALLS, NULL);
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_assert_int_eq(decisions_with(&outcome, "error"), 1);
	for (int i = 0; i < CALLS; i++)
		ck_assert_double_gt(step_at(&outcome, i).sqnr, 45.0);
}
END_TEST

START_TEST(what_is_no_weight_of_whole_blocks_has_no_nf4)
{
	const struct product *p = &without_nf4[_i];
	const char *const env[] = {NF4, NULL};
	for (int autograd = 0; autograd < 2; autograd++) {
		repeat_with(env, WITHOUT_NF4, _i, 3, autograd ? "autograd" : NULL);
		expect_decision("native", "weight");
		ck_assert_uint_eq(total_replaced(&outcome), 0);
		for (int i = 0; i < 3; i++) {
			const struct step step = step_at(&outcome, i);
			expect_quality(p, &step, i, native);
			expect_kept(p, &step, i, 0, 0, 0);
			expect_launches(p, &step, i, BF16, 1);
		}
	}
}
END_TEST

START_TEST(devices_without_fp8_have_no_nf4)
{
	const char *const env[] = {NF4, "SOFTCUDA_CAPABILITY=80", NULL};
	repeat_with(env, _i ? MANY : FEW, 1, 3, NULL);
	expect_decision("native", "arch");
	ck_assert_uint_eq(total_replaced(&outcome), 0);
}
END_TEST

/* One kernel for few tokens runs as well where there are no clusters, that for more does not. */
START_TEST(nf4_runs_on_every_device_with_fp8)
{
	static const enum table ran[] = {FEW, MANY, WIDE};
	static const char *const capabilities[] = {
	        "SOFTCUDA_CAPABILITY=89", "SOFTCUDA_CAPABILITY=100", "SOFTCUDA_CAPABILITY=120"};
	const char *const env[] = {NF4, capabilities[_i / 3], NULL};
	const enum table table = ran[_i % 3];
	repeat_with(env, table, 1, CALLS, NULL);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_nf4(&tables[table][1], i, &step);
		expect_launches(&tables[table][1], &step, i, WIDE4, 0);
	}
}
END_TEST

/* The kernel for more tokens describes X to the device by a function of CUDA 12. */
START_TEST(nf4_with_more_tokens_is_expanded_where_the_driver_is_old)
{
	const struct product *p = &wide[_i];
	const char *const env[] = {NF4, "SOFTCUDA_DRIVER=11080", NULL};
	repeat_with(env, WIDE, _i, CALLS, NULL);
	expect_decision("nf4", "rule");
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_nf4(p, i, &step);
		expect_launches(p, &step, i, EXPANSIONS, 1);
		expect_launches(p, &step, i, WIDE4, 0);
		expect_launches(p, &step, i, FP8, 1);
	}
}
END_TEST

/* ---- NaN and Inf in the weight ------------------------------------------------------------------
 */

/* Until a hash has come back, the kernel for few tokens takes the weight itself. Expanded, all of D
 * is NaN: nothing that could be taken for a result. Then the program's own call is made. */
START_TEST(a_weight_that_is_not_finite_has_no_nf4)
{
	const struct product *p = &infinite[_i];
	const bool is_few = _i != 2 && _i != 3;
	repeat(NF4, INFINITE, _i, CALLS);
	ck_assert_int_eq(decisions_with(&outcome, "nonfinite"), 1);
	ck_assert_uint_eq(total_replaced(&outcome), 1);
	ck_assert_uint_eq(total_late(&outcome), CALLS - 1);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_kept(p, &step, i, 0, 0, 0);
		expect_launches(p, &step, i, BF16, i >= 1);
		if (!is_few && i == 0) {
			ck_assert_msg(isinf(step.sqnr), "%s: %.2f dB", p->name, step.sqnr);
			continue;
		}
		expect_quality(p, &step, i, native);
		ck_assert_msg(step.spoilt, "%s, step %d", p->name, i);
	}
}
END_TEST

/* cuBLASLt's operands hold NaN where they must, so they are kept. */
START_TEST(a_weight_that_is_not_finite_has_fp8_but_no_tiles)
{
	const struct product *p = &infinite[_i];
	repeat(FP8_, INFINITE, _i, CALLS);
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_quality(p, &step, i, eight_bits);
		ck_assert_msg(step.spoilt, "%s, step %d", p->name, i);
		ck_assert_int_eq(step.uses[FORM_FP8_TILES], 0);
		ck_assert_int_eq(step.uses[FORM_FP8] + step.uses[FORM_FP8_TURNED],
		                 _i >= 2 && i >= MADE_AT);
	}
}
END_TEST

/* ---- fp8 ----------------------------------------------------------------------------------------
 */

START_TEST(fp8_with_few_tokens_is_one_kernel_once_the_weight_is_kept)
{
	const struct product *p = &few[_i];
	repeat(FP8_, FEW, _i, CALLS);
	expect_decision("fp8", "rule");
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		const bool kept = i >= MADE_AT;
		expect_quality(p, &step, i, kept ? tiles : eight_bits);
		expect_kept(p, &step, i, FORM_FP8_TILES, kept,
		            kept ? kept_bytes(p, FORM_FP8_TILES) : 0);
		expect_launches(p, &step, i, THIN8, kept);
		expect_launches(p, &step, i, PACKS8, kept && i < CLEAN_AT);
		expect_launches(p, &step, i, HASHES, i < CLEAN_AT);
		expect_launches(p, &step, i, CASTS, !kept);
		expect_launches(p, &step, i, FP8, !kept);
		expect_launches(p, &step, i, BF16, 0);
		if (i > MADE_AT)
			ck_assert_int_eq(step.written, 0);
	}
}
END_TEST

static void expect_fp8_operand(const struct product *p, enum form form, int number,
                               const struct step *step)
{
	const bool kept = number >= MADE_AT;
	expect_quality(p, step, number, eight_bits);
	expect_kept(p, step, number, form, kept, kept ? kept_bytes(p, form) : 0);
	expect_launches(p, step, number, HASHES, number < CLEAN_AT);
	expect_launches(p, step, number, FP8, 1);
	expect_launches(p, step, number, BF16, 0);
	if (number == MADE_AT)
		ck_assert_int_eq(step->written, other_bytes(p) + kept_bytes(p, form));
	if (number > MADE_AT)
		ck_assert_int_eq(step->written, other_bytes(p));
}

START_TEST(a_kept_fp8_weight_is_not_quantised_again)
{
	const struct product *p = &many[_i];
	const bool is_few = p->n <= QS_TOKENS_MAX && p->ta == T_ && !p->apart;
	const enum form form = p->ta == T_ ? FORM_FP8 : FORM_FP8_TURNED;
	ck_assert(!is_few);
	repeat(FP8_, MANY, _i, CALLS);
	expect_decision("fp8", "rule");
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_fp8_operand(p, form, i, &step);
	}
}
END_TEST

/* The forms of cuBLASLt's operands need no blocks of 64. */
START_TEST(fp8_keeps_weights_of_any_size)
{
	const struct product *p = &without_nf4[_i];
	const enum form form = p->ta == T_ ? FORM_FP8 : FORM_FP8_TURNED;
	repeat(FP8_, WITHOUT_NF4, _i, CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		if (p->tb == N_) {
			expect_fp8_operand(p, form, i, &step);
			continue;
		}
		expect_quality(p, &step, i, eight_bits);
		expect_kept(p, &step, i, 0, 0, 0);
	}
}
END_TEST

/* With a scale for each row there is no form for cuBLASLt. */
START_TEST(row_scales_keep_tiles_only)
{
	const enum table table = _i ? MANY : FEW;
	repeat(FP8_ ";default.scale=row", table, 1, CALLS);
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct product *p = &tables[table][1];
		const struct step step = step_at(&outcome, i);
		const bool kept = !_i && i >= MADE_AT;
		expect_kept(p, &step, i, FORM_FP8_TILES, kept,
		            kept ? kept_bytes(p, FORM_FP8_TILES) : 0);
		expect_launches(p, &step, i, FP8, !kept);
	}
}
END_TEST

/* ---- one weight, several products ---------------------------------------------------------------
 */

START_TEST(one_nf4_copy_serves_every_product_of_a_layer)
{
	const char *const env[] = {NF4, NULL};
	static const struct product weight = {SHAPE(8), .name = "layer"};
	run_scene(&outcome, SHIMMED, env, "layer", NULL);
	ck_assert_uint_eq(total_replaced(&outcome), 15);
	for (int i = 0; i < 15; i++) {
		const struct step step = step_at(&outcome, i);
		expect_quality(&weight, &step, i, four_bits);
		expect_kept(&weight, &step, i, FORM_NF4, i >= MADE_AT,
		            i >= MADE_AT ? kept_bytes(&weight, FORM_NF4) : 0);
		expect_launches(&weight, &step, i, THIN4, i % 3 == 0);
		expect_launches(&weight, &step, i, FP8, i % 3 != 0);
	}
}
END_TEST

START_TEST(fp8_keeps_a_copy_for_each_form)
{
	const char *const env[] = {FP8_, NULL};
	static const struct product weight = {SHAPE(8), .name = "layer"};
	static const enum form forms[] = {FORM_FP8_TILES, FORM_FP8, FORM_FP8_TURNED};
	run_scene(&outcome, SHIMMED, env, "layer", NULL);
	ck_assert_uint_eq(total_replaced(&outcome), 15);
	for (int i = 6; i < 15; i++) {
		const struct step step = step_at(&outcome, i);
		expect_quality(&weight, &step, i, i % 3 ? eight_bits : tiles);
		for (int form = 0; form < 3; form++) {
			ck_assert_int_eq(step.uses[forms[form]], i % 3 == form);
			ck_assert_int_eq(step.bytes[forms[form]], kept_bytes(&weight, forms[form]));
		}
	}
}
END_TEST

/* ---- levels of validity -------------------------------------------------------------------------
 */

static const enum table both[] = {FEW, MANY};

START_TEST(levels_below_verified_keep_nothing)
{
	static const char *const sets[] = {
	        NF4 ";cache.validity=each", NF4 ";cache.validity=adjacent",
	        FP8_ ";cache.validity=each", FP8_ ";cache.validity=adjacent"};
	repeat(sets[_i / 2], both[_i % 2], 1, CALLS);
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_quality(&few[1], &step, i, _i < 4 ? four_bits : eight_bits);
		expect_kept(&few[1], &step, i, 0, 0, 0);
		expect_launches(&few[1], &step, i, HASHES, 0);
		expect_launches(&few[1], &step, i, PACKS4, _i < 4);
	}
}
END_TEST

START_TEST(verified_looks_at_every_use)
{
	repeat(_i < 2 ? NF4 ";cache.validity=verified" : FP8_ ";cache.validity=verified",
	       both[_i % 2], 1, CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		const long uses =
		        step.uses[FORM_NF4] + step.uses[FORM_FP8_TILES] + step.uses[FORM_FP8];
		ck_assert_int_eq(uses, i >= MADE_AT);
		expect_launches(&few[1], &step, i, HASHES, 1);
	}
}
END_TEST

START_TEST(frozen_keeps_at_the_first_use)
{
	repeat(_i < 2 ? NF4 ";cache.validity=frozen" : FP8_ ";cache.validity=frozen", both[_i % 2],
	       1, CALLS);
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		const long uses =
		        step.uses[FORM_NF4] + step.uses[FORM_FP8_TILES] + step.uses[FORM_FP8];
		expect_quality(&few[1], &step, i,
		               _i < 2    ? four_bits
		               : _i == 2 ? tiles
		                         : eight_bits);
		ck_assert_int_eq(uses, 1);
		expect_launches(&few[1], &step, i, HASHES, i == 0);
	}
}
END_TEST

/* ---- policies -----------------------------------------------------------------------------------
 */

/* The emulation's clock, in microseconds. */
#define CLOCK "SOFTCUDA_FP8_US=50", "SOFTCUDA_SECOND_US=50", "SOFTCUDA_KERNEL_US=1"

START_TEST(performant_nf4_must_win_where_it_can_be_timed)
{
	static const struct clock {
		const char *native, *action, *reason;
		enum table table;
	} clocks[] = {
	        {"SOFTCUDA_PRODUCT_US=100", "nf4", "rule", MANY},
	        {"SOFTCUDA_PRODUCT_US=25", "native", "not-faster", MANY},
	        {"SOFTCUDA_PRODUCT_US=25", "nf4", "rule", FEW},
	        {"SOFTCUDA_PRODUCT_US=100", "nf4", "rule", WIDE},
	        {"SOFTCUDA_PRODUCT_US=25", "native", "not-faster", WIDE},
	};
	const struct clock *clock = &clocks[_i];
	const char *const env[] = {"QSHIM_SET=tune.budget_ms=60000;default.action=nf4;default."
	                           "strategy=performant" OTHER,
	                           clock->native, CLOCK, NULL};
	repeat_with(env, clock->table, 1, CALLS, NULL);
	expect_decision(clock->action, clock->reason);
	for (int i = 0; i < CALLS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_quality(&few[1], &step, i,
		               strcmp(clock->action, "nf4") ? native : four_bits);
	}
}
END_TEST

/* Few tokens are not timed: our kernel is faster. Only the decision is looked at. The weight is
 * small enough for the emulation to expand it within the second that a measurement waits. */
START_TEST(performant_nf4_of_few_tokens_is_sure_to_win)
{
	static const struct size {
		const char *n, *action;
	} sizes[] = {{"32", "nf4"}, {"33", "native"}, {"128", "native"}};
	const struct size *size = &sizes[_i];
	const char *const env[] = {"QSHIM_SET=tune.budget_ms=60000;default.action=nf4;default."
	                           "strategy=performant",
	                           "SOFTCUDA_PRODUCT_US=25", "SOFTCUDA_IDLE_PRODUCTS=1", CLOCK,
	                           NULL};
	run_scene(&outcome, SHIMMED, env, "decide", "TN", "1024", size->n, "1024", NULL);
	ck_assert_str_eq(only_decision(&outcome)->action, size->action);
}
END_TEST

/* Not so where nf4 was asked for outright. */
START_TEST(eager_nf4_is_timed_and_done_in_any_case)
{
	const char *const env[] = {"QSHIM_SET=tune.budget_ms=60000;default.action=nf4" OTHER,
	                           "SOFTCUDA_PRODUCT_US=25", CLOCK, NULL};
	repeat_with(env, MANY, 1, CALLS, NULL);
	expect_decision("nf4", "rule");
	ck_assert_uint_eq(total_replaced(&outcome), CALLS);
}
END_TEST

#define OUTSIDE  NULL
#define BACKWARD "autograd"

static const struct choice {
	const char *preset, *layout, *m, *n, *k, *thread;
	const char *action, *reason, *rule;
} choices[] = {
        {"nf4-decode", "TN", "2048", "1", "2048", OUTSIDE, "nf4", "rule", "decode"},
        {"nf4-decode", "TN", "4096", "32", "2048", OUTSIDE, "nf4", "rule", "decode"},
        {"nf4-decode", "TN", "2048", "33", "2048", OUTSIDE, "native", "small", "default"},
        {"nf4-decode", "TN", "2040", "8", "2048", OUTSIDE, "native", "small", "default"},
        {"nf4-decode", "TN", "2048", "8", "2040", OUTSIDE, "native", "small", "default"},
        {"nf4-decode", "NN", "2048", "8", "2048", OUTSIDE, "native", "small", "default"},
        {"nf4-decode", "NN", "2048", "8", "2048", BACKWARD, "native", "small", "default"},
        {"qlora", "TN", "1024", "512", "1024", OUTSIDE, "nf4", "rule", "base"},
        {"qlora", "TN", "1024", "4096", "2048", OUTSIDE, "nf4", "rule", "base"},
        {"qlora", "NN", "1024", "512", "1024", BACKWARD, "nf4", "rule", "base"},
        {"qlora", "NT", "1024", "1024", "512", BACKWARD, "native", "rule", "default"},
        {"qlora", "TN", "16", "512", "1024", OUTSIDE, "native", "rule", "adapter"},
        {"qlora", "TN", "1024", "512", "256", OUTSIDE, "native", "rule", "adapter"},
        {"qlora", "NN", "1024", "512", "64", BACKWARD, "native", "rule", "adapter"},
        {"qlora", "TN", "1016", "512", "1024", OUTSIDE, "native", "rule", "default"},
};

START_TEST(presets_decide_as_they_say)
{
	const struct choice *choice = &choices[_i];
	char preset[64];
	snprintf(preset, sizeof preset, "QSHIM_POLICY=%s", choice->preset);
	const char *const env[] = {preset, NULL};
	run_scene(&outcome, SHIMMED, env, "decide", choice->layout, choice->m, choice->n, choice->k,
	          choice->thread, NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %s", outcome.exit, outcome.err);
	const struct decision *made = only_decision(&outcome);
	ck_assert_msg(!strcmp(made->action, choice->action) &&
	                      !strcmp(made->reason, choice->reason) &&
	                      !strcmp(made->rule, choice->rule),
	              "%s %s: %s because %s (rule %s)", choice->preset, made->key, made->action,
	              made->reason, made->rule);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("weights");
	TCase *tcase = tcase_create("weights");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, nf4_with_few_tokens_is_one_kernel, 0, COUNT(few));
	tcase_add_loop_test(tcase, nf4_with_more_tokens_is_one_kernel, 0, COUNT(wide));
	tcase_add_test(tcase, nf4_is_kept_where_the_program_makes_no_other_products);
	tcase_add_loop_test(tcase, launches_that_fail_leave_nf4_to_the_program, 0, 2);
	tcase_add_loop_test(tcase, nf4_with_more_tokens_and_backward_is_expanded_to_fp8, 0,
	                    COUNT(many));
	tcase_add_loop_test(tcase, what_is_no_weight_of_whole_blocks_has_no_nf4, 0,
	                    COUNT(without_nf4));
	tcase_add_loop_test(tcase, devices_without_fp8_have_no_nf4, 0, 2);
	tcase_add_loop_test(tcase, nf4_runs_on_every_device_with_fp8, 0, 9);
	tcase_add_loop_test(tcase, nf4_with_more_tokens_is_expanded_where_the_driver_is_old, 0,
	                    COUNT(wide));
	tcase_add_loop_test(tcase, a_weight_that_is_not_finite_has_no_nf4, 0, COUNT(infinite));
	tcase_add_loop_test(tcase, a_weight_that_is_not_finite_has_fp8_but_no_tiles, 0,
	                    COUNT(infinite));
	tcase_add_loop_test(tcase, fp8_with_few_tokens_is_one_kernel_once_the_weight_is_kept, 0,
	                    COUNT(few));
	tcase_add_loop_test(tcase, a_kept_fp8_weight_is_not_quantised_again, 0, COUNT(many));
	tcase_add_loop_test(tcase, fp8_keeps_weights_of_any_size, 0, COUNT(without_nf4));
	tcase_add_loop_test(tcase, row_scales_keep_tiles_only, 0, 2);
	tcase_add_test(tcase, one_nf4_copy_serves_every_product_of_a_layer);
	tcase_add_test(tcase, fp8_keeps_a_copy_for_each_form);
	tcase_add_loop_test(tcase, levels_below_verified_keep_nothing, 0, 8);
	tcase_add_loop_test(tcase, verified_looks_at_every_use, 0, 4);
	tcase_add_loop_test(tcase, frozen_keeps_at_the_first_use, 0, 4);
	tcase_add_loop_test(tcase, performant_nf4_must_win_where_it_can_be_timed, 0, 5);
	tcase_add_loop_test(tcase, performant_nf4_of_few_tokens_is_sure_to_win, 0, 3);
	tcase_add_test(tcase, eager_nf4_is_timed_and_done_in_any_case);
	tcase_add_loop_test(tcase, presets_decide_as_they_say, 0, COUNT(choices));
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
