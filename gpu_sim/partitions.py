"""AMD's partitions: what a GPU can be made into, by the rules of Linux's amdgpu (aqua_vanjaram.c).

The driver itself is src/amd_partition.c; this lays out the same for platforms and `sluice sim set`.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpu_sim import layout
from gpu_sim.layout import Compute
from sluice.base.errors import UsageError

_BESIDE = {Compute.SPX: (1,), Compute.DPX: (1, 2), Compute.TPX: (1, 4), Compute.QPX: (1, 4), Compute.CPX: (1, 4)}
"""The numbers of memory parts with which a mode goes."""
_BY_DIES = {
    8: (Compute.SPX, Compute.DPX, Compute.QPX, Compute.CPX),
    6: (Compute.SPX, Compute.TPX, Compute.CPX),
    4: (Compute.SPX, Compute.DPX, Compute.CPX),
}


def number_partitions(gpus: Iterable[layout.Gpu]) -> None:
    """The numbers of AMD partitions' device files: after those of GPUs, with room for all that there can be."""
    drm = [gpu for gpu in gpus if gpu.vendor != layout.Vendor.NVIDIA]
    render = 1 + max((gpu.minor for gpu in drm), default=0)
    card = 1 + max((gpu.card for gpu in drm), default=0)
    for gpu in drm:
        if gpu.dies:
            gpu.first_render, gpu.first_card = render, card
            render, card = render + gpu.dies - 1, card + gpu.dies - 1


def partitions_of(gpu: layout.Gpu, mode: Compute) -> int:
    """Into how many devices a mode makes an AMD GPU."""
    return int(gpu.dies) if mode == Compute.CPX else int(mode)


def partition_modes(gpu: layout.Gpu, memory: int) -> list[Compute]:
    """The compute modes that an AMD GPU can have while its memory has so many parts, as in Linux's amdgpu."""
    return [mode for mode in _BY_DIES.get(gpu.dies, ()) if memory in _BESIDE[mode] and gpu.memory_modes & memory]


def set_partitions(gpu: layout.Gpu, name: str) -> None:
    """Partition an AMD GPU as it is after the driver's start with a mode, e.g. ``cpx-nps4``. Raises UsageError."""
    compute, _, memory = name.upper().partition("-NPS")
    if not gpu.dies:
        raise UsageError(
            f"{gpu.name.decode()}: it cannot be partitioned", remedy="name an AMD GPU with dies, e.g. MI300X"
        )
    offered = [(mode, parts) for parts in (1, 2, 4) for mode in partition_modes(gpu, parts)]
    found = next(((mode, parts) for mode, parts in offered if (mode.name, str(parts)) == (compute, memory)), None)
    if found is None:
        known = ", ".join(f"{mode.name}-nps{parts}".lower() for mode, parts in offered)
        raise UsageError(f"{gpu.name.decode()}: no partition mode {name!r}", remedy=f"known: {known}")
    mode, gpu.memory_partition = found
    gpu.compute_partition, gpu.memory_requested = mode, 0
    count = partitions_of(gpu, mode)
    gpu.profile_count = int(count > 1)
    gpu.profiles[0] = layout.Profile(
        name=f"{mode.name}-nps{memory}".lower().encode(),
        memory_mib=(gpu.memory_total_mib - gpu.memory_reserved_mib) // count,
        multiprocessors=gpu.multiprocessors // count,
        instances=count,
    )
    for place in range(layout.MAX_INSTANCES):
        used = place < count and count > 1
        gpu.instances[place] = (
            layout.Instance(
                used=1,
                gpu_instance=place,
                access_minor=gpu.minor if place == 0 else gpu.first_render + place - 1,
                compute_minor=gpu.card if place == 0 else gpu.first_card + place - 1,
            )
            if used
            else layout.Instance()
        )
    if count == 1:
        gpu.profiles[0] = layout.Profile()
