/* The submission epoch: a count that changes whenever the program may have changed device memory.
 *
 * A quantised copy is exact as long as no GPU work but our own was submitted since it was made. So
 * every driver function that submits work or changes what an address holds (submissions.h) is
 * reached through a thunk that counts (driver.S). They are found in three ways, and met in each:
 *   - libcudart, shared or static, asks dlsym for cuGetProcAddress: it gets one of ours, which
 *     answers as the driver does, with thunks for the functions of interest;
 *   - dlsym(handle, "cuLaunchKernel") gets a thunk as well;
 *   - programs linked to libcuda.so.1 find our exports before the driver's.
 * A thunk handed out belongs to an address, not to a name: the forms of a function (versions,
 * legacy and per-thread default stream) are told apart by what the driver answered. We ourselves
 * call the driver through pointers that were never thunks.
 *
 * What such a call wrote is told to operand/track.h while anything is watched there: the thunk then
 * keeps the arguments, which are read by what the function's name says of them (written.c).
 *
 * Not seen, and so never to be taken for unchanged by this count alone:
 *   - callers whose look-ups do not reach us: libraries opened with RTLD_DEEPBIND, with dlmopen, or
 *     before we were loaded; functions in the tables of cuGetExportTable. qs_epoch_doubt() finds
 *     some of these, no check finds all;
 *   - writers that submit nothing: the processor, to managed or mapped host memory; another
 * process, device or network card, until the program waits for it by a function of the driver;
 * kernels that run on, or work that was held back, from before the copy was made. Whoever keeps
 * copies must leave out memory that is not plain device memory.
 */
#define _GNU_SOURCE
#include "intercept/intercept.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include "intercept/driver.h"
#include "intercept/submissions.h"
#include "note/note.h"
#include "operand/track.h"

#define QS_EXPORT __attribute__((visibility("default")))

/* ---- counters and thunks ---- */

/* Which counter a call goes to. The first two are values of the guard's depth, see driver.S. */
enum {
	OUTSIDE, /* the program's own submissions                       */
	INSIDE,  /* those of cuBLAS inside a hooked call                */
	PASSED,  /* hooked calls that were left to cuBLAS               */
	COUNTS
};

struct count {
	_Alignas(QS_COUNT_BYTES) _Atomic uint64_t value; /* on a cache line of its own */
};

_Static_assert(sizeof(struct count) == QS_COUNT_BYTES, "driver.S counts in this layout");

/* Thunks in the order of driver.S: exported ones and slots of each group. */
#define QS_ONE(name) +1
enum {
	EXPORTED = 0 QS_SUBMISSION_COUNTED(QS_ONE),
	COUNTED = EXPORTED + QS_LOOKUP_SLOTS,
	EXPORTED_KEPT = COUNTED + 0 QS_SUBMISSION_KEPT(QS_ONE),
	THUNKS = EXPORTED_KEPT + QS_KEPT_SLOTS
};
#undef QS_ONE

/* Used by driver.S, which defines the others. */
struct count qs_submissions[COUNTS];
void *qs_thunk_resolve(unsigned index, const void *caller);
void qs_submitting(const struct qs_call *call);
void qs_submitted(const struct qs_call *call);
void qs_submitted_unseen(void);
extern __thread unsigned char qs_depth; /* guard.c */

/* What each thunk calls: exported ones are `lazy` until known, slots 0 until given out. */
extern _Atomic(uintptr_t) qs_thunk_original[THUNKS] __attribute__((visibility("hidden")));
extern const unsigned char qs_thunks[] __attribute__((visibility("hidden")));
extern const unsigned char qs_thunks_end[] __attribute__((visibility("hidden")));

/* Names of the exported thunks, NULL for slots. */
static const char *const exported[THUNKS] = {
#define QS_NAME(name) #name,
        QS_SUBMISSION_COUNTED(QS_NAME) /* and behind the slots */
                [COUNTED] = QS_SUBMISSION_KEPT(QS_NAME)
#undef QS_NAME
};

/* How the calls of each thunk are told; of an exported one from its first call on. */
static _Atomic(const struct qs_effect *) effects[THUNKS];

uint64_t qs_epoch_outside(void)
{
	return atomic_load_explicit(&qs_submissions[OUTSIDE].value, memory_order_acquire);
}

uint64_t qs_epoch_now(void)
{
	return qs_epoch_outside() +
	       atomic_load_explicit(&qs_submissions[PASSED].value, memory_order_acquire);
}

static const struct qs_effect *effect_of_thunk(uint64_t thunk)
{
	const struct qs_effect *effect =
	        atomic_load_explicit(&effects[thunk], memory_order_acquire);
	if (!effect) {
		effect = qs_effect_of(exported[thunk], 0);
		atomic_store_explicit(&effects[thunk], effect, memory_order_release);
	}
	return effect;
}

/* Before the call: its result and the addresses that it answers are not there yet. */
void qs_submitting(const struct qs_call *call)
{
	const struct qs_effect *effect = effect_of_thunk(call->thunk);
	if (effect->flags & QS_EFFECT_GRAPH)
		qs_before_graph(call);
	if (effect->flags & QS_EFFECT_BEFORE)
		effect->tell(call);
}

/* After the call. One that failed submitted nothing, but why is not known. */
void qs_submitted(const struct qs_call *call)
{
	const struct qs_effect *effect = effect_of_thunk(call->thunk);
	if (!effect->tell || effect->flags & QS_EFFECT_BEFORE)
		return;
	if ((int)call->result && !(effect->flags & QS_EFFECT_FAILED))
		qs_track_everything();
	else
		effect->tell(call);
}

void qs_submitted_unseen(void)
{
	if (!qs_depth)
		qs_track_everything();
}

void qs_epoch_bump(void)
{
	atomic_fetch_add(&qs_submissions[PASSED].value, 1);
}

/* ---- trust ---- */

enum {
	UNDECIDED,
	TRUSTED,
	NEVER
};

#define ASKERS_MAX 64

static _Atomic int trust = UNDECIDED;
static const char *_Atomic blind;             /* why the epoch can never be trusted, or NULL */
static _Atomic bool launches_found;           /* a thunk for a kernel launch was given out   */
static _Atomic(uintptr_t) askers[ASKERS_MAX]; /* where in libcudart.so.* we were asked from  */

/* Something may be submitted that is not counted, from now on. */
static void go_blind(const char *why)
{
	const char *none = NULL;
	if (atomic_compare_exchange_strong(&blind, &none, why))
		qs_message(QS_LOG_INFO, "launches are not all seen: %s", why);
	atomic_store(&trust, NEVER);
}

static const char *file_of(const char *path)
{
	const char *slash = strrchr(path, '/');
	return slash ? slash + 1 : path;
}

static bool is_cudart(const char *path)
{
	return !strncmp(file_of(path), "libcudart.so", 12);
}

/* Puts an address into a table that only grows; its index, or -1 if the table is full. No lock: a
 * fork may happen at any time. */
static int insert(_Atomic(uintptr_t) *table, int size, uintptr_t address)
{
	for (int i = 0; i < size; i++) {
		uintptr_t taken = atomic_load(&table[i]);
		if (!taken && atomic_compare_exchange_strong(&table[i], &taken, address))
			return i;
		if (taken == address)
			return i;
	}
	return -1;
}

/* A libcudart that finds no room stays unknown, which is the safe side. */
static void note_asker(const void *caller)
{
	Dl_info info;
	if (caller && dladdr(caller, &info) && info.dli_fname && is_cudart(info.dli_fname))
		insert(askers, ASKERS_MAX, (uintptr_t)caller);
}

static bool holds(const struct dl_phdr_info *object, uintptr_t address)
{
	for (int i = 0; i < object->dlpi_phnum; i++) {
		const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
		uintptr_t start = object->dlpi_addr + segment->p_vaddr;
		if (segment->p_type == PT_LOAD && address - start < segment->p_memsz)
			return true;
	}
	return false;
}

/* Stops at a libcudart that never asked us. */
static int is_unknown_cudart(struct dl_phdr_info *object, size_t size, void *data)
{
	(void)size, (void)data;
	if (!is_cudart(object->dlpi_name))
		return 0;
	for (int i = 0; i < ASKERS_MAX; i++)
		if (holds(object, atomic_load(&askers[i])))
			return 0;
	return 1;
}

/* cuBLAS brings a CUDA runtime of its own: that its launches arrive shows that the look-ups of a
 * runtime that is not named libcudart do. */
const char *qs_epoch_doubt(void)
{
	const char *why = atomic_load(&blind);
	if (why)
		return why;
	if (!atomic_load(&launches_found))
		return "no launch function was looked up";
	if (!atomic_load(&qs_submissions[INSIDE].value))
		return "no launch of cuBLAS was seen";
	if (dl_iterate_phdr(is_unknown_cudart, NULL))
		return "a loaded libcudart did not ask for the driver";
	return NULL;
}

/* The list of loaded objects is long in the programs that matter, so it is read at calls number 1,
 * 2, 4, ... until it is as it should be. */
static bool decide(void)
{
	static _Atomic unsigned calls;
	if (!atomic_load_explicit(&qs_submissions[INSIDE].value, memory_order_relaxed))
		return false;
	unsigned call = atomic_fetch_add(&calls, 1) + 1;
	if ((call & (call - 1)) || qs_epoch_doubt())
		return false;
	int undecided = UNDECIDED;
	return atomic_compare_exchange_strong(&trust, &undecided, TRUSTED) || undecided == TRUSTED;
}

bool qs_epoch_trusted(void)
{
	int now = atomic_load_explicit(&trust, memory_order_acquire);
	return now == UNDECIDED ? decide() : now == TRUSTED;
}

void qs_epoch_report(void)
{
	const char *doubt = qs_epoch_doubt();
	qs_message(QS_LOG_INFO,
	           "submissions seen: %llu by the program, %llu inside cuBLAS, %llu products "
	           "passed; %s%s",
	           (unsigned long long)atomic_load(&qs_submissions[OUTSIDE].value),
	           (unsigned long long)atomic_load(&qs_submissions[INSIDE].value),
	           (unsigned long long)atomic_load(&qs_submissions[PASSED].value),
	           doubt ? "not trusted: " : "none is known to escape", doubt ? doubt : "");
}

/* ---- names ---- */

static bool begins(const char *name, const char *prefix)
{
	return !strncmp(name, prefix, strlen(prefix));
}

/* By prefix, so that versions, stream flavours and forms yet to come are covered. What should not
 * be counted and is costs a reuse, no more. */
static bool is_submission(const char *name)
{
	static const char *const prefixes[] = {
	        "cuLaunch",
	        "cuGraphLaunch",
	        "cuGraphInstantiate",
	        "cuGraphExec",
	        "cuMemcpy",
	        "cuMemset",
	        "cuMemFree",
	        "cuMemMap",
	        "cuMemUnmap",
	        "cuMemSetAccess",
	        "cuMemRelease",
	        "cuMemExportToShareableHandle",
	        "cuMemImportFromShareableHandle",
	        "cuMemRetainAllocationHandle",
	        "cuMemGetHandleForAddressRange",
	        "cuMemPrefetch",
	        "cuMemDiscard",
	        "cuMemBatchDecompress",
	        "cuMemPoolExportPointer",
	        "cuMemPoolImportPointer",
	        "cuStreamWrite",
	        "cuStreamWait",
	        "cuStreamBatchMemOp",
	        "cuStreamAddCallback",
	        "cuCtxWaitEvent",
	        "cuGreenCtxWaitEvent",
	        "cuWaitExternalSemaphores",
	        "cuModuleUnload",
	        "cuLibraryUnload",
	        "cuCtxDestroy",
	        "cuCtxDetach",
	        "cuDevicePrimaryCtxRelease",
	        "cuDevicePrimaryCtxReset",
	        "cuIpcGetMemHandle",
	        "cuIpcOpenMemHandle",
	        "cuIpcCloseMemHandle",
	        "cuExternalMemoryGetMapped",
	        "cuDestroyExternalMemory",
	        "cuGraphicsMapResources",
	        "cuGraphicsUnmapResources",
	        "cuMulticastBind",
	        "cuMulticastUnbind",
	        "cuFlushGPUDirectRDMAWrites",
	        /* A writer that no submission announces (a network card, a disk, a peer process, a
	         * kernel held back) must first learn that our product has ended: by these. */
	        "cuStreamSynchronize",
	        "cuStreamQuery",
	        "cuEventSynchronize",
	        "cuEventQuery",
	        "cuCtxSynchronize",
	        "cuSignalExternalSemaphores",
	        /* Nodes put into a graph by hand while it is being captured. */
	        "cuGraphAdd",
	        "cuStreamUpdateCaptureDependencies",
	};
	for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
		if (begins(name, prefixes[i]))
			return true;
	return false;
}

/* The two forms of cuGetProcAddress: the second takes one argument more. */
enum form {
	ASK_V1,
	ASK_V2,
	ASK_FORMS
};

static const char *const ask_names[ASK_FORMS] = {"cuGetProcAddress", "cuGetProcAddress_v2"};

static int form_of(const char *name)
{
	for (int form = 0; form < ASK_FORMS; form++)
		if (!strcmp(name, ask_names[form]))
			return form;
	return -1;
}

bool qs_submission_name(const char *name)
{
	return is_submission(name) || form_of(name) >= 0;
}

/* ---- thunks ---- */

static void note_launch(const char *name)
{
	if (begins(name, "cuLaunchKernel"))
		atomic_store(&launches_found, true);
}

/* The thunk that stands before this function of the driver; the function if there are no more. */
static void *thunk_of(const char *name, void *function, int version)
{
	const struct qs_effect *effect = qs_effect_of(name, version);
	int first = effect->flags & QS_EFFECT_KEPT ? EXPORTED_KEPT : EXPORTED;
	int slot = insert(&qs_thunk_original[first],
	                  effect->flags & QS_EFFECT_KEPT ? QS_KEPT_SLOTS : QS_LOOKUP_SLOTS,
	                  (uintptr_t)function);
	if (slot < 0) {
		go_blind("more driver functions were looked up than there are thunks");
		return function;
	}
	atomic_store_explicit(&effects[first + slot], effect, memory_order_release);
	note_launch(name);
	return (void *)(qs_thunks + (size_t)(first + slot) * QS_THUNK_BYTES);
}

/* The driver that the process has loaded, referenced for ever. NULL if none is. */
static void *driver(void)
{
	static void *_Atomic loaded;
	void *handle = atomic_load_explicit(&loaded, memory_order_acquire);
	if (!handle) {
		handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
		atomic_store_explicit(&loaded, handle, memory_order_release);
	}
	return handle;
}

void *qs_driver_function(_Atomic(void *) *kept, const char *name)
{
	static char absent;
	void *found = atomic_load_explicit(kept, memory_order_acquire);
	void *handle = found ? NULL : driver();
	if (handle) {
		found = qs_real_dlsym(handle, name);
		found = found ? found : &absent;
		atomic_store_explicit(kept, found, memory_order_release);
	}
	return found == &absent ? NULL : found;
}

/* The function that the caller of an export means: the next in the global scope, which may be
 * another interposer's; else that of the driver; else (the driver is not loaded, *lasting = false)
 * one in the caller's own scope: libraries bring stubs that load the driver at their first call. */
static void *find_original(const char *name, const void *caller, bool *lasting)
{
	void *found = qs_real_dlsym(RTLD_NEXT, name);
	void *handle = found ? NULL : driver();
	*lasting = true;
	if (handle)
		found = qs_real_dlsym(handle, name);
	if (found && !qs_is_own(found))
		return found;
	*lasting = false;
	return qs_in_scope(caller, name);
}

/* What an export answers where there is no driver, as the driver does before cuInit. */
#define NOT_INITIALIZED 3

static int no_driver(void)
{
	return NOT_INITIALIZED;
}

/* The original of an exported thunk at its first call. */
void *qs_thunk_resolve(unsigned index, const void *caller)
{
	bool lasting;
	void *found = find_original(exported[index], caller, &lasting);
	if (!found)
		return (void *)no_driver;
	if (lasting)
		atomic_store(&qs_thunk_original[index], (uintptr_t)found);
	note_launch(exported[index]);
	return found;
}

/* ---- cuGetProcAddress ---- */

/* How many different functions of one form can be stood before. */
#define ASK_MAX 4

typedef int ask_v1_function(const char *, void **, int, uint64_t);
typedef int ask_v2_function(const char *, void **, int, uint64_t, int *);

/* Originals by form and wrapper; the last one is the export's. */
static _Atomic(uintptr_t) asked[ASK_FORMS][ASK_MAX + 1];

static void *stand_before(const char *name, void *function, int version);

/* The answer of a cuGetProcAddress, with a thunk in place of a function that submits. */
static int hand_out(int status, const char *name, void **function, int version)
{
	if (!status && name && function && *function)
		*function = stand_before(name, *function, version);
	return status;
}

#define QS_DEFINE_ASK(slot)                                                                        \
	static int ask_v1_##slot(const char *name, void **function, int version, uint64_t flags)   \
	{                                                                                          \
		ask_v1_function *original = (ask_v1_function *)atomic_load(&asked[ASK_V1][slot]);  \
		return hand_out(original(name, function, version, flags), name, function,          \
		                version);                                                          \
	}                                                                                          \
	static int ask_v2_##slot(const char *name, void **function, int version, uint64_t flags,   \
	                         int *answer)                                                      \
	{                                                                                          \
		ask_v2_function *original = (ask_v2_function *)atomic_load(&asked[ASK_V2][slot]);  \
		return hand_out(original(name, function, version, flags, answer), name, function,  \
		                version);                                                          \
	}
QS_DEFINE_ASK(0)
QS_DEFINE_ASK(1)
QS_DEFINE_ASK(2)
QS_DEFINE_ASK(3)
QS_DEFINE_ASK(4)
#undef QS_DEFINE_ASK

_Static_assert(ASK_MAX == 4, "one QS_DEFINE_ASK line per wrapper, and one for the export");

QS_EXPORT ask_v1_function cuGetProcAddress;
QS_EXPORT ask_v2_function cuGetProcAddress_v2;

static void *const asks[ASK_FORMS][ASK_MAX + 2] = {
        [ASK_V1] = {(void *)ask_v1_0, (void *)ask_v1_1, (void *)ask_v1_2, (void *)ask_v1_3,
                    (void *)ask_v1_4, (void *)cuGetProcAddress},
        [ASK_V2] = {(void *)ask_v2_0, (void *)ask_v2_1, (void *)ask_v2_2, (void *)ask_v2_3,
                    (void *)ask_v2_4, (void *)cuGetProcAddress_v2},
};

/* False if there is none. */
static bool find_ask(enum form form, const void *caller)
{
	bool lasting;
	if (atomic_load(&asked[form][ASK_MAX]))
		return true;
	void *found = find_original(ask_names[form], caller, &lasting);
	if (found)
		atomic_store(&asked[form][ASK_MAX], (uintptr_t)found);
	return found;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
	const void *caller = __builtin_return_address(0);
	note_asker(caller);
	return find_ask(ASK_V1, caller) ? ask_v1_4(name, function, version, flags)
	                                : NOT_INITIALIZED;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *answer)
{
	const void *caller = __builtin_return_address(0);
	note_asker(caller);
	return find_ask(ASK_V2, caller) ? ask_v2_4(name, function, version, flags, answer)
	                                : NOT_INITIALIZED;
}

static void *ask_of(enum form form, void *function)
{
	int slot = insert(asked[form], ASK_MAX, (uintptr_t)function);
	if (slot >= 0)
		return asks[form][slot];
	go_blind("too many different cuGetProcAddress");
	return function;
}

/* What is handed out for `function`, found under this name: itself if it is of no interest. */
static void *stand_before(const char *name, void *function, int version)
{
	int form = form_of(name);
	if (qs_is_own(function))
		return function;
	if (form >= 0) /* the driver's one name for both forms */
		return ask_of(version >= 12000 ? ASK_V2 : (enum form)form, function);
	return is_submission(name) ? thunk_of(name, function, version) : function;
}

static bool is_exported(const char *name)
{
	for (size_t i = 0; i < THUNKS; i++)
		if (exported[i] && !strcmp(exported[i], name))
			return true;
	return form_of(name) >= 0;
}

static bool in_driver(const void *function)
{
	Dl_info info;
	return dladdr(function, &info) && info.dli_fname &&
	       begins(file_of(info.dli_fname), "libcuda.so");
}

/* Stubs and wrappers of the driver have its functions by their names. What else begins like one is
 * most likely the program's own, whose arguments no thunk could pass on; or a wrapper's, of a
 * driver that is newer than this list, which is then not seen. */
void *qs_submission_wrapper(const char *name, void *function, const void *caller)
{
	if (form_of(name) >= 0)
		note_asker(caller);
	if (!is_exported(name) && !in_driver(function)) {
		go_blind("a function named like the driver's was found elsewhere");
		return function;
	}
	return stand_before(name, function, 0);
}

void qs_submission_escaped(const char *name)
{
	if (is_submission(name) || form_of(name) >= 0)
		go_blind("a driver function was looked up past qshim, with RTLD_NEXT");
}

bool qs_submission_is_own(const void *function)
{
	const unsigned char *address = function;
	if (address >= qs_thunks && address < qs_thunks_end)
		return true;
	for (int form = 0; form < ASK_FORMS; form++)
		for (int slot = 0; slot <= ASK_MAX + 1; slot++)
			if (asks[form][slot] == function)
				return true;
	return false;
}
