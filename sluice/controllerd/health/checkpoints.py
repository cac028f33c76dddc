"""Signals for running jobs that save their state: periodically, and before their time limit; and their answers.

Nodes report when a job last touched its file (`prolog_epilog/profiles.py`), by a time that the kernel sets: a job can
say so at any moment, about itself alone. A job of several nodes has saved when all of them have.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from policy.checkpoint import NodeCheckpoint, Rhythm
from sluice.base.hostlist import expand
from sluice.exchange.saves import ClassFailures, JobSaves, Saves
from sluice.slurm.answers import Job, Node

FIRST_S = 600
"""The interval of `daly` until a save has been measured, of the job or of another one of its account."""
_LATELY = 8  # saves of an account that count, about
_LEAST_S = 60
_CLOCKS_S = 1.0  # by which a node's clock may be behind
_KEPT_S = 86400.0  # of a job that does not run: one that is requeued goes on with what is known of it
_MOST_KEPT = 20_000  # of these
_MOST_PASSED_S = 60.0  # a daemon that did not run does not know what failed
_TYPE = re.compile(r"(?:^|,)gpu:([^:,(]+):")


def daly(save_s: float, mttf_s: float) -> float:
    """The time of work between two saves that loses least, to higher order.

    J. T. Daly: A higher order estimate of the optimum checkpoint interval for restart dumps. Future Generation Computer
    Systems 22 (2006), 303-312, equation 37.
    """
    if save_s >= 2 * mttf_s:
        return mttf_s
    part = save_s / (2 * mttf_s)
    return math.sqrt(2 * save_s * mttf_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def class_of(node: Node) -> str:
    """The types of its GPUs."""
    return ",".join(sorted(set(_TYPE.findall(node.gres)))) or "none"


class Checkpoints:
    """When each job is signalled next, and what came of it. Not thread-safe; `saves` outlives the daemon."""

    def __init__(self, saves: Saves | None = None) -> None:
        self.saves = saves or Saves()
        self._classes: dict[str, str] = {}
        self._counted: dict[str, Counter[str]] = {}  # by a job's nodes: how many of each class
        self._watched: float | None = None

    def due(self, jobs: Iterable[Job], policy: NodeCheckpoint, now: float) -> list[Job]:
        """The running jobs that are to be signalled now."""
        found = []
        for job in jobs:
            rhythm = policy.rhythm(job.account, job.comment)
            if job.state != "RUNNING" or (rhythm is None and not policy.is_system(job.comment)):
                continue
            one = self.saves.jobs.setdefault(job.id, JobSaves())
            started = float(job.start_time or one.started or now)
            if started != one.started:
                one.started, one.signalled, one.ending, one.unsaved, one.savable = started, 0.0, False, "", False
            one.seen, one.account = now, job.account
            if rhythm is None and one.unsaved:
                continue
            if rhythm is not None:  # else it is stopped as it is saved, which is for its end alone
                self._set_interval(one, job, rhythm, policy)
            if self._is_due(one, job, policy, now):
                one.signalled = now
                one.signals += 1
                found.append(job)
        self._forget(now)
        return found

    def ask(self, job: Job, policy: NodeCheckpoint, now: float) -> bool:
        """Whether a job that is to be ended saves when it is signalled; then it counts as signalled now. In its first
        minute a program may not catch the signal yet, which ends it for good, and has little to lose."""
        if policy.rhythm(job.account, job.comment) is None and not policy.is_system(job.comment):
            return False
        one = self.saves.jobs.setdefault(job.id, JobSaves(started=float(job.start_time or now), seen=now))
        if one.unsaved and policy.is_system(job.comment):
            return False
        if now - one.started < _LEAST_S and (one.saved or 0.0) <= one.started:
            return False
        one.signalled = now
        one.signals += 1
        return True

    def _forget(self, now: float) -> None:
        """Of jobs that do not run any more the latest are kept."""
        away = sorted((one.seen, job) for job, one in self.saves.jobs.items() if one.seen != now)
        for number, (seen, job) in enumerate(reversed(away)):
            if number >= _MOST_KEPT or now - seen >= _KEPT_S:
                del self.saves.jobs[job]

    def _set_interval(self, one: JobSaves, job: Job, rhythm: Rhythm, policy: NodeCheckpoint) -> None:
        one.daly = rhythm.interval_s == "daly"
        if rhythm.interval_s != "daly":
            one.interval_s, one.mttf_s = rhythm.interval_s, None
            return
        one.mttf_s = self._mttf(job.nodes, policy.node_mtbf_s)
        save_s = self.saves.accounts.get(job.account) if one.save_s is None else one.save_s
        one.interval_s = FIRST_S if save_s is None else max(_LEAST_S, round(daly(save_s, one.mttf_s)))

    def _is_due(self, one: JobSaves, job: Job, policy: NodeCheckpoint, now: float) -> bool:
        close = (
            policy.before_time_limit_s is not None
            and job.end_time is not None
            and job.end_time - now <= policy.before_time_limit_s
            # A program that does not catch the signal yet is ended by it.
            and now - one.started >= min(_LEAST_S, (job.end_time - one.started) / 2)
            and not one.ending
        )
        if close:
            one.ending = True
        last = one.signalled or one.started
        if one.daly and one.saved is not None:
            last = max(last, one.saved)  # between saves, whoever began them
        return close or bool(one.interval_s and now - last >= one.interval_s)

    def hear(self, jobs: Iterable[Job], said: Mapping[int, list[float | None]], now: float) -> bool:
        """What each node reported of running jobs; whether one of them has saved again. Times of nodes whose clocks are
        ahead count when they have come."""
        heard = False
        for job in jobs:
            one, times = self.saves.jobs.get(job.id), said.get(job.id, [])
            ended = [at for at in times if at is not None and at <= now]
            if one is None or not ended or len(ended) < max(job.node_count, len(times)):
                continue
            first = min(ended)
            if first <= (one.saved or 0.0):
                continue
            answers = one.signalled and (one.saved or 0.0) < one.signalled - _CLOCKS_S <= first
            one.saved, heard = first, True
            if answers:
                one.answers += 1
                one.save_s = round(max(max(ended) - one.signalled, 0.1), 1)
                before = self.saves.accounts.get(job.account, one.save_s)
                self.saves.accounts[job.account] = round(before + (one.save_s - before) / _LATELY, 1)
        return heard

    def know(self, unsaved: Mapping[int, str]) -> bool:
        """Which jobs their nodes can save as they run, and why not the others; whether that was not known."""
        new = False
        for job, why in unsaved.items():
            one = self.saves.jobs.get(job)
            if one is not None and (one.unsaved, one.savable) != (why, not why):
                one.unsaved, one.savable, new = why, not why, True
        return new

    # ---- failures of nodes ----

    def watch(self, nodes: Iterable[Node], busy: Iterable[str], now: float) -> None:
        """Count the time of nodes on which jobs run."""
        classes = {node.name: class_of(node) for node in nodes}
        if classes != self._classes or len(self._counted) > _MOST_KEPT:
            self._classes, self._counted = classes, {}
        passed = 0.0 if self._watched is None else min(max(now - self._watched, 0.0), _MOST_PASSED_S)
        self._watched = now
        for name in busy:
            self._of(name).node_s += passed

    def failed(self, node: str) -> None:
        """A node, or one of its GPUs, has failed under a job."""
        self._of(node).failures += 1

    def _of(self, node: str) -> ClassFailures:
        return self._class(self._classes.get(node, "none"))

    def _class(self, name: str) -> ClassFailures:
        return self.saves.classes.setdefault(name, ClassFailures())

    def _mttf(self, nodes: str, assumed_s: float) -> float:
        """Of a job: of the first of its nodes that fails."""
        if nodes not in self._counted:
            self._counted[nodes] = Counter(self._classes.get(node, "none") for node in expand(nodes) or [""])
        counted = self._counted[nodes]
        return 1 / sum(count * rate(self._class(name), assumed_s) for name, count in counted.items())


def rate(measured: ClassFailures, assumed_s: float) -> float:
    """Failures of a node in a second; the policy's assumption counts as one failure in that time."""
    return (1 + measured.failures) / (assumed_s + measured.node_s)
