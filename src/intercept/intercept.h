/* intercept/: what the program calls instead of cuBLAS, and where the real functions are.
 *
 * An exported function finds the copy of cuBLAS its caller means, describes the call in one struct
 * qs_gemm, asks qs_dispatch(), and otherwise makes the program's own call with its own arguments.
 *
 * entries.h   the list of hooked entry points
 * cublas.c    the cublas* entry points
 * cublaslt.c  cublasLtMatmul: reads the caller's descriptors
 * layout.c    qs_layout_read
 * export.c    exported symbols and the bound wrappers that dlsym hands out: qs_bound_wrapper
 * loader.c    originals: qs_caller_library qs_caller_original qs_library_of qs_real_dlsym
 * qs_loader_forked dlsym.S     the exported dlsym, a tail jump; qs_dlsym_filter in loader.c
 * submissions.h  the list of driver functions that are counted
 * driver.c    the submission epoch: qs_epoch_now qs_epoch_outside qs_epoch_bump qs_epoch_trusted
 * qs_epoch_doubt qs_epoch_report qs_submission_name qs_submission_wrapper qs_submission_escaped
 *             qs_submission_is_own
 * driver.S    the thunks before the driver's functions
 * driver.h launch.h  reading what their calls write: written.c arguments.c graph.c
 * output.c    qs_wrote qs_wrote_lt
 * nvtx.c      InitializeInjectionNvtx2: ranges of NVTX as layer names
 * guard.c     qs_begin qs_begin_original qs_end
 */
#ifndef QS_INTERCEPT_INTERCEPT_H
#define QS_INTERCEPT_INTERCEPT_H

#include <cublasLt.h>
#include <cublas_v2.h>

#include "gemm/gemm.h"
#include "intercept/entries.h"

/* Toolkits before 12.5 do not declare these two. */
#if CUBLAS_VERSION < 120500
cublasStatus_t cublasGemmGroupedBatchedEx(cublasHandle_t handle, const cublasOperation_t ta[],
                                          const cublasOperation_t tb[], const int m[],
                                          const int n[], const int k[], const void *alpha,
                                          const void *const a[], cudaDataType_t at, const int lda[],
                                          const void *const b[], cudaDataType_t bt, const int ldb[],
                                          const void *beta, void *const c[], cudaDataType_t ct,
                                          const int ldc[], int groups, const int sizes[],
                                          cublasComputeType_t compute);
cublasStatus_t cublasGemmGroupedBatchedEx_64(cublasHandle_t handle, const cublasOperation_t ta[],
                                             const cublasOperation_t tb[], const int64_t m[],
                                             const int64_t n[], const int64_t k[],
                                             const void *alpha, const void *const a[],
                                             cudaDataType_t at, const int64_t lda[],
                                             const void *const b[], cudaDataType_t bt,
                                             const int64_t ldb[], const void *beta, void *const c[],
                                             cudaDataType_t ct, const int64_t ldc[], int64_t groups,
                                             const int64_t sizes[], cublasComputeType_t compute);
#endif

/* What we call ourselves in the copy of cuBLAS or cuBLASLt that the program loaded. A cuBLASLt
 * library has no cublas* functions: those pointers are NULL then. */
#define QS_LIBRARY_API(X)                                                                          \
	X(cublasGetStream_v2)                                                                      \
	X(cublasGetPointerMode_v2)                                                                 \
	X(cublasGetMathMode)                                                                       \
	X(cublasLtGetVersion)                                                                      \
	X(cublasLtMatmul)                                                                          \
	X(cublasLtMatmulDescCreate)                                                                \
	X(cublasLtMatmulDescDestroy)                                                               \
	X(cublasLtMatmulDescSetAttribute)                                                          \
	X(cublasLtMatmulDescGetAttribute)                                                          \
	X(cublasLtMatrixLayoutCreate)                                                              \
	X(cublasLtMatrixLayoutDestroy)                                                             \
	X(cublasLtMatrixLayoutGetAttribute)                                                        \
	X(cublasLtMatmulPreferenceCreate)                                                          \
	X(cublasLtMatmulPreferenceDestroy)                                                         \
	X(cublasLtMatmulPreferenceSetAttribute)                                                    \
	X(cublasLtMatmulAlgoGetHeuristic)

/* One loaded copy of libcublas or libcublasLt. Immutable once published, never freed. */
struct qs_library {
	int index;                      /* position in the table, part of the key              */
	char *path;                     /* as the dynamic loader names it                      */
	void *handle;                   /* reference from dlopen(RTLD_NOLOAD), kept for ever   */
	size_t version;                 /* cublasLtGetVersion(), 0 if it could not be asked    */
	bool complete;                  /* every cublasLt* pointer below was found             */
	void *original[QS_ENTRY_COUNT]; /* the real entry points, NULL if absent */
#define QS_LIBRARY_MEMBER(function) __typeof__(function) *function;
	QS_LIBRARY_API(QS_LIBRARY_MEMBER)
#undef QS_LIBRARY_MEMBER
};

/* What a cublasLtMatrixLayout_t says. */
struct qs_layout {
	uint32_t type;       /* cudaDataType_t  */
	int32_t order;       /* cublasLtOrder_t */
	int32_t batch;       /* products        */
	uint64_t rows, cols; /* elements        */
	int64_t ld;          /* elements        */
};

/* False if it is NULL or cannot be read. */
bool qs_layout_read(const struct qs_library *library, cublasLtMatrixLayout_t from,
                    struct qs_layout *to);

/* How many copies dlsym can hand out bound wrappers for; further ones get the real function. */
#define QS_BOUND_MAX 4

/* The copy of cuBLAS that a call from `address` to `entry` means: the caller's own scope, then
 * RTLD_NEXT, then a walk over the loaded objects. NULL if none has the function, or if it cannot be
 * remembered: memory is out, or more copies are loaded than there is room for. Lock-free when the
 * call site was seen before. */
const struct qs_library *qs_caller_library(enum qs_entry entry, const void *address);
/* The function that the dynamic linker would have bound the caller to without us, looked up anew.
 * NULL if no loaded object has it. */
void *qs_caller_original(enum qs_entry entry, const void *address);
/* Copy number `slot` of those bound by dlsym. */
const struct qs_library *qs_bound_library(int slot);
/* The library that contains this original function, registered if new. NULL as above. */
const struct qs_library *qs_library_of(enum qs_entry entry, void *original);
/* glibc's dlsym, or the next one in preload order. */
void *qs_real_dlsym(void *handle, const char *name);
/* The wrapper of `entry` for the copy in `slot`. */
void *qs_bound_wrapper(enum qs_entry entry, int slot);
/* In the scope of the object that holds the return address: itself and what it needs. NULL in the
 * main executable, and for functions of ours. */
void *qs_in_scope(const void *address, const char *name);
/* True if the address is one of our own exported functions, wrappers or thunks. */
bool qs_is_own(const void *function);
/* In a forked child: make the loader's lock usable. */
void qs_loader_forked(void);

/* The outermost hooked call of this thread. */
struct qs_guard {
	const void *frame; /* on the stack, right below that of the call              */
	bool original;     /* gone on to the program's own                            */
};
extern __thread struct qs_guard qs_guard __attribute__((visibility("hidden")));

/* Enters the outermost hooked call of this thread. False inside another one (cuBLAS calling
 * cublasLtMatmul, or a call of ours): then the original is called at once and nothing is counted.
 */
bool qs_begin(void);
void qs_end(void);
/* From here to qs_end() the call is the program's own: one that does not return is got over. */
static inline void qs_begin_original(void)
{
	qs_guard.original = true;
}

/* Reports what a product wrote that was left to cuBLAS: n vectors of ld elements, `count` times
 * with `stride` elements between; or, by cublasLtMatmul, D, the workspace, and what the epilogue
 * puts out. */
void qs_wrote(const void *d, cudaDataType type, int64_t ld, int64_t n, int64_t stride,
              int64_t count);
void qs_wrote_lt(const struct qs_library *library, cublasLtMatmulDesc_t desc, const void *d,
                 cublasLtMatrixLayout_t ld, const void *workspace, size_t workspace_bytes);

/* ---- the submission epoch ---- */

/* Changes whenever the program submits GPU work or changes what device addresses hold, and never
 * for our own work. A quantised copy is up to date if the epoch is what it was before the launches
 * that made it were submitted, the epoch is trusted, the source is plain device memory (not
 * managed, not mapped host memory), and no output of a product of ours overlaps it. Other threads:
 * the epoch has changed by the time a submitting call returns. */
uint64_t qs_epoch_now(void);
/* The part of it that does not count the products that we left to cuBLAS. */
uint64_t qs_epoch_outside(void);
/* After a hooked call was left to cuBLAS, whose launches do not count one by one. */
void qs_epoch_bump(void);
/* True once it has been shown, as far as that is possible, that this process's submissions are
 * seen. One load when decided. False again, for good, if something is found to escape. */
bool qs_epoch_trusted(void);
/* Why it is not trusted, NULL if nothing speaks against it. Reads the list of loaded objects. */
const char *qs_epoch_doubt(void);
/* One line of level info: what was counted. */
void qs_epoch_report(void);

/* True for driver functions that are counted, and for cuGetProcAddress. */
bool qs_submission_name(const char *name);
/* What dlsym hands out for such a function, which a look-up from `caller` found. */
void *qs_submission_wrapper(const char *name, void *function, const void *caller);
/* A look-up of such a function was answered without us. */
void qs_submission_escaped(const char *name);
/* True if the address is a thunk, a cuGetProcAddress of ours, or an export. */
bool qs_submission_is_own(const void *function);

#endif
