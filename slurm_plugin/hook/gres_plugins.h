/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Slurm's plugins of GPUs and of their shares (gres/gpu, gres/shard, gres/mps) in a slurmctld that has just started.
 *
 * Slurm loads them when the first node with such GRES registers (gres_node_config_unpack), seconds after the start.
 * Prologs and epilogs of jobs that start or end before have no SLURM_JOB_GPUS: gres_g_prep_build_env passes over GRES
 * whose plugin is not loaded.
 */
#ifndef SLUICE_HOOK_GRES_PLUGINS_H
#define SLUICE_HOOK_GRES_PLUGINS_H

/*
 * Have Slurm load them now, by a record as a node sends it when it registers. Of what Slurm knows of these GRES nothing
 * else changes, and a second call does nothing. Where it fails, which is logged, Slurm loads them when a node registers.
 *
 * Called under slurmctld's write locks, when the saved state of nodes has been read and before anything is sent to them.
 */
void sluice_load_gres_plugins(void);

#endif
