"""Intel GPUs through Level Zero's system management interface.

Reference of the functions: the Level Zero specification, chapter "Sysman".
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from gres_probe.inventory import Ecc, Gpu, Health, Link, LinkType, Problem, Vendor
from gres_probe.level_zero import (
    DEVICE_LOST,
    LIBRARY,
    UNINITIALIZED,
    LevelZero,
    LevelZeroError,
    LoaderMissingError,
    LoaderTooOldError,
)
from gres_probe.machine import Machine, pci_address
from gres_probe.vendors import Findings, VendorSpec, Verdict, usable_memory
from sluice.base.errors import SluiceError
from sluice.base.text import one_line

_MIB = 1 << 20
_PCI_VENDOR = 0x8086
_GPU = 1  # ZES_DEVICE_TYPE_GPU
_INTEGRATED = 1  # ZE_DEVICE_PROPERTY_FLAG_INTEGRATED
_ON_DEVICE = 1  # ZES_MEM_LOC_DEVICE
_ENGINE_GROUPS = (0, 1)  # ZES_ENGINE_GROUP_ALL, else _COMPUTE_ALL
_SENSORS = (1, 0)  # ZES_TEMP_SENSORS_GPU, else _GLOBAL
_HARDWARE_ERRORS = slice(3, 6)  # ZES_RAS_ERROR_CAT_COMPUTE_ERRORS, _NON_COMPUTE_ERRORS, _CACHE_ERRORS
_PORT_UP = (1, 2)  # ZES_FABRIC_PORT_STATUS_HEALTHY, _DEGRADED
_PORT_FAILED = 3
_SAMPLE_SECONDS = 0.02  # between the two readings of the engines' counters


class _Device:
    """One device of sysman; `ask` returns None for what this driver or board does not report."""

    def __init__(self, sysman: LevelZero, handle: Any) -> None:
        self.sysman = sysman
        self.handle = handle
        self.properties = sysman.get("zesDeviceGetProperties", "zes_device_properties_t", handle)

    def ask(self, function: str, structure: str, handle: Any = None, *arguments: Any) -> Any:
        """A structure, or None. Raises LevelZeroError for a lost device only."""
        try:
            return self.sysman.get(function, structure, self.handle if handle is None else handle, *arguments)
        except LevelZeroError as error:
            if error.result == DEVICE_LOST:
                raise
            return None

    def parts(self, kind: str, properties: str, structure: str) -> list[tuple[Any, Any]]:
        """The components of a kind, e.g. memory modules, with their properties."""
        try:
            handles = self.sysman.handles(f"zesDeviceEnum{kind}", self.handle)
        except LevelZeroError as error:
            if error.result == DEVICE_LOST:
                raise
            return []
        found = [(handle, self.ask(properties, structure, handle)) for handle in handles]
        return [(handle, values) for handle, values in found if values is not None]


def _start() -> tuple[LevelZero, list[Any]]:
    """Sysman and its devices. Raises SluiceError."""
    try:
        sysman = LevelZero()
    except LoaderMissingError as error:
        raise VENDOR.library_missing() from error
    except LoaderTooOldError as error:
        raise SluiceError(
            f"the Level Zero loader {error} is too old: it lacks zesInit", remedy="install Level Zero 1.5 or later"
        ) from error
    # This process only: the caller's settings for its own programs must not hide GPUs, split them or disable zesInit.
    for variable in ("ZE_AFFINITY_MASK", "ZES_ENABLE_SYSMAN"):
        os.environ.pop(variable, None)
    os.environ["ZE_FLAT_DEVICE_HIERARCHY"] = "COMPOSITE"
    try:
        sysman.call("zesInit", 0)
        handles = [
            device for driver in sysman.handles("zesDriverGet") for device in sysman.handles("zesDeviceGet", driver)
        ]
    except LevelZeroError as error:
        remedy = VENDOR.remedy if error.result == UNINITIALIZED else "see dmesg"
        raise SluiceError(f"Level Zero does not start: {error}", remedy=remedy) from error
    return sysman, handles


def open_devices() -> tuple[LevelZero, list[tuple[str, Any]]]:
    """Sysman, and the UUID and handle of each device that is not lost. Raises SluiceError, LevelZeroError."""
    sysman, handles = _start()
    found = []
    for handle in handles:
        try:
            device = _Device(sysman, handle)
        except LevelZeroError as error:
            if error.result != DEVICE_LOST:
                raise
            continue  # nothing is known of a lost one; the others are still there
        found.append((_uuid_text(bytes(device.properties.core.uuid)), handle))
    return sysman, found


def probe(machine: Machine) -> Findings:
    """Read all Intel GPUs; see `VendorSpec`. Graphics that are part of the processor are not for jobs."""
    sysman, handles = _start()
    findings = Findings()
    devices: dict[int, _Device] = {}
    index = 0
    capabilities = sysman.ip_versions()
    for handle in handles:
        try:
            device = _Device(sysman, handle)
            core = device.properties.core
            if core.vendorId != _PCI_VENDOR or core.type != _GPU or core.flags & _INTEGRATED:
                continue
            devices[index] = device
            findings.gpus.append(_read_gpu(device, index, capabilities, machine))
        except (LevelZeroError, ValueError) as error:
            remedy = "see dmesg; reset the GPU or reboot the node"
            findings.problems.append(Problem(Vendor.INTEL, f"GPU {index}: {one_line(str(error))}", remedy, index))
        index += 1
    read = {gpu.index: devices[gpu.index] for gpu in findings.gpus}
    _read_utilisation(read, findings.gpus)
    findings.links = _xe_links(read)
    return findings


def _read_gpu(device: _Device, index: int, capabilities: dict[bytes, int], machine: Machine) -> Gpu:
    sysman, properties = device.sysman, device.properties
    uuid = bytes(properties.core.uuid)
    address = sysman.get("zesDevicePciGetProperties", "zes_pci_properties_t", device.handle)
    pci = pci_address(address.domain, address.bus, address.device, address.function)
    render, card = machine.drm_files(pci)
    if not render:
        raise ValueError(f"{pci} has no render node; is it in use by another driver?")
    total, usable, used = _memory(device)
    temperature, most_temperature = _temperature(device)
    gpu = Gpu(
        vendor=Vendor.INTEL,
        index=index,
        uuid=_uuid_text(uuid),
        model=_model(device),
        device_file=render,
        minor=int(render.removeprefix("/dev/dri/renderD")),
        pci_address=pci,
        memory_total_mib=total,
        memory_usable_mib=usable,
        extra_device_files=[card] if card else [],
        memory_used_mib=used,
        capability=_ip_version(capabilities.get(uuid, 0)),
        driver_version=one_line(sysman.text(properties.driverVersion)),
        firmware_version=_firmware(device),
        ecc=_ecc(device),
        temperature_c=temperature,
        temperature_shutdown_c=most_temperature,
    )
    _read_power(device, gpu)
    _judge(device, gpu)
    return gpu


def _uuid_text(uuid: bytes) -> str:
    """The UUID as Intel's own tools print it: the last byte first."""
    digits = uuid[::-1].hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _model(device: _Device) -> str:
    core = device.properties.core
    for characters in (core.name, device.properties.modelName):
        name = one_line(device.sysman.text(characters))
        if name:
            return name
    return f"Intel {core.deviceId:#06x}"


def _ip_version(version: int) -> str:
    """Architecture, release and revision of a GPU's IP, e.g. 12.60.7 for Data Center GPU Max; "" for none."""
    return f"{version >> 22}.{version >> 14 & 0xFF}.{version & 0x3F}" if version else ""


def _memory(device: _Device) -> tuple[int, int, int | None]:
    """Total, usable and used memory in MiB, summed over the GPU's memory modules."""
    total = size = free = 0
    for module, properties in device.parts("MemoryModules", "zesMemoryGetProperties", "zes_mem_properties_t"):
        state = device.ask("zesMemoryGetState", "zes_mem_state_t", module)
        if properties.location == _ON_DEVICE and state is not None:
            total += properties.physicalSize or state.size  # drivers before 2023 give no physical size
            size += state.size
            free += state.free
    if not size:
        raise ValueError("the driver does not report the size of its memory")
    try:
        processes = device.sysman.processes(device.handle) if os.geteuid() == 0 else None  # else only one's own
    except LevelZeroError:
        processes = None
    if processes is None:
        return total // _MIB, size // _MIB, (size - free) // _MIB
    held = sum(process.memSize for process in processes)
    return total // _MIB, usable_memory(size, max(0, size - free - held)), min(held, size) // _MIB


def _temperature(device: _Device) -> tuple[int | None, int | None]:
    """The temperature and the highest that the GPU tolerates."""
    sensors = device.parts("TemperatureSensors", "zesTemperatureGetProperties", "zes_temp_properties_t")
    for kind in _SENSORS:
        for sensor, properties in sensors:
            if properties.type == kind:
                try:
                    now = round(device.sysman.double("zesTemperatureGetState", sensor))
                except LevelZeroError:
                    continue
                return now, round(properties.maxTemperature) if properties.maxTemperature > 0 else None
    return None, None


def _read_power(device: _Device, gpu: Gpu) -> None:
    """The sustained limit and what it can be set to, of the whole GPU."""
    domains = device.parts("PowerDomains", "zesPowerGetProperties", "zes_power_properties_t")
    for domain, properties in domains:
        if not properties.onSubdevice:
            with suppress(LevelZeroError):
                gpu.power_limit_w = _watts(device.sysman.sustained_power_mw(domain))
            gpu.power_limit_max_w = _watts(properties.maxLimit)
            gpu.power_limit_min_w = _watts(properties.minLimit)
            gpu.power_limit_default_w = _watts(properties.defaultLimit)
            return


def _watts(milliwatts: int | None) -> int | None:
    """None for what sysman does not know, which is -1."""
    return round(milliwatts / 1000) if milliwatts is not None and milliwatts > 0 else None


def _firmware(device: _Device) -> str:
    """The version of the graphics firmware, else of the first one listed."""
    listed = device.parts("Firmwares", "zesFirmwareGetProperties", "zes_firmware_properties_t")
    versions = {device.sysman.text(values.name): one_line(device.sysman.text(values.version)) for _, values in listed}
    return versions["GFX"] if "GFX" in versions else next(iter(versions.values()), "")


def _ecc(device: _Device) -> Ecc:
    state = device.ask("zesDeviceGetEccState", "zes_device_ecc_properties_t")
    ecc = Ecc(None if state is None or state.currentState == 0 else state.currentState == 1)
    for handle, properties in device.parts("RasErrorSets", "zesRasGetProperties", "zes_ras_properties_t"):
        errors = device.ask("zesRasGetState", "zes_ras_state_t", handle, 0)
        if errors is not None:
            count = sum(errors.category[_HARDWARE_ERRORS])
            if properties.type == 0:  # sets of the tiles add up
                ecc.corrected = (ecc.corrected or 0) + count
            else:
                ecc.uncorrected = (ecc.uncorrected or 0) + count
    return ecc


def _judge(device: _Device, gpu: Gpu) -> None:
    verdict = Verdict()
    state = device.ask("zesDeviceGetState", "zes_device_state_t")
    if state is not None:
        verdict.add(state.reset & 1, Health.FAILED, "the GPU is wedged and must be reset")
        verdict.add(state.reset & 2, Health.DEGRADED, "a repair of the GPU waits for its reset")
    for module, _ in device.parts("MemoryModules", "zesMemoryGetProperties", "zes_mem_properties_t"):
        memory = device.ask("zesMemoryGetState", "zes_mem_state_t", module)
        if memory is not None and memory.health:
            verdict.add(memory.health == 2, Health.DEGRADED, "excessive corrected memory errors")
            verdict.add(memory.health == 3, Health.DEGRADED, "runs with less memory to cover bad banks")
            verdict.add(memory.health == 4, Health.FAILED, "excessive memory errors; the GPU is to be replaced")
    errors = gpu.ecc.uncorrected
    verdict.add(errors, Health.DEGRADED, f"{errors} uncorrected errors")
    for port, _ in device.parts("FabricPorts", "zesFabricPortGetProperties", "zes_fabric_port_properties_t"):
        link = device.ask("zesFabricPortGetState", "zes_fabric_port_state_t", port)
        if link is not None and link.status == _PORT_FAILED:
            verdict.add(True, Health.DEGRADED, "an Xe Link port failed")
            break
    verdict.temperature(gpu)
    gpu.health, gpu.health_reasons = verdict.health, verdict.reasons


def _read_utilisation(devices: dict[int, _Device], gpus: list[Gpu]) -> None:
    """Fill in the utilisation from two readings of the engines' counters; one wait for all GPUs."""
    engines = {index: _busiest_engines(device) for index, device in devices.items()}
    before = {index: [_activity(devices[index], engine) for engine in found] for index, found in engines.items()}
    if not any(engines.values()):
        return
    time.sleep(_SAMPLE_SECONDS)
    for gpu in gpus:
        shares = []
        for engine, first in zip(engines[gpu.index], before[gpu.index], strict=True):
            second = _activity(devices[gpu.index], engine)
            if first is not None and second is not None and second.timestamp > first.timestamp:
                shares.append((second.activeTime - first.activeTime) / (second.timestamp - first.timestamp))
        if shares:
            gpu.utilisation_percent = min(100, max(0, round(100 * max(shares))))


def _busiest_engines(device: _Device) -> list[Any]:
    try:
        groups = device.parts("EngineGroups", "zesEngineGetProperties", "zes_engine_properties_t")
    except LevelZeroError:  # lost since it was read; the next probe reports it
        return []
    for kind in _ENGINE_GROUPS:
        found = [engine for engine, properties in groups if properties.type == kind]
        if found:
            return found
    return []


def _activity(device: _Device, engine: Any) -> Any:
    try:
        return device.ask("zesEngineGetActivity", "zes_engine_stats_t", engine)
    except LevelZeroError:
        return None


def _xe_links(devices: dict[int, _Device]) -> dict[tuple[int, int], Link]:
    """Xe Links by pairs of GPUs: ports that are up and whose other end is a port of another GPU of this node."""
    owner: dict[tuple[int, int, int], int] = {}
    ends: list[tuple[int, tuple[int, int, int]]] = []
    for index, device in devices.items():
        try:
            ports = device.parts("FabricPorts", "zesFabricPortGetProperties", "zes_fabric_port_properties_t")
            for port, properties in ports:
                owner[_port(properties.portId)] = index
                state = device.ask("zesFabricPortGetState", "zes_fabric_port_state_t", port)
                if state is not None and state.status in _PORT_UP:
                    ends.append((index, _port(state.remotePortId)))
        except LevelZeroError:
            continue
    widths = Counter((index, owner[remote]) for index, remote in ends if remote in owner)
    return {(one, other): Link(LinkType.XELINK, width) for (one, other), width in widths.items() if one < other}


def _port(identity: Any) -> tuple[int, int, int]:
    return identity.fabricId, identity.attachId, identity.portNumber


VENDOR = VendorSpec(
    name="intel",
    title="Intel",
    pci_vendor=_PCI_VENDOR,
    gres_flag="intel_gpu_env",
    library=LIBRARY,
    remedy="install Intel's Level Zero driver (level-zero 1.5 or later and intel-level-zero-gpu)",
    probe=probe,
    integrated=("0000:00:02.0",),
)
