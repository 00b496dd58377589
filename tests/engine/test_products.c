/* Products that the fp8 engine serves are right: against fp64, for every form that is eligible,
 * with the counters as proof that it was fp8 that answered. The policy forces fp8 at all sizes. */
#include "child.h"
#include "product.h"
#include "softcuda/softcuda.h"

#include <stdio.h>
#include <string.h>

#define N_       CUBLAS_OP_N
#define T_       CUBLAS_OP_T
#define LEAST_DB 26.0 /* two e4m3 operands with one scale each and random normal values give 28 */

static const char *const fp8[] = {"QSHIM_SET=tune.budget_ms=0;default.action=fp8", NULL};
static const char *const by_row[] = {
        "QSHIM_SET=tune.budget_ms=0;default.action=fp8;default.scale=row", NULL};

static const struct product products[] = {
        {.name = "TN", .ta = T_, .tb = N_, .m = 64, .n = 48, .k = 128},
        {.name = "NN", .ta = N_, .tb = N_, .m = 64, .n = 48, .k = 128},
        {.name = "NT", .ta = N_, .tb = T_, .m = 64, .n = 48, .k = 128},
        {.name = "TT", .ta = T_, .tb = T_, .m = 64, .n = 48, .k = 128},

        {.name = "K = 1, TN", .ta = T_, .m = 64, .n = 48, .k = 1},
        {.name = "K = 1, NT", .ta = N_, .tb = T_, .m = 64, .n = 48, .k = 1},
        {.name = "K = 7, TN", .ta = T_, .m = 64, .n = 48, .k = 7},
        {.name = "K = 7, NN", .ta = N_, .m = 64, .n = 48, .k = 7},
        {.name = "K = 7, TT", .ta = T_, .tb = T_, .m = 64, .n = 48, .k = 7},
        {.name = "K = 16, TN", .ta = T_, .m = 64, .n = 48, .k = 16},
        {.name = "K = 16, NT", .ta = N_, .tb = T_, .m = 64, .n = 48, .k = 16},
        {.name = "K = 17, NN", .ta = N_, .m = 64, .n = 48, .k = 17},
        {.name = "K = 1000, TN", .ta = T_, .m = 64, .n = 48, .k = 1000},
        {.name = "K = 1000, NN", .ta = N_, .m = 64, .n = 48, .k = 1000},
        {.name = "K = 1000, NT", .ta = N_, .tb = T_, .m = 64, .n = 48, .k = 1000},

        {.name = "one token", .ta = T_, .m = 128, .n = 1, .k = 256},
        {.name = "one token, NT", .ta = N_, .tb = T_, .m = 128, .n = 1, .k = 256},
        {.name = "15 tokens", .ta = T_, .m = 128, .n = 15, .k = 256},
        {.name = "17 tokens, NN", .ta = N_, .m = 128, .n = 17, .k = 256},
        {.name = "17 tokens, TT", .ta = T_, .tb = T_, .m = 128, .n = 17, .k = 256},
        {.name = "2047 tokens", .ta = T_, .m = 64, .n = 2047, .k = 128},
        {.name = "2047 tokens, NT", .ta = N_, .tb = T_, .m = 64, .n = 2047, .k = 128},

        {.name = "m = 8", .ta = T_, .m = 8, .n = 48, .k = 64},
        {.name = "m = 4104", .ta = T_, .m = 4104, .n = 8, .k = 64},
        {.name = "m = 4, fp32 D", .ta = T_, .m = 4, .n = 48, .k = 64, .fp32_out = true},
        {.name = "m = 36, fp32 D, NT",
         .ta = N_,
         .tb = T_,
         .m = 36,
         .n = 48,
         .k = 64,
         .fp32_out = true},

        {.name = "beta 1, in place", .ta = N_, .tb = T_, .m = 64, .n = 48, .k = 128, .beta = 1.0f},
        {.name = "beta 0.5, in place", .ta = T_, .m = 64, .n = 48, .k = 128, .beta = 0.5f},
        {.name = "beta 1, fp32 D, in place",
         .ta = N_,
         .tb = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .beta = 1.0f,
         .fp32_out = true},
        {.name = "beta 0.5, Lt, in place",
         .lt = true,
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .beta = 0.5f},
        {.name = "beta 0.5, Lt, C apart",
         .lt = true,
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .beta = 0.5f,
         .apart = true},
        {.name = "beta 1, Lt, C apart, fp32",
         .lt = true,
         .ta = N_,
         .m = 64,
         .n = 48,
         .k = 128,
         .beta = 1.0f,
         .apart = true,
         .fp32_out = true},
        {.name = "beta 0, Lt, C apart",
         .lt = true,
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .apart = true},
        {.name = "alpha 0.125", .ta = T_, .m = 64, .n = 48, .k = 128, .alpha_minus_1 = -0.875f},
        {.name = "alpha -3, beta 0.5",
         .ta = N_,
         .m = 64,
         .n = 48,
         .k = 128,
         .alpha_minus_1 = -4.0f,
         .beta = 0.5f},

        {.name = "bias",
         .lt = true,
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .epilogue = CUBLASLT_EPILOGUE_BIAS},
        {.name = "relu",
         .lt = true,
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .epilogue = CUBLASLT_EPILOGUE_RELU},
        {.name = "relu, bias",
         .lt = true,
         .ta = N_,
         .m = 64,
         .n = 48,
         .k = 128,
         .epilogue = CUBLASLT_EPILOGUE_RELU_BIAS},
        {.name = "gelu",
         .lt = true,
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .epilogue = CUBLASLT_EPILOGUE_GELU},
        {.name = "gelu, bias",
         .lt = true,
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .epilogue = CUBLASLT_EPILOGUE_GELU_BIAS},
        {.name = "bias, fp32 D",
         .lt = true,
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .fp32_out = true,
         .epilogue = CUBLASLT_EPILOGUE_BIAS},
        {.name = "bias, beta 1, C apart",
         .lt = true,
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .beta = 1.0f,
         .apart = true,
         .epilogue = CUBLASLT_EPILOGUE_BIAS},

        {.name = "padded leading dimensions",
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .pad_a = 8,
         .pad_b = 24,
         .pad_d = 16},
        {.name = "odd leading dimensions, TN",
         .ta = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .pad_a = 1,
         .pad_b = 3},
        {.name = "odd leading dimensions, NT",
         .ta = N_,
         .tb = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .pad_a = 5,
         .pad_b = 7,
         .pad_d = 8},
        {.name = "unaligned A", .ta = T_, .m = 64, .n = 48, .k = 128, .shift_a = 1},
        {.name = "unaligned B", .ta = N_, .m = 64, .n = 48, .k = 128, .shift_b = 3},
        {.name = "unaligned A and B, odd ld, NN",
         .ta = N_,
         .m = 64,
         .n = 48,
         .k = 100,
         .shift_a = 5,
         .shift_b = 7,
         .pad_a = 1,
         .pad_b = 1},

        {.name = "huge", .ta = T_, .m = 64, .n = 48, .k = 128, .size_of_a = 1e30f},
        {.name = "tiny", .ta = N_, .m = 64, .n = 48, .k = 128, .size_of_b = 1e-28f},
        {.name = "huge by tiny",
         .ta = N_,
         .tb = T_,
         .m = 64,
         .n = 48,
         .k = 128,
         .size_of_a = 1e30f,
         .size_of_b = 1e-28f},
};

/* What is planted, and where it must show. */
static const struct product planted[] = {
        {.name = "NaN in X", .ta = T_, .m = 64, .n = 17, .k = 100, .plant = PLANT_NAN},
        {.name = "NaN in X, NN", .ta = N_, .m = 64, .n = 17, .k = 100, .plant = PLANT_NAN},
        {.name = "NaN in X, TT",
         .ta = T_,
         .tb = T_,
         .m = 64,
         .n = 17,
         .k = 100,
         .plant = PLANT_NAN},
        {.name = "NaN in X, fp32 D",
         .ta = T_,
         .m = 64,
         .n = 17,
         .k = 100,
         .plant = PLANT_NAN,
         .fp32_out = true},
        {.name = "Inf in X", .ta = T_, .m = 64, .n = 17, .k = 100, .plant = PLANT_INF},
        {.name = "Inf in X, NT",
         .ta = N_,
         .tb = T_,
         .m = 64,
         .n = 17,
         .k = 100,
         .plant = PLANT_INF},
        {.name = "NaN in the weight", .ta = T_, .m = 64, .n = 17, .k = 100, .plant = PLANT_NAN_A},
        {.name = "NaN in the weight, NN",
         .ta = N_,
         .m = 64,
         .n = 17,
         .k = 100,
         .plant = PLANT_NAN_A},
};

static const struct product zeros[] = {
        {.name = "A = 0", .ta = T_, .m = 64, .n = 17, .k = 100, .plant = PLANT_ZERO_A},
        {.name = "B = 0", .ta = N_, .m = 64, .n = 17, .k = 100, .plant = PLANT_ZERO_B},
        {.name = "B = 0, beta 1",
         .ta = N_,
         .m = 64,
         .n = 17,
         .k = 100,
         .plant = PLANT_ZERO_B,
         .beta = 1.0f},
        {.name = "A = 0, fp32 D",
         .ta = N_,
         .tb = T_,
         .m = 64,
         .n = 17,
         .k = 100,
         .plant = PLANT_ZERO_A,
         .fp32_out = true},
};

static const struct product spikes[] = {
        {.name = "3e38 in B",
         .ta = T_,
         .m = 64,
         .n = 17,
         .k = 100,
         .plant = PLANT_SPIKE,
         .size_of_a = 0.01f},
        {.name = "3e38 in B, NT",
         .ta = N_,
         .tb = T_,
         .m = 64,
         .n = 17,
         .k = 100,
         .plant = PLANT_SPIKE,
         .size_of_a = 0.01f,
         .fp32_out = true},
};

#define COUNT(table) ((int)(sizeof(table) / sizeof *(table)))

/* Bytes of quantised operands tell whether they were turned: rows are padded to 16. */
static const struct product layouts[] = {
        {.name = "TN as stored", .ta = T_, .tb = N_, .m = 40, .n = 24, .k = 128},
        {.name = "NN as stored", .ta = N_, .tb = N_, .m = 40, .n = 24, .k = 128},
        {.name = "NT as stored", .ta = N_, .tb = T_, .m = 40, .n = 24, .k = 128},
        {.name = "TT as stored", .ta = T_, .tb = T_, .m = 40, .n = 24, .k = 128},
        {.name = "NT, beta 1", .ta = N_, .tb = T_, .m = 40, .n = 24, .k = 128, .beta = 1.0f},
        {.name = "NN, K = 1000", .ta = N_, .tb = N_, .m = 48, .n = 32, .k = 1000},
};

static const struct product *const tables[] = {products, planted, zeros, spikes, layouts};

static int scene_product(int argc, char **argv)
{
	return argc == 2 ? product_scene(&tables[atoi(argv[0])][atoi(argv[1])]) : 2;
}

/* A product through a handle that allows sums of parts in bf16 or does not; prints how many
 * algorithms were asked for that may make them. */
static int scene_sums(int argc, char **argv)
{
	struct session session;
	struct made made;
	const struct product p = {.ta = T_, .m = 64, .n = 48, .k = 128};
	session_open(&session);
	if (argc == 1 && !strcmp(argv[0], "fp32"))
		must((int)cublasSetMathMode(
		             session.blas,
		             (cublasMath_t)(CUBLAS_DEFAULT_MATH |
		                            CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
		     "cublasSetMathMode");
	product_make(&made, &p, 1);
	must((int)product_call(&made, &session), "cublasGemmEx");
	product_fetch(&made);
	printf("asked %ld\nloose %ld\n", softcuda_get("heuristics"),
	       softcuda_get("loose_heuristics"));
	product_free(&made);
	session_close(&session);
	return 0;
}

const struct scene scenes[] = {{"product", scene_product}, {"sums", scene_sums}, {NULL, NULL}};

/* Runs row `index` under the shim and proves that fp8 served it. */
static void serve_with(struct outcome *outcome, const char *const *env, int table, int index)
{
	char which[16], row[16];
	const char *name = tables[table][index].name;
	snprintf(which, sizeof which, "%d", table);
	snprintf(row, sizeof row, "%d", index);
	run_scene(outcome, SHIMMED, env, "product", which, row, NULL);
	ck_assert_msg(outcome->exit == 0, "%s: exit %d: %s", name, outcome->exit, outcome->err);
	const struct decision *decision = only_decision(outcome);
	ck_assert_msg(!strcmp(decision->action, "fp8") && !strcmp(decision->reason, "rule"),
	              "%s: %s because %s (%s)", name, decision->action, decision->reason,
	              decision->detail);
	ck_assert_str_eq(decision->api,
	                 tables[table][index].lt ? "cublasLtMatmul" : "cublasGemmEx");
	ck_assert_uint_eq(only_counter(outcome)->calls, 1);
	ck_assert_uint_eq(only_counter(outcome)->replaced, 1);
	ck_assert_uint_eq(only_counter(outcome)->late, 0);
	ck_assert_int_eq((int)printed(outcome, "status"), 0);
	ck_assert_msg(printed(outcome, "padding") == 1, "%s: wrote between the columns of D", name);
}

static void serve(struct outcome *outcome, int table, int index)
{
	serve_with(outcome, fp8, table, index);
}

static struct outcome outcome;

START_TEST(row_scaled_product_is_within_26_dB_of_fp64)
{
	serve_with(&outcome, by_row, 0, _i);
	double sqnr = printed(&outcome, "sqnr");
	ck_assert_msg(sqnr >= LEAST_DB && sqnr < 45.0, "%s: %.2f dB", products[_i].name, sqnr);
}
END_TEST

START_TEST(row_scaled_value_spoils_exactly_its_row_of_D)
{
	serve_with(&outcome, by_row, 1, _i);
	ck_assert_msg(printed(&outcome, "spoilt") == 1, "%s", planted[_i].name);
	ck_assert_msg(printed(&outcome, "sqnr") >= LEAST_DB, "%s", planted[_i].name);
}
END_TEST

START_TEST(row_scaled_zero_operand_is_served)
{
	serve_with(&outcome, by_row, 2, _i);
}
END_TEST

START_TEST(fp8_product_is_within_26_dB_of_fp64)
{
	serve(&outcome, 0, _i);
	double sqnr = printed(&outcome, "sqnr");
	ck_assert_msg(sqnr >= LEAST_DB, "%s: %.2f dB", products[_i].name, sqnr);
	/* A native product is far better than that: it cannot pass for one of ours. */
	ck_assert_msg(sqnr < 45.0, "%s: %.2f dB is not fp8", products[_i].name, sqnr);
}
END_TEST

START_TEST(planted_value_spoils_exactly_its_row_of_D)
{
	serve(&outcome, 1, _i);
	ck_assert_msg(printed(&outcome, "spoilt") == 1, "%s", planted[_i].name);
	ck_assert_msg(printed(&outcome, "sqnr") >= LEAST_DB, "%s", planted[_i].name);
}
END_TEST

START_TEST(zero_operand_gives_exactly_beta_C)
{
	serve(&outcome, 2, _i);
	ck_assert_msg(printed(&outcome, "sqnr") == 999.0, "%s", zeros[_i].name);
}
END_TEST

START_TEST(largest_finite_operand_gives_no_Inf)
{
	serve(&outcome, 3, _i);
	ck_assert_msg(printed(&outcome, "sqnr") >= LEAST_DB, "%s: %.2f dB", spikes[_i].name,
	              printed(&outcome, "sqnr"));
}
END_TEST

/* The bytes counted are those of both quantised operands, K padded to 16. */
START_TEST(bytes_counted_are_those_of_the_quantised_operands)
{
	int row = 12; /* K = 1000, TN */
	serve(&outcome, 0, row);
	const struct product *p = &products[row];
	ck_assert_int_eq(p->k, 1000);
	ck_assert_uint_eq(only_counter(&outcome)->bytes, (uint64_t)(p->m + p->n) * 1008);
}
END_TEST

/* Bytes of a quantised matrix of `rows` rows along K, or of `k` rows across. */
static uint64_t bytes_of(const struct product *p, int rows, bool k_first, bool as_stored)
{
	const uint64_t k = (uint64_t)p->k, other = (uint64_t)rows;
	return k_first || !as_stored ? other * ((k + 15) / 16 * 16) : k * ((other + 15) / 16 * 16);
}

static void check_layout(int row, const char *const *env, bool as_stored)
{
	const struct product *p = &layouts[row];
	serve_with(&outcome, env, 4, row);
	double sqnr = printed(&outcome, "sqnr");
	ck_assert_msg(sqnr >= LEAST_DB && sqnr < 45.0, "%s: %.2f dB", p->name, sqnr);
	ck_assert_uint_eq(only_counter(&outcome)->bytes,
	                  bytes_of(p, p->m, p->ta != N_, as_stored) +
	                          bytes_of(p, p->n, p->tb == N_, as_stored));
}

START_TEST(large_Blackwell_takes_operands_as_they_are_stored)
{
	static const char *const env[] = {"QSHIM_SET=tune.budget_ms=0;default.action=fp8",
	                                  "SOFTCUDA_CAPABILITY=100", NULL};
	check_layout(_i, env, layouts[_i].k % 16 == 0);
}
END_TEST

START_TEST(other_devices_and_libraries_get_K_contiguous)
{
	static const char *const small[] = {"QSHIM_SET=tune.budget_ms=0;default.action=fp8",
	                                    "SOFTCUDA_CAPABILITY=120", NULL};
	static const char *const older[] = {"QSHIM_SET=tune.budget_ms=0;default.action=fp8",
	                                    "SOFTCUDA_CAPABILITY=100",
	                                    "SOFTCUDA_CUBLASLT_VERSION=120700", NULL};
	check_layout(_i, small, false);
	check_layout(_i, older, false);
}
END_TEST

/* PyTorch's allow_bf16_reduced_precision_reduction = False. */
START_TEST(sums_are_made_in_fp32_where_the_program_wants_it)
{
	const double asked = 2, loose[] = {2, 0}; /* with workspace and without */
	static const char *const how[] = {"any", "fp32"};
	for (int i = 0; i < 2; i++) {
		run_scene(&outcome, SHIMMED, fp8, "sums", how[i], NULL);
		ck_assert_uint_eq(total_replaced(&outcome), 1);
		ck_assert_msg(printed(&outcome, "asked") == asked, "%s", outcome.out);
		ck_assert_msg(printed(&outcome, "loose") == loose[i], "%s: %s", how[i],
		              outcome.out);
	}
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("fp8 products");
	TCase *tcase = tcase_create("products");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, row_scaled_product_is_within_26_dB_of_fp64, 0, COUNT(products));
	tcase_add_loop_test(tcase, row_scaled_value_spoils_exactly_its_row_of_D, 0, COUNT(planted));
	tcase_add_loop_test(tcase, row_scaled_zero_operand_is_served, 0, COUNT(zeros));
	tcase_add_loop_test(tcase, fp8_product_is_within_26_dB_of_fp64, 0, COUNT(products));
	tcase_add_loop_test(tcase, planted_value_spoils_exactly_its_row_of_D, 0, COUNT(planted));
	tcase_add_loop_test(tcase, zero_operand_gives_exactly_beta_C, 0, COUNT(zeros));
	tcase_add_loop_test(tcase, largest_finite_operand_gives_no_Inf, 0, COUNT(spikes));
	tcase_add_test(tcase, bytes_counted_are_those_of_the_quantised_operands);
	tcase_add_loop_test(tcase, large_Blackwell_takes_operands_as_they_are_stored, 0,
	                    COUNT(layouts));
	tcase_add_loop_test(tcase, other_devices_and_libraries_get_K_contiguous, 0, COUNT(layouts));
	tcase_add_test(tcase, sums_are_made_in_fp32_where_the_program_wants_it);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
