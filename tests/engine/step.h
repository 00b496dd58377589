/* One product of a scene, step by step: its quality, what was launched for it, and what is kept.
 *
 * A scene prints a line for each step, a test reads it. What is kept is read from the counters file
 * that the library under test writes while the scene runs.
 */
#ifndef QS_TESTS_ENGINE_STEP_H
#define QS_TESTS_ENGINE_STEP_H

#include "child.h"
#include "product.h"

/* Launches of one kind. */
enum launches {
	PACKS4,     /* qs_nf4_pack                                    */
	PACKS8,     /* qs_fp8_pack                                    */
	EXPANSIONS, /* qs_nf4_expand                                  */
	THIN4,      /* qs_w4a16_*                                     */
	THIN8,      /* qs_w8a16_*                                     */
	WIDE4,      /* qs_w4a16_wide_*                                */
	HASHES,     /* qs_hash                                        */
	SAMPLES,    /* qs_nf4_sample, qs_fp8_sample                   */
	CASTS,      /* qs_quantise: of operands that are not kept     */
	EARLY,      /* qs_w4a16_*, qs_w8a16_* that read a copy early  */
	FP8,        /* products with fp8 operands                     */
	BF16,       /* products with bf16 operands: the program's own */
	LAUNCHES
};

/* Forms of kept copies, as the counters number them. */
enum form {
	FORM_FP8,
	FORM_FP8_TURNED,
	FORM_NF4,
	FORM_FP8_TILES,
};

struct step {
	double sqnr;                 /* dB against fp64 of what the operands are now        */
	long spoilt;                 /* product_spoilt_exactly()                            */
	long launches[LAUNCHES];     /* since the step before                               */
	long written;                /* bytes of quantised operands, since the step before  */
	long uses[QS_KEPT_FORMS];    /* products with a kept copy, since the step before    */
	long escapes[QS_KEPT_FORMS]; /* found changed and told, since the step before      */
	long bytes[QS_KEPT_FORMS];   /* kept now                                            */
};

/* ---- in scenes ----------------------------------------------------------------------------------
 */

/* A call that must succeed. */
void step_submit(struct made *made, const struct session *session);
/* Waits, fetches D, and prints the step: what was done since the step before. */
void step_print(struct made *made);
/* A whole step: D is filled with NaN, the product called, the step printed. */
void step_call(struct made *made, const struct session *session);
/* Captures what is submitted to the session's stream, until it is made a graph that can be
 * launched. */
void step_begin_capture(const struct session *session);
cudaGraphExec_t step_end_capture(const struct session *session);
/* What was done so far belongs to no step. */
void step_begin(void);
/* A bf16 product that policies of these tests leave to cuBLAS: the rest of a program, from whose
 * launches the library learns that it sees all of them. */
void other_product(const struct session *session);

/* The rule for other_product(), for QSHIM_SET. */
#define OTHER ";rule other.k=8;rule other.action=native"

/* ---- in tests -----------------------------------------------------------------------------------
 */

int steps(const struct outcome *outcome);
/* Fails the test if there is no such step. */
struct step step_at(const struct outcome *outcome, int index);

#endif
