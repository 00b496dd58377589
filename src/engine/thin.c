/* Launches the kernels for few tokens: see thin.h. */
#include "engine/thin.h"

#include <cublasLt.h>

/* Bits of cublasLtEpilogue_t that are understood here; 1 is "none". */
#define EPILOGUES                                                                                  \
	(CUBLASLT_EPILOGUE_DEFAULT | CUBLASLT_EPILOGUE_BIAS | CUBLASLT_EPILOGUE_RELU |             \
	 CUBLASLT_EPILOGUE_GELU)

bool qs_thin_fits(const struct qs_gemm *g, const struct qs_context *context)
{
	const struct qs_key *key = &g->key;
	const bool bias = key->epilogue & CUBLASLT_EPILOGUE_BIAS;
	return context->few_tokens && key->ta == CUBLAS_OP_T && key->tb == CUBLAS_OP_N &&
	       key->n <= QS_TOKENS_MAX && key->k % QS_WEIGHT_TILE == 0 && key->in_place &&
	       !(key->epilogue & ~EPILOGUES) && (!bias || key->bias_type == CUDA_R_16BF);
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

CUresult qs_thin_run(const struct qs_context *context, CUstream stream, const struct qs_gemm *g,
                     enum qs_form_kind kind, const struct qs_kept_view *weight, bool sample)
{
	struct qs_product_args args = describe(g, weight, sample);
	void *arguments[] = {&args};
	const bool fp8 = kind == QS_FORM_FP8_TILES;
	const struct qs_product_geometry geometry = qs_product_plan(&args, fp8, &context->products);
	CUlaunchAttribute cluster = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION};
	cluster.value.clusterDim.x = geometry.cluster;
	cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1;
	const CUlaunchConfig config = {
	        .gridDimX = geometry.blocks,
	        .gridDimY = 1,
	        .gridDimZ = 1,
	        .blockDimX = geometry.threads,
	        .blockDimY = 1,
	        .blockDimZ = 1,
	        .sharedMemBytes = geometry.shared,
	        .hStream = stream,
	        .attrs = &cluster,
	        .numAttrs = geometry.cluster > 1,
	};
	const CUfunction function = (fp8 ? context->w8a16 : context->w4a16)[geometry.kind];
	return qs_driver_get()->cuLaunchKernelEx(&config, function, arguments, NULL);
}
