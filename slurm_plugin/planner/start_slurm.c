/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Starting jobs for the planner and for gangs.
 *
 * Starting is what sched/backfill does: slurmctld's write locks, Slurm's own checks of the job, select_nodes(), launch.
 * The planner does this itself, as the main scheduler stops a partition at the first job that the hook refuses, and
 * neither it nor sched/backfill look for the jobs that a plan starts out of turn; docs/decisions.md has what else was
 * tried.
 */
#include "planner/planner_internal_slurm.h"

#include <time.h>

#include "src/common/assoc_mgr.h"
#include "src/common/xstring.h"
#include "src/slurmctld/acct_policy.h"
#include "src/slurmctld/job_scheduler.h"
#include "src/slurmctld/licenses.h"
#include "src/slurmctld/locks.h"

static const slurmctld_lock_t START_LOCKS = {
    .conf = READ_LOCK, .job = WRITE_LOCK, .node = WRITE_LOCK, .part = READ_LOCK, .fed = READ_LOCK};

bool sluice_start_lock(void)
{
    if (!sluice_in_charge() || !job_list)
        return false;
    lock_slurmctld(START_LOCKS);
    if (sluice_in_charge())
        return true;
    unlock_slurmctld(START_LOCKS);
    return false;
}

void sluice_start_unlock(void)
{
    unlock_slurmctld(START_LOCKS);
}

/* May the job's account still use its QOS? It could when it was submitted. */
static bool has_qos(const job_record_t *job)
{
    assoc_mgr_lock_t locks = {.assoc = READ_LOCK, .qos = READ_LOCK};
    bool valid = true;
    if (!job->qos_id || !(accounting_enforce & ACCOUNTING_ENFORCE_QOS) || job->limit_set.qos)
        return true;
    assoc_mgr_lock(&locks);
    if (job->assoc_ptr)
        valid = job->qos_id < g_qos_count && job->assoc_ptr->usage && job->assoc_ptr->usage->valid_qos &&
                bit_test(job->assoc_ptr->usage->valid_qos, job->qos_id);
    assoc_mgr_unlock(&locks);
    return valid;
}

/* Everything that the main scheduler asks before it looks for nodes. Sets the job's reason where Slurm's own checks
 * do. */
static bool may_start(job_record_t *job)
{
    job_record_t *same = job;
    if (!IS_JOB_PENDING(job) || IS_JOB_COMPLETING(job) || IS_JOB_REVOKED(job) || !job->details || !job->priority ||
        job->details->prolog_running || job->het_job_id || job->fed_details || !job->part_ptr ||
        job->preempt_in_progress)
        return false;
    if (!(job->part_ptr->state_up & PARTITION_SCHED) || !job_independent(job))
        return false;
    if (job->deadline && job->deadline != NO_VAL && (job->deadline <= time(NULL) || !deadline_ok(job, "sluice")))
        return false;
    if ((job->array_task_id != NO_VAL || job->array_recs) && !job_array_start_test(job))
        return false;
    if (job_limits_check(&same, false) != WAIT_NO_REASON || !has_qos(job))
        return false;
    if (license_job_test(job, time(NULL), true) == SLURM_SUCCESS)
        return true;
    job->state_reason = WAIT_LICENSES;
    xfree(job->state_desc);
    last_job_update = time(NULL);
    return false;
}

static bool is_limit(uint32_t minutes)
{
    return minutes != NO_VAL && minutes != INFINITE;
}

/* As the main scheduler has it (_schedule): a job with a deadline may run until then, if its own limit, else its
 * partition's, allows so long. */
static uint32_t time_limit_of(const job_record_t *job)
{
    if (!job->deadline || job->deadline == NO_VAL)
        return job->time_limit;
    int64_t left_s = job->deadline - time(NULL);
    uint32_t left = left_s < 120 ? 1 : (uint32_t)(left_s / 60);
    uint32_t limit = is_limit(job->time_limit)               ? job->time_limit
                     : is_limit(job->part_ptr->default_time) ? job->part_ptr->default_time
                                                             : job->part_ptr->max_time;
    return is_limit(limit) && limit < left ? limit : left;
}

/* As sched/backfill starts a job (_start_job): not on nodes that are kept for others. Of an array, the record of the
 * tasks that still wait is another one then, with a copy of what is set here. */
static int select_nodes_but(job_record_t *job, const bitstr_t *kept)
{
    if (!kept)
        return sluice_slurm_select_nodes(job);
    bitstr_t *own = job->details->exc_node_bitmap;
    const bool array = job->array_recs;
    if (own) {
        job->details->exc_node_bitmap = bit_copy(own);
        bit_or(job->details->exc_node_bitmap, (bitstr_t *)(uintptr_t)kept);
    } else {
        job->details->exc_node_bitmap = bit_copy((bitstr_t *)(uintptr_t)kept);
    }
    int rc = sluice_slurm_select_nodes(job);
    job_record_t *rest = array ? find_job_record(job->array_job_id) : NULL;
    if (rest && rest != job && rest->array_recs && rest->details) {
        FREE_NULL_BITMAP(rest->details->exc_node_bitmap);
        rest->details->exc_node_bitmap = own ? bit_copy(own) : NULL;
    }
    if (!job->details) { /* as sched/backfill asks */
        FREE_NULL_BITMAP(own);
        return rc;
    }
    FREE_NULL_BITMAP(job->details->exc_node_bitmap);
    job->details->exc_node_bitmap = own;
    return rc;
}

enum sluice_start sluice_start_job(job_record_t *job, const char *partition, const bitstr_t *kept)
{
    part_record_t *part = partition ? find_part_record((char *)(uintptr_t)partition) : NULL;
    part_record_t *before = job->part_ptr;
    if (part)
        job->part_ptr = part;
    if (!may_start(job)) {
        if (IS_JOB_PENDING(job))
            job->part_ptr = before;
        return SLUICE_START_LIMITED;
    }
    uint32_t limit = job->time_limit;
    job->time_limit = time_limit_of(job);
    set_job_features_use(job->details);
    int rc = select_nodes_but(job, kept);
    if (rc != SLURM_SUCCESS) {
        job->time_limit = limit;
        job->part_ptr = before;
        return rc == ESLURM_NODES_BUSY || rc == ESLURM_NODE_NOT_AVAIL || rc == ESLURM_RESERVATION_BUSY
                   ? SLUICE_START_BUSY
                   : SLUICE_START_LIMITED;
    }
    last_job_update = time(NULL);
    info("sluice: started %pJ in %s on %s", job, job->part_ptr->name, job->nodes);
    if (!job->batch_flag)
        srun_allocate(job);
    else if (!IS_JOB_CONFIGURING(job))
        launch_job(job);
    rebuild_job_part_list(job);
    return SLUICE_START_DONE;
}
