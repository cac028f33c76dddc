/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Allocated GRES by type. When slurmctld has started, its jobs are entered before it knows which GPU of a node has
 * which type; Slurm 22.05 counts them again by GPU when the node registers, but not by type. The jobs that ran then
 * take at their ends what later jobs have counted, and the ends of those, simulated ones too (backfill, --test-only),
 * are logged as underflows. Stock Slurm alone has that.
 *
 * Called under slurmctld's job write lock, as all of the hook.
 */
#ifndef SLUICE_SELECT_RECOUNT_H
#define SLUICE_SELECT_RECOUNT_H

/* Slurm has just made its records anew: every node is due when it has registered. */
void sluice_recount_forget(void);

/*
 * Count by type what the nodes that have registered since have allocated by GPU; at level off nothing. Each
 * is counted once; at 64 nodes at most it looks in vain.
 */
void sluice_recount_apply(void);

void sluice_recount_stop(void);

#endif
