/* qshim inspect: what a run did, of all its processes, from the files in its folder. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/cli.h"
#include "cli/group.h"

#define ROWS 40 /* of a table, unless asked for more */

struct choice {
	enum qs_by by;
	size_t most;
	bool json;
};

static bool choose_by(const char *name, struct choice *choice)
{
	choice->by = qs_group_by_find(name);
	if (choice->by < QS_BY_COUNT)
		return true;
	fprintf(stderr, "qshim: by '%s': not one of", name);
	for (enum qs_by by = 0; by < QS_BY_COUNT; by++)
		fprintf(stderr, "%s%s", by ? ", " : " ", qs_group_by_name(by));
	fputs("\n", stderr);
	return false;
}

/* 0 = all. */
static bool choose_rows(const char *text, struct choice *choice)
{
	char *end;
	errno = 0;
	const long rows = strtol(text, &end, 10);
	choice->most = rows ? (size_t)rows : SIZE_MAX;
	if (*text >= '0' && *text <= '9' && !*end && !errno)
		return true;
	fprintf(stderr, "qshim: rows '%s': not a number\n", text);
	return false;
}

static bool choose(int argc, char **argv, struct choice *choice)
{
	static const struct option options[] = {
	        {"by", required_argument, NULL, 'b'},
	        {"rows", required_argument, NULL, 'n'},
	        {"json", no_argument, NULL, 'j'},
	        {0},
	};
	int option;
	bool good = true;
	argv[0] = "qshim inspect"; /* begins getopt's messages */
	while (good && (option = getopt_long(argc, argv, "b:n:j", options, NULL)) != -1) {
		if (option == 'b')
			good = choose_by(optarg, choice);
		else if (option == 'n')
			good = choose_rows(optarg, choice);
		else if (option == 'j')
			choice->json = true;
		else
			good = false;
	}
	return good && optind == argc - 1;
}

int qs_cli_inspect(int argc, char **argv)
{
	struct choice choice = {.by = QS_BY_KEY, .most = ROWS};
	struct qs_records records;
	if (!choose(argc, argv, &choice))
		return QS_EXIT_USAGE;
	bool good = qs_records_read(argv[optind], &records);
	if (good) {
		good = choice.json ? qs_report_json(&records, choice.by)
		                   : qs_report_text(&records, choice.by, choice.most);
		if (!good)
			fputs("qshim: no memory\n", stderr);
	}
	qs_records_free(&records);
	return good && !fflush(stdout) ? 0 : 1;
}
