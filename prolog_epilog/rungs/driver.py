"""NVIDIA's own limit on the device memory of a cgroup (drivers from R615, cgroup version 2). Experimental: not yet run
on hardware.

``nvmlDeviceSetMemoryLimits_v1`` takes the folder of the job's cgroup and a hard limit in bytes, at which the kernel
refuses allocations of all processes in it and below. The soft limit stays 0: it would reserve memory in every cgroup
above, which stays reserved when the job's cgroup is removed (docs.nvidia.com, MPS v3 memory partitioning). A removed
cgroup has no limit either, so the limit is removed first only for tidiness.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prolog_epilog import cgroups
from prolog_epilog.contexts import Contexts
from prolog_epilog.refusals import Refusal
from prolog_epilog.rungs.base import DRIVER
from prolog_epilog.state import MIB, RefusalError, State
from prolog_epilog.watching import Watcher
from sluice.base.errors import SluiceError
from sluice.base.sizes import format_mib
from sluice.exchange.record import Grant, JobRecord

OLDEST_DRIVER = 615


class Driver:
    """See `base.Rung`."""

    name = DRIVER
    needs: tuple[str, ...] = ()

    def __init__(self, state: State, watcher: Watcher, contexts: Contexts) -> None:
        self._state = state
        self._watcher = watcher
        self._contexts = contexts

    def unavailable(self, record: JobRecord, grant: Grant) -> str:
        """A whole NVIDIA GPU, its driver new enough, and a cgroup of version 2."""
        device = self._state.devices[grant.index]
        branch = device.driver_version.partition(".")[0]
        if grant.vendor != "nvidia":
            return f"{grant.vendor}'s driver has no such limit"
        if device.partition:
            return "the driver limits whole GPUs only"
        if not branch.isdecimal() or int(branch) < OLDEST_DRIVER:
            return f"driver {device.driver_version}; needs {OLDEST_DRIVER} or later"
        if self._folder(record) is None:
            return "the job has no cgroup of version 2"
        return ""

    def apply(self, record: JobRecord, grant: Grant) -> bool:
        """Set the hard limit of the job's cgroup."""
        folder = self._folder(record)
        if folder is None:
            raise RefusalError(f"job {record.job}: its cgroup is gone", Refusal.NO_CGROUP)
        measured = self._contexts.of(self._state.devices[grant.index])
        if measured is not None and (grant.limit or 0) <= measured["context"]:
            raise RefusalError(
                f"{format_mib((grant.limit or 0) // MIB)} of GPU memory: the driver itself takes "
                f"{format_mib(measured['context'] // MIB)} of it",
                Refusal.LESS_THAN_A_CONTEXT,
                remedy="ask for more",
            )
        self._ask(do="cgroup_limit", uuid=grant.uuid, folder=str(folder), hard=grant.limit)
        return True

    def verify(self, record: JobRecord, grant: Grant) -> str:
        """Read it back."""
        folder = self._folder(record)
        if folder is None:
            return "the job's cgroup is gone"
        hard = self._ask(do="cgroup_limit_of", uuid=grant.uuid, folder=str(folder))["hard"]
        return "" if hard == grant.limit else f"the driver reports {hard} bytes"

    def stop(self, record: JobRecord) -> None:
        """The limit holds strays, too, until they are ended."""

    def remove(self, record: JobRecord) -> None:
        """Remove the limit before the cgroup goes, where it is still there."""
        held = [grant for grant in record.grants if grant.rung == DRIVER]
        folder = self._folder(record) if held else None
        for grant in held:
            if folder is not None:
                try:
                    self._ask(do="cgroup_limit", uuid=grant.uuid, folder=str(folder), hard=None)
                except SluiceError as error:
                    record.note("problem", uuid=grant.uuid, what=error.what)

    def _folder(self, record: JobRecord) -> Path | None:
        return cgroups.folder_of(record.job)

    def _ask(self, **request: Any) -> dict[str, Any]:
        return self._watcher.watches["nvidia"].worker.ask(**request)
