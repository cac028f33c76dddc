/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Power budgets in slurmctld, as its records have jobs and nodes; see watts.h. Locks: config, job and node read. */
#ifndef SLUICE_PLANNER_WATTS_SLURM_H
#define SLUICE_PLANNER_WATTS_SLURM_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "mirror/mirror.h"
#include "planner/watts.h"

/* What jobs' watts are found from, for one mirror while its cluster stays. */
struct sluice_watts_basis {
    const struct sluice_rules *rules;
    const struct sluice_draws *draws;
    struct sluice_mirror *mirror;
    uint64_t models[SLUICE_RULES_MAX_CLASSES]; /* by class: those of its GPU types */
};
void sluice_watts_begin(struct sluice_watts_basis *basis, const struct sluice_rules *rules,
                        const struct sluice_draws *draws, struct sluice_mirror *mirror);

/* Of a job that waits, and of one that runs. */
struct sluice_job_watts sluice_watts_of_pending(const struct sluice_watts_basis *basis, const job_record_t *job,
                                                const struct sluice_request *request);
/* ... of one that starts on these parts ... */
struct sluice_job_watts sluice_watts_of_start(const struct sluice_watts_basis *basis, const job_record_t *job,
                                              const struct sluice_part *parts, uint32_t count);
struct sluice_job_watts sluice_watts_of_running(const struct sluice_watts_basis *basis, const job_record_t *job);

/* A job starts with a cap on each of its GPUs, of so many watts; 0: with none. Locks: job write. */
void sluice_watts_set_cap(job_record_t *job, uint32_t watts);

/* The policy's budgets on the nodes of a cluster. */
struct sluice_bound_budgets {
    struct sluice_power *power;
    uint32_t power_nodes;
    uint32_t checksum;   /* of the policy that it was made from ... */
    uint64_t generation; /* ... and of the mirror; 0: none yet */
    uint32_t nodes, node_words, count;
    uint64_t *words;    /* [count * node_words] of budgets that name nodes */
    uint64_t *counting; /* [nodes] */
    int64_t base[SLUICE_POWER_MAX_BUDGETS];
    int64_t guaranteed[SLUICE_POWER_MAX_BUDGETS]; /* kept for running jobs: can be more than `kept` of the policy */
};

/* Follow the policy and the nodes; false: no memory. */
bool sluice_budgets_bind(struct sluice_bound_budgets *bound, const struct sluice_watts_basis *basis);
/* Count what is kept for a running job's GPUs. Each bind begins at zero. */
void sluice_budgets_count(struct sluice_bound_budgets *bound, const struct sluice_job_watts *power,
                          const struct sluice_part *parts, uint32_t count);
/* The core's budgets as they are now; needs no locks. NULL: none. */
struct sluice_power *sluice_budgets_now(struct sluice_bound_budgets *bound, const struct sluice_rules *rules,
                                        const struct sluice_draws *draws, int64_t now_s);
void sluice_budgets_free(struct sluice_bound_budgets *bound);

#endif
