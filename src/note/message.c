/* Lines for people: one bounded line per message, to stderr or to the log file, and the start of
 * all notes. No allocation, no lock (a message may come from anywhere), never stdout.
 *
 * Assumes that messages are rare; a flood of them ends after LINES_MAX. Left out: rotation and time
 * stamps.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "note/inside.h"
#include "version.h"

#define LINE_BYTES 1024
#define LINES_MAX  1000
#define PREFIX     "qshim: "

_Static_assert(QS_REASON_COUNT <= 64, "a bit of `told` per reason");

/* The kinds that are on before any policy is read, and without QSHIM_LOG. */
#define LEVELS_DEFAULT (1u << QS_LOG_ERROR | 1u << QS_LOG_WARN)

enum {
	TO_STDERR,
	TO_FILE
};

static const struct qs_options *_Atomic options;
static _Atomic unsigned levels = LEVELS_DEFAULT; /* bit per enum qs_level                       */
static _Atomic unsigned lines;                   /* messages so far                             */
static _Atomic uint64_t told;                    /* bit per reason of qs_message_once()         */
static _Atomic int target;                       /* TO_STDERR or TO_FILE                        */
static struct qs_file file = {.fd = -1};         /* constant while the target is or was TO_FILE */

const char *qs_level_name(enum qs_level level)
{
	static const char *const names[QS_LOG_LEVELS] = {
	        [QS_LOG_ERROR] = "error", [QS_LOG_WARN] = "warn",
	        [QS_LOG_INFO] = "info",   [QS_LOG_DISPATCH] = "dispatch",
	        [QS_LOG_CACHE] = "cache", [QS_LOG_NUMERICS] = "numerics",
	};
	return (unsigned)level < QS_LOG_LEVELS ? names[level] : "?";
}

const struct qs_options *qs_note_options(void)
{
	return atomic_load_explicit(&options, memory_order_acquire);
}

/* Makes "qshim: ...\n"; control characters, which may come from names of files, become '?'. */
static size_t make_line(char line[LINE_BYTES], const char *format, va_list args)
{
	size_t start = strlen(PREFIX), room = LINE_BYTES - start;
	memcpy(line, PREFIX, start);
	int length = vsnprintf(line + start, room, format, args);
	size_t end = start + (length > 0 ? (size_t)length : 0);
	if (end > LINE_BYTES - 1) {
		end = LINE_BYTES - 1;
		memcpy(line + end - 3, "...", 3);
	}
	for (size_t i = start; i < end; i++)
		if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
			line[i] = '?';
	line[end] = '\n';
	return end + 1;
}

/* The file stays open when it fails: another thread may be writing to it right now. */
static void send_line(const char *line, size_t length)
{
	char text[QS_ERROR_TEXT], notice[256];
	int error = atomic_load_explicit(&target, memory_order_acquire) == TO_FILE
	                    ? qs_file_write(&file, line, length, false)
	                    : 1;
	if (error < 0 && atomic_exchange(&target, TO_STDERR) == TO_FILE) {
		int size = snprintf(notice, sizeof notice,
		                    PREFIX "log file: %s; messages go to stderr from here\n",
		                    qs_error_text(error, text));
		qs_write(STDERR_FILENO, notice, (size_t)size);
	}
	if (error)
		qs_write(STDERR_FILENO, line, length);
}

__attribute__((format(printf, 1, 0))) static void vsay(const char *format, va_list args)
{
	char line[LINE_BYTES];
	send_line(line, make_line(line, format, args));
}

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vsay(format, args);
	va_end(args);
}

/* Counts a message; false if there were too many, which is said once. */
static bool is_allowed(void)
{
	if (atomic_load_explicit(&lines, memory_order_relaxed) > LINES_MAX)
		return false;
	unsigned before = atomic_fetch_add(&lines, 1);
	if (before == LINES_MAX)
		say("%d messages were written; no more follow", LINES_MAX);
	return before < LINES_MAX;
}

static void message(enum qs_level level, const char *format, va_list args)
{
	if (!(atomic_load_explicit(&levels, memory_order_relaxed) & 1u << level))
		return;
	int saved = errno;
	if (is_allowed())
		vsay(format, args);
	errno = saved;
}

void qs_message(enum qs_level level, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	message(level, format, args);
	va_end(args);
}

void qs_message_once(enum qs_reason reason, const char *format, ...)
{
	va_list args;
	uint64_t bit = (uint64_t)1 << reason;
	if (atomic_fetch_or(&told, bit) & bit)
		return;
	va_start(args, format);
	message(QS_LOG_ERROR, format, args);
	va_end(args);
}

static void open_log(const char *pattern)
{
	char path[QS_PATH_MAX], text[QS_ERROR_TEXT];
	if (!qs_path_expand(pattern, path, sizeof path)) {
		qs_message(QS_LOG_WARN,
		           "log file '%s': unknown placeholder or too long; messages go to stderr",
		           pattern);
		return;
	}
	int error = qs_file_open(&file, path);
	if (error)
		qs_message(QS_LOG_WARN, "log file %s: %s; messages go to stderr", path,
		           qs_error_text(error, text));
	else
		atomic_store_explicit(&target, TO_FILE, memory_order_release);
}

void qs_note_start(const struct qs_options *wanted)
{
	const struct qs_options *none = NULL;
	int saved = errno;
	if (!atomic_compare_exchange_strong(&options, &none, wanted))
		return;
	atomic_store(&levels, wanted->log_levels);
	if (*wanted->log_file)
		open_log(wanted->log_file);
	const char *directory = *wanted->out_dir ? wanted->out_dir : NULL;
	if (directory && !qs_decision_start(directory))
		directory = NULL; /* one message is enough */
	qs_counter_start(directory, wanted->max_keys);
	qs_message(QS_LOG_INFO, "version %s in %s, pid %d, rank %d", QS_VERSION,
	           program_invocation_short_name, (int)getpid(), qs_rank());
	errno = saved;
}

/* Descriptors are the child's own copies and may be closed; memory is the parent's as well. */
void qs_note_forked(void)
{
	qs_file_forget(&file);
	atomic_store(&options, NULL);
	atomic_store(&levels, LEVELS_DEFAULT);
	atomic_store(&lines, 0);
	atomic_store(&told, 0);
	atomic_store(&target, TO_STDERR);
	qs_decision_forked();
	qs_counter_forked();
	qs_shadow_forked();
	qs_summary_forked();
}
