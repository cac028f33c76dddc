/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What admission reads in slurmctld's own records. All else of job_submit includes only public headers, so that it
 * builds without Slurm's sources; then job_facts_slurm.c is missing, and these functions, declared weak, are NULL.
 */
#ifndef SLUICE_ADMISSION_JOB_FACTS_H
#define SLUICE_ADMISSION_JOB_FACTS_H

#include "admission/submission.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct job_record;

/* A job as slurmctld has it, in the form of a submission: 0, NULL and false are "not asked". Strings are the
 * record's. */
struct sluice_job_facts {
    const char *account, *partition, *features, *prefer, *qos, *required_nodes;
    const char *tres_per_job, *tres_per_node, *tres_per_socket, *tres_per_task, *cpus_per_tres, *mem_per_tres;
    char *const *spank_env;
    size_t spank_env_count;
    uint32_t min_nodes, max_nodes, tasks, tasks_per_node, tasks_per_gpu, sockets_per_node, cpus_per_task, min_cpus,
        min_cpus_per_node;
    uint32_t user_id;
    uint32_t nodes;                /* of a job that is not pending */
    uint32_t time_limit, time_min; /* minutes; UINT32_MAX without end */
    int64_t deadline, begin;
    bool memory_asked, whole_nodes, one_task_per_sharing, heterogeneous, pending;
};

/* To be called from job_modify, with the locks that it has. */
__attribute__((weak)) void sluice_job_facts(const struct job_record *job, struct sluice_job_facts *facts);

/* Shows a message as the reason why a pending job waits, until the scheduler looks at the job again. */
__attribute__((weak)) void sluice_job_show_reason(struct job_record *job, const char *message);

/* Before a job is held or changed: counts it, and its fellow components, again in accrue_cnt, where sched/backfill has
 * taken them out on trial (accrual_slurm.c). To be called from job_modify, with the locks that it has. */
__attribute__((weak)) void sluice_accrual_restore(struct job_record *job);

/*
 * The account of a user's jobs that name none. False if there is none, or it does not fit. Takes the association
 * manager's read locks; one pass over the users.
 */
__attribute__((weak)) bool sluice_default_account(uint32_t user_id, char *account, size_t size);

/*
 * Whether a user's jobs may belong to the account, as far as associations say: where Slurm requires none, any may.
 * Takes the same locks; one pass over all associations where a user has only associations of partitions, or none.
 */
__attribute__((weak)) bool sluice_has_account(uint32_t user_id, const char *account);

/* What Slurm's configuration says of the network. */
__attribute__((weak)) enum sluice_topology sluice_known_topology(void);

/* Operator, administrator, SlurmUser or root. Takes the same locks. */
__attribute__((weak)) bool sluice_is_operator(uint32_t user_id);

#endif
