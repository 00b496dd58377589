/* qshim run: puts the library first in LD_PRELOAD, keeping what is there, and becomes the command,
 * so that its process id, signals and exit status are the program's own.
 *
 * The library passes everything where it cannot use a policy, which a long run would show only when
 * it has ended; so what -p and -m name is looked at first, and the program not started if it is
 * wrong. What the environment says is left to the library. */
#define _GNU_SOURCE
#include "cli/cli.h"

#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policy/policy.h"

#define EXIT_NOT_STARTED 125 /* as of env(1): a failure of this command, not of the program */

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

static char *policy_variable(const char *name)
{
	bool chosen = !strcmp(name, "QSHIM_POLICY") || !strcmp(name, "QSHIM_SET");
	return chosen ? getenv(name) : NULL;
}

/* Reads the policy as the library will, which says what is wrong. */
static bool policy_is_good(void)
{
	struct qs_policy *policy = qs_policy_load(policy_variable);
	bool good = !qs_policy_broken(policy);
	qs_policy_free(policy);
	return good;
}

static bool mode_is_good(const char *word)
{
	char why[QS_WHY];
	struct qs_options options;
	qs_options_default(&options);
	if (qs_option_set(&options, qs_option_at(qs_option_find("qshim", "mode")), word, why))
		return true;
	fprintf(stderr, "qshim: mode '%s': %s\n", word, why);
	return false;
}

/* What of the options is no environment variable. */
struct choice {
	bool policy;        /* one was given  */
	const char *labels; /* source of them */
};

/* Options to environment variables; -1 on a usage error. */
static int apply_options(int argc, char **argv, struct choice *choice)
{
	static const struct option options[] = {
	        {"policy", required_argument, NULL, 'p'}, {"out", required_argument, NULL, 'o'},
	        {"mode", required_argument, NULL, 'm'},   {"labels", required_argument, NULL, 'l'},
	        {"quiet", no_argument, NULL, 'q'},        {0},
	};
	int option;
	argv[0] = "qshim run"; /* begins getopt's messages */
	while ((option = getopt_long(argc, argv, "+p:o:m:l:q", options, NULL)) != -1) {
		if (option == 'l') {
			choice->labels = optarg;
			continue;
		}
		const char *name = option == 'p'   ? "QSHIM_POLICY"
		                   : option == 'o' ? "QSHIM_OUT"
		                   : option == 'm' ? "QSHIM"
		                   : option == 'q' ? "QSHIM_QUIET"
		                                   : NULL;
		if (!name || (option == 'm' && !mode_is_good(optarg)) ||
		    setenv(name, optarg ? optarg : "1", 1))
			return -1;
		choice->policy = choice->policy || option == 'p';
	}
	return 0;
}

int qs_cli_run(int argc, char **argv)
{
	char library[PATH_MAX];
	struct choice choice = {.labels = "none"};
	if (apply_options(argc, argv, &choice) || optind >= argc)
		return QS_EXIT_USAGE;
	if ((choice.policy && !policy_is_good()) || find_library(library, sizeof library) ||
	    preload(library))
		return EXIT_NOT_STARTED;
	if (qs_cli_labels(choice.labels, library, &argv[optind])) {
		fprintf(stderr, "qshim: labels '%s': not torch, nvtx or none\n", choice.labels);
		return QS_EXIT_USAGE;
	}
	execvp(argv[optind], &argv[optind]);
	int status = errno == ENOENT ? 127 : 126;
	fprintf(stderr, "qshim: cannot run '%s': %s\n", argv[optind], strerror(errno));
	return status;
}
