/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests and parts of any content, one after another on one small cluster: a refusal changes nothing, what is refused
 * by the check is refused alike by place, and what is placed keeps the request's words and can be committed.
 */
#include "sluice/core.h"

#include <stdlib.h>
#include <string.h>

enum { NODES = 10, MOST_PARTS = 16, HELD = 32 };

static void require(bool holds)
{
    if (!holds)
        abort();
}

struct input {
    const uint8_t *data;
    size_t size;
};

static uint64_t take(struct input *input, size_t bytes)
{
    uint64_t value = 0;
    bytes = bytes < input->size ? bytes : input->size;
    memcpy(&value, input->data, bytes);
    input->data += bytes;
    input->size -= bytes;
    return value;
}

/* Small most of the time, so that requests pass the check; else any number. */
static int64_t number(struct input *input, uint64_t small)
{
    uint64_t kind = take(input, 1);
    return kind < 250 ? (int64_t)(kind * small / 250) : (int64_t)take(input, 8);
}

static struct sluice_cluster *new_cluster(void)
{
    struct sluice_cluster_config config = {.max_nodes = NODES, .max_allocations = HELD, .max_parts = 60};
    struct sluice_cluster *cluster;
    uint32_t models[2], shape, pod, racks[2], node;
    require(!sluice_cluster_new(&config, &cluster, NULL));
    require(!sluice_cluster_add_model(cluster, "A", &models[0], NULL));
    require(!sluice_cluster_add_model(cluster, "B", &models[1], NULL));
    require(!sluice_cluster_add_switch(cluster, 0, &pod, NULL));
    require(!sluice_cluster_add_switch(cluster, pod, &racks[0], NULL));
    require(!sluice_cluster_add_switch(cluster, 0, &racks[1], NULL));
    for (uint32_t n = 0; n < NODES; n++) {
        struct sluice_node_shape kind = {.gpu_count = n % 4 * 4};
        for (uint8_t i = 0; i < kind.gpu_count; i++)
            kind.gpus[i] = (struct sluice_gpu_shape){.model = models[(n / 4 + i / 4) % 2],
                                                     .capability = 800 + n,
                                                     .memory_mib = 1000 + 8 * i,
                                                     .link_domain = i / 4,
                                                     .numa_node = i / 8,
                                                     .near_nic = i % 3 > 0};
        if (n % 3) {
            kind.nics = (struct sluice_nic_groups){.gpu_count = kind.gpu_count, .nic_count = n};
            for (uint8_t i = 0; i < kind.gpu_count; i++)
                kind.nics.gpu_group[i] = i / 2;
            for (uint8_t i = 0; i < n; i++) {
                kind.nics.nic_group[i] = i;
                kind.nics.nic_kind[i] = n > 5 && i % 4 == 3;
                kind.nics.nic_plane[i] = n > 6 ? i % 3 : 0;
            }
        }
        require(!sluice_cluster_add_shape(cluster, &kind, &shape, NULL));
        require(!sluice_cluster_add_node(cluster, shape, 64000, 64000, n % 3 ? racks[n % 2] : 0, &node, NULL));
    }
    struct sluice_request usual[2] = {{.gpus = 1, .gpu_memory_mib = 400, .cpus_milli = 4000}, {.gpus = 8}};
    require(!sluice_cluster_set_workload(cluster, usual, (uint32_t[]){3, 1}, 2, NULL));
    return cluster;
}

static void check_placement(const struct sluice_request *request, const struct sluice_placement *placement)
{
    int64_t gpus = 0, nodes_min = request->nodes_min ? request->nodes_min : 1;
    int64_t nodes_max = request->nodes_max ? request->nodes_max : nodes_min;
    require(placement->part_count >= nodes_min && placement->part_count <= nodes_max);
    for (uint32_t i = 0; i < placement->part_count; i++) {
        const struct sluice_part *part = &placement->parts[i];
        int64_t here = __builtin_popcount(part->gpus);
        require(i == 0 || part->node > placement->parts[i - 1].node);
        require(!request->allowed || (request->allowed[0] >> part->node & 1));
        require(part->cpus_milli == request->cpus_milli + here * request->cpus_milli_per_gpu);
        require(part->host_memory_mib == request->host_memory_mib + here * request->host_memory_mib_per_gpu);
        require(part->gpu_compute_percent == request->gpu_compute_percent);
        require(__builtin_popcount(part->nics) == request->nics + here * request->nics_per_gpu);
        require((request->flags & SLUICE_GPUS_TOTAL) ? here > 0 : here == request->gpus);
        gpus += here;
    }
    require(!(request->flags & SLUICE_GPUS_TOTAL) || gpus == request->gpus);
}

static void place(struct sluice_cluster *cluster, struct input *input, uint64_t *held, uint32_t *count)
{
    uint64_t allowed = take(input, 2), bits = take(input, 3);
    struct sluice_request request = {
        .nodes_min = number(input, 6),
        .nodes_max = number(input, 10),
        .gpus = number(input, 20),
        .gpu_memory_mib = number(input, 1200),
        .cpus_milli = number(input, 20000),
        .host_memory_mib = number(input, 20000),
        .cpus_milli_per_gpu = number(input, 3000),
        .host_memory_mib_per_gpu = number(input, 3000),
        .models = (uint64_t)number(input, 5),
        .capability_min = number(input, 900),
        .gpu_memory_mib_min = number(input, 1100),
        .one_link_domain = (enum sluice_wish)(bits & 3),
        .one_numa_node = (enum sluice_wish)(bits >> 2 & 3),
        .near_nic = (enum sluice_wish)(bits >> 4 & 3),
        .one_switch = (enum sluice_wish)(bits >> 6 & 3),
        .layout = (enum sluice_layout)(bits >> 8 & 3),
        .flags = (uint32_t)(bits >> 10 & 15),
        .switch_level = (uint32_t)(bits >> 14 & 7),
        .allowed = bits >> 17 & 1 ? &allowed : NULL,
        .allowed_words = bits >> 17 & 1,
        .seed = bits,
        .gpu_compute_percent = number(input, 120),
        .nics = bits >> 18 & 1 ? number(input, 10) : 0,
        .nics_per_gpu = bits >> 19 & 1 ? number(input, 3) : 0,
        .nic_kinds = bits >> 20 & 1 ? (uint64_t)number(input, 5) : 0,
        .segment = number(input, 4),
        .lower_switches = number(input, 4),
        .switch_layout = (enum sluice_layout)number(input, 2),
        .nic_planes = (enum sluice_layout)(bits >> 21 & 3),
    };
    enum sluice_policy policy = (enum sluice_policy)take(input, 1);
    struct sluice_part parts[MOST_PARTS];
    struct sluice_placement placement = {.parts = parts, .part_capacity = MOST_PARTS};
    struct sluice_explanation explanation;
    struct sluice_error_text text;
    enum sluice_error checked = sluice_request_check(cluster, &request, &text);
    enum sluice_error placed = sluice_place(cluster, policy, &request, &placement, &text);
    enum sluice_error explained = sluice_explain(cluster, policy, &request, &placement, &explanation, &text);
    if ((unsigned)policy >= SLUICE_POLICY_COUNT) {
        require(placed == SLUICE_ERROR_UNKNOWN && explained == placed);
        return;
    }
    if (checked) {
        require(placed == checked && explained == checked);
        return;
    }
    if (placed == SLUICE_ERROR_CAPACITY) {
        require(explained == placed);
        return;
    }
    require(placed == SLUICE_OK || placed == SLUICE_ERROR_NO_PLACE || placed == SLUICE_ERROR_NEVER);
    require(explained == SLUICE_OK && explanation.verdict == placed);
    if (placed)
        return;
    check_placement(&request, &placement);
    if (*count < HELD) {
        enum sluice_error error = sluice_commit(cluster, &placement, &held[*count], &text);
        require(error == SLUICE_OK || error == SLUICE_ERROR_CAPACITY); /* the parts may be used up */
        *count += !error;
    }
}

static void commit(struct sluice_cluster *cluster, struct input *input, uint64_t *held, uint32_t *count)
{
    struct sluice_part parts[3];
    struct sluice_placement placement = {.parts = parts, .part_count = (uint32_t)take(input, 1) % 4};
    for (uint32_t i = 0; i < placement.part_count; i++)
        parts[i] = (struct sluice_part){.node = (uint32_t)number(input, NODES + 1),
                                        .gpus = (uint32_t)take(input, 2),
                                        .gpu_memory_mib = number(input, 1200),
                                        .cpus_milli = number(input, 9000),
                                        .host_memory_mib = number(input, 9000),
                                        .exclusive = take(input, 1) > 240,
                                        .gpu_compute_percent = (uint32_t)number(input, 120),
                                        .nics = (uint32_t)number(input, 8)};
    struct sluice_cluster_totals before, after;
    sluice_cluster_read_totals(cluster, &before);
    uint64_t allocation = 0;
    enum sluice_error error = sluice_commit(cluster, &placement, &allocation, NULL);
    sluice_cluster_read_totals(cluster, &after);
    require((error == SLUICE_OK) == (allocation != 0));
    if (error)
        require(memcmp(&before, &after, sizeof before) == 0);
    else if (*count < HELD)
        held[(*count)++] = allocation;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input input = {.data = data, .size = size};
    struct sluice_cluster *cluster = new_cluster();
    uint64_t held[HELD];
    uint32_t count = 0;
    while (input.size > 0) {
        switch (take(&input, 1) % 8) {
        case 0:
            commit(cluster, &input, held, &count);
            break;
        case 1:
            if (count) {
                uint64_t at = take(&input, 1) % count;
                require(!sluice_release(cluster, held[at], NULL));
                held[at] = held[--count];
            }
            break;
        case 2:
            (void)sluice_node_set_state(cluster, (uint32_t)take(&input, 1) % (NODES + 1),
                                        (enum sluice_node_state)(take(&input, 1) % 4), NULL);
            break;
        case 3:
            (void)sluice_gpu_set_health(cluster, (uint32_t)take(&input, 1) % (NODES + 1),
                                        (uint32_t)take(&input, 1) % 17, take(&input, 1) & 1, NULL);
            break;
        default:
            place(cluster, &input, held, &count);
        }
    }
    require(!sluice_cluster_check(cluster, NULL));
    sluice_cluster_free(cluster);
    return 0;
}
