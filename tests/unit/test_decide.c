/* From a key and a policy to what is done: the rule's word, the prediction where the rule leaves it
 * open, the mode on top, and what forbids it all. No device is asked. */
#include <stdio.h>
#include <string.h>

#include "plan/plan.h"
#include "tests/support/suite.h"
#include "tests/unit/key.h"

static struct qs_policy *policy;
static struct qs_plan plan;

static void tear_down(void)
{
	qs_policy_free(policy);
	policy = NULL;
}

static void decide_key(const char *text, struct qs_key key)
{
	qs_policy_free(policy);
	policy = qs_policy_parse("test.ini", text, strlen(text));
	ck_assert_ptr_nonnull(policy);
	plan = (struct qs_plan){.key = key};
	qs_decide(&plan, policy, false);
}

#define QSHIM    "[qshim]\nversion = 1\n"
#define LARGE    8192, 8192, 8192
#define SMALL    64, 64, 64
#define DEFAULTS "[default]\naction = native\n"

static void decide(const char *text, int64_t m, int64_t n, int64_t k)
{
	decide_key(text, plain_key(m, n, k));
}

static void expect(enum qs_action action, const char *reason, const char *rule)
{
	ck_assert_str_eq(qs_action_name(plan.action), qs_action_name(action));
	ck_assert_str_eq(qs_reason_code(plan.reason), reason);
	ck_assert_pstr_eq(plan.rule, rule);
	ck_assert_ptr_eq(plan.engine, qs_engine_of(action));
}

START_TEST(auto_replaces_what_is_predicted_to_gain)
{
	decide(QSHIM "[default]\naction = auto\n", LARGE);
	expect(QS_ACTION_FP8, "auto", "default");
	ck_assert_ptr_nonnull(plan.engine);
}
END_TEST

START_TEST(auto_passes_what_is_too_small)
{
	decide(QSHIM "[default]\naction = auto\n", SMALL);
	expect(QS_ACTION_NATIVE, "small", "default");
}
END_TEST

START_TEST(a_rule_that_asks_for_fp8_gets_it_at_any_size)
{
	decide(QSHIM "[rule all]\naction = fp8\n" DEFAULTS, SMALL);
	expect(QS_ACTION_FP8, "rule", "all");
}
END_TEST

START_TEST(an_eager_rule_gets_fp8_at_any_size)
{
	decide(QSHIM "[rule all]\naction = fp8\nstrategy = eager\n" DEFAULTS, SMALL);
	expect(QS_ACTION_FP8, "rule", "all");
}
END_TEST

START_TEST(a_performant_rule_gets_fp8_only_where_it_is_predicted_to_gain)
{
	const char *text = QSHIM "[rule all]\naction = fp8\nstrategy = performant\n" DEFAULTS;
	decide(text, SMALL);
	expect(QS_ACTION_NATIVE, "small", "all");
	decide(text, LARGE);
	expect(QS_ACTION_FP8, "rule", "all");
}
END_TEST

START_TEST(a_native_rule_passes_the_largest_product)
{
	decide(QSHIM "[rule head]\nm = 8192\naction = native\n[default]\naction = fp8\n", LARGE);
	expect(QS_ACTION_NATIVE, "rule", "head");
}
END_TEST

START_TEST(a_product_that_no_rule_matches_goes_by_the_default)
{
	decide(QSHIM "[rule head]\nm = 1\naction = native\n[default]\naction = fp8\n", LARGE);
	expect(QS_ACTION_FP8, "rule", "default");
}
END_TEST

START_TEST(nf4_by_rule_is_left_to_its_engine_whatever_the_size)
{
	decide(QSHIM "[rule decode]\naction = nf4\n" DEFAULTS, SMALL);
	expect(QS_ACTION_NF4, "rule", "decode");
}
END_TEST

START_TEST(bf16_by_rule_is_left_to_its_engine_whatever_the_size)
{
	decide(QSHIM "[rule tuned]\naction = bf16\n" DEFAULTS, LARGE);
	expect(QS_ACTION_BF16, "rule", "tuned");
}
END_TEST

/* Only lower precision has an error to be measured. */
START_TEST(shadow_passes_and_measures_what_would_be_replaced)
{
	static const struct {
		const char *action;
		enum qs_action engine;
	} rows[] = {
	        {"auto", QS_ACTION_FP8},
	        {"fp8", QS_ACTION_FP8},
	        {"nf4", QS_ACTION_NF4},
	        {"bf16", QS_ACTION_NATIVE},
	};
	char text[128];
	snprintf(text, sizeof text, QSHIM "mode = shadow\n[default]\naction = %s\n",
	         rows[_i].action);
	decide(text, LARGE);
	ck_assert_str_eq(qs_action_name(plan.action), "native");
	ck_assert_str_eq(qs_reason_code(plan.reason), "shadow");
	ck_assert_ptr_eq(plan.engine, qs_engine_of(rows[_i].engine));
	ck_assert_int_eq(plan.shadow, plan.engine != NULL);
}
END_TEST

START_TEST(observe_passes_what_would_be_replaced)
{
	decide(QSHIM "mode = observe\n[default]\naction = auto\n", LARGE);
	expect(QS_ACTION_NATIVE, "observe", "default");
	ck_assert(!plan.shadow);
}
END_TEST

START_TEST(off_and_another_process_pass_what_would_be_replaced)
{
	decide(QSHIM "mode = off\n[default]\naction = auto\n", LARGE);
	expect(QS_ACTION_NATIVE, "off", "default");
	decide(QSHIM "process = nobody\n[default]\naction = auto\n", LARGE);
	expect(QS_ACTION_NATIVE, "process", "default");
}
END_TEST

START_TEST(observe_and_shadow_keep_the_reason_of_what_would_pass_anyway)
{
	decide(QSHIM "mode = observe\n[default]\naction = auto\n", SMALL);
	expect(QS_ACTION_NATIVE, "small", "default");
	decide(QSHIM "mode = shadow\n[default]\naction = native\n", LARGE);
	expect(QS_ACTION_NATIVE, "rule", "default");
	decide(QSHIM "mode = shadow\nprocess = nobody\n[default]\naction = auto\n", LARGE);
	expect(QS_ACTION_NATIVE, "process", "default");
	ck_assert(!plan.shadow);
}
END_TEST

START_TEST(an_ineligible_product_asks_no_rule)
{
	struct qs_key key = plain_key(LARGE);
	key.atype = CUDA_R_16F;
	decide_key(QSHIM "[rule all]\naction = fp8\n" DEFAULTS, key);
	expect(QS_ACTION_NATIVE, "dtype", NULL);
	ck_assert_uint_eq(qs_policy_rule_hits(policy, 0), 0);
}
END_TEST

START_TEST(an_eligible_product_counts_its_rule_once)
{
	decide(QSHIM "[rule all]\naction = fp8\n" DEFAULTS, LARGE);
	ck_assert_uint_eq(qs_policy_rule_hits(policy, 0), 1);
	ck_assert_uint_eq(qs_policy_rule_hits(policy, -1), 0);
}
END_TEST

static char *missing_policy(const char *name)
{
	static char path[] = "/nonexistent/policy.ini";
	return strcmp(name, "QSHIM_POLICY") ? NULL : path;
}

START_TEST(a_broken_policy_passes_everything_eligible_or_not)
{
	struct qs_key key = plain_key(LARGE);
	policy = qs_policy_load(missing_policy);
	ck_assert(qs_policy_broken(policy));
	for (int i = 0; i < 2; i++) {
		plan = (struct qs_plan){.key = key};
		qs_decide(&plan, policy, false);
		expect(QS_ACTION_NATIVE, "policy", NULL);
		key.atype = CUDA_R_16F;
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("decide");
	TCase *tcase = tcase_create("decide");
	tcase_add_checked_fixture(tcase, NULL, tear_down);
	tcase_add_test(tcase, auto_replaces_what_is_predicted_to_gain);
	tcase_add_test(tcase, auto_passes_what_is_too_small);
	tcase_add_test(tcase, a_rule_that_asks_for_fp8_gets_it_at_any_size);
	tcase_add_test(tcase, an_eager_rule_gets_fp8_at_any_size);
	tcase_add_test(tcase, a_performant_rule_gets_fp8_only_where_it_is_predicted_to_gain);
	tcase_add_test(tcase, a_native_rule_passes_the_largest_product);
	tcase_add_test(tcase, a_product_that_no_rule_matches_goes_by_the_default);
	tcase_add_test(tcase, nf4_by_rule_is_left_to_its_engine_whatever_the_size);
	tcase_add_test(tcase, bf16_by_rule_is_left_to_its_engine_whatever_the_size);
	tcase_add_loop_test(tcase, shadow_passes_and_measures_what_would_be_replaced, 0, 4);
	tcase_add_test(tcase, observe_passes_what_would_be_replaced);
	tcase_add_test(tcase, off_and_another_process_pass_what_would_be_replaced);
	tcase_add_test(tcase, observe_and_shadow_keep_the_reason_of_what_would_pass_anyway);
	tcase_add_test(tcase, an_ineligible_product_asks_no_rule);
	tcase_add_test(tcase, an_eligible_product_counts_its_rule_once);
	tcase_add_test(tcase, a_broken_policy_passes_everything_eligible_or_not);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
