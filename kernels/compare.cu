/* The error of a product: see compare.h for what the kernel computes.
 *
 * Bound by memory where fp64 is fast: two results of 2 or 4 bytes an element and two operands of 2
 * are read once, 537 MB for a product of 8192 x 8192 x 8192 in bf16, 0.13 ms at an H200's copy rate
 * of 4.24 TB/s. Where fp64 runs at 1/64 of fp32's rate it takes several times that; it is launched
 * for one call in a thousand.
 *
 * Geometry: one-dimensional grid, the first blocks for the results, the others for the operands. A
 * thread takes chunks of eight elements of a row, as many apart as the matrix has threads. The
 * block that is last to be done adds up what all of them found.
 */
#include "kernels/compare.h"

#define WARP  32
#define WARPS (QS_COMPARE_THREADS / WARP)
#define LANES 8 /* elements of a chunk */

static_assert(sizeof(struct qs_compare_partial) == 48, "layout is shared with the host");
static_assert(sizeof(struct qs_compare_outcome) == 96, "layout is shared with the host");
static_assert(sizeof(struct qs_compare_operand) == 56, "layout is shared with the host");
static_assert(sizeof(struct qs_compare_args) == 192, "layout is shared with the host");
static_assert(sizeof(struct qs_compare_work) == 16 + 48 * 3 * QS_COMPARE_PARTIALS,
              "layout is shared with the host");
static_assert(WARPS <= WARP, "one warp reduces the warps");

static __device__ __forceinline__ bool is_finite(float x)
{
	return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

static __device__ __forceinline__ float of_bf16(uint32_t bits)
{
	return __uint_as_float(bits << 16);
}

/* ---- walking a matrix ----------------------------------------------------------------------- */

struct matrix {
	const char *data;
	int64_t ld;    /* elements                                        */
	uint32_t type; /* QS_COMPARE_BF16 or _FP32                        */
	bool smooth;   /* chunks that are whole are aligned to 16 bytes   */
};

static __device__ struct matrix matrix_of(uint64_t data, int64_t ld, uint32_t type)
{
	return {(const char *)data, ld, type, data % 16 == 0 && ld % LANES == 0};
}

/* The first `valid` elements of the chunk at this place, as fp32. */
static __device__ __forceinline__ void load(const struct matrix &matrix, int64_t row, int64_t col,
                                            int valid, float value[LANES])
{
	const int64_t at = row * matrix.ld + col;
	const uint16_t *narrow = (const uint16_t *)matrix.data + at;
	const float *wide = (const float *)matrix.data + at;
	if (matrix.type == QS_COMPARE_FP32) {
#pragma unroll
		for (int i = 0; i < LANES; i++)
			value[i] = i < valid ? wide[i] : 0.0f;
	} else if (matrix.smooth && valid == LANES) {
		const uint4 pairs = *(const uint4 *)narrow;
		const uint32_t pair[LANES / 2] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
		for (int i = 0; i < LANES; i++)
			value[i] = of_bf16(pair[i / 2] >> (i % 2 * 16) & 0xffffu);
	} else {
#pragma unroll
		for (int i = 0; i < LANES; i++)
			value[i] = i < valid ? of_bf16(narrow[i]) : 0.0f;
	}
}

/* A chunk by number. */
struct place {
	int64_t row, col;
	int valid; /* elements of it */
};

static __device__ __forceinline__ int64_t width_of(int64_t cols)
{
	return cols / LANES + (cols % LANES != 0);
}

static __device__ __forceinline__ struct place place_of(int64_t chunk, int64_t cols)
{
	const int64_t width = width_of(cols), col = chunk % width * LANES;
	return {chunk / width, col, (int)min((int64_t)LANES, cols - col)};
}

/* ---- what a thread sees --------------------------------------------------------------------- */

static __device__ __forceinline__ void compare(struct qs_compare_partial *partial, float r, float c)
{
	const double difference = (double)c - (double)r;
	if (!is_finite(r)) {
		partial->count[0]++;
		return;
	}
	partial->signal += (double)r * (double)r;
	partial->amax = fmaxf(partial->amax, fabsf(r));
	if (!is_finite(c)) {
		partial->count[1]++;
		return;
	}
	partial->noise += difference * difference;
	partial->error = fmaxf(partial->error, (float)fabs(difference));
}

static __device__ void look_at_results(const struct qs_compare_args *args, unsigned block,
                                       struct qs_compare_partial *partial)
{
	const struct matrix reference = matrix_of(args->reference, args->ld_reference, args->type);
	const struct matrix candidate = matrix_of(args->candidate, args->ld_candidate, args->type);
	const int64_t chunks = args->rows * width_of(args->cols);
	const int64_t step = (int64_t)args->blocks * QS_COMPARE_THREADS;
	for (int64_t i = (int64_t)block * QS_COMPARE_THREADS + threadIdx.x; i < chunks; i += step) {
		const struct place at = place_of(i, args->cols);
		float r[LANES], c[LANES];
		load(reference, at.row, at.col, at.valid, r);
		load(candidate, at.row, at.col, at.valid, c);
#pragma unroll
		for (int j = 0; j < LANES; j++)
			if (j < at.valid)
				compare(partial, r[j], c[j]);
	}
}

static __device__ __forceinline__ float scale_of(const struct qs_compare_operand *operand,
                                                 int64_t row, int64_t col)
{
	const float *scale = (const float *)operand->scale;
	if (operand->scales == QS_COMPARE_ONE_SCALE)
		return scale[0];
	return scale[operand->scales == QS_COMPARE_SCALE_OF_ROW ? row : col];
}

static __device__ void look_at_operand(const struct qs_compare_operand *operand, unsigned block,
                                       struct qs_compare_partial *partial)
{
	const bool wide = operand->format == QS_FP8_E5M2;
	const float most = wide ? QS_E5M2_MAX : QS_E4M3_MAX;
	const float least = wide ? QS_E5M2_FLUSHED : QS_E4M3_FLUSHED;
	const struct matrix source = matrix_of(operand->source, operand->ld, QS_COMPARE_BF16);
	const int64_t chunks = operand->rows * width_of(operand->cols);
	const int64_t step = (int64_t)operand->blocks * QS_COMPARE_THREADS;
	for (int64_t i = (int64_t)block * QS_COMPARE_THREADS + threadIdx.x; i < chunks; i += step) {
		const struct place at = place_of(i, operand->cols);
		float x[LANES];
		load(source, at.row, at.col, at.valid, x);
#pragma unroll
		for (int j = 0; j < LANES; j++) {
			if (j >= at.valid || !is_finite(x[j]))
				continue;
			const float size = fabsf(x[j]) / scale_of(operand, at.row, at.col + j);
			partial->count[0] += size > most;
			partial->count[1] += x[j] != 0 && size <= least;
			partial->amax = fmaxf(partial->amax, fabsf(x[j]));
		}
	}
}

/* ---- adding up ------------------------------------------------------------------------------ */

static __device__ __forceinline__ void join(struct qs_compare_partial *x,
                                            const struct qs_compare_partial &y)
{
	x->signal += y.signal;
	x->noise += y.noise;
	x->count[0] += y.count[0];
	x->count[1] += y.count[1];
	x->amax = fmaxf(x->amax, y.amax);
	x->error = fmaxf(x->error, y.error);
}

/* What the warp has found, in its lane 0. */
static __device__ __forceinline__ struct qs_compare_partial
warp_partial(struct qs_compare_partial partial)
{
#pragma unroll
	for (int other = WARP / 2; other; other /= 2) {
		const struct qs_compare_partial theirs = {
		        __shfl_down_sync(0xffffffffu, partial.signal, other),
		        __shfl_down_sync(0xffffffffu, partial.noise, other),
		        {__shfl_down_sync(0xffffffffu, partial.count[0], other),
		         __shfl_down_sync(0xffffffffu, partial.count[1], other)},
		        __shfl_down_sync(0xffffffffu, partial.amax, other),
		        __shfl_down_sync(0xffffffffu, partial.error, other),
		        0};
		join(&partial, theirs);
	}
	return partial;
}

/* What the block has found, in thread 0. May be called again. */
static __device__ struct qs_compare_partial block_partial(struct qs_compare_partial partial)
{
	__shared__ struct qs_compare_partial warps[WARPS];
	partial = warp_partial(partial);
	__syncthreads();
	if (threadIdx.x % WARP == 0)
		warps[threadIdx.x / WARP] = partial;
	__syncthreads();
	partial = {0, 0, {0, 0}, 0, 0, 0};
	if (threadIdx.x < WARPS)
		partial = warps[threadIdx.x];
	return warp_partial(partial);
}

/* What the `count` blocks from `first` on have found, in thread 0. */
static __device__ struct qs_compare_partial add_up(const struct qs_compare_work *work,
                                                   unsigned first, unsigned count)
{
	struct qs_compare_partial sum = {0, 0, {0, 0}, 0, 0, 0};
	for (unsigned i = threadIdx.x; i < count; i += QS_COMPARE_THREADS)
		join(&sum, work->partial[first + i]);
	return block_partial(sum);
}

static __device__ float sqnr_of(const struct qs_compare_partial &results)
{
	if (results.count[1])
		return -QS_SQNR_MAX;
	if (results.noise == 0)
		return QS_SQNR_MAX;
	const double sqnr = 10 * log10(results.signal / results.noise);
	return (float)fmin(fmax(sqnr, (double)-QS_SQNR_MAX), (double)QS_SQNR_MAX);
}

/* The host reads the sequence first, so it goes out last. */
static __device__ void report(const struct qs_compare_args *args,
                              const struct qs_compare_partial found[3])
{
	struct qs_compare_outcome *outcome = (struct qs_compare_outcome *)args->outcome;
	outcome->signal = found[0].signal;
	outcome->noise = found[0].noise;
	outcome->skipped = found[0].count[0];
	outcome->spoilt = found[0].count[1];
	outcome->sqnr = sqnr_of(found[0]);
	outcome->amax = found[0].amax;
	outcome->error = found[0].error;
	outcome->pad = 0;
	for (int i = 0; i < 2; i++) {
		outcome->saturated[i] = found[1 + i].count[0];
		outcome->flushed[i] = found[1 + i].count[1];
		outcome->operand_amax[i] = found[1 + i].amax;
	}
	__threadfence_system();
	*(volatile uint64_t *)&outcome->sequence = args->sequence;
}

/* ---- kernel --------------------------------------------------------------------------------- */

/* Leaves what this block found; true for all threads of the last block to do so. */
static __device__ bool hand_in(struct qs_compare_work *work,
                               const struct qs_compare_partial &partial)
{
	__shared__ bool last;
	if (threadIdx.x == 0) {
		work->partial[blockIdx.x] = partial;
		__threadfence();
		last = atomicAdd(&work->ticket, 1) == gridDim.x - 1;
		__threadfence();
	}
	__syncthreads();
	return last;
}

extern "C" __global__ void __launch_bounds__(QS_COMPARE_THREADS, QS_COMPARE_BLOCKS_PER_SM)
        qs_compare(const __grid_constant__ struct qs_compare_args args)
{
	struct qs_compare_work *work = (struct qs_compare_work *)args.work;
	const unsigned first[3] = {0, args.blocks, args.blocks + args.operand[0].blocks};
	const unsigned count[3] = {args.blocks, args.operand[0].blocks, args.operand[1].blocks};
	struct qs_compare_partial partial = {0, 0, {0, 0}, 0, 0, 0};
	if (blockIdx.x < first[1])
		look_at_results(&args, blockIdx.x, &partial);
	else if (blockIdx.x < first[2])
		look_at_operand(&args.operand[0], blockIdx.x - first[1], &partial);
	else
		look_at_operand(&args.operand[1], blockIdx.x - first[2], &partial);
	if (!hand_in(work, block_partial(partial)))
		return;
	struct qs_compare_partial found[3];
	for (int i = 0; i < 3; i++)
		found[i] = add_up(work, first[i], count[i]);
	if (threadIdx.x == 0)
		report(&args, found);
}
