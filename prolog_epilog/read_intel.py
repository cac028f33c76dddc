"""Readings of Intel GPUs through Level Zero's sysman. What the functions mean: its specification, chapter "Sysman"."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from gres_probe.level_zero import DEVICE_LOST, LevelZero, LevelZeroError
from prolog_epilog.gpu_reader import GpuReader, ReadGpu
from sluice.exchange.readings import Activity, Link, Reading

_ON_DEVICE = 1  # ZES_MEM_LOC_DEVICE
_ENGINE_GROUPS = (0, 1)  # ZES_ENGINE_GROUP_ALL, else _COMPUTE_ALL
_MEMORY_SENSORS = (2, 5)  # ZES_TEMP_SENSORS_MEMORY, _MEMORY_MIN
_CHIP_SENSORS = (1, 0)  # ZES_TEMP_SENSORS_GPU, _GLOBAL
# zes_freq_throttle_reason_flags_t
_REASONS = {
    0x1: "power",
    0x2: "power",
    0x4: "power",
    0x8: "thermal",
    0x10: "hardware",
    0x20: "settings",
    0x40: "settings",
}
_UNCORRECTED = 1  # ZES_RAS_ERROR_TYPE_UNCORRECTABLE
_MEMORY_ERRORS = 4  # ZES_RAS_ERROR_CAT_NON_COMPUTE_ERRORS: GPU accelerators other than compute, memory among them
_HARDWARE_ERRORS = (3, 4, 5)  # compute, non-compute, cache
_PORT_UP = (1, 2)  # healthy, degraded
_PORT_DISABLED = 4


@dataclass
class _Gpu(ReadGpu):
    engines: list[Any] = field(default_factory=list)
    last: dict[int, tuple[int, int]] = field(default_factory=dict)  # engine -> active time, timestamp
    percent: float | None = None
    power: Any = None
    energy: tuple[int, float] | None = None  # uJ, when


class IntelReader(GpuReader[_Gpu]):
    """Reads all GPUs of the node. `devices`: sysman's handles with their UUIDs."""

    failures = (LevelZeroError,)

    def __init__(self, sysman: LevelZero, devices: Iterable[tuple[str, Any]]) -> None:
        self.sysman = sysman
        super().__init__([_Gpu(uuid, handle) for uuid, handle in devices])
        for gpu in self.gpus:
            groups = self._parts(gpu, "EngineGroups", "zesEngineGetProperties", "zes_engine_properties_t")
            for kind in _ENGINE_GROUPS:
                gpu.engines = gpu.engines or [engine for engine, properties in groups if properties.type == kind]
            domains = self._parts(gpu, "PowerDomains", "zesPowerGetProperties", "zes_power_properties_t")
            gpu.power = next((domain for domain, properties in domains if not properties.onSubdevice), None)

    def activity(self, wanted: Iterable[str]) -> tuple[dict[str, Activity], dict[str, dict[int, int]]]:
        """Of the named devices. Sysman does not report busy time of single processes."""
        found = {}
        for gpu in self.named(wanted):
            try:
                found[gpu.uuid] = Activity(*self._busy(gpu), self.energy_mj(gpu), self._throttle(gpu))
            except LevelZeroError as error:
                if not self.is_lost(error):  # of a lost one nothing is known; the others are still there
                    raise
        return found, {}

    def _busy(self, gpu: _Gpu) -> tuple[float, int | None]:
        """Up to when, and the busy time of the busiest engine group, by its own counters."""
        shares = []
        for number, engine in enumerate(gpu.engines):
            stats = self._ask("zesEngineGetActivity", "zes_engine_stats_t", engine)
            if stats is None:
                continue
            now, last = (int(stats.activeTime), int(stats.timestamp)), gpu.last.get(number)
            gpu.last[number] = now
            if last is not None and now[1] > last[1] and now[0] >= last[0]:
                shares.append(min(1.0, (now[0] - last[0]) / (now[1] - last[1])))
        at = time.monotonic()
        busy = gpu.work(max(shares, default=None), at)
        if shares:
            gpu.percent = 100 * max(shares)
        return at, busy if gpu.engines else None

    def _energy_uj(self, gpu: _Gpu) -> int | None:
        if gpu.power is None:
            return None
        counter = self._ask("zesPowerGetEnergyCounter", "zes_power_energy_counter_t", gpu.power)
        return None if counter is None else int(counter.energy)

    def energy_mj(self, gpu: _Gpu) -> int | None:
        """See `GpuReader`."""
        energy = self._energy_uj(gpu)
        return None if energy is None else energy // 1000

    def _throttle(self, gpu: _Gpu) -> list[str] | None:
        words: dict[str, None] = {}
        known = False
        for domain, properties in self._parts(
            gpu, "FrequencyDomains", "zesFrequencyGetProperties", "zes_freq_properties_t"
        ):
            state = self._ask("zesFrequencyGetState", "zes_freq_state_t", domain)
            if state is not None and properties.type == 0:
                known = True
                words |= {word: None for bit, word in _REASONS.items() if state.throttleReasons & bit}
        return list(words) if known else None

    def is_lost(self, error: Exception) -> bool:
        """See `GpuReader`."""
        return isinstance(error, LevelZeroError) and error.result == DEVICE_LOST

    def read(self, gpu: _Gpu, reading: Reading) -> None:
        """See `GpuReader`."""
        self._read_memory(gpu, reading)
        self._busy(gpu)
        reading.utilisation_percent = gpu.percent
        self._read_power(gpu, reading)
        for sensor, properties in self._parts(
            gpu, "TemperatureSensors", "zesTemperatureGetProperties", "zes_temp_properties_t"
        ):
            value = self._number("zesTemperatureGetState", sensor)
            if properties.type in _CHIP_SENSORS and reading.temperature_c is None:
                reading.temperature_c = value
                if properties.maxTemperature > 0:
                    reading.temperature_shutdown_c = float(properties.maxTemperature)
            elif properties.type in _MEMORY_SENSORS and reading.temperature_memory_c is None:
                reading.temperature_memory_c = value
        for domain, properties in self._parts(
            gpu, "FrequencyDomains", "zesFrequencyGetProperties", "zes_freq_properties_t"
        ):
            state = self._ask("zesFrequencyGetState", "zes_freq_state_t", domain)
            kind = {0: "graphics", 1: "memory"}.get(properties.type)
            if state is not None and kind is not None and state.actual >= 0:
                setattr(reading, f"clock_{kind}_mhz", round(state.actual))
                setattr(reading, f"clock_{kind}_max_mhz", round(properties.max))
        reading.throttle = self._throttle(gpu)
        self._read_errors(gpu, reading)
        address = self._ask("zesDevicePciGetProperties", "zes_pci_properties_t", gpu.handle)
        if address is not None:
            reading.pcie_generation_max, reading.pcie_width_max = _positive(address.gen), _positive(address.width)
        stats = self._ask("zesDevicePciGetStats", "zes_pci_stats_t", gpu.handle)
        if stats is not None:
            reading.pcie_generation, reading.pcie_width = _positive(stats.gen), _positive(stats.width)
            reading.pcie_replays = int(stats.replayCounter)
        reading.links = self._links(gpu)

    def _read_memory(self, gpu: _Gpu, reading: Reading) -> None:
        size = free = 0
        handles = self.sysman.handles("zesDeviceEnumMemoryModules", gpu.handle)  # every GPU has some
        for module in handles:
            properties = self._ask("zesMemoryGetProperties", "zes_mem_properties_t", module)
            state = self._ask("zesMemoryGetState", "zes_mem_state_t", module)
            if state is not None and properties is not None and properties.location == _ON_DEVICE:
                size += int(state.size)
                free += int(state.free)
        if size:
            reading.memory_total_bytes, reading.memory_used_bytes = size, size - free

    def _read_power(self, gpu: _Gpu, reading: Reading) -> None:
        """Power is the energy counter's growth since the last reading."""
        energy, now = self._energy_uj(gpu), time.monotonic()
        if energy is not None:
            reading.energy_mj = energy // 1000
            if gpu.energy is not None and now > gpu.energy[1] and energy >= gpu.energy[0]:
                reading.power_mw = round((energy - gpu.energy[0]) / 1000 / (now - gpu.energy[1]))
            gpu.energy = (energy, now)
        if gpu.power is not None:
            try:
                reading.power_limit_mw = self.sysman.sustained_power_mw(gpu.power)
            except LevelZeroError as error:
                _pass_on_lost(error)

    def _read_errors(self, gpu: _Gpu, reading: Reading) -> None:
        state = self._ask("zesDeviceGetEccState", "zes_device_ecc_properties_t", gpu.handle)
        reading.ecc_enabled = None if state is None or state.currentState == 0 else state.currentState == 1
        for handle, properties in self._parts(gpu, "RasErrorSets", "zesRasGetProperties", "zes_ras_properties_t"):
            errors = self._ask("zesRasGetState", "zes_ras_state_t", handle, 0)
            if errors is None:
                continue
            count = sum(int(errors.category[kind]) for kind in _HARDWARE_ERRORS)
            if properties.type == _UNCORRECTED:
                reading.ecc_uncorrected = (reading.ecc_uncorrected or 0) + count
                outside = count - int(errors.category[_MEMORY_ERRORS])
                reading.ras_uncorrected = (reading.ras_uncorrected or 0) + outside
            else:
                reading.ecc_corrected = (reading.ecc_corrected or 0) + count

    def _links(self, gpu: _Gpu) -> list[Link]:
        found = []
        ports = self._parts(gpu, "FabricPorts", "zesFabricPortGetProperties", "zes_fabric_port_properties_t")
        for number, (port, _) in enumerate(ports):
            link = Link(number)
            state = self._ask("zesFabricPortGetState", "zes_fabric_port_state_t", port)
            if state is not None and state.status not in (0, _PORT_DISABLED):
                link.up = state.status in _PORT_UP
            errors = self._ask("zesFabricPortGetFabricErrorCounters", "zes_fabric_port_error_counters_t", port)
            if errors is not None:
                link.recoveries, link.crc = int(errors.linkFailureCount), int(errors.linkDegradeCount)
            traffic = self._ask("zesFabricPortGetThroughput", "zes_fabric_port_throughput_t", port)
            if traffic is not None:
                link.tx_bytes, link.rx_bytes = int(traffic.txCounter), int(traffic.rxCounter)
            found.append(link)
        return found

    def _parts(self, gpu: _Gpu, kind: str, properties: str, structure: str) -> list[tuple[Any, Any]]:
        """The components of a kind with their properties."""
        handles = self._catch(lambda: self.sysman.handles(f"zesDeviceEnum{kind}", gpu.handle)) or []
        found = [(handle, self._ask(properties, structure, handle)) for handle in handles]
        return [(handle, values) for handle, values in found if values is not None]

    def _number(self, function: str, handle: Any) -> float | None:
        value: float | None = self._catch(lambda: self.sysman.double(function, handle))
        return value

    def _ask(self, function: str, structure: str, handle: Any, *arguments: Any) -> Any:
        return self._catch(lambda: self.sysman.get(function, structure, handle, *arguments))

    @staticmethod
    def _catch(function: Callable[[], Any]) -> Any:
        """An answer, None for what this driver or board does not report. Raises for a lost device."""
        try:
            return function()
        except LevelZeroError as error:
            _pass_on_lost(error)
            return None


def _pass_on_lost(error: LevelZeroError) -> None:
    if error.result == DEVICE_LOST:
        raise error


def _positive(value: int) -> int | None:
    return int(value) if value > 0 else None
