/* Matrix layouts of cuBLASLt: opaque, so they are read with GetAttribute, six calls of some 5 ns
 * each; three layouts would be most of what a passed call costs. What was read once is therefore
 * kept by the layout's content, which decides it: a layout is 64 bytes of plain values (it can be
 * made in memory of the caller's by cublasLtMatrixLayoutInit and is never taken down), of a size
 * that cannot change within a major version for the same reason. Other versions are read at each
 * call.
 */
#include "intercept/intercept.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define WORDS  8
#define SLOTS  1024 /* power of two; layouts beyond are read at each call */
#define PROBES 4

_Static_assert(sizeof(cublasLtMatrixLayoutOpaque_t) == WORDS * sizeof(uint64_t),
               "what is compared is the whole layout");

/* A layout that was met: written once, then published, never freed. */
struct known {
	uint64_t word[WORDS];             /* the layout's content             */
	const struct qs_library *library; /* the copy that read it            */
	struct qs_layout layout;          /* what it said                     */
};

static struct known *_Atomic table[SLOTS];

static bool get(const struct qs_library *library, cublasLtMatrixLayout_t from,
                cublasLtMatrixLayoutAttribute_t attribute, void *value, size_t size)
{
	size_t written = 0;
	return !library->cublasLtMatrixLayoutGetAttribute(from, attribute, value, size, &written) &&
	       written == size;
}

static bool ask(const struct qs_library *library, cublasLtMatrixLayout_t from, struct qs_layout *to)
{
	return get(library, from, CUBLASLT_MATRIX_LAYOUT_TYPE, &to->type, sizeof to->type) &&
	       get(library, from, CUBLASLT_MATRIX_LAYOUT_ORDER, &to->order, sizeof to->order) &&
	       get(library, from, CUBLASLT_MATRIX_LAYOUT_ROWS, &to->rows, sizeof to->rows) &&
	       get(library, from, CUBLASLT_MATRIX_LAYOUT_COLS, &to->cols, sizeof to->cols) &&
	       get(library, from, CUBLASLT_MATRIX_LAYOUT_LD, &to->ld, sizeof to->ld) &&
	       get(library, from, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &to->batch, sizeof to->batch);
}

static bool has_known_size(const struct qs_library *library)
{
	size_t major = library->version / 10000;
	return major == 12 || major == 13;
}

/* Odd multipliers, so that rows and columns are told apart. */
static size_t slot_of(const uint64_t word[WORDS])
{
	uint64_t sum = 0;
	for (size_t i = 0; i < WORDS; i++)
		sum += word[i] * (2 * i + 1);
	return (size_t)((sum * 0x9e3779b97f4a7c15u) >> 32);
}

static void keep(_Atomic(struct known *) *slot, const uint64_t word[WORDS],
                 const struct qs_library *library, const struct qs_layout *layout)
{
	struct known *known = malloc(sizeof *known), *none = NULL;
	if (!known)
		return;
	memcpy(known->word, word, sizeof known->word);
	known->library = library;
	known->layout = *layout;
	if (!atomic_compare_exchange_strong(slot, &none, known))
		free(known);
}

bool qs_layout_read(const struct qs_library *library, cublasLtMatrixLayout_t from,
                    struct qs_layout *to)
{
	uint64_t word[WORDS];
	_Atomic(struct known *) *free_slot = NULL;
	if (!from || !has_known_size(library))
		return from && ask(library, from, to);
	memcpy(word, from, sizeof word);
	for (size_t i = 0, slot = slot_of(word); i < PROBES && !free_slot; i++) {
		_Atomic(struct known *) *at = &table[(slot + i) % SLOTS];
		const struct known *known = atomic_load_explicit(at, memory_order_acquire);
		if (!known) {
			free_slot = at;
		} else if (known->library == library && !memcmp(known->word, word, sizeof word)) {
			*to = known->layout;
			return true;
		}
	}
	if (!ask(library, from, to))
		return false;
	if (free_slot)
		keep(free_slot, word, library, to);
	return true;
}
