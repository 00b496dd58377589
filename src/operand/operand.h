/* operand/: the quantised form of the matrices of a product.
 *
 * quantise.c  qs_operands_plan qs_operands_launch
 */
#ifndef QS_OPERAND_OPERAND_H
#define QS_OPERAND_OPERAND_H

#include "device/device.h"
#include "gemm/gemm.h"
#include "kernels/quantise.h"

/* How both operands of one product are quantised: everything but the pointers. */
struct qs_operands {
	struct qs_cast_args args; /* shapes, strides, blocks; pointers zero                    */
	unsigned amax_blocks;     /* grid of the amax launch                                   */
	unsigned cast_blocks;     /* grid of the cast launch                                   */
	int64_t k_padded;         /* bytes of a quantised row, K rounded up to 16              */
	size_t bytes[2];          /* quantised A and B                                         */
	size_t offset[2];         /* of quantised A and B in the scratch block                 */
	size_t scale_offset[2];   /* of their dequantisation scales (fp32)                     */
	size_t partials_offset;   /* of the maxima of the amax blocks                          */
	size_t total;             /* bytes of scratch in all                                   */
};

/* Lays out the operands of a product in scratch, from `base` bytes on. */
void qs_operands_plan(struct qs_operands *operands, const struct qs_key *key,
                      const struct qs_context *context, size_t base);
/* Launches amax and cast of both operands in the stream. The scratch is locked by the caller. */
CUresult qs_operands_launch(const struct qs_operands *operands, const struct qs_context *context,
                            const struct qs_stream *stream, const struct qs_scratch *scratch,
                            const void *a, const void *b);

#endif
