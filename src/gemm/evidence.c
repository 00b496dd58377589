/* The role of a product from what earlier calls did with the same weight.
 *
 * A layer reads its weight going forward one way and, for dX, the other way on a backward thread:
 * nn.Linear as TN and NN, GPT-2's Conv1D and a plain x @ w as NN and TN. So a matrix that was read
 * as it lies outside the backward threads and transposed on one is a weight of the second kind, and
 * its forward products, which one call cannot tell, are known from then on (the second step). On a
 * backward thread the way that is the forward one is a product done again (activation
 * checkpointing). A matrix read both ways going forward supports nothing.
 *
 * The table is small and forgets. An entry is one word, so that threads need no lock; a matrix in
 * it has its number already, so that no other thread goes on to the next weight before. Left out:
 * weights that are not aligned to 16 bytes; NN programs without named backward threads (JAX), and
 * inference alone, where nothing tells a weight from another recurring matrix. Memory that was
 * freed is taken for what it was as long as its new matrix has the same shape.
 */
#include <cublasLt.h>
#include <stdatomic.h>

#include "gemm/gemm.h"

#define BUCKETS 4096 /* power of two */
#define WAYS    4

/* How operand A was read, and what follows from it. */
#define READ_PLAIN      UINT64_C(1) /* as it lies, going forward                          */
#define READ_TRANSPOSED UINT64_C(2) /* transposed, going forward                          */
#define CONFIRMED       UINT64_C(4) /* a weight that forward products read as it lies     */
#define READS           (READ_PLAIN | READ_TRANSPOSED)

/* An entry is an identity, address / 16 in 44 bits and 17 of its shape, with 3 bits of the above; 0
 * = empty. */
#define READ_BITS  3
#define SHAPE_BITS 17
#define READ_MASK  ((UINT64_C(1) << READ_BITS) - 1)

static _Atomic uint64_t table[BUCKETS][WAYS];

static uint64_t mix(uint64_t value)
{
	return value * UINT64_C(0x9e3779b97f4a7c15) >> 32;
}

uint64_t qs_weight_identity(const struct qs_gemm *g)
{
	const struct qs_key *key = &g->key;
	const bool transposed = key->ta == CUBLAS_OP_T;
	const uint64_t rows = (uint64_t)(transposed ? key->k : key->m);
	const uint64_t cols = (uint64_t)(transposed ? key->m : key->k);
	const uint64_t address = (uint64_t)(uintptr_t)g->a;
	if (!address || address % 16 || address >> 48)
		return 0;
	/* Odd multipliers that share no pattern: their products do not wait for each other. */
	const uint64_t mixed = rows * UINT64_C(0x9e3779b97f4a7c15) +
	                       cols * UINT64_C(0xc2b2ae3d27d4eb4f) +
	                       (uint64_t)key->lda * UINT64_C(0x165667b19e3779f9);
	const uint64_t shape = mixed >> (64 - SHAPE_BITS);
	return address >> 4 << (SHAPE_BITS + READ_BITS) | shape << READ_BITS;
}

static _Atomic uint64_t *bucket_of(uint64_t identity)
{
	return table[mix(identity) & (BUCKETS - 1)];
}

/* How the matrix was read, 0 = not known. */
static uint64_t recall(uint64_t identity)
{
	_Atomic uint64_t *bucket = bucket_of(identity);
	for (int i = 0; i < WAYS; i++) {
		uint64_t entry = atomic_load_explicit(&bucket[i], memory_order_acquire);
		if ((entry & ~READ_MASK) == identity)
			return entry & READ_MASK;
	}
	return 0;
}

/* A new matrix pushes out the oldest of its bucket. Threads that write one bucket at once may lose
 * an entry, which is then learned again. Whoever meets the entry sees the matrix's number too. */
static void remember(uint64_t identity, uint64_t reads)
{
	_Atomic uint64_t *bucket = bucket_of(identity);
	uint64_t moved = identity | reads;
	for (int i = 0; i < WAYS; i++) {
		uint64_t old = atomic_load_explicit(&bucket[i], memory_order_relaxed);
		if ((old & ~READ_MASK) == identity) {
			atomic_store_explicit(&bucket[i], old | reads, memory_order_release);
			return;
		}
	}
	for (int i = 0; i < WAYS && moved; i++)
		moved = atomic_exchange_explicit(&bucket[i], moved, memory_order_acq_rel);
}

/* Of an NN product, `role` being what the call alone says. */
static enum qs_role role_of_plain(uint64_t known, bool autograd, enum qs_role role)
{
	const uint64_t reads = known & READS;
	if (reads == READ_PLAIN)
		return known & CONFIRMED ? QS_ROLE_FWD : QS_ROLE_UNKNOWN;
	return autograd && reads == READS ? QS_ROLE_UNKNOWN : role;
}

/* Of a TN product. */
static enum qs_role role_of_transposed(uint64_t known, bool autograd, enum qs_role role)
{
	if (!autograd || !(known & READS) || (known & READS) == READS)
		return role;
	return known & READ_PLAIN ? QS_ROLE_DGRAD : QS_ROLE_FWD;
}

/* What this call adds to what is known. An epilogue tells only its own product: memory may be used
 * again by one without. */
static uint64_t evidence_of(bool transposed, bool autograd, bool told, enum qs_role role)
{
	if (told || !autograd)
		return transposed ? READ_TRANSPOSED : READ_PLAIN;
	return transposed && role == QS_ROLE_DGRAD ? CONFIRMED : 0;
}

enum qs_role qs_role_by_evidence(const struct qs_gemm *g, bool autograd)
{
	const struct qs_key *key = &g->key;
	const enum qs_role alone = qs_role_of(key, autograd);
	const uint64_t identity = qs_role_is_open(key) ? qs_weight_identity(g) : 0;
	if (!identity)
		return alone;
	const bool transposed = key->ta == CUBLAS_OP_T;
	/* Of these two an epilogue alone says it: it holds whatever else is known. */
	const bool told = alone == QS_ROLE_FWD && (autograd || !transposed);
	const uint64_t known = recall(identity);
	enum qs_role role = alone;
	if (!told)
		role = transposed ? role_of_transposed(known, autograd, alone)
		                  : role_of_plain(known, autograd, alone);
	const uint64_t added = evidence_of(transposed, autograd, told, role);
	if (added & ~known) {
		qs_ordinal_give(identity);
		remember(identity, added);
	}
	return role;
}

void qs_roles_forked(void)
{
	for (int i = 0; i < BUCKETS; i++)
		for (int j = 0; j < WAYS; j++)
			atomic_store_explicit(&table[i][j], 0, memory_order_relaxed);
}
