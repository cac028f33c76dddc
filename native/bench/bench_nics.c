/* SPDX-License-Identifier: Apache-2.0 */
/* GPUs near NICs on a cluster in use: what choosing them costs, and how many pairs there are. */
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

struct running {
    uint64_t allocation; /* 0: it holds no GPU */
    uint32_t node, nics;
};

struct site {
    struct sluice_cluster *cluster;
    const struct sluice_nic_groups *groups;
    uint64_t random;
    uint32_t *nics_free; /* per node */
    struct running *running;
    uint32_t count;
};

static enum sluice_error end_one(struct site *site, struct sluice_error_text *text)
{
    uint32_t which = (uint32_t)(next_random(&site->random) % site->count);
    struct running job = site->running[which];
    site->running[which] = site->running[--site->count];
    site->nics_free[job.node] |= job.nics;
    return job.allocation ? sluice_release(site->cluster, job.allocation, text) : SLUICE_OK;
}

static uint32_t lowest(uint32_t mask, uint32_t count)
{
    uint32_t found = 0;
    for (; count && mask; count--) {
        found |= mask & -mask;
        mask &= mask - 1;
    }
    return found;
}

/* A job that holds NICs alone, the lowest of a random node. */
static void take_nics(struct site *site)
{
    uint32_t node = (uint32_t)(next_random(&site->random) % site->cluster->node_count);
    uint32_t nics = lowest(site->nics_free[node], 1 + (uint32_t)(next_random(&site->random) % 2));
    site->nics_free[node] &= ~nics;
    site->running[site->count++] = (struct running){.node = node, .nics = nics};
}

/* A job with GPUs, and with as many NICs. `at`: which decision. */
static enum sluice_error start_one(struct site *site, bool with_nics, uint32_t *at,
                                   struct sluice_bench_nics_result *result, struct sluice_error_text *text)
{
    struct sluice_part part;
    struct sluice_placement placement = {.parts = &part, .part_capacity = 1};
    uint32_t gpus = 1u << next_random(&site->random) % 4;
    struct sluice_request request = {.gpus = gpus, .cpus_milli = 1000};
    uint64_t begin = bench_now_ns();
    enum sluice_error error = sluice_place(site->cluster, SLUICE_POLICY_SLUICE, &request, &placement, text);
    uint64_t placed = bench_now_ns();
    if (error)
        return error == SLUICE_ERROR_NO_PLACE ? end_one(site, text) : error;
    struct running job = {.node = part.node};
    uint32_t nics_free = site->nics_free[part.node];
    if (with_nics && __builtin_popcount(nics_free) >= (int)gpus) {
        struct sluice_nic_choice own, choice;
        struct sluice_part kept = part;
        error = sluice_choose_nics(site->cluster, site->groups, nics_free, gpus, true, &kept, &own, text);
        if (error)
            return error;
        uint64_t before = bench_now_ns();
        error = sluice_choose_nics(site->cluster, site->groups, nics_free, gpus, false, &part, &choice, text);
        uint64_t chosen = bench_now_ns();
        if (error)
            return error;
        result->place_ns[*at] = (uint32_t)(placed - begin);
        result->choose_ns[(*at)++] = (uint32_t)(chosen - before);
        result->wanted += gpus;
        result->pairs += choice.pairs;
        result->kept_pairs += own.pairs;
        job.nics = choice.nics;
        site->nics_free[part.node] &= ~choice.nics;
    }
    error = sluice_commit(site->cluster, &placement, &job.allocation, text);
    site->running[site->count++] = job;
    return error;
}

enum sluice_error sluice_bench_nics(struct sluice_cluster *cluster, const struct sluice_nic_groups *groups,
                                    uint32_t decisions, uint64_t seed, struct sluice_bench_nics_result *result,
                                    struct sluice_error_text *text)
{
    struct site site = {.cluster = cluster, .groups = groups, .random = seed};
    enum sluice_error error = SLUICE_OK;
    if (groups->gpu_count < MOST || groups->nic_count < MOST || groups->nic_count > SLUICE_MAX_NICS)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "a node must have %d GPUs and as many NICs at least", MOST);
    site.nics_free = calloc(cluster->node_count, sizeof(*site.nics_free));
    site.running = calloc(cluster->node_count * JOBS_OF_A_NODE + 1, sizeof(*site.running));
    if (!site.nics_free || !site.running)
        error =
            sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "out of memory for the jobs of %u nodes", cluster->node_count);
    for (uint32_t node = 0; !error && node < cluster->node_count; node++)
        site.nics_free[node] = (uint32_t)((UINT64_C(1) << groups->nic_count) - 1);
    for (uint32_t at = 0, job = 0; !error && at < decisions; job++) {
        if (job % 8 == 7)
            take_nics(&site);
        else
            error = start_one(&site, job % 4 != 3, &at, result, text);
        while (!error && site.count > cluster->node_count * JOBS_OF_A_NODE)
            error = end_one(&site, text);
    }
    free(site.nics_free);
    free(site.running);
    return error;
}
