/* Scenes: pieces of a CUDA program, run in a process of their own with or without the shim.
 *
 * A test program holds its tests and its scenes. Check runs the tests; a test starts the same
 * program again as `program --scene NAME ARGUMENT...` under LD_PRELOAD and looks at what came out:
 * exit status, stdout (which must be what the scene itself printed), stderr, the decision log and
 * the counters. The child's environment is built from nothing, so a test does not depend on the
 * tester's.
 */
#ifndef QS_TESTS_ENGINE_CHILD_H
#define QS_TESTS_ENGINE_CHILD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "note/note.h"
#include "support/suite.h"

#define DECISION_MAX 256
#define COUNTER_MAX  1024
#define PROCESS_MAX  8

/* One line of a decision log. */
struct decision {
	char key[160], api[64], role[16], rule[40], action[16], scale[16], reason[24], detail[128];
	char layer[160];
	char library[512];
	int weight; /* -1 = none is written */
};

/* One line of what shadow mode measured. */
struct shadow {
	char key[160], role[16], layer[160], candidate[32];
	int checks;
	double sqnr, least, error, amax, saturated, flushed; /* the last two -1 if missing */
};

/* What a scene left behind. */
struct outcome {
	int exit;          /* exit status, -signal if it was killed            */
	char out[1 << 16]; /* its stdout                                       */
	char err[1 << 16]; /* its stderr                                       */
	int decisions;     /* lines of decision, of all processes              */
	struct decision decision[DECISION_MAX];
	int shadows; /* lines of shadow mode                            */
	struct shadow shadow[DECISION_MAX];
	int counters; /* slots in use, of all processes                   */
	struct qs_counter counter[COUNTER_MAX];
	int logs;   /* decision files found                             */
	int maps;   /* counter files found                              */
	int broken; /* lines of decision files that are not JSON        */
};

enum shim {
	BARE,    /* no preload                       */
	SHIMMED, /* LD_PRELOAD, QSHIM_OUT            */
};

/* A scene returns its exit status. */
struct scene {
	const char *name;
	int (*run)(int argc, char **argv);
};

/* The scenes of this program, ended by a NULL name; defined by each test program. */
extern const struct scene scenes[];

/* Runs a scene in a child. `env` is a list of NAME=VALUE ended by NULL, or NULL; arguments are
 * strings ended by NULL. Fails the test if the child cannot be started or runs for more than two
 * minutes. */
void run_scene(struct outcome *outcome, enum shim shim, const char *const *env, const char *scene,
               ...);
/* Like it, and kills the child with SIGKILL as soon as it has printed a line. */
void run_scene_and_kill(struct outcome *outcome, const char *const *env, const char *scene);

/* The only decision (or counter) of the outcome; fails the test if there is not exactly one. */
const struct decision *only_decision(const struct outcome *outcome);
const struct qs_counter *only_counter(const struct outcome *outcome);
/* Sums over all counters. */
uint64_t total_calls(const struct outcome *outcome);
uint64_t total_replaced(const struct outcome *outcome);
uint64_t total_late(const struct outcome *outcome);
/* Decisions with this reason code. */
int decisions_with(const struct outcome *outcome, const char *reason);
/* The number behind "NAME " at the start of a line of stdout; fails the test if there is none. */
double printed(const struct outcome *outcome, const char *name);

/* A fresh directory for a test, removed by the caller with remove_directory(). */
void make_directory(char path[256]);
void remove_directory(const char *path);

/* main() of a test program: a scene if asked for one, else the suite. */
int engine_main(int argc, char **argv, Suite *suite);

#endif
