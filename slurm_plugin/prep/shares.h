/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * How many shards of each GPU of a node a job was given. Slurm tells a node's prolog which GPUs, and tasks how many
 * shards in all; how many of each stands in the job's credential, which slurmd has when it starts the prolog.
 */
#ifndef SLUICE_PREP_SHARES_H
#define SLUICE_PREP_SHARES_H

#include "slurm_compat.h"

/*
 * Adds SLUICE_GPU_SHARDS=GPU:SHARDS,... to the prolog's environment, GPUs by their place in gres.conf; nothing where
 * the job has no shards, or where Slurm 22.05 gave it those of several GPUs. In slurmd, before its prolog.
 */
void sluice_prep_tell_shares(job_env_t *environment, slurm_cred_t *credential);

#endif
