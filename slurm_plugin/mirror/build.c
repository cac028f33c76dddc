/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The core's cluster, made from Slurm's nodes. */
#include "mirror/mirror_internal.h"

#include "mirror/blocks.h"
#include "mirror/nics.h"

#include "src/common/bitstring.h"
#include "src/common/node_conf.h"
#include "src/common/xmalloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Cores that jobs may use, as CPUs. */
static int64_t usable_cpus(const node_record_t *node)
{
    int64_t cores = node->tot_cores;
    /* In this bitmap the cores that are not specialized are set. */
    if (node->node_spec_bitmap)
        cores = bit_set_count(node->node_spec_bitmap);
    return cores * node->tpc;
}

static int64_t usable_memory(const node_record_t *node)
{
    uint64_t memory = node->real_memory > node->mem_spec_limit ? node->real_memory - node->mem_spec_limit : 0;
    return memory > SLUICE_MAX_HOST_MEMORY_MIB ? SLUICE_MAX_HOST_MEMORY_MIB : (int64_t)memory;
}

static uint32_t model_of(struct sluice_mirror *mirror, const char *type)
{
    uint32_t model = 0;
    const char *name = type && *type ? type : "gpu";
    if (sluice_cluster_add_model(mirror->cluster, name, &model, NULL))
        return NONE;
    if (model >= mirror->model_count) {
        snprintf(mirror->models[model], sizeof(mirror->models[model]), "%s", name);
        mirror->model_count = model + 1;
        if (mirror->notes)
            sluice_decision_note_model(mirror->notes, name);
    }
    return model;
}

/* GPUs that reach each other over links are one domain: the lowest GPU's number. */
static void set_links(const gres_node_state_t *gpu, struct sluice_node_shape *shape)
{
    uint32_t n = shape->gpu_count;
    for (uint32_t i = 0; i < n; i++)
        shape->gpus[i].link_domain = (uint8_t)i;
    if (!gpu->links_cnt || gpu->link_len != (int)n) {
        for (uint32_t i = 0; i < n; i++)
            shape->gpus[i].link_domain = 0;
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j < n; j++) {
            int weight = i == j || !gpu->links_cnt[i] ? 0 : gpu->links_cnt[i][j];
            int back = i == j || !gpu->links_cnt[j] ? 0 : gpu->links_cnt[j][i];
            weight = weight < back ? weight : back;
            shape->links[i][j] = (uint8_t)(weight < 0 ? 0 : weight > 255 ? 255 : weight);
        }
    }
    for (uint32_t round = 0; round < n; round++) /* the lowest number spreads over the links */
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < n; j++)
                if (shape->links[i][j] && shape->gpus[j].link_domain < shape->gpus[i].link_domain)
                    shape->gpus[i].link_domain = shape->gpus[j].link_domain;
}

static uint8_t nic_kind(void *argument, const char *type)
{
    struct sluice_mirror *mirror = argument;
    for (uint32_t k = 1; k < mirror->nic_type_count; k++)
        if (!strcmp(mirror->nic_types[k], type))
            return (uint8_t)k;
    if (mirror->nic_type_count == SLUICE_MAX_NIC_KINDS || strlen(type) >= sizeof(mirror->nic_types[0])) {
        mirror->nics_unclear = true;
        return 0;
    }
    snprintf(mirror->nic_types[mirror->nic_type_count], sizeof(mirror->nic_types[0]), "%s", type);
    return (uint8_t)mirror->nic_type_count++;
}

static void set_nics(struct sluice_mirror *mirror, const node_record_t *node, struct sluice_node_shape *shape)
{
    if (sluice_nics_of_node(node, shape->gpu_count, nic_kind, mirror, &shape->nics))
        return;
    mirror->nics_unclear = true;
    shape->nics.nic_count = SLUICE_MAX_NICS;
    for (uint32_t i = 0; i < shape->gpu_count; i++)
        shape->nics.gpu_group[i] = (uint8_t)i;
    for (uint32_t i = 0; i < SLUICE_MAX_NICS; i++)
        shape->nics.nic_group[i] = (uint8_t)(SLUICE_MAX_GPUS + i);
}

/* False: the node's GPUs cannot be distinguished. */
static bool shape_of(struct sluice_mirror *mirror, const node_record_t *node, struct sluice_node_shape *shape)
{
    struct sluice_node_gres gres = sluice_gres_of_node(node);
    const gres_node_state_t *gpu = gres.gpu;
    memset(shape, 0, sizeof(*shape));
    if (!gpu || (!gpu->gres_cnt_avail && !gpu->topo_cnt))
        return !gpu || !gpu->gres_cnt_config;
    if (!gpu->gres_bit_alloc || !gpu->topo_cnt || !gpu->topo_gres_bitmap || gpu->no_consume ||
        gpu->gres_cnt_avail > SLUICE_MAX_GPUS || bit_size(gpu->gres_bit_alloc) != (bitoff_t)gpu->gres_cnt_avail)
        return false;
    uint32_t count = (uint32_t)gpu->gres_cnt_avail;
    int64_t memory[SLUICE_MAX_GPUS];
    for (uint32_t i = 0; i < count; i++)
        memory[i] = SLUICE_MIRROR_PLAIN_GPU_MIB;
    if (gres.shard && gres.shard->gres_cnt_avail) {
        memset(memory, 0, sizeof(memory));
        if (!sluice_mirror_shares_per_gpu(gres.shard, count, gres.shard->topo_gres_cnt_avail, memory))
            return false;
        for (uint32_t i = 0; i < count; i++)
            if (!memory[i])
                memory[i] = 1;
    }
    uint32_t known = 0;
    for (uint16_t t = 0; t < gpu->topo_cnt; t++) {
        bitstr_t *bits = gpu->topo_gres_bitmap[t];
        if (!bits || bit_size(bits) != count)
            return false;
        uint32_t model = model_of(mirror, gpu->topo_type_name ? gpu->topo_type_name[t] : NULL);
        if (model == NONE)
            return false;
        int first_core = -1;
        if (gpu->topo_core_bitmap && gpu->topo_core_bitmap[t])
            first_core = (int)bit_ffs(gpu->topo_core_bitmap[t]);
        for (uint32_t i = 0; i < count; i++) {
            if (!bit_test(bits, i))
                continue;
            shape->gpus[i].model = model;
            shape->gpus[i].memory_mib = memory[i];
            shape->gpus[i].numa_node = (uint8_t)(first_core > 0 && node->cores ? first_core / node->cores : 0);
            known |= UINT32_C(1) << i;
        }
    }
    if (known != (UINT32_C(1) << count) - 1)
        return false;
    shape->gpu_count = count;
    set_links(gpu, shape);
    return true;
}

/* Switches by name, while the cluster is made. */
struct switches {
    char (*names)[128];
    uint32_t count, room;
};

/* A switch below `parent`; 0: there is no room. */
static uint32_t add_switch(struct sluice_mirror *mirror, struct switches *known, uint32_t parent, const char *name)
{
    uint32_t id = 0;
    if (known->count == known->room || sluice_cluster_add_switch(mirror->cluster, parent, &id, NULL))
        return 0;
    snprintf(known->names[known->count++], sizeof(known->names[0]), "%s", name);
    if (mirror->notes)
        sluice_decision_note_switch(mirror->notes, parent);
    return id;
}

/* As a node's switch is known by. */
static void name_switch(char (*name)[128], uint32_t parent, const char *own)
{
    snprintf(*name, sizeof(*name), "%u/%.100s", parent, own);
}

/* The leaf switch of a node from its address in the network; 0: unknown. */
static uint32_t switch_of(struct sluice_mirror *mirror, struct switches *known, node_record_t *node)
{
    char *address = NULL, *pattern = NULL;
    uint32_t parent = 0;
    if (sluice_node_address(node->name, &address, &pattern) == SLURM_SUCCESS && address && pattern) {
        /* All but the last component are switches, from the top. The core knows so many levels: the lowest ones. */
        uint32_t levels = 0;
        for (const char *c = pattern; *c; c++)
            levels += *c == '.';
        char *rest = address;
        for (uint32_t level = 0; level < levels; level++) {
            char *dot = strchr(rest, '.');
            if (!dot)
                break;
            *dot = 0;
            if (*rest && level + SLUICE_SWITCH_LEVELS >= levels) {
                char name[128];
                name_switch(&name, parent, rest);
                uint32_t id = 0;
                for (uint32_t i = 0; i < known->count && !id; i++)
                    if (!strcmp(known->names[i], name))
                        id = i + 1;
                if (!id)
                    id = add_switch(mirror, known, parent, name);
                if (!id)
                    break;
                parent = id;
            }
            rest = dot + 1;
        }
    }
    xfree(address);
    xfree(pattern);
    return parent;
}

static void add_node(struct sluice_mirror *mirror, struct switches *known, uint32_t index)
{
    node_record_t *node = node_record_table_ptr[index];
    struct sluice_node_shape shape;
    uint32_t shape_id = 0, added = 0, leaf = 0;
    bool clear = node && node->tot_cores && node->tpc && shape_of(mirror, node, &shape);
    if (!clear)
        memset(&shape, 0, sizeof(shape));
    else
        set_nics(mirror, node, &shape);
    if (node)
        leaf = switch_of(mirror, known, node);
    int64_t cpus = clear ? usable_cpus(node) * 1000 : 1000, memory = clear ? usable_memory(node) : 0;
    if (sluice_cluster_add_shape(mirror->cluster, &shape, &shape_id, NULL)) {
        clear = false;
        memset(&shape, 0, sizeof(shape));
        if (sluice_cluster_add_shape(mirror->cluster, &shape, &shape_id, NULL))
            return;
    }
    if (shape_id >= mirror->shape_count) {
        mirror->shape_count = shape_id + 1;
        mirror->shape_models[shape_id] = shape.gpu_count ? (uint8_t)(shape.gpus[0].model + 1) : 0;
        for (uint32_t i = 1; i < shape.gpu_count; i++)
            if (shape.gpus[i].model != shape.gpus[0].model)
                mirror->shape_models[shape_id] = 0;
        if (mirror->notes)
            sluice_decision_note_shape(mirror->notes, &shape);
    }
    if (sluice_cluster_add_node(mirror->cluster, shape_id, cpus, memory, leaf, &added, NULL)) {
        leaf = 0; /* an irregular tree: this node's switch has switches below it */
        if (sluice_cluster_add_node(mirror->cluster, shape_id, cpus, memory, 0, &added, NULL))
            return;
    }
    if (mirror->notes)
        sluice_decision_note_node(mirror->notes, node ? node->name : "", shape_id, cpus, memory, leaf);
    if (!clear) {
        mirror->opaque[index / 64] |= UINT64_C(1) << (index % 64);
        sluice_node_set_state(mirror->cluster, added, SLUICE_NODE_DRAINED, NULL);
    }
}

void sluice_mirror_forget(struct sluice_mirror *mirror)
{
    sluice_cluster_free(mirror->cluster);
    mirror->cluster = NULL;
    mirror->valid = false;
    if (mirror->notes)
        sluice_decision_topology_free(mirror->notes);
    mirror->notes = NULL;
    free(mirror->opaque);
    free(mirror->given_back);
    free(mirror->light);
    mirror->light = NULL;
    free(mirror->fingerprint);
    free(mirror->parts);
    sluice_cores_free(mirror->cores);
    mirror->opaque = mirror->given_back = NULL;
    mirror->fingerprint = NULL;
    mirror->parts = NULL;
    mirror->cores = NULL;
    mirror->reshare = false;
    if (mirror->table)
        memset(mirror->table, 0, mirror->table_size * sizeof(*mirror->table));
    mirror->entries = mirror->foreign = mirror->sharing = mirror->clipped = 0;
    mirror->holding_count = 0;
    mirror->free_holding = NONE;
    mirror->model_count = mirror->shape_count = 0;
    mirror->nic_type_count = 1;
    mirror->nics_unclear = false;
}

/* The distinct weights in ascending order, and the nodes up to each. */
static void set_weights(struct sluice_mirror *mirror)
{
    mirror->weight_count = 0;
    for (uint32_t n = 0; n < mirror->nodes && mirror->weight_count <= SLUICE_MIRROR_MAX_WEIGHTS; n++) {
        const node_record_t *node = node_record_table_ptr[n];
        if (!node)
            continue;
        uint32_t weight = SLUICE_NODE_WEIGHT(node), at = 0;
        while (at < mirror->weight_count && mirror->weights[at] < weight)
            at++;
        if (at < mirror->weight_count && mirror->weights[at] == weight)
            continue;
        if (mirror->weight_count < SLUICE_MIRROR_MAX_WEIGHTS) {
            memmove(&mirror->weights[at + 1], &mirror->weights[at],
                    (mirror->weight_count - at) * sizeof(mirror->weights[0]));
            mirror->weights[at] = weight;
        }
        mirror->weight_count++;
    }
    if (mirror->weight_count > SLUICE_MIRROR_MAX_WEIGHTS)
        return;
    for (uint32_t n = 0; n < mirror->nodes; n++)
        for (uint32_t at = 0; node_record_table_ptr[n] && at < mirror->weight_count; at++)
            if (mirror->weights[at] >= SLUICE_NODE_WEIGHT(node_record_table_ptr[n]))
                mirror->light[at * mirror->words + n / 64] |= UINT64_C(1) << (n % 64);
}

/* Does Slurm have nodes in blocks? The first node that has a place in the network says so. */
static bool has_blocks(uint32_t nodes)
{
    bool found = false, placed = false;
    for (uint32_t n = 0; n < nodes && !placed; n++) {
        char *address = NULL, *pattern = NULL;
        if (node_record_table_ptr[n] &&
            sluice_node_address(node_record_table_ptr[n]->name, &address, &pattern) == SLURM_SUCCESS && pattern) {
            placed = strchr(pattern, '.') != NULL;
            found = !strcmp(pattern, "block.node");
        }
        xfree(address);
        xfree(pattern);
    }
    return found;
}

/* Base blocks as leaf switches, below the larger blocks that have them. False: there is no room for all. */
static bool add_block_switches(struct sluice_mirror *mirror, struct switches *known,
                               const struct sluice_block_names *names)
{
    const struct sluice_blocks *blocks = &mirror->blocks;
    uint32_t above[SLUICE_SWITCH_LEVELS] = {0}; /* the last one of each level */
    for (uint32_t i = 0; i < names->count; i++) {
        for (uint32_t level = blocks->levels; level-- > 0;) {
            const uint32_t parent = level + 1 < blocks->levels ? above[level + 1] : 0;
            char name[128];
            if (i % blocks->size[level])
                continue; /* of the same one as the base block before */
            if (level)
                snprintf(name, sizeof(name), "level %u block %u", level, i / blocks->size[level]);
            else
                name_switch(&name, 0, names->names[i]); /* Slurm's addresses have base blocks only */
            if (!(above[level] = add_switch(mirror, known, parent, name)))
                return false;
        }
    }
    return true;
}

/* Where Slurm has blocks: all of them are known before the first node. */
static bool set_blocks(struct sluice_mirror *mirror, struct switches *known, uint32_t nodes)
{
    struct sluice_block_names names = {.room = nodes};
    char *text = has_blocks(nodes) ? sluice_topology_text() : NULL;
    mirror->blocks.levels = 0;
    if (!text)
        return true;
    names.names = calloc((size_t)nodes + 1, sizeof(*names.names));
    bool fine = names.names != NULL;
    if (fine && !sluice_blocks_read(text, &names, &mirror->blocks))
        mirror->blocks.levels = 0; /* not as 24.11 and later print them */
    fine = fine && (!mirror->blocks.levels || add_block_switches(mirror, known, &names));
    free(names.names);
    xfree(text);
    return fine;
}

enum sluice_error sluice_mirror_build(struct sluice_mirror *mirror, struct sluice_error_text *text)
{
    sluice_mirror_forget(mirror);
    uint32_t nodes = node_record_count > 0 ? (uint32_t)node_record_count : 0;
    struct sluice_cluster_config config = {
        .max_nodes = nodes ? nodes : 1,
        .max_switches = nodes < 1000                           ? 2000
                        : nodes * 2 + 64 > SLUICE_MAX_SWITCHES ? SLUICE_MAX_SWITCHES
                                                               : nodes * 2 + 64,
        .max_allocations = nodes * 128 + 4096,
    };
    enum sluice_error error = sluice_cluster_new(&config, &mirror->cluster, text);
    if (error)
        return error;
    mirror->nodes = nodes;
    mirror->words = ((size_t)nodes + 63) / 64;
    mirror->opaque = calloc(mirror->words + 1, sizeof(uint64_t));
    mirror->given_back = calloc(mirror->words + 1, sizeof(uint64_t));
    mirror->light = calloc((mirror->words + 1) * SLUICE_MIRROR_MAX_WEIGHTS, sizeof(uint64_t));
    mirror->fingerprint = calloc((size_t)nodes + 1, sizeof(uint64_t));
    mirror->part_room = nodes + MAX_GROUPS;
    mirror->parts = calloc(mirror->part_room, sizeof(*mirror->parts));
    mirror->cores = sluice_cores_new(nodes);
    struct switches known = {.room = config.max_switches};
    known.names = calloc(known.room, sizeof(*known.names));
    if (!mirror->opaque || !mirror->given_back || !mirror->light || !mirror->fingerprint || !mirror->parts ||
        !mirror->cores || !known.names) {
        free(known.names);
        sluice_mirror_forget(mirror);
        if (text)
            snprintf(text->text, sizeof(text->text), "out of memory for a mirror of %u nodes", nodes);
        return SLUICE_ERROR_NO_MEMORY;
    }
    mirror->notes = mirror->recorder ? sluice_decision_topology_new() : NULL;
    const bool placed = set_blocks(mirror, &known, nodes);
    for (uint32_t n = 0; placed && n < nodes; n++) {
        add_node(mirror, &known, n);
        mirror->fingerprint[n] = sluice_mirror_fingerprint(node_record_table_ptr[n]);
    }
    mirror->switch_count = known.count;
    free(known.names);
    set_weights(mirror);
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(mirror->cluster, &totals);
    if (totals.nodes != nodes) {
        sluice_mirror_forget(mirror);
        if (text)
            snprintf(text->text, sizeof(text->text), "of %u nodes the core took only %u", nodes, totals.nodes);
        return SLUICE_ERROR_CAPACITY;
    }
    mirror->generation++;
    mirror->counts.builds++;
    mirror->valid = true;
    if (mirror->notes)
        sluice_decision_set_topology(mirror->recorder, mirror->notes, mirror->cluster, NULL);
    return SLUICE_OK;
}
