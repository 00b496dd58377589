/* Graphs made and changed by hand on softcuda: they run, in order, and tell their parameters. */
#include "tests/softcuda/help.h"

#include <stdio.h>
#include <string.h>

static CUstream stream;
static CUmodule module;
static CUdeviceptr memory;

static void start(void)
{
	ck_cuda(cudaSetDevice(0));
	ck_cuda(cuStreamCreate(&stream, 0));
	ck_cuda(cuModuleLoadData(&module, "image"));
	ck_cuda(cuMemAlloc(&memory, 64));
	ck_cuda(cuMemsetD8(memory, 0, 64));
	ck_cuda(cuCtxSynchronize());
}

static unsigned word(int index)
{
	ck_cuda(cuStreamSynchronize(stream));
	return ((const volatile unsigned *)(uintptr_t)memory)[index];
}

static CUfunction function(const char *name)
{
	CUfunction found;
	ck_cuda(cuModuleGetFunction(&found, module, name));
	return found;
}

/* A launch that puts `value` into one word. */
struct fill {
	CUdeviceptr target;
	uint32_t value;
	uint64_t count;
	void *params[3];
	CUDA_KERNEL_NODE_PARAMS node;
};

static const CUDA_KERNEL_NODE_PARAMS *fill_word(struct fill *fill, int index, uint32_t value)
{
	*fill = (struct fill){.target = memory + 4 * (unsigned)index, .value = value, .count = 1};
	fill->params[0] = &fill->target;
	fill->params[1] = &fill->value;
	fill->params[2] = &fill->count;
	fill->node = (CUDA_KERNEL_NODE_PARAMS){.func = function("softcuda_fill"),
	                                       .gridDimX = 1,
	                                       .gridDimY = 1,
	                                       .gridDimZ = 1,
	                                       .blockDimX = 1,
	                                       .blockDimY = 1,
	                                       .blockDimZ = 1,
	                                       .kernelParams = fill->params};
	return &fill->node;
}

static CUgraph new_graph(void)
{
	CUgraph graph;
	ck_cuda(cuGraphCreate(&graph, 0));
	return graph;
}

static CUgraphExec instantiate(CUgraph graph)
{
	CUgraphExec exec;
	ck_cuda(cuGraphInstantiate(&exec, graph, 0));
	return exec;
}

/* Word 0 is filled, copied to word 1, and overwritten, in this order. */
START_TEST(nodes_run_in_the_order_of_their_edges)
{
	CUgraph graph = new_graph();
	CUgraphNode first, second, third;
	struct fill fill;
	CUDA_MEMCPY3D copy = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
	                      .srcDevice = memory,
	                      .dstMemoryType = CU_MEMORYTYPE_DEVICE,
	                      .dstDevice = memory + 4,
	                      .WidthInBytes = 4,
	                      .Height = 1,
	                      .Depth = 1};
	CUDA_MEMSET_NODE_PARAMS set = {
	        .dst = memory, .value = 9, .elementSize = 4, .width = 1, .height = 1};
	CUcontext context;
	ck_cuda(cuCtxGetCurrent(&context));
	ck_cuda(cuGraphAddKernelNode(&first, graph, NULL, 0, fill_word(&fill, 0, 7)));
	ck_cuda(cuGraphAddMemcpyNode(&second, graph, &first, 1, &copy, context));
	ck_cuda(cuGraphAddMemsetNode(&third, graph, &second, 1, &set, context));
	ck_cuda(cuGraphLaunch(instantiate(graph), stream));
	ck_assert_uint_eq(word(1), 7);
	ck_assert_uint_eq(word(0), 9);
}
END_TEST

START_TEST(nodes_tell_their_parameters)
{
	CUgraph graph = new_graph();
	CUgraphNode node;
	struct fill fill;
	CUDA_KERNEL_NODE_PARAMS kernel;
	CUDA_MEMSET_NODE_PARAMS set = {
	        .dst = memory + 8, .value = 9, .elementSize = 2, .width = 3, .height = 1};
	CUDA_MEMCPY3D copy;
	CUcontext context;
	ck_cuda(cuCtxGetCurrent(&context));
	ck_cuda(cuGraphAddKernelNode(&node, graph, NULL, 0, fill_word(&fill, 3, 7)));
	ck_cuda(cuGraphKernelNodeGetParams(node, &kernel));
	ck_assert_ptr_eq(kernel.func, fill.node.func);
	ck_assert_uint_eq(*(CUdeviceptr *)kernel.kernelParams[0], memory + 12);
	ck_assert_int_eq(cuGraphMemcpyNodeGetParams(node, &copy), CUDA_ERROR_INVALID_VALUE);
	ck_cuda(cuGraphAddMemsetNode(&node, graph, NULL, 0, &set, context));
	memset(&set, 0, sizeof set);
	ck_cuda(cuGraphMemsetNodeGetParams(node, &set));
	ck_assert_uint_eq(set.dst, memory + 8);
	ck_assert_uint_eq(set.width * set.elementSize, 6);
}
END_TEST

START_TEST(a_child_graph_runs_as_part_of_its_parent)
{
	CUgraph inner = new_graph(), outer = new_graph(), found;
	CUgraphNode node, after;
	CUgraphNodeType type;
	struct fill fill;
	size_t count = 0;
	ck_cuda(cuGraphAddKernelNode(&node, inner, NULL, 0, fill_word(&fill, 0, 5)));
	ck_cuda(cuGraphAddChildGraphNode(&node, outer, NULL, 0, inner));
	ck_cuda(cuGraphAddKernelNode(&after, outer, &node, 1, fill_word(&fill, 0, 6)));
	ck_cuda(cuGraphDestroy(inner)); /* the node has its own */
	ck_cuda(cuGraphNodeGetType(node, &type));
	ck_assert_int_eq(type, CU_GRAPH_NODE_TYPE_GRAPH);
	ck_cuda(cuGraphChildGraphNodeGetGraph(node, &found));
	ck_cuda(cuGraphGetNodes(found, NULL, &count));
	ck_assert_uint_eq(count, 1);
	CUgraphExec exec = instantiate(outer);
	ck_cuda(cuGraphDestroy(outer));
	ck_cuda(cuGraphLaunch(exec, stream));
	ck_assert_uint_eq(word(0), 6);
	ck_cuda(cuGraphExecDestroy(exec));
}
END_TEST

START_TEST(executables_are_updated_whole_or_node_by_node)
{
	CUgraph graph = new_graph(), other = new_graph();
	CUgraphNode node;
	CUgraphExecUpdateResultInfo result;
	struct fill fill;
	ck_cuda(cuGraphAddKernelNode(&node, other, NULL, 0, fill_word(&fill, 0, 2)));
	ck_cuda(cuGraphAddKernelNode(&node, graph, NULL, 0, fill_word(&fill, 0, 1)));
	CUgraphExec exec = instantiate(graph);
	ck_cuda(cuGraphExecUpdate(exec, other, &result));
	ck_cuda(cuGraphLaunch(exec, stream));
	ck_assert_uint_eq(word(0), 2);
	ck_cuda(cuGraphExecKernelNodeSetParams(exec, node, fill_word(&fill, 0, 3)));
	ck_cuda(cuGraphLaunch(exec, stream));
	ck_assert_uint_eq(word(0), 3);
	ck_cuda(cuGraphAddKernelNode(&node, other, NULL, 0, fill_word(&fill, 1, 4)));
	ck_assert_int_eq(cuGraphExecUpdate(exec, other, &result),
	                 CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
	ck_assert_int_eq(result.result, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
}
END_TEST

START_TEST(a_struct_by_value_reaches_its_kernel)
{
	struct {
		uint32_t count, value;
		CUdeviceptr target[3];
	} each = {1, 8, {memory, 0, memory + 8}};
	ck_cuda(cuLaunchKernel(function("softcuda_fill_each"), 1, 1, 1, 1, 1, 1, 0, stream,
	                       (void *[]){&each}, NULL));
	ck_assert_uint_eq(word(0), 8);
	ck_assert_uint_eq(word(1), 0);
	ck_assert_uint_eq(word(2), 8);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("nodes");
	TCase *tcase = tcase_create("nodes");
	tcase_add_checked_fixture(tcase, start, NULL);
	tcase_add_test(tcase, nodes_run_in_the_order_of_their_edges);
	tcase_add_test(tcase, nodes_tell_their_parameters);
	tcase_add_test(tcase, a_child_graph_runs_as_part_of_its_parent);
	tcase_add_test(tcase, executables_are_updated_whole_or_node_by_node);
	tcase_add_test(tcase, a_struct_by_value_reaches_its_kernel);
	suite_add_tcase(suite, tcase);
	return qs_suite_main(suite);
}
