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
	double gain;
	const struct qs_step_times a = times_of(count, with, spread);
	const struct qs_step_times b = times_of(count, without, spread);
	const enum qs_worth worth = qs_worth_verdict(&a, &b, min_gain, last, &gain);
	ck_assert_double_eq_tol(gain, without - with, 1e-3);
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
	double gain;
	struct qs_step_times with = times_of(12, 90, 1), without = times_of(12, 100, 1);
	with.ms[3] = with.ms[7] = 1e6f;
	ck_assert_int_eq(qs_worth_verdict(&with, &without, 0.03, false, &gain), QS_WORTH_KEEP);
	ck_assert_double_gt(gain, 9);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("worth");
	TCase *tcase = tcase_create("verdicts");
	tcase_add_loop_test(tcase, a_gain_must_be_sure_or_large, 0,
	                    (int)(sizeof verdicts / sizeof *verdicts));
	tcase_add_test(tcase, single_long_steps_do_not_count);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
