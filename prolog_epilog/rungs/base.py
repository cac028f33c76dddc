"""What a rung is."""

from __future__ import annotations

from typing import Protocol

from sluice.exchange.record import Grant, JobRecord

MIG, DRIVER, MPS, LIMITER, WATCHDOG, NONE = "mig", "driver", "mps", "limiter", "watchdog", "none"
"""Names, as in records and policies."""


class Rung(Protocol):
    """One way to hold a grant to its limit. All but `verify` is done under the state's lock, and may be repeated.

    What a rung sets outlives the agent; a new agent finds it by the record alone.
    """

    name: str
    needs: tuple[str, ...]
    """Weaker rungs that are set with it, as it holds each process by itself and not their sum."""

    def unavailable(self, record: JobRecord, grant: Grant) -> str:
        """Why it cannot hold this grant on this node, for the record; empty: it can. Changes nothing."""

    def apply(self, record: JobRecord, grant: Grant) -> bool:
        """Set the grant's limit, or change it; False: it is set already, and was verified.

        Raises SluiceError, CoreError or OSError when it is not in force.
        """

    def verify(self, record: JobRecord, grant: Grant) -> str:
        """What is wrong with the limit that was set; empty: it is in force. Changes nothing, and may block.

        Raises SluiceError, CoreError or OSError.
        """

    def stop(self, record: JobRecord) -> None:
        """The job has ended, its processes may not have: end what would keep its memory. Raises nothing."""

    def remove(self, record: JobRecord) -> None:
        """Remove what was set for the job, if anything. Raises nothing but defects."""
