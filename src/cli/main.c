/* qshim: the command beside the library. Everything it does can be done with environment variables
 * alone; it finds the library, checks a policy before a long run, and explains reason codes. */
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>

#include "policy/policy.h"
#include "version.h"

struct command {
	const char *name;
	int (*run)(int argc, char **argv);
	const char *usage;
};

static const struct command commands[] = {
        {"run", qs_cli_run,
         "run [-p POLICY] [-o DIR] [-m MODE] [-l LABELS] [-q] [--] COMMAND [ARGUMENT...]"},
        {"policy", qs_cli_policy, "policy check|show [FILE|PRESET]"},
        {"reasons", qs_cli_reasons, "reasons [--markdown]"},
};

#define COMMAND_COUNT (sizeof commands / sizeof *commands)

static void usage(FILE *to)
{
	fputs("usage:\n", to);
	for (size_t i = 0; i < COMMAND_COUNT; i++)
		fprintf(to, "  qshim %s\n", commands[i].usage);
	fputs("  qshim --version\n", to);
}

static int unknown(const char *word)
{
	const char *words[COMMAND_COUNT];
	for (size_t i = 0; i < COMMAND_COUNT; i++)
		words[i] = commands[i].name;
	const char *near = qs_nearest(word, words, COMMAND_COUNT);
	fprintf(stderr, "qshim: unknown command '%s'%s%s%s\n", word, near ? "; did you mean '" : "",
	        near ? near : "", near ? "'?" : "");
	usage(stderr);
	return QS_EXIT_USAGE;
}

int main(int argc, char **argv)
{
	if (argc < 2) {
		usage(stderr);
		return QS_EXIT_USAGE;
	}
	if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) {
		usage(stdout);
		return 0;
	}
	if (!strcmp(argv[1], "--version")) {
		puts("qshim " QS_VERSION);
		return 0;
	}
	for (size_t i = 0; i < COMMAND_COUNT; i++)
		if (!strcmp(argv[1], commands[i].name))
			return commands[i].run(argc - 1, argv + 1);
	return unknown(argv[1]);
}
