/* The share of a step that matrix products take on the device: a few calls of each plan are timed
 * by events on the program's stream, once steps are known and if the summary is to be written.
 *
 * Nothing waits for an event: it is looked at when a later step begins or a later call is timed,
 * and not at exit. Calls of captured streams, and what a graph replays, are not timed.
 *
 * share.c  qs_share_start qs_share_enter qs_share_leave qs_share_again qs_share_mark
 *          qs_share_report qs_share_take qs_share_look qs_share_forked
 */
#ifndef QS_PLAN_SHARE_H
#define QS_PLAN_SHARE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gemm/gemm.h"

struct qs_plan;
struct qs_sample;

/* What is known of the time that a plan's calls take. All zero but `next` at first. */
struct qs_share {
	_Atomic uint64_t next; /* calls of the key after which one is timed, UINT64_MAX = none  */
	_Atomic int taken;     /* calls chosen to be timed                                      */
	_Atomic int timed;     /* those of them whose time is known                             */
	_Atomic uint64_t sum;  /* of these times, ns                                            */
	_Atomic uint64_t longest; /* of these times, ns */
	/* Under the lock of the plan table: */
	uint64_t since; /* calls of the key when the plan took effect, or at the last mark        */
	uint64_t calls; /* before that, since qs_share_start()                                    */
};

/* Steps are known: begins to time calls, and to count what the share is of. Takes the lock of the
 * plan table, as qs_share_mark() does. */
void qs_share_start(void);
/* With the lock of the plan table: a plan takes effect for its key, or another takes its place. */
void qs_share_enter(struct qs_plan *plan);
void qs_share_leave(struct qs_plan *plan);
/* What the plan does has changed: times known so far are of no use. */
void qs_share_again(struct qs_plan *plan);
/* A step begins, `seconds` after qs_share_start(): the share of that time. */
void qs_share_mark(double seconds);
/* Hands the share at the last mark to the summary. */
void qs_share_report(void);

/* Chooses the call at hand, number `call` of its key from 0, if it is the plan's turn. */
void qs_share_take(struct qs_plan *plan, const struct qs_gemm *g, uint64_t call);
/* Reads the events of the current context that have come about. */
void qs_share_look(void);
/* In a forked child: forget the parent's events. */
void qs_share_forked(void);

/* The call of this thread that is being timed, NULL for nearly all. */
extern __thread struct qs_sample *qs_share_sample __attribute__((visibility("hidden")));
void qs_share_record_begin(void);
void qs_share_record_end(bool done);

/* Right before and after the product is submitted, by an engine or by cuBLAS; false = it was not.
 * The beginning may be recorded again. */
static inline void qs_share_begin(void)
{
	if (qs_share_sample)
		qs_share_record_begin();
}

static inline void qs_share_end(bool done)
{
	if (qs_share_sample)
		qs_share_record_end(done);
}

#endif
