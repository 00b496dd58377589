/* One line of JSON in a fixed buffer, valid whatever bytes it is given.
 *
 * Names are our own words and not escaped. UTF-8 is checked as the Unicode standard's table 3-7 has
 * it: no overlong forms, no surrogates, nothing above U+10FFFF.
 */
#include <stdio.h>
#include <string.h>

#include "note/inside.h"

/* Kept free for the closing "}\n". */
#define CLOSING 2

void qs_json_begin(struct qs_json *json, char *text, size_t size)
{
	*json = (struct qs_json){.text = text, .size = size};
	json->text[json->used++] = '{';
}

/* True if `length` bytes were added. */
static bool add(struct qs_json *json, const char *text, size_t length)
{
	if (length > json->size - CLOSING - json->used)
		return false;
	memcpy(json->text + json->used, text, length);
	json->used += length;
	return true;
}

/* Adds `,"name":` (no comma at the start). */
static bool add_name(struct qs_json *json, const char *name)
{
	char text[40];
	int length = snprintf(text, sizeof text, "%s\"%s\":", json->used > 1 ? "," : "", name);
	return length > 0 && (size_t)length < sizeof text && add(json, text, (size_t)length);
}

static bool is_tail(unsigned char byte)
{
	return (byte & 0xc0) == 0x80;
}

/* Bytes of the well-formed character at s, 0 if it is none. Stops at a terminator by itself. */
static size_t utf8(const unsigned char *s)
{
	if (s[0] < 0x80)
		return 1;
	if (s[0] >= 0xc2 && s[0] <= 0xdf)
		return is_tail(s[1]) ? 2 : 0;
	if ((s[0] & 0xf0) == 0xe0) {
		bool overlong = s[0] == 0xe0 && s[1] < 0xa0;
		bool surrogate = s[0] == 0xed && s[1] > 0x9f;
		return !overlong && !surrogate && is_tail(s[1]) && is_tail(s[2]) ? 3 : 0;
	}
	if (s[0] >= 0xf0 && s[0] <= 0xf4) {
		bool overlong = s[0] == 0xf0 && s[1] < 0x90;
		bool beyond = s[0] == 0xf4 && s[1] > 0x8f;
		return !overlong && !beyond && is_tail(s[1]) && is_tail(s[2]) && is_tail(s[3]) ? 4
		                                                                               : 0;
	}
	return 0;
}

/* The next character of *at as JSON has it; returns its length. */
static size_t escape(const unsigned char **at, char out[8])
{
	unsigned char byte = **at;
	size_t length = utf8(*at);
	if (!length) {
		*at += 1;
		memcpy(out, "\xef\xbf\xbd", 3);
		return 3;
	}
	*at += length;
	if (byte == '"' || byte == '\\') {
		out[0] = '\\';
		out[1] = (char)byte;
		return 2;
	}
	if (byte < 0x20)
		return (size_t)snprintf(out, 8, "\\u%04x", byte);
	memcpy(out, *at - length, length);
	return length;
}

/* Adds the text between quotes; the closing one has its place in any case. */
static void add_quoted(struct qs_json *json, const char *value, size_t room)
{
	const unsigned char *at = (const unsigned char *)value;
	size_t full = json->size;
	add(json, "\"", 1);
	json->size -= 1;
	while (*at) {
		char out[8];
		size_t length = escape(&at, out);
		if (length > room || !add(json, out, length))
			break;
		room -= length;
	}
	json->size = full;
	add(json, "\"", 1);
}

void qs_json_text(struct qs_json *json, const char *name, const char *value, size_t room)
{
	size_t before = json->used;
	if (!value)
		return;
	if (add_name(json, name) && json->size - CLOSING - json->used >= 2)
		add_quoted(json, value, room);
	else
		json->used = before;
}

void qs_json_number(struct qs_json *json, const char *name, int64_t value)
{
	char text[24];
	size_t before = json->used;
	int length = snprintf(text, sizeof text, "%lld", (long long)value);
	if (!add_name(json, name) || !add(json, text, (size_t)length))
		json->used = before;
}

/* A locale may write the point as anything else, even in several bytes. */
void qs_json_real(struct qs_json *json, const char *name, double value)
{
	char text[40], plain[40];
	size_t before = json->used, length = 0;
	if (!(value - value == 0))
		return;
	snprintf(text, sizeof text, "%.6g", value);
	for (const char *at = text; *at; at++) {
		const bool plainly = strchr("0123456789+-e", *at) != NULL;
		if (plainly || plain[length - 1] != '.')
			plain[length++] = plainly ? *at : '.';
	}
	if (!add_name(json, name) || !add(json, plain, length))
		json->used = before;
}

size_t qs_json_end(struct qs_json *json)
{
	memcpy(json->text + json->used, "}\n", CLOSING);
	json->used += CLOSING;
	return json->used;
}
