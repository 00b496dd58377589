/* operand/mapping: memory that is mapped from handles (cuMemCreate, cuMemMap), and who else can
 * write it: whoever got a handle of it from the program, or gave it one; and the program itself, at
 * another address of the same memory.
 *
 * intercept/ reports every call, from the first on, as what is shared may be watched later. What is
 * not seen: handles that pass by functions that are not looked up by name.
 */
#ifndef QS_OPERAND_MAPPING_H
#define QS_OPERAND_MAPPING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* [first, first + bytes) is mapped from the handle. If it is shared, or mapped elsewhere too, all
 * of its addresses are gone (qs_track_gone) and not to be watched any more. */
void qs_mapping_add(uint64_t first, size_t bytes, uint64_t handle);
/* It is no longer mapped. */
void qs_mapping_remove(uint64_t first, size_t bytes);
/* The memory of the handle can be written by others from now on, wherever it is mapped. */
void qs_mapping_share(uint64_t handle);
/* The same of what is mapped at the address. */
void qs_mapping_share_at(uint64_t address);
/* The same of these bytes, mapped or allocated; until something else is mapped there. */
void qs_mapping_share_range(uint64_t first, size_t bytes);
/* The handle may name other memory from now on; what is mapped stays. */
void qs_mapping_release(uint64_t handle);
/* True if any of the bytes can be written by others. */
bool qs_mapping_is_shared(uint64_t first, size_t bytes);

#endif
