"""Which nodes are asked for ahead of the plan, and which idle ones are let go."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sluice.fleet import ahead
from sluice.fleet.ahead import MARGIN_S, Decision, PlannedStart, PoolNode, PoolTimes, decide, predicted_boot

NOW = 1000.0
BOOT_S = 90.0
LAST = NOW + BOOT_S + MARGIN_S  # a start at this time is the latest for which something is done now
TIMES = PoolTimes(idle_s=300)


def off(name: str) -> PoolNode:
    return PoolNode(name, "off")


def idle(name: str, seconds: float = 400, **more: Any) -> PoolNode:
    return PoolNode(name, "on", NOW - seconds, **more)


def busy(name: str, ends: float) -> PoolNode:
    return PoolNode(name, "on", None, ends)


def decided(nodes: list[PoolNode], *starts: PlannedStart, **times: Any) -> Decision:
    decision = decide(NOW, nodes, starts, dataclasses.replace(TIMES, **times), BOOT_S)
    return dataclasses.replace(decision, foreseen=())


def outlooks(nodes: list[PoolNode], *starts: PlannedStart, torn: tuple[str, ...] = (), **times: Any) -> list[str]:
    decision = decide(NOW, nodes, starts, dataclasses.replace(TIMES, **times), BOOT_S, torn)
    return [one.outlook for one in decision.foreseen]


@pytest.mark.parametrize(
    ("boots", "expected"),
    [
        ([], 600.0),
        ([80.0] * 4, 600.0),
        ([80.0] * 5, 80.0),
        ([80.0] * 9 + [900.0], 80.0),  # one bad boot of ten says nothing
        ([80.0] * 8 + [900.0] * 2, 900.0),
    ],
)
def test_the_predicted_boot_is_what_nine_of_ten_keep_to(boots: list[float], expected: float) -> None:
    assert predicted_boot(boots, 600.0) == expected


def test_the_nodes_of_a_planned_start_are_asked_for_a_boot_before_it() -> None:
    nodes = [off("n1"), off("n2"), idle("n3", 0)]
    start = PlannedStart(LAST, frozenset({"n1", "n3"}))
    assert decided(nodes, start) == Decision(ask=("n1",))
    assert decided(nodes, dataclasses.replace(start, at=LAST + 1)) == Decision()


def test_no_more_is_asked_for_than_a_start_lacks() -> None:
    boots = PoolNode("n4", "boots")
    nodes = [idle("n1", 0), busy("n2", LAST), busy("n3", LAST + 1), boots, off("n5"), off("n6")]
    assert decided(nodes, PlannedStart(LAST, count=3)) == Decision()
    assert decided(nodes, PlannedStart(LAST, count=4)) == Decision(ask=("n5",))
    assert decided(nodes, PlannedStart(LAST, count=5)) == Decision(ask=("n5", "n6"))


def test_all_nodes_of_a_start_are_asked_for_or_none() -> None:
    nodes = [idle("n1", 0), busy("n2", LAST + 1), off("n3"), off("n4"), PoolNode("n5", "other")]
    assert decided(nodes, PlannedStart(LAST, count=3)).ask == ("n3", "n4")
    assert decided(nodes, PlannedStart(LAST, count=4)) == Decision()
    assert decided(nodes, PlannedStart(LAST, count=4), PlannedStart(LAST, count=2)).ask == ("n3",)
    assert decided(nodes, PlannedStart(LAST, frozenset({"n3", "n5"}))) == Decision()
    assert outlooks(nodes, PlannedStart(LAST, count=4), PlannedStart(LAST + 1, count=1)) == ["no_room", "later"]


def test_a_gang_is_asked_for_whole_or_not_at_all() -> None:
    member = PlannedStart(LAST, count=1, gpus=8, gang="g", account="physics")
    nodes = [idle("n1", 0), off("n2"), off("n3")]
    assert decided(nodes, *[member] * 3, gpus=8).ask == ("n2", "n3")
    assert decided(nodes, *[member] * 4, gpus=8) == Decision()
    assert decided(nodes, *[member] * 3, gpus=8, ahead=2) == Decision()
    assert outlooks(nodes, *[member] * 3, gpus=8, ahead=2) == ["bound"] * 3
    assert outlooks(nodes, *[member] * 2, torn=("g",)) == ["no_room"] * 2
    assert decided(nodes, *[dataclasses.replace(member, gpus=4)] * 4, gpus=8).ask == ("n2",), "two of them share a node"


def test_what_was_launched_for_a_start_that_not_all_nodes_can_be_had_of_is_partial() -> None:
    nodes = [
        idle("n1", 5, unused=True), PoolNode("n2", "boots", unused=True), idle("n3", 5), PoolNode("n4", "other"),
        idle("n5", 5, unused=True, stays=True), PoolNode("n6", "boots", ends=LAST, unused=True),
    ]  # fmt: skip
    start = PlannedStart(LAST, count=6)
    assert decided(nodes, start) == Decision(partial=("n1", "n2"))
    assert decided(nodes, start, least=4).partial == ("n1",)
    assert decided(nodes, start, PlannedStart(LAST, frozenset({"n1"}))).partial == ("n2",)
    assert decided(nodes, dataclasses.replace(start, count=4)).partial == ()
    assert decided(nodes, dataclasses.replace(start, at=LAST + 1)).partial == ()


def test_the_nodes_of_a_start_serve_those_that_come_when_it_is_over() -> None:
    nodes = [off("n1"), off("n2"), off("n3"), off("n4")]
    first = PlannedStart(NOW, count=2, until=NOW + 50, account="physics")
    then = PlannedStart(NOW + 50, count=2, account="physics")
    assert decided(nodes, first, then).ask == ("n1", "n2")
    assert decided(nodes, first, dataclasses.replace(then, at=NOW + 49)).ask == ("n1", "n2", "n3", "n4")
    assert decided(nodes, first, dataclasses.replace(then, count=3)).ask == ("n1", "n2", "n3")
    assert decided(nodes, first, then, ahead=2).ask == ("n1", "n2")
    overdue = dataclasses.replace(first, at=NOW - 60, until=NOW - 10)  # it is not over: it has not begun
    assert decided(nodes, overdue, dataclasses.replace(then, at=NOW + 49)).ask == ("n1", "n2", "n3", "n4")


def test_jobs_of_parts_of_a_node_share_it() -> None:
    nodes = [idle("n1", 0), off("n2"), off("n3"), off("n4")]
    part = PlannedStart(LAST, count=1, gpus=2, cpus=4)
    whole = {"gpus": 8, "cpus": 64}
    assert decided(nodes, *[part] * 4, **whole) == Decision()
    assert decided(nodes, *[part] * 5, **whole) == Decision(ask=("n2",))
    assert decided(nodes, *[dataclasses.replace(part, cpus=32)] * 4, **whole) == Decision(ask=("n2",))
    spread = PlannedStart(LAST, count=3, gpus=3, cpus=3)
    assert decided(nodes, part, spread, **whole) == Decision(ask=("n2", "n3")), "three nodes, and the other job's GPUs"
    assert decided(nodes, *[PlannedStart(LAST, count=2, gpus=16, cpus=8)] * 2, **whole).ask == ("n2", "n3", "n4")


def test_jobs_of_parts_of_a_node_go_where_jobs_leave_room() -> None:
    whole = {"gpus": 8, "cpus": 64}
    nodes = [dataclasses.replace(busy(f"n{n}", LAST + 1), room=n / 8) for n in (2, 5)] + [off("n6"), off("n7")]
    part = PlannedStart(LAST, count=1, gpus=2, cpus=4, account="physics")
    assert decided(nodes, *[part] * 3, **whole) == Decision(), "one on n2, two on n5"
    assert decided(nodes, *[part] * 4, **whole).ask == ("n6",)
    assert decided(nodes, dataclasses.replace(part, gpus=5), *[part] * 2, **whole).ask == ("n6",)
    assert decided(nodes, dataclasses.replace(part, count=2, gpus=4), **whole).ask == ("n6", "n7"), "of two nodes"
    assert decided(nodes, *[part] * 5, ahead=1, **whole).ask == ("n6",)
    reserved = [dataclasses.replace(node, stays=True) for node in nodes]
    assert decided(reserved, part, **whole).ask == ("n6",)
    gang = dataclasses.replace(part, gang="g", gpus=5)
    assert outlooks(nodes[:2], gang, gang, dataclasses.replace(part, gpus=5), **whole) == ["no_room"] * 2 + ["asked"]


def test_one_account_has_no_more_nodes_asked_for_ahead_than_the_policy_allows() -> None:
    nodes = [off(f"n{number}") for number in range(1, 10)]
    mine = PlannedStart(LAST, count=3, gpus=24, account="physics")
    other = dataclasses.replace(mine, account="biology")
    assert decided(nodes, mine, gpus=8, ahead=2) == Decision(), "all nodes of a job or none"
    assert decided(nodes, mine, mine, gpus=8, ahead=5).ask == ("n1", "n2", "n3")
    assert decided(nodes, mine, other, gpus=8, ahead=3).ask == ("n1", "n2", "n3", "n4", "n5", "n6")
    assert decided(nodes, mine, gpus=8, ahead=0) == Decision()
    assert decided([*nodes, idle("x")], mine, mine, gpus=8, ahead=0).let_go == ("x",)
    part = PlannedStart(LAST, count=1, gpus=2, account="physics")
    assert decided(nodes, *[part] * 4, gpus=8, ahead=1).ask == ("n1",)
    assert decided(nodes, *[part] * 9, gpus=8, ahead=1).ask == ("n1",)
    spread = PlannedStart(LAST, count=5, gpus=5, account="physics")  # five nodes, of each one GPU
    assert decided(nodes, spread, gpus=8, ahead=4) == Decision()
    assert decided(nodes, spread, part, gpus=8, ahead=5).ask == ("n1", "n2", "n3", "n4", "n5")
    chosen = PlannedStart(LAST, frozenset({"n7"}))
    assert decided(nodes, chosen, part, gpus=8, ahead=1).ask == ("n7", "n1"), "what Slurm has planned is not bounded"


def test_two_starts_do_not_count_on_the_same_node() -> None:
    nodes = [idle("n1"), off("n2"), off("n3")]
    assert decided(nodes, PlannedStart(NOW, count=1), PlannedStart(LAST, count=1)) == Decision(ask=("n2",))
    named = PlannedStart(LAST, frozenset({"n1"}))
    assert decided(nodes, named, PlannedStart(LAST, count=1)) == Decision(ask=("n2",))


def test_jobs_that_no_node_is_left_for_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    serves = ahead._serves

    def counted(node: PoolNode, at: float) -> bool:
        looked_at.append(node.name)
        return serves(node, at)

    monkeypatch.setattr(ahead, "_serves", counted)
    nodes = [busy(f"n{number}", LAST + 1) for number in range(50)]
    assert decided([*nodes, off("x")], *[PlannedStart(LAST, count=1)] * 1000) == Decision(ask=("x",))
    assert len(looked_at) < 200


def test_what_boots_for_a_job_serves_no_other_start() -> None:
    nodes = [PoolNode("n1", "boots", ends=LAST + 1), off("n2")]
    assert decided(nodes, PlannedStart(LAST, count=1)) == Decision(ask=("n2",))


def test_a_node_that_cannot_be_had_is_not_asked_for() -> None:
    nodes = [PoolNode("n1", "other"), off("n2")]
    assert decided(nodes, PlannedStart(NOW, frozenset({"n1"}))) == Decision()


def test_spare_nodes_are_kept_and_asked_for_besides_what_the_plan_needs() -> None:
    nodes = [idle("n1"), idle("n2"), busy("n3", NOW + 1), off("n4"), off("n5")]
    assert decided(nodes, spare=1) == Decision(let_go=("n2",))
    assert decided(nodes, PlannedStart(LAST, frozenset({"n1", "n2"})), spare=1) == Decision(ask=("n4",))
    assert decided(nodes, spare=3) == Decision(ask=("n4",))


def test_an_idle_node_goes_after_its_time() -> None:
    assert decided([idle("n1", 299), idle("n2", 300), busy("n3", NOW)]) == Decision(let_go=("n2",))


def test_a_node_that_the_plan_needs_within_its_boot_stays() -> None:
    nodes = [idle("n1"), idle("n2")]
    assert decided(nodes, PlannedStart(LAST, frozenset({"n2"}))).let_go == ("n1",)
    assert decided(nodes, PlannedStart(LAST + 1, frozenset({"n2"}))).let_go == ("n2", "n1")
    assert decided(nodes, PlannedStart(LAST, count=2)).let_go == ()


def test_a_start_that_does_not_come_keeps_no_node_for_longer_than_idle() -> None:
    nodes = [idle("n1"), off("n2")]
    stale = PlannedStart(NOW - TIMES.idle_s - 1, frozenset({"n1", "n2"}))
    assert decided(nodes, stale) == Decision(let_go=("n1",))
    assert decided(nodes, dataclasses.replace(stale, at=NOW - TIMES.idle_s)) == Decision(ask=("n2",))


def test_one_with_a_reservation_or_a_question_stays() -> None:
    assert decided([idle("n1", stays=True), idle("n2")]).let_go == ("n2",)


def test_least_stays_and_those_that_boot_count() -> None:
    nodes = [idle("n1"), idle("n2"), idle("n3")]
    assert decided(nodes, least=2).let_go == ("n3",)
    assert decided([*nodes, PoolNode("n4", "boots")], least=2).let_go == ("n3", "n2")
    assert decided(nodes, least=4).let_go == ()


def test_the_dearest_go_first_and_then_those_that_are_alone_in_their_zone() -> None:
    nodes = [
        idle("n1", price=3, zone="a"), idle("n2", price=5, zone="b"), idle("n3", price=3, zone="b"),
        idle("n4", price=3, zone="c"), busy("n5", LAST + 1), idle("n6", price=3, zone="b"),
    ]  # fmt: skip
    assert decided(nodes, least=5).let_go == ("n2",)
    assert decided(nodes, least=3).let_go == ("n2", "n4", "n1")
    assert decided(nodes, PlannedStart(NOW, count=1)).let_go == ("n2", "n4", "n1", "n6"), "the cheapest serves the plan"
