/* What every Check program of this project shares: main() for one suite. */
#ifndef QS_TESTS_SUITE_H
#define QS_TESTS_SUITE_H

#include <check.h>
#include <stdlib.h>

/* Runs the suite; CK_FORK and CK_VERBOSITY work as Check documents. Returns main's value. */
static inline int qs_suite_main(Suite *suite)
{
	SRunner *runner = srunner_create(suite);
	srunner_run_all(runner, CK_ENV);
	int failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

#endif
