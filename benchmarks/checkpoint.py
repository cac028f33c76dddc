"""Work that jobs lose to failures and to saves, over what Daly's optimum would have lost in the same failures.

The jobs are simulated, what decides is not: the controllers' daemon's `Checkpoints` begins with the policy's assumption
of 150 days for a node, and learns failures and the time of saves as on a cluster. The peer's jobs save at Daly's
interval of the rate at which nodes really fail, and of the time that their saves really take, from their first second.
Lost is the time of saves, and the work since the last one began when a node fails; a job that is over without a failure
has lost its saves alone.

Failures are drawn: exponential ones, and Weibull ones of shape 0.8 and 0.7, with a decreasing hazard (Schroeder and
Gibson: A large-scale study of failures in high-performance computing systems, DSN 2006), of nodes that fail ten times
as often as assumed, as often, and a tenth as often. With `--failures` they are also those of Los Alamos' systems
(LA-UR-05-7318): of each system with at least 16 nodes and 100 failures, with jobs of an eighth and of a 32nd of it.

With `--criu` it also measures how long a node takes to save a job as it runs (checkpoint_save.py).
"""

from __future__ import annotations

import csv
import heapq
import lzma
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Protocol

import click

from benchmarks import Result, checkpoint_save
from policy.checkpoint import NodeCheckpoint
from sluice.base.errors import SluiceError
from sluice.controllerd.health.checkpoints import Checkpoints, daly
from sluice.exchange.saves import ClassFailures, JobSaves
from sluice.slurm.answers import Job

OPTIONS = [
    click.Option(
        ["--failures"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="The list of LA-UR-05-7318 as .csv or .csv.xz.",
    ),
    click.Option(["--seeds"], type=click.IntRange(1, 100), default=3, show_default=True, help="Of drawn failures."),
    click.Option(["--days"], type=click.IntRange(10), default=180, show_default=True, help="Of drawn failures."),
    click.Option(["--nodes"], type=click.IntRange(64), default=128, show_default=True, help="Of drawn failures."),
    *checkpoint_save.OPTIONS,
]
MUST = {"drawn_over_optimum": ("<=", 1.1)}
_LISTED_MUST = {"listed_over_optimum": ("<=", 1.1)}

_DAY_S = 86400.0
_SHAPES = (1.0, 0.8, 0.7)
_MTBF_DAYS = (15, 150, 1500)
_SIZES = (8, 64)  # nodes of a job, of drawn failures
_PARTS = (8, 32)  # jobs of a listed system
_LEAST_NODES, _LEAST_FAILURES = 16, 100  # of a listed system
_SAVES_S = {"small": 20.0, "medium": 120.0, "large": 600.0}  # of an account's jobs, in the median
_JOB_SIGMA = 0.5  # of the logarithm, from job to job of an account
_SAVE_SIGMA = 0.2  # the same from save to save of a job
_WORK_S = 5 * _DAY_S  # of a job, without what it loses
_TICK_S = 5.0  # of the duty
_LOOK_S = 6 * 3600.0  # a job that waits for longer than that is looked at meanwhile; the duty does so each tick
_POLICY = NodeCheckpoint(default="app", interval_s="daly")
_STEADY_JOBS = 1000


@dataclass(frozen=True)
class History:
    """Failures of nodes: seconds since the beginning, and the node's number."""

    nodes: int
    length_s: float
    failures: Sequence[tuple[float, int]]

    @property
    def mtbf_s(self) -> float:
        """Of a node."""
        return self.nodes * self.length_s / len(self.failures)


@dataclass
class _Run:
    """A job that runs on a block of nodes; times are of the simulation."""

    number: int
    account: str
    save_s: float  # in the median
    begun: float  # its latest start
    since: float  # from which on nothing is saved
    done_s: float = 0.0  # work that is saved
    signalled: float | None = None  # it saves since then


class _Way(Protocol):
    """Who decides when jobs save."""

    def next_look(self, run: _Run, now: float) -> float: ...

    def signals(self, run: _Run, now: float) -> bool: ...

    def saved(self, run: _Run, now: float) -> None: ...

    def failed(self) -> None: ...

    def passed(self, node_s: float) -> None: ...


class _Optimum:
    """Daly's interval of what really is."""

    def __init__(self, mttf_s: float) -> None:
        self._mttf_s = mttf_s

    def next_look(self, run: _Run, now: float) -> float:
        return max(now, run.since + daly(run.save_s, self._mttf_s))

    def signals(self, run: _Run, now: float) -> bool:
        return True

    def saved(self, run: _Run, now: float) -> None:
        pass

    def failed(self) -> None:
        pass

    def passed(self, node_s: float) -> None:
        pass


class _Learnt:
    """As the controllers' daemon does it."""

    def __init__(self, size: int) -> None:
        self._checkpoints = Checkpoints()
        self._nodes = self._checkpoints.saves.classes.setdefault("none", ClassFailures())
        self._size = size

    def next_look(self, run: _Run, now: float) -> float:
        one = self._checkpoints.saves.jobs.get(run.number, JobSaves())
        due = max(run.since, one.signalled) + (one.interval_s or 0)
        return math.ceil(max(now + _TICK_S, min(due, now + _LOOK_S)) / _TICK_S) * _TICK_S

    def signals(self, run: _Run, now: float) -> bool:
        return bool(self._checkpoints.due([_job(run, self._size)], _POLICY, now))

    def saved(self, run: _Run, now: float) -> None:
        self._checkpoints.hear([_job(run, self._size)], {run.number: [now] * self._size}, now)

    def failed(self) -> None:
        self._checkpoints.failed("n1")

    def passed(self, node_s: float) -> None:
        self._nodes.node_s += node_s


def _job(run: _Run, size: int) -> Job:
    return Job(
        run.number, None, "", "", "", 1, run.account, "", "", "RUNNING", "", f"n[1-{size}]", size, 1, 0, 0,
        round(run.begun), None, None, 1, {}, "", "", "", "", "", "", "", "",
    )  # fmt: skip


class _Simulation:
    """Jobs of `size` nodes, each on nodes of its own, one after the other there."""

    def __init__(self, history: History, size: int, way: _Way, seed: int) -> None:
        self._history = history
        self._size = size
        self._way = way
        self._draws = random.Random(seed)
        self._begun = 0
        blocks = history.nodes // size
        self._runs = [self._begin(block, 0.0) for block in range(blocks)]
        self._waits = [0] * blocks  # events of a block before the one that it waits for do not count
        self._events = [(at, 0, node // size) for at, node in history.failures if node // size < blocks]
        heapq.heapify(self._events)
        self.lost_s = [0.0, 0.0]
        """In the first half of the time, and in the second."""

    def run(self) -> list[float]:
        """What all of them lose."""
        for block in range(len(self._runs)):
            self._wait(block, 0.0)
        before = 0.0
        while self._events[0][0] < self._history.length_s:
            now, wait, block = heapq.heappop(self._events)
            if wait not in (0, self._waits[block]):
                continue
            self._way.passed(len(self._runs) * self._size * (now - before))
            before = now
            if wait == 0:
                self._fail(block, now)
            else:
                self._go_on(block, now)
            self._wait(block, now)
        return self.lost_s

    def _begin(self, block: int, now: float) -> _Run:
        self._begun += 1
        account = list(_SAVES_S)[block % len(_SAVES_S)]
        draws = random.Random(f"{block} {self._begun}")
        return _Run(self._begun, account, _SAVES_S[account] * draws.lognormvariate(0, _JOB_SIGMA), now, now)

    def _wait(self, block: int, now: float) -> None:
        """For the end of the save, else for the next look or the end of the job."""
        run = self._runs[block]
        if run.signalled is not None:
            at = run.signalled + run.save_s * self._draws.lognormvariate(0, _SAVE_SIGMA)
        else:
            at = min(self._way.next_look(run, now), run.since + _WORK_S - run.done_s)
        self._waits[block] += 1
        heapq.heappush(self._events, (at, self._waits[block], block))

    def _go_on(self, block: int, now: float) -> None:
        run = self._runs[block]
        if run.signalled is not None:
            self._lose(now - run.signalled, now)
            run.done_s += run.signalled - run.since
            run.since, run.signalled = now, None
            self._way.saved(run, now)
        elif now - run.since + run.done_s >= _WORK_S - 0.001:
            self._runs[block] = self._begin(block, now)
        elif self._way.signals(run, now):
            run.signalled = now

    def _fail(self, block: int, now: float) -> None:
        run = self._runs[block]
        self._way.failed()
        self._lose(now - run.since, now)
        run.begun = run.since = now
        run.signalled = None

    def _lose(self, seconds: float, now: float) -> None:
        self.lost_s[now >= self._history.length_s / 2] += seconds


@dataclass
class _Sums:
    """What was lost, and what the optimum lost, by half of the time."""

    lost_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    optimum_s: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, history: History, size: int, seed: int) -> None:
        """Both, of one history."""
        lost = _Simulation(history, size, _Learnt(size), seed).run()
        optimum = _Simulation(history, size, _Optimum(history.mtbf_s / size), seed).run()
        for half in (0, 1):
            self.lost_s[half] += lost[half]
            self.optimum_s[half] += optimum[half]

    def ratio(self) -> float:
        """Of all the time."""
        return sum(self.lost_s) / sum(self.optimum_s)


def drawn(shape: float, mtbf_s: float, nodes: int, length_s: float, seed: int) -> History:
    """Each node fails again and again, since long before the beginning."""
    draws = random.Random(f"{shape} {mtbf_s} {seed}")
    scale = mtbf_s / math.gamma(1 + 1 / shape)
    failures = []
    for node in range(nodes):
        at = -mtbf_s * draws.uniform(5, 10)
        while at < length_s:
            if at >= 0:
                failures.append((at, node))
            at += draws.weibullvariate(scale, shape)
    return History(nodes, length_s, failures)


def listed(path: Path) -> dict[str, History]:
    """The systems of LA-UR-05-7318 with enough nodes and failures. Raises SluiceError."""
    try:
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
            rows = [
                (row["System"], int(row["nodes"]), int(row["nodenumz"]), _seconds(row["Prob Started"]))
                for row in csv.DictReader(file)
                if row["nodes"] and row["nodenumz"]
            ]
    except (OSError, ValueError, KeyError, TypeError, lzma.LZMAError) as error:
        raise SluiceError(
            f"{path}: not the list of LA-UR-05-7318: {error}", remedy="see docs/benchmarks.md, checkpoint"
        ) from error
    systems: defaultdict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for system, nodes, number, at in rows:
        if number < nodes:
            systems[system, nodes].append((at, number))
    found = {}
    for (system, nodes), failures in systems.items():
        if nodes >= _LEAST_NODES and len(failures) >= _LEAST_FAILURES:
            first, last = min(failures)[0], max(failures)[0]
            found[system] = History(nodes, last - first, [(at - first, number) for at, number in failures])
    return found


def _seconds(words: str) -> float:
    return datetime.strptime(words, "%m/%d/%Y %H:%M").timestamp()


def _of_drawn(seeds: int, days: int, nodes: int) -> Iterator[tuple[str, _Sums]]:
    for shape in _SHAPES:
        for mtbf in _MTBF_DAYS:
            for size in _SIZES:
                sums = _Sums()
                for seed in range(1, seeds + 1):
                    history = drawn(shape, mtbf * _DAY_S, nodes, days * _DAY_S, seed)
                    if history.failures:  # there is an optimum
                        sums.add(history, size, seed)
                if any(sums.optimum_s):
                    yield f"shape_{shape}_mtbf_{mtbf}_d_nodes_{size}", sums


def _of_listed(path: Path) -> Iterator[tuple[str, _Sums]]:
    for system, history in listed(path).items():
        for part in _PARTS:
            sums = _Sums()
            if size := history.nodes // part:
                sums.add(history, size, 1)
                yield f"system_{system}_nodes_{size}", sums


def _figures(kind: str, of: dict[str, _Sums]) -> dict[str, float]:
    ratios = sorted(one.ratio() for one in of.values())
    halves = [
        sum(one.lost_s[half] for one in of.values()) / sum(one.optimum_s[half] for one in of.values())
        for half in (0, 1)
    ]
    return {
        f"{kind}_over_optimum": sum(sum(one.lost_s) for one in of.values())
        / sum(sum(one.optimum_s) for one in of.values()),
        f"{kind}_over_optimum_first_half": halves[0],
        f"{kind}_over_optimum_second_half": halves[1],
        f"{kind}_over_optimum_case_median": median(ratios),
        f"{kind}_over_optimum_case_p95": quantiles(ratios, n=20, method="inclusive")[-1],
        f"{kind}_over_optimum_case_worst": ratios[-1],
    }


def _steady_us() -> float:
    """Of the daemon's processor, each tick, for one job that is to be signalled later."""
    checkpoints = Checkpoints()
    jobs = [_job(_Run(number, "large", 0.0, 0.0, 0.0), 8) for number in range(1, _STEADY_JOBS + 1)]
    said: dict[int, list[float | None]] = {job.id: [10.0] * 8 for job in jobs}
    taken = []
    for at in range(15, 500, 5):
        begin = time.process_time()
        checkpoints.hear(jobs, said, float(at))
        checkpoints.due(jobs, _POLICY, float(at))
        taken.append(time.process_time() - begin)
    return median(taken) / _STEADY_JOBS * 1e6


def run(
    failures: Path | None, seeds: int, days: int, nodes: int, criu: Path | None, mib: int, gpu_mib: int, saves: int
) -> Result:
    """Ratios of sums; by case in the spread. Of saves, the medians, and each in the spread."""
    cases = {"drawn": dict(_of_drawn(seeds, days, nodes))}
    if failures is not None:
        cases["listed"] = dict(_of_listed(failures))
    figures: dict[str, float] = {}
    for kind, of in cases.items():
        figures |= _figures(kind, of)
    result = Result(
        figures | {"tick_us_job": _steady_us()},
        spread={name: [one.ratio()] for of in cases.values() for name, one in of.items()},
        must=dict(_LISTED_MUST) if failures is not None else {},
    )
    if criu is not None:
        taken = checkpoint_save.measure(criu, mib, gpu_mib, saves)
        result.figures |= checkpoint_save.figures(taken, mib + gpu_mib)
        result.spread |= {f"save_{name}": seconds for name, seconds in taken.items()}
        result.must |= checkpoint_save.MUST
    return result
