/* SPDX-License-Identifier: Apache-2.0 */
/* The planner, as hooks see it: the plan (plan.h) and gangs (gang.h). No Slurm headers; its thread is plan_slurm.c. */
#ifndef SLUICE_PLANNER_PLANNER_H
#define SLUICE_PLANNER_PLANNER_H

#include "planner/gang.h"
#include "planner/plan.h"

#endif
