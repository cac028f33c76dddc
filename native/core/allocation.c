/* SPDX-License-Identifier: Apache-2.0 */
/* Who holds what: commit, release, resize, and the check of the whole model. Contracts are in sluice/core.h. */
#include "cluster.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* An allocation's id is its slot and the generation of that slot, which is odd while it is in use. */
static uint64_t id_of(const struct sluice_cluster *cluster, uint32_t slot)
{
    return (uint64_t)cluster->allocations[slot].generation << 32 | slot;
}

/* The allocation of an id; NULL, with text, when there is none. */
static struct allocation *find_allocation(const struct sluice_cluster *cluster, uint64_t id,
                                          struct sluice_error_text *text)
{
    uint32_t slot = (uint32_t)id, generation = (uint32_t)(id >> 32);
    if (slot < cluster->size.max_allocations && (generation & 1) && cluster->allocations[slot].generation == generation)
        return &cluster->allocations[slot];
    sluice_fail(text, SLUICE_ERROR_UNKNOWN, "allocation %" PRIu64 " is not known, or released already", id);
    return NULL;
}

/* ---- the one place where a node's free amounts change ---- */

enum direction { TAKE = -1, GIVE = 1 };

static void move(struct sluice_cluster *cluster, const struct part *part, enum direction direction)
{
    struct node *row = &cluster->nodes[part->node];
    const struct shape *shape = sluice_shape_of(cluster, part->node);
    struct gpu_amounts *free_amounts = &cluster->gpu_free[part->node];
    uint8_t *compute_free = cluster->compute_free[part->node].percent;
    int64_t moved = 0;
    for (unsigned set = part->gpus; set; set &= set - 1) {
        int gpu = __builtin_ctz(set);
        int32_t amount = part->share ? part->share : shape->memory.mib[gpu];
        free_amounts->mib[gpu] += (int32_t)direction * amount;
        compute_free[gpu] = (uint8_t)(compute_free[gpu] + (int)direction * part->compute);
        moved += amount;
    }
    row->cpus_free += (int32_t)direction * part->cpus;
    row->host_memory_free += (int32_t)direction * part->host_memory;
    row->parts -= (uint32_t)direction;
    if (part->nics)
        cluster->nics_free[part->node] ^= part->nics;
    row->exclusive = direction == TAKE && part->exclusive;
    if (part->kind != NO_KIND)
        cluster->kinds[part->node][part->kind] -= (uint32_t)direction;
    cluster->totals.gpu_memory_mib_free += direction * moved;
    cluster->totals.cpus_milli_free += (int64_t)direction * part->cpus;
    cluster->totals.host_memory_mib_free += (int64_t)direction * part->host_memory;
    sluice_node_changed(cluster, part->node);
}

/* ---- checks ---- */

static enum sluice_error check_amounts(const struct sluice_part *part, struct sluice_error_text *text)
{
    if (part->gpu_memory_mib < 0 || part->gpu_memory_mib > SLUICE_MAX_GPU_MEMORY_MIB)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "node %" PRIu32 ": %" PRId64 " MiB of GPU memory must be 0 to %d",
                           part->node, part->gpu_memory_mib, SLUICE_MAX_GPU_MEMORY_MIB);
    if (part->gpu_memory_mib && !part->gpus)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "node %" PRIu32 ": %" PRId64 " MiB of GPU memory, but of no GPU",
                           part->node, part->gpu_memory_mib);
    if (part->gpu_compute_percent > (part->gpus ? ALL_COMPUTE : 0))
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "node %" PRIu32 ": %" PRIu32 " percent of GPU compute must be 0 to %d", part->node,
                           part->gpu_compute_percent, part->gpus ? ALL_COMPUTE : 0);
    if (part->cpus_milli < 0 || part->cpus_milli > SLUICE_MAX_CPUS_MILLI)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "node %" PRIu32 ": %" PRId64 " thousandths of a CPU must be 0 to %d", part->node,
                           part->cpus_milli, SLUICE_MAX_CPUS_MILLI);
    if (part->host_memory_mib < 0 || part->host_memory_mib > SLUICE_MAX_HOST_MEMORY_MIB)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "node %" PRIu32 ": %" PRId64 " MiB of host memory must be 0 to %d",
                           part->node, part->host_memory_mib, SLUICE_MAX_HOST_MEMORY_MIB);
    return SLUICE_OK;
}

/* Whether the node has what the part asks, in addition to `held`, which the same part has there already (all zero for
 * none). */
static enum sluice_error check_room(const struct sluice_cluster *cluster, const struct sluice_part *part,
                                    const struct part *held, struct sluice_error_text *text)
{
    const struct node *row = &cluster->nodes[part->node];
    const struct shape *shape = sluice_shape_of(cluster, part->node);
    if (part->cpus_milli > (int64_t)row->cpus_free + held->cpus)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "node %" PRIu32 ": %" PRId64 " thousandths of a CPU asked, %" PRId64 " free", part->node,
                           part->cpus_milli, (int64_t)row->cpus_free + held->cpus);
    if (part->host_memory_mib > (int64_t)row->host_memory_free + held->host_memory)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "node %" PRIu32 ": %" PRId64 " MiB of host memory asked, %" PRId64 " free", part->node,
                           part->host_memory_mib, (int64_t)row->host_memory_free + held->host_memory);
    for (unsigned set = part->gpus; set; set &= set - 1) {
        int gpu = __builtin_ctz(set);
        int64_t unused = cluster->gpu_free[part->node].mib[gpu];
        if (!held->gpus && part->gpu_memory_mib == 0 && unused != shape->memory.mib[gpu])
            return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                               "node %" PRIu32 " GPU %d: asked whole, but %" PRId64 " of its %" PRId32
                               " MiB are in use",
                               part->node, gpu, shape->memory.mib[gpu] - unused, shape->memory.mib[gpu]);
        if (part->gpu_memory_mib > unused + held->share)
            return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                               "node %" PRIu32 " GPU %d: %" PRId64 " MiB asked, %" PRId64 " free", part->node, gpu,
                               part->gpu_memory_mib, unused + held->share);
        uint32_t unclaimed = (uint32_t)cluster->compute_free[part->node].percent[gpu] + held->compute;
        if (part->gpu_compute_percent > unclaimed)
            return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                               "node %" PRIu32 " GPU %d: %" PRIu32 " percent of its compute asked, %" PRIu32
                               " unclaimed",
                               part->node, gpu, part->gpu_compute_percent, unclaimed);
    }
    uint32_t held_by_others = part->nics ? part->nics & ~(cluster->nics_free[part->node] | held->nics) : 0;
    if (held_by_others)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "node %" PRIu32 ": NICs 0x%" PRIx32 " are in use", part->node,
                           held_by_others);
    return SLUICE_OK;
}

static enum sluice_error check_placement(struct sluice_cluster *cluster, const struct sluice_placement *placement,
                                         struct sluice_error_text *text)
{
    static const struct part nothing;
    if (!placement->part_count)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "the placement has no parts");
    uint32_t mark = sluice_new_stamp(cluster);
    for (uint32_t i = 0; i < placement->part_count; i++) {
        const struct sluice_part *part = &placement->parts[i];
        enum sluice_error error = sluice_find_node(cluster, part->node, text);
        if (error)
            return error;
        if (cluster->stamp[part->node] == mark)
            return sluice_fail(text, SLUICE_ERROR_DUPLICATE, "node %" PRIu32 " occurs twice in the placement",
                               part->node);
        cluster->stamp[part->node] = mark;
        const struct node *row = &cluster->nodes[part->node];
        if (part->gpus & ~(uint32_t)sluice_shape_of(cluster, part->node)->all)
            return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "node %" PRIu32 ": GPUs 0x%" PRIx32 " asked, it has 0x%x",
                               part->node, part->gpus, sluice_shape_of(cluster, part->node)->all);
        if (part->nics & ~sluice_shape_of(cluster, part->node)->all_nics)
            return sluice_fail(text, SLUICE_ERROR_UNKNOWN,
                               "node %" PRIu32 ": NICs 0x%" PRIx32 " asked, it has 0x%" PRIx32, part->node, part->nics,
                               sluice_shape_of(cluster, part->node)->all_nics);
        if ((error = check_amounts(part, text)))
            return error;
        if (row->exclusive || (part->exclusive && row->parts))
            return sluice_fail(text, SLUICE_ERROR_CAPACITY, "node %" PRIu32 " %s", part->node,
                               row->exclusive ? "is held exclusively" : "is in use, and was asked exclusively");
        if ((error = check_room(cluster, part, &nothing, text)))
            return error;
    }
    if (cluster->free_allocation == NONE)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "the cluster was made for %" PRIu32 " allocations; give it a larger max_allocations",
                           cluster->size.max_allocations);
    if (cluster->free_parts < placement->part_count)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "the cluster was made for %" PRIu32 " parts; give it a larger max_parts",
                           cluster->size.max_parts);
    return SLUICE_OK;
}

/* ---- commit, release, resize ---- */

struct part sluice_part_held(const struct sluice_part *part)
{
    return (struct part){
        .node = part->node,
        .share = (int32_t)part->gpu_memory_mib,
        .cpus = (int32_t)part->cpus_milli,
        .host_memory = (int32_t)part->host_memory_mib,
        .gpus = (uint16_t)part->gpus,
        .exclusive = part->exclusive,
        .kind = sluice_kind(sluice_count((uint16_t)part->gpus), (int32_t)part->gpu_memory_mib),
        .compute = (uint8_t)part->gpu_compute_percent,
        .nics = part->nics,
    };
}

struct sluice_part sluice_part_shown(const struct part *part)
{
    return (struct sluice_part){
        .node = part->node,
        .gpus = part->gpus,
        .gpu_memory_mib = part->share,
        .cpus_milli = part->cpus,
        .host_memory_mib = part->host_memory,
        .exclusive = part->exclusive,
        .gpu_compute_percent = part->compute,
        .nics = part->nics,
    };
}

static uint64_t commit_checked(struct sluice_cluster *cluster, const struct sluice_placement *placement)
{
    uint32_t slot = cluster->free_allocation;
    struct allocation *allocation = &cluster->allocations[slot];
    cluster->free_allocation = allocation->first;
    allocation->generation++;
    uint32_t *link = &allocation->first;
    for (uint32_t i = 0; i < placement->part_count; i++) {
        uint32_t at = cluster->free_part;
        struct part *part = &cluster->parts[at];
        cluster->free_part = part->next;
        *part = sluice_part_held(&placement->parts[i]);
        *link = at;
        link = &part->next;
        move(cluster, part, TAKE);
    }
    *link = NONE;
    cluster->free_parts -= placement->part_count;
    cluster->totals.allocations++;
    cluster->last_node = placement->parts[placement->part_count - 1].node;
    return id_of(cluster, slot);
}

enum sluice_error sluice_commit(struct sluice_cluster *cluster, const struct sluice_placement *placement,
                                uint64_t *allocation, struct sluice_error_text *text)
{
    enum sluice_error error = check_placement(cluster, placement, text);
    if (!error)
        *allocation = commit_checked(cluster, placement);
    return error;
}

bool sluice_allocation_known(const struct sluice_cluster *cluster, uint64_t allocation)
{
    return find_allocation(cluster, allocation, NULL) != NULL;
}

uint32_t sluice_allocation_first_part(const struct sluice_cluster *cluster, uint64_t allocation)
{
    return cluster->allocations[(uint32_t)allocation].first;
}

static void move_all(struct sluice_cluster *cluster, uint64_t allocation, enum direction direction)
{
    for (uint32_t at = sluice_allocation_first_part(cluster, allocation); at != NONE; at = cluster->parts[at].next)
        move(cluster, &cluster->parts[at], direction);
}

void sluice_allocation_suspend(struct sluice_cluster *cluster, uint64_t allocation)
{
    move_all(cluster, allocation, GIVE);
}

void sluice_allocation_resume(struct sluice_cluster *cluster, uint64_t allocation)
{
    move_all(cluster, allocation, TAKE);
}

void sluice_part_take(struct sluice_cluster *cluster, const struct part *part)
{
    move(cluster, part, TAKE);
}

void sluice_part_give(struct sluice_cluster *cluster, const struct part *part)
{
    move(cluster, part, GIVE);
}

enum sluice_error sluice_release(struct sluice_cluster *cluster, uint64_t allocation, struct sluice_error_text *text)
{
    struct allocation *held = find_allocation(cluster, allocation, text);
    if (!held)
        return SLUICE_ERROR_UNKNOWN;
    for (uint32_t at = held->first, next; at != NONE; at = next) {
        struct part *part = &cluster->parts[at];
        move(cluster, part, GIVE);
        next = part->next;
        part->next = cluster->free_part;
        cluster->free_part = at;
        cluster->free_parts++;
    }
    cluster->totals.allocations--;
    /* A slot whose generations are used up is retired, so that no id is used again. */
    if (++held->generation != UINT32_MAX - 1) {
        held->first = cluster->free_allocation;
        cluster->free_allocation = (uint32_t)(held - cluster->allocations);
    }
    return SLUICE_OK;
}

enum sluice_error sluice_resize(struct sluice_cluster *cluster, uint64_t allocation, const struct sluice_part *part,
                                struct sluice_error_text *text)
{
    const struct allocation *found = find_allocation(cluster, allocation, text);
    if (!found)
        return SLUICE_ERROR_UNKNOWN;
    struct part *held = NULL;
    for (uint32_t at = found->first; at != NONE && !held; at = cluster->parts[at].next)
        if (cluster->parts[at].node == part->node)
            held = &cluster->parts[at];
    if (!held)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "allocation %" PRIu64 " holds nothing on node %" PRIu32,
                           allocation, part->node);
    if (part->gpus != held->gpus || part->nics != held->nics || part->exclusive != held->exclusive)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "node %" PRIu32 ": a resize keeps the GPUs (0x%x), NICs and exclusiveness of the allocation",
                           part->node, held->gpus);
    enum sluice_error error = check_amounts(part, text);
    if (error)
        return error;
    if ((part->gpu_memory_mib == 0) != (held->share == 0))
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "node %" PRIu32 ": a resize cannot turn whole GPUs into shares or shares into whole GPUs",
                           part->node);
    if ((error = check_room(cluster, part, held, text)))
        return error;
    move(cluster, held, GIVE);
    held->share = (int32_t)part->gpu_memory_mib;
    held->cpus = (int32_t)part->cpus_milli;
    held->host_memory = (int32_t)part->host_memory_mib;
    held->compute = (uint8_t)part->gpu_compute_percent;
    move(cluster, held, TAKE);
    return SLUICE_OK;
}

enum sluice_error sluice_allocation_read(const struct sluice_cluster *cluster, uint64_t allocation,
                                         struct sluice_part *parts, uint32_t capacity, uint32_t *part_count,
                                         struct sluice_error_text *text)
{
    const struct allocation *found = find_allocation(cluster, allocation, text);
    if (!found)
        return SLUICE_ERROR_UNKNOWN;
    uint32_t count = 0;
    for (uint32_t at = found->first; at != NONE; at = cluster->parts[at].next)
        count++;
    if (count > capacity)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "allocation %" PRIu64 " has %" PRIu32 " parts, room for %" PRIu32, allocation, count,
                           capacity);
    struct sluice_part *to = parts;
    for (uint32_t at = found->first; at != NONE; at = cluster->parts[at].next, to++)
        *to = sluice_part_shown(&cluster->parts[at]);
    *part_count = count;
    return SLUICE_OK;
}

int64_t sluice_allocation_gpus_milli(const struct sluice_cluster *cluster, uint64_t allocation)
{
    const struct allocation *found = find_allocation(cluster, allocation, NULL);
    int64_t milli = 0;
    for (uint32_t at = found ? found->first : NONE; at != NONE; at = cluster->parts[at].next) {
        const struct part *part = &cluster->parts[at];
        const struct shape *shape = sluice_shape_of(cluster, part->node);
        for (unsigned set = part->gpus; set; set &= set - 1) {
            int64_t whole = shape->memory.mib[__builtin_ctz(set)];
            milli += part->share ? (INT64_C(1000) * part->share + whole - 1) / whole : 1000;
        }
    }
    return milli;
}

/* ---- the check of the whole model ---- */

/* The expected state of a node, derived only from the allocations. */
struct tally {
    int64_t gpu_held[SLUICE_MAX_GPUS];
    uint32_t compute[SLUICE_MAX_GPUS];
    int64_t cpus, host_memory;
    uint32_t parts, exclusive;
    uint32_t kinds[KINDS];
    uint32_t nics;
    bool nic_twice;
};

static enum sluice_error tally_parts(const struct sluice_cluster *cluster, struct tally *tallies,
                                     struct sluice_error_text *text)
{
    uint32_t allocations = 0, parts = 0;
    for (uint32_t slot = 0; slot < cluster->size.max_allocations; slot++) {
        if (!(cluster->allocations[slot].generation & 1))
            continue;
        allocations++;
        for (uint32_t at = cluster->allocations[slot].first; at != NONE; at = cluster->parts[at].next) {
            const struct part *part = &cluster->parts[at];
            struct tally *tally = &tallies[part->node];
            for (int i = 0; i < SLUICE_MAX_GPUS; i++) {
                if (!(part->gpus >> i & 1))
                    continue;
                tally->gpu_held[i] += part->share ? part->share : sluice_shape_of(cluster, part->node)->memory.mib[i];
                tally->compute[i] += part->compute;
            }
            tally->cpus += part->cpus;
            tally->host_memory += part->host_memory;
            tally->nic_twice |= (tally->nics & part->nics) != 0;
            tally->nics |= part->nics;
            tally->parts++;
            tally->exclusive += part->exclusive;
            if (part->kind != NO_KIND)
                tally->kinds[part->kind]++;
            if (++parts > cluster->size.max_parts)
                return sluice_fail(text, SLUICE_ERROR_CORRUPT, "the parts of an allocation form a ring");
        }
    }
    if (parts + cluster->free_parts != cluster->size.max_parts || allocations != cluster->totals.allocations)
        return sluice_fail(
            text, SLUICE_ERROR_CORRUPT,
            "%" PRIu32 " parts in use and %" PRIu32 " free of %" PRIu32 ", %" PRIu32 " allocations counted as %" PRIu32,
            parts, cluster->free_parts, cluster->size.max_parts, allocations, cluster->totals.allocations);
    return SLUICE_OK;
}

static const char *difference(const struct sluice_cluster *cluster, uint32_t node, const struct tally *tally)
{
    const struct node *row = &cluster->nodes[node];
    const struct node_class *class = sluice_class_of(cluster, node);
    const struct shape *shape = &cluster->shapes[class->shape];
    if (row->cpus_free != class->cpus - tally->cpus || row->cpus_free < 0)
        return "free CPUs";
    if (row->host_memory_free != class->host_memory - tally->host_memory || row->host_memory_free < 0)
        return "free host memory";
    if (row->parts != tally->parts || row->exclusive != (tally->exclusive > 0) || tally->exclusive > 1 ||
        (tally->exclusive && tally->parts > 1))
        return "parts";
    if (memcmp(cluster->kinds[node], tally->kinds, sizeof tally->kinds) != 0)
        return "kinds of parts";
    int64_t gpu_free = 0;
    uint16_t idle = 0;
    for (int i = 0; i < SLUICE_MAX_GPUS; i++) {
        int64_t unused = shape->memory.mib[i] - tally->gpu_held[i];
        if (cluster->gpu_free[node].mib[i] != unused || unused < 0)
            return "free GPU memory";
        uint32_t compute = i < (int)shape->gpu_count ? ALL_COMPUTE : 0;
        if (tally->compute[i] > compute || cluster->compute_free[node].percent[i] != compute - tally->compute[i])
            return "unclaimed GPU compute";
        if (!(row->healthy >> i & 1))
            continue;
        gpu_free += unused;
        idle |= (uint16_t)((tally->gpu_held[i] == 0) << i);
    }
    if (row->gpu_free != gpu_free || row->idle != idle || row->healthy & ~shape->all)
        return "idle GPUs";
    bool is_open = row->state == SLUICE_NODE_UP && !row->exclusive;
    for (int k = 0; k < KINDS; k++)
        if (sluice_bit(cluster->open[k], node) != (is_open && sluice_count(idle) >= k))
            return "bitmaps";
    if (tally->nic_twice || cluster->nics_free[node] != (shape->all_nics & ~tally->nics))
        return "free NICs";
    return NULL;
}

static enum sluice_error check_nodes(const struct sluice_cluster *cluster, const struct tally *tallies,
                                     struct sluice_error_text *text)
{
    struct sluice_cluster_totals sum = {.nodes = cluster->node_count, .allocations = cluster->totals.allocations};
    for (uint32_t node = 0; node < cluster->node_count; node++) {
        const char *what = difference(cluster, node, &tallies[node]);
        if (what)
            return sluice_fail(text, SLUICE_ERROR_CORRUPT, "node %" PRIu32 ": %s do not follow from the allocations",
                               node, what);
        const struct node *row = &cluster->nodes[node];
        const struct node_class *class = sluice_class_of(cluster, node);
        const struct shape *shape = &cluster->shapes[class->shape];
        sum.nodes_up += row->state == SLUICE_NODE_UP;
        sum.gpus += shape->gpu_count;
        sum.cpus_milli += class->cpus;
        sum.cpus_milli_free += row->cpus_free;
        sum.host_memory_mib += class->host_memory;
        sum.host_memory_mib_free += row->host_memory_free;
        sum.gpu_memory_mib += shape->memory_sum;
        for (int i = 0; i < SLUICE_MAX_GPUS; i++)
            sum.gpu_memory_mib_free += cluster->gpu_free[node].mib[i];
    }
    const struct sluice_cluster_totals *kept = &cluster->totals;
    if (sum.nodes != kept->nodes || sum.nodes_up != kept->nodes_up || sum.gpus != kept->gpus ||
        sum.cpus_milli != kept->cpus_milli || sum.cpus_milli_free != kept->cpus_milli_free ||
        sum.host_memory_mib != kept->host_memory_mib || sum.host_memory_mib_free != kept->host_memory_mib_free ||
        sum.gpu_memory_mib != kept->gpu_memory_mib || sum.gpu_memory_mib_free != kept->gpu_memory_mib_free)
        return sluice_fail(text, SLUICE_ERROR_CORRUPT, "the cluster's totals are not the sums over its nodes");
    return SLUICE_OK;
}

enum sluice_error sluice_cluster_check(const struct sluice_cluster *cluster, struct sluice_error_text *text)
{
    struct tally *tallies = calloc((size_t)cluster->node_count + 1, sizeof *tallies);
    if (!tallies)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "out of memory for a check");
    enum sluice_error error = tally_parts(cluster, tallies, text);
    if (!error)
        error = check_nodes(cluster, tallies, text);
    if (!error && !sluice_index_sound(cluster))
        error = sluice_fail(text, SLUICE_ERROR_CORRUPT, "the index of the sluice policy disagrees with the nodes");
    if (!error && !sluice_nic_index_sound(cluster))
        error = sluice_fail(text, SLUICE_ERROR_CORRUPT, "the index of NICs disagrees with the nodes");
    free(tallies);
    return error;
}
