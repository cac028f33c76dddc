/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The order inside slurmctld: a thread that steps a ranker (order.h) every few seconds, and what the hooks of
 * site_factor do.
 *
 * Locks: the thread holds slurmctld's read locks while it copies the queue, and its job write lock for at most
 * SLUICE_ORDER_BATCH jobs at a time while it applies new factors that should not wait for PriorityCalcPeriod; never
 * both, and none of ours meanwhile. The hooks wait for a look at one job's factor at most, and once, after a start, for
 * order.ranks to be read.
 */
#ifndef SLUICE_ORDER_ORDER_SLURM_H
#define SLUICE_ORDER_ORDER_SLURM_H

#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

enum {
    SLUICE_ORDER_INTERVAL_S = 5,
    SLUICE_ORDER_BATCH = 50,         /* jobs under one hold of the write lock */
    SLUICE_ORDER_MAX_APPLIED = 1000, /* jobs in one step; the others follow with PriorityCalcPeriod */
};

/* site_factor_p_set: under the job write lock. O(1). */
void sluice_order_site_set(job_record_t *job);
/* site_factor_p_update: under the job write lock. O(jobs), some hundred nanoseconds each. */
void sluice_order_site_update(void);
/* Step soon, not only after the interval: something that order depends on has changed. Any thread, any lock. */
void sluice_order_wake(void);

#endif
