/* Grouping by sorting: products of the same name become neighbours, and are added up. */
#include "cli/group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[QS_BY_COUNT] = {
        [QS_BY_KEY] = "key",         [QS_BY_LAYER] = "layer", [QS_BY_ROLE] = "role",
        [QS_BY_WEIGHT] = "weight",   [QS_BY_RULE] = "rule",   [QS_BY_ACTION] = "action",
        [QS_BY_REASON] = "reason",   [QS_BY_API] = "api",     [QS_BY_RANK] = "rank",
        [QS_BY_PROCESS] = "process",
};

const char *qs_group_by_name(enum qs_by by)
{
	return names[by];
}

enum qs_by qs_group_by_find(const char *name)
{
	enum qs_by by = 0;
	while (by < QS_BY_COUNT && strcmp(name, names[by]) != 0)
		by++;
	return by;
}

/* ---- names ---------------------------------------------------------------------------------- */

void qs_name_process(const struct qs_process_record *process, char *name)
{
	const struct qs_counter_header *header = &process->header;
	snprintf(name, QS_GROUP_NAME, "rank %d: %s (pid %d%s%s)", header->rank,
	         *header->exe ? header->exe : "?", header->pid, *process->host ? ", " : "",
	         process->host);
}

void qs_name_text(const char *text, const char *otherwise, char *name)
{
	snprintf(name, QS_GROUP_NAME, "%s", *text ? text : otherwise);
}

void qs_name_weight(int64_t weight, char *name)
{
	if (weight >= 0)
		snprintf(name, QS_GROUP_NAME, "w%lld", (long long)weight);
	else
		qs_name_text("", "(several or unknown)", name);
}

void qs_name_key(const char *key, const char *layer, int64_t weight, char *name)
{
	char ordinal[32] = "";
	if (weight >= 0)
		snprintf(ordinal, sizeof ordinal, "  w%lld", (long long)weight);
	snprintf(name, QS_GROUP_NAME, "%s%s%s%s", key, *layer ? "  " : "", layer, ordinal);
}

/* What a product is called in a group. */
static void name_product(const struct qs_records *records, const struct qs_product_record *product,
                         enum qs_by by, char *name)
{
	const struct qs_counter *is = &product->is;
	const int64_t weight = is->weight && is->weight <= INT32_MAX ? (int64_t)is->weight - 1 : -1;
	switch (by) {
	case QS_BY_LAYER:
		qs_name_text(product->layer, "(none)", name);
		break;
	case QS_BY_ROLE:
		qs_name_text(is->role ? qs_role_name(is->role) : "", "(unknown)", name);
		break;
	case QS_BY_WEIGHT:
		qs_name_weight(weight, name);
		break;
	case QS_BY_RULE:
		qs_name_text(is->rule, "(none)", name);
		break;
	case QS_BY_ACTION:
		qs_name_text(qs_action_name(is->action), "", name);
		break;
	case QS_BY_REASON:
		qs_name_text(qs_reason_code(is->reason), "", name);
		break;
	case QS_BY_API:
		qs_name_text(qs_entry_name(is->entry), "", name);
		break;
	case QS_BY_RANK:
		snprintf(name, QS_GROUP_NAME, "rank %d",
		         records->processes[product->process].header.rank);
		break;
	case QS_BY_PROCESS:
		qs_name_process(&records->processes[product->process], name);
		break;
	default:
		qs_name_key(is->key, product->layer, weight, name);
	}
}

/* ---- groups --------------------------------------------------------------------------------- */

static int by_decision(const struct qs_group *x, const struct qs_group *y)
{
	if (x->action != y->action)
		return x->action < y->action ? -1 : 1;
	if (x->reason != y->reason)
		return x->reason < y->reason ? -1 : 1;
	return strcmp(x->rule, y->rule);
}

static int by_name(const void *a, const void *b)
{
	const struct qs_group *x = a, *y = b;
	const int order = strcmp(x->name, y->name);
	return order ? order : by_decision(x, y);
}

static int by_size(const void *a, const void *b)
{
	const struct qs_group *x = a, *y = b;
	if (x->flops != y->flops)
		return x->flops > y->flops ? -1 : 1;
	if (x->calls != y->calls)
		return x->calls > y->calls ? -1 : 1;
	return by_name(a, b);
}

static void add(struct qs_group *to, const struct qs_group *more)
{
	to->keys += more->keys;
	to->parts += more->parts;
	to->flops += more->flops;
	to->replaced_flops += more->replaced_flops;
	to->calls += more->calls;
	to->replaced += more->replaced;
	to->late += more->late;
	to->bytes += more->bytes;
}

/* Neighbours that are the same become one; sorted by size. With `merge`, those of one name are the
 * same, and the largest comes first. */
static void join(struct qs_groups *groups, bool merge)
{
	struct qs_group *group = groups->group;
	size_t kept = 0;
	for (size_t i = 0; i < groups->count; i++) {
		struct qs_group *last = kept ? &group[kept - 1] : NULL;
		if (last && !strcmp(last->name, group[i].name) &&
		    (merge || !by_decision(last, &group[i])))
			add(last, &group[i]);
		else
			group[kept++] = group[i];
	}
	groups->count = kept;
}

static int by_name_and_size(const void *a, const void *b)
{
	const struct qs_group *x = a, *y = b;
	const int order = strcmp(x->name, y->name);
	return order ? order : by_size(a, b);
}

static void sort(struct qs_groups *groups, int (*order)(const void *a, const void *b))
{
	if (groups->count)
		qsort(groups->group, groups->count, sizeof *groups->group, order);
}

static void fill(const struct qs_records *records, const struct qs_product_record *product,
                 enum qs_by by, struct qs_group *group)
{
	const struct qs_counter *is = &product->is;
	memset(group, 0, sizeof *group);
	name_product(records, product, by, group->name);
	group->action = is->action;
	group->reason = is->reason;
	memcpy(group->rule, is->rule, sizeof group->rule);
	group->keys = 1;
	group->calls = is->calls;
	group->replaced = is->replaced;
	group->late = is->late;
	group->bytes = is->bytes;
	group->flops = (double)is->calls * is->flops;
	group->replaced_flops = (double)is->replaced * is->flops;
}

bool qs_groups_make(const struct qs_records *records, enum qs_by by, bool merge,
                    struct qs_groups *groups)
{
	groups->count = 0;
	groups->group = calloc(records->product_count + 1, sizeof *groups->group);
	if (!groups->group)
		return false;
	for (size_t i = 0; i < records->product_count; i++)
		if (records->products[i].is.used && records->products[i].is.calls)
			fill(records, &records->products[i], by, &groups->group[groups->count++]);
	sort(groups, by_name);
	join(groups, false);
	for (size_t i = 0; i < groups->count; i++)
		groups->group[i].parts = 1;
	if (merge) {
		sort(groups, by_name_and_size);
		join(groups, true);
	}
	sort(groups, by_size);
	return true;
}

struct qs_group qs_groups_sum(const struct qs_groups *groups)
{
	struct qs_group sum = {.name = "all"};
	for (size_t i = 0; i < groups->count; i++)
		add(&sum, &groups->group[i]);
	return sum;
}
