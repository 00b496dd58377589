/* note/decision.c and note/json.c: lines that any JSON reader takes, written at once, and what
 * happens when they cannot be. */
#include "note_support.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>

#include "version.h"

static char text[1 << 20]; /* a file read whole */

static const char *decisions(int pid)
{
	ck_assert_int_ge(read_file(out_file("decisions", pid, "jsonl"), text, sizeof text), 0);
	return text;
}

static struct qs_decision decision_of(const struct qs_key *key)
{
	return (struct qs_decision){
	        .key = key,
	        .weight = -1,
	        .action = QS_ACTION_NATIVE,
	        .reason = QS_REASON_SMALL,
	};
}

START_TEST(nothing_is_written_without_a_run_directory)
{
	struct qs_key key = linear_key(1, 2, 3);
	struct qs_decision decision = decision_of(&key);
	struct qs_options options = note_options();
	ck_assert_int_eq(chdir(scratch), 0);
	qs_note_start(&options);
	qs_note_decision(&decision);
	ck_assert_str_eq(stderr_text(), "");
	ck_assert_int_eq(unlink(in_scratch("stderr")), 0);
	ck_assert_int_eq(rmdir(scratch), 0); /* empty otherwise */
	ck_assert_int_eq(mkdir(scratch, 0700), 0);
	ck_assert_int_eq(chdir("/"), 0);
}
END_TEST

START_TEST(the_first_line_says_whose_log_it_is)
{
	char number[24], host[256] = "", exe[4096] = "";
	struct qs_options options = out_options();
	setenv("RANK", "3", 1);
	qs_note_start(&options);
	const char *line = decisions(getpid());
	ck_assert_uint_eq(count_lines(line), 1);
	ck_assert_int_eq(strncmp(line, "{\"v\":1,\"t\":\"start\",", 19), 0);
	snprintf(number, sizeof number, "%d", getpid());
	ck_assert_str_eq(json_member(line, "pid"), number);
	ck_assert_str_eq(json_member(line, "rank"), "3");
	gethostname(host, sizeof host - 1);
	ck_assert_str_eq(json_member(line, "host"), host);
	ck_assert_int_gt(readlink("/proc/self/exe", exe, sizeof exe - 1), 0);
	ck_assert_str_eq(json_member(line, "exe"), exe);
	ck_assert_int_le(labs(atol(json_member(line, "time")) - (long)time(NULL)), 60);
	ck_assert_str_eq(json_member(line, "version"), QS_VERSION);
	unsetenv("RANK");
}
END_TEST

START_TEST(a_full_decision_has_every_member)
{
	struct qs_key key = linear_key(14336, 4096, 4096);
	struct qs_options options = out_options();
	key.role = QS_ROLE_FWD;
	key.entry = QS_ENTRY_LT_MATMUL;
	struct qs_decision decision = {
	        .key = &key,
	        .layer = "model.layers.3.mlp.up_proj",
	        .weight = 23,
	        .rule = "mlp",
	        .action = QS_ACTION_FP8,
	        .rows = true,
	        .reason = QS_REASON_RULE,
	        .detail = "a clause more",
	        .library = "/opt/lib/libcublas.so.13",
	};
	qs_note_start(&options);
	qs_counter_new("before", &key, QS_ACTION_NATIVE, QS_REASON_SMALL, NULL, NULL);
	decision.counter = qs_counter_new("key", &key, QS_ACTION_FP8, QS_REASON_RULE, "mlp", NULL);
	qs_note_decision(&decision);
	ck_assert_str_eq(line_at(decisions(getpid()), 1),
	                 "{\"v\":1,\"rank\":0,\"t\":\"decision\","
	                 "\"key\":\"TN m=14336 n=4096 k=4096 bf16 lt fwd\","
	                 "\"api\":\"cublasLtMatmul\",\"role\":\"fwd\",\"weight\":23,"
	                 "\"layer\":\"model.layers.3.mlp.up_proj\",\"rule\":\"mlp\","
	                 "\"action\":\"fp8\",\"scale\":\"row\",\"reason\":\"rule\","
	                 "\"detail\":\"a clause more\","
	                 "\"library\":\"/opt/lib/libcublas.so.13\",\"counter\":1}\n");
}
END_TEST

START_TEST(what_is_unknown_is_left_out)
{
	struct qs_key key = linear_key(64, 32, 16);
	struct qs_decision decision = decision_of(&key);
	struct qs_options options = out_options();
	qs_note_start(&options);
	qs_note_decision(&decision);
	ck_assert_str_eq(
	        line_at(decisions(getpid()), 1),
	        "{\"v\":1,\"rank\":0,\"t\":\"decision\",\"key\":\"TN m=64 n=32 k=16 bf16\","
	        "\"api\":\"cublasGemmEx\",\"action\":\"native\",\"reason\":\"small\"}\n");
}
END_TEST

START_TEST(the_dispatch_level_tells_it_in_words)
{
	struct qs_key key = linear_key(64, 32, 16);
	struct qs_decision decision = decision_of(&key);
	struct qs_options options = note_options();
	options.log_levels = 1u << QS_LOG_DISPATCH;
	qs_note_start(&options);
	qs_note_decision(&decision);
	decision.rule = "default";
	decision.reason = QS_REASON_ALGO_NONE;
	decision.detail = "status 15";
	qs_note_decision(&decision);
	decision.rule = "mlp";
	decision.reason = QS_REASON_RULE;
	decision.action = QS_ACTION_FP8;
	decision.detail = NULL;
	qs_note_decision(&decision);
	decision.rows = true;
	qs_note_decision(&decision);
	ck_assert_str_eq(
	        stderr_text(),
	        "qshim: TN m=64 n=32 k=16 bf16 -> native (small: the product is too small for the "
	        "conversion to pay)\n"
	        "qshim: TN m=64 n=32 k=16 bf16 -> native (algo-none, rule default: status 15)\n"
	        "qshim: TN m=64 n=32 k=16 bf16 -> fp8 (rule mlp)\n"
	        "qshim: TN m=64 n=32 k=16 bf16 -> fp8 by rows (rule mlp)\n");
}
END_TEST

/* Every byte, broken and forbidden UTF-8, quotes, and what looks like the end of the line. */
static const char *const hostile[] = {
        "\"",
        "\\",
        "\\u0000\"}\n{\"v\":2}",
        "\b\f\n\r\t\x01\x1f\x7f",
        "\x80\xbf\xc0\xaf\xc1\xbf",
        "\xe0\x80\x80 \xe0\x9f\xbf \xf0\x80\x80\x80 \xf0\x8f\xbf\xbf",
        "\xed\xa0\x80\xed\xbf\xbf",
        "\xf4\x90\x80\x80\xf5\x80\x80\x80\xff\xfe",
        "\xc3",
        "\xe2\x82",
        "\xf0\x9f\x98",
        "\xc3\"\xe2\x82\\",
        "h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf",
};

START_TEST(hostile_bytes_make_valid_json)
{
	struct qs_key key = linear_key(64, 32, 16);
	struct qs_decision decision = decision_of(&key);
	struct qs_options options = out_options();
	decision.layer = decision.rule = decision.detail = decision.library = hostile[_i];
	qs_note_start(&options);
	qs_note_decision(&decision);
	const char *line = line_at(decisions(getpid()), 1);
	ck_assert_msg(json_get(line, "layer", text + sizeof text / 2, 4096) == 1, "%s", line);
	ck_assert_str_eq(json_member(line, "reason"), "small");
	ck_assert_ptr_null(line_at(line, 1));
}
END_TEST

START_TEST(valid_text_comes_back_unchanged)
{
	static const char *const texts[] = {
	        "plain", "", "a\"b\\c/\n\t\x01\x7f",
	        "h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf",
	        "\xc2\x80\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf\xf0\x90\x80\x80"};
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
		char line[512];
		struct qs_json json;
		qs_json_begin(&json, line, sizeof line);
		qs_json_text(&json, "x", texts[i], 256);
		line[qs_json_end(&json)] = '\0';
		ck_assert_str_eq(json_member(line, "x"), texts[i]);
	}
}
END_TEST

START_TEST(each_broken_byte_becomes_one_replacement)
{
	char line[128];
	struct qs_json json;
	qs_json_begin(&json, line, sizeof line);
	qs_json_text(&json, "x", "a\xffz\xe2\x82.\xc0\xaf", 64);
	line[qs_json_end(&json)] = '\0';
	ck_assert_str_eq(json_member(line, "x"), "a\xef\xbf\xbdz\xef\xbf\xbd\xef\xbf\xbd."
	                                         "\xef\xbf\xbd\xef\xbf\xbd");
}
END_TEST

START_TEST(texts_longer_than_their_room_are_shortened_between_characters)
{
	char line[128];
	struct qs_json json;
	qs_json_begin(&json, line, sizeof line);
	qs_json_text(&json, "x", "ab\xe2\x82\xac", 4);
	qs_json_text(&json, "y", "ab\xe2\x82\xac", 5);
	qs_json_text(&json, "z", "abcd\n", 9);
	line[qs_json_end(&json)] = '\0';
	ck_assert_str_eq(line, "{\"x\":\"ab\",\"y\":\"ab\xe2\x82\xac\",\"z\":\"abcd\"}\n");
}
END_TEST

START_TEST(a_line_is_valid_in_a_buffer_of_any_size)
{
	for (size_t size = 3; size < 160; size++) {
		char line[161];
		struct qs_json json;
		memset(line, '#', sizeof line);
		qs_json_begin(&json, line, size);
		qs_json_number(&json, "number", INT64_MIN);
		for (size_t i = 0; i < 4; i++)
			qs_json_text(&json, i & 1 ? "even" : "odd", hostile[i], 40);
		size_t length = qs_json_end(&json);
		ck_assert_uint_le(length, size);
		ck_assert_int_eq(line[size], '#');
		line[length] = '\0';
		ck_assert_msg(!strcmp(line, "{}\n") || json_get(line, NULL, NULL, 0) == 0,
		              "%zu: %s", size, line);
	}
}
END_TEST

START_TEST(the_longest_decision_fits)
{
	static char long_text[20000];
	struct qs_key key = linear_key(INT64_MIN, INT64_MIN, INT64_MIN);
	struct qs_decision decision = decision_of(&key);
	struct qs_options options = out_options();
	memset(long_text, '\x01', sizeof long_text - 1); /* six bytes each */
	memset(&key.lda, 0x55, 32);
	decision.layer = decision.rule = decision.detail = decision.library = long_text;
	decision.weight = INT32_MAX;
	qs_note_start(&options);
	qs_note_decision(&decision);
	const char *line = line_at(decisions(getpid()), 1);
	ck_assert_uint_eq(strlen(json_member(line, "layer")), 512 / 6);
	ck_assert_uint_eq(strlen(json_member(line, "library")), 1536 / 6);
	ck_assert_str_eq(json_member(line, "reason"), "small");
}
END_TEST

START_TEST(decisions_keep_errno)
{
	struct qs_key key = linear_key(64, 32, 16);
	struct qs_decision decision = decision_of(&key);
	struct qs_options options = out_options();
	qs_note_start(&options);
	errno = 77;
	qs_note_decision(&decision);
	ck_assert_int_eq(errno, 77);
}
END_TEST

static void *decide_often(void *layer)
{
	struct qs_key key = linear_key(64, 32, 16);
	struct qs_decision decision = decision_of(&key);
	decision.layer = layer;
	for (int i = 0; i < 200; i++)
		qs_note_decision(&decision);
	return NULL;
}

START_TEST(lines_of_several_threads_are_whole)
{
	static char names[4][300];
	pthread_t threads[4];
	struct qs_options options = out_options();
	qs_note_start(&options);
	for (int i = 0; i < 4; i++) {
		memset(names[i], 'a' + i, sizeof names[i] - 1);
		ck_assert_int_eq(pthread_create(&threads[i], NULL, decide_often, names[i]), 0);
	}
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	const char *line = line_at(decisions(getpid()), 1);
	for (int i = 0; i < 800; i++, line = line_at(line, 1)) {
		ck_assert_ptr_nonnull(line);
		const char *layer = json_member(line, "layer");
		ck_assert_uint_eq(strspn(layer, (char[]){layer[0], 0}), sizeof names[0] - 1);
	}
	ck_assert_ptr_null(line);
}
END_TEST

START_TEST(a_directory_that_cannot_be_used_is_reported_once)
{
	struct qs_key key = linear_key(64, 32, 16);
	struct qs_decision decision = decision_of(&key);
	struct qs_options options = note_options();
	snprintf(options.out_dir, sizeof options.out_dir, "%s/no/such", scratch);
	qs_note_start(&options);
	qs_note_decision(&decision);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(stderr_text(), "No such file or directory"));
}
END_TEST

START_TEST(a_bad_placeholder_in_the_directory_is_reported)
{
	struct qs_options options = note_options();
	strcpy(options.out_dir, "/tmp/%y");
	qs_note_start(&options);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(stderr_text(), "'/tmp/%y'"));
}
END_TEST

/* Writes until it fails and some more. */
static void fill(int count)
{
	struct qs_key key = linear_key(64, 32, 16);
	struct qs_decision decision = decision_of(&key);
	for (int i = 0; i < count; i++)
		qs_note_decision(&decision);
}

/* The log is whole lines, and one message said that it ended. */
static void assert_ended_well(const char *log, const char *why)
{
	size_t lines = 0;
	for (const char *line = log; line; line = line_at(line, 1), lines++)
		ck_assert_msg(json_get(line, NULL, NULL, 0) == 0, "line %zu: %s", lines, line);
	ck_assert_uint_gt(lines, 2);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(stderr_text(), "decision log: "));
	ck_assert_ptr_nonnull(strstr(stderr_text(), why));
}

START_TEST(a_size_limit_ends_the_log_after_a_whole_line)
{
	struct qs_options options = out_options();
	qs_note_start(&options);
	int limited = limit_files(7001);
	fill(200);
	ck_assert_int_eq(limit_files(RLIM_INFINITY), 0);
	ck_assert_int_eq(limited, 0);
	assert_ended_well(decisions(getpid()), "File too large");
	size_t before = count_lines(text);
	fill(3); /* there is room again, but the end was announced */
	ck_assert_uint_eq(count_lines(decisions(getpid())), before);
}
END_TEST

static bool write_text(const char *path, const char *words)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	bool done = fd >= 0 && write(fd, words, strlen(words)) == (ssize_t)strlen(words);
	if (fd >= 0)
		close(fd);
	return done;
}

/* Becomes the superuser of a namespace in which nothing changes its name: files need an owner and a
 * group that are mapped. */
static bool enter_user_namespace(void)
{
	char users[64], groups[64];
	snprintf(users, sizeof users, "%u %u 1\n", geteuid(), geteuid());
	snprintf(groups, sizeof groups, "%u %u 1\n", getegid(), getegid());
	return !unshare(CLONE_NEWUSER | CLONE_NEWNS) &&
	       write_text("/proc/self/setgroups", "deny") &&
	       write_text("/proc/self/uid_map", users) && write_text("/proc/self/gid_map", groups);
}

/* A mount that only this process sees. */
static bool mount_small(const char *where)
{
	if (unshare(CLONE_NEWNS) && !enter_user_namespace())
		return false;
	return !mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) &&
	       !mount("tmpfs", where, "tmpfs", 0, "size=64k,mode=0700");
}

/* In a child, whose mount ends with it. Exit status 0 right, 1 wrong, 2 no mount. */
static int run_on_full_disk(void)
{
	struct qs_options options = out_options();
	struct stat status;
	if (mkdir(in_scratch("out"), 0700) || !mount_small(in_scratch("out")))
		return 2;
	qs_note_start(&options);
	int counters_before = stat(out_file("counters", getpid(), "bin"), &status);
	fill(3000);
	read_file(out_file("decisions", getpid(), "jsonl"), text, sizeof text);
	struct qs_key key = linear_key(64, 32, 16);
	struct qs_counter *counter =
	        qs_counter_new("k", &key, QS_ACTION_FP8, QS_REASON_RULE, NULL, NULL);
	atomic_fetch_add(&counter->calls, 1); /* the file is allocated: no SIGBUS */
	size_t length = strlen(text);
	return counters_before == 0 && length > 30000 && text[length - 1] == '\n' ? 0 : 1;
}

START_TEST(a_full_disk_ends_the_log_and_not_the_program)
{
	int status;
	pid_t child = fork();
	if (!child) {
		qs_note_forked();
		_exit(run_on_full_disk());
	}
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert(WIFEXITED(status));
	if (WEXITSTATUS(status) == 2) {
		skip("a full disk needs the right to mount");
		return;
	}
	ck_assert_int_eq(WEXITSTATUS(status), 0);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(stderr_text(), "decision log: No space left on device"));
}
END_TEST

START_TEST(a_log_of_a_process_that_is_killed_is_complete)
{
	int status;
	struct qs_options options = out_options();
	pid_t child = fork();
	if (!child) {
		qs_note_forked();
		qs_note_start(&options);
		fill(5);
		kill(getpid(), SIGKILL);
	}
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert(WIFSIGNALED(status));
	ck_assert_uint_eq(count_lines(decisions(child)), 6);
}
END_TEST

START_TEST(a_forked_child_writes_its_own_log)
{
	struct qs_options options = out_options();
	qs_note_start(&options);
	fill(1);
	pid_t child = fork();
	if (!child) {
		qs_note_forked();
		fill(1); /* not started: nowhere */
		qs_note_start(&options);
		fill(2);
		_exit(0);
	}
	wait_for(child);
	fill(1);
	ck_assert_uint_eq(count_lines(decisions(getpid())), 3);
	ck_assert_uint_eq(count_lines(decisions(child)), 3);
}
END_TEST

static void *fork_now(void *unused)
{
	(void)unused;
	for (int i = 0; i < 30; i++) {
		pid_t child = fork();
		if (!child) {
			alarm(10);
			qs_note_forked();
			fill(1);
			_exit(0);
		}
		int status;
		if (waitpid(child, &status, 0) != child || status)
			return (void *)1;
	}
	return NULL;
}

/* The lock may be held by a thread that the child does not have. */
START_TEST(forking_while_others_write_does_not_deadlock_the_child)
{
	pthread_t forker, writer;
	void *failed;
	struct qs_options options = out_options();
	qs_note_start(&options);
	ck_assert_int_eq(pthread_create(&forker, NULL, fork_now, NULL), 0);
	for (int i = 0; i < 20; i++) {
		ck_assert_int_eq(pthread_create(&writer, NULL, decide_often, NULL), 0);
		pthread_join(writer, NULL);
	}
	pthread_join(forker, &failed);
	ck_assert_ptr_null(failed);
}
END_TEST

/* What exit() does, here of a signal handler; 0 = it came to its end. */
static void end_now(int signal)
{
	(void)signal;
	qs_note_ending();
	fill(1);
	_exit(0);
}

/* Nearly all of its time, the child holds the lock. */
START_TEST(an_exit_by_a_signal_handler_waits_for_no_line)
{
	const struct itimerval soon = {.it_value = {.tv_usec = 20000}};
	struct qs_options options = out_options();
	for (int i = 0; i < 4; i++) {
		pid_t child = fork();
		if (!child) {
			alarm(10);
			qs_note_start(&options);
			signal(SIGPROF, end_now);
			setitimer(ITIMER_PROF, &soon, NULL);
			for (;;)
				fill(1);
		}
		wait_for(child);
	}
}
END_TEST

static void add_line_tests(Suite *suite)
{
	TCase *tests = tcase_create("lines");
	tcase_add_checked_fixture(tests, set_up, tear_down);
	tcase_add_test(tests, nothing_is_written_without_a_run_directory);
	tcase_add_test(tests, the_first_line_says_whose_log_it_is);
	tcase_add_test(tests, a_full_decision_has_every_member);
	tcase_add_test(tests, what_is_unknown_is_left_out);
	tcase_add_test(tests, the_dispatch_level_tells_it_in_words);
	tcase_add_loop_test(tests, hostile_bytes_make_valid_json, 0,
	                    (int)(sizeof hostile / sizeof *hostile));
	tcase_add_test(tests, valid_text_comes_back_unchanged);
	tcase_add_test(tests, each_broken_byte_becomes_one_replacement);
	tcase_add_test(tests, texts_longer_than_their_room_are_shortened_between_characters);
	tcase_add_test(tests, a_line_is_valid_in_a_buffer_of_any_size);
	tcase_add_test(tests, the_longest_decision_fits);
	tcase_add_test(tests, decisions_keep_errno);
	tcase_add_test(tests, lines_of_several_threads_are_whole);
	suite_add_tcase(suite, tests);
}

static void add_failure_tests(Suite *suite)
{
	TCase *tests = tcase_create("failures");
	tcase_set_timeout(tests, 30);
	tcase_add_checked_fixture(tests, set_up, tear_down);
	tcase_add_test(tests, a_directory_that_cannot_be_used_is_reported_once);
	tcase_add_test(tests, a_bad_placeholder_in_the_directory_is_reported);
	tcase_add_test(tests, a_size_limit_ends_the_log_after_a_whole_line);
	tcase_add_test(tests, a_full_disk_ends_the_log_and_not_the_program);
	tcase_add_test(tests, a_log_of_a_process_that_is_killed_is_complete);
	tcase_add_test(tests, a_forked_child_writes_its_own_log);
	tcase_add_test(tests, forking_while_others_write_does_not_deadlock_the_child);
	tcase_add_test(tests, an_exit_by_a_signal_handler_waits_for_no_line);
	suite_add_tcase(suite, tests);
}

int main(void)
{
	Suite *suite = suite_create("note_decision");
	add_line_tests(suite);
	add_failure_tests(suite);
	return qs_suite_main(suite);
}
