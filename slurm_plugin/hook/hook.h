/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The placement hook: what select_cons_tres.c's entry points do, between slurmctld's scheduler and stock
 * select/cons_tres. Everything here runs under slurmctld's locks as select plugins do (job and node write), one call at
 * a time; nothing blocks.
 *
 *   RUN_NOW    the core chooses; stock is given the chosen nodes only. Where stock then refuses it is asked again with
 *              all candidates. Where the core proves that there is no place, this is the answer, without asking stock.
 *   WILL_RUN   as RUN_NOW where there is a place now; else stock, which simulates the future on all candidates.
 *   TEST_ONLY  stock's own answer, remembered for requests that are the same in all that it depends on (cache.h).
 *   start      the GPUs that stock picked are exchanged for the core's, as many of the same kind.
 *
 * At level shadow the core is asked and its answer recorded, and stock's answer is used; below, nothing happens. One
 * exception, at any level but off: Slurm 22.05 starts no job with GRES on a node that has not registered (recount.h).
 */
#ifndef SLUICE_HOOK_HOOK_H
#define SLUICE_HOOK_HOOK_H

#include "hook/gres_plugins.h"
#include "hook/recount.h"
#include "hook/withdrawn.h"
#include "mirror/mirror.h"

/* One call of select_p_job_test. */
struct sluice_hook_call {
    job_record_t *job;
    bitstr_t *nodes; /* candidates; on success the choice */
    uint32_t min_nodes, max_nodes, req_nodes;
    uint16_t mode;
    struct xlist *preemptees;
    struct xlist **preempted;
    struct sluice_job_test_rest rest;
};

typedef int (*sluice_stock_test)(job_record_t *job, bitstr_t *nodes, uint32_t min_nodes, uint32_t max_nodes,
                                 uint32_t req_nodes, uint16_t mode, struct xlist *preemptees, struct xlist **preempted,
                                 SLUICE_JOB_TEST_REST);

/* False: out of memory; stock alone decides. */
bool sluice_hook_start(sluice_stock_test stock);
void sluice_hook_stop(void);

int sluice_hook_test(const struct sluice_hook_call *call);
/* Before the job's allocation is entered: exchange its GPUs. */
void sluice_hook_begin(job_record_t *job);
/* After Slurm's records changed. */
void sluice_hook_started(job_record_t *job);
void sluice_hook_changed(job_record_t *job, enum sluice_mirror_job what);
void sluice_hook_reconfigured(void);
/* After a node was created: Slurm 24.11, unlike 26.05, lets no job start on one that has a deleted one's place in its
 * table until that has registered, which one that is powered off never does. */
void sluice_hook_share_created(void);

#endif
