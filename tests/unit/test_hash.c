/* The references of the kernels of kernels/hash.cu: the hash itself against numbers worked out
 * apart from it and against what it promises, and what judge and commit make of it. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/hash.h"
#include "kernels/quantise.h"
#include "tests/oracle/oracle.h"
#include "tests/support/suite.h"

#define MOST 4096 /* elements of a test's matrix */

enum {
	HASH,
	JUDGE,
	COMMIT
};

static _Alignas(16) uint16_t matrix[MOST];
static _Alignas(16) struct qs_hash_work work;
static struct qs_hash_record record;
static struct qs_hash_outcome outcome;
static uint32_t descriptor[QS_HASH_IMAGE];

static void run(int kernel, struct qs_hash_args *args)
{
	void *params[] = {args};
	qs_oracle_hash_kernels[kernel].run(params, kernel == HASH ? args->blocks : 1,
	                                   QS_HASH_THREADS);
}

static struct qs_hash_args args_of(const uint16_t *source, int64_t rows, int64_t cols, int64_t ld)
{
	return (struct qs_hash_args){.source = (uintptr_t)source,
	                             .rows = rows,
	                             .cols = cols,
	                             .ld = ld,
	                             .work = (uintptr_t)&work,
	                             .outcome = (uintptr_t)&outcome,
	                             .blocks = qs_hash_blocks(rows, cols, 132)};
}

struct hash {
	uint64_t word[2];
};

static struct hash hash_of(const uint16_t *source, int64_t rows, int64_t cols, int64_t ld)
{
	struct qs_hash_args args = args_of(source, rows, cols, ld);
	memset(&work, 0xa5, sizeof work);
	run(HASH, &args);
	run(JUDGE, &args);
	return (struct hash){{work.hash[0], work.hash[1]}};
}

static bool same(struct hash x, struct hash y)
{
	return x.word[0] == y.word[0] && x.word[1] == y.word[1];
}

static void fill(void)
{
	uint32_t state = 1;
	for (int i = 0; i < MOST; i++) {
		state = state * 1664525 + 1013904223;
		matrix[i] = (uint16_t)((state >> 16 & 0x807f) | (120 + (state >> 8) % 8) << 7);
	}
}

START_TEST(the_hash_is_the_one_described)
{
	memset(matrix, 0, sizeof matrix);
	struct hash zero = hash_of(matrix, 1, 8, 8);
	ck_assert_uint_eq(zero.word[0], 0xbde7ae5600a3e576u);
	ck_assert_uint_eq(zero.word[1], 0x6c4d34680ec9b3fcu);
	for (int r = 0; r < 3; r++)
		for (int c = 0; c < 13; c++)
			matrix[r * 20 + c] = (uint16_t)((r * 13 + c) * 257);
	struct hash ragged = hash_of(matrix, 3, 13, 20);
	ck_assert_uint_eq(ragged.word[0], 0xd4e97fc5c6dbe7d1u);
	ck_assert_uint_eq(ragged.word[1], 0xd775df23267b68dfu);
}
END_TEST

START_TEST(every_single_bit_matters)
{
	fill();
	const struct hash before = hash_of(matrix, 5, 13, 17);
	for (int r = 0; r < 5; r++)
		for (int c = 0; c < 13; c++)
			for (int bit = 0; bit < 16; bit++) {
				matrix[r * 17 + c] ^= (uint16_t)(1 << bit);
				ck_assert(!same(before, hash_of(matrix, 5, 13, 17)));
				matrix[r * 17 + c] ^= (uint16_t)(1 << bit);
			}
	ck_assert(same(before, hash_of(matrix, 5, 13, 17)));
}
END_TEST

/* Pieces of `size` elements, rows of 64. */
START_TEST(where_something_lies_matters)
{
	static const int sizes[] = {1, 8, 64};
	const int size = sizes[_i];
	uint16_t piece[64];
	fill();
	const struct hash before = hash_of(matrix, 8, 64, 64);
	for (int x = 0; x < 512; x += size)
		for (int y = x + size; y < 512; y += size * (size == 1 ? 7 : 1)) {
			if (!memcmp(matrix + x, matrix + y, (size_t)size * 2))
				continue;
			memcpy(piece, matrix + x, (size_t)size * 2);
			memcpy(matrix + x, matrix + y, (size_t)size * 2);
			memcpy(matrix + y, piece, (size_t)size * 2);
			ck_assert(!same(before, hash_of(matrix, 8, 64, 64)));
			memcpy(piece, matrix + x, (size_t)size * 2);
			memcpy(matrix + x, matrix + y, (size_t)size * 2);
			memcpy(matrix + y, piece, (size_t)size * 2);
		}
}
END_TEST

START_TEST(how_it_lies_in_memory_does_not_matter)
{
	static uint16_t other[2 * MOST];
	fill();
	const struct hash before = hash_of(matrix, 21, 43, 43);
	for (int ld = 43; ld < 60; ld++)
		for (int shift = 0; shift < 3; shift++) {
			memset(other, ld, sizeof other);
			for (int r = 0; r < 21; r++)
				memcpy(other + shift + r * ld, matrix + r * 43, 43 * 2);
			ck_assert(same(before, hash_of(other + shift, 21, 43, ld)));
		}
	for (uint32_t blocks = 1; blocks < 40; blocks++) {
		struct qs_hash_args args = args_of(matrix, 21, 43, 43);
		args.blocks = blocks;
		run(HASH, &args);
		run(JUDGE, &args);
		ck_assert(same(before, (struct hash){{work.hash[0], work.hash[1]}}));
	}
}
END_TEST

START_TEST(amax_is_of_the_finite_ones)
{
	fill();
	matrix[7] = 0xc300; /* -128 */
	hash_of(matrix, 4, 9, 9);
	ck_assert_uint_eq(work.amax, 0x43000000);
	ck_assert_uint_eq(work.infinite, 0);
	matrix[8] = 0x7f7f;
	hash_of(matrix, 4, 9, 9);
	ck_assert_uint_eq(work.amax, 0x7f7f0000);
	matrix[8] = 0xff80;
	hash_of(matrix, 4, 9, 9);
	ck_assert_uint_eq(work.amax, 0x43000000);
	ck_assert_uint_ne(work.infinite, 0);
	matrix[8] = 0;
	matrix[35] = 0x7fc1;
	hash_of(matrix, 4, 9, 9);
	ck_assert_uint_ne(work.infinite, 0);
	hash_of(matrix, 4, 8, 9);
	ck_assert_uint_eq(work.infinite, 0);
}
END_TEST

START_TEST(geometry_fills_the_device_and_no_more)
{
	ck_assert_uint_eq(qs_hash_blocks(1, 1, 132), 1);
	ck_assert_uint_eq(qs_hash_blocks(1, 8 * QS_HASH_SHARE, 132), 1);
	ck_assert_uint_eq(qs_hash_blocks(1, 8 * QS_HASH_SHARE + 1, 132), 2);
	ck_assert_uint_eq(qs_hash_blocks(8192, 8192, 132), 528);
	ck_assert_uint_eq(qs_hash_blocks(8192, 8192, 1000), QS_HASH_PARTIALS);
	ck_assert_int_eq(qs_hash_chunks((int64_t)1 << 33, 9), (int64_t)1 << 34);
}
END_TEST

/* ---- what follows from it ------------------------------------------------------------------- */

#define VALID  4
#define FAILED 5
#define OTHER  9

/* One check, the copy being made by nobody. */
static void check(uint32_t flags)
{
	static uint64_t sequence;
	struct qs_hash_args args = args_of(matrix, 6, 16, 16);
	args.record = (uintptr_t)&record;
	args.descriptor = (uintptr_t)descriptor;
	args.valid = VALID;
	args.failed = FAILED;
	args.reset = 1u << VALID | 1u << FAILED | 1u << OTHER;
	args.flags = flags;
	args.sequence = ++sequence;
	for (uint32_t i = 0; i < QS_HASH_IMAGE; i++)
		args.image[i] = i == VALID || i == FAILED ? 0 : 100 + i;
	run(HASH, &args);
	run(JUDGE, &args);
	if (work.stale)
		ck_assert_uint_eq(descriptor[VALID], 0);
	run(COMMIT, &args);
	ck_assert_uint_eq(outcome.sequence, flags & QS_HASH_GRAPH ? sequence - 1 : sequence);
	ck_assert_uint_eq(outcome.hash[0], work.hash[0]);
	ck_assert_uint_eq(outcome.changes, record.changes);
	if (!(flags & QS_HASH_GRAPH))
		ck_assert_uint_eq(outcome.differs, work.differs);
}

static void make(uint32_t flags)
{
	fill();
	memset(&record, 0xa5, sizeof record);
	memset(descriptor, 0xa5, sizeof descriptor);
	check(QS_HASH_MAKE | flags);
}

START_TEST(making_fills_record_and_descriptor)
{
	make(0);
	ck_assert_uint_eq(work.stale, 1);
	ck_assert_uint_eq(work.differs, 0);
	ck_assert_uint_eq(record.kept[0], work.hash[0]);
	ck_assert_uint_eq(record.kept[1], work.hash[1]);
	ck_assert_uint_eq(record.amax, work.amax);
	ck_assert_uint_eq(record.changes, 0);
	for (uint32_t i = 0; i < QS_HASH_IMAGE; i++)
		ck_assert_uint_eq(descriptor[i], i == VALID ? 1 : i == FAILED ? 0 : 100 + i);
}
END_TEST

START_TEST(equal_contents_change_nothing)
{
	make(0);
	descriptor[OTHER] = 3;
	check(0);
	ck_assert_uint_eq(work.stale, 0);
	ck_assert_uint_eq(record.changes, 0);
	ck_assert_uint_eq(descriptor[OTHER], 3);
	ck_assert_uint_eq(descriptor[VALID], 1);
}
END_TEST

START_TEST(other_contents_are_made_anew)
{
	make(0);
	descriptor[OTHER] = descriptor[OTHER + 1] = 3;
	matrix[95] ^= 1;
	check(_i ? QS_HASH_GRAPH : 0);
	ck_assert_uint_eq(work.stale, 1);
	ck_assert_uint_eq(record.changes, 1);
	ck_assert_uint_eq(record.kept[0], work.hash[0]);
	ck_assert_uint_eq(descriptor[OTHER], 0);
	ck_assert_uint_eq(descriptor[OTHER + 1], 3);
	ck_assert_uint_eq(descriptor[VALID], 1);
	check(0);
	ck_assert_uint_eq(work.stale, 0);
	ck_assert_uint_eq(record.changes, 1);
}
END_TEST

START_TEST(looking_repairs_nothing)
{
	make(0);
	const uint64_t kept = record.kept[0];
	matrix[0] ^= 1;
	check(QS_HASH_LOOK);
	ck_assert_uint_eq(work.stale, 0);
	ck_assert_uint_eq(work.differs, 1);
	ck_assert_uint_eq(record.changes, 1);
	ck_assert_uint_eq(record.kept[0], kept);
	descriptor[VALID] = 0;
	descriptor[FAILED] = 1;
	check(QS_HASH_LOOK);
	ck_assert_uint_eq(descriptor[VALID], 0);
	ck_assert_uint_eq(descriptor[FAILED], 1);
}
END_TEST

START_TEST(what_is_not_finite_is_not_valid_where_that_matters)
{
	make(0);
	matrix[1] = 0x7f80;
	check(0);
	ck_assert_uint_eq(descriptor[VALID], 1);
	make(QS_HASH_FINITE);
	ck_assert_uint_eq(descriptor[VALID], 1);
	matrix[1] = 0x7f80;
	check(QS_HASH_FINITE);
	ck_assert_uint_eq(descriptor[VALID], 0);
	ck_assert_uint_ne(outcome.infinite, 0);
	check(QS_HASH_FINITE);
	ck_assert_uint_eq(descriptor[VALID], 0);
}
END_TEST

START_TEST(a_failure_without_a_change_is_taken_back)
{
	make(0);
	descriptor[VALID] = 0;
	descriptor[FAILED] = 1;
	check(0);
	ck_assert_uint_eq(descriptor[VALID], 1);
	ck_assert_uint_eq(descriptor[FAILED], 0);
	ck_assert_uint_eq(record.changes, 0);
}
END_TEST

/* The word for qs_repair: it casts where the copy is stale, and leaves it alone where it is not. */
START_TEST(the_repair_kernel_is_told_what_to_do)
{
	static _Alignas(16) uint8_t target[6 * 16];
	static float scale;
	struct qs_quantise_args args = {.operand = {{.source = (uintptr_t)matrix,
	                                             .straight = (uintptr_t)target,
	                                             .scale = (uintptr_t)&scale,
	                                             .partials = (uintptr_t)&work.repair,
	                                             .ld = 16,
	                                             .inner = 16,
	                                             .outer = 6,
	                                             .blocks = {1, 1}}}};
	void *params[] = {&args};
	const struct qs_oracle_kernel *repair = qs_oracle_kernels;
	while (strcmp(repair->name, QS_KERNEL_REPAIR))
		repair++;
	make(0);
	memset(target, 0x55, sizeof target);
	repair->run(params, 1, QS_QUANTISE_THREADS);
	const float first = scale;
	for (int i = 0; i < 96; i++) {
		const float meant = qs_oracle_bf16_to_float(matrix[i]);
		const float got = qs_oracle_e4m3_to_float(target[i]) * scale;
		ck_assert(fabsf(got - meant) <= fabsf(meant) / 16 + 1e-3f);
	}
	check(0);
	memset(target, 0x55, sizeof target);
	repair->run(params, 1, QS_QUANTISE_THREADS);
	for (int i = 0; i < 96; i++)
		ck_assert_uint_eq(target[i], 0x55);
	ck_assert(scale == first);
	matrix[95] = 0x4700;
	check(0);
	repair->run(params, 1, QS_QUANTISE_THREADS);
	ck_assert(scale > first);
	ck_assert(qs_oracle_e4m3_to_float(target[95]) * scale == 32768.0f);
}
END_TEST

#define ADD(test) tcase_add_test(tests, test)

int main(void)
{
	Suite *suite = suite_create("hash");
	TCase *tests = tcase_create("hash");
	ADD(the_hash_is_the_one_described);
	ADD(every_single_bit_matters);
	tcase_add_loop_test(tests, where_something_lies_matters, 0, 3);
	ADD(how_it_lies_in_memory_does_not_matter);
	ADD(amax_is_of_the_finite_ones);
	ADD(geometry_fills_the_device_and_no_more);
	ADD(making_fills_record_and_descriptor);
	ADD(equal_contents_change_nothing);
	tcase_add_loop_test(tests, other_contents_are_made_anew, 0, 2);
	ADD(looking_repairs_nothing);
	ADD(what_is_not_finite_is_not_valid_where_that_matters);
	ADD(a_failure_without_a_change_is_taken_back);
	ADD(the_repair_kernel_is_told_what_to_do);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
