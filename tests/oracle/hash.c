/* References of the kernels of kernels/hash.cu, in the words of kernels/hash.h.
 *
 * One block's worth at a time and element by element; block b takes chunks b, b + blocks, ...,
 * which is not how the kernel shares them out: no partial is defined bit for bit, what comes of
 * them is.
 */
#include "tests/oracle/oracle.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/hash.h"

static void demand(int holds, const char *kernel, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "oracle of %s: %s\n", kernel, what);
	abort();
}

static struct qs_hash_work *work_of(const struct qs_hash_args *args)
{
	return (struct qs_hash_work *)(uintptr_t)args->work;
}

static uint64_t fold(uint64_t x)
{
	return x ^ (x >> 32);
}

/* Adds chunk number `index`, which starts at `from` and of which `count` elements exist. */
static void add_chunk(struct qs_hash_partial *partial, const uint16_t *from, int64_t count,
                      uint64_t index)
{
	uint64_t word[2] = {0, 0};
	for (int64_t i = 0; i < count && i < 8; i++) {
		const uint32_t magnitude = (uint32_t)(from[i] & 0x7fff) << 16;
		word[i / 4] |= (uint64_t)from[i] << (i % 4 * 16);
		if (magnitude >= 0x7f800000)
			partial->infinite = 1;
		else if (magnitude > partial->amax)
			partial->amax = magnitude;
	}
	uint64_t a = word[0] + (index + 1) * QS_HASH_STEP;
	uint64_t b = word[1] + fold(fold(a) * QS_HASH_M1);
	a ^= fold(fold(b) * QS_HASH_M2);
	b ^= fold(fold(a) * QS_HASH_M3);
	partial->sum[0] += a;
	partial->sum[1] += b;
}

static void check_args(const struct qs_hash_args *args, unsigned block_x, const char *kernel)
{
	demand(block_x == QS_HASH_THREADS, kernel, "not as many threads as it is made for");
	demand(args->rows >= 1 && args->cols >= 1, kernel, "no elements");
	demand(args->blocks >= 1 && args->blocks <= QS_HASH_PARTIALS, kernel, "blocks");
	demand(args->work && args->work % 16 == 0, kernel, "work is not aligned to 16 bytes");
	demand(args->source && args->source % 2 == 0, kernel, "source is not aligned");
	demand(args->outcome != 0, kernel, "no outcome");
}

static void run_hash(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_hash_args *args = params[0];
	const uint16_t *source = (const uint16_t *)(uintptr_t)args->source;
	struct qs_hash_work *work = work_of(args);
	const int64_t width = (args->cols + 7) / 8;
	check_args(args, block_x, QS_KERNEL_HASH);
	demand(grid_x == args->blocks, QS_KERNEL_HASH, "the grid is not `blocks`");
	memset(work->partial, 0, args->blocks * sizeof *work->partial);
	for (int64_t i = 0; i < args->rows * width; i++) {
		const int64_t row = i / width, col = i % width * 8;
		add_chunk(&work->partial[i % args->blocks], source + row * args->ld + col,
		          args->cols - col, (uint64_t)i);
	}
}

static void sum_up(struct qs_hash_work *work, uint32_t blocks)
{
	work->hash[0] = work->hash[1] = 0;
	work->amax = work->infinite = 0;
	for (uint32_t i = 0; i < blocks; i++) {
		const struct qs_hash_partial *partial = &work->partial[i];
		work->hash[0] += partial->sum[0];
		work->hash[1] += partial->sum[1];
		work->infinite |= partial->infinite;
		if (partial->amax > work->amax)
			work->amax = partial->amax;
	}
}

static void run_judge(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_hash_args *args = params[0];
	struct qs_hash_work *work = work_of(args);
	const struct qs_hash_record *record = (const void *)(uintptr_t)args->record;
	uint32_t *descriptor = (uint32_t *)(uintptr_t)args->descriptor;
	const bool make = args->flags & QS_HASH_MAKE, look = args->flags & QS_HASH_LOOK;
	check_args(args, block_x, QS_KERNEL_HASH_JUDGE);
	demand(grid_x == 1, QS_KERNEL_HASH_JUDGE, "more than one block");
	demand(!(make && look), QS_KERNEL_HASH_JUDGE, "make and look");
	sum_up(work, args->blocks);
	work->differs = record && !make &&
	                (work->hash[0] != record->kept[0] || work->hash[1] != record->kept[1]);
	work->stale = record && (make || (work->differs && !look));
	work->repair = work->amax | (work->stale ? 0 : work->amax >> 16);
	work->failed = descriptor && !make ? descriptor[args->failed] : 0;
	if (descriptor && make)
		memcpy(descriptor, args->image, sizeof args->image);
	for (uint32_t i = 0; descriptor && !make && work->stale && i < QS_HASH_IMAGE; i++)
		if (args->reset >> i & 1)
			descriptor[i] = 0;
}

static void keep(const struct qs_hash_args *args, struct qs_hash_record *record)
{
	const struct qs_hash_work *work = work_of(args);
	uint32_t *descriptor = (uint32_t *)(uintptr_t)args->descriptor;
	memcpy(record->kept, work->hash, sizeof record->kept);
	record->amax = work->amax;
	if (!descriptor)
		return;
	descriptor[args->failed] = 0;
	descriptor[args->valid] = !(args->flags & QS_HASH_FINITE && work->infinite);
}

static void run_commit(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_hash_args *args = params[0];
	const struct qs_hash_work *work = work_of(args);
	struct qs_hash_record *record = (struct qs_hash_record *)(uintptr_t)args->record;
	struct qs_hash_outcome *outcome = (struct qs_hash_outcome *)(uintptr_t)args->outcome;
	check_args(args, block_x, QS_KERNEL_HASH_COMMIT);
	demand(grid_x == 1, QS_KERNEL_HASH_COMMIT, "more than one block");
	if (record && (work->stale || (work->failed && !work->differs)))
		keep(args, record);
	if (record && args->flags & QS_HASH_MAKE) {
		record->changes = record->replays = 0;
		record->turn = record->readers = record->found = 0;
		__atomic_store_n(&outcome->escapes, 0, __ATOMIC_RELAXED);
		__atomic_store_n(&outcome->replays, 0, __ATOMIC_RELAXED);
	}
	if (record)
		record->changes += work->differs;
	/* other threads may read these while a graph runs */
	for (int i = 0; i < 2; i++)
		__atomic_store_n(&outcome->hash[i], work->hash[i], __ATOMIC_RELAXED);
	__atomic_store_n(&outcome->amax, work->amax, __ATOMIC_RELAXED);
	__atomic_store_n(&outcome->infinite, work->infinite, __ATOMIC_RELAXED);
	__atomic_store_n(&outcome->changes, record ? record->changes : 0, __ATOMIC_RELAXED);
	if (args->flags & QS_HASH_GRAPH) {
		__atomic_store_n(&outcome->replays, ++record->replays, __ATOMIC_RELAXED);
		return;
	}
	__atomic_store_n(&outcome->differs, work->differs, __ATOMIC_RELAXED);
	__atomic_store_n(&outcome->sequence, args->sequence, __ATOMIC_RELEASE);
}

const struct qs_oracle_kernel qs_oracle_hash_kernels[] = {
        {QS_KERNEL_HASH, run_hash, {sizeof(struct qs_hash_args)}},
        {QS_KERNEL_HASH_JUDGE, run_judge, {sizeof(struct qs_hash_args)}},
        {QS_KERNEL_HASH_COMMIT, run_commit, {sizeof(struct qs_hash_args)}},
        {0},
};
