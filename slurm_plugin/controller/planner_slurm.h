/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What plan_slurm.c (the planner's thread), start_slurm.c (starting jobs) and gang_slurm.c (gangs in slurmctld) need of
 * each other. All of it is for the planner's thread alone.
 */
#ifndef SLUICE_PLANNER_SLURM_H
#define SLUICE_PLANNER_SLURM_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "controller/gang.h"
#include "controller/mirror.h"
#include "controller/plan.h"
#include "controller/queue.h"
#include "policy/policy.h"

/* ---- start_slurm.c ---- */

/* Why Slurm would not start a job. Append only. */
enum sluice_start {
    SLUICE_START_DONE = 0,
    SLUICE_START_GONE = 1,    /* not there any more, or not waiting */
    SLUICE_START_LIMITED = 2, /* limits, licences, dependencies: nothing that room would help */
    SLUICE_START_BUSY = 3,    /* no nodes */
};

/* slurmctld's write locks for starting jobs, as sched/backfill takes them. False, and nothing locked: it shuts down. */
bool sluice_start_lock(void);
void sluice_start_unlock(void);

/* Start a waiting job now, in this partition, as sched/backfill does: every check of Slurm's own, its allocation, its
 * launch. The write locks are held. */
enum sluice_start sluice_start_job(job_record_t *job, const char *partition);

/* ---- accrual_slurm.c ---- */

/* Is this waiting job missing in Slurm's accrue_cnt (MaxJobsAccrue), though it waits? Under read locks. */
bool sluice_accrual_lost(const job_record_t *job);
/* Count all such jobs again. Takes the write locks. */
void sluice_accrual_restore_all(void);

/* ---- outlook_slurm.c: when GPUs come free, for those who submit with a deadline (admission/outlook.h) ---- */

/* What an outlook is made of: the plan that was just made, and the picture that it was made from. */
struct sluice_outlook_picture {
    const struct sluice_plan *plan;
    const struct sluice_queue *queue;
    struct sluice_mirror *mirror;
    const uint64_t *usable; /* nodes; node_words of them */
    size_t node_words;
    const struct sluice_backfill_running *running;
    uint32_t running_count;
    const struct sluice_plan_job *jobs; /* the plan's, in its order */
    uint32_t job_count;
    int64_t valid_s;
};

/* Publish one, where it is time. Returns how long that took, in microseconds. */
uint64_t sluice_outlook_follow(const struct sluice_outlook_picture *picture);
/* None is in force any more, and nothing is kept. */
void sluice_outlook_forget(void);

/* ---- gang_slurm.c ---- */

/* A gang instance that is to be planned as a group. */
struct sluice_gang_unit {
    uint32_t instance; /* index */
    uint32_t group;    /* not 0 */
    uint32_t priority; /* of its first member; UINT32_MAX while some of it have nodes */
    uint32_t job_id;   /* its first member */
};

/* A picture begins; each job of the queue is shown, under the read locks; the picture is complete. `usable(index)` says
 * whether the planner could make a request of the pending job. Memory failures leave members out, which then wait. */
void sluice_gang_picture_begin(int64_t now_s, const struct sluice_rules *rules);
void sluice_gang_picture_job(const struct sluice_queue_job *entry, uint32_t index, bool pending, bool usable,
                             const job_record_t *job);
void sluice_gang_picture_end(void);

/* Is this pending job, by its index in the queue, a member of a gang? */
bool sluice_gang_is_member(uint32_t index);

/* The instances that can be planned now; valid until the next picture. */
const struct sluice_gang_unit *sluice_gang_units(uint32_t *count);
/* The index in the queue of the i-th task of a unit that has no nodes yet; false past the last. */
bool sluice_gang_unit_task(const struct sluice_gang_unit *unit, uint32_t i, uint32_t *index);

/* Hold, start, release, requeue: whatever the picture and the plan ask for. Takes the write locks where there is
 * something to do. `partition(job_id)` names the partition that a job was planned in. */
void sluice_gang_act(const struct sluice_plan *plan, const char *(*partition)(uint32_t job_id));

/* Levels below place: nobody is held or kept CONFIGURING any more. False: this slurmctld is not in charge. */
bool sluice_gang_abandon(void);
void sluice_gang_fini(void);

#endif
