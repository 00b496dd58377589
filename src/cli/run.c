/* qshim run: puts the library first in LD_PRELOAD, keeping what is there, and becomes the command,
 * so that its process id, signals and exit status are the program's own. */
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/cli.h"
#include "policy/policy.h"

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

static bool any_options(const struct qs_options *options)
{
	(void)options;
	return true;
}

int qs_cli_run(int argc, char **argv)
{
	struct choice choice = {.labels = "none"};
	if (apply_options(argc, argv, &choice) || optind >= argc)
		return QS_EXIT_USAGE;
	return qs_cli_start(choice.policy ? any_options : NULL, choice.labels, &argv[optind]);
}
