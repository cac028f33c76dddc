"""A simulated cluster under a budget of watts, second by second, with the code that runs in production: the core's
planner, and the keeper and the estimates of the controllers' daemon.

What is a model: the watts that a job's GPUs would draw, by the kind of model that it trains (`DEMAND`; no public trace
has watts), its phases, and the speed under a cap (`gpu_sim.power_curve`, whose source is named there). Reports reach
the keeper, and its orders the GPUs, one second later each.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpu_sim.power_curve import speed
from sluice.controllerd.power.estimates import Estimates, booked
from sluice.controllerd.power.keeper import Decision, Gpu, Keeper, Limit, PowerJob
from sluice.core.backfill import EASY, Backfill, PendingJob, Plan, Queue, RunningJob
from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.placement import Request, commit, release
from sluice.core.power import Budget, Power
from sluice.simulate.traces import MICROSECOND, Trace

IDLE_W, LEAST_W, MOST_W = 52.0, 100.0, 400.0  # A100-SXM4-80GB, as gpu_sim/models.yaml has it
GPUS = 8  # of a node
PLAN_S = 2  # scheduling.backfill.interval
QUEUE = 48  # jobs that a plan looks at
LATE_S = 5

DEMAND = {
    "a2c": 0.30, "dqn": 0.30, "shufflenet_v2_x1_0": 0.45, "squeezenet1_0": 0.55, "mobilenet_v2": 0.55, "resnet18": 0.65,
    "resnet50": 0.80, "resnet101": 0.85, "vgg16": 0.90, "vgg19": 0.90, "bert": 0.85, "gpt2": 0.95, "lstm": 0.50,
    "deepspeech": 0.60, "inception3": 0.80, "transformer": 0.85,
}  # fmt: skip
"""Assumed part of a GPU's highest limit that training such a model draws; others `USUAL`."""
USUAL = 0.75

Way = Literal["sluice", "static", "fewer"]


@dataclass(frozen=True, slots=True)
class Work:
    """A job. `work_s`: seconds at full speed."""

    id: int
    user: int
    gpus: int
    work_s: float
    demand_w: float


@dataclass(slots=True)
class _Run:
    work: Work
    allocation: int
    places: tuple[int, ...]
    start: int
    end_s: int
    done_s: float = 0.0


@dataclass(slots=True)
class Ran:
    """What came of it."""

    gpu_s: float = 0.0
    """Work done, in GPU-seconds at full speed."""
    peak_w: float = 0.0
    over_s: int = 0
    """Samples of a second in which more was drawn than the budget."""
    late_s: int = 0
    """Those later than 5 s after the budget was lowered."""
    met_s: int = 0
    """From the lowering to the first sample from which on it was met."""
    stopped: int = 0
    stopped_constant: int = 0
    ended: int = 0
    step_us: list[float] = field(default_factory=list)


def read_work(trace: Trace, count: int, mean_s: float, gpus: int, seed: int) -> list[Work]:
    """The first jobs of a history; run times are scaled so that their mean is `mean_s`, and cut to 1 to 60 minutes. A
    history without users has one for each kind of job."""
    draw = random.Random(seed)
    jobs = [one for one in trace.jobs if 1 <= one.gpus <= gpus][:count]
    if not jobs:
        return []
    scale = mean_s / (sum(one.run for one in jobs) / len(jobs) / MICROSECOND)
    users: dict[str, int] = {}
    found = []
    for number, one in enumerate(jobs, 1):
        seconds = min(3600.0, max(60.0, one.run / MICROSECOND * scale))
        asked = one.gpus if one.gpus <= GPUS else one.gpus // GPUS * GPUS
        demand = min(1.0, DEMAND.get(one.kind, USUAL) * draw.uniform(0.95, 1.05))
        user = users.setdefault(one.user + "/" + one.kind, len(users) + 1)
        found.append(Work(number, user, asked, seconds, max(1.2 * IDLE_W, demand * MOST_W)))
    return found


class Simulation:
    """One way under one budget."""

    def __init__(
        self, work: Sequence[Work], nodes: int, way: Way, budget: Callable[[int], float], lowest: float, seed: int
    ) -> None:
        self.way, self.budget, self.lowest_w, self.seed = way, budget, lowest * MOST_W, seed
        usable = nodes if way != "fewer" else int(budget(0) // (GPUS * MOST_W))
        self.count = usable * GPUS
        self.cluster = Cluster(usable, max_allocations=self.count)
        shape = self.cluster.add_shape(NodeShape(tuple(GpuShape("a100", 81_920) for _ in range(GPUS))))
        for _ in range(usable):
            self.cluster.add_node(shape, cpus_milli=1000 * GPUS, host_memory_mib=GPUS)
        self.backfill = Backfill(usable, max_jobs=QUEUE, max_planned=QUEUE * usable * 2)
        self.power = Power(usable) if way == "sluice" else None
        self.backfill.set_power(self.power)
        self.waiting = deque(one for one in work if one.gpus <= self.count)
        self.running: dict[int, _Run] = {}
        cap = budget(0) / self.count if way == "static" else MOST_W
        self.caps = [max(LEAST_W, min(MOST_W, cap))] * self.count
        self.ordered: list[float] = list(self.caps)
        self.reported: list[tuple[float, float, int]] = [(IDLE_W, MOST_W, 0)] * self.count
        self.keeper, self.estimates = Keeper(), Estimates()
        self.binding = True
        self.published: dict[int, float] = {}
        self.changed = True
        self.ran = Ran()

    def run(self, seconds: int, lowered_at: int | None = None) -> Ran:
        """So many seconds; `lowered_at`: when the budget changes."""
        for now in range(seconds):
            if self.way == "sluice":
                self._keep(now, lowered_at)
            if now % PLAN_S == 0 and (self.changed or self.way == "sluice"):
                self._plan(now)
            drawn = self._second(now)
            self._sample(now, drawn, lowered_at)
        return self.ran

    def _demand(self, run: _Run, now: int) -> float:
        """A job's phases: a tenth of each 100 s or so it reads, or writes a checkpoint."""
        beat = 80 + run.work.id * 7 % 41
        if (now - run.start) % beat < beat // 10:
            return max(1.1 * IDLE_W, 0.45 * run.work.demand_w)
        wave = ((now * 2654435761 + run.work.id * 40503 + self.seed) >> 7 & 1023) / 1023
        return run.work.demand_w * (0.97 + 0.06 * wave)

    def _second(self, now: int) -> float:
        """What is drawn and done in a second."""
        reported = [(IDLE_W, self.caps[place], 0) for place in range(self.count)]
        total = (self.count - sum(len(one.places) for one in self.running.values())) * IDLE_W
        for job, run in list(self.running.items()):
            demand = self._demand(run, now)
            slowest = 1.0
            for place in run.places:
                drawn = min(self.caps[place], demand)
                slowest = min(slowest, speed(self.caps[place], demand))
                total += drawn
                reported[place] = drawn, self.caps[place], job
            run.done_s += slowest
            self.ran.gpu_s += slowest * run.work.gpus
            if run.done_s >= run.work.work_s:
                self._end(job)
                self.ran.ended += 1
        self.reported = reported
        if self.way == "sluice":
            self.caps = self.ordered
        return total

    def _end(self, job: int) -> None:
        run = self.running.pop(job)
        release(self.cluster, run.allocation)
        self.changed = True

    def _sample(self, now: int, drawn: float, lowered_at: int | None) -> None:
        self.ran.peak_w = max(self.ran.peak_w, drawn)
        if drawn <= self.budget(now) + 1e-6:
            return
        if lowered_at is None or now < lowered_at:
            self.ran.over_s += 1
        else:
            self.ran.met_s = now - lowered_at + 1
            self.ran.late_s += now - lowered_at >= LATE_S

    # ---- what runs in production ----

    def _keep(self, now: int, lowered_at: int | None) -> None:
        gpus = []
        for place, (drawn, cap, job) in enumerate(self.reported):
            run = self.running.get(job)
            expected = self.estimates.watts(run.work.user, "a100") if run else None
            gpus.append(
                Gpu(f"n{place // GPUS}", str(place), cap, LEAST_W, self.lowest_w, MOST_W, IDLE_W, drawn,
                    booked(expected, self.lowest_w, MOST_W, binding=self.binding), (job,) if run else ())
            )  # fmt: skip
            if run is not None and not (cap < MOST_W and drawn >= 0.97 * cap):
                self.estimates.learn(run.work.user, "a100", drawn, 1.0, float(now))
        jobs = {job: PowerJob(job, 0, float(run.start)) for job, run in self.running.items()}
        limit = Limit("hall", self.budget(now), {gpu.key: 1.0 for gpu in gpus})
        begin = time.perf_counter_ns()
        found = self.keeper.step(float(now), gpus, jobs, [limit])
        self.ran.step_us.append((time.perf_counter_ns() - begin) / 1000)
        self._order(found)
        for job in found.stop:
            self.ran.stopped += 1
            self.ran.stopped_constant += lowered_at is None or now < lowered_at
            self.waiting.appendleft(self.running[job].work)
            self._end(job)

    def _order(self, found: Decision) -> None:
        self.ordered = [found.caps.get(f"n{place // GPUS}", {}).get(str(place), MOST_W) for place in range(self.count)]
        self.binding = bool(found.binding)
        self.published = dict(found.published)

    def queue(self, now: int, jobs: Sequence[Work]) -> Queue:
        """Running and waiting jobs as the planner has them."""
        running = [
            RunningJob(
                one.allocation,
                max(one.end_s, now + 1),
                math.ceil(self.published.get(job, self._booked(one.work)) - IDLE_W) if self.power else 0,
            )
            for job, one in self.running.items()
        ]
        return Queue(running, [self._pending(one) for one in jobs])

    def _booked(self, work: Work) -> float:
        expected = self.estimates.watts(work.user, "a100")
        return booked(expected, self.lowest_w, MOST_W, binding=self.binding)

    def _pending(self, work: Work) -> PendingJob:
        nodes = max(1, work.gpus // GPUS)
        request = Request(gpus=work.gpus // nodes, cpus_milli=1000 * work.gpus // nodes, nodes_min=nodes)
        watts = math.ceil(self._booked(work) - IDLE_W) if self.power else 0
        return PendingJob(request, max(1, int(2 * work.work_s)), watts=watts)

    def _plan(self, now: int) -> None:
        """One plan of the core; what it starts now is started."""
        self.changed = False
        jobs = [self.waiting[place] for place in range(min(QUEUE, len(self.waiting)))]
        if not jobs:
            return
        if self.power is not None:
            self.power.set([Budget(int(self.budget(now)), base_watts=int(self.count * IDLE_W))])
        queue = self.queue(now, jobs)
        plan = Plan(queue)
        self.backfill.fill(plan, self.cluster, now, queue, EASY)
        for work, start in zip(jobs, plan.to_list(), strict=True):
            if start is None or start.start_s > now:
                continue
            allocation = commit(self.cluster, start.parts)
            places = tuple(
                part.node * GPUS + gpu for part in start.parts for gpu in range(GPUS) if part.gpus >> gpu & 1
            )
            self.running[work.id] = _Run(work, allocation, places, now, now + max(1, int(2 * work.work_s)))
            self.waiting.remove(work)
