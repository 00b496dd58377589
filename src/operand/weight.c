/* The forms that the kernels for few tokens take: see weight.h. */
#include "operand/weight.h"

#include <cublas_v2.h>
#include <stddef.h>
#include <string.h>

#define WORD(field) (offsetof(struct qs_weight, field) / sizeof(uint32_t))
#define BIT(field)  (1u << WORD(field))

_Static_assert(sizeof(struct qs_weight) == QS_HASH_IMAGE * sizeof(uint32_t),
               "a descriptor is what the cache takes for one");

bool qs_weight_of(const struct qs_gemm *g, struct qs_matrix *weight)
{
	const struct qs_key *key = &g->key;
	const bool turned = key->ta == CUBLAS_OP_N;
	if (key->role == QS_ROLE_WGRAD || key->tb != CUBLAS_OP_N)
		return false;
	*weight = (struct qs_matrix){
	        .data = g->a,
	        .rows = turned ? key->k : key->m,
	        .cols = turned ? key->m : key->k,
	        .ld = key->lda,
	};
	return true;
}

static bool has_tiles(const struct qs_matrix *source)
{
	return source->cols % QS_WEIGHT_TILE == 0;
}

static bool nf4_size(const struct qs_matrix *source, struct qs_form_size *size)
{
	*size = (struct qs_form_size){.data = (size_t)qs_nf4_bytes(source->rows, source->cols)};
	return has_tiles(source);
}

static bool fp8_size(const struct qs_matrix *source, struct qs_form_size *size)
{
	*size = (struct qs_form_size){
	        .data = (size_t)qs_fp8_bytes(source->rows, source->cols),
	        .scale = (size_t)source->rows * sizeof(float),
	};
	return has_tiles(source);
}

static CUresult pack(CUfunction function, const struct qs_context *context, CUstream stream,
                     const struct qs_making *making)
{
	const struct qs_matrix *source = &making->source;
	struct qs_pack_args args = {
	        .source = (uint64_t)(uintptr_t)source->data,
	        .packed = making->data,
	        .scale = making->scale,
	        .weight = making->descriptor,
	        .ld = source->ld,
	        .n = source->rows,
	        .k = source->cols,
	        .when = making->work ? making->work + offsetof(struct qs_hash_work, stale) : 0,
	};
	void *arguments[] = {&args};
	const uint32_t blocks = qs_pack_blocks(source->rows, source->cols, context->sms);
	return qs_driver_get()->cuLaunchKernel(function, blocks, 1, 1, QS_PACK_THREADS, 1, 1, 0,
	                                       stream, arguments, NULL);
}

static CUresult nf4_make(const struct qs_context *context, CUstream stream,
                         const struct qs_making *making)
{
	return pack(context->nf4_pack, context, stream, making);
}

static CUresult fp8_make(const struct qs_context *context, CUstream stream,
                         const struct qs_making *making)
{
	return pack(context->fp8_pack, context, stream, making);
}

static void describe(const struct qs_making *making, uint32_t image[QS_HASH_IMAGE])
{
	const struct qs_weight weight = {
	        .packed = making->data,
	        .scale = making->scale,
	        .outcome = making->outcome,
	};
	memcpy(image, &weight, sizeof weight);
}

static CUfunction nf4_sample(const struct qs_context *context, uint32_t *flags)
{
	*flags = 0;
	return context->nf4_sample;
}

const struct qs_form qs_form_nf4 = {
        .kind = QS_FORM_NF4,
        .size = nf4_size,
        .make = nf4_make,
        .sample = nf4_sample,
        .describe = describe,
        .valid = WORD(valid),
        .failed = WORD(failed),
        .reset = BIT(valid) | BIT(failed) | BIT(amax) | BIT(nonfinite),
        .finite = true,
};

const struct qs_form qs_form_fp8_tiles = {
        .kind = QS_FORM_FP8_TILES,
        .size = fp8_size,
        .make = fp8_make,
        .describe = describe,
        .valid = WORD(valid),
        .failed = WORD(failed),
        .reset = BIT(valid) | BIT(failed) | BIT(amax) | BIT(nonfinite),
        .finite = true,
};
