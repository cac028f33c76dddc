/* Simulated NVML: what root changes by it - MIG mode and instances, compute mode, clocks, power, limits of cgroups. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "nvml.h"

/* ---- MIG mode ---- */

struct mode_request {
    unsigned index, mode;
    bool busy;
};

static enum sim_status set_mode(struct sim_state *head, struct sim_gpu *gpu, void *argument)
{
    struct mode_request *request = argument;
    (void)head;
    for (unsigned k = 0; k < SIM_MAX_INSTANCES; k++) {
        if (request->mode == 0 && gpu->instances[k].used) {
            return SIM_BUSY; /* instances go first */
        }
    }
    gpu->mig_pending = request->mode;
    request->busy = gpu->mig_enabled != request->mode && sim_uses(request->index, gpu, SIM_NO_INSTANCE, NULL, 0) > 0;
    if (!request->busy) {
        gpu->mig_enabled = request->mode;
    }
    return SIM_OK;
}

SIM_API nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activation)
{
    struct target t;
    nvmlReturn_t result =
        activation != NULL && mode <= 1 ? nvml_enter_whole(device, R450, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !t.gpu.mig_supported) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS) {
        struct mode_request request = {.index = t.index, .mode = mode};
        result = nvml_error(sim_change(t.index, set_mode, &request));
        /* The mode waits for a reset where processes keep the GPU. */
        *activation = result == NVML_SUCCESS && request.busy ? NVML_ERROR_IN_USE : result;
    }
    return result;
}

/* ---- GPU instances ---- */

struct instance_request {
    unsigned profile, start; /* start 8: wherever there is room */
    uint8_t place;
    uint32_t major, access_minor, compute_minor;
    nvmlReturn_t result;
};

/* From node, GPU and place alone, so that a layout made twice has the same UUIDs. FNV-1a, twice. */
static void name_instance(const struct sim_state *head, const struct sim_gpu *gpu, struct sim_instance *instance)
{
    char seed[160];
    uint64_t hash[2] = {0xcbf29ce484222325u, 0x84222325cbf29ce4u};
    snprintf(seed, sizeof seed, "%s/%s/%u/%u", head->node, gpu->uuid, instance->gpu_instance, instance->profile);
    for (unsigned i = 0; i < 2; i++) {
        for (const char *c = seed; *c != 0; c++) {
            hash[i] = (hash[i] ^ (uint8_t)*c) * 0x100000001b3u;
        }
    }
    snprintf(instance->uuid, sizeof instance->uuid, "MIG-%08x-%04x-5%03x-%04x-%012llx", (unsigned)(hash[0] >> 32),
             (unsigned)(hash[0] >> 16 & 0xFFFF), (unsigned)(hash[0] & 0xFFF), 0x8000u | (unsigned)(hash[1] >> 50),
             (unsigned long long)(hash[1] & 0xFFFFFFFFFFFFu));
}

static enum sim_status create_instance(struct sim_state *head, struct sim_gpu *gpu, void *argument)
{
    struct instance_request *request = argument;
    const struct sim_profile *profile = nvml_mig_profile(gpu, request->profile, true);
    request->result = !gpu->mig_enabled ? NVML_ERROR_NOT_SUPPORTED
                      : profile == NULL ? NVML_ERROR_INVALID_ARGUMENT
                                        : NVML_ERROR_INSUFFICIENT_RESOURCES;
    if (request->result != NVML_ERROR_INSUFFICIENT_RESOURCES) {
        return SIM_REFUSED;
    }
    nvmlPlacement_t free_places[8];
    unsigned count = nvml_mig_places(gpu, profile, false, free_places), chosen = 0, same = 0;
    while (chosen < count && request->start != 8 && free_places[chosen].start != request->start) {
        chosen++;
    }
    uint8_t place = SIM_MAX_INSTANCES;
    for (uint8_t k = SIM_MAX_INSTANCES; k-- > 0;) {
        same += gpu->instances[k].used && &gpu->profiles[gpu->instances[k].profile] == profile;
        place = gpu->instances[k].used ? place : k;
    }
    if (chosen == count || place == SIM_MAX_INSTANCES || same >= profile->instances) {
        return SIM_REFUSED;
    }
    unsigned start = free_places[chosen].start, size = profile->size;
    unsigned number = 8 / size - 1 + start / size; /* a tree of halves: 0 the whole, 1-2 halves, ... */
    struct sim_instance *instance = &gpu->instances[place];
    *instance = (struct sim_instance){.used = 1,
                                      .bare = 1,
                                      .profile = (uint8_t)(profile - gpu->profiles),
                                      .gpu_instance = (uint8_t)number,
                                      .start = (uint8_t)start,
                                      .size = (uint8_t)size,
                                      .access_minor = 3 + gpu->minor * 135 + number * 9};
    instance->compute_minor = instance->access_minor + 1;
    name_instance(head, gpu, instance);
    request->place = place;
    request->major = head->major_caps;
    request->access_minor = instance->access_minor;
    request->compute_minor = instance->compute_minor;
    request->result = NVML_SUCCESS;
    return SIM_OK;
}

static nvmlReturn_t make_instance(nvmlDevice_t device, unsigned int profile, unsigned start, nvmlGpuInstance_t *out)
{
    struct target t;
    struct instance_request request = {.profile = profile, .start = start};
    nvmlReturn_t result = out != NULL ? nvml_enter_whole(device, R450, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        enum sim_status status = sim_change(t.index, create_instance, &request);
        result = status == SIM_REFUSED ? request.result : nvml_error(status);
    }
    if (result == NVML_SUCCESS) {
        char name[64];
        snprintf(name, sizeof name, "nvidia-caps/nvidia-cap%u", request.access_minor);
        sim_make_device(name, request.major, request.access_minor, 0444);
        snprintf(name, sizeof name, "nvidia-caps/nvidia-cap%u", request.compute_minor);
        sim_make_device(name, request.major, request.compute_minor, 0444);
        *out = (nvmlGpuInstance_t)(void *)nvml_handle(t.index, request.place);
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int profile, nvmlGpuInstance_t *out)
{
    return make_instance(device, profile, 8, out);
}

SIM_API nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int profile,
                                                              const nvmlPlacement_t *placement, nvmlGpuInstance_t *out)
{
    return placement != NULL && placement->start < 8 ? make_instance(device, profile, placement->start, out)
                                                     : NVML_ERROR_INVALID_ARGUMENT;
}

/* ---- what is within an instance ---- */

struct part_request {
    unsigned index;
    uint8_t place;
    bool destroy, compute;
};

static enum sim_status change_part(struct sim_state *head, struct sim_gpu *gpu, void *argument)
{
    const struct part_request *request = argument;
    struct sim_instance *instance = &gpu->instances[request->place];
    (void)head;
    if (!instance->used) {
        return SIM_NO_DEVICE;
    }
    if (sim_uses(request->index, gpu, request->place, NULL, 0) > 0 ||
        (request->destroy && !request->compute && !instance->bare)) {
        return SIM_BUSY;
    }
    if (!request->compute) {
        *instance = (struct sim_instance){0};
    } else if (!request->destroy && !instance->bare) {
        return SIM_NO_MEMORY; /* one compute instance takes all of its GPU instance */
    } else {
        instance->bare = request->destroy;
    }
    return SIM_OK;
}

static nvmlReturn_t change_instance(const void *handle, bool destroy, bool compute)
{
    struct target t;
    nvmlDevice_t device;
    memcpy(&device, &handle, sizeof device);
    nvmlReturn_t result = nvml_enter(device, R450, &t);
    if (result == NVML_SUCCESS && t.instance == SIM_NO_INSTANCE) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        struct part_request request = {.index = t.index, .place = t.instance, .destroy = destroy, .compute = compute};
        result = nvml_error(sim_change(t.index, change_part, &request));
    }
    return result;
}

SIM_API nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance)
{
    return change_instance(instance, true, false);
}

SIM_API nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t instance)
{
    return change_instance(instance, true, true);
}

/* Compute profiles: NVML numbers them by slices. Only the one of the whole GPU instance is offered. */
static nvmlReturn_t compute_profile(nvmlGpuInstance_t instance, unsigned int kind, struct target *t)
{
    const void *handle = instance;
    nvmlDevice_t device;
    memcpy(&device, &handle, sizeof device);
    nvmlReturn_t result = nvml_enter(device, R450, t);
    if (result == NVML_SUCCESS && t->instance == SIM_NO_INSTANCE) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS && nvml_compute_kind(&t->gpu.profiles[t->gpu.instances[t->instance].profile]) != kind) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned int kind,
                                                                  unsigned int engines,
                                                                  nvmlComputeInstanceProfileInfo_t *info)
{
    struct target t;
    (void)engines;
    nvmlReturn_t result = info != NULL ? compute_profile(instance, kind, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        const struct sim_profile *p = &t.gpu.profiles[t.gpu.instances[t.instance].profile];
        *info = (nvmlComputeInstanceProfileInfo_t){.id = nvml_compute_kind(p),
                                                   .sliceCount = p->slices,
                                                   .instanceCount = 1,
                                                   .multiprocessorCount = p->multiprocessors,
                                                   .sharedCopyEngineCount = p->slices};
    }
    return result;
}

SIM_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned int kind,
                                                                   unsigned int engines,
                                                                   nvmlComputeInstanceProfileInfo_v2_t *info)
{
    struct target t;
    (void)engines;
    nvmlReturn_t result = info != NULL ? compute_profile(instance, kind, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && info->version != NVML_VERSION(nvmlComputeInstanceProfileInfo_v2_t, 2)) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        const struct sim_profile *p = &t.gpu.profiles[t.gpu.instances[t.instance].profile];
        *info = (nvmlComputeInstanceProfileInfo_v2_t){.version = info->version,
                                                      .id = nvml_compute_kind(p),
                                                      .sliceCount = p->slices,
                                                      .instanceCount = 1,
                                                      .multiprocessorCount = p->multiprocessors,
                                                      .sharedCopyEngineCount = p->slices};
        memcpy(info->name, "MIG ", 4);
        sim_text(info->name + 4, sizeof info->name - 4, p->name);
    }
    return result;
}

SIM_API nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned int profile,
                                                          nvmlComputeInstance_t *out)
{
    struct target t;
    nvmlReturn_t result = out != NULL ? compute_profile(instance, profile, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        result = change_instance(instance, false, true);
    }
    if (result == NVML_SUCCESS) {
        *out = (nvmlComputeInstance_t)(void *)instance;
    }
    return result;
}

/* ---- compute mode, clocks ---- */

static enum sim_status set_compute_mode(struct sim_state *head, struct sim_gpu *gpu, void *argument)
{
    (void)head;
    gpu->compute_mode = *(unsigned *)argument;
    return SIM_OK;
}

SIM_API nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, unsigned int mode)
{
    struct target t;
    nvmlReturn_t result = mode <= 3 ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && mode == 1) {
        result = NVML_ERROR_NOT_SUPPORTED; /* exclusive thread: gone since CUDA 8 */
    }
    return result == NVML_SUCCESS ? nvml_error(sim_change(t.index, set_compute_mode, &mode)) : result;
}

static enum sim_status lock_clocks(struct sim_state *head, struct sim_gpu *gpu, void *argument)
{
    (void)head;
    gpu->clock_locked = *(unsigned *)argument;
    return SIM_OK;
}

SIM_API nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned int low, unsigned int high)
{
    struct target t;
    nvmlReturn_t result = low <= high && high > 0 ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && high > t.gpu.clock_graphics_max) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    return result == NVML_SUCCESS ? nvml_error(sim_change(t.index, lock_clocks, &high)) : result;
}

SIM_API nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device)
{
    struct target t;
    unsigned none = 0;
    nvmlReturn_t result = nvml_enter_whole(device, 0, &t);
    if (result == NVML_SUCCESS && t.gpu.clock_locked == 0) {
        return geteuid() == 0 ? NVML_SUCCESS : NVML_ERROR_NO_PERMISSION;
    }
    return result == NVML_SUCCESS ? nvml_error(sim_change(t.index, lock_clocks, &none)) : result;
}

/* ---- power ---- */

SIM_API nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned int mw)
{
    struct target t;
    nvmlReturn_t result = nvml_enter_whole(device, 0, &t);
    if (result == NVML_SUCCESS && !sim_limits_power()) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    return result == NVML_SUCCESS ? nvml_error(sim_limit_power(t.index, mw)) : result;
}

SIM_API nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, nvmlPowerValue_v2_t *value)
{
    if (value == NULL || value->version != NVML_VERSION(nvmlPowerValue_v2_t, 2)) {
        return value == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    bool whole = value->powerScope == 0; /* the GPU, not its module or memory */
    return whole ? nvmlDeviceSetPowerManagementLimit(device, value->powerValueMw) : NVML_ERROR_NOT_SUPPORTED;
}

/* ---- limits on the memory of cgroups ---- */

static nvmlReturn_t enter_limits(nvmlDevice_t device, const char *folder, struct target *t)
{
    nvmlReturn_t result =
        folder != NULL && folder[0] == '/' ? nvml_enter_whole(device, R615, t) : NVML_ERROR_INVALID_ARGUMENT;
    return result == NVML_SUCCESS && t->gpu.mig_enabled ? NVML_ERROR_NOT_SUPPORTED : result;
}

SIM_API nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits)
{
    struct target t;
    nvmlReturn_t result = limits != NULL ? enter_limits(device, limits->nameSpace, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && limits->softLimit > limits->hardLimit) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    return result == NVML_SUCCESS
               ? nvml_error(sim_limit_cgroup(t.index, limits->nameSpace, limits->softLimit, limits->hardLimit))
               : result;
}

SIM_API nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
    struct target t;
    nvmlReturn_t result = limits != NULL ? enter_limits(device, limits->nameSpace, &t) : NVML_ERROR_INVALID_ARGUMENT;
    struct sim_cgroup_limit found = {.hard = SIM_NO_LIMIT};
    if (result == NVML_SUCCESS) {
        result = nvml_error(sim_cgroup_limits(t.index, limits->nameSpace, &found));
    }
    if (result == NVML_SUCCESS) {
        limits->softLimit = found.soft;
        limits->hardLimit = found.hard;
        limits->currentUsed = found.used;
    }
    return result;
}
