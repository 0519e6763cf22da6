/* Owns this process on its node: how it joins by cuInit, the table and its lock, which processes live, faults. */

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated.h"

struct process process = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_mutex_t table_mutex = PTHREAD_MUTEX_INITIALIZER;
static char directory[3072];
static int lock_fd = -1;

void table_lock(void)
{
    pthread_mutex_lock(&table_mutex);
    while (flock(lock_fd, LOCK_EX) != 0)
        ;
}

void table_unlock(void)
{
    flock(lock_fd, LOCK_UN);
    pthread_mutex_unlock(&table_mutex);
}

/* When a process began; 0 if it is gone or a zombie. */
static uint64_t started(int32_t pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return 0;
    text[length] = '\0';
    char state;
    unsigned long long at;
    const char *rest = strrchr(text, ')');
    const char *form = ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu";
    if (rest == NULL || sscanf(rest, form, &state, &at) != 2 || state == 'Z' || state == 'X')
        return 0;
    return at;
}

bool is_self(const struct owner *owner)
{
    return owner->pid == process.self.pid && owner->started == process.self.started;
}

bool lives(const struct owner *owner)
{
    return is_self(owner) || (owner->started != 0 && started(owner->pid) == owner->started);
}

bool take_fault(enum fault kind, uint32_t device)
{
    struct fault_row *row = &process.table->faults[kind][device];
    if (__atomic_load_n(&row->remaining, __ATOMIC_ACQUIRE) == 0)
        return false;
    table_lock();
    bool taken = row->remaining > 0;
    row->remaining -= taken;
    row->hits += taken;
    table_unlock();
    return taken;
}

/* The answer that a test wants to this, named as it names it; success where it wants none. */
CUresult refused(const char *format, ...)
{
    char what[56];
    va_list arguments;
    if (process.table == NULL)
        return CUDA_SUCCESS;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    for (int at = 0; at < REFUSALS; at++) {
        struct refusal_row *row = &process.table->refusals[at];
        if (row->result != 0 && strcmp(row->what, what) == 0) {
            __atomic_add_fetch(&row->given, 1, __ATOMIC_RELAXED);
            return (CUresult)row->result;
        }
    }
    return CUDA_SUCCESS;
}

void violated(const char *kind, const char *format, ...)
{
    char path[4096], line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = snprintf(line, sizeof line, "%s\t%d\t", kind, process.self.pid);
    length += vsnprintf(line + length, sizeof line - (size_t)length - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2)
        length = (int)sizeof line - 2;
    line[length++] = '\n';
    snprintf(path, sizeof path, "%s/violations", directory);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) {
        if (write(fd, line, (size_t)length) != length)
            abort();
        close(fd);
    }
}

void memory_path(char *path, size_t size, const struct memory_row *row)
{
    int length = snprintf(path, size, "%s/memory-", directory);
    for (int at = 0; at < 16; at++)
        length += snprintf(path + length, size - (size_t)length, "%02x", row->token[at]);
}

void random_bytes(void *bytes, size_t count)
{
    if (getrandom(bytes, count, 0) != (ssize_t)count)
        abort();
}

/* The number of a new row, or -1 if there is none left. With the table's lock held. */
int new_opening(enum opened of, uint32_t row)
{
    for (int pass = 0; pass < 2; pass++)
        for (int at = 0; at < OPENINGS; at++) {
            struct opening_row *opening = &process.table->openings[at];
            if (opening->state != UNUSED && (pass == 0 || lives(&opening->owner)))
                continue;
            opening->owner = process.self;
            opening->of = of;
            opening->row = row;
            opening->state = LIVE;
            return at;
        }
    return -1;
}

/* Whether a living process has it open. With the table's lock held. */
bool is_opened(enum opened of, uint32_t row)
{
    for (int at = 0; at < OPENINGS; at++) {
        const struct opening_row *opening = &process.table->openings[at];
        if (opening->state == LIVE && opening->of == (uint32_t)of && opening->row == row && lives(&opening->owner))
            return true;
    }
    return false;
}

/* Asked for before `cuInit`, too. */
int driver_version(void)
{
    uint32_t version = 13000;
    const char *node = getenv("KVF_SIMULATED_CUDA");
    if (process.table != NULL)
        return (int)process.table->driver_version;
    if (node == NULL)
        return (int)version;
    char path[4096];
    snprintf(path, sizeof path, "%s/table", node);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (pread(fd, &version, sizeof version, offsetof(struct table, driver_version)) != sizeof version)
            version = 0;
        close(fd);
    }
    return (int)version;
}

static void in_forked_child(void)
{
    process.forked = true;
}

/* Which device a word of CUDA_VISIBLE_DEVICES means; -1 for none. */
static int device_named(const char *word)
{
    const struct table *table = process.table;
    if (word[0] >= '0' && word[0] <= '9') {
        long ordinal = strtol(word, NULL, 10);
        return ordinal < (long)table->device_count ? (int)ordinal : -1;
    }
    int found = -1;
    for (uint32_t at = 0; at < table->device_count; at++) {
        const uint8_t *uuid = table->devices[at].uuid;
        char name[48];
        int length = snprintf(name, sizeof name, table->devices[at].mig ? "MIG-" : "GPU-");
        for (int byte = 0; byte < 16; byte++) {
            const char *dash = byte == 4 || byte == 6 || byte == 8 || byte == 10 ? "-" : "";
            length += snprintf(name + length, sizeof name - (size_t)length, "%s%02x", dash, uuid[byte]);
        }
        if (strlen(word) > 4 && strncmp(name, word, strlen(word)) == 0) {
            if (found >= 0)
                return -1; /* it could mean either */
            found = (int)at;
        }
    }
    return found;
}

static void find_visible(void)
{
    const char *told = getenv("CUDA_VISIBLE_DEVICES");
    char words[1024];
    snprintf(words, sizeof words, "%s", told != NULL ? told : "0,1,2,3,4,5,6,7");
    char *rest = words;
    for (char *word; process.count < DEVICES && (word = strsep(&rest, ",")) != NULL;) {
        int device = device_named(word);
        if (device < 0)
            return; /* as the driver does: what comes behind is not seen */
        if (!process.table->devices[device].vanished)
            process.visible[process.count++] = (uint32_t)device;
        if (process.table->devices[device].mig)
            return; /* of such instances a process has one */
    }
}

static CUresult join(const char *node)
{
    char path[4096];
    snprintf(directory, sizeof directory, "%s", node);
    snprintf(path, sizeof path, "%s/table", directory);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0)
        return CUDA_ERROR_NO_DEVICE;
    struct table *table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (table == MAP_FAILED || status.st_size != sizeof *table || table->size != sizeof *table)
        return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    lock_fd = fd;
    process.self.pid = getpid();
    process.self.started = started(process.self.pid);
    process.table = table;
    table_lock();
    process.number = ++table->processes;
    table_unlock();
    for (uint32_t at = 0; at < DEVICES; at++)
        process.contexts[at].device = at;
    find_visible();
    pthread_atfork(NULL, NULL, in_forked_child);
    return process.count > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

API CUresult cuInit(unsigned int flags)
{
    static CUresult joined;
    const char *node = getenv("KVF_SIMULATED_CUDA");
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (process.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (node == NULL)
        return CUDA_ERROR_NO_DEVICE;
    pthread_mutex_lock(&process.lock);
    CUresult result;
    if (process.table == NULL)
        joined = result = join(node);
    else
        result = strcmp(node, directory) == 0 ? joined : CUDA_ERROR_NO_DEVICE; /* a process has one node */
    pthread_mutex_unlock(&process.lock);
    return result;
}
