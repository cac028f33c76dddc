"""What each class of tests usually gives, and below what a result is slow."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from sluice.fabric.tested import GPU_TESTS, Class, Result, Site, Test

Measured: TypeAlias = tuple[float, float, str]
"""A good result: value, latency, and the node that says so."""
Past: TypeAlias = Mapping[Class, Sequence[Measured]]
"""Earlier good results of each class."""
_ENOUGH_PAST = 8
_ENOUGH_NOW = 4
_ENOUGH_BELIEVED = 2
_SPREAD = 6 * 1.4826  # six standard deviations, from a median of absolute deviations


@dataclass(frozen=True, slots=True)
class Rules:
    """What is slow: less than `share` of the class's median, or than `least` GB/s between nodes where that is set.

    `confirm`: bad results for a verdict; `follow_ups`: rounds for suspects; `congested`: times the usual latency.
    """

    share: float = 0.75
    least: float | None = None
    confirm: int = 4
    follow_ups: int = 8
    congested: float = 3.0


@dataclass(frozen=True, slots=True)
class Usual:
    """What a class usually gives, and below what a result is slow."""

    value: float
    floor: float
    latency_us: float


class Expectations:
    """What is expected of each test: by earlier results of its class, else by those of this preflight."""

    def __init__(self, site: Site, rules: Rules, past: Past, results: Iterable[Result]) -> None:
        """`results`: of the planned rounds, and not of follow-ups, which are of suspects."""
        self._site = site
        self._rules = rules
        self._before = self._by_past(past)
        results = list(results)
        self._now = self._by_results(results)
        self._of_node = self._by_nodes_own(results)

    def of(self, test: Test) -> Usual | None:
        """None where nothing is known."""
        usual = self._usual(test)
        if test.kind == "pair" and self._rules.least is not None:
            least = self._rules.least
            return Usual(max(usual.value, least), least, usual.latency_us) if usual else Usual(least, least, math.inf)
        return usual

    def _usual(self, test: Test) -> Usual | None:
        """A pair of unlike nodes without earlier results is expected to give what the slower one gives."""
        name, alike = self._site.class_of(test), self._site.classes_alike(test)
        for known, names in ((self._before, [name]), (self._before, alike), (self._now, [name]), (self._now, alike)):
            if all(one in known for one in names):
                return min((known[one] for one in names), key=lambda one: one.value)
        return self._of_node.get((test.node, name)) if test.kind in GPU_TESTS else None

    def _by_past(self, past: Past) -> dict[Class, Usual]:
        """In a class whose results vary only those are slow that are far from all others."""
        found = {}
        for name, results in past.items():
            believed = _believed(results)
            if len(results) >= _ENOUGH_PAST and len(believed) >= _ENOUGH_BELIEVED:
                values = [value for value, _, _ in believed]
                middle = median(values)
                spread = median(abs(value - middle) for value in values)
                floor = min(self._rules.share * middle, middle - _SPREAD * spread)
                found[name] = Usual(middle, floor, median(latency for _, latency, _ in believed))
        return found

    def _by_nodes_own(self, results: Iterable[Result]) -> dict[tuple[str, Class], Usual]:
        """GPUs of a node are compared with each other where nothing else is known: its reports count for it alone."""
        values: dict[tuple[str, Class], list[float]] = defaultdict(list)
        for result in results:
            if result.test.kind in GPU_TESTS and result.value is not None:
                values[result.test.node, self._site.class_of(result.test)].append(result.value)
        middles = {
            key: median(sorted(some)[len(some) // 2 :]) for key, some in values.items() if len(some) >= _ENOUGH_NOW
        }
        return {key: Usual(middle, self._rules.share * middle, math.inf) for key, middle in middles.items()}

    def _by_results(self, results: Iterable[Result]) -> dict[Class, Usual]:
        """The better half of unloaded results counts: in a small job one faulty node is in half of all pairs."""
        of_class: dict[Class, list[Measured]] = defaultdict(list)
        for result in results:
            if result.value is not None:
                of_class[self._site.class_of(result.test)].append((result.value, result.latency_us, result.test.node))
        found = {}
        for name, some in of_class.items():
            latency = _confirmed_latency(some)
            unloaded = [one for one in some if latency == 0 or one[1] <= self._rules.congested * latency]
            believed = _believed(unloaded)
            if len(unloaded) >= _ENOUGH_NOW and len(believed) >= _ENOUGH_BELIEVED:
                middle = median(value for value, _, _ in believed[len(believed) // 2 :])
                found[name] = Usual(middle, self._rules.share * middle, latency)
        return found


def _confirmed_latency(results: Iterable[Measured]) -> float:
    """The lowest that a second node has measured: where most paths are loaded by others, a median is theirs, and a good
    node behind them looks slow. 0 where there is none."""
    of_node: dict[str, float] = {}
    for _, latency, node in results:
        if latency > 0:
            of_node[node] = min(latency, of_node.get(node, latency))
    return next(iter(sorted(of_node.values())[1:2]), 0.0)


def _believed(results: Sequence[Measured]) -> list[Measured]:
    """In order, without as many of the highest as any one node has measured: a node that says too much would make all
    others look slow."""
    most = max(Counter(node for _, _, node in results).values(), default=0)
    return sorted(results)[: len(results) - most]
