/* The one export of libepoch.so. */
#ifndef QS_TESTS_INTERCEPT_EPOCH_CALLS_H
#define QS_TESTS_INTERCEPT_EPOCH_CALLS_H

/* Runs a mode of epoch_calls.c; returns an exit status. */
__attribute__((visibility("default"))) int epoch_main(const char *mode);

#endif
