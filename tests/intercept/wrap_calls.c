/* Another preloaded library that wraps functions of libc by dlsym(RTLD_NEXT, ...), as allocators
 * and tracers do: a look-up judged by the wrong caller finds the wrapper again. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static __thread int depth;

static void *next_of(const char *name, void *self)
{
	void *next = dlsym(RTLD_NEXT, name);
	if (next && next != self && depth < 3)
		return next;
	fprintf(stderr, "wrap_calls: the next %s is the wrapper itself\n", name);
	_exit(4);
}

__attribute__((visibility("default"))) void *malloc(size_t size)
{
	static void *(*next)(size_t);
	depth++;
	if (!next)
		next = (__typeof__(next))next_of("malloc", (void *)malloc);
	void *memory = next(size);
	depth--;
	return memory;
}

__attribute__((visibility("default"))) pid_t getppid(void)
{
	depth++;
	pid_t (*next)(void) = (__typeof__(next))next_of("getppid", (void *)getppid);
	pid_t parent = next();
	depth--;
	return parent;
}
