/* Weights in 4 or 8 bits, made and undone: see nf4.h for what each kernel computes and for the
 * order in which a tile lies in memory.
 *
 * W is read once and its codes are written once. A warp packs, or expands to e4m3, a quarter
 * of a tile at a time; what is turned, or becomes bf16, goes through shared memory 2 x 2 tiles at a
 * time, so that rows are written in pieces of 128 bytes and more.
 */
#ifndef QS_KERNELS_NF4_PACK_CUH
#define QS_KERNELS_NF4_PACK_CUH

#include "kernels/nf4_tile.cuh"

static_assert(sizeof(struct qs_pack_args) == 64, "layout is shared with the host");
static_assert(sizeof(struct qs_expand_args) == 64, "layout is shared with the host");

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

#endif
