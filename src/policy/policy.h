/* policy/: the ini file that says what may be done with which product, and the options table.
 *
 * A policy is read at the first intercepted product, from QSHIM_POLICY (a file, or the name
 * of an embedded preset), then QSHIM_SET, then the QSHIM_* variables; later wins. A broken policy
 * gives one message naming file, line and remedy, and qs_policy_load() then returns a policy of
 * which qs_policy_broken() is true: everything runs natively. A
 * file is looked at again while the program runs (watch.c). Nothing else in the library reads the
 * environment. config/default.ini shows the file, rule.h describes the values of a rule.
 *
 * option.c       the options table: qs_option_at qs_option_find qs_option_set qs_option_text
 *                qs_options_default
 * load.c         qs_policy_load qs_policy_parse qs_policy_free qs_policy_warn_unknown
 * match.c        qs_policy_choose qs_policy_report_unused qs_policy_process_allowed, accessors
 *                qs_policy_uses_steps qs_policy_next_step qs_policy_uses_weights
 *                qs_policy_counts_weights qs_policy_weight_holds
 * watch.c        qs_policy_is_watched qs_policy_look
 * show.c         qs_policy_show
 * tuned.h        the file of what was measured
 * preset.c       qs_preset_text qs_preset_name (the texts: preset_text.S)
 * nearest.c      qs_nearest
 * ini.c rule.c value.c regex.c   inside, see rule.h
 */
#ifndef QS_POLICY_POLICY_H
#define QS_POLICY_POLICY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gemm/gemm.h"

enum qs_mode {
	QS_MODE_ON,
	QS_MODE_SHADOW,
	QS_MODE_OBSERVE,
	QS_MODE_OFF,
};

enum qs_validity {
	QS_VALIDITY_EACH,
	QS_VALIDITY_ADJACENT,
	QS_VALIDITY_VERIFIED,
	QS_VALIDITY_TRACKED,
	QS_VALIDITY_FROZEN,
};

/* Where kernels of ours may begin before the work ahead of them in the stream has ended. */
enum qs_early {
	QS_EARLY_NEVER,
	QS_EARLY_EAGER,  /* not in captured graphs                                  */
	QS_EARLY_ALWAYS, /* there too, by edges that not every program can read     */
};

enum qs_summary {
	QS_SUMMARY_AUTO, /* when stderr is a terminal */
	QS_SUMMARY_NEVER,
	QS_SUMMARY_ALWAYS,
};

enum qs_scaling {
	QS_SCALING_AUTO,
	QS_SCALING_TENSOR, /* one scale per operand        */
	QS_SCALING_ROW,    /* one scale per row along K    */
};

enum qs_format {
	QS_FORMAT_AUTO,
	QS_FORMAT_E4M3,
	QS_FORMAT_E5M2,
};

/* A quantity of device memory: absolute, or a share of the device's total. */
struct qs_memory {
	double value;
	bool percent; /* value is a percentage; MiB otherwise */
};

#define QS_PATH_MAX 1024

/* Every option outside the rules, after file, QSHIM_SET and environment. */
struct qs_options {
	int64_t version; /* of the policy syntax, always 1                  */
	enum qs_mode mode;
	char process[512]; /* patterns of executable names, "" = all          */
	enum qs_validity validity;
	struct qs_memory max_mib;     /* bound of the memory qshim takes on a device     */
	int64_t max_keys;             /* bound of the plan table, distinct products      */
	double min_sqnr;              /* dB                                              */
	int64_t check_every;          /* calls, 0 = never                                */
	double min_gain;              /* fraction, 0.03 = 3 %                            */
	double budget_ms;             /* ms of tuning per process                        */
	struct qs_memory tune_mib;    /* bound of the memory for measuring on a device   */
	char tuned_file[QS_PATH_MAX]; /* with placeholders                               */
	bool host_bound_kept;         /* replaced also where the device waits for us     */
	bool cublaslt_any;            /* also use cuBLASLt versions newer than tested    */
	enum qs_early early;          /* launches that overlap the work ahead of them    */
	/* QSHIM_LOG etc. */
	unsigned log_levels;        /* bit per enum qs_level (note/note.h)             */
	char log_file[QS_PATH_MAX]; /* "" = stderr                                     */
	char out_dir[QS_PATH_MAX];  /* run directory, "" = none                        */
	enum qs_summary summary;
	bool quiet; /* no one-time notice                              */
};

/* What a rule is matched against: one product and what is known of it. */
struct qs_subject {
	const struct qs_key *key;
	const char *layer; /* module name, or NULL when there is no label source */
	int32_t weight;    /* ordinal of the weight, -1 = unknown                */
	int64_t step;      /* training step, -1 = unknown                        */
	int32_t weights;   /* number of weights of the program, <= 0 = unknown;
	                      ordinals counted from the end match only once known */
	bool again;        /* was asked for before: counted only by a rule that has no hit */
};

/* What the policy wants for a product. */
struct qs_choice {
	enum qs_action action; /* QS_ACTION_AUTO leaves it to measurement or to the size model */
	enum qs_scaling scaling;
	enum qs_format format;
	bool eager;      /* do it always; false: only where it is expected to be faster  */
	int rule;        /* index for qs_policy_rule_name, -1 = [default]                */
	double min_sqnr; /* dB below which it is not done; negative = none          */
	bool unlikely;   /* by no policy: fp8 only where it is measured to be faster */
	double shared;   /* by no policy: part of the conversion that is found done, 0 to 1 */
	bool trial;      /* by no policy: only the error is wanted; not timed, nothing is kept */
};

struct qs_policy; /* opaque: options, rules and their hit counts */

/* Reads the policy the environment asks for. Never fails and never returns NULL: see above.
 * `getenv_fn` is secure_getenv in the library and a stub in tests; with QSHIM=off nothing but QSHIM
 * is looked at. The result lives until qs_policy_free(). */
struct qs_policy *qs_policy_load(char *(*getenv_fn)(const char *));
/* Reads a policy from memory, for tests and `qshim policy check`. `name` is used in messages. Any
 * problem is reported through qs_message(); returns NULL if the text is unusable or memory is out.
 * The environment is not looked at. */
struct qs_policy *qs_policy_parse(const char *name, const char *text, size_t length);
/* Warns of every variable in a NULL-ended environment that starts with QSHIM but is none of ours,
 * with the nearest name. The library passes `environ`, once, unless qshim is off. */
void qs_policy_warn_unknown(char *const *environment);
void qs_policy_free(struct qs_policy *policy);

/* True if the policy came from a file that qs_policy_look() can follow. */
bool qs_policy_is_watched(const struct qs_policy *policy);
/* Looks at the file of a watched policy: one stat(), and if it has changed, a reading. Returns the
 * new policy, or NULL if `policy` is to stay: the file says the same, was changed less than a
 * second ago, is gone or broken; the last two are said, once for each version of the file. Options
 * outside the rules, [qshim] mode and process are fixed at the start; a change of one is said. By
 * one thread at a time; others may use `policy` meanwhile, and it is not freed. */
struct qs_policy *qs_policy_look(struct qs_policy *policy);

/* True if a rule asks for the training step. */
bool qs_policy_uses_steps(const struct qs_policy *policy);
/* The first step after `step` (>= -1) at which a rule may match what it did not at the step before,
 * or no longer; INT64_MAX = none. */
int64_t qs_policy_next_step(const struct qs_policy *policy, int64_t step);
/* True if a rule asks for the weight, and if one counts weights from the end. */
bool qs_policy_uses_weights(const struct qs_policy *policy);
bool qs_policy_counts_weights(const struct qs_policy *policy);
/* True if for some rule that asks for the weight this one is right; `weights` as in qs_subject. */
bool qs_policy_weight_holds(const struct qs_policy *policy, int32_t weight, int32_t weights);
/* True if the file could not be used: the caller passes everything with QS_REASON_POLICY. */
bool qs_policy_broken(const struct qs_policy *policy);

/* Where the policy came from: the path of a file or "preset NAME". */
const char *qs_policy_name(const struct qs_policy *policy);
const struct qs_options *qs_policy_options(const struct qs_policy *policy);
/* First rule that matches, else [default]; counts the hit. Lock-free, no allocation, thread-safe.
 */
struct qs_choice qs_policy_choose(struct qs_policy *policy, const struct qs_subject *subject);
/* Name of a rule as written, "default" for -1. */
const char *qs_policy_rule_name(const struct qs_policy *policy, int rule);
int qs_policy_rule_count(const struct qs_policy *policy);
/* Products decided by a rule, by [default] for -1. */
uint64_t qs_policy_rule_hits(const struct qs_policy *policy, int rule);
/* One warning per rule that never matched although products were seen; for the rules of a preset,
 * which the user did not write, one message of level info. */
void qs_policy_report_unused(const struct qs_policy *policy);
/* True if [qshim] process lets a program of this name use qshim. */
bool qs_policy_process_allowed(const struct qs_policy *policy, const char *name);
/* Writes the effective options and rules as an ini text that reads back as the same policy (paths
 * of more than 180 characters excepted); returns its length (snprintf rules). */
size_t qs_policy_show(const struct qs_policy *policy, char *text, size_t size);

/* What kind of text an option takes. */
enum qs_option_type {
	QS_OPTION_WORD,     /* one of `words`, stored as its index in an enum      */
	QS_OPTION_FLAG,     /* one of two `words`, stored as its index in a bool   */
	QS_OPTION_COUNT,    /* whole number in low..high, stored as int64_t        */
	QS_OPTION_REAL,     /* number in low..high, stored as double               */
	QS_OPTION_SHARE,    /* "3%" or "0.03" in low..high, stored as a fraction   */
	QS_OPTION_MEMORY,   /* "25%" or MiB, stored as struct qs_memory            */
	QS_OPTION_TEXT,     /* any text that fits, stored as char[]                */
	QS_OPTION_PATTERNS, /* list of patterns, stored as char[]                  */
	QS_OPTION_LEVELS,   /* list of kinds of message, stored as bits            */
};

/* One row of the table from which parser, environment, `qshim policy show` and manual come. */
struct qs_option {
	const char *section;      /* section of the ini file                             */
	const char *key;          /* key in that section                                 */
	const char *variable;     /* environment variable that overrides it, or NULL     */
	const char *initial;      /* default, as it would be written                     */
	const char *help;         /* one line                                            */
	const char *const *words; /* the words of WORD, FLAG and LEVELS, ended by NULL   */
	double low, high;         /* bounds of numbers, inclusive                        */
	size_t offset, size;      /* of the field of struct qs_options, bytes            */
	enum qs_option_type type; /* how text becomes that field                         */
};

/* Bytes of the buffer in which a refused value is explained. */
#define QS_WHY 256

/* Row by index, NULL past the end. */
const struct qs_option *qs_option_at(int index);
/* Index of a row, -1 if there is none. */
int qs_option_find(const char *section, const char *key);
/* Stores a text; on failure returns false, explains in `why` and leaves the options unchanged. */
bool qs_option_set(struct qs_options *options, const struct qs_option *option, const char *text,
                   char why[QS_WHY]);
/* Writes the value as qs_option_set() reads it; returns the length (snprintf rules). */
size_t qs_option_text(const struct qs_options *options, const struct qs_option *option, char *text,
                      size_t size);
void qs_options_default(struct qs_options *options);

/* The embedded presets, by index; NULL past the end. qs_preset_text() returns NULL if unknown. */
const char *qs_preset_name(int index);
const char *qs_preset_text(const char *name, size_t *length);

/* The nearest of `count` words by edit distance, or NULL if none is near enough to suggest. */
const char *qs_nearest(const char *word, const char *const *words, size_t count);

#endif
