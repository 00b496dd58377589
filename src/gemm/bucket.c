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

struct qs_key qs_key_of_tokens(const struct qs_key *key, int64_t tokens)
{
	struct qs_key other = *key;
	if (!qs_linear_of(key).tokens)
		return other;
	if (key->role == QS_ROLE_WGRAD) {
		other.k = tokens;
		if (key->ta != CUBLAS_OP_N)
			stretch(&other.lda, key->k, tokens);
		if (key->tb == CUBLAS_OP_N)
			stretch(&other.ldb, key->k, tokens);
	} else {
		other.n = tokens;
		if (key->tb != CUBLAS_OP_N)
			stretch(&other.ldb, key->n, tokens);
	}
	return other;
}

struct qs_key qs_bucket_key(const struct qs_key *key)
{
	const struct qs_bucket bucket = qs_bucket_of(qs_linear_of(key).tokens);
	struct qs_key other = qs_key_of_tokens(key, bucket.last);
	other.layer = 0;
	other.weight = 0;
	return other;
}
