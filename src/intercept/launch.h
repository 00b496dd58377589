/* What launches write: kernels by their arguments, graphs by their nodes.
 *
 * arguments.c  qs_scan_launch qs_use_of qs_launched qs_is_capturing qs_functions_unloaded
 *              qs_function_is_ours
 * graph.c      qs_graph_made qs_graph_uses qs_graph_copies qs_graph_forgotten
 *              qs_graphs_forgotten qs_graphs_by_kernels qs_graph_launched
 * written.c    qs_extent_of_copy qs_extent_of_fill
 */
#ifndef QS_INTERCEPT_LAUNCH_H
#define QS_INTERCEPT_LAUNCH_H

#include <stdbool.h>
#include <stdint.h>

#include <cuda.h>

/* The aligned words of a launch's arguments in [low, high), to `found`. */
struct qs_scan {
	uint64_t low, high;
	CUfunction function; /* or CUkernel                                         */
	CUstream stream;     /* of the launch                                       */
	void *to;            /* of the caller                                       */
	/* `offset`: bytes, from the start of all arguments. */
	void (*found)(struct qs_scan *scan, uint64_t word, unsigned offset);
};

/* Arguments as one of the two: an array of pointers, or a list that ends in a packed buffer. False
 * if what the kernel can write is not known. */
bool qs_scan_launch(struct qs_scan *scan, void *const *params, void *const *extra);
/* The name says so: it begins with "qs_". False if the driver does not tell names. */
bool qs_function_is_ours(CUfunction function);
/* Names a use for qs_track_argument(). Never 0. */
uint64_t qs_use_of(CUfunction function, uint64_t word, unsigned offset);
/* Reports a launch outside of hooked calls. */
void qs_launched(CUfunction function, CUstream stream, void *const *params, void *const *extra);
/* Work for this stream is recorded, not done; also true if that cannot be told. */
bool qs_is_capturing(CUstream stream);
/* Handles of functions may be used again for other functions. */
void qs_functions_unloaded(void);

/* Keeps what the launches of an executable will write, from the graph it was just made of or
 * updated from. */
void qs_graph_made(CUgraphExec exec, CUgraph graph);
/* True unless it is known that no kernel of ours in it reads the descriptor of this kept copy. */
bool qs_graph_uses(CUgraphExec exec, uint64_t descriptor);
/* The descriptors that kernels of ours in it read, one for each kernel, from number `from` on: room
 * for *count, and how many there are. False if that is not known. */
bool qs_graph_copies(CUgraphExec exec, size_t from, uint64_t *descriptors, size_t *count);
/* Whatever it launches from now on is not known. */
void qs_graph_forgotten(CUgraphExec exec);
void qs_graphs_forgotten(void);
/* An executable was made that kernels in other graphs can launch, which is not seen. */
void qs_graphs_by_kernels(void);
/* Reports a launch. */
void qs_graph_launched(CUgraphExec exec, bool captured);

/* Bytes from the first to the last that a copy or a fill writes; 0 = none on the device. */
struct qs_extent {
	uint64_t first;
	size_t bytes;
};
struct qs_extent qs_extent_of_copy(const CUDA_MEMCPY3D *copy);
struct qs_extent qs_extent_of_fill(uint64_t first, size_t pitch, size_t row_bytes, size_t rows);

#endif
