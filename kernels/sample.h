/* Whether a kept copy is still what its source makes, by a part of both: kernel names, parameters
 * and geometry, and what the kernels have in common.
 *
 * Products of few tokens compare a part of their weight themselves (nf4.h). cuBLASLt does not: one
 * of these kernels goes before it, and what the copy is made by after that. The first is in
 * nf4.cu, the second in quantise.cu, their C references in tests/oracle.
 *
 * Shared with the operand cache that launches them. But for the last part plain C, fixed-width
 * types, no CUDA headers.
 */
#ifndef QS_KERNELS_SAMPLE_H
#define QS_KERNELS_SAMPLE_H

#include <stdint.h>

#include "kernels/hash.h"
#include "kernels/quantise.h"

#define QS_SAMPLE_TURNS         64 /* launches in which all of a copy is compared once           */
#define QS_SAMPLE_THREADS       256
#define QS_SAMPLE_BLOCKS_PER_SM 8

/* A patch of an fp8 copy: what a warp compares at a time. Its rows are whole sectors of the source
 * and of a turned copy. */
#define QS_SAMPLE_PATCH_ROWS 32
#define QS_SAMPLE_PATCH_COLS 16

/* Flags. */
#define QS_SAMPLE_TURNED 1u /* fp8: the copy is the transpose */

/* Parameter of the kernels below. 88 bytes. */
struct qs_sample_args {
	uint64_t source;        /* device pointer, bf16, 2-byte aligned                          */
	int64_t rows, cols, ld; /* elements                                                      */
	uint64_t data, scale;   /* device pointers: the copy, as its form has them               */
	uint64_t descriptor;    /* device pointer, struct qs_weight of an NF4 copy, or 0         */
	uint64_t work;          /* device pointer, struct qs_hash_work: stale and repair, written */
	uint64_t record;        /* device pointer, struct qs_hash_record of the copy             */
	uint64_t outcome;       /* device address of its struct qs_hash_outcome                  */
	uint32_t flags;         /* QS_SAMPLE_*                                                   */
	uint32_t pad;           /* zero                                                          */
};

/*
 * Kernels, each `extern "C" __global__ void NAME(struct qs_sample_args)`, launched with a
 * one-dimensional grid of QS_SAMPLE_THREADS and no dynamic shared memory. Any number of blocks is
 * right. Launches for one copy follow each other: they count in its record.
 *
 * qs_nf4_sample compares one row, turn modulo 64, of every tile; the turn is the descriptor's,
 * which the products of few tokens move on too. qs_fp8_sample compares every 64th patch of 32 x 16
 * elements, numbered row by row, from the patch turn modulo 64 on; the turn is the record's.
 *
 * Both move the turn on. Where all was the same, work.stale = 0, and work.repair tells qs_repair
 * that the cast is good. Otherwise work.stale = 1, and whatever makes the copy makes it anew:
 * work.repair and the record have the amax of the source, which qs_fp8_sample then measures, by one
 * block and slowly; the amax of an NF4 descriptor only grows, so that who reads it meanwhile loses
 * no number. The record's hash becomes 0, as it is not that of the copy any more, and the next
 * check will find that it differs; a descriptor becomes not valid and failed until then. One more
 * escape is counted in the outcome.
 */
#define QS_KERNEL_NF4_SAMPLE "qs_nf4_sample"
#define QS_KERNEL_FP8_SAMPLE "qs_fp8_sample"

/* Patches of an fp8 copy along a row, and all of them. */
QS_INLINE int64_t qs_sample_across(int64_t cols)
{
	return qs_shares(cols, QS_SAMPLE_PATCH_COLS);
}

QS_INLINE int64_t qs_sample_patches(int64_t rows, int64_t cols)
{
	return qs_shares(rows, QS_SAMPLE_PATCH_ROWS) * qs_sample_across(cols);
}

/* Blocks of both kernels on a device of `sms` multiprocessors: a thread for eight (NF4) or sixteen
 * elements that are compared. */
static inline uint32_t qs_sample_blocks(int64_t rows, int64_t cols, int sms)
{
	const int64_t tiles = qs_shares(rows, 64) * qs_shares(cols, 64);
	return qs_at_most(qs_shares(tiles * 8, QS_SAMPLE_THREADS),
	                  (int64_t)sms * QS_SAMPLE_BLOCKS_PER_SM);
}

/* ---- on the device -------------------------------------------------------------------------- */

#ifdef __CUDACC__

static_assert(sizeof(struct qs_sample_args) == 88, "layout is shared with the host");

/* In mapped host memory, which the host reads now and then. Two that count at once may count as
 * one.
 */
static __device__ __forceinline__ void qs_count_escape(uint64_t outcome)
{
	volatile uint32_t *escapes = &((struct qs_hash_outcome *)outcome)->escapes;
	*escapes = *escapes + 1;
}

/* What the launch found is known to one thread, of the last block to get here: says it to all that
 * need to know. Without hope of the copy being right the record's hash must match nothing. */
static __device__ __forceinline__ void qs_sample_report(const struct qs_sample_args &args)
{
	struct qs_hash_record *record = (struct qs_hash_record *)args.record;
	record->kept[0] = record->kept[1] = 0;
	qs_count_escape(args.outcome);
}

/* By all threads of every block, each with whether all that it compared was the same. True, in the
 * last block only, if some thread's was not. Moves the turn on when nobody needs it any more. */
static __device__ __forceinline__ bool qs_sample_judge(const struct qs_sample_args &args, bool same,
                                                       uint32_t *turn)
{
	struct qs_hash_record *record = (struct qs_hash_record *)args.record;
	struct qs_hash_work *work = (struct qs_hash_work *)args.work;
	__shared__ bool stale;
	const bool changed = __syncthreads_or(!same);
	if (threadIdx.x == 0) {
		stale = false;
		if (changed)
			atomicExch(&record->found, 1u);
		__threadfence();
		if (atomicInc(&record->readers, gridDim.x - 1) == gridDim.x - 1) {
			__threadfence();
			stale = atomicExch(&record->found, 0u);
			*(volatile uint32_t *)turn += 1;
			work->stale = stale;
			work->repair = record->amax | record->amax >> 16;
			if (stale)
				qs_sample_report(args);
		}
	}
	__syncthreads();
	return stale;
}

#endif

#endif
