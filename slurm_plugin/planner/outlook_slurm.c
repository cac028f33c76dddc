/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The outlook for submissions with a deadline, made from the plan: see admission/outlook.h. */
#include "planner/planner_internal_slurm.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "admission/admission.h"
#include "runtime/runtime.h"

enum {
    EVERY_S = 5, /* between two outlooks ... */
    SHARE = 50,  /* ... which take one part in so many of the time */
};

/* The planner's thread's own; kept from one outlook to the next. */
static struct {
    struct sluice_outlook_span *spans;
    uint32_t span_count, span_room;
    struct sluice_outlook_node *nodes;
    uint32_t node_room;
    struct sluice_outlook_partition *partitions;
    uint32_t partition_room;
    struct sluice_part *parts; /* SLUICE_MAX_NODES of them */
    int64_t due_s;             /* by the monotonic clock */
} outlook;

static bool add_spans(const struct sluice_part *parts, uint32_t count, int64_t start_s, int64_t end_s)
{
    if (!sluice_grow_array(&outlook.spans, &outlook.span_room, outlook.span_count + count, sizeof *outlook.spans))
        return false;
    for (uint32_t i = 0; i < count; i++)
        outlook.spans[outlook.span_count++] = (struct sluice_outlook_span){
            .node = parts[i].node,
            .gpus = parts[i].exclusive ? UINT32_MAX : parts[i].gpus,
            .start_s = start_s,
            .end_s = end_s,
        };
    return true;
}

/* What runs until its limit, and what the plan starts, now or later. */
static bool list_spans(const struct sluice_outlook_basis *basis)
{
    const struct sluice_picture *picture = basis->picture;
    const struct sluice_cluster *cluster = sluice_mirror_cluster(picture->mirror);
    struct sluice_plan_answer answer;
    uint32_t count = 0;
    bool whole = true;
    outlook.span_count = 0;
    for (uint32_t i = 0; i < picture->running_count; i++)
        if (!sluice_allocation_read(cluster, picture->running[i].allocation, outlook.parts, SLUICE_MAX_NODES, &count,
                                    NULL))
            whole &= add_spans(outlook.parts, count, 0, picture->running[i].end_s);
    for (uint32_t i = 0; i < basis->job_count && sluice_plan_entry(basis->plan, i, NULL, NULL, &answer); i++)
        if (answer.state != SLUICE_PLAN_UNKNOWN)
            whole &=
                add_spans(answer.parts, answer.part_count, answer.start_s, answer.start_s + basis->jobs[i].limit_s);
    return whole;
}

static bool list_nodes(const struct sluice_picture *picture, uint32_t count)
{
    const struct sluice_cluster *cluster = sluice_mirror_cluster(picture->mirror);
    if (!sluice_grow_array(&outlook.nodes, &outlook.node_room, count, sizeof *outlook.nodes))
        return false;
    for (uint32_t node = 0; node < count; node++) {
        struct sluice_node_view view = {0};
        bool usable = picture->usable[node / 64] >> node % 64 & 1 && !sluice_node_read(cluster, node, &view, NULL);
        outlook.nodes[node] = (struct sluice_outlook_node){
            .gpus = usable ? view.gpus_healthy : 0,
            .type = sluice_mirror_node_type(picture->mirror, node),
        };
    }
    return true;
}

static bool list_partitions(const struct sluice_queue *queue)
{
    if (!sluice_grow_array(&outlook.partitions, &outlook.partition_room, queue->partition_count,
                           sizeof *outlook.partitions))
        return false;
    for (uint32_t i = 0; i < queue->partition_count; i++)
        outlook.partitions[i] = (struct sluice_outlook_partition){
            .name = sluice_queue_name(queue, queue->partitions[i].name),
            .nodes = queue->partitions[i].nodes,
            .usual = queue->partitions[i].usual,
        };
    return true;
}

uint64_t sluice_outlook_follow(const struct sluice_outlook_basis *basis)
{
    const struct sluice_picture *picture = basis->picture;
    uint64_t from = sluice_now_us();
    uint32_t nodes = sluice_mirror_nodes(picture->mirror);
    if ((int64_t)(from / 1000000) < outlook.due_s || nodes > picture->queue->node_count ||
        picture->node_words != picture->queue->node_words)
        return 0;
    if (!outlook.parts)
        outlook.parts = calloc(SLUICE_MAX_NODES, sizeof *outlook.parts);
    if (!outlook.parts || !list_nodes(picture, nodes) || !list_partitions(picture->queue) || !list_spans(basis))
        return 0;
    struct sluice_outlook_parts parts = {
        .now_s = picture->queue->taken_s,
        .nodes = outlook.nodes,
        .node_count = nodes,
        .spans = outlook.spans,
        .span_count = outlook.span_count,
        .partitions = outlook.partitions,
        .partition_count = picture->queue->partition_count,
    };
    sluice_outlook_publish(sluice_outlook_new(&parts), parts.now_s + basis->valid_s);
    uint64_t until = sluice_now_us(), took = until - from;
    int64_t rest_s = (int64_t)(SHARE * took / 1000000);
    outlook.due_s = (int64_t)(until / 1000000) + (rest_s > EVERY_S ? rest_s : EVERY_S);
    if (atomic_load(sluice_status_counter("plan.outlook_us_max")) < took)
        atomic_store(sluice_status_counter("plan.outlook_us_max"), took);
    return took;
}

void sluice_outlook_forget(void)
{
    sluice_outlook_publish(NULL, 0);
    free(outlook.spans);
    free(outlook.nodes);
    free(outlook.partitions);
    free(outlook.parts);
    memset(&outlook, 0, sizeof outlook);
}
