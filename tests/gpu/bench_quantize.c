/* Speed of the quantising kernels on this machine's GPU, beside the speed of a plain copy.
 *
 * Usage: bench_quantize [--json]. Each figure is the median of several samples, a sample being many
 * launches between two events, over random data in as many buffers as exceed the L2 cache three
 * times. GB/s counts the bytes a kernel is meant to move: amax reads 2 an element; cast reads 2 and
 * writes the padded output. What the second kernel finds in the cache of the first therefore shows
 * as a higher rate of `both`. Launches follow each other without gaps; small shapes show the cost
 * of a launch.
 */
#include <stdbool.h>
#include <string.h>

#include "tests/gpu/gpu.h"

#define SAMPLES   21
#define SAMPLE_MS 2.0f /* least duration of a sample */
#define SETS_MAX  64
#define COPY      ((size_t)1 << 30)

/* What is timed. */
enum step {
	STEP_COPY, /* device to device, COPY bytes */
	STEP_AMAX,
	STEP_CAST,
	STEP_BOTH,
	STEP_COUNT
};

static const char *const step_names[] = {"copy", "amax", "cast", "both"};

/* A matrix in as many copies as defeat the L2 cache. */
struct work {
	int64_t inner, outer;               /* elements                              */
	uint32_t transpose;                 /* as in quantise.h                      */
	int sets;                           /* copies in use                         */
	struct qs_cast_args args[SETS_MAX]; /* of the cast launch                    */
	CUdeviceptr sources, targets, rest; /* allocations behind them               */
};

/* A measurement, in microseconds a call. */
struct timing {
	double median, least, most;
};

/* Copied to each other in turn. */
static CUdeviceptr copy_buffers[2];

static const int64_t shapes[][2] = {
        {4096, 32},   {4096, 512},   {2048, 2048},  {4096, 4096},   {4096, 8192},
        {8192, 8192}, {14336, 8192}, {4096, 14336}, {16384, 16384}, {50257, 4096},
};

static uint64_t random_state = 1;

/* bf16 between 2^-8 and 2 of either sign. */
static uint16_t random_number(void)
{
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;
	const uint32_t bits = (uint32_t)(random_state >> 32);
	return (uint16_t)((bits & 0x807f) | (119 + (bits >> 16) % 8) << 7);
}

/* ---- buffers -------------------------------------------------------------------------------- */

/* Fills device memory with random numbers, up to a block of them over and over. */
static void randomise(CUdeviceptr memory, size_t bytes)
{
	const size_t block = bytes < ((size_t)32 << 20) ? bytes : (size_t)32 << 20;
	uint16_t *numbers = malloc(block);
	if (!numbers)
		exit(EXIT_FAILURE);
	for (size_t i = 0; i < block / sizeof *numbers; i++)
		numbers[i] = random_number();
	for (size_t at = 0; at < bytes; at += block)
		GPU_CHECK(gpu.cuMemcpyHtoD_v2(memory + at, numbers,
		                              bytes - at < block ? bytes - at : block));
	free(numbers);
}

static size_t rounded(size_t bytes)
{
	return (bytes + 255) / 256 * 256;
}

/* Bytes behind each set's maxima and scale. */
#define REST 8192

static void describe(struct work *work, size_t source_bytes, size_t target_bytes)
{
	for (int i = 0; i < work->sets; i++) {
		struct qs_cast_args *args = &work->args[i];
		struct qs_quantise_operand *operand = &args->quantise.operand[0];
		const CUdeviceptr rest = work->rest + (size_t)i * REST;
		*args = (struct qs_cast_args){.quantise.partials = rest};
		operand->source = work->sources + (size_t)i * source_bytes;
		operand->target = work->targets + (size_t)i * target_bytes;
		operand->scale = rest + sizeof(uint32_t[2][QS_AMAX_BLOCKS]);
		operand->ld = operand->inner = work->inner;
		operand->outer = work->outer;
		operand->k_padded = qs_k_padded(work->transpose ? work->outer : work->inner);
		operand->transpose = work->transpose;
		args->partial_blocks[0] = qs_amax_blocks(operand, gpu.sms);
		operand->blocks = qs_cast_blocks(operand, gpu.sms);
	}
}

static int64_t target_size(const struct work *work)
{
	const int64_t rows = work->transpose ? work->inner : work->outer;
	return rows * qs_k_padded(work->transpose ? work->outer : work->inner);
}

static void prepare(struct work *work)
{
	const size_t source_bytes = rounded((size_t)(work->inner * work->outer) * sizeof(uint16_t));
	const size_t target_bytes = rounded((size_t)target_size(work));
	const size_t sets = (size_t)gpu.l2 * 3 / source_bytes + 2;
	work->sets = sets < SETS_MAX ? (int)sets : SETS_MAX;
	work->sources = gpu_alloc(source_bytes * (size_t)work->sets);
	work->targets = gpu_alloc(target_bytes * (size_t)work->sets);
	work->rest = gpu_alloc((size_t)REST * (size_t)work->sets);
	GPU_CHECK(gpu.cuMemsetD8_v2(work->rest, 0, (size_t)REST * (size_t)work->sets));
	randomise(work->sources, source_bytes * (size_t)work->sets);
	describe(work, source_bytes, target_bytes);
}

static void release(struct work *work)
{
	GPU_CHECK(gpu.cuMemFree_v2(work->sources));
	GPU_CHECK(gpu.cuMemFree_v2(work->targets));
	GPU_CHECK(gpu.cuMemFree_v2(work->rest));
}

/* ---- timing --------------------------------------------------------------------------------- */

static void call(struct work *work, enum step step, int index)
{
	if (step == STEP_COPY) {
		GPU_CHECK(gpu.cuMemcpyDtoDAsync_v2(copy_buffers[index % 2],
		                                   copy_buffers[(index + 1) % 2], COPY, NULL));
		return;
	}
	struct qs_cast_args *args = &work->args[index % work->sets];
	if (step == STEP_AMAX || step == STEP_BOTH) {
		struct qs_quantise_args amax = args->quantise;
		amax.operand[0].blocks = args->partial_blocks[0];
		gpu_launch_amax(&amax);
	}
	if (step == STEP_CAST || step == STEP_BOTH)
		gpu_launch_cast(args);
}

/* Milliseconds of `calls` calls. */
static float sample(struct work *work, enum step step, int calls)
{
	static CUevent begin, end;
	float ms = 0;
	if (!begin) {
		GPU_CHECK(gpu.cuEventCreate(&begin, CU_EVENT_DEFAULT));
		GPU_CHECK(gpu.cuEventCreate(&end, CU_EVENT_DEFAULT));
	}
	GPU_CHECK(gpu.cuEventRecord(begin, NULL));
	for (int i = 0; i < calls; i++)
		call(work, step, i);
	GPU_CHECK(gpu.cuEventRecord(end, NULL));
	GPU_CHECK(gpu.cuEventSynchronize(end));
	GPU_CHECK(gpu.cuEventElapsedTime(&ms, begin, end));
	return ms;
}

static int ascending(const void *left, const void *right)
{
	const float a = *(const float *)left, b = *(const float *)right;
	return (a > b) - (a < b);
}

static struct timing measure(struct work *work, enum step step)
{
	int calls = 4;
	float ms[SAMPLES];
	sample(work, step, calls);
	while (sample(work, step, calls) < SAMPLE_MS)
		calls *= 2;
	for (int i = 0; i < SAMPLES; i++)
		ms[i] = sample(work, step, calls);
	qsort(ms, SAMPLES, sizeof *ms, ascending);
	const double scale = 1000.0 / calls;
	return (struct timing){(double)ms[SAMPLES / 2] * scale, (double)ms[0] * scale,
	                       (double)ms[SAMPLES - 1] * scale};
}

/* Bytes a call is meant to move. */
static double bytes_of(const struct work *work, enum step step)
{
	const double elements = (double)work->inner * (double)work->outer;
	switch (step) {
	case STEP_COPY:
		return 2.0 * (double)COPY;
	case STEP_AMAX:
		return 2 * elements;
	case STEP_CAST:
		return 2 * elements + (double)target_size(work);
	default:
		return 4 * elements + (double)target_size(work);
	}
}

/* ---- output --------------------------------------------------------------------------------- */

static double gbps(double bytes, double us)
{
	return bytes / us / 1000;
}

/* Half the distance of the slowest and the fastest sample, in percent of the median. */
static double spread(const struct timing *timing)
{
	return (timing->most - timing->least) / 2 / timing->median * 100;
}

static void print_json(const struct work *work, enum step step, const struct timing *timing,
                       const char *separator)
{
	const double bytes = bytes_of(work, step);
	printf("%s\n  {\"step\": \"%s\", \"inner\": %lld, \"outer\": %lld, \"transpose\": %s, "
	       "\"bytes\": %.0f, \"us\": %.3f, \"us_min\": %.3f, \"us_max\": %.3f, "
	       "\"gb_s\": %.1f}",
	       separator, step_names[step], (long long)work->inner, (long long)work->outer,
	       work->transpose ? "true" : "false", bytes, timing->median, timing->least,
	       timing->most, gbps(bytes, timing->median));
}

static void print_table(const struct work *work, const struct timing *timings, double copy)
{
	printf("%6lld x %-6lld %-10s", (long long)work->inner, (long long)work->outer,
	       work->transpose ? "transposed" : "straight");
	for (int step = STEP_AMAX; step < STEP_COUNT; step++) {
		const double rate = gbps(bytes_of(work, (enum step)step), timings[step].median);
		printf("  %8.2f %5.0f %3.0f%% %4.1f", timings[step].median, rate, rate / copy * 100,
		       spread(&timings[step]));
	}
	printf("\n");
}

static void run_shape(const int64_t *shape, uint32_t transpose, double copy, bool json)
{
	static struct work work;
	struct timing timings[STEP_COUNT];
	work.inner = shape[0];
	work.outer = shape[1];
	work.transpose = transpose;
	prepare(&work);
	for (int step = STEP_AMAX; step < STEP_COUNT; step++)
		timings[step] = measure(&work, (enum step)step);
	release(&work);
	if (!json) {
		print_table(&work, timings, copy);
		return;
	}
	for (int step = STEP_AMAX; step < STEP_COUNT; step++)
		print_json(&work, (enum step)step, &timings[step], ",");
}

static struct timing measure_copy(void)
{
	for (int i = 0; i < 2; i++) {
		copy_buffers[i] = gpu_alloc(COPY);
		randomise(copy_buffers[i], COPY);
	}
	const struct timing timing = measure(NULL, STEP_COPY);
	for (int i = 0; i < 2; i++)
		GPU_CHECK(gpu.cuMemFree_v2(copy_buffers[i]));
	return timing;
}

static void print_head(const char *name, const struct timing *copy, double rate, bool json)
{
	const struct work none = {0};
	if (json) {
		printf("{\"gpu\": \"%s\", \"multiprocessors\": %d, \"l2_bytes\": %d, \"results\": "
		       "[",
		       name, gpu.sms, gpu.l2);
		print_json(&none, STEP_COPY, copy, "");
		return;
	}
	printf("%s, %d multiprocessors, L2 %d MiB; copy %.0f GB/s (+-%.1f%%)\n", name, gpu.sms,
	       gpu.l2 >> 20, rate, spread(copy));
	printf("of each step: us a call (median of %d), GB/s, part of the copy's, +-%%\n", SAMPLES);
	printf(" inner x outer             %24s  %24s  %24s\n", "amax", "cast", "both");
}

int main(int argc, char **argv)
{
	const bool json = argc == 2 && strcmp(argv[1], "--json") == 0;
	char name[128] = "";
	if (argc > 1 && !json) {
		fprintf(stderr, "usage: bench_quantize [--json]\n");
		return 2;
	}
	gpu_require();
	gpu_open();
	GPU_CHECK(gpu.cuDeviceGetName(name, sizeof name, gpu.device));
	const struct timing copy = measure_copy();
	const double rate = gbps(2.0 * (double)COPY, copy.median);
	print_head(name, &copy, rate, json);
	for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
		for (uint32_t transpose = 0; transpose < 2; transpose++)
			run_shape(shapes[i], transpose, rate, json);
	printf("%s", json ? "\n]}\n" : "");
	return 0;
}
