/* Inside cli/: what a run has left in its folder (QSHIM_OUT), read back.
 *
 * records.c   qs_records_read qs_records_free qs_counters_add qs_records_process
 * log.c       qs_log_add qs_log_end
 * text.c      qs_grow qs_copy_text
 *
 * Whatever the files hold, reading is bounded by their size; texts are shortened to their room, and
 * have nothing in them that a terminal would obey.
 */
#ifndef QS_CLI_RECORDS_H
#define QS_CLI_RECORDS_H

#include <stdbool.h>
#include <stddef.h>

#include "note/note.h"

/* A process of the run: a counters file, or a log without one. */
struct qs_process_record {
	char name[64]; /* RANK.PID, as the files are called                     */
	char host[64]; /* "" if no log tells                                    */
	struct qs_counter_header header;
	size_t first, count; /* its products, one for each slot, among all of the run */
};

struct qs_product_record {
	size_t process;       /* index                                    */
	char layer[128];      /* whole if a log has it                    */
	struct qs_counter is; /* not `used`: nothing; else with good enums */
};

/* What shadow mode found of a product in a form of lower precision. */
struct qs_shadow_record {
	size_t process;
	size_t line; /* the later of two has all that the other had */
	char key[256], layer[128], role[16], candidate[24];
	int64_t weight;            /* ordinal, -1 = several or unknown         */
	double checks;             /* this and the rest as struct qs_shadow_row */
	double last, least;        /* dB                                       */
	double error, amax;        /* of the largest element; itself           */
	double saturated, flushed; /* shares, -1 = unknown                     */
};

struct qs_records {
	struct qs_process_record *processes;
	struct qs_product_record *products;
	struct qs_shadow_record *shadows;
	size_t process_count, product_count, shadow_count;
	size_t unread; /* lines of logs that are none */
};

/* Reads all files of a folder. Complains on stderr of those that cannot be read; false if none can,
 * or memory is out. To be freed in any case. */
bool qs_records_read(const char *folder, struct qs_records *records);
void qs_records_free(struct qs_records *records);

/* Adds the counters of a process, `size` bytes of a file; NULL, or what is wrong with them. */
const char *qs_counters_add(struct qs_records *records, const char *name, const void *data,
                            size_t size);
/* Number of the first process from `from` on that is called so, `process_count` if there is none.
 */
size_t qs_records_process(const struct qs_records *records, const char *name, size_t from);
/* Adds a line of the log of the processes that are called so; false without memory. */
bool qs_log_add(struct qs_records *records, const char *name, const char *line, size_t length);
/* After the last line: forgets what shadow mode found earlier of the same. */
void qs_log_end(struct qs_records *records);

/* The array with room for one more of `size` bytes behind `count`; NULL without memory, and the
 * array stays. */
void *qs_grow(void *array, size_t count, size_t size);
/* Copies at most `length` bytes, up to a NUL; what is no printable ASCII or UTF-8 becomes '?'. */
void qs_copy_text(char *to, size_t size, const char *from, size_t length);

#endif
