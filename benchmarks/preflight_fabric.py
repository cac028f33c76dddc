"""A fabric with faults and noise, which answers the tests of a preflight; and how long the tests take, as a model."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.fabric.preflight import Preflight
from sluice.fabric.tested import Member, Part, Result, Test

USUAL = {"pair": 48.0, "loopback": 49.0, "clock": 1900.0, "memory": 1400.0, "pcie": 52.0, "nvlink": 380.0}
SLOWER = {"h100": 1.0, "a100": 0.5, "old": 0.25}
"""Classes of nodes that are healthy: each gives this share of the usual value."""
ACROSS = 0.95
LATENCY_US = {"pair": 2.4, "loopback": 1.4}
NOISE = 0.03  # standard deviation of a measurement's logarithm
HICCUPS = 0.002  # of all measurements: something else ran, and it gives a fifth to a half
SECONDS = {"pair": 0.40, "loopback": 0.30, "clock": 0.10, "memory": 0.10, "pcie": 0.08, "nvlink": 0.06}
"""Of a test: connect, 0.25 s of bandwidth, 1,000 small messages; a kernel's five launches, copies and their check."""
OPEN_GPU_S = 0.10  # a driver context, once for each GPU of a node, while it waits for orders: partly at once
SILENCE_S = 1.0  # until a test that nobody answers is given up
MOST_SILENCES = 3  # on the way of one node: its own link that is down is given up after two
POLL_S = 0.1  # how often nodes ask the controller, at least ...
POLL_NODE_S = 0.001  # ... and with many of them: before the planned rounds twice, then once for each follow-up


@dataclass(slots=True)
class Faults:
    """What is wrong. `slow`: parts and the share they give; `dead`: parts that do not answer; `busy`: leaf switches
    whose links to others another job fills, until a round."""

    slow: dict[Part, float] = field(default_factory=dict)
    dead: set[Part] = field(default_factory=set)
    busy: dict[str, int] = field(default_factory=dict)

    def named(self) -> set[Part]:
        """The parts that are to be named."""
        return set(self.slow) | self.dead


class SimulatedFabric:
    """Members, their faults, and the noise of measurements."""

    def __init__(self, members: Sequence[Member], faults: Faults, chance: random.Random) -> None:
        self.members = {member.name: member for member in members}
        self.faults = faults
        self._chance = chance

    def measure(self, tests: Sequence[Test], turn: int) -> list[Result]:
        """One round."""
        return [self._measure(test, turn) for test in tests]

    def _measure(self, test: Test, turn: int) -> Result:
        parts = self._parts(test)
        if not self.faults.dead.isdisjoint(parts):
            return Result(test, None)
        crosses = any(part.kind == "uplink" for part in parts)
        value = USUAL[test.kind] * min(SLOWER[self.members[node].model] for node in test.nodes())
        value *= (ACROSS if crosses else 1.0) * min((self.faults.slow.get(part, 1.0) for part in parts), default=1.0)
        latency = LATENCY_US.get(test.kind, 0.0) * (1.6 if crosses else 1.0)
        if crosses and any(turn < self.faults.busy.get(part.node, 0) for part in parts if part.kind == "uplink"):
            value *= self._chance.uniform(0.2, 0.6)
            latency *= self._chance.uniform(6, 30)
        if self._chance.random() < HICCUPS:
            value *= self._chance.uniform(0.2, 0.5)
        return Result(test, value * self._noise(), latency * self._noise())

    def _noise(self) -> float:
        return math.exp(self._chance.gauss(0.0, NOISE))

    def _parts(self, test: Test) -> list[Part]:
        """The same path as in `sluice.fabric.tested`, found independently of it."""
        parts = [Part("node", node) for node in test.nodes()]
        if test.kind != "pair" and test.kind != "loopback":
            for gpu in {test.place, test.other_gpu} if test.kind == "nvlink" else {test.place}:
                parts += [Part("gpu", test.node, str(gpu)), Part(test.kind, test.node, str(gpu))]
            return parts
        for node in test.nodes():
            parts.append(Part("nic", node, self.members[node].nics[test.place]))
            if test.kind == "pair":
                parts.append(Part("link", node, self.members[node].nics[test.place]))
        leaves = {self.members[node].leaves[test.place] for node in test.nodes()}
        return parts + [Part("uplink", leaf) for leaf in leaves if len(leaves) > 1]


def run_preflight(preflight: Preflight, fabric: SimulatedFabric) -> tuple[float, float]:
    """Until its verdict; returns the seconds that it takes by the model, and the core's processor seconds."""
    poll = max(POLL_S, POLL_NODE_S * len(fabric.members))
    planned = _rounds_planned(len(fabric.members))
    gpus = max(len(member.gpus) for member in fabric.members.values())
    seconds, core, silences = 2 * poll + max(poll, OPEN_GPU_S * gpus), 0.0, 0
    for turn in itertools.count():
        began = time.process_time()
        tests = preflight.next_round()
        core += time.process_time() - began
        if not tests:
            return seconds, core
        results = fabric.measure(tests, turn)
        began = time.process_time()
        preflight.take(results)
        core += time.process_time() - began
        silent = any(result.value is None for result in results) and silences < MOST_SILENCES
        silences += silent
        seconds += (poll if turn >= planned else 0.0) + _longest(tests, silent=silent)
    raise AssertionError


def _rounds_planned(nodes: int) -> int:
    """Each node alone; then pairs, which nodes get at once."""
    return 1 + (nodes - 1).bit_length()


def _longest(tests: Sequence[Test], *, silent: bool) -> float:
    """Of a round, one kind after the other: on all GPUs and interfaces at once, by PCIe on one of each of
    two NUMA nodes; a GPU is in two tests of links."""
    of_node = Counter((test.kind, test.node) for test in tests)
    most: dict[str, int] = {}
    for (kind, _), count in of_node.items():
        most[kind] = max(most.get(kind, 0), {"pcie": (count + 1) // 2, "nvlink": min(count, 2)}.get(kind, 1))
    seconds = sum(SECONDS[kind] * times for kind, times in most.items())
    return max(seconds, SILENCE_S) if silent else seconds
