/* Why a matrix product was replaced or passed through.
 *
 * One list, shared by the code, the decision log, the command `qshim reasons`, the manual text and
 * the tests. The spelling of a code is part of the log format: codes are added, never renamed.
 */
#ifndef QS_GEMM_REASON_H
#define QS_GEMM_REASON_H

/* X(ENUMERATOR, "code", "what happened", "what to do about it") */
#define QS_REASONS(X)                                                                              \
	X(AUTO, "auto", "measured to be faster, or predicted where it could not be measured",      \
	  "nothing to do")                                                                         \
	X(RULE, "rule", "a rule of the policy chose this action", "edit the rule named beside it") \
	X(TUNED, "tuned", "a row that is pinned in the tuned file says so",                        \
	  "edit the file that [tune] file names")                                                  \
	X(OFF, "off", "qshim is switched off", "set QSHIM=on, or mode = on in the policy")         \
	X(OBSERVE, "observe", "products are only observed", "set QSHIM=on, or mode = on")          \
	X(SHADOW, "shadow", "shadow mode: the program's own product, others only measured",        \
	  "set QSHIM=on, or mode = on")                                                            \
	X(PROCESS, "process", "[qshim] process excludes this executable", "add its name there")    \
	X(POLICY, "policy", "the policy could not be used",                                        \
	  "correct the error reported on stderr")                                                  \
	X(DTYPE, "dtype", "operands are not bf16 with bf16 or fp32 output", "compute in bf16")     \
	X(COMPUTE, "compute", "compute type, scale type or math mode is not plain fp32",           \
	  "use CUBLAS_COMPUTE_32F without a pedantic mode")                                        \
	X(POINTER_MODE, "pointer-mode", "alpha and beta are not on the host",                      \
	  "use CUBLAS_POINTER_MODE_HOST")                                                          \
	X(OP, "op", "a conjugated or unknown operation", "use CUBLAS_OP_N or CUBLAS_OP_T")         \
	X(BATCH, "batch", "more than one product in the call", "nothing: batched products pass")   \
	X(ORDER, "order", "a layout that is not column-major or is malformed",                     \
	  "use CUBLASLT_ORDER_COL")                                                                \
	X(ALIGN, "align",                                                                          \
	  "the output, C or bias is not aligned to 16 bytes, or m not to 8 (fp32: 4)",             \
	  "pad the output's leading dimension")                                                    \
	X(EPILOGUE, "epilogue", "an epilogue that is not known to work in fp8",                    \
	  "nothing: auxiliary outputs and gradient epilogues pass")                                \
	X(BETA, "beta", "beta needs a C that fp8 cannot take", "accumulate in place")              \
	X(ALPHA, "alpha", "alpha is zero or not finite, or beta is not finite", "nothing to do")   \
	X(ALIAS, "alias", "the output overlaps an input", "give the output its own memory")        \
	X(EMPTY, "empty", "m, n or k is zero", "nothing to do")                                    \
	X(HANDLE, "handle", "the library handle is NULL or could not be read", "nothing to do")    \
	X(CONTEXT, "context",                                                                      \
	  "no usable CUDA context on this thread, or memory of another device",                    \
	  "nothing: the next call from this thread is looked at again")                            \
	X(ARCH, "arch", "the GPU has no fp8 products this build knows",                            \
	  "use Ada, Hopper or newer")                                                              \
	X(CUBLASLT_OLD, "cublaslt-old", "the program's cuBLASLt is older than 12.0",               \
	  "update the program's CUDA libraries")                                                   \
	X(CUBLASLT_NEW, "cublaslt-new", "the program's cuBLASLt is newer than any tested",         \
	  "update qshim, or set [engine] cublaslt = any")                                          \
	X(SMALL, "small", "the product is too small for the conversion to pay",                    \
	  "nothing, or force it with a rule")                                                      \
	X(NOT_FASTER, "not-faster", "measured not to be faster", "nothing to do")                  \
	X(STEPS, "steps", "whole steps of the program are measured not to be faster with it",      \
	  "nothing, or set [tune] host_bound = keep")                                              \
	X(UNTUNED, "untuned", "not measured: used fewer than three times, or it failed",           \
	  "use it three times outside graph capture, or keep the tuned file of a run that did")    \
	X(BUDGET, "budget", "the tuning budget is used up", "raise [tune] budget_ms")              \
	X(SQNR, "sqnr", "measured error above the limit", "use scale = row, or lower min_sqnr")    \
	X(NONFINITE, "nonfinite", "the operand holds NaN or Inf", "nothing to do")                 \
	X(WEIGHT, "weight", "operand A is not a weight that has the form asked for",               \
	  "give the rule role = fwd, dgrad, and layers of which 64 divides the inputs")            \
	X(UNAVAILABLE, "unavailable", "nothing of this build serves this kind of call",            \
	  "nothing: it passes")                                                                    \
	X(CAPTURE_COLD, "capture-cold", "first seen during graph capture",                         \
	  "run the product before capturing, under auto three times")                              \
	X(CACHE_FULL, "cache-full", "more products or kept weights than there is room for",        \
	  "raise [cache] max_keys or max_mib")                                                     \
	X(MEMORY, "memory", "no device memory for scratch, measurements or kept weights",          \
	  "raise [cache] max_mib or [tune] max_mib, or free memory")                               \
	X(ALGO_NONE, "algo-none", "cuBLASLt offers no fp8 algorithm for it", "nothing to do")      \
	X(ERROR, "error", "a step of ours failed; see the message beside it", "report it")         \
	X(FORK, "fork", "a forked child without a CUDA context of its own",                        \
	  "start workers with spawn if they use the GPU")                                          \
	X(CHANGING, "changing", "the weight was not seen unchanged for long enough to be kept",    \
	  "nothing: it is tried again; or set [cache] validity = frozen")                          \
	X(UNTRACKED, "untracked", "copies of weights cannot be kept up to date here",              \
	  "set [cache] validity = verified or frozen")

enum qs_reason {
#define QS_REASON_ENUM(name, code, what, cure) QS_REASON_##name,
	QS_REASONS(QS_REASON_ENUM)
#undef QS_REASON_ENUM
	QS_REASON_COUNT
};

/* The stable code of a reason, e.g. "capture-cold"; never NULL. */
const char *qs_reason_code(enum qs_reason reason);
/* What happened, one clause; never NULL. */
const char *qs_reason_text(enum qs_reason reason);
/* What the user can do about it; never NULL. */
const char *qs_reason_cure(enum qs_reason reason);

#endif
