/* SPDX-License-Identifier: Apache-2.0 */
/* Placing a request: what a node offers, the search for the best node, groups, explanations. See sluice/core.h. */
#include "cluster.h"

#include <inttypes.h>

/* ---- the GPUs of one node, under the request's preferences ---- */

enum { NIC = 1, NUMA = 2, LINK = 4 };

static unsigned preferences_of(const struct need *need, enum sluice_wish at_least)
{
    return (need->link >= at_least ? LINK : 0u) | (need->numa >= at_least ? NUMA : 0u) |
           (need->nic >= at_least ? NIC : 0u);
}

/* Among the groups of GPUs that keep all of `preferences`, the smallest with at least `gpus` of `mask`; 0 if there is
 * none. */
static uint16_t smallest_group(const struct shape *shape, unsigned preferences, int gpus, uint16_t mask)
{
    uint16_t best = 0;
    int best_count = SLUICE_MAX_GPUS + 1;
    if (preferences & NIC)
        mask &= shape->near_nic;
    int links = preferences & LINK ? shape->link_groups : 1, numas = preferences & NUMA ? shape->numa_groups : 1;
    for (int i = 0; i < links; i++) {
        for (int j = 0; j < numas; j++) {
            uint16_t group = mask & (preferences & LINK ? shape->link_group[i] : shape->all) &
                             (preferences & NUMA ? shape->numa_group[j] : shape->all);
            int count = sluice_count(group);
            if (count >= gpus && count < best_count) {
                best = group;
                best_count = count;
            }
        }
    }
    return best;
}

uint16_t sluice_best_group(const struct shape *shape, const struct need *need, int gpus, uint16_t mask,
                           uint8_t *preferred)
{
    /* Most preferences first; of equally many, links before NUMA before NIC. */
    static const uint8_t tries[] = {LINK | NUMA | NIC, LINK | NUMA, LINK | NIC, NUMA | NIC, LINK, NUMA, NIC, 0};
    unsigned all = preferences_of(need, SLUICE_PREFERRED), required = preferences_of(need, SLUICE_REQUIRED);
    for (size_t i = 0; i < sizeof tries; i++) {
        if ((tries[i] & ~all) || (required & ~(unsigned)tries[i]))
            continue;
        uint16_t group = smallest_group(shape, tries[i], gpus, mask);
        if (group) {
            *preferred = (uint8_t)__builtin_popcount(tries[i] & ~required);
            return group;
        }
    }
    return 0;
}

/* The most GPUs of `mask` that can be given together under what is required. */
static int largest_group(const struct shape *shape, const struct need *need, uint16_t mask)
{
    unsigned required = preferences_of(need, SLUICE_REQUIRED);
    for (int gpus = sluice_count(mask); gpus > 0; gpus--)
        if (smallest_group(shape, required, gpus, mask))
            return gpus;
    return 0;
}

/* ---- what a node offers ---- */

static int at_most(int64_t have, int64_t first, int64_t each, int units)
{
    if (have < first)
        return 0;
    return each && (have - first) / each < units ? (int)((have - first) / each) : units;
}

struct offer sluice_offer_of(const struct shape *shape, const struct need *need, int32_t cpus, int32_t host_memory,
                             uint16_t fit)
{
    struct offer offer = {.fit = fit};
    if (cpus < need->cpus || host_memory < need->host_memory)
        return offer;
    if (need->total) {
        int units = largest_group(shape, need, fit);
        units = at_most(cpus, need->cpus, need->cpus_per_gpu, units);
        units = at_most(host_memory, need->host_memory, need->host_memory_per_gpu, units);
        offer.units = (uint8_t)(units < need->gpus ? units : need->gpus);
    } else if (need->preferences) {
        offer.fit = sluice_best_group(shape, need, need->gpus, fit, &offer.preferred);
        offer.units = offer.fit != 0;
    } else {
        offer.units = sluice_count(fit) >= need->gpus;
    }
    return offer;
}

struct offer sluice_offer_now(const struct sluice_cluster *cluster, uint32_t node, const struct need *need)
{
    const struct node *row = &cluster->nodes[node];
    const struct shape *shape = sluice_shape_of(cluster, node);
    if (need->exclusive && row->parts)
        return (struct offer){0};
    struct offer offer = sluice_offer_of(shape, need, row->cpus_free, row->host_memory_free,
                                         need->gpus ? sluice_fitting_gpus(cluster, node, need) : 0);
    return need->nics || need->nics_per_gpu ? sluice_offer_with_nics(shape, need, cluster->nics_free[node], offer)
                                            : offer;
}

struct offer sluice_offer_idle(const struct sluice_cluster *cluster, const struct node_class *class,
                               const struct need *need)
{
    const struct shape *shape = &cluster->shapes[class->shape];
    uint16_t fit = need->gpus ? sluice_with_free(&shape->memory, sluice_eligible(shape, need), need->share) : 0;
    struct offer offer = sluice_offer_of(shape, need, class->cpus, class->host_memory, fit);
    return need->nics || need->nics_per_gpu ? sluice_offer_with_nics(shape, need, shape->all_nics, offer) : offer;
}

/* ---- candidates ---- */

/* How much of the node is in use, in thousandths: of its GPU memory, or CPUs where no GPU is asked. */
static int32_t use_permille(const struct sluice_cluster *cluster, uint32_t node, const struct need *need)
{
    const struct node *row = &cluster->nodes[node];
    const struct node_class *class = sluice_class_of(cluster, node);
    int64_t all = need->gpus ? cluster->shapes[class->shape].memory_sum : class->cpus;
    int64_t unused = need->gpus ? row->gpu_free : row->cpus_free;
    return all ? (int32_t)((all - unused) * 1000 / all) : 0;
}

struct choice sluice_score_node(const struct sluice_cluster *cluster, const struct policy *policy,
                                const struct need *need, uint32_t node, int gpus, uint16_t fit, uint8_t preferred,
                                struct terms *terms)
{
    struct choice choice = {.node = node, .preferred = preferred};
    if (need->layout != SLUICE_LAYOUT_POLICY) {
        int32_t use = use_permille(cluster, node, need);
        choice.layout = need->layout == SLUICE_PACK ? use : -use;
    }
    if (need->preferences)
        sluice_add_term(terms, "preferences_kept", preferred);
    if (need->layout != SLUICE_LAYOUT_POLICY)
        sluice_add_term(terms, "layout_permille", choice.layout);
    choice.score = policy->score(cluster, node, need, gpus, fit, &choice.gpus, terms);
    if (need->nics || need->nics_per_gpu) {
        sluice_choose_pairs(cluster, need, fit, &choice);
        sluice_add_term(terms, "nic_pairs", choice.pairs);
    }
    return choice;
}

bool sluice_try_node(const struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                     int gpus, uint32_t node, struct choice *choice, struct terms *terms)
{
    if (!sluice_node_open(cluster, node) || !sluice_node_allowed(need, node))
        return false;
    struct offer offer = sluice_offer_now(cluster, node, need);
    if (offer.units < (need->total ? gpus : 1))
        return false;
    if (need->total && need->preferences)
        offer.fit = sluice_best_group(sluice_shape_of(cluster, node), need, gpus, offer.fit, &offer.preferred);
    *choice = sluice_score_node(cluster, policy, need, node, gpus, offer.fit, offer.preferred, terms);
    return true;
}

bool sluice_choice_better(const struct sluice_cluster *cluster, const struct choice *a, const struct choice *b)
{
    if (a->preferred != b->preferred)
        return a->preferred > b->preferred;
    if (a->pairs != b->pairs)
        return a->pairs > b->pairs;
    if (a->layout != b->layout)
        return a->layout > b->layout;
    if (a->score != b->score)
        return a->score > b->score;
    return cluster->nodes[a->node].rank < cluster->nodes[b->node].rank;
}

const uint64_t *sluice_candidates(const struct sluice_cluster *cluster, const struct need *need)
{
    int idle_gpus = need->share ? 0 : need->total ? 1 : need->gpus;
    return cluster->open[idle_gpus];
}

uint64_t sluice_candidate_word(const struct need *need, const uint64_t *candidates, size_t word)
{
    if (!need->allowed)
        return candidates[word];
    return word < need->allowed_words ? candidates[word] & need->allowed[word] : 0;
}

bool sluice_scan(const struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                 struct choice *best)
{
    const uint64_t *candidates = sluice_candidates(cluster, need);
    bool found = false;
    /* If neither score nor order distinguishes nodes, the first is the best. */
    bool first_will_do = need->plain && !cluster->ordered && policy == &sluice_policies[SLUICE_POLICY_FIRST_FIT];
    for (size_t word = 0; word < (cluster->node_count + 63) / 64; word++) {
        for (uint64_t set = sluice_candidate_word(need, candidates, word); set; set &= set - 1) {
            uint32_t node = (uint32_t)(word * 64) + (uint32_t)__builtin_ctzll(set);
            struct offer offer = sluice_offer_now(cluster, node, need);
            if (!offer.units)
                continue;
            struct choice choice =
                sluice_score_node(cluster, policy, need, node, need->gpus, offer.fit, offer.preferred, NULL);
            if (!found || sluice_choice_better(cluster, &choice, best)) {
                *best = choice;
                found = true;
            }
            if (first_will_do)
                return true;
        }
    }
    return found;
}

/* ---- place ---- */

struct sluice_part sluice_part_of(const struct need *need, uint32_t node, uint16_t gpus, uint32_t nics)
{
    int count = sluice_count(gpus);
    return (struct sluice_part){
        .node = node,
        .gpus = gpus,
        .gpu_memory_mib = need->share,
        .cpus_milli = need->cpus + (int64_t)count * need->cpus_per_gpu,
        .host_memory_mib = need->host_memory + (int64_t)count * need->host_memory_per_gpu,
        .exclusive = need->exclusive,
        .gpu_compute_percent = (uint32_t)need->compute,
        .nics = nics,
    };
}

/* Would it find a place, were every allowed node up, healthy and idle? */
static bool possible(struct sluice_cluster *cluster, const struct need *need)
{
    if (need->nodes_max > 1)
        return sluice_gang_possible(cluster, need);
    if (!need->allowed) {
        for (uint32_t i = 0; i < cluster->class_count; i++)
            if (cluster->classes[i].nodes && sluice_offer_idle(cluster, &cluster->classes[i], need).units)
                return true;
        return false;
    }
    for (size_t word = 0; word < need->allowed_words && word < (cluster->node_count + 63) / 64; word++) {
        for (uint64_t set = need->allowed[word]; set; set &= set - 1) {
            uint32_t node = (uint32_t)(word * 64) + (uint32_t)__builtin_ctzll(set);
            if (sluice_offer_idle(cluster, sluice_class_of(cluster, node), need).units)
                return true;
        }
    }
    return false;
}

static enum sluice_error check_call(const struct sluice_cluster *cluster, enum sluice_policy policy,
                                    const struct sluice_request *request, const struct sluice_placement *placement,
                                    struct need *need, struct sluice_error_text *text)
{
    if ((unsigned)policy >= SLUICE_POLICY_COUNT)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "%d is no placement policy", (int)policy);
    enum sluice_error error = sluice_need_from_request(cluster, request, need, text);
    if (error)
        return error;
    uint32_t most = need->total && (uint32_t)need->gpus < need->nodes_max ? (uint32_t)need->gpus : need->nodes_max;
    if (most > placement->part_capacity)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "up to %" PRIu32 " nodes asked, but the placement has room for %" PRIu32 " parts", most,
                           placement->part_capacity);
    return SLUICE_OK;
}

bool sluice_find(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                 struct sluice_placement *placement)
{
    if (need->nodes_max > 1)
        return sluice_gang_place(cluster, policy, need, placement) == SLUICE_OK;
    struct choice choice;
    bool found = policy->choose && need->plain ? policy->choose(cluster, need, &choice)
                                               : sluice_scan(cluster, policy, need, &choice);
    if (!found)
        return false;
    placement->parts[0] = sluice_part_of(need, choice.node, choice.gpus, choice.nics);
    placement->part_count = 1;
    placement->score = choice.score;
    placement->nic_pairs = choice.pairs;
    return true;
}

static enum sluice_error place(struct sluice_cluster *cluster, enum sluice_policy policy_id, const struct need *need,
                               struct sluice_placement *placement, struct sluice_error_text *text)
{
    const struct policy *policy = &sluice_policies[policy_id];
    if (need->nics || need->nics_per_gpu ? sluice_find_near_nics(cluster, policy, need, placement)
                                         : sluice_find(cluster, policy, need, placement))
        return SLUICE_OK;
    if (possible(cluster, need))
        return sluice_fail(text, SLUICE_ERROR_NO_PLACE, "no place now; sluice_explain says why");
    return sluice_fail(text, SLUICE_ERROR_NEVER, "no place even on an idle cluster; sluice_explain says why");
}

enum sluice_error sluice_place(struct sluice_cluster *cluster, enum sluice_policy policy,
                               const struct sluice_request *request, struct sluice_placement *placement,
                               struct sluice_error_text *text)
{
    struct need need;
    enum sluice_error error = check_call(cluster, policy, request, placement, &need, text);
    return error ? error : place(cluster, policy, &need, placement, text);
}

enum sluice_error sluice_start(struct sluice_cluster *cluster, enum sluice_policy policy,
                               const struct sluice_request *request, struct sluice_placement *placement,
                               uint64_t *allocation, struct sluice_error_text *text)
{
    enum sluice_error error = sluice_place(cluster, policy, request, placement, text);
    return error ? error : sluice_commit(cluster, placement, allocation, text);
}

/* ---- groups ---- */

/* Does `a` come before `b`? Most GPUs first; of equally many whole ones, then large shares; then CPUs. */
static bool goes_before(const struct need *a, const struct need *b)
{
    int64_t a_gpus = (int64_t)a->gpus * (a->total ? 1 : a->nodes_min);
    int64_t b_gpus = (int64_t)b->gpus * (b->total ? 1 : b->nodes_min);
    if (a_gpus != b_gpus)
        return a_gpus > b_gpus;
    if (a->share != b->share)
        return !a->share || (b->share && a->share > b->share);
    return (int64_t)a->cpus * a->nodes_min > (int64_t)b->cpus * b->nodes_min;
}

enum sluice_error sluice_start_group(struct sluice_cluster *cluster, enum sluice_policy policy,
                                     const struct sluice_request *requests, struct sluice_placement *placements,
                                     uint64_t *allocations, uint32_t count, struct sluice_error_text *text)
{
    struct need needs[SLUICE_MAX_GROUP];
    uint32_t order[SLUICE_MAX_GROUP], started = 0, last_node = cluster->last_node;
    uint64_t made[SLUICE_MAX_GROUP];
    struct sluice_error_text why = {.text = ""};
    enum sluice_error error = SLUICE_OK;
    if (count == 0 || count > SLUICE_MAX_GROUP)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "a group of %" PRIu32 " requests: must be 1 to %d", count,
                           SLUICE_MAX_GROUP);
    for (uint32_t i = 0; i < count; i++) {
        if ((error = check_call(cluster, policy, &requests[i], &placements[i], &needs[i], &why)))
            return sluice_fail(text, error, "request %" PRIu32 ": %.200s", i, why.text);
        uint32_t at = i;
        for (; at > 0 && goes_before(&needs[i], &needs[order[at - 1]]); at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    for (; started < count && !error; started += !error) {
        uint32_t i = order[started];
        error = place(cluster, policy, &needs[i], &placements[i], &why);
        if (!error)
            error = sluice_commit(cluster, &placements[i], &made[i], &why);
        if (error)
            sluice_fail(text, error, "request %" PRIu32 " of the group: %.200s", i, why.text);
    }
    if (error) {
        while (started > 0)
            sluice_release(cluster, made[order[--started]], NULL);
        cluster->last_node = last_node;
        return error;
    }
    for (uint32_t i = 0; i < count; i++)
        allocations[i] = made[i];
    return SLUICE_OK;
}

/* ---- explanations ---- */

const char *sluice_reason_text(enum sluice_reason reason)
{
    switch (reason) {
    case SLUICE_REASON_FITS:
        return "fits";
    case SLUICE_REASON_NOT_ALLOWED:
        return "not among the allowed nodes";
    case SLUICE_REASON_STATE:
        return "drained or down";
    case SLUICE_REASON_EXCLUSIVE:
        return "held or asked exclusively";
    case SLUICE_REASON_GPU_COUNT:
        return "has too few GPUs";
    case SLUICE_REASON_MODEL:
        return "too few GPUs of an accepted model";
    case SLUICE_REASON_CAPABILITY:
        return "too few GPUs of the capability";
    case SLUICE_REASON_GPU_SIZE:
        return "too few GPUs with so much memory";
    case SLUICE_REASON_NIC:
        return "too few GPUs near an RDMA NIC";
    case SLUICE_REASON_CPUS:
        return "too few CPUs free";
    case SLUICE_REASON_HOST_MEMORY:
        return "too little host memory free";
    case SLUICE_REASON_HEALTH:
        return "too few healthy GPUs";
    case SLUICE_REASON_GPU_BUSY:
        return "too few GPUs free";
    case SLUICE_REASON_GPU_COMPUTE:
        return "too few GPUs with enough compute free";
    case SLUICE_REASON_LINK:
        return "too few free GPUs in one link domain";
    case SLUICE_REASON_NUMA:
        return "too few free GPUs on one NUMA node";
    case SLUICE_REASON_SWITCH:
        return "too few nodes that fit below one switch";
    case SLUICE_REASON_SEGMENT:
        return "fits alone, but not enough whole segments fit below leaf switches";
    case SLUICE_REASON_GANG:
        return "too few nodes that fit";
    case SLUICE_REASON_NICS:
        return "has too few RDMA NICs";
    case SLUICE_REASON_NICS_BUSY:
        return "GPUs free, too few RDMA NICs free";
    }
    return "unknown reason";
}

/* The first of the documented reasons that keeps the node from its share of the request. */
static enum sluice_reason reason_of(const struct sluice_cluster *cluster, uint32_t node, const struct need *need)
{
    const struct node *row = &cluster->nodes[node];
    const struct shape *shape = sluice_shape_of(cluster, node);
    int gpus = need->total ? 1 : need->gpus;
    if (!sluice_node_allowed(need, node))
        return SLUICE_REASON_NOT_ALLOWED;
    if (row->state != SLUICE_NODE_UP)
        return SLUICE_REASON_STATE;
    if (row->exclusive || (need->exclusive && row->parts))
        return SLUICE_REASON_EXCLUSIVE;
    if ((int)shape->gpu_count < gpus)
        return SLUICE_REASON_GPU_COUNT;
    /* `kind` narrows, condition by condition, to the GPUs that would do if they were free. */
    uint16_t kind = 0;
    for (uint32_t i = 0; i < shape->gpu_count; i++)
        kind |= (uint16_t)((!need->models || (need->models >> shape->model[i] & 1)) << i);
    if (sluice_count(kind) < gpus)
        return SLUICE_REASON_MODEL;
    for (uint32_t i = 0; i < shape->gpu_count; i++)
        if (shape->capability[i] < need->capability)
            kind &= (uint16_t) ~(1u << i);
    if (sluice_count(kind) < gpus)
        return SLUICE_REASON_CAPABILITY;
    kind =
        sluice_with_free(&shape->memory, kind, need->gpu_memory_min > need->share ? need->gpu_memory_min : need->share);
    if (sluice_count(kind) < gpus)
        return SLUICE_REASON_GPU_SIZE;
    if (need->nic == SLUICE_REQUIRED)
        kind &= shape->near_nic;
    if (sluice_count(kind) < gpus)
        return SLUICE_REASON_NIC;
    int nics = (int)need->nics + gpus * (int)need->nics_per_gpu;
    uint32_t accepted = sluice_nics_accepted(shape, need->nic_kinds, 0);
    if (__builtin_popcount(accepted) < nics)
        return SLUICE_REASON_NICS;
    if (row->cpus_free < need->cpus + (int64_t)gpus * need->cpus_per_gpu)
        return SLUICE_REASON_CPUS;
    if (row->host_memory_free < need->host_memory + (int64_t)gpus * need->host_memory_per_gpu)
        return SLUICE_REASON_HOST_MEMORY;
    kind &= row->healthy;
    if (sluice_count(kind) < gpus)
        return SLUICE_REASON_HEALTH;
    kind = need->share ? sluice_with_free(&cluster->gpu_free[node], kind, need->share) : kind & row->idle;
    if (sluice_count(kind) < gpus)
        return SLUICE_REASON_GPU_BUSY;
    kind = sluice_with_compute(cluster->compute_free[node].percent, kind, need->compute);
    if (sluice_count(kind) < gpus)
        return SLUICE_REASON_GPU_COMPUTE;
    unsigned required = preferences_of(need, SLUICE_REQUIRED);
    if (gpus && (required & LINK) && !smallest_group(shape, LINK, gpus, kind))
        return SLUICE_REASON_LINK;
    if (gpus && (required & NUMA) && !smallest_group(shape, required, gpus, kind))
        return SLUICE_REASON_NUMA;
    if (__builtin_popcount(accepted & cluster->nics_free[node]) < nics)
        return SLUICE_REASON_NICS_BUSY;
    return SLUICE_REASON_FITS;
}

/* Why a request has no place although so many nodes fit separately. */
static enum sluice_reason reason_together(const struct need *need, uint32_t fitting)
{
    if (need->one_switch == SLUICE_REQUIRED)
        return SLUICE_REASON_SWITCH;
    return need->segment > 1 && fitting >= need->nodes_min ? SLUICE_REASON_SEGMENT : SLUICE_REASON_GANG;
}

/* In how many planes the NICs of a node are, of all nodes. */
static uint32_t most_planes(const struct sluice_cluster *cluster, const struct sluice_placement *placement)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < placement->part_count; i++) {
        const struct sluice_part *part = &placement->parts[i];
        uint32_t planes = sluice_count_planes(sluice_shape_of(cluster, part->node), part->nics);
        most = planes > most ? planes : most;
    }
    return most;
}

enum sluice_error sluice_explain(struct sluice_cluster *cluster, enum sluice_policy policy,
                                 const struct sluice_request *request, struct sluice_placement *placement,
                                 struct sluice_explanation *explanation, struct sluice_error_text *text)
{
    struct need need;
    enum sluice_error error = check_call(cluster, policy, request, placement, &need, text);
    if (error)
        return error;
    *explanation = (struct sluice_explanation){.nodes = cluster->node_count};
    explanation->verdict = place(cluster, policy, &need, placement, NULL);
    for (uint32_t node = 0; node < cluster->node_count; node++)
        explanation->by_reason[reason_of(cluster, node, &need)]++;
    if (explanation->verdict != SLUICE_OK) {
        /* Nodes that fit separately failed together. */
        enum sluice_reason together = reason_together(&need, explanation->by_reason[SLUICE_REASON_FITS]);
        explanation->by_reason[together] = explanation->by_reason[SLUICE_REASON_FITS];
        explanation->by_reason[SLUICE_REASON_FITS] = 0;
        return SLUICE_OK;
    }
    struct terms terms = {0};
    struct choice choice;
    sluice_try_node(cluster, &sluice_policies[policy], &need, sluice_count((uint16_t)placement->parts[0].gpus),
                    placement->parts[0].node, &choice, &terms);
    if (cluster->planes && (need.nics || need.nics_per_gpu))
        sluice_add_term(&terms, "nic_planes", most_planes(cluster, placement));
    explanation->term_count = terms.count;
    for (uint32_t i = 0; i < terms.count; i++)
        explanation->terms[i] = terms.term[i];
    return SLUICE_OK;
}

/* ---- usual requests ---- */

enum sluice_error sluice_cluster_set_workload(struct sluice_cluster *cluster, const struct sluice_request *shapes,
                                              const uint32_t *weights, uint32_t count, struct sluice_error_text *text)
{
    struct need needs[SLUICE_MAX_WORKLOAD];
    int64_t weight_sum = 0;
    if (count > SLUICE_MAX_WORKLOAD)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "%" PRIu32 " usual requests: at most %d are possible", count,
                           SLUICE_MAX_WORKLOAD);
    for (uint32_t i = 0; i < count; i++) {
        struct sluice_error_text why = {.text = ""};
        enum sluice_error error = sluice_need_from_request(cluster, &shapes[i], &needs[i], &why);
        if (error)
            return sluice_fail(text, error, "usual request %" PRIu32 ": %.200s", i, why.text);
        if (needs[i].nodes_max > 1)
            return sluice_fail(text, SLUICE_ERROR_INVALID,
                               "usual request %" PRIu32 " is for %" PRIu32 " nodes, not one", i, needs[i].nodes_max);
        needs[i].allowed = NULL; /* belongs to the caller, not to the shape */
        needs[i].allowed_words = 0;
        weight_sum += weights[i];
    }
    if (weight_sum > 1000000000)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "the weights of the usual requests sum up to %" PRId64 ": at most 1000000000 is possible",
                           weight_sum);
    if (sluice_fgd_set_workload(cluster, needs, weights, count) ||
        sluice_index_set_workload(cluster, needs, weights, count))
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "out of memory for %" PRIu32 " usual requests", count);
    return SLUICE_OK;
}
