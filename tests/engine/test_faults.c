/* Whatever fails on our side, the program gets its own result: allocation, module, launch, product,
 * log files, disk. Each fault is injected after the program has done what it needs itself. */
#define _GNU_SOURCE
#include "child.h"
#include "product.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softcuda/softcuda.h"

#define T_ CUBLAS_OP_T

#define FORCE    "QSHIM_SET=tune.budget_ms=0;default.action=fp8"
#define LEAST_DB 26.0
#define STREAMS  5

static const struct product shape = {.ta = T_, .m = 64, .n = 24, .k = 96};

static double worst = INFINITY;
static int failed;

/* One call, which must succeed and be right, whoever served it. */
static void call(struct made *made, const struct session *session)
{
	product_poison(made);
	failed += product_call(made, session) != CUBLAS_STATUS_SUCCESS;
	product_fetch(made);
	worst = fmin(worst, product_sqnr(made));
}

static int verdict(void)
{
	printf("worst %.3f\nfailed %d\n", worst, failed);
	return 0;
}

/* ---- scenes -----------------------------------------------------------------------------------
 */

/* `streams N KNOB VALUE`: N streams, one product each, with a knob turned after the program's own
 * allocations. A block of scratch is allocated for each stream. */
static int streams(int argc, char **argv)
{
	struct session session;
	struct made made;
	cudaStream_t stream[STREAMS];
	session_open(&session);
	product_make(&made, &shape, 1);
	for (int i = 0; i < STREAMS; i++)
		must(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking), "stream");
	if (argc == 2)
		softcuda_set(argv[0], atol(argv[1]));
	for (int i = 0; i < STREAMS; i++) {
		session_use(&session, stream[i]);
		call(&made, &session);
	}
	return verdict();
}

/* `repeated KNOB VALUE`: ten calls of one product. */
static int repeated(int argc, char **argv)
{
	struct session session;
	struct made made;
	session_open(&session);
	product_make(&made, &shape, 1);
	if (argc == 2)
		softcuda_set(argv[0], atol(argv[1]));
	for (int i = 0; i < 10; i++)
		call(&made, &session);
	return verdict();
}

/* `captured KNOB VALUE`: warm-up, then the knob, then capture and replay. */
static int captured(int argc, char **argv)
{
	struct session session;
	struct made made;
	cudaGraph_t graph;
	cudaGraphExec_t executable;
	session_open(&session);
	product_make(&made, &shape, 1);
	call(&made, &session);
	if (argc == 2)
		softcuda_set(argv[0], atol(argv[1]));
	product_poison(&made);
	must(cudaStreamBeginCapture(session.stream, cudaStreamCaptureModeGlobal), "begin");
	failed += product_call(&made, &session) != CUBLAS_STATUS_SUCCESS;
	must(cudaStreamEndCapture(session.stream, &graph), "end");
	if (argc == 2)
		softcuda_set(argv[0], 0);
	must(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
	must(cudaGraphLaunch(executable, session.stream), "launch");
	product_fetch(&made);
	worst = fmin(worst, product_sqnr(&made));
	return verdict();
}

const struct scene scenes[] = {
        {"streams", streams},
        {"repeated", repeated},
        {"captured", captured},
        {NULL, NULL},
};

/* ---- tests ------------------------------------------------------------------------------------
 */

static struct outcome outcome;

static int lines_with(const char *needle)
{
	int count = 0;
	for (const char *p = outcome.err; (p = strstr(p, needle)); p++)
		count++;
	return count;
}

static void check_unharmed(void)
{
	ck_assert_msg(outcome.exit == 0, "exit %d: %s", outcome.exit, outcome.err);
	ck_assert_double_eq(printed(&outcome, "failed"), 0.0);
	ck_assert_msg(printed(&outcome, "worst") >= LEAST_DB, "%.2f dB",
	              printed(&outcome, "worst"));
}

static void unharmed(const char *scene, const char *const *env, const char *knob, const char *value)
{
	run_scene(&outcome, SHIMMED, env, scene, knob, value, NULL);
	check_unharmed();
}

static const char *const force[] = {FORCE, NULL};

/* A failed allocation costs the stream it was for, the first one only the predictions; the loop's
 * last round fails none. Kept weights take memory of their own, so they are counted without. */
START_TEST(failed_allocation_passes_and_is_tried_again)
{
	static const char *const keep_nothing[] = {FORCE ";cache.validity=adjacent", NULL};
	char value[16];
	snprintf(value, sizeof value, "%d", _i + 1);
	unharmed("streams", force, "fail_alloc", value);
	unharmed("streams", keep_nothing, "fail_alloc", value);
	uint64_t served = total_replaced(&outcome);
	ck_assert_uint_eq(served, (uint64_t)(_i > 0 ? _i - 1 : 0));
	ck_assert_uint_eq(total_late(&outcome), STREAMS - served);
	ck_assert_int_eq(decisions_with(&outcome, "memory"), served < STREAMS);
}
END_TEST

START_TEST(failed_module_load_passes_with_one_message)
{
	unharmed("repeated", force, "fail_module", "209");
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_assert_int_eq(decisions_with(&outcome, "error"), 1);
	ck_assert_int_eq(lines_with("loading the kernels failed"), 1);
}
END_TEST

START_TEST(failed_launch_passes_and_is_given_up)
{
	unharmed("repeated", force, "fail_launch", "700");
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_assert_uint_eq(total_late(&outcome), 10);
	ck_assert_int_eq(decisions_with(&outcome, "error"), 1);
	ck_assert_int_eq(lines_with("qshim:"), 1);
}
END_TEST

START_TEST(failed_fp8_product_passes_and_is_given_up)
{
	unharmed("repeated", force, "fail_fp8", "14");
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_assert_uint_eq(total_late(&outcome), 10);
	ck_assert_int_eq(decisions_with(&outcome, "error"), 1);
	ck_assert_int_eq(lines_with("qshim:"), 1);
}
END_TEST

START_TEST(failures_during_capture_leave_a_right_graph)
{
	static const char *const faults[][2] = {
	        {"fail_launch", "700"}, {"fail_fp8", "14"}, {"fail_alloc", "1"}};
	unharmed("captured", force, faults[_i][0], faults[_i][1]);
	ck_assert_uint_eq(total_calls(&outcome), 2);
	ck_assert_uint_eq(total_replaced(&outcome), 1);
}
END_TEST

START_TEST(memory_limit_passes_what_does_not_fit)
{
	/* Each stream's block is 34 MiB or more: workspace and operands. */
	static const char *const env[] = {FORCE ";cache.max_mib=100", NULL};
	unharmed("streams", env, NULL, NULL);
	ck_assert_uint_eq(total_replaced(&outcome), 2);
	ck_assert_int_eq(decisions_with(&outcome, "memory"), 1);
}
END_TEST

START_TEST(little_device_memory_is_left_to_the_program)
{
	/* A sixteenth of the device stays untouched. */
	static const char *const env[] = {FORCE ";cache.max_mib=100%", "SOFTCUDA_MEMORY_MIB=100",
	                                  NULL};
	unharmed("streams", env, NULL, NULL);
	ck_assert_uint_eq(total_replaced(&outcome), 2);
	ck_assert_int_eq(decisions_with(&outcome, "memory"), 1);
}
END_TEST

/* ---- files ------------------------------------------------------------------------------------
 */

START_TEST(policy_that_is_no_file_passes_everything_with_one_message)
{
	static const char *const env[] = {"QSHIM_POLICY=/tmp/", NULL};
	unharmed("repeated", env, NULL, NULL);
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_assert_int_eq(decisions_with(&outcome, "policy"), 1);
	ck_assert_int_eq(lines_with("qshim:"), 1);
}
END_TEST

START_TEST(policy_with_an_error_names_the_line_and_passes_everything)
{
	char directory[256], path[300], variable[400];
	make_directory(directory);
	snprintf(path, sizeof path, "%s/policy.ini", directory);
	snprintf(variable, sizeof variable, "QSHIM_POLICY=%s", path);
	FILE *file = fopen(path, "we");
	ck_assert_ptr_nonnull(file);
	fputs("[qshim]\nversion = 1\n[default]\nacton = fp8\n", file);
	fclose(file);
	const char *const env[] = {variable, NULL};
	unharmed("repeated", env, NULL, NULL);
	remove_directory(directory);
	ck_assert_uint_eq(total_replaced(&outcome), 0);
	ck_assert_ptr_nonnull(strstr(outcome.err, "policy.ini:4:"));
	ck_assert_ptr_nonnull(strstr(outcome.err, "'action'"));
}
END_TEST

START_TEST(directory_that_cannot_be_made_does_not_stop_fp8)
{
	static const char *const env[] = {FORCE, "QSHIM_OUT=/proc/nothing/here", NULL};
	unharmed("repeated", env, NULL, NULL);
	ck_assert_int_ge(lines_with("/proc/nothing/here"), 1);
	ck_assert_int_le(lines_with("/proc/nothing/here"), 2); /* decisions, counters */
	ck_assert_int_eq(lines_with("run in fp8"), 1);
}
END_TEST

START_TEST(log_file_that_cannot_be_made_falls_back_to_stderr)
{
	static const char *const env[] = {FORCE, "QSHIM_LOG_FILE=/proc/nothing/log",
	                                  "QSHIM_LOG=dispatch", NULL};
	unharmed("repeated", env, NULL, NULL);
	ck_assert_uint_eq(total_replaced(&outcome), 10);
	ck_assert_int_eq(lines_with("/proc/nothing/log"), 1);
	ck_assert_int_ge(lines_with("TN m=64 n=24 k=96"), 1);
}
END_TEST

static void fill_disk(const char *directory)
{
	static const char block[4096];
	char path[300];
	snprintf(path, sizeof path, "%s/filler", directory);
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	ck_assert_int_ge(fd, 0);
	while (write(fd, block, sizeof block) > 0)
		;
	ck_assert_int_eq(errno, ENOSPC);
	close(fd);
}

START_TEST(full_disk_does_not_stop_fp8)
{
	char directory[256], variable[400];
	make_directory(directory);
	if (mount("tmpfs", directory, "tmpfs", 0, "size=64k,mode=700")) {
		fprintf(stderr, "skipped: full_disk_does_not_stop_fp8 (mount: %s)\n",
		        strerror(errno));
		remove_directory(directory);
		return;
	}
	if (_i)
		fill_disk(directory); /* else the counters are what does not fit */
	snprintf(variable, sizeof variable, "QSHIM_OUT=%s", directory);
	const char *const env[] = {FORCE, variable, "QSHIM_SUMMARY=1", NULL};
	run_scene(&outcome, SHIMMED, env, "repeated", NULL);
	umount(directory);
	remove_directory(directory);
	check_unharmed();
	ck_assert_int_ge(lines_with("No space left on device"), 1);
	ck_assert_int_le(lines_with("No space left on device"), 2);
	ck_assert_ptr_nonnull(strstr(outcome.err, "10 replaced"));
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("faults");
	TCase *tcase = tcase_create("faults");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, failed_allocation_passes_and_is_tried_again, 0, STREAMS + 2);
	tcase_add_test(tcase, failed_module_load_passes_with_one_message);
	tcase_add_test(tcase, failed_launch_passes_and_is_given_up);
	tcase_add_test(tcase, failed_fp8_product_passes_and_is_given_up);
	tcase_add_loop_test(tcase, failures_during_capture_leave_a_right_graph, 0, 3);
	tcase_add_test(tcase, memory_limit_passes_what_does_not_fit);
	tcase_add_test(tcase, little_device_memory_is_left_to_the_program);
	tcase_add_test(tcase, policy_that_is_no_file_passes_everything_with_one_message);
	tcase_add_test(tcase, policy_with_an_error_names_the_line_and_passes_everything);
	tcase_add_test(tcase, directory_that_cannot_be_made_does_not_stop_fp8);
	tcase_add_test(tcase, log_file_that_cannot_be_made_falls_back_to_stderr);
	tcase_add_loop_test(tcase, full_disk_does_not_stop_fp8, 0, 2);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
