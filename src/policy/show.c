/* Writes a policy as the ini text that would give it: options and keys with their help, rules as
 * written.
 *
 * The text reads back as the same policy, so lines are kept as short as the reader wants them.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "policy/rule.h"

/* Where the text goes; like snprintf, it counts what does not fit. */
struct sheet {
	char *text;  /* NULL if size is 0         */
	size_t size; /* bytes of text             */
	size_t used; /* length the text would have */
};

static void add(struct sheet *sheet, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(struct sheet *sheet, const char *format, ...)
{
	bool fits = sheet->used < sheet->size;
	va_list arguments;
	va_start(arguments, format);
	int length = vsnprintf(fits ? sheet->text + sheet->used : NULL,
	                       fits ? sheet->size - sheet->used : 0, format, arguments);
	va_end(arguments);
	sheet->used += length > 0 ? (size_t)length : 0;
}

/* The blanks around '=' are left out where they would make the line too long. */
static void add_key(struct sheet *sheet, const char *key, const char *value, size_t length)
{
	bool wide = strlen(key) + 3 + length <= QS_LINE_MAX;
	add(sheet, "%s%s%.*s\n", key, wide ? " = " : "=", (int)length, value);
}

static void add_options(struct sheet *sheet, const struct qs_options *options)
{
	const struct qs_option *option;
	const char *section = "";
	for (int i = 0; (option = qs_option_at(i)); i++) {
		char value[QS_PATH_MAX];
		size_t length = qs_option_text(options, option, value, sizeof value);
		if (strcmp(section, option->section))
			add(sheet, "%s[%s]\n", i ? "\n" : "", option->section);
		section = option->section;
		add(sheet, "; %s\n", option->help);
		add_key(sheet, option->key, value, length);
	}
}

/* For the reader of the text only: what may stand in a rule. */
static void add_rule_keys(struct sheet *sheet)
{
	add(sheet,
	    "\n; The first [rule NAME] whose keys all match decides; [default] takes the rest.\n"
	    "; A key about something that is not known matches nothing.\n"
	    "; ranges: a..b, a.., ..b or a; %%d for divisible by d; !a for not a\n"
	    "; patterns: globs, or re: and a regular expression; !pattern for not\n");
	for (int key = 0; key < QS_RULE_KEYS; key++)
		add(sheet, ";%s %-8s  %s\n", key < QS_CONDITIONS ? "" : " ->",
		    qs_rule_keys[key].name, qs_rule_keys[key].help);
}

static void add_rule(struct sheet *sheet, const struct qs_rule *rule)
{
	for (int key = 0; key < QS_RULE_KEYS; key++) {
		const char *line = rule->text[key];
		while (line) {
			size_t length = strcspn(line, "\n");
			add_key(sheet, qs_rule_keys[key].name, line, length);
			line = line[length] ? line + length + 1 : NULL;
		}
	}
}

size_t qs_policy_show(const struct qs_policy *policy, char *text, size_t size)
{
	struct sheet sheet = {text, size, 0};
	add_options(&sheet, &policy->options);
	add_rule_keys(&sheet);
	for (int i = 0; i < policy->count; i++) {
		add(&sheet, "\n[rule %s]\n", policy->rules[i].name);
		add_rule(&sheet, &policy->rules[i]);
	}
	add(&sheet, "\n[default]\n");
	add_rule(&sheet, &policy->otherwise);
	return sheet.used;
}
