/* Products of up to 128 tokens and more with weights in 4 bits, for Hopper: see nf4.h.
 *
 * With more tokens than nf4_few.cuh is for the tensor cores are the limit, and the L2 cache, from
 * which X comes. A block has two strips, each of which a group of four warps multiplies with up to
 * 128 tokens by wgmma, so that a tile is decoded once for all of these: its A operand is laid out
 * as that of mma.sync, and comes from registers. While a tile is multiplied the next one is
 * decoded. A thread of a third group has the copy engine read X into a ring of stages, and the
 * warps of a fourth sample W. The scale goes into the weights, one rounding of each: scaling sums
 * would take as long as the product.
 */
#ifndef QS_KERNELS_NF4_WIDE_CUH
#define QS_KERNELS_NF4_WIDE_CUH

#include "kernels/nf4_result.cuh"
#include "kernels/nf4_sample.cuh"

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

/* ---- X and tiles ----------------------------------------------------------------------------- */

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

/* ---- results --------------------------------------------------------------------------------- */

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

/* ---- roles of warps -------------------------------------------------------------------------- */

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

#endif
