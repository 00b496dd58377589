/* Regular expressions for layer names: POSIX extended syntax without {n}, [:class:], back
 * references and anchors inside.
 *
 * Not regexec(3), because that allocates, takes a lock, follows the host's locale and can need
 * exponential memory, none of which belongs in somebody else's process. This is Glushkov's
 * automaton with one bit per character of the expression, so matching costs one pass over the text
 * and compiling is bounded. Works on bytes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/rule.h"

#define POSITIONS 64
#define NESTING   32

struct qs_regex {
	uint64_t first;             /* positions that can begin a match                     */
	uint64_t last;              /* positions that can end one                           */
	uint64_t follow[POSITIONS]; /* positions that can come after each                   */
	uint64_t accepts[256];      /* positions whose character set holds this byte        */
	bool nullable;              /* the empty text matches                               */
	bool at_start, at_end;      /* anchored with ^, with $                              */
};

/* A part of the expression: where it can begin and end, and whether it may be empty. */
struct part {
	uint64_t first, last; /* positions */
	bool nullable;        /* may match nothing */
};

struct compiler {
	struct qs_regex *regex;  /* being filled              */
	const unsigned char *at; /* next character            */
	int positions;           /* used so far               */
	int depth;               /* of parentheses            */
	bool alternation;        /* a | outside parentheses   */
	const char *problem;     /* first one, NULL = none    */
};

static struct part fail(struct compiler *c, const char *problem)
{
	if (!c->problem)
		c->problem = problem;
	return (struct part){0};
}

static struct part alternatives(struct compiler *c);

static void link_parts(struct qs_regex *regex, uint64_t from, uint64_t to)
{
	for (; from; from &= from - 1)
		regex->follow[__builtin_ctzll(from)] |= to;
}

/* Claims the next position; the caller fills its set. 0 if there is none left. */
static uint64_t claim(struct compiler *c)
{
	if (c->positions == POSITIONS) {
		fail(c, "more than 64 characters to match");
		return 0;
	}
	return UINT64_C(1) << c->positions++;
}

static struct part one_byte(struct compiler *c, unsigned char byte)
{
	uint64_t bit = claim(c);
	c->regex->accepts[byte] |= bit;
	return (struct part){bit, bit, false};
}

static struct part any_byte(struct compiler *c)
{
	uint64_t bit = claim(c);
	for (int byte = 1; byte < 256; byte++)
		c->regex->accepts[byte] |= bit;
	return (struct part){bit, bit, false};
}

static struct part bracket(struct compiler *c)
{
	bool set[256] = {false}, negated = *c->at == '^';
	c->at += negated;
	const unsigned char *begin = c->at;
	for (; *c->at && (*c->at != ']' || c->at == begin); c->at++) {
		if (*c->at == '[' && c->at[1] && strchr(":.=", c->at[1]))
			return fail(c, "[:class:] is not supported");
		unsigned low = *c->at, high = low;
		if (c->at[1] == '-' && c->at[2] && c->at[2] != ']') {
			high = c->at[2];
			c->at += 2;
		}
		if (high < low)
			return fail(c, "a range in [] is backwards");
		for (unsigned byte = low; byte <= high; byte++)
			set[byte] = true;
	}
	if (!*c->at)
		return fail(c, "[ without ]");
	c->at++;
	uint64_t bit = claim(c);
	for (int byte = 1; byte < 256; byte++)
		if (set[byte] != negated)
			c->regex->accepts[byte] |= bit;
	return (struct part){bit, bit, false};
}

static struct part escape(struct compiler *c)
{
	unsigned char byte = *c->at;
	bool word = (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'z') ||
	            (byte >= 'A' && byte <= 'Z');
	if (!byte || word || byte >= 0x80)
		return fail(c, "\\ must stand before punctuation");
	c->at++;
	return one_byte(c, byte);
}

static struct part group(struct compiler *c)
{
	if (++c->depth > NESTING)
		return fail(c, "too many parentheses");
	struct part part = alternatives(c);
	c->depth--;
	if (*c->at != ')')
		return fail(c, "( without )");
	c->at++;
	return part;
}

static struct part atom(struct compiler *c)
{
	unsigned char byte = *c->at++;
	switch (byte) {
	case '(':
		return group(c);
	case '[':
		return bracket(c);
	case '.':
		return any_byte(c);
	case '\\':
		return escape(c);
	case '*':
	case '+':
	case '?':
		return fail(c, "nothing to repeat");
	case '{':
		return fail(c, "{} is not supported");
	case '^':
	case '$':
		return fail(c, "^ and $ may stand only at the ends");
	default:
		return one_byte(c, byte);
	}
}

static struct part repeated(struct compiler *c)
{
	struct part part = atom(c);
	for (; !c->problem && *c->at && strchr("*+?", *c->at); c->at++) {
		if (*c->at != '?')
			link_parts(c->regex, part.last, part.first);
		if (*c->at != '+')
			part.nullable = true;
	}
	return part;
}

static bool sequence_ends(const struct compiler *c)
{
	bool anchor = *c->at == '$' && !c->at[1];
	return c->problem || !*c->at || *c->at == '|' || *c->at == ')' || anchor;
}

static struct part sequence(struct compiler *c)
{
	if (sequence_ends(c) && (*c->at != '$' || c->depth))
		return fail(c, "an empty alternative");
	struct part whole = {0, 0, true};
	while (!sequence_ends(c)) {
		struct part next = repeated(c);
		link_parts(c->regex, whole.last, next.first);
		whole.first |= whole.nullable ? next.first : 0;
		whole.last = next.last | (next.nullable ? whole.last : 0);
		whole.nullable = whole.nullable && next.nullable;
	}
	return whole;
}

static struct part alternatives(struct compiler *c)
{
	struct part whole = sequence(c);
	while (!c->problem && *c->at == '|') {
		c->alternation = c->alternation || !c->depth;
		c->at++;
		struct part next = sequence(c);
		whole.first |= next.first;
		whole.last |= next.last;
		whole.nullable = whole.nullable || next.nullable;
	}
	return whole;
}

static void compile(struct compiler *c)
{
	struct qs_regex *regex = c->regex;
	regex->at_start = *c->at == '^';
	c->at += regex->at_start;
	struct part whole = alternatives(c);
	regex->at_end = *c->at == '$';
	c->at += regex->at_end;
	if (*c->at && !c->problem)
		fail(c, *c->at == ')' ? ") without (" : "^ and $ may stand only at the ends");
	/* POSIX reads ^a|b as (^a)|b, which is hardly ever meant. */
	if (c->alternation && (regex->at_start || regex->at_end))
		fail(c, "write ^(a|b)$ instead of ^a|b$");
	regex->first = whole.first;
	regex->last = whole.last;
	regex->nullable = whole.nullable;
}

struct qs_regex *qs_regex_compile(const char *pattern, char why[QS_WHY])
{
	struct qs_regex *regex = calloc(1, sizeof *regex);
	if (!regex) {
		snprintf(why, QS_WHY, "out of memory");
		return NULL;
	}
	struct compiler c = {.regex = regex, .at = (const unsigned char *)pattern};
	compile(&c);
	if (!c.problem)
		return regex;
	snprintf(why, QS_WHY, "in 're:%.100s': %s", pattern, c.problem);
	free(regex);
	return NULL;
}

bool qs_regex_match(const struct qs_regex *regex, const char *text)
{
	uint64_t state = 0;
	if (regex->nullable && (!regex->at_end || !regex->at_start || !*text))
		return true;
	for (const unsigned char *at = (const unsigned char *)text; *at; at++) {
		uint64_t next =
		        at == (const unsigned char *)text || !regex->at_start ? regex->first : 0;
		for (; state; state &= state - 1)
			next |= regex->follow[__builtin_ctzll(state)];
		state = next & regex->accepts[*at];
		if (!regex->at_end && state & regex->last)
			return true;
	}
	return regex->at_end && state & regex->last;
}
