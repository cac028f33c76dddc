"""MIG instances and AMD partitions: whoever has one is held to its memory, and the device that Slurm gave is it.

An instance's memory is the hardware's to hold. A partition's is amdgpu's: the kernel driver refuses what goes beyond
the partition's equal share (Linux's amdgpu_amdkfd_gpuvm.c, by partition), whatever program asks.
"""

from __future__ import annotations

from prolog_epilog.record import Grant, JobRecord
from prolog_epilog.rungs.base import MIG
from prolog_epilog.state import State


class Partition:
    """See `base.Rung`."""

    name = MIG
    needs: tuple[str, ...] = ()

    def __init__(self, state: State) -> None:
        self._state = state

    def unavailable(self, record: JobRecord, grant: Grant) -> str:
        """A limit below the instance's size is not the hardware's to hold."""
        del record
        if not self._state.devices[grant.index].partition:
            return "a whole GPU"
        if grant.limit is not None and grant.limit < grant.total:
            return "the limit is less than the instance"
        return ""

    def apply(self, record: JobRecord, grant: Grant) -> None:
        """It is so by the layout."""

    def verify(self, record: JobRecord, grant: Grant) -> str:
        """Whether the node has the instance."""
        del record
        return "" if any(one.uuid == grant.uuid for one in self._state.devices) else "the instance is gone"

    def stop(self, record: JobRecord) -> None:
        """Nothing is kept."""

    def remove(self, record: JobRecord) -> None:
        """The layout stays."""
