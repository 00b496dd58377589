/* cli/: the qshim command. Each file is one subcommand, `int qs_cli_<name>(int argc, char **argv)`,
 * argv[0] being the subcommand; the value is the exit status. For QS_EXIT_USAGE main.c shows the
 * usage of the subcommand, after whatever it has said itself.
 *
 * main.c     the table of subcommands, help and usage
 * run.c      qs_cli_run: start a program under the preload
 * labels.c   qs_cli_labels: what names its layers
 * policy.c   qs_cli_policy: check and show policies
 * reasons.c  qs_cli_reasons: the reason codes as text or Markdown
 */
#ifndef QS_CLI_CLI_H
#define QS_CLI_CLI_H

#define QS_EXIT_USAGE 2

int qs_cli_run(int argc, char **argv);
/* Sets up the source of layer names that --labels asked for: "torch", "nvtx" or "none".
 * `library` is the path of libqshim.so, `command` the program and its arguments, ended by NULL.
 * What cannot be set up is told on stderr, and the program runs without labels; -1 = no such
 * source. */
int qs_cli_labels(const char *source, const char *library, char *const *command);
int qs_cli_policy(int argc, char **argv);
int qs_cli_reasons(int argc, char **argv);

#endif
