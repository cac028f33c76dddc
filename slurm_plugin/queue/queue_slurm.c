/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The half of queue.h that reads slurmctld's lists. */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "runtime/runtime.h"

#include <time.h>

#include "queue/queue.h"
#include "src/slurmctld/locks.h"

static const slurmctld_lock_t READ_LOCKS = {.conf = READ_LOCK, .job = READ_LOCK, .node = READ_LOCK, .part = READ_LOCK};

bool sluice_queue_lock(void)
{
    if (!sluice_in_charge() || !job_list || !part_list)
        return false;
    lock_slurmctld(READ_LOCKS);
    if (sluice_in_charge())
        return true;
    unlock_slurmctld(READ_LOCKS);
    return false;
}

void sluice_queue_unlock(void)
{
    unlock_slurmctld(READ_LOCKS);
}

/* Slurm's minutes as seconds; -1: no limit. */
static int64_t seconds(uint32_t minutes)
{
    return minutes == INFINITE || minutes == NO_VAL ? -1 : (int64_t)minutes * 60;
}

static int64_t limit_of(const job_record_t *job)
{
    if (job->time_limit != NO_VAL)
        return seconds(job->time_limit);
    if (!job->part_ptr)
        return -1;
    uint32_t usual = job->part_ptr->default_time;
    return seconds(usual == NO_VAL ? job->part_ptr->max_time : usual);
}

struct gres_sum {
    uint32_t gpu_id, shard_id; /* of the GRES plugins */
    uint64_t gpus, shards;
};

struct copying {
    struct sluice_queue *queue;
    sluice_queue_visit visit;
    void *argument;
    uint32_t choice_number; /* while the partitions of one job are copied */
    const part_record_t *first;
    struct sluice_queue_job *entry;
    const job_record_t *job;
    const part_record_t *parts[SLUICE_QUEUE_MAX_PARTITIONS]; /* of the queue's partitions: compared, never followed */
    struct gres_sum gres;                                    /* zero but for the ids */
};

static int add_gres(void *entry, void *argument)
{
    const gres_state_t *state = entry;
    struct gres_sum *sum = argument;
    const gres_job_state_t *asked = state->gres_data;
    if (!asked || asked->total_gres == NO_CONSUME_VAL64)
        return 0;
    if (state->plugin_id == sum->gpu_id)
        sum->gpus += asked->total_gres;
    else if (state->plugin_id == sum->shard_id)
        sum->shards += asked->total_gres;
    return 0;
}

static void copy_gres(struct copying *copying, struct sluice_queue_job *entry, struct xlist *list)
{
    struct gres_sum sum = copying->gres;
    if (list)
        list_for_each(list, add_gres, &sum);
    entry->gpus = sum.gpus > UINT32_MAX ? UINT32_MAX : (uint32_t)sum.gpus;
    entry->gpu_memory_mib = sum.shards;
}

static int32_t whole_term(double term)
{
    return term >= INT32_MAX ? INT32_MAX : term <= INT32_MIN ? INT32_MIN : (int32_t)term;
}

static void copy_slurm_terms(struct sluice_queue_job *entry, const job_record_t *job)
{
    const sluice_prio_factors *factors = job->prio_factors;
    if (!factors)
        return;
    double tres = 0;
    for (uint32_t i = 0; factors->priority_tres && i < factors->tres_cnt; i++)
        tres += factors->priority_tres[i];
    entry->slurm_term[SLUICE_QUEUE_TERM_AGE] = whole_term(factors->priority_age);
    entry->slurm_term[SLUICE_QUEUE_TERM_ASSOC] = whole_term(factors->priority_assoc);
    entry->slurm_term[SLUICE_QUEUE_TERM_FAIR_SHARE] = whole_term(factors->priority_fs);
    entry->slurm_term[SLUICE_QUEUE_TERM_JOB_SIZE] = whole_term(factors->priority_js);
    entry->slurm_term[SLUICE_QUEUE_TERM_PARTITION] = whole_term(factors->priority_part);
    entry->slurm_term[SLUICE_QUEUE_TERM_QOS] = whole_term(factors->priority_qos);
    entry->slurm_term[SLUICE_QUEUE_TERM_TRES] = whole_term(tres);
    entry->slurm_term[SLUICE_QUEUE_TERM_NICE] = whole_term((double)NICE_OFFSET - (double)factors->nice);
}

/* ---- partitions ---- */

static int copy_partition(void *item, void *argument)
{
    const part_record_t *part = item;
    struct copying *copying = argument;
    struct sluice_queue_partition *to = sluice_queue_add_partition(copying->queue);
    if (!to)
        return 0;
    copying->parts[copying->queue->partition_count - 1] = part;
    to->name = sluice_queue_intern(copying->queue, part->name);
    to->tier = part->priority_tier;
    to->limit_s = seconds(part->max_time);
    to->up = part->state_up == PARTITION_UP;
    to->usual = part == default_part_loc;
    to->exclusive_user = part->flags & PART_FLAG_EXCLUSIVE_USER;
    to->oversubscribe = part->max_share;
    if (!part->node_bitmap)
        return 0;
    int64_t last = bit_fls(part->node_bitmap);
    for (int64_t node = bit_ffs(part->node_bitmap); node >= 0 && node <= last && node < copying->queue->node_count;
         node++) {
        if (bit_test(part->node_bitmap, node))
            to->nodes[node / 64] |= UINT64_C(1) << (node % 64);
    }
    return 0;
}

/* A partition's number in the queue; partition_count when it is none of them. */
static uint32_t partition_number(const struct copying *copying, const part_record_t *part)
{
    uint32_t number = 0;
    while (number < copying->queue->partition_count && copying->parts[number] != part)
        number++;
    return number;
}

static void add_choice(struct copying *copying, const part_record_t *part, uint32_t priority)
{
    uint32_t number = partition_number(copying, part);
    if (number < copying->queue->partition_count && copying->entry->choices < SLUICE_QUEUE_MAX_JOB_PARTITIONS &&
        sluice_queue_add_choice(copying->queue, number, priority))
        copying->entry->choices++;
    else
        copying->entry->flags |= SLUICE_QUEUE_CUT;
}

static int copy_choice(void *item, void *argument)
{
    const part_record_t *part = item;
    struct copying *copying = argument;
    const uint32_t *priorities = SLUICE_PARTITION_PRIORITIES(copying->job);
    uint32_t number = copying->choice_number++;
    if (part != copying->first)
        add_choice(copying, part, priorities ? priorities[number] : copying->job->priority);
    return 0;
}

struct search {
    const part_record_t *part;
    int at, found;
};

static int find_part(void *item, void *argument)
{
    struct search *search = argument;
    if (item == search->part && search->found < 0)
        search->found = search->at;
    search->at++;
    return 0;
}

/* The partition that the job is in now comes first. */
static void copy_choices(struct copying *copying)
{
    const job_record_t *job = copying->job;
    const uint32_t *priorities = SLUICE_PARTITION_PRIORITIES(job);
    copying->first = job->part_ptr;
    if (job->part_ptr) {
        struct search search = {.part = job->part_ptr, .found = -1};
        if (job->part_ptr_list && priorities)
            list_for_each(job->part_ptr_list, find_part, &search);
        add_choice(copying, job->part_ptr, search.found >= 0 ? priorities[search.found] : job->priority);
    }
    copying->choice_number = 0;
    if (job->part_ptr_list)
        list_for_each(job->part_ptr_list, copy_choice, copying);
}

/* ---- jobs ---- */

static void copy_common(struct copying *copying, struct sluice_queue_job *entry, const job_record_t *job)
{
    struct sluice_queue *queue = copying->queue;
    entry->id = job->job_id;
    entry->array_id = job->array_job_id;
    entry->array_task = job->array_job_id && job->array_task_id != NO_VAL ? job->array_task_id : UINT32_MAX;
    entry->tasks = job->array_recs && job->array_recs->task_cnt ? job->array_recs->task_cnt : 1;
    entry->het_id = job->het_job_id;
    entry->uid = job->user_id;
    entry->account = sluice_queue_intern(queue, job->account);
    entry->qos = job->qos_ptr ? sluice_queue_intern(queue, job->qos_ptr->name) : 0;
    entry->name_hash = sluice_queue_hash(job->name);
    entry->state = job->job_state;
    entry->reason = job->state_reason;
    entry->priority = job->priority;
    entry->site_factor = job->site_factor;
    entry->deadline_s = job->deadline == (time_t)NO_VAL ? 0 : job->deadline;
    entry->start_s = job->start_time;
    entry->end_s = job->end_time;
    entry->limit_s = limit_of(job);
    entry->suspended_s = job->tot_sus_time;
    if (job->direct_set_prio)
        entry->flags |= SLUICE_QUEUE_PRIORITY_FIXED;
    if (job->het_job_id)
        entry->flags |= SLUICE_QUEUE_HETEROGENEOUS;
    if (job->resv_name)
        entry->flags |= SLUICE_QUEUE_RESERVATION;
    const sluice_job_details *details = job->details;
    if (!details)
        return;
    entry->submit_s = details->submit_time;
    entry->nodes_min = details->min_nodes;
    entry->nodes_max = details->max_nodes ? details->max_nodes : details->min_nodes;
    /* What Slurm's own age counts from; 0 while a job is held, dependent or not due. */
    entry->eligible_s = details->accrue_time;
    if (SLUICE_WHOLE_NODE(details))
        entry->flags |= SLUICE_QUEUE_EXCLUSIVE;
}

static void copy_pending(struct copying *copying, job_record_t *job)
{
    struct sluice_queue_job *entry = sluice_queue_add_pending(copying->queue);
    if (!entry)
        return;
    copy_common(copying, entry, job);
    copy_gres(copying, entry, job->gres_list_req);
    copy_slurm_terms(entry, job);
    const sluice_job_details *details = job->details;
    if (job->priority == 0)
        entry->flags |= SLUICE_QUEUE_HELD;
    if (details && details->dependency)
        entry->flags |= SLUICE_QUEUE_DEPENDENT;
    if (details && (details->begin_time == 0 || details->begin_time > copying->queue->taken_s))
        entry->flags |= SLUICE_QUEUE_NOT_ELIGIBLE;
    copying->entry = entry;
    copying->job = job;
    copy_choices(copying);
    if (copying->visit)
        copying->visit(copying->argument, copying->queue, entry, job);
}

static void copy_nodes(struct sluice_queue *queue, struct sluice_queue_job *entry, const bitstr_t *bitmap)
{
    if (!bitmap)
        return;
    bitstr_t *nodes = (bitstr_t *)(uintptr_t)bitmap;
    int64_t last = bit_fls(nodes);
    for (int64_t node = bit_ffs(nodes); node >= 0 && node <= last; node++) {
        if (!bit_test(nodes, node))
            continue;
        if (!sluice_queue_add_node(queue, (uint32_t)node)) {
            entry->flags |= SLUICE_QUEUE_CUT;
            return;
        }
        entry->nodes++;
    }
}

static void copy_running(struct copying *copying, job_record_t *job)
{
    struct sluice_queue_job *entry = sluice_queue_add_running(copying->queue);
    if (!entry)
        return;
    copy_common(copying, entry, job);
    copy_gres(copying, entry, job->gres_list_alloc);
    if (IS_JOB_CONFIGURING(job))
        entry->flags |= SLUICE_QUEUE_CONFIGURING;
    if (IS_JOB_COMPLETING(job))
        entry->flags |= SLUICE_QUEUE_COMPLETING;
    if (IS_JOB_SUSPENDED(job))
        entry->flags |= SLUICE_QUEUE_SUSPENDED;
    else if (entry->limit_s < 0 && !IS_JOB_COMPLETING(job))
        entry->end_s = INT64_MAX;
    copying->entry = entry;
    copying->job = job;
    copy_choices(copying);
    copy_nodes(copying->queue, entry, IS_JOB_COMPLETING(job) ? job->node_bitmap_cg : job->node_bitmap);
    if (copying->visit)
        copying->visit(copying->argument, copying->queue, entry, job);
}

static void copy_ended(struct copying *copying, const job_record_t *job)
{
    struct sluice_queue_job *entry = sluice_queue_add_ended(copying->queue);
    if (!entry)
        return;
    copy_common(copying, entry, job);
    copy_gres(copying, entry, job->gres_list_alloc);
    if (IS_JOB_COMPLETE(job) || IS_JOB_FAILED(job) || IS_JOB_TIMEOUT(job))
        entry->flags |= SLUICE_QUEUE_RAN_OUT;
}

static int copy_job(void *item, void *argument)
{
    job_record_t *job = item;
    struct copying *copying = argument;
    if (IS_JOB_REVOKED(job))
        return 0;
    if (IS_JOB_PENDING(job))
        copy_pending(copying, job);
    else if (IS_JOB_RUNNING(job) || IS_JOB_SUSPENDED(job))
        copy_running(copying, job);
    else {
        copy_ended(copying, job);
        if (IS_JOB_COMPLETING(job)) /* its nodes are still held */
            copy_running(copying, job);
    }
    return 0;
}

void sluice_queue_take(struct sluice_queue *queue, sluice_queue_visit visit, void *argument)
{
    uint64_t from = (uint64_t)sluice_clock_us(CLOCK_MONOTONIC),
             cpu_from = (uint64_t)sluice_clock_us(CLOCK_THREAD_CPUTIME_ID);
    struct copying copying = {.queue = queue,
                              .visit = visit,
                              .argument = argument,
                              .gres = {.gpu_id = gres_build_id("gpu"), .shard_id = gres_build_id("shard")}};
    sluice_queue_clear(queue, (uint32_t)node_record_count);
    queue->taken_s = time(NULL);
    queue->job_update_s = last_job_update;
    list_for_each(part_list, copy_partition, &copying);
    list_for_each(job_list, copy_job, &copying);
    queue->taken_us = (uint64_t)sluice_clock_us(CLOCK_MONOTONIC) - from;
    queue->taken_cpu_us = (uint64_t)sluice_clock_us(CLOCK_THREAD_CPUTIME_ID) - cpu_from;
}
