/* The tensor maps by which products read X: see nf4.h. For the engine that launches them, and for
 * what tests the kernels on a GPU. */
#ifndef QS_KERNELS_MAP_H
#define QS_KERNELS_MAP_H

#include <cuda.h>
#include <string.h>

#include "kernels/nf4.h"

/* Fills args->map: X as the columns of a tile x tokens x tiles, in boxes of so many of the latter
 * two, with zeros beyond the last token. CUDA_ERROR_INVALID_VALUE where rows of X are not aligned
 * to 16 bytes. */
static inline CUresult qs_map_x(__typeof__(cuTensorMapEncodeTiled) *encode,
                                struct qs_mapped_args *args, uint32_t tokens, uint32_t tiles)
{
	const struct qs_product_args *product = &args->product;
	const cuuint64_t size[3] = {QS_WEIGHT_TILE, product->tokens,
	                            (cuuint64_t)(product->k / QS_WEIGHT_TILE)};
	const cuuint64_t apart[2] = {(cuuint64_t)product->ldx * 2, QS_WEIGHT_TILE * 2};
	const cuuint32_t box[3] = {QS_WEIGHT_TILE, tokens, tiles}, step[3] = {1, 1, 1};
	CUtensorMap map;
	const CUresult error = encode(
	        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)(uintptr_t)product->x, size,
	        apart, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
	        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
	memcpy(args->map, &map, sizeof args->map);
	return error;
}

/* For a wide product of this kind, which has no other way to X. */
static inline CUresult qs_wide_map(__typeof__(cuTensorMapEncodeTiled) *encode,
                                   struct qs_mapped_args *args, uint32_t kind)
{
	return qs_map_x(encode, args, qs_wide_tokens(kind), 1);
}

/* For another of this kind, after its plan: where there is a map to be had, it is said to be there.
 * `encode` may be NULL. */
static inline void qs_thin_map(__typeof__(cuTensorMapEncodeTiled) *encode,
                               struct qs_mapped_args *args, uint32_t kind)
{
	struct qs_product_args *product = &args->product;
	if (encode && product->x % 16 == 0 && product->ldx % 8 == 0 &&
	    !qs_map_x(encode, args, qs_tokens_of_box(product->tokens, kind),
	              QS_PAIRS / product->strips))
		product->flags |= QS_PRODUCT_MAPPED;
}

#endif
