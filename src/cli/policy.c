/* qshim policy: reads a policy exactly as the library would, before a long run depends on it. */
#include "cli/cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/policy.h"

static int show(const struct qs_policy *policy)
{
	size_t size = qs_policy_show(policy, NULL, 0) + 1;
	char *text = malloc(size);
	if (!text)
		return 1;
	qs_policy_show(policy, text, size);
	fputs(text, stdout);
	free(text);
	return 0;
}

static void report(const struct qs_policy *policy)
{
	int rules = qs_policy_rule_count(policy);
	printf("%s: ok, %d rule%s and [default]\n", qs_policy_name(policy), rules,
	       rules == 1 ? "" : "s");
}

int qs_cli_policy(int argc, char **argv)
{
	if (argc < 2 || argc > 3 || (strcmp(argv[1], "check") && strcmp(argv[1], "show")))
		return QS_EXIT_USAGE;
	if (argc == 3 && setenv("QSHIM_POLICY", argv[2], 1))
		return 1;
	unsetenv("QSHIM"); /* off would read nothing */
	struct qs_policy *policy = qs_policy_load(getenv);
	if (!policy || qs_policy_broken(policy)) {
		qs_policy_free(policy);
		return 1;
	}
	int status = 0;
	if (!strcmp(argv[1], "show"))
		status = show(policy);
	else
		report(policy);
	qs_policy_free(policy);
	return status;
}
