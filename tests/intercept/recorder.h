/* A libcuda.so.1 that does nothing but remember: every function of src/intercept/submissions.h and
 * some that are none, each with its own status and twelve arguments. */
#ifndef QS_TESTS_INTERCEPT_RECORDER_H
#define QS_TESTS_INTERCEPT_RECORDER_H

#include <stdint.h>

#include "intercept/submissions.h"

/* Functions that submit nothing, some with names close to those that do. */
#define RECORDER_OTHERS(X)                                                                         \
	X(cuInit)                                                                                  \
	X(cuCtxGetCurrent)                                                                         \
	X(cuCtxGetStreamPriorityRange)                                                             \
	X(cuDevicePrimaryCtxRetain)                                                                \
	X(cuEventRecord)                                                                           \
	X(cuGraphClone)                                                                            \
	X(cuMemAlloc_v2)                                                                           \
	X(cuMemCreate)                                                                             \
	X(cuMemGetInfo_v2)                                                                         \
	X(cuModuleLoadData)                                                                        \
	X(cuStreamIsCapturing)                                                                     \
	X(cuStreamGetPriority)

/* In words: cuIpcOpenMemHandle has a pointer, an integer, and eight words by value. */
#define ARGUMENTS 14

typedef uintptr_t word;
typedef int driver_function(word, word, word, word, word, word, word, word, word, word, word, word,
                            word, word);

/* What a call left; of the calling thread. */
struct record {
	const char *name;         /* of the function that was reached, NULL = none yet */
	word argument[ARGUMENTS]; /* as they arrived                                   */
	int status;               /* as it was answered                                */
	long calls;               /* so far                                            */
};

#define RECORDER_EXPORT __attribute__((visibility("default")))

RECORDER_EXPORT const struct record *recorder_last(void);
/* The function itself, past every hook; NULL if there is none. */
RECORDER_EXPORT driver_function *recorder_address(const char *name);
/* What cuGetProcAddress answers, past every hook. */
RECORDER_EXPORT driver_function *recorder_answer(const char *name, int version, uint64_t flags);
/* What every call answers from now on, instead of its own number; -1 = that again. */
RECORDER_EXPORT void recorder_set_status(int status);
/* Functions have so many parameters of eight bytes from now on; 0 = that is not told. */
RECORDER_EXPORT void recorder_set_parameters(int count);
/* Addresses in [first, first + bytes) are of one allocation from now on, all others of their own.
 */
RECORDER_EXPORT void recorder_set_allocation(word first, word bytes);
/* Called inside every call while set. */
RECORDER_EXPORT void recorder_set_during(void (*during)(void));

#define PER_THREAD    2 /* CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM */
#define NOT_FOUND     500
#define INVALID_VALUE 1
#define NOT_SUPPORTED 801

typedef int ask_v1(const char *name, driver_function **function, int version, uint64_t flags);
typedef int ask_v2(const char *name, driver_function **function, int version, uint64_t flags,
                   int *answer);

#endif
