/* SPDX-License-Identifier: Apache-2.0 */
/* The planner, as hooks see it: the plan (plan.h), gangs (gang.h) and moves instead of preemption (instead.h). No Slurm headers; its thread is plan_slurm.c. */
#ifndef SLUICE_PLANNER_PLANNER_H
#define SLUICE_PLANNER_PLANNER_H

#include "planner/gang.h"
#include "planner/instead.h"
#include "planner/plan.h"

#endif
