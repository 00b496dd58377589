/* When a product is found not to be worth its time on the CPU: the verdict, from looks that are
 * given. Which calls are looked at is seen in tests/engine/test_idle.c. */
#include "plan/idle.h"

#include "tests/support/suite.h"

#define LOOKS 32

static char detail[128];

/* Adds looks of `us` microseconds each, of which `found` are idle. True if one of them was the
 * last. */
static bool add(struct qs_idle *idle, int looks, int found, double us)
{
	bool lost = false;
	for (int i = 0; i < looks; i++)
		lost |= qs_idle_add(idle, i < found ? QS_LOOK_IDLE : QS_LOOK_BUSY,
		                    (uint64_t)(us * 1e3), detail, sizeof detail);
	return lost;
}

/* What is lost at idle calls against what is gained at the others, at 10 us of the CPU. */
static const struct {
	double saved_us;
	int found;
	bool lost;
} verdicts[] = {
        {1, 0, false},   {1, 2, false},   {1, 3, true},   {10, 16, false},
        {10, 17, true},  {20, 21, false}, {20, 22, true}, {29, 32, true},
        {31, 32, false}, {29, 23, false}, {29, 24, true},
};

START_TEST(a_product_is_given_up_if_it_loses_more_than_it_gains)
{
	struct qs_idle idle = {.saved_us = verdicts[_i].saved_us};
	ck_assert(!add(&idle, LOOKS - 1, verdicts[_i].found, 10));
	ck_assert(!idle.judged);
	const bool last_is_idle = verdicts[_i].found == LOOKS;
	ck_assert_int_eq(add(&idle, 1, last_is_idle, 10), verdicts[_i].lost);
	ck_assert_int_eq(idle.lost, verdicts[_i].lost);
	ck_assert(idle.judged);
}
END_TEST

START_TEST(the_verdict_tells_what_it_is_made_of)
{
	struct qs_idle idle = {.saved_us = 19.04};
	ck_assert(add(&idle, LOOKS, 30, 45.5));
	ck_assert_str_eq(detail, "the device was idle at 30 of 32 calls, which save it 19.0 us and "
	                         "take 45.5 us of the CPU");
}
END_TEST

/* With it the average would be above 10 us. */
START_TEST(the_longest_call_does_not_count)
{
	struct qs_idle idle = {.saved_us = 10};
	ck_assert(!add(&idle, 1, 0, 1e6));
	ck_assert(!add(&idle, LOOKS - 1, 16, 10));
	ck_assert(idle.judged && !idle.lost);
}
END_TEST

START_TEST(every_verdict_begins_anew_and_only_the_first_is_told)
{
	struct qs_idle idle = {.saved_us = 10};
	ck_assert(!add(&idle, 1, 0, 100));
	ck_assert(!add(&idle, LOOKS - 1, 10, 10));
	ck_assert(!add(&idle, LOOKS, 16, 10)); /* 26 of 64 */
	ck_assert(add(&idle, LOOKS, 17, 10));
	ck_assert(!add(&idle, LOOKS, 17, 10));
	ck_assert(idle.lost);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("idle");
	TCase *tcase = tcase_create("verdicts");
	tcase_add_loop_test(tcase, a_product_is_given_up_if_it_loses_more_than_it_gains, 0,
	                    (int)(sizeof verdicts / sizeof *verdicts));
	tcase_add_test(tcase, the_verdict_tells_what_it_is_made_of);
	tcase_add_test(tcase, the_longest_call_does_not_count);
	tcase_add_test(tcase, every_verdict_begins_anew_and_only_the_first_is_told);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
