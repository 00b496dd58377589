/* The runtime API of softcuda: what it does beyond the driver API. */
#include "tests/softcuda/help.h"

#include <sys/wait.h>
#include <unistd.h>

START_TEST(the_first_call_makes_the_primary_context_current)
{
	CUcontext context = NULL;
	ck_cuda(cudaFree(NULL));
	ck_cuda(cuCtxGetCurrent(&context));
	ck_assert_ptr_nonnull(context);
}
END_TEST

START_TEST(an_error_is_remembered_until_it_is_fetched)
{
	void *pointer;
	softcuda_set("memory_mib", 1);
	ck_assert_int_eq(cudaMalloc(&pointer, 2 << 20), cudaErrorMemoryAllocation);
	ck_cuda(cudaMalloc(&pointer, 4));
	ck_assert_int_eq(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
	ck_assert_int_eq(cudaGetLastError(), cudaErrorMemoryAllocation);
	ck_assert_int_eq(cudaGetLastError(), cudaSuccess);
	ck_assert_str_eq(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation");
	ck_assert_str_eq(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}
END_TEST

START_TEST(not_ready_is_no_error_to_remember)
{
	cudaStream_t stream;
	ck_cuda(cudaStreamCreate(&stream));
	void *memory = device(4);
	ck_cuda(cudaMemsetAsync(memory, 0, 4, stream));
	ck_assert_int_eq(cudaStreamQuery(stream), cudaErrorNotReady);
	ck_cuda(cudaPeekAtLastError());
}
END_TEST

START_TEST(copies_of_every_kind_move_the_bytes)
{
	unsigned in = 0x12345678, out = 0, again = 0;
	void *first = device(4), *second = device(4);
	ck_cuda(cudaMemcpy(first, &in, 4, cudaMemcpyHostToDevice));
	ck_cuda(cudaMemcpy(second, first, 4, cudaMemcpyDeviceToDevice));
	ck_cuda(cudaMemcpy(&out, second, 4, cudaMemcpyDeviceToHost));
	ck_cuda(cudaMemcpy(&again, second, 4, cudaMemcpyDefault));
	ck_assert_uint_eq(out, in);
	ck_assert_uint_eq(again, in);
	ck_assert_int_eq(cudaMemcpy(&out, &in, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
	ck_assert_int_eq(cudaMemcpy(first, &in, 8, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
	ck_assert_int_eq(cudaMemcpy(first, &in, 4, (enum cudaMemcpyKind)9),
	                 cudaErrorInvalidMemcpyDirection);
}
END_TEST

START_TEST(a_device_is_chosen_per_thread_and_described)
{
	struct cudaDeviceProp properties;
	struct cudaPointerAttributes attributes;
	int count, chosen, sms, local;
	ck_cuda(cudaGetDeviceCount(&count));
	ck_assert_int_eq(count, 2);
	ck_assert_int_eq(cudaSetDevice(2), cudaErrorInvalidDevice);
	ck_cuda(cudaSetDevice(1));
	ck_cuda(cudaGetDevice(&chosen));
	ck_assert_int_eq(chosen, 1);
	ck_cuda(cudaGetDeviceProperties(&properties, 1));
	ck_assert_str_eq(properties.name, "softcuda");
	ck_assert_int_eq(properties.major * 10 + properties.minor, 90);
	ck_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 1));
	ck_assert_int_eq(sms, 132);
	ck_cuda(cudaPointerGetAttributes(&attributes, device(4)));
	ck_assert_int_eq(attributes.type, cudaMemoryTypeDevice);
	ck_assert_int_eq(attributes.device, 1);
	ck_cuda(cudaPointerGetAttributes(&attributes, &local));
	ck_assert_int_eq(attributes.type, cudaMemoryTypeUnregistered);
}
END_TEST

START_TEST(a_capture_through_the_runtime_replays)
{
	cudaStream_t stream;
	cudaGraph_t graph;
	cudaGraphExec_t exec;
	enum cudaStreamCaptureStatus status;
	unsigned long long id = 0;
	void *memory = device(4), *gone;
	ck_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	ck_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
	ck_cuda(cudaMemsetAsync(memory, 3, 4, stream));
	ck_cuda(cudaStreamIsCapturing(stream, &status));
	ck_assert_int_eq(status, cudaStreamCaptureStatusActive);
	ck_cuda(cudaStreamGetCaptureInfo(stream, &status, &id, NULL, NULL, NULL, NULL));
	ck_assert_uint_ne(id, 0);
	ck_cuda(cudaStreamEndCapture(stream, &graph));
	ck_cuda(cudaGraphInstantiate(&exec, graph, 0));
	ck_cuda(cudaGraphLaunch(exec, stream));
	ck_cuda(cudaStreamSynchronize(stream));
	ck_assert_uint_eq(*(unsigned *)memory, 0x03030303u);
	ck_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
	ck_assert_int_eq(cudaMalloc(&gone, 4), cudaErrorStreamCaptureUnsupported);
	ck_assert_int_eq(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
}
END_TEST

START_TEST(knobs_come_from_the_environment)
{
	int status;
	pid_t child = fork();
	if (!child) {
		setenv("SOFTCUDA_MEMORY_MIB", "77", 1);
		setenv("SOFTCUDA_FAIL_ALLOC", "2", 1);
		execl("/proc/self/exe", "test_runtime", "memory", (char *)NULL);
		_exit(1);
	}
	waitpid(child, &status, 0);
	ck_assert_int_eq(status, 0);
}
END_TEST

/* With an argument, the child of the test above. */
int main(int count, char **arguments)
{
	(void)arguments;
	void *memory;
	if (count > 1)
		return softcuda_get("memory_mib") != 77 || cudaMalloc(&memory, 4) ||
		       cudaMalloc(&memory, 4) != cudaErrorMemoryAllocation;
	Suite *suite = suite_create("softcuda runtime");
	TCase *tests = tcase_create("runtime");
	tcase_add_test(tests, the_first_call_makes_the_primary_context_current);
	tcase_add_test(tests, an_error_is_remembered_until_it_is_fetched);
	tcase_add_test(tests, not_ready_is_no_error_to_remember);
	tcase_add_test(tests, copies_of_every_kind_move_the_bytes);
	tcase_add_test(tests, a_device_is_chosen_per_thread_and_described);
	tcase_add_test(tests, a_capture_through_the_runtime_replays);
	tcase_add_test(tests, knobs_come_from_the_environment);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
