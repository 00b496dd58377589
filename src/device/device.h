/* device/: the CUDA driver by pointer, contexts, our kernels, and scratch memory.
 *
 * driver.c   qs_driver_get qs_driver_forked qs_error_name
 * context.c  qs_context_id qs_context_current qs_context_owns qs_is_device_memory qs_device_bytes
 *            qs_context_forked
 * stream.c   qs_stream_describe qs_may_begin_early
 * lock.c     qs_lock_in_time
 * scratch.c  qs_scratch_lock qs_scratch_unlock qs_reserve qs_temporary
 * embed.S    qs_fatbin_quantise qs_fatbin_nf4 qs_fatbin_hash qs_fatbin_compare
 */
#ifndef QS_DEVICE_DEVICE_H
#define QS_DEVICE_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <cuda.h>

#include "gemm/reason.h"
#include "kernels/nf4.h"

struct qs_cache;
struct qs_checks;
struct qs_options;

/* Driver functions without which nothing is replaced. Versioned names are spelled out: the library
 * must not depend on which macro cuda.h maps a name to. */
#define QS_DRIVER_API(X)                                                                           \
	X(cuCtxGetCurrent)                                                                         \
	X(cuCtxGetDevice)                                                                          \
	X(cuCtxPopCurrent_v2)                                                                      \
	X(cuCtxPushCurrent_v2)                                                                     \
	X(cuDeviceGetAttribute)                                                                    \
	X(cuDeviceTotalMem_v2)                                                                     \
	X(cuEventCreate)                                                                           \
	X(cuEventDestroy_v2)                                                                       \
	X(cuEventRecord)                                                                           \
	X(cuEventQuery)                                                                            \
	X(cuGetErrorName)                                                                          \
	X(cuLaunchKernel)                                                                          \
	X(cuMemAlloc_v2)                                                                           \
	X(cuMemFree_v2)                                                                            \
	X(cuMemcpyDtoDAsync_v2)                                                                    \
	X(cuMemGetInfo_v2)                                                                         \
	X(cuMemHostAlloc)                                                                          \
	X(cuMemsetD32Async)                                                                        \
	X(cuModuleGetFunction)                                                                     \
	X(cuModuleLoadData)                                                                        \
	X(cuFuncGetAttribute)                                                                      \
	X(cuFuncSetAttribute)                                                                      \
	X(cuPointerGetAttribute)                                                                   \
	X(cuStreamCreate)                                                                          \
	X(cuStreamDestroy_v2)                                                                      \
	X(cuStreamGetCtx)                                                                          \
	X(cuStreamSynchronize)                                                                     \
	X(cuStreamWaitEvent)                                                                       \
	X(cuStreamIsCapturing)                                                                     \
	X(cuThreadExchangeStreamCaptureMode)                                                       \
	X(cuGraphRetainUserObject)                                                                 \
	X(cuUserObjectCreate)                                                                      \
	X(cuUserObjectRelease)

/* Newer ones, NULL in older drivers: ids then fall back to handles, launches to the plain form; and
 * names, which only tell devices and drivers apart. */
#define QS_DRIVER_OPTIONAL(X)                                                                      \
	X(cuCtxGetId)                                                                              \
	X(cuDeviceGetName)                                                                         \
	X(cuDriverGetVersion)                                                                      \
	X(cuGraphNodeGetType)                                                                      \
	X(cuLaunchKernelEx)                                                                        \
	X(cuOccupancyMaxActiveClusters)                                                            \
	X(cuStreamGetId)                                                                           \
	X(cuTensorMapEncodeTiled)

/* cuda.h of CUDA 13 declares only the newest form; this one is in every driver since 11.3. */
typedef CUresult qs_capture_info_function(CUstream stream, CUstreamCaptureStatus *status,
                                          cuuint64_t *id, CUgraph *graph,
                                          const CUgraphNode **dependencies, size_t *count);

struct qs_driver {
#define QS_DRIVER_MEMBER(function) __typeof__(function) *function;
	QS_DRIVER_API(QS_DRIVER_MEMBER)
	QS_DRIVER_OPTIONAL(QS_DRIVER_MEMBER)
#undef QS_DRIVER_MEMBER
	qs_capture_info_function *cuStreamGetCaptureInfo_v2;
	CUresult (*cuEventElapsedTime)(float *, CUevent, CUevent); /* a macro in CUDA 13's cuda.h */
};

/* The driver the program loaded, or NULL if there is none or it lacks something. */
const struct qs_driver *qs_driver_get(void);
/* In a forked child: make the lock usable. The functions stay where they are. */
void qs_driver_forked(void);
/* "CUDA_ERROR_OUT_OF_MEMORY"; never NULL. */
const char *qs_error_name(CUresult error);

/* One piece of scratch: owned by a stream for eager work, or by a graph that captured it. */
struct qs_scratch {
	bool used;             /* belongs to a stream or a capture; else free for the asking   */
	uint64_t capture;      /* id of the capture, 0 for eager work                          */
	uint64_t stream;       /* id of the stream (captures may fork)                         */
	CUdeviceptr base;      /* 0 = nothing allocated yet                                    */
	size_t size;           /* bytes                                                        */
	uint64_t turn;         /* of the context when it was last asked for                    */
	uint64_t generation;   /* changes when the block or its owner does                     */
	void *contents;        /* operand/: what the block holds                               */
	_Atomic int captured;  /* 0 = eager; 1 = in a graph that lives; 2 = graph is gone      */
	pthread_mutex_t lock;  /* held while one product's launches are submitted              */
	_Atomic bool given_up; /* the lock was waited for in vain                             */
};

#define QS_SCRATCH_MAX 64

/* Maxima kept per context for predictions, power of two. */
#define QS_HISTORY_SLOTS 65536

/* One CUDA context of the process. Never freed. */
struct qs_context {
	uint64_t id;              /* unique in the process if the driver tells ids          */
	CUcontext handle;         /* the context                                            */
	CUdevice device;          /* ordinal                                                */
	int cc;                   /* compute capability, major * 10 + minor                 */
	int sms;                  /* multiprocessors                                        */
	size_t total;             /* bytes of device memory                                 */
	size_t limit;             /* bytes we may take                                      */
	_Atomic size_t taken;     /* bytes we took                                          */
	size_t measuring_limit;   /* bytes of them for what is measured, at most        */
	_Atomic size_t measuring; /* bytes of them that this took                       */
	size_t largest;           /* most scratch a product asked for, under lock           */
	uint64_t turn;            /* counts requests for scratch, under lock                */
	CUfunction quantise;      /* kernels of quantise.cu                                 */
	CUfunction repair;
	CUfunction rows, amax_columns, cast_columns;
	bool starts_early;   /* those launched so wait for the work ahead of them themselves */
	bool captures_early; /* also in a graph, by a programmatic edge                      */
	CUfunction hash, hash_judge, hash_commit;  /* kernels of hash.cu                       */
	CUfunction compare;                        /* kernel of compare.cu     */
	CUfunction nf4_pack, fp8_pack, nf4_expand; /* kernels of nf4.cu                        */
	CUfunction nf4_sample, fp8_sample;         /* kernels/sample.h                         */
	CUfunction w4a16[QS_PRODUCT_KINDS], w8a16[QS_PRODUCT_KINDS];
	struct qs_product_device products; /* for the geometry of the last two                 */
	bool few_tokens;                   /* these can be launched                            */
	CUfunction wide[QS_WIDE_KINDS];    /* for more tokens, with NF4                        */
	bool many_tokens;                  /* these can be launched                            */
	CUdeviceptr history;   /* uint32_t[QS_HISTORY_SLOTS], zero at first; 0 = none    */
	enum qs_reason reason; /* why the context cannot be used; QS_REASON_AUTO = it can */
	const char *detail;    /* what failed, or NULL                                   */
	struct qs_cache *_Atomic cache; /* operand/: kept copies; NULL until there may be any     */
	struct qs_checks *_Atomic checks; /* engine/: of accuracy; NULL until there are any       */
	pthread_mutex_t lock;        /* of the scratch table                                   */
	struct qs_scratch temporary; /* of the tuner */
	struct qs_scratch scratch[QS_SCRATCH_MAX];
};

/* Id of the current context of this thread, never used again if the driver tells ids; false if
 * there is none. */
bool qs_context_id(uint64_t *id);
/* The current context of this thread, set up at first use (loads the kernels: not while capturing
 * unless known already, see `may_create`). NULL with *why set if there is none. */
struct qs_context *qs_context_current(const struct qs_options *options, bool may_create,
                                      enum qs_reason *why);
/* True if device pointer p belongs to the context's device (or to the host, mapped). */
bool qs_context_owns(const struct qs_context *context, const void *p);
/* True if p is plain device memory: only what GPU work writes can be watched, and managed memory
 * and mapped host memory are written by the host as well. */
bool qs_is_device_memory(const void *p);
/* In a forked child: forget every context; the driver's state did not survive. */
void qs_context_forked(void);
/* Bytes of device memory taken by us on all devices; what went with a context counts still. */
size_t qs_device_bytes(void);

/* What a stream is doing. */
struct qs_stream {
	CUstream handle;
	uint64_t id;      /* unique in the process if the driver tells ids */
	bool capturing;   /* into a graph                                  */
	uint64_t capture; /* id of the capture                             */
	CUgraph graph;    /* being captured                                */
	bool measuring;   /* work that is only measured: see qs_scratch_lock() */
};

/* Fills `stream` (measuring: no); false if the stream cannot take work of ours now (invalidated
 * capture, legacy stream during another capture, unknown handle). */
bool qs_stream_describe(CUstream handle, struct qs_stream *stream);
/* True if a kernel that waits for the work ahead of it itself may be launched into the stream with
 * CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION. In a capture that makes an edge of a kind
 * that not every driver has nor every program reads: only where the policy allows it, and after a
 * kernel. */
bool qs_may_begin_early(const struct qs_context *context, const struct qs_stream *stream);

/* Takes the lock; false if it was not free for a second. Who has it may never give it back:
 * *in_vain remembers that, and nobody waits again until it was free. */
bool qs_lock_in_time(pthread_mutex_t *lock, _Atomic bool *in_vain);

/* At least `bytes` of scratch, 256-byte aligned, for work in this stream, locked: unlock once all
 * launches that use it are submitted. Grows outside capture; a capture gets memory of its own,
 * which goes back when the graph and its executables are destroyed. What it grows for measurements
 * counts against [tune] max_mib. NULL with *why otherwise. */
struct qs_scratch *qs_scratch_lock(struct qs_context *context, const struct qs_stream *stream,
                                   size_t bytes, enum qs_reason *why);
void qs_scratch_unlock(struct qs_scratch *scratch);
/* At least `bytes` in a block of the caller's, zero at first, used by one thread at a time; what it
 * held is lost when it grows. For what is measured: 0 beyond [tune] max_mib, as if there is no
 * memory. Outside capture. */
CUdeviceptr qs_reserve(struct qs_context *context, struct qs_scratch *block, size_t bytes);
/* Memory whose contents nobody wants, for a trial outside capture; 0 if there is none. */
CUdeviceptr qs_temporary(struct qs_context *context, size_t bytes);

extern const unsigned char qs_fatbin_quantise[] __attribute__((visibility("hidden")));
extern const unsigned char qs_fatbin_nf4[] __attribute__((visibility("hidden")));
extern const unsigned char qs_fatbin_hash[] __attribute__((visibility("hidden")));
extern const unsigned char qs_fatbin_compare[] __attribute__((visibility("hidden")));

#endif
