/* Simulated NVML: Multi-Instance GPU. One compute instance in each GPU instance, as most sites lay them out. */
#include <string.h>

#include "nvml.h"

SIM_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    struct target t;
    nvmlReturn_t result =
        current != NULL && pending != NULL ? nvml_enter_whole(device, R450, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !t.gpu.mig_supported) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS) {
        *current = t.gpu.mig_enabled;
        *pending = t.gpu.mig_pending;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    struct target t;
    nvmlReturn_t result = count != NULL ? nvml_enter_whole(device, R450, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *count = t.gpu.mig_supported ? 7 : 0;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    struct target t;
    nvmlReturn_t result = is_mig != NULL ? nvml_enter(device, R450, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *is_mig = t.instance != SIM_NO_INSTANCE;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *part)
{
    struct target t;
    nvmlReturn_t result = part != NULL ? nvml_enter_whole(device, R450, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) {
        return result;
    }
    for (uint8_t k = 0; k < SIM_MAX_INSTANCES; k++) {
        const struct sim_instance *instance = &t.gpu.instances[k];
        if (instance->used && !instance->bare && sim_instance_visible(&t.gpu, instance) && index-- == 0) {
            *part = nvml_handle(t.index, k);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

SIM_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t part, nvmlDevice_t *device)
{
    struct target t;
    nvmlReturn_t result = device != NULL ? nvml_enter(part, R450, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && t.instance == SIM_NO_INSTANCE) {
        result = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (result == NVML_SUCCESS) {
        *device = nvml_handle(t.index, SIM_NO_INSTANCE);
    }
    return result;
}

/* What only a MIG device has. */
static nvmlReturn_t enter_part(nvmlDevice_t device, struct target *t)
{
    nvmlReturn_t result = nvml_enter(device, R450, t);
    return result == NVML_SUCCESS && t->instance == SIM_NO_INSTANCE ? NVML_ERROR_NOT_SUPPORTED : result;
}

SIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    struct target t;
    nvmlReturn_t result = id != NULL ? enter_part(device, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *id = t.gpu.instances[t.instance].gpu_instance;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    struct target t;
    nvmlReturn_t result = id != NULL ? enter_part(device, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *id = t.gpu.instances[t.instance].compute_instance;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    struct target t;
    nvmlReturn_t result = attributes != NULL ? enter_part(device, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        const struct sim_profile *profile = &t.gpu.profiles[t.gpu.instances[t.instance].profile];
        *attributes = (nvmlDeviceAttributes_t){
            .multiprocessorCount = profile->multiprocessors,
            .sharedCopyEngineCount = profile->slices,
            .gpuInstanceSliceCount = profile->slices,
            .computeInstanceSliceCount = profile->slices,
            .memorySizeMB = profile->memory_mib,
        };
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    return nvmlDeviceGetAttributes_v2(device, attributes);
}

/* ---- profiles ---- */

const struct sim_profile *nvml_mig_profile(const struct sim_gpu *gpu, unsigned int number, bool by_id)
{
    for (unsigned i = 0; i < gpu->profile_count; i++) {
        if ((by_id ? gpu->profiles[i].id : gpu->profiles[i].kind) == number) {
            return &gpu->profiles[i];
        }
    }
    return NULL;
}

unsigned int nvml_compute_kind(const struct sim_profile *profile)
{
    static const uint8_t kinds[] = {0, 0, 1, 2, 3, 0, 6, 4, 5}; /* by slices: NVML_COMPUTE_INSTANCE_PROFILE_* */
    return profile->slices < sizeof kinds ? kinds[profile->slices] : 0;
}

static nvmlReturn_t enter_profile(nvmlDevice_t device, uint32_t since, unsigned int number, bool by_id,
                                  struct target *t, const struct sim_profile **profile)
{
    nvmlReturn_t result = nvml_enter_whole(device, since, t);
    if (result == NVML_SUCCESS && !t->gpu.mig_supported) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS && (*profile = nvml_mig_profile(&t->gpu, number, by_id)) == NULL) {
        result = by_id ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int kind,
                                                         nvmlGpuInstanceProfileInfo_t *info)
{
    struct target t;
    const struct sim_profile *p = NULL;
    nvmlReturn_t result = info != NULL ? enter_profile(device, R450, kind, false, &t, &p) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *info = (nvmlGpuInstanceProfileInfo_t){.id = p->id,
                                               .sliceCount = p->slices,
                                               .instanceCount = p->instances,
                                               .multiprocessorCount = p->multiprocessors,
                                               .copyEngineCount = p->slices,
                                               .memorySizeMB = p->memory_mib};
    }
    return result;
}

static nvmlReturn_t profile_v2(nvmlDevice_t device, uint32_t since, unsigned int number, bool by_id,
                               nvmlGpuInstanceProfileInfo_v2_t *info)
{
    struct target t;
    const struct sim_profile *p = NULL;
    nvmlReturn_t result =
        info != NULL ? enter_profile(device, since, number, by_id, &t, &p) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && info->version != NVML_VERSION(nvmlGpuInstanceProfileInfo_v2_t, 2)) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        *info = (nvmlGpuInstanceProfileInfo_v2_t){.version = info->version,
                                                  .id = p->id,
                                                  .sliceCount = p->slices,
                                                  .instanceCount = p->instances,
                                                  .multiprocessorCount = p->multiprocessors,
                                                  .copyEngineCount = p->slices,
                                                  .memorySizeMB = p->memory_mib};
        memcpy(info->name, "MIG ", 4);
        sim_text(info->name + 4, sizeof info->name - 4, p->name);
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int kind,
                                                          nvmlGpuInstanceProfileInfo_v2_t *info)
{
    return profile_v2(device, R510, kind, false, info);
}

SIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id,
                                                              nvmlGpuInstanceProfileInfo_v2_t *info)
{
    return profile_v2(device, R570, id, true, info);
}

/* Where a profile may begin, the eighths that are taken left out or not. */
unsigned nvml_mig_places(const struct sim_gpu *gpu, const struct sim_profile *profile, bool empty, nvmlPlacement_t *out)
{
    unsigned taken = 0, count = 0, slices = 0;
    for (unsigned k = 0; k < SIM_MAX_INSTANCES; k++) {
        const struct sim_instance *instance = &gpu->instances[k];
        if (instance->used) {
            taken |= ((1u << instance->size) - 1u) << instance->start;
            slices += gpu->profiles[instance->profile].slices;
        }
    }
    for (unsigned start = 0; start < 8; start++) {
        unsigned mask = ((1u << profile->size) - 1u) << start;
        if ((profile->starts >> start & 1u) && (empty || (!(taken & mask) && slices + profile->slices <= 7))) {
            if (out != NULL) {
                out[count] = (nvmlPlacement_t){.start = start, .size = profile->size};
            }
            count++;
        }
    }
    return count;
}

SIM_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int id,
                                                                   nvmlPlacement_t *out, unsigned int *count)
{
    struct target t;
    const struct sim_profile *p = NULL;
    nvmlReturn_t result = count != NULL ? enter_profile(device, R450, id, true, &t, &p) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *count = nvml_mig_places(&t.gpu, p, true, out);
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id,
                                                               unsigned int *count)
{
    struct target t;
    const struct sim_profile *p = NULL;
    nvmlReturn_t result = count != NULL ? enter_profile(device, R450, id, true, &t, &p) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        unsigned int free_places = nvml_mig_places(&t.gpu, p, false, NULL);
        *count = t.gpu.mig_enabled ? (free_places < p->instances ? free_places : p->instances) : 0;
    }
    return result;
}

/* ---- GPU instances and compute instances: the handle of an instance is that of its MIG device ---- */

static nvmlDevice_t device_of(const void *handle)
{
    nvmlDevice_t device;
    memcpy(&device, &handle, sizeof device);
    return device;
}

SIM_API nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out,
                                               unsigned int *count)
{
    struct target t;
    const struct sim_profile *p = NULL;
    nvmlReturn_t result =
        out != NULL && count != NULL ? enter_profile(device, R450, id, true, &t, &p) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) {
        return result;
    }
    *count = 0;
    for (uint8_t k = 0; k < SIM_MAX_INSTANCES; k++) {
        if (t.gpu.instances[k].used && &t.gpu.profiles[t.gpu.instances[k].profile] == p) {
            out[(*count)++] = (nvmlGpuInstance_t)(void *)nvml_handle(t.index, k);
        }
    }
    return NVML_SUCCESS;
}

SIM_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *out)
{
    struct target t;
    nvmlReturn_t result = out != NULL ? nvml_enter_whole(device, R450, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) {
        return result;
    }
    for (uint8_t k = 0; k < SIM_MAX_INSTANCES; k++) {
        if (t.gpu.instances[k].used && t.gpu.instances[k].gpu_instance == id) {
            *out = (nvmlGpuInstance_t)(void *)nvml_handle(t.index, k);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

SIM_API nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    struct target t;
    nvmlReturn_t result = info != NULL ? enter_part(device_of(instance), &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        const struct sim_instance *it = &t.gpu.instances[t.instance];
        *info = (nvmlGpuInstanceInfo_t){.device = nvml_handle(t.index, SIM_NO_INSTANCE),
                                        .id = it->gpu_instance,
                                        .profileId = t.gpu.profiles[it->profile].id,
                                        .placement = {.start = it->start, .size = it->size}};
    }
    return result;
}

SIM_API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int id,
                                                        nvmlComputeInstance_t *out, unsigned int *count)
{
    struct target t;
    (void)id;
    nvmlReturn_t result =
        out != NULL && count != NULL ? enter_part(device_of(instance), &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *count = t.gpu.instances[t.instance].bare ? 0 : 1;
        out[0] = (nvmlComputeInstance_t)(void *)instance;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int id,
                                                           nvmlComputeInstance_t *out)
{
    struct target t;
    nvmlReturn_t result = out != NULL ? enter_part(device_of(instance), &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS &&
        (id != t.gpu.instances[t.instance].compute_instance || t.gpu.instances[t.instance].bare)) {
        result = NVML_ERROR_NOT_FOUND;
    }
    if (result == NVML_SUCCESS) {
        *out = (nvmlComputeInstance_t)(void *)instance;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t compute, nvmlComputeInstanceInfo_t *info)
{
    struct target t;
    nvmlReturn_t result = info != NULL ? enter_part(device_of(compute), &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        const struct sim_instance *it = &t.gpu.instances[t.instance];
        *info = (nvmlComputeInstanceInfo_t){.device = nvml_handle(t.index, SIM_NO_INSTANCE),
                                            .gpuInstance = (nvmlGpuInstance_t)(void *)compute,
                                            .id = it->compute_instance,
                                            .profileId = nvml_compute_kind(&t.gpu.profiles[it->profile]),
                                            .placement = {.size = t.gpu.profiles[it->profile].slices}};
    }
    return result;
}
