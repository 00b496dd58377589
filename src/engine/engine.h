/* engine/: what serves a product instead of the program's own call.
 *
 * An engine prepares a plan for one context once (may allocate, ask for heuristics, never while
 * capturing) and then runs it with the pointers of each call, on the caller's stream. Adding one is
 * a new file and a line in engine.c.
 *
 * engine.c  qs_engine_of
 * fp8.c     qs_engine_fp8
 * bf16.c    qs_engine_bf16
 * nf4.c     qs_engine_nf4
 * thin.h    products of few tokens with a packed weight
 * lt.h      the product both of them make, and the choice of its algorithm
 * accuracy.h  the error of products
 * tune.h    timing against the program's own call
 * known.h   what was measured before
 */
#ifndef QS_ENGINE_ENGINE_H
#define QS_ENGINE_ENGINE_H

#include "device/device.h"
#include "gemm/gemm.h"
#include "kernels/compare.h"
#include "policy/policy.h"

/* What went wrong, for the decision log. */
struct qs_failure {
	enum qs_reason reason;
	char detail[96];
};

struct qs_engine {
	enum qs_action action;
	/* The state for this key and context, or NULL with *failure filled. */
	void *(*prepare)(const struct qs_gemm *g, struct qs_context *context,
	                 const struct qs_stream *stream, const struct qs_choice *choice,
	                 struct qs_failure *failure);
	/* Submits the product; false with *failure filled, and then nothing has been written to D.
	 * *bytes is what was written to quantised operands. */
	bool (*run)(void *state, const struct qs_gemm *g, struct qs_context *context,
	            const struct qs_stream *stream, uint64_t *bytes, struct qs_failure *failure);
	/* What the last run of a state that was prepared for trials made of operands A and B, until
	 * the next run; all but the blocks. NULL = this engine cannot tell. */
	void (*describe)(const void *state, const struct qs_gemm *g,
	                 struct qs_compare_operand operand[2]);
	/* Gives up a state that no product will use. */
	void (*destroy)(void *state);
};

/* The engine of an action, or NULL if this build has none. */
const struct qs_engine *qs_engine_of(enum qs_action action);

extern const struct qs_engine qs_engine_fp8;
extern const struct qs_engine qs_engine_bf16;
extern const struct qs_engine qs_engine_nf4;

/* Fills a failure; returns false so that a step can `return qs_failed(...)`. */
bool qs_failed(struct qs_failure *failure, enum qs_reason reason, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

#endif
