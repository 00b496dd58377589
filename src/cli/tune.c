/* qshim tune: runs a program as qshim run does, with no limit to the time that measuring takes, and
 * keeps what was measured in the tuned file, by which later runs decide without measuring. */
#define _GNU_SOURCE
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "policy/policy.h"

#define NO_LIMIT "tune.budget_ms=1e9"

/* Adds to QSHIM_SET, whose later settings win; -1 without memory. */
static int set(const char *settings)
{
	const char *before = getenv("QSHIM_SET");
	char *value = NULL;
	if (asprintf(&value, "%s;%s", before ? before : "", settings) < 0)
		return -1;
	const int failed = setenv("QSHIM_SET", value, 1);
	free(value);
	return failed;
}

/* The file's name from the root on, as the program may go elsewhere; % begins no placeholder in
 * what we put before it. NULL if it cannot be told. */
static char *absolute(const char *file)
{
	char folder[PATH_MAX], *path = NULL;
	if (file[0] == '/' || !strncmp(file, "~/", 2))
		return strdup(file);
	if (!getcwd(folder, sizeof folder))
		return NULL;
	char *doubled = malloc(2 * strlen(folder) + 1), *to = doubled;
	for (const char *from = folder; doubled && *from; from++) {
		*to++ = *from;
		if (*from == '%')
			*to++ = '%';
	}
	if (doubled)
		*to = '\0';
	if (!doubled || asprintf(&path, "%s/%s", doubled, file) < 0)
		path = NULL;
	free(doubled);
	return path;
}

/* Has the library use this tuned file; -1 if it cannot be named. */
static int set_file(const char *file)
{
	char *path = NULL, *setting = NULL;
	int failed = -1;
	if (!*file)
		fputs("qshim: a file without a name\n", stderr);
	else if (strchr(file, ';')) /* ends a setting in QSHIM_SET */
		fprintf(stderr, "qshim: file '%s': a ';' cannot be in its name\n", file);
	else if (!(path = absolute(file)) || asprintf(&setting, "tune.file=%s", path) < 0)
		fprintf(stderr, "qshim: file '%s': the current folder cannot be told\n", file);
	else
		failed = set(setting);
	free(path);
	free(setting);
	return failed;
}

/* False, and a line that says how to have one, if the policy keeps the results nowhere. */
static bool needs_file(const struct qs_options *options)
{
	if (!*options->tuned_file)
		fputs("qshim: the policy keeps no tuned file ([tune] file): name one with -f\n",
		      stderr);
	return *options->tuned_file;
}

int qs_cli_tune(int argc, char **argv)
{
	static const struct option options[] = {
	        {"policy", required_argument, NULL, 'p'}, {"file", required_argument, NULL, 'f'},
	        {"out", required_argument, NULL, 'o'},    {"labels", required_argument, NULL, 'l'},
	        {"quiet", no_argument, NULL, 'q'},        {0},
	};
	const char *labels = "none";
	int option;
	argv[0] = "qshim tune"; /* begins getopt's messages */
	if (setenv("QSHIM", "on", 1) || set(NO_LIMIT))
		return QS_EXIT_USAGE;
	while ((option = getopt_long(argc, argv, "+p:f:o:l:q", options, NULL)) != -1) {
		if (option == 'p' && !setenv("QSHIM_POLICY", optarg, 1))
			continue;
		if (option == 'o' && !setenv("QSHIM_OUT", optarg, 1))
			continue;
		if (option == 'q' && !setenv("QSHIM_QUIET", "1", 1))
			continue;
		if (option == 'f' && !set_file(optarg))
			continue;
		if (option != 'l')
			return QS_EXIT_USAGE;
		labels = optarg;
	}
	if (optind >= argc)
		return QS_EXIT_USAGE;
	return qs_cli_start(needs_file, labels, &argv[optind]);
}
