/* Another preloaded library that wraps cuLaunchKernel and finds the next one with RTLD_NEXT. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "tests/intercept/recorder.h"

__attribute__((visibility("default"))) driver_function cuLaunchKernel;
__attribute__((visibility("default"))) long wrap_launch_count(void);

static long count;

long wrap_launch_count(void)
{
	return count;
}

int cuLaunchKernel(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j,
                   word k, word l, word m, word n)
{
	static driver_function *next;
	if (!next)
		next = (driver_function *)dlsym(RTLD_NEXT, "cuLaunchKernel");
	count++;
	return next ? next(a, b, c, d, e, f, g, h, i, j, k, l, m, n) : -1;
}
