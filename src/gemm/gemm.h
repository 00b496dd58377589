/* gemm/: the one description of a matrix product, its key, its role, and the reason codes.
 *
 * Everything is in cuBLAS's own terms: column-major D[m x n] = epilogue(alpha op(A) op(B) + beta
 * C), op(A) is m x k, op(B) is k x n, leading dimensions in elements. Every hooked entry point
 * becomes a struct qs_gemm; nothing below intercept/ knows which one it was except to log it.
 *
 * gemm.c    qs_gemm_key qs_key_hash qs_gemm_flops
 * text.c    qs_key_text qs_bucket_text qs_action_name qs_role_name qs_entry_name
 * bucket.c  qs_bucket_of qs_bucket_key qs_key_of_tokens
 * reason.c  qs_reason_code qs_reason_text qs_reason_cure
 * role.c    qs_role_of qs_role_is_open qs_thread_is_autograd qs_linear_of
 * evidence.c qs_role_by_evidence qs_weight_identity qs_roles_forked
 * ordinal.c qs_ordinal_give qs_ordinal_of qs_ordinals_full qs_ordinals_forked
 */
#ifndef QS_GEMM_GEMM_H
#define QS_GEMM_GEMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gemm/reason.h"

struct qs_library;

/* What is done with a product. */
enum qs_action {
	QS_ACTION_NATIVE, /* the program's own call */
	QS_ACTION_BF16,   /* same precision, algorithm chosen by timing */
	QS_ACTION_FP8,    /* both operands quantised to fp8 */
	QS_ACTION_NF4,    /* weight quantised to NF4 */
	QS_ACTION_AUTO,   /* decided per product */
	QS_ACTION_COUNT
};

/* Which product of a linear layer this is. */
enum qs_role {
	QS_ROLE_UNKNOWN,
	QS_ROLE_FWD,   /* Y = X W   : cuBLAS m, n, k = out, tokens, in; A is the weight */
	QS_ROLE_DGRAD, /* dX = dY W': cuBLAS m, n, k = in, tokens, out; A is the weight */
	QS_ROLE_WGRAD, /* dW = X' dY: cuBLAS m, n, k = in, out, tokens (or out, in)     */
	QS_ROLE_COUNT
};

/* The entry point a product came by; also indexes the table of originals (intercept.h). */
enum qs_entry {
	QS_ENTRY_GEMM_EX,
	QS_ENTRY_GEMM_EX_64,
	QS_ENTRY_GEMM_STRIDED_BATCHED_EX,
	QS_ENTRY_GEMM_STRIDED_BATCHED_EX_64,
	QS_ENTRY_LT_MATMUL,
	QS_ENTRY_GEMM_BATCHED_EX,
	QS_ENTRY_GEMM_BATCHED_EX_64,
	QS_ENTRY_GEMM_GROUPED_BATCHED_EX,
	QS_ENTRY_GEMM_GROUPED_BATCHED_EX_64,
	QS_ENTRY_SGEMM_EX,
	QS_ENTRY_SGEMM_EX_64,
	QS_ENTRY_DESTROY,
	QS_ENTRY_COUNT
};

/* What a scalar of the call is, for the key. */
enum qs_scalar {
	QS_SCALAR_ZERO,
	QS_SCALAR_ONE,
	QS_SCALAR_OTHER,
	QS_SCALAR_NONFINITE,
	QS_SCALAR_DEVICE, /* not readable on the host */
};

#define QS_TYPE_NONE 0xff /* no such matrix; types are cudaDataType_t otherwise */

/* Bits of qs_key.align: the pointer and its leading dimension are multiples of 16 bytes. Also set
 * where there is nothing to be aligned: a C that is not read, no bias, arrays of pointers. */
#define QS_ALIGN_A    0x1
#define QS_ALIGN_B    0x2
#define QS_ALIGN_C    0x4
#define QS_ALIGN_D    0x8
#define QS_ALIGN_BIAS 0x10

/* Bits of qs_key.odd: what makes a call ineligible without further looking. */
#define QS_ODD_ORDER    0x1  /* a layout that is not plain column-major                        */
#define QS_ODD_SHAPE    0x2  /* layouts that do not fit together, leading dimension too small  */
#define QS_ODD_PEDANTIC 0x4  /* the handle's math mode is pedantic                             */
#define QS_ODD_REDUCED  0x8  /* the handle disallows reduced-precision reductions (torch sets it) */
#define QS_ODD_ATTR     0x10 /* cublasLt: a scale, auxiliary or batch attribute is set          */
#define QS_ODD_OPAQUE   0x20 /* attributes or handle state could not be read                   */

/*
 * Everything about a call that a plan may depend on, pointers reduced to their alignment. All bytes
 * are significant (no padding), so keys are compared with memcmp and hashed as a block.
 */
struct qs_key {
	int64_t m, n, k;            /* elements                                          */
	int64_t lda, ldb, ldc, ldd; /* elements                                          */
	int64_t batch;              /* number of products in the call                    */
	uint64_t context;           /* id of the CUDA context, 0 while unknown           */
	int32_t compute;            /* cublasComputeType_t                               */
	int32_t scale_type;         /* cudaDataType_t of alpha and beta                  */
	int32_t epilogue;           /* cublasLtEpilogue_t, 1 = none                      */
	uint16_t library;           /* index of the copy of cuBLAS                       */
	uint16_t weight;            /* 1 + ordinal of the weight if a rule singles it out
	                               (plan/weight.c), 0 = all others                   */
	uint8_t atype, btype;       /* cudaDataType_t of A and B                         */
	uint8_t ctype, dtype;       /* cudaDataType_t of C and D                         */
	uint8_t bias_type;          /* cudaDataType_t of the bias, QS_TYPE_NONE = none   */
	uint8_t ta, tb;             /* cublasOperation_t                                 */
	uint8_t alpha, beta;        /* enum qs_scalar                                    */
	uint8_t in_place;           /* C == D, or C is not read                          */
	uint8_t align;              /* QS_ALIGN_* bits                                   */
	uint8_t odd;                /* QS_ODD_* bits                                     */
	uint8_t entry;              /* enum qs_entry                                     */
	uint8_t role;               /* enum qs_role                                      */
	uint16_t layer;             /* number of the layer's name (plan/label.h), 0 = none */
};

/* One call, as the program made it. Filled by intercept/, read-only below. */
struct qs_gemm {
	struct qs_key key;
	const struct qs_library *library; /* the copy of cuBLAS that was called         */
	void *handle;                     /* usable as cublasLtHandle_t                 */
	void *stream;                     /* CUstream                                   */
	const void *a, *b, *c;            /* device pointers                            */
	void *d;                          /* device pointer, may equal c                */
	const void *bias;                 /* device pointer or NULL                     */
	/* Makes the program's own call once more, into other memory of D's shape; a cublasStatus_t.
	 * NULL where the entry point cannot. For timing only. */
	int (*repeat)(const struct qs_gemm *g, void *d);
	const void *call;          /* what `repeat` needs                        */
	const float *alpha, *beta; /* host pointers (valid unless QS_SCALAR_DEVICE) */
};

/* Completes the derived fields of g->key (scalars, in_place, align) from the call's values. A
 * scalar preset to QS_SCALAR_DEVICE is not read. */
void qs_gemm_key(struct qs_gemm *g);
/* 64-bit hash of a key. */
uint64_t qs_key_hash(const struct qs_key *key);
/* Writes "TN m=14336 n=4096 k=4096 bf16" plus whatever is unusual; always terminates, returns the
 * length written. Keys with the same text differ in context, library, layer or weight at most: a
 * text that does not fit ends in "~" and a hash. */
size_t qs_key_text(const struct qs_key *key, char *text, size_t size);
/* The same of all keys that are decided by one measurement: the tokens of their bucket, where there
 * are several, are written as a range, "n=1617..2020". */
size_t qs_bucket_text(const struct qs_key *key, char *text, size_t size);
/* 2 m n k times the number of products. */
double qs_gemm_flops(const struct qs_key *key);

/* One past the last byte of D. */
const void *qs_gemm_end(const struct qs_gemm *g);

const char *qs_action_name(enum qs_action action);
const char *qs_role_name(enum qs_role role);
/* Name of the exported function, e.g. "cublasGemmEx". */
const char *qs_entry_name(enum qs_entry entry);

/* The role the evidence of one call supports; QS_ROLE_UNKNOWN when unsure. `autograd` says the
 * calling thread is one of PyTorch's backward threads. */
enum qs_role qs_role_of(const struct qs_key *key, bool autograd);
/* True for a product that either direction of a layer may make: NN or TN, plain. */
bool qs_role_is_open(const struct qs_key *key);
/* The same with what earlier calls did with operand A, and remembers this call. No lock. */
enum qs_role qs_role_by_evidence(const struct qs_gemm *g, bool autograd);
/* Operand A as it lies in memory: a word for its address, shape and leading dimension, the low 3
 * bits zero. 0 = not aligned to 16 bytes, or NULL. */
uint64_t qs_weight_identity(const struct qs_gemm *g);
/* In a forked child: forget the parent's addresses. */
void qs_roles_forked(void);

#define QS_ORDINALS_MAX 16384 /* weights with a number, as many as evidence.c remembers */

/* Gives the next number to a matrix that has none, while there are any. */
void qs_ordinal_give(uint64_t identity);
/* Number of the weight of a product whose key has its role, from 0 in the order of their first use;
 * -1 = not known. Remembers what the product shares with the others of its layer. No lock. */
int32_t qs_ordinal_of(const struct qs_gemm *g);
/* True once all numbers are given. */
bool qs_ordinals_full(void);
/* In a forked child: forget the parent's addresses, and make the lock usable. */
void qs_ordinals_forked(void);
/* True if the calling thread is named pt_autograd_*; asked once per thread. */
bool qs_thread_is_autograd(void);

/* A product as one of a linear layer: features in and out, and rows of activations. */
struct qs_linear {
	int64_t tokens, in, out; /* elements, 0 = unknown */
};
/* By key->role; all 0 if that is unknown. */
struct qs_linear qs_linear_of(const struct qs_key *key);

/* Numbers of tokens that are decided together: each of up to 16, then steps of a quarter. */
struct qs_bucket {
	int64_t first, last;
};
struct qs_bucket qs_bucket_of(int64_t tokens);
/* The same product with another number of tokens. A key of unknown role has none to differ in. */
struct qs_key qs_key_of_tokens(const struct qs_key *key, int64_t tokens);
/* The key that stands for all keys of a bucket: with its last number of tokens, of no layer and no
 * weight. A key of unknown role has no tokens to differ in. */
struct qs_key qs_bucket_key(const struct qs_key *key);

#endif
