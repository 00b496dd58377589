/* Quantisation of bf16 matrices to fp8: kernel names, parameters and launch geometry.
 *
 * Shared by the CUDA kernels (quantise.cu), the engine that launches them, and their C references
 * (tests/oracle/quantise.c). Plain C, fixed-width types, no CUDA headers.
 *
 * A source matrix is `outer` vectors of `inner` contiguous bf16 elements, ld apart. `straight` is
 * its fp8 form in the same orientation: `outer` rows of `inner` bytes. `turned` is the transpose:
 * `inner` rows of `outer` bytes. Rows of both are padded with zeros to a multiple of 16 bytes and
 * follow each other without a gap. cuBLASLt wants the reduction dimension K along a row.
 *
 * Rules of the numbers (DESIGN: never hide, never spread), FORMAT_MAX being 448 or 57344:
 *   amax    = maximum of |x| over finite x; NaN and Inf are ignored
 *   amax'   = amax, at least 2^-100
 *   inverse = the power of two for which amax' * inverse is in (FORMAT_MAX / 4, FORMAT_MAX / 2]
 *   scale   = 1 / inverse; both are 1 if amax is 0
 *   q(x)    = fp8 of (float)x * inverse, round to nearest even, saturating at +-FORMAT_MAX
 *   q(NaN) = q(+-Inf) = 0x7f (NaN)
 *
 * Powers of two because then x * inverse is exact: two scales give bytes that mean the same
 * numbers, but for what falls below the format's normal range or above its largest number. So a
 * result hardly depends on which of several good scales was used, and that is what allows to
 * predict one. The factor of two left free is room for the next matrix to be larger. It costs no
 * accuracy to speak of: fp8 is a floating-point format, and e4m3 has 12.8 binades of normal numbers
 * below FORMAT_MAX / 4. Rows and columns follow the same rule, so that a matrix scaled by rows and
 * as a whole gives the same numbers too.
 */
#ifndef QS_KERNELS_QUANTISE_H
#define QS_KERNELS_QUANTISE_H

#include <stdint.h>

#ifdef __CUDACC__
#define QS_INLINE static inline __host__ __device__
#else
#define QS_INLINE static inline
#endif

/* Formats of the result; the values of qs_quantise_operand.format. */
#define QS_FP8_E4M3 0
#define QS_FP8_E5M2 1

#define QS_E4M3_MAX   448.0f
#define QS_E5M2_MAX   57344.0f
#define QS_AMAX_FLOOR 0x1p-100f
#define QS_FP8_NAN    0x7f
/* A prediction is good if it puts amax' between FORMAT_MAX / QS_PREDICTION_LOSS and FORMAT_MAX. At
 * the lower end e4m3 still has 7.8 binades of normal numbers below amax'. */
#define QS_PREDICTION_LOSS 128.0f

#define QS_QUANTISE_THREADS       256  /* of every kernel but qs_quantise_rows                  */
#define QS_QUANTISE_BLOCKS_PER_SM 4    /* resident with at most 64 registers a thread           */
#define QS_QUANTISE_SHARE         4096 /* least elements worth a block: 32 bytes for a thread   */
#define QS_PARTIALS               1024 /* most blocks of one operand in qs_quantise             */

/* Tile of the transposing kernels: 128 x 64 elements, so that both a source vector's part of it (64
 * bf16) and a turned row's (128 fp8) are whole 128-byte lines. */
#define QS_TILE_OUTER 128
#define QS_TILE_INNER 64

#define QS_ROWS_THREADS       512
#define QS_ROWS_BLOCKS_PER_SM 2         /* resident with at most 64 registers a thread           */
#define QS_ROWS_ELEMENTS      64        /* of a row, held in a thread's registers                */
#define QS_ROWS_HELD          32768     /* longest row that a block holds: both of the above     */
#define QS_ROWS_BLOCKS        (1 << 29) /* most blocks of one operand: a grid's limit is 2^31    */

#define QS_COLUMN_SLICES 8 /* parts of a column, each with a maximum of its own */

/* One operand of a product. A target may be 0: not wanted. 88 bytes. */
struct qs_quantise_operand {
	uint64_t source;    /* device pointer, bf16, 2-byte aligned                             */
	uint64_t straight;  /* device pointer, fp8, 16-byte aligned, or 0                       */
	uint64_t turned;    /* device pointer, fp8, 16-byte aligned, or 0                       */
	uint64_t scale;     /* device pointer, float[]: dequantisation scales, written          */
	uint64_t history;   /* device pointer, uint32_t: see qs_quantise; or 0                  */
	uint64_t partials;  /* device pointer, scratch of qs_partials_bytes(), 16-byte aligned  */
	int64_t ld;         /* distance of source vectors, elements                             */
	int64_t inner;      /* contiguous elements of a source vector                           */
	int64_t outer;      /* number of source vectors                                         */
	uint32_t blocks[2]; /* blocks of this operand in the first and the second launch        */
	uint32_t format;    /* QS_FP8_*                                                         */
	uint32_t pad;       /* zero                                                             */
};

/* Both operands of a product, the parameter of every kernel below. A launch of blocks[i] of both
 * operands together serves them; one with blocks[i] = 0 is skipped. The first and the second launch
 * take the same arguments. */
struct qs_quantise_args {
	struct qs_quantise_operand operand[2];
};

/*
 * Kernels, each `extern "C" __global__ void NAME(struct qs_quantise_args)`, launched with a
 * one-dimensional grid and no dynamic shared memory. Any number of blocks from 1 is right, in
 * qs_quantise up to QS_PARTIALS. Indices are 64 bits wide, any size and alignment is right. Code
 * made for compute capability 9.0 or later waits itself for the work ahead of it in the stream: it
 * may be launched with CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
 *
 * One scale for a matrix, scale[0]; at least one target is wanted:
 * qs_quantise       (blocks[0]) if *history is not 0, casts with the scale that it gives as the
 * bits (of fp32) of a former amax, and measures on the way; else only measures. Block b leaves
 * partials[b], a uint32_t: the upper half is that of the bits of the largest finite |x| it saw, the
 * lower half that of the history it used, 0 if none. Which elements a block sees is the kernel's
 * affair; together they see all. qs_repair         (blocks[1]) must follow. Knows amax from the
 * partials. Where all blocks cast by the same history and it turns out to be good, leaves the cast
 * as it is, and casts anew otherwise. Writes the scale that holds, and amax to *history. The
 * history is persistent memory, zero at first. Several streams may use one at a time: the worst
 * that comes of it is a repair.
 *
 * A scale for each row of `straight`, scale[outer]; only this target is written:
 * qs_quantise_rows  (blocks[0], QS_ROWS_THREADS) all in one launch: rows are held in registers.
 *
 * A scale for each row of `turned`, scale[inner]; only this target is written:
 * qs_amax_columns   (blocks[0]) leaves partials, uint16_t[QS_COLUMN_SLICES][padded inner]: bits (of
 *                   bf16) of the largest finite |x| of a slice of each column. Which vectors make a
 *                   slice is the kernel's affair.
 * qs_cast_columns   (blocks[1]) must follow.
 */
#define QS_KERNEL_QUANTISE      "qs_quantise"
#define QS_KERNEL_REPAIR        "qs_repair"
#define QS_KERNEL_QUANTISE_ROWS "qs_quantise_rows"
#define QS_KERNEL_AMAX_COLUMNS  "qs_amax_columns"
#define QS_KERNEL_CAST_COLUMNS  "qs_cast_columns"

/* k rounded up to 16, what cuBLASLt demands of an fp8 operand's leading dimension. */
QS_INLINE int64_t qs_k_padded(int64_t k)
{
	return (k + 15) / 16 * 16;
}

/* Number of shares of `size` in `work`, rounded up. */
QS_INLINE int64_t qs_shares(int64_t work, int64_t size)
{
	return work / size + (work % size != 0);
}

/* Threads that hold a row of qs_quantise_rows: a power of two, at least a warp. */
QS_INLINE int qs_row_threads(int64_t inner)
{
	int threads = 32;
	while (threads < QS_ROWS_THREADS && threads * QS_ROWS_ELEMENTS < inner)
		threads *= 2;
	return threads;
}

static inline int64_t qs_straight_bytes(const struct qs_quantise_operand *operand)
{
	return operand->outer * qs_k_padded(operand->inner);
}

static inline int64_t qs_turned_bytes(const struct qs_quantise_operand *operand)
{
	return operand->inner * qs_k_padded(operand->outer);
}

/* Bytes of `partials` that suffice for every kernel, whatever the blocks. */
static inline int64_t qs_partials_bytes(const struct qs_quantise_operand *operand)
{
	const int64_t columns = qs_k_padded(operand->inner) * QS_COLUMN_SLICES * 2;
	const int64_t blocks = QS_PARTIALS * 4;
	return columns > blocks ? columns : blocks;
}

static inline uint32_t qs_at_most(int64_t blocks, int64_t most)
{
	return (uint32_t)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

static inline int64_t qs_quantise_tiles(const struct qs_quantise_operand *operand)
{
	return qs_shares(operand->outer, QS_TILE_OUTER) * qs_shares(operand->inner, QS_TILE_INNER);
}

/* Sets `blocks` for qs_quantise and qs_repair on a device of `sms` multiprocessors, by the sizes
 * and by which pointers are not 0 (any stand-in will do). A large operand fills the device by
 * itself; see qs_quantise_share() for a second one beside it. With a history the repair
 * nearly always ends at once, and few blocks do; without one it does all the casting. */
static inline void qs_quantise_plan(struct qs_quantise_operand *operand, int sms)
{
	const int64_t most = (int64_t)sms * QS_QUANTISE_BLOCKS_PER_SM;
	const int64_t work = operand->turned
	                             ? qs_quantise_tiles(operand)
	                             : qs_shares(qs_straight_bytes(operand), QS_QUANTISE_SHARE);
	operand->blocks[0] = qs_at_most(work, most < QS_PARTIALS ? most : QS_PARTIALS);
	operand->blocks[1] =
	        operand->history ? qs_at_most(operand->blocks[0], sms) : operand->blocks[0];
}

/* For both operands in one launch, when each has its blocks: gives them together no more than run
 * at once, in proportion to their elements, so that no block comes late and finds the pipeline
 * cold. */
static inline void qs_quantise_share(struct qs_quantise_args *args, int sms)
{
	const int64_t most = (int64_t)sms * QS_QUANTISE_BLOCKS_PER_SM;
	struct qs_quantise_operand *a = &args->operand[0], *b = &args->operand[1];
	const int64_t of_a = a->inner * a->outer, of_b = b->inner * b->outer;
	if (!a->blocks[0] || !b->blocks[0] || (int64_t)a->blocks[0] + b->blocks[0] <= most)
		return;
	const int64_t share = (int64_t)((double)most * (double)of_a / (double)(of_a + of_b));
	a->blocks[0] = qs_at_most(share, a->blocks[0]);
	b->blocks[0] = qs_at_most(most - a->blocks[0], b->blocks[0]);
}

/* The same for qs_quantise_rows: a block for as many rows as it holds. Those that end make room for
 * others, which load while their neighbours store; blocks that loop would do so in step. */
static inline void qs_rows_plan(struct qs_quantise_operand *operand)
{
	const int64_t rows = QS_ROWS_THREADS / qs_row_threads(operand->inner);
	operand->blocks[0] = qs_at_most(qs_shares(operand->outer, rows), QS_ROWS_BLOCKS);
	operand->blocks[1] = 0;
}

/* The same for qs_amax_columns and qs_cast_columns. */
static inline void qs_columns_plan(struct qs_quantise_operand *operand, int sms)
{
	const int64_t most = (int64_t)sms * QS_QUANTISE_BLOCKS_PER_SM;
	const int64_t strips = qs_shares(operand->inner, QS_TILE_INNER);
	operand->blocks[0] = qs_at_most(strips * QS_COLUMN_SLICES, most);
	operand->blocks[1] = qs_at_most(qs_quantise_tiles(operand), most);
}

#endif
