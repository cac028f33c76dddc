/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The cluster that decisions are made on, as entries name it: how it was made, and images of its nodes. */
#include "decisions/decisions_internal.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/runtime.h"

/* The calls that made a cluster. Append only. */
enum topology_call {
    CALL_MODEL = 1,
    CALL_SHAPE = 2,
    CALL_SWITCH = 3,
    CALL_NODE = 4,
    CALL_ORDER = 5,
    CALL_WORKLOAD = 6,
    CALL_NICS = 7, /* of the next shape, as are */
    CALL_NIC_PLANES = 8,
};

struct sluice_decision_topology {
    struct bytes notes;
    uint32_t nodes;
};

enum {
    MAX_IMAGE = 512,
    IMAGES_AT_ONCE = 1024, /* in one call of a hook; the others with the next */
};

struct sluice_decision_topology *sluice_decision_topology_new(void)
{
    struct sluice_decision_topology *topology = calloc(1, sizeof *topology);
    if (topology)
        topology->notes.grows = true;
    return topology;
}

void sluice_decision_topology_free(struct sluice_decision_topology *topology)
{
    if (topology)
        free(topology->notes.data);
    free(topology);
}

void sluice_decision_note_model(struct sluice_decision_topology *topology, const char *name)
{
    sluice_put(&topology->notes, CALL_MODEL);
    sluice_put_text(&topology->notes, name);
}

static void note_nics(struct bytes *to, const struct sluice_nic_groups *nics)
{
    sluice_put(to, CALL_NICS);
    sluice_put(to, nics->gpu_count);
    sluice_put(to, nics->nic_count);
    sluice_put_bytes(to, nics->gpu_group, nics->gpu_count);
    sluice_put_bytes(to, nics->nic_group, nics->nic_count);
    sluice_put_bytes(to, nics->nic_kind, nics->nic_count);
    bool known = false;
    for (uint32_t i = 0; i < nics->nic_count; i++)
        known |= nics->nic_plane[i] != 0;
    if (!known)
        return;
    sluice_put(to, CALL_NIC_PLANES);
    sluice_put(to, nics->nic_count);
    sluice_put_bytes(to, nics->nic_plane, nics->nic_count);
}

void sluice_decision_note_shape(struct sluice_decision_topology *topology, const struct sluice_node_shape *shape)
{
    struct bytes *to = &topology->notes;
    if (shape->nics.nic_count)
        note_nics(to, &shape->nics);
    sluice_put(to, CALL_SHAPE);
    sluice_put(to, shape->gpu_count);
    for (uint32_t i = 0; i < shape->gpu_count && i < SLUICE_MAX_GPUS; i++) {
        const struct sluice_gpu_shape *gpu = &shape->gpus[i];
        sluice_put(to, gpu->model);
        sluice_put(to, gpu->capability);
        sluice_put_signed(to, gpu->memory_mib);
        sluice_put(to, gpu->link_domain);
        sluice_put(to, gpu->numa_node);
        sluice_put(to, gpu->near_nic);
    }
    for (uint32_t i = 0; i < shape->gpu_count && i < SLUICE_MAX_GPUS; i++)
        sluice_put_bytes(to, shape->links[i], shape->gpu_count);
}

void sluice_decision_note_switch(struct sluice_decision_topology *topology, uint32_t parent)
{
    sluice_put(&topology->notes, CALL_SWITCH);
    sluice_put(&topology->notes, parent);
}

void sluice_decision_note_node(struct sluice_decision_topology *topology, const char *name, uint32_t shape,
                               int64_t cpus_milli, int64_t host_memory_mib, uint32_t switch_id)
{
    sluice_put(&topology->notes, CALL_NODE);
    sluice_put_text(&topology->notes, name);
    sluice_put(&topology->notes, shape);
    sluice_put_signed(&topology->notes, cpus_milli);
    sluice_put_signed(&topology->notes, host_memory_mib);
    sluice_put(&topology->notes, switch_id);
    topology->nodes++;
}

void sluice_decision_note_order(struct sluice_decision_topology *topology, const uint32_t *rank, uint32_t node_count)
{
    sluice_put(&topology->notes, CALL_ORDER);
    sluice_put(&topology->notes, rank ? node_count : 0);
    for (uint32_t i = 0; rank && i < node_count; i++)
        sluice_put(&topology->notes, rank[i]);
}

void sluice_decision_note_workload(struct sluice_decision_topology *topology, const struct sluice_request *shapes,
                                   const uint32_t *weights, uint32_t count)
{
    sluice_put(&topology->notes, CALL_WORKLOAD);
    sluice_put(&topology->notes, count);
    for (uint32_t i = 0; i < count; i++) {
        sluice_put_request(&topology->notes, &shapes[i]);
        sluice_put_bitmap(&topology->notes, shapes[i].allowed, shapes[i].allowed_words);
        sluice_put(&topology->notes, weights[i]);
    }
}

enum sluice_error sluice_decision_set_topology(struct sluice_decision_recorder *recorder,
                                               const struct sluice_decision_topology *topology,
                                               const struct sluice_cluster *cluster, struct sluice_error_text *text)
{
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(cluster, &totals);
    size_t words = ((size_t)totals.nodes + 63) / 64;
    uint64_t *dirty = calloc(words + 1, sizeof *dirty);
    struct bytes copy = {.grows = true};
    sluice_put_bytes(&copy, topology->notes.data, topology->notes.length);
    if (!dirty || copy.full || topology->notes.full) {
        free(dirty);
        free(copy.data);
        recorder->cluster = NULL; /* what is recorded no longer fits */
        return sluice_fail_with(text, SLUICE_ERROR_NO_MEMORY, "decisions: out of memory for %u nodes", totals.nodes);
    }
    if (totals.nodes != topology->nodes) {
        free(dirty);
        free(copy.data);
        recorder->cluster = NULL;
        return sluice_fail_with(text, SLUICE_ERROR_INVALID, "decisions: %u nodes noted, the cluster has %u",
                                topology->nodes, totals.nodes);
    }
    for (uint32_t node = 0; node < totals.nodes; node++)
        dirty[node / 64] |= UINT64_C(1) << (node % 64);
    free(recorder->dirty);
    free(recorder->topology.data);
    recorder->dirty = dirty;
    recorder->dirty_words = words;
    recorder->topology = copy;
    recorder->node_count = totals.nodes;
    recorder->cluster = cluster;
    return SLUICE_OK;
}

void sluice_decision_node_changed(struct sluice_decision_recorder *recorder, uint32_t node)
{
    if (node < recorder->node_count)
        recorder->dirty[node / 64] |= UINT64_C(1) << (node % 64);
}

bool sluice_decision_record_topology(struct sluice_decision_recorder *recorder)
{
    if (!recorder->cluster)
        return false;
    if (!recorder->topology.data)
        return true;
    /* It may be larger than the ring: the thread gets the memory itself. */
    uint8_t handed[sizeof recorder->topology];
    memcpy(handed, &recorder->topology, sizeof handed);
    struct bytes payload = {.data = handed, .length = sizeof handed};
    if (!sluice_decision_record(recorder, ENTRY_TOPOLOGY, &payload))
        return false;
    recorder->topology = (struct bytes){0};
    return true;
}

bool sluice_decision_record_images(struct sluice_decision_recorder *recorder)
{
    if (!sluice_decision_record_topology(recorder))
        return false;
    uint32_t images = 0;
    for (size_t word = 0; word < recorder->dirty_words; word++) {
        while (recorder->dirty[word]) {
            uint32_t node = (uint32_t)(word * 64) + (uint32_t)__builtin_ctzll(recorder->dirty[word]);
            struct sluice_node_view view;
            if (images++ == IMAGES_AT_ONCE || sluice_node_read(recorder->cluster, node, &view, NULL) != SLUICE_OK)
                return false;
            uint8_t data[MAX_IMAGE];
            struct bytes image = {.data = data, .room = sizeof data};
            sluice_put_image(&image, node, &view);
            if (!sluice_decision_record(recorder, ENTRY_IMAGE, &image))
                return false;
            recorder->dirty[word] &= recorder->dirty[word] - 1;
        }
    }
    return true;
}
