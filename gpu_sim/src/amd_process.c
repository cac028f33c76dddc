/* Simulated AMD SMI: the processes on its devices. */
#include "amd.h"

#include <stdio.h>
#include <unistd.h>

enum { MAX_LISTED = 512 };

static void name_process(uint32_t pid, const struct sim_gpu *gpu, char *name, size_t size)
{
    for (unsigned i = 0; i < gpu->process_count; i++) {
        if (gpu->processes[i].pid == pid && gpu->processes[i].name[0] != 0) {
            sim_text(name, size, gpu->processes[i].name);
            return;
        }
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/exe", pid);
    ssize_t length = readlink(path, name, size - 1);
    name[length > 0 ? length : 0] = 0;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_process_list(amdsmi_processor_handle handle, uint32_t *room,
                                                    amdsmi_proc_info_t *out)
{
    struct amd_target t;
    amdsmi_status_t result = room != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    struct sim_use uses[MAX_LISTED];
    uint32_t found = sim_uses(t.index, &t.gpu, t.part, uses, MAX_LISTED), offered = *room;
    found = found < MAX_LISTED ? found : MAX_LISTED;
    *room = found;
    if (out == NULL) {
        return AMDSMI_STATUS_SUCCESS;
    }
    for (uint32_t i = 0; i < found && i < offered; i++) {
        out[i] = (amdsmi_proc_info_t){.pid = uses[i].pid, .mem = uses[i].bytes, .cu_occupancy = UINT32_MAX};
        out[i].memory_usage.vram_mem = uses[i].bytes;
        out[i].engine_usage.gfx = uses[i].busy_ns;
        name_process(uses[i].pid, &t.gpu, out[i].name, sizeof out[i].name);
    }
    return found > offered ? AMDSMI_STATUS_OUT_OF_RESOURCES : AMDSMI_STATUS_SUCCESS;
}

/* A process's memory over all devices and which of them it uses; false when it uses none. */
static bool process_of(uint32_t pid, amdsmi_process_info_t *info, uint32_t *indices, uint32_t *count)
{
    *info = (amdsmi_process_info_t){.process_id = pid};
    *count = 0;
    amdsmi_processor_handle all[AMD_MAX_DEVICES];
    unsigned devices = amd_devices(all);
    for (uint32_t i = 0; i < devices; i++) {
        struct amd_target t;
        struct sim_use uses[MAX_LISTED];
        bool there = amd_enter(all[i], &t) == AMDSMI_STATUS_SUCCESS, here = false;
        unsigned found = there ? sim_uses(t.index, &t.gpu, t.part, uses, MAX_LISTED) : 0;
        for (unsigned k = 0; k < found && k < MAX_LISTED; k++) {
            if (uses[k].pid == pid) {
                info->vram_usage += uses[k].bytes;
                here = true;
            }
        }
        if (here) {
            indices[(*count)++] = i;
        }
    }
    return *count > 0;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_compute_process_info_by_pid(uint32_t pid, amdsmi_process_info_t *out)
{
    uint32_t indices[AMD_MAX_DEVICES], count;
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || out == NULL) {
        return status != SIM_OK ? amd_failure(status) : AMDSMI_STATUS_INVAL;
    }
    return process_of(pid, out, indices, &count) ? AMDSMI_STATUS_SUCCESS : AMDSMI_STATUS_NOT_FOUND;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_compute_process_gpus(uint32_t pid, uint32_t *out, uint32_t *room)
{
    uint32_t indices[AMD_MAX_DEVICES], count;
    amdsmi_process_info_t info;
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || room == NULL) {
        return status != SIM_OK ? amd_failure(status) : AMDSMI_STATUS_INVAL;
    }
    if (!process_of(pid, &info, indices, &count)) {
        return AMDSMI_STATUS_NOT_FOUND;
    }
    for (uint32_t i = 0; out != NULL && i < count && i < *room; i++) {
        out[i] = indices[i];
    }
    bool cut = out != NULL && count > *room;
    *room = cut ? *room : count;
    return cut ? AMDSMI_STATUS_INSUFFICIENT_SIZE : AMDSMI_STATUS_SUCCESS;
}
