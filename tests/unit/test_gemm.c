/* gemm/: keys, their texts and hashes, roles, reason codes. The calls are those of recorded PyTorch
 * and JAX programs, or their like. */
#define _GNU_SOURCE
#include <cublasLt.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gemm/gemm.h"
#include "tests/support/suite.h"

#define TEXT 640

static const float zero = 0.0f, one = 1.0f, half = 0.5f;

/* A call as PyTorch's nn.Linear makes it: bf16, aligned, tight, D = A' B. */
static struct qs_gemm call_of(cublasOperation_t ta, cublasOperation_t tb, int64_t m, int64_t n,
                              int64_t k)
{
	struct qs_gemm g = {
	        .a = (void *)0x10000,
	        .b = (void *)0x20000,
	        .c = (void *)0x30000,
	        .d = (void *)0x30000,
	        .alpha = &one,
	        .beta = &zero,
	        .key =
	                {
	                        .m = m,
	                        .n = n,
	                        .k = k,
	                        .lda = ta == CUBLAS_OP_N ? m : k,
	                        .ldb = tb == CUBLAS_OP_N ? k : n,
	                        .ldc = m,
	                        .ldd = m,
	                        .batch = 1,
	                        .compute = CUBLAS_COMPUTE_32F,
	                        .scale_type = CUDA_R_32F,
	                        .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
	                        .atype = CUDA_R_16BF,
	                        .btype = CUDA_R_16BF,
	                        .ctype = CUDA_R_16BF,
	                        .dtype = CUDA_R_16BF,
	                        .bias_type = QS_TYPE_NONE,
	                        .ta = (uint8_t)ta,
	                        .tb = (uint8_t)tb,
	                        .entry = QS_ENTRY_GEMM_EX,
	                },
	};
	return g;
}

static struct qs_gemm linear(void)
{
	return call_of(CUBLAS_OP_T, CUBLAS_OP_N, 14336, 4096, 4096);
}

/* The same with bias, by cublasLtMatmul. */
static struct qs_gemm linear_with_bias(void)
{
	struct qs_gemm g = linear();
	g.key.entry = QS_ENTRY_LT_MATMUL;
	g.key.epilogue = CUBLASLT_EPILOGUE_BIAS;
	g.key.bias_type = CUDA_R_16BF;
	g.bias = (void *)0x40000;
	return g;
}

static const char *text_of(struct qs_gemm g)
{
	static char text[TEXT];
	qs_gemm_key(&g);
	ck_assert_uint_eq(qs_key_text(&g.key, text, sizeof text), strlen(text));
	return text;
}

START_TEST(host_scalars_are_classified_by_value)
{
	static const struct {
		float value;
		enum qs_scalar expected;
	} cases[] = {
	        {0.0f, QS_SCALAR_ZERO},          {-0.0f, QS_SCALAR_ZERO},
	        {1.0f, QS_SCALAR_ONE},           {0.5f, QS_SCALAR_OTHER},
	        {-1.0f, QS_SCALAR_OTHER},        {0x1p-149f, QS_SCALAR_OTHER},
	        {INFINITY, QS_SCALAR_NONFINITE}, {-INFINITY, QS_SCALAR_NONFINITE},
	        {NAN, QS_SCALAR_NONFINITE},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct qs_gemm g = linear();
		g.alpha = &cases[i].value;
		g.beta = &cases[i].value;
		qs_gemm_key(&g);
		ck_assert_int_eq(g.key.alpha, cases[i].expected);
		ck_assert_int_eq(g.key.beta, cases[i].expected);
	}
}
END_TEST

START_TEST(device_scalars_are_not_read)
{
	struct qs_gemm g = linear();
	g.alpha = g.beta = (const float *)(uintptr_t)0x7; /* would fault */
	g.key.alpha = g.key.beta = QS_SCALAR_DEVICE;
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.alpha, QS_SCALAR_DEVICE);
	ck_assert_int_eq(g.key.beta, QS_SCALAR_DEVICE);
}
END_TEST

START_TEST(missing_scalars_count_as_unreadable)
{
	struct qs_gemm g = linear();
	g.alpha = g.beta = NULL;
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.alpha, QS_SCALAR_DEVICE);
	ck_assert_int_eq(g.key.beta, QS_SCALAR_DEVICE);
}
END_TEST

/* A half at the end of a page: reading it as a float would fault. */
START_TEST(scalars_of_other_types_are_not_read_as_fp32)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	char *memory =
	        mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ck_assert(memory != MAP_FAILED);
	ck_assert_int_eq(mprotect(memory + page, page, PROT_NONE), 0);
	struct qs_gemm g = linear();
	g.key.scale_type = CUDA_R_16F;
	g.alpha = g.beta = (const float *)(void *)(memory + page - 2);
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.alpha, QS_SCALAR_OTHER);
	ck_assert_int_eq(g.key.beta, QS_SCALAR_OTHER);
	munmap(memory, 2 * page);
}
END_TEST

START_TEST(alignment_needs_pointer_and_leading_dimension)
{
	struct qs_gemm g = linear();
	g.beta = &one;
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.align, 0x1f);
	g.a = (void *)0x10008;
	g.key.ldb += 4; /* 8 bytes */
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.align, 0x1f & ~(QS_ALIGN_A | QS_ALIGN_B));
	g.key.ldb += 4;
	g.d = (void *)0x30002;
	g.key.ldc += 1;
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.align, 0x1f & ~(QS_ALIGN_A | QS_ALIGN_C | QS_ALIGN_D));
}
END_TEST

START_TEST(alignment_counts_bytes_not_elements)
{
	struct qs_gemm g = linear();
	g.key.dtype = g.key.ctype = CUDA_R_32F;
	g.key.ldd = g.key.ldc = 14340; /* 16 bytes more as fp32, 8 as bf16 */
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.align, 0x1f);
	g.key.dtype = g.key.ctype = CUDA_R_16BF;
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.align, 0x1f & ~QS_ALIGN_D);
	g.key.atype = CUDA_R_4I;
	g.key.lda = 16; /* 8 bytes */
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.align, 0x1f & ~(QS_ALIGN_D | QS_ALIGN_A));
}
END_TEST

START_TEST(a_bias_is_looked_at_only_if_there_is_one)
{
	struct qs_gemm g = linear_with_bias();
	g.bias = (void *)0x40002;
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.align, 0x1f & ~QS_ALIGN_BIAS);
	g.key.bias_type = QS_TYPE_NONE;
	qs_gemm_key(&g);
	ck_assert_int_eq(g.key.align, 0x1f);
}
END_TEST

/* JAX passes C = NULL, PyTorch C = D: one product. */
START_TEST(a_c_that_is_not_read_does_not_tell_keys_apart)
{
	struct qs_gemm torch = linear(), jax = linear();
	jax.c = NULL;
	qs_gemm_key(&torch);
	qs_gemm_key(&jax);
	ck_assert_mem_eq(&torch.key, &jax.key, sizeof torch.key);
	torch.beta = jax.beta = &one;
	qs_gemm_key(&torch);
	qs_gemm_key(&jax);
	ck_assert_int_eq(torch.key.in_place, 1);
	ck_assert_int_eq(jax.key.in_place, 0);
}
END_TEST

START_TEST(arrays_of_pointers_do_not_tell_keys_apart)
{
	struct qs_gemm x = linear(), y = linear();
	x.key.entry = y.key.entry = QS_ENTRY_GEMM_BATCHED_EX;
	y.a = (void *)0x10008;
	qs_gemm_key(&x);
	qs_gemm_key(&y);
	ck_assert_mem_eq(&x.key, &y.key, sizeof x.key);
}
END_TEST

START_TEST(a_malformed_leading_dimension_is_harmless)
{
	static const int64_t lds[] = {INT64_MIN, INT64_MAX, -1, 0};
	for (size_t i = 0; i < sizeof lds / sizeof *lds; i++) {
		struct qs_gemm g = linear();
		g.key.lda = lds[i];
		qs_gemm_key(&g);
		ck_assert_int_eq((g.key.align & QS_ALIGN_A) != 0, lds[i] % 8 == 0);
	}
}
END_TEST

START_TEST(an_ordinary_product_has_the_short_text)
{
	ck_assert_str_eq(text_of(linear()), "TN m=14336 n=4096 k=4096 bf16");
}
END_TEST

START_TEST(a_bias_epilogue_adds_one_word)
{
	ck_assert_str_eq(text_of(linear_with_bias()), "TN m=14336 n=4096 k=4096 bf16 bias");
}
END_TEST

START_TEST(fp32_output_with_accumulation_is_named)
{
	struct qs_gemm g = call_of(CUBLAS_OP_N, CUBLAS_OP_T, 1024, 32000, 2048);
	g.key.ctype = g.key.dtype = CUDA_R_32F;
	g.beta = &one;
	g.key.role = QS_ROLE_WGRAD;
	ck_assert_str_eq(text_of(g), "NT m=1024 n=32000 k=2048 bf16->fp32 beta=1 wgrad");
	g.beta = &half;
	ck_assert_str_eq(text_of(g), "NT m=1024 n=32000 k=2048 bf16->fp32 beta wgrad");
}
END_TEST

START_TEST(everything_unusual_is_named)
{
	struct qs_gemm g = linear_with_bias();
	g.key.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
	g.key.btype = CUDA_R_16F;
	g.key.lda += 8;
	g.key.ldd += 1;
	g.key.batch = 8;
	g.key.compute = CUBLAS_COMPUTE_32F_FAST_16BF;
	g.key.odd = QS_ODD_REDUCED | QS_ODD_ATTR;
	g.a = (void *)0x10002;
	g.alpha = &half;
	ck_assert_str_eq(text_of(g), "TN m=14336 n=4096 k=4096 bf16*fp16 bias gelu aux alpha "
	                             "lda=4104 ldd=14337 ldc=14336 batch=8 unaligned:AD "
	                             "compute=fast-16bf no-reduced scaled");
}
END_TEST

START_TEST(the_other_entry_points_are_named)
{
	struct qs_gemm g = linear();
	g.key.entry = QS_ENTRY_LT_MATMUL;
	ck_assert_str_eq(text_of(g), "TN m=14336 n=4096 k=4096 bf16 lt");
	g.key.entry = QS_ENTRY_GEMM_STRIDED_BATCHED_EX;
	g.key.batch = 8;
	ck_assert_str_eq(text_of(g), "TN m=14336 n=4096 k=4096 bf16 batch=8 strided");
}
END_TEST

/* One field at a time, several values each. */
struct variation {
	size_t offset, size; /* of the field, bytes */
	int64_t values[6];   /* 6 of them           */
};

#define VARY(field, ...)                                                                           \
	{                                                                                          \
		offsetof(struct qs_key, field), sizeof(((struct qs_key *)0)->field),               \
		{                                                                                  \
			__VA_ARGS__                                                                \
		}                                                                                  \
	}

static const struct variation variations[] = {
        VARY(m, 0, 1, 8, 4104, -1, INT64_MAX),
        VARY(n, 0, 1, 8, 4104, -1, INT64_MAX),
        VARY(k, 0, 1, 8, 4104, -1, INT64_MAX),
        VARY(lda, 0, 1, 8, 4104, -1, INT64_MAX),
        VARY(ldb, 0, 1, 8, 4104, -1, INT64_MAX),
        VARY(ldc, 0, 1, 8, 4104, -1, INT64_MAX),
        VARY(ldd, 0, 1, 8, 4104, -1, INT64_MAX),
        VARY(batch, 0, 2, 8, 4104, -1, INT64_MAX),
        VARY(compute, 64, 74, 75, 78, -1, 0),
        VARY(scale_type, 1, 2, 14, 255, 256, -1),
        VARY(epilogue, 0, 2, 4, 32, 136, 1028),
        VARY(atype, 0, 2, 28, 29, 33, 255),
        VARY(btype, 0, 2, 28, 29, 33, 255),
        VARY(ctype, 0, 2, 28, 29, 33, 255),
        VARY(dtype, 0, 2, 28, 29, 33, 255),
        VARY(bias_type, 0, 2, 14, 28, 29, 33),
        VARY(ta, 0, 2, 3, 4, 5, 255),
        VARY(tb, 1, 2, 3, 4, 5, 255),
        VARY(alpha, 0, 2, 3, 4, 5, 255),
        VARY(beta, 1, 2, 3, 4, 5, 255),
        VARY(in_place, 0, 2, 3, 4, 5, 255),
        VARY(align, 0, 1, 0x1e, 0x0f, 0x17, 0xff),
        VARY(odd, 1, 2, 16, 32, 64, 255),
        VARY(entry, 1, 2, 4, 5, 11, 255),
        VARY(role, 1, 2, 3, 4, 5, 255),
};

#define VARIATIONS (sizeof variations / sizeof *variations)

static struct qs_key varied(struct qs_key key, size_t which, size_t value)
{
	const struct variation *v = &variations[which];
	memcpy((char *)&key + v->offset, &v->values[value], v->size); /* little-endian */
	return key;
}

/* The base, every single variation, and every pair of variations of two fields. */
static size_t make_keys(struct qs_key *keys)
{
	struct qs_gemm g = linear();
	size_t count = 0;
	qs_gemm_key(&g);
	keys[count++] = g.key;
	for (size_t i = 0; i < VARIATIONS * 6; i++) {
		struct qs_key first = varied(g.key, i / 6, i % 6);
		keys[count++] = first;
		for (size_t j = (i / 6 + 1) * 6; j < VARIATIONS * 6; j++)
			keys[count++] = varied(first, j / 6, j % 6);
	}
	return count;
}

#define KEYS_MAX (1 + VARIATIONS * 6 + VARIATIONS * VARIATIONS * 18)

static int compare_text(const void *x, const void *y)
{
	return strcmp(x, y);
}

static void assert_texts_differ(size_t room)
{
	struct qs_key *keys = malloc(KEYS_MAX * sizeof *keys);
	size_t count = make_keys(keys);
	char(*texts)[TEXT] = malloc(count * sizeof *texts);
	ck_assert_uint_gt(count, 10000);
	for (size_t i = 0; i < count; i++)
		ck_assert_uint_lt(qs_key_text(&keys[i], texts[i], room), room);
	qsort(texts, count, sizeof *texts, compare_text);
	for (size_t i = 1; i < count; i++)
		ck_assert_str_ne(texts[i - 1], texts[i]);
	free(texts);
	free(keys);
}

START_TEST(distinct_keys_have_distinct_texts)
{
	assert_texts_differ(TEXT);
}
END_TEST

START_TEST(distinct_keys_have_distinct_texts_even_when_cut)
{
	assert_texts_differ(40);
}
END_TEST

START_TEST(context_library_layer_and_weight_are_not_in_the_text)
{
	char x[48], y[48];
	struct qs_gemm g = linear_with_bias();
	g.alpha = &half;
	g.key.batch = 12345678;
	qs_gemm_key(&g);
	size_t length = qs_key_text(&g.key, x, sizeof x);
	ck_assert_uint_eq(length, sizeof x - 1);
	ck_assert_ptr_nonnull(strchr(x, '~'));
	g.key.context = 99;
	g.key.library = 3;
	g.key.layer = 7;
	g.key.weight = 9;
	qs_key_text(&g.key, y, sizeof y);
	ck_assert_str_eq(x, y);
}
END_TEST

START_TEST(a_text_ends_within_its_buffer)
{
	struct qs_gemm g = linear();
	qs_gemm_key(&g);
	for (size_t size = 0; size < 40; size++) {
		char text[48];
		memset(text, '#', sizeof text);
		size_t length = qs_key_text(&g.key, text, size);
		ck_assert_int_eq(text[size], '#');
		if (size) {
			ck_assert_uint_lt(length, size);
			ck_assert_uint_eq(strnlen(text, size), length);
		}
	}
}
END_TEST

START_TEST(every_field_reaches_the_hash)
{
	struct qs_gemm g = linear();
	qs_gemm_key(&g);
	uint64_t hash = qs_key_hash(&g.key);
	struct qs_key same = g.key;
	ck_assert_uint_eq(qs_key_hash(&same), hash);
	for (size_t i = 0; i < sizeof g.key; i++) {
		struct qs_key other = g.key;
		((unsigned char *)&other)[i] ^= 1;
		ck_assert_uint_ne(qs_key_hash(&other), hash);
	}
}
END_TEST

START_TEST(work_counts_every_product_of_a_batch)
{
	struct qs_gemm g = linear();
	g.key.batch = 3;
	ck_assert_double_eq(qs_gemm_flops(&g.key), 3 * 2.0 * 14336 * 4096 * 4096);
	g.key.m = g.key.n = g.key.k = INT32_MAX; /* beyond 64-bit integers */
	ck_assert_double_gt(qs_gemm_flops(&g.key), 5e28);
}
END_TEST

/* A recorded call and what is to be seen in it. */
struct recorded {
	const char *program;     /* and place in it               */
	char ta, tb;             /* N or T                        */
	int64_t m, n, k;         /* elements                      */
	int32_t epilogue;        /* cublasLtEpilogue_t            */
	bool autograd;           /* made by a backward thread     */
	enum qs_role role;       /* expected                      */
	struct qs_linear linear; /* expected: tokens, in, out     */
};

static const struct recorded recorded[] = {
        {"llama q_proj forward",
         'T',
         'N',
         1024,
         2048,
         1024,
         1,
         false,
         QS_ROLE_FWD,
         {2048, 1024, 1024}},
        {"llama down_proj forward",
         'T',
         'N',
         1024,
         2048,
         2816,
         1,
         false,
         QS_ROLE_FWD,
         {2048, 2816, 1024}},
        {"llama lm_head dW",
         'N',
         'T',
         1024,
         32000,
         2048,
         1,
         true,
         QS_ROLE_WGRAD,
         {2048, 1024, 32000}},
        {"llama lm_head dX",
         'N',
         'N',
         1024,
         2048,
         32000,
         1,
         true,
         QS_ROLE_DGRAD,
         {2048, 1024, 32000}},
        {"llama down_proj dW",
         'N',
         'T',
         2816,
         1024,
         2048,
         1,
         true,
         QS_ROLE_WGRAD,
         {2048, 2816, 1024}},
        {"llama down_proj dX",
         'N',
         'N',
         2816,
         2048,
         1024,
         1,
         true,
         QS_ROLE_DGRAD,
         {2048, 2816, 1024}},
        {"generate lm_head, one token",
         'T',
         'N',
         32000,
         1,
         1024,
         1,
         false,
         QS_ROLE_FWD,
         {1, 1024, 32000}},
        {"linear with bias forward",
         'T',
         'N',
         1024,
         64,
         512,
         4,
         false,
         QS_ROLE_FWD,
         {64, 512, 1024}},
        {"addmm (Conv1D) forward", 'N', 'N', 256, 256, 512, 4, false, QS_ROLE_FWD, {256, 512, 256}},
        {"linear with bias, recomputed",
         'T',
         'N',
         1024,
         64,
         512,
         4,
         true,
         QS_ROLE_FWD,
         {64, 512, 1024}},
        {"fused relu, recomputed", 'T', 'N', 1024, 64, 512, 6, true, QS_ROLE_FWD, {64, 512, 1024}},
        {"fused gelu with aux", 'N', 'N', 1024, 64, 512, 164, false, QS_ROLE_FWD, {64, 512, 1024}},
        {"linear recomputed or Conv1D dX",
         'T',
         'N',
         1024,
         64,
         512,
         1,
         true,
         QS_ROLE_UNKNOWN,
         {0, 0, 0}},
        {"jax x@w", 'N', 'N', 4096, 512, 2048, 1, false, QS_ROLE_UNKNOWN, {0, 0, 0}},
        {"jax gradient", 'N', 'T', 4096, 2048, 512, 1, false, QS_ROLE_UNKNOWN, {0, 0, 0}},
        {"matmul of two transposes", 'T', 'T', 512, 512, 256, 1, false, QS_ROLE_UNKNOWN, {0, 0, 0}},
        {"TT backward", 'T', 'T', 512, 512, 256, 1, true, QS_ROLE_UNKNOWN, {0, 0, 0}},
        {"drelu outside autograd", 'T', 'N', 512, 512, 256, 136, false, QS_ROLE_UNKNOWN, {0, 0, 0}},
        {"dgelu on autograd", 'N', 'N', 512, 64, 256, 192, true, QS_ROLE_DGRAD, {64, 512, 256}},
        {"bgradb on autograd", 'N', 'T', 512, 256, 64, 512, true, QS_ROLE_WGRAD, {64, 512, 256}},
        {"bias and bgrada outside autograd",
         'T',
         'N',
         512,
         256,
         64,
         260,
         false,
         QS_ROLE_UNKNOWN,
         {0, 0, 0}},
        {"bgrada outside autograd", 'T', 'N', 512, 256, 64, 256, false, QS_ROLE_UNKNOWN, {0, 0, 0}},
};

static struct qs_key key_of(const struct recorded *call)
{
	struct qs_gemm g = call_of(call->ta == 'T', call->tb == 'T', call->m, call->n, call->k);
	g.key.epilogue = call->epilogue;
	return g.key;
}

START_TEST(roles_of_recorded_calls_are_recognised)
{
	const struct recorded *call = &recorded[_i];
	struct qs_key key = key_of(call);
	enum qs_role role = qs_role_of(&key, call->autograd);
	ck_assert_msg(role == call->role, "%s: %s", call->program, qs_role_name(role));
	key.role = (uint8_t)role;
	struct qs_linear linear = qs_linear_of(&key);
	ck_assert_msg(linear.tokens == call->linear.tokens && linear.in == call->linear.in &&
	                      linear.out == call->linear.out,
	              "%s: tokens %lld in %lld out %lld", call->program, (long long)linear.tokens,
	              (long long)linear.in, (long long)linear.out);
}
END_TEST

START_TEST(a_batch_has_no_role)
{
	for (int autograd = 0; autograd < 2; autograd++) {
		for (unsigned transposed = 0; transposed < 4; transposed++) {
			struct qs_gemm g = call_of(transposed & 1, transposed >> 1, 128, 128, 64);
			g.key.batch = 8;
			ck_assert_int_eq(qs_role_of(&g.key, autograd), QS_ROLE_UNKNOWN);
		}
	}
}
END_TEST

START_TEST(a_call_that_was_not_understood_has_no_role)
{
	static const uint8_t odd[] = {QS_ODD_ORDER, QS_ODD_SHAPE, QS_ODD_OPAQUE};
	for (size_t i = 0; i < sizeof odd; i++) {
		struct qs_gemm g = linear_with_bias();
		g.key.odd = QS_ODD_REDUCED;
		ck_assert_int_eq(qs_role_of(&g.key, false), QS_ROLE_FWD);
		g.key.odd = odd[i];
		ck_assert_int_eq(qs_role_of(&g.key, false), QS_ROLE_UNKNOWN);
	}
	struct qs_gemm g = linear();
	g.key.ta = CUBLAS_OP_C;
	ck_assert_int_eq(qs_role_of(&g.key, false), QS_ROLE_UNKNOWN);
}
END_TEST

/* Asks twice, renaming the thread in between. */
static void *ask(void *name)
{
	pthread_setname_np(pthread_self(), name);
	bool first = qs_thread_is_autograd();
	pthread_setname_np(pthread_self(), first ? "main" : "pt_autograd_7");
	ck_assert_int_eq(qs_thread_is_autograd(), first);
	return first ? (void *)1 : NULL;
}

static bool is_autograd(const char *name)
{
	pthread_t thread;
	void *answer;
	ck_assert_int_eq(pthread_create(&thread, NULL, ask, (void *)(uintptr_t)name), 0);
	pthread_join(thread, &answer);
	return answer != NULL;
}

START_TEST(backward_threads_are_known_by_name_and_asked_once)
{
	ck_assert(is_autograd("pt_autograd_0"));
	ck_assert(is_autograd("pt_autograd_12"));
	ck_assert(!is_autograd("pt_autograd"));
	ck_assert(!is_autograd("python3"));
	ck_assert(!is_autograd("my_pt_autograd_"));
}
END_TEST

START_TEST(every_reason_has_code_text_and_cure)
{
	for (int i = 0; i < QS_REASON_COUNT; i++) {
		enum qs_reason reason = (enum qs_reason)i;
		ck_assert_uint_gt(strlen(qs_reason_code(reason)), 1);
		ck_assert_uint_gt(strlen(qs_reason_text(reason)), 10);
		ck_assert_uint_gt(strlen(qs_reason_cure(reason)), 5);
		ck_assert_msg(
		        strspn(qs_reason_code(reason), "abcdefghijklmnopqrstuvwxyz0123456789-") ==
		                strlen(qs_reason_code(reason)),
		        "%s", qs_reason_code(reason));
	}
}
END_TEST

START_TEST(reason_codes_are_unique)
{
	for (int i = 0; i < QS_REASON_COUNT; i++)
		for (int j = 0; j < i; j++)
			ck_assert_str_ne(qs_reason_code((enum qs_reason)i),
			                 qs_reason_code((enum qs_reason)j));
}
END_TEST

START_TEST(reason_codes_keep_their_spelling)
{
	ck_assert_str_eq(qs_reason_code(QS_REASON_AUTO), "auto");
	ck_assert_str_eq(qs_reason_code(QS_REASON_POINTER_MODE), "pointer-mode");
	ck_assert_str_eq(qs_reason_code(QS_REASON_CAPTURE_COLD), "capture-cold");
	ck_assert_str_eq(qs_reason_code(QS_REASON_CUBLASLT_OLD), "cublaslt-old");
	ck_assert_str_eq(qs_reason_code(QS_REASON_FORK), "fork");
}
END_TEST

START_TEST(numbers_out_of_range_have_names_all_the_same)
{
	ck_assert_str_eq(qs_reason_code((enum qs_reason)255), "error");
	ck_assert_str_eq(qs_reason_code((enum qs_reason) - 1), "error");
	ck_assert_str_eq(qs_action_name((enum qs_action)255), "?");
	ck_assert_str_eq(qs_role_name((enum qs_role)255), "?");
	ck_assert_str_eq(qs_entry_name((enum qs_entry)255), "?");
}
END_TEST

START_TEST(every_enumerator_has_a_name)
{
	for (int i = 0; i < QS_ENTRY_COUNT; i++)
		ck_assert_int_eq(strncmp(qs_entry_name((enum qs_entry)i), "cublas", 6), 0);
	for (int i = 0; i < QS_ACTION_COUNT; i++)
		ck_assert_str_ne(qs_action_name((enum qs_action)i), "?");
	for (int i = 0; i < QS_ROLE_COUNT; i++)
		ck_assert_str_ne(qs_role_name((enum qs_role)i), "?");
	ck_assert_str_eq(qs_entry_name(QS_ENTRY_LT_MATMUL), "cublasLtMatmul");
}
END_TEST

static void add_key_tests(Suite *suite)
{
	TCase *tests = tcase_create("key");
	tcase_add_test(tests, host_scalars_are_classified_by_value);
	tcase_add_test(tests, device_scalars_are_not_read);
	tcase_add_test(tests, missing_scalars_count_as_unreadable);
	tcase_add_test(tests, scalars_of_other_types_are_not_read_as_fp32);
	tcase_add_test(tests, alignment_needs_pointer_and_leading_dimension);
	tcase_add_test(tests, alignment_counts_bytes_not_elements);
	tcase_add_test(tests, a_bias_is_looked_at_only_if_there_is_one);
	tcase_add_test(tests, a_c_that_is_not_read_does_not_tell_keys_apart);
	tcase_add_test(tests, arrays_of_pointers_do_not_tell_keys_apart);
	tcase_add_test(tests, a_malformed_leading_dimension_is_harmless);
	tcase_add_test(tests, every_field_reaches_the_hash);
	tcase_add_test(tests, work_counts_every_product_of_a_batch);
	suite_add_tcase(suite, tests);
}

static void add_text_tests(Suite *suite)
{
	TCase *tests = tcase_create("text");
	tcase_set_timeout(tests, 60);
	tcase_add_test(tests, an_ordinary_product_has_the_short_text);
	tcase_add_test(tests, a_bias_epilogue_adds_one_word);
	tcase_add_test(tests, fp32_output_with_accumulation_is_named);
	tcase_add_test(tests, everything_unusual_is_named);
	tcase_add_test(tests, the_other_entry_points_are_named);
	tcase_add_test(tests, distinct_keys_have_distinct_texts);
	tcase_add_test(tests, distinct_keys_have_distinct_texts_even_when_cut);
	tcase_add_test(tests, context_library_layer_and_weight_are_not_in_the_text);
	tcase_add_test(tests, a_text_ends_within_its_buffer);
	suite_add_tcase(suite, tests);
}

static void add_role_tests(Suite *suite)
{
	TCase *tests = tcase_create("role");
	tcase_add_loop_test(tests, roles_of_recorded_calls_are_recognised, 0,
	                    (int)(sizeof recorded / sizeof *recorded));
	tcase_add_test(tests, a_batch_has_no_role);
	tcase_add_test(tests, a_call_that_was_not_understood_has_no_role);
	tcase_add_test(tests, backward_threads_are_known_by_name_and_asked_once);
	suite_add_tcase(suite, tests);
}

static void add_name_tests(Suite *suite)
{
	TCase *tests = tcase_create("names");
	tcase_add_test(tests, every_reason_has_code_text_and_cure);
	tcase_add_test(tests, reason_codes_are_unique);
	tcase_add_test(tests, reason_codes_keep_their_spelling);
	tcase_add_test(tests, numbers_out_of_range_have_names_all_the_same);
	tcase_add_test(tests, every_enumerator_has_a_name);
	suite_add_tcase(suite, tests);
}

int main(void)
{
	Suite *suite = suite_create("gemm");
	add_key_tests(suite);
	add_text_tests(suite);
	add_role_tests(suite);
	add_name_tests(suite);
	return qs_suite_main(suite);
}
