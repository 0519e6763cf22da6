/* The token kernel: the ids of a Python list as packed 32-bit integers. Built as a plain shared library without
 * Python, called through ctypes with the GIL held.
 *
 * It reads CPython's own objects: `hashing.py` says of which interpreters it knows their form, and tries it first.
 */
#include <stdint.h>

#define KVF_ABI 1

typedef struct {
    int64_t references;
    const void *type;
    uint64_t tag;
    uint32_t digit;
} integer;

typedef struct {
    int64_t references;
    const void *type;
    int64_t count;
    const integer *const *items;
} list;

/* What tells integers of one digit, without the bits of `ignored`, and the zero. */
typedef struct {
    const void *type;
    uint64_t ignored;
    uint64_t one_digit;
    uint64_t zero;
} form;

uint32_t kvf_token_ids_abi(void) { return KVF_ABI; }

/* Writes the items of `from`, at most `room`, up to the first that is no plain integer of one digit; returns how many
 * those are. */
uint64_t kvf_token_ids_pack(const list *from, uint64_t room, uint32_t *to, const form *known)
{
    const integer *const *items = from->items;
    const void *type = known->type;
    uint64_t meant = ~known->ignored, one_digit = known->one_digit, zero = known->zero;
    uint64_t count = from->count < 0 ? 0 : (uint64_t)from->count;
    if (count > room)
        count = room;
    for (uint64_t i = 0; i < count; i++) {
        const integer *item = items[i];
        if (item->type != type)
            return i;
        if ((item->tag & meant) == one_digit)
            to[i] = item->digit;
        else if ((item->tag & meant) == zero)
            to[i] = 0;
        else
            return i;
    }
    return count;
}
