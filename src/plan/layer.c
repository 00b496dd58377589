/* The layer of a product. Forward products run inside ranges; backward ones run on other threads,
 * where hooks of modules are not called, and are told by what they share with their forward
 * product: dX = dY W reads the same weight, dW = X' dY the same input.
 *
 * The table is small and forgets: an address that another layer's product read since stands for
 * that layer. An entry is one word, so that threads need no lock. Left out: matrices that are not
 * aligned to 16 bytes.
 */
#include <stdatomic.h>

#include "plan/label.h"

#define BUCKETS 4096 /* power of two */
#define WAYS    4

/* Address / 16 in 44 bits, 12 bits of label, 8 bits of the layer's size; 0 = empty. */
#define SIZE_BITS  8
#define LABEL_BITS 12
#define TAG_BITS   (SIZE_BITS + LABEL_BITS)

_Static_assert(QS_LABELS_MAX < 1 << LABEL_BITS, "a label fits in an entry");

static _Atomic uint64_t table[BUCKETS][WAYS];

static uint64_t mix(uint64_t value)
{
	return value * UINT64_C(0x9e3779b97f4a7c15) >> 32;
}

/* A layer's features in and out, in either order: memory that was freed and now holds something of
 * another shape is mostly told by it. */
static uint64_t size_tag(int64_t in, int64_t out)
{
	return mix((uint64_t)in * (uint64_t)out) & ((1u << SIZE_BITS) - 1);
}

static uint64_t entry_of(const void *matrix, uint16_t label, uint64_t size)
{
	return (uint64_t)(uintptr_t)matrix >> 4 << TAG_BITS | (uint64_t)label << SIZE_BITS | size;
}

static bool is_storable(const void *matrix)
{
	return matrix && (uintptr_t)matrix % 16 == 0 && (uint64_t)(uintptr_t)matrix >> 48 == 0;
}

static _Atomic uint64_t *bucket_of(const void *matrix)
{
	return table[mix((uint64_t)(uintptr_t)matrix >> 4) & (BUCKETS - 1)];
}

/* The last one wins: a new address pushes out the oldest of its bucket. Threads that write one
 * bucket at once may lose an entry. */
static void remember(const void *matrix, uint16_t label, uint64_t size)
{
	if (!is_storable(matrix))
		return;
	_Atomic uint64_t *bucket = bucket_of(matrix);
	uint64_t entry = entry_of(matrix, label, size), moved = entry;
	for (int i = 0; i < WAYS; i++) {
		uint64_t old = atomic_load_explicit(&bucket[i], memory_order_relaxed);
		if (old == entry && i == 0)
			return;
		atomic_store_explicit(&bucket[i], moved, memory_order_relaxed);
		if (!old || (old ^ entry) >> TAG_BITS == 0)
			return;
		moved = old;
	}
}

static uint16_t recall(const void *matrix, uint64_t size)
{
	if (!is_storable(matrix))
		return 0;
	_Atomic uint64_t *bucket = bucket_of(matrix);
	uint64_t wanted = entry_of(matrix, 0, size);
	uint64_t label_mask = ((UINT64_C(1) << LABEL_BITS) - 1) << SIZE_BITS;
	for (int i = 0; i < WAYS; i++) {
		uint64_t entry = atomic_load_explicit(&bucket[i], memory_order_relaxed);
		if ((entry & ~label_mask) == wanted)
			return (uint16_t)((entry & label_mask) >> SIZE_BITS);
	}
	return 0;
}

/* Of dW, X is operand A if the weight is stored by outputs (Linear), B if by inputs (Conv1D). */
static uint16_t recall_forward(const struct qs_gemm *g)
{
	const struct qs_key *key = &g->key;
	if (key->role != QS_ROLE_WGRAD)
		return recall(g->a, size_tag(key->m, key->k));
	uint16_t label = recall(g->a, size_tag(key->m, key->n));
	return label ? label : recall(g->b, size_tag(key->m, key->n));
}

/* On a backward thread a product with ranges of its own is a forward one done again (activation
 * checkpointing), which shares the weight, or that of a profiler that names operations. */
uint16_t qs_layer_of(const struct qs_gemm *g, bool autograd)
{
	const struct qs_key *key = &g->key;
	bool gradient = key->role == QS_ROLE_DGRAD || key->role == QS_ROLE_WGRAD;
	uint16_t label = autograd || gradient ? recall_forward(g) : 0;
	if (!label)
		label = qs_label_current();
	if (label && !gradient && key->batch == 1) {
		remember(g->a, label, size_tag(key->m, key->k));
		remember(g->b, label, size_tag(key->m, key->k));
	}
	return label;
}

void qs_layer_forked(void)
{
	for (int i = 0; i < BUCKETS; i++)
		for (int j = 0; j < WAYS; j++)
			atomic_store_explicit(&table[i][j], 0, memory_order_relaxed);
}
