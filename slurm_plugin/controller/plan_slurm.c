/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The planner inside slurmctld: a thread that takes a picture of queue and cluster under read locks, plans it outside
 * of all locks, publishes the plan, and starts what should start now (start_slurm.c). See plan.h.
 */
#include "controller/planner_slurm.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "controller/clock.h"
#include "controller/controller.h"
#include "controller/decision.h"
#include "controller/mirror.h"
#include "controller/request.h"
#include "controller/settings.h"
#include "controller/status.h"
#include "src/common/xstring.h"
#include "src/slurmctld/locks.h"

enum {
    MAX_TASKS = 256,              /* of one array that are planned at a time */
    NO_LIMIT_S = 365 * 24 * 3600, /* as sched/backfill takes jobs without a time limit */
    INTERVAL_MS = 1000,           /* until the policy is known */
    LOOK_MS = 1000,               /* between looks at the level while nothing is due */
    VALID_S = 30,                 /* a plan is trusted for so long at least */
    LOCK_SHARE = 20,              /* the picture takes one part in so many of the time */
    HOLD_MS = 100,                /* the write locks are held for so long without a break */
    STUBBORN = 5,                 /* starts that Slurm refuses in a row until a job is left to stock for a while */
    STUBBORN_S = 60,
    MAX_STUBBORN = 256,
    SHOWN_S = 30,     /* an expected start that is off by more is corrected where users see it */
    MAX_WINDOWS = 64, /* reservations of Slurm's that are told apart */
};

/* What the planner knows of a pending job beside the queue's entry. */
struct extra {
    bool usable;
    uint32_t tasks;              /* that may start: of an array as many as its user lets run at once */
    enum sluice_job_stock stock; /* why Slurm alone finds it nodes */
    uint32_t rank;
    struct sluice_request request;
    size_t words; /* of its allowed nodes: offset in `words` */
};

/* A job that should have started but did not. */
struct stubborn {
    uint32_t job_id;
    uint32_t failures;
    int64_t until_s;
    bool seen;
};

/* Nodes that a reservation of Slurm's keeps from a moment on. */
struct window {
    int64_t start_s;
    bitstr_t *nodes;
};

/* One element of the order of planning: a job, an array's tasks or a gang. */
struct unit {
    uint32_t tier, priority, id;
    uint32_t index; /* in the queue; UINT32_MAX: a gang */
    const struct sluice_gang_unit *gang;
};

static struct {
    pthread_t thread;
    bool running;
    pthread_mutex_t lock;
    pthread_cond_t wakened;
    bool stop, woken;

    /* The thread's own. */
    struct sluice_planner *planner;
    struct sluice_mirror *mirror;
    struct sluice_queue *queue;
    uint64_t generation;
    struct extra *extras;
    uint32_t extra_room;
    uint64_t *words; /* allowed nodes of all pending jobs */
    size_t words_used, words_room;
    uint64_t *usable, *busy, *asleep; /* nodes; node_words each */
    uint64_t *features;               /* 3 * node_words */
    size_t node_words;
    struct window windows[MAX_WINDOWS];
    uint32_t window_count;
    struct sluice_backfill_running *running_jobs;
    uint32_t running_count, running_room;
    struct sluice_plan_job *jobs; /* the plan's entries, in its order ... */
    uint32_t *job_index;          /* ... and which of the queue's pending jobs they are */
    uint32_t job_count, job_room, job_index_room;
    struct unit *units;
    uint32_t unit_count, unit_room;
    struct stubborn *stubborn;
    uint32_t stubborn_count, stubborn_room;
    bool failed_memory;
    bool accrual_lost; /* of some job in the picture */
    bool active;       /* the level was place in the last pass */
    bool left;         /* nobody is held any more, since the level is below place */
} planner = {.lock = PTHREAD_MUTEX_INITIALIZER, .wakened = PTHREAD_COND_INITIALIZER};

/* Grow an array to `wanted` elements; false: no memory, and it is as it was. */
static bool grow(void *array, uint32_t *room, uint32_t wanted, size_t size)
{
    if (wanted <= *room)
        return true;
    uint32_t larger = wanted < 256 ? 256 : wanted + wanted / 2;
    void **pointer = array, *moved = realloc(*pointer, larger * size);
    planner.failed_memory |= !moved;
    if (!moved)
        return false;
    *pointer = moved;
    *room = larger;
    return true;
}

/* ---- the picture: under the read locks ---- */

static void copy_words(uint64_t *to, bitstr_t *bitmap)
{
    size_t count = 0;
    const uint64_t *from = bitmap ? sluice_bitmap_words(bitmap, &count) : NULL;
    memset(to, 0, planner.node_words * sizeof *to);
    memcpy(to, from ? from : to, (count < planner.node_words ? count : planner.node_words) * sizeof *to);
}

static void add_words(uint64_t *words, bitstr_t *bitmap)
{
    size_t count = 0;
    const uint64_t *from = bitmap ? sluice_bitmap_words(bitmap, &count) : NULL;
    for (size_t i = 0; i < planner.node_words && i < count; i++)
        words[i] |= from[i];
}

static void and_words(uint64_t *words, bitstr_t *bitmap, bool with)
{
    size_t count = 0;
    const uint64_t *from = bitmap ? sluice_bitmap_words(bitmap, &count) : NULL;
    for (size_t i = 0; i < planner.node_words; i++) {
        uint64_t word = from && i < count ? from[i] : 0;
        words[i] &= with ? word : ~word;
    }
}

static int add_window(void *item, void *argument)
{
    slurmctld_resv_t *resv = item;
    const int64_t *now_s = argument;
    if (!resv->node_bitmap || resv->end_time <= *now_s)
        return 0;
    struct window window = {.start_s = resv->start_time, .nodes = resv->node_bitmap};
    if (planner.window_count == MAX_WINDOWS) { /* more than can be told apart: as if it began now */
        and_words(planner.usable, resv->node_bitmap, false);
        return 0;
    }
    planner.windows[planner.window_count++] = window;
    return 0;
}

/* Which nodes may be used at all, and which not at this moment. */
static bool see_nodes(int64_t now_s)
{
    size_t words = ((size_t)node_record_count + 63) / 64;
    if (words != planner.node_words) {
        uint64_t *usable = realloc(planner.usable, (words + 1) * sizeof *usable);
        planner.usable = usable ? usable : planner.usable;
        uint64_t *busy = realloc(planner.busy, (words + 1) * sizeof *busy);
        planner.busy = busy ? busy : planner.busy;
        uint64_t *asleep = realloc(planner.asleep, (words + 1) * sizeof *asleep);
        planner.asleep = asleep ? asleep : planner.asleep;
        uint64_t *features = realloc(planner.features, 3 * (words + 1) * sizeof *features);
        planner.features = features ? features : planner.features;
        planner.node_words = usable && busy && asleep && features ? words : 0;
        if (!planner.node_words)
            return false;
    }
    planner.window_count = 0;
    copy_words(planner.usable, avail_node_bitmap);
    copy_words(planner.busy, cg_node_bitmap);
    copy_words(planner.asleep, SLUICE_POWERED_DOWN);
    add_words(planner.asleep, booting_node_bitmap);
    if (resv_list)
        list_for_each(resv_list, add_window, &now_s);
    return true;
}

/* One feature's nodes, those that the features before it left, and those that the open parenthesis leaves. */
struct featuring {
    const char *name;
    uint64_t *one, *all, *group;
    uint16_t depth;        /* of parentheses, as Slurm counts: the last feature of one is outside */
    bool or_one, or_group; /* what stands before this feature, and before its parenthesis: OR, else AND */
};

static void combine(uint64_t *left, const uint64_t *right, bool or_them)
{
    for (size_t i = 0; i < planner.node_words; i++)
        left[i] = or_them ? left[i] | right[i] : left[i] & right[i];
}

static void fill(uint64_t *words)
{
    memset(words, 0xff, planner.node_words * sizeof *words);
}

static int copy_feature(void *item, void *argument)
{
    const node_feature_t *feature = item;
    struct featuring *featuring = argument;
    if (xstrcmp(feature->name, featuring->name))
        return 0;
    copy_words(featuring->one, feature->node_bitmap);
    return -1;
}

/* As valid_feature_counts (node_scheduler.c) reads them: from left to right, what is in parentheses by itself. */
static int add_feature(void *item, void *argument)
{
    const job_feature_t *feature = item;
    struct featuring *featuring = argument;
    featuring->name = feature->name;
    memset(featuring->one, 0, planner.node_words * sizeof *featuring->one);
    list_for_each(active_feature_list, copy_feature, featuring);
    if (featuring->depth < feature->paren) {
        featuring->or_group = featuring->or_one;
        featuring->or_one = false;
        fill(featuring->group);
    }
    bool inside = featuring->depth || feature->paren;
    combine(inside ? featuring->group : featuring->all, featuring->one, featuring->or_one);
    if (featuring->depth > feature->paren)
        combine(featuring->all, featuring->group, featuring->or_group);
    featuring->or_one = feature->op_code == FEATURE_OP_OR;
    featuring->depth = feature->paren;
    return 0;
}

/* Keep the nodes with the job's features; features in ways that requests cannot have leave the job to stock. */
static void keep_features(uint64_t *words, const job_record_t *job)
{
    if (!job->details->feature_list)
        return;
    struct featuring featuring = {.one = planner.features,
                                  .all = planner.features + planner.node_words,
                                  .group = planner.features + 2 * planner.node_words};
    fill(featuring.all);
    list_for_each(job->details->feature_list, add_feature, &featuring);
    combine(words, featuring.all, false);
}

static int64_t limit_of(const struct sluice_queue_job *entry)
{
    return entry->limit_s > 0 && entry->limit_s < NO_LIMIT_S ? entry->limit_s : NO_LIMIT_S;
}

/* The nodes that a job may use: of its partition, up, not excluded, with its features, not reserved by others. */
static bool allow_nodes(struct extra *extra, const struct sluice_queue *queue, const struct sluice_queue_job *entry,
                        job_record_t *job)
{
    const struct sluice_queue_partition *partition = &queue->partitions[queue->choices[entry->first_choice].partition];
    if (planner.words_used + planner.node_words > planner.words_room) {
        size_t room = 2 * planner.words_room + 1024 * planner.node_words;
        uint64_t *moved = realloc(planner.words, room * sizeof *moved);
        planner.failed_memory |= !moved;
        if (!moved)
            return false;
        planner.words = moved;
        planner.words_room = room;
    }
    uint64_t *words = planner.words + planner.words_used;
    for (size_t i = 0; i < planner.node_words; i++)
        words[i] = planner.usable[i] & (i < queue->node_words ? partition->nodes[i] : 0);
    if (job->details->exc_node_bitmap)
        and_words(words, job->details->exc_node_bitmap, false);
    keep_features(words, job);
    for (uint32_t w = 0; w < planner.window_count; w++)
        if (planner.windows[w].start_s < queue->taken_s + limit_of(entry))
            and_words(words, planner.windows[w].nodes, false);
    extra->words = planner.words_used;
    planner.words_used += planner.node_words;
    return true;
}

/* Reasons for which room is what a job waits for, or which the planner has already looked at itself (flags). */
static bool waits_for_room(const struct sluice_queue_job *entry)
{
    switch (entry->reason) {
    case WAIT_NO_REASON:
    case WAIT_RESOURCES:
    case WAIT_PRIORITY:
    case WAIT_NODE_NOT_AVAIL:
    case WAIT_TIME:
    case WAIT_DEPENDENCY:
    case WAIT_RESERVATION:
    case WAIT_ARRAY_TASK_LIMIT: /* so many tasks are planned as it allows */
    case WAIT_HELD:             /* a gang's; others have the flag HELD */
        return true;
    default:
        return false;
    }
}

static void see_running(const struct sluice_queue_job *entry, int64_t now_s)
{
    uint64_t ids[64];
    uint32_t count = sluice_mirror_allocations(planner.mirror, entry->id, ids, 64);
    if (!grow(&planner.running_jobs, &planner.running_room, planner.running_count + count,
              sizeof *planner.running_jobs))
        return;
    int64_t end_s = entry->end_s == INT64_MAX || entry->end_s > now_s + NO_LIMIT_S ? now_s + NO_LIMIT_S : entry->end_s;
    for (uint32_t i = 0; i < count && i < 64; i++)
        planner.running_jobs[planner.running_count++] =
            (struct sluice_backfill_running){.allocation = ids[i], .end_s = end_s};
}

static void see_pending(const struct sluice_queue *queue, const struct sluice_queue_job *entry, job_record_t *job)
{
    uint32_t index = queue->pending_count - 1;
    struct sluice_job_request made;
    if (!grow(&planner.extras, &planner.extra_room, queue->pending_count, sizeof *planner.extras))
        return;
    struct extra *extra = &planner.extras[index];
    *extra = (struct extra){.tasks = entry->tasks, .rank = sluice_job_rank(job)};
    if (job->array_recs && job->array_recs->max_run_tasks) {
        uint32_t most = job->array_recs->max_run_tasks, now = job->array_recs->tot_run_tasks;
        uint32_t left = most > now ? most - now : 0;
        extra->tasks = left < extra->tasks ? left : extra->tasks;
    }
    uint32_t never = SLUICE_QUEUE_HETEROGENEOUS | SLUICE_QUEUE_RESERVATION | SLUICE_QUEUE_REQUIRED_NODES;
    if (entry->choices && job->details && !job->fed_details && !(entry->flags & never)) {
        sluice_job_request_make(planner.mirror, job, 0, 0, 0, &made, NULL);
        extra->request = made.wanted;
        extra->stock = made.fit == SLUICE_JOB_STOCK ? made.reason : SLUICE_STOCK_NONE;
        extra->usable = made.fit != SLUICE_JOB_STOCK && allow_nodes(extra, queue, entry, job);
    }
    if (entry->flags & SLUICE_QUEUE_REQUIRED_NODES)
        extra->stock = SLUICE_STOCK_REQUIRED_NODES;
    if (entry->flags & SLUICE_QUEUE_HETEROGENEOUS)
        extra->stock = SLUICE_STOCK_HET;
    planner.accrual_lost |= sluice_accrual_lost(job);
    sluice_gang_picture_job(entry, index, true, extra->usable, job);
}

static void see_job(void *argument, const struct sluice_queue *queue, const struct sluice_queue_job *entry,
                    struct job_record *job)
{
    const int64_t *now_s = argument;
    if (IS_JOB_PENDING(job)) {
        see_pending(queue, entry, job);
        return;
    }
    see_running(entry, *now_s);
    sluice_gang_picture_job(entry, 0, false, true, job);
}

static bool take_picture(const struct sluice_settings *settings, uint64_t *lock_us)
{
    struct sluice_error_text text = {{0}};
    int64_t now_s = time(NULL);
    planner.accrual_lost = false;
    if (!sluice_queue_lock())
        return false;
    uint64_t from = sluice_now_us();
    sluice_planner_begin(planner.planner);
    planner.running_count = 0;
    planner.words_used = 0;
    planner.failed_memory = false;
    sluice_gang_picture_begin(now_s, settings->rules);
    enum sluice_error failed = sluice_mirror_sync(planner.mirror, true, now_s, &text);
    if (!failed && see_nodes(now_s))
        sluice_queue_take(planner.queue, see_job, &now_s);
    else
        planner.failed_memory = true;
    sluice_queue_unlock();
    *lock_us = sluice_now_us() - from;
    if (failed || planner.failed_memory) {
        error("Sluice: the planner has no picture of the cluster: %s", failed ? text.text : "no memory");
        return false;
    }
    sluice_gang_picture_end();
    if (sluice_mirror_generation(planner.mirror) != planner.generation) {
        planner.generation = sluice_mirror_generation(planner.mirror);
        sluice_planner_forget(planner.planner);
    }
    return true;
}

/* ---- the order of planning ---- */

static int by_order(const void *a, const void *b)
{
    const struct unit *one = a, *other = b;
    if (one->tier != other->tier)
        return one->tier > other->tier ? -1 : 1;
    if (one->priority != other->priority)
        return one->priority > other->priority ? -1 : 1;
    return one->id < other->id ? -1 : one->id > other->id;
}

static struct stubborn *stubborn_of(uint32_t job_id)
{
    for (uint32_t i = 0; i < planner.stubborn_count; i++)
        if (planner.stubborn[i].job_id == job_id)
            return &planner.stubborn[i];
    return NULL;
}

static uint32_t tier_of(const struct sluice_queue_job *entry)
{
    return planner.queue->partitions[planner.queue->choices[entry->first_choice].partition].tier;
}

static bool add_unit(struct unit unit)
{
    if (!grow(&planner.units, &planner.unit_room, planner.unit_count + 1, sizeof *planner.units))
        return false;
    planner.units[planner.unit_count++] = unit;
    return true;
}

static bool is_plannable(uint32_t index)
{
    const struct sluice_queue_job *entry = &planner.queue->pending[index];
    uint32_t cannot = SLUICE_QUEUE_HELD | SLUICE_QUEUE_DEPENDENT | SLUICE_QUEUE_NOT_ELIGIBLE;
    if (!planner.extras[index].usable || sluice_gang_is_member(index) || entry->flags & cannot ||
        !waits_for_room(entry))
        return false;
    if (!planner.queue->partitions[planner.queue->choices[entry->first_choice].partition].up)
        return false;
    struct stubborn *stubborn = stubborn_of(entry->id);
    if (stubborn)
        stubborn->seen = true;
    return !stubborn || stubborn->until_s <= planner.queue->taken_s;
}

static void order_units(void)
{
    uint32_t gangs, index;
    planner.unit_count = 0;
    for (uint32_t i = 0; i < planner.stubborn_count; i++)
        planner.stubborn[i].seen = false;
    for (uint32_t i = 0; i < planner.queue->pending_count; i++) {
        const struct sluice_queue_job *entry = &planner.queue->pending[i];
        if (is_plannable(i))
            add_unit((struct unit){.tier = tier_of(entry),
                                   .priority = planner.queue->choices[entry->first_choice].priority,
                                   .id = entry->id,
                                   .index = i});
    }
    const struct sluice_gang_unit *gang = sluice_gang_units(&gangs);
    for (uint32_t i = 0; i < gangs; i++)
        if (sluice_gang_unit_task(&gang[i], 0, &index))
            add_unit((struct unit){.tier = gang[i].priority == UINT32_MAX ? UINT32_MAX
                                                                          : tier_of(&planner.queue->pending[index]),
                                   .priority = gang[i].priority,
                                   .id = gang[i].job_id,
                                   .index = UINT32_MAX,
                                   .gang = &gang[i]});
    uint32_t still = 0;
    for (uint32_t i = 0; i < planner.stubborn_count; i++)
        if (planner.stubborn[i].seen)
            planner.stubborn[still++] = planner.stubborn[i];
    planner.stubborn_count = still;
    qsort(planner.units, planner.unit_count, sizeof *planner.units, by_order);
}

static void add_job(uint32_t index, uint32_t group)
{
    const struct sluice_queue_job *entry = &planner.queue->pending[index];
    planner.job_index[planner.job_count] = index;
    struct sluice_plan_job *job = &planner.jobs[planner.job_count++];
    *job = (struct sluice_plan_job){.job_id = entry->id,
                                    .group = group,
                                    .rank = planner.extras[index].rank,
                                    .limit_s = limit_of(entry),
                                    .request = planner.extras[index].request};
    uint64_t *words = planner.words + planner.extras[index].words;
    /* Nodes that sleep or boot go last, and one request cannot say so: Slurm's own passes wake them, through the hook.
     * Nobody but the planner starts gangs. */
    for (size_t i = 0; !group && i < planner.node_words; i++)
        words[i] &= ~planner.asleep[i];
    job->request.allowed = words;
    job->request.allowed_words = planner.node_words;
}

/* The jobs in the order of planning, as many as `depth` allows; a gang is never cut. */
static void list_jobs(uint32_t depth)
{
    uint32_t index;
    planner.job_count = 0;
    if (!grow(&planner.jobs, &planner.job_room, SLUICE_MOST_PLANNED, sizeof *planner.jobs) ||
        !grow(&planner.job_index, &planner.job_index_room, SLUICE_MOST_PLANNED, sizeof *planner.job_index))
        return;
    for (uint32_t u = 0; u < planner.unit_count && planner.job_count < depth; u++) {
        const struct unit *unit = &planner.units[u];
        if (unit->gang) {
            uint32_t before = planner.job_count, i = 0;
            while (sluice_gang_unit_task(unit->gang, i, &index) && planner.job_count < SLUICE_MOST_PLANNED) {
                add_job(index, unit->gang->group);
                i++;
            }
            if (sluice_gang_unit_task(unit->gang, i, &index))
                planner.job_count = before;
            continue;
        }
        uint32_t tasks = planner.extras[unit->index].tasks;
        for (uint32_t i = 0; i < tasks && i < MAX_TASKS && planner.job_count < SLUICE_MOST_PLANNED; i++)
            add_job(unit->index, 0);
    }
}

/* ---- what the plan asks for ---- */

/* The plan's i-th entry in the queue. */
static const struct sluice_queue_job *entry_of(uint32_t i)
{
    return &planner.queue->pending[planner.job_index[i]];
}

static const char *partition_of(const struct sluice_queue_job *entry)
{
    const struct sluice_queue_choice *choice = &planner.queue->choices[entry->first_choice];
    return sluice_queue_name(planner.queue, planner.queue->partitions[choice->partition].name);
}

static const char *partition_of_job(uint32_t job_id)
{
    for (uint32_t i = 0; i < planner.job_count; i++)
        if (planner.jobs[i].job_id == job_id)
            return partition_of(entry_of(i));
    return NULL;
}

static void note_failure(uint32_t job_id)
{
    struct stubborn *stubborn = stubborn_of(job_id);
    if (!stubborn && planner.stubborn_count < MAX_STUBBORN &&
        grow(&planner.stubborn, &planner.stubborn_room, planner.stubborn_count + 1, sizeof *planner.stubborn)) {
        stubborn = &planner.stubborn[planner.stubborn_count++];
        *stubborn = (struct stubborn){.job_id = job_id};
    }
    if (stubborn && ++stubborn->failures >= STUBBORN) {
        stubborn->failures = 0;
        stubborn->until_s = planner.queue->taken_s + STUBBORN_S;
        debug("Sluice: JobId=%u does not start where there is room for it: left to Slurm for %d s", job_id,
              (int)STUBBORN_S);
    }
}

/* Start the single jobs that the plan has for now, in its order. */
static void start_jobs(const struct sluice_plan *plan)
{
    uint32_t job_id, group;
    struct sluice_plan_say say;
    bool locked = false;
    uint64_t since = 0;
    for (uint32_t i = 0; sluice_plan_entry(plan, i, &job_id, &group, &say); i++) {
        if (say.state != SLUICE_PLAN_NOW || group)
            continue;
        if (locked && sluice_now_us() - since > HOLD_MS * 1000) {
            sluice_start_unlock();
            locked = false;
        }
        if (!locked) {
            if (!(locked = sluice_start_lock()))
                return;
            since = sluice_now_us();
        }
        job_record_t *job = find_job_record(job_id);
        if (!job || !IS_JOB_PENDING(job))
            continue; /* a pass of Slurm's was faster, or its user changed his mind */
        enum sluice_start rc = sluice_start_job(job, partition_of(entry_of(i)));
        sluice_plan_count_start(rc == SLUICE_START_DONE);
        if (rc != SLUICE_START_DONE)
            note_failure(job_id);
    }
    if (locked)
        sluice_start_unlock();
}

/* Does squeue show another start than the reserved one? To the minute, so that the list of jobs does not change all the
 * time. */
static bool shows_other(const struct sluice_queue_job *entry, const struct sluice_plan_say *say)
{
    int64_t by = entry->start_s > say->start_s ? entry->start_s - say->start_s : say->start_s - entry->start_s;
    return say->state == SLUICE_PLAN_LATER && by > SHOWN_S;
}

/* squeue --start shows the reserved starts. Gangs show their own (sluice_gang_act). */
static void show_starts(const struct sluice_plan *plan)
{
    uint32_t job_id, group, before = 0;
    struct sluice_plan_say say;
    bool locked = false;
    for (uint32_t i = 0; sluice_plan_entry(plan, i, &job_id, &group, &say); i++) {
        bool again = job_id == before; /* an array shows its first task's */
        before = job_id;
        if (again || group || !shows_other(entry_of(i), &say))
            continue;
        if (!locked && !(locked = sluice_start_lock()))
            return;
        job_record_t *job = find_job_record(job_id);
        if (job && IS_JOB_PENDING(job)) {
            job->start_time = say.start_s;
            last_job_update = time(NULL);
        }
    }
    if (locked)
        sluice_start_unlock();
}

static const char *waits_for(const struct sluice_plan_say *say)
{
    if (say->state == SLUICE_PLAN_NOW)
        return NULL;
    if (say->state == SLUICE_PLAN_LATER)
        return "room is reserved for it from its expected start on";
    return "the room goes to jobs before it in the order";
}

/* Tell `sluice explain` what the plan has for each job. */
static void record(const struct sluice_plan *plan, int64_t now_s)
{
    struct sluice_decision_recorder *recorder = sluice_decision_shared();
    uint32_t job_id, group, before = 0;
    struct sluice_plan_say say;
    for (uint32_t i = 0; recorder && sluice_plan_entry(plan, i, &job_id, &group, &say); i++) {
        bool again = job_id == before;
        before = job_id;
        if (again)
            continue;
        struct sluice_decision_plan planned = {.job_id = job_id,
                                               .gang = group,
                                               .planned_s = now_s,
                                               .start_s = say.state == SLUICE_PLAN_UNKNOWN ? SLUICE_BACKFILL_NO_START
                                                                                           : say.start_s,
                                               .parts = say.parts,
                                               .part_count = say.part_count,
                                               .reason = waits_for(&say)};
        sluice_decision_planned(recorder, &planned);
    }
}

/* ... and why it has nothing for those that Slurm alone finds nodes. */
static void record_others(int64_t now_s)
{
    struct sluice_decision_recorder *recorder = sluice_decision_shared();
    for (uint32_t i = 0; recorder && i < planner.queue->pending_count; i++) {
        char reason[128];
        if (!planner.extras[i].stock)
            continue;
        snprintf(reason, sizeof reason, "left to Slurm's own scheduler (%s)",
                 sluice_job_stock_text(planner.extras[i].stock));
        struct sluice_decision_plan none = {.job_id = planner.queue->pending[i].id,
                                            .planned_s = now_s,
                                            .start_s = SLUICE_BACKFILL_NO_START,
                                            .reason = reason};
        sluice_decision_planned(recorder, &none);
    }
}

/* ---- passes ---- */

static enum sluice_error make_plan(uint32_t reservations, struct sluice_plan **plan, struct sluice_error_text *text)
{
    return sluice_planner_plan(planner.planner, sluice_mirror_cluster(planner.mirror), planner.queue->taken_s,
                               planner.running_jobs, planner.running_count, planner.jobs, planner.job_count,
                               reservations, planner.busy, planner.node_words, plan, text);
}

static void count(const struct sluice_plan_counts *counts)
{
    atomic_store(sluice_status_counter("plan.plans"), counts->plans);
    atomic_store(sluice_status_counter("plan.failures"), counts->failures);
    atomic_store(sluice_status_counter("plan.started"), counts->started);
    atomic_store(sluice_status_counter("plan.not_started"), counts->not_started);
    atomic_store(sluice_status_counter("plan.slipped"), counts->slipped);
    atomic_store(sluice_status_counter("plan.jobs"), counts->jobs);
    atomic_store(sluice_status_counter("plan.now"), counts->now);
    atomic_store(sluice_status_counter("plan.reserved"), counts->reserved);
    atomic_store(sluice_status_counter("plan.lock_us_last"), counts->lock_us_last);
    atomic_store(sluice_status_counter("plan.lock_us_max"), counts->lock_us_max);
    atomic_store(sluice_status_counter("plan.plan_us_max"), counts->plan_us_max);
    atomic_store(sluice_status_counter("plan.plan_us_last"), counts->plan_us_last);
}

static bool any(const uint64_t *words)
{
    uint64_t bits = 0;
    for (size_t i = 0; i < planner.node_words; i++)
        bits |= words[i];
    return bits != 0;
}

/* One pass; how long the next one has to wait at the least, in milliseconds. */
static uint64_t pass(const struct sluice_settings *settings, uint64_t interval_ms)
{
    struct sluice_error_text text = {{0}};
    struct sluice_plan *plan = NULL;
    uint64_t lock_us = 0;
    if (!take_picture(settings, &lock_us))
        return interval_ms;
    uint64_t from = sluice_now_us();
    const struct sluice_rules *rules = settings->rules;
    uint32_t depth = rules->backfill_depth ? rules->backfill_depth : SLUICE_MOST_PLANNED;
    order_units();
    list_jobs(depth);
    enum sluice_error failed = make_plan(rules->backfill_reservations, &plan, &text);
    uint64_t plan_us = sluice_now_us() - from;
    sluice_plan_count_pass(lock_us, plan_us, failed != SLUICE_OK);
    if (failed) {
        error("Sluice: no plan: %s", text.text[0] ? text.text : sluice_strerror(failed));
        return interval_ms;
    }
    bool place = settings->level >= SLUICE_LEVEL_PLACE;
    if (place && planner.accrual_lost)
        sluice_accrual_restore_all();
    if (place) {
        int64_t valid_s = VALID_S + (int64_t)(10 * interval_ms / 1000);
        struct sluice_plan *published = plan;
        sluice_plan_publish(planner.planner, published, valid_s); /* which gives it away */
        plan = sluice_plan_acquire(planner.queue->taken_s);
        if (plan && rules->deadlines)
            plan_us += sluice_outlook_follow(&(struct sluice_outlook_picture){.plan = plan,
                                                                              .queue = planner.queue,
                                                                              .mirror = planner.mirror,
                                                                              .usable = planner.usable,
                                                                              .node_words = planner.node_words,
                                                                              .running = planner.running_jobs,
                                                                              .running_count = planner.running_count,
                                                                              .jobs = planner.jobs,
                                                                              .job_count = planner.job_count,
                                                                              .valid_s = valid_s});
    }
    if (place && plan) {
        sluice_gang_act(plan, partition_of_job);
        start_jobs(plan);
        show_starts(plan);
    }
    if (plan)
        record(plan, planner.queue->taken_s);
    record_others(planner.queue->taken_s);
    sluice_plan_release(plan);
    struct sluice_plan_counts counts = sluice_plan_counts();
    count(&counts);
    if (planner.job_count && any(planner.busy))
        sluice_plan_wake(); /* nobody tells when an epilog has ended */
    uint64_t rest = LOCK_SHARE * lock_us > 4 * plan_us ? LOCK_SHARE * lock_us : 4 * plan_us;
    return rest / 1000;
}

/* Sleep until the next pass is due: woken, or after interval_ms, never before least_ms; but at most LOOK_MS after the
 * level has fallen below place. False: stop. */
static bool sleep_until_due(uint64_t least_ms, uint64_t interval_ms)
{
    uint64_t from = sluice_now_us();
    pthread_mutex_lock(&planner.lock);
    for (;;) {
        uint64_t passed_ms = (sluice_now_us() - from) / 1000;
        bool fell = planner.active && sluice_settings_level() < SLUICE_LEVEL_PLACE;
        uint64_t due_ms = planner.woken || interval_ms < least_ms ? least_ms : interval_ms;
        if (planner.stop || fell || passed_ms >= due_ms)
            break;
        due_ms = due_ms < passed_ms + LOOK_MS ? due_ms : passed_ms + LOOK_MS;
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        uint64_t ns = (uint64_t)until.tv_nsec + (due_ms - passed_ms) * 1000000;
        until.tv_sec += (time_t)(ns / 1000000000);
        until.tv_nsec = (long)(ns % 1000000000);
        pthread_cond_timedwait(&planner.wakened, &planner.lock, &until);
    }
    bool stop = planner.stop;
    planner.woken = false;
    pthread_mutex_unlock(&planner.lock);
    return !stop;
}

/* Below level place. Jobs may be held since before slurmctld was started, too; but where the level asked for is place,
 * and the policy could not be read since the start, they go on waiting for it. */
static void leave(const struct sluice_settings *settings)
{
    if (planner.left || (!planner.active && settings->asked >= SLUICE_LEVEL_PLACE))
        return;
    sluice_plan_invalidate();
    sluice_planner_forget(planner.planner);
    sluice_outlook_forget();
    planner.left = sluice_gang_abandon();
    if (planner.left)
        info("Sluice: the level is below place: Slurm starts jobs alone, gang groups are not kept together");
}

static void *run(void *argument)
{
    uint64_t least_ms = INTERVAL_MS, interval_ms = INTERVAL_MS;
    (void)argument;
    while (sleep_until_due(least_ms, interval_ms)) {
        const struct sluice_settings *settings = sluice_settings_acquire();
        interval_ms = settings->rules->planner_interval_ms ? settings->rules->planner_interval_ms : INTERVAL_MS;
        least_ms = interval_ms / 4;
        if (settings->level < SLUICE_LEVEL_PLACE)
            leave(settings);
        else
            planner.left = false;
        if (settings->level >= SLUICE_LEVEL_SHADOW) {
            uint64_t rest_ms = pass(settings, interval_ms);
            least_ms = rest_ms > least_ms ? rest_ms : least_ms;
        }
        planner.active = settings->level >= SLUICE_LEVEL_PLACE;
        sluice_settings_release(settings);
    }
    return NULL;
}

void sluice_plan_wake(void)
{
    pthread_mutex_lock(&planner.lock);
    planner.woken = true;
    pthread_cond_signal(&planner.wakened);
    pthread_mutex_unlock(&planner.lock);
}

/* ---- start and stop ---- */

static void stop_planner(void)
{
    pthread_mutex_lock(&planner.lock);
    bool running = planner.running;
    planner.stop = true;
    planner.running = false;
    pthread_cond_signal(&planner.wakened);
    pthread_mutex_unlock(&planner.lock);
    if (running)
        pthread_join(planner.thread, NULL);
    sluice_planner_free(planner.planner);
    sluice_mirror_free(planner.mirror);
    sluice_queue_free(planner.queue);
    sluice_gang_fini();
    free(planner.extras);
    free(planner.words);
    free(planner.usable);
    free(planner.busy);
    free(planner.asleep);
    free(planner.features);
    free(planner.running_jobs);
    free(planner.jobs);
    free(planner.job_index);
    free(planner.units);
    free(planner.stubborn);
    sluice_outlook_forget();
    planner.planner = NULL;
    planner.mirror = NULL;
    planner.queue = NULL;
    planner.extras = NULL;
    planner.words = planner.usable = planner.busy = planner.asleep = planner.features = NULL;
    planner.running_jobs = NULL;
    planner.jobs = NULL;
    planner.job_index = NULL;
    planner.units = NULL;
    planner.stubborn = NULL;
    planner.extra_room = planner.running_room = planner.job_room = planner.job_index_room = planner.unit_room =
        planner.stubborn_room = 0;
    planner.stubborn_count = 0;
    planner.words_room = planner.node_words = 0;
}

static bool start_planner(const struct sluice_site *site)
{
    struct sluice_error_text text = {{0}};
    (void)site;
    planner.stop = planner.woken = planner.active = planner.left = false;
    planner.generation = 0;
    if (sluice_planner_new(NULL, &planner.planner, &text) || sluice_mirror_new(&planner.mirror, &text) ||
        !(planner.queue = sluice_queue_new(NULL)) || pthread_create(&planner.thread, NULL, run, NULL)) {
        stop_planner();
        return false;
    }
    planner.running = true;
    return true;
}

__attribute__((constructor)) static void enter(void)
{
    static struct sluice_module module = {.name = "plan", .start = start_planner, .stop = stop_planner};
    sluice_controller_module(&module);
}
