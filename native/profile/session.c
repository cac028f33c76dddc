/* SPDX-License-Identifier: Apache-2.0 */
#include "session.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "buffers.h"
#include "clock.h"
#include "collectives.h"
#include "cupti.h"
#include "file.h"
#include "governor.h"

enum {
    MS = 1000000,
    LOOK_NS = 5 * MS,       /* the governor looks no more often than this while buffers come */
    CLOCK_NS = 1000 * MS,   /* and the time of day is noted */
    WITHOUT_NS = 20 * MS,   /* launches are timed for so long before collection begins */
    WITH_NS = 1000 * MS,    /* and after */
    DEFAULT_BUDGET = 10000, /* millionths */
    DEFAULT_BYTES = 256 << 20,
    MOST_AT_ONCE = 64, /* buffers, before it is asked whether to go on */
    MAX_DEVICES = 64,
    MAX_WORDS = 512,
};

/* ---- what a launch takes, with and without collection ---- */

struct timing {
    atomic_uint count;
    uint32_t ns[GOVERNOR_SAMPLES];
};

static struct timing without, with;
static struct timing *_Atomic timing;
static atomic_uint round_now;

/* CUPTI's callback. A launch of the runtime is one of the driver, too: the outer one counts. */
static void on_launch(void *user, uint32_t domain, uint32_t function, const struct cupti_callback_data *data)
{
    static _Thread_local uint64_t entered;
    static _Thread_local unsigned depth, my_round;
    struct timing *set = atomic_load_explicit(&timing, memory_order_acquire);
    unsigned now_round = atomic_load_explicit(&round_now, memory_order_relaxed);
    (void)user;
    (void)domain;
    (void)function;
    if (my_round != now_round) { /* it may be in a call that began in another one */
        my_round = now_round;
        depth = 0;
    }
    if (data->site == CUPTI_ENTER) {
        if (depth++ == 0) {
            entered = clock_now(CLOCK_MONOTONIC);
        }
    } else if (depth > 0 && --depth == 0 && set != NULL) {
        uint64_t took = clock_now(CLOCK_MONOTONIC) - entered;
        unsigned at = atomic_fetch_add(&set->count, 1);
        if (at < GOVERNOR_SAMPLES) {
            set->ns[at] = took < UINT32_MAX ? (uint32_t)took : UINT32_MAX;
        }
    }
}

static size_t timed(const struct timing *set)
{
    unsigned count = atomic_load(&set->count);
    return count < GOVERNOR_SAMPLES ? count : GOVERNOR_SAMPLES;
}

/* ---- the profile ---- */

struct session {
    struct cupti *cupti;
    struct profile_file *file;
    const struct sluice_profile_control *control;
    session_asked *asked;
    void *subscriber;
    struct governor governor;
    int64_t clock; /* from CUPTI's to ours */
    uint64_t ticked, clocked, timed_since;
    uint64_t cpu;    /* of our thread, when the governor last looked */
    uint64_t busy;   /* processor time of the process, then */
    uint64_t events; /* since then */
    uint64_t gap;    /* since when nothing is collected; 0: it is */
    bool collecting, timing, priced, over;
};

static atomic_bool ending;
static struct profile_file *_Atomic file_now; /* for a child after a fork */

static void time_into(struct session *session, struct timing *set)
{
    if (set != NULL) {
        atomic_store(&set->count, 0);
    }
    atomic_fetch_add(&round_now, 1);
    atomic_store(&timing, set);
    session->timed_since = clock_now(CLOCK_MONOTONIC);
    if ((set != NULL) != session->timing) {
        session->timing = set != NULL;
        cupti_watch_launches(session->cupti, session->subscriber, session->timing);
    }
}

static void note_clock(struct session *session, uint64_t now)
{
    uint64_t before = clock_now(CLOCK_MONOTONIC), day = clock_now(CLOCK_REALTIME);
    uint64_t took = clock_now(CLOCK_MONOTONIC) - before;
    file_add(session->file, &(struct sluice_profile_record){.kind = SLUICE_PROFILE_CLOCK,
                                                            .device = UINT32_MAX,
                                                            .start = before + took / 2,
                                                            .end = before + took / 2,
                                                            .clock = {.time_of_day = day, .uncertainty = took}});
    session->clocked = now;
}

static void note_device(struct session *session, int device, void *driver)
{
    struct sluice_profile_record record = {.kind = SLUICE_PROFILE_DEVICE, .device = (uint32_t)device};
    int (*uuid)(unsigned char *, int), (*name)(char *, int, int), (*memory)(size_t *, int);
    char text[128] = "";
    size_t bytes = 0;
    *(void **)&uuid = dlsym(driver, "cuDeviceGetUuid_v2"); /* a MIG instance's own */
    *(void **)&name = dlsym(driver, "cuDeviceGetName");
    *(void **)&memory = dlsym(driver, "cuDeviceTotalMem_v2");
    if (uuid == NULL || name == NULL || memory == NULL || uuid(record.device_info.uuid, device) != 0) {
        return;
    }
    if (name(text, sizeof text - 1, device) == 0) {
        record.name = file_name(session->file, text);
    }
    record.device_info.memory = memory(&bytes, device) == 0 ? bytes : 0;
    file_add(session->file, &record);
}

/* All that the process sees: a device is known before its records come. */
static void note_devices(struct session *session)
{
    int count = 0, (*ask)(int *) = NULL;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (driver == NULL) {
        return;
    }
    *(void **)&ask = dlsym(driver, "cuDeviceGetCount");
    if (ask == NULL || ask(&count) != 0) {
        count = 0;
    }
    for (int device = 0; device < count && device < MAX_DEVICES; device++) {
        note_device(session, device, driver);
    }
    dlclose(driver);
}

/* What CUPTI itself had no buffer for. */
static void note_dropped(struct session *session, uint64_t now)
{
    size_t dropped = 0;
    session->cupti->cuptiActivityGetNumDroppedRecords(NULL, 0, &dropped);
    if (dropped > 0) {
        file_add(session->file,
                 &(struct sluice_profile_record){.kind = SLUICE_PROFILE_LOST,
                                                 .device = UINT32_MAX,
                                                 .start = session->ticked,
                                                 .end = now,
                                                 .loss = {.events = dropped, .reason = SLUICE_PROFILE_BUFFERS}});
    }
}

static void end_gap(struct session *session, uint64_t now)
{
    if (session->gap == 0) {
        return;
    }
    uint64_t missed = governor_estimate(&session->governor, now - session->gap);
    file_add(session->file,
             &(struct sluice_profile_record){.kind = SLUICE_PROFILE_GAP,
                                             .device = UINT32_MAX,
                                             .start = session->gap,
                                             .end = now,
                                             .loss = {.events = missed, .reason = SLUICE_PROFILE_BUDGET}});
    session->gap = 0;
}

static uint32_t collect(struct session *session, bool on)
{
    session->collecting = on;
    collectives_collect(on && (session->control->wanted & SLUICE_PROFILE_WANT_COLLECTIVES) != 0);
    return cupti_collect(session->cupti, session->control->wanted, on);
}

/* The governor's decision, carried out. Without a measured price, the time without collection measures it. */
static void obey(struct session *session, uint64_t now)
{
    if (session->over || session->governor.on == session->collecting) {
        return;
    }
    if (session->governor.on) {
        end_gap(session, now);
    } else {
        session->gap = now;
    }
    collect(session, session->governor.on);
    if (!session->priced) {
        time_into(session, session->collecting ? &with : &without);
    }
}

static void price(struct session *session, uint64_t now)
{
    bool enough = timed(&with) == GOVERNOR_SAMPLES || now - session->timed_since > WITH_NS;
    if (!session->timing || !session->collecting || !enough) {
        return;
    }
    session->priced = governor_measure(&session->governor, without.ns, timed(&without), with.ns, timed(&with));
    time_into(session, NULL);
}

static void tick(struct session *session, uint64_t now)
{
    session->cupti->cuptiActivityFlushAll(0);
    session->clock = cupti_clock(session->cupti);
    session->events += collectives_write(session->file);
    note_dropped(session, now);
    if (now - session->clocked >= CLOCK_NS) {
        note_clock(session, now);
    }
    file_flush(session->file);
    session->ticked = now;
}

/*
 * What has passed since the last look, of the time that a program without a processor does not have: on a busy node a
 * part of the clock's time would be a larger part of the program's.
 */
static uint64_t usable_time(struct session *session, uint64_t now)
{
    uint64_t busy = clock_now(CLOCK_PROCESS_CPUTIME_ID), used = busy - session->busy;
    uint64_t passed = now - session->governor.looked;
    session->busy = busy;
    return used < passed ? used : passed;
}

static void look(struct session *session, uint64_t now)
{
    uint64_t cpu = clock_now(CLOCK_THREAD_CPUTIME_ID);
    price(session, now);
    governor_look(&session->governor, now, usable_time(session, now), session->events, cpu - session->cpu);
    session->cpu = cpu;
    session->events = 0;
    obey(session, now);
}

static void drain(struct session *session, uint64_t wait_ns)
{
    struct buffer buffer;
    for (int i = 0; i < MOST_AT_ONCE && buffers_wait(&buffer, wait_ns); i++) {
        session->events += cupti_write(session->cupti, session->file, buffer.data, buffer.valid, session->clock);
        buffers_return(&buffer);
        wait_ns = 0;
        uint64_t now = clock_now(CLOCK_MONOTONIC);
        if (now - session->governor.looked >= LOOK_NS) {
            look(session, now);
        }
    }
}

static enum sluice_profile_reason trace(struct session *session)
{
    enum sluice_profile_reason reason = 0;
    while (reason == 0) {
        uint64_t interval = governor_interval(&session->governor);
        drain(session, interval);
        uint64_t now = clock_now(CLOCK_MONOTONIC);
        if (now - session->ticked >= interval) {
            tick(session, now);
            look(session, now);
            reason = session->asked(session->control);
        }
        reason = file_failed(session->file) != 0 ? file_failed(session->file) : reason;
        reason = atomic_load(&ending) ? SLUICE_PROFILE_EXIT : reason;
    }
    return reason;
}

/* How long launches take before anything is collected: a few of them, or what there is in a short time. */
static void time_without(struct session *session)
{
    struct timespec while_waiting = {.tv_nsec = MS};
    time_into(session, &without);
    for (int ms = 0; ms < WITHOUT_NS / MS && timed(&without) < GOVERNOR_SAMPLES; ms++) {
        nanosleep(&while_waiting, NULL);
    }
}

static void finish(struct session *session, enum sluice_profile_reason reason, const char *words)
{
    uint64_t now = clock_now(CLOCK_MONOTONIC);
    session->over = true;
    collect(session, false);
    time_into(session, NULL);
    session->cupti->cuptiActivityFlushAll(CUPTI_FLUSH_FORCED);
    drain(session, 0);
    collectives_write(session->file);
    end_gap(session, now);
    note_dropped(session, now);
    note_clock(session, now);
    session->cupti->cuptiUnsubscribe(session->subscriber);
    atomic_store(&file_now, NULL);
    file_end(session->file, reason, *words != 0 ? words : NULL, session->governor.cost);
    buffers_rest();
}

/* ---- its start ---- */

static struct profile_file *open_file(int folder, const struct sluice_profile_control *control)
{
    struct sluice_profile_header header = {.vendor = SLUICE_PROFILE_NVIDIA,
                                           .number = control->number,
                                           .wanted = control->wanted,
                                           .budget = control->budget != 0 ? control->budget : DEFAULT_BUDGET};
    return file_create(folder, &header, control->bytes != 0 ? control->bytes : DEFAULT_BYTES);
}

static enum sluice_profile_reason refused(const struct cupti *cupti, const char *call, uint32_t result, char *words)
{
    const char *text = NULL;
    cupti->cuptiGetResultString(result, &text);
    bool occupied = result == CUPTI_OCCUPIED;
    snprintf(words, MAX_WORDS, "%s%s answered %u (%s)",
             occupied ? "another profiler, such as PyTorch's, is at work in this process: " : "", call, result,
             text != NULL ? text : "?");
    return occupied ? SLUICE_PROFILE_OCCUPIED : SLUICE_PROFILE_LIBRARY;
}

/* CUPTI has one subscriber: whoever is first. */
static enum sluice_profile_reason subscribe(struct session *session, char *words)
{
    static struct cupti cupti;
    static bool loaded;
    loaded = loaded || cupti_load(&cupti, words, MAX_WORDS);
    if (!loaded) {
        return SLUICE_PROFILE_LIBRARY;
    }
    session->cupti = &cupti;
    if (!buffers_open()) {
        snprintf(words, MAX_WORDS, "no memory for buffers");
        return SLUICE_PROFILE_LIBRARY;
    }
    uint32_t result = cupti.cuptiSubscribe(&session->subscriber, on_launch, NULL);
    if (result != CUPTI_OK) {
        return refused(&cupti, "cuptiSubscribe", result, words);
    }
    result = cupti.cuptiActivityRegisterCallbacks(buffers_take, buffers_fill);
    if (result != CUPTI_OK) {
        cupti.cuptiUnsubscribe(session->subscriber);
        return refused(&cupti, "cuptiActivityRegisterCallbacks", result, words);
    }
    return 0;
}

static void begin(struct session *session)
{
    session->ticked = clock_now(CLOCK_MONOTONIC);
    session->cpu = clock_now(CLOCK_THREAD_CPUTIME_ID);
    session->busy = clock_now(CLOCK_PROCESS_CPUTIME_ID);
    session->clock = cupti_clock(session->cupti);
    governor_start(&session->governor, session->control->budget != 0 ? session->control->budget : DEFAULT_BUDGET,
                   session->ticked);
    note_clock(session, session->ticked);
    note_devices(session);
}

void session_run(int folder, const struct sluice_profile_control *control, session_asked *asked)
{
    struct session session = {.control = control, .asked = asked};
    char words[MAX_WORDS] = "";
    session.file = open_file(folder, control);
    if (session.file == NULL) {
        return; /* there is nowhere to say why */
    }
    atomic_store(&file_now, session.file);
    enum sluice_profile_reason reason = subscribe(&session, words);
    if (reason != 0) {
        atomic_store(&file_now, NULL);
        file_end(session.file, reason, words, 0);
        return;
    }
    time_without(&session);
    begin(&session);
    uint32_t result = collect(&session, true);
    time_into(&session, &with);
    reason = result != CUPTI_OK ? refused(session.cupti, "cuptiActivityEnable", result, words) : trace(&session);
    finish(&session, reason, words);
}

void session_end(void)
{
    atomic_store(&ending, true);
    buffers_wake();
}

void session_abandon(void)
{
    struct profile_file *file = atomic_exchange(&file_now, NULL);
    buffers_abandon();
    if (file != NULL) {
        file_abandon(file);
    }
}
