/* The report of a run as one JSON object, for scripts: all rows, one for each name and decision.
 * Keys are added, never renamed or removed. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/group.h"

#define FORMAT_VERSION 1

/* Counters may end amid a character. */
static json_t *text(const char *value)
{
	char plain[QS_GROUP_NAME];
	json_t *string = json_string(value);
	if (string)
		return string;
	snprintf(plain, sizeof plain, "%s", value);
	for (char *c = plain; *c; c++)
		if (*c & 0x80)
			*c = '?';
	return json_string(plain);
}

static json_t *count(uint64_t value)
{
	return json_integer((json_int_t)(value <= INT64_MAX ? value : INT64_MAX));
}

static json_t *processes(const struct qs_records *records)
{
	json_t *array = json_array();
	for (size_t i = 0; array && i < records->process_count; i++) {
		const struct qs_process_record *process = &records->processes[i];
		const struct qs_counter_header *header = &process->header;
		json_t *kept = json_object();
		for (int form = 0; form < QS_KEPT_FORMS; form++)
			json_object_set_new(kept, qs_kept_name(form),
			                    json_pack("{s:o,s:o,s:o,s:o}", "bytes",
			                              count(header->kept_bytes[form]), "uses",
			                              count(header->kept_uses[form]), "checks",
			                              count(header->kept_checks[form]), "escapes",
			                              count(header->kept_escapes[form])));
		json_array_append_new(
		        array, json_pack("{s:i,s:i,s:o,s:o,s:o,s:I,s:o}", "rank", (int)header->rank,
		                         "pid", (int)header->pid, "exe", text(header->exe), "host",
		                         text(process->host), "version", text(header->program),
		                         "start", (json_int_t)header->start, "kept", kept));
	}
	return array;
}

static json_t *groups_of(const struct qs_records *records, enum qs_by by)
{
	struct qs_groups groups;
	if (!qs_groups_make(records, by, false, &groups))
		return NULL;
	json_t *array = json_array();
	for (size_t i = 0; array && i < groups.count; i++) {
		const struct qs_group *group = &groups.group[i];
		json_array_append_new(
		        array,
		        json_pack("{s:o,s:s,s:s,s:o,s:o,s:f,s:f,s:o,s:o,s:o,s:o}",
		                  qs_group_by_name(by), text(group->name), "decided_action",
		                  qs_action_name(group->action), "decided_reason",
		                  qs_reason_code(group->reason), "decided_rule", text(group->rule),
		                  "keys", count(group->keys), "flops", group->flops,
		                  "replaced_flops", group->replaced_flops, "calls",
		                  count(group->calls), "replaced", count(group->replaced), "late",
		                  count(group->late), "bytes", count(group->bytes)));
	}
	free(groups.group);
	return array;
}

static json_t *share(double value)
{
	return value < 0 ? json_null() : json_real(value);
}

static json_t *errors_of(const struct qs_records *records, enum qs_by by)
{
	struct qs_error_groups errors;
	if (!qs_errors_make(records, by, &errors))
		return NULL;
	json_t *array = json_array();
	for (size_t i = 0; array && i < errors.count; i++) {
		const struct qs_error_group *group = &errors.group[i];
		json_array_append_new(
		        array,
		        json_pack("{s:o,s:o,s:f,s:f,s:f,s:f,s:f,s:o,s:o}", qs_group_by_name(by),
		                  text(group->name), "candidate", text(group->candidate), "checks",
		                  group->checks, "sqnr", group->last, "least", group->least,
		                  "error", group->error, "amax", group->amax, "saturated",
		                  share(group->saturated), "flushed", share(group->flushed)));
	}
	free(errors.group);
	return array;
}

bool qs_report_json(const struct qs_records *records, enum qs_by by)
{
	json_t *report = json_pack("{s:i,s:o,s:s,s:o,s:o,s:o}", "v", FORMAT_VERSION, "processes",
	                           processes(records), "by", qs_group_by_name(by), "groups",
	                           groups_of(records, by), "shadow", errors_of(records, by),
	                           "unread", count(records->unread));
	const bool written = report && !json_dumpf(report, stdout, JSON_INDENT(1));
	if (written)
		putchar('\n');
	json_decref(report);
	return written;
}
