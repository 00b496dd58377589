/* Kept weights in scenes and tests; see kept.h. */
#include "kept.h"

#include <stdio.h>
#include <string.h>

const struct product shapes[SHAPES] = {
        {.name = "few tokens", .ta = CUBLAS_OP_T, .m = OUT, .n = 8, .k = IN},
        {.name = "many tokens", .ta = CUBLAS_OP_T, .m = OUT, .n = 270, .k = IN},
        {.name = "dX", .ta = CUBLAS_OP_N, .m = IN, .n = 70, .k = OUT},
        {.name = "more tokens", .ta = CUBLAS_OP_T, .m = OUT, .n = 80, .k = IN},
};

const struct kind kinds[KINDS] = {
        {"nf4, few tokens", "nf4", 0, FORM_NF4, 18.5, 24.5},
        {"nf4, many tokens", "nf4", 1, FORM_NF4, 18.5, 24.5},
        {"nf4, dX", "nf4", 2, FORM_NF4, 18.5, 24.5},
        {"fp8, few tokens", "fp8", 0, FORM_FP8_TILES, 30.5, 37},
        {"fp8, many tokens", "fp8", 1, FORM_FP8, 26.5, 30},
        {"fp8, dX", "fp8", 2, FORM_FP8_TURNED, 26.5, 30},
        {"nf4, more tokens", "nf4", 3, FORM_NF4, 18.5, 24.5},
};

const char *const levels[2] = {"tracked", "verified"};

void run_kind(struct outcome *outcome, const struct kind *kind, const char *level, const char *more,
              const char *scene, const char *way, int seed)
{
	char set[512], shape[16], knob[64];
	snprintf(set, sizeof set,
	         "QSHIM_SET=tune.budget_ms=0" OTHER ";default.action=%s;cache.validity=%s%s",
	         kind->action, level, more);
	snprintf(shape, sizeof shape, "%d", kind->shape);
	snprintf(knob, sizeof knob, "SOFTCUDA_SEED=%d", seed);
	const char *const env[] = {set, knob, "QSHIM_LOG=cache", "QSHIM_QUIET=1", NULL};
	run_scene(outcome, SHIMMED, env, scene, shape, way, NULL);
	ck_assert_msg(outcome->exit == 0, "%s: exit %d: %s", kind->name, outcome->exit,
	              outcome->err);
}

/* Without a kept copy fp8 has both operands in it. */
double least_of(const struct kind *kind)
{
	return kind->form == FORM_FP8_TILES ? 26.5 : kind->least;
}

void expect_right(const struct outcome *outcome, const struct kind *kind, const char *what,
                  int index)
{
	const double sqnr = step_at(outcome, index).sqnr;
	ck_assert_msg(sqnr >= least_of(kind), "%s, %s, step %d: %.2f dB", kind->name, what, index,
	              sqnr);
}

void expect_kept(const struct outcome *outcome, const struct kind *kind, const char *what,
                 int index)
{
	const struct step step = step_at(outcome, index);
	ck_assert_msg(step.sqnr >= kind->least && step.sqnr < kind->most,
	              "%s, %s, step %d: %.2f dB", kind->name, what, index, step.sqnr);
	ck_assert_msg(step.uses[kind->form] == 1, "%s, %s, step %d: %ld uses", kind->name, what,
	              index, step.uses[kind->form]);
	ck_assert_msg(step.bytes[kind->form] > 0, "%s, %s: nothing is kept", kind->name, what);
}

void *kept_rows_of(void *weight)
{
	return (uint16_t *)weight + PART;
}

void *kept_new_rows(struct made *made)
{
	static uint64_t seed = 200;
	struct made other;
	product_make(&other, &made->p, ++seed);
	memcpy(made->a + PART, other.a + PART, (size_t)ROWS * IN * sizeof *made->a);
	return kept_rows_of(other.da);
}

void kept_rows_are(struct made *made, double value)
{
	for (size_t i = PART; i < PART + (size_t)ROWS * IN; i++)
		made->a[i] = value;
}

CUfunction kept_kernel(const char *name)
{
	static CUmodule module;
	CUfunction function;
	if (!module)
		must((int)cuModuleLoadData(&module, "image"), "module");
	must((int)cuModuleGetFunction(&function, module, name), name);
	return function;
}

void kept_launch(const char *name, void **arguments, cudaStream_t stream)
{
	must((int)cuLaunchKernel(kept_kernel(name), 1, 1, 1, 32, 1, 1, 0, (CUstream)stream,
	                         arguments, NULL),
	     name);
}

void kept_copy(void *to, const void *from, size_t bytes, cudaStream_t stream)
{
	uint64_t target = (uintptr_t)to, source = (uintptr_t)from, size = bytes;
	kept_launch("softcuda_copy", (void *[]){&target, &source, &size}, stream);
}
