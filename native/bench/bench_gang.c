/* SPDX-License-Identifier: Apache-2.0 */
/* Gangs on a cluster in use: the time to place, commit and release one, and how far it is spread. */
#include "bench.h"

#include <stdlib.h>
#include <sys/resource.h>

enum { MOVES = 64 }; /* nodes that may change between two gangs */

/* SplitMix64 (Steele, Lea, Flood 2014). */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Everything that one run needs. */
struct gangs {
    struct sluice_cluster *cluster;
    uint32_t nodes;
    uint32_t busy_permille;
    uint64_t random;
    uint64_t *small;                   /* per node: the small job that keeps it in use, or 0 */
    uint32_t *marks;                   /* per switch: the last gang that used it */
    struct sluice_part *parts;         /* of the gang */
    uint64_t *allocations;             /* of the gang: one, or one for each node */
    struct sluice_placement placement; /* its parts are `parts` */
};

/* Let a random node become busy, with 1 MiB of its first GPU, or idle. */
static enum sluice_error move_one(struct gangs *gangs, struct sluice_error_text *text)
{
    uint32_t node = (uint32_t)(next_random(&gangs->random) % gangs->nodes);
    bool busy = next_random(&gangs->random) % 1000 < gangs->busy_permille;
    enum sluice_error error = SLUICE_OK;
    struct sluice_node_view view;
    if (busy == (gangs->small[node] != 0) || (error = sluice_node_read(gangs->cluster, node, &view, text)))
        return error;
    if (!busy) {
        error = sluice_release(gangs->cluster, gangs->small[node], text);
        gangs->small[node] = 0;
    } else if (view.gpu_count) {
        struct sluice_part part = {.node = node, .gpus = 1, .gpu_memory_mib = 1};
        struct sluice_placement one = {.parts = &part, .part_count = 1};
        error = sluice_commit(gangs->cluster, &one, &gangs->small[node], text);
    }
    return error;
}

/* How many leaf switches the parts use. */
static enum sluice_error count_leaves(struct gangs *gangs, uint32_t parts, uint32_t mark, uint32_t *leaves,
                                      struct sluice_error_text *text)
{
    *leaves = 0;
    for (uint32_t i = 0; i < parts; i++) {
        struct sluice_node_view view;
        enum sluice_error error = sluice_node_read(gangs->cluster, gangs->parts[i].node, &view, text);
        if (error)
            return error;
        *leaves += gangs->marks[view.switch_id] != mark;
        gangs->marks[view.switch_id] = mark;
    }
    return SLUICE_OK;
}

/* The nodes of the gang one after another, each as a job of its own; all are given back when one finds no place. */
static enum sluice_error start_node_by_node(struct gangs *gangs, enum sluice_policy policy,
                                            const struct sluice_request *gang, uint32_t *started)
{
    struct sluice_request one = *gang;
    one.nodes_min = one.nodes_max = 1;
    enum sluice_error error = SLUICE_OK;
    for (*started = 0; *started < (uint32_t)gang->nodes_min && !error; *started += !error) {
        struct sluice_placement placement = {.parts = &gangs->parts[*started], .part_capacity = 1};
        error = sluice_start(gangs->cluster, policy, &one, &placement, &gangs->allocations[*started], NULL);
    }
    return error;
}

static enum sluice_error release_all(struct gangs *gangs, uint32_t started, struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    for (uint32_t i = 0; i < started && !error; i++)
        error = sluice_release(gangs->cluster, gangs->allocations[i], text);
    return error;
}

/* How often the system has taken the processor away from this thread. */
static long interruptions(void)
{
    struct rusage usage = {0};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
}

static enum sluice_error run(struct gangs *gangs, enum sluice_policy policy, const struct sluice_request *gang,
                             bool node_by_node, uint32_t decisions, struct sluice_bench_gang_result *result,
                             struct sluice_error_text *text)
{
    enum sluice_error error = SLUICE_OK;
    for (uint32_t i = 0; i < 4 * gangs->nodes && !error; i++)
        error = move_one(gangs, text);
    for (uint32_t i = 0; i < decisions && !error; i++) {
        for (int move = 0; move < MOVES && !error; move++)
            error = move_one(gangs, text);
        if (error)
            break;
        uint32_t started = 1;
        long interrupted = interruptions();
        uint64_t before = bench_now_ns();
        enum sluice_error answer =
            node_by_node ? start_node_by_node(gangs, policy, gang, &started)
                         : sluice_start(gangs->cluster, policy, gang, &gangs->placement, gangs->allocations, NULL);
        uint64_t placed = bench_now_ns();
        interrupted = interruptions() - interrupted;
        if (answer == SLUICE_ERROR_NO_PLACE) {
            result->refused++;
            error = node_by_node ? release_all(gangs, started, text) : SLUICE_OK;
            continue;
        }
        if (answer)
            return answer;
        uint32_t parts = node_by_node ? started : gangs->placement.part_count, leaves;
        if ((error = count_leaves(gangs, parts, i + 1, &leaves, text)))
            break;
        uint64_t leaving = bench_now_ns();
        error = release_all(gangs, started, text);
        uint64_t left = bench_now_ns();
        result->start_ns[result->started] = (uint32_t)(placed - before);
        result->release_ns[result->started] = (uint32_t)(left - leaving);
        result->interrupted[result->started] = interrupted > 0;
        result->leaves[result->started++] = leaves;
    }
    return error ? error : sluice_cluster_check(gangs->cluster, text);
}

enum sluice_error sluice_bench_gang(struct sluice_cluster *cluster, enum sluice_policy policy,
                                    const struct sluice_request *gang, bool node_by_node, uint32_t busy_permille,
                                    uint32_t decisions, uint64_t seed, struct sluice_bench_gang_result *result,
                                    struct sluice_error_text *text)
{
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(cluster, &totals);
    size_t parts = (size_t)(gang->nodes_min > gang->nodes_max ? gang->nodes_min : gang->nodes_max);
    struct gangs gangs = {.cluster = cluster, .nodes = totals.nodes, .busy_permille = busy_permille, .random = seed};
    gangs.small = calloc(totals.nodes, sizeof *gangs.small);
    gangs.marks = calloc(SLUICE_MAX_SWITCHES + 1, sizeof *gangs.marks);
    gangs.parts = calloc(parts, sizeof *gangs.parts);
    gangs.allocations = calloc(parts, sizeof *gangs.allocations);
    gangs.placement = (struct sluice_placement){.parts = gangs.parts, .part_capacity = (uint32_t)parts};
    enum sluice_error error = SLUICE_ERROR_NO_MEMORY;
    if (gangs.small && gangs.marks && gangs.parts && gangs.allocations)
        error = run(&gangs, policy, gang, node_by_node, decisions, result, text);
    free(gangs.small);
    free(gangs.marks);
    free(gangs.parts);
    free(gangs.allocations);
    return error;
}
