/* Simulated NVML: what a GPU is and how it is. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "nvml.h"

#define WHOLE true
#define MIB_BYTES(X) ((unsigned long long)(X) * SIM_MIB)

/* ---- single figures ---- */

NVML_READ(nvmlDeviceGetIndex, 0, unsigned int, WHOLE, nvml_ordinal(t.index))
NVML_READ(nvmlDeviceGetMinorNumber, 0, unsigned int, WHOLE, t.gpu.minor)
NVML_READ(nvmlDeviceGetBoardId, 0, unsigned int, WHOLE, (unsigned int)t.gpu.pci.bus << 8)
NVML_READ(nvmlDeviceGetModuleId, R510, unsigned int, t.gpu.link_count > 0, nvml_ordinal(t.index) + 1)
NVML_READ(nvmlDeviceGetMultiGpuBoard, 0, unsigned int, WHOLE, 0)
NVML_READ(nvmlDeviceGetNumaNodeId, R535, int, t.gpu.numa_node >= 0, t.gpu.numa_node)
NVML_READ(nvmlDeviceGetArchitecture, R450, unsigned int, WHOLE, t.gpu.architecture)
NVML_READ(nvmlDeviceGetNumGpuCores, R470, unsigned int, WHOLE, t.gpu.cores)
NVML_READ(nvmlDeviceGetMemoryBusWidth, R470, unsigned int, WHOLE, t.gpu.bus_width)
NVML_READ(nvmlDeviceGetBusType, R470, unsigned int, WHOLE, 2) /* PCI Express */
NVML_READ(nvmlDeviceGetPowerSource, R470, unsigned int, WHOLE, 0)
NVML_READ(nvmlDeviceGetIrqNum, R470, unsigned int, WHOLE, 64 + t.index)

NVML_READ(nvmlDeviceGetPowerUsage, 0, unsigned int, WHOLE, sim_power(&t.gpu))
NVML_READ(nvmlDeviceGetPowerManagementMode, 0, unsigned int, WHOLE, 1)
NVML_READ(nvmlDeviceGetPowerManagementLimit, 0, unsigned int, sim_limits_power(), t.gpu.power_limit_mw)
NVML_READ(nvmlDeviceGetEnforcedPowerLimit, 0, unsigned int, WHOLE, t.gpu.power_limit_mw)
NVML_READ(nvmlDeviceGetPowerManagementDefaultLimit, 0, unsigned int, sim_limits_power(), t.gpu.power_limit_default_mw)
NVML_READ(nvmlDeviceGetTotalEnergyConsumption, 0, unsigned long long, WHOLE, sim_energy(&t.gpu))
NVML_READ(nvmlDeviceGetPerformanceState, 0, unsigned int, WHOLE, t.gpu.performance_state)
NVML_READ(nvmlDeviceGetPowerState, 0, unsigned int, WHOLE, t.gpu.performance_state)
NVML_READ(nvmlDeviceGetFanSpeed, 0, unsigned int, t.gpu.fan_percent > 0, t.gpu.fan_percent)
NVML_READ(nvmlDeviceGetNumFans, R470, unsigned int, t.gpu.fan_percent > 0, 1)

NVML_READ(nvmlDeviceGetPersistenceMode, 0, unsigned int, WHOLE, t.gpu.persistence)
NVML_READ(nvmlDeviceGetComputeMode, 0, unsigned int, WHOLE, t.gpu.compute_mode)
NVML_READ(nvmlDeviceGetDisplayMode, 0, unsigned int, WHOLE, 0)
NVML_READ(nvmlDeviceGetDisplayActive, 0, unsigned int, WHOLE, 0)
NVML_READ(nvmlDeviceGetBrand, 0, unsigned int, WHOLE, t.gpu.ecc_enabled ? 14u : 5u) /* NVIDIA, GEFORCE */
NVML_READ(nvmlDeviceGetDefaultEccMode, R470, unsigned int, t.gpu.ecc_supported, t.gpu.link_count > 0)

NVML_READ(nvmlDeviceGetCurrPcieLinkGeneration, 0, unsigned int, WHOLE, t.gpu.pcie_generation)
NVML_READ(nvmlDeviceGetMaxPcieLinkGeneration, 0, unsigned int, WHOLE, t.gpu.pcie_generation_max)
NVML_READ(nvmlDeviceGetGpuMaxPcieLinkGeneration, R510, unsigned int, WHOLE, t.gpu.pcie_generation_max)
NVML_READ(nvmlDeviceGetCurrPcieLinkWidth, 0, unsigned int, WHOLE, t.gpu.pcie_width)
NVML_READ(nvmlDeviceGetMaxPcieLinkWidth, 0, unsigned int, WHOLE, t.gpu.pcie_width_max)
NVML_READ(nvmlDeviceGetPcieReplayCounter, 0, unsigned int, WHOLE, t.gpu.pcie_replays)
NVML_READ(nvmlDeviceGetPcieLinkMaxSpeed, R470, unsigned int, WHOLE, t.gpu.pcie_generation_max)
NVML_READ(nvmlDeviceGetPcieSpeed, R470, unsigned int, WHOLE, 1250u << t.gpu.pcie_generation) /* Mb/s a lane */

NVML_READ(nvmlDeviceGetCurrentClocksThrottleReasons, 0, unsigned long long, WHOLE, sim_throttle(&t.gpu))
NVML_READ(nvmlDeviceGetCurrentClocksEventReasons, R535, unsigned long long, WHOLE, sim_throttle(&t.gpu))
NVML_READ(nvmlDeviceGetSupportedClocksThrottleReasons, 0, unsigned long long, WHOLE, 0x1FF)
NVML_READ(nvmlDeviceGetSupportedClocksEventReasons, R535, unsigned long long, WHOLE, 0x1FF)
NVML_READ(nvmlDeviceGetRetiredPagesPendingStatus, 0, unsigned int, t.gpu.ecc_supported && !t.gpu.remap_supported,
          t.gpu.retired_pending)
NVML_READ(nvmlDeviceGetAccountingMode, 0, unsigned int, WHOLE, 0)
NVML_READ(nvmlDeviceGetAccountingBufferSize, 0, unsigned int, WHOLE, 4000)
NVML_READ(nvmlDeviceGetGspFirmwareMode, R510, unsigned int, WHOLE, 1)
NVML_READ(nvmlDeviceGetAdaptiveClockInfoStatus, R470, unsigned int, WHOLE, 1)

/* ---- names and numbers ---- */

SIM_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    struct target t;
    nvmlReturn_t result = nvml_enter(device, 0, &t);
    if (result != NVML_SUCCESS) {
        return result;
    }
    char text[192];
    if (t.instance == SIM_NO_INSTANCE) {
        sim_text(text, sizeof text, t.gpu.name);
    } else {
        snprintf(text, sizeof text, "%s MIG %s", t.gpu.name, t.gpu.profiles[t.gpu.instances[t.instance].profile].name);
    }
    return nvml_copy(name, length, text);
}

SIM_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    struct target t;
    nvmlReturn_t result = nvml_enter(device, 0, &t);
    if (result != NVML_SUCCESS) {
        return result;
    }
    return nvml_copy(uuid, length, t.instance == SIM_NO_INSTANCE ? t.gpu.uuid : t.gpu.instances[t.instance].uuid);
}

#define NVML_TEXT(NAME, SINCE, FIELD)                                                                                  \
    SIM_API nvmlReturn_t NAME(nvmlDevice_t device, char *text, unsigned int length)                                    \
    {                                                                                                                  \
        struct target t;                                                                                               \
        nvmlReturn_t result = nvml_enter_whole(device, SINCE, &t);                                                     \
        if (result == NVML_SUCCESS && t.gpu.FIELD[0] == 0) {                                                           \
            result = NVML_ERROR_NOT_SUPPORTED;                                                                         \
        }                                                                                                              \
        return result != NVML_SUCCESS ? result : nvml_copy(text, length, t.gpu.FIELD);                                 \
    }

NVML_TEXT(nvmlDeviceGetSerial, 0, serial)
NVML_TEXT(nvmlDeviceGetBoardPartNumber, 0, part_number)
NVML_TEXT(nvmlDeviceGetVbiosVersion, 0, vbios)

SIM_API nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
    struct target t;
    struct sim_state head;
    nvmlReturn_t result = nvml_enter_whole(device, R510, &t);
    if (result == NVML_SUCCESS) {
        result = nvml_error(sim_enter(0, &head));
    }
    return result != NVML_SUCCESS ? result : nvml_copy(version, 64, head.drivers[SIM_VENDOR_NVIDIA].version);
}

SIM_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct target t;
    nvmlReturn_t result = pci != NULL ? nvml_enter(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        nvml_pci(&t.gpu.pci, pci);
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
    nvmlPciInfo_t full;
    nvmlReturn_t result = pci != NULL ? nvmlDeviceGetPciInfo_v3(device, &full) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *pci = (nvmlPciInfo_v2_t){.domain = full.domain,
                                  .bus = full.bus,
                                  .device = full.device,
                                  .pciDeviceId = full.pciDeviceId,
                                  .pciSubSystemId = full.pciSubSystemId};
        memcpy(pci->busId, full.busIdLegacy, sizeof pci->busId);
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    struct target t;
    nvmlPciInfo_t full;
    nvmlReturn_t result = pci != NULL ? nvml_enter(device, R535, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) {
        return result;
    }
    if (pci->version != NVML_VERSION(nvmlPciInfoExt_t, 1)) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvml_pci(&t.gpu.pci, &full);
    pci->domain = full.domain;
    pci->bus = full.bus;
    pci->device = full.device;
    pci->pciDeviceId = full.pciDeviceId;
    pci->pciSubSystemId = full.pciSubSystemId;
    pci->baseClass = 3;
    pci->subClass = t.gpu.fan_percent > 0 ? 0 : 2;
    memcpy(pci->busId, full.busId, sizeof pci->busId);
    return NVML_SUCCESS;
}

SIM_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    struct target t;
    nvmlReturn_t result = major != NULL && minor != NULL ? nvml_enter(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *major = (int)t.gpu.capability_major;
        *minor = (int)t.gpu.capability_minor;
    }
    return result;
}

/* ---- memory ---- */

static void memory_of(const struct target *t, nvmlMemory_v2_t *memory)
{
    memory->used = sim_used(t->index, &t->gpu, t->instance);
    unsigned long long capacity = sim_capacity(&t->gpu, t->instance);
    memory->reserved = t->instance == SIM_NO_INSTANCE ? MIB_BYTES(t->gpu.memory_reserved_mib) : 0;
    memory->total = capacity + memory->reserved;
    memory->free = capacity - memory->used;
}

SIM_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct target t;
    nvmlReturn_t result = memory != NULL ? nvml_enter(device, R510, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && memory->version != NVML_VERSION(nvmlMemory_v2_t, 2)) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        memory_of(&t, memory);
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct target t;
    nvmlMemory_v2_t full = {0};
    nvmlReturn_t result = memory != NULL ? nvml_enter(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        memory_of(&t, &full); /* the first version counts what is reserved as used */
        *memory = (nvmlMemory_t){.total = full.total, .free = full.free, .used = full.used + full.reserved};
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    struct target t;
    nvmlReturn_t result = memory != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        unsigned long long total = MIB_BYTES(t.gpu.bar1_mib), used = SIM_MIB;
        *memory = (nvmlBAR1Memory_t){.bar1Total = total, .bar1Free = total - used, .bar1Used = used};
    }
    return result;
}

/* ---- activity ---- */

SIM_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    struct target t;
    nvmlReturn_t result = utilization != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && t.gpu.mig_enabled) {
        result = NVML_ERROR_NOT_SUPPORTED; /* the driver has no such figure in MIG mode */
    }
    if (result == NVML_SUCCESS) {
        *utilization = (nvmlUtilization_t){.gpu = sim_utilisation(t.index, &t.gpu), .memory = t.gpu.utilisation_memory};
    }
    return result;
}

static nvmlReturn_t engine(nvmlDevice_t device, unsigned int *percent, unsigned int *period_us, size_t field)
{
    struct target t;
    nvmlReturn_t result = percent != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        memcpy(percent, (const char *)&t.gpu + field, sizeof *percent);
        if (period_us != NULL) {
            *period_us = 167000;
        }
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned int *percent, unsigned int *period)
{
    return engine(device, percent, period, offsetof(struct sim_gpu, utilisation_encoder));
}

SIM_API nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned int *percent, unsigned int *period)
{
    return engine(device, percent, period, offsetof(struct sim_gpu, utilisation_decoder));
}

SIM_API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *celsius)
{
    struct target t;
    nvmlReturn_t result =
        celsius != NULL && sensor == 0 ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *celsius = (unsigned int)t.gpu.temperature;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    struct target t;
    nvmlReturn_t result = temperature != NULL ? nvml_enter_whole(device, R570, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && temperature->version != NVML_VERSION(nvmlTemperature_t, 1)) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result == NVML_SUCCESS) {
        temperature->temperature = t.gpu.temperature;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned int threshold,
                                                       unsigned int *celsius)
{
    struct target t;
    nvmlReturn_t result = celsius != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) {
        return result;
    }
    int32_t values[] = {t.gpu.temperature_shutdown, t.gpu.temperature_slowdown, t.gpu.temperature_max_memory,
                        t.gpu.temperature_max_operating};
    if (threshold >= sizeof values / sizeof *values || values[threshold] == 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    *celsius = (unsigned int)values[threshold];
    return NVML_SUCCESS;
}

SIM_API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *least,
                                                                  unsigned int *most)
{
    struct target t;
    nvmlReturn_t result = least != NULL && most != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !sim_limits_power()) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS) {
        *least = t.gpu.power_limit_min_mw;
        *most = t.gpu.power_limit_max_mw;
    }
    return result;
}

/* Clocks in the order of nvmlClockType_t: graphics, SM, memory, video. */
static nvmlReturn_t clock_of(nvmlDevice_t device, unsigned int kind, bool most, unsigned int *mhz)
{
    struct target t;
    nvmlReturn_t result = mhz != NULL && kind < 4 ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        const struct sim_gpu *g = &t.gpu;
        unsigned clock = sim_clock(g), now[] = {clock, clock, g->clock_memory, g->clock_video};
        unsigned top[] = {g->clock_graphics_max, g->clock_graphics_max, g->clock_memory_max, g->clock_video_max};
        *mhz = most ? top[kind] : now[kind];
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int kind, unsigned int *mhz)
{
    return clock_of(device, kind, false, mhz);
}

SIM_API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned int kind, unsigned int *mhz)
{
    return clock_of(device, kind, true, mhz);
}

SIM_API nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, unsigned int kind, unsigned int *mhz)
{
    return clock_of(device, kind, true, mhz);
}

SIM_API nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, unsigned int kind, unsigned int *mhz)
{
    return clock_of(device, kind, true, mhz);
}

SIM_API nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned int kind, unsigned int which, unsigned int *mhz)
{
    return clock_of(device, kind, which != 0, mhz); /* 0: current */
}

SIM_API nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned int counter, unsigned int *kb)
{
    struct target t;
    nvmlReturn_t result = kb != NULL && counter < 2 ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *kb = counter == 0 ? t.gpu.pcie_tx_kb : t.gpu.pcie_rx_kb;
    }
    return result;
}

/* ---- errors ---- */

SIM_API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    struct target t;
    nvmlReturn_t result =
        current != NULL && pending != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !t.gpu.ecc_supported) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS) {
        *current = t.gpu.ecc_enabled;
        *pending = t.gpu.ecc_pending;
    }
    return result;
}

static nvmlReturn_t ecc_count(nvmlDevice_t device, unsigned int kind, unsigned int counter, unsigned long long *count)
{
    struct target t;
    nvmlReturn_t result =
        count != NULL && kind < 2 && counter < 2 ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !(t.gpu.ecc_supported && t.gpu.ecc_enabled)) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS) { /* kind: 0 corrected, 1 uncorrected; counter: 0 since boot, 1 over life */
        const uint64_t counts[2][2] = {{t.gpu.ecc_corrected, t.gpu.ecc_corrected_total},
                                       {t.gpu.ecc_uncorrected, t.gpu.ecc_uncorrected_total}};
        *count = counts[kind][counter];
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int kind, unsigned int counter,
                                                 unsigned long long *count)
{
    return ecc_count(device, kind, counter, count);
}

SIM_API nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, unsigned int kind, unsigned int counter,
                                                    nvmlEccErrorCounts_t *counts)
{
    unsigned long long count;
    nvmlReturn_t result = counts != NULL ? ecc_count(device, kind, counter, &count) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *counts = (nvmlEccErrorCounts_t){.deviceMemory = count};
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned int kind, unsigned int counter,
                                                     unsigned int location, unsigned long long *count)
{
    nvmlReturn_t result = ecc_count(device, kind, counter, count);
    if (result == NVML_SUCCESS && location != 2 && location != 7) { /* device memory, DRAM */
        *count = 0;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                               unsigned int *pending, unsigned int *failed)
{
    struct target t;
    bool good = corrected != NULL && uncorrected != NULL && pending != NULL && failed != NULL;
    nvmlReturn_t result = good ? nvml_enter_whole(device, R450, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !t.gpu.remap_supported) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS) {
        *corrected = t.gpu.remapped_correctable;
        *uncorrected = t.gpu.remapped_uncorrectable;
        *pending = t.gpu.remap_pending;
        *failed = t.gpu.remap_failed;
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *values)
{
    struct target t;
    nvmlReturn_t result = values != NULL ? nvml_enter_whole(device, R450, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && !t.gpu.remap_supported) {
        result = NVML_ERROR_NOT_SUPPORTED;
    }
    if (result == NVML_SUCCESS) {
        unsigned int banks = t.gpu.bus_width / 2, none = t.gpu.remap_failed ? 1u : 0u;
        *values = (nvmlRowRemapperHistogramValues_t){.max = banks - none, .none = none};
    }
    return result;
}

/* Retired pages by cause: 0 several single-bit errors, 1 a double-bit error. Addresses are made up. */
static nvmlReturn_t retired(nvmlDevice_t device, unsigned int cause, unsigned int *count, unsigned long long *pages,
                            unsigned long long *times)
{
    struct target t;
    nvmlReturn_t result = count != NULL && cause < 2 ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) {
        return result;
    }
    if (!t.gpu.ecc_supported || t.gpu.remap_supported) {
        return NVML_ERROR_NOT_SUPPORTED; /* rows are remapped instead */
    }
    unsigned int total = cause == 0 ? t.gpu.retired_single : t.gpu.retired_double, room = *count;
    *count = total;
    if (total > 0 && (pages == NULL || room < total)) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    for (unsigned int i = 0; i < total; i++) {
        pages[i] = 0x10000ull * (i + 1) + cause;
        if (times != NULL) {
            times[i] = t.gpu.energy_since_ns / 1000;
        }
    }
    return NVML_SUCCESS;
}

SIM_API nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned int cause, unsigned int *count,
                                               unsigned long long *pages)
{
    return retired(device, cause, count, pages, NULL);
}

SIM_API nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, unsigned int cause, unsigned int *count,
                                                  unsigned long long *pages, unsigned long long *times)
{
    return retired(device, cause, count, pages, times);
}

/* ---- field values ---- */

enum { FIELD_UINT = 1, FIELD_ULONGLONG = 3 };

/* One field of nvmlDeviceGetFieldValues; false: not supported. */
static bool field(const struct target *t, unsigned int id, unsigned int scope, unsigned long long *value)
{
    const struct sim_gpu *g = &t->gpu;
    bool link = scope < g->link_count;
    unsigned long long crc = 0, replay = 0, recovery = 0;
    unsigned long long tx = 0, rx = 0;
    for (unsigned i = 0; i < g->link_count; i++) {
        tx += scope == UINT32_MAX || scope == i ? g->links[i].tx_kib : 0;
        rx += scope == UINT32_MAX || scope == i ? g->links[i].rx_kib : 0;
        crc += g->links[i].crc_errors;
        replay += g->links[i].replay_errors;
        recovery += g->links[i].recovery_errors;
    }
    const struct {
        unsigned int id;
        bool supported;
        unsigned long long value;
    } fields[] = {
        {1, g->ecc_supported, g->ecc_enabled},
        {2, g->ecc_supported, g->ecc_pending},
        {3, g->ecc_enabled, g->ecc_corrected},
        {4, g->ecc_enabled, g->ecc_uncorrected},
        {5, g->ecc_enabled, g->ecc_corrected_total},
        {6, g->ecc_enabled, g->ecc_uncorrected_total},
        {11, g->ecc_enabled, g->ecc_corrected},
        {12, g->ecc_enabled, g->ecc_uncorrected},
        {22, g->ecc_enabled, g->ecc_corrected_total},
        {23, g->ecc_enabled, g->ecc_uncorrected_total},
        {29, g->ecc_supported && !g->remap_supported, g->retired_single},
        {30, g->ecc_supported && !g->remap_supported, g->retired_double},
        {31, g->ecc_supported && !g->remap_supported, g->retired_pending},
        {38, g->link_count > 0, 0},
        {45, g->link_count > 0, crc},
        {52, g->link_count > 0, replay},
        {59, g->link_count > 0, recovery},
        {82, g->temperature_memory > 0, (unsigned long long)g->temperature_memory},
        {83, true, sim_energy(g)},
        {90, g->link_count > 0, g->links[0].speed_mbit / 8},
        {91, true, g->link_count},
        {94, true, g->pcie_replays},
        {95, true, 0},
        {138, g->link_count > 0, tx}, /* KiB of data; scope UINT32_MAX: all links */
        {139, g->link_count > 0, rx},
        {142, g->remap_supported, g->remapped_correctable},
        {143, g->remap_supported, g->remapped_uncorrectable},
        {144, g->remap_supported, g->remap_pending},
        {145, g->remap_supported, g->remap_failed},
        {146, link, link ? g->links[scope].remote_link : 0},
        {161, link, link ? g->links[scope].replay_errors : 0},
        {162, link, link ? g->links[scope].recovery_errors : 0},
        {163, link, link ? g->links[scope].crc_errors : 0},
        {164, link, link ? g->links[scope].speed_mbit / 8 : 0},
        {165, link, link ? g->links[scope].up : 0},
        {166, link, link ? g->links[scope].version : 0},
        {185, true, sim_power(g)},
        {186, true, sim_power(g)},
        {187, true, g->power_limit_min_mw},
        {188, true, g->power_limit_max_mw},
        {189, true, g->power_limit_default_mw},
        {190, true, g->power_limit_mw},
        {191, true, sim_energy(g)},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].id == id) {
            *value = fields[i].value;
            return fields[i].supported;
        }
    }
    return false;
}

SIM_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    struct target t;
    nvmlReturn_t result = values != NULL && count > 0 ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) {
        return result;
    }
    for (int i = 0; i < count; i++) {
        unsigned long long value = 0;
        bool supported = field(&t, values[i].fieldId, values[i].scopeId, &value);
        bool is_long = value > UINT32_MAX || (values[i].fieldId >= 3 && values[i].fieldId <= 28) ||
                       values[i].fieldId == 83 || values[i].fieldId == 191;
        values[i].timestamp = (long long)(sim_now_ns() / 1000);
        values[i].latencyUsec = 0;
        values[i].valueType = is_long ? FIELD_ULONGLONG : FIELD_UINT;
        values[i].nvmlReturn = supported ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
        values[i].value.ullVal = value;
    }
    return NVML_SUCCESS;
}

/* ---- processes ---- */

enum { COMPUTE, GRAPHICS, MPS };
enum { MAX_LISTED = 512 }; /* processes of one GPU that are reported */

static unsigned processes_of(const struct target *t, unsigned mode, nvmlProcessDetail_t *list, unsigned room)
{
    struct sim_use uses[MAX_LISTED];
    unsigned all = sim_uses(t->index, &t->gpu, t->instance, uses, MAX_LISTED), count = 0;
    for (unsigned i = 0; i < all && i < MAX_LISTED && mode != MPS; i++) {
        if (uses[i].graphics != (mode == GRAPHICS)) {
            continue;
        }
        if (count < room) {
            bool part = uses[i].instance != SIM_NO_INSTANCE && uses[i].instance < SIM_MAX_INSTANCES;
            const struct sim_instance *instance = part ? &t->gpu.instances[uses[i].instance] : NULL;
            list[count] = (nvmlProcessDetail_t){
                .pid = uses[i].pid,
                .usedGpuMemory = uses[i].bytes,
                .gpuInstanceId = part ? instance->gpu_instance : NVML_NO_VALUE,
                .computeInstanceId = part ? instance->compute_instance : NVML_NO_VALUE,
            };
        }
        count++;
    }
    return count;
}

static nvmlReturn_t processes(nvmlDevice_t device, uint32_t since, unsigned mode, bool first_version,
                              unsigned int *count, void *out)
{
    struct target t;
    nvmlReturn_t result = count != NULL ? nvml_enter(device, since, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS) {
        return result;
    }
    nvmlProcessDetail_t list[MAX_LISTED];
    unsigned found = processes_of(&t, mode, list, MAX_LISTED), room = *count;
    *count = found;
    if (found > 0 && (out == NULL || room < found)) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    for (unsigned i = 0; i < found; i++) {
        if (first_version) {
            ((nvmlProcessInfo_v1_t *)out)[i] =
                (nvmlProcessInfo_v1_t){.pid = list[i].pid, .usedGpuMemory = list[i].usedGpuMemory};
        } else {
            ((nvmlProcessInfo_t *)out)[i] = (nvmlProcessInfo_t){.pid = list[i].pid,
                                                                .usedGpuMemory = list[i].usedGpuMemory,
                                                                .gpuInstanceId = list[i].gpuInstanceId,
                                                                .computeInstanceId = list[i].computeInstanceId};
        }
    }
    return NVML_SUCCESS;
}

#define NVML_PROCESSES(NAME, SINCE, MODE, FIRST)                                                                       \
    SIM_API nvmlReturn_t NAME(nvmlDevice_t device, unsigned int *count, void *out)                                     \
    {                                                                                                                  \
        return processes(device, SINCE, MODE, FIRST, count, out);                                                      \
    }

NVML_PROCESSES(nvmlDeviceGetComputeRunningProcesses, 0, COMPUTE, true)
NVML_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, R450, COMPUTE, false)
NVML_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, R510, COMPUTE, false)
NVML_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, 0, GRAPHICS, true)
NVML_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, R450, GRAPHICS, false)
NVML_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, R510, GRAPHICS, false)
NVML_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, R450, MPS, true)
NVML_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, R450, MPS, false)
NVML_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, R510, MPS, false)

SIM_API nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *list)
{
    struct target t;
    nvmlReturn_t result = list != NULL ? nvml_enter(device, R535, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && list->version != NVML_VERSION(nvmlProcessDetailList_t, 1)) {
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (result != NVML_SUCCESS) {
        return result;
    }
    unsigned room = list->procArray != NULL ? list->numProcArrayEntries : 0;
    list->numProcArrayEntries = processes_of(&t, list->mode, list->procArray, room);
    return list->numProcArrayEntries > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* Since a time in us; without any process that reports its load, the GPU's utilisation, shared evenly. */
SIM_API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                     unsigned int *count, unsigned long long since)
{
    struct target t;
    nvmlReturn_t result = count != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && t.gpu.mig_enabled) {
        result = NVML_ERROR_NOT_SUPPORTED; /* the driver has no such figure in MIG mode */
    }
    if (result != NVML_SUCCESS) {
        return result;
    }
    struct sim_use uses[MAX_LISTED];
    unsigned found = sim_uses(t.index, &t.gpu, t.instance, uses, MAX_LISTED), room = *count;
    found = found < MAX_LISTED ? found : MAX_LISTED;
    bool loads = false;
    for (unsigned i = 0; i < found; i++) {
        loads = loads || uses[i].loads;
    }
    *count = found;
    if (found == 0) {
        return NVML_ERROR_NOT_FOUND;
    }
    if (samples == NULL || room < found) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    for (unsigned i = 0; i < found; i++) {
        samples[i] = (nvmlProcessUtilizationSample_t){
            .pid = uses[i].pid,
            .timeStamp = sim_now_ns() / 1000,
            .smUtil = loads ? (sim_average(&uses[i], since * 1000) + 5) / 10 : t.gpu.utilisation / found,
            .memUtil = t.gpu.utilisation_memory / found,
        };
    }
    return NVML_SUCCESS;
}

SIM_API nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
    struct target t;
    (void)pids;
    nvmlReturn_t result = count != NULL ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *count = 0; /* accounting mode is off */
    }
    return result;
}

SIM_API nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, unsigned int policy, nvmlViolationTime_t *time)
{
    struct target t;
    nvmlReturn_t result = time != NULL && policy < 11 ? nvml_enter_whole(device, 0, &t) : NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS) {
        *time = (nvmlViolationTime_t){.referenceTime = t.gpu.energy_since_ns};
    }
    return result;
}
