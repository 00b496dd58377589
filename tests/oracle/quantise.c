/* References of the kernels of kernels/quantise.cu, in the same words as kernels/quantise.h.
 *
 * Element by element, no tiles, no vectors, one thread. A launch that breaks the contract of the
 * header (grid, block size, alignment, missing maxima) ends the program with a message: a GPU would
 * answer with a fault or with nonsense.
 */
#include "tests/oracle/oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/quantise.h"

static void demand(int holds, const char *kernel, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "oracle of %s: %s\n", kernel, what);
	abort();
}

static void demand_operand(const struct qs_quantise_operand *operand, const char *kernel)
{
	const int64_t k = operand->transpose ? operand->outer : operand->inner;
	demand(operand->inner > 0 && operand->outer > 0, kernel, "empty operand");
	demand(operand->outer == 1 || operand->ld >= operand->inner, kernel, "ld below inner");
	demand(operand->source && operand->source % 2 == 0, kernel, "source is not aligned to 2");
	demand(operand->k_padded == qs_k_padded(k), kernel, "k_padded is not k rounded up to 16");
}

static void demand_launch(const struct qs_quantise_args *args, unsigned grid, int threads_fit,
                          const char *kernel)
{
	demand(grid == args->operand[0].blocks + args->operand[1].blocks, kernel,
	       "the grid is not the sum of the operands' blocks");
	demand(grid > 0, kernel, "empty grid");
	demand(threads_fit, kernel, "wrong number of threads");
	demand(args->partials && args->partials % 4 == 0, kernel, "partials are not aligned to 4");
	for (int i = 0; i < 2; i++)
		if (args->operand[i].blocks)
			demand_operand(&args->operand[i], kernel);
}

static const uint16_t *vector_of(const struct qs_quantise_operand *operand, int64_t index)
{
	return (const uint16_t *)(uintptr_t)operand->source + index * operand->ld;
}

static uint32_t *partials_of(const struct qs_quantise_args *args, int operand)
{
	return (uint32_t *)(uintptr_t)args->partials + operand * QS_AMAX_BLOCKS;
}

/* ---- qs_amax -------------------------------------------------------------------------------- */

/* Bits of the largest finite |x| of one vector, as those of an fp32. Magnitudes of one sign order
 * as their bits do; from 0x7f80 on they are not finite. */
static uint32_t amax_of_vector(const struct qs_quantise_operand *operand, int64_t index)
{
	const uint16_t *vector = vector_of(operand, index);
	uint32_t most = 0;
	for (int64_t i = 0; i < operand->inner; i++) {
		const uint32_t magnitude = vector[i] & 0x7fff;
		if (magnitude < 0x7f80 && magnitude > most)
			most = magnitude;
	}
	return most << 16;
}

/* Which vectors a block sees is not part of the contract; here every blocks-th. */
static void amax_of_operand(const struct qs_quantise_operand *operand, uint32_t *partials)
{
	for (uint32_t block = 0; block < operand->blocks; block++) {
		partials[block] = 0;
		for (int64_t i = block; i < operand->outer; i += operand->blocks) {
			const uint32_t most = amax_of_vector(operand, i);
			if (most > partials[block])
				partials[block] = most;
		}
	}
}

static void run_amax(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_quantise_args *args = params[0];
	demand_launch(args, grid_x, block_x == QS_AMAX_THREADS, QS_KERNEL_AMAX);
	for (int i = 0; i < 2; i++) {
		demand(args->operand[i].blocks <= QS_AMAX_BLOCKS, QS_KERNEL_AMAX,
		       "too many blocks");
		amax_of_operand(&args->operand[i], partials_of(args, i));
	}
}

/* ---- qs_cast -------------------------------------------------------------------------------- */

static float amax_of_partials(const uint32_t *partials, uint32_t count)
{
	uint32_t most = 0;
	float amax;
	for (uint32_t i = 0; i < count; i++)
		if (partials[i] > most)
			most = partials[i];
	memcpy(&amax, &most, sizeof amax);
	if (amax >= QS_AMAX_FLOOR)
		return amax;
	return amax == 0 ? QS_E4M3_MAX : QS_AMAX_FLOOR;
}

/* A finite value saturates even where its product overflows, as it can if the maxima given are not
 * those of the matrix. */
static uint8_t quantise(uint16_t bits, float inverse)
{
	const float value = qs_oracle_bf16_to_float(bits), product = value * inverse;
	if (!isfinite(value))
		return QS_FP8_NAN;
	return qs_oracle_float_to_e4m3(fminf(fmaxf(product, -QS_E4M3_MAX), QS_E4M3_MAX));
}

static void cast_operand(const struct qs_quantise_operand *operand, float amax)
{
	uint8_t *target = (uint8_t *)(uintptr_t)operand->target;
	const float inverse = QS_E4M3_MAX / amax;
	const int64_t k = operand->transpose ? operand->outer : operand->inner;
	for (int64_t row = 0; row < qs_quantise_rows(operand); row++)
		for (int64_t i = k; i < operand->k_padded; i++)
			target[row * operand->k_padded + i] = 0;
	for (int64_t outer = 0; outer < operand->outer; outer++)
		for (int64_t inner = 0; inner < operand->inner; inner++) {
			const int64_t row = operand->transpose ? inner : outer;
			const int64_t column = operand->transpose ? outer : inner;
			target[row * operand->k_padded + column] =
			        quantise(vector_of(operand, outer)[inner], inverse);
		}
	*(float *)(uintptr_t)operand->scale = amax / QS_E4M3_MAX;
}

static void run_cast(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_cast_args *args = params[0];
	demand_launch(&args->quantise, grid_x, block_x == QS_CAST_THREADS, QS_KERNEL_CAST);
	for (int i = 0; i < 2; i++) {
		const struct qs_quantise_operand *operand = &args->quantise.operand[i];
		if (operand->blocks == 0)
			continue;
		demand(operand->target && operand->target % 16 == 0, QS_KERNEL_CAST,
		       "target is not aligned to 16");
		demand(operand->scale && operand->scale % 4 == 0, QS_KERNEL_CAST,
		       "scale is not aligned to 4");
		demand(args->partial_blocks[i] > 0 && args->partial_blocks[i] <= QS_AMAX_BLOCKS,
		       QS_KERNEL_CAST, "no partials, or too many");
		cast_operand(operand, amax_of_partials(partials_of(&args->quantise, i),
		                                       args->partial_blocks[i]));
	}
}

const struct qs_oracle_kernel qs_oracle_kernels[] = {
        {QS_KERNEL_AMAX, run_amax, {sizeof(struct qs_quantise_args)}},
        {QS_KERNEL_CAST, run_cast, {sizeof(struct qs_cast_args)}},
        {0},
};
