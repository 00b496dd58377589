/* What shadow mode found, by what products have in common: the worst of each, by sorting. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/group.h"

static void name_row(const struct qs_records *records, const struct qs_shadow_record *row,
                     enum qs_by by, char *name)
{
	const struct qs_process_record *process = &records->processes[row->process];
	if (by == QS_BY_KEY)
		qs_name_key(row->key, row->layer, row->weight, name);
	else if (by == QS_BY_LAYER)
		qs_name_text(row->layer, "(none)", name);
	else if (by == QS_BY_ROLE)
		qs_name_text(row->role, "(unknown)", name);
	else if (by == QS_BY_WEIGHT)
		qs_name_weight(row->weight, name);
	else if (by == QS_BY_RANK)
		snprintf(name, QS_GROUP_NAME, "rank %d", process->header.rank);
	else if (by == QS_BY_PROCESS)
		qs_name_process(process, name);
	else
		qs_name_text("all", "", name);
}

static void fill(const struct qs_records *records, const struct qs_shadow_record *row,
                 enum qs_by by, struct qs_error_group *group)
{
	memset(group, 0, sizeof *group);
	name_row(records, row, by, group->name);
	memcpy(group->candidate, row->candidate, sizeof group->candidate);
	group->checks = row->checks;
	group->last = row->last;
	group->least = row->least;
	group->error = row->error;
	group->amax = row->amax;
	group->saturated = row->saturated;
	group->flushed = row->flushed;
}

static void add(struct qs_error_group *to, const struct qs_error_group *more)
{
	to->checks += more->checks;
	to->last = fmin(to->last, more->last);
	to->least = fmin(to->least, more->least);
	to->error = fmax(to->error, more->error);
	to->amax = fmax(to->amax, more->amax);
	to->saturated = fmax(to->saturated, more->saturated);
	to->flushed = fmax(to->flushed, more->flushed);
}

static int by_name(const void *a, const void *b)
{
	const struct qs_error_group *x = a, *y = b;
	const int order = strcmp(x->name, y->name);
	return order ? order : strcmp(x->candidate, y->candidate);
}

static int by_error(const void *a, const void *b)
{
	const struct qs_error_group *x = a, *y = b;
	if (x->least != y->least)
		return x->least < y->least ? -1 : 1;
	return by_name(a, b);
}

bool qs_errors_make(const struct qs_records *records, enum qs_by by, struct qs_error_groups *errors)
{
	size_t kept = 0, count = records->shadow_count;
	struct qs_error_group *group = calloc(count + 1, sizeof *group);
	*errors = (struct qs_error_groups){.group = group};
	if (!group)
		return false;
	for (size_t i = 0; i < count; i++)
		fill(records, &records->shadows[i], by, &group[i]);
	qsort(group, count, sizeof *group, by_name);
	for (size_t i = 0; i < count; i++)
		if (kept && !by_name(&group[kept - 1], &group[i]))
			add(&group[kept - 1], &group[i]);
		else
			group[kept++] = group[i];
	qsort(group, kept, sizeof *group, by_error);
	errors->count = kept;
	return true;
}
