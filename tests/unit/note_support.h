/* For the tests of note/: a directory of one's own, stderr caught in a file, options, files read
 * whole, and a strict reader of one JSON line. Every test starts from the state of a new process,
 * so that they also run without Check's forking. */
#ifndef QS_TESTS_NOTE_SUPPORT_H
#define QS_TESTS_NOTE_SUPPORT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <cublasLt.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "note/inside.h"
#include "tests/support/suite.h"

static char scratch[256];  /* directory of this test */
static int real_stderr;    /* kept while caught      */
static char caught[65536]; /* what stderr() read     */

static inline const char *in_scratch(const char *name)
{
	static char paths[4][512]; /* several may be in use at once */
	static unsigned next;
	char *path = paths[next++ % 4];
	snprintf(path, sizeof paths[0], "%s/%s", scratch, name);
	return path;
}

/* Reads a whole file into `text`; returns its length, -1 if there is none. */
static inline long read_file(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t length = fd < 0 ? -1 : read(fd, text, size - 1);
	if (fd >= 0)
		close(fd);
	text[length > 0 ? length : 0] = '\0';
	return length;
}

/* Everything written to stderr since the test began. */
static inline const char *stderr_text(void)
{
	ck_assert_int_ge(read_file(in_scratch("stderr"), caught, sizeof caught), 0);
	return caught;
}

static inline size_t count_lines(const char *text)
{
	size_t lines = 0;
	for (; *text; text++)
		lines += *text == '\n';
	return lines;
}

static inline int remove_entry(const char *path, const struct stat *status, int type,
                               struct FTW *ftw)
{
	(void)status, (void)type, (void)ftw;
	return remove(path);
}

static inline void set_up(void)
{
	const char *base = getenv("TMPDIR");
	snprintf(scratch, sizeof scratch, "%s/qshim-note-XXXXXX", base ? base : "/tmp");
	ck_assert_ptr_nonnull(mkdtemp(scratch));
	qs_note_forked();
	fflush(NULL);
	real_stderr = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 50);
	int fd = open(in_scratch("stderr"), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_ge(dup2(fd, STDERR_FILENO), 0);
	close(fd);
}

static inline void tear_down(void)
{
	dup2(real_stderr, STDERR_FILENO);
	close(real_stderr);
	qs_note_forked();
	nftw(scratch, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* The defaults of the options that note/ looks at. */
static inline struct qs_options note_options(void)
{
	struct qs_options options;
	memset(&options, 0, sizeof options);
	options.max_keys = 16;
	options.log_levels = 1u << QS_LOG_ERROR | 1u << QS_LOG_WARN;
	options.summary = QS_SUMMARY_NEVER;
	return options;
}

/* With a run directory that does not exist yet. */
static inline struct qs_options out_options(void)
{
	struct qs_options options = note_options();
	snprintf(options.out_dir, sizeof options.out_dir, "%s/out", scratch);
	return options;
}

/* Path of a file of the run directory of process `pid`. */
static inline const char *out_file(const char *kind, int pid, const char *extension)
{
	char name[128];
	snprintf(name, sizeof name, "out/%s.%d.%d.%s", kind, qs_rank(), pid, extension);
	return in_scratch(name);
}

static inline struct qs_key linear_key(int64_t m, int64_t n, int64_t k)
{
	return (struct qs_key){
	        .m = m,
	        .n = n,
	        .k = k,
	        .lda = k,
	        .ldb = k,
	        .ldc = m,
	        .ldd = m,
	        .batch = 1,
	        .compute = CUBLAS_COMPUTE_32F,
	        .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
	        .atype = CUDA_R_16BF,
	        .btype = CUDA_R_16BF,
	        .ctype = CUDA_R_16BF,
	        .dtype = CUDA_R_16BF,
	        .bias_type = QS_TYPE_NONE,
	        .ta = CUBLAS_OP_T,
	        .alpha = QS_SCALAR_ONE,
	        .in_place = 1,
	        .align = 0x1f,
	};
}

static inline void wait_for(pid_t child)
{
	int status;
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %#x", status);
}

/* The soft limit of the size of a file; 0 or -1. Check keeps its own record in files: nothing may
 * be asserted while a low limit holds. */
static inline int limit_files(rlim_t size)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_FSIZE, &limit))
		return -1;
	limit.rlim_cur = size;
	return setrlimit(RLIMIT_FSIZE, &limit);
}

/* What is not available here is said, on stdout where Check reports. */
static inline void skip(const char *what)
{
	printf("skipped: %s\n", what);
	fflush(stdout);
}

/* --- a strict reader of {"name":"text"|number, ...} and nothing else  ----------------------- */

static inline size_t json_utf8(const unsigned char *s)
{
	static const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};
	size_t length = *s < 0x80       ? 1
	                : *s >> 5 == 6  ? 2
	                : *s >> 4 == 14 ? 3
	                : *s >> 3 == 30 ? 4
	                                : 0;
	unsigned value = length > 1 ? *s & (0xffu >> (length + 1)) : *s;
	for (size_t i = 1; i < length; i++) {
		if (s[i] >> 6 != 2)
			return 0;
		value = value << 6 | (s[i] & 0x3fu);
	}
	bool fine = length && value >= least[length] && value <= 0x10ffff && value >> 11 != 0x1b;
	return fine ? length : 0;
}

/* A string at *at, decoded into `out`; only the escapes that are needed are accepted. */
static inline bool json_string(const char **at, char *out, size_t size)
{
	size_t used = 0;
	if (*(*at)++ != '"')
		return false;
	while (**at != '"') {
		size_t length = json_utf8((const unsigned char *)*at);
		unsigned code;
		int taken = 0;
		if (!length || (unsigned char)**at < 0x20 || used + length + 1 > size)
			return false;
		if (**at != '\\') {
			memcpy(out + used, *at, length);
			used += length;
			*at += length;
		} else if ((*at)[1] == '"' || (*at)[1] == '\\') {
			out[used++] = (*at)[1];
			*at += 2;
		} else if (sscanf(*at, "\\u%4x%n", &code, &taken) == 1 && taken == 6 &&
		           code < 0x20) {
			out[used++] = (char)code;
			*at += 6;
		} else {
			return false;
		}
	}
	(*at)++;
	out[used] = '\0';
	return true;
}

static inline bool json_value(const char **at, char *out, size_t size)
{
	size_t digits = strspn(*at + (**at == '-'), "0123456789") + (**at == '-');
	const char *more = *at + digits;
	if (*more == '.')
		more += 1 + strspn(more + 1, "0123456789");
	if (*more == 'e')
		more += 2 + strspn(more + 2, "0123456789");
	if (**at == '"')
		return json_string(at, out, size);
	if (digits == (size_t)(**at == '-') || digits >= size)
		return false;
	digits = (size_t)(more - *at);
	memcpy(out, *at, digits);
	out[digits] = '\0';
	*at += digits;
	return digits < size;
}

/* The value of a member in one line, ended by "\n": 1 found, 0 not there, -1 not valid JSON. */
static inline int json_get(const char *line, const char *name, char *out, size_t size)
{
	static char member[128], value[4096];
	int found = 0;
	const char *at = line;
	if (*at++ != '{')
		return -1;
	do {
		if (!json_string(&at, member, sizeof member) || *at++ != ':' ||
		    !json_value(&at, value, sizeof value))
			return -1;
		if (name && !strcmp(member, name)) {
			found++;
			snprintf(out, size, "%s", value);
		}
	} while (*at++ == ',');
	return at[-1] == '}' && *at == '\n' && found <= 1 ? found : -1;
}

/* The value of a member that must be there. */
static inline const char *json_member(const char *line, const char *name)
{
	static char values[4][4096];
	static unsigned next;
	char *value = values[next++ % 4];
	ck_assert_msg(json_get(line, name, value, sizeof values[0]) == 1, "%s in %s", name, line);
	return value;
}

/* Line `index` of a text, with its end; NULL if there is none. */
static inline const char *line_at(const char *text, size_t index)
{
	while (index-- > 0) {
		text = strchr(text, '\n');
		if (!text++)
			return NULL;
	}
	return *text ? text : NULL;
}

#endif
