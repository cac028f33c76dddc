/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * How many shards of each GPU of a node a job has. Slurm gives a node's prolog the GPUs, and tasks the number of shards
 * in all; how many of each GPU is in the job's credential, which slurmd has when it starts the prolog.
 */
#ifndef SLUICE_ENTRY_PREP_SHARES_H
#define SLUICE_ENTRY_PREP_SHARES_H

#include "slurm_compat.h"

/*
 * Adds SLUICE_GPU_SHARDS=GPU:SHARDS,... to the prolog's environment, GPUs by their place in gres.conf; nothing if the
 * job has no shards, or if Slurm 22.05 gave it those of several GPUs. In slurmd, before its prolog.
 */
void sluice_prep_export_shares(job_env_t *environment, slurm_cred_t *credential);

#endif
