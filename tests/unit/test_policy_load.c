/* Where a policy comes from: presets, files, QSHIM_SET and the other variables, what wins over
 * what, and that every failure leaves the program alone with one message.
 */
#include <errno.h>
#include <sys/stat.h>

#include "note/note.h"
#include "tests/unit/policy.h"

/* The environment of the test at hand: pairs of name and value. */
static const char *environment[32];
static int asked;

static char *stub_getenv(const char *name)
{
	asked++;
	for (int i = 0; environment[i]; i += 2)
		if (!strcmp(environment[i], name))
			return (char *)(uintptr_t)environment[i + 1];
	return NULL;
}

static void set_variables(const char *name, ...)
{
	va_list arguments;
	int count = 0;
	va_start(arguments, name);
	for (; name && count < 30; name = va_arg(arguments, const char *)) {
		environment[count++] = name;
		environment[count++] = va_arg(arguments, const char *);
	}
	environment[count] = NULL;
	va_end(arguments);
}

static struct qs_policy *load(void)
{
	asked = 0;
	listen_begin();
	struct qs_policy *policy = qs_policy_load(stub_getenv);
	listen_end();
	ck_assert_ptr_nonnull(policy);
	return policy;
}

static struct qs_policy *load_quietly(void)
{
	struct qs_policy *policy = load();
	ck_assert_str_eq(said, "");
	ck_assert(!qs_policy_broken(policy));
	return policy;
}

static struct qs_choice choose(struct qs_policy *policy, int64_t m)
{
	struct qs_key key = key_of(m, 4096, 4096);
	struct qs_subject subject = subject_of(&key);
	return qs_policy_choose(policy, &subject);
}

/* The policy must be broken, with this one message, and do nothing. */
static void breaks(const char *message)
{
	char expected[2048];
	struct qs_policy *policy = load();
	snprintf(expected, sizeof expected, "qshim: %s\n", message);
	ck_assert_str_eq(said, expected);
	ck_assert(qs_policy_broken(policy));
	ck_assert_int_eq(choose(policy, 4096).action, QS_ACTION_NATIVE);
	ck_assert_int_eq(qs_policy_rule_count(policy), 0);
	qs_policy_free(policy);
}

static char directory[64], file[128];

static void write_file(const char *text)
{
	FILE *stream = fopen(file, "w");
	ck_assert_ptr_nonnull(stream);
	fputs(text, stream);
	fclose(stream);
}

static void make_directory(void)
{
	strcpy(directory, "/tmp/qshim-policy-XXXXXX");
	ck_assert_ptr_nonnull(mkdtemp(directory));
	snprintf(file, sizeof file, "%s/p.ini", directory);
	set_variables(NULL);
}

static void remove_directory(void)
{
	unlink(file);
	rmdir(directory);
}

/* Presets ------------------------------------------------------------------------------------ */

START_TEST(bare_preload_decides_automatically_with_tracked_copies)
{
	struct qs_policy *policy = load_quietly();
	const struct qs_options *options = qs_policy_options(policy);
	ck_assert_str_eq(qs_policy_name(policy), "preset default");
	ck_assert_int_eq(options->mode, QS_MODE_ON);
	ck_assert_int_eq(options->validity, QS_VALIDITY_TRACKED);
	ck_assert_int_eq(qs_policy_rule_count(policy), 0);
	ck_assert_int_eq(choose(policy, 4096).action, QS_ACTION_AUTO);
	qs_policy_free(policy);
}
END_TEST

START_TEST(bare_preload_writes_no_file_and_says_what_it_does)
{
	struct qs_policy *policy = load_quietly();
	const struct qs_options *options = qs_policy_options(policy);
	ck_assert_str_eq(options->out_dir, "");
	ck_assert_str_eq(options->log_file, "");
	ck_assert(!options->quiet && !options->cublaslt_any);
	qs_policy_free(policy);
}
END_TEST

START_TEST(every_preset_reads_without_a_word)
{
	const char *name;
	int count = 0;
	for (; (name = qs_preset_name(count)); count++) {
		set_variables("QSHIM_POLICY", name, NULL);
		struct qs_policy *policy = load_quietly();
		char *first = strdup(shown(policy));
		struct qs_policy *again = parse(first);
		ck_assert_str_eq(shown(again), first);
		qs_policy_free(policy);
		qs_policy_free(again);
		free(first);
	}
	ck_assert_int_eq(count, 7);
}
END_TEST

static struct qs_policy *preset(const char *name)
{
	set_variables("QSHIM_POLICY", name, NULL);
	return load_quietly();
}

START_TEST(observe_preset_only_observes)
{
	struct qs_policy *policy = preset("observe");
	ck_assert_int_eq(qs_policy_options(policy)->mode, QS_MODE_OBSERVE);
	qs_policy_free(policy);
}
END_TEST

START_TEST(lossless_preset_stays_in_bf16)
{
	struct qs_policy *policy = preset("lossless");
	ck_assert_int_eq(choose(policy, 4096).action, QS_ACTION_BF16);
	qs_policy_free(policy);
}
END_TEST

START_TEST(fp8_training_preset_takes_large_products_of_every_role)
{
	struct qs_policy *policy = preset("fp8-training");
	for (int role = QS_ROLE_UNKNOWN; role < QS_ROLE_COUNT; role++) {
		struct qs_key key = key_of(8192, 8192, 8192);
		struct qs_subject subject = subject_of(&key);
		key.role = (uint8_t)role;
		ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_FP8);
		ck_assert(!qs_policy_choose(policy, &subject).eager);
		key.n = 512;
		ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_NATIVE);
	}
	qs_policy_free(policy);
}
END_TEST

START_TEST(careful_preset_spares_wgrad_ends_and_head)
{
	struct qs_policy *policy = preset("careful");
	struct qs_key key = key_of(8192, 8192, 8192);
	struct qs_subject subject = subject_of(&key);
	key.role = QS_ROLE_WGRAD;
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_NATIVE);
	key.role = QS_ROLE_FWD;
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_AUTO);
	subject.layer = "model.lm_head";
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_NATIVE);
	subject.layer = NULL;
	subject.weight = 0;
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_NATIVE);
	subject.weight = 99;
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_AUTO);
	subject.weights = 100;
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_NATIVE);
	qs_policy_free(policy);
}
END_TEST

START_TEST(nf4_decode_preset_takes_few_tokens_forward)
{
	struct qs_policy *policy = preset("nf4-decode");
	struct qs_key key = key_of(4096, 32, 4096);
	struct qs_subject subject = subject_of(&key);
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_AUTO);
	key.role = QS_ROLE_FWD;
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_NF4);
	key.n = 33;
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_AUTO);
	ck_assert_int_eq(qs_policy_options(policy)->early, QS_EARLY_ALWAYS);
	qs_policy_free(policy);
}
END_TEST

START_TEST(qlora_preset_keeps_adapters_and_weight_gradients_native)
{
	struct qs_policy *policy = preset("qlora");
	struct qs_key key = key_of(4096, 2048, 4096);
	struct qs_subject subject = subject_of(&key);
	key.role = QS_ROLE_DGRAD;
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_NF4);
	key.role = QS_ROLE_WGRAD;
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_NATIVE);
	key.role = QS_ROLE_FWD;
	key.m = 16;
	ck_assert_int_eq(qs_policy_choose(policy, &subject).action, QS_ACTION_NATIVE);
	qs_policy_free(policy);
}
END_TEST

START_TEST(unused_rules_of_a_preset_are_not_the_users_mistake)
{
	struct qs_policy *policy = preset("careful");
	choose(policy, 4096);
	listen_begin();
	qs_policy_report_unused(policy);
	listen_end();
	ck_assert_str_eq(said, "");
	qs_policy_free(policy);
}
END_TEST

START_TEST(unknown_preset_names_the_nearest)
{
	set_variables("QSHIM_POLICY", "carefull", NULL);
	breaks("QSHIM_POLICY=carefull: neither a preset (default, observe, lossless, fp8-training, "
	       "careful, nf4-decode, qlora) nor a file, whose name has a '/' or ends in '.ini'; "
	       "did "
	       "you mean 'careful'? (policy not used)");
	size_t length;
	ck_assert_ptr_null(qs_preset_text("carefull", &length));
	ck_assert_ptr_null(qs_preset_name(-1));
}
END_TEST

/* Files -------------------------------------------------------------------------------------- */

START_TEST(file_is_read)
{
	write_file(VERSION "[default]\naction = nf4\n");
	set_variables("QSHIM_POLICY", file, NULL);
	struct qs_policy *policy = load_quietly();
	ck_assert_str_eq(qs_policy_name(policy), file);
	ck_assert_int_eq(choose(policy, 1).action, QS_ACTION_NF4);
	qs_policy_free(policy);
}
END_TEST

START_TEST(name_that_ends_in_ini_is_a_file)
{
	set_variables("QSHIM_POLICY", "no-such-file.ini", NULL);
	breaks("no-such-file.ini: No such file or directory (policy not used)");
}
END_TEST

START_TEST(link_to_a_file_is_followed)
{
	char target[160];
	snprintf(target, sizeof target, "%s/target", directory);
	write_file(VERSION "[default]\naction = nf4\n");
	ck_assert(!rename(file, target) && !symlink(target, file));
	set_variables("QSHIM_POLICY", file, NULL);
	struct qs_policy *policy = load_quietly();
	ck_assert_int_eq(choose(policy, 1).action, QS_ACTION_NF4);
	qs_policy_free(policy);
	unlink(target);
}
END_TEST

START_TEST(mistake_in_a_file_is_reported_with_its_path)
{
	char message[512];
	write_file(VERSION "[rule x]\naction = fp8\nm = 1\nscael = row\n");
	snprintf(message, sizeof message,
	         "%s:6: unknown key 'scael' in [rule x]; did you mean 'scale'? (policy not used)",
	         file);
	set_variables("QSHIM_POLICY", file, NULL);
	breaks(message);
}
END_TEST

START_TEST(what_is_not_a_regular_file_is_refused)
{
	char message[512], path[128];
	snprintf(path, sizeof path, "%s/", directory);
	snprintf(message, sizeof message, "%s: not a regular file (policy not used)", path);
	set_variables("QSHIM_POLICY", path, NULL);
	breaks(message);
	set_variables("QSHIM_POLICY", "/dev/zero", NULL);
	breaks("/dev/zero: not a regular file (policy not used)");
}
END_TEST

START_TEST(pipe_that_nobody_writes_does_not_hang_the_program)
{
	char message[512];
	ck_assert(!mkfifo(file, 0600));
	snprintf(message, sizeof message, "%s: not a regular file (policy not used)", file);
	set_variables("QSHIM_POLICY", file, NULL);
	breaks(message);
}
END_TEST

START_TEST(file_larger_than_a_mebibyte_is_refused)
{
	char message[512];
	write_file(VERSION);
	ck_assert(!truncate(file, (1 << 20) + 1));
	snprintf(message, sizeof message, "%s: larger than 1 MiB (policy not used)", file);
	set_variables("QSHIM_POLICY", file, NULL);
	breaks(message);
}
END_TEST

START_TEST(errno_of_the_program_is_kept)
{
	set_variables("QSHIM_POLICY", "no-such-file.ini", NULL);
	listen_begin();
	errno = 4711;
	struct qs_policy *policy = qs_policy_load(stub_getenv);
	int kept = errno;
	listen_end();
	ck_assert_int_eq(kept, 4711);
	qs_policy_free(policy);
}
END_TEST

/* QSHIM -------------------------------------------------------------------------------------- */

START_TEST(off_reads_nothing_else)
{
	const char *words[] = {"off", "0"};
	for (int i = 0; i < 2; i++) {
		set_variables("QSHIM", words[i], "QSHIM_POLICY", "no-such-file.ini", "QSHIM_LOG",
		              "nonsense", NULL);
		struct qs_policy *policy = load_quietly();
		ck_assert_int_eq(asked, 1);
		ck_assert_int_eq(qs_policy_options(policy)->mode, QS_MODE_OFF);
		qs_policy_free(policy);
	}
}
END_TEST

START_TEST(mode_of_the_environment_wins_over_the_policy)
{
	const struct {
		const char *word;
		enum qs_mode mode;
	} modes[] = {{"on", QS_MODE_ON},
	             {"1", QS_MODE_ON},
	             {"shadow", QS_MODE_SHADOW},
	             {"observe", QS_MODE_OBSERVE}};
	write_file(VERSION "mode = off\n");
	for (int i = 0; i < 4; i++) {
		set_variables("QSHIM", modes[i].word, "QSHIM_POLICY", file, "QSHIM_SET",
		              "qshim.mode=off", NULL);
		struct qs_policy *policy = load_quietly();
		ck_assert_int_eq(qs_policy_options(policy)->mode, modes[i].mode);
		qs_policy_free(policy);
	}
}
END_TEST

START_TEST(word_that_is_no_mode_means_off)
{
	set_variables("QSHIM", "offf", NULL);
	struct qs_policy *policy = load();
	ck_assert_str_eq(said,
	                 "qshim: QSHIM=offf: expected on, shadow, observe or off; did you mean "
	                 "'off'? (taken as off)\n");
	ck_assert_int_eq(qs_policy_options(policy)->mode, QS_MODE_OFF);
	ck_assert_int_eq(asked, 1);
	qs_policy_free(policy);
}
END_TEST

START_TEST(empty_variables_count_as_unset)
{
	set_variables("QSHIM", "", "QSHIM_POLICY", "", "QSHIM_SET", "", "QSHIM_LOG", "", NULL);
	struct qs_policy *policy = load_quietly();
	ck_assert_int_eq(qs_policy_options(policy)->mode, QS_MODE_ON);
	ck_assert_str_eq(qs_policy_name(policy), "preset default");
	qs_policy_free(policy);
}
END_TEST

/* QSHIM_SET ---------------------------------------------------------------------------------- */

START_TEST(set_wins_over_the_file)
{
	write_file(VERSION "[cache]\nmax_keys = 100\n[default]\naction = nf4\nscale = row\n");
	set_variables("QSHIM_POLICY", file, "QSHIM_SET",
	              "cache.max_keys=200; default.action = fp8 ;numerics.min_sqnr=7.5;", NULL);
	struct qs_policy *policy = load_quietly();
	ck_assert_int_eq(qs_policy_options(policy)->max_keys, 200);
	ck_assert_double_eq(qs_policy_options(policy)->min_sqnr, 7.5);
	ck_assert_int_eq(choose(policy, 1).action, QS_ACTION_FP8);
	ck_assert_int_eq(choose(policy, 1).scaling, QS_SCALING_ROW);
	qs_policy_free(policy);
}
END_TEST

START_TEST(rules_of_set_come_first_and_in_order)
{
	write_file(VERSION "[rule file]\naction = nf4\n");
	set_variables("QSHIM_POLICY", file, "QSHIM_SET",
	              "rule a.m=..10;rule a.action=native;rule b.m=..20,%2;rule b.action=fp8",
	              NULL);
	struct qs_policy *policy = load_quietly();
	ck_assert_int_eq(qs_policy_rule_count(policy), 3);
	ck_assert_str_eq(qs_policy_rule_name(policy, 0), "a");
	ck_assert_str_eq(qs_policy_rule_name(policy, 1), "b");
	ck_assert_str_eq(qs_policy_rule_name(policy, 2), "file");
	ck_assert_int_eq(choose(policy, 10).action, QS_ACTION_NATIVE);
	ck_assert_int_eq(choose(policy, 12).action, QS_ACTION_FP8);
	ck_assert_int_eq(choose(policy, 13).action, QS_ACTION_NF4);
	qs_policy_free(policy);
}
END_TEST

START_TEST(set_replaces_keys_of_a_rule_in_place)
{
	write_file(VERSION "[rule x]\nm = 1\naction = nf4\n[rule y.z]\naction = bf16\n");
	set_variables("QSHIM_POLICY", file, "QSHIM_SET",
	              "rule x.m=2; rule x.action=fp8; rule y.z.action=native", NULL);
	struct qs_policy *policy = load_quietly();
	ck_assert_int_eq(qs_policy_rule_count(policy), 2);
	ck_assert_int_eq(choose(policy, 2).action, QS_ACTION_FP8);
	ck_assert_int_eq(choose(policy, 1).action, QS_ACTION_NATIVE);
	qs_policy_free(policy);
}
END_TEST

START_TEST(mistake_in_set_is_reported_with_its_item)
{
	set_variables("QSHIM_SET", "cache.max_keys=200;default.acton=fp8", NULL);
	breaks("QSHIM_SET:2: unknown key 'acton' in [default]; did you mean 'action'? (policy not "
	       "used)");
	set_variables("QSHIM_SET", "mode=on", NULL);
	breaks("QSHIM_SET:1: 'mode' is not section.key=value (policy not used)");
	set_variables("QSHIM_SET", "default.action", NULL);
	breaks("QSHIM_SET:1: 'default.action' is not section.key=value (policy not used)");
	set_variables("QSHIM_SET", "rule x.m=5", NULL);
	breaks("QSHIM_SET:1: [rule x] has no action (policy not used)");
}
END_TEST

START_TEST(item_of_set_that_is_too_long_is_refused)
{
	char text[256];
	memset(text, 'x', sizeof text);
	memcpy(text, "tune.file=", 10);
	text[199] = 0;
	set_variables("QSHIM_SET", text, NULL);
	breaks("QSHIM_SET:1: an item of 199 characters; at most 198 fit (policy not used)");
}
END_TEST

/* Other variables ---------------------------------------------------------------------------- */

START_TEST(variables_win_over_set)
{
	set_variables("QSHIM_SET", "log.level=none;log.out=a;log.file=b;log.summary=0;log.quiet=0",
	              "QSHIM_LOG", "info", "QSHIM_OUT", "run.%p", "QSHIM_LOG_FILE", "log.%r",
	              "QSHIM_SUMMARY", "1", "QSHIM_QUIET", "1", NULL);
	struct qs_policy *policy = load_quietly();
	const struct qs_options *options = qs_policy_options(policy);
	ck_assert_uint_ne(options->log_levels & 1u << QS_LOG_INFO, 0);
	ck_assert_str_eq(options->out_dir, "run.%p");
	ck_assert_str_eq(options->log_file, "log.%r");
	ck_assert_int_eq(options->summary, QS_SUMMARY_ALWAYS);
	ck_assert(options->quiet);
	qs_policy_free(policy);
}
END_TEST

START_TEST(unusable_variable_is_ignored_with_a_warning)
{
	set_variables("QSHIM_QUIET", "yes", "QSHIM_SUMMARY", "1", NULL);
	struct qs_policy *policy = load();
	ck_assert_str_eq(said, "qshim: QSHIM_QUIET=yes: expected 0 or 1 (ignored)\n");
	ck_assert(!qs_policy_broken(policy));
	ck_assert(!qs_policy_options(policy)->quiet);
	ck_assert_int_eq(qs_policy_options(policy)->summary, QS_SUMMARY_ALWAYS);
	qs_policy_free(policy);
}
END_TEST

START_TEST(broken_policy_still_logs_where_it_was_told_to)
{
	set_variables("QSHIM_POLICY", "no-such-file.ini", "QSHIM_OUT", "out", "QSHIM", "shadow",
	              NULL);
	struct qs_policy *policy = load();
	ck_assert(qs_policy_broken(policy));
	ck_assert_str_eq(qs_policy_options(policy)->out_dir, "out");
	ck_assert_int_eq(qs_policy_options(policy)->mode, QS_MODE_SHADOW);
	qs_policy_free(policy);
}
END_TEST

START_TEST(half_read_policy_leaves_nothing_behind)
{
	write_file(VERSION "[cache]\nmax_keys = 64\n[rule r]\naction = fp8\nfoo = 1\n");
	set_variables("QSHIM_POLICY", file, NULL);
	struct qs_policy *policy = load();
	ck_assert(qs_policy_broken(policy));
	ck_assert_int_eq(qs_policy_options(policy)->max_keys, 4096);
	ck_assert_int_eq(qs_policy_rule_count(policy), 0);
	qs_policy_free(policy);
}
END_TEST

static void warn_unknown(const char *first, const char *second)
{
	char *variables[] = {(char *)(uintptr_t) "HOME=/", (char *)(uintptr_t)first,
	                     (char *)(uintptr_t)second, NULL};
	listen_begin();
	qs_policy_warn_unknown(variables);
	listen_end();
}

START_TEST(unknown_variable_is_reported_with_the_nearest)
{
	warn_unknown("QSHIM_POLCIY=x", "QSHIM_BANANAS=1");
	ck_assert_str_eq(
	        said,
	        "qshim: unknown variable QSHIM_POLCIY is ignored; did you mean QSHIM_POLICY?\n"
	        "qshim: unknown variable QSHIM_BANANAS is ignored\n");
}
END_TEST

START_TEST(known_variables_are_not_reported)
{
	warn_unknown("QSHIM=on", "QSHIM_LOG_FILE=x");
	ck_assert_str_eq(said, "");
	warn_unknown("QSHIM_SET=", "QSHIM_POLICY=a=b");
	ck_assert_str_eq(said, "");
	listen_begin();
	qs_policy_warn_unknown(NULL);
	listen_end();
	ck_assert_str_eq(said, "");
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("policy sources");
	TCase *presets = tcase_create("presets");
	TCase *files = tcase_create("files");
	TCase *modes = tcase_create("qshim");
	TCase *sets = tcase_create("qshim_set");
	TCase *others = tcase_create("other variables");
	tcase_add_checked_fixture(presets, make_directory, remove_directory);
	suite_add_tcase(suite, presets);
	tcase_add_test(presets, bare_preload_decides_automatically_with_tracked_copies);
	tcase_add_test(presets, bare_preload_writes_no_file_and_says_what_it_does);
	tcase_add_test(presets, every_preset_reads_without_a_word);
	tcase_add_test(presets, observe_preset_only_observes);
	tcase_add_test(presets, lossless_preset_stays_in_bf16);
	tcase_add_test(presets, fp8_training_preset_takes_large_products_of_every_role);
	tcase_add_test(presets, careful_preset_spares_wgrad_ends_and_head);
	tcase_add_test(presets, nf4_decode_preset_takes_few_tokens_forward);
	tcase_add_test(presets, qlora_preset_keeps_adapters_and_weight_gradients_native);
	tcase_add_test(presets, unused_rules_of_a_preset_are_not_the_users_mistake);
	tcase_add_test(presets, unknown_preset_names_the_nearest);
	tcase_add_checked_fixture(files, make_directory, remove_directory);
	suite_add_tcase(suite, files);
	tcase_add_test(files, file_is_read);
	tcase_add_test(files, name_that_ends_in_ini_is_a_file);
	tcase_add_test(files, link_to_a_file_is_followed);
	tcase_add_test(files, mistake_in_a_file_is_reported_with_its_path);
	tcase_add_test(files, what_is_not_a_regular_file_is_refused);
	tcase_add_test(files, pipe_that_nobody_writes_does_not_hang_the_program);
	tcase_add_test(files, file_larger_than_a_mebibyte_is_refused);
	tcase_add_test(files, errno_of_the_program_is_kept);
	tcase_add_checked_fixture(modes, make_directory, remove_directory);
	suite_add_tcase(suite, modes);
	tcase_add_test(modes, off_reads_nothing_else);
	tcase_add_test(modes, mode_of_the_environment_wins_over_the_policy);
	tcase_add_test(modes, word_that_is_no_mode_means_off);
	tcase_add_test(modes, empty_variables_count_as_unset);
	tcase_add_checked_fixture(sets, make_directory, remove_directory);
	suite_add_tcase(suite, sets);
	tcase_add_test(sets, set_wins_over_the_file);
	tcase_add_test(sets, rules_of_set_come_first_and_in_order);
	tcase_add_test(sets, set_replaces_keys_of_a_rule_in_place);
	tcase_add_test(sets, mistake_in_set_is_reported_with_its_item);
	tcase_add_test(sets, item_of_set_that_is_too_long_is_refused);
	tcase_add_checked_fixture(others, make_directory, remove_directory);
	suite_add_tcase(suite, others);
	tcase_add_test(others, variables_win_over_set);
	tcase_add_test(others, unusable_variable_is_ignored_with_a_warning);
	tcase_add_test(others, broken_policy_still_logs_where_it_was_told_to);
	tcase_add_test(others, half_read_policy_leaves_nothing_behind);
	tcase_add_test(others, unknown_variable_is_reported_with_the_nearest);
	tcase_add_test(others, known_variables_are_not_reported);
	return qs_suite_main(suite);
}
