/* The re-entry guard: libcublas imports cublasLtMatmul, and our own products are cuBLASLt calls, so
 * inner calls do arrive at the hooks. Only the outermost hooked call of a thread is looked at. */
#include "intercept/intercept.h"

static __thread unsigned char depth; /* 1 inside a hooked call of this thread */

bool qs_begin(void)
{
	if (depth)
		return false;
	depth = 1;
	return true;
}

void qs_end(void)
{
	depth = 0;
}
