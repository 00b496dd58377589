/* The driver that remembers its calls; see recorder.h. It also answers cuGetProcAddress: the newest
 * version of a name, in the flavour that was asked for, and "cuLaunchNumber<N>", of which there are
 * more than there are thunks. */
#include "tests/intercept/recorder.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NUMBERED 300

static _Thread_local struct record last;
static void (*during)(void);
static int forced = -1;
static size_t parameters;
static word allocation, allocation_bytes;

static int record(const char *name, int status, const word *arguments)
{
	status = forced < 0 ? status : forced;
	last.name = name;
	last.status = status;
	memcpy(last.argument, arguments, sizeof last.argument);
	last.calls++;
	if (during)
		during();
	return status;
}

enum {
#define INDEX(name) INDEX_##name,
	QS_SUBMISSIONS(INDEX) RECORDER_OTHERS(INDEX) NAMES
#undef INDEX
};

#define DEFINE(name)                                                                               \
	RECORDER_EXPORT driver_function name;                                                      \
	int name(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j,   \
	         word k, word l, word m, word n)                                                   \
	{                                                                                          \
		const word arguments[ARGUMENTS] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n};      \
		return record(#name, 1000 + INDEX_##name, arguments);                              \
	}
QS_SUBMISSIONS(DEFINE)
RECORDER_OTHERS(DEFINE)
#undef DEFINE

RECORDER_EXPORT ask_v1 cuGetProcAddress;
RECORDER_EXPORT ask_v2 cuGetProcAddress_v2;

static const struct entry {
	const char *name;
	driver_function *function;
} entries[] = {
#define ENTRY(name) {#name, name},
        QS_SUBMISSIONS(ENTRY) RECORDER_OTHERS(ENTRY)
#undef ENTRY
};

/* Functions that answer their number, 16 bytes each. */
#if defined(__x86_64__)
__asm__(".pushsection .text\n.p2align 4\nnumbered:\n.set number, 0\n.rept 300\n.p2align 4\n"
        "movl $number, %eax\nret\n.set number, number + 1\n.endr\n.popsection");
#elif defined(__aarch64__)
__asm__(".pushsection .text\n.p2align 4\nnumbered:\n.set number, 0\n.rept 300\n.p2align 4\n"
        "mov w0, #number\nret\n.set number, number + 1\n.endr\n.popsection");
#endif
extern const unsigned char numbered[] __attribute__((visibility("hidden")));

const struct record *recorder_last(void)
{
	return &last;
}

void recorder_set_status(int status)
{
	forced = status;
}

void recorder_set_parameters(int count)
{
	parameters = (size_t)count;
}

RECORDER_EXPORT int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size);
RECORDER_EXPORT int cuFuncGetName(const char **name, void *function);

int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size)
{
	(void)function;
	*offset = 8 * index;
	*size = 8;
	return !parameters ? NOT_SUPPORTED : index < parameters ? 0 : INVALID_VALUE;
}

int cuFuncGetName(const char **name, void *function)
{
	(void)function;
	*name = "kernel";
	return 0;
}

void recorder_set_allocation(word first, word bytes)
{
	allocation = first;
	allocation_bytes = bytes;
}

#define LEAST_ADDRESS (1 << 24) /* sizes and offsets are less */
#define RANGE_START   11        /* CU_POINTER_ATTRIBUTE_RANGE_START_ADDR */

RECORDER_EXPORT int cuPointerGetAttribute(void *data, int attribute, word pointer);

int cuPointerGetAttribute(void *data, int attribute, word pointer)
{
	const bool inside = pointer - allocation < allocation_bytes;
	if (pointer < LEAST_ADDRESS)
		return INVALID_VALUE;
	if (attribute == RANGE_START)
		*(word *)data = inside ? allocation : pointer;
	return 0;
}

void recorder_set_during(void (*function)(void))
{
	during = function;
}

driver_function *recorder_address(const char *name)
{
	for (size_t i = 0; i < NAMES; i++)
		if (!strcmp(entries[i].name, name))
			return entries[i].function;
	return NULL;
}

static driver_function *form_of(const char *name, const char *version, const char *flavour)
{
	char full[96];
	snprintf(full, sizeof full, "%s%s%s", name, version, flavour);
	return recorder_address(full);
}

static driver_function *newest(const char *name, uint64_t flags)
{
	static const char *const versions[] = {"_v3", "_v2", ""};
	driver_function *found = NULL;
	for (size_t i = 0; !found && i < 3; i++) {
		if (flags & PER_THREAD)
			found = form_of(name, versions[i], "_ptsz");
		if (!found && (flags & PER_THREAD))
			found = form_of(name, versions[i], "_ptds");
		if (!found)
			found = form_of(name, versions[i], "");
	}
	return found;
}

driver_function *recorder_answer(const char *name, int version, uint64_t flags)
{
	long number;
	if (sscanf(name, "cuLaunchNumber%ld", &number) == 1)
		return number < NUMBERED ? (driver_function *)(numbered + 16 * number) : NULL;
	if (!strcmp(name, "cuGetProcAddress"))
		return version >= 12000 ? (driver_function *)(void *)cuGetProcAddress_v2
		                        : (driver_function *)(void *)cuGetProcAddress;
	return newest(name, flags);
}

int cuGetProcAddress(const char *name, driver_function **function, int version, uint64_t flags)
{
	*function = recorder_answer(name, version, flags);
	return *function ? 0 : NOT_FOUND;
}

int cuGetProcAddress_v2(const char *name, driver_function **function, int version, uint64_t flags,
                        int *answer)
{
	int status = cuGetProcAddress(name, function, version, flags);
	if (answer)
		*answer = status ? 1 : 0;
	return status;
}
