/* When the file of the policy is looked at, by a clock of the test's own, which also outruns the
 * second for which a file must be left alone; what bounds the changes; and which weights count for
 * a policy that asks in the middle of a step. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "intercept/intercept.h"
#include "plan/plan.h"
#include "tests/support/suite.h"

#define CHANGES_MAX 1000 /* as live.c has it */
#define HEAD        "[qshim]\nversion = 1\n"

static long ahead_ms, reads; /* of the clock: beyond the real one, and how often it was read */

/* In place of the C library's, for all that is linked into this program. */
int clock_gettime(clockid_t clock, struct timespec *time)
{
	const int status = (int)syscall(SYS_clock_gettime, clock, time);
	reads += clock == CLOCK_MONOTONIC_COARSE;
	time->tv_sec += ahead_ms / 1000;
	time->tv_nsec += ahead_ms % 1000 * 1000000;
	time->tv_sec += time->tv_nsec / 1000000000;
	time->tv_nsec %= 1000000000;
	return status;
}

static char folder[] = "/tmp/qshim-live.XXXXXX", file[64];
static const struct qs_key key = {.m = 64, .n = 64, .k = 64};

static void put(const char *action, int number)
{
	FILE *to = fopen(file, "we");
	ck_assert_ptr_nonnull(to);
	fprintf(to, HEAD "[rule number%d]\naction = %s\n", number, action);
	ck_assert_int_eq(fclose(to), 0);
}

static void set_up(void)
{
	ck_assert_ptr_nonnull(mkdtemp(folder));
	snprintf(file, sizeof file, "%s/policy.ini", folder);
	put("fp8", 0);
	setenv("QSHIM_POLICY", file, 1);
	unsetenv("QSHIM");
	unsetenv("QSHIM_SET");
	ahead_ms = 2000;
	ck_assert(qs_start());
}

static void tear_down(void)
{
	unlink(file);
	rmdir(folder);
}

/* Number of the policy in effect. */
static int number(void)
{
	const char *name = qs_policy_rule_name(atomic_load(&qs_process()->policy), 0);
	ck_assert(!strncmp(name, "number", 6));
	return atoi(name + 6);
}

/* Calls that come slowly: each of them reads the clock. */
static void call_after(long ms)
{
	ahead_ms += ms;
	qs_live_call(&key);
}

START_TEST(the_file_is_looked_at_once_a_second)
{
	call_after(200);
	put("native", 1);
	ahead_ms += 700;
	call_after(0);
	ck_assert_int_eq(number(), 0);
	call_after(400);
	ck_assert_int_eq(number(), 1);
	put("fp8", 2);
	call_after(900);
	ck_assert_int_eq(number(), 1);
	call_after(600);
	ck_assert_int_eq(number(), 2);
}
END_TEST

START_TEST(a_busy_thread_reads_the_clock_at_every_thousandth_call)
{
	reads = 0;
	for (int i = 0; i < 1024 * 100; i++)
		qs_live_call(&key);
	ck_assert_int_le(reads, 100 + 10);
	ck_assert_int_ge(reads, 100);
}
END_TEST

/* Ten thousand calls at once and then ten a second: the change is seen within a thousand of them,
 * and the next one within seconds. */
START_TEST(a_thread_that_becomes_slow_reads_the_clock_more_often)
{
	for (int i = 0; i < 10000; i++)
		qs_live_call(&key);
	for (int i = 0; i < 3000; i++)
		call_after(150);
	reads = 0;
	for (int i = 0; i < 100; i++)
		call_after(150);
	ck_assert_int_ge(reads, 50);
	put("native", 1);
	for (int i = 0; i < 20; i++)
		call_after(150);
	ck_assert_int_eq(number(), 1);
}
END_TEST

START_TEST(changes_are_bounded)
{
	for (int i = 1; i <= CHANGES_MAX; i++) {
		put(i % 2 ? "native" : "fp8", i);
		call_after(2000);
		ck_assert_int_eq(number(), i);
	}
	put("fp8", CHANGES_MAX + 1);
	for (int i = 0; i < 3; i++)
		call_after(2000);
	ck_assert_int_eq(number(), CHANGES_MAX);
}
END_TEST

START_TEST(the_error_number_of_the_host_stays)
{
	unlink(file);
	errno = 1234;
	call_after(2000);
	ck_assert_int_eq(errno, 1234);
}
END_TEST

/* ---- weights ------------------------------------------------------------------------------------
 */

/* The forward product of a weight, numbers being shapes, by a thread that is slow enough to read
 * the clock at each call. */
static void forward(int weight)
{
	static struct qs_library library = {.path = "none"};
	static const float one = 1, zero = 0;
	struct qs_gemm g = {
	        .key = {.m = 64 * (weight + 1), .n = 16, .k = 64, .ta = CUBLAS_OP_T, .batch = 1},
	        .library = &library,
	        .a = (void *)(uintptr_t)(0x100000 * (weight + 1)),
	        .b = (void *)(uintptr_t)0x10000,
	        .c = (void *)(uintptr_t)0x20000,
	        .d = (void *)(uintptr_t)0x20000,
	        .alpha = &one,
	        .beta = &zero,
	};
	g.key.lda = g.key.ldb = 64;
	g.key.ldc = g.key.ldd = g.key.m;
	g.key.atype = g.key.btype = g.key.ctype = g.key.dtype = CUDA_R_16BF;
	g.key.bias_type = QS_TYPE_NONE;
	g.key.compute = CUBLAS_COMPUTE_32F;
	g.key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
	ahead_ms += 150;
	ck_assert(!qs_dispatch(&g));
}

static void set_up_steps(void)
{
	setenv("QSHIM_SUMMARY", "1", 1);
	set_up();
	put("native", 1);
	call_after(2000);
	ck_assert_int_eq(number(), 1);
}

static void tear_down_steps(void)
{
	unsetenv("QSHIM_SUMMARY");
	tear_down();
}

/* A step is weights 2, 3, 4, 0. The rule comes between the last two, so that in its first step only
 * weight 0 is met. */
START_TEST(weights_count_once_a_whole_step_went_by_since_a_rule_asked)
{
	forward(0);
	forward(1);
	for (int step = 0; step < 300; step++)
		for (int i = 2; i < 6; i++)
			forward(i % 5 ? i : 0);
	ck_assert_int_gt(qs_live_step(), 290);
	for (int i = 2; i < 5; i++)
		forward(i);
	FILE *to = fopen(file, "we");
	ck_assert_ptr_nonnull(to);
	fprintf(to, HEAD "[rule number2]\nweight = -1\naction = native\n");
	ck_assert_int_eq(fclose(to), 0);
	ahead_ms += 2000;
	forward(0);
	ck_assert_int_eq(number(), 2);
	for (int i = 2; i < 6; i++) {
		forward(i % 5 ? i : 0);
		ck_assert_int_eq(qs_live_weights(), 0);
	}
	forward(2);
	ck_assert_int_eq(qs_live_weights(), 5);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("live");
	TCase *tcase = tcase_create("live");
	tcase_set_timeout(tcase, 60);
	tcase_add_checked_fixture(tcase, set_up, tear_down);
	tcase_add_test(tcase, the_file_is_looked_at_once_a_second);
	tcase_add_test(tcase, a_busy_thread_reads_the_clock_at_every_thousandth_call);
	tcase_add_test(tcase, a_thread_that_becomes_slow_reads_the_clock_more_often);
	tcase_add_test(tcase, changes_are_bounded);
	tcase_add_test(tcase, the_error_number_of_the_host_stays);
	suite_add_tcase(suite, tcase);
	TCase *weights = tcase_create("weights");
	tcase_add_checked_fixture(weights, set_up_steps, tear_down_steps);
	tcase_add_test(weights, weights_count_once_a_whole_step_went_by_since_a_rule_asked);
	suite_add_tcase(suite, weights);
	return qs_suite_main(suite);
}
