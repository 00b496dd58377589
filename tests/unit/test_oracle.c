/* The references that GPU kernels are compared with, compared here with the definitions themselves.
 *
 * Conversions are checked for every input of a small type and around every boundary of the others,
 * against tables and exhaustive search; the kernels' references against properties and small cases
 * worked out by hand. What the kernels do on a GPU is gpu/test_kernels.c.
 */
#include <float.h>
#include <math.h>
#include <signal.h>
#include <string.h>

#include "kernels/quantise.h"
#include "tests/oracle/oracle.h"
#include "tests/support/suite.h"

/* An assertion for inner loops: Check's own report every success to the parent process. */
#define EXPECT(left, right)                                                                        \
	do {                                                                                       \
		if ((left) != (right))                                                             \
			ck_assert_uint_eq(left, right);                                            \
	} while (0)

static uint32_t bits_of(float value)
{
	uint32_t bits;
	memcpy(&bits, &value, sizeof bits);
	return bits;
}

/* ---- bf16 ----------------------------------------------------------------------------------- */

START_TEST(every_bf16_widens_exactly_and_narrows_to_itself)
{
	for (uint32_t bits = 0; bits < 0x10000; bits++) {
		const float value = qs_oracle_bf16_to_float((uint16_t)bits);
		const uint32_t back = qs_oracle_float_to_bf16(value);
		EXPECT(bits_of(value), bits << 16);
		if (isnan(value))
			EXPECT(back, bits | 0x40);
		else
			EXPECT(back, bits);
	}
}
END_TEST

START_TEST(narrowing_to_bf16_goes_to_the_nearest_and_ties_to_the_even)
{
	for (uint32_t low = 0; low < 0x7f80; low++) {
		const uint32_t high = low + 1, even = low % 2 ? high : low,
		               tie = (low << 16) + 0x8000;
		float below, middle, above;
		memcpy(&below, &(uint32_t){tie - 1}, sizeof below);
		memcpy(&middle, &tie, sizeof middle);
		memcpy(&above, &(uint32_t){tie + 1}, sizeof above);
		EXPECT(qs_oracle_float_to_bf16(below), low);
		EXPECT(qs_oracle_float_to_bf16(middle), even);
		EXPECT(qs_oracle_float_to_bf16(above), high);
		EXPECT(qs_oracle_float_to_bf16(-above), high | 0x8000);
	}
}
END_TEST

START_TEST(nan_with_low_bits_only_stays_nan_in_bf16)
{
	float value;
	memcpy(&value, &(uint32_t){0x7f800001}, sizeof value);
	ck_assert(isnan(qs_oracle_bf16_to_float(qs_oracle_float_to_bf16(value))));
}
END_TEST

/* ---- e4m3 and e5m2 -------------------------------------------------------------------------- */

/* Anchors and recurrences of the format's table, none of them the formula that the code uses. */
START_TEST(every_e4m3_code_has_the_value_of_the_table)
{
	for (unsigned code = 0; code <= 8; code++)
		ck_assert_float_eq(qs_oracle_e4m3_to_float((uint8_t)code), (float)code / 512);
	for (unsigned code = 0; code < 0x7f; code++) {
		const float value = qs_oracle_e4m3_to_float((uint8_t)code);
		const float negative = qs_oracle_e4m3_to_float((uint8_t)(code | 0x80));
		ck_assert_uint_eq(bits_of(negative), bits_of(value) | 0x80000000);
		if (code >= 16)
			ck_assert_float_eq(value, 2 * qs_oracle_e4m3_to_float((uint8_t)(code - 8)));
		else if (code >= 8)
			ck_assert_float_eq(value, (float)code / 512);
	}
	ck_assert_float_eq(qs_oracle_e4m3_to_float(0x38), 1);
	ck_assert_float_eq(qs_oracle_e4m3_to_float(0x7e), 448);
	ck_assert(isnan(qs_oracle_e4m3_to_float(0x7f)) && isnan(qs_oracle_e4m3_to_float(0xff)));
}
END_TEST

START_TEST(every_e4m3_code_survives_the_round_trip)
{
	for (unsigned code = 0; code < 256; code++) {
		const float value = qs_oracle_e4m3_to_float((uint8_t)code);
		const unsigned expected = isnan(value) ? QS_FP8_NAN : code;
		ck_assert_uint_eq(qs_oracle_float_to_e4m3(value), expected);
	}
}
END_TEST

START_TEST(ties_between_e4m3_neighbours_go_to_the_even_code)
{
	for (unsigned low = 0; low < 0x7e; low++) {
		const unsigned even = low % 2 ? low + 1 : low;
		const float tie = (qs_oracle_e4m3_to_float((uint8_t)low) +
		                   qs_oracle_e4m3_to_float((uint8_t)(low + 1))) /
		                  2;
		ck_assert_uint_eq(qs_oracle_float_to_e4m3(nextafterf(tie, 0)), low);
		ck_assert_uint_eq(qs_oracle_float_to_e4m3(tie), even);
		ck_assert_uint_eq(qs_oracle_float_to_e4m3(nextafterf(tie, 1000)), low + 1);
		ck_assert_uint_eq(qs_oracle_float_to_e4m3(-tie), even | 0x80);
	}
}
END_TEST

/* The code whose value is nearest to a finite x, by trying all of them; of two, the even one. */
static unsigned nearest_e4m3(double x)
{
	unsigned best = 0;
	for (unsigned code = 1; code < 0x7f; code++) {
		const double error = fabs(fabs(x) - (double)qs_oracle_e4m3_to_float((uint8_t)code));
		const double least = fabs(fabs(x) - (double)qs_oracle_e4m3_to_float((uint8_t)best));
		if (error < least || (error == least && code % 2 == 0))
			best = code;
	}
	return best | (signbit(x) ? 0x80 : 0);
}

START_TEST(every_bf16_becomes_the_nearest_e4m3)
{
	for (uint32_t bits = 0; bits < 0x10000; bits++) {
		const float value = qs_oracle_bf16_to_float((uint16_t)bits);
		const unsigned expected =
		        isfinite(value) ? nearest_e4m3((double)value) : QS_FP8_NAN;
		EXPECT(qs_oracle_float_to_e4m3(value), expected);
	}
}
END_TEST

START_TEST(values_beyond_448_saturate_and_keep_their_sign)
{
	const float values[] = {448, 449, 464, 465, 480, 512, 1e10f, FLT_MAX};
	for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
		ck_assert_uint_eq(qs_oracle_float_to_e4m3(values[i]), 0x7e);
		ck_assert_uint_eq(qs_oracle_float_to_e4m3(-values[i]), 0xfe);
	}
}
END_TEST

START_TEST(nan_and_inf_of_either_sign_become_0x7f)
{
	ck_assert_uint_eq(qs_oracle_float_to_e4m3(NAN), QS_FP8_NAN);
	ck_assert_uint_eq(qs_oracle_float_to_e4m3(-NAN), QS_FP8_NAN);
	ck_assert_uint_eq(qs_oracle_float_to_e4m3(INFINITY), QS_FP8_NAN);
	ck_assert_uint_eq(qs_oracle_float_to_e4m3(-INFINITY), QS_FP8_NAN);
}
END_TEST

START_TEST(values_up_to_half_the_least_subnormal_become_signed_zero)
{
	ck_assert_uint_eq(qs_oracle_float_to_e4m3(0x1p-149f), 0x00);
	ck_assert_uint_eq(qs_oracle_float_to_e4m3(-0x1p-149f), 0x80);
	ck_assert_uint_eq(qs_oracle_float_to_e4m3(0x1p-10f), 0x00);
	ck_assert_uint_eq(qs_oracle_float_to_e4m3(-0x1p-10f), 0x80);
	ck_assert_uint_eq(qs_oracle_float_to_e4m3(nextafterf(0x1p-10f, 1)), 0x01);
}
END_TEST

START_TEST(every_e5m2_code_has_the_value_of_the_table)
{
	for (unsigned code = 0; code < 0x7c; code++) {
		const float value = qs_oracle_e5m2_to_float((uint8_t)code);
		const float negative = qs_oracle_e5m2_to_float((uint8_t)(code | 0x80));
		ck_assert_uint_eq(bits_of(negative), bits_of(value) | 0x80000000);
		if (code >= 8)
			ck_assert_float_eq(value, 2 * qs_oracle_e5m2_to_float((uint8_t)(code - 4)));
		else
			ck_assert_float_eq(value, (float)code / 65536);
	}
	ck_assert_float_eq(qs_oracle_e5m2_to_float(0x3c), 1);
	ck_assert_float_eq(qs_oracle_e5m2_to_float(0x7b), 57344);
	ck_assert(isinf(qs_oracle_e5m2_to_float(0x7c)) && isinf(qs_oracle_e5m2_to_float(0xfc)));
	for (unsigned code = 0x7d; code < 0x80; code++)
		ck_assert(isnan(qs_oracle_e5m2_to_float((uint8_t)code)));
}
END_TEST

/* ---- kernels -------------------------------------------------------------------------------- */

#define ROOM  4096
#define GUARD 0xa5

/* One small operand and what a launch of both references made of it. */
struct bench {
	uint16_t source[ROOM];                /* bf16                              */
	_Alignas(16) uint8_t target[ROOM];    /* guard bytes where nothing belongs */
	float scale;                          /* as written                        */
	uint32_t partials[2][QS_AMAX_BLOCKS]; /* of both operands                  */
	struct qs_quantise_operand operand;   /* describes all of the above        */
};

static struct bench one, two;

/* A matrix of `value` with padding of the largest finite number, which would show in amax. */
static void fill(struct bench *bench, int64_t inner, int64_t outer, int64_t ld, float value)
{
	memset(bench, 0, sizeof *bench);
	memset(bench->target, GUARD, sizeof bench->target);
	ck_assert_int_le(outer * ld, ROOM);
	for (int64_t i = 0; i < ROOM; i++)
		bench->source[i] =
		        i < outer * ld && i % ld < inner ? qs_oracle_float_to_bf16(value) : 0x7f7f;
	bench->operand = (struct qs_quantise_operand){
	        .source = (uint64_t)(uintptr_t)bench->source,
	        .target = (uint64_t)(uintptr_t)bench->target,
	        .scale = (uint64_t)(uintptr_t)&bench->scale,
	        .ld = ld,
	        .inner = inner,
	        .outer = outer,
	};
}

static void put(struct bench *bench, int64_t outer, int64_t inner, uint16_t bits)
{
	bench->source[outer * bench->operand.ld + inner] = bits;
}

static uint8_t got(const struct bench *bench, int64_t row, int64_t column)
{
	return bench->target[row * bench->operand.k_padded + column];
}

static const struct qs_oracle_kernel *kernel_named(const char *name)
{
	const struct qs_oracle_kernel *kernel = qs_oracle_kernels;
	while (kernel->name && strcmp(kernel->name, name) != 0)
		kernel++;
	ck_assert_msg(kernel->name != NULL, "no reference of %s", name);
	return kernel;
}

static void launch(const char *name, void *args, const struct qs_quantise_args *quantise,
                   unsigned threads)
{
	void *params[] = {args};
	kernel_named(name)->run(params, quantise->operand[0].blocks + quantise->operand[1].blocks,
	                        threads);
}

/* Runs amax and cast of one or two operands with the given blocks; returns what cast was given. */
static struct qs_cast_args quantise(struct bench *a, struct bench *b, int transpose,
                                    unsigned blocks)
{
	struct qs_cast_args args = {0};
	struct bench *both[] = {a, b};
	args.quantise.partials = (uint64_t)(uintptr_t)(a ? a : b)->partials;
	for (int i = 0; i < 2; i++) {
		if (!both[i])
			continue;
		struct qs_quantise_operand *operand = &both[i]->operand;
		operand->transpose = (uint32_t)transpose;
		operand->k_padded = qs_k_padded(transpose ? operand->outer : operand->inner);
		operand->blocks = blocks;
		args.quantise.operand[i] = *operand;
		args.partial_blocks[i] = blocks;
	}
	launch(QS_KERNEL_AMAX, &args.quantise, &args.quantise, QS_AMAX_THREADS);
	launch(QS_KERNEL_CAST, &args, &args.quantise, QS_CAST_THREADS);
	return args;
}

START_TEST(every_kernel_has_a_reference_with_the_size_of_its_argument)
{
	ck_assert_uint_eq(kernel_named(QS_KERNEL_AMAX)->param_bytes[0], 136);
	ck_assert_uint_eq(kernel_named(QS_KERNEL_CAST)->param_bytes[0], 144);
	ck_assert_uint_eq(kernel_named(QS_KERNEL_AMAX)->param_bytes[1], 0);
	ck_assert_uint_eq(kernel_named(QS_KERNEL_CAST)->param_bytes[1], 0);
}
END_TEST

START_TEST(the_largest_magnitude_becomes_448_and_the_scale_undoes_it)
{
	fill(&one, 7, 3, 7, 0.25f);
	put(&one, 1, 2, qs_oracle_float_to_bf16(-3.5f));
	quantise(&one, NULL, 0, 1);
	ck_assert_float_eq(one.scale, 3.5f / 448);
	ck_assert_uint_eq(got(&one, 1, 2), 0xfe);
	ck_assert_uint_eq(got(&one, 0, 0), 0x60); /* 0.25 * 128 = 32 = 2^5: exponent 12 */
	ck_assert_uint_eq(one.partials[0][0], bits_of(3.5f));
}
END_TEST

START_TEST(amax_ignores_nan_and_inf_which_spoil_only_their_own_place)
{
	const uint16_t odd[] = {0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x7f81};
	fill(&one, 8, 5, 8, 1);
	for (int i = 0; i < 5; i++)
		put(&one, i, i, odd[i]);
	quantise(&one, NULL, 0, 2);
	ck_assert_float_eq(one.scale, 1.0f / 448);
	for (int row = 0; row < 5; row++)
		for (int column = 0; column < 8; column++)
			ck_assert_uint_eq(got(&one, row, column), row == column ? 0x7f : 0x7e);
}
END_TEST

START_TEST(largest_finite_bf16_counts_and_does_not_overflow)
{
	fill(&one, 4, 1, 4, 0);
	put(&one, 0, 3, 0xff7f);
	quantise(&one, NULL, 0, 1);
	ck_assert_uint_eq(one.partials[0][0], 0x7f7f0000);
	ck_assert_uint_eq(got(&one, 0, 3), 0xfe);
	ck_assert(isfinite(one.scale));
}
END_TEST

START_TEST(a_zero_matrix_has_scale_one_and_keeps_its_signs)
{
	fill(&one, 5, 2, 5, 0);
	put(&one, 1, 1, 0x8000);
	quantise(&one, NULL, 0, 3);
	ck_assert_float_eq(one.scale, 1);
	ck_assert_uint_eq(got(&one, 0, 0), 0x00);
	ck_assert_uint_eq(got(&one, 1, 1), 0x80);
}
END_TEST

START_TEST(a_matrix_of_nan_alone_has_scale_one)
{
	fill(&one, 5, 2, 5, NAN);
	quantise(&one, NULL, 0, 1);
	ck_assert_float_eq(one.scale, 1);
	ck_assert_uint_eq(got(&one, 1, 4), QS_FP8_NAN);
}
END_TEST

START_TEST(amax_below_the_floor_is_raised_to_it)
{
	fill(&one, 3, 1, 3, 0x1p-101f);
	quantise(&one, NULL, 0, 1);
	ck_assert_float_eq(one.scale, 0x1p-100f / 448);
	ck_assert_uint_eq(got(&one, 0, 0), 0x76); /* 224 = 1.75 * 2^7 */
	fill(&one, 3, 1, 3, 0x1p-100f);
	quantise(&one, NULL, 0, 1);
	ck_assert_float_eq(one.scale, 0x1p-100f / 448);
	ck_assert_uint_eq(got(&one, 0, 0), 0x7e);
	fill(&one, 3, 1, 3, 0x1p-133f);
	quantise(&one, NULL, 0, 1);
	ck_assert_float_eq(one.scale, 0x1p-100f / 448);
	ck_assert_uint_eq(got(&one, 0, 0), 0x00);
}
END_TEST

START_TEST(finite_values_above_a_given_amax_saturate_even_if_their_product_overflows)
{
	fill(&one, 4, 1, 4, 1);
	struct qs_cast_args args = quantise(&one, NULL, 0, 1);
	put(&one, 0, 1, 0x7f7f);
	put(&one, 0, 2, 0xff7f);
	put(&one, 0, 3, 0x7f80);
	one.partials[0][0] = bits_of(0x1p-100f);
	launch(QS_KERNEL_CAST, &args, &args.quantise, QS_CAST_THREADS);
	ck_assert_uint_eq(got(&one, 0, 0), 0x7e);
	ck_assert_uint_eq(got(&one, 0, 1), 0x7e);
	ck_assert_uint_eq(got(&one, 0, 2), 0xfe);
	ck_assert_uint_eq(got(&one, 0, 3), QS_FP8_NAN);
}
END_TEST

START_TEST(padding_between_vectors_is_not_read)
{
	fill(&one, 5, 9, 11, 2);
	quantise(&one, NULL, 0, 2);
	ck_assert_float_eq(one.scale, 2.0f / 448);
	fill(&one, 5, 9, 11, 2);
	quantise(&one, NULL, 1, 2);
	ck_assert_float_eq(one.scale, 2.0f / 448);
}
END_TEST

/* What lies where after quantising a matrix of ones: rows of k values, zeros to k_padded, and
 * nothing beyond. */
static void check_layout(int64_t rows, int64_t k)
{
	const int64_t k_padded = (k + 15) / 16 * 16;
	ck_assert_int_eq(one.operand.k_padded, k_padded);
	for (int64_t i = 0; i < ROOM; i++) {
		const unsigned inside = i % k_padded < k ? 0x7e : 0x00;
		EXPECT(one.target[i], i < rows * k_padded ? inside : GUARD);
	}
}

START_TEST(rows_are_zero_from_k_to_k_padded_and_nothing_is_written_beyond)
{
	for (int64_t inner = 1; inner <= 34; inner++)
		for (int64_t outer = 1; outer <= 34; outer += 3) {
			fill(&one, inner, outer, inner + 2, 1);
			quantise(&one, NULL, 0, 1);
			check_layout(outer, inner);
			fill(&one, inner, outer, inner + 2, 1);
			quantise(&one, NULL, 1, 1);
			check_layout(inner, outer);
		}
}
END_TEST

START_TEST(transposed_output_is_the_transpose_of_the_straight_one)
{
	fill(&one, 33, 18, 35, 0);
	for (int64_t outer = 0; outer < 18; outer++)
		for (int64_t inner = 0; inner < 33; inner++)
			put(&one, outer, inner, (uint16_t)(0x3e00 + 33 * outer + inner));
	memcpy(&two.source, &one.source, sizeof two.source);
	quantise(&one, NULL, 0, 1);
	memcpy(two.target, one.target, sizeof two.target);
	const int64_t straight = one.operand.k_padded;
	quantise(&one, NULL, 1, 1);
	ck_assert_int_ne(two.target[0], two.target[17 * straight + 32]);
	for (int64_t outer = 0; outer < 18; outer++)
		for (int64_t inner = 0; inner < 33; inner++)
			ck_assert_uint_eq(got(&one, inner, outer),
			                  two.target[outer * straight + inner]);
}
END_TEST

START_TEST(the_number_of_blocks_changes_nothing)
{
	for (unsigned blocks = 1; blocks <= QS_AMAX_BLOCKS; blocks += 73) {
		fill(&one, 6, 40, 6, 1);
		put(&one, 39, 5, qs_oracle_float_to_bf16(8));
		memset(one.partials, GUARD, sizeof one.partials);
		quantise(&one, NULL, 0, blocks);
		ck_assert_float_eq(one.scale, 8.0f / 448);
		if (blocks < QS_AMAX_BLOCKS)
			ck_assert_uint_eq(one.partials[0][blocks], 0xa5a5a5a5);
	}
}
END_TEST

START_TEST(two_operands_of_a_launch_do_not_mix)
{
	fill(&one, 16, 4, 16, 1);
	fill(&two, 24, 2, 24, 7);
	quantise(&one, &two, 0, 2);
	ck_assert_float_eq(one.scale, 1.0f / 448);
	ck_assert_float_eq(two.scale, 7.0f / 448);
	ck_assert_uint_eq(got(&one, 3, 15), 0x7e);
	ck_assert_uint_eq(got(&two, 1, 23), 0x7e);
}
END_TEST

START_TEST(an_operand_without_blocks_is_skipped)
{
	fill(&one, 16, 4, 16, 1);
	quantise(NULL, &one, 0, 2);
	ck_assert_float_eq(one.scale, 1.0f / 448);
	ck_assert_uint_eq(one.partials[0][0], 0);
	ck_assert_uint_eq(one.partials[1][0], bits_of(1));
}
END_TEST

/* Each breaks one clause of quantise.h; the reference must not let it pass. */
static void launch_wrongly(int clause)
{
	fill(&one, 16, 4, 16, 1);
	struct qs_cast_args args = quantise(&one, NULL, 0, 2);
	void *params[] = {&args};
	struct qs_quantise_operand *operand = &args.quantise.operand[0];
	unsigned grid = 2, threads = QS_CAST_THREADS;
	switch (clause) {
	case 0:
		grid = 3;
		break;
	case 1:
		threads = QS_AMAX_THREADS;
		break;
	case 2:
		operand->target += 8;
		break;
	case 3:
		operand->k_padded = 32;
		break;
	case 4:
		operand->ld = 15;
		break;
	default:
		args.partial_blocks[0] = 0;
		break;
	}
	kernel_named(QS_KERNEL_CAST)->run(params, grid, threads);
}

START_TEST(a_launch_that_breaks_the_contract_is_not_run)
{
	launch_wrongly(_i);
}
END_TEST

/* ---- launch geometry ------------------------------------------------------------------------ */

START_TEST(small_operands_get_a_block_and_large_ones_the_whole_device)
{
	struct qs_quantise_operand operand = {.inner = 1, .outer = 1, .k_padded = 16};
	ck_assert_uint_eq(qs_amax_blocks(&operand, 132), 1);
	ck_assert_uint_eq(qs_cast_blocks(&operand, 132), 1);
	operand.inner = operand.outer = operand.k_padded = (int64_t)1 << 20;
	for (uint32_t transpose = 0; transpose < 2; transpose++) {
		operand.transpose = transpose;
		ck_assert_uint_eq(qs_amax_blocks(&operand, 132), QS_AMAX_BLOCKS);
		ck_assert_uint_eq(qs_amax_blocks(&operand, 10), 10 * QS_AMAX_BLOCKS_PER_SM);
		ck_assert_uint_eq(qs_cast_blocks(&operand, 132), 132 * QS_CAST_BLOCKS_PER_SM);
	}
}
END_TEST

START_TEST(blocks_grow_with_the_work_until_then)
{
	struct qs_quantise_operand operand = {.inner = 65, .outer = 129, .k_padded = 80};
	ck_assert_uint_eq(qs_amax_blocks(&operand, 132), 3); /* 8385 elements of 4096     */
	ck_assert_uint_eq(qs_cast_blocks(&operand, 132), 3); /* 129 * 5 chunks of 256     */
	operand.transpose = 1;
	operand.k_padded = 144;
	ck_assert_uint_eq(qs_cast_blocks(&operand, 132), 4); /* 2 tiles along both        */
}
END_TEST

START_TEST(k_is_padded_to_the_next_multiple_of_16)
{
	const int64_t k[] = {1, 15, 16, 17, 4096, ((int64_t)1 << 40) + 1};
	const int64_t padded[] = {16, 16, 16, 32, 4096, ((int64_t)1 << 40) + 16};
	for (int i = 0; i < 6; i++)
		ck_assert_int_eq(qs_k_padded(k[i]), padded[i]);
}
END_TEST

static TCase *conversions(void)
{
	TCase *tests = tcase_create("conversions");
	tcase_add_test(tests, every_bf16_widens_exactly_and_narrows_to_itself);
	tcase_add_test(tests, narrowing_to_bf16_goes_to_the_nearest_and_ties_to_the_even);
	tcase_add_test(tests, nan_with_low_bits_only_stays_nan_in_bf16);
	tcase_add_test(tests, every_e4m3_code_has_the_value_of_the_table);
	tcase_add_test(tests, every_e4m3_code_survives_the_round_trip);
	tcase_add_test(tests, ties_between_e4m3_neighbours_go_to_the_even_code);
	tcase_add_test(tests, every_bf16_becomes_the_nearest_e4m3);
	tcase_add_test(tests, values_beyond_448_saturate_and_keep_their_sign);
	tcase_add_test(tests, nan_and_inf_of_either_sign_become_0x7f);
	tcase_add_test(tests, values_up_to_half_the_least_subnormal_become_signed_zero);
	tcase_add_test(tests, every_e5m2_code_has_the_value_of_the_table);
	tcase_set_timeout(tests, 60);
	return tests;
}

static TCase *kernels(void)
{
	TCase *tests = tcase_create("kernels");
	tcase_add_test(tests, every_kernel_has_a_reference_with_the_size_of_its_argument);
	tcase_add_test(tests, the_largest_magnitude_becomes_448_and_the_scale_undoes_it);
	tcase_add_test(tests, amax_ignores_nan_and_inf_which_spoil_only_their_own_place);
	tcase_add_test(tests, largest_finite_bf16_counts_and_does_not_overflow);
	tcase_add_test(tests, a_zero_matrix_has_scale_one_and_keeps_its_signs);
	tcase_add_test(tests, a_matrix_of_nan_alone_has_scale_one);
	tcase_add_test(tests, amax_below_the_floor_is_raised_to_it);
	tcase_add_test(tests,
	               finite_values_above_a_given_amax_saturate_even_if_their_product_overflows);
	tcase_add_test(tests, padding_between_vectors_is_not_read);
	tcase_add_test(tests, rows_are_zero_from_k_to_k_padded_and_nothing_is_written_beyond);
	tcase_add_test(tests, transposed_output_is_the_transpose_of_the_straight_one);
	tcase_add_test(tests, the_number_of_blocks_changes_nothing);
	tcase_add_test(tests, two_operands_of_a_launch_do_not_mix);
	tcase_add_test(tests, an_operand_without_blocks_is_skipped);
	tcase_set_timeout(tests, 60);
	return tests;
}

static TCase *geometry(void)
{
	TCase *tests = tcase_create("geometry");
	tcase_add_test(tests, small_operands_get_a_block_and_large_ones_the_whole_device);
	tcase_add_test(tests, blocks_grow_with_the_work_until_then);
	tcase_add_test(tests, k_is_padded_to_the_next_multiple_of_16);
	return tests;
}

int main(void)
{
	Suite *suite = suite_create("oracle");
	TCase *contract = tcase_create("contract");
	suite_add_tcase(suite, conversions());
	suite_add_tcase(suite, kernels());
	suite_add_tcase(suite, geometry());
	tcase_add_loop_test_raise_signal(contract, a_launch_that_breaks_the_contract_is_not_run,
	                                 SIGABRT, 0, 6);
	suite_add_tcase(suite, contract);
	return qs_suite_main(suite);
}
