/* Conversions between fp32, bf16, e4m3 and e5m2, defined for every input.
 *
 * Written for being read against the formats' definitions, not for speed. e4m3 is the "fn" kind: 4
 * exponent bits with bias 7, 3 mantissa bits, no infinities, 0x7f and 0xff NaN, largest value 448.
 * e5m2 is the upper byte of an IEEE half. Assumes the default rounding mode.
 */
#include "tests/oracle/oracle.h"

#include <math.h>
#include <string.h>

static uint32_t bits_of(float value)
{
	uint32_t bits;
	memcpy(&bits, &value, sizeof bits);
	return bits;
}

uint16_t qs_oracle_float_to_bf16(float value)
{
	const uint32_t bits = bits_of(value);
	if (isnan(value))
		return (uint16_t)(bits >> 16 | 0x40); /* quiet, or it might become an Inf */
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float qs_oracle_e4m3_to_float(uint8_t bits)
{
	const int exponent = bits >> 3 & 0xf, mantissa = bits & 7;
	float value;
	if ((bits & 0x7f) == 0x7f)
		value = NAN;
	else if (exponent == 0)
		value = ldexpf((float)mantissa, 1 - 7 - 3);
	else
		value = ldexpf((float)(8 + mantissa), exponent - 7 - 3);
	return bits & 0x80 ? -value : value;
}

/* A normal number is rounded by adding just under half a unit of its last kept bit to the bits of
 * the fp32 (just half if that bit is odd): the carry into the exponent is the right one. A
 * subnormal number is a whole number of 2^-9. */
uint8_t qs_oracle_float_to_e4m3(float value)
{
	const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
	uint32_t code;
	if (!isfinite(value))
		return 0x7f;
	if (fabsf(value) < 0x1p-6f)
		code = (uint32_t)rintf(fabsf(value) * 0x1p9f);
	else
		code = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) / (1 << 20) - (127 - 7) * 8;
	if (code > 0x7e)
		code = 0x7e;
	return (uint8_t)(code | (signbit(value) ? 0x80 : 0));
}

float qs_oracle_e5m2_to_float(uint8_t bits)
{
	const int exponent = bits >> 2 & 0x1f, mantissa = bits & 3;
	float value;
	if (exponent == 0x1f)
		value = mantissa ? NAN : INFINITY;
	else if (exponent == 0)
		value = ldexpf((float)mantissa, 1 - 15 - 2);
	else
		value = ldexpf((float)(4 + mantissa), exponent - 15 - 2);
	return bits & 0x80 ? -value : value;
}
