/* What is tracked through the driver's functions: each form of each (track_forms.c), then kernels,
 * graphs and products on the emulation (track_kernels.c). Programs run under libqshim_open.so. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/intercept/run.h"
#include "tests/support/suite.h"

#define OPEN   "libqshim_open.so"
#define SCENES 37 /* of track_kernels */

static struct run result;

static void start(const char *program, const char *mode)
{
	const char *argv[] = {program, mode, NULL};
	const char *env[] = {"QSHIM_QUIET=1", "QSHIM_SET=default.action=native", NULL};
	run(&result, &(struct setting){.preload = OPEN, .env = env}, argv);
	ck_assert_str_eq(result.err, "");
}

/* The program has nothing to complain of: its one line says so. */
static void all_right(const char *program, const char *mode)
{
	start(program, mode);
	ck_assert_msg(!result.status && strstr(result.out, ", 0 wrong\n"), "%s: %s", mode,
	              result.out);
}

static const char *const forms[] = {"name",   "ask",     "unknown", "failed", "inside", "late",
                                    "shared", "handles", "ended",   "reused", "forked", "once"};
#define FORMS (int)(sizeof forms / sizeof *forms)

START_TEST(every_form_of_every_function_hits_what_it_writes)
{
	all_right("track_forms", forms[_i]);
}
END_TEST

/* The program lists its scenes. */
START_TEST(kernels_graphs_and_products_hit_what_they_write)
{
	char scene[64] = "", *line;
	int lines = 0;
	start("track_kernels", NULL);
	for (line = strtok(result.out, "\n"); line; line = strtok(NULL, "\n"))
		if (lines++ == _i)
			snprintf(scene, sizeof scene, "%s", line);
	ck_assert_int_eq(lines, SCENES);
	all_right("track_kernels", scene);
}
END_TEST

static double figure(const char *name)
{
	const char *line = strstr(result.out, name);
	ck_assert_ptr_nonnull(line);
	return strtod(line + strlen(name), NULL);
}

/* The bound is what was promised for an idle machine. */
START_TEST(a_launch_costs_little_while_a_thousand_ranges_are_watched)
{
	start("track_forms", "cost");
	printf("launch of 16 arguments: %.1f ns, and where 1000 ranges are watched %.1f more, %.1f "
	       "with four addresses among them, %.1f with one of them, %.1f with 16\n",
	       figure("nothing watched "), figure("no address "), figure("four addresses near "),
	       figure("one watched "), figure("all watched "));
	if (*preload_first()) /* a sanitizer's cost is not ours */
		return;
	ck_assert_double_lt(figure("no address "), 500.0);
	ck_assert_double_lt(figure("four addresses near "), 500.0);
	ck_assert_double_lt(figure("one watched "), 500.0);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("track");
	TCase *tcase = tcase_create("track");
	tcase_set_timeout(tcase, 300);
	tcase_add_checked_fixture(tcase, NULL, remove_scratch);
	tcase_add_loop_test(tcase, every_form_of_every_function_hits_what_it_writes, 0, FORMS);
	tcase_add_loop_test(tcase, kernels_graphs_and_products_hit_what_they_write, 0, SCENES);
	tcase_add_test(tcase, a_launch_costs_little_while_a_thousand_ranges_are_watched);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
