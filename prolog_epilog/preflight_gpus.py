"""The GPUs' part in a preflight: which of a job's are measured, and by which program (programs/gpu_test.py)."""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prolog_epilog.devices import NodeDevice
from prolog_epilog.preflight_programs import Program, figure
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.exchange.preflight import NO_ANSWER
from sluice.exchange.record import Grant, JobRecord

PROGRAM = Path(__file__).parent / "programs/gpu_test.py"
VENDORS = ("nvidia", "amd")
"""Those whose GPUs the program measures."""
_FILES = {"nvidia": ("/dev/nvidiactl", "/dev/nvidia-uvm"), "amd": ("/dev/kfd",)}  # next to those of each GPU
TOOL = "gpu"
"""What the controllers call it in their orders."""
_READY_S = 6.0  # for the vendors' drivers
_TEST_S = 4.0  # for one test; the first of a GPU opens it
_MOST_S = 10.0  # for all tests that nodes are given at once
_PASSED_ON = ("LD_LIBRARY_PATH", "SLUICE_SIM_STATE")
_UNSPEAKABLE = re.compile(r"[^A-Za-z0-9_.:@-]+")
_FAULT = re.compile(r"[A-Za-z0-9_ ]{1,60}")

Results = dict[str, list[Any]]
"""By test: its value (None where there is none), 0, and what failed."""


def whole_gpus(record: JobRecord, devices: Sequence[NodeDevice], others: Iterable[JobRecord] = ()) -> list[NodeDevice]:
    """Those that nobody else keeps busy, and that the program knows: none of `others`, the node's other jobs.

    None where they are not alike: one is measured by what the others of them give.
    """
    taken = {grant.uuid for other in others for grant in other.grants}
    whole = {grant.uuid: _cap(grant) for grant in record.grants if grant.asked is None and grant.uuid not in taken}
    found = [one for one in devices if one.uuid in whole and not one.partition and one.vendor in VENDORS and one.pci]
    return found if len({(one.model, whole[one.uuid]) for one in found}) == 1 else []


def _cap(grant: Grant) -> int | None:
    return grant.planned_mw or grant.power_mw


def said_of(record: JobRecord, gpus: Sequence[NodeDevice]) -> dict[str, Any]:
    """What the controllers hear of them. GPUs of one product and power cap are expected to be equally fast."""
    if not gpus:
        return {}
    grant = record.grant_of(gpus[0].uuid)
    cap = _cap(grant) if grant is not None else None
    model = _UNSPEAKABLE.sub("-", gpus[0].model + (f" {cap / 1000:.0f}W" if cap else ""))[:63]
    uuids = {one.uuid for one in gpus}
    linked = all(uuids <= {one.uuid, *one.linked} for one in gpus)
    return {"gpus": [str(one.index) for one in gpus], "gpu_model": model, "linked": linked}


class _GpuProgram(Program):
    def __init__(self, gpus: Sequence[NodeDevice]) -> None:
        super().__init__()
        self._gpus = gpus

    @property
    def path(self) -> Path:
        """See Program."""
        return PROGRAM

    def environment(self) -> dict[str, str]:
        """Where the vendors' libraries are, as for the agent; a kernel that is compiled is not kept, and no daemon of
        MPS is used: any user can make the folder in /tmp where one is looked for."""
        set_here = {"CUDA_CACHE_DISABLE": "1", "CUDA_MPS_PIPE_DIRECTORY": "/dev/null"}
        return {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | set_here

    def groups(self) -> list[int]:
        """Of the GPUs' files, which not everybody may open, AMD's by default; not root's."""
        found = set()
        for path in {file for one in self._gpus for file in (*one.files, *_FILES[one.vendor])}:
            with suppress(OSError):
                about = Path(path).stat()
                if stat.S_ISCHR(about.st_mode) and about.st_gid:
                    found.add(about.st_gid)
        return sorted(found)

    def open(self) -> None:
        """Start it; it opens the GPUs meanwhile. Raises SluiceError, OSError."""
        self.begin()
        self.say([{"gpu": str(one.index), "vendor": one.vendor, "pci": one.pci} for one in self._gpus])
        self._ready = False

    def await_ready(self, end: float) -> None:
        """Until the drivers answer. Raises SluiceError."""
        if not self._ready:
            said = self.line(end)
            if said.get("ready") is not True:
                raise SluiceError(str(said.get("why"))[:200])
            self._ready = True


class GpuTests:
    """The program that measures these GPUs; one that did not answer is ended, and further tests start another one."""

    def __init__(self, gpus: Sequence[NodeDevice]) -> None:
        self._gpus = gpus
        self._program: _GpuProgram | None = None
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> GpuTests:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            self._end_program()

    def _end_program(self) -> None:
        if self._program is not None:
            self._program.__exit__()
        self._program = None

    def measure(self, tests: Sequence[Mapping[str, Any]], end: float) -> Results:
        """What tests gave until `end`; those that were not made, or say nothing of the GPU, are left out."""
        found: Results = {}
        try:
            program = self.start()
            program.await_ready(min(end, time.monotonic() + _READY_S))
            program.say([{name: str(test[name]) for name in ("id", "kind", "gpu", "other_gpu")} for test in tests])
            self._take(program, tests, min(end, time.monotonic() + _MOST_S), found)
        except (SluiceError, OSError, ValueError, KeyError, TypeError) as error:
            log("problem", what=f"GPUs are not tested: {error}")
            with self._lock:
                self._end_program()
        return found

    def start(self) -> _GpuProgram:
        """The program, which need not be ready. Raises SluiceError, OSError."""
        with self._lock:
            if self._over:
                raise SluiceError("time is over")
            if self._program is None:
                program = _GpuProgram(self._gpus)
                program.open()
                self._program = program
            return self._program

    def _take(self, program: Program, tests: Sequence[Mapping[str, Any]], end: float, found: Results) -> None:
        """A GPU that does not answer has failed in all tests of it that are left; those of others were not made."""
        left, begun = {str(test["id"]): str(test["gpu"]) for test in tests}, set[str]()
        while left:
            until = min(end, time.monotonic() + _TEST_S)
            try:
                said = program.line(until)
            except SluiceError:
                silent = {left[one] for one in begun & left.keys()} if until < end else set()
                found |= {one: [None, 0.0, NO_ANSWER] for one, gpu in left.items() if gpu in silent}
                raise
            if "began" in said:
                begun.add(str(said["began"]))
                continue
            value, fault = figure(said.get("value")), str(said.get("fault", ""))
            one = str(said.get("id"))
            if left.pop(one, None) is not None and (value is not None or _FAULT.fullmatch(fault)):
                found[one] = [value, 0.0, fault if value is None else ""]
