/* What the references of the kernels of kernels/sample.h have in common. */
#include "tests/oracle/oracle.h"

#include <stdio.h>
#include <stdlib.h>

#include "kernels/sample.h"

void qs_oracle_sample_demand(const struct qs_sample_args *args, unsigned grid_x, unsigned block_x)
{
	if (grid_x > 0 && block_x == QS_SAMPLE_THREADS && args->rows > 0 && args->cols > 0 &&
	    args->source && args->source % 2 == 0 && args->data && args->data % 16 == 0 &&
	    args->work && args->record && args->outcome)
		return;
	fprintf(stderr, "oracle of a sample: wrong launch\n");
	abort();
}

void qs_oracle_sample_judge(const struct qs_sample_args *args, bool same, uint32_t *turn)
{
	struct qs_hash_work *work = (struct qs_hash_work *)(uintptr_t)args->work;
	struct qs_hash_record *record = (struct qs_hash_record *)(uintptr_t)args->record;
	struct qs_hash_outcome *outcome = (struct qs_hash_outcome *)(uintptr_t)args->outcome;
	++*turn;
	work->stale = !same;
	work->repair = record->amax | record->amax >> 16;
	if (same)
		return;
	record->kept[0] = record->kept[1] = 0;
	__atomic_fetch_add(&outcome->escapes, 1, __ATOMIC_RELAXED);
}
