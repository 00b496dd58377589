/* What a person sees without asking: the notice that lower precision is in effect, and the table at
 * exit. Both go to stderr, in plain ASCII without colour, the table in one write so that those of
 * several ranks do not mix.
 *
 * Assumes that other threads may still run while the table is made: figures may be a call apart.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "note/inside.h"

#define ROWS_MAX 40 /* of a table */
#define MIB      1048576.0

/* A slot, or the sum of all, as it was when the table was made. */
struct row {
	const struct qs_counter *counter;      /* NULL in the sum                        */
	double flops;                          /* of all calls                           */
	double replaced_flops;                 /* of the replaced ones                   */
	uint64_t calls, replaced, bytes, late; /* as in struct qs_counter                */
};

/* The table being made. */
struct table {
	struct row sum;            /* of all rows                         */
	struct row rows[ROWS_MAX]; /* the largest ones, by flops and calls */
	size_t shown, all;         /* rows kept, rows seen                */
};

static char page[32768]; /* the tables as text; exit happens once */
static size_t used;      /* bytes of it                          */

__attribute__((format(printf, 1, 2))) static void put(const char *format, ...)
{
	va_list args;
	size_t room = sizeof page - used;
	va_start(args, format);
	int length = vsnprintf(page + used, room, format, args);
	va_end(args);
	if (length > 0 && (size_t)length < room)
		used += (size_t)length;
}

static struct row read_row(const struct qs_counter *counter)
{
	struct row row = {
	        .counter = counter,
	        .calls = atomic_load(&counter->calls),
	        .replaced = atomic_load(&counter->replaced),
	        .bytes = atomic_load(&counter->bytes),
	        .late = atomic_load(&counter->late),
	};
	row.flops = (double)row.calls * counter->flops;
	row.replaced_flops = (double)row.replaced * counter->flops;
	return row;
}

static void add_to_sum(struct row *sum, const struct row *row)
{
	sum->flops += row->flops;
	sum->replaced_flops += row->replaced_flops;
	sum->calls += row->calls;
	sum->replaced += row->replaced;
	sum->bytes += row->bytes;
	sum->late += row->late;
}

static bool is_larger(const struct row *x, const struct row *y)
{
	return x->flops != y->flops ? x->flops > y->flops : x->calls > y->calls;
}

/* Keeps the largest rows in order. */
static void insert(struct table *table, const struct row *row)
{
	size_t at = table->shown;
	while (at > 0 && is_larger(row, &table->rows[at - 1]))
		at--;
	if (at == ROWS_MAX)
		return;
	if (table->shown < ROWS_MAX)
		table->shown++;
	memmove(&table->rows[at + 1], &table->rows[at],
	        (table->shown - at - 1) * sizeof *table->rows);
	table->rows[at] = *row;
}

static void collect(struct table *table)
{
	const struct qs_counter *counter;
	for (size_t i = 0; (counter = qs_counter_at(i)); i++) {
		if (!__atomic_load_n(&counter->used, __ATOMIC_ACQUIRE))
			continue;
		struct row row = read_row(counter);
		if (!row.calls)
			continue;
		table->all++;
		add_to_sum(&table->sum, &row);
		insert(table, &row);
	}
}

static double percent(double part, double whole)
{
	return whole > 0 ? 100.0 * part / whole : 0.0;
}

static void put_row(const struct row *row, double flops)
{
	const struct qs_counter *counter = row->counter;
	char why[40], weight[32] = "";
	if (counter->weight)
		snprintf(weight, sizeof weight, "  w%llu", (unsigned long long)counter->weight - 1);
	if (counter->reason == QS_REASON_RULE && *counter->rule)
		snprintf(why, sizeof why, "rule %.31s", counter->rule);
	else
		snprintf(why, sizeof why, "%s", qs_reason_code(counter->reason));
	put("qshim: %6.1f %11llu %11llu %8llu %10.1f  %-6s  %-18s  %.111s%s%.39s%s\n",
	    percent(row->flops, flops), (unsigned long long)row->calls,
	    (unsigned long long)row->replaced, (unsigned long long)row->late,
	    (double)row->bytes / MIB, qs_action_name(counter->action), why, counter->key,
	    *counter->layer ? "  " : "", counter->layer, weight);
}

static void put_sum(const struct row *sum)
{
	put("qshim: %llu product%s seen by %.40s (pid %d, rank %d), %llu replaced (%.1f %% of the "
	    "FLOPs), %.1f MiB quantised\n",
	    (unsigned long long)sum->calls, sum->calls == 1 ? "" : "s",
	    program_invocation_short_name, (int)getpid(), qs_rank(),
	    (unsigned long long)sum->replaced, percent(sum->replaced_flops, sum->flops),
	    (double)sum->bytes / MIB);
}

static void put_escapes(uint64_t escapes)
{
	if (escapes)
		put(", found changed unannounced %llu time%s", (unsigned long long)escapes,
		    escapes == 1 ? "" : "s");
	put("\n");
}

static uint64_t memory; /* as given by qs_note_memory() */

void qs_note_memory(uint64_t bytes)
{
	memory = bytes;
}

static void put_memory(uint64_t kept)
{
	if (memory)
		put("qshim: %.1f MiB of device memory beside the program's own: %.1f MiB of kept "
		    "weights, %.1f MiB to work in\n",
		    (double)memory / MIB, (double)kept / MIB, (double)(memory - kept) / MIB);
}

/* What kept operands take now, and how often they saved a conversion; and all that we have. */
static void put_kept(void)
{
	uint64_t sum = 0;
	const struct qs_counter_header *header = qs_counter_header();
	for (int i = 0; header && i < QS_KEPT_FORMS; i++) {
		uint64_t bytes = atomic_load(&header->kept_bytes[i]);
		uint64_t uses = atomic_load(&header->kept_uses[i]);
		uint64_t checks = atomic_load(&header->kept_checks[i]);
		if (!bytes && !uses)
			continue;
		sum += bytes;
		put("qshim: kept as %s: %.1f MiB of weights, used by %llu product%s, "
		    "%llu of them after a check",
		    qs_kept_name(i), (double)bytes / MIB, (unsigned long long)uses,
		    uses == 1 ? "" : "s", (unsigned long long)checks);
		put_escapes(atomic_load(&header->kept_escapes[i]));
	}
	put_memory(sum < memory ? sum : memory);
}

static struct {
	int64_t count, products;
	double seconds;
	double part;
	int64_t timed, untimed;
} steps; /* as given by qs_note_steps() and qs_note_share() */

void qs_note_steps(int64_t count, int64_t products, double seconds)
{
	steps.count = count;
	steps.products = products;
	steps.seconds = seconds;
}

void qs_note_share(double part, int64_t timed, int64_t untimed)
{
	steps.part = part;
	steps.timed = timed;
	steps.untimed = untimed;
}

static void put_share(void)
{
	if (!steps.timed)
		return;
	put(", %.1f %% of it in products", 100 * steps.part);
	if (steps.untimed)
		put(" (%lld of %lld keys %s not timed)", (long long)steps.untimed,
		    (long long)(steps.timed + steps.untimed), steps.untimed == 1 ? "was" : "were");
}

static void put_steps(void)
{
	if (steps.count <= 0)
		return;
	put("qshim: %lld step%s of %lld products, %.3f ms each", (long long)steps.count,
	    steps.count == 1 ? "" : "s", (long long)steps.products, 1e3 * steps.seconds);
	put_share();
	put("\n");
}

static void put_table(const struct table *table)
{
	put_sum(&table->sum);
	put_kept();
	put_steps();
	put("qshim: %6s %11s %11s %8s %10s  %-6s  %-18s  %s\n", "FLOPs%", "calls", "replaced",
	    "late", "MiB", "action", "reason", "product");
	for (size_t i = 0; i < table->shown; i++)
		put_row(&table->rows[i], table->sum.flops);
	if (table->all > table->shown)
		put("qshim: and %zu more\n", table->all - table->shown);
	if (table->sum.late)
		put("qshim: late: passed although planned otherwise; QSHIM_LOG=dispatch says "
		    "why\n");
}

/* ---- shadow mode --------------------------------------------------------------------------------
 */

/* The rows with the least SQNR, in order. */
struct shadow_table {
	const struct qs_shadow_row *rows[ROWS_MAX];
	size_t shown, all; /* rows kept, rows seen */
};

static void insert_shadow(struct shadow_table *table, const struct qs_shadow_row *row)
{
	size_t at = table->shown;
	while (at > 0 && row->least < table->rows[at - 1]->least)
		at--;
	if (at == ROWS_MAX)
		return;
	if (table->shown < ROWS_MAX)
		table->shown++;
	memmove(&table->rows[at + 1], &table->rows[at],
	        (table->shown - at - 1) * sizeof *table->rows);
	table->rows[at] = row;
}

/* A share in percent; "-" where it is not known. */
static const char *share_text(double share, char text[16])
{
	if (share < 0)
		return "-";
	snprintf(text, 16, "%.4f", 100 * share);
	return text;
}

static void put_shadow_row(const struct qs_shadow_row *row)
{
	char key[112], saturated[16], flushed[16];
	qs_key_text(row->key, key, sizeof key);
	put("qshim: %8.1f %8.1f %9.3f %10.4g %9s %9s %8llu  %-16s  %.63s%s%s\n", row->last,
	    row->least, 100 * row->error, row->amax, share_text(row->saturated, saturated),
	    share_text(row->flushed, flushed), (unsigned long long)row->checks, row->candidate,
	    row->layer ? row->layer : "", row->layer ? "  " : "", key);
}

static void put_shadow(void)
{
	struct shadow_table table = {.all = 0};
	for (const struct qs_shadow_row *row = qs_shadow_rows(); row; row = row->next) {
		if (!row->checks)
			continue;
		table.all++;
		insert_shadow(&table, row);
	}
	if (!table.all)
		return;
	put("qshim: shadow mode: what lower precision would have done to products, worst first\n");
	put("qshim: %8s %8s %9s %10s %9s %9s %8s  %-16s  %s\n", "SQNR dB", "least", "error %",
	    "amax", "sat. %", "flushed %", "checks", "candidate", "product");
	for (size_t i = 0; i < table.shown; i++)
		put_shadow_row(table.rows[i]);
	if (table.all > table.shown)
		put("qshim: and %zu more, in the decision log\n", table.all - table.shown);
}

static bool is_wanted(const struct qs_options *options)
{
	if (!options || options->summary == QS_SUMMARY_NEVER)
		return false;
	return options->summary == QS_SUMMARY_ALWAYS || isatty(STDERR_FILENO);
}

bool qs_note_summary_wanted(void)
{
	return is_wanted(qs_note_options());
}

void qs_note_summary(void)
{
	static struct table table;
	const struct qs_options *options = qs_note_options();
	int saved = errno;
	if (is_wanted(options)) {
		bool locked = qs_counter_lock();
		memset(&table, 0, sizeof table);
		used = 0;
		collect(&table);
		if (table.all)
			put_table(&table);
		else if (options->summary == QS_SUMMARY_ALWAYS)
			put("qshim: no matrix product was seen\n");
		put_shadow();
		if (locked)
			qs_counter_unlock();
		qs_write(STDERR_FILENO, page, used);
	}
	errno = saved;
}

static _Atomic unsigned told; /* bit per action announced */

void qs_summary_forked(void)
{
	atomic_store(&told, 0);
	steps.count = steps.timed = 0;
	memory = 0;
}

/* What an action does to precision; NULL if nothing. */
static const char *notice_of(enum qs_action action)
{
	switch (action) {
	case QS_ACTION_FP8:
		return "qshim: bf16 products run in fp8 where faster or where the policy says so; "
		       "QSHIM=off disables, QSHIM_QUIET=1 hides this line\n";
	case QS_ACTION_NF4:
		return "qshim: bf16 products run with NF4 weights where the policy says so; "
		       "QSHIM=off disables, QSHIM_QUIET=1 hides this line\n";
	default:
		return NULL;
	}
}

/* At every replaced product: the first test is all that most of them see. */
void qs_note_notice(enum qs_action action)
{
	unsigned bit = 1u << action;
	if (atomic_load_explicit(&told, memory_order_relaxed) & bit)
		return;
	const struct qs_options *options = qs_note_options();
	const char *notice = notice_of(action);
	if ((atomic_fetch_or(&told, bit) & bit) || !notice || (options && options->quiet))
		return;
	qs_write(STDERR_FILENO, notice, strlen(notice));
}
