/* operand/weight: the weight of a product, and the forms in which the kernels for few tokens take
 * it (kernels/nf4.h).
 *
 * weight.c  qs_weight_of qs_form_nf4 qs_form_fp8_tiles
 */
#ifndef QS_OPERAND_WEIGHT_H
#define QS_OPERAND_WEIGHT_H

#include "gemm/gemm.h"
#include "kernels/nf4.h"
#include "operand/cache.h"

/* Operand A as the weight W of a linear layer, as it lies in memory: [out][in] of a forward product
 * (TN), and also where W is read the other way (dX = dY W, or a layer that stores [in][out]: NN).
 * False if A cannot be one: it is the input of a weight gradient, or both operands are turned. */
bool qs_weight_of(const struct qs_gemm *g, struct qs_matrix *weight);

/* Tiles of NF4, and of e4m3 with a scale for each row: what qs_w4a16_* and qs_w8a16_* multiply.
 * Have descriptors, struct qs_weight; the columns must be a multiple of 64. A matrix with NaN or
 * Inf has neither form. */
extern const struct qs_form qs_form_nf4, qs_form_fp8_tiles;

#endif
