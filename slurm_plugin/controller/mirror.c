/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "mirror.h"

#include "cores.h"
#include "decision.h"
#include "gres_slurm.h"

#include "src/common/bitstring.h"
#include "src/common/list.h"
#include "src/common/node_conf.h"
#include "src/common/xmalloc.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = UINT32_MAX };
/* What Slurm says is held, but no job explains, stands in the table of jobs under this and the node's number. */
enum { FOREIGN = 0xf0000000u };
enum { MAX_GROUPS = SLUICE_MAX_GPUS + 1 };
enum { SCAN_SLICE = 32 };

/* A job that holds something: an entry of an open-addressed table. */
struct entry {
    uint32_t job_id; /* 0: empty */
    uint32_t first;  /* of its records */
    uint32_t seen;   /* by which comparison with Slurm's list of jobs */
    bool sharing;    /* holds no CPUs, as its cores may be others', too */
    bool pooled;     /* of its cores it holds those that count for it (cores.h) */
    uint64_t signature;
};

/* One allocation of the core; those of a job, and the free ones, are chained. */
struct record {
    uint64_t allocation;
    uint32_t next;
};

struct sluice_mirror {
    struct sluice_cluster *cluster; /* NULL: to be made */
    uint64_t generation;
    bool valid;
    uint32_t nodes;
    size_t words;
    uint64_t *opaque;
    uint64_t *light; /* weight classes: for each, the nodes of its weight or less, `words` of them */
    uint32_t weights[SLUICE_MIRROR_MAX_WEIGHTS];
    uint32_t weight_count;     /* SLUICE_MIRROR_MAX_WEIGHTS + 1: more than there is room for */
    uint64_t *fingerprint;     /* per node: its configuration as it was when the cluster was made */
    struct sluice_part *parts; /* scratch */
    uint32_t part_room;
    char (*models)[64];
    uint32_t model_count, shape_count;
    time_t scanned;         /* when a round of comparing configurations began */
    uint32_t scan_next;     /* where it goes on; 0: it is over */
    uint64_t configuration; /* `configurations` as it was when the cluster was made */

    struct entry *table;
    uint32_t table_size, entries, foreign, sharing;
    struct record *records;
    uint32_t record_count, record_room, free_record;
    uint32_t seen;
    bool short_of; /* a job holds a GPU that is taken, as Slurm gave it out twice, or MPS */
    struct sluice_cores *cores;
    bool reshare; /* a job that oversubscribes its cores came or went: for whom they count is to be found anew */

    struct sluice_decision_recorder *recorder;
    struct sluice_decision_topology *notes; /* how the cluster was made, for the recorder */
    struct sluice_mirror_counts counts;
    uint8_t shape_models[SLUICE_MAX_SHAPES]; /* by shape: 1 + the model of all its GPUs, 0 where they differ */
};

/* ---- what Slurm says of a node's GRES ---- */

/* The amounts of a GRES that shares GPUs, per GPU; false where the node's records do not tell GPUs apart. */
static bool shares_per_gpu(const gres_node_state_t *shared, uint32_t gpus, const uint64_t *counts, int64_t *out)
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

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ (hash >> 29);
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

/* Everything of a node's configuration that a mirror, or stock's answer to "could it ever run there", is made of, but
 * links and which cores are near which GPU: these come with the same registration as the rest. */
static uint64_t fingerprint(const node_record_t *node)
{
    if (!node)
        return 0;
    uint64_t hash = mix(7, node->real_memory);
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

/* ---- making the cluster ---- */

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

/* False: the node's GPUs cannot be told apart. */
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
        if (!shares_per_gpu(gres.shard, count, gres.shard->topo_gres_cnt_avail, memory))
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
                snprintf(name, sizeof(name), "%u/%.100s", parent, rest);
                uint32_t id = 0;
                for (uint32_t i = 0; i < known->count && !id; i++)
                    if (!strcmp(known->names[i], name))
                        id = i + 1;
                if (!id && known->count < known->room) {
                    if (sluice_cluster_add_switch(mirror->cluster, parent, &id, NULL))
                        break;
                    memcpy(known->names[known->count++], name, sizeof(name));
                    if (mirror->notes)
                        sluice_decision_note_switch(mirror->notes, parent);
                }
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

static void forget(struct sluice_mirror *mirror)
{
    sluice_cluster_free(mirror->cluster);
    mirror->cluster = NULL;
    mirror->valid = false;
    if (mirror->notes)
        sluice_decision_topology_free(mirror->notes);
    mirror->notes = NULL;
    free(mirror->opaque);
    free(mirror->light);
    mirror->light = NULL;
    free(mirror->fingerprint);
    free(mirror->parts);
    sluice_cores_free(mirror->cores);
    mirror->opaque = NULL;
    mirror->fingerprint = NULL;
    mirror->parts = NULL;
    mirror->cores = NULL;
    mirror->reshare = false;
    if (mirror->table)
        memset(mirror->table, 0, mirror->table_size * sizeof(*mirror->table));
    mirror->entries = mirror->foreign = mirror->sharing = 0;
    mirror->record_count = 0;
    mirror->free_record = NONE;
    mirror->model_count = mirror->shape_count = 0;
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

static enum sluice_error build(struct sluice_mirror *mirror, struct sluice_error_text *text)
{
    forget(mirror);
    uint32_t nodes = node_record_count > 0 ? (uint32_t)node_record_count : 0;
    struct sluice_cluster_config config = {
        .max_nodes = nodes ? nodes : 1,
        .max_switches = nodes < 1000                      ? 2000
                        : nodes * 2 > SLUICE_MAX_SWITCHES ? SLUICE_MAX_SWITCHES
                                                          : nodes * 2,
        .max_allocations = nodes * 128 + 4096,
    };
    enum sluice_error error = sluice_cluster_new(&config, &mirror->cluster, text);
    if (error)
        return error;
    mirror->nodes = nodes;
    mirror->words = ((size_t)nodes + 63) / 64;
    mirror->opaque = calloc(mirror->words + 1, sizeof(uint64_t));
    mirror->light = calloc((mirror->words + 1) * SLUICE_MIRROR_MAX_WEIGHTS, sizeof(uint64_t));
    mirror->fingerprint = calloc((size_t)nodes + 1, sizeof(uint64_t));
    mirror->part_room = nodes + MAX_GROUPS;
    mirror->parts = calloc(mirror->part_room, sizeof(*mirror->parts));
    mirror->cores = sluice_cores_new(nodes);
    struct switches known = {.room = config.max_switches};
    known.names = calloc(known.room, sizeof(*known.names));
    if (!mirror->opaque || !mirror->light || !mirror->fingerprint || !mirror->parts || !mirror->cores || !known.names) {
        free(known.names);
        forget(mirror);
        if (text)
            snprintf(text->text, sizeof(text->text), "out of memory for a mirror of %u nodes", nodes);
        return SLUICE_ERROR_NO_MEMORY;
    }
    mirror->notes = mirror->recorder ? sluice_decision_topology_new() : NULL;
    for (uint32_t n = 0; n < nodes; n++) {
        add_node(mirror, &known, n);
        mirror->fingerprint[n] = fingerprint(node_record_table_ptr[n]);
    }
    free(known.names);
    set_weights(mirror);
    struct sluice_cluster_totals totals;
    sluice_cluster_read_totals(mirror->cluster, &totals);
    if (totals.nodes != nodes) {
        forget(mirror);
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

/* ---- the table of jobs ---- */

static uint32_t slot_of(const struct sluice_mirror *mirror, uint32_t job_id)
{
    uint32_t mask = mirror->table_size - 1, at = job_id * UINT32_C(2654435761) & mask;
    while (mirror->table[at].job_id && mirror->table[at].job_id != job_id)
        at = (at + 1) & mask;
    return at;
}

static struct entry *find_entry(const struct sluice_mirror *mirror, uint32_t job_id)
{
    if (!mirror->table_size)
        return NULL;
    struct entry *entry = &mirror->table[slot_of(mirror, job_id)];
    return entry->job_id ? entry : NULL;
}

static bool grow_table(struct sluice_mirror *mirror)
{
    uint32_t size = mirror->table_size ? mirror->table_size * 2 : 1024;
    struct entry *old = mirror->table, *table = calloc(size, sizeof(*table));
    if (!table)
        return false;
    uint32_t old_size = mirror->table_size;
    mirror->table = table;
    mirror->table_size = size;
    for (uint32_t i = 0; i < old_size; i++)
        if (old[i].job_id)
            table[slot_of(mirror, old[i].job_id)] = old[i];
    free(old);
    return true;
}

static struct entry *add_entry(struct sluice_mirror *mirror, uint32_t job_id)
{
    if (mirror->entries * 2 >= mirror->table_size && !grow_table(mirror))
        return NULL;
    struct entry *entry = &mirror->table[slot_of(mirror, job_id)];
    if (!entry->job_id) {
        *entry = (struct entry){.job_id = job_id, .first = NONE};
        mirror->entries++;
        mirror->foreign += job_id >= FOREIGN;
    }
    return entry;
}

/* Strike an entry off; what stands behind it in its run moves up. */
static void remove_entry(struct sluice_mirror *mirror, uint32_t slot)
{
    uint32_t mask = mirror->table_size - 1, hole = slot, at = slot;
    mirror->foreign -= mirror->table[slot].job_id >= FOREIGN;
    mirror->sharing -= mirror->table[slot].sharing;
    mirror->entries--;
    for (;;) {
        at = (at + 1) & mask;
        if (!mirror->table[at].job_id)
            break;
        uint32_t home = mirror->table[at].job_id * UINT32_C(2654435761) & mask;
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            mirror->table[hole] = mirror->table[at];
            hole = at;
        }
    }
    mirror->table[hole] = (struct entry){0};
}

static bool add_record(struct sluice_mirror *mirror, struct entry *entry, uint64_t allocation)
{
    uint32_t record = mirror->free_record;
    if (record != NONE) {
        mirror->free_record = mirror->records[record].next;
    } else {
        if (mirror->record_count == mirror->record_room) {
            uint32_t room = mirror->record_room ? mirror->record_room * 2 : 1024;
            struct record *records = realloc(mirror->records, room * sizeof(*records));
            if (!records)
                return false;
            mirror->records = records;
            mirror->record_room = room;
        }
        record = mirror->record_count++;
    }
    mirror->records[record] = (struct record){.allocation = allocation, .next = entry->first};
    entry->first = record;
    return true;
}

/* ---- what a job holds ---- */

static void note_changed(struct sluice_mirror *mirror, const struct sluice_part *parts, uint32_t count)
{
    if (mirror->recorder)
        for (uint32_t i = 0; i < count; i++)
            sluice_decision_node_changed(mirror->recorder, parts[i].node);
}

static void hold(struct sluice_mirror *mirror, struct entry *entry, struct sluice_part *parts, uint32_t count)
{
    struct sluice_placement placement = {.parts = parts, .part_capacity = count, .part_count = count};
    uint64_t allocation = 0;
    if (!count || sluice_commit(mirror->cluster, &placement, &allocation, NULL))
        return; /* believed free: stock will say no where it is not */
    if (!add_record(mirror, entry, allocation))
        sluice_release(mirror->cluster, allocation, NULL);
    note_changed(mirror, parts, count);
}

static void let_go(struct sluice_mirror *mirror, uint32_t job_id)
{
    if (!mirror->table_size)
        return;
    uint32_t slot = slot_of(mirror, job_id);
    struct entry *entry = &mirror->table[slot];
    if (!entry->job_id)
        return;
    mirror->reshare |= entry->pooled;
    for (uint32_t at = entry->first, next; at != NONE; at = next) {
        uint32_t count = 0;
        next = mirror->records[at].next;
        if (!sluice_allocation_read(mirror->cluster, mirror->records[at].allocation, mirror->parts, mirror->part_room,
                                    &count, NULL))
            note_changed(mirror, mirror->parts, count);
        sluice_release(mirror->cluster, mirror->records[at].allocation, NULL);
        mirror->records[at].next = mirror->free_record;
        mirror->free_record = at;
    }
    remove_entry(mirror, slot);
    mirror->counts.jobs_freed += job_id < FOREIGN;
}

/* The GRES of a job on its node number `n`. */
struct held_gres {
    uint32_t n;
    uint32_t gpus; /* held whole */
    int64_t shares[SLUICE_MAX_GPUS];
    bool mps; /* of GPUs that only the node's records name */
};

static int add_job_gres(void *item, void *argument)
{
    const gres_state_t *state = item;
    struct held_gres *held = argument;
    const gres_job_state_t *job = state->gres_data;
    if (!state->gres_name || !job || held->n >= job->node_cnt || !job->gres_bit_alloc || !job->gres_bit_alloc[held->n])
        return 0;
    bitstr_t *bits = job->gres_bit_alloc[held->n];
    bitoff_t size = bit_size(bits) < SLUICE_MAX_GPUS ? bit_size(bits) : SLUICE_MAX_GPUS;
    if (!strcmp(state->gres_name, "gpu")) {
        for (bitoff_t i = 0; i < size; i++)
            held->gpus |= (uint32_t)(bit_test(bits, i) ? 1 : 0) << i;
    } else if (!strcmp(state->gres_name, "shard")) {
        const uint64_t *each = SLUICE_GRES_SHARES(job, held->n);
        uint64_t count = job->gres_cnt_node_alloc ? job->gres_cnt_node_alloc[held->n] : 0;
        int32_t gpus = bit_set_count(bits);
        for (bitoff_t i = 0; i < size; i++)
            if (bit_test(bits, i))
                held->shares[i] += (int64_t)(each ? each[i] : gpus ? count / (uint64_t)gpus : 0);
    } else if (!strcmp(state->gres_name, "mps")) {
        held->mps = true;
    }
    return 0;
}

static int64_t job_cores(const struct sluice_mirror *mirror, const job_record_t *job, uint32_t node, int offset,
                         int cores)
{
    const job_resources_t *resources = job->job_resrcs;
    if (sluice_cores_oversubscribed(job))
        return sluice_cores_of(mirror->cores, node, job->job_id);
    if (resources->whole_node == 1)
        return cores;
    return resources->core_bitmap ? bit_set_count_range(resources->core_bitmap, offset, offset + cores) : 0;
}

/* Has the job given up its cores? A time-sliced job keeps them. */
static bool is_suspended(const job_record_t *job)
{
    return IS_JOB_SUSPENDED(job) && !job->priority;
}

/* Others may have got the cores of a job while it was suspended, so that it shares them now: Slurm lets that happen. */
static bool shares_cores(const job_record_t *job)
{
    return job->suspend_time != 0;
}

/* Changes when a job holds something else than before. */
static uint64_t signature_of(const job_record_t *job, bool suspended)
{
    uint64_t hash = mix(3, (uint64_t)job->start_time);
    hash = mix(hash, (uint64_t)job->resize_time);
    hash = mix(hash, suspended);
    return mix(hash, job->job_resrcs ? job->job_resrcs->nhosts : 0);
}

static void free_by_slurm(const struct sluice_node_gres *gres, const struct sluice_node_view *view, int64_t *free_mib);

/*
 * No more than is free, so that a commit never fails of CPUs and memory; and of a GPU no more than Slurm's record of
 * the node says is in use: where it gave a GPU out twice, the end of one job frees it while the other still has it.
 */
static void fit_to_free(const struct sluice_mirror *mirror, struct sluice_part *part)
{
    struct sluice_node_view view;
    int64_t free_mib[SLUICE_MAX_GPUS];
    if (sluice_node_read(mirror->cluster, part->node, &view, NULL))
        return;
    if (part->cpus_milli > view.cpus_milli_free)
        part->cpus_milli = view.cpus_milli_free;
    if (part->host_memory_mib > view.host_memory_mib_free)
        part->host_memory_mib = view.host_memory_mib_free;
    if (!part->gpus)
        return;
    struct sluice_node_gres gres = sluice_gres_of_node(node_record_table_ptr[part->node]);
    free_by_slurm(&gres, &view, free_mib);
    for (uint32_t i = 0; i < SLUICE_MAX_GPUS; i++) {
        if (!(part->gpus >> i & 1))
            continue;
        int64_t asked = i >= view.gpu_count    ? INT64_MAX
                        : part->gpu_memory_mib ? part->gpu_memory_mib
                                               : view.gpu_memory_mib[i];
        if (i >= view.gpu_count || view.gpu_memory_mib_free[i] - free_mib[i] < asked)
            part->gpus &= ~(UINT32_C(1) << i);
    }
    if (!part->gpus)
        part->gpu_memory_mib = 0;
}

/* Write the parts of one group of what a job holds; groups differ in how much of a GPU they hold. Group 0 has the
 * CPUs, the memory and the whole GPUs. Returns how many parts there are; *again: further groups are needed. */
static uint32_t parts_of_job(struct sluice_mirror *mirror, const job_record_t *job, bool suspended, uint32_t group,
                             bool *again)
{
    const job_resources_t *resources = job->job_resrcs;
    uint32_t count = 0, n = 0;
    int offset = 0;
    *again = false;
    for (bitoff_t i = bit_ffs(resources->node_bitmap), last = bit_fls(resources->node_bitmap); i >= 0 && i <= last;
         i++) {
        if (!bit_test(resources->node_bitmap, i))
            continue;
        const node_record_t *node = (uint32_t)i < mirror->nodes ? node_record_table_ptr[i] : NULL;
        uint32_t number = n++;
        if (!node)
            continue;
        int cores = node->tot_cores, begin = offset;
        offset += cores;
        if (resources->cpus && !resources->cpus[number])
            continue; /* given back by a resize */
        struct held_gres held = {.n = number};
        if (job->gres_list_alloc)
            list_for_each_ro(job->gres_list_alloc, add_job_gres, &held);
        mirror->short_of |= held.mps;
        struct sluice_part part = {.node = (uint32_t)i};
        /* The distinct amounts of shares, in ascending order of GPU, are the groups behind the first. */
        uint32_t seen = 0;
        for (uint32_t gpu = 0; gpu < SLUICE_MAX_GPUS; gpu++) {
            bool first = held.shares[gpu] > 0;
            for (uint32_t before = 0; before < gpu && first; before++)
                first = held.shares[before] != held.shares[gpu];
            if (!first)
                continue;
            seen++;
            if (seen != group)
                continue;
            part.gpu_memory_mib = held.shares[gpu];
            for (uint32_t other = gpu; other < SLUICE_MAX_GPUS; other++)
                part.gpus |= (uint32_t)(held.shares[other] == held.shares[gpu]) << other;
        }
        *again = *again || seen > group;
        if (group == 0) {
            part.gpus = held.gpus;
            part.cpus_milli =
                suspended || shares_cores(job) ? 0 : job_cores(mirror, job, part.node, begin, cores) * node->tpc * 1000;
            part.host_memory_mib = resources->memory_allocated ? (int64_t)resources->memory_allocated[number] : 0;
        } else if (!part.gpus) {
            continue;
        }
        uint32_t gpus = part.gpus;
        fit_to_free(mirror, &part);
        mirror->short_of |= part.gpus != gpus;
        mirror->parts[count++] = part;
    }
    return count;
}

static void hold_job(struct sluice_mirror *mirror, const job_record_t *job, bool suspended)
{
    let_go(mirror, job->job_id);
    if (!job->job_resrcs || !job->job_resrcs->node_bitmap)
        return;
    struct entry *entry = add_entry(mirror, job->job_id);
    if (!entry)
        return;
    mirror->sharing += shares_cores(job) || suspended;
    entry->sharing = shares_cores(job) || suspended;
    entry->pooled = !entry->sharing && sluice_cores_oversubscribed(job);
    mirror->reshare |= entry->pooled;
    entry->signature = signature_of(job, suspended);
    entry->seen = mirror->seen;
    bool again = true;
    for (uint32_t group = 0; again && group < MAX_GROUPS; group++) {
        uint32_t count = parts_of_job(mirror, job, suspended, group, &again);
        hold(mirror, entry, mirror->parts, count);
    }
    mirror->counts.jobs_held++;
}

/* ---- cores that are oversubscribed ---- */

/* Jobs that oversubscribe their cores on some nodes. */
struct sharers {
    const struct sluice_mirror *mirror;
    bitstr_t *nodes; /* NULL: all */
    job_record_t **jobs;
    uint32_t count, room;
};

static int add_sharer(void *item, void *argument)
{
    struct sharers *sharers = argument;
    job_record_t *job = item;
    const struct entry *entry = find_entry(sharers->mirror, job->job_id);
    if (entry && entry->pooled && sharers->count < sharers->room && sluice_cores_oversubscribed(job) &&
        job->job_resrcs->node_bitmap &&
        (!sharers->nodes || bit_overlap_any(job->job_resrcs->node_bitmap, sharers->nodes)))
        sharers->jobs[sharers->count++] = job;
    return 0;
}

static int ends_later(const void *a, const void *b)
{
    const job_record_t *one = *(job_record_t *const *)a, *other = *(job_record_t *const *)b;
    return (one->end_time < other->end_time) - (one->end_time > other->end_time);
}

/* A core counts for the last of its jobs to end, so that whoever plans with ends has it free then. */
static void share_out(struct sluice_mirror *mirror, bitstr_t *nodes)
{
    struct sharers sharers = {.mirror = mirror, .nodes = nodes, .room = mirror->entries};
    sharers.jobs = sharers.room ? calloc(sharers.room, sizeof(job_record_t *)) : NULL;
    if (sharers.jobs)
        list_for_each_ro(job_list, add_sharer, &sharers);
    if (sharers.count)
        qsort(sharers.jobs, sharers.count, sizeof(job_record_t *), ends_later);
    sluice_cores_clear(mirror->cores, nodes);
    for (uint32_t i = 0; i < sharers.count; i++) {
        let_go(mirror, sharers.jobs[i]->job_id);
        sluice_cores_claim(mirror->cores, sharers.jobs[i], nodes);
    }
    for (uint32_t i = 0; i < sharers.count; i++)
        hold_job(mirror, sharers.jobs[i], false);
    free(sharers.jobs);
    mirror->reshare = false;
}

/* ---- a node's GRES against the mirror ---- */

/* What of each GPU is free, as Slurm has it. */
static void free_by_slurm(const struct sluice_node_gres *gres, const struct sluice_node_view *view, int64_t *free_mib)
{
    int64_t used[SLUICE_MAX_GPUS] = {0}, mps[SLUICE_MAX_GPUS] = {0};
    if (gres->shard && gres->shard->gres_cnt_avail)
        shares_per_gpu(gres->shard, view->gpu_count, gres->shard->topo_gres_cnt_alloc, used);
    if (gres->mps && gres->mps->gres_cnt_avail)
        shares_per_gpu(gres->mps, view->gpu_count, gres->mps->topo_gres_cnt_alloc, mps);
    for (uint32_t i = 0; i < view->gpu_count; i++) {
        bool whole = gres->gpu && gres->gpu->gres_bit_alloc && i < bit_size(gres->gpu->gres_bit_alloc) &&
                     bit_test(gres->gpu->gres_bit_alloc, i);
        int64_t left = view->gpu_memory_mib[i] - used[i];
        if (mps[i] && left == view->gpu_memory_mib[i])
            left--; /* in use, though the core does not know how */
        free_mib[i] = whole || left < 0 ? 0 : left;
    }
}

/* Hold for nobody what Slurm says is in use. */
static void hold_foreign(struct sluice_mirror *mirror, uint32_t node, const int64_t *free_mib)
{
    struct entry *entry = NULL;
    struct sluice_node_view view;
    if (sluice_node_read(mirror->cluster, node, &view, NULL))
        return;
    for (uint32_t i = 0; i < view.gpu_count; i++) {
        int64_t more = view.gpu_memory_mib_free[i] - free_mib[i];
        if (more <= 0)
            continue;
        if (!entry && !(entry = add_entry(mirror, FOREIGN + node)))
            return;
        struct sluice_part part = {.node = node, .gpus = UINT32_C(1) << i, .gpu_memory_mib = more};
        hold(mirror, entry, &part, 1);
    }
}

static int hold_if_running(void *item, void *argument);

/* Compare the list of running jobs. */
static void sync_jobs(struct sluice_mirror *mirror)
{
    mirror->seen++;
    list_for_each_ro(job_list, hold_if_running, mirror);
    for (uint32_t i = 0; i < mirror->table_size;) {
        const struct entry *entry = &mirror->table[i];
        if (entry->job_id && entry->job_id < FOREIGN && entry->seen != mirror->seen)
            let_go(mirror, entry->job_id); /* another entry may have moved here */
        else
            i++;
    }
    if (mirror->reshare)
        share_out(mirror, NULL);
}

static int hold_if_running(void *item, void *argument)
{
    struct sluice_mirror *mirror = argument;
    const job_record_t *job = item;
    if ((!IS_JOB_RUNNING(job) && !IS_JOB_SUSPENDED(job)) || !job->job_resrcs)
        return 0;
    struct entry *entry = find_entry(mirror, job->job_id);
    if (entry && entry->signature == signature_of(job, is_suspended(job)))
        entry->seen = mirror->seen;
    else
        hold_job(mirror, job, is_suspended(job));
    return 0;
}

static bool is_opaque(const struct sluice_mirror *mirror, uint32_t node)
{
    return mirror->opaque[node / 64] >> (node % 64) & 1;
}

static bool same_free(const struct sluice_mirror *mirror, uint32_t node, int64_t *free_mib)
{
    struct sluice_node_view view;
    const node_record_t *record = node_record_table_ptr[node];
    if (!record || sluice_node_read(mirror->cluster, node, &view, NULL))
        return true;
    struct sluice_node_gres gres = sluice_gres_of_node(record);
    free_by_slurm(&gres, &view, free_mib);
    for (uint32_t i = 0; i < view.gpu_count; i++)
        if (view.gpu_memory_mib_free[i] != free_mib[i])
            return false;
    return true;
}

struct on_node {
    struct sluice_mirror *mirror;
    uint32_t node;
};

static int hold_again_on_node(void *item, void *argument)
{
    const struct on_node *on = argument;
    const job_record_t *job = item;
    if ((IS_JOB_RUNNING(job) || IS_JOB_SUSPENDED(job)) && job->job_resrcs && job->job_resrcs->node_bitmap &&
        bit_test(job->job_resrcs->node_bitmap, on->node))
        hold_job(on->mirror, job, is_suspended(job));
    return 0;
}

/* Make the node's GPUs agree with Slurm's. */
static void correct(struct sluice_mirror *mirror, uint32_t node)
{
    int64_t free_mib[SLUICE_MAX_GPUS];
    struct sluice_node_view view;
    bool too_much = false;
    let_go(mirror, FOREIGN + node);
    if (!same_free(mirror, node, free_mib) && !sluice_node_read(mirror->cluster, node, &view, NULL))
        for (uint32_t i = 0; i < view.gpu_count; i++)
            too_much |= view.gpu_memory_mib_free[i] < free_mib[i];
    if (too_much)
        list_for_each_ro(job_list, hold_again_on_node, &(struct on_node){mirror, node});
    if (!same_free(mirror, node, free_mib))
        hold_foreign(mirror, node, free_mib);
}

/* Make all nodes' GPUs agree with Slurm's. */
static void correct_all(struct sluice_mirror *mirror)
{
    int64_t free_mib[SLUICE_MAX_GPUS];
    for (uint32_t n = 0; n < mirror->nodes; n++)
        if (!is_opaque(mirror, n) && !same_free(mirror, n, free_mib))
            correct(mirror, n);
    mirror->short_of = false;
}

bool sluice_mirror_node_agrees(struct sluice_mirror *mirror, uint32_t node)
{
    int64_t free_mib[SLUICE_MAX_GPUS];
    if (!mirror->valid || node >= mirror->nodes || is_opaque(mirror, node) || same_free(mirror, node, free_mib))
        return true;
    mirror->counts.mismatches++;
    sync_jobs(mirror);
    correct(mirror, node);
    return false;
}

/* ---- following ---- */

enum sluice_error sluice_mirror_new(struct sluice_mirror **mirror, struct sluice_error_text *text)
{
    struct sluice_mirror *made = calloc(1, sizeof(*made));
    char(*models)[64] = calloc(SLUICE_MAX_MODELS, sizeof(*models));
    if (!made || !models) {
        free(made);
        free(models);
        if (text)
            snprintf(text->text, sizeof(text->text), "out of memory for a mirror");
        return SLUICE_ERROR_NO_MEMORY;
    }
    made->models = models;
    made->free_record = NONE;
    *mirror = made;
    return SLUICE_OK;
}

void sluice_mirror_free(struct sluice_mirror *mirror)
{
    if (!mirror)
        return;
    forget(mirror);
    free(mirror->table);
    free(mirror->records);
    free(mirror->models);
    free(mirror);
}

void sluice_mirror_record(struct sluice_mirror *mirror, struct sluice_decision_recorder *recorder)
{
    if (mirror->recorder != recorder)
        mirror->valid = false;
    mirror->recorder = recorder;
}

void sluice_mirror_invalidate(struct sluice_mirror *mirror)
{
    mirror->valid = false;
}

/* Grows whenever a mirror finds that nodes were configured anew: all others look no further. */
static _Atomic uint64_t configurations;

void sluice_mirrors_outdated(void)
{
    atomic_fetch_add(&configurations, 1);
}

/*
 * Is any node configured in another way than when the cluster was made? Slurm tells a select plugin of some such
 * changes only, so all nodes are compared: at once by whoever has time, a few at a call by the hook.
 */
static bool configuration_changed(struct sluice_mirror *mirror, bool all, time_t now)
{
    if ((uint32_t)node_record_count != mirror->nodes || mirror->configuration != atomic_load(&configurations))
        return true;
    if (!mirror->scan_next) {
        /* Times are whole seconds: what changed in the second of the last round may have been missed by it. */
        if (now == mirror->scanned || last_node_update < mirror->scanned)
            return false;
        mirror->scanned = now;
        mirror->counts.scans++;
    }
    uint32_t end =
        all || mirror->nodes - mirror->scan_next < SCAN_SLICE ? mirror->nodes : mirror->scan_next + SCAN_SLICE;
    for (; mirror->scan_next < end; mirror->scan_next++) {
        if (fingerprint(node_record_table_ptr[mirror->scan_next]) != mirror->fingerprint[mirror->scan_next]) {
            atomic_fetch_add(&configurations, 1);
            return true;
        }
    }
    if (mirror->scan_next == mirror->nodes)
        mirror->scan_next = 0;
    return false;
}

enum sluice_error sluice_mirror_sync(struct sluice_mirror *mirror, bool jobs, time_t now,
                                     struct sluice_error_text *text)
{
    if (!mirror->valid || configuration_changed(mirror, jobs, now)) {
        uint64_t configuration = atomic_load(&configurations);
        enum sluice_error error = build(mirror, text);
        if (error)
            return error;
        mirror->configuration = configuration;
        mirror->scanned = now;
        mirror->scan_next = 0;
        sync_jobs(mirror);
        correct_all(mirror);
    } else if (jobs) {
        sync_jobs(mirror);
        if (mirror->short_of || mirror->foreign)
            correct_all(mirror);
    }
    return SLUICE_OK;
}

void sluice_mirror_job_changed(struct sluice_mirror *mirror, job_record_t *job, enum sluice_mirror_job what)
{
    if (!mirror->valid || (uint32_t)node_record_count != mirror->nodes)
        return;
    if (what == SLUICE_MIRROR_ENDED)
        let_go(mirror, job->job_id);
    else
        hold_job(mirror, job, what == SLUICE_MIRROR_SUSPENDED);
    if (mirror->reshare)
        share_out(mirror, job->job_resrcs ? job->job_resrcs->node_bitmap : NULL);
    /* Where Slurm gave a GPU out twice, or something holds it that is no job, the records of the node decide. */
    bool compare = mirror->short_of || mirror->foreign || what == SLUICE_MIRROR_ENDED;
    mirror->short_of = false;
    if (!compare || !job->job_resrcs || !job->job_resrcs->node_bitmap)
        return;
    bitstr_t *nodes = job->job_resrcs->node_bitmap;
    for (bitoff_t i = bit_ffs(nodes), last = bit_fls(nodes); i >= 0 && i <= last; i++) {
        int64_t free_mib[SLUICE_MAX_GPUS];
        if (bit_test(nodes, i) && !is_opaque(mirror, (uint32_t)i) && !same_free(mirror, (uint32_t)i, free_mib))
            correct(mirror, (uint32_t)i);
    }
}

/* ---- reading ---- */

struct sluice_cluster *sluice_mirror_cluster(struct sluice_mirror *mirror)
{
    return mirror->cluster;
}

uint64_t sluice_mirror_generation(const struct sluice_mirror *mirror)
{
    return mirror->generation;
}

struct sluice_mirror_counts sluice_mirror_counts(const struct sluice_mirror *mirror)
{
    return mirror->counts;
}

uint32_t sluice_mirror_allocations(const struct sluice_mirror *mirror, uint32_t job_id, uint64_t *allocations,
                                   uint32_t capacity)
{
    const struct entry *entry = find_entry(mirror, job_id);
    uint32_t count = 0;
    for (uint32_t at = entry ? entry->first : NONE; at != NONE; at = mirror->records[at].next, count++)
        if (count < capacity)
            allocations[count] = mirror->records[at].allocation;
    return count;
}

const struct sluice_part *sluice_mirror_parts(struct sluice_mirror *mirror, uint32_t job_id, uint32_t *count)
{
    const struct entry *entry = find_entry(mirror, job_id);
    *count = 0;
    for (uint32_t at = entry ? entry->first : NONE; at != NONE; at = mirror->records[at].next) {
        uint32_t more = 0;
        if (!sluice_allocation_read(mirror->cluster, mirror->records[at].allocation, mirror->parts + *count,
                                    mirror->part_room - *count, &more, NULL))
            *count += more;
    }
    return mirror->parts;
}

const uint64_t *sluice_mirror_opaque(const struct sluice_mirror *mirror)
{
    return mirror->opaque;
}

uint64_t sluice_mirror_models_hash(const struct sluice_mirror *mirror)
{
    uint64_t hash = 5;
    for (uint32_t m = 0; m < mirror->model_count; m++)
        for (const char *c = mirror->models[m]; *c; c++)
            hash = mix(hash, (uint8_t)*c);
    return hash;
}

enum sluice_error sluice_mirror_set_workload(struct sluice_mirror *mirror, const struct sluice_request *shapes,
                                             const uint32_t *weights, uint32_t count)
{
    if (!mirror->valid)
        return SLUICE_OK;
    enum sluice_error error = sluice_cluster_set_workload(mirror->cluster, shapes, weights, count, NULL);
    if (!error && mirror->notes) {
        sluice_decision_note_workload(mirror->notes, shapes, weights, count);
        sluice_decision_set_topology(mirror->recorder, mirror->notes, mirror->cluster, NULL);
    }
    return error;
}

uint32_t sluice_mirror_nodes(const struct sluice_mirror *mirror)
{
    return mirror->nodes;
}

uint32_t sluice_mirror_weights(const struct sluice_mirror *mirror)
{
    return mirror->weight_count;
}

const uint64_t *sluice_mirror_light(const struct sluice_mirror *mirror, uint32_t weight)
{
    return mirror->light + weight * mirror->words;
}

size_t sluice_mirror_words(const struct sluice_mirror *mirror)
{
    return mirror->words;
}

uint64_t sluice_mirror_models(const struct sluice_mirror *mirror, const char *type)
{
    for (uint32_t m = 0; m < mirror->model_count; m++)
        if (!strcmp(mirror->models[m], type))
            return UINT64_C(1) << m;
    return 0;
}

const char *sluice_mirror_node_type(const struct sluice_mirror *mirror, uint32_t node)
{
    struct sluice_node_view view;
    if (sluice_node_read(mirror->cluster, node, &view, NULL) || view.shape >= mirror->shape_count ||
        !mirror->shape_models[view.shape])
        return "";
    return mirror->models[mirror->shape_models[view.shape] - 1];
}

const uint64_t *sluice_bitmap_words(bitstr_t *bitmap, size_t *words)
{
    /* Two words of header, then bit n in word n / 64, the lowest first: as the core has it on little-endian machines.
     */
    _Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "Slurm counts bits from the other end there");
    _Static_assert(sizeof(bitstr_t) == sizeof(uint64_t), "");
    *words = ((size_t)bit_size(bitmap) + 63) / 64;
    return (const uint64_t *)(const void *)(bitmap + 2);
}

/* ---- checking ---- */

static enum sluice_error differs(struct sluice_error_text *text, uint32_t node, const char *what, int64_t mirror,
                                 int64_t slurm)
{
    if (text)
        snprintf(text->text, sizeof(text->text), "node %s: %s: the mirror says %lld, Slurm %lld",
                 node_record_table_ptr[node]->name, what, (long long)mirror, (long long)slurm);
    return SLUICE_ERROR_CORRUPT;
}

enum sluice_error sluice_mirror_check(struct sluice_mirror *mirror, sluice_mirror_free_fn free_of,
                                      struct sluice_error_text *text)
{
    if (!mirror->valid)
        return SLUICE_OK;
    enum sluice_error error = sluice_cluster_check(mirror->cluster, text);
    for (uint32_t n = 0; n < mirror->nodes && !error; n++) {
        const node_record_t *node = node_record_table_ptr[n];
        struct sluice_node_view view;
        int64_t free_mib[SLUICE_MAX_GPUS], cpus, memory;
        if (!node || is_opaque(mirror, n) || sluice_node_read(mirror->cluster, n, &view, NULL))
            continue;
        if (fingerprint(node) != mirror->fingerprint[n])
            continue; /* found within the next round, and then the mirror is made anew */
        if (!same_free(mirror, n, free_mib))
            for (uint32_t i = 0; i < view.gpu_count; i++) {
                char what[64];
                snprintf(what, sizeof(what), "free memory of GPU %u", i);
                if (view.gpu_memory_mib_free[i] != free_mib[i])
                    return differs(text, n, what, view.gpu_memory_mib_free[i], free_mib[i]);
            }
        if (!free_of || !free_of(n, &cpus, &memory))
            continue;
        if (view.cpus_milli_free < cpus * 1000 || (!mirror->sharing && view.cpus_milli_free != cpus * 1000))
            return differs(text, n, "free CPUs", view.cpus_milli_free / 1000, cpus);
        if (view.host_memory_mib_free != memory)
            return differs(text, n, "free memory", view.host_memory_mib_free, memory);
    }
    return error;
}
