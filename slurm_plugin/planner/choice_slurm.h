/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What moves_slurm.c (moves under way) and choice_slurm.c (new ones) need of each other. */
#ifndef SLUICE_PLANNER_CHOICE_SLURM_H
#define SLUICE_PLANNER_CHOICE_SLURM_H

#include "planner/moves_slurm.h"

/* ---- moves_slurm.c ---- */

/* All that are known. */
const struct sluice_moves *sluice_moving_list(void);
/* Ask these jobs to save, once that is written down. False: it was not, and none is asked. Takes the write locks. */
bool sluice_moving_ask(const struct sluice_rules *rules, const struct sluice_job_move *plan, uint32_t count);
/* Count those under way for `sluice plugin status`. */
void sluice_moving_show_open(void);

/* A job among those that can be moved, or among entries of the queue; nodes of moves under way. NULL: not there. */
const struct sluice_movable_job *sluice_movable_of(const struct sluice_picture *picture, uint32_t job_id);
const struct sluice_queue_job *sluice_entry_of(const struct sluice_queue_job *entries, uint32_t count, uint32_t job_id);
const struct sluice_kept_nodes *sluice_kept_named(const struct sluice_picture *picture, const char *names);

static inline int64_t sluice_nodes_of(const struct sluice_request *request)
{
    return request->nodes_min > 1 ? request->nodes_min : 1;
}

/* ---- choice_slurm.c ---- */

void sluice_choosing_start(const char *folder);
void sluice_choosing_not_in_charge(void);
void sluice_choosing_fini(void);

/* Do the moves under way, of which `open` is one, still lead to where all of them have room? Others may have started there
 * since. */
bool sluice_choice_still_fits(struct sluice_picture *picture, const struct sluice_job_move *open);

#endif
