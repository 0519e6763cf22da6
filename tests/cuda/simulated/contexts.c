/* Owns devices as a process sees them, their primary contexts, and each thread's stack of those. */

#include <stdio.h>
#include <string.h>

#include "simulated.h"

enum { STACK = 16 };

static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;

/* What every call is refused with that touches a device. */
CUresult usable(uint32_t device)
{
    if (process.table == NULL || process.forked || process.count == 0)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (atomic_load(&process.lost))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    return process.table->devices[device].vanished ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

/* The thread's current context, if it can be used. */
CUresult entered(struct context **context)
{
    *context = depth > 0 ? stack[depth - 1] : NULL;
    CUresult result = usable(*context != NULL ? (*context)->device : 0);
    if (result == CUDA_ERROR_NOT_INITIALIZED || result == CUDA_ERROR_ILLEGAL_ADDRESS)
        return result;
    if (*context == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    return (*context)->retained == 0 ? CUDA_ERROR_CONTEXT_IS_DESTROYED : result;
}

static CUresult device_of(CUdevice ordinal, uint32_t *device)
{
    if (process.table == NULL || process.forked || process.count == 0)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= process.count)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = process.visible[ordinal];
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version)
{
    *version = driver_version();
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *count)
{
    if (process.table == NULL || process.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = process.count;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    uint32_t found;
    *device = ordinal;
    return device_of(ordinal, &found);
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice ordinal)
{
    uint32_t device;
    CUresult result = device_of(ordinal, &device);
    if (result == CUDA_SUCCESS)
        snprintf(name, (size_t)length, "Simulated GPU%s", process.table->devices[device].mig ? " MIG 1g.1gb" : "");
    return result;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice ordinal)
{
    uint32_t device;
    CUresult result = device_of(ordinal, &device);
    if (result == CUDA_SUCCESS)
        memcpy(uuid, process.table->devices[device].uuid, sizeof *uuid);
    return result;
}

/* Of an instance of a divided GPU, the old call tells the whole GPU's. */
API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice ordinal)
{
    uint32_t device;
    CUresult result = device_of(ordinal, &device);
    if (result == CUDA_SUCCESS) {
        memcpy(uuid, process.table->devices[device].uuid, sizeof *uuid);
        if (process.table->devices[device].mig)
            uuid->bytes[0] = (char)~uuid->bytes[0];
    }
    return result;
}

API CUresult cuDeviceTotalMem_v2(size_t *nbytes, CUdevice ordinal)
{
    uint32_t device;
    CUresult result = device_of(ordinal, &device);
    if (result == CUDA_SUCCESS)
        *nbytes = process.table->devices[device].nbytes;
    return result;
}

API CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice ordinal)
{
    uint32_t device;
    CUresult result = device_of(ordinal, &device);
    if (result == CUDA_SUCCESS)
        snprintf(id, (size_t)length, "0000:%02X:00.0", device + 0x41);
    return result;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice ordinal)
{
    static const int known[][2] = {
        {1, 1024}, /* threads of a block */
        {10, 32},  /* of a warp */
        {13, 1000000}, {16, 8}, {19, 1}, /* kHz, multiprocessors, host memory can be mapped */
        {34, 0}, {36, 1000000}, {37, 256}, {39, 2048}, {40, 2}, {41, 1}, /* PCI, memory, copy engines, one address space */
        {75, 9}, {76, 0}, {78, 1}, {81, 65536}, {82, 65536}, /* capability 9.0, priorities, */
        {91, 1}, {99, 1}, {122, 1}, {123, 1}, {125, 1}, /* registered host memory, waits for words, events of others */
        {134, 0}, /* the host's NUMA node */
    };
    uint32_t device;
    CUresult result = device_of(ordinal, &device);
    if (result == CUDA_SUCCESS)
        result = refused("cuDeviceGetAttribute %d", attribute);
    if (result != CUDA_SUCCESS)
        return result;
    *value = attribute == 33 ? (int)device + 0x41 : 0;
    for (size_t at = 0; at < sizeof known / sizeof *known; at++)
        if (known[at][0] == attribute)
            *value = known[at][1];
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal)
{
    uint32_t device;
    CUresult result = device_of(ordinal, &device);
    if (result == CUDA_SUCCESS)
        result = usable(device);
    if (result == CUDA_SUCCESS && process.contexts[device].retained == 0)
        result = refused("cuDevicePrimaryCtxRetain, new");
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    *context = &process.contexts[device];
    (*context)->retained++;
    pthread_mutex_unlock(&process.lock);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal)
{
    uint32_t device;
    CUresult result = device_of(ordinal, &device);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    struct context *context = &process.contexts[device];
    if (context->retained == 0) {
        result = CUDA_ERROR_INVALID_CONTEXT;
    } else if (--context->retained == 0) {
        release_regions(device);
        release_ranges(device);
    }
    pthread_mutex_unlock(&process.lock);
    return result;
}

API CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal)
{
    return cuDevicePrimaryCtxRelease_v2(ordinal);
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned int *flags, int *active)
{
    uint32_t device;
    CUresult result = device_of(ordinal, &device);
    if (result == CUDA_SUCCESS) {
        *flags = 0;
        *active = process.contexts[device].retained > 0;
    }
    return result;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    if (process.table == NULL || process.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (context == NULL || depth == STACK)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    if (process.table == NULL || process.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context != NULL)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
    if (process.table == NULL || process.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (depth > 0)
        depth--;
    return context == NULL ? CUDA_SUCCESS : cuCtxPushCurrent_v2(context);
}

API CUresult cuCtxGetCurrent(CUcontext *context)
{
    if (process.table == NULL || process.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = depth > 0 ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context)
{
    if (context == NULL && depth > 0)
        context = stack[depth - 1];
    if (process.table == NULL || process.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    for (int ordinal = 0; context != NULL && ordinal < process.count; ordinal++)
        if (process.visible[ordinal] == context->device) {
            *device = ordinal;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
    return cuCtxGetDevice_v2(device, NULL);
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result == CUDA_SUCCESS)
        result = refused("cuCtxGetStreamPriorityRange");
    if (result != CUDA_SUCCESS)
        return result;
    if (least != NULL)
        *least = 0;
    if (greatest != NULL)
        *greatest = -5;
    return result;
}

API CUresult cuCtxSynchronize_v2(CUcontext context)
{
    struct context *current;
    CUresult result = context != NULL ? usable(context->device) : entered(&current);
    return result != CUDA_SUCCESS ? result : context_wait_idle(context != NULL ? context : current);
}

API CUresult cuCtxSynchronize(void)
{
    return cuCtxSynchronize_v2(NULL);
}
