/* Runs a program in an environment made from nothing, with or without the shim, and keeps all that
 * it left: exit status, output, decision log, counters. For one test at a time. */
#ifndef QS_TESTS_INTERCEPT_RUN_H
#define QS_TESTS_INTERCEPT_RUN_H

#include <stdbool.h>
#include <stddef.h>

#include "note/note.h"

#define TEXT_MAX    (1 << 16)
#define COUNTER_MAX 64

#define SHIM "libqshim.so"

/* Which CUDA the program finds. */
enum cuda {
	SOFTCUDA, /* the emulation, with a second copy of cuBLAS named .so.12 */
	TOOLKIT,  /* the real libraries, which without a GPU answer a NULL handle */
};

struct setting {
	const char *preload;    /* names of built libraries, separated by ':'; NULL = none */
	enum cuda cuda;         /* first in the library path                               */
	const char *const *env; /* more NAME=VALUE, ended by NULL, or NULL                 */
};

struct run {
	int status;                             /* exit status, or -signal               */
	char out[TEXT_MAX], err[TEXT_MAX];      /* what it printed                       */
	char log[TEXT_MAX];                     /* all decision files, one after another */
	bool wrote;                             /* the run directory was made            */
	int counters;                           /* slots in use, of all processes        */
	struct qs_counter counter[COUNTER_MAX]; /* the slots                             */
};

/* Runs argv (ended by NULL): the program of that name among those built for these tests, else the
 * one in PATH. Fails the test if it cannot be started or takes more than two minutes. */
void run(struct run *result, const struct setting *setting, const char *const *argv);

/* Number of decisions whose line holds all of these: "api", reason code, part of the library's
 * path. NULL = any. */
int decisions(const struct run *result, const char *api, const char *reason, const char *library);
/* Calls counted under an entry point. */
uint64_t calls(const struct run *result, enum qs_entry entry);

/* Path of a built file; lives as long as the test. */
const char *built(const char *name);
/* True if the toolkit's cuBLAS is on this machine. */
bool have_toolkit(void);
/* What must be preloaded before anything else (a sanitizer's runtime), or "". */
const char *preload_first(void);
/* Path of a file in the directory of this test, which is kept when the test fails. */
const char *scratch_file(const char *name);
void remove_scratch(void);

#endif
