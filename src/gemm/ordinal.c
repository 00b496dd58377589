/* Weights by number: matrices that forward products read as operand A, in the order of their first
 * use.
 *
 * A matrix is numbered when it is first read outside the backward threads (evidence.c), also where
 * the product's role is not known yet: so Conv1D's weights have theirs from the first step. What a
 * product's number is, is said once its role is known. dX reads the same weight; dW is told by what
 * it shares with its own layer: dY with the dX just made, else X with the last forward product.
 *
 * Numbers are never given again and never forgotten, so memory that is reused by another shape is
 * another weight; one of the same shape is taken for the one before. Left out: weights that are not
 * aligned to 16 bytes, and those beyond QS_ORDINALS_MAX.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "gemm/gemm.h"

#define SLOTS   32768 /* power of two, twice the numbers  */
#define BUCKETS 2048  /* power of two                     */
#define WAYS    4

static uint64_t mix(uint64_t value)
{
	return value * UINT64_C(0x9e3779b97f4a7c15) >> 32;
}

/* ---- the numbers --------------------------------------------------------------------------------
 */

static _Atomic uint64_t matrices[SLOTS]; /* qs_weight_identity(), 0 = empty             */
static uint16_t numbers[SLOTS];          /* of these; written before the matrix         */
static _Atomic int32_t count;            /* of numbers given, changed under the lock    */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

_Static_assert(QS_ORDINALS_MAX <= SLOTS / 2, "there always is an empty slot");

/* The slot of the matrix, or the empty one where it belongs. */
static size_t find(uint64_t matrix)
{
	for (uint64_t i = mix(matrix);; i++) {
		uint64_t met =
		        atomic_load_explicit(&matrices[i & (SLOTS - 1)], memory_order_acquire);
		if (!met || met == matrix)
			return i & (SLOTS - 1);
	}
}

/* -1 = has none. */
static int32_t number_of(uint64_t matrix)
{
	const size_t slot = find(matrix);
	return atomic_load_explicit(&matrices[slot], memory_order_acquire) ? numbers[slot] : -1;
}

void qs_ordinal_give(uint64_t matrix)
{
	if (number_of(matrix) >= 0 || qs_ordinals_full())
		return;
	pthread_mutex_lock(&lock);
	const size_t slot = find(matrix);
	const int32_t next = atomic_load(&count);
	if (!atomic_load(&matrices[slot]) && next < QS_ORDINALS_MAX) {
		numbers[slot] = (uint16_t)next;
		atomic_store_explicit(&matrices[slot], matrix, memory_order_release);
		atomic_store(&count, next + 1);
	}
	pthread_mutex_unlock(&lock);
}

bool qs_ordinals_full(void)
{
	return atomic_load_explicit(&count, memory_order_relaxed) == QS_ORDINALS_MAX;
}

/* ---- what products of one layer share -----------------------------------------------------------
 */

/* Address / 16 in 44 bits, 14 bits of number, 1 bit of kind, 5 bits of size; 0 = empty. */
#define SIZE_BITS   5
#define KIND_BITS   1
#define NUMBER_BITS 14

_Static_assert(QS_ORDINALS_MAX <= 1 << NUMBER_BITS, "a number fits in an entry");

#define NUMBER_SHIFT  (KIND_BITS + SIZE_BITS)
#define ADDRESS_SHIFT (NUMBER_BITS + NUMBER_SHIFT)
#define NUMBER_MASK   (((UINT64_C(1) << NUMBER_BITS) - 1) << NUMBER_SHIFT)

enum kind {
	INPUT,    /* X, read by a forward product  */
	GRADIENT, /* dY, read by dX = dY W         */
};

static _Atomic uint64_t shared[BUCKETS][WAYS];

/* An entry without its number; 0 = not to be remembered. `in` and `out` in either order. */
static uint64_t entry_of(const void *matrix, enum kind kind, int64_t in, int64_t out)
{
	const uint64_t address = (uint64_t)(uintptr_t)matrix;
	const uint64_t size = mix((uint64_t)in * (uint64_t)out) & ((1u << SIZE_BITS) - 1);
	if (!address || address % 16 || address >> 48)
		return 0;
	return address >> 4 << ADDRESS_SHIFT | (uint64_t)kind << SIZE_BITS | size;
}

static _Atomic uint64_t *bucket_of(uint64_t entry)
{
	return shared[mix(entry >> ADDRESS_SHIFT) & (BUCKETS - 1)];
}

/* The last one wins; a new matrix pushes out the oldest of its bucket. Threads that write one
 * bucket at once may lose an entry. */
static void remember(uint64_t entry, int32_t number)
{
	if (!entry)
		return;
	_Atomic uint64_t *bucket = bucket_of(entry);
	uint64_t moved = entry | (uint64_t)number << NUMBER_SHIFT;
	for (int i = 0; i < WAYS && moved; i++) {
		const uint64_t old =
		        atomic_exchange_explicit(&bucket[i], moved, memory_order_relaxed);
		moved = (old & ~NUMBER_MASK) == entry ? 0 : old;
	}
}

/* -1 = not known. `take`: it stands for one product only. */
static int32_t recall(uint64_t entry, bool take)
{
	if (!entry)
		return -1;
	_Atomic uint64_t *bucket = bucket_of(entry);
	for (int i = 0; i < WAYS; i++) {
		const uint64_t met = atomic_load_explicit(&bucket[i], memory_order_relaxed);
		if ((met & ~NUMBER_MASK) != entry)
			continue;
		if (take)
			atomic_store_explicit(&bucket[i], 0, memory_order_relaxed);
		return (int32_t)((met & NUMBER_MASK) >> NUMBER_SHIFT);
	}
	return -1;
}

/* dY is operand B where the weight is stored by outputs (Linear), A where by inputs (Conv1D), and X
 * is the other one. Layers that read one X have each a dY of their own. */
static int32_t number_of_gradient(const struct qs_gemm *g)
{
	const int64_t m = g->key.m, n = g->key.n;
	const void *const operands[] = {g->b, g->a};
	int32_t number = -1;
	for (int i = 0; i < 2 && number < 0; i++)
		number = recall(entry_of(operands[i], GRADIENT, m, n), true);
	for (int i = 0; i < 2 && number < 0; i++)
		number = recall(entry_of(operands[i], INPUT, m, n), false);
	return number;
}

int32_t qs_ordinal_of(const struct qs_gemm *g)
{
	const struct qs_key *key = &g->key;
	if (key->role == QS_ROLE_UNKNOWN)
		return -1;
	if (key->role == QS_ROLE_WGRAD)
		return number_of_gradient(g);
	const uint64_t matrix = qs_weight_identity(g);
	const int32_t number = matrix ? number_of(matrix) : -1;
	const enum kind kind = key->role == QS_ROLE_DGRAD ? GRADIENT : INPUT;
	if (number >= 0)
		remember(entry_of(g->b, kind, key->m, key->k), number);
	return number;
}

void qs_ordinals_forked(void)
{
	pthread_mutex_init(&lock, NULL);
	if (!atomic_load(&count)) /* else the pages were never touched */
		return;
	atomic_store(&count, 0);
	for (int i = 0; i < SLOTS; i++)
		atomic_store_explicit(&matrices[i], 0, memory_order_relaxed);
	for (int i = 0; i < BUCKETS; i++)
		for (int j = 0; j < WAYS; j++)
			atomic_store_explicit(&shared[i][j], 0, memory_order_relaxed);
}
