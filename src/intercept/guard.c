/* The re-entry guard: libcublas imports cublasLtMatmul, and our own products are cuBLASLt calls, so
 * inner calls do arrive at the hooks. Only the outermost hooked call of a thread is looked at. */
#include "intercept/intercept.h"

/* 1 inside a hooked call of this thread. Read by driver.S, which counts by it. */
__thread unsigned char qs_depth;

bool qs_begin(void)
{
	if (qs_depth)
		return false;
	qs_depth = 1;
	return true;
}

void qs_end(void)
{
	qs_depth = 0;
}
