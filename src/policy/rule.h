/* Inside policy/: how a policy is held in memory and what its values mean. Not for other folders.
 *
 * Lists are separated by commas. Numbers are whole and written 4096 or 4e9; suffixes such as 4k are
 * refused, because half of all readers take them for 4000 and the other half for 4096.
 *   ranges    a..b a.. ..b a are alternatives; every %d (divisible) must hold; no !x may hold.
 *             "1024.., %16" is at least 1024 and divisible by 16.
 *   patterns  globs with * ? [a-z] [!a-z] that cover the whole text, or re: and a regular
 * expression that may match anywhere in it; alternatives; no !pattern may match. A key of a rule
 * about something unknown (no label, no role, no ordinal) matches nothing, negated or not: a rule
 * never acts on a guess.
 *
 * value.c    numbers, words, lists, ranges, globs, patterns
 * regex.c    qs_regex_compile qs_regex_match
 * rule.c     the keys of a rule: qs_rule_key_find qs_rule_set qs_rule_clear
 * ini.c      qs_ini_file qs_ini_set
 */
#ifndef QS_POLICY_RULE_H
#define QS_POLICY_RULE_H

#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

#include "policy/policy.h"

#define QS_RULE_NAME  32        /* bytes with the NUL; the counter file has as many          */
#define QS_RULES_MAX  512       /* rules in a policy                                         */
#define QS_LINE_MAX   198       /* characters of a line: what the ini reader's buffer holds  */
#define QS_POLICY_MAX (1 << 20) /* bytes of a policy                                         */

/* value.c ------------------------------------------------------------------------------------- */

/* Reads a whole number of 0..1e18, or -1e18..1e18 if `negative`; returns its end or NULL. */
const char *qs_number_scan(const char *text, bool negative, int64_t *value);
/* Reads a number such as 20, 0.5 or 1e3 (15 digits, 9 decimals) times 10^shift, whatever the
 * locale; returns its end or NULL. */
const char *qs_real_scan(const char *text, int shift, double *value);
/* Writes such a number and a unit so that it reads back exactly; snprintf rules. */
size_t qs_real_text(double value, const char *unit, char *text, size_t size);

/* Index of a word in a list ended by NULL, -1 if it is not there. */
int qs_word_find(const char *const *words, const char *text);
/* Explains that none of the words was given, with the nearest. Always returns false. */
bool qs_word_refuse(const char *const *words, const char *text, char why[QS_WHY]);

/* Next item of a comma list, without surrounding blanks: 1 = stored in `item`, 0 = end of the list,
 * -1 = empty or too long an item, explained in `why`. `*cursor` starts at the text. */
int qs_list_next(const char **cursor, char item[QS_LINE_MAX + 1], char why[QS_WHY]);

/* One item of a list of ranges. */
struct qs_range {
	int64_t low,
	        high;   /* inclusive; negative = counted from the end; low = divisor if divisible */
	bool divisible; /* the value must be a multiple of `low`                                  */
	bool exclude;   /* was written with !                                                     */
};

struct qs_ranges {
	struct qs_range *items; /* count of them */
	int count;
};

bool qs_range_parse(const char *text, bool negative, struct qs_range *range, char why[QS_WHY]);
/* Appends the items of a list. After a failure the ranges can only be freed. */
bool qs_ranges_add(struct qs_ranges *ranges, const char *list, bool negative, char why[QS_WHY]);
/* `total` turns negative bounds into positions; <= 0 = unknown. */
bool qs_ranges_match(const struct qs_ranges *ranges, int64_t value, int64_t total);
void qs_ranges_free(struct qs_ranges *ranges);

/* True if the glob covers the whole text. An unclosed [ stands for itself. */
bool qs_glob_match(const char *glob, const char *text);

struct qs_regex;
struct qs_pattern {
	char *glob;             /* the glob, NULL if it is another kind                */
	char *part;             /* what *part* looks for: the glob everybody writes    */
	struct qs_regex *regex; /* the expression                                      */
	bool exclude;           /* was written with !                                  */
};

struct qs_patterns {
	struct qs_pattern *items; /* count of them */
	int count;
};

bool qs_patterns_add(struct qs_patterns *patterns, const char *list, char why[QS_WHY]);
bool qs_patterns_match(const struct qs_patterns *patterns, const char *text);
void qs_patterns_free(struct qs_patterns *patterns);

/* regex.c ------------------------------------------------------------------------------------- */

/* Compiles; free() releases. NULL with an explanation in `why` if it cannot. */
struct qs_regex *qs_regex_compile(const char *pattern, char why[QS_WHY]);
bool qs_regex_match(const struct qs_regex *regex, const char *text);

/* rule.c -------------------------------------------------------------------------------------- */

/* The keys of a rule. The first QS_NUMBERS are ranges over numbers of the product. */
enum qs_rule_key {
	QS_KEY_M,
	QS_KEY_N,
	QS_KEY_K,
	QS_KEY_MNK,
	QS_KEY_MIN_DIM,
	QS_KEY_TOKENS,
	QS_KEY_IN,
	QS_KEY_OUT,
	QS_KEY_WEIGHT,
	QS_KEY_STEPS,
	QS_NUMBERS,
	QS_KEY_LAYER = QS_NUMBERS,
	QS_KEY_ROLE,
	QS_KEY_OP,
	QS_KEY_API,
	QS_CONDITIONS, /* keys from here on say what to do; [default] has only these */
	QS_KEY_ACTION = QS_CONDITIONS,
	QS_KEY_SCALE,
	QS_KEY_FORMAT,
	QS_KEY_STRATEGY,
	QS_KEY_MIN_SQNR,
	QS_RULE_KEYS
};

/* One row of the table of rule keys, for the parser and the manual. */
struct qs_rule_key_info {
	const char *name; /* as written in the file                     */
	const char *help; /* one line: what it is compared with, or does */
};
extern const struct qs_rule_key_info qs_rule_keys[QS_RULE_KEYS];

/* A list of words: bit i of `only` or `never` for word i. */
struct qs_choose_words {
	uint32_t only;  /* written plainly; 0 = all */
	uint32_t never; /* written with !           */
};

/* A rule, or [default], which has no conditions. */
struct qs_rule {
	char name[QS_RULE_NAME];              /* as written, "default" for [default]              */
	const char *origin;                   /* file or variable it stands in, not owned         */
	int line;                             /* of its head, or number of the item in QSHIM_SET  */
	uint32_t given;                       /* bit per enum qs_rule_key                         */
	struct qs_ranges numbers[QS_NUMBERS]; /* by enum qs_rule_key                              */
	struct qs_patterns layer;             /* of module names                                  */
	struct qs_choose_words role;          /* bit per enum qs_role                             */
	struct qs_choose_words op;            /* bit 2 (A transposed) + (B transposed)            */
	struct qs_choose_words api;           /* bit per enum qs_entry                            */
	enum qs_action action;                /* what to do                                       */
	enum qs_scaling scaling;              /* for fp8                                          */
	enum qs_format format;                /* for fp8                                          */
	bool eager;                           /* strategy = eager was given                       */
	double min_sqnr;                      /* dB, if it was given                              */
	char *text[QS_RULE_KEYS];             /* values as written, one line each, or NULL        */
	_Atomic uint64_t hits;                /* products decided by it                           */
};

int qs_rule_key_find(const char *name);
/* Sets or extends one key; on failure explains in `why`, and the rule can only be cleared. */
bool qs_rule_set(struct qs_rule *rule, enum qs_rule_key key, const char *value, char why[QS_WHY]);
/* Forgets one key. */
void qs_rule_unset(struct qs_rule *rule, enum qs_rule_key key);
/* Releases what a rule owns. */
void qs_rule_clear(struct qs_rule *rule);

/* ini.c --------------------------------------------------------------------------------------- */

/* What tells one state of a file from another; all zero = none that was read. */
struct qs_version {
	dev_t device;             /* identity: an editor may replace the file               */
	ino_t inode;              /* identity                                               */
	off_t size;               /* bytes                                                  */
	struct timespec written;  /* mtime                                                  */
	struct timespec attended; /* ctime: also a change of the mode, or a forged mtime    */
};

/* What a policy was made from, to make it again: the environment may have changed by then. */
struct qs_source {
	char path[QS_PATH_MAX];    /* of the file, absolute; "" = none, or not to be followed  */
	char *set;                 /* QSHIM_SET, or NULL                                       */
	bool mode_asked;           /* by QSHIM                                                 */
	enum qs_mode mode;         /* what it asked for                                        */
	uint32_t from_environment; /* bit per option that a variable gave                      */
	struct qs_version version; /* of the file when last looked at                          */
	uint64_t hash;             /* of the text last read, good or not                       */
	bool same;                 /* it was that of the reading before                        */
	bool missing;              /* the file could not be found, which was said              */
};

struct qs_policy {
	struct qs_options options;  /* effective                                               */
	struct qs_patterns process; /* options.process, compiled                               */
	struct qs_rule *rules;      /* in order of precedence                                  */
	int count;                  /* of rules                                                */
	struct qs_rule otherwise;   /* [default]                                               */
	char name[QS_PATH_MAX];     /* file, or "preset NAME"                                  */
	bool preset;                /* an embedded text: its unused rules are no mistake       */
	bool broken;                /* could not be used                                       */
	_Atomic bool layer_seen;    /* some product had a label                                */
	_Atomic bool role_seen;     /* some product had a known role                           */
	_Atomic bool step_seen;     /* some product had a known step                           */
	struct qs_source source;    /* for watch.c                                             */
	struct qs_policy *earlier;  /* that it took the place of, which others may be reading  */
};

/* load.c: reads on to the end of the file, `size` bytes at most; returns the number or -1 with
 * errno. */
ssize_t qs_read_all(int fd, char *text, size_t size);
/* load.c: the policy that the file of `old` makes now, with the environment that `old` had. NULL if
 * the text is the one last read (then old->source.same), if it is unusable, with one message, or if
 * memory is out. */
struct qs_policy *qs_policy_again(struct qs_policy *old);
/* watch.c: the version of an open or named file. */
struct qs_version qs_version_of(const struct stat *status);
/* watch.c: changed so lately that it may change once more without looking different, or that its
 * writer is not done. */
bool qs_version_is_young(const struct qs_version *version);

/* Reads an ini text into a policy that holds defaults; `policy->name` is used in messages and must
 * stay. On false one message was written and the policy is half read. */
bool qs_ini_file(struct qs_policy *policy, const char *text, size_t length);
/* Applies "section.key=value;..."; rules it adds come first, keys it names replace those of a file.
 * On false one message was written. */
bool qs_ini_set(struct qs_policy *policy, const char *text);

#endif
