/* Simulated AMD SMI: how a GPU is - memory, temperature, power, clocks, errors. */
#include "amd.h"

#include <string.h>
#include <time.h>

#define ENERGY_STEP_UJ 15.259f /* resolution of the energy accumulator of MI200 and MI300 */

static uint32_t pcie_speed(uint32_t generation) /* MT/s */
{
    return generation == 0 ? 0 : generation < 3 ? 2500u * generation : 8000u << (generation - 3);
}

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
AMD_READ(amdsmi_get_gpu_vram_usage, amdsmi_vram_usage_t, true,
         (amdsmi_vram_usage_t){.vram_total = t.gpu.memory_total_mib, .vram_used = (uint32_t)(amd_used(&t) / SIM_MIB)})
AMD_READ(amdsmi_get_power_info, amdsmi_power_info_t, true,
         (amdsmi_power_info_t){.socket_power = sim_power(&t.gpu) / 1000,
                               .current_socket_power = sim_power(&t.gpu) / 1000,
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

SIM_API amdsmi_status_t amdsmi_get_gpu_memory_total(amdsmi_processor_handle handle, uint32_t kind, uint64_t *total)
{
    struct amd_target t;
    amdsmi_status_t result = total != NULL && kind < 3 ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) { /* all of it is visible to the host; no host memory is reported */
        *total = kind == 2 ? 0 : t.gpu.memory_total_mib * SIM_MIB;
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_gpu_memory_usage(amdsmi_processor_handle handle, uint32_t kind, uint64_t *used)
{
    struct amd_target t;
    amdsmi_status_t result = used != NULL && kind < 3 ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *used = kind == 2 ? 0 : amd_used(&t);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_temp_metric(amdsmi_processor_handle handle, uint32_t sensor, uint32_t metric,
                                               int64_t *celsius)
{
    enum { HOTSPOT = 1, VRAM = 2, CURRENT = 0, CRITICAL = 5, EMERGENCY = 7 };
    struct amd_target t;
    amdsmi_status_t result = celsius != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
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
    struct amd_target t;
    amdsmi_status_t result = out != NULL && sensor == 0 ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS && !sim_limits_power()) {
        result = AMDSMI_STATUS_NOT_SUPPORTED;
    }
    if (result == AMDSMI_STATUS_SUCCESS) {
        *out = (amdsmi_power_cap_info_t){.power_cap = t.gpu.power_limit_mw * 1000ull,
                                         .default_power_cap = t.gpu.power_limit_default_mw * 1000ull,
                                         .dpm_cap = t.gpu.clock_graphics_max,
                                         .min_power_cap = t.gpu.power_limit_min_mw * 1000ull,
                                         .max_power_cap = t.gpu.power_limit_max_mw * 1000ull};
    }
    return result;
}

/* In uW. Whole watts, as the kernel's driver cuts them. */
SIM_API amdsmi_status_t amdsmi_set_power_cap(amdsmi_processor_handle handle, uint32_t sensor, uint64_t uw)
{
    struct amd_target t;
    amdsmi_status_t result = sensor == 0 ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        uint64_t watts = uw / 1000000u;
        enum sim_status status = sim_limit_power(t.index, watts <= UINT32_MAX / 1000u ? (uint32_t)watts * 1000u : 0);
        result = status == SIM_REFUSED ? AMDSMI_STATUS_INVAL : amd_failure(status);
    }
    return result;
}

SIM_API amdsmi_status_t amdsmi_get_energy_count(amdsmi_processor_handle handle, uint64_t *energy, float *resolution,
                                                uint64_t *timestamp)
{
    struct amd_target t;
    bool good = energy != NULL && resolution != NULL && timestamp != NULL;
    amdsmi_status_t result = good ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
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
    *now = domain == 0 ? sim_clock(gpu) : domain == 4 ? gpu->clock_memory : gpu->clock_video;
    *most = domain == 0 ? gpu->clock_graphics_max : domain == 4 ? gpu->clock_memory_max : gpu->clock_video_max;
    return domain == 0 || domain == 4 || (domain >= 6 && domain <= 9);
}

SIM_API amdsmi_status_t amdsmi_get_clock_info(amdsmi_processor_handle handle, uint32_t domain, amdsmi_clk_info_t *out)
{
    struct amd_target t;
    uint32_t now, most;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
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
    struct amd_target t;
    uint32_t now, most;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
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
    struct amd_target t;
    amdsmi_status_t result = speed != NULL && sensor == 0 ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
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
    struct amd_target t;
    amdsmi_status_t result = out != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        uint64_t why = sim_throttle(&t.gpu);
        memset(out, 0xFF, sizeof *out); /* whatever is not reported */
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
    struct amd_target t;
    amdsmi_status_t result = state != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
    if (result == AMDSMI_STATUS_SUCCESS) {
        *state = t.gpu.ecc_enabled && (block & 0x8F) ? ENABLED : DISABLED;
    }
    return result;
}

static amdsmi_status_t bad_pages(amdsmi_processor_handle handle, uint32_t *count, amdsmi_retired_page_record_t *pages)
{
    enum { RESERVED, PENDING };
    struct amd_target t;
    amdsmi_status_t result = count != NULL ? amd_enter(handle, &t) : AMDSMI_STATUS_INVAL;
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
