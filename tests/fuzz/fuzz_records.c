/* Fuzzes the readers of what a run leaves: whatever bytes its counters and its log have, they must
 * be read, or refused, without fault, and their texts must end and hold nothing that a terminal
 * obeys.
 *
 * The first two bytes are the length of the counters; the log follows them.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cli/group.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define NAME "0.1"

static void check_text(const char *text, size_t size)
{
	if (!memchr(text, '\0', size))
		abort();
	for (; *text; text++)
		if ((unsigned char)*text < 0x20 || *text == 0x7f)
			abort();
}

static void check_groups(const struct qs_records *records, enum qs_by by)
{
	struct qs_groups groups;
	struct qs_error_groups errors;
	if (!qs_groups_make(records, by, by % 2, &groups) || !qs_errors_make(records, by, &errors))
		abort();
	for (size_t i = 0; i < groups.count; i++)
		check_text(groups.group[i].name, sizeof groups.group[i].name);
	for (size_t i = 0; i < errors.count; i++)
		check_text(errors.group[i].name, sizeof errors.group[i].name);
	free(groups.group);
	free(errors.group);
}

/* A copy, aligned as a file that was read is. */
static void add_counters(struct qs_records *records, const uint8_t *data, size_t size)
{
	void *copy = malloc(size ? size : 1);
	if (!copy)
		abort();
	memcpy(copy, data, size);
	qs_counters_add(records, NAME, copy, size);
	free(copy);
}

static void add_log(struct qs_records *records, const uint8_t *data, size_t size)
{
	const uint8_t *end;
	for (; (end = memchr(data, '\n', size)); data = end + 1) {
		const size_t length = (size_t)(end - data) + 1;
		size -= length;
		if (records->process_count &&
		    !qs_log_add(records, NAME, (const char *)data, length))
			abort();
	}
	qs_log_end(records);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct qs_records records = {0};
	if (size < 2)
		return 0;
	const size_t asked = (size_t)data[0] << 8 | data[1], room = size - 2;
	const size_t first = asked < room ? asked : room;
	add_counters(&records, data + 2, first);
	add_log(&records, data + 2 + first, room - first);
	for (enum qs_by by = 0; by < QS_BY_COUNT; by++)
		check_groups(&records, by);
	qs_records_free(&records);
	return 0;
}
