/* What shadow mode found: a row for each key and form of lower precision.
 *
 * Rows are made once and never removed. Those that are added to by a check in thousands of products
 * take a lock; at exit they are read without one, as a row may then be a check apart. The log gets
 * a row again when its checks have doubled, so that a long run writes a few lines of each.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "note/inside.h"

static struct qs_shadow_row *_Atomic rows; /* made last first                  */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

const struct qs_shadow_row *qs_shadow_rows(void)
{
	return atomic_load_explicit(&rows, memory_order_acquire);
}

void qs_shadow_forked(void)
{
	pthread_mutex_init(&lock, NULL);
	atomic_store(&rows, NULL);
}

static struct qs_shadow_row *find(const struct qs_key *key, const char *candidate)
{
	struct qs_shadow_row *row = atomic_load(&rows);
	while (row && (memcmp(row->key, key, sizeof *key) || strcmp(row->candidate, candidate)))
		row = row->next;
	return row;
}

struct qs_shadow_row *qs_note_shadow_row(const struct qs_key *key, const char *layer,
                                         const char *candidate)
{
	pthread_mutex_lock(&lock);
	struct qs_shadow_row *row = find(key, candidate);
	if (!row && (row = calloc(1, sizeof *row))) {
		row->key = key;
		row->layer = layer;
		snprintf(row->candidate, sizeof row->candidate, "%s", candidate);
		row->saturated = row->flushed = -1;
		row->next = atomic_load(&rows);
		atomic_store_explicit(&rows, row, memory_order_release);
	}
	pthread_mutex_unlock(&lock);
	return row;
}

static void keep_larger(double *to, double value)
{
	if (*to < value)
		*to = value;
}

static void add(struct qs_shadow_row *row, const struct qs_shadow_error *error)
{
	row->last = error->sqnr;
	if (!row->checks++ || row->least > error->sqnr)
		row->least = error->sqnr;
	keep_larger(&row->error, error->error);
	keep_larger(&row->amax, error->amax);
	keep_larger(&row->saturated, error->saturated);
	keep_larger(&row->flushed, error->flushed);
}

static void log_row(struct qs_shadow_row *row)
{
	row->logged = row->checks;
	qs_decision_shadow(row);
}

void qs_note_shadow(struct qs_shadow_row *row, const struct qs_shadow_error *error)
{
	const int saved = errno;
	if (qs_note_lock(&lock)) {
		add(row, error);
		if (!(row->checks & (row->checks - 1)))
			log_row(row);
		pthread_mutex_unlock(&lock);
	}
	errno = saved;
}

void qs_note_shadow_report(void)
{
	const int saved = errno;
	for (struct qs_shadow_row *row = atomic_load(&rows); row; row = row->next)
		if (row->checks != row->logged)
			log_row(row);
	errno = saved;
}
