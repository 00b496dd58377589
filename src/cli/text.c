/* Arrays that grow, and texts from files that anybody may have written. */
#include <stdlib.h>

#include "cli/records.h"

/* Doubles at powers of two. */
void *qs_grow(void *array, size_t count, size_t size)
{
	if (count & (count - 1))
		return array;
	return reallocarray(array, count ? 2 * count : 1, size);
}

/* Bytes from 0x80 on are left: a broken character is shown as such, and obeyed by no terminal that
 * reads UTF-8. */
static bool is_shown(unsigned char byte)
{
	return byte >= 0x20 && byte != 0x7f;
}

void qs_copy_text(char *to, size_t size, const char *from, size_t length)
{
	size_t i = 0;
	for (; i < length && i + 1 < size && from[i]; i++)
		to[i] = is_shown((unsigned char)from[i]) ? from[i] : '?';
	to[i] = '\0';
}
