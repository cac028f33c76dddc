/* Simulated Level Zero: the system management part (zes*), and as much of the core (ze*) as it needs. The structures
 * are declared from the public specification; each begins with its type number and a chain pointer. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"
#include "ze_sim.h"

typedef struct ze_handle *handle_t;
typedef uint8_t ze_bool;

typedef enum {
    ZE_SUCCESS = 0,
    ZE_DEVICE_LOST = 0x70000001,
    ZE_OUT_OF_DEVICE_MEMORY = 0x70000003,
    ZE_DEPENDENCY_UNAVAILABLE = 0x70020000,
    ZE_UNINITIALIZED = 0x78000001,
    ZE_UNSUPPORTED_FEATURE = 0x78000003,
    ZE_INVALID_ARGUMENT = 0x78000004,
    ZE_INVALID_NULL_HANDLE = 0x78000005,
    ZE_INVALID_NULL_POINTER = 0x78000007,
    ZE_UNKNOWN = 0x7ffffffe
} ze_result_t;

#define HEAD                                                                                                           \
    uint32_t stype;                                                                                                    \
    void *pNext

struct chain {
    HEAD;
};

enum { TYPE_GPU = 1, SUBDEVICE_ID = 0, IP_VERSION_EXT = 0x1000f };

typedef struct {
    HEAD;
    uint32_t type, vendorId, deviceId, flags, subdeviceId, coreClockRate;
    uint64_t maxMemAllocSize;
    uint32_t maxHardwareContexts, maxCommandQueuePriority, numThreadsPerEU, physicalEUSimdWidth, numEUsPerSubslice,
        numSubslicesPerSlice, numSlices;
    uint64_t timerResolution;
    uint32_t timestampValidBits, kernelTimestampValidBits;
    uint8_t uuid[16];
    char name[256];
} ze_device_properties_t;

typedef struct {
    HEAD;
    uint32_t ipVersion;
} ze_device_ip_version_ext_t;

typedef struct {
    HEAD;
    uint8_t uuid[16];
    uint32_t driverVersion;
} ze_driver_properties_t;

typedef struct {
    HEAD;
    ze_device_properties_t core;
    uint32_t numSubdevices;
    char serialNumber[64], boardNumber[64], brandName[64], modelName[64], vendorName[64], driverVersion[64];
} zes_device_properties_t;

typedef struct {
    HEAD;
    uint32_t reset, repaired;
} zes_device_state_t;

typedef struct {
    int32_t gen, width;
    int64_t maxBandwidth; /* bytes/s */
} zes_pci_speed_t;

typedef struct {
    HEAD;
    struct {
        uint32_t domain, bus, device, function;
    } address;
    zes_pci_speed_t maxSpeed;
    ze_bool haveBandwidthCounters, havePacketCounters, haveReplayCounters;
} zes_pci_properties_t;

typedef struct {
    HEAD;
    uint32_t status, qualityIssues, stabilityIssues;
    zes_pci_speed_t speed;
} zes_pci_state_t;

typedef struct {
    uint64_t timestamp, replayCounter, packetCounter, rxCounter, txCounter;
    zes_pci_speed_t speed;
} zes_pci_stats_t;

typedef struct {
    HEAD;
    uint32_t type;
    ze_bool onSubdevice;
    uint32_t subdeviceId, location;
    uint64_t physicalSize;
    int32_t busWidth, numChannels;
} zes_mem_properties_t;

typedef struct {
    HEAD;
    uint32_t health;
    uint64_t free, size;
} zes_mem_state_t;

typedef struct { /* engines and RAS error sets */
    HEAD;
    uint32_t type;
    ze_bool onSubdevice;
    uint32_t subdeviceId;
} zes_part_properties_t;

typedef struct {
    uint64_t activeTime, timestamp; /* us */
} zes_engine_stats_t;

typedef struct {
    HEAD;
    uint32_t type;
    ze_bool onSubdevice;
    uint32_t subdeviceId;
    double maxTemperature;
    ze_bool isCriticalTempSupported, isThreshold1Supported, isThreshold2Supported;
} zes_temp_properties_t;

typedef struct {
    HEAD;
    ze_bool onSubdevice;
    uint32_t subdeviceId;
    ze_bool canControl, isEnergyThresholdSupported;
    int32_t defaultLimit, minLimit, maxLimit; /* mW */
} zes_power_properties_t;

typedef struct {
    uint64_t energy, timestamp; /* uJ, us */
} zes_power_energy_counter_t;

typedef struct {
    ze_bool enabled;
    int32_t power, interval;
} zes_power_sustained_limit_t;

typedef struct {
    ze_bool enabled;
    int32_t power;
} zes_power_burst_limit_t;

typedef struct {
    int32_t powerAC, powerDC;
} zes_power_peak_limit_t;

typedef struct {
    HEAD;
    uint32_t level, source, limitUnit; /* 1 sustained, 3 peak; 0 any; 2 mW */
    ze_bool enabledStateLocked, enabled, intervalValueLocked;
    int32_t interval;
    ze_bool limitValueLocked;
    int32_t limit;
} zes_power_limit_ext_desc_t;

typedef struct {
    HEAD;
    uint32_t type;
    ze_bool onSubdevice;
    uint32_t subdeviceId;
    ze_bool canControl, isThrottleEventSupported;
    double min, max;
} zes_freq_properties_t;

typedef struct {
    HEAD;
    double currentVoltage, request, tdp, efficient, actual;
    uint32_t throttleReasons;
} zes_freq_state_t;

typedef struct {
    uint32_t fabricId, attachId;
    uint8_t portNumber;
} zes_fabric_port_id_t;

typedef struct {
    int64_t bitRate;
    int32_t width;
} zes_fabric_port_speed_t;

typedef struct {
    HEAD;
    char model[256];
    ze_bool onSubdevice;
    uint32_t subdeviceId;
    zes_fabric_port_id_t portId;
    zes_fabric_port_speed_t maxRxSpeed, maxTxSpeed;
} zes_fabric_port_properties_t;

typedef struct {
    HEAD;
    uint32_t status, qualityIssues, failureReasons;
    zes_fabric_port_id_t remotePortId;
    zes_fabric_port_speed_t rxSpeed, txSpeed;
} zes_fabric_port_state_t;

typedef struct {
    uint64_t timestamp, rxCounter, txCounter;
} zes_fabric_port_throughput_t;

typedef struct {
    HEAD;
    uint64_t linkFailureCount, fwCommErrorCount, fwErrorCount, linkDegradeCount;
} zes_fabric_port_error_counters_t;

typedef struct {
    char desc[256];
} zes_fabric_link_type_t;

typedef struct {
    HEAD;
    uint32_t processId;
    uint64_t memSize, sharedSize;
    uint32_t engines;
} zes_process_state_t;

typedef struct {
    HEAD;
    uint64_t category[7];
} zes_ras_state_t;

typedef struct {
    HEAD;
    uint32_t currentState, pendingState, pendingAction; /* 1 enabled, 2 disabled */
} zes_device_ecc_properties_t;

typedef struct {
    HEAD;
    ze_bool onSubdevice;
    uint32_t subdeviceId;
    ze_bool canControl;
    char name[64], version[64];
} zes_firmware_properties_t;

/* ---- handles: addresses within these tables ---- */

enum part { MEMORY, ENGINE, TEMPERATURE, POWER, FREQUENCY, FABRIC, RAS, FIRMWARE, PARTS };
enum { MAX_PARTS = 32 };

static char driver_handle;
static char device_handles[SIM_MAX_GPUS];
static char part_handles[PARTS][SIM_MAX_GPUS][MAX_PARTS];

struct target {
    struct sim_gpu gpu;
    unsigned index;
    unsigned part; /* which of its kind */
};

static ze_result_t failure(enum sim_status status)
{
    switch (status) {
    case SIM_OK:
        return ZE_SUCCESS;
    case SIM_NOT_LOADED:
    case SIM_CLOSED:
        return ZE_UNINITIALIZED;
    case SIM_CORRUPT:
        return ZE_DEPENDENCY_UNAVAILABLE;
    case SIM_OLD_DRIVER:
        return ZE_UNSUPPORTED_FEATURE;
    case SIM_NO_DEVICE:
        return ZE_INVALID_NULL_HANDLE;
    case SIM_LOST:
        return ZE_DEVICE_LOST;
    case SIM_NO_MEMORY:
        return ZE_OUT_OF_DEVICE_MEMORY;
    case SIM_IO:
    case SIM_DENIED:
    case SIM_BUSY:
    case SIM_REFUSED:
        break;
    }
    return ZE_UNKNOWN;
}

static unsigned count_parts(const struct sim_gpu *gpu, enum part kind)
{
    switch (kind) {
    case MEMORY:
    case FREQUENCY:
        return gpu->tiles;
    case TEMPERATURE: /* the chip, and the memory where it reports one */
        return 1u + (gpu->temperature_memory > 0);
    case ENGINE: /* all, compute, copy */
        return 3;
    case RAS: /* corrected, uncorrected */
        return gpu->ecc_supported ? 2 : 0;
    case FABRIC:
        return gpu->link_count;
    case POWER:
    case FIRMWARE:
    case PARTS:
        break;
    }
    return 1;
}

static ze_result_t enter(handle_t device, struct target *t)
{
    uintptr_t index = (uintptr_t)device - (uintptr_t)device_handles;
    if (index >= sizeof device_handles) {
        return ZE_INVALID_NULL_HANDLE;
    }
    t->index = (unsigned)index;
    return failure(sim_gpu(0, t->index, &t->gpu));
}

static ze_result_t enter_part(handle_t handle, enum part kind, struct target *t)
{
    uintptr_t place = (uintptr_t)handle - (uintptr_t)part_handles[kind];
    if (place >= sizeof part_handles[kind]) {
        return ZE_INVALID_NULL_HANDLE;
    }
    t->index = (unsigned)(place / MAX_PARTS);
    t->part = (unsigned)(place % MAX_PARTS);
    ze_result_t result = failure(sim_gpu(0, t->index, &t->gpu));
    return result == ZE_SUCCESS && t->part >= count_parts(&t->gpu, kind) ? ZE_INVALID_NULL_HANDLE : result;
}

/* The interface's habit for lists: 0 asks how many, more is cut to what there is. */
static ze_result_t list(uint32_t *count, handle_t *out, char *first, size_t step, uint32_t found)
{
    if (count == NULL) {
        return ZE_INVALID_NULL_POINTER;
    }
    uint32_t room = *count;
    *count = room == 0 || room > found ? found : room;
    for (uint32_t i = 0; out != NULL && i < *count && i < room; i++) {
        out[i] = (handle_t)(void *)(first + i * step);
    }
    return ZE_SUCCESS;
}

#define DEFINE(NAME, ...) SIM_API ze_result_t NAME(__VA_ARGS__)

/* A function `NAME(device, TYPE *out)`; the body fills `out` from target `t`. */
#define OF_DEVICE(NAME, TYPE, SUPPORTED, ...)                                                                          \
    DEFINE(NAME, handle_t device, TYPE *out)                                                                           \
    {                                                                                                                  \
        struct target t;                                                                                               \
        ze_result_t result = out != NULL ? enter(device, &t) : ZE_INVALID_NULL_POINTER;                                \
        if (result == ZE_SUCCESS && !(SUPPORTED)) {                                                                    \
            result = ZE_UNSUPPORTED_FEATURE;                                                                           \
        }                                                                                                              \
        if (result == ZE_SUCCESS) {                                                                                    \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
        return result;                                                                                                 \
    }

/* The same of one part of a device. */
#define OF_PART(NAME, KIND, TYPE, ...)                                                                                 \
    DEFINE(NAME, handle_t handle, TYPE *out)                                                                           \
    {                                                                                                                  \
        struct target t;                                                                                               \
        ze_result_t result = out != NULL ? enter_part(handle, KIND, &t) : ZE_INVALID_NULL_POINTER;                     \
        if (result == ZE_SUCCESS) {                                                                                    \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
        return result;                                                                                                 \
    }

#define ENUMERATE(NAME, KIND)                                                                                          \
    DEFINE(NAME, handle_t device, uint32_t *count, handle_t *out)                                                      \
    {                                                                                                                  \
        struct target t;                                                                                               \
        ze_result_t result = enter(device, &t);                                                                        \
        return result != ZE_SUCCESS ? result                                                                           \
                                    : list(count, out, part_handles[KIND][t.index], 1, count_parts(&t.gpu, KIND));     \
    }

static uint64_t now_us(void)
{
    return sim_now_ns() / 1000;
}

/* ---- start, drivers, devices ---- */

DEFINE(zesInit, uint32_t flags)
{
    (void)flags;
    return failure(sim_open(SIM_VENDOR_INTEL));
}

DEFINE(zeInit, uint32_t flags)
{
    (void)flags;
    return failure(sim_open(SIM_VENDOR_INTEL));
}

static ze_result_t drivers(uint32_t *count, handle_t *out)
{
    ze_result_t result = failure(sim_enter(0, NULL));
    uint8_t visible[SIM_MAX_GPUS];
    return result != ZE_SUCCESS ? result : list(count, out, &driver_handle, 0, sim_visible(visible) > 0 ? 1 : 0);
}

DEFINE(zesDriverGet, uint32_t *count, handle_t *out)
{
    return drivers(count, out);
}

DEFINE(zeDriverGet, uint32_t *count, handle_t *out)
{
    return drivers(count, out);
}

DEFINE(zeInitDrivers, uint32_t *count, handle_t *out, void *how)
{
    ze_result_t result = how != NULL ? failure(sim_open(SIM_VENDOR_INTEL)) : ZE_INVALID_NULL_POINTER;
    return result == ZE_SUCCESS ? drivers(count, out) : result;
}

/* ZE_AFFINITY_MASK of the core part: ordinals, a tile as in 0.1 counts for its device. */
static bool masked_out(uint32_t ordinal)
{
    const char *mask = getenv("ZE_AFFINITY_MASK");
    bool chosen = mask == NULL || mask[0] == 0;
    for (const char *word = mask; !chosen && word != NULL; word = strchr(word, ',')) {
        word += *word == ',';
        char *end;
        unsigned long number = strtoul(word, &end, 10);
        chosen = end != word && number == ordinal;
    }
    return !chosen;
}

static ze_result_t devices(handle_t driver, uint32_t *count, handle_t *out, bool core)
{
    ze_result_t result = failure(sim_enter(0, NULL));
    if (result != ZE_SUCCESS || driver != (handle_t)(void *)&driver_handle || count == NULL) {
        return result != ZE_SUCCESS ? result : count == NULL ? ZE_INVALID_NULL_POINTER : ZE_INVALID_NULL_HANDLE;
    }
    uint8_t visible[SIM_MAX_GPUS];
    uint32_t all = sim_visible(visible), found = 0, room = *count;
    for (uint32_t i = 0; i < all; i++) {
        if (core && masked_out(i)) {
            continue;
        }
        if (out != NULL && found < room) {
            out[found] = (handle_t)(void *)&device_handles[visible[i]];
        }
        found++;
    }
    *count = room == 0 || room > found ? found : room;
    return ZE_SUCCESS;
}

DEFINE(zesDeviceGet, handle_t driver, uint32_t *count, handle_t *out)
{
    return devices(driver, count, out, false);
}

DEFINE(zeDeviceGet, handle_t driver, uint32_t *count, handle_t *out)
{
    return devices(driver, count, out, true);
}

DEFINE(zeDriverGetApiVersion, handle_t driver, uint32_t *version)
{
    if (version == NULL || driver == NULL) {
        return version == NULL ? ZE_INVALID_NULL_POINTER : ZE_INVALID_NULL_HANDLE;
    }
    *version = 1u << 16 | 6u;
    return failure(sim_enter(0, NULL));
}

DEFINE(zeDriverGetProperties, handle_t driver, ze_driver_properties_t *out)
{
    struct sim_state head;
    if (out == NULL || driver == NULL) {
        return out == NULL ? ZE_INVALID_NULL_POINTER : ZE_INVALID_NULL_HANDLE;
    }
    ze_result_t result = failure(sim_enter(0, &head));
    if (result == ZE_SUCCESS) {
        out->driverVersion = 1u << 24 | 3u << 16 | (head.drivers[SIM_VENDOR_INTEL].generation & 0xFFFF);
        memset(out->uuid, 0x5A, sizeof out->uuid);
    }
    return result;
}

/* The identifier's bytes: its text, as the vendor's tools print it, from the end. */
static void uuid_bytes(const char *text, uint8_t *bytes)
{
    unsigned place = 16;
    for (const char *c = text; *c != 0 && place > 0; c++) {
        if (*c == '-') {
            continue;
        }
        char pair[3] = {c[0], c[1], 0};
        bytes[--place] = (uint8_t)strtoul(pair, NULL, 16);
        c += c[1] != 0;
    }
}

static void core_properties(const struct sim_gpu *gpu, ze_device_properties_t *out)
{
    out->type = TYPE_GPU;
    out->vendorId = gpu->pci.vendor_id;
    out->deviceId = gpu->pci.device_id;
    out->flags = gpu->ecc_enabled ? 1u << 2 : 0; /* ECC */
    out->subdeviceId = SUBDEVICE_ID;
    out->coreClockRate = gpu->clock_graphics_max;
    out->maxMemAllocSize = sim_capacity(gpu, SIM_NO_INSTANCE);
    out->numThreadsPerEU = 8;
    out->physicalEUSimdWidth = 16;
    out->numEUsPerSubslice = gpu->multiprocessors > 0 ? gpu->cores / gpu->multiprocessors : 0;
    out->numSubslicesPerSlice = gpu->multiprocessors / gpu->tiles;
    out->numSlices = gpu->tiles;
    out->timerResolution = out->stype == ZE_TYPE_DEVICE_1_2 ? 1000000000 : 1; /* cycles a second, or ns of a cycle */
    out->timestampValidBits = 32;
    out->kernelTimestampValidBits = 32;
    uuid_bytes(gpu->uuid, out->uuid);
    sim_text(out->name, sizeof out->name, gpu->name);
}

OF_DEVICE(zeDeviceGetProperties, ze_device_properties_t, true, {
    core_properties(&t.gpu, out);
    for (struct chain *next = out->pNext; next != NULL; next = next->pNext) {
        if (next->stype == IP_VERSION_EXT) { /* major, minor, revision as in 12.60.7 */
            ((ze_device_ip_version_ext_t *)(void *)next)->ipVersion =
                t.gpu.capability_major << 22 | t.gpu.capability_minor << 14;
        }
    }
})

DEFINE(zeDeviceGetMemoryProperties, handle_t device, uint32_t *count, struct ze_memory *out)
{
    struct target t;
    ze_result_t result = count != NULL ? enter(device, &t) : ZE_INVALID_NULL_POINTER;
    if (result == ZE_SUCCESS && out != NULL && *count > 0) {
        out->flags = 0;
        out->bytes = sim_capacity(&t.gpu, SIM_NO_INSTANCE);
        sim_text(out->name, sizeof out->name, "HBM");
    }
    if (result == ZE_SUCCESS) {
        *count = 1;
    }
    return result;
}

DEFINE(zeDeviceGetRootDevice, handle_t device, handle_t *root)
{
    struct target t;
    ze_result_t result = root != NULL ? enter(device, &t) : ZE_INVALID_NULL_POINTER;
    if (result == ZE_SUCCESS) {
        *root = NULL; /* it is one itself */
    }
    return result;
}

bool ze_sim_device(ze_handle device, unsigned *index)
{
    uintptr_t place = (uintptr_t)device - (uintptr_t)device_handles;
    *index = (unsigned)place;
    return place < sizeof device_handles;
}

OF_DEVICE(zesDeviceGetProperties, zes_device_properties_t, true, {
    struct sim_state head;
    result = failure(sim_enter(0, &head));
    if (result != ZE_SUCCESS) {
        return result;
    }
    core_properties(&t.gpu, &out->core);
    out->numSubdevices = t.gpu.tiles > 1 ? t.gpu.tiles : 0;
    sim_text(out->serialNumber, sizeof out->serialNumber, t.gpu.serial);
    sim_text(out->boardNumber, sizeof out->boardNumber, t.gpu.part_number[0] != 0 ? t.gpu.part_number : "unknown");
    sim_text(out->brandName, sizeof out->brandName, "unknown");
    sim_text(out->modelName, sizeof out->modelName, t.gpu.name);
    sim_text(out->vendorName, sizeof out->vendorName, "Intel(R) Corporation");
    sim_text(out->driverVersion, sizeof out->driverVersion, head.drivers[SIM_VENDOR_INTEL].version);
})

OF_DEVICE(zesDeviceGetState, zes_device_state_t, true, {
    out->reset = 0;
    out->repaired = 0;
})

/* ---- PCI ---- */

static zes_pci_speed_t pci_speed(uint32_t generation, uint32_t width)
{
    /* bytes/s: 250 MB/s a lane in the first generation; from the third on, 985 MB/s, doubling */
    int64_t lane = generation < 3 ? 250000000ll * generation : 985000000ll << (generation - 3);
    return (zes_pci_speed_t){
        .gen = (int32_t)generation, .width = (int32_t)width, .maxBandwidth = lane * (int64_t)width};
}

OF_DEVICE(zesDevicePciGetProperties, zes_pci_properties_t, true, {
    out->address.domain = t.gpu.pci.domain;
    out->address.bus = t.gpu.pci.bus;
    out->address.device = t.gpu.pci.device;
    out->address.function = t.gpu.pci.function;
    out->maxSpeed = pci_speed(t.gpu.pcie_generation_max, t.gpu.pcie_width_max);
    out->haveBandwidthCounters = 0;
    out->havePacketCounters = 0;
    out->haveReplayCounters = 1;
})

OF_DEVICE(zesDevicePciGetState, zes_pci_state_t, true, {
    bool slow = t.gpu.pcie_generation < t.gpu.pcie_generation_max || t.gpu.pcie_width < t.gpu.pcie_width_max;
    out->status = slow ? 2 : 1; /* quality issues, good */
    out->qualityIssues = slow ? 2 : 0;
    out->stabilityIssues = 0;
    out->speed = pci_speed(t.gpu.pcie_generation, t.gpu.pcie_width);
})

OF_DEVICE(zesDevicePciGetStats, zes_pci_stats_t, true, {
    *out = (zes_pci_stats_t){.timestamp = now_us(),
                             .replayCounter = t.gpu.pcie_replays,
                             .speed = pci_speed(t.gpu.pcie_generation, t.gpu.pcie_width)};
})

/* ---- memory ---- */

ENUMERATE(zesDeviceEnumMemoryModules, MEMORY)

OF_PART(zesMemoryGetProperties, MEMORY, zes_mem_properties_t, {
    enum { GDDR6 = 17, HBM2E = 23, ON_DEVICE = 1 };
    out->type = t.gpu.memory_kind == 0 ? HBM2E : GDDR6;
    out->onSubdevice = t.gpu.tiles > 1;
    out->subdeviceId = t.part;
    out->location = ON_DEVICE;
    out->physicalSize = t.gpu.memory_total_mib * SIM_MIB / t.gpu.tiles;
    out->busWidth = (int32_t)(t.gpu.bus_width / t.gpu.tiles);
    out->numChannels = (int32_t)(t.gpu.bus_width / t.gpu.tiles / 64);
})

OF_PART(zesMemoryGetState, MEMORY, zes_mem_state_t, {
    uint64_t size = sim_capacity(&t.gpu, SIM_NO_INSTANCE);
    out->health = t.gpu.retired_single + t.gpu.retired_double > 0 ? 2 : 1; /* degraded, good */
    out->size = size / t.gpu.tiles;                                        /* use is spread over the stacks evenly */
    out->free = (size - sim_used(t.index, &t.gpu, SIM_NO_INSTANCE)) / t.gpu.tiles;
})

/* ---- engines, temperatures, power, frequencies ---- */

ENUMERATE(zesDeviceEnumEngineGroups, ENGINE)

OF_PART(zesEngineGetProperties, ENGINE, zes_part_properties_t, {
    const uint32_t types[] = {0, 1, 3}; /* all, compute, copy */
    out->type = types[t.part];
    out->onSubdevice = 0;
    out->subdeviceId = 0;
})

OF_PART(zesEngineGetActivity, ENGINE, zes_engine_stats_t, {
    /* Counters whose growth over a while is the utilisation now. */
    uint64_t now = now_us(), since = t.gpu.active_since_ns / 1000, passed = now > since ? now - since : 0;
    bool memory = t.part == 2;
    out->timestamp = now;
    out->activeTime = (memory ? t.gpu.active_memory_us : t.gpu.active_us) +
                      passed * (memory ? t.gpu.utilisation_memory : t.gpu.utilisation) / 100;
})

ENUMERATE(zesDeviceEnumTemperatureSensors, TEMPERATURE)

OF_PART(zesTemperatureGetProperties, TEMPERATURE, zes_temp_properties_t, {
    out->type = t.part == 0 ? 1 : 2; /* GPU, memory */
    out->onSubdevice = 0;
    out->subdeviceId = 0;
    out->maxTemperature = t.part == 0 ? t.gpu.temperature_shutdown : t.gpu.temperature_max_memory;
    out->isCriticalTempSupported = 0;
    out->isThreshold1Supported = 0;
    out->isThreshold2Supported = 0;
})

OF_PART(zesTemperatureGetState, TEMPERATURE, double,
        { *out = t.part == 0 ? t.gpu.temperature : t.gpu.temperature_memory; })

ENUMERATE(zesDeviceEnumPowerDomains, POWER)

DEFINE(zesDeviceGetCardPowerDomain, handle_t device, handle_t *out)
{
    struct target t;
    ze_result_t result = out != NULL ? enter(device, &t) : ZE_INVALID_NULL_POINTER;
    if (result == ZE_SUCCESS) {
        *out = (handle_t)(void *)part_handles[POWER][t.index];
    }
    return result;
}

OF_PART(zesPowerGetProperties, POWER, zes_power_properties_t, {
    out->onSubdevice = 0;
    out->subdeviceId = 0;
    out->canControl = sim_limits_power();
    out->isEnergyThresholdSupported = 0;
    out->defaultLimit = (int32_t)t.gpu.power_limit_default_mw;
    out->minLimit = (int32_t)t.gpu.power_limit_min_mw;
    out->maxLimit = (int32_t)t.gpu.power_limit_max_mw;
})

OF_PART(zesPowerGetEnergyCounter, POWER, zes_power_energy_counter_t, {
    out->energy = sim_energy(&t.gpu) * 1000;
    out->timestamp = now_us();
})

DEFINE(zesPowerGetLimits, handle_t handle, zes_power_sustained_limit_t *sustained, zes_power_burst_limit_t *burst,
       zes_power_peak_limit_t *peak)
{
    struct target t;
    ze_result_t result = enter_part(handle, POWER, &t);
    if (result == ZE_SUCCESS && !sim_limits_power()) {
        result = ZE_UNSUPPORTED_FEATURE;
    }
    if (result != ZE_SUCCESS) {
        return result;
    }
    int32_t limit = (int32_t)t.gpu.power_limit_mw;
    if (sustained != NULL) {
        *sustained = (zes_power_sustained_limit_t){.enabled = 1, .power = limit, .interval = 1000};
    }
    if (burst != NULL) {
        *burst = (zes_power_burst_limit_t){.enabled = 0, .power = limit};
    }
    if (peak != NULL) {
        *peak = (zes_power_peak_limit_t){.powerAC = (int32_t)t.gpu.power_limit_max_mw, .powerDC = -1};
    }
    return ZE_SUCCESS;
}

static ze_result_t set_sustained(const struct target *t, int32_t mw)
{
    if (!sim_limits_power()) {
        return ZE_UNSUPPORTED_FEATURE;
    }
    enum sim_status status = sim_limit_power(t->index, mw > 0 ? (uint32_t)mw : 0);
    return status == SIM_REFUSED ? ZE_INVALID_ARGUMENT : failure(status);
}

DEFINE(zesPowerSetLimits, handle_t handle, const zes_power_sustained_limit_t *sustained,
       const zes_power_burst_limit_t *burst, const zes_power_peak_limit_t *peak)
{
    struct target t;
    ze_result_t result = enter_part(handle, POWER, &t);
    if (result == ZE_SUCCESS && (burst != NULL || peak != NULL)) {
        result = ZE_UNSUPPORTED_FEATURE;
    }
    return result == ZE_SUCCESS && sustained != NULL ? set_sustained(&t, sustained->power) : result;
}

/* The sustained limit, and the peak that cannot be changed. */
DEFINE(zesPowerGetLimitsExt, handle_t handle, uint32_t *count, zes_power_limit_ext_desc_t *limits)
{
    struct target t;
    ze_result_t result = count != NULL ? enter_part(handle, POWER, &t) : ZE_INVALID_NULL_POINTER;
    if (result == ZE_SUCCESS && !sim_limits_power()) {
        result = ZE_UNSUPPORTED_FEATURE;
    }
    if (result != ZE_SUCCESS) {
        return result;
    }
    const zes_power_limit_ext_desc_t found[] = {
        {.level = 1, .limitUnit = 2, .enabled = 1, .interval = 1000, .limit = (int32_t)t.gpu.power_limit_mw},
        {.level = 3, .limitUnit = 2, .enabled = 1, .limitValueLocked = 1, .limit = (int32_t)t.gpu.power_limit_max_mw},
    };
    const uint32_t there = sizeof found / sizeof *found;
    *count = limits == NULL || *count > there ? there : *count;
    for (uint32_t i = 0; limits != NULL && i < *count; i++) {
        zes_power_limit_ext_desc_t head = limits[i];
        limits[i] = found[i];
        limits[i].stype = head.stype;
        limits[i].pNext = head.pNext;
    }
    return ZE_SUCCESS;
}

DEFINE(zesPowerSetLimitsExt, handle_t handle, uint32_t *count, zes_power_limit_ext_desc_t *limits)
{
    struct target t;
    ze_result_t result = count != NULL && limits != NULL ? enter_part(handle, POWER, &t) : ZE_INVALID_NULL_POINTER;
    for (uint32_t i = 0; result == ZE_SUCCESS && i < *count; i++) {
        if (limits[i].level == 1 && limits[i].limitUnit == 2) {
            result = set_sustained(&t, limits[i].limit);
        }
    }
    return result;
}

ENUMERATE(zesDeviceEnumFrequencyDomains, FREQUENCY)

OF_PART(zesFrequencyGetProperties, FREQUENCY, zes_freq_properties_t, {
    out->type = 0; /* GPU */
    out->onSubdevice = t.gpu.tiles > 1;
    out->subdeviceId = t.part;
    out->canControl = 1;
    out->isThrottleEventSupported = 0;
    out->min = 300;
    out->max = t.gpu.clock_graphics_max;
})

OF_PART(zesFrequencyGetState, FREQUENCY, zes_freq_state_t, {
    /* NVML's throttle bits as Level Zero's: power cap, thermal (hardware or software), hardware. */
    uint64_t why = sim_throttle(&t.gpu);
    out->currentVoltage = -1;
    out->request = t.gpu.clock_graphics_max;
    out->tdp = t.gpu.clock_graphics_max;
    out->efficient = t.gpu.clock_graphics_max / 2;
    out->actual = sim_clock(&t.gpu);
    out->throttleReasons = (why & 0x4 ? 1u : 0u) | (why & 0x8 ? 1u << 4 : 0u) | (why & 0x60 ? 1u << 3 : 0u);
})

/* ---- Xe Link ---- */

static zes_fabric_port_id_t port_id(unsigned gpu, unsigned link, unsigned tiles)
{
    return (zes_fabric_port_id_t){
        .fabricId = 0x1000u + gpu, .attachId = link % tiles, .portNumber = (uint8_t)(link / tiles + 1)};
}

static zes_fabric_port_speed_t port_speed(const struct sim_link *link)
{
    int32_t width = link->width;
    return (zes_fabric_port_speed_t){.bitRate = width > 0 ? link->speed_mbit * 1000000ll / width : 0, .width = width};
}

ENUMERATE(zesDeviceEnumFabricPorts, FABRIC)

OF_PART(zesFabricPortGetProperties, FABRIC, zes_fabric_port_properties_t, {
    sim_text(out->model, sizeof out->model, "XeLink");
    out->onSubdevice = t.gpu.tiles > 1;
    out->portId = port_id(t.index, t.part, t.gpu.tiles);
    out->subdeviceId = out->portId.attachId;
    out->maxRxSpeed = port_speed(&t.gpu.links[t.part]);
    out->maxTxSpeed = out->maxRxSpeed;
})

OF_PART(zesFabricPortGetState, FABRIC, zes_fabric_port_state_t, {
    enum { HEALTHY = 1, DEGRADED = 2, FAILED = 3, LINK_ERRORS = 1, TRAINING_TIMEOUT = 2 };
    const struct sim_link *link = &t.gpu.links[t.part];
    bool errors = link->crc_errors + link->replay_errors + link->recovery_errors > 0;
    out->status = !link->up ? FAILED : errors ? DEGRADED : HEALTHY;
    out->qualityIssues = link->up && errors ? LINK_ERRORS : 0;
    out->failureReasons = link->up ? 0 : TRAINING_TIMEOUT;
    out->remotePortId = port_id(link->peer_gpu, link->remote_link, t.gpu.tiles);
    out->rxSpeed = link->up ? port_speed(link) : (zes_fabric_port_speed_t){0};
    out->txSpeed = out->rxSpeed;
})

OF_PART(zesFabricPortGetLinkType, FABRIC, zes_fabric_link_type_t, { sim_text(out->desc, sizeof out->desc, "XeLink"); })

OF_PART(zesFabricPortGetThroughput, FABRIC, zes_fabric_port_throughput_t, {
    out->timestamp = now_us();
    out->rxCounter = t.gpu.links[t.part].rx_kib * 1024;
    out->txCounter = t.gpu.links[t.part].tx_kib * 1024;
})

OF_PART(zesFabricPortGetFabricErrorCounters, FABRIC, zes_fabric_port_error_counters_t, {
    const struct sim_link *link = &t.gpu.links[t.part];
    out->linkFailureCount = link->recovery_errors;
    out->fwCommErrorCount = 0;
    out->fwErrorCount = 0;
    out->linkDegradeCount = link->replay_errors + link->crc_errors;
})

/* ---- errors, firmware, processes ---- */

ENUMERATE(zesDeviceEnumRasErrorSets, RAS)

OF_PART(zesRasGetProperties, RAS, zes_part_properties_t, {
    out->type = t.part; /* corrected, uncorrected */
    out->onSubdevice = 0;
    out->subdeviceId = 0;
})

DEFINE(zesRasGetState, handle_t handle, ze_bool clear, zes_ras_state_t *out)
{
    enum { NON_COMPUTE_ERRORS = 4 }; /* memory among them */
    struct target t;
    (void)clear; /* `sluice sim set` does that */
    ze_result_t result = out != NULL ? enter_part(handle, RAS, &t) : ZE_INVALID_NULL_POINTER;
    if (result == ZE_SUCCESS) {
        memset(out->category, 0, sizeof out->category);
        out->category[NON_COMPUTE_ERRORS] = t.part == 0 ? t.gpu.ecc_corrected : t.gpu.ecc_uncorrected;
    }
    return result;
}

OF_DEVICE(zesDeviceEccAvailable, ze_bool, true, { *out = t.gpu.ecc_supported != 0; })
OF_DEVICE(zesDeviceEccConfigurable, ze_bool, true, { *out = 0; })
OF_DEVICE(zesDeviceGetEccState, zes_device_ecc_properties_t, t.gpu.ecc_supported, {
    out->currentState = t.gpu.ecc_enabled ? 1 : 2;
    out->pendingState = t.gpu.ecc_pending ? 1 : 2;
    out->pendingAction = 0;
})

ENUMERATE(zesDeviceEnumFirmwares, FIRMWARE)

OF_PART(zesFirmwareGetProperties, FIRMWARE, zes_firmware_properties_t, {
    out->onSubdevice = 0;
    out->subdeviceId = 0;
    out->canControl = 1;
    sim_text(out->name, sizeof out->name, "GFX");
    sim_text(out->version, sizeof out->version, t.gpu.vbios);
})

DEFINE(zesDeviceProcessesGetState, handle_t device, uint32_t *count, zes_process_state_t *out)
{
    enum { MAX_LISTED = 512, COMPUTE = 1 << 1 };
    struct target t;
    ze_result_t result = count != NULL ? enter(device, &t) : ZE_INVALID_NULL_POINTER;
    if (result != ZE_SUCCESS) {
        return result;
    }
    struct sim_use uses[MAX_LISTED];
    uint32_t found = sim_uses(t.index, &t.gpu, SIM_NO_INSTANCE, uses, MAX_LISTED), room = *count;
    found = found < MAX_LISTED ? found : MAX_LISTED;
    *count = room == 0 || room > found || out == NULL ? found : room;
    for (uint32_t i = 0; out != NULL && i < *count && i < room; i++) {
        out[i].processId = uses[i].pid;
        out[i].memSize = uses[i].bytes;
        out[i].sharedSize = 0;
        out[i].engines = COMPUTE;
    }
    return ZE_SUCCESS;
}
