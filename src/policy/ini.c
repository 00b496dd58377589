/* Reads the text of a policy into its options and rules.
 *
 * inih splits lines into keys and values and strips comments. Section heads, indentation and the
 * length of lines are dealt with in the reader that feeds it: inih would cut long heads and lines
 * silently, does not report empty sections, and takes an indented key for more of the value above.
 * QSHIM_SET goes through the same functions, one item for one line. All errors are counted, the
 * first one is reported.
 */
#include <ini.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "note/note.h"
#include "policy/rule.h"

#define DEFAULT_RULE (-1)
#define NAME_CHARS   "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"

enum section_kind {
	SECTION_NONE,    /* before the first head                          */
	SECTION_IGNORED, /* was reported; its keys are not looked at       */
	SECTION_OPTIONS, /* a section of the options table                 */
	SECTION_RULE,    /* a rule, or [default]                           */
};

struct parser {
	struct qs_policy *policy;      /* being filled                                         */
	const char *name;              /* file or variable, for messages                       */
	const char *at, *end;          /* text not read yet                                    */
	int line;                      /* line or item at hand, from 1                         */
	enum section_kind kind;        /* of the section at hand                               */
	char section[QS_LINE_MAX + 1]; /* its head, without brackets                           */
	int rule;                      /* its index, or DEFAULT_RULE                           */
	bool set;                      /* reading QSHIM_SET: keys replace, new rules go first  */
	int added;                     /* rules that QSHIM_SET put in front                    */
	uint32_t options_seen;         /* bit per option given in this text                    */
	int errors;                    /* found so far                                         */
	int first_line;                /* of the first                                         */
	char first[2 * QS_WHY];        /* the first                                            */
};

static void error(struct parser *parser, const char *format, ...)
        __attribute__((format(printf, 2, 3)));

static void error(struct parser *parser, const char *format, ...)
{
	if (parser->errors++)
		return;
	parser->first_line = parser->line;
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(parser->first, sizeof parser->first, format, arguments);
	va_end(arguments);
}

static void error_with_nearest(struct parser *parser, const char *what, const char *word,
                               const char *const *words, size_t count)
{
	const char *nearest = qs_nearest(word, words, count);
	if (nearest)
		error(parser, "%s; did you mean '%s'?", what, nearest);
	else
		error(parser, "%s", what);
}

/* Bytes that could drive a terminal do not get there by way of a message. */
static void make_printable(char *text)
{
	for (; *text; text++)
		if ((unsigned char)*text < ' ' || *text == 0x7f)
			*text = '?';
}

static bool report(struct parser *parser)
{
	if (!parser->errors)
		return true;
	char more[64] = "";
	if (parser->errors > 1)
		snprintf(more, sizeof more, "; %d further error%s", parser->errors - 1,
		         parser->errors > 2 ? "s" : "");
	make_printable(parser->first);
	qs_message(QS_LOG_WARN, "%s:%d: %s (policy not used%s)", parser->name, parser->first_line,
	           parser->first, more);
	return false;
}

static char *trim(char *text)
{
	text += strspn(text, " \t\r\n");
	size_t length = strlen(text);
	while (length && strchr(" \t\r\n", text[length - 1]))
		text[--length] = 0;
	return text;
}

/* Sections ----------------------------------------------------------------------------------- */

static struct qs_rule *rule_at_hand(struct parser *parser)
{
	return parser->rule == DEFAULT_RULE ? &parser->policy->otherwise
	                                    : &parser->policy->rules[parser->rule];
}

static int rule_find(const struct qs_policy *policy, const char *name)
{
	for (int i = 0; i < policy->count; i++)
		if (!strcmp(policy->rules[i].name, name))
			return i;
	return -1;
}

static bool rule_name_good(struct parser *parser, const char *name)
{
	size_t length = strlen(name);
	if (!length)
		error(parser, "a rule needs a name: [rule NAME]");
	else if (length >= QS_RULE_NAME)
		error(parser, "the name of a rule may have %d characters, not %zu",
		      QS_RULE_NAME - 1, length);
	else if (name[strspn(name, NAME_CHARS)])
		error(parser, "the name '%s' may have only letters, digits, '_', '.' and '-'",
		      name);
	else if (!strcmp(name, "default"))
		error(parser, "'default' cannot name a rule; write [default]");
	else
		return true;
	return false;
}

/* Makes an empty rule at `index`; false if memory is out. */
static bool rule_insert(struct qs_policy *policy, int index)
{
	size_t size = sizeof *policy->rules;
	struct qs_rule *rules = reallocarray(policy->rules, (size_t)policy->count + 1, size);
	if (!rules)
		return false;
	memmove(&rules[index + 1], &rules[index], (size_t)(policy->count - index) * size);
	memset(&rules[index], 0, size);
	policy->rules = rules;
	policy->count++;
	return true;
}

static void rule_open(struct parser *parser, const char *name)
{
	struct qs_policy *policy = parser->policy;
	int found = rule_find(policy, name), index = parser->set ? parser->added : policy->count;
	parser->kind = SECTION_IGNORED;
	if (found >= 0 && !parser->set) {
		error(parser, "rule '%s' stands on line %d already", name,
		      policy->rules[found].line);
	} else if (found < 0 && policy->count == QS_RULES_MAX) {
		error(parser, "more than %d rules", QS_RULES_MAX);
	} else if (found < 0 && !rule_insert(policy, index)) {
		error(parser, "out of memory");
	} else {
		parser->kind = SECTION_RULE;
		parser->rule = found < 0 ? index : found;
	}
	if (parser->kind != SECTION_RULE || found >= 0)
		return;
	struct qs_rule *rule = rule_at_hand(parser);
	strcpy(rule->name, name);
	rule->origin = parser->name;
	rule->line = parser->line;
	parser->added += parser->set;
}

static bool section_of_options(const char *name)
{
	const struct qs_option *option;
	for (int i = 0; (option = qs_option_at(i)); i++)
		if (!strcmp(option->section, name))
			return true;
	return false;
}

static void section_unknown(struct parser *parser, const char *name)
{
	const char *names[32] = {"default", "rule"};
	const struct qs_option *option;
	size_t count = 2;
	for (int i = 0; (option = qs_option_at(i)) && count < 32; i++)
		names[count++] = option->section;
	char what[QS_WHY];
	snprintf(what, sizeof what, "unknown section [%.100s]", name);
	error_with_nearest(parser, what, name, names, count);
	parser->kind = SECTION_IGNORED;
}

/* Takes the text between the brackets. */
static void section_open(struct parser *parser, const char *head)
{
	bool is_rule = !strncmp(head, "rule", 4) && (!head[4] || head[4] == ' ' || head[4] == '\t');
	snprintf(parser->section, sizeof parser->section, "%s", head);
	if (is_rule) {
		const char *name = head + 4 + strspn(head + 4, " \t");
		parser->kind = SECTION_IGNORED;
		if (rule_name_good(parser, name))
			rule_open(parser, name);
	} else if (!strcmp(head, "default")) {
		parser->kind = SECTION_RULE;
		parser->rule = DEFAULT_RULE;
	} else if (section_of_options(head)) {
		parser->kind = SECTION_OPTIONS;
	} else {
		section_unknown(parser, head);
	}
}

/* Keys --------------------------------------------------------------------------------------- */

static void value_refused(struct parser *parser, const char *key, const char *value,
                          const char *why)
{
	error(parser, "unusable value '%.60s' of '%s' in [%.60s]: %s", value, key, parser->section,
	      why);
}

static void key_unknown(struct parser *parser, const char *key)
{
	const char *names[QS_RULE_KEYS + 32];
	size_t count = 0;
	const struct qs_option *option;
	if (parser->kind == SECTION_RULE) {
		int first = parser->rule == DEFAULT_RULE ? QS_CONDITIONS : 0;
		for (int i = first; i < QS_RULE_KEYS; i++)
			names[count++] = qs_rule_keys[i].name;
	} else {
		for (int i = 0; (option = qs_option_at(i)); i++)
			if (!strcmp(option->section, parser->section))
				names[count++] = option->key;
	}
	char what[QS_WHY];
	snprintf(what, sizeof what, "unknown key '%.60s' in [%.60s]", key, parser->section);
	error_with_nearest(parser, what, key, names, count);
}

static void option_key(struct parser *parser, const char *key, const char *value)
{
	char why[QS_WHY];
	int index = qs_option_find(parser->section, key);
	const struct qs_option *option = qs_option_at(index);
	if (!option) {
		key_unknown(parser, key);
		return;
	}
	uint32_t bit = UINT32_C(1) << index;
	if (parser->options_seen & bit && !parser->set)
		error(parser, "'%s' is given twice in [%s]", key, parser->section);
	else if (!strcmp(key, "version") && strcmp(value, "1"))
		error(parser, "version '%.20s' is not known; this qshim reads version 1", value);
	else if (!qs_option_set(&parser->policy->options, option, value, why))
		value_refused(parser, key, value, why);
	parser->options_seen |= bit;
}

static void rule_key(struct parser *parser, const char *name, const char *value)
{
	char why[QS_WHY];
	struct qs_rule *rule = rule_at_hand(parser);
	int key = qs_rule_key_find(name);
	if (key < 0) {
		key_unknown(parser, name);
		return;
	}
	if (parser->rule == DEFAULT_RULE && key < QS_CONDITIONS) {
		error(parser,
		      "'%s' cannot stand in [default], which takes all that no rule matches", name);
		return;
	}
	bool outcome = key >= QS_CONDITIONS, given = rule->given >> key & 1;
	if (outcome && given && !parser->set) {
		error(parser, "'%s' is given twice in [%s]", name, parser->section);
		return;
	}
	if (parser->set)
		qs_rule_unset(rule, (enum qs_rule_key)key);
	if (!*value)
		error(parser, "'%s' in [%s] has no value", name, parser->section);
	else if (!qs_rule_set(rule, (enum qs_rule_key)key, value, why))
		value_refused(parser, name, value, why);
}

static void key_value(struct parser *parser, const char *key, const char *value)
{
	if (parser->kind == SECTION_OPTIONS)
		option_key(parser, key, value);
	else if (parser->kind == SECTION_RULE)
		rule_key(parser, key, value);
	else if (parser->kind == SECTION_NONE)
		error(parser, "'%.60s' stands before the first [section]", key);
}

/* Files -------------------------------------------------------------------------------------- */

/* inih's handler. A value that begins with the comment sign is an empty value with a comment. */
static int on_key(void *user, const char *section, const char *key, const char *value)
{
	(void)section;
	key_value(user, key, *value == ';' ? "" : value);
	return 1;
}

static void on_head(struct parser *parser, char *head)
{
	char *close = strchr(head, ']');
	if (!close) {
		error(parser, "'%.100s' has no ']'", head);
		parser->kind = SECTION_IGNORED;
		return;
	}
	const char *rest = close + 1 + strspn(close + 1, " \t\r");
	if (*rest && *rest != ';' && *rest != '#')
		error(parser, "'%.60s' follows ']' on its line", rest);
	*close = 0;
	section_open(parser, trim(head + 1));
}

/* Takes the next line without its indentation, line feed and what makes it too long. */
static void line_take(struct parser *parser, char line[QS_LINE_MAX + 1])
{
	const char *feed = memchr(parser->at, '\n', (size_t)(parser->end - parser->at));
	const char *end = feed ? feed : parser->end, *begin = parser->at;
	parser->at = feed ? feed + 1 : end;
	parser->line++;
	if (parser->line == 1 && end - begin >= 3 && !memcmp(begin, "\xef\xbb\xbf", 3))
		begin += 3;
	while (begin < end && (*begin == ' ' || *begin == '\t'))
		begin++;
	while (end > begin && (end[-1] == ' ' || end[-1] == '\t' || end[-1] == '\r'))
		end--;
	size_t length = (size_t)(end - begin);
	bool comment = length && (*begin == ';' || *begin == '#');
	if (length > QS_LINE_MAX && !comment)
		error(parser,
		      "a line of %zu characters; at most %d fit, so give the key again on the next "
		      "line with the rest of its list",
		      length, QS_LINE_MAX);
	length = comment || length > QS_LINE_MAX ? 0 : length;
	memcpy(line, begin, length);
	line[length] = 0;
}

/* inih's reader, like fgets(); the buffer holds QS_LINE_MAX characters, '\n' and NUL. */
static char *next_line(char *buffer, int size, void *user)
{
	struct parser *parser = user;
	char line[QS_LINE_MAX + 1];
	if (parser->at == parser->end)
		return NULL;
	line_take(parser, line);
	bool head = *line == '[';
	if (head)
		on_head(parser, line);
	if (snprintf(buffer, (size_t)size, "%s\n", head ? "" : line) >= size)
		error(parser, "a line longer than the ini reader was built for, %d", size - 2);
	return buffer;
}

/* Line `number` of the text, for the message about it. */
static void line_show(const char *text, const char *end, int number, char *line, size_t size)
{
	for (; number > 1; number--)
		text = (const char *)memchr(text, '\n', (size_t)(end - text)) + 1;
	const char *feed = memchr(text, '\n', (size_t)(end - text));
	snprintf(line, size, "%.*s", (int)((feed ? feed : end) - text), text);
	line[strcspn(line, "\r")] = 0;
}

/* inih tells only the first line that is neither head nor key, after the end. */
static void malformed(struct parser *parser, const char *text, int line)
{
	char shown[100];
	line_show(text, parser->end, line, shown, sizeof shown);
	parser->line = line;
	int errors = parser->errors;
	if (line < parser->first_line)
		parser->errors = 0;
	error(parser, "'%s' is neither a [section] nor a 'key = value'", shown);
	parser->errors = errors + 1;
}

static bool text_readable(struct parser *parser, const char *text, size_t length)
{
	const char *nul = memchr(text, 0, length);
	parser->line = 1;
	if (length > QS_POLICY_MAX)
		error(parser, "a policy of %zu bytes; at most %d are read", length, QS_POLICY_MAX);
	else if (nul) {
		for (const char *at = text; (at = memchr(at, '\n', (size_t)(nul - at))); at++)
			parser->line++;
		error(parser, "a NUL byte; a policy is plain text");
	}
	parser->line = 0;
	return !parser->errors;
}

/* What can be told only at the end of a text: rules without an action, a file without a version.
 * After other errors these mostly follow from them. */
static void check_complete(struct parser *parser)
{
	if (parser->errors)
		return;
	struct qs_policy *policy = parser->policy;
	uint32_t version = UINT32_C(1) << qs_option_find("qshim", "version");
	for (int i = 0; i < policy->count; i++) {
		parser->line = policy->rules[i].line;
		if (!(policy->rules[i].given >> QS_KEY_ACTION & 1))
			error(parser, "[rule %s] has no action", policy->rules[i].name);
	}
	parser->line = 1;
	if (!parser->set && !(parser->options_seen & version))
		error(parser, "no version; write 'version = 1' under [qshim]");
}

bool qs_ini_file(struct qs_policy *policy, const char *text, size_t length)
{
	struct parser parser = {.policy = policy, .name = policy->name, .at = text};
	parser.end = text + length;
	if (text_readable(&parser, text, length)) {
		int line = ini_parse_stream(next_line, &parser, on_key, &parser);
		if (line > 0)
			malformed(&parser, text, line);
		else if (line < 0)
			error(&parser, "out of memory");
		check_complete(&parser);
	}
	return report(&parser);
}

/* QSHIM_SET ---------------------------------------------------------------------------------- */

/* One "section.key=value"; the key begins after the last dot, as names of rules may have dots. */
static void set_item(struct parser *parser, char *item)
{
	char *equals = strchr(item, '='), *dot = NULL;
	if (equals) {
		*equals = 0;
		dot = strrchr(item, '.');
	}
	if (!dot) {
		error(parser, "'%.100s' is not section.key=value", item);
		return;
	}
	*dot = 0;
	section_open(parser, trim(item));
	key_value(parser, trim(dot + 1), trim(equals + 1));
}

bool qs_ini_set(struct qs_policy *policy, const char *text)
{
	struct parser parser = {.policy = policy, .name = "QSHIM_SET", .set = true};
	char item[QS_LINE_MAX + 1];
	while (text) {
		size_t length = strcspn(text, ";");
		parser.line++;
		if (length > QS_LINE_MAX)
			error(&parser, "an item of %zu characters; at most %d fit", length,
			      QS_LINE_MAX);
		snprintf(item, sizeof item, "%.*s", (int)length, text);
		if (length <= QS_LINE_MAX && *trim(item))
			set_item(&parser, trim(item));
		text = text[length] ? text + length + 1 : NULL;
	}
	check_complete(&parser);
	return report(&parser);
}
