/* Where the real functions are.
 *
 * A process may hold several copies of cuBLAS (a wheel's, the system's, CUDA 12's and 13's); a
 * handle of one must never reach another. So each call site is bound once, to what its own object
 * means: another interposer that comes after us, else the copy in the caller's own scope (the only
 * answer that is right under RTLD_LOCAL and with two copies), else RTLD_NEXT (right for the main
 * executable), else a walk over the loaded objects (dlopen without a handle we could know of).
 * Copies are referenced for ever, so cached pointers stay valid.
 *
 * Left out: static cuBLAS and RTLD_DEEPBIND never reach a preloaded library; an object that is
 * unloaded and replaced at the same address by one that uses another copy keeps the first binding.
 */
#define _GNU_SOURCE
#include "intercept/intercept.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "note/note.h"

#define LIBRARY_MAX 16
#define SITE_MAX    1024 /* power of two */
#define SITE_PROBES 8
#define WALK_MAX    8
#define PATH_BYTES  1024

/* A call site and the copy it means; written once, name last. */
struct site {
	_Atomic(uintptr_t) name;                    /* site_name(), 0 = free */
	_Atomic(const struct qs_library *) library; /* never NULL once named */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct site sites[SITE_MAX];
static struct qs_library *_Atomic libraries[LIBRARY_MAX];
static const struct qs_library *_Atomic bound[QS_BOUND_MAX];

static const char *const entry_names[QS_ENTRY_COUNT] = {
#define QS_NAME(entry, function, params, args) [QS_ENTRY_##entry] = #function,
        QS_ENTRIES(QS_NAME)
#undef QS_NAME
};

/* ---- dlsym ---- */

typedef void *dlsym_function(void *, const char *);

/* Where the exported dlsym goes on: the next in preload order, which may be another interposer's.
 * Read by dlsym.S, so set before qs_dlsym_filter() returns NULL. */
__attribute__((visibility("hidden"))) dlsym_function *qs_dlsym_next;
/* libc's own, for our look-ups: RTLD_NEXT must mean our place in the order. */
static dlsym_function *libc_dlsym;
void *qs_dlsym_filter(void *handle, const char *name, const void *caller);

static void *no_dlsym(void *handle, const char *name)
{
	(void)handle;
	(void)name;
	return NULL;
}

/* dlsym moved to libc.so.6 with a new version in glibc 2.34; newest first. */
static dlsym_function *find_dlsym(void)
{
	static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
	for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
		void *next = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
		if (next)
			return (dlsym_function *)next;
	}
	return no_dlsym;
}

static dlsym_function *next_dlsym(void)
{
	dlsym_function *next = __atomic_load_n(&qs_dlsym_next, __ATOMIC_ACQUIRE);
	if (!next) {
		dlsym_function *libc = find_dlsym();
		next = (dlsym_function *)libc(RTLD_NEXT, "dlsym");
		__atomic_store_n(&libc_dlsym, libc, __ATOMIC_RELAXED);
		next = next ? next : libc;
		__atomic_store_n(&qs_dlsym_next, next, __ATOMIC_RELEASE);
	}
	return next;
}

void *qs_real_dlsym(void *handle, const char *name)
{
	next_dlsym();
	return __atomic_load_n(&libc_dlsym, __ATOMIC_RELAXED)(handle, name);
}

/* The hooked entry point of this name, or -1. */
static int entry_of(const char *name)
{
	if (!name || strncmp(name, "cublas", 6))
		return -1;
	for (int entry = 0; entry < QS_ENTRY_COUNT; entry++)
		if (!strcmp(name, entry_names[entry]))
			return entry;
	return -1;
}

/* True for the driver functions that are counted. The first test is made here, as a sanitizer's
 * runtime looks names up before the rest of this library can run. */
static bool is_submission(const char *name)
{
	return name && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z' &&
	       qs_submission_name(name);
}

/* The slot of a library's bound wrappers, or -1 when there are no more. */
static int bind_slot(const struct qs_library *library)
{
	int slot = -1;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < QS_BOUND_MAX; i++) {
		const struct qs_library *taken = atomic_load(&bound[i]);
		if (!taken)
			atomic_store(&bound[i], library);
		if (!taken || taken == library) {
			slot = i;
			break;
		}
	}
	pthread_mutex_unlock(&lock);
	return slot;
}

const struct qs_library *qs_bound_library(int slot)
{
	return atomic_load_explicit(&bound[slot], memory_order_acquire);
}

/* ---- libraries ---- */

static void fill_library(struct qs_library *library)
{
	for (int entry = 0; entry < QS_ENTRY_COUNT; entry++) {
		void *original = qs_real_dlsym(library->handle, entry_names[entry]);
		library->original[entry] = qs_is_own(original) ? NULL : original;
	}
#define QS_FIND(function)                                                                          \
	library->function =                                                                        \
	        (__typeof__(library->function))qs_real_dlsym(library->handle, #function);
	QS_LIBRARY_API(QS_FIND)
#undef QS_FIND
	/* Ours would be found only if the library were looked up through the global scope. */
	library->cublasLtMatmul =
	        (__typeof__(library->cublasLtMatmul))library->original[QS_ENTRY_LT_MATMUL];
	library->complete =
	        library->cublasLtGetVersion && library->cublasLtMatmul &&
	        library->cublasLtMatmulDescCreate && library->cublasLtMatmulDescDestroy &&
	        library->cublasLtMatmulDescSetAttribute &&
	        library->cublasLtMatmulDescGetAttribute && library->cublasLtMatrixLayoutCreate &&
	        library->cublasLtMatrixLayoutDestroy && library->cublasLtMatrixLayoutGetAttribute &&
	        library->cublasLtMatmulPreferenceCreate &&
	        library->cublasLtMatmulPreferenceDestroy &&
	        library->cublasLtMatmulPreferenceSetAttribute &&
	        library->cublasLtMatmulAlgoGetHeuristic;
	library->version = library->cublasLtGetVersion ? library->cublasLtGetVersion() : 0;
}

/* The object that holds this function, as a handle; NULL for the main executable and for objects in
 * another link-map namespace. *path is owned by the dynamic loader. */
static void *object_of(const void *function, const char **path)
{
	Dl_info info;
	struct link_map *map = NULL;
	if (!dladdr1(function, &info, (void **)&map, RTLD_DL_LINKMAP) || !map || !*map->l_name)
		return NULL;
	*path = map->l_name;
	void *handle = dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD);
	if (!handle || handle == (void *)map)
		return handle;
	dlclose(handle); /* the same file in our namespace is another copy */
	return NULL;
}

static struct qs_library *find_library(const void *original, enum qs_entry entry)
{
	for (int i = 0; i < LIBRARY_MAX; i++) {
		struct qs_library *library = atomic_load(&libraries[i]);
		if (!library)
			return NULL;
		if (library->original[entry] == original)
			return library;
	}
	return NULL;
}

static struct qs_library *new_library(enum qs_entry entry, void *original)
{
	const char *path = "";
	struct qs_library *library = calloc(1, sizeof *library);
	if (!library)
		return NULL;
	library->handle = object_of(original, &path);
	library->path = strdup(path);
	if (library->handle)
		fill_library(library);
	library->original[entry] = original;
	return library;
}

static void discard_library(struct qs_library *library)
{
	if (library->handle)
		dlclose(library->handle);
	free(library->path);
	free(library);
}

/* Puts the library into the table, unless another thread did; NULL if the table is full. */
static struct qs_library *publish(struct qs_library *library, enum qs_entry entry)
{
	pthread_mutex_lock(&lock);
	struct qs_library *published = find_library(library->original[entry], entry);
	for (int i = 0; !published && i < LIBRARY_MAX; i++) {
		if (atomic_load(&libraries[i]))
			continue;
		library->index = i;
		atomic_store(&libraries[i], library);
		published = library;
	}
	pthread_mutex_unlock(&lock);
	if (published != library)
		discard_library(library);
	return published;
}

/* The dynamic loader is asked without our lock held: a constructor that gets here holds the
 * loader's lock first. */
const struct qs_library *qs_library_of(enum qs_entry entry, void *original)
{
	struct qs_library *library = find_library(original, entry);
	if (library)
		return library;
	library = new_library(entry, original);
	return library ? publish(library, entry) : NULL;
}

/* ---- originals ---- */

static void *not_own(void *function)
{
	return function && !qs_is_own(function) ? function : NULL;
}

/* True if the function belongs to a copy of cuBLAS or cuBLASLt, judged by the file's name. */
static bool in_cublas(const void *function)
{
	Dl_info info;
	if (!dladdr(function, &info) || !info.dli_fname)
		return false;
	const char *slash = strrchr(info.dli_fname, '/');
	return !strncmp(slash ? slash + 1 : info.dli_fname, "libcublas", 9);
}

static bool in_same_object(const void *function, const void *address)
{
	Dl_info a, b;
	return dladdr(function, &a) && dladdr(address, &b) && a.dli_fbase == b.dli_fbase;
}

void *qs_in_scope(const void *address, const char *name)
{
	const char *path;
	void *handle = object_of(address, &path);
	if (!handle)
		return NULL;
	void *found = not_own(qs_real_dlsym(handle, name));
	dlclose(handle);
	return found;
}

/* An object that defines the function and yet calls ours wraps it and got ours from RTLD_NEXT:
 * going back to its definition would never end. */
static void *in_caller_scope(const void *address, const char *name)
{
	void *found = qs_in_scope(address, name);
	return found && !in_cublas(found) && in_same_object(found, address) ? NULL : found;
}

struct walk {
	const char *prefix;              /* file name looked for, without version */
	size_t count;                    /* paths found                           */
	char path[WALK_MAX][PATH_BYTES]; /* of loaded objects with that name      */
};

static int visit(struct dl_phdr_info *info, size_t size, void *data)
{
	(void)size;
	struct walk *walk = data;
	const char *slash = strrchr(info->dlpi_name, '/');
	const char *file = slash ? slash + 1 : info->dlpi_name;
	if (strncmp(file, walk->prefix, strlen(walk->prefix)))
		return 0;
	if (walk->count < WALK_MAX && strlen(info->dlpi_name) < PATH_BYTES)
		strcpy(walk->path[walk->count++], info->dlpi_name);
	return 0;
}

/* In any loaded object named like the library: the last resort, ambiguous with two copies. The
 * names are collected first because dlopen must not be called from the iteration. */
static void *in_link_map(enum qs_entry entry)
{
	bool lt = entry == QS_ENTRY_LT_MATMUL;
	struct walk *walk = calloc(1, sizeof *walk);
	void *found = NULL;
	if (!walk)
		return NULL;
	walk->prefix = lt ? "libcublasLt.so" : "libcublas.so";
	dl_iterate_phdr(visit, walk);
	if (walk->count > 1)
		qs_message(QS_LOG_INFO,
		           "%zu copies of %s are loaded and the caller of %s names none; using %s",
		           walk->count, walk->prefix, entry_names[entry], walk->path[0]);
	for (size_t i = 0; i < walk->count && !found; i++) {
		void *handle = dlopen(walk->path[i], RTLD_LAZY | RTLD_NOLOAD);
		if (!handle)
			continue;
		found = not_own(qs_real_dlsym(handle, entry_names[entry]));
		dlclose(handle);
	}
	free(walk);
	return found;
}

/* Another interposer that comes after us in the global scope, else the copy of cuBLAS in the
 * caller's own scope. */
void *qs_caller_original(enum qs_entry entry, const void *address)
{
	const char *name = entry_names[entry];
	void *next = not_own(qs_real_dlsym(RTLD_NEXT, name));
	if (next && in_same_object(next, address))
		next = NULL; /* the interposer itself calls */
	if (next && !in_cublas(next))
		return next;
	void *original = in_caller_scope(address, name);
	if (!original)
		original = next;
	return original ? original : in_link_map(entry);
}

/* One call site may call several functions through a pointer (ctypes does), so the entry point is
 * part of its name, in bits that no address in user space has. */
static uintptr_t site_name(enum qs_entry entry, const void *address)
{
	return (uintptr_t)address | (uintptr_t)entry << 58;
}

static struct site *site_at(uintptr_t name, size_t probe)
{
	size_t hash = (size_t)((name * 0x9e3779b97f4a7c15u) >> 40);
	return &sites[(hash + probe) % SITE_MAX];
}

static void remember_site(uintptr_t name, const struct qs_library *library)
{
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < SITE_PROBES; i++) {
		struct site *site = site_at(name, i);
		uintptr_t taken = atomic_load(&site->name);
		if (taken == name)
			break;
		if (taken)
			continue;
		atomic_store(&site->library, library);
		atomic_store_explicit(&site->name, name, memory_order_release);
		break;
	}
	pthread_mutex_unlock(&lock);
}

static const struct qs_library *find_caller_library(enum qs_entry entry, const void *address)
{
	void *original = qs_caller_original(entry, address);
	if (!original)
		return NULL;
	const struct qs_library *library = qs_library_of(entry, original);
	if (library)
		remember_site(site_name(entry, address), library);
	return library;
}

const struct qs_library *qs_caller_library(enum qs_entry entry, const void *address)
{
	uintptr_t wanted = site_name(entry, address);
	for (size_t i = 0; i < SITE_PROBES; i++) {
		struct site *site = site_at(wanted, i);
		uintptr_t taken = atomic_load_explicit(&site->name, memory_order_acquire);
		if (taken == wanted)
			return atomic_load_explicit(&site->library, memory_order_relaxed);
		if (!taken)
			break;
	}
	return find_caller_library(entry, address);
}

/* RTLD_DEFAULT, RTLD_NEXT and the handle of dlopen(NULL) may find our export where without us there
 * is nothing, which would make feature tests lie: then the answer is the NULL (and dlerror) that
 * the program would have got. */
static void *filter_global(void *handle, const char *name, const void *caller)
{
	bool next = handle == RTLD_NEXT; /* the caller's own does not count */
	if (not_own(qs_real_dlsym(RTLD_DEFAULT, name)) || qs_real_dlsym(RTLD_NEXT, name) ||
	    (next ? in_caller_scope(caller, name) : qs_in_scope(caller, name)))
		return NULL;
	qs_real_dlsym(RTLD_NEXT, name); /* sets dlerror() again */
	return (void *)-1;
}

/* RTLD_NEXT from a library after us finds the driver's function past us. Wrappers look so for what
 * they wrap, and are reached through us; others are not. The main program comes before us. */
static void note_next(const char *name, const void *caller)
{
	const char *path;
	void *object = object_of(caller, &path);
	if (!object)
		return;
	void *found = qs_real_dlsym(object, name);
	if (!found || !in_same_object(found, caller))
		qs_submission_escaped(name);
	dlclose(object);
}

static void *filter_special(void *handle, const char *name, const void *caller)
{
	void *answer = filter_global(handle, name, caller);
	if (handle == RTLD_NEXT && !answer && is_submission(name))
		note_next(name, caller);
	return answer;
}

static void *wrapper_of(const char *name, void *real, const void *caller)
{
	int entry = entry_of(name);
	if (entry < 0)
		return qs_submission_wrapper(name, real, caller);
	const struct qs_library *library = qs_library_of((enum qs_entry)entry, real);
	int slot = library ? bind_slot(library) : -1;
	return slot < 0 ? real : qs_bound_wrapper((enum qs_entry)entry, slot);
}

void *qs_dlsym_filter(void *handle, const char *name, const void *caller)
{
	dlsym_function *next = next_dlsym();
	if (entry_of(name) < 0 && !is_submission(name))
		return NULL;
	if (handle == RTLD_DEFAULT || handle == RTLD_NEXT)
		return filter_special(handle, name, caller);
	void *real = next(handle, name);
	if (!real)
		return NULL;
	if (qs_is_own(real)) /* dlopen(NULL), whose scope is the global one */
		return filter_global(handle, name, NULL);
	return wrapper_of(name, real, caller);
}

void qs_loader_forked(void)
{
	pthread_mutex_init(&lock, NULL);
}
