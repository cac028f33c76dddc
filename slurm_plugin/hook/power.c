/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Whether power budgets allow a start. The plan decides for the jobs that it knows; a start that it does not have now,
 * by Slurm's own scheduler, has to do with the watts that the plan leaves.
 */
#include "hook/hook_internal.h"

#include "hook/gpus.h"

#include "src/common/list.h"

/* GPUs that a job of which nothing else can be said takes on a node at the least. */
static int64_t least_gpus(const struct decision *decision)
{
    const struct sluice_hook_call *call = decision->call;
    const struct sluice_gpus_asked asked = sluice_job_gpus_asked(call->job);
    if (!asked.gpus)
        return asked.shares;
    return call->min_nodes && call->min_nodes == call->max_nodes ? (asked.gpus + call->min_nodes - 1) / call->min_nodes
                                                                 : 1;
}

void sluice_hook_read_power(struct decision *decision)
{
    if (decision->level != SLUICE_LEVEL_PLACE || decision->call->mode == SELECT_MODE_TEST_ONLY)
        return;
    const struct sluice_settings *settings = sluice_settings_acquire();
    if (settings->rules->budget_count) {
        decision->drawing = decision->request.wanted;
        if (decision->request.fit == SLUICE_JOB_STOCK &&
            !sluice_job_request_gpus(sluice_hook.mirror, decision->call->job, &decision->drawing))
            decision->drawing = (struct sluice_request){.gpus = least_gpus(decision)};
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

/* What a job draws on these parts. */
static struct sluice_job_watts watts_on(const struct decision *decision, const struct sluice_part *parts,
                                        uint32_t count)
{
    const struct sluice_settings *settings = sluice_settings_acquire();
    const struct sluice_draws *draws = sluice_draws_acquire();
    struct sluice_watts_basis basis;
    sluice_watts_begin(&basis, settings->rules, draws, sluice_hook.mirror);
    const struct sluice_job_watts power = sluice_watts_of_start(&basis, decision->call->job, parts, count);
    sluice_draws_release(draws);
    sluice_settings_release(settings);
    return power;
}

/* The GPUs of a job evenly on the nodes that stock would take; which ones it would pick is not known. */
static uint32_t evenly(const struct decision *decision, struct sluice_part *parts)
{
    const struct sluice_gpus_asked asked = sluice_job_gpus_asked(decision->call->job);
    const uint64_t *words = words_of(decision->call->nodes);
    const uint32_t nodes = (uint32_t)bit_set_count(decision->call->nodes);
    uint32_t count = 0;
    for (uint32_t node = 0; node < sluice_mirror_nodes(sluice_hook.mirror); node++) {
        struct sluice_node_view view;
        if (!(words[node / 64] >> node % 64 & 1) ||
            sluice_node_read(sluice_mirror_cluster(sluice_hook.mirror), node, &view, NULL))
            continue;
        const uint32_t gpus = sluice_gpus_on_node(&asked, nodes, view.gpu_count);
        if (gpus)
            parts[count++] = (struct sluice_part){.node = node, .gpus = (1u << gpus) - 1};
    }
    return count;
}

struct others {
    const struct decision *decision;
    int64_t gpus;
};

static int add_component(void *item, void *argument)
{
    const job_record_t *job = item;
    struct others *others = argument;
    if (job != others->decision->call->job && IS_JOB_PENDING(job) &&
        sluice_plan_ask(others->decision->plan, job->job_id).state != SLUICE_PLAN_WATTS)
        others->gpus += sluice_job_gpus_asked(job).gpus;
    return 0;
}

/* GPUs of a heterogeneous job's other components, which start with it, without those that watts are kept for. */
static int64_t gpus_of_others(const struct decision *decision)
{
    struct others others = {.decision = decision};
    const uint32_t id = decision->call->job->het_job_id;
    const job_record_t *leader = id ? find_job_record(id) : NULL;
    if (leader && leader->het_job_list)
        list_for_each_ro(leader->het_job_list, add_component, &others);
    return others.gpus;
}

bool sluice_hook_lacks_power(const struct decision *decision)
{
    if (!decision->budgets)
        return false;
    const uint32_t count = evenly(decision, sluice_hook.parts);
    const struct sluice_job_watts power = watts_on(decision, sluice_hook.parts, count);
    const int64_t others = gpus_of_others(decision);
    int64_t gpus = others;
    for (uint32_t i = 0; i < count; i++)
        gpus += __builtin_popcount(sluice_hook.parts[i].gpus);
    return sluice_plan_allows_watts(decision->plan, &decision->question, &power, sluice_hook.parts, count) < 0 ||
           (others && sluice_plan_allows_watts_anywhere(decision->plan, &decision->question, &power, gpus) < 0);
}

int sluice_hook_power(struct decision *decision)
{
    job_record_t *job = decision->call->job;
    sluice_hook.powered_job = 0;
    if (decision->rc || !decision->budgets || decision->call->mode != SELECT_MODE_RUN_NOW || !job->job_resrcs)
        return decision->rc;
    const uint32_t count_parts = sluice_gpus_picked(sluice_hook.mirror, job, sluice_hook.parts);
    struct sluice_job_watts power = watts_on(decision, sluice_hook.parts, count_parts);
    int32_t watts =
        sluice_plan_allows_watts(decision->plan, &decision->question, &power, sluice_hook.parts, count_parts);
    /* The other components of a heterogeneous job may have started already: it was put off before, or has the least. */
    if (watts < 0 && job->het_job_id && decision->plan)
        watts = power.least ? power.least : power.watts;
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
