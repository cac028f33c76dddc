/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What the planner's thread needs of moves inside slurmctld (moves_slurm.c). All of it is for that thread alone. */
#ifndef SLUICE_PLANNER_MOVES_SLURM_H
#define SLUICE_PLANNER_MOVES_SLURM_H

#include "planner/moves.h"
#include "planner/planner_internal_slurm.h"

/* Start of the planner, and its end. */
void sluice_moving_start(const char *folder);
void sluice_moving_fini(void);

/* A pass begins, or cannot, as this slurmctld is not in charge. */
void sluice_moving_begin(void);
void sluice_moving_not_in_charge(void);

/*
 * What comes next for the moves under way: jobs leave, or stay. `plannable`: could the pending job with this index in
 * the queue start, had it room? `acts`: the level allows it; otherwise nothing more moves. Takes the write locks where
 * there is something to do.
 */
void sluice_moving_follow(struct sluice_picture *picture, const struct sluice_rules *rules, bool acts,
                          bool (*plannable)(uint32_t index));

/* One job of the plan under way, and the nodes that are kept for it. */
struct sluice_moving_place {
    const struct sluice_queue_job *entry;
    const struct sluice_picture_job *sought;
    uint32_t pending; /* its index among the queue's pending jobs; UINT32_MAX: it still runs */
    uint32_t words;   /* its nodes: offset in the picture's `words` */
};

/* Those for which nodes are kept, the one that waits first; valid until the next call of sluice_moving_follow. */
const struct sluice_moving_place *sluice_moving_places(uint32_t *count);

/* Was the job moved, and does not run again yet? */
bool sluice_moving_is_away(uint32_t job_id);
/* How many jobs are being moved for a job. */
uint32_t sluice_moving_count(uint32_t for_job);

/* What a pass has planned. */
struct sluice_moving_basis {
    struct sluice_picture *picture;
    const struct sluice_rules *rules;
    const struct sluice_plan *plan;
    const struct sluice_plan_job *jobs; /* the plan's, in its order */
    const uint32_t *job_index;          /* which of the pending jobs they are; UINT32_MAX: none */
    uint32_t job_count;
};

/* Where a job waits for too long, and moves would help, they begin. Takes the write locks then. */
void sluice_moving_consider(const struct sluice_moving_basis *basis);

#endif
