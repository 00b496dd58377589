/* Names of files: placeholders, ranks, and opening a file in a directory that others may write to.
 *
 * The environment is read with secure_getenv only. Only the last directory of a path is created, so
 * that a misspelt path is reported and not built.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "note/inside.h"

/* Descriptors below are the program's: it may expect to get the lowest free one. */
#define FD_FLOOR 100

/* The first of the variables that holds a number, else 0. */
static int number_of(const char *const *names)
{
	for (; *names; names++) {
		const char *text = secure_getenv(*names);
		char *end;
		if (!text || *text < '0' || *text > '9')
			continue;
		errno = 0;
		long value = strtol(text, &end, 10);
		if (!errno && !*end && value <= INT_MAX)
			return (int)value;
	}
	return 0;
}

int qs_rank(void)
{
	static const char *const names[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
	                                    "SLURM_PROCID", NULL};
	int saved = errno, rank = number_of(names);
	errno = saved;
	return rank;
}

int qs_local_rank(void)
{
	static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
	                                    "MPI_LOCALRANKID", "SLURM_LOCALID", NULL};
	int saved = errno, rank = number_of(names);
	errno = saved;
	return rank;
}

/* The path being expanded. */
struct expansion {
	char *out;   /* buffer                                       */
	size_t size; /* of the buffer                                */
	size_t used; /* bytes written; `size` or more = does not fit */
};

static void add(struct expansion *to, const char *text, size_t length)
{
	if (to->used < to->size && length < to->size - to->used)
		memcpy(to->out + to->used, text, length);
	else
		length = to->size; /* stays too long */
	to->used += length;
}

static void add_number(struct expansion *to, long value)
{
	char text[24];
	size_t at = sizeof text;
	do
		text[--at] = (char)('0' + value % 10);
	while ((value /= 10) > 0);
	add(to, text + at, sizeof text - at);
}

static void add_host(struct expansion *to)
{
	char name[HOST_NAME_MAX + 1] = "";
	gethostname(name, sizeof name - 1);
	add(to, name, strlen(name));
}

/* %q{NAME}, `at` behind the q. A variable that is not set is empty, as in a shell. */
static const char *add_variable(struct expansion *to, const char *at)
{
	char name[128];
	const char *end = *at == '{' ? strchr(at, '}') : NULL;
	if (!end || end == at + 1 || (size_t)(end - at) > sizeof name)
		return NULL;
	memcpy(name, at + 1, (size_t)(end - at - 1));
	name[end - at - 1] = '\0';
	const char *value = secure_getenv(name);
	if (value)
		add(to, value, strlen(value));
	return end + 1;
}

/* One placeholder, `at` behind the percent sign; returns what follows, NULL if it is unknown. */
static const char *add_placeholder(struct expansion *to, const char *at)
{
	switch (*at) {
	case '%':
		add(to, "%", 1);
		break;
	case 'p':
	case 'i':
		add_number(to, getpid());
		break;
	case 'h':
		add_host(to);
		break;
	case 'r':
		add_number(to, qs_rank());
		break;
	case 'l':
		add_number(to, qs_local_rank());
		break;
	case 'q':
		return add_variable(to, at + 1);
	default:
		return NULL;
	}
	return at + 1;
}

static const char *add_home(struct expansion *to, const char *pattern)
{
	const char *home = strncmp(pattern, "~/", 2) ? NULL : secure_getenv("HOME");
	if (!home || *home != '/')
		return pattern;
	add(to, home, strlen(home));
	return pattern + 1;
}

size_t qs_path_expand(const char *pattern, char *out, size_t size)
{
	struct expansion to = {.out = out, .size = size};
	int saved = errno;
	const char *at = add_home(&to, pattern);
	while (at && *at) {
		size_t plain = strcspn(at, "%");
		add(&to, at, plain);
		at += plain;
		if (*at)
			at = add_placeholder(&to, at + 1);
	}
	errno = saved;
	if (!at || to.used >= size) {
		if (size)
			*out = '\0';
		return 0;
	}
	out[to.used] = '\0';
	return to.used;
}

/* Where everybody may rename and delete, a file that we open by name may be anything later. */
static int check_directory(int dir)
{
	struct stat status;
	if (fstat(dir, &status))
		return -errno;
	return (status.st_mode & S_IWOTH) && !(status.st_mode & S_ISVTX) ? -EPERM : 0;
}

static int open_directory(const char *path, bool may_create)
{
	int flags = O_PATH | O_DIRECTORY | O_CLOEXEC;
	int dir = open(path, flags);
	if (dir < 0 && errno == ENOENT && may_create && !mkdir(path, 0700))
		dir = open(path, flags);
	/* Another rank may have made it between the two. */
	if (dir < 0 && errno == EEXIST)
		dir = open(path, flags);
	if (dir < 0)
		return -errno;
	int error = check_directory(dir);
	if (error)
		close(dir);
	return error ? error : dir;
}

/* A second name (hard link) may have been given to a file of ours by somebody else. */
static int check_file(int fd)
{
	struct stat status;
	if (fstat(fd, &status))
		return -errno;
	if (!S_ISREG(status.st_mode))
		return -EINVAL;
	return status.st_uid == geteuid() && status.st_nlink == 1 ? 0 : -EPERM;
}

/* Moves a descriptor up, as far as the program's limit allows. A standard descriptor that the
 * program closed is never taken. */
static int move_up(int fd)
{
	int high = fcntl(fd, F_DUPFD_CLOEXEC, FD_FLOOR);
	if (high < 0)
		high = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
	int error = high < 0 ? -errno : 0;
	close(fd);
	return error ? error : high;
}

static bool is_for_reading(int flags)
{
	return (flags & O_ACCMODE) == O_RDONLY;
}

/* O_NONBLOCK: opening a fifo would wait for its reader. */
static int open_in(int dir, const char *name, int flags)
{
	int create = is_for_reading(flags) ? 0 : O_CREAT;
	int fd = openat(dir, name, flags | create | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
	                0600);
	if (fd < 0)
		return -errno;
	int error = check_file(fd);
	if (error) {
		close(fd);
		return error;
	}
	return move_up(fd);
}

/* Splits off the directory; "." if there is none. False if there is no name or it is too long. */
static bool split(const char *path, char directory[QS_PATH_MAX], const char **name)
{
	const char *slash = strrchr(path, '/');
	size_t length = slash ? (size_t)(slash - path) : 1;
	*name = slash ? slash + 1 : path;
	if (!**name || length >= QS_PATH_MAX)
		return false;
	memcpy(directory, slash ? path : ".", length);
	if (!length)
		directory[length++] = '/';
	directory[length] = '\0';
	return true;
}

int qs_open_file(const char *path, int flags)
{
	char directory[QS_PATH_MAX];
	const char *name;
	int saved = errno;
	if (!split(path, directory, &name))
		return -EINVAL;
	int fd = open_directory(directory, !is_for_reading(flags));
	if (fd >= 0) {
		int dir = fd;
		fd = open_in(dir, name, flags);
		close(dir);
	}
	errno = saved;
	return fd;
}

int qs_open_new(const char *path)
{
	return qs_open_file(path, O_WRONLY | O_APPEND);
}
