/* The values of a policy: numbers, words, lists, ranges, globs and patterns (syntax: rule.h).
 *
 * Parsing allocates and explains; matching does neither, because it runs in the host's threads.
 * Nothing here depends on the locale, which belongs to the host.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/rule.h"

#define NUMBER_MAX INT64_C(1000000000000000000)

/* Reals have fewer digits than a double, so that every one can be written back as it was read. */
#define REAL_MAX      INT64_C(1000000000000000)
#define REAL_DECIMALS 9

static bool digit(char c)
{
	return c >= '0' && c <= '9';
}

static bool blank(char c)
{
	return c == ' ' || (c >= '\t' && c <= '\r');
}

/* A number as written: mantissa * 10^exponent. */
struct decimal {
	int64_t mantissa; /* all digits, at most 18          */
	int exponent;     /* power of ten to multiply it by  */
};

static const char *digits_scan(const char *text, struct decimal *decimal, int step)
{
	for (; digit(*text); text++, decimal->exponent -= step) {
		if (decimal->mantissa >= NUMBER_MAX / 10)
			return NULL;
		decimal->mantissa = decimal->mantissa * 10 + (*text - '0');
	}
	return text;
}

/* Digits, perhaps a fraction, perhaps an exponent; "1..5" ends before the two dots. */
static const char *decimal_scan(const char *text, struct decimal *decimal)
{
	*decimal = (struct decimal){0};
	if (!digit(*text))
		return NULL;
	text = digits_scan(text, decimal, 0);
	if (text && *text == '.' && digit(text[1]))
		text = digits_scan(text + 1, decimal, 1);
	if (!text || (*text != 'e' && *text != 'E'))
		return text;
	bool minus = text[1] == '-';
	struct decimal power = {0};
	const char *end = text + 1 + minus;
	if (!digit(*end) || !(end = digits_scan(end, &power, 0)) || power.mantissa > 18)
		return NULL;
	decimal->exponent += minus ? -(int)power.mantissa : (int)power.mantissa;
	return end;
}

const char *qs_number_scan(const char *text, bool negative, int64_t *value)
{
	struct decimal decimal;
	bool minus = negative && *text == '-';
	text = decimal_scan(text + minus, &decimal);
	if (!text)
		return NULL;
	for (; decimal.exponent < 0; decimal.exponent++, decimal.mantissa /= 10)
		if (decimal.mantissa % 10)
			return NULL;
	for (; decimal.exponent > 0 && decimal.mantissa; decimal.exponent--, decimal.mantissa *= 10)
		if (decimal.mantissa > NUMBER_MAX / 10)
			return NULL;
	*value = minus ? -decimal.mantissa : decimal.mantissa;
	return text;
}

const char *qs_real_scan(const char *text, int shift, double *value)
{
	struct decimal decimal;
	text = decimal_scan(text, &decimal);
	if (!text || decimal.mantissa >= REAL_MAX || decimal.exponent < -REAL_DECIMALS)
		return NULL;
	/* One division by an exact power of ten rounds once: 3% is the double nearest to 0.03. */
	decimal.exponent += shift;
	double power = 1;
	for (int i = abs(decimal.exponent); i > 0; i--)
		power *= 10;
	double mantissa = (double)decimal.mantissa;
	*value = decimal.exponent < 0 ? mantissa / power : mantissa * power;
	return text;
}

size_t qs_real_text(double value, const char *unit, char *text, size_t size)
{
	int decimals = 0;
	int64_t power = 1, scaled;
	for (;; decimals++, power *= 10) {
		scaled = (int64_t)(value * (double)power + 0.5);
		if ((double)scaled / (double)power == value || decimals == REAL_DECIMALS + 2)
			break;
	}
	if (!decimals)
		return (size_t)snprintf(text, size, "%jd%s", (intmax_t)scaled, unit);
	return (size_t)snprintf(text, size, "%jd.%0*jd%s", (intmax_t)(scaled / power), decimals,
	                        (intmax_t)(scaled % power), unit);
}

int qs_word_find(const char *const *words, const char *text)
{
	for (int i = 0; words[i]; i++)
		if (!strcmp(words[i], text))
			return i;
	return -1;
}

bool qs_word_refuse(const char *const *words, const char *text, char why[QS_WHY])
{
	size_t count = 0, used = (size_t)snprintf(why, QS_WHY, "expected ");
	while (words[count])
		count++;
	for (size_t i = 0; i < count && used < QS_WHY; i++) {
		const char *join = i + 1 == count ? "" : i + 2 == count ? " or " : ", ";
		used += (size_t)snprintf(why + used, QS_WHY - used, "%s%s", words[i], join);
	}
	const char *nearest = qs_nearest(text, words, count);
	if (nearest && used < QS_WHY)
		snprintf(why + used, QS_WHY - used, "; did you mean '%s'?", nearest);
	return false;
}

int qs_list_next(const char **cursor, char item[QS_LINE_MAX + 1], char why[QS_WHY])
{
	const char *begin = *cursor;
	if (!begin)
		return 0;
	const char *end = begin + strcspn(begin, ",");
	*cursor = *end ? end + 1 : NULL;
	while (begin < end && blank(*begin))
		begin++;
	while (end > begin && blank(end[-1]))
		end--;
	size_t length = (size_t)(end - begin);
	if (!length || length > QS_LINE_MAX) {
		snprintf(why, QS_WHY, "%s", length ? "an item is too long" : "an item is missing");
		return -1;
	}
	memcpy(item, begin, length);
	item[length] = 0;
	return 1;
}

/* Ranges ------------------------------------------------------------------------------------- */

static bool divisor_parse(const char *text, struct qs_range *range, char why[QS_WHY])
{
	const char *end = qs_number_scan(text, false, &range->low);
	if (end && !*end && range->low > 0)
		return true;
	snprintf(why, QS_WHY, "'%%%.60s' should be %% and a whole number above 0", text);
	return false;
}

static bool bounds_parse(const char *text, bool negative, struct qs_range *range)
{
	*range = (struct qs_range){.low = 0, .high = INT64_MAX};
	bool open = text[0] == '.' && text[1] == '.';
	const char *end = open ? text : qs_number_scan(text, negative, &range->low);
	if (!end)
		return false;
	if (!*end && !open) {
		range->high = range->low;
		return true;
	}
	if (end[0] != '.' || end[1] != '.' || (open && !end[2]))
		return false;
	if (!end[2])
		return true;
	end = qs_number_scan(end + 2, negative, &range->high);
	return end && !*end;
}

static void bounds_refuse(const char *text, bool negative, char why[QS_WHY])
{
	size_t digits = strspn(text, "0123456789.");
	bool suffix = digits && text[digits] && strchr("kKmMgG", text[digits]) && !text[digits + 1];
	if (suffix)
		snprintf(why, QS_WHY, "'%.60s' is ambiguous; write 4096 or 4e3 in full", text);
	else
		snprintf(why, QS_WHY, "'%.60s' is no range; write a..b, a.., ..b, a, %%d or !a%s",
		         text, negative ? ", negative from the end" : "");
}

bool qs_range_parse(const char *text, bool negative, struct qs_range *range, char why[QS_WHY])
{
	bool exclude = *text == '!', divisible = text[exclude] == '%';
	const char *bounds = text + exclude + divisible;
	if (divisible && !divisor_parse(bounds, range, why))
		return false;
	if (!divisible && !bounds_parse(bounds, negative, range)) {
		bounds_refuse(bounds, negative, why);
		return false;
	}
	range->exclude = exclude;
	range->divisible = divisible;
	bool same_end = (range->low < 0) == (range->high < 0);
	if (!divisible && same_end && range->low > range->high) {
		snprintf(why, QS_WHY, "'%.60s' is empty, it ends before it begins", bounds);
		return false;
	}
	return true;
}

/* Room for one element more in an array that grows by doubling; NULL if memory is out. */
static void *grown(void *items, int count, size_t size)
{
	if (count & (count - 1))
		return items;
	return reallocarray(items, count ? (size_t)count * 2 : 1, size);
}

bool qs_ranges_add(struct qs_ranges *ranges, const char *list, bool negative, char why[QS_WHY])
{
	char item[QS_LINE_MAX + 1];
	int more;
	while ((more = qs_list_next(&list, item, why)) > 0) {
		struct qs_range range = {0};
		if (!qs_range_parse(item, negative, &range, why))
			return false;
		struct qs_range *items = grown(ranges->items, ranges->count, sizeof *items);
		if (!items) {
			snprintf(why, QS_WHY, "out of memory");
			return false;
		}
		ranges->items = items;
		ranges->items[ranges->count++] = range;
	}
	return !more;
}

/* 1 = holds, 0 = does not, -1 = cannot be told because the total is unknown. */
static int range_holds(const struct qs_range *range, int64_t value, int64_t total)
{
	if (range->divisible)
		return value % range->low == 0;
	int64_t low = range->low, high = range->high;
	if ((low < 0 || high < 0) && total <= 0)
		return -1;
	low += low < 0 ? total : 0;
	high += high < 0 ? total : 0;
	return value >= low && value <= high;
}

bool qs_ranges_match(const struct qs_ranges *ranges, int64_t value, int64_t total)
{
	bool alternatives = false, found = false;
	for (int i = 0; i < ranges->count; i++) {
		const struct qs_range *range = &ranges->items[i];
		int holds = range_holds(range, value, total);
		if (range->exclude ? holds != 0 : range->divisible && !holds)
			return false;
		if (range->exclude || range->divisible)
			continue;
		alternatives = true;
		found = found || holds == 1;
	}
	return found || !alternatives;
}

void qs_ranges_free(struct qs_ranges *ranges)
{
	free(ranges->items);
	*ranges = (struct qs_ranges){0};
}

/* Patterns ----------------------------------------------------------------------------------- */

/* Matches one [...] at `glob`; returns its end, or NULL if it is not closed. */
static const char *bracket_match(const char *glob, unsigned char c, bool *matches)
{
	bool negated = glob[1] == '!' || glob[1] == '^', found = false;
	const unsigned char *at = (const unsigned char *)glob + 1 + negated, *begin = at;
	for (; *at && (*at != ']' || at == begin); at++) {
		unsigned low = *at, high = low;
		if (at[1] == '-' && at[2] && at[2] != ']') {
			high = at[2];
			at += 2;
		}
		found = found || (c >= low && c <= high);
	}
	*matches = found != negated;
	return *at ? (const char *)at + 1 : NULL;
}

/* Matches one character against the head of a glob; returns the rest, or NULL. */
static const char *glob_step(const char *glob, char c)
{
	bool matches = false;
	const char *end = *glob == '[' ? bracket_match(glob, (unsigned char)c, &matches) : NULL;
	if (end)
		return matches ? end : NULL;
	return *glob == '?' || *glob == c ? glob + 1 : NULL;
}

/* Where the part of a glob behind a star can begin: at its first character, if that is a plain one.
 * Most of the time of matching is spent here. */
static const char *candidate(const char *glob, const char *text)
{
	if (*glob == '*' || *glob == '?' || *glob == '[')
		return text;
	while (*text && *text != *glob)
		text++;
	return text;
}

bool qs_glob_match(const char *glob, const char *text)
{
	/* After a mismatch only the last star needs to be retried, one character further on. */
	const char *star = NULL, *retry = NULL;
	while (*text) {
		const char *next = *glob && *glob != '*' ? glob_step(glob, *text) : NULL;
		if (*glob == '*') {
			star = ++glob;
			retry = text = candidate(star, text);
		} else if (next) {
			glob = next;
			text++;
		} else if (star) {
			glob = star;
			retry = text = candidate(star, retry + 1);
		} else {
			return false;
		}
	}
	while (*glob == '*')
		glob++;
	return !*glob;
}

static bool glob_closed(const char *glob)
{
	bool matches;
	for (; *glob; glob++) {
		const char *end = *glob == '[' ? bracket_match(glob, 0, &matches) : glob + 1;
		if (!end)
			return false;
		glob = end - 1;
	}
	return true;
}

/* The length of `part` in a glob of the form *part*, 0 if it has another form. */
static size_t part_length(const char *glob)
{
	size_t length = *glob == '*' ? strcspn(glob + 1, "*?[") : 0;
	return length && !strcmp(glob + 1 + length, "*") ? length : 0;
}

static bool glob_parse(const char *text, struct qs_pattern *pattern, char why[QS_WHY])
{
	size_t length = part_length(text);
	snprintf(why, QS_WHY, "%s", !*text ? "a pattern is empty" : "out of memory");
	if (!glob_closed(text))
		snprintf(why, QS_WHY, "in '%.100s': [ without ]", text);
	else if (length)
		pattern->part = strndup(text + 1, length);
	else if (*text)
		pattern->glob = strdup(text);
	return pattern->glob || pattern->part;
}

static bool pattern_parse(const char *text, struct qs_pattern *pattern, char why[QS_WHY])
{
	*pattern = (struct qs_pattern){.exclude = *text == '!'};
	text += pattern->exclude;
	if (strncmp(text, "re:", 3))
		return glob_parse(text, pattern, why);
	pattern->regex = qs_regex_compile(text + 3, why);
	return pattern->regex;
}

static bool pattern_matches(const struct qs_pattern *pattern, const char *text)
{
	if (pattern->part)
		return strstr(text, pattern->part);
	return pattern->regex ? qs_regex_match(pattern->regex, text)
	                      : qs_glob_match(pattern->glob, text);
}

bool qs_patterns_add(struct qs_patterns *patterns, const char *list, char why[QS_WHY])
{
	char item[QS_LINE_MAX + 1];
	int more;
	while ((more = qs_list_next(&list, item, why)) > 0) {
		struct qs_pattern *items = grown(patterns->items, patterns->count, sizeof *items);
		if (!items) {
			snprintf(why, QS_WHY, "out of memory");
			return false;
		}
		patterns->items = items;
		if (!pattern_parse(item, &items[patterns->count], why))
			return false;
		patterns->count++;
	}
	return !more;
}

bool qs_patterns_match(const struct qs_patterns *patterns, const char *text)
{
	bool alternatives = false, found = false;
	for (int i = 0; i < patterns->count; i++) {
		const struct qs_pattern *pattern = &patterns->items[i];
		alternatives = alternatives || !pattern->exclude;
		if (found && !pattern->exclude)
			continue;
		bool matches = pattern_matches(pattern, text);
		if (matches && pattern->exclude)
			return false;
		found = found || matches;
	}
	return found || !alternatives;
}

void qs_patterns_free(struct qs_patterns *patterns)
{
	for (int i = 0; i < patterns->count; i++) {
		free(patterns->items[i].glob);
		free(patterns->items[i].part);
		free(patterns->items[i].regex);
	}
	free(patterns->items);
	*patterns = (struct qs_patterns){0};
}
