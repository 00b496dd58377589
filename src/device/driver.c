/* The CUDA driver by pointer: the copy that the program has loaded, never one of our own choosing.
 * Looked up once, when the first eligible product arrives; a process without a driver has none. */
#define _GNU_SOURCE
#include "device/device.h"

#include <dlfcn.h>

#include "intercept/intercept.h"
#include "note/note.h"

static struct qs_driver driver;
static _Atomic int state; /* 0 = not looked, 1 = usable, -1 = not usable */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Fills the table; the name of what is missing, or NULL. */
static const char *fill(struct qs_driver *to, void *library)
{
#define QS_FIND(function)                                                                          \
	to->function = (__typeof__(to->function))qs_real_dlsym(library, #function);
	QS_DRIVER_OPTIONAL(QS_FIND)
	QS_DRIVER_API(QS_FIND)
#undef QS_FIND
	to->cuStreamGetCaptureInfo_v2 =
	        (qs_capture_info_function *)qs_real_dlsym(library, "cuStreamGetCaptureInfo_v2");
	to->cuEventElapsedTime =
	        (__typeof__(to->cuEventElapsedTime))qs_real_dlsym(library, "cuEventElapsedTime");
#define QS_CHECK(function)                                                                         \
	if (!to->function)                                                                         \
		return #function;
	QS_DRIVER_API(QS_CHECK)
#undef QS_CHECK
	if (!to->cuEventElapsedTime)
		return "cuEventElapsedTime";
	return to->cuStreamGetCaptureInfo_v2 ? NULL : "cuStreamGetCaptureInfo_v2";
}

/* Asks the dynamic loader without our lock held, like loader.c, then publishes. */
static int look(void)
{
	struct qs_driver found = {0};
	void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	if (!library)
		return 0; /* may be loaded later */
	const char *missing = fill(&found, library);
	pthread_mutex_lock(&lock);
	int known = atomic_load(&state);
	if (!known) {
		driver = found;
		known = missing ? -1 : 1;
		atomic_store_explicit(&state, known, memory_order_release);
	} else {
		missing = NULL; /* told by the thread that was first */
	}
	pthread_mutex_unlock(&lock);
	if (missing)
		qs_message(QS_LOG_ERROR, "the CUDA driver has no %s; products pass through",
		           missing);
	return known;
}

const struct qs_driver *qs_driver_get(void)
{
	int known = atomic_load_explicit(&state, memory_order_acquire);
	if (!known)
		known = look();
	return known > 0 ? &driver : NULL;
}

void qs_driver_forked(void)
{
	pthread_mutex_init(&lock, NULL);
}

const char *qs_error_name(CUresult error)
{
	const char *name = NULL;
	if (!qs_driver_get() || driver.cuGetErrorName(error, &name) || !name)
		return "unknown CUDA error";
	return name;
}
