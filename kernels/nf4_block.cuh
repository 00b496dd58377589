/* What the blocks of all products (nf4_few.cuh, nf4_wide.cuh) have in common: decoding, what a
 * block works on, copies, clusters and launches, rings of stages.
 */
#ifndef QS_KERNELS_NF4_BLOCK_CUH
#define QS_KERNELS_NF4_BLOCK_CUH

#include "kernels/nf4_tile.cuh"

static_assert(sizeof(struct qs_product_args) == 128, "layout is shared with the host");
static_assert(sizeof(struct qs_mapped_args) == 256, "layout is shared with the host");

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

static __device__ __forceinline__ void multiply(float *sum, const uint32_t *a, const uint32_t *b)
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
	    "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
	    : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
	    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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

/* Codes that nobody needs again. */
static __device__ __forceinline__ uint4 load_codes(const uint8_t *from)
{
	uint4 value;
	asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
	             : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
	             : "l"(from));
	return value;
}

/* ---- X -------------------------------------------------------------------------------------- */

/* X of a tile's columns: rows of 128 bytes, one a token, their chunks of 16 bytes swizzled by the
 * lowest three bits of the token. Stages make a ring, and hold the X of all turns of a step. */
template <int TOKENS> static constexpr uint32_t x_bytes = TOKENS *QS_WEIGHT_TILE * 2;

/* All of `threads` threads that name barrier ID are here. */
template <uint32_t ID> static __device__ __forceinline__ void meet(uint32_t threads)
{
	static_assert(ID > 0 && ID < 16, "barrier 0 is the block's");
	asm volatile("bar.sync %0, %1;" ::"n"(ID), "r"(threads) : "memory");
}

/* ---- blocks of a cluster, launches ------------------------------------------------------------
 */

/* The work ahead in the stream has ended, and what it wrote can be read. Nothing to wait for unless
 * the launch allowed to begin before. */
static __device__ __forceinline__ void wait_for_work_ahead(void)
{
#if __CUDA_ARCH__ >= 900
	asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

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

#endif
