/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slurmctld's side of its supervisor (supervisor/supervise.c): it leads only while the supervisor holds the lease in
 * the shared state folder. Without a supervisor all of this allows everything, at the cost of one load.
 */
#ifndef SLUICE_FAILOVER_FENCE_H
#define SLUICE_FAILOVER_FENCE_H

#include <stdbool.h>
#include <stdint.h>

/*
 * The gate, to be passed before any state is read: at the start of a primary, and when a backup takes over. Blocks
 * until this process has the lease; ends the process, with status 75, when it does not get it. Returns at once when it
 * leads already.
 */
void sluice_fence_lead(void);

/* Whether this process may write: the lease is in force at this moment. To be called before anything is acknowledged;
 * when false, this process is about to be killed. */
bool sluice_fence_holds(void);

/* Number of this leadership, which grows with every change of leader; 0 without a supervisor. */
uint64_t sluice_fence_epoch(void);

/* End this process with status 75, `why` being its last line. */
_Noreturn void sluice_fence_end(const char *why);

/*
 * For fence_slurm.c and tests: find the supervisor, if there is one, give it `folder` (StateSaveLocation) and
 * SlurmctldTimeout, and start the thread that shows that this process runs and ends it when the lease lapses.
 * `relinquished` says whether slurmctld, having led, is a backup again; it is called from the thread every 50 ms while
 * we lead. False: there is one, but it cannot be reached.
 */
bool sluice_fence_start(const char *folder, uint32_t timeout_s, bool (*relinquished)(void));
/* What is called at the gate, after three seconds there and then every five; it must not wait. */
void sluice_fence_at_gate(void (*waits)(void));
void sluice_fence_stop(void);

#endif
