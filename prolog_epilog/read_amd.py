"""Readings of AMD GPUs through AMD SMI. What the functions mean: ROCm's AMD SMI reference."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prolog_epilog.gpu_reader import GpuReader, ReadGpu
from sluice.exchange.readings import Activity, Link, Reading

_UNKNOWN = ("", "N/A", 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
_KIB = 1024
_UMC = 1  # AmdSmiGpuBlock.UMC: the memory's controller
_THROTTLE = {
    "active_ppt_pwr": "power",
    "active_socket_thrm": "thermal",
    "active_hbm_thrm": "thermal",
    "active_vr_thrm": "thermal",
    "active_prochot_thrm": "hardware",
}


@dataclass
class _Gpu(ReadGpu):
    devices: list[tuple[str, Any]] = field(default_factory=list)  # its partitions, or itself
    percent: float = 0.0
    by_process: bool = False  # whether the driver ever reported engine time of a process
    fixed: dict[str, Any] = field(default_factory=dict)
    took: dict[str, dict[int, int]] = field(default_factory=dict)  # by partition and process, ns of engine time
    part_ns: dict[str, int] = field(default_factory=dict)  # by partition, the time at work of all that were there


class AmdReader(GpuReader[_Gpu]):
    """Reads all GPUs of the node. `api` is amdsmi, initialised; `gpus`: `gres_probe.vendors.amd.devices_by_gpu`."""

    def __init__(self, api: Any, gpus: Iterable[tuple[str, list[tuple[str, Any]]]]) -> None:
        self.api = api
        super().__init__(
            [
                _Gpu(uuid, devices[0][1], [part for part, _ in devices] if len(devices) > 1 else [], devices=devices)
                for uuid, devices in gpus
            ]
        )
        # Besides its own exceptions, the package raises those of decoding unexpected answers.
        self.failures = (api.AmdSmiException, ValueError, KeyError, AttributeError, TypeError)

    def activity(self, wanted: Iterable[str]) -> tuple[dict[str, Activity], dict[str, dict[int, int]]]:
        """Of the named devices, and by device the busy time of each process in ns where the driver reports it.

        For a partition the library reports the whole GPU: its own busy time is that of its processes.
        """
        wanted = set(wanted)
        found: dict[str, Activity] = {}
        processes: dict[str, dict[int, int]] = {}
        for gpu in self.named(wanted):
            percent, energy, throttle = self._percent(gpu), self.energy_mj(gpu), self._throttle(gpu)
            for uuid, handle in gpu.devices:
                if uuid not in wanted:
                    continue
                listed = self._ask("amdsmi_get_gpu_process_list", handle) or []
                at = time.monotonic()
                times = {int(one["pid"]): int(one["engine_usage"]["gfx"]) for one in listed}
                gpu.by_process = gpu.by_process or any(times.values())
                if gpu.by_process or not times or not gpu.percent:
                    processes[uuid] = times
                if gpu.parts:
                    busy = self._part_busy(gpu, uuid, times)
                else:
                    busy = None if percent is None else gpu.work(percent / 100, at)
                found[uuid] = Activity(at, busy, energy, throttle, 1 / len(gpu.devices))
        return found, processes

    def _percent(self, gpu: _Gpu) -> float | None:
        percent: float | None = self._field("amdsmi_get_gpu_activity", "gfx_activity", gpu.handle)
        if percent is not None:
            gpu.percent = float(percent)
        return percent

    def _part_busy(self, gpu: _Gpu, uuid: str, times: dict[int, int]) -> int | None:
        before = gpu.took.get(uuid, times)
        gpu.took[uuid] = times
        grown = sum(max(0, time - before.get(pid, 0)) for pid, time in times.items())
        gpu.part_ns[uuid] = gpu.part_ns.get(uuid, 0) + grown
        return gpu.part_ns[uuid] if gpu.by_process or not gpu.percent else None

    def energy_mj(self, gpu: _Gpu) -> int | None:
        """See `GpuReader`."""
        answer = self._ask("amdsmi_get_energy_count", gpu.handle)
        if not answer:
            return None
        count = answer.get("energy_accumulator", answer.get("power"))
        return None if count in (None, *_UNKNOWN) else int(count * answer["counter_resolution"] / 1000)  # steps of uJ

    def _throttle(self, gpu: _Gpu) -> list[str] | None:
        answer = self._ask("amdsmi_get_violation_status", gpu.handle)
        if answer is None:
            return None
        return list(dict.fromkeys(word for name, word in _THROTTLE.items() if answer.get(name) is True))

    def is_lost(self, error: Exception) -> bool:
        """See `GpuReader`: a GPU without its files of the kernel's is gone."""
        del error
        return True

    def read(self, gpu: _Gpu, reading: Reading) -> None:
        """See `GpuReader`."""
        api, handle = self.api, gpu.handle
        kind = api.AmdSmiMemoryType.VRAM
        reading.memory_total_bytes = int(api.amdsmi_get_gpu_memory_total(handle, kind))  # which all GPUs report
        reading.memory_used_bytes = self._ask("amdsmi_get_gpu_memory_usage", handle, kind)
        activity = self._ask("amdsmi_get_gpu_activity", handle) or {}
        reading.utilisation_percent = _known(activity.get("gfx_activity"))
        reading.memory_bandwidth_percent = _known(activity.get("umc_activity"))
        reading.decoder_percent = _known(activity.get("mm_activity"))
        power = self._ask("amdsmi_get_power_info", handle) or {}
        for name in ("current_socket_power", "average_socket_power", "socket_power"):
            if reading.power_mw is None and _known(power.get(name)) is not None:
                reading.power_mw = int(power[name] * 1000)
        caps = self._ask("amdsmi_get_power_cap_info", handle) or {}
        cap = _known(caps.get("power_cap"))
        reading.power_limit_mw = None if cap is None else int(cap / 1000 if cap > 100_000 else cap * 1000)  # uW, or W
        reading.energy_mj = self.energy_mj(gpu)
        self._read_temperatures(handle, reading)
        clocks = api.AmdSmiClkType
        for name, clock in (("graphics", clocks.GFX), ("memory", clocks.MEM), ("video", clocks.VCLK0)):
            answer = self._ask("amdsmi_get_clock_info", handle, clock) or {}
            setattr(reading, f"clock_{name}_mhz", _known(answer.get("clk")))
            if name != "video":
                setattr(reading, f"clock_{name}_max_mhz", _known(answer.get("max_clk")))
        reading.throttle = self._throttle(gpu)
        self._read_errors(handle, reading)
        pcie = self._ask("amdsmi_get_pcie_info", handle) or {}
        static, now = pcie.get("pcie_static", {}), pcie.get("pcie_metric", {})
        reading.pcie_width_max = _known(static.get("max_pcie_width"))
        reading.pcie_width = _known(now.get("pcie_width"))
        reading.pcie_generation_max = _known(
            static.get("max_pcie_interface_version", static.get("pcie_interface_version"))
        )
        reading.pcie_generation = _generation(_known(now.get("pcie_speed")))
        reading.pcie_replays = _known(now.get("pcie_replay_count"))
        reading.links = self._links(handle)
        if not gpu.fixed:
            gpu.fixed = {"vbios": self._field("amdsmi_get_gpu_vbios_info", "version", handle)}
        reading.vbios = gpu.fixed["vbios"]

    def _read_temperatures(self, handle: Any, reading: Reading) -> None:
        sensor, metric = self.api.AmdSmiTemperatureType, self.api.AmdSmiTemperatureMetric
        hottest = sensor.HOTSPOT
        reading.temperature_c = self._ask("amdsmi_get_temp_metric", handle, hottest, metric.CURRENT)
        if reading.temperature_c is None:
            hottest = sensor.EDGE
            reading.temperature_c = self._ask("amdsmi_get_temp_metric", handle, hottest, metric.CURRENT)
        reading.temperature_slowdown_c = self._ask("amdsmi_get_temp_metric", handle, hottest, metric.CRITICAL)
        reading.temperature_shutdown_c = self._ask("amdsmi_get_temp_metric", handle, hottest, metric.EMERGENCY)
        reading.temperature_memory_c = self._ask("amdsmi_get_temp_metric", handle, sensor.VRAM, metric.CURRENT)

    def _read_errors(self, handle: Any, reading: Reading) -> None:
        blocks = self._ask("amdsmi_get_gpu_ecc_enabled", handle)
        reading.ecc_enabled = None if blocks is None else blocks != 0
        errors = self._ask("amdsmi_get_gpu_total_ecc_count", handle) or {}
        reading.ecc_corrected = _known(errors.get("correctable_count"))
        reading.ecc_uncorrected = _known(errors.get("uncorrectable_count"))
        memory = self._ask("amdsmi_get_gpu_ecc_count", handle, self.api.AmdSmiGpuBlock.UMC) or {}
        inside = _known(memory.get("uncorrectable_count"))
        if reading.ecc_uncorrected is not None and inside is not None:
            reading.ras_uncorrected = max(0, reading.ecc_uncorrected - inside)
        pages = self._ask("amdsmi_get_gpu_bad_page_info", handle)
        if isinstance(pages, list):
            reading.pages_retired = len(pages)
            pending = self.api.AmdSmiMemoryPageStatus.PENDING
            reading.pages_pending = any(page.get("status") == pending for page in pages)

    def _links(self, handle: Any) -> list[Link]:
        metrics = self._ask("amdsmi_get_link_metrics", handle) or {}
        status = self._ask("amdsmi_get_gpu_xgmi_link_status", handle) or {}
        found = []
        for number, link in enumerate(metrics.get("links", [])[: metrics.get("num_links", 0)]):
            sent, got = _known(link.get("write")), _known(link.get("read"))
            found.append(
                Link(
                    number,
                    up=link.get("bit_rate", 0) > 0 if not status else None,
                    tx_bytes=None if sent is None else sent * _KIB,
                    rx_bytes=None if got is None else got * _KIB,
                )
            )
        for link, word in zip(found, status.get("status", []), strict=False):
            text = str(word).upper()
            link.up = None if "DISABLE" in text or text == "X" else text in ("U", "UP", "1") or text.endswith("_UP")
        return found

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self.api, function)(*arguments)
        except self.failures:
            return None

    def _field(self, function: str, name: str, *arguments: Any) -> Any:
        answer = self._ask(function, *arguments)
        return _known(answer.get(name)) if isinstance(answer, dict) else None


def _known(value: Any) -> Any:
    return None if value in _UNKNOWN else value


def _generation(speed: int | None) -> int | None:
    """Of PCIe, by its speed in MT/s."""
    return None if not speed else {2500: 1, 5000: 2, 8000: 3, 16000: 4, 32000: 5, 64000: 6}.get(int(speed))
