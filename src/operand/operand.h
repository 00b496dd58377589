/* operand/: the quantised form of the matrices of a product, made for the call or used again.
 *
 * What a scratch block holds from the last products of its stream is used again while its source is
 * known unchanged: no GPU work but our own was submitted since (the submission epoch), no product
 * of ours wrote over it, and it is plain device memory. So dY is quantised once for dgrad and
 * wgrad, and one X for the products of a layer that follow each other.
 *
 * quantise.c  qs_operands_plan qs_operands_total qs_quantise_launch qs_operands_launch
 * rows.c      qs_rows_total qs_rows_make
 * reuse.c     qs_operands_make qs_operands_wrote qs_operands_forget
 */
#ifndef QS_OPERAND_OPERAND_H
#define QS_OPERAND_OPERAND_H

#include <cublas_v2.h>

#include "device/device.h"
#include "gemm/gemm.h"
#include "kernels/quantise.h"

/* How both operands of one product are quantised: everything but the pointers. */
struct qs_operands {
	struct qs_quantise_operand shape[2]; /* ld, inner, outer, format; the rest is zero */
	bool turned[2];          /* the product takes the matrix transposed to its source         */
	_Atomic bool both[2];    /* the other orientation was asked for right after this product  */
	cublasOperation_t op[2]; /* of the quantised matrices in the product                      */
	int64_t ld[2];           /* bytes of a row of the quantised matrices                      */
	int64_t k;               /* of the product: K, rounded up to 16 where all rows are so     */
	size_t base;             /* bytes of the scratch block that are not ours                  */
	bool once;               /* nothing is kept for the next product: one half will do        */
};

/* The quantised operands of one call. */
struct qs_pair {
	CUdeviceptr data[2];  /* fp8                                   */
	CUdeviceptr scale[2]; /* dequantisation scales, fp32           */
	uint64_t bytes;       /* written for this call                 */
};

/* Lays out the operands of a product, `base` bytes into the scratch block: with K contiguous, or in
 * the orientations that the program has them in (`as_stored`). */
void qs_operands_plan(struct qs_operands *operands, const struct qs_key *key, bool as_stored,
                      size_t base);
/* Bytes of scratch that the operands need, or with `both` can make use of. */
size_t qs_operands_total(const struct qs_operands *operands, bool both);
/* Bytes of one orientation of operand i, rounded up to 256. */
size_t qs_operand_bytes(const struct qs_operands *operands, int i, bool turned);

/* Bytes from one scale to the next: cuBLASLt refuses scale pointers that are not aligned to 16. */
#define QS_SCALE_STRIDE 64

/* Parts of a scratch block begin at multiples of 256 bytes. */
static inline size_t qs_align_part(size_t offset)
{
	return (offset + 255) / 256 * 256;
}

/* Where the parts of a scratch block are. The operands of a product lie in one half, those of the
 * product before in the other. */
struct qs_parts {
	CUdeviceptr partials[2]; /* of each operand, kernels/quantise.h           */
	CUdeviceptr scale;       /* float[2][2]: of each half and operand         */
	CUdeviceptr half[2];     /* quantised matrices                            */
	size_t half_bytes;
};
struct qs_parts qs_scratch_parts(const struct qs_operands *operands,
                                 const struct qs_scratch *scratch);

/* Launches one kernel of kernels/quantise.h, so that it starts while the work ahead of it in the
 * stream ends where the driver, the device and the stream allow that. */
CUresult qs_quantise_launch(const struct qs_context *context, const struct qs_stream *stream,
                            CUfunction function, unsigned blocks, unsigned threads,
                            struct qs_quantise_args *args);
/* Launches what `args` says; operands without blocks are left alone. */
CUresult qs_operands_launch(const struct qs_context *context, const struct qs_stream *stream,
                            struct qs_quantise_args *args);

/* Gives the quantised operands of a call: those found in the locked scratch block if `reuse` allows
 * it, new ones otherwise. An operand that `pair` has already stays; the rest of it must be zero. */
CUresult qs_operands_make(struct qs_operands *operands, const struct qs_context *context,
                          const struct qs_stream *stream, struct qs_scratch *scratch,
                          const void *const source[2], bool reuse, struct qs_pair *pair);
/* One operand alone, made anew at `at`, 256-byte aligned, where it takes qs_operand_total() bytes.
 */
size_t qs_operand_total(const struct qs_operands *operands, int i);
CUresult qs_operand_make(const struct qs_operands *operands, int i,
                         const struct qs_context *context, const struct qs_stream *stream,
                         CUdeviceptr at, const void *source, struct qs_pair *pair);
/* Where the last amax of this matrix is kept: the prediction for the next time. 0 = nowhere. */
CUdeviceptr qs_history_of(const struct qs_context *context, const struct qs_quantise_operand *shape,
                          const void *source);
/* The same with a scale for each row along K, always made anew; what the block held is forgotten.
 */
size_t qs_rows_total(const struct qs_operands *operands);
CUresult qs_rows_make(const struct qs_operands *operands, const struct qs_context *context,
                      const struct qs_stream *stream, struct qs_scratch *scratch,
                      const void *const source[2], struct qs_pair *pair);
/* A product of ours writes the bytes [first, end): what was made from them is forgotten. To be
 * called after each product, with the scratch still locked. */
void qs_operands_wrote(struct qs_scratch *scratch, const void *first, const void *end);
/* Forgets everything the block holds. */
void qs_operands_forget(struct qs_scratch *scratch);
/* Operands that were made, and that were found made, in this process. */
uint64_t qs_operands_made(void);
uint64_t qs_operands_reused(void);

#endif
