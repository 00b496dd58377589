/* Content hashes of bf16 matrices, and what follows from one: kernel names, parameters and
 * geometry.
 *
 * Shared by the CUDA kernels (hash.cu), the operand cache that launches them, and their C
 * references (tests/oracle/hash.c). Plain C, fixed-width types, no CUDA headers.
 *
 * A matrix is `rows` vectors of `cols` contiguous bf16 elements, ld apart; what lies between them
 * is not part of it. It is cut into chunks of eight elements, row by row, the last chunk of a row
 * filled up with +0. Chunk number i (from 0, over the whole matrix) is two 64-bit words, a with its
 * elements 0..3 and b with 4..7, the first of them in the low bits. All arithmetic modulo 2^64:
 *
 *   fold(x) = x ^ (x >> 32)
 *   a += (i + 1) * QS_HASH_STEP
 *   b += fold(fold(a) * QS_HASH_M1)
 *   a ^= fold(fold(b) * QS_HASH_M2)
 *   b ^= fold(fold(a) * QS_HASH_M3)
 *
 * and the hash is the pair (sum of all a, sum of all b). Each step can be undone, so another chunk
 * is another pair: a change within one chunk, were it one bit, always changes the hash. Changes of
 * several chunks go unnoticed with a chance of 2^-128, as far as mixing by three multiplications is
 * random; this is no defence against somebody who wants a collision. The number of the chunk makes
 * it matter where contents lie. Sums do not depend on the order in which they are added up, so the
 * hash is the same for any geometry, row distance and alignment.
 *
 * On the way the kernels find amax, the maximum of |x| over finite x, and whether all x are finite.
 */
#ifndef QS_KERNELS_HASH_H
#define QS_KERNELS_HASH_H

#include <stdint.h>

/* The golden ratio's fraction, and the first three primes of XXH64 (github.com/Cyan4973/xxHash). */
#define QS_HASH_STEP 0x9e3779b97f4a7c15u
#define QS_HASH_M1   0x9e3779b185ebca87u
#define QS_HASH_M2   0xc2b2ae3d27d4eb4fu
#define QS_HASH_M3   0x165667b19e3779f9u

#define QS_HASH_THREADS       256  /* of every kernel                                        */
#define QS_HASH_BLOCKS_PER_SM 4    /* resident with at most 64 registers a thread            */
#define QS_HASH_PARTIALS      1024 /* most blocks of qs_hash                                 */
#define QS_HASH_SHARE         2048 /* least chunks worth a block: eight for a thread         */
#define QS_HASH_IMAGE         16   /* 32-bit words of a descriptor                           */

/* Flags of a check. */
#define QS_HASH_MAKE   1u /* the copy is made for the first time: nothing to compare   */
#define QS_HASH_LOOK   2u /* only look: a difference is counted, not repaired          */
#define QS_HASH_GRAPH  4u /* part of a graph: not numbered                             */
#define QS_HASH_FINITE 8u /* a copy of a matrix with NaN or Inf is of no use           */

/* What one block of qs_hash found. 32 bytes. */
struct qs_hash_partial {
	uint64_t sum[2];   /* of its chunks                                   */
	uint32_t amax;     /* bits (of fp32) of the largest finite |x|        */
	uint32_t infinite; /* not 0: NaN or Inf was seen                      */
	uint64_t pad;      /* zero                                            */
};

/* Scratch of one check, used in stream order; nothing in it needs a value before. */
struct qs_hash_work {
	uint64_t hash[2];  /* of the matrix                                                     */
	uint32_t stale;    /* not 0: the copy is to be made (anew) from the matrix              */
	uint32_t differs;  /* not 0: the hash is not the one kept                               */
	uint32_t amax;     /* bits (of fp32) of the matrix's                                    */
	uint32_t infinite; /* not 0: it holds NaN or Inf                                        */
	uint32_t repair;   /* partial of a one-block qs_quantise (kernels/quantise.h), for which
	                      qs_repair casts anew if `stale`, and leaves the cast alone if not */
	uint32_t failed;   /* the descriptor's word of that name, before the check              */
	uint32_t pad[6];   /* not written                                                       */
	struct qs_hash_partial partial[QS_HASH_PARTIALS];
};

/* What is known of a copy, in device memory beside it. 48 bytes. */
struct qs_hash_record {
	uint64_t kept[2]; /* hash of what the copy was made from                    */
	uint32_t amax;    /* bits (of fp32) of the same                             */
	uint32_t changes; /* checks that found another hash                         */
	uint32_t replays; /* checks by graphs                                       */
	/* of sample.h: */
	uint32_t turn;    /* number of samples so far: which part is compared next  */
	uint32_t readers; /* blocks of the running sample that are done             */
	uint32_t found;   /* not 0: one of them found a change                      */
	uint32_t pad[2];  /* not written                                            */
};

/* What the host sees of it, in mapped host memory. 64 bytes. */
struct qs_hash_outcome {
	uint64_t hash[2];  /* found by the last check                                       */
	uint32_t amax;     /* of the last check                                             */
	uint32_t infinite; /* not 0: the last check saw NaN or Inf                          */
	uint32_t changes;  /* of the record, or 0                                           */
	uint32_t differs;  /* not 0: the last numbered check found another hash              */
	uint64_t sequence; /* of the last numbered check; written last                      */
	uint32_t escapes;  /* samples and products that found a change                      */
	uint32_t replays;  /* of the record                                                 */
	uint64_t rest[2];  /* not written                                                   */
};

/* The parameter of every kernel below. 160 bytes. */
struct qs_hash_args {
	uint64_t source;               /* device pointer, bf16, 2-byte aligned                  */
	int64_t rows, cols, ld;        /* elements; rows, cols >= 1                             */
	uint64_t work;                 /* device pointer, struct qs_hash_work, 16-byte aligned  */
	uint64_t record;               /* device pointer, struct qs_hash_record; 0: no copy     */
	uint64_t outcome;              /* device address of struct qs_hash_outcome              */
	uint64_t descriptor;           /* device pointer, uint32_t[QS_HASH_IMAGE], or 0         */
	uint64_t sequence;             /* number of this check                                  */
	uint32_t blocks;               /* of qs_hash                                            */
	uint32_t flags;                /* QS_HASH_*                                             */
	uint32_t valid, failed;        /* indices of the descriptor's words of these names      */
	uint32_t reset;                /* bit for each word of it to be 0 while stale           */
	uint32_t pad;                  /* zero                                                  */
	uint32_t image[QS_HASH_IMAGE]; /* the descriptor, for QS_HASH_MAKE                      */
};

/*
 * Kernels, each `extern "C" __global__ void NAME(struct qs_hash_args)`, launched one after the
 * other with one-dimensional grids of QS_HASH_THREADS and no dynamic shared memory. All take the
 * same arguments, and whatever makes the copy goes between the second and the third:
 *
 * qs_hash        (`blocks`, at most QS_HASH_PARTIALS) leaves work.partial[block]. Which chunks a
 *                block sees is the kernel's affair; together they see all.
 * qs_hash_judge  (1 block) fills the rest of the work. With QS_HASH_MAKE, or where the hash is not
 *                the record's and QS_HASH_LOOK is not given, the copy is stale. With QS_HASH_MAKE
 *                writes the image to the descriptor; otherwise, where the copy is stale, zeroes the
 *                words of `reset`, among them descriptor[valid].
 * qs_hash_commit (1 block) after the copy was made: where it was stale, writes hash and amax to the
 *                record, and to descriptor[valid] 1, or 0 if QS_HASH_FINITE is given and not all is
 *                finite. Where the hash differed, counts a change (QS_HASH_MAKE: sets all counts
 *                of the record and the outcome to 0). Where it did not and
 *                descriptor[failed] was set, the copy is good after all: sets failed to 0 and valid
 *                as above. Writes the outcome; with QS_HASH_GRAPH counts a replay, otherwise
 *                writes differs too, and at the end the sequence.
 *
 * Two checks of one copy that are not ordered may run at once if both find the same contents: the
 * record says that a copy is good only after it is.
 */
#define QS_KERNEL_HASH        "qs_hash"
#define QS_KERNEL_HASH_JUDGE  "qs_hash_judge"
#define QS_KERNEL_HASH_COMMIT "qs_hash_commit"

static inline int64_t qs_hash_chunks(int64_t rows, int64_t cols)
{
	return rows * (cols / 8 + (cols % 8 != 0));
}

/* Blocks of qs_hash on a device of `sms` multiprocessors. */
static inline uint32_t qs_hash_blocks(int64_t rows, int64_t cols, int sms)
{
	const int64_t chunks = qs_hash_chunks(rows, cols);
	const int64_t work = chunks / QS_HASH_SHARE + (chunks % QS_HASH_SHARE != 0);
	int64_t most = (int64_t)sms * QS_HASH_BLOCKS_PER_SM;
	if (most > QS_HASH_PARTIALS)
		most = QS_HASH_PARTIALS;
	return (uint32_t)(work < 1 ? 1 : work < most ? work : most);
}

#endif
