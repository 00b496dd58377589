/* References of the kernels of kernels/nf4.cu, in the same words as kernels/nf4.h, and conversions
 * between packed tiles and the states that bitsandbytes and torchao keep.
 *
 * Element by element, one thread; products in fp64, so that the kernels' are compared within a
 * bound and all else bit for bit. 1 / absmax is a true division here: for bf16 numbers the code is
 * the same for every reciprocal within 2 units in the last place (tests/unit/test_nf4.c tries all
 * of them). A launch that breaks the contract of the header ends the program with a message.
 */
#include "tests/oracle/oracle.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/nf4.h"
#include "kernels/sample.h"

static void demand(int holds, const char *kernel, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "oracle of %s: %s\n", kernel, what);
	abort();
}

static float float_of(uint32_t bits)
{
	float value;
	memcpy(&value, &bits, sizeof value);
	return value;
}

static uint32_t bits_of(float value)
{
	uint32_t bits;
	memcpy(&bits, &value, sizeof bits);
	return bits;
}

/* ---- codes ---------------------------------------------------------------------------------- */

/* A number that is not above a midpoint has the lower code. */
uint8_t qs_oracle_nf4_code(float value)
{
	uint8_t code = 0;
	while (code < 15 && value > float_of(qs_nf4_midpoints[code]))
		code++;
	return code;
}

/* Bits of the absmax of a block, or 0 where its numbers are taken for zeros. */
static uint16_t absmax_of(const uint16_t *block, bool *finite)
{
	uint16_t most = 0;
	for (int i = 0; i < QS_WEIGHT_TILE; i++)
		most = most > (block[i] & 0x7fff) ? most : block[i] & 0x7fff;
	*finite = most < 0x7f80;
	return most >= QS_AMAX_LEAST && *finite ? most : 0;
}

/* 1 / absmax with results below the least normal number flushed to zero. */
static float reciprocal(float absmax)
{
	const float result = 1 / absmax;
	return result < 0x1p-126f ? 0 : result;
}

uint16_t qs_oracle_nf4_block(const uint16_t *block, uint8_t *codes, bool *finite)
{
	const uint16_t absmax = absmax_of(block, finite);
	for (int i = 0; i < QS_WEIGHT_TILE; i++) {
		const float value = qs_oracle_bf16_to_float(block[i]);
		codes[i] = 7;
		if (absmax)
			codes[i] = qs_oracle_nf4_code(value *
			                              reciprocal(qs_oracle_bf16_to_float(absmax)));
	}
	return absmax;
}

/* The dequantised number in fp32, as bitsandbytes computes it. */
static float nf4_value(uint8_t code, uint16_t absmax)
{
	return float_of(qs_nf4_codebook[code]) * qs_oracle_bf16_to_float(absmax);
}

/* ---- tiles ---------------------------------------------------------------------------------- */

static int64_t tile_of(int64_t row, int64_t column, int64_t k)
{
	return row / QS_WEIGHT_TILE * (k / QS_WEIGHT_TILE) + column / QS_WEIGHT_TILE;
}

/* See kernels/nf4.h: row = 16 w + 8 high + g, column = 16 step + 8 half + 2 t + odd. */
static int64_t lane_of(int64_t row, int64_t column)
{
	return row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
}

static int64_t high_of(int64_t row)
{
	return row % 16 / 8;
}

/* Of the byte in the packed weight that holds an element's code. */
static int64_t nf4_place(int64_t row, int64_t column, int64_t k)
{
	const int64_t r = row % QS_WEIGHT_TILE, c = column % QS_WEIGHT_TILE;
	return tile_of(row, column, k) * QS_NF4_TILE_BYTES + lane_of(r, c) * 16 + c / 16 * 4 +
	       c % 16 / 8 * 2 + high_of(r);
}

static int64_t absmax_place(int64_t row, int64_t column, int64_t k)
{
	const int64_t r = row % QS_WEIGHT_TILE;
	return tile_of(row, column, k) * QS_NF4_TILE_BYTES + QS_NF4_CODE_BYTES +
	       2 * (r / 16 * 16 + r % 8 * 2 + high_of(r));
}

static int64_t fp8_place(int64_t row, int64_t column, int64_t k)
{
	const int64_t r = row % QS_WEIGHT_TILE, c = column % QS_WEIGHT_TILE;
	return tile_of(row, column, k) * QS_FP8_TILE_BYTES + c / 32 * 2048 + lane_of(r, c) * 16 +
	       c / 16 % 2 * 8 + c % 16 / 8 * 4 + c % 2 * 2 + high_of(r);
}

static uint8_t nf4_get(const uint8_t *packed, int64_t row, int64_t column, int64_t k)
{
	const uint8_t byte = packed[nf4_place(row, column, k)];
	return column % 2 ? byte & 15 : byte >> 4;
}

static void nf4_set(uint8_t *packed, int64_t row, int64_t column, int64_t k, uint8_t code)
{
	uint8_t *byte = &packed[nf4_place(row, column, k)];
	*byte = (uint8_t)(column % 2 ? (*byte & 0xf0) | code : (*byte & 0x0f) | code << 4);
}

static uint16_t absmax_get(const uint8_t *packed, int64_t row, int64_t column, int64_t k)
{
	uint16_t absmax;
	memcpy(&absmax, packed + absmax_place(row, column, k), sizeof absmax);
	return absmax;
}

static void absmax_set(uint8_t *packed, int64_t row, int64_t column, int64_t k, uint16_t absmax)
{
	memcpy(packed + absmax_place(row, column, k), &absmax, sizeof absmax);
}

static int64_t rows_padded(int64_t n)
{
	return qs_shares(n, QS_WEIGHT_TILE) * QS_WEIGHT_TILE;
}

/* ---- packing -------------------------------------------------------------------------------- */

static void demand_pack(const struct qs_pack_args *args, unsigned block_x, const char *kernel)
{
	demand(block_x == QS_PACK_THREADS, kernel, "wrong number of threads");
	demand(args->n > 0 && args->k > 0 && args->k % QS_WEIGHT_TILE == 0, kernel,
	       "k is not a multiple of 64, or the weight is empty");
	demand(args->n == 1 || args->ld >= args->k, kernel, "ld below k");
	demand(args->source && args->source % 2 == 0, kernel, "source is not aligned to 2");
	demand(args->packed && args->packed % 128 == 0, kernel, "packed is not aligned to 128");
	demand(args->weight && args->weight % 16 == 0, kernel, "weight is not aligned to 16");
}

static const uint16_t *row_of(const struct qs_pack_args *args, int64_t row)
{
	return (const uint16_t *)(uintptr_t)args->source + row * args->ld;
}

static void pack_block(const struct qs_pack_args *args, int64_t row, int64_t column)
{
	static const uint16_t zeros[QS_WEIGHT_TILE];
	struct qs_weight *weight = (struct qs_weight *)(uintptr_t)args->weight;
	uint8_t *packed = (uint8_t *)(uintptr_t)args->packed, codes[QS_WEIGHT_TILE];
	bool finite;
	const uint16_t *block = row < args->n ? row_of(args, row) + column : zeros;
	const uint16_t absmax = qs_oracle_nf4_block(block, codes, &finite);
	const uint32_t amax = (uint32_t)absmax << 16;
	for (int i = 0; i < QS_WEIGHT_TILE; i++)
		nf4_set(packed, row, column + i, args->k, codes[i]);
	absmax_set(packed, row, column, args->k, absmax);
	weight->amax = amax > weight->amax ? amax : weight->amax;
	weight->nonfinite |= finite ? 0 : 1;
}

static bool wanted(const struct qs_pack_args *args)
{
	return !args->when || *(const uint32_t *)(uintptr_t)args->when;
}

static void run_nf4_pack(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_pack_args *args = params[0];
	struct qs_weight *weight = (struct qs_weight *)(uintptr_t)args->weight;
	demand(grid_x > 0, QS_KERNEL_NF4_PACK, "empty grid");
	demand_pack(args, block_x, QS_KERNEL_NF4_PACK);
	if (!wanted(args))
		return;
	for (int64_t row = 0; row < rows_padded(args->n); row++)
		for (int64_t column = 0; column < args->k; column += QS_WEIGHT_TILE)
			pack_block(args, row, column);
	weight->packed = args->packed;
}

/* The scale of quantise.h for e4m3. */
static float inverse_of(float amax)
{
	int exponent;
	if (amax == 0)
		return 1;
	frexpf(QS_E4M3_MAX / 2 / fmaxf(amax, QS_AMAX_FLOOR), &exponent);
	return ldexpf(1, exponent - 1);
}

static uint8_t fp8_of(uint16_t bits, float inverse)
{
	const float value = qs_oracle_bf16_to_float(bits);
	const float most = QS_E4M3_MAX;
	if (!isfinite(value))
		return QS_FP8_NAN;
	return qs_oracle_float_to_e4m3(fminf(fmaxf(value * inverse, -most), most));
}

static void pack_fp8_row(const struct qs_pack_args *args, int64_t row)
{
	struct qs_weight *weight = (struct qs_weight *)(uintptr_t)args->weight;
	uint8_t *packed = (uint8_t *)(uintptr_t)args->packed;
	float amax = 0, inverse;
	for (int64_t i = 0; i < args->k && row < args->n; i++) {
		const float value = fabsf(qs_oracle_bf16_to_float(row_of(args, row)[i]));
		weight->nonfinite |= isfinite(value) ? 0 : 1;
		amax = isfinite(value) && value > amax ? value : amax;
	}
	inverse = inverse_of(amax);
	for (int64_t i = 0; i < args->k; i++)
		packed[fp8_place(row, i, args->k)] =
		        row < args->n ? fp8_of(row_of(args, row)[i], inverse) : 0;
	if (row < args->n)
		((float *)(uintptr_t)args->scale)[row] = 1 / inverse;
	weight->amax = bits_of(amax) > weight->amax ? bits_of(amax) : weight->amax;
}

static void run_fp8_pack(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_pack_args *args = params[0];
	struct qs_weight *weight = (struct qs_weight *)(uintptr_t)args->weight;
	demand(grid_x > 0, QS_KERNEL_FP8_PACK, "empty grid");
	demand_pack(args, block_x, QS_KERNEL_FP8_PACK);
	demand(args->scale && args->scale % 4 == 0, QS_KERNEL_FP8_PACK,
	       "scale is not aligned to 4");
	if (!wanted(args))
		return;
	for (int64_t row = 0; row < rows_padded(args->n); row++)
		pack_fp8_row(args, row);
	weight->packed = args->packed;
	weight->scale = args->scale;
}

/* ---- expansion ------------------------------------------------------------------------------ */

static void run_nf4_expand(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_expand_args *args = params[0];
	const struct qs_weight *weight = (const struct qs_weight *)(uintptr_t)args->weight;
	const uint8_t *packed = (const uint8_t *)(uintptr_t)weight->packed;
	uint8_t *straight = (uint8_t *)(uintptr_t)args->straight;
	uint8_t *turned = (uint8_t *)(uintptr_t)args->turned;
	uint16_t *bf16 = (uint16_t *)(uintptr_t)args->bf16;
	const int64_t width = qs_k_padded(args->n);
	const float inverse = inverse_of(float_of(weight->amax));
	demand(grid_x > 0 && block_x == QS_PACK_THREADS, QS_KERNEL_NF4_EXPAND, "wrong launch");
	demand(args->n > 0 && args->k > 0 && args->k % QS_WEIGHT_TILE == 0, QS_KERNEL_NF4_EXPAND,
	       "k is not a multiple of 64, or the weight is empty");
	demand((args->straight | args->turned | args->bf16) % 16 == 0, QS_KERNEL_NF4_EXPAND,
	       "a target is not aligned to 16");
	if (turned)
		memset(turned, 0, (size_t)(width * args->k));
	for (int64_t row = 0; row < args->n; row++)
		for (int64_t column = 0; column < args->k; column++) {
			const float value = nf4_value(nf4_get(packed, row, column, args->k),
			                              absmax_get(packed, row, column, args->k));
			const uint8_t byte = qs_oracle_float_to_e4m3(value * inverse);
			if (straight)
				straight[row * args->k + column] = byte;
			if (turned)
				turned[column * width + row] = byte;
			if (bf16)
				bf16[row * args->k + column] = qs_oracle_float_to_bf16(value);
		}
	if (args->scale)
		*(float *)(uintptr_t)args->scale = weight->nonfinite ? NAN : 1 / inverse;
}

/* ---- products ------------------------------------------------------------------------------- */

static uint16_t source_of(const struct qs_product_args *args, int64_t row, int64_t column)
{
	return ((const uint16_t *)(uintptr_t)args->source)[row * args->ld + column];
}

/* What a kernel of products does. */
struct how {
	const char *name;
	bool fp8;      /* tiles of e4m3, not NF4                      */
	bool rounded;  /* weights are bf16 numbers                    */
	uint32_t span; /* tokens of a block                           */
};

static double rounded_value(uint8_t code, uint16_t absmax)
{
	const float scaled = qs_oracle_bf16_to_float(qs_nf4_scaled[code]);
	const uint16_t rounded = qs_oracle_float_to_bf16(scaled * qs_oracle_bf16_to_float(absmax));
	return (double)qs_oracle_bf16_to_float(rounded) * (double)QS_NF4_UNSCALE;
}

static double packed_value(const struct qs_product_args *args, const struct how *how, int64_t row,
                           int64_t column)
{
	const struct qs_weight *weight = (const struct qs_weight *)(uintptr_t)args->weight;
	const uint8_t *packed = (const uint8_t *)(uintptr_t)weight->packed;
	if (how->fp8)
		return (double)qs_oracle_e4m3_to_float(packed[fp8_place(row, column, args->k)]) *
		       (double)((const float *)(uintptr_t)weight->scale)[row];
	const uint8_t code = nf4_get(packed, row, column, args->k);
	if (how->rounded)
		return rounded_value(code, absmax_get(packed, row, column, args->k));
	return (double)qs_oracle_bf16_to_float(qs_nf4_scaled[code]) *
	       (double)qs_oracle_bf16_to_float(absmax_get(packed, row, column, args->k)) *
	       (double)QS_NF4_UNSCALE;
}

static bool same_nf4(const struct qs_product_args *args, int64_t row, int64_t column)
{
	const struct qs_weight *weight = (const struct qs_weight *)(uintptr_t)args->weight;
	const uint8_t *packed = (const uint8_t *)(uintptr_t)weight->packed;
	uint16_t block[QS_WEIGHT_TILE];
	uint8_t codes[QS_WEIGHT_TILE];
	bool same;
	for (int i = 0; i < QS_WEIGHT_TILE; i++)
		block[i] = source_of(args, row, column + i);
	const uint16_t absmax = qs_oracle_nf4_block(block, codes, &same);
	same = same && absmax == absmax_get(packed, row, column, args->k);
	for (int i = 0; i < QS_WEIGHT_TILE; i++)
		same = same && codes[i] == nf4_get(packed, row, column + i, args->k);
	return same;
}

static bool same_fp8(const struct qs_product_args *args, int64_t row, int64_t column)
{
	const struct qs_weight *weight = (const struct qs_weight *)(uintptr_t)args->weight;
	const uint8_t *packed = (const uint8_t *)(uintptr_t)weight->packed;
	const float scale = ((const float *)(uintptr_t)weight->scale)[row];
	bool same = true;
	for (int64_t i = column; i < column + QS_WEIGHT_TILE; i++)
		same = same && fp8_of(source_of(args, row, i), 1 / scale) ==
		                       packed[fp8_place(row, i, args->k)];
	return same;
}

/* As a product sees the copy, for what compares it. */
static void run_nf4_sample(void *const *params, unsigned grid_x, unsigned block_x)
{
	const struct qs_sample_args *args = params[0];
	struct qs_weight *weight = (struct qs_weight *)(uintptr_t)args->descriptor;
	const struct qs_product_args product = {.weight = args->descriptor,
	                                        .source = args->source,
	                                        .ld = args->ld,
	                                        .n = args->rows,
	                                        .k = args->cols};
	bool same = true;
	qs_oracle_sample_demand(args, grid_x, block_x);
	demand(weight && weight->packed == args->data, QS_KERNEL_NF4_SAMPLE, "other tiles");
	for (int64_t row = weight->turn % QS_WEIGHT_TILE; row < args->rows; row += QS_WEIGHT_TILE)
		for (int64_t column = 0; column < args->cols; column += QS_WEIGHT_TILE)
			same = same && same_nf4(&product, row, column);
	qs_oracle_sample_judge(args, same, &weight->turn);
	if (same)
		return;
	weight->failed = 1;
	weight->valid = 0;
}

/* What a block works on: rows from `row` on, columns `first` to `end`, tokens from `token` on. */
struct part {
	int64_t row, rows, first, end;
	uint32_t token, tokens_end;
};

static struct part part_of(const struct qs_product_args *args, uint32_t span, unsigned block)
{
	const int64_t chunks = args->k / QS_WEIGHT_TILE, share = qs_shares(chunks, args->split);
	const int64_t first = block % args->split * share, rows = args->strips * QS_WEIGHT_TILE;
	const unsigned spans = (args->tokens + span - 1) / span, place = block / args->split;
	const uint32_t token = place % spans * span, tokens = args->tokens - token;
	struct part part = {place / spans * rows, rows,  first,
	                    first + share,        token, token + (tokens < span ? tokens : span)};
	part.first = (part.first < chunks ? part.first : chunks) * QS_WEIGHT_TILE;
	part.end = (part.end < chunks ? part.end : chunks) * QS_WEIGHT_TILE;
	if (part.row + rows > args->n)
		part.rows = args->n - part.row;
	return part;
}

/* Compares a row of every tile of a part. */
static bool part_is_same(const struct qs_product_args *args, bool fp8, const struct part *part,
                         uint32_t turn)
{
	for (int64_t row = turn % QS_WEIGHT_TILE; row < part->rows; row += QS_WEIGHT_TILE)
		for (int64_t column = part->first; column < part->end; column += QS_WEIGHT_TILE)
			if (fp8 ? !same_fp8(args, part->row + row, column)
			        : !same_nf4(args, part->row + row, column))
				return false;
	return true;
}

/* X as [column][token]: products are most of what tests take. */
static double *x_by_columns(const struct qs_product_args *args)
{
	const uint16_t *x = (const uint16_t *)(uintptr_t)args->x;
	double *columns = malloc((size_t)(args->k * args->tokens) * sizeof *columns);
	demand(columns != NULL, "product", "no memory");
	for (uint32_t token = 0; token < args->tokens; token++)
		for (int64_t column = 0; column < args->k; column++)
			columns[column * args->tokens + token] =
			        (double)qs_oracle_bf16_to_float(x[token * args->ldx + column]);
	return columns;
}

/* `sums`: [row][token]. */
static void add_part(const struct qs_product_args *args, const struct how *how,
                     const struct part *part, bool from_source, const double *x, double *sums)
{
	for (int64_t row = part->row; row < part->row + part->rows; row++)
		for (int64_t column = part->first; column < part->end; column++) {
			const double w = from_source ? (double)qs_oracle_bf16_to_float(
			                                       source_of(args, row, column))
			                             : packed_value(args, how, row, column);
			for (uint32_t token = part->token; token < part->tokens_end; token++)
				sums[row * args->tokens + token] +=
				        w * x[column * args->tokens + token];
		}
}

static double activated(double value, uint32_t activation)
{
	if (activation == QS_ACTIVATION_RELU)
		return value < 0 ? 0 : value;
	if (activation == QS_ACTIVATION_GELU)
		return 0.5 * value *
		       (1 + tanh(0.7978845608028654 * (value + 0.044715 * value * value * value)));
	return value;
}

static void finish(const struct qs_product_args *args, const double *sums)
{
	const uint16_t *bias = (const uint16_t *)(uintptr_t)args->bias;
	for (uint32_t token = 0; token < args->tokens; token++)
		for (int64_t row = 0; row < args->n; row++) {
			const int64_t at = token * args->ldd + row;
			float *wide = (float *)(uintptr_t)args->d + at;
			uint16_t *narrow = (uint16_t *)(uintptr_t)args->d + at;
			const bool fp32 = args->flags & QS_PRODUCT_FP32;
			double value = (double)args->alpha * sums[row * args->tokens + token];
			if (args->beta != 0)
				value += (double)args->beta *
				         (double)(fp32 ? *wide : qs_oracle_bf16_to_float(*narrow));
			if (bias)
				value += (double)qs_oracle_bf16_to_float(bias[row]);
			value = activated(value, args->activation);
			if (fp32)
				*wide = (float)value;
			else
				*narrow = qs_oracle_float_to_bf16((float)value);
		}
}

static void demand_product(const struct qs_product_args *args, const struct how *how,
                           unsigned grid_x)
{
	const int64_t rows = (int64_t)args->strips * QS_WEIGHT_TILE;
	const char *kernel = how->name;
	demand(args->tokens >= 1, kernel, "tokens");
	demand(args->n > 0 && args->k > 0 && args->k % QS_WEIGHT_TILE == 0, kernel,
	       "k is not a multiple of 64, or the weight is empty");
	demand(args->strips == 1 || args->strips == 2 || args->strips == 4, kernel, "strips");
	demand(args->split >= 1 && args->split <= QS_SPLIT_MAX && args->pad == 0, kernel,
	       "split or padding");
	demand(grid_x ==
	               qs_shares(args->n, rows) * args->split * qs_shares(args->tokens, how->span),
	       kernel, "wrong grid");
	demand(args->source && args->source % 2 == 0 && args->x && args->x % 2 == 0, kernel,
	       "an operand is not aligned to 2");
	demand(args->d && args->d % (args->flags & QS_PRODUCT_FP32 ? 4 : 2) == 0, kernel,
	       "d is not aligned to its type");
	demand(args->packed == 0 || !how->fp8 || args->scale, kernel, "tiles without scales");
	demand(args->activation <= QS_ACTIVATION_GELU, kernel, "unknown activation");
}

/* Blocks of products in other streams may find the same. */
static void drop_weight(struct qs_weight *weight)
{
	struct qs_hash_outcome *outcome = (struct qs_hash_outcome *)(uintptr_t)weight->outcome;
	const uint32_t failed = __atomic_exchange_n(&weight->failed, 1, __ATOMIC_RELAXED);
	if (!failed && outcome)
		__atomic_fetch_add(&outcome->escapes, 1, __ATOMIC_RELAXED);
	weight->valid = 0;
}

static void product(const struct qs_product_args *args, const struct how *how, unsigned grid_x)
{
	struct qs_weight *weight = (struct qs_weight *)(uintptr_t)args->weight;
	const bool valid = weight->valid && !weight->nonfinite &&
	                   (args->packed == 0 || args->packed == weight->packed);
	const bool sampling = !(args->flags & QS_PRODUCT_FROZEN), known = weight->valid;
	double *sums = calloc((size_t)(args->tokens * args->n), sizeof *sums);
	double *x = x_by_columns(args);
	demand(sums != NULL, "product", "no memory");
	for (unsigned block = 0; block < grid_x; block++) {
		const struct part part = part_of(args, how->span, block);
		const bool changed =
		        valid && sampling && !part_is_same(args, how->fp8, &part, weight->turn);
		if (changed)
			drop_weight(weight);
		add_part(args, how, &part, !valid || changed, x, sums);
	}
	weight->turn += sampling && (args->packed || known);
	finish(args, sums);
	free(x);
	free(sums);
}

/* X is where the args say. A map of softcuda's must say so too; that of a driver only it can read,
 * and is zero here. */
static bool map_fits(const struct qs_mapped_args *args, uint32_t tokens, uint32_t tiles)
{
	const struct qs_product_args *product = &args->product;
	struct qs_oracle_map map;
	_Static_assert(sizeof map == sizeof args->map, "fits");
	memcpy(&map, args->map, sizeof map);
	return map.address == 0 ||
	       (map.address == product->x && map.size[0] == QS_WEIGHT_TILE &&
	        map.size[1] == product->tokens &&
	        map.size[2] == (uint64_t)product->k / QS_WEIGHT_TILE &&
	        map.stride[0] == (uint64_t)product->ldx * 2 &&
	        map.stride[1] == QS_WEIGHT_TILE * 2 && map.box[0] == QS_WEIGHT_TILE &&
	        map.box[1] == tokens && map.box[2] == tiles);
}

/* Arguments of a launch that waited lie in memory that is not aligned as the map wants it. */
static void run_wide(const void *parameter, uint32_t kind, unsigned grid_x, unsigned block_x)
{
	struct qs_mapped_args aligned;
	const struct qs_mapped_args *args = memcpy(&aligned, parameter, sizeof aligned);
	const struct how how = {qs_kernel_wide[kind], false, true, qs_wide_tokens(kind)};
	demand_product(&args->product, &how, grid_x);
	demand(args->product.strips == QS_WIDE_STRIPS, how.name, "strips");
	demand(args->product.x % 16 == 0 && args->product.ldx % 8 == 0, how.name,
	       "rows of x are not aligned to 16");
	demand(map_fits(args, how.span, 1), how.name, "the map is not of x");
	demand(block_x == QS_WIDE_THREADS, how.name, "threads");
	product(&args->product, &how, grid_x);
}

/* By a kernel of few tokens. The map is looked at only where there is said to be one. */
static void run_product(const void *parameter, bool fp8, uint32_t kind, unsigned grid_x,
                        unsigned block_x)
{
	struct qs_mapped_args args = {0};
	const struct qs_product_args *product_args =
	        memcpy(&args.product, parameter, sizeof args.product);
	const struct how how = {(fp8 ? qs_kernel_w8a16 : qs_kernel_w4a16)[kind], fp8, false,
	                        QS_SPAN};
	demand_product(product_args, &how, grid_x);
	demand(product_args->tokens <= QS_TOKENS_MAX, how.name, "tokens");
	demand(block_x == QS_PRODUCT_THREADS || block_x == QS_HOPPER_THREADS, how.name, "threads");
	if (product_args->flags & QS_PRODUCT_MAPPED) {
		memcpy(&args, parameter, sizeof args);
		demand(map_fits(&args, qs_tokens_of_box(product_args->tokens, kind),
		                QS_PAIRS / product_args->strips),
		       how.name, "the map is not of x");
	}
	product(product_args, &how, grid_x);
}

static void run_w4a16_8(void *const *params, unsigned grid_x, unsigned block_x)
{
	run_product(params[0], false, 0, grid_x, block_x);
}

static void run_w4a16_16(void *const *params, unsigned grid_x, unsigned block_x)
{
	run_product(params[0], false, 1, grid_x, block_x);
}

static void run_w4a16_32(void *const *params, unsigned grid_x, unsigned block_x)
{
	run_product(params[0], false, 2, grid_x, block_x);
}

static void run_w8a16_8(void *const *params, unsigned grid_x, unsigned block_x)
{
	run_product(params[0], true, 0, grid_x, block_x);
}

static void run_w8a16_16(void *const *params, unsigned grid_x, unsigned block_x)
{
	run_product(params[0], true, 1, grid_x, block_x);
}

static void run_w8a16_32(void *const *params, unsigned grid_x, unsigned block_x)
{
	run_product(params[0], true, 2, grid_x, block_x);
}

static void run_wide_64(void *const *params, unsigned grid_x, unsigned block_x)
{
	run_wide(params[0], 0, grid_x, block_x);
}

static void run_wide_128(void *const *params, unsigned grid_x, unsigned block_x)
{
	run_wide(params[0], 1, grid_x, block_x);
}

const struct qs_oracle_kernel qs_oracle_nf4_kernels[] = {
        {QS_KERNEL_NF4_PACK, run_nf4_pack, {sizeof(struct qs_pack_args)}},
        {QS_KERNEL_FP8_PACK, run_fp8_pack, {sizeof(struct qs_pack_args)}},
        {QS_KERNEL_NF4_EXPAND, run_nf4_expand, {sizeof(struct qs_expand_args)}},
        {QS_KERNEL_NF4_SAMPLE, run_nf4_sample, {sizeof(struct qs_sample_args)}},
        {"qs_w4a16_8", run_w4a16_8, {sizeof(struct qs_mapped_args)}},
        {"qs_w4a16_16", run_w4a16_16, {sizeof(struct qs_mapped_args)}},
        {"qs_w4a16_32", run_w4a16_32, {sizeof(struct qs_mapped_args)}},
        {"qs_w8a16_8", run_w8a16_8, {sizeof(struct qs_mapped_args)}},
        {"qs_w8a16_16", run_w8a16_16, {sizeof(struct qs_mapped_args)}},
        {"qs_w8a16_32", run_w8a16_32, {sizeof(struct qs_mapped_args)}},
        {"qs_w4a16_wide_64", run_wide_64, {sizeof(struct qs_mapped_args)}},
        {"qs_w4a16_wide_128", run_wide_128, {sizeof(struct qs_mapped_args)}},
        {0},
};

/* ---- states of other libraries --------------------------------------------------------------- */

void qs_oracle_nf4_to_flat(const uint8_t *packed, int64_t n, int64_t k, uint8_t *codes,
                           float *absmax)
{
	for (int64_t row = 0; row < n; row++) {
		for (int64_t column = 0; column < k; column += 2)
			codes[(row * k + column) / 2] = packed[nf4_place(row, column, k)];
		for (int64_t column = 0; column < k; column += QS_WEIGHT_TILE)
			absmax[(row * k + column) / QS_WEIGHT_TILE] =
			        qs_oracle_bf16_to_float(absmax_get(packed, row, column, k));
	}
}

int64_t qs_oracle_nf4_from_flat(const uint8_t *codes, const float *absmax, int64_t n, int64_t k,
                                uint8_t *packed)
{
	int64_t rounded = 0;
	for (int64_t row = 0; row < rows_padded(n); row++)
		for (int64_t column = 0; column < k; column++) {
			const int64_t at = row * k + column, block = at / QS_WEIGHT_TILE;
			const uint8_t byte = row < n ? codes[at / 2] : 0x77;
			const uint16_t most = row < n ? qs_oracle_float_to_bf16(absmax[block]) : 0;
			nf4_set(packed, row, column, k, column % 2 ? byte & 15 : byte >> 4);
			absmax_set(packed, row, column, k, most);
			rounded += row < n && column % QS_WEIGHT_TILE == 0 &&
			           qs_oracle_bf16_to_float(most) != absmax[block];
		}
	return rounded;
}

void qs_oracle_nf4_nested_absmax(const uint8_t *codes, const float *map, const float *absmax2,
                                 float offset, int64_t count, float *absmax)
{
	for (int64_t i = 0; i < count; i++) {
		/* volatile: no contraction into one rounding */
		const volatile float product = map[codes[i]] * absmax2[i / 256];
		absmax[i] = product + offset;
	}
}

void qs_oracle_nf4_torchao_absmax(const int8_t *scalers, const uint16_t *factor, uint16_t mean,
                                  int64_t count, int64_t block, float *absmax)
{
	for (int64_t i = 0; i < count; i++) {
		const float ratio = (float)scalers[i] / qs_oracle_bf16_to_float(factor[i / block]);
		const float narrow = qs_oracle_bf16_to_float(qs_oracle_float_to_bf16(ratio));
		absmax[i] = qs_oracle_bf16_to_float(
		        qs_oracle_float_to_bf16(narrow + qs_oracle_bf16_to_float(mean)));
	}
}
