/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The planner, as hooks see it that have Slurm's records at hand: what jobs draw (watts_slurm.h). */
#ifndef SLUICE_PLANNER_PLANNER_SLURM_H
#define SLUICE_PLANNER_PLANNER_SLURM_H

#include "planner/planner.h"
#include "planner/watts_slurm.h"

/* A job gave back what it had on its nodes, or some of it. Under the node write lock. */
void sluice_plan_room_came(const job_record_t *job);

#endif
