"""AMD GPUs through AMD SMI, by the package amdsmi.

Reference of the functions: AMD's AMD SMI Python API. The package prints to standard output and fails unpredictably
when it is imported without its library, so `gres_probe.probe` gives this code no standard output.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from gres_probe.inventory import Ecc, Gpu, Health, Link, LinkType, Partition, Problem, Vendor
from gres_probe.machine import Machine
from gres_probe.vendors import Findings, VendorSpec, Verdict, usable_memory
from sluice.base.errors import SluiceError
from sluice.base.text import one_line

_MIB = 1 << 20
_LIBRARY = "libamd_smi.so"
_UNKNOWN = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)  # the library's values for "unknown"


class AmdSmi:
    """amdsmi with two ways to ask: `need` what every driver answers, and `ask` what a driver may lack."""

    def __init__(self) -> None:
        try:
            import amdsmi
            from amdsmi import amdsmi_exception
        except ModuleNotFoundError as error:
            raise SluiceError(
                f"the Python package {error.name} is not installed",
                remedy="install it from ROCm, or with: pip install 'amdsmi>=7'",
            ) from error
        except KeyError as error:  # how amdsmi says that it found no library
            raise VENDOR.library_missing() from error
        except (AttributeError, ImportError, OSError) as error:
            raise SluiceError(
                f"the package amdsmi does not fit {_LIBRARY}: {one_line(str(error))}",
                remedy="install the amdsmi package of the same ROCm release as the library",
            ) from error
        self.api = amdsmi
        self.error = amdsmi_exception.AmdSmiException
        # Besides its own exceptions, the package raises those of decoding unexpected answers.
        self.failures = (self.error, ValueError, KeyError, AttributeError, TypeError)

    def need(self, function: str, *arguments: Any) -> Any:
        """An answer without which the GPU cannot be described. Raises one of `failures`."""
        return getattr(self.api, function)(*arguments)

    def ask(self, function: str, *arguments: Any) -> Any:
        """An answer, or None where this package, driver or board has none."""
        try:
            return getattr(self.api, function)(*arguments)
        except self.failures:
            return None

    def ask_field(self, function: str, name: str, *arguments: Any) -> Any:
        """One field of an answer that is a dictionary; None also where it says "N/A"."""
        answer = self.ask(function, *arguments)
        value = answer.get(name) if isinstance(answer, dict) else None
        return None if value in ("", "N/A", *_UNKNOWN) else value


def probe(machine: Machine) -> Findings:
    """Read all AMD GPUs; see `VendorSpec`."""
    smi = AmdSmi()
    try:
        smi.need("amdsmi_init")
        handles = smi.need("amdsmi_get_processor_handles")
    except smi.failures as error:
        raise SluiceError(
            f"AMD SMI does not start: {reason(error)}", remedy="load the driver: modprobe amdgpu; see dmesg"
        ) from error
    findings = Findings()
    first_handles: dict[int, Any] = {}
    for index, (_, parts) in enumerate(devices_by_gpu(smi.ask, handles)):
        first_handles[index] = parts[0][1]
        try:
            gpu = _read_gpu(smi, parts[0][1], index, machine)
            if len(parts) > 1:
                _read_partitions(smi, parts, gpu, machine)
            findings.gpus.append(gpu)
        except smi.failures as error:
            what, remedy = f"GPU {index}: {reason(error)}", "see: amd-smi static, dmesg"
            findings.problems.append(Problem(Vendor.AMD, what, remedy, index))
    findings.links = _xgmi(smi, {gpu.index: (first_handles[gpu.index], gpu.pci_address) for gpu in findings.gpus})
    return findings


def devices_by_gpu(ask: Callable[[str, Any], Any], handles: Iterable[Any]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """The library's devices by GPU, in its order: the GPU's UUID, and the devices into which it is divided, with
    theirs.

    `ask` returns a function's answer for a handle, or None. A GPU's partitions are listed as functions of one PCI
    device. Where the library gives them the GPU's UUID, ``/0``, ``/1`` and so on distinguish them; an empty one is
    unknown.
    """
    gpus: dict[str, list[tuple[str, Any]]] = {}
    for position, handle in enumerate(handles):
        address = ask("amdsmi_get_gpu_device_bdf", handle)
        place = str(address).rpartition(".")[0] if address else f"unknown {position}"
        gpus.setdefault(place, []).append((str(ask("amdsmi_get_gpu_device_uuid", handle) or ""), handle))
    found = []
    for devices in gpus.values():
        gpu = devices[0][0]
        if len({uuid for uuid, _ in devices}) < len(devices):
            devices = [(f"{gpu}/{index}", handle) for index, (_, handle) in enumerate(devices)]
        found.append((gpu, devices))
    return found


def _read_gpu(smi: AmdSmi, handle: Any, index: int, machine: Machine) -> Gpu:
    ask, field, api = smi.ask, smi.ask_field, smi.api
    address = smi.need("amdsmi_get_gpu_device_bdf", handle).lower()
    render, card = _device_files(smi, handle, address, machine)
    total, usable, used = _memory(smi, handle)
    numa = ask("amdsmi_topo_get_numa_node_number", handle)
    caps = ask("amdsmi_get_power_cap_info", handle) or {}
    errors = ask("amdsmi_get_gpu_total_ecc_count", handle) or {}
    protected = ask("amdsmi_get_gpu_ecc_enabled", handle)  # a bit for each block of the GPU
    gpu = Gpu(
        vendor=Vendor.AMD,
        index=index,
        uuid=smi.need("amdsmi_get_gpu_device_uuid", handle),
        model=model(smi, handle),
        device_file=render,
        minor=int(re.sub(r"\D", "", render)),
        pci_address=address,
        memory_total_mib=total,
        memory_usable_mib=usable,
        extra_device_files=[card] if card else [],
        memory_used_mib=used,
        utilisation_percent=field("amdsmi_get_gpu_activity", "gfx_activity", handle),
        numa_node=None if numa in _UNKNOWN else numa,
        capability=one_line(field("amdsmi_get_gpu_asic_info", "target_graphics_version", handle) or ""),
        driver_version=one_line(field("amdsmi_get_gpu_driver_info", "driver_version", handle) or ""),
        firmware_version=one_line(field("amdsmi_get_gpu_vbios_info", "version", handle) or ""),
        ecc=Ecc(
            None if protected is None else protected != 0,
            errors.get("correctable_count"),
            errors.get("uncorrectable_count"),
        ),
        power_limit_w=_watts(caps.get("power_cap")),
        power_limit_max_w=_watts(caps.get("max_power_cap")),
        power_limit_min_w=_watts(caps.get("min_power_cap")),
        power_limit_default_w=_watts(caps.get("default_power_cap")),
    )
    sensor, metric = api.AmdSmiTemperatureType, api.AmdSmiTemperatureMetric
    hottest = sensor.HOTSPOT
    if ask("amdsmi_get_temp_metric", handle, hottest, metric.CURRENT) is None:
        hottest = sensor.EDGE
    gpu.temperature_c = ask("amdsmi_get_temp_metric", handle, hottest, metric.CURRENT)
    gpu.temperature_slowdown_c = ask("amdsmi_get_temp_metric", handle, hottest, metric.CRITICAL)
    gpu.temperature_shutdown_c = ask("amdsmi_get_temp_metric", handle, hottest, metric.EMERGENCY)
    _judge(smi, handle, gpu)
    return gpu


def model(smi: AmdSmi, handle: Any) -> str:
    """The market name; an old driver or a new GPU has none, and then the PCI device number is used."""
    for function, name in (
        ("amdsmi_get_gpu_asic_info", "market_name"),
        ("amdsmi_get_gpu_board_info", "product_name"),
        ("amdsmi_get_gpu_asic_info", "device_id"),
    ):
        text = one_line(str(smi.ask_field(function, name, handle) or ""))
        if text:
            return f"AMD {text}" if text.startswith("0x") else text
    raise ValueError("the driver reports no name for it")


def _device_files(smi: AmdSmi, handle: Any, address: str, machine: Machine) -> tuple[str, str]:
    """The render node, which Slurm protects, and the card node."""
    numbers = smi.ask("amdsmi_get_gpu_enumeration_info", handle) or {}
    render, card = numbers.get("drm_render"), numbers.get("drm_card")
    files = (
        f"/dev/dri/renderD{render}" if isinstance(render, int) else "",
        f"/dev/dri/card{card}" if isinstance(card, int) else "",
    )
    if not files[0]:
        files = machine.drm_files(address)
    if not files[0]:
        raise ValueError("it has no render node; is it in use by another driver?")
    return files


def _memory(smi: AmdSmi, handle: Any) -> tuple[int, int, int | None]:
    """Total, usable and used memory in MiB; the library counts what the driver keeps as used."""
    kind = smi.api.AmdSmiMemoryType.VRAM
    total = smi.need("amdsmi_get_gpu_memory_total", handle, kind)
    used = smi.ask("amdsmi_get_gpu_memory_usage", handle, kind)
    processes = smi.ask("amdsmi_get_gpu_process_list", handle) if os.geteuid() == 0 else None  # else only one's own
    if used is None or not isinstance(processes, list):
        return total // _MIB, total // _MIB, None if used is None else used // _MIB
    held = sum(process["memory_usage"]["vram_mem"] for process in processes)
    return total // _MIB, usable_memory(total, max(0, used - held)), min(held, total) // _MIB


def _read_partitions(smi: AmdSmi, parts: list[tuple[str, Any]], gpu: Gpu, machine: Machine) -> None:
    """Describe a partitioned GPU; the kernel gives each partition an equal share of the memory."""
    modes = [smi.ask(f"amdsmi_get_gpu_{kind}_partition", parts[0][1]) for kind in ("compute", "memory")]
    profile = "-".join(one_line(mode).lower() for mode in modes if mode and mode != "N/A")
    gpu.partitioned = True
    for index, (uuid, handle) in enumerate(parts):
        address = smi.need("amdsmi_get_gpu_device_bdf", handle).lower()
        files = [file for file in _device_files(smi, handle, address, machine) if file]
        gpu.partitions.append(
            Partition(index, uuid, profile or f"1of{len(parts)}", gpu.memory_usable_mib // len(parts), files)
        )


def _judge(smi: AmdSmi, handle: Any, gpu: Gpu) -> None:
    verdict = Verdict()
    errors = gpu.ecc.uncorrected
    verdict.add(errors, Health.DEGRADED, f"{errors} uncorrected ECC errors")
    pages = smi.ask("amdsmi_get_gpu_bad_page_info", handle)
    most = smi.ask("amdsmi_get_gpu_bad_page_threshold", handle)
    if isinstance(pages, list):
        full = bool(most) and len(pages) >= most
        verdict.add(full, Health.FAILED, f"{len(pages)} bad memory pages; the GPU is to be replaced")
    links = smi.ask("amdsmi_gpu_xgmi_error_status", handle)
    verdict.add(links, Health.DEGRADED, "xGMI link errors")
    verdict.temperature(gpu)
    gpu.health, gpu.health_reasons = verdict.health, verdict.reasons


def _xgmi(smi: AmdSmi, gpus: dict[int, tuple[Any, str]]) -> dict[tuple[int, int], Link]:
    """xGMI by pairs of GPUs; the width is the number of direct links, 0 where the library does not count them."""
    xgmi = smi.api.AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI
    links: dict[tuple[int, int], Link] = {}
    for one, (handle, _) in gpus.items():
        metrics = smi.ask("amdsmi_get_link_metrics", handle) or {}
        direct = Counter(
            link["bdf"].lower()
            for link in metrics.get("links", [])[: metrics.get("num_links", 0)]
            if link["link_type"] == xgmi
        )
        for other, (peer, address) in gpus.items():
            if one < other:
                path = smi.ask("amdsmi_topo_get_link_type", handle, peer)
                if path is not None and path["type"] == xgmi:
                    links[one, other] = Link(LinkType.XGMI, direct[address])
    return links


def _watts(microwatts: int | None) -> int | None:
    return None if microwatts is None else round(microwatts / 1_000_000)


def reason(error: Exception) -> str:
    """The library's own message; amdsmi wraps it in lines and prefixes."""
    words = getattr(error, "err_info", None) or getattr(error, "err_msg", None) or str(error)
    return one_line(str(words)).removeprefix("AMDSMI_STATUS_")


VENDOR = VendorSpec(
    name="amd",
    title="AMD",
    pci_vendor=0x1002,
    gres_flag="amd_gpu_env",
    library=_LIBRARY,
    remedy="install AMD SMI (the package amd-smi-lib of ROCm)",
    probe=probe,
    device_pattern="kfd",
)
