"""How many replicas a service needs, which come, and which go: decided from what is seen.

Pure: no clock (`now` is a parameter), no files, no Slurm; equal inputs give equal decisions. What is to be remembered
from one decision to the next is `Memory`, which goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil
from types import MappingProxyType

_ROUNDS = 4  # requests that wait while there is no replica, and that one slot of the first ones may work on in turn
_MOST_GROWTH = 2.0  # of what is ready, until more is ready
_BACK_OFF_S, _MOST_BACK_OFF_S = 5.0, 300.0
_SETTLED_S = 1.5  # until each gateway knows that a replica drains
_LOST_ENDS_S = 60.0  # a replica that is not heard for so long is ended, where Slurm says that it runs
_SLACK_S = 15.0  # of a replica that says itself that it was not ready in time
_EARLY_S = 60.0  # Slurm's warning before a job's end may come so much earlier than it is asked for
_LAST_S = 10.0  # before a job's end, when it gets nothing new though there is no successor
_WELL_S = 30.0  # after which a replica that became ready was no failure
_KEPT_STARTS = 8


class Phase(StrEnum):
    """Of a replica, as it is seen."""

    ASKED = "asked"  # Slurm does not show it yet
    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"  # it says so itself
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Spec:
    """What the policy says of a service; seconds."""

    name: str
    least: int
    most: int
    slots: int
    idle_s: float
    ready_s: float
    drain_s: float
    queue_delay_s: float
    tokens_in_flight: int | None = None
    paused: bool = False
    guaranteed: int | None = None
    """So many replicas are not lent, and all others are; None: none is."""


@dataclass(frozen=True, slots=True)
class Need:
    """What gateways have of a service, all together."""

    waiting: int = 0
    oldest_s: float = 0.0
    in_flight: int = 0
    tokens: int = 0
    delay_s: float = 0.0

    @property
    def any(self) -> bool:
        """Whether anybody asks."""
        return self.waiting + self.in_flight > 0


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica. Times are seconds since 1970; None: not known, or not yet."""

    launch: str
    phase: Phase
    asked: float
    lent: bool = False  # its job is over-quota work
    taken: bool = False  # and preempted: it goes as soon as any other one is ready
    started: float | None = None  # its job
    ends: float | None = None  # its job, at the latest
    expected: float | None = None  # start of its job, as Slurm plans it
    waits: str = ""  # why its job waits, in words
    leaves: str = ""  # why it must be replaced now: its node is drained, it is preempted, ...
    leaves_at: float | None = None  # before which it must be replaced: maintenance
    lost: float | None = None  # since when it is not heard
    drained: float | None = None  # since when it has orders to drain
    load: int = 0  # requests that it has
    why: str = ""  # of a failure


@dataclass(frozen=True, slots=True)
class Memory:
    """What one decision leaves for the next."""

    peaks: tuple[tuple[float, int], ...] = ()  # replicas that were needed, and when: each later one is fewer
    failures: int = 0  # one after the other
    failed: float = 0.0
    why: str = ""
    starts: tuple[float, ...] = ()  # seconds from a job's start until it was ready, of the last ones

    def with_failure(self, now: float, why: str) -> Memory:
        """One more replica did not become ready, or not for long."""
        return replace(self, failures=self.failures + 1, failed=now, why=why)

    def with_start(self, seconds: float) -> Memory:
        """A replica became ready."""
        return replace(self, starts=(*self.starts, max(0.0, seconds))[-_KEPT_STARTS:])

    def well(self) -> Memory:
        """A replica is ready and stays so."""
        return self if not self.failures else replace(self, failures=0, why="")

    @property
    def again(self) -> float:
        """When the next one may be launched."""
        if not self.failures:
            return 0.0
        return self.failed + min(_MOST_BACK_OFF_S, _BACK_OFF_S * 2.0 ** min(self.failures - 1, 10))

    @property
    def start_s(self) -> float | None:
        """Seconds that a start takes, as was seen: the longest of the last ones but one, where there are several."""
        known = sorted(self.starts)
        return None if not known else known[-1] if len(known) < 3 else known[-2]


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done. `launch`: so many, and `lent` of them on lent resources; `end`: launches, and why; `needed`:
    replicas, without what was needed before."""

    wanted: int
    needed: int
    launch: int
    lent: int
    drain: tuple[str, ...]
    end: Mapping[str, str]
    failed: frozenset[str]  # of those that end
    why: str
    eta_s: float | None
    memory: Memory


def decide(
    now: float, spec: Spec, need: Need, ahead: int, replicas: Sequence[Replica], memory: Memory, *, may_launch: bool
) -> Decision:
    """What is to be done now. `ahead`: replicas that are known to be needed soon; `may_launch`: whether more may be
    asked for at all, e.g. not where Slurm does not answer."""
    end, memory = _failures(now, spec, replicas, memory)
    failed = frozenset(end)
    alive = [one for one in replicas if one.launch not in end and one.phase is not Phase.ENDING]
    ready = [one for one in alive if one.phase is Phase.READY and one.lost is None]
    needed = 0 if spec.paused else needed_now(spec, need, len(ready))
    peaks = _peaks(now, spec.idle_s, memory.peaks, needed)
    memory = replace(memory, peaks=peaks)
    wanted = _bounded(spec, max(peaks[0][1] if peaks else 0, ahead))
    leaving = _leaving(now, spec, alive, wanted, memory)
    gone = {one.launch for one in leaving}
    staying = [one for one in alive if one.phase is not Phase.DRAINING and one.launch not in gone]
    launch, lent = _launches(now, spec, wanted, staying, replicas, memory) if may_launch else (0, 0)
    drain, surplus = _goes(now, spec, wanted, staying, leaving)
    end |= surplus
    for one in alive:
        if one.phase is Phase.DRAINING and one.launch not in end and (why := _drained(now, spec, one)):
            end[one.launch] = why
    why, eta = ("", None) if ready else outlook(now, spec, alive, memory, wanted)
    return Decision(wanted, needed, launch, lent, tuple(drain), MappingProxyType(end), failed, why, eta, memory)


def needed_now(spec: Spec, need: Need, ready: int) -> int:
    """Replicas that what is asked for now needs, whatever the policy's bounds are."""
    busy = need.waiting + need.in_flight
    if busy == 0:
        return 0
    full = ceil(busy / spec.slots)  # so many have a slot for each request
    if ready == 0:
        return max(1, ceil(busy / (spec.slots * _ROUNDS)))
    base = max(1, ceil(need.in_flight / spec.slots))
    if spec.tokens_in_flight:
        base = max(base, min(full, ceil(need.tokens / spec.tokens_in_flight)))
    late = max(need.oldest_s if need.waiting else 0.0, need.delay_s)
    if late <= spec.queue_delay_s:
        return base
    grown = max(ready + 1, ceil(ready * min(_MOST_GROWTH, late / spec.queue_delay_s)))
    return max(base, min(full, grown))


def _bounded(spec: Spec, count: int) -> int:
    return 0 if spec.paused else max(spec.least, min(spec.most, count))


def _peaks(
    now: float, keeps: float, before: tuple[tuple[float, int], ...], needed: int
) -> tuple[tuple[float, int], ...]:
    """What was needed in the time before, without what a later need exceeds; the first one is the most."""
    kept = [(at, count) for at, count in before if at > now - keeps and count > needed]
    return tuple([*kept, (now, needed)] if needed else kept)


# ---- failures ----


def _failures(now: float, spec: Spec, replicas: Sequence[Replica], memory: Memory) -> tuple[dict[str, str], Memory]:
    """Those that are over before they were ready, which are ended."""
    end: dict[str, str] = {}
    for one in replicas:
        if one.phase is Phase.FAILED:
            end[one.launch] = one.why or "it failed"
        elif one.phase is Phase.STARTING and one.started is not None and now > one.started + spec.ready_s + _SLACK_S:
            end[one.launch] = f"it was not ready within {spec.ready_s:.0f} s"
    for why in end.values():
        memory = memory.with_failure(now, why)
    return end, memory


# ---- who goes ----


def start_estimate(spec: Spec, memory: Memory) -> float:
    """Seconds that a successor may need, with a margin."""
    known = memory.start_s
    return spec.ready_s if known is None else min(spec.ready_s, 1.5 * known + 10.0)


def _leaving(now: float, spec: Spec, alive: Sequence[Replica], wanted: int, memory: Memory) -> list[Replica]:
    """Those that are to be replaced, the most urgent first: at once, or as their time is nearly over.

    Where only so many successors fit under the bound, those that end at about the same time are replaced one after the
    other, which begins earlier.
    """
    at_once = [one for one in alive if one.phase is not Phase.DRAINING and (one.leaves or one.lost is not None)]
    others = [one for one in alive if one.phase is Phase.READY and one not in at_once and _end(one) is not None]
    others.sort(key=lambda one: (_end(one) or 0.0, one.launch))
    room = max(1, spec.most + 1 - wanted)
    step = start_estimate(spec, memory) + spec.drain_s
    begin: list[float] = []
    for place in range(len(others) - 1, -1, -1):
        one = others[place]
        margin = step + _EARLY_S
        if one.started is not None and one.ends is not None:
            margin = min(margin, 0.75 * (one.ends - one.started))
        at = (_end(one) or 0.0) - margin
        behind = len(others) - 1 - place - room  # whose successor takes this one's place under the bound
        begin.append(min(at, begin[behind] - step) if behind >= 0 else at)
    timed = [one for one, at in zip(others, reversed(begin), strict=True) if now >= at]
    return [*at_once, *timed]


def _end(one: Replica) -> float | None:
    known = [at for at in (one.ends, one.leaves_at) if at is not None]
    return min(known) if known else None


def _goes(
    now: float, spec: Spec, wanted: int, staying: Sequence[Replica], leaving: Sequence[Replica]
) -> tuple[list[str], dict[str, str]]:
    """Who drains and who ends, of those that are too many and of those that are replaced."""
    drain: list[str] = []
    end: dict[str, str] = {}
    for one in _surplus(spec, wanted, staying):
        if one.phase is Phase.READY:
            drain.append(one.launch)
        elif one.phase is not Phase.ASKED:  # it is not known yet what could be ended
            end[one.launch] = "it is not needed"
    usable = sum(one.phase is Phase.READY and one.launch not in drain for one in staying)
    serving = [one for one in leaving if one.phase is Phase.READY and one.lost is None]
    spare = max(0, usable + len(serving) - wanted)
    for place, one in enumerate(serving):
        over = _end(one)
        if place < spare or (one.taken and usable) or (over is not None and now > over - min(_LAST_S, spec.drain_s)):
            drain.append(one.launch)
    for one in leaving:
        if one.lost is not None and (now > one.lost + _LOST_ENDS_S or usable >= wanted):
            end[one.launch] = "it is not heard"
        elif one.phase in (Phase.PENDING, Phase.STARTING) and one.lost is None:
            end[one.launch] = one.leaves
    return drain, end


def _surplus(spec: Spec, wanted: int, staying: Sequence[Replica]) -> list[Replica]:
    """Those that are too many: none that is guaranteed, and none that is ready while too few are."""
    order = sorted(staying, key=_least_use)
    own = [one for one in order if not one.lent]
    kept = min(wanted, len(own), wanted if spec.guaranteed is None else spec.guaranteed)
    others = [one for one in order if one not in own[len(own) - kept :]]
    ready = sum(one.phase is Phase.READY for one in staying)
    last = [one for one in others if one.phase is Phase.READY][: max(0, ready - wanted)]
    first = [one for one in others if one.phase is not Phase.READY]
    return [*first, *last][: max(0, len(staying) - wanted)]


def _least_use(one: Replica) -> tuple[int, float, float]:
    """The order in which replicas go that are too many."""
    place = {Phase.PENDING: 0, Phase.ASKED: 1, Phase.STARTING: 2}.get(one.phase, 3)
    return place, float(one.load) if place == 3 else 0.0, (one.ends or 0.0) if place == 3 else -one.asked


def _drained(now: float, spec: Spec, one: Replica) -> str:
    """Why a replica that drains is ended now; empty: it is not."""
    if one.drained is None or now < one.drained + _SETTLED_S:
        return ""
    if one.load == 0 or one.lost is not None:
        return "it has drained"
    return "its time to drain is over" if now > one.drained + spec.drain_s else ""


# ---- who comes ----


def _launches(
    now: float, spec: Spec, wanted: int, staying: Sequence[Replica], replicas: Sequence[Replica], memory: Memory
) -> tuple[int, int]:
    """How many, and how many of them on lent resources. Where a lent one does the work of a guaranteed one, that one is
    launched, too, and the lent one goes when it is ready."""
    guaranteed = wanted if spec.guaranteed is None else min(wanted, spec.guaranteed)
    own = max(0, guaranteed - sum(not one.lent for one in staying))
    missing = max(0, wanted - len(staying), own)
    room = max(0, spec.most + 1 - len(replicas))
    if now < memory.again:
        return 0, 0
    if memory.failures:  # one at a time, until one is ready
        unproven = any(one.phase in (Phase.ASKED, Phase.PENDING, Phase.STARTING) for one in replicas)
        missing = 0 if unproven else min(missing, 1)
    count = min(missing, room)
    return count, max(0, count - own)


# ---- what gateways tell those who wait ----


def outlook(now: float, spec: Spec, alive: Sequence[Replica], memory: Memory, wanted: int) -> tuple[str, float | None]:
    """Why no replica is ready, in words, and in how many seconds one is; None: not known."""
    if spec.paused:
        return "the service is paused", None
    start = memory.start_s
    best: tuple[float, str] | None = None
    words = ""
    for one in alive:
        text, eta = _outlook_of(now, one, start)
        words = words or text
        if eta is not None and (best is None or eta < best[0]):
            best = eta, text
    before = f" (the last one failed: {memory.why})" if memory.failures and alive else ""
    if best is not None:
        return best[1] + before, float(ceil(max(1.0, best[0])))
    if words:
        return words + before, None
    if not wanted:
        return "", None
    if memory.failures:
        wait = max(0.0, memory.again - now)
        when = f"the next try is in {wait:.0f} s" if wait else "it is tried again"
        return f"the last replica failed: {memory.why}; {when}", None if start is None else float(ceil(wait + start))
    return "a replica is to be launched", start


def _outlook_of(now: float, one: Replica, start: float | None) -> tuple[str, float | None]:
    if one.phase is Phase.STARTING:
        eta = None if start is None or one.started is None else one.started + start - now
        return "a replica is starting", eta
    if one.phase is Phase.PENDING:
        eta = None if start is None or one.expected is None else max(0.0, one.expected - now) + start
        return f"a replica's job waits in Slurm: {one.waits}", eta
    if one.phase is Phase.ASKED:
        return "a replica is being submitted", start
    if one.phase is Phase.READY:
        return "its replica is not heard", None
    return "", None
