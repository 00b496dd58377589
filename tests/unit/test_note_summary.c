/* note/summary.c: the notice and the table at exit. */
#include "note_support.h"

#include <pthread.h>

#define NOTICE_FP8                                                                                 \
	"qshim: bf16 products run in fp8 where faster or where the policy says so; QSHIM=off "     \
	"disables, QSHIM_QUIET=1 hides this line\n"

static struct qs_options started; /* by start() */

static void start(enum qs_summary summary)
{
	started = note_options();
	started.summary = summary;
	started.max_keys = 100;
	qs_note_start(&started);
}

/* A slot of `m` times a million operations a call, and its calls. */
static struct qs_counter *count(const char *text, int64_t m, enum qs_action action,
                                enum qs_reason reason, uint64_t calls, uint64_t replaced)
{
	struct qs_key key = linear_key(m, 1000, 500);
	const char *rule = reason == QS_REASON_RULE ? "mlp" : "default";
	struct qs_counter *counter = qs_counter_new(text, &key, action, reason, rule, NULL);
	atomic_fetch_add(&counter->calls, calls);
	atomic_fetch_add(&counter->replaced, replaced);
	return counter;
}

START_TEST(the_notice_is_written_once)
{
	start(QS_SUMMARY_NEVER);
	for (int i = 0; i < 3; i++)
		qs_note_notice(QS_ACTION_FP8);
	ck_assert_str_eq(stderr_text(), NOTICE_FP8);
}
END_TEST

START_TEST(kept_operands_have_a_line_for_each_form)
{
	start(QS_SUMMARY_ALWAYS);
	count("TN", 1, QS_ACTION_NF4, QS_REASON_RULE, 1, 1);
	qs_counter_kept(2, 3 << 20);
	qs_counter_kept(2, -(1 << 20));
	qs_counter_kept_use(2, true);
	qs_counter_kept(0, 1 << 20);
	qs_counter_kept(0, -(1 << 20));
	qs_counter_kept_use(0, false);
	qs_counter_kept_use(0, false);
	qs_counter_kept_use(3, false);
	qs_counter_escaped(3, 1);
	qs_counter_kept_use(1, false);
	qs_counter_escaped(1, 2);
	qs_counter_escaped(1, 1);
	qs_note_summary();
	ck_assert_ptr_nonnull(strstr(stderr_text(), "qshim: kept as nf4: 2.0 MiB of weights, used "
	                                            "by 1 product, 1 of them after a check\n"));
	ck_assert_ptr_nonnull(strstr(stderr_text(), "qshim: kept as fp8: 0.0 MiB of weights, used "
	                                            "by 2 products, 0 of them after a check\n"));
	ck_assert_ptr_nonnull(strstr(
	        stderr_text(), "kept as fp8 tiles: 0.0 MiB of weights, used by 1 product, 0 of "
	                       "them after a check, found changed unannounced 1 time\n"));
	ck_assert_ptr_nonnull(strstr(stderr_text(), "them after a check, found changed unannounced "
	                                            "3 times\n"));
}
END_TEST

START_TEST(memory_that_is_ours_has_a_line)
{
	start(QS_SUMMARY_ALWAYS);
	count("TN", 1, QS_ACTION_FP8, QS_REASON_RULE, 1, 1);
	if (_i)
		qs_counter_kept(2, 3 << 20);
	qs_note_memory(5 << 20);
	qs_note_summary();
	ck_assert_ptr_nonnull(strstr(
	        stderr_text(),
	        _i ? "qshim: 5.0 MiB of device memory beside the program's own: 3.0 MiB of kept "
	             "weights, 2.0 MiB to work in\n"
	           : "qshim: 5.0 MiB of device memory beside the program's own: 0.0 MiB of kept "
	             "weights, 5.0 MiB to work in\n"));
}
END_TEST

/* A thread may be making a copy. */
START_TEST(memory_is_never_less_than_nothing)
{
	start(QS_SUMMARY_ALWAYS);
	count("TN", 1, QS_ACTION_FP8, QS_REASON_RULE, 1, 1);
	qs_counter_kept(2, 3 << 20);
	qs_note_memory(2 << 20);
	qs_note_summary();
	ck_assert_ptr_nonnull(strstr(stderr_text(), ": 2.0 MiB of kept weights, 0.0 MiB to"));
}
END_TEST

START_TEST(without_memory_of_ours_there_is_no_line)
{
	start(QS_SUMMARY_ALWAYS);
	if (_i) {
		qs_note_memory(5 << 20);
		qs_note_forked();
		start(QS_SUMMARY_ALWAYS);
	}
	count("TN", 1, QS_ACTION_NATIVE, QS_REASON_SMALL, 1, 0);
	qs_note_summary();
	ck_assert_ptr_null(strstr(stderr_text(), "device memory"));
}
END_TEST

START_TEST(steps_have_a_line_with_the_share_of_products)
{
	start(QS_SUMMARY_ALWAYS);
	count("TN", 1, QS_ACTION_NATIVE, QS_REASON_SMALL, 1, 0);
	qs_note_steps(1, 7, 0.0015);
	if (_i)
		qs_note_share(0.2345, 2, _i - 1);
	qs_note_summary();
	ck_assert_ptr_nonnull(strstr(
	        stderr_text(),
	        (const char *[]){"qshim: 1 step of 7 products, 1.500 ms each\n",
	                         "qshim: 1 step of 7 products, 1.500 ms each, 23.4 % of it in "
	                         "products\n",
	                         "qshim: 1 step of 7 products, 1.500 ms each, 23.4 % of it in "
	                         "products (1 of 3 keys was not timed)\n",
	                         "qshim: 1 step of 7 products, 1.500 ms each, 23.4 % of it in "
	                         "products (2 of 4 keys were not timed)\n"}[_i]));
}
END_TEST

START_TEST(a_forked_child_has_no_steps)
{
	start(QS_SUMMARY_ALWAYS);
	qs_note_steps(10, 7, 0.0015);
	qs_note_share(0.5, 2, 0);
	qs_note_forked();
	start(QS_SUMMARY_ALWAYS);
	count("TN", 1, QS_ACTION_NATIVE, QS_REASON_SMALL, 1, 0);
	qs_note_summary();
	ck_assert_ptr_null(strstr(stderr_text(), " steps of "));
	qs_note_steps(20, 7, 0.0015);
	qs_note_summary();
	ck_assert_ptr_nonnull(
	        strstr(stderr_text(), "qshim: 20 steps of 7 products, 1.500 ms each\n"));
}
END_TEST

START_TEST(quiet_hides_the_notice)
{
	struct qs_options options = note_options();
	options.quiet = true;
	qs_note_start(&options);
	qs_note_notice(QS_ACTION_FP8);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

START_TEST(only_lower_precision_is_announced)
{
	start(QS_SUMMARY_NEVER);
	qs_note_notice(QS_ACTION_BF16);
	qs_note_notice(QS_ACTION_NATIVE);
	ck_assert_str_eq(stderr_text(), "");
	qs_note_notice(QS_ACTION_NF4);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(stderr_text(), "NF4"));
}
END_TEST

START_TEST(levels_and_log_file_do_not_hide_the_notice)
{
	struct qs_options options = note_options();
	options.log_levels = 0;
	snprintf(options.log_file, sizeof options.log_file, "%s/log", scratch);
	qs_note_start(&options);
	qs_note_notice(QS_ACTION_FP8);
	ck_assert_str_eq(stderr_text(), NOTICE_FP8);
}
END_TEST

static void *announce(void *unused)
{
	(void)unused;
	qs_note_notice(QS_ACTION_FP8);
	return NULL;
}

START_TEST(threads_announce_together_once)
{
	pthread_t threads[8];
	start(QS_SUMMARY_NEVER);
	for (int i = 0; i < 8; i++)
		ck_assert_int_eq(pthread_create(&threads[i], NULL, announce, NULL), 0);
	for (int i = 0; i < 8; i++)
		pthread_join(threads[i], NULL);
	ck_assert_str_eq(stderr_text(), NOTICE_FP8);
}
END_TEST

START_TEST(the_table_shows_totals_and_rows)
{
	char expected[2048];
	start(QS_SUMMARY_ALWAYS);
	struct qs_counter *mlp =
	        count("TN m=900 n=1000 k=500 bf16 fwd", 900, QS_ACTION_FP8, QS_REASON_RULE, 10, 8);
	count("TN m=100 n=1000 k=500 bf16 fwd", 100, QS_ACTION_NATIVE, QS_REASON_SMALL, 10, 0);
	atomic_fetch_add(&mlp->bytes, 3 << 20);
	atomic_fetch_add(&mlp->late, 2);
	qs_note_summary();
	snprintf(expected, sizeof expected,
	         "qshim: 20 products seen by %s (pid %d, rank 0), 8 replaced (72.0 %% of the "
	         "FLOPs), "
	         "3.0 MiB quantised\n"
	         "qshim: FLOPs%%       calls    replaced     late        MiB  action  reason       "
	         "      "
	         " product\n"
	         "qshim:   90.0          10           8        2        3.0  fp8     rule mlp      "
	         "     "
	         " TN m=900 n=1000 k=500 bf16 fwd\n"
	         "qshim:   10.0          10           0        0        0.0  native  small         "
	         "     "
	         " TN m=100 n=1000 k=500 bf16 fwd\n"
	         "qshim: late: passed although planned otherwise; QSHIM_LOG=dispatch says why\n",
	         program_invocation_short_name, getpid());
	ck_assert_str_eq(stderr_text(), expected);
}
END_TEST

START_TEST(the_table_is_plain_text)
{
	start(QS_SUMMARY_ALWAYS);
	count("key", 100, QS_ACTION_FP8, QS_REASON_AUTO, 1, 1);
	qs_note_summary();
	for (const char *at = stderr_text(); *at; at++)
		ck_assert((*at >= ' ' && *at < 0x7f) || *at == '\n');
	ck_assert_ptr_null(strstr(caught, "late:"));
}
END_TEST

START_TEST(rows_are_sorted_by_work)
{
	start(QS_SUMMARY_ALWAYS);
	count("small", 10, QS_ACTION_NATIVE, QS_REASON_SMALL, 1, 0);
	count("large", 1000, QS_ACTION_FP8, QS_REASON_AUTO, 1, 1);
	count("often", 10, QS_ACTION_NATIVE, QS_REASON_SMALL, 50, 0);
	count("never", 100000, QS_ACTION_FP8, QS_REASON_AUTO, 0, 0);
	qs_note_summary();
	const char *text = stderr_text();
	const char *large = strstr(text, "  large\n"), *often = strstr(text, "  often\n");
	const char *small = strstr(text, "  small\n");
	ck_assert(large && often && small);
	ck_assert(large < often && often < small);
	ck_assert_ptr_null(strstr(text, "never"));
}
END_TEST

START_TEST(forty_rows_are_shown_and_the_rest_counted)
{
	char name[16];
	start(QS_SUMMARY_ALWAYS);
	for (int i = 1; i <= 55; i++) {
		snprintf(name, sizeof name, "key%02d", (i * 13) % 55); /* in no order */
		count(name, 1 + (i * 13) % 55, QS_ACTION_NATIVE, QS_REASON_SMALL, 1, 0);
	}
	qs_note_summary();
	const char *text = stderr_text();
	ck_assert_uint_eq(count_lines(text), 2 + 40 + 1);
	for (int i = 0; i < 40; i++) {
		snprintf(name, sizeof name, "  key%02d\n", 54 - i);
		ck_assert_ptr_nonnull(strstr(line_at(text, (size_t)(2 + i)), name));
		ck_assert_ptr_eq(strchr(line_at(text, (size_t)(2 + i)), '\n'),
		                 strstr(text, name) + strlen(name) - 1);
	}
	ck_assert_ptr_nonnull(strstr(text, "\nqshim: and 15 more\n"));
	ck_assert_ptr_nonnull(strstr(text, "qshim: 55 products seen"));
}
END_TEST

START_TEST(the_widest_table_fits)
{
	char name[200];
	start(QS_SUMMARY_ALWAYS);
	memset(name, 'x', sizeof name - 1);
	name[sizeof name - 1] = '\0';
	for (int i = 0; i < 60; i++) {
		struct qs_key key = linear_key(100, 100, 100);
		struct qs_counter *counter =
		        qs_counter_new(name, &key, QS_ACTION_NATIVE, QS_REASON_RULE, name, name);
		atomic_store(&counter->calls, UINT64_MAX / 64);
		atomic_store(&counter->replaced, UINT64_MAX / 64);
		atomic_store(&counter->bytes, UINT64_MAX / 64);
		atomic_store(&counter->late, UINT64_MAX / 64);
	}
	qs_note_summary();
	ck_assert_uint_eq(count_lines(stderr_text()), 2 + 40 + 2);
	ck_assert_ptr_nonnull(strstr(caught, "\nqshim: late:"));
}
END_TEST

START_TEST(without_products_one_line_only_if_asked)
{
	start(QS_SUMMARY_ALWAYS);
	count("never called", 10, QS_ACTION_NATIVE, QS_REASON_SMALL, 0, 0);
	qs_note_summary();
	ck_assert_str_eq(stderr_text(), "qshim: no matrix product was seen\n");
}
END_TEST

START_TEST(no_table_unless_wanted)
{
	qs_note_summary(); /* not started */
	start(QS_SUMMARY_NEVER);
	count("key", 10, QS_ACTION_NATIVE, QS_REASON_SMALL, 1, 0);
	qs_note_summary();
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

/* What is left of the summary when stderr is a terminal. */
static ssize_t summary_on_terminal(char *text, size_t size)
{
	int controller = posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
	ck_assert(controller >= 0 && !grantpt(controller) && !unlockpt(controller));
	int terminal = open(ptsname(controller), O_RDWR | O_NOCTTY | O_CLOEXEC);
	ck_assert_int_ge(terminal, 0);
	dup2(terminal, STDERR_FILENO);
	qs_note_summary();
	ssize_t length = read(controller, text, size);
	close(controller);
	close(terminal);
	return length;
}

START_TEST(auto_means_a_terminal)
{
	char text[4096] = "";
	start(QS_SUMMARY_AUTO);
	ck_assert_int_lt(summary_on_terminal(text, sizeof text - 1), 1); /* nothing was seen */
	dup2(open(in_scratch("stderr"), O_RDWR | O_APPEND | O_CLOEXEC), STDERR_FILENO);
	count("key", 10, QS_ACTION_NATIVE, QS_REASON_SMALL, 1, 0);
	qs_note_summary();
	ck_assert_str_eq(stderr_text(), "");
	ck_assert_int_gt(summary_on_terminal(text, sizeof text - 1), 0);
	ck_assert_ptr_nonnull(strstr(text, "1 product seen"));
}
END_TEST

/* exit() may be called by a signal handler that interrupted the holder of the lock. */
START_TEST(a_lock_that_is_never_released_does_not_stop_the_exit)
{
	start(QS_SUMMARY_ALWAYS);
	count("key", 10, QS_ACTION_NATIVE, QS_REASON_SMALL, 1, 0);
	ck_assert(qs_counter_lock());
	alarm(15);
	qs_note_summary();
	alarm(0);
	qs_counter_unlock();
	ck_assert_ptr_nonnull(strstr(stderr_text(), "1 product seen"));
}
END_TEST

START_TEST(other_is_shown_without_work)
{
	started = note_options();
	started.summary = QS_SUMMARY_ALWAYS;
	started.max_keys = 1;
	qs_note_start(&started);
	count("own", 10, QS_ACTION_FP8, QS_REASON_AUTO, 1, 1);
	count("too many", 1000, QS_ACTION_FP8, QS_REASON_AUTO, 5, 0);
	qs_note_summary();
	ck_assert_ptr_nonnull(strstr(stderr_text(), "qshim: 6 products seen"));
	ck_assert_ptr_nonnull(strstr(caught, "1 replaced (100.0 % of the FLOPs)"));
	ck_assert_ptr_nonnull(strstr(caught, "cache-full          other\n"));
}
END_TEST

static void add_notice_tests(Suite *suite)
{
	TCase *tests = tcase_create("notice");
	tcase_add_checked_fixture(tests, set_up, tear_down);
	tcase_add_test(tests, the_notice_is_written_once);
	tcase_add_test(tests, kept_operands_have_a_line_for_each_form);
	tcase_add_loop_test(tests, memory_that_is_ours_has_a_line, 0, 2);
	tcase_add_test(tests, memory_is_never_less_than_nothing);
	tcase_add_loop_test(tests, without_memory_of_ours_there_is_no_line, 0, 2);
	tcase_add_loop_test(tests, steps_have_a_line_with_the_share_of_products, 0, 4);
	tcase_add_test(tests, a_forked_child_has_no_steps);
	tcase_add_test(tests, quiet_hides_the_notice);
	tcase_add_test(tests, only_lower_precision_is_announced);
	tcase_add_test(tests, levels_and_log_file_do_not_hide_the_notice);
	tcase_add_test(tests, threads_announce_together_once);
	suite_add_tcase(suite, tests);
}

static void add_table_tests(Suite *suite)
{
	TCase *tests = tcase_create("table");
	tcase_set_timeout(tests, 30);
	tcase_add_checked_fixture(tests, set_up, tear_down);
	tcase_add_test(tests, the_table_shows_totals_and_rows);
	tcase_add_test(tests, the_table_is_plain_text);
	tcase_add_test(tests, rows_are_sorted_by_work);
	tcase_add_test(tests, forty_rows_are_shown_and_the_rest_counted);
	tcase_add_test(tests, the_widest_table_fits);
	tcase_add_test(tests, without_products_one_line_only_if_asked);
	tcase_add_test(tests, no_table_unless_wanted);
	tcase_add_test(tests, auto_means_a_terminal);
	tcase_add_test(tests, a_lock_that_is_never_released_does_not_stop_the_exit);
	tcase_add_test(tests, other_is_shown_without_work);
	suite_add_tcase(suite, tests);
}

int main(void)
{
	Suite *suite = suite_create("note_summary");
	add_notice_tests(suite);
	add_table_tests(suite);
	return qs_suite_main(suite);
}
