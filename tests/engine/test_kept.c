/* A kept copy of a weight is never stale: whatever writes the weight, from wherever, eagerly or
 * under a graph, the next product is that of the weight as it is then. And the memory of copies:
 * its limit, devices, forked children, threads. */
#define _GNU_SOURCE
#include "child.h"
#include "kept.h"

#include <cuda.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "softcuda/softcuda.h"

#define T_ CUBLAS_OP_T

#define OFTEN 100 /* uses of a copy that may change a few times and is still worth it */

static struct session session;
static struct made x;

static void open_all(const char *shape)
{
	session_open(&session);
	product_make(&x, &shapes[atoi(shape)], 1);
	other_product(&session);
	step_begin();
}

static void warm_up(void)
{
	for (int i = 0; i < WARMUP; i++)
		step_call(&x, &session);
}

static cudaStream_t new_stream(void)
{
	cudaStream_t stream;
	must((int)cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
	return stream;
}

/* ---- ways to write the weight; each leaves its host values in x.a -------------------------------
 *
 * Most write a few rows, none of which the next products compare with the copy: that these are
 * right is owed to what was seen of the write.
 */

/* New contents in memory of their own, which stay valid for what copies from there. */
static void *new_weight(void)
{
	static uint64_t seed = 100;
	struct made other;
	product_make(&other, &x.p, ++seed);
	memcpy(x.a, other.a, x.size_a * sizeof *x.a);
	return other.da;
}

static CUdeviceptr pointer(const void *address)
{
	return (CUdeviceptr)(uintptr_t)address;
}

/* All of the weight. */
static void kernel_copy(void *from, cudaStream_t stream)
{
	kept_copy(x.da, from, BYTES, stream);
}

static void kernel_copy_rows(void *from, cudaStream_t stream)
{
	kept_copy(kept_rows_of(x.da), from, PART_BYTES, stream);
}

static void by_host_copy(void)
{
	uint16_t *host = malloc(PART_BYTES);
	must((int)cudaMemcpy(host, kept_new_rows(&x), PART_BYTES, cudaMemcpyDeviceToHost), "copy");
	must((int)cudaMemcpy(kept_rows_of(x.da), host, PART_BYTES, cudaMemcpyHostToDevice), "copy");
	free(host);
}

static void by_host_copy_in_stream(void)
{
	uint16_t *host = malloc(PART_BYTES);
	must((int)cudaMemcpy(host, kept_new_rows(&x), PART_BYTES, cudaMemcpyDeviceToHost), "copy");
	must((int)cudaMemcpyAsync(kept_rows_of(x.da), host, PART_BYTES, cudaMemcpyHostToDevice,
	                          session.stream),
	     "copy");
	free(host);
}

static void by_device_copy(void)
{
	must((int)cudaMemcpyAsync(kept_rows_of(x.da), kept_new_rows(&x), PART_BYTES,
	                          cudaMemcpyDeviceToDevice, session.stream),
	     "copy");
}

static void all_by_device_copy(void)
{
	must((int)cudaMemcpyAsync(x.da, new_weight(), BYTES, cudaMemcpyDeviceToDevice,
	                          session.stream),
	     "copy");
}

/* 0x3f3f is a number, near 0.75. */
static void by_memset(void)
{
	must((int)cudaMemsetAsync(x.da, 0x3f, BYTES, session.stream), "memset");
	for (size_t i = 0; i < x.size_a; i++)
		x.a[i] = 0x1.7ep-1;
}

static void by_a_row(void)
{
	const size_t row = 77 * IN;
	must((int)cudaMemsetAsync((uint16_t *)x.da + row, 0x41, IN * sizeof(uint16_t),
	                          session.stream),
	     "memset");
	for (size_t i = row; i < row + IN; i++)
		x.a[i] = 0x1.82p3; /* 0x4141 */
}

/* In the last row; a product of the weight as it was is of no use. */
static void by_an_element(void)
{
	static const uint16_t hundred = 0x42c8;
	const size_t last = (size_t)OUT * IN - 1;
	must((int)cudaMemcpyAsync((uint16_t *)x.da + last, &hundred, sizeof hundred,
	                          cudaMemcpyHostToDevice, session.stream),
	     "copy");
	x.a[last] = 100;
}

static void by_peer_copy(void)
{
	CUcontext context;
	must((int)cuCtxGetCurrent(&context), "context");
	must((int)cuMemcpyPeerAsync(pointer(kept_rows_of(x.da)), context,
	                            pointer(kept_new_rows(&x)), context, PART_BYTES,
	                            (CUstream)session.stream),
	     "peer copy");
}

/* The rows but for their last eight elements. */
static void by_columns(void)
{
	const size_t pitch = IN * sizeof(uint16_t);
	double old[ROWS * IN];
	memcpy(old, x.a + PART, sizeof old);
	const CUDA_MEMCPY2D columns = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
	                               .srcDevice = pointer(kept_new_rows(&x)),
	                               .srcPitch = pitch,
	                               .dstY = FIRST,
	                               .dstMemoryType = CU_MEMORYTYPE_DEVICE,
	                               .dstDevice = pointer(x.da),
	                               .dstPitch = pitch,
	                               .WidthInBytes = (IN - 8) * sizeof(uint16_t),
	                               .Height = ROWS};
	must((int)cuMemcpy2DAsync(&columns, (CUstream)session.stream), "copy of columns");
	for (size_t row = 0; row < ROWS; row++)
		memcpy(x.a + PART + (row + 1) * IN - 8, old + (row + 1) * IN - 8, 8 * sizeof *old);
}

#if CUDA_VERSION >= 13000
/* The weight is the second of two targets. */
static void by_batch(void)
{
	const CUdeviceptr from = pointer(kept_new_rows(&x));
	CUdeviceptr targets[2] = {0, pointer(kept_rows_of(x.da))}, sources[] = {from, from};
	CUmemcpyAttributes how = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
	size_t sizes[] = {256, PART_BYTES}, first = 0;
	must((int)cuMemAlloc(&targets[0], sizes[0]), "malloc");
	must((int)cuMemcpyBatchAsync(targets, sources, sizes, 2, &how, &first, 1,
	                             (CUstream)session.stream),
	     "batch of copies");
}
#endif

static void by_kernel(void)
{
	kernel_copy_rows(kept_new_rows(&x), session.stream);
}

/* An optimizer's fused kernel has its targets in a struct. */
static void by_kernel_with_struct(void)
{
	struct {
		uint32_t count, value;
		uint64_t target[3];
	} each = {PART_BYTES / 4, 0x3f803f80, {0, (uintptr_t)kept_rows_of(x.da), 0}};
	kept_launch("softcuda_fill_each", (void *[]){&each}, session.stream);
	kept_rows_are(&x, 1);
}

/* A product whose D is in the weight. Its host values are fetched once the product of interest is
 * submitted (take_over): waiting would be one more thing that tells. */
static struct made writer;

static void write_by(const struct product *shape)
{
	product_make(&writer, shape, 33);
	writer.dd = kept_rows_of(x.da);
	step_submit(&writer, &session);
}

static void by_product(void)
{
	write_by(&(struct product){.ta = T_, .m = IN, .n = ROWS, .k = 64});
}

/* The same by an engine: its key was made known before, with another output. */
static void by_product_of_ours(void)
{
	const struct product shape = {.ta = T_, .m = IN, .n = ROWS, .k = 128};
	product_make(&writer, &shape, 33);
	step_submit(&writer, &session);
	product_fetch(&writer);
	writer.dd = kept_rows_of(x.da);
	step_submit(&writer, &session);
}

/* An adapter that is merged: W += BA. */
static void by_adapter(void)
{
	write_by(&(struct product){.ta = T_, .m = IN, .n = ROWS, .k = 64, .beta = 1});
}

static void take_over(void)
{
	if (!writer.dd || writer.dd != kept_rows_of(x.da))
		return;
	product_fetch(&writer);
	memcpy(x.a + PART, writer.d, (size_t)ROWS * IN * sizeof *x.a);
	writer.dd = NULL;
}

/* The memory is another's from then on, at the same address. */
static void by_free_and_allocate(void)
{
	void *const old = x.base[0];
	softcuda_set("reuse", 1);
	must((int)cudaFree(old), "free");
	must((int)cudaMalloc(&x.base[0], BYTES + 256), "malloc");
	must(x.base[0] != old, "another address");
	all_by_device_copy();
}

static void in_another_stream(void)
{
	cudaEvent_t event;
	cudaStream_t stream = new_stream();
	void *from = kept_new_rows(&x);
	must((int)cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
	kernel_copy_rows(from, stream);
	must((int)cudaEventRecord(event, stream), "record");
	must((int)cudaStreamWaitEvent(session.stream, event, 0), "wait");
}

static void *copy_in_thread(void *unused)
{
	must((int)cudaSetDevice(0), "device");
	in_another_stream();
	return unused;
}

static void in_another_thread(void)
{
	pthread_t thread;
	must(pthread_create(&thread, NULL, copy_in_thread, NULL), "thread");
	must(pthread_join(thread, NULL), "join");
}

static void launch_graph(cudaGraphExec_t executable)
{
	must((int)cudaGraphLaunch(executable, session.stream), "launch");
}

/* With products between capture and launch, so that only the launch can tell. */
static void by_graph(void)
{
	void *from = kept_new_rows(&x);
	step_begin_capture(&session);
	kernel_copy_rows(from, session.stream);
	cudaGraphExec_t executable = step_end_capture(&session);
	for (int i = 0; i < WARMUP; i++)
		step_submit(&x, &session);
	launch_graph(executable);
}

static const struct way {
	const char *name;
	void (*write)(void);
	bool drops; /* what is tracked: the new memory has no copy yet */
} ways[] = {
        {"host copy", by_host_copy, false},
        {"host copy in a stream", by_host_copy_in_stream, false},
        {"device copy", by_device_copy, false},
        {"memset", by_memset, false},
        {"memset of a row", by_a_row, false},
        {"element", by_an_element, false},
        {"peer copy", by_peer_copy, false},
        {"columns", by_columns, false},
#if CUDA_VERSION >= 13000
        {"batch", by_batch, false},
#endif
        {"kernel", by_kernel, false},
        {"kernel with a struct", by_kernel_with_struct, false},
        {"product", by_product, false},
        {"product of ours", by_product_of_ours, false},
        {"adapter", by_adapter, false},
        {"free and allocate", by_free_and_allocate, true},
        {"another stream", in_another_stream, false},
        {"another thread", in_another_thread, false},
        {"graph", by_graph, false},
};

#define WAYS ((int)(sizeof ways / sizeof *ways))

/* ---- scenes: writes -----------------------------------------------------------------------------
 */

/* `write SHAPE WAY`: nothing waits between the write and the product after it. */
static int scene_write(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	open_all(argv[0]);
	warm_up();
	product_poison(&x);
	ways[atoi(argv[1])].write();
	step_submit(&x, &session);
	take_over();
	step_print(&x);
	step_call(&x, &session);
	step_call(&x, &session);
	return 0;
}

#define LAYERS 5
#define ROUNDS 12

/* `buffer SHAPE`: each layer's weight is put into one buffer before its product, as libraries do
 * that hold weights in 4 bits themselves. */
static int scene_buffer(int argc, char **argv)
{
	static double values[LAYERS][OUT * IN];
	void *weights[LAYERS];
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	for (int layer = 0; layer < LAYERS; layer++) {
		weights[layer] = new_weight();
		memcpy(values[layer], x.a, sizeof values[layer]);
	}
	for (int i = 0; i < LAYERS * ROUNDS; i++) {
		const int layer = i % LAYERS;
		product_poison(&x);
		kernel_copy(weights[layer], session.stream);
		memcpy(x.a, values[layer], sizeof values[layer]);
		step_submit(&x, &session);
		step_print(&x);
	}
	return 0;
}

/* ---- scenes: writes that no call announces ------------------------------------------------------
 */

#define TURNS 64 /* products within which any such write is found */

/* By whom it does not matter: device memory is host memory here. What is in flight has ended. */
static void unseen_copy(void)
{
	memcpy(x.da, new_weight(), BYTES);
}

static void unseen_row(void)
{
	const size_t row = 77 * IN;
	memset((uint16_t *)x.da + row, 0x41, IN * sizeof(uint16_t));
	for (size_t i = row; i < row + IN; i++)
		x.a[i] = 0x1.82p3; /* 0x4141 */
}

/* In the last row, so large that a product of the weight as it was is of no use. */
static void unseen_element(void)
{
	const size_t last = (size_t)OUT * IN - 1;
	((uint16_t *)x.da)[last] = 0x42c8;
	x.a[last] = 100;
}

/* `unseen SHAPE WHICH`: a step before the write, those in which it must be found, some more, and
 * then a second write, of everything. */
static int scene_unseen(int argc, char **argv)
{
	static void (*const writes[])(void) = {unseen_copy, unseen_row, unseen_element};
	if (argc != 2)
		return 2;
	open_all(argv[0]);
	warm_up();
	for (int i = 0; i < OFTEN; i++)
		step_submit(&x, &session);
	product_fetch(&x);
	step_begin();
	step_call(&x, &session);
	writes[atoi(argv[1])]();
	for (int i = 0; i < TURNS + 4; i++)
		step_call(&x, &session);
	unseen_copy();
	step_call(&x, &session);
	return 0;
}

/* `ahead SHAPE`: the host submits many products, in two streams that take turns, before it can know
 * that the first of them found the write. */
static int scene_ahead(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	cudaStream_t streams[] = {session.stream, new_stream()};
	warm_up();
	unseen_copy();
	for (int i = 0; i < 20; i++) {
		session_use(&session, streams[i % 2]);
		if (i == 19)
			product_poison(&x);
		step_submit(&x, &session);
	}
	step_print(&x);
	return 0;
}

/* `reader SHAPE`: a kernel that left the weight as it was many times, and then does not. */
static int scene_reader(int argc, char **argv)
{
	void *same;
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	warm_up();
	for (int i = 0; i < OFTEN; i++)
		step_submit(&x, &session);
	product_fetch(&x);
	must((int)cudaMalloc(&same, BYTES), "malloc");
	memcpy(same, x.da, BYTES);
	for (int i = 0; i < 24; i++) {
		kernel_copy(same, session.stream);
		step_submit(&x, &session);
		product_fetch(&x);
	}
	step_begin();
	kernel_copy(same, session.stream);
	step_call(&x, &session);
	for (int i = 0; i < 3; i++) {
		kernel_copy(new_weight(), session.stream);
		step_call(&x, &session);
	}
	return 0;
}

/* ---- scenes: graphs -----------------------------------------------------------------------------
 */

static cudaGraphExec_t capture(void)
{
	step_begin_capture(&session);
	step_submit(&x, &session);
	return step_end_capture(&session);
}

static void replay(cudaGraphExec_t executable)
{
	product_poison(&x);
	launch_graph(executable);
	step_print(&x);
}

/* `cold SHAPE`: the product was called once, so that its plan is known and no copy is. */
static int scene_cold(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	step_call(&x, &session);
	cudaGraphExec_t executable = capture();
	replay(executable);
	by_device_copy();
	replay(executable);
	return 0;
}

/* `replays SHAPE`: with a copy, and the weight written between some of the replays. */
static int scene_replays(int argc, char **argv)
{
	static void (*const writes[])(void) = {by_a_row,   NULL, by_device_copy, by_kernel,
	                                       by_product, NULL, by_memset};
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	warm_up();
	for (int i = 0; i < OFTEN; i++)
		step_submit(&x, &session);
	product_fetch(&x); /* a capture wants checks that are over */
	cudaGraphExec_t executable = capture();
	replay(executable);
	for (size_t i = 0; i < sizeof writes / sizeof *writes; i++) {
		product_poison(&x);
		if (writes[i])
			writes[i]();
		launch_graph(executable);
		take_over();
		step_print(&x);
	}
	step_call(&x, &session);
	return 0;
}

/* `replayed SHAPE WHICH`: a write that no call announces, and replays alone after it. */
static int scene_replayed(int argc, char **argv)
{
	static void (*const writes[])(void) = {unseen_copy, unseen_row, unseen_element};
	if (argc != 2)
		return 2;
	open_all(argv[0]);
	warm_up();
	for (int i = 0; i < OFTEN; i++)
		step_submit(&x, &session);
	product_fetch(&x);
	cudaGraphExec_t executable = capture();
	replay(executable);
	writes[atoi(argv[1])]();
	for (int i = 0; i < TURNS + 4; i++)
		replay(executable);
	return 0;
}

/* `alone SHAPE`: nothing but replays, and a write that nobody announces after the second. */
static int scene_alone(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	warm_up();
	for (int i = 0; i < OFTEN; i++)
		step_submit(&x, &session);
	product_fetch(&x); /* a capture wants checks that are over */
	cudaGraphExec_t executable = capture();
	step_begin();
	for (int i = 0; i < 6; i++) {
		if (i == 2)
			unseen_copy();
		replay(executable);
	}
	return 0;
}

/* `restless SHAPE`: the weight is written before every replay, until its copy does not pay and is
 * dropped under the graph that holds it. */
static int scene_restless(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	warm_up();
	cudaGraphExec_t executable = capture();
	for (int i = 0; i < 6; i++) {
		product_poison(&x);
		by_device_copy();
		launch_graph(executable);
		step_print(&x);
		step_call(&x, &session);
	}
	return 0;
}

/* `suspect SHAPE`: captured when it is not known whether the copy is still good. */
static int scene_suspect(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	warm_up();
	by_device_copy();
	cudaGraphExec_t executable = capture();
	replay(executable);
	replay(executable);
	return 0;
}

/* `inside SHAPE`: the weight is written by a node of the graph, before the product and after it. */
static int scene_inside(int argc, char **argv)
{
	double *values[2];
	void *weights[2];
	struct made second;
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	warm_up();
	for (int i = 0; i < 2; i++) {
		weights[i] = new_weight();
		values[i] = malloc(x.size_a * sizeof *x.a);
		memcpy(values[i], x.a, x.size_a * sizeof *x.a);
	}
	product_make(&second, &x.p, 9);
	second.da = x.da;
	step_begin_capture(&session);
	step_submit(&x, &session);
	kernel_copy(weights[1], session.stream);
	step_submit(&second, &session);
	cudaGraphExec_t executable = step_end_capture(&session);
	for (int i = 0; i < 3; i++) {
		product_poison(&second);
		product_poison(&x);
		kernel_copy(weights[0], session.stream);
		launch_graph(executable);
		memcpy(x.a, values[0], x.size_a * sizeof *x.a);
		memcpy(second.a, values[1], x.size_a * sizeof *x.a);
		step_print(&x);
		step_print(&second);
	}
	return 0;
}

/* ---- scenes: memory, devices, processes, threads ------------------------------------------------
 */

#define WEIGHTS 12

/* More weights than there is room for, used in turn. */
static int scene_weights(int argc, char **argv)
{
	static const struct product shape = {.ta = T_, .m = 512, .n = 1, .k = 1024};
	struct made made[WEIGHTS];
	(void)argc, (void)argv;
	session_open(&session);
	for (uint64_t i = 0; i < WEIGHTS; i++)
		product_make(&made[i], &shape, i);
	other_product(&session);
	step_begin();
	for (int i = 0; i < 6 * WEIGHTS; i++)
		step_call(&made[i % WEIGHTS], &session);
	return 0;
}

/* `exhausted SHAPE`: when the copy is to be made there is no memory; later there is. */
static int scene_exhausted(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	for (int i = 0; i < 2; i++)
		step_call(&x, &session);
	softcuda_set("fail_alloc", 1);
	for (int i = 0; i < 4; i++)
		step_call(&x, &session);
	softcuda_set("fail_alloc", 0);
	for (int i = 0; i < 100; i++) {
		step_submit(&x, &session);
		product_fetch(&x);
	}
	step_begin();
	step_call(&x, &session);
	return 0;
}

/* The status is what it is without the shim: the emulation, as the driver, is of no use here. */
static int in_child(void)
{
	const bool failed = product_call(&x, &session) != CUBLAS_STATUS_SUCCESS;
	return failed ? 0 : 1;
}

static int scene_fork(int argc, char **argv)
{
	int status = -1;
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	warm_up();
	fflush(stdout);
	const pid_t child = fork();
	if (!child)
		_exit(in_child());
	waitpid(child, &status, 0);
	printf("child %d\n", status);
	step_call(&x, &session);
	by_device_copy();
	step_call(&x, &session);
	return 0;
}

/* The same weight's shape on two devices, in turn. */
static int scene_devices(int argc, char **argv)
{
	struct session sessions[2];
	struct made made[2];
	if (argc != 1)
		return 2;
	for (int i = 0; i < 2; i++) {
		must((int)cudaSetDevice(i), "device");
		session_open(&sessions[i]);
		product_make(&made[i], &shapes[atoi(argv[0])], 1 + (uint64_t)i);
		other_product(&sessions[i]);
	}
	step_begin();
	for (int i = 0; i < 2 * (WARMUP + 2); i++) {
		must((int)cudaSetDevice(i % 2), "device");
		step_call(&made[i % 2], &sessions[i % 2]);
		if (i >= 2 * WARMUP)
			product_refill(&made[i % 2], 50 + (uint64_t)i);
	}
	return 0;
}

#define THREADS 4

static pthread_barrier_t barrier;
static double worst[THREADS];

/* Each has a stream and an X of its own; the weight is shared. */
static void *products_of_thread(void *argument)
{
	const uintptr_t number = (uintptr_t)argument;
	struct session own;
	struct made made;
	must((int)cudaSetDevice(0), "device");
	session_open(&own);
	product_make(&made, &x.p, 10 + number);
	made.da = x.da;
	worst[number] = INFINITY;
	for (int round = 0; round < 4; round++) {
		pthread_barrier_wait(&barrier); /* the weight is written */
		memcpy(made.a, x.a, x.size_a * sizeof *x.a);
		for (int i = 0; i < 20; i++) {
			product_poison(&made);
			step_submit(&made, &own);
			product_fetch(&made);
			worst[number] = fmin(worst[number], product_sqnr(&made));
		}
		pthread_barrier_wait(&barrier);
	}
	return NULL;
}

static int scene_threads(int argc, char **argv)
{
	pthread_t threads[THREADS];
	if (argc != 1)
		return 2;
	open_all(argv[0]);
	pthread_barrier_init(&barrier, NULL, THREADS + 1);
	for (uintptr_t i = 0; i < THREADS; i++)
		must(pthread_create(&threads[i], NULL, products_of_thread, (void *)i), "thread");
	for (int round = 0; round < 4; round++) {
		kernel_copy(new_weight(), session.stream);
		must((int)cudaStreamSynchronize(session.stream), "synchronise");
		pthread_barrier_wait(&barrier);
		pthread_barrier_wait(&barrier);
	}
	for (int i = 0; i < THREADS; i++) {
		must(pthread_join(threads[i], NULL), "join");
		printf("worst%d %.2f\n", i, worst[i]);
	}
	step_print(&x); /* for what is kept and was used */
	return 0;
}

const struct scene scenes[] = {
        {"restless", scene_restless},   {"replayed", scene_replayed}, {"write", scene_write},
        {"unseen", scene_unseen},       {"ahead", scene_ahead},       {"reader", scene_reader},
        {"buffer", scene_buffer},       {"cold", scene_cold},         {"replays", scene_replays},
        {"suspect", scene_suspect},     {"inside", scene_inside},     {"weights", scene_weights},
        {"exhausted", scene_exhausted}, {"fork", scene_fork},         {"devices", scene_devices},
        {"threads", scene_threads},     {"alone", scene_alone},       {NULL, NULL},
};

/* ---- running ------------------------------------------------------------------------------------
 */

static struct outcome outcome;

static void run_scene_of(const struct kind *kind, const char *level, const char *scene)
{
	run_kind(&outcome, kind, level, "", scene, NULL, 1);
}

/* ---- writes -------------------------------------------------------------------------------------
 */

START_TEST(whatever_writes_a_weight_is_seen)
{
	const struct way *way = &ways[_i % WAYS];
	const struct kind *kind = &kinds[_i / WAYS % KINDS];
	const char *level = levels[_i / WAYS / KINDS];
	char which[16];
	snprintf(which, sizeof which, "%d", _i % WAYS);
	run_kind(&outcome, kind, level, "", "write", which, 1 + _i % 5);
	expect_kept(&outcome, kind, way->name, WARMUP - 1);
	for (int i = WARMUP; i < WARMUP + 3; i++)
		expect_right(&outcome, kind, way->name, i);
	const bool dropped = way->drops && !strcmp(level, "tracked");
	const struct step step = step_at(&outcome, WARMUP);
	ck_assert_msg((step.uses[kind->form] > 0) == !dropped, "%s, %s: %ld uses", kind->name,
	              way->name, step.uses[kind->form]);
}
END_TEST

/* By the user's word: this is what the other levels are measured by. */
START_TEST(a_frozen_weight_is_not_looked_at_again)
{
	const struct kind *kind = &kinds[_i];
	run_kind(&outcome, kind, "frozen", "", "write", "4", 1);
	for (int i = WARMUP; i < WARMUP + 3; i++) {
		const struct step step = step_at(&outcome, i);
		ck_assert_msg(step.sqnr < 10, "%s: %.2f dB", kind->name, step.sqnr);
		ck_assert_int_eq(step.uses[kind->form], 1);
	}
}
END_TEST

START_TEST(a_buffer_for_the_weights_of_all_layers_is_never_kept)
{
	const struct kind *kind = &kinds[_i % KINDS];
	run_scene_of(kind, levels[_i / KINDS], "buffer");
	ck_assert_int_eq(steps(&outcome), LAYERS * ROUNDS);
	ck_assert_uint_eq(total_replaced(&outcome), LAYERS * ROUNDS);
	for (int i = 0; i < LAYERS * ROUNDS; i++) {
		const struct step step = step_at(&outcome, i);
		expect_right(&outcome, kind, "buffer", i);
		for (int form = 0; form < QS_KEPT_FORMS; form++)
			ck_assert_msg(!step.uses[form] && !step.bytes[form], "%s, step %d",
			              kind->name, i);
	}
}
END_TEST

/* ---- writes that no call announces --------------------------------------------------------------
 */

#define ESCAPED "was written by something that was not seen"

/* The last of the steps in which the weight as it was, or a part of it, was still multiplied. */
static int last_stale(const struct kind *kind, int from, int to)
{
	int last = from - 1;
	for (int i = from; i < to; i++)
		if (step_at(&outcome, i).sqnr < least_of(kind))
			last = i;
	return last;
}

static void run_unseen(const struct kind *kind, const char *level, const char *which)
{
	run_kind(&outcome, kind, level, "", "unseen", which, 1);
	expect_kept(&outcome, kind, "before the write", WARMUP);
	ck_assert_int_eq(step_at(&outcome, WARMUP).launches[HASHES], !strcmp(level, "verified"));
}

START_TEST(a_weight_replaced_unseen_is_right_at_once)
{
	const struct kind *kind = &kinds[_i % KINDS];
	run_unseen(kind, levels[_i / KINDS], "0");
	for (int i = WARMUP + 1; i < steps(&outcome); i++)
		expect_right(&outcome, kind, "unseen", i);
}
END_TEST

/* Multiplied by cuBLASLt. */
static bool is_many(const struct kind *kind)
{
	return kind->shape == 1 || kind->shape == 2;
}

START_TEST(a_part_written_unseen_is_found_within_64_products)
{
	const struct kind *kind = &kinds[_i / 2];
	const int first = WARMUP + 1;
	run_unseen(kind, "tracked", _i % 2 ? "2" : "1");
	const int last = last_stale(kind, first, first + TURNS + 4);
	ck_assert_msg(last < first + TURNS - 1, "%s: stale at product %d", kind->name,
	              last - first);
	for (int i = first + TURNS; i < steps(&outcome); i++)
		expect_right(&outcome, kind, "unseen", i);
	/* all are verified from then on */
	ck_assert_ptr_nonnull(strstr(outcome.err, ESCAPED));
	ck_assert_int_eq(step_at(&outcome, first + TURNS + 3).uses[kind->form], 1);
	ck_assert_int_eq(step_at(&outcome, first + TURNS + 3).launches[HASHES], 1);
}
END_TEST

/* By the product after the one that found it, or by this one's own sample before. */
START_TEST(the_host_is_told_of_an_unseen_write_by_the_next_product)
{
	const struct kind *kind = &kinds[_i];
	run_unseen(kind, "tracked", "0");
	const struct step found = step_at(&outcome, WARMUP + 1),
	                  next = step_at(&outcome, WARMUP + 2);
	ck_assert_int_eq(found.escapes[kind->form], 0);
	ck_assert_int_eq(next.escapes[kind->form], 1);
	ck_assert_int_eq(next.launches[HASHES], 1);
	for (int i = WARMUP + 2; i < WARMUP + 1 + TURNS; i++)
		expect_kept(&outcome, kind, "told", i);
	ck_assert_ptr_nonnull(strstr(outcome.err, ESCAPED));
}
END_TEST

START_TEST(a_verified_or_frozen_weight_is_not_compared_in_part)
{
	const struct kind *kind = &kinds[_i % KINDS];
	run_kind(&outcome, kind, _i < KINDS ? "verified" : "frozen", "", "unseen", "0", 1);
	for (int i = 0; i < steps(&outcome); i++)
		ck_assert_int_eq(step_at(&outcome, i).launches[SAMPLES], 0);
}
END_TEST

START_TEST(a_tracked_weight_is_compared_in_part_by_each_product_of_many_tokens)
{
	const struct kind *kind = &kinds[_i];
	run_kind(&outcome, kind, "tracked", "", "unseen", "1", 1);
	const struct step step = step_at(&outcome, WARMUP);
	ck_assert_int_eq(step.launches[SAMPLES], is_many(kind));
}
END_TEST

/* Nobody can tell the host meanwhile, and the products in the other stream are of the same copy. */
START_TEST(products_submitted_ahead_are_right_after_an_unseen_write)
{
	const struct kind *kind = &kinds[_i % KINDS];
	run_kind(&outcome, kind, "tracked", "", "ahead", NULL, 1 + _i);
	expect_right(&outcome, kind, "ahead", WARMUP);
}
END_TEST

/* It is a writer from then on, and nothing went unseen: the weight is not verified each time. */
START_TEST(a_reader_that_writes_is_found_out)
{
	const struct kind *kind = &kinds[_i];
	run_kind(&outcome, kind, "tracked", "", "reader", NULL, 1);
	ck_assert_int_eq(step_at(&outcome, WARMUP).launches[HASHES], 0);
	for (int i = WARMUP; i < WARMUP + 4; i++)
		expect_right(&outcome, kind, "reader", i);
	ck_assert_ptr_null(strstr(outcome.err, ESCAPED));
	ck_assert_int_eq(step_at(&outcome, WARMUP + 3).launches[HASHES], 1);
}
END_TEST

/* ---- graphs -------------------------------------------------------------------------------------
 */

static bool is_nf4(const struct kind *kind)
{
	return kind->form == FORM_NF4;
}

/* NF4 would pack at each replay, and passes. fp8 does without a copy. */
START_TEST(a_capture_without_a_copy_is_right)
{
	const struct kind *kind = &kinds[_i];
	run_scene_of(kind, "tracked", "cold");
	ck_assert_uint_eq(total_late(&outcome), is_nf4(kind));
	ck_assert_int_eq(decisions_with(&outcome, "capture-cold"), is_nf4(kind));
	for (int i = 1; i < 3; i++) {
		const double sqnr = step_at(&outcome, i).sqnr;
		ck_assert_msg(is_nf4(kind) ? sqnr > 45 : sqnr >= 26.5 && sqnr < 30, "%s: %.2f dB",
		              kind->name, sqnr);
	}
}
END_TEST

START_TEST(a_capture_where_nothing_is_kept_says_so)
{
	run_scene_of(&kinds[_i], "adjacent", "cold");
	ck_assert_uint_eq(total_late(&outcome), 1);
	ck_assert_int_eq(decisions_with(&outcome, "untracked"), 1);
	ck_assert_double_gt(step_at(&outcome, 1).sqnr, 45);
}
END_TEST

/* Not only right, but by the copy: it follows the weight under the graph. */
START_TEST(replays_follow_the_weight)
{
	const struct kind *kind = &kinds[_i % KINDS];
	run_scene_of(kind, levels[_i / KINDS], "replays");
	ck_assert_uint_eq(total_late(&outcome), 0);
	for (int i = WARMUP; i < steps(&outcome); i++)
		expect_right(&outcome, kind, "replay", i);
	for (int i = WARMUP; i < WARMUP + 7; i++) {
		const struct step step = step_at(&outcome, i);
		ck_assert_msg(step.sqnr < 45, "%s, step %d: %.2f dB", kind->name, i, step.sqnr);
	}
}
END_TEST

/* Where the product does not compare by itself, the graph has a check of its own. */
START_TEST(replays_alone_find_what_was_written_unseen)
{
	const struct kind *kind = &kinds[_i / 3 % KINDS];
	const bool tracked = _i < 3 * KINDS;
	const int first = WARMUP + 1, end = first + TURNS + 4;
	const char *const which[] = {"0", "1", "2"};
	run_kind(&outcome, kind, levels[!tracked], "", "replayed", which[_i % 3], 1);
	ck_assert_uint_eq(total_late(&outcome), 0);
	expect_right(&outcome, kind, "before the write", first - 1);
	const int found = last_stale(kind, first, end) + 1 - first;
	ck_assert_msg(found < (tracked && !is_many(kind) && _i % 3 ? TURNS : 1),
	              "%s: stale at replay %d", kind->name, found - 1);
	ck_assert_double_lt(step_at(&outcome, first - 1).sqnr, 45); /* by a copy */
}
END_TEST

/* The replay that finds it is right, the next one has the copy made anew before. */
START_TEST(a_replay_tells_the_next_one_of_an_unseen_write)
{
	const struct kind *kind = &kinds[_i];
	if (is_many(kind))
		return; /* the graph checks all of the weight itself */
	run_scene_of(kind, "tracked", "alone");
	for (int i = WARMUP; i < WARMUP + 6; i++) {
		const struct step step = step_at(&outcome, i);
		ck_assert_msg(step.sqnr >= kind->least, "step %d: %.2f dB", i, step.sqnr);
		ck_assert_int_eq(step.launches[HASHES], i > WARMUP + 2);
		ck_assert_int_eq(step.escapes[kind->form], i == WARMUP + 3);
		ck_assert_msg((step.sqnr < kind->most) == (i != WARMUP + 2), "step %d: %.2f dB", i,
		              step.sqnr);
	}
	ck_assert_ptr_nonnull(strstr(outcome.err, ESCAPED));
}
END_TEST

START_TEST(a_frozen_weight_is_replayed_as_it_was)
{
	const struct kind *kind = &kinds[_i];
	run_scene_of(kind, "frozen", "replays");
	ck_assert_double_ge(step_at(&outcome, WARMUP).sqnr, kind->least);
	for (int i = WARMUP + 1; i < WARMUP + 8; i++)
		ck_assert_double_lt(step_at(&outcome, i).sqnr, 10);
}
END_TEST

START_TEST(a_graph_whose_copy_is_dropped_is_right)
{
	const struct kind *kind = &kinds[_i % KINDS];
	run_scene_of(kind, levels[_i / KINDS], "restless");
	ck_assert_ptr_nonnull(strstr(outcome.err, "is dropped: changing"));
	ck_assert_int_eq(step_at(&outcome, WARMUP + 11).bytes[kind->form], 0);
	for (int i = WARMUP; i < WARMUP + 12; i++)
		expect_right(&outcome, kind, "restless", i);
}
END_TEST

START_TEST(a_suspect_copy_is_captured_only_with_its_check)
{
	const struct kind *kind = &kinds[_i % KINDS];
	run_scene_of(kind, levels[_i / KINDS], "suspect");
	const bool passes = is_nf4(kind) && _i < KINDS;
	ck_assert_uint_eq(total_late(&outcome), passes);
	ck_assert_int_eq(decisions_with(&outcome, "capture-cold"), passes);
	for (int i = WARMUP; i < WARMUP + 2; i++)
		expect_right(&outcome, kind, "suspect", i);
}
END_TEST

START_TEST(a_graph_that_writes_the_weight_itself_is_right)
{
	const struct kind *kind = &kinds[_i % KINDS];
	run_scene_of(kind, levels[_i / KINDS], "inside");
	ck_assert_int_eq(steps(&outcome), WARMUP + 6);
	for (int i = WARMUP; i < WARMUP + 6; i++)
		expect_right(&outcome, kind, "inside", i);
	ck_assert_ptr_null(strstr(outcome.err, ESCAPED));
}
END_TEST

/* ---- memory, devices, processes, threads --------------------------------------------------------
 */

/* 34 MiB are scratch, half a MiB is one copy. */
START_TEST(the_limit_of_memory_holds_for_copies)
{
	const struct kind *kind = &kinds[3];
	run_kind(&outcome, kind, levels[_i], ";cache.max_mib=38", "weights", NULL, 1);
	const long copies = step_at(&outcome, 6 * WEIGHTS - 1).bytes[FORM_FP8_TILES] >> 19;
	ck_assert_msg(copies >= 4 && copies <= 7, "%ld copies", copies);
	ck_assert_ptr_nonnull(strstr(outcome.err, "[cache] max_mib"));
	ck_assert_uint_eq(total_replaced(&outcome), 6 * WEIGHTS);
	for (int i = 0; i < 6 * WEIGHTS; i++)
		expect_right(&outcome, kind, "weights", i);
	for (int i = 5 * WEIGHTS; i < 6 * WEIGHTS; i++) {
		const struct step step = step_at(&outcome, i);
		ck_assert_int_eq(step.launches[FP8] + step.uses[FORM_FP8_TILES], 1);
	}
}
END_TEST

START_TEST(without_memory_weights_are_not_kept_until_there_is_some)
{
	const struct kind *kind = &kinds[_i];
	run_scene_of(kind, "tracked", "exhausted");
	for (int i = 0; i < 6; i++) {
		const struct step step = step_at(&outcome, i);
		expect_right(&outcome, kind, "exhausted", i);
		ck_assert_int_eq(step.bytes[kind->form], 0);
		ck_assert_int_eq(step.uses[kind->form], 0);
	}
	expect_kept(&outcome, kind, "later", 6);
	ck_assert_uint_eq(total_replaced(&outcome), 107);
}
END_TEST

START_TEST(a_forked_child_has_no_copies_and_harms_none)
{
	const struct kind *kind = &kinds[_i];
	run_scene_of(kind, "tracked", "fork");
	ck_assert_double_eq(printed(&outcome, "child"), 0);
	expect_kept(&outcome, kind, "parent", WARMUP);
	expect_kept(&outcome, kind, "parent, new weight", WARMUP + 1);
	ck_assert_int_eq(decisions_with(&outcome, "fork"), 1);
}
END_TEST

START_TEST(each_device_has_its_own_copies)
{
	const struct kind *kind = &kinds[_i];
	run_scene_of(kind, "tracked", "devices");
	const long one = step_at(&outcome, 4).bytes[kind->form];
	ck_assert_int_gt(one, 0);
	for (int i = 0; i < 2 * (WARMUP + 2); i++)
		expect_right(&outcome, kind, "devices", i);
	for (int i = 5; i < 2 * (WARMUP + 2); i++) {
		expect_kept(&outcome, kind, "devices", i);
		ck_assert_int_eq(step_at(&outcome, i).bytes[kind->form], 2 * one);
	}
}
END_TEST

START_TEST(threads_share_one_copy_and_see_every_write)
{
	const struct kind *kind = &kinds[_i % KINDS];
	char name[16];
	run_kind(&outcome, kind, levels[_i / KINDS], "", "threads", NULL, 1 + _i);
	for (int i = 0; i < THREADS; i++) {
		snprintf(name, sizeof name, "worst%d", i);
		const double sqnr = printed(&outcome, name);
		ck_assert_msg(sqnr >= (is_nf4(kind) ? 18.5 : 26.5), "%s, thread %d: %.2f dB",
		              kind->name, i, sqnr);
	}
	const struct step step = step_at(&outcome, 0);
	ck_assert_int_gt(step.uses[kind->form], 100);
	ck_assert_int_lt(step.bytes[kind->form], 60000); /* not two */
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("kept weights");
	TCase *tcase = tcase_create("kept");
	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, whatever_writes_a_weight_is_seen, 0, 2 * KINDS * WAYS);
	tcase_add_loop_test(tcase, a_frozen_weight_is_not_looked_at_again, 0, KINDS);
	tcase_add_loop_test(tcase, a_buffer_for_the_weights_of_all_layers_is_never_kept, 0,
	                    2 * KINDS);
	tcase_add_loop_test(tcase, a_weight_replaced_unseen_is_right_at_once, 0, 2 * KINDS);
	tcase_add_loop_test(tcase, a_part_written_unseen_is_found_within_64_products, 0, 2 * KINDS);
	tcase_add_loop_test(tcase, the_host_is_told_of_an_unseen_write_by_the_next_product, 0,
	                    KINDS);
	tcase_add_loop_test(tcase, a_verified_or_frozen_weight_is_not_compared_in_part, 0,
	                    2 * KINDS);
	tcase_add_loop_test(tcase,
	                    a_tracked_weight_is_compared_in_part_by_each_product_of_many_tokens, 0,
	                    KINDS);
	tcase_add_loop_test(tcase, products_submitted_ahead_are_right_after_an_unseen_write, 0,
	                    2 * KINDS);
	tcase_add_loop_test(tcase, a_reader_that_writes_is_found_out, 0, KINDS);
	tcase_add_loop_test(tcase, a_capture_without_a_copy_is_right, 0, KINDS);
	tcase_add_loop_test(tcase, a_capture_where_nothing_is_kept_says_so, 0, 3);
	tcase_add_loop_test(tcase, replays_follow_the_weight, 0, 2 * KINDS);
	tcase_add_loop_test(tcase, replays_alone_find_what_was_written_unseen, 0, 6 * KINDS);
	tcase_add_loop_test(tcase, a_replay_tells_the_next_one_of_an_unseen_write, 0, KINDS);
	tcase_add_loop_test(tcase, a_frozen_weight_is_replayed_as_it_was, 0, KINDS);
	tcase_add_loop_test(tcase, a_graph_whose_copy_is_dropped_is_right, 0, 2 * KINDS);
	tcase_add_loop_test(tcase, a_suspect_copy_is_captured_only_with_its_check, 0, 2 * KINDS);
	tcase_add_loop_test(tcase, a_graph_that_writes_the_weight_itself_is_right, 0, 2 * KINDS);
	tcase_add_loop_test(tcase, the_limit_of_memory_holds_for_copies, 0, 2);
	tcase_add_loop_test(tcase, without_memory_weights_are_not_kept_until_there_is_some, 0,
	                    KINDS);
	tcase_add_loop_test(tcase, a_forked_child_has_no_copies_and_harms_none, 0, KINDS);
	tcase_add_loop_test(tcase, each_device_has_its_own_copies, 0, KINDS);
	tcase_add_loop_test(tcase, threads_share_one_copy_and_see_every_write, 0, 2 * KINDS);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
