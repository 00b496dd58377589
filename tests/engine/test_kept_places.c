/* Kept copies of weights that are no allocation of their own: columns of a wider matrix, neighbours
 * in one allocation, and an address that had another weight before. */
#include "kept.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BESIDE 64 /* columns of the wider matrix on either side of the weight */

static struct session session;
static struct made x;

static CUdeviceptr pointer(const void *address)
{
	return (CUdeviceptr)(uintptr_t)address;
}

static void copy(void *to, const void *from, size_t bytes)
{
	must((int)cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, session.stream),
	     "copy");
}

/* Other numbers for the weight of `made`, in memory of their own; its host values are these. */
static void *new_weight(struct made *made)
{
	static uint64_t seed = 100;
	struct made other;
	product_make(&other, &made->p, ++seed);
	memcpy(made->a, other.a, made->size_a * sizeof *made->a);
	return other.da;
}

static void open_with(const struct product *shape)
{
	session_open(&session);
	product_make(&x, shape, 1);
	other_product(&session);
	step_begin();
}

static void warm_up(struct made *made)
{
	for (int i = 0; i < WARMUP; i++)
		step_call(made, &session);
}

/* The product right after a write, for which nothing waits. */
static void submit_and_print(struct made *made)
{
	step_submit(made, &session);
	step_print(made);
}

/* ---- scenes -------------------------------------------------------------------------------------
 */

/* Rows of the stored weight as `width` columns from `column` on, in the wider matrix. */
static void copy_columns(const void *from, int column, int width)
{
	const size_t size = sizeof(uint16_t), pitch = (size_t)x.lda * size;
	const CUDA_MEMCPY2D columns = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
	                               .srcDevice = pointer(from),
	                               .srcPitch = pitch,
	                               .dstMemoryType = CU_MEMORYTYPE_DEVICE,
	                               .dstDevice = pointer((const uint16_t *)x.da + column),
	                               .dstPitch = pitch,
	                               .WidthInBytes = (size_t)width * size,
	                               .Height = x.size_a / (size_t)x.lda};
	must((int)cuMemcpy2DAsync(&columns, (CUstream)session.stream), "copy of columns");
}

/* `view SHAPE`: columns beside the weight are written, then those of the weight, then all. */
static int scene_view(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	struct product shape = shapes[atoi(argv[0])];
	shape.shift_a = BESIDE;
	shape.pad_a = BESIDE;
	open_with(&shape);
	const int width = x.lda - BESIDE;
	warm_up(&x);
	void *ones;
	must((int)cudaMalloc(&ones, x.size_a * sizeof(uint16_t)), "malloc");
	must((int)cudaMemset(ones, 0x3f, x.size_a * sizeof(uint16_t)), "memset");
	product_poison(&x);
	copy_columns(ones, -BESIDE, BESIDE);
	submit_and_print(&x);
	for (int i = 0; i < 3; i++)
		step_call(&x, &session);
	product_poison(&x);
	copy_columns(new_weight(&x), 0, width);
	submit_and_print(&x);
	for (int i = 0; i < 3; i++)
		step_call(&x, &session);
	product_poison(&x);
	copy(x.da, new_weight(&x), x.size_a * sizeof(uint16_t));
	submit_and_print(&x);
	return 0;
}

/* `neighbours SHAPE`: one is written, then the other, then both at once. */
static int scene_neighbours(int argc, char **argv)
{
	struct made y;
	if (argc != 1)
		return 2;
	open_with(&shapes[atoi(argv[0])]);
	product_make(&y, &x.p, 2);
	void *both, *source;
	must((int)cudaMalloc(&both, 2 * BYTES), "malloc");
	must((int)cudaMalloc(&source, 2 * BYTES), "malloc");
	copy(both, x.da, BYTES);
	copy((char *)both + BYTES, y.da, BYTES);
	x.da = both;
	y.da = (char *)both + BYTES;
	struct made *const each[] = {&x, &y};
	for (int i = 0; i < 2; i++)
		warm_up(each[i]);
	for (int written = 0; written < 2; written++) {
		product_poison(&x);
		product_poison(&y);
		copy(each[written]->da, new_weight(each[written]), BYTES);
		submit_and_print(&x);
		submit_and_print(&y);
		for (int i = 0; i < 2; i++)
			warm_up(each[i]);
	}
	copy(source, new_weight(&x), BYTES);
	copy((char *)source + BYTES, new_weight(&y), BYTES);
	product_poison(&x);
	product_poison(&y);
	copy(both, source, 2 * BYTES);
	submit_and_print(&x);
	submit_and_print(&y);
	return 0;
}

/* `fewer SHAPE`: an allocator of the program's gives half of the memory to a weight with half of
 * the rows; then all of it to the first shape again. */
static int scene_fewer(int argc, char **argv)
{
	struct made y;
	if (argc != 1)
		return 2;
	open_with(&shapes[atoi(argv[0])]);
	struct product half = x.p;
	*(half.ta == CUBLAS_OP_T ? &half.m : &half.k) /= 2;
	product_make(&y, &half, 2);
	warm_up(&x);
	product_poison(&y);
	copy(x.da, y.da, BYTES / 2);
	y.da = x.da;
	submit_and_print(&y);
	warm_up(&y);
	product_poison(&x);
	copy(x.da, new_weight(&x), BYTES);
	submit_and_print(&x);
	product_poison(&y);
	copy(y.da, new_weight(&y), BYTES / 2);
	submit_and_print(&y);
	return 0;
}

const struct scene scenes[] = {
        {"view", scene_view},
        {"neighbours", scene_neighbours},
        {"fewer", scene_fewer},
        {NULL, NULL},
};

/* ---- tests --------------------------------------------------------------------------------------
 */

static struct outcome outcome;

/* Test i is of kind i % KINDS at level i / KINDS. */
static const struct kind *run(int i, const char *scene)
{
	const struct kind *kind = &kinds[i % KINDS];
	run_kind(&outcome, kind, levels[i / KINDS], "", scene, NULL, 1 + i % 5);
	return kind;
}

static void expect_all_right(const struct kind *kind, const char *what, int from, int to)
{
	ck_assert_int_eq(steps(&outcome), to);
	for (int i = from; i < to; i++)
		expect_right(&outcome, kind, what, i);
}

START_TEST(columns_of_a_wider_matrix_are_kept_and_never_stale)
{
	const struct kind *kind = run(_i, "view");
	expect_kept(&outcome, kind, "view", WARMUP - 1);
	expect_kept(&outcome, kind, "beside it", WARMUP);
	expect_all_right(kind, "view", WARMUP, WARMUP + 9);
	expect_kept(&outcome, kind, "written", WARMUP + 4);
}
END_TEST

/* What writes one leaves the other's copy what it is. */
START_TEST(neighbours_in_an_allocation_are_each_followed)
{
	const struct kind *kind = run(_i, "neighbours");
	const int round = 2 + 2 * WARMUP;
	expect_all_right(kind, "neighbours", 0, 2 * WARMUP + 2 * round + 2);
	expect_kept(&outcome, kind, "first", WARMUP - 1);
	expect_kept(&outcome, kind, "second", 2 * WARMUP - 1);
	for (int i = 0; i < 3; i++)
		for (int j = 0; j < 2; j++)
			expect_kept(&outcome, kind, i < 2 ? "one written" : "both written",
			            2 * WARMUP + i * round + j);
}
END_TEST

START_TEST(an_address_with_fewer_rows_is_another_weight)
{
	const struct kind *kind = run(_i, "fewer");
	expect_kept(&outcome, kind, "before", WARMUP - 1);
	ck_assert_int_eq(step_at(&outcome, WARMUP).uses[kind->form], 0);
	expect_kept(&outcome, kind, "fewer rows", 2 * WARMUP);
	expect_all_right(kind, "fewer", WARMUP, 2 * WARMUP + 3);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("kept weights, places");
	TCase *tcase = tcase_create("places");
	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, columns_of_a_wider_matrix_are_kept_and_never_stale, 0,
	                    2 * KINDS);
	tcase_add_loop_test(tcase, neighbours_in_an_allocation_are_each_followed, 0, 2 * KINDS);
	tcase_add_loop_test(tcase, an_address_with_fewer_rows_is_another_weight, 0, 2 * KINDS);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
