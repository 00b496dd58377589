/* qshim reasons: the reason codes of the decision log, each with its cure. The README's table is
 * this command's output. */
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>

#include "gemm/reason.h"

int qs_cli_reasons(int argc, char **argv)
{
	const char *format = "%-13s %s\n              -> %s\n";
	if (argc == 2 && !strcmp(argv[1], "--markdown")) {
		puts("| code | what happened | what to do |\n| --- | --- | --- |");
		format = "| `%s` | %s | %s |\n";
	} else if (argc != 1) {
		return QS_EXIT_USAGE;
	}
	for (int reason = 0; reason < QS_REASON_COUNT; reason++)
		printf(format, qs_reason_code((enum qs_reason)reason),
		       qs_reason_text((enum qs_reason)reason),
		       qs_reason_cure((enum qs_reason)reason));
	return 0;
}
