/* Lines of decision logs (note/decision.c): names of layers for the products that the counters
 * count, and what shadow mode found. Members that are not known are passed over, as later versions
 * add some.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "cli/records.h"

static void copy_member(json_t *line, const char *member, char *to, size_t size)
{
	json_t *text = json_object_get(line, member);
	qs_copy_text(to, size, json_is_string(text) ? json_string_value(text) : "",
	             json_string_length(text));
}

static double number(json_t *line, const char *member, double otherwise)
{
	json_t *value = json_object_get(line, member);
	return json_is_number(value) ? json_number_value(value) : otherwise;
}

static bool is_kind(json_t *line, const char *kind)
{
	json_t *t = json_object_get(line, "t");
	return json_is_string(t) && !strcmp(json_string_value(t), kind);
}

/* The layer, of which the counters have the first bytes. Another product's line is not meant. */
static void name_layer(struct qs_product_record *product, json_t *line)
{
	char key[256], layer[128];
	copy_member(line, "key", key, sizeof key);
	copy_member(line, "layer", layer, sizeof layer);
	if (!strncmp(key, product->is.key, strlen(product->is.key)) &&
	    !strncmp(layer, product->is.layer, strlen(product->is.layer)))
		memcpy(product->layer, layer, sizeof layer);
}

static void add_decision(struct qs_records *records, const char *name, json_t *line)
{
	const double slot = number(line, "counter", -1);
	size_t i = qs_records_process(records, name, 0);
	for (; i < records->process_count; i = qs_records_process(records, name, i + 1)) {
		const struct qs_process_record *process = &records->processes[i];
		if (slot >= 0 && slot < (double)process->count)
			name_layer(&records->products[process->first + (size_t)slot], line);
	}
}

static bool add_shadow(struct qs_records *records, const char *name, json_t *line)
{
	struct qs_shadow_record *grown =
	        qs_grow(records->shadows, records->shadow_count, sizeof *grown);
	if (!grown)
		return false;
	records->shadows = grown;
	json_t *weight = json_object_get(line, "weight");
	struct qs_shadow_record *shadow = &grown[records->shadow_count];
	memset(shadow, 0, sizeof *shadow);
	shadow->process = qs_records_process(records, name, 0);
	shadow->line = records->shadow_count++;
	copy_member(line, "key", shadow->key, sizeof shadow->key);
	copy_member(line, "layer", shadow->layer, sizeof shadow->layer);
	copy_member(line, "role", shadow->role, sizeof shadow->role);
	copy_member(line, "candidate", shadow->candidate, sizeof shadow->candidate);
	shadow->weight = json_is_integer(weight) ? json_integer_value(weight) : -1;
	shadow->checks = number(line, "checks", 0);
	shadow->last = number(line, "sqnr", 0);
	shadow->least = number(line, "least", 0);
	shadow->error = number(line, "error", 0);
	shadow->amax = number(line, "amax", 0);
	shadow->saturated = number(line, "saturated", -1);
	shadow->flushed = number(line, "flushed", -1);
	return true;
}

static void add_host(struct qs_records *records, const char *name, json_t *line)
{
	size_t i = qs_records_process(records, name, 0);
	for (; i < records->process_count; i = qs_records_process(records, name, i + 1)) {
		struct qs_process_record *process = &records->processes[i];
		copy_member(line, "host", process->host, sizeof process->host);
	}
}

bool qs_log_add(struct qs_records *records, const char *name, const char *text, size_t length)
{
	json_t *line = json_loadb(text, length, JSON_REJECT_DUPLICATES, NULL);
	bool added = true;
	if (!json_is_object(line))
		records->unread++;
	else if (is_kind(line, "decision"))
		add_decision(records, name, line);
	else if (is_kind(line, "shadow"))
		added = add_shadow(records, name, line);
	else if (is_kind(line, "start"))
		add_host(records, name, line);
	json_decref(line);
	return added;
}

/* Those of the same row together, the latest first. */
static int by_row(const void *a, const void *b)
{
	const struct qs_shadow_record *x = a, *y = b;
	int order = x->process < y->process ? -1 : x->process > y->process;
	if (!order)
		order = strcmp(x->key, y->key);
	if (!order)
		order = strcmp(x->layer, y->layer);
	if (!order)
		order = strcmp(x->candidate, y->candidate);
	if (!order)
		order = x->weight < y->weight ? -1 : x->weight > y->weight;
	return order ? order : x->line < y->line ? 1 : -1;
}

static bool is_same_row(const struct qs_shadow_record *x, const struct qs_shadow_record *y)
{
	return x->process == y->process && x->weight == y->weight && !strcmp(x->key, y->key) &&
	       !strcmp(x->layer, y->layer) && !strcmp(x->candidate, y->candidate);
}

void qs_log_end(struct qs_records *records)
{
	struct qs_shadow_record *rows = records->shadows;
	size_t kept = 0;
	if (records->shadow_count)
		qsort(rows, records->shadow_count, sizeof *rows, by_row);
	for (size_t i = 0; i < records->shadow_count; i++)
		if (!kept || !is_same_row(&rows[kept - 1], &rows[i]))
			rows[kept++] = rows[i];
	records->shadow_count = kept;
}
