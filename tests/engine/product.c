/* One product and its reference; see product.h. The reference is fp64 on the bf16 values that the
 * device holds, so that all error measured is the library's. */
#include "product.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oracle/oracle.h"

void must(int status, const char *what)
{
	if (!status)
		return;
	fprintf(stderr, "%s: status %d\n", what, status);
	exit(3);
}

/* ---- numbers ----------------------------------------------------------------------------------
 */

static uint64_t next(uint64_t *state) /* splitmix64 */
{
	uint64_t x = *state += 0x9e3779b97f4a7c15u;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

double normal(uint64_t *state)
{
	double u = ((double)(next(state) >> 11) + 0.5) * 0x1p-53;
	double v = (double)(next(state) >> 11) * 0x1p-53;
	return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

static size_t bytes_of(const struct made *made, bool output)
{
	return output && made->p.fp32_out ? 4 : 2;
}

/* Rounds to what the device will hold. */
static double round_to(double value, size_t bytes)
{
	float f = (float)value;
	return bytes == 4 ? f : qs_oracle_bf16_to_float(qs_oracle_float_to_bf16(f));
}

static void fill(double *values, size_t count, double magnitude, size_t bytes, uint64_t *state)
{
	for (size_t i = 0; i < count; i++)
		values[i] = round_to(magnitude * normal(state), bytes);
}

static void upload(void *device, const double *values, size_t count, size_t bytes)
{
	unsigned char *packed = malloc(count * bytes);
	for (size_t i = 0; i < count; i++) {
		float f = (float)values[i];
		uint16_t half = qs_oracle_float_to_bf16(f);
		memcpy(packed + i * bytes, bytes == 4 ? (void *)&f : (void *)&half, bytes);
	}
	must(cudaMemcpy(device, packed, count * bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
	free(packed);
}

/* ---- session ----------------------------------------------------------------------------------
 */

void session_open(struct session *session)
{
	must(cudaStreamCreateWithFlags(&session->stream, cudaStreamNonBlocking), "stream");
	must(cublasCreate(&session->blas), "cublasCreate");
	must(cublasLtCreate(&session->lt), "cublasLtCreate");
	must(cublasSetStream(session->blas, session->stream), "cublasSetStream");
}

void session_use(struct session *session, cudaStream_t stream)
{
	session->stream = stream;
	must(cublasSetStream(session->blas, stream), "cublasSetStream");
}

void session_close(struct session *session)
{
	must(cublasLtDestroy(session->lt), "cublasLtDestroy");
	must(cublasDestroy(session->blas), "cublasDestroy");
	must(cudaStreamDestroy(session->stream), "cudaStreamDestroy");
}

/* ---- making -----------------------------------------------------------------------------------
 */

static size_t extent(int cols, int ld)
{
	return (size_t)cols * (size_t)ld;
}

/* Element (row, column) of op(A) and of op(B). */
static size_t at_a(const struct made *made, int i, int l)
{
	return made->p.ta == CUBLAS_OP_N ? (size_t)i + extent(l, made->lda)
	                                 : (size_t)l + extent(i, made->lda);
}

static size_t at_b(const struct made *made, int l, int j)
{
	return made->p.tb == CUBLAS_OP_N ? (size_t)l + extent(j, made->ldb)
	                                 : (size_t)j + extent(l, made->ldb);
}

static void plant(struct made *made)
{
	const struct product *p = &made->p;
	switch (p->plant) {
	case PLANT_NAN:
		made->b[at_b(made, p->k / 2, 1)] = NAN;
		break;
	case PLANT_INF:
		made->b[at_b(made, p->k / 2, 1)] = INFINITY;
		break;
	case PLANT_NAN_A:
		made->a[at_a(made, 2, p->k - 1)] = NAN;
		break;
	case PLANT_INF_A:
		made->a[at_a(made, 2, p->k - 1)] = INFINITY;
		break;
	case PLANT_ZERO_A:
		memset(made->a, 0, made->size_a * sizeof *made->a);
		break;
	case PLANT_ZERO_B:
		memset(made->b, 0, made->size_b * sizeof *made->b);
		break;
	case PLANT_SPIKE:
		made->b[at_b(made, 0, 0)] = round_to(3e38, 2);
		break;
	default:
		break;
	}
}

static bool has_bias(const struct product *p)
{
	return p->epilogue & CUBLASLT_EPILOGUE_BIAS;
}

void product_refill(struct made *made, uint64_t seed)
{
	const struct product *p = &made->p;
	double size_a = p->size_of_a != 0.0f ? p->size_of_a : 1.0;
	double size_b = p->size_of_b != 0.0f ? p->size_of_b : 1.0;
	double output = size_a * size_b; /* of C and bias: comparable with the product */
	uint64_t state = seed * 1000003 + 17;
	must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
	fill(made->a, made->size_a, size_a, 2, &state);
	fill(made->b, made->size_b, size_b, 2, &state);
	fill(made->c, made->size_d, output, bytes_of(made, true), &state);
	plant(made);
	upload(made->da, made->a, made->size_a, 2);
	upload(made->db, made->b, made->size_b, 2);
	if (made->dbias) {
		fill(made->bias, (size_t)p->m, output, 2, &state);
		upload(made->dbias, made->bias, (size_t)p->m, 2);
	}
	product_poison(made);
}

void product_poison(struct made *made)
{
	size_t bytes = bytes_of(made, true);
	bool in_place = made->p.beta != 0.0f && !made->p.apart;
	if (made->p.apart)
		upload(made->dc, made->c, made->size_d, bytes);
	if (in_place)
		upload(made->dd, made->c, made->size_d, bytes);
	else
		must(cudaMemset(made->dd, 0xff, made->size_d * bytes), "cudaMemset");
	/* The default stream is not ordered with a non-blocking one. */
	must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

static void *allocate(struct made *made, int index, size_t elements, int shift, size_t bytes)
{
	/* 256 bytes of slack take the shift. */
	must(cudaMalloc(&made->base[index], elements * bytes + 256), "cudaMalloc");
	return (unsigned char *)made->base[index] + (size_t)shift * bytes;
}

static void set(struct made *made, cublasLtMatmulDescAttributes_t attribute, const void *value,
                size_t size)
{
	must(cublasLtMatmulDescSetAttribute(made->desc, attribute, value, size), "set attribute");
}

static void describe(struct made *made)
{
	const struct product *p = &made->p;
	cudaDataType out = p->fp32_out ? CUDA_R_32F : CUDA_R_16BF;
	cudaDataType in = p->type ? p->type : CUDA_R_16BF;
	bool nota = p->ta == CUBLAS_OP_N, notb = p->tb == CUBLAS_OP_N;
	uint64_t m = (uint64_t)p->m, n = (uint64_t)p->n, k = (uint64_t)p->k;
	must(cublasLtMatmulDescCreate(&made->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "desc");
	set(made, CUBLASLT_MATMUL_DESC_TRANSA, &p->ta, sizeof p->ta);
	set(made, CUBLASLT_MATMUL_DESC_TRANSB, &p->tb, sizeof p->tb);
	if (p->epilogue)
		set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, &p->epilogue, sizeof p->epilogue);
	if (has_bias(p)) {
		const int32_t type = CUDA_R_16BF;
		set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &made->dbias, sizeof made->dbias);
		set(made, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type);
	}
	must(cublasLtMatrixLayoutCreate(&made->la, in, nota ? m : k, nota ? k : m, made->lda), "A");
	must(cublasLtMatrixLayoutCreate(&made->lb, in, notb ? k : n, notb ? n : k, made->ldb), "B");
	must(cublasLtMatrixLayoutCreate(&made->lc, out, m, n, made->ldd), "C");
	must(cublasLtMatrixLayoutCreate(&made->ld, out, m, n, made->ldd), "D");
}

void product_make(struct made *made, const struct product *p, uint64_t seed)
{
	bool nota = p->ta == CUBLAS_OP_N, notb = p->tb == CUBLAS_OP_N;
	size_t bytes = p->fp32_out ? 4 : 2;
	*made = (struct made){.p = *p};
	made->lda = (nota ? p->m : p->k) + p->pad_a;
	made->ldb = (notb ? p->k : p->n) + p->pad_b;
	made->ldd = p->m + p->pad_d;
	made->size_a = extent(nota ? p->k : p->m, made->lda);
	made->size_b = extent(notb ? p->n : p->k, made->ldb);
	made->size_d = extent(p->n, made->ldd);
	made->a = calloc(made->size_a + 1, sizeof(double));
	made->b = calloc(made->size_b + 1, sizeof(double));
	made->c = calloc(made->size_d + 1, sizeof(double));
	made->d = calloc(made->size_d + 1, sizeof(double));
	made->bias = calloc((size_t)p->m + 1, sizeof(double));
	made->da = allocate(made, 0, made->size_a, p->shift_a, 2);
	made->db = allocate(made, 1, made->size_b, p->shift_b, 2);
	made->dd = made->dc = allocate(made, 2, made->size_d, p->shift_d, bytes);
	if (p->apart)
		made->dc = allocate(made, 3, made->size_d, 0, bytes);
	if (has_bias(p))
		made->dbias = allocate(made, 4, (size_t)p->m, 0, 2);
	if (p->lt)
		describe(made);
	product_refill(made, seed);
}

void product_free(struct made *made)
{
	for (int i = 0; i < 5; i++)
		must(cudaFree(made->base[i]), "cudaFree");
	if (made->desc) {
		cublasLtMatmulDescDestroy(made->desc);
		cublasLtMatrixLayoutDestroy(made->la);
		cublasLtMatrixLayoutDestroy(made->lb);
		cublasLtMatrixLayoutDestroy(made->lc);
		cublasLtMatrixLayoutDestroy(made->ld);
	}
	free(made->a);
	free(made->b);
	free(made->c);
	free(made->d);
	free(made->bias);
}

/* ---- calling ----------------------------------------------------------------------------------
 */

cublasStatus_t product_call(struct made *made, const struct session *session)
{
	const struct product *p = &made->p;
	const float alpha = 1.0f + p->alpha_minus_1, beta = p->beta;
	cudaDataType in = p->type ? p->type : CUDA_R_16BF;
	if (p->lt)
		return cublasLtMatmul(session->lt, made->desc, &alpha, made->da, made->la, made->db,
		                      made->lb, &beta, made->dc, made->lc, made->dd, made->ld, NULL,
		                      NULL, 0, session->stream);
	return cublasGemmEx(session->blas, p->ta, p->tb, p->m, p->n, p->k, &alpha, made->da, in,
	                    made->lda, made->db, in, made->ldb, &beta, made->dd,
	                    p->fp32_out ? CUDA_R_32F : CUDA_R_16BF, made->ldd, CUBLAS_COMPUTE_32F,
	                    CUBLAS_GEMM_DEFAULT_TENSOR_OP);
}

/* ---- looking ----------------------------------------------------------------------------------
 */

/* Whether the padding of column j still has the bytes it was given. */
static bool padding_kept(const struct made *made, const unsigned char *raw, int j)
{
	size_t bytes = bytes_of(made, true);
	bool in_place = made->p.beta != 0.0f && !made->p.apart;
	for (size_t i = extent(j, made->ldd) + (size_t)made->p.m; i < extent(j + 1, made->ldd); i++)
		for (size_t byte = 0; !in_place && byte < bytes; byte++)
			if (raw[i * bytes + byte] != 0xff)
				return false;
	return true;
}

static double *unpack(const struct made *made, const unsigned char *raw)
{
	size_t bytes = bytes_of(made, true);
	for (size_t i = 0; i < made->size_d; i++) {
		float f;
		uint16_t half;
		memcpy(&f, raw + i * bytes, bytes);
		memcpy(&half, raw + i * bytes, 2);
		made->d[i] = bytes == 4 ? f : qs_oracle_bf16_to_float(half);
	}
	return made->d;
}

static unsigned char *download(const struct made *made)
{
	size_t bytes = bytes_of(made, true);
	unsigned char *raw = calloc(made->size_d + 1, bytes);
	must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
	must(cudaMemcpy(raw, made->dd, made->size_d * bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
	return raw;
}

void product_fetch(struct made *made)
{
	unsigned char *raw = download(made);
	made->padding_untouched = true;
	for (int j = 0; j < made->p.n; j++)
		made->padding_untouched &= padding_kept(made, raw, j);
	unpack(made, raw);
	free(raw);
}

uint64_t product_hash(const struct made *made)
{
	unsigned char *raw = download(made);
	uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
	for (size_t i = 0; i < made->size_d * bytes_of(made, true); i++)
		hash = (hash ^ raw[i]) * 0x100000001b3u;
	free(raw);
	return hash;
}

static double epilogue(int which, double x)
{
	if (which == CUBLASLT_EPILOGUE_RELU || which == CUBLASLT_EPILOGUE_RELU_BIAS)
		return x > 0.0 ? x : 0.0;
	if (which == CUBLASLT_EPILOGUE_GELU || which == CUBLASLT_EPILOGUE_GELU_BIAS)
		return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
	return x;
}

/* In eight sums, none of which waits for another: most of what tests take. */
static double dot(const double *a, const double *b, int length)
{
	double sums[8] = {0};
	int i = 0;
	for (; i + 8 <= length; i += 8)
		for (int j = 0; j < 8; j++)
			sums[j] += a[i + j] * b[i + j];
	for (; i < length; i++)
		sums[0] += a[i] * b[i];
	return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
	       ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* Column j of the reference, from op(A) row-major in `rows`. */
static void reference_column(const struct made *made, const double *rows, int j, double *out)
{
	const struct product *p = &made->p;
	double *column = malloc(((size_t)p->k + 1) * sizeof *column);
	for (int l = 0; l < p->k; l++)
		column[l] = made->b[at_b(made, l, j)];
	for (int i = 0; i < p->m; i++) {
		double sum = dot(rows + extent(i, p->k), column, p->k);
		sum *= 1.0f + p->alpha_minus_1;
		if (p->beta != 0.0f)
			sum += (double)p->beta * made->c[(size_t)i + extent(j, made->ldd)];
		out[i] = epilogue(p->epilogue, sum + (has_bias(p) ? made->bias[i] : 0.0));
	}
	free(column);
}

static double *rows_of_a(const struct made *made)
{
	double *rows = malloc((extent(made->p.m, made->p.k) + 1) * sizeof *rows);
	for (int i = 0; i < made->p.m; i++)
		for (int l = 0; l < made->p.k; l++)
			rows[extent(i, made->p.k) + (size_t)l] = made->a[at_a(made, i, l)];
	return rows;
}

/* Whether element (i, j) of D depends on what was planted. */
static bool spoilt(const struct made *made, int i, int j)
{
	switch (made->p.plant) {
	case PLANT_NAN:
	case PLANT_INF:
		return j == 1;
	case PLANT_NAN_A:
	case PLANT_INF_A:
		return i == 2;
	default:
		return false;
	}
}

double product_sqnr(const struct made *made)
{
	const struct product *p = &made->p;
	double signal = 0.0, noise = 0.0;
	double *rows = rows_of_a(made);
	double *column = malloc(((size_t)p->m + 1) * sizeof *column);
	for (int j = 0; j < p->n; j++) {
		reference_column(made, rows, j, column);
		for (int i = 0; i < p->m; i++) {
			double error = made->d[(size_t)i + extent(j, made->ldd)] - column[i];
			if (spoilt(made, i, j))
				continue;
			signal += column[i] * column[i];
			noise += error * error;
		}
	}
	free(column);
	free(rows);
	if (!isfinite(noise))
		return -INFINITY;
	return noise == 0.0 ? 999.0 : 10.0 * log10(signal / noise);
}

bool product_spoilt_exactly(const struct made *made)
{
	for (int j = 0; j < made->p.n; j++)
		for (int i = 0; i < made->p.m; i++)
			if (spoilt(made, i, j) ==
			    !!isfinite(made->d[(size_t)i + extent(j, made->ldd)]))
				return false;
	return true;
}

int product_scene(const struct product *p)
{
	struct session session;
	struct made made;
	session_open(&session);
	product_make(&made, p, 1);
	cublasStatus_t status = product_call(&made, &session);
	product_fetch(&made);
	printf("status %d\n", (int)status);
	printf("hash %llu\n", (unsigned long long)product_hash(&made) >> 12); /* exact in double */
	printf("sqnr %.3f\n", product_sqnr(&made));
	printf("padding %d\n", made.padding_untouched);
	printf("spoilt %d\n", product_spoilt_exactly(&made));
	product_free(&made);
	session_close(&session);
	return 0;
}
