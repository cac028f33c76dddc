/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fragmentation gradient descent (Weng et al., "Beware of Fragmentation", USENIX ATC 2023): place where the
 * fragmentation of the node, as the usual requests see it, grows least.
 *
 * Fragmentation of a node = over the usual requests, weighted by how often they come: all its free GPU where it cannot
 * host the request, else the free parts of those GPUs that are too small for it. Free GPU is counted in thousandths of
 * a GPU. As published, the difference goes through a sigmoid to a whole percent, and this rounding matters: full
 * precision places worse.
 */
#include "cluster.h"

#include <stdlib.h>
#include <string.h>

enum {
    MEMO_COLUMNS_MAX = 1024,
    MEMO_BYTES = 64 << 20,
};

/* A node's score for one kind of request, as long as the node does not change. */
struct memo {
    uint32_t version;
    int16_t score;
    uint16_t chosen;
};

/* What the score depends on besides the node. */
struct memo_key {
    uint64_t models;
    int32_t gpus, share, compute, cpus, gpu_memory_min;
    uint32_t capability;
    uint32_t used; /* so that an empty column matches no key */
};

struct fgd_state {
    uint32_t count;
    int64_t weight_sum;
    struct need *shapes;
    uint32_t *weights;
    uint32_t columns, nodes; /* of the memo */
    struct memo_key *keys;
    struct memo *memo;
};

static void free_state(struct fgd_state *fgd)
{
    if (!fgd)
        return;
    free(fgd->shapes);
    free(fgd->weights);
    free(fgd->keys);
    free(fgd->memo);
    free(fgd);
}

void sluice_fgd_free(struct sluice_cluster *cluster)
{
    free_state(cluster->fgd);
    cluster->fgd = NULL;
}

enum sluice_error sluice_fgd_set_workload(struct sluice_cluster *cluster, const struct need *shapes,
                                          const uint32_t *weights, uint32_t count)
{
    struct fgd_state *fgd = calloc(1, sizeof *fgd);
    if (!fgd)
        return SLUICE_ERROR_NO_MEMORY;
    size_t column_bytes = cluster->size.max_nodes * sizeof *fgd->memo, columns = MEMO_BYTES / column_bytes;
    fgd->columns = (uint32_t)(columns > MEMO_COLUMNS_MAX ? MEMO_COLUMNS_MAX : columns);
    fgd->nodes = cluster->size.max_nodes;
    fgd->shapes = calloc((size_t)count + 1, sizeof *fgd->shapes);
    fgd->weights = calloc((size_t)count + 1, sizeof *fgd->weights);
    fgd->keys = calloc(fgd->columns, sizeof *fgd->keys);
    fgd->memo = calloc(fgd->columns, column_bytes);
    if (!fgd->shapes || !fgd->weights || !fgd->keys || !fgd->memo) {
        free_state(fgd);
        return SLUICE_ERROR_NO_MEMORY;
    }
    fgd->count = count;
    for (uint32_t i = 0; i < count; i++) {
        fgd->shapes[i] = shapes[i];
        fgd->weights[i] = weights[i];
        fgd->weight_sum += weights[i];
    }
    sluice_fgd_free(cluster);
    cluster->fgd = fgd;
    return SLUICE_OK;
}

/* Fragmentation times the sum of weights, of a node with these free CPUs and GPU memory. */
static int64_t fragmentation(const struct fgd_state *fgd, const struct shape *shape, uint16_t healthy,
                             int32_t cpus_free, const struct gpu_amounts *free_amounts)
{
    int32_t free_permille[SLUICE_MAX_GPUS] = {0};
    int64_t all = 0, sum = 0;
    unsigned idle = 0;
    for (unsigned set = healthy; set; set &= set - 1) {
        int gpu = __builtin_ctz(set);
        free_permille[gpu] = (int32_t)((int64_t)free_amounts->mib[gpu] * 1000 / shape->memory.mib[gpu]);
        idle |= (unsigned)(free_amounts->mib[gpu] == shape->memory.mib[gpu]) << gpu;
        all += free_permille[gpu];
    }
    for (uint32_t i = 0; i < fgd->count; i++) {
        const struct need *usual = &fgd->shapes[i];
        int64_t fragments = all;
        if (usual->gpus && usual->cpus <= cpus_free) {
            uint16_t fit = sluice_eligible(shape, usual) & healthy;
            fit = usual->share ? sluice_with_free(free_amounts, fit, usual->share) : fit & (uint16_t)idle;
            if (sluice_count(fit) >= usual->gpus)
                for (unsigned set = fit; set; set &= set - 1)
                    fragments -= free_permille[__builtin_ctz(set)];
        }
        sum += fragments * fgd->weights[i];
    }
    return sum;
}

/* The whole percents of sigmoid(less / 1000), where less = difference / weight_sum thousandths of a GPU: the number of
 * k in 1 .. 99 with less >= 1000 ln(k / (100 - k)). */
static int16_t sigmoid_percent(int64_t difference, int64_t weight_sum)
{
    enum { SCALE = 100000 };
    /* SCALE * 1000 ln(k / (100 - k)) for k = 51 .. 99; for k below 50 it is the negative of 100 - k's. */
    static const int64_t limit[49] = {
        4000533,   8004271,   12014431,  16034265,  20067070,  24116206,  28185115,  32277339,  36396538,  40546511,
        44731222,  48954823,  53221681,  57536414,  61903921,  66329422,  70818506,  75377180,  80011930,  84729786,
        89538405,  94446161,  99462258,  104596856, 109861229, 115267951, 120831121, 126566637, 132492541, 138629436,
        145001018, 151634749, 158562726, 165822808, 173460106, 181528997, 190095876, 199243016, 209074110, 219722458,
        231363493, 244234704, 258668934, 275153531, 294443898, 317805383, 347609869, 389182030, 459511985,
    };
    int low = 0, high = 99; /* the answer lies in low .. high */
    while (low < high) {
        int k = (low + high + 1) / 2;
        int64_t at = k > 50 ? limit[k - 51] : k < 50 ? -limit[49 - k] : 0;
        if (difference * SCALE >= at * weight_sum)
            low = k;
        else
            high = k - 1;
    }
    return (int16_t)low;
}

static struct memo evaluate(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                            uint16_t fit, struct terms *terms)
{
    const struct fgd_state *fgd = cluster->fgd;
    const struct node *row = &cluster->nodes[node];
    const struct shape *shape = sluice_shape_of(cluster, node);
    const struct gpu_amounts *now = &cluster->gpu_free[node];
    struct memo best = {.score = -1};
    int64_t before = fragmentation(fgd, shape, row->healthy, row->cpus_free, now), best_after = 0;
    int32_t cpus_after = row->cpus_free - need->cpus - gpus * need->cpus_per_gpu;
    /* A share of one GPU tries each GPU, once for those that look the same; else there is one set to try. */
    bool each = need->share && gpus == 1;
    uint16_t tried = 0;
    for (unsigned set = each ? fit : 1; set; set &= set - 1) {
        int gpu = __builtin_ctz(set);
        if (each) {
            bool same = false;
            for (unsigned others = shape->uniform ? tried : 0; others; others &= others - 1)
                same = same || now->mib[__builtin_ctz(others)] == now->mib[gpu];
            if (same)
                continue;
            tried |= (uint16_t)(1u << gpu);
        }
        uint16_t chosen = (uint16_t)(each ? 1u << gpu : sluice_pick(cluster, node, need, gpus, fit));
        struct gpu_amounts then = *now;
        for (unsigned taken = chosen; taken; taken &= taken - 1)
            then.mib[__builtin_ctz(taken)] -= need->share ? need->share : shape->memory.mib[__builtin_ctz(taken)];
        int64_t after = fragmentation(fgd, shape, row->healthy, cpus_after, &then);
        int16_t score = sigmoid_percent(before - after, fgd->weight_sum);
        if (score > best.score) {
            best.score = score;
            best.chosen = chosen;
            best_after = after;
        }
    }
    sluice_add_term(terms, "fragmentation_before_gpu_e-3", before / fgd->weight_sum);
    sluice_add_term(terms, "fragmentation_after_gpu_e-3", best_after / fgd->weight_sum);
    return best;
}

/* The memo's entry for this node and kind of request; a column that served another kind is emptied. */
static struct memo *recall(struct fgd_state *fgd, uint32_t node, const struct need *need, int gpus)
{
    struct memo_key key = {
        .models = need->models,
        .gpus = gpus,
        .share = need->share,
        .compute = need->compute,
        .cpus = need->cpus + gpus * need->cpus_per_gpu,
        .gpu_memory_min = need->gpu_memory_min,
        .capability = need->capability,
        .used = 1,
    };
    uint64_t hash = key.models;
    hash = (hash ^ (uint32_t)key.gpus) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ (uint32_t)key.share ^ ((uint64_t)key.compute << 32)) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ (uint32_t)key.cpus) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ (uint32_t)key.gpu_memory_min ^ ((uint64_t)key.capability << 32)) * 0x9e3779b97f4a7c15u;
    uint32_t column = (uint32_t)(hash >> 32) % fgd->columns;
    struct memo *entries = &fgd->memo[(size_t)column * fgd->nodes];
    if (memcmp(&fgd->keys[column], &key, sizeof key) != 0) {
        memset(entries, 0, fgd->nodes * sizeof *entries);
        fgd->keys[column] = key;
    }
    return &entries[node];
}

int64_t sluice_score_fgd(const struct sluice_cluster *cluster, uint32_t node, const struct need *need, int gpus,
                         uint16_t fit, uint16_t *chosen, struct terms *terms)
{
    if (!cluster->fgd || !cluster->fgd->weight_sum) { /* no usual requests, no fragmentation */
        *chosen = sluice_pick(cluster, node, need, gpus, fit);
        return 0;
    }
    struct memo score;
    if (need->preferences || terms) { /* preferences narrow `fit` in ways that the memo does not know */
        score = evaluate(cluster, node, need, gpus, fit, terms);
    } else {
        struct memo *known = recall(cluster->fgd, node, need, gpus);
        if (known->version != cluster->version[node]) {
            *known = evaluate(cluster, node, need, gpus, fit, NULL);
            known->version = cluster->version[node];
        }
        score = *known;
    }
    *chosen = score.chosen;
    return score.score;
}
