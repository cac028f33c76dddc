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

/* Entry `which` of a node: a GPU's number, ENTRY_IDLE or ENTRY_NODE. */
static uint32_t entry_of(const struct score_index *index, uint32_t node, int which)
{
    uint32_t gpus_left_out = which < ENTRY_IDLE ? 0 : ENTRY_IDLE - index->kinds[index->filings[node].kind]->gpu_count;
    return index->filings[node].first_entry + (uint32_t)which - gpus_left_out;
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

static void raise(struct bounds *bounds, const struct bounds *by)
{
    bounds->cpus = larger(bounds->cpus, by->cpus);
    bounds->host_memory = larger(bounds->host_memory, by->host_memory);
    bounds->gpu_memory = larger(bounds->gpu_memory, by->gpu_memory);
    bounds->compute = larger(bounds->compute, by->compute);
}

/* Recompute an entry's bounds from itself and its children. */
static void pull(struct entry *entries, uint32_t at)
{
    struct entry *entry = &entries[at];
    entry->bounds = entry->free;
    raise(&entry->bounds, &entries[entry->left].bounds);
    raise(&entry->bounds, &entries[entry->right].bounds);
}

/* Below the entry `gone` went away and `come` came; mostly that is seen without a look at the children. */
static void settle(struct entry *entries, uint32_t at, const struct bounds *gone, const struct bounds *come)
{
    struct bounds *bounds = &entries[at].bounds;
    /* Most entries have all of their compute, the entry itself among them. */
    if (gone->cpus == bounds->cpus || gone->host_memory == bounds->host_memory ||
        gone->gpu_memory == bounds->gpu_memory ||
        (gone->compute == bounds->compute && entries[at].free.compute < bounds->compute))
        pull(entries, at);
    else
        raise(bounds, come);
}

/* Cut the tree `root` into what goes before and what goes after the entry `at`. */
static void split(struct entry *entries, uint32_t root, uint32_t at, uint32_t *before, uint32_t *after)
{
    if (root == NO_ENTRY) {
        *before = *after = NO_ENTRY;
        return;
    }
    if (goes_before(entries, root, at)) {
        *before = root;
        split(entries, entries[root].right, at, &entries[root].right, after);
    } else {
        *after = root;
        split(entries, entries[root].left, at, before, &entries[root].left);
    }
    pull(entries, root);
}

/* Join two trees; all of `before` goes before all of `after`. */
static uint32_t join(struct entry *entries, uint32_t before, uint32_t after)
{
    if (before == NO_ENTRY || after == NO_ENTRY)
        return before == NO_ENTRY ? after : before;
    uint32_t top = priority(before) > priority(after) ? before : after;
    if (top == before)
        entries[top].right = join(entries, entries[top].right, after);
    else
        entries[top].left = join(entries, before, entries[top].left);
    pull(entries, top);
    return top;
}

static void insert(struct entry *entries, uint32_t *root, uint32_t at)
{
    while (*root != NO_ENTRY && priority(at) < priority(*root)) {
        struct entry *entry = &entries[*root];
        raise(&entry->bounds, &entries[at].free);
        root = goes_before(entries, at, *root) ? &entry->left : &entry->right;
    }
    split(entries, *root, at, &entries[at].left, &entries[at].right);
    pull(entries, at);
    *root = at;
}

static void erase(struct entry *entries, uint32_t *root, uint32_t at)
{
    static const struct bounds nothing = {0};
    uint32_t here = *root;
    if (here == at) {
        *root = join(entries, entries[at].left, entries[at].right);
        return;
    }
    erase(entries, goes_before(entries, at, here) ? &entries[here].left : &entries[here].right, at);
    settle(entries, here, &entries[at].free, &nothing);
}

/* The entry stays where it is; what it had free before was `old`. */
static void refresh(struct entry *entries, uint32_t root, uint32_t at, const struct bounds *old)
{
    if (root != at)
        refresh(entries, goes_before(entries, at, root) ? entries[root].left : entries[root].right, at, old);
    settle(entries, root, old, &entries[at].free);
}

static bool has_room(const struct bounds *bounds, const struct need *need)
{
    return bounds->cpus >= need->cpus && bounds->host_memory >= need->host_memory &&
           bounds->gpu_memory >= need->share && bounds->compute >= need->compute;
}

/* The first entry of the tree, ranked `from` or later, that has room for the need, or NO_ENTRY. */
static uint32_t first_with_room(const struct entry *entries, uint32_t root, const struct need *need, uint32_t from)
{
    if (root == NO_ENTRY || !has_room(&entries[root].bounds, need))
        return NO_ENTRY;
    if (entries[root].rank >= from) {
        uint32_t found = first_with_room(entries, entries[root].left, need, from);
        if (found != NO_ENTRY)
            return found;
        if (has_room(&entries[root].free, need))
            return root;
    }
    return first_with_room(entries, entries[root].right, need, from);
}

uint32_t sluice_next_allowed(const struct need *need, uint32_t node)
{
    for (size_t word = node / 64; word < need->allowed_words; word++) {
        uint64_t set = need->allowed[word];
        if (word == node / 64)
            set &= ~(uint64_t)0 << (node % 64);
        if (set)
            return (uint32_t)(word * 64) + (uint32_t)__builtin_ctzll(set);
    }
    return NONE;
}

/* The same, of those that have so many idle GPUs: for whole GPUs a bucket has no others. */
static uint32_t next_alike(const struct sluice_cluster *cluster, const struct need *need, int idle, uint32_t node)
{
    const uint64_t *at_least = cluster->open[idle], *more = idle + 1 < KINDS ? cluster->open[idle + 1] : NULL;
    for (size_t word = node / 64; word < need->allowed_words && word < (cluster->node_count + 63) / 64; word++) {
        uint64_t set = need->allowed[word] & at_least[word] & ~(more ? more[word] : 0);
        if (word == node / 64)
            set &= ~(uint64_t)0 << (node % 64);
        if (set)
            return (uint32_t)(word * 64) + (uint32_t)__builtin_ctzll(set);
    }
    return NONE;
}

/* Is the node in the bucket, one of nodes by idle GPUs, and has it room? Without a walk through the tree. */
static bool is_good(const struct score_index *index, const struct bucket *bucket, const struct need *need,
                    uint32_t node)
{
    const struct filing *filing = &index->filings[node];
    const uint8_t slot = filing->slot[ENTRY_IDLE];
    return slot != NO_SLOT && &index->kinds[filing->kind]->groups[filing->kappa].buckets[slot] == bucket &&
           has_room(&index->entries[entry_of(index, node, ENTRY_IDLE)].free, need);
}

/*
 * Whole GPUs on allowed nodes, where ranks are the nodes' numbers: the bitmaps say which nodes are allowed and have as
 * many idle GPUs, and most often the first of them is the one. The tree passes over those without room.
 */
static uint32_t first_allowed(const struct sluice_cluster *cluster, const struct bucket *bucket,
                              const struct need *need, struct reach *reach)
{
    const struct entry *entries = cluster->index->entries;
    const int idle = sluice_count(cluster->nodes[entries[bucket->root].node].idle);
    uint32_t from = next_alike(cluster, need, idle, reach->from);
    while (from < reach->before) {
        if (is_good(cluster->index, bucket, need, from))
            return from;
        uint32_t found = first_with_room(entries, bucket->root, need, from);
        if (found == NO_ENTRY || entries[found].rank >= reach->before)
            return NONE;
        if (sluice_node_allowed(need, entries[found].node))
            return entries[found].node;
        if (++reach->met > reach->patience)
            return NONE;
        from = next_alike(cluster, need, idle, entries[found].node + 1);
    }
    return NONE;
}

uint32_t sluice_bucket_first(const struct sluice_cluster *cluster, const struct bucket *bucket, const struct need *need,
                             struct reach *reach)
{
    const struct entry *entries = cluster->index->entries;
    if (bucket->root == NO_ENTRY || bucket->first_rank >= reach->before || !has_room(&bucket->bounds, need))
        return NONE;
    if (need->allowed && need->gpus && !need->share && !cluster->ordered)
        return first_allowed(cluster, bucket, need, reach);
    for (uint32_t from = reach->from; from < reach->before;) {
        uint32_t found = first_with_room(entries, bucket->root, need, from);
        if (found == NO_ENTRY || entries[found].rank >= reach->before)
            return NONE;
        if (sluice_node_allowed(need, entries[found].node))
            return entries[found].node;
        if (++reach->met > reach->patience)
            return NONE;
        /* Where ranks are the nodes' numbers, go on with the next node that is allowed. */
        from = cluster->ordered ? entries[found].rank + 1 : sluice_next_allowed(need, entries[found].node + 1);
    }
    return NONE;
}

/* ---- filing nodes ---- */

static void unfile(struct score_index *index, uint32_t node, int which)
{
    struct filing *filing = &index->filings[node];
    struct node_kind *kind = index->kinds[filing->kind];
    struct group *group = &kind->groups[filing->kappa];
    uint8_t slot = filing->slot[which];
    struct bucket *bucket = &group->buckets[slot];
    uint32_t at = entry_of(index, node, which);
    erase(index->entries, &bucket->root, at);
    filing->slot[which] = NO_SLOT;
    if (bucket->root == NO_ENTRY) {
        group->filled[slot / 64] &= ~((uint64_t)1 << (slot % 64));
        if (slot == SLOT_NODE)
            kind->kappas &= ~(1u << filing->kappa);
        return;
    }
    bucket->bounds = index->entries[bucket->root].bounds;
    if (index->entries[at].rank == bucket->first_rank) {
        uint32_t first = bucket->root;
        while (index->entries[first].left != NO_ENTRY)
            first = index->entries[first].left;
        bucket->first_rank = index->entries[first].rank;
    }
}

/* What an entry has free. */
static struct bounds free_of(const struct sluice_cluster *cluster, uint32_t node, int which)
{
    const struct node *row = &cluster->nodes[node];
    struct bounds room = {.cpus = row->cpus_free, .host_memory = row->host_memory_free, .compute = ALL_COMPUTE};
    if (which == ENTRY_IDLE) {
        room.gpu_memory = sluice_shape_of(cluster, node)->memory.mib[0];
    } else if (which != ENTRY_NODE) {
        room.gpu_memory = cluster->gpu_free[node].mib[which];
        room.compute = cluster->compute_free[node].percent[which];
    }
    return room;
}

/* File an entry under its node's kind and kappa, or update it in its place. */
static void file(const struct sluice_cluster *cluster, uint32_t node, int which, uint8_t slot)
{
    struct score_index *index = cluster->index;
    struct filing *filing = &index->filings[node];
    const struct node *row = &cluster->nodes[node];
    struct node_kind *kind = index->kinds[filing->kind];
    struct group *group = &kind->groups[filing->kappa];
    struct bucket *bucket = &group->buckets[slot];
    uint32_t at = entry_of(index, node, which);
    struct entry *entry = &index->entries[at];
    struct bounds old = entry->free;
    entry->free = free_of(cluster, node, which);
    if (filing->slot[which] == slot) {
        refresh(index->entries, bucket->root, at, &old);
    } else {
        entry->rank = row->rank;
        entry->node = node;
        if (bucket->root == NO_ENTRY || row->rank < bucket->first_rank)
            bucket->first_rank = row->rank;
        insert(index->entries, &bucket->root, at);
        filing->slot[which] = slot;
        group->filled[slot / 64] |= (uint64_t)1 << (slot % 64);
        kind->kappas |= 1u << filing->kappa;
    }
    bucket->bounds = index->entries[bucket->root].bounds;
}

/* The slot of each entry as the node is now, all NO_SLOT if it takes nothing. */
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

/* The node is of this kind from now on; it has entries for all its GPUs, though few are ever filed. */
static void set_kind(struct score_index *index, uint32_t node, uint8_t kind, uint32_t gpus)
{
    struct filing *filing = &index->filings[node];
    if (filing->first_entry)
        index->kinds[filing->kind]->nodes--;
    if (!filing->first_entry) {
        filing->first_entry = index->entry_count;
        index->entry_count += gpus + 2;
        memset(filing->slot, NO_SLOT, sizeof filing->slot);
    }
    filing->kind = kind;
    index->kinds[kind]->nodes++;
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
    const struct shape *shape = &cluster->shapes[class->shape];
    bool is_new = !filing->first_entry;
    int gpus = (int)shape->gpu_count;
    uint8_t kappa = (uint8_t)sluice_kappa_of(cluster, node), slots[ENTRIES];
    uint8_t kind =
        is_new || class->cpus != index->kinds[filing->kind]->cpus ? kind_of(index, shape, class->cpus) : filing->kind;
    slots_of(cluster, node, slots);
    if (!is_new) {
        bool moved = kind != filing->kind || kappa != filing->kappa;
        for (int i = 0; i < ENTRIES; i = next_entry(i, gpus))
            if (filing->slot[i] != NO_SLOT && (moved || slots[i] != filing->slot[i]))
                unfile(index, node, i);
    }
    if (is_new || kind != filing->kind)
        set_kind(index, node, kind, shape->gpu_count);
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
            file(cluster, node, i, slots[i]);
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
    index->entry_count = 1;
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

/* Walks a tree; false where its order, heap or bounds are wrong. `last` is the entry met before. */
static bool tree_sound(const struct entry *entries, uint32_t root, uint32_t *last, uint32_t *count)
{
    if (root == NO_ENTRY)
        return true;
    const struct entry *entry = &entries[root];
    struct bounds bounds = entry->free;
    raise(&bounds, &entries[entry->left].bounds);
    raise(&bounds, &entries[entry->right].bounds);
    if (memcmp(&bounds, &entry->bounds, sizeof bounds) != 0 ||
        (entry->left && priority(entry->left) > priority(root)) ||
        (entry->right && priority(entry->right) > priority(root)) || !tree_sound(entries, entry->left, last, count) ||
        (*last && !goes_before(entries, *last, root)))
        return false;
    *last = root;
    ++*count;
    return tree_sound(entries, entry->right, last, count);
}

static bool bucket_sound(const struct entry *entries, const struct bucket *bucket, uint32_t *count)
{
    uint32_t last = NO_ENTRY, first = bucket->root;
    if (first == NO_ENTRY)
        return true;
    while (entries[first].left != NO_ENTRY)
        first = entries[first].left;
    return tree_sound(entries, bucket->root, &last, count) && entries[first].rank == bucket->first_rank &&
           memcmp(&bucket->bounds, &entries[bucket->root].bounds, sizeof bucket->bounds) == 0;
}

/* Is the entry what the node is now? */
static bool entry_sound(const struct sluice_cluster *cluster, uint32_t node, int which)
{
    const struct node *row = &cluster->nodes[node];
    const struct entry *entry = &cluster->index->entries[entry_of(cluster->index, node, which)];
    struct bounds room = free_of(cluster, node, which);
    return entry->node == node && entry->rank == row->rank && memcmp(&entry->free, &room, sizeof room) == 0;
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
            if (slots[i] != NO_SLOT && !entry_sound(cluster, node, i))
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
                uint32_t before = walked;
                if (!bucket_sound(index->entries, &group->buckets[slot], &walked) ||
                    sluice_bit(group->filled, slot) != (walked > before))
                    return false;
            }
        }
    }
    return walked == filed;
}
