/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * In version 1 of cgroups Slurm gives the folders of steps to the user, who could freeze processes in cgroups of his
 * own there: no signal ends them, and slurmd drains a node on which a step does not end. This includes jobs without
 * GPUs.
 */
#ifndef SLUICE_ENTRY_FREEZER_H
#define SLUICE_ENTRY_FREEZER_H

#include <stdint.h>
#include <sys/types.h>

/* Only root can enter Slurm's folder in the freezer, so that no user reaches the folder of a later step in the moment
 * in which it belongs to its user. A process with a cgroup namespace of its own can still enter its own. */
void freezer_close(void);

/* Make the folders of a job's steps root's. */
void freezer_take_steps(uint32_t job, uid_t user);

#endif
