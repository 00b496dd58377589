/* qshim run: puts the library first in LD_PRELOAD, keeping what is there, and becomes the command,
 * so that its process id, signals and exit status are the program's own. */
#define _GNU_SOURCE
#include "cli/cli.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Where the library may be, seen from the folder of the command: a build tree, an installation. */
static const char *const places[] = {"libqshim.so", "../lib/libqshim.so.0"};

static int find_library(char *path, size_t size)
{
	char self[PATH_MAX];
	ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
	if (length > 0) {
		self[length] = '\0';
		*strrchr(self, '/') = '\0';
		for (size_t i = 0; i < sizeof places / sizeof *places; i++)
			if (snprintf(path, size, "%s/%s", self, places[i]) < (int)size &&
			    !access(path, R_OK))
				return 0;
	}
	fputs("qshim: libqshim.so is neither beside this command nor in ../lib; run make\n",
	      stderr);
	return -1;
}

static int preload(const char *library)
{
	const char *before = getenv("LD_PRELOAD");
	char *value = NULL;
	if (asprintf(&value, before && *before ? "%s:%s" : "%s", library, before) < 0)
		return -1;
	int failed = setenv("LD_PRELOAD", value, 1);
	free(value);
	return failed;
}

static int usage(void)
{
	fputs("usage: qshim run [-p POLICY] [-o DIR] [-m on|observe|shadow|off] "
	      "[-l torch|nvtx|none] [-q] [--] COMMAND [ARGUMENT...]\n",
	      stderr);
	return QS_EXIT_USAGE;
}

/* Options to environment variables, and the source of labels; -1 on a usage error. */
static int apply_options(int argc, char **argv, const char **labels)
{
	static const struct option options[] = {
	        {"policy", required_argument, NULL, 'p'}, {"out", required_argument, NULL, 'o'},
	        {"mode", required_argument, NULL, 'm'},   {"labels", required_argument, NULL, 'l'},
	        {"quiet", no_argument, NULL, 'q'},        {0},
	};
	int option;
	while ((option = getopt_long(argc, argv, "+p:o:m:l:q", options, NULL)) != -1) {
		if (option == 'l') {
			*labels = optarg;
			continue;
		}
		const char *name = option == 'p'   ? "QSHIM_POLICY"
		                   : option == 'o' ? "QSHIM_OUT"
		                   : option == 'm' ? "QSHIM"
		                   : option == 'q' ? "QSHIM_QUIET"
		                                   : NULL;
		if (!name || setenv(name, optarg ? optarg : "1", 1))
			return -1;
	}
	return 0;
}

int qs_cli_run(int argc, char **argv)
{
	char library[PATH_MAX];
	const char *labels = "none";
	if (apply_options(argc, argv, &labels) || optind >= argc)
		return usage();
	if (find_library(library, sizeof library) || preload(library))
		return 125;
	if (qs_cli_labels(labels, library, &argv[optind]))
		return usage();
	execvp(argv[optind], &argv[optind]);
	int status = errno == ENOENT ? 127 : 126;
	fprintf(stderr, "qshim: cannot run '%s': %s\n", argv[optind], strerror(errno));
	return status;
}
