/* Which operands of a product are in the scratch block already, and making those that are not.
 *
 * The block has two halves. A product writes its new operands into the half that holds none of
 * those it uses again, so the operands of the product before stay where they are for one more.
 * Exact by construction: see operand.h for when a copy counts as up to date.
 */
#include "operand/operand.h"

#include <stdlib.h>

#include "intercept/intercept.h"

#define MADE_MAX 4 /* two operands in each half */

/* A quantised matrix in the block. */
struct made {
	const void *source;
	uint32_t format;              /* QS_FP8_*                                        */
	int64_t ld, inner, outer;     /* of the source                                    */
	CUdeviceptr straight, turned; /* 0 = that orientation was not made                */
	CUdeviceptr scale;
	uint64_t epoch;     /* before the launches that made it were submitted  */
	_Atomic bool *both; /* of the plan that made it                         */
	bool valid;
};

/* What a block holds; made[2 * half + i] is operand i of the product that wrote that half. */
struct contents {
	struct made made[MADE_MAX];
	int half;            /* written last                                          */
	uint64_t generation; /* of the block: another one holds nothing of ours       */
	uint64_t products;   /* ours in the whole process, after the last one here    */
};

static _Atomic uint64_t products; /* replaced by us, in any stream */
static _Atomic uint64_t made_count, reused_count;

uint64_t qs_operands_made(void)
{
	return atomic_load(&made_count);
}

uint64_t qs_operands_reused(void)
{
	return atomic_load(&reused_count);
}

static void clear(struct contents *contents)
{
	for (int i = 0; i < MADE_MAX; i++)
		contents->made[i].valid = false;
}

/* NULL only if memory is out: then nothing is found and nothing kept. A product of ours in another
 * stream may have written anything, and the epoch does not count it. */
static struct contents *contents_of(struct qs_scratch *scratch)
{
	struct contents *contents = scratch->contents;
	if (!contents)
		contents = scratch->contents = calloc(1, sizeof *contents);
	if (!contents)
		return NULL;
	uint64_t now = atomic_load(&products);
	if (contents->generation != scratch->generation || contents->products != now)
		clear(contents);
	contents->generation = scratch->generation;
	contents->products = now;
	return contents;
}

static struct made *find(struct contents *contents, const struct qs_quantise_operand *shape,
                         const void *source, bool turned)
{
	for (int i = 0; i < MADE_MAX; i++) {
		struct made *made = &contents->made[i];
		if (!made->valid || made->source != source || made->ld != shape->ld ||
		    made->inner != shape->inner || made->outer != shape->outer ||
		    made->format != shape->format)
			continue;
		if (made->epoch != qs_epoch_now() || !qs_is_device_memory(source))
			continue;
		if (turned ? made->turned : made->straight)
			return made;
		atomic_store_explicit(made->both, true, memory_order_relaxed);
	}
	return NULL;
}

/* Places operand i in a half from *offset on, in one orientation or, if asked for and there is room
 * beside `others` bytes, in both. */
static void place(struct made *made, struct qs_operands *operands, int i,
                  const struct qs_parts *parts, int half, size_t *offset, size_t others)
{
	const bool turned = operands->turned[i];
	CUdeviceptr at = parts->half[half] + *offset, other = 0;
	size_t bytes = qs_operand_bytes(operands, i, turned);
	size_t more = qs_operand_bytes(operands, i, !turned);
	if (atomic_load_explicit(&operands->both[i], memory_order_relaxed) &&
	    *offset + bytes + more + others <= parts->half_bytes) {
		other = at + bytes;
		bytes += more;
	}
	made->straight = turned ? other : at;
	made->turned = turned ? at : other;
	made->scale = parts->scale + (CUdeviceptr)(2 * half + i) * QS_SCALE_STRIDE;
	*offset += bytes;
}

static void fill(struct qs_quantise_operand *operand, const struct made *made, CUdeviceptr partials,
                 const void *source, const struct qs_context *context)
{
	operand->source = (uint64_t)(uintptr_t)source;
	operand->straight = made->straight;
	operand->turned = made->turned;
	operand->scale = made->scale;
	operand->partials = partials;
	operand->history = qs_history_of(context, operand, source);
	qs_quantise_plan(operand, context->sms);
}

/* The half that holds none of the operands used again. */
static int free_half(const struct contents *contents, struct made *const found[2])
{
	for (int i = 0; i < 2; i++)
		if (found[i])
			return 1 - (int)(found[i] - contents->made) / 2;
	return 1 - contents->half;
}

static uint64_t made_bytes(const struct qs_operands *operands, int i, const struct made *made)
{
	return (made->straight ? qs_operand_bytes(operands, i, false) : 0) +
	       (made->turned ? qs_operand_bytes(operands, i, true) : 0);
}

/* Makes the operands not found, in a half of their own. */
static CUresult make(struct qs_operands *operands, const struct qs_context *context,
                     const struct qs_stream *stream, const struct qs_scratch *scratch,
                     struct contents *contents, const void *const source[2], struct made *found[2],
                     struct qs_pair *pair)
{
	const struct qs_parts parts = qs_scratch_parts(operands, scratch);
	const uint64_t epoch = qs_epoch_now();
	const int half = free_half(contents, found);
	struct qs_quantise_args args = {.operand = {operands->shape[0], operands->shape[1]}};
	size_t offset = 0;
	contents->half = half;
	for (int i = 0; i < 2; i++)
		contents->made[2 * half + i].valid = false;
	for (int i = 0; i < 2; i++) {
		if (found[i] || pair->data[i])
			continue;
		struct made *made = found[i] = &contents->made[2 * half + i];
		const bool alone = i == 1 || found[1] || pair->data[1];
		size_t others = alone ? 0 : qs_operand_bytes(operands, 1, operands->turned[1]);
		place(made, operands, i, &parts, half, &offset, others);
		fill(&args.operand[i], made, parts.partials[i], source[i], context);
		made->source = source[i];
		made->format = args.operand[i].format;
		made->ld = args.operand[i].ld;
		made->inner = args.operand[i].inner;
		made->outer = args.operand[i].outer;
		made->epoch = epoch;
		made->both = &operands->both[i];
		pair->bytes += made_bytes(operands, i, made);
		atomic_fetch_add_explicit(&made_count, 1, memory_order_relaxed);
	}
	qs_quantise_share(&args, context->sms);
	CUresult error = qs_operands_launch(context, stream, &args);
	for (int i = 0; i < 2; i++)
		if (args.operand[i].blocks[0])
			found[i]->valid = !error;
	return error;
}

CUresult qs_operands_make(struct qs_operands *operands, const struct qs_context *context,
                          const struct qs_stream *stream, struct qs_scratch *scratch,
                          const void *const source[2], bool reuse, struct qs_pair *pair)
{
	struct contents *contents = contents_of(scratch);
	struct made *found[2] = {NULL, NULL};
	CUresult error = CUDA_SUCCESS;
	if (!contents)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (!reuse || !qs_epoch_trusted())
		clear(contents);
	for (int i = 0; i < 2; i++) {
		if (pair->data[i])
			continue;
		found[i] = find(contents, &operands->shape[i], source[i], operands->turned[i]);
		atomic_fetch_add_explicit(&reused_count, found[i] != NULL, memory_order_relaxed);
	}
	if ((!found[0] && !pair->data[0]) || (!found[1] && !pair->data[1]))
		error = make(operands, context, stream, scratch, contents, source, found, pair);
	for (int i = 0; i < 2 && !error; i++) {
		if (!found[i])
			continue;
		pair->data[i] = operands->turned[i] ? found[i]->turned : found[i]->straight;
		pair->scale[i] = found[i]->scale;
	}
	return error;
}

void qs_operands_wrote(struct qs_scratch *scratch, const void *first, const void *end)
{
	struct contents *contents = scratch->contents;
	uint64_t before = atomic_fetch_add(&products, 1);
	if (!contents)
		return;
	if (contents->products != before)
		clear(contents);
	contents->products = before + 1;
	for (int i = 0; i < MADE_MAX; i++) {
		struct made *made = &contents->made[i];
		const char *source = made->source;
		const char *last = source + ((made->outer - 1) * made->ld + made->inner) * 2;
		if (source < (const char *)end && (const char *)first < last)
			made->valid = false;
	}
}

void qs_operands_forget(struct qs_scratch *scratch)
{
	if (scratch->contents)
		clear(scratch->contents);
}
