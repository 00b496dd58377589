/* Layer names: the ranges that the program or a helper of `qshim run` marks, as small numbers.
 *
 * label.c  qs_label_push qs_label_pop qs_label_enter qs_label_leave qs_labels_used
 *          qs_label_current qs_label_name qs_label_forked
 * layer.c  qs_layer_of qs_layer_forked
 */
#ifndef QS_PLAN_LABEL_H
#define QS_PLAN_LABEL_H

#include <stdbool.h>
#include <stdint.h>

#include "gemm/gemm.h"

#define QS_LABELS_MAX   4095 /* distinct names of a process; further ones are no name       */
#define QS_LABEL_LENGTH 128  /* bytes of a name with the NUL; longer ones lose their end    */
#define QS_LABEL_DEPTH  32   /* open ranges of a thread; deeper ones have the name of the last */

/* Exported for helpers written in other languages: begins and ends a range of this name on the
 * calling thread. The name is copied. */
void qs_label_push(const char *name);
void qs_label_pop(void);

/* The same for ranges that nest only within a domain, which is any pointer. Both return the
 * nesting depth of the range, the outermost being 0; -1 = no memory, or nothing to end. */
int qs_label_enter(const void *domain, const char *name);
int qs_label_leave(const void *domain);

/* True once any range was begun: before that, no product asks for its layer. */
bool qs_labels_used(void);
/* Number of the name of the innermost range of this thread that has one, 0 = none. */
uint16_t qs_label_current(void);
/* Name by number, NULL for 0. Lives as long as the process. */
const char *qs_label_name(uint16_t label);
/* In a forked child: make the lock usable. Names stay. */
void qs_label_forked(void);

/* The layer of a product whose key has its role: the range it is in, or for a backward product the
 * layer whose forward product last read the same weight or input. 0 = unknown. `autograd` as in
 * qs_role_of(). */
uint16_t qs_layer_of(const struct qs_gemm *g, bool autograd);
/* In a forked child: forget the parent's addresses. */
void qs_layer_forked(void);

#endif
