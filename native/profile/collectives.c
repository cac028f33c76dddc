/* SPDX-License-Identifier: Apache-2.0 */
#include "collectives.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "nccl_abi.h"

enum { CALLS = 4096, COMMUNICATORS = 256 };

struct call {
    enum { FREE, BEGUN, ENDED } state;
    struct sluice_profile_record record;
    const char *function; /* the library's own, never freed */
};

static struct {
    pthread_mutex_t lock;
    atomic_bool on;
    int *mask;      /* NCCL's: of what it tells */
    unsigned users; /* communicators that have it */
    uint64_t communicators[COMMUNICATORS];
    struct call calls[CALLS];
    unsigned next;
    uint64_t lost;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* NCCL reads it at each call, without our lock. */
static void set_mask(void)
{
    if (all.mask != NULL) {
        __atomic_store_n(all.mask, all.on ? NCCL_COLLECTIVE | NCCL_POINT_TO_POINT : 0, __ATOMIC_RELAXED);
    }
}

void collectives_collect(bool on)
{
    pthread_mutex_lock(&all.lock);
    all.on = on;
    set_mask();
    pthread_mutex_unlock(&all.lock);
}

void collectives_abandon(void)
{
    all.on = false; /* a thread that is none here may have the lock */
}

static uint64_t bytes_of(size_t count, const char *datatype)
{
    static const struct {
        const char *part;
        unsigned bytes;
    } sizes[] = {{"16", 2}, {"Half", 2}, {"64", 8}, {"Double", 8}, {"8", 1}, {"Char", 1}};
    for (size_t i = 0; datatype != NULL && i < sizeof sizes / sizeof *sizes; i++) {
        if (strstr(datatype, sizes[i].part) != NULL) {
            return count * sizes[i].bytes;
        }
    }
    return count * 4;
}

/* ---- a call, of any thread ---- */

static struct call *free_call(void)
{
    for (unsigned i = 0; i < CALLS; i++) {
        struct call *call = &all.calls[all.next++ % CALLS];
        if (call->state == FREE) {
            return call;
        }
    }
    return NULL;
}

static struct call *begin(const char *function, uint64_t bytes, uint64_t communicator)
{
    if (!atomic_load_explicit(&all.on, memory_order_relaxed)) {
        return NULL;
    }
    pthread_mutex_lock(&all.lock);
    struct call *call = all.on ? free_call() : NULL;
    if (call != NULL) {
        call->state = BEGUN;
        call->function = function;
        call->record = (struct sluice_profile_record){
            .kind = SLUICE_PROFILE_COLLECTIVE,
            .device = UINT32_MAX,
            .start = clock_now(CLOCK_MONOTONIC),
            .call = {.thread = (uint32_t)gettid(), .bytes = bytes, .communicator = communicator}};
    } else {
        all.lost += all.on;
    }
    pthread_mutex_unlock(&all.lock);
    return call;
}

static void end(struct call *call)
{
    if (call != NULL) {
        pthread_mutex_lock(&all.lock);
        call->record.end = clock_now(CLOCK_MONOTONIC);
        call->state = ENDED;
        pthread_mutex_unlock(&all.lock);
    }
}

/* Around calls of a library that has no interface for profilers (preload_oneccl.c). `function` is never freed. */
void *sluice_profile_collective_begin(const char *function, uint64_t bytes, uint64_t communicator)
{
    return begin(function, bytes, communicator);
}

void sluice_profile_collective_end(void *call)
{
    end(call);
}

/* ---- NCCL's side: each of these may be called by several threads ---- */

static int init(void **context, int *mask, const char *name, uint64_t communicator, int nodes, int ranks, int rank,
                void *log)
{
    (void)name;
    (void)nodes;
    (void)ranks;
    (void)rank;
    (void)log;
    pthread_mutex_lock(&all.lock);
    uint64_t *place = &all.communicators[all.users % COMMUNICATORS];
    *place = communicator;
    *context = place;
    all.users++;
    all.mask = mask;
    set_mask();
    pthread_mutex_unlock(&all.lock);
    return NCCL_OK;
}

static int start(void *context, void **handle, const struct nccl_event *event)
{
    bool collective = event->type == NCCL_COLLECTIVE;
    *handle = NULL;
    if (!collective && event->type != NCCL_POINT_TO_POINT) {
        return NCCL_OK;
    }
    size_t count = collective ? event->collective.count : event->point_to_point.count;
    const char *datatype = collective ? event->collective.datatype : event->point_to_point.datatype;
    const char *function = collective ? event->collective.function : event->point_to_point.function;
    *handle = begin(function, bytes_of(count, datatype), *(uint64_t *)context);
    return NCCL_OK;
}

static int stop(void *handle)
{
    end(handle);
    return NCCL_OK;
}

static int change_state(void *handle, int to, void *arguments)
{
    (void)handle;
    (void)to;
    (void)arguments;
    return NCCL_OK;
}

/* Without communicators NCCL may be unloaded, and its mask with it. */
static int finalize(void *context)
{
    (void)context;
    pthread_mutex_lock(&all.lock);
    all.users -= all.users > 0;
    all.mask = all.users > 0 ? all.mask : NULL;
    pthread_mutex_unlock(&all.lock);
    return NCCL_OK;
}

/* NCCL finds this by its name in the library that NCCL_PROFILER_PLUGIN says. */
__attribute__((visibility("default"))) const struct nccl_profiler ncclProfiler_v4 = {
    .name = "sluice", .init = init, .start = start, .stop = stop, .state = change_state, .finalize = finalize};

/* ---- our thread's side ---- */

/* The next that has ended; false: there is none. `lost` is counted from the last time. */
static bool take(struct call *taken, unsigned *from)
{
    bool found = false;
    pthread_mutex_lock(&all.lock);
    for (; *from < CALLS && !found; (*from)++) {
        if (all.calls[*from].state == ENDED) {
            *taken = all.calls[*from];
            all.calls[*from].state = FREE;
            found = true;
        }
    }
    pthread_mutex_unlock(&all.lock);
    return found;
}

uint64_t collectives_write(struct profile_file *file)
{
    struct call call;
    uint64_t count = 0;
    unsigned from = 0;
    while (take(&call, &from)) {
        call.record.name = call.function != NULL ? file_name(file, call.function) : 0;
        file_add(file, &call.record);
        count++;
    }
    pthread_mutex_lock(&all.lock);
    uint64_t lost = all.lost;
    all.lost = 0;
    pthread_mutex_unlock(&all.lock);
    if (lost > 0) {
        uint64_t now = clock_now(CLOCK_MONOTONIC);
        file_add(file, &(struct sluice_profile_record){.kind = SLUICE_PROFILE_LOST,
                                                       .device = UINT32_MAX,
                                                       .start = now,
                                                       .end = now,
                                                       .loss = {.events = lost, .reason = SLUICE_PROFILE_BUFFERS}});
    }
    return count;
}
