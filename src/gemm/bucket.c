/* Buckets of token counts: what is measured of one count decides for those near it. A program whose
 * batches or sequences vary has as many keys as it has counts, and each would be measured.
 */
#include <cublas_v2.h>

#include "gemm/gemm.h"

#define EXACT 16 /* up to here each count is a bucket of its own */

/* 16, 20, 25, 31, 38, 47, ... */
struct qs_bucket qs_bucket_of(int64_t tokens)
{
	int64_t before = EXACT, last = EXACT;
	if (tokens <= EXACT || tokens > INT64_MAX / 2)
		return (struct qs_bucket){tokens, tokens};
	while (last < tokens) {
		before = last;
		last += last / 4;
	}
	return (struct qs_bucket){before + 1, last};
}

/* A leading dimension that is the matrix's rows stays that. */
static void stretch(int64_t *ld, int64_t rows, int64_t last)
{
	if (*ld == rows)
		*ld = last;
}

struct qs_key qs_bucket_key(const struct qs_key *key)
{
	struct qs_key bucket = *key;
	const int64_t tokens = qs_linear_of(key).tokens;
	const int64_t last = qs_bucket_of(tokens).last;
	bucket.layer = 0;
	bucket.weight = 0;
	if (!tokens)
		return bucket;
	if (key->role == QS_ROLE_WGRAD) {
		bucket.k = last;
		if (key->ta != CUBLAS_OP_N)
			stretch(&bucket.lda, key->k, last);
		if (key->tb == CUBLAS_OP_N)
			stretch(&bucket.ldb, key->k, last);
	} else {
		bucket.n = last;
		if (key->tb != CUBLAS_OP_N)
			stretch(&bucket.ldb, key->n, last);
	}
	return bucket;
}
