/* C references of the CUDA kernels: what each kernel must compute, bit for bit where defined.
 *
 * The same functions are the oracle of the GPU suite and what softcuda runs when a kernel of that
 * name is launched. Parameters come as the driver passes them: params[i] points to argument i.
 * "Device" pointers inside the arguments are host pointers here.
 */
#ifndef QS_TESTS_ORACLE_H
#define QS_TESTS_ORACLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct qs_oracle_kernel {
	const char *name; /* as in kernels/<file>.h */
	void (*run)(void *const *params, unsigned grid_x, unsigned block_x);
	size_t param_bytes[4]; /* size of each argument, 0 ends the list */
};

/* The kernels of quantise.cu, nf4.cu, hash.cu and compare.cu, each ended by name == NULL. */
extern const struct qs_oracle_kernel qs_oracle_kernels[];
extern const struct qs_oracle_kernel qs_oracle_nf4_kernels[];
extern const struct qs_oracle_kernel qs_oracle_hash_kernels[];
extern const struct qs_oracle_kernel qs_oracle_compare_kernels[];

/* Of every kernel of kernels/sample.h: ends the program where a launch breaks the contract; and
 * what follows from a comparison. */
struct qs_sample_args;
void qs_oracle_sample_demand(const struct qs_sample_args *args, unsigned grid_x, unsigned block_x);
void qs_oracle_sample_judge(const struct qs_sample_args *args, bool same, uint32_t *turn);

/* What an encoded tensor map says, on softcuda: rows of `size[0]` elements of 2 bytes, in up to two
 * dimensions more of `stride` bytes each, read in boxes. 128 bytes. */
struct qs_oracle_map {
	uint64_t address, size[3], stride[2];
	uint32_t box[3], zero[17];
};

/* Conversions, defined for all inputs. fp8 is e4m3 ("fn": no infinities, 0x7f and 0xff are NaN). */
static inline float qs_oracle_bf16_to_float(uint16_t bits)
{
	const uint32_t wide = (uint32_t)bits << 16;
	float value;
	memcpy(&value, &wide, sizeof value);
	return value;
}

uint16_t qs_oracle_float_to_bf16(float value); /* round to nearest even, NaN stays NaN */
float qs_oracle_e4m3_to_float(uint8_t bits);
uint8_t qs_oracle_float_to_e4m3(float value); /* nearest even, saturating; NaN and Inf -> 0x7f */
float qs_oracle_e5m2_to_float(uint8_t bits);

/* NF4: the code of a number of [-1, 1], a tie going to the lower one; NaN gives 0. */
uint8_t qs_oracle_nf4_code(float value);
/* Codes of 64 bf16 numbers and the bits of their absmax by the rules of kernels/nf4.h. */
uint16_t qs_oracle_nf4_block(const uint16_t *block, uint8_t *codes, bool *finite);

/* Packed tiles of an n x k weight as bitsandbytes keeps it, and torchao too: codes[n * k / 2], row
 * by row, the first of a pair in the upper four bits, and absmax[n * k / 64]. */
void qs_oracle_nf4_to_flat(const uint8_t *packed, int64_t n, int64_t k, uint8_t *codes,
                           float *absmax);
/* The other way. Returns how many absmax are no bf16 number and were rounded: none of a weight that
 * was bf16, unless the absmax were quantised themselves. */
int64_t qs_oracle_nf4_from_flat(const uint8_t *codes, const float *absmax, int64_t n, int64_t k,
                                uint8_t *packed);
/* Nested absmax of bitsandbytes: map[codes[i]] * absmax2[i / 256] + offset, rounded twice. */
void qs_oracle_nf4_nested_absmax(const uint8_t *codes, const float *map, const float *absmax2,
                                 float offset, int64_t count, float *absmax);
/* Quantised absmax of torchao for a bf16 weight, rounded to bf16 twice: scalers[i] / factor + mean,
 * a factor for each `block` of them. factor and mean are bits of bf16. */
void qs_oracle_nf4_torchao_absmax(const int8_t *scalers, const uint16_t *factor, uint16_t mean,
                                  int64_t count, int64_t block, float *absmax);

#endif
