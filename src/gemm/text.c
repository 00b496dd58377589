/* A key as a person reads it: "TN m=14336 n=4096 k=4096 bf16", then only what is unusual.
 *
 * Every field has one usual value, possibly derived from fields already printed, and is printed if
 * it has another: so two keys with the same text differ in context, library, layer or weight at
 * most. A text that does not fit ends in "~" and part of the key's hash, which keeps that true.
 */
#include <cublasLt.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "gemm/gemm.h"

/* A bounded text; what does not fit is counted and not stored. */
struct text {
	char data[640]; /* more than the longest key needs */
	size_t used;    /* bytes, terminator excluded      */
};

__attribute__((format(printf, 2, 3))) static void put(struct text *text, const char *format, ...)
{
	va_list args;
	size_t room = sizeof text->data - text->used;
	va_start(args, format);
	int length = vsnprintf(text->data + text->used, room, format, args);
	va_end(args);
	if (length > 0)
		text->used += (size_t)length < room ? (size_t)length : room - 1;
}

/* A value with a name in a table, else its number. */
static void put_named(struct text *text, const char *label, const char *const *names, size_t count,
                      int32_t value)
{
	if (value >= 0 && (size_t)value < count && names[value])
		put(text, "%s%s", label, names[value]);
	else
		put(text, "%s%d", label, value);
}

static void put_type(struct text *text, const char *label, uint8_t type)
{
	static const char *const names[] = {
	        [CUDA_R_32F] = "fp32",     [CUDA_R_64F] = "fp64",     [CUDA_R_16F] = "fp16",
	        [CUDA_R_8I] = "int8",      [CUDA_C_32F] = "c32",      [CUDA_C_64F] = "c64",
	        [CUDA_C_16F] = "c16",      [CUDA_R_8U] = "uint8",     [CUDA_R_32I] = "int32",
	        [CUDA_R_16BF] = "bf16",    [CUDA_C_16BF] = "cbf16",   [CUDA_R_4I] = "int4",
	        [CUDA_R_8F_E4M3] = "e4m3", [CUDA_R_8F_E5M2] = "e5m2", [QS_TYPE_NONE] = "none",
	};
	if (!names[type])
		put(text, "%stype%d", label, type);
	else
		put(text, "%s%s", label, names[type]);
}

static void put_operations(struct text *text, const struct qs_key *key)
{
	static const char letters[] = "NTCG";
	if (key->ta < 4 && key->tb < 4)
		put(text, "%c%c", letters[key->ta], letters[key->tb]);
	else
		put(text, "op%d,%d", key->ta, key->tb);
}

static void put_types(struct text *text, const struct qs_key *key)
{
	put_type(text, " ", key->atype);
	if (key->btype != key->atype)
		put_type(text, "*", key->btype);
	if (key->dtype != key->atype)
		put_type(text, "->", key->dtype);
	if (key->ctype != key->dtype)
		put_type(text, " c=", key->ctype);
}

static void put_epilogue(struct text *text, const struct qs_key *key)
{
	static const struct {
		int32_t bit;
		const char *name;
	} bits[] = {
	        {4, "bias"},   {2, "relu"},      {32, "gelu"},     {8, "drelu"}, {64, "dgelu"},
	        {16, "bgrad"}, {256, "bgrad-a"}, {512, "bgrad-b"}, {128, "aux"},
	};
	int32_t rest = key->epilogue;
	for (size_t i = 0; i < sizeof bits / sizeof *bits; i++)
		rest &= ~bits[i].bit;
	bool known = key->epilogue == CUBLASLT_EPILOGUE_DEFAULT || (rest == 0 && key->epilogue);
	if (!known)
		put(text, " epilogue=%d", key->epilogue);
	for (size_t i = 0; known && i < sizeof bits / sizeof *bits; i++)
		if (key->epilogue & bits[i].bit)
			put(text, " %s", bits[i].name);
	uint8_t usual = key->epilogue & CUBLASLT_EPILOGUE_BIAS ? key->dtype : QS_TYPE_NONE;
	if (key->bias_type != usual)
		put_type(text, " bias-type=", key->bias_type);
}

static void put_scalar(struct text *text, const char *name, uint8_t scalar, uint8_t usual)
{
	static const char *const values[] = {
	        [QS_SCALAR_ZERO] = "=0",        [QS_SCALAR_ONE] = "=1",
	        [QS_SCALAR_OTHER] = "",         [QS_SCALAR_NONFINITE] = "=nan",
	        [QS_SCALAR_DEVICE] = "=device",
	};
	if (scalar == usual)
		return;
	if (scalar < sizeof values / sizeof *values)
		put(text, " %s%s", name, values[scalar]);
	else
		put(text, " %s=scalar%d", name, scalar);
}

/* Scalars that are not fp32 are never interpreted (qs_gemm_key), hence "other" is usual for them.
 */
static void put_scalars(struct text *text, const struct qs_key *key)
{
	bool fp32 = key->scale_type == CUDA_R_32F;
	put_scalar(text, "alpha", key->alpha, fp32 ? QS_SCALAR_ONE : QS_SCALAR_OTHER);
	put_scalar(text, "beta", key->beta, fp32 ? QS_SCALAR_ZERO : QS_SCALAR_OTHER);
	if (!key->in_place)
		put(text, " c!=d");
	else if (key->in_place > 1)
		put(text, " in-place=%d", key->in_place);
}

static void put_strides(struct text *text, const struct qs_key *key)
{
	int64_t rows_a = key->ta == CUBLAS_OP_N ? key->m : key->k;
	int64_t rows_b = key->tb == CUBLAS_OP_N ? key->k : key->n;
	if (key->lda != rows_a)
		put(text, " lda=%lld", (long long)key->lda);
	if (key->ldb != rows_b)
		put(text, " ldb=%lld", (long long)key->ldb);
	if (key->ldd != key->m)
		put(text, " ldd=%lld", (long long)key->ldd);
	if (key->ldc != key->ldd)
		put(text, " ldc=%lld", (long long)key->ldc);
	if (key->batch != 1)
		put(text, " batch=%lld", (long long)key->batch);
}

static void put_alignment(struct text *text, uint8_t align)
{
	unsigned missing = align ^ 0x1fu;
	if (missing)
		put(text, " unaligned:%s%s%s%s%s", missing & QS_ALIGN_A ? "A" : "",
		    missing & QS_ALIGN_B ? "B" : "", missing & QS_ALIGN_C ? "C" : "",
		    missing & QS_ALIGN_D ? "D" : "", missing & QS_ALIGN_BIAS ? "bias" : "");
	if (missing > 0x1f)
		put(text, "+%x", missing >> 5);
}

static void put_compute(struct text *text, const struct qs_key *key)
{
	static const char *const names[] = {
	        [CUBLAS_COMPUTE_16F] = "16f",
	        [CUBLAS_COMPUTE_16F_PEDANTIC] = "16f-pedantic",
	        [CUBLAS_COMPUTE_32F] = "32f",
	        [CUBLAS_COMPUTE_32F_PEDANTIC] = "32f-pedantic",
	        [CUBLAS_COMPUTE_32F_FAST_16F] = "fast-16f",
	        [CUBLAS_COMPUTE_32F_FAST_16BF] = "fast-16bf",
	        [CUBLAS_COMPUTE_32F_FAST_TF32] = "fast-tf32",
	        [CUBLAS_COMPUTE_64F] = "64f",
	        [CUBLAS_COMPUTE_64F_PEDANTIC] = "64f-pedantic",
	        [CUBLAS_COMPUTE_32I] = "32i",
	        [CUBLAS_COMPUTE_32I_PEDANTIC] = "32i-pedantic",
	};
	if (key->compute != CUBLAS_COMPUTE_32F)
		put_named(text, " compute=", names, sizeof names / sizeof *names, key->compute);
	if (key->scale_type < 0 || key->scale_type > QS_TYPE_NONE)
		put(text, " scale=%d", key->scale_type);
	else if (key->scale_type != CUDA_R_32F)
		put_type(text, " scale=", (uint8_t)key->scale_type);
}

static void put_odd(struct text *text, uint8_t odd)
{
	static const char *const names[] = {"order",      "misfit", "pedantic",
	                                    "no-reduced", "scaled", "opaque"};
	for (unsigned i = 0; i < 8; i++) {
		if (!(odd & 1u << i))
			continue;
		if (i < sizeof names / sizeof *names)
			put(text, " %s", names[i]);
		else
			put(text, " odd%u", i);
	}
}

/* An epilogue tells cublasLtMatmul by itself; without one, cublasGemmEx is the usual way. */
static void put_entry(struct text *text, const struct qs_key *key)
{
	static const char *const names[QS_ENTRY_COUNT] = {
	        [QS_ENTRY_GEMM_EX] = "ex",
	        [QS_ENTRY_GEMM_EX_64] = "ex-64",
	        [QS_ENTRY_GEMM_STRIDED_BATCHED_EX] = "strided",
	        [QS_ENTRY_GEMM_STRIDED_BATCHED_EX_64] = "strided-64",
	        [QS_ENTRY_LT_MATMUL] = "lt",
	        [QS_ENTRY_GEMM_BATCHED_EX] = "batched",
	        [QS_ENTRY_GEMM_BATCHED_EX_64] = "batched-64",
	        [QS_ENTRY_GEMM_GROUPED_BATCHED_EX] = "grouped",
	        [QS_ENTRY_GEMM_GROUPED_BATCHED_EX_64] = "grouped-64",
	        [QS_ENTRY_SGEMM_EX] = "sgemm-ex",
	        [QS_ENTRY_SGEMM_EX_64] = "sgemm-ex-64",
	};
	bool plain = key->epilogue == CUBLASLT_EPILOGUE_DEFAULT;
	if (key->entry != (plain ? QS_ENTRY_GEMM_EX : QS_ENTRY_LT_MATMUL))
		put_named(text, " ", names, QS_ENTRY_COUNT, key->entry);
	if (key->role != QS_ROLE_UNKNOWN && key->role < QS_ROLE_COUNT)
		put(text, " %s", qs_role_name(key->role));
	else if (key->role != QS_ROLE_UNKNOWN)
		put(text, " role%d", key->role);
}

/* Copies; if it does not fit, the end gives way to a hash of what the text stands for. */
static size_t fit(const struct text *text, const struct qs_key *key, char *out, size_t size)
{
	char tail[24] = "";
	struct qs_key told = *key;
	if (text->used < size) {
		memcpy(out, text->data, text->used + 1);
		return text->used;
	}
	told.context = 0;
	told.library = 0;
	told.layer = 0;
	told.weight = 0;
	size_t tail_length = (size_t)snprintf(tail, sizeof tail, "~%016llx",
	                                      (unsigned long long)qs_key_hash(&told));
	if (tail_length > size - 1)
		tail_length = size - 1;
	memcpy(out, text->data, size - 1 - tail_length);
	memcpy(out + size - 1 - tail_length, tail, tail_length);
	out[size - 1] = '\0';
	return size - 1;
}

/* A number, or the range that ends with it. */
static void put_size(struct text *text, char name, int64_t first, int64_t last)
{
	if (first < last)
		put(text, " %c=%lld..%lld", name, (long long)first, (long long)last);
	else
		put(text, " %c=%lld", name, (long long)last);
}

/* n and k begin with these. */
static size_t write(const struct qs_key *key, int64_t n, int64_t k, char *out, size_t size)
{
	struct text text = {.used = 0};
	if (!size)
		return 0;
	put_operations(&text, key);
	put_size(&text, 'm', key->m, key->m);
	put_size(&text, 'n', n, key->n);
	put_size(&text, 'k', k, key->k);
	put_types(&text, key);
	put_epilogue(&text, key);
	put_scalars(&text, key);
	put_strides(&text, key);
	put_alignment(&text, key->align);
	put_compute(&text, key);
	put_odd(&text, key->odd);
	put_entry(&text, key);
	return fit(&text, key, out, size);
}

size_t qs_key_text(const struct qs_key *key, char *out, size_t size)
{
	return write(key, key->n, key->k, out, size);
}

size_t qs_bucket_text(const struct qs_key *key, char *out, size_t size)
{
	const struct qs_key bucket = qs_bucket_key(key);
	const int64_t tokens = qs_linear_of(key).tokens;
	const int64_t first = qs_bucket_of(tokens).first;
	if (!tokens)
		return qs_key_text(key, out, size);
	if (key->role == QS_ROLE_WGRAD)
		return write(&bucket, key->n, first, out, size);
	return write(&bucket, first, key->k, out, size);
}

const char *qs_action_name(enum qs_action action)
{
	static const char *const names[QS_ACTION_COUNT] = {
	        [QS_ACTION_NATIVE] = "native", [QS_ACTION_BF16] = "bf16", [QS_ACTION_FP8] = "fp8",
	        [QS_ACTION_NF4] = "nf4",       [QS_ACTION_AUTO] = "auto",
	};
	return (unsigned)action < QS_ACTION_COUNT ? names[action] : "?";
}

const char *qs_role_name(enum qs_role role)
{
	static const char *const names[QS_ROLE_COUNT] = {
	        [QS_ROLE_UNKNOWN] = "unknown",
	        [QS_ROLE_FWD] = "fwd",
	        [QS_ROLE_DGRAD] = "dgrad",
	        [QS_ROLE_WGRAD] = "wgrad",
	};
	return (unsigned)role < QS_ROLE_COUNT ? names[role] : "?";
}

const char *qs_entry_name(enum qs_entry entry)
{
	static const char *const names[QS_ENTRY_COUNT] = {
	        [QS_ENTRY_GEMM_EX] = "cublasGemmEx",
	        [QS_ENTRY_GEMM_EX_64] = "cublasGemmEx_64",
	        [QS_ENTRY_GEMM_STRIDED_BATCHED_EX] = "cublasGemmStridedBatchedEx",
	        [QS_ENTRY_GEMM_STRIDED_BATCHED_EX_64] = "cublasGemmStridedBatchedEx_64",
	        [QS_ENTRY_LT_MATMUL] = "cublasLtMatmul",
	        [QS_ENTRY_GEMM_BATCHED_EX] = "cublasGemmBatchedEx",
	        [QS_ENTRY_GEMM_BATCHED_EX_64] = "cublasGemmBatchedEx_64",
	        [QS_ENTRY_GEMM_GROUPED_BATCHED_EX] = "cublasGemmGroupedBatchedEx",
	        [QS_ENTRY_GEMM_GROUPED_BATCHED_EX_64] = "cublasGemmGroupedBatchedEx_64",
	        [QS_ENTRY_SGEMM_EX] = "cublasSgemmEx",
	        [QS_ENTRY_SGEMM_EX_64] = "cublasSgemmEx_64",
	        [QS_ENTRY_DESTROY] = "cublasDestroy_v2",
	};
	return (unsigned)entry < QS_ENTRY_COUNT ? names[entry] : "?";
}
