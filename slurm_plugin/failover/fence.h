/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slurmctld's side of its supervisor (supervisor/supervise.c): it leads only while the supervisor holds the lease in
 * the shared state folder. Without a supervisor all of this allows everything, at the cost of one load.
 */
#ifndef SLUICE_CONTROLLER_FENCE_H
#define SLUICE_CONTROLLER_FENCE_H

#include <stdbool.h>
#include <stdint.h>

/*
 * The gate, to be passed before any state is read: at the start of a primary, and when a backup takes over. Blocks
 * until the lease is ours; ends the process, with status 75, when it is not to be had. At once when we lead already.
 */
void sluice_fence_lead(void);

/* Whether what we write now may count: the lease is in force at this moment. To be asked before anything is
 * acknowledged; when false, this process is about to be killed. */
bool sluice_fence_holds(void);

/* Number of this leadership, which grows with every change of leader; 0 without a supervisor. */
uint64_t sluice_fence_epoch(void);

/* End this process with status 75, `why` being its last line. */
_Noreturn void sluice_fence_end(const char *why);

/*
 * For fence_slurm.c and tests: find the supervisor, if there is one, tell it `folder` (StateSaveLocation) and
 * SlurmctldTimeout, and start the thread that shows that we run and ends us when the lease lapses. `relinquished` says
 * whether slurmctld, having led, is a backup again; it is called from the thread every 50 ms while we lead.
 * False: there is one, but it cannot be talked to.
 */
bool sluice_fence_start(const char *folder, uint32_t timeout_s, bool (*relinquished)(void));
/* What is called at the gate, after three seconds there and then every five; it must not wait. */
void sluice_fence_at_gate(void (*waits)(void));
void sluice_fence_stop(void);

#endif
