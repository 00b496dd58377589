/* Launches the kernels for few tokens: see thin.h. */
#include "engine/thin.h"

#include <cublasLt.h>

#include "kernels/map.h"

/* Bits of cublasLtEpilogue_t that are understood here; 1 is "none". */
#define EPILOGUES                                                                                  \
	(CUBLASLT_EPILOGUE_DEFAULT | CUBLASLT_EPILOGUE_BIAS | CUBLASLT_EPILOGUE_RELU |             \
	 CUBLASLT_EPILOGUE_GELU)

/* With more tokens, expanding the weight and multiplying it in fp8 is faster. */
#define WIDE_MAX 256

/* But for the number of tokens. */
static bool fits(const struct qs_key *key)
{
	const bool bias = key->epilogue & CUBLASLT_EPILOGUE_BIAS;
	return key->ta == CUBLAS_OP_T && key->tb == CUBLAS_OP_N && key->k % QS_WEIGHT_TILE == 0 &&
	       key->in_place && !(key->epilogue & ~EPILOGUES) &&
	       (!bias || key->bias_type == CUDA_R_16BF);
}

static bool is_wide(const struct qs_key *key)
{
	return key->n > QS_TOKENS_MAX;
}

bool qs_thin_fits(const struct qs_gemm *g, const struct qs_context *context)
{
	return context->few_tokens && !is_wide(&g->key) && fits(&g->key);
}

bool qs_thin_fits_nf4(const struct qs_gemm *g, const struct qs_context *context)
{
	const struct qs_key *key = &g->key;
	if (!is_wide(key))
		return qs_thin_fits(g, context);
	return context->many_tokens && key->n <= WIDE_MAX && (key->align & QS_ALIGN_B) && fits(key);
}

static uint32_t activation_of(int32_t epilogue)
{
	return epilogue & CUBLASLT_EPILOGUE_RELU   ? QS_ACTIVATION_RELU
	       : epilogue & CUBLASLT_EPILOGUE_GELU ? QS_ACTIVATION_GELU
	                                           : QS_ACTIVATION_NONE;
}

static uint64_t device(const void *p)
{
	return (uint64_t)(uintptr_t)p;
}

static struct qs_product_args describe(const struct qs_gemm *g, const struct qs_kept_view *weight,
                                       bool sample)
{
	const struct qs_key *key = &g->key;
	return (struct qs_product_args){
	        .weight = weight->descriptor,
	        .packed = weight->data,
	        .scale = weight->scale,
	        .source = device(g->a),
	        .x = device(g->b),
	        .d = device(g->d),
	        .bias = key->epilogue & CUBLASLT_EPILOGUE_BIAS ? device(g->bias) : 0,
	        .ld = key->lda,
	        .ldx = key->ldb,
	        .ldd = key->ldd,
	        .n = key->m,
	        .k = key->k,
	        .alpha = *g->alpha,
	        .beta = key->beta == QS_SCALAR_ZERO ? 0 : *g->beta,
	        .tokens = (uint32_t)key->n,
	        .activation = activation_of(key->epilogue),
	        .flags = (key->dtype == CUDA_R_32F ? QS_PRODUCT_FP32 : 0) |
	                 (sample ? 0 : QS_PRODUCT_FROZEN),
	};
}

/* Beginning early. A product may be launched so that its blocks begin when all blocks of the
 * kernel ahead of it in the stream have ended or given leave, not only when what that kernel
 * wrote is complete and can be seen. The product waits for this itself (griddepcontrol.wait),
 * and until then reads nothing but its parameters and, told so by QS_PRODUCT_EARLY, the first
 * tiles, and writes shared memory only. (It also guesses which rows of W it will compare, and
 * has them brought into the L2 cache: no value is used.) X, D, the bias, W itself, scales, and
 * the descriptor with its word `valid`, which checks, other products and memsets write, come
 * after. So it is to be shown that nothing that writes tiles can be under way when the product
 * begins:
 *
 *   - Tiles are written by what makes the copy: in checks, after samples, and for a call that
 *     has no copy. If one of these was submitted by this call, or before it in any stream, and
 *     is not known to be over, the view is not `settled`, and the product waits as others do.
 *     That a check is over is known to the host by the number that its last kernel writes,
 *     which was launched to begin when the making had ended. So the tiles were complete, in the
 *     memory that multiprocessors share, before the product was launched at all: it does not
 *     matter what is ahead in the stream, whether kernels of the program there give leave
 *     early, or at which of them the product begins. First tiles are not read through the L1
 *     cache, which might hold what was there before.
 *   - Whatever writes tiles later is launched later. In the product's stream it begins when the
 *     product has ended. In another it is no more ordered after a product that began early than
 *     after one that did not: such a check follows a write of W in that stream, and that the
 *     write comes after the product, or the product after the check, is for the program to
 *     arrange.
 *   - A graph begins when what is ahead of it has ended, checks before its launch among it, and
 *     ends before what comes after it begins, the graph itself included. Inside, tiles are
 *     written only where a check of the copy was captured, and a copy that any capture checks
 *     is not settled.
 *
 * The kernel after the product may begin early in turn, when each block of the product has
 * waited. It too must wait itself, for the product, and thereby for all that is ahead of that. */
static bool may_load_early(const struct qs_context *context, const struct qs_stream *stream,
                           const struct qs_kept_view *weight)
{
	return weight->settled && qs_may_begin_early(context, stream);
}

/* Room for a launch's attributes; returns how many there are. */
#define ATTRIBUTES 2

static unsigned attributes_of(const struct qs_product_args *args,
                              const struct qs_product_geometry *geometry,
                              CUlaunchAttribute attributes[ATTRIBUTES])
{
	unsigned count = 0;
	if (geometry->cluster > 1) {
		CUlaunchAttribute *cluster = &attributes[count++];
		cluster->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
		cluster->value.clusterDim.x = geometry->cluster;
		cluster->value.clusterDim.y = cluster->value.clusterDim.z = 1;
	}
	if (args->flags & QS_PRODUCT_EARLY) {
		CUlaunchAttribute *early = &attributes[count++];
		early->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
		early->value.programmaticStreamSerializationAllowed = 1;
	}
	return count;
}

static CUresult launch(CUfunction function, const struct qs_product_geometry *geometry,
                       struct qs_mapped_args *args, const struct qs_stream *stream)
{
	void *arguments[] = {args};
	CUlaunchAttribute attributes[ATTRIBUTES] = {{0}};
	const CUlaunchConfig config = {
	        .gridDimX = geometry->blocks,
	        .gridDimY = 1,
	        .gridDimZ = 1,
	        .blockDimX = geometry->threads,
	        .blockDimY = 1,
	        .blockDimZ = 1,
	        .sharedMemBytes = geometry->shared,
	        .hStream = stream->handle,
	        .attrs = attributes,
	        .numAttrs = attributes_of(&args->product, geometry, attributes),
	};
	return qs_driver_get()->cuLaunchKernelEx(&config, function, arguments, NULL);
}

static CUresult run_wide(const struct qs_context *context, const struct qs_stream *stream,
                         const struct qs_product_args *product)
{
	struct qs_mapped_args args = {.product = *product};
	const struct qs_product_geometry geometry = qs_wide_plan(&args.product, &context->products);
	const CUresult error =
	        qs_wide_map(qs_driver_get()->cuTensorMapEncodeTiled, &args, geometry.kind);
	return error ? error : launch(context->wide[geometry.kind], &geometry, &args, stream);
}

static CUresult run_thin(const struct qs_context *context, const struct qs_stream *stream,
                         const struct qs_product_args *product, bool fp8)
{
	struct qs_mapped_args args = {.product = *product};
	const struct qs_product_geometry geometry =
	        qs_product_plan(&args.product, fp8, &context->products);
	if (context->products.hopper)
		qs_thin_map(qs_driver_get()->cuTensorMapEncodeTiled, &args, geometry.kind);
	const CUfunction function = (fp8 ? context->w8a16 : context->w4a16)[geometry.kind];
	return launch(function, &geometry, &args, stream);
}

CUresult qs_thin_run(const struct qs_context *context, const struct qs_stream *stream,
                     const struct qs_gemm *g, enum qs_form_kind kind,
                     const struct qs_kept_view *weight, bool sample)
{
	struct qs_product_args args = describe(g, weight, sample);
	if (may_load_early(context, stream, weight))
		args.flags |= QS_PRODUCT_EARLY;
	if (is_wide(&g->key))
		return run_wide(context, stream, &args);
	return run_thin(context, stream, &args, kind == QS_FORM_FP8_TILES);
}
