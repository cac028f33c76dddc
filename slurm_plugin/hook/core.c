/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Asking the core, and the plan's limits on its choice. */
#include "hook/hook_internal.h"

#include "hook/nics.h"

static bool any_of(const uint64_t *a, const uint64_t *b)
{
    for (size_t w = 0; w < sluice_hook.words; w++)
        if (a[w] & b[w])
            return true;
    return false;
}

bool sluice_hook_any_opaque(const uint64_t *candidates)
{
    return any_of(candidates, sluice_mirror_opaque(sluice_hook.mirror));
}

void sluice_hook_set_allowed(const struct decision *decision, bool start)
{
    const uint64_t *candidates = words_of(decision->call->nodes);
    const uint64_t *completing = cg_node_bitmap ? words_of(cg_node_bitmap) : NULL;
    bool skip = start && completing && !(decision->call->job->bit_flags & BACKFILL_TEST);
    for (size_t w = 0; w < sluice_hook.words; w++)
        sluice_hook.allowed[w] = skip ? candidates[w] & ~completing[w] : candidates[w];
}

/* The core's choice within a set of nodes, those of low weight first; where NICs are asked, of those with the most pairs
 * of GPUs and NICs. */
static enum sluice_error place_within(struct decision *decision, struct sluice_request *request, const uint64_t *within)
{
    struct sluice_cluster *cluster = sluice_mirror_cluster(sluice_hook.mirror);
    uint32_t weights = sluice_mirror_weights(sluice_hook.mirror);
    request->allowed = within;
    request->allowed_words = sluice_hook.words;
    decision->used = request;
    enum sluice_error verdict = sluice_place(cluster, decision->policy, request, &decision->placement, NULL);
    uint32_t pairs = decision->placement.nic_pairs; /* light nodes are not worth fewer */
    for (uint32_t weight = 0; !verdict && weight + 1 < weights; weight++) {
        const uint64_t *light = sluice_mirror_light(sluice_hook.mirror, weight);
        for (size_t w = 0; w < sluice_hook.words; w++)
            sluice_hook.tried[w] = within[w] & light[w];
        request->allowed = sluice_hook.tried;
        if (!sluice_place(cluster, decision->policy, request, &decision->placement, NULL) &&
            ((!request->nics && !request->nics_per_gpu) || decision->placement.nic_pairs >= pairs))
            return SLUICE_OK;
        request->allowed = within;
        if (weight + 2 == weights)
            verdict = sluice_place(cluster, decision->policy, request, &decision->placement, NULL);
    }
    return verdict;
}

/* ... and those that are up. */
static enum sluice_error place(struct decision *decision, struct sluice_request *request)
{
    const uint64_t *down = SLUICE_POWERED_DOWN ? words_of(SLUICE_POWERED_DOWN) : NULL;
    const uint64_t *booting = booting_node_bitmap ? words_of(booting_node_bitmap) : NULL;
    if ((down && any_of(sluice_hook.allowed, down)) || (booting && any_of(sluice_hook.allowed, booting))) {
        for (size_t w = 0; w < sluice_hook.words; w++)
            sluice_hook.up[w] = sluice_hook.allowed[w] & ~(down ? down[w] : 0) & ~(booting ? booting[w] : 0);
        if (!place_within(decision, request, sluice_hook.up))
            return SLUICE_OK;
    }
    return place_within(decision, request, sluice_hook.allowed);
}

/* Do the chosen nodes' GPUs look in Slurm as in the mirror? */
static bool choice_agrees(const struct decision *decision)
{
    bool agrees = true;
    for (uint32_t i = 0; i < decision->placement.part_count; i++)
        agrees &= sluice_mirror_node_agrees(sluice_hook.mirror, decision->placement.parts[i].node);
    return agrees;
}

void sluice_hook_ask_core(struct decision *decision)
{
    uint64_t begin = sluice_now_ns();
    struct sluice_job_request *request = &decision->request;
    decision->verdict = SLUICE_ERROR_NO_PLACE;
    for (int try = 0; try < TRIES; try++) {
        decision->verdict = place(decision, &request->wanted);
        if (decision->verdict && request->has_wider)
            decision->verdict = place(decision, &request->wider);
        if (decision->verdict || choice_agrees(decision))
            break;
        decision->verdict = SLUICE_ERROR_BUSY; /* the mirror was corrected: once more */
    }
    decision->core_ns += sluice_now_ns() - begin;
    count(sluice_hook.asked);
}

/* As sluice_hook_ask_core, for a start that must not delay those that are reserved for others. */
static void ask_core_and_plan(struct decision *decision)
{
    for (int try = 0; try < TRIES; try++) {
        sluice_hook_ask_core(decision);
        if (decision->verdict)
            return;
        if (sluice_plan_allows_start(decision->plan, &decision->question, decision->placement.parts,
                                     decision->placement.part_count))
            return;
        decision->by_plan = true;
        decision->verdict = SLUICE_ERROR_NO_PLACE;
        for (uint32_t i = 0; i < decision->placement.part_count; i++) {
            const struct sluice_part *part = &decision->placement.parts[i];
            if (!sluice_plan_allows_start(decision->plan, &decision->question, part, 1))
                sluice_hook.allowed[part->node / 64] &= ~(UINT64_C(1) << (part->node % 64));
        }
    }
    decision->planned = true; /* the plan allows none of those that the core would take */
}

/* Are the parts that the plan has for it still free? */
static bool free_now(const struct sluice_part *part)
{
    struct sluice_node_view view;
    if (sluice_node_read(sluice_mirror_cluster(sluice_hook.mirror), part->node, &view, NULL) ||
        view.cpus_milli_free < part->cpus_milli || view.host_memory_mib_free < part->host_memory_mib ||
        (part->nics & ~view.nics_free))
        return false;
    for (uint32_t i = 0; i < view.gpu_count; i++)
        if ((part->gpus >> i & 1) &&
            (view.gpu_compute_free[i] < part->gpu_compute_percent ||
             (part->gpu_memory_mib ? view.gpu_memory_mib_free[i] < part->gpu_memory_mib : !(view.gpus_idle >> i & 1))))
            return false;
    return true;
}

/* The parts that the plan has for the job now, if they are free. */
static bool take_from_plan(struct decision *decision, const uint64_t *candidates)
{
    struct sluice_plan_answer answer = sluice_plan_ask(decision->plan, decision->call->job->job_id);
    if (answer.state != SLUICE_PLAN_NOW || !answer.part_count || answer.part_count > decision->placement.part_capacity)
        return false;
    for (uint32_t i = 0; i < answer.part_count; i++) {
        uint32_t node = answer.parts[i].node;
        if (node >= sluice_hook.words * 64 || !(candidates[node / 64] >> (node % 64) & 1) ||
            !free_now(&answer.parts[i]))
            return false;
    }
    memcpy(decision->placement.parts, answer.parts, answer.part_count * sizeof(*answer.parts));
    decision->placement.part_count = answer.part_count;
    decision->placement.score = 0;
    return choice_agrees(decision);
}

void sluice_hook_choose(struct decision *decision, bool start)
{
    sluice_hook_set_allowed(decision, start);
    save_nodes(decision);
    sluice_plan_keep_out(decision->plan, &decision->question, false, sluice_hook.allowed, sluice_hook.words);
    sluice_hook_keep_out_power(decision, sluice_hook.allowed);
    decision->by_plan = !same_words(sluice_hook.allowed, sluice_hook.saved);
    ask_core_and_plan(decision);
    if (start && decision->verdict && take_from_plan(decision, sluice_hook.saved)) {
        decision->verdict = SLUICE_OK;
        decision->planned = true;
    }
}

bool sluice_hook_proven(struct decision *decision, const uint64_t *candidates)
{
    struct sluice_job_request *request = &decision->request;
    const job_record_t *job = decision->call->job;
    if (request->fit != SLUICE_JOB_MODELLED || sluice_hook_any_opaque(candidates))
        return false;
    /* What stock does to a job's record when it first looks at it is left to stock. */
    if (!seen_by_stock(job))
        return false;
    if (request->same && !decision->by_plan)
        return decision->verdict == SLUICE_ERROR_NO_PLACE || decision->verdict == SLUICE_ERROR_NEVER;
    uint64_t begin = sluice_now_ns();
    request->needed.allowed = sluice_hook.allowed;
    request->needed.allowed_words = sluice_hook.words;
    struct sluice_placement placement = decision->placement;
    enum sluice_error verdict = sluice_place(sluice_mirror_cluster(sluice_hook.mirror), SLUICE_POLICY_FIRST_FIT,
                                             &request->needed, &placement, NULL);
    decision->core_ns += sluice_now_ns() - begin;
    return verdict == SLUICE_ERROR_NO_PLACE || verdict == SLUICE_ERROR_NEVER;
}

void sluice_hook_remember_choice(const struct decision *decision)
{
    sluice_hook.chosen_job = decision->call->job->job_id;
    sluice_hook.chosen_count = decision->placement.part_count;
    memcpy(sluice_hook.chosen, decision->placement.parts, sluice_hook.chosen_count * sizeof(*sluice_hook.chosen));
    if (decision->used->one_link_domain || decision->used->one_numa_node)
        return; /* the user has said which GPUs are to be together */
    for (uint32_t i = 0; i < sluice_hook.chosen_count; i++) {
        struct sluice_part part = sluice_hook.chosen[i];
        if (sluice_nics_pair(sluice_hook.mirror, decision->call->job, &part) &&
            sluice_plan_allows_start(decision->plan, &decision->question, &part, 1))
            sluice_hook.chosen[i] = part;
    }
}
