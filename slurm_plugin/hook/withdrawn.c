/* SPDX-License-Identifier: GPL-2.0-or-later */
#define SLUICE_SLURM_PRIVATE
#include "slurm_compat.h"

#include "hook/withdrawn.h"

#include "mirror/mirror.h"
#include "runtime/runtime.h"

#include "src/common/bitstring.h"
#include "src/common/list.h"
#include "src/common/node_conf.h"
#include "src/common/xmalloc.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* What we hold of one GPU in Slurm's records: not what a job holds. */
struct held {
    struct sluice_withdrawn_gpu which;
    bool whole;       /* its bit of gres/gpu */
    uint64_t shares;  /* of gres/shard */
    uint64_t threads; /* of gres/mps */
    bool wanted;      /* in the list in force */
};

static struct {
    struct held *held; /* in the list's order, which is sorted */
    uint32_t count;
    uint64_t generation; /* of the list that `held` was made of */
    bool off;            /* at level off */
    bool again;          /* check all, whatever last_node_update says */
    time_t node_update, looked;
} withdrawn;

/* ---- Slurm's records ---- */

static struct sluice_node_gres gres_of(const char *name)
{
    const node_record_t *node = find_node_record2((char *)(uintptr_t)name);
    return node ? sluice_gres_of_node(node) : (struct sluice_node_gres){NULL, NULL, NULL};
}

/* Slurm's text of what is in use is made again when it is asked for. */
static void free_gres_used(gres_node_state_t *gres)
{
    xfree(gres->gres_used);
}

/* Sums that Slurm keeps with the single entries: by type, and of all. */
static void add_to_sums(gres_node_state_t *gres, uint16_t entry, int64_t change)
{
    gres->gres_cnt_alloc = (uint64_t)((int64_t)gres->gres_cnt_alloc + change);
    for (uint16_t t = 0; gres->topo_type_id && gres->type_cnt_alloc && t < gres->type_cnt; t++)
        if (gres->type_id[t] == gres->topo_type_id[entry])
            gres->type_cnt_alloc[t] = (uint64_t)((int64_t)gres->type_cnt_alloc[t] + change);
    free_gres_used(gres);
}

/* The entry of a node's GRES that a GPU belongs to; -1: none, as before the node has registered. */
static int entry_of(const gres_node_state_t *gres, bitoff_t gpu)
{
    for (uint16_t t = 0; gres && gres->topo_gres_bitmap && gres->topo_gres_cnt_alloc && t < gres->topo_cnt; t++)
        if (gres->topo_gres_bitmap[t] && gpu < bit_size(gres->topo_gres_bitmap[t]) &&
            bit_test(gres->topo_gres_bitmap[t], gpu))
            return t;
    return -1;
}

static bool has_bit(const gres_node_state_t *gpu, bitoff_t i)
{
    return gpu && gpu->gres_bit_alloc && i < bit_size(gpu->gres_bit_alloc);
}

/* Set or clear a GPU's bit, and all that Slurm counts by it. */
static void change_bit(gres_node_state_t *gpu, bitoff_t i, bool set)
{
    int entry = entry_of(gpu, i);
    int64_t change = set ? 1 : -1;
    if (set)
        bit_set(gpu->gres_bit_alloc, i);
    else
        bit_clear(gpu->gres_bit_alloc, i);
    if (entry < 0) {
        gpu->gres_cnt_alloc = (uint64_t)((int64_t)gpu->gres_cnt_alloc + change);
        free_gres_used(gpu);
        return;
    }
    gpu->topo_gres_cnt_alloc[entry] = (uint64_t)((int64_t)gpu->topo_gres_cnt_alloc[entry] + change);
    add_to_sums(gpu, (uint16_t)entry, change);
}

/* Take the free shares of a GPU; true if there were any. */
static bool take_shares(gres_node_state_t *shared, bitoff_t gpu, uint64_t *ours)
{
    int entry = entry_of(shared, gpu);
    if (entry < 0 || !shared->topo_gres_cnt_avail)
        return false;
    uint64_t all = shared->topo_gres_cnt_avail[entry], used = shared->topo_gres_cnt_alloc[entry];
    if (used >= all)
        return false;
    *ours = used + *ours > all ? all - used : *ours; /* the records were made again without us */
    shared->topo_gres_cnt_alloc[entry] = all;
    add_to_sums(shared, (uint16_t)entry, (int64_t)(all - used));
    *ours += all - used;
    return true;
}

static bool give_shares(gres_node_state_t *shared, bitoff_t gpu, uint64_t *ours)
{
    int entry = entry_of(shared, gpu);
    uint64_t back = *ours;
    *ours = 0;
    if (entry < 0 || !back)
        return false;
    if (back > shared->topo_gres_cnt_alloc[entry])
        back = shared->topo_gres_cnt_alloc[entry];
    shared->topo_gres_cnt_alloc[entry] -= back;
    add_to_sums(shared, (uint16_t)entry, -(int64_t)back);
    return back > 0;
}

static bool take(struct held *held)
{
    struct sluice_node_gres gres = gres_of(held->which.node);
    bitoff_t gpu = (bitoff_t)held->which.gpu;
    bool changed = false;
    if (has_bit(gres.gpu, gpu) && !bit_test(gres.gpu->gres_bit_alloc, gpu)) {
        change_bit(gres.gpu, gpu, true);
        held->whole = changed = true;
    }
    changed |= take_shares(gres.shard, gpu, &held->shares);
    changed |= take_shares(gres.mps, gpu, &held->threads);
    return changed;
}

static bool give_back(struct held *held)
{
    struct sluice_node_gres gres = gres_of(held->which.node);
    bitoff_t gpu = (bitoff_t)held->which.gpu;
    bool changed = false;
    if (held->whole && has_bit(gres.gpu, gpu) && bit_test(gres.gpu->gres_bit_alloc, gpu)) {
        change_bit(gres.gpu, gpu, false);
        changed = true;
    }
    held->whole = false;
    changed |= give_shares(gres.shard, gpu, &held->shares);
    changed |= give_shares(gres.mps, gpu, &held->threads);
    return changed;
}

/* ---- the list ---- */

static int compare(const void *which, const void *held)
{
    const struct sluice_withdrawn_gpu *one = which, *other = &((const struct held *)held)->which;
    int names = strcmp(one->node, other->node);
    return names ? names : (one->gpu > other->gpu) - (one->gpu < other->gpu);
}

static struct held *find(const struct sluice_withdrawn_gpu *which)
{
    return withdrawn.count ? bsearch(which, withdrawn.held, withdrawn.count, sizeof(*withdrawn.held), compare) : NULL;
}

/* Follow the list: GPUs that are no longer in it are given back. True if a record was changed. */
static bool follow_list(bool off)
{
    const struct sluice_withdrawn *list = sluice_withdrawn_acquire();
    bool changed = false;
    if (!list)
        return false;
    uint32_t count = off ? 0 : list->listed.count;
    struct held *fresh = calloc(count + 1, sizeof(*fresh));
    if (fresh) {
        for (uint32_t i = 0; i < count; i++) {
            struct held *before = find(&list->gpus[i]);
            if (before) {
                before->wanted = true;
                fresh[i] = *before;
            }
            fresh[i].which = list->gpus[i];
            fresh[i].wanted = false;
        }
        for (uint32_t i = 0; i < withdrawn.count; i++)
            if (!withdrawn.held[i].wanted)
                changed |= give_back(&withdrawn.held[i]);
        free(withdrawn.held);
        withdrawn.held = fresh;
        withdrawn.count = count;
        withdrawn.generation = list->generation;
        withdrawn.off = off;
        withdrawn.again = true;
    }
    sluice_withdrawn_release(list);
    return changed;
}

bool sluice_withdrawn_apply(void)
{
    bool off = sluice_settings_level() == SLUICE_LEVEL_OFF, changed = false;
    if (withdrawn.generation != sluice_withdrawn_generation() || withdrawn.off != off)
        changed = follow_list(off);
    /* Times are whole seconds: what changed in the second of the last look may have been missed by it. */
    if (!withdrawn.count ||
        (!withdrawn.again && withdrawn.node_update == last_node_update && withdrawn.looked > last_node_update))
        return changed;
    withdrawn.looked = time(NULL);
    uint32_t whole = 0;
    for (uint32_t i = 0; i < withdrawn.count; i++) {
        changed |= take(&withdrawn.held[i]);
        whole += withdrawn.held[i].whole;
    }
    atomic_store_explicit(sluice_status_counter("withdrawn.held"), whole, memory_order_relaxed);
    withdrawn.again = false;
    if (changed)
        last_node_update = time(NULL);
    withdrawn.node_update = last_node_update;
    return changed;
}

void sluice_withdrawn_forget(void)
{
    for (uint32_t i = 0; i < withdrawn.count; i++) {
        withdrawn.held[i].whole = false;
        withdrawn.held[i].shares = withdrawn.held[i].threads = 0;
    }
    withdrawn.again = true;
}

void sluice_withdrawn_look_again(void)
{
    withdrawn.again = true;
}

void sluice_withdrawn_stop(void)
{
    free(withdrawn.held);
    memset(&withdrawn, 0, sizeof(withdrawn));
}
