"""The weakest rung, which always runs: `prolog_epilog.watching` ends what is over its limit."""

from __future__ import annotations

from prolog_epilog.rungs.base import WATCHDOG
from prolog_epilog.watching import Watcher
from sluice.exchange.record import Grant, JobRecord


class Watchdog:
    """See `base.Rung`. Its limit is the record's, so that there is nothing to set."""

    name = WATCHDOG
    needs: tuple[str, ...] = ()

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def unavailable(self, record: JobRecord, grant: Grant) -> str:
        """Available for every vendor that is watched."""
        del record
        return "" if grant.vendor in self._watcher.watches else f"nothing watches {grant.vendor} GPUs"

    def apply(self, record: JobRecord, grant: Grant) -> bool:
        """Sample at once."""
        del record
        self._watcher.watches[grant.vendor].wanted.set()
        return True

    def verify(self, record: JobRecord, grant: Grant) -> str:
        """In force as long as the driver answers."""
        del record
        problem = self._watcher.watches[grant.vendor].problem
        return "" if problem is None else problem.what

    def stop(self, record: JobRecord) -> None:
        """Nothing to do."""

    def remove(self, record: JobRecord) -> None:
        """Nothing to do."""
