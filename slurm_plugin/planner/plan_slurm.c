/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The planner inside slurmctld: a thread that takes a picture of queue and cluster under read locks (picture_slurm.c),
 * plans it outside of all locks, publishes the plan, and starts what should start now (start_slurm.c). See plan.h.
 */
#include "planner/instead.h"
#include "planner/moves_slurm.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "decisions/decisions.h"
#include "mirror/mirror.h"
#include "runtime/runtime.h"

enum {
    MAX_TASKS = 256,    /* of one array that are planned at a time */
    INTERVAL_MS = 1000, /* until the policy is known */
    LOOK_MS = 1000,     /* between looks at the level while nothing is due */
    VALID_S = 30,       /* a plan is trusted for so long at least */
    LOCK_SHARE = 20,    /* the picture takes one part in so many of the time */
    HOLD_MS = 100,      /* the write locks are held for so long without a break */
    MOST_REFUSALS = 5,  /* starts that Slurm refuses in a row until a job is left to stock for a while */
    REFUSED_PAUSE_S = 60,
    MOST_FAILURES = 32, /* of starts in one pass: each costs time under the write locks ... */
    MOST_OF_USER = 8,   /* ... and of one user, so that others' jobs are tried as well */
    SHOWN_S = 30,       /* an expected start that is off by more is corrected where users see it */
};

/* The group of the jobs that are moved and of the one for which they make room. */
#define MOVING UINT32_MAX
/* The group of a job that goes first, which it has alone: nothing else starts where it is planned. Gangs' are below. */
#define FIRST(number) (MOVING - 1 - (uint32_t)(number))
#define LEAST_OF_OURS FIRST(SLUICE_MOST_PLANNED)

/* Else it is a gang's, whose jobs start together. */
static bool starts_alone(uint32_t group)
{
    return !group || group >= LEAST_OF_OURS;
}

/* A job that should have started but did not. */
struct refused_start {
    uint32_t job_id;
    uint32_t failures;
    int64_t until_s;
    bool seen;
};

/* One element of the order of planning: a job, an array's tasks or a gang. */
struct unit {
    uint32_t tier, priority, id;
    uint32_t index; /* in the queue; UINT32_MAX: a gang */
    bool first;
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
    struct sluice_plan_job *jobs; /* the plan's entries, in its order ... */
    uint32_t *job_index;          /* ... which of the queue's pending jobs they are ... */
    uint32_t *job_words;          /* ... and where in the picture the nodes are that they may use */
    uint32_t job_count, job_room, job_index_room, job_words_room;
    struct unit *units;
    uint32_t unit_count, unit_room;
    struct refused_start *refused; /* by job id */
    uint32_t refused_count, refused_room;
    const struct sluice_job_times *first; /* during a pass: jobs that go first, until when */
    bool active;                          /* the level was place in the last pass */
    bool left;                            /* no job is held since the level is below place */
} planner = {.lock = PTHREAD_MUTEX_INITIALIZER, .wakened = PTHREAD_COND_INITIALIZER};

static struct sluice_picture picture; /* the thread's own, too */

/* ---- the order of planning ---- */

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
    case WAIT_ARRAY_TASK_LIMIT: /* as many tasks are planned as it allows */
    case WAIT_HELD:             /* a gang's; others have the flag HELD */
        return true;
    default:
        return false;
    }
}

static int by_order(const void *a, const void *b)
{
    const struct unit *one = a, *other = b;
    if (one->tier != other->tier)
        return one->tier > other->tier ? -1 : 1;
    if (one->priority != other->priority)
        return one->priority > other->priority ? -1 : 1;
    return one->id < other->id ? -1 : one->id > other->id;
}

/* The first that is not of a lower job id. */
static uint32_t refused_place_of(uint32_t job_id)
{
    uint32_t from = 0, to = planner.refused_count;
    while (from < to) {
        uint32_t middle = from + (to - from) / 2;
        if (planner.refused[middle].job_id < job_id)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

static struct refused_start *refused_start_of(uint32_t job_id)
{
    uint32_t place = refused_place_of(job_id);
    bool found = place < planner.refused_count && planner.refused[place].job_id == job_id;
    return found ? &planner.refused[place] : NULL;
}

static struct refused_start *add_refused_start(uint32_t job_id)
{
    uint32_t place = refused_place_of(job_id);
    if (!sluice_grow_array(&planner.refused, &planner.refused_room, planner.refused_count + 1, sizeof *planner.refused))
        return NULL;
    struct refused_start *added = &planner.refused[place];
    memmove(added + 1, added, (planner.refused_count++ - place) * sizeof *added);
    *added = (struct refused_start){.job_id = job_id};
    return added;
}

/* Has it lost its nodes by a fault of these? */
static bool goes_first(const struct sluice_queue_job *entry)
{
    return sluice_job_times_of(planner.first, entry->id) >= picture.queue->taken_s;
}

/* A job that was moved, or whose nodes failed it, goes on before all others. */
static uint32_t tier_of(const struct sluice_queue_job *entry)
{
    if (sluice_moving_is_away(entry->id) || goes_first(entry))
        return UINT32_MAX;
    return picture.queue->partitions[picture.queue->choices[entry->first_choice].partition].tier;
}

static bool add_unit(struct unit unit)
{
    if (!sluice_grow_array(&planner.units, &planner.unit_room, planner.unit_count + 1, sizeof *planner.units))
        return false;
    planner.units[planner.unit_count++] = unit;
    return true;
}

/* Does it wait for room, or for watts, alone? */
static bool waits_alone(uint32_t index)
{
    const struct sluice_queue_job *entry = &picture.queue->pending[index];
    uint32_t cannot = SLUICE_QUEUE_HELD | SLUICE_QUEUE_DEPENDENT;
    if (!goes_first(entry) || picture.pending[index].begin_s > sluice_job_times_of(planner.first, entry->id))
        cannot |= SLUICE_QUEUE_NOT_ELIGIBLE; /* else its place is kept until Slurm, and not its user, lets it start */
    if (sluice_gang_is_member(index) || entry->flags & cannot || !waits_for_room(entry))
        return false;
    if (!picture.queue->partitions[picture.queue->choices[entry->first_choice].partition].up)
        return false;
    struct refused_start *refused = refused_start_of(entry->id);
    if (refused)
        refused->seen = true;
    return !refused || refused->until_s <= picture.queue->taken_s;
}

static bool is_plannable(uint32_t index)
{
    return picture.pending[index].usable && waits_alone(index);
}

/* Is there something to plan for it? */
static bool is_unit(uint32_t index)
{
    return (picture.pending[index].usable || picture.pending[index].drawing_count) && waits_alone(index);
}

/* Is it planned with the moves that are under way? */
static bool has_place_kept(uint32_t index)
{
    uint32_t count;
    const struct sluice_moving_place *places = sluice_moving_places(&count);
    while (count > 0 && places[count - 1].pending != index)
        count--;
    return count > 0;
}

static void order_units(void)
{
    uint32_t gangs, index;
    planner.unit_count = 0;
    for (uint32_t i = 0; i < planner.refused_count; i++)
        planner.refused[i].seen = false;
    for (uint32_t i = 0; i < picture.queue->pending_count; i++) {
        const struct sluice_queue_job *entry = &picture.queue->pending[i];
        if (is_unit(i) && !has_place_kept(i))
            add_unit((struct unit){.tier = tier_of(entry),
                                   .first = goes_first(entry),
                                   .priority = picture.queue->choices[entry->first_choice].priority,
                                   .id = entry->id,
                                   .index = i});
    }
    const struct sluice_gang_unit *gang = sluice_gang_units(&gangs);
    for (uint32_t i = 0; i < gangs; i++)
        if (sluice_gang_unit_task(&gang[i], 0, &index))
            add_unit((struct unit){.tier = gang[i].priority == UINT32_MAX ? UINT32_MAX
                                                                          : tier_of(&picture.queue->pending[index]),
                                   .priority = gang[i].priority,
                                   .id = gang[i].job_id,
                                   .index = UINT32_MAX,
                                   .gang = &gang[i]});
    uint32_t still = 0;
    for (uint32_t i = 0; i < planner.refused_count; i++)
        if (planner.refused[i].seen)
            planner.refused[still++] = planner.refused[i];
    planner.refused_count = still;
    qsort(planner.units, planner.unit_count, sizeof *planner.units, by_order);
}

/* Where the nodes are that the last job may use; tasks of an array share them. */
static uint32_t allowed_words(void)
{
    uint32_t last = planner.job_count - 1;
    const struct sluice_plan_job *job = &planner.jobs[last];
    if (last && job[-1].job_id == job->job_id)
        return planner.job_words[last - 1];
    return sluice_picture_keep_out(&picture, &job->place, job->limit_s, picture.pending[planner.job_index[last]].words);
}

static void add_job(const struct unit *unit, uint32_t index, uint32_t group)
{
    const struct sluice_queue_job *entry = &picture.queue->pending[index];
    planner.job_index[planner.job_count] = index;
    struct sluice_plan_job *job = &planner.jobs[planner.job_count++];
    *job = (struct sluice_plan_job){.job_id = entry->id,
                                    .group = group,
                                    .rank = picture.pending[index].rank,
                                    .place = {unit->tier, unit->priority, unit->id},
                                    .limit_s = sluice_picture_limit(&picture, entry),
                                    .request = picture.pending[index].request,
                                    .power = picture.pending[index].power};
    if (picture.pending[index].drawing_count) {
        job->drawing = picture.drawing + picture.pending[index].drawing;
        job->drawing_count = picture.pending[index].drawing_count;
        job->drawing_from_s = picture.pending[index].drawing_from_s;
        job->request = (struct sluice_request){0}; /* no room is sought for it, nor jobs moved */
        planner.job_words[planner.job_count - 1] = 0;
        return;
    }
    uint64_t *words = picture.words + picture.pending[index].words;
    /* Nodes that are powered down or boot go last, which one request cannot express: Slurm's own passes wake them,
     * through the hook. Only the planner starts gangs. */
    for (size_t i = 0; starts_alone(group) && i < picture.node_words; i++)
        words[i] &= ~picture.asleep[i];
    planner.job_words[planner.job_count - 1] = allowed_words();
}

/* Is there room in the plan for what the job takes on its nodes? A plan that needs more than was made for it fails, so
 * jobs of several nodes share half of it, and each job of one node has its part of the rest. */
static bool has_room(uint32_t index, uint32_t *shares)
{
    const struct sluice_request *request = &picture.pending[index].request;
    int64_t nodes = request->nodes_max > request->nodes_min ? request->nodes_max : request->nodes_min;
    if (picture.pending[index].drawing_count)
        nodes = picture.pending[index].drawing_count;
    if (nodes <= 1)
        return true;
    if (nodes > SLUICE_MOST_PLANNED - (int64_t)*shares)
        return false;
    *shares += (uint32_t)nodes;
    return true;
}

/* A gang is never cut. */
static void list_gang(const struct unit *unit, uint32_t *shares)
{
    const struct sluice_gang_unit *gang = unit->gang;
    uint32_t jobs_before = planner.job_count, shares_before = *shares, i = 0, index;
    while (sluice_gang_unit_task(gang, i, &index) && planner.job_count < SLUICE_MOST_PLANNED &&
           has_room(index, shares)) {
        add_job(unit, index, gang->group);
        i++;
    }
    if (sluice_gang_unit_task(gang, i, &index)) {
        planner.job_count = jobs_before;
        *shares = shares_before;
    }
}

/* Moves under way come first, each job on the nodes that are kept for it. They are a group, so that nothing else starts
 * there; they start one by one. */
static void list_moving(uint32_t *shares)
{
    uint32_t count;
    const struct sluice_moving_place *places = sluice_moving_places(&count);
    for (uint32_t i = 0; i < count; i++) {
        if (places[i].pending != UINT32_MAX && !has_room(places[i].pending, shares))
            continue;
        planner.job_index[planner.job_count] = places[i].pending;
        planner.job_words[planner.job_count] = places[i].words;
        planner.jobs[planner.job_count++] =
            (struct sluice_plan_job){.job_id = places[i].entry->id,
                                     .group = MOVING,
                                     .rank = UINT32_MAX,
                                     .place = {UINT32_MAX, UINT32_MAX, places[i].entry->id},
                                     .limit_s = sluice_picture_limit(&picture, places[i].entry),
                                     .request = places[i].sought->request,
                                     .power = places[i].sought->power};
    }
}

/* The jobs in the order of planning, as many as `depth` allows. */
static void list_jobs(uint32_t depth)
{
    uint32_t shares = 0;
    planner.job_count = 0;
    if (!sluice_grow_array(&planner.jobs, &planner.job_room, SLUICE_MOST_PLANNED, sizeof *planner.jobs) ||
        !sluice_grow_array(&planner.job_index, &planner.job_index_room, SLUICE_MOST_PLANNED,
                           sizeof *planner.job_index) ||
        !sluice_grow_array(&planner.job_words, &planner.job_words_room, SLUICE_MOST_PLANNED, sizeof *planner.job_words))
        return;
    list_moving(&shares);
    for (uint32_t u = 0; u < planner.unit_count && planner.job_count < depth; u++) {
        const struct unit *unit = &planner.units[u];
        if (unit->gang) {
            list_gang(unit, &shares);
            continue;
        }
        uint32_t tasks = picture.pending[unit->index].tasks;
        for (uint32_t i = 0;
             i < tasks && i < MAX_TASKS && planner.job_count < SLUICE_MOST_PLANNED && has_room(unit->index, &shares);
             i++)
            add_job(unit, unit->index, unit->first ? FIRST(planner.job_count) : 0);
    }
    for (uint32_t i = 0; i < planner.job_count; i++) {
        planner.jobs[i].request.allowed = picture.words + planner.job_words[i];
        planner.jobs[i].request.allowed_words = picture.node_words;
    }
}

/* ---- what the plan asks for ---- */

/* The plan's i-th entry in the queue. */
static const struct sluice_queue_job *entry_of(uint32_t i)
{
    return &picture.queue->pending[planner.job_index[i]];
}

static const char *partition_of(const struct sluice_queue_job *entry)
{
    const struct sluice_queue_choice *choice = &picture.queue->choices[entry->first_choice];
    return sluice_queue_name(picture.queue, picture.queue->partitions[choice->partition].name);
}

static const char *partition_of_job(uint32_t job_id)
{
    for (uint32_t i = 0; i < planner.job_count; i++)
        if (planner.jobs[i].job_id == job_id && planner.job_index[i] != UINT32_MAX)
            return partition_of(entry_of(i));
    return NULL;
}

static void note_failure(uint32_t job_id)
{
    struct refused_start *refused = refused_start_of(job_id);
    if (!refused)
        refused = add_refused_start(job_id);
    if (refused && ++refused->failures >= MOST_REFUSALS) {
        refused->failures = 0;
        refused->until_s = picture.queue->taken_s + REFUSED_PAUSE_S;
        debug("sluice: JobId=%u does not start though there is room for it: left to Slurm for %d s", job_id,
              (int)REFUSED_PAUSE_S);
    }
}

/* Whose starts failed in a pass. */
struct failures {
    uint32_t count;
    uint32_t uids[MOST_FAILURES];
};

static bool may_try(const struct failures *failures, uint32_t uid)
{
    uint32_t of_user = 0;
    for (uint32_t i = 0; i < failures->count; i++)
        of_user += failures->uids[i] == uid;
    return of_user < MOST_OF_USER;
}

/* Nodes that sched/backfill keeps for others, so that the plan's i-th entry is not to start there; NULL: none. The plan
 * has another place for it, but the hook chooses again. */
static bitstr_t *kept_from(uint32_t i)
{
    const uint64_t *all = picture.words + picture.pending[planner.job_index[i]].words,
                   *left = picture.words + planner.job_words[i];
    bitstr_t *kept = NULL;
    for (uint32_t node = 0; all != left && node < (uint32_t)node_record_count && node / 64 < picture.node_words;
         node++) {
        if (!((all[node / 64] & ~left[node / 64]) >> node % 64 & 1))
            continue;
        if (!kept)
            kept = bit_alloc(node_record_count);
        bit_set(kept, node);
    }
    return kept;
}

/* Start the single jobs that the plan has for now, in its order. */
static void start_jobs(const struct sluice_plan *plan)
{
    struct failures failures = {0};
    uint32_t job_id, group;
    struct sluice_plan_answer answer;
    bool locked = false;
    uint64_t since = 0;
    for (uint32_t i = 0; failures.count < MOST_FAILURES && sluice_plan_entry(plan, i, &job_id, &group, &answer); i++) {
        if (answer.state != SLUICE_PLAN_NOW || !starts_alone(group) || planner.job_index[i] == UINT32_MAX ||
            !may_try(&failures, entry_of(i)->uid))
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
        if (!job || !IS_JOB_PENDING(job) || IS_JOB_COMPLETING(job) || !job->details ||
            job->details->begin_time > time(NULL))
            continue; /* a pass of Slurm's was faster, its user cancelled it, or it may not start yet */
        bitstr_t *kept = group == MOVING ? NULL : kept_from(i);
        enum sluice_start rc = sluice_start_job(job, partition_of(entry_of(i)), kept);
        FREE_NULL_BITMAP(kept);
        sluice_plan_count_start(rc == SLUICE_START_DONE);
        if (rc != SLUICE_START_DONE) {
            failures.uids[failures.count++] = entry_of(i)->uid;
            note_failure(job_id);
        }
    }
    if (locked)
        sluice_start_unlock();
}

/* Does squeue show another start than the reserved one? To the minute, so that the list of jobs does not change all the
 * time. */
static bool shows_other(const struct sluice_queue_job *entry, const struct sluice_plan_answer *answer)
{
    int64_t by = entry->start_s > answer->start_s ? entry->start_s - answer->start_s : answer->start_s - entry->start_s;
    return answer->state == SLUICE_PLAN_LATER && by > SHOWN_S;
}

/* squeue --start shows the reserved starts. Gangs show their own (sluice_gang_act). */
static void show_starts(const struct sluice_plan *plan)
{
    uint32_t job_id, group, before = 0;
    struct sluice_plan_answer answer;
    bool locked = false;
    for (uint32_t i = 0; sluice_plan_entry(plan, i, &job_id, &group, &answer); i++) {
        bool again = job_id == before; /* an array shows its first task's */
        before = job_id;
        if (again || group || !shows_other(entry_of(i), &answer))
            continue;
        if (!locked && !(locked = sluice_start_lock()))
            return;
        job_record_t *job = find_job_record(job_id);
        if (job && IS_JOB_PENDING(job)) {
            job->start_time = answer.start_s;
            last_job_update = time(NULL);
        }
    }
    if (locked)
        sluice_start_unlock();
}

/* What a job waits for; `words`: room for it. */
static const char *waits_for(uint32_t job_id, const struct sluice_plan_answer *answer, const struct sluice_rules *rules,
                             int64_t now_s, char *words, size_t size)
{
    const uint32_t moving = sluice_moving_count(job_id);
    if (answer->state == SLUICE_PLAN_NOW)
        return NULL;
    const struct sluice_instead instead = sluice_instead_of(job_id, now_s);
    if (moving) {
        int length = snprintf(words, size, "%" PRIu32 " smaller job%s being moved to make room for it", moving,
                              moving == 1 ? " is" : "s are");
        if (instead.state == SLUICE_INSTEAD_MOVES && length > 0 && (size_t)length < size)
            snprintf(words + length, size - (size_t)length,
                     ", which loses %" PRId64
                     " GPU-seconds; nobody is preempted meanwhile, as that would lose %" PRId64,
                     instead.moves_lose / 1000, instead.victims_lose / 1000);
        return words;
    }
    if (instead.preempts) {
        snprintf(words, size,
                 "others are preempted for it, which loses %" PRId64 " GPU-seconds; no moves that cost less were found",
                 instead.victims_lose / 1000);
        return words;
    }
    if (answer->waits_for_power) {
        const uint32_t budget = answer->waits_for_power - 1;
        snprintf(words, size, "its watts are not free in the power budget %s, which has %" PRId64 " W now",
                 rules->budgets[budget].name, sluice_power_watts(picture.budgets.power, budget, now_s));
        return words;
    }
    if (answer->state == SLUICE_PLAN_LATER)
        return "room is reserved for it from its expected start on";
    return "the room goes to jobs before it in the order";
}

/* Record what the plan has for each job, for `sluice explain`. */
static void record(const struct sluice_plan *plan, const struct sluice_rules *rules, int64_t now_s)
{
    char words[256];
    struct sluice_decision_recorder *recorder = sluice_decision_shared();
    uint32_t job_id, group, before = 0;
    struct sluice_plan_answer answer;
    for (uint32_t i = 0; sluice_plan_entry(plan, i, &job_id, &group, &answer); i++) {
        bool again = job_id == before;
        before = job_id;
        if (again || planner.job_index[i] == UINT32_MAX)
            continue;
        if (planner.jobs[i].drawing && answer.waits_for_power)
            sluice_picture_short_of_watts(&picture, planner.job_index[i]);
        if (!recorder || (planner.jobs[i].drawing && !answer.waits_for_power))
            continue; /* the latter is left to Slurm */
        struct sluice_decision_plan planned = {.job_id = job_id,
                                               .gang = starts_alone(group) ? 0 : group,
                                               .planned_s = now_s,
                                               .start_s = answer.state == SLUICE_PLAN_UNKNOWN ? SLUICE_BACKFILL_NO_START
                                                                                              : answer.start_s,
                                               .parts = answer.parts,
                                               .part_count = planner.jobs[i].drawing ? 0 : answer.part_count,
                                               .reason = waits_for(job_id, &answer, rules, now_s, words, sizeof words)};
        sluice_decision_planned(recorder, &planned);
    }
}

/* ... and why it has nothing for those that are left to Slurm. */
static void record_others(int64_t now_s)
{
    struct sluice_decision_recorder *recorder = sluice_decision_shared();
    for (uint32_t i = 0; recorder && i < picture.queue->pending_count; i++) {
        char reason[128];
        if (!picture.pending[i].stock || picture.pending[i].short_of_watts)
            continue;
        snprintf(reason, sizeof reason, "left to Slurm's own scheduler (%s)",
                 sluice_job_stock_text(picture.pending[i].stock));
        struct sluice_decision_plan none = {.job_id = picture.queue->pending[i].id,
                                            .planned_s = now_s,
                                            .start_s = SLUICE_BACKFILL_NO_START,
                                            .reason = reason};
        sluice_decision_planned(recorder, &none);
    }
}

/* ---- passes ---- */

static enum sluice_error make_plan(uint32_t reservations, struct sluice_plan **plan, struct sluice_error_text *text)
{
    return sluice_planner_plan(planner.planner, sluice_mirror_cluster(picture.mirror), picture.queue->taken_s,
                               picture.running, picture.running_count, planner.jobs, planner.job_count, reservations,
                               picture.busy, picture.node_words, plan, text);
}

static void show_counts(void)
{
    const struct sluice_plan_counts now = sluice_plan_counts(), *counts = &now;
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
    for (size_t i = 0; i < picture.node_words; i++)
        bits |= words[i];
    return bits != 0;
}

/* The budgets of the plan that is made next; false: they cannot be had. */
static bool set_power(const struct sluice_rules *rules, const struct sluice_draws *draws)
{
    struct sluice_power *power =
        rules->budget_count ? sluice_budgets_now(&picture.budgets, rules, draws, picture.queue->taken_s) : NULL;
    sluice_planner_set_power(planner.planner, power, rules->budget_count, picture.budgets.counting);
    return power || !rules->budget_count;
}

/* How long it took to look for moves, in microseconds. */
static uint64_t move_jobs(const struct sluice_plan *plan, const struct sluice_rules *rules)
{
    uint64_t from = sluice_now_us();
    sluice_moving_consider(&(struct sluice_moving_basis){.picture = &picture,
                                                         .rules = rules,
                                                         .plan = plan,
                                                         .jobs = planner.jobs,
                                                         .job_index = planner.job_index,
                                                         .job_count = planner.job_count});
    return sluice_now_us() - from;
}

/* The picture, with what moves under way need of it. */
static bool see(const struct sluice_rules *rules, uint64_t *lock_us)
{
    const struct sluice_draws *draws = rules->budget_count ? sluice_draws_acquire() : NULL;
    sluice_moving_begin();
    bool seen = sluice_picture_take(&picture, planner.planner, rules, draws, lock_us) && set_power(rules, draws);
    sluice_draws_release(draws);
    if (!seen && !sluice_in_charge())
        sluice_moving_not_in_charge();
    return seen;
}

/* Publish the plan, which frees it, and do what it says for now. The plan as published, or NULL; *more_us grows by what
 * was planned here. */
static struct sluice_plan *act(struct sluice_plan *made, const struct sluice_rules *rules, uint64_t interval_ms,
                               uint64_t *more_us)
{
    int64_t valid_s = VALID_S + (int64_t)(10 * interval_ms / 1000);
    if (picture.accrual_lost)
        sluice_accrual_restore_all();
    sluice_plan_publish(planner.planner, made, valid_s);
    struct sluice_plan *plan = sluice_plan_acquire(picture.queue->taken_s);
    if (!plan)
        return NULL;
    if (rules->deadlines)
        *more_us += sluice_outlook_follow(&(struct sluice_outlook_basis){.plan = plan,
                                                                         .picture = &picture,
                                                                         .jobs = planner.jobs,
                                                                         .job_count = planner.job_count,
                                                                         .valid_s = valid_s});
    sluice_gang_act(plan, partition_of_job);
    start_jobs(plan);
    show_starts(plan);
    *more_us += move_jobs(plan, rules);
    return plan;
}

/* One pass; how long the next one has to wait at the least, in milliseconds. */
static uint64_t pass(const struct sluice_settings *settings, uint64_t interval_ms)
{
    struct sluice_error_text text = {{0}};
    struct sluice_plan *plan = NULL;
    uint64_t lock_us = 0;
    const struct sluice_rules *rules = settings->rules;
    const bool place = settings->level >= SLUICE_LEVEL_PLACE;
    if (!see(rules, &lock_us)) {
        sluice_plan_count_pass(lock_us, 0, true);
        return interval_ms;
    }
    uint64_t from = sluice_now_us();
    planner.first = sluice_first_acquire();
    sluice_moving_follow(&picture, rules, place, is_plannable);
    order_units();
    list_jobs(rules->backfill_depth ? rules->backfill_depth : SLUICE_MOST_PLANNED);
    sluice_job_times_release(planner.first);
    planner.first = NULL;
    enum sluice_error failed = make_plan(rules->backfill_reservations, &plan, &text);
    uint64_t plan_us = sluice_now_us() - from;
    sluice_plan_count_pass(lock_us, plan_us, failed != SLUICE_OK);
    if (failed) {
        error("sluice: no plan: %s", text.text[0] ? text.text : sluice_strerror(failed));
        return interval_ms;
    }
    if (place)
        plan = act(plan, rules, interval_ms, &plan_us);
    if (plan) {
        record(plan, rules, picture.queue->taken_s);
        atomic_store(sluice_status_counter("plan.last_s"), (uint64_t)picture.queue->taken_s);
    }
    record_others(picture.queue->taken_s);
    sluice_plan_release(plan);
    if (planner.job_count && any(picture.busy))
        sluice_plan_wake(); /* there is no call when an epilog has ended */
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
        struct timespec until = sluice_deadline(CLOCK_REALTIME, (int64_t)(due_ms - passed_ms));
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
        info("sluice: the level is below place: only Slurm starts jobs, gangs are not kept together");
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
            show_counts();
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
    sluice_picture_free(&picture);
    sluice_gang_fini();
    sluice_moving_fini();
    free(planner.jobs);
    free(planner.job_index);
    free(planner.job_words);
    free(planner.units);
    free(planner.refused);
    sluice_outlook_forget();
    planner.planner = NULL;
    planner.jobs = NULL;
    planner.job_index = NULL;
    planner.job_words = NULL;
    planner.units = NULL;
    planner.refused = NULL;
    planner.job_room = planner.job_index_room = planner.job_words_room = planner.unit_room = planner.refused_room = 0;
    planner.refused_count = 0;
}

static bool start_planner(const struct sluice_site *site)
{
    struct sluice_error_text text = {{0}};
    sluice_moving_start(site->state_folder);
    planner.stop = planner.woken = planner.active = planner.left = false;
    if (sluice_planner_new(NULL, &planner.planner, &text) || !sluice_picture_new(&picture, &text) ||
        pthread_create(&planner.thread, NULL, run, NULL)) {
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
