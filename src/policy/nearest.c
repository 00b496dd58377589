/* The nearest of some words to a mistyped one, for "did you mean".
 *
 * Distance is the number of letters inserted, dropped, replaced or swapped with a neighbour, letter
 * case ignored. A word is near enough if about a third of its letters would have to change; a wrong
 * suggestion is worse than none. Words of more than 63 characters have no neighbours.
 */
#include <string.h>

#include "policy/policy.h"

#define WORD_MAX 63

static int lower(char c)
{
	return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c;
}

static int least(int a, int b)
{
	return a < b ? a : b;
}

/* Optimal string alignment over three rows: two back, one back, this one. */
static int distance(const char *a, const char *b)
{
	int rows[3][WORD_MAX + 1], *before = rows[0], *above = rows[1], *row = rows[2];
	int width = (int)strlen(b);
	for (int j = 0; j <= width; j++)
		above[j] = j;
	for (int i = 1; a[i - 1]; i++) {
		row[0] = i;
		for (int j = 1; j <= width; j++) {
			int replaced = above[j - 1] + (lower(a[i - 1]) != lower(b[j - 1]));
			row[j] = least(replaced, least(above[j], row[j - 1]) + 1);
			if (i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) &&
			    lower(a[i - 2]) == lower(b[j - 1]))
				row[j] = least(row[j], before[j - 2] + 1);
		}
		int *free_row = before;
		before = above;
		above = row;
		row = free_row;
	}
	return above[width];
}

const char *qs_nearest(const char *word, const char *const *words, size_t count)
{
	size_t length = strlen(word);
	if (length > WORD_MAX)
		return NULL;
	int best = (int)(length + 1) / 3;
	const char *nearest = NULL;
	for (size_t i = 0; i < count; i++) {
		if (strlen(words[i]) > WORD_MAX)
			continue;
		int found = distance(word, words[i]);
		if (found < best || (found == best && !nearest)) {
			best = found;
			nearest = words[i];
		}
	}
	return nearest;
}
