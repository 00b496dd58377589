/* Trains a two-layer perceptron in bf16 with cuBLAS: an ordinary program to try things on.
 *
 * Forward runs through cublasLtMatmul (bias and ReLU fused), gradients through cublasGemmEx with
 * fp32 weight gradients; weights have an fp32 master copy. There are no kernels: all elementwise
 * work happens on the host between copies, so the program runs on a GPU and on a CPU emulation of
 * CUDA alike, and only the time spent in products says anything. Labels are drawn from a random
 * teacher's distribution, so the loss has a floor well above zero and two runs can be compared.
 */
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <getopt.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define AVERAGED      20   /* steps whose mean is the final loss */
#define TEACHER_RANK  32   /* hidden features of the teacher */
#define TEACHER_GAIN  3.0f /* deviation of the teacher's logits */
#define MOMENTUM      0.9f
#define WORKSPACE     ((size_t)4 << 20)
#define DIMENSION_MAX (1 << 20)

struct options {
	int steps;   /* optimiser steps               */
	int batch;   /* samples per step              */
	int in;      /* features of a sample          */
	int hidden;  /* features of the hidden layer  */
	int out;     /* classes                       */
	int batches; /* distinct ones, used in turn   */
	int seed;    /* of data, teacher and weights  */
	float rate;  /* learning rate, 0 = from sizes */
	bool quiet;  /* only the last line            */
};

/* A parameter tensor: what the optimiser keeps, and the bf16 copy the products read. */
struct parameter {
	size_t count;
	float *master;   /* host                       */
	float *velocity; /* host                       */
	float *gradient; /* host                       */
	uint16_t *bf16;  /* host staging of the copy   */
	uint16_t *copy;  /* device, bf16               */
};

/* Y[batch][out] = activation(X[batch][in] W[out][in]' + b), all row-major. */
struct linear {
	int in, out;
	struct parameter weight; /* [out][in]                         */
	struct parameter bias;   /* [out]                             */
	float *weight_gradient;  /* device, fp32 [out][in]            */
	uint16_t *y;             /* device, bf16 [batch][out]         */
	uint16_t *dy;            /* device, bf16 [batch][out]         */
	uint16_t *host_y;        /* host copy of y                    */
	uint16_t *host_dy;       /* host copy of dy                   */
	cublasLtMatmulDesc_t desc;
	cublasLtMatrixLayout_t w_layout, x_layout, y_layout;
	cublasLtMatmulAlgo_t algo;
};

struct trainer {
	struct options options;
	uint64_t random; /* generator state                            */
	cublasHandle_t blas;
	cublasLtHandle_t lt;
	void *workspace; /* device                                     */
	uint16_t *x;     /* device, bf16 [batches][batch][in]          */
	int *labels;     /* host [batches][batch]                      */
	struct linear layer[2];
	double product_seconds; /* in products, launch to completion          */
};

static void check_cuda(cudaError_t error, const char *what)
{
	if (error == cudaSuccess)
		return;
	fprintf(stderr, "mlp: %s: %s\n", what, cudaGetErrorString(error));
	exit(EXIT_FAILURE);
}

static void check_blas(cublasStatus_t status, const char *what)
{
	if (status == CUBLAS_STATUS_SUCCESS)
		return;
	fprintf(stderr, "mlp: %s: status %d\n", what, (int)status);
	exit(EXIT_FAILURE);
}

static void *host_alloc(size_t count, size_t size)
{
	void *memory = calloc(count, size);
	if (memory == NULL) {
		fprintf(stderr, "mlp: out of memory\n");
		exit(EXIT_FAILURE);
	}
	return memory;
}

static void *device_alloc(size_t bytes)
{
	void *memory = NULL;
	check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
	return memory;
}

static void upload(void *device, const void *host, size_t bytes)
{
	check_cuda(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "copy to device");
}

static void download(void *host, const void *device, size_t bytes)
{
	check_cuda(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "copy to host");
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Uniform in (0, 1): splitmix64, which is sound for any seed. */
static float uniform(uint64_t *state)
{
	uint64_t z = (*state += 0x9e3779b97f4a7c15u);
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return ((float)((z ^ (z >> 31)) >> 41) + 0.5f) * 0x1p-23f;
}

static float normal(uint64_t *state)
{
	float radius = sqrtf(-2.0f * logf(uniform(state)));
	return radius * cosf(6.28318531f * uniform(state));
}

/* Round to nearest even; the values here are finite. */
static uint16_t to_bf16(float value)
{
	uint32_t bits;
	memcpy(&bits, &value, sizeof(bits));
	return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float from_bf16(uint16_t half)
{
	uint32_t bits = (uint32_t)half << 16;
	float value;
	memcpy(&value, &bits, sizeof(value));
	return value;
}

static void publish(struct parameter *p)
{
	for (size_t i = 0; i < p->count; i++)
		p->bf16[i] = to_bf16(p->master[i]);
	upload(p->copy, p->bf16, p->count * sizeof(*p->bf16));
}

static void parameter_init(struct parameter *p, size_t count, float deviation, uint64_t *random)
{
	p->count = count;
	p->master = host_alloc(count, sizeof(float));
	p->velocity = host_alloc(count, sizeof(float));
	p->gradient = host_alloc(count, sizeof(float));
	p->bf16 = host_alloc(count, sizeof(uint16_t));
	p->copy = device_alloc(count * sizeof(uint16_t));
	for (size_t i = 0; deviation > 0 && i < count; i++)
		p->master[i] = deviation * normal(random);
	publish(p);
}

static void parameter_free(struct parameter *p)
{
	free(p->master);
	free(p->velocity);
	free(p->gradient);
	free(p->bf16);
	check_cuda(cudaFree(p->copy), "cudaFree");
}

static void parameter_update(struct parameter *p, float rate)
{
	for (size_t i = 0; i < p->count; i++) {
		p->velocity[i] = MOMENTUM * p->velocity[i] + p->gradient[i];
		p->master[i] -= rate * p->velocity[i];
	}
	publish(p);
}

/* A row-major matrix [rows][columns] is the column-major columns x rows one of cuBLAS. */
static cublasLtMatrixLayout_t layout(int rows, int columns)
{
	cublasLtMatrixLayout_t result;
	check_blas(cublasLtMatrixLayoutCreate(&result, CUDA_R_16BF, (uint64_t)columns,
	                                      (uint64_t)rows, columns),
	           "cublasLtMatrixLayoutCreate");
	return result;
}

static void describe(struct linear *l, cublasLtEpilogue_t epilogue)
{
	cublasOperation_t transposed = CUBLAS_OP_T;
	void *bias = l->bias.copy;

	check_blas(cublasLtMatmulDescCreate(&l->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
	           "cublasLtMatmulDescCreate");
	check_blas(cublasLtMatmulDescSetAttribute(l->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
	                                          sizeof(transposed)),
	           "transposition");
	check_blas(cublasLtMatmulDescSetAttribute(l->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
	                                          sizeof(epilogue)),
	           "epilogue");
	check_blas(cublasLtMatmulDescSetAttribute(l->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias,
	                                          sizeof(bias)),
	           "bias pointer");
}

static void choose_algorithm(struct linear *l, cublasLtHandle_t lt)
{
	cublasLtMatmulPreference_t preference;
	cublasLtMatmulHeuristicResult_t result;
	size_t limit = WORKSPACE;
	int found = 0;

	check_blas(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
	check_blas(cublasLtMatmulPreferenceSetAttribute(preference,
	                                                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
	                                                &limit, sizeof(limit)),
	           "workspace limit");
	check_blas(cublasLtMatmulAlgoGetHeuristic(lt, l->desc, l->w_layout, l->x_layout,
	                                          l->y_layout, l->y_layout, preference, 1, &result,
	                                          &found),
	           "cublasLtMatmulAlgoGetHeuristic");
	check_blas(found > 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm");
	l->algo = result.algo;
	check_blas(cublasLtMatmulPreferenceDestroy(preference), "cublasLtMatmulPreferenceDestroy");
}

static void linear_init(struct trainer *t, struct linear *l, int in, int out,
                        cublasLtEpilogue_t epilogue)
{
	size_t outputs = (size_t)t->options.batch * (size_t)out;
	size_t weights = (size_t)in * (size_t)out;

	l->in = in;
	l->out = out;
	parameter_init(&l->weight, weights, sqrtf(2.0f / (float)in), &t->random);
	parameter_init(&l->bias, (size_t)out, 0.0f, &t->random);
	l->weight_gradient = device_alloc(weights * sizeof(float));
	l->y = device_alloc(outputs * sizeof(uint16_t));
	l->dy = device_alloc(outputs * sizeof(uint16_t));
	l->host_y = host_alloc(outputs, sizeof(uint16_t));
	l->host_dy = host_alloc(outputs, sizeof(uint16_t));
	l->w_layout = layout(out, in);
	l->x_layout = layout(t->options.batch, in);
	l->y_layout = layout(t->options.batch, out);
	describe(l, epilogue);
	choose_algorithm(l, t->lt);
}

static void linear_free(struct linear *l)
{
	parameter_free(&l->weight);
	parameter_free(&l->bias);
	check_cuda(cudaFree(l->weight_gradient), "cudaFree");
	check_cuda(cudaFree(l->y), "cudaFree");
	check_cuda(cudaFree(l->dy), "cudaFree");
	free(l->host_y);
	free(l->host_dy);
	check_blas(cublasLtMatmulDescDestroy(l->desc), "cublasLtMatmulDescDestroy");
	check_blas(cublasLtMatrixLayoutDestroy(l->w_layout), "cublasLtMatrixLayoutDestroy");
	check_blas(cublasLtMatrixLayoutDestroy(l->x_layout), "cublasLtMatrixLayoutDestroy");
	check_blas(cublasLtMatrixLayoutDestroy(l->y_layout), "cublasLtMatrixLayoutDestroy");
}

static void forward(struct trainer *t, struct linear *l, const uint16_t *x)
{
	float one = 1.0f, zero = 0.0f;
	check_blas(cublasLtMatmul(t->lt, l->desc, &one, l->weight.copy, l->w_layout, x, l->x_layout,
	                          &zero, l->y, l->y_layout, l->y, l->y_layout, &l->algo,
	                          t->workspace, WORKSPACE, NULL),
	           "cublasLtMatmul");
}

/* dX[batch][in] = dY W */
static void input_gradient(struct trainer *t, struct linear *l, uint16_t *dx)
{
	float one = 1.0f, zero = 0.0f;
	check_blas(cublasGemmEx(t->blas, CUBLAS_OP_N, CUBLAS_OP_N, l->in, t->options.batch, l->out,
	                        &one, l->weight.copy, CUDA_R_16BF, l->in, l->dy, CUDA_R_16BF,
	                        l->out, &zero, dx, CUDA_R_16BF, l->in, CUBLAS_COMPUTE_32F,
	                        CUBLAS_GEMM_DEFAULT),
	           "cublasGemmEx (input gradient)");
}

/* dW[out][in] = dY' X, in fp32 as optimisers with a master copy want it */
static void weight_gradient(struct trainer *t, struct linear *l, const uint16_t *x)
{
	float one = 1.0f, zero = 0.0f;
	check_blas(cublasGemmEx(t->blas, CUBLAS_OP_N, CUBLAS_OP_T, l->in, l->out, t->options.batch,
	                        &one, x, CUDA_R_16BF, l->in, l->dy, CUDA_R_16BF, l->out, &zero,
	                        l->weight_gradient, CUDA_R_32F, l->in, CUBLAS_COMPUTE_32F,
	                        CUBLAS_GEMM_DEFAULT),
	           "cublasGemmEx (weight gradient)");
}

/* Waits for the products launched since `start` and adds their time. */
static void products_done(struct trainer *t, double start)
{
	check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
	t->product_seconds += now() - start;
}

/* Softmax cross-entropy of one sample; writes d loss / d logits divided by the batch. */
static double sample_loss(const uint16_t *logits, uint16_t *gradient, int classes, int label,
                          int batch)
{
	float top = -INFINITY, sum = 0.0f;
	for (int c = 0; c < classes; c++)
		top = fmaxf(top, from_bf16(logits[c]));
	for (int c = 0; c < classes; c++)
		sum += expf(from_bf16(logits[c]) - top);
	for (int c = 0; c < classes; c++) {
		float p = expf(from_bf16(logits[c]) - top) / sum;
		gradient[c] = to_bf16((p - (c == label ? 1.0f : 0.0f)) / (float)batch);
	}
	return log((double)sum) - (double)(from_bf16(logits[label]) - top);
}

static double batch_loss(struct trainer *t, const int *labels)
{
	struct linear *l = &t->layer[1];
	int batch = t->options.batch;
	size_t bytes = (size_t)batch * (size_t)l->out * sizeof(uint16_t);
	double loss = 0.0;

	download(l->host_y, l->y, bytes);
	for (int i = 0; i < batch; i++) {
		size_t row = (size_t)i * (size_t)l->out;
		loss += sample_loss(l->host_y + row, l->host_dy + row, l->out, labels[i], batch);
	}
	upload(l->dy, l->host_dy, bytes);
	return loss / batch;
}

/* Zeroes the gradient where the ReLU was closed. */
static void relu_gradient(struct trainer *t, struct linear *l)
{
	size_t count = (size_t)t->options.batch * (size_t)l->out;

	download(l->host_y, l->y, count * sizeof(uint16_t));
	download(l->host_dy, l->dy, count * sizeof(uint16_t));
	for (size_t i = 0; i < count; i++)
		if (l->host_y[i] == 0 || l->host_y[i] >> 15)
			l->host_dy[i] = 0;
	upload(l->dy, l->host_dy, count * sizeof(uint16_t));
}

static void linear_update(struct trainer *t, struct linear *l)
{
	memset(l->bias.gradient, 0, l->bias.count * sizeof(float));
	for (int i = 0; i < t->options.batch; i++)
		for (int c = 0; c < l->out; c++)
			l->bias.gradient[c] +=
			        from_bf16(l->host_dy[(size_t)i * (size_t)l->out + (size_t)c]);
	download(l->weight.gradient, l->weight_gradient, l->weight.count * sizeof(float));
	parameter_update(&l->weight, t->options.rate);
	parameter_update(&l->bias, t->options.rate);
}

static double train_step(struct trainer *t, int index)
{
	struct linear *first = &t->layer[0], *second = &t->layer[1];
	size_t batch = (size_t)t->options.batch;
	const uint16_t *x = t->x + (size_t)index * batch * (size_t)first->in;

	double start = now();
	forward(t, first, x);
	forward(t, second, first->y);
	products_done(t, start);
	double loss = batch_loss(t, t->labels + (size_t)index * batch);

	start = now();
	weight_gradient(t, second, first->y);
	input_gradient(t, second, first->dy);
	products_done(t, start);
	relu_gradient(t, first);

	start = now();
	weight_gradient(t, first, x);
	products_done(t, start);

	linear_update(t, first);
	linear_update(t, second);
	return loss;
}

/* Draws a label from softmax(teacher(x)) by adding Gumbel noise to the logits. */
static int draw_label(struct trainer *t, const float *x, const float *first, const float *second)
{
	float hidden[TEACHER_RANK], best = -INFINITY;
	int label = 0;

	for (int h = 0; h < TEACHER_RANK; h++) {
		float sum = 0.0f;
		for (int i = 0; i < t->options.in; i++)
			sum += x[i] * first[(size_t)h * (size_t)t->options.in + (size_t)i];
		hidden[h] = fmaxf(sum, 0.0f);
	}
	for (int c = 0; c < t->options.out; c++) {
		float logit = -logf(-logf(uniform(&t->random)));
		for (int h = 0; h < TEACHER_RANK; h++)
			logit += hidden[h] * second[c * TEACHER_RANK + h];
		if (logit > best) {
			best = logit;
			label = c;
		}
	}
	return label;
}

static float *random_matrix(struct trainer *t, size_t count, float deviation)
{
	float *matrix = host_alloc(count, sizeof(float));
	for (size_t i = 0; i < count; i++)
		matrix[i] = deviation * normal(&t->random);
	return matrix;
}

static void data_init(struct trainer *t)
{
	size_t in = (size_t)t->options.in,
	       samples = (size_t)t->options.batch * (size_t)t->options.batches;
	float *first = random_matrix(t, TEACHER_RANK * in, sqrtf(2.0f / (float)in));
	float *second = random_matrix(t, TEACHER_RANK * (size_t)t->options.out,
	                              TEACHER_GAIN / sqrtf((float)TEACHER_RANK));
	float *sample = host_alloc(in, sizeof(float));
	uint16_t *x = host_alloc(samples * in, sizeof(uint16_t));

	t->labels = host_alloc(samples, sizeof(int));
	t->x = device_alloc(samples * in * sizeof(uint16_t));
	for (size_t s = 0; s < samples; s++) {
		for (size_t i = 0; i < in; i++) {
			sample[i] = normal(&t->random);
			x[s * in + i] = to_bf16(sample[i]);
		}
		t->labels[s] = draw_label(t, sample, first, second);
	}
	upload(t->x, x, samples * in * sizeof(uint16_t));
	free(first);
	free(second);
	free(sample);
	free(x);
}

static void trainer_init(struct trainer *t)
{
	struct options *o = &t->options;

	t->random = (uint64_t)o->seed;
	if (o->rate <= 0.0f) /* curvature grows with the number of inputs of a layer */
		o->rate = 8.0f / (float)(o->hidden > o->in ? o->hidden : o->in);
	check_blas(cublasCreate(&t->blas), "cublasCreate");
	check_blas(cublasLtCreate(&t->lt), "cublasLtCreate");
	t->workspace = device_alloc(WORKSPACE);
	data_init(t);
	linear_init(t, &t->layer[0], o->in, o->hidden, CUBLASLT_EPILOGUE_RELU_BIAS);
	linear_init(t, &t->layer[1], o->hidden, o->out, CUBLASLT_EPILOGUE_BIAS);
}

static void trainer_free(struct trainer *t)
{
	linear_free(&t->layer[0]);
	linear_free(&t->layer[1]);
	free(t->labels);
	check_cuda(cudaFree(t->x), "cudaFree");
	check_cuda(cudaFree(t->workspace), "cudaFree");
	check_blas(cublasLtDestroy(t->lt), "cublasLtDestroy");
	check_blas(cublasDestroy(t->blas), "cublasDestroy");
}

/* Returns the mean loss of the last steps. */
static double train(struct trainer *t)
{
	int steps = t->options.steps, averaged = steps < AVERAGED ? steps : AVERAGED;
	int interval = steps < 10 ? 1 : steps / 10;
	double sum = 0.0;

	for (int step = 0; step < steps; step++) {
		double loss = train_step(t, step % t->options.batches);
		if (!t->options.quiet && step % interval == 0)
			printf("step %4d  loss %.4f\n", step, loss);
		if (step >= steps - averaged)
			sum += loss;
	}
	return sum / averaged;
}

static int parse_count(const char *name, const char *text)
{
	char *end;
	long value = strtol(text, &end, 10);
	if (*end != '\0' || end == text || value < 1 || value > DIMENSION_MAX) {
		fprintf(stderr, "mlp: --%s must be 1 to %d, not '%s'\n", name, DIMENSION_MAX, text);
		exit(2);
	}
	return (int)value;
}

static void parse_options(struct options *o, int argc, char **argv)
{
	/* The first seven take a count and are in the order of `counts`. */
	static const struct option names[] = {
	        {"steps", required_argument, NULL, 0}, {"batch", required_argument, NULL, 0},
	        {"in", required_argument, NULL, 0},    {"hidden", required_argument, NULL, 0},
	        {"out", required_argument, NULL, 0},   {"batches", required_argument, NULL, 0},
	        {"seed", required_argument, NULL, 0},  {"rate", required_argument, NULL, 'r'},
	        {"quiet", no_argument, NULL, 'q'},     {NULL, 0, NULL, 0},
	};
	int *counts[] = {&o->steps, &o->batch, &o->in, &o->hidden, &o->out, &o->batches, &o->seed};
	int c, index = 0;

	while ((c = getopt_long(argc, argv, "", names, &index)) != -1) {
		if (c == 0)
			*counts[index] = parse_count(names[index].name, optarg);
		else if (c == 'r')
			o->rate = strtof(optarg, NULL);
		else if (c == 'q')
			o->quiet = true;
		else
			exit(2);
	}
	if (optind < argc) {
		fprintf(stderr, "mlp: unexpected argument '%s'\n", argv[optind]);
		exit(2);
	}
}

int main(int argc, char **argv)
{
	struct trainer trainer = {
	        .options = {.steps = 200,
	                    .batch = 256,
	                    .in = 64,
	                    .hidden = 256,
	                    .out = 16,
	                    .batches = 64,
	                    .seed = 1},
	};

	parse_options(&trainer.options, argc, argv);
	trainer_init(&trainer);
	double start = now();
	double loss = train(&trainer);
	double milliseconds = 1e3 * (now() - start) / trainer.options.steps;
	printf("final loss %.4f  time per step %.3f ms (products %.3f ms)\n", loss, milliseconds,
	       1e3 * trainer.product_seconds / trainer.options.steps);
	trainer_free(&trainer);
	if (fflush(stdout) != 0 || !isfinite(loss))
		return EXIT_FAILURE;
	return EXIT_SUCCESS;
}
