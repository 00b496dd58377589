/* cli/: the qshim command. Each file is one subcommand, `int qs_cli_<name>(int argc, char **argv)`,
 * argv[0] being the subcommand; the value is the exit status. For QS_EXIT_USAGE main.c shows the
 * usage of the subcommand, after whatever it has said itself.
 *
 * main.c     the table of subcommands, help and usage
 * run.c      qs_cli_run: start a program under the preload
 * policy.c   qs_cli_policy: check and show policies
 * reasons.c  qs_cli_reasons: the reason codes as text or Markdown
 */
#ifndef QS_CLI_CLI_H
#define QS_CLI_CLI_H

#define QS_EXIT_USAGE 2

int qs_cli_run(int argc, char **argv);
int qs_cli_policy(int argc, char **argv);
int qs_cli_reasons(int argc, char **argv);

#endif
