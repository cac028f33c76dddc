/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "hook/gpus.h"

#include "hook/nics.h"
#include "hook/picked.h"

#include "mirror/mirror.h"

#include "src/common/bitstring.h"
#include "src/common/list.h"
#include "src/common/node_conf.h"
#include "src/common/xmalloc.h"

#include SLUICE_STOCK_NODE_DATA
#include SLUICE_STOCK_PART_DATA

#include <string.h>

/* ---- a job's GRES ---- */

struct job_gres {
    gres_job_state_t *gpu, *shard;
};

static struct job_gres gres_of(struct xlist *list)
{
    struct sluice_gres found = sluice_gres_in(list);
    return (struct job_gres){.gpu = found.gpu, .shard = found.shard};
}

bool sluice_gpus_same_nodes(const job_record_t *job, const struct sluice_part *parts, uint32_t count)
{
    bitstr_t *nodes = job->job_resrcs->node_bitmap;
    if (!nodes || (uint32_t)bit_set_count(nodes) != count)
        return false;
    for (uint32_t i = 0; i < count; i++)
        if (parts[i].node >= (uint32_t)bit_size(nodes) || !bit_test(nodes, parts[i].node))
            return false;
    return true;
}

/* ---- exchanging ---- */

/* Shares of one GPU become as many of another. */
static void move_share(gres_job_state_t *shard, uint32_t node, uint32_t mask)
{
    bitstr_t *bits = picked(shard, node);
    uint64_t *amounts = SLUICE_GRES_SHARES_CHOSEN(shard, node);
    set_mask(bits, mask);
    for (bitoff_t i = 0; amounts && i < bit_size(bits); i++)
        amounts[i] = bit_test(bits, i) ? shard->gres_cnt_node_select[node] : 0;
}

/* Is so much compute of the GPU unclaimed? What the core does not model is not in the way. */
static bool unclaimed(const struct sluice_node_view *view, bitoff_t gpu, uint32_t percent)
{
    return gpu >= (bitoff_t)view->gpu_count || view->gpu_compute_free[gpu] >= percent;
}

static bool choose_on_node(struct sluice_mirror *mirror, const struct job_gres *gres, const struct sluice_part *part)
{
    gres_job_state_t *job = gres->gpu ? gres->gpu : gres->shard;
    bitstr_t *bits = picked(job, part->node);
    struct sluice_node_view view;
    if (!part->gpus || !bits)
        return !part->gpus;
    uint32_t stock = mask_of(bits);
    if (stock == part->gpus)
        return true;
    if (__builtin_popcount(stock) != __builtin_popcount(part->gpus) || !sluice_mirror_node_agrees(mirror, part->node) ||
        sluice_node_read(sluice_mirror_cluster(mirror), part->node, &view, NULL) ||
        (uint32_t)bit_size(bits) != view.gpu_count)
        return false;
    if (gres->gpu) {
        if ((view.gpus_idle & part->gpus) != part->gpus)
            return false;
        set_mask(bits, part->gpus);
        return true;
    }
    uint32_t gpu = (uint32_t)__builtin_ctz(part->gpus);
    if (__builtin_popcount(stock) != 1 ||
        view.gpu_memory_mib_free[gpu] < (int64_t)job->gres_cnt_node_select[part->node] ||
        !unclaimed(&view, (bitoff_t)gpu, part->gpu_compute_percent))
        return false;
    move_share(job, part->node, part->gpus);
    return true;
}

bool sluice_gpus_choose(struct sluice_mirror *mirror, job_record_t *job, const struct sluice_part *parts,
                        uint32_t count)
{
    struct job_gres gres = gres_of(job->gres_list_req);
    bool all = true;
    if (gets_whole_nodes(job) || (gres.gpu && gres.shard))
        return true;
    for (uint32_t i = 0; i < count; i++) {
        struct sluice_part part = parts[i];
        if ((gres.gpu || gres.shard) && !choose_on_node(mirror, &gres, &part)) {
            bitstr_t *kept = picked(gres.gpu ? gres.gpu : gres.shard, part.node);
            part.gpus = kept ? mask_of(kept) : 0;
            part.nics = 0;
            all = false;
        }
        if (part.gpus || part.nics)
            sluice_nics_choose(mirror, job, &part);
    }
    return all;
}

/* ---- what stock picked ---- */

/* On one node. */
struct picks {
    uint32_t node;
    uint32_t mask;
    uint64_t shares;
};

static int add_picked(void *item, void *argument)
{
    const gres_state_t *state = item;
    const gres_job_state_t *gres = state->gres_data;
    struct picks *picks = argument;
    const char *name = state->gres_name;
    if (!name || !gres || (strcmp(name, "gpu") != 0 && strcmp(name, "shard") != 0 && strcmp(name, "mps") != 0))
        return 0;
    const bool counted = gres->gres_cnt_node_select && picks->node < gres->total_node_cnt;
    const uint64_t amount = counted ? gres->gres_cnt_node_select[picks->node] : 0;
    bitstr_t *bits = picked(gres, picks->node);
    if (bits)
        picks->mask |= mask_of(bits);
    else if (amount && strcmp(name, "gpu") == 0) /* without device files stock only counts */
        picks->mask |= (uint32_t)((UINT64_C(1) << (amount < 32 ? amount : 32)) - 1);
    if (strcmp(name, "shard") == 0)
        picks->shares += amount;
    return 0;
}

uint32_t sluice_gpus_picked(struct sluice_mirror *mirror, const job_record_t *job, struct sluice_part *parts)
{
    bitstr_t *nodes = job->job_resrcs->node_bitmap;
    uint32_t count = 0;
    for (bitoff_t i = bit_ffs(nodes), last = bit_fls(nodes); i >= 0 && i <= last; i++) {
        struct picks picks = {.node = (uint32_t)i};
        struct sluice_node_view view = {.gpu_count = 0};
        if (!bit_test(nodes, i) || picks.node >= sluice_mirror_nodes(mirror))
            continue;
        if (gets_whole_nodes(job) && !sluice_node_read(sluice_mirror_cluster(mirror), picks.node, &view, NULL))
            picks.mask = (UINT32_C(1) << view.gpu_count) - 1;
        else if (job->gres_list_req)
            list_for_each_ro(job->gres_list_req, add_picked, &picks);
        picks.mask &= (UINT32_C(1) << SLUICE_MAX_GPUS) - 1;
        if (picks.mask)
            parts[count++] = (struct sluice_part){
                .node = picks.node,
                .gpus = picks.mask,
                .gpu_memory_mib = (int64_t)(picks.shares / (uint64_t)__builtin_popcount(picks.mask))};
    }
    return count;
}

/* ---- the outcome ---- */

/* Every entry of the job's allocation that is a kind of GPU. */
struct allocated {
    uint32_t n;
    uint32_t mask;
};

static int add_allocated(void *item, void *argument)
{
    const gres_state_t *state = item;
    const gres_job_state_t *job = state->gres_data;
    struct allocated *allocated = argument;
    if (state->gres_name && (!strcmp(state->gres_name, "gpu") || !strcmp(state->gres_name, "shard")) && job &&
        allocated->n < job->node_cnt && job->gres_bit_alloc && job->gres_bit_alloc[allocated->n])
        allocated->mask |= mask_of(job->gres_bit_alloc[allocated->n]);
    return 0;
}

void sluice_gpus_compare(const job_record_t *job, const struct sluice_part *parts, uint32_t count, uint32_t *chosen,
                         uint32_t *kept)
{
    *chosen = *kept = 0;
    if (gets_whole_nodes(job) || !job->gres_list_alloc)
        return;
    for (uint32_t i = 0; i < count; i++) {
        struct allocated allocated = {.n = i};
        if (!parts[i].gpus)
            continue;
        list_for_each_ro(job->gres_list_alloc, add_allocated, &allocated);
        if (__builtin_popcount(allocated.mask) != __builtin_popcount(parts[i].gpus))
            continue;
        (*chosen)++;
        *kept += allocated.mask == parts[i].gpus;
    }
}

/* ---- GPUs that stock gives out twice ---- */

static bool held_whole(const gres_node_state_t *gpu, bitoff_t i)
{
    return gpu && gpu->gres_bit_alloc && i < bit_size(gpu->gres_bit_alloc) && bit_test(gpu->gres_bit_alloc, i);
}

/* The entry of a node's records that a GPU belongs to; -1: none. */
static int topo_of(const gres_node_state_t *gres, bitoff_t gpu)
{
    for (uint16_t t = 0; gres && gres->topo_gres_bitmap && t < gres->topo_cnt; t++)
        if (gres->topo_gres_bitmap[t] && gpu < bit_size(gres->topo_gres_bitmap[t]) &&
            bit_test(gres->topo_gres_bitmap[t], gpu))
            return t;
    return -1;
}

/* A node as it is, and the part of a GPU's compute that the job claims there. */
struct claimed {
    const struct sluice_node_gres *node;
    struct sluice_node_view view;
    uint32_t percent;
};

/* May `amount` shares of the GPU be given out? */
static bool share_fits(const struct claimed *claimed, bitoff_t gpu, uint64_t amount)
{
    const struct sluice_node_gres *node = claimed->node;
    int t = topo_of(node->shard, gpu);
    return t >= 0 && !held_whole(node->gpu, gpu) &&
           node->shard->topo_gres_cnt_avail[t] >= node->shard->topo_gres_cnt_alloc[t] + amount &&
           unclaimed(&claimed->view, gpu, claimed->percent);
}

/* May the GPU be given out whole? */
static bool whole_fits(const struct sluice_node_gres *node, bitoff_t gpu)
{
    int t = topo_of(node->shard, gpu);
    return !held_whole(node->gpu, gpu) && (t < 0 || !node->shard->topo_gres_cnt_alloc[t]);
}

static uint64_t type_of(const struct sluice_node_gres *node, bitoff_t gpu)
{
    int t = topo_of(node->gpu, gpu);
    return t >= 0 && node->gpu->topo_type_id ? node->gpu->topo_type_id[t] : 0;
}

static enum sluice_overlap part_shares(gres_job_state_t *shard, const struct claimed *claimed, uint32_t index)
{
    bitstr_t *bits = picked(shard, index);
    if (!bits || bit_set_count(bits) != 1 || !claimed->node->shard || !shard->gres_cnt_node_select)
        return SLUICE_OVERLAP_NONE;
    uint64_t amount = shard->gres_cnt_node_select[index];
    bitoff_t count = bit_size(bits), other = 0;
    if (share_fits(claimed, bit_ffs(bits), amount))
        return SLUICE_OVERLAP_NONE;
    while (other < count && !share_fits(claimed, other, amount))
        other++;
    if (other == count)
        return SLUICE_OVERLAP_STUCK;
    move_share(shard, index, UINT32_C(1) << other);
    return SLUICE_OVERLAP_MOVED;
}

static enum sluice_overlap part_whole(gres_job_state_t *gpu, const struct sluice_node_gres *node, uint32_t index)
{
    bitstr_t *bits = picked(gpu, index);
    enum sluice_overlap verdict = SLUICE_OVERLAP_NONE;
    for (bitoff_t i = 0; bits && node->gpu && i < bit_size(bits); i++) {
        if (!bit_test(bits, i) || whole_fits(node, i))
            continue;
        bitoff_t other = 0;
        while (other < bit_size(bits) &&
               (bit_test(bits, other) || !whole_fits(node, other) || type_of(node, other) != type_of(node, i)))
            other++;
        if (other == bit_size(bits))
            return SLUICE_OVERLAP_STUCK;
        bit_clear(bits, i);
        bit_set(bits, other);
        verdict = SLUICE_OVERLAP_MOVED;
    }
    return verdict;
}

enum sluice_overlap sluice_gpus_part_overlaps(struct sluice_mirror *mirror, job_record_t *job, uint32_t *node)
{
    enum sluice_overlap verdict = SLUICE_OVERLAP_NONE;
    struct job_gres gres = gres_of(job->gres_list_req);
    if ((!gres.gpu && !gres.shard) || !job->job_resrcs || !job->job_resrcs->node_bitmap || gets_whole_nodes(job))
        return verdict;
    bitstr_t *nodes = job->job_resrcs->node_bitmap;
    struct claimed claimed = {.percent = gres.shard ? sluice_job_gpu_share(job) : 0};
    for (bitoff_t i = bit_ffs(nodes), last = bit_fls(nodes); i >= 0 && i <= last; i++) {
        if (!bit_test(nodes, i))
            continue;
        struct sluice_node_gres of_node = sluice_gres_of_node(node_record_table_ptr[i]);
        if (!of_node.shard)
            continue;
        claimed.node = &of_node;
        if (sluice_node_read(sluice_mirror_cluster(mirror), (uint32_t)i, &claimed.view, NULL))
            claimed.view.gpu_count = 0;
        enum sluice_overlap whole = gres.gpu ? part_whole(gres.gpu, &of_node, (uint32_t)i) : SLUICE_OVERLAP_NONE;
        enum sluice_overlap shares = gres.shard ? part_shares(gres.shard, &claimed, (uint32_t)i) : SLUICE_OVERLAP_NONE;
        if (whole == SLUICE_OVERLAP_STUCK || shares == SLUICE_OVERLAP_STUCK) {
            *node = (uint32_t)i;
            return SLUICE_OVERLAP_STUCK;
        }
        if (whole || shares)
            verdict = SLUICE_OVERLAP_MOVED;
    }
    return verdict;
}

/* ---- cores near the chosen GPUs ---- */

/* The cores near the part's GPUs, per core of the node; false: all cores are near, or this is not known, or they are
 * too few. */
static bool near_cores(const struct sluice_part *part, bool *near)
{
    const node_record_t *record = node_record_table_ptr[part->node];
    uint32_t found = 0;
    if (!part->gpus || !record || !record->gres_list)
        return false;
    struct sluice_node_gres node = sluice_gres_of_node(record);
    memset(near, 0, record->tot_cores * sizeof(*near));
    for (bitoff_t gpu = 0; gpu < SLUICE_MAX_GPUS; gpu++) {
        if (!(part->gpus >> gpu & 1))
            continue;
        int t = topo_of(node.gpu, gpu);
        bitstr_t *cores = t >= 0 && node.gpu->topo_core_bitmap ? node.gpu->topo_core_bitmap[t] : NULL;
        if (!cores || bit_size(cores) != record->tot_cores)
            return false;
        for (bitoff_t core = 0; core < record->tot_cores; core++) {
            found += bit_test(cores, core) && !near[core];
            near[core] |= bit_test(cores, core) != 0;
        }
    }
    return found < record->tot_cores && (int64_t)found * record->tpc * 1000 >= part->cpus_milli;
}

bool sluice_gpus_exclude_far_cores(const struct sluice_part *parts, uint32_t count,
                                   struct sluice_core_exclusion *exclusion, struct sluice_job_test_rest *rest)
{
    bool any = false;
    for (uint32_t i = 0; i < count; i++) {
        const node_record_t *record = node_record_table_ptr[parts[i].node];
        bool near[record ? record->tot_cores + 1 : 1];
        if (!near_cores(&parts[i], near))
            continue;
        if (!any)
            sluice_exclusion_begin(exclusion, rest);
        any = true;
        for (uint32_t core = 0; core < record->tot_cores; core++)
            if (!near[core])
                sluice_exclusion_core(exclusion, parts[i].node, core);
    }
    return any;
}

/* ---- stock's own records ---- */

bool sluice_gpus_free_of_node(uint32_t node, int64_t *cpus, int64_t *memory_mib)
{
    const node_record_t *record = node_record_table_ptr[node];
    if (!select_node_usage || !record)
        return false;
    int64_t cores = record->tot_cores, used = 0;
    for (bitoff_t core = 0; core < record->tot_cores; core++) {
        bool usable = !record->node_spec_bitmap || bit_test(record->node_spec_bitmap, core);
        cores -= !usable;
        bool taken = false;
        for (const part_res_record_t *part = select_part_record; part && usable && !taken; part = part->next) {
            if (SLUICE_ROWS_STALE(part))
                return false;
            for (uint16_t row = 0; part->row && row < part->num_rows && !taken; row++) {
                bitstr_t **rows = part->row[row].row_bitmap;
                taken = rows && rows[node] && bit_test(rows[node], core);
            }
        }
        used += taken;
    }
    int64_t memory = (int64_t)record->real_memory - (int64_t)record->mem_spec_limit;
    *cpus = (cores - used) * record->tpc;
    *memory_mib = memory - (int64_t)select_node_usage[node].alloc_memory;
    return true;
}
