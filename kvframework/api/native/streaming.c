/* The streaming kernel: a copy past the caches. Built as a plain shared library without Python, called through ctypes,
 * which releases the GIL. The caller answers for every address, and for ranges that do not overlap.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVF_ABI 1
#define LINE 64
#define AT_ONCE 128

uint32_t kvf_streaming_abi(void) { return KVF_ABI; }

#if defined(__x86_64__)
#include <immintrin.h>

/* Streaming stores write whole lines without reading them first. */
__attribute__((target("avx2"))) static void stream(uint8_t *to, const uint8_t *from, size_t bytes)
{
    size_t head = (size_t)(-(intptr_t)to & (LINE - 1));
    if (head > bytes)
        head = bytes;
    memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= AT_ONCE; bytes -= AT_ONCE, to += AT_ONCE, from += AT_ONCE) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
        _mm256_stream_si256((__m256i *)(to + 64), c);
        _mm256_stream_si256((__m256i *)(to + 96), d);
    }
    memcpy(to, from, bytes);
    _mm_sfence();
}
#endif

void kvf_stream(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        stream(to, from, bytes);
        return;
    }
#endif
    memcpy(to, from, bytes);
}
