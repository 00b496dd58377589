/* Quantisation of bf16 matrices to fp8 in one or both orientations: see quantise.h for what each
 * kernel computes.
 *
 * Bound by memory. With a prediction that holds, qs_quantise reads 2 bytes an element and writes 1,
 * or 2 when both orientations are wanted: 3 or 4 in all, 0.71 or 0.94 ps an element at an H200's
 * copy rate of 4.24 TB/s, 47 or 63 us for 8192 x 8192. qs_repair then only reads the partials.
 * Without a prediction both kernels read the matrix: 5 bytes. qs_quantise_rows needs none for
 * its 3. The pair for columns moves 5, less where the second read finds the matrix in the L2 cache.
 *
 * To keep HBM busy a multiprocessor must have some 40 KiB of loads in flight: here 64 KiB, four
 * 16-byte loads of each of 1024 threads, twice that for rows. What is issued for each element still
 * shows, where the last loads of a block are cast: hence the arithmetic on pairs. A launch costs
 * some 3 us by itself, half of it before its first load: see await_work_ahead.
 *
 * Geometry: one-dimensional grids, blocks as counted by quantise.h; each block walks its operand in
 * steps of the whole grid, so that any number of blocks is right. A thread reads 16 bytes at a time
 * wherever the source allows (address and row distance multiples of 16 bytes); element by element
 * at ragged ends and in other matrices, which are slower but equal.
 */
#include "kernels/quantise.h"
#include "kernels/sample.h"

#define WARP        32
#define CHUNK       16 /* bytes of a turned row that a thread writes at once            */
#define LANES       8  /* bf16 elements of a 16-byte load                               */
#define UNROLL      4  /* loads a thread has in flight: strips                          */
#define TILE_LOADS  4  /* the same, tiles: source vectors = bytes of a word along outer */
#define SWEEP_LOADS 2  /* the same, swept rows: all the registers allow                 */
#define ROW_LOADS   (QS_ROWS_ELEMENTS / LANES)
#define TILE_CHUNKS (QS_TILE_OUTER / CHUNK)
#define PANEL       8 /* columns of tiles that are worked on together: 1 KiB of a source vector */

static_assert(sizeof(struct qs_quantise_operand) == 88, "layout is shared with the host");
static_assert(QS_TILE_INNER / LANES * (QS_TILE_OUTER / TILE_LOADS) == QS_QUANTISE_THREADS,
              "a tile is one patch for each thread");
static_assert(TILE_CHUNKS == QS_TILE_INNER / LANES, "the swizzle maps chunks onto chunks");
static_assert(QS_ROWS_THREADS * QS_ROWS_ELEMENTS == QS_ROWS_HELD, "a row fits a block");
static_assert(QS_ROWS_THREADS / WARP <= WARP, "one warp reduces the warps");

/* ---- walking a matrix ----------------------------------------------------------------------- */

/* A place in a grid of `cols` columns, or a distance between two. */
struct place {
	int64_t row, col;
};

static __device__ __forceinline__ struct place place_of(int64_t index, int64_t cols)
{
	const int64_t row = index / cols;
	return {row, index - row * cols};
}

/* A tile by its place in the grid of tiles. 32 bits: there is no memory for 2^32 tiles of 8192
 * elements. */
struct tile {
	unsigned row, col;
};

static __device__ __forceinline__ struct tile tile_of(unsigned index, unsigned cols)
{
	return {index / cols, index % cols};
}

/* ---- numbers -------------------------------------------------------------------------------- */

/* Elements are handled as the pairs in which they lie in memory, and stay bf16 until they are cast:
 * a product with a power of two is exact in bf16 as well, but below 2^-126, where every format of
 * the result rounds to zero. */
static __device__ __forceinline__ uint32_t pair_fma(uint32_t a, uint32_t b, uint32_t c)
{
	uint32_t pair;
	asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
	return pair;
}

/* NaN where the pair is not finite, the pair as it is elsewhere: x * 0 + x. */
static __device__ __forceinline__ uint32_t nan_for_inf(uint32_t pair)
{
	return pair_fma(pair, 0, pair);
}

static __device__ __forceinline__ void nan_for_inf(uint4 *chunk)
{
	*chunk = make_uint4(nan_for_inf(chunk->x), nan_for_inf(chunk->y), nan_for_inf(chunk->z),
	                    nan_for_inf(chunk->w));
}

/* The largest numbers of both formats are 1.75 * 2^8 and 1.75 * 2^15: an amax of 1.f * 2^x is moved
 * to 2^7 or 2^14 at first, and one binade less if f is so large that it would exceed half the
 * largest number. `amax` is given and kept as the bits of an fp32. */
static __device__ __forceinline__ float inverse_of(uint32_t amax, uint32_t format)
{
	const uint32_t floored = max(amax, __float_as_uint(QS_AMAX_FLOOR));
	const uint32_t beyond = (floored & 0x7fffffu) > 0x600000u;
	const uint32_t top = format == QS_FP8_E5M2 ? 14 : 7;
	const uint32_t exponent = 254 + top - beyond - (floored >> 23);
	return amax == 0 ? 1.0f : __uint_as_float(exponent << 23);
}

/* 1 / inverse, exactly: inverse is a power of two, and neither is subnormal. */
static __device__ __forceinline__ float scale_of(float inverse)
{
	return __uint_as_float((254u << 23) - __float_as_uint(inverse));
}

/* True if a cast by the scale of `predicted` is as good as one by the scale of `amax`. */
static __device__ __forceinline__ bool predicts(uint32_t predicted, uint32_t amax, uint32_t format)
{
	const float most = format == QS_FP8_E5M2 ? QS_E5M2_MAX : QS_E4M3_MAX;
	const float got = __uint_as_float(max(amax, __float_as_uint(QS_AMAX_FLOOR))) *
	                  inverse_of(predicted, format);
	return predicted && amax && got <= most && got >= most / QS_PREDICTION_LOSS;
}

/* Two values as fp8, `low` in the low byte: nearest even, saturating. */
#if __CUDA_ARCH__ >= 890
static __device__ __forceinline__ uint32_t fp8_pair(float low, float high, uint32_t format)
{
	uint16_t pair;
	if (format == QS_FP8_E5M2)
		asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
	else
		asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
	return pair;
}
#else
/* Without the instruction: the exponent is rebiased in place by rounding at the last mantissa bit
 * that stays; below the least normal number values are multiples of the least subnormal one. */
static __device__ __forceinline__ uint32_t fp8(float value, uint32_t format)
{
	const bool e5m2 = format == QS_FP8_E5M2;
	const uint32_t drop = e5m2 ? 21 : 20, rebias = e5m2 ? 112u << 23 : 120u << 23;
	const uint32_t least = rebias + (1u << 23), most = e5m2 ? 0x7b : 0x7e;
	const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
	if (magnitude > 0x7f800000u)
		return QS_FP8_NAN;
	const uint32_t subnormal =
	        __float2uint_rn(__uint_as_float(min(magnitude, least)) * (e5m2 ? 0x1p16f : 0x1p9f));
	const uint32_t half = (1u << (drop - 1)) - 1 + (magnitude >> drop & 1);
	const uint32_t normal = (magnitude + half - rebias) >> drop;
	return (magnitude < least ? subnormal : min(normal, most)) | (bits >> 24 & 0x80u);
}

static __device__ __forceinline__ uint32_t fp8_pair(float low, float high, uint32_t format)
{
	return fp8(low, format) | fp8(high, format) << 8;
}
#endif

/* Which NaN of e5m2, which has six, a conversion gives is not documented: bytes whose exponent is
 * all ones, which no finite value has after saturation, are set to ours. e4m3 has one for each
 * sign, and a NaN becomes the positive one. */
static __device__ __forceinline__ uint32_t with_our_nan(uint32_t bytes, uint32_t format)
{
	if (format != QS_FP8_E5M2)
		return bytes;
	const uint32_t nan = ((bytes & 0x7c7c7c7cu) + 0x04040404u) & 0x80808080u;
	return (bytes & ~nan) | (nan - (nan >> 7));
}

/* Factors of the elements of a chunk: bf16, in pairs as the elements are. */
struct factors {
	uint32_t pair[LANES / 2];
};

/* The upper halves of two fp32, which are bf16 of the same value where the lower ones are zero. */
static __device__ __forceinline__ uint32_t pair_of(float low, float high)
{
	return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

static __device__ __forceinline__ float low_of(uint32_t pair)
{
	return __uint_as_float(pair << 16);
}

static __device__ __forceinline__ float high_of(uint32_t pair)
{
	return __uint_as_float(pair & 0xffff0000u);
}

static __device__ __forceinline__ struct factors all(float inverse)
{
	const uint32_t pair = pair_of(inverse, inverse);
	return {{pair, pair, pair, pair}};
}

/* A pair times its factors as two bytes. The addend is the zero that leaves the sign of any other.
 */
static __device__ __forceinline__ uint32_t cast_pair(uint32_t pair, uint32_t factors,
                                                     uint32_t format)
{
	const uint32_t product = pair_fma(pair, factors, 0x80008000u);
	return fp8_pair(low_of(product), high_of(product), format);
}

static __device__ __forceinline__ uint32_t quad(uint32_t low, uint32_t high, uint32_t low_factors,
                                                uint32_t high_factors, uint32_t format)
{
	const uint32_t bytes =
	        cast_pair(low, low_factors, format) | cast_pair(high, high_factors, format) << 16;
	return with_our_nan(bytes, format);
}

/* A chunk without Inf as eight bytes. */
static __device__ __forceinline__ uint2 cast(const uint4 &chunk, const struct factors &factors,
                                             uint32_t format)
{
	const uint32_t *pair = factors.pair;
	return make_uint2(quad(chunk.x, chunk.y, pair[0], pair[1], format),
	                  quad(chunk.z, chunk.w, pair[2], pair[3], format));
}

/* ---- maxima --------------------------------------------------------------------------------- */

/* Running maxima of two columns of bf16 magnitudes, of a pair without Inf: NaN never wins. */
static __device__ __forceinline__ uint32_t pair_max(uint32_t most, uint32_t pair)
{
	uint32_t larger;
	asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(most), "r"(pair & 0x7fff7fffu));
	return larger;
}

static __device__ __forceinline__ uint32_t chunk_max(uint32_t most, const uint4 &chunk)
{
	most = pair_max(most, chunk.x);
	most = pair_max(most, chunk.y);
	most = pair_max(most, chunk.z);
	return pair_max(most, chunk.w);
}

/* Bits of the larger of a pair's maxima as an fp32's. */
static __device__ __forceinline__ uint32_t amax_of(uint32_t pair)
{
	return max(pair & 0xffff0000u, pair << 16);
}

/* The largest `value` of a block of QS_QUANTISE_THREADS, in all of them. At most once in a kernel:
 * nothing keeps a second call from overwriting `warps` too early. */
static __device__ __forceinline__ uint32_t block_max(uint32_t value)
{
	__shared__ uint32_t warps[QS_QUANTISE_THREADS / WARP];
	const unsigned lane = threadIdx.x % WARP;
	value = __reduce_max_sync(0xffffffffu, value);
	if (lane == 0)
		warps[threadIdx.x / WARP] = value;
	__syncthreads();
	return __reduce_max_sync(0xffffffffu, lane < QS_QUANTISE_THREADS / WARP ? warps[lane] : 0);
}

/* ---- loads ---------------------------------------------------------------------------------- */

/* The first `valid` of eight elements; the others are 0. A function of its own because eight loads
 * in flight here would cost the common path its registers. */
static __device__ __noinline__ uint4 load_ragged(const uint16_t *source, int64_t valid)
{
	uint32_t word[LANES / 2] = {0, 0, 0, 0};
#pragma unroll
	for (int i = 0; i < LANES; i++)
		if (i < valid)
			word[i / 2] |= (uint32_t)__ldcs(source + i) << (i % 2 * 16);
	return make_uint4(word[0], word[1], word[2], word[3]);
}

/* How the vectors of an operand can be loaded. */
struct way {
	bool aligned; /* they start on multiples of 16 bytes  */
	bool smooth;  /* and are made of whole chunks         */
};

static __device__ __forceinline__ struct way way_of(const struct qs_quantise_operand *operand)
{
	const bool aligned =
	        operand->source % 16 == 0 && (operand->ld % LANES == 0 || operand->outer == 1);
	return {aligned, aligned && operand->inner % LANES == 0};
}

/* A chunk of a smooth matrix, or zeros. The loads ask the caches to drop the source first: the
 * product that follows reads the targets. */
static __device__ __forceinline__ uint4 load_smooth(const uint16_t *source, bool inside)
{
	return inside ? __ldcs((const uint4 *)source) : make_uint4(0, 0, 0, 0);
}

/* The first `valid` of eight elements of any matrix, which may be any number. */
static __device__ __forceinline__ uint4 load_rough(const uint16_t *source, int64_t valid,
                                                   bool aligned)
{
	if (aligned && valid >= LANES)
		return __ldcs((const uint4 *)source);
	return valid > 0 ? load_ragged(source, valid) : make_uint4(0, 0, 0, 0);
}

/* ---- a pass over a matrix ------------------------------------------------------------------- */

/* What a block of qs_quantise or qs_repair has to do. */
struct job {
	const struct qs_quantise_operand *operand;
	unsigned block;  /* of the operand's                                               */
	unsigned blocks; /* how many it has in this launch                                 */
	uint32_t amax;   /* bits of the amax whose scale casts; of the first thread only   */
	bool exact;      /* cast even if that is 0; otherwise 0 means to measure only      */
	struct way way;  /* to load the source                                             */
};

/* What all threads of the block shall take for job->amax. Called after the first loads, so that
 * the latencies overlap; one thread reads a history, which may change meanwhile, for all. */
static __device__ __forceinline__ uint32_t agreed_amax(const struct job *job)
{
	__shared__ uint32_t agreed;
	if (threadIdx.x == 0)
		agreed = job->amax;
	__syncthreads();
	return agreed;
}

/* A thread's walk over a matrix in chunks of the straight target, which are numbered row by row.
 * Its chunks are the launch's threads apart; it keeps addresses rather than numbers, and 32 bits
 * where they do, because registers are short: each thread has 64. */
struct walk {
	const uint16_t *source; /* the chunk at hand                                         */
	int64_t col;            /* its place in the row, chunks                              */
	int64_t cols;           /* chunks of a row, the padding included                     */
	int64_t forward;        /* elements from a chunk of the source to the next           */
	int64_t wrap;           /* the same on top, where the row ends in between            */
	unsigned forward_col;   /* as forward: chunks within the row                         */
	unsigned left;          /* chunks from here on                                       */
};

static __device__ __forceinline__ struct walk walk_of(const struct job *job, int64_t index)
{
	const struct qs_quantise_operand *operand = job->operand;
	const unsigned threads = job->blocks * QS_QUANTISE_THREADS;
	const int64_t cols = qs_k_padded(operand->inner) / LANES, end = operand->outer * cols;
	const struct place at = place_of(index, cols), step = place_of(threads, cols);
	struct walk walk;
	walk.source = (const uint16_t *)operand->source + at.row * operand->ld + at.col * LANES;
	walk.col = at.col;
	walk.cols = cols;
	walk.forward = step.row * operand->ld + step.col * LANES;
	walk.wrap = operand->ld - cols * LANES;
	walk.forward_col = (unsigned)step.col;
	walk.left = index < end ? (unsigned)qs_shares(end - index, threads) : 0;
	return walk;
}

static __device__ __forceinline__ void walk_on(struct walk *walk)
{
	walk->source += walk->forward;
	walk->col += walk->forward_col;
	if (walk->col >= walk->cols) {
		walk->col -= walk->cols;
		walk->source += walk->wrap;
	}
}

/* The next UNROLL chunks; zeros beyond the end. */
static __device__ __forceinline__ void load_strip(uint4 data[UNROLL], const struct job *job,
                                                  struct walk *walk)
{
	const int64_t inner = job->operand->inner;
	if (job->way.smooth) {
#pragma unroll
		for (int i = 0; i < UNROLL; i++) {
			data[i] = load_smooth(walk->source,
			                      i < walk->left && walk->col * LANES < inner);
			walk_on(walk);
		}
	} else {
#pragma unroll
		for (int i = 0; i < UNROLL; i++) {
			data[i] = load_rough(walk->source,
			                     i < walk->left ? inner - walk->col * LANES : 0,
			                     job->way.aligned);
			walk_on(walk);
		}
	}
}

/* A warp reads 512 bytes in a row and writes 256. Returns the maxima of what the thread saw. */
static __device__ __forceinline__ uint32_t pass_straight(const struct job *job, uint32_t format)
{
	const unsigned threads = job->blocks * QS_QUANTISE_THREADS;
	const int64_t index = (int64_t)job->block * QS_QUANTISE_THREADS + threadIdx.x;
	struct walk walk = walk_of(job, index);
	uint2 *target = (uint2 *)job->operand->straight + index;
	uint4 data[UNROLL];
	uint32_t most = 0;
	load_strip(data, job, &walk);
	const uint32_t amax = agreed_amax(job);
	const struct factors factors = all(inverse_of(amax, format));
	while (walk.left) {
#pragma unroll
		for (int i = 0; i < UNROLL; i++) {
			nan_for_inf(&data[i]);
			most = chunk_max(most, data[i]);
			if ((job->exact || amax) && i < walk.left)
				target[(size_t)i * threads] = cast(data[i], factors, format);
		}
		target += (size_t)UNROLL * threads;
		walk.left -= min(walk.left, UNROLL);
		load_strip(data, job, &walk);
	}
	return most;
}

/* One thread's part of a tile: LANES elements of TILE_LOADS vectors next to each other, so that the
 * bytes of one place together are a word of the turned target. A warp reads whole 128-byte lines.
 */
struct patch {
	uint4 data[TILE_LOADS];
};

/* The same as fp8. */
struct cast_patch {
	uint2 data[TILE_LOADS];
};

/* Where a thread's patch of a tile begins; row and col in elements. */
static __device__ __forceinline__ struct place corner_of(struct tile tile)
{
	return {(int64_t)tile.row * QS_TILE_OUTER + threadIdx.x / TILE_CHUNKS * TILE_LOADS,
	        (int64_t)tile.col * QS_TILE_INNER + threadIdx.x % TILE_CHUNKS * LANES};
}

static __device__ __forceinline__ void load_patch(struct patch *patch, const struct job *job,
                                                  struct tile tile)
{
	const struct qs_quantise_operand *operand = job->operand;
	const struct place at = corner_of(tile);
	const uint16_t *source = (const uint16_t *)operand->source + at.row * operand->ld + at.col;
	const int64_t valid = operand->inner - at.col;
	if (job->way.smooth) {
#pragma unroll
		for (int j = 0; j < TILE_LOADS; j++)
			patch->data[j] = load_smooth(source + j * operand->ld,
			                             valid > 0 && at.row + j < operand->outer);
	} else {
#pragma unroll
		for (int j = 0; j < TILE_LOADS; j++)
			patch->data[j] = load_rough(source + j * operand->ld,
			                            at.row + j < operand->outer ? valid : 0,
			                            job->way.aligned);
	}
}

static __device__ __forceinline__ void nan_for_inf(struct patch *patch)
{
#pragma unroll
	for (int j = 0; j < TILE_LOADS; j++)
		nan_for_inf(&patch->data[j]);
}

static __device__ __forceinline__ struct cast_patch
cast_all(const struct patch &patch, const struct factors &factors, uint32_t format)
{
	struct cast_patch bytes;
#pragma unroll
	for (int j = 0; j < TILE_LOADS; j++)
		bytes.data[j] = cast(patch.data[j], factors, format);
	return bytes;
}

/* Half a line of the straight target for each source vector; the tile beside it has the other. */
static __device__ __forceinline__ void store_straight(const struct cast_patch &bytes,
                                                      const struct qs_quantise_operand *operand,
                                                      struct tile tile)
{
	const struct place at = corner_of(tile);
	const int64_t width = qs_k_padded(operand->inner);
	uint8_t *target = (uint8_t *)operand->straight + at.row * width + at.col;
#pragma unroll
	for (int j = 0; j < TILE_LOADS; j++)
		if (at.row + j < operand->outer && at.col < width)
			*(uint2 *)(target + j * width) = bytes.data[j];
}

/* The tile in shared memory is QS_TILE_INNER rows of QS_TILE_OUTER bytes in 16-byte chunks. Chunk c
 * of row r lies at c ^ r / 8: then the 32 words a warp writes (8 rows 8 apart, 4 words of one
 * chunk) and the 8 chunks a quarter of a warp reads (those of one row) each cover all 32 banks. */
static __device__ __forceinline__ unsigned swizzled(unsigned row, unsigned chunk)
{
	return row * TILE_CHUNKS + (chunk ^ row / LANES);
}

/* Transposes four words of four bytes: w[i] becomes byte i of each. */
static __device__ __forceinline__ void turn(uint32_t w[4])
{
	const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140);
	const uint32_t low23 = __byte_perm(w[2], w[3], 0x5140);
	const uint32_t high01 = __byte_perm(w[0], w[1], 0x7362);
	const uint32_t high23 = __byte_perm(w[2], w[3], 0x7362);
	w[0] = __byte_perm(low01, low23, 0x5410);
	w[1] = __byte_perm(low01, low23, 0x7632);
	w[2] = __byte_perm(high01, high23, 0x5410);
	w[3] = __byte_perm(high01, high23, 0x7632);
}

static __device__ __forceinline__ void share(const struct cast_patch &bytes, uint4 *shared)
{
	const unsigned first = threadIdx.x % TILE_CHUNKS * LANES, word = threadIdx.x / TILE_CHUNKS;
	uint32_t low[4] = {bytes.data[0].x, bytes.data[1].x, bytes.data[2].x, bytes.data[3].x};
	uint32_t high[4] = {bytes.data[0].y, bytes.data[1].y, bytes.data[2].y, bytes.data[3].y};
	turn(low);
	turn(high);
#pragma unroll
	for (int i = 0; i < 4; i++) {
		((uint32_t *)(shared + swizzled(first + i, word / 4)))[word % 4] = low[i];
		((uint32_t *)(shared + swizzled(first + 4 + i, word / 4)))[word % 4] = high[i];
	}
}

static __device__ __forceinline__ void
store_turned(const uint4 *shared, const struct qs_quantise_operand *operand, struct tile tile)
{
	const unsigned chunk = threadIdx.x % TILE_CHUNKS;
	const int64_t width = qs_k_padded(operand->outer);
	const int64_t k = (int64_t)tile.row * QS_TILE_OUTER + chunk * CHUNK;
#pragma unroll
	for (unsigned row = threadIdx.x / TILE_CHUNKS; row < QS_TILE_INNER;
	     row += QS_QUANTISE_THREADS / TILE_CHUNKS) {
		const int64_t i = (int64_t)tile.col * QS_TILE_INNER + row;
		if (i < operand->inner && k < width)
			*(uint4 *)(operand->turned + i * width + k) = shared[swizzled(row, chunk)];
	}
}

/* Two tiles as fp8. */
struct tiles {
	uint4 chunk[2][QS_TILE_INNER * TILE_CHUNKS];
};

/* The grid of tiles of an operand: its rows and columns. */
static __device__ __forceinline__ struct tile tiles_of(const struct qs_quantise_operand *operand)
{
	return {(unsigned)qs_shares(operand->outer, QS_TILE_OUTER),
	        (unsigned)qs_shares(operand->inner, QS_TILE_INNER)};
}

/* A block's way through the tiles: panel after panel, in each row by row. A panel is the whole
 * matrix, or PANEL columns of tiles where only the turned target is written: blocks that work side
 * by side then write a stretch of each of few turned rows, not a line of each of many, and still
 * read a stretch of each source vector. Steps add and carry: a division for each tile would show.
 */
struct route {
	struct tile end;  /* rows and columns of tiles                              */
	struct tile at;   /* the tile at hand; beyond the last if at.col >= end.col */
	unsigned edge;    /* the first column right of its panel                    */
	unsigned width;   /* of a panel                                             */
	struct tile step; /* to the next tile: rows, and columns in the panel       */
	unsigned jump;    /* the same: columns of whole panels                      */
};

static __device__ __forceinline__ struct route route_of(const struct job *job)
{
	struct route route;
	route.end = tiles_of(job->operand);
	route.width = job->operand->straight || route.end.col % PANEL ? route.end.col : PANEL;
	route.at = tile_of(job->block, route.width);
	const struct tile first = tile_of(route.at.row, route.end.row);
	route.at.row = first.col;
	route.at.col += first.row * route.width;
	route.edge = (first.row + 1) * route.width;
	route.step = tile_of(job->blocks, route.width);
	const struct tile forward = tile_of(route.step.row, route.end.row);
	route.step.row = forward.col;
	route.jump = forward.row * route.width;
	return route;
}

static __device__ __forceinline__ void step_on(struct route *route)
{
	unsigned jump = route->jump;
	route->at.row += route->step.row;
	route->at.col += route->step.col;
	if (route->at.col >= route->edge) {
		route->at.col -= route->width;
		route->at.row++;
	}
	if (route->at.row >= route->end.row) {
		route->at.row -= route->end.row;
		jump += route->width;
	}
	route->at.col += jump;
	route->edge += jump;
}

static __device__ __forceinline__ bool ends(const struct route &route)
{
	return route.at.col >= route.end.col;
}

/* Writes the turned target, and the straight one if it is wanted. Two buffers, so that one barrier
 * a tile is enough: a thread that writes a buffer again has passed the barrier of the tile between,
 * which every thread reaches only after reading that buffer. The next tile's loads are in flight
 * while this one is stored. Returns the maxima of what the thread saw. */
static __device__ __forceinline__ uint32_t pass_tiles(const struct job *job, struct tiles *tiles,
                                                      uint32_t format)
{
	const struct qs_quantise_operand *operand = job->operand;
	struct route route = route_of(job);
	struct patch patch;
	uint32_t most = 0;
	if (!ends(route))
		load_patch(&patch, job, route.at);
	const uint32_t amax = agreed_amax(job);
	const struct factors factors = all(inverse_of(amax, format));
	const bool casts = job->exact || amax;
	for (unsigned buffer = 0; !ends(route); buffer ^= 1) {
		const struct tile done = route.at;
		nan_for_inf(&patch);
#pragma unroll
		for (int j = 0; j < TILE_LOADS; j++)
			most = chunk_max(most, patch.data[j]);
		if (casts) {
			const struct cast_patch bytes = cast_all(patch, factors, format);
			share(bytes, tiles->chunk[buffer]);
			if (operand->straight)
				store_straight(bytes, operand, done);
			__syncthreads();
		}
		step_on(&route);
		if (!ends(route))
			load_patch(&patch, job, route.at);
		if (casts)
			store_turned(tiles->chunk[buffer], operand, done);
	}
	return most;
}

static __device__ __forceinline__ uint32_t pass(const struct job *job, struct tiles *tiles,
                                                uint32_t format)
{
	return job->operand->turned ? pass_tiles(job, tiles, format) : pass_straight(job, format);
}

/* The same with the format a constant in each copy of the loops: asking for it there costs as much
 * as the conversion. By target first: by format first, two loops at once do not fit the registers.
 */
static __device__ __forceinline__ uint32_t pass_fast(const struct job *job, struct tiles *tiles)
{
	const bool e5m2 = job->operand->format == QS_FP8_E5M2;
	if (job->operand->turned)
		return e5m2 ? pass_tiles(job, tiles, QS_FP8_E5M2)
		            : pass_tiles(job, tiles, QS_FP8_E4M3);
	return e5m2 ? pass_straight(job, QS_FP8_E5M2) : pass_straight(job, QS_FP8_E4M3);
}

/* The part of the launch's `blocks[turn]` that is this block's. */
static __device__ __forceinline__ struct job job_of(const struct qs_quantise_args *args, int turn)
{
	const unsigned first = args->operand[0].blocks[turn], which = blockIdx.x >= first;
	const struct qs_quantise_operand *operand = &args->operand[which];
	return {operand,        blockIdx.x - (which ? first : 0), operand->blocks[turn], 0, false,
	        way_of(operand)};
}

/* Every kernel waits here before it touches memory: the host may launch it before the work ahead of
 * it in the stream has ended, which saves 1.6 us a launch on an H200. None tells its successor to
 * start before it ends itself: that gained nothing, the blocks fill the device. */
static __device__ __forceinline__ void await_work_ahead(void)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(QS_QUANTISE_THREADS, QS_QUANTISE_BLOCKS_PER_SM)
        qs_quantise(const __grid_constant__ struct qs_quantise_args args)
{
	__shared__ struct tiles tiles;
	struct job job = job_of(&args, 0);
	await_work_ahead();
	if (threadIdx.x == 0 && job.operand->history)
		job.amax = __ldcg((const uint32_t *)job.operand->history) & 0x7fff0000u;
	const uint32_t most = block_max(amax_of(pass_fast(&job, &tiles)));
	if (threadIdx.x == 0)
		((uint32_t *)job.operand->partials)[job.block] = most | job.amax >> 16;
}

/* What the blocks of qs_quantise left, and what follows from it; the same in all threads. */
struct verdict {
	uint32_t amax;      /* bits of the operand's                   */
	uint32_t predicted; /* bits of the amax by which it was cast   */
	bool good;          /* the cast may stay                       */
};

static __device__ __forceinline__ struct verdict judge(const struct qs_quantise_operand *operand)
{
	const uint32_t *partials = (const uint32_t *)operand->partials;
	const uint32_t first = __ldcg(partials);
	uint32_t most = 0, differ = 0;
#pragma unroll
	for (unsigned j = 0; j < QS_PARTIALS; j += QS_QUANTISE_THREADS) {
		const unsigned i = j + threadIdx.x;
		const uint32_t partial = __ldcg(partials + (i < operand->blocks[0] ? i : 0));
		most = max(most, partial & 0xffff0000u);
		differ |= (partial ^ first) & 0xffffu;
	}
	struct verdict verdict = {block_max(most), first << 16, false};
	verdict.good = !__syncthreads_or((int)differ) &&
	               predicts(verdict.predicted, verdict.amax, operand->format);
	return verdict;
}

extern "C" __global__ void __launch_bounds__(QS_QUANTISE_THREADS, QS_QUANTISE_BLOCKS_PER_SM)
        qs_repair(const __grid_constant__ struct qs_quantise_args args)
{
	__shared__ struct tiles tiles;
	struct job job = job_of(&args, 1);
	await_work_ahead();
	const struct verdict verdict = judge(job.operand);
	job.amax = verdict.good ? verdict.predicted : verdict.amax;
	job.exact = true;
	if (job.block == 0 && threadIdx.x == 0) {
		*(float *)job.operand->scale = scale_of(inverse_of(job.amax, job.operand->format));
		if (job.operand->history)
			*(uint32_t *)job.operand->history = verdict.amax;
	}
	if (!verdict.good)
		pass(&job, &tiles, job.operand->format);
}

/* ---- kept copies against their sources ------------------------------------------------------ */

/* Sixteen elements of a row of the source as the copy should have them. */
static __device__ __forceinline__ uint4 cast_row(const struct qs_sample_args &args, int64_t row,
                                                 int64_t col, bool aligned)
{
	const struct factors factors = all(scale_of(*(const float *)args.scale));
	const uint16_t *source = (const uint16_t *)args.source + row * args.ld + col;
	uint4 first = load_rough(source, args.cols - col, aligned);
	uint4 second = load_rough(source + LANES, args.cols - col - LANES, aligned);
	nan_for_inf(&first);
	nan_for_inf(&second);
	const uint2 low = cast(first, factors, QS_FP8_E4M3);
	const uint2 high = cast(second, factors, QS_FP8_E4M3);
	return make_uint4(low.x, low.y, high.x, high.y);
}

static __device__ __forceinline__ uint32_t word_of(const uint4 &bytes, int i)
{
	return i == 0 ? bytes.x : i == 1 ? bytes.y : i == 2 ? bytes.z : bytes.w;
}

/* A row of a patch, by one lane. */
static __device__ __forceinline__ bool is_same(const struct qs_sample_args &args, int64_t row,
                                               int64_t col, bool aligned)
{
	const uint4 made = cast_row(args, row, col, aligned);
	if (!(args.flags & QS_SAMPLE_TURNED)) {
		const uint4 kept = *(const uint4 *)((const uint8_t *)args.data +
		                                    row * qs_k_padded(args.cols) + col);
		return made.x == kept.x && made.y == kept.y && made.z == kept.z && made.w == kept.w;
	}
	const int64_t pitch = qs_k_padded(args.rows);
	const uint8_t *kept = (const uint8_t *)args.data + col * pitch + row;
	bool same = true;
#pragma unroll
	for (int i = 0; i < QS_SAMPLE_PATCH_COLS; i++)
		if (col + i < args.cols)
			same &= kept[i * pitch] == (word_of(made, i / 4) >> i % 4 * 8 & 0xff);
	return same;
}

/* Bits (of fp32) of the largest finite magnitude of the source, in all threads of one block. */
static __device__ uint32_t amax_of_source(const struct qs_sample_args &args, bool aligned)
{
	const int64_t cols = qs_shares(args.cols, LANES);
	uint32_t most = 0;
#pragma unroll 4
	for (int64_t i = threadIdx.x; i < args.rows * cols; i += QS_SAMPLE_THREADS) {
		const struct place at = place_of(i, cols);
		uint4 chunk = load_rough((const uint16_t *)args.source + at.row * args.ld +
		                                 at.col * LANES,
		                         args.cols - at.col * LANES, aligned);
		nan_for_inf(&chunk);
		most = chunk_max(most, chunk);
	}
	return block_max(amax_of(most));
}

static_assert(QS_SAMPLE_THREADS == QS_QUANTISE_THREADS, "what block_max takes");

extern "C" __global__ void __launch_bounds__(QS_SAMPLE_THREADS)
        qs_fp8_sample(const __grid_constant__ struct qs_sample_args args)
{
	struct qs_hash_record *record = (struct qs_hash_record *)args.record;
	const bool aligned = args.source % 16 == 0 && (args.ld % LANES == 0 || args.rows == 1);
	const int64_t across = qs_sample_across(args.cols);
	const int64_t patches = qs_sample_patches(args.rows, args.cols);
	const int64_t warps = (int64_t)gridDim.x * (QS_SAMPLE_THREADS / WARP);
	const unsigned turn = *(volatile uint32_t *)&record->turn % QS_SAMPLE_TURNS;
	int64_t patch =
	        ((int64_t)blockIdx.x * QS_SAMPLE_THREADS + threadIdx.x) / WARP * QS_SAMPLE_TURNS +
	        turn;
	bool same = true;
	for (; patch < patches; patch += warps * QS_SAMPLE_TURNS) {
		const struct place at = place_of(patch, across);
		const int64_t row = at.row * QS_SAMPLE_PATCH_ROWS + threadIdx.x % WARP;
		if (row < args.rows)
			same &= is_same(args, row, at.col * QS_SAMPLE_PATCH_COLS, aligned);
	}
	if (!qs_sample_judge(args, same, &record->turn))
		return;
	const uint32_t amax = amax_of_source(args, aligned);
	if (threadIdx.x == 0)
		record->amax = ((struct qs_hash_work *)args.work)->repair = amax;
}

/* ---- a scale for each row ------------------------------------------------------------------- */

/* One row and the threads that work on it. */
struct team {
	const struct qs_quantise_operand *operand;
	int64_t index;    /* of the row            */
	unsigned threads; /* qs_row_threads()      */
	unsigned thread;  /* this one among them   */
	struct way way;   /* to load it            */
};

static __device__ __forceinline__ const uint16_t *row_of(const struct team *team)
{
	return (const uint16_t *)team->operand->source + team->index * team->operand->ld;
}

static __device__ __forceinline__ uint8_t *straight_of(const struct team *team)
{
	return (uint8_t *)team->operand->straight + team->index * qs_k_padded(team->operand->inner);
}

/* Each team of a block has a barrier of its own, so that one loads while another stores. */
static __device__ __forceinline__ void team_sync(unsigned threads)
{
	asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / threads + 1), "r"(threads) : "memory");
}

/* The largest `value` of the threads of a row, in all of them. Calls take the buffers in turn, for
 * the reason given at pass_tiles. */
static __device__ __forceinline__ uint32_t row_max(uint32_t value, unsigned threads,
                                                   uint32_t *warps)
{
	const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
	const unsigned count = threads / WARP;
	value = __reduce_max_sync(0xffffffffu, value);
	if (count == 1)
		return value;
	if (lane == 0)
		warps[warp] = value;
	team_sync(threads);
	return __reduce_max_sync(0xffffffffu,
	                         lane < count ? warps[warp / count * count + lane] : 0);
}

/* A row of at most QS_ROWS_HELD elements that is made of aligned chunks stays in the registers:
 * each thread has ROW_LOADS chunks of it, `threads` chunks apart. Returns the row's inverse. */
static __device__ __forceinline__ float quantise_held(const struct team *team, uint32_t *warps,
                                                      uint32_t format)
{
	const unsigned chunks = (unsigned)team->operand->inner / LANES;
	const unsigned padded = (unsigned)qs_k_padded(team->operand->inner) / LANES;
	const uint4 *source = (const uint4 *)row_of(team);
	uint2 *target = (uint2 *)straight_of(team);
	uint4 data[ROW_LOADS];
	uint32_t most = 0;
#pragma unroll
	for (int j = 0; j < ROW_LOADS; j++) {
		const unsigned chunk = j * team->threads + team->thread;
		data[j] = make_uint4(0, 0, 0, 0);
		if (chunk < chunks)
			data[j] = __ldcs(source + chunk);
	}
#pragma unroll
	for (int j = 0; j < ROW_LOADS; j++) {
		nan_for_inf(&data[j]);
		most = chunk_max(most, data[j]);
	}
	most = row_max(amax_of(most), team->threads, warps);
	const float inverse = inverse_of(most, format);
#pragma unroll
	for (int j = 0; j < ROW_LOADS; j++) {
		const unsigned chunk = j * team->threads + team->thread;
		if (chunk < padded)
			target[chunk] = cast(data[j], all(inverse), format);
	}
	return inverse;
}

/* SWEEP_LOADS chunks of a row from element k on, `threads` chunks apart. */
static __device__ __forceinline__ void load_sweep(uint4 data[SWEEP_LOADS], const struct team *team,
                                                  int64_t k, int64_t length)
{
#pragma unroll
	for (int j = 0; j < SWEEP_LOADS; j++) {
		const int64_t at = k + j * team->threads * LANES;
		data[j] = load_rough(row_of(team) + at, length - at, team->way.aligned);
		nan_for_inf(&data[j]);
	}
}

/* Any row: read twice, the second time mostly from the L2 cache. Returns the row's inverse. */
static __device__ __forceinline__ float quantise_swept(const struct team *team, uint32_t *warps)
{
	const int64_t length = team->operand->inner, padded = qs_k_padded(length);
	const int64_t step = team->threads * LANES, first = team->thread * LANES;
	uint4 data[SWEEP_LOADS];
	uint32_t most = 0;
	for (int64_t k = first; k < length; k += SWEEP_LOADS * step) {
		load_sweep(data, team, k, length);
#pragma unroll
		for (int j = 0; j < SWEEP_LOADS; j++)
			most = chunk_max(most, data[j]);
	}
	most = row_max(amax_of(most), team->threads, warps);
	const float inverse = inverse_of(most, team->operand->format);
	for (int64_t k = first; k < padded; k += SWEEP_LOADS * step) {
		load_sweep(data, team, k, length);
#pragma unroll
		for (int j = 0; j < SWEEP_LOADS; j++)
			if (k + j * step < padded)
				*(uint2 *)(straight_of(team) + k + j * step) =
				        cast(data[j], all(inverse), team->operand->format);
	}
	return inverse;
}

/* As in pass_fast, the format is a constant where speed counts. */
static __device__ __forceinline__ float quantise_row(const struct team *team, uint32_t *warps)
{
	if (!team->way.smooth || team->operand->inner > QS_ROWS_HELD)
		return quantise_swept(team, warps);
	return team->operand->format == QS_FP8_E5M2 ? quantise_held(team, warps, QS_FP8_E5M2)
	                                            : quantise_held(team, warps, QS_FP8_E4M3);
}

/* A block works on as many rows at a time as its registers hold. */
extern "C" __global__ void __launch_bounds__(QS_ROWS_THREADS, QS_ROWS_BLOCKS_PER_SM)
        qs_quantise_rows(const __grid_constant__ struct qs_quantise_args args)
{
	__shared__ uint32_t warps[2][QS_ROWS_THREADS / WARP];
	const struct job job = job_of(&args, 0);
	const struct qs_quantise_operand *operand = job.operand;
	const unsigned threads = qs_row_threads(operand->inner), rows = QS_ROWS_THREADS / threads;
	struct team team = {operand, (int64_t)job.block * rows + threadIdx.x / threads, threads,
	                    threadIdx.x % threads, job.way};
	await_work_ahead();
	for (unsigned buffer = 0; team.index < operand->outer; buffer ^= 1) {
		const float inverse = quantise_row(&team, warps[buffer]);
		if (team.thread == 0)
			((float *)operand->scale)[team.index] = scale_of(inverse);
		team.index += (int64_t)job.blocks * rows;
	}
}

/* ---- a scale for each column ---------------------------------------------------------------- */

/* Maxima of a thread's LANES columns as four pairs. */
static __device__ __forceinline__ void columns_max(uint4 *most, const uint4 &chunk)
{
	most->x = pair_max(most->x, chunk.x);
	most->y = pair_max(most->y, chunk.y);
	most->z = pair_max(most->z, chunk.z);
	most->w = pair_max(most->w, chunk.w);
}

/* Maxima of the strip's columns over the tiles of one slice, as far as this thread sees them. */
static __device__ __forceinline__ uint4 slice_max(const struct job *job, unsigned slice,
                                                  unsigned strip)
{
	uint4 most = make_uint4(0, 0, 0, 0);
	const unsigned tiles = tiles_of(job->operand).row;
	for (unsigned i = slice; i < tiles; i += QS_COLUMN_SLICES) {
		struct patch patch;
		load_patch(&patch, job, {i, strip});
		nan_for_inf(&patch);
#pragma unroll
		for (int j = 0; j < TILE_LOADS; j++)
			columns_max(&most, patch.data[j]);
	}
	return most;
}

/* The maxima of two columns of the block's strip, one thread's part of them being a uint4. */
static __device__ __forceinline__ uint32_t meet(const uint4 shared[QS_QUANTISE_THREADS])
{
	const uint32_t *words = (const uint32_t *)shared + threadIdx.x;
	uint32_t most = 0;
#pragma unroll 4
	for (int i = 0; i < QS_QUANTISE_THREADS / TILE_CHUNKS; i++)
		most = __vmaxs2(most, words[i * (QS_TILE_INNER / 2)]);
	return most;
}

/* A block takes a strip, QS_TILE_INNER columns, of a slice, every QS_COLUMN_SLICES-th tile. Strips
 * are numbered first, so that neighbours are read together. */
extern "C" __global__ void __launch_bounds__(QS_QUANTISE_THREADS, QS_QUANTISE_BLOCKS_PER_SM)
        qs_amax_columns(const __grid_constant__ struct qs_quantise_args args)
{
	__shared__ uint4 shared[QS_QUANTISE_THREADS];
	const struct job job = job_of(&args, 0);
	await_work_ahead();
	const unsigned strips = tiles_of(job.operand).col;
	const int64_t width = qs_k_padded(job.operand->inner) / 2;
	uint32_t *partials = (uint32_t *)job.operand->partials;
	for (unsigned item = job.block; item < strips * QS_COLUMN_SLICES; item += job.blocks) {
		const struct tile at = tile_of(item, strips); /* row: slice, col: strip */
		const int64_t word = (int64_t)at.col * (QS_TILE_INNER / 2) + threadIdx.x;
		shared[threadIdx.x] = slice_max(&job, at.row, at.col);
		__syncthreads();
		if (threadIdx.x < QS_TILE_INNER / 2 && word < width)
			partials[at.row * width + word] = meet(shared);
		__syncthreads();
	}
}

/* Factors of the LANES columns from `col` on, which may lie beyond the last. */
static __device__ __forceinline__ struct factors
column_factors(const struct qs_quantise_operand *operand, int64_t col, uint32_t format)
{
	const int64_t width = qs_k_padded(operand->inner);
	uint4 most = make_uint4(0, 0, 0, 0);
	struct factors factors;
#pragma unroll
	for (int i = 0; i < QS_COLUMN_SLICES; i++) {
		const uint16_t *partial = (const uint16_t *)operand->partials + i * width + col;
		const uint4 slice =
		        col < width ? __ldg((const uint4 *)partial) : make_uint4(0, 0, 0, 0);
		most = make_uint4(__vmaxs2(most.x, slice.x), __vmaxs2(most.y, slice.y),
		                  __vmaxs2(most.z, slice.z), __vmaxs2(most.w, slice.w));
	}
	const uint32_t words[LANES / 2] = {most.x, most.y, most.z, most.w};
#pragma unroll
	for (int i = 0; i < LANES / 2; i++)
		factors.pair[i] = pair_of(inverse_of(words[i] << 16, format),
		                          inverse_of(words[i] & 0xffff0000u, format));
	return factors;
}

static __device__ __forceinline__ void
store_scales(const struct factors &factors, const struct qs_quantise_operand *operand, int64_t col)
{
	float *scale = (float *)operand->scale + col;
#pragma unroll
	for (int i = 0; i < LANES; i++) {
		const uint32_t pair = factors.pair[i / 2];
		if (col + i < operand->inner)
			scale[i] = scale_of(i % 2 ? high_of(pair) : low_of(pair));
	}
}

/* As pass_tiles. The tiles of the first row, whose threads know the factors, write the scales. */
static __device__ __forceinline__ void pass_columns(const struct job *job, struct tiles *tiles,
                                                    uint32_t format)
{
	const struct qs_quantise_operand *operand = job->operand;
	struct route route = route_of(job);
	struct patch patch;
	if (!ends(route))
		load_patch(&patch, job, route.at);
	for (unsigned buffer = 0; !ends(route); buffer ^= 1) {
		const struct tile done = route.at;
		const struct place at = corner_of(done);
		const struct factors factors = column_factors(operand, at.col, format);
		nan_for_inf(&patch);
		share(cast_all(patch, factors, format), tiles->chunk[buffer]);
		if (at.row == 0)
			store_scales(factors, operand, at.col);
		__syncthreads();
		step_on(&route);
		if (!ends(route))
			load_patch(&patch, job, route.at);
		store_turned(tiles->chunk[buffer], operand, done);
	}
}

extern "C" __global__ void __launch_bounds__(QS_QUANTISE_THREADS, QS_QUANTISE_BLOCKS_PER_SM)
        qs_cast_columns(const __grid_constant__ struct qs_quantise_args args)
{
	__shared__ struct tiles tiles;
	const struct job job = job_of(&args, 1);
	await_work_ahead();
	if (job.operand->format == QS_FP8_E5M2)
		pass_columns(&job, &tiles, QS_FP8_E5M2);
	else
		pass_columns(&job, &tiles, QS_FP8_E4M3);
}
