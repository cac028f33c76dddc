/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Replay of the failover journal, first step: job records that Slurm's state has, brought to what the journal says. */
#include "failover/replay_internal_slurm.h"

#include "src/common/job_resources.h"
#include "src/common/xmalloc.h"

void sluice_failover_wait_for_nodes(job_record_t *job, const struct sluice_ending *ending)
{
    time_t earliest = ending->end_time + sluice_credential_lifetime() + 1;
    if (job->details->begin_time < earliest)
        job->details->begin_time = earliest;
}

/* A requeued job's record: its run is removed. Slurm's own way (batch_requeue_fini) sends accounting what the old
 * controller has sent already. */
static void make_waiting(job_record_t *job, const struct sluice_ending *ending)
{
    sluice_job_state_set(job, JOB_PENDING);
    job->start_time = job->end_time = job->end_time_exp = job->preempt_time = 0;
    job->total_cpus = job->node_cnt = job->next_step_id = 0;
    xfree(job->batch_host);
    xfree(job->nodes);
    xfree(job->nodes_completing);
    FREE_NULL_BITMAP(job->node_bitmap);
    FREE_NULL_BITMAP(job->node_bitmap_cg);
    free_job_resources(&job->job_resrcs);
    FREE_NULL_LIST(job->gres_list_alloc);
    FREE_NULL_LIST(job->step_list);
    job->step_list = list_create(free_step_record);
    if (ending) { /* else it is run at once */
        job->bit_flags &= ~(uint64_t)JOB_ACCRUE_OVER;
        job->details->accrue_time = 0;
        job->restart_cnt = (uint16_t)ending->restarts;
        job->db_index = 0;
        job->details->submit_time = ending->end_time + 1; /* a row of its own in accounting */
        sluice_failover_wait_for_nodes(job, ending);
    }
    job->details->prolog_running = 0;
}

void sluice_failover_make_ended(job_record_t *job, const struct sluice_ending *ending)
{
    uint32_t state = ending->state & (JOB_STATE_BASE | JOB_COMPLETING);
    if (!job->nodes)
        state &= JOB_STATE_BASE;
    job->start_time = ending->start_time;
    job->end_time = ending->end_time;
    job->exit_code = ending->exit_code;
    job->derived_ec = ending->derived_code;
    job->state_reason = ending->reason;
    job->requid = ending->uid;
    xfree(job->state_desc);
    if (ending->db_index)
        job->db_index = ending->db_index;
    job->details->prolog_running = 0;
    sluice_job_state_set(job, state);
}

bool sluice_failover_make_running(job_record_t *job, const struct picture *picture)
{
    buf_t *buffer = sluice_picture_buffer(&picture->start);
    bool good = sluice_start_unpack(job, buffer);
    free_buf(buffer);
    job->details->prolog_running = 0;
    if (!good)
        sluice_failover_unsettled(job->job_id, "its start is damaged in the journal");
    return good;
}

/* The record of a task that the state file has in its array's: made one of its own, with the id that it had. */
static job_record_t *split_task(uint32_t job_id, uint32_t array_id, uint32_t task_id)
{
    job_record_t *job = find_job_record(array_id);
    if (!job || !job->array_recs || !job->array_recs->task_id_bitmap || !IS_JOB_PENDING(job) ||
        task_id >= (uint32_t)bit_size(job->array_recs->task_id_bitmap) ||
        !bit_test(job->array_recs->task_id_bitmap, task_id))
        return NULL;
    if (job_id == array_id && job->array_recs->task_cnt > 1) { /* Slurm would give the id twice */
        sluice_failover_unsettled(
            job_id, "task %u of array %u has the array's id, but the journal lacks other tasks that have left it",
            task_id, array_id);
        return NULL;
    }
    uint32_t first = slurm_conf.first_job_id;
    job->array_job_id = array_id;
    job->array_task_id = task_id;
    slurm_conf.first_job_id = job_id; /* Slurm takes the next free id from there */
    sluice_job_array_post_sched(job);
    slurm_conf.first_job_id = first;
    if (job->job_id != job_id)
        sluice_failover_unsettled(job_id, "task %u of array %u got job id %u, as its own was taken", task_id, array_id,
                                  job->job_id);
    return job;
}

job_record_t *sluice_failover_record(const struct picture *picture)
{
    uint32_t array_id, task_id;
    job_record_t *job = find_job_record(picture->job_id);
    sluice_picture_task(picture, &array_id, &task_id);
    if (task_id != NO_VAL && (!job || (job->array_recs && job->array_task_id == NO_VAL)))
        return split_task(picture->job_id, array_id, task_id);
    return job;
}

/* Whether Slurm's state has the job in a later run already than the entry says. */
static bool is_later(const job_record_t *job, uint32_t restarts)
{
    return job->restart_cnt > restarts;
}

/* Slurm has saved that start. If it did so before the launch, for which all was ready once the start was durable, the
 * job is not launched a second time, upon which its node would have it requeued while it runs. A site's own prolog, and
 * nodes that are being powered up or rebooted, take longer. */
static bool has_started(job_record_t *job, const struct sluice_start *start)
{
    if ((!IS_JOB_RUNNING(job) && !IS_JOB_SUSPENDED(job)) || job->start_time != start->at)
        return false;
    if (!slurm_conf.prolog_slurmctld && !slurm_conf.resume_program && !job->reboot) {
        job->details->prolog_running = 0;
        sluice_job_state_set(job, job->job_state & ~(uint32_t)JOB_CONFIGURING);
    }
    return true;
}

static void edit_running(struct picture *picture, job_record_t *job)
{
    struct sluice_start start;
    if (!sluice_picture_start(picture, &start)) {
        sluice_failover_unsettled(picture->job_id, "its start is damaged in the journal");
        return;
    }
    if (has_started(job, &start) || IS_JOB_FINISHED(job) || is_later(job, start.restarts))
        return;
    if (!IS_JOB_PENDING(job) || IS_JOB_COMPLETING(job))
        make_waiting(job, NULL);
    picture->done = sluice_failover_make_running(job, picture);
    if (!picture->done)
        return;
    job->bit_flags |= JOB_ACCRUE_OVER; /* Slurm's start counts only those that wait: it is in no count */
    sluice_failover_note(RESTORED, job->job_id);
}

static void edit_ended(struct picture *picture, job_record_t *job, const struct sluice_ending *ending)
{
    struct sluice_start start;
    if (IS_JOB_FINISHED(job) || is_later(job, ending->restarts))
        return;
    if (sluice_picture_start(picture, &start) && !(IS_JOB_RUNNING(job) && job->start_time == start.at))
        (void)sluice_failover_make_running(job, picture); /* for its nodes, where something may be left of it */
    sluice_failover_make_ended(job, ending);
    job->bit_flags |= JOB_ACCRUE_OVER; /* while it completes Slurm's start takes it for one that runs: as above */
    picture->done = true;
    sluice_failover_note(ENDINGS, job->job_id);
}

/* Nothing has happened to it since Slurm's state was saved. */
static void edit_known(struct picture *picture)
{
    struct sluice_start start;
    job_record_t *job = find_job_record(picture->job_id);
    picture->missing = !job;
    if (job && picture->start.length && sluice_picture_start(picture, &start))
        (void)has_started(job, &start);
}

void sluice_failover_edit(struct picture *picture)
{
    struct sluice_ending ending = {0};
    if (picture->state == KNOWN) {
        edit_known(picture);
        return;
    }
    job_record_t *job = sluice_failover_record(picture);
    if (!job)
        return;
    picture->missing = false;
    if ((picture->state == ENDED || picture->state == REQUEUED) && !sluice_picture_ending(picture, &ending)) {
        sluice_failover_unsettled(picture->job_id, "its end is damaged in the journal");
        return;
    }
    if (picture->state == RUNS)
        edit_running(picture, job);
    else if (picture->state == ENDED)
        edit_ended(picture, job, &ending);
    else if (picture->state == REQUEUED && !is_later(job, ending.restarts - 1)) {
        make_waiting(job, &ending);
        sluice_failover_note(REQUEUES, job->job_id);
    }
}
