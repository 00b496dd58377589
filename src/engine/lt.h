/* A product by cuBLASLt as the engines use it: descriptors made once, algorithm candidates,
 * pointers set per call.
 *
 * lt.c      qs_lt_create qs_lt_create_fp8 qs_lt_destroy qs_lt_call_of qs_lt_call_fp8 qs_lt_run
 * choose.c  qs_lt_choose
 */
#ifndef QS_ENGINE_LT_H
#define QS_ENGINE_LT_H

#include <stdatomic.h>

#include "engine/engine.h"
#include "intercept/intercept.h"
#include "operand/operand.h"

/* The size recommended for Hopper (cuBLAS manual, cublasSetWorkspace). */
#define QS_LT_WORKSPACE  ((size_t)32 << 20)
#define QS_LT_ASKED      8 /* algorithms asked for, with workspace and without */
#define QS_LT_CANDIDATES (2 * QS_LT_ASKED)

/* What the two operands are; everything else is the program's own. */
struct qs_lt_operands {
	cudaDataType type[2]; /* of A and B                                        */
	cublasOperation_t ta, tb;
	int64_t k;        /* elements, padding included                     */
	int64_t lda, ldb; /* elements                                       */
	bool rows;        /* fp8: a scale for each row along K, not one a matrix   */
	bool fast;        /* fp8: accumulate without promotion to fp32      */
};

/* A product complete but for the pointers. */
struct qs_lt {
	const struct qs_library *library;
	struct qs_lt_operands operands;
	int32_t epilogue, bias_type;        /* of the key */
	_Atomic(cublasLtMatmulDesc_t) desc; /* for the next call, NULL while one has it */
	cublasLtMatrixLayout_t a, b, c, d;
	int count; /* candidates: as cuBLASLt ranks them, then those without workspace    */
	struct {
		cublasLtMatmulAlgo_t algo;
		size_t workspace; /* bytes                                            */
	} candidate[QS_LT_CANDIDATES];
	_Atomic int best; /* the candidate in use                             */
};

/* The pointers of one call. */
struct qs_lt_call {
	void *handle;                  /* cublasLtHandle_t                           */
	const float *alpha, *beta;     /* host                                       */
	const void *a, *b, *c;         /* device                                     */
	void *d;                       /* device                                     */
	const void *bias;              /* device or NULL                             */
	const void *scale_a, *scale_b; /* device, dequantisation scales, or NULL     */
	void *workspace;               /* device, QS_LT_WORKSPACE bytes              */
	CUstream stream;
};

/* Prepares the product of `g` with other operands; NULL with *failure filled. */
struct qs_lt *qs_lt_create(const struct qs_gemm *g, const struct qs_lt_operands *operands,
                           struct qs_failure *failure);
/* The same for operands in fp8 as `operands` lays them out, with a scale each, or one for each row
 * along K. Fast accumulation (no promotion to fp32 within a tile) is worth 10 % and is what every
 * trainer uses forward and none backward; where the role is unknown the accurate form is used. */
struct qs_lt *qs_lt_create_fp8(const struct qs_gemm *g, const struct qs_operands *operands,
                               bool rows, struct qs_failure *failure);
void qs_lt_destroy(struct qs_lt *lt);
/* The pointers of this call of the program, `workspace` being QS_LT_WORKSPACE bytes. */
struct qs_lt_call qs_lt_call_of(const struct qs_gemm *g, CUstream stream, CUdeviceptr workspace);
/* The same with these operands in fp8. */
struct qs_lt_call qs_lt_call_fp8(const struct qs_gemm *g, CUstream stream, CUdeviceptr workspace,
                                 const struct qs_pair *pair);
/* Submits the product with candidate number `candidate`. */
cublasStatus_t qs_lt_run(struct qs_lt *lt, const struct qs_lt_call *call, int candidate);

/* Another way of the same product, to be timed beside the candidates: the program's own call, or a
 * preparation that each run pays. Returns 0 on success. */
struct qs_rival {
	int (*run)(void *data);
	void *data;
};

/* What was measured, milliseconds, medians; negative = not measured. */
struct qs_timing {
	float best;     /* the fastest candidate */
	float rival[2]; /* as given              */
};

/* Times the candidates, interleaved with up to two rivals, and makes the fastest the one in use.
 * `call->d` must be memory of ours. Waits for the stream: never while capturing. False if nothing
 * could be measured (the first candidate stays). */
bool qs_lt_choose(struct qs_lt *lt, const struct qs_lt_call *call, const struct qs_rival *rivals,
                  int rival_count, struct qs_timing *timing);

#endif
