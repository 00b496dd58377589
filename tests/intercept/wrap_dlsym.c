/* Another preloaded library that exports dlsym and forwards it by an ordinary call, counting. */
#define _GNU_SOURCE
#include <dlfcn.h>

static int count;

__attribute__((visibility("default"))) int wrap_dlsym_count(void);
int wrap_dlsym_count(void)
{
	return count;
}

/* Checks nothing and calls nothing else: a sanitizer's runtime looks its functions up through this
 * before it has any. */
__attribute__((visibility("default"), no_sanitize("address", "undefined"))) void *
dlsym(void *handle, const char *name)
{
	static void *(*next)(void *, const char *);
	static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
	for (int i = 0; i < 3 && !next; i++)
		next = (__typeof__(next))dlvsym(RTLD_NEXT, "dlsym", versions[i]);
	count++;
	return next(handle, name);
}
