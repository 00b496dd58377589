/* Timing of a prepared product against the program's own call; see lt.h for the algorithms.
 *
 * tune.c  qs_tune qs_tune_prepared qs_run_native qs_trial_may_write qs_may_tune qs_tune_start
 *         qs_tune_stop
 */
#ifndef QS_ENGINE_TUNE_H
#define QS_ENGINE_TUNE_H

#include "engine/known.h"
#include "engine/lt.h"

/* Times the candidates of `lt` with the operands of `call`, the program's own call (rival 0) and
 * what `preparation` does (rival 1, may be NULL). False, with *failure filled, if the budget or the
 * memory does not allow it, or a step failed: nothing is known then, and the first candidate is in
 * use. Waits for the stream: never while capturing. */
bool qs_tune(struct qs_lt *lt, const struct qs_gemm *g, struct qs_context *context,
             const struct qs_lt_call *call, const struct qs_rival *preparation,
             struct qs_timing *timing, struct qs_failure *failure);
/* The same for a product whose operands `preparation` makes; the answer to the question *row is
 * kept. `shared` is the part of the preparation that calls do not pay, having found it done. False,
 * with *failure filled, if with `must_win` it does not beat the program's own call by the policy's
 * min_gain, or there was no memory to measure it; what could not be measured for another reason
 * counts as won. */
bool qs_tune_prepared(struct qs_lt *lt, const struct qs_gemm *g, struct qs_context *context,
                      const struct qs_lt_call *call, const struct qs_rival *preparation,
                      double shared, bool must_win, struct qs_tuned_row *row,
                      struct qs_failure *failure);
/* True if D's contents are of no use to the program's call, which is made once everything is
 * measured: until then D may hold results of trials, and none of it need be ours. Its bytes must
 * not be those of an operand (qs_overlap). */
bool qs_trial_may_write(const struct qs_gemm *g);
/* Makes the program's own call once more, before its time; does nothing where that cannot be. Never
 * while capturing. */
void qs_run_native(const struct qs_gemm *g, struct qs_context *context);
/* True if the budget is not spent and the call can be made again. */
bool qs_may_tune(const struct qs_gemm *g);
/* Time spent on measurements counts against the budget: from qs_tune_start(), microseconds. */
int64_t qs_tune_start(void);
void qs_tune_stop(int64_t start);

#endif
