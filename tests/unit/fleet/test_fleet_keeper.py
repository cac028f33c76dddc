"""The keeper, a step at a time: what one answer of a provider leads to, and what people are told."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date, datetime
from typing import Any

import pytest

from policy.pool_nodes import PoolPolicy, PoolsPolicy, ShapePolicy
from sluice.exchange import fleet
from sluice.fleet import shown
from sluice.fleet.ahead import PlannedStart
from sluice.fleet.driver import Failure, Machine, ProviderError
from sluice.fleet.journal import Memory, parse_journal, render_journal, without_journal
from sluice.fleet.keeper import Keeper
from sluice.fleet.state import SLURM_AGAIN_S
from sluice.fleet.views import (
    POOL_REASON,
    Act,
    Changed,
    JobAct,
    LaunchAct,
    Launched,
    ListAct,
    Listed,
    NodeAct,
    SlurmJob,
    SlurmNode,
    SlurmView,
    TerminateAct,
    Want,
)

POLICY = PoolsPolicy(
    cluster="c",
    pools={
        "p": PoolPolicy(
            driver="d", nodes="n[1-2]", shapes=(ShapePolicy(name="big", price=3.0), ShapePolicy(name="old")),
            zones=("a", "b"), partition="p", gres="gpu:h100:8", give_back_s=30, back_off_s=60,
        )
    },
)  # fmt: skip


class Fleet:
    """A keeper with its three views."""

    def __init__(self) -> None:
        self.saved = render_journal(Memory())
        self.known = PoolsPolicy()
        self.wants: dict[str, Want] = {"n1": "off", "n2": "off"}
        self.jobs: dict[int, SlurmJob] = {}
        self.starts: tuple[PlannedStart, ...] = ()
        self.now = 1000.0
        self.drained: set[str] = set()
        self.keeper = Keeper(self)
        self.keeper.set_policy(POLICY)
        self.lists()

    def load_pools(self) -> PoolsPolicy:
        return self.known

    def save_pools(self, known: PoolsPolicy) -> None:
        self.known = known

    def load(self) -> Memory:
        return parse_journal(self.saved, source="memory")

    def save(self, memory: Memory) -> None:
        self.saved = render_journal(memory)

    def step(self, seconds: float = 0.0) -> list[Act]:
        self.now += seconds
        nodes = {
            name: SlurmNode(want, name in self.drained, POOL_REASON if name in self.drained else "")
            for name, want in self.wants.items()
        }
        self.keeper.see(SlurmView(self.now, nodes, self.jobs, self.starts))
        return self.keeper.step(self.now)

    def lists(self, *machines: Machine) -> None:
        self.keeper.take(Listed("p", self.now, machines), self.now)

    def launches(self, seconds: float = 0.0) -> list[LaunchAct]:
        return [one for one in self.step(seconds) if isinstance(one, LaunchAct)]

    def refuse(self, act: LaunchAct, failure: Failure) -> None:
        self.keeper.take(Launched(act.order.token, None, failure, "words"), self.now)

    def running(self) -> Machine:
        """n1 is there."""
        self.wants["n1"] = "up"
        (act,) = self.launches()
        machine = Machine("m1", act.order.token, "n1")
        self.keeper.take(Launched(act.order.token, machine), self.now)
        self.wants["n1"] = "on"
        self.step(1)
        return machine

    def node(self, name: str = "n1") -> fleet.NodeStatus:
        return next(one for one in self.keeper.status().nodes if one.node == name)


def places(acts: list[LaunchAct]) -> list[str]:
    return [f"{one.order.shape}/{one.order.zone}" for one in acts]


@pytest.mark.parametrize("stage", ["asked", "launched", "registered"])
def test_a_machine_waits_no_longer_than_a_boot_for_a_node_that_slurm_does_not_power_up(stage: str) -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    (act,) = one.launches()
    machine = Machine("m1", act.order.token, "n1")
    if stage != "asked":
        one.keeper.take(Launched(act.order.token, machine), one.now)
    if stage == "registered":
        one.wants["n1"] = "on"
        one.step(1)
    one.wants["n1"], one.jobs = "due", {7: SlurmJob(7, True, frozenset({"n1"}))}
    for seconds in (1.0, 20.0, POLICY.pools["p"].boot_s - 21):
        one.step(seconds)
        assert one.node().stage == stage
    acts = one.step(21)
    assert one.node().stage == "terminating"
    one.keeper.take(Launched(act.order.token, machine), one.now)
    assert TerminateAct("p", "m1", act.order.token) in [*acts, *one.step(5)]


def test_a_launch_is_on_disk_before_it_is_asked_for() -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    (act,) = one.launches()
    assert one.load().launches[act.order.token].stage == "asked"
    again = Keeper(one)
    again.set_policy(POLICY)
    assert [launch.token for launch in again.memory.launches.values()] == [act.order.token]


def test_one_empty_list_ends_nothing_and_is_named() -> None:
    one = Fleet()
    machine = one.running()
    one.lists(machine)
    one.step(100)
    one.lists()
    assert not any(isinstance(act, TerminateAct | NodeAct) for act in one.step())
    assert one.node().stage == "registered"
    one.step(5)
    one.lists(machine)
    assert one.node().difference == "none"


@pytest.mark.parametrize(("others", "enough"), [((), 5), ((Machine("m9", "f" * 32, "n2", ending=True),), 2)])
def test_after_a_lost_journal_no_few_lists_take_a_node_from_its_jobs(others: tuple[Machine, ...], enough: int) -> None:
    one = Fleet()
    one.wants["n1"] = "on"
    one.step(1)
    one.lists(*others)
    one.step(60)
    for _ in range(enough):
        assert not any(isinstance(act, NodeAct) for act in one.step(30))
        one.lists(*others)
    assert [act.change for act in one.step() if isinstance(act, NodeAct)] == ["power_down_force"]


def test_a_machine_that_several_lists_do_not_have_is_gone_and_slurm_is_told() -> None:
    one = Fleet()
    one.lists(one.running())
    for _ in range(4):
        one.step(100)
        one.lists()
        assert one.node().stage == "registered"
    one.step(100)
    one.lists()
    acts = one.step(1)
    assert [act.change for act in acts if isinstance(act, NodeAct)] == ["power_down_force"]
    assert one.node().stage is None


@pytest.mark.parametrize(
    ("failure", "next_places"),
    [("no_capacity", ["big/b"]), ("quota", ["old/a"]), ("refused", ["old/a"]), ("credentials", []), ("throttled", [])],
)
def test_each_refusal_has_its_own_next_place(failure: Failure, next_places: list[str]) -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    (act,) = one.launches()
    assert places([act]) == ["big/a"]
    one.refuse(act, failure)
    assert places(one.launches()) == next_places
    if not next_places:
        assert one.node().difference == failure and one.node().again is not None


def test_an_answer_that_is_lost_is_asked_for_again_with_the_same_token() -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    (act,) = one.launches()
    one.refuse(act, "unknown")
    (again,) = one.launches(30)
    assert again.order == act.order and one.node().difference == "unanswered"


def test_a_job_that_cannot_have_all_its_nodes_gives_them_back_within_the_bound() -> None:
    one = Fleet()
    one.wants = {"n1": "up", "n2": "up"}
    one.jobs = {7: SlurmJob(7, True, frozenset({"n1", "n2"}), name="7")}
    first, second = one.launches()
    one.keeper.take(Launched(first.order.token, Machine("m1", first.order.token, first.order.node)), one.now)
    waiting = [second]
    while waiting:  # until all have refused
        one.refuse(waiting[0], "no_capacity")
        waiting = one.launches()
    assert not any(isinstance(act, NodeAct) for act in one.step(29))
    acts: list[Any] = one.step(2)
    assert ("requeue", "7") in [(act.change, act.name) for act in acts if hasattr(act, "job")]
    assert ("n1", "n2") in [act.nodes for act in acts if isinstance(act, NodeAct)]


def test_what_a_job_waits_for_is_a_sentence() -> None:
    one = Fleet()
    one.wants = {"n1": "up", "n2": "up"}
    first, second = one.launches()
    for act in (first, second):
        one.keeper.take(Launched(act.order.token, Machine(act.order.node, act.order.token, act.order.node)), one.now)
    one.step(1)
    status = one.keeper.status()
    assert fleet.waiting_words(status, ["n1", "n2"], one.now + 39) == [
        "waits for 2 of 2 nodes of pool p: launched 40 s ago"
    ]
    assert status.pools["p"].cost_hour == 6.0
    one.wants["n1"] = "on"
    one.step(94)
    assert fleet.waiting_words(one.keeper.status(), ["n1", "n2"], one.now) == [
        "waits for 1 of 2 nodes of pool p: launched 95 s ago, usually there after 95 s"
    ]


def test_all_differences_have_a_name_and_a_remedy() -> None:
    assert all(what and remedy for what, remedy in fleet.DIFFERENCES.values())
    assert set(fleet.DIFFERENCES) == set(fleet.Difference.__args__)  # type: ignore[attr-defined]


def lost_journal(want: Want) -> tuple[Fleet, Machine]:
    """A fleet without a journal, while n1's machine runs."""
    one = Fleet()
    one.wants["n1"] = want
    one.now += 1
    return one, Machine("m1", "t" * 32, "n1")


def test_no_machine_is_ended_before_slurm_has_said_what_it_wants() -> None:
    one, machine = lost_journal("on")
    one.lists(machine)
    assert not any(isinstance(act, TerminateAct) for act in one.step())
    one.now += 5
    one.lists(machine)
    assert not any(isinstance(act, TerminateAct) for act in one.step())
    assert one.node().stage in ("launched", "registered")


def test_no_machine_is_ended_of_a_node_that_slurm_does_not_know_yet() -> None:
    one, machine = lost_journal("unknown")
    one.step()
    one.now += 5
    one.lists(machine)
    assert not any(isinstance(act, TerminateAct) for act in one.step())


def test_a_machine_that_was_listed_before_slurm_was_seen_is_in_the_history_when_it_is_ended() -> None:
    one, machine = lost_journal("off")
    one.lists(machine)
    one.step()
    acts: list[Act] = []
    for _ in range(3):
        one.now += 5
        one.lists(machine)
        acts += one.step()
    assert any(isinstance(act, TerminateAct) for act in acts)
    assert [event.what for event in one.keeper.status().history] == ["unknown_machine"]


def test_what_could_not_be_written_is_asked_for_again_later_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Fleet()
    one.step()
    save = one.save

    def full(_: Memory) -> None:
        raise OSError(28, "No space left on device")

    one.wants["n1"] = "up"
    monkeypatch.setattr(one, "save", full)
    for _ in range(20):
        with pytest.raises(OSError, match="No space"):
            one.step(20)
    monkeypatch.setattr(one, "save", save)
    (act,) = one.launches(20)
    assert one.load().launches[act.order.token].sent == one.now


def test_a_pool_of_another_name_with_the_same_nodes_stops_nothing() -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    (act,) = one.launches()
    one.keeper.take(Launched(act.order.token, Machine("m1", act.order.token, "n1")), one.now)
    one.keeper.set_policy(PoolsPolicy(cluster="c", pools={"renamed": POLICY.pools["p"]}))
    one.step(1)
    assert one.node().stage == "launched"


def test_a_node_that_slurm_gave_up_while_the_provider_said_nothing_is_free_again() -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    (act,) = one.launches()
    one.refuse(act, "unknown")
    one.wants["n1"] = "down"
    acts = one.step(5)
    for _ in range(4):
        acts += one.step(100)
        one.lists(Machine("other", "o" * 32, "n2", ending=True))
    assert "power_down" in [act.change for act in acts if isinstance(act, NodeAct)]


def test_with_refused_credentials_from_the_start_the_job_is_given_back() -> None:
    one = Fleet()
    one.keeper = Keeper(one)
    one.keeper.set_policy(POLICY)
    one.wants["n1"] = "up"
    one.jobs = {7: SlurmJob(7, True, frozenset({"n1"}), name="7")}
    acts: list[Any] = []
    for _ in range(4):
        one.keeper.take(Listed("p", one.now, None, "credentials", "expired"), one.now)
        acts += one.step(20)
    assert ("requeue", "7") in [(act.change, act.name) for act in acts if hasattr(act, "job")]


def test_slurm_is_told_an_address_until_it_has_it() -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    (act,) = one.launches()
    one.keeper.take(Launched(act.order.token, Machine("m1", act.order.token, "n1", address="10.0.0.5")), one.now)
    told = [change.text for seconds in (1, 20) for change in one.step(seconds) if isinstance(change, NodeAct)]
    assert told == ["10.0.0.5"]  # the first command is still under way
    for change in [act for act in one.step(200) if isinstance(act, NodeAct)]:
        told.append(change.text)
    assert told == ["10.0.0.5", "10.0.0.5"]


@pytest.mark.parametrize("words", [{"node": "n1\nroot"}, {"id": "x" * 300}, {"address": "10.0.0.5 State=DOWN"}])
def test_a_machine_whose_words_are_none_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(ProviderError, match="not a"):
        Machine(**{**dict[str, Any](id="m1", token="t", node="n1"), **words})


def test_launches_failures_and_the_oldest_wait_are_counted_over_restarts() -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    (act,) = one.launches()
    one.refuse(act, "no_capacity")
    (act,) = one.launches(10)
    one.keeper.take(Launched(act.order.token, Machine("m1", act.order.token, "n1")), one.now)
    one.step(50)
    assert one.keeper.status().pools["p"].oldest_wait_since == 1000.0
    one.lists(Machine("m1", act.order.token, "n1", ending=True))
    one.step(1)
    one.keeper = Keeper(one)
    one.keeper.set_policy(POLICY)
    status = one.keeper.status().pools["p"]
    assert (status.launches, status.failures) == (1, {"vanished": 1, "no_capacity": 1})


def test_what_a_machine_costs_is_counted_by_day_from_its_launch_to_its_end() -> None:
    one = Fleet()
    one.now = datetime(2026, 3, 31, 23, 0).timestamp()
    one.lists()
    machine = one.running()
    one.step(2 * 3600)
    days = one.keeper.costs()["p"].days
    assert {day: round(spent.cost) for day, spent in days.items()} == {"2026-03-31": 3, "2026-04-01": 3}
    one.lists(replace(machine, ending=True))
    one.step(7200)
    again = Keeper(one)
    again.set_policy(POLICY)
    assert again.costs()["p"].total(date(2026, 4, 1), date(2026, 4, 30)) == days["2026-04-01"]
    assert again.costs()["p"].gres == {"n1": "gpu:h100:8"}


def test_a_machine_that_is_taken_back_soon_is_left_by_its_jobs_in_order() -> None:
    one = Fleet()
    machine = one.running()
    one.jobs = {
        7: SlurmJob(7, False, frozenset({"n1"}), name="7", saves=True),
        8: SlurmJob(8, False, frozenset({"n1"}), name="8"),
    }
    one.lists(replace(machine, notice="EC2 spot: marked-for-termination"))
    acts: list[Any] = one.step(1)
    assert [(act.nodes, act.change) for act in acts if isinstance(act, NodeAct)] == [(("n1",), "drain")]
    jobs = [(act.name, act.change, act.text) for act in acts if isinstance(act, JobAct)]
    assert jobs == [("7", "signal", "USR1"), ("8", "requeue", "")]
    assert one.node().difference == "notice" and "marked-for-termination" in one.node().text
    assert one.keeper.status().pools["p"].failures == {"notice": 1}
    assert not any(isinstance(act, JobAct) and act.job == 7 for act in one.step(28))
    one.drained = {"n1"}
    assert ("7", "requeue") in [(act.name, act.change) for act in one.step(3) if isinstance(act, JobAct)]
    one.jobs = {}
    acts = one.step(1)
    assert [act.change for act in acts if isinstance(act, NodeAct)] == ["power_down_force"]
    one.wants["n1"] = "off"
    assert [act.machine for act in one.step(1) if isinstance(act, TerminateAct)] == ["m1"]
    one.lists(replace(machine, ending=True))
    assert [act.change for act in one.step(61) if isinstance(act, NodeAct)] == ["undrain"]


def signals(acts: list[Any]) -> list[JobAct]:
    return [act for act in acts if isinstance(act, JobAct) and act.change == "signal"]


def test_a_job_whose_signal_was_not_sent_is_sent_it_again_until_it_was() -> None:
    one = Fleet()
    machine = one.running()
    one.jobs = {7: SlurmJob(7, False, frozenset({"n1"}), name="7", saves=True)}
    one.lists(replace(machine, notice="spot"))
    (act,) = signals(one.step(1))
    one.keeper.take(Changed(act, "slurmctld does not answer"), one.now)
    assert signals(one.step(5)) == []
    assert signals(one.step(6)) == [act]
    one.keeper.take(Changed(act), one.now)
    assert signals(one.step(11)) == []


def test_a_job_that_was_requeued_is_signalled_on_the_next_machine_that_is_taken_back() -> None:
    one = Fleet()
    machine = one.running()
    one.jobs = {7: SlurmJob(7, False, frozenset({"n1"}), name="7", saves=True)}
    one.lists(replace(machine, notice="spot"))
    (act,) = signals(one.step(1))
    one.keeper.take(Changed(act), one.now)
    one.jobs, one.wants["n1"] = {}, "off"
    one.step(1)
    one.lists(replace(machine, ending=True))
    one.step(61)
    one.wants["n1"] = "up"
    (launch,) = one.launches(600)
    other = Machine("m2", launch.order.token, "n1")
    one.keeper.take(Launched(launch.order.token, other), one.now)
    one.wants["n1"] = "on"
    one.step(1)
    one.jobs = {7: SlurmJob(7, False, frozenset({"n1"}), name="7", saves=True)}
    one.lists(replace(other, notice="spot"))
    assert signals(one.step(1)) == [act]


def test_a_machine_that_is_taken_back_while_it_boots_is_replaced_elsewhere() -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    (act,) = one.launches()
    machine = Machine("m1", act.order.token, "n1", notice="spot")
    one.keeper.take(Launched(act.order.token, machine), one.now)
    assert [act.machine for act in one.step(1) if isinstance(act, TerminateAct)] == ["m1"]
    assert one.node().difference == "notice"
    one.lists(replace(machine, ending=True))
    assert places(one.launches(1)) == ["big/b"]


def test_a_node_whose_machine_is_broken_is_set_apart_alone_and_tried_again() -> None:
    one = Fleet()
    one.wants = {"n1": "up", "n2": "up"}
    first, second = one.launches()
    one.refuse(first, "broken")
    one.keeper.take(Launched(second.order.token, Machine("m2", second.order.token, "n2")), one.now)
    one.step(1)
    assert (one.node().difference, one.node("n2").difference) == ("broken", "boots")
    one.wants["n1"] = "off"  # given back
    acts = [act for act in one.step(1) if isinstance(act, NodeAct)]
    assert [(act.nodes, act.change) for act in acts] == [(("n1",), "drain")]
    assert one.node().difference == "broken" and one.keeper.status().pools["p"].closed_for == "none"
    one.wants["n1"] = "up"
    assert places(one.launches(60)) == ["big/a"]


def changes(acts: list[Act]) -> list[tuple[str, tuple[str, ...]]]:
    return [(act.change, act.nodes) for act in acts if isinstance(act, NodeAct)]


def test_a_node_is_asked_for_ahead_of_its_job_by_the_boots_so_far() -> None:
    one = Fleet()
    one.starts = (PlannedStart(2000.0, frozenset({"n1"})),)
    assert changes(one.step(2000 - 611 - one.now)) == []  # nothing is known: a boot may take all of 600 s
    one.keeper.memory.boots["p|big"] = [80.0] * 5
    assert changes(one.step(2000 - 91 - one.now)) == []
    assert changes(one.step(1)) == [("power_up", ("n1",))]
    assert changes(one.step(1)) == [], "it is asked for once"


def test_nothing_is_asked_for_ahead_while_the_pool_can_have_nothing() -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    for _ in range(4):
        (act,) = one.launches()
        one.refuse(act, "no_capacity")
    one.wants["n1"] = "off"
    one.starts = (PlannedStart(one.now + 5, frozenset({"n2"})),)
    assert changes(one.step(1)) == [("drain", ("n1", "n2"))]


def test_an_idle_node_is_let_go_after_its_time_unless_the_plan_needs_it() -> None:
    one = Fleet()
    one.running()
    one.starts = (PlannedStart(one.now + 605, frozenset({"n1"})),)
    assert changes(one.step(600)) == []
    one.starts = ()
    one.jobs = {7: SlurmJob(7, False, frozenset({"n1"}))}
    assert changes(one.step(1)) == []
    one.jobs = {}
    assert changes(one.step(1)) == [], "it had a job a moment ago"
    assert changes(one.step(599)) == []
    assert changes(one.step(1)) == [("power_down", ("n1",))]


def test_nodes_of_a_dynamic_pool_are_created_and_deleted_as_the_policy_has_them() -> None:
    def changes(seconds: float, nodes: dict[str, SlurmNode], jobs: dict[int, SlurmJob]) -> list[NodeAct]:
        one.now += seconds
        one.keeper.see(SlurmView(one.now, nodes, jobs))
        return [act for act in one.keeper.step(one.now) if isinstance(act, NodeAct)]

    one = Fleet()
    pool = POLICY.pools["p"].model_copy(update={"node_conf": "CPUs=4", "made": "sluice-made-2"})
    one.keeper.set_policy(PoolsPolicy(cluster="c", pools={"p": pool}))
    assert changes(0, {}, {}) == [NodeAct(("n1", "n2"), "create", "CPUs=4")]
    of_now, of_before = SlurmNode("off", made="sluice-made-2"), SlurmNode("off", made="sluice-made-1")
    assert changes(20, {"n1": of_now, "n2": of_now, "x": SlurmNode("off")}, {}) == []
    drained = replace(of_before, drained=True, reason="bad fan")
    assert changes(20, {"n1": of_now, "n2": drained}, {}) == [], "it would be back without its drain"
    again = NodeAct(("n2",), "make_again", "CPUs=4")
    assert changes(20, {"n1": of_now, "n2": of_before}, {}) == [again]
    one.keeper.take(Changed(again), one.now)
    ours = replace(drained, reason=f"{POOL_REASON}no capacity")
    assert NodeAct(("n1",), "make_again", "CPUs=4") in changes(20, {"n1": ours, "n2": of_now}, {})
    assert changes(20, {"n1": of_now, "n2": of_now, "n4": drained}, {}) == [NodeAct(("n4",), "delete")]
    used = {7: SlurmJob(7, waits=False, nodes=frozenset({"n3"}))}
    there = {"n1": of_now, "n2": of_now, "n3": replace(of_now, want="on")}
    assert [(act.nodes, act.change) for act in changes(20, there, used)] == [(("n3",), "drain")]  # of a policy before
    assert one.node("n3").difference == "no_pool"
    there["n3"] = replace(there["n3"], drained=True)
    assert changes(20, there, used) == []
    assert [(act.nodes, act.change) for act in changes(20, there, {})] == [(("n3",), "power_down")]
    assert changes(20, {**there, "n3": of_now}, {}) == [NodeAct(("n3",), "delete")]
    one.keeper.take(Changed(NodeAct(("n3",), "delete"), "Node is in a reservation"), one.now)
    assert one.node("n3").text == "Node is in a reservation"


def test_nodes_are_made_again_one_at_a_time_and_not_created_meanwhile() -> None:
    def changes(seconds: float, *nodes: str) -> list[NodeAct]:
        one.now += seconds
        one.keeper.see(SlurmView(one.now, {node: SlurmNode("off", made="sluice-made-1") for node in nodes}, {}))
        return [act for act in one.keeper.step(one.now) if isinstance(act, NodeAct)]

    one = Fleet()
    pool = POLICY.pools["p"].model_copy(update={"node_conf": "CPUs=4", "made": "sluice-made-2"})
    one.keeper.set_policy(PoolsPolicy(cluster="c", pools={"p": pool}))
    first, second = (NodeAct((node,), "make_again", "CPUs=4") for node in ("n1", "n2"))
    assert changes(0, "n1", "n2") == [first]
    assert changes(1, "n2") == [], "it was looked at in between"
    one.keeper.take(Changed(first, "Node is in a reservation"), one.now)
    assert changes(1, "n1", "n2") == [second], "one that Slurm does not delete is in no other's way"
    one.keeper.take(Changed(second, "Invalid node"), one.now)
    assert changes(SLURM_AGAIN_S, "n1") == [NodeAct(("n2",), "create", "CPUs=4"), first]


def test_the_memory_does_not_grow_with_the_machines_that_were() -> None:
    one = Fleet()
    one.step(1)
    one.lists(*(Machine(f"m{number}", str(number), "n9") for number in range(100)))
    assert len([act for act in one.step() if isinstance(act, TerminateAct)]) == 100
    one.step(200)
    assert set(one.keeper._state._last) == {("list", "p")}


def test_a_node_with_a_machine_is_deleted_when_the_provider_has_that_no_more() -> None:
    one = Fleet()
    machine = one.running()
    one.keeper.set_policy(PoolsPolicy(cluster="c", pools={"p": POLICY.pools["p"].model_copy(update={"nodes": "n2"})}))
    nodes = {"n1": SlurmNode("off", made="sluice-made-1"), "n2": SlurmNode("off")}

    def step() -> list[Act]:
        one.now += 20
        one.keeper.see(SlurmView(one.now, nodes))
        return one.keeper.step(one.now)

    assert TerminateAct("p", "m1", machine.token) in step()
    one.lists(replace(machine, ending=True))
    assert NodeAct(("n1",), "delete") in step()


@pytest.mark.parametrize(
    ("want", "expected"),
    [
        ("on", ["drain"]),  # the job runs there
        ("up", ["terminate", "drain", "requeue", "power_down_force"]),  # nobody would launch what it waits for
        ("invalid", ["terminate", "drain", "requeue", "power_down_force"]),  # what has registered is ended
    ],
)
def test_a_node_that_leaves_a_dynamic_pool_keeps_its_machine_while_its_job_runs(
    want: Want, expected: list[str]
) -> None:
    one = Fleet()
    one.running()
    one.keeper.set_policy(PoolsPolicy(cluster="c", pools={"p": POLICY.pools["p"].model_copy(update={"nodes": "n2"})}))
    nodes = {"n1": SlurmNode(want, made="sluice-made-1", pool="p"), "n2": SlurmNode("off")}
    one.now += 20
    one.keeper.see(SlurmView(one.now, nodes, {7: SlurmJob(7, waits=want != "on", nodes=frozenset({"n1"}))}))
    acts = [one for one in one.keeper.step(one.now) if not isinstance(one, ListAct)]
    assert [one.change if isinstance(one, NodeAct | JobAct) else "terminate" for one in acts] == expected
    assert one.node().pool == "p"


@pytest.mark.parametrize("want", ["on", "unknown"])  # the latter as slurmctld begins
def test_no_machine_is_ended_under_a_job_that_comes_while_its_node_leaves_a_dynamic_pool(want: Want) -> None:
    one = Fleet()
    one.running()
    one.keeper.set_policy(PoolsPolicy(cluster="c", pools={"p": POLICY.pools["p"].model_copy(update={"nodes": "n2"})}))

    def ended(seen: SlurmNode, *jobs: SlurmJob) -> bool:
        one.now += 20
        one.keeper.see(SlurmView(one.now, {"n1": seen, "n2": SlurmNode("off")}, {job.id: job for job in jobs}))
        return any(isinstance(act, TerminateAct) for act in one.keeper.step(one.now))

    leaves = SlurmNode(want, made="sluice-made-1", pool="p")
    assert not ended(leaves), "until it is drained, jobs may come"
    leaves = replace(leaves, want="on", drained=True, reason=POOL_REASON)
    assert not ended(leaves, SlurmJob(7, waits=False, nodes=frozenset({"n1"})))
    assert ended(leaves)


def test_a_restart_does_not_begin_the_wait_for_a_node_that_slurm_will_power_up_again() -> None:
    one = Fleet()
    machine = one.running()
    one.wants["n1"] = "due"
    one.step()
    for life in range(6):
        assert not [act for act in one.step(POLICY.pools["p"].boot_s / 6 - 5) if isinstance(act, TerminateAct)], life
        one.keeper = Keeper(one)
        one.keeper.set_policy(POLICY)
        one.lists(machine)
    assert TerminateAct("p", "m1", machine.token) in one.step(40)


def test_from_a_machine_that_is_only_at_risk_no_job_is_taken() -> None:
    one = Fleet()
    machine = one.running()
    one.jobs = {7: SlurmJob(7, waits=False, nodes=frozenset({"n1"}), name="7", saves=True)}
    one.lists(replace(machine, at_risk="may end"))
    assert one.step(1) == [NodeAct(("n1",), "drain", f"{POOL_REASON}may end")]
    one.drained.add("n1")
    assert one.step(30) == [ListAct("p")]
    assert (one.node().difference, one.keeper.status().pools["p"].failures) == ("at_risk", {"at_risk": 1})
    one.wants["n2"] = "up"
    assert places(one.launches()) == ["big/b"]  # the next one, elsewhere
    one.lists(replace(machine, at_risk="may end", notice="ends"))
    assert [act.change for act in one.step(1) if isinstance(act, JobAct)] == ["signal"]
    one.jobs = {}
    assert [(act.nodes, act.change) for act in one.step(1) if isinstance(act, NodeAct)] == [
        (("n1",), "power_down_force")
    ]


def test_a_pool_is_listed_as_often_as_the_policy_says() -> None:
    one = Fleet()
    pool = POLICY.pools["p"].model_copy(update={"list_s": 7})
    one.keeper.set_policy(PoolsPolicy(cluster="c", pools={"p": pool}))
    assert one.step() == [ListAct("p")]
    one.lists()
    assert [one.step(seconds) for seconds in (6, 1)] == [[], [ListAct("p")]]


def test_machines_launched_for_a_start_that_cannot_be_had_whole_are_given_back() -> None:
    one = Fleet()
    one.starts = (PlannedStart(one.now + 60, count=2, partition="p", job=7),)
    assert changes(one.step(1)) == [("power_up", ("n1", "n2"))]
    one.wants = {"n1": "up", "n2": "up"}
    first, second = one.launches()
    one.keeper.take(Launched(first.order.token, Machine("m1", first.order.token, "n1")), one.now)
    one.wants["n1"] = "on"
    one.step(1)
    for _ in range(4):  # in all zones of all shapes
        one.refuse(second, "no_capacity")
        (second,) = one.launches() or [second]
    assert one.keeper.status().ahead[0].outlook == "no_room"
    assert fleet.ahead_words(one.keeper.status(), 7, one.now) == [
        "may start in 58 s; its 2 nodes of pool p cannot all be had by then: none is asked for ahead of it"
    ]
    assert ("power_down", ("n1",)) not in changes(one.step(29))
    found = changes(one.step(2))
    assert ("power_down", ("n1",)) in found and ("power_down_force", ("n2",)) in found


def test_a_machine_that_a_job_had_stays_for_as_long_as_any_idle_one() -> None:
    one = Fleet()
    one.running()
    one.jobs = {6: SlurmJob(6, False, frozenset({"n1"}))}
    one.step(1)
    one.jobs = {}
    one.starts = (PlannedStart(one.now + 60, count=3, partition="p", job=7),)
    one.step(1)
    assert changes(one.step(100)) == []
    assert one.keeper.status().ahead[0].outlook == "no_room"


def test_a_gang_of_two_pools_is_asked_for_in_both_or_in_none() -> None:
    one = Fleet()
    other = POLICY.pools["p"].model_copy(update={"nodes": "q1", "partition": "q"})
    one.keeper.set_policy(PoolsPolicy(cluster="c", pools={**POLICY.pools, "q": other}))
    here = PlannedStart(one.now + 60, count=1, partition="p", job=7, gang="g", after="6")
    there = replace(here, partition="q", job=8)
    one.starts = (here, replace(here, job=9), there, replace(there, job=10))
    one.wants["q1"] = "off"
    assert changes(one.step(1)) == []
    assert [place.outlook for place in one.keeper.status().ahead] == ["no_room"] * 4
    one.starts = (here, there)
    assert changes(one.step(1)) == [("power_up", ("n1",)), ("power_up", ("q1",))]
    assert fleet.ahead_words(one.keeper.status(), 8, one.now) == [
        "may start in 58 s after 6; the nodes of its gang of pool q are there, or asked for ahead of it"
    ]


def lost(one: Fleet, *, known: PoolsPolicy | None = None) -> None:
    """A process that finds no journal."""
    memory = without_journal(one.known if known is None else known)
    one.saved = render_journal(memory)
    one.keeper = Keeper(one)
    one.keeper.set_policy(POLICY)


def test_without_a_journal_nothing_is_launched_before_lists_have_what_there_was() -> None:
    one = Fleet()
    one.wants = {"n1": "up", "n2": "up"}
    assert len(one.launches()) == 2
    lost(one)
    assert one.launches() == [] and one.node().difference == "searched"
    late = Machine("m1", "first", "n1")
    for seconds in (59.0, 2.0):
        one.step(seconds)
        one.lists(late)
        assert one.launches() == []
    one.step(2)
    one.lists(late)
    assert [act.order.node for act in one.launches()] == ["n2"]
    assert one.node().stage == "launched" and one.node().machine == "m1"


def test_a_search_begins_again_with_the_process_whose_clock_may_have_jumped() -> None:
    one = Fleet()
    one.wants = {"n1": "up", "n2": "up"}
    assert len(one.launches()) == 2
    lost(one)
    one.step()
    one.keeper = Keeper(one)
    one.keeper.set_policy(POLICY)
    one.now += 10_000
    for _ in range(6):
        one.step(2)
        one.lists(Machine("m2", "second", "n2"))
    assert one.launches() == [] and one.node().difference == "searched"


def test_without_a_journal_empty_lists_end_nothing_until_there_are_five() -> None:
    one = Fleet()
    machine = one.running()
    one.jobs = {7: SlurmJob(7, False, frozenset({"n1"}))}
    lost(one)
    acts: list[Any] = []
    for _ in range(4):
        acts += one.step(61)
        one.lists()
    assert not any(isinstance(act, TerminateAct) for act in acts) and changes(acts) == []
    one.step(1)
    one.lists(machine)
    one.step(1)
    assert one.node().stage == "registered" and one.node().machine == "m1"


def test_the_first_process_of_a_site_waits_for_one_list_unless_that_has_machines() -> None:
    one = Fleet()
    lost(one, known=PoolsPolicy())
    one.step()
    one.wants["n1"] = "up"
    assert one.launches() == []
    one.lists()
    assert len(one.launches(1)) == 1
    one.wants = {"n1": "off", "n2": "off"}
    lost(one, known=PoolsPolicy())
    one.step()
    one.lists(Machine("m1", "first", "n1"))
    one.wants["n2"] = "up"
    assert one.launches(1) == [], "its folder was lost"


def test_a_process_that_finds_no_files_and_nodes_that_slurm_wants_looks_for_machines_first() -> None:
    one = Fleet()
    one.wants["n1"] = "up"
    lost(one, known=PoolsPolicy())
    one.step()
    for _ in range(6):
        one.lists()
        assert one.launches(1) == []
    for _ in range(5):
        one.step(61)
        one.lists()
    assert len(one.launches(1)) == 1


def test_a_pool_that_left_the_policy_is_asked_until_five_lists_have_no_machine_of_it() -> None:
    one = Fleet()
    one.running()
    one.keeper.set_policy(PoolsPolicy(cluster="c"))
    one.saved = render_journal(without_journal(one.known))
    again = one.keeper = Keeper(one)
    again.set_policy(PoolsPolicy(cluster="c"))
    assert again.cluster == "c" and list(again.pools()) == ["p"]
    one.wants = {}
    one.step(1)
    assert again.status().pools["p"].problem == (
        "pool not in the policy any more, asked for machines until there is none"
    )
    one.lists(Machine("m1", "token", "n1"))
    assert [act.machine for act in one.step(1) if isinstance(act, TerminateAct)] == ["m1"]
    for number in range(6):  # of two the search is over
        assert any(isinstance(act, ListAct) for act in one.step(61)), number
        one.lists(Machine("m1", "token", "n1", ending=True))
    assert again.pools() == {} and one.step(61) == [] and one.known.pools == {}
    one.lists(Machine("m1", "token", "n1"))
    assert one.step(61) == [], "an answer that comes late"


def test_a_machine_of_a_created_node_that_has_left_is_taken_over_while_jobs_run_there() -> None:
    one = Fleet()
    machine = one.running()
    one.keeper.set_policy(PoolsPolicy(cluster="c"))
    one.saved = render_journal(without_journal(one.known))
    one.keeper = Keeper(one)
    one.keeper.set_policy(PoolsPolicy(cluster="c"))
    seen = {"n1": SlurmNode("on", made="sluice-made-1", pool="p")}
    one.keeper.see(SlurmView(one.now, seen, {7: SlurmJob(7, False, frozenset({"n1"}))}))
    one.keeper.step(one.now)
    one.lists(machine)
    assert not any(isinstance(act, TerminateAct) for act in one.keeper.step(one.now))
    assert [launch.machine for launch in one.keeper.memory.launches.values()] == ["m1"]


def test_a_start_that_is_put_off_again_and_again_has_nodes_for_no_longer_than_they_may_be_idle() -> None:
    one = Fleet()
    asked = []
    for _ in range(30):
        one.starts = (PlannedStart(one.now + 120, count=1, partition="p", job=7),)
        asked += changes(one.step(60))
    assert one.now > 1000 + 2 * POLICY.pools["p"].idle_s
    assert len(asked) <= (120 + POLICY.pools["p"].idle_s) / 60 + 1 and changes(one.step(60)) == []
    one.starts = (PlannedStart(one.now + 3600, count=1, partition="p", job=7),)
    one.step(1)
    one.starts = (PlannedStart(one.now + 120, count=1, partition="p", job=7),)
    assert changes(one.step(60)) == [("power_up", ("n1",))]


def test_many_starts_of_one_account_hide_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "_MOST_AHEAD", 3)
    one = Fleet()
    many = PlannedStart(one.now + 60, count=1, partition="p", account="many")
    tasks = [replace(many, job=1, gang="ring")] * 3
    others = [replace(many, at=one.now + 60 + number, job=number) for number in range(2, 6)]
    one.starts = (*tasks, *others, replace(many, at=one.now + 900, job=9, account="few"))
    one.step()
    assert [start.job for start in one.keeper.status().ahead] == [1, 9, 2]


def test_machines_of_the_settings_before_are_listed_and_ended_by_their_driver() -> None:
    one = Fleet()
    machine = one.running()
    moved = POLICY.pools["p"].model_copy(update={"settings": {"region": "other"}})
    one.keeper.set_policy(PoolsPolicy(cluster="c", pools={"p": moved}))
    (former,) = set(one.keeper.pools()) - {"p"}
    assert one.keeper.pools()[former].settings == {} and list(one.known.pools) == ["p"]
    one.lists(replace(machine, id="m2", token="other"))
    assert not any(isinstance(act, TerminateAct) for act in one.step(1)), "that list was asked of the former driver"
    assert sorted(one.known.pools) == ["p", former], "on disk before it may be needed"
    for _ in range(6):  # the new place has none
        one.step(61)
        one.lists()
    assert one.node().stage == "registered" and one.node().pool == "p"
    counted = {name: (pool.on, pool.cost_hour) for name, pool in one.keeper.status().pools.items()}
    assert counted == {"p": (0, 0.0), former: (1, 3.0)}
    one.wants["n1"] = "off"
    assert [(act.pool, act.machine) for act in one.step(1) if isinstance(act, TerminateAct)] == [(former, "m1")]
    for _ in range(7):
        one.step(61)
        one.keeper.take(Listed(former, one.now, (replace(machine, ending=True),)), one.now)
    assert list(one.keeper.pools()) == ["p"] and one.node().stage is None
    assert list(one.keeper.costs()) == ["p"]


def test_a_machine_that_both_settings_list_is_neither_unknown_nor_keeps_the_former_ones() -> None:
    one = Fleet()
    moved = POLICY.pools["p"].model_copy(update={"settings": {"image": "newer"}})
    one.keeper.set_policy(PoolsPolicy(cluster="c", pools={"p": moved}))
    (former,) = set(one.keeper.pools()) - {"p"}
    one.step(2)
    one.lists()
    machine = one.running()
    for _ in range(7):
        acts = one.step(61)
        one.lists(machine)
        one.keeper.take(Listed(former, one.now, (replace(machine, notice="spot"),)), one.now)
        assert not any(isinstance(act, TerminateAct) for act in acts)
    assert list(one.keeper.pools()) == ["p"] and one.node().difference == "notice"


@pytest.mark.parametrize(
    ("shape", "price", "words"),
    [
        ("big", 3.0, ""),
        ("", None, "its price is not known: the policy has no shape ''"),
        ("huge", None, "its price is not known: the policy has no shape 'huge'"),
    ],
)
def test_a_machine_that_is_taken_over_has_the_price_of_its_shape(shape: str, price: float | None, words: str) -> None:
    one, machine = lost_journal("on")
    one.step()
    one.lists(replace(machine, shape=shape))
    one.step()
    one.step(3600)
    spent = next(iter(one.keeper.costs()["p"].days.values()))
    assert [event.text for event in one.keeper.memory.history if event.what == "taken over"] == [words]
    memory = one.keeper.memory
    assert memory.launches[machine.token].known_price == price
    written = json.loads(render_journal(memory))["launches"][machine.token]["price"]
    assert written == (price or 0.0)  # a number: older fleetds take no journal with anything else
    assert parse_journal(render_journal(memory), source="journal").launches == memory.launches
    assert (spent.cost, spent.unpriced_s) == ((0.0, 3600.0) if price is None else (3600 / 3600 * price, 0.0))
    pool = one.keeper.status().pools["p"]
    assert pool.cost_hour == (price or 0.0) and ("cost_hour is without n1" in pool.problem) is (price is None)


def test_where_all_shapes_cost_the_same_a_machine_of_an_unknown_one_has_their_price() -> None:
    one, machine = lost_journal("on")
    pool = POLICY.pools["p"].model_copy(update={"shapes": tuple(ShapePolicy(name=name, price=2.0) for name in "ab")})
    one.keeper.set_policy(POLICY.model_copy(update={"pools": {"p": pool}}))
    one.step()
    one.lists(machine)
    one.step()
    assert one.keeper.memory.launches[machine.token].price == 2.0
