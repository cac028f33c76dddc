/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Whether power budgets allow a start. The plan decides for the jobs that it knows; a start that it does not have now,
 * by Slurm's own scheduler, has to do with the watts that the plan leaves.
 */
#include "hook/hook_internal.h"

/* The parts of a start: the core's choice where stock took its nodes, else so many GPUs on each node. */
static uint32_t parts_of(const struct decision *decision, const struct sluice_part **parts)
{
    const job_record_t *job = decision->call->job;
    const struct sluice_request *request = &decision->drawing;
    const uint64_t *words = words_of(job->job_resrcs->node_bitmap);
    const uint32_t nodes = (uint32_t)bit_set_count(job->job_resrcs->node_bitmap);
    uint32_t count = 0, chosen = sluice_hook.chosen_job == job->job_id ? sluice_hook.chosen_count : 0;
    for (uint32_t i = 0; i < chosen; i++)
        count += words[sluice_hook.chosen[i].node / 64] >> sluice_hook.chosen[i].node % 64 & 1;
    *parts = sluice_hook.chosen;
    if (count && count == chosen && count == nodes)
        return count;
    int64_t gpus = request->gpus < SLUICE_MAX_GPUS ? request->gpus : SLUICE_MAX_GPUS;
    if (request->flags & SLUICE_GPUS_TOTAL && nodes)
        gpus = (gpus + nodes - 1) / nodes;
    *parts = sluice_hook.parts;
    count = 0;
    for (uint32_t node = 0; node < sluice_hook.words * 64 && count < nodes; node++)
        if (words[node / 64] >> node % 64 & 1)
            sluice_hook.parts[count++] = (struct sluice_part){.node = node, .gpus = (1u << gpus) - 1};
    return count;
}

void sluice_hook_read_power(struct decision *decision)
{
    if (decision->level != SLUICE_LEVEL_PLACE || decision->call->mode == SELECT_MODE_TEST_ONLY)
        return;
    const struct sluice_settings *settings = sluice_settings_acquire();
    if (settings->rules->budget_count) {
        decision->drawing = decision->request.wanted;
        if (decision->request.fit == SLUICE_JOB_STOCK)
            sluice_job_request_gpus(sluice_hook.mirror, decision->call->job, &decision->drawing);
        const struct sluice_draws *draws = sluice_draws_acquire();
        struct sluice_watts_basis basis;
        sluice_watts_begin(&basis, settings->rules, draws, sluice_hook.mirror);
        decision->power = sluice_watts_of_pending(&basis, decision->call->job, &decision->drawing);
        decision->budgets = true;
        sluice_draws_release(draws);
    }
    sluice_settings_release(settings);
}

/* GPUs that the job takes on a node at the least. */
static int64_t gpus_of(const struct decision *decision)
{
    const struct sluice_request *request = &decision->drawing;
    return request->flags & SLUICE_GPUS_TOTAL && request->gpus ? 1 : request->gpus;
}

void sluice_hook_keep_out_power(const struct decision *decision, uint64_t *words)
{
    sluice_plan_keep_out_watts(decision->plan, &decision->question, &decision->power, gpus_of(decision), words,
                               sluice_hook.words);
}

int sluice_hook_power(struct decision *decision)
{
    job_record_t *job = decision->call->job;
    const struct sluice_part *parts;
    sluice_hook.powered_job = 0;
    if (decision->rc || !decision->budgets || decision->call->mode != SELECT_MODE_RUN_NOW || !job->job_resrcs)
        return decision->rc;
    struct sluice_job_watts power = decision->power;
    const uint32_t part_count = parts_of(decision, &parts);
    const int32_t watts = sluice_plan_allows_watts(decision->plan, &decision->question, &power, parts, part_count);
    if (watts < 0) {
        count(sluice_hook.kept_waiting);
        return refuse(job);
    }
    const uint32_t cap = watts < power.watts ? (uint32_t)(watts + power.counted) : 0;
    if (cap) {
        info("select/sluice: %pJ starts with a cap of %u W on each GPU: the power budgets have no more", job, cap);
        sluice_watts_set_cap(job, cap);
    }
    power.watts = watts;
    sluice_hook.power = power;
    sluice_hook.powered_job = job->job_id;
    return decision->rc;
}
