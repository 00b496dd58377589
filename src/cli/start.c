/* What starts a program under the preload: see cli.h.
 *
 * The library passes everything where it cannot use a policy, which a long run would show only when
 * it has ended; so what options name is looked at first, and the program not started if it is
 * wrong. What the environment says is left to the library. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
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
static bool policy_is_good(bool (*check)(const struct qs_options *options))
{
	struct qs_policy *policy = qs_policy_load(policy_variable);
	const bool good = !qs_policy_broken(policy) && check(qs_policy_options(policy));
	qs_policy_free(policy);
	return good;
}

int qs_cli_start(bool (*check)(const struct qs_options *options), const char *labels,
                 char **command)
{
	char library[PATH_MAX];
	if ((check && !policy_is_good(check)) || find_library(library, sizeof library) ||
	    preload(library))
		return EXIT_NOT_STARTED;
	if (qs_cli_labels(labels, library, command)) {
		fprintf(stderr, "qshim: labels '%s': not torch, nvtx or none\n", labels);
		return QS_EXIT_USAGE;
	}
	execvp(command[0], command);
	int status = errno == ENOENT ? 127 : 126;
	fprintf(stderr, "qshim: cannot run '%s': %s\n", command[0], strerror(errno));
	return status;
}
