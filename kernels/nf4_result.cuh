/* Results of all products (nf4_few.cuh, nf4_wide.cuh): operands from W and X themselves, for when
 * the tiles do not hold; sums of other blocks; alpha, beta, bias and activation.
 */
#ifndef QS_KERNELS_NF4_RESULT_CUH
#define QS_KERNELS_NF4_RESULT_CUH

#include "kernels/nf4_block.cuh"

/* The A operand of 16 rows and columns of W itself. */
static __device__ __forceinline__ void load_w(const struct qs_product_args &args, int64_t row,
                                              int64_t column, uint32_t *a)
{
	const unsigned lane = threadIdx.x % WARP;
	const bool pairs = rows_aligned(args.source, args.ld, 2);
	const uint16_t *source = (const uint16_t *)args.source + column + lane % 4 * 2;
	row += lane / 4;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		const int64_t at = row + i % 2 * 8;
		a[i] = at < args.n ? load_pair(source + at * args.ld + i / 2 * 8, pairs) : 0;
	}
}

/* The B operand of 16 columns of X and eight tokens, straight from memory. */
static __device__ __forceinline__ void load_b(const struct qs_product_args &args,
                                              const struct job &job, uint32_t token, int64_t column,
                                              uint32_t *b)
{
	const unsigned lane = threadIdx.x % WARP;
	const bool pairs = rows_aligned(args.x, args.ldx, 2);
	token += lane / 4;
	const uint16_t *x = (const uint16_t *)args.x + (int64_t)(job.token + token) * args.ldx +
	                    column + lane % 4 * 2;
#pragma unroll
	for (int i = 0; i < 2; i++)
		b[i] = token < job.tokens ? load_pair(x + i * 8, pairs) : 0;
}

static __device__ __noinline__ float activated(float value, uint32_t activation)
{
	if (activation == QS_ACTIVATION_RELU)
		return fmaxf(value, 0);
	if (activation == QS_ACTIVATION_GELU)
		return 0.5f * value *
		       (1 + tanhf(0.7978845608f * (value + 0.044715f * value * value * value)));
	return value;
}

static __device__ __forceinline__ void finish(const struct qs_product_args &args, float sum,
                                              uint32_t token, int64_t row)
{
	const int64_t at = token * args.ldd + row;
	const bool wide = args.flags & QS_PRODUCT_FP32;
	float *d32 = (float *)args.d + at;
	uint16_t *d16 = (uint16_t *)args.d + at;
	float value = args.alpha * sum;
	if (args.beta != 0)
		value += args.beta * (wide ? *d32 : float_of(*d16));
	if (args.bias)
		value += float_of(((const uint16_t *)args.bias)[row]);
	if (args.activation)
		value = activated(value, args.activation);
	if (wide)
		*d32 = value;
	else
		*d16 = (uint16_t)bf16_of(value);
}

/* Adds sums of four rows, those of all turns (or blocks) in their order. They are all loaded before
 * the first is added: one after the other would take long. */
static __device__ __forceinline__ float4 add_turns(const float *partial, uint32_t turns,
                                                   uint32_t apart)
{
	float4 part[QS_PAIRS];
#pragma unroll
	for (uint32_t i = 0; i < QS_PAIRS; i++)
		if (i < turns)
			part[i] = *(const float4 *)(partial + i * apart);
	float4 sum = part[0];
#pragma unroll
	for (uint32_t i = 1; i < QS_PAIRS; i++) {
		if (i >= turns)
			continue;
		sum.x += part[i].x;
		sum.y += part[i].y;
		sum.z += part[i].z;
		sum.w += part[i].w;
	}
	return sum;
}

static_assert(QS_SPLIT_MAX <= QS_PAIRS, "blocks of a cluster are added as turns are");

/* Results are sums times alpha, in bf16, and four rows of a token can be stored at once. */
static __device__ __forceinline__ bool results_are_plain(const struct qs_product_args &args)
{
	return args.beta == 0 && args.bias == 0 && args.activation == QS_ACTIVATION_NONE &&
	       !(args.flags & QS_PRODUCT_FP32) && rows_aligned(args.d, args.ldd, 4);
}

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
	return bf16_of(low) | bf16_of(high) << 16;
}

/* Four rows' results, of any kind. A function of its own so that the plain ones keep their
 * registers. */
static __device__ __noinline__ void finish_any(const struct qs_product_args &args, float4 sum,
                                               uint32_t token, int64_t row)
{
#pragma unroll 1
	for (int i = 0; i < 4 && row + i < args.n; i++) {
		finish(args, sum.x, token, row + i);
		sum = make_float4(sum.y, sum.z, sum.w, 0);
	}
}

static __device__ __forceinline__ void finish_four(const struct qs_product_args &args, float4 sum,
                                                   uint32_t token, int64_t row)
{
	const float alpha = args.alpha;
	if (results_are_plain(args) && row + 4 <= args.n)
		*(uint2 *)((uint16_t *)args.d + token * args.ldd + row) =
		        make_uint2(bf16_pair(alpha * sum.x, alpha * sum.y),
		                   bf16_pair(alpha * sum.z, alpha * sum.w));
	else
		finish_any(args, sum, token, row);
}

#endif
