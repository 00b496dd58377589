/* The forms of kept copies. Those for cuBLASLt: e4m3 with one scale for the matrix, as it lies or
 * transposed, by the kernel that repairs predictions (kernels/quantise.h): given a partial that
 * says "cast with no prediction" it casts, given one whose prediction holds it leaves all as it is.
 * The judge of the hash (kernels/hash.h) writes the one or the other, so the device decides.
 */
#include <stddef.h>

#include "kernels/sample.h"
#include "operand/cache.h"

static struct qs_quantise_operand operand_of(const struct qs_matrix *source)
{
	return (struct qs_quantise_operand){
	        .source = (uintptr_t)source->data,
	        .ld = source->ld,
	        .inner = source->cols,
	        .outer = source->rows,
	        .format = QS_FP8_E4M3,
	};
}

static bool size_straight(const struct qs_matrix *source, struct qs_form_size *size)
{
	const struct qs_quantise_operand operand = operand_of(source);
	*size = (struct qs_form_size){(size_t)qs_straight_bytes(&operand), sizeof(float)};
	return true;
}

static bool size_turned(const struct qs_matrix *source, struct qs_form_size *size)
{
	const struct qs_quantise_operand operand = operand_of(source);
	*size = (struct qs_form_size){(size_t)qs_turned_bytes(&operand), sizeof(float)};
	return true;
}

/* As many blocks as a cast takes, although nearly always they have nothing to do. */
static CUresult make(const struct qs_context *context, CUstream stream,
                     const struct qs_making *making, bool turned)
{
	struct qs_quantise_args args = {.operand = {operand_of(&making->source)}};
	struct qs_quantise_operand *operand = &args.operand[0];
	void *arguments[] = {&args};
	*(turned ? &operand->turned : &operand->straight) = making->data;
	operand->scale = making->scale;
	operand->partials = making->work + offsetof(struct qs_hash_work, repair);
	qs_quantise_plan(operand, context->sms);
	operand->blocks[0] = 1; /* the one that left the partial */
	return qs_driver_get()->cuLaunchKernel(context->repair, operand->blocks[1], 1, 1,
	                                       QS_QUANTISE_THREADS, 1, 1, 0, stream, arguments,
	                                       NULL);
}

static CUresult make_straight(const struct qs_context *context, CUstream stream,
                              const struct qs_making *making)
{
	return make(context, stream, making, false);
}

static CUresult make_turned(const struct qs_context *context, CUstream stream,
                            const struct qs_making *making)
{
	return make(context, stream, making, true);
}

static CUfunction sample_straight(const struct qs_context *context, uint32_t *flags)
{
	*flags = 0;
	return context->fp8_sample;
}

static CUfunction sample_turned(const struct qs_context *context, uint32_t *flags)
{
	*flags = QS_SAMPLE_TURNED;
	return context->fp8_sample;
}

const struct qs_form qs_form_fp8 = {
        .kind = QS_FORM_FP8,
        .size = size_straight,
        .make = make_straight,
        .sample = sample_straight,
};

const struct qs_form qs_form_fp8_turned = {
        .kind = QS_FORM_FP8_TURNED,
        .size = size_turned,
        .make = make_turned,
        .sample = sample_turned,
};
