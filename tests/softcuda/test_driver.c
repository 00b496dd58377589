/* Memory, streams, events, contexts and launches of softcuda's driver API. Device memory can be
 * read from the host here, which is how a test sees that something has not run yet. */
#include "tests/softcuda/help.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static CUcontext context;

static void start(void)
{
	ck_cuda(cuInit(0));
	ck_cuda(cuDevicePrimaryCtxRetain(&context, 0));
	ck_cuda(cuCtxSetCurrent(context));
}

static CUdeviceptr allocate(size_t bytes)
{
	CUdeviceptr memory = 0;
	ck_cuda(cuMemAlloc(&memory, bytes));
	return memory;
}

static volatile unsigned *look(CUdeviceptr memory)
{
	return (volatile unsigned *)(uintptr_t)memory;
}

static CUstream stream_with(unsigned flags)
{
	CUstream stream = NULL;
	ck_cuda(cuStreamCreate(&stream, flags));
	return stream;
}

static CUfunction function(const char *name)
{
	CUmodule module;
	CUfunction f = NULL;
	ck_cuda(cuModuleLoadData(&module, "image"));
	ck_cuda(cuModuleGetFunction(&f, module, name));
	return f;
}

static void copy_word(CUfunction f, CUdeviceptr to, CUdeviceptr from, CUstream stream)
{
	uint64_t bytes = 4;
	void *params[] = {&to, &from, &bytes};
	ck_cuda(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, params, NULL));
}

START_TEST(nothing_works_before_cuInit)
{
	CUdeviceptr memory;
	int count;
	ck_assert_int_eq(cuMemAlloc(&memory, 4), CUDA_ERROR_NOT_INITIALIZED);
	ck_assert_int_eq(cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED);
	ck_cuda(cuInit(0));
	ck_cuda(cuDeviceGetCount(&count));
	ck_assert_int_eq(count, 2);
	ck_assert_int_eq(cuMemAlloc(&memory, 4), CUDA_ERROR_INVALID_CONTEXT);
}
END_TEST

START_TEST(fresh_memory_is_poisoned_and_aligned)
{
	start();
	CUdeviceptr memory = allocate(1000);
	ck_assert_uint_eq(memory % 256, 0);
	for (int i = 0; i < 250; i++)
		ck_assert_uint_eq(look(memory)[i], 0xA5A5A5A5u);
	ck_assert_int_eq(softcuda_get("bytes"), 1000);
	ck_cuda(cuMemFree(memory));
	ck_assert_int_eq(softcuda_get("bytes"), 0);
}
END_TEST

START_TEST(only_the_start_of_an_allocation_can_be_freed_and_only_once)
{
	int local = 0;
	start();
	CUdeviceptr memory = allocate(64);
	ck_assert_int_eq(cuMemFree(memory + 16), CUDA_ERROR_INVALID_VALUE);
	ck_assert_int_eq(cuMemFree((CUdeviceptr)(uintptr_t)&local), CUDA_ERROR_INVALID_VALUE);
	ck_cuda(cuMemFree(memory));
	ck_assert_int_eq(cuMemFree(memory), CUDA_ERROR_INVALID_VALUE);
}
END_TEST

START_TEST(pointer_attributes_tell_allocations_from_other_memory)
{
	int local = 0, device = -1;
	unsigned type = 0;
	start();
	CUdeviceptr memory = allocate(64), stranger = (CUdeviceptr)(uintptr_t)&local;
	ck_cuda(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory + 63));
	ck_assert_uint_eq(type, CU_MEMORYTYPE_DEVICE);
	ck_cuda(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory));
	ck_assert_int_eq(device, 0);
	ck_assert_int_eq(
	        cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory + 64),
	        CUDA_ERROR_INVALID_VALUE);
	ck_assert_int_eq(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, stranger),
	                 CUDA_ERROR_INVALID_VALUE);
	CUpointer_attribute asked = CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
	void *answer = &device;
	ck_cuda(cuPointerGetAttributes(1, &asked, &answer, stranger));
	ck_assert_int_eq(device, -2);
}
END_TEST

START_TEST(a_write_past_the_end_is_counted_when_freed)
{
	start();
	CUdeviceptr good = allocate(100), bad = allocate(100);
	((unsigned char *)(uintptr_t)bad)[100] = 0;
	ck_cuda(cuMemFree(good));
	ck_assert_int_eq(softcuda_get("overruns"), 0);
	ck_cuda(cuMemFree(bad));
	ck_assert_int_eq(softcuda_get("overruns"), 1);
}
END_TEST

START_TEST(memory_freed_last_is_given_again_if_that_is_wanted)
{
	CUdeviceptr memory, again, another;
	start();
	softcuda_set("reuse", 1);
	ck_cuda(cuMemAlloc(&memory, 1000));
	ck_cuda(cuMemFree(memory));
	ck_cuda(cuMemAlloc(&another, 5000));
	ck_assert_uint_ne(another, memory);
	ck_cuda(cuMemAlloc(&again, 1000));
	ck_assert_uint_eq(again, memory);
	ck_cuda(cuMemAlloc(&another, 1000));
	ck_assert_uint_ne(another, memory);
	softcuda_set("reuse", 0);
}
END_TEST

static CUmemAllocationProp of_device(void)
{
	return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
	                             .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
}

START_TEST(memory_is_mapped_in_pieces_and_more_than_once)
{
	const CUmemAllocationProp properties = of_device();
	const CUmemAccessDesc access = {.location = properties.location,
	                                .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUmemGenericAllocationHandle piece[2];
	CUdeviceptr range, base = 0;
	size_t size, range_size = 0;
	start();
	ck_cuda(cuMemGetAllocationGranularity(&size, &properties,
	                                      CU_MEM_ALLOC_GRANULARITY_MINIMUM));
	ck_cuda(cuMemAddressReserve(&range, 4 * size, 0, 0, 0));
	for (size_t i = 0; i < 2; i++) {
		ck_cuda(cuMemCreate(&piece[i], size, &properties, 0));
		ck_cuda(cuMemMap(range + (1 + i) * size, size, 0, piece[i], 0));
		ck_cuda(cuMemSetAccess(range + (1 + i) * size, size, &access, 1));
	}
	ck_assert_int_eq(cuMemMap(range + size, size, 0, piece[1], 0), CUDA_ERROR_INVALID_VALUE);
	ck_assert_int_eq(cuMemMap(range + 4 * size, size, 0, piece[1], 0),
	                 CUDA_ERROR_INVALID_VALUE);
	ck_cuda(cuMemsetD32(range + size, 7, 2 * size / 4)); /* both */
	ck_assert_int_eq(cuMemsetD32(range + size, 7, 3 * size / 4), CUDA_ERROR_INVALID_VALUE);
	ck_cuda(cuCtxSynchronize());
	ck_cuda(cuMemMap(range + 3 * size, size, 0, piece[0], 0));
	ck_cuda(cuMemSetAccess(range + 3 * size, size, &access, 1));
	ck_assert_uint_eq(*look(range + 3 * size), 7);
	*look(range + size) = 8;
	ck_assert_uint_eq(*look(range + 3 * size), 8);
	ck_cuda(cuPointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
	                              range + 2 * size));
	ck_cuda(cuPointerGetAttribute(&range_size, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
	                              range + 2 * size));
	ck_assert(base == range && range_size == 4 * size);
	ck_assert_int_eq(cuMemFree(range + size), CUDA_ERROR_INVALID_VALUE);
	ck_cuda(cuMemUnmap(range + 2 * size, size));
	ck_cuda(cuMemMap(range + 2 * size, size, 0, piece[0], 0));
	ck_cuda(cuMemSetAccess(range + 2 * size, size, &access, 1));
	ck_assert_uint_eq(*look(range + 2 * size), 8);
	ck_cuda(cuMemUnmap(range + size, 3 * size));
	ck_assert_int_eq(cuMemUnmap(range + size, size), CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; i < 2; i++)
		ck_cuda(cuMemRelease(piece[i]));
	ck_cuda(cuMemAddressFree(range, 4 * size));
	ck_assert_int_eq(softcuda_get("live"), 0);
}
END_TEST

/* A matrix of 4 x 4 words: by rows, in a batch, and from another context. */
START_TEST(rows_batches_and_peers_are_copied)
{
	uint32_t words[16], out[16];
	CUdeviceptr from, to;
	CUstream stream;
	start();
	for (uint32_t i = 0; i < 16; i++)
		words[i] = i + 1;
	ck_cuda(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	ck_cuda(cuMemAlloc(&from, sizeof words));
	ck_cuda(cuMemAlloc(&to, sizeof words));
	ck_cuda(cuMemcpyHtoD(from, words, sizeof words));
	ck_cuda(cuMemsetD8(to, 0, sizeof words));
	ck_cuda(cuCtxSynchronize());
	CUDA_MEMCPY2D rows = {.srcXInBytes = 4,
	                      .srcY = 1,
	                      .srcMemoryType = CU_MEMORYTYPE_DEVICE,
	                      .srcDevice = from,
	                      .srcPitch = 16,
	                      .dstXInBytes = 8,
	                      .dstY = 2,
	                      .dstMemoryType = CU_MEMORYTYPE_DEVICE,
	                      .dstDevice = to,
	                      .dstPitch = 16,
	                      .WidthInBytes = 8,
	                      .Height = 2};
	ck_cuda(cuMemcpy2DAsync(&rows, stream));
	ck_cuda(cuStreamSynchronize(stream));
	ck_cuda(cuMemcpyDtoH(out, to, sizeof out));
	for (int i = 0; i < 16; i++)
		ck_assert_uint_eq(out[i], i == 10   ? 6
		                          : i == 11 ? 7
		                          : i == 14 ? 10
		                          : i == 15 ? 11
		                                    : 0);
	rows.srcMemoryType = CU_MEMORYTYPE_HOST;
	ck_assert_int_eq(cuMemcpy2DAsync(&rows, stream), CUDA_ERROR_NOT_SUPPORTED);
	ck_cuda(cuMemcpyPeerAsync(to, context, from, context, sizeof words, stream));
	ck_cuda(cuStreamSynchronize(stream));
	ck_cuda(cuMemcpyDtoH(out, to, sizeof out));
	ck_assert_mem_eq(out, words, sizeof words);
	ck_assert_int_eq(cuMemcpyPeerAsync(to, NULL, from, context, 4, stream),
	                 CUDA_ERROR_INVALID_CONTEXT);
#if CUDA_VERSION >= 13000
	CUmemcpyAttributes how = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
	CUdeviceptr targets[] = {to, to + 8}, sources[] = {from + 8, from};
	size_t sizes[] = {4, 8}, first = 0;
	ck_cuda(cuMemcpyBatchAsync(targets, sources, sizes, 2, &how, &first, 1, stream));
	ck_cuda(cuStreamSynchronize(stream));
	ck_cuda(cuMemcpyDtoH(out, to, sizeof out));
	ck_assert(out[0] == 3 && out[1] == 2 && out[2] == 1 && out[3] == 2 && out[4] == 5);
	ck_assert_int_eq(cuMemcpyBatchAsync(targets, sources, sizes, 2, &how, &first, 1, NULL),
	                 CUDA_ERROR_INVALID_VALUE);
#endif
}
END_TEST

START_TEST(the_nth_allocation_fails_and_all_after)
{
	CUdeviceptr memory;
	start();
	softcuda_set("fail_alloc", 2);
	ck_cuda(cuMemAlloc(&memory, 4));
	ck_assert_int_eq(cuMemAlloc(&memory, 4), CUDA_ERROR_OUT_OF_MEMORY);
	ck_assert_int_eq(cuMemAlloc(&memory, 4), CUDA_ERROR_OUT_OF_MEMORY);
	softcuda_set("fail_alloc", 0);
	ck_cuda(cuMemAlloc(&memory, 4));
}
END_TEST

START_TEST(memory_of_a_device_is_bounded)
{
	CUdeviceptr memory;
	size_t available, total;
	softcuda_set("memory_mib", 4);
	start();
	allocate(3 << 20);
	ck_cuda(cuMemGetInfo(&available, &total));
	ck_assert_uint_eq(available, 1 << 20);
	ck_assert_uint_eq(total, 4 << 20);
	ck_assert_int_eq(cuMemAlloc(&memory, (1 << 20) + 1), CUDA_ERROR_OUT_OF_MEMORY);
	ck_cuda(cuMemAlloc(&memory, 1 << 20));
}
END_TEST

START_TEST(work_waits_until_something_synchronises)
{
	start();
	CUstream stream = stream_with(0);
	CUdeviceptr memory = allocate(4);
	ck_cuda(cuMemsetD32Async(memory, 7, 1, stream));
	ck_assert_uint_eq(*look(memory), 0xA5A5A5A5u);
	ck_assert_int_eq(softcuda_get("queued"), 1);
	ck_cuda(cuStreamSynchronize(stream));
	ck_assert_uint_eq(*look(memory), 7);
	ck_assert_int_eq(softcuda_get("queued"), 0);
}
END_TEST

START_TEST(pageable_sources_are_read_at_once_and_pinned_ones_when_run)
{
	unsigned pageable = 1, *pinned;
	start();
	CUstream stream = stream_with(0);
	CUdeviceptr memory = allocate(8);
	ck_cuda(cuMemHostAlloc((void **)&pinned, 4, 0));
	*pinned = 1;
	ck_cuda(cuMemcpyHtoDAsync(memory, &pageable, 4, stream));
	ck_cuda(cuMemcpyHtoDAsync(memory + 4, pinned, 4, stream));
	pageable = *pinned = 2;
	ck_cuda(cuStreamSynchronize(stream));
	ck_assert_uint_eq(look(memory)[0], 1);
	ck_assert_uint_eq(look(memory)[1], 2);
}
END_TEST

START_TEST(a_copy_to_pageable_memory_has_arrived_when_it_returns)
{
	unsigned out = 0;
	start();
	CUstream stream = stream_with(0);
	CUdeviceptr memory = allocate(4);
	ck_cuda(cuMemsetD32Async(memory, 9, 1, stream));
	ck_cuda(cuMemcpyDtoHAsync(&out, memory, 4, stream));
	ck_assert_uint_eq(out, 9);
}
END_TEST

/* How often a reader in one stream sees what a writer in another wrote before it, in 64 orders. */
static int reads_after_write(CUstream writer, CUstream reader, bool event_between)
{
	CUfunction f = function("softcuda_copy");
	CUdeviceptr source = allocate(4), target = allocate(4);
	CUevent event;
	int seen = 0;
	ck_cuda(cuEventCreate(&event, 0));
	for (int seed = 1; seed <= 64; seed++) {
		softcuda_set("seed", seed * 7919);
		ck_cuda(cuMemsetD32(source, 0, 1));
		ck_cuda(cuCtxSynchronize());
		ck_cuda(cuMemsetD32Async(source, 1, 1, writer));
		if (event_between) {
			ck_cuda(cuEventRecord(event, writer));
			ck_cuda(cuStreamWaitEvent(reader, event, 0));
		}
		copy_word(f, target, source, reader);
		ck_cuda(cuCtxSynchronize());
		seen += *look(target) == 1;
	}
	return seen;
}

START_TEST(unrelated_streams_run_in_either_order)
{
	start();
	int seen = reads_after_write(stream_with(0), stream_with(0), false);
	ck_assert_int_gt(seen, 5);
	ck_assert_int_lt(seen, 59);
}
END_TEST

START_TEST(an_event_orders_streams)
{
	start();
	ck_assert_int_eq(
	        reads_after_write(stream_with(0), stream_with(CU_STREAM_NON_BLOCKING), true), 64);
}
END_TEST

START_TEST(the_default_stream_orders_itself_with_blocking_streams_only)
{
	start();
	CUstream blocking = stream_with(0), free_running = stream_with(CU_STREAM_NON_BLOCKING);
	ck_assert_int_eq(reads_after_write(NULL, blocking, false), 64);
	ck_assert_int_eq(reads_after_write(blocking, CU_STREAM_LEGACY, false), 64);
	ck_assert_int_eq(reads_after_write(CU_STREAM_PER_THREAD, NULL, false), 64);
	ck_assert_int_lt(reads_after_write(NULL, free_running, false), 59);
}
END_TEST

START_TEST(kernel_arguments_are_taken_by_value_in_both_forms)
{
	start();
	CUfunction fill = function("softcuda_fill");
	CUdeviceptr memory = allocate(8);
	struct {
		uint64_t target;
		uint32_t value, padding;
		uint64_t count;
	} buffer = {memory + 4, 6, 0, 1};
	size_t size = sizeof buffer;
	void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &buffer, CU_LAUNCH_PARAM_BUFFER_SIZE,
	                 &size, CU_LAUNCH_PARAM_END};
	uint64_t target = memory, count = 1;
	uint32_t value = 5;
	void *params[] = {&target, &value, &count};
	ck_cuda(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
	ck_cuda(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, extra));
	value = buffer.value = 99;
	ck_cuda(cuCtxSynchronize());
	ck_assert_uint_eq(look(memory)[0], 5);
	ck_assert_uint_eq(look(memory)[1], 6);
	ck_assert_int_eq(softcuda_get("launches"), 2);
	ck_assert_int_eq(softcuda_get("kernel:softcuda_fill"), 2);
}
END_TEST

START_TEST(kernels_of_the_oracle_are_found_and_others_are_not)
{
	CUmodule module;
	CUfunction f;
	start();
	function("qs_quantise");
	function("qs_repair");
	ck_cuda(cuModuleLoadData(&module, "image"));
	ck_assert_int_eq(cuModuleGetFunction(&f, module, "qs_nothing"), CUDA_ERROR_NOT_FOUND);
	softcuda_set("fail_module", CUDA_ERROR_INVALID_IMAGE);
	ck_assert_int_eq(cuModuleLoadData(&module, "image"), CUDA_ERROR_INVALID_IMAGE);
}
END_TEST

START_TEST(impossible_launches_are_refused)
{
	CUcontext other;
	start();
	CUfunction f = function("softcuda_fill");
	void *params[3] = {0};
	ck_assert_int_eq(cuLaunchKernel(f, 0, 1, 1, 1, 1, 1, 0, NULL, params, NULL),
	                 CUDA_ERROR_INVALID_VALUE);
	ck_assert_int_eq(cuLaunchKernel(f, 1, 1, 1, 1025, 1, 1, 0, NULL, params, NULL),
	                 CUDA_ERROR_INVALID_VALUE);
	ck_assert_int_eq(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 64 << 10, NULL, params, NULL),
	                 CUDA_ERROR_INVALID_VALUE);
	ck_assert_int_eq(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL),
	                 CUDA_ERROR_INVALID_HANDLE);
	ck_cuda(cuDevicePrimaryCtxRetain(&other, 1));
	ck_cuda(cuCtxSetCurrent(other));
	ck_assert_int_eq(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL),
	                 CUDA_ERROR_INVALID_HANDLE);
}
END_TEST

START_TEST(a_library_kernel_launches_but_is_not_a_function)
{
	CUlibrary library;
	CUkernel kernel;
	const char *name;
	size_t offset, size;
	start();
	ck_cuda(cuLibraryLoadData(&library, "image", NULL, NULL, 0, NULL, NULL, 0));
	ck_cuda(cuLibraryGetKernel(&kernel, library, "softcuda_copy"));
	CUdeviceptr memory = allocate(8);
	ck_cuda(cuMemsetD32(memory, 3, 1));
	copy_word((CUfunction)kernel, memory + 4, memory, NULL);
	ck_cuda(cuCtxSynchronize());
	ck_assert_uint_eq(look(memory)[1], 3);
	ck_assert_int_eq(cuFuncGetName(&name, (CUfunction)kernel), CUDA_ERROR_INVALID_HANDLE);
	ck_cuda(cuKernelGetName(&name, kernel));
	ck_assert_str_eq(name, "softcuda_copy");
	ck_cuda(cuKernelGetParamInfo(kernel, 2, &offset, &size));
	ck_assert_uint_eq(offset, 16);
	ck_assert_uint_eq(size, 8);
	ck_assert_int_eq(cuKernelGetParamInfo(kernel, 3, &offset, &size), CUDA_ERROR_INVALID_VALUE);
}
END_TEST

START_TEST(queries_answer_not_ready_and_come_to_an_end)
{
	CUevent event;
	int polls = 0;
	start();
	CUstream stream = stream_with(0);
	CUdeviceptr memory = allocate(4);
	ck_cuda(cuEventCreate(&event, 0));
	ck_cuda(cuEventQuery(event)); /* never recorded: complete */
	for (int i = 0; i < 20; i++)
		ck_cuda(cuMemsetD32Async(memory, 1, 1, stream));
	ck_cuda(cuEventRecord(event, stream));
	ck_assert_int_eq(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
	while (cuEventQuery(event) == CUDA_ERROR_NOT_READY)
		polls++;
	ck_assert_int_gt(polls, 1);
	ck_cuda(cuEventQuery(event));
}
END_TEST

START_TEST(events_measure_time_that_passes)
{
	CUevent before, after;
	float elapsed = -1;
	start();
	CUdeviceptr memory = allocate(1 << 20);
	ck_cuda(cuEventCreate(&before, 0));
	ck_cuda(cuEventCreate(&after, 0));
	ck_assert_int_eq(cuEventElapsedTime(&elapsed, before, after), CUDA_ERROR_INVALID_HANDLE);
	ck_cuda(cuEventRecord(before, NULL));
	ck_cuda(cuMemsetD8(memory, 1, 1 << 20));
	ck_cuda(cuEventRecord(after, NULL));
	ck_assert_int_eq(cuEventElapsedTime(&elapsed, before, after), CUDA_ERROR_NOT_READY);
	ck_cuda(cuEventSynchronize(after));
	ck_cuda(cuEventElapsedTime(&elapsed, before, after));
	ck_assert_float_gt(elapsed, 0);
}
END_TEST

START_TEST(events_tell_the_time_that_kernels_are_said_to_take)
{
	CUevent events[3];
	float elapsed = -1;
	start();
	CUstream stream = stream_with(CU_STREAM_NON_BLOCKING);
	CUfunction copy = function("softcuda_copy");
	CUdeviceptr source = allocate(4), target = allocate(4);
	softcuda_set("kernel_us", 70);
	for (int i = 0; i < 3; i++) {
		ck_cuda(cuEventCreate(&events[i], 0));
		copy_word(copy, target, source, i ? stream : stream_with(CU_STREAM_NON_BLOCKING));
		ck_cuda(cuMemsetD32Async(target, 1, 1, stream));
		ck_cuda(cuEventRecord(events[i], stream));
	}
	ck_cuda(cuCtxSynchronize());
	ck_cuda(cuEventElapsedTime(&elapsed, events[0], events[1]));
	ck_assert_float_eq_tol(elapsed, 0.07f, 1e-6f);
	ck_cuda(cuEventElapsedTime(&elapsed, events[0], events[2]));
	ck_assert_float_eq_tol(elapsed, 0.14f, 1e-6f);
}
END_TEST

START_TEST(the_nth_use_of_an_event_fails)
{
	CUevent event;
	start();
	softcuda_set("fail_event", 2);
	ck_cuda(cuEventCreate(&event, 0));
	ck_assert_int_eq(cuEventRecord(event, NULL), CUDA_ERROR_OUT_OF_MEMORY);
	ck_cuda(cuEventRecord(event, NULL));
	ck_assert_int_eq(softcuda_get("events"), 1);
	ck_cuda(cuEventDestroy(event));
	softcuda_set("fail_event", 1);
	ck_assert_int_eq(cuEventCreate(&event, 0), CUDA_ERROR_OUT_OF_MEMORY);
	ck_assert_int_eq(softcuda_get("events"), 0);
}
END_TEST

START_TEST(stream_handles_come_back_but_their_ids_do_not)
{
	unsigned long long first, second;
	start();
	CUstream stream = stream_with(0);
	ck_cuda(cuStreamGetId(stream, &first));
	ck_cuda(cuStreamDestroy(stream));
	ck_assert_int_eq(cuStreamSynchronize(stream), CUDA_ERROR_INVALID_HANDLE);
	ck_assert_ptr_eq(stream_with(0), stream);
	ck_cuda(cuStreamGetId(stream, &second));
	ck_assert_uint_ne(first, second);
}
END_TEST

START_TEST(work_of_a_destroyed_stream_still_runs)
{
	start();
	CUstream stream = stream_with(CU_STREAM_NON_BLOCKING);
	CUdeviceptr memory = allocate(4);
	ck_cuda(cuMemsetD32Async(memory, 4, 1, stream));
	ck_cuda(cuStreamDestroy(stream));
	ck_cuda(cuCtxSynchronize());
	ck_assert_uint_eq(*look(memory), 4);
}
END_TEST

static void *ask_for_context(void *answer)
{
	ck_cuda(cuCtxGetCurrent(answer));
	return NULL;
}

START_TEST(a_new_thread_has_no_current_context)
{
	pthread_t thread;
	CUcontext seen = (CUcontext)1;
	start();
	pthread_create(&thread, NULL, ask_for_context, &seen);
	pthread_join(thread, NULL);
	ck_assert_ptr_null(seen);
	ck_cuda(cuCtxGetCurrent(&seen));
	ck_assert_ptr_eq(seen, context);
}
END_TEST

START_TEST(a_primary_context_comes_back_with_a_new_id_and_no_memory)
{
	unsigned long long first, second;
	CUcontext again;
	CUdeviceptr memory;
	start();
	allocate(4);
	ck_cuda(cuCtxGetId(NULL, &first));
	ck_cuda(cuDevicePrimaryCtxRelease(0));
	ck_assert_int_eq(cuMemAlloc(&memory, 4), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	ck_assert_int_eq(softcuda_get("live"), 0);
	ck_cuda(cuDevicePrimaryCtxRetain(&again, 0));
	ck_assert_ptr_eq(again, context);
	ck_cuda(cuCtxGetId(again, &second));
	ck_assert_uint_ne(first, second);
}
END_TEST

START_TEST(memory_and_streams_belong_to_the_device_of_their_context)
{
	CUcontext other, of_stream;
	int ordinal = -1;
	start();
	ck_cuda(cuDevicePrimaryCtxRetain(&other, 1));
	ck_cuda(cuCtxPushCurrent(other));
	CUdeviceptr memory = allocate(4);
	CUstream stream = stream_with(0);
	ck_cuda(cuCtxPopCurrent(NULL));
	ck_cuda(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory));
	ck_assert_int_eq(ordinal, 1);
	ck_cuda(cuStreamGetCtx(stream, &of_stream));
	ck_assert_ptr_eq(of_stream, other);
	ck_cuda(cuStreamGetCtx(NULL, &of_stream));
	ck_assert_ptr_eq(of_stream, context);
}
END_TEST

START_TEST(a_child_of_a_process_that_used_the_driver_is_refused_everything)
{
	int status, count;
	CUdeviceptr memory;
	start();
	pid_t child = fork();
	if (!child)
		_exit(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED &&
		                      cuMemAlloc(&memory, 4) == CUDA_ERROR_NOT_INITIALIZED &&
		                      cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED &&
		                      cudaDeviceSynchronize() == cudaErrorInitializationError
		              ? 0
		              : 1);
	waitpid(child, &status, 0);
	ck_assert_int_eq(status, 0);
	allocate(4);
}
END_TEST

START_TEST(a_child_of_a_process_that_did_not_use_the_driver_can)
{
	int status;
	pid_t child = fork();
	if (!child)
		_exit(cudaFree(NULL));
	waitpid(child, &status, 0);
	ck_assert_int_eq(status, 0);
}
END_TEST

static void CUDA_CB count_up(void *data)
{
	++*(int *)data;
}

START_TEST(host_functions_run_in_the_order_of_their_stream)
{
	int calls = 0;
	start();
	CUstream stream = stream_with(0);
	ck_cuda(cuLaunchHostFunc(stream, count_up, &calls));
	ck_cuda(cuLaunchHostFunc(stream, count_up, &calls));
	ck_assert_int_eq(calls, 0);
	ck_cuda(cuStreamSynchronize(stream));
	ck_assert_int_eq(calls, 2);
}
END_TEST

START_TEST(host_functions_that_are_held_up_hold_up_their_stream)
{
	int calls = 0;
	start();
	CUstream stream = stream_with(CU_STREAM_NON_BLOCKING);
	CUstream other = stream_with(CU_STREAM_NON_BLOCKING);
	CUdeviceptr memory = allocate(8);
	softcuda_set("hold_host", 1);
	ck_cuda(cuLaunchHostFunc(stream, count_up, &calls));
	ck_cuda(cuMemsetD32Async(memory, 1, 1, stream));
	ck_cuda(cuMemsetD32Async(memory + 4, 2, 1, other));
	ck_cuda(cuStreamSynchronize(other));
	for (int i = 0; i < 100; i++)
		ck_assert_int_eq(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
	ck_assert_int_eq(calls, 0);
	ck_assert_uint_ne(*look(memory), 1);
	softcuda_set("hold_host", 0);
	ck_cuda(cuStreamSynchronize(stream));
	ck_assert_int_eq(calls, 1);
	ck_assert_uint_eq(*look(memory), 1);
}
END_TEST

static void *wait_for_stream(void *stream)
{
	ck_cuda(cuCtxSetCurrent(context));
	ck_cuda(cuStreamSynchronize(stream));
	return NULL;
}

START_TEST(a_thread_that_waits_goes_on_when_host_functions_do)
{
	int calls = 0;
	pthread_t thread;
	start();
	CUstream stream = stream_with(CU_STREAM_NON_BLOCKING);
	softcuda_set("hold_host", 1);
	ck_cuda(cuLaunchHostFunc(stream, count_up, &calls));
	pthread_create(&thread, NULL, wait_for_stream, stream);
	while (!softcuda_get("syncs"))
		usleep(1000);
	softcuda_set("hold_host", 0);
	pthread_join(thread, NULL);
	ck_assert_int_eq(calls, 1);
}
END_TEST

START_TEST(stream_ordered_memory_is_freed_in_order)
{
	CUdeviceptr memory;
	start();
	CUstream stream = stream_with(0);
	ck_cuda(cuMemAllocAsync(&memory, 4, stream));
	ck_cuda(cuMemsetD32Async(memory, 8, 1, stream));
	ck_cuda(cuStreamSynchronize(stream));
	ck_assert_uint_eq(*look(memory), 8);
	ck_cuda(cuMemFreeAsync(memory, stream));
	ck_assert_int_eq(softcuda_get("live"), 1);
	ck_cuda(cuStreamSynchronize(stream));
	ck_assert_int_eq(softcuda_get("live"), 0);
}
END_TEST

START_TEST(freeing_waits_for_the_work_that_uses_the_memory)
{
	start();
	CUstream stream = stream_with(CU_STREAM_NON_BLOCKING);
	CUdeviceptr source = allocate(4), target = allocate(4);
	ck_cuda(cuMemsetD32Async(source, 5, 1, stream));
	ck_cuda(cuMemcpyDtoDAsync(target, source, 4, stream));
	ck_cuda(cuMemFree(source));
	ck_assert_uint_eq(*look(target), 5);
}
END_TEST

START_TEST(addresses_of_functions_depend_on_the_version_asked_for)
{
	void *old, *new, *none = &old;
	CUdriverProcAddressQueryResult result;
	ck_cuda(cuGetProcAddress("cuStreamGetCaptureInfo", &old, 12000, 0, &result));
	ck_cuda(cuGetProcAddress("cuStreamGetCaptureInfo", &new, 13000, 0, &result));
	ck_assert_ptr_ne(old, new);
	ck_cuda(cuGetProcAddress("cuMemAlloc", &old, 13000, 0, &result));
	ck_assert_ptr_eq(old, (void *)cuMemAlloc);
	ck_assert_int_eq(cuGetProcAddress("cuMemAllocAsync", &none, 11000, 0, &result),
	                 CUDA_ERROR_NOT_FOUND);
	ck_assert_int_eq(result, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
	ck_assert_int_eq(cuGetProcAddress("cuNothing", &none, 13000, 0, &result),
	                 CUDA_ERROR_NOT_FOUND);
	ck_assert_ptr_null(none);
}
END_TEST

static void *submit_and_wait(void *memory)
{
	ck_cuda(cuCtxSetCurrent(context));
	for (int i = 0; i < 200; i++) {
		ck_cuda(cuMemsetD32Async((CUdeviceptr)(uintptr_t)memory, (unsigned)i, 1,
		                         CU_STREAM_PER_THREAD));
		ck_cuda(cuStreamSynchronize(CU_STREAM_PER_THREAD));
		ck_assert_uint_eq(*(volatile unsigned *)memory, (unsigned)i);
	}
	return NULL;
}

START_TEST(threads_have_default_streams_of_their_own)
{
	pthread_t threads[4];
	start();
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, submit_and_wait, (void *)(uintptr_t)allocate(4));
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	ck_assert_int_eq(softcuda_get("syncs"), 800);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("softcuda driver");
	TCase *tests = tcase_create("driver");
	tcase_add_test(tests, nothing_works_before_cuInit);
	tcase_add_test(tests, fresh_memory_is_poisoned_and_aligned);
	tcase_add_test(tests, only_the_start_of_an_allocation_can_be_freed_and_only_once);
	tcase_add_test(tests, pointer_attributes_tell_allocations_from_other_memory);
	tcase_add_test(tests, a_write_past_the_end_is_counted_when_freed);
	tcase_add_test(tests, memory_freed_last_is_given_again_if_that_is_wanted);
	tcase_add_test(tests, memory_is_mapped_in_pieces_and_more_than_once);
	tcase_add_test(tests, rows_batches_and_peers_are_copied);
	tcase_add_test(tests, the_nth_allocation_fails_and_all_after);
	tcase_add_test(tests, memory_of_a_device_is_bounded);
	tcase_add_test(tests, work_waits_until_something_synchronises);
	tcase_add_test(tests, pageable_sources_are_read_at_once_and_pinned_ones_when_run);
	tcase_add_test(tests, a_copy_to_pageable_memory_has_arrived_when_it_returns);
	tcase_add_test(tests, unrelated_streams_run_in_either_order);
	tcase_add_test(tests, an_event_orders_streams);
	tcase_add_test(tests, the_default_stream_orders_itself_with_blocking_streams_only);
	tcase_add_test(tests, kernel_arguments_are_taken_by_value_in_both_forms);
	tcase_add_test(tests, kernels_of_the_oracle_are_found_and_others_are_not);
	tcase_add_test(tests, impossible_launches_are_refused);
	tcase_add_test(tests, a_library_kernel_launches_but_is_not_a_function);
	tcase_add_test(tests, queries_answer_not_ready_and_come_to_an_end);
	tcase_add_test(tests, events_measure_time_that_passes);
	tcase_add_test(tests, events_tell_the_time_that_kernels_are_said_to_take);
	tcase_add_test(tests, the_nth_use_of_an_event_fails);
	tcase_add_test(tests, stream_handles_come_back_but_their_ids_do_not);
	tcase_add_test(tests, work_of_a_destroyed_stream_still_runs);
	tcase_add_test(tests, a_new_thread_has_no_current_context);
	tcase_add_test(tests, a_primary_context_comes_back_with_a_new_id_and_no_memory);
	tcase_add_test(tests, memory_and_streams_belong_to_the_device_of_their_context);
	tcase_add_test(tests, a_child_of_a_process_that_used_the_driver_is_refused_everything);
	tcase_add_test(tests, a_child_of_a_process_that_did_not_use_the_driver_can);
	tcase_add_test(tests, host_functions_run_in_the_order_of_their_stream);
	tcase_add_test(tests, host_functions_that_are_held_up_hold_up_their_stream);
	tcase_add_test(tests, a_thread_that_waits_goes_on_when_host_functions_do);
	tcase_add_test(tests, stream_ordered_memory_is_freed_in_order);
	tcase_add_test(tests, freeing_waits_for_the_work_that_uses_the_memory);
	tcase_add_test(tests, addresses_of_functions_depend_on_the_version_asked_for);
	tcase_add_test(tests, threads_have_default_streams_of_their_own);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
