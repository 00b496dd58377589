/* Steps from the period of a sequence of products: when they are known, where they begin, and what
 * happens to the count when the sequence is broken. */
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"
#include "tests/support/suite.h"

static struct qs_period *period;

static void set_up(void)
{
	period = malloc(sizeof *period);
	qs_period_reset(period);
}

static void tear_down(void)
{
	free(period);
}

static void add(uint32_t symbol)
{
	const int64_t before = period->step;
	const bool changed = qs_period_add(period, symbol);
	ck_assert_int_eq(changed, period->step != before);
	ck_assert_int_ge(period->step, before);
}

/* One training step: layers forward, a head, layers backward. */
static void forward(int layers, uint32_t shape)
{
	for (int i = 0; i < layers; i++)
		for (uint32_t j = 0; j < 4; j++)
			add(shape + j);
	add(shape + 10);
}

static void backward(int layers, uint32_t shape)
{
	for (uint32_t j = 0; j < 3; j++)
		add(shape + 11 + j);
	for (int i = 0; i < layers; i++)
		for (uint32_t j = 0; j < 8; j++)
			add(shape + 20 + j);
}

static void train(int steps, int layers, uint32_t shape)
{
	for (int i = 0; i < steps; i++) {
		forward(layers, shape);
		backward(layers, shape);
	}
}

#define LAYERS 12
#define LENGTH (12 * LAYERS + 4) /* products of a step */

START_TEST(nothing_is_known_of_a_sequence_not_begun)
{
	ck_assert_int_eq(period->step, -1);
}
END_TEST

START_TEST(one_product_again_and_again_is_a_step_each)
{
	for (int i = 0; i < 1000; i++)
		add(7);
	ck_assert_int_eq(period->step, -1);
	for (int i = 0; i < 1000; i++)
		add(7);
	ck_assert_int_eq(period->step, 1999);
	ck_assert_uint_eq(period->accepted, 1);
}
END_TEST

START_TEST(a_round_of_thirty_products_is_a_step)
{
	for (uint32_t i = 0; i < 30 * 100; i++)
		add(i % 30);
	ck_assert_uint_eq(period->accepted, 30);
	ck_assert_int_eq(period->step, 99);
	for (uint32_t i = 0; i < 29; i++)
		add(i);
	ck_assert_int_eq(period->step, 100);
	add(29);
	ck_assert_int_eq(period->step, 100);
	add(0);
	ck_assert_int_eq(period->step, 101);
}
END_TEST

START_TEST(the_step_changes_with_its_first_product)
{
	train(20, LAYERS, 0);
	ck_assert_int_eq(period->step, 19);
	forward(LAYERS, 0);
	ck_assert_int_eq(period->step, 20);
	backward(LAYERS, 0);
	ck_assert_int_eq(period->step, 20);
	add(0);
	ck_assert_int_eq(period->step, 21);
}
END_TEST

START_TEST(layers_are_not_taken_for_steps)
{
	forward(80, 0);
	backward(80, 0);
	ck_assert_int_eq(period->step, -1);
	train(3, 80, 0);
	ck_assert_uint_eq(period->accepted, 80 * 12 + 4);
	ck_assert_int_eq(period->step, 3);
}
END_TEST

START_TEST(a_ragged_prologue_is_no_step)
{
	for (uint32_t i = 0; i < 77; i++)
		add(1000 + i * i % 13);
	train(20, LAYERS, 0);
	ck_assert_uint_eq(period->accepted, LENGTH);
	ck_assert_int_eq(period->step, 19);
}
END_TEST

START_TEST(a_sequence_without_period_has_no_steps)
{
	uint64_t state = 1;
	for (int i = 0; i < 100000; i++) {
		state = state * UINT64_C(6364136223846793005) + 1;
		add((uint32_t)(state >> 60));
	}
	ck_assert_int_eq(period->step, -1);
}
END_TEST

START_TEST(a_period_that_is_too_long_has_no_steps)
{
	for (uint32_t i = 0; i < 8 * (QS_PERIOD_MAX + 1); i++)
		add(i % (QS_PERIOD_MAX + 1));
	ck_assert_int_eq(period->step, -1);
}
END_TEST

START_TEST(the_longest_period_is_found)
{
	for (uint32_t i = 0; i < 8 * (QS_PERIOD_MAX - 1); i++)
		add(i % (QS_PERIOD_MAX - 1));
	ck_assert_uint_eq(period->accepted, QS_PERIOD_MAX - 1);
	ck_assert_int_gt(period->step, 5);
}
END_TEST

/* Five batches forward, every forty steps. */
START_TEST(evaluations_between_are_no_steps)
{
	for (int round = 0; round < 5; round++) {
		train(40, LAYERS, 0);
		for (int i = 0; i < 5; i++)
			forward(LAYERS, 0);
	}
	train(10, LAYERS, 0);
	ck_assert_uint_eq(period->accepted, LENGTH);
	ck_assert_int_eq(period->step, 209);
}
END_TEST

START_TEST(evaluations_of_other_shapes_are_no_steps)
{
	for (int round = 0; round < 5; round++) {
		train(40, LAYERS, 0);
		for (int i = 0; i < 5; i++)
			forward(LAYERS, 500);
	}
	train(10, LAYERS, 0);
	ck_assert_int_eq(period->step, 209);
}
END_TEST

START_TEST(the_count_waits_while_the_sequence_is_broken)
{
	train(40, LAYERS, 0);
	const int64_t step = period->step;
	for (uint32_t i = 0; i < 20; i++)
		add(900 + i);
	ck_assert_int_le(period->step, step + 1);
	train(1, LAYERS, 0);
	ck_assert_int_le(period->step, step + 1);
	train(2, LAYERS, 0);
	ck_assert_int_eq(period->step, 42);
}
END_TEST

START_TEST(a_period_that_changes_goes_on_counting)
{
	train(20, LAYERS, 0);
	train(20, LAYERS, 300);
	train(20, LAYERS / 2, 300);
	ck_assert_uint_eq(period->accepted, 12 * LAYERS / 2 + 4);
	ck_assert_int_eq(period->step, 59);
}
END_TEST

/* The optimiser makes no product: four passes and an update are four steps. */
START_TEST(accumulated_gradients_count_each_pass)
{
	for (int update = 0; update < 10; update++)
		train(4, LAYERS, 0);
	ck_assert_int_eq(period->step, 39);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("period");
	TCase *tcase = tcase_create("period");
	tcase_add_checked_fixture(tcase, set_up, tear_down);
	tcase_add_test(tcase, nothing_is_known_of_a_sequence_not_begun);
	tcase_add_test(tcase, one_product_again_and_again_is_a_step_each);
	tcase_add_test(tcase, a_round_of_thirty_products_is_a_step);
	tcase_add_test(tcase, the_step_changes_with_its_first_product);
	tcase_add_test(tcase, layers_are_not_taken_for_steps);
	tcase_add_test(tcase, a_ragged_prologue_is_no_step);
	tcase_add_test(tcase, a_sequence_without_period_has_no_steps);
	tcase_add_test(tcase, a_period_that_is_too_long_has_no_steps);
	tcase_add_test(tcase, the_longest_period_is_found);
	tcase_add_test(tcase, evaluations_between_are_no_steps);
	tcase_add_test(tcase, evaluations_of_other_shapes_are_no_steps);
	tcase_add_test(tcase, the_count_waits_while_the_sequence_is_broken);
	tcase_add_test(tcase, a_period_that_changes_goes_on_counting);
	tcase_add_test(tcase, accumulated_gradients_count_each_pass);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
