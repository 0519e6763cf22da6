/* Owns the names of errors. */

#include "simulated.h"

#define NAMED(name, text) {name, #name, text}
static const struct {
    int error;
    const char *name;
    const char *text;
} names[] = {
    NAMED(CUDA_SUCCESS, "no error"),
    NAMED(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    NAMED(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    NAMED(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    NAMED(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    NAMED(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    NAMED(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    NAMED(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    NAMED(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    NAMED(CUDA_ERROR_NOT_READY, "device not ready"),
    NAMED(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    NAMED(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    NAMED(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
    NAMED(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
    NAMED(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    NAMED(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    NAMED(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "system has unsupported display driver / cuda driver combination"),
    NAMED(CUDA_ERROR_UNKNOWN, "unknown error"),
};

static int index_of(int error)
{
    for (int at = 0; at < (int)(sizeof names / sizeof *names); at++)
        if (names[at].error == error)
            return at;
    return -1;
}

API CUresult cuGetErrorName(int error, const char **name)
{
    int at = index_of(error);
    *name = at >= 0 ? names[at].name : NULL;
    return at >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(int error, const char **text)
{
    int at = index_of(error);
    *text = at >= 0 ? names[at].text : NULL;
    return at >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
