/* SPDX-License-Identifier: Apache-2.0 */
#include "session.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "buffers.h"
#include "clock.h"
#include "collectives.h"
#include "demand.h"
#include "governor.h"
#include "launches.h"
#include "samples.h"

enum {
    MS = 1000000,
    LOOK_NS = 5 * MS,       /* the governor looks no more often than this while buffers come */
    CLOCK_NS = 1000 * MS,   /* and the time of day is noted, and what the program wanted of the processors */
    LATE_NS = 1000 * MS,    /* into a gap; until then what was collected before it may still come */
    WITHOUT_NS = 20 * MS,   /* launches are timed for so long before collection begins */
    WITH_NS = 1000 * MS,    /* and after */
    DEFAULT_BUDGET = 10000, /* millionths */
    DEFAULT_BYTES = 256 << 20,
    MOST_AT_ONCE = 64, /* buffers, before it is asked whether to go on */
    MAX_WORDS = 512,
};

static struct launches without, with; /* collection */

/* ---- the profile ---- */

struct session {
    const struct tracer *tracer;
    struct profile_file *file;
    const struct sluice_profile_control *control;
    session_asked *asked;
    struct governor governor;
    int64_t clock; /* from the vendor's to ours */
    uint64_t ticked, clocked, timed_since;
    uint64_t cpu;    /* of our thread, when the governor last looked */
    uint64_t events; /* since then */
    uint64_t samples;
    uint64_t gap;         /* since when nothing is collected; 0: it is */
    struct demand demand; /* when the time of day was last noted */
    double usable;        /* the part of the time that the program did not wait for a processor, before that */
    bool collecting, timing, priced, over;
};

static atomic_bool ending;
static struct profile_file *_Atomic file_now; /* for a child after a fork */

static void time_into(struct session *session, struct launches *set)
{
    launches_time(set);
    session->timed_since = clock_now(CLOCK_MONOTONIC);
    if ((set != NULL) != session->timing) {
        session->timing = set != NULL;
        session->tracer->watch_launches(session->timing);
    }
}

/* What to add to the vendor's times to get CLOCK_MONOTONIC's. */
static int64_t compare_clocks(const struct tracer *tracer)
{
    enum { TRIES = 3 };
    uint64_t best = UINT64_MAX;
    int64_t offset = 0;
    for (int i = 0; i < TRIES; i++) {
        uint64_t before = clock_now(CLOCK_MONOTONIC), theirs = tracer->now();
        uint64_t took = clock_now(CLOCK_MONOTONIC) - before;
        if (took < best) {
            best = took;
            offset = (int64_t)(before + took / 2 - theirs);
        }
    }
    return offset;
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

static void note_lost(const struct session *session, uint64_t now, uint64_t events, enum sluice_profile_reason reason)
{
    if (events > 0) {
        file_add(session->file, &(struct sluice_profile_record){.kind = SLUICE_PROFILE_LOST,
                                                                .device = UINT32_MAX,
                                                                .start = session->ticked,
                                                                .end = now,
                                                                .loss = {.events = events, .reason = reason}});
    }
}

/* What the vendor's library had no room for, and what cannot have times. */
static void note_dropped(const struct session *session, uint64_t now)
{
    const struct tracer *tracer = session->tracer;
    note_lost(session, now, tracer->dropped(), SLUICE_PROFILE_BUFFERS);
    note_lost(session, now, tracer->unseen != NULL ? tracer->unseen() : 0, SLUICE_PROFILE_RECORDED);
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

static enum sluice_profile_reason collect(struct session *session, bool on, char *words)
{
    session->collecting = on;
    collectives_collect(on && (session->control->wanted & SLUICE_PROFILE_WANT_COLLECTIVES) != 0);
    if ((session->control->wanted & SLUICE_PROFILE_WANT_SAMPLES) != 0) {
        session->samples += samples_collect(session->file, on);
    }
    return session->tracer->collect(session->control->wanted, on, words, MAX_WORDS);
}

/* The governor's decision, carried out. Without a measured price, the time without collection measures it. */
static void obey(struct session *session, uint64_t now)
{
    if (session->over || session->governor.on == session->collecting) {
        return;
    }
    if (session->governor.on) {
        end_gap(session, now);
        session->clock = compare_clocks(session->tracer); /* nobody did in a long gap */
    } else {
        session->gap = now;
    }
    char words[MAX_WORDS];
    collect(session, session->governor.on, words);
    if (!session->priced) {
        time_into(session, session->collecting ? &with : &without);
    }
}

static void price(struct session *session, uint64_t now)
{
    bool enough = launches_timed(&with) == GOVERNOR_SAMPLES || now - session->timed_since > WITH_NS;
    if (!session->timing || !session->collecting || !enough) {
        return;
    }
    session->priced =
        governor_measure(&session->governor, without.ns, launches_timed(&without), with.ns, launches_timed(&with));
    time_into(session, NULL);
}

static void note_demand(struct session *session, uint64_t now)
{
    struct demand demand = demand_now();
    uint64_t passed = now - session->clocked;
    session->usable = 1 - (double)demand_lost(&session->demand, &demand, passed) / (double)passed;
    session->demand = demand;
}

static void get_collected(struct session *session, uint64_t now)
{
    session->tracer->flush(false);
    session->clock = compare_clocks(session->tracer);
    session->events += collectives_write(session->file);
    session->samples += samples_write(session->file);
    note_dropped(session, now);
}

/* In a long gap it costs next to nothing: else a program that has little time would never earn the end of the gap. */
static void tick(struct session *session, uint64_t now)
{
    if (session->gap == 0 || now - session->gap < LATE_NS) {
        get_collected(session, now);
    }
    if (now - session->clocked >= CLOCK_NS) {
        note_demand(session, now);
        note_clock(session, now);
    }
    file_flush(session->file);
    session->ticked = now;
}

/*
 * What has passed since the last look, without the time that the program waited for a processor: on a busy node a part
 * of the clock's time would be a larger part of the program's.
 */
static uint64_t usable_time(const struct session *session, uint64_t now)
{
    return (uint64_t)((double)(now - session->governor.looked) * session->usable);
}

static void look(struct session *session, uint64_t now)
{
    uint64_t cpu = clock_now(CLOCK_THREAD_CPUTIME_ID);
    price(session, now);
    uint64_t own = cpu - session->cpu + session->samples * SAMPLES_PRICE;
    own += session->tracer->spent != NULL ? session->tracer->spent() : 0;
    governor_look(&session->governor, now, usable_time(session, now), session->events, own);
    session->cpu = cpu;
    session->events = session->samples = 0;
    obey(session, now);
}

static void drain(struct session *session, uint64_t wait_ns)
{
    struct buffer buffer;
    for (int i = 0; i < MOST_AT_ONCE && buffers_wait(&buffer, wait_ns); i++) {
        session->events += session->tracer->write(session->file, &buffer, session->clock);
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
    for (int ms = 0; ms < WITHOUT_NS / MS && launches_timed(&without) < GOVERNOR_SAMPLES; ms++) {
        nanosleep(&while_waiting, NULL);
    }
}

static void finish(struct session *session, enum sluice_profile_reason reason, const char *words)
{
    uint64_t now = clock_now(CLOCK_MONOTONIC);
    session->over = true;
    char unused[MAX_WORDS];
    collect(session, false, unused);
    time_into(session, NULL);
    session->tracer->flush(true);
    drain(session, 0);
    collectives_write(session->file);
    end_gap(session, now);
    note_dropped(session, now);
    note_clock(session, now);
    session->tracer->close();
    atomic_store(&file_now, NULL);
    file_end(session->file, reason, *words != 0 ? words : NULL, session->governor.cost);
    buffers_rest();
}

/* ---- its start ---- */

static struct profile_file *open_file(int folder, const struct session *session)
{
    const struct sluice_profile_control *control = session->control;
    struct sluice_profile_header header = {.vendor = session->tracer->vendor,
                                           .number = control->number,
                                           .wanted = control->wanted,
                                           .budget = control->budget != 0 ? control->budget : DEFAULT_BUDGET};
    return file_create(folder, &header, control->bytes != 0 ? control->bytes : DEFAULT_BYTES);
}

static enum sluice_profile_reason open_tracer(const struct tracer *tracer, char *words)
{
    if (!buffers_open()) {
        snprintf(words, MAX_WORDS, "no memory for buffers");
        return SLUICE_PROFILE_LIBRARY;
    }
    return tracer->open(words, MAX_WORDS);
}

static void begin(struct session *session)
{
    session->ticked = clock_now(CLOCK_MONOTONIC);
    session->cpu = clock_now(CLOCK_THREAD_CPUTIME_ID);
    session->demand = demand_now();
    session->usable = 1;
    session->clock = compare_clocks(session->tracer);
    governor_start(&session->governor, session->control->budget != 0 ? session->control->budget : DEFAULT_BUDGET,
                   session->ticked);
    samples_begin();
    note_clock(session, session->ticked);
    session->tracer->note_devices(session->file);
}

void session_run(const struct tracer *tracer, int folder, const struct sluice_profile_control *control,
                 session_asked *asked)
{
    struct session session = {.tracer = tracer, .control = control, .asked = asked};
    char words[MAX_WORDS] = "";
    session.file = open_file(folder, &session);
    if (session.file == NULL) {
        return; /* there is nowhere to say why */
    }
    atomic_store(&file_now, session.file);
    enum sluice_profile_reason reason = open_tracer(tracer, words);
    if (reason != 0) {
        atomic_store(&file_now, NULL);
        file_end(session.file, reason, words, 0);
        return;
    }
    time_without(&session);
    begin(&session);
    reason = collect(&session, true, words);
    time_into(&session, &with);
    reason = reason != 0 ? reason : trace(&session);
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
    collectives_abandon();
    if (file != NULL) {
        file_abandon(file);
    }
}
