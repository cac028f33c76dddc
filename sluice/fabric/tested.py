"""What a preflight tests: nodes and their parts, the tests, and which parts each test uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gres_probe.machine import natural

PartKind = Literal["node", "nic", "link", "uplink", "gpu", "clock", "memory", "pcie", "nvlink"]
TestKind = Literal["pair", "loopback", "clock", "memory", "pcie", "nvlink"]
GPU_TESTS: tuple[TestKind, ...] = ("clock", "memory", "pcie", "nvlink")
WHOLES: tuple[PartKind, ...] = ("node", "gpu")
"""Parts that have others: one gives no answer where none of its tests does, and is never slow as such."""

Class: TypeAlias = tuple[str, str, bool]
"""Results that are compared with each other: a node's model, a kind of test, whether it crosses leaf switches."""
End: TypeAlias = tuple[str, str, int]
"""What a test keeps busy: of a node, which kind, and its number."""

_WORDS = {
    "nic": "interface",
    "gpu": "GPU",
    "clock": "clock of GPU",
    "memory": "memory of GPU",
    "pcie": "PCIe of GPU",
    "nvlink": "NVLink of GPU",
}


@dataclass(frozen=True, slots=True)
class Member:
    """A node: its interfaces, the leaf switch of each (empty: not known), its GPUs, and what it is like.

    Nodes of one `model` are expected to give the same results, between nodes and by their interfaces; those of one
    `gpu_model` by their GPUs. `linked`: each two of the GPUs are, by NVLink or xGMI. Names are unique; one that is
    tested with others has an interface.
    """

    name: str
    nics: tuple[str, ...]
    leaves: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    model: str = ""
    gpu_model: str = ""
    linked: bool = True


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """What can be at fault. `name`: of the interface or GPU. An uplink is of a leaf switch, which `node` then names."""

    kind: PartKind
    node: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Test:
    """A measurement between two nodes, or of one. `place`: the number of the interface or GPU; `other_gpu`: the
    second GPU of a test of NVLink."""

    kind: TestKind
    node: str
    other: str = ""
    place: int = 0
    other_gpu: int = 0

    def nodes(self) -> tuple[str, ...]:
        """The nodes that take part."""
        return (self.node, self.other) if self.other else (self.node,)

    def ends(self) -> set[End]:
        """What no other test may use at the same time."""
        if self.kind == "pair" or self.kind == "loopback":
            return {(node, "nic", self.place) for node in self.nodes()}
        ends: set[End] = {(self.node, self.kind, self.place)}
        return ends | {(self.node, self.kind, self.other_gpu)} if self.kind == "nvlink" else ends


@dataclass(frozen=True, slots=True)
class Result:
    """Of a test: `value` in GB/s (of a clock in MHz), None where there was no answer; `latency_us` is the median of a
    pair's small messages, 0 where it was not measured. `fault`: what failed, of a test that was made and has no value:
    the driver's error, or data that was copied and is not the same."""

    test: Test
    value: float | None
    latency_us: float = 0.0
    fault: str = ""


class Site:
    """The nodes that may take part, and what tests mean for them."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = {member.name: member for member in members}

    def local_tests(self, members: Sequence[Member]) -> list[Test]:
        """Of each node alone: its interfaces, where it has others to test with, and its GPUs. Links between GPUs are
        tested in a ring, so that each GPU is in two tests."""
        tests: list[Test] = []
        each: tuple[TestKind, ...] = ("clock", "memory", "pcie")
        if len(members) > 1:
            tests = [Test("loopback", one.name, place=place) for one in members for place in range(len(one.nics))]
        for member in members:
            count = len(member.gpus)
            for gpu in range(count):
                tests += [Test(kind, member.name, place=gpu) for kind in each]
            if count > 1 and member.linked:
                ring = range(count if count > 2 else 1)
                tests += [Test("nvlink", member.name, "", gpu, (gpu + 1) % count) for gpu in ring]
        return tests

    def pair_tests(self, pairs: Iterable[tuple[str, str]]) -> list[Test]:
        """Of each pair on all interfaces that both have."""
        return [
            Test("pair", one, other, place)
            for one, other in pairs
            for place in range(min(len(self.members[one].nics), len(self.members[other].nics)))
        ]

    def parts(self, test: Test) -> tuple[Part, ...]:
        """All that a test uses, its nodes first."""
        nodes = [Part("node", node) for node in test.nodes()]
        if test.kind != "pair" and test.kind != "loopback":
            places = (test.place, test.other_gpu) if test.kind == "nvlink" else (test.place,)
            gpus = [self.members[test.node].gpus[place] for place in places]
            its = [(Part("gpu", test.node, gpu), Part(test.kind, test.node, gpu)) for gpu in gpus]
            return (*nodes, *(part for some in its for part in some))
        nics = [(node, self.members[node].nics[test.place]) for node in test.nodes()]
        parts = [*nodes, *(Part("nic", *nic) for nic in nics)]
        if test.kind == "pair":
            parts += [Part("link", *nic) for nic in nics]
            if self.crosses(test):
                parts += [Part("uplink", self.members[node].leaves[test.place]) for node in test.nodes()]
        return tuple(parts)

    def crosses(self, test: Test) -> bool:
        """Whether a test is between nodes of two leaf switches, as far as that is known."""
        leaves = {self.members[node].leaves[test.place] for node in test.nodes()} if test.kind == "pair" else set()
        return len(leaves) > 1 and "" not in leaves

    def class_of(self, test: Test) -> Class:
        """Pairs of unlike nodes are a class of their own."""
        models = sorted({self._model(node, test) for node in test.nodes()})
        return "+".join(models), test.kind, self.crosses(test)

    def classes_alike(self, test: Test) -> list[Class]:
        """Those of pairs of like nodes, one for each node of a test."""
        crosses = self.crosses(test)
        return [(self._model(node, test), test.kind, crosses) for node in test.nodes()]

    def _model(self, node: str, test: Test) -> str:
        member = self.members[node]
        return member.gpu_model if test.kind in GPU_TESTS else member.model

    def named(self, part: Part) -> str:
        """For people."""
        if part.kind == "node":
            return f"node {part.node}"
        if part.kind == "uplink":
            return f"leaf switch {part.node}'s links to other switches"
        if part.kind == "link":
            member = self.members[part.node]
            leaf = member.leaves[member.nics.index(part.name)]
            return f"node {part.node}'s link {part.name}" + (f" to leaf {leaf}" if leaf else "")
        return f"node {part.node}'s {_WORDS[part.kind]} {part.name}"


def by_leaf(members: Sequence[Member]) -> list[list[str]]:
    """Nodes of each leaf switch of their first interface, in natural order."""
    found: dict[str, list[str]] = {}
    for member in sorted(members, key=lambda one: natural(one.name)):
        found.setdefault(member.leaves[0], []).append(member.name)
    return list(found.values())
