/* Simulated AMD SMI. One socket handle for each GPU, as the library has it. */
#include "amd_smi_abi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

enum { XGMI_WEIGHT = 15, PCIE_WEIGHT = 40 }; /* as in published topologies */
enum { MAX_LISTED = 512 };
#define ENERGY_STEP_UJ 15.259f /* resolution of the energy accumulator of MI200 and MI300 */

static char handles[SIM_MAX_GPUS]; /* addresses within it are handles */

static amdsmi_status_t failure(enum sim_status status)
{
    switch (status) {
    case SIM_OK:
        return AMDSMI_STATUS_SUCCESS;
    case SIM_NOT_LOADED:
        return AMDSMI_STATUS_DRIVER_NOT_LOADED;
    case SIM_CORRUPT:
        return AMDSMI_STATUS_UNEXPECTED_DATA;
    case SIM_CLOSED:
        return AMDSMI_STATUS_NOT_INIT;
    case SIM_OLD_DRIVER:
        return AMDSMI_STATUS_NOT_SUPPORTED;
    case SIM_NO_DEVICE:
        return AMDSMI_STATUS_NOT_FOUND;
    case SIM_NO_MEMORY:
        return AMDSMI_STATUS_OUT_OF_RESOURCES;
    case SIM_LOST: /* its sysfs files are gone */
    case SIM_IO:
    case SIM_DENIED:
    case SIM_BUSY:
    case SIM_REFUSED:
        return AMDSMI_STATUS_IO;
    }
    return AMDSMI_STATUS_API_FAILED;
}

struct target {
    struct sim_gpu gpu;
    unsigned index;
};

static amdsmi_processor_handle handle_of(unsigned index)
{
    return (amdsmi_processor_handle)(void *)&handles[index];
}

static amdsmi_status_t enter(amdsmi_processor_handle handle, struct target *t)
{
    uintptr_t index = (uintptr_t)handle - (uintptr_t)handles;
    if (index >= sizeof handles) {
        return AMDSMI_STATUS_INVAL;
    }
    t->index = (unsigned)index;
    return failure(sim_gpu(0, t->index, &t->gpu));
}

static amdsmi_status_t copy(char *to, size_t size, const char *from)
{
    if (to == NULL || size == 0) {
        return AMDSMI_STATUS_INVAL;
    }
    return sim_text(to, size, from) ? AMDSMI_STATUS_SUCCESS : AMDSMI_STATUS_INSUFFICIENT_SIZE;
}

/* A function `NAME(handle, TYPE *out)` that gives VALUE of target `t` where SUPPORTED. */
#define AMD_READ(NAME, TYPE, SUPPORTED, ...)                                                                           \
    SIM_API amdsmi_status_t NAME(amdsmi_processor_handle handle, TYPE *out)                                            \
    {                                                                                                                  \
        struct target t;                                                                                               \
        amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;                                \
        if (result == AMDSMI_STATUS_SUCCESS && !(SUPPORTED)) {                                                         \
            result = AMDSMI_STATUS_NOT_SUPPORTED;                                                                      \
        }                                                                                                              \
        if (result == AMDSMI_STATUS_SUCCESS) {                                                                         \
            *out = (__VA_ARGS__);                                                                                      \
        }                                                                                                              \
        return result;                                                                                                 \
    }

static uint64_t bdf_of(const struct sim_pci *pci)
{
    return (uint64_t)pci->domain << 16 | (uint64_t)pci->bus << 8 | (uint64_t)pci->device << 3 | pci->function;
}

static uint64_t used_bytes(const struct target *t) /* the library counts what the driver keeps as used */
{
    return sim_used(t->index, &t->gpu, SIM_NO_INSTANCE) + t->gpu.memory_reserved_mib * SIM_MIB;
}

static uint32_t pcie_speed(uint32_t generation) /* MT/s */
{
    return generation == 0 ? 0 : generation < 3 ? 2500u * generation : 8000u << (generation - 3);
}

static uint32_t ordinal(unsigned index)
{
    uint8_t visible[SIM_MAX_GPUS];
    unsigned count = sim_visible(visible);
    for (uint32_t i = 0; i < count; i++) {
        if (visible[i] == index) {
            return i;
        }
    }
    return UINT32_MAX;
}

AMD_READ(amdsmi_get_processor_type, uint32_t, true, 1)
AMD_READ(amdsmi_get_gpu_device_bdf, amdsmi_bdf_t, true, bdf_of(&t.gpu.pci))
AMD_READ(amdsmi_get_gpu_bdf_id, uint64_t, true,
         (uint64_t)t.gpu.pci.domain << 32 | (uint64_t)t.gpu.pci.bus << 8 | (uint64_t)t.gpu.pci.device << 3 |
             t.gpu.pci.function)
AMD_READ(amdsmi_get_gpu_id, uint16_t, true, t.gpu.pci.device_id)
AMD_READ(amdsmi_get_gpu_revision, uint16_t, true, t.gpu.pci.revision)
AMD_READ(amdsmi_get_gpu_subsystem_id, uint16_t, true, t.gpu.pci.sub_device_id)
AMD_READ(amdsmi_get_gpu_topo_numa_affinity, int32_t, true, t.gpu.numa_node)
AMD_READ(amdsmi_topo_get_numa_node_number, uint32_t, t.gpu.numa_node >= 0, (uint32_t)t.gpu.numa_node)
AMD_READ(amdsmi_get_gpu_pci_replay_counter, uint64_t, true, t.gpu.pcie_replays)
AMD_READ(amdsmi_get_gpu_busy_percent, uint32_t, true, sim_utilisation(t.index, &t.gpu))
AMD_READ(amdsmi_is_gpu_power_management_enabled, bool, true, true)
AMD_READ(amdsmi_get_gpu_perf_level, uint32_t, true, 0) /* auto */
AMD_READ(amdsmi_get_gpu_virtualization_mode, uint32_t, true, 1)
AMD_READ(amdsmi_get_gpu_process_isolation, uint32_t, true, 0)
AMD_READ(amdsmi_get_gpu_bad_page_threshold, uint32_t, t.gpu.ecc_supported, 256)
AMD_READ(amdsmi_get_gpu_ecc_enabled, uint64_t, true, t.gpu.ecc_enabled ? 0x8F : 0) /* UMC, SDMA, GFX, MMHUB, XGMI */
AMD_READ(amdsmi_get_gpu_ras_feature_info, amdsmi_ras_feature_t, t.gpu.ecc_supported,
         (amdsmi_ras_feature_t){.ras_eeprom_version = 0x30000, .ecc_correction_schema_flag = 7})
AMD_READ(amdsmi_get_gpu_total_ecc_count, amdsmi_error_count_t, t.gpu.ecc_supported,
         (amdsmi_error_count_t){.correctable_count = t.gpu.ecc_corrected, .uncorrectable_count = t.gpu.ecc_uncorrected})
AMD_READ(amdsmi_get_gpu_activity, amdsmi_engine_usage_t, true,
         (amdsmi_engine_usage_t){.gfx_activity = sim_utilisation(t.index, &t.gpu),
                                 .umc_activity = t.gpu.utilisation_memory,
                                 .mm_activity = t.gpu.utilisation_decoder})
AMD_READ(amdsmi_get_gpu_kfd_info, amdsmi_kfd_info_t, true,
         (amdsmi_kfd_info_t){.kfd_id = 0x1000u + t.gpu.minor, .node_id = 2 + ordinal(t.index)})
AMD_READ(amdsmi_get_gpu_vram_usage, amdsmi_vram_usage_t, true,
         (amdsmi_vram_usage_t){.vram_total = t.gpu.memory_total_mib, .vram_used = (uint32_t)(used_bytes(&t) / SIM_MIB)})
AMD_READ(amdsmi_get_power_info, amdsmi_power_info_t, true,
         (amdsmi_power_info_t){.socket_power = t.gpu.power_mw / 1000,
                               .current_socket_power = t.gpu.power_mw / 1000,
                               .average_socket_power = 0xFFFF,
                               .gfx_voltage = 0xFFFF,
                               .soc_voltage = 0xFFFF,
                               .mem_voltage = 0xFFFF,
                               .power_limit = t.gpu.power_limit_mw / 1000})
AMD_READ(amdsmi_get_pcie_info, amdsmi_pcie_info_t, true,
         (amdsmi_pcie_info_t){.pcie_static = {.max_pcie_width = (uint16_t)t.gpu.pcie_width_max,
                                              .max_pcie_speed = pcie_speed(t.gpu.pcie_generation_max),
                                              .pcie_interface_version = t.gpu.pcie_generation_max,
                                              .slot_type = t.gpu.link_count > 0 ? 1 : 0,
                                              .max_pcie_interface_version = t.gpu.pcie_generation_max},
                              .pcie_metric = {.pcie_width = (uint16_t)t.gpu.pcie_width,
                                              .pcie_speed = pcie_speed(t.gpu.pcie_generation),
                                              .pcie_replay_count = t.gpu.pcie_replays}})

/* ---- start and end, handles ---- */

SIM_API amdsmi_status_t amdsmi_init(uint64_t flags)
{
    (void)flags;
    return failure(sim_open(SIM_VENDOR_AMD));
}

SIM_API amdsmi_status_t amdsmi_shut_down(void)
{
    return failure(sim_close());
}

SIM_API amdsmi_status_t amdsmi_get_lib_version(amdsmi_version_t *version)
{
    if (version == NULL) {
        return AMDSMI_STATUS_INVAL;
    }
    *version = (amdsmi_version_t){.major = 26, .minor = 0, .release = 2, .build = "26.0.2"};
    return AMDSMI_STATUS_SUCCESS;
}

SIM_API amdsmi_status_t amdsmi_status_code_to_string(amdsmi_status_t status, const char **text)
{
    static const struct {
        int code;
        const char *text;
    } texts[] = {
        {AMDSMI_STATUS_SUCCESS, "AMDSMI_STATUS_SUCCESS: Call succeeded."},
        {AMDSMI_STATUS_INVAL, "AMDSMI_STATUS_INVAL: Invalid parameters."},
        {AMDSMI_STATUS_NOT_SUPPORTED, "AMDSMI_STATUS_NOT_SUPPORTED: Command not supported."},
        {AMDSMI_STATUS_IO, "AMDSMI_STATUS_IO: I/O Error."},
        {AMDSMI_STATUS_NOT_FOUND, "AMDSMI_STATUS_NOT_FOUND: Device Not found."},
        {AMDSMI_STATUS_NOT_INIT, "AMDSMI_STATUS_NOT_INIT: Device not initialized."},
        {AMDSMI_STATUS_DRIVER_NOT_LOADED, "AMDSMI_STATUS_DRIVER_NOT_LOADED: Driver not loaded."},
        {AMDSMI_STATUS_UNEXPECTED_DATA, "AMDSMI_STATUS_UNEXPECTED_DATA: Unexpected data."},
    };
    if (text == NULL) {
        return AMDSMI_STATUS_INVAL;
    }
    *text = "An unknown error occurred";
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (texts[i].code == (int)status) {
            *text = texts[i].text;
        }
    }
    return AMDSMI_STATUS_SUCCESS;
}

SIM_API amdsmi_status_t amdsmi_get_socket_handles(uint32_t *count, amdsmi_socket_handle *out)
{
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || count == NULL) {
        return status != SIM_OK ? failure(status) : AMDSMI_STATUS_INVAL;
    }
    uint8_t visible[SIM_MAX_GPUS];
    uint32_t found = sim_visible(visible), room = *count;
    *count = found;
    for (uint32_t i = 0; out != NULL && i < found && i < room; i++) {
        out[i] = handle_of(visible[i]);
        *count = i + 1;
    }
    return AMDSMI_STATUS_SUCCESS;
}

SIM_API amdsmi_status_t amdsmi_get_processor_handles(amdsmi_socket_handle socket, uint32_t *count,
                                                     amdsmi_processor_handle *out)
{
    uintptr_t index = (uintptr_t)socket - (uintptr_t)handles;
    if (count == NULL || index >= sizeof handles) {
        return AMDSMI_STATUS_INVAL;
    }
    if (out != NULL && *count > 0) {
        out[0] = socket;
    }
    *count = 1; /* a lost GPU keeps its handle */
    return failure(sim_enter(0, NULL));
}

static amdsmi_status_t name_of(amdsmi_processor_handle handle, size_t size, char *name)
{
    struct target t;
    amdsmi_status_t result = enter(handle, &t);
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    char text[32];
    sim_pci_text(&t.gpu.pci, text, sizeof text);
    return copy(name, size, text);
}

SIM_API amdsmi_status_t amdsmi_get_socket_info(amdsmi_socket_handle socket, size_t size, char *name)
{
    return name_of(socket, size, name);
}

SIM_API amdsmi_status_t amdsmi_get_processor_info(amdsmi_processor_handle handle, size_t size, char *name)
{
    return name_of(handle, size, name);
}

SIM_API amdsmi_status_t amdsmi_get_processor_handle_from_bdf(amdsmi_bdf_t bdf, amdsmi_processor_handle *out)
{
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || out == NULL) {
        return status != SIM_OK ? failure(status) : AMDSMI_STATUS_INVAL;
    }
    uint8_t visible[SIM_MAX_GPUS];
    unsigned count = sim_visible(visible);
    for (unsigned i = 0; i < count; i++) {
        struct sim_gpu gpu;
        if (sim_peek(visible[i], &gpu) && bdf_of(&gpu.pci) == bdf) {
            *out = handle_of(visible[i]);
            return AMDSMI_STATUS_SUCCESS;
        }
    }
    return AMDSMI_STATUS_NOT_FOUND;
}

/* ---- what it is ---- */

SIM_API amdsmi_status_t amdsmi_get_gpu_device_uuid(amdsmi_processor_handle handle, uint32_t *size, char *uuid)
{
    struct target t;
    amdsmi_status_t result = size != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    return result != AMDSMI_STATUS_SUCCESS ? result : copy(uuid, *size, t.gpu.uuid);
}

/* The 16 hexadecimal digits of the serial number that the UUID is made from. */
static void serial_of(const struct sim_gpu *gpu, char *text, size_t size)
{
    if (strlen(gpu->uuid) == 36) {
        snprintf(text, size, "%.2s%.2s%.12s", gpu->uuid, gpu->uuid + 21, gpu->uuid + 24);
    } else {
        snprintf(text, size, "0");
    }
}

SIM_API amdsmi_status_t amdsmi_get_gpu_asic_info(amdsmi_processor_handle handle, amdsmi_asic_info_t *out)
{
    struct target t;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    const char *target = t.gpu.architecture_name;
    *out = (amdsmi_asic_info_t){
        .vendor_id = t.gpu.pci.vendor_id,
        .vendor_name = "Advanced Micro Devices Inc. [AMD/ATI]",
        .subvendor_id = t.gpu.pci.sub_vendor_id,
        .device_id = t.gpu.pci.device_id,
        .rev_id = t.gpu.pci.revision,
        .oam_id = t.gpu.link_count > 0 ? ordinal(t.index) : UINT32_MAX,
        .num_of_compute_units = t.gpu.multiprocessors,
        .target_graphics_version = strncmp(target, "gfx", 3) == 0 ? strtoull(target + 3, NULL, 16) : 0,
        .subsystem_id = t.gpu.pci.sub_device_id,
    };
    sim_text(out->market_name, sizeof out->market_name, t.gpu.name);
    serial_of(&t.gpu, out->asic_serial, sizeof out->asic_serial);
    return AMDSMI_STATUS_SUCCESS;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_board_info(amdsmi_processor_handle handle, amdsmi_board_info_t *out)
{
    struct target t;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_board_info_t){.manufacturer_name = "AMD"};
        sim_text(out->model_number, sizeof out->model_number, t.gpu.part_number);
        sim_text(out->product_serial, sizeof out->product_serial, t.gpu.serial);
        sim_text(out->product_name, sizeof out->product_name, t.gpu.name);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_enumeration_info(amdsmi_processor_handle handle, amdsmi_enumeration_info_t *out)
{
    struct target t;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        char serial[32];
        serial_of(&t.gpu, serial, sizeof serial);
        *out = (amdsmi_enumeration_info_t){.drm_render = t.gpu.minor,
                                           .drm_card = t.gpu.card,
                                           .hsa_id = 2 + ordinal(t.index),
                                           .hip_id = ordinal(t.index)};
        snprintf(out->hip_uuid, sizeof out->hip_uuid, "GPU-%s", serial);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_vram_info(amdsmi_processor_handle handle, amdsmi_vram_info_t *out)
{
    enum { HBM3 = 4, GDDR6 = 22 };
    struct target t;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_vram_info_t){.vram_type = t.gpu.memory_kind == 0 ? HBM3 : GDDR6,
                                    .vram_vendor = "SAMSUNG",
                                    .vram_size = t.gpu.memory_total_mib,
                                    .vram_bit_width = t.gpu.bus_width,
                                    /* two transfers a clock, GB/s */
                                    .vram_max_bandwidth =
                                        (uint64_t)t.gpu.clock_memory_max * 4 * t.gpu.bus_width / 8 / 1000};
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_driver_info(amdsmi_processor_handle handle, amdsmi_driver_info_t *out)
{
    struct target t;
    struct sim_state head;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        result = failure(sim_enter(0, &head));
    }
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_driver_info_t){.driver_date = "2015/01/01 00:00", .driver_name = "amdgpu"};
        sim_text(out->driver_version, sizeof out->driver_version, head.drivers[SIM_VENDOR_AMD].version);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_vbios_info(amdsmi_processor_handle handle, amdsmi_vbios_info_t *out)
{
    struct target t;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_vbios_info_t){.build_date = "2024/10/18 10:15"};
        sim_text(out->name, sizeof out->name, t.gpu.name);
        sim_text(out->part_number, sizeof out->part_number, t.gpu.vbios);
        sim_text(out->version, sizeof out->version, t.gpu.vbios);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_vendor_name(amdsmi_processor_handle handle, char *name, size_t size)
{
    struct target t;
    amdsmi_status_t result = enter(handle, &t);
    return result != AMDSMI_STATUS_SUCCESS ? result : copy(name, size, "Advanced Micro Devices, Inc. [AMD/ATI]");
}

SIM_API amdsmi_status_t amdsmi_get_gpu_vram_vendor(amdsmi_processor_handle handle, char *name, uint32_t size)
{
    struct target t;
    amdsmi_status_t result = enter(handle, &t);
    return result != AMDSMI_STATUS_SUCCESS ? result : copy(name, size, "samsung");
}

static amdsmi_status_t partition(amdsmi_processor_handle handle, char *text, uint32_t size, const char *mode)
{
    struct target t;
    amdsmi_status_t result = enter(handle, &t);
    if (result == AMDSMI_STATUS_SUCCESS && t.gpu.link_count == 0 && t.gpu.memory_kind != 0) {
        result = AMDSMI_STATUS_NOT_SUPPORTED;
    }
    return result != AMDSMI_STATUS_SUCCESS ? result : copy(text, size, mode);
}

SIM_API amdsmi_status_t amdsmi_get_gpu_compute_partition(amdsmi_processor_handle handle, char *text, uint32_t size)
{
    return partition(handle, text, size, "SPX");
}

SIM_API amdsmi_status_t amdsmi_get_gpu_memory_partition(amdsmi_processor_handle handle, char *text, uint32_t size)
{
    return partition(handle, text, size, "NPS1");
}

SIM_API amdsmi_status_t amdsmi_get_cpu_affinity_with_scope(amdsmi_processor_handle handle, uint32_t size, uint64_t *set,
                                                           uint32_t scope)
{
    struct target t;
    (void)scope;
    amdsmi_status_t result = set != NULL && size > 0 ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    for (uint32_t i = 0; result == AMDSMI_STATUS_SUCCESS && i < size; i++) {
        set[i] = i < SIM_CPU_WORDS ? t.gpu.cpus[i] : 0;
    }
    return result;
}

/* ---- how it is ---- */

SIM_API amdsmi_status_t amdsmi_get_gpu_memory_total(amdsmi_processor_handle handle, uint32_t kind, uint64_t *total)
{
    struct target t;
    amdsmi_status_t result = total != NULL && kind < 3 ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) { /* all of it is visible to the host; of host memory none is told */
        *total = kind == 2 ? 0 : t.gpu.memory_total_mib * SIM_MIB;
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_memory_usage(amdsmi_processor_handle handle, uint32_t kind, uint64_t *used)
{
    struct target t;
    amdsmi_status_t result = used != NULL && kind < 3 ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *used = kind == 2 ? 0 : used_bytes(&t);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_temp_metric(amdsmi_processor_handle handle, uint32_t sensor, uint32_t metric,
                                               int64_t *celsius)
{
    enum { HOTSPOT = 1, VRAM = 2, CURRENT = 0, CRITICAL = 5, EMERGENCY = 7 };
    struct target t;
    amdsmi_status_t result = celsius != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    bool memory = sensor == VRAM;
    int32_t value = 0;
    if (sensor == HOTSPOT || (memory && t.gpu.temperature_memory > 0)) { /* MI300 has no edge sensor */
        value = metric == CURRENT     ? (memory ? t.gpu.temperature_memory : t.gpu.temperature)
                : metric == CRITICAL  ? (memory ? t.gpu.temperature_max_memory : t.gpu.temperature_slowdown)
                : metric == EMERGENCY ? (memory ? t.gpu.temperature_max_memory + 10 : t.gpu.temperature_shutdown)
                                      : 0;
    }
    *celsius = value;
    return value > 0 ? AMDSMI_STATUS_SUCCESS : AMDSMI_STATUS_NOT_SUPPORTED;
}

SIM_API amdsmi_status_t amdsmi_get_power_cap_info(amdsmi_processor_handle handle, uint32_t sensor,
                                                  amdsmi_power_cap_info_t *out)
{
    struct target t;
    amdsmi_status_t result = out != NULL && sensor == 0 ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_power_cap_info_t){.power_cap = t.gpu.power_limit_mw * 1000ull,
                                         .default_power_cap = t.gpu.power_limit_default_mw * 1000ull,
                                         .dpm_cap = t.gpu.clock_graphics_max,
                                         .min_power_cap = t.gpu.power_limit_min_mw * 1000ull,
                                         .max_power_cap = t.gpu.power_limit_max_mw * 1000ull};
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_energy_count(amdsmi_processor_handle handle, uint64_t *energy, float *resolution,
                                                uint64_t *timestamp)
{
    struct target t;
    bool good = energy != NULL && resolution != NULL && timestamp != NULL;
    amdsmi_status_t result = good ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        *resolution = ENERGY_STEP_UJ;
        *energy = (uint64_t)((double)sim_energy(&t.gpu) * 1000.0 / (double)ENERGY_STEP_UJ);
        *timestamp = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    }
    return result;
}

/* Clock domains: 0 graphics, 4 memory, 6 to 9 video. */
static bool clock_of(const struct sim_gpu *gpu, uint32_t domain, uint32_t *now, uint32_t *most)
{
    *now = domain == 0 ? gpu->clock_graphics : domain == 4 ? gpu->clock_memory : gpu->clock_video;
    *most = domain == 0 ? gpu->clock_graphics_max : domain == 4 ? gpu->clock_memory_max : gpu->clock_video_max;
    return domain == 0 || domain == 4 || (domain >= 6 && domain <= 9);
}

SIM_API amdsmi_status_t amdsmi_get_clock_info(amdsmi_processor_handle handle, uint32_t domain, amdsmi_clk_info_t *out)
{
    struct target t;
    uint32_t now, most;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS && !clock_of(&t.gpu, domain, &now, &most)) {
        result = AMDSMI_STATUS_NOT_SUPPORTED;
    }
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_clk_info_t){.clk = now, .max_clk = most, .clk_deep_sleep = 0xFF};
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_clk_freq(amdsmi_processor_handle handle, uint32_t domain, amdsmi_frequencies_t *out)
{
    struct target t;
    uint32_t now, most;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS && !clock_of(&t.gpu, domain, &now, &most)) {
        result = AMDSMI_STATUS_NOT_SUPPORTED;
    }
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_frequencies_t){.num_supported = 2};
        out->frequency[0] = now * 1000000ull;
        out->frequency[1] = most * 1000000ull;
    }
    return result;
}

static amdsmi_status_t fan(amdsmi_processor_handle handle, uint32_t sensor, uint64_t full, uint64_t *speed, bool most)
{
    struct target t;
    amdsmi_status_t result = speed != NULL && sensor == 0 ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS && t.gpu.fan_percent == 0) {
        result = AMDSMI_STATUS_NOT_SUPPORTED; /* passive */
    }
    if (result == AMDSMI_STATUS_SUCCESS) {
        *speed = most ? full : full * t.gpu.fan_percent / 100;
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_fan_speed(amdsmi_processor_handle handle, uint32_t sensor, uint64_t *speed)
{
    return fan(handle, sensor, 255, speed, false);
}

SIM_API amdsmi_status_t amdsmi_get_gpu_fan_speed_max(amdsmi_processor_handle handle, uint32_t sensor, uint64_t *speed)
{
    return fan(handle, sensor, 255, speed, true);
}

SIM_API amdsmi_status_t amdsmi_get_violation_status(amdsmi_processor_handle handle, amdsmi_violation_status_t *out)
{
    enum { POWER = 0x4 | 0x80, THERMAL = 0x20 | 0x40, HARDWARE = 0x8 }; /* the state's throttle bits */
    struct target t;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        uint64_t why = t.gpu.throttle_reasons;
        memset(out, 0xFF, sizeof *out); /* whatever is not told */
        out->reference_timestamp = out->violation_timestamp = t.gpu.energy_since_ns / 1000;
        out->active_prochot_thrm = (why & HARDWARE) != 0;
        out->active_ppt_pwr = (why & POWER) != 0;
        out->active_socket_thrm = (why & THERMAL) != 0;
        out->active_vr_thrm = 0;
        out->active_hbm_thrm =
            t.gpu.temperature_max_memory > 0 && t.gpu.temperature_memory >= t.gpu.temperature_max_memory;
        out->active_gfx_clk_below_host_limit = why != 0;
    }
    return result;
}

/* ---- errors ---- */

SIM_API amdsmi_status_t amdsmi_get_gpu_ecc_count(amdsmi_processor_handle handle, uint64_t block,
                                                 amdsmi_error_count_t *out)
{
    amdsmi_status_t result = amdsmi_get_gpu_total_ecc_count(handle, out);
    if (result == AMDSMI_STATUS_SUCCESS && block != 1) { /* all of them were in memory (UMC) */
        *out = (amdsmi_error_count_t){0};
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_ecc_status(amdsmi_processor_handle handle, uint64_t block, uint32_t *state)
{
    enum { DISABLED = 1, ENABLED = 6 };
    struct target t;
    amdsmi_status_t result = state != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *state = t.gpu.ecc_enabled && (block & 0x8F) ? ENABLED : DISABLED;
    }
    return result;
}

static amdsmi_status_t bad_pages(amdsmi_processor_handle handle, uint32_t *count, amdsmi_retired_page_record_t *pages)
{
    enum { RESERVED, PENDING };
    struct target t;
    amdsmi_status_t result = count != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS && !t.gpu.ecc_supported) {
        result = AMDSMI_STATUS_NOT_SUPPORTED;
    }
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    uint32_t found = t.gpu.retired_single + t.gpu.retired_double, room = *count;
    *count = found;
    for (uint32_t i = 0; pages != NULL && i < found && i < room; i++) {
        pages[i] =
            (amdsmi_retired_page_record_t){.page_address = 0x10000ull * (i + 1),
                                           .page_size = 4096,
                                           .status = t.gpu.retired_pending && i + 1 == found ? PENDING : RESERVED};
        *count = i + 1;
    }
    return AMDSMI_STATUS_SUCCESS;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_bad_page_info(amdsmi_processor_handle handle, uint32_t *count,
                                                     amdsmi_retired_page_record_t *pages)
{
    return bad_pages(handle, count, pages);
}

SIM_API amdsmi_status_t amdsmi_get_gpu_memory_reserved_pages(amdsmi_processor_handle handle, uint32_t *count,
                                                             amdsmi_retired_page_record_t *pages)
{
    return bad_pages(handle, count, pages);
}

/* ---- links ---- */

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
                              .index = ordinal(t.index)})

SIM_API amdsmi_status_t amdsmi_get_gpu_xgmi_link_status(amdsmi_processor_handle handle, amdsmi_xgmi_link_status_t *out)
{
    struct target t;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
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
    struct target t;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS && t.gpu.link_count == 0) {
        result = AMDSMI_STATUS_NOT_SUPPORTED;
    }
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_link_metrics_t){.num_links = t.gpu.link_count};
        for (unsigned i = 0; i < t.gpu.link_count; i++) {
            const struct sim_link *link = &t.gpu.links[i];
            uint32_t lane_gbit = link->width > 0 ? link->speed_mbit / 1000 / link->width : 0;
            out->links[i].bdf = bdf_of(&link->peer_pci);
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
static amdsmi_status_t between(amdsmi_processor_handle one, amdsmi_processor_handle other, struct target *t,
                               struct path *path)
{
    struct target u;
    amdsmi_status_t result = enter(one, t);
    if (result == AMDSMI_STATUS_SUCCESS) {
        result = enter(other, &u);
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
    struct target t;
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
    struct target t;
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
    struct target t;
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

static bool reachable(const struct target *t, const struct path *path, amdsmi_processor_handle other)
{
    return path->links > 0 || t->gpu.p2p[(uintptr_t)other - (uintptr_t)handles];
}

SIM_API amdsmi_status_t amdsmi_is_P2P_accessible(amdsmi_processor_handle one, amdsmi_processor_handle other, bool *can)
{
    struct target t;
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
    struct target t;
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
    struct target t;
    amdsmi_status_t result = out != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    *out = (amdsmi_topology_nearest_t){0};
    uint8_t visible[SIM_MAX_GPUS];
    unsigned count = sim_visible(visible);
    for (unsigned i = 0; i < count; i++) {
        struct target u;
        struct path path;
        if (visible[i] != t.index && between(handle, handle_of(visible[i]), &u, &path) == AMDSMI_STATUS_SUCCESS &&
            path.type == type) {
            out->processor_list[out->count++] = handle_of(visible[i]);
        }
    }
    return AMDSMI_STATUS_SUCCESS;
}

/* ---- processes ---- */

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
    struct target t;
    amdsmi_status_t result = room != NULL ? enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result != AMDSMI_STATUS_SUCCESS) {
        return result;
    }
    struct sim_use uses[MAX_LISTED];
    uint32_t found = sim_uses(t.index, &t.gpu, SIM_NO_INSTANCE, uses, MAX_LISTED), offered = *room;
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

/* A process's memory over all visible GPUs and which of them it uses; false when it uses none. */
static bool process_of(uint32_t pid, amdsmi_process_info_t *info, uint32_t *indices, uint32_t *count)
{
    *info = (amdsmi_process_info_t){.process_id = pid};
    *count = 0;
    uint8_t visible[SIM_MAX_GPUS];
    unsigned gpus = sim_visible(visible);
    for (uint32_t i = 0; i < gpus; i++) {
        struct sim_gpu gpu;
        struct sim_use uses[MAX_LISTED];
        unsigned found = sim_peek(visible[i], &gpu) ? sim_uses(visible[i], &gpu, SIM_NO_INSTANCE, uses, MAX_LISTED) : 0;
        bool here = false;
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
    uint32_t indices[SIM_MAX_GPUS], count;
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || out == NULL) {
        return status != SIM_OK ? failure(status) : AMDSMI_STATUS_INVAL;
    }
    return process_of(pid, out, indices, &count) ? AMDSMI_STATUS_SUCCESS : AMDSMI_STATUS_NOT_FOUND;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_compute_process_gpus(uint32_t pid, uint32_t *out, uint32_t *room)
{
    uint32_t indices[SIM_MAX_GPUS], count;
    amdsmi_process_info_t info;
    enum sim_status status = sim_enter(0, NULL);
    if (status != SIM_OK || room == NULL) {
        return status != SIM_OK ? failure(status) : AMDSMI_STATUS_INVAL;
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
