/* Inside note/: writing without harm to the host, JSON lines, and what the parts tell each other.
 *
 * write.c     qs_allocate qs_error_text qs_file_open qs_file_write qs_file_forget
 * json.c      qs_json_begin qs_json_text qs_json_number qs_json_real qs_json_end
 * message.c   qs_note_options
 * decision.c  qs_decision_start qs_decision_shadow qs_decision_forked
 * counter.c   qs_counter_start qs_counter_forked qs_counter_lock qs_counter_unlock
 * shadow.c    qs_shadow_rows qs_shadow_forked
 * summary.c   qs_summary_forked
 * lock.c      qs_note_lock
 */
#ifndef QS_NOTE_INSIDE_H
#define QS_NOTE_INSIDE_H

#include <sys/types.h>

#include "note/note.h"
#include "policy/policy.h"

/* A file of ours. Programs close descriptors they do not know and get the same numbers for files of
 * their own: the identity is compared before each write. */
struct qs_file {
	int fd;       /* -1 = not open */
	dev_t device; /* identity      */
	ino_t inode;  /* identity      */
};

/* posix_fallocate() of a new file under the same protection: 0 or -errno. */
int qs_allocate(int fd, off_t size);
/* qs_open_new() and the identity: 0 or -errno; a failure leaves file->fd = -1. */
int qs_file_open(struct qs_file *file, const char *path);
/* Writes if the descriptor still is ours, else -ESTALE: 0 or -errno. With `whole`, what was written
 * of an incomplete line is cut off again: for files of one writer. */
int qs_file_write(const struct qs_file *file, const char *data, size_t size, bool whole);
/* Closes the descriptor if it still is ours. */
void qs_file_forget(struct qs_file *file);

/* A line of JSON in a buffer. Values that do not fit are shortened or left out: the line is valid
 * whatever it is given. */
struct qs_json {
	char *text;  /* buffer             */
	size_t size; /* of the buffer      */
	size_t used; /* bytes written      */
};

void qs_json_begin(struct qs_json *json, char *text, size_t size);
/* At most `room` bytes of text; bytes that are not UTF-8 become U+FFFD. NULL adds nothing. */
void qs_json_text(struct qs_json *json, const char *name, const char *value, size_t room);
void qs_json_number(struct qs_json *json, const char *name, int64_t value);
/* Six digits, whatever the locale; nothing is added for what is not finite. */
void qs_json_real(struct qs_json *json, const char *name, double value);
/* Closes the object and the line; returns its length. */
size_t qs_json_end(struct qs_json *json);

/* What an error number means, in `text` or elsewhere. */
#define QS_ERROR_TEXT 96
const char *qs_error_text(int error, char text[QS_ERROR_TEXT]);
/* The options of qs_note_start(), NULL before and in a forked child. */
const struct qs_options *qs_note_options(void);

/* Takes a lock; false if the process is ending and it was not free for a second. */
bool qs_note_lock(pthread_mutex_t *lock);
/* Opens decisions.%r.%p.jsonl and writes its first line; false and a message if it cannot. */
bool qs_decision_start(const char *directory);
/* Writes what a row has now. Gives up where exit() may have interrupted another writer. */
void qs_decision_shadow(const struct qs_shadow_row *row);
void qs_decision_forked(void);
/* Makes room for `keys` keys: in counters.%r.%p.bin, or without directory in anonymous memory. */
void qs_counter_start(const char *directory, int64_t keys);
void qs_counter_forked(void);
/* Holds decisions of slots still. Gives up after a moment and returns false: exit() may be called
 * by a signal handler that interrupted the holder. */
bool qs_counter_lock(void);
void qs_counter_unlock(void);
/* The row made last, and by `next` all others; NULL = none. */
const struct qs_shadow_row *qs_shadow_rows(void);
void qs_shadow_forked(void);
void qs_summary_forked(void);

#endif
