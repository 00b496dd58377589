/* The re-entry guard: libcublas imports cublasLtMatmul, and our own products are cuBLASLt calls, so
 * inner calls do arrive at the hooks. Only the outermost hooked call of a thread is looked at.
 *
 * A call need not return: a C++ exception or longjmp() may pass through it, of a library between us
 * and cuBLAS or of a signal handler. An inner call's frame lies below that of the outer one, so
 * when a call comes whose frame does not, the outer one is gone. That is found out no sooner: what
 * this thread submitted in between counted as cuBLAS's work, and a call from deeper than the one
 * that is gone is still taken for an inner one. One that was left within our own code may have left
 * our locks taken: such a thread passes everything from then on, and others do not wait for them
 * for long (qs_lock_in_time()).
 */
#include "intercept/intercept.h"

#include "operand/track.h"
#include "plan/share.h"

/* 1 inside a hooked call of this thread. Read by driver.S, which counts by it. */
__thread unsigned char qs_depth;

__thread struct qs_guard qs_guard;

/* Whatever it had submitted is not known. */
static void get_over(void)
{
	qs_epoch_bump();
	if (qs_watch_any())
		qs_track_everything();
	qs_share_end(false);
}

bool qs_begin(void)
{
	const void *frame = __builtin_frame_address(0);
	if (qs_depth) {
		if (!qs_guard.original || frame < qs_guard.frame)
			return false;
		get_over();
	}
	qs_depth = 1;
	qs_guard = (struct qs_guard){.frame = frame};
	return true;
}

void qs_end(void)
{
	qs_depth = 0;
}
