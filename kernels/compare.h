/* How far one result of a product is from another, and what quantising its operands cost: kernel
 * name, parameters and geometry.
 *
 * Shared by the CUDA kernel (compare.cu), the accuracy check that launches it, and its C reference
 * (tests/oracle/compare.c). Plain C, fixed-width types, no CUDA headers.
 *
 * A matrix is `rows` vectors of `cols` contiguous elements, ld apart; what lies between them is not
 * looked at. With r an element of the reference and c that of the candidate, over all elements for
 * which r is finite:
 *   signal = sum of r^2          amax  = maximum of |r|
 *   noise  = sum of (c - r)^2    error = maximum of |c - r|
 *   sqnr   = 10 log10(signal / noise), in dB, at least -QS_SQNR_MAX and at most QS_SQNR_MAX, which
 *            it is where both results are the same
 * Where c is not finite and r is, the element is spoilt: it adds to signal and amax only, and sqnr
 * is -QS_SQNR_MAX. Where r is not finite the program's own result says nothing, and the element is
 * skipped.
 *
 * Of an operand x, which was multiplied by 1 / scale and rounded to fp8 (kernels/quantise.h), over
 * its finite elements:
 *   saturated = elements with |x / scale| above the format's largest number
 *   flushed   = elements other than 0 with |x / scale| at most half its smallest number: they
 *               became 0
 */
#ifndef QS_KERNELS_COMPARE_H
#define QS_KERNELS_COMPARE_H

#include <stdint.h>

#include "kernels/quantise.h"

#define QS_SQNR_MAX 200.0f /* dB */

/* Half the smallest number other than 0, which rounds to the even 0. */
#define QS_E4M3_FLUSHED 0x1p-10f
#define QS_E5M2_FLUSHED 0x1p-17f

#define QS_COMPARE_THREADS       256
#define QS_COMPARE_BLOCKS_PER_SM 4    /* resident with at most 64 registers a thread      */
#define QS_COMPARE_PARTIALS      1024 /* most blocks of one matrix                        */
#define QS_COMPARE_SHARE         8192 /* least elements worth a block                     */

/* Types of the results. */
#define QS_COMPARE_BF16 0u
#define QS_COMPARE_FP32 1u

/* How the scales of an operand are indexed. */
#define QS_COMPARE_ONE_SCALE    0u
#define QS_COMPARE_SCALE_OF_ROW 1u /* of each vector                    */
#define QS_COMPARE_SCALE_OF_COL 2u /* of each element within the vector */

/* What one block found, or all of them. 48 bytes. */
struct qs_compare_partial {
	double signal, noise; /* of results                                       */
	uint64_t count[2];    /* of results: skipped, spoilt; of operands: saturated, flushed */
	float amax;           /* of the reference, or of the operand              */
	float error;          /* of results                                       */
	uint64_t pad;         /* zero                                             */
};

/* Scratch of one comparison. `ticket` must be 0 before, the rest needs no value. */
struct qs_compare_work {
	uint32_t ticket;                                            /* blocks that are done */
	uint32_t pad[3];                                            /* not written          */
	struct qs_compare_partial partial[3 * QS_COMPARE_PARTIALS]; /* by block */
};

/* What the host sees of it, in mapped host memory. 96 bytes. */
struct qs_compare_outcome {
	double signal, noise;
	uint64_t skipped, spoilt;          /* elements                                     */
	uint64_t saturated[2], flushed[2]; /* elements of A and of B                       */
	float sqnr;                        /* dB                                           */
	float amax, error;                 /* of the results                               */
	float operand_amax[2];             /* of A and of B                                */
	uint32_t pad;                      /* zero                                         */
	uint64_t sequence;                 /* of the last comparison; written last         */
};

/* An operand that was quantised. 56 bytes. */
struct qs_compare_operand {
	uint64_t source;        /* device pointer, bf16, 2-byte aligned                      */
	uint64_t scale;         /* device pointer, float[]: dequantisation scales            */
	int64_t rows, cols, ld; /* elements                                                  */
	uint32_t format;        /* QS_FP8_*                                                  */
	uint32_t scales;        /* QS_COMPARE_*_SCALE*                                       */
	uint32_t blocks;        /* that look at it; 0 = it is left out                       */
	uint32_t pad;           /* zero                                                      */
};

/* The parameter of the kernel. 192 bytes. */
struct qs_compare_args {
	uint64_t reference, candidate;        /* device pointers, aligned to an element         */
	int64_t rows, cols;                   /* elements, >= 1                                 */
	int64_t ld_reference, ld_candidate;   /* elements                                       */
	uint32_t type;                        /* QS_COMPARE_BF16 or _FP32                       */
	uint32_t blocks;                      /* that look at the results, >= 1                 */
	struct qs_compare_operand operand[2]; /* A and B                                        */
	uint64_t work;     /* device pointer, struct qs_compare_work, 16-byte aligned           */
	uint64_t outcome;  /* device address of struct qs_compare_outcome                       */
	uint64_t sequence; /* number of this comparison                                         */
};

/*
 * `extern "C" __global__ void qs_compare(struct qs_compare_args)`, launched with a one-dimensional
 * grid of the blocks of the results, of A and of B, in this order, QS_COMPARE_THREADS threads and
 * no dynamic shared memory. At most QS_COMPARE_PARTIALS blocks for each. Sums are added up in fp64
 * and in an order that depends only on the geometry: the same matrices give the same outcome.
 */
#define QS_KERNEL_COMPARE "qs_compare"

/* Blocks for a matrix on a device of `sms` multiprocessors. */
static inline uint32_t qs_compare_blocks(int64_t rows, int64_t cols, int sms)
{
	const int64_t most = (int64_t)sms * QS_COMPARE_BLOCKS_PER_SM;
	return qs_at_most(qs_shares(rows * cols, QS_COMPARE_SHARE),
	                  most < QS_COMPARE_PARTIALS ? most : QS_COMPARE_PARTIALS);
}

static inline uint32_t qs_compare_grid(const struct qs_compare_args *args)
{
	return args->blocks + args->operand[0].blocks + args->operand[1].blocks;
}

#endif
