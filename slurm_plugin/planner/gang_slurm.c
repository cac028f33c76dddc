/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Gang groups inside slurmctld: see gang.h. */
#include "planner/planner_internal_slurm.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/runtime.h"
#include "src/common/xstring.h"
#include "src/slurmctld/job_scheduler.h"

enum { REFRESH_S = 30, FAILURES = 5, PAUSE_S = 60, BATCH = 512 };

/* ---- members whose PrologSlurmctld waits: any thread ---- */

struct kept {
    uint32_t job_id; /* 0: free */
    struct sluice_gang_prolog prolog;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kept *kept;
static uint32_t kept_room;
static atomic_uint starting; /* the member that the planner starts at this moment, under the write locks */

/* ---- the planner's picture ---- */

/* One record of a member, with what squeue shows now. */
struct shown {
    uint32_t priority;
    bool ours; /* held by us */
    uint32_t gpus;
    int64_t start_s;
    int64_t latest_s; /* when it has to start for its deadline; 0: none */
    char text[SLUICE_GANG_REASON_SIZE];
};

/* What is remembered of a job from picture to picture. */
struct memory {
    uint32_t job_id;
    uint32_t priority;
    int64_t refreshed_s;
    uint32_t failures;
    int64_t paused_until_s;
    bool seen;
};

static struct {
    int64_t now_s;
    uint32_t limit_s;
    uint32_t incomplete_s; /* of the policy: 0 never */
    bool cancel;           /* incomplete instances, after that */
    struct sluice_gang_member *members;
    struct shown *shown; /* by member.index */
    uint32_t *record;    /* by member.index: index in the queue */
    uint32_t count, room, shown_room, record_room;
    struct sluice_gang_instance *instances;
    struct sluice_gang_unit *units;
    uint32_t instance_count, instance_room, unit_count, unit_room;
    uint64_t *is_member; /* bit by index in the queue */
    uint32_t is_member_room;
    struct memory *memories; /* by job id, ascending */
    uint32_t memory_count, memory_room;
} picture;

static struct sluice_gang_counts counts;

static struct sluice_gang_counts *counted(void)
{
    pthread_mutex_lock(&lock);
    return &counts;
}

static void publish(void)
{
    struct sluice_gang_counts now = counts;
    pthread_mutex_unlock(&lock);
    atomic_store(sluice_status_counter("gang.started"), now.started);
    atomic_store(sluice_status_counter("gang.requeued"), now.requeued);
    atomic_store(sluice_status_counter("gang.cancelled"), now.cancelled);
    atomic_store(sluice_status_counter("gang.members_started"), now.members_started);
    atomic_store(sluice_status_counter("gang.gpu_seconds_held"), now.gpu_seconds_held);
    atomic_store(sluice_status_counter("gang.waiting"), now.waiting);
    atomic_store(sluice_status_counter("gang.configuring"), now.configuring);
}

struct sluice_gang_counts sluice_gang_counts(void)
{
    struct sluice_gang_counts copy = *counted();
    pthread_mutex_unlock(&lock);
    return copy;
}

/* ---- job records ---- */

static const char prefix[] = SLUICE_SPANK_ENV_PREFIX "gang=";

/* The gang that a job says it belongs to. */
static bool gang_of(const job_record_t *job, struct sluice_options *options)
{
    char why[SLUICE_OPTION_WHY_MAX];
    bool asked = false;
    for (uint32_t i = 0; i < job->spank_job_env_size && !asked; i++)
        asked = job->spank_job_env[i] && !strncmp(job->spank_job_env[i], prefix, sizeof prefix - 1);
    memset(options, 0, sizeof *options);
    return asked && !job->het_job_id &&
           sluice_options_from_env(options, job->spank_job_env, job->spank_job_env_size, why, sizeof why) &&
           options->gang_count && options->gang_count <= SLUICE_GANG_MAX_MEMBERS;
}

/* From its start on a member is a job like any other: one that is requeued, e.g. as its node lost power, has no fellows
 * to wait for. Locks: job write. */
static void forget_gang(job_record_t *job)
{
    uint32_t kept_count = 0;
    for (uint32_t i = 0; i < job->spank_job_env_size; i++) {
        if (job->spank_job_env[i] && !strncmp(job->spank_job_env[i], prefix, sizeof prefix - 1))
            xfree(job->spank_job_env[i]);
        else
            job->spank_job_env[kept_count++] = job->spank_job_env[i];
    }
    job->spank_job_env_size = kept_count;
}

static bool is_marked(const job_record_t *job)
{
    return job->state_desc && !strncmp(job->state_desc, SLUICE_GANG_MARK, sizeof SLUICE_GANG_MARK - 1);
}

static bool is_held_by_us(const job_record_t *job)
{
    return job->priority == 0 && job->state_reason == WAIT_HELD && is_marked(job);
}

static bool is_kept_configuring(const job_record_t *job)
{
    return IS_JOB_RUNNING(job) && IS_JOB_CONFIGURING(job) && is_marked(job);
}

bool sluice_gang_refuses(const struct job_record *job)
{
    struct sluice_options options;
    if (!job->spank_job_env_size || sluice_settings_level() < SLUICE_LEVEL_PLACE)
        return false;
    if (job->job_id == atomic_load(&starting) || !gang_of(job, &options))
        return false;
    sluice_plan_wake(); /* it may be the last one that its gang waited for */
    return true;
}

static void set_text(job_record_t *job, const char *text)
{
    xfree(job->state_desc);
    job->state_desc = text ? xstrdup(text) : NULL;
    last_job_update = time(NULL);
}

/* ---- PrologSlurmctld ---- */

bool sluice_gang_prolog(struct job_record *job, const struct sluice_gang_prolog *prolog)
{
    if (!is_kept_configuring(job))
        return false;
    pthread_mutex_lock(&lock);
    uint32_t at = 0;
    while (at < kept_room && kept[at].job_id && kept[at].job_id != job->job_id)
        at++;
    uint32_t before = kept_room;
    bool there = at < kept_room || sluice_grow_array(&kept, &kept_room, at + 1, sizeof *kept);
    if (kept_room > before)
        memset(kept + before, 0, (kept_room - before) * sizeof *kept);
    if (there)
        kept[at] = (struct kept){.job_id = job->job_id, .prolog = *prolog};
    pthread_mutex_unlock(&lock);
    if (!there)
        error("prep/sluice: no memory: %pJ starts before the others of its gang", job);
    return there;
}

/* Take a member's prolog back; false: it does not wait (yet, or any more). */
static bool take_kept(uint32_t job_id, struct sluice_gang_prolog *prolog)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < kept_room && !found; i++)
        if (kept[i].job_id == job_id) {
            *prolog = kept[i].prolog;
            kept[i].job_id = 0;
            found = true;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

/* ---- the picture ---- */

static struct memory *remembered(uint32_t job_id, bool make)
{
    uint32_t low = 0, high = picture.memory_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (picture.memories[middle].job_id < job_id)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < picture.memory_count && picture.memories[low].job_id == job_id)
        return &picture.memories[low];
    if (!make ||
        !sluice_grow_array(&picture.memories, &picture.memory_room, picture.memory_count + 1, sizeof *picture.memories))
        return NULL;
    memmove(&picture.memories[low + 1], &picture.memories[low],
            (picture.memory_count - low) * sizeof *picture.memories);
    picture.memories[low] = (struct memory){.job_id = job_id};
    picture.memory_count++;
    return &picture.memories[low];
}

void sluice_gang_picture_begin(int64_t now_s, const struct sluice_rules *rules)
{
    picture.now_s = now_s;
    picture.limit_s = rules->gang_limit_s;
    picture.incomplete_s = rules->gang_incomplete_s;
    picture.cancel = rules->gang_incomplete_cancel;
    picture.count = picture.instance_count = picture.unit_count = 0;
    if (picture.is_member)
        memset(picture.is_member, 0, picture.is_member_room * sizeof *picture.is_member);
    for (uint32_t i = 0; i < picture.memory_count; i++)
        picture.memories[i].seen = false;
}

static bool add_member(const struct sluice_gang_member *member, const struct shown *shown, uint32_t index)
{
    if (!sluice_grow_array(&picture.shown, &picture.shown_room, picture.count + 1, sizeof *picture.shown) ||
        !sluice_grow_array(&picture.record, &picture.record_room, picture.count + 1, sizeof *picture.record) ||
        !sluice_grow_array(&picture.members, &picture.room, picture.count + 1, sizeof *picture.members))
        return false;
    picture.shown[picture.count] = *shown;
    picture.record[picture.count] = index;
    picture.members[picture.count] = *member;
    picture.members[picture.count].index = picture.count;
    picture.count++;
    return true;
}

void sluice_gang_picture_job(const struct sluice_queue_job *entry, uint32_t index, bool pending, bool usable,
                             const job_record_t *job)
{
    struct sluice_options options;
    if (!job->spank_job_env_size || (!pending && !is_kept_configuring(job)) || !gang_of(job, &options))
        return;
    struct sluice_gang_member member = {.uid = entry->uid,
                                        .count = options.gang_count,
                                        .job_id = entry->id,
                                        .submitted_s = job->details ? job->details->submit_time : 0,
                                        .tasks = entry->tasks,
                                        .configuring = !pending};
    struct shown shown = {.priority = job->priority,
                          .ours = is_held_by_us(job),
                          .gpus = entry->gpus ? entry->gpus : entry->gpu_memory_mib > 0,
                          .start_s = entry->start_s,
                          .latest_s =
                              entry->deadline_s ? entry->deadline_s - (entry->limit_s > 0 ? entry->limit_s : 0) : 0};
    /* Of an array that its user holds back (--array=...%2) no more than may run at once can start together. */
    if (pending && job->array_recs && job->array_recs->max_run_tasks && job->array_recs->max_run_tasks < member.tasks)
        member.tasks = job->array_recs->max_run_tasks;
    snprintf(member.name, sizeof member.name, "%s", options.gang_name);
    snprintf(shown.text, sizeof shown.text, "%s", job->state_desc ? job->state_desc : "");
    /* Slurm gives a job that was held from the outset its begin time when it is released: 0 is no reason to wait. */
    bool later = job->details && job->details->begin_time > picture.now_s;
    member.unplaced = pending && !usable;
    member.blocked =
        pending && (!usable || later || entry->flags & (SLUICE_QUEUE_DEPENDENT | SLUICE_QUEUE_RESERVATION) ||
                    (job->priority == 0 && !shown.ours));
    uint32_t before = picture.is_member_room;
    if (pending &&
        !sluice_grow_array(&picture.is_member, &picture.is_member_room, index / 64 + 1, sizeof *picture.is_member))
        return;
    if (picture.is_member_room > before)
        memset(picture.is_member + before, 0, (picture.is_member_room - before) * sizeof *picture.is_member);
    if (!add_member(&member, &shown, index))
        return;
    if (!pending)
        return;
    picture.is_member[index / 64] |= UINT64_C(1) << index % 64;
    struct memory *memory = remembered(entry->id, true);
    if (!memory)
        return;
    memory->seen = true;
    if (job->priority)
        memory->priority = job->priority;
}

/* The instance's first member that waits: its priority is the gang's. */
static const struct sluice_gang_member *first_waiting(const struct sluice_gang_instance *instance)
{
    for (uint32_t i = 0; i < instance->members; i++)
        if (!picture.members[instance->first + i].configuring)
            return &picture.members[instance->first + i];
    return NULL;
}

static bool continues_gang(uint32_t i)
{
    if (!i)
        return false;
    const struct sluice_gang_member *one = &picture.members[picture.instances[i - 1].first],
                                    *other = &picture.members[picture.instances[i].first];
    return one->uid == other->uid && one->count == other->count && !strcmp(one->name, other->name);
}

void sluice_gang_picture_end(void)
{
    uint32_t still = 0, waiting = 0, configuring = 0;
    for (uint32_t i = 0; i < picture.memory_count; i++)
        if (picture.memories[i].seen)
            picture.memories[still++] = picture.memories[i];
    picture.memory_count = still;
    for (uint32_t i = 0; i < picture.count; i++) {
        waiting += picture.members[i].configuring ? 0 : picture.members[i].tasks;
        configuring += picture.members[i].configuring;
    }
    struct sluice_gang_counts *now = counted();
    now->waiting = waiting;
    now->configuring = configuring;
    publish();

    /* An array may fill several instances: room for as many splits as there are records. */
    uint32_t wanted = 2 * picture.count;
    if (!picture.count || !sluice_grow_array(&picture.members, &picture.room, wanted, sizeof *picture.members) ||
        !sluice_grow_array(&picture.units, &picture.unit_room, wanted, sizeof *picture.units) ||
        !sluice_grow_array(&picture.instances, &picture.instance_room, wanted, sizeof *picture.instances))
        return;
    picture.instance_count =
        sluice_gang_form(picture.members, &picture.count, wanted, picture.instances, picture.instance_room);
    sluice_gang_give_up(picture.instances, picture.instance_count, picture.now_s, picture.incomplete_s);
    for (uint32_t i = 0; i < picture.instance_count; i++) {
        const struct sluice_gang_instance *instance = &picture.instances[i];
        const struct sluice_gang_member *first = first_waiting(instance);
        const struct memory *memory = first ? remembered(first->job_id, false) : NULL;
        bool starts =
            instance->phase == SLUICE_GANG_STARTING && instance->present == picture.members[instance->first].count;
        /* Only one instance of a gang at a time has nodes without running, so members with nodes belong to exactly
         * one. */
        bool ready =
            instance->phase == SLUICE_GANG_READY && !(continues_gang(i) && picture.instances[i - 1].configuring);
        if (!first || (!starts && !ready) || instance->blocked || (memory && memory->paused_until_s > picture.now_s))
            continue;
        picture.units[picture.unit_count++] = (struct sluice_gang_unit){.instance = i,
                                                                        .group = i + 1,
                                                                        .priority = starts   ? UINT32_MAX
                                                                                    : memory ? memory->priority
                                                                                             : 0,
                                                                        .job_id = first->job_id};
    }
}

bool sluice_gang_is_member(uint32_t index)
{
    return index / 64 < picture.is_member_room && picture.is_member[index / 64] >> index % 64 & 1;
}

const struct sluice_gang_unit *sluice_gang_units(uint32_t *count)
{
    *count = picture.unit_count;
    return picture.units;
}

/* The record of the i-th task that waits, in an instance. */
static const struct sluice_gang_member *waiting_task(const struct sluice_gang_instance *instance, uint32_t i)
{
    for (uint32_t m = 0; m < instance->members; m++) {
        const struct sluice_gang_member *member = &picture.members[instance->first + m];
        if (member->configuring)
            continue;
        if (i < member->tasks)
            return member;
        i -= member->tasks;
    }
    return NULL;
}

bool sluice_gang_unit_task(const struct sluice_gang_unit *unit, uint32_t i, uint32_t *index)
{
    const struct sluice_gang_member *member = waiting_task(&picture.instances[unit->instance], i);
    if (member)
        *index = picture.record[member->index];
    return member != NULL;
}

/* ---- what is done, under the write locks ---- */

/* Prologs that continue, or end, once the locks are released. */
static struct {
    uint32_t *ids;
    void (*done)(int, uint32_t, bool);
    uint32_t count, room;
} endings;

static void end_prolog(uint32_t job_id, void (*done)(int, uint32_t, bool))
{
    if (!sluice_grow_array(&endings.ids, &endings.room, endings.count + 1, sizeof *endings.ids)) {
        error("prep/sluice: no memory: JobId=%u stays configuring until slurmctld is restarted", job_id);
        return;
    }
    endings.ids[endings.count++] = job_id;
    endings.done = done;
}

static void hold(job_record_t *job, const char *text)
{
    job->priority = 0;
    job->state_reason = WAIT_HELD;
    set_text(job, text);
}

static void unhold(job_record_t *job)
{
    const struct memory *memory = remembered(job->job_id, false);
    job->state_reason = WAIT_NO_REASON;
    set_text(job, NULL);
    if (job->direct_set_prio && memory && memory->priority)
        job->priority = memory->priority;
    else
        set_job_prio(job);
    if (!job->priority)
        job->priority = 1;
}

/* A waiting member's priority, had it not been held: with its age, which Slurm does not count for held jobs. */
static void refresh_priority(const job_record_t *job)
{
    struct memory *memory = remembered(job->job_id, false);
    if (!memory || job->direct_set_prio || !job->details || memory->refreshed_s > picture.now_s - REFRESH_S ||
        xstrcmp(slurm_conf.priority_type, "priority/multifactor"))
        return;
    job_record_t *changed = find_job_record(job->job_id);
    time_t accrue = changed->details->accrue_time;
    if (!accrue)
        changed->details->accrue_time = changed->details->submit_time;
    memory->priority = priority_g_set(0, changed);
    memory->refreshed_s = picture.now_s;
    changed->details->accrue_time = accrue;
}

static job_record_t *waiting_job(const struct sluice_gang_member *member)
{
    job_record_t *job = find_job_record(member->job_id);
    return job && IS_JOB_PENDING(job) && job->details ? job : NULL;
}

/* Seconds since the instance's first member got its nodes. */
static int64_t held_for(const struct sluice_gang_instance *instance)
{
    int64_t since = picture.now_s;
    for (uint32_t i = 0; i < instance->members; i++) {
        const struct sluice_gang_member *member = &picture.members[instance->first + i];
        if (member->configuring && picture.shown[member->index].start_s < since)
            since = picture.shown[member->index].start_s;
    }
    return picture.now_s - since;
}

/* GPU-seconds that the instance's members held so far. */
static uint64_t gpu_seconds(const struct sluice_gang_instance *instance)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < instance->members; i++) {
        const struct sluice_gang_member *member = &picture.members[instance->first + i];
        const struct shown *shown = &picture.shown[member->index];
        if (member->configuring && shown->start_s < picture.now_s)
            sum += (uint64_t)(picture.now_s - shown->start_s) * shown->gpus;
    }
    return sum;
}

/* The job of a member that has nodes and is kept configuring; else NULL. */
static job_record_t *kept_job(const struct sluice_gang_member *member)
{
    job_record_t *job = member->configuring ? find_job_record(member->job_id) : NULL;
    return job && is_kept_configuring(job) ? job : NULL;
}

/* All have nodes: those that waited continue. */
static void release(const struct sluice_gang_instance *instance)
{
    const struct sluice_gang_member *first = &picture.members[instance->first];
    uint64_t held = gpu_seconds(instance);
    for (uint32_t i = 0; i < instance->members; i++) {
        const struct sluice_gang_member *member = &picture.members[instance->first + i];
        job_record_t *job = kept_job(member);
        struct sluice_gang_prolog prolog;
        if (!job)
            continue;
        set_text(job, NULL);
        forget_gang(job);
        if (take_kept(job->job_id, &prolog) && !prolog.go(job))
            end_prolog(job->job_id, prolog.done);
    }
    info("prep/sluice: gang %s of uid %u: all %u members have nodes and start; %" PRIu64
         " GPU-seconds were held for it",
         first->name, first->uid, first->count, held);
    struct sluice_gang_counts *now = counted();
    now->started++;
    now->members_started += first->count;
    now->gpu_seconds_held += held;
    publish();
}

/*
 * Whether the user of an srun is sent the text now: its job ends in a later pass, as Slurm sends the text and the end from
 * two threads, and srun ends with the latter.
 */
static bool tell(job_record_t *job, char *text)
{
    if (job->state_desc && !strcmp(job->state_desc, text))
        return false;
    set_text(job, text);
    if (!job->batch_flag)
        srun_user_message(job, text);
    return !job->batch_flag;
}

static char *not_in_time(const struct sluice_gang_member *member, char *text, size_t size)
{
    snprintf(text, size, SLUICE_GANG_MARK "%s: not all members got nodes in time; cancelled", member->name);
    return text;
}

/* Give the nodes back: Slurm queues a batch job again, as when its prolog failed; others were told why they end. */
static void give_back(job_record_t *job, char *text)
{
    if (job->batch_flag) { /* nothing of it ran: --no-requeue is no reason to lose it */
        uint16_t wanted = job->details->requeue;
        job->details->requeue = 1;
        int rc = sluice_job_requeue(job);
        if (job->details)
            job->details->requeue = wanted;
        if (!rc)
            return;
        srun_user_message(job, text);
    }
    job_signal(job, SIGKILL, 0, 0, false);
}

static void requeue(const struct sluice_gang_instance *instance)
{
    const struct sluice_gang_member *first = &picture.members[instance->first];
    uint64_t held = gpu_seconds(instance);
    int64_t seconds = held_for(instance);
    char text[SLUICE_GANG_REASON_SIZE];
    bool told = false;
    for (uint32_t i = 0; i < instance->members; i++) {
        const struct sluice_gang_member *member = &picture.members[instance->first + i];
        job_record_t *job = kept_job(member);
        if (job && !job->batch_flag)
            told |= tell(job, not_in_time(member, text, sizeof text));
    }
    if (told)
        return;
    for (uint32_t i = 0; i < instance->members; i++) {
        const struct sluice_gang_member *member = &picture.members[instance->first + i];
        job_record_t *job = kept_job(member);
        struct sluice_gang_prolog prolog;
        if (!job)
            continue;
        set_text(job, NULL);
        give_back(job, not_in_time(member, text, sizeof text));
        if (take_kept(member->job_id, &prolog))
            end_prolog(member->job_id, prolog.done);
    }
    info("prep/sluice: gang %s of uid %u: %u of %u members had nodes for %" PRId64 " s and gave them back; %" PRIu64
         " GPU-seconds were held",
         first->name, first->uid, instance->configuring, first->count, seconds, held);
    struct sluice_gang_counts *now = counted();
    now->requeued++;
    now->gpu_seconds_held += held;
    publish();
}

/* The rest of the gang never arrived: the members that wait are cancelled, an array's running tasks are not. */
static void cancel(const struct sluice_gang_instance *instance)
{
    const struct sluice_gang_member *first = &picture.members[instance->first];
    bool told = false;
    for (uint32_t i = 0; i < instance->members; i++) {
        const struct sluice_gang_member *member = &picture.members[instance->first + i];
        char text[SLUICE_GANG_REASON_SIZE];
        job_record_t *job = waiting_job(member);
        if (!job)
            continue;
        snprintf(text, sizeof text, SLUICE_GANG_MARK "%s: only %u of %u members submitted in %u s; cancelled",
                 member->name, instance->present, member->count, picture.incomplete_s);
        told |= tell(job, text);
    }
    if (told)
        return;
    for (uint32_t i = 0; i < instance->members; i++) {
        job_record_t *job = waiting_job(&picture.members[instance->first + i]);
        if (job)
            job_signal(job, SIGKILL, 0, 0, false);
    }
    info("prep/sluice: gang %s of uid %u: only %u of %u members were submitted within %u s; cancelled", first->name,
         first->uid, instance->present, first->count, picture.incomplete_s);
    counted()->cancelled++;
    publish();
}

/* Start one waiting task of a member. The record that waits is held again where that fails. */
static enum sluice_start start_task(const struct sluice_gang_member *member, const char *partition, uint32_t *started)
{
    job_record_t *job = waiting_job(member);
    if (!job || (job->priority == 0 && !is_held_by_us(job)))
        return SLUICE_START_GONE;
    unhold(job);
    atomic_store(&starting, member->job_id);
    enum sluice_start rc = sluice_start_job(job, partition, NULL);
    atomic_store(&starting, 0);
    if (rc == SLUICE_START_DONE)
        *started = job->job_id; /* of an array: the task's own */
    return rc;
}

static void start(struct sluice_gang_instance *instance, const char *(*partition)(uint32_t job_id))
{
    const struct sluice_gang_member *first = &picture.members[instance->first], *member;
    uint32_t ids[SLUICE_GANG_MAX_MEMBERS], count = 0, missing = 0, already = instance->configuring;
    enum sluice_start worst = SLUICE_START_DONE;
    for (uint32_t i = 0; (member = waiting_task(instance, i)) && count < SLUICE_GANG_MAX_MEMBERS; i++) {
        enum sluice_start rc = start_task(member, partition(member->job_id), &ids[count]);
        count += rc == SLUICE_START_DONE;
        missing += rc != SLUICE_START_DONE;
        worst = rc > worst ? rc : worst;
        sluice_plan_count_start(rc == SLUICE_START_DONE);
        if (rc != SLUICE_START_DONE && !count && !already)
            break; /* nobody has nodes: nothing is lost */
    }
    instance->configuring += count;
    if (!missing && instance->configuring == first->count) {
        for (uint32_t i = 0; i < count; i++) {
            job_record_t *job = find_job_record(ids[i]);
            if (job)
                forget_gang(job);
        }
        release(instance);
    } else {
        char text[SLUICE_GANG_REASON_SIZE];
        instance->phase = instance->configuring ? SLUICE_GANG_STARTING : instance->phase;
        sluice_gang_reason(first, instance, text, sizeof text);
        for (uint32_t i = 0; i < count; i++) {
            job_record_t *job = find_job_record(ids[i]);
            if (job)
                set_text(job, text); /* the mark that keeps it configuring */
        }
        struct memory *memory = remembered(first_waiting(instance)->job_id, false);
        if (memory && !instance->configuring && ++memory->failures >= FAILURES) {
            memory->failures = 0;
            memory->paused_until_s = picture.now_s + PAUSE_S;
        }
        debug("prep/sluice: gang %s of uid %u: %u of %u members have nodes (%d)", first->name, first->uid,
              instance->configuring, first->count, (int)worst);
    }
    /* What still waits is held again: members that failed, and the rest of an array. */
    for (uint32_t m = 0; m < instance->members; m++) {
        char text[SLUICE_GANG_REASON_SIZE];
        member = &picture.members[instance->first + m];
        job_record_t *job = member->configuring ? NULL : waiting_job(member);
        if (job && job->priority)
            hold(job, sluice_gang_reason(member, instance, text, sizeof text));
    }
}

/* May the unit's waiting tasks all start now, as the plan has it? */
static bool all_now(const struct sluice_gang_instance *instance, uint32_t group, const struct sluice_plan *plan)
{
    uint32_t wanted = 0, now = 0, in_group;
    struct sluice_plan_answer answer;
    while (waiting_task(instance, wanted))
        wanted++;
    for (uint32_t i = 0; sluice_plan_entry(plan, i, NULL, &in_group, &answer); i++)
        now += in_group == group && answer.state == SLUICE_PLAN_NOW;
    return wanted && now == wanted;
}

/* The plan's start of a member; 0: not known. */
static int64_t expected(const struct sluice_gang_member *member, const struct sluice_plan *plan)
{
    struct sluice_plan_answer answer = sluice_plan_ask(plan, member->job_id);
    return answer.state == SLUICE_PLAN_LATER ? answer.start_s : 0;
}

static bool is_off(int64_t shown_s, int64_t expected_s)
{
    int64_t by = shown_s > expected_s ? shown_s - expected_s : expected_s - shown_s;
    return expected_s && by > REFRESH_S;
}

/* What a waiting member needs: to be held, another text, another expected start. */
static bool needs_care(const struct sluice_gang_member *member, const struct sluice_gang_instance *instance,
                       const struct sluice_plan *plan)
{
    char text[SLUICE_GANG_REASON_SIZE];
    const struct shown *shown = &picture.shown[member->index];
    const struct memory *memory = remembered(member->job_id, false);
    if (member->configuring || (shown->priority == 0 && !shown->ours))
        return false;
    return shown->priority || strcmp(shown->text, sluice_gang_reason(member, instance, text, sizeof text)) ||
           is_off(shown->start_s, expected(member, plan)) || (shown->latest_s && shown->latest_s <= picture.now_s) ||
           (instance->phase == SLUICE_GANG_READY && memory && memory->refreshed_s <= picture.now_s - REFRESH_S);
}

static void care(const struct sluice_gang_member *member, const struct sluice_gang_instance *instance,
                 const struct sluice_plan *plan)
{
    char text[SLUICE_GANG_REASON_SIZE];
    job_record_t *job = waiting_job(member);
    if (!job || (job->priority == 0 && !is_held_by_us(job)))
        return;
    if (job->deadline && job->deadline != NO_VAL && !deadline_ok(job, "sluice"))
        return;
    sluice_gang_reason(member, instance, text, sizeof text);
    if (job->priority || xstrcmp(job->state_desc, text))
        hold(job, text);
    refresh_priority(job);
    if (is_off(job->start_time, expected(member, plan))) {
        job->start_time = expected(member, plan);
        last_job_update = time(NULL);
    }
}

static void finish_prologs(void)
{
    for (uint32_t i = 0; i < endings.count; i++)
        endings.done(0, endings.ids[i], false);
    endings.count = 0;
}

static const struct sluice_gang_unit *unit_of(uint32_t instance)
{
    for (uint32_t i = 0; i < picture.unit_count; i++)
        if (picture.units[i].instance == instance)
            return &picture.units[i];
    return NULL;
}

/* Does the instance as a whole need the locks? */
static bool needs_action(uint32_t i, const struct sluice_plan *plan)
{
    const struct sluice_gang_instance *instance = &picture.instances[i];
    const struct sluice_gang_unit *unit = unit_of(i);
    if (instance->phase == SLUICE_GANG_GIVEN_UP && picture.cancel)
        return true;
    if (instance->phase == SLUICE_GANG_STARTING &&
        (instance->present < picture.members[instance->first].count ||
         instance->configuring == picture.members[instance->first].count || held_for(instance) > picture.limit_s))
        return true;
    return unit && all_now(instance, unit->group, plan);
}

static void act(uint32_t i, const struct sluice_plan *plan, const char *(*partition)(uint32_t job_id))
{
    struct sluice_gang_instance *instance = &picture.instances[i];
    uint32_t count = picture.members[instance->first].count;
    if (instance->phase == SLUICE_GANG_GIVEN_UP)
        cancel(instance);
    else if (instance->phase != SLUICE_GANG_STARTING)
        start(instance, partition);
    else if (instance->configuring == count)
        release(instance);
    else if (instance->present < count || held_for(instance) > picture.limit_s)
        requeue(instance);
    else
        start(instance, partition);
    (void)plan;
}

void sluice_gang_act(const struct sluice_plan *plan, const char *(*partition)(uint32_t job_id))
{
    bool locked = false;
    uint32_t cared = 0;
    for (uint32_t i = 0; i < picture.instance_count; i++) {
        struct sluice_gang_instance *instance = &picture.instances[i];
        bool acts = needs_action(i, plan);
        if (acts && !locked && !(locked = sluice_start_lock()))
            break;
        if (acts)
            act(i, plan, partition);
        for (uint32_t m = 0; !acts && m < instance->members; m++) {
            const struct sluice_gang_member *member = &picture.members[instance->first + m];
            if (!needs_care(member, instance, plan))
                continue;
            if (!locked && !(locked = sluice_start_lock()))
                return;
            care(member, instance, plan);
            if (++cared % BATCH == 0) {
                sluice_start_unlock();
                locked = false;
            }
        }
        if (endings.count && locked) { /* they take the locks themselves */
            sluice_start_unlock();
            locked = false;
            finish_prologs();
        }
    }
    if (locked)
        sluice_start_unlock();
    finish_prologs();
}

/* ---- leaving ---- */

static int abandon_job(void *item, void *argument)
{
    job_record_t *job = item;
    struct sluice_gang_prolog prolog;
    struct sluice_options options;
    (void)argument;
    if (!is_marked(job) || !gang_of(job, &options))
        return 0;
    if (IS_JOB_PENDING(job) && is_held_by_us(job)) {
        unhold(job);
    } else if (is_kept_configuring(job)) {
        set_text(job, NULL);
        if (take_kept(job->job_id, &prolog) && !prolog.go(job))
            end_prolog(job->job_id, prolog.done);
    }
    return 0;
}

bool sluice_gang_abandon(void)
{
    if (!sluice_start_lock())
        return false;
    list_for_each(job_list, abandon_job, NULL);
    sluice_start_unlock();
    finish_prologs();
    picture.memory_count = 0;
    return true;
}

void sluice_gang_fini(void)
{
    free(picture.members);
    free(picture.shown);
    free(picture.record);
    free(picture.instances);
    free(picture.units);
    free(picture.is_member);
    free(picture.memories);
    memset(&picture, 0, sizeof picture);
    free(endings.ids);
    memset(&endings, 0, sizeof endings);
    pthread_mutex_lock(&lock);
    free(kept);
    kept = NULL;
    kept_room = 0;
    pthread_mutex_unlock(&lock);
}
