"""MIG instances and AMD partitions: a job with one is held to its memory, as it is the device that Slurm gave.

The hardware holds the memory of an instance. The kernel driver amdgpu holds that of a partition: it refuses what goes
beyond the partition's equal share (Linux's amdgpu_amdkfd_gpuvm.c, by partition), for every program.
"""

from __future__ import annotations

from prolog_epilog.rungs.base import MIG
from prolog_epilog.state import State
from sluice.exchange.record import Grant, JobRecord


class Partition:
    """See `base.Rung`."""

    name = MIG
    needs: tuple[str, ...] = ()

    def __init__(self, state: State) -> None:
        self._state = state

    def unavailable(self, record: JobRecord, grant: Grant) -> str:
        """The hardware cannot hold a limit below the instance's size."""
        del record
        if not self._state.devices[grant.index].partition:
            return "a whole GPU"
        if grant.limit is not None and grant.limit < grant.total:
            return "the limit is less than the instance"
        return ""

    def apply(self, record: JobRecord, grant: Grant) -> bool:
        """The layout holds the limit already."""
        return True

    def verify(self, record: JobRecord, grant: Grant) -> str:
        """Whether the node has the instance."""
        del record
        return "" if any(one.uuid == grant.uuid for one in self._state.devices) else "the instance is gone"

    def stop(self, record: JobRecord) -> None:
        """Nothing to do."""

    def remove(self, record: JobRecord) -> None:
        """Nothing to do: the layout stays."""
