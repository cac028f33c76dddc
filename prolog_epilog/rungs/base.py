"""What a rung is."""

from __future__ import annotations

from typing import Protocol

from prolog_epilog.record import Grant, JobRecord

MIG, DRIVER, MPS, LIMITER, WATCHDOG, NONE = "mig", "driver", "mps", "limiter", "watchdog", "none"
"""Names, as in records and policies."""


class Rung(Protocol):
    """One way to hold a grant to its limit. All is done under the state's lock, and may be done again at any time.

    What a rung sets outlives the agent; a new agent finds it by the record alone.
    """

    name: str
    needs: tuple[str, ...]
    """Weaker rungs that are set beside it, as it holds each process by itself and not their sum."""

    def unavailable(self, record: JobRecord, grant: Grant) -> str:
        """Why it cannot hold this grant on this node, for the record; empty: it can. Changes nothing."""

    def apply(self, record: JobRecord, grant: Grant) -> None:
        """Set the grant's limit, or change it. Raises SluiceError, CoreError or OSError when it is not in force."""

    def verify(self, record: JobRecord, grant: Grant) -> str:
        """What is wrong with the limit that was set; empty: it is in force."""

    def stop(self, record: JobRecord) -> None:
        """The job has ended, its processes may not have: end what would keep its memory. Raises nothing."""

    def remove(self, record: JobRecord) -> None:
        """Take away what was set for the job; nothing where there is nothing. Raises nothing that is not a defect."""
