"""The running jobs, for all who look after them."""

from __future__ import annotations

import threading
import time

from sluice.slurm import SlurmClient
from sluice.slurm.answers import Job

_SHARE = 20.0  # a listing is made at most every so many times what it takes
_OLDEST_S = 30.0


class Running:
    """One listing for all. For each, slurmctld packs every job that it has, whatever is asked for, and holds its locks:
    of many jobs that takes seconds, in which nothing starts."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._due = 0.0

    def jobs(self, *, fresh: bool = False) -> list[Job]:
        """Those that ran at most half a minute ago; `fresh`: those that run now. Raises SluiceError."""
        with self._lock:
            began = time.monotonic()
            if fresh or began >= self._due:
                self._jobs = self._client.jobs(states=["RUNNING"])
                self._due = began + min(_SHARE * (time.monotonic() - began), _OLDEST_S)
            return self._jobs
