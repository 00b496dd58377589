/* Keeps measurements in the tuned file and decides by them; see known.h.
 *
 * An algorithm is known by a hash of its description, which cuBLASLt says may be stored and used
 * again with the same version; its place among the candidates is the heuristic's affair. Times are
 * rounded to the nanoseconds that the file has before anything is decided by them.
 */
#include "engine/known.h"

#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "kernels/compare.h"
#include "plan/plan.h"
#include "version.h"

static struct qs_tuned *file; /* NULL = not opened yet */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

/* NULL if memory is out. */
static struct qs_tuned *tuned_file(void)
{
	const char *name = qs_process()->options->tuned_file;
	pthread_mutex_lock(&opening);
	if (!file)
		file = qs_tuned_open(*name ? name : NULL);
	struct qs_tuned *opened = file;
	pthread_mutex_unlock(&opening);
	return opened;
}

/* Locks may be held by threads that the child does not have. */
void qs_known_forked(void)
{
	pthread_mutex_init(&opening, NULL);
	file = NULL;
}

static void describe_place(struct qs_validators *valid, const struct qs_library *library,
                           const struct qs_context *context)
{
	const struct qs_driver *cu = qs_driver_get();
	int driver = 0;
	if (!cu->cuDeviceGetName ||
	    cu->cuDeviceGetName(valid->gpu, sizeof valid->gpu, context->device))
		snprintf(valid->gpu, sizeof valid->gpu, "unknown");
	if (cu->cuDriverGetVersion)
		cu->cuDriverGetVersion(&driver);
	snprintf(valid->driver, sizeof valid->driver, "%d", driver);
	snprintf(valid->cublaslt, sizeof valid->cublaslt, "%zu", (size_t)library->version);
	snprintf(valid->qshim, sizeof valid->qshim, "%s", QS_VERSION);
	qs_tuned_numerics(qs_process()->options, valid->numerics);
}

static void ask(struct qs_tuned_row *row, const struct qs_gemm *g, const struct qs_context *context,
                enum qs_action action, const struct qs_choice *choice)
{
	*row = (struct qs_tuned_row){.measured = action, .tokens = -1, .sqnr = -1};
	qs_key_text(&g->key, row->key, sizeof row->key);
	if (action == QS_ACTION_FP8) {
		row->scaling = choice->scaling;
		row->format = choice->format;
	}
	describe_place(&row->valid, g->library, context);
}

static void algorithm_text(const struct qs_lt *lt, int candidate, char text[17])
{
	const cublasLtMatmulAlgo_t *algo = &lt->candidate[candidate].algo;
	snprintf(text, 17, "%016llx", (unsigned long long)XXH3_64bits(algo, sizeof *algo));
}

/* False if cuBLASLt does not offer the algorithm of the row. */
static bool use_algorithm(struct qs_lt *lt, const struct qs_tuned_row *row)
{
	char text[17];
	for (int i = 0; i < lt->count; i++) {
		algorithm_text(lt, i, text);
		if (strcmp(text, row->algorithm) != 0)
			continue;
		atomic_store(&lt->best, i);
		return true;
	}
	return false;
}

/* Finds the answer to a question. Without one, the question becomes that of the bucket. */
static bool answered(struct qs_tuned *tuned, const struct qs_gemm *g, struct qs_tuned_row *row)
{
	struct qs_tuned_row shared = *row;
	qs_bucket_text(&g->key, shared.key, sizeof shared.key);
	const bool own = tuned && qs_tuned_find(tuned, row);
	if (!tuned || !strcmp(shared.key, row->key))
		return own;
	const bool found = qs_tuned_find(tuned, &shared);
	if (!own || (found && shared.pinned && !row->pinned))
		*row = shared;
	return own || found;
}

/* Finds what is known of a candidate. */
static bool find(const struct qs_gemm *g, const struct qs_context *context, enum qs_action action,
                 const struct qs_choice *choice, struct qs_tuned_row *row)
{
	ask(row, g, context, action, choice);
	return answered(tuned_file(), g, row);
}

/* Negative = unknown. */
static double tokens_of(const struct qs_gemm *g)
{
	const int64_t tokens = qs_linear_of(&g->key).tokens;
	return tokens ? (double)tokens : -1;
}

static bool is_timed(const struct qs_tuned_row *row)
{
	return row->ours_us > 0 && row->native_us > 0;
}

bool qs_known_find(struct qs_lt *lt, const struct qs_gemm *g, const struct qs_context *context,
                   enum qs_action action, const struct qs_choice *choice, struct qs_tuned_row *row)
{
	ask(row, g, context, action, choice);
	struct qs_tuned_row found = *row;
	if (!answered(tuned_file(), g, &found)) {
		*row = found;
		return false;
	}
	const bool own = found.tokens == tokens_of(g) || !strcmp(found.key, row->key);
	/* A pin may be all that its row says. */
	const bool known = found.pinned || is_timed(&found);
	const bool usable = known && (use_algorithm(lt, &found) || !own);
	if (!usable && !found.pinned) {
		snprintf(row->key, sizeof row->key, "%s", found.key);
		return false;
	}
	*row = found;
	if (row->tokens == tokens_of(g))
		row->tokens = -1;
	return true;
}

/* Milliseconds to whole nanoseconds, in microseconds. */
static double rounded_us(float ms)
{
	return (double)(int64_t)(1e6 * (double)ms + 0.5) / 1e3;
}

/* Both times are known. What takes the same is not, even if no gain is asked for. */
static bool is_fast(const struct qs_tuned_row *row)
{
	const double min_gain = qs_process()->options->min_gain;
	return row->native_us > row->ours_us && row->native_us >= row->ours_us * (1 + min_gain);
}

void qs_known_add(const struct qs_lt *lt, const struct qs_gemm *g, const struct qs_timing *timing,
                  struct qs_tuned_row *row)
{
	struct qs_tuned *tuned = tuned_file();
	const float preparation = timing->rival[1];
	algorithm_text(lt, atomic_load(&lt->best), row->algorithm);
	row->ours_us = rounded_us(timing->best + (preparation > 0 ? preparation : 0));
	row->convert_us = rounded_us(preparation);
	row->native_us = rounded_us(timing->rival[0]);
	row->action = is_fast(row) ? row->measured : QS_ACTION_NATIVE;
	row->tokens = tokens_of(g);
	if (tuned)
		qs_tuned_add(tuned, row);
	row->tokens = -1;
}

bool qs_known_error(const struct qs_gemm *g, const struct qs_context *context,
                    enum qs_action action, const struct qs_choice *choice, double *sqnr)
{
	struct qs_tuned_row row;
	if (!find(g, context, action, choice, &row) || (!row.pinned && row.sqnr < 0))
		return false;
	*sqnr = row.pinned ? QS_SQNR_MAX : row.sqnr;
	return true;
}

void qs_known_add_error(const struct qs_gemm *g, const struct qs_context *context,
                        enum qs_action action, const struct qs_choice *choice, double sqnr)
{
	struct qs_tuned_row row;
	if (!find(g, context, action, choice, &row))
		return;
	row.sqnr = sqnr > 0 ? sqnr : 0;
	if (row.sqnr < choice->min_sqnr)
		row.action = QS_ACTION_NATIVE;
	qs_tuned_add(tuned_file(), &row);
}

bool qs_known_pinned(const struct qs_gemm *g, const struct qs_context *context,
                     enum qs_action action, const struct qs_choice *choice)
{
	struct qs_tuned_row row;
	return find(g, context, action, choice, &row) && row.pinned;
}

double qs_known_saving(const struct qs_gemm *g, const struct qs_context *context,
                       enum qs_action action, const struct qs_choice *choice)
{
	struct qs_tuned_row row;
	if (!find(g, context, action, choice, &row) || row.pinned || !is_timed(&row))
		return 0;
	return row.native_us - row.ours_us;
}

bool qs_known_whole(const struct qs_gemm *g, const struct qs_context *context,
                    enum qs_action action, const struct qs_choice *choice)
{
	struct qs_tuned_row row;
	if (!find(g, context, action, choice, &row))
		return false;
	return row.pinned ||
	       (is_timed(&row) && (action == QS_ACTION_BF16 || row.sqnr >= 0 || !is_fast(&row)));
}

static void tell(const struct qs_tuned_row *row, bool must_win, struct qs_failure *failure)
{
	const char *name = qs_action_name(row->measured);
	const double convert_us = row->convert_us;
	char elsewhere[40] = "";
	if (row->tokens > 0)
		snprintf(elsewhere, sizeof elsewhere, ", at %.0f tokens", row->tokens);
	if (row->pinned && must_win)
		qs_failed(failure, QS_REASON_TUNED, "pinned in the tuned file");
	else if (row->ours_us > 0 && convert_us < 0)
		qs_failed(failure, QS_REASON_NOT_FASTER, "%s %.1f us, native %.1f us%s", name,
		          row->ours_us, row->native_us, elsewhere);
	else if (row->ours_us > 0)
		qs_failed(failure, QS_REASON_NOT_FASTER, "%s %.1f + %.1f us, native %.1f us%s",
		          name, row->ours_us - convert_us, convert_us, row->native_us, elsewhere);
}

bool qs_known_wins(const struct qs_tuned_row *row, bool must_win, struct qs_failure *failure)
{
	tell(row, must_win, failure);
	if (row->pinned)
		return row->action != QS_ACTION_NATIVE || !must_win;
	return is_fast(row) || !must_win;
}

/* ---- whole steps --------------------------------------------------------------------------------
 */

static void ask_steps(struct qs_tuned_row *row, const struct qs_steps *steps,
                      const struct qs_library *library, const struct qs_context *context)
{
	*row = (struct qs_tuned_row){
	        .measured = QS_ACTION_AUTO, .tokens = -1, .convert_us = -1, .sqnr = -1};
	snprintf(row->key, sizeof row->key, "%s", steps->name);
	describe_place(&row->valid, library, context);
}

bool qs_known_steps(struct qs_steps *steps, const struct qs_library *library,
                    const struct qs_context *context)
{
	struct qs_tuned_row row;
	struct qs_tuned *tuned = tuned_file();
	ask_steps(&row, steps, library, context);
	if (!tuned || !qs_tuned_find(tuned, &row) || (!row.pinned && !is_timed(&row)))
		return false;
	steps->with_ms = row.ours_us / 1e3;
	steps->without_ms = row.native_us / 1e3;
	steps->kept = row.action != QS_ACTION_NATIVE;
	return true;
}

void qs_known_add_steps(const struct qs_steps *steps, const struct qs_library *library,
                        const struct qs_context *context)
{
	struct qs_tuned_row row;
	struct qs_tuned *tuned = tuned_file();
	ask_steps(&row, steps, library, context);
	row.ours_us = rounded_us((float)steps->with_ms);
	row.native_us = rounded_us((float)steps->without_ms);
	row.action = steps->kept ? QS_ACTION_AUTO : QS_ACTION_NATIVE;
	if (tuned)
		qs_tuned_add(tuned, &row);
}
