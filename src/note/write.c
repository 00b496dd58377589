/* Writing inside somebody else's process. A reader that went away, a full disk or a size limit must
 * neither kill the program by a signal nor be noticed in errno or in files of its own.
 *
 * Assumes that SIGPIPE and SIGXFSZ raised by our own call are directed at the calling thread
 * (POSIX). Left out: a stderr that blocks because nobody reads it blocks us as it would block the
 * program.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "note/inside.h"

/* The signals held back around a call. */
struct held {
	sigset_t before;  /* the thread's mask                        */
	sigset_t pending; /* signals that were waiting before already */
};

static const int signals[] = {SIGPIPE, SIGXFSZ};

static void hold(struct held *held)
{
	sigset_t set;
	sigemptyset(&set);
	for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
		sigaddset(&set, signals[i]);
	sigemptyset(&held->pending);
	sigpending(&held->pending);
	pthread_sigmask(SIG_BLOCK, &set, &held->before);
}

/* Takes away what our call raised, but nothing that the program was waiting for. */
static void release(const struct held *held)
{
	static const struct timespec now = {0};
	for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
		sigset_t one;
		if (sigismember(&held->pending, signals[i]))
			continue;
		sigemptyset(&one);
		sigaddset(&one, signals[i]);
		while (sigtimedwait(&one, NULL, &now) < 0 && errno == EINTR)
			;
	}
	pthread_sigmask(SIG_SETMASK, &held->before, NULL);
}

static ssize_t write_some(int fd, const char *data, size_t size)
{
	ssize_t written;
	do
		written = write(fd, data, size);
	while (written < 0 && errno == EINTR);
	return written < 0 ? -errno : written;
}

/* Bytes written; `error` says why not all. */
static size_t write_all(int fd, const char *data, size_t size, int *error)
{
	size_t done = 0;
	*error = 0;
	while (done < size) {
		ssize_t written = write_some(fd, data + done, size - done);
		if (written <= 0) {
			*error = written ? (int)written : -EIO;
			break;
		}
		done += (size_t)written;
	}
	return done;
}

int qs_write(int fd, const char *data, size_t size)
{
	struct held held;
	int error, saved = errno;
	hold(&held);
	write_all(fd, data, size, &error);
	release(&held);
	errno = saved;
	return error;
}

int qs_allocate(int fd, off_t size)
{
	struct held held;
	int error, saved = errno;
	hold(&held);
	do
		error = posix_fallocate(fd, 0, size);
	while (error == EINTR);
	release(&held);
	errno = saved;
	return -error;
}

const char *qs_error_text(int error, char text[QS_ERROR_TEXT])
{
	if (error == -ESTALE)
		return "the program closed the file";
	return strerror_r(error < 0 ? -error : error, text, QS_ERROR_TEXT);
}

static bool is_ours(const struct qs_file *file)
{
	struct stat status;
	return file->fd >= 0 && !fstat(file->fd, &status) && status.st_dev == file->device &&
	       status.st_ino == file->inode;
}

int qs_file_open(struct qs_file *file, const char *path)
{
	struct stat status;
	int fd = qs_open_new(path);
	file->fd = -1;
	if (fd < 0)
		return fd;
	if (fstat(fd, &status)) {
		int error = -errno;
		close(fd);
		return error;
	}
	*file = (struct qs_file){.fd = fd, .device = status.st_dev, .inode = status.st_ino};
	return 0;
}

void qs_file_forget(struct qs_file *file)
{
	if (is_ours(file))
		close(file->fd);
	file->fd = -1;
}

/* Half a line would spoil the file for its readers. */
static void cut(int fd, size_t written)
{
	off_t end = lseek(fd, 0, SEEK_END);
	if (written && end >= (off_t)written && ftruncate(fd, end - (off_t)written))
		return; /* nothing more can be done about it */
}

int qs_file_write(const struct qs_file *file, const char *data, size_t size, bool whole)
{
	struct held held;
	int error = -ESTALE, saved = errno;
	if (is_ours(file)) {
		hold(&held);
		size_t written = write_all(file->fd, data, size, &error);
		if (error && whole)
			cut(file->fd, written);
		release(&held);
	}
	errno = saved;
	return error;
}
