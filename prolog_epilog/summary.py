"""How a job used its GPUs, added up sample by sample in memory that does not grow with the job's length.

Distributions are histograms: utilisation in steps of one percent, memory in steps of two percent of its size, so that a
percentile of memory is right within one percent (as in DDSketch, Masson et al., 2019). All weights are seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sluice.base.clock import uptime

_STEP = math.log(1.02)
_ERRORS = ("ecc_corrected", "ecc_uncorrected", "ras_uncorrected", "pcie_replays", "link_errors")


class Histogram:
    """Weights by value, in a bounded number of bins: linear ones of width 1, or relative ones of 2 percent."""

    def __init__(self, relative: bool, bins: Mapping[int, float] | None = None) -> None:
        self.relative = relative
        self.bins: dict[int, float] = dict(bins or {})

    def add(self, value: float, weight: float) -> None:
        """Count a value of 0 or more."""
        number = (math.ceil(math.log(value) / _STEP) if value > 1 else 0) if self.relative else round(value)
        self.bins[number] = self.bins.get(number, 0.0) + weight

    def percentile(self, share: float) -> float | None:
        """The value that holds for `share` of the weight or is not reached in it; None without any."""
        total = sum(self.bins.values())
        if total <= 0:
            return None
        passed = 0.0
        for number in sorted(self.bins):
            passed += self.bins[number]
            if passed >= share * total - 1e-9:
                break
        if not self.relative:
            return float(number)
        return 2 * math.exp(number * _STEP) / (1 + math.exp(_STEP)) if number else 0.0


@dataclass
class Interval:
    """What a sample says of one job on one GPU since the sample before; None: not known."""

    seconds: float
    utilisation: float | None = None  # share of the GPU's time that was the job's, 0 to 1
    memory: int = 0  # bytes of the job's at the end
    energy_mj: float | None = None  # the job's part
    throttled: bool = False


@dataclass
class GpuUse:
    """One job on one GPU. Times in seconds."""

    share: float = 1.0
    estimated: bool = False  # the energy: the vendor reports it for the whole GPU only
    seconds: float = 0.0
    unmeasured: float = 0.0  # the driver gave no answer, or the agent was away
    away_since: float = 0.0  # `uptime` up to which an earlier agent had measured; 0: none, or it is counted
    known_s: float = 0.0  # of `seconds`, with a utilisation
    busy: float = 0.0
    idle: float = 0.0
    throttled: float = 0.0
    memory: float = 0.0  # byte-seconds
    last_memory: int = 0
    peak_utilisation: float = 0.0
    peak_memory: int = 0
    energy_mj: float | None = None
    errors: Counter[str] = field(default_factory=Counter)
    xids: Counter[int] = field(default_factory=Counter)
    utilisation_bins: Histogram = field(default_factory=lambda: Histogram(False))
    memory_bins: Histogram = field(default_factory=lambda: Histogram(True))

    def add(self, interval: Interval) -> None:
        """Count an interval."""
        seconds = interval.seconds
        self.seconds += seconds
        if interval.utilisation is not None:
            self.known_s += seconds
            self.busy += seconds * interval.utilisation
            self.idle += seconds if interval.utilisation == 0 else 0.0
            self.peak_utilisation = max(self.peak_utilisation, 100 * interval.utilisation)
            self.utilisation_bins.add(100 * interval.utilisation, seconds)
        self.memory += seconds * (self.last_memory + interval.memory) / 2  # it changed at some time between
        self.last_memory = interval.memory
        self.peak_memory = max(self.peak_memory, interval.memory)
        self.memory_bins.add(interval.memory, seconds)
        if interval.energy_mj is not None:
            self.energy_mj = (self.energy_mj or 0.0) + interval.energy_mj
        self.throttled += seconds if interval.throttled else 0.0

    def back(self) -> None:
        """Measuring starts again, or never will: the time in between was not measured."""
        if self.away_since:
            self.unmeasured += max(0.0, uptime() - self.away_since)
            self.away_since = 0.0

    def report(self) -> dict[str, Any]:
        """The part of the job's record for this GPU (docs/metrics.md)."""
        found: dict[str, Any] = {"seconds": round(self.seconds, 3), "share": round(self.share, 6)}
        if self.unmeasured:
            found["unmeasured_s"] = round(self.unmeasured, 3)
        if self.known_s:
            found["utilisation"] = _distribution(
                100 * self.busy / self.known_s, self.utilisation_bins, self.peak_utilisation, 2
            )
            found["idle_s"] = round(self.idle, 3)
        elif self.seconds:
            found["attributed"] = False
        if self.seconds:
            found["memory"] = _distribution(self.memory / self.seconds, self.memory_bins, self.peak_memory, 0)
        if self.energy_mj is not None:
            found["energy_j"] = round(self.energy_mj / 1000, 3)
            if self.estimated:
                found["energy_estimated"] = True
        found["throttled_s"] = round(self.throttled, 3)
        found["errors"] = {name: count for name, count in self.errors.items() if count}
        if self.xids:
            found["xids"] = {str(xid): count for xid, count in sorted(self.xids.items())}
        return found

    def to_dict(self) -> dict[str, Any]:
        """All of it, for a restart of the agent."""
        plain = asdict(self) | {"utilisation_bins": self.utilisation_bins.bins, "memory_bins": self.memory_bins.bins}
        return plain | {"errors": dict(self.errors), "xids": dict(self.xids)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> GpuUse:
        """What `to_dict` gave. Raises TypeError, ValueError or AttributeError for anything else."""
        fields = {"known_s": fields.get("told", 0.0), **fields}  # its name until 0.1.0
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        for name, relative in (("utilisation_bins", False), ("memory_bins", True)):
            bins = {int(number): float(weight) for number, weight in known.get(name, {}).items()}
            known[name] = Histogram(relative, bins)
        known["errors"] = Counter({str(name): int(count) for name, count in known.get("errors", {}).items()})
        known["xids"] = Counter({int(xid): int(count) for xid, count in known.get("xids", {}).items()})
        return cls(**known)


def _distribution(mean: float, bins: Histogram, peak: float, digits: int) -> dict[str, float]:
    values = {"mean": mean, "p50": bins.percentile(0.5), "p95": bins.percentile(0.95), "peak": peak}
    return {name: round(min(value or 0.0, peak), digits) for name, value in values.items()}


def split_energy(energy_mj: float, utilisations: Iterable[float | None], shares: Iterable[float]) -> list[float]:
    """The energy of a GPU by its jobs: by each job's busy time; where none worked, or it is not known, by shares.

    The parts add up to the whole.
    """
    known, given = list(utilisations), list(shares)
    work = [one or 0.0 for one in known] if all(one is not None for one in known) else []
    weights = work if sum(work) > 0 else given if sum(given) > 0 else [1.0] * len(given)
    total = sum(weights)
    return [energy_mj * (weight / total) for weight in weights]  # in this order no product vanishes


def grown_errors(before: Mapping[str, int | None], after: Mapping[str, int | None]) -> Counter[str]:
    """Errors between two readings, by kind; a counter that was reset (a driver reloaded) counts from there."""
    grown: Counter[str] = Counter()
    for name in _ERRORS:
        old, new = before.get(name), after.get(name)
        if new is not None and old is not None:
            grown[name] = new - old if new >= old else new
    return grown
