/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The plan: who should start now and where, and which starts are reserved for whom.
 *
 * A planner thread (plan_slurm.c) copies the queue under read locks, lets the core's backfill plan it and publishes an
 * immutable plan. The placement hook asks the plan before it lets a job start, so that no start delays a reserved one;
 * the planner itself starts what the plan says should start now, through the function that sched/backfill uses, so that
 * a refused job at the head of a partition does not keep others from starting.
 *
 * When a plan is trusted. A plan is made from one moment's picture. It is not used (sluice_plan_acquire gives NULL)
 * when
 *   - none was made yet, the level is below place, or the nodes' configuration changed since;
 *   - it is older than the planner's interval allows (sluice_plan_publish's `valid_s`): the planner hangs or is
 *     starved, and protecting starts by an old picture would keep GPUs idle for nothing.
 * The hook reports what happened between the picture and the publication (sluice_plan_job_started): on nodes that
 * changed since, the new plan starts nothing now and protects nothing; the next plan follows at once. A reservation
 * whose job has started or gone no longer counts.
 *
 * Threads: everything here may be called from any thread. A plan is immutable but for what sluice_plan_job_started
 * notes in it; that and the hook's questions come under slurmctld's write locks, one at a time. No header of Slurm;
 * node n is Slurm's node index n.
 */
#ifndef SLUICE_PLANNER_PLAN_H
#define SLUICE_PLANNER_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "planner/watts.h"
#include "sluice/core.h"

struct sluice_plan;

/* The plan in force, or NULL; to be given back with sluice_plan_release. Every call below accepts NULL: no plan,
 * nothing known, everything allowed. */
struct sluice_plan *sluice_plan_acquire(int64_t now_s);
void sluice_plan_release(struct sluice_plan *plan);

/* A job's place in the order: a higher tier, then a higher priority, then a lower job id goes first. */
struct sluice_plan_place {
    uint32_t tier, priority, job_id;
};
bool sluice_plan_is_before(const struct sluice_plan_place *one, const struct sluice_plan_place *other);

/* Who wants to start. */
struct sluice_plan_question {
    uint32_t job_id; /* of the record that waits: an array's own id for its tasks */
    int64_t limit_s; /* longest run time; 0 or less: none */
    int64_t now_s;
    uint32_t rank;                         /* reserved starts of jobs of a lower rank do not count; 0: all do */
    const struct sluice_plan_place *place; /* ... nor those of jobs after it; NULL: all do */
};

/* Append only. */
enum sluice_plan_state {
    SLUICE_PLAN_UNKNOWN = 0, /* submitted later, not planned, or no start within the plan's depth */
    SLUICE_PLAN_NOW = 1,     /* should start now: on `parts` there is room, and no job is delayed */
    SLUICE_PLAN_LATER = 2,   /* is to start at start_s, on `parts` */
    SLUICE_PLAN_WATTS = 3,   /* Slurm finds its nodes: only watts are kept for it, from start_s on, for `parts` */
};

struct sluice_plan_answer {
    enum sluice_plan_state state;
    bool exact; /* NOW: on `parts` and nowhere else, as others of its gang count on the rest */
    int64_t start_s;
    const struct sluice_part *parts; /* the plan's own, valid until it is released */
    uint32_t part_count;
    int32_t watts;            /* of each GPU that are planned for it */
    uint32_t waits_for_power; /* 1 + the budget without which it could start now; 0: none */
};

/* What the plan has for a job; for an array, the task that starts next. O(1). */
struct sluice_plan_answer sluice_plan_ask(const struct sluice_plan *plan, uint32_t job_id);

/*
 * Clear, in `words` (bit n % 64 of word n / 64: node n), the nodes on which no start of this job now can be without
 * delaying a reserved start of another. `whole`: nothing is known of what the job will take on a node, so each node
 * with a reserved start within its limit is cleared. O(reserved node shares).
 */
void sluice_plan_keep_out(const struct sluice_plan *plan, const struct sluice_plan_question *question, bool whole,
                          uint64_t *words, size_t count);

/* May the job start now on these parts? Exact in GPUs, GPU memory, CPUs and host memory. O(parts * reserved shares of a
 * node). */
bool sluice_plan_allows_start(const struct sluice_plan *plan, const struct sluice_plan_question *question,
                              const struct sluice_part *parts, uint32_t count);

/* With how many watts of each GPU may the job start now on these parts? -1: not now; where no plan knows the budgets, not
 * before the next one. O(parts + segments of the budgets). */
int32_t sluice_plan_allows_watts(const struct sluice_plan *plan, const struct sluice_plan_question *question,
                                 const struct sluice_job_watts *job, const struct sluice_part *parts, uint32_t count);

/* ... for `gpus` GPUs, wherever they are: by the budgets alone that count all nodes. */
int32_t sluice_plan_allows_watts_anywhere(const struct sluice_plan *plan, const struct sluice_plan_question *question,
                                          const struct sluice_job_watts *job, int64_t gpus);

/* Clear, in `words`, the nodes of budgets that have no watts now for `gpus` GPUs of the job. O(nodes + segments). */
void sluice_plan_keep_out_watts(const struct sluice_plan *plan, const struct sluice_plan_question *question,
                                const struct sluice_job_watts *job, int64_t gpus, uint64_t *words, size_t count);

/*
 * A job started and holds these parts until end_s at the latest (0: no end); called by the hook (select_p_job_begin),
 * with the slurmctld write locks. `array_id` 0: no array. Its reservation no longer counts, what it takes next to
 * reserved starts is subtracted from what is free there, and a plan that is being made learns of both. `power`: what it
 * draws; NULL: not counted.
 */
void sluice_plan_job_started(uint32_t job_id, uint32_t array_id, const struct sluice_part *parts, uint32_t count,
                             int64_t end_s, const struct sluice_job_watts *power);

/* The configuration of nodes, partitions or GRES changed: no plan until the next one. */
void sluice_plan_invalidate(void);

/* ---- figures ---- */

struct sluice_plan_counts {
    uint64_t plans;        /* published */
    uint64_t failures;     /* passes without a plan: memory, locks, the core refused */
    uint64_t started;      /* jobs that the planner started */
    uint64_t not_started;  /* start-now jobs that Slurm would not start */
    uint64_t slipped;      /* reserved starts that moved to later from one plan to the next */
    uint64_t lock_us_last; /* for the last picture */
    uint64_t lock_us_max;  /* longest time under slurmctld's read locks for one picture */
    uint64_t plan_us_max;  /* longest time for planning, outside of all locks */
    uint64_t plan_us_last;
    uint32_t jobs;          /* of the last plan: planned */
    uint32_t now, reserved; /* ... that should start now, that have a reserved start */
};
struct sluice_plan_counts sluice_plan_counts(void);

/* ---- making plans: for the planner and for tests ---- */

/* One job (or one task of an array) in the order of planning; those of a group follow each other. */
struct sluice_plan_job {
    uint32_t job_id; /* tasks of one array carry the same id and follow each other, or belong to one group */
    uint32_t group;  /* 0: alone; start together */
    uint32_t rank;   /* a job that may preempt others delays only reserved starts of its rank and higher ones */
    struct sluice_plan_place place;
    int64_t limit_s; /* > 0 */
    struct sluice_request request;
    struct sluice_job_watts power;
    const struct sluice_part
        *drawing;           /* NULL, or: Slurm finds its nodes, and only its watts are planned, for these ... */
    uint32_t drawing_count; /* ... GPUs ... */
    int64_t drawing_from_s; /* ... and not before; `request` is not read, and it is in no group */
};

struct sluice_planner_config {
    uint32_t max_jobs;    /* 0: 16384 */
    uint32_t max_nodes;   /* 0: 1024 */
    uint32_t max_running; /* 0: 65536 */
};

struct sluice_planner;

/* Errors: RANGE, NO_MEMORY. */
enum sluice_error sluice_planner_new(const struct sluice_planner_config *config, struct sluice_planner **planner,
                                     struct sluice_error_text *text);
void sluice_planner_free(struct sluice_planner *planner);

/* The budgets of the plans from now on: the policy's, and of each node those that it belongs to. All stay as they are
 * until the next call. NULL, 0, NULL: none. */
void sluice_planner_set_power(struct sluice_planner *planner, struct sluice_power *power, uint32_t budgets,
                              const uint64_t *counting);

/* The picture is being taken now: whatever starts from here on is remembered for sluice_plan_publish. */
void sluice_planner_begin(struct sluice_planner *planner);

/*
 * Plan. Reservations of the planner's last plan are held where their jobs still wait. `reservations`: how many jobs or
 * groups that cannot start now get a start; SLUICE_BACKFILL_MAX_JOBS: all. `busy` (may be NULL): nodes that take
 * nothing at this moment, though they will soon (an epilog runs): no job starts there now. *plan is the caller's until
 * it is published or released. Errors: those of sluice_backfill_plan, NO_MEMORY.
 */
enum sluice_error sluice_planner_plan(struct sluice_planner *planner, const struct sluice_cluster *cluster,
                                      int64_t now_s, const struct sluice_backfill_running *running,
                                      uint32_t running_count, const struct sluice_plan_job *jobs, uint32_t job_count,
                                      uint32_t reservations, const uint64_t *busy, size_t busy_words,
                                      struct sluice_plan **plan, struct sluice_error_text *text);

/* Put it in force for `valid_s` seconds. */
void sluice_plan_publish(struct sluice_planner *planner, struct sluice_plan *plan, int64_t valid_s);

/* Entry `index` of a plan, in the order of planning: its job and what the plan has for it; false past the last. */
bool sluice_plan_entry(const struct sluice_plan *plan, uint32_t index, uint32_t *job_id, uint32_t *group,
                       struct sluice_plan_answer *answer);

/* The planner forgets all reservations: the cluster was made again. */
void sluice_planner_forget(struct sluice_planner *planner);

/* Counting, by the planner thread. */
void sluice_plan_count_pass(uint64_t lock_us, uint64_t plan_us, bool failed);
void sluice_plan_count_start(bool started);

/* ---- the thread, in slurmctld only (plan_slurm.c); it runs while a plugin is loaded and sleeps below level shadow
 * ---- */

/* Something changed that may let a job start: plan soon. Never blocks. */
void sluice_plan_wake(void);

#endif
