/* SPDX-License-Identifier: Apache-2.0 */
#include "watch.h"

#include <inttypes.h>
#include <string.h>

enum {
    HANG_MS = 15000,   /* between two beats a driver may hang for 10 s; a prolog waits for 20 s */
    START_MS = 120000, /* the first start after a boot measures driver contexts */
    MINUTE_MS = 60000,
};

static const char stalled[] = "stalled"; /* the cause of an outage in which the agent lives */

void guard_start(struct guard_watch *watch, int64_t now)
{
    memset(watch, 0, sizeof *watch);
    watch->bound = GUARD_BOUND_MS;
    watch->started = now;
    for (int vendor = 0; vendor < GUARD_VENDORS; vendor++)
        watch->vendors[vendor].sampled = now;
}

void guard_agent_starts(struct guard_watch *watch, int64_t now)
{
    watch->started = now;
    watch->ready = false;
    for (int vendor = 0; vendor < GUARD_VENDORS; vendor++)
        watch->vendors[vendor].loops = false;
    for (uint32_t i = 0; i < watch->count; i++)
        watch->jobs[i].named = false;
}

static struct guard_outage *new_outage(struct guard_watch *watch, const struct guard_tools *tools, const char *cause,
                                       int64_t began)
{
    if (watch->outage_count == GUARD_OUTAGES)
        memmove(watch->outages, watch->outages + 1, sizeof *watch->outages * --watch->outage_count);
    struct guard_outage *outage = &watch->outages[watch->outage_count++];
    *outage =
        (struct guard_outage){.number = ++watch->last_outage, .when = tools->today(), .began = began, .lasted = -1};
    snprintf(outage->cause, sizeof outage->cause, "%s", cause);
    watch->changed = true;
    return outage;
}

static struct guard_outage *open_outage(struct guard_watch *watch)
{
    struct guard_outage *last = watch->outage_count ? &watch->outages[watch->outage_count - 1] : NULL;
    return last && last->lasted < 0 ? last : NULL;
}

static void name(struct guard_names *names, uint32_t job)
{
    for (uint32_t i = 0; i < names->count; i++)
        if (names->jobs[i] == job)
            return;
    if (names->count < GUARD_NAMED)
        names->jobs[names->count++] = job;
}

static void unname(struct guard_names *names, uint32_t job)
{
    for (uint32_t i = names->count; i-- > 0;)
        if (names->jobs[i] == job)
            memmove(names->jobs + i, names->jobs + i + 1, sizeof *names->jobs * (--names->count - i));
}

void guard_agent_lost(struct guard_watch *watch, const struct guard_tools *tools, const char *cause,
                      const struct guard_names *about, int64_t now)
{
    struct guard_outage *outage = open_outage(watch);
    if (outage && strcmp(outage->cause, stalled) == 0)
        snprintf(outage->cause, sizeof outage->cause, "%s", cause); /* the agent that hung is dead now: one outage */
    else
        outage = new_outage(watch, tools, cause, now);
    outage->about = *about;
    watch->changed = true;
    watch->ready = false;
}

static struct guard_job *find(struct guard_watch *watch, uint32_t number)
{
    for (uint32_t i = 0; i < watch->count; i++)
        if (watch->jobs[i].number == number)
            return &watch->jobs[i];
    return NULL;
}

static void drop(struct guard_watch *watch, struct guard_job *job)
{
    *job = watch->jobs[--watch->count];
    watch->changed = true;
}

/* False if it is to be tried again. */
static bool thaw(struct guard_watch *watch, const struct guard_tools *tools, struct guard_job *job)
{
    if (job->frozen && tools->thaw(job->path) == GUARD_FAILED)
        return false;
    watch->changed |= job->frozen;
    job->frozen = false;
    return true;
}

static void add(struct guard_watch *watch, const struct guard_tools *tools, const struct guard_message *message,
                int64_t now)
{
    struct guard_job *job = find(watch, message->job);
    if (!job) {
        if (watch->count == GUARD_JOBS)
            return;
        job = &watch->jobs[watch->count++];
        *job = (struct guard_job){.number = message->job, .since = now};
    } else if (strcmp(job->path, message->path) != 0) {
        thaw(watch, tools, job); /* another run of the job */
        job->since = now;
    }
    watch->changed |= job->vendors != message->vendors || strcmp(job->path, message->path) != 0;
    job->named = true;
    job->vendors = message->vendors;
    memcpy(job->path, message->path, sizeof job->path);
}

static void forget_unnamed(struct guard_watch *watch, const struct guard_tools *tools)
{
    for (uint32_t i = watch->count; i-- > 0;)
        if (!watch->jobs[i].named && thaw(watch, tools, &watch->jobs[i]))
            drop(watch, &watch->jobs[i]);
}

void guard_take(struct guard_watch *watch, const struct guard_tools *tools, const struct guard_message *message,
                int64_t now)
{
    struct guard_job *job;
    switch (message->kind) {
    case GUARD_READY:
        watch->ready = true;
        forget_unnamed(watch, tools);
        break;
    case GUARD_SAMPLE:
        watch->vendors[message->vendor].sampled = now; /* fall through */
    case GUARD_BEAT:
        watch->vendors[message->vendor].beat = now;
        watch->vendors[message->vendor].loops = true;
        break;
    case GUARD_WATCH:
        add(watch, tools, message, now);
        break;
    case GUARD_FORGET:
        job = find(watch, message->job);
        if (job && thaw(watch, tools, job))
            drop(watch, job);
        break;
    case GUARD_BOUND:
        watch->bound = 1000 * (int64_t)message->seconds;
        break;
    }
}

/* When the job was last sampled: the oldest time of its vendors. */
static int64_t sampled(const struct guard_watch *watch, const struct guard_job *job)
{
    int64_t first = INT64_MAX;
    for (int vendor = 0; vendor < GUARD_VENDORS; vendor++)
        if (job->vendors & 1U << vendor && watch->vendors[vendor].sampled < first)
            first = watch->vendors[vendor].sampled;
    return first;
}

/* False where the job has ended. */
static bool plan_freeze(struct guard_watch *watch, const struct guard_tools *tools, struct guard_job *job, int64_t now)
{
    int64_t began = sampled(watch, job) > job->since ? sampled(watch, job) : job->since;
    enum guard_frost found = tools->look(job->path);
    if (found == GUARD_GONE)
        return false;
    job->since = now;
    if (found != GUARD_DONE)
        return true; /* tried again after another bound */
    struct guard_outage *outage = open_outage(watch);
    if (!outage)
        outage = new_outage(watch, tools, stalled, began);
    name(&outage->frozen, job->number);
    job->due = job->frozen = watch->changed = true;
    return true;
}

static void not_frozen(struct guard_watch *watch, struct guard_job *job)
{
    struct guard_outage *outage = open_outage(watch);
    if (outage)
        unname(&outage->frozen, job->number);
    job->frozen = false;
    watch->changed = true;
}

/* A guard that is killed between this and the file leaves nothing frozen of which the next one does not know. */
static void freeze_planned(struct guard_watch *watch, const struct guard_tools *tools)
{
    tools->save();
    for (uint32_t i = watch->count; i-- > 0;) {
        struct guard_job *job = &watch->jobs[i];
        enum guard_frost done = job->due ? tools->freeze(job->path) : GUARD_DONE;
        job->due = false;
        if (done != GUARD_DONE)
            not_frozen(watch, job);
        if (done == GUARD_GONE)
            drop(watch, job);
    }
}

void guard_freeze_again(struct guard_watch *watch, const struct guard_tools *tools)
{
    for (uint32_t i = watch->count; i-- > 0;)
        if (watch->jobs[i].frozen && tools->freeze(watch->jobs[i].path) == GUARD_GONE)
            drop(watch, &watch->jobs[i]);
}

static bool is_watched_again(const struct guard_watch *watch, const struct guard_outage *outage)
{
    bool loops = false;
    for (int vendor = 0; vendor < GUARD_VENDORS; vendor++) {
        if (watch->vendors[vendor].sampled > outage->began)
            return true;
        loops |= watch->vendors[vendor].loops;
    }
    return watch->ready && !loops; /* a node without GPUs */
}

static void close_outages(struct guard_watch *watch, int64_t now)
{
    for (uint32_t i = 0; i < watch->count; i++)
        if (watch->jobs[i].frozen)
            return;
    struct guard_outage *last = open_outage(watch);
    if (!last || !is_watched_again(watch, last))
        return;
    for (uint32_t i = 0; i < watch->outage_count; i++)
        if (watch->outages[i].lasted < 0)
            watch->outages[i].lasted = now - watch->outages[i].began;
    watch->changed = true;
}

void guard_tick(struct guard_watch *watch, const struct guard_tools *tools, int64_t now)
{
    uint32_t before = watch->last_outage;
    bool planned = false;
    for (uint32_t i = watch->count; i-- > 0;) {
        struct guard_job *job = &watch->jobs[i];
        int64_t seen = sampled(watch, job);
        if (job->frozen && (seen > job->since || watch->bound == 0))
            thaw(watch, tools, job);
        else if (!job->frozen && watch->bound > 0 && now - seen > watch->bound && now - job->since > watch->bound &&
                 !plan_freeze(watch, tools, job, now))
            drop(watch, job);
        else
            planned |= job->due;
    }
    if (planned)
        freeze_planned(watch, tools);
    struct guard_outage *outage = open_outage(watch);
    if (outage && outage->number > before && outage->frozen.count == 0) { /* nothing could be frozen after all */
        watch->outage_count--;
        watch->last_outage = before;
    }
    close_outages(watch, now);
}

bool guard_hangs(const struct guard_watch *watch, int64_t now)
{
    bool hangs = !watch->ready && now - watch->started > START_MS;
    for (int vendor = 0; vendor < GUARD_VENDORS; vendor++)
        hangs |= watch->vendors[vendor].loops && now - watch->vendors[vendor].beat > HANG_MS;
    return hangs;
}

void guard_release(struct guard_watch *watch, const struct guard_tools *tools)
{
    for (uint32_t i = 0; i < watch->count; i++)
        thaw(watch, tools, &watch->jobs[i]);
}

uint32_t guard_deaths(const struct guard_watch *watch, int64_t today)
{
    uint32_t deaths = 0;
    for (uint32_t i = 0; i < watch->outage_count; i++) {
        int64_t ago = today - watch->outages[i].when; /* below 0: the clock was set back */
        deaths += strcmp(watch->outages[i].cause, stalled) != 0 && ago >= 0 && ago < MINUTE_MS;
    }
    return deaths;
}

/* ---- the file ---- */

static void save_names(const struct guard_names *names, FILE *file)
{
    for (uint32_t i = 0; i < names->count; i++)
        fprintf(file, "%s%" PRIu32, i ? "," : "", names->jobs[i]);
    if (names->count == 0)
        fputc('-', file);
}

void guard_save(const struct guard_watch *watch, FILE *file)
{
    fputs("sluice-guard 1\n", file);
    for (uint32_t i = 0; i < watch->count; i++) {
        const struct guard_job *job = &watch->jobs[i];
        fprintf(file, "%s %" PRIu32 " %u %s\n", job->frozen ? "frozen" : "watched", job->number, job->vendors,
                job->path);
    }
    for (uint32_t i = 0; i < watch->outage_count; i++) {
        const struct guard_outage *outage = &watch->outages[i];
        fprintf(file, "outage %" PRIu32 " %" PRId64 " %s %" PRId64 " ", outage->number, outage->when, outage->cause,
                outage->lasted);
        save_names(&outage->frozen, file);
        fputc(' ', file);
        save_names(&outage->about, file);
        fputc('\n', file);
    }
}

static bool load_names(const char *text, struct guard_names *names)
{
    names->count = 0;
    if (strcmp(text, "-") == 0)
        return true;
    for (int size = 0; names->count < GUARD_NAMED; text += size) {
        uint32_t job;
        size = 0;
        if (sscanf(text, "%10" SCNu32 "%n", &job, &size) != 1 || size == 0)
            return false;
        names->jobs[names->count++] = job;
        if (!text[size])
            return true;
        if (text[size++] != ',')
            return false;
    }
    return false;
}

static void load_job(struct guard_watch *watch, const char *line, int64_t now)
{
    struct guard_job job = {.since = now};
    char kind[8];
    if (watch->count == GUARD_JOBS ||
        sscanf(line, "%7s %10" SCNu32 " %1u %255s", kind, &job.number, &job.vendors, job.path) != 4)
        return;
    job.frozen = strcmp(kind, "frozen") == 0;
    if ((job.frozen || strcmp(kind, "watched") == 0) && job.vendors > 0 && job.vendors < 1U << GUARD_VENDORS &&
        guard_path_is_job(job.path) && !find(watch, job.number))
        watch->jobs[watch->count++] = job;
}

static void load_outage(struct guard_watch *watch, const char *line, int64_t now)
{
    enum { NAMES = 11 * GUARD_NAMED + 1 };
    struct guard_outage outage = {.began = now};
    char frozen[NAMES + 1], about[NAMES + 1];
    _Static_assert(NAMES == 353, "the width below");
    if (watch->outage_count < GUARD_OUTAGES &&
        sscanf(line, "outage %10" SCNu32 " %15" SCNd64 " %15s %12" SCNd64 " %353s %353s", &outage.number, &outage.when,
               outage.cause, &outage.lasted, frozen, about) == 6 &&
        load_names(frozen, &outage.frozen) && load_names(about, &outage.about)) {
        watch->outages[watch->outage_count++] = outage;
        watch->last_outage = outage.number;
    }
}

void guard_load(struct guard_watch *watch, FILE *file, int64_t now)
{
    char line[1024];
    if (!fgets(line, sizeof line, file) || strcmp(line, "sluice-guard 1\n") != 0)
        return;
    while (fgets(line, sizeof line, file)) {
        load_job(watch, line, now);
        load_outage(watch, line, now);
    }
}
