/* The kernels of kernels/hash.cu on a GPU against their C references: the hash of matrices of many
 * shapes and layouts bit for bit, and what judge and commit make of it. Prints what a large hash
 * takes.
 */
#include <stddef.h>
#include <string.h>

#include "kernels/hash.h"
#include "tests/gpu/gpu.h"
#include "tests/oracle/oracle.h"
#include "tests/support/suite.h"

#define POISON 0xa5
#define VALID  4
#define FAILED 5

enum {
	HASH,
	JUDGE,
	COMMIT,
	KERNELS
};

static CUfunction kernel[KERNELS];

static void setup(void)
{
	CUmodule module;
	gpu_open();
	GPU_CHECK(gpu.cuModuleLoadData(&module, qs_fatbin_hash));
	for (int i = 0; i < KERNELS; i++)
		GPU_CHECK(gpu.cuModuleGetFunction(&kernel[i], module,
		                                  qs_oracle_hash_kernels[i].name));
}

/* Memory on both sides. */
struct twin {
	size_t bytes;
	void *host;
	CUdeviceptr device;
};

static struct twin twin(size_t bytes)
{
	struct twin t = {bytes, NULL, gpu_alloc(bytes)};
	ck_assert_int_eq(posix_memalign(&t.host, 256, bytes), 0);
	memset(t.host, POISON, bytes);
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(t.device, t.host, bytes));
	return t;
}

static void drop(struct twin *t)
{
	free(t->host);
	GPU_CHECK(gpu.cuMemFree_v2(t->device));
}

static void upload(const struct twin *t)
{
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(t->device, t->host, t->bytes));
}

/* Compares the first `bytes` with the reference's. */
static void compare(const struct twin *t, size_t bytes, const char *what)
{
	void *got = malloc(bytes);
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(got, t->device, bytes));
	ck_assert_msg(!memcmp(got, t->host, bytes), "%s", what);
	free(got);
}

/* Everything one check works on. */
struct bench {
	struct twin source, work, record, outcome, descriptor;
	struct qs_hash_args device, host;
};

static struct bench bench_of(int64_t rows, int64_t cols, int64_t ld, int64_t shift)
{
	struct bench b = {.source = twin((size_t)(rows * ld + shift + 8) * 2),
	                  .work = twin(sizeof(struct qs_hash_work)),
	                  .record = twin(sizeof(struct qs_hash_record)),
	                  .outcome = twin(sizeof(struct qs_hash_outcome)),
	                  .descriptor = twin(4 * QS_HASH_IMAGE)};
	uint16_t *source = b.source.host;
	uint64_t state = (uint64_t)(rows * 31 + cols);
	for (size_t i = 0; i < b.source.bytes / 2; i++) {
		state = state * 6364136223846793005u + 1442695040888963407u;
		source[i] = (uint16_t)((state >> 32 & 0x807f) | (110 + (state >> 48) % 20) << 7);
	}
	upload(&b.source);
	b.host = (struct qs_hash_args){.rows = rows,
	                               .cols = cols,
	                               .ld = ld,
	                               .sequence = 1,
	                               .blocks = qs_hash_blocks(rows, cols, gpu.sms),
	                               .valid = VALID,
	                               .failed = FAILED,
	                               .reset = 1u << VALID | 1u << FAILED};
	b.device = b.host;
	b.host.source = (uintptr_t)(source + shift);
	b.host.work = (uintptr_t)b.work.host;
	b.host.record = (uintptr_t)b.record.host;
	b.host.outcome = (uintptr_t)b.outcome.host;
	b.host.descriptor = (uintptr_t)b.descriptor.host;
	b.device.source = b.source.device + 2 * (CUdeviceptr)shift;
	b.device.work = b.work.device;
	b.device.record = b.record.device;
	b.device.outcome = b.outcome.device;
	b.device.descriptor = b.descriptor.device;
	return b;
}

static void drop_bench(struct bench *b)
{
	drop(&b->source);
	drop(&b->work);
	drop(&b->record);
	drop(&b->outcome);
	drop(&b->descriptor);
}

static void launch(struct bench *b, int which)
{
	gpu_launch(kernel[which], which == HASH ? b->device.blocks : 1, QS_HASH_THREADS,
	           &b->device);
}

/* NaN is told by different words; everything else of the work's head is compared. */
static void compare_work(const struct bench *b, const char *what)
{
	struct qs_hash_work got;
	const struct qs_hash_work *expected = b->work.host;
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(&got, b->work.device, sizeof got));
	ck_assert_msg(got.hash[0] == expected->hash[0] && got.hash[1] == expected->hash[1] &&
	                      got.amax == expected->amax && !got.infinite == !expected->infinite &&
	                      got.stale == expected->stale && got.differs == expected->differs &&
	                      got.repair == expected->repair && got.failed == expected->failed,
	              "%s", what);
}

static void check(struct bench *b, uint32_t flags, const char *what)
{
	b->host.flags = b->device.flags = flags;
	b->host.sequence = ++b->device.sequence;
	for (int i = 0; i < KERNELS; i++) {
		void *params[] = {&b->host};
		launch(b, i);
		qs_oracle_hash_kernels[i].run(params, i == HASH ? b->host.blocks : 1,
		                              QS_HASH_THREADS);
	}
	compare_work(b, what);
	compare(&b->record, offsetof(struct qs_hash_record, pad), what);
	compare(&b->descriptor, b->descriptor.bytes, what);
	struct qs_hash_outcome got;
	const struct qs_hash_outcome *expected = b->outcome.host;
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(&got, b->outcome.device, sizeof got));
	ck_assert_msg(got.hash[0] == expected->hash[0] && got.hash[1] == expected->hash[1] &&
	                      got.amax == expected->amax && got.changes == expected->changes &&
	                      (flags & QS_HASH_GRAPH || got.differs == expected->differs) &&
	                      got.sequence == expected->sequence,
	              "%s", what);
}

static void poke(struct bench *b, int64_t row, int64_t col, uint16_t bits)
{
	uint16_t *at = (uint16_t *)(uintptr_t)b->host.source + row * b->host.ld + col;
	*at ^= bits;
	upload(&b->source);
}

START_TEST(every_shape_and_layout_gives_the_hash_of_the_reference)
{
	static const int64_t sizes[] = {1, 7, 8, 9, 63, 64, 1000, 2048};
	static const struct {
		int64_t extra, shift;
	} layouts[] = {{0, 0}, {8, 0}, {1, 0}, {0, 1}, {64, 8}};
	char what[96];
	for (int r = 0; r < 8; r++)
		for (int c = 0; c < 8; c++)
			for (int l = 0; l < 5; l++) {
				const int64_t cols = sizes[c], ld = cols + layouts[l].extra;
				struct bench b = bench_of(sizes[r], cols, ld, layouts[l].shift);
				snprintf(what, sizeof what, "%d x %d, ld %d, shift %d",
				         (int)sizes[r], (int)cols, (int)ld, (int)layouts[l].shift);
				check(&b, QS_HASH_MAKE, what);
				drop_bench(&b);
			}
}
END_TEST

START_TEST(any_number_of_blocks_gives_the_same)
{
	struct bench b = bench_of(777, 520, 520, 0);
	for (uint32_t blocks = 1; blocks <= QS_HASH_PARTIALS; blocks = blocks * 3 + 1) {
		b.host.blocks = b.device.blocks = blocks;
		check(&b, QS_HASH_MAKE, "blocks");
	}
	drop_bench(&b);
}
END_TEST

START_TEST(a_check_does_what_the_reference_does)
{
	struct bench b = bench_of(300, 200, 208, 0);
	check(&b, QS_HASH_MAKE | QS_HASH_FINITE, "made");
	check(&b, QS_HASH_FINITE, "equal");
	for (int64_t bit = 0; bit < 16; bit++) {
		poke(&b, (bit * 37) % 300, (bit * 53) % 200, (uint16_t)(1 << bit));
		check(&b, bit % 2 ? QS_HASH_GRAPH : 0, "one bit");
		check(&b, 0, "equal again");
	}
	poke(&b, 299, 199, 1);
	check(&b, QS_HASH_LOOK, "look");
	check(&b, 0, "repaired");
	uint16_t *last = (uint16_t *)(uintptr_t)b.host.source + 299 * 208 + 199;
	poke(&b, 299, 199, *last ^ 0x7f80);
	check(&b, QS_HASH_FINITE, "infinite");
	poke(&b, 299, 199, 0x7f80 ^ 0x3f80);
	check(&b, QS_HASH_FINITE, "finite");
	((uint32_t *)b.descriptor.host)[VALID] = 0;
	((uint32_t *)b.descriptor.host)[FAILED] = 1;
	upload(&b.descriptor);
	check(&b, QS_HASH_FINITE, "failed without need");
	poke(&b, 0, 200, 0xffff); /* padding */
	check(&b, QS_HASH_FINITE, "padding");
	drop_bench(&b);
}
END_TEST

/* Rows 2^30 elements apart: offsets in bytes need more than 32 bits. */
START_TEST(a_matrix_beyond_4_gib_is_hashed_whole)
{
	const int64_t rows = 3, cols = 1000, ld = (int64_t)1 << 30;
	struct bench b = bench_of(rows, cols, cols, 0);
	CUdeviceptr far = gpu_alloc((size_t)(2 * ld + cols) * 2);
	for (int64_t r = 0; r < rows; r++)
		GPU_CHECK(gpu.cuMemcpyHtoD_v2(far + (CUdeviceptr)(r * ld) * 2,
		                              (uint16_t *)b.source.host + r * cols,
		                              (size_t)cols * 2));
	b.device.source = far;
	b.device.ld = ld;
	check(&b, QS_HASH_MAKE, "far apart");
	GPU_CHECK(gpu.cuMemFree_v2(far));
	drop_bench(&b);
}
END_TEST

static float median(float *times, int count)
{
	for (int i = 1; i < count; i++)
		for (int j = i; j > 0 && times[j] < times[j - 1]; j--) {
			float swap = times[j];
			times[j] = times[j - 1];
			times[j - 1] = swap;
		}
	return times[count / 2];
}

/* 8192 x 8192 in turn from eight places, so that none is in the L2 cache; the hash alone, and the
 * three launches of a check that finds nothing. */
START_TEST(numbers)
{
	enum {
		PLACES = 8,
		REPEATS = 20
	};
	CUdeviceptr place[PLACES];
	struct bench b = bench_of(8192, 8192, 8192, 0);
	CUevent from, to;
	float times[2][REPEATS];
	for (int i = 0; i < PLACES; i++) {
		place[i] = gpu_alloc(b.source.bytes);
		GPU_CHECK(gpu.cuMemcpyHtoD_v2(place[i], b.source.host, b.source.bytes));
	}
	GPU_CHECK(gpu.cuEventCreate(&from, 0));
	GPU_CHECK(gpu.cuEventCreate(&to, 0));
	for (int all = 0; all < 2; all++)
		for (int i = 0; i < REPEATS; i++) {
			GPU_CHECK(gpu.cuEventRecord(from, NULL));
			for (int j = 0; j < PLACES; j++) {
				b.device.source = place[j];
				launch(&b, HASH);
				if (all)
					launch(&b, JUDGE);
				if (all)
					launch(&b, COMMIT);
			}
			GPU_CHECK(gpu.cuEventRecord(to, NULL));
			GPU_CHECK(gpu.cuEventSynchronize(to));
			GPU_CHECK(gpu.cuEventElapsedTime(&times[all][i], from, to));
			times[all][i] *= 1e3f / PLACES;
		}
	const float hash = median(times[0], REPEATS), check_us = median(times[1], REPEATS);
	printf("hash of 134 MB: %.1f us (%.2f TB/s), with judge and commit %.1f us\n", (double)hash,
	       134.2 / (double)hash, (double)check_us);
	for (int i = 0; i < PLACES; i++)
		GPU_CHECK(gpu.cuMemFree_v2(place[i]));
	drop_bench(&b);
}
END_TEST

int main(void)
{
	gpu_require();
	Suite *suite = suite_create("hash");
	TCase *tests = tcase_create("hash");
	tcase_add_checked_fixture(tests, setup, NULL);
	tcase_set_timeout(tests, 120);
	tcase_add_test(tests, every_shape_and_layout_gives_the_hash_of_the_reference);
	tcase_add_test(tests, any_number_of_blocks_gives_the_same);
	tcase_add_test(tests, a_check_does_what_the_reference_does);
	tcase_add_test(tests, a_matrix_beyond_4_gib_is_hashed_whole);
	tcase_add_test(tests, numbers);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
