"""What the daemon makes of nodes' reports, and what it leaves alone where it does not lead."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from policy.document import parse
from policy.node import FILE_NAME, compile_node
from sluice.base.errors import SluiceError
from sluice.controllerd.daemon import Site
from sluice.controllerd.health.controller import controller_of
from sluice.controllerd.power import duty, met
from sluice.controllerd.power.duty import LOOK_S, PowerControl
from sluice.exchange.power import GpuPower, PowerReport
from tests.unit.controllerd.slurm_objects import a_job, a_node

POLICY = """
classes: {hopper: {types: [h100]}}
tenants: {physics: {members: [alice], guarantee: {gpus: 1}}, guests: {members: [bob]}}
power:
  gpus: {hopper: {idle: 70W, least: 200W, default: 700W, most: 700W}}
  budgets: [{name: hall, nodes: "*", watts: 5kW}, {name: guests, tenant: guests, watts: 1kW}]
"""


class FakeSite:
    """As much of a controller as the duty needs."""

    def __init__(self, folder: Path) -> None:
        self.state_save = self.conf_folder = folder
        self.events = folder / "events.jsonl"
        self.client = self
        self.led = True
        self.ran: list[str] = []
        self.refused: tuple[str, ...] = ()
        self.flags: frozenset[str] = frozenset()
        self.comment = ""
        self.commands = self

    def leads(self) -> bool:
        return self.led

    def jobs(self, *, ids: list[int], states: list[str]) -> list[Any]:
        del states
        owners = {1: ("alice", "physics"), 2: ("bob", "guests"), 3: ("bob", "guests")}
        return [
            replace(a_job(number), uid=1000 + number, user=owners[number][0], account=owners[number][1],
                    qos=owners[number][1], start_time=number, comment=self.comment)
            for number in ids
        ]  # fmt: skip

    def nodes(self) -> list[Any]:
        return [
            replace(a_node(name), gres="gpu:h100:2", tres_allocated={"gres/gpu:h100": 2}, flags=self.flags)
            for name in ("n1", "n2")
        ]

    def run(self, *words: str, **_: Any) -> Any:
        self.ran.append(" ".join(words))
        return type("Done", (), {"returncode": int(words[1] in self.refused)})


class Daemon:
    """The duty, second by second."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / FILE_NAME).write_text(compile_node(parse(POLICY)).render())
        self.now = 1000.0
        self.site = FakeSite(folder)
        monkeypatch.setattr(duty.time, "monotonic", lambda: self.now)
        self.control = PowerControl(cast(Site, self.site))
        self.control.powers._clock = lambda: self.now

    def step(self, seconds: int = 1, **drawn: Any) -> None:
        for _ in range(seconds):
            self.report("n1", (1, 2), **drawn)
            self.now += 1
            self.control.step(cast(Site, self.site))

    def lower(self) -> None:
        """So far that job 2 is to give way; job 1 is guaranteed."""
        self.step(int(LOOK_S) + 2)
        self.control.lower({"name": "hall", "watts": 2000, "seconds": 60, "by": "oper"})
        self.step(3, cap=300, why="order")

    def stop(self) -> None:
        self.control.stop(cast(Site, self.site))

    def report(
        self, node: str, jobs: tuple[int, ...], drawn: float = 600, cap: float = 700, why: str = "", **caps: float
    ) -> dict[str, Any]:
        gpus = tuple(
            GpuPower(f"{node}-{job}", cap, 700, 200, 700, power_w=drawn, jobs=(job,), why=why, **caps) for job in jobs
        )
        return self.control.powers.take(PowerReport(node, 0, gpus).to_dict())

    def plan(self) -> list[str]:
        return (self.site.state_save / "sluice.power").read_text().splitlines()


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    return Daemon(tmp_path, monkeypatch)


def test_nodes_that_have_not_reported_draw_what_they_idle(daemon: Daemon) -> None:
    """Four GPUs of two nodes, 70 W each; Slurm's nodes are known from the first look on."""
    daemon.now += 1
    daemon.control.step(cast(Site, daemon.site))
    with pytest.raises(SluiceError, match="280 W that its GPUs draw without jobs"):
        daemon.control.lower({"name": "hall", "watts": 279, "seconds": 60})
    daemon.control.lower({"name": "hall", "watts": 280, "seconds": 60})


def test_nothing_is_ordered_before_it_has_looked_long_enough(daemon: Daemon) -> None:
    daemon.step(int(LOOK_S))
    assert not (daemon.site.state_save / "sluice.power").exists()
    daemon.step(2)
    assert "job 1 700" in daemon.plan()


def test_allocated_gpus_of_nodes_that_never_reported_count_in_full(daemon: Daemon) -> None:
    daemon.step(int(LOOK_S) + 2)
    (hall, _) = daemon.control.show()["budgets"]
    assert daemon.control._uses[0].watts == 5000 - 2 * 700
    assert (hall["watts"], hall["measured_w"]) == (5000, 1200)


def test_a_tenants_budget_has_the_gpus_of_its_jobs(daemon: Daemon) -> None:
    daemon.step(int(LOOK_S) + 2)
    assert daemon.control._uses[1].measured_w == 600


def test_what_nodes_and_tenants_draw_and_may_draw(daemon: Daemon) -> None:
    daemon.step(int(LOOK_S) + 2)
    gpu = GpuPower("n1-2", 300, 700, 200, 700, power_w=250, jobs=(2, 1), why="order")
    daemon.control.powers.take(PowerReport("n1", 0, (gpu,)).to_dict())
    daemon.now += 1
    daemon.control.step(cast(Site, daemon.site))
    half = {"gpus": 0.5, "power_w": 125, "bound_w": 150, "capped_gpus": 0.5, "silent_gpus": 0}
    assert daemon.control.drawn() == {
        "nodes": {"n1": {"name": "n1", **{key: 2 * value for key, value in half.items()}}},
        "tenants": {name: {"name": name, **half} for name in ("guests", "physics")},
    }
    daemon.control.powers.take(PowerReport("n1", 0, (replace(gpu, jobs=(1, 2, 3)),)).to_dict())
    daemon.now += 1
    daemon.control.step(cast(Site, daemon.site))
    assert sum(row["gpus"] for row in daemon.control.drawn()["tenants"].values()) == pytest.approx(1)
    daemon.now += 11  # another controller leads
    assert daemon.control.drawn() == {"nodes": {}, "tenants": {}}
    assert daemon.control.show()["budgets"][0]["measured_w"] is None


def test_a_controller_that_does_not_lead_orders_nothing(daemon: Daemon) -> None:
    daemon.site.led = False
    daemon.step(int(LOOK_S) + 5)
    assert not (daemon.site.state_save / "sluice.power").exists()
    assert daemon.report("n1", (1, 2)) == {}
    daemon.control._to_stop.append((2, "why"))
    daemon.stop()
    assert daemon.site.ran == []


def test_a_lowered_budget_is_ordered_published_and_jobs_give_way(daemon: Daemon) -> None:
    daemon.step(int(LOOK_S) + 2)
    daemon.control.lower({"name": "hall", "watts": 2000, "seconds": 60, "by": "oper"})
    assert daemon.report("n1", (1, 2))["order"]["caps"]["n1-2"] < 700
    assert daemon.plan()[1].startswith("budget hall 2000 ")
    daemon.step(3, cap=300, why="order")
    daemon.stop()
    assert daemon.site.ran == ["scontrol requeue 2"]  # job 1 is guaranteed
    assert daemon.control.why({"job": 1}, None)["gives_way"] == "never stopped"
    with pytest.raises(SluiceError, match="no running job of yours"):
        daemon.control.why({"job": 1}, 1002)
    daemon.control.lower({"name": "hall", "end": True})
    with pytest.raises(SluiceError, match="is not lowered"):
        daemon.control.lower({"name": "hall", "end": True})


def test_a_daemon_that_dies_after_a_lowering_leaves_it_to_the_next(daemon: Daemon, caplog: Any) -> None:
    daemon.step(int(LOOK_S) + 2)
    daemon.control.lower({"name": "hall", "watts": 2000, "seconds": 60, "by": "oper"})
    file = daemon.site.state_save / met.FILE_NAME
    damaged = ("{}", '{"met": {"hall": NaN}}', '{"met": {"hall": Infinity}}', "[" * 100_000)
    for text, ran in (*((text, []) for text in damaged), (file.read_text(), ["scontrol requeue 2"])):
        file.write_text(text)
        daemon.control = PowerControl(cast(Site, daemon.site))
        daemon.control.powers._clock = lambda: daemon.now
        daemon.step(int(LOOK_S) + 4, cap=300, why="order")
        daemon.stop()
        assert daemon.site.ran == ran
    assert caplog.text.count("damaged") == len(damaged)


def test_without_a_file_that_can_be_written_a_budget_is_kept(daemon: Daemon) -> None:
    """As on a full disk."""
    daemon.step(int(LOOK_S) + 2)
    file = daemon.site.state_save / met.FILE_NAME
    file.unlink()
    file.mkdir()
    with pytest.raises(IsADirectoryError):
        daemon.control.lower({"name": "hall", "watts": 2000, "seconds": 60, "by": "oper"})
    assert daemon.report("n1", (1, 2))["order"]["caps"]["n1-2"] < 700
    for _ in range(3):
        with pytest.raises(IsADirectoryError):
            daemon.step(cap=300, why="order")
    daemon.stop()
    assert daemon.site.ran == ["scontrol requeue 2"]


def test_a_new_leader_takes_over_the_caps_in_force(daemon: Daemon) -> None:
    daemon.control.step(cast(Site, daemon.site))  # no node has found it yet
    daemon.step(int(LOOK_S), cap=300, why="order")
    daemon.step(1, cap=300, why="order")
    caps = daemon.report("n1", (1, 2))["order"]["caps"]
    assert caps == {"n1-1": 420, "n1-2": 420}  # what the planner counts them with, and more when there was room


def test_a_job_with_a_cap_of_its_own_takes_no_watts_from_others(daemon: Daemon) -> None:
    def step(cap: float, why: str) -> dict[str, Any]:
        daemon.report("n2", (3,), drawn=cap, cap=cap, why=why, jobs_w=300)
        daemon.step(drawn=700)
        return daemon.report("n1", (1, 2))["order"]["caps"]

    for _ in range(int(LOOK_S) + 2):
        daemon.report("n2", (3,), drawn=300, cap=300, why="job", jobs_w=300)
        daemon.step(drawn=700)
    daemon.control.lower({"name": "hall", "watts": 1800, "seconds": 60})  # 700 + 700 + 300
    assert step(300, "job") == {}
    assert step(250, "order") == {}  # it wants no more while it has less


def test_a_cap_that_was_planned_for_a_start_is_replaced_by_an_order(daemon: Daemon) -> None:
    for _ in range(int(LOOK_S) + 2):
        daemon.report("n2", (1,), drawn=300, cap=300, why="job", planned_w=300)
        daemon.step()
    order = daemon.report("n2", (1,), drawn=300, cap=300, why="job", planned_w=300)["order"]
    assert (order["caps"], order["lifted"]) == ({"n2-1": 300}, [1])
    for _ in range(6):
        daemon.report("n2", (1,), drawn=300, cap=300, why="order")
        daemon.step()
    order = daemon.report("n2", (1,), drawn=300, cap=300, why="order")["order"]
    assert (order["caps"], order["lifted"]) == ({}, [])  # there is room


def test_a_limit_that_the_site_has_raised_counts(daemon: Daemon) -> None:
    daemon.report("n2", ())
    daemon.step(int(LOOK_S) + 2, cap=900, drawn=900)
    daemon.control.lower({"name": "hall", "watts": 1500, "seconds": 60})
    daemon.step(cap=900, drawn=900)
    assert daemon.report("n1", (1, 2))["order"]["caps"] == {"n1-2": 600}  # the guaranteed one keeps its 900


def test_only_a_job_that_runs_is_cancelled_where_it_cannot_be_requeued(daemon: Daemon) -> None:
    daemon.site.refused = ("requeue",)  # as of a job that was requeued, and whose node is slow to end it
    daemon.lower()
    daemon.stop()
    assert daemon.site.ran == ["scontrol requeue 2", "scancel --state=RUNNING 2"]


def test_no_job_is_stopped_for_a_budget_that_is_kept_by_then(daemon: Daemon) -> None:
    """E.g. as Slurm's commands for the jobs before took long."""
    daemon.lower()
    daemon.control.lower({"name": "hall", "end": True})
    daemon.stop()
    assert daemon.site.ran == []


def test_a_job_that_saves_is_asked_to_before_it_gives_way(daemon: Daemon) -> None:
    daemon.site.comment = "sluice:checkpoint"
    daemon.lower()
    signal = "scancel --signal=USR1 --full 2"
    daemon.control._to_stop.append((2, "again"))
    daemon.stop()
    daemon.step(29, cap=300, why="order")
    daemon.control._to_stop.append((2, "why"))
    daemon.stop()
    assert daemon.site.ran == [signal]
    daemon.step(1, cap=300, why="order")  # it has not answered within checkpoint.before_requeue
    daemon.stop()
    assert daemon.site.ran == [signal, "scontrol requeue 2"]
    assert daemon.control.why({"job": 2}, None)["would_lose_s"] > 1e9

    daemon.control._to_stop.append((2, "why"))
    daemon.stop()
    controller_of(cast(Site, daemon.site))._checkpoints.saves.jobs[2].saved = time.time()
    daemon.stop()
    assert daemon.site.ran[2:] == [signal, "scontrol requeue 2"]
    assert json.loads(daemon.site.events.read_text().splitlines()[-1])["saved"] == pytest.approx(time.time(), abs=60)
    assert daemon.control.why({"job": 2}, None)["would_lose_s"] < 60

    daemon.control._to_stop.append((2, "why"))
    daemon.stop()
    daemon.site.led = False
    daemon.stop()
    daemon.site.led = True
    daemon.stop()
    daemon.control._to_stop.append((2, "why"))
    daemon.stop()
    daemon.now += 60  # another daemon leads meanwhile: nothing of this one runs
    daemon.control._to_stop.append((3, "why"))
    daemon.stop()
    assert daemon.site.ran[4:] == [signal, signal]

    daemon.step(int(LOOK_S) + 4, cap=300, why="order")
    daemon.stop()
    assert daemon.site.ran[6:] == [signal]  # it decides again
    daemon.control.lower({"name": "hall", "end": True})  # it is not needed any more
    daemon.stop()
    daemon.step(60, cap=300, why="order")
    daemon.stop()
    assert daemon.site.ran[6:] == [signal]


def test_a_job_does_not_save_while_the_lowest_caps_do_not_keep_the_budget(daemon: Daemon) -> None:
    daemon.site.comment = "sluice:checkpoint"
    daemon.lower()
    daemon.stop()
    assert daemon.site.ran == ["scancel --signal=USR1 --full 2"]
    daemon.control.lower({"name": "hall", "watts": 1700, "seconds": 60, "by": "oper"})  # 2 * 700 are not known, 2 * 200
    daemon.stop()
    assert daemon.site.ran[1:] == ["scontrol requeue 2"]
    daemon.control._to_stop.append((2, "why"))
    daemon.stop()
    assert daemon.site.ran[2:] == ["scontrol requeue 2"]


def test_a_job_whose_signal_fails_is_stopped_all_the_same(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.site.comment = "sluice:checkpoint"
    daemon.lower()
    run = daemon.site.run

    def scancel_hangs(*words: str, **named: Any) -> Any:
        if words[0] == "scancel":
            raise SluiceError("scancel: took too long")
        return run(*words, **named)

    monkeypatch.setattr(daemon.site, "run", scancel_hangs)
    with pytest.raises(SluiceError):
        daemon.stop()
    daemon.step(30, cap=300, why="order")
    daemon.stop()
    assert daemon.site.ran == ["scontrol requeue 2"]


def test_a_job_is_stopped_where_no_event_can_be_written(daemon: Daemon, caplog: Any) -> None:
    """As on a full disk."""
    daemon.lower()
    daemon.site.events = daemon.site.state_save / "none" / "events.jsonl"
    daemon.stop()
    assert daemon.site.ran == ["scontrol requeue 2"] and "event power.stopped" in caplog.text


def test_no_job_gives_way_to_a_budget_that_is_taken_out(daemon: Daemon) -> None:
    daemon.site.comment = "sluice:checkpoint"
    daemon.lower()
    daemon.stop()
    (daemon.site.conf_folder / FILE_NAME).write_text(compile_node(parse("level: place\n")).render())
    daemon.step(1)
    controller_of(cast(Site, daemon.site))._checkpoints.saves.jobs[2].saved = time.time() + 1
    daemon.stop()
    assert daemon.site.ran == ["scancel --signal=USR1 --full 2"]


def test_a_node_that_is_switched_off_counts_no_more(daemon: Daemon) -> None:
    daemon.report("n2", (3,))
    daemon.step(int(LOOK_S) + 2)
    assert daemon.control.show()["budgets"][0]["silent_gpus"] == 1
    daemon.step(30)
    assert daemon.control.show()["budgets"][0]["silent_gpus"] == 1  # it may still draw
    daemon.site.flags = frozenset({"powered_down"})
    daemon.step(31)
    assert daemon.control.show()["budgets"][0]["silent_gpus"] == 0
    assert daemon.control.show()["budgets"][0]["measured_w"] == 1200


def test_without_budgets_orders_are_taken_back(daemon: Daemon) -> None:
    daemon.step(int(LOOK_S) + 2)
    daemon.control.lower({"name": "hall", "watts": 2000, "seconds": 60})
    daemon.step()
    (daemon.site.state_save / FILE_NAME).write_text(compile_node(parse("{}")).render())
    daemon.step()
    assert daemon.report("n1", (1, 2))["order"]["caps"] == {}
    assert len(daemon.plan()) == 2
