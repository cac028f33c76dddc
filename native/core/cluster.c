/* SPDX-License-Identifier: Apache-2.0 */
/* The cluster model: models, shapes, switches, nodes, and their state. Contracts are in sluice/core.h. */
#include "cluster.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { CACHE_LINE = 64 };

/* ---- memory ---- */

/* Zeroed, aligned to a cache line; release with free. Never asks for zero bytes. */
static void *zalloc(size_t count, size_t size)
{
    size_t bytes = (count * size + CACHE_LINE) & ~(size_t)(CACHE_LINE - 1);
    void *memory = aligned_alloc(CACHE_LINE, bytes);
    if (memory)
        memset(memory, 0, bytes);
    return memory;
}

static enum sluice_error allocate(struct sluice_cluster *cluster)
{
    const struct sluice_cluster_config *size = &cluster->size;
    cluster->words = (size->max_nodes + 63) / 64;
    for (int k = 0; k < KINDS; k++)
        if (!(cluster->open[k] = zalloc(cluster->words, sizeof *cluster->open[k])))
            return SLUICE_ERROR_NO_MEMORY;
    cluster->models = zalloc(SLUICE_MAX_MODELS, sizeof *cluster->models);
    cluster->switches = zalloc((size_t)size->max_switches + 2, sizeof *cluster->switches);
    cluster->nodes = zalloc(size->max_nodes, sizeof *cluster->nodes);
    cluster->gpu_free = zalloc(size->max_nodes, sizeof *cluster->gpu_free);
    cluster->compute_free = zalloc(size->max_nodes, sizeof *cluster->compute_free);
    cluster->nics_free = zalloc(size->max_nodes, sizeof *cluster->nics_free);
    cluster->utilisation = zalloc(size->max_nodes, sizeof *cluster->utilisation);
    cluster->kinds = zalloc(size->max_nodes, sizeof *cluster->kinds);
    cluster->level = zalloc(size->max_nodes, sizeof *cluster->level);
    cluster->version = zalloc(size->max_nodes, sizeof *cluster->version);
    cluster->stamp = zalloc(size->max_nodes, sizeof *cluster->stamp);
    cluster->allocations = zalloc(size->max_allocations, sizeof *cluster->allocations);
    cluster->parts = zalloc(size->max_parts, sizeof *cluster->parts);
    if (!cluster->nics_free || !cluster->models || !cluster->switches || !cluster->nodes || !cluster->gpu_free ||
        !cluster->compute_free || !cluster->utilisation || !cluster->kinds || !cluster->level || !cluster->version ||
        !cluster->stamp || !cluster->allocations || !cluster->parts)
        return SLUICE_ERROR_NO_MEMORY;
    enum sluice_error error = sluice_gang_new(cluster);
    return error ? error : sluice_index_new(cluster);
}

void sluice_cluster_free(struct sluice_cluster *cluster)
{
    if (!cluster)
        return;
    sluice_index_free(cluster);
    sluice_fgd_free(cluster);
    sluice_gang_free(cluster);
    sluice_nic_index_free(cluster);
    for (int k = 0; k < KINDS; k++)
        free(cluster->open[k]);
    free(cluster->nics_free);
    free(cluster->models);
    free(cluster->shapes);
    free(cluster->classes);
    free(cluster->class_table);
    free(cluster->switches);
    free(cluster->nodes);
    free(cluster->gpu_free);
    free(cluster->compute_free);
    free(cluster->utilisation);
    free(cluster->kinds);
    free(cluster->level);
    free(cluster->version);
    free(cluster->stamp);
    free(cluster->allocations);
    free(cluster->parts);
    free(cluster);
}

static enum sluice_error check_size(const char *name, uint32_t value, uint32_t most, struct sluice_error_text *text)
{
    if (value <= most)
        return SLUICE_OK;
    return sluice_fail(text, SLUICE_ERROR_RANGE, "%s %" PRIu32 ": at most %" PRIu32 " are possible", name, value, most);
}

enum sluice_error sluice_cluster_new(const struct sluice_cluster_config *config, struct sluice_cluster **cluster,
                                     struct sluice_error_text *text)
{
    struct sluice_cluster_config size = *config;
    if (!size.max_nodes)
        size.max_nodes = 1024;
    if (!size.max_switches)
        size.max_switches = size.max_nodes < SLUICE_MAX_SWITCHES ? size.max_nodes : SLUICE_MAX_SWITCHES;
    enum sluice_error error;
    if ((error = check_size("max_nodes", size.max_nodes, SLUICE_MAX_NODES, text)) ||
        (error = check_size("max_switches", size.max_switches, SLUICE_MAX_SWITCHES, text)))
        return error;
    if (!size.max_allocations)
        size.max_allocations = 64 * size.max_nodes;
    if ((error = check_size("max_allocations", size.max_allocations, SLUICE_MAX_ALLOCATIONS, text)))
        return error;
    if (!size.max_parts)
        size.max_parts = size.max_allocations + 16 * size.max_nodes;
    if ((error = check_size("max_parts", size.max_parts, 2 * SLUICE_MAX_ALLOCATIONS, text)))
        return error;

    struct sluice_cluster *made = calloc(1, sizeof *made);
    if (!made)
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "out of memory for a cluster");
    made->size = size;
    made->last_node = NONE;
    made->unplaced = size.max_switches + 1;
    if ((error = allocate(made))) {
        sluice_cluster_free(made);
        return sluice_fail(text, error, "out of memory for a cluster of %" PRIu32 " nodes", size.max_nodes);
    }
    /* Both free lists in ascending order. */
    for (uint32_t i = 0; i < size.max_allocations; i++)
        made->allocations[i].first = i + 1 < size.max_allocations ? i + 1 : NONE;
    for (uint32_t i = 0; i < size.max_parts; i++)
        made->parts[i].next = i + 1 < size.max_parts ? i + 1 : NONE;
    made->free_parts = size.max_parts;
    *cluster = made;
    return SLUICE_OK;
}

/* ---- models and shapes ---- */

enum sluice_error sluice_cluster_add_model(struct sluice_cluster *cluster, const char *name, uint32_t *model,
                                           struct sluice_error_text *text)
{
    size_t length = strnlen(name, sizeof cluster->models[0]);
    if (length == 0 || length == sizeof cluster->models[0])
        return sluice_fail(text, SLUICE_ERROR_RANGE, "GPU model \"%.80s\": a name has 1 to 63 bytes", name);
    for (uint32_t i = 0; i < cluster->model_count; i++) {
        if (strcmp(cluster->models[i], name) == 0) {
            *model = i;
            return SLUICE_OK;
        }
    }
    if (cluster->model_count == SLUICE_MAX_MODELS)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "GPU model \"%s\": a cluster has at most %d models", name,
                           SLUICE_MAX_MODELS);
    memcpy(cluster->models[cluster->model_count], name, length + 1);
    *model = cluster->model_count++;
    return SLUICE_OK;
}

const char *sluice_cluster_model_name(const struct sluice_cluster *cluster, uint32_t model)
{
    return model < cluster->model_count ? cluster->models[model] : NULL;
}

/* The sets of GPUs with an equal value, by their lowest GPU. */
static uint8_t group_by(const uint8_t *value, uint32_t count, uint16_t *group)
{
    uint8_t groups = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint8_t g = 0;
        while (g < groups && value[__builtin_ctz(group[g])] != value[i])
            g++;
        if (g == groups)
            group[groups++] = 0;
        group[g] |= (uint16_t)(1u << i);
    }
    return groups;
}

static enum sluice_error check_shape(const struct sluice_cluster *cluster, const struct sluice_node_shape *shape,
                                     struct sluice_error_text *text)
{
    if (shape->gpu_count > SLUICE_MAX_GPUS)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "%" PRIu32 " GPUs: a node has at most %d", shape->gpu_count,
                           SLUICE_MAX_GPUS);
    for (uint32_t i = 0; i < shape->gpu_count; i++) {
        const struct sluice_gpu_shape *gpu = &shape->gpus[i];
        if (gpu->model >= cluster->model_count)
            return sluice_fail(text, SLUICE_ERROR_UNKNOWN,
                               "GPU %" PRIu32 ": model %" PRIu32 " is not known; add it first", i, gpu->model);
        if (gpu->memory_mib < 1 || gpu->memory_mib > SLUICE_MAX_GPU_MEMORY_MIB)
            return sluice_fail(text, SLUICE_ERROR_RANGE, "GPU %" PRIu32 ": %" PRId64 " MiB of memory must be 1 to %d",
                               i, gpu->memory_mib, SLUICE_MAX_GPU_MEMORY_MIB);
        for (uint32_t j = 0; j < i; j++)
            if (shape->links[i][j] != shape->links[j][i])
                return sluice_fail(text, SLUICE_ERROR_INVALID,
                                   "link between GPU %" PRIu32 " and %" PRIu32 ": weighs %d one way and %d the other",
                                   j, i, shape->links[j][i], shape->links[i][j]);
    }
    return shape->nics.nic_count ? sluice_check_nics(&shape->nics, shape->gpu_count, text) : SLUICE_OK;
}

static void digest_nics(struct shape *shape, const struct sluice_nic_groups *from)
{
    struct sluice_nic_groups *nics = &shape->nics;
    nics->gpu_count = from->gpu_count;
    nics->nic_count = from->nic_count;
    memcpy(nics->gpu_group, from->gpu_group, from->gpu_count);
    memcpy(nics->nic_group, from->nic_group, from->nic_count);
    memcpy(nics->nic_kind, from->nic_kind, from->nic_count);
    memcpy(nics->nic_plane, from->nic_plane, from->nic_count);
    for (uint32_t i = 1; i < from->nic_count; i++)
        shape->several_planes |= from->nic_plane[i] != from->nic_plane[0];
    shape->all_nics = (uint32_t)((UINT64_C(1) << from->nic_count) - 1);
    for (int group = 0; group < SLUICE_MAX_NIC_GROUPS; group++) {
        uint16_t of_gpus = 0;
        uint32_t of_nics = 0;
        for (uint32_t i = 0; i < from->gpu_count; i++)
            of_gpus |= (uint16_t)((from->gpu_group[i] == group) << i);
        for (uint32_t i = 0; i < from->nic_count; i++)
            of_nics |= (uint32_t)(from->nic_group[i] == group) << i;
        if (of_gpus && of_nics) {
            shape->near[shape->near_count].gpus = of_gpus;
            shape->near[shape->near_count++].nics = of_nics;
        }
    }
}

static struct shape digest_shape(const struct sluice_node_shape *from)
{
    struct shape shape;
    memset(&shape, 0, sizeof shape); /* shapes are compared as bytes */
    shape.gpu_count = from->gpu_count;
    shape.uniform = true;
    shape.uniform_links = true;
    uint8_t link_domain[SLUICE_MAX_GPUS], numa_node[SLUICE_MAX_GPUS];
    for (uint32_t i = 0; i < from->gpu_count; i++) {
        const struct sluice_gpu_shape *gpu = &from->gpus[i];
        shape.all |= (uint16_t)(1u << i);
        shape.near_nic |= (uint16_t)(gpu->near_nic << i);
        shape.model[i] = (uint8_t)gpu->model;
        shape.capability[i] = gpu->capability;
        shape.memory.mib[i] = (int32_t)gpu->memory_mib;
        shape.memory_sum += shape.memory.mib[i];
        shape.uniform = shape.uniform && gpu->model == from->gpus[0].model &&
                        gpu->capability == from->gpus[0].capability && gpu->memory_mib == from->gpus[0].memory_mib;
        link_domain[i] = gpu->link_domain;
        numa_node[i] = gpu->numa_node;
        for (uint32_t j = 0; j < from->gpu_count; j++) {
            if (i == j)
                continue;
            shape.links[i][j] = from->links[i][j];
            shape.uniform_links = shape.uniform_links && from->links[i][j] == from->links[0][1];
        }
    }
    shape.link_groups = group_by(link_domain, from->gpu_count, shape.link_group);
    shape.numa_groups = group_by(numa_node, from->gpu_count, shape.numa_group);
    if (from->nics.nic_count)
        digest_nics(&shape, &from->nics);
    return shape;
}

enum sluice_error sluice_cluster_add_shape(struct sluice_cluster *cluster, const struct sluice_node_shape *shape,
                                           uint32_t *id, struct sluice_error_text *text)
{
    enum sluice_error error = check_shape(cluster, shape, text);
    if (error)
        return error;
    struct shape digested = digest_shape(shape);
    for (uint32_t i = 0; i < cluster->shape_count; i++) {
        if (memcmp(&cluster->shapes[i], &digested, sizeof digested) == 0) {
            *id = i;
            return SLUICE_OK;
        }
    }
    if (cluster->shape_count == SLUICE_MAX_SHAPES)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY, "a cluster has at most %d node shapes", SLUICE_MAX_SHAPES);
    if (digested.all_nics && !cluster->nic_index && (error = sluice_nic_index_new(cluster)))
        return sluice_fail(text, error, "out of memory for the NICs of %" PRIu32 " nodes", cluster->size.max_nodes);
    for (uint32_t i = 0; i < digested.nics.nic_count; i++)
        if (cluster->planes < digested.nics.nic_plane[i])
            cluster->planes = digested.nics.nic_plane[i];
    if ((cluster->shape_count & (cluster->shape_count - 1)) == 0) { /* room doubles at each power of two */
        struct shape *grown = zalloc(cluster->shape_count ? 2 * (size_t)cluster->shape_count : 1, sizeof *grown);
        if (!grown)
            return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "out of memory for a node shape");
        if (cluster->shape_count)
            memcpy(grown, cluster->shapes, cluster->shape_count * sizeof *grown);
        free(cluster->shapes);
        cluster->shapes = grown;
    }
    cluster->shapes[cluster->shape_count] = digested;
    *id = cluster->shape_count++;
    return SLUICE_OK;
}

/* ---- node classes ---- */

static uint32_t class_hash(const struct node_class *key)
{
    uint64_t hash = key->shape;
    hash = (hash * 0x9e3779b97f4a7c15u) ^ (uint32_t)key->cpus;
    hash = (hash * 0x9e3779b97f4a7c15u) ^ (uint32_t)key->host_memory;
    return (uint32_t)((hash * 0x9e3779b97f4a7c15u) >> 32);
}

static uint32_t *class_slot(const struct sluice_cluster *cluster, const struct node_class *key)
{
    uint32_t mask = cluster->class_table_size - 1;
    for (uint32_t at = class_hash(key) & mask;; at = (at + 1) & mask) {
        uint32_t *slot = &cluster->class_table[at];
        if (*slot == NONE)
            return slot;
        const struct node_class *known = &cluster->classes[*slot];
        if (known->shape == key->shape && known->cpus == key->cpus && known->host_memory == key->host_memory)
            return slot;
    }
}

/* Room for one more class: the list doubles at each power of two, and the table stays at most half full. */
static bool grow_classes(struct sluice_cluster *cluster)
{
    uint32_t count = cluster->class_count;
    if (count & (count - 1))
        return true;
    uint32_t room = count ? 2 * count : 1, table_size = 4 * room;
    struct node_class *classes = realloc(cluster->classes, room * sizeof *classes);
    if (!classes)
        return false;
    cluster->classes = classes;
    uint32_t *table = malloc(table_size * sizeof *table);
    if (!table)
        return false;
    memset(table, 0xff, table_size * sizeof *table);
    free(cluster->class_table);
    cluster->class_table = table;
    cluster->class_table_size = table_size;
    for (uint32_t i = 0; i < count; i++)
        *class_slot(cluster, &classes[i]) = i;
    return true;
}

static bool find_class(struct sluice_cluster *cluster, uint32_t shape, int64_t cpus, int64_t host_memory, uint32_t *id)
{
    struct node_class key = {.shape = shape, .cpus = (int32_t)cpus, .host_memory = (int32_t)host_memory};
    if (!grow_classes(cluster))
        return false;
    uint32_t *slot = class_slot(cluster, &key);
    if (*slot == NONE) {
        *slot = cluster->class_count++;
        cluster->classes[*slot] = key;
    }
    *id = *slot;
    return true;
}

/* ---- switches ---- */

enum sluice_error sluice_cluster_add_switch(struct sluice_cluster *cluster, uint32_t parent, uint32_t *id,
                                            struct sluice_error_text *text)
{
    if (parent > cluster->switch_count)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "parent switch %" PRIu32 " is not known; add it first", parent);
    struct network_switch *above = &cluster->switches[parent];
    if (parent && above->nodes)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "parent switch %" PRIu32 " has nodes; only a leaf switch has nodes, and no switches",
                           parent);
    if (above->depth == SLUICE_SWITCH_LEVELS)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "a switch below switch %" PRIu32 ": more than %d levels", parent,
                           SLUICE_SWITCH_LEVELS);
    if (cluster->switch_count == cluster->size.max_switches)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "the cluster was made for %" PRIu32 " switches; give it a larger max_switches",
                           cluster->size.max_switches);
    uint32_t made = ++cluster->switch_count;
    cluster->switches[made] = (struct network_switch){
        .parent = parent, .next_sibling = above->first_child, .leaves = 1, .depth = (uint8_t)(above->depth + 1)};
    for (uint32_t at = above->first_child ? parent : 0; at; at = cluster->switches[at].parent)
        cluster->switches[at].leaves++;
    above->first_child = made;
    for (uint32_t at = made; cluster->switches[at].parent; at = cluster->switches[at].parent) {
        struct network_switch *up = &cluster->switches[cluster->switches[at].parent];
        if (up->height <= cluster->switches[at].height)
            up->height = (uint8_t)(cluster->switches[at].height + 1);
    }
    *id = made;
    return SLUICE_OK;
}

/* ---- nodes ---- */

void sluice_node_changed(struct sluice_cluster *cluster, uint32_t node)
{
    struct node *row = &cluster->nodes[node];
    const struct shape *shape = sluice_shape_of(cluster, node);
    const struct gpu_amounts *free_amounts = &cluster->gpu_free[node];
    unsigned idle = 0;
    int32_t gpu_free = 0;
    for (unsigned i = 0; i < SLUICE_MAX_GPUS; i++) {
        idle |= (unsigned)(free_amounts->mib[i] == shape->memory.mib[i]) << i;
        gpu_free += row->healthy >> i & 1 ? free_amounts->mib[i] : 0;
    }
    row->idle = (uint16_t)(idle & row->healthy);
    row->gpu_free = gpu_free;

    bool is_open = row->state == SLUICE_NODE_UP && !row->exclusive;
    sluice_set_level(cluster->open, node, is_open ? 1 + sluice_count(row->idle) : 0, &cluster->level[node]);
    if (++cluster->version[node] == 0) /* 0: never seen */
        cluster->version[node] = 1;
    sluice_index_node_changed(cluster, node);
    if (shape->all_nics)
        sluice_nic_index_node_changed(cluster, node);
}

static enum sluice_error check_node_size(int64_t cpus, int64_t host_memory, struct sluice_error_text *text)
{
    if (cpus < 0 || cpus > SLUICE_MAX_CPUS_MILLI)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "a node of %" PRId64 " thousandths of a CPU: must be 0 to %d",
                           cpus, SLUICE_MAX_CPUS_MILLI);
    if (host_memory < 0 || host_memory > SLUICE_MAX_HOST_MEMORY_MIB)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "a node of %" PRId64 " MiB of host memory: must be 0 to %d",
                           host_memory, SLUICE_MAX_HOST_MEMORY_MIB);
    return SLUICE_OK;
}

static void note_largest(struct sluice_cluster *cluster, const struct node_class *class)
{
    int32_t gpu_memory = cluster->shapes[class->shape].memory_sum;
    if (class->cpus > cluster->largest_cpus)
        cluster->largest_cpus = class->cpus;
    if (gpu_memory > cluster->largest_gpu_memory)
        cluster->largest_gpu_memory = gpu_memory;
}

enum sluice_error sluice_cluster_add_node(struct sluice_cluster *cluster, uint32_t shape, int64_t cpus_milli,
                                          int64_t host_memory_mib, uint32_t switch_id, uint32_t *node,
                                          struct sluice_error_text *text)
{
    enum sluice_error error = check_node_size(cpus_milli, host_memory_mib, text);
    if (error)
        return error;
    if (shape >= cluster->shape_count)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "node shape %" PRIu32 " is not known; add it first", shape);
    if (switch_id > cluster->switch_count)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "switch %" PRIu32 " is not known; add it first", switch_id);
    if (switch_id && cluster->switches[switch_id].first_child)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "switch %" PRIu32 " has switches below it; only leaf switches have nodes", switch_id);
    if (cluster->node_count == cluster->size.max_nodes)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "the cluster was made for %" PRIu32 " nodes; give it a larger max_nodes",
                           cluster->size.max_nodes);
    uint32_t class_id;
    if (!find_class(cluster, shape, cpus_milli, host_memory_mib, &class_id))
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "out of memory for a node class");

    const struct shape *kind = &cluster->shapes[shape];
    uint32_t made = cluster->node_count++, leaf = switch_id ? switch_id : cluster->unplaced;
    cluster->classes[class_id].nodes++;
    cluster->switches[leaf].nodes++;
    note_largest(cluster, &cluster->classes[class_id]);
    cluster->nodes[made] = (struct node){.cpus_free = (int32_t)cpus_milli,
                                         .host_memory_free = (int32_t)host_memory_mib,
                                         .class_id = class_id,
                                         .leaf = (uint16_t)leaf,
                                         .healthy = kind->all,
                                         .rank = made};
    cluster->gpu_free[made] = kind->memory;
    cluster->nics_free[made] = kind->all_nics;
    memset(cluster->compute_free[made].percent, ALL_COMPUTE, kind->gpu_count);
    struct sluice_cluster_totals *totals = &cluster->totals;
    totals->nodes++;
    totals->nodes_up++;
    totals->gpus += kind->gpu_count;
    totals->cpus_milli += cpus_milli;
    totals->cpus_milli_free += cpus_milli;
    totals->host_memory_mib += host_memory_mib;
    totals->host_memory_mib_free += host_memory_mib;
    totals->gpu_memory_mib += kind->memory_sum;
    totals->gpu_memory_mib_free += kind->memory_sum;
    sluice_node_changed(cluster, made);
    *node = made;
    return SLUICE_OK;
}

enum sluice_error sluice_find_node(const struct sluice_cluster *cluster, uint32_t node, struct sluice_error_text *text)
{
    if (node < cluster->node_count)
        return SLUICE_OK;
    return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "node %" PRIu32 " is not known: the cluster has %" PRIu32 " nodes",
                       node, cluster->node_count);
}

static enum sluice_error find_gpu(const struct sluice_cluster *cluster, uint32_t node, uint32_t gpu,
                                  struct sluice_error_text *text)
{
    enum sluice_error error = sluice_find_node(cluster, node, text);
    if (error)
        return error;
    uint32_t count = sluice_shape_of(cluster, node)->gpu_count;
    if (gpu < count)
        return SLUICE_OK;
    return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "node %" PRIu32 ": GPU %" PRIu32 " is not known, it has %" PRIu32,
                       node, gpu, count);
}

enum sluice_error sluice_node_set_state(struct sluice_cluster *cluster, uint32_t node, enum sluice_node_state state,
                                        struct sluice_error_text *text)
{
    enum sluice_error error = sluice_find_node(cluster, node, text);
    if (error)
        return error;
    if ((unsigned)state > SLUICE_NODE_DOWN)
        return sluice_fail(text, SLUICE_ERROR_RANGE, "node %" PRIu32 ": %d is no node state", node, (int)state);
    struct node *row = &cluster->nodes[node];
    cluster->totals.nodes_up += (uint32_t)(state == SLUICE_NODE_UP) - (uint32_t)(row->state == SLUICE_NODE_UP);
    row->state = (uint8_t)state;
    sluice_node_changed(cluster, node);
    return SLUICE_OK;
}

enum sluice_error sluice_node_resize(struct sluice_cluster *cluster, uint32_t node, int64_t cpus_milli,
                                     int64_t host_memory_mib, struct sluice_error_text *text)
{
    enum sluice_error error = sluice_find_node(cluster, node, text);
    if (error || (error = check_node_size(cpus_milli, host_memory_mib, text)))
        return error;
    struct node *row = &cluster->nodes[node];
    const struct node_class *old = &cluster->classes[row->class_id];
    int64_t more_cpus = cpus_milli - old->cpus, more_memory = host_memory_mib - old->host_memory;
    if (row->cpus_free + more_cpus < 0)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "node %" PRIu32 ": %" PRId64 " thousandths of a CPU are less than the %" PRId64 " in use",
                           node, cpus_milli, (int64_t)old->cpus - row->cpus_free);
    if (row->host_memory_free + more_memory < 0)
        return sluice_fail(text, SLUICE_ERROR_CAPACITY,
                           "node %" PRIu32 ": %" PRId64 " MiB of host memory are less than the %" PRId64 " in use",
                           node, host_memory_mib, (int64_t)old->host_memory - row->host_memory_free);
    uint32_t class_id;
    if (!find_class(cluster, old->shape, cpus_milli, host_memory_mib, &class_id))
        return sluice_fail(text, SLUICE_ERROR_NO_MEMORY, "out of memory for a node class");
    struct node_class *left = &cluster->classes[row->class_id];
    cluster->classes[class_id].nodes++;
    note_largest(cluster, &cluster->classes[class_id]);
    if (--left->nodes == 0 && left->cpus == cluster->largest_cpus) { /* the last of the largest: find it again */
        cluster->largest_cpus = 0;
        for (uint32_t i = 0; i < cluster->class_count; i++)
            if (cluster->classes[i].nodes)
                note_largest(cluster, &cluster->classes[i]);
    }
    row->class_id = class_id;
    row->cpus_free = (int32_t)(row->cpus_free + more_cpus);
    row->host_memory_free = (int32_t)(row->host_memory_free + more_memory);
    cluster->totals.cpus_milli += more_cpus;
    cluster->totals.cpus_milli_free += more_cpus;
    cluster->totals.host_memory_mib += more_memory;
    cluster->totals.host_memory_mib_free += more_memory;
    sluice_node_changed(cluster, node);
    return SLUICE_OK;
}

enum sluice_error sluice_gpu_set_health(struct sluice_cluster *cluster, uint32_t node, uint32_t gpu, bool healthy,
                                        struct sluice_error_text *text)
{
    enum sluice_error error = find_gpu(cluster, node, gpu, text);
    if (error)
        return error;
    uint16_t bit = (uint16_t)(1u << gpu);
    if (healthy)
        cluster->nodes[node].healthy |= bit;
    else
        cluster->nodes[node].healthy &= (uint16_t)~bit;
    sluice_node_changed(cluster, node);
    return SLUICE_OK;
}

enum sluice_error sluice_gpu_set_utilisation(struct sluice_cluster *cluster, uint32_t node, uint32_t gpu,
                                             uint32_t percent, struct sluice_error_text *text)
{
    enum sluice_error error = find_gpu(cluster, node, gpu, text);
    if (error)
        return error;
    if (percent > 100)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "node %" PRIu32 " GPU %" PRIu32 ": utilisation %" PRIu32 " is over 100 percent", node, gpu,
                           percent);
    cluster->utilisation[node][gpu] = (uint8_t)percent;
    return SLUICE_OK;
}

enum sluice_error sluice_cluster_set_order(struct sluice_cluster *cluster, const uint32_t *rank, uint32_t node_count,
                                           struct sluice_error_text *text)
{
    if (rank) {
        if (node_count != cluster->node_count)
            return sluice_fail(text, SLUICE_ERROR_INVALID, "an order of %" PRIu32 " nodes for a cluster of %" PRIu32,
                               node_count, cluster->node_count);
        uint32_t mark = sluice_new_stamp(cluster);
        for (uint32_t i = 0; i < node_count; i++) {
            if (rank[i] >= node_count)
                return sluice_fail(text, SLUICE_ERROR_RANGE,
                                   "node %" PRIu32 ": rank %" PRIu32 " must be below %" PRIu32, i, rank[i], node_count);
            if (cluster->stamp[rank[i]] == mark)
                return sluice_fail(text, SLUICE_ERROR_DUPLICATE, "node %" PRIu32 ": rank %" PRIu32 " is given twice", i,
                                   rank[i]);
            cluster->stamp[rank[i]] = mark;
        }
    }
    for (uint32_t i = 0; i < cluster->node_count; i++)
        cluster->nodes[i].rank = rank ? rank[i] : i;
    cluster->ordered = rank != NULL;
    sluice_index_order_changed(cluster);
    return SLUICE_OK;
}

uint32_t sluice_new_stamp(struct sluice_cluster *cluster)
{
    if (++cluster->stamp_now == 0) {
        memset(cluster->stamp, 0, cluster->size.max_nodes * sizeof *cluster->stamp);
        cluster->stamp_now = 1;
    }
    return cluster->stamp_now;
}

/* ---- reading ---- */

enum sluice_error sluice_node_read(const struct sluice_cluster *cluster, uint32_t node, struct sluice_node_view *view,
                                   struct sluice_error_text *text)
{
    enum sluice_error error = sluice_find_node(cluster, node, text);
    if (error)
        return error;
    const struct node *row = &cluster->nodes[node];
    const struct node_class *class = sluice_class_of(cluster, node);
    const struct shape *shape = &cluster->shapes[class->shape];
    *view = (struct sluice_node_view){
        .shape = class->shape,
        .switch_id = row->leaf == cluster->unplaced ? 0 : row->leaf,
        .state = (enum sluice_node_state)row->state,
        .exclusive = row->exclusive,
        .parts = row->parts,
        .cpus_milli = class->cpus,
        .cpus_milli_free = row->cpus_free,
        .host_memory_mib = class->host_memory,
        .host_memory_mib_free = row->host_memory_free,
        .gpu_count = shape->gpu_count,
        .gpus_healthy = row->healthy,
        .gpus_idle = row->idle,
        .nic_count = shape->nics.nic_count,
        .nics_free = cluster->nics_free[node],
    };
    for (uint32_t i = 0; i < shape->gpu_count; i++) {
        view->gpu_memory_mib[i] = shape->memory.mib[i];
        view->gpu_memory_mib_free[i] = cluster->gpu_free[node].mib[i];
        view->gpu_compute_free[i] = cluster->compute_free[node].percent[i];
        view->gpu_utilisation[i] = cluster->utilisation[node][i];
    }
    return SLUICE_OK;
}

void sluice_cluster_read_totals(const struct sluice_cluster *cluster, struct sluice_cluster_totals *totals)
{
    *totals = cluster->totals;
}
