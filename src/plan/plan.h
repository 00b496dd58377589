/* plan/: from a product to what is done with it.
 *
 * dispatch.c  qs_dispatch qs_dispatch_forked
 * uses.c      qs_uses_add qs_uses_forked
 * before.c    qs_before_begin qs_before_end qs_before_count qs_before_share qs_before_forked
 * start.c     qs_start (policy, notes, fork and exit handlers)
 * table.c     qs_plan_table_init qs_plan_get qs_plan_outcome qs_plan_given_up
 *             qs_plan_waits qs_plan_demoted qs_instance_action
 *             qs_plans_decide_again qs_plans_each qs_plans_report qs_plan_table_forked
 * live.c      qs_live_start qs_live_call qs_live_want_steps qs_live_step qs_live_flops
 *             qs_live_weights qs_live_report qs_live_forked
 * weight.c    qs_weights_follow qs_weights_asked qs_weight_of_key qs_weights_met
 *             qs_weights_forked
 * period.c    qs_period_reset qs_period_add
 * decide.c    qs_decide
 * best.c      qs_best_make qs_best_is_known
 * shadow.c    qs_shadow_make qs_shadow_is_due qs_shadow_measure
 * label.h     layer names: label.c layer.c
 * share.h     the time that products take: share.c
 * worth.h     whether whole steps are faster with them: worth.c
 * eligible.c  qs_eligible qs_overlap
 * size.c      qs_fp8_gain
 */
#ifndef QS_PLAN_PLAN_H
#define QS_PLAN_PLAN_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/accuracy.h"
#include "engine/engine.h"
#include "gemm/gemm.h"
#include "note/note.h"
#include "plan/share.h"
#include "plan/worth.h"
#include "policy/policy.h"

/* The plan of a key in one context: what the engine prepared there. Immutable once published, but
 * for the atomics. */
struct qs_instance {
	struct qs_context *context;
	const struct qs_engine *engine; /* the plan's, or the one that auto found faster here */
	void *state;                    /* the engine's, NULL = pass; in shadow mode: of shadow.c */
	bool rows;                      /* of fp8: with a scale for each row          */
	enum qs_reason reason;          /* why, when state is NULL                    */
	_Atomic int failures;           /* runs that failed; too many and it passes   */
	bool may_be_held;               /* auto's own choice: compared by whole steps */
	_Atomic int held;               /* number of the try in which it last was     */
	uint64_t kind;                  /* if so: see worth.h                          */
	_Atomic bool given_up;          /* it passes for the rest of the run           */
	struct qs_instance *next;       /* other contexts                             */
};

/* Uses of a key that waits to be measured, and how often it would have found either operand
 * converted. */
struct qs_shared {
	_Atomic int uses, found[2];
};

/* What is done with the products of one key. Immutable once published, but for the atomics. When
 * the policy changes its mind another plan of the key takes its place: this one stays, as threads
 * may be running it, and is used again if the old decision comes back. */
struct qs_plan {
	struct qs_key key;
	uint64_t hash;
	struct qs_choice choice;           /* what the policy wants                              */
	enum qs_action action;             /* what is to be done; NATIVE = always pass           */
	enum qs_reason reason;             /* why                                                */
	const char *rule;                  /* name of the rule, NULL if none was asked           */
	const struct qs_engine *engine;    /* NULL = pass                                        */
	bool shadow;                       /* pass, and measure what the engine would have done  */
	struct qs_counter *counter;        /* never NULL                                         */
	struct qs_accuracy *accuracy;      /* of the key, never NULL                             */
	struct qs_instance *_Atomic first; /* contexts met so far                                */
	_Atomic uint64_t told;             /* bit per reason already logged for late passes      */
	_Atomic bool waits;                /* it has passed until its bucket has had enough uses */
	struct qs_shared shared;           /* what its conversion would not have cost so far     */
	const char *library;               /* path of the copy of cuBLAS, for the log            */
	struct qs_plan *other;             /* next plan of the key, under the table's lock       */
	struct qs_share share;             /* time that its calls take                           */
};

/* The state of the process: started at the first product. */
struct qs_process {
	struct qs_policy *_Atomic policy; /* in effect; earlier ones stay as they are          */
	const struct qs_options *options; /* as they were at the start, but for the mode       */
};

/* True once policy and notes are ready; starts them at the first call. False = pass uncounted: off,
 * excluded process, or another thread is starting right now. */
bool qs_start(void);
/* Valid after qs_start() returned true. */
const struct qs_process *qs_process(void);
/* Puts another policy into effect, for plans decided from now on. */
void qs_process_use(struct qs_policy *policy);
/* True in a forked child that has not had a usable context yet. */
bool qs_process_forked(void);

/* The one entrance: true if the product was submitted by an engine, and the program's own call must
 * not be made. Derived fields of g->key are completed here. */
bool qs_dispatch(struct qs_gemm *g);
/* In a forked child: make the lock usable and forget the parent's counter. */
void qs_dispatch_forked(void);

/* The plan of a key, made if new. NULL if the table is full or memory is out. `library` is the path
 * of the copy of cuBLAS, for the log. */
struct qs_plan *qs_plan_get(const struct qs_key *key, const char *library);
/* Room for `keys` plans. */
bool qs_plan_table_init(int64_t keys);
/* What came of a plan in a context, for its counter, unless another plan has taken its place. */
void qs_plan_outcome(const struct qs_plan *plan, enum qs_action action, enum qs_reason reason);
/* Found in use not to make steps faster: counts it and says so. Of a plan in use, with the
 * table locked, as in qs_plans_each(). */
void qs_plan_given_up(struct qs_plan *plan, const char *detail);
/* For the counter and at exit: the plan's key is native as long as it has no instance. */
void qs_plan_waits(struct qs_plan *plan);
/* True if the accuracy of the key's products forbids what the plan is to do; `instance` says what
 * that is in its context, NULL = not known yet. */
bool qs_plan_demoted(const struct qs_plan *plan, const struct qs_instance *instance);
/* What is done with the products of a plan in one context. */
enum qs_action qs_instance_action(const struct qs_plan *plan, const struct qs_instance *instance);
/* Puts a policy into effect, or NULL = the same policy at another step, and decides all keys anew.
 * Returns how many are decided otherwise than before. */
int qs_plans_decide_again(struct qs_policy *policy);
/* Shows every plan, one after the other, with the table locked; `in_use`: it is its key's plan now.
 */
void qs_plans_each(void (*see)(struct qs_plan *plan, bool in_use));
/* At exit: logs the keys in use that were not decided for want of uses. */
void qs_plans_report(void);
/* In a forked child: forget everything. */
void qs_plan_table_forked(void);

#define QS_USES_TO_MEASURE 3 /* what a program does once or twice is not worth the time */

/* Counts a use of a key's bucket (qs_bucket_key) and returns how many there were, this one
 * included; QS_USES_TO_MEASURE stands for all above, and for a bucket there is no room to count. No
 * lock. */
int qs_uses_add(const struct qs_key *key);
/* In a forked child: forget the parent's. */
void qs_uses_forked(void);

/* A product begins. */
void qs_before_begin(void);
/* It has been replaced in fp8, with a scale for each operand; or it `waits` for its measurement. */
void qs_before_end(const struct qs_gemm *g, bool waits);
/* Counts a use of a key that waits, and which operands it shares with the product before. */
void qs_before_count(struct qs_shared *shared, const struct qs_gemm *g);
/* The part of the conversion that is for operands found converted, by the uses so far: 0 to 1. */
double qs_before_share(const struct qs_shared *shared, const struct qs_key *key);
void qs_before_forked(void);

/* Fills choice, action, reason, rule and engine of a new plan from its key, the policy and the
 * step. `again`: the policy was asked for this key before. */
void qs_decide(struct qs_plan *plan, struct qs_policy *policy, bool again);

/* Finds what serves the plan's key in a new instance's context: fills engine, state (NULL with
 * *failure filled: the product passes), rows and may_be_held. May measure, and wait for the
 * stream: never while capturing. Not for a plan of shadow mode. */
void qs_best_make(struct qs_instance *instance, const struct qs_plan *plan, const struct qs_gemm *g,
                  const struct qs_stream *stream, struct qs_failure *failure);
/* True if nothing of that would have to be measured. */
bool qs_best_is_known(const struct qs_plan *plan, const struct qs_gemm *g,
                      const struct qs_context *context);

struct qs_shadow; /* what is measured of a key in shadow mode, in one context */

/* The candidates that the policy would have had, prepared. *failure.detail says which; NULL with
 * *failure filled if there is none. Waits for nothing. */
struct qs_shadow *qs_shadow_make(const struct qs_plan *plan, const struct qs_gemm *g,
                                 struct qs_context *context, const struct qs_stream *stream,
                                 struct qs_failure *failure);
/* Counts a use, takes note of what has been measured meanwhile, and says if this use is to be
 * measured: the first ones, and each check_every-th later. */
bool qs_shadow_is_due(struct qs_shadow *shadow, const struct qs_context *context);
/* Submits that, unless the stream is capturing. False with *failure filled if some of it failed. */
bool qs_shadow_measure(struct qs_shadow *shadow, const struct qs_gemm *g,
                       struct qs_context *context, const struct qs_stream *stream,
                       struct qs_failure *failure);

/* Follows the policy in effect: its file, and the steps its rules ask for. */
void qs_live_start(void);
/* At every product, before its plan is asked for. True if a step begins with it. */
bool qs_live_call(const struct qs_key *key);
/* Steps are counted from now on, whatever the policy asks for. */
void qs_live_want_steps(void);
/* The training step at hand, from 0: how often the sequence of products has come round; -1 =
 * unknown.
 */
int64_t qs_live_step(void);
/* Of all products before that step, since steps are counted. */
double qs_live_flops(void);
/* Weights of the program, counted when rules first asked and whole steps had gone by; 0 = unknown.
 */
int32_t qs_live_weights(void);
/* At exit: hands the steps and the share of products to the summary. */
void qs_live_report(void);
void qs_live_forked(void);

/* The weights that the rules of a policy single out, `weights` as of qs_live_weights(). */
void qs_weights_follow(const struct qs_policy *policy, int32_t weights);
/* True if the policy has rules by weight: before that, no product asks for its weight. */
bool qs_weights_asked(void);
/* qs_key.weight of a product whose key has its role. */
uint16_t qs_weight_of_key(const struct qs_gemm *g);
/* 1 + the highest ordinal of the forward products that asked for their weight. */
int32_t qs_weights_met(void);
void qs_weights_forked(void);

#define QS_PERIOD_MAX   16384 /* products of a period                             */
#define QS_PERIOD_GRAMS 16384 /* places for what was met; more only help accuracy */

/* The period of a sequence of products, as it goes; see period.c. qs_period_reset() begins one. */
struct qs_period {
	uint32_t symbol[QS_PERIOD_MAX]; /* the last products, by position                      */
	struct {
		uint64_t hash; /* of the products that ended here                                 */
		uint64_t end;  /* position after them, 0 = none                                   */
	} gram[QS_PERIOD_GRAMS];
	uint64_t position; /* products so far                                                 */
	uint64_t hash;     /* of the last products                                            */
	uint64_t length;   /* of the period that is tried or in effect, 0 = none              */
	uint64_t run;      /* products that equalled the one a period before, without a break */
	uint64_t accepted; /* length of the last period in effect, 0 = none yet               */
	uint64_t again;    /* as `run`, for that one after it was broken                      */
	uint64_t broken;   /* position at which the step began that it did not complete       */
	uint64_t next;     /* position at which the next step begins, 0 = no period in effect */
	int64_t step;      /* of the last product, from 0; -1 = no period yet                 */
};

void qs_period_reset(struct qs_period *period);
/* Takes one more product; true if period->step has changed. */
bool qs_period_add(struct qs_period *period, uint32_t symbol);

/* What forbids fp8 for this key whatever its size, device and policy; QS_REASON_AUTO = nothing. */
enum qs_reason qs_eligible(const struct qs_key *key);
/* True if the bytes of D overlap those of A, B or the bias, or partly those of a C that is read. */
bool qs_overlap(const struct qs_gemm *g);

/* Predicted gain of fp8 with both operands quantised: native time over fp8 time, minus 1. */
double qs_fp8_gain(int64_t m, int64_t n, int64_t k);

#endif
