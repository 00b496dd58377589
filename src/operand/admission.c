/* Which matrices are worth keeping: those whose contents stay the same.
 *
 * A candidate is hashed at its first uses, never two hashes at a time, and the outcome is looked at
 * when it is used again. Two equal hashes admit it: the making of the copy, at the third use,
 * hashes once more, and a copy that finds another content then is dropped (cache.c). Where hashes
 * differ, the next one waits for 3, 6, 12, ... uses, so that n uses cost log2(n) hashes; a buffer
 * that takes as many contents in turn looks the same then, so one more is asked for, at the use
 * after. Candidates are few to a set and the one that was not used for longest makes room; one that
 * displaced another is hashed from its second use on only, so addresses that are used once cost
 * nothing once the table is full.
 */
#include <string.h>

#include "operand/kept.h"

#define EQUAL_HASHES 2  /* in a row, one more where they differed before */
#define FIRST_GAP    3  /* uses                                                            */
#define HOPELESS_GAP 48 /* uses until a matrix whose copy did not pay is hashed again       */

static bool is_same(const struct qs_matrix *x, const struct qs_matrix *y)
{
	return x->data == y->data && x->rows == y->rows && x->cols == y->cols && x->ld == y->ld;
}

static struct qs_candidate *set_of(struct qs_cache *cache, const struct qs_matrix *source)
{
	uint64_t hash = (uintptr_t)source->data ^ (uint64_t)source->rows << 40 ^
	                (uint64_t)source->cols << 20 ^ (uint64_t)source->ld;
	hash = (hash * 0x9e3779b97f4a7c15u) >> 32;
	return &cache->candidate[(hash & (QS_CANDIDATE_SETS - 1)) * QS_CANDIDATE_WAYS];
}

static struct qs_candidate *find(struct qs_cache *cache, const struct qs_matrix *source)
{
	struct qs_candidate *set = set_of(cache, source);
	for (int i = 0; i < QS_CANDIDATE_WAYS; i++)
		if (set[i].source.data && is_same(&set[i].source, source))
			return &set[i];
	return NULL;
}

/* Somebody holds a pointer to it, or the device will write to its outcome. */
static bool is_busy(const struct qs_candidate *candidate)
{
	return candidate->making || candidate->sequence;
}

/* In a free place, else that of the one not used for longest; NULL if all are busy. `now`: to be
 * looked at from the first use on in any case. */
static struct qs_candidate *add(struct qs_cache *cache, const struct qs_matrix *source, bool now)
{
	struct qs_candidate *set = set_of(cache, source), *oldest = NULL;
	for (int i = 0; i < QS_CANDIDATE_WAYS; i++)
		if (!is_busy(&set[i]) && (!oldest || set[i].turn < oldest->turn))
			oldest = &set[i];
	if (!oldest)
		return NULL;
	const bool waits = oldest->source.data && !now;
	*oldest = (struct qs_candidate){.source = *source, .next = waits ? 2 : 1};
	return oldest;
}

static struct qs_hash_outcome *outcome_of(struct qs_cache *cache,
                                          const struct qs_candidate *candidate)
{
	return &cache->outcomes[candidate - cache->candidate];
}

static void wait_longer(struct qs_candidate *candidate)
{
	candidate->gap = candidate->gap ? 2 * candidate->gap : FIRST_GAP;
	candidate->next = candidate->hashed + candidate->gap;
}

/* Takes the outcome of the hash that is due, if it has come. */
static void collect(struct qs_candidate *candidate, const struct qs_hash_outcome *outcome)
{
	if (!candidate->sequence || qs_check_done(outcome) != candidate->sequence)
		return;
	const bool first = !candidate->equal;
	const bool same = !memcmp(candidate->hash, outcome->hash, sizeof candidate->hash);
	candidate->sequence = 0;
	candidate->infinite = outcome->infinite;
	memcpy(candidate->hash, outcome->hash, sizeof candidate->hash);
	candidate->equal = !first && same ? candidate->equal + 1 : 1;
	candidate->next = candidate->hashed + 1;
	if (!first && !same)
		wait_longer(candidate);
}

static void count_use(struct qs_candidate *candidate, uint64_t turn)
{
	if (candidate->uses++)
		candidate->distance = turn - candidate->turn;
	candidate->turn = turn;
}

enum qs_admission qs_admission_consider(struct qs_cache *cache, const struct qs_matrix *source,
                                        bool frozen, bool capturing, struct qs_candidate **result)
{
	struct qs_candidate *candidate = find(cache, source);
	if (!candidate)
		candidate = add(cache, source, frozen);
	*result = candidate;
	if (!candidate)
		return QS_ADMISSION_WAIT;
	count_use(candidate, cache->turn);
	collect(candidate, outcome_of(cache, candidate));
	if (capturing || is_busy(candidate) || candidate->uses < candidate->next)
		return QS_ADMISSION_WAIT;
	if (frozen || candidate->equal >= EQUAL_HASHES + (candidate->gap != 0)) {
		candidate->making = true;
		return QS_ADMISSION_MAKE;
	}
	candidate->sequence = atomic_fetch_add(&cache->sequence, 1) + 1;
	candidate->hashed = candidate->uses;
	return QS_ADMISSION_HASH;
}

void qs_admission_done(struct qs_cache *cache, struct qs_candidate *candidate, uint64_t pause)
{
	pthread_mutex_lock(&cache->lock);
	if (pause && !candidate->making)
		candidate->sequence = 0;
	candidate->making = false;
	if (pause)
		candidate->next = candidate->uses + pause;
	pthread_mutex_unlock(&cache->lock);
}

void qs_admission_hopeless(struct qs_cache *cache, const struct qs_matrix *source, bool infinite)
{
	pthread_mutex_lock(&cache->lock);
	struct qs_candidate *candidate = find(cache, source);
	if (!candidate)
		candidate = add(cache, source, false);
	if (candidate) {
		candidate->equal = 0;
		candidate->infinite = infinite;
		candidate->hashed = candidate->uses;
		if (candidate->gap < HOPELESS_GAP / 2)
			candidate->gap = HOPELESS_GAP / 2;
		wait_longer(candidate);
	}
	pthread_mutex_unlock(&cache->lock);
}

void qs_admission_gone(struct qs_cache *cache, const struct qs_matrix *source)
{
	pthread_mutex_lock(&cache->lock);
	struct qs_candidate *candidate = find(cache, source);
	if (candidate && !is_busy(candidate))
		*candidate = (struct qs_candidate){0};
	pthread_mutex_unlock(&cache->lock);
}
