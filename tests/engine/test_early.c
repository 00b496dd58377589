/* Which kernels begin before the work ahead of them has ended, and which of them then read a kept
 * copy: one that was complete when they were launched. The emulation breaks the context of a
 * product that promised this in vain, and spoils a capture that no driver is known to take. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"
#include "step.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softcuda/softcuda.h"

#define OUT    128
#define IN     256
#define BYTES  (OUT * IN * sizeof(uint16_t))
#define WARMUP 6 /* calls until a copy is made and no longer doubted */

static const struct product few = {.ta = CUBLAS_OP_T, .m = OUT, .n = 8, .k = IN};
static const struct product many = {.ta = CUBLAS_OP_T, .m = OUT, .n = 270, .k = IN};

static struct session session;
static struct made x;

/* ---- scenes ---- */

static void open_all(void)
{
	session_open(&session);
	product_make(&x, &few, 1);
	other_product(&session);
	step_begin();
}

static void warm_up(void)
{
	for (int i = 0; i < WARMUP; i++)
		step_call(&x, &session);
}

/* New contents in memory of their own; their host values are x's from now on. */
static const void *new_weight(void)
{
	static uint64_t seed = 100;
	struct made other;
	product_make(&other, &few, ++seed);
	memcpy(x.a, other.a, x.size_a * sizeof *x.a);
	return other.da;
}

static void write_weight(void)
{
	must((int)cudaMemcpyAsync(x.da, new_weight(), BYTES, cudaMemcpyDeviceToDevice,
	                          session.stream),
	     "copy");
}

/* Device memory is host memory here: no call announces it. */
static void write_unseen(void)
{
	memcpy(x.da, new_weight(), BYTES);
}

/* A product of many tokens with the same weight. */
static void call_many(void)
{
	static struct made other;
	if (!other.da)
		product_make(&other, &many, 7);
	other.da = x.da;
	step_submit(&other, &session);
}

/* `steps`: each call is waited for. */
static int scene_steps(int argc, char **argv)
{
	(void)argc, (void)argv;
	open_all();
	warm_up();
	for (int i = 0; i < 3; i++)
		step_call(&x, &session);
	return 0;
}

/* ---- scenes: what may make the copy anew ---- */

static cudaGraphExec_t checks; /* a graph with a product of many tokens, which checks the copy */

/* Afterwards no sample is newer than the last check. */
static void use_many(void)
{
	for (int i = 0; i < WARMUP; i++) {
		call_many();
		product_fetch(&x);
	}
	write_weight();
	warm_up();
}

static void capture_many(void)
{
	use_many();
	step_begin_capture(&session);
	call_many();
	checks = step_end_capture(&session);
}

static void sample(void)
{
	write_unseen();
	call_many();
}

static void launch_checks(void)
{
	write_unseen();
	must((int)cudaGraphLaunch(checks, session.stream), "launch");
}

#define CALLS 6

/* In fp8, many tokens have a copy of their own, and leave that of few alone. */
static const struct cause {
	const char *name;
	void (*prepare)(void);
	void (*happen)(void);
	long early[2]; /* calls that begin early nevertheless: nf4, fp8 */
} causes[] = {
        {"a write", NULL, write_weight, {0, 0}},
        {"a sample", use_many, sample, {0, CALLS}},
        {"a check in a graph", capture_many, launch_checks, {0, CALLS}},
};

#define CAUSES ((int)(sizeof causes / sizeof *causes))

/* `ahead CAUSE`: calls that the host submits before anything of what it caused has run. */
static int scene_ahead(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	const struct cause *cause = &causes[atoi(argv[0])];
	open_all();
	warm_up();
	if (cause->prepare)
		cause->prepare();
	product_fetch(&x);
	product_poison(&x);
	step_begin();
	cause->happen();
	for (int i = 0; i < CALLS; i++)
		step_submit(&x, &session);
	step_print(&x);
	return 0;
}

/* ---- scenes: captures ---- */

static void nothing(void)
{
}

static void fill_ahead(void)
{
	static void *memory;
	if (!memory)
		must((int)cudaMalloc(&memory, 256), "malloc");
	must((int)cudaMemsetAsync(memory, 0, 256, session.stream), "memset");
}

/* A second node ahead, in a stream that has joined. */
static void join_another(void)
{
	cudaStream_t main = session.stream, other;
	cudaEvent_t event;
	must((int)cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
	must((int)cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
	must((int)cudaEventRecord(event, main), "record");
	must((int)cudaStreamWaitEvent(other, event, 0), "wait");
	step_submit(&x, &session);
	session_use(&session, other);
	step_submit(&x, &session);
	must((int)cudaEventRecord(event, other), "record");
	session_use(&session, main);
	must((int)cudaStreamWaitEvent(main, event, 0), "wait");
}

static const struct between {
	const char *name;
	void (*submit)(void);
	int early[2]; /* products of few tokens that begin early: nf4, fp8; never the first */
} betweens[] = {
        {"nothing", nothing, {1, 1}},
        {"a fill", fill_ahead, {0, 0}},
        {"a branch", join_another, {2, 2}},
        {"a check", call_many, {0, 1}},
};

#define BETWEENS ((int)(sizeof betweens / sizeof *betweens))

static void print_early(void)
{
	printf("launches %ld\nreads %ld\nedges %ld\n", softcuda_get("early_launches"),
	       softcuda_get("early_reads"), softcuda_get("early_edges"));
}

/* `capture BETWEEN`: two products with something between them; the weight is written between
 * replays. */
static int scene_capture(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	open_all();
	warm_up();
	if (betweens[atoi(argv[0])].submit == call_many)
		use_many();
	fill_ahead();
	product_fetch(&x);
	softcuda_set("counters", 0);
	step_begin_capture(&session);
	step_submit(&x, &session);
	betweens[atoi(argv[0])].submit();
	step_submit(&x, &session);
	cudaGraphExec_t graph = step_end_capture(&session);
	print_early();
	for (int i = 0; i < 4; i++) {
		product_poison(&x);
		if (i % 2)
			write_weight();
		must((int)cudaGraphLaunch(graph, session.stream), "launch");
		step_print(&x);
	}
	return 0;
}

const struct scene scenes[] = {
        {"steps", scene_steps},
        {"ahead", scene_ahead},
        {"capture", scene_capture},
        {NULL, NULL},
};

/* ---- running ---- */

static struct outcome outcome;

/* Of each engine with kernels for few tokens: dB with a kept copy, and at least. */
static const struct kind {
	const char *action;
	double least;
} kinds[] = {{"nf4", 18.5}, {"fp8", 26.5}};

#define KINDS ((int)(sizeof kinds / sizeof *kinds))

static void run(const struct kind *kind, const char *more, const char *knob, const char *scene,
                int which)
{
	char set[256], number[16];
	snprintf(set, sizeof set, "QSHIM_SET=tune.budget_ms=0" OTHER ";default.action=%s%s",
	         kind->action, more);
	snprintf(number, sizeof number, "%d", which);
	const char *const env[] = {set, "QSHIM_QUIET=1", knob, NULL};
	run_scene(&outcome, SHIMMED, env, scene, which < 0 ? NULL : number, NULL);
	ck_assert_msg(outcome.exit == 0, "%s, %s %d: exit %d: %s", kind->action, scene, which,
	              outcome.exit, outcome.err);
	for (int i = 0; i < steps(&outcome); i++)
		ck_assert_msg(step_at(&outcome, i).sqnr >= kind->least, "%s, %s %d, step %d: %.2f",
		              kind->action, scene, which, i, step_at(&outcome, i).sqnr);
}

/* A call that submits a check does not, and so shows that the copy may be new. */
START_TEST(products_with_a_settled_copy_begin_early)
{
	const struct kind *kind = &kinds[_i];
	run(kind, "", NULL, "steps", -1);
	ck_assert_int_eq(steps(&outcome), WARMUP + 3);
	for (int i = 0; i < WARMUP + 3; i++) {
		const struct step step = step_at(&outcome, i);
		ck_assert_int_eq(step.launches[EARLY], !step.launches[HASHES]);
	}
	ck_assert_int_eq(step_at(&outcome, WARMUP + 2).launches[EARLY], 1);
}
END_TEST

START_TEST(no_product_begins_early_where_it_must_not)
{
	static const struct {
		const char *set, *knob;
	} cases[] = {{";engine.early=never", NULL},
	             {";engine.early=always;cache.validity=verified", NULL},
	             {";engine.early=always", "SOFTCUDA_PTX=89"}};
	const struct kind *kind = &kinds[_i % KINDS];
	run(kind, cases[_i / KINDS].set, cases[_i / KINDS].knob, "steps", -1);
	for (int i = 0; i < WARMUP + 3; i++)
		ck_assert_int_eq(step_at(&outcome, i).launches[EARLY], 0);
}
END_TEST

START_TEST(no_product_begins_early_while_its_copy_may_be_made_anew)
{
	const struct kind *kind = &kinds[_i % KINDS];
	const struct cause *cause = &causes[_i / KINDS];
	run(kind, "", NULL, "ahead", _i / KINDS);
	const struct step step = step_at(&outcome, steps(&outcome) - 1);
	ck_assert_msg(step.launches[EARLY] == cause->early[_i % KINDS], "%s, %s: %ld", kind->action,
	              cause->name, step.launches[EARLY]);
}
END_TEST

START_TEST(graphs_get_early_edges_only_where_the_policy_says_so)
{
	static const struct {
		const char *set, *knob;
		bool allowed;
	} cases[] = {{"", NULL, false},
	             {";engine.early=never", NULL, false},
	             {";engine.early=always", NULL, true},
	             {";engine.early=always", "SOFTCUDA_DRIVER=12020", false}};
	const struct kind *kind = &kinds[_i % KINDS];
	for (int i = 0; i < BETWEENS; i++) {
		const bool allowed = cases[_i / KINDS].allowed;
		run(kind, cases[_i / KINDS].set, cases[_i / KINDS].knob, "capture", i);
		ck_assert_uint_eq(total_late(&outcome), 0);
		ck_assert_msg(printed(&outcome, "reads") == betweens[i].early[_i % KINDS] * allowed,
		              "%s, %s: %.0f", kind->action, betweens[i].name,
		              printed(&outcome, "reads"));
		ck_assert_double_eq(printed(&outcome, "edges"), printed(&outcome, "launches"));
		ck_assert_double_ge(printed(&outcome, "edges"), printed(&outcome, "reads"));
		if (!allowed)
			ck_assert_double_eq(printed(&outcome, "edges"), 0);
	}
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("early");
	TCase *tcase = tcase_create("early");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, products_with_a_settled_copy_begin_early, 0, KINDS);
	tcase_add_loop_test(tcase, no_product_begins_early_where_it_must_not, 0, 3 * KINDS);
	tcase_add_loop_test(tcase, no_product_begins_early_while_its_copy_may_be_made_anew, 0,
	                    CAUSES * KINDS);
	tcase_add_loop_test(tcase, graphs_get_early_edges_only_where_the_policy_says_so, 0,
	                    4 * KINDS);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
