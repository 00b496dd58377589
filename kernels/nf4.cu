/* Weights in 4 or 8 bits and products of few tokens with them: see nf4.h for what each kernel
 * computes and for the order in which a tile lies in memory.
 *
 * Memory is the limit of products: 8192 x 8192 in NF4 are 35.6 MB, 8.4 us at an H200's copy rate of
 * 4.24 TB/s, and the sampled rows of W another 2.1 MB. At that rate a multiprocessor has one clock
 * for 30 weights. It decodes them by a table of pairs (a byte holds two codes) in shared memory, of
 * which each lane has a copy in a bank of its own: 64 weights a clock. The decoded weights are an
 * operand of mma.sync and never return to memory; the 64 columns of a tile share a scale, with
 * which their sums are multiplied in fp32 before they are added up.
 *
 * A block has 16 warps, each of which multiplies one half of a tile, 32 rows, at a time. Four more
 * warps compare the sampled rows of W. The blocks of a cluster share rows and split k. All partial
 * sums are added in one fixed order. On Hopper two warps have the copy engine bring tiles and X
 * into a ring of stages in shared memory, so that those that multiply do nothing else; elsewhere
 * these load the codes of the next steps into registers, and copy X themselves, a barrier a step.
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
static_assert(sizeof(struct qs_mapped_args) == 256, "layout is shared with the host");

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

/* Two neighbouring elements, the first in the low half. Like all loads of what the work ahead may
 * write, not one for data that nobody writes while the kernel runs: a product may have begun. */
static __device__ __forceinline__ uint32_t load_pair(const uint16_t *source, bool aligned)
{
	if (aligned)
		return *(const uint32_t *)source;
	return source[0] | (uint32_t)source[1] << 16;
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

/* e4m3 as W lies is the common target: warps expand a quarter of a tile each, on their own. For the
 * others a block expands 2 x 2 tiles at a time through shared memory, so that rows of all targets
 * are written in pieces of 128 bytes and more. The rows of the e4m3 form are swizzled: the quarter
 * that a row belongs to is mixed into the place of its 16-byte chunks, for the reads along n.
 *
 * A block of 64 numbers has 16 values. They are made first, and its codes then select bytes. */
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

/* What a lane multiplies absmax with: the codebook's four values whose bytes it makes for the four
 * lanes that share a row, times the inverse of the scale. This is a power of two; where it makes a
 * difference that it is not multiplied with last, e4m3 is zero. */
struct values {
	float of[4];
};

static __device__ __forceinline__ struct values values_of(const float (*book)[WARP], float inverse)
{
	const unsigned lane = threadIdx.x % WARP;
	struct values values;
#pragma unroll
	for (int i = 0; i < 4; i++)
		values.of[i] = book[lane % 4 * 4 + i][lane] * inverse;
	return values;
}

/* e4m3 of the 16 codes of a row, a byte each. */
static __device__ __forceinline__ uint4 bytes_of(const struct values &values, float absmax)
{
	const uint32_t four = e4m3_pair_finite(values.of[0] * absmax, values.of[1] * absmax) |
	                      e4m3_pair_finite(values.of[2] * absmax, values.of[3] * absmax) << 16;
	return make_uint4(__shfl_sync(FULL, four, 0, 4), __shfl_sync(FULL, four, 1, 4),
	                  __shfl_sync(FULL, four, 2, 4), __shfl_sync(FULL, four, 3, 4));
}

/* Those of the four codes in the lower half of a word. */
static __device__ __forceinline__ uint32_t select_four(const uint4 &bytes, uint32_t codes)
{
	const uint32_t below = __byte_perm(bytes.x, bytes.y, codes & 0x7777);
	const uint32_t above = __byte_perm(bytes.z, bytes.w, codes & 0x7777);
	return __byte_perm(below, above, 0x3210 | (codes >> 1 & 0x4444));
}

/* e4m3 of a lane's share: rows g and g + 8, 16 columns a word, in which each pair's second element
 * comes before its first. */
struct expanded {
	uint32_t row[2][STEPS];
};

static __device__ __forceinline__ struct expanded expand_share(const struct share &share,
                                                               const struct values &values)
{
	const uint4 low = bytes_of(values, float_of(share.absmax));
	const uint4 high = bytes_of(values, __uint_as_float(share.absmax & 0xffff0000u));
	struct expanded expanded;
#pragma unroll
	for (int step = 0; step < STEPS; step++) {
		const uint32_t word = word_of(share.codes, step);
		expanded.row[0][step] = select_four(low, __byte_perm(word, 0, 0x4420));
		expanded.row[1][step] = select_four(high, __byte_perm(word, 0, 0x4431));
	}
	return expanded;
}

static __device__ __forceinline__ unsigned swizzled(unsigned row, unsigned column)
{
	return row * BYTE_PITCH + (column ^ (row / QUARTER_ROWS % 8 * 16));
}

static __device__ __forceinline__ void lay_bytes(const struct shares &shares,
                                                 const struct values &values, uint8_t *block)
{
#pragma unroll
	for (int i = 0; i < EXPAND_LOADS; i++) {
		const struct expanded expanded = expand_share(shares.of[i], values);
		const unsigned section = section_of(i);
		const unsigned row = section_row(section), column = section_column(section);
#pragma unroll
		for (int j = 0; j < 2 * STEPS; j++) {
			const uint32_t pairs = __byte_perm(expanded.row[j % 2][j / 2], 0, 0x2301);
			const unsigned r = row + j % 2 * 8, c = column + j / 2 * 16;
			*(uint16_t *)(block + swizzled(r, c)) = (uint16_t)pairs;
			*(uint16_t *)(block + swizzled(r, c + 8)) = (uint16_t)(pairs >> 16);
		}
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

/* Where W is to lie as it did, a warp expands a quarter of so many tiles of a strip at a time, and
 * the warps of a block all quarters of twice as many. There is no memory for 2^32 tiles. */
#define RUN 4

/* What a block works on. */
struct run {
	uint32_t strips, chunks, across; /* rows and columns of tiles of W; runs of a strip   */
	uint32_t strip, chunk;           /* of the warp's first tile                          */
};

static __device__ __forceinline__ void begin_run(struct run *run, uint32_t number)
{
	run->strip = number / run->across;
	run->chunk = (number - run->strip * run->across) * 2 * RUN + threadIdx.x / WARP / 4 * RUN;
}

/* The lane's shares of them, and beyond the weight none. */
static __device__ __forceinline__ void load_run(const struct run &run, const uint8_t *packed,
                                                struct share *shares)
{
	const uint32_t lane = threadIdx.x % WARP, quarter = threadIdx.x / WARP % 4;
	const uint8_t *tile =
	        packed + ((int64_t)run.strip * run.chunks + run.chunk) * QS_NF4_TILE_BYTES;
	const uint8_t *codes = tile + (quarter * WARP + lane) * 16;
	const uint8_t *absmax = tile + QS_NF4_CODE_BYTES + quarter * 32 + lane / 4 * 4;
#pragma unroll
	for (int i = 0; i < RUN; i++)
		if (run.chunk + i < run.chunks) {
			shares[i].codes = __ldcs((const uint4 *)(codes + i * QS_NF4_TILE_BYTES));
			shares[i].absmax =
			        __ldcs((const uint32_t *)(absmax + i * QS_NF4_TILE_BYTES));
		}
}

/* Lanes exchange what they have of a quarter, so that each has 16 columns of two rows: a step of
 * rows g and g + 8. `stage`: 1 KB of the warp's, 64 bytes a row, the chunk of a step mixed with the
 * row. */
static __device__ __forceinline__ void exchange(const struct expanded &expanded, uint8_t *stage,
                                                uint4 *chunks)
{
	const uint32_t g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
	const uint32_t row = g * 64 + g / 2 % 4 * 16;
	__syncwarp();
#pragma unroll
	for (int i = 0; i < 2 * STEPS; i++)
		*(uint32_t *)(stage + ((row + t * 4) ^ i / 2 * 16) + i % 2 * 512) =
		        expanded.row[i % 2][i / 2];
	__syncwarp();
#pragma unroll
	for (int i = 0; i < 2; i++) {
		const uint4 in = *(const uint4 *)(stage + (row ^ t * 16) + i * 512);
		chunks[i] = make_uint4(
		        __byte_perm(in.x, in.y, 0x4501), __byte_perm(in.z, in.w, 0x4501),
		        __byte_perm(in.x, in.y, 0x6723), __byte_perm(in.z, in.w, 0x6723));
	}
}

static __device__ __forceinline__ void store_run(const struct qs_expand_args &args,
                                                 const struct run &run, const struct share *shares,
                                                 const struct values &values, uint8_t *stage)
{
	const uint32_t lane = threadIdx.x % WARP, quarter = threadIdx.x / WARP % 4;
	const int64_t row = (int64_t)run.strip * QS_WEIGHT_TILE + quarter * QUARTER_ROWS + lane / 4;
	uint8_t *to = (uint8_t *)args.straight + row * args.k + run.chunk * QS_WEIGHT_TILE +
	              lane % 4 * 16;
	uint8_t *below = to + 8 * args.k;
#pragma unroll
	for (int i = 0; i < RUN; i++) {
		uint4 chunks[2];
		if (run.chunk + i >= run.chunks)
			break;
		exchange(expand_share(shares[i], values), stage, chunks);
		if (row < args.n)
			*(uint4 *)(to + i * QS_WEIGHT_TILE) = chunks[0];
		if (row + 8 < args.n)
			*(uint4 *)(below + i * QS_WEIGHT_TILE) = chunks[1];
	}
}

/* While some warps wait for what they expand others do so. */
static __device__ __forceinline__ void expand_straight(const struct qs_expand_args &args,
                                                       const uint8_t *packed,
                                                       const struct values &values, uint8_t *stage)
{
	struct run run;
	run.strips = (uint32_t)qs_shares(args.n, QS_WEIGHT_TILE);
	run.chunks = (uint32_t)(args.k / QS_WEIGHT_TILE);
	run.across = (run.chunks + 2 * RUN - 1) / (2 * RUN);
	const uint32_t work = run.strips * run.across;
#pragma unroll 1
	for (uint32_t i = blockIdx.x; i < work; i += gridDim.x) {
		struct share shares[RUN] = {};
		begin_run(&run, i);
		load_run(run, packed, shares);
		store_run(args, run, shares, values, stage);
	}
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
	const struct values values = values_of(book, inverse);
	if (args.straight && !args.turned && !args.bf16) {
		expand_straight(args, packed, values, block + threadIdx.x / WARP * 1024);
		return;
	}
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
			lay_bytes(shares, values, block);
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

/* Where shared memory that is asked for at launch starts on Hopper: the system keeps what is
 * before. */
#define SHARED_START 1024

/* Where a lane finds its copy of the table: the entry of a byte is 256 bytes further for each, so
 * that one permutation makes an address. On Hopper the table is known to come first in shared
 * memory, and the permutation gives all but a constant. */
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
		table = {(address - SHARED_START) | copy, 0};
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

/* By the THREADS that multiply; 16 bytes, four copies of an entry, at a time. A thread's entries
 * have the same low code. */
template <uint32_t THREADS> static __device__ __forceinline__ void fill_table(uint8_t *table)
{
	const uint32_t low = threadIdx.x / 8 % 16, places = THREADS / 8 / 16;
	const uint32_t second = scaled_code(low) << 16;
#pragma unroll
	for (uint32_t i = 0; i < 16 / places; i++) {
		const uint32_t high = threadIdx.x / 128 + i * places;
		const uint32_t pair = second | scaled_code(high);
		*(uint4 *)(table + (high << 4 | low) * 256 + threadIdx.x % 8 * 16) =
		        make_uint4(pair, pair, pair, pair);
	}
}

/* The pair of byte i of a word. */
static __device__ __forceinline__ uint32_t look_up(struct table table, uint32_t word, int i)
{
	uint32_t pair;
	const uint32_t address = __byte_perm(word, table.slot, 0x7604 | i << 4) + table.base;
	if (HOPPER)
		asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(pair) : "r"(address), "n"(SHARED_START));
	else
		asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(address));
	return pair;
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

/* Two words of e4m3 as the A operand of mma.m16n8k16. */
static __device__ __forceinline__ void decode_fp8(uint32_t first, uint32_t second, uint32_t *a)
{
	a[0] = widened(first << 8, first << 4);
	a[1] = widened(first, first >> 4);
	a[2] = widened(second << 8, second << 4);
	a[3] = widened(second, second >> 4);
}

/* Two codes a byte. */
static __device__ __forceinline__ void decode_nf4(uint32_t word, struct table table, uint32_t *a)
{
#pragma unroll
	for (int i = 0; i < 4; i++)
		a[i] = look_up(table, word, i);
}

/* The warps that sample are a block's last. */
#define SAMPLE_WARPS 4
#define SAMPLERS     (SAMPLE_WARPS * WARP)

/* Number of a thread among them. */
static __device__ __forceinline__ uint32_t sampler(void)
{
	return threadIdx.x + SAMPLERS - blockDim.x;
}

/* ---- matrix instructions -------------------------------------------------------------------- */

#define QUARTERS 2 /* of a tile that a warp works on: half of it */

/* Sums of a lane over 32 rows and TOKENS tokens, as mma.m16n8k16 leaves them for each quarter and
 * eight tokens: rows g, g, g + 8, g + 8 and tokens 2 t, 2 t + 1, 2 t, 2 t + 1. */
template <int TOKENS> struct sums {
	float at[QUARTERS][TOKENS / 8][4];
};

static __device__ __forceinline__ void multiply(float *sum, const uint32_t *a, const uint32_t *b)
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
	    "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
	    : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
	    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* total += sum * scale of the row, for a quarter. */
template <int TOKENS>
static __device__ __forceinline__ void
promote(struct sums<TOKENS> *total, const struct sums<TOKENS> &sum, int quarter, uint32_t absmax)
{
	const float low = float_of(absmax), high = __uint_as_float(absmax & 0xffff0000u);
#pragma unroll
	for (int i = 0; i < TOKENS / 2; i++) {
		float *to = &total->at[quarter][i / 4][i % 4];
		*to = __fmaf_rn(sum.at[quarter][i / 4][i % 4], i % 4 < 2 ? low : high, *to);
	}
}

/* ---- what a block works on ------------------------------------------------------------------ */

/* Counts of tiles have 32 bits: there is no memory for 2^32 of them. */
struct job {
	uint32_t strips, strip;   /* rows of tiles of W; the first of this block            */
	uint32_t chunks;          /* tiles along k                                          */
	uint32_t first, end;      /* those of this block                                    */
	uint32_t turns;           /* pairs of warps that share a row of tiles               */
	uint32_t row, turn, half; /* this warp's row of tiles, its turn at it, half of them */
	uint32_t token, tokens;   /* of X: the block's first, and how many                  */
};

/* Strips, blocks of a cluster and turns are powers of two; divisions take long. */
static __device__ __forceinline__ uint32_t log2_of(uint32_t power)
{
	return 31 - __clz((int)power);
}

static __device__ __forceinline__ struct job job_of(const struct qs_product_args &args)
{
	struct job job;
	uint32_t block = blockIdx.x;
	/* hides from the compiler that it is the same at every call: a job that is asked for again
	 * need not be kept in registers meanwhile */
	asm volatile("" : "+r"(block));
	const uint32_t two_spans = args.tokens > QS_SPAN, split = log2_of(args.split);
	const uint32_t rank = block & (args.split - 1), place = block >> split;
	const uint32_t turns = log2_of(QS_PAIRS) - log2_of(args.strips);
	/* a shuffle tells the compiler that it is the same for all threads of a warp */
	const uint32_t warp = __shfl_sync(FULL, threadIdx.x / WARP, 0);
	job.strips = (uint32_t)qs_shares(args.n, QS_WEIGHT_TILE);
	job.strip = (place >> two_spans) * args.strips;
	job.chunks = (uint32_t)(args.k / QS_WEIGHT_TILE);
	const uint32_t share = (job.chunks + args.split - 1) >> split;
	job.first = min(rank * share, job.chunks);
	job.end = min(job.first + share, job.chunks);
	job.turns = 1 << turns;
	job.row = warp / 2 >> turns;
	job.turn = warp / 2 & (job.turns - 1);
	job.half = warp % 2;
	job.token = (place & two_spans) * QS_SPAN;
	job.tokens = min(args.tokens - job.token, QS_SPAN);
	return job;
}

template <bool NF4>
static constexpr uint32_t tile_bytes = NF4 ? QS_NF4_TILE_BYTES : QS_FP8_TILE_BYTES;

template <bool NF4>
static __device__ __forceinline__ const uint8_t *tile_at(uint64_t packed, const struct job &job,
                                                         uint32_t strip, uint32_t chunk)
{
	return (const uint8_t *)packed + ((int64_t)strip * job.chunks + chunk) * tile_bytes<NF4>;
}

/* What the threads of a block tell each other, in shared memory. */
struct control {
	float2 range[16]; /* a code is right for numbers above x and not above y             */
	uint64_t packed;  /* the tiles that are multiplied                                   */
	uint32_t known;   /* they may be read                                                */
	uint32_t valid;   /* the descriptor says that they are W's                           */
	uint32_t turn;    /* of the descriptor                                               */
	uint32_t changed; /* the source was seen to differ from them                         */
	uint64_t landed;  /* mbarrier: the sums from all blocks of the cluster have come     */
};

/* Shared memory of a block. Partial sums take the place of all but `control` and what follows in
 * the end. */
struct shared {
	uint8_t table[QS_TABLE_BYTES]; /* see struct table; in its gaps codes, on Hopper samples */
#if HOPPER
	uint8_t ring[QS_RING_BYTES]; /* stages, see below; what the cluster gives this block */
	struct control control;
	uint64_t full[QS_RING_STAGES_MAX];  /* mbarriers: what belongs into a stage has come */
	uint64_t empty[QS_RING_STAGES_MAX]; /* and has been multiplied                       */
#else
	uint8_t samples[QS_SAMPLE_BYTES];
	uint8_t scales[QS_STAGES * QS_STAGE_SCALES]; /* of parts */
	uint8_t x[QS_X_BYTES];
	struct control control;
#endif
};

static_assert(sizeof(struct shared) <= (HOPPER ? QS_HOPPER_SHARED : QS_SHARED_BYTES),
              "the host allocates so much");
static_assert(offsetof(struct shared, control) >= QS_PARTIAL_BYTES, "sums need as much");
#if HOPPER
static_assert(offsetof(struct shared, ring) % 1024 == 0, "swizzled rows start there");
#endif

/* ---- copies --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void copy_16(uint32_t to, const void *from)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
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

/* ---- parts of tiles ------------------------------------------------------------------------- */

/* Half of a tile as a lane has it before it is decoded. */
template <bool NF4> struct part {
	uint4 codes[NF4 ? QUARTERS : 2 * QUARTERS]; /* fp8: of 32 columns each */
};

/* From a tile to a lane's codes. */
static __device__ __forceinline__ uint32_t part_of_tile(const struct job &job)
{
	return (job.half * QUARTERS * WARP + threadIdx.x % WARP) * 16;
}

/* NF4: the scales of a lane's rows g and g + 8 of each quarter. `scales`: shared address of those
 * of the part, 64 bytes. */
static __device__ __forceinline__ void load_scales(uint32_t scales, uint32_t *absmax)
{
#pragma unroll
	for (int q = 0; q < QUARTERS; q++)
		asm volatile("ld.shared.u32 %0, [%1];"
		             : "=r"(absmax[q])
		             : "r"(scales + q * 32 + threadIdx.x % WARP / 4 * 4)
		             : "memory");
}

/* Codes that nobody needs again. */
static __device__ __forceinline__ uint4 load_codes(const uint8_t *from)
{
	uint4 value;
	asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
	             : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
	             : "l"(from));
	return value;
}

static __device__ __forceinline__ uint4 load_shared(uint32_t from)
{
	uint4 value;
	asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
	             : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
	             : "r"(from)
	             : "memory");
	return value;
}

#if HOPPER

/* A lane's codes of a tile in shared memory. */
template <bool NF4>
static __device__ __forceinline__ void take_part(uint32_t from, struct part<NF4> *part)
{
#pragma unroll
	for (int q = 0; q < QUARTERS; q++) {
		part->codes[q] = load_shared(from + q * WARP * 16);
		if constexpr (!NF4)
			part->codes[QUARTERS + q] =
			        load_shared(from + q * WARP * 16 + QS_FP8_TILE_BYTES / 2);
	}
}

#else

/* Tiles of this warp. */
static __device__ __forceinline__ uint32_t tiles_of(const struct job &job)
{
	const uint32_t tiles = job.end - min(job.end, job.first + job.turn);
	return (tiles + job.turns - 1) >> log2_of(job.turns);
}

/* Where a lane finds its first part. */
template <bool NF4>
static __device__ __forceinline__ const uint8_t *parts_of(const struct job &job, uint64_t packed)
{
	/* beyond the last strip this one is multiplied, for nothing */
	const uint32_t strip = min(job.strip + job.row, job.strips - 1);
	return tile_at<NF4>(packed, job, strip, job.first + job.turn) + part_of_tile(job);
}

template <bool NF4>
static __device__ __forceinline__ void load_part(const uint8_t *from, struct part<NF4> *part)
{
#pragma unroll
	for (int q = 0; q < QUARTERS; q++) {
		part->codes[q] = load_codes(from + q * WARP * 16);
		if constexpr (!NF4)
			part->codes[QUARTERS + q] =
			        load_codes(from + q * WARP * 16 + QS_FP8_TILE_BYTES / 2);
	}
}

/* Where the scales of a warp's part are: 64 bytes. `scales`: shared address of all. */
static __device__ __forceinline__ uint32_t scales_at(uint32_t scales, uint32_t step)
{
	return scales + (step % QS_STAGES * (QS_MULTIPLIERS / WARP) + threadIdx.x / WARP) * 64;
}

/* NF4: those of a step's part to there: a copy that is on its way, by four lanes. */
static __device__ __forceinline__ void copy_scales(const uint8_t *part, const struct job &job,
                                                   uint32_t to, uint32_t step)
{
	const uint32_t lane = threadIdx.x % WARP, quarter = job.half * QUARTERS;
	const int32_t at = QS_NF4_CODE_BYTES + quarter * 32 - (quarter * WARP + lane) * 16;
	if (lane < 4)
		copy_16(scales_at(to, step) + lane * 16, part + at + lane * 16);
}

/* Where registers are short, NF4 codes wait in the gaps of the table instead: two parts of each
 * lane. */
#define RING 2

static __device__ __forceinline__ uint32_t ring_at(uint32_t table, uint32_t step, uint32_t quarter)
{
	const uint32_t at = (step % RING * QUARTERS + quarter) * QS_MULTIPLIERS + threadIdx.x;
	return table + at / 8 * 256 + 128 + at % 8 * 16;
}

static_assert(RING * QUARTERS * QS_MULTIPLIERS * 16 * 2 == QS_TABLE_BYTES, "gaps are as large");

static __device__ __forceinline__ void copy_codes(const uint8_t *from, uint32_t table,
                                                  uint32_t step)
{
#pragma unroll
	for (int q = 0; q < QUARTERS; q++)
		copy_16(ring_at(table, step, q), from + q * WARP * 16);
}

template <bool NF4>
static __device__ __forceinline__ void take_codes(uint32_t table, uint32_t step,
                                                  struct part<NF4> *part)
{
#pragma unroll
	for (int q = 0; q < QUARTERS; q++)
		part->codes[q] = load_shared(ring_at(table, step, q));
}

#endif

/* The A operand of 16 columns of a quarter. */
template <bool NF4>
static __device__ __forceinline__ void decode(const struct part<NF4> &part, struct table table,
                                              int quarter, int step, uint32_t *a)
{
	if constexpr (NF4) {
		decode_nf4(word_of(part.codes[quarter], step), table, a);
	} else {
		const uint4 &codes = part.codes[step / 2 * QUARTERS + quarter];
		decode_fp8(word_of(codes, step % 2 * 2), word_of(codes, step % 2 * 2 + 1), a);
	}
}

/* ---- X -------------------------------------------------------------------------------------- */

/* X of a tile's columns: rows of 128 bytes, one a token, their chunks of 16 bytes swizzled by the
 * lowest three bits of the token. Stages make a ring, and hold the X of all turns of a step. */
template <int TOKENS> static constexpr uint32_t x_bytes = TOKENS *QS_WEIGHT_TILE * 2;

#if !HOPPER

/* A thread's share of what the warps of a turn copy together: 16 bytes of some tokens. */
struct x_share {
	const uint16_t *source; /* of its first token and the next tile's columns */
	uint32_t place;         /* of its first token in the X of a tile          */
	uint32_t apart;         /* tokens from one of its own to the next         */
	uint32_t token;         /* its first                                      */
	bool aligned;           /* rows start at multiples of 16 bytes            */
};

/* From the X of a turn in the first stage to that in the stage of a step. */
template <int TOKENS>
static __device__ __forceinline__ uint32_t stage_of(uint32_t step, const struct job &job)
{
	return step % QS_STAGES * x_bytes<TOKENS> << log2_of(job.turns);
}

static __device__ __forceinline__ struct x_share x_share_of(const struct qs_product_args &args,
                                                            const struct job &job)
{
	const uint32_t thread = (job.row * 2 + job.half) * WARP + threadIdx.x % WARP;
	struct x_share share;
	share.token = thread / 8;
	share.apart = args.strips * 8;
	share.source = (const uint16_t *)args.x + (int64_t)(job.token + share.token) * args.ldx +
	               (int64_t)(job.first + job.turn) * QS_WEIGHT_TILE + thread % 8 * CHUNK;
	share.place = share.token * 128 + (thread % 8 ^ share.token % 8) * 16;
	share.aligned = rows_aligned(args.x, args.ldx, CHUNK);
	return share;
}

/* X of the next step, if there is one, into its stage, as one group of copies. `stage`: shared
 * address of the turn's X there. */
template <int TOKENS>
static __device__ __forceinline__ void copy_x(struct x_share *share, const struct job &job,
                                              bool wanted, uint32_t stage, int64_t ldx)
{
	if (wanted) {
		const uint16_t *from = share->source;
		uint32_t to = stage + share->place;
		uint32_t token = share->token;
#pragma unroll(TOKENS > 16 ? 1 : TOKENS / 8) /* registers */
		for (int i = 0; i < TOKENS / 8; i++) {
			if (token < job.tokens && share->aligned)
				copy_16(to, from);
			else if (token < job.tokens)
				store_16(to, load_unaligned(from));
			token += share->apart;
			from += share->apart * ldx;
			to += share->apart * 128;
		}
	}
	copies_commit();
	share->source += job.turns * QS_WEIGHT_TILE;
}

#endif

/* The B operands of 16 columns. `place`: the lane's address from x_lane in the X of a tile. */
template <int TOKENS>
static __device__ __forceinline__ void load_x(uint32_t place, int step, uint32_t (*b)[2])
{
	place ^= step * 32;
	if constexpr (TOKENS == 8)
		asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
		             : "=r"(b[0][0]), "=r"(b[0][1])
		             : "r"(place)
		             : "memory");
	else
#pragma unroll
		for (int i = 0; i < TOKENS / 8; i += 2)
			asm volatile(
			        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
			        : "=r"(b[i][0]), "=r"(b[i][1]), "=r"(b[i + 1][0]), "=r"(b[i + 1][1])
			        : "r"(place + i * 1024)
			        : "memory");
}

/* Of the row of 16 bytes that a lane names to ldmatrix: columns 0..7, 8..15 of tokens 0..7, and
 * then of tokens 8..15. `first`: number of the row of token 0, counted where the swizzle starts. */
static __device__ __forceinline__ uint32_t x_lane(uint32_t first = 0)
{
	const uint32_t lane = threadIdx.x % WARP, row = first + lane / 16 * 8 + lane % 8;
	return row * 128 + (lane / 8 % 2 ^ row % 8) * 16;
}

/* All of `threads` threads that name barrier ID are here. */
template <uint32_t ID> static __device__ __forceinline__ void meet(uint32_t threads)
{
	static_assert(ID > 0 && ID < 16, "barrier 0 is the block's");
	asm volatile("bar.sync %0, %1;" ::"n"(ID), "r"(threads) : "memory");
}

#if !HOPPER

/* The warps of a turn, which is one of COUNT, are here. Each barrier's number is in an instruction:
 * where it is in a register, tools that look for races lose sight of the other barriers. */
template <uint32_t FIRST = 0, uint32_t COUNT = QS_PAIRS>
static __device__ __forceinline__ void meet_turn(uint32_t turn, uint32_t threads)
{
	if constexpr (COUNT == 1)
		meet<1 + FIRST>(threads);
	else if (turn < FIRST + COUNT / 2)
		meet_turn<FIRST, COUNT / 2>(turn, threads);
	else
		meet_turn<FIRST + COUNT / 2, COUNT / 2>(turn, threads);
}

#endif

/* ---- sampling ------------------------------------------------------------------------------- */

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

/* By one thread of each block, when it knows `turn`. True for the last block, which is to move the
 * turn on. Takes long; nobody need wait for the answer. */
static __device__ __forceinline__ bool is_last_reader(const struct qs_product_args &args)
{
	struct qs_weight *weight = (struct qs_weight *)args.weight;
	__threadfence();
	return atomicInc(&weight->readers, gridDim.x - 1) == gridDim.x - 1;
}

/* By a thread of each warp that saw a difference. The first of all tells the host; `failed` is
 * cleared by the check that makes the tiles good again. A function of its own so that the rest
 * keeps its registers. */
static __device__ __noinline__ void drop_weight(const struct qs_product_args &args,
                                                struct control *control)
{
	struct qs_weight *weight = (struct qs_weight *)args.weight;
	if (!atomicExch(&weight->failed, 1u) && weight->outcome)
		qs_count_escape(weight->outcome);
	weight_of(args)->valid = 0;
	*(volatile uint32_t *)&control->changed = 1;
}

/* A lane's share of the sampled rows: eight elements of the row of a tile, every SAMPLED-th of the
 * block's, and 16 bytes of what the tile keeps of them. */
#define SAMPLED (SAMPLERS / 8)

struct sampled {
	const uint16_t *source; /* of the next tile, or NULL: no such row              */
	const uint8_t *kept;    /* the lane's bytes of this tile, or NULL: it has none */
	uint32_t stride;        /* from a tile to the next of the lane, in bytes       */
	uint32_t left;          /* tiles of the lane that have not been copied         */
	uint32_t columns;       /* of W from one of them to the next                   */
	float scale;            /* fp8: of the row                                     */
	bool aligned;           /* rows of W start at multiples of 16 bytes            */
};

/* What eight lanes copy of a row of a tile, in the order of the lanes: codes, 64 bytes or in fp8
 * 128; then, NF4, the 16 bytes in which its absmax is. */
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
                                                            uint32_t row_of_tile)
{
	const uint32_t place = sampler() / 8, strips = log2_of(args.strips);
	const uint32_t strip = job.strip + (place & (args.strips - 1));
	const uint32_t first = job.first + (place >> strips), next = SAMPLED >> strips;
	const int64_t row = (int64_t)strip * QS_WEIGHT_TILE + row_of_tile;
	struct sampled sampled = {};
	if (row >= args.n || first >= job.end)
		return sampled;
	sampled.source = (const uint16_t *)args.source + row * args.ld +
	                 (int64_t)first * QS_WEIGHT_TILE + threadIdx.x % 8 * CHUNK;
	sampled.kept = kept_part<NF4>(tile_at<NF4>(packed, job, strip, first), row_of_tile);
	sampled.stride = next * tile_bytes<NF4>;
	sampled.left = (job.end - first + next - 1) >> log2_of(next);
	sampled.columns = next * QS_WEIGHT_TILE;
	sampled.scale = NF4 ? 1 : scales_of(args)[row];
	sampled.aligned = rows_aligned(args.source, args.ld, CHUNK);
	return sampled;
}

/* Place of a row in a slot: W's 128 bytes, and 128 of the tile. On Hopper each fills a gap of the
 * table. */
#define SAMPLE_STEPS (HOPPER ? 8 : QS_SAMPLE_STEPS)
#define SAMPLE_KEPT  (HOPPER ? 256 : 128) /* from the first to the second */
#define SAMPLE_PITCH (2 * SAMPLE_KEPT)

static_assert(SAMPLE_STEPS * SAMPLED * SAMPLE_PITCH <= (HOPPER ? QS_TABLE_BYTES : QS_SAMPLE_BYTES),
              "there is room");

static __device__ __forceinline__ uint8_t *sample_slot(uint8_t *samples, uint32_t i)
{
	const uint32_t place = sampler() / 8;
	return samples + (i % SAMPLE_STEPS * SAMPLED + place) * SAMPLE_PITCH;
}

/* The next tile of each lane into a slot, as one group of copies. */
static __device__ __forceinline__ void copy_sample(struct sampled *sampled, uint32_t slot)
{
	const uint32_t to = slot + threadIdx.x % 8 * 16;
	if (sampled->left) {
		if (sampled->aligned)
			copy_16(to, sampled->source);
		else
			store_16(to, load_unaligned(sampled->source));
		if (sampled->kept) {
			copy_16(to + SAMPLE_KEPT, sampled->kept);
			sampled->kept += sampled->stride;
		}
		sampled->source += sampled->columns;
		sampled->left--;
	}
	copies_commit();
}

/* The copies of W and the tiles go some ahead of what is compared. */
static __device__ __forceinline__ void copy_first_samples(struct sampled *sampled, uint8_t *samples)
{
	for (uint32_t i = 0; i < SAMPLE_STEPS - 1; i++)
		copy_sample(sampled, shared_address(sample_slot(samples, i)));
}

/* Compares a row of each of so many tiles with W. False in some lane if one differs. */
template <bool NF4>
static __device__ __forceinline__ bool samples_are_same(const struct control *control,
                                                        struct sampled sampled, uint32_t tiles,
                                                        uint32_t row, uint8_t *samples)
{
	const uint32_t most = __reduce_max_sync(FULL, tiles);
	bool same = true;
	for (uint32_t i = 0; i < most; i++) {
		const uint8_t *slot = sample_slot(samples, i);
		copy_sample(&sampled, shared_address(sample_slot(samples, i + SAMPLE_STEPS - 1)));
		copies_wait<SAMPLE_STEPS - 1>();
		__syncwarp();
		const uint4 made = ((const uint4 *)slot)[threadIdx.x % 8];
		const uint32_t absmax =
		        ((const uint16_t *)(slot + SAMPLE_KEPT + 64))[absmax_place(row) % 8];
		const struct kept kept = {slot + SAMPLE_KEPT, 64, absmax, sampled.scale};
		const bool equal = same_row<NF4>(control, kept, row, made);
		same &= equal || i >= tiles;
		__syncwarp();
	}
	return same;
}

/* Before the work ahead has ended: brings the rows of W that will be compared into the L2 cache, if
 * `turn` stays what it is now. Nothing else depends on what is read here. */
template <bool NF4>
static __device__ __forceinline__ void fetch_samples(const struct qs_product_args &args,
                                                     const struct job &job)
{
	const uint32_t row = weight_of(args)->turn % QS_WEIGHT_TILE;
	struct sampled sampled = sampled_of<NF4>(args, job, args.packed, row);
#pragma unroll 1
	for (; sampled.left; sampled.left--) {
		asm volatile("prefetch.global.L2 [%0];" ::"l"(sampled.source));
		sampled.source += sampled.columns;
	}
}

/* The warps that sample know what one of them has found out. */
static __device__ __forceinline__ void meet_samplers(void)
{
	meet<1 + QS_PAIRS>(SAMPLERS);
}

/* The warps that sample: one thread learns what is to be known of the weight, and another moves the
 * turn on, whatever the state of the tiles: blocks of one launch may find it changed. */
template <bool NF4>
static __device__ __forceinline__ void sample(const struct qs_product_args &args,
                                              const struct job &job, struct control *control,
                                              uint8_t *samples)
{
	if (sampler() == 0)
		know_validity(args, control);
	meet_samplers();
	if (args.flags & QS_PRODUCT_FROZEN)
		return;
	const uint32_t turn = control->turn, row = turn % QS_WEIGHT_TILE;
	struct sampled sampled = {};
	bool last = false;
	if (control->known)
		sampled = sampled_of<NF4>(args, job, control->packed, row);
	const uint32_t tiles = sampled.left;
	copy_first_samples(&sampled, samples);
	if (sampler() == 0)
		last = is_last_reader(args);
	const bool same = samples_are_same<NF4>(control, sampled, tiles, row, samples);
	if (__any_sync(FULL, !same) && threadIdx.x % WARP == 0)
		drop_weight(args, control);
	if (last)
		weight_of(args)->turn = turn + 1;
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

/* ---- blocks of a cluster, launches ------------------------------------------------------------
 */

/* The next launch may begin, if it is one that waits itself. */
static __device__ __forceinline__ void let_next_begin(void)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* The block has begun; waits until all blocks of the cluster have. */
static __device__ __forceinline__ void cluster_arrive(void)
{
#if HOPPER
	asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

static __device__ __forceinline__ void cluster_wait(void)
{
#if HOPPER
	asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

/* Writes to the place that `to` has in the memory of another block of the cluster, and tells its
 * mbarrier. A barrier of the cluster would do for that too, but makes each thread wait until all
 * that it ever wrote to global memory can be seen. */
static __device__ __forceinline__ void give(const float4 *to, uint64_t *landed, uint32_t rank,
                                            const float4 &value)
{
#if HOPPER
	asm volatile("{\n.reg .b32 place, tell;\nmapa.shared::cluster.u32 place, %0, %2;\n"
	             "mapa.shared::cluster.u32 tell, %1, %2;\n"
	             "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], "
	             "{%3, %4, %5, %6}, [tell];\n}" ::"r"(shared_address(to)),
	             "r"(shared_address(landed)), "r"(rank), "f"(value.x), "f"(value.y),
	             "f"(value.z), "f"(value.w)
	             : "memory");
#endif
}

/* By one thread, before the other blocks of the cluster know that this one has begun. */
static __device__ __forceinline__ void expect_landing(uint64_t *landed, uint32_t bytes)
{
#if HOPPER
	const uint32_t at = shared_address(landed);
	asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n"
	             "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
	             "fence.mbarrier_init.release.cluster;" ::"r"(at),
	             "r"(bytes)
	             : "memory");
#endif
}

/* What was expected has come, and can be read. */
static __device__ __forceinline__ void wait_for_landing(uint64_t *landed)
{
#if HOPPER
	asm volatile("{\n.reg .pred done;\nagain:\n"
	             "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
	             "@!done bra again;\n}" ::"r"(shared_address(landed))
	             : "memory");
#endif
}

/* ---- results -------------------------------------------------------------------------------- */

/* A warp's sums into shared memory, [token][row of the tile], scaled by the factor of its row. */
template <int TOKENS>
static __device__ __forceinline__ void lay_sums(const struct sums<TOKENS> &total,
                                                const struct job &job, uint32_t first,
                                                const float (*factors)[2], float *partial)
{
	const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
	for (int q = 0; q < QUARTERS; q++)
#pragma unroll
		for (int i = 0; i < TOKENS / 2; i++) {
			const uint32_t row = (job.half * QUARTERS + q) * QUARTER_ROWS + lane / 4;
			const uint32_t token = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
			if (token < job.tokens)
				partial[token * QS_PARTIAL_PITCH + row + i % 4 / 2 * 8] =
				        total.at[q][i / 4][i % 4] * factors[q][i % 4 / 2];
		}
}

/* The same of sums from tiles: these are codes' products, or lack the scale of the row. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void lay_packed(const struct qs_product_args &args,
                                                  const struct sums<TOKENS> &total,
                                                  const struct job &job, float *partial)
{
	float factors[QUARTERS][2];
#pragma unroll
	for (int i = 0; i < QUARTERS * 2; i++) {
		const int64_t row = ((int64_t)job.strip + job.row) * QS_WEIGHT_TILE +
		                    (job.half * QUARTERS + i / 2) * QUARTER_ROWS +
		                    threadIdx.x % WARP / 4 + i % 2 * 8;
		factors[i / 2][i % 2] = NF4            ? QS_NF4_UNSCALE
		                        : row < args.n ? scales_of(args)[row]
		                                       : 0;
	}
	lay_sums(total, job, 0, factors, partial);
}

/* The A operand of 16 rows and columns of W itself. */
static __device__ __forceinline__ void load_w(const struct qs_product_args &args, int64_t row,
                                              int64_t column, uint32_t *a)
{
	const unsigned lane = threadIdx.x % WARP;
	const bool pairs = rows_aligned(args.source, args.ld, 2);
	const uint16_t *source = (const uint16_t *)args.source + column + lane % 4 * 2;
	row += lane / 4;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		const int64_t at = row + i % 2 * 8;
		a[i] = at < args.n ? load_pair(source + at * args.ld + i / 2 * 8, pairs) : 0;
	}
}

/* The B operand of 16 columns of X and eight tokens, straight from memory. */
static __device__ __forceinline__ void load_b(const struct qs_product_args &args,
                                              const struct job &job, uint32_t token, int64_t column,
                                              uint32_t *b)
{
	const unsigned lane = threadIdx.x % WARP;
	const bool pairs = rows_aligned(args.x, args.ldx, 2);
	token += lane / 4;
	const uint16_t *x = (const uint16_t *)args.x + (int64_t)(job.token + token) * args.ldx +
	                    column + lane % 4 * 2;
#pragma unroll
	for (int i = 0; i < 2; i++)
		b[i] = token < job.tokens ? load_pair(x + i * 8, pairs) : 0;
}

/* A warp's part from W itself, for when the tiles are not valid: slow. A function of its own so
 * that the common path keeps its registers. */
static __device__ __noinline__ void lay_source(const struct qs_product_args &args, float *partial)
{
	const struct job job = job_of(args);
	const float factors[QUARTERS][2] = {{1, 1}, {1, 1}};
	const int64_t row = ((int64_t)job.strip + job.row) * QS_WEIGHT_TILE +
	                    job.half * QUARTERS * QUARTER_ROWS;
#pragma unroll 1
	for (uint32_t token = 0; token < job.tokens; token += 8) {
		struct sums<8> total = {
		};
#pragma unroll 1
		for (uint32_t i = job.first + job.turn; i < job.end; i += job.turns)
#pragma unroll 1
			for (int step = 0; step < STEPS; step++) {
				const int64_t column = (int64_t)i * QS_WEIGHT_TILE + step * 16;
				uint32_t b[2];
				load_b(args, job, token, column, b);
#pragma unroll
				for (int q = 0; q < QUARTERS; q++) {
					uint32_t a[4];
					load_w(args, row + q * QUARTER_ROWS, column, a);
					multiply(total.at[q][0], a, b);
				}
			}
		lay_sums(total, job, token, factors, partial);
	}
}

static __device__ __noinline__ float activated(float value, uint32_t activation)
{
	if (activation == QS_ACTIVATION_RELU)
		return fmaxf(value, 0);
	if (activation == QS_ACTIVATION_GELU)
		return 0.5f * value *
		       (1 + tanhf(0.7978845608f * (value + 0.044715f * value * value * value)));
	return value;
}

static __device__ __forceinline__ void finish(const struct qs_product_args &args, float sum,
                                              uint32_t token, int64_t row)
{
	const int64_t at = token * args.ldd + row;
	const bool wide = args.flags & QS_PRODUCT_FP32;
	float *d32 = (float *)args.d + at;
	uint16_t *d16 = (uint16_t *)args.d + at;
	float value = args.alpha * sum;
	if (args.beta != 0)
		value += args.beta * (wide ? *d32 : float_of(*d16));
	if (args.bias)
		value += float_of(((const uint16_t *)args.bias)[row]);
	if (args.activation)
		value = activated(value, args.activation);
	if (wide)
		*d32 = value;
	else
		*d16 = (uint16_t)bf16_of(value);
}

/* Adds sums of four rows, those of all turns (or blocks) in their order. They are all loaded before
 * the first is added: one after the other would take long. */
static __device__ __forceinline__ float4 add_turns(const float *partial, uint32_t turns,
                                                   uint32_t apart)
{
	float4 part[QS_PAIRS];
#pragma unroll
	for (uint32_t i = 0; i < QS_PAIRS; i++)
		if (i < turns)
			part[i] = *(const float4 *)(partial + i * apart);
	float4 sum = part[0];
#pragma unroll
	for (uint32_t i = 1; i < QS_PAIRS; i++) {
		if (i >= turns)
			continue;
		sum.x += part[i].x;
		sum.y += part[i].y;
		sum.z += part[i].z;
		sum.w += part[i].w;
	}
	return sum;
}

static_assert(QS_SPLIT_MAX <= QS_PAIRS, "blocks of a cluster are added as turns are");

/* Results are sums times alpha, in bf16, and four rows of a token can be stored at once. */
static __device__ __forceinline__ bool results_are_plain(const struct qs_product_args &args)
{
	return args.beta == 0 && args.bias == 0 && args.activation == QS_ACTIVATION_NONE &&
	       !(args.flags & QS_PRODUCT_FP32) && rows_aligned(args.d, args.ldd, 4);
}

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
	return bf16_of(low) | bf16_of(high) << 16;
}

/* Four rows' results, of any kind. A function of its own so that the plain ones keep their
 * registers. */
static __device__ __noinline__ void finish_any(const struct qs_product_args &args, float4 sum,
                                               uint32_t token, int64_t row)
{
#pragma unroll 1
	for (int i = 0; i < 4 && row + i < args.n; i++) {
		finish(args, sum.x, token, row + i);
		sum = make_float4(sum.y, sum.z, sum.w, 0);
	}
}

static __device__ __forceinline__ void finish_four(const struct qs_product_args &args, float4 sum,
                                                   uint32_t token, int64_t row)
{
	const float alpha = args.alpha;
	if (results_are_plain(args) && row + 4 <= args.n)
		*(uint2 *)((uint16_t *)args.d + token * args.ldd + row) =
		        make_uint2(bf16_pair(alpha * sum.x, alpha * sum.y),
		                   bf16_pair(alpha * sum.z, alpha * sum.w));
	else
		finish_any(args, sum, token, row);
}

/* Of the results of a cluster, four rows of a token each, a block finishes a share. */
struct results {
	uint32_t fours; /* log2 of a token's           */
	uint32_t count; /* of all                      */
	uint32_t share; /* of a block; the last's less */
};

static __device__ __forceinline__ struct results results_of(const struct qs_product_args &args,
                                                            const struct job &job)
{
	struct results results = {log2_of(args.strips * (QS_WEIGHT_TILE / 4))};
	results.count = job.tokens << results.fours;
	results.share = (results.count + args.split - 1) >> log2_of(args.split);
	return results;
}

/* Of which a block has so many. */
static __device__ __forceinline__ uint32_t share_of(const struct results &results, uint32_t rank)
{
	const uint32_t first = rank * results.share;
	return first < results.count ? min(results.share, results.count - first) : 0;
}

/* Where a block of a cluster finds its share of the sums of all blocks: behind the stages, which
 * may be in use when they come. */
static __device__ __forceinline__ float4 *landing(struct shared *shared, uint32_t strips)
{
#if HOPPER
	return (float4 *)(shared->ring + QS_RING_BYTES - strips * QS_LANDING_BYTES);
#else
	return NULL;
#endif
}

/* Tells the mbarrier what the block will be given by all of the cluster, itself included. */
static __device__ __forceinline__ void expect_sums(const struct qs_product_args &args,
                                                   const struct job &job, struct shared *shared)
{
	const struct results results = results_of(args, job);
	const uint32_t share = share_of(results, blockIdx.x & (args.split - 1));
	if (threadIdx.x == QS_MULTIPLIERS)
		expect_landing(&shared->control.landed,
		               share * args.split * (uint32_t)sizeof(float4));
}

/* Adds up what the block has, and gives it to the block that finishes it. */
template <int TOKENS>
static __device__ __forceinline__ void add_up(const struct qs_product_args &args,
                                              const struct job &job, struct shared *shared)
{
	const struct results results = results_of(args, job);
	const uint32_t apart = TOKENS * QS_PARTIAL_PITCH, rank = blockIdx.x & (args.split - 1);
#pragma unroll 1
	for (uint32_t i = threadIdx.x; i < results.count; i += QS_MULTIPLIERS) {
		const uint32_t token = i >> results.fours, row = (i - (token << results.fours)) * 4;
		const float *partial = (const float *)shared +
		                       row / QS_WEIGHT_TILE * job.turns * apart +
		                       token * QS_PARTIAL_PITCH + row % QS_WEIGHT_TILE;
		const float4 sum = add_turns(partial, job.turns, apart);
		if (args.split == 1) {
			finish_four(args, sum, job.token + token,
			            (int64_t)job.strip * QS_WEIGHT_TILE + row);
		} else {
			const uint32_t owner = (i >= results.share) + (i >= 2 * results.share) +
			                       (i >= 3 * results.share);
			give(landing(shared, args.strips) + rank * results.share + i -
			             owner * results.share,
			     &shared->control.landed, owner, sum);
		}
	}
}

/* Finishes the block's share of the cluster's results, when all have been given. */
static __device__ __forceinline__ void add_blocks(const struct qs_product_args &args,
                                                  const struct job &job, struct shared *shared)
{
	const struct results results = results_of(args, job);
	const uint32_t rank = blockIdx.x & (args.split - 1), first = rank * results.share;
	const uint32_t share = share_of(results, rank);
	wait_for_landing(&shared->control.landed);
#pragma unroll 1
	for (uint32_t i = threadIdx.x; i < share; i += QS_MULTIPLIERS) {
		const uint32_t token = (first + i) >> results.fours;
		const uint32_t row = (first + i - (token << results.fours)) * 4;
		const float4 sum = add_turns((const float *)(landing(shared, args.strips) + i),
		                             args.split, results.share * 4);
		finish_four(args, sum, job.token + token,
		            (int64_t)job.strip * QS_WEIGHT_TILE + row);
	}
}

/* ---- rings of stages ------------------------------------------------------------------------ */

#if HOPPER

static __device__ __forceinline__ void begin_barrier(uint64_t *barrier, uint32_t arrivals)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
	             "r"(arrivals)
	             : "memory");
}

static __device__ __forceinline__ void arrive(uint64_t *barrier)
{
	asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
	             : "memory");
}

static __device__ __forceinline__ void wait_for(uint64_t *barrier, uint32_t parity)
{
	asm volatile("{\n.reg .pred done;\nagain:\n"
	             "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
	             "@!done bra again;\n}" ::"r"(shared_address(barrier)),
	             "r"(parity)
	             : "memory");
}

/* One arrival, and what the copy engine will have brought until then. */
static __device__ __forceinline__ void expect(uint32_t barrier, uint32_t bytes)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
	             "r"(bytes)
	             : "memory");
}

/* A box of X from a token and a tile's columns on, to a multiple of 1024: for each tile and token a
 * row of 128 bytes, swizzled as above; zeros beyond the last token. `barrier` is told. */
static __device__ __forceinline__ void copy_box(const struct qs_mapped_args &args, uint32_t token,
                                                uint32_t tile, uint32_t to, uint32_t barrier)
{
	asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::"
	             "bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
	             "l"((const void *)args.map), "r"(0), "r"(token), "r"(tile), "r"(barrier)
	             : "memory");
}

/* Barriers: of the warps that feed; of all but those that sample, when these may begin to multiply;
 * by which one that feeds tells those that sample that the tiles are known. */
#define FED   1
#define BEGUN 2
#define KNOWN 3

/* By a warp that feeds, with the work ahead done. `table` is first in shared memory. */
static __device__ __forceinline__ void tell_tiles(const struct qs_product_args &args,
                                                  const uint8_t *table, struct control *control)
{
	if (threadIdx.x % WARP == 0) {
		know_tiles(args, control);
		/* so it is, but nobody has promised it */
		if ((shared_address(table) & 0xffff) != SHARED_START)
			control->known = 0;
	}
	__syncwarp();
	asm volatile("bar.arrive %0, %1;" ::"n"(KNOWN), "n"(SAMPLERS + WARP) : "memory");
}

/* A walk through a ring. */
template <uint32_t COUNT> struct stage {
	uint32_t at, parity;

	__device__ __forceinline__ void next(void)
	{
		at++;
		if (at == COUNT) {
			at = 0;
			parity ^= 1;
		}
	}
};

#endif

/* ---- products ------------------------------------------------------------------------------- */

/* A part's products. `x`: the lane's address from x_lane in X of the tile's columns. `scales`:
 * shared address of those of the part. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply_part(struct sums<TOKENS> *total, const struct part<NF4> &part, struct table table,
              uint32_t x, uint32_t scales)
{
	struct sums<TOKENS> sum = {
	};
	struct sums<TOKENS> *to = NF4 ? &sum : total;
#pragma unroll
	for (int step = 0; step < STEPS; step++) {
		uint32_t b[TOKENS / 8][2];
		if (TOKENS > 16) /* keeps the compiler from loading all of X first, and spilling */
			__syncwarp();
		load_x<TOKENS>(x, step, b);
#pragma unroll
		for (int q = 0; q < QUARTERS; q++) {
			uint32_t a[4];
			decode(part, table, q, step, a);
#pragma unroll
			for (int i = 0; i < TOKENS / 8; i++)
				multiply(to->at[q][i], a, b[i]);
		}
	}
	if constexpr (NF4) {
		uint32_t absmax[QUARTERS];
		load_scales(scales, absmax);
#pragma unroll
		for (int q = 0; q < QUARTERS; q++)
			promote(total, sum, q, absmax[q]);
	}
}

/* A warp's sums to where they are added up. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void lay(const struct qs_product_args &args,
                                           const struct sums<TOKENS> &total, struct shared *shared)
{
	const struct job job = job_of(args);
	float *partial =
	        (float *)shared + (job.row * job.turns + job.turn) * TOKENS * QS_PARTIAL_PITCH;
	if (tiles_are_valid(&shared->control) && !shared->control.changed)
		lay_packed<TOKENS, NF4>(args, total, job, partial);
	else
		lay_source(args, partial);
}

#if HOPPER

/* Moves registers of a multiprocessor from the warps that sample to those that multiply. Both work
 * as whole groups of four warps. */
template <int TOKENS> static __device__ __forceinline__ void take_registers(void)
{
	if (TOKENS > 16)
		asm volatile("setmaxnreg.inc.sync.aligned.u32 96;");
}

template <int TOKENS> static __device__ __forceinline__ void leave_registers(void)
{
	if (TOKENS > 16)
		asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
}

/* Stages of shared memory that two warps fill and the others multiply. A stage is what a step
 * takes: a tile for each pair of warps, in their order, and X of their columns. The copy engine
 * brings both, told by a thread of each warp; X without a map, of which no row need be aligned, is
 * copied by the threads of its warp. (Stages of half a step were slower, and all warps must wait
 * for each stage in turn: who has missed a turn of a barrier cannot tell the next one from it.) */
template <int TOKENS, bool NF4>
static constexpr uint32_t ring_stages = QS_RING_STAGES(TOKENS, tile_bytes<NF4>);

static_assert(ring_stages<8, true> <= QS_RING_STAGES_MAX, "there are barriers for all");

/* Of the tiles of a stage, and of its X, which starts at a multiple of 1024. */
template <bool NF4> static constexpr uint32_t stage_tile_bytes = QS_STAGE_TILES(tile_bytes<NF4>);

template <int TOKENS>
static __device__ __forceinline__ uint32_t stage_x_bytes(const struct job &job)
{
	return x_bytes<TOKENS> << log2_of(job.turns);
}

/* The slots of samples in the gaps of a table. */
static __device__ __forceinline__ uint8_t *samples_in(uint8_t *table)
{
	return table + 128;
}

#define FEEDERS (QS_HOPPER_THREADS - QS_MULTIPLIERS - SAMPLERS)

/* Number of a thread among those that feed. */
static __device__ __forceinline__ uint32_t feeder(void)
{
	return threadIdx.x - QS_MULTIPLIERS;
}

/* By a warp, before any other thread uses them. `arrivals`: at a full stage. */
template <uint32_t COUNT>
static __device__ __forceinline__ void begin_ring(struct shared *shared, uint32_t arrivals)
{
	static_assert(COUNT <= WARP, "a stage a lane");
	if (threadIdx.x % WARP < COUNT) {
		begin_barrier(&shared->full[threadIdx.x % WARP], arrivals);
		begin_barrier(&shared->empty[threadIdx.x % WARP], QS_MULTIPLIERS / WARP);
	}
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Tiles of a block, which are copied a stage at a time. */
template <bool NF4> struct tile_walk {
	const uint8_t *first;
	int64_t apart;   /* from a strip to the next     */
	uint32_t strips; /* of the block that exist      */
	uint32_t bytes;  /* tiles of a stage in a strip  */
	uint32_t all;    /* of the block in a strip      */

	__device__ __forceinline__ tile_walk(const struct job &job, uint32_t strips_of_block,
	                                     uint64_t packed)
	{
		first = tile_at<NF4>(packed, job, job.strip, job.first);
		apart = (int64_t)job.chunks * tile_bytes<NF4>;
		strips = min(strips_of_block, job.strips - job.strip);
		bytes = job.turns * tile_bytes<NF4>;
		all = (job.end - job.first) * tile_bytes<NF4>;
	}

	/* Those of stage `number`, by one thread, to the shared address `to`; the barrier `full`
	 * is told. Strips that do not exist are multiplied too, for nothing: whatever is there
	 * will do. */
	__device__ __forceinline__ void copy(uint32_t number, uint32_t to, uint32_t full) const
	{
		const uint32_t at = min(number * bytes, all), count = min(bytes, all - at);
		const uint8_t *tiles = first + at;
		expect(full, strips * count);
#pragma unroll 1
		for (uint32_t i = 0; i < strips && count; i++) {
			asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::"
			             "bytes [%0], [%1], %2, [%3];" ::"r"(to),
			             "l"(tiles), "r"(count), "r"(full)
			             : "memory");
			to += bytes;
			tiles += apart;
		}
	}
};

/* X of a block, a stage at a time. Of a stage, each turn has as many rows as the block has tokens,
 * 128 bytes each, swizzled by the lowest three bits of the number of the row. */
struct x_walk {
	uint32_t token, first, end; /* tokens from, chunks from and to */
	uint32_t turns, rows;       /* of a stage; of a turn           */
	uint32_t tokens;            /* that are there                  */

	__device__ __forceinline__ x_walk(const struct job &job, uint32_t rows_of_turn)
	{
		token = job.token;
		first = job.first;
		end = job.end;
		turns = job.turns;
		rows = rows_of_turn;
		tokens = job.tokens;
	}

	/* That of stage `number`, by one thread through the map, to the shared address `to`. */
	__device__ __forceinline__ void copy_mapped(const struct qs_mapped_args &args,
	                                            uint32_t number, uint32_t to,
	                                            uint32_t full) const
	{
		expect(full, turns * rows * 128);
		copy_box(args, token, first + number * turns, to, full);
	}

	/* Without a map, by a warp, 16 bytes a lane at a time. `full` is told when they have come,
	 * or at once if they were stored. */
	__device__ __forceinline__ void copy_rows(const struct qs_product_args &args,
	                                          uint32_t number, uint32_t to, uint32_t full) const
	{
		const uint32_t chunks = turns * (QS_WEIGHT_TILE / CHUNK), shift = log2_of(chunks);
		const uint32_t chunk = first + number * turns;
		const bool aligned = rows_aligned(args.x, args.ldx, CHUNK);
#pragma unroll 1
		for (uint32_t i = threadIdx.x % WARP; i < tokens << shift; i += WARP) {
			const uint32_t at = i & (chunks - 1), row = at / 8 * rows + (i >> shift);
			const uint32_t place = to + row * 128 + (at % 8 ^ row % 8) * 16;
			const uint16_t *source = (const uint16_t *)args.x +
			                         (int64_t)(token + (i >> shift)) * args.ldx +
			                         (int64_t)chunk * QS_WEIGHT_TILE + at * CHUNK;
			if (chunk + at / 8 >= end)
				continue;
			if (aligned)
				copy_16(place, source);
			else
				store_16(place, load_unaligned(source));
		}
		if (aligned)
			asm volatile(
			        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full)
			        : "memory");
		else
			asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(full)
			             : "memory");
	}
};

/* The place of a block's ring, and how many stages it walks through. */
template <int TOKENS, bool NF4> struct ring {
	uint32_t stages, full, pitch; /* shared addresses, and from a stage to the next */
	uint32_t count, at_once;      /* stages to walk, and how many there are room for */

	__device__ __forceinline__ ring(const struct job &job, struct shared *shared)
	{
		stages = shared_address(shared->ring);
		full = shared_address(shared->full);
		pitch = stage_tile_bytes<NF4> + stage_x_bytes<TOKENS>(job);
		count = (job.end - job.first + job.turns - 1) >> log2_of(job.turns);
		at_once = min(count, ring_stages<TOKENS, NF4>);
	}
};

/* Fills the first stages by a lane each, which nobody has used: COPY(number, stage, full) takes
 * their shared addresses. */
template <int TOKENS, bool NF4, typename COPY>
static __device__ __forceinline__ void fill_first(const struct ring<TOKENS, NF4> &ring, COPY copy)
{
	const uint32_t lane = threadIdx.x % WARP;
	if (lane < ring.at_once)
		copy(lane, ring.stages + lane * ring.pitch, ring.full + lane * 8);
	__syncwarp();
}

/* Fills stages from number `first` on, each when it is empty. */
template <int TOKENS, bool NF4, typename COPY>
static __device__ __forceinline__ void fill_stages(const struct ring<TOKENS, NF4> &ring,
                                                   struct shared *shared, uint32_t first, COPY copy)
{
	constexpr uint32_t room = ring_stages<TOKENS, NF4>;
	struct stage<room> stage = {
		0, first ? 0u : 1u
	}; /* each is empty at first */
#pragma unroll 1
	for (uint32_t i = first; i < ring.count; i++) {
		wait_for(&shared->empty[stage.at], stage.parity);
		copy(i, ring.stages + stage.at * ring.pitch, ring.full + stage.at * 8);
		stage.next();
	}
}

/* A warp that brings tiles, the first before the work ahead has ended: it does not look at what
 * they contain. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void feed_tiles(const struct qs_product_args &args,
                                                  struct shared *shared)
{
	const struct job job = job_of(args);
	const struct ring<TOKENS, NF4> ring(job, shared);
	const auto from = [&](uint64_t packed) {
		const struct tile_walk<NF4> walk(job, args.strips, packed);
		return [=](uint32_t number, uint32_t stage, uint32_t full) {
			walk.copy(number, stage, full);
		};
	};
	begin_ring<ring_stages<TOKENS, NF4>>(shared, args.flags & QS_PRODUCT_MAPPED ? 2 : 1 + WARP);
	__syncwarp();
	if (args.packed)
		fill_first(ring, from(args.packed));
	meet<FED>(2 * WARP);
	wait_for_work_ahead();
	tell_tiles(args, shared->table, &shared->control);
	meet<BEGUN>(QS_MULTIPLIERS + 2 * WARP);
	let_next_begin();
	if (threadIdx.x % WARP == 0) {
		if (shared->control.known)
			fill_stages(ring, shared, args.packed ? ring.at_once : 0,
			            from(shared->control.packed));
		else /* nobody multiplies; what is on its way must come nevertheless */
			for (uint32_t i = 0; i < ring.at_once && args.packed; i++)
				wait_for(&shared->full[i], 0);
	}
	__syncthreads();
}

/* A warp that brings X. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void feed_x(const struct qs_mapped_args &args,
                                              struct shared *shared)
{
	const bool packed = args.product.packed, leads = threadIdx.x % WARP == 0;
	const struct job job = job_of(args.product);
	const struct ring<TOKENS, NF4> ring(job, shared);
	const struct x_walk walk(job, min(args.product.tokens, TOKENS));
	const auto mapped = [&](uint32_t number, uint32_t stage, uint32_t full) {
		walk.copy_mapped(args, number, stage + stage_tile_bytes<NF4>, full);
	};
	const auto rows = [&](uint32_t number, uint32_t stage, uint32_t full) {
		walk.copy_rows(args.product, number, stage + stage_tile_bytes<NF4>, full);
	};
	if (leads && args.product.flags & QS_PRODUCT_MAPPED)
		asm volatile("prefetch.tensormap [%0];" ::"l"((const void *)args.map) : "memory");
	meet<FED>(2 * WARP);
	wait_for_work_ahead();
	if (args.product.flags & QS_PRODUCT_MAPPED) {
		if (packed)
			fill_first(ring, mapped);
		meet<BEGUN>(QS_MULTIPLIERS + 2 * WARP);
		if (leads && shared->control.known)
			fill_stages(ring, shared, packed ? ring.at_once : 0, mapped);
	} else {
		meet<BEGUN>(QS_MULTIPLIERS + 2 * WARP);
		for (uint32_t i = 0; i < ring.at_once && packed; i++)
			rows(i, ring.stages + i * ring.pitch, ring.full + i * 8);
		if (shared->control.known)
			fill_stages(ring, shared, packed ? ring.at_once : 0, rows);
	}
	__syncthreads();
}

template <int TOKENS, bool NF4>
static __device__ __forceinline__ void multiply_packed(struct sums<TOKENS> *total,
                                                       const struct job &job, uint32_t tokens,
                                                       struct shared *shared)
{
	constexpr uint32_t room = ring_stages<TOKENS, NF4>;
	const struct ring<TOKENS, NF4> ring(job, shared);
	const struct table table = table_at(shared_address(shared->table));
	const uint32_t tile = ring.stages + (job.row * job.turns + job.turn) * tile_bytes<NF4>;
	const uint32_t codes = tile + part_of_tile(job);
	const uint32_t scales = tile + QS_NF4_CODE_BYTES + job.half * QUARTERS * 32;
	const uint32_t x =
	        ring.stages + stage_tile_bytes<NF4> + x_lane(job.turn * min(tokens, TOKENS));
	struct stage<room> stage = {
		0, 0
	};
#pragma unroll 1
	for (uint32_t step = 0; step < ring.count; step++) {
		const uint32_t at = stage.at * ring.pitch;
		wait_for(&shared->full[stage.at], stage.parity);
		if (job.first + step * job.turns + job.turn < job.end) {
			struct part<NF4> part;
			take_part<NF4>(at + codes, &part);
			multiply_part<TOKENS, NF4>(total, part, table, at + x, at + scales);
		}
		__syncwarp();
		if (threadIdx.x % WARP == 0)
			arrive(&shared->empty[stage.at]);
		stage.next();
	}
}

/* The warps that multiply: sums of tiles, or of W itself where they turn out not to be W's. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void work(const struct qs_product_args &args,
                                            struct shared *shared)
{
	struct sums<TOKENS> total = {
	};
	if (NF4)
		fill_table<QS_MULTIPLIERS>(shared->table);
	wait_for_work_ahead();
	meet<BEGUN>(QS_MULTIPLIERS + 2 * WARP);
	let_next_begin();
	if (shared->control.known)
		multiply_packed<TOKENS, NF4>(&total, job_of(args), args.tokens, shared);
	__syncthreads();
	lay<TOKENS, NF4>(args, total, shared);
}

#else

/* Parts of tiles that a warp has on their way: what a multiprocessor needs at its share of the
 * bandwidth for as long as memory takes, and what there are registers for. */
template <int TOKENS, bool NF4> static constexpr bool in_ring = NF4 &&TOKENS > 16;
template <int TOKENS, bool NF4>
static constexpr int parts_ahead = in_ring<TOKENS, NF4> ? RING
                                   : NF4 ? (TOKENS <= 8 ? 4 : 3)
                                   : TOKENS <= 8 ? 3
                                   : TOKENS <= 16 ? 2
                                                  : 1;

/* A warp's parts, all of them, and what its turn does with X. */
template <int TOKENS, bool NF4> struct worker {
	static constexpr int ahead = parts_ahead<TOKENS, NF4>;
	struct part<NF4> parts[in_ring<TOKENS, NF4> ? 1 : ahead];
	const uint8_t *next; /* the lane's first part that is not on its way */
	struct x_share share;
	uint32_t table, scales, x; /* shared addresses; of the turn's X in the first stage */
};

template <int TOKENS, bool NF4>
static __device__ __forceinline__ void load_first(struct worker<TOKENS, NF4> *worker,
                                                  const struct job &job, uint64_t packed)
{
	const uint32_t tiles = tiles_of(job), stride = job.turns * tile_bytes<NF4>;
	worker->next = parts_of<NF4>(job, packed);
	if (NF4)
#pragma unroll
		for (uint32_t i = 0; i < QS_STAGES - 1; i++)
			if (i < tiles)
				copy_scales(worker->next + i * stride, job, worker->scales, i);
#pragma unroll
	for (uint32_t i = 0; i < worker->ahead; i++) {
		if (i < tiles) {
			if constexpr (in_ring<TOKENS, NF4>)
				copy_codes(worker->next, worker->table, i);
			else
				load_part<NF4>(worker->next, &worker->parts[i]);
		}
		worker->next += stride;
	}
}

/* The copies that a step needs have come, and nobody reads X of the step before. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void begin_step(const struct job &job, uint32_t strips)
{
	copies_wait<QS_STAGES - 2>();
	meet_turn(job.turn, strips * 2 * WARP);
}

template <int TOKENS, bool NF4>
static __device__ __forceinline__ void
multiply_packed(struct sums<TOKENS> *total, struct worker<TOKENS, NF4> *worker,
                const struct qs_product_args &args, const struct job &job)
{
	constexpr bool ringed = in_ring<TOKENS, NF4>;
	const uint32_t steps = tiles_of(job);
	const int32_t stride = job.turns * tile_bytes<NF4>;
	const struct table table = table_at(worker->table);
	for (uint32_t first = 0; first < steps; first += worker->ahead) {
#pragma unroll
		for (int i = 0; i < worker->ahead; i++) {
			const uint32_t step = first + i, then = step + QS_STAGES - 1;
			struct part<NF4> *part = &worker->parts[ringed ? 0 : i];
			if (step >= steps)
				break;
			begin_step<TOKENS, NF4>(job, args.strips);
			if constexpr (ringed) {
				take_codes(worker->table, step, part);
				if (step + RING < steps)
					copy_codes(worker->next, worker->table, step);
			}
			if (NF4 && then < steps)
				copy_scales(worker->next + (QS_STAGES - 1 - worker->ahead) * stride,
				            job, worker->scales, then);
			copy_x<TOKENS>(&worker->share, job, then < steps,
			               worker->x + stage_of<TOKENS>(then, job), args.ldx);
			multiply_part<TOKENS, NF4>(total, *part, table,
			                           worker->x + stage_of<TOKENS>(step, job) +
			                                   x_lane(),
			                           scales_at(worker->scales, step));
			if constexpr (!ringed)
				if (step + worker->ahead < steps)
					load_part<NF4>(worker->next, part);
			worker->next += stride;
		}
	}
}

/* The warps that multiply. First everything that does not need the tiles, while these are on their
 * way; then sums of tiles, or of W itself where they turn out not to be W's. */
template <int TOKENS, bool NF4>
static __device__ __forceinline__ void work(const struct qs_product_args &args,
                                            struct shared *shared)
{
	const struct job job = job_of(args);
	struct worker<TOKENS, NF4> worker;
	struct sums<TOKENS> total = {
	};
	worker.table = shared_address(shared->table);
	worker.scales = shared_address(shared->scales);
	if (args.packed)
		load_first(&worker, job, args.packed);
	if (NF4)
		fill_table<QS_MULTIPLIERS>(shared->table);
	wait_for_work_ahead();
	worker.x = shared_address(shared->x) + job.turn * x_bytes<TOKENS>;
	worker.share = x_share_of(args, job);
#pragma unroll 1
	for (uint32_t i = 0; i < QS_STAGES - 1; i++)
		copy_x<TOKENS>(&worker.share, job, i < tiles_of(job),
		               worker.x + stage_of<TOKENS>(i, job), args.ldx);
	__syncthreads();
	let_next_begin();
	if (shared->control.known) {
		if (!args.packed) {
			load_first(&worker, job, shared->control.packed);
			copies_commit();
			copies_wait<0>();
		}
		multiply_packed(&total, &worker, args, job);
	}
	copies_wait<0>(); /* into what is used for sums next */
	__syncthreads();
	lay<TOKENS, NF4>(args, total, shared);
}

#endif

/* The warps that sample, in step with these. JOB says what the block works on. */
template <bool NF4, struct job JOB(const struct qs_product_args &)>
static __device__ __forceinline__ void help(const struct qs_product_args &args,
                                            struct control *control, uint8_t *samples)
{
	if (sampler() < WARP)
		fill_range(control, threadIdx.x % WARP);
	if ((args.flags & (QS_PRODUCT_EARLY | QS_PRODUCT_FROZEN)) == QS_PRODUCT_EARLY &&
	    args.packed)
		fetch_samples<NF4>(args, JOB(args));
	wait_for_work_ahead();
#if HOPPER
	meet<KNOWN>(SAMPLERS + WARP);
#else
	if (sampler() == 0)
		know_tiles(args, control);
	__syncthreads();
	let_next_begin();
#endif
	sample<NF4>(args, JOB(args), control, samples);
	copies_wait<0>();
	__syncthreads();
}

/* By all threads, when the sums of all warps are in shared memory, and before those of others can
 * be written into other blocks. */
static __device__ __forceinline__ void sums_are_laid(const struct qs_product_args &args)
{
	__syncthreads();
	if (args.split > 1)
		cluster_wait();
}

/* The results, by the warps that multiply: the others have few registers. */
template <int TOKENS>
static __device__ __forceinline__ void finish_block(const struct qs_product_args &args,
                                                    struct shared *shared)
{
	const struct job job = job_of(args);
	sums_are_laid(args);
	add_up<TOKENS>(args, job, shared);
	if (args.split > 1)
		add_blocks(args, job, shared);
}

template <int TOKENS, bool NF4>
static __device__ __forceinline__ void product(const struct qs_mapped_args &mapped)
{
	const struct qs_product_args &args = mapped.product;
	extern __shared__ __align__(1024) uint8_t memory[];
	struct shared *shared = (struct shared *)memory;
	if (args.split > 1) {
		if (threadIdx.x >= QS_MULTIPLIERS) /* those that multiply are in a hurry */
			expect_sums(args, job_of(args), shared);
		cluster_arrive();
	}
	if (!(args.flags & QS_PRODUCT_EARLY))
		wait_for_work_ahead();
	if (threadIdx.x < QS_MULTIPLIERS) {
#if HOPPER
		take_registers<TOKENS>();
#endif
		work<TOKENS, NF4>(args, shared);
		finish_block<TOKENS>(args, shared);
	} else {
#if HOPPER
		leave_registers<TOKENS>();
#endif
#if HOPPER
		if (feeder() < WARP)
			feed_tiles<TOKENS, NF4>(args, shared);
		else if (feeder() < 2 * WARP)
			feed_x<TOKENS, NF4>(mapped, shared);
		else if (feeder() < FEEDERS)
			__syncthreads();
		else
			help<NF4, job_of>(args, &shared->control, samples_in(shared->table));
#else
		help<NF4, job_of>(args, &shared->control, shared->samples);
#endif
		sums_are_laid(args);
	}
}

/* ---- wide products -------------------------------------------------------------------------- */

/* With more tokens the tensor cores are the limit, and the L2 cache, from which X comes. A block
 * has two strips, each of which a group of four warps multiplies with up to 128 tokens by wgmma, so
 * that a tile is decoded once for all of these: its A operand is laid out as that of mma.sync, and
 * comes from registers. While a tile is multiplied the next one is decoded. A thread of a third
 * group has the copy engine read X into a ring of stages, and the warps of a fourth sample W. The
 * scale goes into the weights, one rounding of each: scaling sums would take as long as the
 * product. */

#if HOPPER

#define WIDE_AHEAD 12 /* tiles of a strip that are on their way into the L2 cache */

template <int TOKENS> static constexpr uint32_t wide_stages = QS_WIDE_STAGES *QS_WIDE_SPAN / TOKENS;

struct wide_shared {
	uint8_t table[QS_TABLE_BYTES];
	uint8_t x[QS_WIDE_X_BYTES];
	uint8_t landing[QS_WIDE_LANDING_BYTES]; /* sums that the cluster gives this block */
	struct control control;
	uint64_t full[2 * QS_WIDE_STAGES];  /* mbarriers: X of a stage has come  */
	uint64_t empty[2 * QS_WIDE_STAGES]; /* and has been multiplied           */
};

static_assert(sizeof(struct wide_shared) <= QS_WIDE_SHARED, "the host allocates so much");
static_assert(offsetof(struct wide_shared, x) % 1024 == 0, "swizzled rows start there");

/* Of it, `row`, `turn` and `half` are not used. */
template <int TOKENS>
static __device__ __forceinline__ struct job wide_job_of(const struct qs_product_args &args)
{
	const uint32_t rank = blockIdx.x & (args.split - 1),
	               place = blockIdx.x >> log2_of(args.split);
	const uint32_t spans = (args.tokens + TOKENS - 1) / TOKENS;
	struct job job = {};
	job.strips = (uint32_t)qs_shares(args.n, QS_WEIGHT_TILE);
	job.strip = place / spans * QS_WIDE_STRIPS;
	job.chunks = (uint32_t)(args.k / QS_WEIGHT_TILE);
	const uint32_t share = (job.chunks + args.split - 1) >> log2_of(args.split);
	job.first = min(rank * share, job.chunks);
	job.end = min(job.first + share, job.chunks);
	job.token = place % spans * TOKENS;
	job.tokens = min(args.tokens - job.token, TOKENS);
	return job;
}

/* ---- X and tiles, for wide products --------------------------------------------------------- */

/* By one thread, before any other uses them. */
static __device__ __forceinline__ void begin_stages(struct wide_shared *shared)
{
	for (uint32_t i = 0; i < 2 * QS_WIDE_STAGES; i++) {
		begin_barrier(&shared->full[i], 1);
		begin_barrier(&shared->empty[i], QS_WIDE_MULTIPLIERS / WARP);
	}
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* X of a tile's columns. */
template <int TOKENS>
static __device__ __forceinline__ void copy_stage(const struct qs_mapped_args &args,
                                                  struct wide_shared *shared, uint32_t stage,
                                                  uint32_t chunk, uint32_t token)
{
	const uint32_t full = shared_address(&shared->full[stage]);
	expect(full, x_bytes<TOKENS>);
	copy_box(args, token, chunk, shared_address(shared->x + stage * x_bytes<TOKENS>), full);
}

/* Brings tile `chunk` of each strip into the L2 cache. */
static __device__ __forceinline__ void fetch_tiles(const struct job &job, uint64_t packed,
                                                   uint32_t chunk)
{
	for (uint32_t i = 0; i < QS_WIDE_STRIPS; i++)
		if (job.strip + i < job.strips)
			asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
			                     tile_at<true>(packed, job, job.strip + i, chunk)),
			             "n"(QS_NF4_TILE_BYTES)
			             : "memory");
}

template <int TOKENS>
static __device__ __forceinline__ void feed_all(const struct qs_mapped_args &args,
                                                const struct job &job, struct wide_shared *shared)
{
	struct stage<wide_stages<TOKENS>> stage = {
		0, 1
	}; /* each is empty at first */
#pragma unroll 1
	for (uint32_t i = job.first; i < job.end; i++) {
		wait_for(&shared->empty[stage.at], stage.parity);
		copy_stage<TOKENS>(args, shared, stage.at, i, job.token);
		if (i + WIDE_AHEAD < job.end)
			fetch_tiles(job, shared->control.packed, i + WIDE_AHEAD);
		stage.next();
	}
}

/* One thread of these warps feeds the others. Before the work ahead has ended it fetches tiles,
 * whose contents it does not look at. */
template <int TOKENS>
static __device__ __forceinline__ void feed(const struct qs_mapped_args &args,
                                            struct wide_shared *shared)
{
	const struct job job = wide_job_of<TOKENS>(args.product);
	const bool feeds = threadIdx.x == QS_WIDE_MULTIPLIERS;
	if (feeds) {
		begin_stages(shared);
		if (args.product.packed)
			for (uint32_t i = job.first; i < min(job.first + WIDE_AHEAD, job.end); i++)
				fetch_tiles(job, args.product.packed, i);
	}
	wait_for_work_ahead();
	if (threadIdx.x / WARP == QS_WIDE_MULTIPLIERS / WARP)
		tell_tiles(args.product, shared->table, &shared->control);
	meet<BEGUN>(QS_WIDE_THREADS - SAMPLERS);
	let_next_begin();
	if (feeds && shared->control.known)
		feed_all<TOKENS>(args, job, shared);
	__syncthreads();
}

/* A lane's share of a tile: its quarter is that of the warp in its group. */
struct wide_part {
	uint4 codes;
	uint32_t absmax; /* of rows g and g + 8 */
};

/* `tile`: from the lane's codes in one tile to those in the next are QS_NF4_TILE_BYTES. */
static __device__ __forceinline__ struct wide_part load_wide(const uint8_t *tile)
{
	const uint32_t thread = threadIdx.x % 128, lane = thread % WARP;
	const int32_t absmax = QS_NF4_CODE_BYTES + thread / WARP * 32 + lane / 4 * 4 - thread * 16;
	struct wide_part part;
	part.codes = load_codes(tile);
	asm volatile("ld.global.u32 %0, [%1];" : "=r"(part.absmax) : "l"(tile + absmax));
	return part;
}

static __device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, uint32_t scales)
{
	uint32_t result;
	asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(scales));
	return result;
}

/* The A operands of a tile, a step of 16 columns after the other. They are made here, not where
 * they are used. */
static __device__ __forceinline__ void decode_wide(const struct wide_part &part, struct table table,
                                                   uint32_t (*a)[4])
{
	const uint32_t low = __byte_perm(part.absmax, 0, 0x1010);
	const uint32_t high = __byte_perm(part.absmax, 0, 0x3232);
#pragma unroll
	for (int step = 0; step < STEPS; step++) {
		decode_nf4(word_of(part.codes, step), table, a[step]);
#pragma unroll
		for (int i = 0; i < 4; i++)
			a[step][i] = scaled_pair(a[step][i], i % 2 ? high : low);
		asm volatile(""
		             : "+r"(a[step][0]), "+r"(a[step][1]), "+r"(a[step][2]),
		               "+r"(a[step][3]));
	}
}

/* ---- wgmma ---------------------------------------------------------------------------------- */

/* Sums of a lane over its quarter of a strip and eight tokens each, as mma.m16n8k16 leaves them. */
template <int TOKENS> struct wide_sums {
	float at[TOKENS / 8][4];
};

/* The B operand whose rows of 128 bytes start at a shared address: one for each token, swizzled, in
 * groups of eight. */
static __device__ __forceinline__ uint64_t wide_x(uint32_t address)
{
	return (uint64_t)1 << 62 | (uint64_t)(1024 / 16) << 32 | 1 << 16 | (address & 0x3ffff) / 16;
}

#define SUMS_1(i)  "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SUMS_4(i)  SUMS_1(i), SUMS_1(i + 1), SUMS_1(i + 2), SUMS_1(i + 3)
#define SUMS_8(i)  SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)

/* sums += W X' of 16 columns, begun only. */
static __device__ __forceinline__ void multiply_wide(struct wide_sums<64> *sums, const uint32_t *a,
                                                     uint64_t b)
{
	float(*d)[4] = sums->at;
	asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
	             "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
	             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
	             "%16, %17, %18, %19, %20, %21, %22, %23, "
	             "%24, %25, %26, %27, %28, %29, %30, %31}, "
	             "{%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
	             : SUMS_8(0)
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void multiply_wide(struct wide_sums<128> *sums, const uint32_t *a,
                                                     uint64_t b)
{
	float(*d)[4] = sums->at;
	asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
	             "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
	             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
	             "%16, %17, %18, %19, %20, %21, %22, %23, "
	             "%24, %25, %26, %27, %28, %29, %30, %31, "
	             "%32, %33, %34, %35, %36, %37, %38, %39, "
	             "%40, %41, %42, %43, %44, %45, %46, %47, "
	             "%48, %49, %50, %51, %52, %53, %54, %55, "
	             "%56, %57, %58, %59, %60, %61, %62, %63}, "
	             "{%64, %65, %66, %67}, %68, add, 1, 1, 0;\n}"
	             : SUMS_16(0)
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef SUMS_1
#undef SUMS_4
#undef SUMS_8
#undef SUMS_16

/* All of a tile with the X of a stage, begun only. */
template <int TOKENS>
static __device__ __forceinline__ void begin_tile(struct wide_sums<TOKENS> *sums,
                                                  const uint32_t (*a)[4], uint32_t x)
{
	const uint64_t b = wide_x(x);
	asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
	for (int step = 0; step < STEPS; step++)
		multiply_wide(sums, a[step], b + step * 2); /* 32 bytes further in each row */
	asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void end_tile(void)
{
	asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/* What a group of warps walks along. */
template <int TOKENS> struct wide_walk {
	const uint8_t *tiles;      /* the lane's codes in the first tile         */
	uint32_t steps;            /* tiles                                      */
	struct wide_part parts[2]; /* of the next tiles, before they are decoded */
	uint32_t a[2][STEPS][4];   /* of this tile and the next                  */
	struct stage<wide_stages<TOKENS>> stage;
};

/* Beyond the last tile this one, for nothing. */
template <int TOKENS>
static __device__ __forceinline__ struct wide_part part_at(const struct wide_walk<TOKENS> &walk,
                                                           uint32_t step)
{
	return load_wide(walk.tiles + (int64_t)min(step, walk.steps - 1) * QS_NF4_TILE_BYTES);
}

/* Multiplies tile `step`, whose number is ODD or not, and decodes the next one meanwhile. */
template <int TOKENS, int ODD>
static __device__ __forceinline__ void
take_step(struct wide_sums<TOKENS> *sums, struct wide_walk<TOKENS> *walk,
          struct wide_shared *shared, struct table table, uint32_t step)
{
	const uint32_t at = walk->stage.at;
	wait_for(&shared->full[at], walk->stage.parity);
	begin_tile(sums, walk->a[ODD], shared_address(shared->x + at * x_bytes<TOKENS>));
	decode_wide(walk->parts[!ODD], table, walk->a[!ODD]);
	walk->parts[!ODD] = part_at(*walk, step + 3);
	end_tile();
	if (threadIdx.x % WARP == 0)
		arrive(&shared->empty[at]);
	walk->stage.next();
}

template <int TOKENS>
static __device__ __forceinline__ void walk_along(struct wide_sums<TOKENS> *sums,
                                                  const struct job &job, struct wide_shared *shared)
{
	/* beyond the last strip this one is multiplied, for nothing */
	const uint32_t strip = min(job.strip + threadIdx.x / 128, job.strips - 1);
	const struct table table = table_at(shared_address(shared->table));
	struct wide_walk<TOKENS> walk;
	walk.steps = job.end - job.first;
	if (walk.steps == 0)
		return;
	walk.tiles = tile_at<true>(shared->control.packed, job, strip, job.first) +
	             threadIdx.x % 128 * 16;
	walk.stage = {0, 0};
	walk.parts[0] = part_at(walk, 0);
	walk.parts[1] = part_at(walk, 1);
	decode_wide(walk.parts[0], table, walk.a[0]);
	walk.parts[0] = part_at(walk, 2);
#pragma unroll 1
	for (uint32_t step = 0; step < walk.steps; step += 2) {
		take_step<TOKENS, 0>(sums, &walk, shared, table, step);
		if (step + 1 < walk.steps)
			take_step<TOKENS, 1>(sums, &walk, shared, table, step + 1);
	}
}

/* ---- results of wide products --------------------------------------------------------------- */

/* Each block of a cluster finishes a share of the tokens: so many eights. */
template <int TOKENS>
static __device__ __forceinline__ uint32_t wide_share(const struct qs_product_args &args)
{
	return TOKENS / 8 >> log2_of(args.split);
}

/* Gives a lane's sums of eight tokens to the block that finishes these: to a place for each lane of
 * each block, from which the same lane there takes them. */
template <int TOKENS>
static __device__ __forceinline__ void give_eight(const struct qs_product_args &args,
                                                  struct wide_shared *shared, uint32_t eight,
                                                  const float *sum, float factor)
{
	const uint32_t share = wide_share<TOKENS>(args), rank = blockIdx.x & (args.split - 1);
	const uint32_t place = rank * share + (eight & (share - 1));
	float4 *to = (float4 *)shared->landing + place * QS_WIDE_MULTIPLIERS + threadIdx.x;
	const float4 value =
	        make_float4(sum[0] * factor, sum[1] * factor, sum[2] * factor, sum[3] * factor);
	if (args.split == 1)
		*to = value;
	else
		give(to, &shared->control.landed, eight >> log2_of(share), value);
}

/* A lane's sums from W itself, for when the tiles are not valid: slow. */
template <int TOKENS>
static __device__ __noinline__ void give_source(const struct qs_product_args &args,
                                                struct wide_shared *shared)
{
	const struct job job = wide_job_of<TOKENS>(args);
	const int64_t row = (int64_t)job.strip * QS_WEIGHT_TILE + threadIdx.x / WARP * QUARTER_ROWS;
#pragma unroll 1
	for (uint32_t eight = 0; eight < TOKENS / 8; eight++) {
		float sum[4] = {0, 0, 0, 0};
#pragma unroll 1
		for (uint32_t i = job.first * STEPS; i < job.end * STEPS; i++) {
			uint32_t a[4], b[2];
			load_b(args, job, eight * 8, (int64_t)i * 16, b);
			load_w(args, row, (int64_t)i * 16, a);
			multiply(sum, a, b);
		}
		give_eight<TOKENS>(args, shared, eight, sum, 1);
	}
}

/* Where a token's sums are, over the rows of the block: in place of the table and X. */
#define WIDE_PITCH (QS_WIDE_STRIPS * QS_WEIGHT_TILE + 4)

static_assert(QS_WIDE_SPAN * WIDE_PITCH * 4 <= offsetof(struct wide_shared, landing),
              "what is given is not there");

/* Adds what has been given to the block, in the order of its givers. */
template <int TOKENS>
static __device__ __forceinline__ void lay_wide(const struct qs_product_args &args,
                                                struct wide_shared *shared, float *partial)
{
	const uint32_t share = wide_share<TOKENS>(args), lane = threadIdx.x % WARP;
	const uint32_t row = threadIdx.x / WARP * QUARTER_ROWS + lane / 4;
#pragma unroll 1
	for (uint32_t i = 0; i < share; i++) {
		const float4 *given = (const float4 *)shared->landing + i * QS_WIDE_MULTIPLIERS;
		const float4 sum = add_turns((const float *)(given + threadIdx.x), args.split,
		                             share * QS_WIDE_MULTIPLIERS * 4);
		float *to = partial + (i * 8 + lane % 4 * 2) * WIDE_PITCH + row;
		to[0] = sum.x;
		to[WIDE_PITCH] = sum.y;
		to[8] = sum.z;
		to[WIDE_PITCH + 8] = sum.w;
	}
}

/* Results of four rows of a token at a time. */
template <int TOKENS>
static __device__ __forceinline__ void finish_wide(const struct qs_product_args &args,
                                                   const struct job &job, const float *partial)
{
	const uint32_t fours = QS_WIDE_STRIPS * QS_WEIGHT_TILE / 4;
	const uint32_t share = wide_share<TOKENS>(args) * 8;
	const uint32_t first = (blockIdx.x & (args.split - 1)) * share;
	const uint32_t tokens = first < job.tokens ? min(share, job.tokens - first) : 0;
#pragma unroll 1
	for (uint32_t i = threadIdx.x; i < tokens * fours; i += QS_WIDE_MULTIPLIERS) {
		const uint32_t token = i / fours, row = i % fours * 4;
		finish_four(args, *(const float4 *)(partial + token * WIDE_PITCH + row),
		            job.token + first + token, (int64_t)job.strip * QS_WEIGHT_TILE + row);
	}
}

/* ---- roles of warps in wide products -------------------------------------------------------- */

template <int TOKENS>
static __device__ __forceinline__ void work_wide(const struct qs_product_args &args,
                                                 struct wide_shared *shared)
{
	const struct job job = wide_job_of<TOKENS>(args);
	struct wide_sums<TOKENS> sums = {
	};
	float *partial = (float *)shared;
	fill_table<QS_WIDE_MULTIPLIERS>(shared->table);
	wait_for_work_ahead();
	meet<BEGUN>(QS_WIDE_THREADS - SAMPLERS);
	let_next_begin();
	if (shared->control.known)
		walk_along(&sums, job, shared);
	__syncthreads();
	if (args.split > 1)
		cluster_wait();
	if (tiles_are_valid(&shared->control) && !shared->control.changed)
#pragma unroll
		for (uint32_t i = 0; i < TOKENS / 8; i++)
			give_eight<TOKENS>(args, shared, i, sums.at[i], QS_NF4_UNSCALE);
	else
		give_source<TOKENS>(args, shared);
	if (args.split > 1)
		wait_for_landing(&shared->control.landed);
	lay_wide<TOKENS>(args, shared, partial);
	meet<1>(QS_WIDE_MULTIPLIERS);
	finish_wide<TOKENS>(args, job, partial);
}

template <int TOKENS>
static __device__ __forceinline__ void product_wide(const struct qs_mapped_args &args)
{
	extern __shared__ __align__(1024) uint8_t memory[];
	struct wide_shared *shared = (struct wide_shared *)memory;
	if (args.product.split > 1) {
		if (threadIdx.x == QS_WIDE_MULTIPLIERS)
			expect_landing(&shared->control.landed,
			               TOKENS * QS_WIDE_STRIPS * QS_WEIGHT_TILE * sizeof(float));
		cluster_arrive();
	}
	if (!(args.product.flags & QS_PRODUCT_EARLY))
		wait_for_work_ahead();
	if (threadIdx.x < QS_WIDE_MULTIPLIERS) {
		asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
		work_wide<TOKENS>(args.product, shared);
	} else {
		asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
		if (threadIdx.x < QS_WIDE_THREADS - SAMPLERS)
			feed<TOKENS>(args, shared);
		else
			help<true, wide_job_of<TOKENS>>(args.product, &shared->control,
			                                samples_in(shared->table));
		if (args.product.split > 1)
			cluster_wait();
	}
}

#endif

/* ---- kernels of products -------------------------------------------------------------------- */

#define PRODUCT_BOUNDS __launch_bounds__(HOPPER ? QS_HOPPER_THREADS : QS_PRODUCT_THREADS, 1)

extern "C" __global__ void PRODUCT_BOUNDS
qs_w4a16_8(const __grid_constant__ struct qs_mapped_args args)
{
	product<8, true>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w4a16_16(const __grid_constant__ struct qs_mapped_args args)
{
	product<16, true>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w4a16_32(const __grid_constant__ struct qs_mapped_args args)
{
	product<32, true>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w8a16_8(const __grid_constant__ struct qs_mapped_args args)
{
	product<8, false>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w8a16_16(const __grid_constant__ struct qs_mapped_args args)
{
	product<16, false>(args);
}

extern "C" __global__ void PRODUCT_BOUNDS
qs_w8a16_32(const __grid_constant__ struct qs_mapped_args args)
{
	product<32, false>(args);
}

/* Launched on compute capability 9.0 only. */
extern "C" __global__ void __launch_bounds__(QS_WIDE_THREADS, 1)
        qs_w4a16_wide_64(const __grid_constant__ struct qs_mapped_args args)
{
#if HOPPER
	product_wide<64>(args);
#endif
}

extern "C" __global__ void __launch_bounds__(QS_WIDE_THREADS, 1)
        qs_w4a16_wide_128(const __grid_constant__ struct qs_mapped_args args)
{
#if HOPPER
	product_wide<128>(args);
#endif
}
