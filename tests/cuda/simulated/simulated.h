/* Owns what the files of the simulated CUDA driver know of each other, and the few names of the driver API they need.

   Everything runs in the process that calls, and in one thread a stream. `process.lock` guards the lists of a process;
   the node's table has its own lock, taken inside. No call holds either while it waits. */

#ifndef KVF_SIMULATED_H
#define KVF_SIMULATED_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "table.h"

typedef uint64_t CUdeviceptr;
typedef int CUdevice;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct module *CUmodule;
typedef struct function *CUfunction;

typedef enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_UNKNOWN = 999,
} CUresult;

typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { char reserved[64]; } CUipcEventHandle;
typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;

#define API __attribute__((visibility("default")))

/* The primary context of a device of the table, the only kind there is. */
struct context {
    uint32_t device;
    int retained;
    struct stream *null_stream;
};

/* Device memory as this process sees it: its own, or opened `opened` times. */
struct region {
    CUdeviceptr address;
    size_t nbytes;
    uint64_t physical;
    uint32_t row;
    uint32_t opening;
    uint32_t device;
    int opened;
};

/* Work of a stream, allocated with what it needs behind it. `run` is left out once the context is lost. */
struct work {
    struct work *next;
    void (*run)(struct stream *stream, struct work *work);
    void (*discard)(struct work *work);
};

/* This process on its node. */
extern struct process {
    pthread_mutex_t lock;
    struct table *table;
    struct owner self;
    uint32_t number;
    int count; /* of visible devices, whose numbers in the table follow */
    uint32_t visible[DEVICES];
    struct context contexts[DEVICES];
    atomic_bool lost;
    bool forked;
} process;

/* node.c */
int driver_version(void);
void table_lock(void);
void table_unlock(void);
bool lives(const struct owner *owner);
bool is_self(const struct owner *owner);
bool take_fault(enum fault kind, uint32_t device);
CUresult refused(const char *format, ...) __attribute__((format(printf, 1, 2)));
void violated(const char *kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
void memory_path(char *path, size_t size, const struct memory_row *row);
void random_bytes(void *bytes, size_t count);
int new_opening(enum opened of, uint32_t row);
bool is_opened(enum opened of, uint32_t row);

/* contexts.c */
CUresult entered(struct context **context);
CUresult usable(uint32_t device);

/* memory.c and host.c: with process.lock held */
struct region *region_of(CUdeviceptr address, size_t nbytes);
bool is_pinned(uint64_t address, size_t nbytes);
void release_regions(uint32_t device);
void release_ranges(uint32_t device);

/* streams.c */
CUresult stream_of(CUstream handle, struct context *current, struct stream **stream);
void stream_add(struct stream *stream, struct work *work);
struct context *stream_context(const struct stream *stream);
uint64_t stream_number(const struct stream *stream);
bool stream_waits_for_host(struct stream *stream);
CUresult stream_wait_idle(struct stream *stream);
CUresult context_wait_idle(struct context *context);
void *new_work(size_t size, void (*run)(struct stream *, struct work *));
void pause_s(double seconds);

/* order.c */
int order_queued(uint64_t stream, bool writes, struct span *spans, size_t count);
void order_begins(int row);
void order_done(int row);
bool spans_merge(struct span *spans, size_t *count);

/* copies.c */
bool faults_in_the_middle(uint32_t device);

#endif
