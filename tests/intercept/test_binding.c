/* Every hooked function in every frame a program may call it from: the call is seen once, reaches
 * the copy of cuBLAS that its caller means, and gives the result and the status it gives without
 * us. */
#include <stdio.h>
#include <string.h>

#include "tests/intercept/run.h"
#include "tests/support/suite.h"

static const struct {
	const char *name;
	enum qs_entry entry;
	const char *reason; /* for the snippet's product */
} apis[] = {
        {"cublasGemmEx", QS_ENTRY_GEMM_EX, "small"},
        {"cublasGemmEx_64", QS_ENTRY_GEMM_EX_64, "small"},
        {"cublasGemmStridedBatchedEx", QS_ENTRY_GEMM_STRIDED_BATCHED_EX, "batch"},
        {"cublasGemmStridedBatchedEx_64", QS_ENTRY_GEMM_STRIDED_BATCHED_EX_64, "batch"},
        {"cublasLtMatmul", QS_ENTRY_LT_MATMUL, "small"},
        {"cublasGemmBatchedEx", QS_ENTRY_GEMM_BATCHED_EX, "batch"},
        {"cublasGemmBatchedEx_64", QS_ENTRY_GEMM_BATCHED_EX_64, "batch"},
        {"cublasGemmGroupedBatchedEx", QS_ENTRY_GEMM_GROUPED_BATCHED_EX, "batch"},
        {"cublasGemmGroupedBatchedEx_64", QS_ENTRY_GEMM_GROUPED_BATCHED_EX_64, "batch"},
        {"cublasSgemmEx", QS_ENTRY_SGEMM_EX, "unavailable"},
        {"cublasSgemmEx_64", QS_ENTRY_SGEMM_EX_64, "unavailable"},
};
#define APIS ((int)(sizeof apis / sizeof *apis))

static struct run bare, shimmed;

/* Runs a command without and with the shim; what the program sees must be the same. */
static void compare(enum cuda cuda, const char *const *env, const char *const *argv)
{
	run(&bare, &(struct setting){.cuda = cuda, .env = env}, argv);
	run(&shimmed, &(struct setting){.preload = SHIM, .cuda = cuda, .env = env}, argv);
	ck_assert_str_eq(bare.err, "");
	ck_assert_int_eq(bare.status, 0);
	ck_assert(*bare.out);
	ck_assert(!bare.wrote);
	ck_assert_str_eq(shimmed.err, bare.err);
	ck_assert_str_eq(shimmed.out, bare.out);
	ck_assert_int_eq(shimmed.status, bare.status);
}

/* One call of this function was seen, and no other. */
static void expect_one(int api, const char *reason)
{
	ck_assert_int_eq(decisions(&shimmed, NULL, NULL, NULL), 1);
	ck_assert_int_eq(decisions(&shimmed, apis[api].name, reason, ".so.13\""), 1);
	ck_assert_uint_eq(calls(&shimmed, apis[api].entry), 1);
}

static bool succeeded(void)
{
	return strstr(bare.out, "status 0 ") != NULL;
}

/* ---- on the emulation: real products ---- */

static void product(int api, const char *program, const char *frame)
{
	const char *argv[] = {program, frame ? frame : apis[api].name,
	                      frame ? apis[api].name : "product", frame ? "product" : NULL, NULL};
	compare(SOFTCUDA, NULL, argv);
	ck_assert(succeeded());
	expect_one(api, apis[api].reason);
}

START_TEST(call_from_the_executable)
{
	product(_i, "linked", NULL);
}
END_TEST

START_TEST(call_from_a_linked_library)
{
	product(_i, "linked_by_library", NULL);
}
END_TEST

START_TEST(call_of_what_dlsym_found_by_a_handle)
{
	product(_i, "host", "dlsym");
}
END_TEST

START_TEST(call_from_another_object_than_the_one_that_asked_dlsym)
{
	product(_i, "host", "borrowed");
}
END_TEST

START_TEST(call_from_a_plugin_in_a_local_scope)
{
	product(_i, "host", "plugin");
}
END_TEST

START_TEST(call_from_a_constructor)
{
	char api[64];
	snprintf(api, sizeof api, "SNIPPET_API=%s", apis[_i].name);
	const char *env[] = {api, "SNIPPET_MODE=product", NULL};
	/* The program itself calls nothing: its own snippet is asked for what it does not have. */
	const char *argv[] = {"linked_by_constructor", "nothing", "null", NULL};
	run(&bare, &(struct setting){.env = env}, argv);
	run(&shimmed, &(struct setting){.preload = SHIM, .env = env}, argv);
	ck_assert(succeeded());
	ck_assert_str_eq(shimmed.err, bare.err);
	ck_assert_str_eq(shimmed.out, bare.out);
	ck_assert_int_eq(shimmed.status, bare.status);
	expect_one(_i, apis[_i].reason);
}
END_TEST

/* Three calls, copies alternating: a handle that reached the other copy would be refused. */
static void copies(int api, const char *frame, uint64_t new, uint64_t old)
{
	const char *argv[] = {"host", frame, apis[api].name, "product", NULL};
	compare(SOFTCUDA, NULL, argv);
	for (const char *line = bare.out; *line; line = strchr(line, '\n') + 1)
		ck_assert_ptr_nonnull(strstr(line, "status 0 "));
	ck_assert_int_eq(decisions(&shimmed, NULL, NULL, NULL), 2);
	ck_assert_int_eq(decisions(&shimmed, apis[api].name, apis[api].reason, ".so.13\""), 1);
	ck_assert_int_eq(decisions(&shimmed, apis[api].name, apis[api].reason, ".so.12\""), 1);
	ck_assert_uint_eq(calls(&shimmed, apis[api].entry), new + old);
	ck_assert_int_eq(shimmed.counters, 2);
}

START_TEST(two_copies_each_get_their_own_plugins_calls)
{
	copies(_i, "copies-linked", 2, 1);
}
END_TEST

START_TEST(two_copies_each_get_the_calls_of_what_dlsym_found_in_them)
{
	copies(_i, "copies-dlsym", 1, 2);
}
END_TEST

START_TEST(a_copy_too_many_is_called_unseen)
{
	const char *argv[] = {"host", "copies-many", apis[_i].name, "product", NULL};
	const char *env[] = {"SOFTCUDA_INNER_LT=1", NULL};
	compare(SOFTCUDA, env, argv);
	ck_assert(succeeded());
	ck_assert_int_eq(decisions(&shimmed, NULL, NULL, NULL), 0);
}
END_TEST

/* ---- on the toolkit's libraries: a NULL handle ---- */

static void null_handle(int api, const char *program, const char *frame)
{
	const char *argv[] = {program, frame ? frame : apis[api].name,
	                      frame ? apis[api].name : "null", frame ? "null" : NULL, NULL};
	compare(TOOLKIT, NULL, argv);
	ck_assert_ptr_nonnull(strstr(bare.out, "status 1 ")); /* NOT_INITIALIZED */
	expect_one(api, "handle");
}

START_TEST(toolkit_refuses_a_null_handle_from_the_executable)
{
	null_handle(_i, "linked", NULL);
}
END_TEST

START_TEST(toolkit_refuses_a_null_handle_from_a_linked_library)
{
	null_handle(_i, "linked_by_library", NULL);
}
END_TEST

START_TEST(toolkit_refuses_a_null_handle_by_dlsym)
{
	null_handle(_i, "host", "dlsym");
}
END_TEST

START_TEST(toolkit_refuses_a_null_handle_from_another_object)
{
	null_handle(_i, "host", "borrowed");
}
END_TEST

START_TEST(toolkit_refuses_a_null_handle_from_a_plugin)
{
	null_handle(_i, "host", "plugin");
}
END_TEST

/* ---- one call site ---- */

START_TEST(one_call_site_may_call_every_function)
{
	const char *argv[] = {"host", "one-site", NULL};
	if (_i == TOOLKIT && !have_toolkit())
		return;
	compare((enum cuda)_i, NULL, argv);
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_LT_MATMUL), 2);
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 1);
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX_64), 1);
	ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_SGEMM_EX), 1);
}
END_TEST

static TCase *case_of(Suite *suite, const char *name)
{
	TCase *tcase = tcase_create(name);
	tcase_set_timeout(tcase, 300);
	tcase_add_checked_fixture(tcase, NULL, remove_scratch);
	suite_add_tcase(suite, tcase);
	return tcase;
}

static void add_toolkit(Suite *suite)
{
	TCase *tcase = case_of(suite, "toolkit");
	if (!have_toolkit()) {
		printf("no libcublas.so.13 of the toolkit: its binding is not tested\n");
		return;
	}
	tcase_add_loop_test(tcase, toolkit_refuses_a_null_handle_from_the_executable, 0, APIS);
	tcase_add_loop_test(tcase, toolkit_refuses_a_null_handle_from_a_linked_library, 0, APIS);
	tcase_add_loop_test(tcase, toolkit_refuses_a_null_handle_by_dlsym, 0, APIS);
	tcase_add_loop_test(tcase, toolkit_refuses_a_null_handle_from_another_object, 0, APIS);
	tcase_add_loop_test(tcase, toolkit_refuses_a_null_handle_from_a_plugin, 0, APIS);
}

int main(void)
{
	Suite *suite = suite_create("binding");
	TCase *frames = case_of(suite, "frames");
	tcase_add_loop_test(frames, call_from_the_executable, 0, APIS);
	tcase_add_loop_test(frames, call_from_a_linked_library, 0, APIS);
	tcase_add_loop_test(frames, call_of_what_dlsym_found_by_a_handle, 0, APIS);
	tcase_add_loop_test(frames, call_from_another_object_than_the_one_that_asked_dlsym, 0,
	                    APIS);
	tcase_add_loop_test(frames, call_from_a_plugin_in_a_local_scope, 0, APIS);
	tcase_add_loop_test(frames, call_from_a_constructor, 0, APIS);
	TCase *two = case_of(suite, "copies");
	tcase_add_loop_test(two, two_copies_each_get_their_own_plugins_calls, 0, APIS);
	tcase_add_loop_test(two, two_copies_each_get_the_calls_of_what_dlsym_found_in_them, 0,
	                    APIS);
	tcase_add_loop_test(two, a_copy_too_many_is_called_unseen, 0, APIS);
	tcase_add_loop_test(two, one_call_site_may_call_every_function, SOFTCUDA, TOOLKIT + 1);
	add_toolkit(suite);
	return qs_suite_main(suite);
}
