/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The published placement policies but FGD (place_fgd.c), each a score that is larger for the better node. Sources and
 * formulas are in docs/scheduling.md. Fractions are compared exactly, in integers, and cut to whole percents where the
 * published score is.
 */
#include "cluster.h"

#include <string.h>

/* Large enough for the product of four amounts, each below 2^30.2, with a small factor. */
__extension__ typedef unsigned __int128 wide;

void sluice_add_term(struct terms *terms, const char *name, int64_t value)
{
    if (terms && terms->count < SLUICE_MAX_TERMS)
        terms->term[terms->count++] = (struct sluice_term){.name = name, .value = value};
}

/* ---- which GPUs of a node ---- */

uint16_t sluice_pick_tightest(const struct sluice_cluster *cluster, uint32_t node, uint16_t fit, int gpus)
{
    const struct gpu_amounts *free_amounts = &cluster->gpu_free[node];
    uint16_t chosen = 0;
    for (; gpus > 0; gpus--) {
        int best = -1;
        for (unsigned set = fit & ~(unsigned)chosen; set; set &= set - 1) {
            int gpu = __builtin_ctz(set);
            if (best < 0 || free_amounts->mib[gpu] < free_amounts->mib[best])
                best = gpu;
        }
        chosen |= (uint16_t)(1u << best);
    }
    return chosen;
}

/* From each GPU in turn, add the one best linked to those chosen; the heaviest set wins, the lowest start among equals.
 * Exact for two GPUs. */
static uint16_t pick_linked(const struct shape *shape, uint16_t fit, int gpus)
{
    uint16_t best = 0;
    int best_weight = -1;
    for (unsigned starts = fit; starts; starts &= starts - 1) {
        int last = __builtin_ctz(starts), weight = 0, to_chosen[SLUICE_MAX_GPUS] = {0};
        uint16_t chosen = (uint16_t)(1u << last);
        for (int count = 1; count < gpus; count++) {
            int next = -1;
            for (unsigned set = fit & ~(unsigned)chosen; set; set &= set - 1) {
                int gpu = __builtin_ctz(set);
                to_chosen[gpu] += shape->links[last][gpu];
                if (next < 0 || to_chosen[gpu] > to_chosen[next])
                    next = gpu;
            }
            chosen |= (uint16_t)(1u << next);
            weight += to_chosen[next];
            last = next;
        }
        if (weight > best_weight) {
            best_weight = weight;
            best = chosen;
        }
    }
    return best;
}

uint16_t sluice_pick(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                     uint16_t fit)
{
    if (sluice_count(fit) == gpus)
        return fit;
    if (need->share)
        return sluice_pick_tightest(cluster, node, fit, gpus);
    const struct shape *shape = sluice_shape_of(cluster, node);
    if (need->link && !shape->uniform_links)
        return pick_linked(shape, fit, gpus);
    return sluice_lowest(fit, gpus);
}

/* ---- figures that several scores use ---- */

/* Scores are scaled by it: the largest node of the cluster. Never 0. */
static wide most_cpus(const struct sluice_cluster *cluster)
{
    return (wide)(cluster->largest_cpus ? cluster->largest_cpus : 1);
}

static wide most_gpu_memory(const struct sluice_cluster *cluster)
{
    return (wide)(cluster->largest_gpu_memory ? cluster->largest_gpu_memory : 1);
}

static int32_t asked_cpus(const struct need *need, int gpus)
{
    return need->cpus + gpus * need->cpus_per_gpu;
}

static int64_t asked_gpu_memory(const struct sluice_cluster *cluster, uint32_t node, const struct need *need,
                                uint16_t chosen)
{
    if (need->share)
        return (int64_t)need->share * sluice_count(chosen);
    const struct shape *shape = sluice_shape_of(cluster, node);
    int64_t sum = 0;
    for (unsigned set = chosen; set; set &= set - 1)
        sum += shape->memory.mib[__builtin_ctz(set)];
    return sum;
}

/* ---- the policies ---- */

static int64_t score_first_fit(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                               uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    (void)need;
    *chosen = sluice_lowest(fit, gpus);
    sluice_add_term(terms, "rank", cluster->nodes[node].rank);
    return 0;
}

static int64_t score_round_robin(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                                 uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    (void)need;
    *chosen = sluice_lowest(fit, gpus);
    uint32_t count = cluster->node_count, rank = cluster->nodes[node].rank;
    uint32_t first = cluster->last_node == NONE ? 0 : (cluster->nodes[cluster->last_node].rank + 1) % count;
    int64_t distance = rank >= first ? rank - first : rank + count - first;
    sluice_add_term(terms, "distance", distance);
    return -distance;
}

static int64_t score_least_loaded(const struct sluice_cluster *cluster, uint32_t node, const struct need *need,
                                  int gpus, uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    const uint8_t *load = cluster->utilisation[node];
    const struct shape *shape = sluice_shape_of(cluster, node);
    (void)need;
    *chosen = 0;
    if (!gpus) {
        int64_t all = sluice_class_of(cluster, node)->cpus, used = all - cluster->nodes[node].cpus_free;
        int64_t permille = all ? used * 1000 / all : 0;
        sluice_add_term(terms, "cpus_used_permille", permille);
        return -permille;
    }
    int chosen_load = 0, node_load = 0;
    for (int count = 0; count < gpus; count++) {
        int best = -1;
        for (unsigned set = fit & ~(unsigned)*chosen; set; set &= set - 1) {
            int gpu = __builtin_ctz(set);
            if (best < 0 || load[gpu] < load[best])
                best = gpu;
        }
        *chosen |= (uint16_t)(1u << best);
        chosen_load += load[best];
    }
    for (uint32_t i = 0; i < shape->gpu_count; i++)
        node_load += load[i];
    /* Means in hundredths of a percent; the whole node's decides between equal GPUs. */
    int64_t chosen_mean = chosen_load * 100 / gpus, node_mean = node_load * 100 / (int)shape->gpu_count;
    sluice_add_term(terms, "gpu_utilisation_e-4", chosen_mean);
    sluice_add_term(terms, "node_utilisation_e-4", node_mean);
    return -(chosen_mean * 10001 + node_mean);
}

static int64_t score_best_fit(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                              uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    *chosen = sluice_pick(cluster, node, need, gpus, fit);
    const struct node *row = &cluster->nodes[node];
    wide cpus = most_cpus(cluster), memory = most_gpu_memory(cluster);
    wide cpus_left = (wide)(row->cpus_free - asked_cpus(need, gpus));
    wide memory_left = (wide)(row->gpu_free - asked_gpu_memory(cluster, node, need, *chosen));
    sluice_add_term(terms, "cpus_milli_left", (int64_t)cpus_left);
    sluice_add_term(terms, "gpu_memory_mib_left", (int64_t)memory_left);
    wide whole = 2 * cpus * memory;
    return (int64_t)(100 * (whole - (cpus_left * memory + memory_left * cpus)) / whole);
}

static int64_t score_dot_product(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                                 uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    *chosen = sluice_pick(cluster, node, need, gpus, fit);
    const struct node *row = &cluster->nodes[node];
    wide cpus = most_cpus(cluster), memory = most_gpu_memory(cluster);
    wide cpus_product = (wide)row->cpus_free * (wide)asked_cpus(need, gpus);
    wide memory_product = (wide)row->gpu_free * (wide)asked_gpu_memory(cluster, node, need, *chosen);
    wide whole = 2 * cpus * cpus * memory * memory;
    wide product = cpus_product * memory * memory + memory_product * cpus * cpus;
    sluice_add_term(terms, "product_percent", (int64_t)(100 * product / whole));
    return (int64_t)(100 * (whole - product) / whole);
}

static int64_t score_gpu_packing(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                                 uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    enum { ALL_IDLE = 33, TAKES_IDLE = 50, TAKES_USED = 100 };
    (void)need;
    *chosen = sluice_pick_tightest(cluster, node, fit, gpus);
    if (!gpus)
        return 0;
    const struct shape *shape = sluice_shape_of(cluster, node);
    int idle = sluice_count(cluster->nodes[node].idle), taken_idle = sluice_count(*chosen & cluster->nodes[node].idle);
    sluice_add_term(terms, "idle_gpus", idle);
    sluice_add_term(terms, "idle_gpus_taken", taken_idle);
    if ((uint32_t)idle == shape->gpu_count)
        return idle > ALL_IDLE - idle ? idle : ALL_IDLE - idle;
    if (taken_idle)
        return TAKES_IDLE - taken_idle > ALL_IDLE ? TAKES_IDLE - taken_idle : ALL_IDLE;
    int64_t free_percent = 0;
    for (unsigned set = *chosen; set; set &= set - 1) {
        int gpu = __builtin_ctz(set);
        free_percent += (int64_t)100 * cluster->gpu_free[node].mib[gpu] / shape->memory.mib[gpu];
    }
    sluice_add_term(terms, "free_percent_of_taken", free_percent);
    int64_t score = TAKES_USED - free_percent / 10;
    return score > TAKES_IDLE ? score : TAKES_IDLE;
}

static int64_t score_gpu_clustering(const struct sluice_cluster *cluster, uint32_t node, const struct need *need,
                                    int gpus, uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    enum { ONLY_THIS_KIND = 75, THIS_KIND_TOO = 50, EMPTY = 25, USE = 25 };
    *chosen = sluice_pick(cluster, node, need, gpus, fit);
    if (!gpus)
        return 0;
    int kinds = 0;
    for (int i = 0; i < KINDS; i++)
        kinds += cluster->kinds[node][i] > 0;
    int64_t most = (int64_t)most_gpu_memory(cluster);
    int64_t use = USE * (most - cluster->nodes[node].gpu_free) / most;
    bool same = cluster->kinds[node][sluice_kind(gpus, need->share)] > 0;
    sluice_add_term(terms, "kinds", kinds);
    sluice_add_term(terms, "same_kind", same);
    sluice_add_term(terms, "use", use);
    if (same)
        return use + (kinds == 1 ? ONLY_THIS_KIND : THIS_KIND_TOO);
    return kinds ? use : use + EMPTY;
}

/* The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the result depends on every bit of the input. */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static int64_t score_random(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                            uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    (void)cluster;
    uint64_t draw = mix(mix(need->seed) + node);
    *chosen = 0;
    for (int count = 0; count < gpus; count++) {
        unsigned left = fit & ~(unsigned)*chosen;
        int skip = (int)(mix(draw + (uint64_t)count) % (uint64_t)__builtin_popcount(left));
        while (skip-- > 0)
            left &= left - 1;
        *chosen |= (uint16_t)(left & -left);
    }
    int64_t score = (int64_t)(draw >> 1);
    sluice_add_term(terms, "draw", score);
    return score;
}

const struct policy sluice_policies[SLUICE_POLICY_COUNT] = {
    [SLUICE_POLICY_FIRST_FIT] = {.name = "first-fit", .score = score_first_fit},
    [SLUICE_POLICY_ROUND_ROBIN] = {.name = "round-robin", .score = score_round_robin},
    [SLUICE_POLICY_LEAST_LOADED] = {.name = "least-loaded", .score = score_least_loaded},
    [SLUICE_POLICY_BEST_FIT] = {.name = "best-fit", .score = score_best_fit},
    [SLUICE_POLICY_DOT_PRODUCT] = {.name = "dot-product", .score = score_dot_product},
    [SLUICE_POLICY_GPU_PACKING] = {.name = "gpu-packing", .score = score_gpu_packing},
    [SLUICE_POLICY_GPU_CLUSTERING] = {.name = "gpu-clustering", .score = score_gpu_clustering},
    [SLUICE_POLICY_RANDOM] = {.name = "random", .score = score_random},
    [SLUICE_POLICY_FGD] = {.name = "fgd", .score = sluice_score_fgd},
    [SLUICE_POLICY_SLUICE] = {.name = "sluice", .score = sluice_score_sluice, .choose = sluice_choose_sluice},
};

const char *sluice_policy_name(enum sluice_policy policy)
{
    return (unsigned)policy < SLUICE_POLICY_COUNT ? sluice_policies[policy].name : NULL;
}

enum sluice_error sluice_policy_by_name(const char *name, enum sluice_policy *policy, struct sluice_error_text *text)
{
    for (int i = 0; i < SLUICE_POLICY_COUNT; i++) {
        if (strcmp(sluice_policies[i].name, name) == 0) {
            *policy = (enum sluice_policy)i;
            return SLUICE_OK;
        }
    }
    return sluice_fail(text, SLUICE_ERROR_UNKNOWN,
                       "placement policy \"%.40s\" is not known; use first-fit, round-robin, least-loaded, best-fit, "
                       "dot-product, gpu-packing, gpu-clustering, random, fgd or sluice",
                       name);
}
