/* note/shadow.c, its lines of the decision log and its table at exit. */
#include "note_support.h"

#include <math.h>
#include <stdlib.h>

static char text[1 << 20]; /* a file read whole */

static const char *log_text(void)
{
	ck_assert_int_ge(read_file(out_file("decisions", getpid(), "jsonl"), text, sizeof text), 0);
	return text;
}

static void start(void)
{
	static struct qs_options options;
	options = out_options();
	options.summary = QS_SUMMARY_ALWAYS;
	qs_note_start(&options);
}

/* A child forgets the rows, and so does tear_down(): a leak checker shall still see these. */
static void end(void)
{
	static const struct qs_shadow_row *volatile kept;
	kept = qs_shadow_rows();
	(void)kept;
	tear_down();
}

static struct qs_key key;

static struct qs_shadow_row *row_of(const char *layer, const char *candidate)
{
	key = linear_key(64, 48, 128);
	struct qs_shadow_row *row = qs_note_shadow_row(&key, layer, candidate);
	ck_assert_ptr_nonnull(row);
	return row;
}

static const struct qs_shadow_error usual = {
        .sqnr = 31.25, .error = 0.0125, .amax = 40, .saturated = -1, .flushed = -1};

static void add(struct qs_shadow_row *row, double sqnr)
{
	struct qs_shadow_error error = usual;
	error.sqnr = sqnr;
	qs_note_shadow(row, &error);
}

START_TEST(a_key_has_a_row_for_each_candidate)
{
	struct qs_key same = linear_key(64, 48, 128), other = linear_key(64, 48, 144);
	start();
	struct qs_shadow_row *row = row_of(NULL, "fp8 row");
	ck_assert_ptr_eq(qs_note_shadow_row(&same, NULL, "fp8 row"), row);
	ck_assert_ptr_ne(qs_note_shadow_row(&same, NULL, "fp8 tensor"), row);
	ck_assert_ptr_ne(qs_note_shadow_row(&other, NULL, "fp8 row"), row);
	ck_assert_ptr_eq(qs_note_shadow_row(&same, NULL, "fp8 row"), row);
}
END_TEST

START_TEST(a_line_has_every_member)
{
	struct qs_shadow_error error = usual;
	start();
	struct qs_shadow_row *row = row_of("mlp.up_proj", "fp8 row");
	key.role = QS_ROLE_FWD;
	key.weight = 8;
	error.saturated = 0;
	error.flushed = 0.000244140625;
	qs_note_shadow(row, &error);
	const char *line = line_at(log_text(), 1);
	ck_assert_ptr_nonnull(line);
	ck_assert_str_eq(json_member(line, "v"), "1");
	ck_assert_str_eq(json_member(line, "rank"), "0");
	ck_assert_str_eq(json_member(line, "t"), "shadow");
	ck_assert_str_eq(json_member(line, "key"), "TN m=64 n=48 k=128 bf16 fwd");
	ck_assert_str_eq(json_member(line, "role"), "fwd");
	ck_assert_str_eq(json_member(line, "weight"), "7");
	ck_assert_str_eq(json_member(line, "layer"), "mlp.up_proj");
	ck_assert_str_eq(json_member(line, "candidate"), "fp8 row");
	ck_assert_str_eq(json_member(line, "checks"), "1");
	ck_assert_str_eq(json_member(line, "sqnr"), "31.25");
	ck_assert_str_eq(json_member(line, "least"), "31.25");
	ck_assert_str_eq(json_member(line, "error"), "0.0125");
	ck_assert_str_eq(json_member(line, "amax"), "40");
	ck_assert_str_eq(json_member(line, "saturated"), "0");
	ck_assert_str_eq(json_member(line, "flushed"), "0.000244141");
}
END_TEST

START_TEST(what_is_not_known_is_left_out)
{
	char value[16];
	struct qs_shadow_error error = usual;
	start();
	error.amax = INFINITY;
	error.error = NAN;
	qs_note_shadow(row_of(NULL, "nf4"), &error);
	const char *line = line_at(log_text(), 1);
	static const char *const names[] = {"role",      "weight",  "layer",
	                                    "saturated", "flushed", "amax"};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		ck_assert_int_eq(json_get(line, names[i], value, sizeof value), 0);
}
END_TEST

START_TEST(a_row_is_logged_when_its_checks_have_doubled_and_at_exit)
{
	static const char *const checks[] = {"1", "2", "4", "8", "10"};
	start();
	struct qs_shadow_row *row = row_of(NULL, "nf4");
	for (int i = 0; i < 10; i++)
		add(row, 30 + i);
	ck_assert_uint_eq(count_lines(log_text()), 5);
	qs_note_shadow_report();
	qs_note_shadow_report();
	ck_assert_uint_eq(count_lines(log_text()), 6);
	for (size_t i = 0; i < 5; i++)
		ck_assert_str_eq(json_member(line_at(text, i + 1), "checks"), checks[i]);
	ck_assert_str_eq(json_member(line_at(text, 5), "sqnr"), "39");
	ck_assert_str_eq(json_member(line_at(text, 5), "least"), "30");
}
END_TEST

START_TEST(a_row_keeps_the_worst_of_everything)
{
	static const struct qs_shadow_error errors[] = {
	        {30, 0.1, 5, 0, 0.5}, {-7, 0.3, 9, 0.25, 0.1}, {20, 0.2, 7, 0.1, 0.2}};
	start();
	struct qs_shadow_row *row = row_of(NULL, "fp8 tensor");
	for (int i = 0; i < 3; i++)
		qs_note_shadow(row, &errors[i]);
	ck_assert(row->last == 20 && row->least == -7 && row->error == 0.3 && row->amax == 9);
	ck_assert(row->saturated == 0.25 && row->flushed == 0.5 && row->checks == 3);
}
END_TEST

START_TEST(the_table_begins_with_the_worst)
{
	struct qs_shadow_error error = usual;
	start();
	add(row_of("a.layer", "fp8 tensor"), 30);
	error.sqnr = 18.04;
	error.saturated = 0.001;
	error.flushed = 0;
	qs_note_shadow(row_of("a.layer", "nf4"), &error);
	add(row_of("a.layer", "fp8 row"), 33);
	qs_note_shadow_row(&key, NULL, "never measured");
	qs_note_summary();
	ck_assert_str_eq(strchr(stderr_text(), '\n') + 1,
	                 "qshim: shadow mode: what lower precision would have done to products, "
	                 "worst first\n"
	                 "qshim:  SQNR dB    least   error %       amax    sat. % flushed %   "
	                 "checks  candidate         product\n"
	                 "qshim:     18.0     18.0     1.250         40    0.1000    0.0000        "
	                 "1  nf4               a.layer  TN m=64 n=48 k=128 bf16\n"
	                 "qshim:     30.0     30.0     1.250         40         -         -        "
	                 "1  fp8 tensor        a.layer  TN m=64 n=48 k=128 bf16\n"
	                 "qshim:     33.0     33.0     1.250         40         -         -        "
	                 "1  fp8 row           a.layer  TN m=64 n=48 k=128 bf16\n");
}
END_TEST

START_TEST(the_table_has_forty_rows_and_says_how_many_more)
{
	static struct qs_key keys[45];
	start();
	for (int i = 0; i < 45; i++) {
		keys[i] = linear_key(64 + i, 48, 128);
		add(qs_note_shadow_row(&keys[i], NULL, "fp8 row"), 20 + (i * 7) % 45);
	}
	qs_note_summary();
	const char *err = stderr_text();
	ck_assert_uint_eq(count_lines(err), 44);
	ck_assert_ptr_nonnull(strstr(err, "qshim: and 5 more, in the decision log\n"));
	for (size_t i = 0; i < 40; i++)
		ck_assert_int_eq(atoi(line_at(err, i + 3) + 6), 20 + (int)i);
}
END_TEST

START_TEST(without_rows_there_is_no_table)
{
	start();
	qs_note_summary();
	ck_assert_ptr_null(strstr(stderr_text(), "shadow"));
}
END_TEST

START_TEST(a_forked_child_has_no_rows)
{
	start();
	add(row_of(NULL, "nf4"), 30);
	fflush(NULL);
	pid_t child = fork();
	if (!child) {
		qs_note_forked();
		_exit(qs_shadow_rows() != NULL);
	}
	wait_for(child);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("note_shadow");
	TCase *tcase = tcase_create("shadow");
	tcase_add_checked_fixture(tcase, set_up, end);
	tcase_add_test(tcase, a_key_has_a_row_for_each_candidate);
	tcase_add_test(tcase, a_line_has_every_member);
	tcase_add_test(tcase, what_is_not_known_is_left_out);
	tcase_add_test(tcase, a_row_is_logged_when_its_checks_have_doubled_and_at_exit);
	tcase_add_test(tcase, a_row_keeps_the_worst_of_everything);
	tcase_add_test(tcase, the_table_begins_with_the_worst);
	tcase_add_test(tcase, the_table_has_forty_rows_and_says_how_many_more);
	tcase_add_test(tcase, without_rows_there_is_no_table);
	tcase_add_test(tcase, a_forked_child_has_no_rows);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
