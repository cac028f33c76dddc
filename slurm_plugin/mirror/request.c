/* SPDX-License-Identifier: GPL-2.0-or-later */
#include "mirror/request.h"

#include "mirror/mirror.h"

#include "rules/rules.h"

#include "src/common/list.h"
#include "src/common/xmalloc.h"
#include "src/common/xstring.h"

#include <string.h>
#include <time.h>

/* Why stock alone decides: in counters, and to people. */
static const struct {
    const char *name, *text;
} reasons[SLUICE_STOCK_COUNT] = {
    [SLUICE_STOCK_NONE] = {"none", ""},
    [SLUICE_STOCK_HET] = {"heterogeneous", "component of a heterogeneous job"},
    [SLUICE_STOCK_REQUIRED_NODES] = {"required_nodes", "nodes are required by name"},
    [SLUICE_STOCK_FEATURES] = {"features",
                               "features that are counted, exclusive or preferred, or such as nodes are rebooted for"},
    [SLUICE_STOCK_RESERVED_CORES] = {"reserved_cores", "cores or GRES of nodes are reserved"},
    [SLUICE_STOCK_SHARED] = {"shared_cores", "cores may be oversubscribed"},
    [SLUICE_STOCK_SWITCHES] = {"switches", "several switches are asked"},
    [SLUICE_STOCK_CONTIGUOUS] = {"contiguous", "contiguous nodes are asked"},
    [SLUICE_STOCK_CORE_SPEC] = {"core_spec", "specialized cores are asked"},
    [SLUICE_STOCK_LICENSES] = {"licences", "licences are asked"},
    [SLUICE_STOCK_GRES] = {"gres", "GRES of a kind that is not modelled"},
    [SLUICE_STOCK_BIND] = {"bind", "GPUs are bound to cores"},
    [SLUICE_STOCK_NO_GPUS] = {"no_gpus", "several nodes without GPUs"},
    [SLUICE_STOCK_LLN] = {"least_loaded", "the least loaded node is asked"},
    [SLUICE_STOCK_RESIZE] = {"resize", "expands another job"},
    [SLUICE_STOCK_FUTURE] = {"future", "asked for a later time"},
    [SLUICE_STOCK_TOPOLOGY] = {"topology", "preferences about the network"},
    [SLUICE_STOCK_CONSTRAINTS] = {"constraints", "extra constraints, or no possible number of nodes"},
    [SLUICE_STOCK_OPTIONS] = {"options", "options that do not parse"},
    [SLUICE_STOCK_UNKNOWN_TYPE] = {"unknown_type", "a GPU type that no node has"},
    [SLUICE_STOCK_MIRROR] = {"mirror", "out of memory"},
    [SLUICE_STOCK_WEIGHTS] = {"weights", "nodes have too many different weights"},
    [SLUICE_STOCK_REQUEST] = {"request", "amounts that cannot be divided among the nodes, as fewer GPUs than nodes"},
    [SLUICE_STOCK_OWNER] = {"owner", "nodes are to be kept from other users' jobs"},
};

const char *sluice_job_stock_name(enum sluice_job_stock reason)
{
    return (unsigned)reason < SLUICE_STOCK_COUNT ? reasons[reason].name : "unknown";
}

const char *sluice_job_stock_text(enum sluice_job_stock reason)
{
    return (unsigned)reason < SLUICE_STOCK_COUNT ? reasons[reason].text : "unknown";
}

/* ---- what is left to stock ---- */

enum { MOST_FEATURES = 32 }; /* of one job: they are looked up in each plan */

static int find_unsupported_feature(void *item, void *argument)
{
    const job_feature_t *feature = item;
    (void)argument;
    /* Behind OR and AND come exclusive or (22.05) or matching or (24.11), and XAND. */
    bool odd = feature->count || feature->op_code == FEATURE_OP_AND + 1 || feature->op_code == FEATURE_OP_XAND;
    return odd ? -1 : 0;
}

static bool has_unsupported_features(const sluice_job_details *details)
{
    return details->feature_list && (list_count(details->feature_list) > MOST_FEATURES ||
                                     list_for_each_ro(details->feature_list, find_unsupported_feature, NULL) < 0);
}

/*
 * The jobs whose nodes stock alone chooses. Each reason is a way in which slurmctld or select/cons_tres treats a job
 * that the core's request cannot express, and in which the core's nodes could be wrong and not only refused.
 */

/* Not even how much of how many nodes they take can be said. */
static enum sluice_job_stock unknown_amount(const job_record_t *job, uint32_t min_nodes, uint32_t max_nodes)
{
    const sluice_job_details *details = job->details;
    const part_record_t *part = job->part_ptr;
    if (job->het_job_id)
        return SLUICE_STOCK_HET;
    if (!job->job_id || !part || !min_nodes || max_nodes < min_nodes || SLUICE_EXTRA_CONSTRAINTS(job))
        return SLUICE_STOCK_CONSTRAINTS;
    /* A job with preferred features is tried with these and then with the required ones (feature_list_use). */
    if (details->prefer || has_unsupported_features(details) ||
        (details->feature_list && slurm_conf.node_features_plugins))
        return SLUICE_STOCK_FEATURES;
    if ((part->max_share & SHARED_FORCE) || (part->max_share > 1 && details->share_res == 1) ||
        (slurm_conf.preempt_mode & PREEMPT_MODE_GANG))
        return SLUICE_STOCK_SHARED;
    if (job->req_switch > 1)
        return SLUICE_STOCK_SWITCHES;
    if (details->contiguous)
        return SLUICE_STOCK_CONTIGUOUS;
    if (SLUICE_EXCLUSIVE_OF_OTHERS(job))
        return SLUICE_STOCK_OWNER;
    if (details->core_spec != NO_VAL16)
        return SLUICE_STOCK_CORE_SPEC;
    if (details->expanding_jobid)
        return SLUICE_STOCK_RESIZE;
    return SLUICE_TOPOLOGY_PREFERENCES(job) ? SLUICE_STOCK_TOPOLOGY : SLUICE_STOCK_NONE;
}

/* Only which nodes, or which parts of them. */
static enum sluice_job_stock unknown_choice(const job_record_t *job)
{
    const sluice_job_details *details = job->details;
    if (details->req_node_bitmap || (details->task_dist & SLURM_DIST_STATE_BASE) == SLURM_DIST_ARBITRARY)
        return SLUICE_STOCK_REQUIRED_NODES;
    if (job->license_list)
        return SLUICE_STOCK_LICENSES;
    if (job->bit_flags & GRES_ENFORCE_BIND)
        return SLUICE_STOCK_BIND;
    if ((slurm_conf.select_type_param & SLUICE_SELECT_LLN) || (job->part_ptr->flags & PART_FLAG_LLN))
        return SLUICE_STOCK_LLN;
    return SLUICE_STOCK_NONE;
}

/* ---- GRES ---- */

/* The totals of a job's GRES. */
struct gres_need {
    const gres_job_state_t *gpu, *shard, *nic;
    bool odd;
    bool nics_odd; /* several types, in total or by sockets: left to stock */
};

static int add_gres(void *item, void *argument)
{
    const gres_state_t *state = item;
    struct gres_need *need = argument;
    const gres_job_state_t *job = state->gres_data;
    if (!state->gres_name || !job)
        return 0;
    bool counted = job->gres_per_job || job->gres_per_node || job->gres_per_socket || job->gres_per_task;
    if (!strcmp(state->gres_name, "gpu")) {
        need->odd |= need->gpu || job->gres_per_socket || !counted;
        need->gpu = job;
    } else if (!strcmp(state->gres_name, "shard")) {
        /* Whole amounts on each node only; and none of a type, which admission refuses. */
        need->odd |= need->shard || !job->gres_per_node || job->gres_per_job || job->gres_per_socket ||
                     job->gres_per_task || (job->type_name && *job->type_name);
        need->shard = job;
    } else if (!strcmp(state->gres_name, "mps")) {
        need->odd = true;
    } else if (!strcmp(state->gres_name, "nic")) {
        need->nics_odd |=
            need->nic || job->gres_per_job || job->gres_per_socket || job->gres_per_node > SLUICE_MAX_NICS;
        need->nic = job;
    }
    /* Other GRES only restrict stock's choice further. */
    return 0;
}

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ (hash >> 29);
}

static void add_word(struct sluice_job_shape *shape, uint64_t word)
{
    if (shape->count < SLUICE_SHAPE_WORDS)
        shape->words[shape->count] = word;
    shape->count++;
    shape->hash = mix(shape->hash, word);
}

static int add_gres_words(void *item, void *argument)
{
    const gres_state_t *state = item;
    const gres_job_state_t *job = state->gres_data;
    struct sluice_job_shape *shape = argument;
    add_word(shape, state->plugin_id);
    add_word(shape, state->config_flags);
    if (!job)
        return 0;
    add_word(shape, job->type_name && *job->type_name ? job->type_id : 0);
    add_word(shape, job->flags);
    add_word(shape, job->gres_per_job);
    add_word(shape, job->gres_per_node);
    add_word(shape, job->gres_per_socket);
    add_word(shape, job->gres_per_task);
    add_word(shape, job->cpus_per_gres);
    add_word(shape, job->mem_per_gres);
    add_word(shape, job->ntasks_per_gres);
    return 0;
}

static void make_shape(const job_record_t *job, uint32_t min_nodes, uint32_t max_nodes, uint32_t req_nodes,
                       struct sluice_job_shape *shape)
{
    const sluice_job_details *details = job->details;
    const part_record_t *part = job->part_ptr;
    const multi_core_data_t *cores = details->mc_ptr;
    shape->hash = 1;
    shape->count = 0;
    add_word(shape, (uint64_t)min_nodes << 32 | max_nodes);
    add_word(shape, (uint64_t)req_nodes << 32 | details->min_nodes);
    add_word(shape, (uint64_t)details->max_nodes << 32 | details->min_cpus);
    add_word(shape, (uint64_t)details->max_cpus << 32 | details->num_tasks);
    add_word(shape, (uint64_t)details->pn_min_cpus << 32 | details->orig_pn_min_cpus);
    add_word(shape, details->pn_min_memory);
    add_word(shape, (uint64_t)details->cpus_per_task << 48 | (uint64_t)details->orig_cpus_per_task << 32 |
                        (uint64_t)details->ntasks_per_node << 16 | details->ntasks_per_tres);
    add_word(shape, (uint64_t)details->overcommit << 24 | (uint64_t)details->whole_node << 16 |
                        (uint64_t)details->share_res << 8 | (uint64_t)(job->cpus_per_tres != NULL));
    add_word(shape, details->task_dist);
    add_word(shape, (uint64_t)job->req_switch << 33 | (uint64_t)sluice_job_waits_for_switch(job) << 32 |
                        sluice_job_segment(job));
    /* Flags that a test sets for itself do not count. */
    add_word(shape, job->bit_flags & (GRES_DISABLE_BIND | JOB_MEM_SET | SPREAD_JOB | USE_MIN_NODES));
    if (cores) {
        add_word(shape, (uint64_t)cores->boards_per_node << 48 | (uint64_t)cores->sockets_per_board << 32 |
                            (uint64_t)cores->sockets_per_node << 16 | cores->cores_per_socket);
        add_word(shape, (uint64_t)cores->threads_per_core << 48 | (uint64_t)cores->ntasks_per_board << 32 |
                            (uint64_t)cores->ntasks_per_socket << 16 | cores->ntasks_per_core);
        add_word(shape, cores->plane_size);
    }
    add_word(shape, (uintptr_t)part);
    add_word(shape, (uint64_t)part->max_cpus_per_node << 32 | SLUICE_MAX_CPUS_PER_SOCKET(part));
    add_word(shape, (uint64_t)part->cr_type << 32 | part->max_share);
    add_word(shape, (uintptr_t)part->job_defaults_list);
    if (job->gres_list_req)
        list_for_each_ro(job->gres_list_req, add_gres_words, shape);
    if (shape->count > SLUICE_SHAPE_WORDS)
        shape->count = 0;
}

/* ---- amounts ---- */

static uint32_t most(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static uint32_t share_of(uint64_t total, uint32_t nodes)
{
    uint64_t share = (total + nodes - 1) / nodes;
    return share < UINT32_MAX ? (uint32_t)share : UINT32_MAX;
}

static uint32_t cpus_per_task(const sluice_job_details *details)
{
    return details->cpus_per_task && details->cpus_per_task != NO_VAL16 ? details->cpus_per_task : 1;
}

/* CPUs on all nodes together; 0 where tasks may share them. */
static uint64_t all_cpus(const sluice_job_details *details)
{
    if (details->overcommit)
        return 0;
    uint64_t tasks = details->num_tasks && details->num_tasks != NO_VAL ? details->num_tasks : 1;
    uint64_t all = tasks * cpus_per_task(details);
    return details->min_cpus != NO_VAL && details->min_cpus > all ? details->min_cpus : all;
}

/* CPUs on each node: by stock's rules at least, and what lets all tasks run on so few nodes. */
static void add_cpus(const job_record_t *job, uint32_t min_nodes, uint32_t max_nodes, struct sluice_job_request *out)
{
    const sluice_job_details *details = job->details;
    uint32_t tasks_on_node = details->ntasks_per_node && details->ntasks_per_node != NO_VAL16 ? details->ntasks_per_node
                             : details->overcommit                                            ? 1
                             : details->max_nodes == 1 && details->num_tasks                  ? details->num_tasks
                                                                                              : 1;
    /* What _can_job_run_on_node asks of every node. */
    uint32_t least = most(1, share_of((uint64_t)tasks_on_node * cpus_per_task(details), 1));
    if (details->pn_min_cpus != NO_VAL)
        least = most(least, details->pn_min_cpus);
    uint32_t cpus = most(least, share_of(all_cpus(details), min_nodes));
    if (max_nodes == 1)
        least = cpus;
    out->needed.cpus_milli = (int64_t)least * 1000;
    out->wanted.cpus_milli = (int64_t)cpus * 1000;
}

static uint16_t consumable(const job_record_t *job)
{
    return job->part_ptr->cr_type ? job->part_ptr->cr_type : slurm_conf.select_type_param;
}

/* Host memory on each node, after the GPUs are known. */
static void add_memory(const job_record_t *job, const struct gres_need *gres, struct sluice_job_request *out)
{
    const sluice_job_details *details = job->details;
    if (!(consumable(job) & SLUICE_SELECT_MEMORY))
        return;
    const gres_job_state_t *by = gres->gpu ? gres->gpu : gres->shard;
    uint64_t per_gres = by ? by->mem_per_gres ? by->mem_per_gres : by->def_mem_per_gres : 0;
    uint64_t amount = details->pn_min_memory & ~MEM_PER_CPU;
    if (per_gres && !(job->bit_flags & JOB_MEM_SET)) {
        if (per_gres > SLUICE_MAX_HOST_MEMORY_MIB || gres->shard) {
            out->fit = SLUICE_JOB_PLACEABLE;
            return;
        }
        out->wanted.host_memory_mib_per_gpu = (int64_t)per_gres;
        /* A default differs by partition, and may be another's still. */
        out->needed.host_memory_mib_per_gpu = by->mem_per_gres ? (int64_t)per_gres : 0;
        return;
    }
    if (amount > SLUICE_MAX_HOST_MEMORY_MIB) {
        out->fit = SLUICE_JOB_PLACEABLE;
    } else if (details->pn_min_memory & MEM_PER_CPU) {
        uint32_t least = most(most(1, details->ntasks_per_node), most(details->pn_min_cpus, details->cpus_per_task));
        out->needed.host_memory_mib = (int64_t)amount * least;
        int64_t cpus = out->wanted.cpus_milli + out->wanted.cpus_milli_per_gpu * out->wanted.gpus;
        out->wanted.host_memory_mib = (int64_t)amount * (cpus / 1000);
    } else if (amount) {
        out->needed.host_memory_mib = out->wanted.host_memory_mib = (int64_t)amount;
    } else {
        out->wanted.flags |= SLUICE_EXCLUSIVE; /* --mem=0: all memory of nodes where nobody else has any */
    }
    if (out->wanted.host_memory_mib > SLUICE_MAX_HOST_MEMORY_MIB)
        out->wanted.host_memory_mib = SLUICE_MAX_HOST_MEMORY_MIB;
    if (out->needed.host_memory_mib > SLUICE_MAX_HOST_MEMORY_MIB)
        out->needed.host_memory_mib = SLUICE_MAX_HOST_MEMORY_MIB;
}

/* GPUs of a node where they are even on as few nodes as the job may have. */
static int64_t gpus_of_node(const gres_job_state_t *gpu, uint64_t tasks, uint32_t min_nodes)
{
    if (gpu->gres_per_node)
        return (int64_t)gpu->gres_per_node;
    if (gpu->gres_per_task)
        return (int64_t)(gpu->gres_per_task * share_of(tasks, min_nodes));
    return share_of(gpu->gres_per_job, min_nodes);
}

/* GPUs for a job of one node, or so many on each. */
static void add_gpus(const job_record_t *job, const gres_job_state_t *gpu, uint32_t min_nodes, uint32_t max_nodes,
                     struct sluice_job_request *out)
{
    const sluice_job_details *details = job->details;
    uint64_t tasks = details->num_tasks && details->num_tasks != NO_VAL ? details->num_tasks : min_nodes;
    int64_t per_gpu = (int64_t)gpu->cpus_per_gres * 1000;
    out->wanted.cpus_milli_per_gpu = per_gpu ? per_gpu : (int64_t)gpu->def_cpus_per_gres * 1000;
    out->needed.cpus_milli_per_gpu = details->overcommit || gpu->ntasks_per_gres ? 0 : per_gpu;
    if (out->wanted.cpus_milli_per_gpu) {
        /* The CPUs of GPUs are the tasks' CPUs, not added to them. */
        int64_t with = out->wanted.cpus_milli_per_gpu * gpus_of_node(gpu, tasks, min_nodes);
        out->wanted.cpus_milli = out->wanted.cpus_milli > with ? out->wanted.cpus_milli - with : 0;
    }
    if (out->needed.cpus_milli_per_gpu)
        out->needed.cpus_milli = 0;
    if (gpu->gres_per_node) {
        out->gpus_by_node = true;
        out->wanted.gpus = out->needed.gpus = (int64_t)gpu->gres_per_node;
        if (gpu->gres_per_job || gpu->gres_per_task)
            out->fit = SLUICE_JOB_PLACEABLE;
    } else if (gpu->gres_per_task) {
        /* Stock decides how many tasks a node gets. */
        out->fit = SLUICE_JOB_PLACEABLE;
        out->wanted.gpus = gpus_of_node(gpu, tasks, min_nodes);
        out->needed.gpus = (int64_t)gpu->gres_per_task;
    } else if (max_nodes == 1 || gpu->gres_per_job < 2) {
        out->wanted.gpus = out->needed.gpus = (int64_t)gpu->gres_per_job;
    } else {
        bool one = min_nodes == 1 && out->wanted.nodes_max == 1 && gpu->gres_per_job <= SLUICE_MAX_GPUS;
        out->wanted.gpus = out->needed.gpus = (int64_t)gpu->gres_per_job;
        uint32_t nodes = gpu->gres_per_job < max_nodes ? (uint32_t)gpu->gres_per_job : max_nodes;
        out->needed.flags |= SLUICE_GPUS_TOTAL;
        out->needed.nodes_max = nodes > min_nodes ? nodes : min_nodes;
        if (one) {
            out->has_wider = true; /* made of `wanted` when the rest is known */
        } else {
            out->wanted.flags |= SLUICE_GPUS_TOTAL;
            if (out->wanted.nodes_max == min_nodes || out->wanted.nodes_max > out->needed.nodes_max)
                out->wanted.nodes_max = out->needed.nodes_max;
        }
    }
}

/* The options that Sluice adds to a job; false where they do not parse. */
bool sluice_job_options(const job_record_t *job, struct sluice_options *options)
{
    char why[SLUICE_OPTION_WHY_MAX];
    *options = (struct sluice_options){0};
    return !job->spank_job_env_size ||
           sluice_options_from_env(options, job->spank_job_env, job->spank_job_env_size, why, sizeof(why));
}

void sluice_job_tell_prologs(job_record_t *job, const char *name, const char *value)
{
    const size_t length = strlen(name);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < job->spank_job_env_size; i++) {
        char *text = job->spank_job_env[i];
        if (text && strncmp(text, name, length) == 0) {
            xfree(text);
            continue;
        }
        job->spank_job_env[kept++] = text;
    }
    job->spank_job_env_size = kept;
    if (!value)
        return;
    xrecalloc(job->spank_job_env, kept + 1, sizeof(char *));
    job->spank_job_env[kept] = xstrdup_printf("%s%s", name, value);
    job->spank_job_env_size = kept + 1;
}

uint32_t sluice_job_gpu_share(const job_record_t *job)
{
    struct sluice_options options;
    return sluice_job_options(job, &options) ? options.gpu_share : 0;
}

uint32_t sluice_job_segment(const job_record_t *job)
{
    struct sluice_options options;
    if (SLUICE_HAS_SEGMENT)
        return job->details ? SLUICE_SEGMENT(job) : 0;
    return sluice_job_options(job, &options) ? options.segment : 0;
}

bool sluice_job_waits_for_switch(const job_record_t *job)
{
    return job->req_switch == 1 &&
           (!job->wait4switch_start || time(NULL) - job->wait4switch_start < (time_t)job->wait4switch);
}

/* What topology/block asks of the nodes. It takes no more of them than it must, so that of GPUs in total it is given no
 * more either, and which of the lower blocks these fill is left to it. */
static void add_blocks(const struct sluice_blocks *blocks, uint32_t nodes, struct sluice_request *request)
{
    sluice_blocks_ask(blocks, nodes, request);
    if (request->switch_level || !(request->flags & SLUICE_GPUS_TOTAL))
        request->nodes_max = request->nodes_min;
    if (request->flags & SLUICE_GPUS_TOTAL)
        request->lower_switches = 0;
}

/* Where in the network the nodes are to be, as far as Slurm knows the network. */
static void add_layout(const struct sluice_mirror *mirror, const job_record_t *job, struct sluice_job_request *out)
{
    const struct sluice_blocks *blocks = sluice_mirror_blocks(mirror);
    struct sluice_request *requests[] = {&out->wanted, &out->needed, &out->wider};
    const uint32_t nodes = (uint32_t)out->needed.nodes_min, segment = nodes > 1 ? sluice_job_segment(job) : 0;
    const bool waits = nodes > 1 && sluice_job_waits_for_switch(job);
    for (size_t i = 0; i < (out->has_wider ? 3 : 2); i++) {
        struct sluice_request *request = requests[i];
        if (!sluice_mirror_has_switches(mirror) || (request->nodes_min < 2 && request->nodes_max < 2))
            continue;
        request->segment = segment;
        if (waits)
            request->one_switch = SLUICE_REQUIRED;
        else if (blocks && segment < 2)
            add_blocks(blocks, nodes, request);
        if (request->one_switch) /* of a network that is no tree, and of nodes in no block, stock may know more */
            out->fit = SLUICE_JOB_PLACEABLE;
    }
}

static bool add_options(const job_record_t *job, struct sluice_job_request *out)
{
    struct sluice_options options;
    if (!sluice_job_options(job, &options))
        return false;
    if (out->wanted.gpus) {
        bool link = options.gpu_affinity == SLUICE_AFFINITY_LINK;
        out->wanted.gpu_compute_percent = out->needed.gpu_compute_percent = options.gpu_share;
        out->wanted.one_link_domain = link ? SLUICE_PREFERRED : SLUICE_ANY;
        /* GPUs without links are nearest to each other within a NUMA node. */
        out->wanted.one_numa_node =
            link || options.gpu_affinity == SLUICE_AFFINITY_NUMA ? SLUICE_PREFERRED : SLUICE_ANY;
    }
    out->fabric = options.fabric;
    out->nic_planes = options.nic_planes;
    if (options.gpu_spread)
        out->wanted.layout = SLUICE_SPREAD;
    return true;
}

/* As many NICs for each GPU, where both are counted for each task; 0: not so. */
static uint64_t nics_per_gpu(const gres_job_state_t *nic, const gres_job_state_t *gpu)
{
    uint64_t nics = nic->gres_per_task, gpus = gpu ? gpu->gres_per_task : 0;
    return gpus && nics % gpus == 0 && nics / gpus <= SLUICE_MAX_NICS ? nics / gpus : 0;
}

/* NICs, where so many are asked on each node, or for each GPU by tasks, which stock may divide among nodes in another
 * way. What is not said here only restricts stock's choice further. */
static void add_nics(const struct sluice_mirror *mirror, const struct gres_need *gres, struct sluice_job_request *out)
{
    const gres_job_state_t *nic = gres->nic;
    bool typed = nic && nic->type_name && *nic->type_name;
    uint64_t kinds = typed ? sluice_mirror_nic_kinds(mirror, nic->type_name) : 0;
    if (!nic || gres->nics_odd || (typed && !kinds))
        return;
    if (nic->gres_per_node) {
        out->wanted.nics = out->needed.nics = (int64_t)nic->gres_per_node;
        out->needed.nic_kinds = kinds;
    } else {
        out->wanted.nics_per_gpu = out->wanted.gpus ? (int64_t)nics_per_gpu(nic, gres->gpu) : 0;
    }
    out->wanted.nic_kinds = out->wanted.nics || out->wanted.nics_per_gpu ? kinds : 0;
}

void sluice_job_request_set_planes(struct sluice_job_request *request, const struct sluice_rules *rules)
{
    static const enum sluice_layout layouts[] = {[SLUICE_NIC_PLANES_ANY] = SLUICE_LAYOUT_POLICY,
                                                 [SLUICE_NIC_PLANES_ONE] = SLUICE_PACK,
                                                 [SLUICE_NIC_PLANES_SPREAD] = SLUICE_SPREAD};
    if (!request->wanted.nics && !request->wanted.nics_per_gpu)
        return;
    const uint32_t class = request->gpu_type ? sluice_rules_class_of_type(rules, request->gpu_type) : SLUICE_NO_CLASS;
    const uint32_t policy = class == SLUICE_NO_CLASS ? rules->nic_planes : rules->classes[class].nic_planes;
    request->wanted.nic_planes = request->nic_planes ? layouts[request->nic_planes] : (enum sluice_layout)policy;
    request->wider.nic_planes = request->wanted.nic_planes;
}

static void pass(struct sluice_job_request *out, enum sluice_job_stock reason)
{
    out->fit = SLUICE_JOB_STOCK;
    out->reason = reason;
}

/* Are these one request, so that one answer does for both? */
static bool same_request(const struct sluice_request *a, const struct sluice_request *b)
{
    return a->nodes_min == b->nodes_min && a->nodes_max == b->nodes_max && a->gpus == b->gpus &&
           a->gpu_memory_mib == b->gpu_memory_mib && a->cpus_milli == b->cpus_milli &&
           a->host_memory_mib == b->host_memory_mib && a->cpus_milli_per_gpu == b->cpus_milli_per_gpu &&
           a->host_memory_mib_per_gpu == b->host_memory_mib_per_gpu && a->models == b->models && a->flags == b->flags &&
           a->gpu_compute_percent == b->gpu_compute_percent && a->nics == b->nics && a->nic_kinds == b->nic_kinds &&
           a->nics_per_gpu == b->nics_per_gpu && a->segment == b->segment && a->one_switch == b->one_switch &&
           a->switch_level == b->switch_level && a->lower_switches == b->lower_switches;
}

/* GPUs or shards; why stock alone decides, or SLUICE_STOCK_NONE. */
static enum sluice_job_stock add_gpu_gres(struct sluice_mirror *mirror, const job_record_t *job,
                                          const struct gres_need *gres, uint32_t min_nodes, uint32_t max_nodes,
                                          struct sluice_job_request *out)
{
    if (gres->gpu) {
        const char *type = gres->gpu->type_name;
        out->gpu_type = type && *type ? type : NULL;
        if (type && *type && !(out->wanted.models = sluice_mirror_models(mirror, type)))
            return SLUICE_STOCK_UNKNOWN_TYPE;
        out->needed.models = out->wanted.models;
        add_gpus(job, gres->gpu, min_nodes, max_nodes, out);
    } else if (gres->shard) {
        uint64_t amount = gres->shard->gres_per_node;
        if (amount > SLUICE_MAX_GPU_MEMORY_MIB)
            return SLUICE_STOCK_GRES;
        out->shares = out->gpus_by_node = true;
        out->wanted.gpus = out->needed.gpus = 1;
        out->wanted.gpu_memory_mib = out->needed.gpu_memory_mib = (int64_t)amount;
        if (SLUICE_SHARES_OF_SEVERAL || gres->shard->mem_per_gres || gres->shard->def_mem_per_gres)
            out->fit =
                SLUICE_JOB_PLACEABLE; /* stock may take them of several GPUs, or does not look for one that fits */
    }
    bool too_many = out->wanted.gpus > SLUICE_MAX_GPUS && !(out->wanted.flags & SLUICE_GPUS_TOTAL);
    return too_many ? SLUICE_STOCK_GRES : SLUICE_STOCK_NONE;
}

/* The second request of a job of a range of nodes, or of GPUs in total. */
static void add_wider(struct sluice_job_request *out)
{
    if (out->wanted.layout == SLUICE_SPREAD && (out->has_wider || (out->wanted.flags & SLUICE_GPUS_TOTAL))) {
        /* As many nodes as it may have; only then fewer. */
        out->wanted.flags |= SLUICE_GPUS_TOTAL;
        out->wanted.nodes_max = out->needed.nodes_max;
        out->wider = out->wanted;
        out->wanted.nodes_min = out->wanted.nodes_max;
        out->has_wider = true;
    } else if (out->has_wider) {
        out->wider = out->wanted;
        out->wider.flags |= SLUICE_GPUS_TOTAL;
        out->wider.nodes_max = out->needed.nodes_max;
    }
}

/* One request that the core refuses would make the whole plan fail. */
static bool core_takes(struct sluice_mirror *mirror, const struct sluice_job_request *made)
{
    const struct sluice_cluster *cluster = sluice_mirror_cluster(mirror);
    return !sluice_request_check(cluster, &made->wanted, NULL) && !sluice_request_check(cluster, &made->needed, NULL) &&
           !(made->has_wider && sluice_request_check(cluster, &made->wider, NULL));
}

/* `amount_only`: which nodes are chosen is not asked. */
static void make(struct sluice_mirror *mirror, job_record_t *job, uint32_t min_nodes, uint32_t max_nodes,
                 uint32_t req_nodes, bool amount_only, struct sluice_job_request *out, struct sluice_job_shape *shape)
{
    enum sluice_job_stock reason = unknown_amount(job, min_nodes, max_nodes);
    uint32_t nodes = sluice_mirror_nodes(mirror);
    if (!reason && !amount_only)
        reason = unknown_choice(job);
    if (!reason && sluice_mirror_weights(mirror) > SLUICE_MIRROR_MAX_WEIGHTS)
        reason = SLUICE_STOCK_WEIGHTS;
    if (!reason && min_nodes > nodes)
        reason = SLUICE_STOCK_CONSTRAINTS;
    if (reason)
        return pass(out, reason);
    if (shape)
        make_shape(job, min_nodes, max_nodes, req_nodes, shape);
    if (max_nodes > nodes)
        max_nodes = nodes;

    struct gres_need gres = {0};
    if (job->gres_list_req)
        list_for_each_ro(job->gres_list_req, add_gres, &gres);
    if (gres.odd || (gres.gpu && gres.shard))
        return pass(out, SLUICE_STOCK_GRES);
    if (!amount_only && !gres.gpu && !gres.shard && (min_nodes > 1 || req_nodes > 1))
        return pass(out, SLUICE_STOCK_NO_GPUS);
    out->fit = SLUICE_JOB_MODELLED;
    out->wanted.nodes_min = out->wanted.nodes_max = min_nodes;
    out->needed.nodes_min = out->needed.nodes_max = min_nodes;
    /* If stock gets a desired number of nodes, it takes as many if it can. */
    if (req_nodes > min_nodes && req_nodes <= max_nodes)
        out->wanted.nodes_max = req_nodes;
    add_cpus(job, min_nodes, max_nodes, out);
    if ((reason = add_gpu_gres(mirror, job, &gres, min_nodes, max_nodes, out)))
        return pass(out, reason);
    add_memory(job, &gres, out);
    add_nics(mirror, &gres, out);
    if (SLUICE_WHOLE_NODE(job->details) || !job->part_ptr->max_share)
        out->wanted.flags |= SLUICE_EXCLUSIVE;
    if (!add_options(job, out))
        return pass(out, SLUICE_STOCK_OPTIONS);
    add_wider(out);
    add_layout(mirror, job, out);
    out->same = !out->has_wider && same_request(&out->wanted, &out->needed);
    if (!core_takes(mirror, out))
        pass(out, SLUICE_STOCK_REQUEST);
}

void sluice_job_request_make(struct sluice_mirror *mirror, job_record_t *job, uint32_t min_nodes, uint32_t max_nodes,
                             uint32_t req_nodes, struct sluice_job_request *out, struct sluice_job_shape *shape)
{
    memset(out, 0, sizeof(*out));
    if (shape)
        shape->count = 0;
    const sluice_job_details *details = job->details;
    if (!details)
        return pass(out, SLUICE_STOCK_CONSTRAINTS);
    if (!min_nodes && !max_nodes) {
        min_nodes = details->min_nodes;
        max_nodes = details->max_nodes ? details->max_nodes : min_nodes ? UINT32_MAX : 0;
        req_nodes = min_nodes;
    }
    make(mirror, job, min_nodes, max_nodes, req_nodes, false, out, shape);
}

bool sluice_job_request_estimate(struct sluice_mirror *mirror, job_record_t *job, struct sluice_node_size largest,
                                 struct sluice_request *out)
{
    const sluice_job_details *details = job->details;
    struct sluice_job_request made = {0};
    if (!details || !largest.cpus)
        return false;
    uint32_t min_nodes = most(details->min_nodes, share_of(all_cpus(details), largest.cpus));
    uint32_t max_nodes = details->max_nodes ? details->max_nodes : UINT32_MAX;
    if (details->req_node_bitmap)
        min_nodes = max_nodes = (uint32_t)bit_set_count(details->req_node_bitmap);
    make(mirror, job, min_nodes, max_nodes, min_nodes, true, &made, NULL);
    if (made.fit == SLUICE_JOB_STOCK)
        return false;
    *out = made.has_wider && made.wanted.gpus > largest.gpus ? made.wider : made.wanted;
    return true;
}

static int add_asked(void *item, void *argument)
{
    const gres_state_t *state = item;
    const gres_job_state_t *gres = state->gres_data;
    struct sluice_gpus_asked *asked = argument;
    if (!state->gres_name || !gres)
        return 0;
    if (!strcmp(state->gres_name, "gpu")) {
        asked->gpus += gres->total_gres < UINT32_MAX ? (uint32_t)gres->total_gres : 0;
        asked->per_node += gres->gres_per_node < UINT32_MAX ? (uint32_t)gres->gres_per_node : 0;
    } else if (!strcmp(state->gres_name, "shard") || !strcmp(state->gres_name, "mps")) {
        asked->shares = true;
    }
    return 0;
}

struct sluice_gpus_asked sluice_job_gpus_asked(const job_record_t *job)
{
    struct sluice_gpus_asked asked = {.whole_nodes = job->details && SLUICE_WHOLE_NODE(job->details)};
    if (job->gres_list_req)
        list_for_each_ro(job->gres_list_req, add_asked, &asked);
    return asked;
}

uint32_t sluice_gpus_on_node(const struct sluice_gpus_asked *asked, uint32_t nodes, uint32_t most)
{
    uint32_t gpus = nodes ? (asked->gpus + nodes - 1) / nodes : asked->gpus;
    gpus = asked->per_node > gpus ? asked->per_node : gpus;
    gpus = gpus || !asked->shares ? gpus : 1;
    return asked->whole_nodes || gpus > most ? most : gpus;
}

bool sluice_job_request_gpus(struct sluice_mirror *mirror, job_record_t *job, struct sluice_request *out)
{
    const sluice_job_details *details = job->details;
    struct sluice_job_request made = {0};
    if (!details)
        return false;
    const uint32_t required = details->req_node_bitmap ? (uint32_t)bit_set_count(details->req_node_bitmap) : 0;
    const uint32_t min_nodes = most(details->min_nodes, required);
    const uint32_t max_nodes = details->max_nodes ? most(details->max_nodes, min_nodes) : UINT32_MAX;
    make(mirror, job, min_nodes, max_nodes, min_nodes, true, &made, NULL);
    if (made.fit == SLUICE_JOB_STOCK)
        return false;
    *out = made.has_wider ? made.wider : made.wanted;
    return true;
}
