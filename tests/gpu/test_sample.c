/* The kernels of kernels/sample.h on a GPU against their C references: copies made by the
 * references are compared with their sources launch after launch, while nothing changes and after
 * one element or all of the source did, and after each launch all that it may write is the same on
 * both sides.
 */
#include <stdbool.h>
#include <string.h>

#include "kernels/nf4.h"
#include "kernels/sample.h"
#include "tests/gpu/gpu.h"
#include "tests/oracle/oracle.h"
#include "tests/support/suite.h"

#define LARGE 0x4140 /* 12: its code, and its byte, have another sign bit if it has */

/* The forms whose copies are compared. */
enum form {
	NF4,
	STRAIGHT,
	TURNED,
	FORMS
};

static const char *const names[] = {"nf4", "straight", "turned"};

static CUfunction kernels[2]; /* of NF4, of the others */

static void setup(void)
{
	CUmodule nf4, quantise;
	gpu_open();
	GPU_CHECK(gpu.cuModuleLoadData(&nf4, qs_fatbin_nf4));
	GPU_CHECK(gpu.cuModuleGetFunction(&kernels[0], nf4, QS_KERNEL_NF4_SAMPLE));
	GPU_CHECK(gpu.cuModuleLoadData(&quantise, qs_fatbin_quantise));
	GPU_CHECK(gpu.cuModuleGetFunction(&kernels[1], quantise, QS_KERNEL_FP8_SAMPLE));
}

/* ---- memory on both sides ------------------------------------------------------------------- */

struct twin {
	size_t bytes;
	void *host;
	CUdeviceptr device;
};

/* Zero on both sides. */
static struct twin twin(size_t bytes)
{
	struct twin t = {bytes, NULL, gpu_alloc(bytes)};
	ck_assert_int_eq(posix_memalign(&t.host, 256, bytes), 0);
	memset(t.host, 0, bytes);
	GPU_CHECK(gpu.cuMemsetD8_v2(t.device, 0, bytes));
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

/* Compares bytes from `first` to `end` with the reference's. */
static void compare(const struct twin *t, size_t first, size_t end, const char *what)
{
	uint8_t *got = malloc(t->bytes);
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(got, t->device, t->bytes));
	ck_assert_msg(!memcmp(got + first, (const uint8_t *)t->host + first, end - first), "%s",
	              what);
	free(got);
}

/* ---- a copy and its source ------------------------------------------------------------------ */

struct bench {
	char name[96];
	enum form form;
	struct twin source, data, scale, work, record, outcome, weight;
	struct qs_sample_args host, device;
	unsigned blocks;
};

static uint16_t *element(struct bench *b, int64_t row, int64_t col)
{
	return (uint16_t *)(uintptr_t)b->host.source + row * b->host.ld + col;
}

static void run(const struct qs_oracle_kernel *kernel, const char *name, void *args, unsigned grid,
                unsigned block)
{
	void *params[] = {args};
	while (kernel->name && strcmp(kernel->name, name) != 0)
		kernel++;
	ck_assert_msg(kernel->name != NULL, "no reference of %s", name);
	kernel->run(params, grid, block);
}

static void pack(struct bench *b)
{
	struct qs_pack_args args = {.source = b->host.source,
	                            .packed = b->host.data,
	                            .weight = b->host.descriptor,
	                            .ld = b->host.ld,
	                            .n = b->host.rows,
	                            .k = b->host.cols};
	run(qs_oracle_nf4_kernels, QS_KERNEL_NF4_PACK, &args, 1, QS_PACK_THREADS);
	((struct qs_weight *)b->weight.host)->valid = 1;
}

static void cast(struct bench *b)
{
	_Alignas(16) uint32_t partial[QS_PARTIALS];
	struct qs_quantise_args args = {.operand = {{.source = b->host.source,
	                                             .scale = b->host.scale,
	                                             .partials = (uintptr_t)partial,
	                                             .ld = b->host.ld,
	                                             .inner = b->host.cols,
	                                             .outer = b->host.rows,
	                                             .blocks = {1, 1}}}};
	*(b->form == TURNED ? &args.operand[0].turned : &args.operand[0].straight) = b->host.data;
	run(qs_oracle_kernels, QS_KERNEL_QUANTISE, &args, 1, QS_QUANTISE_THREADS);
	run(qs_oracle_kernels, QS_KERNEL_REPAIR, &args, 1, QS_QUANTISE_THREADS);
	((struct qs_hash_record *)b->record.host)->amax = partial[0] & 0xffff0000u;
}

static size_t bytes_of(enum form form, int64_t rows, int64_t cols)
{
	if (form == NF4)
		return (size_t)qs_nf4_bytes(rows, cols);
	return (size_t)(form == TURNED ? cols * qs_k_padded(rows) : rows * qs_k_padded(cols));
}

static struct bench bench_of(enum form form, int64_t rows, int64_t cols, int64_t extra,
                             int64_t shift)
{
	struct bench b = {.form = form};
	snprintf(b.name, sizeof b.name, "%s, %lld x %lld, ld + %lld, shift %lld", names[form],
	         (long long)rows, (long long)cols, (long long)extra, (long long)shift);
	b.source = twin((size_t)(rows * (cols + extra) + shift + 8) * 2);
	b.data = twin(bytes_of(form, rows, cols));
	b.scale = twin(sizeof(float));
	b.work = twin(sizeof(struct qs_hash_work));
	b.record = twin(sizeof(struct qs_hash_record));
	b.outcome = twin(sizeof(struct qs_hash_outcome));
	b.weight = twin(sizeof(struct qs_weight));
	b.host = (struct qs_sample_args){.rows = rows,
	                                 .cols = cols,
	                                 .ld = cols + extra,
	                                 .flags = form == TURNED ? QS_SAMPLE_TURNED : 0};
	b.device = b.host;
#define PLACE(field, twin)                                                                         \
	b.host.field = (uintptr_t)(twin).host;                                                     \
	b.device.field = (twin).device
	PLACE(source, b.source);
	PLACE(data, b.data);
	PLACE(scale, b.scale);
	PLACE(work, b.work);
	PLACE(record, b.record);
	PLACE(outcome, b.outcome);
	PLACE(descriptor, b.weight);
	b.host.source += 2 * (uint64_t)shift;
	b.device.source += 2 * (uint64_t)shift;
	b.blocks = qs_sample_blocks(rows, cols, gpu.sms);
	return b;
}

static void fill(struct bench *b, uint64_t state)
{
	uint16_t *source = b->source.host;
	for (size_t i = 0; i < b->source.bytes / 2; i++) {
		state = state * 6364136223846793005u + 1442695040888963407u;
		source[i] = (uint16_t)((state >> 32 & 0x807f) | (113 + (state >> 48) % 16) << 7);
	}
	upload(&b->source);
}

static void make(struct bench *b)
{
	struct qs_hash_record *record = b->record.host;
	record->kept[0] = record->kept[1] = 7;
	upload(&b->source);
	if (b->form == NF4)
		pack(b);
	else
		cast(b);
	upload(&b->data);
	upload(&b->scale);
	upload(&b->record);
	upload(&b->weight);
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(b->weight.device + offsetof(struct qs_weight, packed),
	                              &b->data.device, sizeof b->data.device));
}

static void drop_bench(struct bench *b)
{
	drop(&b->source);
	drop(&b->data);
	drop(&b->scale);
	drop(&b->work);
	drop(&b->record);
	drop(&b->outcome);
	drop(&b->weight);
}

/* One launch on both sides; true if it found a change. */
static bool sample(struct bench *b)
{
	gpu_launch(kernels[b->form != NF4], b->blocks, QS_SAMPLE_THREADS, &b->device);
	run(b->form == NF4 ? qs_oracle_nf4_kernels : qs_oracle_kernels,
	    b->form == NF4 ? QS_KERNEL_NF4_SAMPLE : QS_KERNEL_FP8_SAMPLE, &b->host, b->blocks,
	    QS_SAMPLE_THREADS);
	compare(&b->work, 0, offsetof(struct qs_hash_work, partial), b->name);
	compare(&b->record, 0, b->record.bytes, b->name);
	compare(&b->outcome, 0, b->outcome.bytes, b->name);
	compare(&b->data, 0, b->data.bytes, b->name);
	compare(&b->weight, offsetof(struct qs_weight, valid), b->weight.bytes, b->name);
	return ((struct qs_hash_work *)b->work.host)->stale;
}

/* ---- tests ---------------------------------------------------------------------------------- */

static const struct {
	int64_t rows, cols; /* NF4 takes those whose cols are a multiple of 64 */
} sizes[] = {{1, 64}, {63, 64}, {200, 320}, {130, 1024}, {1, 1}, {33, 17}, {77, 100}, {1000, 2000}};

#define SIZES ((int)(sizeof sizes / sizeof *sizes))

static const struct {
	int64_t extra, shift;
} layouts[] = {{0, 0}, {8, 8}, {3, 0}, {0, 1}};

#define LAYOUTS ((int)(sizeof layouts / sizeof *layouts))

static bool has(enum form form, int size)
{
	return form != NF4 || sizes[size].cols % QS_WEIGHT_TILE == 0;
}

static void each(void (*test)(struct bench *b))
{
	for (int i = 0; i < FORMS * SIZES * LAYOUTS; i++) {
		const int form = i % FORMS, size = i / FORMS % SIZES, layout = i / FORMS / SIZES;
		if (!has((enum form)form, size))
			continue;
		struct bench b = bench_of((enum form)form, sizes[size].rows, sizes[size].cols,
		                          layouts[layout].extra, layouts[layout].shift);
		fill(&b, (uint64_t)i + 1);
		test(&b);
		drop_bench(&b);
	}
}

static void expect_same(struct bench *b)
{
	const unsigned planned = b->blocks;
	make(b);
	for (int turn = 0; turn <= QS_SAMPLE_TURNS; turn++) {
		b->blocks = turn % 3 ? (unsigned)turn % 3 : planned;
		ck_assert_msg(!sample(b), "%s: turn %d", b->name, turn);
	}
}

START_TEST(a_copy_of_its_source_is_the_same_at_every_turn)
{
	each(expect_same);
}
END_TEST

static int turn_of(const struct bench *b, int64_t row, int64_t col)
{
	const int64_t patch = row / QS_SAMPLE_PATCH_ROWS * qs_sample_across(b->host.cols) +
	                      col / QS_SAMPLE_PATCH_COLS;
	return (int)((b->form == NF4 ? row : patch) % QS_SAMPLE_TURNS);
}

static void expect_element_found(struct bench *b)
{
	const int64_t rows[] = {0, b->host.rows / 2, b->host.rows - 1};
	const int64_t cols[] = {b->host.cols - 1, b->host.cols / 3, 0};
	for (int i = 0; i < 3; i++) {
		uint16_t *changed = element(b, rows[i], cols[i]);
		*changed = LARGE;
		memset(b->record.host, 0, b->record.bytes);
		memset(b->weight.host, 0, b->weight.bytes);
		make(b);
		*changed ^= 0x8000;
		upload(&b->source);
		int turn = 0;
		while (!sample(b) && turn < QS_SAMPLE_TURNS)
			turn++;
		ck_assert_msg(turn == turn_of(b, rows[i], cols[i]), "%s: at turn %d, not %d",
		              b->name, turn, turn_of(b, rows[i], cols[i]));
	}
}

START_TEST(a_changed_element_is_found_at_its_turn)
{
	each(expect_element_found);
}
END_TEST

static void expect_found_at_once(struct bench *b)
{
	const bool small = b->host.rows < QS_SAMPLE_TURNS || b->host.cols < 1000;
	if (small) /* nothing of it may have its turn */
		return;
	make(b);
	fill(b, 1234);
	ck_assert_msg(sample(b), "%s", b->name);
}

START_TEST(a_replaced_source_is_found_at_once)
{
	each(expect_found_at_once);
}
END_TEST

/* The largest number comes, or goes: what is measured for the cast is right. */
START_TEST(the_amax_of_a_changed_source_is_measured)
{
	static const uint16_t numbers[] = {0x7f7f, 0x4540, 0x0000, 0x7f80, 0x7fc0};
	for (int i = 0; i < 5; i++)
		for (int form = STRAIGHT; form <= TURNED; form++) {
			struct bench b = bench_of((enum form)form, 1000, 2000, 3, 1);
			fill(&b, 5);
			*element(&b, 0, 0) = 0x4640;
			make(&b);
			*element(&b, 0, 0) = 0;
			*element(&b, 999, 1999) = numbers[i];
			upload(&b.source);
			ck_assert_msg(sample(&b), "%s", b.name);
			drop_bench(&b);
		}
}
END_TEST

/* A weight as large as those of models: every block, and more than one part for each. */
START_TEST(large_copies_are_compared_as_small_ones)
{
	for (int form = 0; form < FORMS; form++) {
		struct bench b = bench_of((enum form)form, 4096, 4096, 0, 0);
		fill(&b, 9);
		make(&b);
		ck_assert(!sample(&b));
		*element(&b, 4065, 3999) = LARGE;
		upload(&b.source);
		int turn = 1;
		while (!sample(&b) && turn < QS_SAMPLE_TURNS + 1)
			turn++;
		ck_assert_int_eq(turn % QS_SAMPLE_TURNS, turn_of(&b, 4065, 3999));
		drop_bench(&b);
	}
}
END_TEST

int main(void)
{
	gpu_require();
	Suite *suite = suite_create("sample");
	TCase *tests = tcase_create("sample");
	tcase_add_checked_fixture(tests, setup, NULL);
	tcase_set_timeout(tests, 120);
	tcase_add_test(tests, a_copy_of_its_source_is_the_same_at_every_turn);
	tcase_add_test(tests, a_changed_element_is_found_at_its_turn);
	tcase_add_test(tests, a_replaced_source_is_found_at_once);
	tcase_add_test(tests, the_amax_of_a_changed_source_is_measured);
	tcase_add_test(tests, large_copies_are_compared_as_small_ones);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
