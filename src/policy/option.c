/* The options table: every setting outside the rules, once.
 *
 * Parser, environment, `qshim policy show` and manual read this table; adding an option is one
 * field in struct qs_options and one row here. Values are stored by offset, and only after they
 * were found to be good. QSHIM, QSHIM_POLICY and QSHIM_SET choose the policy itself: see load.c.
 */
#include <stdio.h>
#include <string.h>

#include "note/note.h"
#include "policy/rule.h"

static const char *const mode_words[] = {"on", "shadow", "observe", "off", NULL};
static const char *const validity_words[] = {"each",    "adjacent", "verified",
                                             "tracked", "frozen",   NULL};
static const char *const cublaslt_words[] = {"tested", "any", NULL};
static const char *const host_bound_words[] = {"native", "keep", NULL};
static const char *const early_words[] = {"never", "eager", "always", NULL};
static const char *const summary_words[] = {"auto", "0", "1", NULL};
static const char *const flag_words[] = {"0", "1", NULL};
/* The kinds of message in the order of enum qs_level, then two for convenience. */
static const char *const level_words[] = {"error",    "warn", "info", "dispatch", "cache",
                                          "numerics", "all",  "none", NULL};

enum {
	LEVEL_ALL = QS_LOG_LEVELS,
	LEVEL_NONE,
};

#define FIELD(name) offsetof(struct qs_options, name), sizeof(((struct qs_options *)0)->name)

static const struct qs_option options_table[] = {
        {"qshim", "version", NULL, "1", "version of this syntax; a policy must state it", NULL, 1,
         1, FIELD(version), QS_OPTION_COUNT},
        {"qshim", "mode", "QSHIM", "on",
         "on; shadow: measure what the rules would do, replace nothing; observe: decide only; off",
         mode_words, 0, 0, FIELD(mode), QS_OPTION_WORD},
        {"qshim", "process", NULL, "", "patterns of executable names to act in; empty = all", NULL,
         0, 0, FIELD(process), QS_OPTION_PATTERNS},
        {"cache", "validity", NULL, "tracked",
         "how a quantised copy is known to be current, where the device allows it", validity_words,
         0, 0, FIELD(validity), QS_OPTION_WORD},
        {"cache", "max_mib", NULL, "25%", "device memory to take at most, MiB or % of the total",
         NULL, 0, 1e9, FIELD(max_mib), QS_OPTION_MEMORY},
        {"cache", "max_keys", NULL, "4096", "distinct products to remember", NULL, 16, 65536,
         FIELD(max_keys), QS_OPTION_COUNT},
        {"numerics", "min_sqnr", NULL, "20", "dB; a product measured below it stays native", NULL,
         0, 200, FIELD(min_sqnr), QS_OPTION_REAL},
        {"numerics", "check_every", NULL, "1000",
         "uses of a product between two checks of its error, of a kept weight between two "
         "looks at the whole of it; 0 = never",
         NULL, 0, 1e12, FIELD(check_every), QS_OPTION_COUNT},
        {"tune", "min_gain", NULL, "3%", "gain below which a product stays native", NULL, 0, 1,
         FIELD(min_gain), QS_OPTION_SHARE},
        {"tune", "budget_ms", NULL, "2000", "ms of tuning in a process", NULL, 0, 1e9,
         FIELD(budget_ms), QS_OPTION_REAL},
        {"tune", "max_mib", NULL, "5%",
         "device memory for measuring, times and errors, MiB or % of the total", NULL, 0, 1e9,
         FIELD(tune_mib), QS_OPTION_MEMORY},
        {"tune", "file", NULL, "~/.cache/qshim/tuned.%h.ini",
         "where measurements are kept for later runs; empty = nowhere", NULL, 0, 0,
         FIELD(tuned_file), QS_OPTION_TEXT},
        {"tune", "host_bound", NULL, "native",
         "what becomes of products that auto replaces where the program is not faster for it, "
         "as one whose device waits for the CPU: native; keep",
         host_bound_words, 0, 0, FIELD(host_bound_kept), QS_OPTION_FLAG},
        {"engine", "cublaslt", NULL, "tested",
         "tested; any: also versions of cuBLASLt newer than tested", cublaslt_words, 0, 0,
         FIELD(cublaslt_any), QS_OPTION_FLAG},
        {"engine", "early", NULL, "eager",
         "where kernels begin before the work ahead of them ends: never; eager: outside captured "
         "graphs; always: in graphs too, whose edges cuGraphGetEdges then cannot tell",
         early_words, 0, 0, FIELD(early), QS_OPTION_WORD},
        {"log", "level", "QSHIM_LOG", "warn",
         "kinds of message; each of them brings error and warn along, error comes alone",
         level_words, 0, 0, FIELD(log_levels), QS_OPTION_LEVELS},
        {"log", "file", "QSHIM_LOG_FILE", "", "file for messages; empty = stderr", NULL, 0, 0,
         FIELD(log_file), QS_OPTION_TEXT},
        {"log", "out", "QSHIM_OUT", "", "directory for decisions and counters; empty = none", NULL,
         0, 0, FIELD(out_dir), QS_OPTION_TEXT},
        {"log", "summary", "QSHIM_SUMMARY", "auto", "table at exit; auto: if stderr is a terminal",
         summary_words, 0, 0, FIELD(summary), QS_OPTION_WORD},
        {"log", "quiet", "QSHIM_QUIET", "0", "1: do not announce lower precision", flag_words, 0, 0,
         FIELD(quiet), QS_OPTION_FLAG},
};

#define OPTIONS ((int)(sizeof options_table / sizeof *options_table))

const struct qs_option *qs_option_at(int index)
{
	return index >= 0 && index < OPTIONS ? &options_table[index] : NULL;
}

int qs_option_find(const char *section, const char *key)
{
	for (int i = 0; i < OPTIONS; i++)
		if (!strcmp(options_table[i].section, section) &&
		    !strcmp(options_table[i].key, key))
			return i;
	return -1;
}

/* Setting ------------------------------------------------------------------------------------ */

static bool refuse_number(const struct qs_option *option, const char *form, char why[QS_WHY])
{
	snprintf(why, QS_WHY, "expected %s in %.10g..%.10g", form, option->low, option->high);
	return false;
}

static bool in_bounds(const struct qs_option *option, double value)
{
	return value >= option->low && value <= option->high;
}

static bool set_word(void *field, const struct qs_option *option, const char *text,
                     char why[QS_WHY])
{
	int index = qs_word_find(option->words, text);
	if (index < 0)
		return qs_word_refuse(option->words, text, why);
	if (option->type == QS_OPTION_FLAG)
		*(bool *)field = index;
	else
		*(unsigned *)field = (unsigned)index; /* the enums' own type */
	return true;
}

static bool set_count(int64_t *field, const struct qs_option *option, const char *text,
                      char why[QS_WHY])
{
	int64_t value;
	const char *end = qs_number_scan(text, false, &value);
	if (!end || *end || !in_bounds(option, (double)value))
		return refuse_number(option, "a whole number", why);
	*field = value;
	return true;
}

static bool set_real(double *field, const struct qs_option *option, const char *text,
                     char why[QS_WHY])
{
	double value;
	const char *end = qs_real_scan(text, 0, &value);
	if (!end || *end || !in_bounds(option, value))
		return refuse_number(option, "a number", why);
	*field = value;
	return true;
}

static bool set_share(double *field, const struct qs_option *option, const char *text,
                      char why[QS_WHY])
{
	double value;
	bool percent = strchr(text, '%');
	const char *end = qs_real_scan(text, percent ? -2 : 0, &value);
	if (!end || strcmp(end, percent ? "%" : "") || !in_bounds(option, value))
		return refuse_number(option, "a share such as 3% or 0.03", why);
	*field = value;
	return true;
}

static bool set_memory(struct qs_memory *field, const char *text, char why[QS_WHY])
{
	double value;
	const char *end = qs_real_scan(text, 0, &value);
	bool percent = end && !strcmp(end, "%");
	if (!end || (*end && !percent) || value > (percent ? 100 : 1e9)) {
		snprintf(why, QS_WHY, "expected MiB such as 2048 or a share such as 25%%");
		return false;
	}
	*field = (struct qs_memory){value, percent};
	return true;
}

static bool set_text(char *field, const struct qs_option *option, const char *text,
                     char why[QS_WHY])
{
	size_t length = strlen(text);
	if (length >= option->size) {
		snprintf(why, QS_WHY, "longer than %zu characters", option->size - 1);
		return false;
	}
	memcpy(field, text, length + 1);
	return true;
}

static bool set_patterns(char *field, const struct qs_option *option, const char *text,
                         char why[QS_WHY])
{
	struct qs_patterns patterns = {0};
	bool good = !*text || qs_patterns_add(&patterns, text, why);
	qs_patterns_free(&patterns);
	return good && set_text(field, option, text, why);
}

/* Errors are part of every list and warnings of every list but "error": asking for more detail must
 * not silence what matters. "none" is for those who mean it. */
static bool set_levels(unsigned *field, const struct qs_option *option, const char *text,
                       char why[QS_WHY])
{
	char item[QS_LINE_MAX + 1];
	unsigned levels = 0;
	int more;
	while ((more = qs_list_next(&text, item, why)) > 0) {
		int index = qs_word_find(option->words, item);
		if (index < 0)
			return qs_word_refuse(option->words, item, why);
		if (index == LEVEL_ALL)
			levels = (1u << QS_LOG_LEVELS) - 1;
		else if (index != LEVEL_NONE)
			levels |= 1u << index | 1u << QS_LOG_ERROR;
	}
	if (levels & ~(1u << QS_LOG_ERROR))
		levels |= 1u << QS_LOG_WARN;
	if (!more)
		*field = levels;
	return !more;
}

bool qs_option_set(struct qs_options *options, const struct qs_option *option, const char *text,
                   char why[QS_WHY])
{
	void *field = (char *)options + option->offset;
	switch (option->type) {
	case QS_OPTION_WORD:
	case QS_OPTION_FLAG:
		return set_word(field, option, text, why);
	case QS_OPTION_COUNT:
		return set_count(field, option, text, why);
	case QS_OPTION_REAL:
		return set_real(field, option, text, why);
	case QS_OPTION_SHARE:
		return set_share(field, option, text, why);
	case QS_OPTION_MEMORY:
		return set_memory(field, text, why);
	case QS_OPTION_TEXT:
		return set_text(field, option, text, why);
	case QS_OPTION_PATTERNS:
		return set_patterns(field, option, text, why);
	case QS_OPTION_LEVELS:
		return set_levels(field, option, text, why);
	}
	return false;
}

void qs_options_default(struct qs_options *options)
{
	char why[QS_WHY];
	*options = (struct qs_options){0};
	for (int i = 0; i < OPTIONS; i++)
		qs_option_set(options, &options_table[i], options_table[i].initial, why);
}

/* Writing ------------------------------------------------------------------------------------ */

static size_t levels_text(unsigned levels, char *text, size_t size)
{
	const unsigned base = 1u << QS_LOG_ERROR | 1u << QS_LOG_WARN;
	if (!levels || levels == 1u << QS_LOG_ERROR || levels == base)
		return (size_t)snprintf(text, size, "%s",
		                        !levels          ? "none"
		                        : levels == base ? "warn"
		                                         : "error");
	size_t used = 0;
	for (int i = 0; i < QS_LOG_LEVELS; i++) {
		if (!((levels & ~base) >> i & 1))
			continue;
		char *at = used < size ? text + used : NULL;
		used += (size_t)snprintf(at, at ? size - used : 0, "%s%s", used ? ", " : "",
		                         level_words[i]);
	}
	return used;
}

static size_t memory_text(const struct qs_memory *memory, char *text, size_t size)
{
	return qs_real_text(memory->value, memory->percent ? "%" : "", text, size);
}

size_t qs_option_text(const struct qs_options *options, const struct qs_option *option, char *text,
                      size_t size)
{
	const void *field = (const char *)options + option->offset;
	switch (option->type) {
	case QS_OPTION_WORD:
		return (size_t)snprintf(text, size, "%s", option->words[*(const unsigned *)field]);
	case QS_OPTION_FLAG:
		return (size_t)snprintf(text, size, "%s", option->words[*(const bool *)field]);
	case QS_OPTION_COUNT:
		return (size_t)snprintf(text, size, "%jd", (intmax_t) * (const int64_t *)field);
	case QS_OPTION_REAL:
	case QS_OPTION_SHARE:
		return qs_real_text(*(const double *)field, "", text, size);
	case QS_OPTION_MEMORY:
		return memory_text(field, text, size);
	case QS_OPTION_TEXT:
	case QS_OPTION_PATTERNS:
		return (size_t)snprintf(text, size, "%s", (const char *)field);
	case QS_OPTION_LEVELS:
		return levels_text(*(const unsigned *)field, text, size);
	}
	return 0;
}
