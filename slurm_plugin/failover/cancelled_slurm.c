/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * A job that was cancelled stays cancelled, also when its node could not confirm its launch.
 *
 * A controller that dies between sending a batch job to its node and the node's answer leaves slurmd to ask the next
 * controller to requeue the job, which slurmctld does with a cancelled one, too. A node cannot be distinguished there
 * from an administrator, so the job itself is marked as not to be requeued: one whose launch an earlier controller may
 * have begun, and that was cancelled when this one began to lead or soon after.
 */
#include "failover/failover_internal_slurm.h"

enum { LAUNCH_S = 600 }; /* from a job's start until its node no longer tries to confirm it: several time-outs */

static time_t led_since; /* under the job write lock */

void sluice_failover_cancelled(job_record_t *job)
{
    bool may_be_launched = job->start_time <= led_since && job->start_time > led_since - LAUNCH_S;
    if (!may_be_launched || time(NULL) > led_since + LAUNCH_S || !job->batch_flag || !job->details ||
        !job->details->requeue)
        return;
    job->details->requeue = 0;
    info("sluice: JobId=%u is cancelled and cannot be requeued: its node may still ask for it, as the last "
         "controller ended during its launch",
         job->job_id);
}

static int look(void *item, void *argument)
{
    job_record_t *job = item;
    (void)argument;
    if (IS_JOB_CANCELLED(job) && IS_JOB_COMPLETING(job))
        sluice_failover_cancelled(job);
    return 0;
}

void sluice_failover_leads(void)
{
    led_since = time(NULL);
    list_for_each(job_list, look, NULL);
}
