/* The tuned file: what was measured of a product, for the next run and for other ranks.
 *
 * An ini text of rows, each of which begins with [product] and ends with its action. A later row of
 * the same measurement takes the place of an earlier one; `pinned = yes` makes a row hold whatever
 * came after it and wherever it was measured. Other rows hold only where all validators are equal.
 *
 * tuned.c  qs_tuned_open qs_tuned_close qs_tuned_find qs_tuned_add qs_tuned_numerics
 *          qs_tuned_program
 */
#ifndef QS_POLICY_TUNED_H
#define QS_POLICY_TUNED_H

#include "policy/policy.h"

#define QS_TUNED_KEY  112
#define QS_TUNED_STEP "step of " /* begins the key of a whole step */
#define QS_TUNED_MAX  (4 << 20)  /* bytes of the file; more is not read and nothing is added */

/* What a measurement depends on besides the product, as text. */
struct qs_validators {
	char gpu[64];      /* name of the device                               */
	char driver[24];   /* version of the CUDA driver                       */
	char cublaslt[24]; /* version of cuBLASLt                              */
	char qshim[16];    /* QS_VERSION                                       */
	char numerics[17]; /* qs_tuned_numerics()                              */
};

/* One measurement: of a candidate against the program's own call, or of auto (`measured`, and
 * `action` if it is kept) in whole steps of a program. */
struct qs_tuned_row {
	char key[QS_TUNED_KEY];    /* qs_key_text(), qs_bucket_text(), or of a step      */
	enum qs_action measured;   /* the candidate                                      */
	enum qs_scaling scaling;   /* that the policy asked for                          */
	enum qs_format format;     /* that the policy asked for                          */
	char algorithm[17];        /* of the candidate's fastest product, "" = unknown   */
	double tokens;             /* that it was measured with; negative = unknown      */
	double ours_us, native_us; /* with all it takes; negative = unknown              */
	double convert_us;         /* of ours_us, for the operands; negative = nothing   */
	double sqnr;               /* dB, negative = unknown                             */
	struct qs_validators valid;
	bool pinned;
	enum qs_action action; /* what was chosen: `measured` or native */
};

struct qs_tuned; /* the rows of a file, and its name */

/* Reads a file, which need not exist; `pattern` is its name, with placeholders, or NULL: rows are
 * kept for this process only. A broken row is
 * left out, with a message that names file and line; so is a file that others may write to. NULL if
 * memory is out. */
struct qs_tuned *qs_tuned_open(const char *pattern);
void qs_tuned_close(struct qs_tuned *tuned);
/* Copies the row of this measurement (row->key, measured, scaling, format, valid) to *row; false if
 * there is none that holds. The first time that only rows of other validators are there, a message
 * says so. By any thread. */
bool qs_tuned_find(struct qs_tuned *tuned, struct qs_tuned_row *row);
/* Remembers a row and appends it to the file, under a lock among processes and by one write. False
 * if it could not be written, which is said once. By any thread. */
bool qs_tuned_add(struct qs_tuned *tuned, const struct qs_tuned_row *row);
/* A hash of the options of section [numerics]. */
void qs_tuned_numerics(const struct qs_options *options, char text[17]);
/* A hash of this process's command line, its first 64 KiB; the same for all if it cannot be read.
 */
uint64_t qs_tuned_program(void);

#endif
