/* cli/: the qshim command. Each file is one subcommand, `int qs_cli_<name>(int argc, char **argv)`,
 * argv[0] being the subcommand; the value is the exit status. For QS_EXIT_USAGE main.c shows the
 * usage of the subcommand, after whatever it has said itself.
 *
 * main.c     the table of subcommands, help and usage
 * run.c      qs_cli_run: start a program under the preload
 * tune.c     qs_cli_tune: the same, measuring without a limit, into the tuned file
 * start.c    qs_cli_start: what both have in common
 * labels.c   qs_cli_labels: what names its layers
 * inspect.c  qs_cli_inspect: what a run did (records.h, group.h)
 * policy.c   qs_cli_policy: check and show policies
 * reasons.c  qs_cli_reasons: the reason codes as text or Markdown
 */
#ifndef QS_CLI_CLI_H
#define QS_CLI_CLI_H

#include <stdbool.h>

#define QS_EXIT_USAGE 2

int qs_cli_run(int argc, char **argv);
int qs_cli_tune(int argc, char **argv);
/* Becomes `command` (ended by NULL), with the library first in LD_PRELOAD and layers named by the
 * source `labels`, as below. With `check`, which may be NULL, only if QSHIM_POLICY and QSHIM_SET
 * are good and it finds their options so, else saying why not. Returns the exit status if that
 * fails: 125 as of env(1), 126 and 127 as of a shell; what is wrong was said. */
struct qs_options;
int qs_cli_start(bool (*check)(const struct qs_options *options), const char *labels,
                 char **command);
/* Sets up the source of layer names that --labels asked for: "torch", "nvtx" or "none".
 * `library` is the path of libqshim.so, `command` the program and its arguments, ended by NULL.
 * What cannot be set up is told on stderr, and the program runs without labels; -1 = no such
 * source. */
int qs_cli_labels(const char *source, const char *library, char *const *command);
int qs_cli_inspect(int argc, char **argv);
int qs_cli_policy(int argc, char **argv);
int qs_cli_reasons(int argc, char **argv);

#endif
