/* Shadow mode: the program gets its own product, bit for bit, and what lower precision would have
 * done to it is in the decision log and the summary. */
#define _GNU_SOURCE
#include "tuning.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "softcuda/softcuda.h"

/* ---- scenes -----------------------------------------------------------------------------------
 */

static const struct product many = {.ta = CUBLAS_OP_T, .m = 64, .n = 80, .k = 128};

/* For one call: products of each kind, waits, and the hash of D. */
static void watch(struct made *made, const struct session *session, int number)
{
	const struct work before = work_done();
	const long fp8 = softcuda_get("products_fp8"), bf16 = softcuda_get("products_bf16");
	product_poison(made);
	const long syncs = softcuda_get("syncs");
	call(made, session);
	printf("syncs%d %ld\n", number, softcuda_get("syncs") - syncs);
	printf("calls%d %ld\n", number, work_done().calls - before.calls);
	printf("bf16%d %ld\n", number, softcuda_get("products_bf16") - bf16);
	printf("fp8%d %ld\n", number, softcuda_get("products_fp8") - fp8);
	judge(made);
	printf("hash%d %llu\n", number, (unsigned long long)product_hash(made) >> 12);
}

/* `uses ROW COUNT [KNOB VALUE]`: one product again and again, the device waited for in between; the
 * knob is turned once the program has all it needs. ROW -1 is the one of many tokens. */
static int uses(int argc, char **argv)
{
	struct session session;
	struct made made;
	const int row = atoi(argv[0]);
	session_open(&session);
	product_make(&made, row < 0 ? &many : &rows[row], 1);
	if (argc == 4)
		softcuda_set(argv[2], atol(argv[3]));
	for (int i = 0; i < atoi(argv[1]); i++)
		watch(&made, &session, i);
	return verdict();
}

/* The same as a gradient. */
static int gradient(int argc, char **argv)
{
	pthread_setname_np(pthread_self(), "pt_autograd_0");
	return uses(argc, argv);
}

/* `spike ROW`: one element of B is so large that with its scale all others are 0. */
static int spike(int argc, char **argv)
{
	struct session session;
	struct made made;
	struct product p = rows[atoi(argv[0])];
	(void)argc;
	p.plant = PLANT_SPIKE;
	session_open(&session);
	product_make(&made, &p, 1);
	for (int i = 0; i < 2; i++)
		call(&made, &session);
	must(cudaDeviceSynchronize(), "synchronise");
	return 0;
}

/* `once RESET`: nothing follows that could look at what was measured; with RESET the memory it is
 * in is gone. */
static int once(int argc, char **argv)
{
	struct session session;
	struct made made;
	(void)argc;
	session_open(&session);
	product_make(&made, &rows[0], 1);
	whole_call(&made, &session);
	if (atoi(argv[0]))
		must(cudaDeviceReset(), "reset");
	return verdict();
}

/* Two layers, whose products differ in nothing. */
static int layers(int argc, char **argv)
{
	void (*push)(const char *) = (void (*)(const char *))dlsym(RTLD_DEFAULT, "qs_label_push");
	void (*pop)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "qs_label_pop");
	struct session session;
	struct made made;
	(void)argc, (void)argv;
	session_open(&session);
	product_make(&made, &rows[0], 1);
	for (int i = 0; i < 4; i++) {
		push(i % 2 ? "model.layers.1.mlp" : "model.layers.0.mlp");
		whole_call(&made, &session);
		pop();
	}
	return verdict();
}

/* For cudaLaunchHostFunc. */
static void nothing(void *data)
{
	(void)data;
}

/* The device takes a rest, and the program goes on. */
static int held(int argc, char **argv)
{
	struct session session;
	struct made made, other;
	(void)argc, (void)argv;
	session_open(&session);
	product_make(&made, &rows[0], 1);
	product_make(&other, &rows[1], 1);
	whole_call(&other, &session); /* sets up the context */
	product_poison(&made);
	softcuda_set("hold_host", 1);
	must(cudaLaunchHostFunc(session.stream, nothing, NULL), "host function");
	const long syncs = softcuda_get("syncs"), fp8 = softcuda_get("products_fp8");
	for (int i = 0; i < 8; i++)
		call(&made, &session);
	printf("syncs %ld\n", softcuda_get("syncs") - syncs);
	printf("fp8 %ld\n", softcuda_get("products_fp8") - fp8);
	softcuda_set("hold_host", 0);
	judge(&made);
	call(&made, &session);
	return verdict();
}

/* `streams`: a product on each, one after the other, without a wait. */
static int streams(int argc, char **argv)
{
	struct session session;
	struct made made[3];
	cudaStream_t stream[3];
	(void)argc, (void)argv;
	session_open(&session);
	for (int i = 0; i < 3; i++) {
		product_make(&made[i], &rows[i], 1);
		product_poison(&made[i]);
		must(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking), "stream");
	}
	for (int i = 0; i < 3; i++) {
		session_use(&session, stream[i]);
		call(&made[i], &session);
	}
	for (int i = 0; i < 3; i++)
		judge(&made[i]);
	for (int i = 0; i < 3; i++) {
		session_use(&session, stream[i]);
		whole_call(&made[i], &session);
	}
	return verdict();
}

/* `captured WARM`: captured, after WARM eager calls, and replayed. */
static int captured(int argc, char **argv)
{
	struct session session;
	struct made made;
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	size_t nodes = 0;
	(void)argc;
	session_open(&session);
	product_make(&made, &rows[0], 1);
	for (int i = 0; i < atoi(argv[0]); i++)
		whole_call(&made, &session);
	product_poison(&made);
	const long products = softcuda_get("products");
	must(cudaStreamBeginCapture(session.stream, cudaStreamCaptureModeGlobal), "begin");
	call(&made, &session);
	must(cudaStreamEndCapture(session.stream, &graph), "end");
	printf("products %ld\n", softcuda_get("products") - products);
	must(cudaGraphGetNodes(graph, NULL, &nodes), "nodes");
	printf("nodes %zu\n", nodes);
	must(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
	must(cudaGraphLaunch(executable, session.stream), "launch");
	judge(&made);
	return verdict();
}

static void put_policy(const char *mode)
{
	FILE *file = fopen(getenv("QSHIM_POLICY"), "we");
	must(!file, "policy file");
	fprintf(file,
	        "[qshim]\nversion = 1\nmode = %s\n[numerics]\ncheck_every = 1\n[tune]\n"
	        "budget_ms = 0\nfile =\n[default]\naction = fp8\n",
	        mode);
	must(fclose(file), "policy file");
}

/* `edited FIRST SECOND`: modes. Calls until the fp8 products say that the second holds: with `on`
 * the program's own is not made in some call. */
static int edited(int argc, char **argv)
{
	struct session session;
	struct made made;
	(void)argc;
	session_open(&session);
	product_make(&made, &rows[0], 1);
	for (int i = 0; i < 2; i++) {
		put_policy(argv[i]);
		for (int j = 0; j < (i ? 400 : 4); j++) {
			whole_call(&made, &session);
			nanosleep(&(struct timespec){.tv_nsec = 10000000 * (long)i}, NULL);
		}
	}
	return verdict();
}

const struct scene scenes[] = {
        {"uses", uses},         {"gradient", gradient}, {"once", once},       {"layers", layers},
        {"spike", spike},       {"held", held},         {"streams", streams}, {"edited", edited},
        {"captured", captured}, {"large", scene_large}, {NULL, NULL},
};

/* ---- tests ------------------------------------------------------------------------------------
 */

#define SHADOW "qshim.mode=shadow;tune.file=;log.quiet=1;"
#define FORCE  "default.action=fp8;"
#define NF4    "default.action=nf4;"

static const struct times fast = {.product = 1000, .fp8 = 500, .second = 400};

static void run(const char *policy, const char *more, const char *row, const char *count,
                const char *knob, const char *value)
{
	run_scene(&outcome, SHIMMED, with(policy, fast, more), "uses", row, count, knob, value,
	          NULL);
	check_unharmed(row);
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_assert_uint_eq(total_late(&outcome), 0);
}

static long of(const char *what, int number)
{
	char name[32];
	snprintf(name, sizeof name, "%s%d", what, number);
	return (long)printed(&outcome, name);
}

/* The calls in which more than the program's own product was made, as a string of x and -. */
static const char *measured(int calls)
{
	static char text[64];
	for (int i = 0; i < calls; i++)
		text[i] = of("bf16", i) > 1 || of("fp8", i) ? 'x' : '-';
	text[calls] = '\0';
	return text;
}

/* The last line of a candidate; NULL if there is none. */
static const struct shadow *last_of(const char *candidate)
{
	for (int i = outcome.shadows; i-- > 0;)
		if (!strcmp(outcome.shadow[i].candidate, candidate))
			return &outcome.shadow[i];
	return NULL;
}

static const struct shadow *need(const char *candidate)
{
	const struct shadow *line = last_of(candidate);
	ck_assert_msg(line != NULL, "no line of %s", candidate);
	return line;
}

static void ck_detail(const char *detail)
{
	ck_decision("native", "shadow");
	ck_assert_str_eq(only_decision(&outcome)->detail, detail);
}

START_TEST(the_program_has_its_own_bits)
{
	char row[8], hash[16];
	snprintf(row, sizeof row, "%d", _i);
	run_scene(&outcome, BARE, NULL, "uses", row, "1", NULL);
	const double bare = printed(&outcome, "hash0");
	run(SHADOW FORCE, NULL, row, "5", NULL, NULL);
	for (int i = 0; i < 5; i++) {
		snprintf(hash, sizeof hash, "hash%d", i);
		ck_assert_msg(printed(&outcome, hash) == bare, "call %d", i);
		/* Setting up the context waits, for a stream of its own. */
		ck_assert_int_eq(of("syncs", i), i == 0);
	}
	ck_assert_str_eq(outcome.err, "");
	ck_detail("fp8 tensor");
	ck_assert_int_eq(only_counter(&outcome)->reason, QS_REASON_SHADOW);
	const struct shadow *line = need("fp8 tensor");
	ck_assert_int_eq(line->checks, 3);
	ck_assert_str_eq(line->key, only_decision(&outcome)->key);
	ck_assert(line->sqnr > LEAST_DB && line->sqnr < 60 && line->least == line->sqnr);
	ck_assert(line->error > 0 && line->error < 0.1 && line->amax > 1);
}
END_TEST

START_TEST(the_first_uses_and_some_later_ones_are_measured)
{
	run(SHADOW FORCE "numerics.check_every=3", NULL, "0", "10", NULL, NULL);
	ck_assert_str_eq(measured(10), "xxx--x--x-");
	for (int i = 0; i < 10; i++)
		ck_assert_int_eq(of("calls", i), measured(10)[i] == 'x' ? 3 : 1);
	ck_assert_int_eq(need("fp8 tensor")->checks, 5);
	run(SHADOW FORCE "numerics.check_every=1", NULL, "0", "6", NULL, NULL);
	ck_assert_str_eq(measured(6), "xxxxxx");
	run(SHADOW FORCE "numerics.check_every=0", NULL, "0", "6", NULL, NULL);
	ck_assert_str_eq(measured(6), "xxx---");
}
END_TEST

/* By the same numbers as what takes the product's place, when it does. */
START_TEST(the_error_is_that_of_what_would_have_been)
{
	static const char *const policies[] = {FORCE, FORCE "default.scale=row;", NF4, NF4};
	static const char *const shapes[] = {"0", "0", "0", "-1"};
	static const char *const candidates[] = {"fp8 tensor", "fp8 row", "nf4", "nf4"};
	char policy[256], wanted[64];
	snprintf(policy, sizeof policy, SHADOW "cache.validity=adjacent;%s", policies[_i]);
	run(policy, NULL, shapes[_i], "4", NULL, NULL);
	ck_assert_int_eq(outcome.shadows, 3);
	snprintf(wanted, sizeof wanted, ": %.1f dB", need(candidates[_i])->sqnr);
	snprintf(policy, sizeof policy,
	         "tune.budget_ms=0;tune.file=;log.quiet=1;cache.validity=adjacent;"
	         "log.level=numerics;numerics.check_every=1;%s",
	         policies[_i]);
	run_scene(&outcome, SHIMMED, with(policy, fast, NULL), "uses", shapes[_i], "4", NULL);
	ck_assert_uint_eq(total_replaced(&outcome), 4);
	ck_assert_msg(strstr(outcome.err, wanted) != NULL, "%s: %s", wanted, outcome.err);
}
END_TEST

/* Large enough for `auto`: the emulation only says what it would have computed, 16 % off, or 4 % by
 * rows. */
#define COARSE "SOFTCUDA_FP8_ERROR=16"

START_TEST(auto_is_measured_in_both_scalings)
{
	run_scene(&outcome, SHIMMED, with(SHADOW "default.action=auto", fast, COARSE), "large", "1",
	          "1", NULL);
	ck_assert_msg(outcome.exit == 0, "%.2000s", outcome.err);
	ck_detail("fp8 tensor, fp8 row");
	const struct shadow *tensor = need("fp8 tensor"), *row = need("fp8 row");
	ck_assert(tensor->checks == 1 && tensor->sqnr == 15.92 && tensor->error == 0.16);
	ck_assert(row->checks == 1 && row->sqnr == 27.96 && row->error == 0.04);
	ck_assert(tensor->amax == 100 && row->amax == 100);
}
END_TEST

START_TEST(a_candidate_that_the_device_has_not_is_told)
{
	const char *env[] = {"QSHIM_SET=" SHADOW "default.action=auto", COARSE,
	                     "SOFTCUDA_CAPABILITY=89", NULL};
	run_scene(&outcome, SHIMMED, env, "large", "1", "1", NULL);
	ck_assert_msg(outcome.exit == 0, "%.2000s", outcome.err);
	ck_detail("fp8 tensor, no fp8 row (arch)");
	ck_assert_int_eq(outcome.shadows, 1);
	ck_assert(need("fp8 tensor")->sqnr == 15.92);
}
END_TEST

/* What the policy fixes is not measured otherwise. */
START_TEST(a_demanded_scaling_is_measured_alone)
{
	run(SHADOW FORCE "default.scale=row", NULL, "0", "1", NULL, NULL);
	ck_detail("fp8 row");
	ck_assert_int_eq(outcome.shadows, 1);
	ck_assert_int_eq(of("fp8", 0), 1);
	run_scene(&outcome, SHIMMED,
	          with(SHADOW "default.scale=tensor;default.action=auto", fast, COARSE), "large",
	          "1", "1", NULL);
	ck_detail("fp8 tensor");
}
END_TEST

/* Of 48 rows along K, 128 elements each: all that share a scale with the large one are lost. A
 * reads as stored and turned, B too. */
START_TEST(what_quantising_loses_is_counted)
{
	const bool by_row = _i / 4;
	const double lost = by_row ? 127.0 / (48 * 128) : (48 * 128 - 1.0) / (48 * 128);
	static const char *const forms[] = {"0", "1", "2", "6"};
	run_scene(&outcome, SHIMMED,
	          with(by_row ? SHADOW FORCE "default.scale=row" : SHADOW FORCE, fast, NULL),
	          "spike", forms[_i % 4], NULL);
	ck_assert_int_eq(outcome.exit, 0);
	const struct shadow *line = need(by_row ? "fp8 row" : "fp8 tensor");
	ck_assert_double_eq_tol(line->flushed, lost, 1e-5);
	ck_assert(line->saturated == 0);
}
END_TEST

START_TEST(what_nf4_loses_is_not_known)
{
	run(SHADOW NF4, NULL, "-1", "2", NULL, NULL);
	ck_assert(need("nf4")->saturated == -1 && need("nf4")->flushed == -1);
}
END_TEST

START_TEST(gradients_say_their_format)
{
	run_scene(&outcome, SHIMMED, with(SHADOW FORCE "default.format=e5m2", fast, NULL),
	          "gradient", "1", "1", NULL);
	ck_detail("fp8 tensor e5m2");
	ck_assert_str_eq(need("fp8 tensor e5m2")->role, "wgrad");
	run_scene(&outcome, SHIMMED, with(SHADOW FORCE "default.format=e4m3", fast, NULL),
	          "gradient", "1", "1", NULL);
	ck_detail("fp8 tensor");
	run(SHADOW FORCE "default.format=e5m2", NULL, "0", "1", NULL, NULL);
	ck_detail("fp8 tensor");
}
END_TEST

START_TEST(bf16_is_not_measured)
{
	run(SHADOW "default.action=bf16", NULL, "0", "3", NULL, NULL);
	ck_assert_str_eq(measured(3), "---");
	ck_decision("native", "shadow");
	ck_assert_int_eq(outcome.shadows, 0);
}
END_TEST

/* Also where a rule would have kept the weight, and what takes the program's place timed. */
START_TEST(nothing_is_kept_and_nothing_timed)
{
	char policy[256];
	snprintf(policy, sizeof policy,
	         SHADOW "log.summary=1;cache.validity=verified;tune.budget_ms=60000;"
	                "numerics.check_every=1;default.action=%s;default.strategy=%s",
	         _i ? "nf4" : "fp8", _i == 2 ? "performant" : "eager");
	run(policy, NULL, "-1", "8", NULL, NULL);
	ck_assert_ptr_null(strstr(outcome.err, "kept as"));
	ck_assert_str_eq(measured(8), "xxxxxxxx");
	for (int i = 0; i < 8; i++) {
		ck_assert_int_eq(of("syncs", i), i == 0);
		ck_assert_int_le(of("bf16", i), 2);
		ck_assert_int_le(of("fp8", i), 1);
	}
}
END_TEST

START_TEST(what_nothing_looked_at_is_noted_at_exit)
{
	run_scene(&outcome, SHIMMED, with(SHADOW FORCE, fast, NULL), "once", "0", NULL);
	check_unharmed("once");
	ck_assert_int_eq(need("fp8 tensor")->checks, 1);
}
END_TEST

START_TEST(a_context_that_is_gone_is_not_looked_at)
{
	run_scene(&outcome, SHIMMED, with(SHADOW FORCE, fast, NULL), "once", "1", NULL);
	check_unharmed("once");
	ck_assert_int_eq(outcome.shadows, 0);
}
END_TEST

START_TEST(layers_have_rows_of_their_own)
{
	run_scene(&outcome, SHIMMED, with(SHADOW "log.summary=1;" FORCE, fast, NULL), "layers",
	          NULL);
	check_unharmed("layers");
	ck_assert_int_eq(outcome.decisions, 2);
	ck_assert_int_eq(outcome.shadows, 4);
	for (int i = 0; i < 4; i++)
		ck_assert_str_eq(outcome.shadow[i].layer, outcome.decision[i % 2].layer);
	ck_assert_ptr_nonnull(strstr(outcome.err, "  fp8 tensor        model.layers.0.mlp  TN "));
	ck_assert_ptr_nonnull(strstr(outcome.err, "  fp8 tensor        model.layers.1.mlp  TN "));
}
END_TEST

START_TEST(the_program_waits_for_nothing)
{
	run_scene(&outcome, SHIMMED, with(SHADOW FORCE "numerics.check_every=1", fast, NULL),
	          "held", NULL);
	check_unharmed("held");
	ck_assert_int_eq((int)printed(&outcome, "syncs"), 0);
	ck_assert_int_eq((int)printed(&outcome, "fp8"), 1);
	ck_assert_int_eq(outcome.shadows, 2);
}
END_TEST

/* The memory is the first one's until its comparison has reported. */
START_TEST(streams_take_turns)
{
	char seed[32];
	snprintf(seed, sizeof seed, "SOFTCUDA_SEED=%d", _i);
	run_scene(&outcome, SHIMMED, with(SHADOW FORCE "cache.validity=adjacent", fast, seed),
	          "streams", NULL);
	check_unharmed("streams");
	ck_assert_int_eq(outcome.decisions, 3);
	for (int i = 0; i < outcome.shadows; i++)
		ck_assert(outcome.shadow[i].least > LEAST_DB);
	ck_assert_int_eq(outcome.shadows, 4);
}
END_TEST

START_TEST(captured_products_are_not_measured)
{
	const char *const warm = _i ? "1" : "0";
	run_scene(&outcome, SHIMMED, with(SHADOW FORCE "numerics.check_every=1", fast, NULL),
	          "captured", warm, NULL);
	check_unharmed("captured");
	ck_assert_int_eq((int)printed(&outcome, "products"), 1);
	ck_assert_int_eq((int)printed(&outcome, "nodes"), 1);
	ck_decision("native", _i ? "shadow" : "capture-cold");
	ck_assert_int_eq(outcome.shadows, _i);
}
END_TEST

struct failing {
	const char *policy, *env, *knob, *value, *reason;
	int checks; /* that succeed nevertheless */
};

static const struct failing failing[] = {
        {FORCE "cache.max_mib=1", NULL, NULL, NULL, "memory", 0},
        {FORCE "cache.max_mib=3", NULL, NULL, NULL, "memory", 0},
        {FORCE, NULL, "fail_fp8", "13", "error", 0},
        {FORCE, NULL, "fail_launch", "719", "error", 0},
        {FORCE, NULL, "fail_product", "1", "error", 2},
        {FORCE, "SOFTCUDA_HEURISTICS_EMPTY=2", NULL, NULL, "algo-none", 0},
        {FORCE "default.scale=row", "SOFTCUDA_CAPABILITY=89", NULL, NULL, "arch", 0},
        {FORCE, "SOFTCUDA_CAPABILITY=80", NULL, NULL, "arch", 0},
        {FORCE, "SOFTCUDA_CUBLASLT_VERSION=111100", NULL, NULL, "cublaslt-old", 0},
};

#define FAILING ((int)(sizeof failing / sizeof *failing))

START_TEST(whatever_fails_has_a_reason_and_harms_nothing)
{
	char policy[256];
	const struct failing *f = &failing[_i];
	snprintf(policy, sizeof policy, SHADOW "numerics.check_every=1;%s", f->policy);
	run(policy, f->env, "0", "8", f->knob, f->value);
	ck_assert_int_eq(decisions_with(&outcome, f->reason), 1);
	ck_assert_int_eq(decisions_for("native"), outcome.decisions);
	if (f->checks)
		ck_assert_int_ge(need("fp8 tensor")->checks, f->checks);
	else
		ck_assert_int_eq(outcome.shadows, 0);
}
END_TEST

START_TEST(what_fails_again_and_again_is_given_up)
{
	run(SHADOW FORCE "numerics.check_every=1", NULL, "0", "8", "fail_fp8", "13");
	ck_assert_str_eq(measured(8), "xxx-----");
}
END_TEST

START_TEST(the_mode_may_be_edited)
{
	char folder[256], variable[320];
	make_directory(folder);
	snprintf(variable, sizeof variable, "QSHIM_POLICY=%s/policy.ini", folder);
	const char *const env[] = {variable, "QSHIM_SET=log.quiet=1;cache.validity=adjacent", NULL};
	run_scene(&outcome, SHIMMED, env, "edited", _i ? "on" : "shadow", _i ? "shadow" : "on",
	          NULL);
	remove_directory(folder);
	check_unharmed("edited");
	const struct qs_counter *counter = only_counter(&outcome);
	ck_assert_int_eq(counter->reason, _i ? QS_REASON_SHADOW : QS_REASON_RULE);
	ck_assert_uint_ge(counter->replaced, 4);
	ck_assert_uint_lt(counter->replaced, counter->calls);
	ck_assert_int_ge(need("fp8 tensor")->checks, 3);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("shadow");
	TCase *tcase = tcase_create("shadow");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, the_program_has_its_own_bits, 0, ROWS);
	tcase_add_test(tcase, the_first_uses_and_some_later_ones_are_measured);
	tcase_add_loop_test(tcase, the_error_is_that_of_what_would_have_been, 0, 4);
	tcase_add_test(tcase, auto_is_measured_in_both_scalings);
	tcase_add_test(tcase, a_candidate_that_the_device_has_not_is_told);
	tcase_add_test(tcase, a_demanded_scaling_is_measured_alone);
	tcase_add_loop_test(tcase, what_quantising_loses_is_counted, 0, 8);
	tcase_add_test(tcase, what_nf4_loses_is_not_known);
	tcase_add_test(tcase, gradients_say_their_format);
	tcase_add_test(tcase, bf16_is_not_measured);
	tcase_add_loop_test(tcase, nothing_is_kept_and_nothing_timed, 0, 3);
	tcase_add_test(tcase, what_nothing_looked_at_is_noted_at_exit);
	tcase_add_test(tcase, a_context_that_is_gone_is_not_looked_at);
	tcase_add_test(tcase, layers_have_rows_of_their_own);
	tcase_add_test(tcase, the_program_waits_for_nothing);
	tcase_add_loop_test(tcase, streams_take_turns, 1, 6);
	tcase_add_loop_test(tcase, captured_products_are_not_measured, 0, 2);
	tcase_add_loop_test(tcase, whatever_fails_has_a_reason_and_harms_nothing, 0, FAILING);
	tcase_add_test(tcase, what_fails_again_and_again_is_given_up);
	tcase_add_loop_test(tcase, the_mode_may_be_edited, 0, 2);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
