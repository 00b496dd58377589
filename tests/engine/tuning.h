/* Timing on a clock that the test sets: what the programs that test the choice of algorithms share.
 *
 * The emulation's products take the microseconds that its knobs say, so what is faster is known. A
 * trial is told from the program's own product by counters: products without an algorithm are
 * native, those with one are ours, by the first or the second of the heuristic.
 */
#ifndef QS_TESTS_ENGINE_TUNING_H
#define QS_TESTS_ENGINE_TUNING_H

#include "child.h"
#include "product.h"

/* Without kept operands, which have events and memory of their own. */
#define ENOUGH   "tune.budget_ms=60000;tune.file=;cache.validity=adjacent;"
#define BF16     ENOUGH "default.action=bf16"
#define FP8      ENOUGH "default.action=fp8"
#define AUTO     ENOUGH "default.action=auto"
#define IDLE     "SOFTCUDA_IDLE_PRODUCTS=1"
#define LEAST_DB 26.0

/* ---- in scenes --------------------------------------------------------------------------------
 */

/* Products of every form that a trial may get wrong. */
#define ROWS 7
extern const struct product rows[ROWS];
/* A small product; other numbers are other keys. */
struct product shape(int number);

/* What was submitted so far. */
struct work {
	long native, first, second; /* products                                          */
	long calls;                 /* of cublasGemmEx and cublasLtMatmul, refused ones too */
	long heuristics, allocations;
};
struct work work_done(void);
/* Prints what was done since: lines "WHAT0.native N" for number 0, and so on. */
void print_work(const char *what, int number, const struct work *before);

/* Looks at D, for the verdict. */
void judge(struct made *made);
/* One call; a failure is for the verdict. */
void call(struct made *made, const struct session *session);
/* One call from start to end, into a fresh D. */
void whole_call(struct made *made, const struct session *session);
/* Like it, and prints the work as "callNUMBER". */
void watched_call(struct made *made, const struct session *session, int number);
/* True if no call failed and all results were right. */
bool all_right(void);
/* Prints what check_unharmed() looks at; returns 0. */
int verdict(void);

/* Scene `calls ROW COUNT KNOB VALUE`: one product again and again, and the hash of each result; the
 * knob is turned once the program has all it needs. */
int scene_calls(int argc, char **argv);
/* Scene `large COUNT USES FIRST END`: products for which the size model wants fp8, called USES
 * times each, of which the last call is watched. Nobody looks at the results: run it with IDLE, or
 * name the calls that are not idle. */
int scene_large(int argc, char **argv);
/* The same, `doubtful COUNT USES ...`, where the size model does not want fp8, but it may be
 * faster. */
int scene_doubtful(int argc, char **argv);

/* What an argument of scene_loop() says, with a number or a word behind it. */
#define WAITING  "w" /* so many calls, each waited for */
#define CAPTURED "c" /* so many calls, captured                                            */
#define RANDOM   "x" /* so many calls of this product and two others, waited for, in no order */
#define VARYING                                                                                    \
	"v"        /* so many calls with any number of tokens, waited for; other numbers where     \
	           that is odd                                                          */
#define STREAM "s" /* another stream from now on                           */
#define OWN    "o" /* every thread's own stream from now on, cudaStreamPerThread */
#define THREAD "t" /* so many calls of a new thread, waited for            */
#define RESET  "r" /* everything anew, on a device that was reset          */
#define EDIT   "e" /* another text of $QSHIM_POLICY, and the call with which it takes effect */
#define KNOB   "k" /* knob=value of the emulation                          */

/* Scene `loop HOW WHAT ...`: one product again and again, like this and then like that, and the
 * work of each part, "partNUMBER". It is large enough for the size model to want fp8; nobody looks
 * at the results. */
int scene_loop(int argc, char **argv);

/* ---- in tests ---------------------------------------------------------------------------------
 */

extern struct outcome outcome;

/* Microseconds, as the knobs of these names. Where `wide` is 0, auto finds no bf16 algorithm that
 * is faster than the program's own, and others find `second`. */
struct times {
	long product, fp8, second, kernel, wide;
};

extern const struct times second_faster, second_slower;

/* The environment of a scene with this policy; valid until the next call. `more` is one variable
 * more, or NULL. */
const char *const *with(const char *policy, struct times times, const char *more);

/* The program got what it asked for. */
void check_unharmed(const char *what);
/* The number printed as "CALL.WHAT". */
long count(const char *call, const char *what);
/* What a call submitted: these products, only the program's own, only one of ours, or trials. */
void ck_products(const char *call, long native, long first, long second);
void ck_native(const char *call);
void ck_first(const char *call);
void ck_second(const char *call);
void ck_timed(const char *call);
/* The only decision. */
void ck_decision(const char *action, const char *reason);
int decisions_for(const char *action);

#endif
