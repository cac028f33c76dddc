"""Histories on pools, in three ways: cost, waits and hidden boots, worked out by hand; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from policy.pools import Pool, Shape
from sluice.cli.simulate import command
from sluice.fleet import simulate
from sluice.fleet.simulate import Booting, Figures, Relations, Replay, StockOut, Way
from sluice.simulate.cluster_file import read_nodes
from sluice.simulate.traces import MICROSECOND, Trace, TraceJob

BOOT_S = 100.0


@pytest.fixture(autouse=True)
def every_boot_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "_SPREAD", 0.0)


def job(submit: float, run: float, gpus: int = 4, **more: Any) -> TraceJob:
    return TraceJob(f"{submit}-{run}", round(submit * MICROSECOND), round(run * MICROSECOND), gpus, **more)


def figures(
    way: Way,
    *jobs: TraceJob,
    fixed: str | None = None,
    outs: tuple[StockOut, ...] = (),
    more: int = 0,
    more_fields: dict[str, Any] | None = None,
    relations: Relations | None = None,
    **fields: Any,
) -> Figures:
    """`more`: nodes of a second pool."""
    shape = Shape(name="s", gpus={"h100": 4}, cpus=64, memory=512 << 10, price=36.0)
    usual: dict[str, Any] = {
        "driver": "local", "nodes": "p[1-2]", "shapes": [shape], "idle": "200s", "boot_within": "200s"
    }  # fmt: skip
    pools = {"p": Pool.model_validate(usual | fields)}
    if more:
        pools["q"] = Pool.model_validate(usual | {"nodes": f"q[1-{more}]"} | (more_fields or {}))
    fixed_nodes = read_nodes(fixed) if fixed else []
    history = Trace("test", list(jobs))
    return Replay(history, fixed_nodes, pools, way, Booting(BOOT_S), stock_outs=outs, relations=relations).run()


def test_all_nodes_always_on() -> None:
    found = figures("always-on", job(0, 1000), job(500, 1000))
    assert (found.jobs, found.boots, found.wait_mean_s) == (2, 0, 0)
    assert found.node_hours == pytest.approx(2 * 1500 / 3600)
    assert found.cost == pytest.approx(2 * 1500 / 100)  # 36 an hour are 0.01 a second
    assert found.busy_percent == pytest.approx(100 * 2000 / 3000)


@pytest.mark.parametrize("way", ["power-saving", "fleet"])
def test_a_job_that_nobody_foresees_waits_for_the_boot_and_its_node_goes_after_idle(way: Way) -> None:
    found = figures(way, job(0, 1000), job(2000, 10))
    # 0 asked, 100-1100 runs, 1300 goes; 2000 asked, 2100-2110 runs, and the history ends.
    assert (found.boots, found.wait_mean_s, found.boot_wait_mean_s, found.hidden_percent) == (2, 100, 100, 0)
    assert found.cost == pytest.approx((1300 + 110) / 100)


def test_a_start_that_the_plan_knows_finds_its_node() -> None:
    # A job of both nodes waits for the one that is fixed, which is busy until 1000; it does not fit before.
    jobs = job(0, 1000), job(1, 100, 8, nodes=2)
    saving = figures("power-saving", *jobs, fixed="1x4:h100", nodes="p1")
    assert (saving.boots, saving.wait_p99_s, saving.hidden_percent, saving.foreseen_boots) == (1, 1099, 0, 1)
    ahead = figures("fleet", *jobs, fixed="1x4:h100", nodes="p1")
    assert (ahead.boots, ahead.wait_p99_s, ahead.hidden_percent, ahead.foreseen_hidden_percent) == (1, 999, 100, 100)
    assert ahead.cost == pytest.approx(saving.cost + (200 + 10 - 100) / 100), "asked for boot_within and 10 s ahead"


def test_a_spare_node_hides_boots_that_nobody_foresees_and_costs_its_idle_time() -> None:
    jobs = job(0, 1000), job(500, 10)
    found = figures("fleet", *jobs, spare=1)
    assert (found.boots, found.wait_mean_s, found.hidden_percent) == (2, 50, 50)
    assert found.cost == pytest.approx(2 * 1100 / 100)
    without = figures("fleet", *jobs)
    assert (without.wait_mean_s, without.hidden_percent) == (100, 0)
    assert without.cost == pytest.approx((1100 + 310) / 100)


@pytest.mark.parametrize(
    ("way", "outs", "more", "wait", "given_back"),
    [
        ("always-on", 1000, 0, 0, 0),
        ("fleet", 50, 0, 50 + BOOT_S, 0),  # it asks again for give_back_within
        # Given back at 60, 180, 360 and 660, asked again after 60, 120, 240 and 480 s.
        ("fleet", 1000, 0, 1140 + BOOT_S, 4),
        ("fleet", 2500, 0, 2760 + BOOT_S, 7),  # ... and then after 480 s each
        ("fleet", 1000, 1, 60 + BOOT_S, 1),  # on the other pool
        # Each of the nodes is DOWN after boot_within.
        ("power-saving", 1000, 0, 1000 + BOOT_S, 2),
        ("power-saving", 50, 0, 200 + BOOT_S, 1),
        ("power-saving", 1000, 1, 400 + BOOT_S, 2),
    ],
)
def test_a_job_waits_again_where_there_is_no_capacity(
    way: Way, outs: float, more: int, wait: float, given_back: int
) -> None:
    found = figures(way, job(0, 10), outs=(StockOut("p", 0, outs),), more=more)
    assert (found.jobs, found.wait_mean_s, found.given_back) == (1, wait, given_back)


def test_no_job_of_several_nodes_keeps_those_that_it_has_without_the_others() -> None:
    jobs = job(0, 10, 8, nodes=2), job(1, 10, 4)
    found = figures("fleet", *jobs, outs=(StockOut("p", 0, 1000),), nodes="p1", more=1)
    # q1 boots from 0 for the job of both nodes, is given back at 60, and asked for by the other job 30 s later, whose
    # node the first one finds when it tries again; then it is asked for and given back twice.
    assert (found.jobs, found.given_back, found.wasted_boots) == (2, 4, 3)
    assert found.wait_p50_s == 90 + BOOT_S - 1


def test_a_node_that_is_given_back_before_there_is_stock_costs_nothing() -> None:
    outs = StockOut("p", 0, 100), StockOut("q", 0, 500)
    found = figures(
        "fleet", job(0, 10, 8, nodes=2), nodes="p1", more=1, more_fields={"give_back_within": "600s"}, outs=outs
    )
    # Given back at 60, as p1 cannot be had; p1 is there from 120 on and q1 from 500 on, for the job that ends at 610.
    assert found.given_back == 1
    assert found.cost == pytest.approx((610 - 120 + 610 - 500) / 100)


def test_a_job_that_no_node_can_run_is_said() -> None:
    found = figures("fleet", job(0, 10, 8, nodes=1), job(0, 10))
    assert (found.jobs, found.rejected) == (1, 1)


def test_least_is_there_from_the_start() -> None:
    found = figures("fleet", job(0, 1000), least=1)
    assert (found.boots, found.wait_mean_s) == (0, 0)
    assert found.cost == pytest.approx(10)


POLICY = """
pools:
  p:
    driver: local
    nodes: p[1-2]
    shapes:
    - {name: s, gpus: {h100: 4}, cpus: 64, memory: 512G, price: 36}
    - {name: t, gpus: {h100: 4}, cpus: 64, memory: 512G, price: 36}
    zones: [a, b]
    idle: 200s
    boot_within: 200s
"""
MURI = """job_id,num_gpu,submit_time,iterations,iteration_time,model_name
0,4,0,1000,985,x
1,4,2000000,10,985,x
"""


def run(folder: Path, *options: str) -> Any:
    (folder / "policy.yaml").write_text(POLICY)
    (folder / "trace.csv").write_text(MURI)
    words = ["--trace", str(folder / "trace.csv"), "--pools", str(folder / "policy.yaml"), "--boot", "100"]
    return CliRunner().invoke(command, [*words, *options])


def test_the_command_compares_three_ways(tmp_path: Path) -> None:
    done = run(tmp_path, "--json")
    document = json.loads(done.stdout)
    assert [(one["way"], one["boots"]) for one in document["ways"]] == [
        ("always-on", 0), ("power-saving", 2), ("fleet", 2)
    ]  # fmt: skip
    assert document["trace"]["jobs"] == 2
    table = run(tmp_path).stdout.splitlines()
    assert table[0].split() == ["always-on", "power-saving", "fleet"]
    assert run(tmp_path, "-P", "-o", "boots,wait_mean_s").stdout.splitlines() == [
        "way|boots|wait_mean_s", "always-on|0|0", "power-saving|2|100", "fleet|2|100"
    ]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), [(["--policy", "easy"], "do not go with"), (["-o", "x"], "unknown")])
def test_options_that_do_not_go_with_pools(tmp_path: Path, options: list[str], words: str) -> None:
    done = run(tmp_path, *options)
    assert words in done.output + str(done.exception)


def test_hours_without_capacity_are_an_option(tmp_path: Path) -> None:
    ways = json.loads(run(tmp_path, "--json", "--no-capacity", "p:0-0.25").stdout)["ways"]
    assert {one["way"]: one["given_back"] for one in ways} == {"always-on": 0, "power-saving": 2, "fleet": 4}


@pytest.mark.parametrize("text", ["x:0-1", "p:2-1", "p:1", "p:-1-2", "p:0-inf"])
def test_hours_that_are_none(tmp_path: Path, text: str) -> None:
    done = run(tmp_path, "--no-capacity", text)
    assert "write POOL:FROM-TO, as p:10-12.5" in str(done.exception.remedy)


def test_hours_without_capacity_are_of_pools_alone(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(MURI)
    words = ["--trace", str(tmp_path / "trace.csv"), "--nodes", "1x4:h100", "--no-capacity", "p:0-1"]
    assert "goes with --pools alone" in CliRunner().invoke(command, words).output


def test_a_policy_without_pools(tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("tenants: {}\n")
    done = run(tmp_path, "--pools", str(tmp_path / "none.yaml"))
    assert "has no pools" in str(done.exception)


def places(**fields: Any) -> dict[str, Any]:
    """Of a pool with two shapes in two zones."""
    usual = {"gpus": {"h100": 4}, "cpus": 64, "memory": 512 << 10}
    shapes = [Shape(name="s", price=36.0, **usual), Shape(name="t", price=72.0, **usual)]
    return {"shapes": shapes, "zones": ["a", "b"], **fields}


@pytest.mark.parametrize(
    ("out", "way", "wait", "price"),
    [
        ({"zone": "a"}, "fleet", BOOT_S, 36),
        ({"shape": "s"}, "fleet", BOOT_S, 72),
        ({"shape": "s", "zone": "a"}, "fleet", BOOT_S, 36),
        ({"shape": "t"}, "fleet", BOOT_S, 36),
        ({"zone": "a"}, "power-saving", 1000 + BOOT_S, 36),  # it asks for the first shape in the first zone alone
        ({"zone": "b"}, "power-saving", BOOT_S, 36),
        ({"shape": "t"}, "power-saving", BOOT_S, 36),
    ],
)
def test_the_next_zone_or_shape_is_asked_at_once(out: dict[str, str], way: Way, wait: float, price: float) -> None:
    found = figures(way, job(0, 10), outs=(StockOut("p", 0, 1000, **out),), **places())
    assert found.wait_mean_s == wait
    assert found.cost / found.node_hours == pytest.approx(price)


def test_a_pool_is_out_when_all_its_places_are() -> None:
    outs = (
        StockOut("p", 0, 1000, zone="a"),
        StockOut("p", 0, 40, zone="b", shape="s"),
        StockOut("p", 0, 1000, shape="t"),
    )
    found = figures("fleet", job(0, 10), outs=outs, **places())
    assert (found.given_back, found.wait_mean_s) == (0, 40 + BOOT_S), "zone b has the first shape again after 40 s"


@pytest.mark.parametrize("after", [{1: 0}, {1: 0, 2: 1}])
def test_nodes_are_there_when_the_links_of_a_chain_come(after: dict[int, int]) -> None:
    jobs = job(0, 1000, 4), *(job(1, 50, 8, nodes=2) for _ in after)
    found = figures("fleet", *jobs, relations=Relations(after=after), idle="10s")
    # p1 boots for the first job and p2 ahead of the second, boot_within and 10 s; the third has both from then on.
    assert (found.boots, found.foreseen_boots, found.foreseen_hidden_percent) == (2, 1, 100)
    assert found.cost == pytest.approx((2 * (1100 + 50 * len(after)) - (1100 - 210)) / 100)
    saving = figures("power-saving", *jobs, relations=Relations(after=after), idle="10s")
    assert (saving.foreseen_boots, saving.foreseen_hidden_percent) == (1, 0)


def test_a_gang_starts_together() -> None:
    jobs = job(0, 1000, 4), job(1, 10, 4), job(1, 10, 4)
    alone, together = (figures("fleet", *jobs, relations=Relations(gangs=gangs)) for gangs in ({}, {1: 1, 2: 1}))
    assert alone.wait_p50_s == BOOT_S and together.wait_p50_s == 1100 - 1


@pytest.mark.parametrize("place", ["zone=a", "shape=s", "shape=s,zone=a"])
def test_a_zone_and_a_shape_without_capacity_are_options(tmp_path: Path, place: str) -> None:
    ways = json.loads(run(tmp_path, "--json", "--no-capacity", f"p,{place}:0-0.25").stdout)["ways"]
    assert {one["way"]: one["given_back"] for one in ways} == {"always-on": 0, "power-saving": 2, "fleet": 0}


@pytest.mark.parametrize("place", ["zone=c", "shape=x", "room=a", "zone=a,zone=a", "zone"])
def test_places_that_a_pool_has_not(tmp_path: Path, place: str) -> None:
    done = run(tmp_path, "--no-capacity", f"p,{place}:0-0.25")
    assert "it has shapes s, t and zones a, b" in str(done.exception.remedy)
