/* The hash kernel: SHA-256 of a chain of chunks, by the instructions that x86 processors have for it. Built as a plain
 * shared library without Python, called through ctypes, which releases the GIL.
 *
 * The digest of a chunk is SHA-256(the digest before it, `gap` zero bytes, the chunk). A library's hash costs a call or
 * three a chunk, which take as long as the bytes of a chunk. The caller answers for every address.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVF_ABI 1
#define BLOCK 64
#define DIGEST 32
#define MAX_GAP 16 /* so that a head is shorter than a block */

uint32_t kvf_sha256_abi(void) { return KVF_ABI; }

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define WITH_SHA __attribute__((target("sha,sse4.1,ssse3")))

static const uint32_t ROUND[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};
static const uint32_t START[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

/* The eight words of a hash in the order that the instructions want. */
typedef struct {
    __m128i abef;
    __m128i cdgh;
} state;

WITH_SHA static inline __m128i flipped(__m128i words)
{
    return _mm_shuffle_epi8(words, _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
}

/* Four rounds with the words `a`; the first twelve times, `a` becomes the words of sixteen rounds later. */
#define ROUNDS(i, a, b, c, d)                                                                     \
    do {                                                                                          \
        __m128i k = _mm_add_epi32(a, _mm_load_si128((const __m128i *)(ROUND + 4 * (i))));         \
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, k);                                              \
        if ((i) < 12)                                                                             \
            a = _mm_sha256msg2_epu32(                                                             \
                _mm_add_epi32(_mm_sha256msg1_epu32(a, b), _mm_alignr_epi8(d, c, 4)), d);          \
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(k, 0x0e));                     \
    } while (0)
#define ROUNDS_16(i)            \
    ROUNDS(i, w0, w1, w2, w3);     \
    ROUNDS(i + 1, w1, w2, w3, w0); \
    ROUNDS(i + 2, w2, w3, w0, w1); \
    ROUNDS(i + 3, w3, w0, w1, w2)

WITH_SHA static inline void add_blocks(state *hash, const uint8_t *from, uint64_t blocks)
{
    __m128i abef = hash->abef, cdgh = hash->cdgh;
    for (; blocks; blocks--, from += BLOCK) {
        __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w0 = flipped(_mm_loadu_si128((const __m128i *)from));
        __m128i w1 = flipped(_mm_loadu_si128((const __m128i *)(from + 16)));
        __m128i w2 = flipped(_mm_loadu_si128((const __m128i *)(from + 32)));
        __m128i w3 = flipped(_mm_loadu_si128((const __m128i *)(from + 48)));
        ROUNDS_16(0);
        ROUNDS_16(4);
        ROUNDS_16(8);
        ROUNDS_16(12);
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    hash->abef = abef;
    hash->cdgh = cdgh;
}

WITH_SHA static inline state started(void)
{
    __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)START), 0xb1);
    __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(START + 4)), 0x1b);
    return (state){_mm_alignr_epi8(cdab, efgh, 8), _mm_blend_epi16(efgh, cdab, 0xf0)};
}

WITH_SHA static inline void write_digest(const state *hash, uint8_t *to)
{
    __m128i feba = _mm_shuffle_epi32(hash->abef, 0x1b), dchg = _mm_shuffle_epi32(hash->cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)to, flipped(_mm_blend_epi16(feba, dchg, 0xf0)));
    _mm_storeu_si128((__m128i *)(to + 16), flipped(_mm_alignr_epi8(dchg, feba, 8)));
}

/* `head` is shorter than a block. */
WITH_SHA static void hash_one(const uint8_t *head, size_t head_bytes, const uint8_t *chunk, uint64_t bytes, uint8_t *to)
{
    uint8_t edge[2 * BLOCK];
    state hash = started();
    uint64_t bits = (head_bytes + bytes) * 8, taken = BLOCK - head_bytes;
    if (taken > bytes)
        taken = bytes;
    memcpy(edge, head, head_bytes);
    memcpy(edge + head_bytes, chunk, taken);
    size_t held = head_bytes + taken;
    if (held == BLOCK) {
        uint64_t whole = (bytes - taken) / BLOCK;
        add_blocks(&hash, edge, 1);
        add_blocks(&hash, chunk + taken, whole);
        held = bytes - taken - whole * BLOCK;
        memcpy(edge, chunk + bytes - held, held);
    }
    size_t end = held + 1 + sizeof bits > BLOCK ? 2 * BLOCK : BLOCK;
    edge[held] = 0x80;
    memset(edge + held + 1, 0, end - held - 1);
    for (size_t i = 1; i <= sizeof bits; i++, bits >>= 8)
        edge[end - i] = (uint8_t)bits;
    add_blocks(&hash, edge, end / BLOCK);
    write_digest(&hash, to);
}

/* Whether this processor has the instructions. */
int kvf_sha256_works(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
}

/* Writes the digests of `chunks` chunks of `bytes` each, which lie one behind the other. `parent` has `parent_bytes`, 0
 * or those of a digest. 0, or -1 if the chain is malformed. Only where it works. */
int kvf_sha256_chain(const uint8_t *tokens, uint64_t chunks, uint64_t bytes, const uint8_t *parent,
    uint32_t parent_bytes, uint32_t gap, uint8_t *digests)
{
    uint8_t head[DIGEST + MAX_GAP] = {0};
    if (parent_bytes > DIGEST || gap > MAX_GAP)
        return -1;
    memcpy(head, parent, parent_bytes);
    for (uint64_t i = 0; i < chunks; i++, tokens += bytes, digests += DIGEST) {
        hash_one(head, parent_bytes + gap, tokens, bytes, digests);
        memcpy(head, digests, DIGEST);
        parent_bytes = DIGEST;
    }
    return 0;
}

#else

int kvf_sha256_works(void) { return 0; }

int kvf_sha256_chain(const uint8_t *tokens, uint64_t chunks, uint64_t bytes, const uint8_t *parent,
    uint32_t parent_bytes, uint32_t gap, uint8_t *digests)
{
    (void)tokens, (void)chunks, (void)bytes, (void)parent, (void)parent_bytes, (void)gap, (void)digests;
    return -1;
}

#endif
