"""Power between nodes and controllers: what each GPU may draw and draws, and the caps that the controllers want.

A node asks each `PERIOD_S` (`prolog_epilog.power.reports`): its request has the latest of its GPUs, the answer an order
where the node does not have the newest. Orders are numbered; the numbers grow over restarts and takeovers of the
controllers, so that an old order never replaces a newer one. A node without an answer keeps the order that it has.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sluice.base.errors import SluiceError

PERIOD_S = 0.8
"""Between two requests of a node, so that a new order is in force within a second."""
FRESH_S = 5.0
"""A report that is older says nothing of now."""
MOST_WATTS = 100_000.0
_MOST_NODES = 20_000
_MOST_GPUS = 64
_MOST_JOBS = 1024
_MOST_NUMBER = 1 << 53


@dataclass(frozen=True, slots=True)
class GpuPower:
    """A physical GPU, also where jobs have MIG instances or partitions of it. Watts; None: the driver does not say."""

    uuid: str
    cap_w: float | None = None  # in force
    default_w: float | None = None
    least_w: float | None = None  # what can be set
    most_w: float | None = None
    before_w: float | None = None  # what it is restored to; None: nothing of ours is in force
    power_w: float | None = None  # drawn on average since the report before
    jobs_w: float | None = None  # what its jobs may have by the policy and --gpu-power; None: as the site has it
    planned_w: float | None = None  # to what they are held as it was planned for their start; None: to nothing
    jobs: tuple[int, ...] = ()
    why: str = ""  # what the cap is from: "job", "order", "thermal"; empty: none of ours
    problem: str = ""  # why the wanted cap is not in force


@dataclass(frozen=True, slots=True)
class PowerReport:
    """What a node says. `order`: the number of the order in force there, 0: none."""

    node: str
    order: int = 0
    gpus: tuple[GpuPower, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        gpus = [{**asdict(gpu), "jobs": list(gpu.jobs)} for gpu in self.gpus]
        return {"node": self.node, "order": self.order, "gpus": gpus}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> PowerReport:
        """What a node sent. Raises SluiceError for what no node sends."""
        try:
            node, order, gpus = fields["node"], fields["order"], fields["gpus"]
            if not isinstance(node, str) or not 0 < len(node) <= 64:
                raise ValueError("node")
            if not isinstance(gpus, list) or len(gpus) > _MOST_GPUS:
                raise ValueError("gpus")
            return cls(node, _number(order), tuple(_gpu(one) for one in gpus))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise SluiceError(f"power: not a node's report: {error}") from error


@dataclass(frozen=True, slots=True)
class PowerOrder:
    """The caps that controllers want on a node, in watts by UUID of the physical GPU; without one for a GPU it has
    what its jobs and the policy give it. `lifted`: jobs that these hold instead of what was planned for their start."""

    number: int = 0
    caps: dict[str, float] = field(default_factory=dict)
    lifted: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "lifted": list(self.lifted)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> PowerOrder:
        """What a controller answered, or a node kept. Raises SluiceError for what is not an order."""
        try:
            caps = {_text(uuid, 96): _watts(cap) for uuid, cap in fields["caps"].items()}
            if len(caps) > _MOST_GPUS or None in caps.values():
                raise ValueError("caps")
            known = {uuid: cap for uuid, cap in caps.items() if cap is not None}
            return cls(_number(fields["number"]), known, _jobs(fields.get("lifted", []), "lifted"))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise SluiceError(f"power: not an order of caps: {error}") from error


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST_NUMBER:
        raise ValueError(f"{value!r}: not a whole number")
    return int(value)


def _text(value: Any, most: int) -> str:
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise ValueError(f"not a text of at most {most} characters")
    return value


def _watts(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_WATTS:
        raise ValueError(f"{value!r}: not a number of watts")
    return float(value)


def _jobs(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MOST_JOBS:
        raise ValueError(name)
    return tuple(_number(job) for job in value)


def _gpu(fields: Mapping[str, Any]) -> GpuPower:
    watts = {name: _watts(fields.get(name)) for name in GpuPower.__dataclass_fields__ if name.endswith("_w")}
    return GpuPower(
        uuid=_text(fields["uuid"], 96),
        jobs=_jobs(fields.get("jobs", []), "jobs"),
        why=_text(fields.get("why", ""), 16),
        problem=_text(fields.get("problem", ""), 300),
        **watts,
    )


@dataclass(frozen=True, slots=True)
class Latest:
    """A node's latest report, and how old it is in seconds."""

    report: PowerReport
    age_s: float

    @property
    def fresh(self) -> bool:
        """Whether it says what is now."""
        return self.age_s <= FRESH_S


class NodePowers:
    """The controllers' side: the latest report of each node, and the order that it is to follow. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._reports: dict[str, tuple[float, PowerReport]] = {}
        self._orders: dict[str, PowerOrder] = {}

    def take(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The inbox's handler of ``power``: the answer has an `order` where the node does not have it yet.

        Raises SluiceError for what is not a node's report.
        """
        report = PowerReport.from_dict(request)
        with self._lock:
            if report.node not in self._reports and len(self._reports) >= _MOST_NODES:
                raise SluiceError("power: more nodes than are kept")
            self._reports[report.node] = self._clock(), report
            order = self._orders.get(report.node)
            if order is None or order.number == report.order:
                return {}
            if order.number < report.order:  # the clock of the controller before was ahead
                order = self._orders[report.node] = replace(order, number=report.order + 1)
            return {"order": order.to_dict()}

    def order(self, node: str, caps: Mapping[str, float], lifted: Iterable[int] = ()) -> PowerOrder:
        """Want these caps on a node from now on, instead of those before; the same again is no new order."""
        jobs = tuple(sorted(lifted)[:_MOST_JOBS])
        with self._lock:
            before = self._orders.get(node)
            if before is not None and before.caps == caps and before.lifted == jobs:
                return before
            in_force = self._reports[node][1].order if node in self._reports else 0
            number = max(math.ceil(self._wall() * 1000), in_force + 1, before.number + 1 if before else 0)
            order = self._orders[node] = PowerOrder(number, dict(caps), jobs)
            return order

    def latest(self) -> dict[str, Latest]:
        """By node."""
        now = self._clock()
        with self._lock:
            return {node: Latest(report, now - at) for node, (at, report) in self._reports.items()}

    def forget(self, node: str) -> None:
        """A node that is no part of the cluster any more."""
        with self._lock:
            self._reports.pop(node, None)
            self._orders.pop(node, None)
