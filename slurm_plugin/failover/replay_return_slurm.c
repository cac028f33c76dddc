/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Replay of the failover journal, second step: jobs that Slurm's state lacks, submitted again and entered where they
 * run. */
#include "failover/replay_internal_slurm.h"

#include "src/common/xmalloc.h"
#include "src/common/xstring.h"
#include "src/slurmctld/acct_policy.h"
#include "src/slurmctld/gang.h"
#include "src/slurmctld/job_scheduler.h"
#include "src/slurmctld/reservation.h"

/* Components of a heterogeneous job refer to each other. */
static void join_components(struct picture *picture, job_record_t *job, const struct sluice_submission_facts *facts)
{
    job_record_t *leader = facts->het_offset == NO_VAL ? NULL : find_job_record(picture->job_id - facts->het_offset);
    if (!leader)
        return;
    char set[64];
    uint32_t last = leader->job_id + (facts->components ? facts->components : facts->het_offset + 1) - 1;
    if (!leader->het_job_list)
        leader->het_job_list = list_create(NULL);
    list_append(leader->het_job_list, job);
    job->het_job_id = leader->job_id;
    job->het_job_offset = facts->het_offset;
    job->batch_flag = 1;
    snprintf(set, sizeof set, "%u-%u", leader->job_id, last);
    xfree(job->het_job_id_set);
    job->het_job_id_set = xstrdup(set);
}

/* Whether all components of the heterogeneous job were accepted, so that its submitter was answered. */
static bool is_whole(const struct picture *picture, const struct sluice_submission_facts *facts)
{
    if (facts->het_offset == NO_VAL || !facts->components)
        return true;
    for (uint32_t i = 0; i < facts->components; i++) {
        const struct picture *other = sluice_picture_of(picture->job_id - facts->het_offset + i, false);
        if ((!other || !other->submit.length || other->state == VOID) &&
            !find_job_record(picture->job_id - facts->het_offset + i))
            return false;
    }
    return true;
}

static job_record_t *submit_again(struct picture *picture)
{
    struct sluice_submission_facts facts;
    job_desc_msg_t *request = sluice_picture_request(picture, &facts);
    job_record_t *job = NULL;
    char *text = NULL;
    if (!request)
        sluice_failover_unsettled(picture->job_id, "its submission is damaged in the journal");
    else if (facts.flags & SLUICE_SUBMIT_CRON)
        sluice_failover_unsettled(picture->job_id,
                                  "a job of scrontab is not brought back; Slurm creates it again at its time");
    else if (!(facts.flags & SLUICE_SUBMIT_BATCH) && facts.het_offset == NO_VAL && picture->state == ENDED)
        job = NULL;
    else if (!request->script && facts.het_offset == NO_VAL)
        sluice_failover_unsettled(picture->job_id, "an allocation of salloc or srun by uid %u is not made again%s",
                                  facts.uid, picture->state == RUNS ? "; it had nodes, which it loses" : "");
    else if (!is_whole(picture, &facts))
        sluice_failover_unsettled(
            picture->job_id, "not all components of its heterogeneous job were accepted, and it was not acknowledged");
    else if (!sluice_make_ready_to_submit())
        sluice_failover_unsettled(picture->job_id, "it could not be submitted again: a plugin of Slurm's is not ready");
    else {
        struct sluice_ending ending;
        SLUICE_DESCRIBED_JOB(request) = picture->job_id;
        if (picture->state == REQUEUED &&
            sluice_picture_ending(picture, &ending)) { /* a row of its own in accounting */
            facts.submit_time = ending.end_time + 1;
            facts.db_index = 0;
        }
        bool later = SLUICE_PRIORITIES_COME_LATER && request->priority == NO_VAL;
        if (later)
            request->priority = 1;
        sluice_failover_restoring(&facts);
        int status = job_allocate(request, 0, false, NULL, facts.het_offset != NO_VAL && facts.het_offset > 0,
                                  slurm_conf.slurm_user_id, false, &job, &text, facts.version);
        if (job && job->job_state == JOB_FAILED)
            job = NULL;
        if (!job)
            sluice_failover_unsettled(picture->job_id, "it could not be submitted again: %s%s%s",
                                      slurm_strerror(status), text ? "; " : "", text ? text : "");
        else {
            if (later)
                job->direct_set_prio = 0;
            join_components(picture, job, &facts);
            sluice_script_forget_aside(picture->job_id);
            if (picture->state != ENDED)
                sluice_failover_note(RESUBMITTED, picture->job_id);
        }
    }
    xfree(text);
    sluice_failover_restoring(&sluice_failover_nothing);
    xfree(facts.name);
    xfree(facts.tasks);
    if (request)
        slurm_free_job_desc_msg(request);
    return job;
}

/* A job that runs, entered where Slurm's own start of a job enters it; its resources are counted later, with all. */
static bool enter(job_record_t *job)
{
    FREE_NULL_BITMAP(job->node_bitmap);
    if (!job->nodes || sluice_node_bitmap(job->nodes, &job->node_bitmap) || reset_node_bitmap(job))
        return false;
    allocate_nodes(job);
    job_array_start(job);
    sluice_build_node_details(job);
    rebuild_job_part_list(job);
    job_set_alloc_tres(job, false);
    sluice_acct_policy_job_begin(job);
    sluice_job_claim_reservation(job);
    jobacct_storage_g_job_start(acct_db_conn, job);
    gs_job_start(job);
    return true;
}

void sluice_failover_give_batch_step(job_record_t *job)
{
    step_record_t *step = NULL;
    struct xlist *steps = job->step_list;
    if (!job->batch_flag || !IS_JOB_RUNNING(job) || !job->node_bitmap || (steps && list_count(steps)))
        return;
    step = build_batch_step(job);
    if (step)
        step->start_time = job->start_time;
}

static void leave(job_record_t *job, const struct sluice_ending *ending)
{
    bool had_nodes = IS_JOB_RUNNING(job) && job->node_bitmap;
    sluice_failover_make_ended(job, ending);
    if (had_nodes) {
        build_cg_bitmap(job);
        sluice_job_state_set(job, (ending->state & JOB_STATE_BASE) | JOB_COMPLETING);
    }
    job_completion_logger(job, false);
    if (had_nodes)
        deallocate_nodes(job, false, false, false);
}

static bool is_to_come_back(const struct picture *picture)
{
    return picture->missing && picture->state != VOID && picture->state != KNOWN;
}

bool sluice_failover_take_in(struct picture *picture)
{
    return is_to_come_back(picture) && picture->submit.length && !find_job_record(picture->job_id) &&
           submit_again(picture);
}

bool sluice_failover_bring_back(struct picture *picture)
{
    struct sluice_ending ending = {0};
    if (!is_to_come_back(picture))
        return false;
    job_record_t *job = sluice_failover_record(picture);
    if (!job && !picture->submit.length && picture->state == RUNS)
        sluice_failover_unsettled(picture->job_id,
                                  "it runs, but neither Slurm's state nor the journal has its submission");
    if (!job)
        return false;
    if ((picture->state == ENDED || picture->state == REQUEUED) && !sluice_picture_ending(picture, &ending)) {
        sluice_failover_unsettled(picture->job_id, "its end is damaged in the journal");
        return true;
    }
    if (picture->state == REQUEUED) {
        job->restart_cnt = (uint16_t)ending.restarts;
        sluice_failover_wait_for_nodes(job, &ending);
    }
    if (picture->start.length && sluice_failover_make_running(job, picture)) {
        if (!enter(job))
            sluice_failover_unsettled(job->job_id, "its nodes %s no longer exist", job->nodes ? job->nodes : "");
        else if (picture->state == RUNS)
            sluice_failover_note(RESTORED, job->job_id);
    }
    return true;
}

void sluice_failover_end_again(struct picture *picture)
{
    struct sluice_ending ending;
    job_record_t *job = find_job_record(picture->job_id);
    if (!job || !picture->missing || picture->state != ENDED || !sluice_picture_ending(picture, &ending))
        return;
    leave(job, &ending);
    sluice_failover_note(ENDINGS, job->job_id);
}
