/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blocks of nodes as Slurm's topology/block has them: their levels, what it asks of a job's nodes, and how a job fills
 * them. The rules are in sluice/core.h.
 */
#include "cluster.h"
#include "sort.h"

#include <inttypes.h>

enum sluice_error sluice_blocks_make(const uint32_t *block_sizes, uint32_t size_count, uint32_t base_blocks,
                                     struct sluice_blocks *blocks, struct sluice_error_text *text)
{
    if (!size_count || !block_sizes[0] || !base_blocks)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "blocks: no base block, or one of 0 nodes");
    *blocks = (struct sluice_blocks){
        .base_nodes = block_sizes[0], .base_blocks = base_blocks, .levels = 1, .configured = 1, .size = {[0] = 1}};
    for (uint32_t last = 1; last < base_blocks; last = blocks->size[blocks->levels - 1]) {
        uint32_t next = 0; /* the smallest size above the last one */
        for (uint32_t i = 0; i < size_count; i++) {
            const uint32_t size = block_sizes[i] / blocks->base_nodes;
            if (!size || block_sizes[i] % blocks->base_nodes || (size & (size - 1)))
                return sluice_fail(text, SLUICE_ERROR_INVALID,
                                   "blocks: %" PRIu32 " nodes: must be %" PRIu32 " times a power of two",
                                   block_sizes[i], blocks->base_nodes);
            if (size > last && (!next || size < next))
                next = size;
        }
        if (blocks->levels == SLUICE_SWITCH_LEVELS)
            return sluice_fail(text, SLUICE_ERROR_CAPACITY, "blocks: more than %d levels", SLUICE_SWITCH_LEVELS);
        blocks->configured += next != 0;
        blocks->size[blocks->levels++] = next ? next : base_blocks;
    }
    return SLUICE_OK;
}

void sluice_blocks_ask(const struct sluice_blocks *blocks, uint32_t nodes, struct sluice_request *request)
{
    const uint32_t base = (nodes + blocks->base_nodes - 1) / blocks->base_nodes;
    uint32_t level = 0;
    while (level + 1 < blocks->levels && blocks->size[level] < base)
        level++;
    request->one_switch = SLUICE_REQUIRED;
    request->switch_level = level;
    request->lower_switches = 0;
    if (!level || (blocks->size[level] < base && level < blocks->configured))
        return; /* of the latter it knows no lower ones: base blocks have more nodes than it counts */
    const uint64_t below = (uint64_t)blocks->size[level - 1] * blocks->base_nodes;
    const uint64_t most = (nodes + below - 1) / below;
    if (blocks->size[level - 1] * most != blocks->size[level])
        request->lower_switches = (int64_t)most;
}

/* ---- filling ---- */

static int whole_and_full_first(const void *a, const void *b)
{
    const struct lower *x = a, *y = b;
    if (x->whole != y->whole)
        return x->whole ? -1 : 1;
    if (x->nodes != y->nodes)
        return x->nodes > y->nodes ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Of lower[first .. end), fullest first: the one that has the least that is enough for the `rest`, of these the first;
 * NONE if there is none. O(1) then. */
static uint32_t tightest(const struct lower *lower, uint32_t first, uint32_t end, uint32_t rest)
{
    uint32_t best = NONE;
    for (uint32_t i = first; i < end && lower[i].nodes >= rest; i++)
        if (best == NONE || lower[i].nodes < lower[best].nodes)
            best = i;
    return best;
}

/* After `full` of them that are taken whole: the last one. The first `wholes` have nodes in each base block. */
static uint32_t last_of(const struct lower *lower, uint32_t count, uint32_t wholes, uint32_t full, uint32_t rest)
{
    const uint32_t whole = tightest(lower, full, wholes, rest);
    const bool would_stop = full && rest >= lower[full - 1].nodes; /* at one that is not whole */
    const uint32_t other = would_stop ? NONE : tightest(lower, full > wholes ? full : wholes, count, rest);
    if (whole == NONE || other == NONE)
        return whole == NONE ? other : whole;
    if (lower[whole].nodes != lower[other].nodes)
        return lower[whole].nodes < lower[other].nodes ? whole : other;
    return lower[whole].id < lower[other].id ? whole : other;
}

uint32_t sluice_fill_lower(struct lower *lower, struct lower *scratch, uint32_t count, uint32_t most, uint32_t nodes)
{
    uint32_t wholes = 0;
    sluice_sort(lower, scratch, count, sizeof *lower, whole_and_full_first);
    while (wholes < count && lower[wholes].whole)
        wholes++;
    for (uint32_t full = 0; full < most && full < count; full++) {
        const uint32_t last = last_of(lower, count, wholes, full, nodes);
        if (last != NONE) {
            const struct lower found = lower[last];
            lower[last] = lower[full];
            lower[full] = found;
            lower[full].taken = nodes;
            return full + 1;
        }
        if (!lower[full].whole)
            return 0;
        nodes -= lower[full].taken = lower[full].nodes;
    }
    return 0;
}
