/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rocprofiler-sdk wants to know at the program's start what may ever be traced: one context for each thing that can be
 * wanted, which costs nothing until it is started. Its records come from its own thread, and wait in our buffers.
 */
#include "rocprofiler.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "inject.h"
#include "launches.h"

enum { BUFFER_BYTES = 2 << 20, WATERMARK = BUFFER_BYTES / 8, MAX_OPERATIONS = 1024, MAX_WORDS = 160 };

/* What can be wanted, and the kind of records that says it. */
static const struct {
    uint32_t wanted, kind;
    bool (*only)(const char *operation); /* NULL: all of it */
} wants[] = {
    {SLUICE_PROFILE_WANT_KERNELS, ROCP_KERNEL, NULL},
    {SLUICE_PROFILE_WANT_COPIES, ROCP_COPY, NULL},
    {SLUICE_PROFILE_WANT_SYNCHRONISATION, ROCP_HIP_CALL, rocp_waits},
    {SLUICE_PROFILE_WANT_MEMORY, ROCP_MEMORY, NULL},
    {SLUICE_PROFILE_WANT_CALLS, ROCP_HIP_CALL, rocp_does_not_wait},
    {SLUICE_PROFILE_WANT_COLLECTIVES, ROCP_RCCL_CALL, rocp_communicates},
};
enum { WANTS = sizeof wants / sizeof *wants };

static struct {
    struct rocprofiler library;
    bool ready;
    char words[MAX_WORDS]; /* why not */
    uint64_t names, launches, contexts[WANTS], buffers[WANTS];
    bool can[WANTS];      /* this version has it */
    pthread_mutex_t lock; /* of what follows */
    bool open;            /* a profile wants records */
    uint8_t *taken;
    size_t used, size;
    uint64_t dropped;
    clockid_t thread; /* that of the library which brings records */
    bool has_thread;
    uint64_t spent;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- what the library calls ---- */

static void on_code(struct rocp_callback record, uint64_t *kept, void *data)
{
    const struct rocp_symbol *symbol = record.what;
    (void)kept;
    (void)data;
    if (record.operation == ROCP_KERNEL_SYMBOL && record.phase == ROCP_ENTER && symbol->name != NULL) {
        rocp_learn_kernel(symbol->kernel, symbol->name);
    }
}

static void on_launch(struct rocp_callback record, uint64_t *kept, void *data)
{
    (void)kept;
    (void)data;
    if (record.phase == ROCP_ENTER) {
        launches_begin();
    } else if (record.phase == ROCP_EXIT) {
        launches_end();
    }
}

/* The lock is held. */
static void keep(const struct rocp_record *record)
{
    if (all.taken != NULL && all.used + record->size > all.size) {
        buffers_fill(all.taken, all.used);
        all.taken = NULL;
    }
    if (all.taken == NULL) {
        all.taken = buffers_take(&all.size);
        all.used = 0;
    }
    if (all.taken == NULL || record->size > all.size) {
        all.dropped++;
        return;
    }
    memcpy(all.taken + all.used, record, record->size);
    all.used += record->size;
}

static void on_records(uint64_t context, uint64_t buffer, struct rocp_header **headers, size_t count, void *data,
                       uint64_t dropped)
{
    (void)context;
    (void)buffer;
    (void)data;
    pthread_mutex_lock(&all.lock);
    if (!all.has_thread) {
        all.has_thread = pthread_getcpuclockid(pthread_self(), &all.thread) == 0;
        all.spent = all.has_thread ? clock_now(all.thread) : 0;
    }
    for (size_t i = 0; i < count && all.open; i++) {
        const struct rocp_record *record = headers[i]->record;
        if (headers[i]->category == ROCP_CATEGORY_TRACING && record->size >= sizeof *record && record->size % 8 == 0) {
            keep(record);
        }
    }
    all.dropped += dropped;
    if (all.taken != NULL) {
        buffers_fill(all.taken, all.used);
        all.taken = NULL;
    }
    pthread_mutex_unlock(&all.lock);
}

/* ---- its configuration, at the program's start ---- */

struct operations {
    int32_t numbers[MAX_OPERATIONS];
    size_t count;
    bool (*only)(const char *name);
};

static int choose(uint32_t kind, int32_t operation, void *data)
{
    struct operations *chosen = data;
    const char *name = NULL;
    uint64_t length = 0;
    all.library.query_buffer_tracing_kind_operation_name(kind, operation, &name, &length);
    if (name != NULL && chosen->count < MAX_OPERATIONS && chosen->only(name)) {
        chosen->numbers[chosen->count++] = operation;
    }
    return 0;
}

/* By their names: numbers of calls differ between versions. */
static void find_operations(struct operations *found, uint32_t kind, bool (*only)(const char *name))
{
    found->count = 0;
    found->only = only;
    all.library.iterate_buffer_tracing_kind_operations(kind, choose, found);
}

static bool set_up_want(size_t i)
{
    static struct operations operations;
    bool some = wants[i].only != NULL;
    if (some) {
        find_operations(&operations, wants[i].kind, wants[i].only);
    }
    return all.library.create_context(&all.contexts[i]) == ROCP_OK &&
           all.library.create_buffer(all.contexts[i], BUFFER_BYTES, WATERMARK, ROCP_DISCARD, on_records, NULL,
                                     &all.buffers[i]) == ROCP_OK &&
           (!some || operations.count > 0) &&
           all.library.configure_buffer_tracing_service(all.contexts[i], wants[i].kind,
                                                        some ? operations.numbers : NULL, some ? operations.count : 0,
                                                        all.buffers[i]) == ROCP_OK;
}

static bool set_up_callbacks(void)
{
    static struct operations launches;
    find_operations(&launches, ROCP_HIP_CALL, rocp_launches);
    return all.library.create_context(&all.names) == ROCP_OK &&
           all.library.configure_callback_tracing_service(all.names, ROCP_CALL_BACK_CODE, NULL, 0, on_code, NULL) ==
               ROCP_OK &&
           all.library.create_context(&all.launches) == ROCP_OK &&
           all.library.configure_callback_tracing_service(all.launches, ROCP_CALL_BACK_HIP, launches.numbers,
                                                          launches.count, on_launch, NULL) == ROCP_OK;
}

static bool find_library(void)
{
    static const char *const names[] = {
#define ROCP_NAME(NAME, PARAMETERS) "rocprofiler_" #NAME,
        ROCP_CALLS(ROCP_NAME)
#undef ROCP_NAME
    };
    void *library = dlopen("librocprofiler-sdk.so.1", RTLD_NOW | RTLD_NOLOAD);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *function = library != NULL ? dlsym(library, names[i]) : NULL;
        if (function == NULL) {
            snprintf(all.words, sizeof all.words, "the rocprofiler-sdk of this program has no %s", names[i]);
            return false;
        }
        memcpy((char *)&all.library + i * sizeof function, &function, sizeof function);
    }
    return true;
}

/* Without kernels there is nothing to profile; whatever else this version has not is left out. */
static void set_up(void)
{
    if (!find_library()) {
        return;
    }
    for (size_t i = 0; i < WANTS; i++) {
        all.can[i] = set_up_want(i);
    }
    all.ready = all.can[0] && set_up_callbacks() && all.library.start_context(all.names) == ROCP_OK;
    if (all.ready) {
        rocp_find_agents(&all.library);
    } else {
        snprintf(all.words, sizeof all.words, "rocprofiler-sdk refuses to trace kernels in this program");
    }
}

static int initialize(void (*end)(struct rocp_client), void *data)
{
    (void)end;
    (void)data;
    set_up();
    inject_start(&rocprofiler_tracer);
    return 0;
}

static void finalize(void *data)
{
    (void)data;
    inject_end();
}

/* rocprofiler-sdk looks for this in the libraries that ROCP_TOOL_LIBRARIES names, when the program loads HIP. */
__attribute__((visibility("default"))) struct rocp_tool *
rocprofiler_configure(uint32_t version, const char *words, uint32_t priority, struct rocp_client *client)
{
    static struct rocp_tool tool = {.size = sizeof tool, .initialize = initialize, .finalize = finalize};
    (void)words;
    (void)priority;
    if (version < ROCP_FIRST_VERSION) { /* it passes other structures, also here */
        snprintf(all.words, sizeof all.words, "this rocprofiler-sdk is version %u.%u; one of ROCm 7 or later is needed",
                 version / 10000, version / 100 % 100);
        inject_start(&rocprofiler_tracer);
        return NULL;
    }
    client->name = "sluice";
    return &tool;
}

/* ---- the tracer ---- */

/* What is not complete on the device is not in the library's buffers, and comes no more: it is beyond the profile's end. */
static void flush(bool everything)
{
    (void)everything;
    for (size_t i = 0; i < WANTS; i++) {
        if (all.can[i]) {
            all.library.flush_buffer(all.buffers[i]);
        }
    }
}

/* Nothing where the thread has ended. */
static uint64_t spent(void)
{
    struct timespec used = {0};
    pthread_mutex_lock(&all.lock);
    all.has_thread = all.has_thread && clock_gettime(all.thread, &used) == 0;
    uint64_t before = all.spent, now_spent = (uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec;
    all.spent = now_spent;
    pthread_mutex_unlock(&all.lock);
    return now_spent > before ? now_spent - before : 0;
}

static enum sluice_profile_reason open_tracer(char *words, size_t size)
{
    if (!all.ready) {
        snprintf(words, size, "%s", all.words);
        return SLUICE_PROFILE_LIBRARY;
    }
    flush(true); /* what came late for an earlier profile is nobody's */
    spent();     /* nor is what the thread did for other tools of the program since */
    pthread_mutex_lock(&all.lock);
    all.open = true;
    all.dropped = 0;
    pthread_mutex_unlock(&all.lock);
    return 0;
}

static void close_tracer(void)
{
    pthread_mutex_lock(&all.lock);
    all.open = false;
    pthread_mutex_unlock(&all.lock);
}

static enum sluice_profile_reason collect(uint32_t wanted, bool on, char *words, size_t size)
{
    for (size_t i = 0; i < WANTS; i++) {
        if ((wanted & wants[i].wanted) == 0 || !all.can[i]) {
            continue;
        }
        uint32_t result = on ? all.library.start_context(all.contexts[i]) : all.library.stop_context(all.contexts[i]);
        if (result != ROCP_OK && on) {
            snprintf(words, size, "rocprofiler_start_context answered %u", result);
            return SLUICE_PROFILE_LIBRARY;
        }
    }
    return 0;
}

static void watch_launches(bool on)
{
    if (on) {
        all.library.start_context(all.launches);
    } else {
        all.library.stop_context(all.launches);
    }
}

static uint64_t now(void)
{
    uint64_t theirs = 0;
    all.library.get_timestamp(&theirs);
    return theirs;
}

static uint64_t write_buffer(struct profile_file *file, const struct buffer *buffer, int64_t clock)
{
    return rocp_write(&all.library, file, buffer, clock);
}

static uint64_t dropped(void)
{
    pthread_mutex_lock(&all.lock);
    uint64_t count = all.dropped;
    all.dropped = 0;
    pthread_mutex_unlock(&all.lock);
    return count;
}

const struct tracer rocprofiler_tracer = {.vendor = SLUICE_PROFILE_AMD,
                                          .open = open_tracer,
                                          .close = close_tracer,
                                          .collect = collect,
                                          .watch_launches = watch_launches,
                                          .flush = flush,
                                          .now = now,
                                          .write = write_buffer,
                                          .dropped = dropped,
                                          .spent = spent,
                                          .note_devices = rocp_note_devices};
