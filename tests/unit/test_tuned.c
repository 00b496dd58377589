/* policy/tuned.c: what is written reads back, what is broken is left out and named, and writers
 * that meet, stop half way or are killed leave a file that the next one can use. */
#include "note_support.h"

#include <sys/file.h>
#include <time.h>

#include "policy/tuned.h"

static struct qs_tuned_row some_row(int number)
{
	struct qs_tuned_row row = {
	        .measured = QS_ACTION_FP8,
	        .scaling = QS_SCALING_ROW,
	        .format = QS_FORMAT_E5M2,
	        .algorithm = "0123456789abcdef",
	        .ours_us = 12.5,
	        .native_us = 20.125,
	        .sqnr = -1,
	        .valid = {"NVIDIA H200", "13000", "130100", "0.1.0", "fedcba9876543210"},
	        .action = QS_ACTION_FP8,
	};
	snprintf(row.key, sizeof row.key, "TN m=%d n=64 k=64 bf16 alpha=2", number);
	return row;
}

/* Looks for a row of the same question. */
static bool find(struct qs_tuned *tuned, const struct qs_tuned_row *wanted,
                 struct qs_tuned_row *found)
{
	memset(found, 0, sizeof *found);
	memcpy(found->key, wanted->key, sizeof found->key);
	found->measured = wanted->measured;
	found->scaling = wanted->scaling;
	found->format = wanted->format;
	found->valid = wanted->valid;
	return qs_tuned_find(tuned, found);
}

static bool holds(struct qs_tuned *tuned, int number)
{
	struct qs_tuned_row row = some_row(number), found;
	return find(tuned, &row, &found);
}

static double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static const char *file(void)
{
	return in_scratch("tuned.ini");
}

static void write_text(const char *text, size_t length)
{
	int fd = open(file(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(write(fd, text, length), (ssize_t)length);
	close(fd);
}

static char text[1 << 20];

/* Adds rows by number to the file. */
static void add(int first, int count)
{
	struct qs_tuned *tuned = qs_tuned_open(file());
	for (int i = first; i < first + count; i++) {
		struct qs_tuned_row row = some_row(i);
		ck_assert(qs_tuned_add(tuned, &row));
	}
	qs_tuned_close(tuned);
}

static struct qs_tuned *opened(const char *content)
{
	write_text(content, strlen(content));
	return qs_tuned_open(file());
}

/* A row that holds for some_row(number), with more lines before its action. */
static const char *row_with(int number, const char *more)
{
	static char rows[2][1024];
	static int turn;
	char *row = rows[turn++ % 2];
	snprintf(row, sizeof rows[0],
	         "[product]\nkey = TN m=%d n=64 k=64 bf16 alpha=2\nmeasured = fp8\nscale = row\n"
	         "format = e5m2\ngpu = NVIDIA H200\ndriver = 13000\ncublaslt = 130100\n"
	         "qshim = 0.1.0\nnumerics = fedcba9876543210\n%saction = fp8\n",
	         number, more);
	return row;
}

START_TEST(a_row_reads_back)
{
	struct qs_tuned_row row = some_row(7), found;
	row.sqnr = 31.5;
	struct qs_tuned *tuned = qs_tuned_open(file());
	ck_assert(!find(tuned, &row, &found));
	ck_assert(qs_tuned_add(tuned, &row));
	ck_assert(find(tuned, &row, &found)); /* by the process that measured it */
	qs_tuned_close(tuned);
	tuned = qs_tuned_open(file());
	ck_assert(find(tuned, &row, &found));
	qs_tuned_close(tuned);
	ck_assert_str_eq(found.algorithm, row.algorithm);
	ck_assert(found.ours_us == 12.5 && found.native_us == 20.125 && found.sqnr == 31.5);
	ck_assert_int_eq(found.action, QS_ACTION_FP8);
	ck_assert(!found.pinned);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

START_TEST(what_is_unknown_is_left_out)
{
	add(1, 1);
	ck_assert_int_gt(read_file(file(), text, sizeof text), 0);
	ck_assert_ptr_null(strstr(text, "sqnr"));
	ck_assert_ptr_null(strstr(text, "\npinned"));
	ck_assert_ptr_nonnull(strstr(text, "\n[product]\nkey = TN m=1 n=64"));
}
END_TEST

/* A name that would end the line or begin a comment. */
START_TEST(no_name_breaks_a_row)
{
	struct qs_tuned_row row = some_row(1), found;
	strcpy(row.valid.gpu, "GPU;\naction = bf16");
	struct qs_tuned *tuned = qs_tuned_open(file());
	ck_assert(qs_tuned_add(tuned, &row));
	qs_tuned_close(tuned);
	strcpy(row.valid.gpu, "GPU??action = bf16");
	tuned = qs_tuned_open(file());
	ck_assert(find(tuned, &row, &found));
	ck_assert_int_eq(found.action, QS_ACTION_FP8);
	qs_tuned_close(tuned);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

START_TEST(what_is_left_out_is_unknown)
{
	struct qs_tuned_row row = some_row(1), found;
	struct qs_tuned *tuned = opened(row_with(1, ""));
	ck_assert(find(tuned, &row, &found));
	ck_assert(found.tokens < 0 && found.sqnr < 0);
	ck_assert(found.ours_us < 0 && found.convert_us < 0 && found.native_us < 0);
	ck_assert(!found.pinned);
	ck_assert_str_eq(found.algorithm, "");
	qs_tuned_close(tuned);
}
END_TEST

START_TEST(another_question_has_no_answer)
{
	struct qs_tuned_row row = some_row(1), found;
	add(1, 1);
	struct qs_tuned *tuned = qs_tuned_open(file());
	row.scaling = QS_SCALING_TENSOR;
	ck_assert(!find(tuned, &row, &found));
	row = some_row(1);
	row.format = QS_FORMAT_AUTO;
	ck_assert(!find(tuned, &row, &found));
	row = some_row(1);
	row.measured = QS_ACTION_BF16;
	ck_assert(!find(tuned, &row, &found));
	ck_assert(!holds(tuned, 2));
	ck_assert(holds(tuned, 1));
	qs_tuned_close(tuned);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

START_TEST(the_last_row_counts)
{
	char both[2048];
	struct qs_tuned_row row = some_row(1), found;
	snprintf(both, sizeof both, "%s%s", row_with(1, "ours_us = 5\n"),
	         row_with(1, "ours_us = 6\n"));
	struct qs_tuned *tuned = opened(both);
	ck_assert(find(tuned, &row, &found));
	ck_assert(found.ours_us == 6);
	qs_tuned_close(tuned);
}
END_TEST

START_TEST(a_row_of_another_place_does_not_hold)
{
	struct qs_tuned_row row = some_row(1), found;
	add(1, 2);
	static const size_t members[] = {
	        offsetof(struct qs_validators, gpu), offsetof(struct qs_validators, driver),
	        offsetof(struct qs_validators, cublaslt), offsetof(struct qs_validators, qshim),
	        offsetof(struct qs_validators, numerics)};
	struct qs_tuned *tuned = qs_tuned_open(file());
	strcpy((char *)&row.valid + members[_i], "other");
	ck_assert(!find(tuned, &row, &found));
	struct qs_tuned_row second = some_row(2);
	strcpy((char *)&second.valid + members[_i], "other");
	ck_assert(!find(tuned, &second, &found));
	qs_tuned_close(tuned);
	ck_assert_uint_eq(count_lines(stderr_text()), 1); /* of two */
	ck_assert_ptr_nonnull(strstr(caught, "here other) are not used"));
}
END_TEST

/* As a hand may write one. */
START_TEST(a_row_that_says_nothing_of_its_place_does_not_hold)
{
	struct qs_tuned_row row = some_row(1), found;
	struct qs_tuned *tuned = opened("[product]\nkey = TN m=1 n=64 k=64 bf16 alpha=2\nmeasured "
	                                "= fp8\nscale = row\nformat = e5m2\naction = fp8\n");
	ck_assert(!find(tuned, &row, &found));
	qs_tuned_close(tuned);
	ck_assert_ptr_nonnull(
	        strstr(stderr_text(), "rows of another GPU (none, here NVIDIA H200) are not used"));
}
END_TEST

START_TEST(the_last_of_pinned_rows_counts)
{
	char both[2048];
	struct qs_tuned_row row = some_row(1), found;
	snprintf(both, sizeof both, "%s%s", row_with(1, "pinned = yes\nours_us = 5\n"),
	         row_with(1, "pinned = yes\nours_us = 6\n"));
	struct qs_tuned *tuned = opened(both);
	ck_assert(find(tuned, &row, &found));
	ck_assert(found.ours_us == 6);
	qs_tuned_close(tuned);
}
END_TEST

START_TEST(a_pinned_row_holds_everywhere_and_against_later_ones)
{
	char both[2048];
	struct qs_tuned_row row = some_row(1), found;
	strcpy(row.valid.driver, "13010");
	snprintf(both, sizeof both, "%s%s", row_with(1, "pinned = yes\nours_us = 5\n"),
	         row_with(1, "ours_us = 6\n"));
	struct qs_tuned *tuned = opened(both);
	ck_assert(find(tuned, &row, &found));
	ck_assert(found.pinned && found.ours_us == 5);
	row = some_row(1);
	ck_assert(find(tuned, &row, &found));
	ck_assert(found.pinned && found.ours_us == 5);
	qs_tuned_close(tuned);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

static const struct {
	const char *text, *message;
} broken[] = {
        {"key = x\n", "1: 'key' stands before the first [product] ("},
        {"[product]\nkey\n", "2: 'key' is neither [product] nor 'key = value' ("},
        {"; x\n[produce]\naction = fp8\n", "2: '[produce]' should be [product] ("},
        {"[product]\nkey = x\nkey = y\naction = fp8\n", "3: 'key' is given twice ("},
        {"[product]\nspeed = 3\naction = fp8\n", "2: unknown key 'speed' ("},
        {"[product]\nours_us = fast\naction = fp8\n",
         "2: unusable value 'fast' of 'ours_us': expected a number ("},
        {"[product]\nkey = ; none\naction = fp8\n",
         "2: unusable value '' of 'key': expected 1 to 111 characters ("},
        {"[product]\nalgorithm = 0123456789abcdef0\naction = fp8\n",
         "2: unusable value '0123456789abcdef0' of 'algorithm': expected 1 to 16 characters ("},
        {"[product]\npinned = maybe\naction = fp8\n",
         "2: unusable value 'maybe' of 'pinned': expected no or yes ("},
        {"[product]\nkey = x\naction = fp8\n", "1: the row has no measured ("},
        {"[product]\nmeasured = fp8\naction = fp8\n", "1: the row has no key ("},
        {"[product]\nkey = x\nmeasured = auto\naction = auto\n",
         "1: 'auto' is measured, and chosen, of a step only ("},
        {"[product]\nkey = x\nmeasured = fp8\naction = auto\n",
         "1: 'auto' is measured, and chosen, of a step only ("},
        {"[product]\nkey = step of 2\nmeasured = fp8\naction = native\n",
         "1: 'auto' is measured, and chosen, of a step only ("},
        {"[product]\naction = fp8\naction = fp9\n[product]\nx = y\naction = fp8\n",
         "3: 'action' is given twice (row not used; 1 further error)"},
};

START_TEST(a_broken_row_is_named_and_the_others_hold)
{
	char all[4096], message[600];
	snprintf(all, sizeof all, "%s%s", broken[_i].text, row_with(1, ""));
	struct qs_tuned *tuned = opened(all);
	ck_assert(holds(tuned, 1));
	qs_tuned_close(tuned);
	snprintf(message, sizeof message, "qshim: %s:%s", file(), broken[_i].message);
	ck_assert_msg(!strncmp(stderr_text(), message, strlen(message)), "%s is not %s", caught,
	              message);
	ck_assert_uint_eq(count_lines(caught), 1);
}
END_TEST

START_TEST(a_long_line_is_named)
{
	char all[4096];
	snprintf(all, sizeof all, "[product]\nkey = %0300d\n%s", 0, row_with(1, ""));
	struct qs_tuned *tuned = opened(all);
	ck_assert(holds(tuned, 1));
	qs_tuned_close(tuned);
	ck_assert_ptr_nonnull(strstr(stderr_text(), ":2: a line of 306 characters; at most 198"));
}
END_TEST

/* As a power failure leaves them where a row was to be. */
START_TEST(nul_characters_are_a_broken_line)
{
	static const char nothing[600];
	size_t length = (size_t)snprintf(text, sizeof text, "%s", row_with(1, ""));
	memcpy(text + length, nothing, sizeof nothing);
	write_text(text, length + sizeof nothing);
	add(2, 1);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(caught, ":12: a line of 600 characters"));
	struct qs_tuned *tuned = qs_tuned_open(file());
	ck_assert(!holds(tuned, 1) && holds(tuned, 2)); /* they may have been lines of row 1 */
	qs_tuned_close(tuned);
	text[length + 1] = '\n';
	write_text(text, length + 2);
	tuned = qs_tuned_open(file());
	qs_tuned_close(tuned);
	ck_assert_ptr_nonnull(strstr(stderr_text(), ":12: '?' is neither"));
}
END_TEST

START_TEST(a_hand_may_write_blanks_and_comments)
{
	char all[4096];
	snprintf(all, sizeof all, "# mine\r\n\n  ; more\n [product] \r\n%s",
	         strchr(row_with(1, "\tpinned=yes ; ever\r\n"), '\n') + 1);
	struct qs_tuned_row row = some_row(1), found;
	struct qs_tuned *tuned = opened(all);
	ck_assert(find(tuned, &row, &found));
	ck_assert(found.pinned);
	qs_tuned_close(tuned);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

/* Every length that a crash could leave. */
START_TEST(a_torn_row_is_named_and_gives_way_to_the_next)
{
	add(1, 2);
	static char full[8192];
	const size_t length = (size_t)read_file(file(), full, sizeof full);
	const size_t begin = (size_t)(strstr(strstr(full, "[product]") + 1, "[product]") - full);
	for (size_t cut = begin; cut < length; cut++) {
		/* The last character is the line feed: without it the row is whole. */
		const bool torn = cut < length - 1, told = torn && cut > begin;
		write_text(full, cut);
		ck_assert_int_eq(truncate(in_scratch("stderr"), 0), 0);
		struct qs_tuned *tuned = qs_tuned_open(file());
		ck_assert(holds(tuned, 1) && holds(tuned, 2) == !torn);
		qs_tuned_close(tuned);
		ck_assert_msg(count_lines(stderr_text()) == told, "cut at %zu: %s", cut, caught);
		add(3, 1);
		tuned = qs_tuned_open(file());
		ck_assert(holds(tuned, 1) && holds(tuned, 2) == !torn && holds(tuned, 3));
		qs_tuned_close(tuned);
		/* Read twice, and removed. */
		ck_assert_msg(count_lines(stderr_text()) == 3 * told, "cut at %zu: %s", cut,
		              caught);
		ck_assert(!told || strstr(caught, "removes the last row, which has no action"));
	}
}
END_TEST

/* However a hand wrote the action of the last row, which holds, the next writer leaves it there. */
static const char *const last_actions[] = {"action=fp8", "action : fp8\n", "action:fp8 ; mine\n",
                                           "\taction =\tfp8\r\n"};

START_TEST(a_last_row_that_holds_is_not_removed)
{
	char all[1200];
	strcpy(all, row_with(1, "pinned = yes\n"));
	strcpy(strstr(all, "action = "), last_actions[_i]);
	struct qs_tuned *tuned = opened(all);
	ck_assert(holds(tuned, 1));
	qs_tuned_close(tuned);
	add(2, 1);
	tuned = qs_tuned_open(file());
	ck_assert(holds(tuned, 1) && holds(tuned, 2));
	qs_tuned_close(tuned);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

START_TEST(a_row_that_a_hand_left_without_an_action_is_named)
{
	struct qs_tuned *tuned = opened("[product]\nkey = x\nmeasured = fp8\n; to do");
	qs_tuned_close(tuned);
	ck_assert_ptr_nonnull(strstr(stderr_text(), ":1: the row has no action (row not used)"));
}
END_TEST

static int spawn(void (*work)(int), int number)
{
	int pid = fork();
	ck_assert_int_ge(pid, 0);
	if (!pid) {
		work(number);
		_exit(0);
	}
	return pid;
}

#define WRITERS 4
#define EACH    100

static void write_many(int number)
{
	struct qs_tuned *tuned = qs_tuned_open(file());
	for (int i = 0; i < EACH; i++) {
		struct qs_tuned_row row = some_row(number * EACH + i);
		if (!qs_tuned_add(tuned, &row))
			_exit(1);
	}
}

START_TEST(four_writers_lose_no_row)
{
	int pids[WRITERS], status;
	for (int i = 0; i < WRITERS; i++)
		pids[i] = spawn(write_many, i);
	for (int i = 0; i < WRITERS; i++) {
		ck_assert_int_eq(waitpid(pids[i], &status, 0), pids[i]);
		ck_assert_int_eq(status, 0);
	}
	struct qs_tuned *tuned = qs_tuned_open(file());
	for (int i = 0; i < WRITERS * EACH; i++)
		ck_assert_msg(holds(tuned, i), "row %d is lost", i);
	qs_tuned_close(tuned);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

static void write_for_ever(int number)
{
	struct qs_tuned *tuned = qs_tuned_open(file());
	for (;; number++) {
		struct qs_tuned_row row = some_row(number);
		qs_tuned_add(tuned, &row);
	}
}

START_TEST(a_writer_may_be_killed_at_any_moment)
{
	for (int i = 0; i < 20; i++) {
		int status, pid = spawn(write_for_ever, 1000);
		usleep((unsigned)(1000 + 317 * i));
		ck_assert_int_eq(kill(pid, SIGKILL), 0);
		ck_assert_int_eq(waitpid(pid, &status, 0), pid);
		add(i, 1);
		struct qs_tuned *tuned = qs_tuned_open(file());
		for (int j = 0; j <= i; j++)
			ck_assert_msg(holds(tuned, j), "row %d is lost after kill %d", j, i);
		qs_tuned_close(tuned);
	}
	/* At most a torn row for each, read and removed. */
	ck_assert_uint_le(count_lines(stderr_text()), 40);
}
END_TEST

START_TEST(a_lock_that_is_not_given_back_is_given_up)
{
	struct qs_tuned_row row = some_row(1), found;
	add(2, 1);
	int fd = open(file(), O_RDONLY | O_CLOEXEC);
	ck_assert_int_eq(flock(fd, LOCK_EX), 0);
	struct qs_tuned *tuned = qs_tuned_open(file());
	errno = 42;
	ck_assert(!qs_tuned_add(tuned, &row));
	ck_assert_int_eq(errno, 42);
	ck_assert(find(tuned, &row, &found)); /* in this process */
	double start = seconds();
	ck_assert(!qs_tuned_add(tuned, &row)); /* waits no more, not even once it could */
	ck_assert_double_lt(seconds() - start, 0.5);
	close(fd);
	ck_assert(!qs_tuned_add(tuned, &row));
	qs_tuned_close(tuned);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(caught, "what is measured is not kept"));
}
END_TEST

/* What is being written is waited for. */
START_TEST(a_reader_waits_for_a_writer_for_a_moment)
{
	add(1, 1);
	int fd = open(file(), O_RDWR | O_APPEND | O_CLOEXEC);
	ck_assert_int_eq(flock(fd, LOCK_EX), 0);
	double start = seconds();
	struct qs_tuned *tuned = qs_tuned_open(file());
	ck_assert_double_gt(seconds() - start, 0.05);
	ck_assert_double_lt(seconds() - start, 0.9);
	ck_assert(holds(tuned, 1)); /* is read nevertheless */
	qs_tuned_close(tuned);
	close(fd);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

/* Another file takes the place of the one that is locked, `times` times. */
static void replace_file(int times)
{
	int fd = open(file(), O_RDONLY | O_CLOEXEC);
	ck_assert_int_eq(flock(fd, LOCK_EX), 0);
	for (int i = 0; i < times; i++) {
		char next[600];
		snprintf(next, sizeof next, "%s", in_scratch("next.ini"));
		int other = open(next, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
		flock(other, LOCK_EX);
		const char *row = row_with(2, "");
		if (write(other, row, strlen(row)) < 0)
			_exit(1);
		usleep(150000);
		rename(next, file());
		close(fd);
		fd = other;
	}
	usleep(150000);
}

START_TEST(a_row_goes_into_the_file_that_an_editor_put_there)
{
	struct qs_tuned_row row = some_row(1);
	int status;
	add(3, 1);
	struct qs_tuned *tuned = qs_tuned_open(file());
	int pid = spawn(replace_file, 1 + 4 * _i);
	usleep(50000);
	ck_assert(qs_tuned_add(tuned, &row) == !_i); /* not for ever */
	qs_tuned_close(tuned);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	ck_assert_int_eq(status, 0);
	tuned = qs_tuned_open(file());
	ck_assert(holds(tuned, 1) == !_i && holds(tuned, 2) && !holds(tuned, 3));
	qs_tuned_close(tuned);
	ck_assert_uint_eq(count_lines(stderr_text()), (size_t)_i);
}
END_TEST

START_TEST(without_a_home_there_is_no_file)
{
	static const struct {
		const char *home, *pattern, *why;
	} no[] = {{NULL, "~/t.ini", "~/t.ini: HOME is not set (what is measured is not kept)"},
	          {"here", "~/t.ini", "~/t.ini: HOME is not set ("},
	          {"/", "%y.ini", "%y.ini: no usable file name ("}};
	struct qs_tuned_row row = some_row(1);
	ck_assert_int_eq(chdir(scratch), 0);
	ck_assert_int_eq(mkdir("~", 0700), 0);
	if (no[_i].home)
		setenv("HOME", no[_i].home, 1);
	else
		unsetenv("HOME");
	struct qs_tuned *tuned = qs_tuned_open(no[_i].pattern);
	ck_assert_str_eq(stderr_text(), ""); /* nothing to keep yet */
	ck_assert(!qs_tuned_add(tuned, &row) && !qs_tuned_add(tuned, &row));
	ck_assert(holds(tuned, 1));
	qs_tuned_close(tuned);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(caught, no[_i].why));
	ck_assert_int_eq(rmdir("~"), 0);
	ck_assert_int_eq(unlink("%y.ini"), -1);
}
END_TEST

START_TEST(a_name_may_have_placeholders)
{
	char name[32];
	struct qs_tuned_row row = some_row(1);
	setenv("HOME", scratch, 1);
	struct qs_tuned *tuned = qs_tuned_open("~/%p.ini");
	ck_assert(qs_tuned_add(tuned, &row));
	qs_tuned_close(tuned);
	snprintf(name, sizeof name, "%d.ini", getpid());
	ck_assert_int_eq(access(in_scratch(name), F_OK), 0);
}
END_TEST

/* Elsewhere a misspelt path is reported. */
START_TEST(a_new_home_gets_its_cache_directory)
{
	struct stat status;
	struct qs_tuned_row row = some_row(1);
	setenv("HOME", scratch, 1);
	struct qs_tuned *tuned = qs_tuned_open(in_scratch(".cache/qshim/t.ini"));
	ck_assert(!qs_tuned_add(tuned, &row));
	qs_tuned_close(tuned);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	tuned = qs_tuned_open("~/.cache/qshim/t.ini");
	ck_assert(qs_tuned_add(tuned, &row));
	qs_tuned_close(tuned);
	ck_assert_int_eq(stat(in_scratch(".cache"), &status), 0);
	ck_assert_int_eq(status.st_mode & 0777, 0700);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
}
END_TEST

/* Lines of a screen's width, each of them a comment. */
START_TEST(the_file_says_what_it_is)
{
	add(1, 1);
	ck_assert_int_gt(read_file(file(), text, sizeof text), 0);
	char *line = strtok(text, "\n");
	for (; *line != '['; line = strtok(NULL, "\n")) {
		ck_assert(!strncmp(line, "; ", 2));
		ck_assert_msg(strlen(line) < 81, "%s", line);
	}
}
END_TEST

START_TEST(a_file_is_made_for_its_owner_only_and_not_by_reading)
{
	struct stat status;
	char path[600];
	struct qs_tuned_row row = some_row(1);
	snprintf(path, sizeof path, "%s", in_scratch("new/tuned.ini"));
	struct qs_tuned *tuned = qs_tuned_open(path);
	ck_assert_int_eq(stat(in_scratch("new"), &status), -1);
	ck_assert(qs_tuned_add(tuned, &row));
	qs_tuned_close(tuned);
	ck_assert_int_eq(stat(path, &status), 0);
	ck_assert_int_eq(status.st_mode & 0777, 0600);
	ck_assert_int_eq(stat(in_scratch("new"), &status), 0);
	ck_assert_int_eq(status.st_mode & 0777, 0700);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

/* Neither read nor written, and said once. */
static void ck_refused(const char *why)
{
	struct qs_tuned_row row = some_row(9);
	struct stat before, after;
	ck_assert_int_eq(stat(file(), &before), 0);
	struct qs_tuned *tuned = qs_tuned_open(file());
	ck_assert(!holds(tuned, 1));
	ck_assert(!qs_tuned_add(tuned, &row));
	ck_assert(!qs_tuned_add(tuned, &row));
	qs_tuned_close(tuned);
	ck_assert_int_eq(stat(file(), &after), 0);
	ck_assert_int_eq(before.st_size, after.st_size);
	ck_assert_msg(strstr(stderr_text(), why), "%s", caught);
	ck_assert_uint_eq(count_lines(caught), 1);
}

START_TEST(a_full_disk_leaves_no_part_of_a_row)
{
	struct qs_tuned_row row = some_row(1);
	add(2, 1);
	const long before = read_file(file(), text, sizeof text);
	const struct rlimit little = {(rlim_t)before + 100, RLIM_INFINITY};
	const struct rlimit enough = {RLIM_INFINITY, RLIM_INFINITY};
	struct qs_tuned *tuned = qs_tuned_open(file());
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &little), 0);
	ck_assert(!qs_tuned_add(tuned, &row));
	ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &enough), 0);
	ck_assert_int_eq(read_file(file(), text, sizeof text), before);
	ck_assert(qs_tuned_add(tuned, &row)); /* may have room again */
	qs_tuned_close(tuned);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(caught, "what is measured is not kept"));
}
END_TEST

START_TEST(a_file_that_others_may_write_is_refused)
{
	add(1, 1);
	ck_assert_int_eq(chmod(file(), _i ? 0602 : 0620), 0);
	ck_refused("others may write to it");
}
END_TEST

START_TEST(a_link_is_refused)
{
	add(1, 1);
	ck_assert_int_eq(rename(file(), in_scratch("real")), 0);
	ck_assert_int_eq(
	        _i ? link(in_scratch("real"), file()) : symlink(in_scratch("real"), file()), 0);
	ck_refused("what is measured is not kept");
}
END_TEST

START_TEST(a_directory_that_everyone_may_change_is_refused)
{
	add(1, 1);
	ck_assert_int_eq(chmod(scratch, 0777), 0);
	ck_refused("what is measured is not kept");
}
END_TEST

START_TEST(a_huge_file_is_refused)
{
	add(1, 1);
	ck_assert_int_eq(truncate(file(), QS_TUNED_MAX), 0);
	ck_refused("4 MiB");
}
END_TEST

START_TEST(numerics_are_the_section_and_nothing_else)
{
	struct qs_options options;
	char before[17], after[17];
	qs_options_default(&options);
	qs_tuned_numerics(&options, before);
	options.min_gain = 0.5;
	qs_tuned_numerics(&options, after);
	ck_assert_str_eq(before, after);
	options.min_sqnr = 21;
	qs_tuned_numerics(&options, after);
	ck_assert_str_ne(before, after);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("tuned");
	TCase *tcase = tcase_create("tuned");
	tcase_add_checked_fixture(tcase, set_up, tear_down);
	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, a_row_reads_back);
	tcase_add_test(tcase, what_is_unknown_is_left_out);
	tcase_add_test(tcase, no_name_breaks_a_row);
	tcase_add_test(tcase, what_is_left_out_is_unknown);
	tcase_add_test(tcase, another_question_has_no_answer);
	tcase_add_test(tcase, the_last_row_counts);
	tcase_add_loop_test(tcase, a_row_of_another_place_does_not_hold, 0, 5);
	tcase_add_test(tcase, a_row_that_says_nothing_of_its_place_does_not_hold);
	tcase_add_test(tcase, the_last_of_pinned_rows_counts);
	tcase_add_test(tcase, a_pinned_row_holds_everywhere_and_against_later_ones);
	tcase_add_loop_test(tcase, a_broken_row_is_named_and_the_others_hold, 0,
	                    (int)(sizeof broken / sizeof *broken));
	tcase_add_test(tcase, a_long_line_is_named);
	tcase_add_test(tcase, nul_characters_are_a_broken_line);
	tcase_add_test(tcase, a_hand_may_write_blanks_and_comments);
	tcase_add_test(tcase, a_torn_row_is_named_and_gives_way_to_the_next);
	tcase_add_loop_test(tcase, a_last_row_that_holds_is_not_removed, 0,
	                    (int)(sizeof last_actions / sizeof *last_actions));
	tcase_add_test(tcase, a_row_that_a_hand_left_without_an_action_is_named);
	tcase_add_test(tcase, four_writers_lose_no_row);
	tcase_add_test(tcase, a_writer_may_be_killed_at_any_moment);
	tcase_add_test(tcase, a_lock_that_is_not_given_back_is_given_up);
	tcase_add_test(tcase, a_reader_waits_for_a_writer_for_a_moment);
	tcase_add_loop_test(tcase, a_row_goes_into_the_file_that_an_editor_put_there, 0, 2);
	tcase_add_loop_test(tcase, without_a_home_there_is_no_file, 0, 3);
	tcase_add_test(tcase, a_name_may_have_placeholders);
	tcase_add_test(tcase, a_new_home_gets_its_cache_directory);
	tcase_add_test(tcase, the_file_says_what_it_is);
	tcase_add_test(tcase, a_file_is_made_for_its_owner_only_and_not_by_reading);
	tcase_add_test(tcase, a_full_disk_leaves_no_part_of_a_row);
	tcase_add_loop_test(tcase, a_file_that_others_may_write_is_refused, 0, 2);
	tcase_add_loop_test(tcase, a_link_is_refused, 0, 2);
	tcase_add_test(tcase, a_directory_that_everyone_may_change_is_refused);
	tcase_add_test(tcase, a_huge_file_is_refused);
	tcase_add_test(tcase, numerics_are_the_section_and_nothing_else);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
