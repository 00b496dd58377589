/* What the launch of a CUDA graph writes: the arguments of its kernels and the targets of its
 * copies, kept for each executable from the graph that it was made of.
 *
 * An executable that was not made before our eyes, that holds a node of a kind that can write
 * anywhere, or whose nodes were changed one by one is not kept: its launches make everything
 * suspect, as all launches do once there was an executable that kernels can launch. Memory that a
 * graph allocates or frees is gone at every launch, for it may be another under the same address.
 *
 * A launch reports only what hits something watched. Which that is is found once and again when
 * what is watched changes.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "intercept/driver.h"
#include "intercept/intercept.h"
#include "intercept/launch.h"
#include "operand/track.h"

#define BUCKETS     256       /* power of two                                  */
#define TOUCHES_MAX (1 << 20) /* kept in all                                  */
#define DEPTH_MAX   8         /* graphs within graphs                          */
#define WORD_LEAST  0x10000   /* arguments below are no device addresses       */

/* One thing that a launch does to memory. */
struct touch {
	enum {
		ARGUMENT, /* of a kernel: first is the word */
		WRITE,
		GONE,
		COPY /* the descriptor of a kept copy: read by a kernel of ours */
	} kind;
	uint64_t first;
	size_t bytes;
	uint64_t use; /* of an argument, see qs_track_argument */
};

/* What is known of one executable. */
struct record {
	CUgraphExec exec;
	struct touch *touches;
	size_t count;        /* touches, without those of kind COPY      */
	size_t copies;       /* touches of kind COPY, behind the others  */
	size_t room;         /* in the array                             */
	size_t hits;         /* the first so many hit what is watched... */
	uint64_t version;    /* ...in this version                       */
	struct record *next; /* in the bucket                            */
};

static struct record *buckets[BUCKETS];
static size_t kept;             /* touches in all                                 */
static _Atomic bool by_kernels; /* there was one that kernels in others can launch */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The driver does not survive, and another thread may have been at work on the lists. */
static void in_child(void)
{
	pthread_mutex_init(&lock, NULL);
	memset(buckets, 0, sizeof buckets);
	kept = 0;
}

static void register_fork(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

/* Graphs are kept, and destroyed by a child at its exit, before and without a first product. */
static void take_lock(void)
{
	pthread_once(&once, register_fork);
	pthread_mutex_lock(&lock);
}

static void give_lock(void)
{
	pthread_mutex_unlock(&lock);
}

/* ---- reading a graph ---- */

static bool add(struct record *record, struct touch touch)
{
	if (record->count == record->room) {
		size_t room = record->room ? 2 * record->room : 64;
		struct touch *grown = realloc(record->touches, room * sizeof touch);
		if (!grown || room > TOUCHES_MAX) {
			record->touches = grown ? grown : record->touches;
			return false;
		}
		record->touches = grown;
		record->room = room;
	}
	record->touches[record->count++] = touch;
	return true;
}

static bool add_extent(struct record *record, struct qs_extent extent)
{
	return !extent.bytes ||
	       add(record,
	           (struct touch){.kind = WRITE, .first = extent.first, .bytes = extent.bytes});
}

/* A kernel that is being read. */
struct reading {
	struct record *record;
	bool own;    /* a kernel of ours                            */
	int written; /* the one argument of it that counts, or -1   */
	bool full;   /* there was no room                           */
};

static void found(struct qs_scan *scan, uint64_t word, unsigned offset)
{
	struct reading *reading = scan->to;
	if (reading->own && reading->written >= 0 && !offset)
		reading->full |= !add(reading->record, (struct touch){.kind = COPY, .first = word});
	if (reading->own && (int)offset != reading->written)
		return;
	reading->full |= !add(reading->record,
	                      (struct touch){.kind = ARGUMENT,
	                                     .first = word,
	                                     .use = qs_use_of(scan->function, word, offset)});
}

typedef CUresult kernel_function(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params);
typedef CUresult attribute_function(CUgraphNode node, CUkernelNodeAttrID attribute,
                                    CUkernelNodeAttrValue *value);
typedef CUresult copy_function(CUgraphNode node, CUDA_MEMCPY3D *params);
typedef CUresult fill_function(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *params);
typedef CUresult child_function(CUgraphNode node, CUgraph *graph);
typedef CUresult alloc_function(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params);
typedef CUresult free_function(CUgraphNode node, CUdeviceptr *address);
typedef CUresult nodes_function(CUgraph graph, CUgraphNode *nodes, size_t *count);
typedef CUresult type_function(CUgraphNode node, CUgraphNodeType *type);

#if CUDA_VERSION >= 12040
/* Kernels may give it other arguments while the graph runs. */
static bool is_updatable(CUgraphNode node)
{
	attribute_function *get = QS_DRIVER(attribute_function, cuGraphKernelNodeGetAttribute);
	CUkernelNodeAttrValue value = {0};
	return get && !get(node, CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, &value) &&
	       value.deviceUpdatableKernelNode.deviceUpdatable;
}
#else
#define is_updatable(node) false
#endif

static bool read_kernel(struct record *record, CUgraphNode node)
{
	kernel_function *get = QS_DRIVER(kernel_function, cuGraphKernelNodeGetParams_v2);
	CUDA_KERNEL_NODE_PARAMS params = {0};
	struct reading reading = {.record = record};
	if (!get || get(node, &params) || is_updatable(node))
		return false;
	struct qs_scan scan = {.low = WORD_LEAST,
	                       .high = UINT64_MAX,
	                       .function = params.func ? params.func : (CUfunction)params.kern,
	                       .to = &reading,
	                       .found = found};
	reading.own = qs_track_is_own(scan.function, &reading.written);
	if (!reading.own && qs_function_is_ours(scan.function)) /* see qs_track_own_function */
		return false;
	return qs_scan_launch(&scan, params.kernelParams, params.extra) && !reading.full;
}

static bool read_copy(struct record *record, CUgraphNode node)
{
	copy_function *get = QS_DRIVER(copy_function, cuGraphMemcpyNodeGetParams);
	CUDA_MEMCPY3D params;
	return get && !get(node, &params) && add_extent(record, qs_extent_of_copy(&params));
}

static bool read_fill(struct record *record, CUgraphNode node)
{
	fill_function *get = QS_DRIVER(fill_function, cuGraphMemsetNodeGetParams);
	CUDA_MEMSET_NODE_PARAMS params;
	return get && !get(node, &params) &&
	       add_extent(record,
	                  qs_extent_of_fill(params.dst, params.pitch,
	                                    params.width * params.elementSize, params.height));
}

static bool read_alloc(struct record *record, CUgraphNode node)
{
	alloc_function *get = QS_DRIVER(alloc_function, cuGraphMemAllocNodeGetParams);
	CUDA_MEM_ALLOC_NODE_PARAMS params;
	return get && !get(node, &params) &&
	       add(record,
	           (struct touch){.kind = GONE, .first = params.dptr, .bytes = params.bytesize});
}

static bool read_free(struct record *record, CUgraphNode node)
{
	free_function *get = QS_DRIVER(free_function, cuGraphMemFreeNodeGetParams);
	CUdeviceptr address;
	return get && !get(node, &address) &&
	       add(record, (struct touch){.kind = GONE, .first = address});
}

static bool read_graph(struct record *record, CUgraph graph, int depth);

static bool read_child(struct record *record, CUgraphNode node, int depth)
{
	child_function *get = QS_DRIVER(child_function, cuGraphChildGraphNodeGetGraph);
	CUgraph graph;
	return get && depth < DEPTH_MAX && !get(node, &graph) &&
	       read_graph(record, graph, depth + 1);
}

/* False if the node may write what does not show: a conditional body, memory operations, what other
 * APIs did before a semaphore, a kind of node that is newer than this. */
static bool read_node(struct record *record, CUgraphNode node, int depth)
{
	type_function *get = QS_DRIVER(type_function, cuGraphNodeGetType);
	CUgraphNodeType type;
	if (!get || get(node, &type))
		return false;
	switch ((int)type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		return read_kernel(record, node);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return read_copy(record, node);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return read_fill(record, node);
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return read_child(record, node, depth);
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		return read_alloc(record, node);
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		return read_free(record, node);
	case CU_GRAPH_NODE_TYPE_HOST:
	case CU_GRAPH_NODE_TYPE_EMPTY:
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
		return true;
	default:
		return false;
	}
}

static bool read_graph(struct record *record, CUgraph graph, int depth)
{
	nodes_function *get = QS_DRIVER(nodes_function, cuGraphGetNodes);
	size_t count = 0;
	if (!get || get(graph, NULL, &count))
		return false;
	CUgraphNode *nodes = calloc(count + 1, sizeof *nodes);
	bool known = nodes && !get(graph, nodes, &count);
	for (size_t i = 0; known && i < count; i++)
		known = read_node(record, nodes[i], depth);
	free(nodes);
	return known;
}

/* ---- records ---- */

static struct record **bucket_of(CUgraphExec exec)
{
	uint64_t hash = (uintptr_t)exec * 0x9e3779b97f4a7c15u;
	return &buckets[hash >> 32 & (BUCKETS - 1)];
}

static void drop(struct record *record)
{
	free(record->touches);
	free(record);
}

/* Touches in all. */
static size_t size_of(const struct record *record)
{
	return record->count + record->copies;
}

/* Under the lock. */
static struct record *find(CUgraphExec exec)
{
	struct record *record = *bucket_of(exec);
	while (record && record->exec != exec)
		record = record->next;
	return record;
}

/* Under the lock. */
static struct record *take_out(CUgraphExec exec)
{
	struct record **link = bucket_of(exec);
	while (*link && (*link)->exec != exec)
		link = &(*link)->next;
	struct record *record = *link;
	if (record) {
		*link = record->next;
		kept -= size_of(record);
	}
	return record;
}

void qs_graph_forgotten(CUgraphExec exec)
{
	take_lock();
	struct record *record = take_out(exec);
	give_lock();
	if (record)
		drop(record);
}

void qs_graphs_forgotten(void)
{
	take_lock();
	for (size_t i = 0; i < BUCKETS; i++)
		while (buckets[i])
			drop(take_out(buckets[i]->exec));
	give_lock();
}

/* True if there was room. */
static bool put(struct record *record)
{
	take_lock();
	bool room = kept + size_of(record) <= TOUCHES_MAX;
	if (room) {
		struct record **bucket = bucket_of(record->exec);
		record->next = *bucket;
		*bucket = record;
		kept += size_of(record);
	}
	give_lock();
	return room;
}

/* What kernels read is no write. */
static void set_copies_apart(struct record *record)
{
	const size_t all = record->count;
	record->count = 0;
	for (size_t i = 0; i < all; i++) {
		const struct touch touch = record->touches[i];
		if (touch.kind == COPY)
			continue;
		record->touches[i] = record->touches[record->count];
		record->touches[record->count++] = touch;
	}
	record->copies = all - record->count;
}

void qs_graph_made(CUgraphExec exec, CUgraph graph)
{
	struct record *record = calloc(1, sizeof *record);
	qs_graph_forgotten(exec);
	if (!record)
		return;
	record->exec = exec;
	record->version = UINT64_MAX;
	const bool known = read_graph(record, graph, 0);
	set_copies_apart(record);
	if (!known || !put(record))
		drop(record);
}

void qs_graphs_by_kernels(void)
{
	atomic_store(&by_kernels, true);
}

/* Under the lock. NULL also where a launch may launch others. */
static struct record *find_alone(CUgraphExec exec)
{
	return atomic_load(&by_kernels) ? NULL : find(exec);
}

bool qs_graph_uses(CUgraphExec exec, uint64_t descriptor)
{
	take_lock();
	const struct record *record = find_alone(exec);
	bool uses = !record;
	for (size_t i = 0; record && i < record->copies && !uses; i++)
		uses = record->touches[record->count + i].first == descriptor;
	give_lock();
	return uses;
}

bool qs_graph_copies(CUgraphExec exec, size_t from, uint64_t *descriptors, size_t *count)
{
	const size_t room = *count;
	take_lock();
	const struct record *record = find_alone(exec);
	*count = 0;
	for (size_t i = from; record && i < record->copies && *count < room; i++)
		descriptors[(*count)++] = record->touches[record->count + i].first;
	give_lock();
	return record;
}

/* ---- launches ---- */

static bool hits(const struct touch *touch)
{
	return touch->kind == ARGUMENT ? qs_track_reaches(touch->first)
	                               : qs_track_overlaps(touch->first, touch->bytes);
}

/* Puts those first that hit what is watched now. What is watched later was not before its launch.
 */
static void sort_out(struct record *record, uint64_t version)
{
	record->hits = 0;
	record->version = version;
	for (size_t i = 0; i < record->count; i++) {
		struct touch touch = record->touches[i];
		if (!hits(&touch))
			continue;
		record->touches[i] = record->touches[record->hits];
		record->touches[record->hits++] = touch;
	}
}

static void tell(const struct touch *touch, bool captured)
{
	const void *first = (const void *)(uintptr_t)touch->first;
	if (touch->kind == ARGUMENT)
		qs_track_argument(touch->first, captured ? 0 : touch->use);
	else if (touch->kind == WRITE)
		qs_track_write(first, touch->bytes);
	else
		qs_track_gone(first, touch->bytes);
}

void qs_graph_launched(CUgraphExec exec, bool captured)
{
	uint64_t version = qs_track_version();
	take_lock();
	struct record *record = find(exec);
	if (record && record->version != version)
		sort_out(record, version);
	for (size_t i = 0; record && i < record->hits; i++)
		tell(&record->touches[i], captured);
	give_lock();
	if (!record || atomic_load(&by_kernels))
		qs_track_everything();
}
