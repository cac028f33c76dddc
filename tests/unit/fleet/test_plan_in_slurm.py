"""What the fleet takes from Slurm for the plan."""

from __future__ import annotations

import itertools
import math
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from policy.checkpoint import NodeCheckpoint
from sluice.fleet.ahead import PlannedStart
from sluice.fleet.slurm import read_view, slurm_node
from sluice.fleet.starts import MOST_DEPENDENCIES, RunTimes
from sluice.fleet.views import SlurmView
from sluice.slurm import SlurmClient
from sluice.slurm.answers import Node


def job(number: int, **fields: Any) -> Any:
    usual = {
        "id": number, "state": "PENDING", "reason": "Resources", "nodes": "", "node_count": 2, "partition": "p",
        "start_time": 500, "end_time": None, "own_name": str(number), "reservation": "", "comment": "", "account": "",
        "dependency": "", "tres": {"cpu": 4, "gres/gpu": 8}, "cpus": 4, "uid": 1000, "name": f"job-{number}",
        "time_limit_s": 600, "array_id": None, "array_tasks": "",
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
    run_times: RunTimes | None = None,
) -> SlurmView:
    nodes = [
        SimpleNamespace(
            name=f"n{number}", state="idle", flags=flags, reason="", address="", features=(), tres={}, tres_allocated={}
        )
        for number in (1, 3)
    ]
    client = SimpleNamespace(
        nodes=lambda: nodes, jobs=lambda: jobs, reservations=lambda: reservations, planned_nodes=lambda: planned or {}
    )
    checkpoint = NodeCheckpoint()
    return read_view(cast("SlurmClient", client), {"n1", "n2", "n3"}, 100.0, wall, checkpoint, run_times or RunTimes())


def test_backfill_names_the_nodes_of_a_start() -> None:
    (start,) = view([job(7, account="a")], {7: "n[1-2]"}).starts
    assert start == PlannedStart(500, frozenset({"n1", "n2"}), account="a", until=1100, job=7)


def counted(at: float, number: int, **more: Any) -> PlannedStart:
    """The start of a job as `job` has it."""
    usual: dict[str, Any] = {"count": 2, "partition": "p", "gpus": 8, "cpus": 4, "until": at + 600, "job": number}
    return PlannedStart(at, **usual | more)


def test_of_a_job_with_a_begin_time_the_number_is_known() -> None:
    assert view([job(7, reason="BeginTime")]).starts == (counted(500, 7),)


def running(number: int, end: int, **more: Any) -> Any:
    return job(number, state="RUNNING", start_time=50, end_time=end, **{"time_limit_s": end - 50} | more)


def depends(number: int, dependency: str, **more: Any) -> Any:
    return job(number, reason="Dependency", start_time=None, dependency=dependency, **more)


@pytest.mark.parametrize(
    ("dependency", "at", "after"),
    [
        ("afterany:8(unfulfilled)", 700, "8"),
        ("afterok:8(unfulfilled),afterany:9_2(unfulfilled)", 900, "8, 9_2"),
        ("afterok:9_*(unfulfilled)", 950, "9_*"),
        ("afterany:8(unfulfilled),afterany:10(unfulfilled)", None, ""),  # of which nothing is known
        ("afterany:77(unfulfilled)", None, ""),
        ("afterok:8(unfulfilled)?afterok:9_2(unfulfilled)", None, ""),
        ("afternotok:8(unfulfilled)", None, ""),
        ("after:8+5(unfulfilled)", None, ""),
        (",".join(["afterok:8(unfulfilled)"] * (MOST_DEPENDENCIES + 1)), None, ""),
        ("(null)", None, ""),
        ("", None, ""),
    ],
)
def test_a_job_that_depends_on_others_starts_when_they_end(dependency: str, at: int | None, after: str) -> None:
    others = [
        running(8, 700), running(9, 900, own_name="9_2", array_id=9, array_tasks="2"),
        running(12, 950, own_name="9_3", array_id=9, array_tasks="3"), job(10, start_time=None),
    ]  # fmt: skip
    waits = depends(7, dependency, account="physics")
    expected = () if at is None else (counted(at, 7, account="physics", after=after),)
    assert view([waits, *others]).starts == expected


def test_a_chain_is_foreseen_by_limits_from_what_runs_or_is_planned_on() -> None:
    then, last = depends(8, "afterok:7(unfulfilled)"), depends(9, "afterany:8(unfulfilled)", time_limit_s=None)
    starts = counted(700, 8, after="7"), counted(1300, 9, after="8", until=math.inf)
    assert view([last, then, running(7, 700)]).starts == starts[::-1]
    assert (
        view([job(7, start_time=100), then, last]).starts == starts
    ), "which waits for room, and has an expected start"
    assert view([job(7, reason="BeginTime", start_time=100), then, last]).starts == (counted(100, 7), *starts)
    assert view([job(7, state="CONFIGURING", end_time=700, start_time=100), then, last]).starts == starts
    endless = job(7, state="RUNNING", start_time=50, time_limit_s=-1)
    assert view([endless, then, last]).starts == ()
    assert view([job(7, reason="JobHeldUser"), then, last]).starts == ()


def test_one_of_a_name_at_a_time() -> None:
    words: dict[str, Any] = {"name": "nightly", "dependency": "singleton(unfulfilled)"}
    first, then = depends(8, **words), depends(9, **words)
    found = view([then, first, running(7, 700, name="nightly"), running(6, 900, name="nightly", uid=1)]).starts
    assert found == (counted(1300, 9, after="singleton"), counted(700, 8, after="singleton"))
    assert view([first, then]).starts[0].at == 100, "as slurmctld is about to see"


def test_of_a_name_that_thousands_have_the_starts_are_found_in_seconds() -> None:
    words: dict[str, Any] = {"name": "nightly", "dependency": "singleton(unfulfilled)", "time_limit_s": 60}
    jobs = [running(1, 700, name="nightly"), *(depends(number, **words) for number in range(2, 20_002))]
    began = time.process_time()
    assert [one.at for one in view(jobs).starts] == [700 + 60 * number for number in range(20_000)]
    assert time.process_time() - began < 5


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_start_is_the_same_in_whichever_order_slurm_has_the_jobs(order: tuple[int, ...]) -> None:
    after = ["afterok:8(unfulfilled),afterok:9(unfulfilled)", "afterok:1(unfulfilled)", "afterok:8(unfulfilled)"]
    waits = [depends(number, words) for number, words in zip((7, 8, 9), after, strict=True)]
    starts = view([running(1, 700), *(waits[place] for place in order)]).starts
    assert {one.job: one.at for one in starts} == {8: 700, 9: 1300, 7: 1900}


def test_gangs_that_wait_for_each_other_are_not_foreseen() -> None:
    words = "1 of 2 members held, dependent or not eligible yet"
    gang = [gang_member(number, words, dependency="afterok:9(unfulfilled)") for number in (7, 8)]
    after = [depends(9, "afterok:8(unfulfilled)"), depends(10, "afterany:7(unfulfilled)")]
    assert view([*gang, *after]).starts == view([*after[::-1], *gang]).starts == ()


def test_what_waits_for_itself_or_for_thousands_is_not_foreseen() -> None:
    ring = [depends(7, "afterok:8(unfulfilled)"), depends(8, "afterok:7(unfulfilled)")]
    assert view(ring).starts == ()
    chain = [running(1, 700), *(depends(n, f"afterok:{n - 1}(unfulfilled)", time_limit_s=60) for n in range(2, 5000))]
    assert [one.at for one in view(chain).starts] == [700 + 60 * n for n in range(4998)]


def test_run_times_are_learnt_of_a_users_jobs_of_a_name() -> None:
    learns = RunTimes()
    for number in (1, 2):
        view([job(number, state="RUNNING", start_time=50, end_time=650, name="train")], run_times=learns, wall=60)
        view([], run_times=learns, wall=170)
    now = [running(3, 650, name="train"), depends(4, "afterok:3(unfulfilled)", name="train")]
    seen = view(now, run_times=learns)
    assert seen.starts == (counted(170, 4, after="3", until=290),)
    assert view([running(3, 650, name="train", nodes="n1")], run_times=learns).jobs[3].ends == 170
    assert view([running(3, 650, name="train", uid=1), now[1]], run_times=learns).starts[0].at == 650


def gang_member(number: int, words: str = "waits for room for 2 members", **more: Any) -> Any:
    return job(number, reason=f"Gang ring: {words}", **more)


def test_members_of_a_gang_start_together() -> None:
    one, other = gang_member(7, start_time=400), gang_member(8)
    assert view([other, one]).starts == (
        counted(500, 7, gang="1000:ring:2:7"), counted(500, 8, gang="1000:ring:2:7")
    )  # fmt: skip
    array = gang_member(7, array_id=7, array_tasks="0-1")
    assert [(start.job, start.gang) for start in view([array]).starts] == [(7, "1000:ring:2:7")] * 2
    assert [start.gang for start in view([one, other, gang_member(9), gang_member(11)]).starts] == [
        *["1000:ring:2:7"] * 2, *["1000:ring:2:9"] * 2
    ]  # fmt: skip


def test_a_gang_waits_for_what_its_last_member_waits_for() -> None:
    words = "1_of_2_members_held,_dependent_or_not_eligible_yet".replace("_", " ")
    one = gang_member(7, words, start_time=None)
    other = gang_member(8, words, start_time=None, dependency="afterok:3(unfulfilled)")
    after = depends(9, "afterok:7(unfulfilled)")
    found = view([one, other, after, running(3, 700)]).starts
    assert [(start.job, start.at, start.after) for start in found] == [(9, 1300, "7"), (7, 700, ""), (8, 700, "3")]
    assert [start.at for start in view([one, gang_member(8, words, start_time=900)]).starts] == [900, 900]


@pytest.mark.parametrize(
    "others",
    [
        [],
        [gang_member(8, uid=1)],
        [gang_member(8, start_time=None)],
        [gang_member(8, partition="p,q")],
        [gang_member(8, "1 of 2 members submitted")],
        [gang_member(8, "1 of 2 members held, dependent or not eligible yet", dependency="afterok:99(unfulfilled)")],
    ],
)
def test_of_a_gang_that_is_not_foreseen_whole_nothing_is_asked_for(others: list[Any]) -> None:
    assert view([gang_member(7), *others]).starts == ()


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
    on = job(8, state="RUNNING", nodes="n[1,3]", start_time=50, end_time=700, time_limit_s=5000)
    seen = view([job(7, reason="BeginTime"), on], reservations=(reservation("inactive", 900),), wall=-3500.0)
    assert [one.at for one in seen.starts] == [900 + 3600, 500 + 3600]
    assert seen.jobs[8].ends == 700 + 3600


def slurm_says(**fields: Any) -> Node:
    usual = {
        "state": "idle", "flags": frozenset(), "reason": "", "address": "", "features": (), "tres": {},
        "tres_allocated": {},
    }  # fmt: skip
    return cast("Node", SimpleNamespace(**usual | fields))


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
    assert slurm_node(slurm_says(flags=frozenset(flags))).want == want


@pytest.mark.parametrize(
    ("used", "room"),
    [
        ({}, 1.0),
        ({"cpu": 16, "gres/gpu": 4}, 0.5),
        ({"cpu": 48, "gres/gpu": 4}, 0.25),
        ({"cpu": 1, "gres/shard": 800}, 0.0),
    ],
)
def test_the_part_of_a_node_that_jobs_leave(used: dict[str, int], room: float) -> None:
    has = {"cpu": 64, "gres/gpu": 8, "gres/shard": 800, "billing": 64}
    assert slurm_node(slurm_says(tres=has, tres_allocated=used)).room == room
    assert slurm_node(slurm_says()).room == 0, "nothing is known of it"


def test_nodes_that_the_fleet_created_are_known_by_their_features() -> None:
    features = ("cloud", "sluice-pool-p5", "sluice-made-12345678")
    seen = slurm_node(slurm_says(flags=frozenset({"dynamic_norm"}), features=features))
    assert (seen.made, seen.pool) == ("sluice-made-12345678", "p5")
    assert slurm_node(slurm_says(features=features)).made == "", "a line of slurm.conf"
