/* Owns how callers find the driver's functions: by name, and by the version for whose form of it they were built. */

#include <string.h>

#include "simulated.h"

enum { FOUND, SYMBOL_NOT_FOUND, VERSION_NOT_SUFFICIENT };

/* Name, first version that has this form, the form's symbol. */
#define FUNCTIONS(EACH)                                                \
    EACH("cuInit", 2000, cuInit)                                       \
    EACH("cuDriverGetVersion", 2020, cuDriverGetVersion)               \
    EACH("cuGetErrorName", 6000, cuGetErrorName)                       \
    EACH("cuGetErrorString", 6000, cuGetErrorString)                   \
    EACH("cuDeviceGet", 2000, cuDeviceGet)                             \
    EACH("cuDeviceGetCount", 2000, cuDeviceGetCount)                   \
    EACH("cuDeviceGetName", 2000, cuDeviceGetName)                     \
    EACH("cuDeviceGetUuid", 9020, cuDeviceGetUuid)                     \
    EACH("cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2)                 \
    EACH("cuDeviceGetAttribute", 2000, cuDeviceGetAttribute)           \
    EACH("cuDeviceGetPCIBusId", 4010, cuDeviceGetPCIBusId)             \
    EACH("cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2)                \
    EACH("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain)   \
    EACH("cuDevicePrimaryCtxRelease", 7000, cuDevicePrimaryCtxRelease) \
    EACH("cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2) \
    EACH("cuDevicePrimaryCtxGetState", 7000, cuDevicePrimaryCtxGetState) \
    EACH("cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2)                \
    EACH("cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2)                  \
    EACH("cuCtxSetCurrent", 4000, cuCtxSetCurrent)                     \
    EACH("cuCtxGetCurrent", 4000, cuCtxGetCurrent)                     \
    EACH("cuCtxGetDevice", 2000, cuCtxGetDevice)                       \
    EACH("cuCtxGetDevice", 13000, cuCtxGetDevice_v2)                   \
    EACH("cuCtxGetStreamPriorityRange", 5050, cuCtxGetStreamPriorityRange) \
    EACH("cuCtxSynchronize", 2000, cuCtxSynchronize)                   \
    EACH("cuCtxSynchronize", 13000, cuCtxSynchronize_v2)               \
    EACH("cuMemAlloc", 3020, cuMemAlloc_v2)                            \
    EACH("cuMemFree", 3020, cuMemFree_v2)                              \
    EACH("cuMemGetAddressRange", 3020, cuMemGetAddressRange_v2)        \
    EACH("cuMemGetInfo", 3020, cuMemGetInfo_v2)                        \
    EACH("cuPointerGetAttribute", 4000, cuPointerGetAttribute)         \
    EACH("cuMemHostRegister", 6050, cuMemHostRegister_v2)              \
    EACH("cuMemHostUnregister", 4000, cuMemHostUnregister)             \
    EACH("cuMemHostGetDevicePointer", 3020, cuMemHostGetDevicePointer_v2) \
    EACH("cuMemHostAlloc", 2020, cuMemHostAlloc)                       \
    EACH("cuMemFreeHost", 2000, cuMemFreeHost)                         \
    EACH("cuIpcGetMemHandle", 4010, cuIpcGetMemHandle)                 \
    EACH("cuIpcOpenMemHandle", 11000, cuIpcOpenMemHandle_v2)           \
    EACH("cuIpcCloseMemHandle", 4010, cuIpcCloseMemHandle)             \
    EACH("cuIpcGetEventHandle", 4010, cuIpcGetEventHandle)             \
    EACH("cuIpcOpenEventHandle", 4010, cuIpcOpenEventHandle)           \
    EACH("cuMemcpyHtoD", 3020, cuMemcpyHtoD_v2)                        \
    EACH("cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2)                        \
    EACH("cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2)              \
    EACH("cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2)              \
    EACH("cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync_v2)              \
    EACH("cuMemcpyBatchAsync", 12080, cuMemcpyBatchAsync)              \
    EACH("cuMemcpyBatchAsync", 13000, cuMemcpyBatchAsync_v2)           \
    EACH("cuMemsetD8", 3020, cuMemsetD8_v2)                            \
    EACH("cuMemsetD8Async", 3020, cuMemsetD8Async)                     \
    EACH("cuEventCreate", 2000, cuEventCreate)                         \
    EACH("cuEventDestroy", 4000, cuEventDestroy_v2)                    \
    EACH("cuEventRecord", 2000, cuEventRecord)                         \
    EACH("cuEventQuery", 2000, cuEventQuery)                           \
    EACH("cuEventSynchronize", 2000, cuEventSynchronize)               \
    EACH("cuEventElapsedTime", 2000, cuEventElapsedTime)               \
    EACH("cuStreamCreate", 2000, cuStreamCreate)                       \
    EACH("cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority) \
    EACH("cuStreamDestroy", 4000, cuStreamDestroy_v2)                  \
    EACH("cuStreamGetCtx", 9020, cuStreamGetCtx)                       \
    EACH("cuStreamQuery", 2000, cuStreamQuery)                         \
    EACH("cuStreamSynchronize", 2000, cuStreamSynchronize)             \
    EACH("cuStreamWaitEvent", 3020, cuStreamWaitEvent)                 \
    EACH("cuStreamWaitValue32", 8000, cuStreamWaitValue32_v2)          \
    EACH("cuStreamWriteValue32", 8000, cuStreamWriteValue32_v2)        \
    EACH("cuModuleLoadData", 2000, cuModuleLoadData)                   \
    EACH("cuModuleGetFunction", 2000, cuModuleGetFunction)             \
    EACH("cuModuleUnload", 2000, cuModuleUnload)                       \
    EACH("cuLaunchKernel", 4000, cuLaunchKernel)                       \
    EACH("cuGetProcAddress", 11030, cuGetProcAddress)                  \
    EACH("cuGetProcAddress", 12000, cuGetProcAddress_v2)

/* Their addresses are all that is needed of them here. */
#define DECLARED(name, version, symbol) extern void symbol(void);
FUNCTIONS(DECLARED)

#define ENTRY(name, version, symbol) {name, version, symbol},
static const struct {
    const char *name;
    int version;
    void (*symbol)(void);
} entries[] = {FUNCTIONS(ENTRY)};

/* Succeeds with NULL for what is not there, as the driver does. */
static CUresult find(const char *name, void **found, int version, int *why)
{
    int newest = driver_version(), best = 0;
    *found = NULL;
    *why = SYMBOL_NOT_FOUND;
    for (size_t at = 0; at < sizeof entries / sizeof *entries; at++) {
        if (strcmp(entries[at].name, name) != 0 || entries[at].version > newest)
            continue;
        if (entries[at].version > version && *found == NULL) {
            *why = VERSION_NOT_SUFFICIENT;
        } else if (entries[at].version <= version && entries[at].version >= best) {
            memcpy(found, &entries[at].symbol, sizeof *found);
            best = entries[at].version;
            *why = FOUND;
        }
    }
    return CUDA_SUCCESS;
}

/* The two forms are called by the same name, so what their callers see is declared apart from the table above. */
API CUresult proc_address(const char *name, void **found, int version, uint64_t flags) __asm__("cuGetProcAddress");
API CUresult proc_address_v2(const char *name, void **found, int version, uint64_t flags, int *why)
    __asm__("cuGetProcAddress_v2");

CUresult proc_address(const char *name, void **found, int version, uint64_t flags)
{
    int why;
    (void)flags;
    return find(name, found, version, &why);
}

CUresult proc_address_v2(const char *name, void **found, int version, uint64_t flags, int *why)
{
    int ignored;
    (void)flags;
    return find(name, found, version, why != NULL ? why : &ignored);
}

/* Of private tables, which NVRTC looks for; there is none. */
API CUresult no_table(const void **table, const CUuuid *id) __asm__("cuGetExportTable");

CUresult no_table(const void **table, const CUuuid *id)
{
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
