/* Kept weights in scenes and tests: the shapes and the forms in which they are kept, and how a step
 * with one must have ended.
 */
#ifndef QS_TESTS_ENGINE_KEPT_H
#define QS_TESTS_ENGINE_KEPT_H

#include "child.h"
#include "product.h"
#include "step.h"

#include <cuda.h>

/* The weight: 128 rows of 256, whichever way it is read. */
#define OUT    128
#define IN     256
#define BYTES  (OUT * IN * sizeof(uint16_t))
#define WARMUP 6 /* calls until a copy is made and no longer doubted */

/* Few tokens, many, dX, and what is between few and many. */
#define SHAPES 4
extern const struct product shapes[SHAPES];

/* Which engine, with which shape: one for each form in which weights are kept, and both ways in
 * which NF4 is expanded. */
#define KINDS 7
extern const struct kind {
	const char *name, *action;
	int shape;
	enum form form;
	double least, most; /* dB with a kept copy, random normal numbers */
} kinds[KINDS];

extern const char *const levels[2]; /* that must never be stale */

/* Runs `scene SHAPE [WAY]` with everything in this kind; `more` is added to QSHIM_SET, and `seed`
 * chooses the order of what is not ordered. Fails the test if the scene does. */
void run_kind(struct outcome *outcome, const struct kind *kind, const char *level, const char *more,
              const char *scene, const char *way, int seed);
/* The least dB of a right product, whoever made it; stale results are below 10. */
double least_of(const struct kind *kind);
/* Right, whoever answered. */
void expect_right(const struct outcome *outcome, const struct kind *kind, const char *what,
                  int index);
/* Right, by the kept copy. */
void expect_kept(const struct outcome *outcome, const struct kind *kind, const char *what,
                 int index);

/* A few rows of a weight, none of which the next products compare with the copy: that these are
 * right is owed to what was seen of a write. */
#define FIRST      72
#define ROWS       8
#define PART       ((size_t)FIRST * IN) /* elements before them */
#define PART_BYTES (ROWS * IN * sizeof(uint16_t))

/* Those of a weight at this address. */
void *kept_rows_of(void *weight);
/* New contents for them, in memory of their own, which stay valid for what copies from there; and
 * one value. Both only in the host's values of the weight. */
void *kept_new_rows(struct made *made);
void kept_rows_are(struct made *made, double value);
/* A kernel of the emulation, and a launch of it. */
CUfunction kept_kernel(const char *name);
void kept_launch(const char *name, void **arguments, cudaStream_t stream);
/* A copy by such a kernel. */
void kept_copy(void *to, const void *from, size_t bytes, cudaStream_t stream);

#endif
