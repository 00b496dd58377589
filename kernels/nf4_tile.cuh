/* Numbers, places in a tile, and loads of what may be unaligned, for the kernels of nf4_pack.cuh,
 * nf4_few.cuh and nf4_wide.cuh.
 */
#ifndef QS_KERNELS_NF4_TILE_CUH
#define QS_KERNELS_NF4_TILE_CUH

#include <stddef.h>

#include "kernels/nf4.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1
#else
#define HOPPER 0
#endif

#define WARP  32
#define FULL  0xffffffffu
#define CHUNK 8 /* bf16 elements of a 16-byte access */
#define STEPS 4 /* of 16 columns in a tile           */

#define QUARTER_ROWS 16 /* rows of a tile that lie together: those of a warp */

static_assert(sizeof(struct qs_weight) == 64, "layout is shared with the host");

/* ---- numbers -------------------------------------------------------------------------------- */

static __device__ __forceinline__ float float_of(uint32_t bf16)
{
	return __uint_as_float(bf16 << 16);
}

static __device__ __forceinline__ uint32_t bf16_of(float value)
{
	uint16_t bits;
	asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
	return bits;
}

/* What bitsandbytes divides by: 1 / absmax of -use_fast_math. */
static __device__ __forceinline__ float reciprocal(float value)
{
	float result;
	asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
	return result;
}

/* The absmax that is stored for a block whose largest |x| has these bits of bf16. */
static __device__ __forceinline__ uint32_t absmax_of(uint32_t magnitude)
{
	return magnitude < QS_AMAX_LEAST || magnitude >= 0x7f80 ? 0 : magnitude;
}

/* The power of two that quantise.h prescribes for e4m3 and bits of fp32 as amax. */
static __device__ __forceinline__ float inverse_of(uint32_t amax)
{
	const uint32_t floored = max(amax, __float_as_uint(QS_AMAX_FLOOR));
	const uint32_t beyond = (floored & 0x7fffffu) > 0x600000u;
	const uint32_t exponent = 254 + 7 - beyond - (floored >> 23);
	return amax == 0 ? 1.0f : __uint_as_float(exponent << 23);
}

static __device__ __forceinline__ float scale_of(float inverse)
{
	return __uint_as_float((254u << 23) - __float_as_uint(inverse));
}

/* Two values as e4m3, `low` in the low byte: nearest even, saturating; NaN and Inf are 0x7f. */
static __device__ __forceinline__ uint32_t e4m3(float value)
{
	const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
	const uint32_t rebias = 120u << 23, least = rebias + (1u << 23);
	const uint32_t subnormal = __float2uint_rn(__uint_as_float(min(magnitude, least)) * 0x1p9f);
	const uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1) - rebias) >> 20;
	if (magnitude >= 0x7f800000u)
		return QS_FP8_NAN;
	return (magnitude < least ? subnormal : min(normal, 0x7eu)) | (bits >> 24 & 0x80u);
}

static __device__ __forceinline__ uint32_t e4m3_pair(float low, float high)
{
	return e4m3(low) | e4m3(high) << 8;
}

/* The same for finite values. */
static __device__ __forceinline__ uint32_t e4m3_pair_finite(float low, float high)
{
#if __CUDA_ARCH__ >= 890
	uint16_t pair;
	asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
	return pair;
#else
	return e4m3_pair(low, high);
#endif
}

/* ---- tiles ---------------------------------------------------------------------------------- */

/* Lane of a tile that holds a row's column pair; see nf4.h. */
static __device__ __forceinline__ unsigned tile_lane(unsigned row, unsigned pair)
{
	return row / QUARTER_ROWS * WARP + row % 8 * 4 + pair % 4;
}

static __device__ __forceinline__ unsigned nf4_byte(unsigned row, unsigned pair)
{
	return tile_lane(row, pair) * 16 + pair / 4 * 2 + row % QUARTER_ROWS / 8;
}

/* Of the pair's first element; the second is two bytes further. */
static __device__ __forceinline__ unsigned fp8_byte(unsigned row, unsigned pair)
{
	return tile_lane(row, pair) * 16 + pair / 16 * (QS_FP8_TILE_BYTES / 2) + pair / 4 % 4 * 4 +
	       row % QUARTER_ROWS / 8;
}

static __device__ __forceinline__ unsigned absmax_place(unsigned row)
{
	return row / QUARTER_ROWS * QUARTER_ROWS + row % 8 * 2 + row % QUARTER_ROWS / 8;
}

/* ---- loads of W and X ----------------------------------------------------------------------- */

static __device__ __forceinline__ bool rows_aligned(uint64_t pointer, int64_t ld, unsigned elements)
{
	return pointer % (2 * elements) == 0 && ld % elements == 0;
}

/* Two neighbouring elements, the first in the low half. Like all loads of what the work ahead may
 * write, not one for data that nobody writes while the kernel runs: a product may have begun. */
static __device__ __forceinline__ uint32_t load_pair(const uint16_t *source, bool aligned)
{
	if (aligned)
		return *(const uint32_t *)source;
	return source[0] | (uint32_t)source[1] << 16;
}

/* A function of its own so that eight loads here cost the common path no registers. */
static __device__ __noinline__ uint4 load_unaligned(const uint16_t *source)
{
	return make_uint4(load_pair(source, false), load_pair(source + 2, false),
	                  load_pair(source + 4, false), load_pair(source + 6, false));
}

static __device__ __forceinline__ uint4 load_chunk(const uint16_t *source, bool aligned)
{
	return aligned ? __ldcs((const uint4 *)source) : load_unaligned(source);
}

static __device__ __forceinline__ uint32_t word_of(const uint4 &chunk, int i)
{
	return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

/* Bits of the largest magnitude of a chunk, NaN and Inf included: magnitudes order as integers. */
static __device__ __forceinline__ uint32_t chunk_max(const uint4 &chunk)
{
	uint32_t most = __vmaxu2(chunk.x & 0x7fff7fffu, chunk.y & 0x7fff7fffu);
	most = __vmaxu2(most, chunk.z & 0x7fff7fffu);
	most = __vmaxu2(most, chunk.w & 0x7fff7fffu);
	return max(most >> 16, most & 0xffffu);
}

#endif
