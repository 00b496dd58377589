/* A plug-in to be opened RTLD_LOCAL, and what it needs (built with INNER): a function that is
 * visible in the plug-in's own scope only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

#ifdef INNER
__attribute__((visibility("default"))) int plugin_inner(void);
int plugin_inner(void)
{
	return 42;
}
#else
int plugin_inner(void);
__attribute__((visibility("default"))) void *plugin_look_up(const char *name);
/* A call after it, so that the compiler cannot make dlsym's caller the caller of this function. */
void *plugin_look_up(const char *name)
{
	void *found = dlsym(RTLD_DEFAULT, name);
	return plugin_inner() == 42 ? found : NULL;
}
#endif
