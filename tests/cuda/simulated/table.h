/* Owns the shape of the node's table: what all processes on a simulated node know of each other.

   One file, `table`, mapped shared by every process and by `tests/cuda/node.py`, which has the same structures. Rows
   are changed under flock; a row's `state` is written last, so that a process killed at any moment leaves no half of
   one. Events' records are changed without the lock. */

#ifndef KVF_SIMULATED_TABLE_H
#define KVF_SIMULATED_TABLE_H

#include <stdint.h>

enum {
    DEVICES = 8,
    FAULTS = 4,
    REFUSALS = 16,
    MEMORIES = 8192,
    OPENINGS = 8192,
    EVENTS = 1024,
    RECORDS = 32, /* of one event that may be under way at once */
    WORKS = 512,
    SPANS = 128, /* of one piece of work; one with more is not checked */
};

enum state { UNUSED, LIVE, FREED };
enum fault { COPY_FAILS = 1, POISON, HOLD };
enum opened { OPENED_MEMORY, OPENED_EVENT };

/* A process. Its number alone may come again. */
struct owner {
    uint64_t started;
    int32_t pid;
    uint32_t spare;
};

struct device_row {
    uint8_t uuid[16];
    uint64_t nbytes;
    uint32_t mig;
    uint32_t vanished;
};

struct fault_row {
    uint32_t remaining;
    uint32_t hits;
};

/* `physical` is where it lies in an address space of the whole node that nothing uses twice. */
/* What a test has the driver answer: to a call, or to a call with something in it; see `refused`. */
struct refusal_row {
    char what[56];
    uint32_t result; /* 0: the row is unused */
    uint32_t given;
};

struct memory_row {
    uint8_t token[16];
    struct owner owner;
    uint64_t nbytes;
    uint64_t physical;
    uint32_t device;
    uint32_t exportable;
    uint32_t state;
    uint32_t spare;
};

/* Of another process's memory or event. */
struct opening_row {
    struct owner owner;
    uint32_t of;
    uint32_t row;
    uint32_t state;
    uint32_t spare;
};

/* An interprocess event. Record `n`, from 1, is reached once `reached[n % RECORDS] >= n`. */
struct event_row {
    uint8_t token[16];
    struct owner owner;
    uint32_t device;
    uint32_t state;
    uint64_t recorded;
    uint64_t reached[RECORDS];
};

/* A copy that is queued and not done. */
struct work_row {
    struct owner owner;
    uint64_t serial;
    uint64_t stream;
    uint32_t writes;
    uint32_t spans;
    uint32_t state;
    uint32_t spare;
};

/* From the first physical byte to the one after the last. */
struct span {
    uint64_t low;
    uint64_t high;
};

struct table {
    uint64_t size;
    uint64_t seed;
    double max_delay_s;
    uint64_t serial;
    uint64_t physical;
    uint64_t released;
    uint64_t batches; /* that were copied, and kernels that were launched, by whomever */
    uint64_t kernels;
    uint32_t driver_version;
    uint32_t device_count;
    uint32_t processes;
    uint32_t virtual_memory; /* what is allocated from now on cannot be exported */
    struct device_row devices[DEVICES];
    struct fault_row faults[FAULTS][DEVICES];
    struct refusal_row refusals[REFUSALS];
    struct memory_row memories[MEMORIES];
    struct opening_row openings[OPENINGS];
    struct event_row events[EVENTS];
    struct work_row works[WORKS];
    struct span spans[WORKS][SPANS];
};

#endif
