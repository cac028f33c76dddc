"""The caps of GPUs that keep a budget; pure, no clock.

The caps of a budget's GPUs never add up to more than the budget, so that it holds whatever programs do between two
looks; a GPU without a job has the hardware's lowest one, which counts, as a job may start there, as long as no other
has to have less than the policy's lowest cap. What a GPU *needs* is
what it drew at most lately with a margin, or all that it wants where its cap holds it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MARGIN = 1.10
"""What a GPU may draw more than lately before its cap holds it."""
HELD = 0.97
"""A GPU that draws this part of its cap may want more than it gets."""
_NOTHING_W = 1e-6


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU in a budget. Watts; `rank`: who gives way, 0 first."""

    key: str
    rank: int
    idle_w: float
    least_w: float
    """The lowest cap that the hardware takes."""
    lowest_w: float
    """The lowest cap that it shall have: the policy's `lowest_cap`."""
    want_w: float
    """Its cap where there is room for everybody."""
    cap_w: float
    """In force."""
    drawn_w: float
    """At most, lately."""
    busy: bool
    part: float = 1.0
    """How much of it counts: of a GPU that is shared, in the budget of a tenant."""

    @property
    def need_w(self) -> float:
        """What it does not work slower with."""
        if not self.busy:
            return self.least_w
        if self.drawn_w >= HELD * self.cap_w:
            return self.want_w
        return min(self.want_w, max(self.least_w, MARGIN * self.drawn_w))


@dataclass(frozen=True, slots=True)
class Filled:
    """Caps by GPU; `short_w`: how many watts they are more than the budget; `below_w`: how many watts those that are
    below the policy's lowest cap lack to it, as the budget would not be kept otherwise."""

    caps: Mapping[str, float]
    short_w: float = 0.0
    below_w: float = 0.0


def fill(limit_w: float, gpus: Sequence[GpuState]) -> Filled:
    """The caps of a budget's GPUs. Where all have room for what they want: that.

    Else GPUs get what they need. Where that is too much, those of the lowest rank come down to the policy's lowest cap
    before the next ones do, all of one rank by the same part of their way; then likewise to what the hardware takes.
    O(GPUs * ranks).
    """
    if sum(gpu.part * gpu.want_w for gpu in gpus) <= limit_w:
        return Filled({gpu.key: gpu.want_w for gpu in gpus})
    caps = {gpu.key: gpu.need_w for gpu in gpus}
    busy = [gpu for gpu in gpus if gpu.busy]
    over = sum(gpu.part * caps[gpu.key] for gpu in gpus) - limit_w
    over = _lower(caps, busy, {gpu.key: gpu.lowest_w for gpu in busy}, over)
    over -= sum(gpu.part * (gpu.least_w - gpu.idle_w) for gpu in gpus if not gpu.busy)  # no job starts there then
    below = max(0.0, over)
    over = _lower(caps, busy, {gpu.key: gpu.least_w for gpu in busy}, over)
    return Filled(caps, max(0.0, over), below)


def _lower(caps: dict[str, float], gpus: Sequence[GpuState], to: Mapping[str, float], over: float) -> float:
    """Take so many watts from the caps, and none below `to`; what is left of `over`."""
    for rank in sorted({gpu.rank for gpu in gpus}):
        if over <= _NOTHING_W:
            return 0.0
        way = {gpu.key: max(0.0, caps[gpu.key] - to[gpu.key]) for gpu in gpus if gpu.rank == rank}
        room = sum(gpu.part * way.get(gpu.key, 0.0) for gpu in gpus)
        part = min(1.0, over / room) if room > 0 else 0.0
        for key, watts in way.items():
            caps[key] -= part * watts
        over -= part * room
    return over if over > _NOTHING_W else 0.0
