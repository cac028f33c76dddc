/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "gpus.h"

#include "src/common/bitstring.h"
#include "src/common/list.h"
#include "src/common/node_conf.h"

#include SLUICE_STOCK_NODE_DATA
#include SLUICE_STOCK_PART_DATA

#include <string.h>

/* ---- a job's GRES ---- */

struct job_gres {
    gres_job_state_t *gpu, *shard;
};

static int find_job_gres(void *item, void *argument)
{
    const gres_state_t *state = item;
    struct job_gres *found = argument;
    if (state->gres_name && !strcmp(state->gres_name, "gpu"))
        found->gpu = state->gres_data;
    else if (state->gres_name && !strcmp(state->gres_name, "shard"))
        found->shard = state->gres_data;
    return 0;
}

static struct job_gres gres_of(struct xlist *list)
{
    struct job_gres found = {NULL, NULL};
    if (list)
        list_for_each_ro(list, find_job_gres, &found);
    return found;
}

static uint32_t mask_of(bitstr_t *bits)
{
    uint32_t mask = 0;
    for (bitoff_t i = 0; i < bit_size(bits) && i < SLUICE_MAX_GPUS; i++)
        mask |= (uint32_t)(bit_test(bits, i) ? 1 : 0) << i;
    return mask;
}

static void set_mask(bitstr_t *bits, uint32_t mask)
{
    for (bitoff_t i = 0; i < bit_size(bits); i++) {
        if (i < SLUICE_MAX_GPUS && (mask >> i & 1))
            bit_set(bits, i);
        else
            bit_clear(bits, i);
    }
}

/* What stock picked on a node, or NULL. */
static bitstr_t *picked(const gres_job_state_t *gres, uint32_t node)
{
    if (!gres || !gres->gres_bit_select || node >= gres->total_node_cnt)
        return NULL;
    return gres->gres_bit_select[node];
}

static bool gets_whole_nodes(const job_record_t *job)
{
    return job->details && SLUICE_WHOLE_NODE(job->details);
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
    if (__builtin_popcount(stock) != __builtin_popcount(part->gpus) ||
        !sluice_mirror_node_agrees(mirror, part->node) ||
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
        view.gpu_memory_mib_free[gpu] < (int64_t)job->gres_cnt_node_select[part->node])
        return false;
    move_share(job, part->node, part->gpus);
    return true;
}

bool sluice_gpus_choose(struct sluice_mirror *mirror, job_record_t *job, const struct sluice_part *parts,
                        uint32_t count)
{
    struct job_gres gres = gres_of(job->gres_list_req);
    bool all = true;
    if (gets_whole_nodes(job) || (gres.gpu && gres.shard) || (!gres.gpu && !gres.shard))
        return true;
    for (uint32_t i = 0; i < count; i++)
        all &= choose_on_node(mirror, &gres, &parts[i]);
    return all;
}

/* ---- what became of it ---- */

/* Every entry of the job's allocation that stands for a kind of GPU. */
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
        (*chosen)++;
        *kept += allocated.mask == parts[i].gpus;
    }
}

/* ---- shares on GPUs that are held whole ---- */

struct node_gres {
    gres_node_state_t *shard;
};

static int find_shard(void *item, void *argument)
{
    const gres_state_t *state = item;
    if (state->gres_name && !strcmp(state->gres_name, "shard"))
        ((struct node_gres *)argument)->shard = state->gres_data;
    return 0;
}

/* May `amount` shares of GPU `gpu` be given out, as the node stands? */
static bool share_fits(const gres_node_state_t *shard, bitoff_t gpu, uint64_t amount)
{
    const gres_node_state_t *whole = SLUICE_GRES_OTHER(shard);
    if (whole && whole->gres_bit_alloc && gpu < bit_size(whole->gres_bit_alloc) && bit_test(whole->gres_bit_alloc, gpu))
        return false;
    for (uint16_t t = 0; t < shard->topo_cnt; t++)
        if (shard->topo_gres_bitmap && shard->topo_gres_bitmap[t] && gpu < bit_size(shard->topo_gres_bitmap[t]) &&
            bit_test(shard->topo_gres_bitmap[t], gpu))
            return shard->topo_gres_cnt_avail[t] >= shard->topo_gres_cnt_alloc[t] + amount;
    return false;
}

enum sluice_shards sluice_gpus_check_shards(job_record_t *job, uint32_t *node)
{
    enum sluice_shards verdict = SLUICE_SHARDS_FINE;
    struct job_gres gres = gres_of(job->gres_list_req);
    if (!gres.shard || !job->job_resrcs || !job->job_resrcs->node_bitmap || gets_whole_nodes(job))
        return verdict;
    bitstr_t *nodes = job->job_resrcs->node_bitmap;
    for (bitoff_t i = bit_ffs(nodes), last = bit_fls(nodes); i >= 0 && i <= last; i++) {
        bitstr_t *bits = bit_test(nodes, i) ? picked(gres.shard, (uint32_t)i) : NULL;
        struct node_gres of_node = {NULL};
        if (bits && node_record_table_ptr[i]->gres_list)
            list_for_each_ro(node_record_table_ptr[i]->gres_list, find_shard, &of_node);
        if (!of_node.shard || bit_set_count(bits) != 1 || !gres.shard->gres_cnt_node_select)
            continue;
        uint64_t amount = gres.shard->gres_cnt_node_select[i];
        bitoff_t gpu = bit_ffs(bits), count = bit_size(bits);
        if (share_fits(of_node.shard, gpu, amount))
            continue;
        for (gpu = 0; gpu < count && !share_fits(of_node.shard, gpu, amount);)
            gpu++;
        if (gpu == count) {
            *node = (uint32_t)i;
            return SLUICE_SHARDS_NONE;
        }
        move_share(gres.shard, (uint32_t)i, UINT32_C(1) << gpu);
        verdict = SLUICE_SHARDS_MOVED;
    }
    return verdict;
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
