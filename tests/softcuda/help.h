/* Shared by the tests of softcuda: number formats, written apart from the ones under test, a
 * product in fp64, and moving matrices. Everything asserts. */
#ifndef SOFTCUDA_HELP_H
#define SOFTCUDA_HELP_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "tests/softcuda/softcuda.h"
#include "tests/support/suite.h"

#define ck_cuda(call) ck_assert_int_eq((int)(call), 0)
#define UNUSED        __attribute__((unused))

/* Remembers memory until the process ends, which each test is: tests need not clean up, and a leak
 * checker still sees what softcuda itself loses. */
static UNUSED void *keep(void *memory)
{
	static struct kept {
		struct kept *next;
		void *memory;
	} * kept;
	struct kept *entry = malloc(sizeof *entry);
	*entry = (struct kept){kept, memory};
	kept = entry;
	return memory;
}

static UNUSED bool is_fp8(cudaDataType type)
{
	return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

static UNUSED size_t size_of(cudaDataType type)
{
	return type == CUDA_R_32F ? 4 : is_fp8(type) ? 1 : 2;
}

/* The value of a code of a format with that many exponent and mantissa bits; NaN where there is no
 * finite value. */
static UNUSED double decode(cudaDataType type, unsigned code)
{
	int exponent_bits = type == CUDA_R_16BF ? 8 : type == CUDA_R_8F_E4M3 ? 4 : 5;
	int width = is_fp8(type) ? 8 : 16, mantissa_bits = width - 1 - exponent_bits;
	int top = (1 << exponent_bits) - 1, bias = top / 2;
	int exponent = (int)(code >> mantissa_bits) & top;
	int mantissa = (int)code & ((1 << mantissa_bits) - 1);
	double sign = code >> (width - 1) ? -1 : 1;
	if (exponent == top && (type != CUDA_R_8F_E4M3 || mantissa == 7))
		return NAN;
	if (!exponent)
		return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
	return sign * ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

/* Stores a value that the format holds exactly. */
static UNUSED void put(cudaDataType type, void *at, size_t index, double value)
{
	if (type == CUDA_R_32F) {
		((float *)at)[index] = (float)value;
		return;
	}
	for (unsigned code = 0; code < (is_fp8(type) ? 256u : 65536u); code++) {
		if (decode(type, code) != value)
			continue;
		if (is_fp8(type))
			((uint8_t *)at)[index] = (uint8_t)code;
		else
			((uint16_t *)at)[index] = (uint16_t)code;
		return;
	}
	ck_abort_msg("%g is not a value of type %d", value, (int)type);
}

static UNUSED double get(cudaDataType type, const void *at, size_t index)
{
	if (type == CUDA_R_32F)
		return ((const float *)at)[index];
	return decode(type,
	              is_fp8(type) ? ((const uint8_t *)at)[index] : ((const uint16_t *)at)[index]);
}

static UNUSED void *device(size_t bytes)
{
	void *pointer = NULL;
	ck_cuda(cudaMalloc(&pointer, bytes));
	return pointer;
}

static UNUSED void *device_copy(const void *host, size_t bytes)
{
	void *pointer = device(bytes);
	ck_cuda(cudaMemcpy(pointer, host, bytes, cudaMemcpyHostToDevice));
	return pointer;
}

/* A matrix on both sides. */
struct matrix {
	cudaDataType type;
	int rows, columns, ld; /* column-major                     */
	double *value;         /* rows x columns, dense            */
	void *device;          /* ld x columns elements            */
};

/* Values -2, -1.5 .. 2, which every format holds; the same for the same seed. */
static UNUSED struct matrix make_matrix(cudaDataType type, int rows, int columns, int ld,
                                        unsigned seed)
{
	struct matrix m = {type, rows, columns, ld, NULL, NULL};
	size_t count = (size_t)ld * (size_t)columns;
	char *host = calloc(count ? count : 1, size_of(type));
	m.value = keep(calloc((size_t)rows * (size_t)columns + 1, sizeof *m.value));
	for (int j = 0; j < columns; j++)
		for (int i = 0; i < rows; i++) {
			seed = seed * 1103515245u + 12345u;
			double value = ((int)(seed >> 16) % 9 - 4) / 2.0;
			m.value[i + j * rows] = value;
			put(type, host, (size_t)(i + j * ld), value);
		}
	m.device = device_copy(host, count * size_of(type));
	free(host);
	return m;
}

static UNUSED double at(const struct matrix *m, int i, int j)
{
	return m->value[i + j * m->rows];
}

static UNUSED void *fetch(const void *from, size_t bytes)
{
	void *host = malloc(bytes);
	ck_cuda(cudaMemcpy(host, from, bytes, cudaMemcpyDeviceToHost));
	return host;
}

/* op(A) op(B) in fp64. */
static UNUSED double *reference(const struct matrix *a, bool ta, const struct matrix *b, bool tb)
{
	int m = ta ? a->columns : a->rows, k = ta ? a->rows : a->columns;
	int n = tb ? b->rows : b->columns;
	double *d = keep(calloc((size_t)m * (size_t)n + 1, sizeof *d));
	for (int j = 0; j < n; j++)
		for (int i = 0; i < m; i++)
			for (int p = 0; p < k; p++)
				d[i + j * m] += (ta ? at(a, p, i) : at(a, i, p)) *
				                (tb ? at(b, j, p) : at(b, p, j));
	return d;
}

/* Half a unit in the last place of the format, relative. */
static UNUSED double unit(cudaDataType type)
{
	return type == CUDA_R_16BF ? 0x1p-8 : type == CUDA_R_16F ? 0x1p-11 : 0x1p-22;
}

/* Compares the matrix on the device with dense fp64 values. */
static UNUSED void ck_matrix(const struct matrix *m, const double *wanted)
{
	char *got = fetch(m->device, (size_t)m->ld * (size_t)m->columns * size_of(m->type));
	for (int j = 0; j < m->columns; j++)
		for (int i = 0; i < m->rows; i++) {
			double w = wanted[i + j * m->rows];
			double g = get(m->type, got, (size_t)(i + j * m->ld));
			ck_assert_msg(fabs(g - w) <= unit(m->type) * fabs(w) + 1e-6,
			              "(%d,%d) is %g, not %g", i, j, g, w);
		}
	free(got);
}

#endif
