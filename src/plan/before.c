/* The product before, in the same stream: which operands of the one at hand it has too, with
 * nothing submitted between the two. Such an operand is converted once for both (operand.h).
 *
 * A product that waits to be measured is not converted yet. How often it would have found an
 * operand converted is seen all the same: behind a product that is replaced, or behind one that
 * waits for the same measurement, as the query, key and value products of a layer do. Threads that
 * multiply at once count less than there is.
 */
#include "plan/plan.h"

#include "intercept/intercept.h"

/* A matrix as it lies in memory. */
struct operand {
	const void *data;
	int64_t rows, cols, ld;
};

static _Atomic uint64_t number; /* of the product at hand, from 1 */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
	uint64_t number; /* 0 = none */
	uint64_t submitted;
	CUstream stream;
	struct operand operand[2];
	uint64_t bucket; /* of one that waits; 0 = it is replaced */
} before;

static void describe(const struct qs_gemm *g, struct operand operand[2])
{
	const struct qs_key *key = &g->key;
	const bool ta = key->ta != CUBLAS_OP_N, tb = key->tb != CUBLAS_OP_N;
	operand[0] = (struct operand){g->a, ta ? key->k : key->m, ta ? key->m : key->k, key->lda};
	operand[1] = (struct operand){g->b, tb ? key->n : key->k, tb ? key->k : key->n, key->ldb};
}

static bool is_same(const struct operand *a, const struct operand *b)
{
	return a->data == b->data && a->rows == b->rows && a->cols == b->cols && a->ld == b->ld;
}

static uint64_t bucket_of(const struct qs_gemm *g)
{
	const struct qs_key bucket = qs_bucket_key(&g->key);
	return qs_key_hash(&bucket) | 1;
}

void qs_before_begin(void)
{
	atomic_fetch_add_explicit(&number, 1, memory_order_relaxed);
}

void qs_before_end(const struct qs_gemm *g, bool waits)
{
	if (pthread_mutex_trylock(&lock))
		return;
	before.number = atomic_load(&number);
	before.submitted = qs_epoch_outside();
	before.stream = g->stream;
	before.bucket = waits ? bucket_of(g) : 0;
	describe(g, before.operand);
	pthread_mutex_unlock(&lock);
}

/* True if the operands that `before` speaks of would be found by this product. */
static bool is_next(const struct qs_gemm *g)
{
	return before.number && before.number + 1 == atomic_load(&number) &&
	       before.stream == g->stream && before.submitted == qs_epoch_outside() &&
	       qs_epoch_trusted() && (!before.bucket || before.bucket == bucket_of(g));
}

void qs_before_count(struct qs_shared *shared, const struct qs_gemm *g)
{
	struct operand operand[2];
	atomic_fetch_add(&shared->uses, 1);
	describe(g, operand);
	if (pthread_mutex_trylock(&lock))
		return;
	for (int i = 0; i < 2 && is_next(g); i++)
		if (is_same(&operand[i], &before.operand[0]) ||
		    is_same(&operand[i], &before.operand[1]))
			atomic_fetch_add(&shared->found[i], 1);
	pthread_mutex_unlock(&lock);
}

double qs_before_share(const struct qs_shared *shared, const struct qs_key *key)
{
	const int uses = atomic_load(&shared->uses);
	if (!uses || qs_process()->options->validity == QS_VALIDITY_EACH)
		return 0;
	const double elements = (double)key->m * atomic_load(&shared->found[0]) +
	                        (double)key->n * atomic_load(&shared->found[1]);
	return elements / ((double)(key->m + key->n) * uses);
}

void qs_before_forked(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
