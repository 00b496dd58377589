/* An NVTX injection as a profiler brings one: takes the functions over and prints what it is told,
 * a line each. Handles and depths are its own, so that a program can tell whose answer it got. */
#include <stdint.h>
#include <stdio.h>

#define TOOL_DEPTH  100
#define TOOL_HANDLE ((void *)(uintptr_t)0x5150)
#define TOOL_DOMAIN ((void *)(uintptr_t)0xd0d0)

typedef void (*function)(void);

struct callbacks {
	size_t size;
	int (*table)(int module, function ***pointers, unsigned *count);
};

static int push_a(const char *name)
{
	printf("tool push %s\n", name);
	return TOOL_DEPTH;
}

static int pop(void)
{
	puts("tool pop");
	return TOOL_DEPTH;
}

static void *register_a(void *domain, const char *name)
{
	printf("tool register %d %s\n", domain == TOOL_DOMAIN, name);
	return TOOL_HANDLE;
}

static void *create_a(const char *name)
{
	printf("tool create %s\n", name);
	return TOOL_DOMAIN;
}

static void take(const struct callbacks *callbacks, int module, unsigned index, function own)
{
	function **pointers;
	unsigned count;
	if (callbacks->table(module, &pointers, &count) && index < count)
		*pointers[index] = own;
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(const void *(*get)(uint32_t))
{
	const struct callbacks *callbacks = get(1);
	take(callbacks, 1, 9, (function)push_a);
	take(callbacks, 1, 11, (function)pop);
	take(callbacks, 5, 10, (function)register_a);
	take(callbacks, 5, 12, (function)create_a);
	return 1;
}
