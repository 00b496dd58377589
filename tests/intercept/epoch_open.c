/* What a test asks of the library from inside the process: linked into a second library of the same
 * objects, libqshim_open.so, so that libqshim.so itself exports nothing for tests. */
#include "tests/intercept/epoch_open.h"

#include "device/device.h"
#include "intercept/intercept.h"

uint64_t qs_test_epoch(void)
{
	return qs_epoch_now();
}

const char *qs_test_doubt(void)
{
	return qs_epoch_doubt();
}

int qs_test_trusted(void)
{
	return qs_epoch_trusted();
}

int qs_test_begin(void)
{
	return qs_begin();
}

void qs_test_end(void)
{
	qs_end();
}

int qs_test_driver_is_real(void)
{
	const struct qs_driver *driver = qs_driver_get();
	return driver && !qs_is_own((void *)driver->cuLaunchKernel) &&
	       !qs_is_own((void *)driver->cuMemFree_v2);
}
