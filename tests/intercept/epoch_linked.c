/* A program whose driver is in the global scope, by way of a library it is linked to. */
#include <stdlib.h>

#include "tests/intercept/epoch_calls.h"

int main(int argc, char **argv)
{
	return argc == 2 ? epoch_main(argv[1]) : EXIT_FAILURE;
}
