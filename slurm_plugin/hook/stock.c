/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Asking stock, and what is done with answers that cannot be used. */
#include "hook/hook_internal.h"

#include "hook/gpus.h"

#include "src/common/list.h"

/*
 * Has stock said that the job starts, with nothing allocated and nobody preempted? Its search for jobs to preempt
 * counts nodes that still complete another job as free, and may find a place where no job has to be preempted (_run_now
 * in its job_test.c). slurmctld would log an error, and have the job wait with half of a start in its record.
 */
static bool starts_with_nothing(const struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    return decision->level == SLUICE_LEVEL_PLACE && call->mode == SELECT_MODE_RUN_NOW && !call->job->job_resrcs &&
           !(call->preempted && *call->preempted);
}

static int counted_for_all_nodes(void *item, void *argument)
{
    const gres_state_t *state = item;
    const gres_job_state_t *gres = state->gres_data;
    (void)argument;
    return gres && gres->gres_per_job ? -1 : 0;
}

/* A job that must not be spread, as slurmctld would end. */
static bool dangerous(const struct decision *decision)
{
    const job_record_t *job = decision->call->job;
    return SLUICE_SPREAD_ENDS_SLURMCTLD && decision->level >= SLUICE_LEVEL_ADMIT && (job->bit_flags & SPREAD_JOB) &&
           job->gres_list_req && list_for_each_ro(job->gres_list_req, counted_for_all_nodes, NULL) < 0;
}

int sluice_hook_ask_stock_on(struct decision *decision, uint32_t nodes, struct xlist *preemptees,
                             struct sluice_job_test_rest rest)
{
    const struct sluice_hook_call *call = decision->call;
    uint64_t begin = sluice_now_ns(), spread = dangerous(decision) ? SPREAD_JOB : 0;
    call->job->bit_flags &= ~spread;
    int rc = sluice_hook.stock(call->job, call->nodes, nodes ? nodes : call->min_nodes, call->max_nodes,
                               nodes ? nodes : call->req_nodes, call->mode, preemptees, call->preempted,
                               SLUICE_REST_ARGUMENTS(rest));
    call->job->bit_flags |= spread;
    decision->stock_ns += sluice_now_ns() - begin;
    decision->stock_answered = true;
    if (rc == SLURM_SUCCESS && starts_with_nothing(decision)) {
        count(sluice_hook.nothing_allocated);
        rc = SLURM_ERROR;
    }
    decision->rc = rc;
    return rc;
}

int sluice_hook_ask_stock(struct decision *decision, struct xlist *preemptees)
{
    /* Stock might preempt jobs on nodes that are then refused, each time it is asked. */
    if (decision->call->min_nodes > 1 && sluice_hook_asks_layout(decision))
        preemptees = NULL;
    return sluice_hook_ask_stock_on(decision, 0, preemptees, decision->call->rest);
}

int sluice_hook_ask_stock_narrowed(struct decision *decision)
{
    const struct sluice_placement *placement = &decision->placement;
    set_nodes(decision->call->nodes, placement->parts, placement->part_count);
    int rc = sluice_hook_ask_stock_on(decision, placement->part_count, NULL, decision->call->rest);
    count(rc ? sluice_hook.fell_back : sluice_hook.narrowed);
    return rc;
}

/* ... with cores near the chosen GPUs only, where that makes a difference. */
static int ask_stock_near(struct decision *decision)
{
    struct sluice_job_test_rest rest = decision->call->rest;
    struct sluice_core_exclusion exclusion;
    if ((decision->used->flags & SLUICE_EXCLUSIVE) ||
        !sluice_gpus_exclude_far_cores(sluice_hook.chosen, sluice_hook.chosen_count, &exclusion, &rest))
        return SLURM_ERROR;
    set_nodes(decision->call->nodes, sluice_hook.chosen, sluice_hook.chosen_count);
    int rc = sluice_hook_ask_stock_on(decision, sluice_hook.chosen_count, NULL, rest);
    sluice_exclusion_end(&exclusion);
    if (!rc)
        count(sluice_hook.narrowed);
    return rc;
}

int sluice_hook_start_narrowed(struct decision *decision)
{
    sluice_hook_remember_choice(decision);
    int rc = ask_stock_near(decision);
    if (rc)
        rc = sluice_hook_ask_stock_narrowed(decision);
    if (rc)
        sluice_hook.chosen_job = 0;
    return rc;
}

int sluice_hook_part_overlaps(struct decision *decision)
{
    for (int try = 0; try < TRIES && decision->rc == SLURM_SUCCESS; try++) {
        uint32_t node = 0;
        enum sluice_overlap verdict = sluice_gpus_part_overlaps(sluice_hook.mirror, decision->call->job, &node);
        if (verdict == SLUICE_OVERLAP_MOVED)
            count(sluice_hook.overlaps_moved);
        if (verdict != SLUICE_OVERLAP_STUCK)
            return decision->rc;
        count(sluice_hook.overlaps_refused);
        free_job_resources(&decision->call->job->job_resrcs);
        sluice_hook.saved[node / 64] &= ~(UINT64_C(1) << (node % 64));
        restore_nodes(decision);
        sluice_hook_ask_stock(decision, decision->call->preemptees);
    }
    return decision->rc == SLURM_SUCCESS ? refuse(decision->call->job) : decision->rc;
}
