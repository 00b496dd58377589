/* Which product of a linear layer a call is, from what one call shows.
 *
 * PyTorch computes Y = X W' as TN, dX = dY W as NN and dW = dY' X as NT, the last two on threads
 * named pt_autograd_*. The thread matters: a plain x @ w, GPT-2's Conv1D and JAX are NN going
 * forward. Assumed: a TN product outside those threads is a forward one (JAX's dX is TN too and is
 * taken for one; the product served is the same). What several calls show: evidence.c.
 */
#define _GNU_SOURCE
#include <cublasLt.h>
#include <string.h>
#include <sys/prctl.h>

#include "gemm/gemm.h"

/* Bits of cublasLtEpilogue_t that only forward or only backward passes have. */
#define FORWARD_BITS  (CUBLASLT_EPILOGUE_RELU | CUBLASLT_EPILOGUE_GELU | CUBLASLT_EPILOGUE_BIAS)
#define GRADIENT_BITS (8 | 16 | 64 | CUBLASLT_EPILOGUE_BGRADA | CUBLASLT_EPILOGUE_BGRADB)

/* A linear layer's product is a single one in plain column-major terms. */
static bool is_plain(const struct qs_key *key)
{
	return key->batch == 1 && !(key->odd & (QS_ODD_ORDER | QS_ODD_SHAPE | QS_ODD_OPAQUE));
}

static enum qs_role backward_role(bool ta, bool tb)
{
	/* TN is Conv1D's dX or, under activation checkpointing, a forward product done again. */
	if (ta)
		return QS_ROLE_UNKNOWN;
	return tb ? QS_ROLE_WGRAD : QS_ROLE_DGRAD;
}

enum qs_role qs_role_of(const struct qs_key *key, bool autograd)
{
	bool ta = key->ta == CUBLAS_OP_T, tb = key->tb == CUBLAS_OP_T;
	if (!is_plain(key) || key->ta > CUBLAS_OP_T || key->tb > CUBLAS_OP_T)
		return QS_ROLE_UNKNOWN;
	bool gradient = key->epilogue & GRADIENT_BITS;
	/* These epilogues run along m: A is the weight, whatever thread recomputes it. */
	if ((key->epilogue & FORWARD_BITS) && !gradient)
		return QS_ROLE_FWD;
	if (autograd)
		return backward_role(ta, tb);
	return ta && !tb && !gradient ? QS_ROLE_FWD : QS_ROLE_UNKNOWN;
}

bool qs_role_is_open(const struct qs_key *key)
{
	return is_plain(key) && key->ta <= CUBLAS_OP_T && key->tb == CUBLAS_OP_N &&
	       !(key->epilogue & GRADIENT_BITS);
}

/* PyTorch names its backward threads before they do anything else. */
bool qs_thread_is_autograd(void)
{
	enum {
		NOT_ASKED,
		NO,
		YES
	};
	static __thread unsigned char answer = NOT_ASKED;
	if (answer == NOT_ASKED) {
		char name[16] = ""; /* the kernel's limit, terminator included */
		prctl(PR_GET_NAME, name);
		answer = strncmp(name, "pt_autograd_", strlen("pt_autograd_")) ? NO : YES;
	}
	return answer == YES;
}

struct qs_linear qs_linear_of(const struct qs_key *key)
{
	switch (key->role) {
	case QS_ROLE_FWD:
		return (struct qs_linear){.tokens = key->n, .in = key->k, .out = key->m};
	case QS_ROLE_DGRAD:
		return (struct qs_linear){.tokens = key->n, .in = key->m, .out = key->k};
	case QS_ROLE_WGRAD:
		return (struct qs_linear){.tokens = key->k, .in = key->m, .out = key->n};
	default:
		return (struct qs_linear){0};
	}
}
