/* The file of a policy after its first reading: what counts as a change, what is said of one that
 * is no good, and what of the first reading stays. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>

#include "tests/unit/policy.h"

#define FP8    VERSION "[default]\naction = fp8\n"
#define NATIVE VERSION "[default]\naction = native\n"
#define BROKEN VERSION "[default]\naction = fp9\n"

static char folder[] = "/tmp/qshim-watch.XXXXXX", file[64], other[64];
static const char *named, *set, *asked;
static struct qs_policy *policy;

static void set_up(void)
{
	strcpy(folder, "/tmp/qshim-watch.XXXXXX");
	ck_assert_ptr_nonnull(mkdtemp(folder));
	snprintf(file, sizeof file, "%s/policy.ini", folder);
	snprintf(other, sizeof other, "%s/other.ini", folder);
	named = file;
	set = asked = NULL;
}

static void tear_down(void)
{
	qs_policy_free(policy);
	policy = NULL;
	unlink(file);
	unlink(other);
	rmdir(folder);
}

static void put(const char *path, const char *text)
{
	FILE *to = fopen(path, "we");
	ck_assert_ptr_nonnull(to);
	fputs(text, to);
	ck_assert_int_eq(fclose(to), 0);
}

/* Longer than a file must be left alone. */
static void settle(void)
{
	nanosleep(&(struct timespec){.tv_sec = 1, .tv_nsec = 50000000}, NULL);
}

static char *environment(const char *name)
{
	const char *value = NULL;
	if (!strcmp(name, "QSHIM_POLICY"))
		value = named;
	if (!strcmp(name, "QSHIM_SET"))
		value = set;
	if (!strcmp(name, "QSHIM"))
		value = asked;
	return (char *)value;
}

static void start(const char *text)
{
	if (text)
		put(file, text);
	settle();
	listen_begin();
	policy = qs_policy_load(environment);
	listen_end();
	ck_assert(qs_policy_is_watched(policy));
}

/* Looks once; true if there is another policy now, which is then the one looked at. */
static bool look(void)
{
	listen_begin();
	struct qs_policy *next = qs_policy_look(policy);
	listen_end();
	if (!next)
		return false;
	qs_policy_free(policy);
	policy = next;
	return true;
}

static bool write_and_look(const char *text)
{
	put(file, text);
	settle();
	return look();
}

static enum qs_action action(void)
{
	struct qs_key key = key_of(64, 64, 64);
	struct qs_subject subject = subject_of(&key);
	return qs_policy_choose(policy, &subject).action;
}

static void says(const char *what)
{
	char text[256];
	snprintf(text, sizeof text, "qshim: %s: %s", file, what);
	ck_assert_msg(strstr(said, text) != NULL, "not said: %s; but: %s", text, said);
}

START_TEST(a_preset_is_not_watched)
{
	named = "careful";
	policy = qs_policy_load(environment);
	ck_assert(!qs_policy_is_watched(policy));
}
END_TEST

START_TEST(a_process_that_is_off_watches_nothing)
{
	asked = "off";
	put(file, FP8);
	policy = qs_policy_load(environment);
	ck_assert(!qs_policy_is_watched(policy));
}
END_TEST

START_TEST(an_edit_takes_effect_once)
{
	start(FP8);
	ck_assert(!look());
	ck_assert(write_and_look(NATIVE));
	ck_assert_str_eq(said, "");
	ck_assert_int_eq(action(), QS_ACTION_NATIVE);
	ck_assert_str_eq(qs_policy_name(policy), file);
	ck_assert(!look());
}
END_TEST

START_TEST(an_edit_waits_until_its_writer_is_done)
{
	start(FP8);
	put(file, NATIVE);
	ck_assert(!look());
	settle();
	ck_assert(look());
}
END_TEST

/* The file was written in the very second of its first reading. */
START_TEST(an_edit_right_after_the_first_reading_is_seen)
{
	put(file, FP8);
	policy = qs_policy_load(environment);
	ck_assert(write_and_look(NATIVE));
	ck_assert_int_eq(action(), QS_ACTION_NATIVE);
}
END_TEST

START_TEST(a_file_of_the_same_size_and_date_is_seen_to_differ)
{
	struct stat status;
	start(VERSION "[default]\naction = fp8 \n");
	ck_assert_int_eq(stat(file, &status), 0);
	put(file, VERSION "[default]\naction = bf16\n");
	const struct timespec times[] = {status.st_atim, status.st_mtim};
	ck_assert_int_eq(utimensat(AT_FDCWD, file, times, 0), 0);
	settle();
	ck_assert(look());
	ck_assert_int_eq(action(), QS_ACTION_BF16);
}
END_TEST

START_TEST(a_touch_is_no_change)
{
	start(FP8);
	ck_assert(!write_and_look(FP8));
	ck_assert_str_eq(said, "");
}
END_TEST

START_TEST(a_file_renamed_onto_it_is_seen)
{
	start(FP8);
	put(other, NATIVE);
	ck_assert_int_eq(rename(other, file), 0);
	settle();
	ck_assert(look());
	ck_assert_int_eq(action(), QS_ACTION_NATIVE);
}
END_TEST

START_TEST(a_link_may_be_turned_to_another_file)
{
	char link[64];
	snprintf(link, sizeof link, "%s/link.ini", folder);
	put(other, NATIVE);
	put(file, FP8);
	ck_assert_int_eq(symlink(file, link), 0);
	named = link;
	start(NULL);
	ck_assert_int_eq(unlink(link), 0);
	ck_assert_int_eq(symlink(other, link), 0);
	bool seen = look();
	unlink(link);
	ck_assert(seen);
	ck_assert_int_eq(action(), QS_ACTION_NATIVE);
}
END_TEST

START_TEST(a_broken_edit_is_told_once_and_changes_nothing)
{
	start(FP8);
	ck_assert(!write_and_look(BROKEN));
	says("the policy read before stays in effect");
	ck_assert_ptr_nonnull(strstr(said, "policy.ini:4: unusable value 'fp9'"));
	ck_assert(!look());
	ck_assert_str_eq(said, "");
	ck_assert_int_eq(action(), QS_ACTION_FP8);
	ck_assert(!write_and_look(BROKEN "; still"));
	says("the policy read before stays in effect");
	ck_assert(write_and_look(NATIVE));
	ck_assert_int_eq(action(), QS_ACTION_NATIVE);
}
END_TEST

START_TEST(a_broken_edit_can_be_taken_back)
{
	start(FP8);
	ck_assert(!write_and_look(BROKEN));
	ck_assert(write_and_look(FP8));
	ck_assert_str_eq(said, "");
	ck_assert_int_eq(action(), QS_ACTION_FP8);
}
END_TEST

/* Though it is read again, as it was written in the very second of the first reading. */
START_TEST(what_is_broken_at_the_start_is_told_once)
{
	put(file, BROKEN);
	listen_begin();
	policy = qs_policy_load(environment);
	listen_end();
	ck_assert_ptr_nonnull(strstr(said, "unusable value"));
	settle();
	ck_assert(!look());
	ck_assert_str_eq(said, "");
}
END_TEST

START_TEST(a_file_that_is_gone_is_told_once_and_changes_nothing)
{
	start(FP8);
	unlink(file);
	ck_assert(!look());
	says("No such file or directory");
	says("the policy read before stays in effect");
	ck_assert(!look());
	ck_assert_str_eq(said, "");
	ck_assert(write_and_look(NATIVE));
	ck_assert_int_eq(action(), QS_ACTION_NATIVE);
	unlink(file);
	ck_assert(!look());
	says("No such file or directory");
}
END_TEST

START_TEST(what_is_no_regular_file_is_refused)
{
	start(FP8);
	unlink(file);
	ck_assert_int_eq(mkfifo(file, 0600), 0);
	settle();
	ck_assert(!look());
	says("not a regular file (policy not used)");
	says("the policy read before stays in effect");
	ck_assert(!look());
	ck_assert_str_eq(said, "");
}
END_TEST

START_TEST(a_policy_that_was_broken_at_the_start_can_be_mended)
{
	start(BROKEN);
	ck_assert(qs_policy_broken(policy));
	ck_assert(!write_and_look(BROKEN "; still"));
	ck_assert_ptr_null(strstr(said, "stays in effect"));
	ck_assert(write_and_look(FP8));
	ck_assert(!qs_policy_broken(policy));
	ck_assert_int_eq(action(), QS_ACTION_FP8);
}
END_TEST

START_TEST(a_file_that_was_missing_at_the_start_can_be_made)
{
	start(NULL);
	ck_assert(qs_policy_broken(policy));
	ck_assert(!look());
	ck_assert_str_eq(said, "");
	ck_assert(write_and_look(FP8));
	ck_assert_int_eq(action(), QS_ACTION_FP8);
}
END_TEST

START_TEST(settings_over_the_policy_stay_on_top)
{
	set = "default.action=bf16";
	asked = "observe";
	start(FP8);
	set = asked = NULL; /* the program changed its environment */
	ck_assert(write_and_look(VERSION "mode = shadow\n[default]\naction = native\n"));
	ck_assert_int_eq(action(), QS_ACTION_BF16);
	ck_assert_int_eq(qs_policy_options(policy)->mode, QS_MODE_OBSERVE);
	ck_assert(write_and_look(VERSION "mode = on\n[default]\naction = native\n"));
	ck_assert_int_eq(action(), QS_ACTION_BF16);
	ck_assert_int_eq(qs_policy_options(policy)->mode, QS_MODE_OBSERVE);
}
END_TEST

START_TEST(the_mode_may_change)
{
	start(FP8);
	ck_assert(write_and_look(VERSION "mode = off\n"));
	ck_assert_str_eq(said, "");
	ck_assert_int_eq(qs_policy_options(policy)->mode, QS_MODE_OFF);
}
END_TEST

START_TEST(options_that_are_fixed_at_the_start_are_told)
{
	start(FP8);
	ck_assert(write_and_look(FP8 "[cache]\nvalidity = each\n[tune]\nmin_gain = 7%\n"));
	says("[cache] validity = each takes effect at the program's next start");
	says("[tune] min_gain = 0.07 takes effect at the program's next start");
	ck_assert(write_and_look(NATIVE "[cache]\nvalidity = each\n[tune]\nmin_gain = 7%\n"));
	ck_assert_str_eq(said, "");
}
END_TEST

START_TEST(a_relative_path_is_followed_when_the_program_changes_its_folder)
{
	char here[256];
	ck_assert_ptr_nonnull(getcwd(here, sizeof here));
	ck_assert_int_eq(chdir(folder), 0);
	named = "./policy.ini";
	start(FP8);
	ck_assert_int_eq(chdir(here), 0);
	ck_assert(write_and_look(NATIVE));
	ck_assert_int_eq(action(), QS_ACTION_NATIVE);
	ck_assert_str_eq(qs_policy_name(policy), "./policy.ini");
}
END_TEST

/* ---- steps --------------------------------------------------------------------------------------
 */

static int64_t next_step(const char *steps, int64_t step)
{
	char text[256];
	snprintf(text, sizeof text, VERSION "[rule r]\naction = fp8\nsteps = %s\n", steps);
	struct qs_policy *made = parse(text);
	ck_assert(qs_policy_uses_steps(made));
	int64_t next = qs_policy_next_step(made, step);
	qs_policy_free(made);
	return next;
}

START_TEST(the_next_step_that_matters_is_told)
{
	ck_assert_int_eq(next_step("100..", -1), 100);
	ck_assert_int_eq(next_step("100..", 99), 100);
	ck_assert_int_eq(next_step("100..", 100), INT64_MAX);
	ck_assert_int_eq(next_step("..9", 0), 10);
	ck_assert_int_eq(next_step("..9", 10), INT64_MAX);
	ck_assert_int_eq(next_step("5, 7..8", 4), 5);
	ck_assert_int_eq(next_step("5, 7..8", 5), 6);
	ck_assert_int_eq(next_step("5, 7..8", 6), 7);
	ck_assert_int_eq(next_step("5, 7..8", 8), 9);
	ck_assert_int_eq(next_step("%10", 41), 42);
}
END_TEST

START_TEST(a_policy_without_steps_asks_for_none)
{
	struct qs_policy *made = parse(FP8);
	ck_assert(!qs_policy_uses_steps(made));
	ck_assert_int_eq(qs_policy_next_step(made, -1), INT64_MAX);
	qs_policy_free(made);
}
END_TEST

START_TEST(a_rule_whose_steps_were_never_known_says_so)
{
	struct qs_key key = key_of(64, 64, 64);
	struct qs_subject subject = subject_of(&key);
	policy = parse(VERSION "[rule late]\naction = fp8\nsteps = 100..\n");
	ck_assert_int_eq(qs_policy_choose(policy, &subject).rule, -1);
	listen_begin();
	qs_policy_report_unused(policy);
	listen_end();
	ck_assert_ptr_nonnull(strstr(said, "rule 'late' matched none of 1 products: steps are "
	                                   "unknown"));
	subject.step = 1;
	qs_policy_choose(policy, &subject);
	listen_begin();
	qs_policy_report_unused(policy);
	listen_end();
	ck_assert_ptr_nonnull(strstr(said, "rule 'late' matched none of 2 products\n"));
}
END_TEST

START_TEST(a_product_asked_for_again_counts_only_for_a_rule_it_is_the_first_of)
{
	struct qs_key key = key_of(64, 64, 64);
	struct qs_subject subject = subject_of(&key);
	policy = parse(VERSION "[rule late]\naction = fp8\nsteps = 100..\n");
	qs_policy_choose(policy, &subject);
	subject.again = true;
	subject.step = 99;
	qs_policy_choose(policy, &subject);
	ck_assert_uint_eq(qs_policy_rule_hits(policy, -1), 1);
	for (; subject.step < 102; subject.step++)
		qs_policy_choose(policy, &subject);
	ck_assert_uint_eq(qs_policy_rule_hits(policy, 0), 1);
}
END_TEST

/* ---- weights ------------------------------------------------------------------------------------
 */

static struct qs_policy *with_weights(const char *weights)
{
	char text[256];
	snprintf(text, sizeof text, VERSION "[rule r]\naction = fp8\nweight = %s\n", weights);
	return parse(text);
}

START_TEST(weights_that_a_rule_holds_for_are_told)
{
	policy = with_weights("0..6, -2..-1");
	ck_assert(qs_policy_uses_weights(policy));
	ck_assert(qs_policy_weight_holds(policy, 6, 0));
	ck_assert(!qs_policy_weight_holds(policy, 7, 0));
	ck_assert(!qs_policy_weight_holds(policy, 7, 10));
	ck_assert(qs_policy_weight_holds(policy, 8, 10));
	ck_assert(!qs_policy_weight_holds(policy, 10, 10));
}
END_TEST

START_TEST(a_policy_counts_weights_if_one_end_is_negative)
{
	static const struct {
		const char *weights;
		bool counts;
	} cases[] = {
	        {"0..6", false}, {"%2", false}, {"3..-1", true}, {"!-1", true}, {"-3..", true}};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		policy = with_weights(cases[i].weights);
		ck_assert_msg(qs_policy_counts_weights(policy) == cases[i].counts, "%s",
		              cases[i].weights);
		qs_policy_free(policy);
	}
	policy = parse(FP8);
	ck_assert(!qs_policy_uses_weights(policy));
	ck_assert(!qs_policy_counts_weights(policy));
	ck_assert(!qs_policy_weight_holds(policy, 0, 1));
}
END_TEST

START_TEST(a_rule_that_counts_from_an_end_that_was_never_known_says_so)
{
	struct qs_key key = key_of(64, 64, 64);
	struct qs_subject subject = subject_of(&key);
	policy = with_weights("-1");
	qs_policy_choose(policy, &subject);
	listen_begin();
	qs_policy_report_unused(policy);
	listen_end();
	ck_assert_ptr_nonnull(strstr(said, "how many weights there are is unknown"));
	subject.step = 1;
	qs_policy_choose(policy, &subject);
	listen_begin();
	qs_policy_report_unused(policy);
	listen_end();
	ck_assert_ptr_null(strstr(said, "is unknown"));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("policy: watching");
	TCase *tcase = tcase_create("watch");
	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, set_up, tear_down);
	tcase_add_test(tcase, a_preset_is_not_watched);
	tcase_add_test(tcase, a_process_that_is_off_watches_nothing);
	tcase_add_test(tcase, an_edit_takes_effect_once);
	tcase_add_test(tcase, an_edit_waits_until_its_writer_is_done);
	tcase_add_test(tcase, an_edit_right_after_the_first_reading_is_seen);
	tcase_add_test(tcase, a_file_of_the_same_size_and_date_is_seen_to_differ);
	tcase_add_test(tcase, a_touch_is_no_change);
	tcase_add_test(tcase, a_file_renamed_onto_it_is_seen);
	tcase_add_test(tcase, a_link_may_be_turned_to_another_file);
	tcase_add_test(tcase, a_broken_edit_is_told_once_and_changes_nothing);
	tcase_add_test(tcase, a_broken_edit_can_be_taken_back);
	tcase_add_test(tcase, what_is_broken_at_the_start_is_told_once);
	tcase_add_test(tcase, a_file_that_is_gone_is_told_once_and_changes_nothing);
	tcase_add_test(tcase, what_is_no_regular_file_is_refused);
	tcase_add_test(tcase, a_policy_that_was_broken_at_the_start_can_be_mended);
	tcase_add_test(tcase, a_file_that_was_missing_at_the_start_can_be_made);
	tcase_add_test(tcase, settings_over_the_policy_stay_on_top);
	tcase_add_test(tcase, the_mode_may_change);
	tcase_add_test(tcase, options_that_are_fixed_at_the_start_are_told);
	tcase_add_test(tcase, a_relative_path_is_followed_when_the_program_changes_its_folder);
	tcase_add_test(tcase, the_next_step_that_matters_is_told);
	tcase_add_test(tcase, a_policy_without_steps_asks_for_none);
	tcase_add_test(tcase, a_rule_whose_steps_were_never_known_says_so);
	tcase_add_test(tcase, a_product_asked_for_again_counts_only_for_a_rule_it_is_the_first_of);
	tcase_add_test(tcase, weights_that_a_rule_holds_for_are_told);
	tcase_add_test(tcase, a_policy_counts_weights_if_one_end_is_negative);
	tcase_add_test(tcase, a_rule_that_counts_from_an_end_that_was_never_known_says_so);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
