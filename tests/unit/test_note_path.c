/* note/path.c: placeholders, ranks, and which files are opened at all. */
#include "note_support.h"

#include <limits.h>
#include <sys/resource.h>
#include <sys/socket.h>

static const char *const rank_names[] = {
        "RANK",       "OMPI_COMM_WORLD_RANK",       "PMI_RANK",        "SLURM_PROCID",
        "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"};

static void set_up_path(void)
{
	for (size_t i = 0; i < sizeof rank_names / sizeof *rank_names; i++)
		unsetenv(rank_names[i]);
	set_up();
}

static const char *expanded(const char *pattern)
{
	static char out[QS_PATH_MAX];
	ck_assert_msg(qs_path_expand(pattern, out, sizeof out) == strlen(out) && *out, "%s",
	              pattern);
	return out;
}

static void assert_refused(const char *pattern)
{
	char out[QS_PATH_MAX] = "untouched";
	ck_assert_msg(qs_path_expand(pattern, out, sizeof out) == 0, "%s -> %s", pattern, out);
	ck_assert_str_eq(out, "");
}

START_TEST(placeholders_name_process_host_and_ranks)
{
	char expected[QS_PATH_MAX], host[HOST_NAME_MAX + 1] = "";
	setenv("RANK", "12", 1);
	setenv("LOCAL_RANK", "4", 1);
	gethostname(host, sizeof host - 1);
	snprintf(expected, sizeof expected, "/d/%d-%d.%s.12.4%%", getpid(), getpid(), host);
	ck_assert_str_eq(expanded("/d/%p-%i.%h.%r.%l%%"), expected);
}
END_TEST

START_TEST(a_variable_is_replaced_by_its_value)
{
	setenv("JOB_NAME", "run 7", 1);
	unsetenv("NO_SUCH_VARIABLE");
	ck_assert_str_eq(expanded("a%q{JOB_NAME}b"), "arun 7b");
	ck_assert_str_eq(expanded("a%q{NO_SUCH_VARIABLE}b"), "ab");
}
END_TEST

START_TEST(a_value_is_not_expanded_again)
{
	setenv("JOB_NAME", "%p%q{JOB_NAME}", 1);
	ck_assert_str_eq(expanded("%q{JOB_NAME}"), "%p%q{JOB_NAME}");
}
END_TEST

START_TEST(unknown_placeholders_are_refused)
{
	static const char *const bad[] = {"%x",    "a%",   "%P",    "%q",      "%q{",
	                                  "%q{}",  "%q{A", "%qA}",  "a%%%",    "%r%z",
	                                  "%q(A)", "% p",  "%\xff", "%q{%p}%y"};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		assert_refused(bad[i]);
}
END_TEST

START_TEST(a_long_variable_name_is_refused)
{
	char pattern[400] = "%q{";
	memset(pattern + 3, 'A', 300);
	strcpy(pattern + 303, "}");
	assert_refused(pattern);
}
END_TEST

START_TEST(a_tilde_is_the_home_directory)
{
	setenv("HOME", "/home/user", 1);
	ck_assert_str_eq(expanded("~/log"), "/home/user/log");
	ck_assert_str_eq(expanded("~user/log"), "~user/log");
	ck_assert_str_eq(expanded("a~/log"), "a~/log");
	unsetenv("HOME");
	ck_assert_str_eq(expanded("~/log"), "~/log");
}
END_TEST

START_TEST(a_path_fits_exactly_or_is_refused)
{
	char out[16];
	setenv("RANK", "3", 1);
	ck_assert_uint_eq(qs_path_expand("123456789012%r34", out, sizeof out), 15);
	ck_assert_str_eq(out, "123456789012334");
	ck_assert_uint_eq(qs_path_expand("123456789012%r345", out, sizeof out), 0);
	ck_assert_uint_eq(qs_path_expand("123456789012345%r", out, sizeof out), 0);
	ck_assert_uint_eq(qs_path_expand("1234567890123456789%r", out, sizeof out), 0);
	ck_assert_uint_eq(qs_path_expand("a", out, 1), 0);
	ck_assert_uint_eq(qs_path_expand("a", out, 0), 0);
	ck_assert_uint_eq(qs_path_expand("", out, sizeof out), 0);
}
END_TEST

START_TEST(expansion_keeps_errno)
{
	char out[64];
	setenv("RANK", "99999999999999999999", 1);
	errno = 77;
	qs_path_expand("%h%r%x", out, sizeof out);
	qs_rank();
	ck_assert_int_eq(errno, 77);
}
END_TEST

START_TEST(the_first_variable_with_a_number_is_the_rank)
{
	ck_assert_int_eq(qs_rank(), 0);
	setenv("SLURM_PROCID", "4", 1);
	ck_assert_int_eq(qs_rank(), 4);
	setenv("PMI_RANK", "3", 1);
	ck_assert_int_eq(qs_rank(), 3);
	setenv("OMPI_COMM_WORLD_RANK", "2", 1);
	ck_assert_int_eq(qs_rank(), 2);
	setenv("RANK", "1", 1);
	ck_assert_int_eq(qs_rank(), 1);
	static const char *const bad[] = {"", "x", "1x", "-1", " 1", "99999999999", "0x1"};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		setenv("RANK", bad[i], 1);
		ck_assert_int_eq(qs_rank(), 2);
	}
}
END_TEST

START_TEST(the_local_rank_has_its_own_variables)
{
	setenv("RANK", "9", 1);
	ck_assert_int_eq(qs_local_rank(), 0);
	setenv("SLURM_LOCALID", "5", 1);
	ck_assert_int_eq(qs_local_rank(), 5);
	setenv("LOCAL_RANK", "6", 1);
	ck_assert_int_eq(qs_local_rank(), 6);
}
END_TEST

START_TEST(a_new_file_is_private_and_closed_on_exec)
{
	struct stat status;
	umask(0);
	int fd = qs_open_new(in_scratch("new"));
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(fstat(fd, &status), 0);
	ck_assert_int_eq(status.st_mode & 07777, 0600);
	ck_assert_int_eq(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
	ck_assert_int_eq(fcntl(fd, F_GETFL) & (O_APPEND | O_ACCMODE), O_APPEND | O_WRONLY);
	close(fd);
}
END_TEST

START_TEST(low_descriptors_are_left_to_the_program)
{
	int lowest = open("/dev/null", O_RDONLY | O_CLOEXEC);
	close(lowest);
	int fd = qs_open_new(in_scratch("new"));
	ck_assert_int_ge(fd, 100);
	int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
	ck_assert_int_eq(next, lowest);
	close(next);
	close(fd);
}
END_TEST

START_TEST(a_closed_stdout_is_not_taken)
{
	struct rlimit limit, low;
	ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
	low = limit;
	low.rlim_cur = 64; /* below the usual place */
	int out = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
	fflush(stdout);
	close(STDOUT_FILENO);
	setrlimit(RLIMIT_NOFILE, &low);
	int fd = qs_open_new(in_scratch("new"));
	bool taken = fcntl(STDOUT_FILENO, F_GETFD) >= 0;
	setrlimit(RLIMIT_NOFILE, &limit);
	dup2(out, STDOUT_FILENO);
	close(out);
	ck_assert_int_gt(fd, STDERR_FILENO);
	ck_assert(!taken);
	close(fd);
}
END_TEST

START_TEST(an_existing_file_is_appended_to)
{
	char text[64];
	for (int i = 0; i < 2; i++) {
		int fd = qs_open_new(in_scratch("log"));
		ck_assert_int_ge(fd, 0);
		ck_assert_int_eq(write(fd, "line\n", 5), 5);
		close(fd);
	}
	ck_assert_int_eq(read_file(in_scratch("log"), text, sizeof text), 10);
}
END_TEST

START_TEST(a_missing_directory_is_made_private)
{
	struct stat status;
	int fd = qs_open_new(in_scratch("run/new"));
	ck_assert_int_ge(fd, 0);
	close(fd);
	ck_assert_int_eq(stat(in_scratch("run"), &status), 0);
	ck_assert_int_eq(status.st_mode & 0777, 0700);
}
END_TEST

START_TEST(only_one_level_is_made)
{
	ck_assert_int_eq(qs_open_new(in_scratch("a/b/new")), -ENOENT);
	ck_assert_int_ne(access(in_scratch("a"), F_OK), 0);
}
END_TEST

START_TEST(symlinks_are_refused)
{
	char text[16];
	int fd = open(in_scratch("victim"), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	close(fd);
	ck_assert_int_eq(symlink(in_scratch("victim"), in_scratch("link")), 0);
	ck_assert_int_eq(symlink(in_scratch("nothing"), in_scratch("dangling")), 0);
	ck_assert_int_eq(qs_open_new(in_scratch("link")), -ELOOP);
	ck_assert_int_eq(qs_open_new(in_scratch("dangling")), -ELOOP);
	ck_assert_int_eq(read_file(in_scratch("victim"), text, sizeof text), 0);
	ck_assert_int_ne(access(in_scratch("nothing"), F_OK), 0);
}
END_TEST

START_TEST(hard_links_are_refused)
{
	close(open(in_scratch("victim"), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
	ck_assert_int_eq(link(in_scratch("victim"), in_scratch("link")), 0);
	ck_assert_int_eq(qs_open_new(in_scratch("link")), -EPERM);
}
END_TEST

START_TEST(only_regular_files_are_opened_and_nothing_blocks)
{
	ck_assert_int_eq(mkfifo(in_scratch("fifo"), 0600), 0);
	ck_assert_int_eq(qs_open_new(in_scratch("fifo")), -ENXIO);
	int reader = open(in_scratch("fifo"), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	ck_assert_int_eq(qs_open_new(in_scratch("fifo")), -EINVAL);
	close(reader);
	ck_assert_int_eq(qs_open_new("/dev/full"), -EINVAL);
	ck_assert_int_lt(qs_open_new(scratch), 0);
}
END_TEST

START_TEST(a_directory_open_to_everyone_is_refused)
{
	ck_assert_int_eq(mkdir(in_scratch("open"), 0700), 0);
	ck_assert_int_eq(chmod(in_scratch("open"), 0777), 0);
	ck_assert_int_eq(qs_open_new(in_scratch("open/new")), -EPERM);
	ck_assert_int_ne(access(in_scratch("open/new"), F_OK), 0);
	ck_assert_int_eq(chmod(in_scratch("open"), 01777), 0); /* like /tmp */
	int fd = qs_open_new(in_scratch("open/new"));
	ck_assert_int_ge(fd, 0);
	close(fd);
}
END_TEST

/* The superuser may write everywhere, so the test gives that up for a moment. */
START_TEST(an_unwritable_directory_is_an_error)
{
	bool root = geteuid() == 0;
	ck_assert_int_eq(mkdir(in_scratch("closed"), 0500), 0);
	ck_assert_int_eq(chmod(scratch, 0711), 0);
	ck_assert_int_eq(chmod(in_scratch("closed"), 0555), 0);
	if (root)
		ck_assert_int_eq(seteuid(65534), 0);
	int fd = qs_open_new(in_scratch("closed/new"));
	if (root)
		ck_assert_int_eq(seteuid(0), 0);
	ck_assert_int_eq(fd, -EACCES);
}
END_TEST

START_TEST(a_file_of_another_user_is_refused)
{
	close(open(in_scratch("theirs"), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
	if (chown(in_scratch("theirs"), geteuid() + 1, (gid_t)-1)) {
		skip("a file of another user needs the superuser");
		return;
	}
	ck_assert_int_eq(chmod(in_scratch("theirs"), 0666), 0);
	ck_assert_int_eq(qs_open_new(in_scratch("theirs")), -EPERM);
}
END_TEST

START_TEST(a_name_is_needed)
{
	char path[2 * QS_PATH_MAX];
	ck_assert_int_eq(qs_open_new(""), -EINVAL);
	ck_assert_int_eq(qs_open_new("/"), -EINVAL);
	ck_assert_int_eq(qs_open_new(in_scratch("")), -EINVAL);
	memset(path, 'a', sizeof path - 1);
	memcpy(path + sizeof path - 3, "/b", 3);
	ck_assert_int_eq(qs_open_new(path), -EINVAL);
}
END_TEST

START_TEST(a_name_without_directory_is_in_the_working_directory)
{
	ck_assert_int_eq(chdir(scratch), 0);
	int fd = qs_open_new("plain");
	ck_assert_int_ge(fd, 0);
	close(fd);
	ck_assert_int_eq(access(in_scratch("plain"), F_OK), 0);
	ck_assert_int_eq(chdir("/"), 0);
}
END_TEST

static void add_name_tests(Suite *suite)
{
	TCase *tests = tcase_create("names");
	tcase_add_checked_fixture(tests, set_up_path, tear_down);
	tcase_add_test(tests, placeholders_name_process_host_and_ranks);
	tcase_add_test(tests, a_variable_is_replaced_by_its_value);
	tcase_add_test(tests, a_value_is_not_expanded_again);
	tcase_add_test(tests, unknown_placeholders_are_refused);
	tcase_add_test(tests, a_long_variable_name_is_refused);
	tcase_add_test(tests, a_tilde_is_the_home_directory);
	tcase_add_test(tests, a_path_fits_exactly_or_is_refused);
	tcase_add_test(tests, expansion_keeps_errno);
	tcase_add_test(tests, the_first_variable_with_a_number_is_the_rank);
	tcase_add_test(tests, the_local_rank_has_its_own_variables);
	suite_add_tcase(suite, tests);
}

static void add_open_tests(Suite *suite)
{
	TCase *tests = tcase_create("opening");
	tcase_add_checked_fixture(tests, set_up_path, tear_down);
	tcase_add_test(tests, a_new_file_is_private_and_closed_on_exec);
	tcase_add_test(tests, low_descriptors_are_left_to_the_program);
	tcase_add_test(tests, a_closed_stdout_is_not_taken);
	tcase_add_test(tests, an_existing_file_is_appended_to);
	tcase_add_test(tests, a_missing_directory_is_made_private);
	tcase_add_test(tests, only_one_level_is_made);
	tcase_add_test(tests, symlinks_are_refused);
	tcase_add_test(tests, hard_links_are_refused);
	tcase_add_test(tests, only_regular_files_are_opened_and_nothing_blocks);
	tcase_add_test(tests, a_directory_open_to_everyone_is_refused);
	tcase_add_test(tests, an_unwritable_directory_is_an_error);
	tcase_add_test(tests, a_file_of_another_user_is_refused);
	tcase_add_test(tests, a_name_is_needed);
	tcase_add_test(tests, a_name_without_directory_is_in_the_working_directory);
	suite_add_tcase(suite, tests);
}

int main(void)
{
	Suite *suite = suite_create("note_path");
	add_name_tests(suite);
	add_open_tests(suite);
	return qs_suite_main(suite);
}
