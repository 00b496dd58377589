/* The decision log: one JSON line per decision, written as it is made, so that a process that is
 * killed has lost none. Keys of the object are added, never renamed or removed.
 *
 * Assumes that decisions are rare (one per key and reason): they are written under a lock, from a
 * static buffer that is as large as the longest line.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "note/inside.h"
#include "version.h"

#define FORMAT_VERSION 1

/* Room of the texts, bytes as written; together less than the line. */
#define WORD_ROOM 128
#define TEXT_ROOM 512
#define PATH_ROOM 1536

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct qs_file file = {.fd = -1};
static char line[8192];

/* Under the lock. */
static void write_line(size_t length)
{
	char text[QS_ERROR_TEXT];
	int error = qs_file_write(&file, line, length, true);
	if (!error)
		return;
	qs_file_forget(&file);
	qs_message(QS_LOG_ERROR, "decision log: %s; no more decisions are written",
	           qs_error_text(error, text));
}

static void write_start(void)
{
	char exe[QS_PATH_MAX] = "", host[256] = "";
	struct qs_json json;
	ssize_t length = readlink("/proc/self/exe", exe, sizeof exe - 1);
	gethostname(host, sizeof host - 1);
	qs_json_begin(&json, line, sizeof line);
	qs_json_number(&json, "v", FORMAT_VERSION);
	qs_json_text(&json, "t", "start", WORD_ROOM);
	qs_json_number(&json, "pid", getpid());
	qs_json_number(&json, "rank", qs_rank());
	qs_json_text(&json, "host", host, TEXT_ROOM);
	qs_json_text(&json, "exe", length > 0 ? exe : program_invocation_name, PATH_ROOM);
	qs_json_number(&json, "time", time(NULL));
	qs_json_text(&json, "version", QS_VERSION, WORD_ROOM);
	write_line(qs_json_end(&json));
}

bool qs_decision_start(const char *directory)
{
	char pattern[QS_PATH_MAX + 32], path[QS_PATH_MAX], text[QS_ERROR_TEXT];
	snprintf(pattern, sizeof pattern, "%s/decisions.%%r.%%p.jsonl", directory);
	if (!qs_path_expand(pattern, path, sizeof path)) {
		qs_message(
		        QS_LOG_WARN,
		        "run directory '%s': unknown placeholder or too long; nothing is written",
		        directory);
		return false;
	}
	pthread_mutex_lock(&lock);
	int error = qs_file_open(&file, path);
	if (!error)
		write_start();
	pthread_mutex_unlock(&lock);
	if (error)
		qs_message(QS_LOG_WARN, "%s: %s; no decisions and counters are written", path,
		           qs_error_text(error, text));
	return !error;
}

void qs_decision_forked(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	qs_file_forget(&file);
}

static size_t make_line(const struct qs_decision *d, const char *key)
{
	struct qs_json json;
	qs_json_begin(&json, line, sizeof line);
	qs_json_number(&json, "v", FORMAT_VERSION);
	qs_json_number(&json, "rank", qs_rank());
	qs_json_text(&json, "t", "decision", WORD_ROOM);
	qs_json_text(&json, "key", key, TEXT_ROOM);
	qs_json_text(&json, "api", qs_entry_name(d->key->entry), WORD_ROOM);
	if (d->key->role != QS_ROLE_UNKNOWN)
		qs_json_text(&json, "role", qs_role_name(d->key->role), WORD_ROOM);
	if (d->weight >= 0)
		qs_json_number(&json, "weight", d->weight);
	qs_json_text(&json, "layer", d->layer, TEXT_ROOM);
	qs_json_text(&json, "rule", d->rule, TEXT_ROOM);
	qs_json_text(&json, "action", qs_action_name(d->action), WORD_ROOM);
	if (d->action == QS_ACTION_FP8)
		qs_json_text(&json, "scale", d->rows ? "row" : "tensor", WORD_ROOM);
	qs_json_text(&json, "reason", qs_reason_code(d->reason), WORD_ROOM);
	qs_json_text(&json, "detail", d->detail, TEXT_ROOM);
	qs_json_text(&json, "library", d->library, PATH_ROOM);
	if (d->counter && qs_counter_index(d->counter) >= 0)
		qs_json_number(&json, "counter", qs_counter_index(d->counter));
	return qs_json_end(&json);
}

/* "KEY [LAYER] w17 -> fp8 (rule mlp)", "KEY -> native (small, rule default: what happened)". */
static void tell(const struct qs_decision *d, const char *key)
{
	bool by_rule = d->reason == QS_REASON_RULE;
	const char *detail = d->detail ? d->detail : by_rule ? NULL : qs_reason_text(d->reason);
	char weight[16] = "";
	if (d->weight >= 0)
		snprintf(weight, sizeof weight, " w%d", (int)d->weight);
	qs_message(QS_LOG_DISPATCH, "%s%s%s%s%s -> %s%s (%s%s%s%s%s)", key, d->layer ? " [" : "",
	           d->layer ? d->layer : "", d->layer ? "]" : "", weight, qs_action_name(d->action),
	           d->action == QS_ACTION_FP8 && d->rows ? " by rows" : "",
	           qs_reason_code(d->reason),
	           !d->rule  ? ""
	           : by_rule ? " "
	                     : ", rule ",
	           d->rule ? d->rule : "", detail ? ": " : "", detail ? detail : "");
}

void qs_note_decision(const struct qs_decision *decision)
{
	char key[256];
	int saved = errno;
	qs_key_text(decision->key, key, sizeof key);
	if (qs_note_lock(&lock)) {
		if (file.fd >= 0)
			write_line(make_line(decision, key));
		pthread_mutex_unlock(&lock);
	}
	tell(decision, key);
	errno = saved;
}

static size_t make_shadow_line(const struct qs_shadow_row *row)
{
	char key[256];
	struct qs_json json;
	qs_key_text(row->key, key, sizeof key);
	qs_json_begin(&json, line, sizeof line);
	qs_json_number(&json, "v", FORMAT_VERSION);
	qs_json_number(&json, "rank", qs_rank());
	qs_json_text(&json, "t", "shadow", WORD_ROOM);
	qs_json_text(&json, "key", key, TEXT_ROOM);
	if (row->key->role != QS_ROLE_UNKNOWN)
		qs_json_text(&json, "role", qs_role_name(row->key->role), WORD_ROOM);
	if (row->key->weight)
		qs_json_number(&json, "weight", row->key->weight - 1);
	qs_json_text(&json, "layer", row->layer, TEXT_ROOM);
	qs_json_text(&json, "candidate", row->candidate, WORD_ROOM);
	qs_json_number(&json, "checks", (int64_t)row->checks);
	qs_json_real(&json, "sqnr", row->last);
	qs_json_real(&json, "least", row->least);
	qs_json_real(&json, "error", row->error);
	qs_json_real(&json, "amax", row->amax);
	if (row->saturated >= 0)
		qs_json_real(&json, "saturated", row->saturated);
	if (row->flushed >= 0)
		qs_json_real(&json, "flushed", row->flushed);
	return qs_json_end(&json);
}

void qs_decision_shadow(const struct qs_shadow_row *row)
{
	if (!qs_lock_within_a_second(&lock))
		return;
	if (file.fd >= 0)
		write_line(make_shadow_line(row));
	pthread_mutex_unlock(&lock);
}

static size_t make_policy_line(const char *name, int changed)
{
	struct qs_json json;
	qs_json_begin(&json, line, sizeof line);
	qs_json_number(&json, "v", FORMAT_VERSION);
	qs_json_number(&json, "rank", qs_rank());
	qs_json_text(&json, "t", "policy", WORD_ROOM);
	qs_json_text(&json, "file", name, PATH_ROOM);
	qs_json_number(&json, "changed", changed);
	qs_json_number(&json, "time", time(NULL));
	return qs_json_end(&json);
}

void qs_note_policy(const char *name, int changed)
{
	int saved = errno;
	pthread_mutex_lock(&lock);
	if (file.fd >= 0)
		write_line(make_policy_line(name, changed));
	pthread_mutex_unlock(&lock);
	qs_message(QS_LOG_INFO, "%s: read again; %d product%s decided otherwise than before", name,
	           changed, changed == 1 ? " is" : "s are");
	errno = saved;
}
