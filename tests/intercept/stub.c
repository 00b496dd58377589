/* A library that brings its own cuLaunchKernel and loads the driver, if there is one, only inside
 * it: what is exported by a stub like this one is what its own calls mean. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#include "tests/intercept/recorder.h"

__attribute__((visibility("default"))) driver_function cuLaunchKernel;
__attribute__((visibility("default"))) int stub_main(void);
__attribute__((visibility("default"))) double cuLaunchNamesake(double, double, long, long, long,
                                                               long, long, long, long, long, long,
                                                               long, long, long, long, long, long);

#define NO_DRIVER 303

int cuLaunchKernel(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j,
                   word k, word l, word m, word n)
{
	void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	driver_function *real = driver ? (driver_function *)dlsym(driver, "cuLaunchKernel") : NULL;
	printf("stub %lu %lu\n", (unsigned long)a, (unsigned long)l);
	return real ? real(a, b, c, d, e, f, g, h, i, j, k, l, m, n) : NO_DRIVER;
}

/* No function of the driver, only a name like one, and not called as those are. */
double cuLaunchNamesake(double a, double b, long c, long d, long e, long f, long g, long h, long i,
                        long j, long k, long l, long m, long n, long o, long p, long q)
{
	return a + 2 * b + (double)(c + d + e + f + g + h + i + j + k + l + m + n + o + p * q);
}

/* The call goes through the dynamic linker; so does the look-up. */
int stub_main(void)
{
	driver_function *self = (driver_function *)dlsym(RTLD_DEFAULT, "cuLaunchKernel");
	printf("status %d\n", cuLaunchKernel(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14));
	printf("found %d\n", self != NULL);
	printf("status %d\n", self ? self(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14) : -1);
	return 0;
}
