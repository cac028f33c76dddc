"""A job's time on a node, where the node's clock may be wrong, or be set while the job is there. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.exchange.record import JobRecord, Stage

CLOCKS_S = 1.0
"""By so much clocks may differ: accounting has whole seconds."""


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """In seconds since 1970, by the controllers' clock as far as it is known."""

    start: float
    end: float
    ahead_s: float = 0.0  # what the node's clock was ahead of the controllers' when the job came; negative: behind
    set_s: float = 0.0  # by how much it was set while the job was there

    @classmethod
    def of(cls, record: JobRecord, start: float, end: float) -> NodeTimes:
        """Of a record of the run that accounting has from `start` to `end`.

        A job's prolog begins on its node within its run: where the node's clock says otherwise, it came when the run
        began. How long it was there is known by the monotonic clock; without that, as after a reboot, by the other one
        alone.
        """
        prolog = record.started + min((stage.after_s for stage in record.stages), default=0.0)
        within = start - CLOCKS_S <= record.started and min(prolog, record.started) <= end + CLOCKS_S
        ahead = 0.0 if within else record.started - start
        ended = end + ahead if record.ended is None else record.ended
        by_clock = ended - record.started
        ran = record.ran_s
        if ran is None or abs(by_clock - ran) <= CLOCKS_S:
            ran, moved = max(0.0, by_clock), 0.0
        else:
            moved = by_clock - ran
        came = record.started - ahead
        return cls(came, came + ran, ahead, moved)

    def at(self, time: float) -> float:
        """A time that the node's clock showed while the job was there."""
        before = time - self.ahead_s
        return before if not self.set_s or self.start <= before <= self.end else before - self.set_s

    def within(self, time: float) -> float:
        """The same, but never outside of the job's time there."""
        return min(max(self.at(time), self.start), self.end)

    def of_stage(self, stage: Stage) -> tuple[float, float]:
        """From when to when a stage was, which the monotonic clock has timed."""
        begin = self.start + stage.after_s
        return begin, begin + max(0.0, stage.took_s)
