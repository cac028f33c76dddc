/* Simulated NVML: how a GPU reaches CPUs, other GPUs and switches. */
#include <stddef.h>
#include <string.h>

#include "nvml.h"

/* ---- NVLink ---- */

static nvmlReturn_t enter_link(nvmlDevice_t device, unsigned int link, struct target *t)
{
    nvmlReturn_t result = nvml_enter_whole(device, 0, t);
    if (result == NVML_SUCCESS && link >= SIM_MAX_LINKS) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    return result == NVML_SUCCESS && link >= t->gpu.link_count ? NVML_ERROR_NOT_SUPPORTED : result;
}

/* A function of one link: VALUE of link `k` of target `t`. */
#define NVML_LINK(NAME, VALUE)                                                                                         \
    SIM_API nvmlReturn_t NAME(nvmlDevice_t device, unsigned int link, unsigned int *out)                               \
    {                                                                                                                  \
        struct target t;                                                                                               \
        nvmlReturn_t result = out != NULL ? enter_link(device, link, &t) : NVML_ERROR_INVALID_ARGUMENT;                \
        if (result == NVML_SUCCESS) {                                                                                  \
            const struct sim_link *k = &t.gpu.links[link];                                                             \
            *out = (VALUE);                                                                                            \
        }                                                                                                              \
        return result;                                                                                                 \
    }

NVML_LINK(nvmlDeviceGetNvLinkState, k->up)
NVML_LINK(nvmlDeviceGetNvLinkVersion, k->version)
NVML_LINK(nvmlDeviceGetNvLinkRemoteDeviceType, k->peer == SIM_LINKPEER_SWITCH ? 2u : 0u)

SIM_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    struct target t;
    nvmlReturn_t result = pci != NULL ? enter_link(device, link, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !t.gpu.links[link].up) {
        result = NVML_ERROR_NOT_SUPPORTED; /* no answer from the other end */
    }
    if (result == NVML_SUCCESS) {
        nvml_pci(&t.gpu.links[link].peer_pci, pci);
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, unsigned int capability,
                                                   unsigned int *out)
{
    struct target t;
    nvmlReturn_t result = out != NULL && capability < 6 ? enter_link(device, link, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *out = capability != 4 && capability != 5; /* all but SLI bridge and valid link information */
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link, unsigned int counter,
                                                     unsigned long long *out)
{
    struct target t;
    nvmlReturn_t result = out != NULL && counter < 5 ? enter_link(device, link, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) { /* replay, recovery, CRC of flits, CRC of data, ECC of data */
        const struct sim_link *k = &t.gpu.links[link];
        const uint32_t counts[] = {k->replay_errors, k->recovery_errors, 0, k->crc_errors, 0};
        *out = counts[counter];
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info)
{
    struct target t;
    nvmlReturn_t result = info != NULL ? nvml_enter_whole(device, R520, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) { /* state: 0 not supported, 3 completed */
        bool fabric = t.gpu.link_count > 0 && t.gpu.links[0].peer == SIM_LINKPEER_SWITCH;
        *info = (nvmlGpuFabricInfo_t){.status = NVML_SUCCESS, .cliqueId = t.gpu.fabric_clique, .state = fabric ? 3 : 0};
        memcpy(info->clusterUuid, t.gpu.fabric_cluster, sizeof info->clusterUuid);
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info)
{
    const unsigned int second = (2u << 24) | offsetof(nvmlGpuFabricInfoV_t, healthSummary);
    const unsigned int third = (3u << 24) | sizeof *info;
    if (info == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (info->version != second && info->version != third) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlGpuFabricInfo_t base;
    nvmlReturn_t result = nvmlDeviceGetGpuFabricInfo(device, &base);
    if (result == NVML_SUCCESS) {
        memcpy(info->clusterUuid, base.clusterUuid, sizeof info->clusterUuid);
        info->status = base.status;
        info->cliqueId = base.cliqueId;
        info->state = base.state;
        info->healthMask = 0;
        if (info->version == third) {
            info->healthSummary = base.state == 3; /* 0 not supported, 1 healthy */
        }
    }
    return result;
}

/* ---- PCIe topology ---- */

static nvmlReturn_t enter_pair(nvmlDevice_t one, nvmlDevice_t other, struct target *t, struct target *u)
{
    nvmlReturn_t result = nvml_enter_whole(one, 0, t);
    return result == NVML_SUCCESS ? nvml_enter_whole(other, 0, u) : result;
}

SIM_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, unsigned int *level)
{
    struct target t, u;
    nvmlReturn_t result = level != NULL ? enter_pair(one, other, &t, &u) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *level = t.gpu.hops[u.index];
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t one, nvmlDevice_t other, int *same)
{
    struct target t, u;
    nvmlReturn_t result = same != NULL ? enter_pair(one, other, &t, &u) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *same = t.index == u.index;
    }
    return result;
}

/* Whether a live NVLink, directly or through a switch, joins two GPUs. */
static bool linked(const struct target *t, const struct target *u)
{
    bool mine = false, its = false, direct = false;
    for (unsigned i = 0; i < t->gpu.link_count; i++) {
        const struct sim_link *link = &t->gpu.links[i];
        mine = mine || (link->up && link->peer == SIM_LINKPEER_SWITCH);
        direct = direct || (link->up && link->peer == SIM_LINKPEER_GPU && link->peer_gpu == u->index);
    }
    for (unsigned i = 0; i < u->gpu.link_count; i++) {
        its = its || (u->gpu.links[i].up && u->gpu.links[i].peer == SIM_LINKPEER_SWITCH);
    }
    return direct || (mine && its);
}

SIM_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t other, unsigned int index,
                                            unsigned int *status)
{
    struct target t, u;
    nvmlReturn_t result = status != NULL && index < 5 ? enter_pair(one, other, &t, &u) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) {
        return result;
    }
    enum { OK, GPU_NOT_SUPPORTED = 2, NOT_SUPPORTED = 5 };
    bool nvlink = linked(&t, &u), pci = t.gpu.p2p[u.index] != 0;
    /* read, write, NVLink, atomics, PCI */
    const bool ways[] = {nvlink || pci, nvlink || pci, nvlink, nvlink, pci};
    unsigned int no = index < 2 ? GPU_NOT_SUPPORTED : NOT_SUPPORTED;
    *status = ways[index] && t.index != u.index ? OK : no;
    return NVML_SUCCESS;
}

/* The visible GPUs that `near` accepts, first how many, then which. */
static nvmlReturn_t gpu_set(unsigned int *count, nvmlDevice_t *devices, const struct sim_gpu *from, unsigned number,
                            bool (*near)(const struct sim_gpu *from, unsigned number, unsigned index,
                                         const struct sim_gpu *gpu))
{
    uint8_t visible[SIM_MAX_GPUS];
    unsigned all = sim_visible(visible), found = 0, room = *count;
    for (unsigned i = 0; i < all; i++) {
        struct sim_gpu gpu;
        if (sim_peek(visible[i], &gpu) && near(from, number, visible[i], &gpu)) {
            if (devices != NULL && found < room) {
                devices[found] = nvml_handle(visible[i], SIM_NO_INSTANCE);
            }
            found++;
        }
    }
    *count = devices != NULL && found > room ? room : found;
    return NVML_SUCCESS;
}

static bool within(const struct sim_gpu *from, unsigned level, unsigned index, const struct sim_gpu *gpu)
{
    return from->hops[index] <= level && strcmp(from->uuid, gpu->uuid) != 0;
}

static bool near_cpu(const struct sim_gpu *from, unsigned cpu, unsigned index, const struct sim_gpu *gpu)
{
    (void)from;
    (void)index;
    return cpu < SIM_CPU_WORDS * 64 && (gpu->cpus[cpu / 64] >> (cpu % 64) & 1u);
}

SIM_API nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, unsigned int level, unsigned int *count,
                                                      nvmlDevice_t *devices)
{
    struct target t;
    nvmlReturn_t result = count != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    return result != NVML_SUCCESS ? result : gpu_set(count, devices, &t.gpu, level, within);
}

SIM_API nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *devices)
{
    nvmlReturn_t result = count != NULL ? nvml_error(sim_enter(0, NULL)) : NVML_ERROR_INVALID_ARGUMENT;
    return result != NVML_SUCCESS ? result : gpu_set(count, devices, NULL, cpu, near_cpu);
}

/* ---- CPUs and NUMA nodes near a GPU ---- */

static nvmlReturn_t copy_bits(const uint64_t *bits, unsigned words, unsigned int size, unsigned long *set)
{
    if (set == NULL || size == 0) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned int i = 0; i < size; i++) {
        set[i] = i < words ? bits[i] : 0;
    }
    return NVML_SUCCESS;
}

SIM_API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int size, unsigned long *set)
{
    struct target t;
    nvmlReturn_t result = nvml_enter(device, 0, &t);
    return result != NVML_SUCCESS ? result : copy_bits(t.gpu.cpus, SIM_CPU_WORDS, size, set);
}

SIM_API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int size, unsigned long *set,
                                                         unsigned int scope)
{
    struct target t;
    (void)scope; /* NUMA node and socket are one here */
    nvmlReturn_t result = nvml_enter(device, R450, &t);
    return result != NVML_SUCCESS ? result : copy_bits(t.gpu.cpus, SIM_CPU_WORDS, size, set);
}

SIM_API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *set,
                                                 unsigned int scope)
{
    struct target t;
    (void)scope;
    nvmlReturn_t result = nvml_enter(device, R450, &t);
    if (result != NVML_SUCCESS) {
        return result;
    }
    uint64_t bits = t.gpu.numa_node >= 0 ? (uint64_t)1 << (t.gpu.numa_node & 63) : 0;
    return copy_bits(&bits, 1, size, set);
}
