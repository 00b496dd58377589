/* One call of each hooked function, to be compiled into the frames a program may have: linked to
 * cuBLAS (in the executable, in a library, in a plug-in) or, with BY_DLSYM, finding it by name. */
#ifndef QS_TESTS_INTERCEPT_SNIPPET_H
#define QS_TESTS_INTERCEPT_SNIPPET_H

#define SNIPPET_EXPORT __attribute__((visibility("default")))

/* Makes the call named by `api` and prints "LABEL API status S sum X", X being a hash of the
 * output. `mode` is "product" (a small product on a fresh handle) or "null" (a NULL handle and
 * nothing else, which needs no GPU even with the real library). Nonzero if there is no such call.
 */
typedef int snippet_function(const char *label, const char *api, const char *mode);
SNIPPET_EXPORT int snippet(const char *label, const char *api, const char *mode);

/* Where BY_DLSYM finds functions. */
typedef void *look_up_function(const char *name);
SNIPPET_EXPORT extern look_up_function *snippet_look_up;

#endif
