/* The copy kernel: a product of equal fragments between engine memory and the arena, by a bounded number of
 * threads, past the caches where that pays. Built as a plain shared library without Python, called through ctypes,
 * which releases the GIL.
 *
 * A fragment is (lane, place, one position of each step): its engine address is the sum of the lane's and the place's
 * address and of position x `engine` of each step, its arena offset likewise. The caller answers for every address.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KVF_ABI 1
#define MAX_STEPS 8
#define MAX_THREADS 64
#define ABREAST 4
#define LINE 64
#define LINES_APART 128 /* processors fetch lines by twos */
#define ABREAST_RUN 2048 /* measured: shorter runs are faster one after the other */
#define LONG_NS 1000000 /* longer than anything that an engine waits for */
#define LOSES 40 /* at most one part in so many of a copy's time */
#define MOST_CREDIT_NS 20000000
#ifndef TURN
#define TURN (2 << 20) /* bytes, 0.1 to 0.2 ms: measured: with twice as many a lookup waits nearly twice as long */
#endif
#define SHARE (512 << 10) /* bytes, 25 to 50 us: by so much the threads of a copy end apart */

typedef struct {
    uint64_t count;
    int64_t engine;
    int64_t arena;
} kvf_step;

typedef struct {
    const uint64_t *lane_addresses;
    const uint64_t *lane_offsets;
    uint64_t lanes;
    const uint64_t *place_addresses;
    const uint64_t *place_offsets;
    uint64_t places;
    const kvf_step *steps;
    uint64_t step_count;
    uint64_t run;
    uint8_t *arena;
    int32_t to_arena;
    int32_t streaming;
} kvf_product;

typedef void (*copy_run)(uint8_t *to, const uint8_t *from, size_t bytes);
typedef void (*copy_runs)(uint8_t *const *to, const uint8_t *const *from, size_t bytes);

/* What one thread copies: the cells from `next` to `last`, of which each thread takes `share` at once.
 * `together` is NULL where runs are copied one by one; else they wait until there are ABREAST.
 * `lines`: copies a step of short runs of whole lines, or NULL; `ahead` is then the way from where a run is read to where
 * that of the next cell is, 0 in the last one.
 * Each is in lines of its own: without, copies of runs of 4 KiB mostly took 1.02 to 1.13 times as long. */
typedef struct part {
    _Alignas(LINES_APART) const kvf_product *product;
    copy_run copy;
    copy_runs together;
    void (*lines)(const struct part *, const kvf_step *, uint8_t *engine, uint8_t *arena);
    int64_t ahead;
    uint64_t next;
    uint64_t last;
    uint64_t share;
    uint64_t cell_bytes;
    struct part *parts;
    uint32_t count;
    uint64_t turn_began_ns;
    int earns;
    uint32_t waiting;
    uint8_t *to[ABREAST];
    const uint8_t *from[ABREAST];
} part;

static void copy_plain(uint8_t *to, const uint8_t *from, size_t bytes) { memcpy(to, from, bytes); }

#if defined(__x86_64__)
/* Streaming stores write whole lines without reading them first and leave the caches to others. */
__attribute__((target("avx2"))) static inline void stream_128(uint8_t *to, const uint8_t *from)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)from);
    __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
    __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
    __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));
    _mm256_stream_si256((__m256i *)to, a);
    _mm256_stream_si256((__m256i *)(to + 32), b);
    _mm256_stream_si256((__m256i *)(to + 64), c);
    _mm256_stream_si256((__m256i *)(to + 96), d);
}

__attribute__((target("avx2"))) static void copy_streaming(uint8_t *to, const uint8_t *from, size_t bytes)
{
    size_t head = (size_t)(-(intptr_t)to & 63);
    if (bytes < head + 256) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= 128; bytes -= 128, to += 128, from += 128)
        stream_128(to, from);
    memcpy(to, from, bytes);
}

/* Several runs at a time keep as many of the processor's own prefetchers and page walks busy: 1.4 times as fast as one
 * after the other on a Xeon, where prefetch instructions made it slower. Places to write to begin at whole lines. */
__attribute__((target("avx2"))) static void copy_abreast(uint8_t *const *to, const uint8_t *const *from, size_t bytes)
{
    size_t whole = bytes & ~(size_t)127;
    for (size_t at = 0; at < whole; at += 128)
        for (int i = 0; i < ABREAST; i++)
            stream_128(to[i] + at, from[i] + at);
    for (int i = 0; i < ABREAST; i++)
        memcpy(to[i] + whole, from[i] + whole, bytes - whole);
}

/* What a shard has of a token is too short for the processor's own prefetchers: what the next cell reads is fetched
 * meanwhile. Measured on an EPYC, stores of 256-byte runs to 8, 4 and 2 shards: 1.4, 1.9 and 2.4 times as fast as
 * without, 0.9 to 1.3 times as fast as whole blocks. */
__attribute__((target("avx2"))) static void copy_lines(
    const part *p, const kvf_step *step, uint8_t *engine, uint8_t *arena)
{
    const kvf_product *product = p->product;
    uint8_t *to = product->to_arena ? arena : engine;
    const uint8_t *from = product->to_arena ? engine : arena;
    int64_t to_step = product->to_arena ? step->arena : step->engine;
    int64_t from_step = product->to_arena ? step->engine : step->arena;
    for (uint64_t run = 0; run < step->count; run++, to += to_step, from += from_step)
        for (uint64_t at = 0; at < product->run; at += LINE) {
            __m256i low = _mm256_loadu_si256((const __m256i *)(from + at));
            __m256i high = _mm256_loadu_si256((const __m256i *)(from + at + 32));
            _mm_prefetch((const char *)from + at + p->ahead, _MM_HINT_T0);
            _mm256_stream_si256((__m256i *)(to + at), low);
            _mm256_stream_si256((__m256i *)(to + at + 32), high);
        }
}
#endif

static void choose(part *p)
{
    p->copy = copy_plain;
    p->together = NULL;
    p->lines = NULL;
    p->waiting = 0;
#if defined(__x86_64__)
    uint64_t run = p->product->run;
    if (!p->product->streaming || !__builtin_cpu_supports("avx2"))
        return;
    if (run >= 256)
        p->copy = copy_streaming;
    if (run >= ABREAST_RUN)
        p->together = copy_abreast;
    else if (run % LINE == 0)
        p->lines = copy_lines;
#endif
}

static void copy_one(part *p, uint8_t *to, const uint8_t *from)
{
    if (p->together == NULL || ((uintptr_t)to & 63)) {
        p->copy(to, from, p->product->run);
        return;
    }
    p->to[p->waiting] = to;
    p->from[p->waiting] = from;
    if (++p->waiting == ABREAST) {
        p->together(p->to, p->from, p->product->run);
        p->waiting = 0;
    }
}

/* A step of single elements without a call for each, as keys have it that lie transposed in their block. */
static int copy_elements(const kvf_product *product, const kvf_step *step, uint8_t *engine, uint8_t *arena)
{
    uint8_t *to = product->to_arena ? arena : engine;
    const uint8_t *from = product->to_arena ? engine : arena;
    int64_t to_step = product->to_arena ? step->arena : step->engine;
    int64_t from_step = product->to_arena ? step->engine : step->arena;
#define COPY_EACH(size)                                                             \
    for (uint64_t at = 0; at < step->count; at++, to += to_step, from += from_step) \
        memcpy(to, from, size);                                                     \
    return 1
    switch (product->run) {
    case 1: COPY_EACH(1);
    case 2: COPY_EACH(2);
    case 4: COPY_EACH(4);
    case 8: COPY_EACH(8);
    }
#undef COPY_EACH
    return 0;
}

static void copy_steps(part *p, uint64_t level, uint8_t *engine, uint8_t *arena)
{
    const kvf_product *product = p->product;
    if (level == product->step_count) {
        if (product->to_arena)
            copy_one(p, arena, engine);
        else
            copy_one(p, engine, arena);
        return;
    }
    const kvf_step *step = &product->steps[level];
    if (level + 1 == product->step_count) {
        uintptr_t to = (uintptr_t)(product->to_arena ? arena : engine);
        uintptr_t to_step = (uintptr_t)(product->to_arena ? step->arena : step->engine);
        if (p->lines != NULL && (to | to_step) % LINE == 0) {
            p->lines(p, step, engine, arena);
            return;
        }
        if (copy_elements(product, step, engine, arena))
            return;
    }
    for (uint64_t at = 0; at < step->count; at++, engine += step->engine, arena += step->arena)
        copy_steps(p, level + 1, engine, arena);
}

static uint8_t *engine_of(const kvf_product *product, uint64_t cell)
{
    uint64_t lane = product->lane_addresses[cell / product->places];
    return (uint8_t *)(uintptr_t)(lane + product->place_addresses[cell % product->places]);
}

static uint8_t *arena_of(const kvf_product *product, uint64_t cell)
{
    uint64_t lane = product->lane_offsets[cell / product->places];
    return (uint8_t *)((uintptr_t)product->arena + lane + product->place_offsets[cell % product->places]);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* The time that the threads of this process may lose to others, of which a copy's first thread earns a part while it
 * copies. */
static int64_t credit_ns = MOST_CREDIT_NS;

/* Leaves the core to whom waits for it, between two turns. A thread that wakes up for a moment, as a lookup does, would
 * else wait for the end of a slice, 4 ms where the kernel's tick is 250 Hz. Where another one wants all of the core, as
 * long a slice is lost each time: so that is paid, and without credit no thread gives way. */
static void give_way(part *p)
{
    uint64_t left = now_ns();
    int64_t credit = __atomic_load_n(&credit_ns, __ATOMIC_RELAXED);
    if (p->earns && credit < MOST_CREDIT_NS)
        __atomic_fetch_add(&credit_ns, (int64_t)(left - p->turn_began_ns) / LOSES, __ATOMIC_RELAXED);
    p->turn_began_ns = left;
    if (credit <= 0)
        return;
    sched_yield();
    uint64_t back = now_ns();
    p->turn_began_ns = back;
    if (back - left >= LONG_NS)
        __atomic_fetch_sub(&credit_ns, (int64_t)(back - left), __ATOMIC_RELAXED);
}

static void copy_cells(part *p, uint64_t first, uint64_t last)
{
    const kvf_product *product = p->product;
    for (uint64_t cell = first; cell < last; cell++) {
        uint8_t *engine = engine_of(product, cell), *arena = arena_of(product, cell);
        if (cell + 1 == last)
            p->ahead = 0;
        else if (product->to_arena)
            p->ahead = (intptr_t)engine_of(product, cell + 1) - (intptr_t)engine;
        else
            p->ahead = (intptr_t)arena_of(product, cell + 1) - (intptr_t)arena;
        copy_steps(p, 0, engine, arena);
    }
}

/* Copies a thread's own part, then what others have left of theirs: of one that waits for a core they wait for the end of
 * a share at most. Each begins with its own, since neighbouring cells have their page tables in common. */
static void *run_part(void *argument)
{
    part *p = argument;
    choose(p);
    uint64_t copied = 0;
    p->turn_began_ns = now_ns();
    for (uint32_t i = 0; i < p->count; i++) {
        part *of = &p->parts[(p - p->parts + i) % p->count];
        while (__atomic_load_n(&of->next, __ATOMIC_RELAXED) < of->last) {
            if (copied >= TURN) {
                give_way(p);
                copied = 0;
            }
            uint64_t first = __atomic_fetch_add(&of->next, p->share, __ATOMIC_RELAXED);
            if (first >= of->last)
                break;
            uint64_t last = of->last - first > p->share ? first + p->share : of->last;
            copy_cells(p, first, last);
            copied += (last - first) * p->cell_bytes;
        }
    }
    for (uint32_t i = 0; i < p->waiting; i++)
        p->copy(p->to[i], p->from[i], p->product->run);
#if defined(__x86_64__)
    _mm_sfence();
#endif
    return NULL;
}

uint32_t kvf_copy_abi(void) { return KVF_ABI; }

/* Copies all of `product` by at most `threads` threads, the caller's own among them; returns when it is done. 0, or -1
 * if the product is malformed. Helpers take no signals; where one cannot be started, the others do its part. */
int kvf_copy(const kvf_product *product, uint32_t threads)
{
    uint64_t cells = product->lanes * product->places;
    if (product->step_count > MAX_STEPS || product->run == 0)
        return -1;
    uint64_t cell_bytes = product->run;
    for (uint64_t level = 0; level < product->step_count; level++)
        cell_bytes *= product->steps[level].count;
    if (cells == 0 || cell_bytes == 0)
        return 0;
    if (threads < 1)
        threads = 1;
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    if (threads > cells)
        threads = (uint32_t)cells;

    part parts[MAX_THREADS];
    pthread_t helpers[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    for (uint32_t i = 0; i < threads; i++)
        parts[i] = (part){
            .product = product,
            .next = cells * i / threads,
            .last = cells * (i + 1) / threads,
            .share = cell_bytes < SHARE ? SHARE / cell_bytes : 1,
            .cell_bytes = cell_bytes,
            .parts = parts,
            .count = threads,
            .earns = i == 0,
        };

    sigset_t all, before;
    if (threads > 1) {
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (uint32_t i = 1; i < threads; i++)
            started[i] = pthread_create(&helpers[i], NULL, run_part, &parts[i]) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    run_part(&parts[0]);
    for (uint32_t i = 1; i < threads; i++)
        if (started[i])
            pthread_join(helpers[i], NULL);
    return 0;
}
