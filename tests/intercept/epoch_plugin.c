/* A program that knows no driver: a plug-in in a local scope brings it ("epoch_plugin MODE"), or
 * there is none ("epoch_plugin features"), or a plug-in brings a stub of one ("epoch_plugin stub"),
 * or a function that is only named like one of a driver ("epoch_plugin namesake").
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *find(const char *library, const char *name)
{
	void *handle = dlopen(library, RTLD_LOCAL | RTLD_NOW);
	void *found = handle ? dlsym(handle, name) : NULL;
	if (found)
		return found;
	fprintf(stderr, "epoch_plugin: %s\n", dlerror());
	exit(3);
}

static void tell(const char *how, void *handle, const char *name)
{
	dlerror();
	void *found = dlsym(handle, name);
	const char *error = dlerror();
	printf("%s %s: %s, %s\n", how, name, found ? "found" : "NULL",
	       error && strstr(error, "undefined symbol") ? "undefined symbol" : "no error");
}

static int features(void)
{
	static const char *const names[] = {"cuLaunchKernel", "cuMemcpyHtoD_v2", "cuGetProcAddress",
	                                    "cuGetProcAddress_v2", "cuInit"};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		tell("default", RTLD_DEFAULT, names[i]);
		tell("next", RTLD_NEXT, names[i]);
		tell("self", dlopen(NULL, RTLD_NOW), names[i]);
		tell("libc", dlopen("libc.so.6", RTLD_NOW), names[i]);
	}
	return 0;
}

typedef double namesake_function(double, double, long, long, long, long, long, long, long, long,
                                 long, long, long, long, long, long, long);

/* The test library's reason not to trust the epoch, if it is preloaded. */
static const char *doubt(void)
{
	const char *(*ask)(void) = (const char *(*)(void))dlsym(RTLD_DEFAULT, "qs_test_doubt");
	return ask ? ask() : "no library";
}

static int namesake(void)
{
	namesake_function *function = (namesake_function *)find("libstub.so", "cuLaunchNamesake");
	printf("%.1f, ", function(0.5, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 160, 170));
	printf("%s\n", doubt());
	return 0;
}

int main(int argc, char **argv)
{
	if (argc != 2)
		return EXIT_FAILURE;
	if (!strcmp(argv[1], "features"))
		return features();
	if (!strcmp(argv[1], "namesake"))
		return namesake();
	if (!strcmp(argv[1], "stub"))
		return ((int (*)(void))find("libstub.so", "stub_main"))();
	return ((int (*)(const char *))find("libepoch.so", "epoch_main"))(argv[1]);
}
