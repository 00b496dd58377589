/* note/message.c and note/write.c: what reaches stderr or the log file, and that the program does
 * not notice. */
#include "note_support.h"

#include <pthread.h>
#include <signal.h>

START_TEST(errors_and_warnings_are_written_before_any_start)
{
	qs_message(QS_LOG_ERROR, "e%d", 1);
	qs_message(QS_LOG_WARN, "w%s", "2");
	qs_message(QS_LOG_INFO, "i");
	qs_message(QS_LOG_DISPATCH, "d");
	ck_assert_str_eq(stderr_text(), "qshim: e1\nqshim: w2\n");
}
END_TEST

START_TEST(only_the_levels_asked_for_are_written)
{
	struct qs_options options = note_options();
	options.log_levels = 1u << QS_LOG_CACHE;
	qs_note_start(&options);
	for (int level = 0; level < QS_LOG_LEVELS; level++)
		qs_message((enum qs_level)level, "%s", qs_level_name((enum qs_level)level));
	ck_assert_str_eq(stderr_text(), "qshim: cache\n");
}
END_TEST

START_TEST(level_names_are_those_of_the_log_option)
{
	static const char *const names[] = {"error",    "warn",  "info",
	                                    "dispatch", "cache", "numerics"};
	for (int level = 0; level < QS_LOG_LEVELS; level++)
		ck_assert_str_eq(qs_level_name((enum qs_level)level), names[level]);
}
END_TEST

START_TEST(info_says_which_process_is_served)
{
	char expected[32];
	struct qs_options options = note_options();
	options.log_levels |= 1u << QS_LOG_INFO;
	qs_note_start(&options);
	snprintf(expected, sizeof expected, "pid %d,", getpid());
	ck_assert_ptr_nonnull(strstr(stderr_text(), expected));
	ck_assert_ptr_nonnull(strstr(stderr_text(), program_invocation_short_name));
}
END_TEST

START_TEST(a_long_message_is_cut_and_says_so)
{
	char text[5000];
	memset(text, 'x', sizeof text - 1);
	text[sizeof text - 1] = '\0';
	qs_message(QS_LOG_ERROR, "%s", text);
	size_t length = strlen(stderr_text());
	ck_assert_uint_eq(length, 1024);
	ck_assert_str_eq(stderr_text() + length - 5, "x...\n");
}
END_TEST

START_TEST(the_longest_message_that_fits_is_whole)
{
	char text[1017]; /* 1024 less prefix and end of line */
	memset(text, 'x', sizeof text - 1);
	text[sizeof text - 1] = '\0';
	qs_message(QS_LOG_ERROR, "%s", text);
	ck_assert_uint_eq(strlen(stderr_text()), 1024);
	ck_assert_ptr_null(strstr(stderr_text(), "..."));
}
END_TEST

START_TEST(a_message_is_one_line_whatever_it_quotes)
{
	qs_message(QS_LOG_ERROR, "file '%s'", "a\nqshim: forged\r\x1b[31m\x7f\xc3\xa9");
	ck_assert_str_eq(stderr_text(), "qshim: file 'a?qshim: forged??[31m?\xc3\xa9'\n");
}
END_TEST

START_TEST(messages_keep_errno)
{
	struct qs_options options = note_options();
	strcpy(options.log_file, "/nowhere/at/all");
	errno = 77;
	qs_note_start(&options);
	qs_message(QS_LOG_ERROR, "x");
	qs_message_once(QS_REASON_ERROR, "y");
	close(STDERR_FILENO);
	errno = 77;
	qs_message(QS_LOG_ERROR, "nobody reads this");
	ck_assert_int_eq(errno, 77);
}
END_TEST

START_TEST(a_flood_ends_with_one_line_that_says_so)
{
	for (int i = 0; i < 3000; i++)
		qs_message(QS_LOG_WARN, "%d", i);
	const char *text = stderr_text();
	ck_assert_uint_eq(count_lines(text), 1001);
	ck_assert_ptr_nonnull(strstr(text, "\nqshim: 999\n"));
	ck_assert_ptr_null(strstr(text, "\nqshim: 1000\n"));
	ck_assert_str_eq(line_at(text, 1000),
	                 "qshim: 1000 messages were written; no more follow\n");
}
END_TEST

START_TEST(messages_of_levels_that_are_off_do_not_count)
{
	for (int i = 0; i < 3000; i++)
		qs_message(QS_LOG_CACHE, "%d", i);
	qs_message(QS_LOG_ERROR, "seen");
	ck_assert_str_eq(stderr_text(), "qshim: seen\n");
}
END_TEST

START_TEST(a_reason_is_reported_once)
{
	for (int i = 0; i < 5; i++) {
		qs_message_once(QS_REASON_MEMORY, "memory %d", i);
		qs_message_once(QS_REASON_FORK, "fork %d", i);
	}
	ck_assert_str_eq(stderr_text(), "qshim: memory 0\nqshim: fork 0\n");
}
END_TEST

static void *flood(void *letter)
{
	for (int i = 0; i < 400; i++) {
		qs_message(QS_LOG_ERROR, "%s%s%s%s", (char *)letter, (char *)letter, (char *)letter,
		           (char *)letter);
		qs_message_once(QS_REASON_ERROR, "once");
	}
	return NULL;
}

START_TEST(lines_of_several_threads_do_not_mix)
{
	static char letters[4][2] = {"a", "b", "c", "d"};
	pthread_t threads[4];
	int once = 0, ends = 0;
	for (int i = 0; i < 4; i++)
		ck_assert_int_eq(pthread_create(&threads[i], NULL, flood, letters[i]), 0);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	const char *text = stderr_text();
	ck_assert_uint_eq(count_lines(text), 1001);
	for (const char *line = text; line; line = line_at(line, 1)) {
		bool is_once = !strncmp(line, "qshim: once\n", 12);
		bool is_end = !strncmp(line, "qshim: 1000 messages", 20);
		once += is_once;
		ends += is_end;
		bool pure = line[7] >= 'a' && line[7] <= 'd' && line[8] == line[7] &&
		            line[9] == line[7] && line[10] == line[7] && line[11] == '\n';
		ck_assert_msg(is_once || is_end || pure, "%.40s", line);
	}
	ck_assert_int_le(once, 1);
	ck_assert_int_eq(ends, 1);
}
END_TEST

START_TEST(a_log_file_takes_everything)
{
	char text[256], name[32];
	struct qs_options options = note_options();
	snprintf(options.log_file, sizeof options.log_file, "%s/log.%%p", scratch);
	qs_note_start(&options);
	qs_message(QS_LOG_WARN, "into the file");
	snprintf(name, sizeof name, "log.%d", getpid());
	ck_assert_int_gt(read_file(in_scratch(name), text, sizeof text), 0);
	ck_assert_str_eq(text, "qshim: into the file\n");
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

START_TEST(an_unwritable_log_file_is_reported_once_and_stderr_taken)
{
	struct qs_options options = note_options();
	snprintf(options.log_file, sizeof options.log_file, "%s/no/such/log", scratch);
	qs_note_start(&options);
	qs_message(QS_LOG_WARN, "second");
	const char *text = stderr_text();
	ck_assert_uint_eq(count_lines(text), 2);
	ck_assert_ptr_nonnull(strstr(text, "no/such/log: No such file or directory"));
	ck_assert_str_eq(line_at(text, 1), "qshim: second\n");
}
END_TEST

START_TEST(a_bad_placeholder_in_the_log_file_is_reported)
{
	struct qs_options options = note_options();
	strcpy(options.log_file, "/tmp/log.%z");
	qs_note_start(&options);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(stderr_text(), "'/tmp/log.%z'"));
}
END_TEST

/* A write beyond the limit raises SIGXFSZ, which would end the program. stderr is a pipe here,
 * which has no size. */
START_TEST(a_log_file_that_is_full_gives_way_to_stderr)
{
	int ends[2];
	char text[512] = "";
	struct qs_options options = note_options();
	snprintf(options.log_file, sizeof options.log_file, "%s/log", scratch);
	qs_note_start(&options);
	ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
	dup2(ends[1], STDERR_FILENO);
	limit_files(30);
	qs_message(QS_LOG_ERROR, "fits");
	qs_message(QS_LOG_ERROR, "does not fit into the file");
	qs_message(QS_LOG_ERROR, "later");
	limit_files(RLIM_INFINITY);
	ck_assert_int_gt(read(ends[0], text, sizeof text - 1), 0);
	ck_assert_str_eq(text, "qshim: log file: File too large; messages go to stderr from here\n"
	                       "qshim: does not fit into the file\nqshim: later\n");
	close(ends[0]);
	close(ends[1]);
}
END_TEST

static volatile sig_atomic_t signals_seen;

static void count_signal(int signal)
{
	(void)signal;
	signals_seen++;
}

/* stderr becomes a pipe that nobody reads. */
static void break_stderr(void)
{
	int ends[2];
	ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
	close(ends[0]);
	dup2(ends[1], STDERR_FILENO);
	close(ends[1]);
}

START_TEST(a_reader_that_went_away_does_not_raise_sigpipe)
{
	sigset_t before, after;
	signal(SIGPIPE, count_signal);
	pthread_sigmask(SIG_SETMASK, NULL, &before);
	break_stderr();
	signals_seen = 0;
	qs_message(QS_LOG_ERROR, "nobody reads this");
	pthread_sigmask(SIG_SETMASK, NULL, &after);
	ck_assert_int_eq(signals_seen, 0);
	ck_assert_int_eq(sigismember(&after, SIGPIPE), sigismember(&before, SIGPIPE));
	ck_assert(!sigismember(&after, SIGPIPE));
	ck_assert_int_eq(raise(SIGPIPE), 0); /* still delivered to the program */
	ck_assert_int_eq(signals_seen, 1);
	signal(SIGPIPE, SIG_DFL);
}
END_TEST

START_TEST(a_sigpipe_the_program_waits_for_is_left_to_it)
{
	sigset_t set, pending;
	sigemptyset(&set);
	sigaddset(&set, SIGPIPE);
	pthread_sigmask(SIG_BLOCK, &set, NULL);
	raise(SIGPIPE);
	break_stderr();
	qs_message(QS_LOG_ERROR, "nobody reads this");
	sigpending(&pending);
	ck_assert(sigismember(&pending, SIGPIPE));
	int signal;
	ck_assert_int_eq(sigwait(&set, &signal), 0);
	pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}
END_TEST

/* Daemons close every descriptor and open their own files under the same numbers. */
START_TEST(a_file_of_the_program_under_our_number_is_not_written)
{
	char text[64];
	struct qs_options options = note_options();
	snprintf(options.log_file, sizeof options.log_file, "%s/log", scratch);
	qs_note_start(&options);
	int own = open(in_scratch("own"), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	for (int fd = 3; fd < 256; fd++) {
		if (fd != own && fd != real_stderr && fcntl(fd, F_GETFD) >= 0 && fd >= 100)
			dup2(own, fd);
	}
	qs_message(QS_LOG_ERROR, "hello");
	ck_assert_int_eq(read_file(in_scratch("own"), text, sizeof text), 0);
	ck_assert_int_eq(read_file(in_scratch("log"), text, sizeof text), 0);
	ck_assert_str_eq(stderr_text(),
	                 "qshim: log file: the program closed the file; messages go to "
	                 "stderr from here\nqshim: hello\n");
}
END_TEST

START_TEST(a_second_start_changes_nothing)
{
	struct qs_options first = note_options(), second = note_options();
	second.log_levels = 0;
	qs_note_start(&first);
	qs_note_start(&second);
	qs_message(QS_LOG_WARN, "still on");
	ck_assert_str_eq(stderr_text(), "qshim: still on\n");
}
END_TEST

START_TEST(a_forked_child_starts_from_the_beginning)
{
	struct qs_options options = note_options();
	options.log_levels = 0;
	qs_note_start(&options);
	pid_t child = fork();
	if (!child) {
		qs_note_forked();
		qs_message(QS_LOG_WARN, "child");
		_exit(qs_note_options() != NULL);
	}
	wait_for(child);
	qs_message(QS_LOG_WARN, "parent");
	ck_assert_str_eq(stderr_text(), "qshim: child\n");
}
END_TEST

static void add_message_tests(Suite *suite)
{
	TCase *tests = tcase_create("message");
	tcase_add_checked_fixture(tests, set_up, tear_down);
	tcase_add_test(tests, errors_and_warnings_are_written_before_any_start);
	tcase_add_test(tests, only_the_levels_asked_for_are_written);
	tcase_add_test(tests, level_names_are_those_of_the_log_option);
	tcase_add_test(tests, info_says_which_process_is_served);
	tcase_add_test(tests, a_long_message_is_cut_and_says_so);
	tcase_add_test(tests, the_longest_message_that_fits_is_whole);
	tcase_add_test(tests, a_message_is_one_line_whatever_it_quotes);
	tcase_add_test(tests, messages_keep_errno);
	tcase_add_test(tests, a_flood_ends_with_one_line_that_says_so);
	tcase_add_test(tests, messages_of_levels_that_are_off_do_not_count);
	tcase_add_test(tests, a_reason_is_reported_once);
	tcase_add_test(tests, lines_of_several_threads_do_not_mix);
	tcase_add_test(tests, a_second_start_changes_nothing);
	tcase_add_test(tests, a_forked_child_starts_from_the_beginning);
	suite_add_tcase(suite, tests);
}

static void add_target_tests(Suite *suite)
{
	TCase *tests = tcase_create("target");
	tcase_add_checked_fixture(tests, set_up, tear_down);
	tcase_add_test(tests, a_log_file_takes_everything);
	tcase_add_test(tests, an_unwritable_log_file_is_reported_once_and_stderr_taken);
	tcase_add_test(tests, a_bad_placeholder_in_the_log_file_is_reported);
	tcase_add_test(tests, a_log_file_that_is_full_gives_way_to_stderr);
	tcase_add_test(tests, a_reader_that_went_away_does_not_raise_sigpipe);
	tcase_add_test(tests, a_sigpipe_the_program_waits_for_is_left_to_it);
	tcase_add_test(tests, a_file_of_the_program_under_our_number_is_not_written);
	suite_add_tcase(suite, tests);
}

int main(void)
{
	Suite *suite = suite_create("note_message");
	add_message_tests(suite);
	add_target_tests(suite);
	return qs_suite_main(suite);
}
