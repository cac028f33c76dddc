"""Signals for running jobs that save their state: periodically, and before their time limit."""

from __future__ import annotations

from collections.abc import Iterable

from policy.checkpoint import NodeCheckpoint, asks
from sluice.slurm.answers import Job


class Checkpoints:
    """When each job is signalled next. Not thread-safe; a new daemon starts to count again."""

    def __init__(self) -> None:
        self._signalled: dict[int, float] = {}
        self._ending: set[int] = set()

    def due(self, jobs: Iterable[Job], policy: NodeCheckpoint, now: float) -> list[Job]:
        """The running jobs that are to be signalled now."""
        found = []
        running = {job.id: job for job in jobs if job.state == "RUNNING" and asks(job.comment) is not None}
        self._signalled = {job: when for job, when in self._signalled.items() if job in running}
        self._ending &= set(running)
        for number, job in running.items():
            every = asks(job.comment) or policy.interval_s
            last = self._signalled.setdefault(number, float(job.start_time or now))
            ends = job.end_time
            close = (
                policy.before_time_limit_s is not None
                and ends is not None
                and ends - now <= policy.before_time_limit_s
                and number not in self._ending
            )
            if close:
                self._ending.add(number)
            if close or (every and now - last >= every):
                self._signalled[number] = now
                found.append(job)
        return found
