/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Starts the batch scripts of jobs that are to be saved as they run below sluice-launch (native/launch/launch.h). */
#ifndef SLUICE_ENTRY_LAUNCH_H
#define SLUICE_ENTRY_LAUNCH_H

#include <slurm/slurm.h>
#include <slurm/spank.h>

#include <stdbool.h>

/* Whether this task is a batch script with --checkpoint=system, on one node. */
bool launch_is_wanted(spank_t spank, uint32_t step);

/*
 * As root, in the process that slurmstepd waits for: returns in another process, the one that goes on as the script,
 * and there ESPANK_SUCCESS; this one becomes `program`. -1: neither, with a message.
 */
int launch_split(spank_t spank, const char *program, const char *helper);

/* As the user, in the process that is to become the script: waits until it is in the job's cgroups. */
int launch_begin(spank_t spank);

#endif
