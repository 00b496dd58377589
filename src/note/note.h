/* note/: what qshim says: messages, the decision log, the counters and the exit summary.
 *
 * Nothing here writes to stdout, allocates in the path of a product, or depends on the process
 * ending well: decision lines are written one by one as they become known, and counters live in a
 * mapped file that outlives SIGKILL. No file is opened before the first product.
 *
 * message.c   qs_message qs_message_once qs_level_name qs_note_start qs_note_forked
 * path.c      qs_path_expand qs_rank qs_local_rank qs_open_new qs_open_file
 * write.c     qs_write
 * decision.c  qs_note_decision qs_note_policy
 * counter.c   qs_counter_new qs_counter_decide qs_counter_at qs_counter_kept qs_counter_kept_use
 *             qs_counter_escaped qs_counter_header qs_counter_index qs_kept_name
 * shadow.c    qs_note_shadow_row qs_note_shadow qs_note_shadow_report
 * summary.c   qs_note_summary qs_note_summary_wanted qs_note_steps qs_note_share qs_note_memory
 *             qs_note_notice
 * lock.c      qs_lock_within_a_second qs_note_ending
 * json.c and the rest of write.c   inside, see inside.h
 */
#ifndef QS_NOTE_NOTE_H
#define QS_NOTE_NOTE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gemm/gemm.h"

struct qs_options;

/* Takes a lock; false if it was not free for a second. */
bool qs_lock_within_a_second(pthread_mutex_t *lock);

/* Kinds of message; QSHIM_LOG is a comma list of these names. */
enum qs_level {
	QS_LOG_ERROR,    /* something of ours failed; the program goes on natively  */
	QS_LOG_WARN,     /* a mistake of the user's: policy, environment            */
	QS_LOG_INFO,     /* what was found and loaded                               */
	QS_LOG_DISPATCH, /* one line per key: the decision, as text                 */
	QS_LOG_CACHE,    /* operands made, reused, dropped                          */
	QS_LOG_NUMERICS, /* measured errors                                         */
	QS_LOG_LEVELS
};

/* Writes one line "qshim: ..." to stderr or the log file if the level is on. Bounded (1 KiB), no
 * allocation, at most 1000 lines a process; keeps errno. Safe before qs_note_start(): errors and
 * warnings then go to stderr. */
void qs_message(enum qs_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Like qs_message(QS_LOG_ERROR, ...), but only once per `reason` and process. */
void qs_message_once(enum qs_reason reason, const char *format, ...)
        __attribute__((format(printf, 2, 3)));
const char *qs_level_name(enum qs_level level);

/* Opens what the options ask for. Called once, at the first product (again after fork). */
void qs_note_start(const struct qs_options *options);
/* exit() was called, perhaps by a signal handler that interrupted the holder of a lock. */
void qs_note_ending(void);
/* In a forked child: forget files and mappings of the parent without touching them. */
void qs_note_forked(void);

/* Expands %p %i pid, %h host, %r rank, %l local rank, %q{VAR}, %% into out; returns the length or 0
 * if it does not fit or a placeholder is unknown. '~/' at the start is the home directory. */
size_t qs_path_expand(const char *pattern, char *out, size_t size);
/* Rank of this process from RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID, else 0. */
int qs_rank(void);
int qs_local_rank(void);
/* Creates the directory (one level, mode 0700) if missing and opens a file in it for appending, new
 * with mode 0600: no symlink, regular, owned by this user, one name only. A directory that everyone
 * may rename files in is refused. The fd is closed on exec and out of the way of low numbers that a
 * program may expect to get. Returns fd or -errno. */
int qs_open_new(const char *path);
/* As qs_open_new() with open()'s access mode and O_EXCL or O_APPEND in `flags`; to be read only,
 * nothing is created. */
int qs_open_file(const char *path, int flags);
/* Writes everything, by one write() unless the file takes less: 0 or -errno. No SIGPIPE or SIGXFSZ
 * reaches the program. */
int qs_write(int fd, const char *data, size_t size);

#define QS_COUNTER_MAGIC   "QSHIMCNT"
#define QS_COUNTER_VERSION 1

/* Forms of kept operands: fp8, fp8 transposed, NF4, fp8 in tiles (enum qs_form_kind). */
#define QS_KEPT_FORMS 4

/* Start of counters.%r.%p.bin, followed by `slots` times struct qs_counter. 256 bytes. */
struct qs_counter_header {
	char magic[8];         /* QS_COUNTER_MAGIC, not terminated                       */
	uint32_t version;      /* QS_COUNTER_VERSION                                     */
	uint32_t slot_size;    /* bytes of a slot                                        */
	uint32_t slots;        /* number of slots; the last one is for "other"           */
	_Atomic uint32_t used; /* slots reserved from the start, "other" not counted     */
	int32_t pid;           /* of the process                                         */
	int32_t rank;          /* qs_rank()                                              */
	int64_t start;         /* seconds since 1970                                     */
	char exe[64];          /* short name of the program, terminated                  */
	char program[16];      /* QS_VERSION, terminated                                 */
	_Atomic uint64_t kept_bytes[QS_KEPT_FORMS];   /* bytes of kept operands now, by form    */
	_Atomic uint64_t kept_uses[QS_KEPT_FORMS];    /* products that used one, by form        */
	_Atomic uint64_t kept_checks[QS_KEPT_FORMS];  /* of those, after a check of its source */
	_Atomic uint64_t kept_escapes[QS_KEPT_FORMS]; /* found changed, see qs_counter_escaped() */
	uint64_t spare; /* zero                                                   */
};

/* Counters of one key, in the mapped file. 256 bytes. */
struct qs_counter {
	char key[112];             /* qs_key_text                                             */
	char rule[32];             /* rule that decided, "" if none                           */
	char layer[40];            /* label or ""                                             */
	uint8_t action;            /* enum qs_action planned                                  */
	uint8_t reason;            /* enum qs_reason of the plan                              */
	uint8_t role;              /* enum qs_role                                            */
	uint8_t entry;             /* enum qs_entry                                           */
	uint32_t used;             /* 1 once the slot is complete                             */
	double flops;              /* of one call, 0 in "other"                               */
	_Atomic uint64_t calls;    /* all calls                                               */
	_Atomic uint64_t replaced; /* calls that our engine served                            */
	_Atomic uint64_t bytes;    /* bytes of quantised operands written by us               */
	_Atomic uint64_t late;     /* calls passed although planned otherwise                 */
	uint64_t weight;           /* 1 + ordinal of the weight, 0 = several or unknown       */
	uint64_t spare[2];         /* zero                                                    */
};

/* Reserves the slot of a new key; never NULL: when the table is full all further keys share the
 * last slot, named "other". The caller fills nothing but the four atomics afterwards. */
struct qs_counter *qs_counter_new(const char *key_text, const struct qs_key *key,
                                  enum qs_action action, enum qs_reason reason, const char *rule,
                                  const char *layer);
/* Changes the decision of a slot (a plan that was cold becomes complete). */
void qs_counter_decide(struct qs_counter *counter, enum qs_action action, enum qs_reason reason,
                       const char *rule);
/* Slot by index, NULL past the last used one; "other" comes last. A slot being filled by another
 * thread has `used` == 0 and is to be skipped. */
const struct qs_counter *qs_counter_at(size_t index);

/* The same the other way: the slot's index in the file, -1 for "other", which stands for many keys.
 */
int64_t qs_counter_index(const struct qs_counter *counter);

/* What such a form is called, "nf4". */
const char *qs_kept_name(int form);
/* Operands of a form kept from one product to the next: bytes more or less, and a use, before which
 * the whole source was `checked` or not. */
void qs_counter_kept(int form, int64_t bytes);
void qs_counter_kept_use(int form, bool checked);
/* So many more times a product, or what compares for it, found that the source of a copy thought to
 * be current had changed. What the host has not read yet is not counted. */
void qs_counter_escaped(int form, uint64_t times);
/* The header, NULL before qs_note_start(). */
const struct qs_counter_header *qs_counter_header(void);

/* One decision, written as a JSON line to decisions.%r.%p.jsonl and as a dispatch message. */
struct qs_decision {
	const struct qs_key *key;
	const char *layer;     /* or NULL                                                    */
	int32_t weight;        /* ordinal of the weight, -1 = several or unknown             */
	const char *rule;      /* name of the rule, "default", or NULL if none was consulted */
	enum qs_action action; /* what is done                                               */
	bool rows;             /* of fp8: with a scale for each row, not one for each operand */
	enum qs_reason reason; /* why                                                        */
	const char *detail;    /* one clause more, or NULL                                   */
	const char *library;   /* path of the copy of cuBLAS, or NULL                        */
	const struct qs_counter *counter; /* slot of the key, or NULL                        */
};
void qs_note_decision(const struct qs_decision *decision);

/* What the products of one key would have been in one form of lower precision. */
struct qs_shadow_row {
	const struct qs_key *key;
	const char *layer;         /* or NULL                                                  */
	char candidate[24];        /* the form, "fp8 row"                                      */
	uint64_t checks;           /* products that were compared                              */
	double last, least;        /* SQNR against the program's own results, dB               */
	double error;              /* largest difference by amax, the worst of all checks      */
	double amax;               /* largest element of the program's own results             */
	double saturated, flushed; /* largest share of an operand's elements; -1 = unknown     */
	uint64_t logged;           /* checks in the last line of the log                       */
	struct qs_shadow_row *next;
};

/* One comparison. */
struct qs_shadow_error {
	double sqnr, error, amax, saturated, flushed; /* as in struct qs_shadow_row */
};

/* The row of a form and a key, made if new; NULL if memory is out. Key and layer must stay. */
struct qs_shadow_row *qs_note_shadow_row(const struct qs_key *key, const char *layer,
                                         const char *candidate);
/* Adds a comparison. A line of the log tells the row's 1st, 2nd, 4th, 8th, ... */
void qs_note_shadow(struct qs_shadow_row *row, const struct qs_shadow_error *error);
/* At exit: logs the rows that have changed since their last line. */
void qs_note_shadow_report(void);

/* The one-time line that lower precision is in effect; prints nothing if quiet. */
void qs_note_notice(enum qs_action action);
/* Another version of the policy is in effect: a line of the log, and a message of level info.
 * `changed` keys of those met are decided otherwise than before. */
void qs_note_policy(const char *name, int changed);
/* For the summary: steps completed, products of a step, and seconds that a step took on average. */
void qs_note_steps(int64_t steps, int64_t products, double seconds);
/* And the part of that time that products take on the device, 0 to 1 (more where streams overlap),
 * by calls of `timed` keys; `untimed` keys are left out of it. */
void qs_note_share(double part, int64_t timed, int64_t untimed);
/* And the bytes of device memory that we have, kept operands among them. */
void qs_note_memory(uint64_t bytes);
/* The exit table on stderr, if the options want it. */
void qs_note_summary(void);
bool qs_note_summary_wanted(void);

#endif
