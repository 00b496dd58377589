/* qshim run --labels: arranges for layer names, by environment variables alone.
 *
 * nvtx: the library becomes the NVTX injection, and the one that was set before follows it.
 * torch: a folder with a sitecustomize module (sitecustomize.py) is put first in PYTHONPATH. The
 * library is told by plain functions rather than by NVTX ranges, so that no NVTX is needed and a
 * profiler does not see thousands of ranges that its user did not ask for. The folder is private,
 * and the same for all runs of a user, as processes that start later read it too.
 */
#define _GNU_SOURCE
#include "cli/cli.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

extern const char qs_sitecustomize[], qs_sitecustomize_end[];

static int label_by_nvtx(const char *library)
{
	const char *before = getenv("NVTX_INJECTION64_PATH");
	if (before && *before && strcmp(before, library) != 0 &&
	    setenv("QSHIM_NVTX_NEXT", before, 1))
		return -errno;
	return setenv("NVTX_INJECTION64_PATH", library, 1) ? -errno : 0;
}

/* 0 if the folder is there and nobody else can put anything in it, or -errno. */
static int make_folder(const char *folder)
{
	struct stat status;
	if (mkdir(folder, 0700) && errno != EEXIST)
		return -errno;
	if (lstat(folder, &status))
		return -errno;
	bool own = S_ISDIR(status.st_mode) && status.st_uid == geteuid();
	return own && !(status.st_mode & 077) ? 0 : -EPERM;
}

/* Another run may be writing or reading the same file: it is replaced as a whole. */
static int write_module(const char *folder)
{
	char path[PATH_MAX], temporary[PATH_MAX];
	size_t size = (size_t)(qs_sitecustomize_end - qs_sitecustomize);
	if (snprintf(path, sizeof path, "%s/sitecustomize.py", folder) >= (int)sizeof path ||
	    snprintf(temporary, sizeof temporary, "%s/XXXXXX", folder) >= (int)sizeof temporary)
		return -ENAMETOOLONG;
	int fd = mkstemp(temporary);
	if (fd < 0)
		return -errno;
	ssize_t written = write(fd, qs_sitecustomize, size);
	int error = written < 0 ? -errno : (size_t)written < size ? -ENOSPC : 0;
	if (close(fd) && !error)
		error = -errno;
	if (!error && rename(temporary, path))
		error = -errno;
	if (error)
		unlink(temporary);
	return error;
}

static int prepend_to_path(const char *folder)
{
	const char *before = getenv("PYTHONPATH");
	char *value = NULL;
	if (asprintf(&value, before && *before ? "%s:%s" : "%s", folder, before) < 0)
		return -ENOMEM;
	int error = setenv("PYTHONPATH", value, 1) ? -errno : 0;
	free(value);
	return error;
}

static int label_by_torch(void)
{
	char folder[PATH_MAX];
	const char *temporary = getenv("TMPDIR");
	if (!temporary || *temporary != '/' || strchr(temporary, ':'))
		temporary = "/tmp";
	if (snprintf(folder, sizeof folder, "%s/qshim-labels-%ld", temporary, (long)geteuid()) >=
	    (int)sizeof folder)
		return -ENAMETOOLONG;
	int error = make_folder(folder);
	if (!error)
		error = write_module(folder);
	if (!error)
		error = prepend_to_path(folder);
	if (error)
		fprintf(stderr, "qshim: %s: %s\n", folder, strerror(-error));
	return error;
}

/* The flag of a python command that keeps it from reading PYTHONPATH or sitecustomize, else 0. */
static char deaf_flag(char *const *command)
{
	const char *slash = strrchr(command[0], '/');
	if (strncmp(slash ? slash + 1 : command[0], "python", strlen("python")) != 0)
		return 0;
	for (int i = 1; command[i] && command[i][0] == '-'; i++) {
		/* Letters up to the first that takes the rest, or the next word, as its value. */
		size_t letters = strcspn(command[i] + 1, "cmWX-");
		const char *flag = strpbrk(command[i] + 1, "ISE"), *end = command[i] + 1 + letters;
		if (flag && flag < end)
			return *flag;
		if (*end == 'c' || *end == 'm' || *end == '-')
			return 0;
		if (*end && !end[1] && command[i + 1])
			i++;
	}
	return 0;
}

int qs_cli_labels(const char *source, const char *library, char *const *command)
{
	int error = 0;
	bool torch = !strcmp(source, "torch");
	if (torch)
		error = label_by_torch();
	else if (!strcmp(source, "nvtx"))
		error = label_by_nvtx(library);
	else if (strcmp(source, "none") != 0)
		return -1;
	char flag = torch ? deaf_flag(command) : 0;
	if (error)
		fputs("qshim: labels are not available\n", stderr);
	else if (flag)
		fprintf(stderr,
		        "qshim: labels are not available: python -%c leaves sitecustomize out\n",
		        flag);
	return 0;
}
