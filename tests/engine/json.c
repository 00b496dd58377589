/* Reads flat JSON objects; see json.h. It scans from the start for every field, which is quick
 * enough for lines of a few hundred bytes and keeps no state. */
#include "json.h"

#include <stdlib.h>
#include <string.h>

/* The end of the string that starts at the quote p: its closing quote, or NULL. */
static const char *string_end(const char *p)
{
	for (p++; *p && *p != '"'; p++)
		if (*p == '\\' && !*++p)
			return NULL;
	return *p ? p : NULL;
}

/* The value of the field, past the colon, or NULL. Only names of depth 1 are compared. */
static const char *find(const char *line, const char *name)
{
	size_t length = strlen(name);
	int depth = 0;
	for (const char *p = line; *p; p++) {
		depth += (*p == '{' || *p == '[') - (*p == '}' || *p == ']');
		if (*p != '"')
			continue;
		const char *end = string_end(p);
		if (!end)
			return NULL;
		if (depth == 1 && end[1] == ':' && (size_t)(end - p - 1) == length &&
		    !memcmp(p + 1, name, length))
			return end + 2;
		p = end;
	}
	return NULL;
}

bool json_text(const char *line, const char *name, char *out, size_t size)
{
	const char *p = find(line, name);
	size_t used = 0;
	out[0] = '\0';
	if (!p || *p != '"')
		return false;
	for (p++; *p && *p != '"'; p++) {
		if (*p == '\\' && p[1])
			p++;
		if (used + 1 >= size) {
			out[0] = '\0';
			return false;
		}
		out[used++] = *p;
	}
	out[used] = '\0';
	return *p == '"';
}

double json_number(const char *line, const char *name, double missing)
{
	const char *p = find(line, name);
	char *end;
	if (!p)
		return missing;
	if (*p == '"')
		p++;
	double value = strtod(p, &end);
	return end == p ? missing : value;
}

bool json_complete(const char *line)
{
	int depth = 0;
	if (*line != '{')
		return false;
	for (const char *p = line; *p; p++) {
		if (*p == '"' && !(p = string_end(p)))
			return false;
		depth += (*p == '{' || *p == '[') - (*p == '}' || *p == ']');
		if (!depth)
			return p[1] == '\0' || (p[1] == '\n' && !p[2]);
	}
	return false;
}
