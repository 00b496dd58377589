/* Stream capture, graphs and user objects of softcuda, and the errors of what capture prohibits. */
#include "tests/softcuda/help.h"

#include <pthread.h>

static CUstream stream, second;
static CUdeviceptr memory;

static void start(unsigned flags)
{
	ck_cuda(cudaSetDevice(0));
	ck_cuda(cuStreamCreate(&stream, flags));
	ck_cuda(cuStreamCreate(&second, flags));
	ck_cuda(cuMemAlloc(&memory, 64));
	ck_cuda(cuMemsetD8(memory, 0, 64));
	ck_cuda(cuCtxSynchronize());
}

static volatile unsigned *words(void)
{
	return (volatile unsigned *)(uintptr_t)memory;
}

static void begin(CUstreamCaptureMode mode)
{
	ck_cuda(cuStreamBeginCapture(stream, mode));
}

static CUgraph end(void)
{
	CUgraph graph = NULL;
	ck_cuda(cuStreamEndCapture(stream, &graph));
	return graph;
}

static void ck_spoilt(void)
{
	CUgraph graph = (CUgraph)1;
	CUstreamCaptureStatus status;
	ck_cuda(cuStreamIsCapturing(stream, &status));
	ck_assert_int_eq(status, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
	ck_assert_int_eq(cuMemsetD32Async(memory, 1, 1, stream),
	                 CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	ck_assert_int_eq(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	ck_assert_ptr_null(graph);
	ck_cuda(cuStreamSynchronize(stream)); /* usable again */
}

static CUgraphExec instantiate(CUgraph graph)
{
	CUgraphExec exec = NULL;
	ck_cuda(cuGraphInstantiate(&exec, graph, 0));
	return exec;
}

static void add(CUstream to, int word, float value)
{
	static CUfunction f;
	CUmodule module;
	uint64_t target = memory + 4 * (unsigned)word, count = 1;
	void *params[] = {&target, &value, &count};
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	ck_cuda(cuThreadExchangeStreamCaptureMode(&mode));
	if (!f) {
		ck_cuda(cuModuleLoadData(&module, "image"));
		ck_cuda(cuModuleGetFunction(&f, module, "softcuda_add"));
	}
	ck_cuda(cuThreadExchangeStreamCaptureMode(&mode));
	ck_cuda(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, to, params, NULL));
}

/* The same, by a launch that may begin before the work ahead has ended. */
static CUresult add_early(float value)
{
	static CUfunction f;
	CUmodule module;
	uint64_t target = memory, count = 1;
	void *params[] = {&target, &value, &count};
	CUlaunchAttribute early = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
	                           .value.programmaticStreamSerializationAllowed = 1};
	const CUlaunchConfig config = {.gridDimX = 1,
	                               .gridDimY = 1,
	                               .gridDimZ = 1,
	                               .blockDimX = 1,
	                               .blockDimY = 1,
	                               .blockDimZ = 1,
	                               .hStream = stream,
	                               .attrs = &early,
	                               .numAttrs = 1};
	if (!f) {
		ck_cuda(cuModuleLoadData(&module, "image"));
		ck_cuda(cuModuleGetFunction(&f, module, "softcuda_add"));
	}
	return cuLaunchKernelEx(&config, f, params, NULL);
}

START_TEST(an_early_launch_is_captured_after_one_kernel)
{
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	add(stream, 0, 2);
	ck_cuda(add_early(3));
	CUgraphExec exec = instantiate(end());
	ck_cuda(cuGraphLaunch(exec, stream));
	ck_cuda(cuStreamSynchronize(stream));
	ck_assert_float_eq(((volatile float *)words())[0], 5);
	ck_assert_int_eq(softcuda_get("early_launches"), 1);
	ck_assert_int_eq(softcuda_get("early_edges"), 1);
}
END_TEST

START_TEST(an_early_launch_after_anything_else_spoils_the_capture)
{
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	if (_i == 1)
		ck_cuda(cuMemsetD32Async(memory, 1, 1, stream));
	if (_i == 2)
		add(stream, 0, 2);
	if (_i == 2)
		softcuda_set("driver", 12020);
	ck_assert_int_eq(add_early(3), CUDA_ERROR_NOT_SUPPORTED);
	ck_spoilt();
	ck_assert_int_eq(softcuda_get("early_edges"), 0);
}
END_TEST

START_TEST(captured_work_runs_once_per_launch_and_not_before)
{
	start(0);
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	add(stream, 0, 2);
	CUgraph graph = end();
	ck_cuda(cuCtxSynchronize());
	ck_assert_float_eq(((volatile float *)words())[0], 0);
	CUgraphExec exec = instantiate(graph);
	ck_cuda(cuGraphDestroy(graph));
	for (int i = 0; i < 3; i++)
		ck_cuda(cuGraphLaunch(exec, second));
	ck_cuda(cuGraphExecDestroy(exec)); /* launches in flight keep it */
	ck_cuda(cuStreamSynchronize(second));
	ck_assert_float_eq(((volatile float *)words())[0], 6);
}
END_TEST

START_TEST(a_fork_joined_by_events_is_one_graph_whose_order_is_kept)
{
	CUevent fork, join;
	start(CU_STREAM_NON_BLOCKING);
	ck_cuda(cuEventCreate(&fork, 0));
	ck_cuda(cuEventCreate(&join, 0));
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuMemsetD32Async(memory, 1, 1, stream));
	ck_cuda(cuEventRecord(fork, stream));
	ck_cuda(cuStreamWaitEvent(second, fork, 0));
	ck_cuda(cuMemcpyDtoDAsync(memory + 4, memory, 4, second));
	ck_cuda(cuEventRecord(join, second));
	ck_cuda(cuStreamWaitEvent(stream, join, 0));
	ck_cuda(cuMemcpyDtoDAsync(memory + 8, memory + 4, 4, stream));
	CUgraphExec exec = instantiate(end());
	for (int seed = 1; seed < 40; seed++) {
		softcuda_set("seed", seed);
		ck_cuda(cuMemsetD8(memory, 0, 64));
		ck_cuda(cuCtxSynchronize());
		ck_cuda(cuGraphLaunch(exec, stream));
		ck_cuda(cuStreamSynchronize(stream));
		ck_assert_uint_eq(words()[2], 1);
	}
	ck_cuda(cuStreamSynchronize(second)); /* not capturing any more */
}
END_TEST

START_TEST(branches_of_a_graph_run_in_either_order)
{
	CUevent fork, join;
	int before = 0;
	start(CU_STREAM_NON_BLOCKING);
	ck_cuda(cuEventCreate(&fork, 0));
	ck_cuda(cuEventCreate(&join, 0));
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuEventRecord(fork, stream));
	ck_cuda(cuStreamWaitEvent(second, fork, 0));
	ck_cuda(cuMemsetD32Async(memory, 1, 1, stream));
	ck_cuda(cuMemcpyDtoDAsync(memory + 4, memory, 4, second));
	ck_cuda(cuEventRecord(join, second));
	ck_cuda(cuStreamWaitEvent(stream, join, 0));
	CUgraphExec exec = instantiate(end());
	for (int seed = 1; seed <= 64; seed++) {
		softcuda_set("seed", seed * 7919);
		ck_cuda(cuMemsetD8(memory, 0, 64));
		ck_cuda(cuCtxSynchronize());
		ck_cuda(cuGraphLaunch(exec, stream));
		ck_cuda(cuStreamSynchronize(stream));
		before += words()[1] == 0;
	}
	ck_assert_int_gt(before, 5);
	ck_assert_int_lt(before, 59);
}
END_TEST

START_TEST(a_fork_that_is_not_joined_ends_the_capture_with_904)
{
	CUevent fork;
	CUgraph graph = (CUgraph)1;
	start(CU_STREAM_NON_BLOCKING);
	ck_cuda(cuEventCreate(&fork, 0));
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuEventRecord(fork, stream));
	ck_cuda(cuStreamWaitEvent(second, fork, 0));
	ck_cuda(cuMemsetD32Async(memory, 1, 1, second));
	ck_assert_int_eq(cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
	ck_assert_ptr_null(graph);
	ck_cuda(cuStreamSynchronize(second));
}
END_TEST

START_TEST(waiting_for_a_capturing_stream_or_its_context_spoils_the_capture)
{
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	ck_assert_int_eq(cuStreamSynchronize(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	ck_spoilt();
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	ck_assert_int_eq(cuStreamQuery(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	ck_spoilt();
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	ck_assert_int_eq(cuCtxSynchronize(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	ck_spoilt();
}
END_TEST

START_TEST(asking_a_capturing_stream_for_its_id_spoils_the_capture)
{
	unsigned long long id;
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	ck_assert_int_eq(cuStreamGetId(stream, &id), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	ck_spoilt();
}
END_TEST

START_TEST(allocating_spoils_a_global_capture_unless_the_thread_is_relaxed)
{
	CUdeviceptr other;
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuThreadExchangeStreamCaptureMode(&mode));
	ck_assert_int_eq(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuMemAlloc(&other, 4));
	ck_cuda(cuThreadExchangeStreamCaptureMode(&mode));
	ck_cuda(cuGraphDestroy(end()));
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	ck_cuda(cuMemAlloc(&other, 4));
	ck_cuda(cuGraphDestroy(end()));
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_assert_int_eq(cuMemAlloc(&other, 4), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	ck_spoilt();
}
END_TEST

static CUstreamCaptureMode elsewhere; /* mode of the other thread */

static void *allocate_elsewhere(void *result)
{
	CUdeviceptr other;
	CUstreamCaptureMode mode = elsewhere;
	ck_cuda(cudaSetDevice(0));
	ck_cuda(cuThreadExchangeStreamCaptureMode(&mode));
	*(CUresult *)result = cuMemAlloc(&other, 4);
	return NULL;
}

static CUresult allocate_in_a_thread(void)
{
	pthread_t thread;
	CUresult result = CUDA_SUCCESS;
	pthread_create(&thread, NULL, allocate_elsewhere, &result);
	pthread_join(thread, NULL);
	return result;
}

START_TEST(another_thread_spoils_a_global_capture_but_not_a_thread_local_one)
{
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
	ck_cuda(allocate_in_a_thread());
	ck_cuda(cuGraphDestroy(end()));
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	elsewhere = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
	ck_cuda(allocate_in_a_thread());
	ck_cuda(cuGraphDestroy(end()));
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	elsewhere = CU_STREAM_CAPTURE_MODE_GLOBAL;
	ck_assert_int_eq(allocate_in_a_thread(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	ck_spoilt();
}
END_TEST

START_TEST(the_legacy_stream_is_unusable_while_a_blocking_stream_captures)
{
	CUstreamCaptureStatus status;
	start(0);
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	ck_assert_int_eq(cuStreamIsCapturing(NULL, &status), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	ck_cuda(cuGraphDestroy(end())); /* asking did no harm */
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	ck_assert_int_eq(cuMemsetD32Async(memory, 1, 1, NULL), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	ck_spoilt();
}
END_TEST

START_TEST(the_legacy_stream_works_while_a_nonblocking_stream_captures)
{
	CUstreamCaptureStatus status;
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuMemsetD32Async(memory, 1, 1, NULL));
	ck_cuda(cuStreamIsCapturing(NULL, &status));
	ck_assert_int_eq(status, CU_STREAM_CAPTURE_STATUS_NONE);
	ck_cuda(cuGraphDestroy(end()));
	ck_assert_int_eq(cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_RELAXED),
	                 CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}
END_TEST

START_TEST(dependencies_on_uncaptured_work_are_refused_with_905)
{
	CUevent event;
	start(CU_STREAM_NON_BLOCKING);
	ck_cuda(cuEventCreate(&event, 0));
	ck_cuda(cuEventRecord(event, second));
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_assert_int_eq(cuStreamWaitEvent(stream, event, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
	ck_spoilt();
}
END_TEST

START_TEST(two_captures_cannot_be_merged)
{
	CUevent event;
	CUgraph graph;
	start(CU_STREAM_NON_BLOCKING);
	ck_cuda(cuEventCreate(&event, 0));
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuStreamBeginCapture(second, CU_STREAM_CAPTURE_MODE_GLOBAL));
	ck_cuda(cuEventRecord(event, second));
	ck_assert_int_eq(cuStreamWaitEvent(stream, event, 0), CUDA_ERROR_STREAM_CAPTURE_MERGE);
	ck_assert_int_eq(cuStreamEndCapture(second, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	ck_spoilt();
}
END_TEST

START_TEST(a_capture_ends_where_and_by_whom_it_was_begun)
{
	CUevent fork;
	CUgraph graph;
	start(CU_STREAM_NON_BLOCKING);
	ck_assert_int_eq(cuStreamEndCapture(stream, &graph), CUDA_ERROR_ILLEGAL_STATE);
	ck_cuda(cuEventCreate(&fork, 0));
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_assert_int_eq(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL),
	                 CUDA_ERROR_ILLEGAL_STATE);
	ck_cuda(cuEventRecord(fork, stream));
	ck_cuda(cuStreamWaitEvent(second, fork, 0));
	ck_assert_int_eq(cuStreamEndCapture(second, &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	ck_spoilt();
}
END_TEST

static void *end_elsewhere(void *result)
{
	CUgraph graph;
	*(CUresult *)result = cuStreamEndCapture(stream, &graph);
	return NULL;
}

START_TEST(only_a_relaxed_capture_can_be_ended_by_another_thread)
{
	pthread_t thread;
	CUresult result = CUDA_SUCCESS;
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
	pthread_create(&thread, NULL, end_elsewhere, &result);
	pthread_join(thread, NULL);
	ck_assert_int_eq(result, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
	ck_cuda(cuGraphDestroy(end()));
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	pthread_create(&thread, NULL, end_elsewhere, &result);
	pthread_join(thread, NULL);
	ck_cuda(result);
}
END_TEST

START_TEST(a_captured_event_can_be_neither_queried_nor_waited_for)
{
	CUevent event;
	start(CU_STREAM_NON_BLOCKING);
	ck_cuda(cuEventCreate(&event, 0));
	begin(CU_STREAM_CAPTURE_MODE_RELAXED);
	ck_cuda(cuEventRecord(event, stream));
	ck_assert_int_eq(cuEventQuery(event), CUDA_ERROR_CAPTURED_EVENT);
	ck_spoilt();
	ck_assert_int_eq(cuEventSynchronize(event), CUDA_ERROR_CAPTURED_EVENT);
	ck_cuda(cuEventRecord(event, stream));
	ck_cuda(cuEventSynchronize(event));
}
END_TEST

START_TEST(capture_info_names_the_capture_and_its_graph)
{
	CUstreamCaptureStatus status;
	cuuint64_t first = 0, again = 0;
	CUgraph graph = NULL;
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuStreamGetCaptureInfo(stream, &status, &first, &graph, NULL, NULL, NULL));
	ck_assert_int_eq(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
	ck_assert_ptr_eq(end(), graph);
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuStreamGetCaptureInfo(stream, &status, &again, NULL, NULL, NULL, NULL));
	ck_assert_uint_ne(first, again);
	end();
	ck_cuda(cuStreamGetCaptureInfo(stream, &status, &again, NULL, NULL, NULL, NULL));
	ck_assert_int_eq(status, CU_STREAM_CAPTURE_STATUS_NONE);
}
END_TEST

START_TEST(the_nodes_of_a_graph_show_the_arguments_of_launches)
{
	CUgraphNode nodes[4];
	size_t count = 4;
	CUgraphNodeType type;
	CUDA_KERNEL_NODE_PARAMS params;
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuMemsetD32Async(memory, 1, 1, stream));
	add(stream, 3, 1.5f);
	ck_cuda(cuGraphGetNodes(end(), nodes, &count));
	ck_assert_uint_eq(count, 2);
	ck_cuda(cuGraphNodeGetType(nodes[0], &type));
	ck_assert_int_eq(type, CU_GRAPH_NODE_TYPE_MEMSET);
	ck_cuda(cuGraphKernelNodeGetParams(nodes[1], &params));
	ck_assert_uint_eq(*(uint64_t *)params.kernelParams[0], memory + 12);
	ck_assert_float_eq(*(float *)params.kernelParams[1], 1.5f);
}
END_TEST

static void CUDA_CB gone(void *data)
{
	size_t total, available;
	++*(int *)data;
	cuMemGetInfo(&available, &total); /* must not deadlock */
}

static CUuserObject object(int *destroyed)
{
	CUuserObject result = NULL;
	ck_cuda(cuUserObjectCreate(&result, destroyed, gone, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC));
	return result;
}

START_TEST(a_user_object_lives_as_long_as_the_graph_and_its_executables)
{
	int destroyed = 0;
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuMemsetD32Async(memory, 1, 1, stream));
	CUgraph graph = end();
	ck_cuda(cuGraphRetainUserObject(graph, object(&destroyed), 1, CU_GRAPH_USER_OBJECT_MOVE));
	CUgraphExec first = instantiate(graph), last = instantiate(graph);
	ck_cuda(cuGraphDestroy(graph));
	ck_cuda(cuGraphExecDestroy(first));
	ck_cuda(cuGraphLaunch(last, stream));
	ck_cuda(cuGraphExecDestroy(last));
	ck_assert_int_eq(destroyed, 0);
	ck_cuda(cuStreamSynchronize(stream));
	ck_assert_int_eq(destroyed, 1);
}
END_TEST

START_TEST(a_user_object_that_was_not_moved_keeps_the_programs_reference)
{
	int destroyed = 0;
	CUgraph graph;
	start(0);
	ck_cuda(cuGraphCreate(&graph, 0));
	CUuserObject shared = object(&destroyed);
	ck_cuda(cuGraphRetainUserObject(graph, shared, 1, 0));
	ck_cuda(cuGraphDestroy(graph));
	ck_assert_int_eq(destroyed, 0);
	ck_cuda(cuUserObjectRelease(shared, 1));
	ck_assert_int_eq(destroyed, 1);
	ck_assert_int_eq(cuUserObjectRelease(shared, 1), CUDA_ERROR_INVALID_VALUE);
}
END_TEST

START_TEST(a_spoilt_capture_releases_its_user_objects)
{
	int destroyed = 0;
	CUstreamCaptureStatus status;
	CUgraph graph = NULL;
	start(CU_STREAM_NON_BLOCKING);
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuStreamGetCaptureInfo(stream, &status, NULL, &graph, NULL, NULL, NULL));
	ck_cuda(cuGraphRetainUserObject(graph, object(&destroyed), 1, CU_GRAPH_USER_OBJECT_MOVE));
	ck_assert_int_eq(cuStreamSynchronize(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	ck_spoilt();
	ck_assert_int_eq(destroyed, 1);
}
END_TEST

START_TEST(memory_allocated_in_a_capture_belongs_to_the_graph)
{
	CUdeviceptr inside;
	start(CU_STREAM_NON_BLOCKING);
	long before = softcuda_get("live");
	begin(CU_STREAM_CAPTURE_MODE_GLOBAL);
	ck_cuda(cuMemAllocAsync(&inside, 4, stream));
	ck_cuda(cuMemsetD32Async(inside, 6, 1, stream));
	ck_cuda(cuMemcpyDtoDAsync(memory, inside, 4, stream));
	ck_cuda(cuMemFreeAsync(inside, stream));
	CUgraph graph = end();
	CUgraphExec exec = instantiate(graph);
	ck_cuda(cuGraphLaunch(exec, stream));
	ck_cuda(cuStreamSynchronize(stream));
	ck_assert_uint_eq(words()[0], 6);
	ck_assert_int_eq(softcuda_get("live"), before + 1);
	ck_assert_int_eq(cuMemFree(inside), CUDA_ERROR_INVALID_VALUE);
	ck_cuda(cuGraphDestroy(graph));
	ck_cuda(cuGraphExecDestroy(exec));
	ck_assert_int_eq(softcuda_get("live"), before);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("softcuda capture");
	TCase *tests = tcase_create("capture");
	tcase_add_test(tests, captured_work_runs_once_per_launch_and_not_before);
	tcase_add_test(tests, an_early_launch_is_captured_after_one_kernel);
	tcase_add_loop_test(tests, an_early_launch_after_anything_else_spoils_the_capture, 0, 3);
	tcase_add_test(tests, a_fork_joined_by_events_is_one_graph_whose_order_is_kept);
	tcase_add_test(tests, branches_of_a_graph_run_in_either_order);
	tcase_add_test(tests, a_fork_that_is_not_joined_ends_the_capture_with_904);
	tcase_add_test(tests, waiting_for_a_capturing_stream_or_its_context_spoils_the_capture);
	tcase_add_test(tests, asking_a_capturing_stream_for_its_id_spoils_the_capture);
	tcase_add_test(tests, allocating_spoils_a_global_capture_unless_the_thread_is_relaxed);
	tcase_add_test(tests, another_thread_spoils_a_global_capture_but_not_a_thread_local_one);
	tcase_add_test(tests, the_legacy_stream_is_unusable_while_a_blocking_stream_captures);
	tcase_add_test(tests, the_legacy_stream_works_while_a_nonblocking_stream_captures);
	tcase_add_test(tests, dependencies_on_uncaptured_work_are_refused_with_905);
	tcase_add_test(tests, two_captures_cannot_be_merged);
	tcase_add_test(tests, a_capture_ends_where_and_by_whom_it_was_begun);
	tcase_add_test(tests, only_a_relaxed_capture_can_be_ended_by_another_thread);
	tcase_add_test(tests, a_captured_event_can_be_neither_queried_nor_waited_for);
	tcase_add_test(tests, capture_info_names_the_capture_and_its_graph);
	tcase_add_test(tests, the_nodes_of_a_graph_show_the_arguments_of_launches);
	tcase_add_test(tests, a_user_object_lives_as_long_as_the_graph_and_its_executables);
	tcase_add_test(tests, a_user_object_that_was_not_moved_keeps_the_programs_reference);
	tcase_add_test(tests, a_spoilt_capture_releases_its_user_objects);
	tcase_add_test(tests, memory_allocated_in_a_capture_belongs_to_the_graph);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
