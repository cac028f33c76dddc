/* SPDX-License-Identifier: Apache-2.0 */
/* Checks a request, and turns it into the form that decisions use. Contracts are in sluice/core.h. */
#include "cluster.h"

#include <inttypes.h>

static enum sluice_error check_range(const char *name, int64_t value, int64_t most, struct sluice_error_text *text)
{
    if (value >= 0 && value <= most)
        return SLUICE_OK;
    return sluice_fail(text, SLUICE_ERROR_RANGE, "%s %" PRId64 ": must be 0 to %" PRId64, name, value, most);
}

static enum sluice_error check_numbers(const struct sluice_request *request, struct sluice_error_text *text)
{
    bool total = request->flags & SLUICE_GPUS_TOTAL, sum = request->flags & SLUICE_GPU_MEMORY_SUM;
    const int64_t most_gpus = total ? (int64_t)SLUICE_MAX_GPUS * SLUICE_MAX_NODES : SLUICE_MAX_GPUS;
    const struct {
        const char *name;
        int64_t value, most;
    } numbers[] = {
        {"nodes_min", request->nodes_min, SLUICE_MAX_NODES},
        {"nodes_max", request->nodes_max, SLUICE_MAX_NODES},
        {"gpus", request->gpus, most_gpus},
        {"gpu_memory_mib", request->gpu_memory_mib, SLUICE_MAX_GPU_MEMORY_MIB * (sum ? most_gpus : 1)},
        {"cpus_milli", request->cpus_milli, SLUICE_MAX_CPUS_MILLI},
        {"host_memory_mib", request->host_memory_mib, SLUICE_MAX_HOST_MEMORY_MIB},
        {"cpus_milli_per_gpu", request->cpus_milli_per_gpu, SLUICE_MAX_CPUS_MILLI},
        {"host_memory_mib_per_gpu", request->host_memory_mib_per_gpu, SLUICE_MAX_HOST_MEMORY_MIB},
        {"capability_min", request->capability_min, UINT32_MAX},
        {"gpu_memory_mib_min", request->gpu_memory_mib_min, SLUICE_MAX_GPU_MEMORY_MIB},
        {"switch_level", request->switch_level, SLUICE_SWITCH_LEVELS - 1},
        {"segment", request->segment, SLUICE_MAX_NODES},
        {"gpu_compute_percent", request->gpu_compute_percent, ALL_COMPUTE},
        {"nics", request->nics, SLUICE_MAX_NICS},
        {"nics_per_gpu", request->nics_per_gpu, SLUICE_MAX_NICS},
        {"lower_switches", request->lower_switches, SLUICE_MAX_SWITCHES},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        enum sluice_error error = check_range(numbers[i].name, numbers[i].value, numbers[i].most, text);
        if (error)
            return error;
    }
    return SLUICE_OK;
}

static enum sluice_error check_choices(const struct sluice_request *request, struct sluice_error_text *text)
{
    const struct {
        const char *name;
        unsigned value, most;
    } choices[] = {
        {"one_link_domain", request->one_link_domain, SLUICE_REQUIRED},
        {"one_numa_node", request->one_numa_node, SLUICE_REQUIRED},
        {"near_nic", request->near_nic, SLUICE_REQUIRED},
        {"one_switch", request->one_switch, SLUICE_REQUIRED},
        {"layout", request->layout, SLUICE_SPREAD},
        {"switch_layout", request->switch_layout, SLUICE_SPREAD},
        {"nic_planes", request->nic_planes, SLUICE_SPREAD},
        {"flags", request->flags, SLUICE_GPUS_TOTAL | SLUICE_GPU_MEMORY_SUM | SLUICE_EXCLUSIVE},
    };
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++)
        if (choices[i].value > choices[i].most)
            return sluice_fail(text, SLUICE_ERROR_INVALID, "%s %u: no such choice", choices[i].name, choices[i].value);
    return SLUICE_OK;
}

/* A request without GPUs must not set options of GPUs. */
static enum sluice_error check_without_gpus(const struct sluice_request *request, struct sluice_error_text *text)
{
    const struct {
        const char *name;
        bool set;
    } fields[] = {
        {"gpu_memory_mib", request->gpu_memory_mib != 0},
        {"gpu_compute_percent", request->gpu_compute_percent != 0},
        {"cpus_milli_per_gpu", request->cpus_milli_per_gpu != 0},
        {"host_memory_mib_per_gpu", request->host_memory_mib_per_gpu != 0},
        {"models", request->models != 0},
        {"capability_min", request->capability_min != 0},
        {"gpu_memory_mib_min", request->gpu_memory_mib_min != 0},
        {"one_link_domain", request->one_link_domain != SLUICE_ANY},
        {"one_numa_node", request->one_numa_node != SLUICE_ANY},
        {"near_nic", request->near_nic != SLUICE_ANY},
        {"nics_per_gpu", request->nics_per_gpu != 0},
        {"SLUICE_GPUS_TOTAL", (request->flags & SLUICE_GPUS_TOTAL) != 0},
        {"SLUICE_GPU_MEMORY_SUM", (request->flags & SLUICE_GPU_MEMORY_SUM) != 0},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].set)
            return sluice_fail(text, SLUICE_ERROR_INVALID, "%s is set, but gpus is 0; ask for GPUs or leave it out",
                               fields[i].name);
    if (!request->cpus_milli && !request->host_memory_mib && !request->nics && !(request->flags & SLUICE_EXCLUSIVE))
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "the request asks for nothing: set gpus, cpus_milli, host_memory_mib, nics or "
                           "SLUICE_EXCLUSIVE");
    return SLUICE_OK;
}

static enum sluice_error check_allowed(const struct sluice_cluster *cluster, const struct sluice_request *request,
                                       struct sluice_error_text *text)
{
    if (!request->allowed && request->allowed_words)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "allowed is NULL, but has %zu words", request->allowed_words);
    for (size_t word = cluster->node_count / 64; word < request->allowed_words; word++) {
        uint64_t known = word == cluster->node_count / 64 ? ((uint64_t)1 << (cluster->node_count % 64)) - 1 : 0;
        uint64_t unknown = request->allowed[word] & ~known;
        if (unknown)
            return sluice_fail(text, SLUICE_ERROR_UNKNOWN,
                               "allowed: node %zu is not known: the cluster has %" PRIu32 " nodes",
                               word * 64 + (size_t)__builtin_ctzll(unknown), cluster->node_count);
    }
    return SLUICE_OK;
}

/* GPU memory of each GPU, in MiB; 0 for whole GPUs. */
static enum sluice_error gpu_share(const struct sluice_request *request, int32_t *share, struct sluice_error_text *text)
{
    int64_t memory = request->gpu_memory_mib;
    if (request->flags & SLUICE_GPU_MEMORY_SUM) {
        if (!memory)
            return sluice_fail(text, SLUICE_ERROR_INVALID,
                               "SLUICE_GPU_MEMORY_SUM with whole GPUs: set gpu_memory_mib or leave it out");
        int64_t rest = memory % request->gpus;
        if (rest)
            return sluice_fail(text, SLUICE_ERROR_INVALID,
                               "%" PRId64 " MiB cannot be shared equally by %" PRId64 " GPUs; ask for %" PRId64, memory,
                               request->gpus, memory - rest + request->gpus);
        memory /= request->gpus;
        enum sluice_error error = check_range("gpu_memory_mib per GPU", memory, SLUICE_MAX_GPU_MEMORY_MIB, text);
        if (error)
            return error;
    }
    *share = (int32_t)memory;
    return SLUICE_OK;
}

/* Segments are whole, and each node's share is known. */
static enum sluice_error check_segment(const struct sluice_request *request, int64_t nodes_min, bool total,
                                       struct sluice_error_text *text)
{
    if (request->segment < 2)
        return SLUICE_OK;
    if (total)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "segment %" PRId64 " with GPUs in total: ask for so many GPUs on each node",
                           request->segment);
    if (nodes_min % request->segment)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "nodes_min %" PRId64 " is no multiple of segment %" PRId64,
                           nodes_min, request->segment);
    return SLUICE_OK;
}

/* Where in the network is said of nodes whose share is known. */
static enum sluice_error check_switches(const struct sluice_request *request, bool total,
                                        struct sluice_error_text *text)
{
    const bool spread = request->switch_layout == SLUICE_SPREAD;
    if (total && (spread || request->lower_switches))
        return sluice_fail(text, SLUICE_ERROR_INVALID, "%s with GPUs in total: ask for so many GPUs on each node",
                           spread ? "switch_layout" : "lower_switches");
    if (request->lower_switches &&
        (request->one_switch != SLUICE_REQUIRED || !request->switch_level || request->segment > 1 || spread))
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "lower_switches %" PRId64
                           ": needs one_switch required and switch_level, and neither segment nor switch_layout",
                           request->lower_switches);
    return SLUICE_OK;
}

enum sluice_error sluice_need_from_request(const struct sluice_cluster *cluster, const struct sluice_request *request,
                                           struct need *need, struct sluice_error_text *text)
{
    enum sluice_error error;
    int32_t share = 0;
    if ((error = check_numbers(request, text)) || (error = check_choices(request, text)) ||
        (request->gpus == 0 && (error = check_without_gpus(request, text))) ||
        (error = gpu_share(request, &share, text)) || (error = check_allowed(cluster, request, text)))
        return error;
    uint64_t known = cluster->model_count == 64 ? UINT64_MAX : ((uint64_t)1 << cluster->model_count) - 1;
    if (request->models & ~known)
        return sluice_fail(text, SLUICE_ERROR_UNKNOWN, "GPU model %d is not known: the cluster has %" PRIu32 " models",
                           __builtin_ctzll(request->models & ~known), cluster->model_count);

    int64_t nodes_min = request->nodes_min ? request->nodes_min : 1;
    int64_t nodes_max = request->nodes_max ? request->nodes_max : nodes_min;
    if (nodes_min > nodes_max)
        return sluice_fail(text, SLUICE_ERROR_INVALID, "nodes_min %" PRId64 " is more than nodes_max %" PRId64,
                           nodes_min, nodes_max);
    bool total = request->flags & SLUICE_GPUS_TOTAL;
    int64_t gpus = request->gpus;
    if (total && gpus < nodes_min)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "%" PRId64 " GPUs in total for at least %" PRId64 " nodes: each node gives at least one",
                           gpus, nodes_min);
    if (total && gpus > nodes_max * SLUICE_MAX_GPUS)
        return sluice_fail(text, SLUICE_ERROR_RANGE,
                           "%" PRId64 " GPUs in total on at most %" PRId64 " nodes: a node has at most %d", gpus,
                           nodes_max, SLUICE_MAX_GPUS);
    if (total && (nodes_max == 1 || gpus == nodes_min)) { /* then every node's share is known */
        total = false;
        nodes_max = nodes_min;
        gpus /= nodes_min;
    }
    if ((error = check_segment(request, nodes_min, total, text)) || (error = check_switches(request, total, text)))
        return error;
    if (request->lower_switches)
        nodes_max = nodes_min;
    const int64_t segment = request->segment > 1 ? request->segment : 1;

    /* Of one node: with what comes with each GPU, unless the number of GPUs is open. */
    int64_t cpus = request->cpus_milli, host_memory = request->host_memory_mib, nics = request->nics;
    if (request->nic_kinds && !nics && !request->nics_per_gpu)
        return sluice_fail(text, SLUICE_ERROR_INVALID,
                           "nic_kinds is set, but no NIC is asked; ask for NICs or leave "
                           "it out");
    if (!total) {
        nics += gpus * request->nics_per_gpu;
        cpus += gpus * request->cpus_milli_per_gpu;
        host_memory += gpus * request->host_memory_mib_per_gpu;
        if ((error = check_range("cpus_milli of a node with its GPUs' part", cpus, SLUICE_MAX_CPUS_MILLI, text)) ||
            (error = check_range("host_memory_mib of a node with its GPUs' part", host_memory,
                                 SLUICE_MAX_HOST_MEMORY_MIB, text)) ||
            (error = check_range("nics of a node with its GPUs' part", nics, SLUICE_MAX_NICS, text)))
            return error;
    }
    *need = (struct need){
        .gpus = (int32_t)gpus,
        .share = share,
        .compute = (int32_t)request->gpu_compute_percent,
        .cpus = (int32_t)cpus,
        .host_memory = (int32_t)host_memory,
        .cpus_per_gpu = total ? (int32_t)request->cpus_milli_per_gpu : 0,
        .host_memory_per_gpu = total ? (int32_t)request->host_memory_mib_per_gpu : 0,
        .models = request->models,
        .capability = (uint32_t)request->capability_min,
        .gpu_memory_min = (int32_t)request->gpu_memory_mib_min,
        .nodes_min = (uint32_t)nodes_min,
        .nodes_max = (uint32_t)(nodes_max - nodes_max % segment),
        .segment = (uint32_t)segment,
        .lower_most = nodes_min > 1 ? (uint32_t)request->lower_switches : 0,
        .spread = request->switch_layout == SLUICE_SPREAD,
        .one_plane = request->nic_planes == SLUICE_PACK && cluster->planes && (nics || request->nics_per_gpu),
        .spread_planes = request->nic_planes == SLUICE_SPREAD && cluster->planes,
        .nics = (uint32_t)nics,
        .nics_per_gpu = total ? (uint32_t)request->nics_per_gpu : 0,
        .nic_kinds = request->nic_kinds,
        .total = total,
        .exclusive = request->flags & SLUICE_EXCLUSIVE,
        .any_gpu = !request->models && !request->capability_min && !request->gpu_memory_mib_min,
        .preferences = request->one_link_domain || request->one_numa_node || request->near_nic,
        .link = (uint8_t)request->one_link_domain,
        .numa = (uint8_t)request->one_numa_node,
        .nic = (uint8_t)request->near_nic,
        .one_switch = (uint8_t)request->one_switch,
        .layout = (uint8_t)request->layout,
        .switch_level = (uint8_t)request->switch_level,
        .allowed = request->allowed,
        .allowed_words = request->allowed_words,
        .seed = request->seed,
    };
    need->plain = nodes_max == 1 && !need->exclusive && !need->preferences && !nics && !request->nics_per_gpu &&
                  request->layout == SLUICE_LAYOUT_POLICY;
    return SLUICE_OK;
}

enum sluice_error sluice_request_check(const struct sluice_cluster *cluster, const struct sluice_request *request,
                                       struct sluice_error_text *text)
{
    struct need need;
    return sluice_need_from_request(cluster, request, &need, text);
}
