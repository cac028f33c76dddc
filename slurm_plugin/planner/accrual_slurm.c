/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Keeps Slurm's count of jobs that gather age (accrue_cnt, for MaxJobsAccrue and GrpJobsAccrue) right.
 *
 * sched/backfill tries the limits of a heterogeneous job by letting its components begin and end
 * (_het_job_limit_check), which takes them out of the count for good. Those that do not start keep waiting without
 * being counted; being held or changed takes them out once more, and the count underflows. Stock Slurm has this fault,
 * too.
 */
#include "planner/planner_internal_slurm.h"

#include "admission/admission.h"
#include "src/slurmctld/acct_policy.h"

/* Taken out, and still waiting: other jobs that began and wait again have no accrue time. An array that would have to
 * be split, which heterogeneous jobs never are, is left alone. */
bool sluice_accrual_lost(const job_record_t *job)
{
    return IS_JOB_PENDING(job) && !IS_JOB_COMPLETING(job) && job->details && job->details->accrue_time &&
           (job->bit_flags & JOB_ACCRUE_OVER) && !(job->array_recs && job->array_recs->task_cnt);
}

/* As slurmctld counts jobs that it has loaded (read_config.c). */
static int restore(void *item, void *argument)
{
    job_record_t *job = item;
    (void)argument;
    if (!sluice_accrual_lost(job))
        return 0;
    time_t accrue_time = job->details->accrue_time;
    job->bit_flags &= ~(uint64_t)JOB_ACCRUE_OVER;
    job->details->accrue_time = 0;
    acct_policy_add_accrue_time(job, false);
    if (job->details->accrue_time)
        job->details->accrue_time = accrue_time;
    return 0;
}

void sluice_accrual_restore(struct job_record *job)
{
    job_record_t *leader = job->het_job_id ? find_job_record(job->het_job_id) : NULL;
    if (leader && leader->het_job_list)
        list_for_each(leader->het_job_list, restore, NULL);
    else
        restore(job, NULL);
}

void sluice_accrual_restore_all(void)
{
    if (!sluice_start_lock())
        return;
    list_for_each(job_list, restore, NULL);
    sluice_start_unlock();
}
