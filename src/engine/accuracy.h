/* How far an engine's products are from the program's own, measured on the live operands.
 *
 * Before a product is decided, a trial of the engine goes into memory of ours, and so does the
 * program's own call where it may not write D yet (qs_accuracy_measure, waits). In use, the
 * program's own call goes there before the engine writes D, and the two are compared in the same
 * stream; what came of it is read when a later product of the key finds it in mapped host memory:
 * nothing waits. Three checks in a row below what the policy wants demote the key for the rest of
 * the run, whatever the policy says later.
 *
 * In shadow mode no engine writes D: trials of the engines are compared with the program's own
 * call, all in memory of ours, and what comes of it is only noted (qs_accuracy_shadow).
 *
 * Captured products are not checked: a graph would check at each replay.
 *
 * accuracy.c  qs_accuracy_measure qs_accuracy_look qs_check_begin qs_check_end
 *             qs_accuracy_shadow qs_accuracy_report qs_accuracy_forked
 */
#ifndef QS_ENGINE_ACCURACY_H
#define QS_ENGINE_ACCURACY_H

#include "engine/engine.h"
#include "kernels/compare.h"
#include "note/note.h"

struct qs_check_place; /* where checks report, one at a time */

/* What is known of the accuracy of one key, or of one candidate for it in shadow mode. Lives as
 * long as the process; zero at first. */
struct qs_accuracy {
	const char *name;                         /* of the key, for messages                */
	const char *layer;                        /* or ""                                   */
	struct qs_shadow_row *row;                /* of a candidate: where it is noted       */
	bool described;                           /* of a candidate: so are its operands     */
	const struct qs_check_place *_Atomic due; /* of the check under way                  */
	_Atomic double least;     /* dB that it must reach, negative = any                     */
	_Atomic uint64_t pending; /* sequence of that check, 0 = none                          */
	_Atomic uint64_t uses;    /* products that an engine was asked for                     */
	_Atomic uint64_t next;    /* use from which on a check is wanted, 0 = not set yet      */
	_Atomic int failed;       /* checks in a row below `least`                             */
	_Atomic bool demoted;     /* no more lower precision for this key                      */
	_Atomic bool unchecked;   /* a check found no memory, which was said                   */
};

/* A check being submitted. */
struct qs_check {
	struct qs_accuracy *accuracy;
	struct qs_checks *checks; /* of the context, locked                        */
	int slot;                 /* where it reports                              */
	double least;             /* dB that it must reach                         */
	CUdeviceptr reference;    /* the program's own result                      */
};

/* Compares a trial of `engine` with the program's own call: true with *sqnr in dB, rounded to
 * hundredths (QS_SQNR_MAX = equal, -QS_SQNR_MAX = not even finite), false with *failure filled if
 * that could not be done: budget, memory, an entry point whose calls cannot be made again, a stream
 * that is held up. Waits for the stream: never while capturing. */
bool qs_accuracy_measure(const struct qs_engine *engine, void *state, const struct qs_gemm *g,
                         struct qs_context *context, const struct qs_stream *stream, double *sqnr,
                         struct qs_failure *failure);

/* Before an engine runs: counts a use, and if a check is due makes the program's own call into
 * memory of ours; `least` is what the product must reach, in dB, negative = any. True if the caller
 * must call qs_check_end() once the engine has run. *failure has reason MEMORY, with the size, the
 * first time that the key's check found no memory, AUTO otherwise. */
bool qs_check_begin(struct qs_check *check, struct qs_accuracy *accuracy, double least,
                    const struct qs_gemm *g, struct qs_context *context,
                    const struct qs_stream *stream, struct qs_failure *failure);
/* Submits the comparison if the engine has written D (`done`). */
void qs_check_end(struct qs_check *check, const struct qs_gemm *g, const struct qs_stream *stream,
                  bool done);
/* Takes note of a check in this context, which is current, that has reported, if there is one. NULL
 * = none is: what a check in another context reports may be gone with it. */
void qs_accuracy_look(struct qs_accuracy *accuracy, const struct qs_context *context);

/* What would take the place of the program's own call. */
struct qs_candidate {
	const struct qs_engine *engine;
	void *state; /* prepared with choice.trial */
	struct qs_accuracy accuracy;
};

/* Submits a trial of each candidate and its comparison with the program's own call, which is made
 * once more (g->repeat); waits for nothing. True if at least one was submitted. *failure is why one
 * was not; with reason AUTO there is none: the memory is in use, a later product may find it free.
 * Not while capturing. */
bool qs_accuracy_shadow(struct qs_candidate *candidates, int count, const struct qs_gemm *g,
                        struct qs_context *context, const struct qs_stream *stream,
                        struct qs_failure *failure);
/* At exit: notes what candidates have reported since their last product. Does not touch CUDA. */
void qs_accuracy_report(void);
/* In a forked child: make the lock usable. */
void qs_accuracy_forked(void);

#endif
