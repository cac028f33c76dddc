/* SPDX-License-Identifier: Apache-2.0 */
/* Conservative backfill as the core's, but with no memory of starts: every node is asked again for every job. */
#include "bench.h"
#include "timeline.h"

#include <stdlib.h>

struct scan {
    struct timelines timelines;
    const struct sluice_cluster *cluster;
    uint32_t *node_at;
    int32_t *starts; /* by rank */
};

/* The first time at which `nodes` nodes can start together; each one's first start from then on is in scan->starts. */
static int32_t first_start(struct scan *scan, const struct need *need, int32_t duration)
{
    for (int32_t time = 0;;) {
        uint32_t ready = 0;
        int32_t next = TIMELINE_NEVER;
        for (uint32_t i = 0; i < scan->cluster->node_count; i++) {
            scan->starts[i] = timelines_earliest(&scan->timelines, scan->node_at[i], need, duration, time);
            ready += scan->starts[i] == time;
            next = scan->starts[i] > time && scan->starts[i] < next ? scan->starts[i] : next;
        }
        if (ready >= need->nodes_min)
            return time;
        if (next == TIMELINE_NEVER)
            return next;
        time = next;
    }
}

/* Of one node: the first start of each is enough. */
static int32_t first_start_of_one(struct scan *scan, const struct need *need, int32_t duration)
{
    int32_t best = TIMELINE_NEVER;
    for (uint32_t i = 0; i < scan->cluster->node_count; i++) {
        scan->starts[i] = timelines_earliest(&scan->timelines, scan->node_at[i], need, duration, 0);
        best = scan->starts[i] < best ? scan->starts[i] : best;
    }
    return best;
}

static void book(struct scan *scan, const struct need *need, int32_t duration, int32_t time)
{
    uint32_t missing = need->nodes_min;
    for (uint32_t i = 0; i < scan->cluster->node_count && missing; i++) {
        if (scan->starts[i] != time)
            continue;
        struct window window;
        timelines_window(&scan->timelines, scan->node_at[i], need, duration, time, &window);
        uint16_t gpus = 0;
        for (int32_t left = need->gpus; left > 0; left--) {
            int best = -1;
            for (int gpu = 0; gpu < SLUICE_MAX_GPUS; gpu++)
                if ((window.fit & ~gpus) >> gpu & 1 &&
                    (best < 0 || (need->share && window.gpu_free.mib[gpu] < window.gpu_free.mib[best])))
                    best = gpu;
            gpus |= (uint16_t)(1 << best);
        }
        struct booking booking = {.node = scan->node_at[i],
                                  .share = need->share,
                                  .cpus = need->cpus,
                                  .host_memory = need->host_memory,
                                  .gpus = gpus};
        (void)timelines_take(&scan->timelines, &booking, time, timelines_end(time, duration));
        missing--;
    }
}

static enum sluice_error give_running(struct scan *scan, int64_t now_s, const struct sluice_backfill_running *running,
                                      struct sluice_part *parts, struct sluice_error_text *text)
{
    uint32_t count;
    enum sluice_error error =
        sluice_allocation_read(scan->cluster, running->allocation, parts, scan->cluster->node_count, &count, text);
    for (uint32_t i = 0; i < count && !error; i++) {
        struct booking booking = {.node = parts[i].node,
                                  .share = (int32_t)parts[i].gpu_memory_mib,
                                  .cpus = (int32_t)parts[i].cpus_milli,
                                  .host_memory = (int32_t)parts[i].host_memory_mib,
                                  .gpus = (uint16_t)parts[i].gpus};
        int64_t end = running->end_s - now_s;
        (void)timelines_give(&scan->timelines, &booking, end < 1 ? 1 : (int32_t)end, TIMELINE_NEVER);
    }
    return error;
}

enum sluice_error sluice_bench_backfill_scan(const struct sluice_cluster *cluster, int64_t now_s,
                                             const struct sluice_backfill_running *running, uint32_t running_count,
                                             const struct sluice_backfill_job *jobs, uint32_t job_count,
                                             int64_t *start_s, uint64_t *elapsed_ns, struct sluice_error_text *text)
{
    struct scan scan = {.cluster = cluster};
    scan.node_at = calloc(cluster->node_count, sizeof *scan.node_at);
    scan.starts = calloc(cluster->node_count, sizeof *scan.starts);
    struct sluice_part *parts = calloc(cluster->node_count, sizeof *parts);
    uint64_t planned = 0;
    for (uint32_t i = 0; i < job_count; i++)
        planned += jobs[i].request->nodes_min > 1 ? (uint64_t)jobs[i].request->nodes_min : 1;
    enum sluice_error error = SLUICE_OK;
    if (!timelines_new(&scan.timelines, cluster->node_count, running_count + 2 * planned) || !scan.node_at ||
        !scan.starts || !parts)
        error = SLUICE_ERROR_NO_MEMORY;
    uint64_t begin = bench_now_ns();
    if (!error) {
        timelines_reset(&scan.timelines, cluster);
        for (uint32_t node = 0; node < cluster->node_count; node++)
            scan.node_at[cluster->nodes[node].rank] = node;
    }
    for (uint32_t i = 0; i < running_count && !error; i++)
        error = give_running(&scan, now_s, &running[i], parts, text);
    for (uint32_t i = 0; i < job_count && !error; i++) {
        struct need need;
        error = sluice_need_from_request(cluster, jobs[i].request, &need, text);
        if (error)
            break;
        int32_t duration = (int32_t)jobs[i].limit_s;
        int32_t time =
            need.nodes_min == 1 ? first_start_of_one(&scan, &need, duration) : first_start(&scan, &need, duration);
        start_s[i] = time == TIMELINE_NEVER ? SLUICE_BACKFILL_NO_START : now_s + time;
        if (time != TIMELINE_NEVER)
            book(&scan, &need, duration, time);
    }
    *elapsed_ns = bench_now_ns() - begin;
    timelines_free(&scan.timelines);
    free(scan.node_at);
    free(scan.starts);
    free(parts);
    return error;
}
