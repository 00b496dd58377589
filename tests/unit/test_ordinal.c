/* Numbers of weights: given in the order of first use, told once the role is known, found again by
 * gradients. The calls are those of PyTorch; addresses are never followed. */
#include <pthread.h>

#include "gemm/gemm.h"
#include "tests/support/suite.h"
#include "tests/unit/key.h"

#define TOKENS 256
#define ROUNDS 20 /* in which threads meet */

#define AT(number) ((void *)(uintptr_t)(0x700000000000 + ((uintptr_t)(number) << 20)))
#define NONE       (-1)

/* A layer of `in` to `out` features, by the numbers of its matrices in memory. */
struct linear {
	int weight, x, dy;
	int64_t in, out;
	bool conv1d; /* stored by inputs, as GPT-2 does */
};

static int32_t call(int ta, int tb, int64_t m, int64_t n, int64_t k, void *a, int b, bool autograd)
{
	struct qs_gemm g = {.key = plain_key(m, n, k), .a = a, .b = AT(b), .d = AT(999)};
	g.key.ta = (uint8_t)ta;
	g.key.tb = (uint8_t)tb;
	g.key.lda = ta ? k : m;
	g.key.ldb = tb ? n : k;
	g.key.role = (uint8_t)qs_role_by_evidence(&g, autograd);
	return qs_ordinal_of(&g);
}

static int32_t forward(const struct linear *l)
{
	return call(l->conv1d ? CUBLAS_OP_N : CUBLAS_OP_T, CUBLAS_OP_N, l->out, TOKENS, l->in,
	            AT(l->weight), l->x, false);
}

static int32_t dgrad(const struct linear *l)
{
	return call(l->conv1d ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, l->in, TOKENS, l->out,
	            AT(l->weight), l->dy, true);
}

static int32_t wgrad(const struct linear *l)
{
	if (l->conv1d)
		return call(CUBLAS_OP_N, CUBLAS_OP_T, l->out, l->in, TOKENS, AT(l->dy), l->x, true);
	return call(CUBLAS_OP_N, CUBLAS_OP_T, l->in, l->out, TOKENS, AT(l->x), l->dy, true);
}

static void set_up(void)
{
	qs_roles_forked();
	qs_ordinals_forked();
}

/* Three layers of one input, as q, k and v, and one behind them. */
static const struct linear attention[] = {
        {1, 10, 20, 512, 512, false},
        {2, 10, 21, 512, 512, false},
        {3, 10, 22, 512, 512, false},
        {4, 11, 23, 512, 512, false},
};

START_TEST(weights_are_numbered_in_the_order_of_first_use)
{
	for (int step = 0; step < 3; step++) {
		for (int i = 0; i < 4; i++)
			ck_assert_int_eq(forward(&attention[i]), i);
		for (int i = 3; i >= 0; i--) {
			ck_assert_int_eq(dgrad(&attention[i]), i);
			ck_assert_int_eq(wgrad(&attention[i]), i);
		}
	}
}
END_TEST

START_TEST(conv1d_has_its_numbers_from_the_first_step)
{
	static const struct linear gpt2[] = {{1, 10, 20, 768, 2304, true},
	                                     {2, 11, 21, 768, 768, true},
	                                     {3, 12, 22, 768, 50257, false}};
	for (int step = 0; step < 3; step++) {
		for (int i = 0; i < 3; i++)
			ck_assert_int_eq(forward(&gpt2[i]), step || !gpt2[i].conv1d ? i : NONE);
		for (int i = 2; i >= 0; i--) {
			ck_assert_int_eq(dgrad(&gpt2[i]), i);
			ck_assert_int_eq(wgrad(&gpt2[i]), i);
		}
	}
}
END_TEST

/* Its input wants no gradient. */
START_TEST(first_layers_dw_is_told_by_its_input)
{
	const struct linear first = {5, 12, 24, 512, 512, false};
	forward(&first);
	forward(&attention[0]);
	ck_assert_int_eq(dgrad(&attention[0]), 1);
	ck_assert_int_eq(wgrad(&attention[0]), 1);
	ck_assert_int_eq(wgrad(&first), 0);
}
END_TEST

/* Memory of a gradient that was used is another layer's next. */
START_TEST(gradient_stands_for_one_dw)
{
	const struct linear first = {5, 12, 20, 512, 512, false};
	forward(&first);
	forward(&attention[0]);
	dgrad(&attention[0]);
	ck_assert_int_eq(wgrad(&attention[0]), 1);
	ck_assert_int_eq(wgrad(&first), 0);
}
END_TEST

START_TEST(input_and_gradient_at_one_address_are_told_apart)
{
	const struct linear first = {5, 12, 24, 512, 512, false},
	                    last = {6, 13, 12, 512, 512, false};
	forward(&first);
	forward(&last);
	dgrad(&last);
	ck_assert_int_eq(wgrad(&last), 1);
	ck_assert_int_eq(wgrad(&first), 0);
}
END_TEST

START_TEST(gradient_of_another_shape_is_another_matrix)
{
	const struct linear other = {7, 13, 20, 512, 1024, false};
	forward(&attention[0]);
	dgrad(&attention[0]);
	ck_assert_int_eq(wgrad(&other), NONE);
	ck_assert_int_eq(wgrad(&attention[0]), 0);
}
END_TEST

START_TEST(another_shape_at_the_address_is_another_weight)
{
	const struct linear wider = {1, 10, 20, 512, 1024, false};
	ck_assert_int_eq(forward(&attention[0]), 0);
	ck_assert_int_eq(forward(&wider), 1);
	ck_assert_int_eq(forward(&attention[0]), 0);
}
END_TEST

START_TEST(products_without_a_role_or_alignment_have_no_number)
{
	const struct linear unread = {9, 10, 20, 512, 512, false};
	ck_assert_int_eq(dgrad(&unread), NONE); /* never read going forward */
	ck_assert_int_eq(
	        call(CUBLAS_OP_T, CUBLAS_OP_N, 512, TOKENS, 512, (char *)AT(1) + 2, 10, false),
	        NONE);
	ck_assert_int_eq(call(CUBLAS_OP_N, CUBLAS_OP_T, 512, 512, TOKENS, AT(1), 10, false), NONE);
	ck_assert_int_eq(forward(&attention[0]), 0);
}
END_TEST

/* Far more matrices than the tables hold. */
START_TEST(numbers_end_and_stay)
{
	struct linear l = {0, 10, 20, 512, 512, false};
	for (l.weight = 0; l.weight < QS_ORDINALS_MAX; l.weight++) {
		ck_assert(!qs_ordinals_full());
		ck_assert_int_eq(forward(&l), l.weight);
	}
	ck_assert(qs_ordinals_full());
	for (; l.weight < QS_ORDINALS_MAX + 1000; l.weight++)
		ck_assert_int_eq(forward(&l), NONE);
	for (l.weight = 0; l.weight < QS_ORDINALS_MAX; l.weight++)
		ck_assert_int_eq(forward(&l), l.weight);
}
END_TEST

/* Returns how many weights have another number than the order of their first use gives them. */
static void *forward_in_order(void *start)
{
	struct linear l = {0, 10, 20, 512, 512, false};
	uintptr_t wrong = 0;
	pthread_barrier_wait(start);
	for (l.weight = 0; l.weight < QS_ORDINALS_MAX; l.weight++)
		wrong += forward(&l) != l.weight;
	return (void *)wrong;
}

/* The thread that is behind finds all numbers given, is faster, and meets the other again. */
START_TEST(threads_with_one_order_see_one_numbering)
{
	for (int round = 0; round < ROUNDS; round++) {
		pthread_barrier_t start;
		pthread_t thread[2];
		void *wrong[2];
		set_up();
		pthread_barrier_init(&start, NULL, 2);
		for (int i = 0; i < 2; i++)
			ck_assert_int_eq(pthread_create(&thread[i], NULL, forward_in_order, &start),
			                 0);
		for (int i = 0; i < 2; i++)
			pthread_join(thread[i], &wrong[i]);
		pthread_barrier_destroy(&start);
		ck_assert_ptr_null(wrong[0]);
		ck_assert_ptr_null(wrong[1]);
	}
}
END_TEST

START_TEST(forked_child_begins_anew)
{
	forward(&attention[0]);
	forward(&attention[1]);
	dgrad(&attention[1]);
	qs_roles_forked();
	qs_ordinals_forked();
	ck_assert_int_eq(wgrad(&attention[0]), NONE);
	ck_assert_int_eq(wgrad(&attention[1]), NONE);
	ck_assert_int_eq(forward(&attention[1]), 0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("ordinal");
	TCase *tcase = tcase_create("ordinal");
	tcase_add_checked_fixture(tcase, set_up, NULL);
	tcase_add_test(tcase, weights_are_numbered_in_the_order_of_first_use);
	tcase_add_test(tcase, conv1d_has_its_numbers_from_the_first_step);
	tcase_add_test(tcase, first_layers_dw_is_told_by_its_input);
	tcase_add_test(tcase, gradient_stands_for_one_dw);
	tcase_add_test(tcase, input_and_gradient_at_one_address_are_told_apart);
	tcase_add_test(tcase, gradient_of_another_shape_is_another_matrix);
	tcase_add_test(tcase, another_shape_at_the_address_is_another_weight);
	tcase_add_test(tcase, products_without_a_role_or_alignment_have_no_number);
	tcase_add_test(tcase, numbers_end_and_stay);
	tcase_add_test(tcase, threads_with_one_order_see_one_numbering);
	tcase_add_test(tcase, forked_child_begins_anew);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
