/* The kernels of kernels/nf4.cu on a GPU against their C references: packing and expansion bit for
 * bit, products within the error of fp32 sums, and their promises: the same bits for every number
 * of tokens and in every run, nothing written beyond the result, a changed weight noticed.
 *
 * Sources carry the largest finite number in their padding; results lie between poisoned bytes that
 * are compared too. Needs about 7 GiB of device memory, and less if the largest matrix is skipped.
 */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/hash.h"
#include "tests/gpu/nf4.h"
#include "tests/oracle/oracle.h"
#include "tests/support/suite.h"

#define POISON  0xa5
#define GUARD   256    /* bytes before and after what a kernel may write */
#define PADDING 0x7f7f /* largest finite bf16                            */

static void setup(void)
{
	static bool done;
	if (!done)
		nf4_open();
	done = true;
}

/* ---- numbers -------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

static uint32_t random_bits(void)
{
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(random_state >> 32);
}

/* Roughly normal, with the given deviation. */
static uint16_t random_normal(float deviation)
{
	float sum = 0;
	for (int i = 0; i < 4; i++)
		sum += (float)(random_bits() >> 8) * 0x1p-24f - 0.5f;
	return qs_oracle_float_to_bf16(sum * 1.7320508f * deviation);
}

/* ---- memory on both sides ------------------------------------------------------------------- */

/* Bytes between two guards, here and on the device. */
struct buffer {
	size_t bytes;
	uint8_t *host, *got;
	CUdeviceptr device;
};

static struct buffer make_buffer(size_t bytes)
{
	struct buffer buffer = {.bytes = bytes};
	buffer.host = aligned_alloc(256, (bytes + 2 * GUARD + 255) / 256 * 256);
	buffer.got = malloc(bytes + 2 * GUARD);
	ck_assert(buffer.host && buffer.got);
	buffer.device = gpu_alloc(bytes + 2 * GUARD);
	memset(buffer.host, POISON, bytes + 2 * GUARD);
	GPU_CHECK(gpu.cuMemsetD8_v2(buffer.device, POISON, bytes + 2 * GUARD));
	return buffer;
}

static void drop_buffer(struct buffer *buffer)
{
	GPU_CHECK(gpu.cuMemFree_v2(buffer->device));
	free(buffer->host);
	free(buffer->got);
}

static uint64_t host_of(const struct buffer *buffer)
{
	return (uint64_t)(uintptr_t)(buffer->host + GUARD);
}

static uint64_t device_of(const struct buffer *buffer)
{
	return buffer->device + GUARD;
}

static void upload(const struct buffer *buffer)
{
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(buffer->device, buffer->host, buffer->bytes + 2 * GUARD));
}

static void fetch(const struct buffer *buffer)
{
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(buffer->got, buffer->device, buffer->bytes + 2 * GUARD));
}

static void expect_equal(const struct buffer *buffer, const char *what, const char *name)
{
	fetch(buffer);
	if (memcmp(buffer->got, buffer->host, buffer->bytes + 2 * GUARD) == 0)
		return;
	size_t i = 0;
	while (buffer->got[i] == buffer->host[i])
		i++;
	ck_abort_msg("%s, %s: byte %lld is %02x, reference %02x", name, what, (long long)i - GUARD,
	             buffer->got[i], buffer->host[i]);
}

static void expect_guards(const struct buffer *buffer, const char *what)
{
	for (size_t i = 0; i < GUARD; i++)
		if (buffer->got[i] != POISON || buffer->got[GUARD + buffer->bytes + i] != POISON)
			ck_abort_msg("%s was written beyond its end", what);
}

/* ---- weights -------------------------------------------------------------------------------- */

/* How a matrix lies in memory. */
struct layout {
	const char *name;
	int64_t extra;  /* elements between rows                  */
	int64_t offset; /* elements between a boundary and W      */
};

static const struct layout layouts[] = {
        {"contiguous", 0, 0},
        {"padded by 8", 8, 0},
        {"odd ld", 3, 0},
        {"2 bytes off", 0, 1},
        {"4 bytes off, ld padded by 2", 2, 2},
};
#define LAYOUTS ((int)(sizeof layouts / sizeof *layouts))

struct weight {
	char name[128];
	bool fp8;
	int64_t n, k, ld;
	struct buffer source, packed, scale, word; /* word: struct qs_weight */
	struct qs_pack_args host, device;
};

static uint16_t *row_of(struct weight *weight, int64_t row)
{
	return (uint16_t *)(uintptr_t)weight->host.source + row * weight->ld;
}

static struct qs_weight *word_of(struct weight *weight)
{
	return (struct qs_weight *)(uintptr_t)host_of(&weight->word);
}

static void make_source(struct weight *weight, const struct layout *layout)
{
	const int64_t elements = weight->n * weight->ld + layout->offset;
	weight->source = make_buffer((size_t)elements * 2);
	uint16_t *first = (uint16_t *)(uintptr_t)host_of(&weight->source);
	for (int64_t i = 0; i < elements; i++)
		first[i] = PADDING;
	weight->host.source = (uint64_t)(uintptr_t)(first + layout->offset);
	weight->device.source = device_of(&weight->source) + (uint64_t)layout->offset * 2;
	for (int64_t row = 0; row < weight->n; row++)
		for (int64_t i = 0; i < weight->k; i++)
			row_of(weight, row)[i] = random_normal(0.02f);
}

static struct weight make_weight(bool fp8, int64_t n, int64_t k, const struct layout *layout)
{
	struct weight weight = {.fp8 = fp8, .n = n, .k = k, .ld = k + layout->extra};
	snprintf(weight.name, sizeof weight.name, "%s %lld x %lld %s", fp8 ? "fp8" : "nf4",
	         (long long)n, (long long)k, layout->name);
	weight.packed = make_buffer((size_t)(fp8 ? qs_fp8_bytes(n, k) : qs_nf4_bytes(n, k)));
	weight.scale = make_buffer((size_t)n * sizeof(float));
	weight.word = make_buffer(sizeof(struct qs_weight));
	memset(word_of(&weight), 0, sizeof(struct qs_weight));
	weight.host = (struct qs_pack_args){.packed = host_of(&weight.packed),
	                                    .scale = host_of(&weight.scale),
	                                    .weight = host_of(&weight.word),
	                                    .ld = weight.ld,
	                                    .n = n,
	                                    .k = k};
	weight.device = weight.host;
	weight.device.packed = device_of(&weight.packed);
	weight.device.scale = device_of(&weight.scale);
	weight.device.weight = device_of(&weight.word);
	make_source(&weight, layout);
	return weight;
}

static void drop_weight(struct weight *weight)
{
	drop_buffer(&weight->source);
	drop_buffer(&weight->packed);
	drop_buffer(&weight->scale);
	drop_buffer(&weight->word);
}

static void run_reference(const char *kernel, void *args, unsigned grid, unsigned block)
{
	const struct qs_oracle_kernel *entry = qs_oracle_nf4_kernels;
	void *params[] = {args};
	while (entry->name && strcmp(entry->name, kernel) != 0)
		entry++;
	ck_assert_msg(entry->name != NULL, "no reference of %s", kernel);
	entry->run(params, grid, block);
}

/* The descriptor differs in its pointers. */
static void expect_same_word(struct weight *weight)
{
	struct qs_weight got;
	fetch(&weight->word);
	memcpy(&got, weight->word.got + GUARD, sizeof got);
	ck_assert_msg(got.packed == weight->device.packed, "%s: packed", weight->name);
	got.packed = word_of(weight)->packed;
	if (weight->fp8)
		got.scale = word_of(weight)->scale;
	ck_assert_msg(memcmp(&got, word_of(weight), sizeof got) == 0,
	              "%s: descriptor: amax %08x %08x, nonfinite %u %u", weight->name, got.amax,
	              word_of(weight)->amax, got.nonfinite, word_of(weight)->nonfinite);
	expect_guards(&weight->word, "the descriptor");
}

/* Packs on both sides and compares. */
static void pack(struct weight *weight)
{
	const uint32_t blocks = qs_pack_blocks(weight->n, weight->k, gpu.sms);
	const char *kernel = weight->fp8 ? QS_KERNEL_FP8_PACK : QS_KERNEL_NF4_PACK;
	upload(&weight->source);
	memset(word_of(weight), 0, sizeof(struct qs_weight));
	upload(&weight->word);
	run_reference(kernel, &weight->host, blocks, QS_PACK_THREADS);
	gpu_launch(weight->fp8 ? nf4.fp8_pack : nf4.pack, blocks, QS_PACK_THREADS, &weight->device);
	expect_equal(&weight->packed, "tiles", weight->name);
	expect_equal(&weight->scale, "scales", weight->name);
	expect_same_word(weight);
}

/* What the host says of a packed weight. */
static void set_valid(struct weight *weight, uint32_t valid)
{
	const uint32_t words[4] = {valid, 0, 0, 0};
	struct qs_weight *word = word_of(weight);
	word->valid = valid;
	word->failed = word->turn = word->readers = 0;
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(weight->device.weight + offsetof(struct qs_weight, valid),
	                              words, sizeof words));
}

/* Where the products on the device count what they find; the reference is told of nowhere. */
static struct buffer told(const struct weight *weight)
{
	struct buffer outcome = make_buffer(sizeof(struct qs_hash_outcome));
	const uint64_t at = device_of(&outcome);
	memset(outcome.host + GUARD, 0, outcome.bytes);
	upload(&outcome);
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(weight->device.weight + offsetof(struct qs_weight, outcome),
	                              &at, sizeof at));
	return outcome;
}

/* So often, and nothing else is written there. */
static void expect_told(struct buffer *outcome, uint32_t times)
{
	((struct qs_hash_outcome *)(uintptr_t)host_of(outcome))->escapes = times;
	expect_equal(outcome, "the outcome", "escapes");
}

START_TEST(packed_weights_equal_the_reference)
{
	static const int64_t sizes[][2] = {{1, 64},  {15, 64},  {16, 128},  {63, 192},
	                                   {64, 64}, {65, 128}, {200, 320}, {130, 1024}};
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
		for (int layout = 0; layout < LAYOUTS; layout++)
			for (int fp8 = 0; fp8 < 2; fp8++) {
				struct weight weight = make_weight(fp8, sizes[i][0], sizes[i][1],
				                                   &layouts[layout]);
				pack(&weight);
				drop_weight(&weight);
			}
}
END_TEST

/* Every finite bf16 number beside absmax of many sizes: at place 0 the absmax, then numbers. */
START_TEST(every_bf16_is_coded_as_the_reference_does)
{
	for (int fp8 = 0; fp8 < 2; fp8++) {
		struct weight weight = make_weight(fp8, 1024, 1024, &layouts[0]);
		for (int64_t row = 0; row < weight.n; row++)
			for (int64_t i = 0; i < weight.k; i++) {
				const uint32_t at = (uint32_t)(row * weight.k + i);
				uint16_t *element = &row_of(&weight, row)[i];
				*element = (uint16_t)(at * 40503u >> 3);
				if ((*element & 0x7f80) == 0x7f80)
					*element &= 0xbfff;
				/* blocks whose numbers lie within some binades of their absmax */
				if (at / 64 % 4)
					*element = (uint16_t)((*element & 0x807f) |
					                      (at / 64 % 250 + random_bits() % 5)
					                              << 7);
			}
		pack(&weight);
		drop_weight(&weight);
	}
}
END_TEST

START_TEST(special_blocks_are_packed_as_the_header_says)
{
	static const uint16_t specials[] = {0x0000, 0x8000, 0x0001, 0x007f, 0x0080, 0x7e80,
	                                    0x7f00, 0x7f7f, 0x7f80, 0xff80, 0x7fc0, 0xffff};
	for (size_t s = 0; s < sizeof specials / sizeof *specials; s++)
		for (int fp8 = 0; fp8 < 2; fp8++) {
			struct weight weight = make_weight(fp8, 70, 128, &layouts[0]);
			for (int i = 0; i < 64; i++)
				row_of(&weight, 3)[i] = 0;
			row_of(&weight, 3)[17] = specials[s];
			row_of(&weight, 69)[127] = specials[s];
			pack(&weight);
			ck_assert_int_eq(word_of(&weight)->nonfinite,
			                 (specials[s] & 0x7f80) == 0x7f80);
			drop_weight(&weight);
		}
}
END_TEST

/* The last rows of a matrix of more than 2^31 elements. */
START_TEST(weights_beyond_2_to_the_31_elements_are_indexed_in_64_bits)
{
	const int64_t n = 131072 + 64, k = 16384 + 64, tail = (n - 64) * k;
	struct qs_pack_args args = {.ld = k, .n = n, .k = k};
	struct weight small = make_weight(false, 64, k, &layouts[0]);
	struct qs_weight word;
	uint8_t *got = malloc((size_t)qs_nf4_bytes(64, k));
	ck_assert(got != NULL);
	pack(&small);
	args.source = gpu_alloc((size_t)(n * k) * 2);
	args.packed = gpu_alloc((size_t)qs_nf4_bytes(n, k));
	args.weight = gpu_alloc(sizeof word);
	GPU_CHECK(gpu.cuMemsetD8_v2(args.source, 0, (size_t)(n * k) * 2));
	GPU_CHECK(gpu.cuMemsetD8_v2(args.weight, 0, sizeof word));
	GPU_CHECK(gpu.cuMemcpyHtoD_v2(args.source + (uint64_t)tail * 2, row_of(&small, 0),
	                              (size_t)(64 * k) * 2));
	gpu_launch(nf4.pack, qs_pack_blocks(n, k, gpu.sms), QS_PACK_THREADS, &args);
	GPU_CHECK(gpu.cuMemcpyDtoH_v2(got, args.packed + (uint64_t)qs_nf4_bytes(n - 64, k),
	                              (size_t)qs_nf4_bytes(64, k)));
	ck_assert_mem_eq(got, small.packed.host + GUARD, (size_t)qs_nf4_bytes(64, k));
	GPU_CHECK(gpu.cuMemFree_v2(args.source));
	GPU_CHECK(gpu.cuMemFree_v2(args.packed));
	GPU_CHECK(gpu.cuMemFree_v2(args.weight));
	free(got);
	drop_weight(&small);
}
END_TEST

/* ---- expansion ------------------------------------------------------------------------------ */

static void check_expansion(struct weight *weight, int targets)
{
	const size_t straight = (size_t)(weight->n * weight->k);
	const size_t turned = (size_t)(weight->k * qs_k_padded(weight->n));
	struct buffer buffers[] = {make_buffer(straight), make_buffer(turned), make_buffer(4),
	                           make_buffer(straight * 2)};
	struct qs_expand_args host = {
	        .weight = weight->host.weight, .n = weight->n, .k = weight->k};
	struct qs_expand_args device = host;
	uint64_t *on_host[] = {&host.straight, &host.turned, &host.scale, &host.bf16};
	uint64_t *on_device[] = {&device.straight, &device.turned, &device.scale, &device.bf16};
	const unsigned blocks = qs_pack_blocks(weight->n, weight->k, gpu.sms);
	device.weight = weight->device.weight;
	for (int i = 0; i < 4; i++)
		if (targets >> i & 1) {
			*on_host[i] = host_of(&buffers[i]);
			*on_device[i] = device_of(&buffers[i]);
		}
	run_reference(QS_KERNEL_NF4_EXPAND, &host, blocks, QS_PACK_THREADS);
	gpu_launch(nf4.expand, blocks, QS_PACK_THREADS, &device);
	for (int i = 0; i < 4; i++) {
		static const char *const names[] = {"straight", "turned", "scale", "bf16"};
		expect_equal(&buffers[i], names[i], weight->name);
		drop_buffer(&buffers[i]);
	}
}

START_TEST(expanded_weights_equal_the_reference)
{
	static const int64_t sizes[][2] = {{1, 64}, {64, 64}, {17, 192}, {130, 320}, {257, 1024}};
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		struct weight weight = make_weight(false, sizes[i][0], sizes[i][1], &layouts[0]);
		pack(&weight);
		for (int targets = 1; targets < 16; targets++)
			check_expansion(&weight, targets);
		drop_weight(&weight);
	}
}
END_TEST

/* ---- products ------------------------------------------------------------------------------- */

/* What varies. */
struct call {
	uint32_t tokens, activation, flags;
	float alpha, beta;
	bool bias, given, early; /* given: tiles by the call; early: see nf4_launch */
	int64_t ldx_extra, ldd_extra, x_offset;
};

struct product {
	struct weight *weight;
	struct call call;
	struct buffer x, bias, d, before; /* before: what D holds if beta is not 0 */
	struct qs_product_args host, device;
	struct qs_product_geometry geometry;
	bool wide;     /* by the kernels for more tokens */
	bool unmapped; /* X is read without a map        */
};

static void fill_normal(struct buffer *buffer, float deviation)
{
	for (size_t i = 0; i < buffer->bytes / 2; i++)
		((uint16_t *)(uintptr_t)host_of(buffer))[i] = random_normal(deviation);
	upload(buffer);
}

/* How the library launches it. */
static void plan(struct product *p, struct qs_product_args *args)
{
	p->wide = args->tokens > QS_TOKENS_MAX;
	p->geometry = p->wide ? qs_wide_plan(args, &nf4.device)
	                      : qs_product_plan(args, p->weight->fp8, &nf4.device);
}

/* Wide products are of NF4, and on Hopper. */
static bool is_possible(const struct weight *weight, uint32_t tokens)
{
	return tokens <= QS_TOKENS_MAX || (nf4.device.hopper && !weight->fp8);
}

static struct product make_product(struct weight *weight, struct call call)
{
	struct product p = {.weight = weight, .call = call};
	const int64_t ldx = weight->k + call.ldx_extra, ldd = weight->n + call.ldd_extra;
	const size_t wide = call.flags & QS_PRODUCT_FP32 ? 4 : 2;
	p.x = make_buffer((size_t)(call.tokens * ldx + call.x_offset) * 2);
	p.bias = make_buffer((size_t)weight->n * 2);
	p.d = make_buffer((size_t)(call.tokens * ldd) * wide);
	fill_normal(&p.x, 1);
	fill_normal(&p.bias, 0.5f);
	p.host = (struct qs_product_args){.weight = weight->host.weight,
	                                  .source = weight->host.source,
	                                  .x = host_of(&p.x) + (uint64_t)call.x_offset * 2,
	                                  .d = host_of(&p.d),
	                                  .bias = call.bias ? host_of(&p.bias) : 0,
	                                  .ld = weight->ld,
	                                  .ldx = ldx,
	                                  .ldd = ldd,
	                                  .n = weight->n,
	                                  .k = weight->k,
	                                  .alpha = call.alpha,
	                                  .beta = call.beta,
	                                  .tokens = call.tokens,
	                                  .activation = call.activation,
	                                  .flags = call.flags};
	if (call.early)
		p.host.flags |= QS_PRODUCT_EARLY;
	plan(&p, &p.host);
	if (call.given) {
		p.host.packed = weight->host.packed;
		p.host.scale = weight->host.scale;
	}
	p.device = p.host;
	if (call.given) {
		p.device.packed = weight->device.packed;
		p.device.scale = weight->device.scale;
	}
	p.device.weight = weight->device.weight;
	p.device.source = weight->device.source;
	p.device.x = device_of(&p.x) + (uint64_t)call.x_offset * 2;
	p.device.d = device_of(&p.d);
	p.device.bias = call.bias ? device_of(&p.bias) : 0;
	return p;
}

static void drop_product(struct product *p)
{
	drop_buffer(&p->x);
	drop_buffer(&p->bias);
	drop_buffer(&p->d);
}

static void run_device(struct product *p)
{
	GPU_CHECK(p->wide ? nf4_launch_wide(&p->device, &p->geometry, p->call.early, NULL)
	                  : nf4_launch(&p->device, &p->geometry, p->weight->fp8, !p->unmapped,
	                               p->call.early, NULL));
	fetch(&p->d);
}

static void run_host(struct product *p)
{
	struct qs_mapped_args args = {.product = p->host};
	const char *kernel = p->wide          ? qs_kernel_wide[p->geometry.kind]
	                     : p->weight->fp8 ? "qs_w8a16_8"
	                                      : "qs_w4a16_8";
	run_reference(kernel, p->wide ? (void *)&args : &p->host, p->geometry.blocks,
	              p->geometry.threads);
}

static double element_of(const struct product *p, const uint8_t *d, int64_t at)
{
	float wide;
	uint16_t narrow;
	if (p->call.flags & QS_PRODUCT_FP32) {
		memcpy(&wide, d + GUARD + at * 4, 4);
		return (double)wide;
	}
	memcpy(&narrow, d + GUARD + at * 2, 2);
	return (double)qs_oracle_bf16_to_float(narrow);
}

/* Error of fp32 sums: each product is at most about 0.1, sums of k of them with random signs. */
static void compare_product(struct product *p, const char *what)
{
	const bool fp32 = p->call.flags & QS_PRODUCT_FP32;
	const double slack = 2e-6 * sqrt((double)p->weight->k) + (fp32 ? 1e-6 : 1e-5);
	for (int64_t token = 0; token < p->host.tokens; token++)
		for (int64_t row = 0; row < p->weight->n; row++) {
			const int64_t at = token * p->host.ldd + row;
			const double got = element_of(p, p->d.got, at);
			const double want = element_of(p, p->d.host, at);
			const double bound = slack + fabs(want) * (fp32 ? 1e-5 : 0x1p-7);
			if (!(fabs(got - want) <= bound))
				ck_abort_msg("%s, %s, %u tokens: [%lld][%lld] is %g, reference %g",
				             p->weight->name, what, p->host.tokens,
				             (long long)token, (long long)row, got, want);
		}
}

/* Bytes between the rows of D, and around it, are as they were. */
static void expect_gaps(struct product *p, const uint8_t *before)
{
	const size_t wide = p->call.flags & QS_PRODUCT_FP32 ? 4 : 2;
	for (size_t token = 0; token < p->host.tokens; token++) {
		const size_t gap = GUARD + (token * (size_t)p->host.ldd + (size_t)p->host.n) * wide;
		const size_t bytes = (size_t)p->call.ldd_extra * wide;
		ck_assert_msg(memcmp(p->d.got + gap, before + gap, bytes) == 0,
		              "%s: written beyond a row of D", p->weight->name);
	}
	expect_guards(&p->d, "D");
}

static void check_product(struct weight *weight, struct call call, const char *what)
{
	struct product p = make_product(weight, call);
	uint8_t *before = malloc(p.d.bytes + 2 * GUARD);
	ck_assert(before != NULL);
	if (call.beta != 0) /* otherwise poison, which as fp32 or bf16 is a small number */
		for (size_t i = 0; i < p.d.bytes / 2; i++)
			((uint16_t *)(uintptr_t)p.host.d)[i] = random_normal(1);
	memcpy(before, p.d.host, p.d.bytes + 2 * GUARD);
	upload(&p.d);
	run_host(&p);
	run_device(&p);
	compare_product(&p, what);
	expect_gaps(&p, before);
	free(before);
	drop_product(&p);
}

static const struct call plain = {.tokens = 1, .alpha = 1, .given = true, .early = true};

static struct call with_tokens(struct call call, uint32_t tokens)
{
	call.tokens = tokens;
	return call;
}

START_TEST(products_equal_the_reference)
{
	static const int64_t sizes[][2] = {{1, 64},    {64, 64},   {65, 128},  {200, 320},
	                                   {257, 704}, {1000, 64}, {192, 2048}};
	static const uint32_t tokens[] = {1,  3,  8,  9,   16,  17,  32, 33,
	                                  64, 65, 96, 127, 128, 129, 200};
	static const uint32_t invalid[] = {5, 40, 70, 150};
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
		for (int fp8 = 0; fp8 < 2; fp8++) {
			struct weight weight =
			        make_weight(fp8, sizes[i][0], sizes[i][1], &layouts[0]);
			pack(&weight);
			set_valid(&weight, 1);
			for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
				if (is_possible(&weight, tokens[t]))
					check_product(&weight, with_tokens(plain, tokens[t]),
					              "plain");
			set_valid(&weight, 0);
			for (size_t t = 0; t < sizeof invalid / sizeof *invalid; t++)
				if (is_possible(&weight, invalid[t]))
					check_product(&weight, with_tokens(plain, invalid[t]),
					              "from the source");
			drop_weight(&weight);
		}
}
END_TEST

START_TEST(epilogues_equal_the_reference)
{
	static const struct call calls[] = {
	        {.alpha = 0.5f, .bias = true},
	        {.alpha = 1, .beta = 1, .ldd_extra = 3},
	        {.alpha = 2, .beta = -0.75f, .bias = true, .activation = QS_ACTIVATION_GELU},
	        {.alpha = 1, .bias = true, .activation = QS_ACTIVATION_RELU, .ldx_extra = 8},
	        {.alpha = 1, .beta = 1, .given = true},
	        {.alpha = 1, .activation = QS_ACTIVATION_GELU, .ldx_extra = 1, .x_offset = 1},
	        {.alpha = 1, .flags = QS_PRODUCT_FP32, .ldx_extra = 2, .x_offset = 2},
	        {.alpha = -1, .beta = 0.5f, .flags = QS_PRODUCT_FP32, .bias = true, .ldd_extra = 5},
	};
	for (int fp8 = 0; fp8 < 2; fp8++)
		for (int valid = 0; valid < 2; valid++) {
			struct weight weight = make_weight(fp8, 200, 320, &layouts[0]);
			pack(&weight);
			set_valid(&weight, (uint32_t)valid);
			for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
				for (uint32_t tokens = 1; tokens < 200; tokens += 12)
					if (is_possible(&weight, tokens) &&
					    (tokens <= QS_TOKENS_MAX || !calls[i].x_offset))
						check_product(
						        &weight, with_tokens(calls[i], tokens),
						        valid ? "epilogue" : "source's epilogue");
			drop_weight(&weight);
		}
}
END_TEST

START_TEST(weights_may_lie_anywhere)
{
	for (int layout = 0; layout < LAYOUTS; layout++)
		for (int fp8 = 0; fp8 < 2; fp8++) {
			struct weight weight = make_weight(fp8, 150, 448, &layouts[layout]);
			pack(&weight);
			for (uint32_t valid = 0; valid < 2; valid++) {
				set_valid(&weight, valid);
				for (uint32_t tokens = 20; tokens < 128; tokens += 80)
					if (is_possible(&weight, tokens))
						check_product(&weight, with_tokens(plain, tokens),
						              "layout");
				/* the reference would not have changed it either */
				expect_same_word(&weight);
			}
			drop_weight(&weight);
		}
}
END_TEST

static void check_split(struct weight *weight, uint32_t tokens, uint32_t strips, uint32_t split,
                        bool unmapped)
{
	struct product p = make_product(weight, with_tokens(plain, tokens));
	p.host.strips = nf4.device.hopper ? strips : QS_STRIPS_MAX;
	p.host.split = nf4.device.hopper ? split : 1;
	p.geometry = qs_product_geometry(&p.host, &nf4.device);
	p.device.strips = p.host.strips;
	p.device.split = p.host.split;
	p.unmapped = unmapped;
	run_host(&p);
	run_device(&p);
	compare_product(&p, "split");
	drop_product(&p);
}

/* Every way to cut a weight into blocks, not only the one that the plan takes, and X read in both
 * ways. The second weight is so long that each stage of a block is used several times. */
START_TEST(every_split_gives_the_product)
{
	static const int64_t sizes[][2] = {{300, 704}, {130, 8256}};
	static const uint32_t tokens[][3] = {{7, 16, 64}, {3, 12, 20}};
	for (size_t i = 0; i < 12; i++) {
		const int64_t *size = sizes[i % 2];
		struct weight weight = make_weight(i / 2 % 2, size[0], size[1], &layouts[0]);
		pack(&weight);
		set_valid(&weight, 1);
		for (uint32_t strips = 1; strips <= QS_STRIPS_MAX; strips *= 2)
			for (uint32_t split = 1; split <= QS_SPLIT_MAX; split *= 2)
				for (int unmapped = 0; unmapped < 2; unmapped++)
					check_split(&weight, tokens[i % 2][i / 4], strips, split,
					            unmapped);
		drop_weight(&weight);
	}
}
END_TEST

START_TEST(every_split_gives_the_wide_product)
{
	static const uint32_t tokens[] = {65, 128, 200};
	struct weight weight = make_weight(false, 300, 704, &layouts[0]);
	pack(&weight);
	set_valid(&weight, 1);
	for (size_t i = 0; i < 3 * QS_WIDE_KINDS * 3 && nf4.device.hopper; i++) {
		struct product p = make_product(&weight, with_tokens(plain, tokens[i % 3]));
		p.host.split = p.device.split = p.geometry.cluster = 1u << i / 3 % 3;
		p.geometry.kind = (uint32_t)i / 9;
		p.geometry.blocks =
		        (uint32_t)qs_wide_clusters(300, p.host.tokens, p.geometry.kind) *
		        p.host.split;
		run_host(&p);
		run_device(&p);
		compare_product(&p, "split");
		drop_product(&p);
	}
	drop_weight(&weight);
}
END_TEST

/* Rows of each number of tokens are those of the last, however X is read. */
static void check_rows(struct weight *weight, uint32_t first, uint32_t last)
{
	struct product p = make_product(weight, with_tokens(plain, last));
	const size_t row = (size_t)weight->n * 2;
	run_device(&p);
	memcpy(p.d.host, p.d.got, p.d.bytes + 2 * GUARD);
	for (uint32_t i = 2 * first; i <= 2 * last + 1; i++) {
		const uint32_t tokens = i / 2;
		p.device.tokens = tokens;
		p.unmapped = i % 2;
		plan(&p, &p.device);
		GPU_CHECK(gpu.cuMemsetD8_v2(p.d.device, POISON, p.d.bytes + 2 * GUARD));
		run_device(&p);
		ck_assert_msg(memcmp(p.d.got + GUARD, p.d.host + GUARD, row * tokens) == 0,
		              "%s: %u tokens differ from %u", weight->name, tokens, last);
		for (size_t at = row * tokens; at < p.d.bytes; at++)
			if (p.d.got[GUARD + at] != POISON)
				ck_abort_msg("%s: written beyond %u tokens", weight->name, tokens);
	}
	drop_product(&p);
}

START_TEST(a_row_is_the_same_for_every_number_of_tokens)
{
	static const int64_t sizes[][2] = {{64, 64}, {200, 960}, {2048, 1024}};
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
		for (int fp8 = 0; fp8 < 2; fp8++) {
			struct weight weight =
			        make_weight(fp8, sizes[i][0], sizes[i][1], &layouts[0]);
			pack(&weight);
			set_valid(&weight, 1);
			check_rows(&weight, 1, QS_TOKENS_MAX);
			if (is_possible(&weight, QS_WIDE_SPAN))
				check_rows(&weight, QS_TOKENS_MAX + 1, QS_WIDE_SPAN);
			drop_weight(&weight);
		}
}
END_TEST

/* 10 log10 of the power of the exact result with the weights that bitsandbytes would restore, over
 * that of the difference. */
START_TEST(products_are_as_accurate_as_the_weights_are)
{
	struct weight weight = make_weight(false, 128, 2048, &layouts[0]);
	pack(&weight);
	set_valid(&weight, 1);
	const uint32_t tokens = _i ? 100 : 8;
	struct call call = with_tokens(plain, tokens);
	call.flags = QS_PRODUCT_FP32;
	if (!is_possible(&weight, tokens))
		return;
	struct product p = make_product(&weight, call);
	struct buffer restored = make_buffer((size_t)(weight.n * weight.k) * 2);
	struct qs_expand_args expand = {.weight = weight.host.weight,
	                                .bf16 = host_of(&restored),
	                                .n = weight.n,
	                                .k = weight.k};
	run_reference(QS_KERNEL_NF4_EXPAND, &expand, 1, QS_PACK_THREADS);
	run_device(&p);
	const uint16_t *w = (const uint16_t *)(uintptr_t)host_of(&restored);
	const uint16_t *x = (const uint16_t *)(uintptr_t)p.host.x;
	double power = 0, error = 0;
	for (int64_t at = 0; at < tokens * weight.n; at++) {
		const int64_t token = at / weight.n, row = at % weight.n;
		double sum = 0;
		for (int64_t i = 0; i < weight.k; i++)
			sum += (double)qs_oracle_bf16_to_float(w[row * weight.k + i]) *
			       (double)qs_oracle_bf16_to_float(x[token * weight.k + i]);
		const double off = element_of(&p, p.d.got, at) - sum;
		power += sum * sum;
		error += off * off;
	}
	const double sqnr = 10 * log10(power / error);
	printf("SQNR against the restored weights: %.1f dB\n", sqnr);
	ck_assert_double_ge(sqnr, 50);
	drop_buffer(&restored);
	drop_product(&p);
	drop_weight(&weight);
}
END_TEST

/* Large among its neighbours: near zero, another sign may leave the code, and so the tile, as it
 * is, and there is nothing to notice. */
#define PLANTED 0x3d4d /* 0.05: 2.5 deviations */

/* One element changes: within 64 calls the kernel sees it, and then computes from W. */
START_TEST(a_changed_element_is_noticed_within_64_calls)
{
	const uint32_t tokens = _i ? 100 : 4;
	static const int64_t places[][2] = {{0, 0}, {63, 64}, {64, 319}, {199, 100}, {130, 65}};
	for (int layout = 0; layout < LAYOUTS; layout += 2)
		for (int fp8 = 0; fp8 < 2; fp8++)
			for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
				struct weight weight = make_weight(fp8, 200, 320, &layouts[layout]);
				uint16_t *element = &row_of(&weight, places[i][0])[places[i][1]];
				*element = PLANTED;
				if (!is_possible(&weight, tokens)) {
					drop_weight(&weight);
					continue;
				}
				pack(&weight);
				set_valid(&weight, 1);
				struct buffer outcome = told(&weight);
				*element ^= 0x8040;
				upload(&weight.source);
				struct product p =
				        make_product(&weight, with_tokens(plain, tokens));
				int calls = 0;
				do {
					run_device(&p);
					fetch(&weight.word);
					calls++;
				} while (((struct qs_weight *)(uintptr_t)(weight.word.got + GUARD))
				                 ->valid &&
				         calls < 64);
				const struct qs_weight *word =
				        (struct qs_weight *)(uintptr_t)(weight.word.got + GUARD);
				ck_assert_msg(word->valid == 0 && word->failed == 1,
				              "%s: not noticed", weight.name);
				ck_assert_int_eq(calls, places[i][0] % 64 + 1);
				ck_assert_int_eq((int)word->turn, calls);
				ck_assert_int_eq((int)word->readers, 0);
				expect_told(&outcome, 1);
				word_of(&weight)->valid = 0;
				run_host(&p);
				run_device(&p);
				compare_product(&p, "after a change");
				expect_told(&outcome, 1);
				drop_buffer(&outcome);
				drop_product(&p);
				drop_weight(&weight);
			}
}
END_TEST

/* The very call that sees the change multiplies what W is now, at least in the blocks that saw it.
 */
START_TEST(a_replaced_weight_is_noticed_at_once)
{
	for (int fp8 = 0; fp8 < 2; fp8++) {
		struct weight weight = make_weight(fp8, 500, 1024, &layouts[0]);
		pack(&weight);
		set_valid(&weight, 1);
		for (int64_t row = 0; row < weight.n; row++)
			for (int64_t i = 0; i < weight.k; i++)
				row_of(&weight, row)[i] = random_normal(0.02f);
		upload(&weight.source);
		for (uint32_t tokens = 8; tokens < 128; tokens += 92)
			if (is_possible(&weight, tokens)) {
				set_valid(&weight, 1);
				struct buffer outcome = told(&weight);
				check_product(&weight, with_tokens(plain, tokens), "replaced");
				expect_told(&outcome, 1); /* by one of all those threads */
				drop_buffer(&outcome);
			}
		drop_weight(&weight);
	}
}
END_TEST

START_TEST(a_frozen_weight_is_not_sampled)
{
	struct weight weight = make_weight(false, 64, 64, &layouts[0]);
	struct call call = with_tokens(plain, _i && nf4.device.hopper ? 100 : 1);
	call.flags = QS_PRODUCT_FROZEN;
	pack(&weight);
	set_valid(&weight, 1);
	memset(row_of(&weight, 0), 0, 128);
	upload(&weight.source);
	check_product(&weight, call, "frozen");
	expect_same_word(&weight);
	ck_assert_int_eq((int)word_of(&weight)->turn, 0);
	drop_weight(&weight);
}
END_TEST

START_TEST(tiles_other_than_the_descriptors_are_not_used)
{
	struct weight weight = make_weight(false, 130, 192, &layouts[0]);
	pack(&weight);
	set_valid(&weight, 1);
	struct product p =
	        make_product(&weight, with_tokens(plain, _i && nf4.device.hopper ? 100 : 1));
	p.host.packed -= 128; /* any other mapped memory */
	p.device.packed -= 128;
	run_host(&p);
	run_device(&p);
	compare_product(&p, "moved tiles");
	drop_product(&p);
	drop_weight(&weight);
}
END_TEST

START_TEST(a_weight_with_nan_is_multiplied_from_its_source)
{
	struct weight weight = make_weight(false, 64, 64, &layouts[0]);
	row_of(&weight, 5)[6] = 0x7fc0;
	pack(&weight);
	set_valid(&weight, 1);
	struct product p =
	        make_product(&weight, with_tokens(plain, _i && nf4.device.hopper ? 100 : 1));
	run_device(&p);
	for (int64_t row = 0; row < 64; row++)
		ck_assert_int_eq(isnan(element_of(&p, p.d.got, row)) != 0, row == 5);
	drop_product(&p);
	drop_weight(&weight);
}
END_TEST

/* ---- products that begin early -------------------------------------------------------------- */

/* Products in a row, each of which multiplies the result of the one before, in one stream or one
 * graph. Whoever reads what is not complete yet reads what another round left there. */
#define LINKS  6
#define SIDE   1024
#define ROUNDS 200
#define MADE   3 /* the link whose weight is packed within the chain, where that is wanted */

struct chain {
	struct weight weights[LINKS];
	struct product links[LINKS];
	struct buffer inputs[2], sources[2]; /* of the first link; of the weight that is packed */
	struct buffer words;                 /* a descriptor of zeros, and the word `valid`     */
	struct buffer poison;
	CUstream stream;
};

static void make_chain(struct chain *chain)
{
	struct call call = with_tokens(plain, 8);
	for (int i = 0; i < LINKS; i++) {
		chain->weights[i] = make_weight(i % 2 == 0, SIDE, SIDE, &layouts[0]);
		pack(&chain->weights[i]);
		set_valid(&chain->weights[i], 1);
		chain->links[i] = make_product(&chain->weights[i], call);
		if (i)
			chain->links[i].device.x = device_of(&chain->links[i - 1].d);
	}
	for (int i = 0; i < 2; i++) {
		chain->inputs[i] = make_buffer(chain->links[0].x.bytes);
		fill_normal(&chain->inputs[i], 1);
		chain->sources[i] = make_buffer(chain->weights[MADE].source.bytes);
		fill_normal(&chain->sources[i], 0.02f);
	}
	chain->words = make_buffer(sizeof(struct qs_weight) + sizeof(uint32_t));
	memset((void *)(uintptr_t)host_of(&chain->words), 0, sizeof(struct qs_weight));
	*(uint32_t *)(uintptr_t)(host_of(&chain->words) + sizeof(struct qs_weight)) = 1;
	upload(&chain->words);
	chain->poison = make_buffer(chain->links[0].d.bytes);
	GPU_CHECK(nf4.cuStreamCreate(&chain->stream, CU_STREAM_NON_BLOCKING));
}

static void drop_chain(struct chain *chain)
{
	for (int i = 0; i < LINKS; i++) {
		drop_product(&chain->links[i]);
		drop_weight(&chain->weights[i]);
	}
	for (int i = 0; i < 2; i++) {
		drop_buffer(&chain->inputs[i]);
		drop_buffer(&chain->sources[i]);
	}
	drop_buffer(&chain->words);
	drop_buffer(&chain->poison);
	GPU_CHECK(nf4.cuStreamDestroy(chain->stream));
}

static void copy_ahead(struct chain *chain, uint64_t to, uint64_t from, size_t bytes)
{
	GPU_CHECK(gpu.cuMemcpyDtoDAsync_v2(to, from, bytes, chain->stream));
}

/* The weight of a link becomes one of two others, and is packed, as the library does it. */
static void pack_ahead(struct chain *chain, int which)
{
	struct weight *weight = &chain->weights[MADE];
	void *params[] = {&weight->device};
	const uint64_t zeros = device_of(&chain->words);
	copy_ahead(chain, weight->device.source, device_of(&chain->sources[which]),
	           weight->source.bytes);
	copy_ahead(chain, weight->device.weight, zeros, sizeof(struct qs_weight));
	GPU_CHECK(gpu.cuLaunchKernel(weight->fp8 ? nf4.fp8_pack : nf4.pack,
	                             qs_pack_blocks(SIDE, SIDE, gpu.sms), 1, 1, QS_PACK_THREADS, 1,
	                             1, 0, chain->stream, params, NULL));
	copy_ahead(chain, weight->device.weight + offsetof(struct qs_weight, valid),
	           zeros + sizeof(struct qs_weight), sizeof(uint32_t));
}

/* A product whose tiles were made on the way does not begin early, nor does one after a copy. */
static void submit_chain(struct chain *chain, bool early, bool packs, int which)
{
	for (int i = 0; i < LINKS; i++)
		copy_ahead(chain, device_of(&chain->links[i].d), device_of(&chain->poison),
		           chain->links[i].d.bytes);
	copy_ahead(chain, device_of(&chain->links[0].x), device_of(&chain->inputs[which]),
	           chain->inputs[which].bytes);
	for (int i = 0; i < LINKS; i++) {
		struct product *link = &chain->links[i];
		const bool settled = early && i && !(packs && i == MADE);
		if (packs && i == MADE)
			pack_ahead(chain, which);
		link->device.flags &= ~(uint32_t)QS_PRODUCT_EARLY;
		link->device.flags |= settled ? QS_PRODUCT_EARLY : 0;
		GPU_CHECK(nf4_launch(&link->device, &link->geometry, link->weight->fp8, 1, settled,
		                     chain->stream));
	}
}

/* What the links give where none begins early, one after the other. */
static uint8_t *expected_of(struct chain *chain, bool packs, int which)
{
	const size_t bytes = chain->links[0].d.bytes;
	uint8_t *expected = malloc(LINKS * bytes);
	ck_assert(expected != NULL);
	submit_chain(chain, false, packs, which);
	GPU_CHECK(gpu.cuStreamSynchronize(chain->stream));
	for (size_t i = 0; i < LINKS; i++) {
		fetch(&chain->links[i].d);
		memcpy(expected + i * bytes, chain->links[i].d.got + GUARD, bytes);
	}
	return expected;
}

static void compare_chain(struct chain *chain, const uint8_t *expected, int round)
{
	const size_t bytes = chain->links[0].d.bytes;
	for (size_t i = 0; i < LINKS; i++) {
		fetch(&chain->links[i].d);
		ck_assert_msg(memcmp(chain->links[i].d.got + GUARD, expected + i * bytes, bytes) ==
		                      0,
		              "round %d, link %zu: not what it gives alone", round, i);
		expect_guards(&chain->links[i].d, "D");
	}
}

static CUgraphExec capture_chain(struct chain *chain, bool packs, int which)
{
	CUgraph graph;
	CUgraphExec exec;
	GPU_CHECK(nf4.cuStreamBeginCapture(chain->stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	submit_chain(chain, true, packs, which);
	GPU_CHECK(nf4.cuStreamEndCapture(chain->stream, &graph));
	GPU_CHECK(nf4.cuGraphInstantiate(&exec, graph, 0));
	GPU_CHECK(nf4.cuGraphDestroy(graph));
	return exec;
}

/* Two rounds with other inputs before each that is compared: nothing waits between them. */
static void check_chain(bool packs, bool captured)
{
	struct chain chain;
	uint8_t *expected[2];
	CUgraphExec execs[2] = {NULL, NULL};
	make_chain(&chain);
	for (int i = 0; i < 2; i++) {
		expected[i] = expected_of(&chain, packs, i);
		if (captured)
			execs[i] = capture_chain(&chain, packs, i);
	}
	ck_assert(memcmp(expected[0], expected[1], LINKS * chain.links[0].d.bytes) != 0);
	for (int round = 0; round < 3 * ROUNDS; round++) {
		if (captured)
			GPU_CHECK(nf4.cuGraphLaunch(execs[round % 2], chain.stream));
		else
			submit_chain(&chain, true, packs, round % 2);
		if (round % 3 < 2)
			continue;
		GPU_CHECK(gpu.cuStreamSynchronize(chain.stream));
		compare_chain(&chain, expected[round % 2], round);
	}
	for (int i = 0; i < 2; i++) {
		if (captured)
			GPU_CHECK(nf4.cuGraphExecDestroy(execs[i]));
		free(expected[i]);
	}
	drop_chain(&chain);
}

START_TEST(products_that_begin_early_give_what_they_give_alone)
{
	check_chain(_i % 2, _i / 2);
}
END_TEST

/* But a few addresses in that of most tokens in NF4, which spills nothing of what it multiplies. */
START_TEST(kernels_use_no_local_memory)
{
	const CUfunction functions[] = {nf4.pack,          nf4.fp8_pack,      nf4.expand,
	                                nf4.product[0][0], nf4.product[0][1], nf4.product[0][2],
	                                nf4.product[1][0], nf4.product[1][1], nf4.product[1][2],
	                                nf4.wide[0],       nf4.wide[1]};
	for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
		int bytes = -1;
		if (!functions[i])
			continue;
		GPU_CHECK(gpu.cuFuncGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
		                                 functions[i]));
		ck_assert_msg(bytes == 0 || !nf4.device.hopper, "kernel %zu uses %d bytes", i,
		              bytes);
	}
}
END_TEST

/* ---- suite ---------------------------------------------------------------------------------- */

static TCase *group(Suite *suite, const char *name)
{
	TCase *tests = tcase_create(name);
	tcase_add_checked_fixture(tests, setup, NULL);
	tcase_set_timeout(tests, 120);
	suite_add_tcase(suite, tests);
	return tests;
}

int main(void)
{
	gpu_require();
	Suite *suite = suite_create("nf4");
	TCase *tests = group(suite, "forms");
	tcase_add_test(tests, packed_weights_equal_the_reference);
	tcase_add_test(tests, every_bf16_is_coded_as_the_reference_does);
	tcase_add_test(tests, special_blocks_are_packed_as_the_header_says);
	tcase_add_test(tests, expanded_weights_equal_the_reference);
	tests = group(suite, "products");
	tcase_add_test(tests, products_equal_the_reference);
	tcase_add_test(tests, epilogues_equal_the_reference);
	tcase_add_test(tests, every_split_gives_the_product);
	tcase_add_test(tests, a_row_is_the_same_for_every_number_of_tokens);
	tcase_add_test(tests, every_split_gives_the_wide_product);
	tcase_add_loop_test(tests, products_are_as_accurate_as_the_weights_are, 0, 2);
	tests = group(suite, "layouts"); /* small enough for compute-sanitizer */
	tcase_add_test(tests, weights_may_lie_anywhere);
	tests = group(suite, "validity");
	tcase_add_loop_test(tests, a_changed_element_is_noticed_within_64_calls, 0, 2);
	tcase_add_test(tests, a_replaced_weight_is_noticed_at_once);
	tcase_add_loop_test(tests, a_frozen_weight_is_not_sampled, 0, 2);
	tcase_add_loop_test(tests, tiles_other_than_the_descriptors_are_not_used, 0, 2);
	tcase_add_loop_test(tests, a_weight_with_nan_is_multiplied_from_its_source, 0, 2);
	tests = group(suite, "early");
	tcase_add_loop_test(tests, products_that_begin_early_give_what_they_give_alone, 0, 4);
	tests = group(suite, "size");
	tcase_add_test(tests, kernels_use_no_local_memory);
	tcase_add_test(tests, weights_beyond_2_to_the_31_elements_are_indexed_in_64_bits);
	return qs_suite_main(suite);
}
