/* Content hashes of bf16 matrices: see hash.h for what each kernel computes.
 *
 * qs_hash is bound by memory: it reads 2 bytes an element and writes next to nothing, 134 MB (8192
 * x 8192) in 32 us at an H200's copy rate of 4.24 TB/s. A chunk of 16 bytes takes some 70
 * instructions of a thread, 12 of them multiplications: 0.6 of the time that its bytes take. The
 * other two kernels are there for what is in between them, and cost what an empty launch does.
 *
 * Geometry: one-dimensional grids. A thread takes chunks the whole grid apart, so that a warp reads
 * 512 contiguous bytes, and has UNROLL of them in flight: 128 KiB on a multiprocessor. Sources
 * whose rows are not made of aligned chunks are read element by element: slower but equal.
 */
#include "kernels/hash.h"

#define WARP   32
#define WARPS  (QS_HASH_THREADS / WARP)
#define LANES  8 /* bf16 elements of a chunk         */
#define UNROLL 8 /* chunks a thread has in flight    */

static_assert(sizeof(struct qs_hash_partial) == 32, "layout is shared with the host");
static_assert(sizeof(struct qs_hash_record) == 48, "layout is shared with the host");
static_assert(sizeof(struct qs_hash_outcome) == 64, "layout is shared with the host");
static_assert(sizeof(struct qs_hash_args) == 160, "layout is shared with the host");
static_assert(sizeof(struct qs_hash_work) == 64 + 32 * QS_HASH_PARTIALS,
              "layout is shared with the host");
static_assert(WARPS <= WARP, "one warp reduces the warps");

/* Maxima of two columns of magnitudes, each 0x80 too large: as a signed 16-bit number a finite
 * magnitude stays positive (0x7f7f + 0x80 = 0x7fff), NaN and Inf turn negative and never win. The
 * carry of one half never reaches the other. */
#define PAIR_BIAS 0x00800080u
#define PAIR_SIGN 0x80008000u

/* What a thread, a warp or a block has seen. */
struct tally {
	uint64_t sum[2];
	uint32_t most;     /* pair of biased maxima; after the walk, bits of fp32 */
	uint32_t infinite; /* signs of biased magnitudes                          */
};

static __device__ __forceinline__ uint64_t fold(uint64_t x)
{
	return x ^ (x >> 32);
}

static __device__ __forceinline__ void look_at(struct tally *tally, uint32_t pair)
{
	const uint32_t biased = (pair & 0x7fff7fffu) + PAIR_BIAS;
	tally->most = __vmaxs2(tally->most, biased);
	tally->infinite |= biased;
}

static __device__ __forceinline__ void add_chunk(struct tally *tally, const uint4 &chunk,
                                                 uint64_t key)
{
	uint64_t a = ((uint64_t)chunk.y << 32 | chunk.x) + key;
	uint64_t b = ((uint64_t)chunk.w << 32 | chunk.z) + fold(fold(a) * QS_HASH_M1);
	a ^= fold(fold(b) * QS_HASH_M2);
	b ^= fold(fold(a) * QS_HASH_M3);
	tally->sum[0] += a;
	tally->sum[1] += b;
	look_at(tally, chunk.x);
	look_at(tally, chunk.y);
	look_at(tally, chunk.z);
	look_at(tally, chunk.w);
}

/* ---- walking a matrix ----------------------------------------------------------------------- */

/* A chunk by row and by number within the row. */
struct place {
	int64_t row, col;
};

/* Where a thread is. Steps add and carry: a division for each chunk would show. */
struct walk {
	struct place at, step;
	int64_t width; /* chunks of a row                      */
	uint64_t key;  /* (number of the chunk + 1) * STEP     */
	uint64_t stride;
};

static __device__ __forceinline__ struct walk walk_of(const struct qs_hash_args *args)
{
	const int64_t width = args->cols / LANES + (args->cols % LANES != 0);
	const int64_t first = (int64_t)blockIdx.x * QS_HASH_THREADS + threadIdx.x;
	const int64_t step = (int64_t)args->blocks * QS_HASH_THREADS;
	return {{first / width, first % width},
	        {step / width, step % width},
	        width,
	        (uint64_t)(first + 1) * QS_HASH_STEP,
	        (uint64_t)step * QS_HASH_STEP};
}

static __device__ __forceinline__ void step_on(struct walk *walk)
{
	walk->at.row += walk->step.row;
	walk->at.col += walk->step.col;
	if (walk->at.col >= walk->width) {
		walk->at.col -= walk->width;
		walk->at.row++;
	}
}

/* The first `valid` of eight elements, +0 for the others. */
static __device__ __noinline__ uint4 load_ragged(const uint16_t *source, int64_t valid)
{
	uint32_t word[LANES / 2] = {0, 0, 0, 0};
#pragma unroll
	for (int i = 0; i < LANES; i++)
		if (i < valid)
			word[i / 2] |= (uint32_t)source[i] << (i % 2 * 16);
	return make_uint4(word[0], word[1], word[2], word[3]);
}

static __device__ __forceinline__ uint4 load(const struct qs_hash_args *args, struct place at,
                                             bool smooth)
{
	const uint16_t *source =
	        (const uint16_t *)args->source + at.row * args->ld + at.col * LANES;
	if (smooth)
		return *(const uint4 *)source;
	return load_ragged(source, args->cols - at.col * LANES);
}

/* All chunks of this thread. Those past the end are loaded nowhere and added nowhere. */
static __device__ __forceinline__ struct tally tally_up(const struct qs_hash_args *args,
                                                        bool smooth)
{
	struct tally tally = {{0, 0}, PAIR_BIAS, 0};
	struct walk walk = walk_of(args);
	while (walk.at.row < args->rows) {
		uint4 chunk[UNROLL];
		bool inside[UNROLL];
#pragma unroll
		for (int j = 0; j < UNROLL; j++) {
			inside[j] = walk.at.row < args->rows;
			chunk[j] = make_uint4(0, 0, 0, 0);
			if (inside[j])
				chunk[j] = load(args, walk.at, smooth);
			step_on(&walk);
		}
#pragma unroll
		for (int j = 0; j < UNROLL; j++) {
			if (inside[j])
				add_chunk(&tally, chunk[j], walk.key);
			walk.key += walk.stride;
		}
	}
	tally.most -= PAIR_BIAS;
	tally.most = max(tally.most >> 16, tally.most & 0xffffu) << 16;
	tally.infinite &= PAIR_SIGN;
	return tally;
}

/* ---- adding up ------------------------------------------------------------------------------ */

static __device__ __forceinline__ void join(struct tally *x, const struct tally &y)
{
	x->sum[0] += y.sum[0];
	x->sum[1] += y.sum[1];
	x->most = max(x->most, y.most);
	x->infinite |= y.infinite;
}

/* What the warp has seen, in its lane 0. */
static __device__ __forceinline__ struct tally warp_tally(struct tally tally)
{
#pragma unroll
	for (int other = WARP / 2; other; other /= 2) {
		const struct tally theirs = {{__shfl_down_sync(0xffffffffu, tally.sum[0], other),
		                              __shfl_down_sync(0xffffffffu, tally.sum[1], other)},
		                             __shfl_down_sync(0xffffffffu, tally.most, other),
		                             __shfl_down_sync(0xffffffffu, tally.infinite, other)};
		join(&tally, theirs);
	}
	return tally;
}

/* What the block has seen, in thread 0. */
static __device__ __forceinline__ struct tally block_tally(struct tally tally)
{
	__shared__ struct tally warps[WARPS];
	tally = warp_tally(tally);
	if (threadIdx.x % WARP == 0)
		warps[threadIdx.x / WARP] = tally;
	__syncthreads();
	tally = {{0, 0}, 0, 0};
	if (threadIdx.x < WARPS)
		tally = warps[threadIdx.x];
	return warp_tally(tally);
}

/* ---- kernels -------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(QS_HASH_THREADS, QS_HASH_BLOCKS_PER_SM)
        qs_hash(const __grid_constant__ struct qs_hash_args args)
{
	struct qs_hash_work *work = (struct qs_hash_work *)args.work;
	const bool aligned = args.source % 16 == 0 && (args.ld % LANES == 0 || args.rows == 1);
	const bool smooth = aligned && args.cols % LANES == 0;
	const struct tally tally =
	        block_tally(smooth ? tally_up(&args, true) : tally_up(&args, false));
	if (threadIdx.x == 0)
		work->partial[blockIdx.x] = {
		        {tally.sum[0], tally.sum[1]}, tally.most, tally.infinite, 0};
}

/* Thread 0, which knows the hash: what follows from it. */
static __device__ __forceinline__ void judge(const struct qs_hash_args *args,
                                             const struct tally &tally)
{
	struct qs_hash_work *work = (struct qs_hash_work *)args->work;
	const struct qs_hash_record *record = (const struct qs_hash_record *)args->record;
	const uint32_t *descriptor = (const uint32_t *)args->descriptor;
	const bool make = args->flags & QS_HASH_MAKE, look = args->flags & QS_HASH_LOOK;
	const bool differs = record && !make &&
	                     (tally.sum[0] != record->kept[0] || tally.sum[1] != record->kept[1]);
	const bool stale = record && (make || (differs && !look));
	work->hash[0] = tally.sum[0];
	work->hash[1] = tally.sum[1];
	work->stale = stale;
	work->differs = differs;
	work->amax = tally.most;
	work->infinite = tally.infinite;
	work->repair = tally.most | (stale ? 0 : tally.most >> 16);
	work->failed = descriptor && !make ? descriptor[args->failed] : 0;
}

extern "C" __global__ void __launch_bounds__(QS_HASH_THREADS)
        qs_hash_judge(const __grid_constant__ struct qs_hash_args args)
{
	const struct qs_hash_work *work = (const struct qs_hash_work *)args.work;
	uint32_t *descriptor = (uint32_t *)args.descriptor;
	struct tally tally = {{0, 0}, 0, 0};
	for (unsigned i = threadIdx.x; i < args.blocks; i += QS_HASH_THREADS) {
		const struct qs_hash_partial &partial = work->partial[i];
		join(&tally, {{partial.sum[0], partial.sum[1]}, partial.amax, partial.infinite});
	}
	tally = block_tally(tally);
	if (threadIdx.x == 0)
		judge(&args, tally);
	__syncthreads();
	if (!descriptor || threadIdx.x >= QS_HASH_IMAGE)
		return;
	if (args.flags & QS_HASH_MAKE)
		descriptor[threadIdx.x] = args.image[threadIdx.x];
	else if (work->stale && args.reset >> threadIdx.x & 1)
		descriptor[threadIdx.x] = 0;
}

/* The copy is good from here on. The fence keeps what says so behind the copy for work that is not
 * ordered after this stream. */
static __device__ __forceinline__ void keep(const struct qs_hash_args *args)
{
	const struct qs_hash_work *work = (const struct qs_hash_work *)args->work;
	struct qs_hash_record *record = (struct qs_hash_record *)args->record;
	uint32_t *descriptor = (uint32_t *)args->descriptor;
	__threadfence();
	record->kept[0] = work->hash[0];
	record->kept[1] = work->hash[1];
	record->amax = work->amax;
	if (!descriptor)
		return;
	descriptor[args->failed] = 0;
	descriptor[args->valid] = !(args->flags & QS_HASH_FINITE && work->infinite);
}

/* One thread does it all. The host reads the sequence first, so it goes out last. */
extern "C" __global__ void __launch_bounds__(QS_HASH_THREADS)
        qs_hash_commit(const __grid_constant__ struct qs_hash_args args)
{
	const struct qs_hash_work *work = (const struct qs_hash_work *)args.work;
	struct qs_hash_record *record = (struct qs_hash_record *)args.record;
	struct qs_hash_outcome *outcome = (struct qs_hash_outcome *)args.outcome;
	if (threadIdx.x)
		return;
	if (record && (work->stale || (work->failed && !work->differs)))
		keep(&args);
	if (record && args.flags & QS_HASH_MAKE) {
		record->changes = record->replays = 0;
		record->turn = record->readers = record->found = 0;
		outcome->escapes = outcome->replays = 0;
	}
	outcome->changes = record ? atomicAdd(&record->changes, work->differs) + work->differs : 0;
	outcome->hash[0] = work->hash[0];
	outcome->hash[1] = work->hash[1];
	outcome->amax = work->amax;
	outcome->infinite = work->infinite;
	if (args.flags & QS_HASH_GRAPH) {
		outcome->replays = atomicAdd(&record->replays, 1u) + 1;
		return;
	}
	outcome->differs = work->differs;
	__threadfence_system();
	*(volatile uint64_t *)&outcome->sequence = args.sequence;
}
