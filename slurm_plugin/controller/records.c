/* SPDX-License-Identifier: GPL-2.0-or-later */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "controller/records.h"

#include "src/common/assoc_mgr.h"
#include "src/common/xmalloc.h"
#include "src/common/xstring.h"

#include <stdio.h>
#include <string.h>

static uint32_t given32(uint32_t value)
{
    return value == NO_VAL ? 0 : value;
}

static uint32_t given16(uint16_t value)
{
    return value == NO_VAL16 || value == INFINITE16 ? 0 : value;
}

void sluice_job_facts(const struct job_record *job, struct sluice_job_facts *facts)
{
    const sluice_job_details *details = job->details;
    *facts = (struct sluice_job_facts){
        .account = job->account,
        .partition = job->partition,
        .qos = job->qos_ptr ? job->qos_ptr->name : NULL,
        .tres_per_job = job->tres_per_job,
        .tres_per_node = job->tres_per_node,
        .tres_per_socket = job->tres_per_socket,
        .tres_per_task = job->tres_per_task,
        .cpus_per_tres = job->cpus_per_tres,
        .mem_per_tres = job->mem_per_tres,
        .spank_env = job->spank_job_env,
        .spank_env_count = job->spank_job_env ? job->spank_job_env_size : 0,
        .time_limit = given32(job->time_limit),
        .time_min = given32(job->time_min),
        .deadline = job->deadline == (time_t)NO_VAL ? 0 : (int64_t)job->deadline,
        .heterogeneous = job->het_job_id != 0,
        .pending = IS_JOB_PENDING(job),
        .one_task_per_sharing = SLUICE_ONE_TASK_PER_SHARING(job->bit_flags),
    };
    if (!details)
        return;
    facts->features = details->features;
    facts->min_nodes = given32(details->min_nodes);
    facts->max_nodes = given32(details->max_nodes);
    facts->tasks = given32(details->num_tasks);
    facts->tasks_per_node = given16(details->ntasks_per_node);
    facts->tasks_per_gpu = given16(details->ntasks_per_tres);
    facts->cpus_per_task = given16(details->cpus_per_task);
    facts->min_cpus_per_node = given16((uint16_t)details->pn_min_cpus);
    facts->memory_asked = details->pn_min_memory != NO_VAL64;
    facts->whole_nodes = SLUICE_WHOLE_NODE(details);
    facts->sockets_per_node = details->mc_ptr ? given16(details->mc_ptr->sockets_per_node) : 0;
}

void sluice_job_tell(struct job_record *job, const char *message)
{
    if (!IS_JOB_PENDING(job))
        return;
    xfree(job->state_desc);
    job->state_desc = xstrdup(message);
}

bool sluice_default_account(uint32_t user_id, char *account, size_t size)
{
    assoc_mgr_lock_t locks = {.assoc = READ_LOCK, .user = READ_LOCK};
    slurmdb_user_rec_t user = {.uid = user_id};
    bool found = false;
    assoc_mgr_lock(&locks);
    if (assoc_mgr_fill_in_user(acct_db_conn, &user, accounting_enforce, NULL, true) == SLURM_SUCCESS &&
        user.default_acct && strlen(user.default_acct) < size) {
        memcpy(account, user.default_acct, strlen(user.default_acct) + 1);
        found = true;
    }
    assoc_mgr_unlock(&locks);
    return found;
}

bool sluice_is_operator(uint32_t user_id)
{
    return validate_operator(user_id);
}
