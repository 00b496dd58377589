/* What a conversion costs is measured as it will be paid: an operand that the product before has as
 * well is converted once for both. */
#include "tuning.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softcuda/softcuda.h"

enum {
	SIDE = 4096,
	K = 640,
	BYTES = SIDE * K * 2,
	MATRICES = 3,
};

/* Of the scene: which matrix each of three products has as its second operand, and what comes
 * between them. */
enum between {
	NOTHING,
	WORK,    /* of the program */
	STREAMS, /* each product in one of its own */
};

static const struct {
	int second[3];
	enum between between;
	double found[2]; /* of either operand, part of the uses */
} layers[] = {
        {{0, 0, 0}, NOTHING, {0, 2.0 / 3}}, /* query, key and value */
        {{0, 1, 1}, NOTHING, {0, 1.0 / 3}}, {{0, 1, 2}, NOTHING, {0, 0}},
        {{0, 0, 0}, WORK, {0, 0}},          {{0, 0, 0}, STREAMS, {0, 0}},
};

/* `layer NUMBER`: three products of one key, the third of which is measured. */
static int scene_layer(int argc, char **argv)
{
	const float one = 1.0f, zero = 0.0f;
	const int layer = argc == 1 ? atoi(argv[0]) : 0;
	struct session session;
	void *a[MATRICES], *b[MATRICES], *d[MATRICES];
	session_open(&session);
	for (int i = 0; i < MATRICES; i++) {
		must(cudaMalloc(&a[i], BYTES), "A");
		must(cudaMalloc(&b[i], BYTES), "B");
		must(cudaMemset(b[i], 0, BYTES), "memset"); /* the runtime's launches are seen */
		must(cudaMalloc(&d[i], (size_t)SIDE * SIDE * 2), "D");
	}
	for (int i = 0; i < 3; i++) {
		cudaStream_t stream;
		if (layers[layer].between == WORK)
			must(cudaMemsetAsync(d[0], 0, 16, session.stream), "memset");
		if (layers[layer].between == STREAMS) {
			must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
			session_use(&session, stream);
		}
		must(cublasGemmEx(session.blas, CUBLAS_OP_T, CUBLAS_OP_N, SIDE, SIDE, K, &one, a[i],
		                  CUDA_R_16BF, K, b[layers[layer].second[i]], CUDA_R_16BF, K, &zero,
		                  d[i], CUDA_R_16BF, SIDE, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
		     "product");
	}
	must(cudaDeviceSynchronize(), "synchronize");
	return 0;
}

const struct scene scenes[] = {{"layer", scene_layer}, {NULL, NULL}};

/* ---- tests --------------------------------------------------------------------------------------
 */

static const struct times times = {.product = 1000, .fp8 = 600, .second = 600, .kernel = 100};
#define CONVERSION 200 /* us of both operands: two kernels */

/* Microseconds of the conversion, as the decision tells them. */
static double conversion(const char *policy, int layer)
{
	char number[2] = {(char)('0' + layer), 0};
	double product, converting, native;
	run_scene(&outcome, SHIMMED, with(policy, times, IDLE), "layer", number, NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
	ck_assert_int_eq(sscanf(only_decision(&outcome)->detail, "fp8 %lf + %lf us, native %lf us",
	                        &product, &converting, &native),
	                 3);
	ck_assert_double_eq(product, 600);
	return converting;
}

START_TEST(what_the_product_before_had_converted_is_not_paid)
{
	const double found = layers[_i].found[0] / 2 + layers[_i].found[1] / 2;
	ck_assert_double_eq_tol(conversion(AUTO, _i), CONVERSION * (1 - found), 0.11);
}
END_TEST

START_TEST(all_of_it_is_paid_where_nothing_is_used_again)
{
	ck_assert_double_eq(conversion(AUTO ";cache.validity=each", 0), CONVERSION);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("the product before");
	TCase *tcase = tcase_create("before");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, what_the_product_before_had_converted_is_not_paid, 0,
	                    (int)(sizeof layers / sizeof *layers));
	tcase_add_test(tcase, all_of_it_is_paid_where_nothing_is_used_again);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
