/* note/counter.c: the slots, in the file and out of it. */
#include "note_support.h"

#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>
#include <time.h>

#include "version.h"

/* A counters file, read back. */
struct image {
	struct qs_counter_header header;
	struct qs_counter slots[32];
};

static struct image image;

static const struct image *read_counters(int pid)
{
	memset(&image, 0, sizeof image);
	int fd = open(out_file("counters", pid, "bin"), O_RDONLY | O_CLOEXEC);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_ge(read(fd, &image, sizeof image), (ssize_t)sizeof image.header);
	close(fd);
	return &image;
}

static struct qs_counter *add(const char *text, const char *rule)
{
	struct qs_key key = linear_key(64, 32, 16);
	key.role = QS_ROLE_FWD;
	return qs_counter_new(text, &key, QS_ACTION_FP8, QS_REASON_RULE, rule, "layer.0");
}

START_TEST(the_file_format_is_fixed)
{
	ck_assert_uint_eq(sizeof(struct qs_counter_header), 256);
	ck_assert_uint_eq(offsetof(struct qs_counter_header, used), 20);
	ck_assert_uint_eq(offsetof(struct qs_counter_header, start), 32);
	ck_assert_uint_eq(offsetof(struct qs_counter_header, exe), 40);
	ck_assert_uint_eq(sizeof(struct qs_counter), 256);
	ck_assert_uint_eq(offsetof(struct qs_counter, action), 184);
	ck_assert_uint_eq(offsetof(struct qs_counter, used), 188);
	ck_assert_uint_eq(offsetof(struct qs_counter, flops), 192);
	ck_assert_uint_eq(offsetof(struct qs_counter, calls), 200);
	ck_assert_uint_eq(offsetof(struct qs_counter, late), 224);
}
END_TEST

START_TEST(the_header_says_whose_counters_they_are)
{
	struct qs_options options = out_options();
	setenv("RANK", "5", 1);
	qs_note_start(&options);
	const struct qs_counter_header *header = &read_counters(getpid())->header;
	unsetenv("RANK");
	ck_assert_mem_eq(header->magic, "QSHIMCNT", 8);
	ck_assert_uint_eq(header->version, 1);
	ck_assert_uint_eq(header->slot_size, 256);
	ck_assert_uint_eq(header->slots, 17); /* max_keys and "other" */
	ck_assert_uint_eq(header->used, 0);
	ck_assert_int_eq(header->pid, getpid());
	ck_assert_int_eq(header->rank, 5);
	ck_assert_int_le(labs((long)header->start - (long)time(NULL)), 60);
	ck_assert_str_eq(header->exe, program_invocation_short_name);
	ck_assert_str_eq(header->program, QS_VERSION);
}
END_TEST

START_TEST(a_slot_is_in_the_file_at_once)
{
	struct qs_options options = out_options();
	qs_note_start(&options);
	struct qs_counter *counter = add("TN m=64 n=32 k=16 bf16 fwd", "mlp");
	atomic_fetch_add(&counter->calls, 7);
	atomic_fetch_add(&counter->replaced, 6);
	atomic_fetch_add(&counter->bytes, 5);
	atomic_fetch_add(&counter->late, 4);
	const struct image *file = read_counters(getpid());
	const struct qs_counter *slot = &file->slots[0];
	ck_assert_uint_eq(file->header.used, 1);
	ck_assert_str_eq(slot->key, "TN m=64 n=32 k=16 bf16 fwd");
	ck_assert_str_eq(slot->rule, "mlp");
	ck_assert_str_eq(slot->layer, "layer.0");
	ck_assert_int_eq(slot->action, QS_ACTION_FP8);
	ck_assert_int_eq(slot->reason, QS_REASON_RULE);
	ck_assert_int_eq(slot->role, QS_ROLE_FWD);
	ck_assert_int_eq(slot->entry, QS_ENTRY_GEMM_EX);
	ck_assert_uint_eq(slot->used, 1);
	ck_assert_double_eq(slot->flops, 2.0 * 64 * 32 * 16);
	ck_assert_uint_eq(slot->calls, 7);
	ck_assert_uint_eq(slot->replaced, 6);
	ck_assert_uint_eq(slot->bytes, 5);
	ck_assert_uint_eq(slot->late, 4);
}
END_TEST

START_TEST(counters_of_a_killed_process_are_readable)
{
	int status;
	struct qs_options options = out_options();
	pid_t child = fork();
	if (!child) {
		qs_note_forked();
		qs_note_start(&options);
		struct qs_counter *counter = add("key", "mlp");
		for (int i = 0; i < 1000; i++)
			atomic_fetch_add(&counter->calls, 1);
		kill(getpid(), SIGKILL);
	}
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert(WIFSIGNALED(status));
	ck_assert_str_eq(read_counters(child)->slots[0].key, "key");
	ck_assert_uint_eq(image.slots[0].calls, 1000);
}
END_TEST

START_TEST(long_texts_are_cut_and_terminated)
{
	char text[400];
	struct qs_key key = linear_key(64, 32, 16);
	struct qs_options options = note_options();
	memset(text, 'x', sizeof text - 1);
	text[sizeof text - 1] = '\0';
	qs_note_start(&options);
	struct qs_counter *counter =
	        qs_counter_new(text, &key, QS_ACTION_FP8, QS_REASON_RULE, text, text);
	ck_assert_uint_eq(strlen(counter->key), sizeof counter->key - 1);
	ck_assert_uint_eq(strlen(counter->rule), sizeof counter->rule - 1);
	ck_assert_uint_eq(strlen(counter->layer), sizeof counter->layer - 1);
	ck_assert_int_eq(counter->action, QS_ACTION_FP8);
}
END_TEST

START_TEST(keys_beyond_the_table_share_the_last_slot)
{
	struct qs_options options = out_options();
	qs_note_start(&options);
	struct qs_counter *last = NULL;
	for (int i = 0; i < 16; i++)
		last = add("own", NULL);
	ck_assert_str_eq(last->key, "own");
	ck_assert_ptr_null(qs_counter_at(16));
	struct qs_counter *other = add("too many", "mlp");
	ck_assert_ptr_eq(other, last + 1);
	ck_assert_ptr_eq(add("more", NULL), other);
	ck_assert_str_eq(other->key, "other");
	ck_assert_int_eq(other->action, QS_ACTION_NATIVE);
	ck_assert_int_eq(other->reason, QS_REASON_CACHE_FULL);
	ck_assert_double_eq(other->flops, 0.0);
	ck_assert_int_eq(qs_counter_index(last), 15);
	ck_assert_int_eq(qs_counter_index(other), -1);
	ck_assert_uint_eq(read_counters(getpid())->header.used, 16);
	ck_assert_str_eq(image.slots[16].key, "other");
	ck_assert_uint_eq(image.slots[16].used, 1);
}
END_TEST

START_TEST(a_decision_of_a_shared_slot_changes_nothing)
{
	struct qs_options options = note_options();
	options.max_keys = 1;
	struct qs_counter *early = add("before the start", NULL);
	qs_counter_decide(early, QS_ACTION_FP8, QS_REASON_RULE, "mlp");
	ck_assert_int_eq(early->action, QS_ACTION_NATIVE);
	qs_note_start(&options);
	struct qs_counter *own = add("own", NULL), *other = add("too many", NULL);
	qs_counter_decide(other, QS_ACTION_FP8, QS_REASON_RULE, "mlp");
	ck_assert_int_eq(other->action, QS_ACTION_NATIVE);
	ck_assert_str_eq(other->rule, "");
	qs_counter_decide(own, QS_ACTION_NF4, QS_REASON_TUNED, "head");
	ck_assert_int_eq(own->action, QS_ACTION_NF4);
	ck_assert_int_eq(own->reason, QS_REASON_TUNED);
	ck_assert_str_eq(own->rule, "head");
	qs_counter_decide(own, QS_ACTION_NATIVE, QS_REASON_SMALL, NULL);
	ck_assert_str_eq(own->rule, "");
}
END_TEST

START_TEST(slots_are_listed_in_order_and_other_last)
{
	struct qs_options options = note_options();
	options.max_keys = 2;
	ck_assert_ptr_null(qs_counter_at(0));
	qs_note_start(&options);
	ck_assert_ptr_null(qs_counter_at(0));
	add("a", NULL);
	add("b", NULL);
	add("c", NULL);
	ck_assert_str_eq(qs_counter_at(0)->key, "a");
	ck_assert_str_eq(qs_counter_at(1)->key, "b");
	ck_assert_str_eq(qs_counter_at(2)->key, "other");
	ck_assert_ptr_null(qs_counter_at(3));
	ck_assert_ptr_null(qs_counter_at(SIZE_MAX));
}
END_TEST

START_TEST(before_any_start_there_is_one_slot_for_all)
{
	struct qs_counter *counter = add("early", NULL);
	ck_assert_ptr_nonnull(counter);
	ck_assert_ptr_eq(add("second", NULL), counter);
	ck_assert_str_eq(counter->key, "other");
	ck_assert_ptr_eq(qs_counter_at(0), counter);
	ck_assert_ptr_null(qs_counter_at(1));
}
END_TEST

START_TEST(the_number_of_slots_is_bounded)
{
	static const int64_t wanted[] = {INT64_MIN, 0, INT64_MAX};
	for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
		struct qs_options options = note_options();
		options.max_keys = wanted[i];
		qs_note_start(&options);
		size_t slots = 0;
		while (strcmp(add("key", NULL)->key, "other"))
			slots++;
		ck_assert_uint_eq(slots, wanted[i] > 1 ? 65536 : 1);
		qs_note_forked();
	}
}
END_TEST

/* A slot that nobody used has no page: most of max_keys costs nothing. */
START_TEST(unused_slots_take_no_memory)
{
	unsigned char resident[64];
	size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = 0;
	struct qs_options options = note_options();
	options.max_keys = 1000;
	qs_note_start(&options);
	char *first = (char *)add("key", NULL) - sizeof(struct qs_counter_header);
	size_t count = (1002 * 256 + page - 1) / page;
	ck_assert_uint_le(count, sizeof resident);
	ck_assert_int_eq(mincore(first, count * page, resident), 0);
	for (size_t i = 0; i < count; i++)
		pages += resident[i] & 1;
	ck_assert_uint_eq(pages, 1);
}
END_TEST

START_TEST(a_file_that_exists_is_left_alone)
{
	char name[64], text[16];
	struct qs_options options = out_options();
	ck_assert_int_eq(mkdir(in_scratch("out"), 0700), 0);
	int fd = open(out_file("counters", getpid(), "bin"), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	ck_assert_int_eq(write(fd, "theirs", 6), 6);
	close(fd);
	qs_note_start(&options);
	add("key", NULL);
	ck_assert_int_eq(read_file(out_file("counters", getpid(), "bin"), text, sizeof text), 6);
	snprintf(name, sizeof name, "out/counters.0.%d.2.bin", getpid());
	ck_assert_int_eq(access(in_scratch(name), F_OK), 0);
	ck_assert_str_eq(stderr_text(), "");
}
END_TEST

/* The blocks are allocated before the file is mapped: what does not fit is refused, not a SIGBUS.
 */
START_TEST(a_file_that_does_not_fit_is_refused_and_removed)
{
	struct qs_options options = out_options();
	int limited = limit_files(2048); /* the first line of the decisions fits */
	qs_note_start(&options);
	int unlimited = limit_files(RLIM_INFINITY);
	ck_assert_int_eq(limited, 0);
	ck_assert_int_eq(unlimited, 0);
	ck_assert_int_ne(access(out_file("counters", getpid(), "bin"), F_OK), 0);
	ck_assert_uint_eq(count_lines(stderr_text()), 1);
	ck_assert_ptr_nonnull(strstr(stderr_text(), "counters are kept in memory only"));
	struct qs_counter *counter = add("key", NULL);
	ck_assert_str_eq(counter->key, "key");
	atomic_fetch_add(&counter->calls, 1);
	ck_assert_uint_eq(qs_counter_at(0)->calls, 1);
}
END_TEST

START_TEST(all_blocks_of_the_file_are_allocated)
{
	struct stat status;
	struct qs_options options = out_options();
	options.max_keys = 4096;
	qs_note_start(&options);
	ck_assert_int_eq(stat(out_file("counters", getpid(), "bin"), &status), 0);
	ck_assert_int_eq(status.st_size, 256 + 4097 * 256);
	ck_assert_int_ge(status.st_blocks * 512, status.st_size);
}
END_TEST

START_TEST(no_descriptor_stays_open)
{
	struct stat status, open_one;
	struct qs_options options = out_options();
	qs_note_start(&options);
	ck_assert_int_eq(stat(out_file("counters", getpid(), "bin"), &status), 0);
	for (int fd = 0; fd < 256; fd++)
		ck_assert(fstat(fd, &open_one) || open_one.st_ino != status.st_ino ||
		          open_one.st_dev != status.st_dev);
}
END_TEST

START_TEST(a_forked_child_counts_in_its_own_file)
{
	struct qs_options options = out_options();
	qs_note_start(&options);
	struct qs_counter *counter = add("parent", NULL);
	atomic_fetch_add(&counter->calls, 1);
	pid_t child = fork();
	if (!child) {
		qs_note_forked();
		bool empty = qs_counter_at(0) == NULL;
		qs_note_start(&options);
		atomic_fetch_add(&add("child", NULL)->calls, 2);
		_exit(empty ? 0 : 1);
	}
	wait_for(child);
	ck_assert_str_eq(read_counters(child)->slots[0].key, "child");
	ck_assert_uint_eq(image.slots[0].calls, 2);
	ck_assert_int_eq(image.header.pid, child);
	ck_assert_str_eq(read_counters(getpid())->slots[0].key, "parent");
	ck_assert_uint_eq(image.header.used, 1);
	ck_assert_uint_eq(image.slots[0].calls, 1);
}
END_TEST

START_TEST(a_lock_held_at_the_fork_does_not_stop_the_child)
{
	struct qs_options options = note_options();
	options.max_keys = 1;
	qs_note_start(&options);
	ck_assert(qs_counter_lock());
	pid_t child = fork();
	if (!child) {
		alarm(10);
		qs_note_forked();
		qs_note_start(&options);
		struct qs_counter *own = add("own", NULL);
		qs_counter_decide(own, QS_ACTION_NATIVE, QS_REASON_SMALL, NULL);
		_exit(strcmp(add("too many", NULL)->key, "other") != 0);
	}
	wait_for(child);
	qs_counter_unlock();
}
END_TEST

static void *add_many(void *unused)
{
	(void)unused;
	for (int i = 0; i < 100; i++)
		atomic_fetch_add(&add("key", NULL)->calls, 1);
	return NULL;
}

START_TEST(no_slot_is_given_twice_and_no_call_is_lost)
{
	pthread_t threads[4];
	uint64_t calls = 0;
	struct qs_options options = note_options();
	options.max_keys = 250;
	qs_note_start(&options);
	for (int i = 0; i < 4; i++)
		ck_assert_int_eq(pthread_create(&threads[i], NULL, add_many, NULL), 0);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	for (size_t i = 0; i < 250; i++) {
		ck_assert_uint_eq(qs_counter_at(i)->calls, 1);
		calls++;
	}
	ck_assert_str_eq(qs_counter_at(250)->key, "other");
	calls += qs_counter_at(250)->calls;
	ck_assert_uint_eq(calls, 400);
}
END_TEST

static void add_slot_tests(Suite *suite)
{
	TCase *tests = tcase_create("slots");
	tcase_add_checked_fixture(tests, set_up, tear_down);
	tcase_add_test(tests, long_texts_are_cut_and_terminated);
	tcase_add_test(tests, keys_beyond_the_table_share_the_last_slot);
	tcase_add_test(tests, a_decision_of_a_shared_slot_changes_nothing);
	tcase_add_test(tests, slots_are_listed_in_order_and_other_last);
	tcase_add_test(tests, before_any_start_there_is_one_slot_for_all);
	tcase_add_test(tests, the_number_of_slots_is_bounded);
	tcase_add_test(tests, unused_slots_take_no_memory);
	tcase_add_test(tests, no_slot_is_given_twice_and_no_call_is_lost);
	suite_add_tcase(suite, tests);
}

static void add_file_tests(Suite *suite)
{
	TCase *tests = tcase_create("file");
	tcase_add_checked_fixture(tests, set_up, tear_down);
	tcase_add_test(tests, the_file_format_is_fixed);
	tcase_add_test(tests, the_header_says_whose_counters_they_are);
	tcase_add_test(tests, a_slot_is_in_the_file_at_once);
	tcase_add_test(tests, counters_of_a_killed_process_are_readable);
	tcase_add_test(tests, a_file_that_exists_is_left_alone);
	tcase_add_test(tests, a_file_that_does_not_fit_is_refused_and_removed);
	tcase_add_test(tests, all_blocks_of_the_file_are_allocated);
	tcase_add_test(tests, no_descriptor_stays_open);
	tcase_add_test(tests, a_forked_child_counts_in_its_own_file);
	tcase_add_test(tests, a_lock_held_at_the_fork_does_not_stop_the_child);
	suite_add_tcase(suite, tests);
}

int main(void)
{
	Suite *suite = suite_create("note_counter");
	add_slot_tests(suite);
	add_file_tests(suite);
	return qs_suite_main(suite);
}
