/* Products of up to 64 tokens with weights in 4 or 8 bits: see nf4.h.
 *
 * Memory is the limit: 8192 x 8192 in NF4 are 35.6 MB, 8.4 us at an H200's copy rate of 4.24 TB/s,
 * and the sampled rows of W another 2.1 MB. At that rate a multiprocessor has one clock for 30
 * weights. It decodes them by a table of pairs (a byte holds two codes) in shared memory, of which
 * each lane has a copy in a bank of its own: 64 weights a clock. The decoded weights are an operand
 * of mma.sync and never return to memory; the 64 columns of a tile share a scale, with which their
 * sums are multiplied in fp32 before they are added up.
 *
 * A block has 16 warps, each of which multiplies one half of a tile, 32 rows, at a time. Four more
 * warps compare the sampled rows of W. The blocks of a cluster share rows and split k. All partial
 * sums are added in one fixed order. On Hopper two warps have the copy engine bring tiles and X
 * into a ring of stages in shared memory, so that those that multiply do nothing else; elsewhere
 * these load the codes of the next steps into registers, and copy X themselves, a barrier a step.
 */
#ifndef QS_KERNELS_NF4_FEW_CUH
#define QS_KERNELS_NF4_FEW_CUH

#include "kernels/nf4_result.cuh"
#include "kernels/nf4_sample.cuh"

/* ---- sums ------------------------------------------------------------------------------------ */

#define QUARTERS 2 /* of a tile that a warp works on: half of it */

/* Sums of a lane over 32 rows and TOKENS tokens, as mma.m16n8k16 leaves them for each quarter and
 * eight tokens: rows g, g, g + 8, g + 8 and tokens 2 t, 2 t + 1, 2 t, 2 t + 1. */
template <int TOKENS> struct sums {
	float at[QUARTERS][TOKENS / 8][4];
};

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

/* ---- what a block works on ------------------------------------------------------------------- */

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

/* ---- X --------------------------------------------------------------------------------------- */

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

/* ---- results --------------------------------------------------------------------------------- */

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

#endif
