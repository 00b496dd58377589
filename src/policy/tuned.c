/* Reads and extends the tuned file; see tuned.h.
 *
 * inih splits the lines as it does those of a policy. Lines of a row may come in any order, but a
 * row is written with its action last, and no word for an action begins another. So what a killed
 * process left of a row (the kernel gives up between two pages) has no action: like any other
 * broken row it is reported and decides nothing. The next row that is written takes its place.
 */
#define _GNU_SOURCE
#include "policy/tuned.h"

#include <errno.h>
#include <fcntl.h>
#include <ini.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "note/note.h"
#include "policy/rule.h"

#define ROW_BYTES 1024 /* more than the longest row                        */
#define TAIL      8192 /* bytes of a file in which the begin of its last row is */
#define WRITE_MS  1000 /* patience with others who write, of one who writes */
#define READ_MS   100  /* of one who reads                                  */
#define REOPENED  3    /* times that a file may be replaced while we wait   */

#define ABOUT                                                                                      \
	"; What qshim measured. A row holds where gpu, driver, cublaslt, qshim and\n"              \
	"; numerics are the same. With the line 'pinned = yes' it holds everywhere, and\n"         \
	"; its action is obeyed: 'action = native' leaves the product to the program.\n"           \
	"; A key with a range, n=1617..2020, is that of all products with n in it; a row\n"        \
	"; with one number goes before it, unless only that of the range is pinned.\n"

struct qs_tuned {
	char path[QS_PATH_MAX];
	pthread_mutex_t lock;      /* of the rest                            */
	struct qs_tuned_row *rows; /* in the order of the file               */
	uint64_t *hash;            /* of their keys                          */
	size_t count, room;        /* rows                                   */
	const char *nameless;      /* why there is no such file, NULL = there may be */
	bool no_file;              /* nobody wants one                       */
	bool at_home;              /* the name was given as one of the home  */
	bool sealed;               /* the file is not to be written          */
	bool told_stale, told_failed;
};

/* ---- rows ---------------------------------------------------------------------------------------
 */

static const char *const action_words[] = {"native", "bf16", "fp8", "nf4", "auto", NULL};
static const char *const scaling_words[] = {"auto", "tensor", "row", NULL};
static const char *const format_words[] = {"auto", "e4m3", "e5m2", NULL};
static const char *const pinned_words[] = {"no", "yes", NULL};

enum kind {
	WORD, /* of `words`, an enum       */
	FLAG, /* of `words`, a bool        */
	REAL, /* negative = left out       */
	TEXT, /* empty = left out          */
};

#define FIELD(member)                                                                              \
	offsetof(struct qs_tuned_row, member), sizeof((struct qs_tuned_row *)0)->member

/* The lines of a row, in the order in which they are written. */
static const struct field {
	const char *name;
	enum kind kind;
	size_t offset, size; /* of the member, bytes */
	const char *const *words;
} fields[] = {
        {"key", TEXT, FIELD(key), NULL},
        {"measured", WORD, FIELD(measured), action_words},
        {"scale", WORD, FIELD(scaling), scaling_words},
        {"format", WORD, FIELD(format), format_words},
        {"algorithm", TEXT, FIELD(algorithm), NULL},
        {"tokens", REAL, FIELD(tokens), NULL},
        {"ours_us", REAL, FIELD(ours_us), NULL},
        {"convert_us", REAL, FIELD(convert_us), NULL},
        {"native_us", REAL, FIELD(native_us), NULL},
        {"sqnr", REAL, FIELD(sqnr), NULL},
        {"gpu", TEXT, FIELD(valid.gpu), NULL},
        {"driver", TEXT, FIELD(valid.driver), NULL},
        {"cublaslt", TEXT, FIELD(valid.cublaslt), NULL},
        {"qshim", TEXT, FIELD(valid.qshim), NULL},
        {"numerics", TEXT, FIELD(valid.numerics), NULL},
        {"pinned", FLAG, FIELD(pinned), pinned_words},
        {"action", WORD, FIELD(action), action_words},
};

#define FIELDS    ((int)(sizeof fields / sizeof *fields))
#define HAS(name) (UINT32_C(1) << field_find(name))

static int field_find(const char *name)
{
	for (int i = 0; i < FIELDS; i++)
		if (!strcmp(fields[i].name, name))
			return i;
	return -1;
}

static bool field_set(struct qs_tuned_row *row, const struct field *field, const char *value,
                      char why[QS_WHY])
{
	void *at = (char *)row + field->offset;
	if (field->kind == TEXT) {
		int length = snprintf(at, field->size, "%s", value);
		snprintf(why, QS_WHY, "expected 1 to %zu characters", field->size - 1);
		return length > 0 && (size_t)length < field->size;
	}
	if (field->kind == REAL) {
		const char *end = qs_real_scan(value, 0, at);
		snprintf(why, QS_WHY, "expected a number");
		return end && !*end;
	}
	int index = qs_word_find(field->words, value);
	if (index < 0)
		return qs_word_refuse(field->words, value, why);
	if (field->kind == FLAG)
		*(bool *)at = index;
	else
		*(unsigned *)at = (unsigned)index; /* the enums' own type */
	return true;
}

/* The value as field_set() reads it; false if the row has none. */
static bool field_text(const struct qs_tuned_row *row, const struct field *field,
                       char text[QS_LINE_MAX])
{
	const void *at = (const char *)row + field->offset;
	switch (field->kind) {
	case WORD:
		snprintf(text, QS_LINE_MAX, "%s", field->words[*(const unsigned *)at]);
		return true;
	case FLAG:
		snprintf(text, QS_LINE_MAX, "%s", field->words[*(const bool *)at]);
		return *(const bool *)at;
	case REAL:
		if (*(const double *)at < 0)
			return false;
		qs_real_text(*(const double *)at, "", text, QS_LINE_MAX);
		return true;
	case TEXT:
		snprintf(text, QS_LINE_MAX, "%s", (const char *)at);
		break;
	}
	/* What would end the value or the line. */
	for (char *c = text; *c; c++)
		if ((unsigned char)*c < ' ' || *c == ';')
			*c = '?';
	return *text;
}

static size_t row_text(const struct qs_tuned_row *row, char text[ROW_BYTES])
{
	char value[QS_LINE_MAX];
	size_t used = (size_t)snprintf(text, ROW_BYTES, "[product]\n");
	for (int i = 0; i < FIELDS; i++)
		if (field_text(row, &fields[i], value))
			used += (size_t)snprintf(text + used, ROW_BYTES - used, "%s = %s\n",
			                         fields[i].name, value);
	return used;
}

static bool make_room(struct qs_tuned *tuned)
{
	if (tuned->count < tuned->room)
		return true;
	size_t room = tuned->room ? 2 * tuned->room : 64;
	void *rows = reallocarray(tuned->rows, room, sizeof *tuned->rows);
	if (rows)
		tuned->rows = rows;
	void *hash = rows ? reallocarray(tuned->hash, room, sizeof *tuned->hash) : NULL;
	if (!hash)
		return false;
	tuned->hash = hash;
	tuned->room = room;
	return true;
}

static bool keep(struct qs_tuned *tuned, const struct qs_tuned_row *row)
{
	if (!make_room(tuned))
		return false;
	tuned->hash[tuned->count] = XXH3_64bits(row->key, strlen(row->key));
	tuned->rows[tuned->count++] = *row;
	return true;
}

/* ---- reading ------------------------------------------------------------------------------------
 */

struct reader {
	struct qs_tuned *tuned;
	const char *at, *end;    /* text not read yet                 */
	int line;                /* at hand, from 1                   */
	int head;                /* line of the row at hand, 0 = none */
	struct qs_tuned_row row; /* at hand                           */
	uint32_t given;          /* bit per field                     */
	bool bad;                /* the row has an error              */
	int errors;              /* found so far                      */
	int first_line;          /* of the first                      */
	char first[2 * QS_WHY];  /* the first                         */
};

static void error(struct reader *reader, int line, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

static void error(struct reader *reader, int line, const char *format, ...)
{
	reader->bad = true;
	if (reader->errors++)
		return;
	reader->first_line = line;
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(reader->first, sizeof reader->first, format, arguments);
	va_end(arguments);
}

static void report(const struct reader *reader)
{
	char more[64] = "";
	if (!reader->errors)
		return;
	if (reader->errors > 1)
		snprintf(more, sizeof more, "; %d further error%s", reader->errors - 1,
		         reader->errors > 2 ? "s" : "");
	qs_message(QS_LOG_WARN, "%s:%d: %s (row not used%s)", reader->tuned->path,
	           reader->first_line, reader->first, more);
}

static void row_begin(struct reader *reader)
{
	reader->row = (struct qs_tuned_row){
	        .tokens = -1, .ours_us = -1, .convert_us = -1, .native_us = -1, .sqnr = -1};
	reader->head = reader->line;
	reader->given = 0;
	reader->bad = false;
}

/* Auto is a candidate for whole steps, and for nothing else. */
static bool is_of_one_kind(const struct qs_tuned_row *row)
{
	const bool step = !strncmp(row->key, QS_TUNED_STEP, strlen(QS_TUNED_STEP));
	return step == (row->measured == QS_ACTION_AUTO) && (step || row->action != QS_ACTION_AUTO);
}

static void row_end(struct reader *reader)
{
	static const char *const needed[] = {"key", "measured", "action"};
	for (size_t i = 0; reader->head && i < 3 && !reader->bad; i++)
		if (!(reader->given & HAS(needed[i])))
			error(reader, reader->head, "the row has no %s", needed[i]);
	if (reader->head && !reader->bad && !is_of_one_kind(&reader->row))
		error(reader, reader->head, "'auto' is measured, and chosen, of a step only");
	if (reader->head && !reader->bad && !keep(reader->tuned, &reader->row))
		error(reader, reader->head, "out of memory");
	reader->head = 0;
}

/* inih's handler. A value that begins with the comment sign is an empty value with a comment. */
static int on_key(void *user, const char *section, const char *key, const char *value)
{
	struct reader *reader = user;
	char why[QS_WHY];
	int index = field_find(key);
	(void)section;
	if (*value == ';')
		value = "";
	if (!reader->head)
		error(reader, reader->line, "'%.60s' stands before the first [product]", key);
	else if (index < 0)
		error(reader, reader->line, "unknown key '%.60s'", key);
	else if (reader->given >> index & 1)
		error(reader, reader->line, "'%s' is given twice", key);
	else if (!field_set(&reader->row, &fields[index], value, why))
		error(reader, reader->line, "unusable value '%.60s' of '%s': %s", value, key, why);
	else
		reader->given |= UINT32_C(1) << index;
	return 1;
}

/* `line` is without the blanks around it. */
static void on_head(struct reader *reader, const char *line)
{
	row_end(reader);
	row_begin(reader);
	if (strcmp(line, "[product]") != 0)
		error(reader, reader->line, "'%.60s' should be [product]", line);
}

static const char *line_end(const char *at, const char *end)
{
	const char *feed = memchr(at, '\n', (size_t)(end - at));
	return feed ? feed : end;
}

static bool is_blank(char c)
{
	return c == ' ' || c == '\t' || c == '\r';
}

/* Takes the next line without the blanks around it; what is too long is an error and empty. */
static void line_take(struct reader *reader, char line[QS_LINE_MAX + 1])
{
	const char *begin = reader->at, *end = line_end(begin, reader->end);
	reader->at = end < reader->end ? end + 1 : end;
	reader->line++;
	while (begin < end && is_blank(*begin))
		begin++;
	while (end > begin && is_blank(end[-1]))
		end--;
	size_t length = (size_t)(end - begin);
	bool comment = length && (*begin == ';' || *begin == '#');
	if (length > QS_LINE_MAX && !comment)
		error(reader, reader->line, "a line of %zu characters; at most %d fit", length,
		      QS_LINE_MAX);
	length = comment || length > QS_LINE_MAX ? 0 : length;
	for (size_t i = 0; i < length; i++)
		line[i] = begin[i] ? begin[i] : '?'; /* as a power failure leaves them */
	line[length] = 0;
}

/* inih's reader, like fgets(). It passes over what is neither head nor key. */
static char *next_line(char *buffer, int size, void *user)
{
	struct reader *reader = user;
	char line[QS_LINE_MAX + 1];
	if (reader->at == reader->end)
		return NULL;
	line_take(reader, line);
	bool head = *line == '[';
	if (head)
		on_head(reader, line);
	else if (*line && !strpbrk(line, "=:"))
		error(reader, reader->line, "'%.60s' is neither [product] nor 'key = value'", line);
	snprintf(buffer, (size_t)size, "%s\n", head ? "" : line);
	return buffer;
}

static void read_text(struct qs_tuned *tuned, const char *text, size_t length)
{
	struct reader reader = {.tuned = tuned, .at = text, .end = text + length};
	ini_parse_stream(next_line, &reader, on_key, &reader);
	row_end(&reader);
	report(&reader);
}

/* ---- files --------------------------------------------------------------------------------------
 */

static bool fail(struct qs_tuned *tuned, const char *why)
{
	if (!tuned->told_failed)
		qs_message(QS_LOG_WARN, "%s: %s (what is measured is not kept)", tuned->path, why);
	tuned->told_failed = true;
	return false;
}

/* Somebody else's word must not decide what this program computes. */
static bool check(struct qs_tuned *tuned, int fd, struct stat *status)
{
	if (fstat(fd, status))
		return fail(tuned, strerror(errno));
	if (status->st_mode & (S_IWGRP | S_IWOTH))
		return fail(tuned, "others may write to it");
	return status->st_size < QS_TUNED_MAX || fail(tuned, "4 MiB and more; delete it");
}

/* Not for ever: whoever has the lock may have been stopped. */
static bool lock_file(int fd, int how, int patience_ms)
{
	const struct timespec moment = {.tv_nsec = 1000000};
	for (int i = 0; i < patience_ms; i++) {
		if (!flock(fd, how | LOCK_NB))
			return true;
		if (errno != EWOULDBLOCK && errno != EINTR)
			return false;
		nanosleep(&moment, NULL);
	}
	errno = EWOULDBLOCK;
	return false;
}

/* Without the lock too: then a row that is being written may look broken. */
static bool read_open_file(struct qs_tuned *tuned, int fd)
{
	struct stat status;
	lock_file(fd, LOCK_SH, READ_MS);
	if (!check(tuned, fd, &status))
		return false;
	char *text = malloc((size_t)status.st_size + 1);
	if (!text)
		return fail(tuned, "out of memory");
	ssize_t length = qs_read_all(fd, text, (size_t)status.st_size);
	if (length > 0)
		read_text(tuned, text, (size_t)length);
	free(text);
	return length >= 0 || fail(tuned, strerror(errno));
}

/* Without a home there is no file of the user's: not one in a directory called '~'. That matters,
 * and is said, once there is something to keep. */
static void set_path(struct qs_tuned *tuned, const char *pattern)
{
	const bool expanded = qs_path_expand(pattern, tuned->path, sizeof tuned->path) > 0;
	if (!expanded)
		tuned->nameless = "no usable file name";
	else if (!strncmp(tuned->path, "~/", 2))
		tuned->nameless = "HOME is not set";
	tuned->at_home = !strncmp(pattern, "~/", 2);
	if (tuned->nameless)
		snprintf(tuned->path, sizeof tuned->path, "%s", pattern);
}

struct qs_tuned *qs_tuned_open(const char *pattern)
{
	int saved = errno;
	struct qs_tuned *tuned = calloc(1, sizeof *tuned);
	if (!tuned)
		return NULL;
	pthread_mutex_init(&tuned->lock, NULL);
	tuned->no_file = !pattern;
	if (!pattern)
		return tuned;
	set_path(tuned, pattern);
	int fd = tuned->nameless ? -ENOENT : qs_open_file(tuned->path, O_RDONLY);
	if (fd >= 0) {
		tuned->sealed = !read_open_file(tuned, fd);
		flock(fd, LOCK_UN);
		close(fd);
	} else if (fd != -ENOENT) {
		tuned->sealed = !fail(tuned, strerror(-fd));
	}
	errno = saved;
	return tuned;
}

void qs_tuned_close(struct qs_tuned *tuned)
{
	if (!tuned)
		return;
	pthread_mutex_destroy(&tuned->lock);
	free(tuned->rows);
	free(tuned->hash);
	free(tuned);
}

/* True if the text from a head on has an action, which is the last thing that is written. */
static bool has_action(const char *at, const char *end)
{
	for (; at < end; at = line_end(at, end) + 1) {
		char sign[2], word[16], rest[2];
		char line[64];
		snprintf(line, sizeof line, "%.*s", (int)(line_end(at, end) - at), at);
		if (sscanf(line, " action %1[=:] %15[a-z0-9] %1[^;\r]", sign, word, rest) == 2 &&
		    qs_word_find(action_words, word) >= 0)
			return true;
	}
	return false;
}

/* The part of a text that is not a torn row at its end, bytes. */
static size_t whole(const char *text, size_t length)
{
	size_t at = length;
	while (at > 0) {
		const char *before = at > 1 ? memrchr(text, '\n', at - 1) : NULL;
		at = before ? (size_t)(before - text) + 1 : 0;
		if (text[at] == '[')
			return has_action(text + at, text + length) ? length : at;
	}
	return length;
}

/* Cuts off a torn row, which may be somebody's handwriting. */
static bool repair(struct qs_tuned *tuned, int fd, off_t *size)
{
	char tail[TAIL];
	const off_t from = *size > TAIL ? *size - TAIL : 0;
	const ssize_t length =
	        lseek(fd, from, SEEK_SET) < 0 ? -1 : qs_read_all(fd, tail, sizeof tail);
	if (length < 0)
		return false;
	const size_t good = whole(tail, (size_t)length);
	if (good == (size_t)length)
		return true;
	qs_message(QS_LOG_WARN, "%s: removes the last row, which has no action", tuned->path);
	*size = from + (off_t)good;
	return !ftruncate(fd, *size);
}

static bool append_locked(struct qs_tuned *tuned, int fd, const struct qs_tuned_row *row)
{
	char text[sizeof ABOUT + ROW_BYTES + 2];
	struct stat status;
	if (!check(tuned, fd, &status))
		return false;
	if (!repair(tuned, fd, &status.st_size))
		return fail(tuned, strerror(errno));
	size_t used = (size_t)snprintf(text, sizeof text, "%s\n", status.st_size ? "" : ABOUT);
	used += row_text(row, text + used);
	int wrong = qs_write(fd, text, used);
	if (wrong && !ftruncate(fd, status.st_size))
		return fail(tuned, strerror(-wrong));
	return !wrong || fail(tuned, strerror(-wrong));
}

/* An editor puts another file in the place of the one it read. */
static bool is_in_place(const struct qs_tuned *tuned, int fd)
{
	struct stat opened, named;
	return !fstat(fd, &opened) && !stat(tuned->path, &named) && opened.st_dev == named.st_dev &&
	       opened.st_ino == named.st_ino;
}

/* A home may be so new that the directory of the file's directory is missing, such as ~/.cache. */
static bool make_grandparent(const struct qs_tuned *tuned)
{
	char path[QS_PATH_MAX];
	snprintf(path, sizeof path, "%s", tuned->path);
	for (int i = 0; i < 2; i++) {
		char *slash = strrchr(path, '/');
		if (!slash)
			return false;
		*slash = '\0';
	}
	return !mkdir(path, 0700);
}

static int open_to_append(const struct qs_tuned *tuned)
{
	int fd = qs_open_file(tuned->path, O_RDWR | O_APPEND);
	if (fd == -ENOENT && tuned->at_home && make_grandparent(tuned))
		fd = qs_open_file(tuned->path, O_RDWR | O_APPEND);
	return fd;
}

/* The file that has the name once it is locked: a descriptor, or -errno. */
static int open_locked(const struct qs_tuned *tuned)
{
	for (int i = 0; i < REOPENED; i++) {
		int fd = open_to_append(tuned);
		if (fd < 0)
			return fd;
		const int wrong = lock_file(fd, LOCK_EX, WRITE_MS) ? 0 : -errno;
		if (!wrong && is_in_place(tuned, fd))
			return fd;
		close(fd);
		if (wrong)
			return wrong;
	}
	return -ESTALE;
}

/* Whoever sits on the lock is waited for only once. The lock is given back by name: a child that
 * was forked meanwhile has the descriptor too. */
static bool append(struct qs_tuned *tuned, const struct qs_tuned_row *row)
{
	if (tuned->no_file)
		return true;
	if (tuned->nameless)
		return fail(tuned, tuned->nameless);
	if (tuned->sealed)
		return false;
	int fd = open_locked(tuned);
	if (fd < 0) {
		tuned->sealed = fd == -EWOULDBLOCK;
		return fail(tuned, strerror(-fd));
	}
	bool done = append_locked(tuned, fd, row);
	flock(fd, LOCK_UN);
	close(fd);
	return done;
}

bool qs_tuned_add(struct qs_tuned *tuned, const struct qs_tuned_row *row)
{
	int saved = errno;
	pthread_mutex_lock(&tuned->lock);
	keep(tuned, row);
	bool done = append(tuned, row);
	pthread_mutex_unlock(&tuned->lock);
	errno = saved;
	return done;
}

/* ---- finding ------------------------------------------------------------------------------------
 */

static bool is_same(const struct qs_tuned_row *a, const struct qs_tuned_row *b)
{
	return a->measured == b->measured && a->scaling == b->scaling && a->format == b->format &&
	       !strcmp(a->key, b->key);
}

/* The name of the first validator that differs, NULL = none; the two values. */
static const char *difference(const struct qs_validators *a, const struct qs_validators *b,
                              const char **there, const char **here)
{
	const struct {
		const char *name, *there, *here;
	} all[] = {{"GPU", a->gpu, b->gpu},
	           {"driver", a->driver, b->driver},
	           {"cuBLASLt", a->cublaslt, b->cublaslt},
	           {"qshim", a->qshim, b->qshim},
	           {"[numerics]", a->numerics, b->numerics}};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		*there = all[i].there;
		*here = all[i].here;
		if (strcmp(all[i].there, all[i].here) != 0)
			return all[i].name;
	}
	return NULL;
}

static void tell_stale(struct qs_tuned *tuned, const struct qs_tuned_row *stale,
                       const struct qs_validators *now)
{
	const char *there, *here, *what = difference(&stale->valid, now, &there, &here);
	if (!tuned->told_stale)
		qs_message(QS_LOG_WARN, "%s: rows of another %s (%s, here %s) are not used",
		           tuned->path, what, *there ? there : "none", here);
	tuned->told_stale = true;
}

bool qs_tuned_find(struct qs_tuned *tuned, struct qs_tuned_row *row)
{
	const uint64_t hash = XXH3_64bits(row->key, strlen(row->key));
	const struct qs_tuned_row *found = NULL, *stale = NULL;
	const char *there, *here;
	pthread_mutex_lock(&tuned->lock);
	for (size_t i = 0; i < tuned->count; i++) {
		const struct qs_tuned_row *r = &tuned->rows[i];
		if (tuned->hash[i] != hash || !is_same(r, row))
			continue;
		if (r->pinned || !difference(&r->valid, &row->valid, &there, &here))
			found = found && found->pinned && !r->pinned ? found : r;
		else
			stale = r;
	}
	if (found)
		*row = *found;
	else if (stale)
		tell_stale(tuned, stale, &row->valid);
	pthread_mutex_unlock(&tuned->lock);
	return found != NULL;
}

void qs_tuned_numerics(const struct qs_options *options, char text[17])
{
	char all[1024], value[QS_PATH_MAX];
	size_t used = 0;
	const struct qs_option *option;
	for (int i = 0; (option = qs_option_at(i)); i++) {
		if (strcmp(option->section, "numerics") != 0)
			continue;
		qs_option_text(options, option, value, sizeof value);
		used += (size_t)snprintf(all + used, sizeof all - used, "%s=%.100s\n", option->key,
		                         value);
	}
	snprintf(text, 17, "%016llx", (unsigned long long)XXH3_64bits(all, used));
}

uint64_t qs_tuned_program(void)
{
	static char line[64 << 10]; /* all who write it write the same */
	const int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	const ssize_t length = fd < 0 ? 0 : qs_read_all(fd, line, sizeof line);
	if (fd >= 0)
		close(fd);
	return XXH3_64bits(line, length > 0 ? (size_t)length : 0);
}
