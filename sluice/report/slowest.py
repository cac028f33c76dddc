"""The GPU of a running job that the others wait for, by what its nodes reported of the last period.

Ranks of a job that works in step wait for each other. Which one they wait for shows in two ways: by a library that
sleeps while it waits, the others' GPUs have less to do; by one that waits inside a kernel (NCCL, RCCL), all are busy,
and the others draw less power. A GPU that is slowed down is named before both, as it draws less power itself.
Nothing is said where the difference is not clear, nor of jobs whose GPUs have unlike work: their figures differ anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

_THROTTLED = 25.0  # percent of the time, where half of the others have `_FREE` at most
_FREE = 5.0
_AT_WORK = 50.0  # percent of utilisation
_CLEAR = 20.0  # percent between it and the middle one of the others
_ALONE = 10.0  # and the next


class GpuUse(Protocol):
    """What is looked at of `sluice.report.summaries.GpuUse`; of now: since the report before."""

    @property
    def node(self) -> str:
        """Its node."""

    @property
    def index(self) -> int:
        """Its number there."""

    @property
    def model(self) -> str:
        """Its product."""

    @property
    def asked_mib(self) -> int | None:
        """None: the whole GPU."""

    @property
    def now_percent(self) -> float | None:
        """Utilisation by the job."""

    @property
    def now_watts(self) -> float | None:
        """Power."""

    @property
    def now_throttled_percent(self) -> float | None:
        """Part of the time in which it was slowed down."""


@dataclass(frozen=True, slots=True)
class Slowest:
    """`value` is its own, `others` the middle one's: percent of the time (throttled, busy), or watts (power)."""

    node: str
    index: int
    why: Literal["throttled", "busy", "power"]
    value: float
    others: float


def slowest(gpus: Sequence[GpuUse]) -> Slowest | None:
    """None where nothing is known, or all are alike. Only for whole GPUs of one model, all of them reported."""
    if len(gpus) < 2 or len({gpu.model for gpu in gpus}) > 1 or any(gpu.asked_mib is not None for gpu in gpus):
        return None
    if any(gpu.now_percent is None for gpu in gpus):
        return None
    slowed = _outstanding(gpus, "throttled", lambda gpu: gpu.now_throttled_percent)
    if slowed is not None and slowed.value >= _THROTTLED and slowed.others <= _FREE:
        return slowed
    if any((gpu.now_throttled_percent or 0) > _FREE for gpu in gpus):
        return None  # several are slowed down: neither work nor power says who waits
    busy = _outstanding(gpus, "busy", lambda gpu: gpu.now_percent)
    if busy is not None and busy.value >= _AT_WORK:
        return busy
    if min(gpu.now_percent or 0 for gpu in gpus) < _AT_WORK:
        return None
    power = [gpu.now_watts for gpu in gpus if gpu.now_watts is not None]
    if len(power) < len(gpus) or not max(power):
        return None
    return _outstanding(gpus, "power", lambda gpu: gpu.now_watts, unit=max(power) / 100)


def _outstanding(
    gpus: Sequence[GpuUse],
    why: Literal["throttled", "busy", "power"],
    value: Callable[[GpuUse], float | None],
    unit: float = 1.0,
) -> Slowest | None:
    """The GPU with the highest value, if it is clearly the one; `unit`: one percent."""
    known = sorted(((value(gpu) or 0.0, gpu) for gpu in gpus), key=lambda one: -one[0])
    (first, gpu), *rest = known
    others = median(one for one, _ in rest)
    if first - others < _CLEAR * unit or first - rest[0][0] < _ALONE * unit:
        return None
    return Slowest(gpu.node, gpu.index, why, first, others)
