/* Quantisation of bf16 matrices to fp8: kernel names, parameters and launch geometry.
 *
 * Shared by the CUDA kernels (quantise.cu), the engine that launches them, and their C references
 * (tests/oracle/quantise.c). Plain C, fixed-width types, no CUDA headers.
 *
 * A source matrix is `outer` vectors of `inner` contiguous bf16 elements, ld apart. With
 * `transpose` = 0 the inner dimension is K (the reduction): output row r (r < outer) holds the K
 * values of source vector r. With `transpose` = 1 the inner dimension is the outer one of the
 * output: output row r (r < inner) holds element r of every source vector. Either way the output is
 * `rows` rows of `k_padded` fp8 bytes, zero from k to k_padded, rows contiguous.
 *
 * Rules of the numbers (DESIGN: never hide, never spread):
 *   amax    = maximum of |x| over finite x; NaN and Inf are ignored
 *   amax'   = amax if amax >= 2^-100, else (amax == 0 ? FORMAT_MAX : 2^-100)
 *   scale   = amax' / FORMAT_MAX          (fp32, round to nearest; 1 for a zero matrix)
 *   inverse = FORMAT_MAX / amax'          (fp32, round to nearest)
 *   q(x)    = e4m3 of (float)x * inverse, round to nearest even, saturating at +-448
 *   q(NaN) = q(+-Inf) = 0x7f (NaN)
 */
#ifndef QS_KERNELS_QUANTISE_H
#define QS_KERNELS_QUANTISE_H

#include <stdint.h>

#define QS_E4M3_MAX   448.0f
#define QS_AMAX_FLOOR 0x1p-100f
#define QS_FP8_NAN    0x7f

/* Upper bound of the blocks of one operand in the amax kernel = length of its array of partials. */
#define QS_AMAX_BLOCKS        512
#define QS_AMAX_THREADS       512
#define QS_AMAX_BLOCKS_PER_SM 4    /* resident with at most 32 registers a thread            */
#define QS_AMAX_SHARE         4096 /* least elements worth a block: 16 bytes for each thread */

#define QS_CAST_THREADS       256
#define QS_CAST_BLOCKS_PER_SM 4
#define QS_CAST_CHUNK         16 /* straight cast: bytes of output a thread writes at once */
/* Tile of the transposing cast: 128 x 64 elements, so that both a source vector's part of it (64
 * bf16) and an output row's (128 fp8) are whole 128-byte lines. */
#define QS_TILE_K     128
#define QS_TILE_INNER 64

/* One operand of a product. 64 bytes. */
struct qs_quantise_operand {
	uint64_t source;    /* device pointer, bf16, 2-byte aligned                              */
	uint64_t target;    /* device pointer, fp8, 16-byte aligned                              */
	uint64_t scale;     /* device pointer, one float: the dequantisation scale, written      */
	int64_t ld;         /* distance of source vectors, elements                              */
	int64_t inner;      /* contiguous elements of a source vector                            */
	int64_t outer;      /* number of source vectors                                          */
	int64_t k_padded;   /* bytes of an output row: k rounded up to 16                        */
	uint32_t transpose; /* see above                                                         */
	uint32_t blocks;    /* blocks of this operand in the launch at hand                      */
};

/* Both operands of a product: one launch of operand[0].blocks + operand[1].blocks blocks serves
 * them. An operand with blocks = 0 is skipped. */
struct qs_quantise_args {
	struct qs_quantise_operand operand[2];
	uint64_t partials; /* device pointer: uint32_t[2][QS_AMAX_BLOCKS], bits of |x| as fp32's  */
};

/*
 * Kernels, each `extern "C" __global__ void NAME(struct ...)`, launched with a one-dimensional grid
 * of operand[0].blocks + operand[1].blocks blocks and no dynamic shared memory:
 *
 * qs_amax   (struct qs_quantise_args) block b of an operand writes partials[operand][b], the bits
 *           (as uint32_t of the fp32 value) of the largest finite |x| it saw. Blocks =
 *           QS_AMAX_BLOCKS at most, threads = QS_AMAX_THREADS. Order-independent, no atomics, no
 *           zeroing needed before. Which elements a block sees is the kernel's affair; together
 *           the blocks see all. Reads source, ld, inner, outer, blocks only.
 * qs_cast   (struct qs_cast_args) every block reduces the `partial_blocks` partials of its operand
 *           (stored by the launch as partials[operand][0 .. amax_blocks)), casts its share, and
 *           block 0 of the operand writes *scale. threads = QS_CAST_THREADS; serves transposed and
 *           straight operands. Any number of blocks from 1 is right.
 *
 * The number of partials of each operand is passed in qs_cast_args.
 */
struct qs_cast_args {
	struct qs_quantise_args quantise; /* blocks: those of the cast launch                  */
	uint32_t partial_blocks[2];       /* blocks of each operand in the amax launch before  */
};

#define QS_KERNEL_AMAX "qs_amax"
#define QS_KERNEL_CAST "qs_cast"

/* k rounded up to 16, what cuBLASLt demands of an fp8 operand's leading dimension. */
static inline int64_t qs_k_padded(int64_t k)
{
	return (k + 15) / 16 * 16;
}

/* Rows of the output; each has k_padded bytes. */
static inline int64_t qs_quantise_rows(const struct qs_quantise_operand *operand)
{
	return operand->transpose ? operand->inner : operand->outer;
}

/* Number of shares of `size` in `work`, at least 1 and at most `most`. */
static inline uint32_t qs_quantise_shares(int64_t work, int64_t size, int64_t most)
{
	const int64_t shares = work / size + (work % size != 0);
	return (uint32_t)(shares < 1 ? 1 : shares < most ? shares : most);
}

/* Blocks to give an operand in the amax launch on a device of `sms` multiprocessors; `blocks` of
 * the operand is not read. A large operand fills the device by itself: those of a second one follow
 * as the first one's end. */
static inline uint32_t qs_amax_blocks(const struct qs_quantise_operand *operand, int sms)
{
	const int64_t fill = (int64_t)sms * QS_AMAX_BLOCKS_PER_SM;
	return qs_quantise_shares(operand->inner * operand->outer, QS_AMAX_SHARE,
	                          fill < QS_AMAX_BLOCKS ? fill : QS_AMAX_BLOCKS);
}

/* The same for the cast launch: one block for each tile or, straight, for each QS_CAST_THREADS
 * chunks of the output, until the device is full. */
static inline uint32_t qs_cast_blocks(const struct qs_quantise_operand *operand, int sms)
{
	const int64_t fill = (int64_t)sms * QS_CAST_BLOCKS_PER_SM;
	if (!operand->transpose)
		return qs_quantise_shares(operand->outer * (operand->k_padded / QS_CAST_CHUNK),
		                          QS_CAST_THREADS, fill);
	const int64_t tiles_k = (operand->k_padded + QS_TILE_K - 1) / QS_TILE_K;
	const int64_t tiles_inner = (operand->inner + QS_TILE_INNER - 1) / QS_TILE_INNER;
	return qs_quantise_shares(tiles_k * tiles_inner, 1, fill);
}

#endif
