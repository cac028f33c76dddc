/* SPDX-License-Identifier: GPL-2.0-or-later */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "failover/end_notice.h"
#include "runtime/runtime.h"

#include <stdatomic.h>

#include "src/common/xstring.h"
#include "src/slurmctld/state_save.h"

enum { CLOCKS_APART_S = 300 }; /* as much as munge lets the clocks of two hosts differ */

static bool is_wanted(void)
{
    const struct sluice_settings *settings = sluice_settings_acquire();
    bool wanted = settings && settings->rules->journal && settings->level > SLUICE_LEVEL_OFF;
    if (settings)
        sluice_settings_release(settings);
    return wanted;
}

/* The run that ended, and no later one of this job, or another job with its id. */
static bool is_that_run(const job_record_t *job, const struct sluice_end_notice *notice)
{
    return job->job_id == notice->job && (IS_JOB_RUNNING(job) || IS_JOB_SUSPENDED(job)) && job->batch_flag &&
           job->user_id == notice->uid && job->restart_cnt == notice->restarts &&
           job->start_time <= notice->ended + CLOCKS_APART_S && xstrcmp(job->batch_host, notice->node) == 0;
}

/* Accounting has the batch script as a step. */
static void end_batch_step(job_record_t *job, uint32_t status)
{
    slurm_step_id_t id = {.job_id = job->job_id, .step_id = SLURM_BATCH_SCRIPT, .step_het_comp = NO_VAL};
    step_record_t *step = find_step_record(job, &id);
    if (!step || step->step_id.step_id != SLURM_BATCH_SCRIPT)
        return;
    step->exit_code = status;
    step->state |= JOB_COMPLETING;
    jobacct_storage_g_step_complete(acct_db_conn, step);
    delete_step_record(job, step);
}

int sluice_end_notice_apply(struct job_record *job, const char *comment, uint32_t uid)
{
    struct sluice_end_notice notice;
    if (!validate_slurm_user(uid))
        return ESLURM_ACCESS_DENIED;
    if (!sluice_end_notice_parse(comment, &notice)) {
        error("job_submit/sluice: JobId=%u: malformed notice of its end: %.300s", job->job_id, comment);
        return ESLURM_ALREADY_DONE;
    }
    if (!is_wanted())
        return ESLURM_NOT_SUPPORTED;
    if (!is_that_run(job, &notice))
        return ESLURM_ALREADY_DONE;
    info("sluice: JobId=%u ended on %s, status 0x%x, while no controller received its end", notice.job, notice.node,
         notice.status);
    end_batch_step(job, notice.status);
    (void)sluice_job_complete(job, uid, notice.status);
    atomic_fetch_add(sluice_status_counter("journal.end_notices"), 1);
    atomic_fetch_add(sluice_status_counter("journal.told_ended"), 1); /* the old name, kept for one release */
    schedule_job_save();
    schedule_node_save();
    return ESLURM_ALREADY_DONE;
}
