"""The nodes of a job prove themselves before it starts: which tests to run, and which part is at fault by elimination.

Uses no clock, files or network: `Preflight.next_round` says what is to be measured, `Preflight.take` gets what was,
and `Preflight.verdict` names what is at fault. The same results lead to the same tests and the same verdict.

A good result clears all parts that the test used. A part is at fault if it alone remains of several bad results and no
result ever cleared it; a result that is slow because others load the network (its latency says so) is evidence of
nothing. One result, however bad, is never enough. Where the links of more than half of the nodes, and of three,
are suspects in the end, none is at fault: a fabric that others fill is likelier.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from statistics import median

from sluice.fabric.pairing import plan
from sluice.fabric.tested import WHOLES, Class, End, Member, Part, PartKind, Result, Site, Test, by_leaf
from sluice.fabric.usual import Expectations, Measured, Past, Rules

_OF_NICS: tuple[PartKind, ...] = ("nic", "link")
_MOST_REPEATS = 3  # of a test that nothing explains


class Kind(Enum):
    """What a result says."""

    GOOD = "good"
    SLOW = "slow"
    SILENT = "silent"
    FAILED = "failed"  # it was made, and went wrong: an error of the driver, wrong data
    CONGESTED = "congested"
    UNKNOWN = "unknown"  # there is nothing to compare it with


@dataclass(frozen=True, slots=True)
class Finding:
    """Parts at fault, several of one node where they cannot be distinguished. `value`: the median of their bad results,
    None where there was no answer; `usual`: that of their class, None where it is not known. `fault`: what failed."""

    parts: tuple[Part, ...]
    value: float | None
    usual: float | None
    text: str
    fault: str = ""

    @property
    def node(self) -> str:
        """The node to take out of service; empty where the fault is of no node."""
        return "" if self.parts[0].kind == "uplink" else self.parts[0].node


@dataclass(frozen=True, slots=True)
class Verdict:
    """`undecided`: parts of several nodes of which one is at fault; `slow_paths`: pairs that are slow although each of
    their parts is good with others, e.g. by other jobs' traffic. Neither takes a node out of service."""

    findings: tuple[Finding, ...] = ()
    undecided: tuple[tuple[Part, ...], ...] = ()
    slow_paths: tuple[Test, ...] = ()
    rounds: int = 0
    tests: int = 0
    unjudged: int = 0
    """Tests without anything to compare them with."""

    @property
    def drain(self) -> list[str]:
        """Nodes to take out of service, each once, in order."""
        return sorted({finding.node for finding in self.findings if finding.node})


@dataclass(slots=True)
class _Seen:
    result: Result
    round: int
    parts: tuple[Part, ...]
    kind: Kind = Kind.UNKNOWN

    @property
    def test(self) -> Test:
        return self.result.test


@dataclass(slots=True)
class _Sifted:
    """What is known so far. `bad`: results by suspect; `open`: bad results that no part at fault explains, with the
    parts that are not cleared."""

    cleared: set[Part] = field(default_factory=set)
    faulty: list[Part] = field(default_factory=list)
    bad: dict[Part, list[_Seen]] = field(default_factory=dict)
    open: list[tuple[_Seen, frozenset[Part]]] = field(default_factory=list)


class Preflight:
    """One preflight: ask `next_round` and give `take` what was measured, until there is no next round.

    Where nodes are `unresolved` then, others may take part: there are further rounds after `add_partners`.
    """

    def __init__(self, members: Sequence[Member], rules: Rules | None = None, past: Past | None = None) -> None:
        self._members = len(members)
        self._rules = rules or Rules()
        self._past: Past = past or {}
        self._site = Site(members)
        rounds = [self._site.local_tests(members), *map(self._site.pair_tests, plan(by_leaf(members)))]
        self._planned = [tests for tests in rounds if tests]
        self._seen: list[_Seen] = []
        self._round = 0
        self._follow_ups = 0
        self._gone: set[str] = set()
        self._silent_rounds: dict[str, set[int]] = defaultdict(set)
        self._alive: set[Part] = set()  # of tests that were answered, well or not

    # ---- what is to be measured ----

    def next_round(self) -> list[Test]:
        """Tests that can run at once, each interface and GPU in one of its kind; empty: done."""
        while self._planned:
            gone = {node for node, rounds in self._silent_rounds.items() if len(rounds) > 1 and not self._answers(node)}
            tests = [test for test in self._planned.pop(0) if gone.isdisjoint(test.nodes())]
            if tests:
                return tests
        if self._follow_ups == self._rules.follow_ups:
            return []
        self._follow_ups += 1
        return self._follow_up()

    def unresolved(self) -> list[str]:
        """Nodes of which one is at fault, where nothing says which: with others they may be told apart. To be asked
        when there is no next round."""
        _, undecided = self._of_open(self._sift())
        nodes = {part.node for parts in undecided for part in parts if part.kind in _OF_NICS}
        return [] if self._are_most(nodes) else sorted(nodes)

    def add_partners(self, partners: Iterable[Member]) -> None:
        """Nodes of no job, which are asked from now on. They may be at fault like any other, until a good result clears
        them."""
        self._site.members |= {partner.name: partner for partner in partners}
        self._follow_ups = 0

    def leave(self, partners: Collection[str]) -> None:
        """Partners that take part no longer: they are in no further test. What was measured with them counts."""
        self._gone.update(partners)

    def planned(self) -> list[list[Test]]:
        """All rounds that are known before anything is measured, for those who give nodes all of them at once; `take`
        then gets the results of one after the other."""
        rounds, self._planned = self._planned, []
        return rounds

    def take(self, results: Iterable[Result]) -> None:
        """What the tests of the last round gave, in any order; a test that is left out was not made."""
        for result in results:
            self._seen.append(_Seen(result, self._round, self._site.parts(result.test)))
            if result.value is not None:
                self._alive.update(self._seen[-1].parts)
            elif result.fault:
                self._alive.add(Part("node", result.test.node))
            else:
                for node in result.test.nodes():
                    self._silent_rounds[node].add(self._round)
        self._round += 1

    def _answers(self, node: str) -> bool:
        return Part("node", node) in self._alive

    # ---- what the results say ----

    @cached_property
    def _expected(self) -> Expectations:
        """Found once, when all planned rounds were measured."""
        return Expectations(self._site, self._rules, self._past, [seen.result for seen in self._seen])

    def _judge(self, result: Result) -> Kind:
        if result.value is None:
            return Kind.FAILED if result.fault else Kind.SILENT
        expected = self._expected.of(result.test)
        if expected is None:
            return Kind.UNKNOWN
        if result.value >= expected.floor:
            return Kind.GOOD
        if result.test.kind == "pair" and 0 < self._rules.congested * expected.latency_us < result.latency_us:
            return Kind.CONGESTED
        return Kind.SLOW

    def _sift(self) -> _Sifted:
        """Clear what was good with anyone, convict what alone remains, and keep what is still open."""
        sifted = _Sifted()
        for seen in self._seen:
            if seen.kind is Kind.UNKNOWN:
                seen.kind = self._judge(seen.result)
            if seen.kind is Kind.GOOD:
                sifted.cleared.update(seen.parts)
        bad = [seen for seen in self._seen if seen.kind in (Kind.SLOW, Kind.SILENT, Kind.FAILED)]
        silent = self._silent(bad)
        suspects = [
            (seen, self._suspects(seen, sifted.cleared))
            for seen in bad
            if not any(map(silent.__contains__, seen.parts))
        ]
        by_part: dict[Part, list[_Seen]] = defaultdict(list)
        for seen, parts in suspects:
            for part in parts:
                by_part[part].append(seen)
        alone = Counter(next(iter(parts)) for _, parts in suspects if len(parts) == 1)
        guilty = {part for part, count in alone.items() if count > 1 and self._confirmed(by_part[part])}
        sifted.faulty = sorted({*silent, *guilty})
        sifted.bad = {**by_part, **silent}
        sifted.open = [(seen, parts) for seen, parts in suspects if guilty.isdisjoint(parts)]
        sifted.open += [(seen, frozenset()) for seen in self._seen if seen.kind is Kind.CONGESTED]
        return sifted

    def _confirmed(self, bad: Sequence[_Seen]) -> bool:
        return len(bad) >= self._rules.confirm and len({seen.round for seen in bad}) > 1

    def _silent(self, bad: Iterable[_Seen]) -> dict[Part, list[_Seen]]:
        """Nodes and GPUs of which no test was ever answered, one of them alone among these; no GPUs of such nodes."""
        of_whole: dict[Part, list[_Seen]] = defaultdict(list)
        for seen in bad:
            for part in seen.parts:
                if part.kind in WHOLES and part not in self._alive:
                    of_whole[part].append(seen)
        return {
            part: tests
            for part, tests in of_whole.items()
            if self._confirmed(tests)
            and not all(seen.test.other for seen in tests)
            and (part.kind == "node" or self._answers(part.node))
        }

    def _suspects(self, seen: _Seen, cleared: set[Part]) -> frozenset[Part]:
        """What may be at fault: for silence nothing that ever answered, for slowness no node or GPU as such."""
        if seen.kind is not Kind.SLOW:
            return frozenset(part for part in seen.parts if part not in self._alive)
        return frozenset(part for part in seen.parts if part not in cleared and part.kind not in WHOLES)

    # ---- follow-ups ----

    def _follow_up(self) -> list[Test]:
        """At most one test of each interface and GPU: of suspects with partners that are known to be good."""
        sifted = self._sift()
        busy: set[End] = set()
        tests: list[Test] = []

        def add(test: Test | None) -> None:
            if test is not None and busy.isdisjoint(test.ends()) and self._gone.isdisjoint(test.nodes()):
                busy.update(test.ends())
                tests.append(test)

        settled = {parts for parts, bad in self._open_sets(sifted).items() if self._is_one_nodes(parts, bad)}
        times = Counter((node, seen.test.place) for seen in self._seen for node in seen.test.nodes())

        def order(part: Part) -> tuple[int, Part]:
            """Those that were asked least come first: a good partner is there for all of them."""
            member = self._site.members.get(part.node)
            place = member.nics.index(part.name) if member is not None and part.kind in _OF_NICS else 0
            return times[part.node, place], part

        for part in sorted({part for _, parts in sifted.open if parts not in settled for part in parts}, key=order):
            add(self._test_for(part, sifted, busy))
        repeated = Counter(seen.test for seen in self._seen)
        for seen, parts in [one for one in sifted.open if one[1] not in settled]:
            most = self._rules.confirm if parts else _MOST_REPEATS
            if repeated[seen.test] < most and not self._was_good(seen.test):
                add(seen.test)  # as it is, where nobody else can be asked
        return tests

    def _open_sets(self, sifted: _Sifted) -> dict[frozenset[Part], list[_Seen]]:
        """Suspects that nothing distinguishes yet, with the results that are bad by one of them."""
        found: dict[frozenset[Part], list[_Seen]] = {}
        for seen, parts in sifted.open:
            if parts:
                found.setdefault(parts, []).append(seen)
        return found

    def _is_one_nodes(self, parts: frozenset[Part], bad: Sequence[_Seen]) -> bool:
        """Whether it is sure enough whose they are, though not which of them it is."""
        nodes = {"" if part.kind == "uplink" else part.node for part in parts}
        return len(nodes) == 1 and nodes != {""} and self._confirmed(bad)

    def _was_good(self, test: Test) -> bool:
        return any(seen.kind is Kind.GOOD and seen.test == test for seen in self._seen)

    def _test_for(self, part: Part, sifted: _Sifted, busy: set[End]) -> Test | None:
        """What can clear a part, or leave it alone."""
        if part.kind == "uplink":
            return self._test_of_uplink(part, sifted, busy)
        if part.kind == "node":
            return Test("loopback", part.node)
        member = self._site.members[part.node]
        if part.kind == "nvlink":
            gpu = member.gpus.index(part.name)
            good = [place for place, one in enumerate(member.gpus) if Part("nvlink", part.node, one) in sifted.cleared]
            return Test("nvlink", part.node, "", gpu, good[0] if good else (gpu + 1) % len(member.gpus))
        if part.kind == "gpu":
            return Test("clock", part.node, place=member.gpus.index(part.name))
        if part.kind == "clock" or part.kind == "memory" or part.kind == "pcie":
            return Test(part.kind, part.node, place=member.gpus.index(part.name))
        place = member.nics.index(part.name)
        alone = Test("loopback", part.node, place=place)
        unknown = any(seen.test == alone and seen.kind is Kind.UNKNOWN for seen in self._seen)
        if not unknown and Part("nic", part.node, part.name) not in sifted.cleared:
            return alone
        partner = self._partner(part.node, place, sifted, busy)
        return None if partner is None else Test("pair", part.node, partner, place)

    def _free(self, place: int, busy: set[End]) -> Iterator[Member]:
        """Nodes that have an interface at this place which is in no other test."""
        for member in self._site.members.values():
            free = (member.name, "nic", place) not in busy and member.name not in self._gone
            if free and place < len(member.nics):
                yield member

    def _is_good(self, member: Member, place: int, sifted: _Sifted) -> bool:
        nic = member.nics[place]
        return all(Part(kind, member.name, nic) in sifted.cleared for kind in _OF_NICS)

    def _partner(self, node: str, place: int, sifted: _Sifted, busy: set[End]) -> str | None:
        """One that is known to be good, near, and was not asked in vain; where there is none, another suspect."""
        leaf = self._site.members[node].leaves[place]
        pairs = [seen.test.nodes() for seen in self._seen if seen.test.kind == "pair"]
        asked = Counter(other for pair in pairs if node in pair for other in pair)

        def worse(other: Member) -> tuple[bool, bool, bool, bool, int]:
            beyond, times = other.leaves[place], asked[other.name]
            unsure = Part("uplink", beyond) not in sifted.cleared
            return times > 1, not self._is_good(other, place, sifted), beyond != leaf, unsure, times

        others = (member for member in self._free(place, busy) if member.name != node)
        best = min(others, key=worse, default=None)
        return None if best is None else best.name

    def _test_of_uplink(self, part: Part, sifted: _Sifted, busy: set[End]) -> Test | None:
        """Between two good nodes, one below this leaf switch and the other below one whose links are cleared."""
        for place in range(max(len(member.nics) for member in self._site.members.values())):
            good = [member for member in self._free(place, busy) if self._is_good(member, place, sifted)]
            mine = next((one for one in good if one.leaves[place] == part.node), None)
            others = [one for one in good if one.leaves[place] not in (part.node, "")]
            clear = [one for one in others if Part("uplink", one.leaves[place]) in sifted.cleared] or others
            if mine is not None and clear:
                return Test("pair", mine.name, clear[self._round % len(clear)].name, place)
        return None

    # ---- the verdict ----

    def verdict(self) -> Verdict:
        """What is at fault by all results; to be asked when there is no next round."""
        sifted = self._sift()
        findings, undecided = self._of_open(sifted)
        findings = [self._finding((part,), sifted.bad[part]) for part in sifted.faulty] + findings
        if self._are_most({part.node for part in sifted.bad if part.kind == "link"}):
            of_links = [finding for finding in findings if any(part.kind == "link" for part in finding.parts)]
            undecided += [finding.parts for finding in of_links]
            findings = [finding for finding in findings if finding not in of_links]
        times = Counter(seen.test for seen, parts in sifted.open if not parts)
        slow = [test for test, count in times.items() if count == _MOST_REPEATS and not self._was_good(test)]
        unjudged = sum(seen.kind is Kind.UNKNOWN for seen in self._seen)
        return Verdict(tuple(findings), tuple(undecided), tuple(slow), self._round, len(self._seen), unjudged)

    def _are_most(self, suspects: Collection[str]) -> bool:
        """Of the job's nodes, and three at least."""
        return len(suspects) > max(2, self._members // 2)

    def _of_open(self, sifted: _Sifted) -> tuple[list[Finding], list[tuple[Part, ...]]]:
        """Of suspects that nothing distinguishes: findings where they are one node's, and those that are undecided."""
        findings, undecided = [], []
        for parts, bad in self._open_sets(sifted).items():
            any_of = [seen for seen, found in sifted.open if not found.isdisjoint(parts)]
            if self._is_one_nodes(parts, bad):
                findings.append(self._finding(tuple(sorted(parts)), bad))
            elif self._confirmed(any_of):
                undecided.append(tuple(sorted(parts)))
        return findings, undecided

    def good_results(self) -> dict[Class, list[Measured]]:
        """What was good, or could not be judged, for the next preflights' `past`."""
        found: dict[Class, list[Measured]] = defaultdict(list)
        for seen in self._seen:
            if seen.kind in (Kind.GOOD, Kind.UNKNOWN) and seen.result.value is not None:
                found[self._site.class_of(seen.test)].append(
                    (seen.result.value, seen.result.latency_us, seen.test.node)
                )
        return dict(found)

    def _finding(self, parts: tuple[Part, ...], bad: Sequence[_Seen]) -> Finding:
        values = [seen.result.value for seen in bad if seen.result.value is not None]
        expected = self._expected.of(bad[0].test)
        usual = None if expected is None else expected.value
        what = " or ".join(self._site.named(part) for part in parts)
        fault = next((seen.result.fault for seen in bad if seen.result.fault), "")
        if fault:
            return Finding(parts, None, usual, f"{what}: {fault}", fault)
        if not values:
            return Finding(parts, None, usual, f"{what} gives no answer")
        unit = " MHz" if parts[0].kind == "clock" else " GB/s"
        of = "" if usual is None else f" of {usual:.3g}"
        value = median(values)
        return Finding(parts, value, usual, f"{what} slow: {value:.3g}{of}{unit}")
