"""NVIDIA GPUs through NVML, by the package nvidia-ml-py.

Reference of the functions: NVIDIA's NVML API reference; of instances and their capability files: its MIG user guide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ctypes import byref
from typing import Any
from uuid import UUID

from gres_probe.cores import fold_ranges
from gres_probe.inventory import Ecc, Gpu, GpuFabric, Health, Link, LinkType, Partition, Problem, Vendor
from gres_probe.machine import Machine, pci_address
from gres_probe.vendors import Findings, VendorSpec, Verdict, usable_memory
from sluice.base.errors import SluiceError
from sluice.base.text import one_line

_MIB = 1 << 20
_AFFINITY_WORDS = 64  # 64-bit words of the affinity mask: 4,096 processors


class _Nvml:
    """pynvml with two ways to ask: `need` what every driver answers, and `ask` what a driver may lack."""

    def __init__(self) -> None:
        import pynvml

        self.api = pynvml

    def need(self, function: str, *arguments: Any, **options: Any) -> Any:
        """An answer without which the GPU cannot be described. Raises NVMLError."""
        return getattr(self.api, function)(*arguments, **options)

    def ask(self, function: str, *arguments: Any, **options: Any) -> Any:
        """An answer, or None where this package, driver or board has none. Raises NVMLError for a lost GPU only."""
        api = self.api
        try:
            return getattr(api, function)(*arguments, **options)
        except (api.NVMLError_GpuIsLost, api.NVMLError_ResetRequired):
            raise
        except (api.NVMLError, api.NVMLLibraryMismatchError, AttributeError, UnicodeDecodeError):
            return None


def probe(machine: Machine) -> Findings:
    """Read all NVIDIA GPUs; see `VendorSpec`."""
    nvml = _Nvml()
    api = nvml.api
    try:
        api.nvmlInit()
    except api.NVMLError_LibraryNotFound as error:
        raise VENDOR.library_missing() from error
    except api.NVMLError_DriverNotLoaded as error:
        raise SluiceError("the driver is not loaded", remedy="load it: modprobe nvidia") from error
    except api.NVMLError_LibRmVersionMismatch as error:
        raise SluiceError(
            "the library and the loaded kernel module are of different versions",
            remedy="reboot the node, or unload and load the nvidia modules",
        ) from error
    except api.NVMLError as error:
        raise SluiceError(f"NVML does not start: {error}", remedy="see: nvidia-smi, dmesg") from error

    findings = Findings()
    handles: dict[int, Any] = {}
    driver = one_line(nvml.ask("nvmlSystemGetDriverVersion") or "")
    try:
        count = nvml.need("nvmlDeviceGetCount")
    except api.NVMLError as error:
        raise SluiceError(f"NVML does not count the GPUs: {error}", remedy="see: nvidia-smi, dmesg") from error
    for index in range(count):
        try:
            handles[index] = nvml.need("nvmlDeviceGetHandleByIndex", index)
            gpu = _read_gpu(nvml, handles[index], index, driver)
            _read_instances(nvml, handles[index], gpu, machine, findings.problems)
            findings.gpus.append(gpu)
        except (api.NVMLError, api.NVMLLibraryMismatchError, ValueError) as error:
            findings.problems.append(_unreadable(api, index, error))
    findings.links = _nvlinks(nvml, {gpu.index: (handles[gpu.index], gpu.pci_address) for gpu in findings.gpus})
    return findings


def _unreadable(api: Any, index: int, error: Exception) -> Problem:
    remedy = "see: nvidia-smi -q, dmesg"
    if isinstance(error, api.NVMLError_GpuIsLost | api.NVMLError_ResetRequired):
        remedy = "drain the node; reset the GPU or reboot, and see dmesg for its XID"
    elif isinstance(error, api.NVMLError_NoPermission):
        remedy = "probe as root and outside of jobs"
    elif isinstance(error, api.NVMLError_FunctionNotFound):
        remedy = "the driver is too old to be read; update it"
    return Problem(Vendor.NVIDIA, f"GPU {index}: {one_line(str(error))}", remedy, index)


def _read_gpu(nvml: _Nvml, handle: Any, index: int, driver: str) -> Gpu:
    api, ask = nvml.api, nvml.ask
    minor = nvml.need("nvmlDeviceGetMinorNumber", handle)
    address = _address(nvml.need("nvmlDeviceGetPciInfo", handle).busId)
    if not address:
        raise ValueError("the driver reports no PCI address for it")
    total, usable, used = _memory(nvml, handle)
    rates = ask("nvmlDeviceGetUtilizationRates", handle)
    affinity = ask("nvmlDeviceGetCpuAffinity", handle, _AFFINITY_WORDS)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    limits = ask("nvmlDeviceGetPowerManagementLimitConstraints", handle)
    ecc = ask("nvmlDeviceGetEccMode", handle)
    gpu = Gpu(
        vendor=Vendor.NVIDIA,
        index=index,
        uuid=nvml.need("nvmlDeviceGetUUID", handle),
        model=one_line(nvml.need("nvmlDeviceGetName", handle)),
        device_file=f"/dev/nvidia{minor}",
        minor=minor,
        pci_address=address,
        memory_total_mib=total,
        memory_usable_mib=usable,
        memory_used_mib=used,
        utilisation_percent=None if rates is None else rates.gpu,
        cores="" if affinity is None else _cores(affinity),
        capability="" if capability is None else "{}.{}".format(*capability),
        driver_version=driver,
        firmware_version=one_line(ask("nvmlDeviceGetVbiosVersion", handle) or ""),
        ecc=Ecc(
            None if ecc is None else bool(ecc[0]),
            ask("nvmlDeviceGetTotalEccErrors", handle, api.NVML_MEMORY_ERROR_TYPE_CORRECTED, api.NVML_AGGREGATE_ECC),
            ask("nvmlDeviceGetTotalEccErrors", handle, api.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, api.NVML_AGGREGATE_ECC),
        ),
        power_limit_w=_watts(ask("nvmlDeviceGetPowerManagementLimit", handle)),
        power_limit_max_w=None if limits is None else _watts(limits[1]),
        power_limit_min_w=None if limits is None else _watts(limits[0]),
        power_limit_default_w=_watts(ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        temperature_c=ask("nvmlDeviceGetTemperature", handle, api.NVML_TEMPERATURE_GPU),
        temperature_slowdown_c=ask(
            "nvmlDeviceGetTemperatureThreshold", handle, api.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        ),
        temperature_shutdown_c=ask(
            "nvmlDeviceGetTemperatureThreshold", handle, api.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN
        ),
    )
    if gpu.temperature_c is None:  # the older call is deprecated
        gpu.temperature_c = ask("nvmlDeviceGetTemperatureV", handle, api.NVML_TEMPERATURE_GPU)
    _judge(nvml, handle, gpu)
    return gpu


def _memory(nvml: _Nvml, handle: Any) -> tuple[int, int, int | None]:
    """Total, usable and used memory in MiB.

    Drivers before R510 count what they reserve as used; there it is what no process holds.
    """
    info = nvml.ask("nvmlDeviceGetMemoryInfo", handle, version=getattr(nvml.api, "nvmlMemory_v2", None))
    if info is not None and hasattr(info, "reserved"):
        return info.total // _MIB, (info.total - info.reserved) // _MIB, info.used // _MIB
    info = nvml.need("nvmlDeviceGetMemoryInfo", handle)
    held = 0
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        held += sum(process.usedGpuMemory or 0 for process in nvml.ask(function, handle) or [])
    return info.total // _MIB, usable_memory(info.total, max(0, info.used - held)), min(held, info.total) // _MIB


def _judge(nvml: _Nvml, handle: Any, gpu: Gpu) -> None:
    api, ask, verdict = nvml.api, nvml.ask, Verdict()
    rows = ask("nvmlDeviceGetRemappedRows", handle)
    if rows is not None:
        verdict.add(rows[3], Health.FAILED, "remapping of a memory row failed; the GPU is to be replaced")
        verdict.add(rows[2], Health.DEGRADED, "remapping of a memory row waits for a reset of the GPU")
    pages = ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)
    verdict.add(pages, Health.DEGRADED, "retirement of a memory page waits for a reset of the GPU")
    errors = ask("nvmlDeviceGetTotalEccErrors", handle, api.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, api.NVML_VOLATILE_ECC)
    verdict.add(errors, Health.DEGRADED, f"{errors} uncorrected ECC errors since the driver was loaded")
    gpu.fabric, state = _fabric(nvml, handle)
    for health, reason in _recovery(nvml, handle), state:
        verdict.add(None if health is None else health is not Health.OK, health or Health.OK, reason)
    verdict.temperature(gpu)
    gpu.health, gpu.health_reasons = verdict.health, verdict.reasons


def _recovery(nvml: _Nvml, handle: Any) -> tuple[Health | None, str]:
    """The recovery action that the driver itself asks for."""
    field = getattr(nvml.api, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    values = nvml.ask("nvmlDeviceGetFieldValues", handle, [field]) if field is not None else None
    if not values or values[0].nvmlReturn != nvml.api.NVML_SUCCESS:
        return None, ""
    actions = {1: "a reset of the GPU", 2: "a reboot of the node", 3: "draining of peer traffic", 4: "drain and reset"}
    action = values[0].value.uiVal
    if action == 0:
        return Health.OK, ""
    return Health.FAILED, f"the driver asks for {actions.get(action, f'recovery action {action}')}"


def _fabric(nvml: _Nvml, handle: Any) -> tuple[GpuFabric | None, tuple[Health | None, str]]:
    """The domain of NVLinks between nodes that a GPU is in, and whether it has joined: CUDA does not start before."""
    structure = getattr(nvml.api, "c_nvmlGpuFabricInfo_t", None)
    if structure is None:
        return None, (None, "")
    info = structure()
    if nvml.ask("nvmlDeviceGetGpuFabricInfo", handle, byref(info)) is None:
        return None, (None, "")
    if info.state == nvml.api.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None, (None, "")
    if info.state != nvml.api.NVML_GPU_FABRIC_STATE_COMPLETED:
        return None, (Health.DEGRADED, "not yet part of the NVSwitch fabric; check that nvidia-fabricmanager runs")
    if info.status:
        return None, (Health.FAILED, f"NVSwitch fabric error {info.status}")
    cluster = UUID(bytes=bytes(info.clusterUuid))
    # Zeros where the switches are in this node: no other node is reached.
    return GpuFabric(str(cluster), info.cliqueId) if cluster.int else None, (Health.OK, "")


def _read_instances(nvml: _Nvml, handle: Any, gpu: Gpu, machine: Machine, problems: list[Problem]) -> None:
    mode = nvml.ask("nvmlDeviceGetMigMode", handle)
    if mode is None or mode[0] != nvml.api.NVML_DEVICE_MIG_ENABLE:
        return
    gpu.partitioned = True
    capabilities = _capability_minors(machine)
    for index in range(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        instance = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if instance is None:
            continue
        try:
            group = nvml.need("nvmlDeviceGetGpuInstanceId", instance)
            compute = nvml.need("nvmlDeviceGetComputeInstanceId", instance)
            files = [gpu.device_file]
            for capability in (f"gpu{gpu.minor}/gi{group}", f"gpu{gpu.minor}/gi{group}/ci{compute}"):
                files.append(f"/dev/nvidia-caps/nvidia-cap{capabilities[f'{capability}/access']}")
            gpu.partitions.append(
                Partition(
                    index=index,
                    uuid=nvml.need("nvmlDeviceGetUUID", instance),
                    profile=_profile(nvml, instance),
                    memory_mib=_memory(nvml, instance)[1],
                    device_files=files,
                )
            )
        except (nvml.api.NVMLError, nvml.api.NVMLLibraryMismatchError) as error:
            what = f"GPU {gpu.index}, MIG device {index}: {one_line(str(error))}"
            problems.append(Problem(Vendor.NVIDIA, what, "see: nvidia-smi -L, dmesg", gpu.index))
        except KeyError as error:
            what = f"GPU {gpu.index}, MIG device {index}: the driver lists no capability file for {error.args[0]}"
            remedy = "make the files: nvidia-modprobe -m; see /proc/driver/nvidia-caps/mig-minors"
            problems.append(Problem(Vendor.NVIDIA, what, remedy, gpu.index))


def _profile(nvml: _Nvml, instance: Any) -> str:
    """The instance's profile, as `nvidia-smi -L` prints it: 1g.10gb, or 1c.3g.40gb for a part of the compute slices."""
    name = re.search(r" MIG (\S+)$", nvml.ask("nvmlDeviceGetName", instance) or "")
    if name:
        return one_line(name.group(1))
    attributes = nvml.need("nvmlDeviceGetAttributes_v2", instance)
    slices, part = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    gigabytes = -(-attributes.memorySizeMB // 1024)
    return f"{'' if part == slices else f'{part}c.'}{slices}g.{gigabytes}gb"


def _capability_minors(machine: Machine) -> dict[str, int]:
    try:
        text = (machine.proc_root / "driver/nvidia-caps/mig-minors").read_text()
    except OSError:
        return {}
    return {name: int(minor) for name, minor in re.findall(r"^(\S+) (\d+)$", text, re.MULTILINE)}


def _nvlinks(nvml: _Nvml, gpus: dict[int, tuple[Any, str]]) -> dict[tuple[int, int], Link]:
    """NVLinks by pairs of GPUs: direct ones, or as many as both have to common switches."""
    by_address = {address: index for index, (_, address) in gpus.items()}
    direct: dict[tuple[int, int], int] = {}
    switched: dict[int, list[str]] = {index: [] for index in gpus}
    for index, (handle, _) in gpus.items():
        try:
            ends = list(_link_ends(nvml, handle))
        except nvml.api.NVMLError:  # lost since it was read; the next probe reports it
            continue
        for remote, to_switch in ends:
            if remote in by_address:
                pair = (index, by_address[remote])
                direct[pair] = direct.get(pair, 0) + 1
            elif to_switch:
                switched[index].append(remote)
    links = {}
    for one in gpus:
        for other in gpus:
            if one < other:
                width = max(direct.get((one, other), 0), direct.get((other, one), 0))
                if not width and set(switched[one]) & set(switched[other]):
                    width = min(len(switched[one]), len(switched[other]))
                if width:
                    links[one, other] = Link(LinkType.NVLINK, width)
    return links


def _link_ends(nvml: _Nvml, handle: Any) -> Iterator[tuple[str, bool]]:
    """The other end of each active NVLink: PCI address ("" where a virtual machine hides it), and whether a switch."""
    api = nvml.api
    for number in range(api.NVML_NVLINK_MAX_LINKS):
        if nvml.ask("nvmlDeviceGetNvLinkState", handle, number) != api.NVML_FEATURE_ENABLED:
            continue
        info = nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
        kind = nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
        yield "" if info is None else _address(info.busId), kind == api.NVML_NVLINK_DEVICE_TYPE_SWITCH


def _address(bus_id: bytes | str) -> str:
    text = bus_id.decode(errors="replace") if isinstance(bus_id, bytes) else bus_id
    match = re.fullmatch(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)\.([0-9a-f]+)", text.lower())
    return pci_address(*(int(part, 16) for part in match.groups())) if match else ""


def _cores(mask: Any) -> str:
    return fold_ranges(
        64 * word + bit for word, bits in enumerate(mask) if bits for bit in range(64) if bits >> bit & 1
    )


def _watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)


VENDOR = VendorSpec(
    name="nvidia",
    title="NVIDIA",
    pci_vendor=0x10DE,
    gres_flag="nvidia_gpu_env",
    library="libnvidia-ml.so.1",
    remedy="install the NVIDIA driver with its management library",
    probe=probe,
    device_pattern="nvidia[0-9]*",
)
