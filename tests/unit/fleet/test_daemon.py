"""The daemon's own part: who leads, and what waits for too long."""

from __future__ import annotations

import fcntl
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from policy.pool_nodes import FILE_NAME, PoolPolicy, PoolsPolicy, ShapePolicy
from sluice.base.errors import SluiceError
from sluice.fleet.daemon import Fleetd, Providers, Settings
from sluice.fleet.driver import Machine, Order
from sluice.fleet.journal import Journal
from sluice.fleet.keeper import Keeper
from sluice.fleet.slurm import change
from sluice.fleet.views import Changed, JobAct, LaunchAct, ListAct, Listed, NodeAct, Result, SlurmView


class Commands:
    """scontrol, which counts."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def output(self, *words: str) -> str:
        self.asked.append(words)
        return ""


@pytest.fixture
def fleetd(tmp_path: Path) -> Fleetd:
    settings = Settings(tmp_path / "slurm.conf", tmp_path, tmp_path, tmp_path, "ctl1")
    client: Any = None
    commands: Any = Commands()
    made = Fleetd(settings, client, commands, threading.Event())
    made._config = {"SlurmctldHost[0]": "ctl1"}
    return made


def test_a_controller_that_does_not_lead_any_more_keeps_no_views(fleetd: Fleetd, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as fleetd._lock:
        fleetd._nodes = frozenset({"n1"})
        fleetd._bring(SlurmView(1.0, {}))
        fleetd._lead(False)
    assert fleetd._nodes is None and fleetd._results.empty()


def test_in_a_takeover_the_heartbeat_says_who_leads_though_no_slurmctld_answers(fleetd: Fleetd, tmp_path: Path) -> None:
    config = {"SlurmctldHost[0]": "ctl0", "SlurmctldHost[1]": "ctl1", "StateSaveLocation": str(tmp_path)}
    answers = [config]

    class Client:
        def config(self) -> dict[str, str]:
            if not answers:
                raise SluiceError("no answer within 30 s")
            return answers.pop()

    fleetd._client = Client()  # type: ignore[assignment]
    fleetd._config = {}
    assert not fleetd._leads()  # nobody has written a heartbeat
    fleetd._config_at = -1e9
    (tmp_path / "heartbeat").write_bytes(struct.pack(">QQ", int(time.time()), 1))
    assert fleetd._leads()


def test_a_change_that_waited_behind_a_slurmctld_that_hung_is_not_made(fleetd: Fleetd) -> None:
    act = NodeAct(("n1",), "power_down_force", "why")
    fleetd._change(act, time.monotonic() - 60)
    found = fleetd._results.get_nowait()
    assert isinstance(found, Changed) and "too long" in found.text
    assert fleetd._commands.asked == []  # type: ignore[attr-defined]
    fleetd._change(act, time.monotonic())
    assert len(fleetd._commands.asked) == 1  # type: ignore[attr-defined]


def test_a_change_is_not_made_by_a_controller_that_has_lost_the_lead_since_it_was_asked_for(
    fleetd: Fleetd, tmp_path: Path
) -> None:
    names = {"SlurmctldHost[0]": "ctl1", "SlurmctldHost[1]": "ctl2"}
    fleetd._config = {**names, "StateSaveLocation": str(tmp_path)}
    act = NodeAct(("n1",), "power_down_force", "why")
    for leader in (1, 0):
        (tmp_path / "heartbeat").write_bytes(struct.pack(">QQ", int(time.time()), leader))
        fleetd._change(act, time.monotonic())
    refused, made = fleetd._results.get_nowait(), fleetd._results.get_nowait()
    assert isinstance(refused, Changed) and refused.text == "not made: ctl1 leads no more"
    assert isinstance(made, Changed) and not made.text
    assert len(fleetd._commands.asked) == 1  # type: ignore[attr-defined]


def test_a_signal_is_for_all_of_one_job() -> None:
    commands: Any = Commands()
    change(commands, JobAct(7, "signal", "5_2", "USR1"))
    assert commands.asked == [("scancel", "--signal=USR1", "--full", "5_2")]


def test_nodes_are_created_as_cloud_nodes_and_deleted() -> None:
    commands: Any = Commands()
    change(commands, NodeAct(("n1", "n2"), "create", "CPUs=4 Gres=gpu:h100:1"))
    change(commands, NodeAct(("n3",), "delete"))
    change(commands, NodeAct(("n4",), "make_again", "CPUs=8"))
    assert commands.asked == [
        ("scontrol", "create", "NodeName=n[1-2]", "CPUs=4", "Gres=gpu:h100:1", "State=CLOUD"),
        ("scontrol", "delete", "NodeName=n3"),
        ("scontrol", "delete", "NodeName=n4"),
        ("scontrol", "create", "NodeName=n4", "CPUs=8", "State=CLOUD"),
    ]


def test_a_driver_that_fails_shows_where_and_not_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Careless:
        def machines(self) -> list[Machine]:
            raise KeyError("password=hunter2")

    monkeypatch.setattr("sluice.fleet.daemon.load_driver", lambda name, site: Careless())
    results: list[Result] = []
    settings = Settings(tmp_path / "slurm.conf", tmp_path, tmp_path, tmp_path, "ctl1")
    providers = Providers(settings, results.append, lambda: 1.0)
    pool = PoolPolicy(driver="own", nodes="n1", shapes=(ShapePolicy(name="big"),), partition="own")
    providers.set_pools("main", {"own": pool})
    providers._call(ListAct("own"), time.monotonic())
    (listed,) = results
    assert isinstance(listed, Listed) and listed.failure == "unknown"
    assert f"KeyError in {__file__}, line" in listed.text and "hunter2" not in f"{listed.text} {caplog.text}"


def test_one_journal_has_one_fleetd(fleetd: Fleetd, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as other, (tmp_path / "lock").open("a") as fleetd._lock:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SluiceError, match="still works on this journal"):
            fleetd._lead(True)


def test_the_journal_is_the_next_controllers_when_no_launch_of_this_one_is_under_way(
    fleetd: Fleetd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    launched: list[str] = []

    class Slow:
        def launch(self, order: Order) -> Machine:
            begun.release()
            assert go_on.wait(10)
            launched.append(order.token)
            return Machine("m", order.token, order.node)

    monkeypatch.setattr("sluice.fleet.daemon.load_driver", lambda name, site: Slow())
    pool = PoolPolicy(driver="own", nodes="n[1-9]", shapes=(ShapePolicy(name="big"),), partition="own")
    fleetd._providers.set_pools("main", {"own": pool})
    with (tmp_path / "lock").open("a") as other, (tmp_path / "lock").open("a") as fleetd._lock:
        fcntl.flock(fleetd._lock, fcntl.LOCK_EX)
        for number in range(1, 10):  # one more than there are threads
            fleetd._providers.ask(LaunchAct("own", Order(f"{number:032}", f"n{number}", "big", "")))
        for _ in range(8):
            assert begun.acquire(timeout=10)
        fleetd._lead(False)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        go_on.set()
        until = time.monotonic() + 10
        while not fleetd._providers.let_go():
            assert time.monotonic() < until
            time.sleep(0.01)
        fleetd._lead(False)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert sorted(launched) == [f"{number:032}" for number in range(1, 9)]


def test_without_the_policys_file_nothing_is_decided_where_pools_may_have_machines(
    fleetd: Fleetd, tmp_path: Path
) -> None:
    keeper = Keeper(Journal(tmp_path / "journal.json"))
    fleetd._set_policy(keeper)  # a site without pools
    pool = PoolPolicy(driver="none", nodes="n1", shapes=(ShapePolicy(name="big"),), partition="own")
    Journal(tmp_path / "journal.json").save_pools(PoolsPolicy(cluster="c", pools={"own": pool}))
    keeper = Keeper(Journal(tmp_path / "journal.json"))
    with pytest.raises(SluiceError, match="there are pools that may have machines"):
        fleetd._set_policy(keeper)
    (tmp_path / FILE_NAME).write_text(PoolsPolicy(cluster="c").render())
    fleetd._set_policy(keeper)
    assert list(keeper.pools()) == ["own"] and fleetd._nodes == frozenset({"n1"})


def test_a_driver_that_cannot_be_made_is_its_own_pools_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(site: object) -> None:
        raise KeyError("with a planted secret")

    monkeypatch.setattr("sluice.fleet.daemon.load_driver", lambda name, site: make(site))
    providers = Providers(Settings(tmp_path, tmp_path, tmp_path, tmp_path), lambda _: None, time.time)
    shapes = (ShapePolicy(name="big"),)
    providers.set_pools("main", {"own": PoolPolicy(driver="own", nodes="n1", shapes=shapes, partition="own")})
    found = providers._answer(ListAct("own"), 1.0)
    assert isinstance(found, Listed) and found.failure == "refused" and "KeyError in" in found.text
    assert "planted" not in found.text + caplog.text
