/* References of the kernels of kernels/quantise.cu, in the same words as kernels/quantise.h.
 *
 * Element by element, no tiles, no vectors, one thread. A launch that breaks the contract of the
 * header (grid, block size, alignment, missing maxima) ends the program with a message: a GPU would
 * answer with a fault or with nonsense.
 */
#include "tests/oracle/oracle.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/quantise.h"
#include "kernels/sample.h"

static void demand(int holds, const char *kernel, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "oracle of %s: %s\n", kernel, what);
	abort();
}

/* ---- numbers -------------------------------------------------------------------------------- */

static float float_of(uint32_t bits)
{
	float value;
	memcpy(&value, &bits, sizeof value);
	return value;
}

static float format_max(uint32_t format)
{
	return format == QS_FP8_E5M2 ? QS_E5M2_MAX : QS_E4M3_MAX;
}

/* As qs_oracle_float_to_e4m3, with one mantissa bit less and one exponent bit more. Inf, which is
 * another code of this format, is not made: finite values saturate, others become NaN. */
static uint8_t float_to_e5m2(float value)
{
	uint32_t bits, code;
	memcpy(&bits, &value, sizeof bits);
	const uint32_t magnitude = bits & 0x7fffffff;
	if (!isfinite(value))
		return QS_FP8_NAN;
	if (fabsf(value) < 0x1p-14f)
		code = (uint32_t)rintf(fabsf(value) * 0x1p16f);
	else
		code = (magnitude + 0xfffff + (magnitude >> 21 & 1)) / (1 << 21) - (127 - 15) * 4;
	if (code > 0x7b)
		code = 0x7b;
	return (uint8_t)(code | (signbit(value) ? 0x80 : 0));
}

/* A finite value saturates even where its product overflows. */
static uint8_t quantise(uint16_t bits, float inverse, uint32_t format)
{
	const float value = qs_oracle_bf16_to_float(bits), most = format_max(format);
	const float product = fminf(fmaxf(value * inverse, -most), most);
	if (!isfinite(value))
		return QS_FP8_NAN;
	return format == QS_FP8_E5M2 ? float_to_e5m2(product) : qs_oracle_float_to_e4m3(product);
}

/* The power of two that moves amax into the upper half of the lower half of the format. */
static float inverse_of(float amax, uint32_t format)
{
	const float half = format_max(format) / 2;
	int exponent;
	if (amax == 0)
		return 1;
	amax = fmaxf(amax, QS_AMAX_FLOOR);
	frexpf(half / amax, &exponent); /* half / amax = 0.5..1 * 2^exponent */
	return ldexpf(1, exponent - 1);
}

/* Bits of a finite |x| as those of an fp32; 0 for others. Magnitudes of one sign order as their
 * bits do; from 0x7f80 on they are not finite. */
static uint32_t magnitude_of(uint16_t bits)
{
	const uint32_t magnitude = bits & 0x7fff;
	return magnitude < 0x7f80 ? magnitude << 16 : 0;
}

static uint32_t larger(uint32_t left, uint32_t right)
{
	return left > right ? left : right;
}

/* ---- operands ------------------------------------------------------------------------------- */

static uint16_t element(const struct qs_quantise_operand *operand, int64_t outer, int64_t inner)
{
	return ((const uint16_t *)(uintptr_t)operand->source)[outer * operand->ld + inner];
}

static void demand_operand(const struct qs_quantise_operand *operand, const char *kernel)
{
	demand(operand->inner > 0 && operand->outer > 0, kernel, "empty operand");
	demand(operand->outer == 1 || operand->ld >= operand->inner, kernel, "ld below inner");
	demand(operand->source && operand->source % 2 == 0, kernel, "source is not aligned to 2");
	demand(operand->straight % 16 == 0, kernel, "straight is not aligned to 16");
	demand(operand->turned % 16 == 0, kernel, "turned is not aligned to 16");
	demand(operand->scale && operand->scale % 4 == 0, kernel, "scale is not aligned to 4");
	demand(operand->history % 4 == 0, kernel, "history is not aligned to 4");
	demand(operand->format <= QS_FP8_E5M2, kernel, "unknown format");
	demand(operand->pad == 0, kernel, "pad is not zero");
}

static void demand_partials(const struct qs_quantise_operand *operand, const char *kernel)
{
	demand(operand->partials && operand->partials % 16 == 0, kernel,
	       "partials are not aligned to 16");
}

static void demand_launch(const struct qs_quantise_args *args, int turn, unsigned grid,
                          int threads_fit, const char *kernel)
{
	demand(grid == args->operand[0].blocks[turn] + args->operand[1].blocks[turn], kernel,
	       "the grid is not the sum of the operands' blocks");
	demand(grid > 0, kernel, "empty grid");
	demand(threads_fit, kernel, "wrong number of threads");
	for (int i = 0; i < 2; i++)
		if (args->operand[i].blocks[turn])
			demand_operand(&args->operand[i], kernel);
}

/* Writes the wanted targets, zeros in their padding. The factor of an element is that of its place
 * along inner, that of its place along outer, or the first, by whether the step is 1. */
static void cast_operand(const struct qs_quantise_operand *operand, const float *inverse,
                         int inner_step, int outer_step)
{
	uint8_t *straight = (uint8_t *)(uintptr_t)operand->straight;
	uint8_t *turned = (uint8_t *)(uintptr_t)operand->turned;
	const int64_t width = qs_k_padded(operand->inner), height = qs_k_padded(operand->outer);
	if (straight)
		memset(straight, 0, (size_t)qs_straight_bytes(operand));
	if (turned)
		memset(turned, 0, (size_t)qs_turned_bytes(operand));
	for (int64_t o = 0; o < operand->outer; o++)
		for (int64_t i = 0; i < operand->inner; i++) {
			const float factor = inverse[i * inner_step + o * outer_step];
			const uint8_t byte =
			        quantise(element(operand, o, i), factor, operand->format);
			if (straight)
				straight[o * width + i] = byte;
			if (turned)
				turned[i * height + o] = byte;
		}
}

/* ---- qs_quantise ---------------------------------------------------------------------------- */

static uint32_t amax_of_vector(const struct qs_quantise_operand *operand, int64_t outer)
{
	uint32_t most = 0;
	for (int64_t i = 0; i < operand->inner; i++)
		most = larger(most, magnitude_of(element(operand, outer, i)));
	return most;
}

/* Which vectors a block sees is not part of the contract; here every blocks-th. */
static void quantise_operand(const struct qs_quantise_operand *operand)
{
	uint32_t *partials = (uint32_t *)(uintptr_t)operand->partials;
	const uint32_t *history = (const uint32_t *)(uintptr_t)operand->history;
	const uint32_t predicted = history ? *history : 0;
	const float inverse = inverse_of(float_of(predicted), operand->format);
	for (uint32_t block = 0; block < operand->blocks[0]; block++) {
		uint32_t most = 0;
		for (int64_t o = block; o < operand->outer; o += operand->blocks[0])
			most = larger(most, amax_of_vector(operand, o));
		partials[block] = most | predicted >> 16;
	}
	if (predicted)
		cast_operand(operand, &inverse, 0, 0);
}

static void run_quantise(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_quantise_args *args = params[0];
	demand_launch(args, 0, grid_x, block_x == QS_QUANTISE_THREADS, QS_KERNEL_QUANTISE);
	for (int i = 0; i < 2; i++) {
		const struct qs_quantise_operand *operand = &args->operand[i];
		if (operand->blocks[0] == 0)
			continue;
		demand_partials(operand, QS_KERNEL_QUANTISE);
		demand(operand->straight || operand->turned, QS_KERNEL_QUANTISE, "no target");
		demand(operand->blocks[0] <= QS_PARTIALS, QS_KERNEL_QUANTISE, "too many blocks");
		quantise_operand(operand);
	}
}

/* ---- qs_repair ------------------------------------------------------------------------------ */

/* True if casting by the scale of `predicted` keeps amax in the good range. */
static bool is_good(float predicted, float amax, uint32_t format)
{
	const float got = fmaxf(amax, QS_AMAX_FLOOR) * inverse_of(predicted, format);
	const float most = format_max(format);
	return predicted != 0 && amax != 0 && got >= most / QS_PREDICTION_LOSS && got <= most;
}

static void repair_operand(const struct qs_quantise_operand *operand)
{
	const uint32_t *partials = (const uint32_t *)(uintptr_t)operand->partials;
	uint32_t *history = (uint32_t *)(uintptr_t)operand->history, most = 0;
	const float predicted = float_of(partials[0] << 16);
	bool good = true;
	for (uint32_t block = 0; block < operand->blocks[0]; block++) {
		most = larger(most, partials[block] & 0xffff0000);
		good = good && partials[block] << 16 == partials[0] << 16;
	}
	good = good && is_good(predicted, float_of(most), operand->format);
	const float inverse = inverse_of(good ? predicted : float_of(most), operand->format);
	if (!good)
		cast_operand(operand, &inverse, 0, 0);
	*(float *)(uintptr_t)operand->scale = 1 / inverse;
	if (history)
		*history = most;
}

static void run_repair(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_quantise_args *args = params[0];
	demand_launch(args, 1, grid_x, block_x == QS_QUANTISE_THREADS, QS_KERNEL_REPAIR);
	for (int i = 0; i < 2; i++) {
		const struct qs_quantise_operand *operand = &args->operand[i];
		if (operand->blocks[1] == 0)
			continue;
		demand_partials(operand, QS_KERNEL_REPAIR);
		demand(operand->blocks[0] > 0 && operand->blocks[0] <= QS_PARTIALS,
		       QS_KERNEL_REPAIR, "no partials, or too many");
		demand(operand->straight || operand->turned, QS_KERNEL_REPAIR, "no target");
		repair_operand(operand);
	}
}

/* ---- a scale for each row or column --------------------------------------------------------- */

/* Writes the scales of `count` maxima and returns their inverses, to be freed. */
static float *scale_all(const struct qs_quantise_operand *operand, const uint32_t *most,
                        int64_t count)
{
	float *scale = (float *)(uintptr_t)operand->scale;
	float *inverse = malloc((size_t)count * sizeof *inverse);
	demand(inverse != NULL, "rows and columns", "no memory");
	for (int64_t i = 0; i < count; i++) {
		inverse[i] = inverse_of(float_of(most[i]), operand->format);
		scale[i] = 1 / inverse[i];
	}
	return inverse;
}

static uint32_t *maxima(int64_t count)
{
	uint32_t *most = calloc((size_t)count, sizeof *most);
	demand(most != NULL, "rows and columns", "no memory");
	return most;
}

static void quantise_rows(const struct qs_quantise_operand *operand)
{
	uint32_t *most = maxima(operand->outer);
	for (int64_t o = 0; o < operand->outer; o++)
		most[o] = amax_of_vector(operand, o);
	float *inverse = scale_all(operand, most, operand->outer);
	cast_operand(operand, inverse, 0, 1);
	free(inverse);
	free(most);
}

static void run_quantise_rows(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_quantise_args *args = params[0];
	demand_launch(args, 0, grid_x, block_x == QS_ROWS_THREADS, QS_KERNEL_QUANTISE_ROWS);
	for (int i = 0; i < 2; i++) {
		const struct qs_quantise_operand *operand = &args->operand[i];
		if (operand->blocks[0] == 0)
			continue;
		demand(operand->straight && !operand->turned, QS_KERNEL_QUANTISE_ROWS,
		       "the target is not straight alone");
		quantise_rows(operand);
	}
}

/* Here a slice is every QS_COLUMN_SLICES-th vector. */
static void amax_columns(const struct qs_quantise_operand *operand)
{
	const int64_t width = qs_k_padded(operand->inner);
	uint16_t *partials = (uint16_t *)(uintptr_t)operand->partials;
	memset(partials, 0, (size_t)(width * QS_COLUMN_SLICES) * sizeof *partials);
	for (int64_t o = 0; o < operand->outer; o++)
		for (int64_t i = 0; i < operand->inner; i++) {
			uint16_t *most = &partials[o % QS_COLUMN_SLICES * width + i];
			const uint32_t magnitude = magnitude_of(element(operand, o, i));
			*most = (uint16_t)(larger(magnitude, (uint32_t)*most << 16) >> 16);
		}
}

static void cast_columns(const struct qs_quantise_operand *operand)
{
	const int64_t width = qs_k_padded(operand->inner);
	const uint16_t *partials = (const uint16_t *)(uintptr_t)operand->partials;
	uint32_t *most = maxima(operand->inner);
	for (int64_t i = 0; i < width * QS_COLUMN_SLICES; i++)
		if (i % width < operand->inner)
			most[i % width] = larger(most[i % width], (uint32_t)partials[i] << 16);
	float *inverse = scale_all(operand, most, operand->inner);
	cast_operand(operand, inverse, 1, 0);
	free(inverse);
	free(most);
}

static void run_columns(const struct qs_quantise_args *args, int turn, const char *kernel)
{
	for (int i = 0; i < 2; i++) {
		const struct qs_quantise_operand *operand = &args->operand[i];
		if (operand->blocks[turn] == 0)
			continue;
		demand_partials(operand, kernel);
		demand(operand->turned && !operand->straight, kernel,
		       "the target is not turned alone");
		if (turn)
			cast_columns(operand);
		else
			amax_columns(operand);
	}
}

static void run_amax_columns(void *const *params, unsigned grid_x, unsigned block_x)
{
	demand_launch(params[0], 0, grid_x, block_x == QS_QUANTISE_THREADS, QS_KERNEL_AMAX_COLUMNS);
	run_columns(params[0], 0, QS_KERNEL_AMAX_COLUMNS);
}

static void run_cast_columns(void *const *params, unsigned grid_x, unsigned block_x)
{
	demand_launch(params[0], 1, grid_x, block_x == QS_QUANTISE_THREADS, QS_KERNEL_CAST_COLUMNS);
	run_columns(params[0], 1, QS_KERNEL_CAST_COLUMNS);
}

/* ---- kept copies against their sources ------------------------------------------------------ */

static bool is_same(const struct qs_sample_args *args, int64_t row, int64_t col)
{
	const uint16_t bits = ((const uint16_t *)(uintptr_t)args->source)[row * args->ld + col];
	const uint8_t *kept = (const uint8_t *)(uintptr_t)args->data;
	const float scale = *(const float *)(uintptr_t)args->scale;
	const int64_t at = args->flags & QS_SAMPLE_TURNED ? col * qs_k_padded(args->rows) + row
	                                                  : row * qs_k_padded(args->cols) + col;
	return kept[at] == quantise(bits, 1 / scale, QS_FP8_E4M3);
}

static uint32_t amax_of_source(const struct qs_sample_args *args)
{
	const uint16_t *source = (const uint16_t *)(uintptr_t)args->source;
	uint32_t amax = 0;
	for (int64_t row = 0; row < args->rows; row++)
		for (int64_t col = 0; col < args->cols; col++) {
			const uint32_t bits = (source[row * args->ld + col] & 0x7fffu) << 16;
			amax = bits < 0x7f800000 && bits > amax ? bits : amax;
		}
	return amax;
}

static void run_fp8_sample(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_sample_args *args = params[0];
	struct qs_hash_record *record = (struct qs_hash_record *)(uintptr_t)args->record;
	struct qs_hash_work *work = (struct qs_hash_work *)(uintptr_t)args->work;
	const int64_t across = qs_sample_across(args->cols);
	bool same = true;
	qs_oracle_sample_demand(args, grid_x, block_x);
	for (int64_t row = 0; row < args->rows; row++)
		for (int64_t col = 0; col < args->cols; col++) {
			const int64_t patch =
			        row / QS_SAMPLE_PATCH_ROWS * across + col / QS_SAMPLE_PATCH_COLS;
			if (patch % QS_SAMPLE_TURNS == record->turn % QS_SAMPLE_TURNS)
				same = same && is_same(args, row, col);
		}
	qs_oracle_sample_judge(args, same, &record->turn);
	if (!same)
		record->amax = work->repair = amax_of_source(args);
}

const struct qs_oracle_kernel qs_oracle_kernels[] = {
        {QS_KERNEL_QUANTISE, run_quantise, {sizeof(struct qs_quantise_args)}},
        {QS_KERNEL_REPAIR, run_repair, {sizeof(struct qs_quantise_args)}},
        {QS_KERNEL_QUANTISE_ROWS, run_quantise_rows, {sizeof(struct qs_quantise_args)}},
        {QS_KERNEL_AMAX_COLUMNS, run_amax_columns, {sizeof(struct qs_quantise_args)}},
        {QS_KERNEL_CAST_COLUMNS, run_cast_columns, {sizeof(struct qs_quantise_args)}},
        {QS_KERNEL_FP8_SAMPLE, run_fp8_sample, {sizeof(struct qs_sample_args)}},
        {0},
};
