/* Warps that compare a row of each tile with W while the others of their block multiply: products
 * of nf4_few.cuh and nf4_wide.cuh. They say whether what has been multiplied holds. Which row it
 * is, and who may be using the descriptor meanwhile, is in nf4.h. And a kernel that does only that.
 */
#ifndef QS_KERNELS_NF4_SAMPLE_CUH
#define QS_KERNELS_NF4_SAMPLE_CUH

#include "kernels/nf4_block.cuh"
#include "kernels/sample.h"

/* ---- comparing ------------------------------------------------------------------------------- */

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

/* The slots of samples in the gaps of a table. */
static __device__ __forceinline__ uint8_t *samples_in(uint8_t *table)
{
	return table + 128;
}

#if HOPPER

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

/* ---- a kernel that samples ------------------------------------------------------------------- */

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

#endif
