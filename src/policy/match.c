/* Chooses the rule for a product, and tells what the rules did.
 *
 * The host's threads run qs_policy_choose(): it reads an immutable policy, compares, and counts the
 * hit with a relaxed add. The cheap comparisons come first, patterns of layer names last.
 */
#include "note/note.h"
#include "policy/rule.h"

#define UNKNOWN INT64_MIN

/* What the conditions of a rule are compared with. */
struct facts {
	int64_t numbers[QS_NUMBERS]; /* by enum qs_rule_key, UNKNOWN if so      */
	int64_t weights;             /* of the program, <= 0 = unknown          */
	const char *layer;           /* or NULL                                 */
	int role, op, entry;         /* bits of struct qs_choose_words, -1 = none */
};

static int64_t product(int64_t a, int64_t b)
{
	int64_t result;
	return __builtin_mul_overflow(a, b, &result) ? INT64_MAX : result;
}

static int64_t least(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

static int64_t positive(int64_t value)
{
	return value > 0 ? value : UNKNOWN;
}

static int64_t natural(int64_t value)
{
	return value >= 0 ? value : UNKNOWN;
}

static void numbers_of(const struct qs_subject *subject, int64_t numbers[QS_NUMBERS])
{
	const struct qs_key *key = subject->key;
	struct qs_linear linear = qs_linear_of(key);
	numbers[QS_KEY_M] = key->m;
	numbers[QS_KEY_N] = key->n;
	numbers[QS_KEY_K] = key->k;
	numbers[QS_KEY_MNK] = product(product(key->m, key->n), key->k);
	numbers[QS_KEY_MIN_DIM] = least(key->m, least(key->n, key->k));
	numbers[QS_KEY_TOKENS] = positive(linear.tokens);
	numbers[QS_KEY_IN] = positive(linear.in);
	numbers[QS_KEY_OUT] = positive(linear.out);
	numbers[QS_KEY_WEIGHT] = natural(subject->weight);
	numbers[QS_KEY_STEPS] = natural(subject->step);
}

static struct facts facts_of(const struct qs_subject *subject)
{
	const struct qs_key *key = subject->key;
	struct facts facts = {.weights = subject->weights, .layer = subject->layer};
	numbers_of(subject, facts.numbers);
	facts.role = key->role == QS_ROLE_UNKNOWN ? -1 : key->role;
	facts.op = key->ta > 1 || key->tb > 1 ? -1 : key->ta * 2 + key->tb;
	facts.entry = key->entry;
	return facts;
}

static bool words_match(const struct qs_choose_words *words, int bit)
{
	if (!(words->only | words->never))
		return true;
	uint32_t mask = words->only ? words->only & ~words->never : ~words->never;
	return bit >= 0 && mask >> bit & 1;
}

static bool numbers_match(const struct qs_rule *rule, const struct facts *facts)
{
	uint32_t keys = rule->given & ((UINT32_C(1) << QS_NUMBERS) - 1);
	for (; keys; keys &= keys - 1) {
		int key = __builtin_ctz(keys);
		int64_t value = facts->numbers[key];
		if (value == UNKNOWN ||
		    !qs_ranges_match(&rule->numbers[key], value, facts->weights))
			return false;
	}
	return true;
}

static bool layer_matches(const struct qs_rule *rule, const char *layer)
{
	return !rule->layer.count || (layer && qs_patterns_match(&rule->layer, layer));
}

static bool rule_matches(const struct qs_rule *rule, const struct facts *facts)
{
	return words_match(&rule->role, facts->role) && words_match(&rule->op, facts->op) &&
	       words_match(&rule->api, facts->entry) && numbers_match(rule, facts) &&
	       layer_matches(rule, facts->layer);
}

/* Asked for outright, an action is done outright; auto and native have nothing to be eager for. */
static bool is_eager(const struct qs_rule *rule)
{
	if (rule->action == QS_ACTION_AUTO || rule->action == QS_ACTION_NATIVE)
		return false;
	return rule->eager || !(rule->given >> QS_KEY_STRATEGY & 1);
}

/* NF4 is coarser than what is asked of 8 bits: who names it has chosen its error, unless the rule
 * has a limit of its own. */
static double least_sqnr(const struct qs_policy *policy, const struct qs_rule *rule)
{
	if (rule->given >> QS_KEY_MIN_SQNR & 1)
		return rule->min_sqnr;
	return rule->action == QS_ACTION_NF4 ? -1 : policy->options.min_sqnr;
}

/* Reads before it writes, so that the line stays shared between the host's threads. */
static void remember(_Atomic bool *flag)
{
	if (!atomic_load_explicit(flag, memory_order_relaxed))
		atomic_store_explicit(flag, true, memory_order_relaxed);
}

struct qs_choice qs_policy_choose(struct qs_policy *policy, const struct qs_subject *subject)
{
	struct facts facts = facts_of(subject);
	if (facts.layer)
		remember(&policy->layer_seen);
	if (facts.role >= 0)
		remember(&policy->role_seen);
	if (subject->step >= 0)
		remember(&policy->step_seen);
	int index = 0;
	while (index < policy->count && !rule_matches(&policy->rules[index], &facts))
		index++;
	bool found = index < policy->count;
	struct qs_rule *rule = found ? &policy->rules[index] : &policy->otherwise;
	if (!subject->again || !atomic_load_explicit(&rule->hits, memory_order_relaxed))
		atomic_fetch_add_explicit(&rule->hits, 1, memory_order_relaxed);
	return (struct qs_choice){
	        .action = rule->action,
	        .scaling = rule->scaling,
	        .format = rule->format,
	        .eager = is_eager(rule),
	        .min_sqnr = least_sqnr(policy, rule),
	        .rule = found ? index : -1,
	};
}

/* Accessors ---------------------------------------------------------------------------------- */

bool qs_policy_broken(const struct qs_policy *policy)
{
	return policy->broken;
}

const char *qs_policy_name(const struct qs_policy *policy)
{
	return policy->name;
}

const struct qs_options *qs_policy_options(const struct qs_policy *policy)
{
	return &policy->options;
}

bool qs_policy_process_allowed(const struct qs_policy *policy, const char *name)
{
	return qs_patterns_match(&policy->process, name);
}

int qs_policy_rule_count(const struct qs_policy *policy)
{
	return policy->count;
}

static const struct qs_rule *rule_at(const struct qs_policy *policy, int rule)
{
	return rule >= 0 && rule < policy->count ? &policy->rules[rule] : &policy->otherwise;
}

const char *qs_policy_rule_name(const struct qs_policy *policy, int rule)
{
	return rule_at(policy, rule)->name;
}

uint64_t qs_policy_rule_hits(const struct qs_policy *policy, int rule)
{
	return atomic_load_explicit(&rule_at(policy, rule)->hits, memory_order_relaxed);
}

static bool uses(const struct qs_policy *policy, enum qs_rule_key key)
{
	for (int i = 0; i < policy->count; i++)
		if (policy->rules[i].given >> key & 1)
			return true;
	return false;
}

bool qs_policy_uses_steps(const struct qs_policy *policy)
{
	return uses(policy, QS_KEY_STEPS);
}

bool qs_policy_uses_weights(const struct qs_policy *policy)
{
	return uses(policy, QS_KEY_WEIGHT);
}

static bool counts_from_end(const struct qs_rule *rule)
{
	const struct qs_ranges *weights = &rule->numbers[QS_KEY_WEIGHT];
	for (int i = 0; i < weights->count; i++)
		if (weights->items[i].low < 0 || weights->items[i].high < 0)
			return true;
	return false;
}

bool qs_policy_counts_weights(const struct qs_policy *policy)
{
	for (int i = 0; i < policy->count; i++)
		if (counts_from_end(&policy->rules[i]))
			return true;
	return false;
}

bool qs_policy_weight_holds(const struct qs_policy *policy, int32_t weight, int32_t weights)
{
	for (int i = 0; i < policy->count; i++) {
		const struct qs_rule *rule = &policy->rules[i];
		if (rule->given >> QS_KEY_WEIGHT & 1 &&
		    qs_ranges_match(&rule->numbers[QS_KEY_WEIGHT], weight, weights))
			return true;
	}
	return false;
}

/* Of one item: where it begins, where it ends, or wherever it may. */
static int64_t range_next(const struct qs_range *range, int64_t step)
{
	if (range->divisible)
		return step + 1;
	if (range->low > step)
		return range->low;
	return range->high >= step && range->high < INT64_MAX ? range->high + 1 : INT64_MAX;
}

int64_t qs_policy_next_step(const struct qs_policy *policy, int64_t step)
{
	int64_t next = INT64_MAX;
	for (int i = 0; i < policy->count; i++) {
		const struct qs_ranges *steps = &policy->rules[i].numbers[QS_KEY_STEPS];
		for (int j = 0; j < steps->count; j++)
			next = least(next, range_next(&steps->items[j], step));
	}
	return next;
}

/* Why a rule may have matched nothing, if that can be told. */
static const char *unused_cause(const struct qs_policy *policy, const struct qs_rule *rule)
{
	const uint32_t needs_role = UINT32_C(1) << QS_KEY_ROLE | UINT32_C(1) << QS_KEY_TOKENS |
	                            UINT32_C(1) << QS_KEY_IN | UINT32_C(1) << QS_KEY_OUT;
	if (rule->layer.count && !atomic_load(&policy->layer_seen))
		return ": no product had a layer name, as the program marks none";
	if (rule->given & needs_role && !atomic_load(&policy->role_seen))
		return ": the role of no product could be told";
	if (counts_from_end(rule) && !atomic_load(&policy->step_seen))
		return ": how many weights there are is unknown, as the products do not recur "
		       "regularly";
	if (rule->given >> QS_KEY_STEPS & 1 && !atomic_load(&policy->step_seen))
		return ": steps are unknown, as the products do not recur regularly";
	return "";
}

void qs_policy_report_unused(const struct qs_policy *policy)
{
	uint64_t products = 0;
	for (int i = -1; i < policy->count; i++)
		products += qs_policy_rule_hits(policy, i);
	if (!products)
		return;
	for (int i = 0; i < policy->count; i++) {
		const struct qs_rule *rule = &policy->rules[i];
		bool own = policy->preset && rule->origin == policy->name;
		if (!qs_policy_rule_hits(policy, i))
			qs_message(own ? QS_LOG_INFO : QS_LOG_WARN,
			           "%s:%d: rule '%s' matched none of %ju products%s", rule->origin,
			           rule->line, rule->name, (uintmax_t)products,
			           unused_cause(policy, rule));
	}
}
