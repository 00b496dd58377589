/* The exported symbols, and the wrappers that dlsym hands out.
 *
 * A linked caller is told apart by its return address. A caller that asked dlsym(handle, ...) for
 * the function may call it from anywhere (ctypes calls from libffi), so it gets a wrapper bound to
 * the copy of cuBLAS that the handle named: one per entry point and copy, made here by the
 * compiler.
 */
#include "intercept/intercept.h"
#include "operand/track.h"
#include "plan/share.h"

#define QS_EXPORT     __attribute__((visibility("default")))
#define QS_STRIP(...) __VA_ARGS__

/* try_<function>(): in cublas.c and cublaslt.c; true if the product was launched. */
#define QS_DECLARE_TRY(entry, function, params, args)                                              \
	bool try_##function(const struct qs_library *library, QS_STRIP params);
QS_ENTRIES(QS_DECLARE_TRY)
#undef QS_DECLARE_TRY

/* What a call wrote that was left to cuBLAS, in the names of entries.h. The arrays of pointers are
 * in device memory. */
#define QS_WROTE(stride, count)             qs_wrote(c, ct, ldc, n, stride, count)
#define QS_WROTE_GEMM_EX                    QS_WROTE(0, 1)
#define QS_WROTE_GEMM_EX_64                 QS_WROTE(0, 1)
#define QS_WROTE_GEMM_STRIDED_BATCHED_EX    QS_WROTE(sc, count)
#define QS_WROTE_GEMM_STRIDED_BATCHED_EX_64 QS_WROTE(sc, count)
#define QS_WROTE_SGEMM_EX                   QS_WROTE(0, 1)
#define QS_WROTE_SGEMM_EX_64                QS_WROTE(0, 1)
#define QS_WROTE_GEMM_BATCHED_EX            qs_track_everything()
#define QS_WROTE_GEMM_BATCHED_EX_64         qs_track_everything()
#define QS_WROTE_GEMM_GROUPED_BATCHED_EX    qs_track_everything()
#define QS_WROTE_GEMM_GROUPED_BATCHED_EX_64 qs_track_everything()
#define QS_WROTE_LT_MATMUL                  qs_wrote_lt(library, desc, d, ld, workspace, workspace_bytes)
#define QS_WROTE_DESTROY                    (void)0

/* One call to one known copy: the outermost of this thread is looked at, the rest goes through. The
 * guard is held around the original too, as libcublas calls cublasLtMatmul. */
#define QS_DEFINE_ON(entry, function, params, args)                                                \
	static cublasStatus_t on_##function(const struct qs_library *library, QS_STRIP params)     \
	{                                                                                          \
		__typeof__(function) *original =                                                   \
		        (__typeof__(function) *)library->original[QS_ENTRY_##entry];               \
		if (!qs_begin())                                                                   \
			return original args;                                                      \
		cublasStatus_t status = CUBLAS_STATUS_SUCCESS;                                     \
		if (!try_##function(library, QS_STRIP args)) {                                     \
			qs_begin_original();                                                       \
			status = original args;                                                    \
			qs_share_end(!status);                                                     \
			qs_epoch_bump();                                                           \
			if (qs_watch_any() && !status)                                             \
				QS_WROTE_##entry;                                                  \
			else if (qs_watch_any())                                                   \
				qs_track_everything();                                             \
		}                                                                                  \
		qs_end();                                                                          \
		return status;                                                                     \
	}
QS_ENTRIES(QS_DEFINE_ON)
#undef QS_DEFINE_ON

/* A copy that cannot be remembered (no memory, or one too many) is called all the same. A program
 * can only get here without any if it looked the symbol up globally and found ours; the answer is
 * what cuBLAS gives before it is initialised. */
#define QS_DEFINE(entry, function, params, args)                                                   \
	QS_EXPORT cublasStatus_t function params                                                   \
	{                                                                                          \
		const void *caller = __builtin_return_address(0);                                  \
		const struct qs_library *library = qs_caller_library(QS_ENTRY_##entry, caller);    \
		if (library)                                                                       \
			return on_##function(library, QS_STRIP args);                              \
		__typeof__(function) *original =                                                   \
		        (__typeof__(function) *)qs_caller_original(QS_ENTRY_##entry, caller);      \
		if (!original)                                                                     \
			return CUBLAS_STATUS_NOT_INITIALIZED;                                      \
		const bool outermost = qs_begin();                                                 \
		if (outermost)                                                                     \
			qs_begin_original();                                                       \
		cublasStatus_t status = original args;                                             \
		if (outermost) {                                                                   \
			qs_epoch_bump();                                                           \
			if (qs_watch_any())                                                        \
				qs_track_everything();                                             \
			qs_end();                                                                  \
		}                                                                                  \
		return status;                                                                     \
	}
QS_ENTRIES(QS_DEFINE)
#undef QS_DEFINE

#define QS_DEFINE_BOUND(slot, function, params, args)                                              \
	static cublasStatus_t bound_##slot##_##function params                                     \
	{                                                                                          \
		return on_##function(qs_bound_library(slot), QS_STRIP args);                       \
	}
#define QS_DEFINE_BOUND_ALL(entry, function, params, args)                                         \
	QS_DEFINE_BOUND(0, function, params, args)                                                 \
	QS_DEFINE_BOUND(1, function, params, args)                                                 \
	QS_DEFINE_BOUND(2, function, params, args)                                                 \
	QS_DEFINE_BOUND(3, function, params, args)
QS_ENTRIES(QS_DEFINE_BOUND_ALL)
#undef QS_DEFINE_BOUND_ALL
#undef QS_DEFINE_BOUND

_Static_assert(QS_BOUND_MAX == 4, "one QS_DEFINE_BOUND line per slot");

static void *const wrappers[QS_ENTRY_COUNT][QS_BOUND_MAX + 1] = {
#define QS_ROW(entry, function, params, args)                                                      \
	[QS_ENTRY_##entry] = {(void *)bound_0_##function, (void *)bound_1_##function,              \
	                      (void *)bound_2_##function, (void *)bound_3_##function,              \
	                      (void *)function},
        QS_ENTRIES(QS_ROW)
#undef QS_ROW
};

void *qs_bound_wrapper(enum qs_entry entry, int slot)
{
	return wrappers[entry][slot];
}

bool qs_is_own(const void *function)
{
	for (int entry = 0; entry < QS_ENTRY_COUNT; entry++)
		for (int slot = 0; slot <= QS_BOUND_MAX; slot++)
			if (wrappers[entry][slot] == function)
				return true;
	return qs_submission_is_own(function);
}
