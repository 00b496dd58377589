/* What was measured of a candidate, by this process or by one before it that kept it in the file of
 * [tune] file. Both decide by the same function from the same numbers, so that a program decides in
 * every run what it decided when it was measured. What is measured of one number of tokens holds
 * for its bucket (qs_bucket_text): a row of the product itself, which the file may have, goes
 * before that of its bucket, unless that is pinned.
 *
 * known.c  qs_known_find qs_known_add qs_known_wins qs_known_error qs_known_add_error
 *          qs_known_pinned qs_known_saving qs_known_whole qs_known_steps qs_known_add_steps
 *          qs_known_forked
 */
#ifndef QS_ENGINE_KNOWN_H
#define QS_ENGINE_KNOWN_H

#include "engine/lt.h"
#include "policy/tuned.h"

/* Looks for the measurement of an engine (`action`) as `choice` wants it, on this device and with
 * this cuBLASLt. True with *row filled and its algorithm in use; where `lt` has no such candidate,
 * the first one stays in use if another number of tokens was measured. False if there is no row
 * that holds, or one of this very product without such a candidate: *row is then the question, for
 * qs_known_add(). Reads the file at the first call. */
bool qs_known_find(struct qs_lt *lt, const struct qs_gemm *g, const struct qs_context *context,
                   enum qs_action action, const struct qs_choice *choice, struct qs_tuned_row *row);
/* Answers the question *row with what was measured of `lt` for `g`, for this process and for
 * others; timing->rival[0] is the program's own call and rival[1] the preparation, negative if
 * there is none. The other times must be known. */
void qs_known_add(const struct qs_lt *lt, const struct qs_gemm *g, const struct qs_timing *timing,
                  struct qs_tuned_row *row);
/* True if the candidate is to be taken: without `must_win` always, with it if it beats the
 * program's own call by the policy's min_gain, or if a pin says so. *failure tells the times, and
 * is the reason if it is false. */
bool qs_known_wins(const struct qs_tuned_row *row, bool must_win, struct qs_failure *failure);
/* True with *sqnr in dB if the candidate's error is known, or does not matter because of a pin
 * (QS_SQNR_MAX). */
bool qs_known_error(const struct qs_gemm *g, const struct qs_context *context,
                    enum qs_action action, const struct qs_choice *choice, double *sqnr);
/* Completes the answer to the same question, if there is one, by the candidate's error, which was
 * not known and is measured after the times; below 0 dB is kept as 0. */
void qs_known_add_error(const struct qs_gemm *g, const struct qs_context *context,
                        enum qs_action action, const struct qs_choice *choice, double sqnr);
/* True if a pin has the last word about the candidate. */
bool qs_known_pinned(const struct qs_gemm *g, const struct qs_context *context,
                     enum qs_action action, const struct qs_choice *choice);
/* Microseconds that a call of the candidate saves on the device, from its times; 0 if they are not
 * known, or if a pin makes them of no account. */
double qs_known_saving(const struct qs_gemm *g, const struct qs_context *context,
                       enum qs_action action, const struct qs_choice *choice);
/* True if there is nothing to measure: times are known or do not matter, and the error of what wins
 * too, unless it is the program's own precision. */
bool qs_known_whole(const struct qs_gemm *g, const struct qs_context *context,
                    enum qs_action action, const struct qs_choice *choice);

/* Whole steps of a program with what auto replaces and without. */
struct qs_steps {
	char name[64];              /* of the program and what is replaced in a step       */
	double with_ms, without_ms; /* of a step; negative = unknown, only in a pinned row */
	bool kept;                  /* what was found: auto goes on replacing them             */
};

/* True with the rest of *steps filled if they are known by name, with `library`'s copy of cuBLAS.
 */
bool qs_known_steps(struct qs_steps *steps, const struct qs_library *library,
                    const struct qs_context *context);
/* Keeps what was found, for this process and for others. */
void qs_known_add_steps(const struct qs_steps *steps, const struct qs_library *library,
                        const struct qs_context *context);
/* In a forked child: forget the file and what it said. */
void qs_known_forked(void);

#endif
