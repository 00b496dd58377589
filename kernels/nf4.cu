/* Weights in 4 or 8 bits and products with them: see nf4.h for what each kernel computes and for
 * the order in which a tile lies in memory.
 *
 * nf4_pack.cuh    makes them of bf16, and bf16 or e4m3 of them
 * nf4_few.cuh     products of up to 64 tokens
 * nf4_wide.cuh    products of more tokens, on Hopper
 * nf4_sample.cuh  whether a weight is still what its source makes
 *
 * What these share is in nf4_tile.cuh, nf4_block.cuh and nf4_result.cuh. All is one module.
 */
#include "kernels/nf4_pack.cuh"

#include "kernels/nf4_few.cuh"
#include "kernels/nf4_wide.cuh"
