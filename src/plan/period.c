/* The period of the sequence of products: a training step, a micro-batch of one that accumulates
 * gradients, a token of a decoder; whatever the program does over and over.
 *
 * When the last GRAM products were met before, their distance is a period to be tried: each product
 * is then compared with the one a period before. Layers repeat as well, so it is believed only
 * after LEAST products and three rounds; layers do not go on for so long without a head or a loss
 * between. A step begins where the sequence first went by the period. What breaks it (an
 * evaluation, a ragged batch, other shapes) leaves the count as it is until a period is found
 * again; the same one is believed after one round. Constant time for a product, but for one look
 * back when a period is accepted. Left out: an evaluation that comes every few steps is part of the
 * period, and the batches of a long one are counted as steps.
 */
#include "plan/plan.h"

#include <string.h>

#define GRAM   32   /* products that must recur, a divisor of 64 */
#define LEAST  1024 /* products until a new period is believed  */
#define ROUNDS 3    /* and rounds                               */

/* 2^64 over the golden ratio, to spread the symbols. */
#define SPREAD UINT64_C(0x9e3779b97f4a7c15)

void qs_period_reset(struct qs_period *period)
{
	memset(period, 0, sizeof *period);
	period->step = -1;
}

static uint32_t *at(struct qs_period *period, uint64_t position)
{
	return &period->symbol[position % QS_PERIOD_MAX];
}

/* Of the last GRAM products: each is shifted out after so many. */
static void roll(struct qs_period *period, uint32_t symbol)
{
	period->hash = (period->hash << 64 / GRAM) + (symbol + UINT64_C(1)) * SPREAD;
}

/* How long ago the last GRAM products ended before, 0 = never or too long ago. */
static uint64_t distance(struct qs_period *period)
{
	uint64_t end = period->position;
	if (end < GRAM)
		return 0;
	const uint64_t index = (period->hash ^ period->hash >> 32) % QS_PERIOD_GRAMS;
	const bool met = period->gram[index].end && period->gram[index].hash == period->hash;
	const uint64_t ago = met ? end - period->gram[index].end : 0;
	period->gram[index].hash = period->hash;
	period->gram[index].end = end;
	return ago < QS_PERIOD_MAX ? ago : 0;
}

/* Where the sequence began to go by the period: as far back as it is remembered, and not before the
 * step at hand when it was broken. */
static uint64_t beginning(struct qs_period *period)
{
	uint64_t oldest = period->position > QS_PERIOD_MAX ? period->position - QS_PERIOD_MAX : 0;
	uint64_t begin = period->position - period->run - period->length;
	oldest = oldest > period->broken ? oldest : period->broken;
	while (begin > oldest && *at(period, begin - 1) == *at(period, begin - 1 + period->length))
		begin--;
	return begin > period->broken ? begin : period->broken;
}

/* Steps that went by since the sequence began to go by the period count as well. */
static void accept(struct qs_period *period)
{
	const uint64_t begin = beginning(period);
	const uint64_t rounds = (period->position - 1 - begin) / period->length;
	period->accepted = period->length;
	period->step = (period->step < 0 ? 0 : period->step) + (int64_t)rounds;
	period->next = begin + (rounds + 1) * period->length;
}

static bool recurs_after(struct qs_period *period, uint64_t length)
{
	const uint64_t last = period->position - 1;
	return length && length <= last && *at(period, last) == *at(period, last - length);
}

/* The product just stored is not what the period said. */
static void give_up(struct qs_period *period)
{
	const uint64_t last = period->position - 1;
	/* Between two steps, or within one. */
	const bool between = period->next == last;
	period->step += between;
	period->broken = between ? last : period->next - period->length;
	period->next = 0;
	period->again = 0;
}

/* Looks for a new period, and for the old one: regular breaks make a longer period of their own. */
static void search(struct qs_period *period, uint64_t ago)
{
	if (recurs_after(period, period->length)) {
		period->run++;
	} else {
		period->length = ago;
		period->run = ago ? GRAM : 0;
	}
	period->again = recurs_after(period, period->accepted) ? period->again + 1 : 0;
	if (period->accepted && period->again >= period->accepted) {
		period->length = period->accepted;
		period->run = period->again;
		accept(period);
	} else if (period->length && period->run >= LEAST &&
	           period->run >= (ROUNDS - 1) * period->length) {
		accept(period);
	}
}

bool qs_period_add(struct qs_period *period, uint32_t symbol)
{
	const int64_t before = period->step;
	roll(period, symbol);
	*at(period, period->position) = symbol;
	period->position++;
	const uint64_t ago = distance(period);
	if (period->next && !recurs_after(period, period->length))
		give_up(period);
	if (!period->next)
		search(period, ago);
	else if (period->position > period->next) {
		period->step++;
		period->next += period->length;
	}
	return period->step != before;
}
