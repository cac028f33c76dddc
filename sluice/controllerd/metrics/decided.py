"""From submission to the first decision: what the placement hook's decisions say, followed as they are written."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from sluice.explain.decisions import DECISION, JobFacts, Mode, question_of
from sluice.explain.followed import FollowedDecisions

_LATEST = 1000  # jobs over which percentiles are taken
_MOST_JOBS = 500_000


class Decided:
    """Jobs by their first decision. Those submitted before this object was made, at `began` (s since 1970), count
    nowhere, as their first decision may have been before. Without decisions, e.g. at level off, there is nothing."""

    def __init__(self, folder: Path, began: float) -> None:
        self._followed = FollowedDecisions(folder)
        self._floor = int(began) + 1  # Slurm keeps submission in whole seconds
        self._seen: dict[tuple[int, int], None] = {}  # job or array, submission; oldest first
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self.totals: dict[str, tuple[int, float]] = {}  # account -> jobs, seconds that they waited

    def look(self) -> None:
        """Follow the entries that were written since the last look. Raises DecisionError where they cannot be read."""
        for _, time_s, payload in self._followed.look({DECISION}):
            job, mode, _ = question_of(payload)
            if mode != Mode.TEST_ONLY:
                self._take(job, time_s)

    def percentile(self, share: float) -> float | None:
        """Of the latest jobs, in seconds; None before the first."""
        if not self._latest:
            return None
        return sorted(self._latest)[min(len(self._latest) - 1, int(share * len(self._latest)))]

    def _take(self, job: JobFacts, time_s: float) -> None:
        key = job.array_id or job.id, job.submit  # an array is decided with its first task
        if job.submit < self._floor or key in self._seen:
            return
        self._seen[key] = None
        if len(self._seen) > _MOST_JOBS:
            oldest = sorted(submit for _, submit in self._seen)[_MOST_JOBS // 2]
            self._floor = oldest + 1
            self._seen = {one: None for one in self._seen if one[1] > oldest}
        wait = max(0.0, time_s - job.submit)
        self._latest.append(wait)
        jobs, waited_s = self.totals.get(job.account, (0, 0.0))
        self.totals[job.account] = jobs + 1, waited_s + wait
