"""Why jobs waited, and from when on, as slurmctld's plugins wrote it while they decided."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sluice.explain.decisions import DECISION, PLAN, Mode, Outcome, Plan, parse_entry, question_of
from sluice.explain.followed import FollowedDecisions

_MOST_JOBS = 200_000
_MOST_PIECES = 100  # of one job; what changes later is part of the last
_MOST_IN_ALL = 1_000_000  # about 200 MB
_OUTCOMES = {Outcome.REFUSED: "no place", Outcome.RESERVED: "would delay a reserved start"}


class Waits:
    """Follows the decisions. A new object reads again what is kept of them, so that nothing is lost with a process."""

    def __init__(self, folder: Path) -> None:
        self._followed = FollowedDecisions(folder)
        self._jobs: dict[int, list[tuple[float, str]]] = {}
        self._pieces = 0

    def look(self) -> None:
        """Take in all that was written until now. Raises DecisionError."""
        self._look()
        while self._followed.behind:
            self._look()

    def of_jobs(self, numbers: Iterable[int]) -> list[tuple[float, str]]:
        """Times and reasons of a job; `numbers`: its own and its array's, which waits in its tasks' place."""
        return sorted(piece for number in set(numbers) for piece in self._jobs.get(number, ()))

    def _look(self) -> None:
        for kind, time, payload in self._followed.look({DECISION, PLAN}):
            if kind == PLAN:
                plan = parse_entry(kind, payload)
                if isinstance(plan, Plan) and plan.reason:
                    self._take(plan.job_id, time, plan.reason)
                continue
            job, mode, outcome = question_of(payload)
            if mode == Mode.RUN_NOW and outcome in _OUTCOMES:
                self._take(job.id, time, _OUTCOMES[outcome])

    def _take(self, job: int, time: float, reason: str) -> None:
        pieces = self._jobs.setdefault(job, [])
        if len(pieces) < _MOST_PIECES and (not pieces or pieces[-1][1] != reason):
            pieces.append((time, reason))
            self._pieces += 1
        if len(self._jobs) > _MOST_JOBS or self._pieces > _MOST_IN_ALL:
            self._pieces -= len(self._jobs.pop(next(iter(self._jobs))))
