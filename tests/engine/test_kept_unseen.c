/* Writes of a kept weight that are hard to see: by NCCL, at a second address, in graphs after
 * another context has ended or while another is current. Each scene ends in products that must be
 * those of the weight as it is then. */
#define _GNU_SOURCE
#include "kept.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softcuda/softcuda.h"

#define OFTEN 100

static struct session session;
static struct made x;

static CUdeviceptr pointer(const void *address)
{
	return (CUdeviceptr)(uintptr_t)address;
}

static void open_all(const char *shape)
{
	session_open(&session);
	product_make(&x, &shapes[atoi(shape)], 1);
	other_product(&session);
	step_begin();
}

/* Until there is a copy that nobody doubts. */
static void settle(void)
{
	for (int i = 0; i < WARMUP; i++)
		step_call(&x, &session);
	for (int i = 0; i < OFTEN; i++)
		step_submit(&x, &session);
	product_fetch(&x);
	step_begin();
}

static void submit_and_print(void)
{
	step_submit(&x, &session);
	step_print(&x);
}

static cudaGraphExec_t instance(CUgraph graph)
{
	CUgraphExec exec;
	must((int)cuGraphInstantiate(&exec, graph, 0), "instantiate");
	return (cudaGraphExec_t)exec;
}

static CUgraph graph_of_product(void)
{
	cudaGraph_t graph;
	step_begin_capture(&session);
	step_submit(&x, &session);
	must((int)cudaStreamEndCapture(session.stream, &graph), "end");
	return (CUgraph)graph;
}

static void launch_and_print(cudaGraphExec_t exec)
{
	must((int)cudaGraphLaunch(exec, session.stream), "launch");
	step_print(&x);
}

/* ---- scenes -------------------------------------------------------------------------------------
 */

/* `nccl SHAPE`: a collective, by NCCL's kernel, whose name is that of a function of C++, and which
 * finds its buffers in memory. */
static int scene_nccl(int argc, char **argv)
{
	void **table;
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	must((int)cudaMalloc((void **)&table, 64), "malloc");
	void *target = kept_rows_of(x.da);
	must((int)cudaMemcpy(table, &target, sizeof target, cudaMemcpyHostToDevice), "copy");
	settle();
	struct {
		uint64_t comm, channels;
		uint32_t type, mask;
		uint64_t work, target;
		uint32_t value, words;
		uint64_t unused[8];
	} args = {
	        .type = 1, .work = (uintptr_t)table, .value = 0x3f803f80, .words = PART_BYTES / 4};
	product_poison(&x);
	kept_rows_are(&x, 1);
	kept_launch("_Z31ncclDevKernel_Broadcast_RING_LL24ncclDevKernelArgsStorageILm4096EE",
	            (void *[]){&args}, session.stream);
	submit_and_print();
	return 0;
}

static const CUmemLocation device = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};

/* `alias SHAPE`: the weight's memory is mapped at a second address, and written there. */
static int scene_alias(int argc, char **argv)
{
	const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
	                                        .location = device};
	const CUmemAccessDesc access = {.location = device,
	                                .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUmemGenericAllocationHandle handle;
	CUdeviceptr first, second;
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	must((int)cuMemAddressReserve(&first, BYTES, 0, 0, 0), "reserve");
	must((int)cuMemAddressReserve(&second, BYTES, 0, 0, 0), "reserve");
	must((int)cuMemCreate(&handle, BYTES, &properties, 0), "create");
	must((int)cuMemMap(first, BYTES, 0, handle, 0), "map");
	must((int)cuMemSetAccess(first, BYTES, &access, 1), "access");
	must((int)cuMemMap(second, BYTES, 0, handle, 0), "map");
	must((int)cuMemSetAccess(second, BYTES, &access, 1), "access");
	must((int)cudaMemcpy((void *)(uintptr_t)first, x.da, BYTES, cudaMemcpyDeviceToDevice),
	     "copy");
	x.da = (void *)(uintptr_t)first;
	settle();
	product_poison(&x);
	kept_copy(kept_rows_of((void *)(uintptr_t)second), kept_new_rows(&x), PART_BYTES,
	          session.stream);
	submit_and_print();
	return 0;
}

/* `probed SHAPE`: some library makes a context and destroys it; then a graph, and a write. */
static int scene_probed(int argc, char **argv)
{
	CUcontext mine, other;
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	settle();
	must((int)cuCtxGetCurrent(&mine), "context");
	must((int)cuCtxCreate(&other, NULL, 0, 1), "context");
	must((int)cuCtxDestroy(other), "destroy");
	must((int)cuCtxSetCurrent(mine), "context");
	settle();
	settle();
	cudaGraphExec_t exec = instance(graph_of_product());
	for (int i = 0; i < OFTEN; i++)
		must((int)cudaGraphLaunch(exec, session.stream), "launch");
	product_fetch(&x);
	for (int i = 0; i < 2; i++) {
		product_poison(&x);
		kept_copy(kept_rows_of(x.da), kept_new_rows(&x), PART_BYTES, session.stream);
		launch_and_print(exec);
	}
	return 0;
}

/* `elsewhere SHAPE`: the graph is launched while another device is current. */
static int scene_elsewhere(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	settle();
	cudaGraphExec_t exec = instance(graph_of_product());
	product_poison(&x);
	kept_copy(kept_rows_of(x.da), kept_new_rows(&x), PART_BYTES, session.stream);
	must((int)cudaSetDevice(1), "device");
	must((int)cuGraphLaunch((CUgraphExec)exec, (CUstream)session.stream), "launch");
	must((int)cudaSetDevice(0), "device");
	step_print(&x);
	return 0;
}

const struct scene scenes[] = {
        {"nccl", scene_nccl},           {"alias", scene_alias}, {"probed", scene_probed},
        {"elsewhere", scene_elsewhere}, {NULL, NULL},
};

/* ---- tests --------------------------------------------------------------------------------------
 */

static struct outcome outcome;

/* The last `count` steps of the scene are right. */
static void ends_right(const char *scene, int i, int count)
{
	const struct kind *kind = &kinds[i];
	run_kind(&outcome, kind, "tracked", "", scene, NULL, 1);
	ck_assert_int_ge(steps(&outcome), WARMUP + count);
	for (int step = steps(&outcome) - count; step < steps(&outcome); step++)
		expect_right(&outcome, kind, scene, step);
}

#define ENDS_RIGHT(name, scene, count)                                                             \
	START_TEST(name)                                                                           \
	{                                                                                          \
		ends_right(scene, _i, count);                                                      \
	}                                                                                          \
	END_TEST
ENDS_RIGHT(nccl_is_known_by_the_names_that_its_kernels_have, "nccl", 1)
ENDS_RIGHT(memory_mapped_twice_is_followed, "alias", 1)
ENDS_RIGHT(a_context_that_is_destroyed_leaves_graphs_checked, "probed", 2)
ENDS_RIGHT(a_graph_is_checked_whatever_device_is_current, "elsewhere", 1)

int main(int argc, char **argv)
{
	Suite *suite = suite_create("kept weights, hard to see");
	TCase *tcase = tcase_create("unseen");
	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, nccl_is_known_by_the_names_that_its_kernels_have, 0, KINDS);
	tcase_add_loop_test(tcase, memory_mapped_twice_is_followed, 0, KINDS);
	tcase_add_loop_test(tcase, a_context_that_is_destroyed_leaves_graphs_checked, 0, KINDS);
	tcase_add_loop_test(tcase, a_graph_is_checked_whatever_device_is_current, 0, KINDS);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
