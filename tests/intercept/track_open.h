/* The watches of libqshim_open.so, see epoch_open.h and src/operand/track.h. */
#ifndef QS_TESTS_INTERCEPT_TRACK_OPEN_H
#define QS_TESTS_INTERCEPT_TRACK_OPEN_H

#include <stddef.h>
#include <stdint.h>

#include "tests/intercept/epoch_open.h"

struct qs_watch;

OPEN_EXPORT struct qs_watch *qs_test_watch(uintptr_t first, size_t bytes);
OPEN_EXPORT struct qs_watch *qs_test_watch_in(uintptr_t first, size_t bytes, uintptr_t region);
OPEN_EXPORT void qs_test_unwatch(struct qs_watch *watch);
OPEN_EXPORT int qs_test_state(const struct qs_watch *watch);
OPEN_EXPORT void qs_test_clear(struct qs_watch *watch);
OPEN_EXPORT void qs_test_outcome(struct qs_watch *watch, int unchanged);
OPEN_EXPORT void qs_test_own(const void *function, int written);

#endif
