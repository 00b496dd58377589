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
			ck_assert_uint_eq((unsigned)(left), (unsigned)(right));                    \
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

/* The same of e5m2, and of any bf16. */
static unsigned nearest_e5m2(uint16_t bits)
{
	const double x = (double)qs_oracle_bf16_to_float(bits), magnitude = fmin(fabs(x), 57344);
	unsigned best = 0;
	if (!isfinite(x))
		return QS_FP8_NAN;
	for (unsigned code = 1; code < 0x7c; code++) {
		const double error =
		        fabs(magnitude - (double)qs_oracle_e5m2_to_float((uint8_t)code));
		const double least =
		        fabs(magnitude - (double)qs_oracle_e5m2_to_float((uint8_t)best));
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

/* One small operand and what launches of the references made of it. */
struct bench {
	uint16_t source[ROOM];                /* bf16                              */
	_Alignas(16) uint8_t straight[ROOM];  /* guard bytes where nothing belongs */
	_Alignas(16) uint8_t turned[ROOM];    /* the same                          */
	_Alignas(16) uint32_t partials[ROOM]; /* the same                          */
	float scale[ROOM];                    /* as written                        */
	uint32_t history;                     /* bits of an amax                   */
	struct qs_quantise_operand operand;   /* describes all of the above        */
};

static struct bench one, two;

static uint64_t address(const void *p)
{
	return (uint64_t)(uintptr_t)p;
}

/* A matrix of `value` with padding of the largest finite number, which would show in amax; both
 * targets wanted, no history. */
static void fill(struct bench *bench, int64_t inner, int64_t outer, int64_t ld, float value)
{
	memset(bench, 0, sizeof *bench);
	memset(bench->straight, GUARD, sizeof bench->straight);
	memset(bench->turned, GUARD, sizeof bench->turned);
	memset(bench->partials, GUARD, sizeof bench->partials);
	ck_assert_int_le(outer * ld, ROOM);
	for (int64_t i = 0; i < ROOM; i++)
		bench->source[i] =
		        i < outer * ld && i % ld < inner ? qs_oracle_float_to_bf16(value) : 0x7f7f;
	bench->operand = (struct qs_quantise_operand){
	        .source = address(bench->source),
	        .straight = address(bench->straight),
	        .turned = address(bench->turned),
	        .scale = address(bench->scale),
	        .partials = address(bench->partials),
	        .ld = ld,
	        .inner = inner,
	        .outer = outer,
	        .blocks = {1, 1},
	};
}

static void predict(struct bench *bench, float amax)
{
	bench->history = bits_of(amax);
	bench->operand.history = address(&bench->history);
}

static void put(struct bench *bench, int64_t outer, int64_t inner, uint16_t bits)
{
	bench->source[outer * bench->operand.ld + inner] = bits;
}

static uint8_t straight(const struct bench *bench, int64_t outer, int64_t inner)
{
	return bench->straight[outer * qs_k_padded(bench->operand.inner) + inner];
}

static uint8_t turned(const struct bench *bench, int64_t outer, int64_t inner)
{
	return bench->turned[inner * qs_k_padded(bench->operand.outer) + outer];
}

static const struct qs_oracle_kernel *kernel_named(const char *name)
{
	const struct qs_oracle_kernel *kernel = qs_oracle_kernels;
	while (kernel->name && strcmp(kernel->name, name) != 0)
		kernel++;
	ck_assert_msg(kernel->name != NULL, "no reference of %s", name);
	return kernel;
}

/* One launch over one or two operands. */
static void launch(const char *name, int turn, unsigned threads, const struct bench *a,
                   const struct bench *b)
{
	struct qs_quantise_args args = {0};
	void *params[] = {&args};
	if (a)
		args.operand[0] = a->operand;
	if (b)
		args.operand[1] = b->operand;
	kernel_named(name)->run(params, args.operand[0].blocks[turn] + args.operand[1].blocks[turn],
	                        threads);
}

static void quantise_both(const struct bench *a, const struct bench *b)
{
	launch(QS_KERNEL_QUANTISE, 0, QS_QUANTISE_THREADS, a, b);
	launch(QS_KERNEL_REPAIR, 1, QS_QUANTISE_THREADS, a, b);
}

static void quantise(const struct bench *bench)
{
	quantise_both(bench, NULL);
}

static void quantise_rows(struct bench *bench)
{
	bench->operand.turned = 0;
	launch(QS_KERNEL_QUANTISE_ROWS, 0, QS_ROWS_THREADS, bench, NULL);
}

static void quantise_columns(struct bench *bench)
{
	bench->operand.straight = 0;
	launch(QS_KERNEL_AMAX_COLUMNS, 0, QS_QUANTISE_THREADS, bench, NULL);
	launch(QS_KERNEL_CAST_COLUMNS, 1, QS_QUANTISE_THREADS, bench, NULL);
}

START_TEST(every_kernel_has_a_reference_with_the_size_of_its_argument)
{
	const char *const names[] = {QS_KERNEL_QUANTISE, QS_KERNEL_REPAIR, QS_KERNEL_QUANTISE_ROWS,
	                             QS_KERNEL_AMAX_COLUMNS, QS_KERNEL_CAST_COLUMNS};
	for (int i = 0; i < 5; i++) {
		ck_assert_uint_eq(kernel_named(names[i])->param_bytes[0], 176);
		ck_assert_uint_eq(kernel_named(names[i])->param_bytes[1], 0);
	}
}
END_TEST

/* ---- scales --------------------------------------------------------------------------------- */

START_TEST(every_amax_is_moved_between_a_quarter_and_half_of_the_format_by_a_power_of_two)
{
	const float most = _i == QS_FP8_E5M2 ? 57344 : 448;
	fill(&one, 1, 1, 1, 0);
	one.operand.format = (uint32_t)_i;
	for (uint32_t bits = 1; bits < 0x7f80; bits++) {
		int exponent;
		put(&one, 0, 0, (uint16_t)(bits | (bits % 2 ? 0x8000 : 0)));
		quantise(&one);
		const float amax = fmaxf(qs_oracle_bf16_to_float((uint16_t)bits), 0x1p-100f);
		const float moved = amax / one.scale[0];
		if (frexpf(one.scale[0], &exponent) != 0.5f || moved <= most / 4 ||
		    moved > most / 2)
			ck_abort_msg("amax %a: scale %a", (double)amax, (double)one.scale[0]);
	}
}
END_TEST

START_TEST(the_scale_undoes_the_cast)
{
	fill(&one, 7, 3, 7, 0.25f);
	put(&one, 1, 2, qs_oracle_float_to_bf16(-3.5f));
	quantise(&one);
	ck_assert_float_eq(one.scale[0], 0x1p-6f);         /* 3.5 * 64 = 224 */
	ck_assert_uint_eq(straight(&one, 1, 2), 0xf6);     /* -224           */
	ck_assert_uint_eq(straight(&one, 0, 0), 0x58);     /* 16             */
	ck_assert_uint_eq(one.partials[0], bits_of(3.5f)); /* no prediction  */
	ck_assert_uint_eq(one.partials[1], GUARD * 0x01010101u);
}
END_TEST

START_TEST(amax_ignores_nan_and_inf_which_spoil_only_their_own_place)
{
	const uint16_t odd[] = {0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x7f81};
	fill(&one, 8, 5, 8, 1);
	one.operand.format = (uint32_t)_i;
	for (int i = 0; i < 5; i++)
		put(&one, i, i, odd[i]);
	quantise(&one);
	const uint8_t code = straight(&one, 0, 1);
	ck_assert_uint_eq(code, _i == QS_FP8_E5M2 ? 0x74 : 0x70); /* 2^14, 2^7 */
	for (int o = 0; o < 5; o++)
		for (int i = 0; i < 8; i++) {
			ck_assert_uint_eq(straight(&one, o, i), o == i ? 0x7f : code);
			ck_assert_uint_eq(turned(&one, o, i), o == i ? 0x7f : code);
		}
}
END_TEST

START_TEST(a_zero_matrix_has_scale_one_and_keeps_its_signs)
{
	fill(&one, 5, 2, 5, 0);
	put(&one, 1, 1, 0x8000);
	predict(&one, _i ? 3.0f : 0);
	quantise(&one);
	ck_assert_float_eq(one.scale[0], 1);
	ck_assert_uint_eq(straight(&one, 0, 0), 0x00);
	ck_assert_uint_eq(straight(&one, 1, 1), 0x80);
	ck_assert_uint_eq(one.history, 0);
}
END_TEST

START_TEST(a_matrix_of_nan_alone_has_scale_one)
{
	fill(&one, 5, 2, 5, NAN);
	quantise(&one);
	ck_assert_float_eq(one.scale[0], 1);
	ck_assert_uint_eq(straight(&one, 1, 4), QS_FP8_NAN);
	ck_assert_uint_eq(turned(&one, 1, 4), QS_FP8_NAN);
}
END_TEST

START_TEST(amax_below_the_floor_is_raised_to_it)
{
	const float values[] = {0x1p-100f, 0x1p-101f, 0x1p-110f, 0x1p-133f};
	const uint8_t codes[] = {0x70, 0x68, 0x20, 0x00}; /* 2^7, 2^6, 2^-3, 2^-26 */
	for (int i = 0; i < 4; i++) {
		fill(&one, 3, 1, 3, values[i]);
		quantise(&one);
		ck_assert_float_eq(one.scale[0], 0x1p-107f);
		ck_assert_uint_eq(straight(&one, 0, 0), codes[i]);
	}
}
END_TEST

/* Under amax 16384 the scale is 1. */
START_TEST(every_bf16_becomes_the_nearest_e5m2_and_never_inf)
{
	for (uint32_t first = 0; first < 0x10000; first += ROOM) {
		fill(&one, ROOM, 1, ROOM, 0);
		one.operand.turned = 0;
		one.operand.format = QS_FP8_E5M2;
		predict(&one, 16384);
		for (uint32_t i = 0; i < ROOM; i++)
			put(&one, 0, i, (uint16_t)(first + i));
		launch(QS_KERNEL_QUANTISE, 0, QS_QUANTISE_THREADS, &one, NULL);
		for (uint32_t i = 0; i < ROOM; i++)
			EXPECT(one.straight[i], nearest_e5m2((uint16_t)(first + i)));
	}
}
END_TEST

/* ---- predictions ---------------------------------------------------------------------------- */

START_TEST(without_a_prediction_the_first_kernel_only_measures)
{
	fill(&one, 5, 4, 5, 3);
	predict(&one, 0);
	launch(QS_KERNEL_QUANTISE, 0, QS_QUANTISE_THREADS, &one, NULL);
	for (int i = 0; i < ROOM; i++)
		EXPECT(one.straight[i] | one.turned[i] << 8, GUARD | GUARD << 8);
	ck_assert_uint_eq(one.partials[0], bits_of(3));
}
END_TEST

START_TEST(a_good_prediction_is_kept_and_the_history_follows)
{
	fill(&one, 5, 4, 5, 3);
	predict(&one, 5);
	quantise(&one);
	ck_assert_uint_eq(one.partials[0], bits_of(3) | bits_of(5) >> 16);
	ck_assert_float_eq(one.scale[0], 1.0f / 32);   /* of 5, not of 3 */
	ck_assert_uint_eq(straight(&one, 3, 4), 0x6c); /* 96 */
	ck_assert_uint_eq(one.history, bits_of(3));
}
END_TEST

/* Whether the repair casts shows in a byte that is changed before it. */
static int repairs(float predicted, uint16_t amax, uint32_t format)
{
	fill(&one, 1, 1, 1, 0);
	put(&one, 0, 0, amax);
	one.operand.format = format;
	predict(&one, predicted);
	launch(QS_KERNEL_QUANTISE, 0, QS_QUANTISE_THREADS, &one, NULL);
	one.straight[0] ^= 0xff;
	const uint8_t before = one.straight[0];
	launch(QS_KERNEL_REPAIR, 1, QS_QUANTISE_THREADS, &one, NULL);
	return one.straight[0] != before;
}

START_TEST(predictions_are_kept_from_a_128th_of_the_format_to_all_of_it)
{
	ck_assert(!repairs(224, 0x43e0, QS_FP8_E4M3)); /* 448 */
	ck_assert(repairs(224, 0x43e1, QS_FP8_E4M3));
	ck_assert(!repairs(224, 0x4060, QS_FP8_E4M3)); /* 3.5 */
	ck_assert(repairs(224, 0x405f, QS_FP8_E4M3));
	ck_assert(!repairs(28672, 0x4760, QS_FP8_E5M2)); /* 57344 */
	ck_assert(repairs(28672, 0x4761, QS_FP8_E5M2));
	ck_assert(!repairs(28672, 0x43e0, QS_FP8_E5M2)); /* 448 */
	ck_assert(repairs(28672, 0x43df, QS_FP8_E5M2));
	ck_assert(repairs(0x1p-100f, 0x7f7f, QS_FP8_E4M3)); /* the product overflows */
	ck_assert(repairs(0x1.fep127f, 0x0001, QS_FP8_E4M3));
}
END_TEST

START_TEST(a_repaired_cast_is_that_without_a_prediction)
{
	const float predictions[] = {0x1p-100f, 0.1f, 1e4f, 0x1.fep127f};
	fill(&one, 9, 7, 11, 1);
	put(&one, 2, 3, qs_oracle_float_to_bf16(-9));
	quantise(&one);
	two = one;
	for (int i = 0; i < 4; i++) {
		predict(&one, predictions[i]);
		quantise(&one);
		ck_assert_mem_eq(one.straight, two.straight, ROOM);
		ck_assert_mem_eq(one.turned, two.turned, ROOM);
		ck_assert_float_eq(one.scale[0], two.scale[0]);
		ck_assert_uint_eq(one.history, bits_of(9));
	}
}
END_TEST

START_TEST(a_cast_by_two_different_predictions_is_repaired)
{
	fill(&one, 5, 4, 5, 3);
	one.operand.blocks[0] = 4;
	predict(&one, 5);
	launch(QS_KERNEL_QUANTISE, 0, QS_QUANTISE_THREADS, &one, NULL);
	one.partials[2] = (one.partials[2] & 0xffff0000) | bits_of(6) >> 16;
	launch(QS_KERNEL_REPAIR, 1, QS_QUANTISE_THREADS, &one, NULL);
	ck_assert_float_eq(one.scale[0], 1.0f / 64);   /* of 3 */
	ck_assert_uint_eq(straight(&one, 3, 4), 0x74); /* 192  */
}
END_TEST

static void fill_normal(struct bench *bench, float deviation)
{
	uint32_t state = 1;
	fill(bench, 64, 64, 64, 0);
	for (int i = 0; i < ROOM; i++) {
		float sum = -6;
		for (int j = 0; j < 12; j++)
			sum += (float)((state = state * 1664525 + 1013904223) >> 8) / 0x1p24f;
		bench->source[i] = qs_oracle_float_to_bf16(sum * deviation);
	}
}

/* Signal to noise of the straight target, in dB. */
static double sqnr(const struct bench *bench)
{
	double signal = 0, noise = 0;
	for (int i = 0; i < ROOM; i++) {
		const double x = (double)qs_oracle_bf16_to_float(bench->source[i]);
		const uint8_t code = bench->straight[i];
		const double y = (double)((bench->operand.format == QS_FP8_E5M2
		                                   ? qs_oracle_e5m2_to_float(code)
		                                   : qs_oracle_e4m3_to_float(code)) *
		                          bench->scale[0]);
		signal += x * x;
		noise += (x - y) * (x - y);
	}
	return 10 * log10(signal / noise);
}

/* What amax / 448 gives as well; e5m2 has one bit less. */
START_TEST(normal_data_keep_their_accuracy_down_to_the_end_of_the_good_range)
{
	const float predictions[] = {0, 0.25f, 1, 4, 8};
	for (uint32_t format = 0; format < 2; format++)
		for (int i = 0; i < 5; i++) {
			fill_normal(&one, 0.1f);
			one.operand.format = format;
			predict(&one, predictions[i]);
			quantise(&one);
			ck_assert_double_gt(sqnr(&one), format == QS_FP8_E5M2 ? 25 : 31);
		}
}
END_TEST

START_TEST(two_good_scales_give_the_same_numbers_in_the_normal_range)
{
	fill_normal(&one, 0.1f);
	fill_normal(&two, 0.1f);
	predict(&two, 4); /* eight times amax */
	quantise(&one);
	quantise(&two);
	ck_assert_float_ne(one.scale[0], two.scale[0]);
	int compared = 0;
	for (int i = 0; i < ROOM; i++) {
		if ((two.straight[i] & 0x7f) <= 8) /* was subnormal, or rounded up from there */
			continue;
		ck_assert_float_eq(qs_oracle_e4m3_to_float(one.straight[i]) * one.scale[0],
		                   qs_oracle_e4m3_to_float(two.straight[i]) * two.scale[0]);
		compared++;
	}
	ck_assert_int_gt(compared, ROOM * 9 / 10);
}
END_TEST

/* ---- layout --------------------------------------------------------------------------------- */

START_TEST(padding_between_vectors_is_not_read)
{
	fill(&one, 5, 9, 11, 2);
	quantise(&one);
	ck_assert_float_eq(one.scale[0], 1.0f / 64);
	fill(&one, 5, 9, 11, 2);
	quantise_rows(&one);
	ck_assert_float_eq(one.scale[8], 1.0f / 64);
	fill(&one, 5, 9, 11, 2);
	quantise_columns(&one);
	ck_assert_float_eq(one.scale[4], 1.0f / 64);
}
END_TEST

/* What lies where after quantising a matrix of ones: rows of k values, zeros to the next multiple
 * of 16, and nothing beyond. */
static void check_layout(const uint8_t *target, int64_t rows, int64_t k)
{
	const int64_t padded = (k + 15) / 16 * 16;
	for (int64_t i = 0; i < ROOM; i++) {
		const unsigned inside = i % padded < k ? 0x70 : 0x00;
		EXPECT(target[i], i < rows * padded ? inside : GUARD);
	}
}

START_TEST(rows_are_zero_in_their_padding_and_nothing_is_written_beyond)
{
	for (int64_t inner = 1; inner <= 34; inner++)
		for (int64_t outer = 1; outer <= 34; outer += 3) {
			fill(&one, inner, outer, inner + 2, 1);
			quantise(&one);
			check_layout(one.straight, outer, inner);
			check_layout(one.turned, inner, outer);
			fill(&one, inner, outer, inner + 2, 1);
			quantise_rows(&one);
			check_layout(one.straight, outer, inner);
			fill(&one, inner, outer, inner + 2, 1);
			quantise_columns(&one);
			check_layout(one.turned, inner, outer);
		}
}
END_TEST

/* A matrix whose elements all differ. */
static void fill_unequal(struct bench *bench)
{
	fill(bench, 33, 18, 35, 0);
	for (int64_t o = 0; o < 18; o++)
		for (int64_t i = 0; i < 33; i++)
			put(bench, o, i, (uint16_t)(0x3e00 + 33 * o + i));
}

START_TEST(turned_is_the_transpose_of_straight)
{
	fill_unequal(&one);
	quantise(&one);
	ck_assert_int_ne(straight(&one, 0, 0), straight(&one, 17, 32));
	for (int64_t o = 0; o < 18; o++)
		for (int64_t i = 0; i < 33; i++)
			ck_assert_uint_eq(straight(&one, o, i), turned(&one, o, i));
}
END_TEST

START_TEST(a_target_that_is_not_wanted_is_not_written)
{
	fill_unequal(&one);
	one.operand.straight = 0;
	predict(&one, 1);
	quantise(&one);
	fill_unequal(&two);
	two.operand.turned = 0;
	predict(&two, 1e9f);
	quantise(&two);
	for (int i = 0; i < ROOM; i++)
		EXPECT(one.straight[i] | two.turned[i] << 8, GUARD | GUARD << 8);
}
END_TEST

START_TEST(each_row_is_quantised_as_if_it_were_alone)
{
	fill_unequal(&one);
	put(&one, 4, 4, qs_oracle_float_to_bf16(-1000));
	quantise_rows(&one);
	for (int64_t o = 0; o < 18; o++) {
		fill(&two, 33, 1, 33, 0);
		memcpy(two.source, one.source + o * one.operand.ld, 33 * sizeof *two.source);
		quantise(&two);
		ck_assert_float_eq(one.scale[o], two.scale[0]);
		ck_assert_mem_eq(one.straight + o * 48, two.straight, 48);
	}
	ck_assert_float_ne(one.scale[3], one.scale[4]);
}
END_TEST

START_TEST(columns_are_quantised_as_the_rows_of_the_transpose)
{
	fill_unequal(&one);
	put(&one, 4, 7, qs_oracle_float_to_bf16(-1000));
	fill(&two, 18, 33, 18, 0);
	for (int64_t o = 0; o < 18; o++)
		for (int64_t i = 0; i < 33; i++)
			put(&two, i, o, one.source[o * 35 + i]);
	quantise_columns(&one);
	quantise_rows(&two);
	ck_assert_mem_eq(one.turned, two.straight, ROOM);
	ck_assert_mem_eq(one.scale, two.scale, sizeof one.scale);
	ck_assert_float_ne(one.scale[6], one.scale[7]);
}
END_TEST

/* ---- launches ------------------------------------------------------------------------------- */

START_TEST(the_number_of_blocks_changes_nothing)
{
	for (uint32_t blocks = 1; blocks <= QS_PARTIALS; blocks += 73) {
		fill(&one, 6, 40, 6, 1);
		put(&one, 39, 5, qs_oracle_float_to_bf16(8));
		one.operand.blocks[0] = blocks;
		one.operand.blocks[1] = QS_PARTIALS / blocks;
		quantise(&one);
		ck_assert_float_eq(one.scale[0], 1.0f / 16);
		ck_assert_uint_eq(one.partials[blocks], GUARD * 0x01010101u);
	}
}
END_TEST

START_TEST(two_operands_of_a_launch_do_not_mix)
{
	fill(&one, 16, 4, 16, 1);
	fill(&two, 24, 2, 24, 7);
	predict(&two, 8);
	quantise_both(&one, &two);
	ck_assert_float_eq(one.scale[0], 1.0f / 128);
	ck_assert_float_eq(two.scale[0], 1.0f / 16);
	ck_assert_uint_eq(straight(&one, 3, 15), 0x70);
	ck_assert_uint_eq(straight(&two, 1, 23), 0x6e);
}
END_TEST

START_TEST(an_operand_without_blocks_is_skipped)
{
	fill(&one, 16, 4, 16, 1);
	quantise_both(NULL, &one);
	ck_assert_float_eq(one.scale[0], 1.0f / 128);
	ck_assert_uint_eq(one.partials[0], bits_of(1));
}
END_TEST

/* Each breaks one clause of quantise.h; the reference must not let it pass. */
static void launch_wrongly(int clause)
{
	fill(&one, 16, 4, 16, 1);
	struct qs_quantise_args args = {.operand = {one.operand}};
	struct qs_quantise_operand *operand = &args.operand[0];
	void *params[] = {&args};
	const char *name = QS_KERNEL_QUANTISE;
	unsigned grid = 1, threads = QS_QUANTISE_THREADS;
	if (clause == 0)
		grid = 2;
	else if (clause == 1)
		threads = QS_ROWS_THREADS;
	else if (clause == 2)
		operand->turned += 8;
	else if (clause == 3)
		operand->straight = operand->turned = 0;
	else if (clause == 4)
		operand->ld = 15;
	else if (clause == 5)
		operand->partials += 4;
	else if (clause == 6)
		operand->format = 2;
	else if (clause == 7)
		operand->blocks[0] = grid = QS_PARTIALS + 1;
	else if (clause == 8)
		operand->blocks[0] = 0, name = QS_KERNEL_REPAIR;
	else if (clause == 9)
		name = QS_KERNEL_QUANTISE_ROWS, threads = QS_ROWS_THREADS;
	else
		name = QS_KERNEL_AMAX_COLUMNS;
	kernel_named(name)->run(params, grid, threads);
}
#define CLAUSES 11

START_TEST(a_launch_that_breaks_the_contract_is_not_run)
{
	launch_wrongly(_i);
}
END_TEST

/* ---- launch geometry ------------------------------------------------------------------------ */

START_TEST(small_operands_get_a_block_and_large_ones_the_whole_device)
{
	struct qs_quantise_operand operand = {.inner = 1, .outer = 1, .straight = 16};
	qs_quantise_plan(&operand, 132);
	ck_assert_uint_eq(operand.blocks[0], 1);
	qs_rows_plan(&operand);
	ck_assert_uint_eq(operand.blocks[0], 1);
	operand.inner = operand.outer = (int64_t)1 << 20;
	for (int i = 0; i < 2; i++) {
		operand.turned = i ? 16 : 0;
		qs_quantise_plan(&operand, 132);
		ck_assert_uint_eq(operand.blocks[0], 132 * QS_QUANTISE_BLOCKS_PER_SM);
		qs_quantise_plan(&operand, 1000);
		ck_assert_uint_eq(operand.blocks[0], QS_PARTIALS);
	}
	qs_rows_plan(&operand);
	ck_assert_uint_eq(operand.blocks[0], 1 << 20); /* a row fills a block */
	operand.outer = (int64_t)1 << 40;
	qs_rows_plan(&operand);
	ck_assert_uint_eq(operand.blocks[0], QS_ROWS_BLOCKS);
	qs_columns_plan(&operand, 132);
	ck_assert_uint_eq(operand.blocks[0], 132 * QS_QUANTISE_BLOCKS_PER_SM);
	ck_assert_uint_eq(operand.blocks[1], 132 * QS_QUANTISE_BLOCKS_PER_SM);
}
END_TEST

START_TEST(blocks_grow_with_the_work_until_then)
{
	struct qs_quantise_operand operand = {.inner = 65, .outer = 129, .straight = 16};
	qs_quantise_plan(&operand, 132);
	ck_assert_uint_eq(operand.blocks[0], 3); /* 129 * 80 elements of 4096 */
	operand.turned = 16;
	qs_quantise_plan(&operand, 132);
	ck_assert_uint_eq(operand.blocks[0], 4); /* 2 tiles along both */
	qs_rows_plan(&operand);
	ck_assert_uint_eq(operand.blocks[0], 9); /* 16 rows each, of 32 threads */
	qs_columns_plan(&operand, 132);
	ck_assert_uint_eq(operand.blocks[0], 2 * QS_COLUMN_SLICES);
	ck_assert_uint_eq(operand.blocks[1], 4);
}
END_TEST

START_TEST(a_history_makes_the_repair_small)
{
	struct qs_quantise_operand operand = {.inner = 8192, .outer = 8192, .straight = 16};
	qs_quantise_plan(&operand, 132);
	ck_assert_uint_eq(operand.blocks[1], operand.blocks[0]);
	operand.history = 4;
	qs_quantise_plan(&operand, 132);
	ck_assert_uint_eq(operand.blocks[1], 132);
}
END_TEST

/* A device of 132 multiprocessors runs 528 blocks at once. */
START_TEST(two_operands_share_the_blocks_that_run_at_once)
{
	struct qs_quantise_args args = {{{.straight = 16, .inner = 4096, .outer = 4096},
	                                 {.turned = 16, .inner = 4096, .outer = 3 * 4096}}};
	for (int i = 0; i < 2; i++)
		qs_quantise_plan(&args.operand[i], 132);
	ck_assert_uint_eq(args.operand[0].blocks[0], 528);
	struct qs_quantise_args alone = args;
	alone.operand[1].blocks[0] = 0;
	qs_quantise_share(&args, 132);
	ck_assert_uint_eq(args.operand[0].blocks[0], 132);
	ck_assert_uint_eq(args.operand[1].blocks[0], 396);
	qs_quantise_share(&alone, 132);
	ck_assert_uint_eq(alone.operand[0].blocks[0], 528);
}
END_TEST

START_TEST(a_small_operand_beside_a_large_one_keeps_a_block)
{
	struct qs_quantise_args args = {{{.straight = 16, .inner = 64, .outer = 1},
	                                 {.straight = 16, .inner = 1 << 20, .outer = 1 << 20}}};
	for (int i = 0; i < 2; i++)
		qs_quantise_plan(&args.operand[i], 132);
	qs_quantise_share(&args, 132);
	ck_assert_uint_eq(args.operand[0].blocks[0], 1);
	ck_assert_uint_eq(args.operand[1].blocks[0], 527);
	args.operand[0].blocks[0] = 5;
	args.operand[1].blocks[0] = 6;
	qs_quantise_share(&args, 132);
	ck_assert_uint_eq(args.operand[0].blocks[0], 5);
	ck_assert_uint_eq(args.operand[1].blocks[0], 6);
}
END_TEST

START_TEST(a_row_gets_the_threads_that_hold_it)
{
	const int64_t inner[] = {1, 2048, 2049, 4096, 16384, 16385, 32768, (int64_t)1 << 40};
	const int threads[] = {32, 32, 64, 64, 256, 512, 512, 512};
	for (int i = 0; i < 8; i++)
		ck_assert_int_eq(qs_row_threads(inner[i]), threads[i]);
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

static TCase *scales(void)
{
	TCase *tests = tcase_create("scales");
	tcase_add_test(tests, every_kernel_has_a_reference_with_the_size_of_its_argument);
	tcase_add_loop_test(
	        tests,
	        every_amax_is_moved_between_a_quarter_and_half_of_the_format_by_a_power_of_two, 0,
	        2);
	tcase_add_test(tests, the_scale_undoes_the_cast);
	tcase_add_loop_test(tests, amax_ignores_nan_and_inf_which_spoil_only_their_own_place, 0, 2);
	tcase_add_loop_test(tests, a_zero_matrix_has_scale_one_and_keeps_its_signs, 0, 2);
	tcase_add_test(tests, a_matrix_of_nan_alone_has_scale_one);
	tcase_add_test(tests, amax_below_the_floor_is_raised_to_it);
	tcase_add_test(tests, every_bf16_becomes_the_nearest_e5m2_and_never_inf);
	tcase_set_timeout(tests, 60);
	return tests;
}

static TCase *predictions(void)
{
	TCase *tests = tcase_create("predictions");
	tcase_add_test(tests, without_a_prediction_the_first_kernel_only_measures);
	tcase_add_test(tests, a_good_prediction_is_kept_and_the_history_follows);
	tcase_add_test(tests, predictions_are_kept_from_a_128th_of_the_format_to_all_of_it);
	tcase_add_test(tests, a_repaired_cast_is_that_without_a_prediction);
	tcase_add_test(tests, a_cast_by_two_different_predictions_is_repaired);
	tcase_add_test(tests, normal_data_keep_their_accuracy_down_to_the_end_of_the_good_range);
	tcase_add_test(tests, two_good_scales_give_the_same_numbers_in_the_normal_range);
	tcase_set_timeout(tests, 60);
	return tests;
}

static TCase *layout(void)
{
	TCase *tests = tcase_create("layout");
	tcase_add_test(tests, padding_between_vectors_is_not_read);
	tcase_add_test(tests, rows_are_zero_in_their_padding_and_nothing_is_written_beyond);
	tcase_add_test(tests, turned_is_the_transpose_of_straight);
	tcase_add_test(tests, a_target_that_is_not_wanted_is_not_written);
	tcase_add_test(tests, each_row_is_quantised_as_if_it_were_alone);
	tcase_add_test(tests, columns_are_quantised_as_the_rows_of_the_transpose);
	tcase_set_timeout(tests, 60);
	return tests;
}

static TCase *launches(void)
{
	TCase *tests = tcase_create("launches");
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
	tcase_add_test(tests, a_history_makes_the_repair_small);
	tcase_add_test(tests, two_operands_share_the_blocks_that_run_at_once);
	tcase_add_test(tests, a_small_operand_beside_a_large_one_keeps_a_block);
	tcase_add_test(tests, a_row_gets_the_threads_that_hold_it);
	tcase_add_test(tests, k_is_padded_to_the_next_multiple_of_16);
	tcase_set_timeout(tests, 60);
	return tests;
}

int main(void)
{
	Suite *suite = suite_create("oracle");
	TCase *contract = tcase_create("contract");
	suite_add_tcase(suite, conversions());
	suite_add_tcase(suite, scales());
	suite_add_tcase(suite, predictions());
	suite_add_tcase(suite, layout());
	suite_add_tcase(suite, launches());
	suite_add_tcase(suite, geometry());
	tcase_add_loop_test_raise_signal(contract, a_launch_that_breaks_the_contract_is_not_run,
	                                 SIGABRT, 0, CLAUSES);
	suite_add_tcase(suite, contract);
	return qs_suite_main(suite);
}
