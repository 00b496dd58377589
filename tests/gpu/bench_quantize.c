/* Speed of the quantising kernels on this machine's GPU, beside the speed of a plain copy.
 *
 * Usage: bench_quantize [--json]. Each figure is the median of several samples, a sample being many
 * launches between two events, over random data in as many buffers as exceed the L2 cache three
 * times. GB/s counts the bytes a step is meant to move: 2 to read an element, 1 for each target.
 * What a second kernel finds in the cache of the first therefore shows as a higher rate. Launches
 * follow each other without gaps, and where the device allows it each starts while the one ahead
 * ends; small shapes show the cost of a launch.
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
	STEP_COPY,   /* device to device, COPY bytes                                            */
	STEP_CAST,   /* qs_quantise by a good prediction; qs_quantise_rows; qs_amax_columns     */
	STEP_ALL,    /* the same and the second kernel, which has nothing to repair             */
	STEP_IDLE,   /* the repair alone, with nothing to do                                    */
	STEP_REPAIR, /* the repair alone, in the few blocks of an operand with a history        */
	STEP_COLD,   /* both kernels without a history: measuring, then casting by all blocks   */
	STEP_COUNT
};

static const char *const step_names[] = {"copy", "cast", "all", "idle", "repair", "cold"};

/* What is made of a matrix. */
enum form {
	FORM_STRAIGHT,
	FORM_TURNED,
	FORM_BOTH,
	FORM_ROWS,
	FORM_COLUMNS,
	FORMS
};

static const char *const form_names[] = {"straight", "turned", "both", "rows", "columns"};

/* A matrix in as many copies as defeat the L2 cache. */
struct work {
	int64_t inner, outer;                   /* elements                              */
	enum form form;                         /* see above                             */
	int sets;                               /* copies in use                         */
	struct qs_quantise_args warm[SETS_MAX]; /* with a history                        */
	struct qs_quantise_args cold[SETS_MAX]; /* without                               */
	size_t rest_bytes;                      /* of a set's scales, history, maxima    */
	CUdeviceptr sources, targets, rest;     /* allocations behind them               */
};

/* A measurement, in microseconds a call. */
struct timing {
	double median, least, most;
};

/* Copied to each other in turn. */
static CUdeviceptr copy_buffers[2];

static const int64_t shapes[][2] = {
        {4096, 4096}, {8192, 4096}, {8192, 8192}, {16384, 8192}, {15872, 16384}, {2048, 5632},
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

/* Bits of 2.0: what the random numbers stay just below. */
#define PREDICTION 0x40000000u

static bool has_straight(enum form form)
{
	return form != FORM_TURNED && form != FORM_COLUMNS;
}

static bool has_turned(enum form form)
{
	return form != FORM_STRAIGHT && form != FORM_ROWS;
}

static void plan(struct qs_quantise_operand *operand, enum form form)
{
	if (form == FORM_ROWS)
		qs_rows_plan(operand);
	else if (form == FORM_COLUMNS)
		qs_columns_plan(operand, gpu.sms);
	else
		qs_quantise_plan(operand, gpu.sms);
}

/* The rest of a set is a history, scales, and maxima. */
static void describe_set(struct work *work, int set, size_t source_bytes, size_t target_bytes)
{
	struct qs_quantise_operand *operand = &work->warm[set].operand[0];
	const CUdeviceptr rest = work->rest + (size_t)set * work->rest_bytes;
	const CUdeviceptr targets = work->targets + (size_t)set * target_bytes;
	work->warm[set] = work->cold[set] = (struct qs_quantise_args){0};
	operand->inner = operand->ld = work->inner;
	operand->outer = work->outer;
	operand->source = work->sources + (size_t)set * source_bytes;
	if (has_straight(work->form))
		operand->straight = targets;
	if (has_turned(work->form))
		operand->turned = targets + rounded((size_t)qs_straight_bytes(operand));
	operand->scale = rest + 256;
	operand->partials = rest + work->rest_bytes - rounded((size_t)qs_partials_bytes(operand));
	work->cold[set].operand[0] = *operand;
	operand->history = rest;
	plan(operand, work->form);
	plan(&work->cold[set].operand[0], work->form);
}

static void describe(struct work *work)
{
	const struct qs_quantise_operand shape = {.inner = work->inner, .outer = work->outer};
	const size_t source_bytes = rounded((size_t)(work->inner * work->outer) * sizeof(uint16_t));
	const size_t target_bytes = rounded((size_t)qs_straight_bytes(&shape)) +
	                            rounded((size_t)qs_turned_bytes(&shape));
	const size_t scales = (size_t)(work->inner + work->outer) * sizeof(float);
	const size_t sets = (size_t)gpu.l2 * 3 / source_bytes + 2;
	work->sets = sets < SETS_MAX ? (int)sets : SETS_MAX;
	work->rest_bytes = 256 + rounded(scales) + rounded((size_t)qs_partials_bytes(&shape));
	work->sources = gpu_alloc(source_bytes * (size_t)work->sets);
	work->targets = gpu_alloc(target_bytes * (size_t)work->sets);
	work->rest = gpu_alloc(work->rest_bytes * (size_t)work->sets);
	randomise(work->sources, source_bytes * (size_t)work->sets);
	for (int i = 0; i < work->sets; i++)
		describe_set(work, i, source_bytes, target_bytes);
}

static void release(struct work *work)
{
	GPU_CHECK(gpu.cuMemFree_v2(work->sources));
	GPU_CHECK(gpu.cuMemFree_v2(work->targets));
	GPU_CHECK(gpu.cuMemFree_v2(work->rest));
}

/* ---- timing --------------------------------------------------------------------------------- */

static void launch_first(const struct work *work, struct qs_quantise_args *args)
{
	const CUfunction kernel = work->form == FORM_ROWS      ? gpu.rows
	                          : work->form == FORM_COLUMNS ? gpu.amax_columns
	                                                       : gpu.quantise;
	gpu_launch_early(kernel, args->operand[0].blocks[0],
	                 work->form == FORM_ROWS ? QS_ROWS_THREADS : QS_QUANTISE_THREADS, args);
}

static void launch_second(const struct work *work, struct qs_quantise_args *args)
{
	if (work->form != FORM_ROWS)
		gpu_launch_early(work->form == FORM_COLUMNS ? gpu.cast_columns : gpu.repair,
		                 args->operand[0].blocks[1], QS_QUANTISE_THREADS, args);
}

static void call(struct work *work, enum step step, int index)
{
	if (step == STEP_COPY) {
		GPU_CHECK(gpu.cuMemcpyDtoDAsync_v2(copy_buffers[index % 2],
		                                   copy_buffers[(index + 1) % 2], COPY, NULL));
		return;
	}
	const int set = index % work->sets;
	struct qs_quantise_args *args = step == STEP_COLD ? &work->cold[set] : &work->warm[set];
	if (step == STEP_CAST || step == STEP_ALL || step == STEP_COLD)
		launch_first(work, args);
	if (step != STEP_CAST)
		launch_second(work, args);
}

/* Leaves histories and partials as the step wants them: the repair works where there was no
 * prediction, and does so each time, because it leaves the partials alone. */
static void set_up(struct work *work, enum step step)
{
	const uint32_t prediction = step == STEP_REPAIR ? 0 : PREDICTION;
	for (int i = 0; i < work->sets; i++) {
		const CUdeviceptr history = work->warm[i].operand[0].history;
		GPU_CHECK(gpu.cuMemcpyHtoD_v2(history, &prediction, sizeof prediction));
		launch_first(work, &work->warm[i]);
	}
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
	if (step == STEP_COPY)
		return 2.0 * (double)COPY;
	const struct qs_quantise_operand *operand = &work->warm[0].operand[0];
	const double source = 2 * (double)work->inner * (double)work->outer;
	const double targets = (double)(operand->straight ? qs_straight_bytes(operand) : 0) +
	                       (double)(operand->turned ? qs_turned_bytes(operand) : 0);
	if (step == STEP_IDLE)
		return 0;
	if (work->form == FORM_COLUMNS)
		return step == STEP_CAST ? source : 2 * source + targets;
	return step == STEP_COLD ? 2 * source + targets : source + targets;
}

static bool applies(const struct work *work, enum step step)
{
	if (work->form == FORM_ROWS)
		return step == STEP_CAST;
	return work->form != FORM_COLUMNS || step == STEP_CAST || step == STEP_ALL;
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
	printf("%s\n  {\"step\": \"%s\", \"form\": \"%s\", \"inner\": %lld, \"outer\": %lld, "
	       "\"bytes\": %.0f, \"us\": %.3f, \"us_min\": %.3f, \"us_max\": %.3f, "
	       "\"gb_s\": %.1f}",
	       separator, step_names[step], step == STEP_COPY ? "" : form_names[work->form],
	       (long long)work->inner, (long long)work->outer, bytes, timing->median, timing->least,
	       timing->most, gbps(bytes, timing->median));
}

static void print_table(const struct work *work, const struct timing *timings, double copy)
{
	printf("%6lld x %-6lld %-9s", (long long)work->inner, (long long)work->outer,
	       form_names[work->form]);
	for (int step = STEP_CAST; step < STEP_COUNT; step++) {
		const double us = timings[step].median;
		const double rate = gbps(bytes_of(work, (enum step)step), us);
		if (!applies(work, (enum step)step))
			printf(" %23s", "");
		else if (step == STEP_IDLE)
			printf(" %8.2f %9s %4.1f", us, "", spread(&timings[step]));
		else
			printf(" %8.2f %4.0f %3.0f%% %4.1f", us, rate, rate / copy * 100,
			       spread(&timings[step]));
	}
	printf("\n");
}

static void run_shape(const int64_t *shape, enum form form, double copy, bool json)
{
	static struct work work;
	struct timing timings[STEP_COUNT];
	work.inner = shape[0];
	work.outer = shape[1];
	work.form = form;
	describe(&work);
	for (int step = STEP_CAST; step < STEP_COUNT; step++) {
		if (!applies(&work, (enum step)step))
			continue;
		set_up(&work, (enum step)step);
		timings[step] = measure(&work, (enum step)step);
		if (json)
			print_json(&work, (enum step)step, &timings[step], ",");
	}
	release(&work);
	if (!json)
		print_table(&work, timings, copy);
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
	printf(" inner x outer  form     ");
	for (int step = STEP_CAST; step < STEP_COUNT; step++)
		printf(" %23s", step_names[step]);
	printf("\n");
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
		for (int form = 0; form < FORMS; form++)
			run_shape(shapes[i], (enum form)form, rate, json);
	printf("%s", json ? "\n]}\n" : "");
	return 0;
}
