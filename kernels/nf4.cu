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
 * On Hopper each thread copies its own part of the tiles some steps ahead, and reads it back from a
 * place that no other thread uses. Four more warps help: two copy X into the swizzled form that
 * wgmma reads, two compare the sampled rows of W. Issuing instructions and the start and end of the
 * kernel take longer than the memory. Elsewhere the groups load from memory themselves and use
 * mma.sync: right, not tuned.
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
	uint32_t block = blockIdx.x;
	/* hides from the compiler that it is the same at every call: a job that is asked for again
	 * need not be kept in registers meanwhile */
	asm volatile("" : "+r"(block));
	job.strips = (uint32_t)qs_shares(args.n, QS_WEIGHT_TILE);
	job.strip = block / args.split * args.strips;
	job.chunks = (uint32_t)(args.k / QS_WEIGHT_TILE);
	const uint32_t share = (job.chunks + args.split - 1) / args.split;
	job.first = min(block % args.split * share, job.chunks);
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
	uint64_t full[QS_SLOTS], empty[QS_SLOTS]; /* barriers of the pipeline            */
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

/* What a tile keeps of a row: 16 bytes of each of four lanes, in fp8 those of both halves of the
 * tile. */
struct kept {
	const uint8_t *codes;
	uint32_t half;   /* fp8: distance of the halves */
	uint32_t absmax; /* NF4 */
	float scale;     /* fp8 */
};

static __device__ __forceinline__ struct kept kept_nf4(const uint8_t *tile, unsigned row)
{
	const uint16_t *absmax = (const uint16_t *)(tile + QS_NF4_CODE_BYTES);
	struct kept kept = {tile + tile_lane(row, 0) * 16};
	kept.absmax = absmax[absmax_place(row)];
	return kept;
}

/* False in some lane unless an NF4 tile keeps of row `row` what 64 elements of W make, of which
 * each of eight neighbouring lanes has eight: those of four pairs, whose codes are 16 bytes apart.
 * absmax is right if no magnitude is above and some is equal; zeros stand for magnitudes below the
 * least normal number. */
static __device__ __forceinline__ bool
same_nf4(const struct control *control, const struct kept &kept, unsigned row, const uint4 &chunk)
{
	const unsigned lane = threadIdx.x % WARP;
	const uint8_t *codes = kept.codes + lane % 8 * 2 + row % QUARTER_ROWS / 8;
	const uint32_t magnitude = chunk_max(chunk);
	const uint32_t reached = __ballot_sync(FULL, magnitude == kept.absmax) >> (lane & 24);
	const float inverse = reciprocal(float_of(kept.absmax));
	bool fits = magnitude <= kept.absmax && (reached & 0xff);
	bool zeros = magnitude < QS_AMAX_LEAST;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		const uint32_t byte = codes[i * 16], pair = word_of(chunk, i);
		const float first = __fmul_rn(float_of(pair), inverse);
		const float second = __fmul_rn(__uint_as_float(pair & 0xffff0000u), inverse);
		fits &= code_fits(control, byte >> 4, first);
		fits &= code_fits(control, byte & 15, second);
		zeros &= byte == 0x77;
	}
	return kept.absmax ? fits : zeros;
}

static __device__ __forceinline__ bool same_fp8(const struct kept &kept, unsigned row,
                                                const uint4 &chunk)
{
	const unsigned l8 = threadIdx.x % 8;
	const uint8_t *bytes =
	        kept.codes + l8 / 4 * kept.half + l8 % 4 * 4 + row % QUARTER_ROWS / 8;
	const float inverse = scale_of(kept.scale);
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
static __device__ __forceinline__ bool
same_row(const struct control *control, const struct kept &kept, unsigned row, const uint4 &chunk)
{
	return NF4 ? same_nf4(control, kept, row, chunk) : same_fp8(kept, row, chunk);
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
		const bool equal =
		        same_nf4(&control, kept_nf4(packed, row_of_tile), row_of_tile, made);
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

static __device__ __forceinline__ struct kept kept_fp8(const uint8_t *tile, unsigned row,
                                                       float scale)
{
	struct kept kept = {tile + tile_lane(row, 0) * 16, QS_FP8_TILE_BYTES / 2};
	kept.scale = scale;
	return kept;
}

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
	struct kept kept;
	if constexpr (NF4)
		kept = kept_nf4(tile, row);
	else
		kept = kept_fp8(tile, row,
		                __ldg(scales_of(args) + (int64_t)job.strip * QS_WEIGHT_TILE + row));
	if (!same_row<NF4>(control, kept, row, made))
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
	if (threadIdx.x == 0 && !(args.flags & QS_PRODUCT_FROZEN))
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

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
	asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
	asm volatile("{\n.reg .pred done;\n"
	             "again:\n"
	             "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
	             "@!done bra again;\n}" ::"r"(barrier),
	             "r"(parity)
	             : "memory");
}

static __device__ __forceinline__ void copy_16(uint32_t to, const void *from)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void copy_4(uint32_t to, const void *from)
{
	asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ uint4 load_16(uint32_t from)
{
	uint4 value;
	asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
	             : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
	             : "r"(from)
	             : "memory");
	return value;
}

static __device__ __forceinline__ uint32_t load_4(uint32_t from)
{
	uint32_t value;
	asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
	return value;
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

/* ---- tiles on their way --------------------------------------------------------------------- */

/* The steps in which a group has a tile. */
static __device__ __forceinline__ uint32_t steps_of(const struct job &job)
{
	const uint32_t tiles = job.end - min(job.end, job.first + job.turn);
	return job.strip + job.row < job.strips ? (tiles + job.turns - 1) / job.turns : 0;
}

/* Where a thread finds its part of the tiles of its group. It copies them some steps ahead, each
 * part into a slot of shared memory that only this thread reads: nobody else need be waited for. */
struct stream {
	const uint8_t *codes; /* of the next tile to copy                                   */
	int32_t absmax;       /* NF4: from there to the scales of the thread's rows         */
	uint32_t stride;      /* bytes from there to the next tile of the group             */
	uint32_t left;        /* tiles to copy                                              */
	uint32_t slot;        /* shared address of the codes to take next, then to copy     */
};

/* Of a slot of all threads. Slots make a ring of QS_RING_BYTES that ends where the table begins. */
template <bool NF4> static constexpr uint32_t slot_bytes = QS_MULTIPLIERS *(NF4 ? 16 : 32);
template <int TOKENS, bool NF4>
static constexpr uint32_t slots_ahead = QS_RING_BYTES(TOKENS) / slot_bytes<NF4>;

template <int TOKENS, bool NF4>
static __device__ __forceinline__ struct stream stream_of(const struct job &job, uint64_t packed,
                                                          uint32_t table)
{
	const int32_t lane = threadIdx.x % 128;
	const uint8_t *tile = tile_at<NF4>(packed, job, job.strip + job.row, job.first + job.turn);
	struct stream stream = {tile + lane * 16};
	stream.absmax = QS_NF4_CODE_BYTES + (lane / WARP * 8 + lane % WARP / 4) * 4 - lane * 16;
	stream.stride = job.turns * (NF4 ? QS_NF4_TILE_BYTES : QS_FP8_TILE_BYTES);
	stream.left = steps_of(job);
	stream.slot = table - QS_RING_BYTES(TOKENS) + threadIdx.x * 16;
	return stream;
}

/* The thread's two scales in NF4 are kept behind the table. */
template <int TOKENS>
static __device__ __forceinline__ uint32_t absmax_slot(uint32_t slot, uint32_t table)
{
	return table + QS_TABLE_BYTES + slot % QS_RING_BYTES(TOKENS) / 4;
}

/* Copies the next tile's part into the stream's slot, and goes to the next slot. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void copy_part(struct stream *stream, uint32_t table)
{
	constexpr uint32_t ring = QS_RING_BYTES(TOKENS);
	if (stream->left) {
		copy_16(stream->slot, stream->codes);
		if (NF4)
			copy_4(absmax_slot<TOKENS>(stream->slot, table),
			       stream->codes + stream->absmax);
		else
			copy_16(stream->slot + slot_bytes<NF4> / 2,
			        stream->codes + QS_FP8_TILE_BYTES / 2);
		stream->codes += stream->stride;
		stream->left--;
	}
	copies_commit();
	/* table is a multiple of the ring's size */
	stream->slot = (stream->slot + slot_bytes<NF4>) % ring + table - ring;
}

template <int TOKENS, bool NF4>
static __device__ __forceinline__ void copy_first(struct stream *stream, uint32_t table)
{
	for (uint32_t i = 0; i < slots_ahead<TOKENS, NF4>; i++)
		copy_part<TOKENS, NF4>(stream, table);
}

/* A tile as it is multiplied: decoded, and what its sums must be scaled by. */
struct decoded {
	struct fragment fragment;
	uint32_t absmax; /* NF4: of rows g and g + 8 */
};

/* Takes a tile's part out of its slot, into which the next is copied. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void take_part(struct stream *stream, struct table table,
                                                 uint32_t table_address, struct decoded *decoded)
{
	copies_wait<slots_ahead<TOKENS, NF4> - 1>();
	const uint4 codes = load_16(stream->slot);
	if constexpr (NF4) {
		decoded->absmax = load_4(absmax_slot<TOKENS>(stream->slot, table_address));
		decode_nf4(codes, table, &decoded->fragment);
	} else {
		decode_fp8(codes, &decoded->fragment.a[0]);
		decode_fp8(load_16(stream->slot + slot_bytes<NF4> / 2), &decoded->fragment.a[8]);
	}
	copy_part<TOKENS, NF4>(stream, table_address);
}

/* ---- pipeline ------------------------------------------------------------------------------- */

/* Where a block keeps what. A step is one tile of each group that still has one. X of the columns
 * of a step, a tile's columns after the other, is a stage; stages come and go in batches. */
template <int TOKENS> struct pipeline {
	static constexpr uint32_t x_bytes = TOKENS * QS_WEIGHT_TILE * 2;
	uint8_t *shared;
	struct control *control;
	uint32_t stage_bytes;
	uint32_t batch, slots; /* stages of a batch; batches for which there is memory */
	uint32_t steps;

	__device__ __forceinline__ uint8_t *x(uint32_t stage, uint32_t turn) const
	{
		return shared + stage * stage_bytes + turn * x_bytes;
	}
	__device__ __forceinline__ uint8_t *table() const
	{
		return (uint8_t *)control + QS_CONTROL_BYTES + QS_RING_BYTES(TOKENS);
	}
	__device__ __forceinline__ uint8_t *samples() const
	{
		return table() + QS_TABLE_BYTES + QS_RING_SCALES;
	}
};

template <int TOKENS>
static __device__ __forceinline__ struct pipeline<TOKENS>
pipeline_of(const struct qs_product_args &args, const struct job &job, uint8_t *shared) {
	struct pipeline<TOKENS> pipe;
	const uint32_t base = shared_address(shared);
	const uint32_t table = (base + QS_HOPPER_TABLE - 1024) & ~(QS_TABLE_BYTES - 1u);
	pipe.shared = shared;
	pipe.control = (struct control *)(shared + (table - base) - QS_RING_BYTES(TOKENS) -
	                                  QS_CONTROL_BYTES);
	pipe.stage_bytes = job.turns * pipe.x_bytes;
	pipe.steps = (job.end - job.first + job.turns - 1) / job.turns;
	pipe.slots = min(args.stages, QS_SLOTS);
	pipe.batch = args.stages / pipe.slots;
	return pipe;
}

/* Warps that copy X, and then those that sample. */
#define WARP_X       (QS_MULTIPLIERS / WARP)
#define X_WARPS      2
#define WARP_SAMPLE  (WARP_X + X_WARPS)
#define SAMPLE_WARPS 2

static_assert((WARP_SAMPLE + SAMPLE_WARPS) * WARP == QS_HOPPER_THREADS,
              "the host launches so many");

/* A lane's share of X: 16 bytes of every fourth token. */
struct x_share {
	const uint16_t *source; /* of its first token and the block's first columns */
	uint32_t place;         /* of its first token in the X of a tile's columns  */
	uint32_t count;         /* tokens                                           */
	bool aligned;           /* rows start at multiples of 16 bytes              */
};

static __device__ __forceinline__ struct x_share x_share_of(const struct qs_product_args &args,
                                                            const struct job &job)
{
	const uint32_t lane = threadIdx.x % WARP, token = lane / 8, chunk = lane % 8;
	struct x_share share;
	share.source = (const uint16_t *)args.x + token * args.ldx +
	               (int64_t)job.first * QS_WEIGHT_TILE + chunk * CHUNK;
	share.place = token * 128 + (chunk ^ token) * 16;
	share.count = args.tokens > token ? (args.tokens - token + 3) / 4 : 0;
	share.aligned = rows_aligned(args.x, args.ldx, CHUNK);
	return share;
}

/* X of a step. Chunks are swizzled by the lowest three bits of the token, of which the lane knows
 * two. */
template <int TOKENS>
static __device__ __forceinline__ void copy_x(const struct x_share &share, const struct job &job,
                                              const struct pipeline<TOKENS> &pipe, uint32_t step,
                                              uint32_t stage, int64_t ldx)
{
	const uint32_t tile = step * job.turns, tiles = job.end - job.first - tile;
	const uint16_t *source = share.source + (int64_t)tile * QS_WEIGHT_TILE;
	uint32_t to = shared_address(pipe.x(stage, 0)) + share.place;
#pragma unroll 1
	for (uint32_t turn = 0; turn < min(job.turns, tiles); turn++) {
		const uint16_t *from = source;
#pragma unroll
		for (uint32_t i = 0; i < TOKENS / 4; i++, from += 4 * ldx) {
			const uint32_t at = (to ^ i % 2 * 64) + i * 512;
			if (i < share.count && share.aligned)
				copy_16(at, from);
			else if (i < share.count)
				store_16(at, load_unaligned(from));
		}
		source += QS_WEIGHT_TILE;
		to += pipe.x_bytes;
	}
}

/* X of a batch's steps into a slot. */
template <int TOKENS>
static __device__ __forceinline__ void
copy_batch(const struct x_share &share, const struct job &job, const struct pipeline<TOKENS> &pipe,
           uint32_t batch, uint32_t slot, int64_t ldx)
{
	const uint32_t first = min(batch * pipe.batch, pipe.steps);
	const uint32_t end = min(first + pipe.batch, pipe.steps);
	for (uint32_t step = first; step < end; step++)
		copy_x(share, job, pipe, step, slot * pipe.batch + step - first, ldx);
}

template <int TOKENS>
static __device__ __forceinline__ uint32_t batches_of(const struct pipeline<TOKENS> &pipe)
{
	return (pipe.steps + pipe.batch - 1) / pipe.batch;
}

/* Each warp for X copies every X_WARPS-th batch: those of the others are on their way meanwhile. */
static __device__ __forceinline__ uint32_t first_batch(void)
{
	return threadIdx.x / WARP - WARP_X;
}

/* By the warps for X, before the barriers can be used: the first batches. */
template <int TOKENS>
static __device__ __forceinline__ void start_x(const struct qs_product_args &args,
                                               const struct job &job,
                                               const struct pipeline<TOKENS> &pipe)
{
	const struct x_share share = x_share_of(args, job);
	wait_for_work_ahead();
	copy_batch(share, job, pipe, first_batch(), first_batch(), args.ldx);
}

/* Waits for this thread's copies and lets wgmma see them. This waits for all that is on its way, as
 * long as memory takes: why X comes in batches. */
static __device__ __forceinline__ void finish_x(void)
{
	copies_commit();
	copies_wait<0>();
	proxy_fence();
}

/* And then: reports them, and copies the others. */
template <int TOKENS>
static __device__ __forceinline__ void feed_x(const struct qs_product_args &args,
                                              const struct job &job,
                                              const struct pipeline<TOKENS> &pipe)
{
	const struct x_share share = x_share_of(args, job);
	for (uint32_t i = first_batch(); i < batches_of(pipe); i += X_WARPS) {
		const uint32_t slot = i % pipe.slots, parity = i / pipe.slots & 1;
		if (i >= X_WARPS) {
			/* a slot is empty at first */
			barrier_wait(shared_address(&pipe.control->empty[slot]), parity ^ 1);
			copy_batch(share, job, pipe, i, slot, args.ldx);
		}
		finish_x();
		barrier_arrive(shared_address(&pipe.control->full[slot]));
	}
}

/* ---- sampling on Hopper --------------------------------------------------------------------- */

/* A lane's share of the sampled rows: eight elements of the row of the group lane / 8, and 16 bytes
 * of what the tile keeps of them. */
struct sampled {
	const uint16_t *source; /* of the group's first tile, or NULL: no such row   */
	const uint8_t *kept;    /* the lane's bytes of this tile, or NULL: it has none */
	uint32_t stride;        /* from a tile of the group to the next, in bytes    */
	uint32_t tiles;         /* of the group: one in each step                    */
	uint32_t columns;       /* of W from one of them to the next                 */
	float scale;            /* fp8: of the row                                   */
	bool aligned;           /* rows of W start at multiples of 16 bytes          */
};

/* What a group's lanes copy of a row of a tile, in the order of the lanes: codes, 64 bytes or in
 * fp8 128; then, NF4, the 16 bytes in which its absmax is. */
template <bool NF4>
static __device__ __forceinline__ const uint8_t *kept_part(const uint8_t *tile, uint32_t row)
{
	const uint32_t l8 = threadIdx.x % 8, lane = tile_lane(row, 0) + l8 % 4;
	if (!NF4)
		return tile + lane * 16 + l8 / 4 * (QS_FP8_TILE_BYTES / 2);
	if (l8 < 4)
		return tile + lane * 16;
	return l8 == 4 ? tile + QS_NF4_CODE_BYTES + absmax_place(row) / 8 * 16 : NULL;
}

template <bool NF4>
static __device__ __forceinline__ struct sampled sampled_of(const struct qs_product_args &args,
                                                            const struct job &job, uint64_t packed,
                                                            uint32_t turn)
{
	const uint32_t lane = threadIdx.x % WARP, group = lane / 8;
	const uint32_t strip = job.strip + group / job.turns, first = job.first + group % job.turns;
	const uint32_t row = turn % QS_WEIGHT_TILE;
	struct sampled sampled = {sampled_row(args, strip, turn)};
	if (!sampled.source || first >= job.end)
		return sampled;
	sampled.source += (int64_t)first * QS_WEIGHT_TILE + lane % 8 * CHUNK;
	sampled.kept = kept_part<NF4>(tile_at<NF4>(packed, job, strip, first), row);
	sampled.stride = job.turns * (NF4 ? QS_NF4_TILE_BYTES : QS_FP8_TILE_BYTES);
	sampled.tiles = (job.end - first + job.turns - 1) / job.turns;
	sampled.columns = job.turns * QS_WEIGHT_TILE;
	sampled.scale = NF4 ? 1 : __ldg(scales_of(args) + (int64_t)strip * QS_WEIGHT_TILE + row);
	sampled.aligned = rows_aligned(args.source, args.ld, CHUNK);
	return sampled;
}

/* Place of a group's row in a slot: W's 128 bytes, then 128 of the tile. */
#define SAMPLE_PITCH 256

static_assert(QS_SAMPLE_BYTES == SAMPLE_WARPS * QS_SAMPLE_STEPS * QS_GROUPS * SAMPLE_PITCH,
              "the host allocates so much");

static __device__ __forceinline__ uint8_t *sample_slot(uint8_t *samples, uint32_t step)
{
	return samples +
	       (step % QS_SAMPLE_STEPS * QS_GROUPS + threadIdx.x % WARP / 8) * SAMPLE_PITCH;
}

/* A step into its slot, as one group of copies. */
static __device__ __forceinline__ void copy_sample(const struct sampled &sampled, uint32_t step,
                                                   uint8_t *slot)
{
	const uint32_t to = shared_address(slot) + threadIdx.x % 8 * 16;
	const uint16_t *from = sampled.source + (int64_t)step * sampled.columns;
	if (step < sampled.tiles) {
		if (sampled.aligned)
			copy_16(to, from);
		else
			store_16(to, load_unaligned(from));
		if (sampled.kept)
			copy_16(to + 128, sampled.kept + (int64_t)step * sampled.stride);
	}
	copies_commit();
}

/* A warp: compares a row of each tile of every SAMPLE_WARPS-th step with W, the copies of both
 * going some of them ahead. False in some lane if one differs. */
template <bool NF4>
static __device__ __forceinline__ bool samples_are_same(const struct control *control,
                                                        const struct sampled &sampled, uint32_t row,
                                                        uint32_t steps, uint8_t *samples)
{
	const uint32_t warp = threadIdx.x / WARP - WARP_SAMPLE;
	bool same = true;
	samples += warp * (QS_SAMPLE_BYTES / SAMPLE_WARPS);
	for (uint32_t i = 0; i < QS_SAMPLE_STEPS - 1; i++)
		copy_sample(sampled, i * SAMPLE_WARPS + warp, sample_slot(samples, i));
	for (uint32_t i = 0, step = warp; step < steps; i++, step += SAMPLE_WARPS) {
		const uint32_t ahead = QS_SAMPLE_STEPS - 1;
		const uint8_t *slot = sample_slot(samples, i);
		copy_sample(sampled, step + ahead * SAMPLE_WARPS, sample_slot(samples, i + ahead));
		copies_wait<QS_SAMPLE_STEPS - 1>();
		__syncwarp();
		const uint4 made = ((const uint4 *)slot)[threadIdx.x % 8];
		const uint32_t absmax = ((const uint16_t *)(slot + 192))[absmax_place(row) % 8];
		const struct kept kept = {slot + 128, 64, absmax, sampled.scale};
		const bool equal = same_row<NF4>(control, kept, row, made);
		same &= equal || step >= sampled.tiles;
		__syncwarp();
	}
	return same;
}

/* The warps that sample know what one of them has found out. */
static __device__ __forceinline__ void meet_samplers(void)
{
	asm volatile("bar.sync 1, %0;" ::"n"(SAMPLE_WARPS * WARP) : "memory");
}

/* The warps that sample: one learns what is to be known of the weight, and moves the turn on in the
 * end, whatever the state of the tiles: blocks of one launch may find it changed. */
template <bool NF4>
static __device__ __forceinline__ void sample(const struct qs_product_args &args,
                                              const struct job &job, struct control *control,
                                              uint32_t steps, uint8_t *samples)
{
	const bool first = threadIdx.x == WARP_SAMPLE * WARP;
	if (first)
		know_validity(args, control);
	meet_samplers();
	if (args.flags & QS_PRODUCT_FROZEN)
		return;
	const uint32_t turn = control->turn;
	if (control->known) {
		const struct sampled sampled = sampled_of<NF4>(args, job, control->packed, turn);
		if (!samples_are_same<NF4>(control, sampled, turn % QS_WEIGHT_TILE, steps, samples))
			drop_weight(args, control);
	}
	if (first)
		move_turn(args, turn);
}

/* ---- a block on Hopper ---------------------------------------------------------------------- */

/* Where a group finds X of a step. */
struct reader {
	uint32_t x;     /* see x_place                                   */
	uint32_t batch; /* of which it is                                */
	uint32_t left;  /* stages of the batch from this one on          */
};

/* Waits for a batch. */
template <int TOKENS>
static __device__ __forceinline__ void read_batch(struct reader *reader, const struct job &job,
                                                  const struct pipeline<TOKENS> &pipe)
{
	const uint32_t slot = reader->batch % pipe.slots, parity = reader->batch / pipe.slots & 1;
	reader->x = x_place(shared_address(pipe.x(slot * pipe.batch, job.turn)));
	reader->left = pipe.batch;
	barrier_wait(shared_address(&pipe.control->full[slot]), parity);
}

/* Done with a step; `more` says that another follows. Where that is of the next batch, lets go of
 * this one. */
template <int TOKENS>
static __device__ __forceinline__ void read_on(struct reader *reader, const struct job &job,
                                               const struct pipeline<TOKENS> &pipe, bool more)
{
	reader->x += pipe.stage_bytes / 16;
	if (--reader->left || !more)
		return;
	if (threadIdx.x % WARP == 0)
		barrier_arrive(shared_address(&pipe.control->empty[reader->batch % pipe.slots]));
	reader->batch++;
	read_batch(reader, job, pipe);
}

/* Tokens of a matrix instruction: more would take too many registers. */
template <int TOKENS> struct spans {
	static constexpr int tokens = TOKENS < 32 ? TOKENS : 32;
	static constexpr int count = TOKENS / tokens;
	struct sums<tokens> of[count];
};

/* A group's tile, and, while the matrix instructions run, the decoding of the next one. After the
 * last one that is for nothing, but takes no branch. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void multiply_ahead(struct spans<TOKENS> *total,
                                                      struct table table, uint32_t table_address,
                                                      const struct decoded &decoded, uint32_t x,
                                                      struct stream *stream, struct decoded *then)
{
	constexpr int tokens = spans<TOKENS>::tokens, count = spans<TOKENS>::count;
	struct sums<tokens> sum;
#pragma unroll
	for (int s = 0; s < count; s++)
		multiply_begin(NF4 ? &sum : &total->of[s], decoded.fragment, x + s * tokens * 8,
		               !NF4);
	take_part<TOKENS, NF4>(stream, table, table_address, then);
#pragma unroll
	for (int s = 0; s < count; s++)
		multiply_end(NF4 ? &sum : &total->of[s]);
	if (NF4)
		promote(&total->of[0], sum, decoded.absmax);
}

/* A group: its `mine` tiles. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply_tiles(struct spans<TOKENS> *total, const struct job &job,
               const struct pipeline<TOKENS> &pipe, struct table table, uint32_t table_address,
               struct stream *stream, struct reader *reader, uint32_t mine)
{
	struct decoded decoded[2];
	take_part<TOKENS, NF4>(stream, table, table_address, &decoded[0]);
	for (uint32_t i = 0; i < mine; i += 2) {
#pragma unroll
		for (uint32_t j = 0; j < 2; j++) {
			if (i + j >= mine)
				break;
			multiply_ahead<TOKENS, NF4>(total, table, table_address, decoded[j],
			                            reader->x, stream, &decoded[j ^ 1]);
			read_on(reader, job, pipe, i + j + 1 < mine);
		}
	}
}

/* The same without registers for two decoded tiles: one after the other, in spans of tokens. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply_spans(struct spans<TOKENS> *total, const struct job &job,
               const struct pipeline<TOKENS> &pipe, struct table table, uint32_t table_address,
               struct stream *stream, struct reader *reader, uint32_t mine)
{
	constexpr int tokens = spans<TOKENS>::tokens, count = spans<TOKENS>::count;
	for (uint32_t i = 0; i < mine; i++) {
		struct decoded decoded;
		take_part<TOKENS, NF4>(stream, table, table_address, &decoded);
#pragma unroll
		for (int s = 0; s < count; s++) {
			struct sums<tokens> sum;
			multiply_begin(&sum, decoded.fragment, reader->x + s * tokens * 8, false);
			multiply_end(&sum);
			promote(&total->of[s], sum, decoded.absmax);
		}
		read_on(reader, job, pipe, i + 1 < mine);
	}
}

/* Most tokens for which there are registers for two decoded NF4 tiles. */
#define TWO_TILES_TOKENS 32

/* A group: its tile of every step. The last step may have none for it, or none at all. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply_packed(struct spans<TOKENS> *total, const struct job &job,
                const struct pipeline<TOKENS> &pipe, struct stream *stream)
{
	constexpr bool two = !NF4 || TOKENS <= TWO_TILES_TOKENS;
	const uint32_t mine = steps_of(job), table_address = shared_address(pipe.table());
	const struct table table = table_at(table_address);
	struct reader reader = {};
	if (mine)
		read_batch(&reader, job, pipe);
	if constexpr (two)
		multiply_tiles<TOKENS, NF4>(total, job, pipe, table, table_address, stream, &reader,
		                            mine);
	else
		multiply_spans<TOKENS, NF4>(total, job, pipe, table, table_address, stream, &reader,
		                            mine);
}

/* By one thread, before the others use them. Groups without a row of tiles let go of nothing. One
 * that only has fewer of them than its neighbours lets go of all that is used again. */
template <int TOKENS>
static __device__ __forceinline__ void start_barriers(const struct job &job,
                                                      const struct pipeline<TOKENS> &pipe)
{
	const uint32_t rows = min(QS_GROUPS / job.turns, job.strips - job.strip);
	for (uint32_t i = 0; i < pipe.slots; i++) {
		barrier_init(&pipe.control->full[i], WARP);
		barrier_init(&pipe.control->empty[i], rows * job.turns * 4);
	}
	asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* A thread of a group: its first tiles are on their way. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void start_tiles(struct stream *stream, const struct job &job,
                                                   const struct pipeline<TOKENS> &pipe,
                                                   uint64_t packed)
{
	const uint32_t table = shared_address(pipe.table());
	*stream = stream_of<TOKENS, NF4>(job, packed, table);
	copy_first<TOKENS, NF4>(stream, table);
}

/* The groups: sums of tiles, or of W itself where these turn out not to be W's. The stream has been
 * started if the call gave the tiles. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply(const struct qs_product_args &args, const struct job &job,
         const struct pipeline<TOKENS> &pipe, struct stream *stream)
{
	float *partials = (float *)pipe.shared;
	spans<TOKENS> total = {};
	if (pipe.control->known) {
		if (!args.packed)
			start_tiles<TOKENS, NF4>(stream, job, pipe, pipe.control->packed);
		multiply_packed<TOKENS, NF4>(&total, job, pipe, stream);
	}
	__syncthreads();
	if (tiles_are_valid(pipe.control) && !pipe.control->changed) {
		const struct job job = job_of(args);
		const struct factors factors = factors_of<NF4>(args, job);
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
static __device__ __forceinline__ void
help(const struct qs_product_args &args, const struct job &job, const struct pipeline<TOKENS> &pipe)
{
	if (threadIdx.x / WARP >= WARP_SAMPLE)
		sample<NF4>(args, job, pipe.control, pipe.steps, pipe.samples());
	else if (pipe.control->known)
		feed_x(args, job, pipe);
	copies_wait<0>(); /* into what is used for sums next */
}

/* Everything that does not need the tiles, while the first of them are on their way. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
start(const struct qs_product_args &args, const struct job &job,
      const struct pipeline<TOKENS> &pipe, struct stream *stream)
{
	const uint32_t warp = threadIdx.x / WARP;
	if (!(args.flags & QS_PRODUCT_EARLY))
		wait_for_work_ahead();
	if (args.packed && warp < WARP_X)
		start_tiles<TOKENS, NF4>(stream, job, pipe, args.packed);
	if (threadIdx.x == WARP_SAMPLE * WARP)
		start_barriers(job, pipe);
	if (warp == WARP_SAMPLE)
		fill_range(pipe.control, threadIdx.x % WARP);
	if (warp >= WARP_X && warp < WARP_SAMPLE)
		start_x(args, job, pipe);
	if (NF4)
		fill_table(pipe.table());
	wait_for_work_ahead();
	if (threadIdx.x == WARP_SAMPLE * WARP)
		know_tiles(args, pipe.control);
	__syncthreads();
	let_next_begin();
}

template <int TOKENS, bool NF4>
static __device__ __forceinline__ void product(const struct qs_product_args &args)
{
	extern __shared__ __align__(1024) uint8_t shared[];
	const struct job job = job_of(args);
	const struct pipeline<TOKENS> pipe = pipeline_of<TOKENS>(args, job, shared);
	struct stream stream;
	start<TOKENS, NF4>(args, job, pipe, &stream);
	if (threadIdx.x < QS_MULTIPLIERS) {
		multiply<TOKENS, NF4>(args, job, pipe, &stream);
	} else {
		help<TOKENS, NF4>(args, job, pipe);
		__syncthreads(); /* that of the groups in multiply() */
	}
	if (args.split > 1)
		cluster_sync();
	else
		__syncthreads();
	add_up<TOKENS>(args, job_of(args), shared_address(shared));
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
