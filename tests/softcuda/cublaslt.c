/* libcublasLt: descriptors, heuristics and cublasLtMatmul. Descriptors have their attributes in
 * tables; a call is turned into one struct sc_product and then checked twice: does it make sense
 * (status 7), and would this library do it on this device (status 15). The heuristic asks the same
 * two questions, so it never offers what the product would refuse but for pointers. */
#include "tests/softcuda/inside.h"

#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#define MAGIC_DESC       0x5cde5c00u
#define MAGIC_LAYOUT     0x5c1a5c00u
#define MAGIC_PREFERENCE 0x5c9ef500u
#define MAGIC_ALGO       0x5ca16000u

/* Lives in the caller's cublasLtMatmulDescOpaque_t when that is initialised in place. */
struct desc {
	uint32_t magic;
	int32_t compute, scale_type, pointer_mode; /* as created; where alpha and beta are     */
	int32_t ta, tb, tc, fill;                  /* cublasOperation_t, cublasFillMode_t      */
	uint32_t epilogue;                         /* cublasLtEpilogue_t                       */
	int32_t bias_type, aux_type;               /* cudaDataType_t, -1 = as D                */
	int32_t sm_count;                          /* hint                                     */
	int32_t scale_mode[4], aux_scale_mode;     /* of A B C D                               */
	int8_t fast;                               /* accumulation; the sums here do not care  */
	void *bias, *aux;                          /* device pointers                          */
	int64_t bias_stride, aux_ld, aux_stride, alpha_stride; /* elements                     */
	void *scale[4], *amax, *aux_scale, *aux_amax;          /* device pointers              */
};

struct layout {
	uint32_t magic;
	uint32_t type;        /* cudaDataType_t            */
	int32_t order, batch; /* cublasLtOrder_t, products */
	uint64_t rows, cols;  /* elements                  */
	int64_t ld, stride;   /* elements                  */
	int64_t plane;        /* complex: must be 0        */
};

struct preference {
	uint32_t magic;
	uint32_t mode, reduction, align[4]; /* all searches are the same; bytes of A B C D */
	float waves;                        /* ignored                                     */
	uint64_t workspace, impl;           /* most bytes; ignored                         */
};

/* What the opaque algorithm holds. */
struct algo {
	uint32_t magic;
	uint32_t id;        /* 0 wants a workspace, 1 does not             */
	uint32_t type[4];   /* of A B C D: it is good for these only       */
	uint64_t workspace; /* bytes                                       */
};

_Static_assert(sizeof(struct desc) <= sizeof(cublasLtMatmulDescOpaque_t), "desc");
_Static_assert(sizeof(struct layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "layout");
_Static_assert(sizeof(struct preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "pref");
_Static_assert(sizeof(struct algo) <= sizeof(cublasLtMatmulAlgo_t), "algo");

static struct {
	const char *name;
	long count;
} calls[] = {
        {"cublasLtMatmul", 0},
        {"cublasLtMatmulAlgoGetHeuristic", 0},
        {"cublasLtCreate", 0},
};

long softcuda_cublaslt_calls(const char *function)
{
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
		if (!strcmp(calls[i].name, function))
			return calls[i].count;
	return -1;
}

static long version(void)
{
	return SOFTCUDA_MAJOR == 12 ? softcuda_knobs.cublaslt12_version
	                            : softcuda_knobs.cublaslt_version;
}

size_t CUBLASWINAPI cublasLtGetVersion(void)
{
	return (size_t)version();
}

size_t CUBLASWINAPI cublasLtGetCudartVersion(void)
{
	return SOFTCUDA_MAJOR * 1000;
}

cublasStatus_t CUBLASWINAPI cublasLtGetProperty(libraryPropertyType type, int *value)
{
	long v = version();
	if (!value)
		return CUBLAS_STATUS_INVALID_VALUE;
	switch (type) {
	case MAJOR_VERSION:
		*value = (int)(v / 10000);
		return CUBLAS_STATUS_SUCCESS;
	case MINOR_VERSION:
		*value = (int)(v / 100 % 100);
		return CUBLAS_STATUS_SUCCESS;
	case PATCH_LEVEL:
		*value = (int)(v % 100);
		return CUBLAS_STATUS_SUCCESS;
	default:
		return CUBLAS_STATUS_INVALID_VALUE;
	}
}

static const struct {
	cublasStatus_t status;
	const char *name, *text;
} statuses[] = {
        {CUBLAS_STATUS_SUCCESS, "CUBLAS_STATUS_SUCCESS", "success"},
        {CUBLAS_STATUS_NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED",
         "the library was not initialized"},
        {CUBLAS_STATUS_ALLOC_FAILED, "CUBLAS_STATUS_ALLOC_FAILED",
         "the resource allocation failed"},
        {CUBLAS_STATUS_INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE",
         "an unsupported value or parameter was passed to the function"},
        {CUBLAS_STATUS_ARCH_MISMATCH, "CUBLAS_STATUS_ARCH_MISMATCH",
         "the requested feature is not supported by the device"},
        {CUBLAS_STATUS_EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED",
         "the function failed to launch on the GPU"},
        {CUBLAS_STATUS_INTERNAL_ERROR, "CUBLAS_STATUS_INTERNAL_ERROR",
         "an internal operation failed"},
        {CUBLAS_STATUS_NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED",
         "the functionality requested is not supported"},
};

const char *CUBLASWINAPI cublasLtGetStatusName(cublasStatus_t status)
{
	for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
		if (statuses[i].status == status)
			return statuses[i].name;
	return "CUBLAS_STATUS_UNKNOWN";
}

const char *CUBLASWINAPI cublasLtGetStatusString(cublasStatus_t status)
{
	for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
		if (statuses[i].status == status)
			return statuses[i].text;
	return "unknown status";
}

static struct sc_handle *own(cublasLtHandle_t handle)
{
	struct sc_handle *h = (struct sc_handle *)handle;
	return h && h->magic == SC_HANDLE ? h : NULL;
}

cublasStatus_t CUBLASWINAPI cublasLtCreate(cublasLtHandle_t *handle)
{
	CUcontext context = NULL;
	softcuda_count(&calls[2].count);
	if (!handle)
		return CUBLAS_STATUS_INVALID_VALUE;
	if (cudaFree(NULL) || cuCtxGetCurrent(&context)) /* makes a context current */
		return CUBLAS_STATUS_NOT_INITIALIZED;
	struct sc_handle *h = calloc(1, sizeof *h);
	if (!h)
		return CUBLAS_STATUS_ALLOC_FAILED;
	*h = (struct sc_handle){.magic = SC_HANDLE, .context = context};
	*handle = (cublasLtHandle_t)h;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasLtDestroy(cublasLtHandle_t handle)
{
	struct sc_handle *h = own(handle);
	if (!h || h->blas)
		return CUBLAS_STATUS_NOT_INITIALIZED;
	h->magic = 0;
	free(h);
	return CUBLAS_STATUS_SUCCESS;
}

/* Attributes: number, place, size, and the version that introduced them. */
struct attribute {
	int number;
	size_t offset, size;
	long since;
};

#define DESC(number, field, since)                                                                 \
	{                                                                                          \
		number, offsetof(struct desc, field), sizeof(((struct desc *)0)->field), since     \
	}
static const struct attribute desc_attributes[] = {
        DESC(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, compute, 0),
        DESC(CUBLASLT_MATMUL_DESC_SCALE_TYPE, scale_type, 0),
        DESC(CUBLASLT_MATMUL_DESC_POINTER_MODE, pointer_mode, 0),
        DESC(CUBLASLT_MATMUL_DESC_TRANSA, ta, 0),
        DESC(CUBLASLT_MATMUL_DESC_TRANSB, tb, 0),
        DESC(CUBLASLT_MATMUL_DESC_TRANSC, tc, 0),
        DESC(CUBLASLT_MATMUL_DESC_FILL_MODE, fill, 0),
        DESC(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue, 0),
        DESC(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias, 0),
        DESC(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, bias_stride, 0),
        DESC(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux, 0),
        DESC(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_ld, 0),
        DESC(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, aux_stride, 0),
        DESC(CUBLASLT_MATMUL_DESC_ALPHA_VECTOR_BATCH_STRIDE, alpha_stride, 0),
        DESC(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, sm_count, 0),
        DESC(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scale[0], 110800),
        DESC(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scale[1], 110800),
        DESC(CUBLASLT_MATMUL_DESC_C_SCALE_POINTER, scale[2], 110800),
        DESC(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, scale[3], 110800),
        DESC(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, amax, 110800),
        DESC(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, aux_type, 110800),
        DESC(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_POINTER, aux_scale, 110800),
        DESC(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_AMAX_POINTER, aux_amax, 110800),
        DESC(CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast, 110800),
        DESC(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type, 110800),
        DESC(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode[0], 120800),
        DESC(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode[1], 120800),
        DESC(CUBLASLT_MATMUL_DESC_C_SCALE_MODE, scale_mode[2], 120800),
        DESC(CUBLASLT_MATMUL_DESC_D_SCALE_MODE, scale_mode[3], 120800),
        DESC(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_MODE, aux_scale_mode, 120800),
};
#undef DESC
#define LAYOUT(number, field)                                                                      \
	{                                                                                          \
		number, offsetof(struct layout, field), sizeof(((struct layout *)0)->field), 0     \
	}
static const struct attribute layout_attributes[] = {
        LAYOUT(CUBLASLT_MATRIX_LAYOUT_TYPE, type),
        LAYOUT(CUBLASLT_MATRIX_LAYOUT_ORDER, order),
        LAYOUT(CUBLASLT_MATRIX_LAYOUT_ROWS, rows),
        LAYOUT(CUBLASLT_MATRIX_LAYOUT_COLS, cols),
        LAYOUT(CUBLASLT_MATRIX_LAYOUT_LD, ld),
        LAYOUT(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batch),
        LAYOUT(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride),
        LAYOUT(CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET, plane),
};
#undef LAYOUT
#define PREFERENCE(number, field)                                                                  \
	{                                                                                          \
		number, offsetof(struct preference, field),                                        \
		        sizeof(((struct preference *)0)->field), 0                                 \
	}
static const struct attribute preference_attributes[] = {
        PREFERENCE(CUBLASLT_MATMUL_PREF_SEARCH_MODE, mode),
        PREFERENCE(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace),
        PREFERENCE(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction),
        PREFERENCE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align[0]),
        PREFERENCE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align[1]),
        PREFERENCE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align[2]),
        PREFERENCE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align[3]),
        PREFERENCE(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, waves),
        PREFERENCE(CUBLASLT_MATMUL_PREF_IMPL_MASK, impl),
};
#undef PREFERENCE

/* The attributes of one kind of object, which begins with its magic number. */
struct kind {
	uint32_t magic;
	const struct attribute *attributes;
	size_t count;
};
static const struct kind desc_kind = {MAGIC_DESC, desc_attributes,
                                      sizeof desc_attributes / sizeof *desc_attributes};
static const struct kind layout_kind = {MAGIC_LAYOUT, layout_attributes,
                                        sizeof layout_attributes / sizeof *layout_attributes};
static const struct kind preference_kind = {MAGIC_PREFERENCE, preference_attributes,
                                            sizeof preference_attributes /
                                                    sizeof *preference_attributes};

static const struct attribute *find(const struct kind *kind, const void *object, int number)
{
	if (!object || *(const uint32_t *)object != kind->magic)
		return NULL;
	for (size_t i = 0; i < kind->count; i++)
		if (kind->attributes[i].number == number && kind->attributes[i].since <= version())
			return &kind->attributes[i];
	return NULL;
}

static cublasStatus_t set(const struct kind *kind, void *object, int number, const void *value,
                          size_t size)
{
	const struct attribute *a = find(kind, object, number);
	if (!a || !value || size != a->size)
		return CUBLAS_STATUS_INVALID_VALUE;
	memcpy((char *)object + a->offset, value, size);
	return CUBLAS_STATUS_SUCCESS;
}

/* With size 0, only tells the size. */
static cublasStatus_t get(const struct kind *kind, const void *object, int number, void *value,
                          size_t size, size_t *written)
{
	const struct attribute *a = find(kind, object, number);
	if (!a || (size && (!value || size < a->size)) || (!size && !written))
		return CUBLAS_STATUS_INVALID_VALUE;
	if (written)
		*written = a->size;
	if (size)
		memcpy(value, (const char *)object + a->offset, a->size);
	return CUBLAS_STATUS_SUCCESS;
}

/* Memory for an object; the caller initialises it. */
static cublasStatus_t create(void *handle, size_t size)
{
	void *object = calloc(1, size);
	if (handle && object) {
		memcpy(handle, &object, sizeof object);
		return CUBLAS_STATUS_SUCCESS;
	}
	free(object);
	return handle ? CUBLAS_STATUS_ALLOC_FAILED : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t size,
                                                            cublasComputeType_t compute,
                                                            cudaDataType_t scale_type)
{
	if (!desc || size < sizeof(struct desc))
		return CUBLAS_STATUS_INVALID_VALUE;
	*(struct desc *)desc = (struct desc){.magic = MAGIC_DESC,
	                                     .compute = compute,
	                                     .scale_type = (int32_t)scale_type,
	                                     .fill = CUBLAS_FILL_MODE_FULL,
	                                     .epilogue = CUBLASLT_EPILOGUE_DEFAULT,
	                                     .bias_type = -1,
	                                     .aux_type = -1};
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc,
                                                     cublasComputeType_t compute,
                                                     cudaDataType_t scale_type)
{
	cublasStatus_t status = create(desc, sizeof(cublasLtMatmulDescOpaque_t));
	softcuda_count(&softcuda_counters.descs);
	return status ? status
	              : cublasLtMatmulDescInit_internal(*desc, sizeof **desc, compute, scale_type);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
	softcuda_count(&softcuda_counters.descs_destroyed);
	free(desc);
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                                           cublasLtMatmulDescAttributes_t number,
                                                           const void *value, size_t size)
{
	return set(&desc_kind, desc, (int)number, value, size);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t desc,
                                                           cublasLtMatmulDescAttributes_t number,
                                                           void *value, size_t size,
                                                           size_t *written)
{
	return get(&desc_kind, desc, (int)number, value, size, written);
}

cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout,
                                                              size_t size, cudaDataType type,
                                                              uint64_t rows, uint64_t cols,
                                                              int64_t ld)
{
	if (!layout || size < sizeof(struct layout))
		return CUBLAS_STATUS_INVALID_VALUE;
	*(struct layout *)layout = (struct layout){.magic = MAGIC_LAYOUT,
	                                           .type = (uint32_t)type,
	                                           .order = CUBLASLT_ORDER_COL,
	                                           .batch = 1,
	                                           .rows = rows,
	                                           .cols = cols,
	                                           .ld = ld};
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout,
                                                       cudaDataType type, uint64_t rows,
                                                       uint64_t cols, int64_t ld)
{
	cublasStatus_t status = create(layout, sizeof(cublasLtMatrixLayoutOpaque_t));
	return status ? status
	              : cublasLtMatrixLayoutInit_internal(*layout, sizeof **layout, type, rows,
	                                                  cols, ld);
}

cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
	free(layout);
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                             cublasLtMatrixLayoutAttribute_t number,
                                                             const void *value, size_t size)
{
	return set(&layout_kind, layout, (int)number, value, size);
}

cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                             cublasLtMatrixLayoutAttribute_t number,
                                                             void *value, size_t size,
                                                             size_t *written)
{
	return get(&layout_kind, layout, (int)number, value, size, written);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t pref,
                                                                  size_t size)
{
	if (!pref || size < sizeof(struct preference))
		return CUBLAS_STATUS_INVALID_VALUE;
	*(struct preference *)pref = (struct preference){.magic = MAGIC_PREFERENCE,
	                                                 .reduction = UINT32_MAX,
	                                                 .align = {256, 256, 256, 256},
	                                                 .impl = UINT64_MAX};
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *pref)
{
	cublasStatus_t status = create(pref, sizeof(cublasLtMatmulPreferenceOpaque_t));
	return status ? status : cublasLtMatmulPreferenceInit_internal(*pref, sizeof **pref);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t pref)
{
	free(pref);
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceSetAttribute(
        cublasLtMatmulPreference_t pref, cublasLtMatmulPreferenceAttributes_t number,
        const void *value, size_t size)
{
	return set(&preference_kind, pref, (int)number, value, size);
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceGetAttribute(
        cublasLtMatmulPreference_t pref, cublasLtMatmulPreferenceAttributes_t number, void *value,
        size_t size, size_t *written)
{
	return get(&preference_kind, pref, (int)number, value, size, written);
}

/* A product as asked for: what both the heuristic and the product look at. */
struct question {
	const struct desc *desc;
	const struct layout *layout[4]; /* of A B C D             */
	bool narrow;                    /* A or B is fp8           */
	struct sc_product product;      /* pointers still missing  */
};

static bool is_fp8(uint32_t type)
{
	return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

static bool valid_layout(const struct layout *l)
{
	if (!l || l->magic != MAGIC_LAYOUT || l->batch < 1)
		return false;
	if (l->order == CUBLASLT_ORDER_COL)
		return l->ld >= (int64_t)l->rows;
	return l->order != CUBLASLT_ORDER_ROW || l->ld >= (int64_t)l->cols;
}

static struct sc_matrix matrix(const struct layout *l, bool transposed)
{
	bool by_row = l->order == CUBLASLT_ORDER_ROW;
	return (struct sc_matrix){.row = by_row != transposed ? l->ld : 1,
	                          .column = by_row != transposed ? 1 : l->ld,
	                          .stride = l->stride,
	                          .type = l->type};
}

/* Epilogues as an activation and a flag for the bias; false for those that are not done. */
static bool read_epilogue(uint32_t epilogue, uint32_t *activation, bool *bias)
{
	static const struct {
		uint32_t epilogue, activation;
		bool bias;
	} known[] = {
	        {CUBLASLT_EPILOGUE_DEFAULT, SC_NONE, false},
	        {CUBLASLT_EPILOGUE_BIAS, SC_NONE, true},
	        {CUBLASLT_EPILOGUE_RELU, SC_RELU, false},
	        {CUBLASLT_EPILOGUE_RELU_BIAS, SC_RELU, true},
	        {CUBLASLT_EPILOGUE_GELU, SC_GELU, false},
	        {CUBLASLT_EPILOGUE_GELU_BIAS, SC_GELU, true},
	        {CUBLASLT_EPILOGUE_GELU_AUX, SC_GELU_AUX, false},
	        {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, SC_GELU_AUX, true},
	        {CUBLASLT_EPILOGUE_DGELU, SC_DGELU, false},
	};
	for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
		if (known[i].epilogue != epilogue)
			continue;
		*activation = known[i].activation;
		*bias = known[i].bias;
		return true;
	}
	return false;
}

static bool has_bias(const struct desc *d)
{
	uint32_t activation;
	bool bias;
	return read_epilogue(d->epilogue, &activation, &bias) && bias;
}

/* m, n, k from the layouts; false if they do not fit together. */
static bool read_shape(struct question *q)
{
	const struct desc *d = q->desc;
	const struct layout *a = q->layout[0], *b = q->layout[1], *c = q->layout[2],
	                    *out = q->layout[3];
	bool ta = d->ta != CUBLAS_OP_N, tb = d->tb != CUBLAS_OP_N;
	struct sc_product *p = &q->product;
	p->m = (int64_t)out->rows;
	p->n = (int64_t)out->cols;
	p->k = (int64_t)(ta ? a->rows : a->cols);
	p->batch = out->batch;
	return (int64_t)(ta ? a->cols : a->rows) == p->m &&
	       (int64_t)(tb ? b->rows : b->cols) == p->n &&
	       (int64_t)(tb ? b->cols : b->rows) == p->k && c->rows == out->rows &&
	       c->cols == out->cols && a->batch == out->batch && b->batch == out->batch &&
	       c->batch == out->batch;
}

static void fill_product(struct question *q)
{
	const struct desc *d = q->desc;
	struct sc_product *p = &q->product;
	bool bias;
	p->a = matrix(q->layout[0], d->ta != CUBLAS_OP_N);
	p->b = matrix(q->layout[1], d->tb != CUBLAS_OP_N);
	p->c = matrix(q->layout[2], false);
	p->d = matrix(q->layout[3], false);
	if (!read_epilogue(d->epilogue, &p->activation, &bias))
		return;
	p->bias = (struct sc_matrix){.row = 1,
	                             .stride = d->bias_stride,
	                             .type = d->bias_type < 0 ? p->d.type : (uint32_t)d->bias_type};
	p->aux = (struct sc_matrix){.row = 1,
	                            .column = d->aux_ld,
	                            .stride = d->aux_stride,
	                            .type = d->aux_type < 0 ? p->d.type : (uint32_t)d->aux_type};
	for (int i = 0; i < 4; i++)
		p->scale[i] = (uint64_t)(uintptr_t)d->scale[i];
	p->outer = d->scale_mode[0] == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
}

/* Status 7: what makes no sense on any device. */
static cublasStatus_t understand(struct question *q, cublasLtMatmulDesc_t desc,
                                 cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                 cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d)
{
	*q = (struct question){.desc = (const struct desc *)desc,
	                       .layout = {(const struct layout *)a, (const struct layout *)b,
	                                  (const struct layout *)c, (const struct layout *)d}};
	if (!q->desc || q->desc->magic != MAGIC_DESC)
		return CUBLAS_STATUS_INVALID_VALUE;
	for (int i = 0; i < 4; i++)
		if (!valid_layout(q->layout[i]))
			return CUBLAS_STATUS_INVALID_VALUE;
	if (!read_shape(q))
		return CUBLAS_STATUS_INVALID_VALUE;
	q->narrow = is_fp8(q->layout[0]->type) || is_fp8(q->layout[1]->type);
	fill_product(q);
	return CUBLAS_STATUS_SUCCESS;
}

static bool plain_compute(const struct desc *d)
{
	switch (d->compute) {
	case CUBLAS_COMPUTE_32F:
	case CUBLAS_COMPUTE_32F_PEDANTIC:
	case CUBLAS_COMPUTE_32F_FAST_16F:
	case CUBLAS_COMPUTE_32F_FAST_16BF:
	case CUBLAS_COMPUTE_32F_FAST_TF32:
		return d->scale_type == CUDA_R_32F;
	default:
		return false;
	}
}

/* What holds for operands of any type. */
static bool supported(const struct question *q)
{
	const struct desc *d = q->desc;
	uint32_t activation;
	bool bias;
	for (int i = 0; i < 4; i++)
		if ((q->layout[i]->order != CUBLASLT_ORDER_COL &&
		     q->layout[i]->order != CUBLASLT_ORDER_ROW) ||
		    q->layout[i]->plane || !sc_type_size(q->layout[i]->type))
			return false;
	return plain_compute(d) && d->tc == CUBLAS_OP_N && d->fill == CUBLAS_FILL_MODE_FULL &&
	       (d->pointer_mode == CUBLASLT_POINTER_MODE_HOST ||
	        d->pointer_mode == CUBLASLT_POINTER_MODE_DEVICE) &&
	       read_epilogue(d->epilogue, &activation, &bias) && !d->amax && !d->aux_scale &&
	       !d->aux_amax && q->layout[2]->order == q->layout[3]->order &&
	       (activation < SC_GELU_AUX || d->aux_ld >= q->product.m);
}

/* bf16, fp16 and fp32: operands alike, output alike or fp32, bias of the output's type, no scales.
 */
static bool supported_wide(const struct question *q)
{
	uint32_t a = q->layout[0]->type, c = q->layout[2]->type, out = q->layout[3]->type;
	for (int i = 0; i < 4; i++)
		if (q->desc->scale[i] || q->desc->scale_mode[i])
			return false;
	return q->layout[1]->type == a && c == out && (out == a || out == CUDA_R_32F) &&
	       (!has_bias(q->desc) || q->product.bias.type == out);
}

static bool outer(const struct question *q, int operand)
{
	return q->desc->scale_mode[operand] == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
}

/* One scale per operand, or outer vectors for both (sm_90, from 12.9). C and D are not fp8 here, so
 * neither may have a scale. */
static bool supported_scales(const struct question *q)
{
	const struct desc *d = q->desc;
	if (d->scale[2] || d->scale[3] || d->scale_mode[2] || d->scale_mode[3])
		return false;
	if (!outer(q, 0) && !outer(q, 1))
		return !d->scale_mode[0] && !d->scale_mode[1];
	return outer(q, 0) && outer(q, 1) && version() >= 120900 &&
	       softcuda_knobs.capability == 90 && q->product.m % 4 == 0;
}

static bool supported_narrow_types(const struct question *q)
{
	uint32_t a = q->layout[0]->type, b = q->layout[1]->type;
	uint32_t c = q->layout[2]->type, out = q->layout[3]->type;
	uint32_t bias = out == CUDA_R_32F ? CUDA_R_16BF : out;
	if (!is_fp8(a) || !is_fp8(b) || (a == CUDA_R_8F_E5M2 && b == CUDA_R_8F_E5M2))
		return false;
	return c == out && !is_fp8(out) && (!has_bias(q->desc) || q->product.bias.type == bias);
}

static bool aligned_narrow(const struct question *q)
{
	for (int i = 0; i < 4; i++)
		if (q->layout[i]->ld * (int64_t)sc_type_size(q->layout[i]->type) % 16)
			return false;
	int64_t bytes = q->product.m * (int64_t)sc_type_size(q->layout[3]->type);
	return !softcuda_knobs.strict || (bytes % 16 == 0 && q->product.k % 16 == 0);
}

/* Only TN, but for the large Blackwells, which cuBLASLt knows from 12.8 on. */
static bool supported_ops(const struct question *q)
{
	return (q->desc->ta == CUBLAS_OP_T && q->desc->tb == CUBLAS_OP_N) ||
	       (softcuda_knobs.capability >= 100 && softcuda_knobs.capability < 120 &&
	        version() >= 120800);
}

static bool supported_narrow(const struct question *q)
{
	bool columns = true;
	for (int i = 0; i < 4; i++)
		columns = columns && q->layout[i]->order == CUBLASLT_ORDER_COL;
	return version() >= 120000 && softcuda_knobs.capability >= 89 && columns &&
	       supported_ops(q) && supported_narrow_types(q) && supported_scales(q) &&
	       aligned_narrow(q);
}

/* Status 15: what this library does not do on this device. */
static cublasStatus_t judge(const struct question *q)
{
	bool good = supported(q) && (q->narrow ? supported_narrow(q) : supported_wide(q));
	return good ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

static bool aligned(const struct question *q, const uint32_t *bytes)
{
	for (int i = 0; i < 4; i++)
		if (bytes[i] % (q->narrow ? 16 : sc_type_size(q->layout[i]->type)))
			return false;
	return true;
}

static void offer(const struct question *q, uint32_t id, uint64_t workspace,
                  cublasLtMatmulHeuristicResult_t *result)
{
	struct algo algo = {.magic = MAGIC_ALGO, .id = id, .workspace = workspace};
	for (int i = 0; i < 4; i++)
		algo.type[i] = q->layout[i]->type;
	*result = (cublasLtMatmulHeuristicResult_t){
	        .workspaceSize = workspace, .state = CUBLAS_STATUS_SUCCESS, .wavesCount = 1.0f};
	memcpy(&result->algo, &algo, sizeof algo);
}

/* Two algorithms: one that wants a workspace, if it may have one, and one that does not. */
#define ALGO_WORKSPACE ((uint64_t)64 << 10)

static int offer_all(const struct question *q, const struct preference *p, int wanted,
                     cublasLtMatmulHeuristicResult_t *results)
{
	int count = 0;
	if (count < wanted && p->workspace >= ALGO_WORKSPACE)
		offer(q, 0, ALGO_WORKSPACE, &results[count++]);
	if (count < wanted)
		offer(q, 1, 0, &results[count++]);
	return count;
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulAlgoGetHeuristic(
        cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
        cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
        cublasLtMatmulPreference_t pref, int wanted, cublasLtMatmulHeuristicResult_t results[],
        int *count)
{
	struct question q;
	const struct preference *p = (const struct preference *)pref;
	softcuda_count(&calls[1].count);
	softcuda_count(&softcuda_counters.heuristics);
	if (!own(handle))
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (!p || p->magic != MAGIC_PREFERENCE || wanted < 1 || !results || !count)
		return CUBLAS_STATUS_INVALID_VALUE;
	*count = 0;
	if (p->reduction &
	    (CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE))
		softcuda_count(&softcuda_counters.loose_heuristics);
	cublasStatus_t status = understand(&q, desc, a, b, c, d);
	if (!status)
		status = judge(&q);
	if (!status && (!aligned(&q, p->align) || softcuda_knobs.heuristics_empty == 1 ||
	                (softcuda_knobs.heuristics_empty && q.narrow)))
		status = CUBLAS_STATUS_NOT_SUPPORTED;
	if (!status)
		*count = offer_all(&q, p, wanted, results);
	return status;
}

/* An algorithm must have been chosen for these types. */
static const struct algo *own_algo(const struct question *q, const cublasLtMatmulAlgo_t *opaque)
{
	const struct algo *algo = (const struct algo *)opaque;
	if (algo->magic != MAGIC_ALGO)
		return NULL;
	for (int i = 0; i < 4; i++)
		if (algo->type[i] != q->layout[i]->type)
			return NULL;
	return algo;
}

cublasStatus_t CUBLASWINAPI cublasLtMatmulAlgoCheck(
        cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
        cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
        const cublasLtMatmulAlgo_t *opaque, cublasLtMatmulHeuristicResult_t *result)
{
	struct question q;
	if (!own(handle))
		return CUBLAS_STATUS_NOT_INITIALIZED;
	if (!opaque || !result)
		return CUBLAS_STATUS_INVALID_VALUE;
	cublasStatus_t status = understand(&q, desc, a, b, c, d);
	if (!status)
		status = judge(&q);
	if (status)
		return status;
	const struct algo *algo = own_algo(&q, opaque);
	if (!algo)
		return CUBLAS_STATUS_INVALID_VALUE;
	offer(&q, algo->id, algo->workspace, result);
	return CUBLAS_STATUS_SUCCESS;
}

static bool misaligned(const struct question *q)
{
	const struct sc_product *p = &q->product;
	const uint64_t pointers[] = {p->a.pointer, p->b.pointer, p->c.pointer, p->d.pointer};
	for (int i = 0; i < 4; i++)
		if (pointers[i] % (q->narrow ? 16 : sc_type_size(q->layout[i]->type)))
			return true;
	/* seen with cuBLASLt 13.1 on sm_90: status 15 for scales 4 bytes apart */
	return q->narrow && (p->scale[0] % 16 || p->scale[1] % 16);
}

/* Pointers and scalars. C is not looked at where a host beta is zero. */
static cublasStatus_t fill_pointers(struct question *q, const void *alpha, const void *a,
                                    const void *b, const void *beta, const void *c, void *d)
{
	struct sc_product *p = &q->product;
	const struct desc *desc = q->desc;
	if (!alpha || !beta)
		return CUBLAS_STATUS_INVALID_VALUE;
	if (desc->pointer_mode == CUBLASLT_POINTER_MODE_HOST) {
		p->alpha = *(const float *)alpha;
		p->beta = *(const float *)beta;
	} else {
		p->alpha_at = (uint64_t)(uintptr_t)alpha;
		p->beta_at = (uint64_t)(uintptr_t)beta;
	}
	bool reads_c = p->beta_at || p->beta != 0;
	p->a.pointer = (uint64_t)(uintptr_t)a;
	p->b.pointer = (uint64_t)(uintptr_t)b;
	p->c.pointer = reads_c ? (uint64_t)(uintptr_t)c : 0;
	p->d.pointer = (uint64_t)(uintptr_t)d;
	p->bias.pointer = has_bias(desc) ? (uint64_t)(uintptr_t)desc->bias : 0;
	p->aux.pointer = p->activation >= SC_GELU_AUX ? (uint64_t)(uintptr_t)desc->aux : 0;
	if (!a || !b || !d || (reads_c && !c) || (has_bias(desc) && !desc->bias) ||
	    (p->activation >= SC_GELU_AUX && !desc->aux) ||
	    (p->outer && (!p->scale[0] || !p->scale[1])))
		return CUBLAS_STATUS_INVALID_VALUE;
	return misaligned(q) ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t fill_workspace(struct question *q, const cublasLtMatmulAlgo_t *opaque,
                                     void *workspace, size_t bytes)
{
	if (!opaque)
		return CUBLAS_STATUS_SUCCESS;
	const struct algo *algo = own_algo(q, opaque);
	if (!algo || algo->workspace > bytes || (algo->workspace && !workspace))
		return CUBLAS_STATUS_INVALID_VALUE;
	q->product.algorithm = algo->id ? SC_SECOND : SC_FIRST;
	q->product.workspace = (uint64_t)(uintptr_t)workspace;
	q->product.workspace_bytes = algo->workspace;
	return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t submit(const struct question *q, CUcontext context, CUstream stream)
{
	if (q->narrow && softcuda_knobs.fail_fp8)
		return (cublasStatus_t)softcuda_knobs.fail_fp8;
	if (!q->product.m || !q->product.n)
		return CUBLAS_STATUS_SUCCESS;
	return sc_product_launch(&q->product, context, stream) ? CUBLAS_STATUS_EXECUTION_FAILED
	                                                       : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                           const void *alpha, const void *a,
                                           cublasLtMatrixLayout_t a_layout, const void *b,
                                           cublasLtMatrixLayout_t b_layout, const void *beta,
                                           const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                                           cublasLtMatrixLayout_t d_layout,
                                           const cublasLtMatmulAlgo_t *algo, void *workspace,
                                           size_t workspace_bytes, cudaStream_t stream)
{
	struct question q;
	if (softcuda_knobs.null_products)
		return handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
	softcuda_count(&calls[0].count);
	if (!own(handle))
		return CUBLAS_STATUS_NOT_INITIALIZED;
	cublasStatus_t status = understand(&q, desc, a_layout, b_layout, c_layout, d_layout);
	if (!status)
		status = judge(&q);
	if (!status)
		status = fill_pointers(&q, alpha, a, b, beta, c, d);
	if (!status)
		status = fill_workspace(&q, algo, workspace, workspace_bytes);
	return status ? status : submit(&q, own(handle)->context, stream);
}
