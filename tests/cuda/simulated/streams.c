/* Owns streams: a queue with a thread each, whose work begins after a delay drawn from the node's seed, so that nothing
   is in order unless something ordered it. */

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "simulated.h"

enum { GEQ, EQUAL, AND, NOR };
#define NULL_STREAM ((CUstream)0)
#define LEGACY_STREAM ((CUstream)1)
#define THREAD_STREAM ((CUstream)2)

struct stream {
    struct context *context;
    struct stream *next_stream;
    uint64_t number;
    uint64_t random;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct work *first;
    struct work **last;
    uint64_t queued;
    uint64_t done;
    atomic_int words; /* that it is to wait for, and has not come past */
    bool destroyed;
};

static struct stream *streams; /* under process.lock; never freed, so that a handle of the past is known as one */
static uint64_t numbers;
static _Thread_local struct stream *of_thread;

void pause_s(double seconds)
{
    struct timespec time = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&time, &time) != 0 && errno == EINTR)
        ;
}

/* In [0, 1). */
static double drawn(struct stream *stream)
{
    stream->random ^= stream->random << 13;
    stream->random ^= stream->random >> 7;
    stream->random ^= stream->random << 17;
    return (double)(stream->random >> 11) / (double)(1ULL << 53);
}

static void *work_off(void *argument)
{
    struct stream *stream = argument;
    for (;;) {
        pthread_mutex_lock(&stream->lock);
        while (stream->first == NULL && !stream->destroyed)
            pthread_cond_wait(&stream->changed, &stream->lock);
        struct work *work = stream->first;
        pthread_mutex_unlock(&stream->lock);
        if (work == NULL)
            return NULL;
        double delay = drawn(stream) * process.table->max_delay_s;
        if (delay > 5e-5)
            pause_s(delay);
        if (!atomic_load(&process.lost))
            work->run(stream, work);
        if (work->discard != NULL)
            work->discard(work);
        pthread_mutex_lock(&stream->lock);
        stream->first = work->next;
        if (stream->first == NULL)
            stream->last = &stream->first;
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
        pthread_mutex_unlock(&stream->lock);
        free(work);
    }
}

/* With process.lock held. */
static struct stream *started(struct context *context)
{
    pthread_attr_t attributes;
    pthread_t thread;
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        return NULL;
    stream->context = context;
    stream->number = ++numbers;
    stream->random = (process.table->seed + 1) * 0x9E3779B97F4A7C15ULL ^ (uint64_t)process.number << 32 ^ stream->number;
    stream->last = &stream->first;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 18);
    if (pthread_create(&thread, &attributes, work_off, stream) != 0) {
        free(stream);
        return NULL;
    }
    stream->next_stream = streams;
    streams = stream;
    return stream;
}

/* What a handle means to the calling thread. */
CUresult stream_of(CUstream handle, struct context *current, struct stream **found)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&process.lock);
    if (handle == NULL_STREAM || handle == LEGACY_STREAM) {
        if (current->null_stream == NULL)
            current->null_stream = started(current);
        *found = current->null_stream;
    } else if (handle == THREAD_STREAM) {
        if (of_thread == NULL || of_thread->context != current)
            of_thread = started(current);
        *found = of_thread;
    } else {
        for (*found = streams; *found != NULL && *found != handle;)
            *found = (*found)->next_stream;
        if (*found == NULL || (*found)->destroyed) {
            violated("use_after_free", "a stream is used that %s", *found == NULL ? "is none" : "was destroyed");
            result = CUDA_ERROR_INVALID_HANDLE;
        }
    }
    pthread_mutex_unlock(&process.lock);
    return *found == NULL && result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

struct context *stream_context(const struct stream *stream)
{
    return stream->context;
}

uint64_t stream_number(const struct stream *stream)
{
    return stream->number;
}

bool stream_waits_for_host(struct stream *stream)
{
    return atomic_load(&stream->words) > 0;
}

void *new_work(size_t size, void (*run)(struct stream *, struct work *))
{
    struct work *work = calloc(1, size);
    if (work == NULL)
        abort();
    work->run = run;
    return work;
}

void stream_add(struct stream *stream, struct work *work)
{
    pthread_mutex_lock(&stream->lock);
    *stream->last = work;
    stream->last = &work->next;
    stream->queued++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

/* Until all is done that is queued now. */
CUresult stream_wait_idle(struct stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    uint64_t queued = stream->queued;
    while (stream->done < queued && !atomic_load(&process.lost))
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return usable(stream->context->device);
}

CUresult context_wait_idle(struct context *context)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&process.lock);
    struct stream *stream = streams;
    pthread_mutex_unlock(&process.lock);
    for (; stream != NULL && result == CUDA_SUCCESS; stream = stream->next_stream)
        if (stream->context == context)
            result = stream_wait_idle(stream);
    return result;
}

API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result == CUDA_SUCCESS && priority != 0)
        result = refused("cuStreamCreateWithPriority");
    if (result != CUDA_SUCCESS || flags > 1)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&process.lock);
    *stream = started(context);
    pthread_mutex_unlock(&process.lock);
    return *stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    return cuStreamCreateWithPriority(stream, flags, 0);
}

/* `found` by its handle, if the thread has a context and both can be used. */
static CUresult reached_stream(CUstream handle, struct stream **found)
{
    struct context *context;
    CUresult result = entered(&context);
    return result != CUDA_SUCCESS ? result : stream_of(handle, context, found);
}

API CUresult cuStreamDestroy_v2(CUstream handle)
{
    struct stream *stream;
    CUresult result = (uintptr_t)handle > 2 ? reached_stream(handle, &stream) : CUDA_ERROR_INVALID_HANDLE;
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&stream->lock);
    stream->destroyed = true; /* its thread ends behind all that is queued */
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return CUDA_SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream handle)
{
    struct stream *stream;
    CUresult result = reached_stream(handle, &stream);
    return result != CUDA_SUCCESS ? result : stream_wait_idle(stream);
}

API CUresult cuStreamQuery(CUstream handle)
{
    struct stream *stream;
    CUresult result = reached_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&stream->lock);
    bool idle = stream->done == stream->queued;
    pthread_mutex_unlock(&stream->lock);
    return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuStreamGetCtx(CUstream handle, CUcontext *context)
{
    struct stream *stream;
    CUresult result = reached_stream(handle, &stream);
    if (result == CUDA_SUCCESS)
        *context = stream->context;
    return result;
}

struct word {
    struct work work;
    _Atomic uint32_t *at;
    uint32_t value;
    unsigned int flags;
};

static void wait_for_word(struct stream *stream, struct work *work)
{
    const struct word *word = (struct word *)work;
    for (; !atomic_load(&process.lost); pause_s(1e-4)) {
        uint32_t found = atomic_load(word->at);
        bool reached = word->flags == EQUAL ? found == word->value
                       : word->flags == AND ? (found & word->value) != 0
                       : word->flags == NOR ? ~(found | word->value) != 0
                                            : (int32_t)(found - word->value) >= 0;
        if (reached)
            break;
    }
    atomic_fetch_sub(&stream->words, 1);
}

static void write_word(struct stream *stream, struct work *work)
{
    const struct word *word = (struct word *)work;
    (void)stream;
    atomic_store(word->at, word->value);
}

static CUresult add_word(CUstream handle, CUdeviceptr address, uint32_t value, unsigned int flags,
                         void (*run)(struct stream *, struct work *))
{
    struct stream *stream;
    CUresult result = reached_stream(handle, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    bool known = address % 4 == 0 && (is_pinned(address, 4) || region_of(address, 4) != NULL);
    pthread_mutex_unlock(&process.lock);
    if (!known || flags > NOR)
        return CUDA_ERROR_INVALID_VALUE;
    struct word *word = new_work(sizeof *word, run);
    word->at = (_Atomic uint32_t *)address;
    word->value = value;
    word->flags = flags;
    if (run == wait_for_word)
        atomic_fetch_add(&stream->words, 1);
    stream_add(stream, &word->work);
    return CUDA_SUCCESS;
}

API CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags)
{
    CUresult result = refused("cuStreamWaitValue32");
    return result != CUDA_SUCCESS ? result : add_word(stream, address, value, flags, wait_for_word);
}

API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags)
{
    return add_word(stream, address, value, flags, write_word);
}
