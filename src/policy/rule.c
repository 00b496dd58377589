/* The keys of a rule: what each takes and where its value is kept.
 *
 * Every value is compiled when it is read, so that matching (match.c) only compares. The text is
 * kept beside it for qs_policy_show(). A key given again adds to its list; the keys that say what
 * to do take one word.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/rule.h"

#define SQNR_MAX 200 /* dB */

const struct qs_rule_key_info qs_rule_keys[QS_RULE_KEYS] = {
        [QS_KEY_M] = {"m", "ranges: rows of D, as cuBLAS counts"},
        [QS_KEY_N] = {"n", "ranges: columns of D"},
        [QS_KEY_K] = {"k", "ranges: the dimension summed over"},
        [QS_KEY_MNK] = {"mnk", "ranges: m times n times k"},
        [QS_KEY_MIN_DIM] = {"min_dim", "ranges: the least of m, n and k"},
        [QS_KEY_TOKENS] = {"tokens", "ranges: rows of the layer's input; needs a known role"},
        [QS_KEY_IN] = {"in", "ranges: input features of the layer; needs a known role"},
        [QS_KEY_OUT] = {"out", "ranges: output features of the layer; needs a known role"},
        [QS_KEY_WEIGHT] = {"weight", "ranges: ordinal of the weight's first use, from 0; negative "
                                     "from the end; needs a known role"},
        [QS_KEY_STEPS] = {"steps", "ranges: training step, from 0"},
        [QS_KEY_LAYER] = {"layer", "patterns: name of the layer; needs qshim run --labels"},
        [QS_KEY_ROLE] = {"role", "words: fwd, dgrad, wgrad"},
        [QS_KEY_OP] = {"op", "words: NN, NT, TN, TT, A first"},
        [QS_KEY_API] = {"api", "patterns: the function called, e.g. cublasLt*"},
        [QS_KEY_ACTION] = {"action", "word: native, bf16, fp8, nf4 or auto"},
        [QS_KEY_SCALE] = {"scale", "word: auto, tensor or row"},
        [QS_KEY_FORMAT] = {"format", "word: auto, e4m3 or e5m2"},
        [QS_KEY_STRATEGY] = {"strategy",
                             "word: eager = always; performant = only where expected to "
                             "be faster; an action other than auto is eager by "
                             "default"},
        [QS_KEY_MIN_SQNR] = {"min_sqnr",
                             "dB from 0 to 200: least accuracy, instead of [numerics] min_sqnr; "
                             "an nf4 rule has none by default"},
};

/* Words in the order of their enums; roles start behind QS_ROLE_UNKNOWN. */
static const char *const role_words[] = {"fwd", "dgrad", "wgrad", NULL};
static const char *const op_words[] = {"NN", "NT", "TN", "TT", NULL};
static const char *const action_words[] = {"native", "bf16", "fp8", "nf4", "auto", NULL};
static const char *const scale_words[] = {"auto", "tensor", "row", NULL};
static const char *const format_words[] = {"auto", "e4m3", "e5m2", NULL};
static const char *const strategy_words[] = {"performant", "eager", NULL};

int qs_rule_key_find(const char *name)
{
	for (int i = 0; i < QS_RULE_KEYS; i++)
		if (!strcmp(qs_rule_keys[i].name, name))
			return i;
	return -1;
}

static bool set_words(struct qs_choose_words *field, const char *const *words, int first,
                      const char *list, char why[QS_WHY])
{
	char item[QS_LINE_MAX + 1];
	int more;
	while ((more = qs_list_next(&list, item, why)) > 0) {
		bool never = *item == '!';
		int index = qs_word_find(words, item + never);
		if (index < 0)
			return qs_word_refuse(words, item + never, why);
		uint32_t bit = UINT32_C(1) << (first + index);
		*(never ? &field->never : &field->only) |= bit;
	}
	return !more;
}

/* The entry points a pattern names; they are few, so the pattern is resolved here. */
static uint32_t entries_like(const struct qs_patterns *patterns)
{
	uint32_t entries = 0;
	for (int i = 0; i < QS_ENTRY_COUNT; i++)
		if (i != QS_ENTRY_DESTROY &&
		    qs_patterns_match(patterns, qs_entry_name((enum qs_entry)i)))
			entries |= UINT32_C(1) << i;
	return entries;
}

static bool refuse_entry(const char *item, char why[QS_WHY])
{
	const char *names[QS_ENTRY_COUNT];
	for (int i = 0; i < QS_ENTRY_COUNT; i++)
		names[i] = qs_entry_name((enum qs_entry)i);
	const char *nearest = qs_nearest(item, names, QS_ENTRY_COUNT);
	snprintf(why, QS_WHY, "no intercepted function is called '%.80s'%s%s%s", item,
	         nearest ? "; did you mean '" : "", nearest ? nearest : "", nearest ? "'?" : "");
	return false;
}

static bool set_entries(struct qs_choose_words *field, const char *list, char why[QS_WHY])
{
	char item[QS_LINE_MAX + 1];
	int more;
	while ((more = qs_list_next(&list, item, why)) > 0) {
		struct qs_patterns one = {0};
		bool never = *item == '!';
		bool good = qs_patterns_add(&one, item + never, why);
		uint32_t entries = good ? entries_like(&one) : 0;
		qs_patterns_free(&one);
		if (!entries)
			return good && refuse_entry(item + never, why);
		*(never ? &field->never : &field->only) |= entries;
	}
	return !more;
}

static int set_word(const char *const *words, const char *value, char why[QS_WHY])
{
	int index = qs_word_find(words, value);
	if (index < 0)
		qs_word_refuse(words, value, why);
	return index;
}

static bool set_outcome(struct qs_rule *rule, enum qs_rule_key key, const char *value,
                        char why[QS_WHY])
{
	const char *const *words = key == QS_KEY_ACTION   ? action_words
	                           : key == QS_KEY_SCALE  ? scale_words
	                           : key == QS_KEY_FORMAT ? format_words
	                                                  : strategy_words;
	int index = set_word(words, value, why);
	if (index < 0)
		return false;
	if (key == QS_KEY_ACTION)
		rule->action = (enum qs_action)index;
	else if (key == QS_KEY_SCALE)
		rule->scaling = (enum qs_scaling)index;
	else if (key == QS_KEY_FORMAT)
		rule->format = (enum qs_format)index;
	else
		rule->eager = index;
	return true;
}

static bool set_decibels(double *decibels, const char *value, char why[QS_WHY])
{
	double number;
	const char *end = qs_real_scan(value, 0, &number);
	if (!end || *end || number > SQNR_MAX) {
		snprintf(why, QS_WHY, "expected a number from 0 to %d", SQNR_MAX);
		return false;
	}
	*decibels = number;
	return true;
}

static bool set_value(struct qs_rule *rule, enum qs_rule_key key, const char *value,
                      char why[QS_WHY])
{
	if (key < QS_NUMBERS)
		return qs_ranges_add(&rule->numbers[key], value, key == QS_KEY_WEIGHT, why);
	switch (key) {
	case QS_KEY_LAYER:
		return qs_patterns_add(&rule->layer, value, why);
	case QS_KEY_ROLE:
		return set_words(&rule->role, role_words, QS_ROLE_FWD, value, why);
	case QS_KEY_OP:
		return set_words(&rule->op, op_words, 0, value, why);
	case QS_KEY_API:
		return set_entries(&rule->api, value, why);
	case QS_KEY_MIN_SQNR:
		return set_decibels(&rule->min_sqnr, value, why);
	default:
		return set_outcome(rule, key, value, why);
	}
}

/* Keeps the value as written, a line for each time the key was given. */
static bool keep_text(struct qs_rule *rule, enum qs_rule_key key, const char *value)
{
	char *old = rule->text[key];
	size_t before = old ? strlen(old) : 0, length = strlen(value);
	char *text = realloc(old, before + length + 2);
	if (!text)
		return false;
	if (before)
		text[before++] = '\n';
	memcpy(text + before, value, length + 1);
	rule->text[key] = text;
	return true;
}

bool qs_rule_set(struct qs_rule *rule, enum qs_rule_key key, const char *value, char why[QS_WHY])
{
	if (!set_value(rule, key, value, why))
		return false;
	if (!keep_text(rule, key, value)) {
		snprintf(why, QS_WHY, "out of memory");
		return false;
	}
	rule->given |= UINT32_C(1) << key;
	return true;
}

void qs_rule_unset(struct qs_rule *rule, enum qs_rule_key key)
{
	const struct qs_choose_words all = {0};
	rule->given &= ~(UINT32_C(1) << key);
	free(rule->text[key]);
	rule->text[key] = NULL;
	if (key < QS_NUMBERS)
		qs_ranges_free(&rule->numbers[key]);
	else if (key == QS_KEY_LAYER)
		qs_patterns_free(&rule->layer);
	else if (key == QS_KEY_ROLE)
		rule->role = all;
	else if (key == QS_KEY_OP)
		rule->op = all;
	else if (key == QS_KEY_API)
		rule->api = all;
}

void qs_rule_clear(struct qs_rule *rule)
{
	for (int key = 0; key < QS_RULE_KEYS; key++)
		qs_rule_unset(rule, (enum qs_rule_key)key);
}
