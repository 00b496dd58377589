/* Roles from what earlier calls did with the same weight: the streams of calls of a few models, as
 * PyTorch makes them. Addresses are never followed. */
#include "gemm/gemm.h"
#include "tests/support/suite.h"
#include "tests/unit/key.h"

#define TOKENS 256
#define STEPS  3

#define AT(number) ((void *)(uintptr_t)(0x700000000000 + ((uintptr_t)(number) << 20)))

/* A layer of `in` to `out` features, whose weight lies at AT(weight). */
struct linear {
	int weight;
	int64_t in, out;
	bool conv1d; /* stored by inputs, as GPT-2 does */
};

static enum qs_role call(int ta, int tb, int64_t m, int64_t n, int64_t k, int weight, bool autograd)
{
	struct qs_gemm g = {.key = plain_key(m, n, k), .a = AT(weight), .b = AT(900), .d = AT(901)};
	g.key.ta = (uint8_t)ta;
	g.key.tb = (uint8_t)tb;
	g.key.lda = ta ? k : m;
	g.key.ldb = tb ? n : k;
	return qs_role_by_evidence(&g, autograd);
}

static enum qs_role forward_on(const struct linear *l, bool autograd)
{
	return call(l->conv1d ? CUBLAS_OP_N : CUBLAS_OP_T, CUBLAS_OP_N, l->out, TOKENS, l->in,
	            l->weight, autograd);
}

static enum qs_role forward(const struct linear *l)
{
	return forward_on(l, false);
}

static enum qs_role dgrad(const struct linear *l)
{
	return call(l->conv1d ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, l->in, TOKENS, l->out,
	            l->weight, true);
}

/* Operand A is an activation: dY for a Conv1D, X for a Linear. */
static enum qs_role wgrad(const struct linear *l)
{
	const int64_t m = l->conv1d ? l->out : l->in, n = l->conv1d ? l->in : l->out;
	return call(CUBLAS_OP_N, CUBLAS_OP_T, m, n, TOKENS, 902, true);
}

static void set_up(void)
{
	qs_roles_forked();
}

static const struct linear gpt2[] = {
        {1, 768, 2304, true}, {2, 768, 768, true},    {3, 768, 3072, true},
        {4, 3072, 768, true}, {5, 768, 50257, false}, /* the head, tied to the embedding */
};
#define GPT2 ((int)(sizeof gpt2 / sizeof *gpt2))

START_TEST(a_conv1d_model_is_known_from_its_second_step_on)
{
	for (int step = 0; step < STEPS; step++) {
		for (int i = 0; i < GPT2; i++)
			ck_assert_int_eq(forward(&gpt2[i]),
			                 step || !gpt2[i].conv1d ? QS_ROLE_FWD : QS_ROLE_UNKNOWN);
		for (int i = GPT2 - 1; i >= 0; i--) {
			ck_assert_int_eq(dgrad(&gpt2[i]), QS_ROLE_DGRAD);
			ck_assert_int_eq(wgrad(&gpt2[i]), QS_ROLE_WGRAD);
		}
	}
}
END_TEST

START_TEST(linear_is_known_at_once)
{
	const struct linear l = {1, 1024, 1024, false};
	for (int step = 0; step < STEPS; step++) {
		ck_assert_int_eq(forward(&l), QS_ROLE_FWD);
		ck_assert_int_eq(dgrad(&l), QS_ROLE_DGRAD);
		ck_assert_int_eq(wgrad(&l), QS_ROLE_WGRAD);
	}
}
END_TEST

START_TEST(a_forward_product_done_again_is_told_from_a_gradient)
{
	const struct linear linear = {1, 1024, 512, false}, conv = {2, 1024, 1024, true};
	forward(&linear);
	ck_assert_int_eq(forward_on(&linear, true), QS_ROLE_FWD);
	ck_assert_int_eq(dgrad(&linear), QS_ROLE_DGRAD);
	forward(&conv);
	ck_assert_int_eq(forward_on(&conv, true), QS_ROLE_UNKNOWN); /* not confirmed yet */
	ck_assert_int_eq(dgrad(&conv), QS_ROLE_DGRAD);
	ck_assert_int_eq(forward_on(&conv, true), QS_ROLE_FWD);
}
END_TEST

START_TEST(a_weight_read_both_ways_going_forward_has_no_gradient_role)
{
	const struct linear head = {1, 512, 32000, false}, embedding = {1, 32000, 512, true};
	ck_assert_int_eq(forward(&head), QS_ROLE_FWD);
	ck_assert_int_eq(forward(&embedding), QS_ROLE_UNKNOWN);
	ck_assert_int_eq(dgrad(&head), QS_ROLE_UNKNOWN);
	ck_assert_int_eq(dgrad(&embedding), QS_ROLE_UNKNOWN);
	ck_assert_int_eq(forward(&head), QS_ROLE_FWD);
	ck_assert_int_eq(forward(&embedding), QS_ROLE_UNKNOWN);
}
END_TEST

START_TEST(a_matrix_only_seen_going_forward_proves_nothing)
{
	const struct linear l = {1, 1024, 4096, true};
	for (int i = 0; i < 10; i++)
		ck_assert_int_eq(forward(&l), QS_ROLE_UNKNOWN);
}
END_TEST

START_TEST(another_shape_at_the_address_is_another_matrix)
{
	const struct linear l = {1, 1024, 4096, true}, other = {1, 2048, 4096, true};
	forward(&l);
	dgrad(&l);
	ck_assert_int_eq(forward(&other), QS_ROLE_UNKNOWN);
	ck_assert_int_eq(forward(&l), QS_ROLE_FWD);
}
END_TEST

START_TEST(an_epilogue_tells_only_its_own_product)
{
	const struct linear l = {1, 1024, 4096, true};
	struct qs_gemm g = {.key = plain_key(l.out, TOKENS, l.in), .a = AT(1)};
	g.key.ta = CUBLAS_OP_N;
	g.key.lda = l.out;
	g.key.epilogue = CUBLASLT_EPILOGUE_BIAS;
	ck_assert_int_eq(qs_role_by_evidence(&g, false), QS_ROLE_FWD);
	ck_assert_int_eq(forward(&l), QS_ROLE_UNKNOWN);
	ck_assert_int_eq(dgrad(&l), QS_ROLE_DGRAD);
	ck_assert_int_eq(forward(&l), QS_ROLE_FWD);
}
END_TEST

START_TEST(a_weight_off_alignment_is_not_remembered)
{
	struct qs_gemm g = {.key = plain_key(512, TOKENS, 1024), .a = (char *)AT(1) + 2};
	qs_role_by_evidence(&g, false);
	ck_assert_int_eq(qs_role_by_evidence(&g, true), QS_ROLE_UNKNOWN);
}
END_TEST

/* More weights than the table holds: the oldest are forgotten, none is mistaken. */
START_TEST(a_full_table_forgets_and_does_not_err)
{
	int known = 0;
	for (int i = 0; i < 20000; i++) {
		const struct linear l = {i, 1024, 4096, true};
		forward(&l);
		ck_assert_int_eq(dgrad(&l), QS_ROLE_DGRAD);
	}
	for (int i = 0; i < 20000; i++) {
		const struct linear l = {i, 1024, 4096, true};
		enum qs_role role = forward(&l);
		ck_assert(role == QS_ROLE_FWD || role == QS_ROLE_UNKNOWN);
		known += role == QS_ROLE_FWD;
	}
	ck_assert_int_lt(known, 20000);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("evidence");
	TCase *tcase = tcase_create("evidence");
	tcase_add_checked_fixture(tcase, set_up, NULL);
	tcase_add_test(tcase, a_conv1d_model_is_known_from_its_second_step_on);
	tcase_add_test(tcase, linear_is_known_at_once);
	tcase_add_test(tcase, a_forward_product_done_again_is_told_from_a_gradient);
	tcase_add_test(tcase, a_weight_read_both_ways_going_forward_has_no_gradient_role);
	tcase_add_test(tcase, a_matrix_only_seen_going_forward_proves_nothing);
	tcase_add_test(tcase, another_shape_at_the_address_is_another_matrix);
	tcase_add_test(tcase, an_epilogue_tells_only_its_own_product);
	tcase_add_test(tcase, a_weight_off_alignment_is_not_remembered);
	tcase_add_test(tcase, a_full_table_forgets_and_does_not_err);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
