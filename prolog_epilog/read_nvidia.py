"""Readings of NVIDIA GPUs through NVML. What the functions mean: NVIDIA's NVML API reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from prolog_epilog.nvml_lists import BusyLists, FieldValues
from sluice.exchange.readings import Activity, Link, Reading

# Bits of nvmlDeviceGetCurrentClocksEventReasons.
_REASONS = {
    0x4: "power",  # software power cap
    0x8: "hardware",
    0x20: "thermal",  # software
    0x40: "thermal",  # hardware
    0x80: "brake",
    0x1: "idle",
    0x2: "settings",  # application clocks
    0x10: "settings",  # sync boost
    0x100: "settings",  # display clocks
}
_KIB = 1024
_FUTURE_US = 1_000_000  # by which the driver's time of a sample may be ahead of ours
_ALL_LINKS = 0xFFFFFFFF
_GRAPHICS_UTIL = 1  # NVML_GPM_METRIC_GRAPHICS_UTIL
_FIELDS = {
    "temperature_memory_c": 82,  # NVML_FI_DEV_MEMORY_TEMP
    "pcie_replays": 94,  # NVML_FI_DEV_PCIE_REPLAY_COUNTER
}
# NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, _RECOVERY, _CRC, NVML_FI_DEV_NVLINK_GET_STATE, _THROUGHPUT_DATA_TX and _RX
_LINK_FIELDS = (161, 162, 163, 165, 138, 139)
_LINK_COUNT = 91  # NVML_FI_DEV_NVLINK_LINK_COUNT


@dataclass
class _Gpu:
    uuid: str
    handle: Any
    parts: list[tuple[str, int, float]]  # MIG: UUID, number of the GPU instance, its part of the memory
    links: int | None = None
    fixed: dict[str, Any] = field(default_factory=dict)  # what never changes while the driver is loaded
    busy_ns: float = 0.0
    at: float | None = None  # by the machine's monotonic clock, when `busy_ns` was last added to
    seen_us: int = 0  # time of the last process sample
    by_process: bool = True
    processes: dict[int, float] = field(default_factory=dict)
    gpm: dict[str, Any] = field(default_factory=dict)  # MIG UUID -> last GPM sample
    part_busy: dict[str, float] = field(default_factory=dict)
    gpm_works: bool | None = None


class NvidiaReader:
    """Reads all GPUs of the node. `api` is pynvml, initialised."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.gpus: list[_Gpu] = []
        for index in range(api.nvmlDeviceGetCount()):
            with suppress(api.NVMLError_GpuIsLost):  # lost before it was known
                handle = api.nvmlDeviceGetHandleByIndex(index)
                self.gpus.append(_Gpu(api.nvmlDeviceGetUUID(handle), handle, self._parts(handle)))
        self._events = self._watch_events()
        self._pending: dict[str, list[tuple[float, int]]] = {}
        self._busy_lists: BusyLists | None = None
        self._fields: dict[tuple[tuple[int, int], ...], FieldValues] = {}

    def _parts(self, handle: Any) -> list[tuple[str, int, float]]:
        found: list[tuple[str, int, float]] = []
        with suppress(self.api.NVMLError):
            if self.api.nvmlDeviceGetMigMode(handle)[0] != self.api.NVML_DEVICE_MIG_ENABLE:
                return []
            for index in range(self.api.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with suppress(self.api.NVMLError):
                    part = self.api.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                    number = self.api.nvmlDeviceGetGpuInstanceId(part)
                    sizes = [self.api.nvmlDeviceGetMemoryInfo(one).total for one in (part, handle)]
                    found.append((self.api.nvmlDeviceGetUUID(part), int(number), sizes[0] / sizes[1]))
        return found

    def _watch_events(self) -> Any:
        try:
            events = self.api.nvmlEventSetCreate()
            for gpu in self.gpus:
                with suppress(self.api.NVMLError):
                    self.api.nvmlDeviceRegisterEvents(gpu.handle, self.api.nvmlEventTypeXidCriticalError, events)
        except self.api.NVMLError:
            return None
        return events

    # ---- at every sample ----

    def activity(self, wanted: Iterable[str]) -> tuple[dict[str, Activity], dict[str, dict[int, int]]]:
        """Of the named devices and instances, and by device the busy time of each process in ns.

        A device whose driver reports nothing of single processes is not in the second.
        """
        wanted = set(wanted)
        found: dict[str, Activity] = {}
        processes: dict[str, dict[int, int]] = {}
        for gpu in self.gpus:
            if wanted & {gpu.uuid, *(part[0] for part in gpu.parts)}:
                with suppress(self.api.NVMLError_GpuIsLost):  # the others are still there
                    self._activity_of(gpu, wanted, found, processes)
        return found, processes

    def energy(self, wanted: Iterable[str]) -> dict[str, int | None]:
        """See `sampling.Reader`."""
        names = set(wanted)
        found: dict[str, int | None] = {}
        for gpu in (gpu for gpu in self.gpus if gpu.uuid in names):
            found[gpu.uuid] = None
            with suppress(self.api.NVMLError_GpuIsLost):
                found[gpu.uuid] = self._get(self.api.nvmlDeviceGetTotalEnergyConsumption, gpu.handle)
        return found

    def _activity_of(
        self, gpu: _Gpu, wanted: set[str], found: dict[str, Activity], processes: dict[str, dict[int, int]]
    ) -> None:
        """Add one GPU and its instances to what `activity` returns."""
        energy = self._get(self.api.nvmlDeviceGetTotalEnergyConsumption, gpu.handle)
        throttle = self._throttle(gpu)
        if gpu.uuid in wanted:
            by_process = self._processes(gpu)
            if by_process is not None:
                processes[gpu.uuid] = by_process
            found[gpu.uuid] = Activity(*self._busy(gpu), energy, throttle)
        for uuid, number, share in (part for part in gpu.parts if part[0] in wanted):
            found[uuid] = Activity(*self._part_busy(gpu, uuid, number), energy, throttle, share)

    def _busy(self, gpu: _Gpu) -> tuple[float, int | None]:
        """Up to when, and the busy time: its processes' sum where the driver reports theirs, which saves a call."""
        if gpu.by_process and gpu.at is not None:
            return gpu.at, int(gpu.busy_ns)
        rates = self._get(self.api.nvmlDeviceGetUtilizationRates, gpu.handle)
        now = time.monotonic()
        if rates is None:
            return now, None
        if gpu.at is not None:
            gpu.busy_ns += (now - gpu.at) * 1e7 * rates.gpu
        gpu.at = now
        return now, int(gpu.busy_ns)

    def _processes(self, gpu: _Gpu) -> dict[int, int] | None:
        """Busy time by process: the average of the driver's samples since the last time, for the time since then."""
        if not gpu.by_process:
            return None
        now, clock = time.monotonic(), int(time.time() * 1e6)
        since = min(gpu.seen_us, clock)  # the clock may have been set back
        shares: dict[int, list[int]] = {}
        newest = clock
        try:
            self._busy_lists = self._busy_lists or BusyLists(self.api)
            # Samples of the future are those of before the clock was set back.
            latest = clock + _FUTURE_US
            listed = [one for one in self._busy_lists.since(gpu.handle, since) if one[2] <= 100 and one[1] <= latest]
            for pid, _, percent in listed:
                shares.setdefault(pid, []).append(percent)
            newest = max((when for _, when, _ in listed), default=clock)
        except self.api.NVMLError_NotFound:
            pass  # no process since then
        except self.api.NVMLError_GpuIsLost:
            raise
        except self.api.NVMLError:
            gpu.by_process = False
            return None
        gpu.seen_us = newest
        if gpu.at is not None:
            for pid, found in shares.items():
                more = (now - gpu.at) * 1e7 * sum(found) / len(found)
                gpu.processes[pid] = gpu.processes.get(pid, 0.0) + more
                gpu.busy_ns += more
        gpu.at = now
        if len(gpu.processes) > 4096:  # of processes that ended long ago
            gpu.processes = {pid: busy for pid, busy in gpu.processes.items() if pid in shares}
        return {pid: int(busy) for pid, busy in gpu.processes.items()}

    def _part_busy(self, gpu: _Gpu, uuid: str, number: int) -> tuple[float, int | None]:
        """Up to when, and the busy time of a MIG instance, by two samples of GPM (Hopper and later; else None)."""
        api = self.api
        if gpu.gpm_works is None:
            support = self._get(api.nvmlGpmQueryDeviceSupport, gpu.handle)
            gpu.gpm_works = support is not None and bool(support.isSupportedDevice)
        if not gpu.gpm_works:
            return time.monotonic(), None
        try:
            sample = api.nvmlGpmSampleAlloc()
        except api.NVMLError:
            return time.monotonic(), None
        try:
            api.nvmlGpmMigSampleGet(gpu.handle, number, sample)
            now, last = time.monotonic(), gpu.gpm.get(uuid)
            if last is None:
                gpu.gpm[uuid] = (now, sample)
                gpu.part_busy[uuid] = 0.0
                return now, 0
            get = api.c_nvmlGpmMetricsGet_t()
            get.version, get.numMetrics = api.NVML_GPM_METRICS_GET_VERSION, 1
            get.sample1, get.sample2 = last[1], sample
            get.metrics[0].metricId = _GRAPHICS_UTIL
            api.nvmlGpmMetricsGet(get)
        except api.NVMLError:
            api.nvmlGpmSampleFree(sample)
            return time.monotonic(), None
        if get.metrics[0].nvmlReturn == 0:
            gpu.part_busy[uuid] += (now - last[0]) * 1e7 * get.metrics[0].value
        gpu.gpm[uuid] = (now, sample)
        api.nvmlGpmSampleFree(last[1])
        return now, int(gpu.part_busy[uuid])

    def _throttle(self, gpu: _Gpu) -> list[str] | None:
        bits = self._get(self.api.nvmlDeviceGetCurrentClocksThrottleReasons, gpu.handle)
        if bits is None:
            return None
        return _words(int(bits))

    # ---- everything ----

    def readings(self, wanted: Iterable[str] | None = None) -> list[Reading]:
        """All GPUs, or those that are named; one that does not answer has a `problem`. See `sampling.Reader`."""
        found = []
        names = None if wanted is None else set(wanted)
        for gpu in self.gpus:
            if names is not None and not names & {gpu.uuid, *(part[0] for part in gpu.parts)}:
                continue
            reading = Reading(gpu.uuid, parts=[part[0] for part in gpu.parts])
            try:
                self._read(gpu, reading)
            except self.api.NVMLError as error:
                reading.problem = str(error)
                reading.lost = isinstance(error, self.api.NVMLError_GpuIsLost)
            found.append(reading)
        self._read_events()
        for reading in found:
            reading.xids = self._pending.get(reading.uuid, [])
        if wanted is None:
            self._pending = {}
        return found

    def _read(self, gpu: _Gpu, reading: Reading) -> None:
        api, handle, get = self.api, gpu.handle, self._get
        memory = api.nvmlDeviceGetMemoryInfo(handle)  # every GPU has this: what it raises is the GPU's fault
        reading.memory_total_bytes, reading.memory_used_bytes = int(memory.total), int(memory.used)
        rates = get(api.nvmlDeviceGetUtilizationRates, handle)
        if rates is not None:
            reading.utilisation_percent, reading.memory_bandwidth_percent = rates.gpu, rates.memory
        reading.encoder_percent = _first(get(api.nvmlDeviceGetEncoderUtilization, handle))
        reading.decoder_percent = _first(get(api.nvmlDeviceGetDecoderUtilization, handle))
        reading.power_mw = get(api.nvmlDeviceGetPowerUsage, handle)
        reading.power_limit_mw = get(api.nvmlDeviceGetEnforcedPowerLimit, handle)
        reading.energy_mj = get(api.nvmlDeviceGetTotalEnergyConsumption, handle)
        reading.temperature_c = get(api.nvmlDeviceGetTemperature, handle, api.NVML_TEMPERATURE_GPU)
        reading.fan_percent = get(api.nvmlDeviceGetFanSpeed, handle)
        reading.clock_graphics_mhz = get(api.nvmlDeviceGetClockInfo, handle, api.NVML_CLOCK_GRAPHICS)
        reading.clock_memory_mhz = get(api.nvmlDeviceGetClockInfo, handle, api.NVML_CLOCK_MEM)
        reading.clock_video_mhz = get(api.nvmlDeviceGetClockInfo, handle, api.NVML_CLOCK_VIDEO)
        reading.throttle = self._throttle(gpu)
        reading.performance_state = get(api.nvmlDeviceGetPerformanceState, handle)
        reading.persistence = _truth(get(api.nvmlDeviceGetPersistenceMode, handle))
        self._read_errors(gpu, reading)
        reading.pcie_generation = get(api.nvmlDeviceGetCurrPcieLinkGeneration, handle)
        reading.pcie_width = get(api.nvmlDeviceGetCurrPcieLinkWidth, handle)
        reading.links = self._links(gpu)
        if not gpu.fixed:
            gpu.fixed = self._fixed(handle)
        for name, value in gpu.fixed.items():
            setattr(reading, name, value)

    def _fixed(self, handle: Any) -> dict[str, Any]:
        api, get = self.api, self._get
        thresholds = (api.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, api.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN)
        slowdown, shutdown = (get(api.nvmlDeviceGetTemperatureThreshold, handle, one) for one in thresholds)
        return {
            "temperature_slowdown_c": slowdown,
            "temperature_shutdown_c": shutdown,
            "clock_graphics_max_mhz": get(api.nvmlDeviceGetMaxClockInfo, handle, api.NVML_CLOCK_GRAPHICS),
            "clock_memory_max_mhz": get(api.nvmlDeviceGetMaxClockInfo, handle, api.NVML_CLOCK_MEM),
            "pcie_generation_max": get(api.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            "pcie_width_max": get(api.nvmlDeviceGetMaxPcieLinkWidth, handle),
            "vbios": get(api.nvmlDeviceGetVbiosVersion, handle),
        }

    def _read_errors(self, gpu: _Gpu, reading: Reading) -> None:
        api, handle, get = self.api, gpu.handle, self._get
        mode = get(api.nvmlDeviceGetEccMode, handle)
        reading.ecc_enabled = None if mode is None else bool(mode[0])
        if reading.ecc_enabled:
            for name, kind, counter in (
                ("ecc_corrected", api.NVML_MEMORY_ERROR_TYPE_CORRECTED, api.NVML_VOLATILE_ECC),
                ("ecc_uncorrected", api.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, api.NVML_VOLATILE_ECC),
                ("ecc_corrected_life", api.NVML_MEMORY_ERROR_TYPE_CORRECTED, api.NVML_AGGREGATE_ECC),
                ("ecc_uncorrected_life", api.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, api.NVML_AGGREGATE_ECC),
            ):
                setattr(reading, name, get(api.nvmlDeviceGetTotalEccErrors, handle, kind, counter))
        rows = get(api.nvmlDeviceGetRemappedRows, handle)
        if rows is not None:
            reading.rows_correctable, reading.rows_uncorrectable = int(rows[0]), int(rows[1])
            reading.rows_pending, reading.rows_failed = bool(rows[2]), bool(rows[3])
        else:
            causes = (
                api.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
                api.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
            )
            pages = [get(api.nvmlDeviceGetRetiredPages, handle, cause) for cause in causes]
            if None not in pages:
                reading.pages_retired = sum(len(listed) for listed in pages)
                reading.pages_pending = _truth(get(api.nvmlDeviceGetRetiredPagesPendingStatus, handle))
        for name, value in zip(_FIELDS, self._values(handle, tuple((one, 0) for one in _FIELDS.values())), strict=True):
            setattr(reading, name, value)

    def _links(self, gpu: _Gpu) -> list[Link]:
        if gpu.links is None:
            gpu.links = int(self._values(gpu.handle, ((_LINK_COUNT, 0),))[0] or 0)
        if not gpu.links:
            return []
        numbers = range(min(gpu.links, 64))
        values = self._values(gpu.handle, _link_fields(len(numbers)))
        found = []
        for number in numbers:
            replays, recoveries, crc, up, sent, received = values[number * 6 : number * 6 + 6]
            sent, received = (None if one is None else one * _KIB for one in (sent, received))
            found.append(Link(number, _truth(up), replays, recoveries, crc, sent, received))
        return found

    def _values(self, handle: Any, wanted: tuple[tuple[int, int], ...]) -> list[Any]:
        """Field values by number and scope, in one call; None for what is not reported."""
        if wanted not in self._fields:
            self._fields[wanted] = FieldValues(self.api, wanted)
        try:
            return list(self._fields[wanted].read(handle))
        except self.api.NVMLError:
            return [None] * len(wanted)

    def _read_events(self) -> None:
        """XIDs since the last time."""
        for _ in range(256 if self._events is not None else 0):
            try:
                event = self.api.nvmlEventSetWait_v2(self._events, 0)
                uuid = self.api.nvmlDeviceGetUUID(event.device)
            except self.api.NVMLError_Timeout:
                return
            except self.api.NVMLError:
                continue  # of a GPU that is gone: the next one
            self._pending.setdefault(uuid, []).append((time.time(), int(event.eventData)))

    def _get(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A function's answer, None for what this GPU or driver does not report. Raises for a lost GPU."""
        try:
            return function(*arguments)
        except self.api.NVMLError_GpuIsLost:
            raise
        except self.api.NVMLError:
            return None


@lru_cache(maxsize=8)
def _link_fields(links: int) -> tuple[tuple[int, int], ...]:
    return tuple((field, link) for link in range(links) for field in _LINK_FIELDS)


@lru_cache(maxsize=256)
def _words(bits: int) -> list[str]:
    return list(dict.fromkeys(word for bit, word in _REASONS.items() if bits & bit))


def _first(pair: Any) -> Any:
    return None if pair is None else pair[0]


def _truth(value: Any) -> bool | None:
    return None if value is None else bool(value)
