/* What a product that was left to cuBLAS wrote, told after the call like every other submission:
 * the launches inside are not looked at, for most of what they carry is only read. */
#include "intercept/intercept.h"
#include "operand/track.h"

/* Bytes of an element; of a type that is not listed, the most there are. */
static size_t size_of(uint32_t type)
{
	switch (type) {
	case CUDA_R_16F:
	case CUDA_R_16BF:
		return 2;
	case CUDA_R_32F:
	case CUDA_R_32I:
		return 4;
	default:
		return 16;
	}
}

void qs_wrote(const void *d, cudaDataType type, int64_t ld, int64_t n, int64_t stride,
              int64_t count)
{
	int64_t elements = ld * n + (count > 1 ? (count - 1) * stride : 0);
	if (stride < 0 || elements < 0)
		qs_track_everything();
	else
		qs_track_write(d, (size_t)elements * size_of(type));
}

/* D in vectors of ld elements, if it is one plain matrix; else all that is known is where it
 * starts, or that it may be an array of pointers. */
static void wrote_matrix(const struct qs_library *library, const void *d, cublasLtMatrixLayout_t ld)
{
	struct qs_layout layout;
	if (!qs_layout_read(library, ld, &layout) || layout.batch != 1)
		qs_track_everything();
	else if (layout.order == CUBLASLT_ORDER_COL)
		qs_wrote(d, layout.type, layout.ld, (int64_t)layout.cols, 0, 1);
	else if (layout.order == CUBLASLT_ORDER_ROW)
		qs_wrote(d, layout.type, layout.ld, (int64_t)layout.rows, 0, 1);
	else
		qs_track_pointer(d);
}

/* The memory at an address that the descriptor holds. */
static void wrote_at(const struct qs_library *library, cublasLtMatmulDesc_t desc,
                     cublasLtMatmulDescAttributes_t attribute)
{
	const void *address = NULL;
	size_t size = 0;
	if (!library->cublasLtMatmulDescGetAttribute(desc, attribute, &address, sizeof address,
	                                             &size) &&
	    address)
		qs_track_pointer(address);
}

/* Epilogues with the gradient of a bias. */
#define BGRAD                                                                                      \
	(CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB |                                     \
	 (CUBLASLT_EPILOGUE_DGELU_BGRAD & ~CUBLASLT_EPILOGUE_DGELU))

void qs_wrote_lt(const struct qs_library *library, cublasLtMatmulDesc_t desc, const void *d,
                 cublasLtMatrixLayout_t ld, const void *workspace, size_t workspace_bytes)
{
	uint32_t epilogue = 0;
	size_t size = 0;
	if (!library->complete ||
	    library->cublasLtMatmulDescGetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
	                                            sizeof epilogue, &size)) {
		qs_track_everything();
		return;
	}
	wrote_matrix(library, d, ld);
	qs_track_write(workspace, workspace_bytes);
	wrote_at(library, desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
	wrote_at(library, desc, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER);
	if (epilogue & BGRAD)
		wrote_at(library, desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
}
