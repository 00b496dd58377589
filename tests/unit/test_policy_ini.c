/* Reading, matching and showing a policy: every key, the order of rules, and the exact message of
 * every mistake with the line it stands on.
 */
#include <pthread.h>
#include <time.h>

#include "tests/unit/policy.h"

/* Layout of a file --------------------------------------------------------------------------- */

START_TEST(smallest_policy_decides_automatically)
{
	struct qs_choice choice = choice_for(VERSION);
	ck_assert_int_eq(choice.action, QS_ACTION_AUTO);
	ck_assert_int_eq(choice.rule, -1);
	ck_assert(!choice.eager);
}
END_TEST

START_TEST(options_of_every_section_are_read)
{
	struct qs_policy *policy = parse(VERSION "mode = shadow\n"
	                                         "[cache]\nvalidity = each\nmax_keys = 64\n"
	                                         "[numerics]\nmin_sqnr = 25.5\ncheck_every = 0\n"
	                                         "[tune]\nmin_gain = 5%\nbudget_ms = 10\nfile = t\n"
	                                         "[engine]\ncublaslt = any\nearly = never\n"
	                                         "[log]\nlevel = all\nfile = f\nout = o\n"
	                                         "summary = 1\nquiet = 1\n");
	const struct qs_options *options = qs_policy_options(policy);
	ck_assert_int_eq(options->mode, QS_MODE_SHADOW);
	ck_assert_int_eq(options->validity, QS_VALIDITY_EACH);
	ck_assert_int_eq(options->max_keys, 64);
	ck_assert_double_eq(options->min_sqnr, 25.5);
	ck_assert_int_eq(options->check_every, 0);
	ck_assert_double_eq(options->min_gain, 0.05);
	ck_assert_double_eq(options->budget_ms, 10);
	ck_assert_str_eq(options->tuned_file, "t");
	ck_assert(options->cublaslt_any && options->quiet);
	ck_assert_int_eq(options->early, QS_EARLY_NEVER);
	ck_assert_str_eq(options->log_file, "f");
	ck_assert_str_eq(options->out_dir, "o");
	ck_assert_int_eq(options->summary, QS_SUMMARY_ALWAYS);
	qs_policy_free(policy);
}
END_TEST

START_TEST(comments_blank_lines_and_carriage_returns_are_skipped)
{
	struct qs_policy *policy = parse("\xef\xbb\xbf; first\r\n# second\r\n\r\n"
	                                 "[qshim] ; head\r\nversion = 1 ; one\r\nmode = off\r\n");
	ck_assert_int_eq(qs_policy_options(policy)->mode, QS_MODE_OFF);
	qs_policy_free(policy);
}
END_TEST

START_TEST(indented_keys_are_keys_of_their_own)
{
	struct qs_choice choice = choice_for("  [qshim]\n    version = 1\n    mode = on\n"
	                                     "[default]\n\taction = fp8\n\tscale = row\n");
	ck_assert_int_eq(choice.action, QS_ACTION_FP8);
	ck_assert_int_eq(choice.scaling, QS_SCALING_ROW);
}
END_TEST

START_TEST(key_given_again_adds_to_its_list)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	ck_assert(!rule_with("m = 5", &subject));
	ck_assert(rule_with("m = 5\nm = 1", &subject));
	ck_assert(!rule_with("m = 5\nm = 1, !1", &subject));
}
END_TEST

START_TEST(last_line_needs_no_line_feed)
{
	ck_assert_int_eq(choice_for(VERSION "[default]\naction = bf16").action, QS_ACTION_BF16);
}
END_TEST

START_TEST(line_of_198_characters_is_read)
{
	char text[512];
	int length = snprintf(text, sizeof text, VERSION "[tune]\nfile = ");
	memset(text + length, 'x', 198 - 7);
	text[length + 198 - 7] = 0;
	struct qs_policy *policy = parse(text);
	ck_assert_uint_eq(strlen(qs_policy_options(policy)->tuned_file), 198 - 7);
	qs_policy_free(policy);
}
END_TEST

START_TEST(comment_may_have_any_length)
{
	char text[1024];
	int length = snprintf(text, sizeof text, VERSION ";");
	memset(text + length, 'x', 600);
	text[length + 600] = 0;
	qs_policy_free(parse(text));
}
END_TEST

/* What a rule matches ------------------------------------------------------------------------ */

START_TEST(dimensions_are_those_of_cublas)
{
	struct qs_key key = key_of(10, 20, 30);
	struct qs_subject subject = subject_of(&key);
	ck_assert(rule_with("m = 10\nn = 20\nk = 30", &subject));
	ck_assert(!rule_with("m = 10\nn = 20\nk = 31", &subject));
	ck_assert(!rule_with("m = 20", &subject));
	ck_assert(!rule_with("n = 10", &subject));
}
END_TEST

START_TEST(derived_sizes_are_product_and_least_dimension)
{
	struct qs_key key = key_of(4096, 2048, 1024);
	struct qs_subject subject = subject_of(&key);
	ck_assert(rule_with("mnk = 8589934592", &subject));
	ck_assert(!rule_with("mnk = 9e9..", &subject));
	ck_assert(rule_with("min_dim = 1024", &subject));
}
END_TEST

START_TEST(product_of_huge_dimensions_saturates)
{
	struct qs_key key = key_of(INT64_C(1) << 40, INT64_C(1) << 40, 16);
	struct qs_subject subject = subject_of(&key);
	ck_assert(rule_with("mnk = 1e18..", &subject));
}
END_TEST

START_TEST(tokens_in_and_out_follow_the_role)
{
	struct qs_key key = key_of(300, 20, 100);
	struct qs_subject subject = subject_of(&key);
	key.role = QS_ROLE_FWD;
	ck_assert(rule_with("tokens = 20\nin = 100\nout = 300", &subject));
	key.role = QS_ROLE_DGRAD;
	ck_assert(rule_with("tokens = 20\nin = 300\nout = 100", &subject));
	ck_assert(!rule_with("in = 100", &subject));
}
END_TEST

START_TEST(tokens_in_and_out_match_nothing_while_the_role_is_unknown)
{
	struct qs_key key = key_of(300, 20, 100);
	struct qs_subject subject = subject_of(&key);
	ck_assert(!rule_with("tokens = 0..", &subject));
	ck_assert(!rule_with("in = !7", &subject));
	ck_assert(!rule_with("out = 1..", &subject));
}
END_TEST

START_TEST(role_matches_the_words_given)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	key.role = QS_ROLE_DGRAD;
	ck_assert(rule_with("role = fwd, dgrad", &subject));
	ck_assert(!rule_with("role = fwd, wgrad", &subject));
	ck_assert(rule_with("role = !wgrad", &subject));
	ck_assert(!rule_with("role = !dgrad", &subject));
}
END_TEST

START_TEST(role_matches_nothing_while_it_is_unknown)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	ck_assert(!rule_with("role = fwd, dgrad, wgrad", &subject));
	ck_assert(!rule_with("role = !wgrad", &subject));
}
END_TEST

START_TEST(op_names_a_first)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	key.ta = 1;
	key.tb = 0;
	ck_assert(rule_with("op = TN", &subject));
	ck_assert(!rule_with("op = NT, NN, TT", &subject));
	ck_assert(rule_with("op = !NT", &subject));
	key.ta = 2; /* conjugated */
	ck_assert(!rule_with("op = NN, NT, TN, TT", &subject));
}
END_TEST

START_TEST(api_is_the_function_called)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	key.entry = QS_ENTRY_GEMM_EX;
	ck_assert(rule_with("api = cublasGemmEx", &subject));
	ck_assert(rule_with("api = cublasGemm*", &subject));
	ck_assert(!rule_with("api = cublasLt*", &subject));
	ck_assert(!rule_with("api = !cublasGemmEx", &subject));
}
END_TEST

START_TEST(layer_is_matched_by_any_pattern)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	subject.layer = "model.layers.3.mlp.up_proj";
	ck_assert(rule_with("layer = *lm_head*, *.mlp.*", &subject));
	ck_assert(rule_with("layer = re:^model.*(up|down)_proj$", &subject));
	ck_assert(!rule_with("layer = *.mlp.*, !*.up_proj", &subject));
	ck_assert(!rule_with("layer = mlp", &subject));
}
END_TEST

START_TEST(layer_matches_nothing_without_a_label)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	ck_assert(!rule_with("layer = *", &subject));
	ck_assert(!rule_with("layer = !x", &subject));
}
END_TEST

START_TEST(weight_counts_from_either_end)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	ck_assert(!rule_with("weight = 0..", &subject));
	subject.weight = 9;
	ck_assert(rule_with("weight = 9", &subject));
	ck_assert(!rule_with("weight = -7..-1", &subject));
	subject.weights = 10;
	ck_assert(rule_with("weight = -7..-1", &subject));
	subject.weight = 2;
	ck_assert(!rule_with("weight = -7..-1", &subject));
	ck_assert(rule_with("weight = 0..6, -7..-1", &subject));
}
END_TEST

START_TEST(steps_match_nothing_while_the_step_is_unknown)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	ck_assert(!rule_with("steps = 0..", &subject));
	subject.step = 99;
	ck_assert(!rule_with("steps = 100..", &subject));
	subject.step = 100;
	ck_assert(rule_with("steps = 100..", &subject));
}
END_TEST

START_TEST(every_key_of_a_rule_must_match)
{
	struct qs_key key = key_of(64, 64, 64);
	struct qs_subject subject = subject_of(&key);
	key.role = QS_ROLE_FWD;
	subject.layer = "mlp";
	ck_assert(rule_with("m = 64\nrole = fwd\nlayer = mlp\nop = TN", &subject));
	ck_assert(!rule_with("m = 65\nrole = fwd\nlayer = mlp\nop = TN", &subject));
	ck_assert(!rule_with("m = 64\nrole = dgrad\nlayer = mlp\nop = TN", &subject));
	ck_assert(!rule_with("m = 64\nrole = fwd\nlayer = attn\nop = TN", &subject));
	ck_assert(!rule_with("m = 64\nrole = fwd\nlayer = mlp\nop = NN", &subject));
}
END_TEST

START_TEST(rule_without_conditions_matches_everything)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	ck_assert(rule_with("", &subject));
}
END_TEST

/* What a rule wants -------------------------------------------------------------------------- */

START_TEST(first_matching_rule_wins)
{
	struct qs_policy *policy = parse(VERSION "[rule small]\nm = ..100\naction = native\n"
	                                         "[rule any]\naction = fp8\n"
	                                         "[rule never]\naction = nf4\n");
	struct qs_key small = key_of(100, 1, 1), large = key_of(101, 1, 1);
	struct qs_subject first = subject_of(&small), second = subject_of(&large);
	ck_assert_int_eq(qs_policy_choose(policy, &first).rule, 0);
	ck_assert_int_eq(qs_policy_choose(policy, &first).action, QS_ACTION_NATIVE);
	ck_assert_int_eq(qs_policy_choose(policy, &second).rule, 1);
	ck_assert_int_eq(qs_policy_choose(policy, &second).action, QS_ACTION_FP8);
	qs_policy_free(policy);
}
END_TEST

START_TEST(default_takes_what_no_rule_matches)
{
	struct qs_choice choice = choice_for(VERSION "[default]\naction = nf4\n"
	                                             "[rule r]\nm = 1\naction = fp8\n");
	ck_assert_int_eq(choice.rule, -1);
	ck_assert_int_eq(choice.action, QS_ACTION_NF4);
}
END_TEST

START_TEST(every_action_scale_and_format_has_its_word)
{
	const char *actions[] = {"native", "bf16", "fp8", "nf4", "auto"};
	const char *scales[] = {"auto", "tensor", "row"}, *formats[] = {"auto", "e4m3", "e5m2"};
	char text[256];
	for (int i = 0; i < 5; i++) {
		snprintf(text, sizeof text, VERSION "[default]\naction=%s\nscale=%s\nformat=%s\n",
		         actions[i], scales[i % 3], formats[i % 3]);
		struct qs_choice choice = choice_for(text);
		ck_assert_int_eq(choice.action, i);
		ck_assert_int_eq(choice.scaling, i % 3);
		ck_assert_int_eq(choice.format, i % 3);
	}
}
END_TEST

START_TEST(action_is_done_always_unless_performance_is_asked_for)
{
	ck_assert(choice_for(VERSION "[default]\naction = fp8\n").eager);
	ck_assert(choice_for(VERSION "[default]\naction = fp8\nstrategy = eager\n").eager);
	ck_assert(!choice_for(VERSION "[default]\naction = fp8\nstrategy = performant\n").eager);
	ck_assert(!choice_for(VERSION "[default]\naction = auto\nstrategy = eager\n").eager);
	ck_assert(!choice_for(VERSION "[default]\naction = native\n").eager);
}
END_TEST

START_TEST(rule_may_have_a_least_accuracy_of_its_own)
{
	const char *const policy = "[numerics]\nmin_sqnr = 30\n[default]\naction = %s\n%s";
	const struct {
		const char *action, *line;
		double least;
	} rows[] = {{"fp8", "", 30},
	            {"fp8", "min_sqnr = 12.5\n", 12.5},
	            {"auto", "min_sqnr = 0\n", 0},
	            {"nf4", "", -1},
	            {"nf4", "min_sqnr = 200\n", 200}};
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
		char text[256], body[200];
		snprintf(body, sizeof body, policy, rows[i].action, rows[i].line);
		snprintf(text, sizeof text, "%s%s", VERSION, body);
		ck_assert_double_eq(choice_for(text).min_sqnr, rows[i].least);
	}
	refuses(VERSION "[default]\nmin_sqnr = 201\n", "4: unusable value '201' of 'min_sqnr' in "
	                                               "[default]: expected a number from 0 to 200 "
	                                               "(policy not used)");
	refuses(VERSION "[default]\nmin_sqnr = 20 dB\n",
	        "4: unusable value '20 dB' of 'min_sqnr' in [default]: expected a number from 0 to "
	        "200 (policy not used)");
}
END_TEST

START_TEST(process_list_names_executables)
{
	struct qs_policy *policy = parse(VERSION "process = python*, !*gcc*\n");
	ck_assert(qs_policy_process_allowed(policy, "python3.12"));
	ck_assert(!qs_policy_process_allowed(policy, "bash"));
	ck_assert(!qs_policy_process_allowed(policy, "python-gcc"));
	qs_policy_free(policy);
	policy = parse(VERSION);
	ck_assert(qs_policy_process_allowed(policy, "anything"));
	qs_policy_free(policy);
}
END_TEST

/* Counting ----------------------------------------------------------------------------------- */

static const char two_rules[] = VERSION "[rule a]\nm = 1\naction = fp8\n"
                                        "[rule b]\nm = 2\naction = fp8\n";

START_TEST(hits_are_counted_per_rule_and_default)
{
	struct qs_policy *policy = parse(two_rules);
	struct qs_key one = key_of(1, 1, 1), other = key_of(3, 1, 1);
	struct qs_subject first = subject_of(&one), second = subject_of(&other);
	for (int i = 0; i < 3; i++)
		qs_policy_choose(policy, &first);
	qs_policy_choose(policy, &second);
	ck_assert_int_eq(qs_policy_rule_count(policy), 2);
	ck_assert_uint_eq(qs_policy_rule_hits(policy, 0), 3);
	ck_assert_uint_eq(qs_policy_rule_hits(policy, 1), 0);
	ck_assert_uint_eq(qs_policy_rule_hits(policy, -1), 1);
	ck_assert_str_eq(qs_policy_rule_name(policy, 0), "a");
	ck_assert_str_eq(qs_policy_rule_name(policy, 1), "b");
	ck_assert_str_eq(qs_policy_rule_name(policy, -1), "default");
	qs_policy_free(policy);
}
END_TEST

enum {
	THREADS = 4,
	CHOICES = 20000
};

static void *choose_many(void *policy)
{
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	for (int i = 0; i < CHOICES; i++)
		qs_policy_choose(policy, &subject);
	return NULL;
}

START_TEST(no_hit_is_lost_between_threads)
{
	struct qs_policy *policy = parse(two_rules);
	pthread_t threads[THREADS];
	for (int i = 0; i < THREADS; i++)
		ck_assert(!pthread_create(&threads[i], NULL, choose_many, policy));
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	ck_assert_uint_eq(qs_policy_rule_hits(policy, 0), THREADS * CHOICES);
	qs_policy_free(policy);
}
END_TEST

static void report_of(struct qs_policy *policy)
{
	listen_begin();
	qs_policy_report_unused(policy);
	listen_end();
}

START_TEST(rule_that_matched_nothing_is_reported_with_its_line)
{
	struct qs_policy *policy = parse(two_rules);
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	qs_policy_choose(policy, &subject);
	qs_policy_choose(policy, &subject);
	report_of(policy);
	ck_assert_str_eq(said, "qshim: t.ini:6: rule 'b' matched none of 2 products\n");
	qs_policy_free(policy);
}
END_TEST

START_TEST(unused_rules_are_no_news_before_the_first_product)
{
	struct qs_policy *policy = parse(two_rules);
	report_of(policy);
	ck_assert_str_eq(said, "");
	qs_policy_free(policy);
}
END_TEST

START_TEST(report_tells_what_a_rule_would_have_needed)
{
	struct qs_policy *policy = parse(VERSION "[rule head]\nlayer = *head*\naction = native\n"
	                                         "[rule few]\ntokens = ..64\naction = nf4\n");
	struct qs_key key = key_of(1, 1, 1);
	struct qs_subject subject = subject_of(&key);
	qs_policy_choose(policy, &subject);
	report_of(policy);
	ck_assert_str_eq(said, "qshim: t.ini:3: rule 'head' matched none of 1 products: no product "
	                       "had a layer name, as the program marks none\n"
	                       "qshim: t.ini:6: rule 'few' matched none of 1 products: the role of "
	                       "no product could be told\n");
	key.role = QS_ROLE_FWD;
	key.n = 1000;
	subject.layer = "mlp";
	qs_policy_choose(policy, &subject);
	report_of(policy);
	ck_assert_str_eq(said, "qshim: t.ini:3: rule 'head' matched none of 2 products\n"
	                       "qshim: t.ini:6: rule 'few' matched none of 2 products\n");
	qs_policy_free(policy);
}
END_TEST

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Once for each distinct product. The fastest of many batches, and a limit several times what it
 * takes: a busy machine does not fail the test, a rule compiled at each use does. */
START_TEST(fifty_rules_are_passed_in_microseconds)
{
	char text[16384];
	int length = snprintf(text, sizeof text, VERSION);
	for (int i = 0; i < 50; i++)
		length += snprintf(text + length, sizeof text - (size_t)length,
		                   "[rule r%d]\nm = 1024.., %%16\nrole = fwd\n"
		                   "layer = *.%d.*\naction = fp8\n",
		                   i, i);
	struct qs_policy *policy = parse(text);
	struct qs_key key = key_of(4096, 4096, 4096);
	struct qs_subject subject = subject_of(&key);
	double fastest = 1;
	key.role = QS_ROLE_FWD;
	subject.layer = "model.layers.99.mlp.up_proj";
	for (int batch = 0; batch < 200; batch++) {
		double begin = now();
		for (int i = 0; i < 100; i++)
			qs_policy_choose(policy, &subject);
		double time = (now() - begin) / 100;
		fastest = time < fastest ? time : fastest;
	}
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__ || !defined __OPTIMIZE__
	const double limit = 20e-6;
#else
	const double limit = 4e-6;
#endif
	ck_assert_double_lt(fastest, limit);
	ck_assert_uint_eq(qs_policy_rule_hits(policy, -1), 200 * 100);
	qs_policy_free(policy);
}
END_TEST

/* Mistakes ----------------------------------------------------------------------------------- */

START_TEST(unknown_key_names_line_section_and_nearest)
{
	refuses(VERSION "[rule mlp]\naction = fp8\nscael = row\n",
	        "5: unknown key 'scael' in [rule mlp]; did you mean 'scale'? (policy not used)");
	refuses(VERSION "[cache]\nmaxmib = 5\n",
	        "4: unknown key 'maxmib' in [cache]; did you mean 'max_mib'? (policy not used)");
	refuses(VERSION "\n\nfoo = 5\n", "5: unknown key 'foo' in [qshim] (policy not used)");
}
END_TEST

START_TEST(unknown_section_names_line_and_nearest)
{
	refuses(VERSION "[cahce]\nmax_mib = 1\n",
	        "3: unknown section [cahce]; did you mean 'cache'? (policy not used)");
	refuses(VERSION "[defualt]\n",
	        "3: unknown section [defualt]; did you mean 'default'? (policy not used)");
	refuses(VERSION "[something]\n", "3: unknown section [something] (policy not used)");
}
END_TEST

START_TEST(unusable_value_names_line_key_and_what_is_expected)
{
	refuses(VERSION "mode = onn\n", "3: unusable value 'onn' of 'mode' in [qshim]: expected "
	                                "on, shadow, observe or off; "
	                                "did you mean 'on'? (policy not used)");
	refuses(VERSION "[rule r]\naction = fb8\n",
	        "4: unusable value 'fb8' of 'action' in [rule r]: expected native, bf16, fp8, nf4 "
	        "or auto; did you mean 'fp8'? (policy not used)");
	refuses(VERSION "[rule r]\naction = fp8\nm = 4k\n",
	        "5: unusable value '4k' of 'm' in [rule r]: '4k' is ambiguous; write 4096 or 4e3 "
	        "in "
	        "full (policy not used)");
	refuses(VERSION "[rule r]\naction = fp8\nlayer = re:(a\n",
	        "5: unusable value 're:(a' of 'layer' in [rule r]: in 're:(a': ( without ) (policy "
	        "not used)");
	refuses(VERSION "[rule r]\naction = fp8\nrole = forward\n",
	        "5: unusable value 'forward' of 'role' in [rule r]: expected fwd, dgrad or wgrad "
	        "(policy not used)");
	refuses(VERSION "[rule r]\naction = fp8\napi = cublasLtMatMul\n",
	        "5: unusable value 'cublasLtMatMul' of 'api' in [rule r]: no intercepted function "
	        "is "
	        "called 'cublasLtMatMul'; did you mean 'cublasLtMatmul'? (policy not used)");
}
END_TEST

START_TEST(weight_may_be_negative_but_sizes_may_not)
{
	refuses(VERSION "[rule r]\naction = fp8\nm = -1\n",
	        "5: unusable value '-1' of 'm' in [rule r]: '-1' is no range; write a..b, a.., "
	        "..b, "
	        "a, %d or !a (policy not used)");
	qs_policy_free(parse(VERSION "[rule r]\naction = fp8\nweight = -1\n"));
}
END_TEST

START_TEST(empty_value_of_a_rule_is_a_mistake)
{
	refuses(VERSION "[rule r]\naction = fp8\nlayer =\n",
	        "5: 'layer' in [rule r] has no value (policy not used)");
	refuses(VERSION "[rule r]\naction = fp8\nlayer =;x\n",
	        "5: 'layer' in [rule r] has no value (policy not used)");
}
END_TEST

START_TEST(version_must_be_stated_and_known)
{
	refuses("", "1: no version; write 'version = 1' under [qshim] (policy not used)");
	refuses("[default]\naction = fp8\n",
	        "1: no version; write 'version = 1' under [qshim] (policy not used)");
	refuses("[qshim]\nversion = 2\n",
	        "2: version '2' is not known; this qshim reads version 1 (policy not used)");
}
END_TEST

START_TEST(rule_must_have_an_action)
{
	refuses(VERSION "[rule r]\nm = 1\n", "3: [rule r] has no action (policy not used)");
}
END_TEST

START_TEST(rule_must_have_a_proper_name_of_its_own)
{
	refuses(VERSION "[rule]\naction = fp8\n",
	        "3: a rule needs a name: [rule NAME] (policy not used)");
	refuses(VERSION "[rule a b]\naction = fp8\n", "3: the name 'a b' may have only letters, "
	                                              "digits, '_', '.' and '-' (policy not used)");
	refuses(VERSION "[rule default]\naction = fp8\n",
	        "3: 'default' cannot name a rule; write [default] (policy not used)");
	refuses(VERSION "[rule abcdefghijklmnopqrstuvwxyz123456]\naction = fp8\n",
	        "3: the name of a rule may have 31 characters, not 32 (policy not used)");
	refuses(VERSION "[rule r]\naction = fp8\n[rule r]\naction = fp8\n",
	        "5: rule 'r' stands on line 3 already (policy not used)");
	qs_policy_free(parse(VERSION "[rule abcdefghijklmnopqrstuvwxyz12345]\naction = fp8\n"));
}
END_TEST

START_TEST(single_valued_key_given_twice_is_a_mistake)
{
	refuses(VERSION "mode = on\nmode = off\n",
	        "4: 'mode' is given twice in [qshim] (policy not used)");
	refuses(VERSION "[rule r]\naction = fp8\naction = nf4\n",
	        "5: 'action' is given twice in [rule r] (policy not used)");
	refuses(VERSION "[default]\naction = fp8\n[default]\naction = nf4\n",
	        "6: 'action' is given twice in [default] (policy not used)");
}
END_TEST

START_TEST(default_takes_no_conditions)
{
	refuses(VERSION "[default]\naction = fp8\nm = 5\n",
	        "5: 'm' cannot stand in [default], which takes all that no rule matches (policy "
	        "not "
	        "used)");
}
END_TEST

START_TEST(line_that_is_neither_head_nor_key_is_shown)
{
	refuses(VERSION "\nhello world\n",
	        "4: 'hello world' is neither a [section] nor a 'key = value' (policy not used)");
	refuses(VERSION "[rule r\naction = fp8\n", "3: '[rule r' has no ']' (policy not used)");
	refuses(VERSION "[default] action = fp8\n",
	        "3: 'action = fp8' follows ']' on its line (policy not used)");
	refuses("mode = on\n" VERSION,
	        "1: 'mode' stands before the first [section] (policy not used)");
}
END_TEST

START_TEST(first_mistake_is_reported_and_the_others_counted)
{
	refuses(VERSION "nonsense\nmode = x\n[cahce]\n",
	        "3: 'nonsense' is neither a [section] nor a 'key = value' (policy not used; 2 "
	        "further "
	        "errors)");
	refuses(VERSION "mode = x\nnonsense\n",
	        "3: unusable value 'x' of 'mode' in [qshim]: expected on, shadow, observe or off "
	        "(policy not used; 1 further error)");
}
END_TEST

START_TEST(keys_of_an_unknown_section_are_not_reported_too)
{
	refuses(VERSION "[xyzzy]\nfoo = 1\nbar = 2\n",
	        "3: unknown section [xyzzy] (policy not used)");
}
END_TEST

START_TEST(line_that_is_too_long_tells_how_to_split)
{
	char text[512];
	int length = snprintf(text, sizeof text, VERSION "[rule r]\naction = fp8\nlayer = ");
	memset(text + length, 'x', 199 - 8);
	text[length + 199 - 8] = 0;
	refuses(text, "5: a line of 199 characters; at most 198 fit, so give the key again on the "
	              "next line with the rest of its list (policy not used)");
}
END_TEST

START_TEST(nul_byte_is_refused_with_its_line)
{
	const char text[] = VERSION "[default]\nact\0ion = fp8\n";
	ck_assert_ptr_null(parse_bytes(text, sizeof text - 1));
	ck_assert_str_eq(said, "qshim: t.ini:4: a NUL byte; a policy is plain text (policy not "
	                       "used)\n");
}
END_TEST

START_TEST(policy_of_more_than_a_mebibyte_is_refused)
{
	size_t size = (1 << 20) + 1;
	char *text = malloc(size);
	memset(text, '\n', size);
	memcpy(text, VERSION, strlen(VERSION));
	ck_assert_ptr_null(parse_bytes(text, size));
	ck_assert_str_eq(said,
	                 "qshim: t.ini:1: a policy of 1048577 bytes; at most 1048576 are read "
	                 "(policy not used)\n");
	struct qs_policy *policy = parse_bytes(text, size - 1);
	ck_assert_ptr_nonnull(policy);
	qs_policy_free(policy);
	free(text);
}
END_TEST

static size_t many_rules(char *text, size_t size, int count)
{
	size_t length = (size_t)snprintf(text, size, VERSION);
	for (int i = 0; i < count; i++)
		length += (size_t)snprintf(text + length, size - length,
		                           "[rule r%d]\naction = fp8\n", i);
	return length;
}

START_TEST(five_hundred_and_twelve_rules_are_the_limit)
{
	static char text[65536];
	many_rules(text, sizeof text, 512);
	struct qs_policy *policy = parse(text);
	ck_assert_int_eq(qs_policy_rule_count(policy), 512);
	qs_policy_free(policy);
	many_rules(text, sizeof text, 513);
	refuses(text, "1027: more than 512 rules (policy not used)");
}
END_TEST

START_TEST(control_characters_do_not_reach_the_terminal)
{
	refuses(VERSION "[\x1b[31mred]\n", "3: unknown section [?[31mred] (policy not used)");
}
END_TEST

/* Showing ------------------------------------------------------------------------------------ */

static const char full[] = VERSION
        "mode = shadow\nprocess = python*, !gcc*\n"
        "[cache]\nmax_mib = 512\n[numerics]\nmin_sqnr = 22.25\n[tune]\nmin_gain = 4.5%\n"
        "[engine]\ncublaslt = any\nearly = always\n[log]\nlevel = dispatch, cache\nsummary = 0\n"
        "[rule head]\nlayer = *lm_head*, re:^x(y|z)$\nlayer = !*a*\naction = bf16\n"
        "[rule mlp]\nm = %16\nn = 512..\nk = 1024.., %16\nmnk = 4e9..\nmin_dim = 16..\n"
        "tokens = 1..\nin = 2048..\nout = !7\nweight = -7..-1\nsteps = 100..\n"
        "role = fwd, dgrad\nop = TN\napi = cublasLt*\naction = fp8\nscale = row\n"
        "format = e4m3\nstrategy = performant\nmin_sqnr = 17.5\n"
        "[default]\naction = auto\nscale = tensor\n";

START_TEST(shown_policy_reads_back_as_the_same)
{
	struct qs_policy *policy = parse(full);
	char *first = strdup(shown(policy));
	struct qs_policy *again = parse(first);
	ck_assert_str_eq(shown(again), first);
	ck_assert_mem_eq(&policy->options, &again->options, sizeof policy->options);
	ck_assert_int_eq(qs_policy_rule_count(again), 2);
	for (int i = 0; i < 2; i++) {
		ck_assert_uint_eq(policy->rules[i].given, again->rules[i].given);
		ck_assert_int_eq(policy->rules[i].layer.count, again->rules[i].layer.count);
	}
	qs_policy_free(policy);
	qs_policy_free(again);
	free(first);
}
END_TEST

START_TEST(show_counts_what_does_not_fit_and_ends_with_a_nul)
{
	struct qs_policy *policy = parse(full);
	char small[64];
	size_t length = strlen(shown(policy));
	memset(small, 'x', sizeof small);
	ck_assert_uint_eq(qs_policy_show(policy, small, sizeof small), length);
	ck_assert_uint_eq(strlen(small), sizeof small - 1);
	ck_assert_uint_eq(qs_policy_show(policy, NULL, 0), length);
	qs_policy_free(policy);
}
END_TEST

START_TEST(show_states_every_option_with_its_help)
{
	struct qs_policy *policy = parse(VERSION);
	const char *text = shown(policy);
	const struct qs_option *option;
	for (int i = 0; (option = qs_option_at(i)); i++) {
		ck_assert_ptr_nonnull(strstr(text, option->key));
		ck_assert_ptr_nonnull(strstr(text, option->help));
	}
	qs_policy_free(policy);
}
END_TEST

START_TEST(show_explains_every_key_of_a_rule)
{
	struct qs_policy *policy = parse(VERSION);
	const char *text = shown(policy);
	for (int key = 0; key < QS_RULE_KEYS; key++) {
		char line[256];
		snprintf(line, sizeof line, " %-8s  %s\n", qs_rule_keys[key].name,
		         qs_rule_keys[key].help);
		ck_assert_ptr_nonnull(strstr(text, line));
	}
	qs_policy_free(policy);
}
END_TEST

START_TEST(longest_line_still_reads_back_after_it_was_shown)
{
	char text[512];
	int length = snprintf(text, sizeof text, VERSION "[rule r]\naction=fp8\nlayer=");
	memset(text + length, 'x', 198 - 6);
	text[length + 198 - 6] = 0;
	struct qs_policy *policy = parse(text);
	struct qs_policy *again = parse(shown(policy));
	ck_assert_str_eq(again->rules[0].layer.items[0].glob, policy->rules[0].layer.items[0].glob);
	qs_policy_free(policy);
	qs_policy_free(again);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("policy files");
	TCase *layout = tcase_create("layout of a file");
	TCase *matching = tcase_create("what a rule matches");
	TCase *outcome = tcase_create("what a rule wants");
	TCase *counting = tcase_create("counting");
	TCase *mistakes = tcase_create("mistakes");
	TCase *showing = tcase_create("showing");
	suite_add_tcase(suite, layout);
	tcase_add_test(layout, smallest_policy_decides_automatically);
	tcase_add_test(layout, options_of_every_section_are_read);
	tcase_add_test(layout, comments_blank_lines_and_carriage_returns_are_skipped);
	tcase_add_test(layout, indented_keys_are_keys_of_their_own);
	tcase_add_test(layout, key_given_again_adds_to_its_list);
	tcase_add_test(layout, last_line_needs_no_line_feed);
	tcase_add_test(layout, line_of_198_characters_is_read);
	tcase_add_test(layout, comment_may_have_any_length);
	suite_add_tcase(suite, matching);
	tcase_add_test(matching, dimensions_are_those_of_cublas);
	tcase_add_test(matching, derived_sizes_are_product_and_least_dimension);
	tcase_add_test(matching, product_of_huge_dimensions_saturates);
	tcase_add_test(matching, tokens_in_and_out_follow_the_role);
	tcase_add_test(matching, tokens_in_and_out_match_nothing_while_the_role_is_unknown);
	tcase_add_test(matching, role_matches_the_words_given);
	tcase_add_test(matching, role_matches_nothing_while_it_is_unknown);
	tcase_add_test(matching, op_names_a_first);
	tcase_add_test(matching, api_is_the_function_called);
	tcase_add_test(matching, layer_is_matched_by_any_pattern);
	tcase_add_test(matching, layer_matches_nothing_without_a_label);
	tcase_add_test(matching, weight_counts_from_either_end);
	tcase_add_test(matching, steps_match_nothing_while_the_step_is_unknown);
	tcase_add_test(matching, every_key_of_a_rule_must_match);
	tcase_add_test(matching, rule_without_conditions_matches_everything);
	suite_add_tcase(suite, outcome);
	tcase_add_test(outcome, first_matching_rule_wins);
	tcase_add_test(outcome, default_takes_what_no_rule_matches);
	tcase_add_test(outcome, every_action_scale_and_format_has_its_word);
	tcase_add_test(outcome, action_is_done_always_unless_performance_is_asked_for);
	tcase_add_test(outcome, rule_may_have_a_least_accuracy_of_its_own);
	tcase_add_test(outcome, process_list_names_executables);
	suite_add_tcase(suite, counting);
	tcase_add_test(counting, hits_are_counted_per_rule_and_default);
	tcase_add_test(counting, no_hit_is_lost_between_threads);
	tcase_add_test(counting, rule_that_matched_nothing_is_reported_with_its_line);
	tcase_add_test(counting, unused_rules_are_no_news_before_the_first_product);
	tcase_add_test(counting, report_tells_what_a_rule_would_have_needed);
	tcase_add_test(counting, fifty_rules_are_passed_in_microseconds);
	suite_add_tcase(suite, mistakes);
	tcase_add_test(mistakes, unknown_key_names_line_section_and_nearest);
	tcase_add_test(mistakes, unknown_section_names_line_and_nearest);
	tcase_add_test(mistakes, unusable_value_names_line_key_and_what_is_expected);
	tcase_add_test(mistakes, weight_may_be_negative_but_sizes_may_not);
	tcase_add_test(mistakes, empty_value_of_a_rule_is_a_mistake);
	tcase_add_test(mistakes, version_must_be_stated_and_known);
	tcase_add_test(mistakes, rule_must_have_an_action);
	tcase_add_test(mistakes, rule_must_have_a_proper_name_of_its_own);
	tcase_add_test(mistakes, single_valued_key_given_twice_is_a_mistake);
	tcase_add_test(mistakes, default_takes_no_conditions);
	tcase_add_test(mistakes, line_that_is_neither_head_nor_key_is_shown);
	tcase_add_test(mistakes, first_mistake_is_reported_and_the_others_counted);
	tcase_add_test(mistakes, keys_of_an_unknown_section_are_not_reported_too);
	tcase_add_test(mistakes, line_that_is_too_long_tells_how_to_split);
	tcase_add_test(mistakes, nul_byte_is_refused_with_its_line);
	tcase_add_test(mistakes, policy_of_more_than_a_mebibyte_is_refused);
	tcase_add_test(mistakes, five_hundred_and_twelve_rules_are_the_limit);
	tcase_add_test(mistakes, control_characters_do_not_reach_the_terminal);
	suite_add_tcase(suite, showing);
	tcase_add_test(showing, shown_policy_reads_back_as_the_same);
	tcase_add_test(showing, show_counts_what_does_not_fit_and_ends_with_a_nul);
	tcase_add_test(showing, show_states_every_option_with_its_help);
	tcase_add_test(showing, show_explains_every_key_of_a_rule);
	tcase_add_test(showing, longest_line_still_reads_back_after_it_was_shown);
	return qs_suite_main(suite);
}
