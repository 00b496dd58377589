/* The table of watches: what a report hits, what a verification clears, and how uses that only read
 * are told from uses that write. Addresses are numbers here: nothing is at them. */
#include "operand/track.h"

#include <pthread.h>

#include "tests/support/suite.h"

#define READER_AFTER 8

static const void *at(uintptr_t address)
{
	return (const void *)address;
}

/* Watches [first, end) of memory that starts at `region`, clean. */
static struct qs_watch *watch_in(uintptr_t first, uintptr_t end, uintptr_t region)
{
	struct qs_watch *watch = qs_watch_add_in(at(first), at(end), at(region));
	ck_assert_ptr_nonnull(watch);
	ck_assert_int_eq(qs_watch_state(watch), QS_WATCH_SUSPECT);
	qs_watch_clear(watch, qs_watch_suspects(watch));
	ck_assert_int_eq(qs_watch_state(watch), QS_WATCH_CLEAN);
	return watch;
}

static struct qs_watch *watch(uintptr_t first, uintptr_t end)
{
	return watch_in(first, end, first);
}

/* True if it was suspect; clean again. */
static bool was_hit(struct qs_watch *watch)
{
	bool hit = qs_watch_state(watch) == QS_WATCH_SUSPECT;
	qs_watch_clear(watch, qs_watch_suspects(watch));
	return hit;
}

static bool write_hits(struct qs_watch *watch, uintptr_t first, size_t bytes)
{
	qs_track_write(at(first), bytes);
	ck_assert(qs_track_overlaps(first, bytes) || qs_watch_state(watch) == QS_WATCH_CLEAN);
	return was_hit(watch);
}

static bool argument_hits(struct qs_watch *watch, uint64_t word)
{
	qs_track_argument(word, 0);
	ck_assert_int_eq(qs_track_reaches(word), qs_watch_state(watch) == QS_WATCH_SUSPECT);
	return was_hit(watch);
}

/* ---- what is hit ---- */

START_TEST(a_write_hits_what_it_overlaps)
{
	struct qs_watch *w = watch(0x10000, 0x20000);
	ck_assert(!write_hits(w, 0xff00, 0x100));
	ck_assert(write_hits(w, 0xff00, 0x101));
	ck_assert(write_hits(w, 0x10000, 1));
	ck_assert(write_hits(w, 0x18000, 8));
	ck_assert(write_hits(w, 0x1ffff, 1));
	ck_assert(!write_hits(w, 0x20000, 0x1000));
	ck_assert(!write_hits(w, 0x18000, 0));
	ck_assert(write_hits(w, 0x100, SIZE_MAX)); /* past the last address */
}
END_TEST

START_TEST(an_argument_hits_from_the_start_of_the_memory_on)
{
	struct qs_watch *w = watch_in(0x14000, 0x18000, 0x10000);
	ck_assert(!argument_hits(w, 0xffff));
	ck_assert(argument_hits(w, 0x10000));
	ck_assert(argument_hits(w, 0x13fff));
	ck_assert(argument_hits(w, 0x14000));
	ck_assert(argument_hits(w, 0x17fff));
	ck_assert(!argument_hits(w, 0x18000));
	qs_track_pointer(at(0x10000));
	ck_assert(was_hit(w));
	ck_assert(!write_hits(w, 0x10000, 0x4000)); /* what a write covers is known */
}
END_TEST

START_TEST(every_watch_that_holds_an_address_is_hit)
{
	struct qs_watch *whole = watch(0x10000, 0x40000), *part = watch(0x20000, 0x28000);
	struct qs_watch *same = watch(0x20000, 0x28000), *other = watch(0x50000, 0x60000);
	qs_track_argument(0x20000, 0);
	ck_assert(was_hit(whole) && was_hit(part) && was_hit(same) && !was_hit(other));
	qs_track_write(at(0x28000), 0x30000);
	ck_assert(was_hit(whole) && !was_hit(part) && !was_hit(same) && was_hit(other));
	qs_track_everything();
	ck_assert(was_hit(whole) && was_hit(part) && was_hit(same) && was_hit(other));
}
END_TEST

START_TEST(many_watches_are_told_apart)
{
	static struct qs_watch *w[QS_WATCHES_MAX];
	for (uintptr_t i = 0; i < QS_WATCHES_MAX; i++) /* not in order */
		w[i * 977 % QS_WATCHES_MAX] = watch((i * 977 % QS_WATCHES_MAX + 16) << 12,
		                                    (i * 977 % QS_WATCHES_MAX + 16) * 4096 + 2048);
	ck_assert_ptr_null(qs_watch_add(at(1), at(2)));
	for (uintptr_t i = 0; i < QS_WATCHES_MAX; i += 61) {
		qs_track_argument(((i + 16) << 12) + 2047, 0);
		qs_track_argument(((i + 16) << 12) + 2048, 0);
		ck_assert(was_hit(w[i]));
		ck_assert(!i || !was_hit(w[i - 1]));
		ck_assert(i + 1 == QS_WATCHES_MAX || !was_hit(w[i + 1]));
	}
	for (int i = 0; i < QS_WATCHES_MAX; i++)
		qs_watch_remove(w[i]);
	ck_assert(!qs_watch_any());
	ck_assert(!qs_track_near(20 << 12));
}
END_TEST

#define CROWD 33 /* more than are made suspect one by one */

/* Watches of a crowd in one piece of memory, which starts at 0x100000. */
static void watch_crowd(struct qs_watch *w[CROWD])
{
	for (uintptr_t i = 0; i < CROWD; i++)
		w[i] = watch_in(0x110000 + i * 0x10000, 0x120000 + i * 0x10000, 0x100000);
}

/* A launch must not pay for each. */
START_TEST(an_address_that_reaches_many_makes_everything_suspect)
{
	struct qs_watch *far = watch(0x900000, 0x910000), *w[CROWD];
	watch_crowd(w);
	qs_track_argument(0x120000, 0); /* 32 of them */
	ck_assert(!was_hit(far) && !was_hit(w[0]));
	for (int i = 1; i < CROWD; i++)
		ck_assert(was_hit(w[i]));
	for (int pointer = 0; pointer < 2; pointer++) {
		if (pointer)
			qs_track_pointer(at(0x100000));
		else
			qs_track_argument(0x100000, 0);
		for (int i = 0; i < CROWD; i++)
			ck_assert(was_hit(w[i]));
		ck_assert(was_hit(far));
	}
	qs_track_write(at(0x110000), CROWD * 0x10000); /* each by itself */
	ck_assert(was_hit(w[0]) && was_hit(w[CROWD - 1]) && !was_hit(far));
	qs_track_gone(at(0x100000), 0);
	ck_assert_int_eq(qs_watch_state(w[CROWD - 1]), QS_WATCH_GONE);
	ck_assert_int_eq(qs_watch_state(far), QS_WATCH_CLEAN);
}
END_TEST

START_TEST(what_is_no_longer_watched_is_not_hit)
{
	struct qs_watch *low = watch(0x10000, 0x20000), *high = watch(0x30000, 0x40000);
	uint64_t version = qs_track_version();
	ck_assert(qs_watch_any() && qs_track_near(0x10000));
	qs_watch_remove(low);
	qs_watch_remove(NULL);
	ck_assert_uint_ne(qs_track_version(), version);
	ck_assert(!qs_track_near(0x10000) && !qs_track_reaches(0x10000));
	ck_assert(argument_hits(high, 0x30000));
	qs_watch_remove(high);
	ck_assert(!qs_watch_any() && !qs_track_reaches(0x30000));
}
END_TEST

START_TEST(ranges_that_are_none_are_not_watched)
{
	ck_assert_ptr_null(qs_watch_add(at(0x1000), at(0x1000)));
	ck_assert_ptr_null(qs_watch_add(at(0x1000), at(0xfff)));
	ck_assert_ptr_null(qs_watch_add_in(at(0x1000), at(0x2000), at(0x1001)));
	ck_assert(!qs_watch_any());
}
END_TEST

START_TEST(a_forked_child_watches_nothing)
{
	watch(0x10000, 0x20000);
	watch(0x30000, 0x40000);
	qs_track_forked();
	ck_assert(!qs_watch_any());
	ck_assert(argument_hits(watch(0x10000, 0x20000), 0x10000));
}
END_TEST

/* ---- gone ---- */

START_TEST(what_is_freed_stays_gone)
{
	struct qs_watch *w = watch_in(0x14000, 0x18000, 0x10000), *next = watch(0x18000, 0x20000);
	qs_track_gone(at(0x10000), 0);
	ck_assert_int_eq(qs_watch_state(w), QS_WATCH_GONE);
	ck_assert_int_eq(qs_watch_state(next), QS_WATCH_CLEAN);
	qs_watch_clear(w, qs_watch_suspects(w));
	ck_assert_int_eq(qs_watch_state(w), QS_WATCH_GONE);
	struct qs_watch *again = watch_in(0x14000, 0x18000, 0x10000);
	ck_assert_int_eq(qs_watch_state(w), QS_WATCH_GONE);
	ck_assert_int_eq(qs_watch_state(again), QS_WATCH_CLEAN);
}
END_TEST

START_TEST(what_is_unmapped_is_gone_where_it_overlaps)
{
	struct qs_watch *low = watch(0x10000, 0x18000), *high = watch(0x18000, 0x20000);
	qs_track_gone(at(0x17fff), 1);
	ck_assert_int_eq(qs_watch_state(low), QS_WATCH_GONE);
	ck_assert_int_eq(qs_watch_state(high), QS_WATCH_CLEAN);
	qs_track_all_gone();
	ck_assert_int_eq(qs_watch_state(high), QS_WATCH_GONE);
}
END_TEST

START_TEST(memory_that_others_write_is_not_watched)
{
	struct qs_watch *w = watch(0x10000, 0x20000);
	qs_track_shared(at(0x10000));
	ck_assert_int_eq(qs_watch_state(w), QS_WATCH_GONE);
	ck_assert_ptr_null(qs_watch_add(at(0x10000), at(0x20000)));
	qs_track_unshared(at(0x10000));
	ck_assert_ptr_nonnull(qs_watch_add(at(0x10000), at(0x20000)));
	for (uintptr_t i = 0; i < 100; i++) /* more than are remembered */
		qs_track_shared(at(0x100000 + i * 0x1000));
	ck_assert_ptr_null(qs_watch_add(at(0x1000), at(0x2000)));
}
END_TEST

/* ---- verification ---- */

START_TEST(a_verification_does_not_cover_what_came_after_the_count)
{
	struct qs_watch *w = watch(0x10000, 0x20000);
	qs_track_argument(0x10000, 1);
	uint32_t suspects = qs_watch_suspects(w);
	qs_track_argument(0x10000, 1);
	qs_watch_clear(w, suspects);
	ck_assert_int_eq(qs_watch_state(w), QS_WATCH_SUSPECT);
	suspects = qs_watch_suspects(w);
	qs_track_everything();
	qs_watch_clear(w, suspects);
	ck_assert_int_eq(qs_watch_state(w), QS_WATCH_SUSPECT);
	ck_assert(was_hit(w));
	ck_assert(!was_hit(w));
}
END_TEST

/* ---- readers ---- */

#define READS  7u /* names of uses */
#define OTHERS 9u

/* One round: uses, a verification if it is suspect, and its outcome. True if it was. */
static bool round_of(struct qs_watch *w, const uint64_t *uses, bool unchanged)
{
	for (; *uses; uses++)
		qs_track_argument(0x10000, *uses);
	bool hit = was_hit(w);
	if (hit)
		qs_watch_readers(w, unchanged);
	return hit;
}

#define USES(...)                                                                                  \
	(const uint64_t[])                                                                         \
	{                                                                                          \
		__VA_ARGS__, 0                                                                     \
	}

static struct qs_watch *with_reader(uint64_t use)
{
	struct qs_watch *w = watch(0x10000, 0x20000);
	for (int i = 0; i < READER_AFTER; i++)
		ck_assert(round_of(w, USES(use), true));
	return w;
}

START_TEST(a_use_that_changes_nothing_eight_times_is_a_reader)
{
	struct qs_watch *w = with_reader(READS);
	ck_assert(!round_of(w, USES(READS), true));
	ck_assert(round_of(w, USES(OTHERS), true));
	ck_assert(write_hits(w, 0x10000, 1));
}
END_TEST

START_TEST(several_readers_are_learnt_at_once)
{
	struct qs_watch *w = watch(0x10000, 0x20000);
	for (int i = 0; i < READER_AFTER; i++)
		ck_assert(round_of(w, USES(READS, OTHERS), true));
	ck_assert(!round_of(w, USES(OTHERS, READS), true));
}
END_TEST

START_TEST(a_change_starts_the_count_again)
{
	struct qs_watch *w = watch(0x10000, 0x20000);
	for (int i = 0; i < READER_AFTER - 1; i++)
		ck_assert(round_of(w, USES(READS, OTHERS), true));
	ck_assert(round_of(w, USES(READS), false));
	for (int i = 0; i < READER_AFTER; i++)
		ck_assert(round_of(w, USES(READS), true));
	ck_assert(!round_of(w, USES(READS), true));
	ck_assert(round_of(w, USES(OTHERS), true)); /* its count too */
}
END_TEST

START_TEST(a_change_while_only_readers_ran_makes_them_writers_for_good)
{
	struct qs_watch *w = with_reader(READS);
	qs_track_argument(0x10000, READS);
	ck_assert(!was_hit(w)); /* an audit */
	qs_watch_readers(w, false);
	for (int i = 0; i < 3 * READER_AFTER; i++)
		ck_assert(round_of(w, USES(READS), true));
}
END_TEST

START_TEST(a_change_by_another_leaves_readers_what_they_are)
{
	struct qs_watch *w = with_reader(READS);
	ck_assert(round_of(w, USES(READS, OTHERS), false));
	ck_assert(!round_of(w, USES(READS), true));
	qs_track_argument(0x10000, READS);
	qs_track_write(at(0x10000), 1);
	ck_assert(was_hit(w));
	qs_watch_readers(w, false);
	ck_assert(!round_of(w, USES(READS), true));
	qs_track_argument(0x10000, READS);
	qs_track_everything();
	ck_assert(was_hit(w));
	qs_watch_readers(w, false);
	ck_assert(!round_of(w, USES(READS), true));
}
END_TEST

START_TEST(uses_without_a_name_are_never_readers)
{
	struct qs_watch *w = watch(0x10000, 0x20000);
	for (int i = 0; i < 2 * READER_AFTER; i++) {
		qs_track_argument(0x10000, 0);
		ck_assert(was_hit(w));
		qs_watch_readers(w, true);
	}
}
END_TEST

/* Names of uses that fill the table of a watch. */
#define FIRST_OF_MANY 100u
#define MANY          31u

static void run_many(struct qs_watch *w)
{
	for (uint64_t use = FIRST_OF_MANY; use < FIRST_OF_MANY + MANY; use++)
		ck_assert(round_of(w, USES(use), true));
}

/* Those remembered are learnt all the same. */
START_TEST(a_use_too_many_is_no_reader)
{
	struct qs_watch *w = watch(0x10000, 0x20000);
	for (int i = 0; i < READER_AFTER; i++) {
		run_many(w);
		ck_assert(round_of(w, USES(READS), true));
	}
	for (int i = 0; i < 2; i++) {
		for (uint64_t use = FIRST_OF_MANY; use < FIRST_OF_MANY + MANY; use++)
			ck_assert(!round_of(w, USES(use), true));
		ck_assert(round_of(w, USES(READS), true));
	}
}
END_TEST

START_TEST(as_many_uses_as_are_remembered_become_readers)
{
	struct qs_watch *w = watch(0x10000, 0x20000);
	for (int i = 0; i < READER_AFTER; i++)
		run_many(w);
	for (uint64_t use = FIRST_OF_MANY; use < FIRST_OF_MANY + MANY; use++)
		ck_assert(!round_of(w, USES(use), true));
}
END_TEST

/* The first use that finds no room has the next one find some. */
START_TEST(uses_that_run_no_more_make_room)
{
	struct qs_watch *w = watch(0x10000, 0x20000);
	run_many(w);
	for (int i = 0; i < 1 + READER_AFTER; i++)
		ck_assert(round_of(w, USES(READS), true));
	ck_assert(!round_of(w, USES(READS), true));
}
END_TEST

/* The last of many gets it, in the second round. */
START_TEST(a_use_in_the_place_of_a_reader_is_none)
{
	const uint64_t last = FIRST_OF_MANY + MANY - 1;
	struct qs_watch *w = with_reader(READS);
	run_many(w);
	run_many(w);
	for (int i = 0; i < READER_AFTER - 1; i++)
		ck_assert(round_of(w, USES(last), true));
	ck_assert(!round_of(w, USES(last), true));
}
END_TEST

/* The outcome of a verification says nothing about a use that came after it. */
START_TEST(a_use_in_the_place_of_another_starts_from_nothing)
{
	const uint64_t last = FIRST_OF_MANY + MANY - 1;
	struct qs_watch *w = watch(0x10000, 0x20000);
	run_many(w);
	qs_track_argument(0x10000, READS);
	ck_assert(was_hit(w));
	qs_track_argument(0x10000, FIRST_OF_MANY);
	ck_assert(was_hit(w)); /* its outcome is due */
	for (uint64_t use = FIRST_OF_MANY + 1; use <= last; use++)
		qs_track_argument(0x10000, use);
	qs_track_argument(0x10000, OTHERS);
	qs_track_argument(0x10000, READS); /* in the place of the first */
	qs_watch_readers(w, true);
	ck_assert(was_hit(w));
	qs_watch_readers(w, true);
	for (int i = 0; i < READER_AFTER - 1; i++)
		ck_assert(round_of(w, USES(READS), true));
	ck_assert(!round_of(w, USES(READS), true));
}
END_TEST

START_TEST(a_reader_that_runs_stays_one)
{
	struct qs_watch *w = with_reader(READS);
	for (uint64_t use = FIRST_OF_MANY; use < FIRST_OF_MANY + 4 * MANY; use++) {
		ck_assert(!round_of(w, USES(READS), true));
		ck_assert(round_of(w, USES(use), true));
	}
}
END_TEST

START_TEST(a_writer_is_remembered_for_good)
{
	struct qs_watch *w = with_reader(READS);
	qs_track_argument(0x10000, READS);
	ck_assert(!was_hit(w)); /* an audit */
	qs_watch_readers(w, false);
	for (int i = 0; i < 3; i++)
		run_many(w);
	for (int i = 0; i < 3 * READER_AFTER; i++)
		ck_assert(round_of(w, USES(READS), true));
}
END_TEST

/* True if the use made any of a crowd suspect; all are verified, and found as they were or not. */
static bool crowd_suspect(struct qs_watch *w[CROWD], uint64_t use, bool unchanged)
{
	bool any = false;
	qs_track_argument(0x100000, use);
	for (int i = 0; i < CROWD; i++) {
		any |= was_hit(w[i]);
		qs_watch_readers(w[i], unchanged);
	}
	return any;
}

START_TEST(a_reader_of_the_first_of_many_is_a_reader_of_all)
{
	struct qs_watch *w[CROWD];
	watch_crowd(w);
	for (int i = 0; i < READER_AFTER; i++)
		ck_assert(crowd_suspect(w, READS, true));
	ck_assert(!crowd_suspect(w, READS, true));
	ck_assert(crowd_suspect(w, OTHERS, true));
	ck_assert(!crowd_suspect(w, READS, false)); /* an audit */
	ck_assert(crowd_suspect(w, READS, true));
}
END_TEST

START_TEST(what_was_learnt_ends_with_the_watch)
{
	qs_watch_remove(with_reader(READS));
	ck_assert(round_of(watch(0x10000, 0x20000), USES(READS), true));
}
END_TEST

/* ---- our own kernels ---- */

START_TEST(kernels_of_ours_are_known_until_their_context_is_gone)
{
	int written = 99;
	ck_assert(!qs_track_is_own(at(0x10), &written));
	qs_track_own_function(at(0x10), -1);
	qs_track_own_function(at(0x20), 24);
	qs_track_own_function(at(0x10), 8);
	ck_assert(qs_track_is_own(at(0x10), &written));
	ck_assert_int_eq(written, 8);
	ck_assert(qs_track_is_own(at(0x20), &written));
	ck_assert_int_eq(written, 24);
	qs_track_all_gone();
	ck_assert(!qs_track_is_own(at(0x10), &written));
}
END_TEST

/* ---- threads ---- */

#define THREADS 8
#define ROUNDS  20000

static _Atomic bool over;

/* A range that stays: each report must be seen as soon as it was made. */
static void *hammer(void *watch_given)
{
	struct qs_watch *w = watch_given;
	long missed = 0;
	for (int i = 0; i < ROUNDS; i++) {
		uint32_t before = qs_watch_suspects(w);
		qs_track_argument(0x1000000, (uint64_t)i % 32);
		missed += qs_watch_suspects(w) == before;
		qs_watch_clear(w, before);
		missed += qs_watch_state(w) == QS_WATCH_GONE;
		qs_track_write(at(0x5000 + (uintptr_t)(i % 64) * 0x1000), 0x100);
	}
	return (void *)missed;
}

/* Watches that come and go around it. */
static void *churn(void *unused)
{
	struct qs_watch *w[64] = {NULL};
	for (unsigned i = 0; !atomic_load(&over); i++) {
		uintptr_t first = 0x1000 + (uintptr_t)(i % 64) * 0x1000;
		qs_watch_remove(w[i % 64]);
		w[i % 64] = qs_watch_add_in(at(first), at(first + 0x800), at(first));
		if (i % 3 == 0)
			qs_watch_readers(w[i % 64], i % 2);
	}
	for (int i = 0; i < 64; i++)
		qs_watch_remove(w[i]);
	return unused;
}

START_TEST(no_report_is_lost_while_watches_come_and_go)
{
	pthread_t thread[THREADS], other;
	struct qs_watch *w = watch(0x1000000, 0x1001000);
	ck_assert(!pthread_create(&other, NULL, churn, NULL));
	for (int i = 0; i < THREADS; i++)
		ck_assert(!pthread_create(&thread[i], NULL, hammer, w));
	for (int i = 0; i < THREADS; i++) {
		void *missed;
		pthread_join(thread[i], &missed);
		ck_assert_ptr_null(missed);
	}
	atomic_store(&over, true);
	pthread_join(other, NULL);
	qs_watch_remove(w);
	ck_assert(!qs_watch_any());
}
END_TEST

static void add_hits(TCase *tcase)
{
	tcase_add_test(tcase, a_write_hits_what_it_overlaps);
	tcase_add_test(tcase, an_argument_hits_from_the_start_of_the_memory_on);
	tcase_add_test(tcase, every_watch_that_holds_an_address_is_hit);
	tcase_add_test(tcase, many_watches_are_told_apart);
	tcase_add_test(tcase, an_address_that_reaches_many_makes_everything_suspect);
	tcase_add_test(tcase, what_is_no_longer_watched_is_not_hit);
	tcase_add_test(tcase, ranges_that_are_none_are_not_watched);
	tcase_add_test(tcase, a_forked_child_watches_nothing);
	tcase_add_test(tcase, what_is_freed_stays_gone);
	tcase_add_test(tcase, what_is_unmapped_is_gone_where_it_overlaps);
	tcase_add_test(tcase, memory_that_others_write_is_not_watched);
	tcase_add_test(tcase, a_verification_does_not_cover_what_came_after_the_count);
}

static void add_readers(TCase *tcase)
{
	tcase_add_test(tcase, a_use_that_changes_nothing_eight_times_is_a_reader);
	tcase_add_test(tcase, several_readers_are_learnt_at_once);
	tcase_add_test(tcase, a_change_starts_the_count_again);
	tcase_add_test(tcase, a_change_while_only_readers_ran_makes_them_writers_for_good);
	tcase_add_test(tcase, a_change_by_another_leaves_readers_what_they_are);
	tcase_add_test(tcase, uses_without_a_name_are_never_readers);
	tcase_add_test(tcase, a_use_too_many_is_no_reader);
	tcase_add_test(tcase, as_many_uses_as_are_remembered_become_readers);
	tcase_add_test(tcase, uses_that_run_no_more_make_room);
	tcase_add_test(tcase, a_use_in_the_place_of_a_reader_is_none);
	tcase_add_test(tcase, a_use_in_the_place_of_another_starts_from_nothing);
	tcase_add_test(tcase, a_reader_that_runs_stays_one);
	tcase_add_test(tcase, a_writer_is_remembered_for_good);
	tcase_add_test(tcase, a_reader_of_the_first_of_many_is_a_reader_of_all);
	tcase_add_test(tcase, what_was_learnt_ends_with_the_watch);
	tcase_add_test(tcase, kernels_of_ours_are_known_until_their_context_is_gone);
	tcase_add_test(tcase, no_report_is_lost_while_watches_come_and_go);
}

int main(void)
{
	Suite *suite = suite_create("track");
	TCase *hit = tcase_create("hits"), *readers = tcase_create("readers");
	tcase_set_timeout(readers, 120);
	add_hits(hit);
	add_readers(readers);
	suite_add_tcase(suite, hit);
	suite_add_tcase(suite, readers);
	return qs_suite_main(suite);
}
