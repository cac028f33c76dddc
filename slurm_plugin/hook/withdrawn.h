/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * GPUs out of service: the node keeps its GRES as configured (a lower count would invalidate its registration), and
 * Slurm's record of the node says that the GPU, and all shares of it, are allocated. Jobs that hold it go on; when one
 * ends, what it had is taken at once.
 *
 * Called under slurmctld's job and node write locks, as all of the hook.
 */
#ifndef SLUICE_HOOK_WITHDRAWN_H
#define SLUICE_HOOK_WITHDRAWN_H

#include <stdbool.h>

/*
 * Make Slurm's records match the list in force; true if one was changed. At level off nothing is withdrawn. O(1) as
 * long as neither the list nor, by last_node_update, any node has changed; else O(list).
 */
bool sluice_withdrawn_apply(void);

/* Slurm has just made its records again, without us: the next call enters all again. */
void sluice_withdrawn_forget(void);

/* A job's end may have freed a GPU that is withdrawn: the next call checks all. */
void sluice_withdrawn_look_again(void);

void sluice_withdrawn_stop(void);

#endif
