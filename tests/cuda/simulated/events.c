/* Owns events. A wait is bound to the record that was made last before it; recording again does not move it. An event
   that was never recorded is complete. Interprocess events have their records in the node's table. */

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "simulated.h"

enum { DISABLE_TIMING = 2, INTERPROCESS = 4 };
#define POLL_S 1e-4

/* One record of an event of this process, held by the event and by whatever waits for it. */
struct record {
    atomic_int holders;
    _Atomic uint64_t at_ns; /* when it was reached; 0 before */
};

struct event {
    struct event *next;
    struct context *context;
    unsigned int flags;
    int row; /* -1 for one of this process alone */
    int opening; /* -1 if it is this process's own */
    struct record *record;
    bool destroyed;
};

/* Where a stream has to come to, or was told to come to: `record`, or record `number` of `row`. */
struct point {
    struct record *record;
    int row;
    uint64_t number;
};

struct event_handle {
    char kind[8];
    uint32_t row;
    uint32_t spare;
    uint8_t token[16];
};

static struct event *events; /* under process.lock; never freed, so that a handle of the past is known as one */

static uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void release(struct record *record)
{
    if (record != NULL && atomic_fetch_sub(&record->holders, 1) == 1)
        free(record);
}

static bool is_reached(const struct point *point)
{
    if (point->row < 0)
        return point->record == NULL || atomic_load(&point->record->at_ns) != 0;
    const uint64_t *reached = process.table->events[point->row].reached;
    return __atomic_load_n(&reached[point->number % RECORDS], __ATOMIC_ACQUIRE) >= point->number;
}

/* The last record made; the caller releases it. With process.lock held. */
static struct point last_point(struct event *event)
{
    struct point point = {event->record, event->row, 0};
    if (event->row >= 0)
        point.number = __atomic_load_n(&process.table->events[event->row].recorded, __ATOMIC_ACQUIRE);
    else if (event->record != NULL)
        atomic_fetch_add(&event->record->holders, 1);
    return point;
}

/* Whether the handle is that of an event that can be used. With process.lock held. */
static CUresult known(CUevent handle)
{
    struct event *event = events;
    while (event != NULL && event != handle)
        event = event->next;
    if (event != NULL && !event->destroyed) {
        if (event->row < 0 || process.table->events[event->row].state == LIVE)
            return CUDA_SUCCESS;
        violated("use_after_free", "an event is used that its process has destroyed");
    } else {
        violated("use_after_free", "an event is used that %s", event == NULL ? "is none" : "was destroyed here");
    }
    return CUDA_ERROR_INVALID_HANDLE;
}

static CUresult added(struct context *context, unsigned int flags, int row, int opening, CUevent *handle)
{
    struct event *event = calloc(1, sizeof *event);
    if (event == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *event = (struct event){events, context, flags, row, opening, NULL, false};
    events = *handle = event;
    return CUDA_SUCCESS;
}

/* A row for a new interprocess event; -1 if there is none left. With the table's lock held. */
static int new_row(uint32_t device)
{
    for (int pass = 0; pass < 2; pass++)
        for (int at = 0; at < EVENTS; at++) {
            struct event_row *row = &process.table->events[at];
            bool gone = row->state == FREED || (pass == 1 && row->state == LIVE && !lives(&row->owner));
            if (row->state != UNUSED && (pass == 0 || !gone || is_opened(OPENED_EVENT, (uint32_t)at)))
                continue;
            random_bytes(row->token, sizeof row->token);
            row->owner = process.self;
            row->device = device;
            /* Numbers go on, so that what is still queued of the row's former event reaches nothing of this one. */
            row->recorded += RECORDS;
            for (int record = 0; record < RECORDS; record++)
                row->reached[record] = row->recorded;
            row->state = LIVE;
            return at;
        }
    return -1;
}

API CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (flags > 7 || ((flags & INTERPROCESS) != 0 && (flags & DISABLE_TIMING) == 0))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&process.lock);
    int row = -1;
    if ((flags & INTERPROCESS) != 0) {
        table_lock();
        row = new_row(context->device);
        table_unlock();
    }
    result = (flags & INTERPROCESS) != 0 && row < 0 ? CUDA_ERROR_OUT_OF_MEMORY : added(context, flags, row, -1, event);
    pthread_mutex_unlock(&process.lock);
    return result;
}

API CUresult cuEventDestroy_v2(CUevent event)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    if (event == NULL || event->opening < 0)
        result = known(event);
    if (result == CUDA_SUCCESS) {
        event->destroyed = true;
        release(event->record);
        event->record = NULL;
        table_lock();
        if (event->opening >= 0)
            process.table->openings[event->opening].state = UNUSED;
        else if (event->row >= 0)
            process.table->events[event->row].state = FREED;
        table_unlock();
    }
    pthread_mutex_unlock(&process.lock);
    return result;
}

struct marker {
    struct work work;
    struct point point;
};

static void discard_marker(struct work *work)
{
    release(((struct marker *)work)->point.record);
}

static void reach(struct stream *stream, struct work *work)
{
    const struct point *point = &((struct marker *)work)->point;
    (void)stream;
    if (point->row < 0) {
        atomic_store(&point->record->at_ns, now_ns());
        return;
    }
    uint64_t *reached = &process.table->events[point->row].reached[point->number % RECORDS];
    uint64_t former = __atomic_load_n(reached, __ATOMIC_ACQUIRE);
    while (former < point->number &&
           !__atomic_compare_exchange_n(reached, &former, point->number, false, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE))
        ;
}

static void wait_for_point(struct stream *stream, struct work *work)
{
    (void)stream;
    while (!is_reached(&((struct marker *)work)->point) && !atomic_load(&process.lost))
        pause_s(POLL_S);
}

static void add_marker(struct stream *stream, struct point point, void (*run)(struct stream *, struct work *))
{
    struct marker *marker = new_work(sizeof *marker, run);
    marker->point = point;
    marker->work.discard = discard_marker;
    stream_add(stream, &marker->work);
}

API CUresult cuEventRecord(CUevent event, CUstream handle)
{
    struct context *context;
    struct stream *stream;
    struct point point = {NULL, -1, 0};
    CUresult result = entered(&context);
    if (result == CUDA_SUCCESS)
        result = stream_of(handle, context, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    result = known(event);
    if (result == CUDA_SUCCESS && event->context != stream_context(stream))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS && event->row >= 0) {
        point.row = event->row;
        point.number = __atomic_add_fetch(&process.table->events[event->row].recorded, 1, __ATOMIC_ACQ_REL);
    } else if (result == CUDA_SUCCESS) {
        release(event->record);
        point.record = event->record = calloc(1, sizeof *event->record);
        if (point.record == NULL)
            abort();
        atomic_store(&point.record->holders, 2);
    }
    pthread_mutex_unlock(&process.lock);
    if (result == CUDA_SUCCESS)
        add_marker(stream, point, reach);
    return result;
}

API CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags)
{
    struct context *context;
    struct stream *stream;
    CUresult result = entered(&context);
    if (result == CUDA_SUCCESS)
        result = flags > 1 ? CUDA_ERROR_INVALID_VALUE : stream_of(handle, context, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    result = known(event);
    struct point point = result == CUDA_SUCCESS ? last_point(event) : (struct point){NULL, -1, 0};
    pthread_mutex_unlock(&process.lock);
    if (result == CUDA_SUCCESS)
        add_marker(stream, point, wait_for_point);
    return result;
}

static CUresult query(CUevent event, bool wait)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    result = known(event);
    struct point point = result == CUDA_SUCCESS ? last_point(event) : (struct point){NULL, -1, 0};
    pthread_mutex_unlock(&process.lock);
    if (result != CUDA_SUCCESS)
        return result;
    bool reached = is_reached(&point);
    while (!reached && wait && usable(context->device) == CUDA_SUCCESS) {
        pause_s(POLL_S);
        reached = is_reached(&point);
    }
    release(point.record);
    result = usable(context->device);
    return result != CUDA_SUCCESS || reached ? result : CUDA_ERROR_NOT_READY;
}

API CUresult cuEventQuery(CUevent event)
{
    return query(event, false);
}

API CUresult cuEventSynchronize(CUevent event)
{
    return query(event, true);
}

API CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    CUresult result = cuEventQuery(start);
    if (result == CUDA_SUCCESS)
        result = cuEventQuery(end);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    if (((start->flags | end->flags) & DISABLE_TIMING) != 0 || start->record == NULL || end->record == NULL)
        result = CUDA_ERROR_INVALID_HANDLE;
    else
        *milliseconds = (float)((double)(int64_t)(end->record->at_ns - start->record->at_ns) / 1e6);
    pthread_mutex_unlock(&process.lock);
    return result;
}

API CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event)
{
    struct context *context;
    CUresult result = entered(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct event_handle found = {.kind = "simevt"};
    result = refused("cuIpcGetEventHandle");
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&process.lock);
    result = known(event);
    if (result == CUDA_SUCCESS && (event->row < 0 || event->opening >= 0))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS) {
        found.row = (uint32_t)event->row;
        memcpy(found.token, process.table->events[event->row].token, sizeof found.token);
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &found, sizeof found);
    }
    pthread_mutex_unlock(&process.lock);
    return result;
}

API CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle)
{
    struct context *context;
    struct event_handle told;
    CUresult result = entered(&context);
    if (result == CUDA_SUCCESS)
        result = refused("cuIpcOpenEventHandle");
    if (result != CUDA_SUCCESS)
        return result;
    memcpy(&told, &handle, sizeof told);
    told.kind[7] = '\0';
    int opening = -1;
    pthread_mutex_lock(&process.lock);
    table_lock();
    const struct event_row *row = &process.table->events[told.row % EVENTS];
    if (strcmp(told.kind, "simevt") != 0 || told.row >= EVENTS || row->state != LIVE ||
        memcmp(told.token, row->token, sizeof row->token) != 0 || !lives(&row->owner))
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (is_self(&row->owner))
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (row->device != context->device)
        result = CUDA_ERROR_INVALID_DEVICE;
    else if ((opening = new_opening(OPENED_EVENT, told.row)) < 0)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    table_unlock();
    if (result == CUDA_SUCCESS)
        result = added(context, DISABLE_TIMING | INTERPROCESS, (int)told.row, opening, event);
    pthread_mutex_unlock(&process.lock);
    return result;
}
