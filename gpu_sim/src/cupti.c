/* Simulated CUPTI: what the simulated driver does becomes records in the program's buffers, with the layout of NVIDIA's
 * headers (native/profile/cupti_abi.h). SLUICE_SIM_CUPTI_NS makes each record cost the program that much. */
#include "cupti_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"
#include "trace.h"

enum { INVALID_PARAMETER = 1, NOT_INITIALIZED = 15, KINDS = 64 };
enum { EPOCH = 1000000007 }; /* this clock is not the system's */

static struct {
    pthread_mutex_t lock;
    cupti_buffer_requested *requested;
    cupti_buffer_completed *completed;
    uint8_t *buffer;
    size_t size, used, dropped;
    uint64_t last_end; /* of what is in the buffer */
    unsigned long cost;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Atomic uint64_t enabled, callbacks; /* bits: kinds; domains */
static cupti_callback *_Atomic callback;
static void *callback_user;
static _Atomic uint32_t correlations;
static _Thread_local uint32_t correlation; /* of the launch that this thread is in */
static _Thread_local uint64_t launched;

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static bool is_on(uint32_t kind)
{
    return (atomic_load_explicit(&enabled, memory_order_relaxed) >> kind & 1) != 0;
}

/* ---- buffers; the lock is held ---- */

static void deliver(void)
{
    if (all.buffer != NULL) {
        all.completed(NULL, 0, all.buffer, all.size, all.used);
    }
    all.buffer = NULL;
    all.used = all.size = all.last_end = 0;
}

static void *room_for(size_t bytes)
{
    size_t most = 0;
    if (all.buffer != NULL && all.used + bytes > all.size) {
        deliver();
    }
    if (all.buffer == NULL && all.requested != NULL) {
        all.requested(&all.buffer, &all.size, &most);
    }
    if (all.buffer == NULL || all.used + bytes > all.size) {
        all.dropped++;
        return NULL;
    }
    void *room = all.buffer + all.used;
    all.used += bytes;
    return room;
}

static void keep(const void *record, size_t bytes, uint64_t end)
{
    uint64_t until = all.cost > 0 ? clock_ns() + all.cost : 0;
    pthread_mutex_lock(&all.lock);
    void *room = room_for(bytes);
    if (room != NULL) {
        memcpy(room, record, bytes);
        all.last_end = end > all.last_end ? end : all.last_end;
    }
    pthread_mutex_unlock(&all.lock);
    while (until > 0 && clock_ns() < until) {
    }
}

/* ---- what the driver did ---- */

static void ran(const struct sim_activity *what)
{
    struct cupti_kernel record = {.kind = CUPTI_KERNEL,
                                  .start = what->start + EPOCH,
                                  .end = what->end + EPOCH,
                                  .completed = what->end + EPOCH,
                                  .device = what->device,
                                  .context = what->context,
                                  .stream = what->stream,
                                  .correlation = correlation,
                                  .name = what->name};
    for (int i = 0; i < 3; i++) {
        record.grid[i] = (int32_t)what->grid[i];
        record.block[i] = (int32_t)what->block[i];
    }
    keep(&record, sizeof record, what->end);
}

static void copied(const struct sim_activity *what)
{
    struct cupti_memcpy record = {.kind = CUPTI_MEMCPY,
                                  .from = what->from,
                                  .to = what->to,
                                  .bytes = what->bytes,
                                  .start = what->start + EPOCH,
                                  .end = what->end + EPOCH,
                                  .device = what->device,
                                  .context = what->context,
                                  .stream = what->stream,
                                  .correlation = atomic_fetch_add(&correlations, 1) + 1};
    keep(&record, sizeof record, what->end);
}

static void filled(const struct sim_activity *what)
{
    struct cupti_memset record = {.kind = CUPTI_MEMSET,
                                  .memory_kind = what->to,
                                  .bytes = what->bytes,
                                  .start = what->start + EPOCH,
                                  .end = what->end + EPOCH,
                                  .device = what->device,
                                  .context = what->context,
                                  .stream = what->stream,
                                  .correlation = atomic_fetch_add(&correlations, 1) + 1};
    keep(&record, sizeof record, what->end);
}

static void waited(const struct sim_activity *what)
{
    struct cupti_synchronization record = {.kind = CUPTI_SYNCHRONIZATION,
                                           .type = what->waited,
                                           .start = what->start + EPOCH,
                                           .end = what->end + EPOCH,
                                           .context = what->context,
                                           .stream = what->stream,
                                           .correlation = atomic_fetch_add(&correlations, 1) + 1};
    keep(&record, sizeof record, what->end);
}

static void held(const struct sim_activity *what)
{
    struct cupti_memory record = {.kind = CUPTI_MEMORY2,
                                  .operation = what->kind == SIM_FREED ? CUPTI_MEMORY_RELEASE : 1,
                                  .memory_kind = what->to,
                                  .address = what->address,
                                  .bytes = what->bytes,
                                  .when = what->start + EPOCH,
                                  .process = (uint32_t)getpid(),
                                  .device = what->device,
                                  .context = what->context,
                                  .stream = what->stream,
                                  .correlation = atomic_fetch_add(&correlations, 1) + 1};
    keep(&record, sizeof record, what->end);
}

static void happened(const struct sim_activity *what)
{
    static const struct {
        uint32_t kind;
        void (*note)(const struct sim_activity *what);
    } kinds[] = {
        [SIM_RAN] = {CUPTI_KERNEL, ran},         [SIM_COPIED] = {CUPTI_MEMCPY, copied},
        [SIM_FILLED] = {CUPTI_MEMSET, filled},   [SIM_WAITED] = {CUPTI_SYNCHRONIZATION, waited},
        [SIM_ALLOCATED] = {CUPTI_MEMORY2, held}, [SIM_FREED] = {CUPTI_MEMORY2, held},
    };
    if (is_on(kinds[what->kind].kind)) {
        kinds[what->kind].note(what);
    }
}

static void call_back(uint32_t site, const char *kernel)
{
    cupti_callback *function = atomic_load(&callback);
    if (function != NULL && (atomic_load(&callbacks) >> CUPTI_DRIVER_API & 1) != 0) {
        struct cupti_callback_data data = {
            .site = site, .function = "cuLaunchKernel", .symbol = kernel, .correlation = correlation};
        function(callback_user, CUPTI_DRIVER_API, CUPTI_DRIVER_LAUNCH, &data);
    }
}

static void launches(bool done, const char *kernel)
{
    if (!done) {
        correlation = atomic_fetch_add_explicit(&correlations, 1, memory_order_relaxed) + 1;
        call_back(CUPTI_ENTER, kernel);
        launched = is_on(CUPTI_DRIVER) ? clock_ns() : 0;
        return;
    }
    if (launched > 0) {
        uint64_t now = clock_ns();
        struct cupti_api record = {.kind = CUPTI_DRIVER,
                                   .function = CUPTI_DRIVER_LAUNCH,
                                   .start = launched + EPOCH,
                                   .end = now + EPOCH,
                                   .process = (uint32_t)getpid(),
                                   .thread = (uint32_t)gettid(),
                                   .correlation = correlation};
        keep(&record, sizeof record, now);
    }
    call_back(CUPTI_EXIT, kernel);
}

/* The driver reports its work only while somebody wants it. */
static void listen(void)
{
    static const struct sim_tracer tracer = {.happened = happened, .launches = launches};
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void (*trace)(const struct sim_tracer *) = NULL;
    if (driver != NULL) {
        *(void **)&trace = dlsym(driver, "sluice_sim_trace");
        dlclose(driver);
    }
    if (trace != NULL) {
        trace(atomic_load(&enabled) != 0 || atomic_load(&callbacks) != 0 ? &tracer : NULL);
    }
}

/* ---- CUPTI's functions ---- */

#define CUPTI(NAME, ...) SIM_API uint32_t NAME(__VA_ARGS__)

CUPTI(cuptiGetVersion, uint32_t *version)
{
    enum { CUDA_12_9 = 28 };
    *version = CUDA_12_9;
    return CUPTI_OK;
}

CUPTI(cuptiSubscribe, void **subscriber, cupti_callback *function, void *user)
{
    cupti_callback *none = NULL;
    if (subscriber == NULL || function == NULL) {
        return INVALID_PARAMETER;
    }
    if (!atomic_compare_exchange_strong(&callback, &none, function)) {
        return CUPTI_OCCUPIED;
    }
    callback_user = user;
    *subscriber = &all;
    return CUPTI_OK;
}

CUPTI(cuptiUnsubscribe, void *subscriber)
{
    if (subscriber != &all || atomic_load(&callback) == NULL) {
        return INVALID_PARAMETER;
    }
    atomic_store(&callbacks, 0);
    atomic_store(&callback, NULL);
    listen();
    return CUPTI_OK;
}

CUPTI(cuptiEnableCallback, uint32_t enable, void *subscriber, uint32_t domain, uint32_t function)
{
    (void)function; /* launches are the only calls that this one tells of */
    if (subscriber != &all || domain > CUPTI_RUNTIME_API) {
        return INVALID_PARAMETER;
    }
    if (enable != 0) {
        atomic_fetch_or(&callbacks, 1u << domain);
    } else {
        atomic_fetch_and(&callbacks, ~(1ull << domain));
    }
    listen();
    return CUPTI_OK;
}

CUPTI(cuptiActivityRegisterCallbacks, cupti_buffer_requested *requested, cupti_buffer_completed *completed)
{
    const char *cost = getenv("SLUICE_SIM_CUPTI_NS");
    if (requested == NULL || completed == NULL) {
        return INVALID_PARAMETER;
    }
    pthread_mutex_lock(&all.lock);
    all.requested = requested;
    all.completed = completed;
    all.cost = cost != NULL ? strtoul(cost, NULL, 10) : 0;
    pthread_mutex_unlock(&all.lock);
    return CUPTI_OK;
}

static atomic_bool ended;

static void end(void)
{
    ended = true;
}

static void register_end(void)
{
    atexit(end);
}

/* As NVIDIA's: it has its own end among the process's exit handlers, and a call after that is the program's end, too
 * (CUPTI of CUDA 13.0 with driver 580.159). */
static void check_not_ended(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_end);
    if (ended) {
        abort();
    }
}

CUPTI(cuptiActivityEnable, uint32_t kind)
{
    check_not_ended();
    if (kind == 0 || kind >= KINDS) {
        return INVALID_PARAMETER;
    }
    atomic_fetch_or(&enabled, 1ull << kind);
    listen();
    return CUPTI_OK;
}

CUPTI(cuptiActivityDisable, uint32_t kind)
{
    if (kind == 0 || kind >= KINDS) {
        return INVALID_PARAMETER;
    }
    atomic_fetch_and(&enabled, ~(1ull << kind));
    listen();
    return CUPTI_OK;
}

/* Without force, only what is complete on the device. */
CUPTI(cuptiActivityFlushAll, uint32_t flags)
{
    check_not_ended();
    pthread_mutex_lock(&all.lock);
    if (all.completed == NULL) {
        pthread_mutex_unlock(&all.lock);
        return NOT_INITIALIZED;
    }
    if ((flags & CUPTI_FLUSH_FORCED) != 0 || all.last_end <= clock_ns()) {
        deliver();
    }
    pthread_mutex_unlock(&all.lock);
    return CUPTI_OK;
}

static size_t size_of(uint32_t kind)
{
    switch (kind) {
    case CUPTI_KERNEL:
        return sizeof(struct cupti_kernel);
    case CUPTI_MEMCPY:
        return sizeof(struct cupti_memcpy);
    case CUPTI_MEMSET:
        return sizeof(struct cupti_memset);
    case CUPTI_MEMORY2:
        return sizeof(struct cupti_memory);
    case CUPTI_SYNCHRONIZATION:
        return sizeof(struct cupti_synchronization);
    case CUPTI_DRIVER:
        return sizeof(struct cupti_api);
    default:
        return 0;
    }
}

CUPTI(cuptiActivityGetNextRecord, uint8_t *buffer, size_t valid, struct cupti_record **record)
{
    if (buffer == NULL || record == NULL) {
        return INVALID_PARAMETER;
    }
    size_t at = *record != NULL ? (size_t)((uint8_t *)*record - buffer) + size_of((*record)->kind) : 0;
    if (at >= valid) {
        return CUPTI_NO_MORE;
    }
    *record = (struct cupti_record *)(buffer + at);
    return CUPTI_OK;
}

CUPTI(cuptiActivityGetNumDroppedRecords, void *context, uint32_t stream, size_t *dropped)
{
    (void)context;
    (void)stream;
    if (dropped == NULL) {
        return INVALID_PARAMETER;
    }
    pthread_mutex_lock(&all.lock);
    *dropped = all.dropped;
    all.dropped = 0;
    pthread_mutex_unlock(&all.lock);
    return CUPTI_OK;
}

CUPTI(cuptiGetTimestamp, uint64_t *now)
{
    if (now == NULL) {
        return INVALID_PARAMETER;
    }
    *now = clock_ns() + EPOCH;
    return CUPTI_OK;
}

CUPTI(cuptiGetResultString, uint32_t result, const char **text)
{
    if (text == NULL) {
        return INVALID_PARAMETER;
    }
    *text = result == CUPTI_OCCUPIED ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED" : "CUPTI_ERROR";
    return CUPTI_OK;
}

CUPTI(cuptiGetCallbackName, uint32_t domain, uint32_t function, const char **name)
{
    if (name == NULL || domain != CUPTI_DRIVER_API || function != CUPTI_DRIVER_LAUNCH) {
        return INVALID_PARAMETER;
    }
    *name = "cuLaunchKernel";
    return CUPTI_OK;
}
