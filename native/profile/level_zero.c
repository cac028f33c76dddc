/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loader of Level Zero calls back before and after calls of the program, if it was started with its tracing layer
 * (ZE_ENABLE_TRACING_LAYER=1). Three tracers: one for what is collected, which is on while it is; one for the ends of
 * things that have handles, which stays on behind a profile as long as an event of ours is in one of them; and one that
 * counts what is recorded in command lists, which is on from the program's start.
 */
#include "level_zero.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "inject.h"
#include "launches.h"

struct level_zero ze;

static struct {
    void *library;
    ze_handle collecting, lives, recording;
    bool enabled, watched;
    _Atomic uint32_t wanted;      /* while it is collected */
    atomic_bool timed, abandoned; /* launches are timed; this is a child after a fork */
} all;

static _Thread_local struct {
    struct ze_work *work;
    uint64_t entered;
    bool wanted; /* its kernel or copy; until what is recorded is counted */
} call;          /* from its prologue to its epilogue */

static bool wants(uint32_t what)
{
    return (atomic_load_explicit(&all.wanted, memory_order_relaxed) & what) != 0;
}

static bool is_abandoned(void)
{
    return atomic_load_explicit(&all.abandoned, memory_order_relaxed);
}

/* ---- work on the device ---- */

static void end_work(ze_handle list, uint32_t result, const char *name)
{
    static _Thread_local uint32_t thread;
    uint32_t correlation = call.work != NULL ? ze_work_end(call.work, list, result == ZE_OK) : 0;
    call.work = NULL;
    if (call.entered != 0) {
        thread = thread != 0 ? thread : (uint32_t)gettid();
        ze_keep(&(struct sluice_profile_record){.kind = SLUICE_PROFILE_CALL,
                                                .device = UINT32_MAX,
                                                .start = call.entered,
                                                .end = clock_now(CLOCK_MONOTONIC),
                                                .correlation = correlation,
                                                .call = {.thread = thread, .result = (int32_t)result}},
                name);
    }
}

static void begin_call(void)
{
    call.work = NULL;
    call.entered = wants(SLUICE_PROFILE_WANT_CALLS) ? clock_now(CLOCK_MONOTONIC) : 0;
}

static void begin_launch(const struct ze_launch *launch, const struct ze_group_count *groups)
{
    if (atomic_load_explicit(&all.timed, memory_order_relaxed)) {
        launches_begin();
    }
    begin_call();
    call.wanted = wants(SLUICE_PROFILE_WANT_KERNELS);
    if (!call.wanted) {
        return;
    }
    struct sluice_profile_record record = {.kind = SLUICE_PROFILE_KERNEL};
    if (groups != NULL) {
        memcpy(record.kernel.grid, groups, sizeof record.kernel.grid);
    }
    call.work = ze_work_begin(*launch->list, launch->signal, &record, *launch->kernel);
}

static void end_launch(const struct ze_launch *launch, uint32_t result, const char *name)
{
    end_work(*launch->list, result, name);
    if (atomic_load_explicit(&all.timed, memory_order_relaxed)) {
        launches_end();
    }
}

/* A callback whose parameters are of one type; what it does not use is left unnamed. */
#define CALLBACK(NAME, TYPE, ...)                                                                                      \
    static void NAME(void *given, uint32_t result, void *user, void **kept)                                            \
    {                                                                                                                  \
        const struct TYPE *theirs = given;                                                                             \
        (void)theirs;                                                                                                  \
        (void)result;                                                                                                  \
        (void)user;                                                                                                    \
        (void)kept;                                                                                                    \
        if (!is_abandoned()) {                                                                                         \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    }

CALLBACK(before_launch, ze_launch, begin_launch(theirs, *theirs->groups);)
CALLBACK(before_indirect_launch, ze_launch, begin_launch(theirs, NULL);) /* its groups are the device's */
CALLBACK(after_launch, ze_launch, end_launch(theirs, result, "zeCommandListAppendLaunchKernel");)
CALLBACK(after_cooperative_launch, ze_launch, end_launch(theirs, result, "zeCommandListAppendLaunchCooperativeKernel");)
CALLBACK(after_indirect_launch, ze_launch, end_launch(theirs, result, "zeCommandListAppendLaunchKernelIndirect");)

static void begin_copy(ze_handle *list, ze_handle *signal, enum sluice_profile_kind kind, size_t bytes,
                       const void *from, const void *to)
{
    begin_call();
    call.wanted = wants(SLUICE_PROFILE_WANT_COPIES);
    if (call.wanted) {
        struct sluice_profile_record record = {.kind = (uint16_t)kind, .copy = {.bytes = bytes, .peer = UINT32_MAX}};
        record.copy.from = from != NULL ? ze_place_of(*list, from) : 0;
        record.copy.to = ze_place_of(*list, to);
        call.work = ze_work_begin(*list, signal, &record, NULL);
    }
}

CALLBACK(before_copy, ze_copy,
         begin_copy(theirs->list, theirs->signal, SLUICE_PROFILE_COPY, *theirs->bytes, *theirs->from, *theirs->to);)
CALLBACK(before_fill, ze_fill,
         begin_copy(theirs->list, theirs->signal, SLUICE_PROFILE_FILL, *theirs->bytes, NULL, *theirs->to);)
CALLBACK(after_copy, ze_copy, end_work(*theirs->list, result, "zeCommandListAppendMemoryCopy");)
CALLBACK(after_fill, ze_fill, end_work(*theirs->list, result, "zeCommandListAppendMemoryFill");)
CALLBACK(before_execute, ze_execute, ze_lists_begin(*theirs->count, *theirs->lists);)

static void executed(uint32_t count, const ze_handle *lists)
{
    ze_lists_end(count, lists);
    ze_recorded_execute(count, lists,
                        (unsigned)wants(SLUICE_PROFILE_WANT_KERNELS) << ZE_RECORDED_KERNELS |
                            (unsigned)wants(SLUICE_PROFILE_WANT_COPIES) << ZE_RECORDED_COPIES);
}

CALLBACK(after_execute, ze_execute, if (result == ZE_OK) { executed(*theirs->count, *theirs->lists); })

static void set_group(const struct ze_group_size *group)
{
    const uint32_t block[] = {*group->x, *group->y, *group->z};
    ze_kernel_group(*group->kernel, block);
}

CALLBACK(after_group_size, ze_group_size, if (result == ZE_OK) { set_group(theirs); })

/* ---- what is recorded while it is not wanted ---- */

/* Collection may begin or end within the call: what counts is what its prologue saw. */
static void recorded(ze_handle list, uint32_t result, enum ze_recorded kind)
{
    if (result == ZE_OK && !call.wanted) {
        ze_recorded_append(list, kind);
    }
    call.wanted = false;
}

CALLBACK(record_launch, ze_launch, recorded(*theirs->list, result, ZE_RECORDED_KERNELS);)
CALLBACK(record_copy, ze_one, recorded(*theirs->handle, result, ZE_RECORDED_COPIES);)
CALLBACK(after_create_list, ze_create_list, if (result == ZE_OK) { ze_recorded_made(**theirs->list); })
CALLBACK(after_list_reset, ze_one, if (result == ZE_OK) { ze_recorded_reset(*theirs->handle); })
CALLBACK(before_list_gone, ze_one, ze_recorded_gone(*theirs->handle);)

/* ---- waits and memory ---- */

static void waited(uint32_t result, uint32_t what)
{
    if (result == ZE_OK && call.entered != 0 && wants(SLUICE_PROFILE_WANT_SYNCHRONISATION)) {
        ze_keep(&(struct sluice_profile_record){.kind = SLUICE_PROFILE_SYNC,
                                                .device = UINT32_MAX,
                                                .start = call.entered,
                                                .end = clock_now(CLOCK_MONOTONIC),
                                                .sync = {.what = what}},
                NULL);
    }
}

static void allocated(const void *memory, size_t bytes, uint8_t where, uint32_t device, bool released)
{
    if (wants(SLUICE_PROFILE_WANT_MEMORY)) {
        uint64_t now = clock_now(CLOCK_MONOTONIC);
        ze_keep(
            &(struct sluice_profile_record){
                .kind = SLUICE_PROFILE_MEMORY,
                .device = device,
                .start = now,
                .end = now,
                .memory = {.bytes = bytes, .address = (uintptr_t)memory, .where = where, .released = released}},
            NULL);
    }
}

/* Asked before it is gone. */
static void freed(ze_handle context, const void *memory)
{
    struct ze_allocation properties = {.type = ZE_TYPE_ALLOCATION};
    ze_handle device = NULL;
    void *base;
    size_t bytes = 0;
    if (wants(SLUICE_PROFILE_WANT_MEMORY) && ze.zeMemGetAddressRange(context, memory, &base, &bytes) == ZE_OK &&
        ze.zeMemGetAllocProperties(context, memory, &properties, &device) == ZE_OK) {
        allocated(memory, bytes, ze_place(properties.kind),
                  device != NULL ? ze_gpu_number(ze_gpu_of(device)) : UINT32_MAX, true);
    }
}

CALLBACK(before_wait, ze_one, call.entered = clock_now(CLOCK_MONOTONIC);)
CALLBACK(after_list_wait, ze_one, waited(result, SLUICE_PROFILE_SYNC_STREAM);)
CALLBACK(after_event_wait, ze_one, waited(result, SLUICE_PROFILE_SYNC_EVENT);)
CALLBACK(
    after_alloc_device, ze_alloc_device, if (result == ZE_OK) {
        allocated(**theirs->memory, *theirs->bytes, SLUICE_PROFILE_ON_DEVICE, ze_gpu_number(ze_gpu_of(*theirs->device)),
                  false);
    })
CALLBACK(
    after_alloc_shared, ze_alloc_shared, if (result == ZE_OK) {
        allocated(**theirs->memory, *theirs->bytes, SLUICE_PROFILE_MANAGED,
                  *theirs->device != NULL ? ze_gpu_number(ze_gpu_of(*theirs->device)) : UINT32_MAX, false);
    })
CALLBACK(
    after_alloc_host, ze_alloc_host,
    if (result == ZE_OK) { allocated(**theirs->memory, *theirs->bytes, SLUICE_PROFILE_PINNED, UINT32_MAX, false); })
CALLBACK(before_free, ze_free, freed(*theirs->context, *theirs->memory);)

/* ---- what ends ---- */

CALLBACK(before_list_reset, ze_one, ze_forget_list(*theirs->handle, false);)
CALLBACK(before_list_destroy, ze_one, ze_forget_list(*theirs->handle, true);)
CALLBACK(before_kernel_destroy, ze_one, ze_forget_kernel(*theirs->handle);)
CALLBACK(before_context_destroy, ze_one, ze_forget_context(*theirs->handle);)

/* ---- the loader and its tracers ---- */

struct traced {
    const char *call;
    ze_callback *before, *after;
    bool optional; /* older versions do not have it */
};

static const struct traced collected[] = {
    {"CommandListAppendLaunchKernel", before_launch, after_launch, false},
    {"CommandListAppendLaunchCooperativeKernel", before_launch, after_cooperative_launch, false},
    {"CommandListAppendLaunchKernelIndirect", before_indirect_launch, after_indirect_launch, false},
    {"CommandListAppendMemoryCopy", before_copy, after_copy, false},
    {"CommandListAppendMemoryFill", before_fill, after_fill, false},
    {"CommandQueueExecuteCommandLists", before_execute, after_execute, false},
    {"KernelSetGroupSize", NULL, after_group_size, false},
    {"CommandQueueSynchronize", before_wait, after_list_wait, false},
    {"CommandListHostSynchronize", before_wait, after_list_wait, true},
    {"FenceHostSynchronize", before_wait, after_event_wait, false},
    {"EventHostSynchronize", before_wait, after_event_wait, false},
    {"MemAllocDevice", NULL, after_alloc_device, false},
    {"MemAllocShared", NULL, after_alloc_shared, false},
    {"MemAllocHost", NULL, after_alloc_host, false},
    {"MemFree", before_free, NULL, false},
};

static const struct traced lives[] = {
    {"CommandListReset", before_list_reset, NULL, false},
    {"CommandListDestroy", before_list_destroy, NULL, false},
    {"KernelDestroy", before_kernel_destroy, NULL, false},
    {"ContextDestroy", before_context_destroy, NULL, false},
};

static const struct traced recording[] = {
    {"CommandListCreate", NULL, after_create_list, false},
    {"CommandListAppendLaunchKernel", NULL, record_launch, false},
    {"CommandListAppendLaunchCooperativeKernel", NULL, record_launch, false},
    {"CommandListAppendLaunchKernelIndirect", NULL, record_launch, false},
    {"CommandListAppendMemoryCopy", NULL, record_copy, false},
    {"CommandListAppendMemoryFill", NULL, record_copy, false},
    {"CommandListReset", NULL, after_list_reset, false},
    {"CommandListDestroy", before_list_gone, NULL, false},
};

static bool find_library(char *words, size_t size)
{
    static const char *const names[] = {
#define ZE_NAME(NAME, PARAMETERS) #NAME,
        ZE_CALLS(ZE_NAME)
#undef ZE_NAME
    };
    if (all.library != NULL) { /* once: threads of the program may use it by now */
        return true;
    }
    void *library = dlopen("libze_loader.so.1", RTLD_NOW | RTLD_NOLOAD);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *function = library != NULL ? dlsym(library, names[i]) : NULL;
        if (function == NULL) {
            snprintf(words, size, "the Level Zero of this program has no %s; one of version 1.9 or later is needed",
                     names[i]);
            return false;
        }
        memcpy((char *)&ze + i * sizeof function, &function, sizeof function);
    }
    all.library = library;
    return true;
}

static bool trace(ze_handle tracer, const struct traced *traced, char *words, size_t size)
{
    char name[96];
    ze_register *put_in = NULL;
    snprintf(name, sizeof name, "zelTracer%sRegisterCallback", traced->call);
    *(void **)&put_in = dlsym(all.library, name);
    if (put_in == NULL) {
        snprintf(words, size, "the Level Zero of this program has no %s", name);
        return traced->optional;
    }
    return (traced->before == NULL || put_in(tracer, ZE_PROLOGUE, traced->before) == ZE_OK) &&
           (traced->after == NULL || put_in(tracer, ZE_EPILOGUE, traced->after) == ZE_OK);
}

static ze_handle new_tracer(const struct traced *traced, size_t count, char *words, size_t size)
{
    static char user; /* it may not be NULL */
    const struct ze_tracer how = {.type = ZE_TYPE_TRACER, .user = &user};
    ze_handle tracer = NULL;
    uint32_t result = ze.zelTracerCreate(&how, &tracer);
    if (result != ZE_OK) {
        snprintf(words, size, "zelTracerCreate answered 0x%x: is ZE_ENABLE_TRACING_LAYER=1 in the environment?",
                 result);
        return NULL;
    }
    bool traces = true;
    for (size_t i = 0; i < count && traces; i++) {
        traces = trace(tracer, &traced[i], words, size);
    }
    if (!traces) {
        ze.zelTracerDestroy(tracer);
    }
    return traces ? tracer : NULL;
}

static bool make_tracers(char *words, size_t size)
{
    snprintf(words, size, "the tracing layer of Level Zero refuses a call");
    if (all.collecting == NULL) {
        all.collecting = new_tracer(collected, sizeof collected / sizeof *collected, words, size);
    }
    if (all.lives == NULL && all.collecting != NULL) {
        all.lives = new_tracer(lives, sizeof lives / sizeof *lives, words, size);
    }
    return all.collecting != NULL && all.lives != NULL && ze.zelTracerSetEnabled(all.lives, 1) == ZE_OK;
}

/* ---- the tracer ---- */

static enum sluice_profile_reason open_tracer(char *words, size_t size)
{
    if (!find_library(words, size) || !make_tracers(words, size)) {
        return SLUICE_PROFILE_LIBRARY;
    }
    ze_work_open();
    ze_recorded_unseen(); /* of an earlier profile */
    ze_keep_open(true);
    return 0;
}

static void close_tracer(void)
{
    ze_keep_open(false);
    if (ze_work_close()) {
        ze.zelTracerSetEnabled(all.lives, 0);
    }
}

static uint32_t enable(void)
{
    bool on = atomic_load(&all.wanted) != 0 || atomic_load(&all.timed);
    uint32_t result = on != all.enabled ? ze.zelTracerSetEnabled(all.collecting, on) : ZE_OK;
    all.enabled = result == ZE_OK ? on : all.enabled;
    return result;
}

static enum sluice_profile_reason collect(uint32_t wanted, bool on, char *words, size_t size)
{
    atomic_store(&all.wanted, on ? wanted : 0);
    uint32_t result = enable();
    if (result != ZE_OK && on) {
        snprintf(words, size, "zelTracerSetEnabled answered 0x%x", result);
        return SLUICE_PROFILE_LIBRARY;
    }
    return 0;
}

static void watch_launches(bool on)
{
    atomic_store(&all.timed, on);
    enable();
}

/* What is not complete on the device is beyond the profile's end. */
static void flush(bool everything)
{
    (void)everything;
    ze_harvest();
}

static uint64_t now(void)
{
    return clock_now(CLOCK_MONOTONIC);
}

static uint64_t write_buffer(struct profile_file *file, const struct buffer *buffer, int64_t clock)
{
    (void)clock; /* they are CLOCK_MONOTONIC's already */
    return ze_write(file, buffer);
}

static void abandon(void)
{
    atomic_store(&all.abandoned, true);
}

/* If it cannot be done, a profile says why. */
static void count_recorded(void)
{
    char words[256];
    if (find_library(words, sizeof words)) {
        all.recording = new_tracer(recording, sizeof recording / sizeof *recording, words, sizeof words);
    }
    if (all.recording != NULL) {
        ze.zelTracerSetEnabled(all.recording, 1);
    }
}

const struct tracer level_zero_tracer = {.vendor = SLUICE_PROFILE_INTEL,
                                         .begin = count_recorded,
                                         .open = open_tracer,
                                         .close = close_tracer,
                                         .collect = collect,
                                         .watch_launches = watch_launches,
                                         .flush = flush,
                                         .now = now,
                                         .write = write_buffer,
                                         .dropped = ze_lost,
                                         .unseen = ze_recorded_unseen,
                                         .note_devices = ze_note_devices,
                                         .abandon = abandon};

/* The preloaded library (preload.c) calls this when the program has initialized Level Zero. */
__attribute__((visibility("default"))) void sluice_profile_level_zero(void)
{
    inject_start(&level_zero_tracer);
}
