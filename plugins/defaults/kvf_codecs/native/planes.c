/* The plane kernel: elements of a few bytes into one plane for each byte of an element, and back. Built as a plain
 * shared library without Python, called through ctypes, which releases the GIL. The caller answers for every address.
 */
#include <stdint.h>
#include <string.h>

#define KVF_ABI 1
/* Memory of each side lies apart from the other's: so the compiler takes many elements at a time. */
#define READ const uint8_t *restrict
#define WRITTEN uint8_t *restrict

static void split_2(READ from, uint64_t count, WRITTEN a, WRITTEN b)
{
    for (uint64_t at = 0; at < count; at++) {
        a[at] = from[2 * at];
        b[at] = from[2 * at + 1];
    }
}

static void split_4(READ from, uint64_t count, WRITTEN a, WRITTEN b, WRITTEN c, WRITTEN d)
{
    for (uint64_t at = 0; at < count; at++) {
        a[at] = from[4 * at];
        b[at] = from[4 * at + 1];
        c[at] = from[4 * at + 2];
        d[at] = from[4 * at + 3];
    }
}

static void merge_2(WRITTEN to, uint64_t count, READ a, READ b)
{
    for (uint64_t at = 0; at < count; at++) {
        to[2 * at] = a[at];
        to[2 * at + 1] = b[at];
    }
}

static void merge_4(WRITTEN to, uint64_t count, READ a, READ b, READ c, READ d)
{
    for (uint64_t at = 0; at < count; at++) {
        to[4 * at] = a[at];
        to[4 * at + 1] = b[at];
        to[4 * at + 2] = c[at];
        to[4 * at + 3] = d[at];
    }
}

uint32_t kvf_planes_abi(void) { return KVF_ABI; }

/* Writes byte i of each of `count` elements of `width` bytes to planes[i]. */
void kvf_planes_split(const uint8_t *from, uint64_t count, uint32_t width, uint8_t *const *planes)
{
    if (width == 1)
        memcpy(planes[0], from, count);
    else if (width == 2)
        split_2(from, count, planes[0], planes[1]);
    else if (width == 4)
        split_4(from, count, planes[0], planes[1], planes[2], planes[3]);
    else
        for (uint32_t i = 0; i < width; i++)
            for (uint64_t at = 0; at < count; at++)
                planes[i][at] = from[at * width + i];
}

/* The inverse of `kvf_planes_split`. */
void kvf_planes_merge(uint8_t *to, uint64_t count, uint32_t width, const uint8_t *const *planes)
{
    if (width == 1)
        memcpy(to, planes[0], count);
    else if (width == 2)
        merge_2(to, count, planes[0], planes[1]);
    else if (width == 4)
        merge_4(to, count, planes[0], planes[1], planes[2], planes[3]);
    else
        for (uint32_t i = 0; i < width; i++)
            for (uint64_t at = 0; at < count; at++)
                to[at * width + i] = planes[i][at];
}
