/* Reference of the kernel of kernels/compare.cu, in the words of kernels/compare.h.
 *
 * Element by element and in one go: no partial is left, and sums are added up in another order than
 * the kernel's, so signal and noise agree with its to some 2^-50.
 */
#include "tests/oracle/oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/compare.h"

static void demand(int holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "oracle of %s: %s\n", QS_KERNEL_COMPARE, what);
	abort();
}

static float element(uint64_t data, uint32_t type, int64_t at)
{
	const void *base = (const void *)(uintptr_t)data;
	return type == QS_COMPARE_FP32 ? ((const float *)base)[at]
	                               : qs_oracle_bf16_to_float(((const uint16_t *)base)[at]);
}

static void compare(struct qs_compare_outcome *outcome, float r, float c)
{
	if (!isfinite(r)) {
		outcome->skipped++;
		return;
	}
	outcome->signal += (double)r * (double)r;
	outcome->amax = fmaxf(outcome->amax, fabsf(r));
	if (!isfinite(c)) {
		outcome->spoilt++;
		return;
	}
	const double difference = (double)c - (double)r;
	outcome->noise += difference * difference;
	outcome->error = fmaxf(outcome->error, (float)fabs(difference));
}

static float sqnr_of(const struct qs_compare_outcome *outcome)
{
	if (outcome->spoilt)
		return -QS_SQNR_MAX;
	if (outcome->noise == 0)
		return QS_SQNR_MAX;
	const double sqnr = 10 * log10(outcome->signal / outcome->noise);
	return (float)fmin(fmax(sqnr, (double)-QS_SQNR_MAX), (double)QS_SQNR_MAX);
}

static void count(struct qs_compare_outcome *outcome, int i,
                  const struct qs_compare_operand *operand)
{
	const float *scale = (const float *)(uintptr_t)operand->scale;
	const int wide = operand->format == QS_FP8_E5M2;
	for (int64_t row = 0; row < operand->rows; row++)
		for (int64_t col = 0; col < operand->cols; col++) {
			const float x =
			        element(operand->source, QS_COMPARE_BF16, row * operand->ld + col);
			const int64_t index = operand->scales == QS_COMPARE_SCALE_OF_ROW   ? row
			                      : operand->scales == QS_COMPARE_SCALE_OF_COL ? col
			                                                                   : 0;
			const float size = fabsf(x) / scale[index];
			if (!isfinite(x))
				continue;
			outcome->saturated[i] += size > (wide ? QS_E5M2_MAX : QS_E4M3_MAX);
			outcome->flushed[i] +=
			        x != 0 && size <= (wide ? QS_E5M2_FLUSHED : QS_E4M3_FLUSHED);
			outcome->operand_amax[i] = fmaxf(outcome->operand_amax[i], fabsf(x));
		}
}

static void check_args(const struct qs_compare_args *args, unsigned grid_x, unsigned block_x)
{
	const struct qs_compare_work *work = (const void *)(uintptr_t)args->work;
	const uint64_t size = args->type == QS_COMPARE_FP32 ? 4 : 2;
	demand(block_x == QS_COMPARE_THREADS, "not as many threads as it is made for");
	demand(args->blocks >= 1 && grid_x == qs_compare_grid(args), "not the grid it asks for");
	demand(args->blocks <= QS_COMPARE_PARTIALS &&
	               args->operand[0].blocks <= QS_COMPARE_PARTIALS &&
	               args->operand[1].blocks <= QS_COMPARE_PARTIALS,
	       "more blocks than partials");
	demand(args->rows >= 1 && args->cols >= 1, "no elements");
	demand(args->type <= QS_COMPARE_FP32, "type");
	demand(args->work && args->work % 16 == 0, "work is not aligned to 16 bytes");
	demand(work->ticket == 0, "the ticket is not 0");
	demand(args->reference && args->reference % size == 0, "reference is not aligned");
	demand(args->candidate && args->candidate % size == 0, "candidate is not aligned");
	demand(args->outcome != 0, "no outcome");
}

static void run_compare(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_compare_args *args = params[0];
	struct qs_compare_outcome *to = (struct qs_compare_outcome *)(uintptr_t)args->outcome;
	struct qs_compare_outcome found = {0};
	check_args(args, grid_x, block_x);
	((struct qs_compare_work *)(uintptr_t)args->work)->ticket = grid_x;
	for (int64_t row = 0; row < args->rows; row++)
		for (int64_t col = 0; col < args->cols; col++)
			compare(&found,
			        element(args->reference, args->type,
			                row * args->ld_reference + col),
			        element(args->candidate, args->type,
			                row * args->ld_candidate + col));
	found.sqnr = sqnr_of(&found);
	for (int i = 0; i < 2; i++)
		if (args->operand[i].blocks)
			count(&found, i, &args->operand[i]);
	found.sequence = to->sequence;
	*to = found;
	__atomic_store_n(&to->sequence, args->sequence, __ATOMIC_RELEASE);
}

const struct qs_oracle_kernel qs_oracle_compare_kernels[] = {
        {QS_KERNEL_COMPARE, run_compare, {sizeof(struct qs_compare_args)}},
        {0},
};
