/* The kernels of kernels/quantise.cu on a GPU, bit for bit against their C references.
 *
 * Every case quantises one or two matrices on both sides and compares after each kernel all that it
 * may write. Sources carry the largest finite number in their padding, which would show in amax if
 * it were read; targets, scales, maxima and histories lie between poisoned guard bytes, which are
 * compared too. The engine that launches the kernels is tested elsewhere. Needs about 12 GiB of
 * device memory, and less if the largest matrix is skipped.
 */
#include <stdbool.h>
#include <string.h>

#include "tests/gpu/gpu.h"
#include "tests/oracle/oracle.h"
#include "tests/support/suite.h"

#define POISON  0xa5
#define GUARD   256    /* bytes before and after what a kernel may write */
#define PADDING 0x7f7f /* largest finite bf16                            */

static const int64_t sizes[] = {1, 7, 15, 16, 17, 63, 64, 65, 1000, 2047, 4096};
#define SIZES ((int)(sizeof sizes / sizeof *sizes))

/* How a matrix lies in memory. */
struct layout {
	const char *name;
	int64_t extra;    /* elements between vectors                                    */
	int64_t multiple; /* ld is then rounded up to this many elements, plus `odd`     */
	int64_t odd;      /* see above                                                   */
	int64_t offset;   /* elements between a 256-byte boundary and the first element  */
};

static const struct layout layouts[] = {
        {"contiguous", 0, 1, 0, 0},           {"padded to 16 bytes", 1, 8, 0, 0},
        {"padded to an odd ld", 1, 8, 1, 0},  {"contiguous, 2 bytes off", 0, 1, 0, 1},
        {"padded, 14 bytes off", 1, 8, 0, 7}, {"padded, 16 bytes off", 64, 8, 0, 8},
};
#define LAYOUTS ((int)(sizeof layouts / sizeof *layouts))

/* What is made of a matrix, and by which kernels. */
enum form {
	FORM_STRAIGHT, /* qs_quantise, qs_repair */
	FORM_TURNED,
	FORM_BOTH,
	FORM_ROWS,    /* qs_quantise_rows                 */
	FORM_COLUMNS, /* qs_amax_columns, qs_cast_columns */
	FORMS
};

static const char *const form_names[] = {"straight", "turned", "both", "rows", "columns"};

/* Memory that kernels write, on both sides. */
struct buffer {
	size_t bytes;            /* without the guards on both sides   */
	uint8_t *expected, *got; /* reference, copy of the device's    */
	CUdeviceptr device;      /* where the first guard begins       */
};

/* One operand on both sides. `device` and `host` differ in their pointers only. */
struct operand {
	char name[160];      /* for messages                                            */
	enum form form;      /* the same for both operands of a launch, or all tensor   */
	size_t source_bytes; /* of the source's allocation                              */
	uint16_t *source;    /* host copy of it                                         */
	CUdeviceptr device_source;
	struct buffer straight, turned, scale, history, partials;
	uint32_t predicted; /* the history before the launch                           */
	struct qs_quantise_operand device, host;
};

static void setup(void)
{
	gpu_open();
}

/* ---- random numbers ------------------------------------------------------------------------- */

static uint64_t random_state;

static uint32_t random_bits(void)
{
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(random_state >> 32);
}

/* A magnitude between 2^-14 and 4 of either sign: under the scale that results, normal and
 * subnormal e4m3, many ties, and zeros. */
static uint16_t random_number(void)
{
	const uint32_t bits = random_bits();
	return (uint16_t)((bits & 0x807f) | (113 + (bits >> 16) % 16) << 7);
}

static void *allocate(size_t bytes)
{
	void *memory = malloc(bytes);
	ck_assert_msg(memory != NULL, "no host memory");
	return memory;
}

/* ---- buffers -------------------------------------------------------------------------------- */

static void make_buffer(struct buffer *buffer, size_t bytes, uint64_t *device, uint64_t *host)
{
	buffer->bytes = bytes;
	/* the reference wants 16 bytes, which malloc gives */
	buffer->expected = allocate(bytes + 2 * GUARD);
	buffer->got = allocate(bytes + 2 * GUARD);
	buffer->device = gpu_alloc(bytes + 2 * GUARD);
	*host = (uint64_t)(uintptr_t)(buffer->expected + GUARD);
	*device = buffer->device + GUARD;
}

static void drop_buffer(struct buffer *buffer)
{
	if (!buffer->device)
		return;
	GPU_CHECK(gpu.cuMemFree_v2(buffer->device));
	free(buffer->expected);
	free(buffer->got);
}

static void poison(struct buffer *buffer)
{
	if (!buffer->device)
		return;
	memset(buffer->expected, POISON, buffer->bytes + 2 * GUARD);
	GPU_CHECK(gpu.cuMemsetD8_v2(buffer->device, POISON, buffer->bytes + 2 * GUARD));
}

static void fetch(struct buffer *buffer)
{
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(buffer->got, buffer->device, buffer->bytes + 2 * GUARD));
}

/* `row` bytes are a row, for the message. */
static void compare(struct buffer *buffer, const char *kernel, const char *name, const char *what,
                    int64_t row)
{
	if (!buffer->device)
		return;
	fetch(buffer);
	if (memcmp(buffer->got, buffer->expected, buffer->bytes + 2 * GUARD) == 0)
		return;
	size_t i = 0;
	while (buffer->got[i] == buffer->expected[i])
		i++;
	const long long byte = (long long)i - GUARD;
	ck_abort_msg("%s, %s: byte %lld of %s (row %lld, column %lld) is %02x, reference %02x",
	             kernel, name, byte, what, byte / row, byte % row, buffer->got[i],
	             buffer->expected[i]);
}

/* ---- operands ------------------------------------------------------------------------------- */

static uint16_t *element(struct operand *operand, int64_t outer, int64_t inner)
{
	return (uint16_t *)(uintptr_t)operand->host.source + outer * operand->host.ld + inner;
}

static void fill_random(struct operand *operand)
{
	for (int64_t outer = 0; outer < operand->host.outer; outer++)
		for (int64_t inner = 0; inner < operand->host.inner; inner++)
			*element(operand, outer, inner) = random_number();
}

static void fill_with(struct operand *operand, uint16_t bits)
{
	for (int64_t outer = 0; outer < operand->host.outer; outer++)
		for (int64_t inner = 0; inner < operand->host.inner; inner++)
			*element(operand, outer, inner) = bits;
}

static void make_source(struct operand *operand, const struct layout *layout)
{
	const size_t first = GUARD / 2 + (size_t)layout->offset;
	const size_t length = first + (size_t)(operand->host.outer * operand->host.ld) + GUARD / 2;
	operand->source_bytes = length * sizeof(uint16_t);
	operand->source = allocate(operand->source_bytes);
	operand->device_source = gpu_alloc(operand->source_bytes);
	for (size_t i = 0; i < length; i++)
		operand->source[i] = PADDING;
	operand->host.source = (uint64_t)(uintptr_t)(operand->source + first);
	operand->device.source = operand->device_source + first * sizeof(uint16_t);
}

/* The scales have room for the larger of both dimensions, so that a kernel that writes those of
 * the wrong one is found out. */
static void make_results(struct operand *operand)
{
	struct qs_quantise_operand *device = &operand->device, *host = &operand->host;
	const int64_t scales = host->inner > host->outer ? host->inner : host->outer;
	const enum form form = operand->form;
	if (form != FORM_TURNED && form != FORM_COLUMNS)
		make_buffer(&operand->straight, (size_t)qs_straight_bytes(host), &device->straight,
		            &host->straight);
	if (form != FORM_STRAIGHT && form != FORM_ROWS)
		make_buffer(&operand->turned, (size_t)qs_turned_bytes(host), &device->turned,
		            &host->turned);
	make_buffer(&operand->scale, (size_t)scales * sizeof(float), &device->scale, &host->scale);
	make_buffer(&operand->history, sizeof(uint32_t), &device->history, &host->history);
	make_buffer(&operand->partials, (size_t)qs_partials_bytes(host), &device->partials,
	            &host->partials);
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

static void set_blocks(struct operand *operand, uint32_t first, uint32_t second)
{
	operand->host.blocks[0] = operand->device.blocks[0] = first;
	operand->host.blocks[1] = operand->device.blocks[1] = second;
}

static void set_format(struct operand *operand, uint32_t format)
{
	operand->host.format = operand->device.format = format;
}

/* A matrix of random numbers, ready to be changed before it is quantised: e4m3, no prediction. */
static void make(struct operand *operand, int64_t inner, int64_t outer, enum form form,
                 const struct layout *layout)
{
	memset(operand, 0, sizeof *operand);
	operand->form = form;
	operand->host.inner = operand->device.inner = inner;
	operand->host.outer = operand->device.outer = outer;
	operand->host.ld = operand->device.ld = (inner + layout->extra + layout->multiple - 1) /
	                                                layout->multiple * layout->multiple +
	                                        layout->odd;
	make_source(operand, layout);
	make_results(operand);
	plan(&operand->host, form);
	set_blocks(operand, operand->host.blocks[0], operand->host.blocks[1]);
	random_state = (uint64_t)(inner * 8191 + outer * 131) + form;
	fill_random(operand);
	snprintf(operand->name, sizeof operand->name, "inner %lld, outer %lld, ld %lld, %s, %s",
	         (long long)inner, (long long)outer, (long long)operand->host.ld, form_names[form],
	         layout->name);
}

static void drop(struct operand *operand)
{
	GPU_CHECK(gpu.cuMemFree_v2(operand->device_source));
	free(operand->source);
	drop_buffer(&operand->straight);
	drop_buffer(&operand->turned);
	drop_buffer(&operand->scale);
	drop_buffer(&operand->history);
	drop_buffer(&operand->partials);
}

/* ---- comparing ------------------------------------------------------------------------------ */

/* Upper halves: which part of the matrix a block sees is the kernel's affair, the largest maximum
 * is not. Lower halves, and what follows the blocks' words: the same. */
static void compare_block_maxima(struct operand *operand)
{
	struct buffer *buffer = &operand->partials;
	uint32_t *expected = (uint32_t *)(buffer->expected + GUARD), expected_most = 0;
	uint32_t *got = (uint32_t *)(buffer->got + GUARD), got_most = 0;
	fetch(buffer);
	for (uint32_t i = 0; i < operand->host.blocks[0]; i++) {
		expected_most = expected[i] > expected_most ? expected[i] : expected_most;
		got_most = got[i] > got_most ? got[i] : got_most;
		if ((got[i] ^ expected[i]) & 0xffff)
			ck_abort_msg("%s: partial %u is %08x, reference %08x", operand->name, i,
			             got[i], expected[i]);
	}
	if (got_most >> 16 != expected_most >> 16)
		ck_abort_msg("%s: amax %08x, reference %08x", operand->name, got_most,
		             expected_most);
	memcpy(got, expected, operand->host.blocks[0] * sizeof *got);
	if (memcmp(buffer->got, buffer->expected, buffer->bytes + 2 * GUARD) != 0)
		ck_abort_msg("%s: wrote beyond its partials", operand->name);
}

static uint16_t column_max(const struct buffer *buffer, bool expected, int64_t width,
                           int64_t column)
{
	const uint16_t *partials =
	        (const uint16_t *)((expected ? buffer->expected : buffer->got) + GUARD);
	uint16_t most = 0;
	for (int slice = 0; slice < QS_COLUMN_SLICES; slice++)
		if (partials[slice * width + column] > most)
			most = partials[slice * width + column];
	return most;
}

/* The same of columns and their slices. */
static void compare_column_maxima(struct operand *operand)
{
	struct buffer *buffer = &operand->partials;
	const int64_t width = qs_k_padded(operand->host.inner);
	const size_t used = (size_t)width * QS_COLUMN_SLICES * sizeof(uint16_t);
	fetch(buffer);
	for (int64_t i = 0; i < width; i++)
		if (column_max(buffer, true, width, i) != column_max(buffer, false, width, i))
			ck_abort_msg("%s: maximum of column %lld is %04x, reference %04x",
			             operand->name, (long long)i,
			             column_max(buffer, false, width, i),
			             column_max(buffer, true, width, i));
	memcpy(buffer->got + GUARD, buffer->expected + GUARD, used);
	if (memcmp(buffer->got, buffer->expected, buffer->bytes + 2 * GUARD) != 0)
		ck_abort_msg("%s: wrote beyond its partials", operand->name);
}

static void compare_operand(struct operand *operand, const char *kernel)
{
	if (operand->form == FORM_COLUMNS)
		compare_column_maxima(operand);
	else if (operand->form == FORM_ROWS)
		compare(&operand->partials, kernel, operand->name, "partials", 4);
	else
		compare_block_maxima(operand);
	compare(&operand->straight, kernel, operand->name, "straight",
	        qs_k_padded(operand->host.inner));
	compare(&operand->turned, kernel, operand->name, "turned",
	        qs_k_padded(operand->host.outer));
	compare(&operand->scale, kernel, operand->name, "scale", 4);
	compare(&operand->history, kernel, operand->name, "history", 4);
}

/* ---- launches ------------------------------------------------------------------------------- */

static void run_reference(const char *name, unsigned blocks, unsigned threads, void *args)
{
	void *params[] = {args};
	for (const struct qs_oracle_kernel *kernel = qs_oracle_kernels; kernel->name; kernel++)
		if (strcmp(kernel->name, name) == 0) {
			kernel->run(params, blocks, threads);
			return;
		}
	ck_abort_msg("no reference of %s", name);
}

static void upload(struct operand *operand)
{
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(operand->device_source, operand->source,
	                              operand->source_bytes));
	poison(&operand->straight);
	poison(&operand->turned);
	poison(&operand->scale);
	poison(&operand->history);
	poison(&operand->partials);
	memcpy(operand->history.expected + GUARD, &operand->predicted, sizeof(uint32_t));
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(operand->history.device + GUARD, &operand->predicted,
	                              sizeof(uint32_t)));
}

/* One kernel on both sides. */
static void run(CUfunction function, const char *name, int turn, unsigned threads,
                struct operand *a, struct operand *b)
{
	struct operand *operands[] = {a, b};
	struct qs_quantise_args device = {0}, host = {0};
	unsigned blocks = 0;
	for (int i = 0; i < 2; i++)
		if (operands[i]) {
			device.operand[i] = operands[i]->device;
			host.operand[i] = operands[i]->host;
			blocks += host.operand[i].blocks[turn];
		}
	gpu_launch_early(function, blocks, threads, &device);
	run_reference(name, blocks, threads, &host);
	for (int i = 0; i < 2; i++)
		if (operands[i])
			compare_operand(operands[i], name);
}

/* All kernels of one or two operands, each compared. */
static void launch_all(struct operand *a, struct operand *b)
{
	const enum form form = (a ? a : b)->form;
	if (form == FORM_ROWS) {
		run(gpu.rows, QS_KERNEL_QUANTISE_ROWS, 0, QS_ROWS_THREADS, a, b);
	} else if (form == FORM_COLUMNS) {
		run(gpu.amax_columns, QS_KERNEL_AMAX_COLUMNS, 0, QS_QUANTISE_THREADS, a, b);
		run(gpu.cast_columns, QS_KERNEL_CAST_COLUMNS, 1, QS_QUANTISE_THREADS, a, b);
	} else {
		run(gpu.quantise, QS_KERNEL_QUANTISE, 0, QS_QUANTISE_THREADS, a, b);
		run(gpu.repair, QS_KERNEL_REPAIR, 1, QS_QUANTISE_THREADS, a, b);
	}
}

/* Quantises one or two operands. */
static void quantise_both(struct operand *a, struct operand *b)
{
	if (a)
		upload(a);
	if (b)
		upload(b);
	launch_all(a, b);
}

static void quantise(struct operand *operand)
{
	quantise_both(operand, NULL);
}

/* ---- every shape, every layout -------------------------------------------------------------- */

/* Predictions, as bits of an fp32, for random numbers, whose amax is about 4: none, good ones, one
 * too small and one too large. */
static const uint32_t predictions[] = {0, 0x40800000, 0x42000000, 0x3d800000, 0x7f7f0000};
#define PREDICTIONS ((int)(sizeof predictions / sizeof *predictions))

/* The loop's index is a form and a layout. Predictions and formats take turns. */
START_TEST(every_form_equals_the_reference_in_every_shape_and_layout)
{
	const enum form form = (enum form)(_i % FORMS);
	for (int i = 0; i < SIZES; i++)
		for (int j = 0; j < SIZES; j++) {
			struct operand operand;
			make(&operand, sizes[i], sizes[j], form, &layouts[_i / FORMS]);
			operand.predicted = predictions[(i * SIZES + j) % PREDICTIONS];
			set_format(&operand, (uint32_t)(i + j) % 2);
			quantise(&operand);
			drop(&operand);
		}
}
END_TEST

/* Shapes of real layers, where every block makes many steps. */
START_TEST(large_matrices_equal_the_reference)
{
	const int64_t shapes[][2] = {{14336, 2048}, {2048, 14336}, {50257, 321}, {321, 50257}};
	for (int i = 0; i < 4; i++) {
		struct operand operand;
		make(&operand, shapes[i][0], shapes[i][1], (enum form)_i, &layouts[0]);
		operand.predicted = i % 2 ? predictions[1] : predictions[4];
		quantise(&operand);
		drop(&operand);
	}
}
END_TEST

/* Around what one, two, four ... warps hold, and beyond what a block does. */
START_TEST(rows_of_every_length_equal_the_reference)
{
	const int64_t lengths[] = {2040,  2048,  2049,  2056,  4096,  4104,  8192,  8200,
	                           16384, 16392, 32760, 32768, 32776, 40001, 65536, 98320};
	const int64_t counts[] = {1, 3, 37};
	for (int i = 0; i < 16; i++)
		for (int j = 0; j < 3; j++) {
			struct operand operand;
			make(&operand, lengths[i], counts[j], FORM_ROWS, &layouts[_i]);
			*element(&operand, counts[j] / 2, lengths[i] - 1) = 0xc300; /* -128 */
			quantise(&operand);
			drop(&operand);
		}
}
END_TEST

/* ---- launches ------------------------------------------------------------------------------- */

START_TEST(two_operands_of_a_launch_do_not_mix)
{
	const enum form first = (enum form)(_i % FORMS);
	const enum form second = first < FORM_ROWS ? (enum form)((_i + 1) % 3) : first;
	for (int i = 0; i < SIZES; i++) {
		struct operand a, b;
		make(&a, sizes[i], sizes[SIZES - 1 - i], first, &layouts[i % LAYOUTS]);
		make(&b, sizes[(i * 3 + 4) % SIZES], sizes[i], second, &layouts[0]);
		*element(&b, 0, 0) = 0x4300; /* 128: not the amax of the other */
		a.predicted = predictions[i % PREDICTIONS];
		b.predicted = predictions[(i + 2) % PREDICTIONS];
		set_format(&b, QS_FP8_E5M2);
		quantise_both(&a, &b);
		drop(&a);
		drop(&b);
	}
}
END_TEST

START_TEST(an_operand_without_blocks_is_skipped)
{
	struct operand operand;
	make(&operand, 1000, 65, (enum form)_i, &layouts[0]);
	quantise_both(&operand, NULL);
	quantise_both(NULL, &operand);
	drop(&operand);
}
END_TEST

START_TEST(the_number_of_blocks_changes_nothing)
{
	const uint32_t blocks[] = {1, 2, 3, 31, 132, 511, QS_PARTIALS};
	struct operand a, b;
	make(&a, 1000, 333, (enum form)_i, &layouts[1]);
	make(&b, 1001, 333, (enum form)_i, &layouts[0]);
	for (int i = 0; i < 7; i++)
		for (int j = 0; j < 7; j++) {
			set_blocks(&a, blocks[i], blocks[j]);
			set_blocks(&b, blocks[6 - i], blocks[6 - j]);
			a.predicted = predictions[j % PREDICTIONS];
			quantise_both(&a, &b);
		}
	drop(&a);
	drop(&b);
}
END_TEST

/* The fp8 result of one launch, taken for bf16, is the source of the next. */
START_TEST(a_launch_waits_for_the_work_ahead_of_it)
{
	struct operand first, second;
	make(&first, 4096, 2048, FORM_ROWS, &layouts[0]);
	make(&second, 2048, 2048, (enum form)_i, &layouts[0]);
	second.device.source = first.straight.device + GUARD;
	second.host.source = (uint64_t)(uintptr_t)(first.straight.expected + GUARD);
	second.predicted = predictions[1];
	struct qs_quantise_args args = {.operand = {first.device}};
	for (int i = 0; i < 4; i++) {
		upload(&first);
		upload(&second);
		run_reference(QS_KERNEL_QUANTISE_ROWS, first.host.blocks[0], QS_ROWS_THREADS,
		              &(struct qs_quantise_args){.operand = {first.host}});
		gpu_launch_early(gpu.rows, first.device.blocks[0], QS_ROWS_THREADS, &args);
		launch_all(&second, NULL);
	}
	drop(&first);
	drop(&second);
}
END_TEST

/* ---- predictions ---------------------------------------------------------------------------- */

START_TEST(the_good_range_of_predictions_ends_where_the_reference_says)
{
	/* under 1.75 * 2^7 and 1.75 * 2^14 the scale is 1 */
	const uint16_t ends[2][4] = {{0x405f, 0x4060, 0x43e0, 0x43e1},
	                             {0x43df, 0x43e0, 0x4760, 0x4761}};
	for (uint32_t format = 0; format < 2; format++)
		for (int i = 0; i < 4; i++) {
			struct operand operand;
			make(&operand, 65, 130, (enum form)_i, &layouts[0]);
			fill_with(&operand, 0x3f80);
			*element(&operand, 99, 44) = ends[format][i];
			set_format(&operand, format);
			operand.predicted = format ? 0x46e00000 : 0x43600000;
			quantise(&operand);
			const bool kept = i == 1 || i == 2;
			float scale;
			memcpy(&scale, operand.scale.got + GUARD, sizeof scale);
			ck_assert_int_eq(scale == 1, kept);
			drop(&operand);
		}
}
END_TEST

START_TEST(a_cast_by_two_different_predictions_is_repaired)
{
	struct operand operand;
	uint32_t *expected, changed;
	make(&operand, 1000, 333, (enum form)_i, &layouts[0]);
	operand.predicted = predictions[1];
	upload(&operand);
	run(gpu.quantise, QS_KERNEL_QUANTISE, 0, QS_QUANTISE_THREADS, &operand, NULL);
	const uint32_t last = operand.host.blocks[0] - 1;
	const size_t offset = GUARD + last * sizeof(uint32_t);
	expected = (uint32_t *)(operand.partials.expected + offset);
	*expected ^= 1;
	fetch(&operand.partials);
	memcpy(&changed, operand.partials.got + offset, sizeof changed);
	changed ^= 1;
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(operand.partials.device + offset, &changed, sizeof changed));
	poison(&operand.straight);
	poison(&operand.turned);
	run(gpu.repair, QS_KERNEL_REPAIR, 1, QS_QUANTISE_THREADS, &operand, NULL);
	drop(&operand);
}
END_TEST

/* ---- numbers -------------------------------------------------------------------------------- */

START_TEST(nan_and_inf_spoil_only_their_own_place)
{
	const uint16_t odd[] = {0x7f80, 0xff80, 0x7fc0, 0xffc0, 0x7f81, 0xffff};
	for (int i = 0; i < SIZES; i++) {
		const int64_t inner = sizes[i], outer = sizes[(i + 5) % SIZES];
		struct operand operand;
		make(&operand, inner, outer, (enum form)(_i % FORMS), &layouts[_i / FORMS]);
		set_format(&operand, (uint32_t)i % 2);
		operand.predicted = predictions[i % 2];
		for (int64_t j = 0; j < 40; j++)
			*element(&operand, random_bits() % outer, random_bits() % inner) =
			        odd[j % 6];
		*element(&operand, 0, 0) = 0x7f80;
		*element(&operand, outer - 1, inner - 1) = 0xffc1;
		quantise(&operand);
		drop(&operand);
	}
}
END_TEST

/* Zero, negative zero, NaN, Inf, the least and the largest subnormal, the least normal, around the
 * floor of amax, and the largest finite number. */
START_TEST(matrices_of_one_value_equal_the_reference)
{
	const uint16_t values[] = {0x0000, 0x8000, 0x7fc0, 0xff80, 0x0001, 0x807f,
	                           0x0080, 0x0d7f, 0x0d80, 0x8d81, 0x7f7f, 0xff7f};
	for (int i = 0; i < 12; i++)
		for (int j = 0; j < LAYOUTS; j++) {
			struct operand operand;
			make(&operand, 129, 131, (enum form)_i, &layouts[j]);
			fill_with(&operand, values[i]);
			operand.predicted = predictions[(i + j) % PREDICTIONS];
			set_format(&operand, (uint32_t)(i + j) % 2);
			quantise(&operand);
			drop(&operand);
		}
}
END_TEST

/* All bf16 in one matrix, cast by the first kernel under predictions of every kind: some leave them
 * as they are, small ones saturate most and overflow many products, large ones lead into the
 * subnormals of both formats. */
START_TEST(every_bf16_equals_the_reference_under_every_kind_of_scale)
{
	const uint16_t maxima[] = {0x43e0, 0x3f80, 0x3eaa, 0x41c9, 0x4b12, 0x7f7f,
	                           0x0d80, 0x0d7f, 0x0001, 0x4680, 0x2000, 0x6666};
	struct operand operand;
	make(&operand, 256, 256, (enum form)(_i % 3), &layouts[0]);
	set_format(&operand, (uint32_t)_i / 3);
	for (int i = 0; i < 65536; i++)
		*element(&operand, i / 256, i % 256) = (uint16_t)i;
	for (int i = 0; i < 12; i++) {
		operand.predicted = (uint32_t)maxima[i] << 16;
		quantise(&operand);
	}
	drop(&operand);
}
END_TEST

START_TEST(the_largest_element_is_found_wherever_it_is)
{
	struct operand operand;
	make(&operand, 37, 19, (enum form)(_i % FORMS), &layouts[_i / FORMS]);
	for (int64_t outer = 0; outer < 19; outer++)
		for (int64_t inner = 0; inner < 37; inner++) {
			uint16_t *place = element(&operand, outer, inner);
			const uint16_t before = *place;
			*place = 0xc2c8; /* -100 */
			quantise(&operand);
			*place = before;
		}
	drop(&operand);
}
END_TEST

/* ---- repetition and size -------------------------------------------------------------------- */

/* A missing barrier shows as a result that changes from run to run. */
START_TEST(repeated_runs_give_the_same_bits)
{
	struct operand a, b;
	make(&a, 2047, 1000, (enum form)_i, &layouts[0]);
	make(&b, 4096, 2049, (enum form)_i, &layouts[0]);
	a.predicted = predictions[1];
	b.predicted = predictions[3];
	for (int i = 0; i < 10; i++)
		quantise_both(&a, &b);
	drop(&a);
	drop(&b);
}
END_TEST

START_TEST(kernels_use_no_local_memory)
{
	const CUfunction kernels[] = {gpu.quantise, gpu.repair, gpu.rows, gpu.amax_columns,
	                              gpu.cast_columns};
	for (int i = 0; i < 5; i++) {
		int bytes = -1;
		GPU_CHECK(gpu.cuFuncGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
		                                 kernels[i]));
		ck_assert_int_eq(bytes, 0);
	}
}
END_TEST

/* More than 2^31 elements: ones, but for some that are set beyond that. Checked without a
 * reference, which would take minutes: under amax 2 a one is 64 (0x68). */
#define LONG_INNER 46352
#define LONG_OUTER 46351 /* padded that is 46352 too */

/* An element of the large matrix that is not one, and the code it becomes. */
struct planted {
	int64_t outer, inner;
	uint16_t bits;
	uint8_t code;
};

static const struct planted planted[] = {
        {0, 1, 0xbf80, 0xe8},                            /* -1      */
        {LONG_OUTER / 2, 77, 0x3f00, 0x60},              /* 0.5     */
        {LONG_OUTER - 2, 0, 0x7f80, 0x7f},               /* Inf     */
        {LONG_OUTER - 1, LONG_INNER - 1, 0xc000, 0xf0},  /* -2      */
        {LONG_OUTER - 20, LONG_INNER - 9, 0x0000, 0x00}, /* 0       */
};
#define PLANTED ((int)(sizeof planted / sizeof *planted))

static void check_long(const uint8_t *got, bool turned)
{
	const int64_t rows = turned ? LONG_INNER : LONG_OUTER;
	const int64_t k = turned ? LONG_OUTER : LONG_INNER;
	int64_t wrong = 0;
	for (int64_t row = 0; row < rows; row++)
		for (int64_t i = 0; i < LONG_INNER; i++)
			wrong += got[row * LONG_INNER + i] != (i < k ? 0x68 : 0x00);
	for (int i = 0; i < PLANTED; i++) {
		const int64_t row = turned ? planted[i].inner : planted[i].outer;
		const int64_t column = turned ? planted[i].outer : planted[i].inner;
		ck_assert_uint_eq(got[row * LONG_INNER + column], planted[i].code);
	}
	ck_assert_int_eq(wrong, PLANTED);
}

static void plant(CUdeviceptr source)
{
	GPU_CHECK(gpu.cuMemsetD16_v2(source, 0x3f80, (size_t)LONG_INNER * LONG_OUTER));
	for (int i = 0; i < PLANTED; i++)
		GPU_CHECK(gpu.cuMemcpyHtoD_v2(
		        source + (size_t)(planted[i].outer * LONG_INNER + planted[i].inner) * 2,
		        &planted[i].bits, 2));
}

static void quantise_long(struct qs_quantise_operand *operand)
{
	struct qs_quantise_args args = {0};
	qs_quantise_plan(operand, gpu.sms);
	args.operand[0] = *operand;
	gpu_launch_early(gpu.quantise, operand->blocks[0], QS_QUANTISE_THREADS, &args);
	gpu_launch_early(gpu.repair, operand->blocks[1], QS_QUANTISE_THREADS, &args);
}

/* The form is straight, turned or both; without a history the repair casts, and with the one that
 * the repair leaves the first kernel does. */
START_TEST(matrices_beyond_2_to_the_31_elements_are_indexed_in_64_bits)
{
	const size_t bytes = (size_t)LONG_INNER * LONG_INNER;
	size_t available = 0, total = 0;
	GPU_CHECK(gpu.cuMemGetInfo_v2(&available, &total));
	if (available < bytes * 4 + ((size_t)1 << 30)) {
		printf("skip matrices of more than 2^31 elements: 10 GiB of device memory\n");
		return;
	}
	const CUdeviceptr source = gpu_alloc(bytes * 2), target = gpu_alloc(bytes * 2);
	const CUdeviceptr rest = gpu_alloc(8192);
	uint8_t *got = allocate(bytes);
	struct qs_quantise_operand operand = {.source = source,
	                                      .straight = _i == FORM_TURNED ? 0 : target,
	                                      .turned = _i == FORM_STRAIGHT ? 0 : target + bytes,
	                                      .scale = rest,
	                                      .history = rest + 16,
	                                      .partials = rest + 32,
	                                      .ld = LONG_INNER,
	                                      .inner = LONG_INNER,
	                                      .outer = LONG_OUTER};
	plant(source);
	GPU_CHECK(gpu.cuMemsetD8_v2(rest, 0, 8192));
	for (int time = 0; time < 2; time++) {
		GPU_CHECK(gpu.cuMemsetD8_v2(target, POISON, bytes * 2));
		quantise_long(&operand);
		for (int turned = 0; turned < 2; turned++) {
			if (!(turned ? operand.turned : operand.straight))
				continue;
			GPU_CHECK(gpu.cuMemcpyDtoH_v2(got, target + (turned ? bytes : 0), bytes));
			check_long(got, turned);
		}
	}
	GPU_CHECK(gpu.cuMemFree_v2(source));
	GPU_CHECK(gpu.cuMemFree_v2(target));
	GPU_CHECK(gpu.cuMemFree_v2(rest));
	free(got);
}
END_TEST

static TCase *group(Suite *suite, const char *name)
{
	TCase *tests = tcase_create(name);
	tcase_add_checked_fixture(tests, setup, NULL);
	tcase_set_timeout(tests, 300);
	suite_add_tcase(suite, tests);
	return tests;
}

int main(void)
{
	Suite *suite = suite_create("kernels");
	gpu_require();
	TCase *tests = group(suite, "shapes");
	tcase_add_loop_test(tests, every_form_equals_the_reference_in_every_shape_and_layout, 0,
	                    FORMS * LAYOUTS);
	tcase_add_loop_test(tests, large_matrices_equal_the_reference, 0, FORMS);
	tcase_add_loop_test(tests, rows_of_every_length_equal_the_reference, 0, LAYOUTS);
	tests = group(suite, "launches");
	tcase_add_loop_test(tests, two_operands_of_a_launch_do_not_mix, 0, FORMS);
	tcase_add_loop_test(tests, an_operand_without_blocks_is_skipped, 0, FORMS);
	tcase_add_loop_test(tests, the_number_of_blocks_changes_nothing, 0, FORMS);
	tcase_add_loop_test(tests, a_launch_waits_for_the_work_ahead_of_it, 0, FORMS);
	tests = group(suite, "predictions");
	tcase_add_loop_test(tests, the_good_range_of_predictions_ends_where_the_reference_says, 0,
	                    FORM_ROWS);
	tcase_add_loop_test(tests, a_cast_by_two_different_predictions_is_repaired, 0, FORM_ROWS);
	tests = group(suite, "numbers");
	tcase_add_loop_test(tests, nan_and_inf_spoil_only_their_own_place, 0, FORMS * LAYOUTS);
	tcase_add_loop_test(tests, matrices_of_one_value_equal_the_reference, 0, FORMS);
	tcase_add_loop_test(tests, every_bf16_equals_the_reference_under_every_kind_of_scale, 0, 6);
	tcase_add_loop_test(tests, the_largest_element_is_found_wherever_it_is, 0, FORMS * LAYOUTS);
	tests = group(suite, "size");
	tcase_add_loop_test(tests, repeated_runs_give_the_same_bits, 0, FORMS);
	tcase_add_test(tests, kernels_use_no_local_memory);
	tcase_add_loop_test(tests, matrices_beyond_2_to_the_31_elements_are_indexed_in_64_bits, 0,
	                    FORM_ROWS);
	return qs_suite_main(suite);
}
