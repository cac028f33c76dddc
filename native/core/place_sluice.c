/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sluice policy: place where the usual requests lose the least.
 *
 * What a node is worth follows from the workload, a list of usual requests t with how often each comes:
 *
 *   w(t)  = share of t among the requests that ask GPUs, times all GPUs of the cluster over those of nodes that could
 *           take t: demand that fits few places makes these places expensive
 *   a GPU with l hundredths free is worth l * (the w of the requests for one GPU that fit into l)
 *   k idle GPUs together are worth, beyond that, for each request of several GPUs a little of what of it fits into k,
 *   times w
 *   where a node has too few CPUs per open GPU for a usual request for one GPU, its GPUs will not all be used: then the
 *   request makes a price of CPUs, and no longer counts in the worth of a GPU
 *
 * The loss is what these sums fall by, and the score is the loss in steps of STEP, negated. The coarse step matters:
 * many nodes are equally good, the first of them is taken, and so the others stay as they are. Derived from the idea of
 * FGD (place_fgd.c) that a free GPU counts only as far as the workload can use it, in a form that splits into terms of
 * few coarse numbers. This makes the search over buckets (score_index.h) possible and exact.
 */
#include "score_index.h"

#include <stdlib.h>
#include <string.h>

enum {
    /* A node's CPUs may be this many times scarcer than those of a request for one GPU before its GPUs count as
     * unusable: other jobs will use fewer. */
    SLACK_NUMERATOR = 8,
    SLACK_DENOMINATOR = 5,
    /* Idle GPUs that are split are seldom lost to requests for several: other nodes have as many, or will again. At
     * their full worth they would outweigh all else if such requests are many, and leave GPUs idle. */
    BLOCK_DIVISOR = 10,
    MANY = 64,            /* allowed nodes that are worth a search */
    CPU_PRICE_FACTOR = 2, /* a CPU that is short costs the GPUs it could have served, twice */
    /* 6.4 hundredths of a GPU. */
    STEP = (int)(((int64_t)64 << FRACTION_BITS) / 10),
};
/* Bounds that keep every sum within 64 bits. */
static const int64_t MAX_SCARCITY = 1 << 10, MAX_CPU_PRICE = (int64_t)1 << 32;

/* ---- prices ---- */

/* Could an idle node of this kind take it? For one GPU only the GPU is asked: CPUs have their own price. */
static bool could_take(const struct node_kind *kind, const struct need *need)
{
    return (int)kind->gpu_count >= need->gpus && (!need->models || (need->models >> kind->model & 1)) &&
           kind->capability >= need->capability && kind->memory >= need->gpu_memory_min &&
           kind->memory >= need->share && (need->gpus == 1 || kind->cpus >= need->cpus);
}

/* Add the usual request `need`, of weight w / 2^FRACTION_BITS, to the prices of a kind that could take it. */
static void add_usual(struct node_kind *kind, const struct need *need, int64_t w)
{
    int64_t levels = need->share ? sluice_levels_needed(need->share, kind->memory) : LEVELS;
    struct prices *prices = &kind->prices;
    if (need->gpus > 1) {
        int64_t block = w * levels * need->gpus / BLOCK_DIVISOR;
        for (int k = need->gpus; k <= SLUICE_MAX_GPUS; k++)
            prices->block[k] += block * (k / need->gpus);
        return;
    }
    int64_t cpu = need->cpus ? ((CPU_PRICE_FACTOR * w * levels) << CPU_BITS) / need->cpus : 0;
    for (int kappa = 0; kappa < KAPPAS; kappa++) {
        /* A node without open GPUs has free CPUs. */
        bool cpus_short = kappa != KAPPA_CLOSED && (int64_t)need->cpus * LEVELS * SLACK_DENOMINATOR >
                                                       levels * SLACK_NUMERATOR * sluice_kappa_floor(kappa);
        if (cpus_short)
            prices->cpu[kappa] = prices->cpu[kappa] + cpu < MAX_CPU_PRICE ? prices->cpu[kappa] + cpu : MAX_CPU_PRICE;
        else
            prices->worth[kappa][levels] += w; /* so far the weight that begins to fit here; see add_up */
    }
}

/* From the weights that begin to fit at each level to the worth of a GPU, and the bounds that follow. */
static void add_up(struct prices *prices, int kappa)
{
    int64_t *worth = prices->worth[kappa], weight = 0;
    int begins[LEVELS + 1], count = 0;
    for (int level = 0; level <= LEVELS; level++) {
        if (worth[level])
            begins[count++] = level;
        weight += worth[level];
        worth[level] = weight * level;
    }
    prices->least_loss[0][kappa] = worth[LEVELS];
    for (int levels = 1; levels <= LEVELS; levels++) {
        /* A GPU that is one level short of the request may still have room for it, to the MiB. From there on the loss
         * grows with the level, and falls only where the remainder becomes useful for another request. */
        int64_t least = worth[levels - 1];
        for (int i = 0; i < count && begins[i] + levels <= LEVELS; i++) {
            int64_t loss = worth[begins[i] + levels] - worth[begins[i]];
            least = loss < least ? loss : least;
        }
        prices->least_loss[levels][kappa] = least;
    }
}

/* Work out all prices from the workload and the kinds of nodes there are. */
static void set_prices(const struct sluice_cluster *cluster)
{
    struct score_index *index = cluster->index;
    int64_t weight_sum = 0, gpus = 0, cpus = 0;
    for (uint32_t i = 0; i < index->kind_count; i++) {
        struct node_kind *kind = index->kinds[i];
        memset(&kind->prices, 0, sizeof kind->prices);
        gpus += (int64_t)kind->nodes * kind->gpu_count;
        cpus += kind->gpu_count ? (int64_t)kind->nodes * kind->cpus : 0;
    }
    /* Nothing is known: as if every request were for one GPU, with its share of the CPUs of nodes with GPUs. */
    const struct need one_gpu = {.gpus = 1, .cpus = gpus ? (int32_t)(cpus / gpus) : 0};
    const uint32_t once = 1;
    const struct need *usual = index->workload_count ? index->workload : &one_gpu;
    const uint32_t *weights = index->workload_count ? index->weights : &once;
    uint32_t count = index->workload_count ? index->workload_count : 1;
    for (uint32_t t = 0; t < count; t++)
        weight_sum += weights[t];
    for (uint32_t t = 0; t < count; t++) {
        int64_t within_reach = 0;
        for (uint32_t i = KIND_OTHER + 1; i < index->kind_count; i++)
            if (could_take(index->kinds[i], &usual[t]))
                within_reach += (int64_t)index->kinds[i]->nodes * index->kinds[i]->gpu_count;
        if (within_reach == 0)
            continue;
        int64_t scarcity = gpus * 1024 / within_reach; /* in 1024ths */
        scarcity = scarcity < MAX_SCARCITY * 1024 ? scarcity : MAX_SCARCITY * 1024;
        int64_t w = (((int64_t)weights[t] << FRACTION_BITS) / weight_sum) * scarcity / 1024;
        for (uint32_t i = KIND_OTHER + 1; i < index->kind_count; i++)
            if (could_take(index->kinds[i], &usual[t]))
                add_usual(index->kinds[i], &usual[t], w);
    }
    /* A GPU among others of another kind is worth its free part, for any request. */
    for (int kappa = 0; kappa < KAPPAS; kappa++)
        index->kinds[KIND_OTHER]->prices.worth[kappa][0] = (int64_t)1 << FRACTION_BITS;
    for (uint32_t i = 0; i < index->kind_count; i++)
        for (int kappa = 0; kappa < KAPPAS; kappa++)
            add_up(&index->kinds[i]->prices, kappa);
    index->priced = true;
}

enum sluice_error sluice_index_set_workload(struct sluice_cluster *cluster, const struct need *shapes,
                                            const uint32_t *weights, uint32_t count)
{
    struct score_index *index = cluster->index;
    struct need *usual = malloc((count + 1) * sizeof *usual);
    uint32_t *copied = malloc((count + 1) * sizeof *copied);
    if (!usual || !copied) {
        free(usual);
        free(copied);
        return SLUICE_ERROR_NO_MEMORY;
    }
    uint32_t kept = 0; /* those that ask GPUs and come at all */
    for (uint32_t i = 0; i < count; i++) {
        if (shapes[i].gpus == 0 || weights[i] == 0)
            continue;
        usual[kept] = shapes[i];
        copied[kept++] = weights[i];
    }
    free(index->workload);
    free(index->weights);
    index->workload = usual;
    index->weights = copied;
    index->workload_count = kept;
    index->priced = false;
    return SLUICE_OK;
}

/* ---- losses ---- */

/* Of a share of `levels` on a GPU of `level`; one level short counts as just enough. */
static int64_t loss_of_share(const int64_t *worth, uint32_t level, uint32_t levels)
{
    return worth[level] - worth[level > levels ? level - levels : 0];
}

/* Of taking `taken` from `idle` idle GPUs, beyond their single worth. */
static int64_t loss_of_block(const int64_t *block, int idle, int taken)
{
    return block[idle] - block[idle - taken];
}

static int64_t loss_of_cpus(int64_t price, int32_t cpus)
{
    return ((int64_t)cpus * price) >> CPU_BITS;
}

/* For explanations, in thousandths of a GPU. */
static int64_t thousandths(int64_t loss)
{
    return (loss * (1000 / LEVELS)) >> FRACTION_BITS;
}

/* Pick the `gpus` of `fit` on which shares lose least, lowest first among equals. */
static uint16_t pick_shares(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                            uint16_t fit, int64_t *gpu_loss, int *idle_taken)
{
    const struct filing *filing = &cluster->index->filings[node];
    const struct prices *prices = &cluster->index->kinds[filing->kind]->prices;
    const int64_t *worth = prices->worth[filing->kappa], *block = prices->block;
    const struct shape *shape = sluice_shape_of(cluster, node);
    const struct node *row = &cluster->nodes[node];
    int idle = sluice_count(row->idle);
    uint16_t chosen = 0;
    *gpu_loss = 0;
    *idle_taken = 0;
    for (; gpus > 0; gpus--) {
        int best = -1;
        int64_t best_loss = 0, best_gpu_loss = 0;
        for (unsigned set = fit & ~(unsigned)chosen; set; set &= set - 1) {
            int gpu = __builtin_ctz(set);
            int32_t memory = shape->memory.mib[gpu];
            int64_t single = loss_of_share(worth, sluice_level(cluster->gpu_free[node].mib[gpu], memory),
                                           sluice_levels_needed(need->share, memory));
            int64_t loss = single + (row->idle >> gpu & 1 ? loss_of_block(block, idle - *idle_taken, 1) : 0);
            if (best < 0 || loss < best_loss) {
                best = gpu;
                best_loss = loss;
                best_gpu_loss = single;
            }
        }
        chosen |= (uint16_t)(1u << best);
        *gpu_loss += best_gpu_loss;
        *idle_taken += row->idle >> best & 1;
    }
    return chosen;
}

int64_t sluice_score_sluice(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                            uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    const struct score_index *index = cluster->index;
    if (!index->priced)
        set_prices(cluster);
    const struct filing *filing = &index->filings[node];
    const struct prices *prices = &index->kinds[filing->kind]->prices;
    int64_t gpu_loss = 0;
    int idle_taken = gpus;
    if (gpus && need->share) {
        *chosen = pick_shares(cluster, node, need, gpus, fit, &gpu_loss, &idle_taken);
    } else {
        *chosen = gpus ? sluice_pick(cluster, node, need, gpus, fit) : 0;
        gpu_loss = gpus * prices->worth[filing->kappa][LEVELS];
    }
    int idle = sluice_count(cluster->nodes[node].idle);
    int64_t block_loss = loss_of_block(prices->block, idle, idle_taken);
    int64_t cpu_loss = loss_of_cpus(prices->cpu[filing->kappa], need->cpus + gpus * need->cpus_per_gpu);
    sluice_add_term(terms, "gpu_worth_lost_permille", thousandths(gpu_loss));
    sluice_add_term(terms, "idle_block_lost_permille", thousandths(block_loss));
    sluice_add_term(terms, "cpus_priced_permille", thousandths(cpu_loss));
    return -((gpu_loss + block_loss + cpu_loss) / STEP);
}

/* ---- the search ---- */

/* The best so far. */
struct search {
    struct sluice_cluster *cluster;
    const struct need *need;
    int64_t steps; /* the loss of `node`, in steps */
    int64_t limit; /* losses from here on are worse */
    uint32_t node; /* NONE: none yet */
    uint32_t rank;
    struct reach reach;
};

static void found(struct search *search, uint32_t node, int64_t steps)
{
    search->steps = steps;
    search->limit = (steps + 1) * STEP;
    search->node = node;
    search->rank = search->cluster->nodes[node].rank;
}

/* A bucket all of whose nodes lose the same. */
static void search_bucket(struct search *search, const struct bucket *bucket, int64_t loss)
{
    if (loss >= search->limit)
        return;
    search->reach.before = loss < search->limit - STEP ? NONE : search->rank;
    uint32_t node = sluice_bucket_first(search->cluster, bucket, search->need, &search->reach);
    if (node != NONE)
        found(search, node, loss / STEP);
}

static void search_shares(struct search *search, const struct node_kind *kind, int kappa, uint32_t levels,
                          int64_t cpu_loss)
{
    const struct group *group = &kind->groups[kappa];
    const int64_t *worth = kind->prices.worth[kappa], *block = kind->prices.block;
    /* From the level where it may just fit upwards. */
    uint32_t lowest = levels - 1;
    for (uint32_t word = lowest / 64; word < SLOT_WORDS; word++) {
        uint64_t set = group->filled[word];
        if (word == lowest / 64)
            set &= ~(uint64_t)0 << (lowest % 64);
        for (; set; set &= set - 1) {
            uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(set);
            if (slot >= SLOT_NODE)
                return;
            int64_t loss = cpu_loss;
            if (slot >= SLOT_IDLE)
                loss += loss_of_share(worth, LEVELS, levels) + loss_of_block(block, (int)slot - SLOT_IDLE + 1, 1);
            else
                loss += loss_of_share(worth, slot, levels);
            search_bucket(search, &group->buckets[slot], loss);
        }
    }
}

static void search_group(struct search *search, const struct node_kind *kind, int kappa, uint32_t levels)
{
    const struct need *need = search->need;
    const struct group *group = &kind->groups[kappa];
    int64_t loss = loss_of_cpus(kind->prices.cpu[kappa], need->cpus);
    if (need->gpus == 0) {
        search_bucket(search, &group->buckets[SLOT_NODE], loss);
    } else if (need->share) {
        search_shares(search, kind, kappa, levels, loss);
    } else {
        loss += need->gpus * kind->prices.worth[kappa][LEVELS];
        for (int idle = need->gpus; idle <= (int)kind->gpu_count; idle++)
            search_bucket(search, &group->buckets[SLOT_IDLE + idle - 1],
                          loss + loss_of_block(kind->prices.block, idle, need->gpus));
    }
}

/* A lower bound on what the need loses in a group. `levels` are those of its share, 0 for whole GPUs. */
static int64_t bound(const struct node_kind *kind, int kappa, const struct need *need, uint32_t levels)
{
    return loss_of_cpus(kind->prices.cpu[kappa], need->cpus) + need->gpus * kind->prices.least_loss[levels][kappa];
}

/* The nodes that lie in no bucket. */
static void search_others(struct search *search, const uint64_t *candidates)
{
    struct sluice_cluster *cluster = search->cluster;
    const uint64_t *others = cluster->index->others;
    for (size_t word = 0; word < (cluster->node_count + 63) / 64; word++) {
        for (uint64_t set = others[word] & candidates[word]; set; set &= set - 1) {
            uint32_t node = (uint32_t)(word * 64) + (uint32_t)__builtin_ctzll(set);
            struct choice choice;
            if (!sluice_try_node(cluster, &sluice_policies[SLUICE_POLICY_SLUICE], search->need, search->need->gpus,
                                 node, &choice, NULL))
                continue;
            if (-choice.score < search->steps ||
                (-choice.score == search->steps && cluster->nodes[node].rank < search->rank))
                found(search, node, -choice.score);
        }
    }
}

static uint32_t count_allowed(const struct sluice_cluster *cluster, const struct need *need)
{
    const uint64_t *candidates = sluice_candidates(cluster, need);
    uint32_t count = 0;
    for (size_t word = 0; word < (cluster->node_count + 63) / 64; word++)
        count += (uint32_t)__builtin_popcountll(sluice_candidate_word(need, candidates, word));
    return count;
}

bool sluice_choose_sluice(struct sluice_cluster *cluster, const struct need *need, struct choice *choice)
{
    const struct policy *policy = &sluice_policies[SLUICE_POLICY_SLUICE];
    struct score_index *index = cluster->index;
    if (!index->priced)
        set_prices(cluster);
    struct search search = {
        .cluster = cluster, .need = need, .steps = INT64_MAX, .limit = INT64_MAX, .node = NONE, .rank = NONE};
    if (need->allowed) {
        /* The buckets do not know which nodes are allowed. A search that meets many others is given up when it has cost
         * about as much as scoring the allowed ones. */
        uint32_t allowed = need->allowed_count ? need->allowed_count : count_allowed(cluster, need);
        search.reach.patience = allowed < MANY ? 0 : allowed / 8;
        search.reach.from = cluster->ordered ? 0 : sluice_next_allowed(need, 0);
    }
    /* Shares of several GPUs would need buckets of sets of levels. */
    if ((need->share && need->gpus > 1) || (need->allowed && !search.reach.patience))
        return sluice_scan(cluster, policy, need, choice);

    /* The group of the lowest bound first; then only those that can still win. */
    const struct node_kind *first_kind = NULL;
    int first_kappa = 0;
    for (int pass = 0; pass < 2; pass++) {
        int64_t lowest = INT64_MAX;
        for (uint32_t i = KIND_OTHER + 1; i < index->kind_count; i++) {
            const struct node_kind *kind = index->kinds[i];
            if (!kind->kappas || (need->gpus && !could_take(kind, need)))
                continue;
            uint32_t levels = need->share ? sluice_levels_needed(need->share, kind->memory) : 0;
            for (uint32_t set = kind->kappas; set; set &= set - 1) {
                int kappa = __builtin_ctz(set);
                int64_t least = bound(kind, kappa, need, levels);
                if (pass == 0 && least < lowest) {
                    lowest = least;
                    first_kind = kind;
                    first_kappa = kappa;
                } else if (pass == 1 && least < search.limit && !(kind == first_kind && kappa == first_kappa)) {
                    search_group(&search, kind, kappa, levels);
                }
            }
        }
        if (pass == 0 && first_kind)
            search_group(&search, first_kind, first_kappa,
                         need->share ? sluice_levels_needed(need->share, first_kind->memory) : 0);
    }
    if (search.reach.met > search.reach.patience)
        return sluice_scan(cluster, policy, need, choice);
    if (index->kinds[KIND_OTHER]->nodes)
        search_others(&search, sluice_candidates(cluster, need));
    if (search.node == NONE)
        return false;
    return sluice_try_node(cluster, policy, need, need->gpus, search.node, choice, NULL);
}
