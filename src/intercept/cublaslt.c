/* cublasLtMatmul: the caller's descriptors are opaque and their layout differs between versions, so
 * they are read with the GetAttribute functions of the very copy of cuBLASLt that the caller uses.
 * Each read costs some 5 ns, so what cannot matter is not read: a bias without its epilogue, scales
 * of operands that are not bf16. */
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
static bool fit(struct qs_key *key, const struct qs_layout *a, const struct qs_layout *b,
                const struct qs_layout *c, const struct qs_layout *d)
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

static uint8_t type_of(const struct qs_layout *layout)
{
	return layout->type < QS_TYPE_NONE ? (uint8_t)layout->type : QS_TYPE_NONE;
}

/* The layouts first: what is read of the descriptor depends on the types. */
static bool read_call(struct qs_gemm *g, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t la,
                      cublasLtMatrixLayout_t lb, cublasLtMatrixLayout_t lc,
                      cublasLtMatrixLayout_t ld)
{
	struct qs_key *key = &g->key;
	struct qs_layout a, b, c, d;
	if (!qs_layout_read(g->library, la, &a) || !qs_layout_read(g->library, lb, &b) ||
	    !qs_layout_read(g->library, lc, &c) || !qs_layout_read(g->library, ld, &d))
		return false;
	key->atype = type_of(&a);
	key->btype = type_of(&b);
	key->ctype = type_of(&c);
	key->dtype = type_of(&d);
	if (!read_desc(g, desc))
		return false;
	if (a.order != CUBLASLT_ORDER_COL || b.order != CUBLASLT_ORDER_COL ||
	    c.order != CUBLASLT_ORDER_COL || d.order != CUBLASLT_ORDER_COL)
		key->odd |= QS_ODD_ORDER;
	if (!fit(key, &a, &b, &c, &d))
		key->odd |= QS_ODD_SHAPE;
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
	if (g->handle && desc && g->library->complete && read_call(g, desc, la, lb, lc, ld))
		return;
	key->odd |= QS_ODD_OPAQUE;
	key->alpha = key->beta = QS_SCALAR_DEVICE; /* perhaps not host pointers */
}

/* The arguments of a call that are not in struct qs_gemm. */
struct call {
	cublasLtMatmulDesc_t desc;
	cublasLtMatrixLayout_t la, lb, lc, ld;
	const cublasLtMatmulAlgo_t *algo;
	void *workspace;
	size_t workspace_bytes;
};

static int repeat(const struct qs_gemm *g, void *d)
{
	const struct call *call = g->call;
	const void *c = g->c == g->d ? d : g->c;
	return (int)g->library->cublasLtMatmul(g->handle, call->desc, g->alpha, g->a, call->la,
	                                       g->b, call->lb, g->beta, c, call->lc, d, call->ld,
	                                       call->algo, call->workspace, call->workspace_bytes,
	                                       g->stream);
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
	const struct call call = {desc, la, lb, lc, ld, algo, workspace, workspace_bytes};
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
	        .repeat = repeat,
	        .call = &call,
	};
	g.key.entry = QS_ENTRY_LT_MATMUL;
	g.key.library = (uint16_t)library->index;
	describe(&g, desc, la, lb, lc, ld);
	return qs_dispatch(&g);
}
