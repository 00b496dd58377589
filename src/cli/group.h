/* Inside cli/: the products of a run by what they have in common.
 *
 * group.c    qs_group_by_name qs_group_by_find qs_groups_make qs_groups_sum
 * shadow.c   qs_errors_make
 * report.c   qs_report_text
 * export.c   qs_report_json
 */
#ifndef QS_CLI_GROUP_H
#define QS_CLI_GROUP_H

#include "cli/records.h"

/* What is in common, as --by has it. */
enum qs_by {
	QS_BY_KEY,
	QS_BY_LAYER,
	QS_BY_ROLE,
	QS_BY_WEIGHT,
	QS_BY_RULE,
	QS_BY_ACTION,
	QS_BY_REASON,
	QS_BY_API,
	QS_BY_RANK,
	QS_BY_PROCESS,
	QS_BY_COUNT,
};

#define QS_GROUP_NAME 512

/* Products of one name that were decided alike; in a merged group, all of one name. */
struct qs_group {
	char name[QS_GROUP_NAME];
	enum qs_action action; /* merged: of the largest part */
	enum qs_reason reason;
	char rule[32];
	size_t keys;  /* of processes                        */
	size_t parts; /* decisions that were merged          */
	double flops, replaced_flops;
	uint64_t calls, replaced, late, bytes; /* as in struct qs_counter */
};

struct qs_groups {
	struct qs_group *group;
	size_t count;
};

/* Names of the values of enum qs_by, and the value of a name, QS_BY_COUNT if it is none. */
const char *qs_group_by_name(enum qs_by by);
enum qs_by qs_group_by_find(const char *name);

/* The products that were called, largest first by flops; with `merge`, a group for each name, else
 * for each name and decision. False without memory. */
bool qs_groups_make(const struct qs_records *records, enum qs_by by, bool merge,
                    struct qs_groups *groups);
/* The sum of groups: name, keys, flops and counts. */
struct qs_group qs_groups_sum(const struct qs_groups *groups);
/* What shadow mode found of all products of one name, in a form of lower precision. */
struct qs_error_group {
	char name[QS_GROUP_NAME], candidate[24];
	double checks;
	double last, least, error, amax, saturated, flushed; /* the worst, as in qs_shadow_record */
};

struct qs_error_groups {
	struct qs_error_group *group;
	size_t count;
};

/* Worst first, by `least`. What the log does not tell of a product is "all". False without memory.
 */
bool qs_errors_make(const struct qs_records *records, enum qs_by by,
                    struct qs_error_groups *errors);

/* Names, at most QS_GROUP_NAME bytes with the end. */
void qs_name_process(const struct qs_process_record *process, char *name);
void qs_name_weight(int64_t weight, char *name);
void qs_name_key(const char *key, const char *layer, int64_t weight, char *name);
void qs_name_text(const char *text, const char *otherwise, char *name);

/* The report on stdout: tables of at most `most` rows each, or JSON with all. False without memory.
 */
bool qs_report_text(const struct qs_records *records, enum qs_by by, size_t most);
bool qs_report_json(const struct qs_records *records, enum qs_by by);

#endif
