/* The submission epoch: every driver function that submits work is counted once, however the
 * program found it, and nothing else changes; and the epoch is trusted only where that was shown.
 * Programs run under libqshim_open.so, the same objects with a way in for tests, or under
 * libqshim.so. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "intercept/submissions.h"
#include "tests/intercept/run.h"
#include "tests/support/suite.h"

#define OPEN "libqshim_open.so"

#define ONE(name) +1
enum {
	SUBMISSIONS = 0 QS_SUBMISSIONS(ONE)
};
#undef ONE

/* The driver in the global scope, and in that of a plug-in only. */
static const char *const programs[] = {"epoch_linked", "epoch_plugin"};
#define PROGRAMS 2

static struct run bare, shimmed;

static void start(struct run *result, const char *preload, const char *program, const char *mode)
{
	const char *argv[] = {program, mode, NULL};
	run(result, &(struct setting){.preload = preload}, argv);
	ck_assert_str_eq(result->err, "");
	ck_assert_int_eq(result->status, 0);
}

/* The program has nothing to say but the last line. */
static void says(const char *program, const char *mode, const char *expected)
{
	start(&shimmed, OPEN, program, mode);
	ck_assert_str_eq(shimmed.out, expected);
}

static void all_right(const char *program, const char *mode, int names)
{
	char expected[64];
	snprintf(expected, sizeof expected, "%s: %d names, 0 wrong\n", mode, names);
	ck_assert_int_gt(names, 180);
	start(&shimmed, OPEN, program, mode);
	ck_assert_str_eq(shimmed.out, expected);
}

/* ---- every name, every route ---- */

START_TEST(linked_calls_count_once)
{
	all_right(programs[_i], "link", SUBMISSIONS);
}
END_TEST

START_TEST(functions_found_by_dlsym_count_once)
{
	all_right(programs[_i], "dlsym", SUBMISSIONS);
}
END_TEST

START_TEST(functions_found_by_cuGetProcAddress_count_once_in_every_flavour)
{
	all_right(programs[_i], "ask", 8 * SUBMISSIONS);
}
END_TEST

START_TEST(calls_inside_cublas_do_not_count_for_the_program)
{
	all_right(programs[_i], "nested", SUBMISSIONS);
}
END_TEST

START_TEST(other_functions_are_handed_out_untouched)
{
	start(&shimmed, SHIM, programs[_i], "untouched");
	ck_assert_str_eq(shimmed.out, "untouched: 12 names, 0 wrong\n");
}
END_TEST

START_TEST(answers_and_arguments_are_as_without_us)
{
	start(&bare, NULL, programs[_i], "results");
	start(&shimmed, SHIM, programs[_i], "results");
	ck_assert_uint_gt(strlen(bare.out), 10000);
	ck_assert_str_eq(shimmed.out, bare.out);
}
END_TEST

START_TEST(programs_without_a_driver_are_told_that_there_is_none)
{
	start(&bare, NULL, "epoch_plugin", "features");
	start(&shimmed, SHIM, "epoch_plugin", "features");
	ck_assert_ptr_nonnull(strstr(bare.out, "default cuLaunchKernel: NULL, undefined symbol\n"));
	ck_assert_str_eq(shimmed.out, bare.out);
}
END_TEST

/* Our export comes before the library's own function, and must not hide it. */
START_TEST(a_stub_of_the_driver_is_reached_by_its_own_library)
{
	start(&bare, NULL, "epoch_plugin", "stub");
	start(&shimmed, SHIM, "epoch_plugin", "stub");
	ck_assert_ptr_nonnull(strstr(bare.out, "stub 1 12\n"));
	ck_assert_str_eq(shimmed.out, bare.out);
}
END_TEST

START_TEST(a_namesake_in_another_library_is_left_alone)
{
	start(&bare, NULL, "epoch_plugin", "namesake");
	ck_assert_str_eq(bare.out, "27321.5, no library\n");
	says("epoch_plugin", "namesake",
	     "27321.5, a function named like the driver's was found elsewhere\n");
}
END_TEST

/* ---- when ---- */

START_TEST(a_submission_counts_once_it_is_made)
{
	says(programs[_i], "once-made", "during 0, after 1\n");
}
END_TEST

START_TEST(threads_lose_no_count)
{
	says(programs[_i], "threads", "400000 of 400000, arrived 1\n");
}
END_TEST

/* ---- limits and company ---- */

START_TEST(functions_beyond_the_thunks_are_the_drivers_own_and_end_trust)
{
	says(programs[_i], "exhausted",
	     "thunks 256, own 10, wrong 0, trusted 0, more driver functions were looked up than "
	     "there are thunks\n");
}
END_TEST

START_TEST(a_look_up_past_us_ends_trust)
{
	says("epoch_linked", "past",
	     "found 1, counted 0, a driver function was looked up past qshim, with RTLD_NEXT\n");
}
END_TEST

static const char *const orders[] = {"libwrap_launch.so:" OPEN, OPEN ":libwrap_launch.so"};

START_TEST(another_wrapper_of_launches_sees_them_too)
{
	start(&shimmed, orders[_i], "epoch_linked", "wrapped");
	ck_assert_str_eq(shimmed.out,
	                 "arrives 1, counted 1, wrapped 1\nno launch of cuBLAS was seen\n");
}
END_TEST

/* ---- trust ---- */

static void trust(const char *library, const char *policy, const char *knob)
{
	const char *argv[] = {"epoch_trust", library, NULL};
	const char *env[] = {policy, "QSHIM_QUIET=1", knob, NULL};
	run(&shimmed, &(struct setting){.preload = OPEN, .env = env}, argv);
	ck_assert_str_eq(shimmed.err, "");
	ck_assert_int_eq(shimmed.status, 0);
}

#define PASSED "QSHIM_SET=default.action=native"
#define SERVED "QSHIM_SET=default.action=fp8"

START_TEST(copies_and_passed_products_move_the_epoch_and_waits_do_not)
{
	trust(NULL, PASSED, NULL);
	ck_assert_str_eq(shimmed.out,
	                 "start: status 0, moved 0, trusted 0, no launch function was looked up\n"
	                 "copy: status 0, moved 1, trusted 0, no launch function was looked up\n"
	                 "product: status 0, moved 1, trusted 1, no doubt\n"
	                 "again: status 0, moved 1, trusted 1, no doubt\n"
	                 "wait: status 0, moved 0, trusted 1, no doubt\n"
	                 "driver is real 1\n");
}
END_TEST

START_TEST(our_own_products_do_not_move_the_epoch)
{
	trust(NULL, SERVED, NULL);
	ck_assert_uint_eq(shimmed.counter[0].replaced, 2);
	ck_assert_ptr_nonnull(
	        strstr(shimmed.out, "again: status 0, moved 0, trusted 1, no doubt\n"));
	ck_assert_ptr_nonnull(strstr(shimmed.out, "driver is real 1\n"));
}
END_TEST

START_TEST(without_a_launch_of_cublas_there_is_no_trust)
{
	trust(NULL, PASSED, "SOFTCUDA_NULL_PRODUCTS=1");
	ck_assert_ptr_nonnull(
	        strstr(shimmed.out, "again: status 0, moved 1, trusted 0, no launch"));
}
END_TEST

START_TEST(a_libcudart_that_did_not_ask_is_not_trusted)
{
	trust("libcudart.so.12", PASSED, NULL);
	ck_assert_ptr_nonnull(strstr(shimmed.out, "again: status 0, moved 1, trusted 0, a loaded "
	                                          "libcudart did not ask for the driver\n"));
}
END_TEST

START_TEST(what_was_counted_is_said_at_exit)
{
	const char *argv[] = {"epoch_trust", NULL};
	const char *env[] = {PASSED, "QSHIM_LOG=info", NULL};
	run(&shimmed, &(struct setting){.preload = OPEN, .env = env}, argv);
	ck_assert_int_eq(shimmed.status, 0);
	ck_assert_ptr_nonnull(strstr(shimmed.err, "submissions seen: 3 by the program, 2 inside "
	                                          "cuBLAS, 2 products passed; none is"));
}
END_TEST

/* ---- cost ---- */

static double figure(const char *name)
{
	const char *line = strstr(shimmed.out, name);
	ck_assert_ptr_nonnull(line);
	return strtod(line + strlen(name), NULL);
}

/* The bound is generous, as machines that run tests are busy. */
START_TEST(a_counted_launch_costs_little)
{
	start(&shimmed, SHIM, "epoch_linked", "cost");
	printf("launch: %.1f ns direct; counted %.1f ns more when linked, %.1f when looked up\n",
	       figure("direct "), figure("linked "), figure("looked up "));
	if (*preload_first()) /* a sanitizer's cost is not ours */
		return;
	ck_assert_double_lt(figure("linked "), 100.0);
	ck_assert_double_lt(figure("looked up "), 100.0);
}
END_TEST

static TCase *add(Suite *suite, const char *name)
{
	TCase *tcase = tcase_create(name);
	tcase_set_timeout(tcase, 300);
	tcase_add_checked_fixture(tcase, NULL, remove_scratch);
	suite_add_tcase(suite, tcase);
	return tcase;
}

static void add_routes(TCase *tcase)
{
	tcase_add_loop_test(tcase, linked_calls_count_once, 0, PROGRAMS);
	tcase_add_loop_test(tcase, functions_found_by_dlsym_count_once, 0, PROGRAMS);
	tcase_add_loop_test(tcase, functions_found_by_cuGetProcAddress_count_once_in_every_flavour,
	                    0, PROGRAMS);
	tcase_add_loop_test(tcase, calls_inside_cublas_do_not_count_for_the_program, 0, PROGRAMS);
	tcase_add_loop_test(tcase, other_functions_are_handed_out_untouched, 0, PROGRAMS);
	tcase_add_loop_test(tcase, answers_and_arguments_are_as_without_us, 0, PROGRAMS);
	tcase_add_test(tcase, programs_without_a_driver_are_told_that_there_is_none);
	tcase_add_test(tcase, a_stub_of_the_driver_is_reached_by_its_own_library);
	tcase_add_test(tcase, a_namesake_in_another_library_is_left_alone);
	tcase_add_loop_test(tcase, a_submission_counts_once_it_is_made, 0, PROGRAMS);
	tcase_add_loop_test(tcase, threads_lose_no_count, 0, PROGRAMS);
}

static void add_trust(TCase *tcase)
{
	tcase_add_loop_test(tcase, functions_beyond_the_thunks_are_the_drivers_own_and_end_trust, 0,
	                    PROGRAMS);
	tcase_add_test(tcase, a_look_up_past_us_ends_trust);
	tcase_add_loop_test(tcase, another_wrapper_of_launches_sees_them_too, 0, 2);
	tcase_add_test(tcase, copies_and_passed_products_move_the_epoch_and_waits_do_not);
	tcase_add_test(tcase, our_own_products_do_not_move_the_epoch);
	tcase_add_test(tcase, without_a_launch_of_cublas_there_is_no_trust);
	tcase_add_test(tcase, a_libcudart_that_did_not_ask_is_not_trusted);
	tcase_add_test(tcase, what_was_counted_is_said_at_exit);
	tcase_add_test(tcase, a_counted_launch_costs_little);
}

int main(void)
{
	Suite *suite = suite_create("epoch");
	add_routes(add(suite, "routes"));
	add_trust(add(suite, "trust"));
	return qs_suite_main(suite);
}
