/* Simulated AMD SMI: xGMI links, and the ways between GPUs. */
#include "amd.h"

enum { XGMI_WEIGHT = 15, PCIE_WEIGHT = 40 }; /* as in published topologies */

static uint32_t errors_of(const struct sim_gpu *gpu)
{
    uint32_t errors = 0;
    for (unsigned i = 0; i < gpu->link_count; i++) {
        errors += gpu->links[i].crc_errors + gpu->links[i].replay_errors + gpu->links[i].recovery_errors;
    }
    return errors;
}

AMD_READ(amdsmi_gpu_xgmi_error_status, uint32_t, t.gpu.link_count > 0, errors_of(&t.gpu) > 1 ? 2 : errors_of(&t.gpu))
AMD_READ(amdsmi_get_xgmi_info, amdsmi_xgmi_info_t, t.gpu.link_count > 0,
         (amdsmi_xgmi_info_t){.xgmi_lanes = (uint8_t)t.gpu.links[0].width,
                              .xgmi_hive_id = 0x5353535353535353ull,
                              .xgmi_node_id = t.index,
                              .index = amd_ordinal(&t)})

SIM_API amdsmi_status_t amdsmi_get_gpu_xgmi_link_status(amdsmi_processor_handle handle, amdsmi_xgmi_link_status_t *out)
{
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS && t.gpu.link_count == 0) {
        result = AMDSMI_STATUS_NOT_SUPPORTED;
    }
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_xgmi_link_status_t){.total_links = t.gpu.link_count < 8 ? t.gpu.link_count : 8};
        for (unsigned i = 0; i < out->total_links; i++) {
            out->status[i] = t.gpu.links[i].up;
        }
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_link_metrics(amdsmi_processor_handle handle, amdsmi_link_metrics_t *out)
{
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS && t.gpu.link_count == 0) {
        result = AMDSMI_STATUS_NOT_SUPPORTED;
    }
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_link_metrics_t){.num_links = t.gpu.link_count};
        for (unsigned i = 0; i < t.gpu.link_count; i++) {
            const struct sim_link *link = &t.gpu.links[i];
            uint32_t lane_gbit = link->width > 0 ? link->speed_mbit / 1000 / link->width : 0;
            out->links[i].bdf = amd_bdf(&link->peer_pci, SIM_NO_INSTANCE);
            out->links[i].bit_rate = link->up ? lane_gbit : 0;
            out->links[i].max_bandwidth = link->speed_mbit / 1000;
            out->links[i].link_type = AMDSMI_LINK_XGMI;
            out->links[i].read = link->rx_kib;
            out->links[i].write = link->tx_kib;
        }
    }
    return result;
}

struct path {
    uint32_t type, weight, hops, links;
    uint64_t mb_per_s;
};

/* The best way between two GPUs: live xGMI links, else PCIe. */
static amdsmi_status_t between(amdsmi_processor_handle one, amdsmi_processor_handle other, struct amd_target *t,
                               struct path *path)
{
    struct amd_target u;
    amdsmi_status_t result = amd_enter(one, t);
    if (result == AMDSMI_STATUS_SUCCESS) {
        result = amd_enter(other, &u);
    }
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    *path = (struct path){.type = AMDSMI_LINK_PCIE,
                          .hops = t->gpu.hops[u.index] >= SIM_HOP_SYSTEM ? 3 : 2,
                          .weight = t->gpu.hops[u.index] >= SIM_HOP_SYSTEM ? PCIE_WEIGHT + 32 : PCIE_WEIGHT};
    for (unsigned i = 0; i < t->gpu.link_count; i++) {
        const struct sim_link *link = &t->gpu.links[i];
        if (link->up && link->peer == SIM_LINKPEER_GPU && link->peer_gpu == u.index) {
            path->type = AMDSMI_LINK_XGMI;
            path->weight = XGMI_WEIGHT;
            path->hops = 1;
            path->links++;
            path->mb_per_s += link->speed_mbit / 8;
        }
    }
    if (t->index == u.index) {
        *path = (struct path){.type = AMDSMI_LINK_INTERNAL};
    }
    return AMDSMI_STATUS_SUCCESS;
}

SIM_API amdsmi_status_t amdsmi_topo_get_link_type(amdsmi_processor_handle one, amdsmi_processor_handle other,
                                                  uint64_t *hops, uint32_t *type)
{
    struct amd_target t;
    struct path path;
    amdsmi_status_t result = hops != NULL && type != NULL ? between(one, other, &t, &path) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *hops = path.hops;
        *type = path.type;
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_topo_get_link_weight(amdsmi_processor_handle one, amdsmi_processor_handle other,
                                                    uint64_t *weight)
{
    struct amd_target t;
    struct path path;
    amdsmi_status_t result = weight != NULL ? between(one, other, &t, &path) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *weight = path.weight;
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_minmax_bandwidth_between_processors(amdsmi_processor_handle one,
                                                                       amdsmi_processor_handle other, uint64_t *least,
                                                                       uint64_t *most)
{
    struct amd_target t;
    struct path path;
    amdsmi_status_t result = least != NULL && most != NULL ? between(one, other, &t, &path) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS && path.links == 0) {
        result = AMDSMI_STATUS_NOT_SUPPORTED;
    }
    if (result == AMDSMI_STATUS_SUCCESS) {
        *least = path.mb_per_s;
        *most = path.mb_per_s;
    }
    return result;
}

static bool reachable(const struct amd_target *t, const struct path *path, amdsmi_processor_handle other)
{
    return path->links > 0 || t->gpu.p2p[amd_gpu_of(other)];
}

SIM_API amdsmi_status_t amdsmi_is_P2P_accessible(amdsmi_processor_handle one, amdsmi_processor_handle other, bool *can)
{
    struct amd_target t;
    struct path path;
    amdsmi_status_t result = can != NULL ? between(one, other, &t, &path) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *can = reachable(&t, &path, other);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_topo_get_p2p_status(amdsmi_processor_handle one, amdsmi_processor_handle other,
                                                   uint32_t *type, amdsmi_p2p_capability_t *can)
{
    struct amd_target t;
    struct path path;
    amdsmi_status_t result = type != NULL && can != NULL ? between(one, other, &t, &path) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        uint8_t xgmi = path.links > 0, any = reachable(&t, &path, other);
        *type = path.type;
        *can = (amdsmi_p2p_capability_t){xgmi, xgmi, xgmi, any, any};
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_link_topology_nearest(amdsmi_processor_handle handle, uint32_t type,
                                                         amdsmi_topology_nearest_t *out)
{
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    *out = (amdsmi_topology_nearest_t){0};
    amdsmi_processor_handle all[AMD_MAX_DEVICES];
    unsigned count = amd_devices(all);
    for (unsigned i = 0; i < count && out->count < sizeof out->processor_list / sizeof *out->processor_list; i++) {
        struct amd_target u;
        struct path path;
        if (all[i] != handle && between(handle, all[i], &u, &path) == AMDSMI_STATUS_SUCCESS && path.type == type) {
            out->processor_list[out->count++] = all[i];
        }
    }
    return AMDSMI_STATUS_SUCCESS;
}
