/* The matrix product behind cuBLAS and cuBLASLt: read, multiply with fp32 accumulation, apply the
 * epilogue, write. Each element of D sums its products in the order of k, whatever the shape, so
 * the same product gives the same bits from every entry point and in every layout.
 *
 * Operands are first converted to fp32 in the order in which the inner loop reads them: rows of
 * op(A) in panels of 8, columns of op(B) in panels of 4, padded with zeros. The inner loop keeps an
 * 8 x 4 tile of sums in registers, which the compiler vectorises without being allowed to reorder
 * sums. */
#include "tests/softcuda/inside.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <library_types.h>

#define ROWS    8
#define COLUMNS 4

/* Four floats that are added and multiplied together. */
typedef float vector __attribute__((vector_size(16)));

size_t sc_type_size(uint32_t type)
{
	switch (type) {
	case CUDA_R_8F_E4M3:
	case CUDA_R_8F_E5M2:
		return 1;
	case CUDA_R_16BF:
	case CUDA_R_16F:
		return 2;
	case CUDA_R_32F:
		return 4;
	default:
		return 0;
	}
}

static float bits_to_float(uint32_t bits)
{
	float value;
	memcpy(&value, &bits, sizeof value);
	return value;
}

static uint16_t to_bf16(float value)
{
	uint32_t bits;
	memcpy(&bits, &value, sizeof bits);
	if (value != value)
		return (uint16_t)(bits >> 16 | 0x40);
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Sign, exponent and mantissa of the two fp8 formats; e4m3 has no infinities. */
static float from_fp8(uint8_t bits, bool e5m2)
{
	int mantissa_bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
	int mantissa = bits & ((1 << mantissa_bits) - 1);
	int exponent = (bits & 0x7f) >> mantissa_bits;
	float sign = bits & 0x80 ? -1.0f : 1.0f;
	if (e5m2 && exponent == 31)
		return mantissa ? NAN : sign * INFINITY;
	if (!e5m2 && (bits & 0x7f) == 0x7f)
		return NAN;
	if (!exponent)
		return sign * ldexpf((float)mantissa, 1 - bias - mantissa_bits);
	return sign *
	       ldexpf((float)(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
}

static float fp8_values[2][256];

static void fill_fp8_values(void)
{
	for (int i = 0; i < 256; i++) {
		fp8_values[0][i] = from_fp8((uint8_t)i, false);
		fp8_values[1][i] = from_fp8((uint8_t)i, true);
	}
}

static float load(uint32_t type, const void *at)
{
	uint16_t bf16;
	_Float16 fp16;
	float value;
	switch (type) {
	case CUDA_R_8F_E4M3:
	case CUDA_R_8F_E5M2:
		return fp8_values[type == CUDA_R_8F_E5M2][*(const uint8_t *)at];
	case CUDA_R_16BF:
		memcpy(&bf16, at, sizeof bf16);
		return bits_to_float((uint32_t)bf16 << 16);
	case CUDA_R_16F:
		memcpy(&fp16, at, sizeof fp16);
		return (float)fp16;
	default:
		memcpy(&value, at, sizeof value);
		return value;
	}
}

static void store(uint32_t type, void *at, float value)
{
	if (type == CUDA_R_16BF) {
		uint16_t bf16 = to_bf16(value);
		memcpy(at, &bf16, sizeof bf16);
	} else if (type == CUDA_R_16F) {
		_Float16 fp16 = (_Float16)value;
		memcpy(at, &fp16, sizeof fp16);
	} else {
		memcpy(at, &value, sizeof value);
	}
}

/* One matrix of one product of a batch. */
struct view {
	unsigned char *base; /* element (0, 0)             */
	int64_t row, column; /* distances in bytes         */
	uint32_t type;       /* cudaDataType_t             */
};

static unsigned char *element(const struct view *view, int64_t i, int64_t j)
{
	return view->base + i * view->row + j * view->column;
}

/* False if any of it lies outside the device's memory. */
static bool make_view(const struct sc_matrix *m, int64_t rows, int64_t columns, int64_t index,
                      struct view *view)
{
	int64_t size = (int64_t)sc_type_size(m->type);
	uint64_t pointer = m->pointer + (uint64_t)(index * m->stride * size);
	if (m->pointer_array) {
		uint64_t slot = m->pointer + (uint64_t)index * sizeof pointer;
		if (!softcuda_covers(slot, sizeof pointer))
			return false;
		memcpy(&pointer, (const void *)(uintptr_t)slot, sizeof pointer);
	}
	*view = (struct view){(unsigned char *)(uintptr_t)pointer, m->row * size, m->column * size,
	                      m->type};
	int64_t bytes = (rows - 1) * view->row + (columns - 1) * view->column + size;
	return softcuda_covers(pointer, (size_t)bytes);
}

/* Converts `lines` lines of `length` elements into panels of `width` lines, element-major. */
static void pack(const struct view *view, int64_t lines, int64_t length, int64_t width, bool by_row,
                 float *out)
{
	for (int64_t first = 0; first < lines; first += width) {
		int64_t here = lines - first < width ? lines - first : width;
		for (int64_t p = 0; p < length; p++, out += width)
			for (int64_t i = 0; i < width; i++)
				out[i] = i >= here ? 0.0f
				         : by_row  ? load(view->type, element(view, first + i, p))
				                   : load(view->type, element(view, p, first + i));
	}
}

static void multiply_tile(const float *a, const float *b, int64_t k, float sums[COLUMNS][ROWS])
{
	vector low[COLUMNS] = {0}, high[COLUMNS] = {0};
	for (int64_t p = 0; p < k; p++, a += ROWS, b += COLUMNS) {
		vector a_low, a_high;
		memcpy(&a_low, a, sizeof a_low);
		memcpy(&a_high, a + 4, sizeof a_high);
		for (int j = 0; j < COLUMNS; j++) {
			low[j] += a_low * b[j];
			high[j] += a_high * b[j];
		}
	}
	for (int j = 0; j < COLUMNS; j++) {
		memcpy(sums[j], &low[j], sizeof low[j]);
		memcpy(sums[j] + 4, &high[j], sizeof high[j]);
	}
}

/* tanh form, and its derivative (cublasLtEpilogue_t: GELU, DGELU). */
static float gelu(float x)
{
	return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

static float gelu_slope(float x)
{
	float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
	float inner = 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
	return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
}

/* A product of a batch with everything looked up. */
struct job {
	const struct sc_product *p;
	struct view a, b, c, d, bias, aux;
	float alpha, beta;              /* C's scale included in beta        */
	float scale_d;                  /* 1 if there is none                */
	const float *outer_a, *outer_b; /* scales by row and column, or NULL */
};

static float activate(const struct job *job, float value, int64_t i, int64_t j)
{
	switch (job->p->activation) {
	case SC_RELU:
		return value > 0 || value != value ? value : 0.0f;
	case SC_GELU:
		return gelu(value);
	case SC_GELU_AUX:
		store(job->aux.type, element(&job->aux, i, j), value);
		return gelu(value);
	case SC_DGELU:
		return value * gelu_slope(load(job->aux.type, element(&job->aux, i, j)));
	default:
		return value;
	}
}

static void finish(const struct job *job, float sum, int64_t i, int64_t j)
{
	float value = sum * job->alpha;
	if (job->outer_a)
		value *= job->outer_a[i] * job->outer_b[j];
	if (job->beta != 0)
		value += job->beta * load(job->c.type, element(&job->c, i, j));
	if (job->bias.base)
		value += load(job->bias.type, element(&job->bias, i, 0));
	value = activate(job, value, i, j) * job->scale_d;
	store(job->d.type, element(&job->d, i, j), value);
}

static void multiply(const struct job *job, int64_t k, const float *a, const float *b)
{
	int64_t m = job->p->m, n = job->p->n;
	for (int64_t j = 0; j < n; j += COLUMNS)
		for (int64_t i = 0; i < m; i += ROWS) {
			float sums[COLUMNS][ROWS];
			multiply_tile(a + i * k, b + j * k, k, sums);
			for (int64_t y = 0; y < COLUMNS && j + y < n; y++)
				for (int64_t x = 0; x < ROWS && i + x < m; x++)
					finish(job, sums[y][x], i + x, j + y);
		}
}

static bool read_float(uint64_t at, float *value)
{
	if (!at)
		return true;
	if (!softcuda_covers(at, sizeof *value))
		return false;
	memcpy(value, (const void *)(uintptr_t)at, sizeof *value);
	return true;
}

/* alpha, beta and the scales, from the device where they are there. */
static bool read_scalars(struct job *job)
{
	const struct sc_product *p = job->p;
	float a = 1, b = 1, c = 1;
	job->alpha = p->alpha;
	job->beta = p->beta;
	job->scale_d = 1;
	if (!read_float(p->alpha_at, &job->alpha) || !read_float(p->beta_at, &job->beta) ||
	    !read_float(p->scale[2], &c) || !read_float(p->scale[3], &job->scale_d))
		return false;
	if (p->outer) {
		job->outer_a = (const float *)(uintptr_t)p->scale[0];
		job->outer_b = (const float *)(uintptr_t)p->scale[1];
		return softcuda_covers(p->scale[0], (size_t)p->m * sizeof a) &&
		       softcuda_covers(p->scale[1], (size_t)p->n * sizeof b);
	}
	if (!read_float(p->scale[0], &a) || !read_float(p->scale[1], &b))
		return false;
	job->alpha *= a * b;
	job->beta *= c;
	return true;
}

static bool look_up(struct job *job, int64_t index, int64_t k)
{
	const struct sc_product *p = job->p;
	if (k && (!make_view(&p->a, p->m, k, index, &job->a) ||
	          !make_view(&p->b, k, p->n, index, &job->b)))
		return false;
	if (job->beta != 0 && !make_view(&p->c, p->m, p->n, index, &job->c))
		return false;
	if (p->bias.pointer && !make_view(&p->bias, p->m, 1, index, &job->bias))
		return false;
	if (p->aux.pointer && !make_view(&p->aux, p->m, p->n, index, &job->aux))
		return false;
	return make_view(&p->d, p->m, p->n, index, &job->d);
}

static int64_t round_up(int64_t n, int64_t to)
{
	return (n + to - 1) / to * to;
}

/* With alpha = 0, A and B are not read (BLAS). */
static bool run_one(struct job *job, int64_t index)
{
	const struct sc_product *p = job->p;
	int64_t k = job->alpha == 0 ? 0 : p->k;
	if (!look_up(job, index, k))
		return false;
	float *a = calloc((size_t)(round_up(p->m, ROWS) * k + 1), sizeof *a);
	float *b = calloc((size_t)(round_up(p->n, COLUMNS) * k + 1), sizeof *b);
	if (!a || !b)
		abort();
	pack(&job->a, p->m, k, ROWS, true, a);
	pack(&job->b, p->n, k, COLUMNS, false, b);
	multiply(job, k, a, b);
	free(a);
	free(b);
	return true;
}

static bool is_wide(uint32_t type)
{
	return type == CUDA_R_16BF || type == CUDA_R_16F || type == CUDA_R_32F;
}

static void spend(const struct sc_product *p)
{
	const bool wide = is_wide(p->a.type);
	long us = wide ? softcuda_knobs.product_us : softcuda_knobs.fp8_us;
	if (p->algorithm == SC_SECOND)
		us = wide && softcuda_knobs.wide_second_us ? softcuda_knobs.wide_second_us
		                                           : softcuda_knobs.second_us;
	softcuda_spend(sc_nth(&softcuda_knobs.slow_product) ? 10 * us : us);
}

/* In place of a product: knob fp8_error. A column of D has no gaps. */
static bool leave_error(struct job *job)
{
	const struct sc_product *p = job->p;
	const long error = is_wide(p->a.type) ? 0 : softcuda_knobs.fp8_error;
	const float value = 100 + (float)error / (p->outer ? 4 : 1);
	if (p->d.row != 1 || !make_view(&p->d, p->m, p->n, 0, &job->d))
		return false;
	for (int64_t i = 0; i < p->m; i++)
		store(job->d.type, element(&job->d, i, 0), value);
	for (int64_t j = 1; j < p->n; j++)
		memcpy(element(&job->d, 0, j), element(&job->d, 0, 0), (size_t)(p->m * job->d.row));
	return true;
}

static void run(void *const *params, unsigned grid, unsigned block)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	const struct sc_product *p = params[0];
	struct job job = {.p = p};
	(void)grid, (void)block;
	pthread_once(&once, fill_fp8_values);
	spend(p);
	if (softcuda_knobs.idle_products)
		return;
	if (softcuda_knobs.fp8_error) {
		if (!leave_error(&job))
			softcuda_fault();
		return;
	}
	bool good = !p->workspace_bytes || softcuda_covers(p->workspace, p->workspace_bytes);
	if (good && p->workspace_bytes)
		memset((void *)(uintptr_t)p->workspace, 0xDB, p->workspace_bytes);
	good = good && read_scalars(&job);
	for (int64_t i = 0; i < p->batch && good; i++)
		good = run_one(&job, i);
	if (!good)
		softcuda_fault();
}

static const struct qs_oracle_kernel kernel = {
        "softcuda_product", run, {sizeof(struct sc_product)}};

static void count(const struct sc_product *product)
{
	const uint32_t type = product->a.type;
	softcuda_count(&softcuda_counters.products);
	if (product->algorithm == SC_FIRST)
		softcuda_count(&softcuda_counters.products_first);
	if (product->algorithm == SC_SECOND)
		softcuda_count(&softcuda_counters.products_second);
	if (type == CUDA_R_16BF)
		softcuda_count(&softcuda_counters.products_bf16);
	else if (type == CUDA_R_16F)
		softcuda_count(&softcuda_counters.products_fp16);
	else if (type == CUDA_R_32F)
		softcuda_count(&softcuda_counters.products_fp32);
	else
		softcuda_count(&softcuda_counters.products_fp8);
}

/* The launch goes through the dynamic linker, like those of the real libraries: whoever watches
 * launches sees it. The handle's context counts, not the thread's. */
CUresult sc_product_launch(const struct sc_product *product, CUcontext context, CUstream stream)
{
	static CUfunction _Atomic function;
	struct sc_product copy = *product;
	void *params[] = {&copy};
	CUlaunchConfig config = {.gridDimX = 1,
	                         .gridDimY = 1,
	                         .gridDimZ = 1,
	                         .blockDimX = 128,
	                         .blockDimY = 1,
	                         .blockDimZ = 1,
	                         .hStream = stream};
	if (!function)
		function = softcuda_register(&kernel);
	if (sc_nth(&softcuda_knobs.fail_product))
		return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
	CUresult error = cuCtxPushCurrent(context);
	if (error)
		return error;
	error = cuLaunchKernelEx(&config, function, params, NULL);
	cuCtxPopCurrent(NULL);
	if (!error)
		count(product);
	return error;
}
