/* A program linked to the driver that remembers (recorder.h): calls every function that can write
 * device memory, in every form, and says which of sixteen watched pages are not suspect or gone
 * after it as they must be. `track_forms MODE`, under libqshim_open.so. */
#define _GNU_SOURCE
#include <cuda.h>
#undef cuGetProcAddress /* the forms of cuda.h are not the recorder's */

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "intercept/submissions.h"
#include "operand/track.h"
#include "tests/intercept/recorder.h"
#include "tests/intercept/track_open.h"

#define WORDS 14
typedef int function(word, word, word, word, word, word, word, word, word, word, word, word, word,
                     word);
typedef int ask(const char *name, function **found, int version, uint64_t flags, int *answer);

#define PAGES 16
#define PAGE  0x1000
#define P(n)  ((word)0x7f0000100000 + (word)(n)*PAGE)
#define ALL   0xffffu

static struct qs_watch *page[PAGES];
static __typeof__(qs_test_watch) *watch;
static __typeof__(qs_test_watch_in) *watch_in;
static __typeof__(qs_test_unwatch) *unwatch;
static __typeof__(qs_test_state) *state;
static __typeof__(qs_test_clear) *clear;
static __typeof__(qs_test_begin) *begin;
static __typeof__(qs_test_end) *end;
static void (*set_status)(int status);
static void (*set_during)(void (*during)(void));
static void (*set_parameters)(int count);
static ask *ask_driver;

static void *find(void *handle, const char *name)
{
	void *found = dlsym(handle, name);
	if (found)
		return found;
	fprintf(stderr, "track: %s\n", dlerror());
	exit(3);
}

static void *driver(void)
{
	return dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
}

static void watch_page(int i)
{
	page[i] = watch_in(P(i), PAGE, P(i));
	clear(page[i]);
}

static void set_up(void)
{
	watch = (__typeof__(watch))find(RTLD_DEFAULT, "qs_test_watch");
	watch_in = (__typeof__(watch_in))find(RTLD_DEFAULT, "qs_test_watch_in");
	unwatch = (__typeof__(unwatch))find(RTLD_DEFAULT, "qs_test_unwatch");
	state = (__typeof__(state))find(RTLD_DEFAULT, "qs_test_state");
	clear = (__typeof__(clear))find(RTLD_DEFAULT, "qs_test_clear");
	begin = (__typeof__(begin))find(RTLD_DEFAULT, "qs_test_begin");
	end = (__typeof__(end))find(RTLD_DEFAULT, "qs_test_end");
	set_status = (__typeof__(set_status))find(driver(), "recorder_set_status");
	set_during = (__typeof__(set_during))find(driver(), "recorder_set_during");
	set_parameters = (__typeof__(set_parameters))find(driver(), "recorder_set_parameters");
	ask_driver = (ask *)find(driver(), "cuGetProcAddress_v2");
	set_status(0);
}

static unsigned pages_in(int wanted)
{
	unsigned pages = 0;
	for (int i = 0; i < PAGES; i++)
		pages |= state(page[i]) == wanted ? 1u << i : 0;
	return pages;
}

/* Everything clean again. */
static void restore(void)
{
	for (int i = 0; i < PAGES; i++) {
		if (state(page[i]) == QS_WATCH_GONE) {
			unwatch(page[i]);
			watch_page(i);
		}
		clear(page[i]);
	}
}

static int call(function *called, const word *a)
{
	return called(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11],
	              a[12], a[13]);
}

/* ---- what each function is called with, and what it must hit ---- */

#define TO(n) ((CUdeviceptr)P(n))

static CUDA_MEMCPY2D copy_2d = {.dstXInBytes = 0x80,
                                .dstY = 2,
                                .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                                .dstDevice = TO(2),
                                .dstPitch = 0x800,
                                .WidthInBytes = 0x100,
                                .Height = 3};
static CUDA_MEMCPY3D copy_3d = {.dstXInBytes = 0x10,
                                .dstY = 1,
                                .dstZ = 1,
                                .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                                .dstDevice = TO(1),
                                .dstPitch = 0x400,
                                .dstHeight = 8,
                                .WidthInBytes = 0x400,
                                .Height = 2,
                                .Depth = 2};
static CUDA_MEMCPY3D_PEER peer_3d = {.dstMemoryType = CU_MEMORYTYPE_DEVICE,
                                     .dstDevice = TO(5),
                                     .WidthInBytes = 0x800,
                                     .Height = 2,
                                     .Depth = 3};
static CUdeviceptr targets[2] = {TO(3), TO(9)};
static size_t sizes[2] = {PAGE, 1};
static CUstreamBatchMemOpParams operations[3];
static CUdeviceptr imported = TO(4);
static CUgraphExec exec = (CUgraphExec)0x10;
static CUlaunchConfig config;
static CUDA_GRAPH_INSTANTIATE_PARAMS instantiate;

#if CUDA_VERSION >= 12080
static CUDA_MEMCPY3D_BATCH_OP batch_3d[2];

static void fill_batch_3d(void)
{
	batch_3d[0].src.type = batch_3d[0].dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
	batch_3d[0].dst.op.ptr.ptr = TO(6);
	batch_3d[0].dst.op.ptr.rowLength = 0x100;
	batch_3d[0].extent = (CUextent3D){0x80, 8, 2};
	batch_3d[1].src.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
	batch_3d[1].dst.type = CU_MEMCPY_OPERAND_TYPE_ARRAY;
}
#endif

#define BITS(first, last) ((1u << ((last) + 1)) - (1u << (first)))

enum {
	NARROW = 1, /* the first version has addresses of 32 bits */
	FAILS = 2,  /* the same when the call fails              */
};

static const struct row {
	const char *name; /* without version and flavour */
	word argument[WORDS];
	unsigned suspect, gone;
	int flags;
} rows[] = {
        {"cuMemcpy", {P(2) + 1, P(9), PAGE}, BITS(2, 3), 0, 0},
        {"cuMemcpyAsync", {P(2), P(9), PAGE}, BITS(2, 2), 0, 0},
        {"cuMemcpyHtoD", {P(2), P(9), PAGE + 1}, BITS(2, 3), 0, NARROW},
        {"cuMemcpyHtoDAsync", {P(2), P(9), PAGE}, BITS(2, 2), 0, NARROW},
        {"cuMemcpyDtoD", {P(2), P(9), PAGE}, BITS(2, 2), 0, NARROW},
        {"cuMemcpyDtoDAsync", {P(2), P(9), PAGE}, BITS(2, 2), 0, NARROW},
        {"cuMemcpyDtoH", {0x1000, P(9), PAGE}, 0, 0, NARROW},
        {"cuMemcpyDtoHAsync", {P(3), P(9), PAGE}, BITS(3, 3), 0, NARROW},
        {"cuMemcpyAtoD", {P(2), P(9), P(4), PAGE}, BITS(2, 2), 0, NARROW},
        {"cuMemcpyAtoH", {P(2), P(9), 0, PAGE}, BITS(2, 2), 0, NARROW},
        {"cuMemcpyAtoHAsync", {0x1000, P(9), 0, PAGE}, 0, 0, NARROW},
        {"cuMemcpyAtoA", {P(2), 0, P(9), 0, PAGE}, 0, 0, 0},
        {"cuMemcpyDtoA", {P(2), 0, P(9), PAGE}, 0, 0, 0},
        {"cuMemcpyHtoA", {P(2), 0, P(9), PAGE}, 0, 0, 0},
        {"cuMemcpyHtoAAsync", {P(2), 0, P(9), PAGE}, 0, 0, 0},
        {"cuMemcpyPeer", {P(2), P(5), P(9), P(6), 2 * PAGE}, BITS(2, 3), 0, 0},
        {"cuMemcpyPeerAsync", {P(2), P(5), P(9), P(6), 2 * PAGE}, BITS(2, 3), 0, 0},
        {"cuMemcpy2D", {(word)&copy_2d}, BITS(3, 4), 0, NARROW},
        {"cuMemcpy2DAsync", {(word)&copy_2d}, BITS(3, 4), 0, NARROW},
        {"cuMemcpy2DUnaligned", {(word)&copy_2d}, BITS(3, 4), 0, NARROW},
        {"cuMemcpy3D", {(word)&copy_3d}, BITS(3, 5), 0, NARROW},
        {"cuMemcpy3DAsync", {(word)&copy_3d}, BITS(3, 5), 0, NARROW},
        {"cuMemcpy3DPeer", {(word)&peer_3d}, BITS(5, 7), 0, 0},
        {"cuMemcpy3DPeerAsync", {(word)&peer_3d}, BITS(5, 7), 0, 0},
        {"cuMemcpyBatchAsync", {(word)targets, P(7), (word)sizes, 2}, 1u << 3 | 1u << 9, 0, 0},
#if CUDA_VERSION >= 12080
        {"cuMemcpy3DBatchAsync", {2, (word)batch_3d}, BITS(6, 6), 0, 0},
#else
        {"cuMemcpy3DBatchAsync", {0}, ALL, 0, 0},
#endif
        {"cuMemsetD8", {P(2), 0, PAGE}, BITS(2, 2), 0, NARROW},
        {"cuMemsetD16", {P(2), 0, PAGE}, BITS(2, 3), 0, NARROW},
        {"cuMemsetD32", {P(2), 0, PAGE}, BITS(2, 5), 0, NARROW},
        {"cuMemsetD8Async", {P(2), 0, PAGE}, BITS(2, 2), 0, 0},
        {"cuMemsetD16Async", {P(2), 0, PAGE}, BITS(2, 3), 0, 0},
        {"cuMemsetD32Async", {P(2), 0, PAGE}, BITS(2, 5), 0, 0},
        {"cuMemsetD2D8", {P(2), PAGE, 0, 0x10, 3}, BITS(2, 4), 0, NARROW},
        {"cuMemsetD2D16", {P(2), PAGE, 0, 0x801, 1}, BITS(2, 3), 0, NARROW},
        {"cuMemsetD2D32", {P(2), PAGE, 0, 0x10, 3}, BITS(2, 4), 0, NARROW},
        {"cuMemsetD2D8Async", {P(2), PAGE, 0, 0x10, 0}, 0, 0, 0},
        {"cuMemsetD2D16Async", {P(2), PAGE, 0, 0x10, 3}, BITS(2, 4), 0, 0},
        {"cuMemsetD2D32Async", {P(2), PAGE, 0, 0x10, 3}, BITS(2, 4), 0, 0},
        {"cuMemDiscardBatchAsync", {(word)targets, (word)sizes, 2}, 1u << 3 | 1u << 9, 0, 0},
        {"cuMemDiscardAndPrefetchBatchAsync", {(word)targets, (word)sizes, 1}, 1u << 3, 0, 0},
        {"cuMemPrefetchAsync", {P(2), PAGE}, 0, 0, 0},
        {"cuMemPrefetchBatchAsync", {(word)targets, (word)sizes, 2}, 0, 0, 0},
        {"cuMemBatchDecompressAsync", {0}, ALL, 0, 0},
        /* No layout of arguments can be asked: everything. */
        {"cuLaunchKernel", {0x40, 1, 1, 1, 1, 1, 1, 0, 0, (word)targets, 0}, ALL, 0, 0},
        {"cuLaunchKernelEx", {(word)&config, 0x40, (word)targets}, ALL, 0, 0},
        {"cuLaunchCooperativeKernel", {0x40, 1, 1, 1, 1, 1, 1, 0, 0, (word)targets}, ALL, 0, 0},
        {"cuLaunchCooperativeKernelMultiDevice", {0}, ALL, 0, 0},
        {"cuLaunch", {0}, ALL, 0, 0},
        {"cuLaunchGrid", {0}, ALL, 0, 0},
        {"cuLaunchGridAsync", {0}, ALL, 0, 0},
        {"cuLaunchHostFunc", {P(2), P(3), P(4)}, 0, 0, 0},
        {"cuGraphLaunch", {0x10, 0}, ALL, 0, 0},
        {"cuStreamWriteValue32", {0, P(2) + PAGE - 4, 1}, BITS(2, 3), 0, 0},
        {"cuStreamWriteValue64", {0, P(2), 1}, BITS(2, 2), 0, 0},
        {"cuStreamBatchMemOp", {0, 3, (word)operations}, BITS(4, 4), 0, 0},
        {"cuStreamWaitValue32", {0, P(2), 1}, 0, 0, 0},
        {"cuStreamWaitValue64", {0, P(2), 1}, 0, 0, 0},
        {"cuStreamWaitEvent", {0, P(2)}, 0, 0, 0},
        {"cuCtxWaitEvent", {P(2), P(2)}, 0, 0, 0},
        {"cuGreenCtxWaitEvent", {P(2), P(2)}, 0, 0, 0},
        {"cuStreamAddCallback", {0, P(2), P(3)}, 0, 0, 0},
        {"cuWaitExternalSemaphoresAsync", {0}, ALL, 0, 0},
        {"cuFlushGPUDirectRDMAWrites", {0}, ALL, 0, 0},
        {"cuMemFree", {P(2)}, 0, BITS(2, 2), NARROW | FAILS},
        {"cuMemFreeAsync", {P(2)}, 0, BITS(2, 2), FAILS},
        {"cuMemFreeHost", {P(2)}, 0, 0, 0},
        {"cuMemMap", {P(2), PAGE + 1, 0, 0x70}, 0, BITS(2, 3), 0},
        {"cuMemUnmap", {P(2), 3 * PAGE}, 0, BITS(2, 4), FAILS},
        {"cuMemSetAccess", {P(2), PAGE}, 0, BITS(2, 2), FAILS},
        {"cuMemMapArrayAsync", {P(2), 1}, 0, 0, 0},
        {"cuGraphicsMapResources", {1, P(2)}, 0, ALL, FAILS},
        {"cuGraphicsUnmapResources", {1, P(2)}, 0, ALL, FAILS},
        {"cuMemRelease", {0x70}, 0, 0, 0},
        {"cuMemExportToShareableHandle", {(word)&imported, 0x71}, 0, 0, 0},
        {"cuMemImportFromShareableHandle", {(word)&imported}, 0, 0, 0},
        {"cuMemRetainAllocationHandle", {(word)&imported, P(12)}, 0, 0, 0},
        {"cuMemGetHandleForAddressRange", {0, P(5), PAGE}, 0, BITS(5, 5), FAILS},
        {"cuMulticastBindMem", {1, 0, 2}, ALL, 0, 0},
        {"cuMulticastUnbind", {1, 0}, ALL, 0, 0},
        {"cuMulticastBindAddr", {1, 0, P(6)}, 0, BITS(6, 6), FAILS},
        {"cuMulticastBindAddr_v2", {1, 0, 0x200000, P(6), 0x200000}, 0, BITS(6, 6), FAILS},
        {"cuCtxDestroy", {1}, 0, ALL, FAILS},
        {"cuCtxDetach", {1}, 0, ALL, FAILS},
        {"cuDevicePrimaryCtxReset", {0}, 0, ALL, FAILS},
        {"cuDevicePrimaryCtxRelease", {0}, 0, ALL, FAILS},
        {"cuDestroyExternalMemory", {P(2)}, 0, 0, 0},
        {"cuExternalMemoryGetMappedBuffer", {(word)&imported, 1}, 0, BITS(4, 4), 0},
        {"cuExternalMemoryGetMappedMipmappedArray", {(word)&imported, 1}, 0, 0, 0},
        {"cuIpcGetMemHandle", {(word)&imported, P(5)}, 0, BITS(5, 5), FAILS},
        {"cuIpcOpenMemHandle", {(word)&imported}, 0, BITS(4, 4), 0},
        {"cuIpcCloseMemHandle", {P(2)}, 0, BITS(2, 2), FAILS},
        {"cuMemPoolExportPointer", {(word)&imported, P(5)}, 0, BITS(5, 5), FAILS},
        {"cuMemPoolImportPointer", {(word)&imported, 1}, 0, BITS(4, 4), 0},
        {"cuModuleUnload", {P(2)}, ALL, 0, FAILS},
        {"cuLibraryUnload", {P(2)}, ALL, 0, FAILS},
        {"cuGraphInstantiate", {(word)&exec, 0x20}, 0, 0, 0},
        {"cuGraphInstantiateWithFlags", {(word)&exec, 0x20}, 0, 0, 0},
        {"cuGraphInstantiateWithParams", {(word)&exec, 0x20, (word)&instantiate}, 0, 0, 0},
        {"cuGraphExecUpdate", {0x10, 0x20}, 0, 0, FAILS},
        {"cuGraphExecDestroy", {0x10}, 0, 0, FAILS},
        {"cuGraphExecKernelNodeSetParams", {0x10}, 0, 0, FAILS},
        {"cuGraphExecMemcpyNodeSetParams", {0x10}, 0, 0, FAILS},
        {"cuGraphExecMemsetNodeSetParams", {0x10}, 0, 0, FAILS},
        {"cuGraphExecChildGraphNodeSetParams", {0x10}, 0, 0, FAILS},
        {"cuGraphExecNodeSetParams", {0x10}, 0, 0, FAILS},
        {"cuGraphExecBatchMemOpNodeSetParams", {0x10}, 0, 0, FAILS},
        {"cuGraphExecExternalSemaphoresWaitNodeSetParams", {0x10}, 0, 0, FAILS},
};

#define ROWS (sizeof rows / sizeof *rows)

static const char *const names[] = {
#define NAME(name) #name,
        QS_SUBMISSIONS(NAME)
#undef NAME
};

#define NAMES (sizeof names / sizeof *names)

static void fill_structs(void)
{
	operations[0].operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
	operations[0].waitValue.address = TO(2);
	operations[1].operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
	operations[1].writeValue.address = TO(4);
	operations[2].operation = CU_STREAM_MEM_OP_BARRIER;
#if CUDA_VERSION >= 12080
	fill_batch_3d();
#endif
}

static bool ends(const char *name, const char *suffix)
{
	size_t length = strlen(name), more = strlen(suffix);
	return length > more && !strcmp(name + length - more, suffix);
}

/* Without flavour, then without version. */
static void split(const char *name, char base[96], bool *versioned)
{
	snprintf(base, 96, "%s", name);
	if (ends(base, "_ptsz") || ends(base, "_ptds"))
		base[strlen(base) - 5] = '\0';
	*versioned = ends(base, "_v2");
	if (*versioned)
		base[strlen(base) - 3] = '\0';
}

static const struct row *row_of(const char *base)
{
	for (size_t i = 0; i < ROWS; i++)
		if (!strcmp(rows[i].name, base))
			return &rows[i];
	return NULL;
}

/* Calls it; true if the pages are as they must be. */
static bool hits(const char *how, const char *name, function *called, const word *arguments,
                 unsigned suspect, unsigned gone)
{
	call(called, arguments);
	unsigned got_suspect = pages_in(QS_WATCH_SUSPECT), got_gone = pages_in(QS_WATCH_GONE);
	restore();
	if (got_suspect == suspect && got_gone == gone)
		return true;
	printf("%s %s: suspect %x, gone %x; expected %x, %x\n", how, name, got_suspect, got_gone,
	       suspect, gone);
	return false;
}

static int say(const char *how, size_t count, size_t wrong)
{
	printf("%s: %zu calls, %zu wrong\n", how, count, wrong);
	return wrong ? 1 : 0;
}

/* Every exported name, as it is called when linked or found by dlsym. */
static int by_name(void)
{
	size_t wrong = 0;
	for (size_t i = 0; i < NAMES; i++) {
		char base[96];
		bool versioned;
		split(names[i], base, &versioned);
		const struct row *own = row_of(names[i]), *row = own ? own : row_of(base);
		if (!row) {
			printf("%s: no row\n", names[i]);
			wrong++;
			continue;
		}
		bool narrow = row->flags & NARROW && !versioned;
		unsigned suspect = narrow ? ALL : row->suspect, gone = narrow ? 0 : row->gone;
		wrong += !hits("name", names[i], (function *)find(driver(), names[i]),
		               row->argument, suspect, gone);
		wrong += !hits("linked", names[i], (function *)find(RTLD_DEFAULT, names[i]),
		               row->argument, suspect, gone);
	}
	return say("name", 2 * NAMES, wrong);
}

/* Each name as cuGetProcAddress is asked for it. */
static int by_ask(void)
{
	static const struct {
		int version;
		uint64_t flags;
	} asked[] = {{13000, 0}, {13000, 2}, {12000, 0}};
	size_t wrong = 0, count = 0;
	for (size_t i = 0; i < ROWS; i++)
		for (size_t j = 0; j < 3; j++, count++) {
			function *found = NULL;
			const struct row *row = &rows[i];
			if (ask_driver(row->name, &found, asked[j].version, asked[j].flags, NULL))
				wrong++, printf("%s: not found\n", row->name);
			else
				wrong += !hits("ask", row->name, found, row->argument, row->suspect,
				               row->gone);
		}
	return say("ask", count, wrong);
}

/* Forms that are not known: those of versions before and after what is. */
static int unknown(void)
{
	static const char *const asked[] = {"cuMemcpyHtoD", "cuMemFree", "cuMemsetD8"};
	size_t wrong = 0;
	for (size_t i = 0; i < 3; i++)
		for (int old = 0; old < 2; old++) {
			function *found = NULL;
			wrong += ask_driver(asked[i], &found, old ? 3000 : 14000, 0, NULL) != 0;
			wrong += !hits("unknown", asked[i], found, row_of(asked[i])->argument, ALL,
			               0);
		}
	static const char *const kept[] = {"cuGraphExecDestroy", "cuModuleUnload",
	                                   "cuIpcGetMemHandle"};
	for (size_t i = 0; i < 3; i++) { /* what is remembered may be wrong */
		function *found = NULL;
		wrong += ask_driver(kept[i], &found, 14000, 0, NULL) != 0;
		wrong += !hits("unknown", kept[i], found, row_of(kept[i])->argument, 0, ALL);
	}
	function *found = NULL;
	wrong += ask_driver("cuLaunchNumber7", &found, 13000, 0, NULL) != 0;
	set_status(-1);
	wrong += !hits("unknown", "cuLaunchNumber7", found, rows[0].argument, ALL, 0);
	return say("unknown", 10, wrong);
}

/* What a call that failed holds is not read. */
static int failed(void)
{
	static const word nothing[WORDS];
	size_t wrong = 0;
	set_status(1);
	for (size_t i = 0; i < ROWS; i++) {
		const struct row *row = &rows[i];
		function *found = NULL;
		bool same = row->flags & FAILS || !(row->suspect | row->gone);
		bool silent = !row->suspect && !row->gone;
		if (ask_driver(row->name, &found, 13000, 0, NULL))
			continue;
		call(found, same ? row->argument : nothing);
		unsigned suspect = pages_in(QS_WATCH_SUSPECT), gone = pages_in(QS_WATCH_GONE);
		restore();
		bool right = row->flags & FAILS ? suspect == row->suspect && gone == row->gone
		                                : !gone && (suspect == ALL || (silent && !suspect));
		if (!right)
			wrong++, printf("failed %s: %x %x\n", row->name, suspect, gone);
	}
	return say("failed", ROWS, wrong);
}

/* Inside a hooked call of cuBLAS the launches are its own, copies and frees are not looked at less.
 */
static int inside(void)
{
	size_t wrong = 0;
	begin();
	wrong += !hits("inside", "launch", (function *)find(driver(), "cuLaunchKernel"),
	               row_of("cuLaunchKernel")->argument, 0, 0);
	wrong += !hits("inside", "copy", (function *)find(driver(), "cuMemcpyAsync"),
	               row_of("cuMemcpyAsync")->argument, BITS(2, 2), 0);
	wrong += !hits("inside", "free", (function *)find(driver(), "cuMemFree_v2"),
	               row_of("cuMemFree")->argument, 0, BITS(2, 2));
	end();
	return say("inside", 3, wrong);
}

static void watch_now(void)
{
	set_during(NULL);
	watch_page(0);
}

/* The thunk looked before there was anything to watch: the call may have written it. */
static int late(void)
{
	function *fill = (function *)find(driver(), "cuMemsetD8Async");
	for (int i = 0; i < PAGES; i++)
		unwatch(page[i]);
	set_during(watch_now);
	call(fill, row_of("cuMemsetD8Async")->argument);
	int first = state(page[0]);
	unwatch(page[0]);
	begin();
	set_during(watch_now);
	call(fill, row_of("cuMemsetD8Async")->argument);
	end();
	return say("late", 2, first != QS_WATCH_SUSPECT || state(page[0]) != QS_WATCH_CLEAN);
}

/* Whoever shares an address shares all memory around it. */
static int shared(void)
{
	void (*set_allocation)(word, word) =
	        (void (*)(word, word))find(driver(), "recorder_set_allocation");
	const word handle[2] = {0};
	set_allocation(P(2), 4 * PAGE);
	for (size_t i = 2; i < 6; i++) {
		unwatch(page[i]);
		page[i] = watch(P(i), (size_t)PAGE);
	}
	call((function *)find(driver(), "cuIpcGetMemHandle"),
	     (const word[WORDS]){(word)handle, P(4)});
	unsigned gone = pages_in(QS_WATCH_GONE);
	bool later = watch(P(3), 1) || !watch(P(8), 1);
	return say("shared", 2, (size_t)(gone != BITS(2, 5)) + later);
}

static void tell(const char *name, word a, word b, word c, word d)
{
	call((function *)find(driver(), name), (const word[WORDS]){a, b, c, d});
}

/* Page `i` comes from a handle. */
static void map(int i, word handle)
{
	tell("cuMemMap", P(i), PAGE, 0, handle);
}

/* It can be watched, and then is. */
static bool can_watch(int i)
{
	unwatch(page[i]);
	page[i] = watch(P(i), (size_t)PAGE);
	return page[i];
}

static bool is_gone(int i)
{
	return state(page[i]) == QS_WATCH_GONE && !can_watch(i);
}

/* The page is watched, then gone for what the call says of its handle. */
static bool shares(int i, word handle, const char *name, word a, word b, word c, word d)
{
	map(i, handle);
	const bool watched = can_watch(i);
	tell(name, a, b, c, d);
	return watched && is_gone(i);
}

/* Memory that others can write: by a handle, or at another address. */
static int handles(void)
{
	CUmemGenericAllocationHandle other = 0x99;
	size_t wrong = 0;
	const word got = (word)&other;
	wrong += !shares(2, 0x71, "cuMemExportToShareableHandle", got, 0x71, 1, 0);
	map(9, 0x71);
	wrong += can_watch(9);
	wrong += !shares(3, 0x72, "cuMemMap", P(10), PAGE, 0, 0x72) || can_watch(10);
	tell("cuMemImportFromShareableHandle", got, 7, 1, 0);
	map(4, 0x99);
	wrong += can_watch(4);
	wrong += !shares(5, 0x73, "cuMemRetainAllocationHandle", got, P(5), 0, 0);
	map(6, 0x74);
	tell("cuMemRelease", 0x74, 0, 0, 0);
	wrong += !can_watch(6);
	map(11, 0x74); /* which is another's now */
	wrong += !can_watch(11) || state(page[6]) == QS_WATCH_GONE;
	tell("cuMemUnmap", P(2), PAGE, 0, 0);
	map(2, 0x75);
	wrong += !can_watch(2);
	wrong += !shares(7, 0x76, "cuMulticastBindMem", 1, 0, 0x76, 0);
	wrong += !shares(8, 0x77, "cuMulticastBindMem_v2", 1, 0, 0, 0x77);
	wrong += !can_watch(12);
	tell("cuMemGetHandleForAddressRange", got, P(12), PAGE, 1);
	wrong += !is_gone(12) || !can_watch(13);
	tell("cuMemRelease", 0x71, 0, 0, 0);
	map(14, 0x71);
	wrong += !can_watch(14);
	return say("handles", 15, wrong);
}

/* ---- what another thread can see before a call has returned ---- */

static unsigned gone_during;

static void look(void)
{
	gone_during = pages_in(QS_WATCH_GONE);
}

/* Memory that is about to go is gone before the driver gives it to somebody else. */
static int ended(void)
{
	static const char *const ending[] = {"cuMemFree",
	                                     "cuMemFreeAsync",
	                                     "cuMemUnmap",
	                                     "cuMemSetAccess",
	                                     "cuGraphicsMapResources",
	                                     "cuGraphicsUnmapResources",
	                                     "cuIpcCloseMemHandle",
	                                     "cuCtxDestroy",
	                                     "cuCtxDetach",
	                                     "cuDevicePrimaryCtxReset"};
	const size_t count = sizeof ending / sizeof *ending;
	size_t wrong = 0;
	set_during(look);
	for (size_t i = 0; i < count; i++) {
		const struct row *row = row_of(ending[i]);
		function *found = NULL;
		wrong += ask_driver(ending[i], &found, 13000, 0, NULL) != 0;
		call(found, row->argument);
		if (gone_during != row->gone)
			wrong++, printf("%s: gone %x during it\n", ending[i], gone_during);
		restore();
	}
	return say("ended", count, wrong);
}

static function *launch_again;

/* A launch of the function with fewer parameters that another thread got under the old handle. */
static void launch_another(void)
{
	static uint64_t argument;
	static const word params[2] = {(word)&argument, 1}; /* no address */
	set_during(NULL);
	set_parameters(1);
	call(launch_again, (const word[WORDS]){0x40, 1, 1, 1, 1, 1, 1, 0, 1, (word)params});
}

/* How an unloaded function took its arguments is not how the next one under its handle does. */
static int reused(void)
{
	static const char *const unloading[] = {"cuModuleUnload", "cuLibraryUnload",
	                                        "cuCtxDestroy_v2", "cuCtxDetach",
	                                        "cuDevicePrimaryCtxReset_v2"};
	const size_t count = sizeof unloading / sizeof *unloading;
	static uint64_t argument;
	static const word params[2] = {(word)&argument, (word)&argument};
	launch_again = (function *)find(driver(), "cuLaunchKernel");
	for (size_t i = 0; i < count; i++) {
		function *unload = (function *)find(driver(), unloading[i]);
		set_parameters(2);
		call(launch_again, (const word[WORDS]){0x40, 1, 1, 1, 1, 1, 1, 0, 1, (word)params});
		set_during(launch_another);
		call(unload, (const word[WORDS]){1});
		restore();
	}
	return say("reused", count, 0);
}

/* ---- fork ---- */

#define FORKS 300

static _Atomic bool stop;

static void *launch_graphs(void *launch)
{
	while (!stop)
		call((function *)launch, row_of("cuGraphLaunch")->argument);
	return NULL;
}

/* True if the child, which has one thread, is done in time. */
static bool child_ends(function *destroy)
{
	int status = -1;
	pid_t child = fork();
	if (!child) {
		alarm(20);
		call(destroy, row_of("cuGraphExecDestroy")->argument);
		_exit(0);
	}
	return child > 0 && waitpid(child, &status, 0) == child && !status;
}

/* A child of a process that made no product destroys its graphs, as it may at its exit, whatever
 * the parent's threads were at. */
static int forked(void)
{
	pthread_t thread;
	bool good = true;
	function *destroy = (function *)find(driver(), "cuGraphExecDestroy");
	pthread_create(&thread, NULL, launch_graphs, find(driver(), "cuGraphLaunch"));
	for (int i = 0; i < FORKS && good; i++)
		good = child_ends(destroy);
	stop = true;
	pthread_join(thread, NULL);
	return say("forked", 1, !good);
}

/* ---- cost ---- */

#define PARAMETERS 16
#define WATCHES    1000

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

/* Nanoseconds of a launch with these arguments: the least of many batches. */
static double launch_cost(function *launch, uint64_t *arguments)
{
	double least = 1e30;
	word params[PARAMETERS];
	for (int i = 0; i < PARAMETERS; i++)
		params[i] = (word)&arguments[i];
	const word a[WORDS] = {0x40, 1, 1, 1, 1, 1, 1, 0, 1, (word)params};
	for (int i = 0; i < 300; i++) {
		double start = now();
		for (int j = 0; j < 1000; j++)
			call(launch, a);
		double each = (now() - start) / 1000;
		least = each < least ? each : least;
	}
	return least;
}

/* Watches every second page from P(0) on. */
static void watch_many(void)
{
	for (int i = 0; i < WATCHES; i++)
		watch_in(P(2 * i), PAGE, P(2 * i));
}

/* Whether the stream is captured is asked of the driver once for a launch, if at all. */
static int once(void)
{
	function *launch = (function *)find(driver(), "cuLaunchKernel");
	__typeof__(recorder_last) *last = (__typeof__(last))find(driver(), "recorder_last");
	uint64_t arguments[PAGES];
	word params[PAGES];
	const word a[WORDS] = {0x40, 1, 1, 1, 1, 1, 1, 0, 1, (word)params};
	size_t wrong = 0;
	set_parameters(PAGES);
	for (int i = 0; i < PAGES; i++)
		params[i] = (word)&arguments[i];
	for (int hits = 0; hits <= PAGES; hits++) {
		for (int i = 0; i < PAGES; i++)
			arguments[i] = i < hits ? P(i) : 0;
		const long calls = last()->calls;
		call(launch, a);
		wrong += last()->calls - calls != 1 + (hits > 0);
		wrong += pages_in(QS_WATCH_SUSPECT) != (1u << hits) - 1;
		restore();
	}
	return say("once", 2 * (PAGES + 1), wrong);
}

static int cost(void)
{
	function *launch = (function *)find(driver(), "cuLaunchKernel");
	uint64_t far[PARAMETERS], near[PARAMETERS], hit[PARAMETERS], all[PARAMETERS];
	for (int i = 0; i < PARAMETERS; i++) {
		far[i] = (uint64_t)i;
		near[i] = hit[i] = i % 4 ? (uint64_t)i : P(2 * (61 * i % WATCHES) + 1);
		all[i] = P(2 * (61 * i % WATCHES));
	}
	hit[1] = P(500);
	set_parameters(PARAMETERS);
	for (int i = 0; i < PAGES; i++)
		unwatch(page[i]);
	double none = launch_cost(launch, far);
	watch_many();
	printf("nothing watched %.1f\n", none);
	printf("no address %.1f\n", launch_cost(launch, far) - none);
	printf("four addresses near %.1f\n", launch_cost(launch, near) - none);
	printf("one watched %.1f\n", launch_cost(launch, hit) - none);
	printf("all watched %.1f\n", launch_cost(launch, all) - none);
	return 0;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*run)(void);
	} modes[] = {{"name", by_name},  {"ask", by_ask},      {"unknown", unknown},
	             {"failed", failed}, {"inside", inside},   {"late", late},
	             {"shared", shared}, {"handles", handles}, {"ended", ended},
	             {"reused", reused}, {"forked", forked},   {"once", once},
	             {"cost", cost}};
	set_up();
	fill_structs();
	for (int i = 0; i < PAGES; i++)
		watch_page(i);
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
		if (argc == 2 && !strcmp(modes[i].name, argv[1]))
			return modes[i].run();
	fprintf(stderr, "track_forms: no such mode\n");
	return EXIT_FAILURE;
}
