/* operand/track: which long-lived device memory may have been written.
 *
 * A quantised copy of a weight is good for as long as nobody writes the weight. Whoever keeps one
 * watches its source here; intercept/ reports what every call of the driver may have written, and a
 * watch that was hit is suspect until its content has been verified. So a clean watch means: no
 * submission that was seen carries an address from which it could write there. What is not seen:
 *   - addresses that a kernel reads from device memory (NCCL's kernels are known by name, and make
 *     everything suspect);
 *   - variables of a module (__device__), which its kernels write without an argument;
 *   - another address of the same memory, if it is no second cuMemMap (operand/mapping.h);
 *   - writers that are no submission: network cards and disks, the processor through a mapping of
 *     device memory, another process. Memory that the program shares with another process, by IPC
 *     or by handles, or gets from another API is not watched at all.
 * A kernel that only reads a watched range is told from one that writes by what verifications find:
 * see qs_watch_readers.
 *
 * The protocol of a keeper, in this order: qs_watch_add(); then, and whenever the state is suspect,
 * n = qs_watch_suspects(), submit the work that makes or verifies the copy, qs_watch_clear(n), and
 * when its outcome is known qs_watch_readers(). A watch is of no use while qs_epoch_trusted() is
 * false: then not all submissions are seen.
 *
 * Reports come from any thread and take no lock. Functions of one watch may be called by several
 * threads; qs_watch_add and qs_watch_remove take a lock.
 */
#ifndef QS_OPERAND_TRACK_H
#define QS_OPERAND_TRACK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QS_WATCHES_MAX 4096

/* A range of device memory watched for writes. */
struct qs_watch;

enum {
	QS_WATCH_CLEAN,   /* not written since the content that qs_watch_clear() was told of  */
	QS_WATCH_SUSPECT, /* may have been written: verify before use                         */
	QS_WATCH_GONE,    /* freed or unmapped: never touch it, whatever is at the address now */
};

/* Watches the bytes [first, end), suspect at first. NULL if there are QS_WATCHES_MAX already, if
 * the range is empty, or if it may be written by another process or API. */
struct qs_watch *qs_watch_add(const void *first, const void *end);
/* The same where the memory that contains the range starts at `region`: a kernel with an address in
 * [region, end) is taken to write the range. */
struct qs_watch *qs_watch_add_in(const void *first, const void *end, const void *region);
/* NULL is nothing to remove. */
void qs_watch_remove(struct qs_watch *watch);
int qs_watch_state(const struct qs_watch *watch);
/* How often it was made suspect. */
uint32_t qs_watch_suspects(const struct qs_watch *watch);
/* The caller has arranged a verification after it read this count of suspects; no effect if the
 * watch was made suspect since. */
void qs_watch_clear(struct qs_watch *watch, uint32_t suspects);
/* The outcome of the verification arranged last; also of one of a clean watch (an audit). A use (a
 * kernel function with this address at this place of its arguments) that made the watch suspect
 * before each of 8 verifications in a row, all of which found it unchanged, counts as a reader and
 * no longer makes it suspect. What this takes for a reader and is none: a kernel that so often
 * wrote what was there already, as an optimiser does whose rate is 0. A change found while only
 * readers had run makes those of them that ran writers for good; true if that was so. */
bool qs_watch_readers(struct qs_watch *watch, bool unchanged);
/* True if anything is watched. */
bool qs_watch_any(void);
/* A kernel of ours (CUfunction), which the graphs that it is captured into must not take for one of
 * the program's: it reads what is watched, and writes for the program at most the memory at the
 * address that lies `written` bytes into its arguments (a multiple of 8), -1 = nothing. Forgotten
 * when a context is destroyed, any context, until it is told again; graphs with a kernel of that
 * name are not known meanwhile. Eager launches of ours are no submissions: report what they write
 * by qs_track_write. */
void qs_track_own_function(const void *function, int written);
/* False if it is none of ours. */
bool qs_track_is_own(const void *function, int *written);
/* In a forked child: drop every watch, make the lock usable. */
void qs_track_forked(void);

/* ---- reports: after the call that submitted the work has returned ---- */

/* [first, first + bytes) is written. */
void qs_track_write(const void *first, size_t bytes);
/* Written from `first` on, nobody knows how far. */
void qs_track_pointer(const void *first);
/* [first, first + bytes) is no longer what it was or cannot be read; 0 = the allocation at first.
 */
void qs_track_gone(const void *first, size_t bytes);
/* The allocation at `first` can be written by others from now on: never watch it; or no more. */
void qs_track_shared(const void *first);
void qs_track_unshared(const void *first);
/* Anything may have been written. */
void qs_track_everything(void);
/* A context is gone and its memory and functions, nobody says which. */
void qs_track_all_gone(void);

/* ---- for intercept/ ---- */

/* 1 while anything is watched; read by driver.S. */
extern _Atomic unsigned char qs_watching __attribute__((visibility("hidden")));

/* Bounds of all watched regions, and changes of what is watched so far. */
struct qs_track_bounds {
	_Atomic uintptr_t low, high;
};
extern struct qs_track_bounds qs_track_bounds __attribute__((visibility("hidden")));
uint64_t qs_track_version(void);

/* False for most words that are no address of interest. */
static inline bool qs_track_near(uint64_t word)
{
	return word >= atomic_load_explicit(&qs_track_bounds.low, memory_order_relaxed) &&
	       word < atomic_load_explicit(&qs_track_bounds.high, memory_order_relaxed);
}

/* True if a kernel with this argument is taken to write anything watched. */
bool qs_track_reaches(uint64_t word);
/* True if anything watched overlaps the bytes; 0 bytes: as qs_track_gone. */
bool qs_track_overlaps(uint64_t first, size_t bytes);
/* A kernel with this argument was submitted. `use` names the function, the place of the argument,
 * and the address; 0 if nothing is to be learnt from it. */
void qs_track_argument(uint64_t word, uint64_t use);

#endif
