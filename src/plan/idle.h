/* Whether a product in lower precision is worth its time on the CPU, measured in use.
 *
 * idle.c  qs_idle_look qs_idle_clock qs_idle_add
 */
#ifndef QS_PLAN_IDLE_H
#define QS_PLAN_IDLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/device.h"

/* What is known of one key in one context. Zero at first. */
struct qs_idle {
	double saved_us;          /* on the device by each call; not above 0 = never looked at    */
	_Atomic uint64_t calls;   /* replaced                                                     */
	_Atomic int looks, found; /* for the next verdict, and how many of them found it idle     */
	_Atomic uint64_t sum;     /* ns of the CPU at those                                       */
	_Atomic uint64_t longest; /* of them                                                      */
	_Atomic bool judged;      /* there was a verdict                                          */
	_Atomic bool lost;        /* the key passes for the rest of the run                       */
};

enum qs_look {
	QS_LOOK_NONE, /* not at this call */
	QS_LOOK_BUSY,
	QS_LOOK_IDLE,
};

/* Counts a call, and at some of them, not while capturing, asks the stream what it has to do. */
enum qs_look qs_idle_look(struct qs_idle *idle, const struct qs_stream *stream);
/* Nanoseconds of a clock that does not stop. */
uint64_t qs_idle_clock(void);
/* Adds a look and what the call took of the CPU, ns. True, once, if by now the product is not worth
 * it: `detail` says why. */
bool qs_idle_add(struct qs_idle *idle, enum qs_look look, uint64_t ns, char *detail, size_t size);

#endif
