"""Decides the caps of all GPUs that are in budgets, and which jobs give way; no files, no Slurm, `now` is a parameter.

Caps are lowered at once. They are raised only when there has been room for `SETTLE_S`, and not by less than `STEP`, so
that they do not swing. The planner counts running jobs with what they can be lowered to at any time, and not with
such a raise: a job that waits takes it back. No watts are given twice, as a GPU on which a job starts has the lowest
cap of the hardware until others are lowered.

Jobs are stopped only where a budget was lowered, and its caps would have to be below the policy's lowest one. Where
jobs of a constant budget draw more than they were expected to, they get such caps, and nothing new starts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sluice.controllerd.power.caps import Filled, GpuState, fill

SETTLE_S = 4.0
STEP = 0.02
"""Of what a GPU wants."""
LATELY_S = 30.0
"""A GPU's need is the most that it drew for so long."""
SHORT_S = 1.0
"""For so long a lowered budget is not kept by the lowest caps before jobs are stopped."""
STOPPING_S = 90.0
"""A stopped job that still runs after this time is stopped again."""
GUARANTEED = 1 << 30
"""Rank of jobs that are never stopped."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its node reported it. Watts."""

    node: str
    uuid: str
    cap_w: float
    """In force."""
    least_w: float
    lowest_w: float
    want_w: float
    idle_w: float
    power_w: float
    booked_w: float
    """What the planner counts a new job on it with."""
    jobs: tuple[int, ...] = ()
    silent: bool = False
    """Its node has not reported lately: its cap stays as it is."""
    planned_w: float | None = None
    """To what its jobs are held as it was planned for their start; an order of as much replaces that, and is raised."""

    @property
    def key(self) -> str:
        """Among all GPUs."""
        return f"{self.node}/{self.uuid}"


@dataclass(frozen=True, slots=True)
class PowerJob:
    """A running job with GPUs."""

    id: int
    rank: int
    kept: float
    """The moment up to which its work is saved: its start, or its last save."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A budget now. `gpus`: keys of those that count, and which part of each."""

    name: str
    watts: float
    gpus: Mapping[str, float]
    elsewhere_w: float = 0.0
    """What GPUs may draw that have not been reported: it is taken off, and is no lowering of the budget."""

    @property
    def left_w(self) -> float:
        """For those that count."""
        return max(0.0, self.watts - self.elsewhere_w)


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """How a budget is kept. Watts."""

    name: str
    watts: float
    measured_w: float
    bound_w: float
    """The most that can be drawn by the caps in force."""
    capped: int
    """GPUs with a cap that is lower than what they want."""
    silent: int
    """GPUs of nodes that do not report."""
    short_w: float
    """By how much the lowest caps of those that are not stopped exceed it: guaranteed jobs alone are too much."""
    below_w: float = 0.0
    """By how much its GPUs' caps are below the policy's lowest one, as it would not be kept otherwise."""
    guaranteed_w: float = 0.0
    """What GPUs with guaranteed jobs draw at the policy's lowest cap."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now."""

    caps: Mapping[str, Mapping[str, float]]
    """By node, then by UUID; a GPU without one has no order."""
    lifted: Mapping[str, frozenset[int]]
    """By node, jobs whose orders replace what was planned for their start."""
    published: Mapping[int, float]
    """By job: watts of each of its GPUs that the planner counts."""
    binding: frozenset[str]
    """GPUs in a budget in which not all can have what they want."""
    stop: tuple[int, ...]
    uses: tuple[BudgetUse, ...]


@dataclass(slots=True)
class _Memory:
    """What is remembered of a GPU."""

    jobs: tuple[int, ...] = ()
    drawn: deque[tuple[float, float]] = field(default_factory=deque)  # falling: the first is the most
    ordered: float | None = None
    raise_to: float | None = None  # the least of the targets since `room_since`
    room_since: float = 0.0

    def most_drawn(self, now: float, watts: float, lately_s: float) -> float:
        """The most that was drawn for so long, now included."""
        while self.drawn and self.drawn[-1][1] <= watts:
            self.drawn.pop()
        self.drawn.append((now, watts))
        while self.drawn[0][0] < now - lately_s:
            self.drawn.popleft()
        return self.drawn[0][1]


class Keeper:
    """One for all budgets."""

    def __init__(self) -> None:
        self._of: dict[str, _Memory] = {}
        self._short_since: dict[str, float] = {}  # lowered budgets whose lowest caps are too much
        self.met: dict[str, float] = {}
        """By budget, the watts that it was kept with last: jobs give way until it is kept with fewer. The next daemon
        goes on from there."""
        self._stopped: dict[int, float] = {}
        self.exceeded = False
        """Whether not even the hardware's lowest caps keep a budget for which jobs give way."""

    def adopt(self, orders: Mapping[str, float], met: Mapping[str, float]) -> None:
        """What an earlier daemon left. `orders`: caps in force by GPU, which stay until something else is decided."""
        self.met = dict(met)
        for key, watts in orders.items():
            self._of.setdefault(key, _Memory()).ordered = watts

    @property
    def kept(self) -> bool:
        """Whether no job has to give way now."""
        return not self._short_since

    def spare(self, jobs: Iterable[int]) -> None:
        """Jobs that were to be stopped, and were not."""
        for job in jobs:
            self._stopped.pop(job, None)

    def step(self, now: float, gpus: Iterable[Gpu], jobs: Mapping[int, PowerJob], limits: Sequence[Limit]) -> Decision:
        """Look at everything once; to be called each second or so. O(GPUs * budgets)."""
        counted = {key for limit in limits for key in limit.gpus}
        known = {gpu.key: gpu for gpu in gpus if gpu.key in counted}
        self._of = {key: self._of.get(key) or _Memory() for key in known}
        self._stopped = {job: at for job, at in self._stopped.items() if job in jobs and now - at < STOPPING_S}
        states = {key: self._state(now, gpu, jobs) for key, gpu in known.items()}
        inside = {
            limit.name: [replace(states[key], part=part) for key, part in limit.gpus.items() if key in states]
            for limit in limits
        }
        filled = {limit.name: fill(limit.left_w, inside[limit.name]) for limit in limits}
        stop = self._stop(now, limits, filled, inside, known, jobs)
        self._settle(now, known, states, limits, inside, filled)
        binding = frozenset(
            state.key
            for limit in limits
            if sum(one.part * one.want_w for one in inside[limit.name]) > limit.left_w
            for state in inside[limit.name]
        )
        caps: defaultdict[str, dict[str, float]] = defaultdict(dict)
        lifted: defaultdict[str, frozenset[int]] = defaultdict(frozenset)
        for key, gpu in known.items():
            if (watts := self._of[key].ordered) is not None:
                caps[gpu.node][gpu.uuid] = float(int(watts))
                if gpu.planned_w is not None and watts <= gpu.planned_w:  # of a silent node it may be from before
                    lifted[gpu.node] |= {*gpu.jobs}
        return Decision(
            caps=caps,
            lifted=lifted,
            published=_published(known, states, binding),
            binding=binding,
            stop=stop,
            uses=tuple(_use(limit, inside[limit.name], known, filled[limit.name]) for limit in limits),
        )

    def _state(self, now: float, gpu: Gpu, jobs: Mapping[int, PowerJob]) -> GpuState:
        memory = self._of[gpu.key]
        if gpu.jobs != memory.jobs:
            memory.drawn.clear()
        ends = not self._stopped.keys().isdisjoint(gpu.jobs)  # it may save its state, and draws little meanwhile
        drawn = memory.most_drawn(now, gpu.power_w, LATELY_S + STOPPING_S if ends else LATELY_S)
        fixed = gpu.cap_w if gpu.silent else None
        return GpuState(
            key=gpu.key,
            rank=max((jobs[number].rank for number in gpu.jobs if number in jobs), default=0),
            idle_w=gpu.idle_w,
            least_w=fixed or gpu.least_w,
            lowest_w=fixed or gpu.lowest_w,
            want_w=fixed or gpu.want_w,
            cap_w=gpu.cap_w,
            drawn_w=drawn,
            busy=bool(gpu.jobs),
        )

    # ---- caps ----

    def _settle(
        self,
        now: float,
        known: Mapping[str, Gpu],
        states: Mapping[str, GpuState],
        limits: Sequence[Limit],
        inside: Mapping[str, Sequence[GpuState]],
        filled: Mapping[str, Filled],
    ) -> None:
        """From the targets of all budgets to what is ordered."""
        targets: dict[str, float] = {}
        for one in filled.values():
            for key, watts in one.caps.items():
                planned = known[key].planned_w
                targets[key] = min(watts, targets.get(key, watts), watts if planned is None else planned)
        higher = [key for key, gpu in known.items() if not gpu.silent and self._lower(key, gpu, states, targets)]
        room = {
            limit.name: limit.left_w - sum(one.part * self._bound(one) for one in inside[limit.name])
            for limit in limits
        }
        for key in higher:
            parts = {limit.name: limit.gpus[key] for limit in limits if key in limit.gpus}
            free = min(room[name] / part for name, part in parts.items())
            more = self._raise(now, known[key], states[key], targets[key], free)
            for name, part in parts.items():
                room[name] -= part * more
        for key, gpu in known.items():
            self._of[key].jobs = gpu.jobs

    def _lower(self, key: str, gpu: Gpu, states: Mapping[str, GpuState], targets: Mapping[str, float]) -> bool:
        """At once; whether it wants to be raised instead. A GPU without jobs draws nothing more by a higher cap."""
        memory, want, target = self._of[key], states[key].want_w, targets[key]
        if gpu.jobs and target > (want if memory.ordered is None else memory.ordered):
            return True
        memory.ordered, memory.raise_to = (None if target >= want else target), None
        return False

    def _raise(self, now: float, gpu: Gpu, state: GpuState, target: float, free: float) -> float:
        """When there was room for long enough; how much more it may draw."""
        memory = self._of[gpu.key]
        before = memory.ordered or 0.0
        new = gpu.jobs != memory.jobs
        first = min(target, gpu.booked_w)  # what the planner counts a new job with already
        if new and before < first and first - max(before, gpu.cap_w) <= free:
            memory.ordered, memory.raise_to = first, None
            return max(0.0, first - max(before, gpu.cap_w))
        if target - before < STEP * state.want_w:
            memory.raise_to = None
            return 0.0
        if memory.raise_to is None:
            memory.raise_to, memory.room_since = target, now
        memory.raise_to = min(memory.raise_to, target)
        more = memory.raise_to - max(before, gpu.cap_w)
        if now - memory.room_since < SETTLE_S or more > free:
            return 0.0
        memory.ordered, memory.raise_to = (None if memory.raise_to >= state.want_w else memory.raise_to), None
        return max(0.0, more)

    def _bound(self, state: GpuState) -> float:
        """The most that it can draw by what is in force or ordered, also where a job starts there now."""
        ordered = self._of[state.key].ordered
        return max(state.cap_w, state.want_w if ordered is None else ordered)

    # ---- jobs ----

    def _stop(
        self,
        now: float,
        limits: Sequence[Limit],
        filled: Mapping[str, Filled],
        inside: Mapping[str, Sequence[GpuState]],
        known: Mapping[str, Gpu],
        jobs: Mapping[int, PowerJob],
    ) -> tuple[int, ...]:
        """Jobs that give way to budgets that were lowered."""
        found: list[int] = []
        for limit in limits:
            if limit.watts >= self.met.get(limit.name, 0.0) or not filled[limit.name].below_w:
                self.met[limit.name] = limit.watts
                self._short_since.pop(limit.name, None)
            elif now - self._short_since.setdefault(limit.name, now) >= SHORT_S:
                found += _victims(filled[limit.name].below_w, inside[limit.name], known, jobs, {*self._stopped, *found})
        self.met = {limit.name: self.met[limit.name] for limit in limits}
        self._short_since = {name: at for name, at in self._short_since.items() if name in self.met}
        self.exceeded = any(filled[name].short_w for name in self._short_since)
        self._stopped |= dict.fromkeys(found, now)
        return tuple(found)


def _published(known: Mapping[str, Gpu], states: Mapping[str, GpuState], binding: frozenset[str]) -> dict[int, float]:
    """What the planner counts each GPU of a running job with: the most of any of them. Where a budget is tight that is
    what it can be lowered to by the policy, also where it has less than that now, so that nothing starts then."""
    found: dict[int, float] = {}
    for key, gpu in known.items():
        state = states[key]
        watts = min(state.lowest_w, state.need_w) if key in binding else min(gpu.cap_w, state.want_w)
        for job in gpu.jobs:
            found[job] = max(watts, found.get(job, 0.0))
    return found


def _use(limit: Limit, inside: Sequence[GpuState], known: Mapping[str, Gpu], filled: Filled) -> BudgetUse:
    return BudgetUse(
        name=limit.name,
        watts=limit.left_w,
        measured_w=sum(state.part * known[state.key].power_w for state in inside),
        bound_w=sum(state.part * (state.cap_w if state.busy else state.idle_w) for state in inside),
        capped=sum(state.busy and state.cap_w < state.want_w for state in inside),
        silent=sum(known[state.key].silent for state in inside),
        short_w=filled.short_w,
        below_w=filled.below_w,
        guaranteed_w=sum(state.part * state.lowest_w for state in inside if state.busy and state.rank >= GUARANTEED),
    )


def _victims(
    short: float,
    inside: Sequence[GpuState],
    known: Mapping[str, Gpu],
    jobs: Mapping[int, PowerJob],
    stopped: set[int],
) -> list[int]:
    """Jobs that give way, by rank, those that lose least work on each GPU first; never a guaranteed one, and none for
    GPUs that would draw as much without it: of nodes that do not report, or with a job that stays. O(GPUs + jobs * log
    jobs)."""

    def stays(number: int) -> bool:
        return number not in jobs or jobs[number].rank >= GUARANTEED

    won = [one for one in inside if not known[one.key].silent and not any(map(stays, known[one.key].jobs))]
    left = {state.key: sum(job not in stopped for job in known[state.key].jobs) for state in won}
    on: defaultdict[int, list[GpuState]] = defaultdict(list)
    for state in won:
        if state.busy and not left[state.key]:
            short -= state.part * (state.lowest_w - state.idle_w)
        for number in known[state.key].jobs:
            on[number].append(state)
    found: list[int] = []
    for job in sorted((jobs[one] for one in on), key=lambda job: (job.rank, -job.kept, -job.id)):
        if short <= 0:
            break
        if job.id in stopped:
            continue
        found.append(job.id)
        for state in on[job.id]:
            left[state.key] -= 1
            if not left[state.key]:
                short -= state.part * (state.lowest_w - state.idle_w)
    return found
