/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "hook/workload.h"

#include <string.h>

enum {
    SHAPES = 128,
    FIRST_ARRIVALS = 64,  /* jobs before the first prices */
    LEAST_SECONDS = 60,   /* between prices */
    MOST_WEIGHT = 100000, /* all counts are halved at this sum, so that old jobs count less */
};

/* Assumed until jobs have arrived: one GPU, two, four and a whole node of eight, equally often. */
static const struct {
    int64_t gpus;
    uint32_t weight;
} usual[] = {{1, 16}, {2, 8}, {4, 8}, {8, 8}};

/* Under slurmctld's write locks, as all of the hook. */
static struct {
    struct sluice_request shape[SHAPES];
    uint32_t weight[SHAPES];
    uint32_t count;
    uint32_t sum, arrivals; /* of all weights; since the last prices */
    uint64_t models;        /* which GPU types the shapes speak of: hash of the cluster's */
    time_t priced;
} workload;

static bool same_shape(const struct sluice_request *a, const struct sluice_request *b)
{
    return a->gpus == b->gpus && a->gpu_memory_mib == b->gpu_memory_mib && a->cpus_milli == b->cpus_milli &&
           a->models == b->models;
}

static void halve(void)
{
    uint32_t kept = 0;
    workload.sum = 0;
    for (uint32_t i = 0; i < workload.count; i++) {
        if (!(workload.weight[i] / 2))
            continue;
        workload.shape[kept] = workload.shape[i];
        workload.weight[kept] = workload.weight[i] / 2;
        workload.sum += workload.weight[kept++];
    }
    workload.count = kept;
}

void sluice_workload_arrival(const struct sluice_request *request)
{
    if (request->gpus > SLUICE_MAX_GPUS)
        return;
    /* What is asked of each node, as often as there are nodes. */
    uint32_t nodes = request->nodes_min > 1 && !(request->flags & SLUICE_GPUS_TOTAL) ? (uint32_t)request->nodes_min : 1;
    struct sluice_request shape = {
        .gpus = request->gpus,
        .gpu_memory_mib = request->gpu_memory_mib,
        .cpus_milli = request->cpus_milli + request->gpus * request->cpus_milli_per_gpu,
        .models = request->models,
    };
    uint32_t at = 0;
    while (at < workload.count && !same_shape(&workload.shape[at], &shape))
        at++;
    if (at == SHAPES) {
        halve();
        at = workload.count;
        if (at == SHAPES)
            return;
    }
    if (at == workload.count) {
        workload.shape[at] = shape;
        workload.weight[at] = 0;
        workload.count++;
    }
    workload.weight[at] += nodes;
    workload.sum += nodes;
    workload.arrivals++;
    if (workload.sum > MOST_WEIGHT)
        halve();
}

void sluice_workload_apply(struct sluice_mirror *mirror)
{
    uint64_t models = sluice_mirror_models_hash(mirror);
    if (models != workload.models) {
        workload.count = workload.sum = workload.arrivals = 0;
        workload.models = models;
        for (size_t i = 0; i < sizeof(usual) / sizeof(usual[0]); i++) {
            workload.shape[workload.count] = (struct sluice_request){.gpus = usual[i].gpus};
            workload.weight[workload.count++] = usual[i].weight;
            workload.sum += usual[i].weight;
        }
    }
    if (workload.count)
        sluice_mirror_set_workload(mirror, workload.shape, workload.weight, workload.count);
}

void sluice_workload_refresh(struct sluice_mirror *mirror, time_t now)
{
    /* As much again as is known, or a tenth of it after a while. */
    uint32_t enough = workload.priced ? workload.sum / 10 : FIRST_ARRIVALS;
    if (workload.arrivals < FIRST_ARRIVALS || workload.arrivals < enough || now < workload.priced + LEAST_SECONDS)
        return;
    workload.priced = now;
    workload.arrivals = 0;
    sluice_mirror_set_workload(mirror, workload.shape, workload.weight, workload.count);
}
