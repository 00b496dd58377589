/* The kernel of kernels/compare.cu on a GPU against its C reference: counts and maxima bit for bit,
 * sums to within rounding, and the same outcome each time. Prints what a large comparison takes. */
#include <math.h>
#include <string.h>

#include "kernels/compare.h"
#include "tests/gpu/gpu.h"
#include "tests/oracle/oracle.h"
#include "tests/support/suite.h"

static CUfunction kernel;

static void setup(void)
{
	CUmodule module;
	gpu_open();
	GPU_CHECK(gpu.cuModuleLoadData(&module, qs_fatbin_compare));
	GPU_CHECK(gpu.cuModuleGetFunction(&kernel, module, QS_KERNEL_COMPARE));
}

/* Memory on both sides. */
struct twin {
	size_t bytes;
	void *host;
	CUdeviceptr device;
};

static struct twin twin(size_t bytes)
{
	struct twin t = {bytes, calloc(1, bytes), gpu_alloc(bytes)};
	ck_assert_ptr_nonnull(t.host);
	return t;
}

static void upload(const struct twin *t)
{
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(t->device, t->host, t->bytes));
}

static void drop(struct twin *t)
{
	free(t->host);
	GPU_CHECK(gpu.cuMemFree_v2(t->device));
}

/* Everything a comparison works on. */
struct bench {
	struct twin result[2], source[2], scale[2], work, outcome;
	struct qs_compare_args device, host;
};

struct form {
	int64_t rows, cols, extra, shift; /* elements */
	uint32_t type;
};

static uint32_t next(uint64_t *state)
{
	*state = *state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(*state >> 32);
}

/* Of moderate size, now and then NaN or Inf. */
static float number(uint64_t *state)
{
	const uint32_t bits = next(state);
	if (bits % 1009 == 0)
		return bits & 0x10000 ? NAN : -INFINITY;
	return ldexpf((float)(int32_t)next(state), (int)(bits % 24) - 43);
}

static void put(void *matrix, uint32_t type, int64_t at, float value)
{
	if (type == QS_COMPARE_FP32)
		((float *)matrix)[at] = value;
	else
		((uint16_t *)matrix)[at] = qs_oracle_float_to_bf16(value);
}

static void make_results(struct bench *b, const struct form *form, int64_t ld)
{
	const size_t size = form->type == QS_COMPARE_FP32 ? 4 : 2;
	const int64_t elements = form->rows * ld + form->shift;
	uint64_t state = (uint64_t)(form->rows * 31 + form->cols);
	for (int i = 0; i < 2; i++)
		b->result[i] = twin((size_t)elements * size);
	for (int64_t i = 0; i < elements; i++) {
		const float r = number(&state), c = i % 3 ? r * 1.03f : r;
		put(b->result[0].host, form->type, i, r);
		put(b->result[1].host, form->type, i, next(&state) % 4001 ? c : NAN);
	}
	upload(&b->result[0]);
	upload(&b->result[1]);
}

static void make_operand(struct bench *b, const struct form *form, int which)
{
	const int64_t ld = form->cols + form->extra, most = form->rows + form->cols;
	uint64_t state = (uint64_t)(form->rows * 37 + form->cols + which);
	b->source[which] = twin((size_t)(form->rows * ld) * 2);
	b->scale[which] = twin((size_t)most * 4);
	for (int64_t i = 0; i < form->rows * ld; i++)
		put(b->source[which].host, QS_COMPARE_BF16, i, number(&state));
	for (int64_t i = 0; i < most; i++)
		((float *)b->scale[which].host)[i] = ldexpf(1, (int)(next(&state) % 8) - 8);
	upload(&b->source[which]);
	upload(&b->scale[which]);
	struct qs_compare_operand operand = {
	        .rows = form->rows,
	        .cols = form->cols,
	        .ld = ld,
	        .format = which ? QS_FP8_E5M2 : QS_FP8_E4M3,
	        .scales = (uint32_t)(form->rows + which) % 3,
	        .blocks = qs_compare_blocks(form->rows, form->cols, gpu.sms),
	};
	b->host.operand[which] = b->device.operand[which] = operand;
	b->host.operand[which].source = (uintptr_t)b->source[which].host;
	b->host.operand[which].scale = (uintptr_t)b->scale[which].host;
	b->device.operand[which].source = b->source[which].device;
	b->device.operand[which].scale = b->scale[which].device;
}

static struct bench bench_of(const struct form *form)
{
	const int64_t ld = form->cols + form->extra;
	const size_t shift = (size_t)form->shift * (form->type == QS_COMPARE_FP32 ? 4 : 2);
	struct bench b = {.work = twin(sizeof(struct qs_compare_work)),
	                  .outcome = twin(sizeof(struct qs_compare_outcome))};
	b.host = (struct qs_compare_args){
	        .rows = form->rows,
	        .cols = form->cols,
	        .ld_reference = ld,
	        .ld_candidate = ld,
	        .type = form->type,
	        .blocks = qs_compare_blocks(form->rows, form->cols, gpu.sms),
	};
	b.device = b.host;
	make_results(&b, form, ld);
	for (int i = 0; i < 2; i++)
		make_operand(&b, form, i);
	b.host.reference = (uintptr_t)b.result[0].host + shift;
	b.host.candidate = (uintptr_t)b.result[1].host + shift;
	b.host.work = (uintptr_t)b.work.host;
	b.host.outcome = (uintptr_t)b.outcome.host;
	b.device.reference = b.result[0].device + shift;
	b.device.candidate = b.result[1].device + shift;
	b.device.work = b.work.device;
	b.device.outcome = b.outcome.device;
	return b;
}

static void drop_bench(struct bench *b)
{
	for (int i = 0; i < 2; i++) {
		drop(&b->result[i]);
		drop(&b->source[i]);
		drop(&b->scale[i]);
	}
	drop(&b->work);
	drop(&b->outcome);
}

static struct qs_compare_outcome on_device(struct bench *b)
{
	struct qs_compare_outcome got;
	b->device.sequence++;
	GPU_CHECK(gpu.cuMemsetD8_v2(b->work.device, 0, 16));
	GPU_CHECK(gpu.cuMemsetD8_v2(b->outcome.device, 0xa5, b->outcome.bytes));
	gpu_launch(kernel, qs_compare_grid(&b->device), QS_COMPARE_THREADS, &b->device);
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(&got, b->outcome.device, sizeof got));
	return got;
}

static struct qs_compare_outcome on_host(struct bench *b)
{
	void *params[] = {&b->host};
	memset(b->work.host, 0, 16);
	b->host.sequence++;
	qs_oracle_compare_kernels[0].run(params, qs_compare_grid(&b->host), QS_COMPARE_THREADS);
	return *(struct qs_compare_outcome *)b->outcome.host;
}

static int is_near(double x, double y)
{
	return fabs(x - y) <= 1e-12 * fabs(y);
}

static void check(struct bench *b, const char *what)
{
	const struct qs_compare_outcome got = on_device(b), again = on_device(b),
	                                expected = on_host(b);
	ck_assert_msg(is_near(got.signal, expected.signal) && is_near(got.noise, expected.noise) &&
	                      fabsf(got.sqnr - expected.sqnr) < 1e-4f,
	              "%s: %g / %g, %g dB, not %g / %g, %g dB", what, got.signal, got.noise,
	              (double)got.sqnr, expected.signal, expected.noise, (double)expected.sqnr);
	ck_assert_msg(got.skipped == expected.skipped && got.spoilt == expected.spoilt &&
	                      got.amax == expected.amax && got.error == expected.error,
	              "%s", what);
	for (int i = 0; i < 2; i++)
		ck_assert_msg(got.saturated[i] == expected.saturated[i] &&
		                      got.flushed[i] == expected.flushed[i] &&
		                      got.operand_amax[i] == expected.operand_amax[i],
		              "%s, operand %d", what, i);
	ck_assert_uint_eq(got.sequence, b->device.sequence - 1);
	ck_assert_msg(got.signal == again.signal && got.noise == again.noise, "%s: twice", what);
}

START_TEST(every_shape_and_layout_is_compared_as_the_reference_does)
{
	static const int64_t sizes[] = {1, 7, 8, 63, 64, 777};
	static const struct form layouts[] = {{.extra = 0},
	                                      {.extra = 8},
	                                      {.extra = 1},
	                                      {.shift = 1},
	                                      {.extra = 3, .type = QS_COMPARE_FP32},
	                                      {.shift = 1, .type = QS_COMPARE_FP32}};
	char what[96];
	for (int r = 0; r < 6; r++)
		for (int c = 0; c < 6; c++)
			for (int l = 0; l < 6; l++) {
				struct form form = layouts[l];
				form.rows = sizes[r];
				form.cols = sizes[c];
				struct bench b = bench_of(&form);
				snprintf(what, sizeof what, "%d x %d, layout %d", (int)sizes[r],
				         (int)sizes[c], l);
				check(&b, what);
				drop_bench(&b);
			}
}
END_TEST

START_TEST(any_number_of_blocks_finds_the_same)
{
	const struct form form = {.rows = 300, .cols = 520};
	struct bench b = bench_of(&form);
	for (uint32_t blocks = 1; blocks <= QS_COMPARE_PARTIALS; blocks = blocks * 4 + 1) {
		b.host.blocks = b.device.blocks = blocks;
		b.host.operand[0].blocks = b.device.operand[0].blocks = blocks % 7;
		b.host.operand[1].blocks = b.device.operand[1].blocks = QS_COMPARE_PARTIALS;
		check(&b, "blocks");
	}
	drop_bench(&b);
}
END_TEST

/* Results and operands of 8192 x 8192. */
START_TEST(numbers)
{
	enum {
		REPEATS = 20
	};
	const struct form form = {.rows = 8192, .cols = 8192};
	struct bench b = bench_of(&form);
	CUevent from, to;
	float best = 0;
	GPU_CHECK(gpu.cuEventCreate(&from, 0));
	GPU_CHECK(gpu.cuEventCreate(&to, 0));
	for (int i = 0; i < REPEATS; i++) {
		float ms;
		GPU_CHECK(gpu.cuMemsetD8_v2(b.work.device, 0, 16));
		GPU_CHECK(gpu.cuEventRecord(from, NULL));
		gpu_launch(kernel, qs_compare_grid(&b.device), QS_COMPARE_THREADS, &b.device);
		GPU_CHECK(gpu.cuEventRecord(to, NULL));
		GPU_CHECK(gpu.cuEventSynchronize(to));
		GPU_CHECK(gpu.cuEventElapsedTime(&ms, from, to));
		best = i && best < ms ? best : ms;
	}
	printf("comparison of 537 MB: %.1f us (%.2f TB/s)\n", 1e3 * (double)best,
	       0.5369 / (double)best);
	drop_bench(&b);
}
END_TEST

int main(void)
{
	gpu_require();
	Suite *suite = suite_create("compare");
	TCase *tests = tcase_create("compare");
	tcase_add_checked_fixture(tests, setup, NULL);
	tcase_set_timeout(tests, 120);
	tcase_add_test(tests, every_shape_and_layout_is_compared_as_the_reference_does);
	tcase_add_test(tests, any_number_of_blocks_finds_the_same);
	tcase_add_test(tests, numbers);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
