/* The insides of softcuda, shared by the files of libcuda.so.1 and, at the end, by those of
 * libcudart, libcublas and libcublasLt. softcuda.h says what is offered.
 *
 * One lock guards everything. Functions named cu* are the driver API: they take it and give it
 * back (sc_enter .. sc_leave); functions named sc_* expect it held unless they say otherwise.
 *
 * state.c     sc_enter sc_enter_context sc_leave sc_later sc_random, knobs, counters
 * context.c   devices and contexts: sc_current sc_context_known
 * memory.c    sc_memory_find sc_memory_covers sc_memory_map sc_memory_free sc_memory_drop_context
 * schedule.c  sc_work_new sc_submit sc_push sc_run_until sc_drain sc_progress
 *             sc_clock softcuda_spend
 * stream.c    sc_enter_stream sc_stream_find sc_stream_add sc_streams_drop_context
 * event.c     events
 * capture.c   sc_capture_add sc_capture_early sc_capture_check sc_unsafe sc_context_capturing
 * graph.c     sc_graph_new sc_graph_add sc_graph_destroy sc_graph_keep_memory, user objects
 * kernel.c    sc_kernel_node softcuda_register, modules, functions, launches
 * names.c     error names, cuGetProcAddress
 */
#ifndef SOFTCUDA_INSIDE_H
#define SOFTCUDA_INSIDE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda.h>

#include "tests/oracle/oracle.h"
#include "tests/softcuda/softcuda.h"

#define SC_DEVICES 2
#define SC_STACK   16 /* depth of a thread's context stack */
#define SC_PARAMS  4  /* arguments of a kernel             */

/* Knobs and counters: one table each in state.c. */
extern struct sc_knobs {
	long seed, fail_alloc, memory_mib, capability, ptx, cublaslt_version, cublaslt12_version;
	long heuristics_empty, fail_fp8, fail_module, fail_launch, null_products, inner_lt, strict;
	long fail_product, fail_event, hold_host, idle_products, idle_kernels, fp8_error,
	        slow_product;
	long product_us, fp8_us, second_us, wide_second_us, kernel_us, driver, reuse;
} softcuda_knobs;

extern struct sc_counters {
	long launches, products, products_bf16, products_fp16, products_fp32, products_fp8;
	long early_launches, early_reads, early_edges;
	long allocations, frees, live, bytes, overruns, syncs, queued, ran, heuristics, captures;
	long loose_heuristics;
	long descs, descs_destroyed;
	long graph_launches, modules, products_first, products_second, events;
} softcuda_counters;

/* What a thread has of its own. */
extern _Thread_local struct sc_thread {
	CUcontext stack[SC_STACK]; /* current context on top                               */
	int depth;                 /* contexts in it                                       */
	CUstreamCaptureMode mode;  /* cuThreadExchangeStreamCaptureMode                    */
	uint64_t token;            /* names the thread, 0 until asked for by sc_token()    */
} sc_thread;

struct CUctx_st {
	bool live;             /* false once destroyed; the struct stays                     */
	bool primary;          /* one per device                                             */
	int device;            /* ordinal                                                    */
	int retained;          /* of a primary context                                       */
	unsigned flags;        /* of cuCtxCreate                                             */
	unsigned long long id; /* never reused                                               */
	CUresult broken;       /* sticky error                                               */
	CUstream legacy;       /* default stream                                             */
	CUcontext next;        /* list of all                                                */
};

/* A piece of work, its arguments by value. Also the content of a graph node. */
struct sc_work {
	CUresult (*run)(const void *args); /* an error breaks the context                    */
	void (*drop)(const void *args);    /* releases what the arguments hold, or NULL       */
	bool host;                         /* a function of the program: run without the lock */
	CUgraphNodeType type;              /* as a graph node                                 */
	size_t size;                       /* bytes of args                                   */
	_Alignas(16) unsigned char args[]; /* what run gets                                   */
};

/* A moment in a stream: over once the work with this number is done. */
struct sc_point {
	CUstream stream; /* NULL = long past */
	uint64_t op;     /* number           */
};

/* A set of graph nodes. */
struct sc_nodes {
	CUgraphNode *list; /* without duplicates */
	size_t count;      /* nodes              */
};

struct sc_capture {
	unsigned long long id;    /* never reused                          */
	CUstreamCaptureMode mode; /* of cuStreamBeginCapture               */
	uint64_t owner;           /* token of the thread that began it     */
	CUstream origin;          /* stream that began it                  */
	CUgraph graph;            /* being built                           */
	bool invalid;             /* something prohibited was done         */
	struct sc_capture *next;  /* list of active ones                   */
};

/* Counts a knob of the kind "the Nth from now on" down; true for the Nth. */
static inline bool sc_nth(long *knob)
{
	return *knob > 0 && --*knob == 0;
}

struct sc_op;
struct sc_kernel;

struct CUstream_st {
	bool live;                  /* false once destroyed: reused when idle             */
	bool busy;                  /* a host function of it is running                   */
	bool legacy;                /* the default stream of its context                  */
	bool nonblocking;           /* does not order itself with the default stream      */
	unsigned flags;             /* as created                                         */
	int priority;               /* as created                                         */
	uint64_t thread;            /* owner of a per-thread default stream, else 0       */
	unsigned long long id;      /* never reused                                       */
	CUcontext context;          /* it belongs to                                      */
	struct sc_op *head, *tail;  /* queue                                              */
	uint64_t last, completed;   /* numbers of the last work submitted, and done       */
	int64_t spent;              /* us of modelled time that its work took             */
	struct sc_capture *capture; /* it is part of, or NULL                             */
	struct sc_nodes tips;       /* what the next captured node depends on             */
	CUstream next;              /* list of all                                        */
};

extern CUstream sc_streams;
extern struct sc_kernel *sc_kernels;
extern long sc_allocations_until_failure; /* counts down from the knob fail_alloc */
extern struct sc_capture *sc_captures;

/* Where an allocation would be. */
enum sc_memory_type {
	SC_DEVICE,
	SC_HOST
};

struct sc_memory {
	unsigned char *base;      /* start                                            */
	size_t size;              /* bytes asked for                                  */
	enum sc_memory_type type; /* where it would be                                */
	CUcontext context;        /* current when it was made                         */
	uint64_t id;              /* never reused                                     */
	bool graph;               /* allocated by a captured cuMemAllocAsync          */
	unsigned char *range;     /* of mapped memory: the addresses reserved         */
	size_t range_size;        /* bytes                                            */
};

/* A reference kernel and how it is reached. */
struct sc_kernel {
	const struct qs_oracle_kernel *code; /* name, function, arguments       */
	bool product;                        /* of cuBLAS: counted apart        */
	long launches;                       /* counter kernel:<name>           */
	struct sc_kernel *next;              /* list of all known               */
};

/* Locks; fails if the driver was not initialised or did not survive a fork. */
CUresult sc_enter(void);
/* Locks and gives the current context, which must exist and work. */
CUresult sc_enter_context(CUcontext *context);
/* Unlocks, runs what sc_later() put off, and returns its argument. */
CUresult sc_leave(CUresult result);
/* Releases and retakes the lock around a function of the program. */
void sc_unlock(void);
void sc_lock(void);
/* Waits until another thread has finished a host function. */
void sc_wait(void);
void sc_wake(void);
/* Calls function(data) after the lock has been released. */
void sc_later(CUhostFn function, void *data);
uint64_t sc_token(void);
unsigned sc_random(void);
unsigned long long sc_new_id(void);
/* Only for cuInit. */
CUresult sc_initialise(void);
/* malloc and realloc that end the program when there is no memory. */
void *sc_alloc(size_t bytes);
void *sc_grow(void *old, size_t bytes);

CUcontext sc_current(void);
bool sc_context_known(CUcontext context);

struct sc_memory *sc_memory_find(CUdeviceptr pointer);
bool sc_memory_covers(CUdeviceptr pointer, size_t bytes);
/* Memory that is mapped already, into this range of reserved addresses. */
void sc_memory_map(CUcontext context, unsigned char *base, size_t bytes, unsigned char *range,
                   size_t range_size);
void sc_memory_drop_context(CUcontext context);
void sc_memory_free(struct sc_memory *memory);

struct sc_work *sc_work_new(CUresult (*run)(const void *), const void *args, size_t size,
                            CUgraphNodeType type);
void sc_work_free(struct sc_work *work);
/* Queues or captures the work, which it owns from now on. */
CUresult sc_submit(CUstream stream, struct sc_work *work);
/* Queues work that runs after `point` too; never captured. */
void sc_push(CUstream stream, struct sc_work *work, struct sc_point point);
struct sc_point sc_last(CUstream stream);
bool sc_done(struct sc_point point);
void sc_run_until(struct sc_point point);
/* ns: the modelled time of a stream, or the host's if no time is modelled. */
int64_t sc_clock(CUstream stream);
/* Runs everything submitted to the context's streams; returns its sticky error. */
CUresult sc_drain(CUcontext context);
/* Runs a little. */
void sc_progress(void);
/* Runs one piece of work and accounts for it. */
CUresult sc_work_run(const struct sc_work *work);

/* Locks and finds the stream. */
CUresult sc_enter_stream(CUstream handle, CUstream *stream);
/* The stream of a handle, the default streams included. */
CUresult sc_stream_find(CUstream handle, CUstream *stream);
CUstream sc_stream_add(CUcontext context);
void sc_streams_drop_context(CUcontext context);

/* Whether work may be submitted: fails for broken contexts, invalid captures, and the legacy stream
 * while a blocking stream is being captured (which spoils that capture). */
CUresult sc_capture_check(CUstream stream);
CUresult sc_capture_add(CUstream stream, struct sc_work *work);
/* The next node may begin before the one ahead of it has ended; false if no driver captures that.
 */
bool sc_capture_early(CUstream stream);
struct sc_capture *sc_capture_find(unsigned long long id);
void sc_capture_spoil(struct sc_capture *capture);
void sc_capture_leave(CUstream stream);
/* A call that is unsafe while someone captures: 900, spoiling the captures, unless allowed. */
CUresult sc_unsafe(void);
/* 900, spoiling them, if any stream of the context is being captured. */
CUresult sc_context_capturing(CUcontext context);
void sc_nodes_add(struct sc_nodes *set, CUgraphNode node);
void sc_nodes_merge(struct sc_nodes *set, const struct sc_nodes *more);
void sc_nodes_clear(struct sc_nodes *set);

CUgraph sc_graph_new(void);
/* Appends a node, which owns the work. */
CUgraphNode sc_graph_add(CUgraph graph, struct sc_work *work, const struct sc_nodes *after);
void sc_graph_destroy(CUgraph graph);
bool sc_graph_is_kernel(CUgraphNode node);
/* True if every node of `tips` is an ancestor of, or among, `ends`. */
bool sc_graph_joined(const struct sc_nodes *tips, const struct sc_nodes *ends);
/* Makes the graph and its executables the owners of a device allocation. */
void sc_graph_keep_memory(CUgraph graph, CUdeviceptr memory);
/* Node parameters of captured work, whose args are given; and work from node parameters: copies and
 * fills of one row. */
void sc_kernel_node(const void *args, CUDA_KERNEL_NODE_PARAMS *out);
void sc_copy_node(const void *args, CUDA_MEMCPY3D *out);
void sc_fill_node(const void *args, CUDA_MEMSET_NODE_PARAMS *out);
CUresult sc_kernel_work(const CUDA_KERNEL_NODE_PARAMS *params, struct sc_work **work);
struct sc_work *sc_copy_work(const CUDA_MEMCPY3D *params);
struct sc_work *sc_fill_work(const CUDA_MEMSET_NODE_PARAMS *params);

/* For libcublas and libcublasLt, exported by libcuda.so.1. The first three take no part in the lock
 * and may be used only by code that runs as a kernel. */
bool softcuda_covers(uint64_t pointer, size_t bytes);
void softcuda_fault(void);
/* Modelled time that the kernel takes, microseconds; under the same rule. */
void softcuda_spend(long us);
/* Adds one to a field of softcuda_counters. */
void softcuda_count(long *counter);
/* A context-less function for a kernel of cuBLAS; counts as a product, not as a launch. */
CUfunction softcuda_register(const struct qs_oracle_kernel *code);

/* A matrix in memory: element (i, j) of product number b is at row * i + column * j + stride * b.
 */
struct sc_matrix {
	uint64_t pointer;       /* device address, 0 = absent                        */
	int64_t row, column;    /* element distances                                 */
	int64_t stride;         /* elements between products of a batch              */
	uint32_t type;          /* cudaDataType_t                                    */
	uint32_t pointer_array; /* 1: pointer is that of an array of device pointers */
};

enum sc_activation {
	SC_NONE,
	SC_RELU,
	SC_GELU,
	SC_GELU_AUX,
	SC_DGELU
};

/* By whom an algorithm was chosen, and which of the two that a heuristic offers it is. */
enum sc_algorithm {
	SC_DEFAULT,
	SC_FIRST,
	SC_SECOND
};

/* D = activation(alpha scale_a scale_b op(A) op(B) + scale_c beta C + bias) scale_d. The transposes
 * are in the strides of a (m x k) and b (k x n). */
struct sc_product {
	int64_t m, n, k, batch;
	struct sc_matrix a, b, c, d; /* operands                                           */
	struct sc_matrix bias;       /* m elements                                         */
	struct sc_matrix aux;        /* m x n, in or out                                   */
	float alpha, beta;           /* if the pointers are 0                              */
	uint64_t alpha_at, beta_at;  /* device addresses of floats                         */
	uint64_t scale[4];           /* device addresses of the scales of A B C D, or 0     */
	uint32_t outer;              /* 1: scale[0] has m, scale[1] has n floats            */
	uint32_t activation;         /* enum sc_activation                                  */
	uint64_t workspace;          /* scribbled over                                      */
	uint64_t workspace_bytes;    /* this much                                           */
	uint32_t algorithm;          /* enum sc_algorithm                                   */
};

/* product.c, linked into both libraries: submits a product to a stream of the context. */
CUresult sc_product_launch(const struct sc_product *product, CUcontext context, CUstream stream);
/* Bytes of an element, 0 if the type is not supported. */
size_t sc_type_size(uint32_t type);

/* cublasHandle_t and cublasLtHandle_t alike: the one may be used as the other. */
struct sc_handle {
	uint32_t magic;    /* SC_HANDLE of the copy that made it */
	uint32_t blas;     /* made by cublasCreate               */
	CUcontext context; /* current when it was made           */
	CUstream stream;   /* of cublasSetStream                 */
	int pointer_mode;  /* cublasPointerMode_t                */
	int math_mode;     /* cublasMath_t                       */
	int atomics_mode;  /* cublasAtomicsMode_t                */
	int sm_count;      /* cublasSetSmCountTarget             */
	void *workspace;   /* of cublasSetWorkspace              */
	size_t workspace_bytes;
};

#ifndef SOFTCUDA_MAJOR
#define SOFTCUDA_MAJOR 13
#endif
#define SC_HANDLE (0xb1a50000u + SOFTCUDA_MAJOR)

#endif
