/* The tensor map by which a wide product reads X: see nf4.h. For the engine that launches it, and
 * for what tests the kernels on a GPU. */
#ifndef QS_KERNELS_MAP_H
#define QS_KERNELS_MAP_H

#include <cuda.h>
#include <string.h>

#include "kernels/nf4.h"

/* Fills args->map for a kernel of this kind: boxes of a tile's columns of as many tokens as a block
 * has, zeros beyond the last token. CUDA_ERROR_INVALID_VALUE where rows of X are not aligned to 16
 * bytes. */
static inline CUresult qs_wide_map(__typeof__(cuTensorMapEncodeTiled) *encode,
                                   struct qs_wide_args *args, uint32_t kind)
{
	const struct qs_product_args *product = &args->product;
	const cuuint64_t size[2] = {(cuuint64_t)product->k, product->tokens};
	const cuuint64_t apart[1] = {(cuuint64_t)product->ldx * 2};
	const cuuint32_t box[2] = {QS_WEIGHT_TILE, qs_wide_tokens(kind)}, step[2] = {1, 1};
	CUtensorMap map;
	const CUresult error = encode(
	        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)(uintptr_t)product->x, size,
	        apart, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
	        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
	memcpy(args->map, &map, sizeof args->map);
	return error;
}

#endif
