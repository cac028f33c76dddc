"""AMD partitions: how a node's GPUs are divided, how they should be, and the AMD SMI calls that change it.

A layout is a compute mode and a memory mode, e.g. ``cpx-nps4``; ``spx-nps1`` is one whole GPU. The compute mode changes
at once on an idle GPU. The memory mode is asked for and comes with the driver's next start, for which all AMD GPUs of
the node have to be idle; GPUs that xGMI joins share it, and the start chooses the compute mode again. So a memory mode
is laid out for the node as a whole, first, and the compute modes after it; a run that was killed is finished by the
next one. AMD's AMD SMI reference, its guides to GPU partitioning, and amdgpu's aqua_vanjaram.c in Linux.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

from gres_probe.mig import Change, GpuLayout
from gres_probe.vendors import amd
from sluice.base.errors import SluiceError

_REMEDY = "see: amd-smi partition, dmesg; then run: sluice mig apply"


class AmdPartitions:
    """AMD SMI, opened. All raise SluiceError with the driver's message."""

    def __init__(self) -> None:
        with redirect_stdout(sys.stderr):  # the package prints when it finds no library
            self._smi = amd.AmdSmi()
        self._open()

    def _open(self) -> None:
        try:
            self._smi.need("amdsmi_init")
            handles = self._smi.need("amdsmi_get_processor_handles")
        except self._smi.failures as error:
            raise SluiceError(f"AMD SMI does not start: {amd.reason(error)}", remedy="see: amd-smi, dmesg") from error
        self._gpus = amd.devices_by_gpu(self._smi.ask, handles)

    def _reopen(self) -> None:
        """The library looks for devices only when it is opened."""
        self.close()
        self._open()

    def close(self) -> None:
        """Close the library."""
        with suppress(*self._smi.failures):
            self._smi.need("amdsmi_shut_down")

    def layouts(self) -> list[GpuLayout]:
        """All of the node's AMD GPUs."""
        return [self._layout(index) for index in range(len(self._gpus))]

    def _layout(self, index: int) -> GpuLayout:
        uuid, devices = self._gpus[index]
        handle = devices[0][1]
        try:
            model = amd.model(self._smi, handle)
        except self._smi.failures as error:
            raise SluiceError(f"AMD GPU {index}: {amd.reason(error)}", remedy="see: amd-smi static, dmesg") from error
        modes = [self._smi.ask(f"amdsmi_get_gpu_{kind}_partition", handle) for kind in ("compute", "memory")]
        capable = all(mode not in (None, "", "N/A") for mode in modes)
        profiles = ("-".join(str(mode).lower() for mode in modes),) if capable else None
        return GpuLayout(index, uuid, model, capable, profiles, True, False, self._busy(index))

    def _busy(self, index: int) -> int:
        """How many processes are on a GPU, its partitions included."""
        found: set[int] = set()
        for _, handle in self._gpus[index][1]:
            found |= {int(one["pid"]) for one in self._smi.ask("amdsmi_get_gpu_process_list", handle) or []}
        return len(found)

    def check_all(self, changes: Sequence[Change]) -> None:
        """Whether the GPUs can have the layouts at all, before anything is touched. Raises SluiceError."""
        memory = {
            layout.index: _memory_mode(layout.profiles[0]) for layout in self.layouts() if layout.profiles is not None
        }
        for change in changes:
            now, wanted = change.now, _mode_of(change)
            offered = self._offered(now.index) if now.capable else []
            if wanted not in offered:
                raise SluiceError(
                    f"{_name(now)}: no partition mode {wanted!r}",
                    remedy=f"it has: {', '.join(offered)}" if offered else "leave it out of the layout",
                )
            memory[now.index] = _memory_mode(wanted)
        if changes and len(set(memory.values())) > 1:
            modes = ", ".join(f"GPU {index} {mode}" for index, mode in memory.items())
            raise SluiceError(
                f"the memory mode is one for all AMD GPUs of a node, and these would differ: {modes}",
                remedy="give all of the node's GPUs one NPS in enforcement.amd_partitions",
            )

    def _offered(self, index: int) -> list[str]:
        """The modes of a GPU, those that wait for another memory mode included."""
        handle = self._gpus[index][1][0][1]
        answer = self._smi.ask("amdsmi_get_gpu_accelerator_partition_profile_config", handle)
        if not isinstance(answer, dict):
            raise SluiceError(
                f"AMD GPU {index}: the driver does not report its partition modes",
                remedy="install the amdgpu driver and AMD SMI of ROCm 6.4 or later",
            )
        return [
            f"{profile['profile_type']}-{mode}".lower()
            for profile in answer["profiles"]
            for mode in profile["memory_caps"]
        ]

    def apply_all(self, changes: Sequence[Change], progress: Callable[[str], None]) -> None:
        """Set the modes; run again, it finishes an earlier run. `progress` gets a line for each. Raises SluiceError."""
        wanted = {change.now.index: _mode_of(change) for change in changes}
        now = self.layouts()
        restart = any(_memory_mode(_current(now[index])) != _memory_mode(mode) for index, mode in wanted.items())
        for layout in now:
            if layout.busy and (restart or layout.index in wanted):
                why = "; the driver has to be restarted, which needs all of them idle" if restart else ""
                raise SluiceError(f"{_name(layout)}: processes use it{why}", remedy="end them; see: amd-smi process")
        for change in changes:
            progress(change.describe())
        if restart:
            self._set_memory(wanted)
        for layout in self.layouts():
            mode = wanted.get(layout.index)
            if mode is not None and _current(layout) != mode:
                kind = self._smi.api.AmdSmiComputePartitionType[mode.partition("-")[0].upper()]
                self._do(layout.index, "amdsmi_set_gpu_compute_partition", self._handle(layout.index), kind)
        self._reopen()
        for layout in self.layouts():
            mode = wanted.get(layout.index)
            if mode is not None and layout.profiles != (mode,):
                raise SluiceError(f"{_name(layout)}: is {_current(layout)}, not {mode}", remedy=_REMEDY)

    def _set_memory(self, wanted: Mapping[int, str]) -> None:
        # Before ROCm 7 the setter restarts the driver itself, and then all GPUs that xGMI joins have the mode.
        asks = hasattr(self._smi.api, "amdsmi_gpu_driver_reload")
        for index, mode in wanted.items():
            if _memory_mode(_current(self._layout(index))) == _memory_mode(mode):
                continue
            kind = self._smi.api.AmdSmiMemoryPartitionType[_memory_mode(mode).upper()]
            self._do(index, "amdsmi_set_gpu_memory_partition", self._handle(index), kind)
            if not asks:
                self._reopen()
        if asks:
            self._do(None, "amdsmi_gpu_driver_reload")
            self._reopen()

    def _handle(self, index: int) -> Any:
        return self._gpus[index][1][0][1]

    def _do(self, index: int | None, function: str, *arguments: Any) -> None:
        try:
            self._smi.need(function, *arguments)
        except self._smi.failures as error:
            where = "the amdgpu driver" if index is None else f"AMD GPU {index}"
            raise SluiceError(f"{where}: {amd.reason(error)}", remedy=_REMEDY) from error


def _mode_of(change: Change) -> str:
    return (change.wanted or ("spx-nps1",))[0]


def _current(layout: GpuLayout) -> str:
    return (layout.profiles or ("",))[0]


def _memory_mode(mode: str) -> str:
    return mode.partition("-")[2]


def _name(layout: GpuLayout) -> str:
    return f"AMD GPU {layout.index} ({layout.model})"
