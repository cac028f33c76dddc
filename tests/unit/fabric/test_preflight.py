"""Which tests a preflight makes, and what it names at fault: on a simulated fabric with faults and noise."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from benchmarks.preflight import past, simulate
from benchmarks.preflight_fabric import Faults, SimulatedFabric, run_preflight
from sluice.fabric.pairing import plan
from sluice.fabric.preflight import Preflight, Verdict
from sluice.fabric.tested import Member, Part, Result
from sluice.fabric.tested import Test as OneTest
from sluice.fabric.usual import Past, Rules

KNOWN = past(random.Random(1))


def leaves(*sizes: int) -> list[list[str]]:
    return [[f"n{place}-{number}" for number in range(size)] for place, size in enumerate(sizes)]


def job(count: int, *, leaf: int = 4, rails: int = 1, gpus: int = 2, model: str = "h100") -> list[Member]:
    nics = tuple(f"mlx5_{rail}" for rail in range(rails))
    have = tuple(map(str, range(gpus)))
    return [
        Member(f"n{n}", nics, tuple(f"l{n // leaf}r{r}" for r in range(rails)), have, model, model)
        for n in range(count)
    ]


def judged(members: Sequence[Member], faults: Faults, partners: Sequence[Member] = (), seed: int = 1) -> Verdict:
    """With `partners` where nothing else says which node it is."""
    preflight = Preflight(members, None, KNOWN)
    fabric = SimulatedFabric([*members, *partners], faults, random.Random(seed))
    run_preflight(preflight, fabric)
    if partners and preflight.unresolved():
        preflight.add_partners(partners)
        run_preflight(preflight, fabric)
    return preflight.verdict()


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (7,), (3, 3, 3), (16, 1, 1), (1, 1, 1, 1, 1), (5, 4), (32,) * 16])
def test_each_round_pairs_all_nodes_once(sizes: tuple[int, ...]) -> None:
    count = sum(sizes)
    rounds = plan(leaves(*sizes))
    assert len(rounds) == (count - 1).bit_length()
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes)) == count - count % 2


@pytest.mark.parametrize("sizes", [(4, 4), (8, 8, 8, 8), (6, 6, 4), (32,) * 16])
def test_rounds_within_leaf_switches_come_first(sizes: tuple[int, ...]) -> None:
    apart = [[one.split("-")[0] != other.split("-")[0] for one, other in pairs] for pairs in plan(leaves(*sizes))]
    within = [not any(pairs) for pairs in apart]
    assert within == sorted(within, reverse=True)
    assert within[0]
    assert all(apart[-1])


def test_a_pair_meets_again_only_where_a_leaf_switch_is_small() -> None:
    pairs = [frozenset(pair) for pairs in plan(leaves(*(32,) * 16)) for pair in pairs]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("none", [[], [["a"]], [[], ["a"]]])
def test_one_node_has_nobody_to_test_with(none: list[list[str]]) -> None:
    assert plan(none) == []


@pytest.mark.parametrize("count", [8, 9, 64])
@pytest.mark.parametrize("kind", ["nic", "link"])
def test_an_interface_is_told_from_its_link(kind: str, count: int) -> None:
    part = Part(kind, "n5", "mlx5_1")  # type: ignore[arg-type]
    verdict = judged(job(count, rails=2), Faults(slow={part: 0.25}))
    assert [finding.parts for finding in verdict.findings] == [(part,)]
    assert verdict.drain == ["n5"]


@pytest.mark.parametrize("kind", ["clock", "memory", "pcie", "nvlink"])
def test_gpus_and_their_links_are_told_from_each_other(kind: str) -> None:
    part = Part(kind, "n2", "3")  # type: ignore[arg-type]
    verdict = judged(job(4, gpus=8), Faults(slow={part: 0.4}))
    assert [finding.parts for finding in verdict.findings] == [(part,)]


def test_a_link_between_two_gpus_alone_is_named_with_both() -> None:
    verdict = judged(job(4), Faults(slow={Part("nvlink", "n2", "1"): 0.4}))
    assert [finding.parts for finding in verdict.findings] == [(Part("nvlink", "n2", "0"), Part("nvlink", "n2", "1"))]
    assert verdict.drain == ["n2"]


def test_a_node_that_does_not_answer() -> None:
    verdict = judged(job(8), Faults(dead={Part("node", "n3")}))
    assert [finding.text for finding in verdict.findings] == ["node n3 gives no answer"]


def test_a_link_that_is_down_is_not_a_dead_node() -> None:
    verdict = judged(job(8), Faults(dead={Part("link", "n3", "mlx5_0")}))
    assert [finding.text for finding in verdict.findings] == ["node n3's link mlx5_0 to leaf l0r0 gives no answer"]


def test_the_text_says_how_slow() -> None:
    verdict = judged(job(8), Faults(slow={Part("link", "n7", "mlx5_0"): 0.23}))
    assert verdict.findings[0].text.startswith("node n7's link mlx5_0 to leaf l1r0 slow: 1")
    assert verdict.findings[0].text.endswith(" of 48.3 GB/s")


def test_links_between_switches_are_no_fault_of_a_node() -> None:
    verdict = judged(job(12), Faults(slow={Part("uplink", "l1r0"): 0.3}))
    assert [finding.parts for finding in verdict.findings] == [(Part("uplink", "l1r0"),)]
    assert verdict.drain == []


@pytest.mark.parametrize("turns", [3, 50])
def test_traffic_of_another_job_is_no_fault(turns: int) -> None:
    verdict = judged(job(16), Faults(busy={"l1r0": turns}))
    assert verdict.findings == ()
    assert bool(verdict.slow_paths) is (turns == 50)


def test_two_nodes_alone_cannot_say_whose_link_it_is() -> None:
    faults = Faults(slow={Part("link", "n1", "mlx5_0"): 0.3})
    alone = judged(job(2), faults)
    assert alone.drain == []
    assert alone.undecided == ((Part("link", "n0", "mlx5_0"), Part("link", "n1", "mlx5_0")),)
    assert judged(job(2), faults, spares(1)).drain == ["n1"]


def spares(count: int, leaf: str = "l0r0") -> list[Member]:
    return [Member(f"s{number}", ("mlx5_0",), (leaf,), (), "h100") for number in range(count)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dead", [False, True])
def test_idle_nodes_tell_two_nodes_apart_and_are_no_better_than_they_are(count: int, *, dead: bool) -> None:
    """Whatever is wrong with them: no good node is drained, and one good of them is enough."""
    named = 0
    for seed in range(150):
        chance = random.Random(f"{count}/{dead}/{seed}")
        bad = [f"n{chance.randrange(2)}", *(one.name for one in spares(count) if chance.random() < 0.3)]
        parts = {Part("link", name, "mlx5_0") for name in bad}
        faults = Faults(dead=parts) if dead else Faults(slow={part: chance.uniform(0.05, 0.6) for part in parts})
        verdict = judged(job(2), faults, spares(count), seed)
        assert set(verdict.drain) <= set(bad)
        if len(bad) <= count:
            assert bad[0] in verdict.drain
            named += 1
        else:
            assert verdict.undecided
    assert 50 < named < 150


def test_idle_nodes_below_another_leaf_switch_will_do() -> None:
    faults = Faults(slow={Part("link", "n1", "mlx5_0"): 0.3})
    assert judged(job(2), faults, spares(2, "l9r0")).drain == ["n1"]


def test_one_node_below_a_leaf_switch_is_told_from_the_switch_by_an_idle_node_there() -> None:
    """Of two nodes below two leaf switches: a link, or a leaf switch's links to others."""
    members = job(2, leaf=1)
    below = [*spares(1, "l0r0"), Member("t0", ("mlx5_0",), ("l1r0",), (), "h100")]
    link, uplinks = Part("link", "n1", "mlx5_0"), (Part("uplink", "l0r0"), Part("uplink", "l1r0"))
    assert judged(members, Faults(slow={link: 0.3})).drain == []
    assert [one.parts for one in judged(members, Faults(slow={link: 0.3}), below).findings] == [(link,)]
    verdict = judged(members, Faults(slow={uplinks[0]: 0.3}), below)
    assert (verdict.findings, verdict.undecided) == ((), (uplinks,))


def test_a_node_that_lies_when_idle_nodes_are_asked_has_no_other_one_drained() -> None:
    asked = 0
    for seed in range(300):
        chance = random.Random(f"liar/{seed}")
        says = {name: chance.choice([48.0, 0.1, None]) for name in ("n0", "n1", "s0", "s1")}  # of its tests with each
        preflight = Preflight(job(2, gpus=0), None, KNOWN)
        answer(preflight, says)
        if preflight.unresolved():
            asked += 1
            preflight.add_partners(spares(2))
            answer(preflight, says)
        assert set(preflight.verdict().drain) <= {"n0"}
    assert asked > 30


def answer(preflight: Preflight, says: dict[str, float | None]) -> None:
    while tests := preflight.next_round():
        others = {test: set(test.nodes()) - {"n0"} or {"n0"} for test in tests}
        preflight.take(Result(test, says[others[test].pop()] if "n0" in test.nodes() else 48.0, 2.4) for test in tests)


def test_a_slow_class_that_is_healthy() -> None:
    members = [
        *job(8),
        *(Member(f"old{n}", ("mlx5_0",), (f"l{n // 4}r0",), ("0", "1"), "old", "old") for n in range(8)),
    ]
    assert judged(members, Faults()).findings == ()


def measured(preflight: Preflight, bad: set[tuple[str, ...]], once: bool) -> Verdict:
    """Tests between `bad` nodes are slow, all of them or each once."""
    left = dict.fromkeys(bad, 1 if once else 99)
    while tests := preflight.next_round():
        results = []
        for test in tests:
            key = test.nodes()
            slow = left.get(key, 0) > 0
            left[key] = left.get(key, 0) - slow
            results.append(Result(test, 10.0 if slow else 48.0, 2.4))
        preflight.take(results)
    return preflight.verdict()


def test_one_bad_measurement_drains_nobody() -> None:
    members = job(4, gpus=0)
    pairs: set[tuple[str, ...]] = {(one.name, other.name) for one in members for other in members}
    assert measured(Preflight(members, None, KNOWN), pairs, True).findings == ()


def test_a_bad_pair_whose_nodes_are_good_with_others_is_a_slow_path() -> None:
    members = job(4, gpus=0)
    verdict = measured(Preflight(members, None, KNOWN), {("n0", "n3")}, False)
    assert verdict.drain == []
    assert verdict.slow_paths == (OneTest("pair", "n0", "n3"),)


def test_without_anything_to_compare_with_nothing_is_judged() -> None:
    verdict = measured(Preflight(job(2, gpus=0)), {("n0", "n1")}, False)
    assert (verdict.findings, verdict.undecided) == ((), ())
    assert verdict.unjudged == verdict.tests > 0


def test_a_least_bandwidth_needs_no_earlier_results() -> None:
    rules = Rules(least=20)
    slow: set[tuple[str, ...]] = {
        (f"n{one}", f"n{other}") for one in range(4) for other in range(4) if 2 in (one, other) and one != other
    }
    verdict = measured(Preflight(job(4, gpus=0), rules), slow, False)
    assert verdict.drain == ["n2"]


def told(members: Sequence[Member], past: Past, liar: str, chance: random.Random) -> Verdict:
    """All are good; one node serves as slowly and says what it likes, by a plan that it keeps to."""
    says = chance.choice(([1e4], [0.1], [1e4, 0.1], [48.0, 0.1], [None, 1e4], [0.1, None, 48.0, 1e4]))
    of_peer = {member.name: chance.choice(says) for member in members}
    serves = {member.name: chance.choice([48.0, 48.0, 5.0, None]) for member in members}
    latency = chance.choice([0.01, 2.4, 1e6])
    preflight = Preflight(members, None, past)
    while tests := preflight.next_round():
        results = []
        for test in tests:
            value = of_peer[test.other or test.node] if test.node == liar else 48.0
            value = serves[test.node] if test.other == liar else value
            results.append(Result(test, value, latency if liar in test.nodes() else 2.4))
        preflight.take(results)
    return preflight.verdict()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13])
def test_a_node_that_lies_has_no_other_one_drained(count: int, known: bool) -> None:
    members = job(count, gpus=0)
    for seed in range(200):
        chance = random.Random(f"{count}/{known}/{seed}")
        liar = chance.choice(members).name
        assert set(told(members, KNOWN if known else {}, liar, chance).drain) <= {liar}


def test_what_one_node_says_however_often_does_not_make_others_look_slow() -> None:
    lies = {name: [(1e4, 2.4, "n0")] * 56 + [(48.0, 2.4, f"n{n}") for n in range(1, 9)] for name in KNOWN}
    assert measured(Preflight(job(4, gpus=0), None, lies), set(), False).findings == ()


@pytest.mark.parametrize("good", [(), ("n0", "n1"), ("n0", "n1", "n2")])
def test_a_fabric_that_is_slow_for_most_drains_nobody(good: tuple[str, ...]) -> None:
    """Other jobs fill it, and the latency does not say so: as a few pairs are good, all others' links look at fault."""
    members = job(8, gpus=0)
    names = [member.name for member in members]
    bad: set[tuple[str, ...]] = {
        (one, other) for one in names for other in names if one != other and not {one, other} <= set(good)
    }
    verdict = measured(Preflight(members, None, KNOWN), bad, False)
    assert verdict.drain == []
    assert verdict.undecided


@pytest.mark.parametrize("dead", [0, 4])
def test_nodes_behind_links_that_others_fill_are_good_also_where_most_paths_are_loaded(dead: int) -> None:
    """Without earlier results: the job's own latencies are those of the load, but for a few."""
    members = job(8, leaf=2, gpus=0)
    for seed in range(50):
        faults = Faults(dead={Part("node", f"n{dead}")}, busy={"l3r0": 8})
        preflight = Preflight(members)
        run_preflight(preflight, SimulatedFabric(members, faults, random.Random(seed)))
        assert preflight.verdict().drain == [f"n{dead}"]


def test_the_same_results_lead_to_the_same_verdict() -> None:
    faults = Faults(slow={Part("nic", "n3", "mlx5_0"): 0.3, Part("clock", "n6", "1"): 0.5})
    assert judged(job(16), faults, seed=3) == judged(job(16), faults, seed=3)


def test_results_that_were_bad_are_not_compared_with_later() -> None:
    preflight = Preflight(job(8, gpus=0), None, KNOWN)
    fabric = SimulatedFabric(job(8, gpus=0), Faults(slow={Part("nic", "n3", "mlx5_0"): 0.1}), random.Random(1))
    run_preflight(preflight, fabric)
    preflight.verdict()
    values = [value for name, found in preflight.good_results().items() if name[1] == "pair" for value, _, _ in found]
    assert values
    assert min(values) > 30


def test_faults_are_named_and_good_nodes_left_alone(full_scale: bool) -> None:
    runs = 10_000 if full_scale else 100
    tally = simulate(runs, seed=2)
    assert tally.injected > runs / 2
    assert tally.injected - tally.named <= tally.injected * 0.001
    assert tally.drained_good == 0
