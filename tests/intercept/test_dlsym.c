/* The exported dlsym answers as libc's would in a process without us, whoever asks: feature tests,
 * ordinary names, scopes, and other preloaded libraries in either order. */
#include <stdio.h>
#include <string.h>

#include "tests/intercept/run.h"
#include "tests/support/suite.h"

static struct run bare, shimmed;

/* Preloads `with` and `without` the shim; what the program sees must be the same. */
static void compare(const char *without, const char *with, const char *const *argv)
{
	run(&bare, &(struct setting){.preload = without}, argv);
	run(&shimmed, &(struct setting){.preload = with}, argv);
	ck_assert_str_eq(bare.err, "");
	ck_assert_int_eq(bare.status, 0);
	ck_assert(*bare.out);
	ck_assert_str_eq(shimmed.err, bare.err);
	ck_assert_str_eq(shimmed.out, bare.out);
	ck_assert_int_eq(shimmed.status, 0);
}

static void compare_frame(const char *without, const char *with, const char *frame)
{
	const char *argv[] = {"host", frame, NULL};
	compare(without, with, argv);
}

START_TEST(program_without_cublas_is_told_that_there_is_none)
{
	compare_frame(NULL, SHIM, "features");
	ck_assert_ptr_nonnull(strstr(shimmed.out, "default cublasGemmEx: NULL, undefined symbol"));
	ck_assert_ptr_nonnull(strstr(shimmed.out, "next cublasGemmEx: NULL, undefined symbol"));
	ck_assert_ptr_nonnull(strstr(shimmed.out, "self cublasLtMatmul: NULL, undefined symbol"));
	ck_assert(!shimmed.wrote);
}
END_TEST

START_TEST(cublas_in_a_local_scope_is_not_in_the_global_one)
{
	compare_frame(NULL, SHIM, "features-local");
	ck_assert_ptr_nonnull(strstr(shimmed.out, "default cublasGemmEx: NULL"));
	ck_assert_ptr_nonnull(strstr(shimmed.out, "handle cublasGemmEx: found"));
	ck_assert_ptr_nonnull(strstr(shimmed.out, "default cublasGemmEx: found"));
}
END_TEST

START_TEST(ordinary_names_are_found_as_ever)
{
	compare_frame(NULL, SHIM, "ordinary");
	ck_assert_ptr_nonnull(strstr(shimmed.out, "default getpid: found"));
	ck_assert_ptr_nonnull(strstr(shimmed.out, "getppid agrees"));
}
END_TEST

START_TEST(default_scope_of_a_plugin_is_its_own)
{
	compare_frame(NULL, SHIM, "scope");
	ck_assert_ptr_nonnull(strstr(shimmed.out, "inside found"));
	ck_assert_ptr_nonnull(strstr(shimmed.out, "outside NULL"));
	ck_assert_ptr_nonnull(strstr(shimmed.out, "cublas NULL"));
}
END_TEST

/* ---- other preloaded libraries, before and after us ---- */

static const char *const calls_orders[] = {"libwrap_calls.so:" SHIM, SHIM ":libwrap_calls.so"};
static const char *const dlsym_orders[] = {"libwrap_dlsym.so:" SHIM, SHIM ":libwrap_dlsym.so"};
static const char *const gemm_orders[] = {"libwrap_gemm.so:" SHIM, SHIM ":libwrap_gemm.so"};

START_TEST(wrappers_of_libc_find_the_next_function)
{
	compare_frame("libwrap_calls.so", calls_orders[_i], "ordinary");
}
END_TEST

START_TEST(another_dlsym_sees_the_same_look_ups)
{
	compare_frame("libwrap_dlsym.so", dlsym_orders[_i], "wrapped-count");
	ck_assert_ptr_nonnull(strstr(shimmed.out, "seen 1"));
}
END_TEST

START_TEST(another_dlsym_does_not_end_the_program)
{
	const char *argv[] = {"host", "dlsym", "cublasGemmEx", "product", NULL};
	compare("libwrap_dlsym.so", dlsym_orders[_i], argv);
	ck_assert_ptr_nonnull(strstr(shimmed.out, "status 0 "));
	if (_i == 1) /* behind another dlsym that forwards by itself, we are not asked */
		ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 1);
}
END_TEST

START_TEST(a_wrapper_of_the_function_is_passed_once_and_so_are_we)
{
	static const char *const programs[] = {"linked", "linked_by_library"};
	for (int i = 0; i < 2; i++) {
		const char *argv[] = {programs[i], "cublasGemmEx", "product", NULL};
		compare("libwrap_gemm.so", gemm_orders[_i], argv);
		ck_assert_ptr_nonnull(strstr(shimmed.out, "wrapped\n"));
		ck_assert_ptr_nonnull(strstr(shimmed.out, "status 0 "));
		ck_assert_uint_eq(calls(&shimmed, QS_ENTRY_GEMM_EX), 1);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("dlsym");
	TCase *tcase = tcase_create("dlsym");
	tcase_set_timeout(tcase, 300);
	tcase_add_checked_fixture(tcase, NULL, remove_scratch);
	tcase_add_test(tcase, program_without_cublas_is_told_that_there_is_none);
	tcase_add_test(tcase, cublas_in_a_local_scope_is_not_in_the_global_one);
	tcase_add_test(tcase, ordinary_names_are_found_as_ever);
	tcase_add_test(tcase, default_scope_of_a_plugin_is_its_own);
	tcase_add_loop_test(tcase, wrappers_of_libc_find_the_next_function, 0, 2);
	tcase_add_loop_test(tcase, another_dlsym_sees_the_same_look_ups, 0, 2);
	tcase_add_loop_test(tcase, another_dlsym_does_not_end_the_program, 0, 2);
	tcase_add_loop_test(tcase, a_wrapper_of_the_function_is_passed_once_and_so_are_we, 0, 2);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
