/* Between the thunks and those who read the arguments of what went through them.
 *
 * Knows no CUDA header, which declares other forms of functions that driver.c defines.
 *
 * driver.c     qs_submitting qs_submitted qs_submitted_unseen qs_driver_function
 * written.c    qs_effect_of: what each function of the driver wrote; qs_before_graph
 */
#ifndef QS_INTERCEPT_DRIVER_H
#define QS_INTERCEPT_DRIVER_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__)
#define QS_REGISTERS 6
#else
#define QS_REGISTERS 8
#endif

/* A call, in the frame of its thunk (driver.S). */
struct qs_call {
	int64_t result;             /* once it has returned: of a CUresult, the lower half        */
	uint64_t reg[QS_REGISTERS]; /* arguments, as they came: int arguments have any upper half */
	uint64_t thunk;             /* index                                                      */
	uint64_t frame[2];          /* saved frame pointer and return address                     */
	uint64_t stack[8];          /* further arguments                                          */
};

static inline uint64_t qs_argument(const struct qs_call *call, int i)
{
	return i < QS_REGISTERS ? call->reg[i] : call->stack[i - QS_REGISTERS];
}

static inline void *qs_pointer(const struct qs_call *call, int i)
{
	return (void *)(uintptr_t)qs_argument(call, i);
}

/* How a call of one function of the driver is reported to operand/track.h. */
struct qs_effect {
	const char *name;                         /* without version and flavour of the stream */
	void (*tell)(const struct qs_call *call); /* NULL: it writes nothing                   */
	int flags;                                /* QS_EFFECT_*                               */
};

#define QS_EFFECT_FAILED 1  /* told of failed calls too: reads no memory of the caller's */
#define QS_EFFECT_NARROW 2  /* the first version has addresses of 32 bits                */
#define QS_EFFECT_PREFIX 4  /* every name that begins so                                 */
#define QS_EFFECT_KEPT   8  /* told also while nothing is watched                        */
#define QS_EFFECT_GRAPH  16 /* qs_before_graph() comes before the call                  */
/* Told before the call and not after it, whatever its outcome: what it ends may be given to another
 * thread under the same address or handle before it has returned to us. */
#define QS_EFFECT_BEFORE 32

/* That of a function of this name: as exported if `version` is 0, else as cuGetProcAddress was
 * asked for it. Never NULL: what is not known is taken to write everything. */
const struct qs_effect *qs_effect_of(const char *name, int version);

/* Before a graph is launched: has the copies of weights checked that it reads and that may be out
 * of date. */
void qs_before_graph(const struct qs_call *call);

/* A function of the driver that the program has loaded, never a thunk, kept in *kept once known;
 * NULL if there is none. */
void *qs_driver_function(_Atomic(void *) *kept, const char *name);

/* The driver's function as a pointer to this type. */
#define QS_DRIVER(type, function)                                                                  \
	({                                                                                         \
		static _Atomic(void *) kept_;                                                      \
		(type *)qs_driver_function(&kept_, #function);                                     \
	})

#endif
