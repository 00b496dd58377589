/* The kernels of kernels/quantise.cu on a GPU, bit for bit against their C references.
 *
 * Every case quantises one or two matrices on both sides. Sources carry the largest finite number
 * in all their padding, which would show in amax if it were read; targets, scales and maxima lie
 * between poisoned guard bytes, which are compared too. The engine that launches the kernels is
 * tested elsewhere. Needs about 7 GiB of device memory, and less if the largest matrix is skipped.
 */
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

/* One operand on both sides. `device` and `host` differ in their pointers only. */
struct operand {
	char name[160];                    /* for messages                                   */
	size_t source_bytes, target_bytes; /* of the whole allocations, guards included      */
	size_t target_offset;              /* of the output in them                          */
	uint16_t *source;                  /* host copy of the source's allocation           */
	uint8_t *expected, *got;           /* target's allocation: reference, device         */
	float scale[3];                    /* host: guard, scale, guard                      */
	CUdeviceptr device_source, device_target, device_scale;
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

static void make_target(struct operand *operand)
{
	const int64_t rows = qs_quantise_rows(&operand->host);
	operand->target_bytes = GUARD + (size_t)(rows * operand->host.k_padded) + GUARD;
	/* the reference wants 16 bytes, which malloc gives */
	operand->expected = allocate(operand->target_bytes);
	operand->got = allocate(operand->target_bytes);
	operand->device_target = gpu_alloc(operand->target_bytes);
	operand->device_scale = gpu_alloc(sizeof operand->scale);
	operand->host.target = (uint64_t)(uintptr_t)(operand->expected + GUARD);
	operand->host.scale = (uint64_t)(uintptr_t)&operand->scale[1];
	operand->device.target = operand->device_target + GUARD;
	operand->device.scale = operand->device_scale + sizeof(float);
}

/* A matrix of random numbers, ready to be changed before it is quantised. */
static void make(struct operand *operand, int64_t inner, int64_t outer, uint32_t transpose,
                 const struct layout *layout)
{
	memset(operand, 0, sizeof *operand);
	operand->host.inner = inner;
	operand->host.outer = outer;
	operand->host.ld = (inner + layout->extra + layout->multiple - 1) / layout->multiple *
	                           layout->multiple +
	                   layout->odd;
	operand->host.transpose = transpose;
	operand->host.k_padded = qs_k_padded(transpose ? outer : inner);
	operand->device = operand->host;
	make_source(operand, layout);
	make_target(operand);
	random_state = (uint64_t)(inner * 8191 + outer * 131 + transpose);
	fill_random(operand);
	snprintf(operand->name, sizeof operand->name, "inner %lld, outer %lld, ld %lld, %s, %s",
	         (long long)inner, (long long)outer, (long long)operand->host.ld,
	         transpose ? "transposed" : "straight", layout->name);
}

static void drop(struct operand *operand)
{
	GPU_CHECK(gpu.cuMemFree_v2(operand->device_source));
	GPU_CHECK(gpu.cuMemFree_v2(operand->device_target));
	GPU_CHECK(gpu.cuMemFree_v2(operand->device_scale));
	free(operand->source);
	free(operand->expected);
	free(operand->got);
}

/* ---- launches ------------------------------------------------------------------------------- */

/* Both sides of a launch. Maxima lie as the kernels have them, and are poisoned beforehand. */
struct launch {
	struct operand *operand[2];              /* NULL = none                       */
	uint32_t amax_blocks[2], cast_blocks[2]; /* 0 = as quantise.h counts          */
	uint32_t expected[2][QS_AMAX_BLOCKS];    /* maxima of the reference           */
	uint32_t got[2][QS_AMAX_BLOCKS];         /* maxima of the device              */
	CUdeviceptr device_partials;             /* uint32_t[2][QS_AMAX_BLOCKS]       */
};

static void run_reference(const char *name, void *args, const struct qs_quantise_args *quantise,
                          unsigned threads)
{
	void *params[] = {args};
	const unsigned grid = quantise->operand[0].blocks + quantise->operand[1].blocks;
	for (const struct qs_oracle_kernel *kernel = qs_oracle_kernels; kernel->name; kernel++)
		if (strcmp(kernel->name, name) == 0) {
			kernel->run(params, grid, threads);
			return;
		}
	ck_abort_msg("no reference of %s", name);
}

/* The arguments of both sides with the blocks of the amax launch. */
static void describe(struct launch *launch, struct qs_cast_args *device, struct qs_cast_args *host)
{
	memset(device, 0, sizeof *device);
	memset(host, 0, sizeof *host);
	device->quantise.partials = launch->device_partials;
	host->quantise.partials = (uint64_t)(uintptr_t)launch->expected;
	for (int i = 0; i < 2; i++) {
		struct operand *operand = launch->operand[i];
		if (!operand)
			continue;
		device->quantise.operand[i] = operand->device;
		host->quantise.operand[i] = operand->host;
		const uint32_t blocks = launch->amax_blocks[i]
		                                ? launch->amax_blocks[i]
		                                : qs_amax_blocks(&operand->host, gpu.sms);
		device->quantise.operand[i].blocks = host->quantise.operand[i].blocks = blocks;
		device->partial_blocks[i] = host->partial_blocks[i] = blocks;
	}
}

/* Replaces them by those of the cast launch. */
static void describe_cast(struct launch *launch, struct qs_cast_args *device,
                          struct qs_cast_args *host)
{
	for (int i = 0; i < 2; i++) {
		struct operand *operand = launch->operand[i];
		if (!operand)
			continue;
		const uint32_t blocks = launch->cast_blocks[i]
		                                ? launch->cast_blocks[i]
		                                : qs_cast_blocks(&operand->host, gpu.sms);
		device->quantise.operand[i].blocks = host->quantise.operand[i].blocks = blocks;
	}
}

static uint32_t largest(const uint32_t *values, uint32_t count)
{
	uint32_t most = 0;
	for (uint32_t i = 0; i < count; i++)
		most = values[i] > most ? values[i] : most;
	return most;
}

/* How the maxima are spread over the blocks is the kernel's affair, the largest is not. */
static void compare_partials(struct launch *launch, const struct qs_cast_args *args)
{
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(launch->got, launch->device_partials, sizeof launch->got));
	for (int i = 0; i < 2; i++) {
		const char *name = launch->operand[i] ? launch->operand[i]->name : "none";
		const uint32_t count = args->partial_blocks[i];
		const uint32_t expected = largest(launch->expected[i], count);
		const uint32_t got = largest(launch->got[i], count);
		if (got != expected)
			ck_abort_msg("%s: amax %08x, reference %08x", name, got, expected);
		for (uint32_t block = count; block < QS_AMAX_BLOCKS; block++)
			if (launch->got[i][block] != POISON * 0x01010101u)
				ck_abort_msg("%s: wrote the maximum of block %u of %u", name, block,
				             count);
	}
}

static void compare_targets(struct operand *operand)
{
	float scale[3];
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(operand->got, operand->device_target, operand->target_bytes));
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(scale, operand->device_scale, sizeof scale));
	if (memcmp(scale, operand->scale, sizeof scale) != 0)
		ck_abort_msg("%s: scale %a, reference %a, or its neighbours changed", operand->name,
		             (double)scale[1], (double)operand->scale[1]);
	if (memcmp(operand->got, operand->expected, operand->target_bytes) == 0)
		return;
	size_t i = 0;
	while (operand->got[i] == operand->expected[i])
		i++;
	const long long byte = (long long)i - GUARD;
	ck_abort_msg("%s: byte %lld (row %lld, column %lld) is %02x, reference %02x", operand->name,
	             byte, byte / operand->host.k_padded, byte % operand->host.k_padded,
	             operand->got[i], operand->expected[i]);
}

static void poison(struct operand *operand)
{
	memset(operand->expected, POISON, operand->target_bytes);
	memset(operand->scale, POISON, sizeof operand->scale);
	GPU_CHECK(gpu.cuMemsetD8_v2(operand->device_target, POISON, operand->target_bytes));
	GPU_CHECK(gpu.cuMemsetD8_v2(operand->device_scale, POISON, sizeof operand->scale));
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(operand->device_source, operand->source,
	                              operand->source_bytes));
}

static void poison_all(struct launch *launch)
{
	launch->device_partials = gpu_alloc(sizeof launch->got);
	GPU_CHECK(gpu.cuMemsetD8_v2(launch->device_partials, POISON, sizeof launch->got));
	memset(launch->expected, POISON, sizeof launch->expected);
	for (int i = 0; i < 2; i++)
		if (launch->operand[i])
			poison(launch->operand[i]);
}

/* Quantises the operands on both sides and compares everything that was written. */
static void quantise(struct launch *launch)
{
	struct qs_cast_args device, host;
	poison_all(launch);
	describe(launch, &device, &host);
	gpu_launch_amax(&device.quantise);
	run_reference(QS_KERNEL_AMAX, &host.quantise, &host.quantise, QS_AMAX_THREADS);
	compare_partials(launch, &host);
	describe_cast(launch, &device, &host);
	gpu_launch_cast(&device);
	run_reference(QS_KERNEL_CAST, &host, &host.quantise, QS_CAST_THREADS);
	for (int i = 0; i < 2; i++)
		if (launch->operand[i])
			compare_targets(launch->operand[i]);
	GPU_CHECK(gpu.cuMemFree_v2(launch->device_partials));
}

static void quantise_one(struct operand *operand)
{
	struct launch launch = {.operand = {operand}};
	quantise(&launch);
}

/* The same of a cast alone whose amax is given. */
static void cast_with_amax(struct operand *operand, uint32_t bits)
{
	struct launch launch = {.operand = {operand}};
	struct qs_cast_args device, host;
	poison_all(&launch);
	describe(&launch, &device, &host);
	device.partial_blocks[0] = host.partial_blocks[0] = 1;
	launch.expected[0][0] = bits;
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(launch.device_partials, &bits, sizeof bits));
	describe_cast(&launch, &device, &host);
	gpu_launch_cast(&device);
	run_reference(QS_KERNEL_CAST, &host, &host.quantise, QS_CAST_THREADS);
	compare_targets(operand);
	GPU_CHECK(gpu.cuMemFree_v2(launch.device_partials));
}

/* ---- every shape, every layout -------------------------------------------------------------- */

static void quantise_all_shapes(uint32_t transpose, const struct layout *layout)
{
	for (int i = 0; i < SIZES; i++)
		for (int j = 0; j < SIZES; j++) {
			struct operand operand;
			make(&operand, sizes[i], sizes[j], transpose, layout);
			quantise_one(&operand);
			drop(&operand);
		}
}

START_TEST(straight_equals_the_reference_in_every_shape)
{
	quantise_all_shapes(0, &layouts[_i]);
}
END_TEST

START_TEST(transposed_equals_the_reference_in_every_shape)
{
	quantise_all_shapes(1, &layouts[_i]);
}
END_TEST

/* Shapes of real layers, where every block makes many steps. */
START_TEST(large_matrices_equal_the_reference)
{
	const int64_t shapes[][2] = {{14336, 2048}, {2048, 14336}, {50257, 321}, {321, 50257}};
	for (int i = 0; i < 4; i++)
		for (uint32_t transpose = 0; transpose < 2; transpose++) {
			struct operand operand;
			make(&operand, shapes[i][0], shapes[i][1], transpose, &layouts[0]);
			quantise_one(&operand);
			drop(&operand);
		}
}
END_TEST

/* ---- two operands --------------------------------------------------------------------------- */

START_TEST(two_operands_of_a_launch_do_not_mix)
{
	for (int i = 0; i < SIZES; i++) {
		struct operand a, b;
		make(&a, sizes[i], sizes[SIZES - 1 - i], (uint32_t)_i & 1, &layouts[i % LAYOUTS]);
		make(&b, sizes[(i * 3 + 4) % SIZES], sizes[i], (uint32_t)_i >> 1, &layouts[0]);
		*element(&b, 0, 0) = 0x4300; /* 128: not the amax of the other */
		struct launch launch = {.operand = {&a, &b}};
		quantise(&launch);
		drop(&a);
		drop(&b);
	}
}
END_TEST

START_TEST(an_operand_without_blocks_is_skipped)
{
	struct operand operand;
	make(&operand, 1000, 65, (uint32_t)_i, &layouts[0]);
	struct launch first = {.operand = {&operand, NULL}}, second = {.operand = {NULL, &operand}};
	quantise(&first);
	quantise(&second);
	drop(&operand);
}
END_TEST

START_TEST(the_number_of_blocks_changes_nothing)
{
	const uint32_t blocks[] = {1, 2, 3, 31, 132, 511, 512};
	struct operand a, b;
	make(&a, 1000, 333, 0, &layouts[1]);
	make(&b, 1001, 333, 1, &layouts[0]);
	for (int i = 0; i < 7; i++)
		for (int j = 0; j < 7; j++) {
			struct launch launch = {.operand = {&a, &b},
			                        .amax_blocks = {blocks[i], blocks[6 - i]},
			                        .cast_blocks = {blocks[j] * 2, blocks[6 - j] * 3}};
			quantise(&launch);
		}
	drop(&a);
	drop(&b);
}
END_TEST

/* ---- numbers -------------------------------------------------------------------------------- */

START_TEST(nan_and_inf_spoil_only_their_own_place)
{
	const uint16_t odd[] = {0x7f80, 0xff80, 0x7fc0, 0xffc0, 0x7f81, 0xffff};
	for (int i = 0; i < SIZES; i++) {
		const int64_t inner = sizes[i], outer = sizes[(i + 5) % SIZES];
		struct operand operand;
		make(&operand, inner, outer, (uint32_t)_i & 1, &layouts[_i / 2]);
		for (int64_t j = 0; j < 40; j++)
			*element(&operand, random_bits() % outer, random_bits() % inner) =
			        odd[j % 6];
		*element(&operand, 0, 0) = 0x7f80;
		*element(&operand, outer - 1, inner - 1) = 0xffc1;
		quantise_one(&operand);
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
			make(&operand, 129, 131, (uint32_t)_i, &layouts[j]);
			fill_with(&operand, values[i]);
			quantise_one(&operand);
			drop(&operand);
		}
}
END_TEST

/* All bf16 in one matrix under given maxima: 448 leaves them as they are, small ones saturate most
 * and overflow many products, large ones lead into the subnormals of both formats. */
START_TEST(every_bf16_equals_the_reference_under_every_kind_of_scale)
{
	const uint16_t maxima[] = {0x43e0, 0x3f80, 0x3eaa, 0x41c9, 0x4b12, 0x7f7f,
	                           0x0d80, 0x0d7f, 0x0001, 0x0000, 0x2000, 0x6666};
	struct operand operand;
	make(&operand, 256, 256, (uint32_t)_i, &layouts[0]);
	for (int i = 0; i < 65536; i++)
		*element(&operand, i / 256, i % 256) = (uint16_t)i;
	for (int i = 0; i < 12; i++)
		cast_with_amax(&operand, (uint32_t)maxima[i] << 16);
	quantise_one(&operand);
	drop(&operand);
}
END_TEST

START_TEST(the_largest_element_is_found_wherever_it_is)
{
	struct operand operand;
	make(&operand, 37, 19, 0, &layouts[_i]);
	for (int64_t outer = 0; outer < 19; outer++)
		for (int64_t inner = 0; inner < 37; inner++) {
			uint16_t *place = element(&operand, outer, inner);
			const uint16_t before = *place;
			*place = 0xc2c8; /* -100 */
			quantise_one(&operand);
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
	make(&a, 2047, 1000, 1, &layouts[0]);
	make(&b, 4096, 2049, 1, &layouts[0]);
	struct launch launch = {.operand = {&a, &b}};
	for (int i = 0; i < 20; i++)
		quantise(&launch);
	drop(&a);
	drop(&b);
}
END_TEST

START_TEST(kernels_use_no_local_memory)
{
	const CUfunction kernels[] = {gpu.amax, gpu.cast};
	for (int i = 0; i < 2; i++) {
		int bytes = -1;
		GPU_CHECK(gpu.cuFuncGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
		                                 kernels[i]));
		ck_assert_int_eq(bytes, 0);
	}
}
END_TEST

/* More than 2^31 elements: ones, but for some that are set beyond that. Checked without a
 * reference, which would take minutes: under amax 2 a one is 224 (0x76). */
#define LONG_INNER 46352
#define LONG_OUTER 46351 /* k_padded is 46352 too, with one byte of padding when transposed */

/* An element of the large matrix that is not one, and the code it becomes. */
struct planted {
	int64_t outer, inner;
	uint16_t bits;
	uint8_t code;
};

static const struct planted planted[] = {
        {0, 1, 0xbf80, 0xf6},                            /* -1      */
        {LONG_OUTER / 2, 77, 0x3f00, 0x6e},              /* 0.5     */
        {LONG_OUTER - 1, 0, 0x7f80, 0x7f},               /* Inf     */
        {LONG_OUTER - 1, LONG_INNER - 1, 0xc000, 0xfe},  /* -2      */
        {LONG_OUTER - 20, LONG_INNER - 9, 0x0000, 0x00}, /* 0       */
};
#define PLANTED ((int)(sizeof planted / sizeof *planted))

static void check_long(const uint8_t *got, int transpose)
{
	const int64_t row_bytes = LONG_INNER;
	const int64_t rows = transpose ? LONG_INNER : LONG_OUTER;
	const int64_t k = transpose ? LONG_OUTER : LONG_INNER;
	int64_t wrong = 0;
	for (int64_t row = 0; row < rows; row++)
		for (int64_t i = 0; i < row_bytes; i++)
			wrong += got[row * row_bytes + i] != (i < k ? 0x76 : 0x00);
	for (int i = 0; i < PLANTED; i++) {
		const int64_t row = transpose ? planted[i].inner : planted[i].outer;
		const int64_t column = transpose ? planted[i].outer : planted[i].inner;
		ck_assert_uint_eq(got[row * row_bytes + column], planted[i].code);
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

static struct qs_cast_args describe_long(CUdeviceptr source, CUdeviceptr target, CUdeviceptr rest,
                                         uint32_t transpose)
{
	struct qs_cast_args args = {.quantise.partials = rest};
	args.quantise.operand[0] = (struct qs_quantise_operand){
	        .source = source,
	        .target = target,
	        .scale = rest + sizeof(uint32_t[2][QS_AMAX_BLOCKS]),
	        .ld = LONG_INNER,
	        .inner = LONG_INNER,
	        .outer = LONG_OUTER,
	        .k_padded = LONG_INNER,
	        .transpose = transpose,
	};
	return args;
}

START_TEST(matrices_beyond_2_to_the_31_elements_are_indexed_in_64_bits)
{
	const size_t target_bytes = (size_t)LONG_INNER * LONG_INNER;
	size_t available = 0, total = 0;
	GPU_CHECK(gpu.cuMemGetInfo_v2(&available, &total));
	if (available < target_bytes * 3 + ((size_t)1 << 30)) {
		printf("skip matrices of more than 2^31 elements: 7 GiB of device memory\n");
		return;
	}
	CUdeviceptr source = gpu_alloc(target_bytes * 2), target = gpu_alloc(target_bytes);
	CUdeviceptr rest = gpu_alloc(8192);
	uint8_t *got = allocate(target_bytes);
	plant(source);
	for (uint32_t transpose = 0; transpose < 2; transpose++) {
		struct qs_cast_args args = describe_long(source, target, rest, transpose);
		struct qs_quantise_operand *operand = &args.quantise.operand[0];
		operand->blocks = args.partial_blocks[0] = qs_amax_blocks(operand, gpu.sms);
		GPU_CHECK(gpu.cuMemsetD8_v2(target, POISON, target_bytes));
		gpu_launch_amax(&args.quantise);
		operand->blocks = qs_cast_blocks(operand, gpu.sms);
		gpu_launch_cast(&args);
		GPU_CHECK(gpu.cuMemcpyDtoH_v2(got, target, target_bytes));
		check_long(got, (int)transpose);
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
	tcase_add_loop_test(tests, straight_equals_the_reference_in_every_shape, 0, LAYOUTS);
	tcase_add_loop_test(tests, transposed_equals_the_reference_in_every_shape, 0, LAYOUTS);
	tcase_add_test(tests, large_matrices_equal_the_reference);
	tests = group(suite, "launches");
	tcase_add_loop_test(tests, two_operands_of_a_launch_do_not_mix, 0, 4);
	tcase_add_loop_test(tests, an_operand_without_blocks_is_skipped, 0, 2);
	tcase_add_test(tests, the_number_of_blocks_changes_nothing);
	tests = group(suite, "numbers");
	tcase_add_loop_test(tests, nan_and_inf_spoil_only_their_own_place, 0, 2 * LAYOUTS);
	tcase_add_loop_test(tests, matrices_of_one_value_equal_the_reference, 0, 2);
	tcase_add_loop_test(tests, every_bf16_equals_the_reference_under_every_kind_of_scale, 0, 2);
	tcase_add_loop_test(tests, the_largest_element_is_found_wherever_it_is, 0, LAYOUTS);
	tests = group(suite, "size");
	tcase_add_test(tests, repeated_runs_give_the_same_bits);
	tcase_add_test(tests, kernels_use_no_local_memory);
	tcase_add_test(tests, matrices_beyond_2_to_the_31_elements_are_indexed_in_64_bits);
	return qs_suite_main(suite);
}
