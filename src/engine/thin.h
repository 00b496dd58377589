/* Products of few tokens with a packed weight, by one kernel of ours.
 *
 * thin.c  qs_thin_fits qs_thin_fits_nf4 qs_thin_run
 */
#ifndef QS_ENGINE_THIN_H
#define QS_ENGINE_THIN_H

#include "engine/engine.h"
#include "operand/weight.h"

/* True if the kernels compute this product with A as the weight: TN, at most QS_TOKENS_MAX tokens,
 * K a multiple of 64, C read in place or not at all, an epilogue of bias, ReLU and GELU. */
bool qs_thin_fits(const struct qs_gemm *g, const struct qs_context *context);
/* The same for NF4 weights, of which there are kernels for more tokens: on Hopper, and if rows of X
 * are aligned to 16 bytes. */
bool qs_thin_fits_nf4(const struct qs_gemm *g, const struct qs_context *context);
/* Submits the product. `kind` is QS_FORM_NF4 or QS_FORM_FP8_TILES and says what `weight` is; with
 * `sample` the kernel compares a part of A with it, see kernels/nf4.h. */
CUresult qs_thin_run(const struct qs_context *context, const struct qs_stream *stream,
                     const struct qs_gemm *g, enum qs_form_kind kind,
                     const struct qs_kept_view *weight, bool sample);

#endif
