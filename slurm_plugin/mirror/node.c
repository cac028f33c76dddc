/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What Slurm says of one node: its configuration, and what of its GPUs is free. */
#include "mirror/mirror_internal.h"

#include "src/common/bitstring.h"
#include "src/common/list.h"

bool sluice_mirror_shares_per_gpu(const gres_node_state_t *shared, uint32_t gpus, const uint64_t *counts, int64_t *out)
{
    if (!shared->topo_cnt || !shared->topo_gres_bitmap || !counts)
        return false;
    for (uint16_t t = 0; t < shared->topo_cnt; t++) {
        bitstr_t *bits = shared->topo_gres_bitmap[t];
        if (!bits || bit_size(bits) != gpus || bit_set_count(bits) != 1)
            return false;
        bitoff_t gpu = bit_ffs(bits);
        if (counts[t] > (uint64_t)SLUICE_MAX_GPU_MEMORY_MIB)
            return false;
        out[gpu] = (int64_t)counts[t];
    }
    return true;
}

static int fingerprint_gres(void *item, void *argument)
{
    const gres_state_t *state = item;
    const gres_node_state_t *gres = state->gres_data;
    uint64_t *hash = argument;
    *hash = mix(*hash, state->plugin_id);
    if (!gres)
        return 0;
    *hash = mix(*hash, gres->gres_cnt_avail);
    *hash = mix(*hash, (uint64_t)gres->topo_cnt << 1 | gres->no_consume);
    *hash = mix(*hash, gres->gres_bit_alloc ? (uint64_t)bit_size(gres->gres_bit_alloc) : 0);
    for (uint16_t t = 0; t < gres->topo_cnt; t++) {
        *hash = mix(*hash, gres->topo_gres_cnt_avail ? gres->topo_gres_cnt_avail[t] : 0);
        *hash = mix(*hash, gres->topo_type_id ? gres->topo_type_id[t] : 0);
    }
    return 0;
}

uint64_t sluice_mirror_fingerprint(const node_record_t *node)
{
    if (!node)
        return 0;
    uint64_t hash = mix(7, node->real_memory);
    for (const char *c = node->name; c && *c; c++) /* what is known of its switches and NICs is known by its name */
        hash = mix(hash, (uint64_t)*c);
    hash = mix(hash, node->mem_spec_limit);
    hash = mix(hash, SLUICE_NODE_WEIGHT(node));
    hash = mix(hash, (uint64_t)node->tot_cores << 48 | (uint64_t)node->tpc << 32 | (uint64_t)node->core_spec_cnt << 16 |
                         node->cpus);
    hash = mix(hash, (uint64_t)node->tot_sockets << 48 | (uint64_t)node->cores << 32 | (uint64_t)node->threads << 16 |
                         node->boards);
    if (node->gres_list)
        list_for_each_ro(node->gres_list, fingerprint_gres, &hash);
    return hash;
}

void sluice_mirror_free_by_slurm(const struct sluice_node_gres *gres, const struct sluice_node_view *view,
                                 int64_t *free_mib)
{
    int64_t used[SLUICE_MAX_GPUS] = {0}, mps[SLUICE_MAX_GPUS] = {0};
    if (gres->shard && gres->shard->gres_cnt_avail)
        sluice_mirror_shares_per_gpu(gres->shard, view->gpu_count, gres->shard->topo_gres_cnt_alloc, used);
    if (gres->mps && gres->mps->gres_cnt_avail)
        sluice_mirror_shares_per_gpu(gres->mps, view->gpu_count, gres->mps->topo_gres_cnt_alloc, mps);
    for (uint32_t i = 0; i < view->gpu_count; i++) {
        bool whole = gres->gpu && gres->gpu->gres_bit_alloc && i < bit_size(gres->gpu->gres_bit_alloc) &&
                     bit_test(gres->gpu->gres_bit_alloc, i);
        int64_t left = view->gpu_memory_mib[i] - used[i];
        if (mps[i] && left == view->gpu_memory_mib[i])
            left--; /* in use, though the core does not know how */
        free_mib[i] = whole || left < 0 ? 0 : left;
    }
}
