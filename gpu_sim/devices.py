"""The device files of a node's GPUs and RDMA adapters, with the numbers that real drivers use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_sim import layout
from gpu_sim.state import NodeState, read_state

NVIDIA_MAJOR = 195  # Documentation/admin-guide/devices.txt of the kernel
DRM_MAJOR = 226
VERBS_MAJOR = 231
_FIRST_UVERBS = 192


@dataclass(frozen=True, slots=True)
class DeviceFile:
    """One character device."""

    path: str
    major: int
    minor: int
    mode: int = 0o666


def device_files(folder: Path) -> list[DeviceFile]:
    """Every device file of the node, control devices first. Raises SluiceError when the node's state cannot be read."""
    state = read_state(folder)
    files = _control_files(state)
    for gpu in state.gpus:
        files += gpu_files(gpu)
        if gpu.dies:
            files += [file for part in gpu.instances if part.used and part.gpu_instance for file in _drm_files(part)]
    for gpu in state.gpus:
        if gpu.mig_enabled:
            files += [file for instance in gpu.instances if instance.used for file in _instance_files(state, instance)]
    for entry in sorted((folder / "sys/class/infiniband_verbs").iterdir()):
        number = int(entry.name.removeprefix("uverbs"))
        files.append(DeviceFile(f"/dev/infiniband/{entry.name}", VERBS_MAJOR, _FIRST_UVERBS + number))
    return files


def gpu_files(gpu: layout.Gpu) -> list[DeviceFile]:
    """The files of one GPU; the first is the one that Slurm's ``File=`` names."""
    if gpu.vendor == layout.Vendor.NVIDIA:
        return [DeviceFile(f"/dev/nvidia{gpu.minor}", NVIDIA_MAJOR, gpu.minor)]
    return [
        DeviceFile(f"/dev/dri/renderD{gpu.minor}", DRM_MAJOR, gpu.minor),
        DeviceFile(f"/dev/dri/card{gpu.card}", DRM_MAJOR, gpu.card),
    ]


def _control_files(state: NodeState) -> list[DeviceFile]:
    vendors = {gpu.vendor for gpu in state.gpus}
    files = []
    if layout.Vendor.NVIDIA in vendors:
        files += [
            DeviceFile("/dev/nvidiactl", NVIDIA_MAJOR, 255),
            DeviceFile("/dev/nvidia-modeset", NVIDIA_MAJOR, 254),
            DeviceFile("/dev/nvidia-uvm", state.head.major_uvm, 0),
            DeviceFile("/dev/nvidia-uvm-tools", state.head.major_uvm, 1),
        ]
        if any(gpu.mig_supported for gpu in state.gpus):
            files += [
                DeviceFile("/dev/nvidia-caps/nvidia-cap1", state.head.major_caps, 1, 0o400),
                DeviceFile("/dev/nvidia-caps/nvidia-cap2", state.head.major_caps, 2, 0o444),
            ]
    if layout.Vendor.AMD in vendors:
        files.append(DeviceFile("/dev/kfd", state.head.major_kfd, 0))
    return files


def _drm_files(part: layout.Instance) -> list[DeviceFile]:
    """Of an AMD partition. amdgpu has them for all that a GPU could have; those of others cannot be opened."""
    return [
        DeviceFile(f"/dev/dri/renderD{part.access_minor}", DRM_MAJOR, part.access_minor),
        DeviceFile(f"/dev/dri/card{part.compute_minor}", DRM_MAJOR, part.compute_minor),
    ]


def _instance_files(state: NodeState, instance: layout.Instance) -> list[DeviceFile]:
    return [
        DeviceFile(f"/dev/nvidia-caps/nvidia-cap{minor}", state.head.major_caps, minor, 0o444)
        for minor in (instance.access_minor, instance.compute_minor)
    ]
