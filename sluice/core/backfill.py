"""Backfill of the core (``sluice/core.h``, section backfill): when each pending job will start, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.core._core import ffi, lib
from sluice.core.cluster import Cluster
from sluice.core.errors import check, new_error_text
from sluice.core.placement import Part, Request, fill_part, to_part
from sluice.core.power import Power

HORIZON_S: int = lib.SLUICE_BACKFILL_HORIZON_S

EASY = 1
"""Only the first job that cannot start now gets a reservation."""

CONSERVATIVE = 2**32 - 1
"""Every job gets one."""


@dataclass(frozen=True)
class Start:
    """When and where a job starts."""

    start_s: int
    parts: tuple[Part, ...]
    watts: int = 0
    """Of each GPU, where there are power budgets."""
    waits_for_power: int | None = None
    """A budget without which it could start now."""


@dataclass(frozen=True)
class PendingJob:
    """A job in the queue; `limit_s` bounds its run time. Neighbours of one nonzero `group` start together."""

    request: Request
    limit_s: int
    group: int = 0
    held: Start | None = None  # its reservation from an earlier plan
    watts: int = 0  # of each GPU, above what it draws idle
    least_watts: int = 0  # the fewest that it may start with; 0: `watts`
    power_budgets: int = -1  # bits of the budgets that count it
    power_guaranteed: bool = False  # it may start with none: what it needs is kept for it


@dataclass(frozen=True)
class RunningJob:
    """An allocation of the cluster and the moment by which it ends."""

    allocation: int
    end_s: int
    watts: int = 0  # as of a pending job
    power_budgets: int = -1


_ALL_BUDGETS = 2**64 - 1


class Queue:
    """Running and pending jobs in the core's own form, for one or more plans."""

    def __init__(self, running: Sequence[RunningJob], pending: Sequence[PendingJob]) -> None:
        self.running_count, self.pending_count = len(running), len(pending)
        self.running = ffi.new("struct sluice_backfill_running[]", max(len(running), 1))
        for c_running, job in zip(self.running, running, strict=False):
            c_running.allocation, c_running.end_s = job.allocation, job.end_s
            c_running.watts, c_running.power_budgets = job.watts, job.power_budgets & _ALL_BUDGETS
        self.pending = ffi.new("struct sluice_backfill_job[]", max(len(pending), 1))
        self._keep: list[Any] = [job.request for job in pending]
        for c_job, pending_job in zip(self.pending, pending, strict=False):
            c_job.request = pending_job.request.c
            c_job.limit_s, c_job.group = pending_job.limit_s, pending_job.group
            c_job.watts, c_job.least_watts = pending_job.watts, pending_job.least_watts
            c_job.power_budgets = pending_job.power_budgets & _ALL_BUDGETS
            c_job.power_guaranteed = pending_job.power_guaranteed
            if pending_job.held:
                parts = ffi.new("struct sluice_part[]", max(len(pending_job.held.parts), 1))
                for c_part, part in zip(parts, pending_job.held.parts, strict=False):
                    fill_part(c_part, part)
                self._keep.append(parts)
                c_job.held, c_job.held_count = parts, len(pending_job.held.parts)
                c_job.held_start_s = pending_job.held.start_s
        self.part_capacity = sum(max(job.request.nodes_min, job.request.nodes_max, 1) for job in pending)


class Plan:
    """A plan in the core's own form."""

    def __init__(self, queue: Queue) -> None:
        self.count = queue.pending_count
        self.starts = ffi.new("struct sluice_backfill_start[]", max(queue.pending_count, 1))
        self.parts = ffi.new("struct sluice_part[]", max(queue.part_capacity, 1))
        self.part_count = ffi.new("uint32_t *")

    def waits_for_power(self) -> list[int | None]:
        """For each job a budget without which it could start now, also for those without a start."""
        return [start.waits_for_power - 1 if start.waits_for_power else None for start in self.starts[0 : self.count]]

    def to_list(self) -> list[Start | None]:
        """Each job's start; None: not planned, or never."""
        found: list[Start | None] = []
        for start in self.starts[0 : self.count]:
            if start.start_s == lib.SLUICE_BACKFILL_NO_START:
                found.append(None)
            else:
                parts = self.parts[start.first_part : start.first_part + start.part_count]
                budget = start.waits_for_power - 1 if start.waits_for_power else None
                found.append(Start(start.start_s, tuple(to_part(part) for part in parts), start.watts, budget))
        return found


class Backfill:
    """Memory for plans for clusters of up to `max_nodes` nodes."""

    def __init__(self, max_nodes: int, *, max_jobs: int = 0, max_running: int = 0, max_planned: int = 0) -> None:
        config = ffi.new("struct sluice_backfill_config *", (max_jobs, max_running, max_planned))
        handle, text = ffi.new("struct sluice_backfill **"), new_error_text()
        check(lib.sluice_backfill_new(config, max_nodes, handle, text), text)
        self.handle = ffi.gc(handle[0], lib.sluice_backfill_free)
        self._power: Power | None = None

    def set_power(self, power: Power | None) -> None:
        """The budgets that plans from now on book watts of; None: of none."""
        self._power = power  # which has to live as long
        lib.sluice_backfill_set_power(self.handle, power.handle if power else ffi.NULL)

    def fill(self, plan: Plan, cluster: Cluster, now_s: int, queue: Queue, reservations: int = CONSERVATIVE) -> None:
        """Plan the queue, in order of priority, into `plan`."""
        text = new_error_text()
        check(
            lib.sluice_backfill_plan(
                self.handle,
                cluster.handle,
                now_s,
                queue.running,
                queue.running_count,
                queue.pending,
                queue.pending_count,
                reservations,
                plan.starts,
                plan.parts,
                max(queue.part_capacity, 1),
                plan.part_count,
                text,
            ),
            text,
        )

    def plan(
        self,
        cluster: Cluster,
        now_s: int,
        running: Sequence[RunningJob],
        pending: Sequence[PendingJob],
        reservations: int = CONSERVATIVE,
    ) -> list[Start | None]:
        """Each pending job's start, in the order given; None: not planned, or never."""
        queue = Queue(running, pending)
        plan = Plan(queue)
        self.fill(plan, cluster, now_s, queue, reservations)
        return plan.to_list()
