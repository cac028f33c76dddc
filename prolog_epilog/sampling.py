"""A process that holds one vendor's library open, and measures what each process has of each device, and all else.

``python -m prolog_epilog.sampling VENDOR`` reads requests from standard input, one JSON object a line, and answers each
in a line: it is the agent's child, so that a driver that hangs or a library that crashes affects nothing else.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from prolog_epilog.cgroups import uid_of
from prolog_epilog.device_control import drive
from prolog_epilog.nvml_lists import ProcessLists
from prolog_epilog.power_limits import read_limits
from sluice.base.run import PYTHON
from sluice.exchange.readings import Activity, Reading

Usage = list[tuple[str, int, int]]
"""UUID of the device, number of the process, bytes that it has there."""

_CONTEXT_SECONDS = 20.0
_MOST_LISTED = 2048  # processes of a device


class Library(Protocol):
    """A vendor's library, opened."""

    def usage(self) -> Usage:
        """What every process has of every device and partition."""

    def used(self) -> dict[str, int]:
        """Bytes in use on each device, by all processes."""

    def reader(self) -> Reader:
        """What reads all else, over the same handles."""


class Reader(Protocol):
    """One of the `read_*` modules."""

    def activity(self, wanted: Iterable[str]) -> tuple[dict[str, Activity], dict[str, dict[int, int]]]:
        """Of the named devices, what grew; by device the busy time of each process in ns, where it is reported."""

    def energy(self, wanted: Iterable[str]) -> dict[str, int | None]:
        """The energy counters of physical GPUs, in mJ; None where it is not counted, or the GPU does not answer."""

    def readings(self, wanted: Iterable[str] | None = None) -> list[Reading]:
        """Of every physical GPU, or of those that are named, also by one of their instances.

        Each reading includes events until a reading of all has included them.
        """


class Nvidia:
    """NVML."""

    def __init__(self) -> None:
        import pynvml

        self.api = pynvml
        pynvml.nvmlInit()
        self.lists = ProcessLists(pynvml)
        self.handles: list[tuple[str, Any]] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError_GpuIsLost):  # the others are still there
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                instances = self._instances(handle)
                self.handles += instances or [(pynvml.nvmlDeviceGetUUID(handle), handle)]

    def _instances(self, handle: Any) -> list[tuple[str, Any]]:
        found = []
        try:
            if self.api.nvmlDeviceGetMigMode(handle)[0] != self.api.NVML_DEVICE_MIG_ENABLE:
                return []
            count = self.api.nvmlDeviceGetMaxMigDeviceCount(handle)
        except self.api.NVMLError:
            return []
        for index in range(count):
            try:
                instance = self.api.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                found.append((self.api.nvmlDeviceGetUUID(instance), instance))
            except self.api.NVMLError:
                continue
        return found

    def reader(self) -> Reader:
        """See `Library`."""
        from prolog_epilog.read_nvidia import NvidiaReader

        return NvidiaReader(self.api)

    def usage(self) -> Usage:
        """See `Library`. A process that both computes and draws is listed twice by the driver, and counts once."""
        found: dict[tuple[str, int], int] = {}
        for uuid, handle in self.handles:
            for pid, size in self.lists.held(handle):
                found[uuid, pid] = max(found.get((uuid, pid), 0), size)
        return [(uuid, pid, size) for (uuid, pid), size in found.items()]

    def used(self) -> dict[str, int]:
        """See `Library`."""
        found = {}
        for uuid, handle in self.handles:
            with suppress(self.api.NVMLError_GpuIsLost):
                found[uuid] = int(self.api.nvmlDeviceGetMemoryInfo(handle).used)
        return found


class Amd:
    """AMD SMI."""

    def __init__(self) -> None:
        import amdsmi

        from gres_probe.vendors.amd import devices_by_gpu

        self.api = amdsmi
        amdsmi.amdsmi_init()
        # Besides its own exceptions, the package raises those of decoding unexpected answers.
        failures = (amdsmi.AmdSmiException, ValueError, KeyError, AttributeError, TypeError)

        def ask(function: str, handle: Any) -> Any:
            try:
                return getattr(amdsmi, function)(handle)
            except failures:
                return None

        listed = devices_by_gpu(ask, amdsmi.amdsmi_get_processor_handles())
        self.gpus = [gpu for gpu in listed if gpu[0]]  # nothing is known of a lost one
        self.handles = [device for _, devices in self.gpus for device in devices]
        self.parts = {uuid for _, devices in self.gpus if len(devices) > 1 for uuid, _ in devices}

    def reader(self) -> Reader:
        """See `Library`."""
        from prolog_epilog.read_amd import AmdReader

        return AmdReader(self.api, self.gpus)

    def usage(self) -> Usage:
        """See `Library`."""
        return [
            (uuid, int(process["pid"]), int(process["memory_usage"]["vram_mem"]))
            for uuid, listed in self._each(self.handles, self.api.amdsmi_get_gpu_process_list)
            for process in listed
        ]

    def _each(self, devices: list[tuple[str, Any]], function: Callable[..., Any], *words: Any) -> list[tuple[str, Any]]:
        """What the library reports of the devices that answer: a lost one does not. Raises when none does."""
        found, failed = [], None
        for uuid, handle in devices:
            try:
                found.append((uuid, function(handle, *words)))
            except self.api.AmdSmiException as error:
                failed = error
        if failed is not None and not found:
            raise failed
        return found

    def used(self) -> dict[str, int]:
        """See `Library`."""
        whole = [devices[0] for _, devices in self.gpus if len(devices) == 1]
        kind = self.api.AmdSmiMemoryType.VRAM
        found = {uuid: int(size) for uuid, size in self._each(whole, self.api.amdsmi_get_gpu_memory_usage, kind)}
        for _, devices in self.gpus:
            if len(devices) > 1:  # for each partition the library reports what the GPU has in use
                found |= dict.fromkeys((uuid for uuid, _ in devices), 0)
        if self.parts:
            for uuid, _, size in self.usage():
                if uuid in self.parts:
                    found[uuid] += size
        return found


class Intel:
    """Level Zero's sysman."""

    def __init__(self) -> None:
        from gres_probe.vendors.intel import open_devices

        self.sysman, self.devices = open_devices()

    def reader(self) -> Reader:
        """See `Library`."""
        from prolog_epilog.read_intel import IntelReader

        return IntelReader(self.sysman, self.devices)

    def usage(self) -> Usage:
        """See `Library`."""
        return [
            (uuid, int(process.processId), int(process.memSize))
            for uuid, handle in self.devices
            for process in self._processes(handle)
        ]

    def _processes(self, handle: Any) -> list[Any]:
        """Of a lost device none: the others are still there."""
        from gres_probe.level_zero import DEVICE_LOST, LevelZeroError

        try:
            return list(self.sysman.processes(handle))
        except LevelZeroError as error:
            if error.result == DEVICE_LOST:
                return []
            raise

    def used(self) -> dict[str, int]:
        """See `Library`. The driver reports the sum over processes only through each of them."""
        found = {uuid: 0 for uuid, _ in self.devices}
        for uuid, _, size in self.usage():
            found[uuid] += size
        return found


LIBRARIES: dict[str, Callable[[], Library]] = {"nvidia": Nvidia, "amd": Amd, "intel": Intel}


def measure_context(library: Library, vendor: str, uuid: str, place: str) -> dict[str, int]:
    """What one idle process has of a device, in bytes, and what its driver reports as the device's total.

    A separate program opens the device and waits; the vendor's library reports what it has. Raises RuntimeError.
    """
    command = [*PYTHON, "-m", "prolog_epilog.context", vendor, place]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None and program.stdout is not None  # noqa: S101 - both are pipes
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(program.stdout, selectors.EVENT_READ)
                line = program.stdout.readline() if selector.select(_CONTEXT_SECONDS) else "no answer from the driver"
            if not line.startswith("total "):
                raise RuntimeError(line.strip() or "the program that opens the device ended")
            size = max(
                (size for device, pid, size in library.usage() if (device, pid) == (uuid, program.pid)), default=0
            )
            return {"context": size, "total": int(line.split()[1])}
        finally:
            program.kill()


def _bounded(usage: Usage) -> dict[str, Any]:
    """The processes that have most of each device; ``rest``: device, user and bytes of the others."""
    devices: dict[str, list[tuple[str, int, int]]] = {}
    for one in usage:
        devices.setdefault(one[0], []).append(one)
    listed: Usage = []
    rest: dict[tuple[str, int], int] = {}
    for uuid, held in devices.items():
        if len(held) > _MOST_LISTED:
            held.sort(key=lambda one: -one[2])
            for _, pid, size in held[_MOST_LISTED:]:
                uid = uid_of(pid)
                if uid is not None:
                    rest[uuid, uid] = rest.get((uuid, uid), 0) + size
        listed += held[:_MOST_LISTED]
    found: dict[str, Any] = {"usage": listed}
    if rest:
        found["rest"] = [(uuid, uid, size) for (uuid, uid), size in rest.items()]
    return found


class Sampler:
    """One vendor's library and its reader, opened when first asked for."""

    def __init__(self, vendor: str) -> None:
        self.vendor = vendor
        self.library = LIBRARIES[vendor]()
        self._reader: Reader | None = None

    @property
    def reader(self) -> Reader:
        """What reads more than memory."""
        self._reader = self._reader or self.library.reader()
        return self._reader

    def sample(self, request: dict[str, Any]) -> dict[str, Any]:
        """Memory by process; of the devices that are named, what grew; with ``used``, all that the library reports."""
        answer = _bounded(self.library.usage())
        wanted = request.get("devices")
        if wanted:
            activity, processes = self.reader.activity(wanted)
            answer["devices"] = {uuid: vars(one) for uuid, one in activity.items()}
            answer["busy"] = processes
        if request.get("used"):
            answer["used"] = self.library.used()
        if request.get("some"):
            answer["some"] = {reading.uuid: reading.to_dict() for reading in self.reader.readings(request["some"])}
        if request.get("full"):
            answer["full"] = {reading.uuid: reading.to_dict() for reading in self.reader.readings()}
        return answer

    def power(self, uuids: list[str]) -> dict[str, Any]:
        """Of physical GPUs: their limits, as `read_limits`, and ``energy``."""
        return {**read_limits(self.library, self.vendor, uuids), "energy": self.reader.energy(uuids)}


def main() -> None:
    """Answer requests until the agent closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print
    vendor = sys.argv[1]
    sampler: Sampler | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            sampler = sampler or Sampler(vendor)
            if request["do"] == "context":
                answer["ok"] = measure_context(sampler.library, vendor, request["uuid"], request["place"])
            elif request["do"] == "power":
                answer["ok"] = sampler.power(request["uuids"])
            elif (driven := drive(sampler.library, vendor, request)) is not None:
                answer["ok"] = driven
            else:
                answer["ok"] = sampler.sample(request)
        except Exception as error:  # any error of a vendor's wrapper is the answer
            answer["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
