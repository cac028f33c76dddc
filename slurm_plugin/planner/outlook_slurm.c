/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The outlook for those who submit with a deadline, made from the plan: see admission/outlook.h. */
#include "controller/planner_slurm.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "admission/outlook.h"
#include "controller/clock.h"
#include "controller/status.h"

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
} own;

/* Grow an array to `wanted` elements; false: no memory, and it is as it was. */
static bool grow(void *array, uint32_t *room, uint32_t wanted, size_t size)
{
    if (wanted <= *room)
        return true;
    uint32_t larger = wanted < 256 ? 256 : wanted + wanted / 2;
    void **pointer = array, *moved = realloc(*pointer, larger * size);
    if (!moved)
        return false;
    *pointer = moved;
    *room = larger;
    return true;
}

static bool add_spans(const struct sluice_part *parts, uint32_t count, int64_t start_s, int64_t end_s)
{
    if (!grow(&own.spans, &own.span_room, own.span_count + count, sizeof *own.spans))
        return false;
    for (uint32_t i = 0; i < count; i++)
        own.spans[own.span_count++] = (struct sluice_outlook_span){
            .node = parts[i].node,
            .gpus = parts[i].exclusive ? UINT32_MAX : parts[i].gpus,
            .start_s = start_s,
            .end_s = end_s,
        };
    return true;
}

/* What runs until its limit, and what the plan starts, now or later. */
static bool list_spans(const struct sluice_outlook_picture *picture)
{
    const struct sluice_cluster *cluster = sluice_mirror_cluster(picture->mirror);
    struct sluice_plan_say say;
    uint32_t count = 0;
    bool whole = true;
    own.span_count = 0;
    for (uint32_t i = 0; i < picture->running_count; i++)
        if (!sluice_allocation_read(cluster, picture->running[i].allocation, own.parts, SLUICE_MAX_NODES, &count, NULL))
            whole &= add_spans(own.parts, count, 0, picture->running[i].end_s);
    for (uint32_t i = 0; i < picture->job_count && sluice_plan_entry(picture->plan, i, NULL, NULL, &say); i++)
        if (say.state != SLUICE_PLAN_UNKNOWN)
            whole &= add_spans(say.parts, say.part_count, say.start_s, say.start_s + picture->jobs[i].limit_s);
    return whole;
}

static bool list_nodes(const struct sluice_outlook_picture *picture, uint32_t count)
{
    const struct sluice_cluster *cluster = sluice_mirror_cluster(picture->mirror);
    if (!grow(&own.nodes, &own.node_room, count, sizeof *own.nodes))
        return false;
    for (uint32_t node = 0; node < count; node++) {
        struct sluice_node_view view = {0};
        bool usable = picture->usable[node / 64] >> node % 64 & 1 && !sluice_node_read(cluster, node, &view, NULL);
        own.nodes[node] = (struct sluice_outlook_node){
            .gpus = usable ? view.gpus_healthy : 0,
            .type = sluice_mirror_node_type(picture->mirror, node),
        };
    }
    return true;
}

static bool list_partitions(const struct sluice_queue *queue)
{
    if (!grow(&own.partitions, &own.partition_room, queue->partition_count, sizeof *own.partitions))
        return false;
    for (uint32_t i = 0; i < queue->partition_count; i++)
        own.partitions[i] = (struct sluice_outlook_partition){
            .name = sluice_queue_name(queue, queue->partitions[i].name),
            .nodes = queue->partitions[i].nodes,
            .usual = queue->partitions[i].usual,
        };
    return true;
}

uint64_t sluice_outlook_follow(const struct sluice_outlook_picture *picture)
{
    uint64_t from = sluice_now_us();
    uint32_t nodes = sluice_mirror_nodes(picture->mirror);
    if ((int64_t)(from / 1000000) < own.due_s || nodes > picture->queue->node_count ||
        picture->node_words != picture->queue->node_words)
        return 0;
    if (!own.parts)
        own.parts = calloc(SLUICE_MAX_NODES, sizeof *own.parts);
    if (!own.parts || !list_nodes(picture, nodes) || !list_partitions(picture->queue) || !list_spans(picture))
        return 0;
    struct sluice_outlook_parts parts = {
        .now_s = picture->queue->taken_s,
        .nodes = own.nodes,
        .node_count = nodes,
        .spans = own.spans,
        .span_count = own.span_count,
        .partitions = own.partitions,
        .partition_count = picture->queue->partition_count,
    };
    sluice_outlook_publish(sluice_outlook_new(&parts), parts.now_s + picture->valid_s);
    uint64_t until = sluice_now_us(), took = until - from;
    int64_t rest_s = (int64_t)(SHARE * took / 1000000);
    own.due_s = (int64_t)(until / 1000000) + (rest_s > EVERY_S ? rest_s : EVERY_S);
    if (atomic_load(sluice_status_counter("plan.outlook_us_max")) < took)
        atomic_store(sluice_status_counter("plan.outlook_us_max"), took);
    return took;
}

void sluice_outlook_forget(void)
{
    sluice_outlook_publish(NULL, 0);
    free(own.spans);
    free(own.nodes);
    free(own.partitions);
    free(own.parts);
    memset(&own, 0, sizeof own);
}
