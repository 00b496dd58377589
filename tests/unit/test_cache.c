/* Kept copies: when a matrix is admitted, and that a product never sees a copy of contents that are
 * no longer there, at each level, by each way of writing, in streams, threads and graphs.
 *
 * Runs on the emulation, in this process: device memory is host memory, and what was submitted runs
 * only when something waits for it, in any order that streams and events allow. A product here is a
 * kernel that puts what a copy stands for where the test finds it later; beside it is noted what
 * the weight was meant to be at that place of its stream. Two forms: the library's own fp8, and an
 * exact one with a descriptor, whose product goes to the source where the copy is not valid.
 */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "intercept/intercept.h"
#include "intercept/launch.h"
#include "kernels/sample.h"
#include "note/note.h"
#include "operand/cache.h"
#include "operand/kept.h"
#include "operand/track.h"
#include "tests/oracle/oracle.h"
#include "tests/support/suite.h"

#define ROWS     24
#define COLS     40
#define ELEMENTS (ROWS * COLS)
#define LEAST_DB 25.0 /* e4m3 of normal numbers gives 31 */

#define ck_cuda(call) ck_assert_int_eq((int)(call), 0)

/* ---- the emulation -------------------------------------------------------------------------- */

#define API(X)                                                                                     \
	X(cuInit)                                                                                  \
	X(cuCtxCreate_v4)                                                                          \
	X(cuCtxDestroy_v2)                                                                         \
	X(cuCtxSetCurrent)                                                                         \
	X(cuCtxSynchronize)                                                                        \
	X(cuDevicePrimaryCtxRetain)                                                                \
	X(cuDevicePrimaryCtxReset_v2)                                                              \
	X(cuEventCreate)                                                                           \
	X(cuEventRecord)                                                                           \
	X(cuGraphDestroy)                                                                          \
	X(cuGraphExecDestroy)                                                                      \
	X(cuGraphInstantiateWithFlags)                                                             \
	X(cuGraphLaunch)                                                                           \
	X(cuLaunchKernel)                                                                          \
	X(cuMemAlloc_v2)                                                                           \
	X(cuMemFree_v2)                                                                            \
	X(cuModuleGetFunction)                                                                     \
	X(cuModuleLoadData)                                                                        \
	X(cuStreamBeginCapture_v2)                                                                 \
	X(cuStreamCreate)                                                                          \
	X(cuStreamDestroy_v2)                                                                      \
	X(cuStreamEndCapture)                                                                      \
	X(cuStreamSynchronize)                                                                     \
	X(cuStreamWaitEvent)

static struct {
#define MEMBER(function) __typeof__(function) *function;
	API(MEMBER)
#undef MEMBER
	void (*set)(const char *, long);
	long (*get)(const char *);
	CUfunction (*enlist)(const struct qs_oracle_kernel *);
	CUfunction copy, make, product; /* kernels */
} cu;

static struct qs_context *context;
static struct qs_options options;
static CUstream stream;

static void *find(void *library, const char *name)
{
	void *found = dlsym(library, name);
	ck_assert_msg(found != NULL, "%s", dlerror());
	return found;
}

static void load(void)
{
	const char *build = getenv("QS_TEST_BUILD");
	char path[1024];
	snprintf(path, sizeof path, "%s/softcuda/libcuda.so.1", build ? build : "build");
	void *library = dlopen(path, RTLD_NOW);
	ck_assert_msg(library != NULL, "%s", dlerror());
#define FIND(function) cu.function = (__typeof__(cu.function))find(library, #function);
	API(FIND)
#undef FIND
	cu.set = (void (*)(const char *, long))find(library, "softcuda_set");
	cu.get = (long (*)(const char *))find(library, "softcuda_get");
	cu.enlist =
	        (CUfunction(*)(const struct qs_oracle_kernel *))find(library, "softcuda_register");
}

/* Lets the library see what it takes for evidence that it sees all: a launch function that was
 * looked up, and a launch by it inside a hooked call. */
static void become_trusted(void)
{
	uint64_t memory, bytes = 4;
	ck_cuda(cu.cuMemAlloc_v2((CUdeviceptr *)&memory, 8));
	uint64_t from = memory + 4;
	void *params[] = {&memory, &from, &bytes};
	__typeof__(cuLaunchKernel) *launch = (__typeof__(cuLaunchKernel) *)qs_submission_wrapper(
	        "cuLaunchKernel", (void *)cu.cuLaunchKernel, NULL);
	ck_assert(qs_begin());
	ck_cuda(launch(cu.copy, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL));
	qs_end();
	ck_assert(qs_epoch_trusted());
}

/* ---- the exact form ------------------------------------------------------------------------- */

/* Descriptor: 0, 1 = pointer of the data, VALID, FAILED, TOUCHED = never to be zeroed. */
enum {
	VALID = 4,
	FAILED = 5,
	TOUCHED = 6
};

struct toy {
	uint64_t descriptor, source, data, stale; /* graphs look for the first word */
	int64_t rows, cols, ld;
};

static void toy_make(void *const *params, unsigned grid, unsigned block)
{
	const struct toy *toy = params[0];
	(void)grid, (void)block;
	if (!*(const uint32_t *)(uintptr_t)toy->stale)
		return;
	if (((const uint32_t *)(uintptr_t)toy->descriptor)[VALID])
		abort(); /* a product of another stream could read what is half made */
	for (int64_t r = 0; r < toy->rows; r++)
		memcpy((uint16_t *)(uintptr_t)toy->data + r * toy->cols,
		       (const uint16_t *)(uintptr_t)toy->source + r * toy->ld,
		       (size_t)toy->cols * 2);
}

struct toy_product {
	struct toy toy;
	uint64_t target;
};

/* Element [-1] of the target tells where the numbers came from. */
static void toy_product(void *const *params, unsigned grid, unsigned block)
{
	const struct toy_product *p = params[0];
	const uint32_t *descriptor = (const uint32_t *)(uintptr_t)p->toy.descriptor;
	float *target = (float *)(uintptr_t)p->target;
	const bool valid = descriptor[VALID];
	uint64_t data;
	(void)grid, (void)block;
	memcpy(&data, descriptor, sizeof data);
	target[0] = valid ? 1 : 2;
	for (int64_t i = 0; i < p->toy.rows * p->toy.cols; i++) {
		const int64_t at = i / p->toy.cols * p->toy.ld + i % p->toy.cols;
		target[1 + i] = qs_oracle_bf16_to_float(
		        valid ? ((const uint16_t *)(uintptr_t)data)[i]
		              : ((const uint16_t *)(uintptr_t)p->toy.source)[at]);
	}
}

static const struct qs_oracle_kernel toy_kernels[] = {
        {"toy_make", toy_make, {sizeof(struct toy)}},
        {"toy_product", toy_product, {sizeof(struct toy_product)}},
};

static bool toy_size(const struct qs_matrix *source, struct qs_form_size *size)
{
	*size = (struct qs_form_size){(size_t)(source->rows * source->cols) * 2, 0};
	return source->cols % 8 == 0;
}

static struct toy toy_of(const struct qs_matrix *source, CUdeviceptr data, CUdeviceptr descriptor,
                         CUdeviceptr stale)
{
	return (struct toy){
	        descriptor, (uintptr_t)source->data, data, stale, source->rows, source->cols,
	        source->ld};
}

static CUresult launch(CUfunction function, CUstream in, void *argument)
{
	void *params[] = {argument};
	return cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, in, params, NULL);
}

static CUresult toy_form_make(const struct qs_context *c, CUstream in, const struct qs_making *m)
{
	struct toy toy = toy_of(&m->source, m->data, m->descriptor,
	                        m->work + offsetof(struct qs_hash_work, stale));
	(void)c;
	return launch(cu.make, in, &toy);
}

static void toy_describe(const struct qs_making *making, uint32_t image[QS_HASH_IMAGE])
{
	memcpy(image, &making->data, sizeof making->data);
	image[TOUCHED] = 7;
}

static const struct qs_form toy_form = {
        .kind = QS_FORM_NF4,
        .size = toy_size,
        .make = toy_form_make,
        .describe = toy_describe,
        .valid = VALID,
        .failed = FAILED,
        .reset = 1u << FAILED,
        .finite = true,
};

/* Zeroed memory that is never given back: each test is a process. A leak checker still sees what
 * the library loses. */
static void *forget(size_t bytes)
{
	static _Atomic(void **) last;
	void **memory = calloc(1, sizeof *memory + bytes);
	ck_assert_ptr_nonnull(memory);
	*memory = atomic_exchange(&last, memory);
	return memory + 1;
}

/* ---- weights and products ------------------------------------------------------------------- */

static uint64_t state = 1;

static double uniform(void)
{
	state = state * 6364136223846793005u + 1442695040888963407u;
	return (double)(state >> 11) * 0x1p-53;
}

/* A weight, and what it is meant to be once all that was submitted so far has run. */
struct weight {
	struct qs_matrix matrix;
	size_t elements; /* from the first to the last */
	uint16_t now[4 * ELEMENTS];
};

static struct weight *weight_at(CUdeviceptr at, int64_t rows, int64_t cols, int64_t ld)
{
	struct weight *w = forget(sizeof *w);
	w->matrix = (struct qs_matrix){(const void *)(uintptr_t)at, rows, cols, ld};
	w->elements = (size_t)((rows - 1) * ld + cols);
	ck_assert_uint_le(w->elements, 4 * ELEMENTS);
	return w;
}

static CUdeviceptr allocate(size_t bytes)
{
	CUdeviceptr memory = 0;
	ck_cuda(cu.cuMemAlloc_v2(&memory, bytes));
	return memory;
}

static void copy_in(CUstream in, CUdeviceptr to, CUdeviceptr from, uint64_t bytes)
{
	void *params[] = {&to, &from, &bytes};
	ck_cuda(cu.cuLaunchKernel(cu.copy, 1, 1, 1, 32, 1, 1, 0, in, params, NULL));
}

static CUdeviceptr address(const struct weight *w)
{
	return (CUdeviceptr)(uintptr_t)w->matrix.data;
}

/* Submits the writing of `now`, from memory of its own; tells nobody. */
static void submit_write(struct weight *w, CUstream in)
{
	CUdeviceptr from = allocate(w->elements * 2);
	memcpy((void *)(uintptr_t)from, w->now, w->elements * 2);
	copy_in(in, address(w), from, w->elements * 2);
}

static void draw(struct weight *w)
{
	for (size_t i = 0; i < w->elements; i++)
		w->now[i] = qs_oracle_float_to_bf16(
		        (float)(sqrt(-2 * log(1 - uniform())) * cos(6.2831853 * uniform())));
}

static void report(const struct weight *w)
{
	qs_track_write(w->matrix.data, w->elements * 2);
}

/* New contents, in this stream, as the hooks would tell it. */
static void rewrite_in(struct weight *w, CUstream in)
{
	draw(w);
	submit_write(w, in);
	report(w);
}

static void rewrite(struct weight *w)
{
	rewrite_in(w, stream);
}

static struct weight *weight_new(void)
{
	struct weight *w = weight_at(allocate(ELEMENTS * 2), ROWS, COLS, COLS);
	rewrite(w);
	ck_cuda(cu.cuCtxSynchronize());
	return w;
}

/* A product that was submitted, and what it must have come to. */
struct result {
	bool exact;
	int64_t rows, cols, ld;
	CUdeviceptr data, scale; /* of the fp8 form, copied in the stream                  */
	CUdeviceptr target;      /* of the exact form                                      */
	uint16_t meant[4 * ELEMENTS];
};

#define RESULTS 4096
static struct result *results[RESULTS];
static _Atomic int result_count;

static __thread enum qs_reason why; /* of the last use that found no copy, else QS_REASON_AUTO */

static struct result *note_result(const struct weight *w)
{
	struct result *r = forget(sizeof *r);
	r->rows = w->matrix.rows;
	r->cols = w->matrix.cols;
	r->ld = w->matrix.ld;
	memcpy(r->meant, w->now, sizeof r->meant);
	results[atomic_fetch_add(&result_count, 1)] = r;
	return r;
}

static void product(struct result *r, const struct weight *w, const struct qs_form *form,
                    const struct qs_kept_view *view, CUstream in)
{
	const size_t bytes = (size_t)(w->matrix.rows * ((w->matrix.cols + 15) / 16 * 16));
	r->exact = form == &toy_form;
	if (r->exact) {
		struct toy_product p = {toy_of(&w->matrix, view->data, view->descriptor, 0),
		                        r->target};
		ck_cuda(launch(cu.product, in, &p));
		return;
	}
	copy_in(in, r->data, view->data, bytes);
	copy_in(in, r->scale, view->scale, sizeof(float));
}

/* One use by find, use and used; true if it had a copy. `work` and `r` as if by the engine. */
static bool use_with(struct weight *w, const struct qs_form *form, CUstream in, CUdeviceptr work,
                     struct result *r)
{
	struct qs_stream described;
	struct qs_kept_view view;
	enum qs_reason reason;
	ck_assert(qs_stream_describe(in, &described));
	struct qs_kept *kept =
	        qs_kept_find(context, &described, &w->matrix, form, &options, &reason);
	why = kept ? QS_REASON_AUTO : reason;
	if (!kept)
		return false;
	CUresult error = qs_kept_use(kept, &described, work, &view);
	if (!error)
		product(r, w, form, &view, in);
	qs_kept_used(kept);
	why = error ? QS_REASON_ERROR : QS_REASON_AUTO;
	return !error;
}

static bool use_in(struct weight *w, const struct qs_form *form, CUstream in)
{
	struct result *r = forget(sizeof *r);
	r->data = allocate(2 * ELEMENTS * 4);
	r->scale = allocate(sizeof(float));
	r->target = allocate((ELEMENTS * 4 + 1) * sizeof(float));
	const bool used = use_with(w, form, in, allocate(QS_KEPT_WORK), r);
	if (used) {
		struct result *noted = note_result(w);
		noted->exact = r->exact;
		noted->data = r->data;
		noted->scale = r->scale;
		noted->target = r->target;
	}
	return used;
}

static bool use(struct weight *w)
{
	return use_in(w, &qs_form_fp8, stream);
}

static bool use_exact(struct weight *w)
{
	return use_in(w, &toy_form, stream);
}

/* A use that is known to find no copy, where nothing may be allocated. */
static void use_in_vain(struct weight *w)
{
	ck_assert(!use_with(w, &qs_form_fp8, stream, 0, NULL));
	ck_assert_int_eq(why, QS_REASON_CAPTURE_COLD);
}

static double value_of(const struct result *r, int64_t row, int64_t col)
{
	const int64_t width = (r->cols + 15) / 16 * 16;
	if (r->exact)
		return (double)((const float *)(uintptr_t)r->target)[1 + row * r->cols + col];
	return (double)*(const float *)(uintptr_t)r->scale *
	       (double)qs_oracle_e4m3_to_float(
	               ((const uint8_t *)(uintptr_t)r->data)[row * width + col]);
}

/* The product with a vector of ones and minus ones, in fp64, against the weight as it was meant. */
static double decibels(const struct result *r)
{
	double signal = 0, noise = 0;
	for (int64_t row = 0; row < r->rows; row++)
		for (int64_t col = 0; col < r->cols; col++) {
			const double meant =
			        (double)qs_oracle_bf16_to_float(r->meant[row * r->ld + col]);
			const double got = value_of(r, row, col);
			if (isnan(meant) && isnan(got))
				continue;
			signal += meant * meant;
			noise += (got - meant) * (got - meant);
		}
	return noise > 0 ? 10 * log10(signal / noise) : 1000;
}

static void synchronise(void)
{
	ck_cuda(cu.cuCtxSynchronize());
}

/* Nothing that was submitted so far saw old contents. */
static void nothing_stale(void)
{
	synchronise();
	for (int i = 0; i < result_count; i++) {
		const double db = decibels(results[i]);
		ck_assert_msg(db >= LEAST_DB, "product %d of %d: %.1f dB", i, result_count, db);
	}
	result_count = 0;
}

/* Whether the last product took its numbers from the copy. */
static bool from_copy(void)
{
	const struct result *last = results[result_count - 1];
	return *(const float *)(uintptr_t)last->target == 1;
}

static long hashes(void)
{
	return cu.get("kernel:qs_hash");
}

static size_t kept_bytes(void)
{
	size_t bytes = 0;
	for (int i = 0; i < QS_KEPT_FORMS; i++)
		bytes += qs_counter_header()->kept_bytes[i];
	return bytes;
}

static void begin(enum qs_validity validity)
{
	CUcontext handle;
	CUmodule module;
	enum qs_reason reason;
	load();
	ck_cuda(cu.cuInit(0));
	ck_cuda(cu.cuDevicePrimaryCtxRetain(&handle, 0));
	ck_cuda(cu.cuCtxSetCurrent(handle));
	ck_cuda(cu.cuModuleLoadData(&module, "image"));
	ck_cuda(cu.cuModuleGetFunction(&cu.copy, module, "softcuda_copy"));
	cu.make = cu.enlist(&toy_kernels[0]);
	cu.product = cu.enlist(&toy_kernels[1]);
	qs_track_own_function(cu.product, offsetof(struct toy_product, target));
	qs_options_default(&options);
	qs_note_start(&options);
	options.validity = validity;
	options.check_every = 0;
	context = qs_context_current(&options, true, &reason);
	ck_assert_ptr_nonnull(context);
	ck_assert_int_eq(context->reason, QS_REASON_AUTO);
	ck_cuda(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	if (validity == QS_VALIDITY_TRACKED)
		become_trusted();
}

/* Until it is admitted; the copy is then made and known to be. */
static struct weight *weight_kept(bool (*one_use)(struct weight *))
{
	struct weight *w = weight_new();
	for (int i = 0; i < 3 + 3; i++) {
		one_use(w);
		synchronise();
	}
	ck_assert(one_use(w));
	synchronise();
	return w;
}

/* ---- admission ------------------------------------------------------------------------------ */

START_TEST(the_third_use_of_unchanged_contents_has_a_copy)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_new();
	ck_assert(!use(w));
	ck_assert_int_eq(why, QS_REASON_CHANGING);
	synchronise();
	ck_assert(!use(w));
	synchronise();
	ck_assert(use(w));
	ck_assert(use(w));
	nothing_stale();
}
END_TEST

START_TEST(contents_that_change_at_the_third_use_are_not_kept)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_new();
	for (int i = 0; i < 2; i++) {
		ck_assert(!use(w));
		synchronise();
	}
	rewrite(w);
	ck_assert(use(w)); /* made of what is there, so right, but not worth it */
	synchronise();
	ck_assert(!use(w));
	ck_assert_int_eq(why, QS_REASON_CHANGING);
	ck_assert_uint_eq(kept_bytes(), 0);
	nothing_stale();
}
END_TEST

START_TEST(nobody_waits_for_a_hash)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_new();
	cu.set("counters", 0);
	for (int i = 0; i < 50; i++)
		ck_assert(!use(w));
	ck_assert_int_eq(hashes(), 1); /* submitted; the device has not run it */
	ck_assert_int_eq(cu.get("syncs"), 0);
	synchronise();
	ck_assert(!use(w));
	synchronise();
	ck_assert(use(w));
	nothing_stale();
}
END_TEST

START_TEST(contents_that_change_are_hashed_ever_more_rarely)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_new();
	cu.set("counters", 0);
	for (int i = 0; i < 400; i++) {
		ck_assert(!use(w));
		rewrite(w);
		synchronise();
	}
	ck_assert_int_le(hashes(), 9);
	ck_assert_int_ge(hashes(), 6);
	ck_assert_uint_eq(kept_bytes(), 0);
}
END_TEST

/* A program that dequantises `count` layers in turn into one buffer. */
START_TEST(a_buffer_for_many_contents_in_turn_is_never_admitted)
{
	static uint16_t layers[48][ELEMENTS];
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_new();
	for (int i = 0; i < 48; i++) {
		draw(w);
		memcpy(layers[i], w->now, sizeof layers[i]);
	}
	for (int i = 0; i < 1000; i++) {
		memcpy(w->now, layers[i % _i], sizeof layers[0]);
		submit_write(w, stream);
		ck_assert(!use(w));
		synchronise();
	}
}
END_TEST

/* fwd and dgrad see the same weight, then an optimizer's step changes it. */
START_TEST(the_weights_of_a_trainer_are_given_up)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_new();
	cu.set("counters", 0);
	int used = 0;
	for (int step = 0; step < 400; step++) {
		for (int i = 0; i < 2; i++) {
			used += use(w);
			synchronise();
		}
		rewrite(w);
	}
	nothing_stale();
	ck_assert_int_le(used, 8);
	ck_assert_int_le(hashes(), 24);
	ck_assert_uint_eq(kept_bytes(), 0);
}
END_TEST

START_TEST(a_trainer_that_accumulates_for_long_keeps_its_weights)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_new();
	int used = 0;
	for (int step = 0; step < 20; step++) {
		for (int i = 0; i < 64; i++) {
			used += use(w);
			synchronise();
		}
		rewrite(w);
	}
	nothing_stale();
	ck_assert_int_ge(used, 20 * 64 - 8);
}
END_TEST

START_TEST(another_shape_at_the_same_address_is_another_matrix)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_kept(use);
	struct weight *v = weight_at(address(w), COLS, ROWS, ROWS);
	struct weight *view = weight_at(address(w) + 16, ROWS - 1, COLS - 8, COLS);
	memcpy(v->now, w->now, sizeof v->now);
	memcpy(view->now, w->now + 8, view->elements * 2);
	ck_assert(!use(v));
	ck_assert(!use(view));
	for (int i = 0; i < 2; i++) {
		synchronise();
		use(v);
		use(view);
	}
	ck_assert(use(v) && use(view) && use(w));
	nothing_stale();
	draw(w);
	submit_write(w, stream);
	memcpy(v->now, w->now, sizeof v->now);
	memcpy(view->now, w->now + 8, view->elements * 2);
	ck_assert(use(v) && use(view) && use(w));
	nothing_stale();
}
END_TEST

START_TEST(what_the_form_cannot_hold_is_not_tried)
{
	begin(QS_VALIDITY_FROZEN);
	struct weight *w = weight_at(allocate(ELEMENTS * 2), 4, 5, 5);
	rewrite(w);
	ck_assert(!use_exact(w));
	ck_assert_int_eq(why, QS_REASON_UNAVAILABLE);
	ck_assert(use(w));
	nothing_stale();
}
END_TEST

START_TEST(the_policy_may_forbid_copies)
{
	begin(QS_VALIDITY_ADJACENT);
	struct weight *w = weight_new();
	cu.set("counters", 0);
	for (int i = 0; i < 10; i++) {
		ck_assert(!use(w));
		ck_assert_int_eq(why, QS_REASON_UNTRACKED);
	}
	ck_assert_int_eq(cu.get("launches"), 0);
	ck_assert_int_eq(cu.get("allocations"), 40 / 10 * 10); /* of this test's own */
}
END_TEST

/* More addresses than the table holds, in turn: each has lost its place when it comes again. */
START_TEST(addresses_beyond_the_table_cost_no_hashes)
{
	begin(QS_VALIDITY_VERIFIED);
	struct qs_stream described;
	enum qs_reason reason;
	ck_assert(qs_stream_describe(stream, &described));
	CUdeviceptr memory = allocate(1 << 20);
	for (int round = 0; round < 3; round++) {
		cu.set("counters", 0);
		for (int i = 0; i < 4 * QS_CANDIDATES; i++) {
			struct qs_matrix m = {(const void *)(uintptr_t)(memory + 16 * (unsigned)i),
			                      1, 8, 8};
			qs_kept_find(context, &described, &m, &qs_form_fp8, &options, &reason);
			if (i % 64 == 0)
				synchronise();
		}
	}
	ck_assert_int_eq(hashes(), 0);
}
END_TEST

/* ---- numbers that have no copy -------------------------------------------------------------- */

START_TEST(not_a_number_keeps_a_form_that_needs_numbers_away)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_new();
	w->now[ELEMENTS - 1] = 0x7fc0;
	submit_write(w, stream);
	for (int i = 0; i < 5; i++) {
		ck_assert(!use_exact(w));
		synchronise();
	}
	ck_assert_int_eq(why, QS_REASON_NONFINITE);
	rewrite(w);
	int uses = 0;
	while (!use_exact(w) && ++uses < 200)
		synchronise();
	ck_assert_int_lt(uses, 200);
	nothing_stale();
}
END_TEST

START_TEST(an_infinity_that_comes_later_switches_the_copy_off)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_kept(use_exact);
	ck_assert(from_copy());
	nothing_stale();
	const uint16_t before = w->now[3];
	w->now[3] = 0x7f80;
	submit_write(w, stream);
	ck_assert(use_exact(w));
	synchronise();
	ck_assert(!from_copy());
	w->now[3] = before;
	ck_assert(!use_exact(w));
	ck_assert_int_eq(why, QS_REASON_NONFINITE);
	ck_assert_uint_eq(kept_bytes(), 0);
}
END_TEST

START_TEST(a_frozen_weight_with_an_infinity_is_used_from_its_source)
{
	begin(QS_VALIDITY_FROZEN);
	struct weight *w = weight_new();
	w->now[3] = 0x7f80;
	submit_write(w, stream);
	ck_assert(use_exact(w));
	synchronise();
	ck_assert(!from_copy());
	ck_assert(!use_exact(w));
	ck_assert_int_eq(why, QS_REASON_NONFINITE);
}
END_TEST

/* ---- verified ------------------------------------------------------------------------------- */

START_TEST(verified_sees_every_write)
{
	begin(QS_VALIDITY_VERIFIED);
	for (int form = 0; form < 2; form++) {
		bool (*one_use)(struct weight *) = form ? use_exact : use;
		struct weight *w = weight_kept(one_use);
		for (int i = 0; i < 40; i++) {
			if (i % 20 == 0) {
				draw(w);
				submit_write(w, stream);
			}
			ck_assert(one_use(w));
		}
		nothing_stale();
	}
}
END_TEST

START_TEST(one_bit_is_a_change)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 4; i++) {
		w->now[(int)(uniform() * ELEMENTS)] ^= 1;
		submit_write(w, stream);
		for (int j = 0; j < 20; j++)
			ck_assert(use_exact(w));
	}
	synchronise();
	for (int i = 0; i < result_count; i++)
		ck_assert_msg(decibels(results[i]) == 1000, "%d", i);
}
END_TEST

START_TEST(the_copy_of_an_unchanged_weight_is_left_alone)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_kept(use);
	struct qs_kept_view view;
	struct qs_stream described;
	ck_assert(qs_stream_describe(stream, &described));
	struct qs_kept *kept =
	        qs_kept_find(context, &described, &w->matrix, &qs_form_fp8, &options, &why);
	ck_cuda(qs_kept_use(kept, &described, allocate(QS_KEPT_WORK), &view));
	qs_kept_used(kept);
	synchronise();
	uint8_t *data = (uint8_t *)(uintptr_t)view.data;
	memset(data, 0x55, ROWS);
	ck_assert(use(w));
	synchronise();
	for (int i = 0; i < ROWS; i++)
		ck_assert_uint_eq(data[i], 0x55);
}
END_TEST

START_TEST(padding_is_no_part_of_a_weight)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_at(allocate(4 * ELEMENTS), ROWS, COLS, COLS + 6);
	rewrite(w);
	while (!use_exact(w))
		synchronise();
	synchronise();
	cu.set("counters", 0);
	for (int row = 0; row < ROWS - 1; row++)
		w->now[row * (COLS + 6) + COLS + row % 6] ^= 0x55;
	submit_write(w, stream);
	struct qs_kept *kept = context->cache->bucket[0];
	for (int i = 0; !kept; i++)
		kept = context->cache->bucket[i];
	ck_assert(use_exact(w));
	synchronise();
	ck_assert_uint_eq(kept->outcome->changes, 0);
	nothing_stale();
}
END_TEST

START_TEST(a_copy_that_never_lasts_is_dropped)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_kept(use);
	int used = 0;
	for (int i = 0; i < 40; i++) {
		rewrite(w);
		used += use(w);
		synchronise();
	}
	ck_assert_int_le(used, 6);
	ck_assert_int_eq(why, QS_REASON_CHANGING);
	ck_assert_uint_eq(kept_bytes(), 0);
	nothing_stale();
}
END_TEST

/* ---- tracked -------------------------------------------------------------------------------- */

/* Where the product compares for itself. */
START_TEST(a_clean_weight_costs_no_launch)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 3; i++)
		use_exact(w);
	cu.set("counters", 0);
	for (int i = 0; i < 10; i++)
		ck_assert(use_exact(w));
	ck_assert_int_eq(hashes(), 0);
	ck_assert_int_eq(cu.get("launches"), 0); /* but the products, which are not counted */
	nothing_stale();
}
END_TEST

static long samples(void)
{
	return cu.get("kernel:qs_fp8_sample");
}

START_TEST(a_clean_weight_is_compared_in_part_where_products_do_not)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use);
	for (int i = 0; i < 3; i++)
		use(w);
	cu.set("counters", 0);
	for (int i = 0; i < 10; i++)
		ck_assert(use(w));
	ck_assert_int_eq(hashes(), 0);
	ck_assert_int_eq(samples(), 10);
	ck_assert_int_eq(cu.get("launches"), 40); /* and two copies each, the product's */
	nothing_stale();
}
END_TEST

static struct qs_kept *only_copy(void)
{
	struct qs_kept *found = NULL;
	for (int i = 0; i < QS_CACHE_BUCKETS; i++)
		found = found ? found : context->cache->bucket[i];
	ck_assert_ptr_nonnull(found);
	return found;
}

/* So small a matrix has parts for three turns only: uses go on until the last of them is next, so
 * that the use after finds nothing by itself. */
static void until_last_turn(struct weight *w)
{
	const struct qs_hash_record *record =
	        (const struct qs_hash_record *)(uintptr_t)only_copy()->record;
	do {
		ck_assert(use(w));
		synchronise();
	} while (record->turn % QS_SAMPLE_TURNS != qs_sample_patches(ROWS, COLS) - 1);
}

/* The use that finds it is right, and so are those in other streams that come after it: they wait.
 */
START_TEST(a_sample_finds_what_tracking_missed)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use);
	CUstream other;
	ck_cuda(cu.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
	for (int seed = 1; seed <= 20; seed++) {
		until_last_turn(w);
		ck_assert(!context->cache->blind);
		cu.set("seed", seed);
		draw(w);
		submit_write(w, stream); /* nobody tells */
		synchronise();
		ck_assert(use(w));
		ck_assert(use_in(w, &qs_form_fp8, other));
		nothing_stale();
		cu.set("counters", 0);
		ck_assert(use(w)); /* the host learns of it, and has all verified from now on */
		ck_assert(context->cache->blind);
		ck_assert_int_eq(hashes(), 1);
		ck_assert_int_eq(samples(), 0);
		draw(w);
		submit_write(w, stream);
		ck_assert(use(w));
		nothing_stale();
		context->cache->blind = false; /* for the next round */
	}
}
END_TEST

/* A write in between that was seen says nothing of one that was not. */
START_TEST(samples_take_no_seen_write_for_a_missed_one)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use);
	for (int i = 0; i < 400; i++) {
		if (i % 37 == 0)
			rewrite(w);
		ck_assert(use(w));
		if (uniform() < 0.3)
			synchronise();
	}
	nothing_stale();
	ck_assert(!context->cache->blind);
}
END_TEST

START_TEST(a_write_that_was_seen_is_verified_three_times)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use);
	for (int i = 0; i < 40; i++)
		use(w);
	cu.set("counters", 0);
	rewrite(w);
	for (int i = 0; i < 10; i++)
		ck_assert(use(w));
	ck_assert_int_eq(hashes(), 3);
	qs_track_everything();
	for (int i = 0; i < 10; i++)
		ck_assert(use(w));
	ck_assert_int_eq(hashes(), 6);
	nothing_stale();
}
END_TEST

/* The writer waits for a value that the program writes after the next use: only then does it run.
 */
START_TEST(a_writer_that_is_late_is_found_by_the_next_use)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 20; i++)
		use_exact(w);
	synchronise();
	report(w); /* submitted, says the hook */
	ck_assert(use_exact(w));
	draw(w);
	submit_write(w, stream); /* runs now */
	ck_assert(use_exact(w));
	ck_assert(use_exact(w));
	nothing_stale();
}
END_TEST

START_TEST(without_trust_nothing_is_tracked)
{
	begin(QS_VALIDITY_VERIFIED);
	options.validity = QS_VALIDITY_TRACKED;
	struct weight *w = weight_new();
	for (int i = 0; i < 5; i++) {
		ck_assert(!use(w));
		ck_assert_int_eq(why, QS_REASON_UNTRACKED);
		synchronise();
	}
}
END_TEST

START_TEST(copies_go_when_trust_does)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use);
	ck_assert_uint_gt(kept_bytes(), 0);
	qs_submission_escaped("cuLaunchKernel");
	ck_assert(!qs_epoch_trusted());
	ck_assert(!use(w));
	ck_assert_int_eq(why, QS_REASON_UNTRACKED);
	ck_assert_uint_eq(kept_bytes(), 0);
}
END_TEST

START_TEST(an_audit_finds_what_tracking_missed)
{
	begin(QS_VALIDITY_TRACKED);
	options.check_every = 10;
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 30; i++) {
		use_exact(w);
		synchronise();
	}
	nothing_stale();
	cu.set("counters", 0);
	for (int i = 0; i < 20; i++) {
		ck_assert(use_exact(w));
		synchronise();
	}
	ck_assert_int_eq(hashes(), 2);
	draw(w);
	submit_write(w, stream); /* nobody tells */
	for (int i = 0; i < 12; i++) {
		ck_assert(use_exact(w));
		synchronise();
	}
	result_count = 0; /* up to ten of those were stale: that is what an audit is for */
	ck_assert(context->cache->blind);
	for (int i = 0; i < 40; i++) {
		if (i % 20 == 0) {
			draw(w);
			submit_write(w, stream);
		}
		ck_assert(use_exact(w));
	}
	nothing_stale();
}
END_TEST

START_TEST(a_write_that_was_seen_does_not_look_like_one_that_was_missed)
{
	begin(QS_VALIDITY_TRACKED);
	options.check_every = 10;
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 400; i++) {
		if (i % 37 == 0)
			rewrite(w);
		ck_assert(use_exact(w));
		if (uniform() < 0.3)
			synchronise();
	}
	nothing_stale();
	ck_assert(!context->cache->blind);
}
END_TEST

/* A kernel that only reads the weight, such as the look-up in a tied embedding. */
START_TEST(a_reader_is_learnt_from_the_outcomes)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use);
	for (int i = 0; i < 40; i++) {
		if (i == 30)
			cu.set("counters", 0);
		qs_track_argument(address(w), 77);
		ck_assert(use(w));
		synchronise();
	}
	ck_assert_int_eq(hashes(), 0);
	qs_track_argument(address(w), 78);
	ck_assert(use(w));
	ck_assert_int_eq(hashes(), 1);
	nothing_stale();
}
END_TEST

START_TEST(a_writer_is_never_taken_for_a_reader)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use);
	for (int i = 0; i < 400; i++) {
		if (i % 20 == 0) {
			draw(w);
			submit_write(w, stream);
			qs_track_argument(address(w), 77);
		}
		ck_assert(use(w));
		if (i % 3)
			synchronise();
	}
	nothing_stale();
	ck_assert(!context->cache->blind);
}
END_TEST

START_TEST(freed_memory_has_no_copy)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use);
	nothing_stale();
	qs_track_gone(w->matrix.data, 0);
	ck_assert(!use(w));
	ck_assert_uint_eq(kept_bytes(), 0);
	/* as an allocator that gives the address out again, with other contents */
	draw(w);
	submit_write(w, stream);
	for (int i = 0; i < 6; i++) {
		use(w);
		synchronise();
	}
	ck_assert(use(w));
	nothing_stale();
}
END_TEST

START_TEST(memory_that_is_freed_and_allocated_again_is_another_matrix)
{
	begin(QS_VALIDITY_TRACKED);
	for (int i = 0; i < 4; i++) {
		struct weight *w = weight_kept(use);
		nothing_stale();
		ck_cuda(cu.cuMemFree_v2(address(w)));
		qs_track_gone(w->matrix.data, 0);
	}
}
END_TEST

/* ---- frozen --------------------------------------------------------------------------------- */

START_TEST(frozen_is_kept_at_once_and_never_looked_at)
{
	begin(QS_VALIDITY_FROZEN);
	struct weight *w = weight_new();
	ck_assert(use(w));
	nothing_stale();
	cu.set("counters", 0);
	for (int i = 0; i < 100; i++)
		ck_assert(use(w));
	ck_assert_int_eq(hashes(), 0);
	nothing_stale();
}
END_TEST

START_TEST(an_audit_drops_a_frozen_weight_that_changed)
{
	begin(QS_VALIDITY_FROZEN);
	options.check_every = 10;
	struct weight *w = weight_new();
	for (int i = 0; i < 25; i++) {
		ck_assert(use(w));
		synchronise();
	}
	nothing_stale();
	ck_assert(!context->cache->reported);
	draw(w);
	submit_write(w, stream);
	int used = 0;
	for (int i = 0; i < 20; i++) {
		used += use(w);
		synchronise();
	}
	ck_assert_int_le(used, 10);
	ck_assert(context->cache->reported);
	ck_assert_int_eq(why, QS_REASON_CHANGING);
	ck_assert_uint_eq(kept_bytes(), 0);
}
END_TEST

/* ---- streams and threads -------------------------------------------------------------------- */

/* The copy is made in one stream and used in others before it is; with every order of execution. */
START_TEST(other_streams_wait_for_the_making)
{
	begin(QS_VALIDITY_FROZEN);
	CUstream other[3];
	for (int i = 0; i < 3; i++)
		ck_cuda(cu.cuStreamCreate(&other[i], CU_STREAM_NON_BLOCKING));
	for (int seed = 1; seed <= 40; seed++) {
		cu.set("seed", seed);
		struct weight *w = weight_new();
		ck_assert(use(w));
		for (int i = 0; i < 3; i++)
			ck_assert(use_in(w, &qs_form_fp8, other[i]));
		nothing_stale();
	}
}
END_TEST

/* Hashes of several streams run at once: each has scratch of its own. */
START_TEST(streams_hash_apart)
{
	begin(QS_VALIDITY_VERIFIED);
	CUstream own[2 * QS_WORKS];
	struct weight *w[2 * QS_WORKS];
	for (int i = 0; i < 2 * QS_WORKS; i++)
		ck_cuda(cu.cuStreamCreate(&own[i], CU_STREAM_NON_BLOCKING));
	for (int seed = 1; seed <= 10; seed++) {
		cu.set("seed", seed);
		for (int i = 0; i < 2 * QS_WORKS; i++)
			w[i] = weight_new();
		for (int round = 0; round < 4; round++) {
			for (int i = 0; i < 2 * QS_WORKS; i++)
				use_in(w[i], &qs_form_fp8, own[(i + round) % (2 * QS_WORKS)]);
			synchronise();
		}
		for (int i = 0; i < 2 * QS_WORKS; i++)
			ck_assert(use_in(w[i], &qs_form_fp8, own[i]));
		nothing_stale();
	}
}
END_TEST

static void order(CUstream before, CUstream after)
{
	CUevent event;
	ck_cuda(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
	ck_cuda(cu.cuEventRecord(event, before));
	ck_cuda(cu.cuStreamWaitEvent(after, event, 0));
}

/* A writer in one stream, users in two that wait for it and for which it waits in turn. */
START_TEST(writers_and_users_in_several_streams)
{
	begin(_i ? QS_VALIDITY_TRACKED : QS_VALIDITY_VERIFIED);
	CUstream user[2], writer;
	for (int i = 0; i < 2; i++)
		ck_cuda(cu.cuStreamCreate(&user[i], CU_STREAM_NON_BLOCKING));
	ck_cuda(cu.cuStreamCreate(&writer, CU_STREAM_NON_BLOCKING));
	for (int seed = 1; seed <= 12; seed++) {
		cu.set("seed", seed);
		struct weight *w = weight_kept(seed % 2 ? use : use_exact);
		const struct qs_form *form = seed % 2 ? &qs_form_fp8 : &toy_form;
		for (int i = 0; i < 30; i++)
			ck_assert(use_in(w, form, user[i % 2]));
		for (int step = 0; step < 3; step++) {
			for (int i = 0; i < 2; i++)
				order(user[i], writer);
			rewrite_in(w, writer);
			for (int i = 0; i < 2; i++)
				order(writer, user[i]);
			for (int i = 0; i < 24; i++)
				ck_assert(use_in(w, form, user[(i + step) % 2]));
		}
		nothing_stale();
	}
}
END_TEST

#define THREADS 6

static struct weight *shared_weight[4];

static void *hammer(void *data)
{
	CUstream own;
	CUcontext handle;
	const bool exact = (uintptr_t)data % 2;
	cu.cuDevicePrimaryCtxRetain(&handle, 0);
	cu.cuCtxSetCurrent(handle);
	cu.cuStreamCreate(&own, CU_STREAM_NON_BLOCKING);
	struct result *r = forget(sizeof *r);
	CUdeviceptr work = allocate(QS_KEPT_WORK);
	r->data = allocate(2 * ELEMENTS);
	r->scale = allocate(sizeof(float));
	r->target = allocate((ELEMENTS + 1) * sizeof(float));
	for (int i = 0; i < 200; i++) {
		struct weight *w = shared_weight[i % 4];
		use_with(w, exact ? &toy_form : &qs_form_fp8, own, work, r);
		if (i % 16 == 0)
			qs_track_everything();
		if (i % 8 == 0)
			cu.cuStreamSynchronize(own);
	}
	return NULL;
}

START_TEST(threads_share_copies)
{
	pthread_t thread[THREADS];
	begin(_i ? QS_VALIDITY_TRACKED : QS_VALIDITY_VERIFIED);
	for (int i = 0; i < 4; i++)
		shared_weight[i] = weight_new();
	for (uintptr_t i = 0; i < THREADS; i++)
		ck_assert_int_eq(pthread_create(&thread[i], NULL, hammer, (void *)i), 0);
	for (int i = 0; i < THREADS; i++)
		pthread_join(thread[i], NULL);
	synchronise();
	for (int i = 0; i < 4; i++) {
		ck_assert(use(shared_weight[i]));
		ck_assert(use_exact(shared_weight[i]));
	}
	nothing_stale();
	ck_assert_int_eq(cu.get("overruns"), 0);
}
END_TEST

/* ---- graphs --------------------------------------------------------------------------------- */

struct recorded {
	CUgraph graph;
	CUgraphExec exec;
};

static void begin_capture(void)
{
	ck_cuda(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
}

static struct recorded end_capture(void)
{
	struct recorded r;
	ck_cuda(cu.cuStreamEndCapture(stream, &r.graph));
	ck_cuda(cu.cuGraphInstantiateWithFlags(&r.exec, r.graph, 0));
	return r;
}

static void destroy(struct recorded r)
{
	qs_graph_forgotten(r.exec);
	ck_cuda(cu.cuGraphExecDestroy(r.exec));
	ck_cuda(cu.cuGraphDestroy(r.graph));
}

/* A captured use; its result is written again by every launch. */
static struct recorded capture(struct weight *w, const struct qs_form *form, bool expected)
{
	struct result *r = forget(sizeof *r);
	CUdeviceptr work = allocate(QS_KEPT_WORK);
	r->data = allocate(2 * ELEMENTS * 4);
	r->scale = allocate(sizeof(float));
	r->target = allocate((ELEMENTS * 4 + 1) * sizeof(float));
	r->rows = w->matrix.rows;
	r->cols = w->matrix.cols;
	r->ld = w->matrix.ld;
	begin_capture();
	ck_assert(use_with(w, form, stream, work, r) == expected);
	struct recorded recorded = end_capture();
	results[0] = r;
	result_count = 1;
	return recorded;
}

/* As the hooks have it; what the replay saw is compared with the weight as it is meant now. */
static void replay(struct recorded r, const struct weight *w)
{
	qs_kept_before_graph(r.exec, stream);
	ck_cuda(cu.cuGraphLaunch(r.exec, stream));
	synchronise();
	memcpy(results[0]->meant, w->now, sizeof w->now);
	const double db = decibels(results[0]);
	ck_assert_msg(db >= LEAST_DB, "%.1f dB", db);
}

START_TEST(a_capture_gets_no_new_copy)
{
	begin(QS_VALIDITY_FROZEN);
	struct weight *w = weight_new();
	cu.set("counters", 0);
	begin_capture();
	use_in_vain(w);
	destroy(end_capture());
	ck_assert_int_eq(cu.get("launches"), 0);
	ck_assert(use(w));
	begin_capture(); /* made, but not run yet */
	use_in_vain(w);
	destroy(end_capture());
	nothing_stale();
}
END_TEST

START_TEST(a_capture_hashes_nothing)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_new();
	use(w);
	synchronise();
	cu.set("counters", 0);
	begin_capture();
	for (int i = 0; i < 5; i++)
		use_in_vain(w);
	destroy(end_capture());
	ck_assert_int_eq(cu.get("launches"), 0);
}
END_TEST

START_TEST(a_replay_after_an_update_sees_it)
{
	static const enum qs_validity levels[] = {QS_VALIDITY_VERIFIED, QS_VALIDITY_TRACKED};
	const struct qs_form *form = _i % 2 ? &toy_form : &qs_form_fp8;
	begin(levels[_i / 2]);
	struct weight *w = weight_kept(_i % 2 ? use_exact : use);
	for (int i = 0; i < 30; i++) {
		use_in(w, form, stream);
		synchronise();
	}
	struct recorded r = capture(w, form, true);
	replay(r, w);
	for (int i = 0; i < 4; i++) {
		rewrite(w);
		for (int j = 0; j < 3; j++)
			replay(r, w);
	}
	destroy(r);
}
END_TEST

/* Eager uses and replays in turn, in streams that are ordered by nothing but the writes. */
START_TEST(replays_beside_eager_uses)
{
	begin(_i ? QS_VALIDITY_TRACKED : QS_VALIDITY_VERIFIED);
	CUstream other;
	ck_cuda(cu.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
	struct weight *w = weight_kept(use);
	for (int i = 0; i < 60; i++) {
		use(w);
		synchronise();
	}
	struct recorded r = capture(w, &qs_form_fp8, true);
	struct result *replayed = results[0];
	for (int seed = 1; seed <= 8; seed++) {
		cu.set("seed", seed);
		rewrite(w);
		order(stream, other);
		qs_kept_before_graph(r.exec, other);
		ck_cuda(cu.cuGraphLaunch(r.exec, other));
		memcpy(replayed->meant, w->now, sizeof w->now);
		result_count = 0;
		results[result_count++] = replayed;
		for (int i = 0; i < 20; i++)
			ck_assert(use(w));
		nothing_stale();
	}
	destroy(r);
}
END_TEST

START_TEST(a_suspect_weight_is_not_captured_where_only_launches_check)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 30; i++)
		use_exact(w);
	synchronise();
	use_exact(w);
	synchronise();
	rewrite(w);
	synchronise();
	struct recorded r = capture(w, &toy_form, false);
	ck_assert_int_eq(why, QS_REASON_CAPTURE_COLD);
	destroy(r);
}
END_TEST

START_TEST(a_dropped_copy_is_switched_off_under_a_live_graph)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use_exact), *other = weight_new();
	for (int i = 0; i < 5; i++) {
		use_exact(w);
		synchronise();
	}
	struct recorded r = capture(w, &toy_form, true);
	replay(r, w);
	ck_assert(from_copy());
	const long frees = cu.get("frees");
	for (int i = 0; i < 20; i++) { /* changes too often to be worth it */
		rewrite(w);
		replay(r, w);
	}
	ck_assert(!from_copy());
	ck_assert_uint_eq(kept_bytes(), 0);
	for (int i = 0; i < 100; i++) {
		use_exact(w);
		synchronise();
	}
	context->limit = context->taken;
	for (int i = 0; i < 100; i++) { /* its new copy is not idle */
		use_exact(w);
		ck_assert(!use(other));
		synchronise();
	}
	ck_assert_int_eq(cu.get("frees"), frees);
	rewrite(w);
	replay(r, w);
	destroy(r);
	int uses = 0;
	while (!use(other) && ++uses < 200) {
		synchronise();
		use_exact(w);
	}
	ck_assert_int_lt(uses, 100);
	ck_assert_int_eq(cu.get("frees"), frees + 1);
}
END_TEST

START_TEST(a_graph_of_a_weight_that_is_gone_is_switched_off)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 5; i++) {
		use_exact(w);
		synchronise();
	}
	struct recorded r = capture(w, &toy_form, true);
	replay(r, w);
	ck_assert(from_copy());
	qs_track_gone(w->matrix.data, 0);
	draw(w);
	submit_write(w, stream); /* the address is in use again, and nobody watches */
	replay(r, w);
	ck_assert(!from_copy());
	destroy(r);
}
END_TEST

START_TEST(a_graph_alone_is_audited_too)
{
	begin(QS_VALIDITY_TRACKED);
	options.check_every = 10;
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 8; i++) {
		use_exact(w);
		synchronise();
	}
	struct recorded r = capture(w, &toy_form, true);
	for (int i = 0; i < 20; i++)
		replay(r, w);
	cu.set("counters", 0);
	for (int i = 0; i < 30; i++)
		replay(r, w);
	ck_assert_int_eq(hashes(), 3);
	draw(w);
	submit_write(w, stream); /* nobody tells */
	for (int i = 0; i < 10; i++) {
		qs_kept_before_graph(r.exec, stream);
		ck_cuda(cu.cuGraphLaunch(r.exec, stream));
	}
	replay(r, w);
	destroy(r);
}
END_TEST

/* A product found one row to be another and said so; by the next check the source is as it was. */
START_TEST(a_copy_that_failed_without_need_is_good_again)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *w = weight_kept(use_exact);
	struct qs_kept_view view;
	struct qs_stream described;
	ck_assert(qs_stream_describe(stream, &described));
	struct qs_kept *kept =
	        qs_kept_find(context, &described, &w->matrix, &toy_form, &options, &why);
	ck_cuda(qs_kept_use(kept, &described, allocate(QS_KEPT_WORK), &view));
	qs_kept_used(kept);
	synchronise();
	uint32_t *descriptor = (uint32_t *)(uintptr_t)view.descriptor;
	ck_assert_uint_eq(descriptor[VALID], 1);
	descriptor[VALID] = 0;
	descriptor[FAILED] = 1;
	descriptor[TOUCHED] = 9;
	ck_assert(use_exact(w));
	nothing_stale();
	ck_assert_uint_eq(descriptor[VALID], 1);
	ck_assert_uint_eq(descriptor[FAILED], 0);
	ck_assert_uint_eq(descriptor[TOUCHED], 9);
	descriptor[FAILED] = 1;
	rewrite(w);
	ck_assert(use_exact(w));
	nothing_stale();
	ck_assert_uint_eq(descriptor[FAILED], 0);
	ck_assert_uint_eq(descriptor[TOUCHED], 9);
}
END_TEST

/* As the hooks have it: what an executable does is known from its graph. */
static struct recorded known(struct recorded r)
{
	qs_graph_made(r.exec, r.graph);
	return r;
}

static void launch_graph(struct recorded r, int times)
{
	for (int i = 0; i < times; i++) {
		qs_kept_before_graph(r.exec, stream);
		ck_cuda(cu.cuGraphLaunch(r.exec, stream));
		synchronise();
	}
}

/* Uses until the copy was just checked. */
static void until_checked(struct recorded r)
{
	cu.set("counters", 0);
	while (!hashes())
		launch_graph(r, 1);
	cu.set("counters", 0);
}

START_TEST(replays_of_another_graph_are_no_uses)
{
	begin(QS_VALIDITY_TRACKED);
	options.check_every = 10;
	struct weight *w = weight_kept(use_exact), *other = weight_kept(use_exact);
	for (int i = 0; i < 5; i++) {
		use_exact(w);
		use_exact(other);
		synchronise();
	}
	struct recorded r = known(capture(w, &toy_form, true));
	struct recorded s = known(capture(other, &toy_form, true));
	until_checked(s);
	until_checked(r);
	launch_graph(s, 98);
	ck_assert_int_eq(hashes(), 9);
	launch_graph(r, 9);
	ck_assert_int_eq(hashes(), 9);
	launch_graph(r, 1);
	ck_assert_int_eq(hashes(), 10);
	destroy(r);
	destroy(s);
}
END_TEST

START_TEST(products_and_replays_are_uses_of_one_copy)
{
	begin(QS_VALIDITY_TRACKED);
	options.check_every = 10;
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 5; i++) {
		use_exact(w);
		synchronise();
	}
	struct recorded r = known(capture(w, &toy_form, true));
	until_checked(r);
	result_count = 0;
	for (int i = 0; i < 20; i++) {
		ck_assert(use_exact(w));
		launch_graph(r, 1);
	}
	ck_assert_int_eq(hashes(), 4);
	nothing_stale();
	destroy(r);
}
END_TEST

/* Each of its kernels that reads the copy uses it, and the copy is checked once. */
START_TEST(a_graph_of_two_products_is_two_uses)
{
	begin(QS_VALIDITY_TRACKED);
	options.check_every = 10;
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 5; i++) {
		use_exact(w);
		synchronise();
	}
	struct result *result = forget(sizeof *result);
	result->target = allocate((ELEMENTS * 4 + 1) * sizeof(float));
	begin_capture();
	for (int i = 0; i < 2; i++)
		ck_assert(use_with(w, &toy_form, stream, 0, result));
	struct recorded r = known(end_capture());
	until_checked(r);
	launch_graph(r, 5);
	ck_assert_int_eq(hashes(), 0);
	launch_graph(r, 1);
	ck_assert_int_eq(hashes(), 1);
	cu.set("counters", 0);
	qs_track_everything();
	launch_graph(r, 1);
	ck_assert_int_eq(hashes(), 1);
	destroy(r);
}
END_TEST

/* By a graph that checks before its launch, and by one that does in it. */
START_TEST(a_weight_that_is_replayed_often_may_change_at_times)
{
	const struct qs_form *form = _i % 2 ? &toy_form : &qs_form_fp8;
	begin(_i / 2 ? QS_VALIDITY_TRACKED : QS_VALIDITY_VERIFIED);
	struct weight *w = weight_kept(_i % 2 ? use_exact : use);
	for (int i = 0; i < 5; i++) {
		use_in(w, form, stream);
		synchronise();
	}
	result_count = 0;
	struct recorded r = known(capture(w, form, true));
	for (int i = 0; i < 10; i++) {
		rewrite(w);
		for (int j = 0; j < 20; j++)
			replay(r, w);
	}
	ck_assert(form != &toy_form || from_copy());
	ck_assert(use_in(w, form, stream));
	nothing_stale();
	destroy(r);
}
END_TEST

/* More than are looked at together. */
#define MANY 75

START_TEST(all_weights_of_a_graph_are_checked)
{
	static struct weight *w[MANY];
	begin(QS_VALIDITY_TRACKED);
	for (int i = 0; i < MANY; i++)
		w[i] = weight_kept(use_exact);
	for (int i = 0; i < MANY * 3; i++)
		use_exact(w[i % MANY]);
	nothing_stale();
	for (int i = 0; i < MANY; i++)
		ck_assert(use_exact(w[i]));
	nothing_stale();
	for (int i = 0; i < MANY; i++)
		note_result(w[i])->target = allocate((ELEMENTS * 4 + 1) * sizeof(float));
	begin_capture();
	for (int i = 0; i < MANY; i++)
		ck_assert(use_with(w[i], &toy_form, stream, 0, results[i]));
	struct recorded r = end_capture();
	if (_i)
		known(r);
	cu.set("counters", 0);
	launch_graph(r, 1);
	ck_assert_int_eq(hashes(), 0);
	for (int i = 0; i < MANY; i++) {
		rewrite(w[i]);
		memcpy(results[i]->meant, w[i]->now, sizeof w[i]->now);
	}
	launch_graph(r, 1);
	ck_assert_int_eq(hashes(), MANY);
	nothing_stale();
	destroy(r);
}
END_TEST

/* One at a launch: none takes long. */
START_TEST(weights_that_are_due_at_once_are_audited_in_turn)
{
	struct weight *w[3];
	begin(QS_VALIDITY_TRACKED);
	options.check_every = 10;
	for (int i = 0; i < 3; i++)
		w[i] = weight_kept(use_exact);
	for (int i = 0; i < 15; i++)
		use_exact(w[i % 3]);
	synchronise();
	for (int i = 0; i < 3; i++)
		use_exact(w[i]);
	synchronise();
	struct result *result = forget(sizeof *result);
	result->target = allocate((ELEMENTS * 4 + 1) * sizeof(float));
	begin_capture();
	for (int i = 0; i < 3; i++)
		ck_assert(use_with(w[i], &toy_form, stream, 0, result));
	struct recorded r = end_capture();
	if (_i)
		known(r);
	qs_track_everything();
	launch_graph(r, 4); /* all are checked, and not doubted any more */
	cu.set("counters", 0);
	long before = 0;
	for (int i = 0; i < 13; i++) {
		launch_graph(r, 1);
		ck_assert_int_le(hashes(), before + 1);
		before = hashes();
	}
	ck_assert_int_eq(before, 3);
	destroy(r);
}
END_TEST

START_TEST(a_frozen_weight_is_audited_by_its_replays)
{
	begin(QS_VALIDITY_FROZEN);
	options.check_every = 10;
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 3; i++) {
		use_exact(w);
		synchronise();
	}
	struct recorded r = known(capture(w, &toy_form, true));
	until_checked(r);
	replay(r, w);
	ck_assert(from_copy());
	const uint16_t *copy = (const uint16_t *)(uintptr_t)only_copy()->data;
	uint16_t old[ELEMENTS];
	memcpy(old, copy, sizeof old);
	draw(w);
	submit_write(w, stream);
	launch_graph(r, 8);
	ck_assert(from_copy()); /* it is the user's word */
	ck_assert_int_eq(hashes(), 0);
	launch_graph(r, 1);
	ck_assert_int_eq(hashes(), 1);
	ck_assert(from_copy()); /* the audit is after the fact */
	replay(r, w);
	ck_assert(!from_copy());
	ck_assert_uint_eq(kept_bytes(), 0);
	/* never made anew: who reads it is ordered by nothing */
	ck_assert_int_eq(memcmp(old, copy, sizeof old), 0);
	destroy(r);
}
END_TEST

START_TEST(weights_that_no_graph_holds_any_more_are_not_checked_for_one)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use_exact), *other = weight_kept(use_exact);
	for (int i = 0; i < 5; i++) {
		use_exact(w);
		use_exact(other);
		synchronise();
	}
	struct recorded r = capture(w, &toy_form, true), s = capture(other, &toy_form, true);
	destroy(r);
	qs_track_everything();
	cu.set("counters", 0);
	launch_graph(s, 1); /* which may use any */
	ck_assert_int_eq(hashes(), 1);
	destroy(s);
}
END_TEST

/* The launch of a graph by a kernel is not seen, so all that kernels can launch is checked before
 * any launch that the host makes. */
START_TEST(graphs_that_kernels_can_launch_are_checked_before_any_launch)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 8; i++) {
		use_exact(w);
		synchronise();
	}
	const CUdeviceptr to = allocate(8), from = allocate(8);
	begin_capture();
	copy_in(stream, to, from, 8);
	struct recorded starter = end_capture();
	qs_graph_made(starter.exec, starter.graph);
	struct recorded r = capture(w, &toy_form, true);
	qs_graph_made(r.exec, r.graph);
	qs_graphs_by_kernels();
	rewrite(w);
	qs_kept_before_graph(starter.exec, stream);
	ck_cuda(cu.cuGraphLaunch(starter.exec, stream));
	ck_cuda(cu.cuGraphLaunch(r.exec, stream)); /* by the kernel in it */
	synchronise();
	memcpy(results[0]->meant, w->now, sizeof w->now);
	ck_assert_double_ge(decibels(results[0]), LEAST_DB);
}
END_TEST

START_TEST(a_graph_is_not_held_up_by_clean_weights)
{
	begin(QS_VALIDITY_TRACKED);
	struct weight *w = weight_kept(use_exact);
	for (int i = 0; i < 5; i++) {
		use_exact(w);
		synchronise();
	}
	struct recorded r = capture(w, &toy_form, true);
	cu.set("counters", 0);
	replay(r, w);
	replay(r, w);
	ck_assert_int_eq(hashes(), 0);
	destroy(r);
	qs_track_everything();
	qs_kept_before_graph(NULL, stream);
	ck_assert_int_eq(hashes(), 0); /* no graph holds it any more */
}
END_TEST

/* ---- memory --------------------------------------------------------------------------------- */

static void limit_to(size_t copies)
{
	struct weight *w = weight_kept(use);
	size_t bytes = 0;
	for (int i = 0; i < QS_CACHE_BUCKETS; i++)
		if (context->cache->bucket[i])
			bytes = context->cache->bucket[i]->bytes;
	ck_assert_uint_gt(bytes, 0);
	(void)w;
	context->limit = context->taken + (copies - 1) * bytes;
}

START_TEST(what_was_not_used_for_longest_makes_room)
{
	begin(QS_VALIDITY_VERIFIED);
	limit_to(4); /* one of them is abandoned from here on */
	struct weight *w[5];
	for (int i = 0; i < 5; i++)
		w[i] = weight_new();
	int used[5] = {0};
	for (int round = 0; round < 200; round++)
		for (int i = 0; i < 5; i++) {
			used[i] += use(w[i]);
			synchronise();
		}
	nothing_stale();
	int kept = 0;
	for (int i = 0; i < 5; i++)
		kept += used[i] > 50;
	ck_assert_int_eq(kept, 4);
	ck_assert_uint_le(context->taken, context->limit);
}
END_TEST

/* It might have been replayed all the time. */
START_TEST(what_a_graph_held_until_now_is_not_driven_out_first)
{
	begin(QS_VALIDITY_VERIFIED);
	struct weight *held = weight_kept(use), *unused = weight_kept(use),
	              *used = weight_kept(use);
	struct weight *wanting = weight_new();
	context->limit = context->taken;
	struct recorded r = capture(held, &qs_form_fp8, true);
	ck_assert(use(unused));
	for (int i = 0; i < 200; i++)
		ck_assert(use(used));
	synchronise();
	destroy(r);
	int uses = 0;
	while (!use(wanting) && uses++ < 60)
		synchronise();
	ck_assert_int_lt(uses, 60);
	ck_assert(use(held));
	ck_assert(!use(unused));
}
END_TEST

/* Those that are used in turn must not drive each other out. */
START_TEST(weights_that_do_not_all_fit_stay_where_they_are)
{
	begin(QS_VALIDITY_VERIFIED);
	limit_to(4);
	struct weight *w[8];
	for (int i = 0; i < 8; i++)
		w[i] = weight_new();
	for (int round = 0; round < 100; round++)
		for (int i = 0; i < 8; i++)
			use(w[i]), synchronise();
	cu.set("counters", 0);
	for (int round = 0; round < 100; round++)
		for (int i = 0; i < 8; i++)
			use(w[i]), synchronise();
	ck_assert_int_eq(cu.get("frees"), 0);
	ck_assert(!use(w[7]));
	ck_assert_int_eq(why, QS_REASON_CHANGING);
	nothing_stale();
}
END_TEST

START_TEST(no_memory_is_a_reason_and_no_harm)
{
	begin(QS_VALIDITY_FROZEN);
	struct weight *first = weight_new(), *w = weight_new();
	ck_assert(use(first));
	context->limit = context->taken + 1;
	ck_assert(!use(w));
	ck_assert_int_eq(why, QS_REASON_CACHE_FULL);
	context->limit = context->total;
	int uses = 0;
	while (!use(w) && ++uses < 200)
		synchronise();
	ck_assert_int_lt(uses, 100);
	nothing_stale();
}
END_TEST

START_TEST(the_last_of_the_memory_is_left_to_the_program)
{
	begin(QS_VALIDITY_FROZEN);
	struct weight *first = weight_new(), *w = weight_new();
	ck_assert(use(first));
	cu.set("memory_mib", 100);
	CUdeviceptr most = allocate((size_t)96 << 20);
	cu.set("counters", 0);
	struct qs_stream described;
	ck_assert(qs_stream_describe(stream, &described));
	ck_assert_ptr_null(
	        qs_kept_find(context, &described, &w->matrix, &qs_form_fp8, &options, &why));
	ck_assert_int_eq(why, QS_REASON_MEMORY);
	ck_assert_int_eq(cu.get("allocations"), 0);
	ck_cuda(cu.cuMemFree_v2(most));
	int uses = 0;
	while (!use(w) && ++uses < 200)
		;
	ck_assert_int_lt(uses, 100);
	nothing_stale();
}
END_TEST

START_TEST(an_allocation_that_fails_leaves_nothing_behind)
{
	begin(QS_VALIDITY_FROZEN);
	struct weight *first = weight_new(), *w = weight_new();
	struct qs_stream described;
	ck_assert(use(first));
	const size_t taken = context->taken;
	const int spares = context->cache->spares;
	ck_assert(qs_stream_describe(stream, &described));
	cu.set("fail_alloc", 1);
	ck_assert_ptr_null(
	        qs_kept_find(context, &described, &w->matrix, &qs_form_fp8, &options, &why));
	ck_assert_int_eq(why, QS_REASON_MEMORY);
	ck_assert_uint_eq(context->taken, taken);
	ck_assert_int_eq(context->cache->spares, spares);
	cu.set("fail_alloc", 0);
	nothing_stale();
}
END_TEST

START_TEST(a_launch_that_fails_drops_the_copy)
{
	begin(QS_VALIDITY_FROZEN);
	struct weight *w = weight_new();
	cu.set("fail_launch", 700);
	ck_assert(!use(w));
	ck_assert_int_eq(why, QS_REASON_ERROR);
	cu.set("fail_launch", 0);
	ck_assert(!use(w));
	ck_assert_int_eq(why, QS_REASON_ERROR);
	ck_assert_uint_eq(kept_bytes(), 0);
	int uses = 0;
	while (!use(w) && ++uses < 200)
		;
	ck_assert_int_lt(uses, 100);
	nothing_stale();
}
END_TEST

START_TEST(nothing_is_freed_while_it_may_be_used)
{
	begin(QS_VALIDITY_FROZEN);
	struct weight *w = weight_new(), *v = weight_new(), *u = weight_new();
	struct qs_stream described;
	ck_assert(qs_stream_describe(stream, &described));
	ck_assert(use(w));
	struct qs_kept *kept =
	        qs_kept_find(context, &described, &w->matrix, &qs_form_fp8, &options, &why);
	ck_assert_ptr_nonnull(kept);
	qs_cache_drop(kept);
	qs_cache_drop(kept); /* twice is once */
	const long frees = cu.get("frees");
	synchronise();
	for (int i = 0; i < 40; i++)
		ck_assert(use(v));
	ck_assert_int_eq(cu.get("frees"), frees); /* nobody wants it */
	context->limit = context->taken;
	for (int i = 0; i < 40; i++) {
		ck_assert(!use(u));
		synchronise();
	}
	ck_assert_int_eq(why, QS_REASON_CACHE_FULL);
	ck_assert_int_eq(cu.get("frees"), frees); /* a thread holds it */
	qs_kept_used(kept);
	for (int i = 0; i < 17; i++)
		ck_assert(!use(u));
	ck_assert_int_eq(cu.get("frees"), frees); /* the stream has not come that far */
	synchronise();
	int uses = 0;
	while (!use(u) && ++uses < 100)
		;
	ck_assert_int_lt(uses, 64);
	ck_assert_int_eq(cu.get("frees"), frees + 1);
	nothing_stale();
}
END_TEST

/* ---- ends ----------------------------------------------------------------------------------- */

START_TEST(copies_of_a_context_that_was_destroyed_are_forgotten)
{
	begin(_i ? QS_VALIDITY_TRACKED : QS_VALIDITY_VERIFIED);
	CUcontext handle;
	struct weight *w = weight_kept(use);
	nothing_stale();
	ck_assert_uint_gt(kept_bytes(), 0);
	ck_cuda(cu.cuDevicePrimaryCtxReset_v2(0));
	qs_track_all_gone();
	ck_cuda(cu.cuDevicePrimaryCtxRetain(&handle, 0));
	ck_cuda(cu.cuCtxSetCurrent(handle));
	cu.set("counters", 0);
	struct qs_context *old = context;
	context = qs_context_current(&options, true, &why);
	ck_assert_ptr_nonnull(context);
	ck_assert_ptr_ne(context, old);
	CUmodule module;
	ck_cuda(cu.cuModuleLoadData(&module, "image"));
	ck_cuda(cu.cuModuleGetFunction(&cu.copy, module, "softcuda_copy"));
	ck_cuda(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	(void)w;
	struct weight *v = weight_new();
	use(v);
	ck_assert_uint_eq(kept_bytes(), 0);
	ck_assert_int_eq(cu.get("frees"), 0);
	for (int i = 0; i < 5; i++)
		synchronise(), use(v);
	nothing_stale();
}
END_TEST

START_TEST(a_forked_child_forgets)
{
	begin(QS_VALIDITY_FROZEN);
	struct weight *w = weight_new();
	ck_assert(use(w));
	synchronise();
	destroy(capture(w, &qs_form_fp8, true));
	qs_kept_forked();
	qs_context_forked();
	qs_kept_before_graph(NULL, stream);
	enum qs_reason reason;
	ck_assert_ptr_null(qs_context_current(&options, false, &reason));
}
END_TEST

#define ADD(test) tcase_add_test(tests, test)

int main(void)
{
	Suite *suite = suite_create("cache");
	TCase *tests = tcase_create("cache");
	tcase_set_timeout(tests, 120);
	ADD(the_third_use_of_unchanged_contents_has_a_copy);
	ADD(contents_that_change_at_the_third_use_are_not_kept);
	ADD(nobody_waits_for_a_hash);
	ADD(contents_that_change_are_hashed_ever_more_rarely);
	tcase_add_loop_test(tests, a_buffer_for_many_contents_in_turn_is_never_admitted, 2, 49);
	ADD(the_weights_of_a_trainer_are_given_up);
	ADD(a_trainer_that_accumulates_for_long_keeps_its_weights);
	ADD(another_shape_at_the_same_address_is_another_matrix);
	ADD(what_the_form_cannot_hold_is_not_tried);
	ADD(the_policy_may_forbid_copies);
	ADD(addresses_beyond_the_table_cost_no_hashes);
	ADD(not_a_number_keeps_a_form_that_needs_numbers_away);
	ADD(an_infinity_that_comes_later_switches_the_copy_off);
	ADD(a_frozen_weight_with_an_infinity_is_used_from_its_source);
	ADD(verified_sees_every_write);
	ADD(one_bit_is_a_change);
	ADD(the_copy_of_an_unchanged_weight_is_left_alone);
	ADD(padding_is_no_part_of_a_weight);
	ADD(a_copy_that_never_lasts_is_dropped);
	ADD(a_clean_weight_costs_no_launch);
	ADD(a_clean_weight_is_compared_in_part_where_products_do_not);
	ADD(a_sample_finds_what_tracking_missed);
	ADD(samples_take_no_seen_write_for_a_missed_one);
	ADD(a_write_that_was_seen_is_verified_three_times);
	ADD(a_writer_that_is_late_is_found_by_the_next_use);
	ADD(without_trust_nothing_is_tracked);
	ADD(copies_go_when_trust_does);
	ADD(an_audit_finds_what_tracking_missed);
	ADD(a_write_that_was_seen_does_not_look_like_one_that_was_missed);
	ADD(a_reader_is_learnt_from_the_outcomes);
	ADD(a_writer_is_never_taken_for_a_reader);
	ADD(freed_memory_has_no_copy);
	ADD(memory_that_is_freed_and_allocated_again_is_another_matrix);
	ADD(frozen_is_kept_at_once_and_never_looked_at);
	ADD(an_audit_drops_a_frozen_weight_that_changed);
	ADD(other_streams_wait_for_the_making);
	ADD(streams_hash_apart);
	tcase_add_loop_test(tests, writers_and_users_in_several_streams, 0, 2);
	tcase_add_loop_test(tests, threads_share_copies, 0, 2);
	ADD(a_capture_gets_no_new_copy);
	ADD(a_capture_hashes_nothing);
	tcase_add_loop_test(tests, a_replay_after_an_update_sees_it, 0, 4);
	tcase_add_loop_test(tests, replays_beside_eager_uses, 0, 2);
	ADD(a_suspect_weight_is_not_captured_where_only_launches_check);
	ADD(a_dropped_copy_is_switched_off_under_a_live_graph);
	ADD(a_graph_of_a_weight_that_is_gone_is_switched_off);
	ADD(a_graph_alone_is_audited_too);
	ADD(a_copy_that_failed_without_need_is_good_again);
	ADD(replays_of_another_graph_are_no_uses);
	ADD(products_and_replays_are_uses_of_one_copy);
	ADD(a_graph_of_two_products_is_two_uses);
	tcase_add_loop_test(tests, a_weight_that_is_replayed_often_may_change_at_times, 0, 4);
	tcase_add_loop_test(tests, all_weights_of_a_graph_are_checked, 0, 2);
	tcase_add_loop_test(tests, weights_that_are_due_at_once_are_audited_in_turn, 0, 2);
	ADD(a_frozen_weight_is_audited_by_its_replays);
	ADD(weights_that_no_graph_holds_any_more_are_not_checked_for_one);
	ADD(what_a_graph_held_until_now_is_not_driven_out_first);
	ADD(graphs_that_kernels_can_launch_are_checked_before_any_launch);
	ADD(a_graph_is_not_held_up_by_clean_weights);
	ADD(what_was_not_used_for_longest_makes_room);
	ADD(weights_that_do_not_all_fit_stay_where_they_are);
	ADD(no_memory_is_a_reason_and_no_harm);
	ADD(the_last_of_the_memory_is_left_to_the_program);
	ADD(an_allocation_that_fails_leaves_nothing_behind);
	ADD(a_launch_that_fails_drops_the_copy);
	ADD(nothing_is_freed_while_it_may_be_used);
	tcase_add_loop_test(tests, copies_of_a_context_that_was_destroyed_are_forgotten, 0, 2);
	ADD(a_forked_child_forgets);
	suite_add_tcase(suite, tests);
	return qs_suite_main(suite);
}
