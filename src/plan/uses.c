/* How often a product was used that is still to be measured. Its bucket is what counts, whatever
 * layer and weight: all of it is decided by one measurement.
 *
 * A word for each bucket, a hash with the number of uses in its lowest bits. Two buckets of one
 * hash would be measured a use or two early.
 */
#include "plan/plan.h"

#define SLOTS  4096 /* power of two                                     */
#define PROBES 64   /* slots that are looked at before a bucket has none */
#define USES   UINT64_C(3)

_Static_assert(QS_USES_TO_MEASURE <= USES, "the number of uses does not fit");

static _Atomic uint64_t words[SLOTS]; /* 0 = free */

/* The word of this hash, made if new; NULL if there is no room. */
static _Atomic uint64_t *find(uint64_t hash)
{
	for (uint64_t i = 0; i < PROBES; i++) {
		_Atomic uint64_t *word = &words[(hash / (USES + 1) + i) & (SLOTS - 1)];
		uint64_t seen = atomic_load(word);
		if (!seen && atomic_compare_exchange_strong(word, &seen, hash))
			return word;
		if ((seen & ~USES) == hash)
			return word;
	}
	return NULL;
}

int qs_uses_add(const struct qs_key *key)
{
	const struct qs_key bucket = qs_bucket_key(key);
	const uint64_t hash = (qs_key_hash(&bucket) | (USES + 1)) & ~USES; /* not 0 */
	_Atomic uint64_t *word = find(hash);
	if (!word)
		return QS_USES_TO_MEASURE;
	uint64_t seen = atomic_load(word);
	while ((seen & USES) < QS_USES_TO_MEASURE)
		if (atomic_compare_exchange_strong(word, &seen, seen + 1))
			return (int)(seen & USES) + 1;
	return QS_USES_TO_MEASURE;
}

void qs_uses_forked(void)
{
	for (int i = 0; i < SLOTS; i++)
		atomic_store(&words[i], 0);
}
