/* Owns device memory: a file for each allocation, mapped by its process and by those that opened its handle. */

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulated.h"

enum { PAGE = 4096, GARBAGE = 0xC5, LAZY_ENABLE_PEER_ACCESS = 1 };

/* What a handle holds of the 64 bytes. */
struct memory_handle {
    char kind[8];
    uint32_t row;
    uint32_t spare;
    uint8_t token[16];
};

static struct region *regions; /* sorted by address */
static size_t count, capacity;

/* The index of the first region that lies above the address. */
static size_t above(CUdeviceptr address)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (regions[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The allocation that holds these bytes, all of them; NULL if none does. */
struct region *region_of(CUdeviceptr address, size_t nbytes)
{
    size_t at = above(address);
    if (at == 0)
        return NULL;
    struct region *found = &regions[at - 1];
    size_t offset = address - found->address;
    return offset < found->nbytes && nbytes <= found->nbytes - offset ? found : NULL;
}

/* Maps the row's memory and adds it; its address, or 0. Behind its end lies a page that nobody may touch. */
static CUdeviceptr add(uint32_t row, uint32_t opening, int opened, int flags)
{
    const struct memory_row *memory = &process.table->memories[row];
    char path[4096];
    memory_path(path, sizeof path, memory);
    int fd = open(path, flags | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        return 0;
    size_t padded = (memory->nbytes + PAGE - 1) / PAGE * PAGE;
    char *address = mmap(NULL, padded + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bool mapped = address != MAP_FAILED && ((flags & O_CREAT) == 0 || ftruncate(fd, (off_t)padded) == 0);
    mapped = mapped && mmap(address, padded, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == address;
    close(fd);
    if (mapped && count == capacity) {
        capacity = 2 * capacity + 64;
        regions = realloc(regions, capacity * sizeof *regions);
    }
    if (!mapped || regions == NULL)
        return 0;
    size_t at = above((CUdeviceptr)address);
    memmove(&regions[at + 1], &regions[at], (count++ - at) * sizeof *regions);
    regions[at] = (struct region){(CUdeviceptr)address, memory->nbytes, memory->physical, row, opening, memory->device,
                                  opened};
    return (CUdeviceptr)address;
}

/* Gives up the memory's row if nobody is left that holds it. With the table's lock held. */
static void reclaim(uint32_t row)
{
    struct memory_row *memory = &process.table->memories[row];
    char path[4096];
    if ((memory->state == LIVE && lives(&memory->owner)) || is_opened(OPENED_MEMORY, row))
        return;
    memory_path(path, sizeof path, memory);
    unlink(path);
    memory->state = UNUSED;
}

/* Removes it from what others see, and from this process's addresses if `unmap`. */
static void drop(struct region *region, bool unmap)
{
    char path[4096];
    table_lock();
    struct memory_row *memory = &process.table->memories[region->row];
    if (region->opened > 0) {
        process.table->openings[region->opening].state = UNUSED;
    } else {
        memory->state = FREED;
        memory_path(path, sizeof path, memory);
        unlink(path);
    }
    reclaim(region->row);
    table_unlock();
    if (unmap)
        munmap((void *)region->address, (region->nbytes + PAGE - 1) / PAGE * PAGE + PAGE);
    size_t at = (size_t)(region - regions);
    memmove(region, region + 1, (--count - at) * sizeof *regions);
}

/* What goes with a context. Its streams may still be at work there. */
void release_regions(uint32_t device)
{
    for (size_t at = count; at > 0; at--)
        if (regions[at - 1].device == device)
            drop(&regions[at - 1], false);
}

/* Bytes of a device that somebody holds; what nobody does is given up. With the table's lock held. */
static uint64_t held(uint32_t device)
{
    uint64_t sum = 0;
    for (uint32_t row = 0; row < MEMORIES; row++) {
        const struct memory_row *memory = &process.table->memories[row];
        if (memory->state == UNUSED || memory->device != device)
            continue;
        if (!is_self(&memory->owner) || memory->state != LIVE)
            reclaim(row);
        if (memory->state != UNUSED)
            sum += memory->nbytes;
    }
    return sum;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS || nbytes == 0)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    struct table *table = process.table;
    uint32_t row = MEMORIES;
    pthread_mutex_lock(&process.lock);
    table_lock();
    if (nbytes <= table->devices[context->device].nbytes - held(context->device))
        for (row = 0; row < MEMORIES && table->memories[row].state != UNUSED;)
            row++;
    if (row < MEMORIES) {
        struct memory_row *memory = &table->memories[row];
        random_bytes(memory->token, sizeof memory->token);
        memory->owner = process.self;
        memory->nbytes = nbytes;
        memory->physical = table->physical;
        memory->device = context->device;
        memory->exportable = !table->virtual_memory;
        memory->state = LIVE;
        table->physical += nbytes + PAGE;
    }
    table_unlock();
    *address = row < MEMORIES ? add(row, 0, 0, O_CREAT | O_EXCL) : 0;
    pthread_mutex_unlock(&process.lock);
    if (*address == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset((void *)*address, GARBAGE, nbytes);
    return CUDA_SUCCESS;
}

/* Ends what `cuMemAlloc` or, if `opened`, `cuIpcOpenMemHandle` gave. Waits for the context's work first. */
static CUresult end(CUdeviceptr address, bool opened)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result == CUDA_SUCCESS)
        result = context_wait_idle(context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    struct region *region = region_of(address, 1);
    if (region == NULL || region->address != address || (region->opened > 0) != opened)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (region->opened > 1)
        region->opened--;
    else
        drop(region, true);
    pthread_mutex_unlock(&process.lock);
    return result;
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    return address == 0 ? CUDA_SUCCESS : end(address, false);
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    return end(address, true);
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    const struct region *region = region_of(address, 1);
    result = refused(region != NULL && region->opened > 0 ? "cuMemGetAddressRange, opened" : "cuMemGetAddressRange");
    if (result != CUDA_SUCCESS) {
        pthread_mutex_unlock(&process.lock);
        return result;
    }
    if (region != NULL && base != NULL)
        *base = region->address;
    if (region != NULL && nbytes != NULL)
        *nbytes = region->nbytes;
    pthread_mutex_unlock(&process.lock);
    return region != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    table_lock();
    *total = process.table->devices[context->device].nbytes;
    *free = *total - held(context->device);
    table_unlock();
    return CUDA_SUCCESS;
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct memory_handle found = {.kind = "simmem"};
    pthread_mutex_lock(&process.lock);
    const struct region *region = region_of(address, 1);
    const struct memory_row *memory = region != NULL ? &process.table->memories[region->row] : NULL;
    if (memory == NULL || region->address != address || region->opened > 0 || !memory->exportable) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else {
        found.row = region->row;
        memcpy(found.token, memory->token, sizeof found.token);
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &found, sizeof found);
    }
    pthread_mutex_unlock(&process.lock);
    return result;
}

/* With both locks held. */
static CUresult opened(CUdeviceptr *address, const struct memory_handle *handle, uint32_t device)
{
    struct memory_row *memory = &process.table->memories[handle->row % MEMORIES];
    if (strcmp(handle->kind, "simmem") != 0 || handle->row >= MEMORIES || memory->state == UNUSED ||
        memcmp(handle->token, memory->token, sizeof memory->token) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_self(&memory->owner))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (memory->device != device)
        return CUDA_ERROR_INVALID_DEVICE;
    for (size_t at = 0; at < count; at++)
        if (regions[at].row == handle->row && regions[at].opened > 0) {
            regions[at].opened++;
            *address = regions[at].address;
            return CUDA_SUCCESS;
        }
    if (memory->state != LIVE || !lives(&memory->owner))
        return CUDA_ERROR_INVALID_VALUE;
    int opening = new_opening(OPENED_MEMORY, handle->row);
    *address = opening >= 0 ? add(handle->row, (uint32_t)opening, 1, 0) : 0;
    if (opening >= 0 && *address == 0)
        process.table->openings[opening].state = UNUSED;
    return *address != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    struct context *context;
    struct memory_handle told;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS || flags != LAZY_ENABLE_PEER_ACCESS)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    result = refused("cuIpcOpenMemHandle");
    if (result != CUDA_SUCCESS)
        return result;
    memcpy(&told, &handle, sizeof told);
    told.kind[7] = '\0';
    pthread_mutex_lock(&process.lock);
    table_lock();
    result = opened(address, &told, context->device);
    table_unlock();
    pthread_mutex_unlock(&process.lock);
    return result;
}
