/* The test library's exports, see epoch_open.c. Programs look them up: the library is preloaded. */
#ifndef QS_TESTS_INTERCEPT_EPOCH_OPEN_H
#define QS_TESTS_INTERCEPT_EPOCH_OPEN_H

#include <stdint.h>

#define OPEN_EXPORT __attribute__((visibility("default")))

OPEN_EXPORT uint64_t qs_test_epoch(void);     /* qs_epoch_now()     */
OPEN_EXPORT const char *qs_test_doubt(void);  /* qs_epoch_doubt()   */
OPEN_EXPORT int qs_test_trusted(void);        /* qs_epoch_trusted() */
OPEN_EXPORT int qs_test_begin(void);          /* qs_begin()         */
OPEN_EXPORT void qs_test_end(void);           /* qs_end()           */
OPEN_EXPORT int qs_test_driver_is_real(void); /* our calls to the driver meet no thunk */

#endif
