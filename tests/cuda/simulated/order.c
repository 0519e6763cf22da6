/* Owns what is queued on a node's devices, and the look for work that runs before what it should have waited for.

   A device would let it pass. Here each copy tells which bytes it touches; when it begins while something that was
   queued earlier, elsewhere, on the same bytes is not done, and one of the two writes, an event was forgotten. */

#include <stdlib.h>

#include "simulated.h"

static int by_low(const void *one, const void *other)
{
    uint64_t a = ((const struct span *)one)->low, b = ((const struct span *)other)->low;
    return (a > b) - (a < b);
}

/* Sorts them and joins neighbours; whether some overlapped. */
bool spans_merge(struct span *spans, size_t *count)
{
    bool overlap = false;
    size_t kept = 0;
    qsort(spans, *count, sizeof *spans, by_low);
    for (size_t at = 0; at < *count; at++) {
        if (kept > 0 && spans[at].low <= spans[kept - 1].high) {
            overlap |= spans[at].low < spans[kept - 1].high;
            if (spans[at].high > spans[kept - 1].high)
                spans[kept - 1].high = spans[at].high;
        } else {
            spans[kept++] = spans[at];
        }
    }
    *count = kept;
    return overlap;
}

/* The row of the work, to be given to the other calls; -1 if it cannot be watched. Takes sorted spans. */
int order_queued(uint64_t stream, bool writes, struct span *spans, size_t count)
{
    struct table *table = process.table;
    if (count == 0 || count > SPANS)
        return -1;
    table_lock();
    int row = -1;
    for (int pass = 0; pass < 2 && row < 0; pass++)
        for (int at = 0; at < WORKS && row < 0; at++)
            if (table->works[at].state == UNUSED || (pass == 1 && !lives(&table->works[at].owner)))
                row = at;
    if (row >= 0) {
        struct work_row *work = &table->works[row];
        work->owner = process.self;
        work->serial = ++table->serial;
        work->stream = stream;
        work->writes = writes;
        work->spans = (uint32_t)count;
        for (size_t at = 0; at < count; at++)
            table->spans[row][at] = spans[at];
        work->state = LIVE;
    }
    table_unlock();
    return row;
}

static bool touch(const struct span *one, size_t ones, const struct span *other, size_t others)
{
    size_t a = 0, b = 0;
    while (a < ones && b < others) {
        if (one[a].high <= other[b].low)
            a++;
        else if (other[b].high <= one[a].low)
            b++;
        else
            return true;
    }
    return false;
}

void order_begins(int row)
{
    struct table *table = process.table;
    if (row < 0)
        return;
    table_lock();
    const struct work_row *mine = &table->works[row];
    for (int at = 0; at < WORKS; at++) {
        const struct work_row *other = &table->works[at];
        bool elsewhere = other->stream != mine->stream || !is_self(&other->owner);
        if (other->state != LIVE || other->serial >= mine->serial || !elsewhere || !(mine->writes || other->writes))
            continue;
        if (touch(table->spans[row], mine->spans, table->spans[at], other->spans) && lives(&other->owner))
            violated("unordered", "a copy %s the device runs before a copy %s it is done that process %d queued earlier",
                     mine->writes ? "to" : "from", other->writes ? "to" : "from", other->owner.pid);
    }
    table_unlock();
}

void order_done(int row)
{
    if (row < 0)
        return;
    table_lock();
    process.table->works[row].state = UNUSED;
    table_unlock();
}
