/* Weights that rules single out. A rule with `weight` that does not hold for a product says nothing
 * about it, as if its weight were not known: so only weights for which one holds get into the key,
 * and have plans of their own. All others of a shape share theirs.
 */
#include "plan/plan.h"

#define WORD_BITS 64

static _Atomic bool asked;                                    /* by a rule of the policy        */
static _Atomic uint64_t singled[QS_ORDINALS_MAX / WORD_BITS]; /* bit per ordinal                */
static _Atomic int32_t met;                                   /* 1 + highest ordinal of forward
                                                                 products since it was asked   */

void qs_weights_follow(const struct qs_policy *policy, int32_t weights)
{
	const bool uses = qs_policy_uses_weights(policy);
	for (int32_t i = 0; i < QS_ORDINALS_MAX / WORD_BITS && (uses || atomic_load(&asked)); i++) {
		uint64_t word = 0;
		for (int32_t bit = 0; bit < WORD_BITS; bit++)
			word |= (uint64_t)qs_policy_weight_holds(policy, WORD_BITS * i + bit,
			                                         weights)
			        << bit;
		atomic_store_explicit(&singled[i], word, memory_order_relaxed);
	}
	atomic_store(&asked, uses);
}

bool qs_weights_asked(void)
{
	return atomic_load_explicit(&asked, memory_order_relaxed);
}

int32_t qs_weights_met(void)
{
	return atomic_load_explicit(&met, memory_order_relaxed);
}

static void meet(int32_t ordinal)
{
	int32_t known = qs_weights_met();
	while (ordinal >= known && !atomic_compare_exchange_weak(&met, &known, ordinal + 1))
		;
}

uint16_t qs_weight_of_key(const struct qs_gemm *g)
{
	const int32_t ordinal = qs_ordinal_of(g);
	if (ordinal < 0)
		return 0;
	if (g->key.role == QS_ROLE_FWD)
		meet(ordinal);
	const uint64_t word =
	        atomic_load_explicit(&singled[ordinal / WORD_BITS], memory_order_relaxed);
	return word >> ordinal % WORD_BITS & 1 ? (uint16_t)(ordinal + 1) : 0;
}

void qs_weights_forked(void)
{
	atomic_store(&asked, false);
	atomic_store(&met, 0);
}
