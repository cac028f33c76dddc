/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Nodes whose GRES are not known yet. When slurmctld has started, it does not know which GPU of a node is which, nor
 * its type, until the node has registered. Stock Slurm 22.05 has two faults then:
 *
 * - Jobs that ran are entered before, by number. Those that end before the node registers leave GPUs in use that no job
 *   has, until the next reconfigure; those that end later were never counted by type: they take what later jobs have
 *   counted, and the ends of those, simulated ones too (backfill, --test-only), are logged as underflows.
 * - Jobs that it starts in these seconds are given a number of GPUs, but none in particular. Their prologs have no
 *   SLURM_JOB_GPUS, and a node agent takes them for jobs without GPUs.
 *
 * Called under slurmctld's job write lock, as all of the hook.
 */
#ifndef SLUICE_HOOK_RECOUNT_H
#define SLUICE_HOOK_RECOUNT_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include <stdbool.h>

/* Slurm has just made its records again: every node is due when it has registered. */
void sluice_recount_forget(void);

/*
 * Count by type what the nodes that have registered since have allocated by GPU; at level off nothing. Each is counted
 * once; it checks at most 64 nodes that are not ready.
 */
void sluice_recount_apply(void);

/*
 * The next three are of Slurm 22.05 only; later versions need none of them.
 *
 * Enter the GRES of running jobs again in the records of nodes that have registered since, which then have no others.
 * True: it did. Not during a loop over job_list; there is none before Slurm is asked for nodes.
 */
bool sluice_recount_jobs(void);

/* Take the nodes that have not registered since from those on which a job with GRES may start now, but not those that are
 * powered off: they register only when a job has started there. The job's details are not NULL. */
void sluice_recount_keep_out(const job_record_t *job, bitstr_t *nodes);

/* A node has registered: have the scheduler look where a job was kept out. Slurm itself does so only for nodes that run
 * nothing. */
void sluice_recount_registered(void);

/* Is there a node that has not registered since? Then Slurm's answers may be others soon. */
bool sluice_recount_waits(void);

void sluice_recount_stop(void);

#endif
