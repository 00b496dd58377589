/* When fp8 pays: a model of time, used where nothing was measured.
 *
 * Per product of m n k: 2 m n k operations at the bf16 and fp8 rates, and for fp8 the bytes of the
 * conversion and the launches it adds. The rates are those sustained by large products on an H200;
 * other chips with fp8 have the same balance of matrix rate to bandwidth within a factor that the
 * margin covers. k cancels from the large-size limit, so the floor on m n / (m + n) guards against
 * a model that is too kind, and the one on k against products of launches only.
 */
#include "plan/plan.h"

#define BF16_RATE    650e12  /* operations per second                                          */
#define FP8_RATE     1235e12 /* operations per second                                          */
#define BANDWIDTH    3.4e12  /* bytes per second of the conversion, 80 % of a copy's           */
#define BYTES        3.0     /* per element: read once, write one                              */
#define LAUNCH       4e-6    /* seconds per launch added, its idle ends included               */
#define LAUNCHES     2.0     /* cast, repair                                                   */
#define MIN_HARMONIC 450.0   /* of m n / (m + n), elements                                     */
#define MIN_K        512

double qs_fp8_gain(int64_t m, int64_t n, int64_t k)
{
	double sum = (double)m + (double)n;
	if (k < MIN_K || (double)m * (double)n < MIN_HARMONIC * sum)
		return -1.0;
	double operations = 2.0 * (double)m * (double)n * (double)k;
	double native = operations / BF16_RATE;
	double fp8 =
	        operations / FP8_RATE + BYTES * (double)k * sum / BANDWIDTH + LAUNCH * LAUNCHES;
	return native / fp8 - 1.0;
}
