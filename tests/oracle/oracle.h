/* C references of the CUDA kernels: what each kernel must compute, bit for bit where defined.
 *
 * The same functions are the oracle of the GPU suite and what softcuda runs when a kernel of that
 * name is launched. Parameters come as the driver passes them: params[i] points to argument i.
 * "Device" pointers inside the arguments are host pointers here.
 */
#ifndef QS_TESTS_ORACLE_H
#define QS_TESTS_ORACLE_H

#include <stddef.h>
#include <stdint.h>

struct qs_oracle_kernel {
	const char *name; /* as in kernels/<file>.h */
	void (*run)(void *const *params, unsigned grid_x, unsigned block_x);
	size_t param_bytes[4]; /* size of each argument, 0 ends the list */
};

/* Every kernel of the library, ended by name == NULL. */
extern const struct qs_oracle_kernel qs_oracle_kernels[];

/* Conversions, defined for all inputs. fp8 is e4m3 ("fn": no infinities, 0x7f and 0xff are NaN). */
float qs_oracle_bf16_to_float(uint16_t bits);
uint16_t qs_oracle_float_to_bf16(float value); /* round to nearest even, NaN stays NaN */
float qs_oracle_e4m3_to_float(uint8_t bits);
uint8_t qs_oracle_float_to_e4m3(float value); /* nearest even, saturating; NaN and Inf -> 0x7f */
float qs_oracle_e5m2_to_float(uint8_t bits);

#endif
