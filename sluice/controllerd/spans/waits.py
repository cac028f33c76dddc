"""Why jobs waited, from when on, with whom, and how their start was decided, as slurmctld's plugins wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.explain.decisions import DECISION, PLAN, Decision, Mode, Outcome, Plan, parse_entry, question_of
from sluice.explain.followed import FollowedDecisions

_MOST_JOBS = 200_000
_MOST_PIECES = 100  # of one job; what changes later is part of the last
_MOST_IN_ALL = 1_000_000  # about 200 MB
_MOST_STARTS = 8  # of one job: it may be requeued
_PASS_S = 0.1  # within which a pass writes its plans; the next one begins later, at a quarter of the planner's interval
_OUTCOMES = {Outcome.REFUSED: "no place", Outcome.RESERVED: "would delay a reserved start"}
_STARTS = {
    Outcome.USED: "used",
    Outcome.OVERRULED: "overruled",
    Outcome.SHADOWED: "shadowed",
    Outcome.STOCK_FOUND: "stock found",
}


@dataclass(frozen=True, slots=True)
class StartDecision:
    """How slurmctld came to nodes for a job; times in seconds."""

    time: float  # since 1970, when it was written: the end
    outcome: str  # what was made of the core's answer
    planned: bool  # the planner had chosen the nodes
    core_s: float
    stock_s: float


class Waits:
    """Follows the decisions. A new object reads again what is kept of them, so that nothing is lost with a process."""

    def __init__(self, folder: Path) -> None:
        self._followed = FollowedDecisions(folder)
        self._jobs: dict[int, list[tuple[float, str]]] = {}
        self._pieces = 0
        self._starts: dict[tuple[int, int | None], list[StartDecision]] = {}
        self._gangs: dict[int, list[int]] = {}
        self._pass: tuple[int, float, dict[int, list[int]]] = (0, 0.0, {})

    def look(self) -> None:
        """Take in all that was written until now. Raises DecisionError."""
        self._look()
        while self._followed.behind:
            self._look()

    def of_jobs(self, numbers: Iterable[int]) -> list[tuple[float, str]]:
        """Times and reasons of a job; `numbers`: its own and its array's, which waits in its tasks' place."""
        return sorted(piece for number in set(numbers) for piece in self._jobs.get(number, ()))

    def starts_of(self, number: int, task: int | None = None) -> list[StartDecision]:
        """The last decisions that may have started a job, by time; `task`: of an array with that number."""
        return self._starts.get((number, task), [])

    def gang_of(self, number: int) -> list[int]:
        """The numbers of the jobs that were planned to start together with a job, itself among them."""
        return self._gangs.get(number, [])

    def _look(self) -> None:
        for kind, time, payload in self._followed.look({DECISION, PLAN}):
            if kind == PLAN:
                plan = parse_entry(kind, payload)
                if isinstance(plan, Plan):
                    self._take_plan(plan, time)
                continue
            job, mode, outcome = question_of(payload)
            if mode != Mode.RUN_NOW:
                continue
            if outcome in _OUTCOMES:
                self._take(job.id, time, _OUTCOMES[outcome])
            elif outcome in _STARTS:
                self._take_start(time, parse_entry(kind, payload))

    def _take_plan(self, plan: Plan, time: float) -> None:
        if plan.reason:
            self._take(plan.job_id, time, plan.reason)
        if not plan.gang:
            return
        planned, last, gangs = self._pass
        if planned != plan.planned or time - last > _PASS_S:
            gangs = {}  # a gang's number is another one's in another pass
        self._pass = plan.planned, time, gangs
        members = gangs.setdefault(plan.gang, [])
        members.append(plan.job_id)
        if len(members) > 1 and not set(members) <= set(self.gang_of(plan.job_id)):  # only what is new is written again
            for job in members:
                self._gangs[job] = members
        _bound(self._gangs)

    def _take_start(self, time: float, decision: object) -> None:
        if isinstance(decision, Decision):
            start = StartDecision(
                time,
                _STARTS[decision.outcome],
                decision.planned,
                decision.core_ns / 1e9,
                decision.stock_ns / 1e9,
            )
            job = decision.job  # a task has no number of its own yet
            starts = self._starts.setdefault((job.array_id or job.id, job.array_task), [])
            starts.append(start)
            del starts[:-_MOST_STARTS]
            _bound(self._starts)

    def _take(self, job: int, time: float, reason: str) -> None:
        pieces = self._jobs.setdefault(job, [])
        if len(pieces) < _MOST_PIECES and (not pieces or pieces[-1][1] != reason):
            pieces.append((time, reason))
            self._pieces += 1
        if len(self._jobs) > _MOST_JOBS or self._pieces > _MOST_IN_ALL:
            self._pieces -= len(self._jobs.pop(next(iter(self._jobs))))


def _bound(known: dict[Any, Any]) -> None:
    """Let go of the jobs that came first, beyond the most."""
    while len(known) > _MOST_JOBS:
        del known[next(iter(known))]
