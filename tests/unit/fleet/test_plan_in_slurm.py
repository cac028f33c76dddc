"""What the fleet takes from Slurm for the plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from policy.checkpoint import NodeCheckpoint
from sluice.fleet.ahead import PlannedStart
from sluice.fleet.slurm import read_view, slurm_node
from sluice.fleet.views import SlurmView
from sluice.slurm import SlurmClient
from sluice.slurm.answers import Node


def job(number: int, **fields: Any) -> Any:
    usual = {
        "id": number, "state": "PENDING", "reason": "Resources", "nodes": "", "node_count": 2, "partition": "p",
        "start_time": 500, "end_time": None, "own_name": str(number), "reservation": "", "comment": "", "account": "",
        "dependency": "", "tres": {"cpu": 4, "gres/gpu": 8}, "cpus": 4,
    }  # fmt: skip
    return SimpleNamespace(**usual | fields)


def reservation(state: str, start: int, *flags: str) -> Any:
    return SimpleNamespace(state=state, start_time=start, nodes="n[1-2]", flags=frozenset(flags))


def view(
    jobs: list[Any],
    planned: dict[int, str] | None = None,
    reservations: tuple[Any, ...] = (),
    wall: float = 100.0,
    flags: frozenset[str] = frozenset(),
) -> SlurmView:
    nodes = [
        SimpleNamespace(name=f"n{number}", state="idle", flags=flags, reason="", address="", features=())
        for number in (1, 3)
    ]
    client = SimpleNamespace(
        nodes=lambda: nodes, jobs=lambda: jobs, reservations=lambda: reservations, planned_nodes=lambda: planned or {}
    )
    return read_view(cast("SlurmClient", client), {"n1", "n2", "n3"}, 100.0, wall, NodeCheckpoint())


def test_backfill_names_the_nodes_of_a_start() -> None:
    assert view([job(7)], {7: "n[1-2]"}).starts == (PlannedStart(500, frozenset({"n1", "n2"})),)


def test_of_a_job_with_a_begin_time_the_number_is_known() -> None:
    assert view([job(7, reason="BeginTime")]).starts == (PlannedStart(500, count=2, partition="p", gpus=8, cpus=4),)


@pytest.mark.parametrize(
    ("dependency", "at"),
    [
        ("afterany:8(unfulfilled)", 700),
        ("afterok:8(unfulfilled),afterany:9_2(unfulfilled)", 900),
        ("afterany:8(unfulfilled),afterany:10(unfulfilled)", None),  # which waits itself
        ("afterany:9_*(unfulfilled)", None),
        ("afterok:8(unfulfilled)?afterok:9_2(unfulfilled)", None),
        ("afternotok:8(unfulfilled)", None),
        ("singleton(unfulfilled)", None),
        ("(null)", None),
        ("", None),
    ],
)
def test_a_job_that_depends_on_running_ones_starts_when_they_end_at_the_latest(dependency: str, at: int | None) -> None:
    running = [job(8, state="RUNNING", end_time=700), job(9, state="RUNNING", end_time=900, own_name="9_2")]
    waits = job(7, reason="Dependency", start_time=None, dependency=dependency, account="physics")
    expected = () if at is None else (PlannedStart(at, frozenset(), 2, "p", 8, 4, "physics"),)
    assert view([waits, *running, job(10, start_time=None)]).starts == expected


def test_nothing_is_asked_for_where_the_plan_may_not_need_it() -> None:
    others = {"reason": "BeginTime", "partition": "p,q"}, {"reason": "BeginTime", "reservation": "r"}
    assert view([job(1), *(job(2, **one) for one in others), job(4, start_time=None)]).starts == ()


def test_a_reservation_has_its_nodes_when_it_begins_and_keeps_them() -> None:
    assert view([], reservations=(reservation("inactive", 900),)).starts == (
        PlannedStart(900, frozenset({"n1", "n2"})),
    )
    assert view([], reservations=(reservation("inactive", 900, "MAINT"),)).starts == ()
    seen = view([], reservations=(reservation("active", 50),))
    assert seen.starts == ()
    assert {name: one.reserved for name, one in seen.nodes.items()} == {"n1": True, "n3": False}


def test_a_running_job_frees_its_nodes_by_its_limit() -> None:
    seen = view([job(7, state="RUNNING", nodes="n[1,3]", end_time=700)])
    assert (seen.jobs[7].ends, seen.starts) == (700, ())


@pytest.mark.parametrize(("state", "want"), [("CONFIGURING", "due"), ("COMPLETING", "off")])
def test_nodes_that_a_job_waits_for_are_not_off_though_a_takeover_lost_that_they_boot(state: str, want: str) -> None:
    seen = view([job(7, state=state, nodes="n1")], flags=frozenset({"powered_down"}))
    assert {name: one.want for name, one in seen.nodes.items()} == {"n1": want, "n3": "off"}


def test_times_are_by_the_fleets_clock_which_may_be_another_one() -> None:
    running = job(8, state="RUNNING", nodes="n[1,3]", start_time=50, end_time=700)
    seen = view([job(7, reason="BeginTime"), running], reservations=(reservation("inactive", 900),), wall=-3500.0)
    assert [one.at for one in seen.starts] == [900 + 3600, 500 + 3600]
    assert seen.jobs[8].ends == 700 + 3600


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ({"cloud", "powered_down"}, "off"),
        ({"cloud", "powered_down", "power_up"}, "due"),
        ({"cloud", "powering_up", "not_responding"}, "up"),
        ({"cloud", "power_up"}, "on"),  # its machine was faster
        ({"cloud", "powering_down"}, "off"),
    ],
)
def test_what_slurm_wants_of_a_node(flags: set[str], want: str) -> None:
    node = SimpleNamespace(state="idle", flags=frozenset(flags), reason="", address="", features=())
    assert slurm_node(cast("Node", node)).want == want


def test_nodes_that_the_fleet_created_are_known_by_their_features() -> None:
    features = ("cloud", "sluice-pool-p5", "sluice-made-12345678")
    node = SimpleNamespace(state="idle", flags=frozenset({"dynamic_norm"}), reason="", address="", features=features)
    seen = slurm_node(cast("Node", node))
    assert (seen.made, seen.pool) == ("sluice-made-12345678", "p5")
    node.flags = frozenset()  # a line of slurm.conf
    assert slurm_node(cast("Node", node)).made == ""
