/* Speed of products with NF4 and fp8 weights on this machine's GPU, beside cuBLAS's bf16 product in
 * the same run, and of making and expanding the packed weights.
 *
 * Usage: bench_nf4 [--json FILE] [TOKENS N K [STRIPS SPLIT]]; with more than 64 tokens, T in place
 * of STRIPS. A figure is the median of several replays of a CUDA graph of products, one for each of
 * as many copies of the weight as exceed 400 MB in packed form, so that none is found in the L2
 * cache. It includes the gaps between kernels. The spread is half the distance of the slowest and
 * the fastest replay. Random normal data.
 */
#include <stdbool.h>
#include <string.h>

#include <cublas_v2.h>

#include "tests/gpu/nf4.h"

#define REPLAYS   21
#define COLD      ((size_t)400 << 20) /* packed bytes that a graph reads */
#define COPIES    1024
#define TOKENS    512 /* at most, of products */
#define X_BYTES   ((size_t)TOKENS * 32768 * 2)
#define COPY_SIZE ((size_t)1 << 30)

static CUstream stream;
static CUevent begin, end;
static cublasHandle_t cublas;
static cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                              const void *, const void *, cudaDataType, int, const void *,
                              cudaDataType, int, const void *, void *, cudaDataType, int,
                              cublasComputeType_t, cublasGemmAlgo_t);
static FILE *json;
static uint32_t strips, split; /* of products, instead of the plan's, if not 0 */

/* One weight in as many copies as it takes. */
struct work {
	int64_t n, k;
	int copies;
	CUdeviceptr sources, packed[2], scales, words[2]; /* [2]: NF4, fp8 */
	CUdeviceptr x, d, expanded;
};

enum what {
	WHAT_BF16,        /* cublasGemmEx                                            */
	WHAT_W4,          /* qs_w4a16                                                */
	WHAT_W4_WAITING,  /* the same, begun only when the product before has ended  */
	WHAT_W4_FROZEN,   /* the same, without sampling                              */
	WHAT_W4_INVALID,  /* the same, from the source                               */
	WHAT_W8,          /* qs_w8a16                                                */
	WHAT_PACK,        /* qs_nf4_pack                                             */
	WHAT_PACK_FP8,    /* qs_fp8_pack                                             */
	WHAT_STRAIGHT,    /* qs_nf4_expand: e4m3, as W lies                          */
	WHAT_BOTH,        /* the same and its transpose                              */
	WHAT_EXPAND_BF16, /* qs_nf4_expand: bf16                                     */
	WHATS
};

static const char *const what_names[] = {
        "bf16",     "w4a16",    "w4a16 waiting", "w4a16 frozen", "w4a16 invalid", "w8a16",
        "pack nf4", "pack fp8", "expand e4m3",   "expand both",  "expand bf16"};

/* Microseconds of one product. */
struct timing {
	double median, least, most;
};

static uint64_t random_state = 1;

static uint16_t random_number(void)
{
	float sum = 0;
	uint32_t bits;
	for (int i = 0; i < 4; i++) {
		random_state = random_state * 6364136223846793005u + 1442695040888963407u;
		sum += (float)(random_state >> 40) * 0x1p-24f - 0.5f;
	}
	memcpy(&bits, &sum, sizeof bits);
	return (uint16_t)(bits >> 16);
}

/* ---- buffers -------------------------------------------------------------------------------- */

/* A block of random numbers over and over. */
static void randomise(CUdeviceptr memory, size_t bytes)
{
	static uint16_t *numbers;
	const size_t block = (size_t)8 << 20;
	if (!numbers) {
		numbers = malloc(block);
		for (size_t i = 0; numbers && i < block / sizeof *numbers; i++)
			numbers[i] = random_number();
	}
	for (size_t at = 0; at < bytes && numbers; at += block)
		GPU_CHECK(gpu.cuMemcpyHtoD_v2(memory + at, numbers,
		                              bytes - at < block ? bytes - at : block));
}

static size_t source_bytes(const struct work *work)
{
	return (size_t)(work->n * work->k) * 2;
}

static size_t packed_bytes(const struct work *work, int fp8)
{
	return (size_t)(fp8 ? qs_fp8_bytes(work->n, work->k) : qs_nf4_bytes(work->n, work->k));
}

static struct qs_pack_args pack_args(const struct work *work, int fp8, int copy)
{
	const size_t c = (size_t)copy;
	return (struct qs_pack_args){
	        .source = work->sources + c * source_bytes(work),
	        .packed = work->packed[fp8] + c * packed_bytes(work, fp8),
	        .scale = work->scales + c * (size_t)work->n * 4,
	        .weight = work->words[fp8] + c * sizeof(struct qs_weight),
	        .ld = work->k,
	        .n = work->n,
	        .k = work->k,
	};
}

static void set_valid(const struct work *work, int fp8, uint32_t valid)
{
	for (int i = 0; i < work->copies; i++)
		GPU_CHECK(gpu.cuMemcpyHtoD_v2(pack_args(work, fp8, i).weight +
		                                      offsetof(struct qs_weight, valid),
		                              &valid, sizeof valid));
}

static void make_work(struct work *work, int64_t n, int64_t k)
{
	work->n = n;
	work->k = k;
	const size_t copies = COLD / packed_bytes(work, 0) + 1;
	work->copies = copies < COPIES ? (int)copies : COPIES;
	const size_t c = (size_t)work->copies;
	work->sources = gpu_alloc(c * source_bytes(work));
	work->scales = gpu_alloc(c * (size_t)n * 4);
	work->x = gpu_alloc(X_BYTES);
	work->d = gpu_alloc((size_t)n * TOKENS * 2);
	work->expanded = gpu_alloc(source_bytes(work) + 256);
	randomise(work->sources, c * source_bytes(work));
	randomise(work->x, X_BYTES);
	for (int fp8 = 0; fp8 < 2; fp8++) {
		work->packed[fp8] = gpu_alloc(c * packed_bytes(work, fp8));
		work->words[fp8] = gpu_alloc(c * sizeof(struct qs_weight));
		GPU_CHECK(gpu.cuMemsetD8_v2(work->words[fp8], 0, c * sizeof(struct qs_weight)));
		for (int i = 0; i < work->copies; i++) {
			struct qs_pack_args args = pack_args(work, fp8, i);
			gpu_launch(fp8 ? nf4.fp8_pack : nf4.pack, qs_pack_blocks(n, k, gpu.sms),
			           QS_PACK_THREADS, &args);
		}
		set_valid(work, fp8, 1);
	}
}

static void drop_work(const struct work *work)
{
	const CUdeviceptr all[] = {work->sources, work->packed[0], work->packed[1],
	                           work->scales,  work->words[0],  work->words[1],
	                           work->x,       work->d,         work->expanded};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		GPU_CHECK(gpu.cuMemFree_v2(all[i]));
}

/* ---- calls ---------------------------------------------------------------------------------- */

static void call_bf16(const struct work *work, uint32_t tokens, int copy)
{
	const float one = 1, zero = 0;
	const cublasStatus_t status =
	        gemm(cublas, CUBLAS_OP_T, CUBLAS_OP_N, (int)work->n, (int)tokens, (int)work->k,
	             &one, (void *)pack_args(work, 0, copy).source, CUDA_R_16BF, (int)work->k,
	             (void *)work->x, CUDA_R_16BF, (int)work->k, &zero, (void *)work->d,
	             CUDA_R_16BF, (int)work->n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
	if (status != CUBLAS_STATUS_SUCCESS) {
		fprintf(stderr, "cublasGemmEx: %d\n", (int)status);
		exit(EXIT_FAILURE);
	}
}

static void call_product(const struct work *work, enum what what, uint32_t tokens, int copy)
{
	const int fp8 = what == WHAT_W8;
	const struct qs_pack_args pack = pack_args(work, fp8, copy);
	struct qs_product_args args = {.weight = pack.weight,
	                               .packed = pack.packed,
	                               .scale = pack.scale,
	                               .source = pack.source,
	                               .x = work->x,
	                               .d = work->d,
	                               .ld = work->k,
	                               .ldx = work->k,
	                               .ldd = work->n,
	                               .n = work->n,
	                               .k = work->k,
	                               .alpha = 1,
	                               .tokens = tokens,
	                               .flags = QS_PRODUCT_EARLY};
	const bool wide = tokens > QS_TOKENS_MAX;
	struct qs_product_geometry geometry =
	        wide ? qs_wide_plan(&args, &nf4.device) : qs_product_plan(&args, fp8, &nf4.device);
	if (what == WHAT_W4_FROZEN)
		args.flags |= QS_PRODUCT_FROZEN;
	if (wide && strips) {
		geometry.kind = strips / 128; /* T */
		args.split = geometry.cluster = split;
		geometry.blocks =
		        (uint32_t)qs_wide_clusters(work->n, tokens, geometry.kind) * split;
	} else if (strips) {
		args.strips = strips;
		args.split = split;
		geometry = qs_product_geometry(&args, &nf4.device);
	}
	GPU_CHECK(wide ? nf4_launch_wide(&args, &geometry, what != WHAT_W4_WAITING, stream)
	               : nf4_launch(&args, &geometry, fp8, 1, what != WHAT_W4_WAITING, stream));
}

static void launch(CUfunction kernel, unsigned blocks, void *args)
{
	void *params[] = {args};
	GPU_CHECK(gpu.cuLaunchKernel(kernel, blocks, 1, 1, QS_PACK_THREADS, 1, 1, 0, stream, params,
	                             NULL));
}

static void call_other(const struct work *work, enum what what, int copy)
{
	const unsigned blocks = qs_pack_blocks(work->n, work->k, gpu.sms);
	struct qs_pack_args pack = pack_args(work, what == WHAT_PACK_FP8, copy);
	struct qs_expand_args expand = {.weight = pack.weight, .n = work->n, .k = work->k};
	if (what == WHAT_PACK || what == WHAT_PACK_FP8) {
		launch(what == WHAT_PACK ? nf4.pack : nf4.fp8_pack, blocks, &pack);
		return;
	}
	if (what == WHAT_EXPAND_BF16)
		expand.bf16 = work->expanded;
	else
		expand.straight = work->expanded;
	if (what == WHAT_BOTH)
		expand.turned = work->expanded + source_bytes(work) / 2;
	launch(nf4.expand, blocks, &expand);
}

static void call(const struct work *work, enum what what, uint32_t tokens, int copy)
{
	if (what == WHAT_BF16)
		call_bf16(work, tokens, copy);
	else if (what < WHAT_PACK)
		call_product(work, what, tokens, copy);
	else
		call_other(work, what, copy);
}

/* ---- timing --------------------------------------------------------------------------------- */

static CUgraphExec capture(const struct work *work, enum what what, uint32_t tokens)
{
	CUgraph graph;
	CUgraphExec exec;
	GPU_CHECK(nf4.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	for (int i = 0; i < work->copies; i++)
		call(work, what, tokens, i);
	GPU_CHECK(nf4.cuStreamEndCapture(stream, &graph));
	GPU_CHECK(nf4.cuGraphInstantiate(&exec, graph, 0));
	GPU_CHECK(nf4.cuGraphDestroy(graph));
	return exec;
}

static int ascending(const void *left, const void *right)
{
	const float a = *(const float *)left, b = *(const float *)right;
	return (a > b) - (a < b);
}

static struct timing measure(const struct work *work, enum what what, uint32_t tokens)
{
	float ms[REPLAYS];
	const double scale = 1000.0 / work->copies;
	set_valid(work, what == WHAT_W8, what != WHAT_W4_INVALID);
	const CUgraphExec exec = capture(work, what, tokens);
	for (int i = -2; i < REPLAYS; i++) {
		GPU_CHECK(gpu.cuEventRecord(begin, stream));
		GPU_CHECK(nf4.cuGraphLaunch(exec, stream));
		GPU_CHECK(gpu.cuEventRecord(end, stream));
		GPU_CHECK(gpu.cuEventSynchronize(end));
		if (i >= 0)
			GPU_CHECK(gpu.cuEventElapsedTime(&ms[i], begin, end));
	}
	GPU_CHECK(nf4.cuGraphExecDestroy(exec));
	qsort(ms, REPLAYS, sizeof *ms, ascending);
	return (struct timing){(double)ms[REPLAYS / 2] * scale, (double)ms[0] * scale,
	                       (double)ms[REPLAYS - 1] * scale};
}

/* Bytes that a call is meant to move. */
static double bytes_of(const struct work *work, enum what what, uint32_t tokens)
{
	const double weights = (double)(work->n * work->k);
	const double packed = (double)packed_bytes(work, what == WHAT_W8 || what == WHAT_PACK_FP8);
	const double others = (double)tokens * (double)(work->n + work->k) * 2;
	switch (what) {
	case WHAT_BF16:
	case WHAT_W4_INVALID:
		return 2 * weights + others;
	case WHAT_W4:
	case WHAT_W4_WAITING:
	case WHAT_W8:
		return packed + weights / 32 + others;
	case WHAT_W4_FROZEN:
		return packed + others;
	case WHAT_PACK:
	case WHAT_PACK_FP8:
		return 2 * weights + packed;
	case WHAT_STRAIGHT:
		return packed + weights;
	default:
		return packed + 2 * weights;
	}
}

/* ---- output --------------------------------------------------------------------------------- */

static void report_json(const struct work *work, enum what what, uint32_t tokens,
                        const struct timing *timing)
{
	static const char *separator = "";
	if (!json)
		return;
	fprintf(json,
	        "%s\n  {\"what\": \"%s\", \"n\": %lld, \"k\": %lld, \"tokens\": %u, "
	        "\"bytes\": %.0f, \"us\": %.3f, \"us_min\": %.3f, \"us_max\": %.3f}",
	        separator, what_names[what], (long long)work->n, (long long)work->k, tokens,
	        bytes_of(work, what, tokens), timing->median, timing->least, timing->most);
	separator = ",";
}

/* us, spread in percent, TB/s. */
static struct timing report(const struct work *work, enum what what, uint32_t tokens)
{
	const struct timing timing = measure(work, what, tokens);
	printf("  %7.2f %4.1f%% %5.2f", timing.median,
	       (timing.most - timing.least) / 2 / timing.median * 100,
	       bytes_of(work, what, tokens) / timing.median / 1e6);
	report_json(work, what, tokens, &timing);
	return timing;
}

static void run_products(const struct work *work, uint32_t tokens)
{
	printf("%6lld x %-6lld %3u", (long long)work->n, (long long)work->k, tokens);
	const struct timing bf16 = report(work, WHAT_BF16, tokens);
	const struct timing w4 = report(work, WHAT_W4, tokens);
	report(work, WHAT_W4_WAITING, tokens);
	report(work, WHAT_W4_FROZEN, tokens);
	printf("  %5.2f", bf16.median / w4.median);
	if (tokens <= QS_TOKENS_MAX)
		printf("  %5.2f", bf16.median / report(work, WHAT_W8, tokens).median);
	printf("\n");
	fflush(stdout);
}

static void run_others(const struct work *work)
{
	printf("%6lld x %-6lld", (long long)work->n, (long long)work->k);
	report(work, WHAT_W4_INVALID, 8);
	for (int what = WHAT_PACK; what < WHATS; what++)
		report(work, (enum what)what, 0);
	printf("\n");
	fflush(stdout);
}

static void print_heads(void)
{
	printf("of each: us a call (median of %d), +-, TB/s, and bf16 / w4a16; then w8a16 and bf16 "
	       "/ w8a16; clusters of 1, 2, 4: %d, %d, %d\n%15s %3s",
	       REPLAYS, nf4.device.clusters[0], nf4.device.clusters[1], nf4.device.clusters[2],
	       "n x k     ", "tok");
	for (int what = WHAT_BF16; what <= WHAT_W8; what++)
		if (what != WHAT_W4_INVALID)
			printf("  %-19s", what_names[what]);
	printf("\n");
}

/* ---- main ----------------------------------------------------------------------------------- */

static void open_all(void)
{
	void *blas = dlopen("libcublas.so.13", RTLD_NOW);
	if (!blas)
		blas = dlopen("libcublas.so.12", RTLD_NOW);
	nf4_open();
	GPU_CHECK(nf4.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	GPU_CHECK(gpu.cuEventCreate(&begin, CU_EVENT_DEFAULT));
	GPU_CHECK(gpu.cuEventCreate(&end, CU_EVENT_DEFAULT));
	cublasStatus_t (*create)(cublasHandle_t *), (*set_stream)(cublasHandle_t, cudaStream_t);
	*(void **)&create = nf4_symbol(blas, "cublasCreate_v2");
	*(void **)&set_stream = nf4_symbol(blas, "cublasSetStream_v2");
	*(void **)&gemm = nf4_symbol(blas, "cublasGemmEx");
	if (create(&cublas) || set_stream(cublas, stream)) {
		fprintf(stderr, "cuBLAS does not start\n");
		exit(EXIT_FAILURE);
	}
}

static void run_all(void)
{
	static const int64_t shapes[][2] = {{1024, 1024},  {2048, 2048},  {1024, 4096},
	                                    {4096, 4096},  {8192, 8192},  {14336, 4096},
	                                    {4096, 14336}, {128256, 4096}};
	static const uint32_t tokens[] = {1, 8, 16, 32, 64, 65, 96, 128, 256, 512};
	struct work work;
	print_heads();
	for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
		make_work(&work, shapes[i][0], shapes[i][1]);
		for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
			run_products(&work, tokens[t]);
		drop_work(&work);
	}
	printf("%15s", "n x k     ");
	for (int what = WHAT_W4_INVALID; what < WHATS; what++)
		if (what != WHAT_W8)
			printf("  %-19s", what_names[what]);
	printf("\n");
	for (size_t i = 3; i < sizeof shapes / sizeof *shapes; i++) {
		make_work(&work, shapes[i][0], shapes[i][1]);
		run_others(&work);
		drop_work(&work);
	}
}

int main(int argc, char **argv)
{
	struct work work;
	if (argc >= 3 && strcmp(argv[1], "--json") == 0) {
		json = fopen(argv[2], "w");
		argc -= 2;
		argv += 2;
		if (!json)
			return 2;
		fprintf(json, "[");
	}
	if (argc != 1 && argc != 4 && argc != 6) {
		fprintf(stderr, "usage: bench_nf4 [--json FILE] [TOKENS N K [STRIPS SPLIT]]\n");
		return 2;
	}
	gpu_require();
	open_all();
	if (argc == 6) {
		strips = (uint32_t)atoi(argv[4]);
		split = (uint32_t)atoi(argv[5]);
	}
	if (argc > 1) {
		print_heads();
		make_work(&work, atoll(argv[2]), atoll(argv[3]));
		if (atoi(argv[1]))
			run_products(&work, (uint32_t)atoi(argv[1]));
		else
			run_others(&work);
		drop_work(&work);
	} else {
		run_all();
	}
	if (json)
		fprintf(json, "\n]\n");
	return json && fclose(json) ? 1 : 0;
}
