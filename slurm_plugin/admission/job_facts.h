/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What job_submit asks of slurmctld's own records. job_submit includes public headers only, so that it builds wherever
 * Slurm's sources are not to be had; there the controller lacks this file, and the functions, declared weak, are NULL.
 */
#ifndef SLUICE_CONTROLLER_RECORDS_H
#define SLUICE_CONTROLLER_RECORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct job_record;

/* A job as slurmctld has it, in the form of a submission: 0, NULL and false are "not asked". Strings are the record's.
 */
struct sluice_job_facts {
    const char *account, *partition, *features, *prefer, *qos, *required_nodes;
    const char *tres_per_job, *tres_per_node, *tres_per_socket, *tres_per_task, *cpus_per_tres, *mem_per_tres;
    char *const *spank_env;
    size_t spank_env_count;
    uint32_t min_nodes, max_nodes, tasks, tasks_per_node, tasks_per_gpu, sockets_per_node, cpus_per_task, min_cpus,
        min_cpus_per_node;
    uint32_t user_id;
    uint32_t nodes;                /* that a job has which is not pending */
    uint32_t time_limit, time_min; /* minutes; UINT32_MAX without end */
    int64_t deadline, begin;
    bool memory_asked, whole_nodes, one_task_per_sharing, heterogeneous, pending;
};

/* To be called from job_modify, with the locks that it has. */
__attribute__((weak)) void sluice_job_facts(const struct job_record *job, struct sluice_job_facts *facts);

/* Shows a message as the reason that a pending job waits, until the scheduler looks at the job again. */
__attribute__((weak)) void sluice_job_tell(struct job_record *job, const char *message);

/* Before a job is held or changed: counts it, and its fellow components, again in accrue_cnt, where sched/backfill has
 * taken them out on trial (accrual_slurm.c). To be called from job_modify, with the locks that it has. */
__attribute__((weak)) void sluice_accrual_restore(struct job_record *job);

/*
 * The account that a user's jobs belong to when they name none. False where there is none, or it does not fit. Takes
 * the association manager's read locks; one pass over the users.
 */
__attribute__((weak)) bool sluice_default_account(uint32_t user_id, char *account, size_t size);

/* Operator, administrator, SlurmUser or root. Takes the same locks. */
__attribute__((weak)) bool sluice_is_operator(uint32_t user_id);

#endif
