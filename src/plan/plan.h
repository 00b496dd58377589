/* plan/: from a product to what is done with it.
 *
 * dispatch.c  qs_dispatch qs_dispatch_forked
 * start.c     qs_start (policy, notes, fork and exit handlers)
 * table.c     qs_plan_table_init qs_plan_get qs_plan_table_forked
 * decide.c    qs_decide
 * label.h     layer names: label.c layer.c
 * eligible.c  qs_eligible qs_overlap
 * size.c      qs_fp8_gain
 */
#ifndef QS_PLAN_PLAN_H
#define QS_PLAN_PLAN_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/engine.h"
#include "gemm/gemm.h"
#include "note/note.h"
#include "policy/policy.h"

/* The plan of a key in one context: what the engine prepared there. Immutable once published, but
 * for `failures`. */
struct qs_instance {
	struct qs_context *context;
	void *state;              /* the engine's, NULL = pass                  */
	enum qs_reason reason;    /* why, when state is NULL                    */
	_Atomic int failures;     /* runs that failed; too many and it passes   */
	struct qs_instance *next; /* other contexts                             */
};

/* What is done with the products of one key. Immutable once published, but for the atomics. */
struct qs_plan {
	struct qs_key key;
	uint64_t hash;
	struct qs_choice choice;           /* what the policy wants                              */
	enum qs_action action;             /* what is to be done; NATIVE = always pass           */
	enum qs_reason reason;             /* why                                                */
	const char *rule;                  /* name of the rule, NULL if none was asked           */
	const struct qs_engine *engine;    /* NULL = pass                                        */
	struct qs_counter *counter;        /* never NULL                                         */
	struct qs_instance *_Atomic first; /* contexts met so far                                */
	_Atomic uint64_t told;             /* bit per reason already logged for late passes      */
};

/* The state of the process: started at the first product. */
struct qs_process {
	struct qs_policy *policy;
	const struct qs_options *options;
};

/* True once policy and notes are ready; starts them at the first call. False = pass uncounted: off,
 * excluded process, or another thread is starting right now. */
bool qs_start(void);
/* Valid after qs_start() returned true. */
const struct qs_process *qs_process(void);
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
/* In a forked child: forget everything. */
void qs_plan_table_forked(void);

/* Fills choice, action, reason, rule and engine of a new plan from its key and the policy. */
void qs_decide(struct qs_plan *plan, struct qs_policy *policy);

/* What forbids fp8 for this key whatever its size, device and policy; QS_REASON_AUTO = nothing. */
enum qs_reason qs_eligible(const struct qs_key *key);
/* True if the bytes of D overlap those of A, B or the bias, or partly those of a C that is read. */
bool qs_overlap(const struct qs_gemm *g);

/* Predicted gain of fp8 with both operands quantised: native time over fp8 time, minus 1. */
double qs_fp8_gain(int64_t m, int64_t n, int64_t k);

#endif
