/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes compared by the pairs of GPUs and NICs that they have for a request.
 *
 * For each of the last few kinds of requests, bitmaps say which nodes have room for it, and for how many pairs. When a
 * node changes, its pairs are counted again: at once for kinds that were asked for lately, for others by their next
 * search. The policy searches the nodes with the most pairs alone, without a look at NICs, and only what it has chosen
 * is paired.
 */
#include "cluster.h"

#include <stdlib.h>
#include <string.h>

enum {
    ASKS = 16,                    /* kinds of requests that are remembered */
    LEVELS = SLUICE_MAX_NICS + 1, /* room for 0 .. SLUICE_MAX_NICS pairs */
    LATELY = 4 * ASKS,            /* searches with NICs */
};

/* What of a request decides how many pairs a node has for it. */
struct key {
    uint64_t models, nic_kinds;
    int32_t gpus, gpu_memory_min;
    uint32_t capability, nics, plane, unused;
};

struct ask {
    struct key key;
    uint64_t used;              /* when last; 0: never */
    uint64_t *levels[LEVELS];   /* bit n of levels[k]: node n has room, and at least k pairs */
    uint8_t *level;             /* per node: in how many of `levels` its bit is set */
    uint32_t nodes[LEVELS + 1]; /* how many are in so many levels */
    uint64_t *changed;          /* bit n: the above is not up to date */
    uint64_t *changed_words;    /* bit w: word w of `changed` is not 0 */
};

struct nic_index {
    uint64_t now;
    uint64_t *within; /* scratch: the nodes of one search */
    uint64_t *bitmaps;
    uint8_t *bytes;
    struct ask asks[ASKS];
};

enum sluice_error sluice_nic_index_new(struct sluice_cluster *cluster)
{
    struct nic_index *index = cluster->nic_index = calloc(1, sizeof *index);
    if (!index)
        return SLUICE_ERROR_NO_MEMORY;
    size_t words = cluster->words, summary = (words + 63) / 64;
    uint64_t *bitmaps = index->bitmaps = calloc(ASKS * (LEVELS + 1) * words + words + ASKS * summary, sizeof *bitmaps);
    uint8_t *bytes = index->bytes = calloc(ASKS * (size_t)cluster->size.max_nodes, sizeof *bytes);
    if (!bitmaps || !bytes) {
        sluice_nic_index_free(cluster);
        return SLUICE_ERROR_NO_MEMORY;
    }
    for (int i = 0; i < ASKS; i++) {
        struct ask *ask = &index->asks[i];
        for (int k = 0; k < LEVELS; k++, bitmaps += words)
            ask->levels[k] = bitmaps;
        ask->changed = bitmaps;
        bitmaps += words;
        ask->changed_words = bitmaps;
        bitmaps += summary;
        ask->level = bytes + (size_t)i * cluster->size.max_nodes;
    }
    index->within = bitmaps;
    return SLUICE_OK;
}

void sluice_nic_index_free(struct sluice_cluster *cluster)
{
    if (!cluster->nic_index)
        return;
    free(cluster->nic_index->bitmaps);
    free(cluster->nic_index->bytes);
    free(cluster->nic_index);
    cluster->nic_index = NULL;
}

static void note_changed(struct ask *ask, uint32_t node)
{
    const uint32_t word = node / 64;
    ask->changed[word] |= UINT64_C(1) << (node % 64);
    ask->changed_words[word / 64] |= UINT64_C(1) << (word % 64);
}

/* In how many levels the node is; which nodes are open is another bitmap's. */
static int level_of(const struct sluice_cluster *cluster, uint32_t node, const struct key *key)
{
    const struct shape *shape = sluice_shape_of(cluster, node);
    const struct need kind = {.models = key->models,
                              .capability = key->capability,
                              .gpu_memory_min = key->gpu_memory_min,
                              .any_gpu = !key->models && !key->capability && !key->gpu_memory_min};
    uint16_t gpus = cluster->nodes[node].idle & sluice_eligible(shape, &kind);
    uint32_t nics = cluster->nics_free[node] & sluice_nics_accepted(shape, key->nic_kinds, key->plane);
    if (sluice_count(gpus) < key->gpus || __builtin_popcount(nics) < (int)key->nics)
        return 0;
    return 1 + sluice_most_pairs(shape, gpus, key->gpus, nics, (int)key->nics);
}

bool sluice_nic_index_sound(const struct sluice_cluster *cluster)
{
    const struct nic_index *index = cluster->nic_index;
    for (int i = 0; index && i < ASKS && index->asks[i].used; i++) {
        const struct ask *ask = &index->asks[i];
        uint32_t nodes[LEVELS + 1] = {cluster->size.max_nodes - cluster->node_count};
        for (uint32_t node = 0; node < cluster->node_count; node++) {
            int level = sluice_bit(ask->changed, node) ? ask->level[node] : level_of(cluster, node, &ask->key);
            for (int k = 0; k < LEVELS; k++)
                if (sluice_bit(ask->levels[k], node) != (k < level))
                    return false;
            nodes[level]++;
        }
        if (memcmp(nodes, ask->nodes, sizeof nodes) != 0)
            return false;
    }
    return true;
}

static void count_again(const struct sluice_cluster *cluster, struct ask *ask, uint32_t node)
{
    int level = level_of(cluster, node, &ask->key);
    if (level == ask->level[node])
        return;
    ask->nodes[ask->level[node]]--;
    ask->nodes[level]++;
    sluice_set_level(ask->levels, node, level, &ask->level[node]);
}

/* Kinds that were asked for lately are kept up to date: what is known of the node has just been touched, while a search
 * that comes upon many changed nodes would wait for the memory of each. Of others the node is only marked. */
void sluice_nic_index_node_changed(struct sluice_cluster *cluster, uint32_t node)
{
    struct nic_index *index = cluster->nic_index;
    for (int i = 0; i < ASKS && index->asks[i].used; i++) {
        struct ask *ask = &index->asks[i];
        if (index->now - ask->used < LATELY)
            count_again(cluster, ask, node);
        else
            note_changed(ask, node);
    }
}

/* The nodes of one word of the bitmaps. */
static void bring_up_to_date(const struct sluice_cluster *cluster, struct ask *ask, uint32_t word)
{
    for (uint64_t set = ask->changed[word]; set; set &= set - 1)
        count_again(cluster, ask, word * 64 + (uint32_t)__builtin_ctzll(set));
    ask->changed[word] = 0;
}

/* The request's own bitmaps, up to date: those of an earlier one of its kind, or else of the kind that was not asked for
 * longest, begun again. */
static struct ask *ask_of(struct sluice_cluster *cluster, const struct need *need)
{
    struct nic_index *index = cluster->nic_index;
    struct key key;
    memset(&key, 0, sizeof key); /* keys are compared as bytes */
    key.models = need->models;
    key.nic_kinds = need->nic_kinds;
    key.gpus = need->gpus;
    key.gpu_memory_min = need->gpu_memory_min;
    key.capability = need->capability;
    key.nics = need->nics;
    key.plane = need->plane;
    struct ask *ask = &index->asks[0];
    for (int i = 0; i < ASKS; i++) {
        struct ask *next = &index->asks[i];
        if (next->used && memcmp(&next->key, &key, sizeof key) == 0) {
            ask = next;
            break;
        }
        if (next->used < ask->used)
            ask = next;
    }
    size_t words = (cluster->node_count + 63) / 64;
    if (!ask->used || memcmp(&ask->key, &key, sizeof key) != 0) {
        ask->key = key;
        if (!ask->used)
            ask->nodes[0] = cluster->size.max_nodes;
        for (uint32_t node = 0; node < cluster->node_count; node++)
            note_changed(ask, node);
    }
    ask->used = ++index->now;
    for (size_t at = 0; at < (words + 63) / 64; at++) {
        for (uint64_t left = ask->changed_words[at]; left; left &= left - 1)
            bring_up_to_date(cluster, ask, (uint32_t)(at * 64) + (uint32_t)__builtin_ctzll(left));
        ask->changed_words[at] = 0;
    }
    return ask;
}

/* The candidates with at least `pairs` pairs: index->within. How many there are, at most; 0: none. */
static uint32_t gather(struct sluice_cluster *cluster, const struct need *need, const struct ask *ask, int pairs)
{
    const uint64_t *candidates = sluice_candidates(cluster, need), *level = ask->levels[pairs];
    uint64_t *within = cluster->nic_index->within, any = 0;
    const size_t words = (cluster->node_count + 63) / 64;
    uint32_t most = 0;
    if (need->allowed) { /* they may be few, so that they are counted */
        for (size_t word = 0; word < words; word++) {
            within[word] = sluice_candidate_word(need, candidates, word) & level[word];
            most += (uint32_t)__builtin_popcountll(within[word]);
        }
        return most;
    }
    for (size_t word = 0; word < words; word++)
        any |= within[word] = candidates[word] & level[word];
    for (int more = pairs + 1; any && more <= LEVELS; more++)
        most += ask->nodes[more];
    return most;
}

/* NICs for a placement that was found without them; or others, where its GPUs stay (`keep`). */
static void pair_parts(const struct sluice_cluster *cluster, const struct need *need, bool keep,
                       struct sluice_placement *placement)
{
    placement->nic_pairs = 0;
    for (uint32_t i = 0; i < placement->part_count; i++) {
        struct sluice_part *part = &placement->parts[i];
        struct choice choice = {.node = part->node, .gpus = (uint16_t)part->gpus};
        uint16_t fit = keep ? choice.gpus : sluice_fitting_gpus(cluster, part->node, need);
        sluice_choose_pairs(cluster, need, fit, &choice);
        part->gpus = choice.gpus;
        part->nics = choice.nics;
        placement->nic_pairs += choice.pairs;
    }
}

/* Whole GPUs, as many on each node, and no preferences: the index knows each node's pairs. */
static bool find_indexed(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                         struct sluice_placement *placement)
{
    const struct ask *ask = ask_of(cluster, need);
    int most = !need->gpus ? 0 : need->gpus > (int)need->nics ? need->gpus : (int)need->nics, all = most;
    while (most && !ask->nodes[most + 1])
        most--;
    struct need without = *need, with = *need;
    with.spread_planes = false; /* of the nodes chosen alone */
    bool found = false, one = need->nodes_max == 1;
    without.nics = 0;
    without.plain = one && !need->exclusive && need->layout == SLUICE_LAYOUT_POLICY;
    if (one) { /* most often the best of all nodes has its pairs */
        if (!sluice_find(cluster, policy, &without, placement))
            return false;
        found = ask->level[placement->parts[0].node] > most;
    }
    with.allowed = without.allowed = cluster->nic_index->within;
    with.allowed_words = without.allowed_words = (cluster->node_count + 63) / 64;
    for (int pairs = most; !found && pairs >= 0; pairs--)
        /* A node of these has no more pairs, or would have been found before; of several, some may have more. */
        found = (with.allowed_count = without.allowed_count = gather(cluster, need, ask, pairs)) &&
                sluice_find(cluster, policy, one || pairs == all ? &without : &with, placement);
    if (found)
        pair_parts(cluster, need, false, placement);
    return found;
}

/* GPUs in total: are all of them in pairs, and all NICs? */
static bool all_in_pairs(const struct need *need, const struct sluice_placement *placement)
{
    uint32_t pairs = 0;
    for (uint32_t i = 0; i < placement->part_count; i++) {
        uint32_t gpus = (uint32_t)__builtin_popcount(placement->parts[i].gpus);
        uint32_t nics = need->nics + gpus * need->nics_per_gpu;
        pairs += gpus > nics ? gpus : nics;
    }
    return placement->nic_pairs == pairs;
}

/* NICs of need->plane, or of any. */
static bool find(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                 struct sluice_placement *placement)
{
    if (!need->total && !need->share && !need->preferences)
        return find_indexed(cluster, policy, need, placement);
    struct need any = *need, paired;
    any.spread_planes = false;
    paired = any;
    paired.all_paired = need->total && !need->share && !need->preferences;
    bool found =
        (paired.all_paired && sluice_find(cluster, policy, &paired, placement) && all_in_pairs(need, placement)) ||
        sluice_find(cluster, policy, &any, placement);
    if (found && need->spread_planes)
        pair_parts(cluster, need, true, placement);
    return found;
}

/* In one plane: the one with most pairs, then the best score. */
static bool find_in_one_plane(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                              struct sluice_placement *placement)
{
    struct need one = *need;
    uint32_t best = 0, best_pairs = 0;
    int64_t best_score = 0;
    for (one.plane = 1; one.plane <= cluster->planes; one.plane++) {
        if (!find(cluster, policy, &one, placement))
            continue;
        if (best && (placement->nic_pairs < best_pairs ||
                     (placement->nic_pairs == best_pairs && placement->score <= best_score)))
            continue;
        best = one.plane;
        best_pairs = placement->nic_pairs;
        best_score = placement->score;
    }
    one.plane = best;
    return best && find(cluster, policy, &one, placement);
}

bool sluice_find_near_nics(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                           struct sluice_placement *placement)
{
    if (!cluster->nic_index)
        return false;
    return (need->one_plane && find_in_one_plane(cluster, policy, need, placement)) ||
           find(cluster, policy, need, placement);
}
