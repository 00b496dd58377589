/* cublasLtMatmul: the caller's descriptors are opaque and their layout differs between versions, so
 * they are read with the GetAttribute functions of the very copy of cuBLASLt that the caller uses.
 * Each of the two dozen reads costs some 5 ns and they are most of what a passed call costs, so
 * what cannot matter is not read: a bias without its epilogue, scales of operands that are not
 * bf16. */
#include "intercept/intercept.h"

#include "plan/plan.h"

/* Reads one attribute of `size` bytes; false if the library does not know it or answers otherwise.
 */
static bool desc_get(const struct qs_library *library, cublasLtMatmulDesc_t desc,
                     cublasLtMatmulDescAttributes_t attribute, void *value, size_t size)
{
	size_t written = 0;
	return !library->cublasLtMatmulDescGetAttribute(desc, attribute, value, size, &written) &&
	       written == size;
}

static bool layout_get(const struct qs_library *library, cublasLtMatrixLayout_t layout,
                       cublasLtMatrixLayoutAttribute_t attribute, void *value, size_t size)
{
	size_t written = 0;
	return !library->cublasLtMatrixLayoutGetAttribute(layout, attribute, value, size,
	                                                  &written) &&
	       written == size;
}

struct layout {
	uint32_t type;       /* cudaDataType_t                */
	int32_t order;       /* cublasLtOrder_t               */
	int32_t batch;       /* products                      */
	uint64_t rows, cols; /* elements                      */
	int64_t ld;          /* elements                      */
};

static bool read_layout(const struct qs_library *library, cublasLtMatrixLayout_t from,
                        struct layout *layout)
{
	return layout_get(library, from, CUBLASLT_MATRIX_LAYOUT_ORDER, &layout->order,
	                  sizeof layout->order) &&
	       layout_get(library, from, CUBLASLT_MATRIX_LAYOUT_ROWS, &layout->rows,
	                  sizeof layout->rows) &&
	       layout_get(library, from, CUBLASLT_MATRIX_LAYOUT_COLS, &layout->cols,
	                  sizeof layout->cols) &&
	       layout_get(library, from, CUBLASLT_MATRIX_LAYOUT_LD, &layout->ld,
	                  sizeof layout->ld) &&
	       layout_get(library, from, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &layout->batch,
	                  sizeof layout->batch);
}

static uint8_t read_type(const struct qs_library *library, cublasLtMatrixLayout_t from)
{
	uint32_t type = QS_TYPE_NONE;
	if (!from || !layout_get(library, from, CUBLASLT_MATRIX_LAYOUT_TYPE, &type, sizeof type))
		return QS_TYPE_NONE;
	return type < QS_TYPE_NONE ? (uint8_t)type : QS_TYPE_NONE;
}

/* Attributes that must have their neutral value; one that this version does not know has it. A
 * caller that scales its operands or writes a second output wants more than a plain product. */
static bool has_extras(const struct qs_library *library, cublasLtMatmulDesc_t desc)
{
	static const cublasLtMatmulDescAttributes_t pointers[] = {
	        CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
	        CUBLASLT_MATMUL_DESC_C_SCALE_POINTER, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER,
	        CUBLASLT_MATMUL_DESC_AMAX_D_POINTER,
	};
	for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++) {
		void *pointer = NULL;
		if (desc_get(library, desc, pointers[i], &pointer, sizeof pointer) && pointer)
			return true;
	}
	return false;
}

/* No bias pointer: cuBLASLt's to refuse, and no earlier call's bias must be used. No type means
 * that of D (cublasLt.h, BIAS_DATA_TYPE). */
static void read_bias(struct qs_gemm *g, cublasLtMatmulDesc_t desc)
{
	const void *bias = NULL;
	int32_t type = -1;
	desc_get(g->library, desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
	desc_get(g->library, desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type);
	g->bias = bias;
	g->key.bias_type = type < 0 ? g->key.dtype : (uint8_t)type;
	if (!bias)
		g->key.odd |= QS_ODD_ATTR;
}

/* Transposes, compute and scale types, pointer mode, epilogue and bias. False = unreadable. */
static bool read_desc(struct qs_gemm *g, cublasLtMatmulDesc_t desc)
{
	const struct qs_library *library = g->library;
	int32_t ta, tb, compute, scale, mode;
	uint32_t epilogue;
	if (!desc_get(library, desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta) ||
	    !desc_get(library, desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb) ||
	    !desc_get(library, desc, CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, &compute, sizeof compute) ||
	    !desc_get(library, desc, CUBLASLT_MATMUL_DESC_SCALE_TYPE, &scale, sizeof scale) ||
	    !desc_get(library, desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode) ||
	    !desc_get(library, desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue))
		return false;
	g->key.ta = (uint8_t)ta;
	g->key.tb = (uint8_t)tb;
	g->key.compute = compute;
	g->key.scale_type = scale;
	g->key.epilogue = (int32_t)epilogue;
	if (epilogue & CUBLASLT_EPILOGUE_BIAS)
		read_bias(g, desc);
	if (mode != CUBLASLT_POINTER_MODE_HOST)
		g->key.alpha = g->key.beta = QS_SCALAR_DEVICE;
	if (g->key.atype == CUDA_R_16BF && has_extras(library, desc))
		g->key.odd |= QS_ODD_ATTR;
	return true;
}

/* m, n, k and leading dimensions from the four layouts; false if they do not fit together. */
static bool fit(struct qs_key *key, const struct layout *a, const struct layout *b,
                const struct layout *c, const struct layout *d)
{
	bool nota = key->ta == CUBLAS_OP_N, notb = key->tb == CUBLAS_OP_N;
	uint64_t m = nota ? a->rows : a->cols, ka = nota ? a->cols : a->rows;
	uint64_t n = notb ? b->cols : b->rows, kb = notb ? b->rows : b->cols;
	key->m = (int64_t)m;
	key->n = (int64_t)n;
	key->k = (int64_t)ka;
	key->lda = a->ld;
	key->ldb = b->ld;
	key->ldc = c->ld;
	key->ldd = d->ld;
	key->batch = a->batch;
	return ka == kb && d->rows == m && d->cols == n && c->rows == m && c->cols == n &&
	       a->batch == b->batch && a->batch == c->batch && a->batch == d->batch;
}

static bool read_layouts(struct qs_gemm *g, cublasLtMatrixLayout_t la, cublasLtMatrixLayout_t lb,
                         cublasLtMatrixLayout_t lc, cublasLtMatrixLayout_t ld)
{
	struct layout a, b, c, d;
	if (!read_layout(g->library, la, &a) || !read_layout(g->library, lb, &b) ||
	    !read_layout(g->library, ld, &d))
		return false;
	if (lc == ld)
		c = d;
	else if (!read_layout(g->library, lc, &c))
		return false;
	if (a.order != CUBLASLT_ORDER_COL || b.order != CUBLASLT_ORDER_COL ||
	    c.order != CUBLASLT_ORDER_COL || d.order != CUBLASLT_ORDER_COL)
		g->key.odd |= QS_ODD_ORDER;
	if (!fit(&g->key, &a, &b, &c, &d))
		g->key.odd |= QS_ODD_SHAPE;
	return true;
}

static void describe(struct qs_gemm *g, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t la,
                     cublasLtMatrixLayout_t lb, cublasLtMatrixLayout_t lc,
                     cublasLtMatrixLayout_t ld)
{
	struct qs_key *key = &g->key;
	key->bias_type = QS_TYPE_NONE;
	key->batch = 1;
	key->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
	if (!g->handle || !desc || !g->library->complete) {
		key->odd |= QS_ODD_OPAQUE;
		key->alpha = key->beta = QS_SCALAR_DEVICE;
		return;
	}
	key->atype = read_type(g->library, la);
	key->btype = read_type(g->library, lb);
	key->dtype = read_type(g->library, ld);
	key->ctype = lc == ld ? key->dtype : read_type(g->library, lc);
	if (!read_desc(g, desc) || !read_layouts(g, la, lb, lc, ld)) {
		key->odd |= QS_ODD_OPAQUE;
		key->alpha = key->beta = QS_SCALAR_DEVICE;
	}
}

#define QS_STRIP(...) __VA_ARGS__
#define QS_DECLARE_TRY(entry, function, params, args)                                              \
	bool try_##function(const struct qs_library *library, QS_STRIP params);
QS_ENTRIES(QS_DECLARE_TRY)
#undef QS_DECLARE_TRY

bool try_cublasLtMatmul(const struct qs_library *library, cublasLtHandle_t handle,
                        cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                        cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb,
                        const void *beta, const void *c, cublasLtMatrixLayout_t lc, void *d,
                        cublasLtMatrixLayout_t ld, const cublasLtMatmulAlgo_t *algo,
                        void *workspace, size_t workspace_bytes, cudaStream_t stream)
{
	(void)algo; /* found for bf16 operands: means nothing to another product */
	(void)workspace, (void)workspace_bytes;
	struct qs_gemm g = {
	        .library = library,
	        .handle = handle,
	        .stream = stream,
	        .a = a,
	        .b = b,
	        .c = c,
	        .d = d,
	        .alpha = alpha,
	        .beta = beta,
	};
	g.key.entry = QS_ENTRY_LT_MATMUL;
	g.key.library = library->index;
	describe(&g, desc, la, lb, lc, ld);
	return qs_dispatch(&g);
}
