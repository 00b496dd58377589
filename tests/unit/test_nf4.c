/* The references of kernels/nf4.cu against definitions and numbers worked out by hand, the plan of
 * the products, and the conversions to and from the states of bitsandbytes and torchao.
 *
 * What the kernels do on a GPU is gpu/test_nf4.c.
 */
#include <math.h>
#include <signal.h>
#include <string.h>

#include "kernels/hash.h"
#include "kernels/map.h"
#include "kernels/nf4.h"
#include "tests/oracle/oracle.h"
#include "tests/support/suite.h"

static float float_of(uint32_t bits)
{
	float value;
	memcpy(&value, &bits, sizeof value);
	return value;
}

static uint16_t bf16(float value)
{
	return qs_oracle_float_to_bf16(value);
}

static void run(const char *kernel, void *args, unsigned grid, unsigned block)
{
	const struct qs_oracle_kernel *entry = qs_oracle_nf4_kernels;
	void *params[] = {args};
	while (entry->name && strcmp(entry->name, kernel) != 0)
		entry++;
	ck_assert_msg(entry->name != NULL, "no reference of %s", kernel);
	entry->run(params, grid, block);
}

static uint64_t random_state = 1;

static uint32_t random_bits(void)
{
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(random_state >> 32);
}

/* Of magnitude 2^-8 to 2. */
static uint16_t random_number(void)
{
	const uint32_t bits = random_bits();
	return (uint16_t)((bits & 0x807f) | (119 + (bits >> 16) % 8) << 7);
}

/* ---- a weight ------------------------------------------------------------------------------- */

struct weight {
	int64_t n, k;
	uint16_t *source;
	uint8_t *packed;
	float *scale;
	_Alignas(16) struct qs_weight word;
	struct qs_pack_args args;
};

static void make(struct weight *weight, bool fp8, int64_t n, int64_t k)
{
	const int64_t bytes = fp8 ? qs_fp8_bytes(n, k) : qs_nf4_bytes(n, k);
	*weight = (struct weight){.n = n, .k = k};
	weight->source = malloc((size_t)(n * k) * 2);
	weight->packed = aligned_alloc(128, (size_t)bytes);
	weight->scale = malloc((size_t)n * 4);
	ck_assert(weight->source && weight->packed && weight->scale);
	for (int64_t i = 0; i < n * k; i++)
		weight->source[i] = random_number();
	weight->args = (struct qs_pack_args){.source = (uint64_t)(uintptr_t)weight->source,
	                                     .packed = (uint64_t)(uintptr_t)weight->packed,
	                                     .scale = (uint64_t)(uintptr_t)weight->scale,
	                                     .weight = (uint64_t)(uintptr_t)&weight->word,
	                                     .ld = k,
	                                     .n = n,
	                                     .k = k};
}

static void pack(struct weight *weight, bool fp8)
{
	weight->word = (struct qs_weight){0};
	run(fp8 ? QS_KERNEL_FP8_PACK : QS_KERNEL_NF4_PACK, &weight->args, 1, QS_PACK_THREADS);
}

static void drop(struct weight *weight)
{
	free(weight->source);
	free(weight->packed);
	free(weight->scale);
}

/* ---- codes ---------------------------------------------------------------------------------- */

START_TEST(every_value_of_the_codebook_has_its_own_code)
{
	for (int code = 0; code < 16; code++)
		ck_assert_int_eq(qs_oracle_nf4_code(float_of(qs_nf4_codebook[code])), code);
}
END_TEST

START_TEST(midpoints_lie_between_their_neighbours_and_go_to_the_lower)
{
	for (int code = 0; code < 15; code++) {
		const float low = float_of(qs_nf4_codebook[code]);
		const float high = float_of(qs_nf4_codebook[code + 1]);
		const float midpoint = float_of(qs_nf4_midpoints[code]);
		ck_assert(midpoint == (low + high) / 2);
		ck_assert_int_eq(qs_oracle_nf4_code(midpoint), code);
		ck_assert_int_eq(qs_oracle_nf4_code(nextafterf(midpoint, 2)), code + 1);
	}
}
END_TEST

/* What a GPU's approximate reciprocal may be off by changes no code of any bf16 number. Numbers and
 * absmax matter by their significands and the difference of exponents only; smaller ones than tried
 * have code 7. */
START_TEST(an_inexact_reciprocal_gives_the_same_code)
{
	for (int absmax = 128; absmax < 256; absmax++)
		for (int exponent = 0; exponent < 8; exponent++)
			for (int x = -255; x < 256; x++) {
				const float value = ldexpf((float)x, -exponent);
				float low = 1 / (float)absmax, high = low;
				for (int ulp = 0; ulp < 2; ulp++) {
					low = nextafterf(low, 0);
					high = nextafterf(high, 1);
				}
				if (qs_oracle_nf4_code(value * low) !=
				    qs_oracle_nf4_code(value * high))
					ck_abort_msg("%d * 2^-%d / %d", x, exponent, absmax);
			}
}
END_TEST

/* The constant undoes the scaling: each value is restored within half a unit of bf16. */
START_TEST(scaled_values_are_the_codebook_times_a_constant)
{
	for (int code = 0; code < 16; code++) {
		const float value = float_of(qs_nf4_codebook[code]);
		ck_assert_uint_eq(qs_nf4_scaled[code], bf16(value / QS_NF4_UNSCALE));
		ck_assert_float_le(
		        fabsf(qs_oracle_bf16_to_float(qs_nf4_scaled[code]) * QS_NF4_UNSCALE -
		              value),
		        fabsf(value) * 0x1p-9f);
	}
}
END_TEST

/* ---- blocks --------------------------------------------------------------------------------- */

static uint16_t code_block(const uint16_t *block, uint8_t *codes)
{
	bool finite;
	const uint16_t absmax = qs_oracle_nf4_block(block, codes, &finite);
	ck_assert(finite);
	return absmax;
}

START_TEST(a_block_is_divided_by_its_absmax)
{
	uint16_t block[64] = {0};
	uint8_t codes[64];
	block[0] = bf16(-4);
	block[1] = bf16(4);
	block[2] = bf16(1);
	block[3] = bf16(-0.5f);
	ck_assert_uint_eq(code_block(block, codes), bf16(4));
	ck_assert_int_eq(codes[0], 0);
	ck_assert_int_eq(codes[1], 15);
	ck_assert_int_eq(codes[2], 10);
	ck_assert_int_eq(codes[3], 6);
	for (int i = 4; i < 64; i++)
		ck_assert_int_eq(codes[i], 7);
}
END_TEST

/* bitsandbytes codes such blocks as 0, that is -absmax once absmax is quantised itself. */
START_TEST(blocks_of_zeros_and_subnormals_are_zeros)
{
	static const uint16_t numbers[] = {0, 0x8000, 0x0001, 0x807f};
	for (int i = 0; i < 4; i++) {
		uint16_t block[64];
		uint8_t codes[64];
		for (int j = 0; j < 64; j++)
			block[j] = numbers[i];
		ck_assert_uint_eq(code_block(block, codes), 0);
		for (int j = 0; j < 64; j++)
			ck_assert_int_eq(codes[j], 7);
	}
}
END_TEST

START_TEST(the_least_normal_absmax_and_the_largest_reciprocal_count)
{
	uint16_t block[64] = {QS_AMAX_LEAST, 0x8000 | QS_AMAX_LEAST};
	uint8_t codes[64];
	ck_assert_uint_eq(code_block(block, codes), QS_AMAX_LEAST);
	ck_assert_int_eq(codes[0], 15);
	ck_assert_int_eq(codes[1], 0);
	/* 1 / absmax below the least normal number is flushed to zero, as in bitsandbytes */
	block[0] = 0x7e81;
	ck_assert_uint_eq(code_block(block, codes), 0x7e81);
	ck_assert_int_eq(codes[0], 7);
}
END_TEST

START_TEST(blocks_with_nan_or_infinity_are_reported_and_zeros)
{
	static const uint16_t numbers[] = {0x7f80, 0xff80, 0x7fc0, 0xffff, 0x7f81};
	for (int i = 0; i < 5; i++) {
		uint16_t block[64] = {bf16(1), numbers[i]};
		uint8_t codes[64];
		bool finite = true;
		ck_assert_uint_eq(qs_oracle_nf4_block(block, codes, &finite), 0);
		ck_assert(!finite);
		ck_assert_int_eq(codes[0], 7);
	}
}
END_TEST

/* ---- tiles ---------------------------------------------------------------------------------- */

/* w = [-1, 1, 0, 0, ...] is 0F 77 77 ... in bitsandbytes. */
START_TEST(flat_codes_are_those_of_bitsandbytes)
{
	struct weight weight;
	uint8_t codes[64];
	float absmax[2];
	make(&weight, false, 2, 64);
	memset(weight.source, 0, 2 * 64 * 2);
	weight.source[0] = bf16(-1);
	weight.source[1] = bf16(1);
	weight.source[64] = bf16(2);
	weight.source[127] = bf16(-2);
	pack(&weight, false);
	qs_oracle_nf4_to_flat(weight.packed, 2, 64, codes, absmax);
	ck_assert_int_eq(codes[0], 0x0f);
	for (int i = 1; i < 32; i++)
		ck_assert_int_eq(codes[i], 0x77);
	ck_assert_int_eq(codes[32], 0xf7);
	ck_assert_int_eq(codes[63], 0x70);
	ck_assert_float_eq(absmax[0], 1);
	ck_assert_float_eq(absmax[1], 2);
	drop(&weight);
}
END_TEST

/* Places worked out from the header: row 16 w + 8 high + g, column 16 step + 8 half + 2 t + odd. */
START_TEST(elements_lie_where_the_header_says)
{
	struct weight weight;
	make(&weight, false, 128, 128);
	memset(weight.source, 0, 128 * 128 * 2);
	/* tile (1, 1), w 2, high 1, g 5, step 3, half 1, t 2, odd 1 */
	weight.source[(64 + 45) * 128 + 64 + 61] = bf16(3);
	pack(&weight, false);
	const uint8_t *tile = weight.packed + 3 * QS_NF4_TILE_BYTES;
	ck_assert_int_eq(tile[(64 + 20 + 2) * 16 + 3 * 4 + 2 + 1], 0x7f);
	const uint16_t *absmax = (const uint16_t *)(const void *)(tile + QS_NF4_CODE_BYTES);
	ck_assert_uint_eq(absmax[2 * 16 + 5 * 2 + 1], bf16(3));
	ck_assert_uint_eq(absmax[0], 0);
	drop(&weight);
	make(&weight, true, 128, 128);
	memset(weight.source, 0, 128 * 128 * 2);
	weight.source[(64 + 45) * 128 + 64 + 61] = bf16(3);
	pack(&weight, true);
	tile = weight.packed + 3 * QS_FP8_TILE_BYTES;
	/* 3 is scaled by 64 to 192: exponent 7 + 7, mantissa 4 */
	ck_assert_int_eq(tile[(64 + 20 + 2) * 16 + 2048 + 8 + 4 + 2 + 1], 14 << 3 | 4);
	ck_assert_float_eq(weight.scale[64 + 45], 1.0f / 64);
	ck_assert_float_eq(weight.scale[0], 1);
	drop(&weight);
}
END_TEST

START_TEST(flat_and_packed_forms_are_the_same_weight)
{
	struct weight weight;
	make(&weight, false, 70, 192);
	pack(&weight, false);
	const size_t bytes = (size_t)qs_nf4_bytes(70, 192);
	uint8_t *codes = malloc(70 * 192 / 2), *again = malloc(bytes);
	float *absmax = malloc(70 * 3 * sizeof *absmax);
	ck_assert(codes && again && absmax);
	memset(again, 0xa5, bytes);
	qs_oracle_nf4_to_flat(weight.packed, 70, 192, codes, absmax);
	ck_assert_int_eq(qs_oracle_nf4_from_flat(codes, absmax, 70, 192, again), 0);
	ck_assert_mem_eq(again, weight.packed, bytes);
	absmax[7] = 1.001f; /* no bf16 number */
	ck_assert_int_eq(qs_oracle_nf4_from_flat(codes, absmax, 70, 192, again), 1);
	free(codes);
	free(again);
	free(absmax);
	drop(&weight);
}
END_TEST

START_TEST(rows_that_do_not_exist_are_zeros)
{
	struct weight weight;
	make(&weight, false, 1, 64);
	pack(&weight, false);
	/* rows 8 to 15 of the first quarter: the odd bytes of all lanes */
	for (int i = 1; i < 512; i += 2)
		ck_assert_int_eq(weight.packed[i], 0x77);
	ck_assert_uint_eq(weight.word.nonfinite, 0);
	drop(&weight);
}
END_TEST

START_TEST(packing_tells_amax_and_nonfinite)
{
	for (int fp8 = 0; fp8 < 2; fp8++) {
		struct weight weight;
		make(&weight, fp8, 66, 128);
		weight.source[65 * 128 + 100] = bf16(-5);
		pack(&weight, fp8);
		ck_assert_uint_eq(weight.word.amax, (uint32_t)bf16(5) << 16);
		ck_assert_uint_eq(weight.word.nonfinite, 0);
		ck_assert_uint_eq(weight.word.packed, weight.args.packed);
		weight.source[3] = 0xff80;
		pack(&weight, fp8);
		ck_assert_uint_eq(weight.word.amax, (uint32_t)bf16(5) << 16);
		ck_assert_uint_eq(weight.word.nonfinite, 1);
		drop(&weight);
	}
}
END_TEST

START_TEST(packing_does_nothing_where_it_is_told_to)
{
	uint32_t when = 0;
	for (int fp8 = 0; fp8 < 2; fp8++) {
		struct weight weight;
		make(&weight, fp8, 1, 64);
		weight.args.when = (uint64_t)(uintptr_t)&when;
		memset(weight.packed, 0xa5, 64);
		when = 0;
		pack(&weight, fp8);
		ck_assert_int_eq(weight.packed[0], 0xa5);
		ck_assert_uint_eq(weight.word.packed, 0);
		when = 1;
		pack(&weight, fp8);
		ck_assert_uint_eq(weight.word.packed, weight.args.packed);
		drop(&weight);
	}
}
END_TEST

/* ---- states of other libraries --------------------------------------------------------------- */

START_TEST(nested_absmax_is_rounded_twice)
{
	const float map[256] = {[3] = 0.1f, [255] = 1};
	const float absmax2[2] = {0.3f, 2};
	uint8_t codes[300] = {[1] = 3, [256] = 255};
	float absmax[300];
	qs_oracle_nf4_nested_absmax(codes, map, absmax2, 0.0517f, 300, absmax);
	const volatile float product = 0.1f * 0.3f;
	ck_assert(absmax[1] == product + 0.0517f);
	ck_assert(absmax[0] == 0.0517f);
	ck_assert(absmax[256] == 2.0517f);
	/* with one rounding it would be another number, or this test shows nothing */
	ck_assert(fmaf(0.1f, 0.3f, 0.0517f) != absmax[1]);
}
END_TEST

START_TEST(torchaos_absmax_is_rounded_to_bf16_twice)
{
	const int8_t scalers[3] = {100, -128, 7};
	const uint16_t factor[2] = {bf16(300), bf16(0.5f)};
	float absmax[3];
	qs_oracle_nf4_torchao_absmax(scalers, factor, bf16(2), 3, 2, absmax);
	/* 1/3 is 0.33398 in bf16, and 2.33398 there 2.328125 */
	ck_assert_float_eq(absmax[0], 2.328125f);
	/* -128/300 is -0.42578, 1.57422 is 1.578125 */
	ck_assert_float_eq(absmax[1], 1.578125f);
	ck_assert_float_eq(absmax[2], 16);
}
END_TEST

/* ---- expansion ------------------------------------------------------------------------------ */

START_TEST(weights_are_restored_as_bitsandbytes_does)
{
	struct weight weight;
	uint16_t *restored = aligned_alloc(16, 64 * 2);
	uint8_t *straight = aligned_alloc(16, 64), *turned = aligned_alloc(16, 64 * 16);
	float scale;
	make(&weight, false, 1, 64);
	memset(weight.source, 0, 64 * 2);
	weight.source[0] = bf16(3);
	weight.source[1] = bf16(-1.2f);
	pack(&weight, false);
	struct qs_expand_args args = {.weight = (uint64_t)(uintptr_t)&weight.word,
	                              .straight = (uint64_t)(uintptr_t)straight,
	                              .turned = (uint64_t)(uintptr_t)turned,
	                              .scale = (uint64_t)(uintptr_t)&scale,
	                              .bf16 = (uint64_t)(uintptr_t)restored,
	                              .n = 1,
	                              .k = 64};
	run(QS_KERNEL_NF4_EXPAND, &args, 1, QS_PACK_THREADS);
	ck_assert_uint_eq(restored[0], bf16(3));
	ck_assert_uint_eq(restored[1], bf16(float_of(qs_nf4_codebook[3]) * 3));
	ck_assert_uint_eq(restored[2], 0);
	/* amax 3: inverse 64, 192 = 1.5 * 2^7 */
	ck_assert_float_eq(scale, 1.0f / 64);
	ck_assert_int_eq(straight[0], 14 << 3 | 4);
	ck_assert_int_eq(straight[1],
	                 qs_oracle_float_to_e4m3(float_of(qs_nf4_codebook[3]) * 3 * 64));
	ck_assert_int_eq(turned[0], straight[0]);
	ck_assert_int_eq(turned[16], straight[1]);
	for (int i = 1; i < 16; i++)
		ck_assert_int_eq(turned[i], 0);
	weight.word.nonfinite = 1;
	run(QS_KERNEL_NF4_EXPAND, &args, 1, QS_PACK_THREADS);
	ck_assert(isnan(scale));
	free(restored);
	free(straight);
	free(turned);
	drop(&weight);
}
END_TEST

/* ---- products ------------------------------------------------------------------------------- */

static const struct qs_product_device elsewhere = {.sms = 108};
static const struct qs_product_device h200 = {.sms = 132, .hopper = 1, .clusters = {132, 66, 32}};

struct product {
	struct qs_product_args args;
	struct qs_product_geometry geometry;
	uint16_t x[2 * 128], bias[70];
	float d[2 * 70];
};

static void describe(struct product *p, struct weight *weight, bool fp8,
                     const struct qs_product_device *device)
{
	*p = (struct product){0};
	for (int i = 0; i < 2 * 128; i++)
		p->x[i] = random_number();
	p->args = (struct qs_product_args){.weight = (uint64_t)(uintptr_t)&weight->word,
	                                   .source = (uint64_t)(uintptr_t)weight->source,
	                                   .x = (uint64_t)(uintptr_t)p->x,
	                                   .d = (uint64_t)(uintptr_t)p->d,
	                                   .ld = weight->k,
	                                   .ldx = 128,
	                                   .ldd = 70,
	                                   .n = weight->n,
	                                   .k = weight->k,
	                                   .alpha = 1,
	                                   .tokens = 2,
	                                   .flags = QS_PRODUCT_FP32};
	p->geometry = qs_product_plan(&p->args, fp8, device);
}

static void multiply(struct product *p, bool fp8)
{
	run(fp8 ? "qs_w8a16_8" : "qs_w4a16_8", &p->args, p->geometry.blocks, p->geometry.threads);
}

/* The sum over k with the source, or with what the copy stands for within its error. */
static void expect_product(const struct product *p, const struct weight *weight, double relative)
{
	for (int64_t token = 0; token < 2; token++)
		for (int64_t row = 0; row < weight->n; row++) {
			double sum = 0, size = 0;
			for (int64_t i = 0; i < weight->k; i++) {
				const double product =
				        (double)qs_oracle_bf16_to_float(
				                weight->source[row * weight->k + i]) *
				        (double)qs_oracle_bf16_to_float(p->x[token * 128 + i]);
				sum += product;
				size += product * product;
			}
			ck_assert_double_le(fabs((double)p->d[token * 70 + row] - sum),
			                    relative * sqrt(size) + 1e-6 * fabs(sum));
		}
}

START_TEST(a_product_is_that_of_the_copy_if_it_is_valid_and_of_the_source_otherwise)
{
	for (int fp8 = 0; fp8 < 2; fp8++) {
		struct weight weight;
		struct product p;
		make(&weight, fp8, 70, 128);
		pack(&weight, fp8);
		describe(&p, &weight, fp8, &h200);
		multiply(&p, fp8);
		expect_product(&p, &weight, 0);
		ck_assert_uint_eq(weight.word.turn, 0);
		weight.word.valid = 1;
		multiply(&p, fp8);
		expect_product(&p, &weight, fp8 ? 0.2 : 1);
		ck_assert_uint_eq(weight.word.valid, 1);
		weight.word.nonfinite = 1;
		multiply(&p, fp8);
		expect_product(&p, &weight, 0);
		drop(&weight);
	}
}
END_TEST

START_TEST(a_changed_element_is_found_when_its_row_has_its_turn)
{
	for (int fp8 = 0; fp8 < 2; fp8++) {
		struct weight weight;
		struct product p;
		struct qs_hash_outcome outcome = {.escapes = 6};
		int calls = 0;
		make(&weight, fp8, 70, 128);
		pack(&weight, fp8);
		weight.word.valid = 1;
		weight.word.outcome = (uintptr_t)&outcome;
		weight.source[13 * 128 + 77] ^= 0x8000;
		describe(&p, &weight, fp8, &h200);
		while (weight.word.valid && calls++ < 65)
			multiply(&p, fp8);
		ck_assert_int_eq(calls, 14);
		ck_assert_uint_eq(weight.word.failed, 1);
		ck_assert_uint_eq(outcome.escapes, 7);
		multiply(&p, fp8);
		expect_product(&p, &weight, 0);
		weight.word.valid = 1; /* as if a check had not seen it */
		weight.word.turn = 13;
		multiply(&p, fp8);
		ck_assert_uint_eq(weight.word.valid, 0);
		ck_assert_uint_eq(outcome.escapes, 7); /* told already */
		weight.word.valid = 1;
		weight.word.failed = 0;
		weight.word.turn = 13;
		weight.word.outcome = 0; /* nobody to tell */
		multiply(&p, fp8);
		ck_assert_uint_eq(weight.word.valid, 0);
		drop(&weight);
	}
}
END_TEST

START_TEST(a_frozen_weight_is_not_compared)
{
	struct weight weight;
	struct product p;
	make(&weight, false, 70, 128);
	pack(&weight, false);
	weight.word.valid = 1;
	describe(&p, &weight, false, &h200);
	p.args.flags |= QS_PRODUCT_FROZEN;
	weight.source[0] ^= 0x8000;
	multiply(&p, false);
	ck_assert_uint_eq(weight.word.valid, 1);
	ck_assert_uint_eq(weight.word.turn, 0);
	drop(&weight);
}
END_TEST

START_TEST(tiles_that_the_descriptor_does_not_name_are_not_used)
{
	struct weight weight;
	struct product p;
	make(&weight, false, 70, 128);
	pack(&weight, false);
	weight.word.valid = 1;
	describe(&p, &weight, false, &h200);
	p.args.packed = weight.args.packed + 128;
	multiply(&p, false);
	expect_product(&p, &weight, 0);
	drop(&weight);
}
END_TEST

/* One column of W and X, so that the sum is a product. */
START_TEST(epilogues_are_cublaslts)
{
	struct weight weight;
	struct product p;
	make(&weight, false, 70, 64);
	memset(weight.source, 0, 70 * 64 * 2);
	weight.source[0] = bf16(2);
	weight.source[64] = bf16(-2);
	pack(&weight, false);
	describe(&p, &weight, false, &elsewhere);
	p.x[0] = bf16(0.5f);
	p.args.alpha = 3;
	p.args.beta = -1;
	p.args.bias = (uint64_t)(uintptr_t)p.bias;
	p.d[0] = p.d[1] = p.d[2] = 1;
	p.bias[0] = bf16(0.25f);
	multiply(&p, false);
	ck_assert_float_eq(p.d[0], 2.25f);
	ck_assert_float_eq(p.d[1], -4);
	ck_assert_float_eq(p.d[2], -1);
	p.args.beta = 0;
	p.args.activation = QS_ACTIVATION_RELU;
	multiply(&p, false);
	ck_assert_float_eq(p.d[0], 3.25f);
	ck_assert_float_eq(p.d[1], 0);
	p.args.activation = QS_ACTIVATION_GELU;
	p.args.alpha = 1;
	p.args.bias = 0;
	multiply(&p, false);
	ck_assert_float_eq_tol(p.d[0], 0.841192f, 1e-6f);
	ck_assert_float_eq_tol(p.d[1], -0.158808f, 1e-6f);
	drop(&weight);
}
END_TEST

/* ---- wide products -------------------------------------------------------------------------- */

/* The same token over and over, so that the expected results are those of two. */
#define WIDE_TOKENS 130

struct wide {
	struct qs_mapped_args args;
	struct qs_product_geometry geometry;
	uint16_t x[WIDE_TOKENS * 128] __attribute__((aligned(16)));
	float d[WIDE_TOKENS * 70];
};

static void describe_wide(struct wide *wide, const struct product *p)
{
	memset(wide, 0, sizeof *wide);
	for (int i = 0; i < WIDE_TOKENS * 128; i++)
		wide->x[i] = p->x[i % 256];
	wide->args.product = p->args;
	wide->args.product.x = (uint64_t)(uintptr_t)wide->x;
	wide->args.product.d = (uint64_t)(uintptr_t)wide->d;
	wide->args.product.tokens = WIDE_TOKENS;
	wide->geometry = qs_wide_plan(&wide->args.product, &h200);
}

static void multiply_wide(struct wide *wide)
{
	run(qs_kernel_wide[wide->geometry.kind], &wide->args, wide->geometry.blocks,
	    wide->geometry.threads);
}

/* Weights are rounded to bf16: two halves of a unit in the last place at most. */
static void expect_same(const struct wide *wide, const struct product *p,
                        const struct weight *weight, float slack)
{
	for (int64_t token = 0; token < WIDE_TOKENS; token++)
		for (int64_t row = 0; row < weight->n; row++)
			ck_assert_float_eq_tol(wide->d[token * 70 + row],
			                       p->d[token % 2 * 70 + row], slack);
}

START_TEST(a_wide_product_is_that_of_weights_rounded_to_bf16)
{
	static struct wide wide;
	struct weight weight;
	struct product p;
	make(&weight, false, 70, 128);
	pack(&weight, false);
	describe(&p, &weight, false, &h200);
	describe_wide(&wide, &p);
	multiply(&p, false);
	multiply_wide(&wide);
	expect_same(&wide, &p, &weight, 1e-30f);
	weight.word.valid = 1;
	multiply(&p, false);
	multiply_wide(&wide);
	expect_same(&wide, &p, &weight, 0.1f);
	ck_assert(memcmp(wide.d, p.d, sizeof p.d) != 0);
	drop(&weight);
}
END_TEST

/* Codes go up to 1.4375. Above 2^126 a weight has no reciprocal, and is zero. */
START_TEST(the_largest_weights_do_not_overflow_when_they_are_rounded)
{
	static struct wide wide;
	struct weight weight;
	struct product p;
	make(&weight, false, 70, 128);
	for (int i = 0; i < 70 * 128; i++)
		weight.source[i] = bf16(0x1p126f);
	pack(&weight, false);
	weight.word.valid = 1;
	describe(&p, &weight, false, &h200);
	memset(p.x, 0, sizeof p.x);
	p.x[0] = p.x[128] = bf16(0x1p-30f);
	describe_wide(&wide, &p);
	multiply(&p, false);
	multiply_wide(&wide);
	expect_same(&wide, &p, &weight, p.d[0] * 0.01f);
	ck_assert(isfinite(wide.d[0]) && wide.d[0] > 0);
	drop(&weight);
}
END_TEST

START_TEST(a_wide_product_compares_a_row_of_each_tile)
{
	static struct wide wide;
	struct weight weight;
	struct product p;
	int calls = 0;
	make(&weight, false, 70, 128);
	pack(&weight, false);
	weight.word.valid = 1;
	weight.source[13 * 128 + 77] ^= 0x8000;
	describe(&p, &weight, false, &h200);
	describe_wide(&wide, &p);
	while (weight.word.valid && calls++ < 65)
		multiply_wide(&wide);
	ck_assert_int_eq(calls, 14);
	multiply(&p, false);
	multiply_wide(&wide);
	expect_same(&wide, &p, &weight, 1e-30f);
	drop(&weight);
}
END_TEST

#define WIDE_CLAUSES 5

START_TEST(a_wide_launch_that_breaks_the_contract_is_not_run)
{
	static struct wide wide;
	struct weight weight;
	struct product p;
	make(&weight, false, 70, 128);
	pack(&weight, false);
	describe(&p, &weight, false, &h200);
	describe_wide(&wide, &p);
	if (_i == 0)
		wide.args.product.strips = 4;
	if (_i == 1)
		wide.args.product.x += 2;
	if (_i == 2)
		wide.args.product.ldx++;
	if (_i == 3)
		wide.geometry.threads = QS_PRODUCT_THREADS;
	if (_i == 4)
		wide.args.map[0] = 1; /* the address */
	multiply_wide(&wide);
}
END_TEST

/* ---- maps of few tokens ---------------------------------------------------------------------- */

/* What a driver was asked for last; it answers `answer`. */
static struct {
	const void *address;
	cuuint64_t size[3], stride[2];
	cuuint32_t box[3];
	CUresult answer;
	int calls;
} asked;

static CUresult CUDAAPI encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                               void *address, const cuuint64_t *size, const cuuint64_t *strides,
                               const cuuint32_t *box, const cuuint32_t *steps,
                               CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                               CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
	(void)type, (void)steps, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
	ck_assert_uint_eq(rank, 3);
	asked.address = address;
	memcpy(asked.size, size, sizeof asked.size);
	memcpy(asked.stride, strides, sizeof asked.stride);
	memcpy(asked.box, box, sizeof asked.box);
	asked.calls++;
	memset(map, 1, sizeof *map);
	return asked.answer;
}

/* If a product of these has a map. */
static bool is_mapped(uint64_t x, int64_t ldx, uint32_t tokens, uint32_t strips, bool possible)
{
	struct qs_mapped_args args = {
	        .product = {.x = x, .ldx = ldx, .tokens = tokens, .strips = strips, .k = 640}};
	qs_thin_map(possible ? encode : NULL, &args, qs_product_kind(tokens));
	return args.product.flags & QS_PRODUCT_MAPPED;
}

START_TEST(a_map_has_a_box_of_what_a_stage_takes)
{
	static const uint32_t boxes[][2] = {{1, 1},   {8, 8},   {9, 9},   {16, 16},
	                                    {17, 17}, {32, 32}, {33, 32}, {64, 32}};
	asked.answer = CUDA_SUCCESS;
	for (int i = 0; i < 8; i++)
		for (uint32_t strips = 1; strips <= QS_STRIPS_MAX; strips *= 2) {
			ck_assert(is_mapped(4096, 648, boxes[i][0], strips, true));
			ck_assert_ptr_eq(asked.address, (void *)4096);
			ck_assert_uint_eq(asked.size[0], QS_WEIGHT_TILE);
			ck_assert_uint_eq(asked.size[1], boxes[i][0]);
			ck_assert_uint_eq(asked.size[2], 640 / QS_WEIGHT_TILE);
			ck_assert_uint_eq(asked.stride[0], 648 * 2);
			ck_assert_uint_eq(asked.stride[1], QS_WEIGHT_TILE * 2);
			ck_assert_uint_eq(asked.box[0], QS_WEIGHT_TILE);
			ck_assert_uint_eq(asked.box[1], boxes[i][1]);
			ck_assert_uint_eq(asked.box[2], QS_PAIRS / strips);
		}
}
END_TEST

START_TEST(what_no_map_can_say_is_not_mapped)
{
	asked.answer = CUDA_SUCCESS;
	ck_assert(is_mapped(4096, 648, 1, 1, true));
	asked.calls = 0;
	ck_assert(!is_mapped(4096, 648, 1, 1, false));
	ck_assert(!is_mapped(4098, 648, 1, 1, true));
	ck_assert(!is_mapped(4096, 644, 1, 1, true));
	ck_assert_int_eq(asked.calls, 0);
	asked.answer = CUDA_ERROR_INVALID_VALUE;
	ck_assert(!is_mapped(4096, 648, 1, 1, true));
	ck_assert_int_eq(asked.calls, 1);
}
END_TEST

START_TEST(a_thin_launch_whose_map_is_not_of_x_is_not_run)
{
	struct weight weight;
	struct product p;
	struct qs_mapped_args args = {0};
	make(&weight, false, 70, 128);
	pack(&weight, false);
	describe(&p, &weight, false, &h200);
	args.product = p.args;
	args.product.flags |= QS_PRODUCT_MAPPED;
	args.map[0] = 1; /* the address */
	run(qs_kernel_w4a16[p.geometry.kind], &args, p.geometry.blocks, p.geometry.threads);
}
END_TEST

/* ---- plans ---------------------------------------------------------------------------------- */

static struct qs_product_args shape(int64_t n, int64_t k, uint32_t tokens)
{
	return (struct qs_product_args){.n = n, .k = k, .tokens = tokens};
}

START_TEST(the_number_of_tokens_changes_no_sum)
{
	static const int64_t sizes[] = {64, 192, 1024, 4096, 5120, 8192, 14336, 128256};
	for (int i = 0; i < 64; i++)
		for (int fp8 = 0; fp8 < 2; fp8++) {
			struct qs_product_args first =
			        shape(sizes[i / 8], sizes[i % 8 < 7 ? i % 8 : 6], 1);
			qs_product_plan(&first, fp8, &h200);
			for (uint32_t tokens = 2; tokens <= 64; tokens++) {
				struct qs_product_args args = shape(first.n, first.k, tokens);
				qs_product_plan(&args, fp8, &h200);
				ck_assert_uint_eq(args.strips, first.strips);
				ck_assert_uint_eq(args.split, first.split);
			}
		}
}
END_TEST

START_TEST(the_number_of_tokens_changes_a_wide_sum_by_the_128_only)
{
	static const int64_t sizes[] = {64, 1024, 4096, 8192, 14336};
	for (int i = 0; i < 25; i++)
		for (uint32_t tokens = 1; tokens <= 512; tokens++) {
			struct qs_product_args args = shape(sizes[i / 5], sizes[i % 5], tokens);
			struct qs_product_args most = args;
			most.tokens = (tokens + 127) / 128 * 128;
			const struct qs_product_geometry geometry = qs_wide_plan(&args, &h200);
			ck_assert_uint_eq(geometry.kind, qs_wide_plan(&most, &h200).kind);
			ck_assert_uint_eq(args.split, most.split);
			ck_assert_uint_eq(geometry.cluster, args.split);
			ck_assert_int_eq(geometry.blocks,
			                 qs_shares(args.n, 128) * args.split *
			                         qs_shares(tokens, qs_wide_tokens(geometry.kind)));
		}
}
END_TEST

/* In one wave, of the clusters that a device has in fact. */
START_TEST(wide_products_of_square_weights_fill_the_device)
{
	const struct qs_product_device real = {.sms = 132, .hopper = 1, .clusters = {132, 66, 30}};
	const struct qs_product_device one = {.sms = 132, .hopper = 1, .clusters = {132, 0, 0}};
	for (int64_t n = 4096; n <= 8192; n *= 2) {
		struct qs_product_args args = shape(n, n, 128);
		ck_assert_uint_eq(qs_wide_plan(&args, &real).blocks, 128);
		ck_assert_uint_eq(qs_wide_plan(&args, &one).cluster, 1);
	}
}
END_TEST

START_TEST(every_tile_has_one_block)
{
	for (int64_t n = 1; n < 20000; n = n * 3 + 1)
		for (int64_t k = 64; k <= 16384; k *= 2) {
			struct qs_product_args args = shape(n, k, 1);
			const struct qs_product_geometry geometry =
			        qs_product_plan(&args, 0, &h200);
			const int64_t units = geometry.blocks / args.split;
			ck_assert_uint_eq(geometry.blocks % args.split, 0);
			ck_assert_uint_eq(geometry.cluster, args.split);
			ck_assert_int_ge(units * args.strips * 64, n);
			ck_assert_int_lt((units - 1) * args.strips * 64, n);
		}
}
END_TEST

START_TEST(square_weights_fill_the_device)
{
	for (int64_t n = 4096; n <= 8192; n *= 2) {
		struct qs_product_args args = shape(n, n, 1);
		ck_assert_uint_eq(qs_product_plan(&args, 0, &h200).blocks, 128);
	}
}
END_TEST

/* Stages of a product with every number of strips, and what the blocks of a cluster give each
 * other, which may come while stages are still in use. Swizzled X starts at multiples of 1024. */
START_TEST(shared_memory_has_room_for_all)
{
	const int64_t tile = (int64_t)QS_SPAN * QS_WEIGHT_TILE * 2;
	static const int tile_bytes[] = {QS_NF4_TILE_BYTES, QS_FP8_TILE_BYTES};
	for (int i = 0; i < 6; i++)
		for (int64_t strips = 1; strips <= QS_STRIPS_MAX; strips *= 2) {
			const int tokens = (int)qs_product_tokens((uint32_t)i / 2);
			const int64_t stages = QS_RING_STAGES(tokens, tile_bytes[i % 2]);
			const int64_t tiles = QS_STAGE_TILES(tile_bytes[i % 2]);
			const int64_t x = QS_PAIRS / strips * tokens * QS_WEIGHT_TILE * 2;
			ck_assert_int_le(stages * (tiles + x) + strips * QS_LANDING_BYTES,
			                 QS_RING_BYTES);
			ck_assert_int_ge(stages, 2);
			ck_assert_int_le(stages, QS_RING_STAGES_MAX);
			ck_assert_int_eq(tiles % 1024, 0);
			ck_assert_int_eq(x % 1024, 0);
		}
	ck_assert_int_le(QS_STAGES * QS_PAIRS / QS_STRIPS_MAX * tile, QS_X_BYTES);
	/* of a block on 9.0; on 8.6, 8.9 and 12.0, which have least */
	ck_assert_int_le(QS_HOPPER_SHARED, 227 * 1024);
	ck_assert_int_le(QS_WIDE_SHARED, 227 * 1024);
	ck_assert_int_le(QS_SHARED_BYTES, 99 * 1024);
	ck_assert_int_le(QS_PARTIAL_BYTES, QS_SHARED_BYTES - QS_CONTROL_BYTES);
}
END_TEST

/* Blocks beyond the first span of tokens have the same weights again. */
START_TEST(blocks_have_at_most_a_span_of_tokens)
{
	for (uint32_t tokens = 1; tokens <= QS_TOKENS_MAX; tokens++) {
		struct qs_product_args args = shape(4096, 4096, tokens), one = shape(4096, 4096, 1);
		const uint32_t blocks = qs_product_plan(&one, 0, &h200).blocks;
		ck_assert_uint_eq(qs_product_plan(&args, 0, &h200).blocks,
		                  tokens > QS_SPAN ? 2 * blocks : blocks);
	}
}
END_TEST

START_TEST(kernels_are_chosen_by_the_tokens)
{
	static const uint32_t kinds[][2] = {{1, 0},  {8, 0},  {9, 1},  {16, 1},
	                                    {17, 2}, {32, 2}, {33, 2}, {64, 2}};
	for (int i = 0; i < 8; i++)
		ck_assert_uint_eq(qs_product_kind(kinds[i][0]), kinds[i][1]);
}
END_TEST

START_TEST(clusters_that_a_device_does_not_run_are_not_planned)
{
	const struct qs_product_device one = {.sms = 132, .hopper = 1, .clusters = {132, 0, 0}};
	struct qs_product_args args = shape(4096, 4096, 1);
	ck_assert_uint_eq(qs_product_plan(&args, 0, &one).cluster, 1);
	ck_assert_uint_eq(qs_product_plan(&args, 0, &elsewhere).cluster, 1);
	ck_assert_uint_eq(qs_product_plan(&args, 0, &elsewhere).threads, QS_PRODUCT_THREADS);
	ck_assert_uint_eq(qs_product_plan(&args, 0, &one).threads, QS_HOPPER_THREADS);
}
END_TEST

START_TEST(packed_weights_have_the_sizes_of_their_bits)
{
	ck_assert_int_eq(qs_nf4_bytes(8192, 8192), (int64_t)8192 * 8192 * 17 / 32);
	ck_assert_int_eq(qs_fp8_bytes(8192, 8192), (int64_t)8192 * 8192);
	ck_assert_int_eq(qs_nf4_bytes(65, 64), 2 * QS_NF4_TILE_BYTES);
}
END_TEST

/* ---- contract ------------------------------------------------------------------------------- */

#define CLAUSES 8

START_TEST(a_launch_that_breaks_the_contract_is_not_run)
{
	struct weight weight;
	struct product p;
	make(&weight, false, 70, 128);
	pack(&weight, false);
	describe(&p, &weight, false, &h200);
	if (_i == 0)
		weight.args.k = 100;
	if (_i == 1)
		weight.args.ld = 64;
	if (_i == 2)
		weight.args.packed += 64;
	if (_i < 3)
		pack(&weight, false);
	if (_i == 3)
		p.args.tokens = 65;
	if (_i == 4)
		p.args.k = 96;
	if (_i == 5)
		p.args.strips = 3;
	if (_i == 6)
		p.geometry.blocks++;
	if (_i == 7)
		p.geometry.threads = 64;
	multiply(&p, false);
}
END_TEST

/* ---- suite ---------------------------------------------------------------------------------- */

static TCase *forms(void)
{
	TCase *tests = tcase_create("forms");
	tcase_add_test(tests, every_value_of_the_codebook_has_its_own_code);
	tcase_add_test(tests, midpoints_lie_between_their_neighbours_and_go_to_the_lower);
	tcase_add_test(tests, an_inexact_reciprocal_gives_the_same_code);
	tcase_add_test(tests, scaled_values_are_the_codebook_times_a_constant);
	tcase_add_test(tests, a_block_is_divided_by_its_absmax);
	tcase_add_test(tests, blocks_of_zeros_and_subnormals_are_zeros);
	tcase_add_test(tests, the_least_normal_absmax_and_the_largest_reciprocal_count);
	tcase_add_test(tests, blocks_with_nan_or_infinity_are_reported_and_zeros);
	tcase_add_test(tests, flat_codes_are_those_of_bitsandbytes);
	tcase_add_test(tests, elements_lie_where_the_header_says);
	tcase_add_test(tests, flat_and_packed_forms_are_the_same_weight);
	tcase_add_test(tests, rows_that_do_not_exist_are_zeros);
	tcase_add_test(tests, packing_tells_amax_and_nonfinite);
	tcase_add_test(tests, packing_does_nothing_where_it_is_told_to);
	tcase_add_test(tests, nested_absmax_is_rounded_twice);
	tcase_add_test(tests, torchaos_absmax_is_rounded_to_bf16_twice);
	tcase_add_test(tests, weights_are_restored_as_bitsandbytes_does);
	return tests;
}

static TCase *products(void)
{
	TCase *tests = tcase_create("products");
	tcase_add_test(tests,
	               a_product_is_that_of_the_copy_if_it_is_valid_and_of_the_source_otherwise);
	tcase_add_test(tests, a_changed_element_is_found_when_its_row_has_its_turn);
	tcase_add_test(tests, a_frozen_weight_is_not_compared);
	tcase_add_test(tests, tiles_that_the_descriptor_does_not_name_are_not_used);
	tcase_add_test(tests, epilogues_are_cublaslts);
	tcase_add_test(tests, a_wide_product_is_that_of_weights_rounded_to_bf16);
	tcase_add_test(tests, the_largest_weights_do_not_overflow_when_they_are_rounded);
	tcase_add_test(tests, a_wide_product_compares_a_row_of_each_tile);
	return tests;
}

static TCase *plans(void)
{
	TCase *tests = tcase_create("plans");
	tcase_add_test(tests, the_number_of_tokens_changes_no_sum);
	tcase_add_test(tests, the_number_of_tokens_changes_a_wide_sum_by_the_128_only);
	tcase_add_test(tests, wide_products_of_square_weights_fill_the_device);
	tcase_add_test(tests, every_tile_has_one_block);
	tcase_add_test(tests, square_weights_fill_the_device);
	tcase_add_test(tests, shared_memory_has_room_for_all);
	tcase_add_test(tests, blocks_have_at_most_a_span_of_tokens);
	tcase_add_test(tests, kernels_are_chosen_by_the_tokens);
	tcase_add_test(tests, a_map_has_a_box_of_what_a_stage_takes);
	tcase_add_test(tests, what_no_map_can_say_is_not_mapped);
	tcase_add_test(tests, clusters_that_a_device_does_not_run_are_not_planned);
	tcase_add_test(tests, packed_weights_have_the_sizes_of_their_bits);
	return tests;
}

int main(void)
{
	Suite *suite = suite_create("nf4");
	TCase *contract = tcase_create("contract");
	suite_add_tcase(suite, forms());
	suite_add_tcase(suite, products());
	suite_add_tcase(suite, plans());
	tcase_add_loop_test_raise_signal(contract, a_launch_that_breaks_the_contract_is_not_run,
	                                 SIGABRT, 0, CLAUSES);
	tcase_add_loop_test_raise_signal(contract,
	                                 a_wide_launch_that_breaks_the_contract_is_not_run, SIGABRT,
	                                 0, WIDE_CLAUSES);
	tcase_add_test_raise_signal(contract, a_thin_launch_whose_map_is_not_of_x_is_not_run,
	                            SIGABRT);
	suite_add_tcase(suite, contract);
	return qs_suite_main(suite);
}
