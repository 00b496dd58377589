/* A program on the emulation: kernels, graphs and products that read or write watched memory, and
 * what becomes of the watches. `track_kernels SCENE`, under libqshim_open.so. */
#define _GNU_SOURCE
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "operand/track.h"
#include "tests/intercept/track_open.h"

#define BYTES 4096 /* of each piece of memory */
#define WORDS 64   /* that kernels write      */

static __typeof__(qs_test_watch) *watch_add;
static __typeof__(qs_test_unwatch) *unwatch;
static __typeof__(qs_test_state) *state;
static __typeof__(qs_test_clear) *clear;
static __typeof__(qs_test_outcome) *outcome;
static __typeof__(qs_test_own) *own;

static CUcontext context;
static CUstream stream;
static CUmodule module;
static CUfunction fill, copy, fill_each;
static CUdeviceptr weight, other;  /* BYTES each                    */
static struct qs_watch *watch;     /* of the second half of weight  */
static struct qs_watch *bystander; /* of other                     */
static int checks, wrong;

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		checks++;                                                                          \
		if (!(condition))                                                                  \
			wrong++, printf("line %d: %s\n", __LINE__, #condition);                    \
	} while (0)
#define MUST(call)                                                                                 \
	do {                                                                                       \
		int status_ = (int)(call);                                                         \
		if (status_)                                                                       \
			printf("line %d: %s: %d\n", __LINE__, #call, status_), exit(1);            \
	} while (0)

static void *find(const char *name)
{
	void *found = dlsym(RTLD_DEFAULT, name);
	if (found)
		return found;
	fprintf(stderr, "track_kernels: %s\n", dlerror());
	exit(3);
}

static void find_open(void)
{
	watch_add = (__typeof__(watch_add))find("qs_test_watch");
	unwatch = (__typeof__(unwatch))find("qs_test_unwatch");
	state = (__typeof__(state))find("qs_test_state");
	clear = (__typeof__(clear))find("qs_test_clear");
	outcome = (__typeof__(outcome))find("qs_test_outcome");
	own = (__typeof__(own))find("qs_test_own");
}

static void set_up(void)
{
	CUdevice device;
	find_open();
	MUST(cuInit(0));
	MUST(cuDeviceGet(&device, 0));
	MUST(cuDevicePrimaryCtxRetain(&context, device));
	MUST(cuCtxSetCurrent(context));
	MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	MUST(cuModuleLoadData(&module, "image"));
	MUST(cuModuleGetFunction(&fill, module, "softcuda_fill"));
	MUST(cuModuleGetFunction(&copy, module, "softcuda_copy"));
	MUST(cuModuleGetFunction(&fill_each, module, "softcuda_fill_each"));
	MUST(cuMemAlloc(&weight, BYTES));
	MUST(cuMemAlloc(&other, BYTES));
	watch = watch_add(weight + BYTES / 2, BYTES / 2);
	bystander = watch_add(other, BYTES);
	clear(watch);
	clear(bystander);
}

static bool take(struct qs_watch *of)
{
	bool hit = state(of) == QS_WATCH_SUSPECT;
	clear(of);
	return hit;
}

/* The weight's watch was hit and that of the other memory was not. */
static bool hit(void)
{
	bool first = take(watch), second = take(bystander);
	return first && !second;
}

static bool clean(void)
{
	return state(watch) == QS_WATCH_CLEAN && state(bystander) == QS_WATCH_CLEAN;
}

static bool everything(void)
{
	bool first = take(watch), second = take(bystander);
	return first && second;
}

/* ---- kernels ---- */

static void launch(CUfunction function, void **params)
{
	MUST(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
}

static void launch_fill(CUfunction function, CUdeviceptr target)
{
	uint32_t value = 7;
	uint64_t count = WORDS;
	launch(function, (void *[]){&target, &value, &count});
}

static void launch_copy(CUdeviceptr target, CUdeviceptr source)
{
	uint64_t bytes = WORDS;
	launch(copy, (void *[]){&target, &source, &bytes});
}

/* Memory that nobody watches. */
static CUdeviceptr scratch(void)
{
	static CUdeviceptr memory;
	if (!memory)
		MUST(cuMemAlloc(&memory, BYTES));
	return memory;
}

static void functions(void)
{
	launch_fill(fill, scratch());
	CHECK(clean());
	launch_fill(fill, weight + BYTES / 2);
	CHECK(hit());
	launch_fill(fill, weight + BYTES - 4 * WORDS);
	CHECK(hit());
	launch_fill(fill, other);
	CHECK(take(bystander) && !take(watch));
	MUST(cuCtxSynchronize());
	CHECK(clean());
}

/* What writes a tensor has its start; the watched weight may be the end of it. */
static void starts_before(void)
{
	launch_fill(fill, weight);
	CHECK(hit());
	launch_fill(fill, weight - 8); /* never run */
	CHECK(clean());
}

static void kernel_handles(void)
{
	CUlibrary library;
	CUkernel kernel;
	CUfunction function;
	MUST(cuLibraryLoadData(&library, "image", NULL, NULL, 0, NULL, NULL, 0));
	MUST(cuLibraryGetKernel(&kernel, library, "softcuda_fill"));
	launch_fill((CUfunction)kernel, scratch());
	CHECK(clean());
	launch_fill((CUfunction)kernel, weight);
	CHECK(hit());
	MUST(cuKernelGetFunction(&function, kernel));
	launch_fill(function, weight);
	CHECK(hit());
}

static void launches_by_configuration(void)
{
	CUlaunchConfig config = {1, 1, 1, 1, 1, 1, 0, stream, NULL, 0};
	uint32_t value = 7;
	uint64_t count = WORDS;
	CUdeviceptr target = weight;
	MUST(cuLaunchKernelEx(&config, fill, (void *[]){&target, &value, &count}, NULL));
	CHECK(hit());
	target = scratch();
	MUST(cuLaunchKernelEx(&config, fill, (void *[]){&target, &value, &count}, NULL));
	CHECK(clean());
}

static void launch_packed(CUdeviceptr target, size_t size)
{
	struct {
		CUdeviceptr target;
		uint32_t value;
		uint64_t count;
	} packed = {target, 7, WORDS};
	void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE,
	                 &size, CU_LAUNCH_PARAM_END};
	cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, stream, NULL, extra);
}

static void launch_copy_packed(CUdeviceptr target, CUdeviceptr source)
{
	CUdeviceptr packed[] = {target, source, WORDS};
	size_t size = sizeof packed;
	void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
	                 CU_LAUNCH_PARAM_END};
	MUST(cuLaunchKernel(copy, 1, 1, 1, 1, 1, 1, 0, stream, NULL, extra));
}

static void packed_buffers(void)
{
	launch_copy_packed(scratch(), scratch());
	CHECK(clean());
	launch_copy_packed(scratch(), weight);
	CHECK(hit());
	launch_packed(scratch(), 24);
	CHECK(clean());
	launch_packed(weight, 24);
	CHECK(hit());
	launch_packed(scratch(), 12); /* less than there are parameters */
	CHECK(everything());
}

static void structs_by_value(void)
{
	struct {
		uint32_t count, value;
		CUdeviceptr target[3];
	} each = {WORDS, 7, {scratch(), 0, scratch()}};
	launch(fill_each, (void *[]){&each});
	CHECK(clean());
	each.target[2] = weight + BYTES / 2;
	launch(fill_each, (void *[]){&each});
	CHECK(hit());
}

static void kernels_that_read_their_pointers(void)
{
	static const char *const names[] = {
	        "ncclDevKernel_softcuda_fill", "_Z20ncclKernel_AllReduceP9ncclDevComm",
	        "_Z30ncclSymkDevKernel_AllGather_LL20ncclSymkDevWorkArgs4"};
	for (int i = 0; i < 3; i++) {
		CUfunction nccl;
		MUST(cuModuleGetFunction(&nccl, module, names[i]));
		launch_fill(nccl, scratch());
		CHECK(everything());
	}
}

/* As NCCL gives it: what is in use of a larger struct. */
static void launch_collective(CUdeviceptr target, int type, CUdeviceptr table)
{
	struct {
		uint64_t comm, channels;
		uint32_t type, mask;
		uint64_t work, target;
		uint32_t value, words;
	} args = {1, 1, (uint32_t)type, 0, table, target, 7, WORDS};
	size_t size = sizeof args;
	CUfunction nccl;
	void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &args, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
	                 CU_LAUNCH_PARAM_END};
	MUST(cuModuleGetFunction(
	        &nccl, module,
	        "_Z31ncclDevKernel_Broadcast_RING_LL24ncclDevKernelArgsStorageILm4096EE"));
	MUST(cuLaunchKernel(nccl, 1, 1, 1, 1, 1, 1, 0, stream, NULL, extra));
}

static void kernels_that_may_hold_their_pointers(void)
{
	const CUdeviceptr table = scratch();
	launch_collective(scratch(), 0, 0);
	CHECK(clean());
	launch_collective(weight, 0, 0);
	CHECK(hit());
	MUST(cuMemcpyHtoD(table, &weight, sizeof weight));
	launch_collective(0, 1, table); /* what it writes is in memory */
	CHECK(everything());
	launch_collective(scratch(), 0, table);
	CHECK(everything());
}

static void refused_launches(void)
{
	cuLaunchKernel((CUfunction)&wrong, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
	CHECK(everything());
}

static void copies_and_fills(void)
{
	MUST(cuMemsetD8Async(weight, 0, BYTES / 2, stream));
	CHECK(clean());
	MUST(cuMemsetD32Async(weight + BYTES / 2 - 4, 0, 2, stream));
	CHECK(hit());
	MUST(cuMemcpyHtoD(weight, &checks, sizeof checks));
	CHECK(clean());
	MUST(cuMemcpyDtoDAsync(weight + BYTES - 8, scratch(), 8, stream));
	CHECK(hit());
	MUST(cuMemcpyDtoH(&(int){0}, weight + BYTES / 2, sizeof(int)));
	CHECK(clean());
}

/* ---- memory ---- */

static void freed_and_allocated_again(void)
{
	CUdeviceptr again;
	unwatch(bystander);
	bystander = watch_add(scratch(), BYTES);
	clear(bystander);
	MUST(cuMemFree(weight));
	CHECK(state(watch) == QS_WATCH_GONE);
	CHECK(state(bystander) == QS_WATCH_CLEAN);
	CHECK(!watch_add(weight, BYTES)); /* no memory of the driver's */
	for (int i = 0; i < 100; i++) {
		MUST(cuMemAlloc(&again, BYTES));
		if (again == weight)
			break;
	}
	struct qs_watch *fresh = watch_add(again, BYTES);
	CHECK(fresh);
	clear(fresh);
	launch_fill(fill, again);
	CHECK(state(fresh) == QS_WATCH_SUSPECT);
	CHECK(state(watch) == QS_WATCH_GONE);
	clear(watch);
	CHECK(state(watch) == QS_WATCH_GONE);
}

static void freed_in_a_stream(void)
{
	CUdeviceptr memory;
	MUST(cuMemAllocAsync(&memory, BYTES, stream));
	struct qs_watch *of = watch_add(memory, BYTES);
	CHECK(of);
	MUST(cuMemFreeAsync(memory, stream));
	CHECK(state(of) == QS_WATCH_GONE);
	CHECK(clean());
}

static void contexts_destroyed(void)
{
	CUcontext second;
	MUST(cuDevicePrimaryCtxRetain(&second, 0));
	MUST(cuDevicePrimaryCtxRelease(0));
	CHECK(clean()); /* held by us still */
	MUST(cuCtxCreate(&second, NULL, 0, 0));
	MUST(cuCtxDestroy(second));
	CHECK(state(watch) == QS_WATCH_GONE && state(bystander) == QS_WATCH_GONE);
}

/* ---- readers ---- */

/* So many uses that read the weight, each verified; how many made it suspect. */
static int read_often(int times)
{
	int suspects = 0;
	for (int i = 0; i < times; i++) {
		launch_copy(scratch(), weight + BYTES / 2);
		if (!take(watch))
			continue;
		outcome(watch, true);
		suspects++;
	}
	return suspects;
}

static void readers_are_learnt(void)
{
	CHECK(read_often(20) == 8);
	CHECK(clean());
	launch_copy(weight + BYTES / 2, scratch()); /* the same function */
	CHECK(hit());
	outcome(watch, true);
	launch_fill(fill, weight);
	CHECK(hit());
	CHECK(read_often(5) == 0);
}

static void readers_that_write_are_readers_no_more(void)
{
	CHECK(read_often(9) == 8);
	clear(watch);
	outcome(watch, false);
	CHECK(read_often(20) == 20);
}

/* Handles of functions may be used again. */
static void readers_are_forgotten_when_modules_go(void)
{
	CUmodule second;
	CHECK(read_often(9) == 8);
	MUST(cuModuleLoadData(&second, "image"));
	MUST(cuModuleUnload(second));
	CHECK(read_often(9) == 8);
}

/* ---- graphs ---- */

static void begin(void)
{
	MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
}

static CUgraph end(void)
{
	CUgraph graph;
	MUST(cuStreamEndCapture(stream, &graph));
	clear(watch); /* the capture itself made it suspect */
	clear(bystander);
	return graph;
}

static CUgraphExec instantiate(CUgraph graph)
{
	CUgraphExec exec;
	MUST(cuGraphInstantiate(&exec, graph, 0));
	CHECK(clean());
	return exec;
}

static CUgraphExec instance_of_fill(CUdeviceptr target)
{
	begin();
	launch_fill(fill, target);
	return instantiate(end());
}

static void launch_graph(CUgraphExec exec)
{
	MUST(cuGraphLaunch(exec, stream));
}

static void captured_graphs(void)
{
	CUgraphExec writer = instance_of_fill(weight), writes_other = instance_of_fill(scratch());
	for (int i = 0; i < 3; i++) {
		launch_graph(writer);
		CHECK(hit());
		launch_graph(writes_other);
		CHECK(clean());
	}
	begin();
	MUST(cuMemsetD8Async(weight + BYTES - 1, 0, 1, stream));
	MUST(cuMemcpyDtoDAsync(scratch(), weight, 8, stream));
	CUgraphExec filler = instantiate(end());
	begin();
	MUST(cuMemcpyDtoDAsync(other, scratch(), 8, stream));
	CUgraphExec copier = instantiate(end());
	launch_graph(filler);
	CHECK(hit());
	launch_graph(copier);
	CHECK(take(bystander) && !take(watch));
}

static CUDA_KERNEL_NODE_PARAMS node_params(CUdeviceptr *target)
{
	static __thread uint32_t value = 7;
	static __thread uint64_t count = WORDS;
	static __thread void *params[3];
	params[0] = target;
	params[1] = &value;
	params[2] = &count;
	return (CUDA_KERNEL_NODE_PARAMS){.func = fill,
	                                 .gridDimX = 1,
	                                 .gridDimY = 1,
	                                 .gridDimZ = 1,
	                                 .blockDimX = 1,
	                                 .blockDimY = 1,
	                                 .blockDimZ = 1,
	                                 .kernelParams = params};
}

static CUgraph graph_of_fill(CUdeviceptr target)
{
	CUgraph graph;
	CUgraphNode node;
	CUDA_KERNEL_NODE_PARAMS params = node_params(&target);
	MUST(cuGraphCreate(&graph, 0));
	MUST(cuGraphAddKernelNode(&node, graph, NULL, 0, &params));
	return graph;
}

static void graphs_made_by_hand(void)
{
	CUgraphNode node;
	CUgraph graph = graph_of_fill(scratch());
	CUDA_MEMSET_NODE_PARAMS set = {
	        .dst = weight + BYTES / 2, .elementSize = 4, .width = 1, .height = 1};
	launch_graph(instantiate(graph));
	CHECK(clean());
	launch_graph(instantiate(graph_of_fill(weight)));
	CHECK(hit());
	MUST(cuGraphAddMemsetNode(&node, graph, NULL, 0, &set, context));
	launch_graph(instantiate(graph));
	CHECK(hit());
	CUDA_MEMCPY3D params = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
	                        .srcDevice = scratch(),
	                        .dstMemoryType = CU_MEMORYTYPE_DEVICE,
	                        .dstDevice = other,
	                        .WidthInBytes = 8,
	                        .Height = 1,
	                        .Depth = 1};
	MUST(cuGraphAddMemcpyNode(&node, graph, NULL, 0, &params, context));
	launch_graph(instantiate(graph));
	CHECK(everything());
}

static void graphs_within_graphs(void)
{
	CUgraph outer, middle;
	CUgraphNode node;
	MUST(cuGraphCreate(&outer, 0));
	MUST(cuGraphCreate(&middle, 0));
	MUST(cuGraphAddChildGraphNode(&node, middle, NULL, 0, graph_of_fill(weight)));
	MUST(cuGraphAddChildGraphNode(&node, outer, NULL, 0, middle));
	launch_graph(instantiate(outer));
	CHECK(hit());
	for (int i = 0; i < 10; i++) { /* deeper than is followed */
		CUgraph inner = outer;
		MUST(cuGraphCreate(&outer, 0));
		MUST(cuGraphAddChildGraphNode(&node, outer, NULL, 0, inner));
	}
	launch_graph(instantiate(outer));
	CHECK(everything());
}

static void graphs_updated(void)
{
	CUgraphExecUpdateResultInfo result;
	CUgraph two = graph_of_fill(scratch());
	CUgraphExec exec = instantiate(graph_of_fill(scratch()));
	CUgraphNode node;
	MUST(cuGraphExecUpdate(exec, graph_of_fill(weight), &result));
	launch_graph(exec);
	CHECK(hit());
	MUST(cuStreamSynchronize(stream));
	MUST(cuGraphExecUpdate(exec, graph_of_fill(scratch()), &result));
	launch_graph(exec);
	CHECK(clean());
	MUST(cuStreamSynchronize(stream));
	MUST(cuGraphAddChildGraphNode(&node, two, NULL, 0, graph_of_fill(scratch())));
	CHECK(cuGraphExecUpdate(exec, two, &result) == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
	launch_graph(exec);
	CHECK(everything());
}

static void graphs_edited(void)
{
	CUgraph graph = graph_of_fill(scratch());
	CUgraphExec exec = instantiate(graph);
	CUgraphNode node;
	size_t count = 1;
	CUdeviceptr target = weight;
	CUDA_KERNEL_NODE_PARAMS params = node_params(&target);
	MUST(cuGraphGetNodes(graph, &node, &count));
	launch_graph(exec);
	CHECK(clean());
	MUST(cuStreamSynchronize(stream));
	MUST(cuGraphExecKernelNodeSetParams(exec, node, &params));
	launch_graph(exec);
	CHECK(everything());
}

static void graphs_destroyed(void)
{
	for (int i = 0; i < 50; i++) { /* addresses are used again */
		CUdeviceptr target = i % 2 ? weight : scratch();
		CUgraphExec exec = instantiate(graph_of_fill(target));
		launch_graph(exec);
		CHECK(target == weight ? hit() : clean());
		MUST(cuStreamSynchronize(stream));
		MUST(cuGraphExecDestroy(exec));
	}
}

/* A kernel in a graph may launch any graph that was made for that. */
static void made_for_kernels(bool by_params)
{
	CUgraphExec exec = instantiate(graph_of_fill(scratch())), made;
	CUDA_GRAPH_INSTANTIATE_PARAMS params = {.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD};
	MUST(cuGraphInstantiateWithParams(&made, graph_of_fill(weight), &params));
	launch_graph(exec);
	CHECK(clean());
	params.flags = CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH;
	if (by_params)
		MUST(cuGraphInstantiateWithParams(&made, graph_of_fill(weight), &params));
	else
		MUST(cuGraphInstantiate(&made, graph_of_fill(weight), params.flags));
	launch_graph(exec);
	CHECK(everything());
}

static void graphs_launched_by_kernels(void)
{
	made_for_kernels(false);
}

static void graphs_launched_by_kernels_by_parameters(void)
{
	made_for_kernels(true);
}

/* The executable is destroyed by a form of the function that is not known: no record holds. */
static void graphs_destroyed_out_of_sight(void)
{
	CUgraphExec first = instantiate(graph_of_fill(scratch()));
	CUgraphExec second = instantiate(graph_of_fill(scratch()));
	CUresult (*destroy)(CUgraphExec exec);
	MUST(cuGetProcAddress("cuGraphExecDestroy", (void **)&destroy, 14000, 0, NULL));
	MUST(destroy(first));
	CHECK(state(watch) == QS_WATCH_GONE);
	unwatch(watch);
	watch = watch_add(weight, BYTES);
	clear(watch);
	launch_graph(second);
	CHECK(take(watch));
}

static void graphs_older_than_any_watch(void)
{
	unwatch(watch);
	unwatch(bystander);
	CUgraph graph = graph_of_fill(weight), harmless = graph_of_fill(scratch());
	CUgraphExec exec, harmless_exec;
	MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
	MUST(cuGraphInstantiateWithFlags(&harmless_exec, harmless, 0));
	launch_graph(exec);
	watch = watch_add(weight + BYTES / 2, BYTES / 2);
	bystander = watch_add(other, BYTES);
	clear(watch);
	clear(bystander);
	launch_graph(harmless_exec);
	CHECK(clean());
	launch_graph(exec);
	CHECK(hit());
	unwatch(watch);
	watch = watch_add(scratch(), BYTES);
	clear(watch);
	launch_graph(exec);
	CHECK(clean());
	launch_graph(harmless_exec);
	CHECK(hit());
}

static void memory_of_graphs(void)
{
	CUdeviceptr memory;
	begin();
	MUST(cuMemAllocAsync(&memory, BYTES, stream));
	MUST(cuMemFreeAsync(memory, stream));
	CUgraphExec exec = instantiate(end());
	struct qs_watch *of = watch_add(memory, BYTES);
	CHECK(of);
	clear(of);
	launch_graph(exec);
	CHECK(state(of) == QS_WATCH_GONE);
	CHECK(clean());
}

static void graphs_with_nodes_of_other_kinds(void)
{
	begin();
	MUST(cuLaunchHostFunc(stream, (CUhostFn)clear, watch));
	launch_graph(instantiate(end()));
	CHECK(clean());
}

static void readers_in_graphs(void)
{
	int suspects = 0;
	begin();
	launch_copy(scratch(), weight + BYTES / 2);
	CUgraphExec exec = instantiate(end());
	for (int i = 0; i < 20; i++) {
		launch_graph(exec);
		if (!take(watch))
			continue;
		suspects++;
		outcome(watch, true);
	}
	CHECK(suspects == 8);
}

/* What is captured did not run: that nothing changed says nothing. */
static void captures_teach_nothing(void)
{
	for (int i = 0; i < 20; i++) {
		begin();
		launch_copy(scratch(), weight + BYTES / 2);
		MUST(cuGraphDestroy(end()));
		outcome(watch, true);
	}
	launch_copy(scratch(), weight + BYTES / 2);
	CHECK(hit());
}

/* Whether a stream is captured is asked at hits. */
static void captures_are_not_disturbed(void)
{
	CUstream blocking;
	CUgraph graph;
	CUdeviceptr target = scratch(), source = weight;
	MUST(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
	MUST(cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_GLOBAL));
	uint64_t bytes = WORDS;
	void *params[] = {&target, &source, &bytes};
	MUST(cuLaunchKernel(copy, 1, 1, 1, 1, 1, 1, 0, blocking, params, NULL));
	CHECK(hit());
	MUST(cuLaunchKernel(copy, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
	CHECK(hit());
	MUST(cuStreamEndCapture(blocking, &graph));
	MUST(cuLaunchKernel(copy, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
	CHECK(hit());
}

static void kernels_of_ours_in_graphs(void)
{
	own(copy, 0);
	begin();
	launch_copy(scratch(), weight + BYTES / 2);
	CUgraphExec reads = instantiate(end());
	begin();
	launch_copy(weight, scratch());
	CUgraphExec writes = instantiate(end());
	own(copy, -1);
	begin();
	launch_copy(weight, scratch());
	CUgraphExec silent = instantiate(end());
	launch_graph(reads);
	CHECK(clean());
	launch_graph(writes);
	CHECK(hit());
	launch_graph(silent);
	CHECK(clean());
}

/* ---- products ---- */

#define SIDE 16

static cublasHandle_t handle;
static const float one = 1.0f, zero = 0.0f;

static void gemm(CUdeviceptr a, CUdeviceptr c)
{
	MUST(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, SIDE, SIDE, SIDE, &one, (void *)a,
	                  CUDA_R_16BF, SIDE, (void *)a, CUDA_R_16BF, SIDE, &zero, (void *)c,
	                  CUDA_R_16BF, SIDE, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

static void products(void)
{
	const CUdeviceptr half = weight + BYTES / 2;
	MUST(cublasCreate(&handle));
	clear(watch), clear(bystander);
	gemm(half, scratch());
	CHECK(clean());
	gemm(scratch(), half);
	CHECK(hit());
	gemm(scratch(), weight); /* ends before it */
	CHECK(clean());
	MUST(cublasGemmStridedBatchedEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, SIDE, SIDE, SIDE, &one,
	                                (void *)scratch(), CUDA_R_16BF, SIDE, 0, (void *)scratch(),
	                                CUDA_R_16BF, SIDE, 0, &zero, (void *)weight, CUDA_R_16BF,
	                                SIDE, BYTES / 4, 2, CUBLAS_COMPUTE_32F,
	                                CUBLAS_GEMM_DEFAULT));
	CHECK(hit());
	MUST(cublasSgemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, SIDE, SIDE, SIDE, &one,
	                   (void *)scratch(), CUDA_R_16BF, SIDE, (void *)scratch(), CUDA_R_16BF,
	                   SIDE, &zero, (void *)other, CUDA_R_16BF, SIDE));
	CHECK(take(bystander) && !take(watch));
	CHECK(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, SIDE, SIDE, -1, &one, NULL,
	                   CUDA_R_16BF, SIDE, NULL, CUDA_R_16BF, SIDE, &zero, NULL, CUDA_R_16BF,
	                   SIDE, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
	CHECK(everything());
}

static void products_of_arrays(void)
{
	CUdeviceptr list;
	MUST(cublasCreate(&handle));
	MUST(cuMemAlloc(&list, BYTES));
	CUdeviceptr pointers[] = {scratch(), scratch()};
	MUST(cuMemcpyHtoD(list, pointers, sizeof pointers));
	clear(watch), clear(bystander);
	MUST(cublasGemmBatchedEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, SIDE, SIDE, SIDE, &one,
	                         (const void *const *)list, CUDA_R_16BF, SIDE,
	                         (const void *const *)list, CUDA_R_16BF, SIDE, &zero,
	                         (void *const *)list, CUDA_R_16BF, SIDE, 1, CUBLAS_COMPUTE_32F,
	                         CUBLAS_GEMM_DEFAULT));
	CHECK(everything());
}

/* Not hooked, so its launches are looked at like any other. */
static void products_not_hooked(void)
{
	MUST(cublasCreate(&handle));
	clear(watch), clear(bystander);
	MUST(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 8, 8, 8, &one, (float *)scratch(), 8,
	                 (float *)scratch(), 8, &zero, (float *)scratch(), 8));
	CHECK(clean());
	MUST(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 8, 8, 8, &one, (float *)scratch(), 8,
	                 (float *)scratch(), 8, &zero, (float *)weight, 8));
	CHECK(hit());
}

static cublasLtMatmulDesc_t desc;

static void matmul(CUdeviceptr a, CUdeviceptr d, CUdeviceptr workspace, size_t bytes)
{
	cublasLtMatrixLayout_t layout;
	MUST(cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, SIDE, SIDE, SIDE));
	MUST(cublasLtMatmul((cublasLtHandle_t)handle, desc, &one, (void *)a, layout, (void *)a,
	                    layout, &zero, (void *)d, layout, (void *)d, layout, NULL,
	                    (void *)workspace, bytes, stream));
	MUST(cublasLtMatrixLayoutDestroy(layout));
}

static void epilogue(cublasLtEpilogue_t of)
{
	MUST(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &of, sizeof of));
}

static void products_of_cublaslt(void)
{
	const CUdeviceptr half = weight + BYTES / 2;
	const int64_t ld = SIDE;
	MUST(cublasCreate(&handle));
	MUST(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
	clear(watch), clear(bystander);
	matmul(half, scratch(), 0, 0);
	CHECK(clean());
	matmul(scratch(), half, 0, 0);
	CHECK(hit());
	matmul(scratch(), weight, 0, 0);
	CHECK(clean());
	matmul(scratch(), scratch(), half, 256);
	CHECK(hit());
	epilogue(CUBLASLT_EPILOGUE_BIAS);
	MUST(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &half,
	                                    sizeof half));
	matmul(scratch(), scratch(), 0, 0);
	CHECK(clean()); /* a bias is read */
	epilogue(CUBLASLT_EPILOGUE_GELU_AUX);
	MUST(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &half,
	                                    sizeof half));
	MUST(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld,
	                                    sizeof ld));
	matmul(scratch(), scratch(), 0, 0);
	CHECK(hit());
}

/* ---- threads ---- */

#define THREADS 8
#define ROUNDS  1000

static _Atomic bool over;
static _Atomic int missed;

static void *submit(void *unused)
{
	CUdeviceptr mine;
	CUstream of_thread;
	MUST(cuCtxSetCurrent(context));
	MUST(cuMemAlloc(&mine, BYTES));
	MUST(cuStreamCreate(&of_thread, CU_STREAM_NON_BLOCKING));
	CUgraphExec exec;
	MUST(cuGraphInstantiate(&exec, graph_of_fill(mine), 0));
	for (int i = 0; i < ROUNDS; i++) {
		uint32_t value = 7;
		uint64_t count = 1;
		struct qs_watch *of = watch_add(mine, BYTES);
		clear(of);
		if (i % 3 == 0)
			MUST(cuGraphLaunch(exec, of_thread));
		else if (i % 3 == 1)
			MUST(cuMemsetD8Async(mine, 0, 1, of_thread));
		else
			MUST(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, of_thread,
			                    (void *[]){&mine, &value, &count}, NULL));
		atomic_fetch_add(&missed, state(of) != QS_WATCH_SUSPECT);
		if (i % 50 == 0)
			MUST(cuStreamSynchronize(of_thread));
		unwatch(of);
	}
	return unused;
}

static void *unload(void *unused)
{
	MUST(cuCtxSetCurrent(context));
	while (!atomic_load(&over)) {
		CUmodule second;
		MUST(cuModuleLoadData(&second, "image"));
		MUST(cuModuleUnload(second));
	}
	return unused;
}

static void threads(void)
{
	pthread_t thread[THREADS], unloader;
	pthread_create(&unloader, NULL, unload, NULL);
	for (int i = 0; i < THREADS; i++)
		pthread_create(&thread[i], NULL, submit, NULL);
	for (int i = 0; i < THREADS; i++)
		pthread_join(thread[i], NULL);
	atomic_store(&over, true);
	pthread_join(unloader, NULL);
	CHECK(!atomic_load(&missed));
	CHECK(everything()); /* the modules may have had variables */
}

/* ---- all ---- */

int main(int argc, char **argv)
{
#define SCENE(name)                                                                                \
	{                                                                                          \
#name, name                                                                        \
	}
	static const struct {
		const char *name;
		void (*run)(void);
	} scenes[] = {
	        SCENE(functions),
	        SCENE(starts_before),
	        SCENE(kernel_handles),
	        SCENE(launches_by_configuration),
	        SCENE(packed_buffers),
	        SCENE(structs_by_value),
	        SCENE(kernels_that_read_their_pointers),
	        SCENE(kernels_that_may_hold_their_pointers),
	        SCENE(refused_launches),
	        SCENE(copies_and_fills),
	        SCENE(freed_and_allocated_again),
	        SCENE(freed_in_a_stream),
	        SCENE(contexts_destroyed),
	        SCENE(readers_are_learnt),
	        SCENE(readers_that_write_are_readers_no_more),
	        SCENE(readers_are_forgotten_when_modules_go),
	        SCENE(captured_graphs),
	        SCENE(graphs_made_by_hand),
	        SCENE(graphs_within_graphs),
	        SCENE(graphs_updated),
	        SCENE(graphs_edited),
	        SCENE(graphs_destroyed),
	        SCENE(graphs_launched_by_kernels),
	        SCENE(graphs_launched_by_kernels_by_parameters),
	        SCENE(graphs_destroyed_out_of_sight),
	        SCENE(graphs_older_than_any_watch),
	        SCENE(memory_of_graphs),
	        SCENE(graphs_with_nodes_of_other_kinds),
	        SCENE(readers_in_graphs),
	        SCENE(captures_teach_nothing),
	        SCENE(captures_are_not_disturbed),
	        SCENE(kernels_of_ours_in_graphs),
	        SCENE(products),
	        SCENE(products_of_arrays),
	        SCENE(products_not_hooked),
	        SCENE(products_of_cublaslt),
	        SCENE(threads),
	};
#undef SCENE
	for (size_t i = 0; argc == 2 && i < sizeof scenes / sizeof *scenes; i++) {
		if (strcmp(scenes[i].name, argv[1]))
			continue;
		set_up();
		scenes[i].run();
		printf("%s: %d checks, %d wrong\n", argv[1], checks, wrong);
		return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
	}
	for (size_t i = 0; argc == 1 && i < sizeof scenes / sizeof *scenes; i++)
		printf("%s\n", scenes[i].name);
	return argc == 1 ? EXIT_SUCCESS : EXIT_FAILURE;
}
