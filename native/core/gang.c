/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gangs: several nodes, all or nothing, on switches as low and as few as possible.
 *
 * One pass over the candidates counts, per switch, the nodes below it that fit. Then, for a fixed share per node:
 *   1. as many nodes as the request wants and some admissible switch has (SLUICE_PACK: as few as it accepts);
 *   2. of the switches with that many, those of the lowest level; of these, those that use the fewest of the switches
 *      just below; of these, the one with the fewest nodes that fit, so that large blocks stay whole; then the first;
 *   3. within it, the fullest switches below are taken whole, and the last one is the smallest that has the rest, in
 *      which the same rule goes on; in a leaf switch the policy's best nodes are taken.
 * 1 and 2 are exact. For GPUs in total, 3 takes the nodes that can give most, and as the last one that which has the
 * least more than the rest. In segments, each leaf switch counts with the nodes of whole segments only, so that all of
 * the above deals with whole segments.
 * Where switches one level below switch_level are limited (blocks.c), a switch of that level counts only if these hold
 * the request. Where nodes are spread, 2 takes the highest switch, of these the one with most leaf switches, and 3 takes
 * from each leaf switch as many segments as from the others.
 */
#include "cluster.h"
#include "sort.h"

#include <stdlib.h>

enum { TOP_HEIGHT = SLUICE_SWITCH_LEVELS }; /* of the whole cluster, above all real switches */

/* What the nodes below a switch offer. */
struct below {
    uint32_t nodes;
    uint32_t units;
    uint32_t leaves;          /* leaf switches that have some of them */
    uint32_t first, filled;   /* of a leaf: its candidates within `by_leaf`, all of them */
    uint32_t by_units[KINDS]; /* nodes that offer so many GPUs; only where GPUs are asked in total */
};

struct candidate {
    uint32_t node;
    struct offer offer;
};

/* A candidate that was scored. */
struct pick {
    struct choice choice;
    struct offer offer;
};

struct gang_scratch {
    struct below *below; /* per switch */
    uint32_t *touched;   /* switches with candidates */
    uint32_t *children;  /* room for the switches below one switch, for each level of the descent */
    struct candidate *candidates;
    uint32_t *by_leaf; /* candidates, leaf by leaf */
    struct pick *picks;
    struct lower *lower, *lower_scratch;
    uint32_t touched_count, candidate_count, pick_count;
};

enum sluice_error sluice_gang_new(struct sluice_cluster *cluster)
{
    size_t switches = (size_t)cluster->size.max_switches + 2, nodes = cluster->size.max_nodes;
    struct gang_scratch *gang = cluster->gang = calloc(1, sizeof *gang);
    if (!gang)
        return SLUICE_ERROR_NO_MEMORY;
    gang->below = calloc(switches, sizeof *gang->below);
    gang->touched = calloc(switches, sizeof *gang->touched);
    gang->children = calloc(switches, sizeof *gang->children);
    gang->candidates = calloc(nodes, sizeof *gang->candidates);
    gang->by_leaf = calloc(nodes, sizeof *gang->by_leaf);
    gang->picks = calloc(nodes, sizeof *gang->picks);
    gang->lower = calloc(switches, sizeof *gang->lower);
    gang->lower_scratch = calloc(switches, sizeof *gang->lower_scratch);
    bool made = gang->below && gang->touched && gang->children && gang->candidates && gang->by_leaf && gang->picks &&
                gang->lower && gang->lower_scratch;
    return made ? SLUICE_OK : SLUICE_ERROR_NO_MEMORY;
}

void sluice_gang_free(struct sluice_cluster *cluster)
{
    struct gang_scratch *gang = cluster->gang;
    if (!gang)
        return;
    free(gang->below);
    free(gang->touched);
    free(gang->children);
    free(gang->candidates);
    free(gang->by_leaf);
    free(gang->picks);
    free(gang->lower);
    free(gang->lower_scratch);
    free(gang);
    cluster->gang = NULL;
}

/* ---- heaps: qsort would allocate ---- */

typedef bool before_function(const void *context, const struct pick *a, const struct pick *b);

static bool best_first(const void *context, const struct pick *a, const struct pick *b)
{
    return sluice_choice_better(context, &a->choice, &b->choice);
}

static bool most_units_first(const void *context, const struct pick *a, const struct pick *b)
{
    return a->offer.units != b->offer.units ? a->offer.units > b->offer.units
                                            : sluice_choice_better(context, &a->choice, &b->choice);
}

static bool by_node(const void *context, const struct pick *a, const struct pick *b)
{
    (void)context;
    return a->choice.node < b->choice.node;
}

/* Restore the heap below `at`: no pick comes before its parent, the root is the last of all. */
static void sift_down(struct pick *picks, uint32_t count, uint32_t at, before_function *before, const void *context)
{
    struct pick moved = picks[at];
    for (uint32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && before(context, &picks[child], &picks[child + 1]))
            child++;
        if (!before(context, &moved, &picks[child]))
            break;
        picks[at] = picks[child];
    }
    picks[at] = moved;
}

static void make_heap(struct pick *picks, uint32_t count, before_function *before, const void *context)
{
    for (uint32_t at = count / 2; at-- > 0;)
        sift_down(picks, count, at, before, context);
}

static void sort(struct pick *picks, uint32_t count, before_function *before, const void *context)
{
    make_heap(picks, count, before, context);
    while (count > 1) {
        struct pick last = picks[0];
        picks[0] = picks[--count];
        picks[count] = last;
        sift_down(picks, count, 0, before, context);
    }
}

/* ---- counting ---- */

static void add_candidate(struct sluice_cluster *cluster, uint32_t node, struct offer offer)
{
    struct gang_scratch *gang = cluster->gang;
    gang->candidates[gang->candidate_count++] = (struct candidate){.node = node, .offer = offer};
    uint32_t leaf = cluster->nodes[node].leaf;
    struct below *below = &gang->below[leaf];
    if (!below->nodes++)
        gang->touched[gang->touched_count++] = leaf;
    below->units += offer.units;
    below->by_units[offer.units]++;
}

/* The nodes of a leaf switch that are in whole segments; where a node's place is unknown there are none. */
static uint32_t in_segments(const struct sluice_cluster *cluster, const struct need *need, uint32_t leaf)
{
    uint32_t nodes = cluster->gang->below[leaf].nodes;
    if (need->segment > 1 && leaf == cluster->unplaced)
        return 0;
    return nodes - nodes % need->segment;
}

/* Leaves' counts, added to all switches above them. */
static void add_up(struct sluice_cluster *cluster, const struct need *need)
{
    struct gang_scratch *gang = cluster->gang;
    uint32_t leaves = gang->touched_count, first = 0;
    for (uint32_t i = 0; i < leaves; i++) {
        struct below *leaf = &gang->below[gang->touched[i]];
        leaf->first = first;
        first += leaf->nodes;
        leaf->nodes = in_segments(cluster, need, gang->touched[i]);
        leaf->leaves = leaf->nodes > 0;
        for (uint32_t at = leaf->nodes ? gang->touched[i] : 0; at;) {
            at = cluster->switches[at].parent;
            struct below *above = &gang->below[at];
            if (!above->nodes)
                gang->touched[gang->touched_count++] = at;
            above->nodes += leaf->nodes;
            above->units += leaf->units;
            above->leaves++;
            for (int k = 1; k < KINDS; k++)
                above->by_units[k] += leaf->by_units[k];
        }
    }
    for (uint32_t i = 0; i < gang->candidate_count; i++) {
        struct below *leaf = &gang->below[cluster->nodes[gang->candidates[i].node].leaf];
        gang->by_leaf[leaf->first + leaf->filled++] = i;
    }
}

static void count_now(struct sluice_cluster *cluster, const struct need *need)
{
    const uint64_t *candidates = sluice_candidates(cluster, need);
    for (size_t word = 0; word < (cluster->node_count + 63) / 64; word++) {
        for (uint64_t set = sluice_candidate_word(need, candidates, word); set; set &= set - 1) {
            uint32_t node = (uint32_t)(word * 64) + (uint32_t)__builtin_ctzll(set);
            struct offer offer = sluice_offer_now(cluster, node, need);
            if (offer.units)
                add_candidate(cluster, node, offer);
        }
    }
    add_up(cluster, need);
}

static void count_idle(struct sluice_cluster *cluster, const struct need *need)
{
    for (uint32_t node = 0; node < cluster->node_count; node++) {
        if (!sluice_node_allowed(need, node))
            continue;
        struct offer offer = sluice_offer_idle(cluster, sluice_class_of(cluster, node), need);
        if (offer.units)
            add_candidate(cluster, node, offer);
    }
    add_up(cluster, need);
}

static void forget(struct gang_scratch *gang)
{
    for (uint32_t i = 0; i < gang->touched_count; i++)
        gang->below[gang->touched[i]] = (struct below){0};
    gang->touched_count = gang->candidate_count = gang->pick_count = 0;
}

/* ---- which switch ---- */

static int height_of(const struct sluice_cluster *cluster, uint32_t at)
{
    /* A node whose place is unknown may be anywhere. */
    return at == 0 || at == cluster->unplaced ? TOP_HEIGHT : cluster->switches[at].height;
}

static bool is_leaf(const struct sluice_cluster *cluster, uint32_t at)
{
    return at == cluster->unplaced || (at && !cluster->switches[at].first_child);
}

static bool admissible(const struct sluice_cluster *cluster, const struct need *need, uint32_t at)
{
    return at != cluster->unplaced &&
           (need->one_switch != SLUICE_REQUIRED || height_of(cluster, at) <= need->switch_level);
}

static uint32_t at_most(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* The fewest nodes that give `units` GPUs together, or NONE if all of them do not. */
static uint32_t fewest_nodes(const struct below *below, uint32_t units)
{
    uint32_t nodes = 0;
    for (uint32_t k = KINDS - 1; k > 0; k--) {
        uint32_t full = at_most(below->by_units[k], (units + k - 1) / k);
        nodes += full;
        if (full * k >= units)
            return nodes;
        units -= full * k;
    }
    return NONE;
}

/* Of the switches just below `at`, whose number is limited, those that the request fills: gang->lower, and how many. */
static uint32_t fill_lower(const struct sluice_cluster *cluster, const struct need *need, uint32_t at)
{
    const struct gang_scratch *gang = cluster->gang;
    uint32_t count = 0;
    for (uint32_t child = cluster->switches[at].first_child; child; child = cluster->switches[child].next_sibling)
        if (gang->below[child].nodes)
            gang->lower[count++] = (struct lower){
                .id = child,
                .nodes = gang->below[child].nodes,
                .whole = gang->below[child].leaves == cluster->switches[child].leaves,
            };
    return sluice_fill_lower(gang->lower, gang->lower_scratch, count, need->lower_most, need->nodes_min);
}

static bool is_limited(const struct sluice_cluster *cluster, const struct need *need, uint32_t at)
{
    return need->lower_most && height_of(cluster, at) == need->switch_level;
}

/* How many nodes the request would get below this switch; 0 if it does not fit there. */
static uint32_t nodes_below(const struct sluice_cluster *cluster, const struct need *need, uint32_t at)
{
    const struct below *below = &cluster->gang->below[at];
    uint32_t most = at_most(below->nodes, need->nodes_max), nodes;
    if (below->nodes < need->nodes_min || (is_limited(cluster, need, at) && !fill_lower(cluster, need, at)))
        return 0;
    if (!need->total)
        return need->layout == SLUICE_PACK ? need->nodes_min : most;
    nodes = fewest_nodes(below, (uint32_t)need->gpus);
    if (nodes > need->nodes_max)
        return 0;
    if (need->layout == SLUICE_SPREAD)
        return at_most(most, (uint32_t)need->gpus);
    return nodes > need->nodes_min ? nodes : need->nodes_min;
}

/* The switches just below `at` that have candidates, fullest first, lowest id among equals. */
static uint32_t children_of(const struct sluice_cluster *cluster, uint32_t at, uint32_t *children)
{
    const struct below *below = cluster->gang->below;
    uint32_t count = 0;
    for (uint32_t child = cluster->switches[at].first_child; child; child = cluster->switches[child].next_sibling)
        if (below[child].nodes)
            children[count++] = child;
    if (at == 0 && below[cluster->unplaced].nodes)
        children[count++] = cluster->unplaced;
    /* Shell sort, with Ciura's gaps: no allocation, and short lists are the rule. */
    static const uint32_t gaps[] = {9029, 4013, 1750, 701, 301, 132, 57, 23, 10, 4, 1};
    for (size_t g = 0; g < sizeof gaps / sizeof gaps[0]; g++) {
        for (uint32_t i = gaps[g]; i < count; i++) {
            uint32_t moved = children[i], to = i;
            for (; to >= gaps[g]; to -= gaps[g]) {
                uint32_t other = children[to - gaps[g]];
                if (below[other].nodes > below[moved].nodes ||
                    (below[other].nodes == below[moved].nodes && other < moved))
                    break;
                children[to] = other;
            }
            children[to] = moved;
        }
    }
    return count;
}

/* How many of the switches just below are needed for so many nodes. */
static uint32_t children_needed(const struct sluice_cluster *cluster, uint32_t at, uint32_t nodes)
{
    struct gang_scratch *gang = cluster->gang;
    uint32_t count = children_of(cluster, at, gang->children), needed = 0;
    for (uint32_t have = 0; needed < count && have < nodes; needed++)
        have += gang->below[gang->children[needed]].nodes;
    return needed;
}

struct site {
    uint32_t at;
    uint32_t nodes; /* 0: there is none */
};

/* Is switch a better than b for so many nodes each? Both are of one height. */
static bool better_site(const struct sluice_cluster *cluster, const struct need *need, struct site a, struct site b)
{
    const struct below *below_a = &cluster->gang->below[a.at], *below_b = &cluster->gang->below[b.at];
    if (a.nodes != b.nodes) /* only where GPUs are asked in total */
        return need->layout == SLUICE_SPREAD ? a.nodes > b.nodes : a.nodes < b.nodes;
    if (need->spread && below_a->leaves != below_b->leaves)
        return below_a->leaves > below_b->leaves;
    uint32_t needed_a = need->total ? 0 : children_needed(cluster, a.at, a.nodes);
    uint32_t needed_b = need->total ? 0 : children_needed(cluster, b.at, b.nodes);
    if (needed_a != needed_b)
        return needed_a < needed_b;
    if (below_a->units != below_b->units)
        return below_a->units < below_b->units;
    return a.at < b.at;
}

static struct site choose_site(const struct sluice_cluster *cluster, const struct need *need)
{
    const struct gang_scratch *gang = cluster->gang;
    uint32_t most = 0;
    for (uint32_t i = 0; i < gang->touched_count; i++) {
        uint32_t at = gang->touched[i];
        uint32_t nodes = admissible(cluster, need, at) ? nodes_below(cluster, need, at) : 0;
        if (nodes > most)
            most = nodes;
    }
    struct site best = {0};
    int best_height = 0;
    for (uint32_t i = 0; most && i < gang->touched_count; i++) {
        struct site site = {.at = gang->touched[i]};
        if (admissible(cluster, need, site.at))
            site.nodes = nodes_below(cluster, need, site.at);
        if (!site.nodes || (!need->total && site.nodes < most))
            continue;
        int height = height_of(cluster, site.at);
        bool better = need->spread ? height > best_height : height < best_height;
        if (!best.nodes || better || (height == best_height && better_site(cluster, need, site, best))) {
            best = site;
            best_height = height;
        }
    }
    return best;
}

/* ---- which nodes ---- */

static void score(const struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                  uint32_t node, struct offer offer, struct pick *pick)
{
    int gpus = need->total ? offer.units : need->gpus;
    pick->offer = offer;
    if (need->total && need->preferences)
        offer.fit = sluice_best_group(sluice_shape_of(cluster, node), need, gpus, offer.fit, &offer.preferred);
    pick->choice = sluice_score_node(cluster, policy, need, node, gpus, offer.fit, offer.preferred, NULL);
}

/* The policy's best `nodes` of a leaf switch. */
static void take_from_leaf(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                           uint32_t leaf, uint32_t nodes)
{
    struct gang_scratch *gang = cluster->gang;
    const uint32_t *members = &gang->by_leaf[gang->below[leaf].first];
    uint32_t count = gang->below[leaf].filled;
    struct pick *picks = &gang->picks[gang->pick_count];
    for (uint32_t i = 0; i < count; i++) {
        const struct candidate *candidate = &gang->candidates[members[i]];
        struct pick next;
        score(cluster, policy, need, candidate->node, candidate->offer, &next);
        if (i < nodes) {
            picks[i] = next;
            if (i + 1 == nodes && nodes < count)
                make_heap(picks, nodes, best_first, cluster);
        } else if (best_first(cluster, &next, &picks[0])) { /* better than the worst so far */
            picks[0] = next;
            sift_down(picks, nodes, 0, best_first, cluster);
        }
    }
    gang->pick_count += nodes;
}

/* `children` is the part of the scratch that no switch above uses. The depth is bounded by the levels of the tree. */
static void take_from(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need, uint32_t at,
                      uint32_t nodes, uint32_t *children)
{
    const struct below *below = cluster->gang->below;
    if (is_leaf(cluster, at)) {
        take_from_leaf(cluster, policy, need, at, nodes);
        return;
    }
    uint32_t count = children_of(cluster, at, children);
    for (uint32_t i = 0; nodes > 0; i++) {
        uint32_t child = i; /* the fullest, or as the last one the smallest that has the rest, first of its size */
        for (uint32_t next = i + 1; next < count && below[children[next]].nodes >= nodes; next++)
            if (below[children[next]].nodes < below[children[child]].nodes)
                child = next;
        uint32_t taken = at_most(nodes, below[children[child]].nodes);
        take_from(cluster, policy, need, children[child], taken, children + count);
        nodes -= taken;
    }
}

static bool is_below(const struct sluice_cluster *cluster, uint32_t leaf, uint32_t at)
{
    for (; leaf && leaf != at; leaf = cluster->switches[leaf].parent)
        continue;
    return leaf == at;
}

/* What fill_lower has chosen. */
static void take_lower(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                       uint32_t at)
{
    struct gang_scratch *gang = cluster->gang;
    const uint32_t count = fill_lower(cluster, need, at);
    for (uint32_t i = 0; i < count; i++)
        take_from(cluster, policy, need, gang->lower[i].id, gang->lower[i].taken, gang->children);
}

static int fullest_first(const void *a, const void *b)
{
    const struct lower *x = a, *y = b;
    if (x->nodes != y->nodes)
        return x->nodes > y->nodes ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* From each leaf switch as much as from the others, a segment at a time, those with the most candidates first. */
static void take_spread(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                        struct site site)
{
    struct gang_scratch *gang = cluster->gang;
    struct lower *leaves = gang->lower;
    uint32_t count = 0, left = site.nodes;
    for (uint32_t i = 0; i < gang->touched_count; i++) {
        const uint32_t at = gang->touched[i];
        if (is_leaf(cluster, at) && gang->below[at].nodes && is_below(cluster, at, site.at))
            leaves[count++] = (struct lower){.id = at, .nodes = gang->below[at].nodes};
    }
    sluice_sort(leaves, gang->lower_scratch, count, sizeof *leaves, fullest_first);
    while (left) {
        for (uint32_t i = 0; i < count && left && leaves[i].nodes > leaves[i].taken; i++) {
            leaves[i].taken += need->segment;
            left -= need->segment;
        }
    }
    for (uint32_t i = 0; i < count && leaves[i].taken; i++)
        take_from_leaf(cluster, policy, need, leaves[i].id, leaves[i].taken);
}

/* All of `picks` give about the same: as few more than others as it takes to reach `units`. */
static void share_evenly(struct pick *picks, uint32_t count, uint32_t units)
{
    uint32_t level = 0, sum = 0;
    while (sum < units) {
        level++;
        sum = 0;
        for (uint32_t i = 0; i < count; i++)
            sum += at_most(picks[i].offer.units, level);
    }
    for (uint32_t i = count; i-- > 0;) {
        picks[i].offer.units = (uint8_t)at_most(picks[i].offer.units, level);
        if (picks[i].offer.units == level && sum > units) {
            picks[i].offer.units--;
            sum--;
        }
    }
}

/* Each of `picks`, but for the last, gives all it has, as long as at least one is left for each later one; the last is
 * the one of all `candidates` left that has the least more than the rest. */
static void share_tightly(struct pick *picks, uint32_t count, uint32_t candidates, uint32_t units)
{
    for (uint32_t i = 0; i + 1 < count; i++) {
        picks[i].offer.units = (uint8_t)at_most(picks[i].offer.units, units - (count - 1 - i));
        units -= picks[i].offer.units;
    }
    uint32_t last = count - 1;
    for (uint32_t next = count; next < candidates && picks[next].offer.units >= units; next++)
        if (picks[next].offer.units < picks[last].offer.units)
            last = next;
    picks[count - 1] = picks[last];
    picks[count - 1].offer.units = (uint8_t)units;
}

/* GPUs in total: which nodes, and which GPUs of each. */
static void take_units(struct sluice_cluster *cluster, const struct policy *policy, const struct need *need,
                       struct site site)
{
    struct gang_scratch *gang = cluster->gang;
    uint32_t count = 0;
    for (uint32_t i = 0; i < gang->candidate_count; i++)
        if (is_below(cluster, cluster->nodes[gang->candidates[i].node].leaf, site.at))
            score(cluster, policy, need, gang->candidates[i].node, gang->candidates[i].offer, &gang->picks[count++]);
    sort(gang->picks, count, most_units_first, cluster);
    if (need->layout == SLUICE_SPREAD)
        share_evenly(gang->picks, site.nodes, (uint32_t)need->gpus);
    else
        share_tightly(gang->picks, site.nodes, count, (uint32_t)need->gpus);
    gang->pick_count = site.nodes;
    for (uint32_t i = 0; i < site.nodes; i++) /* again, as most nodes give fewer than they could */
        score(cluster, policy, need, gang->picks[i].choice.node, gang->picks[i].offer, &gang->picks[i]);
}

enum sluice_error sluice_gang_place(struct sluice_cluster *cluster, const struct policy *policy,
                                    const struct need *need, struct sluice_placement *placement)
{
    struct gang_scratch *gang = cluster->gang;
    count_now(cluster, need);
    struct site site = choose_site(cluster, need);
    if (!site.nodes) {
        forget(gang);
        return SLUICE_ERROR_NO_PLACE;
    }
    if (need->total)
        take_units(cluster, policy, need, site);
    else if (need->spread)
        take_spread(cluster, policy, need, site);
    else if (is_limited(cluster, need, site.at))
        take_lower(cluster, policy, need, site.at);
    else
        take_from(cluster, policy, need, site.at, site.nodes, gang->children);
    sort(gang->picks, gang->pick_count, by_node, NULL);
    placement->part_count = gang->pick_count;
    placement->score = 0;
    placement->nic_pairs = 0;
    for (uint32_t i = 0; i < gang->pick_count; i++) {
        const struct choice *choice = &gang->picks[i].choice;
        placement->parts[i] = sluice_part_of(need, choice->node, choice->gpus, choice->nics);
        placement->nic_pairs += choice->pairs;
        /* Scores wrap around rather than overflow; only RANDOM's are that large. */
        placement->score = (int64_t)((uint64_t)placement->score + (uint64_t)choice->score);
    }
    forget(gang);
    return SLUICE_OK;
}

bool sluice_gang_possible(struct sluice_cluster *cluster, const struct need *need)
{
    count_idle(cluster, need);
    bool found = choose_site(cluster, need).nodes > 0;
    forget(cluster->gang);
    return found;
}
