/* The values of a policy: numbers, ranges, globs, regular expressions, words and options, against
 * hand-made cases and, where libc has the same thing, against libc.
 */
#include <fnmatch.h>
#include <regex.h>

#include "note/note.h"
#include "tests/unit/policy.h"

/* Ranges ------------------------------------------------------------------------------------- */

static bool ranges_of(const char *list, int64_t value, int64_t total)
{
	char why[QS_WHY] = "";
	struct qs_ranges ranges = {0};
	bool good = qs_ranges_add(&ranges, list, true, why);
	ck_assert_msg(good, "'%s' refused: %s", list, why);
	bool matches = qs_ranges_match(&ranges, value, total);
	qs_ranges_free(&ranges);
	return matches;
}

static const char *range_problem(const char *list, bool negative)
{
	static char why[QS_WHY];
	struct qs_ranges ranges = {0};
	bool good = qs_ranges_add(&ranges, list, negative, why);
	qs_ranges_free(&ranges);
	return good ? NULL : why;
}

START_TEST(range_without_end_matches_everything_above)
{
	ck_assert(!ranges_of("1024..", 1023, 0));
	ck_assert(ranges_of("1024..", 1024, 0));
	ck_assert(ranges_of("1024..", INT64_MAX, 0));
}
END_TEST

START_TEST(range_without_begin_matches_everything_below)
{
	ck_assert(ranges_of("..64", 0, 0));
	ck_assert(ranges_of("..64", 64, 0));
	ck_assert(!ranges_of("..64", 65, 0));
}
END_TEST

START_TEST(range_includes_both_bounds)
{
	ck_assert(!ranges_of("2..4", 1, 0));
	ck_assert(ranges_of("2..4", 2, 0));
	ck_assert(ranges_of("2..4", 4, 0));
	ck_assert(!ranges_of("2..4", 5, 0));
}
END_TEST

START_TEST(single_number_matches_itself_only)
{
	ck_assert(ranges_of("7", 7, 0));
	ck_assert(!ranges_of("7", 8, 0));
}
END_TEST

START_TEST(ranges_of_a_list_are_alternatives)
{
	ck_assert(ranges_of("1..2, 8, 16..", 2, 0));
	ck_assert(ranges_of("1..2, 8, 16..", 8, 0));
	ck_assert(ranges_of("1..2, 8, 16..", 99, 0));
	ck_assert(!ranges_of("1..2, 8, 16..", 9, 0));
}
END_TEST

START_TEST(divisor_holds_beside_the_ranges)
{
	ck_assert(ranges_of("1024.., %16", 1040, 0));
	ck_assert(!ranges_of("1024.., %16", 1041, 0));
	ck_assert(!ranges_of("1024.., %16", 512, 0));
	ck_assert(ranges_of("%16", 32, 0));
}
END_TEST

START_TEST(all_divisors_must_hold)
{
	ck_assert(ranges_of("%4, %6", 12, 0));
	ck_assert(!ranges_of("%4, %6", 8, 0));
}
END_TEST

START_TEST(excluded_values_do_not_match)
{
	ck_assert(!ranges_of("!7", 7, 0));
	ck_assert(ranges_of("!7", 8, 0));
	ck_assert(!ranges_of("1..100, !10..20", 15, 0));
	ck_assert(ranges_of("1..100, !10..20", 21, 0));
	ck_assert(!ranges_of("1..100, !%16", 32, 0));
	ck_assert(ranges_of("1..100, !%16", 33, 0));
}
END_TEST

START_TEST(negative_bounds_count_from_the_end)
{
	ck_assert(ranges_of("-2..-1", 9, 10));
	ck_assert(ranges_of("-2..", 8, 10));
	ck_assert(!ranges_of("-2..-1", 7, 10));
	ck_assert(ranges_of("2..-3", 7, 10));
	ck_assert(!ranges_of("2..-3", 8, 10));
	ck_assert(!ranges_of("..-3", 8, 10));
}
END_TEST

START_TEST(negative_bounds_match_nothing_while_the_total_is_unknown)
{
	ck_assert(!ranges_of("-2..-1", 9, 0));
	ck_assert(ranges_of("0..6, -2..-1", 3, 0));
	ck_assert(!ranges_of("!-1", 3, 0));
	ck_assert(ranges_of("!-1", 3, 10));
}
END_TEST

START_TEST(numbers_may_have_exponents)
{
	ck_assert(ranges_of("4e9", INT64_C(4000000000), 0));
	ck_assert(ranges_of("1.5e3", 1500, 0));
	ck_assert(ranges_of("10e-1..2E1", 20, 0));
	ck_assert(ranges_of("1e18", INT64_C(1000000000000000000), 0));
	ck_assert(ranges_of("0e18", 0, 0));
}
END_TEST

START_TEST(numbers_that_do_not_fit_are_refused)
{
	const char *bad[] = {"1e19", "2e18", "9999999999999999999",
	                     "1.5",  "1e-1", "1e999999999999"};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		ck_assert_msg(range_problem(bad[i], false), "'%s' was taken", bad[i]);
}
END_TEST

START_TEST(suffix_of_a_number_is_refused_as_ambiguous)
{
	ck_assert_str_eq(range_problem("4k", false),
	                 "'4k' is ambiguous; write 4096 or 4e3 in full");
}
END_TEST

START_TEST(malformed_ranges_are_refused)
{
	const char *bad[] = {"..",  "1...", "a", "1..b", "1.2..3", "-1",
	                     "1 2", "0x10", "!", "!!1",  "1-2"};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		ck_assert_msg(range_problem(bad[i], false), "'%s' was taken", bad[i]);
	ck_assert_str_eq(range_problem("1-2", false),
	                 "'1-2' is no range; write a..b, a.., ..b, a, %d or !a");
}
END_TEST

START_TEST(range_that_ends_before_it_begins_is_refused)
{
	ck_assert_str_eq(range_problem("5..3", false), "'5..3' is empty, it ends before it begins");
	ck_assert_ptr_nonnull(range_problem("-1..-7", true));
	ck_assert_ptr_null(range_problem("-7..-1", true));
}
END_TEST

START_TEST(divisor_must_be_positive)
{
	ck_assert_str_eq(range_problem("%0", false), "'%0' should be % and a whole number above 0");
	ck_assert_ptr_nonnull(range_problem("%", false));
	ck_assert_ptr_nonnull(range_problem("%16x", false));
	ck_assert_ptr_nonnull(range_problem("%-16", true));
}
END_TEST

START_TEST(missing_items_of_a_list_are_refused)
{
	ck_assert_str_eq(range_problem("1,,2", false), "an item is missing");
	ck_assert_str_eq(range_problem("1,", false), "an item is missing");
	ck_assert_str_eq(range_problem(" ", false), "an item is missing");
}
END_TEST

/* Patterns ----------------------------------------------------------------------------------- */

static bool pattern(const char *list, const char *text)
{
	char why[QS_WHY] = "";
	struct qs_patterns patterns = {0};
	bool good = qs_patterns_add(&patterns, list, why);
	ck_assert_msg(good, "'%s' refused: %s", list, why);
	bool matches = qs_patterns_match(&patterns, text);
	qs_patterns_free(&patterns);
	return matches;
}

static const char *pattern_problem(const char *list)
{
	static char why[QS_WHY];
	struct qs_patterns patterns = {0};
	bool good = qs_patterns_add(&patterns, list, why);
	qs_patterns_free(&patterns);
	return good ? NULL : why;
}

START_TEST(glob_covers_the_whole_text)
{
	ck_assert(pattern("lm_head", "lm_head"));
	ck_assert(!pattern("lm_head", "model.lm_head"));
	ck_assert(pattern("*lm_head*", "model.lm_head.weight"));
	ck_assert(pattern("*", ""));
	ck_assert(!pattern("?", ""));
}
END_TEST

START_TEST(glob_brackets_match_sets_ranges_and_complements)
{
	ck_assert(pattern("layers.[0-2].*", "layers.1.mlp"));
	ck_assert(!pattern("layers.[0-2].*", "layers.3.mlp"));
	ck_assert(pattern("layers.[!0-2].*", "layers.3.mlp"));
	ck_assert(!pattern("layers.[^0-2].*", "layers.0.mlp"));
	ck_assert(pattern("[]x]", "]"));
	ck_assert(pattern("a[*]b", "a*b"));
}
END_TEST

START_TEST(glob_with_many_stars_takes_quadratic_time_at_most)
{
	char text[4097];
	memset(text, 'a', 4096);
	text[4096] = 0;
	ck_assert(!qs_glob_match("*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b", text));
	ck_assert(qs_glob_match("*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a*a", text));
}
END_TEST

/* A small generator of its own, so that a failure can be repeated. */
static uint32_t random_state = 1;

static void random_text(char *text, int longest, const char *alphabet)
{
	random_state = random_state * 1664525 + 1013904223;
	int length = (int)(random_state >> 16) % (longest + 1);
	for (int i = 0; i < length; i++) {
		random_state = random_state * 1664525 + 1013904223;
		text[i] = alphabet[(random_state >> 16) % strlen(alphabet)];
	}
	text[length] = 0;
}

START_TEST(globs_agree_with_fnmatch)
{
	char glob[16], text[16];
	int matches = 0;
	for (int i = 0; i < 200000; i++) {
		random_text(glob, 7, "ab*?");
		random_text(text, 8, "ab");
		bool expected = !fnmatch(glob, text, FNM_NOESCAPE);
		matches += expected;
		ck_assert_msg(qs_glob_match(glob, text) == expected, "%s against %s", glob, text);
	}
	ck_assert_int_gt(matches, 10000);
}
END_TEST

START_TEST(regular_expressions_agree_with_regexec)
{
	char pattern_text[16], text[16], why[QS_WHY];
	int compared = 0, matches = 0;
	for (int i = 0; i < 200000; i++) {
		regex_t posix;
		random_text(pattern_text, 9, "aabb.()|*+?^$[]");
		struct qs_regex *ours = qs_regex_compile(pattern_text, why);
		if (!ours)
			continue;
		ck_assert_msg(!regcomp(&posix, pattern_text, REG_EXTENDED | REG_NOSUB),
		              "only we take '%s'", pattern_text);
		for (int j = 0; j < 8; j++) {
			random_text(text, 6, "ab");
			bool expected = !regexec(&posix, text, 0, NULL, 0);
			ck_assert_msg(qs_regex_match(ours, text) == expected, "%s against %s",
			              pattern_text, text);
			matches += expected;
			compared++;
		}
		regfree(&posix);
		free(ours);
	}
	ck_assert_int_gt(compared, 50000);
	ck_assert_int_gt(matches, 10000);
	ck_assert_int_gt(compared - matches, 10000);
}
END_TEST

START_TEST(regular_expression_matches_anywhere_unless_anchored)
{
	ck_assert(pattern("re:router", "layers.3.router.weight"));
	ck_assert(!pattern("re:^router", "layers.3.router.weight"));
	ck_assert(pattern("re:^layers\\.[0-9]+\\.(mlp|attn)$", "layers.31.attn"));
	ck_assert(!pattern("re:^layers\\.[0-9]+\\.(mlp|attn)$", "layers.31.attention"));
	ck_assert(pattern("re:[^a-z]", "abC"));
}
END_TEST

START_TEST(what_regular_expressions_lack_is_refused_with_its_reason)
{
	const char *bad[][2] = {
	        {"a{2}", "{} is not supported"},
	        {"(a", "( without )"},
	        {"a)", ") without ("},
	        {"[a", "[ without ]"},
	        {"[[:digit:]]", "[:class:] is not supported"},
	        {"[b-a]", "a range in [] is backwards"},
	        {"*a", "nothing to repeat"},
	        {"a|", "an empty alternative"},
	        {"", "an empty alternative"},
	        {"()", "an empty alternative"},
	        {"a^b", "^ and $ may stand only at the ends"},
	        {"a$b", "^ and $ may stand only at the ends"},
	        {"^a|b", "write ^(a|b)$ instead of ^a|b$"},
	        {"(a)\\1", "\\ must stand before punctuation"},
	        {"a\\", "\\ must stand before punctuation"},
	};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		char why[QS_WHY], expected[QS_WHY];
		ck_assert_ptr_null(qs_regex_compile(bad[i][0], why));
		snprintf(expected, sizeof expected, "in 're:%s': %s", bad[i][0], bad[i][1]);
		ck_assert_str_eq(why, expected);
	}
}
END_TEST

START_TEST(regular_expression_may_use_sixty_four_characters)
{
	char why[QS_WHY], text[66] = "";
	memset(text, 'a', 65);
	ck_assert_ptr_null(qs_regex_compile(text, why));
	ck_assert_ptr_nonnull(strstr(why, "more than 64 characters"));
	text[64] = 0;
	struct qs_regex *regex = qs_regex_compile(text, why);
	ck_assert_ptr_nonnull(regex);
	ck_assert(qs_regex_match(regex, text));
	ck_assert(!qs_regex_match(regex, text + 1));
	free(regex);
}
END_TEST

START_TEST(deep_parentheses_are_refused)
{
	char why[QS_WHY], text[41];
	memset(text, '(', 40);
	text[40] = 0;
	ck_assert_ptr_null(qs_regex_compile(text, why));
	ck_assert_ptr_nonnull(strstr(why, "too many parentheses"));
}
END_TEST

START_TEST(excluded_patterns_win_over_the_others)
{
	ck_assert(pattern("python*, !*gcc*", "python3"));
	ck_assert(!pattern("*, !*gcc*", "x86_64-gcc-12"));
	ck_assert(pattern("!gcc", "clang"));
	ck_assert(!pattern("!re:^g.c$, *", "gcc"));
}
END_TEST

START_TEST(malformed_patterns_are_refused)
{
	ck_assert_str_eq(pattern_problem("a[b"), "in 'a[b': [ without ]");
	ck_assert_str_eq(pattern_problem("!"), "a pattern is empty");
	ck_assert_str_eq(pattern_problem("a,,b"), "an item is missing");
}
END_TEST

/* Nearest ------------------------------------------------------------------------------------ */

START_TEST(nearest_word_is_found_for_every_kind_of_slip)
{
	const char *words[] = {"action", "scale", "tokens", "k"};
	ck_assert_str_eq(qs_nearest("scael", words, 4), "scale");
	ck_assert_str_eq(qs_nearest("acton", words, 4), "action");
	ck_assert_str_eq(qs_nearest("tokenss", words, 4), "tokens");
	ck_assert_str_eq(qs_nearest("tikens", words, 4), "tokens");
	ck_assert_str_eq(qs_nearest("SCALE", words, 4), "scale");
}
END_TEST

START_TEST(far_words_are_not_suggested)
{
	const char *words[] = {"action", "scale", "tokens", "k"};
	char longer[100];
	memset(longer, 'a', 99);
	longer[99] = 0;
	ck_assert_ptr_null(qs_nearest("banana", words, 4));
	ck_assert_ptr_null(qs_nearest("x", words, 4));
	ck_assert_ptr_null(qs_nearest("", words, 4));
	ck_assert_ptr_null(qs_nearest(longer, words, 4));
}
END_TEST

/* Options ------------------------------------------------------------------------------------ */

static const struct qs_option *option_named(const char *section, const char *key)
{
	const struct qs_option *option = qs_option_at(qs_option_find(section, key));
	ck_assert_ptr_nonnull(option);
	return option;
}

static const char *option_problem(const char *section, const char *key, const char *text)
{
	static char why[QS_WHY];
	struct qs_options before, options;
	memset(&before, 0, sizeof before);
	qs_options_default(&before);
	memcpy(&options, &before, sizeof options);
	if (qs_option_set(&options, option_named(section, key), text, why))
		return NULL;
	ck_assert_mem_eq(&options, &before, sizeof options);
	return why;
}

START_TEST(every_option_has_a_good_default_and_writes_it_back)
{
	const struct qs_option *option;
	int count = 0;
	for (; (option = qs_option_at(count)); count++) {
		char why[QS_WHY], text[QS_PATH_MAX], again[QS_PATH_MAX];
		struct qs_options options;
		qs_options_default(&options);
		ck_assert_msg(qs_option_set(&options, option, option->initial, why), "%s: %s",
		              option->key, why);
		qs_option_text(&options, option, text, sizeof text);
		ck_assert_msg(qs_option_set(&options, option, text, why), "%s: %s", text, why);
		qs_option_text(&options, option, again, sizeof again);
		ck_assert_str_eq(text, again);
		ck_assert_int_eq(qs_option_find(option->section, option->key), count);
	}
	ck_assert_int_gt(count, 10);
}
END_TEST

START_TEST(defaults_are_the_documented_ones)
{
	struct qs_options options;
	qs_options_default(&options);
	ck_assert_int_eq(options.mode, QS_MODE_ON);
	ck_assert_int_eq(options.validity, QS_VALIDITY_TRACKED);
	ck_assert(options.max_mib.percent);
	ck_assert_double_eq(options.max_mib.value, 25);
	ck_assert_double_eq(options.min_sqnr, 20);
	ck_assert_double_eq(options.min_gain, 0.03);
	ck_assert_double_eq(options.budget_ms, 2000);
	ck_assert_str_eq(options.out_dir, "");
	ck_assert(!options.quiet && !options.cublaslt_any);
	ck_assert_int_eq(options.early, QS_EARLY_EAGER);
	ck_assert_uint_eq(options.log_levels, 1u << QS_LOG_ERROR | 1u << QS_LOG_WARN);
}
END_TEST

START_TEST(numbers_are_written_as_they_were_read)
{
	const char *texts[][2] = {{"20", "20"},
	                          {"20.5", "20.5"},
	                          {"0.1", "0.1"},
	                          {"1e2", "100"},
	                          {"33.30", "33.3"},
	                          {"0.000000001", "0.000000001"},
	                          {"199.123456789", "199.123456789"}};
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
		char why[QS_WHY], text[64];
		struct qs_options options;
		const struct qs_option *option = option_named("numerics", "min_sqnr");
		ck_assert(qs_option_set(&options, option, texts[i][0], why));
		qs_option_text(&options, option, text, sizeof text);
		ck_assert_str_eq(text, texts[i][1]);
	}
}
END_TEST

START_TEST(share_may_be_a_percentage_or_a_fraction)
{
	char why[QS_WHY];
	struct qs_options options;
	const struct qs_option *option = option_named("tune", "min_gain");
	ck_assert(qs_option_set(&options, option, "3.3%", why));
	ck_assert_double_eq(options.min_gain, 0.033);
	ck_assert(qs_option_set(&options, option, "0.5", why));
	ck_assert_double_eq(options.min_gain, 0.5);
	ck_assert_str_eq(option_problem("tune", "min_gain", "101%"),
	                 "expected a share such as 3% or 0.03 in 0..1");
	ck_assert_ptr_nonnull(option_problem("tune", "min_gain", "3 %"));
	ck_assert_ptr_nonnull(option_problem("tune", "min_gain", "%"));
}
END_TEST

START_TEST(memory_may_be_mib_or_a_percentage)
{
	char why[QS_WHY], text[64];
	struct qs_options options;
	const struct qs_option *option = option_named("cache", "max_mib");
	ck_assert(qs_option_set(&options, option, "2048", why));
	ck_assert(!options.max_mib.percent);
	ck_assert_double_eq(options.max_mib.value, 2048);
	ck_assert(qs_option_set(&options, option, "12.5%", why));
	qs_option_text(&options, option, text, sizeof text);
	ck_assert_str_eq(text, "12.5%");
	ck_assert_str_eq(option_problem("cache", "max_mib", "2 GiB"),
	                 "expected MiB such as 2048 or a share such as 25%");
	ck_assert_ptr_nonnull(option_problem("cache", "max_mib", "101%"));
}
END_TEST

START_TEST(values_out_of_bounds_are_refused_and_change_nothing)
{
	ck_assert_str_eq(option_problem("cache", "max_keys", "5"),
	                 "expected a whole number in 16..65536");
	ck_assert_ptr_nonnull(option_problem("cache", "max_keys", "65537"));
	ck_assert_ptr_nonnull(option_problem("numerics", "min_sqnr", "-1"));
	ck_assert_ptr_nonnull(option_problem("numerics", "min_sqnr", "nan"));
	ck_assert_str_eq(option_problem("qshim", "mode", "onn"),
	                 "expected on, shadow, observe or off; did you mean 'on'?");
	ck_assert_str_eq(option_problem("log", "level", "info, dispach"),
	                 "expected error, warn, info, dispatch, cache, numerics, all or none; did "
	                 "you mean 'dispatch'?");
	ck_assert_ptr_nonnull(option_problem("qshim", "process", "python*, [a"));
}
END_TEST

START_TEST(text_longer_than_its_field_is_refused)
{
	char text[QS_PATH_MAX + 1];
	memset(text, 'a', QS_PATH_MAX);
	text[QS_PATH_MAX] = 0;
	ck_assert_str_eq(option_problem("log", "out", text), "longer than 1023 characters");
	ck_assert_ptr_null(option_problem("log", "out", text + 1));
}
END_TEST

static unsigned levels_of(const char *text)
{
	char why[QS_WHY];
	struct qs_options options;
	ck_assert(qs_option_set(&options, option_named("log", "level"), text, why));
	return options.log_levels;
}

START_TEST(asking_for_detail_does_not_silence_errors)
{
	const unsigned error = 1u << QS_LOG_ERROR, warn = 1u << QS_LOG_WARN;
	ck_assert_uint_eq(levels_of("dispatch"), error | warn | 1u << QS_LOG_DISPATCH);
	ck_assert_uint_eq(levels_of("cache,info"),
	                  error | warn | 1u << QS_LOG_CACHE | 1u << QS_LOG_INFO);
	ck_assert_uint_eq(levels_of("error"), error);
	ck_assert_uint_eq(levels_of("none"), 0);
	ck_assert_uint_eq(levels_of("all"), (1u << QS_LOG_LEVELS) - 1);
}
END_TEST

int main(void)
{
	TCase *ranges = tcase_create("ranges"), *patterns = tcase_create("patterns");
	TCase *words = tcase_create("words"), *options = tcase_create("options");
	Suite *suite = suite_create("policy values");
	suite_add_tcase(suite, ranges);
	suite_add_tcase(suite, patterns);
	suite_add_tcase(suite, words);
	suite_add_tcase(suite, options);
	tcase_set_timeout(patterns, 60);
	tcase_add_test(ranges, range_without_end_matches_everything_above);
	tcase_add_test(ranges, range_without_begin_matches_everything_below);
	tcase_add_test(ranges, range_includes_both_bounds);
	tcase_add_test(ranges, single_number_matches_itself_only);
	tcase_add_test(ranges, ranges_of_a_list_are_alternatives);
	tcase_add_test(ranges, divisor_holds_beside_the_ranges);
	tcase_add_test(ranges, all_divisors_must_hold);
	tcase_add_test(ranges, excluded_values_do_not_match);
	tcase_add_test(ranges, negative_bounds_count_from_the_end);
	tcase_add_test(ranges, negative_bounds_match_nothing_while_the_total_is_unknown);
	tcase_add_test(ranges, numbers_may_have_exponents);
	tcase_add_test(ranges, numbers_that_do_not_fit_are_refused);
	tcase_add_test(ranges, suffix_of_a_number_is_refused_as_ambiguous);
	tcase_add_test(ranges, malformed_ranges_are_refused);
	tcase_add_test(ranges, range_that_ends_before_it_begins_is_refused);
	tcase_add_test(ranges, divisor_must_be_positive);
	tcase_add_test(ranges, missing_items_of_a_list_are_refused);
	tcase_add_test(patterns, glob_covers_the_whole_text);
	tcase_add_test(patterns, glob_brackets_match_sets_ranges_and_complements);
	tcase_add_test(patterns, glob_with_many_stars_takes_quadratic_time_at_most);
	tcase_add_test(patterns, globs_agree_with_fnmatch);
	tcase_add_test(patterns, regular_expressions_agree_with_regexec);
	tcase_add_test(patterns, regular_expression_matches_anywhere_unless_anchored);
	tcase_add_test(patterns, what_regular_expressions_lack_is_refused_with_its_reason);
	tcase_add_test(patterns, regular_expression_may_use_sixty_four_characters);
	tcase_add_test(patterns, deep_parentheses_are_refused);
	tcase_add_test(patterns, excluded_patterns_win_over_the_others);
	tcase_add_test(patterns, malformed_patterns_are_refused);
	tcase_add_test(words, nearest_word_is_found_for_every_kind_of_slip);
	tcase_add_test(words, far_words_are_not_suggested);
	tcase_add_test(options, every_option_has_a_good_default_and_writes_it_back);
	tcase_add_test(options, defaults_are_the_documented_ones);
	tcase_add_test(options, numbers_are_written_as_they_were_read);
	tcase_add_test(options, share_may_be_a_percentage_or_a_fraction);
	tcase_add_test(options, memory_may_be_mib_or_a_percentage);
	tcase_add_test(options, values_out_of_bounds_are_refused_and_change_nothing);
	tcase_add_test(options, text_longer_than_its_field_is_refused);
	tcase_add_test(options, asking_for_detail_does_not_silence_errors);
	return qs_suite_main(suite);
}
