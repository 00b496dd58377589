/* The smallest program: one snippet. Built three times: with the snippet inside and linked to
 * cuBLAS, linked to a library that is linked to cuBLAS, and linked to one whose constructor made
 * the call. */
#include <stdlib.h>

#include "tests/intercept/snippet.h"

int main(int argc, char **argv)
{
	return argc == 3 ? snippet("main", argv[1], argv[2]) : EXIT_FAILURE;
}
