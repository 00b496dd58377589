/* A program that is not linked to cuBLAS and gets at it in the ways that such programs have:
 * `host FRAME ARGUMENT...`. What it prints must be the same with and without the shim. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/intercept/snippet.h"

static void *open_library(const char *name, int flags)
{
	void *handle = dlopen(name, flags | RTLD_NOW);
	if (handle)
		return handle;
	fprintf(stderr, "host: %s\n", dlerror());
	exit(3);
}

static void *find(void *handle, const char *name)
{
	void *found = dlsym(handle, name);
	if (found)
		return found;
	fprintf(stderr, "host: %s\n", dlerror());
	exit(3);
}

/* ---- by name from handles, as JAX does ---- */

static void *cublas, *lt; /* where look_up() looks */

static void open_copy(const char *version)
{
	char name[64];
	snprintf(name, sizeof name, "libcublas.so.%s", version);
	cublas = open_library(name, RTLD_LOCAL);
	snprintf(name, sizeof name, "libcublasLt.so.%s", version);
	lt = open_library(name, RTLD_LOCAL);
}

static void *look_up(const char *name)
{
	return find(strncmp(name, "cublasLt", 8) ? cublas : lt, name);
}

static int by_dlsym(char **argv)
{
	open_copy("13");
	snippet_look_up = look_up;
	return snippet("dlsym", argv[0], argv[1]);
}

/* Looked up here, called from another object, as ctypes does. */
static int borrowed(char **argv)
{
	void *library = open_library("libsnippet_dlsym.so", RTLD_LOCAL);
	open_copy("13");
	*(look_up_function **)find(library, "snippet_look_up") = look_up;
	return ((snippet_function *)find(library, "snippet"))("borrowed", argv[0], argv[1]);
}

/* ---- plug-ins ---- */

static snippet_function *open_snippet(const char *name, int flags)
{
	return (snippet_function *)find(open_library(name, flags), "snippet");
}

static int plugin(char **argv)
{
	return open_snippet("libsnippet.so", RTLD_LOCAL)("plugin", argv[0], argv[1]);
}

/* How often cublasLtMatmul was reached behind cublasGemmEx (the emulation counts). */
static int inner(char **argv)
{
	(void)argv;
	int failed = open_snippet("libsnippet.so", RTLD_LOCAL)("outer", "cublasGemmEx", "product");
	long (*count)(const char *) = (long (*)(const char *))find(
	        open_library("libcublasLt.so.13", RTLD_LOCAL), "softcuda_cublaslt_calls");
	printf("inner calls %ld\n", count("cublasLtMatmul"));
	return failed;
}

static int copies_linked(char **argv)
{
	snippet_function *new = open_snippet("libsnippet.so", RTLD_LOCAL);
	snippet_function *old = open_snippet("libsnippet12.so", RTLD_LOCAL);
	return new ("13", argv[0], argv[1]) || old("12", argv[0], argv[1]) ||
	       new ("13", argv[0], argv[1]);
}

static int copies_dlsym(char **argv)
{
	static const char *const versions[] = {"12", "13", "12"};
	snippet_look_up = look_up;
	for (int i = 0; i < 3; i++) {
		open_copy(versions[i]);
		if (snippet(versions[i], argv[0], argv[1]))
			return 2;
	}
	return 0;
}

/* Opens a copy of a library's file, which the dynamic linker takes for another library. */
static void open_file_copy(const char *file)
{
	char path[] = "/tmp/qshim-copy-XXXXXX";
	int from = open(file, O_RDONLY), to = mkstemp(path);
	struct stat status;
	if (from < 0 || to < 0 || fstat(from, &status) ||
	    sendfile(to, from, NULL, (size_t)status.st_size) != status.st_size)
		abort();
	close(from);
	close(to);
	void *copy = open_library(path, RTLD_LOCAL);
	unlink(path);
	if (!dlsym(copy, "cublasGemmEx"))
		abort();
}

/* The plug-in's copy comes after more others than anybody loads. */
static int copies_many(char **argv)
{
	char path[PATH_MAX];
	if (dlinfo(open_library("libcublasLt.so.13", RTLD_LOCAL), RTLD_DI_ORIGIN, path))
		abort();
	strcat(path, "/libcublas.so.13");      /* beside it */
	if (strcmp(argv[0], "cublasLtMatmul")) /* known, and called by the copy that is not */
		find(open_library("libcublasLt.so.12", RTLD_LOCAL), "cublasLtMatmul");
	for (int i = 0; i < 20; i++)
		open_file_copy(path);
	/* one of the same soname would be bound to a copy */
	return open_snippet("libsnippet12.so", RTLD_LOCAL)("12", argv[0], argv[1]);
}

/* ---- one call site ---- */

typedef int any_function(void *handle, ...);

/* Every argument is zero: enough of them for any of the functions. */
__attribute__((noinline)) static int call_any(void *function)
{
	int status = ((any_function *)function)(NULL, 0L, 0L, 0L, 0L, 0L, 0L, 0L, 0L, 0L, 0L, 0L,
	                                        0L, 0L, 0L, 0L, 0L, 0L, 0L, 0L, 0L, 0L, 0L, 0L);
	fflush(stdout);
	return status;
}

/* All functions through one pointer and one return address, by the global scope: as a foreign
 * function interface does for `CDLL(None)`. cublasLt first, whose library has no other function. */
static int one_site(char **argv)
{
	(void)argv;
	static const char *const names[] = {"cublasLtMatmul", "cublasGemmEx", "cublasSgemmEx",
	                                    "cublasLtMatmul", "cublasGemmEx_64"};
	open_library("libcublasLt.so.13", RTLD_GLOBAL);
	open_library("libcublas.so.13", RTLD_GLOBAL);
	void *self = dlopen(NULL, RTLD_NOW);
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		printf("%s status %d\n", names[i], call_any(find(self, names[i])));
	return 0;
}

/* ---- what dlsym answers ---- */

static void tell(const char *how, void *handle, const char *name)
{
	dlerror();
	void *found = dlsym(handle, name);
	const char *error = dlerror();
	printf("%s %s: %s, %s\n", how, name, found ? "found" : "NULL",
	       error ? strstr(error, "undefined symbol") ? "undefined symbol" : error : "no error");
}

static void tell_all(const char *name)
{
	tell("default", RTLD_DEFAULT, name);
	tell("next", RTLD_NEXT, name);
	tell("self", dlopen(NULL, RTLD_NOW), name);
	tell("libc", open_library("libc.so.6", RTLD_LOCAL), name);
}

/* In a program without cuBLAS. */
static int features(char **argv)
{
	(void)argv;
	tell_all("cublasGemmEx");
	tell_all("cublasLtMatmul");
	tell_all("cublasNoSuchFunction");
	return 0;
}

/* The same with cuBLAS in the program, but not in its global scope; then there. */
static int features_local(char **argv)
{
	(void)argv;
	void *library = open_library("libcublas.so.13", RTLD_LOCAL);
	tell_all("cublasGemmEx");
	tell("handle", library, "cublasGemmEx");
	tell("handle", library, "cublasNoSuchFunction");
	open_library("libcublas.so.13", RTLD_GLOBAL);
	tell_all("cublasGemmEx");
	return 0;
}

static int ordinary(char **argv)
{
	(void)argv;
	static const char *const names[] = {"getpid", "malloc", "no_such_function", "main", ""};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		tell_all(names[i]);
	pid_t (*get)(void) = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "getppid");
	printf("getppid %s\n", get() == getppid() ? "agrees" : "differs");
	return 0;
}

/* A plug-in's RTLD_DEFAULT is the global scope and then its own. */
static int scope(char **argv)
{
	(void)argv;
	void *library = open_library("libplugin.so", RTLD_LOCAL);
	look_up_function *inside = (look_up_function *)find(library, "plugin_look_up");
	printf("inside %s\n", inside("plugin_inner") ? "found" : "NULL");
	printf("outside %s\n", dlsym(RTLD_DEFAULT, "plugin_inner") ? "found" : "NULL");
	printf("cublas %s\n", inside("cublasGemmEx") ? "found" : "NULL");
	return 0;
}

static int wrapped_count(char **argv)
{
	(void)argv;
	int (*count)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "wrap_dlsym_count");
	if (!count)
		return 5;
	int before = count();
	dlsym(RTLD_DEFAULT, "getpid");
	printf("seen %d\n", count() - before);
	return 0;
}

static const struct {
	const char *name;
	int (*run)(char **argv);
	int arguments;
} frames[] = {
        {"dlsym", by_dlsym, 2},
        {"borrowed", borrowed, 2},
        {"plugin", plugin, 2},
        {"inner", inner, 0},
        {"copies-linked", copies_linked, 2},
        {"copies-dlsym", copies_dlsym, 2},
        {"copies-many", copies_many, 2},
        {"one-site", one_site, 0},
        {"features", features, 0},
        {"features-local", features_local, 0},
        {"ordinary", ordinary, 0},
        {"scope", scope, 0},
        {"wrapped-count", wrapped_count, 0},
};

int main(int argc, char **argv)
{
	for (size_t i = 0; argc > 1 && i < sizeof frames / sizeof *frames; i++)
		if (!strcmp(frames[i].name, argv[1]) && frames[i].arguments == argc - 2)
			return frames[i].run(argv + 2);
	fprintf(stderr, "host: no such frame\n");
	return EXIT_FAILURE;
}
