/* SPDX-License-Identifier: Apache-2.0 */
/* The buckets of score_index.h, kept up to date as nodes change. */
#include "score_index.h"

#include <stdlib.h>
#include <string.h>

/* ---- what the policy sees of a node ---- */

/* ceil(1000 * 2^(i / 2)) */
static const int32_t half_octaves[KAPPA_CLOSED - 1] = {
    1000,  1415,  2000,  2829,   4000,   5657,   8000,   11314,  16000,  22628,   32000,
    45255, 64000, 90510, 128000, 181020, 256000, 362039, 512000, 724078, 1024000, 1448155,
};

int32_t sluice_kappa_floor(int kappa)
{
    return kappa ? half_octaves[kappa - 1] : 0;
}

static int kappa_of_ratio(int32_t cpus_per_gpu)
{
    if (cpus_per_gpu < half_octaves[0])
        return 0;
    int octave = 31 - __builtin_clz((unsigned)cpus_per_gpu / 1000);
    int kappa = 2 * octave + 1;
    if (kappa >= KAPPA_CLOSED - 1)
        return KAPPA_CLOSED - 1;
    return kappa + (cpus_per_gpu >= half_octaves[kappa]);
}

int sluice_kappa_of(const struct sluice_cluster *cluster, uint32_t node)
{
    const struct shape *shape = sluice_shape_of(cluster, node);
    const struct gpu_amounts *free = &cluster->gpu_free[node];
    int open = 0;
    for (unsigned set = cluster->nodes[node].healthy; set; set &= set - 1) {
        int gpu = __builtin_ctz(set);
        open += (int64_t)free->mib[gpu] * 4 >= shape->memory.mib[gpu];
    }
    return open ? kappa_of_ratio(cluster->nodes[node].cpus_free / open) : KAPPA_CLOSED;
}

/* The kind of a node, made where it is new. */
static uint8_t kind_of(struct score_index *index, const struct shape *shape, int32_t cpus)
{
    if (!shape->uniform)
        return KIND_OTHER;
    for (uint32_t i = KIND_OTHER + 1; i < index->kind_count; i++) {
        const struct node_kind *kind = index->kinds[i];
        if (kind->gpu_count == shape->gpu_count && kind->cpus == cpus && kind->model == shape->model[0] &&
            kind->capability == shape->capability[0] && kind->memory == shape->memory.mib[0])
            return (uint8_t)i;
    }
    struct node_kind *made = index->kind_count < MAX_NODE_KINDS ? calloc(1, sizeof *made) : NULL;
    if (!made)
        return KIND_OTHER;
    made->model = shape->model[0];
    made->capability = shape->capability[0];
    made->memory = shape->memory.mib[0];
    made->gpu_count = shape->gpu_count;
    made->cpus = cpus;
    index->kinds[index->kind_count] = made;
    return (uint8_t)index->kind_count++;
}

/* ---- treaps ---- */

static uint32_t entry_of(uint32_t node, int which)
{
    return 1 + node * ENTRIES + (uint32_t)which;
}

static uint32_t node_of(uint32_t entry)
{
    return (entry - 1) / ENTRIES;
}

/* A bijection, so that no two entries are equal: Mueller's integer hash. */
static uint32_t priority(uint32_t entry)
{
    entry = (entry ^ entry >> 16) * 0x45d9f3bu;
    entry = (entry ^ entry >> 16) * 0x45d9f3bu;
    return entry ^ entry >> 16;
}

/* By rank; a node's own entries, whose ranks are equal, by number. */
static bool goes_before(const struct entry *entries, uint32_t a, uint32_t b)
{
    return entries[a].rank != entries[b].rank ? entries[a].rank < entries[b].rank : a < b;
}

static int32_t larger(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* Recompute an entry's bounds from its node and children. */
static void pull(const struct sluice_cluster *cluster, uint32_t at)
{
    struct entry *entries = cluster->index->entries, *entry = &entries[at];
    const struct node *row = &cluster->nodes[node_of(at)];
    const struct bounds *left = &entries[entry->left].bounds, *right = &entries[entry->right].bounds;
    entry->bounds.cpus = larger(row->cpus_free, larger(left->cpus, right->cpus));
    entry->bounds.host_memory = larger(row->host_memory_free, larger(left->host_memory, right->host_memory));
    entry->bounds.gpu_memory = larger(entry->gpu_memory, larger(left->gpu_memory, right->gpu_memory));
}

/* Cut the tree `root` into what goes before and what goes after the entry `at`. */
static void split(const struct sluice_cluster *cluster, uint32_t root, uint32_t at, uint32_t *before, uint32_t *after)
{
    struct entry *entries = cluster->index->entries;
    if (root == NO_ENTRY) {
        *before = *after = NO_ENTRY;
        return;
    }
    if (goes_before(entries, root, at)) {
        *before = root;
        split(cluster, entries[root].right, at, &entries[root].right, after);
    } else {
        *after = root;
        split(cluster, entries[root].left, at, before, &entries[root].left);
    }
    pull(cluster, root);
}

/* Join two trees; all of `before` goes before all of `after`. */
static uint32_t join(const struct sluice_cluster *cluster, uint32_t before, uint32_t after)
{
    struct entry *entries = cluster->index->entries;
    if (before == NO_ENTRY || after == NO_ENTRY)
        return before == NO_ENTRY ? after : before;
    uint32_t top = priority(before) > priority(after) ? before : after;
    if (top == before)
        entries[top].right = join(cluster, entries[top].right, after);
    else
        entries[top].left = join(cluster, before, entries[top].left);
    pull(cluster, top);
    return top;
}

static uint32_t insert(const struct sluice_cluster *cluster, uint32_t root, uint32_t at)
{
    struct entry *entries = cluster->index->entries;
    if (root == NO_ENTRY || priority(at) > priority(root)) {
        split(cluster, root, at, &entries[at].left, &entries[at].right);
        root = at;
    } else if (goes_before(entries, at, root)) {
        entries[root].left = insert(cluster, entries[root].left, at);
    } else {
        entries[root].right = insert(cluster, entries[root].right, at);
    }
    pull(cluster, root);
    return root;
}

static uint32_t erase(const struct sluice_cluster *cluster, uint32_t root, uint32_t at)
{
    struct entry *entries = cluster->index->entries;
    if (root == at)
        return join(cluster, entries[at].left, entries[at].right);
    if (goes_before(entries, at, root))
        entries[root].left = erase(cluster, entries[root].left, at);
    else
        entries[root].right = erase(cluster, entries[root].right, at);
    pull(cluster, root);
    return root;
}

/* The entry's node changed, but it stays where it is: bring the bounds above it up to date. */
static void refresh(const struct sluice_cluster *cluster, uint32_t root, uint32_t at)
{
    const struct entry *entries = cluster->index->entries;
    if (root != at)
        refresh(cluster, goes_before(entries, at, root) ? entries[root].left : entries[root].right, at);
    pull(cluster, root);
}

static bool has_room(const struct bounds *bounds, const struct need *need)
{
    return bounds->cpus >= need->cpus && bounds->host_memory >= need->host_memory && bounds->gpu_memory >= need->share;
}

/* The first entry of the tree that has room for the need, or NO_ENTRY. */
static uint32_t first_with_room(const struct sluice_cluster *cluster, uint32_t root, const struct need *need)
{
    const struct entry *entries = cluster->index->entries;
    if (root == NO_ENTRY || !has_room(&entries[root].bounds, need))
        return NO_ENTRY;
    uint32_t found = first_with_room(cluster, entries[root].left, need);
    if (found != NO_ENTRY)
        return found;
    const struct node *row = &cluster->nodes[node_of(root)];
    if (row->cpus_free >= need->cpus && row->host_memory_free >= need->host_memory &&
        entries[root].gpu_memory >= need->share && sluice_node_allowed(need, node_of(root)))
        return root;
    return first_with_room(cluster, entries[root].right, need);
}

uint32_t sluice_bucket_first(const struct sluice_cluster *cluster, const struct bucket *bucket, const struct need *need,
                             uint32_t before)
{
    if (bucket->root == NO_ENTRY || bucket->first_rank >= before || !has_room(&bucket->bounds, need))
        return NONE;
    uint32_t found = first_with_room(cluster, bucket->root, need);
    return found != NO_ENTRY && cluster->index->entries[found].rank < before ? node_of(found) : NONE;
}

/* ---- filing nodes ---- */

static void bucket_changed(const struct score_index *index, struct bucket *bucket)
{
    const struct entry *entries = index->entries;
    if (bucket->root == NO_ENTRY)
        return;
    uint32_t first = bucket->root;
    while (entries[first].left != NO_ENTRY)
        first = entries[first].left;
    bucket->first_rank = entries[first].rank;
    bucket->bounds = entries[bucket->root].bounds;
}

static void unfile(const struct sluice_cluster *cluster, uint32_t node, int which)
{
    struct score_index *index = cluster->index;
    struct filing *filing = &index->filings[node];
    uint8_t slot = filing->slot[which];
    struct node_kind *kind = index->kinds[filing->kind];
    struct group *group = &kind->groups[filing->kappa];
    struct bucket *bucket = &group->buckets[slot];
    bucket->root = erase(cluster, bucket->root, entry_of(node, which));
    bucket_changed(index, bucket);
    filing->slot[which] = NO_SLOT;
    if (bucket->root == NO_ENTRY) {
        group->filled[slot / 64] &= ~((uint64_t)1 << (slot % 64));
        if (slot == SLOT_NODE)
            kind->kappas &= ~(1u << filing->kappa);
    }
}

/* File an entry under filing's kind and kappa; `gpu_memory` is what its GPUs have free. */
static void file(const struct sluice_cluster *cluster, uint32_t node, int which, uint8_t slot, int32_t gpu_memory)
{
    struct score_index *index = cluster->index;
    struct filing *filing = &index->filings[node];
    uint32_t at = entry_of(node, which);
    struct node_kind *kind = index->kinds[filing->kind];
    struct group *group = &kind->groups[filing->kappa];
    struct bucket *bucket = &group->buckets[slot];
    index->entries[at].gpu_memory = gpu_memory;
    if (filing->slot[which] == slot) {
        refresh(cluster, bucket->root, at);
    } else {
        index->entries[at].rank = cluster->nodes[node].rank;
        bucket->root = insert(cluster, bucket->root, at);
        filing->slot[which] = slot;
        group->filled[slot / 64] |= (uint64_t)1 << (slot % 64);
        kind->kappas |= 1u << filing->kappa;
    }
    bucket_changed(index, bucket);
}

/* The slot of each entry as the node stands now, all NO_SLOT where it takes nothing. */
static void slots_of(const struct sluice_cluster *cluster, uint32_t node, uint8_t slots[ENTRIES])
{
    const struct node *row = &cluster->nodes[node];
    const struct shape *shape = sluice_shape_of(cluster, node);
    memset(slots, NO_SLOT, ENTRIES);
    if (!sluice_node_open(cluster, node))
        return;
    for (unsigned set = row->healthy & ~(unsigned)row->idle; set; set &= set - 1) {
        int gpu = __builtin_ctz(set);
        int32_t free = cluster->gpu_free[node].mib[gpu];
        if (free > 0)
            slots[gpu] = (uint8_t)sluice_level(free, shape->memory.mib[gpu]);
    }
    if (row->idle)
        slots[ENTRY_IDLE] = (uint8_t)(SLOT_IDLE + sluice_count(row->idle) - 1);
    slots[ENTRY_NODE] = SLOT_NODE;
}

static int32_t memory_of(const struct sluice_cluster *cluster, uint32_t node, int which)
{
    if (which == ENTRY_NODE)
        return 0;
    if (which == ENTRY_IDLE)
        return sluice_shape_of(cluster, node)->memory.mib[0];
    return cluster->gpu_free[node].mib[which];
}

static void count_kind(struct sluice_cluster *cluster, uint32_t node, uint8_t kind)
{
    struct score_index *index = cluster->index;
    struct filing *filing = &index->filings[node];
    if (filing->counted && filing->kind == kind)
        return;
    if (filing->counted)
        index->kinds[filing->kind]->nodes--;
    index->kinds[kind]->nodes++;
    filing->kind = kind;
    filing->counted = true;
    index->priced = false;
}

/* The entry after entry `i` of a node with so many GPUs. */
static int next_entry(int i, int gpus)
{
    return i + 1 < gpus || i >= ENTRY_IDLE ? i + 1 : ENTRY_IDLE;
}

void sluice_index_node_changed(struct sluice_cluster *cluster, uint32_t node)
{
    struct score_index *index = cluster->index;
    struct filing *filing = &index->filings[node];
    const struct node_class *class = sluice_class_of(cluster, node);
    uint8_t kind = filing->kind, kappa = (uint8_t)sluice_kappa_of(cluster, node), slots[ENTRIES];
    if (!filing->counted || class->cpus != index->kinds[kind]->cpus)
        kind = kind_of(index, &cluster->shapes[class->shape], class->cpus);
    slots_of(cluster, node, slots);

    bool moved = !filing->counted || kind != filing->kind || kappa != filing->kappa;
    int gpus = (int)cluster->shapes[class->shape].gpu_count;
    if (filing->counted)
        for (int i = 0; i < ENTRIES; i = next_entry(i, gpus))
            if (filing->slot[i] != NO_SLOT && (moved || slots[i] != filing->slot[i]))
                unfile(cluster, node, i);
    if (!filing->counted)
        memset(filing->slot, NO_SLOT, sizeof filing->slot);
    count_kind(cluster, node, kind);
    filing->kappa = kappa;

    if (kind == KIND_OTHER) {
        uint64_t bit = (uint64_t)1 << (node % 64);
        if (slots[ENTRY_NODE] == SLOT_NODE)
            index->others[node / 64] |= bit;
        else
            index->others[node / 64] &= ~bit;
        return;
    }
    for (int i = 0; i < ENTRIES; i = next_entry(i, gpus))
        if (slots[i] != NO_SLOT)
            file(cluster, node, i, slots[i], memory_of(cluster, node, i));
}

void sluice_index_order_changed(struct sluice_cluster *cluster)
{
    struct score_index *index = cluster->index;
    for (uint32_t i = KIND_OTHER + 1; i < index->kind_count; i++) {
        memset(index->kinds[i]->groups, 0, sizeof index->kinds[i]->groups);
        index->kinds[i]->kappas = 0;
    }
    for (uint32_t node = 0; node < cluster->node_count; node++)
        memset(index->filings[node].slot, NO_SLOT, ENTRIES);
    for (uint32_t node = 0; node < cluster->node_count; node++)
        sluice_index_node_changed(cluster, node);
}

/* ---- life ---- */

enum sluice_error sluice_index_new(struct sluice_cluster *cluster)
{
    struct score_index *index = calloc(1, sizeof *index);
    if (!index)
        return SLUICE_ERROR_NO_MEMORY;
    cluster->index = index;
    /* calloc, so that what no node uses takes no memory. */
    index->filings = calloc(cluster->size.max_nodes, sizeof *index->filings);
    index->entries = calloc((size_t)cluster->size.max_nodes * ENTRIES + 1, sizeof *index->entries);
    index->others = calloc(cluster->words, sizeof *index->others);
    index->kinds[KIND_OTHER] = calloc(1, sizeof *index->kinds[KIND_OTHER]);
    index->kind_count = 1;
    return index->filings && index->entries && index->others && index->kinds[KIND_OTHER] ? SLUICE_OK
                                                                                         : SLUICE_ERROR_NO_MEMORY;
}

void sluice_index_free(struct sluice_cluster *cluster)
{
    struct score_index *index = cluster->index;
    if (!index)
        return;
    for (uint32_t i = 0; i < index->kind_count; i++)
        free(index->kinds[i]);
    free(index->filings);
    free(index->entries);
    free(index->others);
    free(index->workload);
    free(index->weights);
    free(index);
    cluster->index = NULL;
}

/* ---- for tests ---- */

/* Walks a tree; false where order, heap, bounds or rank are wrong. `last` is the entry met before. */
static bool tree_sound(const struct sluice_cluster *cluster, uint32_t root, uint32_t *last, uint32_t *count)
{
    const struct entry *entries = cluster->index->entries;
    if (root == NO_ENTRY)
        return true;
    const struct entry *entry = &entries[root], *left = &entries[entry->left], *right = &entries[entry->right];
    const struct node *row = &cluster->nodes[node_of(root)];
    if ((entry->left && priority(entry->left) > priority(root)) ||
        (entry->right && priority(entry->right) > priority(root)) || entry->rank != row->rank)
        return false;
    if (!tree_sound(cluster, entry->left, last, count) || (*last && !goes_before(entries, *last, root)))
        return false;
    *last = root;
    ++*count;
    return entry->bounds.cpus == larger(row->cpus_free, larger(left->bounds.cpus, right->bounds.cpus)) &&
           entry->bounds.host_memory ==
               larger(row->host_memory_free, larger(left->bounds.host_memory, right->bounds.host_memory)) &&
           entry->bounds.gpu_memory ==
               larger(entry->gpu_memory, larger(left->bounds.gpu_memory, right->bounds.gpu_memory)) &&
           tree_sound(cluster, entry->right, last, count);
}

bool sluice_index_sound(const struct sluice_cluster *cluster)
{
    const struct score_index *index = cluster->index;
    uint32_t filed = 0, walked = 0;
    for (uint32_t node = 0; node < cluster->node_count; node++) {
        const struct filing *filing = &index->filings[node];
        bool other = filing->kind == KIND_OTHER;
        uint8_t slots[ENTRIES];
        slots_of(cluster, node, slots);
        if (sluice_bit(index->others, node) != (other && slots[ENTRY_NODE] != NO_SLOT))
            return false;
        if (other)
            memset(slots, NO_SLOT, sizeof slots);
        if (memcmp(slots, filing->slot, sizeof slots) != 0 || filing->kappa != sluice_kappa_of(cluster, node))
            return false;
        for (int i = 0; i < ENTRIES; i++) {
            filed += slots[i] != NO_SLOT;
            if (slots[i] != NO_SLOT && index->entries[entry_of(node, i)].gpu_memory != memory_of(cluster, node, i))
                return false;
        }
    }
    for (uint32_t i = KIND_OTHER + 1; i < index->kind_count; i++) {
        const struct node_kind *kind = index->kinds[i];
        for (int kappa = 0; kappa < KAPPAS; kappa++) {
            const struct group *group = &kind->groups[kappa];
            if ((kind->kappas >> kappa & 1) != sluice_bit(group->filled, SLOT_NODE))
                return false;
            for (uint32_t slot = 0; slot < SLOTS; slot++) {
                const struct bucket *bucket = &group->buckets[slot];
                uint32_t last = NO_ENTRY, before = walked;
                if (!tree_sound(cluster, bucket->root, &last, &walked) ||
                    sluice_bit(group->filled, slot) != (walked > before))
                    return false;
            }
        }
    }
    return walked == filed;
}
