/* SPDX-License-Identifier: GPL-2.0-or-later */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "controller/told_slurm.h"

#include "controller/settings.h"
#include "controller/status.h"
#include "journal/told.h"

#include <stdatomic.h>

#include "src/common/xstring.h"
#include "src/slurmctld/state_save.h"

enum { CLOCKS_APART_S = 300 }; /* as far as munge lets the clocks of two hosts be apart */

static bool is_wanted(void)
{
    const struct sluice_settings *settings = sluice_settings_acquire();
    bool wanted = settings && settings->rules->journal && settings->level > SLUICE_LEVEL_OFF;
    if (settings)
        sluice_settings_release(settings);
    return wanted;
}

/* The run that ended, and no later one of this job, or another job with its id. */
static bool is_that_run(const job_record_t *job, const struct sluice_told *told)
{
    return job->job_id == told->job && (IS_JOB_RUNNING(job) || IS_JOB_SUSPENDED(job)) && job->batch_flag &&
           job->user_id == told->uid && job->restart_cnt == told->restarts &&
           job->start_time <= told->ended + CLOCKS_APART_S && xstrcmp(job->batch_host, told->node) == 0;
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

int sluice_job_told_ended(struct job_record *job, const char *comment, uint32_t uid)
{
    struct sluice_told told;
    if (!validate_slurm_user(uid))
        return ESLURM_ACCESS_DENIED;
    if (!sluice_told_read(comment, &told)) {
        error("job_submit/sluice: JobId=%u: what its node tells of its end makes no sense: %.300s", job->job_id,
              comment);
        return ESLURM_ALREADY_DONE;
    }
    if (!is_wanted())
        return ESLURM_NOT_SUPPORTED;
    if (!is_that_run(job, &told))
        return ESLURM_ALREADY_DONE;
    info("sluice: JobId=%u ended on %s, status 0x%x, when no controller took its end", told.job, told.node,
         told.status);
    end_batch_step(job, told.status);
    (void)job_complete(told.job, uid, false, false, told.status);
    atomic_fetch_add(sluice_status_counter("journal.told_ended"), 1);
    schedule_job_save();
    schedule_node_save();
    return ESLURM_ALREADY_DONE;
}
