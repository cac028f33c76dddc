"""Figures of a gateway for Prometheus. Workers count; the parent adds them up, those of workers that ended, too."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

_ABOUT: Final = {
    "requests": "Requests that have ended, by outcome.",
    "refused": "Requests that were refused before they had a place, by status.",
    "prompt_tokens": "Tokens of prompts.",
    "completion_tokens": "Tokens of answers.",
    "batch_requests": "Lines of batches that have a result, by outcome.",
    "batch_prompt_tokens": "Tokens of prompts of batches.",
    "batch_completion_tokens": "Tokens of answers of batches.",
    "replica_failures": "Times that a replica failed a request.",
    "replica_slow": "Times that a replica was left out because it was slow.",
    "resumed": "Times that a stream went on with another replica.",
    "cancelled": "Requests whose client went away.",
    "stream_errors": "Streams in which the engine reported an error.",
    "slow_clients": "Connections that were ended because the client took nothing.",
    "connections": "Connections that were taken.",
    "connections_refused": "Connections that were refused: too many.",
    "records_failed": "Usage records that could not be written at once.",
}
_BOUNDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_BOUND_NAMES: Final = (*(f"{bound:g}" for bound in _BOUNDS), "+Inf")
_TIMES: Final = {
    "queue_seconds": "Time that requests waited for their turn.",
    "first_token_seconds": "Time to the first token.",
    "request_seconds": "Time of whole requests.",
}
_MOST_SERVICES: Final = 500
OTHER: Final = "other"
_LATELY_S: Final = 30.0
_MOST_DELAYS: Final = 256

Key = tuple[str, str, str]
"""Figure, service, and outcome, status or bound."""


class Figures:
    """Counters of a worker."""

    def __init__(self) -> None:
        self.counts: dict[Key, float] = {}
        self._services: set[str] = set()

    def add(self, name: str, service: str = "", what: str = "", count: float = 1) -> None:
        """Count."""
        if service and service not in self._services:
            if len(self._services) >= _MOST_SERVICES:
                service = OTHER
            else:
                self._services.add(service)
        key = name, service, what
        self.counts[key] = self.counts.get(key, 0) + count

    def time(self, name: str, service: str, seconds: float) -> None:
        """Count a time."""
        self.add(name, service, _BOUND_NAMES[bisect_left(_BOUNDS, seconds)])
        self.add(name, service, "sum", seconds)


class Delays:
    """Times in the queue of a worker's requests, lately."""

    def __init__(self) -> None:
        self._of: dict[str, deque[tuple[float, float]]] = {}

    def add(self, service: str, now: float, seconds: float) -> None:
        """One request's."""
        found = self._of.get(service)
        if found is None:
            found = self._of[service] = deque(maxlen=_MOST_DELAYS)
        found.append((now, seconds))

    def high(self, service: str, now: float) -> float:
        """The 95th percentile."""
        lately = sorted(seconds for at, seconds in self._of.get(service, ()) if now - at < _LATELY_S)
        return lately[int(len(lately) * 0.95)] if lately else 0.0


def render(counts: Mapping[Key, float], gauges: Iterable[tuple[str, str, str, float]]) -> str:
    """In Prometheus's text form. `gauges`: name, what it is, service, value."""
    lines: list[str] = []
    rows: dict[str, dict[tuple[str, str], float]] = {}
    for (name, service, what), value in counts.items():
        rows.setdefault(name, {})[service, what] = value
    for name, about in _ABOUT.items():
        lines += (f"# HELP sluice_gateway_{name}_total {about}", f"# TYPE sluice_gateway_{name}_total counter")
        label = "status" if name == "refused" else "outcome"
        lines += (
            f"sluice_gateway_{name}_total{_labels(service=service, **{label: what})} {value:g}"
            for (service, what), value in sorted(rows.get(name, {}).items())
        )
    for name, about in _TIMES.items():
        lines += (f"# HELP sluice_gateway_{name} {about}", f"# TYPE sluice_gateway_{name} histogram")
        found = rows.get(name, {})
        for service in sorted({service for service, _ in found}):
            total = 0.0
            for bound in _BOUND_NAMES:
                total += found.get((service, bound), 0)
                lines.append(f"sluice_gateway_{name}_bucket{_labels(service=service, le=bound)} {total:g}")
            lines.append(f"sluice_gateway_{name}_sum{_labels(service=service)} {found.get((service, 'sum'), 0):g}")
            lines.append(f"sluice_gateway_{name}_count{_labels(service=service)} {total:g}")
    before = ""
    for name, about, service, value in sorted(gauges):
        if name != before:
            lines += (f"# HELP sluice_gateway_{name} {about}", f"# TYPE sluice_gateway_{name} gauge")
            before = name
        lines.append(f"sluice_gateway_{name}{_labels(service=service)} {value:g}")
    return "\n".join(lines) + "\n"


def _labels(**labels: str) -> str:
    shown = ",".join(
        '{}="{}"'.format(name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for name, value in labels.items()
        if value
    )
    return f"{{{shown}}}" if shown else ""
