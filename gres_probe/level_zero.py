"""The part of Level Zero's system management interface (sysman) that a probe needs, bound with cffi.

Level Zero is Intel's driver interface; its loader, ``libze_loader.so.1``, finds the drivers. The declarations give the
binary interface of version 1.5 and later as its specification states it; structures begin with their type number.
"""

from __future__ import annotations

import os
from typing import Any

LIBRARY = "libze_loader.so.1"
LIBRARY_VARIABLE = "SLUICE_LEVEL_ZERO_LIBRARY"  # environment variable with another name or path of the loader

_DECLARATIONS = """
typedef uint8_t ze_bool_t;
typedef void *zes_driver_handle_t;
typedef void *zes_device_handle_t;
typedef void *zes_component_handle_t;

typedef struct {
  uint32_t stype; void *pNext;
  uint32_t type, vendorId, deviceId, flags, subdeviceId, coreClockRate;
  uint64_t maxMemAllocSize;
  uint32_t maxHardwareContexts, maxCommandQueuePriority;
  uint32_t numThreadsPerEU, physicalEUSimdWidth, numEUsPerSubslice, numSubslicesPerSlice, numSlices;
  uint64_t timerResolution;
  uint32_t timestampValidBits, kernelTimestampValidBits;
  uint8_t uuid[16];
  char name[256];
} ze_device_properties_t;
typedef struct { uint32_t stype; const void *pNext; uint32_t ipVersion; } ze_device_ip_version_ext_t;

typedef struct {
  uint32_t stype; void *pNext;
  ze_device_properties_t core;
  uint32_t numSubdevices;
  char serialNumber[64], boardNumber[64], brandName[64], modelName[64], vendorName[64], driverVersion[64];
} zes_device_properties_t;
typedef struct { uint32_t stype; const void *pNext; uint32_t reset, repaired; } zes_device_state_t;
typedef struct {
  uint32_t stype; void *pNext;
  uint32_t domain, bus, device, function;
  int32_t gen, width; int64_t maxBandwidth;
  ze_bool_t haveBandwidthCounters, havePacketCounters, haveReplayCounters;
} zes_pci_properties_t;
typedef struct {
  uint32_t stype; const void *pNext;
  uint32_t processId; uint64_t memSize, sharedSize; uint32_t engines;
} zes_process_state_t;
typedef struct {
  uint32_t stype; void *pNext;
  uint32_t type; ze_bool_t onSubdevice; uint32_t subdeviceId, location;
  uint64_t physicalSize; int32_t busWidth, numChannels;
} zes_mem_properties_t;
typedef struct { uint32_t stype; const void *pNext; uint32_t health; uint64_t free, size; } zes_mem_state_t;
typedef struct {
  uint32_t stype; void *pNext; uint32_t type; ze_bool_t onSubdevice; uint32_t subdeviceId;
} zes_engine_properties_t;
typedef struct { uint64_t activeTime, timestamp; } zes_engine_stats_t;
typedef struct {
  uint32_t stype; void *pNext; uint32_t type; ze_bool_t onSubdevice; uint32_t subdeviceId;
  double maxTemperature;
  ze_bool_t isCriticalTempSupported, isThreshold1Supported, isThreshold2Supported;
} zes_temp_properties_t;
typedef struct {
  uint32_t stype; void *pNext; ze_bool_t onSubdevice; uint32_t subdeviceId;
  ze_bool_t canControl, isEnergyThresholdSupported; int32_t defaultLimit, minLimit, maxLimit;
} zes_power_properties_t;
typedef struct { ze_bool_t enabled; int32_t power, interval; } zes_power_sustained_limit_t;
typedef struct {
  uint32_t stype; const void *pNext; uint32_t level, source, limitUnit;
  ze_bool_t enabledStateLocked, enabled, intervalValueLocked; int32_t interval;
  ze_bool_t limitValueLocked; int32_t limit;
} zes_power_limit_ext_desc_t;
typedef struct { uint64_t energy, timestamp; } zes_power_energy_counter_t;
typedef struct {
  uint32_t stype; void *pNext; uint32_t type; ze_bool_t onSubdevice; uint32_t subdeviceId;
  ze_bool_t canControl, isThrottleEventSupported; double min, max;
} zes_freq_properties_t;
typedef struct {
  uint32_t stype; const void *pNext;
  double currentVoltage, request, tdp, efficient, actual; uint32_t throttleReasons;
} zes_freq_state_t;
typedef struct {
  uint64_t timestamp, replayCounter, packetCounter, rxCounter, txCounter; int32_t gen, width; int64_t maxBandwidth;
} zes_pci_stats_t;
typedef struct { uint32_t fabricId, attachId; uint8_t portNumber; } zes_fabric_port_id_t;
typedef struct { int64_t bitRate; int32_t width; } zes_fabric_port_speed_t;
typedef struct {
  uint32_t stype; void *pNext; char model[256]; ze_bool_t onSubdevice; uint32_t subdeviceId;
  zes_fabric_port_id_t portId; zes_fabric_port_speed_t maxRxSpeed, maxTxSpeed;
} zes_fabric_port_properties_t;
typedef struct {
  uint32_t stype; const void *pNext; uint32_t status, qualityIssues, failureReasons;
  zes_fabric_port_id_t remotePortId; zes_fabric_port_speed_t rxSpeed, txSpeed;
} zes_fabric_port_state_t;
typedef struct {
  uint32_t stype; void *pNext; uint64_t linkFailureCount, fwCommErrorCount, fwErrorCount, linkDegradeCount;
} zes_fabric_port_error_counters_t;
typedef struct { uint64_t timestamp, rxCounter, txCounter; } zes_fabric_port_throughput_t;
typedef struct {
  uint32_t stype; void *pNext; uint32_t type; ze_bool_t onSubdevice; uint32_t subdeviceId;
} zes_ras_properties_t;
typedef struct { uint32_t stype; const void *pNext; uint64_t category[7]; } zes_ras_state_t;
typedef struct {
  uint32_t stype; void *pNext; uint32_t currentState, pendingState, pendingAction;
} zes_device_ecc_properties_t;
typedef struct {
  uint32_t stype; void *pNext; ze_bool_t onSubdevice; uint32_t subdeviceId; ze_bool_t canControl;
  char name[64], version[64];
} zes_firmware_properties_t;

uint32_t zeInit(uint32_t flags);
uint32_t zeDriverGet(uint32_t *count, void **drivers);
uint32_t zeDeviceGet(void *driver, uint32_t *count, void **devices);
uint32_t zeDeviceGetProperties(void *device, ze_device_properties_t *properties);

uint32_t zesInit(uint32_t flags);
uint32_t zesDriverGet(uint32_t *count, zes_driver_handle_t *drivers);
uint32_t zesDeviceGet(zes_driver_handle_t driver, uint32_t *count, zes_device_handle_t *devices);
uint32_t zesDeviceGetProperties(zes_device_handle_t device, zes_device_properties_t *properties);
uint32_t zesDeviceGetState(zes_device_handle_t device, zes_device_state_t *state);
uint32_t zesDeviceGetEccState(zes_device_handle_t device, zes_device_ecc_properties_t *state);
uint32_t zesDevicePciGetProperties(zes_device_handle_t device, zes_pci_properties_t *properties);
uint32_t zesDeviceProcessesGetState(zes_device_handle_t device, uint32_t *count, zes_process_state_t *processes);
uint32_t zesDeviceEnumMemoryModules(zes_device_handle_t device, uint32_t *count, zes_component_handle_t *handles);
uint32_t zesMemoryGetProperties(zes_component_handle_t memory, zes_mem_properties_t *properties);
uint32_t zesMemoryGetState(zes_component_handle_t memory, zes_mem_state_t *state);
uint32_t zesDeviceEnumEngineGroups(zes_device_handle_t device, uint32_t *count, zes_component_handle_t *handles);
uint32_t zesEngineGetProperties(zes_component_handle_t engine, zes_engine_properties_t *properties);
uint32_t zesEngineGetActivity(zes_component_handle_t engine, zes_engine_stats_t *stats);
uint32_t zesDeviceEnumTemperatureSensors(zes_device_handle_t device, uint32_t *count, zes_component_handle_t *handles);
uint32_t zesTemperatureGetProperties(zes_component_handle_t sensor, zes_temp_properties_t *properties);
uint32_t zesTemperatureGetState(zes_component_handle_t sensor, double *temperature);
uint32_t zesDeviceEnumPowerDomains(zes_device_handle_t device, uint32_t *count, zes_component_handle_t *handles);
uint32_t zesPowerGetProperties(zes_component_handle_t power, zes_power_properties_t *properties);
uint32_t zesPowerGetLimits(
  zes_component_handle_t power, zes_power_sustained_limit_t *sustained, void *burst, void *peak);
uint32_t zesPowerSetLimits(
  zes_component_handle_t power, const zes_power_sustained_limit_t *sustained, const void *burst, const void *peak);
uint32_t zesPowerGetLimitsExt(zes_component_handle_t power, uint32_t *count, zes_power_limit_ext_desc_t *limits);
uint32_t zesPowerSetLimitsExt(zes_component_handle_t power, uint32_t *count, zes_power_limit_ext_desc_t *limits);
uint32_t zesPowerGetEnergyCounter(zes_component_handle_t power, zes_power_energy_counter_t *energy);
uint32_t zesDeviceEnumFrequencyDomains(zes_device_handle_t device, uint32_t *count, zes_component_handle_t *handles);
uint32_t zesFrequencyGetProperties(zes_component_handle_t frequency, zes_freq_properties_t *properties);
uint32_t zesFrequencyGetState(zes_component_handle_t frequency, zes_freq_state_t *state);
uint32_t zesDevicePciGetStats(zes_device_handle_t device, zes_pci_stats_t *stats);
uint32_t zesDeviceEnumFabricPorts(zes_device_handle_t device, uint32_t *count, zes_component_handle_t *handles);
uint32_t zesFabricPortGetProperties(zes_component_handle_t port, zes_fabric_port_properties_t *properties);
uint32_t zesFabricPortGetState(zes_component_handle_t port, zes_fabric_port_state_t *state);
uint32_t zesFabricPortGetFabricErrorCounters(
  zes_component_handle_t port, zes_fabric_port_error_counters_t *errors);
uint32_t zesFabricPortGetThroughput(zes_component_handle_t port, zes_fabric_port_throughput_t *throughput);
uint32_t zesDeviceEnumRasErrorSets(zes_device_handle_t device, uint32_t *count, zes_component_handle_t *handles);
uint32_t zesRasGetProperties(zes_component_handle_t ras, zes_ras_properties_t *properties);
uint32_t zesRasGetState(zes_component_handle_t ras, ze_bool_t clear, zes_ras_state_t *state);
uint32_t zesDeviceEnumFirmwares(zes_device_handle_t device, uint32_t *count, zes_component_handle_t *handles);
uint32_t zesFirmwareGetProperties(zes_component_handle_t firmware, zes_firmware_properties_t *properties);
"""

# zes_structure_type_t of each structure that has one.
_STRUCTURE_TYPES = {
    "ze_device_properties_t": 0x3,
    "ze_device_ip_version_ext_t": 0x1000F,
    "zes_device_properties_t": 0x1,
    "zes_pci_properties_t": 0x2,
    "zes_engine_properties_t": 0x5,
    "zes_fabric_port_properties_t": 0x6,
    "zes_firmware_properties_t": 0x8,
    "zes_freq_properties_t": 0x9,
    "zes_mem_properties_t": 0xB,
    "zes_power_properties_t": 0xD,
    "zes_ras_properties_t": 0xF,
    "zes_temp_properties_t": 0x14,
    "zes_device_state_t": 0x15,
    "zes_process_state_t": 0x16,
    "zes_fabric_port_state_t": 0x19,
    "zes_freq_state_t": 0x1B,
    "zes_mem_state_t": 0x1E,
    "zes_ras_state_t": 0x22,
    "zes_device_ecc_properties_t": 0x26,
    "zes_power_limit_ext_desc_t": 0x27,
    "zes_fabric_port_error_counters_t": 0x2A,
}

DEVICE_LOST = 0x70000001
UNINITIALIZED = 0x78000001
UNSUPPORTED_FEATURE = 0x78000003
_RESULTS = {
    DEVICE_LOST: "device hung, was reset or removed",
    0x70000006: "device requires a reset",
    0x70010000: "insufficient permissions",
    0x70010001: "not available",
    0x70020000: "a dependency is missing",
    UNINITIALIZED: "no driver",
    0x78000002: "unsupported version",
    UNSUPPORTED_FEATURE: "unsupported feature",
    0x78000004: "invalid argument",
    0x78000020: "device is in survivability mode, its firmware must be updated",
}
_SUSTAINED, _MILLIWATTS = 1, 2  # ZES_POWER_LEVEL_SUSTAINED, ZES_LIMIT_UNIT_POWER
_MOST_HANDLES = 4096  # more than any node has of anything; keeps a broken count from filling the memory


class LevelZeroError(Exception):
    """A call failed; `result` is its ze_result_t."""

    def __init__(self, function: str, result: int) -> None:
        super().__init__(f"{function}: {_RESULTS.get(result, f'error {result:#x}')}")
        self.result = result


class LoaderMissingError(Exception):
    """There is no Level Zero loader of this name."""


class LoaderTooOldError(Exception):
    """The loader is there but lacks zesInit (before Level Zero 1.5)."""


class LevelZero:
    """A loaded Level Zero loader. Raises LoaderMissingError or LoaderTooOldError when it cannot be used."""

    def __init__(self, library: str | None = None) -> None:
        from cffi import FFI

        self.path = library or os.environ.get(LIBRARY_VARIABLE) or LIBRARY
        self._ffi: Any = FFI()  # typed loosely: its values are C's
        try:
            self._library: Any = self._ffi.dlopen(self.path)
        except OSError as error:
            raise LoaderMissingError(str(error)) from error
        self._ffi.cdef(_DECLARATIONS)  # parsing is slow, so only where there is a loader
        if not self.has("zesInit"):
            raise LoaderTooOldError(self.path)

    def has(self, function: str) -> bool:
        """Whether this loader has a function."""
        return hasattr(self._library, function)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function. Raises LevelZeroError; a function that this loader lacks is an unsupported feature."""
        if not self.has(function):
            raise LevelZeroError(function, UNSUPPORTED_FEATURE)
        result = getattr(self._library, function)(*arguments)
        if result != 0:
            raise LevelZeroError(function, result)

    def handles(self, function: str, *parent: Any) -> list[Any]:
        """All handles of an enumerating function, e.g. the devices of a driver."""
        count = self._ffi.new("uint32_t *")
        self.call(function, *parent, count, self._ffi.NULL)
        size = min(count[0], _MOST_HANDLES)
        if size == 0:
            return []
        count[0] = size
        array = self._ffi.new("void *[]", size)
        self.call(function, *parent, count, array)
        return [array[index] for index in range(min(count[0], size))]

    def get(self, function: str, structure: str, handle: Any, *arguments: Any) -> Any:
        """The structure that a function fills in for a handle."""
        value = self.new(structure)
        self.call(function, handle, *arguments, value)
        return value

    def new(self, structure: str) -> Any:
        """A structure, zero but for its type number."""
        value = self._ffi.new(f"{structure} *")
        if structure in _STRUCTURE_TYPES:
            value.stype = _STRUCTURE_TYPES[structure]
        return value

    def sustained_power_mw(self, power: Any) -> int | None:
        """The sustained power limit of a power domain; None where none is set."""
        limits = self._limits(power)
        if limits is not None:
            sustained = _sustained(limits)
            return int(sustained.limit) if sustained is not None and sustained.limit > 0 else None
        limit = self._ffi.new("zes_power_sustained_limit_t *")
        self.call("zesPowerGetLimits", power, limit, self._ffi.NULL, self._ffi.NULL)
        return int(limit.power) if limit.enabled and limit.power > 0 else None

    def set_sustained_power_mw(self, power: Any, mw: int) -> None:
        """Set it; the domain's other limits stay."""
        limits = self._limits(power)
        if limits is not None:
            sustained = _sustained(limits)
            if sustained is None or sustained.limitValueLocked:
                raise LevelZeroError("zesPowerSetLimitsExt", UNSUPPORTED_FEATURE)
            sustained.limit = mw
            if not sustained.enabledStateLocked:
                sustained.enabled = 1
            count = self._ffi.new("uint32_t *", len(limits))
            self.call("zesPowerSetLimitsExt", power, count, limits)
            return
        limit = self._ffi.new("zes_power_sustained_limit_t *")
        self.call("zesPowerGetLimits", power, limit, self._ffi.NULL, self._ffi.NULL)
        limit.enabled, limit.power = 1, mw
        self.call("zesPowerSetLimits", power, limit, self._ffi.NULL, self._ffi.NULL)

    def _limits(self, power: Any) -> Any:
        """All limits of a domain; None with drivers that only have the calls of before Level Zero 1.4."""
        count = self._ffi.new("uint32_t *")
        try:
            self.call("zesPowerGetLimitsExt", power, count, self._ffi.NULL)
            limits = self._ffi.new("zes_power_limit_ext_desc_t[]", min(count[0], _MOST_HANDLES))
            for limit in limits:
                limit.stype = _STRUCTURE_TYPES["zes_power_limit_ext_desc_t"]
            count[0] = len(limits)
            self.call("zesPowerGetLimitsExt", power, count, limits)
        except LevelZeroError as error:
            if error.result == UNSUPPORTED_FEATURE:
                return None
            raise
        return limits

    def processes(self, device: Any) -> list[Any]:
        """The processes that use a device."""
        count = self._ffi.new("uint32_t *")
        self.call("zesDeviceProcessesGetState", device, count, self._ffi.NULL)
        size = min(count[0], _MOST_HANDLES)
        if size == 0:
            return []
        count[0] = size
        array = self._ffi.new("zes_process_state_t[]", size)
        for state in array:
            state.stype = _STRUCTURE_TYPES["zes_process_state_t"]
        self.call("zesDeviceProcessesGetState", device, count, array)
        return [array[index] for index in range(min(count[0], size))]

    def double(self, function: str, handle: Any) -> float:
        """The number that a function gives for a handle."""
        value = self._ffi.new("double *")
        self.call(function, handle, value)
        return float(value[0])

    def text(self, characters: Any) -> str:
        """A character array up to its end mark; "" for the specification's "unknown"."""
        value: str = self._ffi.string(characters).decode(errors="replace")
        return "" if value.lower() == "unknown" else value

    def ip_versions(self) -> dict[bytes, int]:
        """The IP version of each GPU by its UUID, from the core interface; empty where that does not report it."""
        versions: dict[bytes, int] = {}
        try:
            self.call("zeInit", 0)
            for driver in self.handles("zeDriverGet"):
                for device in self.handles("zeDeviceGet", driver):
                    extension = self.new("ze_device_ip_version_ext_t")
                    properties = self.new("ze_device_properties_t")
                    properties.pNext = extension
                    self.call("zeDeviceGetProperties", device, properties)
                    if extension.ipVersion:
                        versions[bytes(properties.uuid)] = extension.ipVersion
        except LevelZeroError:
            pass
        return versions


def _sustained(limits: Any) -> Any:
    return next((limit for limit in limits if limit.level == _SUSTAINED and limit.limitUnit == _MILLIWATTS), None)
