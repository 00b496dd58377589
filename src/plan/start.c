/* The first product of a process: read the policy, start the notes, arrange for exit and fork.
 * There is no constructor, so a process that makes no product does none of this and opens no file.
 */
#define _GNU_SOURCE
#include "plan/plan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/known.h"
#include "intercept/intercept.h"
#include "operand/cache.h"
#include "operand/operand.h"
#include "operand/track.h"
#include "plan/label.h"

enum {
	COLD,
	STARTING,
	READY,
	OFF
};

static _Atomic int state = COLD;
static struct qs_process process;
static pid_t pid;           /* of the process that started                */
static _Atomic bool forked; /* this is a child of a process that started  */
static bool handlers;       /* atexit and pthread_atfork are registered   */

/* Runs at exit() of the process that registered it: writes, touches no CUDA, frees nothing. */
static void at_exit(void)
{
	if (atomic_load(&state) != READY || getpid() != pid)
		return;
	qs_note_ending();
	qs_policy_report_unused(atomic_load(&process.policy));
	qs_message(QS_LOG_INFO, "operands: %" PRIu64 " quantised, %" PRIu64 " used again",
	           qs_operands_made(), qs_operands_reused());
	qs_epoch_report();
	qs_plans_report();
	qs_live_report();
	qs_note_memory(qs_device_bytes());
	qs_accuracy_report();
	qs_note_shadow_report();
	qs_note_summary();
}

/* Locks may be held by threads that do not exist in the child, files and maps are the parent's, and
 * the driver does not survive: forget all of it. The child starts again at its first product. */
static void in_child(void)
{
	qs_end();
	qs_loader_forked();
	qs_driver_forked();
	qs_dispatch_forked();
	qs_uses_forked();
	qs_before_forked();
	qs_plan_table_forked();
	qs_label_forked();
	qs_layer_forked();
	qs_roles_forked();
	qs_ordinals_forked();
	qs_weights_forked();
	qs_live_forked();
	qs_share_forked();
	qs_worth_forked();
	qs_known_forked();
	qs_context_forked();
	qs_accuracy_forked();
	qs_kept_forked();
	qs_track_forked();
	qs_note_forked();
	atomic_store(&forked, true);
	atomic_store(&state, COLD);
}

static int start(void)
{
	struct qs_policy *policy = qs_policy_load(secure_getenv);
	process.options = qs_policy_options(policy);
	qs_process_use(policy);
	if (process.options->mode == QS_MODE_OFF ||
	    !qs_policy_process_allowed(policy, program_invocation_short_name) ||
	    !qs_plan_table_init(process.options->max_keys))
		return OFF;
	qs_note_start(process.options);
	qs_live_start();
	pid = getpid();
	if (!handlers) {
		handlers = true;
		qs_policy_warn_unknown(environ);
		atexit(at_exit);
		pthread_atfork(NULL, NULL, in_child);
	}
	return READY;
}

bool qs_start(void)
{
	int now = atomic_load_explicit(&state, memory_order_acquire);
	if (now == COLD) {
		int cold = COLD;
		if (!atomic_compare_exchange_strong(&state, &cold, STARTING))
			return false;
		int saved = errno;
		now = start();
		errno = saved;
		atomic_store_explicit(&state, now, memory_order_release);
	}
	return now == READY;
}

const struct qs_process *qs_process(void)
{
	return &process;
}

void qs_process_use(struct qs_policy *policy)
{
	atomic_store_explicit(&process.policy, policy, memory_order_release);
}

bool qs_process_forked(void)
{
	return atomic_load_explicit(&forked, memory_order_relaxed);
}
