/* SPDX-License-Identifier: GPL-2.0-or-later */
/* A decision as it is recorded. */
#include "hook/hook_internal.h"

struct sluice_decision_job sluice_hook_job_facts(const job_record_t *job, const struct sluice_job_request *request)
{
    int64_t nodes = request && request->wanted.nodes_min ? request->wanted.nodes_min : 1;
    int64_t gpus = request ? request->wanted.gpus : 0;
    if (request && !(request->wanted.flags & SLUICE_GPUS_TOTAL))
        gpus *= nodes;
    return (struct sluice_decision_job){
        .id = job->job_id,
        .array_id = job->array_job_id,
        .array_task = job->array_job_id ? job->array_task_id : UINT32_MAX,
        .uid = job->user_id,
        .priority = job->priority,
        .gpus = (uint32_t)gpus,
        .submit_s = job->details ? job->details->submit_time : 0,
        .limit_s = job->time_limit == NO_VAL || job->time_limit == INFINITE ? -1 : (int64_t)job->time_limit * 60,
        .account = job->account,
        .partition = job->part_ptr ? job->part_ptr->name : job->partition,
    };
}

void sluice_hook_record(const struct decision *decision, enum sluice_decision_mode mode,
                        enum sluice_decision_outcome outcome)
{
    struct sluice_decision_recorder *recorder = sluice_decision_shared();
    if (!recorder || !decision->used)
        return;
    uint32_t nodes[64], node_count = 0;
    if (decision->stock_answered && decision->rc == SLURM_SUCCESS)
        for (size_t w = 0; w < sluice_hook.words && node_count < 64; w++)
            for (uint64_t set = words_of(decision->call->nodes)[w]; set && node_count < 64; set &= set - 1)
                nodes[node_count++] = (uint32_t)(w * 64) + (uint32_t)__builtin_ctzll(set);
    sluice_decision_placed(recorder, &(struct sluice_decision){
                                         .job = sluice_hook_job_facts(decision->call->job, &decision->request),
                                         .mode = mode,
                                         .outcome = outcome,
                                         .planned = decision->planned,
                                         .backfill = (decision->call->job->bit_flags & BACKFILL_TEST) != 0,
                                         .policy = decision->policy,
                                         .request = decision->used,
                                         .verdict = decision->verdict,
                                         .placement = decision->verdict ? NULL : &decision->placement,
                                         .stock_answered = decision->stock_answered,
                                         .stock_fits = decision->rc == SLURM_SUCCESS,
                                         .stock_nodes = nodes,
                                         .stock_node_count = node_count,
                                         .core_ns = (uint32_t)decision->core_ns,
                                         .stock_ns = (uint32_t)decision->stock_ns,
                                     });
}
