/* SPDX-License-Identifier: Apache-2.0 */
/* GPUs near NICs on a cluster in use: what looking at NICs costs a placement, and how many pairs there are. */
#include "bench.h"

#include "../core/cluster.h"

#include <stdlib.h>

enum { MOST = 8 };           /* GPUs of a job */
enum { JOBS_OF_A_NODE = 2 }; /* on average */

/* SplitMix64 (Steele, Lea, Flood 2014). */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

struct site {
    struct sluice_cluster *cluster;
    uint64_t random;
    uint32_t gpus_per_nic;
    uint64_t *running;
    uint32_t count;
};

static enum sluice_error end_one(struct site *site, struct sluice_error_text *text)
{
    uint32_t which = (uint32_t)(next_random(&site->random) % site->count);
    uint64_t job = site->running[which];
    site->running[which] = site->running[--site->count];
    return sluice_release(site->cluster, job, text);
}

static enum sluice_error hold(struct site *site, struct sluice_part *part, struct sluice_error_text *text)
{
    struct sluice_placement placement = {.parts = part, .part_capacity = 1, .part_count = 1};
    enum sluice_error error = sluice_commit(site->cluster, &placement, &site->running[site->count], text);
    site->count += !error;
    return error;
}

/* A job that holds NICs alone, the lowest of a random node. */
static enum sluice_error take_nics(struct site *site, struct sluice_error_text *text)
{
    struct sluice_part part = {.node = (uint32_t)(next_random(&site->random) % site->cluster->node_count)};
    uint32_t left = site->cluster->nics_free[part.node];
    for (uint64_t count = 1 + next_random(&site->random) % 2; count && left; count--, left &= left - 1)
        part.nics |= left & -left;
    return part.nics ? hold(site, &part, text) : SLUICE_OK;
}

/* How many pairs the node of a placement without NICs has for the request. */
static uint64_t pairs_on_node(const struct site *site, struct sluice_part part, uint32_t nics)
{
    const struct sluice_nic_groups *groups = &sluice_shape_of(site->cluster, part.node)->nics;
    struct sluice_nic_choice choice;
    uint32_t nics_free = site->cluster->nics_free[part.node];
    return sluice_choose_nics(site->cluster, groups, nics_free, nics, false, &part, &choice, NULL) ? 0 : choice.pairs;
}

/* A job with GPUs and NICs. `at`: which decision. */
static enum sluice_error start_paired(struct site *site, uint32_t gpus, uint32_t *at,
                                      struct sluice_bench_nics_result *result, struct sluice_error_text *text)
{
    struct sluice_part parts[2];
    struct sluice_request requests[2] = {{.gpus = gpus, .cpus_milli = 1000}, {.gpus = gpus, .cpus_milli = 1000}};
    uint32_t *times[2] = {&result->without_ns[*at], &result->with_ns[*at]}, pairs = 0;
    requests[1].nics = (gpus + site->gpus_per_nic - 1) / site->gpus_per_nic;
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t which = (i + *at) % 2;
        struct sluice_placement placement = {.parts = &parts[which], .part_capacity = 1};
        uint64_t begin = bench_now_ns();
        enum sluice_error error = sluice_place(site->cluster, SLUICE_POLICY_SLUICE, &requests[which], &placement, text);
        *times[which] = (uint32_t)(bench_now_ns() - begin);
        if (error)
            return error == SLUICE_ERROR_NO_PLACE ? end_one(site, text) : error;
        pairs = which ? placement.nic_pairs : pairs;
    }
    (*at)++;
    result->wanted += gpus;
    result->pairs += pairs;
    result->node_pairs += pairs_on_node(site, parts[0], (uint32_t)requests[1].nics);
    result->elsewhere += parts[0].node != parts[1].node;
    return hold(site, &parts[1], text);
}

static enum sluice_error start_unpaired(struct site *site, uint32_t gpus, struct sluice_error_text *text)
{
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    struct sluice_request request = {.gpus = gpus, .cpus_milli = 1000};
    enum sluice_error error = sluice_place(site->cluster, SLUICE_POLICY_SLUICE, &request, &placement, text);
    if (error)
        return error == SLUICE_ERROR_NO_PLACE ? end_one(site, text) : error;
    return hold(site, &part, text);
}

enum sluice_error sluice_bench_nics(struct sluice_cluster *cluster, uint32_t gpus_per_nic, uint32_t decisions,
                                    uint64_t seed, struct sluice_bench_nics_result *result,
                                    struct sluice_error_text *text)
{
    struct site site = {.cluster = cluster, .random = seed, .gpus_per_nic = gpus_per_nic};
    enum sluice_error error = SLUICE_OK;
    for (uint32_t i = 0; i < cluster->shape_count; i++)
        if (cluster->shapes[i].gpu_count < MOST || cluster->shapes[i].nics.nic_count < MOST || !gpus_per_nic)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "a node must have %d GPUs and as many NICs at least", MOST);
    site.running = calloc(cluster->node_count * JOBS_OF_A_NODE + 2, sizeof(*site.running));
    if (!site.running)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "out of memory for the jobs of %u nodes", cluster->node_count);
    for (uint32_t at = 0, job = 0; !error && at < decisions; job++) {
        uint32_t gpus = 1u << next_random(&site.random) % 4;
        error = job % 8 == 7   ? take_nics(&site, text)
                : job % 4 == 3 ? start_unpaired(&site, gpus, text)
                               : start_paired(&site, gpus, &at, result, text);
        while (!error && site.count > cluster->node_count * JOBS_OF_A_NODE)
            error = end_one(&site, text);
    }
    free(site.running);
    return error;
}
