/* Simulated AMD SMI: partitions of a GPU, by the rules of Linux's amdgpu (aqua_vanjaram.c).
 *
 * The compute mode changes at once, while no process is on the GPU. Parts of the memory (NPS) are asked for, and come
 * with the next start of the driver, which no process on any GPU may be in the way of; GPUs that are joined by xGMI
 * have the same number of them. A start brings the compute mode that goes with the memory by itself. */
#include "amd.h"

#include <stdio.h>
#include <unistd.h>

static const char *const names[] = {
    [SIM_COMPUTE_SPX] = "SPX", [SIM_COMPUTE_DPX] = "DPX", [SIM_COMPUTE_TPX] = "TPX",
    [SIM_COMPUTE_QPX] = "QPX", [SIM_COMPUTE_CPX] = "CPX",
};
enum { MODES = sizeof names / sizeof *names };

/* ---- which modes there are ---- */

static unsigned count_of(const struct sim_gpu *gpu, unsigned mode)
{
    return mode == SIM_COMPUTE_CPX ? gpu->dies : mode;
}

/* The parts of the memory that go with a compute mode on this GPU, as a sum; 0: it has no such mode. */
static uint32_t memory_modes_of(const struct sim_gpu *gpu, unsigned mode)
{
    static const uint32_t with[MODES] = {
        [SIM_COMPUTE_SPX] = 1,     [SIM_COMPUTE_DPX] = 1 | 2, [SIM_COMPUTE_TPX] = 1 | 4,
        [SIM_COMPUTE_QPX] = 1 | 4, [SIM_COMPUTE_CPX] = 1 | 4,
    };
    bool even = mode == SIM_COMPUTE_SPX || (mode == SIM_COMPUTE_DPX && gpu->dies % 4 == 0) ||
                (mode == SIM_COMPUTE_TPX && gpu->dies % 3 == 0) ||
                (mode == SIM_COMPUTE_QPX && gpu->dies % 4 == 0 && gpu->dies / 4 >= 2) ||
                (mode == SIM_COMPUTE_CPX && gpu->dies > 1);
    return gpu->dies > 0 && even ? with[mode] & gpu->memory_modes : 0;
}

/* What a start of the driver chooses. */
static unsigned mode_at_start(const struct sim_gpu *gpu)
{
    return gpu->memory_partition == 1   ? SIM_COMPUTE_SPX
           : gpu->memory_partition == 2 ? SIM_COMPUTE_DPX
                                        : SIM_COMPUTE_CPX;
}

static void lay_out(struct sim_gpu *gpu, unsigned mode)
{
    unsigned count = count_of(gpu, mode);
    gpu->compute_partition = mode;
    gpu->profile_count = count > 1;
    gpu->profiles[0] = (struct sim_profile){0};
    if (count > 1) {
        gpu->profiles[0] = (struct sim_profile){
            .memory_mib = (gpu->memory_total_mib - gpu->memory_reserved_mib) / count,
            .multiprocessors = gpu->multiprocessors / count,
            .instances = count,
        };
        snprintf(gpu->profiles[0].name, sizeof gpu->profiles[0].name, "%cpx-nps%u", names[mode][0] | 0x20,
                 gpu->memory_partition);
    }
    for (uint8_t i = 0; i < SIM_MAX_INSTANCES; i++) {
        gpu->instances[i] = (struct sim_instance){0};
        if (count > 1 && i < count) {
            gpu->instances[i] = (struct sim_instance){
                .used = 1,
                .gpu_instance = i,
                .access_minor = i == 0 ? gpu->minor : gpu->first_render + i - 1,
                .compute_minor = i == 0 ? gpu->card : gpu->first_card + i - 1,
            };
        }
    }
}

/* The device files of partitions, as they are now. The driver has more, which cannot be opened. */
static void make_files(void)
{
    enum { DRM_MAJOR = 226 };
    struct sim_gpu gpu;
    sim_enter(0, NULL);
    for (unsigned index = 0; sim_peek(index, &gpu); index++) {
        for (unsigned i = 1; gpu.vendor == SIM_VENDOR_AMD && i < gpu.dies && i < SIM_MAX_INSTANCES; i++) {
            const uint32_t minors[] = {gpu.first_render + i - 1, gpu.first_card + i - 1};
            for (unsigned k = 0; k < 2; k++) {
                char name[64];
                snprintf(name, sizeof name, k == 0 ? "dri/renderD%u" : "dri/card%u", minors[k]);
                if (gpu.instances[i].used) {
                    sim_make_device(name, DRM_MAJOR, minors[k], 0666);
                } else {
                    sim_drop_device(name);
                }
            }
        }
    }
}

static amdsmi_status_t change(unsigned index, sim_changer function, void *argument)
{
    enum sim_status status = sim_change(index, function, argument);
    if (status == SIM_OK) {
        make_files();
    }
    return amd_failure(status);
}

/* ---- what there is ---- */

static amdsmi_status_t partitioned(amdsmi_processor_handle handle, struct amd_target *t)
{
    amdsmi_status_t result = amd_enter(handle, t);
    return result == AMDSMI_STATUS_SUCCESS && t->gpu.dies == 0 ? AMDSMI_STATUS_NOT_SUPPORTED : result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_compute_partition(amdsmi_processor_handle handle, char *text, uint32_t size)
{
    struct amd_target t;
    amdsmi_status_t result = partitioned(handle, &t);
    return result != AMDSMI_STATUS_SUCCESS ? result : amd_copy(text, size, names[t.gpu.compute_partition % MODES]);
}

SIM_API amdsmi_status_t amdsmi_get_gpu_memory_partition(amdsmi_processor_handle handle, char *text, uint32_t size)
{
    struct amd_target t;
    char name[16];
    amdsmi_status_t result = partitioned(handle, &t);
    snprintf(name, sizeof name, "NPS%u", result == AMDSMI_STATUS_SUCCESS ? t.gpu.memory_partition : 0);
    return result != AMDSMI_STATUS_SUCCESS ? result : amd_copy(text, size, name);
}

SIM_API amdsmi_status_t amdsmi_get_gpu_memory_partition_config(amdsmi_processor_handle handle,
                                                               amdsmi_memory_partition_config_t *out)
{
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? partitioned(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out =
            (amdsmi_memory_partition_config_t){.partition_caps = t.gpu.memory_modes, .mp_mode = t.gpu.memory_partition};
    }
    return result;
}

/* The GPU's modes, numbered in their order; each reports its dies as its only resource. */
static uint32_t profiles_of(const struct sim_gpu *gpu, amdsmi_accelerator_partition_profile_t *out)
{
    uint32_t count = 0;
    for (unsigned mode = SIM_COMPUTE_SPX; mode < MODES; mode++) {
        if (memory_modes_of(gpu, mode) != 0) {
            out[count] = (amdsmi_accelerator_partition_profile_t){.profile_type = mode,
                                                                  .num_partitions = count_of(gpu, mode),
                                                                  .memory_caps = memory_modes_of(gpu, mode),
                                                                  .profile_index = count,
                                                                  .num_resources = 1};
            count++;
        }
    }
    return count;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_accelerator_partition_profile_config(
    amdsmi_processor_handle handle, amdsmi_accelerator_partition_profile_config_t *out)
{
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? partitioned(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_accelerator_partition_profile_config_t){.num_resource_profiles = 1};
        out->num_profiles = profiles_of(&t.gpu, out->profiles);
        for (uint32_t i = 0; i < out->num_profiles; i++) {
            out->resource_profiles[i] = (amdsmi_accelerator_partition_resource_profile_t){
                .profile_index = i,
                .partition_resource = t.gpu.dies / out->profiles[i].num_partitions,
                .num_partitions_share_resource = 1};
        }
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_accelerator_partition_profile(amdsmi_processor_handle handle,
                                                                     amdsmi_accelerator_partition_profile_t *out,
                                                                     uint32_t *partition)
{
    struct amd_target t;
    amdsmi_accelerator_partition_profile_t all[MODES];
    amdsmi_status_t result = out != NULL && partition != NULL ? partitioned(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *partition = t.part == SIM_NO_INSTANCE ? 0 : t.part;
        for (uint32_t i = 0, count = profiles_of(&t.gpu, all); i < count; i++) {
            if (all[i].profile_type == t.gpu.compute_partition) {
                *out = all[i];
            }
        }
    }
    return result;
}

/* ---- what root changes ---- */

struct request {
    unsigned index;
    uint32_t mode;
};

static enum sim_status set_compute(struct sim_state *head, struct sim_gpu *gpu, void *argument)
{
    const struct request *request = argument;
    (void)head;
    if ((memory_modes_of(gpu, request->mode) & gpu->memory_partition) == 0) {
        return SIM_REFUSED;
    }
    if (sim_uses(request->index, gpu, SIM_NO_INSTANCE, NULL, 0) > 0) {
        return SIM_BUSY;
    }
    lay_out(gpu, request->mode);
    return SIM_OK;
}

SIM_API amdsmi_status_t amdsmi_set_gpu_compute_partition(amdsmi_processor_handle handle, uint32_t mode)
{
    struct amd_target t;
    amdsmi_status_t result = mode >= SIM_COMPUTE_SPX && mode < MODES ? partitioned(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        struct request request = {t.index, mode};
        result = change(t.index, set_compute, &request);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_set_gpu_accelerator_partition_profile(amdsmi_processor_handle handle, uint32_t profile)
{
    struct amd_target t;
    amdsmi_accelerator_partition_profile_t all[MODES];
    amdsmi_status_t result = partitioned(handle, &t);
    if (result == AMDSMI_STATUS_SUCCESS && profile >= profiles_of(&t.gpu, all)) {
        result = AMDSMI_STATUS_INVAL;
    }
    return result == AMDSMI_STATUS_SUCCESS ? amdsmi_set_gpu_compute_partition(handle, all[profile].profile_type)
                                           : result;
}

/* `gpu` is one of an array: those that xGMI joins are asked together. */
static enum sim_status ask_memory(struct sim_state *head, struct sim_gpu *gpu, void *argument)
{
    const struct request *request = argument;
    struct sim_gpu *all = gpu - request->index;
    if ((gpu->memory_modes & request->mode) == 0 || (request->mode & (request->mode - 1)) != 0) {
        return SIM_REFUSED;
    }
    for (uint32_t i = 0; i < head->gpu_count; i++) {
        bool joined = i == request->index || (gpu->link_count > 0 && all[i].vendor == SIM_VENDOR_AMD &&
                                              all[i].dies > 0 && all[i].link_count > 0);
        if (joined) {
            all[i].memory_requested = request->mode;
        }
    }
    return SIM_OK;
}

SIM_API amdsmi_status_t amdsmi_set_gpu_memory_partition(amdsmi_processor_handle handle, uint32_t mode)
{
    struct amd_target t;
    amdsmi_status_t result =
        mode == 1 || mode == 2 || mode == 4 || mode == 8 ? partitioned(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        struct request request = {t.index, mode};
        result = amd_failure(sim_change(t.index, ask_memory, &request));
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_set_gpu_memory_partition_mode(amdsmi_processor_handle handle, uint32_t mode)
{
    return amdsmi_set_gpu_memory_partition(handle, mode);
}

static enum sim_status start_driver(struct sim_state *head, struct sim_gpu *gpu, void *argument)
{
    const struct request *request = argument;
    struct sim_gpu *all = gpu - request->index;
    for (uint32_t i = 0; i < head->gpu_count; i++) {
        if (all[i].vendor == SIM_VENDOR_AMD && sim_uses(i, &all[i], SIM_NO_INSTANCE, NULL, 0) > 0) {
            return SIM_BUSY;
        }
    }
    for (uint32_t i = 0; i < head->gpu_count; i++) {
        if (all[i].vendor == SIM_VENDOR_AMD && all[i].dies > 0) {
            all[i].memory_partition = all[i].memory_requested != 0 ? all[i].memory_requested : all[i].memory_partition;
            all[i].memory_requested = 0;
            lay_out(&all[i], mode_at_start(&all[i]));
        }
    }
    return SIM_OK;
}

/* The whole driver: every GPU of the vendor's. */
SIM_API amdsmi_status_t amdsmi_gpu_driver_reload(void)
{
    uint8_t visible[SIM_MAX_GPUS];
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || sim_visible(visible) == 0) {
        return status != SIM_OK ? amd_failure(status) : AMDSMI_STATUS_NOT_FOUND;
    }
    struct request request = {visible[0], 0};
    amdsmi_status_t result = change(request.index, start_driver, &request);
    return result == AMDSMI_STATUS_BUSY ? AMDSMI_STATUS_AMDGPU_RESTART_ERR : result;
}
