/* Quantisation of bf16 matrices to fp8 with one scale each: qs_amax, then qs_cast.
 *
 * Bound by memory. qs_amax reads 2 bytes an element; qs_cast reads 2 and writes 1: 5 in all, 1.18
 * ps an element at an H200's copy rate of 4.24 TB/s, or 79 us for 8192 x 8192. The second read
 * costs less where it finds the matrix in the L2 cache: amax walks every matrix forwards and cast
 * walks backwards, so what was read last, and is still there, is read first. Casting in the pass
 * that measures would need 3 bytes.
 *
 * Geometry: one-dimensional grids, QS_AMAX_THREADS and QS_CAST_THREADS threads, blocks as counted
 * by quantise.h; each block walks its operand in steps of the whole grid, so that any number of
 * blocks is right. 16-byte accesses wherever the source allows them (address and row distance
 * multiples of 16 bytes); element by element at ragged ends and in other matrices, which are slower
 * but equal. Indices are 64 bits wide. Numbers: see quantise.h.
 */
#include "kernels/quantise.h"

#define WARP        32
#define LANES       8 /* bf16 elements of a 16-byte access                     */
#define AMAX_UNROLL 4 /* 16-byte loads a thread has in flight                  */
#define CAST_UNROLL 2 /* chunks of output, straight: twice as many loads       */
#define TILE_LOADS  4 /* transposed: source vectors = bytes of a word along K  */
#define TILE_CHUNKS (QS_TILE_K / QS_CAST_CHUNK)
/* Multiprocessors of 8.9 and 12.0 hold 1536 threads, the others named in the Makefile 2048. */
#define AMAX_RESIDENT (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200 ? 3 : QS_AMAX_BLOCKS_PER_SM)

static_assert(sizeof(struct qs_quantise_operand) == 64, "layout is shared with the host");
static_assert(QS_TILE_INNER / LANES * (QS_TILE_K / TILE_LOADS) == QS_CAST_THREADS, "one load each");
static_assert(TILE_CHUNKS == QS_TILE_INNER / LANES, "the swizzle maps chunks onto chunks");
static_assert(QS_AMAX_THREADS / WARP <= WARP, "one warp reduces the warps");

/* ---- walking a matrix ----------------------------------------------------------------------- */

/* A place in a grid of `cols` columns, or a distance between two. Steps add and carry: a division
 * for each 16 bytes would cost more than the memory does. */
struct place {
	int64_t row, col;
};

static __device__ __forceinline__ struct place place_of(int64_t index, int64_t cols)
{
	const int64_t row = index / cols;
	return {row, index - row * cols};
}

static __device__ __forceinline__ void step_on(struct place *at, struct place step, int64_t cols)
{
	at->row += step.row;
	at->col += step.col;
	if (at->col >= cols) {
		at->col -= cols;
		at->row++;
	}
}

static __device__ __forceinline__ void step_back(struct place *at, struct place step, int64_t cols)
{
	at->row -= step.row;
	at->col -= step.col;
	if (at->col < 0) {
		at->col += cols;
		at->row--;
	}
}

/* ---- amax ----------------------------------------------------------------------------------- */

/* A source matrix as amax sees it: in each row elements, then 16-byte chunks, then elements. */
struct span {
	const uint16_t *source; /* first element of the first row                        */
	int64_t ld;             /* distance of rows, elements                            */
	int64_t rows;           /* 1 if the matrix is contiguous                         */
	int64_t head;           /* elements of a row before its first chunk              */
	int64_t chunks;         /* of LANES elements, each on a multiple of 16 bytes     */
	int64_t edge;           /* elements of a row in no chunk, the head included      */
};

static __device__ __forceinline__ struct span span_of(const struct qs_quantise_operand *operand)
{
	const bool contiguous = operand->ld == operand->inner || operand->outer == 1;
	const int64_t length = operand->inner * (contiguous ? operand->outer : 1);
	const int64_t head = (int64_t)((16 - operand->source % 16) % 16 / sizeof(uint16_t));
	struct span span = {(const uint16_t *)operand->source,
	                    operand->ld,
	                    contiguous ? 1 : operand->outer,
	                    0,
	                    0,
	                    length};
	if (contiguous || (head == 0 && operand->ld % LANES == 0)) {
		span.head = min(head, length);
		span.chunks = (length - span.head) / LANES;
		span.edge = length - span.chunks * LANES;
	}
	return span;
}

/* Running maxima of two columns of bf16 magnitudes, each 0x80 too large: as a signed 16-bit number
 * a finite magnitude stays positive (0x7f7f + 0x80 = 0x7fff), NaN and Inf turn negative and never
 * win. The carry of one half never reaches the other. */
#define PAIR_BIAS 0x00800080u

static __device__ __forceinline__ uint32_t pair_max(uint32_t most, uint32_t pair)
{
	return __vmaxs2(most, (pair & 0x7fff7fffu) + PAIR_BIAS);
}

static __device__ uint32_t max_of_chunks(const struct span *span, int64_t thread, int64_t threads)
{
	uint32_t most = PAIR_BIAS;
	if (span->chunks == 0)
		return most;
	const struct place step = place_of(threads, span->chunks);
	struct place at = place_of(thread, span->chunks);
	const uint16_t *first = span->source + span->head;
	while (at.row < span->rows) {
		uint4 data[AMAX_UNROLL];
#pragma unroll
		for (int i = 0; i < AMAX_UNROLL; i++) {
			data[i] = make_uint4(0, 0, 0, 0);
			if (at.row < span->rows)
				data[i] =
				        __ldcg((const uint4 *)(first + at.row * span->ld) + at.col);
			step_on(&at, step, span->chunks);
		}
#pragma unroll
		for (int i = 0; i < AMAX_UNROLL; i++) {
			most = pair_max(most, data[i].x);
			most = pair_max(most, data[i].y);
			most = pair_max(most, data[i].z);
			most = pair_max(most, data[i].w);
		}
	}
	return most;
}

static __device__ uint32_t max_of_edges(const struct span *span, int64_t thread, int64_t threads)
{
	uint32_t most = PAIR_BIAS;
	if (span->edge == 0)
		return most;
	const struct place step = place_of(threads, span->edge);
	struct place at = place_of(thread, span->edge);
	const int64_t gap = span->chunks * LANES;
	while (at.row < span->rows) {
		uint32_t data[AMAX_UNROLL];
#pragma unroll
		for (int i = 0; i < AMAX_UNROLL; i++) {
			data[i] = 0;
			if (at.row < span->rows)
				data[i] = __ldcg(span->source + at.row * span->ld + at.col +
				                 (at.col < span->head ? 0 : gap));
			step_on(&at, step, span->edge);
		}
#pragma unroll
		for (int i = 0; i < AMAX_UNROLL; i++)
			most = pair_max(most, data[i]);
	}
	return most;
}

/* The largest `value` of the block's threads, in all of them. At most once in a kernel: nothing
 * keeps a second call from overwriting `warps` too early. */
static __device__ __forceinline__ uint32_t block_max(uint32_t value, unsigned threads)
{
	__shared__ uint32_t warps[WARP];
	const unsigned lane = threadIdx.x % WARP;
	value = __reduce_max_sync(0xffffffffu, value);
	if (lane == 0)
		warps[threadIdx.x / WARP] = value;
	__syncthreads();
	return __reduce_max_sync(0xffffffffu, lane < threads / WARP ? warps[lane] : 0);
}

extern "C" __global__ void __launch_bounds__(QS_AMAX_THREADS, AMAX_RESIDENT)
        qs_amax(const __grid_constant__ struct qs_quantise_args args)
{
	const unsigned which = blockIdx.x >= args.operand[0].blocks;
	const struct qs_quantise_operand *operand = &args.operand[which];
	const unsigned block = blockIdx.x - (which ? args.operand[0].blocks : 0);
	const int64_t threads = (int64_t)operand->blocks * QS_AMAX_THREADS;
	const int64_t thread = (int64_t)block * QS_AMAX_THREADS + threadIdx.x;
	const struct span span = span_of(operand);
	uint32_t most = max_of_chunks(&span, thread, threads);
	most = __vmaxs2(most, max_of_edges(&span, thread, threads)) - PAIR_BIAS;
	most = block_max(max(most >> 16, most & 0xffffu), QS_AMAX_THREADS);
	if (threadIdx.x == 0)
		((uint32_t *)args.partials)[which * QS_AMAX_BLOCKS + block] = most << 16;
}

/* ---- cast ----------------------------------------------------------------------------------- */

/* What a block of the cast has to do. */
struct job {
	const struct qs_quantise_operand *operand;
	const uint32_t *partials; /* what the blocks of amax left of this operand      */
	unsigned partial_blocks;  /* how many                                          */
	unsigned block;           /* of the operand's                                  */
	bool aligned;             /* source vectors start on multiples of 16 bytes     */
};

/* The factor from real to fp8; the scale, its inverse, is left for the product. All threads of a
 * block call it, once, after their first loads so that the two latencies overlap. */
static __device__ __forceinline__ float inverse_scale(const struct job *job)
{
	uint32_t most = 0;
	for (unsigned i = threadIdx.x; i < job->partial_blocks; i += QS_CAST_THREADS)
		most = max(most, __ldcg(job->partials + i));
	float amax = __uint_as_float(block_max(most, QS_CAST_THREADS));
	if (amax < QS_AMAX_FLOOR)
		amax = amax == 0 ? QS_E4M3_MAX : QS_AMAX_FLOOR;
	if (job->block == 0 && threadIdx.x == 0)
		*(float *)job->operand->scale = __fdiv_rn(amax, QS_E4M3_MAX);
	return __fdiv_rn(QS_E4M3_MAX, amax);
}

/* Two values as e4m3, `low` in the low byte: nearest even, saturating, NaN to 0x7f. */
#if __CUDA_ARCH__ >= 890
static __device__ __forceinline__ uint32_t e4m3_pair(float low, float high)
{
	uint16_t pair;
	asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
	return pair;
}
#else
/* Without the instruction: the exponent is rebiased in place by rounding at the fourth mantissa
 * bit; below 2^-6 values are multiples of 2^-9. */
static __device__ __forceinline__ uint32_t e4m3(float value)
{
	const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
	if (magnitude > 0x7f800000u)
		return QS_FP8_NAN;
	const uint32_t subnormal =
	        __float2uint_rn(__uint_as_float(min(magnitude, 0x3c800000u)) * 512);
	const uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
	const uint32_t code = magnitude < 0x3c800000u ? subnormal : min(normal, 0x7eu);
	return code | (bits >> 24 & 0x80u);
}

static __device__ __forceinline__ uint32_t e4m3_pair(float low, float high)
{
	return e4m3(low) | e4m3(high) << 8;
}
#endif

/* Element i of a chunk, multiplied. The fused addend is a zero of the value's sign where the value
 * is finite, and NaN where it is not: that alone turns Inf into NaN, and changes nothing else. */
static __device__ __forceinline__ float scaled(const uint4 &chunk, int i, float inverse)
{
	const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
	const uint32_t word = words[i / 2];
	const float value = __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
	return __fmaf_rn(value, inverse, __fmul_rn(value, 0.0f));
}

/* Elements i..i+3 of a chunk as four bytes. */
static __device__ __forceinline__ uint32_t quad(const uint4 &chunk, int i, float inverse)
{
	return e4m3_pair(scaled(chunk, i, inverse), scaled(chunk, i + 1, inverse)) |
	       e4m3_pair(scaled(chunk, i + 2, inverse), scaled(chunk, i + 3, inverse)) << 16;
}

/* The first `valid` of eight elements, which may be none; the others are 0. A function of its own
 * because eight loads in flight here would cost the common path its registers. */
static __device__ __noinline__ uint4 load_ragged(const uint16_t *source, int64_t valid)
{
	uint32_t word[LANES / 2] = {0, 0, 0, 0};
#pragma unroll
	for (int i = 0; i < LANES; i++)
		if (i < valid)
			word[i / 2] |= (uint32_t)__ldcs(source + i) << (i % 2 * 16);
	return make_uint4(word[0], word[1], word[2], word[3]);
}

/* The same; `valid` may exceed eight. Nothing reads the source after the cast: the loads ask the
 * caches not to keep it. */
static __device__ __forceinline__ uint4 load_chunk(const uint16_t *source, int64_t valid,
                                                   bool aligned)
{
	if (aligned && valid >= LANES)
		return __ldcs((const uint4 *)source);
	return load_ragged(source, valid);
}

/* ---- straight: source vectors are output rows ----------------------------------------------- */

/* What a thread has in flight. */
struct strip {
	int64_t index[CAST_UNROLL]; /* of a chunk of the output, in chunks; negative = none */
	uint4 data[CAST_UNROLL][2]; /* the QS_CAST_CHUNK elements it is made of             */
};

/* Loads the next chunks from `at` backwards. */
static __device__ __forceinline__ void load_strip(struct strip *strip, const struct job *job,
                                                  struct place *at, struct place step, int64_t cols)
{
	const struct qs_quantise_operand *operand = job->operand;
#pragma unroll
	for (int i = 0; i < CAST_UNROLL; i++) {
		strip->index[i] = at->row < 0 ? -1 : at->row * cols + at->col;
		if (strip->index[i] >= 0) {
			const int64_t k = at->col * QS_CAST_CHUNK, valid = operand->inner - k;
			const uint16_t *source =
			        (const uint16_t *)operand->source + at->row * operand->ld + k;
			strip->data[i][0] = load_chunk(source, valid, job->aligned);
			strip->data[i][1] = load_chunk(source + LANES, valid - LANES, job->aligned);
		}
		step_back(at, step, cols);
	}
}

static __device__ __forceinline__ void store_strip(const struct strip *strip, uint4 *target,
                                                   float inverse)
{
#pragma unroll
	for (int i = 0; i < CAST_UNROLL; i++) {
		const uint4 low = strip->data[i][0], high = strip->data[i][1];
		if (strip->index[i] >= 0)
			target[strip->index[i]] =
			        make_uint4(quad(low, 0, inverse), quad(low, 4, inverse),
			                   quad(high, 0, inverse), quad(high, 4, inverse));
	}
}

/* Chunks of the output are numbered row by row. The last QS_CAST_THREADS of them, a multiple of
 * that from the start, are block 0's first; the threads whose chunk lies beyond the end begin one
 * step earlier. */
static __device__ __forceinline__ void cast_straight(const struct job *job)
{
	const struct qs_quantise_operand *operand = job->operand;
	const int64_t cols = operand->k_padded / QS_CAST_CHUNK, chunks = operand->outer * cols;
	const int64_t slabs = (chunks + QS_CAST_THREADS - 1) / QS_CAST_THREADS;
	const int64_t threads = (int64_t)operand->blocks * QS_CAST_THREADS;
	int64_t index = (slabs - 1 - job->block) * QS_CAST_THREADS + threadIdx.x;
	if (index >= chunks)
		index -= threads;
	struct place at = {-1, 0}, step = {0, 0};
	if (index >= 0) {
		at = place_of(index, cols);
		step = place_of(threads, cols);
	}
	struct strip strip;
	load_strip(&strip, job, &at, step, cols);
	const float inverse = inverse_scale(job);
	while (strip.index[0] >= 0) {
		store_strip(&strip, (uint4 *)operand->target, inverse);
		load_strip(&strip, job, &at, step, cols);
	}
}

/* ---- transposed: source vectors are output columns ------------------------------------------ */

/* One thread's part of a tile: LANES elements of TILE_LOADS vectors next to each other along K, so
 * that converting four of the same place together gives a word of the output. A warp reads whole
 * 128-byte lines. */
struct patch {
	uint4 data[TILE_LOADS];
};

static __device__ __forceinline__ void load_patch(struct patch *patch, const struct job *job,
                                                  struct place tile)
{
	const struct qs_quantise_operand *operand = job->operand;
	const int64_t i = tile.col * QS_TILE_INNER + threadIdx.x % TILE_CHUNKS * LANES;
	const int64_t k = tile.row * QS_TILE_K + threadIdx.x / TILE_CHUNKS * TILE_LOADS;
	const uint16_t *source = (const uint16_t *)operand->source + k * operand->ld + i;
#pragma unroll
	for (int j = 0; j < TILE_LOADS; j++) {
		const int64_t valid = k + j < operand->outer ? operand->inner - i : 0;
		patch->data[j] = load_chunk(source + j * operand->ld, valid, job->aligned);
	}
}

/* The tile in shared memory is QS_TILE_INNER rows of QS_TILE_K bytes in 16-byte chunks. Chunk c of
 * row r lies at c ^ r / 8: then the 32 words a warp writes (8 rows 8 apart, 4 words of one chunk)
 * and the 8 chunks a quarter of a warp reads (those of one row) each cover all 32 banks. */
static __device__ __forceinline__ unsigned swizzled(unsigned row, unsigned chunk)
{
	return row * TILE_CHUNKS + (chunk ^ row / LANES);
}

static __device__ __forceinline__ void share_patch(const struct patch *patch, uint4 *shared,
                                                   float inverse)
{
	const unsigned row = threadIdx.x % TILE_CHUNKS * LANES, word = threadIdx.x / TILE_CHUNKS;
#pragma unroll
	for (int i = 0; i < LANES; i++) {
		const uint32_t low = e4m3_pair(scaled(patch->data[0], i, inverse),
		                               scaled(patch->data[1], i, inverse));
		const uint32_t high = e4m3_pair(scaled(patch->data[2], i, inverse),
		                                scaled(patch->data[3], i, inverse));
		((uint32_t *)(shared + swizzled(row + i, word / 4)))[word % 4] = low | high << 16;
	}
}

static __device__ __forceinline__ void store_tile(const struct job *job, const uint4 *shared,
                                                  struct place tile)
{
	const struct qs_quantise_operand *operand = job->operand;
	const unsigned chunk = threadIdx.x % TILE_CHUNKS;
	const int64_t k = tile.row * QS_TILE_K + chunk * QS_CAST_CHUNK;
#pragma unroll
	for (unsigned row = threadIdx.x / TILE_CHUNKS; row < QS_TILE_INNER;
	     row += QS_CAST_THREADS / TILE_CHUNKS) {
		const int64_t i = tile.col * QS_TILE_INNER + row;
		if (i < operand->inner && k < operand->k_padded)
			*(uint4 *)(operand->target + i * operand->k_padded + k) =
			        shared[swizzled(row, chunk)];
	}
}

/* Tiles are numbered along inner first, as the source lies in memory. Two buffers, so that one
 * barrier a tile is enough: a thread that writes a buffer again has passed the barrier of the tile
 * between, which every thread reaches only after reading that buffer. The next tile's loads are in
 * flight while this one is stored. */
static __device__ __forceinline__ void cast_transposed(const struct job *job)
{
	__shared__ uint4 shared[2][QS_TILE_INNER * TILE_CHUNKS];
	const struct qs_quantise_operand *operand = job->operand;
	const int64_t cols = (operand->inner + QS_TILE_INNER - 1) / QS_TILE_INNER;
	const int64_t rows = (operand->k_padded + QS_TILE_K - 1) / QS_TILE_K;
	const int64_t index = rows * cols - 1 - job->block;
	struct place tile = {-1, 0}, step = {0, 0};
	struct patch patch;
	if (index >= 0) {
		tile = place_of(index, cols);
		step = place_of(operand->blocks, cols);
		load_patch(&patch, job, tile);
	}
	const float inverse = inverse_scale(job);
	for (unsigned buffer = 0; tile.row >= 0; buffer ^= 1) {
		share_patch(&patch, shared[buffer], inverse);
		__syncthreads();
		const struct place done = tile;
		step_back(&tile, step, cols);
		if (tile.row >= 0)
			load_patch(&patch, job, tile);
		store_tile(job, shared[buffer], done);
	}
}

/* Blocks run about in the order of their numbers, so the last operand amax read goes first. */
extern "C" __global__ void __launch_bounds__(QS_CAST_THREADS, QS_CAST_BLOCKS_PER_SM)
        qs_cast(const __grid_constant__ struct qs_cast_args args)
{
	const struct qs_quantise_operand *operands = args.quantise.operand;
	const unsigned last = gridDim.x - 1 - blockIdx.x;
	const unsigned which = last >= operands[0].blocks;
	const struct qs_quantise_operand *operand = &operands[which];
	const struct job job = {
	        operand,
	        (const uint32_t *)args.quantise.partials + which * QS_AMAX_BLOCKS,
	        args.partial_blocks[which],
	        which ? blockIdx.x : blockIdx.x - operands[1].blocks,
	        operand->source % 16 == 0 && (operand->ld % LANES == 0 || operand->outer == 1),
	};
	if (operand->transpose)
		cast_transposed(&job);
	else
		cast_straight(&job);
}
