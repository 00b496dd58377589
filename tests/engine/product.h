/* One matrix product as a program makes it, with its fp64 reference: the body of most scenes.
 *
 * Matrices are random normal unless planted otherwise, column-major as cuBLAS has them; D is filled
 * with NaN before the call, so what the library does not write cannot look right. For scenes only:
 * a failing CUDA call ends the process with status 3 and a line on stderr.
 */
#ifndef QS_TESTS_ENGINE_PRODUCT_H
#define QS_TESTS_ENGINE_PRODUCT_H

#include <stdbool.h>
#include <stdint.h>

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

/* What is put into the operands beside random numbers. */
enum plant {
	PLANT_NOTHING,
	PLANT_NAN,    /* NaN in column 1 of op(B): token 1 of X, row 1 of the row-major D */
	PLANT_INF,    /* the same with Inf                                                */
	PLANT_NAN_A,  /* NaN in row 2 of op(A)                                            */
	PLANT_INF_A,  /* the same with Inf                                                */
	PLANT_ZERO_A, /* op(A) is zero                                                    */
	PLANT_ZERO_B, /* op(B) is zero                                                    */
	PLANT_SPIKE,  /* one element of op(B) is 3e38                                     */
};

/* Zero means the usual: cublasGemmEx, bf16, alpha 1, beta 0, tight, aligned, no epilogue. */
struct product {
	const char *name; /* for messages                                            */
	bool lt;          /* cublasLtMatmul                                          */
	cublasOperation_t ta, tb;
	int m, n, k;
	cudaDataType type;   /* of A and B; CUDA_R_32F cannot be asked for (it is 0)    */
	bool fp32_out;       /* C and D are fp32                                        */
	float alpha_minus_1; /* so that zero is the usual alpha                         */
	float beta;
	int epilogue;            /* cublasLtEpilogue_t                                      */
	int pad_a, pad_b, pad_d; /* added to the tight leading dimension, elements          */
	int shift_a, shift_b;    /* added to the 256-byte aligned pointer, elements         */
	int shift_d;
	bool apart;      /* C is not D (cublasLtMatmul)                             */
	float size_of_a; /* standard deviation of op(A); 0 = 1                      */
	float size_of_b; /* of op(B)                                                */
	enum plant plant;
};

/* Handles and stream of a scene. */
struct session {
	cublasHandle_t blas;
	cublasLtHandle_t lt;
	cudaStream_t stream;
};

/* A product in memory. */
struct made {
	struct product p;
	int lda, ldb, ldd;     /* elements                                         */
	size_t size_a, size_b; /* elements from the pointer to the end             */
	size_t size_d;
	double *a, *b, *c, *bias; /* host values, in the layout of the device         */
	void *da, *db, *dc, *dd;  /* device, shifted                                  */
	void *dbias;              /* device or NULL                                   */
	void *base[5];            /* device allocations                               */
	double *d;                /* host values fetched                              */
	bool padding_untouched;   /* bytes of D between columns are as they were      */
	cublasLtMatmulDesc_t desc;
	cublasLtMatrixLayout_t la, lb, lc, ld;
};

void session_open(struct session *session);
void session_close(struct session *session);
/* Makes further calls go to this stream. */
void session_use(struct session *session, cudaStream_t stream);

/* Allocates and fills; the same seed gives the same numbers. */
void product_make(struct made *made, const struct product *p, uint64_t seed);
/* New numbers in the same memory (asynchronous copies are not used: this waits for the device). */
void product_refill(struct made *made, uint64_t seed);
/* The call itself, on the session's stream; synchronises nothing. */
cublasStatus_t product_call(struct made *made, const struct session *session);
/* Fills D with NaN (or with C, where it is read in place), synchronously. */
void product_poison(struct made *made);
/* Waits for the device and fetches D. */
void product_fetch(struct made *made);
/* Signal to quantisation noise of the fetched D against fp64, dB; -inf if something is not finite
 * that should be. Rows and columns that were planted are left out. */
double product_sqnr(const struct made *made);
/* True if the planted NaN or Inf spoilt exactly what it must: its whole row or column of D. */
bool product_spoilt_exactly(const struct made *made);
/* Hash of the bytes of D, padding included. */
uint64_t product_hash(const struct made *made);
void product_free(struct made *made);

/* One product from start to end, printing "status", "hash", "sqnr", "padding" and "spoilt" lines.
 */
int product_scene(const struct product *p);

/* Ends the scene if a CUDA call failed. */
void must(int status, const char *what);

/* Random normal numbers, reproducible. */
double normal(uint64_t *state);

#endif
