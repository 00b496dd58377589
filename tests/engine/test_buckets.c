/* When a product is measured that the policy leaves to measurement, and for which others that
 * decides: at the third use of its bucket of token counts, and for all of that. */
#define _GNU_SOURCE
#include "tuning.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "softcuda/softcuda.h"

#define M       4096
#define K       640
#define MOST    4931 /* tokens; with 4096 in the bucket from 3946 on */
#define THREADS 4

/* A linear layer, forward; large enough for the size model to want fp8. */
struct layer {
	struct session session;
	void *a, *b, *d;
};

static void open_layer(struct layer *layer)
{
	session_open(&layer->session);
	must(cudaMalloc(&layer->a, 2ul * M * K), "A");
	must(cudaMalloc(&layer->b, 2ul * MOST * K), "B");
	must(cudaMalloc(&layer->d, 2ul * MOST * M), "D");
}

static void multiply(const struct layer *layer, int tokens)
{
	const float one = 1.0f, zero = 0.0f;
	must((int)cublasGemmEx(layer->session.blas, CUBLAS_OP_T, CUBLAS_OP_N, M, tokens, K, &one,
	                       layer->a, CUDA_R_16BF, K, layer->b, CUDA_R_16BF, K, &zero, layer->d,
	                       CUDA_R_16BF, M, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
	     "product");
}

static void capture(const struct layer *layer, int tokens)
{
	cudaGraph_t graph;
	must(cudaStreamBeginCapture(layer->session.stream, cudaStreamCaptureModeGlobal), "begin");
	multiply(layer, tokens);
	must(cudaStreamEndCapture(layer->session.stream, &graph), "end");
	must(cudaGraphDestroy(graph), "destroy");
}

/* `tokens COUNT...`: one product a COUNT; "c4096" captures it, "x4096" makes it while cuBLASLt has
 * no algorithm, "s" before any of them makes native faster from there on. */
static int tokens(int argc, char **argv)
{
	struct layer layer;
	open_layer(&layer);
	for (int i = 0; i < argc; i++) {
		const char *what = argv[i];
		if (*what == 's') {
			softcuda_set("product_us", 100);
			what++;
		}
		const struct work before = work_done();
		softcuda_set("heuristics_empty", *what == 'x');
		if (*what == 'c')
			capture(&layer, atoi(what + 1));
		else
			multiply(&layer, atoi(*what == 'x' ? what + 1 : what));
		must(cudaDeviceSynchronize(), "synchronize");
		print_work("call", i, &before);
	}
	return 0;
}

struct job {
	struct layer layer;
	pthread_barrier_t *together;
};

static void *multiply_together(void *data)
{
	struct job *job = data;
	must(cudaSetDevice(0), "device");
	pthread_barrier_wait(job->together);
	multiply(&job->layer, 4096);
	return NULL;
}

/* The first uses of a product, by threads at once. */
static int threads(int argc, char **argv)
{
	struct job job[THREADS];
	pthread_t thread[THREADS];
	pthread_barrier_t together;
	(void)argc, (void)argv;
	must(pthread_barrier_init(&together, NULL, THREADS), "barrier");
	for (int i = 0; i < THREADS; i++) {
		open_layer(&job[i].layer);
		job[i].together = &together;
	}
	multiply(&job[0].layer, 8); /* the shim has started */
	const struct work before = work_done();
	for (int i = 0; i < THREADS; i++)
		must(pthread_create(&thread[i], NULL, multiply_together, &job[i]), "thread");
	for (int i = 0; i < THREADS; i++)
		must(pthread_join(thread[i], NULL), "join");
	must(cudaDeviceSynchronize(), "synchronize");
	print_work("call", 0, &before);
	return 0;
}

static void put_policy(const char *scale)
{
	FILE *file = fopen(getenv("QSHIM_POLICY"), "we");
	must(!file, "policy file");
	fprintf(file, "[qshim]\nversion = 1\n[tune]\nfile =\n[default]\naction = auto\n%s", scale);
	must(fclose(file), "policy file");
}

/* `edited EDITS`: the policy is edited after the first use, and then back; small products wait
 * until it is in effect. */
static int edited(int argc, char **argv)
{
	struct layer layer;
	open_layer(&layer);
	put_policy("");
	multiply(&layer, 4096);
	for (int edit = 0; argc == 1 && edit < atoi(argv[0]); edit++) {
		put_policy(edit ? "" : "scale = tensor\n");
		for (int i = 0; i < 400; i++) {
			multiply(&layer, 8);
			usleep(10000);
		}
	}
	return 0;
}

const struct scene scenes[] = {
        {"tokens", tokens}, {"threads", threads}, {"edited", edited}, {NULL, NULL}};

/* ---- tests ------------------------------------------------------------------------------------
 */

static const struct times fp8_faster = {.product = 1000, .fp8 = 500, .second = 400, .kernel = 100};
static const struct times fp8_slower = {.product = 600, .fp8 = 500, .second = 400, .kernel = 100};

#define QUIET "log.quiet=1;"

static char directory[256], path[300], text[65536];

static void set_up(void)
{
	make_directory(directory);
	snprintf(path, sizeof path, "%s/tuned.ini", directory);
}

static void tear_down(void)
{
	remove_directory(directory);
}

/* The products of one process, the counts separated by blanks. */
static void run(const char *policy, struct times times, const char *counts)
{
	char list[256], *word[10] = {NULL};
	snprintf(list, sizeof list, "%s", counts);
	int found = 0;
	for (char *at = strtok(list, " "); at; at = strtok(NULL, " "))
		word[found++] = at;
	run_scene(&outcome, SHIMMED, with(policy, times, IDLE), "tokens", word[0], word[1], word[2],
	          word[3], word[4], word[5], word[6], word[7], word[8], NULL);
	ck_assert_msg(outcome.exit == 0, "exit %d: %.2000s", outcome.exit, outcome.err);
}

/* One letter a call: n = native, t = timed, s = the second algorithm, f = the first. */
static void ck_calls(const char *expected)
{
	char name[16];
	for (int i = 0; expected[i]; i++) {
		snprintf(name, sizeof name, "call%d", i);
		if (expected[i] == 't')
			ck_timed(name);
		else
			ck_products(name, expected[i] == 'n', expected[i] == 'f',
			            expected[i] == 's');
	}
}

/* The last decision of the key with this text in it. */
static const struct decision *decision_of(const char *part)
{
	const struct decision *found = NULL;
	for (int i = 0; i < outcome.decisions; i++)
		if (strstr(outcome.decision[i].key, part))
			found = &outcome.decision[i];
	ck_assert_msg(found != NULL, "no decision of %s", part);
	return found;
}

static void ck_decided(const char *part, const char *action, const char *reason, const char *detail)
{
	const struct decision *d = decision_of(part);
	ck_assert_msg(!strcmp(d->action, action) && !strcmp(d->reason, reason) &&
	                      !strcmp(d->detail, detail),
	              "%s: %s because %s: %s", part, d->action, d->reason, d->detail);
}

static void ck_counter(const char *part, enum qs_reason reason, uint64_t calls, uint64_t replaced)
{
	const struct qs_counter *found = NULL;
	for (int i = 0; i < outcome.counters; i++)
		if (strstr(outcome.counter[i].key, part))
			found = &outcome.counter[i];
	ck_assert_msg(found != NULL, "no counter of %s", part);
	ck_assert_int_eq(found->reason, reason);
	ck_assert_uint_eq(found->calls, calls);
	ck_assert_uint_eq(found->replaced, replaced);
	ck_assert_uint_eq(found->late, 0);
}

/* ---- the third use --------------------------------------------------------------------------- */

START_TEST(a_product_is_measured_at_its_third_use)
{
	run(AUTO, fp8_faster, "4096 4096 4096 4096");
	ck_calls("nnts");
	ck_decision("fp8", "auto");
	ck_assert_int_eq(count("call0", "heuristics"), 0);
	ck_assert_int_eq(count("call1", "heuristics"), 0);
	ck_counter("n=4096", QS_REASON_AUTO, 4, 2);
	run(AUTO, fp8_slower, "4096 4096 4096 4096");
	ck_calls("nntn");
	ck_decision("native", "not-faster");
}
END_TEST

START_TEST(a_product_that_is_used_less_says_so_at_the_end)
{
	run(AUTO, fp8_faster, "4096 4096");
	ck_calls("nn");
	ck_decision("native", "untuned");
	ck_assert_str_eq(only_decision(&outcome)->detail, "fewer than three uses");
	ck_counter("n=4096", QS_REASON_UNTUNED, 2, 0);
}
END_TEST

START_TEST(captured_uses_do_not_count)
{
	run(AUTO, fp8_faster, "c4096 c4096 4096 c4096 4096 4096 4096");
	ck_calls("nnnnnts");
	ck_assert_int_eq(decisions_with(&outcome, "capture-cold"), 1);
	ck_assert_int_eq(outcome.decisions, 2);
}
END_TEST

/* Without a budget there is nothing to wait for, from the start or once it is spent. */
START_TEST(the_size_model_does_not_wait)
{
	run(QUIET "tune.budget_ms=0;default.action=auto", fp8_slower, "4096");
	ck_decision("fp8", "auto");
	run(QUIET "tune.budget_ms=1;default.action=auto", fp8_slower, "3900 4096 4096 4096 3900");
	ck_calls("nnnt");
	ck_decided("n=3900", "fp8", "auto", "");
	ck_counter("n=3900", QS_REASON_AUTO, 2, 1);
}
END_TEST

START_TEST(a_device_without_fp8_is_not_waited_for)
{
	const char *env[] = {"QSHIM_SET=" AUTO, "SOFTCUDA_CAPABILITY=80", IDLE, NULL};
	run_scene(&outcome, SHIMMED, env, "tokens", "4096", NULL);
	ck_decision("native", "arch");
}
END_TEST

START_TEST(a_rule_that_names_its_action_does_not_wait)
{
	const char *const rule[] = {"default.action=fp8",
	                            "default.action=fp8;default.strategy=performant",
	                            "default.action=bf16"};
	char policy[160];
	snprintf(policy, sizeof policy, ENOUGH "%s", rule[_i]);
	run(policy, fp8_faster, "4096 4096");
	ck_calls("ts");
}
END_TEST

START_TEST(one_of_several_threads_measures_at_the_third_use)
{
	run_scene(&outcome, SHIMMED, with(AUTO, fp8_faster, IDLE), "threads", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	ck_assert_int_eq(count("call0", "heuristics"), 4); /* of fp8 and of bf16 */
	ck_assert_uint_eq(total_replaced(&outcome), THREADS - 2);
	ck_assert_int_eq(decisions_for("fp8"), 1);
}
END_TEST

START_TEST(an_edited_policy_leaves_it_undecided)
{
	char variable[320];
	snprintf(variable, sizeof variable, "QSHIM_POLICY=%s/policy.ini", directory);
	const char *const env[] = {variable, "QSHIM_SET=tune.budget_ms=60000", IDLE, NULL};
	run_scene(&outcome, SHIMMED, env, "edited", _i ? "2" : "1", NULL);
	ck_assert_int_eq(outcome.exit, 0);
	/* as the edited policy has it nobody asked */
	ck_counter("n=4096", _i ? QS_REASON_UNTUNED : QS_REASON_AUTO, 1, 0);
}
END_TEST

/* ---- buckets --------------------------------------------------------------------------------- */

START_TEST(uses_of_a_bucket_count_together)
{
	run(AUTO, fp8_faster, "4000 4096 4200 4000");
	ck_calls("nnts");
	ck_assert_int_eq(outcome.decisions, 3);
	ck_decided("n=4200", "fp8", "auto", "fp8 400.0 + 200.0 us, native 1000.0 us");
	ck_decided("n=4000", "fp8", "auto",
	           "fp8 400.0 + 200.0 us, native 1000.0 us, at 4200 tokens");
	ck_decided("n=4096", "native", "untuned", "fewer than three uses");
	ck_counter("n=4096", QS_REASON_UNTUNED, 1, 0);
	ck_counter("n=4000", QS_REASON_AUTO, 2, 1);
}
END_TEST

START_TEST(uses_of_another_bucket_do_not)
{
	run(AUTO, fp8_faster, "4096 4096 3945 4096 3945 3945");
	ck_calls("nnntnt");
}
END_TEST

/* Whatever is faster by then. */
START_TEST(other_token_counts_do_not_turn_a_bucket)
{
	run(AUTO, fp8_faster, "4096 4096 4096 s4000 4000 4096");
	ck_calls("nntsss");
	ck_assert_int_eq(decisions_for("fp8"), 2);
	run(AUTO, fp8_slower, "4096 4096 4096 3946 4931 4096");
	ck_calls("nntnnn");
	ck_assert_int_eq(decisions_with(&outcome, "not-faster"), 3);
	ck_decided("n=3946", "native", "not-faster",
	           "fp8 400.0 + 200.0 us, native 600.0 us, at 4096 tokens");
}
END_TEST

START_TEST(what_has_no_algorithm_in_a_bucket_passes)
{
	run(AUTO, fp8_faster, "4096 4096 4096 x4000 4000 4200");
	ck_calls("nntnns");
	ck_assert_str_eq(decision_of("n=4000")->reason, "algo-none");
	ck_assert_str_eq(decision_of("n=4200")->action, "fp8");
}
END_TEST

/* A rule's own first use is what is measured, and its bucket the next one of. */
START_TEST(buckets_hold_for_rules_too)
{
	run(ENOUGH "default.action=fp8", fp8_faster, "4096 4000 4000");
	ck_calls("tss");
}
END_TEST

/* ---- the file -------------------------------------------------------------------------------- */

static char *content(void)
{
	FILE *file = fopen(path, "re");
	const size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
	text[length] = '\0';
	if (file)
		fclose(file);
	return text;
}

static void write_file(const char *all)
{
	FILE *file = fopen(path, "we");
	ck_assert_ptr_nonnull(file);
	fputs(all, file);
	ck_assert_int_eq(fclose(file), 0);
}

static void run_kept(struct times times, const char *counts)
{
	char policy[512];
	snprintf(policy, sizeof policy,
	         QUIET "tune.budget_ms=60000;cache.validity=adjacent;default.action=auto;"
	               "tune.file=%s",
	         path);
	run(policy, times, counts);
	ck_assert_str_eq(outcome.err, "");
}

#define KEY(tokens) "TN m=4096 n=" tokens " k=640 bf16 fwd"

START_TEST(rows_are_those_of_buckets)
{
	run_kept(fp8_faster, "4096 4096 4096");
	ck_assert_ptr_nonnull(strstr(content(), "\nkey = " KEY("3946..4931") "\n"));
	ck_assert_ptr_nonnull(strstr(text, "\ntokens = 4096\n"));
	const size_t length = strlen(text);
	run_kept(fp8_slower, "4100 4100 4096");
	ck_calls("sss");
	ck_decided("n=4100", "fp8", "auto",
	           "fp8 400.0 + 200.0 us, native 1000.0 us, at 4096 tokens");
	ck_decided("n=4096", "fp8", "auto", "fp8 400.0 + 200.0 us, native 1000.0 us");
	ck_assert_uint_eq(strlen(content()), length);
}
END_TEST

/* None that cuBLASLt offers, in every row. */
static void spoil_algorithms(void)
{
	char *at = strstr(content(), "algorithm = ");
	for (; at; at = strstr(at + 1, "algorithm = "))
		memcpy(at + strlen("algorithm = "), "0123456789abcdef", 16);
	write_file(text);
}

/* What does not fit another count is not timed again; the count itself is. */
START_TEST(an_algorithm_that_another_count_lacks_is_replaced_by_the_first)
{
	run_kept(fp8_faster, "4096 4096 4096");
	spoil_algorithms();
	run_kept(fp8_faster, "4000 4000");
	ck_calls("ff");
	ck_assert_int_eq(decisions_for("fp8"), 1);
	run_kept(fp8_faster, "4096 4000");
	ck_calls("ts");
}
END_TEST

static void pin(const char *key, const char *action, const char *more)
{
	static char all[2 * sizeof text];
	snprintf(all, sizeof all,
	         "%s\n[product]\nkey = %s\nmeasured = fp8\npinned = yes\naction = %s\n%s",
	         content(), key, action, more);
	write_file(all);
}

START_TEST(a_pin_of_one_count_goes_before_its_bucket)
{
	run_kept(fp8_faster, "4096 4096 4096");
	pin(KEY("4000"), "native", "");
	run_kept(fp8_faster, "4000 4096");
	ck_calls("ns");
	ck_decided("n=4000", "native", "tuned", "pinned in the tuned file");
	pin(KEY("3946..4931"), "fp8", "");
	run_kept(fp8_faster, "4000 4096");
	ck_calls("n");
	ck_decided("n=4096", "fp8", "auto", "pinned in the tuned file");
}
END_TEST

/* Another text in the place of one, wherever it is in the file. */
static void replace_all(const char *old, const char *new)
{
	static char all[2 * sizeof text];
	for (char *from = content(), *to = all, *at; *from; from = at) {
		at = strstr(from, old);
		const size_t length = at ? (size_t)(at - from) : strlen(from);
		memcpy(to, from, length);
		to += length;
		to = stpcpy(to, at ? new : "");
		at = at ? at + strlen(old) : from + length;
	}
	write_file(all);
}

/* Neither is pinned. */
START_TEST(a_row_of_one_count_goes_before_its_bucket)
{
	static char before[sizeof text], all[2 * sizeof text];
	run_kept(fp8_faster, "4096 4096 4096");
	snprintf(before, sizeof before, "%s", content());
	replace_all("3946..4931", "4000");
	replace_all("native_us = 1000", "native_us = 500");
	snprintf(all, sizeof all, "%s%s", content(), before);
	write_file(all);
	run_kept(fp8_faster, "4000 4096");
	ck_calls("ns");
	ck_decided("n=4000", "native", "not-faster",
	           "fp8 400.0 + 200.0 us, native 500.0 us, at 4096 tokens");
}
END_TEST

/* It is no other count's, so it is not only the algorithm that is in doubt. */
START_TEST(a_row_of_one_count_without_its_algorithm_is_measured_anew)
{
	run_kept(fp8_faster, "4096 4096 4096");
	replace_all("3946..4931", "4096");
	replace_all("tokens = 4096\n", "");
	spoil_algorithms();
	run_kept(fp8_faster, "4096 4096");
	ck_calls("ts");
}
END_TEST

START_TEST(a_pinned_range_goes_before_what_was_measured_of_one_count)
{
	run_kept(fp8_faster, "4096 4096 4096");
	replace_all("3946..4931", "4096"); /* as earlier versions wrote them */
	run_kept(fp8_slower, "4096 4000");
	ck_calls("sn");
	pin(KEY("3946..4931"), "native", "");
	run_kept(fp8_faster, "4096 4000");
	ck_calls("nn");
	ck_assert_int_eq(decisions_with(&outcome, "tuned"), 2);
}
END_TEST

static void add_uses(TCase *tcase)
{
	tcase_add_test(tcase, a_product_is_measured_at_its_third_use);
	tcase_add_test(tcase, a_product_that_is_used_less_says_so_at_the_end);
	tcase_add_test(tcase, captured_uses_do_not_count);
	tcase_add_test(tcase, the_size_model_does_not_wait);
	tcase_add_test(tcase, a_device_without_fp8_is_not_waited_for);
	tcase_add_loop_test(tcase, a_rule_that_names_its_action_does_not_wait, 0, 3);
	tcase_add_test(tcase, one_of_several_threads_measures_at_the_third_use);
	tcase_add_loop_test(tcase, an_edited_policy_leaves_it_undecided, 0, 2);
}

static void add_buckets(TCase *tcase)
{
	tcase_add_test(tcase, uses_of_a_bucket_count_together);
	tcase_add_test(tcase, uses_of_another_bucket_do_not);
	tcase_add_test(tcase, other_token_counts_do_not_turn_a_bucket);
	tcase_add_test(tcase, what_has_no_algorithm_in_a_bucket_passes);
	tcase_add_test(tcase, buckets_hold_for_rules_too);
	tcase_add_test(tcase, rows_are_those_of_buckets);
	tcase_add_test(tcase, an_algorithm_that_another_count_lacks_is_replaced_by_the_first);
	tcase_add_test(tcase, a_pin_of_one_count_goes_before_its_bucket);
	tcase_add_test(tcase, a_row_of_one_count_goes_before_its_bucket);
	tcase_add_test(tcase, a_row_of_one_count_without_its_algorithm_is_measured_anew);
	tcase_add_test(tcase, a_pinned_range_goes_before_what_was_measured_of_one_count);
}

int main(int argc, char **argv)
{
	Suite *suite = suite_create("buckets");
	TCase *tcase = tcase_create("buckets");
	tcase_add_checked_fixture(tcase, set_up, tear_down);
	tcase_set_timeout(tcase, 120);
	suite_add_tcase(suite, tcase);
	add_uses(tcase);
	add_buckets(tcase);
	return engine_main(argc, argv, suite);
}
