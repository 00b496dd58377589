/* When nothing is to be done, nothing is done: switched off, an excluded program, calls from within
 * cuBLAS, and programs that have nothing to do with CUDA. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/intercept/run.h"
#include "tests/support/suite.h"

static struct run bare, shimmed;

static void write_file(const char *path, const char *content)
{
	FILE *file = fopen(path, "w");
	ck_assert_ptr_nonnull(file);
	ck_assert_int_ge(fputs(content, file), 0);
	ck_assert_int_eq(fclose(file), 0);
}

static void expect_same(void)
{
	ck_assert_str_eq(shimmed.err, bare.err);
	ck_assert_str_eq(shimmed.out, bare.out);
	ck_assert_int_eq(shimmed.status, bare.status);
}

/* ---- off, and excluded ---- */

static const char *const plugin[] = {"host", "plugin", "cublasGemmEx", "product", NULL};

/* Runs a product which the policy wants in fp8 whatever its size. */
static void run_wanted(struct run *result, const char *preload, const char *more)
{
	char policy[256];
	const char *path = scratch_file("policy.ini");
	write_file(path, "[qshim]\nversion = 1\n[default]\naction = fp8\n");
	snprintf(policy, sizeof policy, "QSHIM_POLICY=%s", path);
	const char *env[] = {policy, more, NULL};
	run(result, &(struct setting){.preload = preload, .env = env}, plugin);
	ck_assert_int_eq(result->status, 0);
}

START_TEST(the_product_of_these_tests_is_replaced_when_wanted)
{
	run_wanted(&bare, NULL, NULL);
	run_wanted(&shimmed, SHIM, NULL);
	ck_assert_str_ne(shimmed.out, bare.out);
	ck_assert_int_eq(decisions(&shimmed, "cublasGemmEx", "rule", NULL), 1);
}
END_TEST

START_TEST(off_is_the_same_bit_for_bit_and_writes_nothing)
{
	run_wanted(&bare, NULL, NULL);
	run_wanted(&shimmed, SHIM, "QSHIM=off");
	ck_assert_str_eq(shimmed.err, "");
	expect_same();
	ck_assert(!shimmed.wrote);
}
END_TEST

START_TEST(an_excluded_program_is_left_alone)
{
	run_wanted(&bare, NULL, NULL);
	run_wanted(&shimmed, SHIM, "QSHIM_SET=qshim.process=python*");
	ck_assert_str_eq(shimmed.err, "");
	expect_same();
	ck_assert(!shimmed.wrote);
	run_wanted(&shimmed, SHIM, "QSHIM_SET=qshim.process=python*, host");
	ck_assert_str_ne(shimmed.out, bare.out);
}
END_TEST

/* ---- re-entry ---- */

START_TEST(a_call_within_cublas_is_not_counted_again)
{
	const char *argv[] = {"host", "inner", NULL}, *env[] = {"SOFTCUDA_INNER_LT=1", NULL};
	run(&bare, &(struct setting){.env = env}, argv);
	run(&shimmed, &(struct setting){.preload = SHIM, .env = env}, argv);
	ck_assert_ptr_nonnull(strstr(bare.out, "inner calls 1\n"));
	ck_assert_str_eq(bare.err, "");
	expect_same();
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 1);
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_LT_MATMUL), 0);
	ck_assert_int_eq(decisions(&shimmed, NULL, NULL, NULL), 1);
}
END_TEST

/* ---- calls that do not return ---- */

#define LEAVE "libwrap_leave.so:libcatch.so"

/* The same actions with and without the shim. */
static void leave(const char *policy, const char *actions)
{
	char set[256];
	const char *argv[] = {"leave", actions, NULL};
	const char *env[] = {set, NULL};
	snprintf(set, sizeof set, "QSHIM_SET=log.quiet=1;tune.budget_ms=0;tune.file=;%s", policy);
	run(&bare, &(struct setting){.preload = LEAVE}, argv);
	run(&shimmed, &(struct setting){.preload = SHIM ":" LEAVE, .env = env}, argv);
	ck_assert_int_eq(bare.status, 0);
	ck_assert_msg(shimmed.status == 0, "status %d: %.1000s", shimmed.status, shimmed.err);
}

#define NATIVE "default.action=native"
#define FP8    "default.action=fp8"

START_TEST(a_call_that_was_left_is_got_over)
{
	leave(NATIVE, "pplplpp");
	expect_same();
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 7);
	leave(NATIVE, "lldpd");
	expect_same();
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 4);
}
END_TEST

START_TEST(an_exception_passes_through)
{
	leave(NATIVE, "pptptpp");
	expect_same();
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 7);
}
END_TEST

START_TEST(a_thread_that_left_our_own_code_passes_from_then_on)
{
	leave(FP8, _i ? "pptpp" : "pplpp");
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 3);
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_LT_MATMUL), 0);
}
END_TEST

/* Calls that an engine served. */
static uint64_t replaced(const struct run *result)
{
	uint64_t sum = 0;
	for (int i = 0; i < result->counters; i++)
		sum += result->counter[i].replaced;
	return sum;
}

/* Lines that are the same as the first. */
static int repeated(const struct run *result)
{
	int count = 0;
	for (const char *line = result->out; *line; line += 5)
		count += !strncmp(line, result->out, 5);
	return count;
}

static double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* In the same stream: it took the scratch memory with it, which the others wait for once. */
START_TEST(a_thread_that_left_our_own_code_holds_up_no_other)
{
	static const char *const actions[] = {"ppTpppp", "ppXpppp", "ppTpXpTppp"};
	const uint64_t products = strlen(actions[_i]);
	leave(FP8 ";cache.validity=each", actions[_i]);
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), products);
	ck_assert_uint_eq(replaced(&shimmed), products - (_i < 2 ? 1 : 3));
	ck_assert_int_eq(repeated(&shimmed), (int)replaced(&shimmed));
}
END_TEST

static int lines_with(const char *text, const char *what)
{
	int count = 0;
	while ((text = strstr(text, what))) {
		text += strlen(what);
		count++;
	}
	return count;
}

/* Both are served, each with memory of its own, which is there the next time. */
START_TEST(a_thread_that_is_slow_in_our_own_code_holds_up_no_other_for_long)
{
	leave(FP8 ";cache.validity=each;log.level=cache", "ppSpSpc");
	ck_assert_str_eq(shimmed.out + 6 * 5, "0001\n"); /* those made beside it are gone */
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 8);
	ck_assert_uint_eq(replaced(&shimmed), 8);
	ck_assert_int_eq(repeated(&shimmed), 6);
	ck_assert_int_eq(lines_with(shimmed.err, "did not come back"), 2);
	ck_assert_int_eq(lines_with(shimmed.err, "MiB, was 0"), 2);
}
END_TEST

/* While it measured: what is not known is not measured any more, and who waits does so once. */
START_TEST(a_thread_that_left_a_measurement_holds_up_no_other)
{
	const double start = seconds();
	leave("default.action=bf16;tune.budget_ms=2000", _i ? "Xpppppppp" : "Tpppppppp");
	ck_assert_double_lt(seconds() - start, 5);
	expect_same();
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 9);
	ck_assert_uint_eq(replaced(&shimmed), 0);
	ck_assert_int_eq(decisions(&shimmed, NULL, "untuned", "another thread is measuring"), 1);
}
END_TEST

/* Its product, or any other work of the thread until its next call, may have written anything. */
START_TEST(what_a_call_that_was_left_wrote_is_not_taken_for_unchanged)
{
	leave("rule writer.n=32;rule writer.action=native;" FP8 ";cache.validity=adjacent", "pqwp");
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 4);
	ck_assert_uint_eq(strlen(shimmed.out), 2 * strlen("0000\n"));
	ck_assert(strncmp(shimmed.out, shimmed.out + 5, 5));
}
END_TEST

/* So small a part of a kept weight that what each use compares does not show it at once. */
START_TEST(a_kept_weight_that_a_call_that_was_left_wrote_is_made_anew)
{
	leave("rule writer.n=1;rule writer.action=native;" FP8, "ppppppppppvp");
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 12);
	ck_assert_uint_eq(strlen(shimmed.out), 11 * strlen("0000\n"));
	ck_assert(strncmp(shimmed.out + 9 * 5, shimmed.out + 10 * 5, 5));
}
END_TEST

/* Were the time of a left call to end with the next product, which takes none, the mean of four
 * without the longest would fall by a third. A step is one product, half of which take a
 * millisecond: the two differ in their tokens only. */
START_TEST(a_call_that_was_left_is_not_timed)
{
	char actions[2 * 800 + 1] = "";
	double ms = 0, percent = 0;
	for (int i = 0; i < 800; i++)
		strcpy(actions + 2 * i, i > 500 && i < 520 ? "lh" : "qh");
	const char *argv[] = {"leave", actions, NULL};
	const char *env[] = {"QSHIM_SET=log.quiet=1;tune.budget_ms=0;tune.file=;"
	                     "cache.validity=adjacent;rule one.n=16;rule one.action=fp8;"
	                     "default.action=native",
	                     "QSHIM_SUMMARY=1", "SOFTCUDA_PRODUCT_US=1000", NULL};
	run(&shimmed, &(struct setting){.preload = SHIM ":" LEAVE, .env = env}, argv);
	const char *told = strstr(shimmed.err, " products, ");
	ck_assert_msg(told && sscanf(told, " products, %lf ms each, %lf %%", &ms, &percent) == 2,
	              "status %d: %.1000s", shimmed.status, shimmed.err);
	ck_assert_msg(ms * percent / 100 > 0.45 && ms * percent / 100 < 0.55, "%f ms, %f %%", ms,
	              percent);
}
END_TEST

/* ---- programs without CUDA ---- */

/* Each leaves nothing behind and prints what does not change. "SOURCE" and "OBJECT" are replaced.
 */
static const char *const others[][8] = {
        {"bash", "-c", "echo $((6 * 7)); /bin/echo inner", NULL},
        {"git", "hash-object", "SOURCE", NULL},
        {"gcc", "-pipe", "-c", "SOURCE", "-o", "OBJECT", NULL},
        {"python3", "-B", "-c", "print('fine')", NULL},
};
#define OTHERS ((int)(sizeof others / sizeof *others))

static bool prepare_other(const char *argv[8], int index)
{
	char command[64];
	snprintf(command, sizeof command, "command -v %s >/dev/null", others[index][0]);
	if (system(command)) {
		printf("no %s: not tested\n", others[index][0]);
		return false;
	}
	memcpy(argv, others[index], sizeof others[index]);
	for (int i = 0; argv[i]; i++) {
		if (!strcmp(argv[i], "SOURCE"))
			argv[i] = scratch_file("source.c");
		else if (!strcmp(argv[i], "OBJECT"))
			argv[i] = scratch_file("source.o");
	}
	write_file(scratch_file("source.c"), "int answer(void) { return 42; }\n");
	return true;
}

START_TEST(a_program_without_cuda_behaves_the_same_and_nothing_is_written)
{
	const char *argv[8];
	if (!prepare_other(argv, _i))
		return;
	run(&bare, &(struct setting){0}, argv);
	run(&shimmed, &(struct setting){.preload = SHIM}, argv);
	ck_assert_int_eq(bare.status, 0);
	ck_assert_str_eq(shimmed.err, "");
	expect_same();
	ck_assert(!shimmed.wrote);
}
END_TEST

/* Paths opened or made, as strace wrote them, sorted. */
struct opened {
	size_t count;
	char *path[4096];
};

static int compare_paths(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static void read_trace(struct opened *opened, const char *trace)
{
	char line[8192];
	FILE *file = fopen(trace, "r");
	ck_assert_ptr_nonnull(file);
	opened->count = 0;
	while (fgets(line, sizeof line, file)) {
		char *first = strchr(line, '"'), *last = first ? strchr(first + 1, '"') : NULL;
		if (!last)
			continue;
		*last = '\0';
		ck_assert_uint_lt(opened->count, sizeof opened->path / sizeof *opened->path);
		opened->path[opened->count++] = strdup(first + 1);
	}
	fclose(file);
	qsort(opened->path, opened->count, sizeof *opened->path, compare_paths);
}

/* False if this machine does not let a process be traced. */
static bool trace(struct opened *opened, const char *preload, const char *const *command)
{
	char assignment[512];
	const char *path = scratch_file("trace");
	const char *argv[24] = {
	        "strace",
	        "-f",
	        "-qq",
	        "-o",
	        path,
	        "-e",
	        "trace=?open,openat,?openat2,?creat,?mkdir,mkdirat",
	};
	size_t used = 7;
	if (preload) {
		snprintf(assignment, sizeof assignment, "LD_PRELOAD=%s", built(preload));
		argv[used++] = "-E";
		argv[used++] = assignment;
	}
	while (*command)
		argv[used++] = *command++;
	run(&bare, &(struct setting){0}, argv);
	if (bare.status)
		return false;
	read_trace(opened, path);
	return true;
}

/* Everything in `more` is in `less` too, or is our library; nothing of `less` is missing. */
static void expect_only_shim(const struct opened *less, const struct opened *more)
{
	size_t own = 0, j = 0;
	const char *shim = built(SHIM);
	for (size_t i = 0; i < more->count; i++) {
		if (!strcmp(more->path[i], shim))
			own++;
		else if (j < less->count && !strcmp(more->path[i], less->path[j]))
			j++;
		else
			ck_abort_msg("opened with the shim only: %s", more->path[i]);
	}
	ck_assert_uint_eq(j, less->count);
	ck_assert_uint_gt(own, 0);
}

START_TEST(a_program_without_cuda_opens_no_file_more_than_our_library)
{
	static struct opened less, more;
	const char *argv[8];
	if (!prepare_other(argv, _i))
		return;
	if (*preload_first() || !trace(&less, NULL, argv) || !trace(&more, SHIM, argv)) {
		printf("no trace of %s: opened files are not compared\n", argv[0]);
		return;
	}
	expect_only_shim(&less, &more);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("passing");
	TCase *tcase = tcase_create("passing");
	tcase_set_timeout(tcase, 300);
	tcase_add_checked_fixture(tcase, NULL, remove_scratch);
	tcase_add_test(tcase, the_product_of_these_tests_is_replaced_when_wanted);
	tcase_add_test(tcase, off_is_the_same_bit_for_bit_and_writes_nothing);
	tcase_add_test(tcase, an_excluded_program_is_left_alone);
	tcase_add_test(tcase, a_call_within_cublas_is_not_counted_again);
	tcase_add_test(tcase, a_call_that_was_left_is_got_over);
	tcase_add_test(tcase, an_exception_passes_through);
	tcase_add_loop_test(tcase, a_thread_that_left_our_own_code_passes_from_then_on, 0, 2);
	tcase_add_loop_test(tcase, a_thread_that_left_our_own_code_holds_up_no_other, 0, 3);
	tcase_add_loop_test(tcase, a_thread_that_left_a_measurement_holds_up_no_other, 0, 2);
	tcase_add_test(tcase, a_thread_that_is_slow_in_our_own_code_holds_up_no_other_for_long);
	tcase_add_test(tcase, what_a_call_that_was_left_wrote_is_not_taken_for_unchanged);
	tcase_add_test(tcase, a_kept_weight_that_a_call_that_was_left_wrote_is_made_anew);
	tcase_add_test(tcase, a_call_that_was_left_is_not_timed);
	tcase_add_loop_test(tcase, a_program_without_cuda_behaves_the_same_and_nothing_is_written,
	                    0, OTHERS);
	tcase_add_loop_test(tcase, a_program_without_cuda_opens_no_file_more_than_our_library, 0,
	                    OTHERS);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
