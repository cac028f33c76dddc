/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Power budgets in slurmctld: what a job draws, and what a plan leaves of each budget for jobs that it does not start.
 * Watts are of each GPU (of a share: its part), above what an idle one draws. No header of Slurm.
 */
#ifndef SLUICE_PLANNER_WATTS_H
#define SLUICE_PLANNER_WATTS_H

#include "rules/rules.h"
#include "runtime/runtime.h"

/* One job's. */
struct sluice_job_watts {
    int32_t watts;    /* 0: it needs none */
    int32_t least;    /* that it may start with; 0: `watts` */
    int32_t counted;  /* of a GPU that budgets count already, idle or kept for it: a cap has them, too */
    int32_t kept;     /* of `counted`, what is kept for it */
    bool guaranteed;  /* some are kept for it: it may start with no others */
    uint64_t budgets; /* bit b: budget b of the policy counts it */
};

/* What is asked about a job. */
struct sluice_job_draw {
    uint32_t job_id; /* 0: it does not run */
    uint32_t user;
    const char *account, *qos;
    uint32_t cap_w;         /* that it asked for, or started with; 0: none */
    uint64_t classes;       /* bit c: its GPUs may be of class c */
    int64_t gpu_memory_mib; /* of each GPU; 0: whole ones */
};

/* `draws` may be NULL. O(classes * log lines + tenants above the account). */
struct sluice_job_watts sluice_watts_of(const struct sluice_rules *rules, const struct sluice_draws *draws,
                                        const struct sluice_job_draw *job);

/* The default limit of a class's GPU; 0: not known. */
uint32_t sluice_watts_default(const struct sluice_class *class);

/* Add to each budget what is kept for a running job's GPUs there. `counting`: of each of `nodes` nodes, the budgets that it
 * belongs to. O(parts * budgets). */
void sluice_watts_count_kept(int64_t *guaranteed, const uint64_t *counting, uint32_t nodes,
                             const struct sluice_job_watts *job, const struct sluice_part *parts, uint32_t count);

/* A budget for the core, but for its nodes. `lowered`: by an administrator, or NULL; `idle_w`: what its GPUs draw idle;
 * `guaranteed_w`: what is kept for GPUs that guaranteed jobs have there. */
struct sluice_power_budget sluice_watts_budget(const struct sluice_budget *budget, const struct sluice_draw *lowered,
                                               int64_t idle_w, int64_t guaranteed_w);

/* When this week began by what local clocks show now, also on the day on which they are changed. */
int64_t sluice_watts_week(int64_t now_s);

/* ---- what a plan leaves ---- */

struct sluice_watts_left;

/* A copy of what the core's last plan left. NULL: no memory. */
struct sluice_watts_left *sluice_watts_left_new(const struct sluice_power *power, uint32_t budgets,
                                                const uint64_t *counting, uint32_t nodes);
void sluice_watts_left_free(struct sluice_watts_left *left);

/* What a plan has counted already of the job that is asked about. */
struct sluice_watts_own {
    const struct sluice_part *parts;
    uint32_t count;
    int32_t watts;
};

/* The most watts that each GPU of a job may draw from `from_s` to `to_s` on these parts: `job->watts`, fewer where it may
 * start with them, or -1: not now. O(parts + segments). */
int32_t sluice_watts_allowed(const struct sluice_watts_left *left, const struct sluice_job_watts *job,
                             const struct sluice_watts_own *own, const struct sluice_part *parts, uint32_t count,
                             int64_t from_s, int64_t to_s);

/* ... for `gpus` GPUs, by the budgets that count all nodes. O(nodes + segments). */
int32_t sluice_watts_allowed_anywhere(const struct sluice_watts_left *left, const struct sluice_job_watts *job,
                                      const struct sluice_watts_own *own, int64_t gpus, int64_t from_s, int64_t to_s);

/* Clear, in `words`, the nodes on which no `gpus` GPUs may start now. O(nodes + segments). */
void sluice_watts_keep_out(const struct sluice_watts_left *left, const struct sluice_job_watts *job,
                           const struct sluice_watts_own *own, int64_t gpus, int64_t from_s, int64_t to_s,
                           uint64_t *words, size_t count);

/* A job draws so much from now on. */
void sluice_watts_take(struct sluice_watts_left *left, uint64_t budgets, int32_t watts, const struct sluice_part *parts,
                       uint32_t count, int64_t to_s);

#endif
