/* Whether whole steps are faster with what auto replaces: the verdict, from times that are given.
 * Which steps are measured is seen in tests/engine/test_worth.c. */
#include "plan/worth.h"

#include "tests/support/suite.h"

/* Steps whose quartiles are `spread` apart, around `median`, in an order that is not theirs. */
static struct qs_step_times times_of(int count, double median, double spread)
{
	struct qs_step_times times = {.count = count};
	for (int i = 0; i < count; i++) {
		const double place = (i * 5 % count + 0.5) / count; /* 5 divides no count here */
		times.ms[i] = (float)(median + 2 * spread * (place - 0.5));
	}
	return times;
}

static enum qs_worth verdict(int count, double with, double without, double spread, double min_gain,
                             bool last)
{
	struct qs_step_medians medians;
	const struct qs_step_times a = times_of(count, with, spread);
	const struct qs_step_times b = times_of(count, without, spread);
	const enum qs_worth worth = qs_worth_verdict(&a, &b, min_gain, last, &medians);
	ck_assert_double_eq_tol(medians.with, with, 1e-3);
	ck_assert_double_eq_tol(medians.without, without, 1e-3);
	return worth;
}

/* Of 12 steps with quartiles 1 ms apart, the difference of the medians has a standard error of 0.38
 * ms; of 96, 0.134. */
static const struct {
	int count;
	double with, without, spread, min_gain;
	bool last;
	enum qs_worth worth;
} verdicts[] = {
        {12, 90, 100, 1, 0.03, false, QS_WORTH_KEEP},  /* surely faster                */
        {12, 110, 100, 1, 0.03, false, QS_WORTH_LOST}, /* surely slower                */
        {12, 99, 100, 0, 0.03, false, QS_WORTH_KEEP},  /* sure, however little it is   */
        {12, 98.5, 100, 1, 0, false, QS_WORTH_KEEP},   /* 4 standard errors            */
        {12, 99, 100, 1, 0, false, QS_WORTH_OPEN},     /* 2.6                          */
        {12, 101, 100, 1, 0, false, QS_WORTH_OPEN},    /* as many                      */
        {96, 99, 100, 1, 0, false, QS_WORTH_KEEP},     /* 7.5: more steps are surer    */
        {96, 99, 100, 8, 0.03, true, QS_WORTH_LOST},   /* in doubt, and less than 3 %  */
        {96, 96.9, 100, 8, 0.03, true, QS_WORTH_KEEP}, /* in doubt, and no less        */
        {96, 103.1, 100, 8, 0.03, true, QS_WORTH_LOST},
        {96, 100, 100, 0, 0, true, QS_WORTH_LOST}, /* no gain at all               */
        {96, 100, 100, 0, 0, false, QS_WORTH_OPEN},
};

START_TEST(a_gain_must_be_sure_or_large)
{
	ck_assert_int_eq(verdict(verdicts[_i].count, verdicts[_i].with, verdicts[_i].without,
	                         verdicts[_i].spread, verdicts[_i].min_gain, verdicts[_i].last),
	                 verdicts[_i].worth);
}
END_TEST

/* As of a step in which the program wrote a file. */
START_TEST(single_long_steps_do_not_count)
{
	struct qs_step_medians medians;
	struct qs_step_times with = times_of(12, 90, 1), without = times_of(12, 100, 1);
	with.ms[3] = with.ms[7] = 1e6f;
	ck_assert_int_eq(qs_worth_verdict(&with, &without, 0.03, false, &medians), QS_WORTH_KEEP);
	ck_assert_double_gt(medians.without - medians.with, 9);
}
END_TEST

/* Of batches of any length: what is multiplied in them differs ten times. */
static struct qs_step_times varied(int count, double ms, double ms_per_flop, int first)
{
	struct qs_step_times times = {.count = count};
	for (int i = 0; i < count; i++) {
		times.flops[i] = (float)(1 + (first + i * 5) % 10);
		times.ms[i] = (float)(ms + ms_per_flop * times.flops[i]);
	}
	return times;
}

START_TEST(steps_of_any_length_are_compared_by_what_is_multiplied)
{
	struct qs_step_medians medians;
	const struct qs_step_times with = varied(12, 0.01, 9, 0), without = varied(12, 0.01, 10, 3);
	ck_assert_int_eq(qs_worth_verdict(&with, &without, 0.03, false, &medians), QS_WORTH_KEEP);
	ck_assert_double_eq_tol(medians.with / medians.without, 0.9, 0.005);
	/* one of them is unknown: by their times alone, in doubt */
	struct qs_step_times unknown = without;
	unknown.flops[4] = 0;
	ck_assert_int_eq(qs_worth_verdict(&with, &unknown, 0.03, false, &medians), QS_WORTH_OPEN);
}
END_TEST

/* The program waits for the CPU. */
START_TEST(steps_that_take_the_same_whatever_is_multiplied_are_compared_by_time)
{
	struct qs_step_medians medians;
	const struct qs_step_times with = varied(12, 110, 0.01, 0),
	                           without = varied(12, 100, 0.01, 3);
	ck_assert_int_eq(qs_worth_verdict(&with, &without, 0.03, false, &medians), QS_WORTH_LOST);
	ck_assert_double_eq_tol(medians.with, 110, 0.2);
	ck_assert_double_eq_tol(medians.without, 100, 0.2);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("worth");
	TCase *tcase = tcase_create("verdicts");
	tcase_add_loop_test(tcase, a_gain_must_be_sure_or_large, 0,
	                    (int)(sizeof verdicts / sizeof *verdicts));
	tcase_add_test(tcase, single_long_steps_do_not_count);
	tcase_add_test(tcase, steps_of_any_length_are_compared_by_what_is_multiplied);
	tcase_add_test(tcase, steps_that_take_the_same_whatever_is_multiplied_are_compared_by_time);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
