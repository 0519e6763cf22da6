/* Owns host memory that the device may reach: registered or allocated, and what a pointer is. */

#include <string.h>
#include <sys/mman.h>

#include "simulated.h"

enum { RANGES = 1024, PAGE = 4096 };
enum attribute {
    CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, IS_MANAGED = 8, DEVICE_ORDINAL = 9,
    IS_LEGACY_IPC_CAPABLE = 10, RANGE_START = 11, RANGE_SIZE = 12, MAPPED = 13
};

struct range {
    uint64_t low;
    uint64_t high;
    uint32_t device;
    bool allocated;
};

static struct range ranges[RANGES];
static int count;

/* The range that holds these bytes, all of them; -1 if none does. With process.lock held. */
static int range_of(uint64_t address, size_t nbytes)
{
    for (int at = 0; at < count; at++)
        if (ranges[at].low <= address && address < ranges[at].high && nbytes <= ranges[at].high - address)
            return at;
    return -1;
}

bool is_pinned(uint64_t address, size_t nbytes)
{
    return range_of(address, nbytes) >= 0;
}

/* What goes with a context. With process.lock held. */
void release_ranges(uint32_t device)
{
    for (int at = count - 1; at >= 0; at--)
        if (ranges[at].device == device) {
            if (ranges[at].allocated)
                munmap((void *)ranges[at].low, ranges[at].high - ranges[at].low);
            ranges[at] = ranges[--count];
        }
}

static CUresult add(uint64_t address, size_t nbytes, uint32_t device, bool allocated)
{
    CUresult result = count < RANGES ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&process.lock);
    for (int at = 0; at < count; at++)
        if (address < ranges[at].high && ranges[at].low < address + nbytes)
            result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (result == CUDA_SUCCESS)
        ranges[count++] = (struct range){address, address + nbytes, device, allocated};
    pthread_mutex_unlock(&process.lock);
    return result;
}

/* Waits for the context's work first; the bytes that the range had, or 0. */
static CUresult removed(uint64_t address, bool allocated, size_t *nbytes)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result == CUDA_SUCCESS)
        result = context_wait_idle(context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    int at = range_of(address, 1);
    if (at < 0 || ranges[at].low != address || ranges[at].allocated != allocated) {
        result = allocated ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    } else {
        *nbytes = ranges[at].high - ranges[at].low;
        ranges[at] = ranges[--count];
    }
    pthread_mutex_unlock(&process.lock);
    return result;
}

API CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned int flags)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (address == NULL || nbytes == 0 || (flags & ~3U) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    result = refused("cuMemHostRegister");
    return result != CUDA_SUCCESS ? result : add((uint64_t)address, nbytes, context->device, false);
}

API CUresult cuMemHostUnregister(void *address)
{
    size_t nbytes;
    return removed((uint64_t)address, false, &nbytes);
}

API CUresult cuMemHostAlloc(void **address, size_t nbytes, unsigned int flags)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (nbytes == 0 || (flags & ~7U) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    result = refused("cuMemHostAlloc");
    if (result != CUDA_SUCCESS)
        return result;
    size_t padded = (nbytes + PAGE - 1) / PAGE * PAGE;
    *address = mmap(NULL, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return *address == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : add((uint64_t)*address, padded, context->device, true);
}

API CUresult cuMemFreeHost(void *address)
{
    size_t nbytes;
    CUresult result = removed((uint64_t)address, true, &nbytes);
    if (result == CUDA_SUCCESS)
        munmap(address, nbytes);
    return result;
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *address, unsigned int flags)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    int at = flags == 0 ? range_of((uint64_t)address, 1) : -1;
    bool pinned = at >= 0, registered = pinned && !ranges[at].allocated;
    pthread_mutex_unlock(&process.lock);
    *device = (CUdeviceptr)address;
    /* Some devices see what is registered elsewhere. */
    if (registered && refused("cuMemHostGetDevicePointer, registered, same") != CUDA_SUCCESS)
        *device += PAGE;
    result = refused(registered ? "cuMemHostGetDevicePointer, registered" : "cuMemHostGetDevicePointer");
    if (result != CUDA_SUCCESS)
        return result;
    return pinned ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int ordinal_of(uint32_t device)
{
    for (int ordinal = 0; ordinal < process.count; ordinal++)
        if (process.visible[ordinal] == device)
            return ordinal;
    return -1;
}

/* Needs no current context: an address tells its own. */
API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    struct context *current = NULL;
    CUresult result = entered(&current);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_CONTEXT)
        return result;
    pthread_mutex_lock(&process.lock);
    const struct region *region = region_of(address, 1);
    int host = region == NULL ? range_of(address, 1) : -1;
    uint64_t start = region != NULL ? region->address : host >= 0 ? ranges[host].low : 0;
    size_t nbytes = region != NULL ? region->nbytes : host >= 0 ? ranges[host].high - ranges[host].low : 0;
    bool capable = region != NULL && region->opened == 0 && process.table->memories[region->row].exportable;
    struct context *owner = region != NULL ? &process.contexts[region->device] : current;
    result = refused("cuPointerGetAttribute %d%s", attribute, region != NULL && region->opened > 0 ? ", opened" : "");
    pthread_mutex_unlock(&process.lock);
    if (result != CUDA_SUCCESS)
        return result;
    if (nbytes == 0 || (attribute == HOST_POINTER && region != NULL))
        return CUDA_ERROR_INVALID_VALUE;
    switch ((enum attribute)attribute) {
    case CONTEXT:
        *(CUcontext *)data = owner;
        return CUDA_SUCCESS;
    case MEMORY_TYPE:
        *(unsigned int *)data = region != NULL ? 2 : 1;
        return CUDA_SUCCESS;
    case DEVICE_POINTER:
    case HOST_POINTER:
        *(uint64_t *)data = address;
        return CUDA_SUCCESS;
    case IS_MANAGED:
        *(unsigned int *)data = 0;
        return CUDA_SUCCESS;
    case DEVICE_ORDINAL:
        *(int *)data = owner != NULL ? ordinal_of(owner->device) : 0;
        return CUDA_SUCCESS;
    case IS_LEGACY_IPC_CAPABLE:
        *(int *)data = capable;
        return CUDA_SUCCESS;
    case RANGE_START:
        *(uint64_t *)data = start;
        return CUDA_SUCCESS;
    case RANGE_SIZE:
        *(size_t *)data = nbytes;
        return CUDA_SUCCESS;
    case MAPPED:
        *(int *)data = 1;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}
