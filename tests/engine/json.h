/* A flat JSON object on one line, read field by field: what the decision log and the recorded call
 * streams are made of. Bounded, no allocation; nested values are skipped, never entered. */
#ifndef QS_TESTS_ENGINE_JSON_H
#define QS_TESTS_ENGINE_JSON_H

#include <stdbool.h>
#include <stddef.h>

/* The text of a string field, unescaped as far as \" and \\ go; false and "" if there is none or it
 * does not fit. */
bool json_text(const char *line, const char *name, char *out, size_t size);
/* A number field, also where it is written as the string "0x..."; `missing` if there is none. */
double json_number(const char *line, const char *name, double missing);
/* True if the line is one complete object: balanced, strings closed, nothing behind it. */
bool json_complete(const char *line);

#endif
