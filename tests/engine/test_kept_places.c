/* Kept copies of weights that are no allocation of their own: columns of a wider matrix, neighbours
 * in one allocation, and an address that had another weight before. */
#include "kept.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BESIDE 64 /* columns of the wider matrix on either side of the weight */

/* A few rows, none of which the next products compare with the copy. */
#define FIRST 72
#define ROWS  8

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

/* Other numbers for rows of the weight of `made`, as they lie in memory, in memory of their own;
 * its host values are these. */
static uint16_t *new_rows(struct made *made, size_t first, size_t rows)
{
	static uint64_t seed = 100;
	const size_t from = first * (size_t)made->lda;
	struct made other;
	product_make(&other, &made->p, ++seed);
	for (size_t i = from; i < made->size_a && i < from + rows * (size_t)made->lda; i++)
		made->a[i] = other.a[i];
	return (uint16_t *)other.da + from;
}

static void *new_weight(struct made *made)
{
	return new_rows(made, 0, OUT);
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

/* Of these rows, `width` columns from `column` of the weight on, as they are at `from`. */
static void copy_columns(const uint16_t *from, int column, int width, size_t first, size_t rows)
{
	const size_t size = sizeof(uint16_t), pitch = (size_t)x.lda * size;
	const CUDA_MEMCPY2D columns = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
	                               .srcDevice = pointer(from),
	                               .srcPitch = pitch,
	                               .dstY = first,
	                               .dstMemoryType = CU_MEMORYTYPE_DEVICE,
	                               .dstDevice = pointer((const uint16_t *)x.da + column),
	                               .dstPitch = pitch,
	                               .WidthInBytes = (size_t)width * size,
	                               .Height = rows};
	must((int)cuMemcpy2DAsync(&columns, (CUstream)session.stream), "copy of columns");
}

/* `view SHAPE`: columns beside the weight are written, then a few rows of the weight, then all. */
static int scene_view(int argc, char **argv)
{
	if (argc != 1)
		return 2;
	struct product shape = shapes[atoi(argv[0])];
	shape.shift_a = BESIDE;
	shape.pad_a = BESIDE;
	open_with(&shape);
	warm_up(&x);
	uint16_t *ones;
	must((int)cudaMalloc((void **)&ones, x.size_a * sizeof *ones), "malloc");
	must((int)cudaMemset(ones, 0x3f, x.size_a * sizeof *ones), "memset");
	product_poison(&x);
	copy_columns(ones, -BESIDE, BESIDE, 0, OUT);
	submit_and_print(&x);
	for (int i = 0; i < 3; i++)
		step_call(&x, &session);
	product_poison(&x);
	copy_columns(new_rows(&x, FIRST, ROWS), 0, IN, FIRST, ROWS);
	submit_and_print(&x);
	for (int i = 0; i < 3; i++)
		step_call(&x, &session);
	product_poison(&x);
	copy(x.da, new_weight(&x), x.size_a * sizeof *ones);
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
		copy((uint16_t *)each[written]->da + (size_t)FIRST * IN,
		     new_rows(each[written], FIRST, ROWS), ROWS * IN * sizeof(uint16_t));
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

/* ---- mapped memory ---- */

#define PIECES 2 /* that a weight lies in */
#define PIECE  (BYTES / PIECES)

/* Between two rows of a weight of such a pitch lies a whole piece of HOLE bytes. */
#define HOLE  (BYTES / 4)
#define PITCH (2 * HOLE)

static const CUmemLocation device = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};

/* New memory, mapped there. */
static CUmemGenericAllocationHandle new_piece(CUdeviceptr to, size_t bytes)
{
	const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
	                                        .location = device};
	CUmemGenericAllocationHandle handle;
	must((int)cuMemCreate(&handle, bytes, &properties, 0), "create");
	must((int)cuMemMap(to, bytes, 0, handle, 0), "map");
	return handle;
}

static void allow(CUdeviceptr to, size_t bytes)
{
	const CUmemAccessDesc access = {.location = device,
	                                .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	must((int)cuMemSetAccess(to, bytes, &access, 1), "access");
}

/* `mapped SHAPE`: the weight lies in pieces amid reserved addresses. It is written; then its last
 * piece is exchanged for one that has other numbers already; then the weight is written again. */
static int scene_mapped(int argc, char **argv)
{
	CUdeviceptr range;
	if (argc != 1)
		return 2;
	open_with(&shapes[atoi(argv[0])]);
	must((int)cuMemAddressReserve(&range, 4 * BYTES, 0, 0, 0), "reserve");
	const CUdeviceptr weight = range + BYTES, last = weight + BYTES - PIECE;
	const CUdeviceptr elsewhere = range + 3 * BYTES;
	for (CUdeviceptr piece = weight; piece <= last; piece += PIECE) {
		new_piece(piece, PIECE);
		allow(piece, PIECE);
	}
	copy((void *)(uintptr_t)weight, x.da, BYTES);
	x.da = (void *)(uintptr_t)weight;
	warm_up(&x);
	product_poison(&x);
	copy(x.da, new_weight(&x), BYTES);
	submit_and_print(&x);
	warm_up(&x);
	const CUmemGenericAllocationHandle piece = new_piece(elsewhere, PIECE);
	allow(elsewhere, PIECE);
	double *const old = malloc(x.size_a * sizeof *old);
	memcpy(old, x.a, x.size_a * sizeof *old);
	copy((void *)(uintptr_t)elsewhere, (char *)new_weight(&x) + BYTES - PIECE, PIECE);
	memcpy(x.a, old, (x.size_a - PIECE / 2) * sizeof *old);
	product_poison(&x);
	must((int)cuMemUnmap(elsewhere, PIECE), "unmap");
	must((int)cuMemUnmap(last, PIECE), "unmap");
	must((int)cuMemMap(last, PIECE, 0, piece, 0), "map");
	allow(last, PIECE);
	submit_and_print(&x);
	for (int i = 0; i < 2; i++)
		warm_up(&x);
	product_poison(&x);
	copy(x.da, new_weight(&x), BYTES);
	submit_and_print(&x);
	return 0;
}

/* `hole SHAPE`: memory amid the weight that holds nothing of it is unmapped. */
static int scene_hole(int argc, char **argv)
{
	CUdeviceptr weight;
	if (argc != 1)
		return 2;
	struct product shape = shapes[atoi(argv[0])];
	shape.pad_a = PITCH / sizeof(uint16_t) - IN;
	open_with(&shape);
	must((int)cuMemAddressReserve(&weight, OUT * PITCH, 0, 0, 0), "reserve");
	new_piece(weight, HOLE);
	new_piece(weight + HOLE, HOLE);
	new_piece(weight + PITCH, (OUT - 1) * PITCH);
	allow(weight, OUT * PITCH);
	copy((void *)(uintptr_t)weight, x.da, x.size_a * sizeof(uint16_t));
	x.da = (void *)(uintptr_t)weight;
	warm_up(&x);
	product_poison(&x);
	must((int)cuMemUnmap(weight + HOLE, HOLE), "unmap");
	submit_and_print(&x);
	for (int i = 0; i < 2; i++)
		warm_up(&x);
	return 0;
}

const struct scene scenes[] = {
        {"view", scene_view},   {"mapped", scene_mapped},
        {"hole", scene_hole},   {"neighbours", scene_neighbours},
        {"fewer", scene_fewer}, {NULL, NULL},
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

/* What was mapped there is gone, whoever wrote what is there now. */
START_TEST(mapped_memory_is_followed_piece_by_piece)
{
	const struct kind *kind = run(_i, "mapped");
	const int exchanged = 2 * WARMUP + 1;
	expect_kept(&outcome, kind, "mapped", WARMUP - 1);
	expect_kept(&outcome, kind, "written", WARMUP);
	expect_kept(&outcome, kind, "before the exchange", exchanged - 1);
	expect_all_right(kind, "mapped", WARMUP, exchanged + 2 * WARMUP + 2);
	if (_i >= KINDS) /* for the verified one it is the same copy, which changes too often */
		return;
	ck_assert_int_eq(step_at(&outcome, exchanged).uses[kind->form], 0);
	expect_kept(&outcome, kind, "again", exchanged + 2 * WARMUP);
}
END_TEST

/* The weight is all there, and unchanged; its copy is trusted no more. */
START_TEST(an_unmapping_amid_a_weight_ends_its_copy)
{
	const struct kind *kind = run(_i, "hole");
	expect_kept(&outcome, kind, "before", WARMUP - 1);
	ck_assert_int_eq(step_at(&outcome, WARMUP).uses[kind->form], 0);
	expect_all_right(kind, "hole", WARMUP, 3 * WARMUP + 1);
	expect_kept(&outcome, kind, "again", 3 * WARMUP);
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
	tcase_add_loop_test(tcase, mapped_memory_is_followed_piece_by_piece, 0, 2 * KINDS);
	tcase_add_loop_test(tcase, an_unmapping_amid_a_weight_ends_its_copy, 0, KINDS);
	suite_add_tcase(suite, tcase);
	return engine_main(argc, argv, suite);
}
