/* qshim: the command beside the library. Everything it does can be done with environment variables
 * alone; it finds the library, checks a policy before a long run, and explains reason codes. */
#include "cli/cli.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "policy/policy.h"
#include "version.h"

struct command {
	const char *name;
	int (*run)(int argc, char **argv);
	const char *usage; /* its arguments                  */
	const char *help;  /* what it does, in lines of text */
};

static const struct command commands[] = {
        {"run", qs_cli_run,
         "[-p POLICY] [-o DIR] [-m MODE] [-l LABELS] [-q] [--] COMMAND [ARGUMENT...]",
         "    starts a program with the library preloaded\n"
         "    -p, --policy  a file or a preset; the program is not started if it is wrong\n"
         "    -o, --out     folder for the decision log and the counters\n"
         "    -m, --mode    on, observe, shadow or off\n"
         "    -l, --labels  names of layers: torch (modules), nvtx (ranges) or none\n"
         "    -q, --quiet   do not announce lower precision\n"},
        {"tune", qs_cli_tune,
         "[-p POLICY] [-f FILE] [-o DIR] [-l LABELS] [-q] [--] COMMAND [ARGUMENT...]",
         "    runs a program, measures every product that the policy leaves to measuring, however\n"
         "    long that takes, and keeps the results: later runs decide by them at once\n"
         "    -f, --file    the tuned file (default: that of the policy)\n"
         "    -p, -o, -l, -q as for run\n"},
        {"inspect", qs_cli_inspect, "[-b NAME] [-n ROWS] [-j] DIR",
         "    what a run did, of all its processes: DIR is what -o or QSHIM_OUT named\n"
         "    -b, --by      key (default), layer, role, weight, rule, action, reason, api, rank\n"
         "                  or process: what the rows of the tables have in common\n"
         "    -n, --rows    of each table, 0 = all (default: 40)\n"
         "    -j, --json    all rows as JSON\n"},
        {"policy", qs_cli_policy, "check|show [FILE|PRESET]",
         "    check reports what is wrong; show prints all settings, the keys a rule may have\n"
         "    and the rules (default: what QSHIM_POLICY and QSHIM_SET say)\n"},
        {"reasons", qs_cli_reasons, "[--markdown]",
         "    the reason codes of decisions, and what to do about each\n"},
};

#define COMMAND_COUNT (sizeof commands / sizeof *commands)

static void usage_of(const struct command *command, FILE *to)
{
	fprintf(to, "usage: qshim %s %s\n", command->name, command->usage);
}

static void usage(FILE *to)
{
	for (size_t i = 0; i < COMMAND_COUNT; i++) {
		usage_of(&commands[i], to);
		fputs(commands[i].help, to);
	}
	fputs("usage: qshim --help | --version\n", to);
	const char *name;
	for (int i = 0; (name = qs_preset_name(i)); i++)
		fprintf(to, "%s%s", i ? ", " : "presets: ", name);
	fputs("\n", to);
}

static bool asks_for_help(const char *word)
{
	return !strcmp(word, "--help") || !strcmp(word, "-h");
}

static int run(const struct command *command, int argc, char **argv)
{
	if (argc > 1 && asks_for_help(argv[1])) {
		usage_of(command, stdout);
		fputs(command->help, stdout);
		return 0;
	}
	int status = command->run(argc, argv);
	if (status == QS_EXIT_USAGE)
		usage_of(command, stderr);
	return status;
}

static int unknown(const char *word)
{
	const char *words[COMMAND_COUNT];
	for (size_t i = 0; i < COMMAND_COUNT; i++)
		words[i] = commands[i].name;
	const char *near = qs_nearest(word, words, COMMAND_COUNT);
	fprintf(stderr, "qshim: unknown command '%s'%s%s%s (qshim --help lists them)\n", word,
	        near ? "; did you mean '" : "", near ? near : "", near ? "'?" : "");
	return QS_EXIT_USAGE;
}

int main(int argc, char **argv)
{
	if (argc < 2) {
		usage(stderr);
		return QS_EXIT_USAGE;
	}
	if (asks_for_help(argv[1]) || !strcmp(argv[1], "help")) {
		usage(stdout);
		return 0;
	}
	if (!strcmp(argv[1], "--version")) {
		puts("qshim " QS_VERSION);
		return 0;
	}
	for (size_t i = 0; i < COMMAND_COUNT; i++)
		if (!strcmp(argv[1], commands[i].name))
			return run(&commands[i], argc - 1, argv + 1);
	return unknown(argv[1]);
}
