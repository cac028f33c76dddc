"""The preloaded library: one region of limits for all of a job's GPUs and processes."""

from __future__ import annotations

from contextlib import suppress

from prolog_epilog.contexts import VENDORS
from prolog_epilog.regions import Regions
from prolog_epilog.rungs.base import LIMITER
from sluice.exchange.record import Grant, JobRecord


class Limiter:
    """See `base.Rung`."""

    name = LIMITER
    needs: tuple[str, ...] = ()

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    def unavailable(self, record: JobRecord, grant: Grant) -> str:
        """The library knows only NVIDIA's and AMD's calls, and HIP does not distinguish partitions."""
        del record
        if grant.vendor == "amd" and self._regions.is_partition(grant):
            return "HIP gives the partitions of a GPU one PCI address"
        return "" if grant.vendor in VENDORS else f"no library for {grant.vendor} programs"

    def apply(self, record: JobRecord, grant: Grant) -> bool:
        """All of the job's grants at once: a GPU that is not in the region gets nothing."""
        del grant
        self._regions.make(record)
        return True

    def verify(self, record: JobRecord, grant: Grant) -> str:
        """Whether the region holds this limit."""
        del grant
        return "" if self._regions.of(record.job) is not None else "the job has no region of limits"

    def stop(self, record: JobRecord) -> None:
        """The region holds until the job's record is written."""

    def remove(self, record: JobRecord) -> None:
        """Remove the region."""
        with suppress(FileNotFoundError):
            self._regions.remove(record.job)
