/* Products of few tokens with weights kept in 4 or 8 bits: storage, kernel names, parameters, and
 * launch geometry.
 *
 * Shared by the CUDA kernels (nf4.cu), the engine that launches them, and their C references
 * (tests/oracle/nf4.c). Plain C, fixed-width types, no CUDA headers.
 *
 * A weight W is n rows (outputs) of k contiguous bf16, ld apart, k a multiple of 64. Activations X
 * are `tokens` rows of k bf16, ldx apart; D is `tokens` rows of n, ldd apart. D = X W', in cuBLAS's
 * words the TN product with m = n and n = tokens.
 *
 * Storage. W is cut into tiles of 64 rows x 64 columns, numbered along k first; the last tiles
 * along n are filled up with zeros. Inside a tile, elements lie as mma.m16n8k16 wants its A
 * operand. With
 *
 *     row = 16 w + 8 high + g, column = 16 step + 8 half + 2 t + odd, lane = 32 w + 4 g + t
 *
 * an element is in
 *
 *     NF4: byte 16 lane + 4 step + 2 half + high, odd = 0 in its upper four bits
 *     fp8: byte 16 lane + 2048 (step / 2) + 8 (step % 2) + 4 half + 2 odd + high
 *
 * An NF4 tile ends with the bf16 absmax of its 64 rows, row above at 16 w + 2 g + high. That is
 * 4.25 bits a weight. An fp8 weight has one fp32 scale for each row besides.
 *
 * NF4 numbers are those of bitsandbytes's CUDA kernels, bit for bit: absmax = max |x| of 64
 * elements along k; code(x * (1 / absmax)) by comparing with the midpoints between the codebook's
 * values, a tie going to the lower code. Exceptions: a block whose absmax is below the least normal
 * number, or is not finite, has absmax 0 and code 7 everywhere, that is zeros; in the second case
 * the descriptor says `nonfinite`, and the copy must not be used. fp8 numbers are e4m3 by the rules
 * of quantise.h, with a scale for each row.
 */
#ifndef QS_KERNELS_NF4_H
#define QS_KERNELS_NF4_H

#include <stdint.h>

#include "kernels/quantise.h"

#ifdef __CUDACC__
#define QS_TABLE static __constant__ const
#else
#define QS_TABLE static const
#endif

#define QS_WEIGHT_TILE    64                        /* rows and columns of a tile            */
#define QS_NF4_CODE_BYTES 2048                      /* of a tile, before its absmax          */
#define QS_NF4_TILE_BYTES (QS_NF4_CODE_BYTES + 128) /* a multiple of 128                     */
#define QS_FP8_TILE_BYTES 4096                      /* of an fp8 tile                        */
#define QS_TOKENS_MAX     64                        /* of a product                          */
#define QS_AMAX_LEAST     0x0080                    /* bits of bf16: least normal number     */

/* What the products take codes for: the codebook times a constant, rounded to bf16, and the
 * constant that undoes it. Rounded as it is, the codebook is off by 58 dB; the constant is the one
 * for which the 16 values happen to fall closest to bf16 numbers, for normally distributed weights:
 * 62 dB. (What bitsandbytes multiplies with, rounded element by element, is off by 55 dB.) */
#define QS_NF4_UNSCALE 0x1.645dc6p-1f
QS_TABLE uint16_t qs_nf4_scaled[16] = {
        0xbfb8, 0xbf80, 0xbf41, 0xbf11, 0xbed1, 0xbe88, 0xbe06, 0x0000,
        0x3dea, 0x3e6d, 0x3eb5, 0x3ef9, 0x3f22, 0x3f4f, 0x3f85, 0x3fb8,
};

/* The codebook as bits of fp32, and the least number above which code i + 1 is better than i. */
QS_TABLE uint32_t qs_nf4_codebook[16] = {
        0xbf800000, 0xbf3239b1, 0xbf066b30, 0xbeca32a0, 0xbe91a24d, 0xbe3d353f,
        0xbdba7871, 0x00000000, 0x3da2faff, 0x3e24cae3, 0x3e7c04dd, 0x3ead033a,
        0x3ee1a4b8, 0x3f1007ab, 0x3f3913b3, 0x3f800000,
};
QS_TABLE uint32_t qs_nf4_midpoints[15] = {
        0xbf591cd8, 0xbf1c5270, 0xbeeb8480, 0xbeadea76, 0xbe703cec,
        0xbe0d38bc, 0xbd3a7871, 0x3d22faff, 0x3df64862, 0x3e5067e0,
        0x3e9582d4, 0x3ec753f9, 0x3f006d04, 0x3f248daf, 0x3f5c89da,
};

/* A packed weight as kernels see it, in device memory, so that a captured graph sees what changes.
 * Zero it before packing. 64 bytes, aligned to 16. */
struct qs_weight {
	uint64_t packed;  /* device pointer to the tiles; set by packing                         */
	uint64_t scale;   /* device pointer, float[n], fp8 only; set by packing                  */
	uint32_t valid;   /* products may use the tiles; set by the host, cleared by products    */
	uint32_t failed;  /* a product found that the source has changed; cleared by checks      */
	uint32_t turn;    /* number of sampling products so far: which row is compared next      */
	uint32_t readers; /* blocks of the running product that know `turn`; zero between them   */
	uint32_t amax;    /* bits of fp32: largest absmax; set by packing                        */
	uint32_t nonfinite; /* W holds NaN or Inf: the tiles are not used; set by packing */
	uint64_t outcome; /* device address of struct qs_hash_outcome, where to count escapes; or 0
	                   */
	uint32_t pad[4];  /* zero                                                                */
};

/* Parameter of qs_nf4_pack and qs_fp8_pack. 64 bytes. */
struct qs_pack_args {
	uint64_t source; /* device pointer, bf16, 2-byte aligned; faster if rows are 16-byte aligned
	                  */
	uint64_t packed; /* device pointer, tiles, 128-byte aligned, written */
	uint64_t scale;  /* device pointer, float[n], written by qs_fp8_pack  */
	uint64_t weight; /* device pointer, struct qs_weight, zeroed before */
	int64_t ld; /* distance of rows, elements                                                */
	int64_t n;  /* rows                                                                      */
	int64_t k;  /* columns, a multiple of 64                                                 */
	uint64_t when; /* device pointer, uint32_t: nothing is done where it is 0; or 0: always */
};

/* Parameter of qs_nf4_expand. A target may be 0: not wanted. 64 bytes. */
struct qs_expand_args {
	uint64_t weight; /* device pointer, struct qs_weight: packed and amax are read            */
	uint64_t straight; /* device pointer, e4m3[n][k], 16-byte aligned, or 0 */
	uint64_t turned; /* device pointer, e4m3[k][n padded to 16], 16-byte aligned, or 0        */
	uint64_t scale;  /* device pointer, float: the dequantisation scale of both, or 0; NaN where
	                    the weight is nonfinite, so that it shows                            */
	uint64_t bf16;   /* device pointer, bf16[n][k], 16-byte aligned, or 0                     */
	int64_t n, k;    /* of the weight                                                         */
	uint64_t pad;    /* zero                                                                  */
};

#define QS_ACTIVATION_NONE 0
#define QS_ACTIVATION_RELU 1
#define QS_ACTIVATION_GELU 2 /* 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) */

#define QS_PRODUCT_FP32   1 /* D is fp32, not bf16                                                */
#define QS_PRODUCT_FROZEN 2 /* the source is not sampled */
#define QS_PRODUCT_EARLY  4 /* tiles were complete before the work ahead in the stream began */
#define QS_PRODUCT_MAPPED 8 /* X is read through the map */

/* Parameter of the products. 128 bytes. */
struct qs_product_args {
	uint64_t weight;     /* device pointer, struct qs_weight                                  */
	uint64_t packed;     /* device pointer, its tiles, or 0: see below                        */
	uint64_t scale;      /* device pointer, fp8 with `packed`: its scales                     */
	uint64_t source;     /* device pointer, W itself, bf16                                    */
	uint64_t x;          /* device pointer, bf16; faster if rows are 16-byte aligned          */
	uint64_t d;          /* device pointer, bf16 or fp32; read if beta is not 0               */
	uint64_t bias;       /* device pointer, bf16[n], or 0                                     */
	int64_t ld;          /* distances of rows in elements: of W                               */
	int64_t ldx;         /* of X                                                              */
	int64_t ldd;         /* of D                                                              */
	int64_t n, k;        /* of W                                                              */
	float alpha, beta;   /* see below                                                         */
	uint32_t tokens;     /* 1..64                                                             */
	uint32_t activation; /* QS_ACTIVATION_*                                                   */
	uint32_t flags;      /* QS_PRODUCT_*                                                      */
	uint32_t strips; /* rows of tiles that a block works on: 1, 2, 4; elsewhere than on Hopper 4
	                  */
	uint32_t split;  /* blocks that share a sum over k: the size of a cluster             */
	uint32_t pad;    /* zero                                                              */
};

/* Parameter of the kernels of products. 256 bytes, aligned as the map wants to be. */
struct qs_mapped_args {
	struct qs_product_args
	        product; /* wide: `tokens` has no bound, `strips` is QS_WIDE_STRIPS */
	uint64_t map[16] __attribute__((aligned(64))); /* CUtensorMap of X: see map.h          */
};

/*
 * Kernels, each `extern "C" __global__ void NAME(ARGS)`, launched with a one-dimensional grid.
 * Indices are 64 bits wide.
 *
 * qs_nf4_pack    (struct qs_pack_args) makes the tiles, reading 2 bytes and writing 0.53 for each
 *                weight. Any number of blocks of QS_PACK_THREADS is right. Sets weight->packed,
 *                amax and nonfinite.
 * qs_fp8_pack    the same for e4m3 tiles and their scales; reads W twice.
 * qs_nf4_expand  (struct qs_expand_args) makes fp8 operands of cuBLASLt, or the bf16 weights that
 *                bitsandbytes would restore, bit for bit. The scale is that of quantise.h for amax;
 *                padding is zero. Any number of blocks of QS_PACK_THREADS is right.
 *
 * qs_w4a16_T, qs_w8a16_T (struct qs_mapped_args), T = 8, 16 or 32 at least `tokens`, or 32 for
 * more: D = activation(alpha * X W' + beta * D + bias), each product exact, sums in fp32. A row of
 * D has the same bits for every number of tokens and in every run on the same kind of GPU. Where
 * the tiles are not valid W itself is multiplied, slower. Unless frozen, each block compares one
 * row, turn modulo 64, of every tile it works on with what W now makes of it. On a difference it
 * clears `valid`, sets `failed`, counts an escape if that was not set before, and computes its part
 * from W itself. Whatever changes in W is so seen within 64 calls, and what changes many rows at
 * once. A call that gives `packed` starts to load tiles before it knows whether they are valid: the
 * memory must stay mapped as long as the call may run, in a captured graph too. Where the
 * descriptor names other tiles by then, they count as not valid. Otherwise the kernel looks them up
 * first. X, D and bias must not overlap W's copy; X must be below 2^120 in magnitude. Only code
 * made for compute capability 9.0 looks at the map, if the call is QS_PRODUCT_MAPPED: it reads X
 * faster through one. Launched by the geometry of qs_product_plan, as clusters of `cluster` blocks.
 * Code made for compute capability 9.0 or later waits itself for the work ahead of it in the
 * stream: it may be launched with CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION. If the
 * call is QS_PRODUCT_EARLY and gives `packed` it then loads the first tiles before that work has
 * ended, and uses nothing else that it finds in memory; whether they are complete is for the caller
 * to know (src/engine/thin.c).
 *
 * qs_w4a16_wide_T (struct qs_mapped_args), T = 64 or 128, for more tokens, on compute
 * capability 9.0 only: the same product of weights that are bf16 numbers, code times absmax rounded
 * once, as bitsandbytes multiplies them. X is read through a tensor map: its rows are 16-byte
 * aligned. The bits of a row of D differ from those above, and do not depend on the number of
 * tokens as long as this needs the same number of 128s. Launched by the geometry of qs_wide_plan;
 * all else as above.
 */
#define QS_KERNEL_NF4_PACK   "qs_nf4_pack"
#define QS_KERNEL_FP8_PACK   "qs_fp8_pack"
#define QS_KERNEL_NF4_EXPAND "qs_nf4_expand"
#define QS_PRODUCT_KINDS     3 /* of T */
static const char *const qs_kernel_w4a16[QS_PRODUCT_KINDS] = {
        "qs_w4a16_8",
        "qs_w4a16_16",
        "qs_w4a16_32",
};
static const char *const qs_kernel_w8a16[QS_PRODUCT_KINDS] = {
        "qs_w8a16_8",
        "qs_w8a16_16",
        "qs_w8a16_32",
};

#define QS_WIDE_KINDS 2 /* of T */
static const char *const qs_kernel_wide[QS_WIDE_KINDS] = {
        "qs_w4a16_wide_64",
        "qs_w4a16_wide_128",
};

#define QS_PACK_THREADS       256
#define QS_PACK_BLOCKS_PER_SM 4

#define QS_STRIPS_MAX      4                      /* row tiles of a block                         */
#define QS_SPLIT_MAX       4                      /* blocks of a cluster                          */
#define QS_SPAN            32u                    /* tokens of a block                            */
#define QS_PAIRS           8                      /* pairs of warps, each at work on a tile       */
#define QS_MULTIPLIERS     (QS_PAIRS * 64)        /* their threads                                */
#define QS_PRODUCT_THREADS (QS_MULTIPLIERS + 128) /* and four warps for sampling */
#define QS_HOPPER_THREADS  (QS_PRODUCT_THREADS + 128) /* and four, of which two feed */
#define QS_PARTIAL_PITCH   68 /* floats of a token's sums over the rows of a tile */
#define QS_PARTIAL_BYTES   (QS_PAIRS * QS_SPAN * QS_PARTIAL_PITCH * 4)
#define QS_TABLE_BYTES     65536 /* of codes, a copy for each bank, and gaps     */
#define QS_SAMPLE_STEPS    4     /* sampled rows that eight lanes have on their way */
#define QS_SAMPLE_BYTES    (QS_SAMPLE_STEPS * 16 * 256)
#define QS_STAGE_SCALES    (QS_MULTIPLIERS / 32 * 64) /* bytes, of a step's parts            */
#define QS_CONTROL_BYTES   1024 /* what the threads of a block tell each other  */
/* Stages of X, each what the pairs take in turn, elsewhere than on Hopper. */
#define QS_STAGES  2
#define QS_X_BYTES (QS_STAGES * QS_PAIRS / QS_STRIPS_MAX * QS_SPAN * 2 * QS_WEIGHT_TILE)
/* Sums of a row of tiles that the blocks of a cluster give one of them. */
#define QS_LANDING_BYTES (QS_SPAN * QS_WEIGHT_TILE * 4)
/* Hopper: stages of tiles and X for all pairs, for blocks of T tokens; with more strips X is less.
 */
#define QS_STAGE_TILES(tile_bytes) (QS_PAIRS * (tile_bytes))
#define QS_STAGE_BYTES(tokens, tile_bytes)                                                         \
	(QS_STAGE_TILES(tile_bytes) + QS_PAIRS * (tokens)*2 * QS_WEIGHT_TILE)
#define QS_STAGES_BYTES                    153600
#define QS_RING_STAGES(tokens, tile_bytes) (QS_STAGES_BYTES / QS_STAGE_BYTES(tokens, tile_bytes))
#define QS_RING_STAGES_MAX                 6
#define QS_RING_BYTES                      (QS_STAGES_BYTES + QS_LANDING_BYTES)
#define QS_HOPPER_SHARED                   (QS_TABLE_BYTES + QS_RING_BYTES + QS_CONTROL_BYTES)
#define QS_SHARED_BYTES                                                                            \
	(QS_TABLE_BYTES + QS_SAMPLE_BYTES + QS_STAGES * QS_STAGE_SCALES + QS_X_BYTES +             \
	 QS_CONTROL_BYTES)

/* Wide products: a group of four warps multiplies a row of tiles with T tokens; another feeds it
 * with X, one more samples. */
#define QS_WIDE_STRIPS        2u  /* row tiles of a block                                        */
#define QS_WIDE_SPAN          128 /* the larger T                                                */
#define QS_WIDE_MULTIPLIERS   (QS_WIDE_STRIPS * 128)
#define QS_WIDE_THREADS       (QS_WIDE_MULTIPLIERS + 256)
#define QS_WIDE_STAGES        5 /* of X, T = 128; twice as many of half the size                 */
#define QS_WIDE_X_BYTES       (QS_WIDE_STAGES * QS_WIDE_SPAN * QS_WEIGHT_TILE * 2)
#define QS_WIDE_LANDING_BYTES (QS_WIDE_SPAN * QS_WIDE_STRIPS * QS_WEIGHT_TILE * 4)
#define QS_WIDE_SHARED        (QS_TABLE_BYTES + QS_WIDE_X_BYTES + QS_WIDE_LANDING_BYTES + QS_CONTROL_BYTES)

/* What the products need to know of a device. */
struct qs_product_device {
	int sms;    /* multiprocessors                                                         */
	int hopper; /* compute capability is 9.0                                               */
	int clusters[3]; /* Hopper: how many clusters of 1, 2 and 4 blocks of QS_PRODUCT_THREADS and
	                  * QS_HOPPER_SHARED bytes run at once; cuOccupancyMaxActiveClusters tells
	                  */
};

/* Launch geometry of a product. */
struct qs_product_geometry {
	uint32_t kind;    /* index of T, 0..2                         */
	uint32_t blocks;  /* grid                                     */
	uint32_t threads; /* of a block                               */
	uint32_t cluster; /* blocks of a cluster; 1 = plain launch    */
	uint32_t shared;  /* bytes of dynamic shared memory           */
};

QS_INLINE int64_t qs_weight_tiles(int64_t n, int64_t k)
{
	return qs_shares(n, QS_WEIGHT_TILE) * (k / QS_WEIGHT_TILE);
}

static inline int64_t qs_nf4_bytes(int64_t n, int64_t k)
{
	return qs_weight_tiles(n, k) * QS_NF4_TILE_BYTES;
}

static inline int64_t qs_fp8_bytes(int64_t n, int64_t k)
{
	return qs_weight_tiles(n, k) * QS_FP8_TILE_BYTES;
}

/* Blocks that fill a device with the packing of n x k, or with its expansion. */
static inline uint32_t qs_pack_blocks(int64_t n, int64_t k, int sms)
{
	return qs_at_most(qs_weight_tiles(n, k), (int64_t)sms * QS_PACK_BLOCKS_PER_SM);
}

static inline uint32_t qs_product_kind(uint32_t tokens)
{
	return tokens <= 8 ? 0 : tokens <= 16 ? 1 : 2;
}

/* T of this kind. */
QS_INLINE uint32_t qs_product_tokens(uint32_t kind)
{
	return QS_SPAN >> (QS_PRODUCT_KINDS - 1 - kind);
}

/* Rows that the X of a block takes in a stage for each turn. */
QS_INLINE uint32_t qs_tokens_of_box(uint32_t tokens, uint32_t kind)
{
	return tokens < qs_product_tokens(kind) ? tokens : qs_product_tokens(kind);
}

/* Steps that a block takes: each is a tile of each pair of warps. */
QS_INLINE int64_t qs_product_steps(int64_t k, int64_t strips, int64_t split)
{
	return qs_shares(qs_shares(k / QS_WEIGHT_TILE, split), QS_PAIRS / strips);
}

/* What a product takes, in bytes that a multiprocessor reads from memory. X comes from the L2
 * cache, and counts little. A wave of blocks costs its start and end, and a cluster its exchange of
 * sums: as measured on an H200. */
static inline int64_t qs_product_cost(int64_t n, int64_t k, int64_t tile_bytes, int64_t strips,
                                      int64_t split, int64_t clusters)
{
	const int64_t waves = qs_shares(qs_shares(n, strips * QS_WEIGHT_TILE), clusters);
	const int64_t x_bytes = QS_PAIRS / strips * QS_SPAN * 2 * QS_WEIGHT_TILE / 16;
	return waves * (qs_product_steps(k, strips, split) * (QS_PAIRS * tile_bytes + x_bytes) +
	                65536 + (split - 1) * 40960);
}

/* Chooses strips and split by n and k alone, so that the number of tokens changes no bit. */
static inline void qs_product_split(struct qs_product_args *args, int64_t tile_bytes,
                                    const struct qs_product_device *device)
{
	int64_t least = INT64_MAX;
	for (int strips = QS_STRIPS_MAX; strips >= 1; strips /= 2)
		for (int i = 0; i < 3; i++) {
			if (device->clusters[i] < 1)
				continue;
			const int64_t cost = qs_product_cost(args->n, args->k, tile_bytes, strips,
			                                     1 << i, device->clusters[i]);
			if (cost >= least)
				continue;
			least = cost;
			args->strips = (uint32_t)strips;
			args->split = 1u << i;
		}
}

/* Says how to launch args with its strips and split. */
static inline struct qs_product_geometry qs_product_geometry(const struct qs_product_args *args,
                                                             const struct qs_product_device *device)
{
	const int64_t rows = (int64_t)args->strips * QS_WEIGHT_TILE;
	const struct qs_product_geometry geometry = {
	        .kind = qs_product_kind(args->tokens),
	        .blocks = (uint32_t)(qs_shares(args->n, rows) * args->split *
	                             qs_shares(args->tokens, QS_SPAN)),
	        .threads = (uint32_t)(device->hopper ? QS_HOPPER_THREADS : QS_PRODUCT_THREADS),
	        .cluster = args->split,
	        .shared = device->hopper ? QS_HOPPER_SHARED : QS_SHARED_BYTES,
	};
	return geometry;
}

/* Completes args and says how to launch. */
static inline struct qs_product_geometry qs_product_plan(struct qs_product_args *args, int fp8,
                                                         const struct qs_product_device *device)
{
	args->strips = QS_STRIPS_MAX;
	args->split = 1;
	if (device->hopper)
		qs_product_split(args, fp8 ? QS_FP8_TILE_BYTES : QS_NF4_TILE_BYTES, device);
	return qs_product_geometry(args, device);
}

/* Tokens of a block of this kind. */
QS_INLINE uint32_t qs_wide_tokens(uint32_t kind)
{
	return QS_WIDE_SPAN >> (QS_WIDE_KINDS - 1 - kind);
}

/* Clusters of a wide product. */
QS_INLINE int64_t qs_wide_clusters(int64_t n, int64_t tokens, uint32_t kind)
{
	return qs_shares(n, QS_WIDE_STRIPS * QS_WEIGHT_TILE) *
	       qs_shares(tokens, qs_wide_tokens(kind));
}

/* What a wide product takes, in clocks: a step decodes a tile of each strip whatever T is. */
static inline int64_t qs_wide_cost(const struct qs_product_args *args, uint32_t kind, int64_t split,
                                   int64_t clusters)
{
	const int64_t tokens = qs_shares(args->tokens, QS_WIDE_SPAN) * QS_WIDE_SPAN;
	const int64_t waves = qs_shares(qs_wide_clusters(args->n, tokens, kind), clusters);
	const int64_t steps = qs_shares(args->k / QS_WEIGHT_TILE, split);
	return waves * (steps * (160 + 3 * qs_wide_tokens(kind)) + 3000 + (split - 1) * 1000);
}

/* Completes the args of a wide product and says how to launch it. Tokens count by the 128. */
static inline struct qs_product_geometry qs_wide_plan(struct qs_product_args *args,
                                                      const struct qs_product_device *device)
{
	struct qs_product_geometry geometry = {.threads = QS_WIDE_THREADS,
	                                       .shared = QS_WIDE_SHARED};
	int64_t least = INT64_MAX;
	args->strips = QS_WIDE_STRIPS;
	for (uint32_t kind = 0; kind < QS_WIDE_KINDS; kind++)
		for (int i = 0; i < 3; i++) {
			if (device->clusters[i] < 1)
				continue;
			const int64_t cost = qs_wide_cost(args, kind, 1 << i, device->clusters[i]);
			if (cost >= least)
				continue;
			least = cost;
			geometry.kind = kind;
			args->split = 1u << i;
		}
	geometry.cluster = args->split;
	geometry.blocks =
	        (uint32_t)qs_wide_clusters(args->n, args->tokens, geometry.kind) * args->split;
	return geometry;
}

#endif
