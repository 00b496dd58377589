/* The arguments of kernel launches: which of them could be addresses of what is watched.
 *
 * The driver tells where a function's parameters lie (cuFuncGetParamInfo, for CUkernel handles
 * cuKernelGetParamInfo; since 12.4), which is asked once for each function and kept for good in a
 * hash table that is read without a lock. Every aligned word of every parameter is looked at, also
 * inside structs that are passed by value: a pointer is aligned wherever the compiler put it. A
 * CUtensorMap holds the address it is made for, or was last given, in its first word.
 *
 * NCCL's kernels are known by their names. Since 2.23 what they are to do, buffers included, lies
 * in their one argument if there is room for it; else it is somewhere in memory, as in older
 * versions always, and everything may be written.
 *
 * Handles are used again once a module is unloaded, so what is kept belongs to a generation, and is
 * asked again in a later one.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "intercept/driver.h"
#include "intercept/intercept.h"
#include "intercept/launch.h"
#include "operand/track.h"

#define FUNCTIONS_MAX  16384 /* power of two */
#define PROBES_MAX     64
#define PARAMETERS_MAX 4096
#define WORD           sizeof(uint64_t)

/* The aligned words of one parameter. */
struct piece {
	uint32_t index;  /* of the parameter                          */
	uint32_t offset; /* of the first word, from the first argument */
	uint32_t skip;   /* bytes of the parameter before it          */
	uint32_t words;
};

struct layout {
	_Atomic uint32_t generation;
	enum {
		PLAIN,
		OPAQUE, /* what it writes does not show in its arguments  */
		STORED, /* it may: NCCL's, see work_is_stored             */
	} kind;
	uint32_t count; /* pieces */
	struct piece piece[];
};

/* Layouts are never freed: another thread may be reading. */
static struct slot {
	_Atomic uintptr_t function;
	_Atomic(struct layout *) layout;
} slots[FUNCTIONS_MAX];

static _Atomic uint32_t generation;

extern __thread unsigned char qs_depth; /* guard.c */

void qs_functions_unloaded(void)
{
	atomic_fetch_add(&generation, 1);
}

static uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
	return x ^ x >> 29;
}

/* ---- what the driver says ---- */

/* One of the two kinds of handle that a launch takes. */
enum kind {
	FUNCTION,
	KERNEL
};

/* Not in the headers of every toolkit that this builds with. */
typedef CUresult info_function(void *handle, size_t index, size_t *offset, size_t *size);
typedef CUresult name_function(const char **name, void *handle);
typedef CUresult capturing_function(CUstream stream, CUstreamCaptureStatus *status);

static CUresult ask(enum kind kind, CUfunction function, size_t index, size_t *offset, size_t *size)
{
	info_function *info = kind == KERNEL ? QS_DRIVER(info_function, cuKernelGetParamInfo)
	                                     : QS_DRIVER(info_function, cuFuncGetParamInfo);
	return info ? info(function, index, offset, size) : CUDA_ERROR_NOT_SUPPORTED;
}

/* NULL if the driver does not tell. Names of functions of C++ are mangled. */
static const char *name_of(enum kind kind, CUfunction function)
{
	name_function *ask_name = kind == KERNEL ? QS_DRIVER(name_function, cuKernelGetName)
	                                         : QS_DRIVER(name_function, cuFuncGetName);
	const char *name = NULL;
	return ask_name && !ask_name(&name, function) ? name : NULL;
}

bool qs_function_is_ours(CUfunction function)
{
	const char *name = name_of(FUNCTION, function);
	return name && !strncmp(name, "qs_", strlen("qs_"));
}

/* The symmetric kernels of NCCL get windows, which are mapped anew, and offsets in them. */
static int kind_of(enum kind kind, CUfunction function)
{
	static const char *const parts[] = {"ncclDevKernel", "ncclKernel", "ncclSymDevKernel",
	                                    "ncclSymkDevKernel"};
	const char *name = name_of(kind, function);
	if (!name)
		return OPAQUE;
	if (strstr(name, "ncclDevKernelArgsStorage"))
		return STORED;
	for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
		if (strstr(name, parts[i]))
			return OPAQUE;
	return PLAIN;
}

static void add_piece(struct layout *layout, size_t index, size_t offset, size_t size)
{
	size_t skip = (WORD - offset % WORD) % WORD;
	if (size < skip + WORD)
		return;
	layout->piece[layout->count++] = (struct piece){.index = (uint32_t)index,
	                                                .offset = (uint32_t)(offset + skip),
	                                                .skip = (uint32_t)skip,
	                                                .words = (uint32_t)((size - skip) / WORD)};
}

static struct layout *make_layout(size_t pieces)
{
	return calloc(1, sizeof(struct layout) + pieces * sizeof(struct piece));
}

/* NULL if the driver does not know the handle or cannot tell, or memory is out. */
static struct layout *describe(CUfunction function)
{
	size_t offset, size, count = 0;
	enum kind kind = FUNCTION;
	CUresult error = ask(kind, function, 0, &offset, &size);
	if (error == CUDA_ERROR_INVALID_HANDLE)
		error = ask(kind = KERNEL, function, 0, &offset, &size);
	while (!error && count < PARAMETERS_MAX)
		error = ask(kind, function, ++count, &offset, &size);
	if (error != CUDA_ERROR_INVALID_VALUE) /* which ends the list */
		return NULL;
	struct layout *layout = make_layout(count);
	if (!layout)
		return NULL;
	layout->kind = kind_of(kind, function);
	for (size_t i = 0; i < count; i++)
		if (!ask(kind, function, i, &offset, &size))
			add_piece(layout, i, offset, size);
	return layout;
}

/* ---- what is kept ---- */

static struct slot *slot_of(CUfunction function)
{
	uintptr_t key = (uintptr_t)function;
	size_t at = mix(key) & (FUNCTIONS_MAX - 1);
	for (int i = 0; i < PROBES_MAX && key; i++, at = (at + 1) & (FUNCTIONS_MAX - 1)) {
		uintptr_t known = atomic_load_explicit(&slots[at].function, memory_order_acquire);
		if (!known && atomic_compare_exchange_strong(&slots[at].function, &known, key))
			return &slots[at];
		if (known == key)
			return &slots[at];
	}
	return NULL;
}

static bool same(const struct layout *a, const struct layout *b)
{
	return a->kind == b->kind && a->count == b->count &&
	       !memcmp(a->piece, b->piece, a->count * sizeof *a->piece);
}

/* Asks, and keeps the answer in place of `old`, unless that says the same. */
static struct layout *renew(struct slot *slot, struct layout *old, CUfunction function,
                            uint32_t now)
{
	struct layout *made = describe(function);
	if (!made)
		return NULL;
	if (old && same(old, made)) {
		atomic_store(&old->generation, now);
		free(made);
		return old;
	}
	atomic_store(&made->generation, now);
	if (atomic_compare_exchange_strong(&slot->layout, &old, made))
		return made;
	free(made);
	return old; /* another thread's, no older than ours */
}

/* NULL if it cannot be told. */
static const struct layout *layout_of(CUfunction function)
{
	uint32_t now = atomic_load_explicit(&generation, memory_order_acquire);
	struct slot *slot = slot_of(function);
	if (!slot)
		return NULL;
	struct layout *layout = atomic_load_explicit(&slot->layout, memory_order_acquire);
	if (layout && atomic_load_explicit(&layout->generation, memory_order_relaxed) == now)
		return layout;
	return renew(slot, layout, function, now);
}

/* ---- looking through a launch ---- */

static void scan_words(struct qs_scan *scan, const char *from, uint32_t words, unsigned offset)
{
	for (uint32_t i = 0; i < words; i++) {
		uint64_t word;
		memcpy(&word, from + i * WORD, WORD);
		if (word >= scan->low && word < scan->high)
			scan->found(scan, word, offset + i * (unsigned)WORD);
	}
}

/* The packed buffer of a launch and its size; NULL if there is none. */
static const char *buffer_of(void *const *extra, size_t *size)
{
	const char *buffer = NULL;
	*size = 0;
	for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
		if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
			buffer = extra[1];
		else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE)
			*size = *(const size_t *)extra[1];
		else
			return NULL;
	}
	return buffer;
}

/* NCCL gives as much of its argument as is in use. */
static bool scan_buffer(struct qs_scan *scan, const struct layout *layout, void *const *extra)
{
	size_t size;
	const char *buffer = buffer_of(extra, &size);
	for (uint32_t i = 0; buffer && i < layout->count; i++) {
		const struct piece *piece = &layout->piece[i];
		uint32_t words = piece->words;
		if (piece->offset + words * WORD > size) {
			if (layout->kind != STORED)
				return false;
			words = (uint32_t)((size - piece->offset) / WORD);
		}
		scan_words(scan, buffer + piece->offset, words, piece->offset);
	}
	return buffer;
}

/* The argument begins with struct ncclDevKernelArgs (NCCL 2.23 to 2.28): two words, then, in a
 * byte, where the work is, of which 0 says that it follows here, and last the address of where it
 * is otherwise. */
static bool work_is_stored(void *const *params, void *const *extra)
{
	enum {
		TYPE_AT = 16,
		ADDRESS_AT = 24,
		SIZE = 32
	};
	size_t size = SIZE;
	uint64_t address;
	const char *args = params ? params[0] : extra ? buffer_of(extra, &size) : NULL;
	if (!args || size < SIZE)
		return false;
	memcpy(&address, args + ADDRESS_AT, sizeof address);
	return args[TYPE_AT] == 0 && !address;
}

static bool scan(struct qs_scan *to, const struct layout *layout, void *const *params,
                 void *const *extra)
{
	if (!params && extra)
		return scan_buffer(to, layout, extra);
	for (uint32_t i = 0; params && i < layout->count; i++) {
		const struct piece *piece = &layout->piece[i];
		scan_words(to, (const char *)params[piece->index] + piece->skip, piece->words,
		           piece->offset);
	}
	return params || !layout->count;
}

bool qs_scan_launch(struct qs_scan *to, void *const *params, void *const *extra)
{
	const struct layout *layout = layout_of(to->function);
	if (!layout || layout->kind == OPAQUE)
		return false;
	if (layout->kind == STORED && !work_is_stored(params, extra))
		return false;
	return scan(to, layout, params, extra);
}

uint64_t qs_use_of(CUfunction function, uint64_t word, unsigned offset)
{
	uint64_t use = mix((uintptr_t)function + atomic_load(&generation));
	return mix(mix(use ^ word) + offset) | 1;
}

/* ---- reporting one ---- */

bool qs_is_capturing(CUstream stream)
{
	capturing_function *ask_driver = QS_DRIVER(capturing_function, cuStreamIsCapturing);
	CUstreamCaptureStatus status;
	/* A default stream may be the thread's own, which cannot be told here, or the legacy one.
	 * Of that the driver answers with an error, and does nothing else, while one that
	 * synchronises with it, such as the thread's own, is captured. */
	return !ask_driver || ask_driver(stream, &status) ||
	       status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* A launch whose arguments are looked through: the driver is asked once for all that hit. */
struct launch {
	bool asked, capturing;
};

/* What is only captured has written nothing yet, so there is nothing to learn from it. */
static void found(struct qs_scan *to, uint64_t word, unsigned offset)
{
	struct launch *launch = to->to;
	if (!qs_track_reaches(word))
		return;
	if (!launch->asked)
		launch->capturing = qs_is_capturing(to->stream);
	launch->asked = true;
	qs_track_argument(word, launch->capturing ? 0 : qs_use_of(to->function, word, offset));
}

/* cuBLAS's launches inside a hooked call read what the call names and write what it names: told by
 * export.c. */
void qs_launched(CUfunction function, CUstream stream, void *const *params, void *const *extra)
{
	struct launch launch = {.asked = false};
	struct qs_scan to = {
	        .low = atomic_load_explicit(&qs_track_bounds.low, memory_order_relaxed),
	        .high = atomic_load_explicit(&qs_track_bounds.high, memory_order_relaxed),
	        .function = function,
	        .stream = stream,
	        .to = &launch,
	        .found = found};
	if (!qs_depth && !qs_scan_launch(&to, params, extra))
		qs_track_everything();
}
