/* A library that makes its call before main(), and before the constructors of what is preloaded. */
#include <stdio.h>
#include <stdlib.h>

#include "tests/intercept/snippet.h"

__attribute__((constructor)) static void construct(void)
{
	const char *api = getenv("SNIPPET_API"), *mode = getenv("SNIPPET_MODE");
	if (api && mode && snippet("constructor", api, mode))
		exit(2);
	fflush(stdout);
}
