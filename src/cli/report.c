/* The report of a run as text, like the summary at exit (note/summary.c) but of all processes, and
 * with what to do about products that were not replaced. */
#include <stdio.h>
#include <stdlib.h>

#include "cli/group.h"

#define MIB 1048576.0

static double percent(double part, double whole)
{
	return whole > 0 ? 100 * part / whole : 0;
}

static void put_sum(const char *name, const struct qs_group *sum)
{
	printf("%s: %llu product%s, %llu replaced (%.1f %% of the FLOPs), %.1f MiB quantised\n",
	       name, (unsigned long long)sum->calls, sum->calls == 1 ? "" : "s",
	       (unsigned long long)sum->replaced, percent(sum->replaced_flops, sum->flops),
	       (double)sum->bytes / MIB);
}

static void put_more(size_t all, size_t shown)
{
	if (all > shown)
		printf("and %zu more (-n 0 shows all)\n", all - shown);
}

static bool put_processes(const struct qs_records *records, size_t most)
{
	char name[QS_GROUP_NAME];
	struct qs_groups groups;
	if (!qs_groups_make(records, QS_BY_PROCESS, true, &groups))
		return false;
	const struct qs_group sum = qs_groups_sum(&groups);
	snprintf(name, sizeof name, "%zu process%s", records->process_count,
	         records->process_count == 1 ? "" : "es");
	put_sum(name, &sum);
	for (size_t i = 0; i < groups.count && i < most; i++)
		put_sum(groups.group[i].name, &groups.group[i]);
	put_more(groups.count, most);
	if (records->unread)
		printf("%zu line%s of the logs could not be understood\n", records->unread,
		       records->unread == 1 ? "" : "s");
	free(groups.group);
	return true;
}

/* Weights that stay quantised: all processes together. */
static void put_kept(const struct qs_records *records)
{
	for (int form = 0; form < QS_KEPT_FORMS; form++) {
		uint64_t bytes = 0, uses = 0, checks = 0, escapes = 0;
		for (size_t i = 0; i < records->process_count; i++) {
			const struct qs_counter_header *header = &records->processes[i].header;
			bytes += header->kept_bytes[form];
			uses += header->kept_uses[form];
			checks += header->kept_checks[form];
			escapes += header->kept_escapes[form];
		}
		if (bytes || uses)
			printf("kept as %s: %.1f MiB of weights, used by %llu product%s, %llu of "
			       "them after a check, found changed unannounced: %llu\n",
			       qs_kept_name(form), (double)bytes / MIB, (unsigned long long)uses,
			       uses == 1 ? "" : "s", (unsigned long long)checks,
			       (unsigned long long)escapes);
	}
}

/* "fp8 (rule mlp)", "native (small)", and how many other decisions there are. */
static void put_decision(const struct qs_group *group)
{
	char text[96], more[24] = "";
	const bool by_rule = group->reason == QS_REASON_RULE && *group->rule;
	if (group->parts > 1)
		snprintf(more, sizeof more, " +%zu", group->parts - 1);
	snprintf(text, sizeof text, "%s (%s%s%s)%s", qs_action_name(group->action),
	         qs_reason_code(group->reason), by_rule ? " " : "", by_rule ? group->rule : "",
	         more);
	printf("  %-24s", text);
}

static bool put_groups(const struct qs_records *records, enum qs_by by, size_t most)
{
	struct qs_groups groups;
	if (!qs_groups_make(records, by, true, &groups))
		return false;
	const struct qs_group sum = qs_groups_sum(&groups);
	if (groups.count)
		printf("\n%6s %9s %11s %11s %8s %6s %10s  %-24s  %s\n", "FLOPs%", "replaced%",
		       "calls", "replaced", "late", "keys", "MiB", "decided", qs_group_by_name(by));
	for (size_t i = 0; i < groups.count && i < most; i++) {
		const struct qs_group *group = &groups.group[i];
		printf("%6.1f %9.1f %11llu %11llu %8llu %6zu %10.1f",
		       percent(group->flops, sum.flops),
		       percent(group->replaced_flops, group->flops),
		       (unsigned long long)group->calls, (unsigned long long)group->replaced,
		       (unsigned long long)group->late, group->keys, (double)group->bytes / MIB);
		put_decision(group);
		printf("  %s\n", group->name);
	}
	put_more(groups.count, most);
	free(groups.group);
	return true;
}

/* By reason, what the program did itself. */
static bool put_native(const struct qs_records *records)
{
	struct qs_groups groups;
	bool any = false;
	if (!qs_groups_make(records, QS_BY_REASON, false, &groups))
		return false;
	const struct qs_group sum = qs_groups_sum(&groups);
	for (size_t i = 0; i < groups.count; i++) {
		const struct qs_group *group = &groups.group[i];
		if (group->action != QS_ACTION_NATIVE || group->reason == QS_REASON_RULE)
			continue;
		if (!any)
			puts("\nnot replaced, and what to do about it:");
		any = true;
		printf("%6.1f %% of the FLOPs: %s: %s\n    -> %s\n",
		       percent(group->flops, sum.flops), group->name, qs_reason_text(group->reason),
		       qs_reason_cure(group->reason));
	}
	free(groups.group);
	return true;
}

static void put_share(double share)
{
	if (share < 0)
		printf(" %9s", "-");
	else
		printf(" %9.4f", 100 * share);
}

static bool put_errors(const struct qs_records *records, enum qs_by by, size_t most)
{
	struct qs_error_groups errors;
	if (!qs_errors_make(records, by, &errors))
		return false;
	if (errors.count)
		printf("\nwhat lower precision would have done (shadow mode), worst first:\n"
		       "%8s %8s %9s %10s %9s %9s %8s  %-16s  %s\n",
		       "SQNR dB", "least", "error %", "amax", "sat. %", "flushed %", "checks",
		       "candidate", qs_group_by_name(by));
	for (size_t i = 0; i < errors.count && i < most; i++) {
		const struct qs_error_group *group = &errors.group[i];
		printf("%8.1f %8.1f %9.3f %10.4g", group->last, group->least, 100 * group->error,
		       group->amax);
		put_share(group->saturated);
		put_share(group->flushed);
		printf(" %8.0f  %-16s  %s\n", group->checks, group->candidate, group->name);
	}
	put_more(errors.count, most);
	free(errors.group);
	return true;
}

bool qs_report_text(const struct qs_records *records, enum qs_by by, size_t most)
{
	if (!put_processes(records, most))
		return false;
	put_kept(records);
	return put_groups(records, by, most) && put_native(records) &&
	       put_errors(records, by, most);
}
