/* Owns copies, and the faults that are injected in the middle of them. Each side of a copy is held against what this
   process has mapped and pinned: what a device would let pass is refused and noted. */

#include <stdlib.h>
#include <string.h>

#include "simulated.h"

enum { ORDER_STREAM = 1, ORDER_ANY = 3 };
#define POLL_S 1e-3

struct fragment {
    uint64_t to;
    uint64_t from;
    size_t nbytes;
};

struct copies {
    struct work work;
    int row;
    bool writes;
    bool counted;
    uint8_t value;
    size_t count;
    struct span *late; /* of work whose turn comes when the host lets its stream go on */
    size_t late_count;
    struct fragment fragments[];
};

/* In the thread of a stream; false if there is nothing more to be done, since the context is lost. */
bool faults_in_the_middle(uint32_t device)
{
    if (take_fault(POISON, device))
        atomic_store(&process.lost, true);
    uint64_t released = __atomic_load_n(&process.table->released, __ATOMIC_ACQUIRE);
    if (take_fault(HOLD, device))
        while (__atomic_load_n(&process.table->released, __ATOMIC_ACQUIRE) == released && !atomic_load(&process.lost))
            pause_s(POLL_S);
    return !atomic_load(&process.lost);
}

static void run_copies(struct stream *stream, struct work *work)
{
    struct copies *copies = (struct copies *)work;
    if (copies->late != NULL)
        copies->row = order_queued(stream_number(stream), copies->writes, copies->late, copies->late_count);
    order_begins(copies->row);
    /* From the last to the first: within a batch there is no order. */
    for (size_t left = copies->count; left > 0; left--) {
        const struct fragment *fragment = &copies->fragments[left - 1];
        if (copies->counted && left == (copies->count + 1) / 2 && !faults_in_the_middle(stream_context(stream)->device))
            break;
        if (fragment->from != 0)
            memcpy((void *)fragment->to, (const void *)fragment->from, fragment->nbytes);
        else
            memset((void *)fragment->to, copies->value, fragment->nbytes);
    }
    order_done(copies->row);
}

static void discard_copies(struct work *work)
{
    free(((struct copies *)work)->late);
}

enum side { WRONG, DEVICE, HOST };

/* What the bytes are to a copy of this device; if it is the device's memory, where they are. With process.lock held. */
static enum side side_of(uint64_t address, size_t nbytes, uint32_t device, bool pinned, struct span *span)
{
    const struct region *region = region_of(address, 1);
    if (region == NULL) {
        if (!pinned || is_pinned(address, nbytes))
            return HOST;
        violated("not_pinned", "a copy of %zu bytes at %#lx, neither device memory nor in one range that is registered",
                 nbytes, (unsigned long)address);
        return WRONG;
    }
    if (region->device != device || region_of(address, nbytes) == NULL) {
        violated(region->device != device ? "wrong_device" : "out_of_bounds",
                 "a copy of %zu bytes, %lu into an allocation of %zu bytes of device %u, on device %u", nbytes,
                 (unsigned long)(address - region->address), region->nbytes, region->device, device);
        return WRONG;
    }
    span->low = region->physical + (address - region->address);
    span->high = span->low + nbytes;
    return DEVICE;
}

/* Checks all of them and queues the first `kept`. `pinned`: the host's side has to be. On error `*wrong` tells which. */
static CUresult add_copies(struct stream *stream, struct copies *copies, size_t kept, bool pinned, size_t *wrong)
{
    uint32_t device = stream_context(stream)->device;
    struct span *spans = malloc((2 * copies->count + 1) * sizeof *spans);
    size_t count = 0;
    bool writes = false, stays = spans != NULL;
    pthread_mutex_lock(&process.lock);
    for (*wrong = 0; stays && *wrong < copies->count; ++*wrong) {
        const struct fragment *each = &copies->fragments[*wrong];
        enum side from = each->from == 0 ? HOST : side_of(each->from, each->nbytes, device, pinned, &spans[count]);
        count += from == DEVICE;
        enum side to = side_of(each->to, each->nbytes, device, pinned, &spans[count]);
        count += to == DEVICE;
        writes |= to == DEVICE;
        if (each->nbytes == 0 || from == WRONG || to == WRONG || (from == HOST && to == HOST))
            break;
    }
    pthread_mutex_unlock(&process.lock);
    stays = stays && *wrong == copies->count;
    if (!stays) {
        free(spans);
        free(copies);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (spans_merge(spans, &count) && writes)
        violated("overlap", "fragments of one batch write to the same bytes of the device");
    copies->count = kept;
    copies->writes = writes;
    copies->work.discard = discard_copies;
    if (stream_waits_for_host(stream)) {
        copies->late = spans;
        copies->late_count = count;
    } else {
        copies->row = order_queued(stream_number(stream), writes, spans, count);
        free(spans);
    }
    stream_add(stream, &copies->work);
    return CUDA_SUCCESS;
}

/* One fragment; with no source it is set to `value`. */
static CUresult add_one(struct fragment fragment, uint8_t value, bool pinned, CUstream handle, bool wait)
{
    struct context *context;
    struct stream *stream;
    size_t wrong;
    CUresult result = entered(&context);
    if (result == CUDA_SUCCESS)
        result = stream_of(handle, context, &stream);
    if (result != CUDA_SUCCESS || fragment.nbytes == 0)
        return result;
    struct copies *copies = new_work(sizeof *copies + sizeof *copies->fragments, run_copies);
    copies->count = 1;
    copies->value = value;
    copies->fragments[0] = fragment;
    result = add_copies(stream, copies, 1, pinned, &wrong);
    return result == CUDA_SUCCESS && wait ? stream_wait_idle(stream) : result;
}

static CUresult copy_one(CUdeviceptr to, uint64_t from, size_t nbytes, CUstream handle, bool wait)
{
    return add_one((struct fragment){to, from, nbytes}, 0, !wait, handle, wait);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t nbytes, CUstream stream)
{
    return copy_one(to, (uint64_t)from, nbytes, stream, false);
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t nbytes, CUstream stream)
{
    return copy_one((uint64_t)to, from, nbytes, stream, false);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream)
{
    return copy_one(to, from, nbytes, stream, false);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t nbytes)
{
    return copy_one(to, (uint64_t)from, nbytes, NULL, true);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t nbytes)
{
    return copy_one((uint64_t)to, from, nbytes, NULL, true);
}


/* The form of 12.8, which tells what was wrong. */
API CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *nbytes, size_t count,
                                CUmemcpyAttributes *attributes, size_t *firsts, size_t number, size_t *wrong,
                                CUstream handle)
{
    struct context *context;
    struct stream *stream;
    CUresult result = entered(&context);
    *wrong = SIZE_MAX;
    if (result == CUDA_SUCCESS)
        result = refused("cuMemcpyBatchAsync");
    if (result == CUDA_SUCCESS && number > 0 && attributes[0].flags != 0)
        result = refused("cuMemcpyBatchAsync, flags");
    if (result != CUDA_SUCCESS)
        return result;
    if ((uintptr_t)handle < 2 || count == 0 || number == 0 || number > count || firsts[0] != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t at = 0; at < number; at++) {
        bool ordered = at == 0 || firsts[at] > firsts[at - 1];
        int order = attributes[at].srcAccessOrder;
        if (!ordered || firsts[at] >= count || order < ORDER_STREAM || order > ORDER_ANY)
            return CUDA_ERROR_INVALID_VALUE;
        if (order != ORDER_STREAM)
            violated("source_order", "a copy may read its source before its turn in the stream");
    }
    result = stream_of(handle, context, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    struct copies *copies = new_work(sizeof *copies + count * sizeof *copies->fragments, run_copies);
    copies->counted = true;
    copies->count = count;
    for (size_t at = 0; at < count; at++)
        copies->fragments[at] = (struct fragment){to[at], from[at], nbytes[at]};
    bool fails = take_fault(COPY_FAILS, context->device);
    size_t at;
    size_t kept = refused("cuMemcpyBatchAsync, its bytes") != CUDA_SUCCESS ? 1 : count; /* and nobody is told */
    result = add_copies(stream, copies, fails ? count / 2 : kept, true, &at);
    __atomic_add_fetch(&process.table->batches, result == CUDA_SUCCESS, __ATOMIC_RELAXED);
    if (result != CUDA_SUCCESS || fails)
        *wrong = fails ? count / 2 : at;
    return fails ? CUDA_ERROR_INVALID_VALUE : result;
}

API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *nbytes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *firsts, size_t number, CUstream handle)
{
    size_t wrong;
    return cuMemcpyBatchAsync(to, from, nbytes, count, attributes, firsts, number, &wrong, handle);
}

static CUresult set(CUdeviceptr to, uint8_t value, size_t nbytes, CUstream handle, bool wait)
{
    return add_one((struct fragment){to, 0, nbytes}, value, true, handle, wait);
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t nbytes)
{
    return set(to, value, nbytes, NULL, true);
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream stream)
{
    return set(to, value, nbytes, stream, false);
}
