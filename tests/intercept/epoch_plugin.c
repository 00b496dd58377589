/* A program that knows no driver: a plug-in in a local scope brings it ("epoch_plugin MODE"), or
 * there is none ("epoch_plugin features"), or a plug-in brings a stub of one ("epoch_plugin stub").
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

int main(int argc, char **argv)
{
	if (argc != 2)
		return EXIT_FAILURE;
	if (!strcmp(argv[1], "features"))
		return features();
	if (!strcmp(argv[1], "stub"))
		return ((int (*)(void))find("libstub.so", "stub_main"))();
	return ((int (*)(const char *))find("libepoch.so", "epoch_main"))(argv[1]);
}
