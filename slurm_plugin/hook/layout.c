/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Whether the nodes of a start lie in the network as the job asks: whole segments, and one block or leaf switch as long
 * as it waits for one. Stock Slurm knows neither in all versions and topologies, and may have chosen the nodes.
 */
#include "hook/hook_internal.h"

#include <stdlib.h>

static int by_number(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

/* The leaf switches of a job's nodes, sorted, 0 where it is unknown: `count` of them. NULL: out of memory. */
static uint32_t *leaves_of(const job_record_t *job, uint32_t *count)
{
    bitstr_t *nodes = job->job_resrcs->node_bitmap;
    uint32_t *leaves = calloc((size_t)bit_set_count(nodes) + 1, sizeof(*leaves));
    *count = 0;
    for (uint32_t n = 0; leaves && n < (uint32_t)bit_size(nodes); n++) {
        struct sluice_node_view view;
        if (!bit_test(nodes, n))
            continue;
        if (!sluice_node_read(sluice_mirror_cluster(sluice_hook.mirror), n, &view, NULL))
            leaves[*count] = view.switch_id;
        ++*count;
    }
    if (leaves)
        qsort(leaves, *count, sizeof(*leaves), by_number);
    return leaves;
}

static bool in_segments(const uint32_t *leaves, uint32_t count, uint32_t segment)
{
    for (uint32_t first = 0, end; first < count; first = end) {
        for (end = first; end < count && leaves[end] == leaves[first]; end++)
            continue;
        if (leaves[first] == 0 || (end - first) % segment)
            return false;
    }
    return true;
}

/* Nodes whose place is unknown may be anywhere. */
static bool together(const uint32_t *leaves, uint32_t count)
{
    uint32_t first = 0;
    while (first < count && leaves[first] == 0)
        first++;
    return first == count || leaves[first] == leaves[count - 1];
}

/* Components of a heterogeneous job start together or not: none is refused. */
bool sluice_hook_asks_layout(const struct decision *decision)
{
    const job_record_t *job = decision->call->job;
    return decision->call->mode == SELECT_MODE_RUN_NOW && decision->level == SLUICE_LEVEL_PLACE && !job->het_job_id &&
           sluice_mirror_has_switches(sluice_hook.mirror) &&
           (sluice_job_segment(job) > 1 || sluice_job_waits_for_switch(job));
}

int sluice_hook_layout(struct decision *decision)
{
    job_record_t *job = decision->call->job;
    if (decision->rc || !job->job_resrcs || !sluice_hook_asks_layout(decision))
        return decision->rc;
    const uint32_t segment = sluice_job_segment(job);
    const bool waits = sluice_job_waits_for_switch(job);
    uint32_t count_of_nodes;
    uint32_t *leaves = leaves_of(job, &count_of_nodes);
    const bool kept = leaves && (segment < 2 || in_segments(leaves, count_of_nodes, segment)) &&
                      (!waits || together(leaves, count_of_nodes));
    free(leaves);
    if (kept)
        return decision->rc;
    count(sluice_hook.layout_refused);
    return decision->rc = refuse(job);
}

bool sluice_hook_segments_never(struct decision *decision)
{
    struct sluice_request *request = &decision->request.wanted;
    if (request->segment < 2 || sluice_hook_any_opaque(words_of(decision->call->nodes)))
        return false;
    sluice_hook_set_allowed(decision, false);
    request->allowed = sluice_hook.allowed;
    request->allowed_words = sluice_hook.words;
    struct sluice_placement placement = decision->placement;
    return sluice_place(sluice_mirror_cluster(sluice_hook.mirror), SLUICE_POLICY_FIRST_FIT, request, &placement,
                        NULL) == SLUICE_ERROR_NEVER;
}
