/* Whether whole steps of the program are faster with what auto replaces.
 *
 * worth.c  qs_worth_want qs_worth_begin_anew qs_worth_step qs_worth_hold qs_worth_verdict
 *          qs_worth_forked
 */
#ifndef QS_PLAN_WORTH_H
#define QS_PLAN_WORTH_H

#include <stdatomic.h>
#include <stdbool.h>

#include "gemm/gemm.h"

struct qs_instance;

#define QS_WORTH_STEPS 96 /* of each kind, at most, that a verdict is made of */

/* How long steps took, and what was multiplied in each. */
struct qs_step_times {
	int count;
	float ms[QS_WORTH_STEPS];
	float flops[QS_WORTH_STEPS];
};

/* Medians, ms a step. */
struct qs_step_medians {
	double with, without;
};

enum qs_worth {
	QS_WORTH_OPEN, /* in doubt: more steps are to be measured */
	QS_WORTH_KEEP,
	QS_WORTH_LOST,
};

/* Auto has found something that serves a product, instance->engine: whole steps are to be compared,
 * with it and without, once they are known; unless it is nothing new. Fills instance->kind:
 * products of one kind differ in nothing but their tokens, by less than four times, and what is
 * found for one holds for all. True if steps with this kind were not faster: it is to pass. */
bool qs_worth_want(struct qs_instance *instance, const struct qs_key *key);
/* The policy has changed what is replaced: steps before and after are none to compare. */
void qs_worth_begin_anew(void);
/* A step of the program begins with this product (qs_live_call()). */
void qs_worth_step(const struct qs_gemm *g);

/* What becomes of the calls of the step at hand that auto replaces. */
enum qs_turn {
	QS_TURN_WITH,    /* they are replaced                                              */
	QS_TURN_MARK,    /* the same, and the verdict will be for their products           */
	QS_TURN_WITHOUT, /* they pass, and it will                                         */
};
extern _Atomic int qs_worth_turn __attribute__((visibility("hidden")));
/* In the last two: shows such a call. True if it is to pass. */
bool qs_worth_hold(struct qs_instance *instance);

/* What `with` and `without` say, of as many steps each; `last`: in doubt no longer. `min_gain` is a
 * fraction. */
enum qs_worth qs_worth_verdict(const struct qs_step_times *with,
                               const struct qs_step_times *without, double min_gain, bool last,
                               struct qs_step_medians *medians);
/* In a forked child: forget the parent's. */
void qs_worth_forked(void);

#endif
