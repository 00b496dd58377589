/* The key of a product: what its call leaves to be derived, its hash, its amount of work.
 *
 * Runs at every intercepted call, so it reads the call once and takes no lock. What no plan can
 * depend on is made equal (a C that is not read, a bias that is not there): fewer distinct keys.
 */
#include "gemm/gemm.h"

#include <library_types.h>
#include <math.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

_Static_assert(sizeof(struct qs_key) == 104, "qs_key has padding: memcmp would see it");

/* The class of a host scalar. Only fp32 is interpreted: products with another scale type are never
 * replaced. A NULL is left for cuBLAS to refuse. */
static uint8_t classify(const float *scalar, int32_t scale_type)
{
	float value;
	if (!scalar)
		return QS_SCALAR_DEVICE;
	if (scale_type != CUDA_R_32F)
		return QS_SCALAR_OTHER;
	memcpy(&value, scalar, sizeof value); /* the program's pointer may be unaligned */
	if (value == 0.0f)
		return QS_SCALAR_ZERO;
	if (value == 1.0f)
		return QS_SCALAR_ONE;
	return isfinite(value) ? QS_SCALAR_OTHER : QS_SCALAR_NONFINITE;
}

/* Bits of one element, so that leading dimensions of sub-byte types come out right. Types that
 * later toolkits add are taken for one byte: none of them is an operand that may be replaced. */
static uint64_t bits_of(uint8_t type)
{
	static const uint8_t bits[] = {
	        [CUDA_R_32F] = 32, [CUDA_C_32F] = 64,  [CUDA_R_64F] = 64,  [CUDA_C_64F] = 128,
	        [CUDA_R_16F] = 16, [CUDA_C_16F] = 32,  [CUDA_R_8I] = 8,    [CUDA_C_8I] = 16,
	        [CUDA_R_8U] = 8,   [CUDA_C_8U] = 16,   [CUDA_R_32I] = 32,  [CUDA_C_32I] = 64,
	        [CUDA_R_32U] = 32, [CUDA_C_32U] = 64,  [CUDA_R_16BF] = 16, [CUDA_C_16BF] = 32,
	        [CUDA_R_4I] = 4,   [CUDA_C_4I] = 8,    [CUDA_R_4U] = 4,    [CUDA_C_4U] = 8,
	        [CUDA_R_16I] = 16, [CUDA_C_16I] = 32,  [CUDA_R_16U] = 16,  [CUDA_C_16U] = 32,
	        [CUDA_R_64I] = 64, [CUDA_C_64I] = 128, [CUDA_R_64U] = 64,  [CUDA_C_64U] = 128,
	};
	return type < sizeof bits ? bits[type] : 8;
}

/* Unsigned on purpose: a nonsensical leading dimension wraps modulo 2^64, a multiple of 128. */
static bool is_aligned(const void *p, int64_t ld, uint8_t type)
{
	return (uintptr_t)p % 16 == 0 && (uint64_t)ld * bits_of(type) % 128 == 0;
}

/* Calls that pass arrays of pointers say nothing about the matrices' own addresses. */
static bool has_pointer_arrays(uint8_t entry)
{
	switch (entry) {
	case QS_ENTRY_GEMM_BATCHED_EX:
	case QS_ENTRY_GEMM_BATCHED_EX_64:
	case QS_ENTRY_GEMM_GROUPED_BATCHED_EX:
	case QS_ENTRY_GEMM_GROUPED_BATCHED_EX_64:
		return true;
	default:
		return false;
	}
}

static uint8_t alignment(const struct qs_gemm *g)
{
	const struct qs_key *key = &g->key;
	bool reads_c = key->beta != QS_SCALAR_ZERO;
	bool has_bias = key->bias_type != QS_TYPE_NONE;
	unsigned bits = QS_ALIGN_A | QS_ALIGN_B | QS_ALIGN_C | QS_ALIGN_D | QS_ALIGN_BIAS;
	if (has_pointer_arrays(key->entry))
		return (uint8_t)bits;
	if (!is_aligned(g->a, key->lda, key->atype))
		bits &= ~(unsigned)QS_ALIGN_A;
	if (!is_aligned(g->b, key->ldb, key->btype))
		bits &= ~(unsigned)QS_ALIGN_B;
	if (reads_c && !is_aligned(g->c, key->ldc, key->ctype))
		bits &= ~(unsigned)QS_ALIGN_C;
	if (!is_aligned(g->d, key->ldd, key->dtype))
		bits &= ~(unsigned)QS_ALIGN_D;
	if (has_bias && !is_aligned(g->bias, 0, key->bias_type))
		bits &= ~(unsigned)QS_ALIGN_BIAS;
	return (uint8_t)bits;
}

void qs_gemm_key(struct qs_gemm *g)
{
	struct qs_key *key = &g->key;
	if (key->alpha != QS_SCALAR_DEVICE)
		key->alpha = classify(g->alpha, key->scale_type);
	if (key->beta != QS_SCALAR_DEVICE)
		key->beta = classify(g->beta, key->scale_type);
	key->in_place = g->c == g->d || key->beta == QS_SCALAR_ZERO;
	key->align = alignment(g);
}

uint64_t qs_key_hash(const struct qs_key *key)
{
	return XXH3_64bits(key, sizeof *key);
}

const void *qs_gemm_end(const struct qs_gemm *g)
{
	size_t size = g->key.dtype == CUDA_R_32F ? 4 : 2;
	return (const char *)g->d + (size_t)((g->key.n - 1) * g->key.ldd + g->key.m) * size;
}

double qs_gemm_flops(const struct qs_key *key)
{
	return 2.0 * (double)key->m * (double)key->n * (double)key->k * (double)key->batch;
}
