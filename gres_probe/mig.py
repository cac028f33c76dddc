"""MIG layouts: what a node's GPUs have, what they should have, and the NVML calls that change it.

`gres_probe.amd_partitions` is the same for AMD's GPUs; what both need is here.

A layout is a list of profiles, e.g. ``["3g.40gb", "3g.40gb"]``; None is MIG off. Each GPU instance gets one compute
instance over all of it. A GPU whose profiles are the wanted ones is left as it is, in any order. Any other
one is cleared and laid out again, so that the next apply finishes one that was killed.
NVIDIA's NVML API reference and MIG user guide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sluice.base.errors import SluiceError, UsageError

_MOST_INSTANCES = 8


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """How a GPU is laid out now."""

    index: int
    uuid: str
    model: str
    capable: bool
    profiles: tuple[str, ...] | None  # None: MIG off
    whole: bool  # every GPU instance has its compute instance
    pending: bool  # a mode waits for a reset
    busy: int  # processes on it


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one GPU."""

    now: GpuLayout
    wanted: tuple[str, ...] | None

    def describe(self) -> str:
        """One line for people."""
        return f"GPU {self.now.index} ({self.now.model}): {words(self.now.profiles)} -> {words(self.wanted)}"


def words(profiles: tuple[str, ...] | None) -> str:
    """A layout as people write it."""
    if profiles is None:
        return "MIG off"
    return ",".join(profiles) or "MIG on, no instance"


class Mig:
    """NVML, opened. All raise SluiceError with the driver's message."""

    def __init__(self) -> None:
        import pynvml

        self.api = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise SluiceError(f"NVML does not start: {error}", remedy="see: nvidia-smi, dmesg") from error

    def close(self) -> None:
        """Close the library."""
        with suppress(self.api.NVMLError):
            self.api.nvmlShutdown()

    def layouts(self) -> list[GpuLayout]:
        """All of the node's NVIDIA GPUs."""
        try:
            return [self._layout(index) for index in range(self.api.nvmlDeviceGetCount())]
        except self.api.NVMLError as error:
            raise SluiceError(f"NVML: {error}", remedy="see: sluice probe, dmesg") from error

    def _layout(self, index: int) -> GpuLayout:
        api = self.api
        handle = api.nvmlDeviceGetHandleByIndex(index)
        uuid, model = api.nvmlDeviceGetUUID(handle), api.nvmlDeviceGetName(handle)
        try:
            now, pending = api.nvmlDeviceGetMigMode(handle)
        except api.NVMLError_NotSupported:
            return GpuLayout(index, uuid, model, False, None, True, False, 0)
        profiles, whole = [], True
        names = {number: name for name, (number, _) in self._profiles(handle).items()}
        for instance, profile in self._instances(handle) if now else []:
            profiles.append((api.nvmlGpuInstanceGetInfo(instance).placement.start, names.get(profile, f"?{profile}")))
            whole = whole and bool(self._compute(instance))
        return GpuLayout(
            index,
            uuid,
            model,
            True,
            tuple(name for _, name in sorted(profiles)) if now else None,
            whole,
            now != pending,
            self._busy(handle),
        )

    def _busy(self, handle: Any) -> int:
        """How many processes are on a GPU, its instances included."""
        api, handles, found = self.api, [handle], set()
        for place in range(_MOST_INSTANCES):
            with suppress(api.NVMLError):
                handles.append(api.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
        for one in handles:
            with suppress(api.NVMLError):
                found |= {process.pid for process in api.nvmlDeviceGetComputeRunningProcesses(one)}
        return len(found)

    def _profiles(self, handle: Any) -> dict[str, tuple[int, int]]:
        """Of each profile that the GPU offers: the driver's ID and NVML's number of its kind."""
        api, found = self.api, {}
        for kind in range(api.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                info = api.nvmlDeviceGetGpuInstanceProfileInfo(handle, kind, version=2)
            except api.NVMLError:
                continue
            name = info.name.decode() if isinstance(info.name, bytes) else str(info.name)
            found[name.removeprefix("MIG ")] = (int(info.id), kind)
        return found

    def _instances(self, handle: Any) -> list[tuple[Any, int]]:
        """The GPU's instances with the IDs of their profiles."""
        found = []
        for number, _ in self._profiles(handle).values():
            for instance in self._listed(
                lambda array, count, number=number: self.api.nvmlDeviceGetGpuInstances(handle, number, array, count),
                self.api.c_nvmlGpuInstance_t,
            ):
                found.append((instance, number))
        return found

    def _compute(self, instance: Any) -> list[Any]:
        """A GPU instance's compute instances."""
        api, found = self.api, []
        for kind in range(api.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                info = api.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, kind, 0)
            except api.NVMLError:
                continue
            found += self._listed(
                lambda array, count, number=info.id: api.nvmlGpuInstanceGetComputeInstances(
                    instance, number, array, count
                ),
                api.c_nvmlComputeInstance_t,
            )
        return found

    def _listed(self, function: Any, kind: Any) -> list[Any]:
        import ctypes

        array, count = (kind * _MOST_INSTANCES)(), ctypes.c_uint(_MOST_INSTANCES)
        function(array, ctypes.byref(count))
        return list(array[: count.value])

    def check_all(self, changes: Iterable[Change]) -> None:
        """Whether the GPUs can have the layouts at all, before anything is touched. Raises SluiceError."""
        for change in changes:
            self.check(change)

    def apply_all(self, changes: Iterable[Change], progress: Callable[[str], None]) -> None:
        """Apply all, or finish an earlier run. `progress` gets a line for each change. Raises SluiceError."""
        for change in changes:
            progress(change.describe())
            self.apply(change)

    @contextmanager
    def _for(self, change: Change) -> Iterator[None]:
        """Turn refusals of the driver into errors that name the GPU and the change. Raises SluiceError."""
        try:
            yield
        except self.api.NVMLError as error:
            raise SluiceError(
                f"{change.describe()}: NVML: {error}", remedy="see: nvidia-smi, dmesg; then run: sluice mig apply"
            ) from error

    def check(self, change: Change) -> None:
        """Whether the GPU can have the layout at all, before anything is touched. Raises SluiceError."""
        now, wanted = change.now, change.wanted
        if wanted is None:
            return
        if not now.capable:
            raise SluiceError(f"GPU {now.index} ({now.model}): has no MIG", remedy="leave it out of the layout")
        with self._for(change):
            self._check(now, wanted)

    def _check(self, now: GpuLayout, wanted: tuple[str, ...]) -> None:
        handle = self.api.nvmlDeviceGetHandleByIndex(now.index)
        offered = self._profiles(handle)
        taken: set[int] = set()
        for name in wanted:
            if name not in offered:
                raise SluiceError(
                    f"GPU {now.index} ({now.model}): no MIG profile {name!r}",
                    remedy=f"it has: {', '.join(offered)}"
                    if offered
                    else "the driver names none: see nvidia-smi, dmesg",
                )
            start, size = self._room(handle, offered[name][0], taken)
            if size == 0:
                raise SluiceError(
                    f"GPU {now.index} ({now.model}): no room for {name} in {words(wanted)}",
                    remedy="name fewer or smaller instances, the larger ones first",
                )
            taken |= set(range(start, start + size))

    def _room(self, handle: Any, number: int, taken: set[int]) -> tuple[int, int]:
        """Where a profile fits next to what is taken: first eighth of the memory, and how many; (0, 0): nowhere."""
        import ctypes

        api = self.api
        array, count = (api.c_nvmlGpuInstancePlacement_t * _MOST_INSTANCES)(), ctypes.c_uint(_MOST_INSTANCES)
        api.nvmlDeviceGetGpuInstancePossiblePlacements(handle, number, array, ctypes.byref(count))
        for place in sorted(array[: count.value], key=lambda one: one.start):
            if not taken & set(range(place.start, place.start + place.size)):
                return int(place.start), int(place.size)
        return 0, 0

    def apply(self, change: Change) -> None:
        """Apply a layout; run again, it finishes an earlier run. The GPU must be idle. Raises SluiceError."""
        index = change.now.index
        with self._for(change):
            handle = self.api.nvmlDeviceGetHandleByIndex(index)
            if self._busy(handle):
                raise SluiceError(f"GPU {index}: processes use it", remedy="end them; see: nvidia-smi")
            self._clear(handle)
            self._switch(handle, index, change.wanted is not None)
            self._lay_out(handle, change.wanted or ())

    def _clear(self, handle: Any) -> None:
        for instance, _ in self._instances(handle) if self.api.nvmlDeviceGetMigMode(handle)[0] else []:
            for compute in self._compute(instance):
                self.api.nvmlComputeInstanceDestroy(compute)
            self.api.nvmlGpuInstanceDestroy(instance)

    def _switch(self, handle: Any, index: int, on: bool) -> None:
        api = self.api
        if api.nvmlDeviceGetMigMode(handle) == [int(on), int(on)]:
            return
        activation = api.nvmlDeviceSetMigMode(handle, int(on))
        if activation != api.NVML_SUCCESS or api.nvmlDeviceGetMigMode(handle)[0] != int(on):
            raise SluiceError(
                f"GPU {index}: MIG mode waits for a reset of the GPU",
                remedy="end what has it open (nvidia-persistenced, dcgm), run nvidia-smi --gpu-reset, then try again",
            )

    def _lay_out(self, handle: Any, wanted: tuple[str, ...]) -> None:
        offered = self._profiles(handle)
        taken: set[int] = set()
        for name in wanted:
            number, kind = offered[name]
            start, size = self._room(handle, number, taken)
            taken |= set(range(start, start + size))
            place = self.api.c_nvmlGpuInstancePlacement_t(start, size)
            from ctypes import byref

            instance = self.api.nvmlDeviceCreateGpuInstanceWithPlacement(handle, number, byref(place))
            self._fill(instance, kind)

    def _fill(self, instance: Any, kind: int) -> None:
        """One compute instance over all of a GPU instance: the one with most slices that it offers."""
        api, best = self.api, None
        for number in range(api.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                info = api.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, 0)
            except api.NVMLError:
                continue
            if best is None or info.sliceCount > best.sliceCount:
                best = info
        if best is None:
            raise SluiceError(f"an instance of profile {kind} offers no compute instance")
        api.nvmlGpuInstanceCreateComputeInstance(instance, best.id)


def names_node(node: str, policy: Iterable[str]) -> bool:
    """Whether a policy's layouts have an entry for the node. Raises UsageError."""
    from sluice.base.hostlist import expand

    return any(node in expand(key.partition(":")[0]) for key in policy)


def wanted_layouts(
    node: str, policy: Mapping[str, tuple[str, ...]], count: int, section: str = "mig"
) -> dict[int, tuple[str, ...] | None]:
    """The policy's layouts of a node's GPUs of one vendor, by index; those that it does not name are left as they are.

    ``NODES: []`` is MIG off. An entry that names GPUs overrides one that does not. `section` is the policy's, below
    ``enforcement``, for errors. Raises UsageError.
    """
    from sluice.base.hostlist import expand

    found: dict[int, tuple[str, ...] | None] = {}
    for named in (False, True):
        for key, profiles in policy.items():
            nodes, _, gpus = key.partition(":")
            if node not in expand(nodes) or bool(gpus) != named:
                continue
            for index in [int(word) for word in gpus.split(",")] if gpus else range(count):
                if index >= count:
                    raise UsageError(
                        f"enforcement.{section} {key!r}: GPU {index}: {node} has {count} GPUs",
                        remedy="correct the policy",
                    )
                found[index] = tuple(profiles) or None
    return found


def changes(now: list[GpuLayout], wanted: Mapping[int, tuple[str, ...] | None]) -> list[Change]:
    """The GPUs that are not yet as wanted."""
    found = []
    for layout in now:
        if layout.index not in wanted:
            continue
        target = wanted[layout.index]
        same = (layout.profiles is None) == (target is None) and Counter(layout.profiles or ()) == Counter(target or ())
        if not same or not layout.whole or layout.pending:
            found.append(Change(layout, target))
    return found
