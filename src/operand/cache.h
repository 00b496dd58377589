/* operand/cache: weights that stay quantised between products, proven unchanged.
 *
 * A kept copy is a bf16 matrix in one form (fp8, NF4, ...) in device memory of ours. How it is
 * known to be what its source is now is the policy's `validity`:
 *
 *   verified  before each use a hash of the whole source is compared with that of what the copy was
 *             made from, and the copy is made anew where they differ: all on the device, in the
 *             stream of the use, also within a graph;
 *   tracked   the same, but only when something may have written the source (operand/track.h), and
 *             every check_every uses. At any other use a part of the source is compared with the
 *             copy, another one each time, by the product's own kernel or, where it has none of
 *             ours, by one before it (kernels/sample.h): what changed unseen is so found within 64
 *             uses, at once if it is much, and that product already is right; the next use knows of
 *             it, and from then on all are verified. Not available while qs_epoch_trusted() is
 *             false;
 *   frozen    never, by the user's word; every check_every uses the hash is compared after the
 *             fact, and a copy that is found old is reported and dropped.
 *
 * An operand is admitted when its content was the same at three uses (frozen: at its first use):
 * addresses whose content keeps changing, such as activations, the weights of a trainer, and
 * buffers into which program after program dequantises, are hashed after 3, 6, 12, ... further
 * uses, so that trying costs less and less. A copy that has to be made anew more often than every
 * 16th use is dropped.
 *
 * Which memory was written is known when the call that writes it returns, but not when the work
 * runs. A program that orders its streams by events submits a use of new contents after what writes
 * them, and the check runs in the stream of the use, after the writer. With orders that the host
 * gives later (values in memory, host functions) a check may run too early and find the old
 * contents: therefore the two uses after a suspicion verify as well.
 *
 * cache.c   qs_kept_find qs_kept_use qs_kept_use_data qs_kept_used qs_kept_before_graph
 *           qs_kept_forked
 * form.c    qs_form_fp8 qs_form_fp8_turned
 * admission.c memory.c check.c   inside, see kept.h
 */
#ifndef QS_OPERAND_CACHE_H
#define QS_OPERAND_CACHE_H

#include "device/device.h"
#include "gemm/reason.h"
#include "kernels/hash.h"
#include "policy/policy.h"

/* A bf16 matrix of the program in device memory: `rows` vectors of `cols` contiguous elements. */
struct qs_matrix {
	const void *data;
	int64_t rows, cols; /* elements, >= 1           */
	int64_t ld;         /* from row to row, elements */
};

/* What a form is made of. Sizes in bytes. */
struct qs_form_size {
	size_t data;
	size_t scale;
};

/* One order to make a copy. */
struct qs_making {
	struct qs_matrix source;
	CUdeviceptr data, scale; /* where to, 256-byte aligned                                  */
	CUdeviceptr descriptor;  /* 64 bytes, or 0 if the form has none                         */
	CUdeviceptr work;        /* struct qs_hash_work of the source: amax is known, and the
	                            launches must leave data and scale alone if work.stale is 0 */
	CUdeviceptr outcome;     /* struct qs_hash_outcome of the copy, 0 if it is not kept     */
};

/* Which form it is: the order of the counters (note/note.h). */
enum qs_form_kind {
	QS_FORM_FP8,
	QS_FORM_FP8_TURNED,
	QS_FORM_NF4,
	QS_FORM_FP8_TILES,
	QS_FORMS
};

/* A way to quantise. The cache knows nothing else of it. */
struct qs_form {
	enum qs_form_kind kind;
	/* Bytes; false if this matrix cannot have the form. */
	bool (*size)(const struct qs_matrix *source, struct qs_form_size *size);
	/* Submits the launches that fill data, scale and what of the descriptor depends on them. */
	CUresult (*make)(const struct qs_context *context, CUstream stream,
	                 const struct qs_making *making);
	/* Fills the descriptor as it is before the first make; NULL: the form has none. Its kernels
	 * must compute from the source where the word `valid` is 0. */
	void (*describe)(const struct qs_making *making, uint32_t image[QS_HASH_IMAGE]);
	/* The kernel that compares a part of a copy with its source (kernels/sample.h), for uses
	 * that do not themselves; NULL: they all do. */
	CUfunction (*sample)(const struct qs_context *context, uint32_t *flags);
	uint32_t valid, failed; /* words of the descriptor                                      */
	uint32_t reset;         /* bit for each word to be 0 before the copy is made anew       */
	bool finite;            /* no copy of a matrix with NaN or Inf; needs a descriptor      */
};

/* For cuBLASLt: e4m3 with one scale, rows as in the source, or transposed; rows padded with zeros
 * to 16 bytes (kernels/quantise.h). No descriptor. */
extern const struct qs_form qs_form_fp8, qs_form_fp8_turned;

/* A copy, held by the caller from qs_kept_find() to qs_kept_used(). */
struct qs_kept;

/* What a product needs of it. Valid in the stream until qs_kept_used(), in a graph for its life. */
struct qs_kept_view {
	CUdeviceptr data, scale;
	CUdeviceptr descriptor; /* 0 if the form has none                                        */
	uint64_t bytes;         /* written for this use: those of a copy made now, else 0        */
	bool settled; /* all that writes data and scale, up to this use, has ended on the device, as
	                 the host has seen; and no graph writes them                             */
};

/* Scratch that qs_kept_use() wants, 256-byte aligned, of the caller's stream or capture. */
#define QS_KEPT_WORK ((sizeof(struct qs_hash_work) + 255) / 256 * 256)

/* The copy of this matrix, new if it is admitted now; it may not have been made yet. Counts as a
 * use for admission, so call it once for each product. Waits for nothing. May submit a hash of the
 * source to the stream; not while capturing. Otherwise NULL and *why:
 *
 *   QS_REASON_CHANGING      not seen unchanged often enough yet, or it changes too often
 *   QS_REASON_UNTRACKED     the policy, the process or the kind of memory rules copies out
 *   QS_REASON_NONFINITE     the form needs finite numbers
 *   QS_REASON_CAPTURE_COLD  capturing, and there is no copy that is known to be complete
 *   QS_REASON_MEMORY        no device memory
 *   QS_REASON_CACHE_FULL    the limit is reached, or there are more copies than can be watched
 *   QS_REASON_UNAVAILABLE   this matrix cannot have the form
 *   QS_REASON_ERROR         a check of the copy could not be submitted; it was dropped
 */
struct qs_kept *qs_kept_find(struct qs_context *context, const struct qs_stream *stream,
                             const struct qs_matrix *source, const struct qs_form *form,
                             const struct qs_options *options, enum qs_reason *why);
/* Makes the copy good for work submitted to this stream from now on; `work` is QS_KEPT_WORK bytes.
 * On an error nothing may be done with the copy but qs_kept_used(). */
CUresult qs_kept_use(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work,
                     struct qs_kept_view *view);
/* The same for launches that take the data whatever the descriptor's word `valid` says, and compare
 * nothing: that is then done here, as for forms without a descriptor. In a graph, the whole copy is
 * checked. */
CUresult qs_kept_use_data(struct qs_kept *kept, const struct qs_stream *stream, CUdeviceptr work,
                          struct qs_kept_view *view);
/* A check that another thread began meanwhile, CUDA_ERROR_NOT_READY, is no failure of a capture. */
static inline enum qs_reason qs_reason_of_use(CUresult error)
{
	return error == CUDA_ERROR_NOT_READY ? QS_REASON_CAPTURE_COLD : QS_REASON_ERROR;
}
/* After the launches that read the copy were submitted, or were not. */
void qs_kept_used(struct qs_kept *kept);

/* Before the program launches a graph into this stream: checks the copies that this graph holds and
 * whose source may have been written. Not those of other graphs: the stream need not come after
 * whoever writes their sources. One load if no graph holds any. */
void qs_kept_before_graph(CUgraphExec exec, CUstream stream);
/* In a forked child, whose contexts are forgotten: forget that graphs hold copies. */
void qs_kept_forked(void);

#endif
