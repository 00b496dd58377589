/* Weights in 4 or 8 bits and products of few tokens with them: see nf4.h for what each kernel
 * computes and for the order in which a tile lies in memory.
 *
 * Memory is the limit of products: 8192 x 8192 in NF4 are 35.6 MB, 8.4 us at an H200's copy rate of
 * 4.24 TB/s, and the sampled rows of W another 2.1 MB. At that rate a multiprocessor has one clock
 * for 30 weights. It decodes them by a table of pairs (a byte holds two codes) in shared memory, of
 * which each lane has a copy in a bank of its own: 64 weights a clock. The decoded weights are the
 * register operand of the matrix instruction and X the one in shared memory, so that weights never
 * return there; the 64 columns of a tile share a scale, with which their sums are multiplied in
 * fp32 before they are added up.
 *
 * A block has four groups of four warps, each of which multiplies one 64 x 64 tile at a time. Where
 * a block works on fewer than four rows of tiles, groups share a row and take turns along k. The
 * blocks of a cluster share rows and split k. All partial sums are added in one fixed order.
 *
 * On Hopper four more warps feed a pipeline in shared memory: one makes bulk copies of tiles, two
 * copy X into the swizzled form that wgmma reads, and one compares the sampled rows of W. Measured,
 * the steps of this pipeline take longer than the memory: 25 us for the product above with 8
 * tokens. Elsewhere the groups load from memory themselves and use mma.sync: right, not tuned.
 */
#include <stddef.h>

#include "kernels/nf4.h"
#include "kernels/sample.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1
#else
#define HOPPER 0
#endif

#define WARP  32
#define FULL  0xffffffffu
#define CHUNK 8 /* bf16 elements of a 16-byte access */
#define STEPS 4 /* of 16 columns in a tile           */

#define QUARTER_ROWS 16 /* rows of a tile that lie together: those of a warp */

static_assert(sizeof(struct qs_weight) == 64, "layout is shared with the host");
static_assert(sizeof(struct qs_pack_args) == 64, "layout is shared with the host");
static_assert(sizeof(struct qs_expand_args) == 64, "layout is shared with the host");
static_assert(sizeof(struct qs_product_args) == 128, "layout is shared with the host");

/* ---- numbers -------------------------------------------------------------------------------- */

static __device__ __forceinline__ float float_of(uint32_t bf16)
{
	return __uint_as_float(bf16 << 16);
}

static __device__ __forceinline__ uint32_t bf16_of(float value)
{
	uint16_t bits;
	asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
	return bits;
}

/* What bitsandbytes divides by: 1 / absmax of -use_fast_math. */
static __device__ __forceinline__ float reciprocal(float value)
{
	float result;
	asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
	return result;
}

/* The absmax that is stored for a block whose largest |x| has these bits of bf16. */
static __device__ __forceinline__ uint32_t absmax_of(uint32_t magnitude)
{
	return magnitude < QS_AMAX_LEAST || magnitude >= 0x7f80 ? 0 : magnitude;
}

/* The power of two that quantise.h prescribes for e4m3 and bits of fp32 as amax. */
static __device__ __forceinline__ float inverse_of(uint32_t amax)
{
	const uint32_t floored = max(amax, __float_as_uint(QS_AMAX_FLOOR));
	const uint32_t beyond = (floored & 0x7fffffu) > 0x600000u;
	const uint32_t exponent = 254 + 7 - beyond - (floored >> 23);
	return amax == 0 ? 1.0f : __uint_as_float(exponent << 23);
}

static __device__ __forceinline__ float scale_of(float inverse)
{
	return __uint_as_float((254u << 23) - __float_as_uint(inverse));
}

/* Two values as e4m3, `low` in the low byte: nearest even, saturating; NaN and Inf are 0x7f. */
static __device__ __forceinline__ uint32_t e4m3(float value)
{
	const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
	const uint32_t rebias = 120u << 23, least = rebias + (1u << 23);
	const uint32_t subnormal = __float2uint_rn(__uint_as_float(min(magnitude, least)) * 0x1p9f);
	const uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1) - rebias) >> 20;
	if (magnitude >= 0x7f800000u)
		return QS_FP8_NAN;
	return (magnitude < least ? subnormal : min(normal, 0x7eu)) | (bits >> 24 & 0x80u);
}

static __device__ __forceinline__ uint32_t e4m3_pair(float low, float high)
{
	return e4m3(low) | e4m3(high) << 8;
}

/* The same for finite values. */
static __device__ __forceinline__ uint32_t e4m3_pair_finite(float low, float high)
{
#if __CUDA_ARCH__ >= 890
	uint16_t pair;
	asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
	return pair;
#else
	return e4m3_pair(low, high);
#endif
}

/* ---- tiles ---------------------------------------------------------------------------------- */

/* Lane of a tile that holds a row's column pair; see nf4.h. */
static __device__ __forceinline__ unsigned tile_lane(unsigned row, unsigned pair)
{
	return row / QUARTER_ROWS * WARP + row % 8 * 4 + pair % 4;
}

static __device__ __forceinline__ unsigned nf4_byte(unsigned row, unsigned pair)
{
	return tile_lane(row, pair) * 16 + pair / 4 * 2 + row % QUARTER_ROWS / 8;
}

/* Of the pair's first element; the second is two bytes further. */
static __device__ __forceinline__ unsigned fp8_byte(unsigned row, unsigned pair)
{
	return tile_lane(row, pair) * 16 + pair / 16 * (QS_FP8_TILE_BYTES / 2) + pair / 4 % 4 * 4 +
	       row % QUARTER_ROWS / 8;
}

static __device__ __forceinline__ unsigned absmax_place(unsigned row)
{
	return row / QUARTER_ROWS * QUARTER_ROWS + row % 8 * 2 + row % QUARTER_ROWS / 8;
}

/* ---- loads of W and X ----------------------------------------------------------------------- */

static __device__ __forceinline__ bool rows_aligned(uint64_t pointer, int64_t ld, unsigned elements)
{
	return pointer % (2 * elements) == 0 && ld % elements == 0;
}

/* Two neighbouring elements, the first in the low half. */
static __device__ __forceinline__ uint32_t load_pair(const uint16_t *source, bool aligned)
{
	if (aligned)
		return __ldg((const uint32_t *)source);
	return __ldg(source) | (uint32_t)__ldg(source + 1) << 16;
}

/* A function of its own so that eight loads here cost the common path no registers. */
static __device__ __noinline__ uint4 load_unaligned(const uint16_t *source)
{
	return make_uint4(load_pair(source, false), load_pair(source + 2, false),
	                  load_pair(source + 4, false), load_pair(source + 6, false));
}

static __device__ __forceinline__ uint4 load_chunk(const uint16_t *source, bool aligned)
{
	return aligned ? __ldcs((const uint4 *)source) : load_unaligned(source);
}

/* ---- packing -------------------------------------------------------------------------------- */

/* A warp packs a quarter of a tile, 16 rows, at a time: load i of four takes rows 4 i..4 i + 3,
 * eight lanes a row. It then holds `row` and pairs 4 l8..4 l8 + 3 of it. */
#define QUARTER_LOADS (QUARTER_ROWS / 4)

struct quarter {
	uint4 chunk[QUARTER_LOADS];
};

static __device__ __forceinline__ struct quarter
load_quarter(const struct qs_pack_args *args, int64_t first_row, int64_t column, bool aligned)
{
	const unsigned lane = threadIdx.x % WARP;
	const uint16_t *source = (const uint16_t *)args->source + column + lane % 8 * CHUNK;
	struct quarter quarter;
#pragma unroll
	for (int i = 0; i < QUARTER_LOADS; i++) {
		const int64_t row = first_row + i * 4 + lane / 8;
		quarter.chunk[i] = row < args->n ? load_chunk(source + row * args->ld, aligned)
		                                 : make_uint4(0, 0, 0, 0);
	}
	return quarter;
}

static __device__ __forceinline__ uint32_t word_of(const uint4 &chunk, int i)
{
	return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

/* Bits of the largest magnitude of a chunk, NaN and Inf included: magnitudes order as integers. */
static __device__ __forceinline__ uint32_t chunk_max(const uint4 &chunk)
{
	uint32_t most = __vmaxu2(chunk.x & 0x7fff7fffu, chunk.y & 0x7fff7fffu);
	most = __vmaxu2(most, chunk.z & 0x7fff7fffu);
	most = __vmaxu2(most, chunk.w & 0x7fff7fffu);
	return max(most >> 16, most & 0xffffu);
}

/* The largest value of the lanes of a group of 8. */
static __device__ __forceinline__ uint32_t row_max(uint32_t value)
{
	value = max(value, __shfl_xor_sync(FULL, value, 1));
	value = max(value, __shfl_xor_sync(FULL, value, 2));
	return max(value, __shfl_xor_sync(FULL, value, 4));
}

/* Merges what a warp saw into the descriptor. `largest` is over all magnitudes, `amax` over those
 * that were stored. */
static __device__ __forceinline__ void report(struct qs_weight *weight, uint32_t amax,
                                              uint32_t largest)
{
	amax = __reduce_max_sync(FULL, amax);
	largest = __reduce_max_sync(FULL, largest);
	if (threadIdx.x % WARP != 0)
		return;
	atomicMax(&weight->amax, amax << 16);
	if (largest >= 0x7f80)
		atomicOr(&weight->nonfinite, 1u);
}

/* [-1, 1] in 33 steps of 1/16, rounded to the nearest: at most one midpoint falls in each. A step's
 * entry holds that midpoint and the number of midpoints in the steps below, so that a code is found
 * by one look and one comparison. Every lane has a copy of its own. */
#define CODE_STEPS 33
#define STEP_MAGIC 12582928.0f /* 1.5 * 2^23 + 16: adding it rounds x * 16 to a whole step */
#define MAGIC_BITS 0x4b400000u /* its bits, less the 16                                     */

static __device__ __forceinline__ uint32_t step_of(float value)
{
	return __float_as_uint(__fmaf_rn(value, 16.0f, STEP_MAGIC));
}

static __device__ void fill_steps(float2 (*steps)[WARP])
{
	for (unsigned i = threadIdx.x; i < CODE_STEPS * WARP; i += QS_PACK_THREADS) {
		const uint32_t step = i / WARP;
		float midpoint = 2;
		uint32_t below = 0;
		for (int code = 0; code < 15; code++) {
			const float at = __uint_as_float(qs_nf4_midpoints[code]);
			const uint32_t place = step_of(at) - MAGIC_BITS;
			below += place < step;
			midpoint = place == step ? at : midpoint;
		}
		steps[step][i % WARP] = make_float2(midpoint, __uint_as_float(below));
	}
	__syncthreads();
}

static __device__ __forceinline__ uint32_t code_of(float value, const float2 (*steps)[WARP])
{
	const float2 step = steps[step_of(value) - MAGIC_BITS][threadIdx.x % WARP];
	return __float_as_uint(step.y) + (value > step.x);
}

static __device__ __forceinline__ uint32_t code_pair(uint32_t pair, float inverse,
                                                     const float2 (*steps)[WARP])
{
	const float first = __fmul_rn(float_of(pair), inverse);
	const float second = __fmul_rn(__uint_as_float(pair & 0xffff0000u), inverse);
	return code_of(first, steps) << 4 | code_of(second, steps);
}

/* Codes of a warp's quarter into `bytes`, 512 of its own; absmax into `absmax`, 16. */
static __device__ __forceinline__ void code_quarter(const struct quarter &quarter, uint8_t *bytes,
                                                    uint16_t *absmax, const float2 (*steps)[WARP],
                                                    uint32_t *amax, uint32_t *largest)
{
	const unsigned lane = threadIdx.x % WARP, l8 = lane % 8;
#pragma unroll
	for (int i = 0; i < QUARTER_LOADS; i++) {
		const unsigned row = i * 4 + lane / 8;
		const uint32_t magnitude = row_max(chunk_max(quarter.chunk[i]));
		const uint32_t block = absmax_of(magnitude);
		const float inverse = reciprocal(float_of(block));
#pragma unroll
		for (int j = 0; j < 4; j++) {
			const uint32_t code =
			        block ? code_pair(word_of(quarter.chunk[i], j), inverse, steps)
			              : 0x77;
			bytes[nf4_byte(row, l8 * 4 + j)] = (uint8_t)code;
		}
		if (l8 == 0)
			absmax[absmax_place(row)] = (uint16_t)block;
		*amax = max(*amax, block);
		*largest = max(*largest, magnitude);
	}
}

extern "C" __global__ void __launch_bounds__(QS_PACK_THREADS, QS_PACK_BLOCKS_PER_SM)
        qs_nf4_pack(struct qs_pack_args args)
{
	__shared__ float2 steps[CODE_STEPS][WARP];
	__shared__ __align__(16) uint8_t codes[QS_PACK_THREADS / WARP][512];
	__shared__ __align__(16) uint16_t absmax[QS_PACK_THREADS / WARP][QUARTER_ROWS];
	const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
	const int64_t chunks = args.k / QS_WEIGHT_TILE;
	const int64_t quarters = qs_weight_tiles(args.n, args.k) * 4;
	const int64_t stride = (int64_t)gridDim.x * (QS_PACK_THREADS / WARP);
	const bool aligned = rows_aligned(args.source, args.ld, CHUNK);
	struct qs_weight *weight = (struct qs_weight *)args.weight;
	uint32_t amax = 0, largest = 0;
	if (args.when && !*(const uint32_t *)args.when)
		return;
	fill_steps(steps);
	/* quarters of a tile row follow each other along k, as the source does */
	for (int64_t i = (int64_t)blockIdx.x * (QS_PACK_THREADS / WARP) + warp; i < quarters;
	     i += stride) {
		const int64_t quarter_row = i / chunks, chunk = i - quarter_row * chunks;
		uint8_t *tile = (uint8_t *)args.packed +
		                (quarter_row / 4 * chunks + chunk) * QS_NF4_TILE_BYTES;
		const struct quarter quarter = load_quarter(&args, quarter_row * QUARTER_ROWS,
		                                            chunk * QS_WEIGHT_TILE, aligned);
		code_quarter(quarter, codes[warp], absmax[warp], steps, &amax, &largest);
		__syncwarp();
		const unsigned place = (unsigned)(quarter_row % 4);
		((uint4 *)(tile + place * 512))[lane] = ((const uint4 *)codes[warp])[lane];
		if (lane < 2)
			((uint4 *)(tile + QS_NF4_CODE_BYTES + place * 32))[lane] =
			        ((const uint4 *)absmax[warp])[lane];
		__syncwarp();
	}
	report(weight, amax, largest);
	if (blockIdx.x == 0 && threadIdx.x == 0)
		weight->packed = args.packed;
}

/* Bits of the largest magnitude of a row of W, by a warp; NaN and Inf are in `largest` only. */
static __device__ uint32_t amax_of_row(const struct qs_pack_args *args, int64_t row, bool aligned,
                                       uint32_t *largest)
{
	const uint16_t *source = (const uint16_t *)args->source + row * args->ld;
	const unsigned lane = threadIdx.x % WARP;
	uint32_t most = 0;
#pragma unroll 4
	for (int64_t column = lane * CHUNK; column < args->k; column += WARP * CHUNK) {
		const uint4 chunk = load_chunk(source + column, aligned);
#pragma unroll
		for (int i = 0; i < 4; i++) {
			const uint32_t word = word_of(chunk, i);
			const uint32_t low = word & 0x7fffu, high = word >> 16 & 0x7fffu;
			*largest = max(*largest, max(low, high));
			most = max(most, max(low < 0x7f80 ? low : 0, high < 0x7f80 ? high : 0));
		}
	}
	return __reduce_max_sync(FULL, most);
}

/* A quarter as e4m3 in `bytes`: two parts of 512, those of the tile's halves. */
static __device__ __forceinline__ void cast_quarter(const struct quarter &quarter,
                                                    const float *inverse, uint8_t *bytes)
{
	const unsigned lane = threadIdx.x % WARP, l8 = lane % 8;
#pragma unroll
	for (int i = 0; i < QUARTER_LOADS; i++) {
		const unsigned row = i * 4 + lane / 8;
#pragma unroll
		for (int j = 0; j < 4; j++) {
			const uint32_t word = word_of(quarter.chunk[i], j);
			const float low = float_of(word) * inverse[row];
			const float high = __uint_as_float(word & 0xffff0000u) * inverse[row];
			const uint32_t pair = e4m3_pair(low, high);
			const unsigned at = fp8_byte(row, l8 * 4 + j);
			uint8_t *place = bytes + at / (QS_FP8_TILE_BYTES / 2) * 512 +
			                 at % (QS_FP8_TILE_BYTES / 2);
			place[0] = (uint8_t)pair;
			place[2] = (uint8_t)(pair >> 8);
		}
	}
}

extern "C" __global__ void __launch_bounds__(QS_PACK_THREADS, QS_PACK_BLOCKS_PER_SM)
        qs_fp8_pack(struct qs_pack_args args)
{
	__shared__ float inverse[QUARTER_ROWS];
	__shared__ __align__(16) uint8_t bytes[QS_PACK_THREADS / WARP][1024];
	const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
	const int64_t chunks = args.k / QS_WEIGHT_TILE;
	const int64_t quarter_rows = qs_shares(args.n, QS_WEIGHT_TILE) * 4;
	const bool aligned = rows_aligned(args.source, args.ld, CHUNK);
	struct qs_weight *weight = (struct qs_weight *)args.weight;
	uint32_t amax = 0, largest = 0;
	if (args.when && !*(const uint32_t *)args.when)
		return;
	for (int64_t q = blockIdx.x; q < quarter_rows; q += gridDim.x) {
		for (unsigned i = warp; i < QUARTER_ROWS; i += QS_PACK_THREADS / WARP) {
			const int64_t row = q * QUARTER_ROWS + i;
			const uint32_t most =
			        row < args.n ? amax_of_row(&args, row, aligned, &largest) : 0;
			amax = max(amax, most);
			if (lane == 0)
				inverse[i] = inverse_of(most << 16);
			if (lane == 0 && row < args.n)
				((float *)args.scale)[row] = scale_of(inverse[i]);
		}
		__syncthreads();
		for (int64_t chunk = warp; chunk < chunks; chunk += QS_PACK_THREADS / WARP) {
			uint8_t *tile = (uint8_t *)args.packed +
			                (q / 4 * chunks + chunk) * QS_FP8_TILE_BYTES + q % 4 * 512;
			const struct quarter quarter = load_quarter(
			        &args, q * QUARTER_ROWS, chunk * QS_WEIGHT_TILE, aligned);
			cast_quarter(quarter, inverse, bytes[warp]);
			__syncwarp();
			for (unsigned half = 0; half < 2; half++)
				((uint4 *)(tile + half * (QS_FP8_TILE_BYTES / 2)))[lane] =
				        ((const uint4 *)(bytes[warp] + half * 512))[lane];
			__syncwarp();
		}
		__syncthreads();
	}
	report(weight, amax, largest);
	if (blockIdx.x == 0 && threadIdx.x == 0) {
		weight->packed = args.packed;
		weight->scale = args.scale;
	}
}

/* ---- expansion ------------------------------------------------------------------------------ */

/* A block expands 2 x 2 tiles at a time through shared memory, so that rows of all targets are
 * written in pieces of 128 bytes and more. The rows of the e4m3 form are swizzled: the quarter that
 * a row belongs to is mixed into the place of its 16-byte chunks, for the reads along n. */
#define EXPAND_EDGE  (2 * QS_WEIGHT_TILE)
#define BYTE_PITCH   (EXPAND_EDGE + 16)
#define BF16_PITCH   (2 * EXPAND_EDGE + 16)
#define EXPAND_LOADS 2 /* quarters of a warp */

/* A lane's share of a quarter: 16 bytes of codes, and absmax of rows g and g + 8. */
struct share {
	uint4 codes;
	uint32_t absmax;
};

/* What a warp expands at a time. */
struct shares {
	struct share of[EXPAND_LOADS];
};

/* Which quarter of the block's 2 x 2 tiles share i of this warp is of. */
static __device__ __forceinline__ unsigned section_of(int i)
{
	return threadIdx.x / WARP * EXPAND_LOADS + i;
}

/* Where the lane's first pair of a section lies within the block's 2 x 2 tiles. */
static __device__ __forceinline__ unsigned section_row(unsigned section)
{
	return section / 8 * QS_WEIGHT_TILE + section % 4 * QUARTER_ROWS + threadIdx.x % WARP / 4;
}

static __device__ __forceinline__ unsigned section_column(unsigned section)
{
	return section / 4 % 2 * QS_WEIGHT_TILE + threadIdx.x % 4 * 2;
}

/* This warp's shares of 2 x 2 tiles; zeros beyond the weight. */
static __device__ __forceinline__ struct shares
load_shares(const uint8_t *packed, int64_t strip, int64_t chunk, int64_t strips, int64_t chunks)
{
	const unsigned lane = threadIdx.x % WARP;
	struct shares shares;
#pragma unroll
	for (int i = 0; i < EXPAND_LOADS; i++) {
		const unsigned section = section_of(i), quarter = section % 4;
		const int64_t tile_row = strip + section / 8, column = chunk + section / 4 % 2;
		const uint8_t *tile = packed + (tile_row * chunks + column) * QS_NF4_TILE_BYTES;
		shares.of[i] = {make_uint4(0x77777777, 0x77777777, 0x77777777, 0x77777777), 0};
		if (tile_row >= strips || column >= chunks)
			continue;
		shares.of[i].codes = __ldcs((const uint4 *)(tile + quarter * 512) + lane);
		shares.of[i].absmax = __ldcs(
		        (const uint32_t *)(tile + QS_NF4_CODE_BYTES + quarter * 32) + lane / 4);
	}
	return shares;
}

/* Both elements of byte `place` of a word of codes, in fp32 as bitsandbytes computes them. */
static __device__ __forceinline__ float2 pair_value(uint32_t word, int place, uint32_t absmax,
                                                    const float (*book)[WARP])
{
	const unsigned lane = threadIdx.x % WARP;
	const uint32_t first = word >> (place * 8 + 4) & 15, second = word >> place * 8 & 15;
	const float scale = place % 2 ? __uint_as_float(absmax & 0xffff0000u) : float_of(absmax);
	return make_float2(__fmul_rn(book[first][lane], scale),
	                   __fmul_rn(book[second][lane], scale));
}

static __device__ __forceinline__ unsigned swizzled(unsigned row, unsigned column)
{
	return row * BYTE_PITCH + (column ^ (row / QUARTER_ROWS % 8 * 16));
}

static __device__ __forceinline__ void lay_bytes(const struct shares &shares, float inverse,
                                                 const float (*book)[WARP], uint8_t *block)
{
#pragma unroll
	for (int i = 0; i < EXPAND_LOADS * 16; i++) {
		const struct share &share = shares.of[i / 16];
		const unsigned section = section_of(i / 16);
		const unsigned row = section_row(section) + i % 2 * 8;
		const unsigned column = section_column(section) + i / 4 % 4 * 16 + i % 4 / 2 * 8;
		const float2 value =
		        pair_value(word_of(share.codes, i / 4 % 4), i % 4, share.absmax, book);
		*(uint16_t *)(block + swizzled(row, column)) =
		        (uint16_t)e4m3_pair_finite(value.x * inverse, value.y * inverse);
	}
}

static __device__ __forceinline__ void lay_bf16(const struct shares &shares,
                                                const float (*book)[WARP], uint8_t *block)
{
#pragma unroll
	for (int i = 0; i < EXPAND_LOADS * 16; i++) {
		const struct share &share = shares.of[i / 16];
		const unsigned section = section_of(i / 16);
		const unsigned row = section_row(section) + i % 2 * 8;
		const unsigned column = section_column(section) + i / 4 % 4 * 16 + i % 4 / 2 * 8;
		const float2 value =
		        pair_value(word_of(share.codes, i / 4 % 4), i % 4, share.absmax, book);
		*(uint32_t *)(block + row * BF16_PITCH + column * 2) =
		        bf16_of(value.x) | bf16_of(value.y) << 16;
	}
}

/* Where a block's 2 x 2 tiles begin. */
struct corner {
	int64_t row, column;
};

static __device__ __forceinline__ void store_bf16(const struct qs_expand_args *args,
                                                  struct corner at, const uint8_t *block)
{
	for (unsigned i = threadIdx.x; i < EXPAND_EDGE * EXPAND_EDGE / CHUNK;
	     i += QS_PACK_THREADS) {
		const unsigned row = i / (EXPAND_EDGE / CHUNK), chunk = i % (EXPAND_EDGE / CHUNK);
		const int64_t r = at.row + row, c = at.column + chunk * CHUNK;
		if (r < args->n && c < args->k)
			__stcs((uint4 *)((uint16_t *)args->bf16 + r * args->k + c),
			       *(const uint4 *)(block + row * BF16_PITCH + chunk * 16));
	}
}

static __device__ __forceinline__ void store_straight(const struct qs_expand_args *args,
                                                      struct corner at, const uint8_t *block)
{
	for (unsigned i = threadIdx.x; i < EXPAND_EDGE * EXPAND_EDGE / 16; i += QS_PACK_THREADS) {
		const unsigned row = i / (EXPAND_EDGE / 16), column = i % (EXPAND_EDGE / 16) * 16;
		const int64_t r = at.row + row, c = at.column + column;
		if (r < args->n && c < args->k)
			*(uint4 *)((uint8_t *)args->straight + r * args->k + c) =
			        *(const uint4 *)(block + swizzled(row, column));
	}
}

/* Bytes i of four words, for all i. */
static __device__ __forceinline__ void transpose(const uint32_t *in, uint32_t *out)
{
	const uint32_t low01 = __byte_perm(in[0], in[1], 0x5140);
	const uint32_t low23 = __byte_perm(in[2], in[3], 0x5140);
	const uint32_t high01 = __byte_perm(in[0], in[1], 0x7362);
	const uint32_t high23 = __byte_perm(in[2], in[3], 0x7362);
	out[0] = __byte_perm(low01, low23, 0x5410);
	out[1] = __byte_perm(low01, low23, 0x7632);
	out[2] = __byte_perm(high01, high23, 0x5410);
	out[3] = __byte_perm(high01, high23, 0x7632);
}

/* Each thread turns 16 rows of 4 columns. */
static __device__ __forceinline__ void store_turned(const struct qs_expand_args *args,
                                                    struct corner at, const uint8_t *block)
{
	const unsigned row = threadIdx.x % 8 * QUARTER_ROWS, column = threadIdx.x / 8 * 4;
	const int64_t width = qs_k_padded(args->n), r = at.row + row, c = at.column + column;
	uint32_t turned[4][4];
	if (r >= width || c >= args->k)
		return;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		uint32_t in[4], out[4];
#pragma unroll
		for (int j = 0; j < 4; j++)
			in[j] = *(const uint32_t *)(block + swizzled(row + i * 4 + j, column));
		transpose(in, out);
#pragma unroll
		for (int j = 0; j < 4; j++)
			turned[j][i] = out[j];
	}
#pragma unroll
	for (int j = 0; j < 4; j++)
		*(uint4 *)((uint8_t *)args->turned + (c + j) * width + r) =
		        make_uint4(turned[j][0], turned[j][1], turned[j][2], turned[j][3]);
}

extern "C" __global__ void __launch_bounds__(QS_PACK_THREADS, QS_PACK_BLOCKS_PER_SM)
        qs_nf4_expand(struct qs_expand_args args)
{
	__shared__ float book[16][WARP];
	__shared__ __align__(16) uint8_t block[EXPAND_EDGE * BF16_PITCH];
	const struct qs_weight *weight = (const struct qs_weight *)args.weight;
	const uint8_t *packed = (const uint8_t *)weight->packed;
	const float inverse = inverse_of(weight->amax);
	const int64_t strips = qs_shares(args.n, QS_WEIGHT_TILE), chunks = args.k / QS_WEIGHT_TILE;
	const int64_t across = qs_shares(chunks, 2), work = qs_shares(strips, 2) * across;
	for (unsigned i = threadIdx.x; i < 16 * WARP; i += QS_PACK_THREADS)
		book[i / WARP][i % WARP] = __uint_as_float(qs_nf4_codebook[i / WARP]);
	if (blockIdx.x == 0 && threadIdx.x == 0 && args.scale)
		*(float *)args.scale =
		        weight->nonfinite ? __uint_as_float(0x7fffffffu) : scale_of(inverse);
	__syncthreads();
	struct shares next = load_shares(packed, blockIdx.x / across * 2, blockIdx.x % across * 2,
	                                 strips, chunks);
	for (int64_t i = blockIdx.x; i < work; i += gridDim.x) {
		const int64_t then = i + gridDim.x;
		const struct corner at = {i / across * EXPAND_EDGE, i % across * EXPAND_EDGE};
		const struct shares shares = next;
		/* beyond the last, strips end */
		next = load_shares(packed, then / across * 2, then % across * 2, strips, chunks);
		if (args.bf16) {
			lay_bf16(shares, book, block);
			__syncthreads();
			store_bf16(&args, at, block);
			__syncthreads();
		}
		if (args.straight || args.turned) {
			lay_bytes(shares, inverse, book, block);
			__syncthreads();
			if (args.straight)
				store_straight(&args, at, block);
			if (args.turned)
				store_turned(&args, at, block);
			__syncthreads();
		}
	}
}

/* ---- decoding ------------------------------------------------------------------------------- */

/* Where a lane finds its copy of the table: the entry of a byte is 256 bytes further for each, so
 * that one permutation makes an address. On Hopper the table starts at a multiple of 64 KiB of the
 * shared address space, and the permutation gives the whole address. */
struct table {
	uint32_t slot; /* what the permutation takes besides the byte */
	uint32_t base; /* what must be added to the result            */
};

static __device__ __forceinline__ uint32_t shared_address(const void *pointer)
{
	return (uint32_t)__cvta_generic_to_shared(pointer);
}

static __device__ __forceinline__ struct table table_at(uint32_t address)
{
	const uint32_t copy = threadIdx.x % WARP * 4;
	struct table table = {copy, address};
	if (HOPPER)
		table = {address | copy, 0};
	return table;
}

/* qs_nf4_scaled by permutations of constants: memory would have to be waited for. */
static __device__ __forceinline__ uint32_t scaled_code(uint32_t code)
{
	const bool positive = code >= 8;
	const uint32_t low = positive ? __byte_perm(0xf9b56dea, 0xb8854f22, code)
	                              : __byte_perm(0x114180b8, 0x000688d1, code);
	const uint32_t high = positive ? __byte_perm(0x3e3e3e3d, 0x3f3f3f3f, code)
	                               : __byte_perm(0xbfbfbfbf, 0x00bebebe, code);
	return (low & 0xff) | (high & 0xff) << 8;
}

/* All threads take part; 16 bytes, four copies of an entry, at a time. */
static __device__ __forceinline__ void fill_table(uint8_t *table)
{
	for (unsigned i = threadIdx.x; i < 256 * 8; i += blockDim.x) {
		const unsigned byte = i / 8;
		const uint32_t pair = scaled_code(byte >> 4) | scaled_code(byte & 15) << 16;
		*(uint4 *)(table + byte * 256 + i % 8 * 16) = make_uint4(pair, pair, pair, pair);
	}
}

/* The pair of byte i of a word. */
static __device__ __forceinline__ uint32_t look_up(struct table table, uint32_t word, int i)
{
	uint32_t pair;
	const uint32_t address = __byte_perm(word, table.slot, 0x7604 | i << 4) + table.base;
	asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address));
	return pair;
}

/* A tile's A operands of a lane: registers of step s at 4 s, as mma.m16n8k16 numbers them. */
struct fragment {
	uint32_t a[4 * STEPS];
};

static __device__ __forceinline__ void decode_nf4(const uint4 &codes, struct table table,
                                                  struct fragment *fragment)
{
#pragma unroll
	for (int i = 0; i < 4 * STEPS; i++)
		fragment->a[i] = look_up(table, word_of(codes, i / 4), i % 4);
}

/* e4m3 moved to where bf16 has its sign, exponent and mantissa, then multiplied by 2^120, the ratio
 * of the exponents' biases: exact, subnormal numbers too. */
static __device__ __forceinline__ uint32_t widened(uint32_t signs, uint32_t rest)
{
	uint32_t pair;
	asm("fma.rn.bf16x2 %0, %1, %2, %3;"
	    : "=r"(pair)
	    : "r"((signs & 0x80008000u) | (rest & 0x07f007f0u)), "r"(0x7b807b80u),
	      "r"(0x80008000u));
	return pair;
}

static __device__ __forceinline__ void decode_fp8(const uint4 &codes, uint32_t *a)
{
#pragma unroll
	for (int i = 0; i < 4; i++) {
		const uint32_t word = word_of(codes, i);
		a[i * 2] = widened(word << 8, word << 4);
		a[i * 2 + 1] = widened(word, word >> 4);
	}
}

/* ---- matrix instructions -------------------------------------------------------------------- */

/* Sums of a lane over 64 x TOKENS results of its group: as mma.m16n8k16 leaves them, four for each
 * eight tokens: rows g, g, g + 8, g + 8 and tokens 2 t, 2 t + 1, 2 t, 2 t + 1. */
template <int TOKENS> struct sums {
	float at[TOKENS / 2];
};

static __device__ __forceinline__ void multiply(float *sum, const uint32_t *a, uint32_t b0,
                                                uint32_t b1)
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
	    "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
	    : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
	    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* total += sum * scale of the row. */
template <int TOKENS>
static __device__ __forceinline__ void promote(struct sums<TOKENS> *total,
                                               const struct sums<TOKENS> &sum, uint32_t absmax)
{
	const float low = float_of(absmax), high = __uint_as_float(absmax & 0xffff0000u);
#pragma unroll
	for (int i = 0; i < TOKENS / 2; i++)
		total->at[i] = __fmaf_rn(sum.at[i], i % 4 < 2 ? low : high, total->at[i]);
}

/* ---- what a block works on ------------------------------------------------------------------ */

/* Counts of tiles have 32 bits: there is no memory for 2^32 of them. */
struct job {
	uint32_t strips, strip;    /* rows of tiles of W; the first of this block           */
	uint32_t chunks;           /* tiles along k                                         */
	uint32_t first, end;       /* those of this block                                   */
	uint32_t turns;            /* groups that share a row of tiles                      */
	uint32_t group, row, turn; /* this thread's group, its row of tiles, its turn at it */
};

static __device__ __forceinline__ struct job job_of(const struct qs_product_args &args)
{
	struct job job;
	job.strips = (uint32_t)qs_shares(args.n, QS_WEIGHT_TILE);
	job.strip = blockIdx.x / args.split * args.strips;
	job.chunks = (uint32_t)(args.k / QS_WEIGHT_TILE);
	const uint32_t share = (job.chunks + args.split - 1) / args.split;
	job.first = min(blockIdx.x % args.split * share, job.chunks);
	job.end = min(job.first + share, job.chunks);
	job.turns = QS_GROUPS / args.strips;
	/* a shuffle tells the compiler that it is the same for all threads of a warp */
	job.group = __shfl_sync(FULL, threadIdx.x / 128, 0);
	job.row = job.group / job.turns;
	job.turn = job.group % job.turns;
	return job;
}

template <bool NF4>
static __device__ __forceinline__ const uint8_t *tile_at(uint64_t packed, const struct job &job,
                                                         uint32_t strip, uint32_t chunk)
{
	return (const uint8_t *)packed + ((int64_t)strip * job.chunks + chunk) *
	                                         (NF4 ? QS_NF4_TILE_BYTES : QS_FP8_TILE_BYTES);
}

/* The sampled row of a row of tiles, or NULL where W has no such row. */
static __device__ __forceinline__ const uint16_t *sampled_row(const struct qs_product_args &args,
                                                              uint32_t strip, uint32_t turn)
{
	const int64_t row = (int64_t)strip * QS_WEIGHT_TILE + turn % QS_WEIGHT_TILE;
	return row < args.n ? (const uint16_t *)args.source + row * args.ld : NULL;
}

/* ---- from W itself, and without a pipeline --------------------------------------------------- */

/* The B operand of 16 columns of X for a lane: tokens from `token` on. */
static __device__ __forceinline__ uint2 load_x(const struct qs_product_args &args, int64_t column,
                                               unsigned token, bool pairs)
{
	const unsigned lane = threadIdx.x % WARP;
	token += lane / 4;
	if (token >= args.tokens)
		return make_uint2(0, 0);
	const uint16_t *x = (const uint16_t *)args.x + token * args.ldx + column + lane % 4 * 2;
	return make_uint2(load_pair(x, pairs), load_pair(x + 8, pairs));
}

/* Adds a tile's products with TOKENS tokens from `token` on. */
template <int TOKENS>
static __device__ __forceinline__ void
multiply_tile(struct sums<TOKENS> *sum, const struct fragment &fragment,
              const struct qs_product_args &args, uint32_t chunk, unsigned token)
{
	const bool pairs = rows_aligned(args.x, args.ldx, 2);
	const int64_t column = (int64_t)chunk * QS_WEIGHT_TILE;
#pragma unroll
	for (int step = 0; step < STEPS; step++)
#pragma unroll
		for (int j = 0; j < TOKENS / 8; j++) {
			const uint2 b = load_x(args, column + step * 16, token + j * 8, pairs);
			multiply(&sum->at[j * 4], &fragment.a[step * 4], b.x, b.y);
		}
}

/* A tile's fragment from W: slow, for when the packed form is not valid. */
static __device__ __forceinline__ void load_fragment(const struct qs_product_args &args,
                                                     uint32_t strip, uint32_t chunk,
                                                     struct fragment *fragment)
{
	const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
	const bool pairs = rows_aligned(args.source, args.ld, 2);
	const int64_t row = (int64_t)strip * QS_WEIGHT_TILE + warp * QUARTER_ROWS + lane / 4;
	const uint16_t *source = (const uint16_t *)args.source + row * args.ld +
	                         (int64_t)chunk * QS_WEIGHT_TILE + lane % 4 * 2;
#pragma unroll
	for (int i = 0; i < 4 * STEPS; i++) {
		const int high = i % 2 * 8, column = i / 4 * 16 + i % 4 / 2 * 8;
		fragment->a[i] = row + high < args.n
		                         ? load_pair(source + high * args.ld + column, pairs)
		                         : 0;
	}
}

/* ---- sampling ------------------------------------------------------------------------------- */

/* What the threads of a block tell each other, in shared memory. */
struct control {
	uint64_t full[QS_STAGES_MAX], empty[QS_STAGES_MAX]; /* barriers of the pipeline          */
	float2 range[16]; /* a code is right for numbers above x and not above y             */
	uint64_t packed;  /* the tiles that are multiplied                                   */
	uint32_t known;   /* they may be read                                                */
	uint32_t valid;   /* the descriptor says that they are W's                           */
	uint32_t turn;    /* of the descriptor                                               */
	uint32_t changed; /* the source was seen to differ from them                         */
};

static_assert(sizeof(struct control) <= QS_CONTROL_BYTES, "the host allocates so many");

static __device__ __forceinline__ void fill_range(struct control *control, unsigned code)
{
	if (code < 16)
		control->range[code] =
		        make_float2(code ? __uint_as_float(qs_nf4_midpoints[code - 1]) : -2,
		                    code < 15 ? __uint_as_float(qs_nf4_midpoints[code]) : 2);
}

static __device__ __forceinline__ bool code_fits(const struct control *control, uint32_t code,
                                                 float value)
{
	const float2 range = control->range[code];
	return value > range.x && !(value > range.y);
}

/* False in some lane unless row `row` of an NF4 tile is what 64 elements of W make, of which each
 * of eight neighbouring lanes has eight: those of four pairs, whose codes are 16 bytes apart.
 * absmax is right if no magnitude is above and some is equal; zeros stand for magnitudes below the
 * least normal number. */
static __device__ __forceinline__ bool same_nf4(const struct control *control, const uint8_t *tile,
                                                unsigned row, const uint4 &chunk)
{
	const unsigned lane = threadIdx.x % WARP;
	const uint8_t *codes = tile + nf4_byte(row, lane % 8 * 4);
	const uint32_t absmax = ((const uint16_t *)(tile + QS_NF4_CODE_BYTES))[absmax_place(row)];
	const uint32_t magnitude = chunk_max(chunk);
	const uint32_t reached = __ballot_sync(FULL, magnitude == absmax) >> (lane & 24) & 0xff;
	const float inverse = reciprocal(float_of(absmax));
	bool fits = magnitude <= absmax && reached, zeros = magnitude < QS_AMAX_LEAST;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		const uint32_t byte = codes[i * 16], pair = word_of(chunk, i);
		const float first = __fmul_rn(float_of(pair), inverse);
		const float second = __fmul_rn(__uint_as_float(pair & 0xffff0000u), inverse);
		fits &= code_fits(control, byte >> 4, first);
		fits &= code_fits(control, byte & 15, second);
		zeros &= byte == 0x77;
	}
	return absmax ? fits : zeros;
}

static __device__ __forceinline__ bool same_fp8(const uint8_t *tile, unsigned row,
                                                const uint4 &chunk, float scale)
{
	const uint8_t *bytes = tile + fp8_byte(row, threadIdx.x % 8 * 4);
	const float inverse = scale_of(scale);
	bool same = true;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		const uint32_t pair = word_of(chunk, i);
		const uint32_t made = e4m3_pair(float_of(pair) * inverse,
		                                __uint_as_float(pair & 0xffff0000u) * inverse);
		same &= made == (bytes[i * 16] | (uint32_t)bytes[i * 16 + 2] << 8);
	}
	return same;
}

template <bool NF4>
static __device__ __forceinline__ bool same_row(const struct control *control, const uint8_t *tile,
                                                unsigned row, const uint4 &chunk, float scale)
{
	return NF4 ? same_nf4(control, tile, row, chunk) : same_fp8(tile, row, chunk, scale);
}

/* The work ahead in the stream has ended, and what it wrote can be read. Nothing to wait for unless
 * the launch allowed to begin before. */
static __device__ __forceinline__ void wait_for_work_ahead(void)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The descriptor as one thread of a block reads it: other launches may write to it meanwhile. */
static __device__ __forceinline__ volatile struct qs_weight *
weight_of(const struct qs_product_args &args)
{
	return (volatile struct qs_weight *)args.weight;
}

static __device__ __forceinline__ const float *scales_of(const struct qs_product_args &args)
{
	return (const float *)(args.packed ? args.scale : weight_of(args)->scale);
}

/* By one thread, before the others may use `packed`: needs no look at memory if the call gives it.
 */
static __device__ __forceinline__ void know_tiles(const struct qs_product_args &args,
                                                  struct control *control)
{
	control->packed = args.packed;
	control->known = 1;
	if (args.packed == 0) {
		control->packed = weight_of(args)->packed;
		control->known = weight_of(args)->valid;
	}
}

/* By one thread, which may be another: what need not be known before the tiles are on their way. */
static __device__ __forceinline__ void know_validity(const struct qs_product_args &args,
                                                     struct control *control)
{
	volatile struct qs_weight *weight = weight_of(args);
	const uint32_t turn = weight->turn, valid = weight->valid, nonfinite = weight->nonfinite;
	const uint64_t packed = weight->packed;
	control->turn = turn;
	control->changed = 0;
	control->valid = valid && !nonfinite && (args.packed == 0 || packed == args.packed);
}

/* When both are known to all threads. */
static __device__ __forceinline__ bool tiles_are_valid(const struct control *control)
{
	return control->known && control->valid;
}

/* By one thread of each block, when it knows `turn`. The last block to know it moves it on. */
static __device__ __forceinline__ void move_turn(const struct qs_product_args &args, uint32_t turn)
{
	struct qs_weight *weight = (struct qs_weight *)args.weight;
	__threadfence();
	if (atomicInc(&weight->readers, gridDim.x - 1) == gridDim.x - 1)
		weight_of(args)->turn = turn + 1;
}

/* By threads that saw a difference. */
static __device__ __forceinline__ void drop_weight(const struct qs_product_args &args,
                                                   struct control *control)
{
	weight_of(args)->failed = 1;
	weight_of(args)->valid = 0;
	*(volatile uint32_t *)&control->changed = 1;
}

/* For products that cuBLASLt makes from the expanded weight: see sample.h. Eight lanes compare a
 * row of a tile; all threads of a warp take part in each comparison. */
#define SAMPLE_TILES (QS_SAMPLE_THREADS / 8) /* of a block at a time */

extern "C" __global__ void __launch_bounds__(QS_SAMPLE_THREADS)
        qs_nf4_sample(const __grid_constant__ struct qs_sample_args args)
{
	__shared__ struct control control; /* its range and turn */
	struct qs_weight *weight = (struct qs_weight *)args.descriptor;
	const int64_t chunks = args.cols / QS_WEIGHT_TILE;
	const int64_t tiles = qs_weight_tiles(args.rows, args.cols);
	const bool aligned = rows_aligned(args.source, args.ld, CHUNK);
	bool same = true;
	fill_range(&control, threadIdx.x);
	if (threadIdx.x == 0)
		control.turn = *(volatile uint32_t *)&weight->turn;
	__syncthreads();
	const unsigned row_of_tile = control.turn % QS_WEIGHT_TILE;
	for (int64_t first = (int64_t)blockIdx.x * SAMPLE_TILES; first < tiles;
	     first += (int64_t)gridDim.x * SAMPLE_TILES) {
		const int64_t tile = first + threadIdx.x / 8, strip = tile / chunks;
		const int64_t row = strip * QS_WEIGHT_TILE + row_of_tile;
		const bool inside = tile < tiles && row < args.rows;
		const uint16_t *source = (const uint16_t *)args.source + row * args.ld +
		                         (tile - strip * chunks) * QS_WEIGHT_TILE +
		                         threadIdx.x % 8 * CHUNK;
		const uint8_t *packed =
		        (const uint8_t *)args.data + (inside ? tile : 0) * QS_NF4_TILE_BYTES;
		const uint4 made = inside ? load_chunk(source, aligned) : make_uint4(0, 0, 0, 0);
		const bool equal = same_nf4(&control, packed, row_of_tile, made);
		same &= equal || !inside;
	}
	if (qs_sample_judge(args, same, &weight->turn) && threadIdx.x == 0) {
		weight->failed = 1;
		weight->valid = 0;
	}
}

/* ---- results -------------------------------------------------------------------------------- */

/* What the sums of rows g and g + 8 must be multiplied with to become those of W. */
struct factors {
	float low, high;
};

/* This thread's first row among all of W's. */
static __device__ __forceinline__ int64_t output_row(const struct job &job)
{
	return ((int64_t)job.strip + job.row) * QS_WEIGHT_TILE +
	       threadIdx.x / WARP % 4 * QUARTER_ROWS + threadIdx.x % WARP / 4;
}

template <bool NF4>
static __device__ __forceinline__ struct factors factors_of(const struct qs_product_args &args,
                                                            const struct job &job)
{
	const int64_t row = output_row(job);
	struct factors factors = {QS_NF4_UNSCALE, QS_NF4_UNSCALE};
	if (!NF4) {
		const float *scales = scales_of(args);
		factors.low = row < args.n ? __ldg(scales + row) : 0;
		factors.high = row + 8 < args.n ? __ldg(scales + row + 8) : 0;
	}
	return factors;
}

/* A group's sums for TOKENS tokens from `first` on into shared memory, [token][row of the tile]. */
template <int TOKENS>
static __device__ __forceinline__ void lay_sums(const struct sums<TOKENS> &total, unsigned first,
                                                uint32_t tokens, struct factors factors,
                                                float *partial)
{
	const unsigned lane = threadIdx.x % WARP;
	const unsigned row = threadIdx.x / WARP % 4 * QUARTER_ROWS + lane / 4;
#pragma unroll
	for (int i = 0; i < TOKENS / 2; i++) {
		const unsigned token = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
		if (token < tokens)
			partial[token * QS_PARTIAL_PITCH + row + i % 4 / 2 * 8] =
			        total.at[i] * (i % 4 < 2 ? factors.low : factors.high);
	}
}

/* Tokens that are taken at a time where registers are short. */
#define PASS 16

/* A group's part from W itself, for when the tiles are not valid: slow. A function of its own so
 * that the common path keeps its registers. */
template <int TOKENS>
static __device__ __noinline__ void lay_source(const struct qs_product_args &args, float *partials)
{
	constexpr int pass = TOKENS < PASS ? TOKENS : PASS;
	const struct job job = job_of(args);
	for (unsigned token = 0; token < args.tokens; token += pass) {
		struct fragment fragment;
		sums<pass> total = {};
		for (uint32_t i = job.first + job.turn; i < job.end; i += job.turns) {
			load_fragment(args, job.strip + job.row, i, &fragment);
			multiply_tile(&total, fragment, args, i, token);
		}
		lay_sums(total, token, args.tokens, {1, 1},
		         partials + job.group * TOKENS * QS_PARTIAL_PITCH);
	}
}

static __device__ __forceinline__ float4 load_partials(uint32_t address, unsigned rank)
{
	float4 value;
#if HOPPER
	asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
	             "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}"
	             : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
	             : "r"(address), "r"(rank));
#else
	asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
	             : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
	             : "r"(address));
#endif
	return value;
}

static __device__ __forceinline__ float activated(float value, uint32_t activation)
{
	if (activation == QS_ACTIVATION_RELU)
		return fmaxf(value, 0);
	if (activation == QS_ACTIVATION_GELU)
		return 0.5f * value *
		       (1 + tanhf(0.7978845608f * (value + 0.044715f * value * value * value)));
	return value;
}

static __device__ __forceinline__ void finish(const struct qs_product_args &args, float sum,
                                              unsigned token, int64_t row)
{
	const int64_t at = token * args.ldd + row;
	const bool wide = args.flags & QS_PRODUCT_FP32;
	float *d32 = (float *)args.d + at;
	uint16_t *d16 = (uint16_t *)args.d + at;
	float value = args.alpha * sum;
	if (args.beta != 0)
		value += args.beta * (wide ? *d32 : float_of(*d16));
	if (args.bias)
		value += float_of(__ldg((const uint16_t *)args.bias + row));
	value = activated(value, args.activation);
	if (wide)
		*d32 = value;
	else
		*d16 = (uint16_t)bf16_of(value);
}

/* Partial sums of four rows, those of all groups that share a row of tiles, of all blocks of the
 * cluster: added in this order, PARTS loads at a time. */
#define PARTS 4

static __device__ __forceinline__ float4 add_parts(uint32_t address, uint32_t turns,
                                                   uint32_t turn_bytes, uint32_t split)
{
	float4 sum = {};
	for (uint32_t part = 0; part < turns * split; part += PARTS) {
		float4 value[PARTS];
#pragma unroll
		for (uint32_t i = 0; i < PARTS; i++) {
			const uint32_t p = min(part + i, turns * split - 1);
			value[i] = load_partials(address + p % turns * turn_bytes, p / turns);
		}
#pragma unroll
		for (uint32_t i = 0; i < PARTS; i++)
			if (part + i < turns * split) {
				sum.x += value[i].x;
				sum.y += value[i].y;
				sum.z += value[i].z;
				sum.w += value[i].w;
			}
	}
	return sum;
}

/* Finishes this block's share of the cluster's results, four rows a thread. */
template <int TOKENS>
static __device__ __forceinline__ void add_up(const struct qs_product_args &args,
                                              const struct job &job, uint32_t partials)
{
	const uint32_t fours = args.strips * (QS_WEIGHT_TILE / 4), rank = blockIdx.x % args.split;
	const uint32_t turn_bytes = TOKENS * QS_PARTIAL_PITCH * 4;
	for (uint32_t i = rank * blockDim.x + threadIdx.x; i < fours * args.tokens;
	     i += args.split * blockDim.x) {
		const uint32_t token = i / fours, row = i % fours * 4;
		const uint32_t group = row / QS_WEIGHT_TILE * job.turns;
		const uint32_t address = partials + group * turn_bytes +
		                         (token * QS_PARTIAL_PITCH + row % QS_WEIGHT_TILE) * 4;
		const int64_t output = (int64_t)job.strip * QS_WEIGHT_TILE + row;
		const float4 sum = add_parts(address, job.turns, turn_bytes, args.split);
		const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
		for (int j = 0; j < 4; j++)
			if (output + j < args.n)
				finish(args, sums[j], token, output + j);
	}
}

#if !HOPPER

/* ---- products elsewhere --------------------------------------------------------------------- */

/* A row of a tile against W, by a warp, of which each eight lanes do the same. */
template <bool NF4>
static __device__ __forceinline__ void sample_tile(const struct qs_product_args &args,
                                                   const struct job &job, struct control *control,
                                                   const uint8_t *tile, uint32_t chunk)
{
	const unsigned row = control->turn % QS_WEIGHT_TILE;
	const uint16_t *source = sampled_row(args, job.strip, control->turn);
	if (!source)
		return;
	source += (int64_t)chunk * QS_WEIGHT_TILE + threadIdx.x % 8 * CHUNK;
	const uint4 made = load_chunk(source, rows_aligned(args.source, args.ld, CHUNK));
	const float scale =
	        NF4 ? 0 : __ldg(scales_of(args) + (int64_t)job.strip * QS_WEIGHT_TILE + row);
	if (!same_row<NF4>(control, tile, row, made, scale))
		drop_weight(args, control);
}

/* A group's tiles for TOKENS tokens from `token` on. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply_packed(struct sums<TOKENS> *total, const struct qs_product_args &args,
                const struct job &job, unsigned token, struct control *control, struct table table)
{
	const unsigned lane = threadIdx.x % 128;
	const bool sampling = !(args.flags & QS_PRODUCT_FROZEN) && lane < WARP && token == 0;
	for (uint32_t chunk = job.first + job.turn; chunk < job.end; chunk += job.turns) {
		const uint8_t *tile = tile_at<NF4>(control->packed, job, job.strip, chunk);
		struct fragment fragment;
		if (NF4) {
			sums<TOKENS> sum = {};
			const uint32_t absmax = __ldg((const uint32_t *)(tile + QS_NF4_CODE_BYTES) +
			                              lane / WARP * 8 + lane % WARP / 4);
			decode_nf4(__ldg((const uint4 *)tile + lane), table, &fragment);
			multiply_tile(&sum, fragment, args, chunk, token);
			promote(total, sum, absmax);
		} else {
			decode_fp8(__ldg((const uint4 *)tile + lane), &fragment.a[0]);
			decode_fp8(__ldg((const uint4 *)tile + 128 + lane), &fragment.a[8]);
			multiply_tile(total, fragment, args, chunk, token);
		}
		if (sampling)
			sample_tile<NF4>(args, job, control, tile, chunk);
	}
}

template <bool NF4>
static __device__ __forceinline__ void start(const struct qs_product_args &args,
                                             struct control *control, uint8_t *table)
{
	wait_for_work_ahead();
	if (threadIdx.x == 0) {
		know_tiles(args, control);
		know_validity(args, control);
	}
	if (NF4)
		fill_table(table);
	fill_range(control, threadIdx.x);
	__syncthreads();
	if (threadIdx.x == 0 && control->known && !(args.flags & QS_PRODUCT_FROZEN))
		move_turn(args, control->turn);
}

template <int TOKENS, bool NF4>
static __device__ __forceinline__ void product(const struct qs_product_args &args)
{
	extern __shared__ __align__(1024) uint8_t shared[];
	struct control *control = (struct control *)(shared + QS_SHARED_PARTIALS);
	float *partials = (float *)shared; /* in the table's place, when it has served */
	const struct job job = job_of(args);
	constexpr int pass = TOKENS < PASS ? TOKENS : PASS;
	sums<pass> total[TOKENS / pass] = {};
	start<NF4>(args, control, shared);
	const struct factors factors = factors_of<NF4>(args, job);
#pragma unroll
	for (int i = 0; i < TOKENS / pass; i++)
		if (tiles_are_valid(control))
			multiply_packed<pass, NF4>(&total[i], args, job, i * pass, control,
			                           table_at(shared_address(shared)));
	__syncthreads();
	if (tiles_are_valid(control) && !control->changed) {
#pragma unroll
		for (int i = 0; i < TOKENS / pass; i++)
			lay_sums(total[i], i * pass, args.tokens, factors,
			         partials + job.group * TOKENS * QS_PARTIAL_PITCH);
	} else {
		lay_source<TOKENS>(args, partials);
	}
	__syncthreads();
	add_up<TOKENS>(args, job, shared_address(shared));
}

#else

/* ---- products on Hopper --------------------------------------------------------------------- */

/* A group's matrix instruction: 64 rows of W from registers, TOKENS of X from shared memory. */
static __device__ __forceinline__ void wgmma(struct sums<8> *sum, const uint32_t *a, uint64_t x,
                                             bool add)
{
	float *s = sum->at;
	asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %9, 0;\n"
	             "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
	             "%0, %1, %2, %3"
	             "}, {%4, %5, %6, %7}, %8, add, 1, 1, 0;\n}"
	             : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"((int)add));
}

static __device__ __forceinline__ void wgmma(struct sums<16> *sum, const uint32_t *a, uint64_t x,
                                             bool add)
{
	float *s = sum->at;
	asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %13, 0;\n"
	             "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
	             "%0, %1, %2, %3, %4, %5, %6, %7"
	             "}, {%8, %9, %10, %11}, %12, add, 1, 1, 0;\n}"
	             : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]),
	               "+f"(s[6]), "+f"(s[7])
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"((int)add));
}

static __device__ __forceinline__ void wgmma(struct sums<32> *sum, const uint32_t *a, uint64_t x,
                                             bool add)
{
	float *s = sum->at;
	asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"
	             "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
	             "%0, %1, %2, %3, %4, %5, %6, %7, "
	             "%8, %9, %10, %11, %12, %13, %14, %15"
	             "}, {%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}"
	             : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]),
	               "+f"(s[6]), "+f"(s[7]), "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]),
	               "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15])
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"((int)add));
}

/* The part of a matrix descriptor that says where X is, which can be added to in units of 16 bytes.
 * X of 64 columns has rows of 128 bytes, their chunks of 16 swizzled by the row; groups of eight
 * rows are 1024 bytes apart. */
static __device__ __forceinline__ uint32_t x_place(uint32_t address)
{
	return 1u << 16 | (address & 0x3ffff) / 16;
}

static __device__ __forceinline__ uint64_t x_descriptor(uint32_t place)
{
	return (uint64_t)(1u << 30 | 1024 / 16) << 32 | place;
}

/* The sums belong to the matrix unit from begin to end. */
template <int TOKENS>
static __device__ __forceinline__ void
multiply_begin(struct sums<TOKENS> *sum, const struct fragment &fragment, uint32_t x, bool add)
{
	asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
	for (int step = 0; step < STEPS; step++)
		wgmma(sum, &fragment.a[step * 4], x_descriptor(x + step * 2), add || step > 0);
	asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int TOKENS> static __device__ __forceinline__ void multiply_end(struct sums<TOKENS> *sum)
{
	asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
	for (int i = 0; i < TOKENS / 2; i++)
		asm volatile("" : "+f"(sum->at[i])::"memory");
}

/* ---- barriers, copies ----------------------------------------------------------------------- */

static __device__ __forceinline__ void barrier_init(uint64_t *barrier, unsigned count)
{
	asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)),
	             "r"(count));
}

static __device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
	asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier))
	             : "memory");
}

static __device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
	asm volatile(
	        "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
	        "r"(bytes)
	        : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity)
{
	asm volatile("{\n.reg .pred done;\n"
	             "again:\n"
	             "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
	             "@!done bra again;\n}" ::"r"(shared_address(barrier)),
	             "r"(parity)
	             : "memory");
}

/* Bytes that are read once: the L2 cache need not keep them. */
static __device__ __forceinline__ void bulk_copy(void *to, const void *from, uint32_t bytes,
                                                 uint64_t *barrier)
{
	asm volatile(
	        "{\n.reg .b64 policy;\n"
	        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
	        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
	        "[%0], [%1], %2, [%3], policy;\n}" ::"r"(shared_address(to)),
	        "l"(from), "r"(bytes), "r"(shared_address(barrier))
	        : "memory");
}

static __device__ __forceinline__ void copy_16(uint32_t to, const void *from)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* The barrier counts this thread in when all its copies so far have arrived. */
static __device__ __forceinline__ void arrive_with_copies(uint64_t *barrier)
{
	asm volatile(
	        "cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
	        : "memory");
}

static __device__ __forceinline__ void store_16(uint32_t to, const uint4 &value)
{
	asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x),
	             "r"(value.y), "r"(value.z), "r"(value.w)
	             : "memory");
}

static __device__ __forceinline__ void copies_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for all groups of copies but the last PENDING. */
template <int PENDING> static __device__ __forceinline__ void copies_wait(void)
{
	asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* What is known to have been written by stores and copies of 16 bytes is read by wgmma next. */
static __device__ __forceinline__ void proxy_fence(void)
{
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* All that the cluster's threads wrote before can be read after. */
static __device__ __forceinline__ void cluster_sync(void)
{
	asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/* All threads of the cluster are here: what they read has been read. Does not wait for what they
 * wrote. */
static __device__ __forceinline__ void cluster_meet(void)
{
	asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

/* The next launch may begin, if it is one that waits itself. */
static __device__ __forceinline__ void let_next_begin(void)
{
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- pipeline ------------------------------------------------------------------------------- */

/* A stage holds X of the columns of a step, a tile's columns after the other, then a tile for each
 * group. A step is one tile of each group that still has one. */
template <int TOKENS, bool NF4> struct pipeline {
	static constexpr uint32_t tile_bytes = NF4 ? QS_NF4_TILE_BYTES : QS_FP8_TILE_BYTES;
	static constexpr uint32_t x_bytes = TOKENS * QS_WEIGHT_TILE * 2;
	uint8_t *shared;
	struct control *control;
	uint32_t stages, stage_bytes, tiles_at; /* tiles_at: within a stage */
	uint32_t steps;

	__device__ __forceinline__ uint8_t *x(uint32_t slot, uint32_t turn) const
	{
		return shared + slot * stage_bytes + turn * x_bytes;
	}
	__device__ __forceinline__ uint8_t *tile(uint32_t slot, uint32_t group) const
	{
		return shared + slot * stage_bytes + tiles_at + group * tile_bytes;
	}
	__device__ __forceinline__ uint8_t *table() const
	{
		return (uint8_t *)control + QS_CONTROL_BYTES;
	}
	__device__ __forceinline__ uint4 *rows() const
	{
		return (uint4 *)(table() + QS_TABLE_BYTES);
	}
};

template <int TOKENS, bool NF4>
static __device__ __forceinline__ struct pipeline<TOKENS, NF4>
pipeline_of(const struct qs_product_args &args, const struct job &job, uint8_t *shared) {
	struct pipeline<TOKENS, NF4> pipe;
	const uint32_t base = shared_address(shared), end = base + QS_HOPPER_PIPELINE;
	const uint32_t table =
	        (end + QS_CONTROL_BYTES + QS_TABLE_BYTES - 1) & ~(QS_TABLE_BYTES - 1u);
	pipe.shared = shared;
	pipe.control = (struct control *)(shared + (table - base) - QS_CONTROL_BYTES);
	pipe.stages = args.stages;
	pipe.stage_bytes = (uint32_t)qs_stage_bytes(pipe.tile_bytes, args.strips, TOKENS);
	pipe.tiles_at = job.turns * pipe.x_bytes;
	pipe.steps = (job.end - job.first + job.turns - 1) / job.turns;
	return pipe;
}

/* A walk through the slots of the pipeline. */
struct slot {
	uint32_t at, parity;
};

static __device__ __forceinline__ void slot_on(struct slot *slot, uint32_t stages)
{
	if (++slot->at == stages) {
		slot->at = 0;
		slot->parity ^= 1;
	}
}

/* One thread: tiles of steps `from` to `to`; from is 0, or the number of stages. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void feed_tiles(const struct job &job,
                                                  const struct pipeline<TOKENS, NF4> &pipe,
                                                  uint32_t from, uint32_t to)
{
	const uint32_t rows = min(QS_GROUPS / job.turns, job.strips - job.strip);
	struct slot slot = {0, from == 0};
	for (uint32_t i = from; i < to; i++, slot_on(&slot, pipe.stages)) {
		const uint32_t chunk = job.first + i * job.turns;
		const uint32_t bytes = min(job.turns, job.end - chunk) * pipe.tile_bytes;
		uint64_t *full = &pipe.control->full[slot.at];
		barrier_wait(&pipe.control->empty[slot.at], slot.parity);
		barrier_expect(full, bytes * rows);
#pragma unroll 1
		for (uint32_t r = 0; r < rows; r++)
			bulk_copy(pipe.tile(slot.at, r * job.turns),
			          tile_at<NF4>(pipe.control->packed, job, job.strip + r, chunk),
			          bytes, full);
	}
}

/* Warps that copy X, and then the one that samples. */
#define WARP_TILES  (QS_MULTIPLIERS / WARP)
#define WARP_X      (WARP_TILES + 1)
#define X_WARPS     2
#define WARP_SAMPLE (WARP_X + X_WARPS)

static_assert((WARP_SAMPLE + 1) * WARP == QS_HOPPER_THREADS, "the host launches so many");

/* A lane's share of X: 16 bytes of every eighth token. */
struct x_share {
	const uint16_t *source; /* of its first token and the block's first columns */
	uint32_t place;         /* of its first token in the X of a tile's columns  */
	uint32_t count;         /* tokens                                           */
	bool aligned;           /* rows start at multiples of 16 bytes              */
};

static __device__ __forceinline__ struct x_share x_share_of(const struct qs_product_args &args,
                                                            const struct job &job)
{
	const uint32_t lane = threadIdx.x - WARP_X * WARP, token = lane / 8, chunk = lane % 8;
	struct x_share share;
	share.source = (const uint16_t *)args.x + token * args.ldx +
	               (int64_t)job.first * QS_WEIGHT_TILE + chunk * CHUNK;
	share.place = token * 128 + (chunk ^ token) * 16;
	share.count = args.tokens > token ? (args.tokens - token + 7) / 8 : 0;
	share.aligned = rows_aligned(args.x, args.ldx, CHUNK);
	return share;
}

/* X of a step into its slot. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void copy_x(const struct x_share &share, const struct job &job,
                                              const struct pipeline<TOKENS, NF4> &pipe,
                                              uint32_t step, uint32_t slot, int64_t ldx)
{
	const uint32_t tile = step * job.turns, tiles = job.end - job.first - tile;
	const uint16_t *source = share.source + (int64_t)tile * QS_WEIGHT_TILE;
	uint32_t to = shared_address(pipe.x(slot, 0)) + share.place;
#pragma unroll 1
	for (uint32_t turn = 0; turn < min(job.turns, tiles); turn++) {
		const uint16_t *from = source;
#pragma unroll
		for (uint32_t i = 0; i < TOKENS / 8; i++, from += 8 * ldx)
			if (i < share.count && share.aligned)
				copy_16(to + i * 1024, from);
			else if (i < share.count)
				store_16(to + i * 1024, load_unaligned(from));
		source += QS_WEIGHT_TILE;
		to += pipe.x_bytes;
	}
}

static __device__ __forceinline__ void report_x(const struct x_share &share, uint64_t *full)
{
	if (share.aligned)
		arrive_with_copies(full);
	else
		barrier_arrive(full);
}

/* By the warps for X, before the barriers can be used: the first steps. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void start_x(const struct qs_product_args &args,
                                               const struct job &job,
                                               const struct pipeline<TOKENS, NF4> &pipe)
{
	const struct x_share share = x_share_of(args, job);
	wait_for_work_ahead();
	for (uint32_t i = 0; i < min(pipe.stages, pipe.steps); i++)
		copy_x(share, job, pipe, i, i, args.ldx);
}

/* And then: reports these, and copies the others. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void feed_x(const struct qs_product_args &args,
                                              const struct job &job,
                                              const struct pipeline<TOKENS, NF4> &pipe)
{
	const struct x_share share = x_share_of(args, job);
	struct slot slot = {0, 0};
	for (uint32_t i = 0; i < min(pipe.stages, pipe.steps); i++)
		report_x(share, &pipe.control->full[i]);
	for (uint32_t i = pipe.stages; i < pipe.steps; i++, slot_on(&slot, pipe.stages)) {
		barrier_wait(&pipe.control->empty[slot.at], slot.parity);
		copy_x(share, job, pipe, i, slot.at, args.ldx);
		report_x(share, &pipe.control->full[slot.at]);
	}
}

/* The rows of X beyond the last token are zero in every slot, and stay so. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void clear_x(const struct qs_product_args &args,
                                               const struct job &job,
                                               const struct pipeline<TOKENS, NF4> &pipe)
{
	const uint32_t chunks = (TOKENS - args.tokens) * 8;
	for (uint32_t slot = 0; slot < pipe.stages && chunks; slot++)
		for (uint32_t turn = 0; turn < job.turns; turn++)
			for (uint32_t i = threadIdx.x; i < chunks; i += blockDim.x)
				((uint4 *)(pipe.x(slot, turn) + args.tokens * 128))[i] =
				        make_uint4(0, 0, 0, 0);
}

/* ---- sampling on Hopper --------------------------------------------------------------------- */

/* A lane's share of the sampled rows: eight elements of the row of the group lane / 8. */
struct sampled {
	const uint16_t *source; /* of the group's first tile, or NULL: no such row */
	uint32_t group, turn;   /* of the group                                    */
	float scale;            /* fp8: of the row                                 */
	bool aligned;           /* rows of W start at multiples of 16 bytes        */
};

template <bool NF4>
static __device__ __forceinline__ struct sampled sampled_of(const struct qs_product_args &args,
                                                            const struct job &job, uint32_t turn)
{
	const uint32_t lane = threadIdx.x % WARP, group = lane / 8;
	const uint32_t strip = job.strip + group / job.turns;
	struct sampled sampled = {sampled_row(args, strip, turn), group, group % job.turns, 1};
	sampled.aligned = rows_aligned(args.source, args.ld, CHUNK);
	if (sampled.source && !NF4)
		sampled.scale = __ldg(scales_of(args) + (int64_t)strip * QS_WEIGHT_TILE +
		                      turn % QS_WEIGHT_TILE);
	if (sampled.source)
		sampled.source +=
		        ((int64_t)job.first + sampled.turn) * QS_WEIGHT_TILE + lane % 8 * CHUNK;
	return sampled;
}

static __device__ __forceinline__ bool has_sample(const struct sampled &sampled,
                                                  const struct job &job, uint32_t step)
{
	return sampled.source && job.first + step * job.turns + sampled.turn < job.end;
}

/* W's part of a step into a place that only this lane reads. */
static __device__ __forceinline__ void copy_sample(const struct sampled &sampled,
                                                   const struct job &job, uint32_t step, uint4 *to)
{
	const uint16_t *from = sampled.source + (int64_t)(step * job.turns) * QS_WEIGHT_TILE;
	if (has_sample(sampled, job, step) && sampled.aligned)
		copy_16(shared_address(to), from);
	else if (has_sample(sampled, job, step))
		*to = load_unaligned(from);
	copies_commit();
}

/* A warp: learns what is to be known of the weight, then compares a row of each tile of every step,
 * W's copies going some steps ahead. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void sample(const struct qs_product_args &args,
                                              const struct job &job,
                                              const struct pipeline<TOKENS, NF4> &pipe)
{
	const uint32_t lane = threadIdx.x % WARP;
	uint4 *rows = pipe.rows() + lane;
	struct slot slot = {0, 0};
	bool same = true;
	if (lane == 0)
		know_validity(args, pipe.control);
	__syncwarp();
	if (args.flags & QS_PRODUCT_FROZEN)
		return;
	const uint32_t turn = pipe.control->turn, row = turn % QS_WEIGHT_TILE;
	const struct sampled sampled = sampled_of<NF4>(args, job, turn);
	for (uint32_t i = 0; i < QS_SAMPLE_STEPS - 1; i++)
		copy_sample(sampled, job, i, rows + i * WARP);
	if (lane == 0)
		move_turn(args, turn);
	for (uint32_t i = 0; i < pipe.steps; i++, slot_on(&slot, pipe.stages)) {
		const uint32_t ahead = i + QS_SAMPLE_STEPS - 1;
		copy_sample(sampled, job, ahead, rows + ahead % QS_SAMPLE_STEPS * WARP);
		copies_wait<QS_SAMPLE_STEPS - 1>();
		barrier_wait(&pipe.control->full[slot.at], slot.parity);
		const bool equal =
		        same_row<NF4>(pipe.control, pipe.tile(slot.at, sampled.group), row,
		                      rows[i % QS_SAMPLE_STEPS * WARP], sampled.scale);
		same &= equal || !has_sample(sampled, job, i);
		__syncwarp();
		if (lane == 0)
			barrier_arrive(&pipe.control->empty[slot.at]);
	}
	if (!same)
		drop_weight(args, pipe.control);
}

/* ---- a block on Hopper ---------------------------------------------------------------------- */

/* One tile as a group takes it from the pipeline: decoded, and what its sums must be scaled by. */
struct decoded {
	struct fragment fragment;
	uint32_t absmax; /* NF4: of rows g and g + 8 */
	uint32_t x;      /* see x_place              */
};

/* Where a thread of a group finds its part of a step. Kept as addresses, which move from slot to
 * slot: this is the loop that must keep up with memory. */
struct reader {
	const uint8_t *codes;  /* the lane's 16 bytes of the tile */
	const uint8_t *absmax; /* NF4: of rows g and g + 8        */
	uint64_t *full;        /* barrier of the slot             */
	uint32_t parity;       /* of its next phase               */
	uint32_t x;            /* see x_place                     */
};

template <int TOKENS, bool NF4>
static __device__ __forceinline__ struct reader reader_of(const struct job &job,
                                                          const struct pipeline<TOKENS, NF4> &pipe)
{
	const unsigned lane = threadIdx.x % 128;
	const uint8_t *tile = pipe.tile(0, job.group);
	struct reader reader = {tile + lane * 16};
	reader.absmax = tile + QS_NF4_CODE_BYTES + (lane / WARP * 8 + lane % WARP / 4) * 4;
	reader.full = pipe.control->full;
	reader.x = x_place(shared_address(pipe.x(0, job.turn)));
	return reader;
}

template <int TOKENS, bool NF4>
static __device__ __forceinline__ void read_on(struct reader *reader,
                                               const struct pipeline<TOKENS, NF4> &pipe)
{
	int32_t bytes = (int32_t)pipe.stage_bytes;
	if (++reader->full == pipe.control->full + pipe.stages) {
		bytes -= (int32_t)(pipe.stages * pipe.stage_bytes);
		reader->full = pipe.control->full;
		reader->parity ^= 1;
	}
	reader->codes += bytes;
	reader->absmax += bytes;
	reader->x += (uint32_t)(bytes / 16);
}

template <bool NF4>
static __device__ __forceinline__ void take_tile(const struct reader &reader, struct table table,
                                                 struct decoded *decoded)
{
	barrier_wait(reader.full, reader.parity);
	proxy_fence();
	decoded->x = reader.x;
	if (NF4) {
		decoded->absmax = *(const uint32_t *)reader.absmax;
		decode_nf4(*(const uint4 *)reader.codes, table, &decoded->fragment);
	} else {
		decode_fp8(((const uint4 *)reader.codes)[0], &decoded->fragment.a[0]);
		decode_fp8(((const uint4 *)reader.codes)[128], &decoded->fragment.a[8]);
	}
}

/* The steps in which a group has a tile. */
static __device__ __forceinline__ uint32_t steps_of(const struct job &job)
{
	const uint32_t tiles = job.end - min(job.end, job.first + job.turn);
	return job.strip + job.row < job.strips ? (tiles + job.turns - 1) / job.turns : 0;
}

/* Tokens of a matrix instruction: more would take too many registers. */
template <int TOKENS> struct spans {
	static constexpr int tokens = TOKENS < 32 ? TOKENS : 32;
	static constexpr int count = TOKENS / tokens;
	struct sums<tokens> of[count];
};

/* Of a slot, by its full barrier: the empty one lies as far behind it in all slots. */
static __device__ __forceinline__ void let_go(uint64_t *full)
{
	if (threadIdx.x % WARP == 0)
		barrier_arrive(full + QS_STAGES_MAX);
}

static_assert(offsetof(struct control, empty) ==
                      offsetof(struct control, full) + QS_STAGES_MAX * sizeof(uint64_t),
              "empty follows full");

/* A group's tile, and, while the matrix instructions run, the decoding of the next one if there are
 * more. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply_ahead(struct spans<TOKENS> *total, struct table table, const struct decoded &decoded,
               const struct reader &next, struct decoded *then, bool more)
{
	constexpr int tokens = spans<TOKENS>::tokens, count = spans<TOKENS>::count;
	struct sums<tokens> sum;
#pragma unroll
	for (int s = 0; s < count; s++)
		multiply_begin(NF4 ? &sum : &total->of[s], decoded.fragment,
		               decoded.x + s * tokens * 8, !NF4);
	if (more)
		take_tile<NF4>(next, table, then);
#pragma unroll
	for (int s = 0; s < count; s++)
		multiply_end(NF4 ? &sum : &total->of[s]);
	if (NF4)
		promote(&total->of[0], sum, decoded.absmax);
}

/* A group: its first `mine` steps. Leaves the reader at the next. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply_tiles(struct spans<TOKENS> *total, const struct pipeline<TOKENS, NF4> &pipe,
               struct table table, struct reader *next, uint32_t mine)
{
	struct decoded decoded[2];
	if (mine)
		take_tile<NF4>(*next, table, &decoded[0]);
	for (uint32_t i = 0; i < mine; i += 2) {
#pragma unroll
		for (uint32_t j = 0; j < 2; j++) {
			uint64_t *held = next->full;
			if (i + j >= mine)
				break;
			read_on(next, pipe);
			multiply_ahead<TOKENS, NF4>(total, table, decoded[j], *next,
			                            &decoded[j ^ 1], i + j + 1 < mine);
			let_go(held);
		}
	}
}

/* The same without registers for two tiles: one after the other, in spans of tokens. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply_spans(struct spans<TOKENS> *total, const struct pipeline<TOKENS, NF4> &pipe,
               struct table table, struct reader *reader, uint32_t mine)
{
	constexpr int tokens = spans<TOKENS>::tokens, count = spans<TOKENS>::count;
	for (uint32_t i = 0; i < mine; i++, read_on(reader, pipe)) {
		struct decoded decoded;
		take_tile<NF4>(*reader, table, &decoded);
#pragma unroll
		for (int s = 0; s < count; s++) {
			struct sums<tokens> sum;
			multiply_begin(&sum, decoded.fragment, decoded.x + s * tokens * 8, false);
			multiply_end(&sum);
			promote(&total->of[s], sum, decoded.absmax);
		}
		let_go(reader->full);
	}
}

/* A group: its tile of every step; at the end it may have none and only lets go of the stage. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply_packed(struct spans<TOKENS> *total, const struct job &job,
                const struct pipeline<TOKENS, NF4> &pipe, struct table table)
{
	constexpr bool ahead = !NF4 || spans<TOKENS>::count == 1;
	const uint32_t mine = steps_of(job);
	struct reader reader = reader_of(job, pipe);
	if constexpr (ahead)
		multiply_tiles(total, pipe, table, &reader, mine);
	else
		multiply_spans(total, pipe, table, &reader, mine);
	for (uint32_t i = mine; i < pipe.steps; i++, read_on(&reader, pipe)) {
		barrier_wait(reader.full, reader.parity);
		let_go(reader.full);
	}
}

/* By the first thread of WARP_TILES, while others fill the table: the first tiles are under way
 * before all threads know of it. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void start_tiles(const struct qs_product_args &args,
                                                   const struct job &job,
                                                   const struct pipeline<TOKENS, NF4> &pipe)
{
	const bool sampling = !(args.flags & QS_PRODUCT_FROZEN);
	for (uint32_t i = 0; i < pipe.stages; i++) {
		barrier_init(&pipe.control->full[i], 1 + X_WARPS * WARP);
		barrier_init(&pipe.control->empty[i], QS_MULTIPLIERS / WARP + sampling);
	}
	asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
	if (!(args.flags & QS_PRODUCT_EARLY) || args.packed == 0)
		wait_for_work_ahead();
	know_tiles(args, pipe.control);
	if (pipe.control->known)
		feed_tiles(job, pipe, 0, min(pipe.stages, pipe.steps));
}

/* The groups: sums of tiles, or of W itself where these turn out not to be W's. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void multiply(const struct qs_product_args &args,
                                                const struct job &job,
                                                const struct pipeline<TOKENS, NF4> &pipe)
{
	const struct factors factors = factors_of<NF4>(args, job);
	float *partials = (float *)pipe.shared;
	spans<TOKENS> total = {};
	if (pipe.control->known)
		multiply_packed(&total, job, pipe, table_at(shared_address(pipe.table())));
	__syncthreads();
	if (tiles_are_valid(pipe.control) && !pipe.control->changed) {
#pragma unroll
		for (int s = 0; s < total.count; s++)
			lay_sums(total.of[s], s * total.tokens, args.tokens, factors,
			         partials + job.group * TOKENS * QS_PARTIAL_PITCH);
	} else {
		lay_source<TOKENS>(args, partials);
	}
}

/* The other warps. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void help(const struct qs_product_args &args,
                                            const struct job &job,
                                            const struct pipeline<TOKENS, NF4> &pipe)
{
	const uint32_t warp = threadIdx.x / WARP;
	if (!pipe.control->known) {
		copies_wait<0>(); /* of X, into what is used for sums next */
		return;
	}
	if (threadIdx.x == WARP_TILES * WARP)
		feed_tiles(job, pipe, pipe.stages, pipe.steps);
	else if (warp >= WARP_X && warp < WARP_SAMPLE)
		feed_x(args, job, pipe);
	else if (warp == WARP_SAMPLE)
		sample(args, job, pipe);
}

/* Everything that does not need the tiles, while the first of them are on their way. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void start(const struct qs_product_args &args,
                                             const struct job &job,
                                             const struct pipeline<TOKENS, NF4> &pipe)
{
	const uint32_t warp = threadIdx.x / WARP;
	if (threadIdx.x == WARP_TILES * WARP)
		start_tiles(args, job, pipe);
	clear_x(args, job, pipe);
	if (warp >= WARP_X && warp < WARP_SAMPLE)
		start_x(args, job, pipe);
	if (warp == WARP_SAMPLE)
		fill_range(pipe.control, threadIdx.x % WARP);
	if (NF4)
		fill_table(pipe.table());
	wait_for_work_ahead();
	__syncthreads();
	let_next_begin();
}

template <int TOKENS, bool NF4>
static __device__ __forceinline__ void product(const struct qs_product_args &args)
{
	extern __shared__ __align__(1024) uint8_t shared[];
	const struct job job = job_of(args);
	const struct pipeline<TOKENS, NF4> pipe = pipeline_of<TOKENS, NF4>(args, job, shared);
	start(args, job, pipe);
	if (threadIdx.x < QS_MULTIPLIERS) {
		multiply(args, job, pipe);
	} else {
		help(args, job, pipe);
		__syncthreads(); /* that of the groups in multiply() */
	}
	if (args.split > 1)
		cluster_sync();
	else
		__syncthreads();
	add_up<TOKENS>(args, job, shared_address(shared));
	if (args.split > 1) /* others read this block's memory */
		cluster_meet();
}

#endif

/* ---- kernels of products -------------------------------------------------------------------- */

#if HOPPER
#define PRODUCT_BOUNDS __launch_bounds__(QS_HOPPER_THREADS, 1)
#else
#define PRODUCT_BOUNDS __launch_bounds__(QS_MULTIPLIERS, 1)
#endif

extern "C" __global__ void PRODUCT_BOUNDS
qs_w4a16_8(const __grid_constant__ struct qs_product_args args)
{
	product<8, true>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w4a16_16(const __grid_constant__ struct qs_product_args args)
{
	product<16, true>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w4a16_32(const __grid_constant__ struct qs_product_args args)
{
	product<32, true>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w4a16_64(const __grid_constant__ struct qs_product_args args)
{
	product<64, true>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w8a16_8(const __grid_constant__ struct qs_product_args args)
{
	product<8, false>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w8a16_16(const __grid_constant__ struct qs_product_args args)
{
	product<16, false>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w8a16_32(const __grid_constant__ struct qs_product_args args)
{
	product<32, false>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w8a16_64(const __grid_constant__ struct qs_product_args args)
{
	product<64, false>(args);
}
