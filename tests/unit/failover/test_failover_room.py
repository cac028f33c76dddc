"""What is read from the shared folder, how it is shown, and the events of takeovers."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.base.slurm_version import OLDEST, SlurmVersion
from sluice.controllerd import takeovers as duty
from sluice.controllerd.daemon import Site
from sluice.failover import shared, status
from sluice.failover.drill import Leg, Report, keep, kept
from sluice.slurm import SlurmClient
from sluice.slurm.answers import Controller

CONF = "SlurmctldHost=ctl1(10.0.0.1)\nSlurmctldHost=ctl2.example.org\nSlurmctldTimeout=6\nStateSaveLocation={}\n"
LEASE = (
    "sluice-lease 1\nepoch 7\nseq 3\nstate held\nhost ctl1\nboot-id b\nvalid-ms 2500\nboottime-ms 1\ntime 1763740000\n"
)


@pytest.fixture
def cluster(tmp_path: Path) -> shared.Cluster:
    """Two controllers, of which the first leads, all in order."""
    folder = tmp_path / "state"
    folder.mkdir()
    conf = tmp_path / "slurm.conf"
    conf.write_text(CONF.format(folder))
    (folder / "heartbeat").write_bytes(struct.pack(">QQ", int(time.time()), 0))
    (folder / "sluice.lease").write_text(LEASE)
    for pid, host in enumerate(("ctl1", "ctl2"), 100):
        write(folder, host, pid=pid)
    return shared.read_cluster(conf)


def write(folder: Path, host: str, *, pid: int = 1, **different: Any) -> None:
    """What a controller writes there."""
    supervisor = {"schema_version": 1, "host": host, "time": time.time(), "slurmctld": pid, "slowest_write_ms": 3.0}
    plugins = {"schema_version": 1, "host": host, "pid": pid, "slurm_version": "22.05.8", "level_asked": "place"}
    counters = {"journal.open": 1, "journal.entries": 5, "journal.lag": 0, "journal.lag_ms": 0, "journal.error": 0}
    (folder / f"sluice.supervise.{host}").write_text(json.dumps(supervisor | different))
    (folder / f"sluice.status.{host}").write_text(json.dumps(plugins | {"counters": counters} | different))


class Client:
    """slurmctld, as ping sees it."""

    def __init__(self, slurm: SlurmVersion = OLDEST, **up: bool) -> None:
        self.slurm = slurm
        self.up = {"ctl1": True, "ctl2": True} | up

    def version(self) -> SlurmVersion:
        """Of its commands."""
        return self.slurm

    def ping(self) -> list[Controller]:
        """All controllers."""
        return [Controller(host, "primary", up) for host, up in self.up.items()]


def look(cluster: shared.Cluster, **up: bool) -> status.Status:
    """`status.look` without munge, which a unit test does not have."""
    return status.look(cluster, cast(SlurmClient, Client(**up)))


@pytest.fixture(autouse=True)
def _no_munge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_munge", lambda: iter(()))


def test_all_in_order(cluster: shared.Cluster) -> None:
    found = look(cluster)
    assert cluster.hosts == ("ctl1", "ctl2")
    assert found.problems == []
    assert (found.leader, found.lease and found.lease.epoch, found.journal["entries"]) == ("ctl1", 7, 5)
    assert json.loads(json.dumps(found.document()))["schema_version"] == 1


@pytest.mark.parametrize(
    ("hurt", "words"),
    [
        (lambda folder: write(folder, "ctl2", pid=101, slurm_version="22.05.9"), "Slurm's version differs"),
        (lambda folder: write(folder, "ctl2", pid=101, time=time.time() + 30), "clock is +30"),
        (lambda folder: os.utime(folder / "sluice.supervise.ctl2", (1, 1)), "ctl2: has written nothing"),
        (lambda folder: (folder / "sluice.status.ctl2").unlink(), "ctl2: Sluice's plugins are not loaded"),
        (lambda folder: (folder / "sluice.lease").write_text("sluice-lease 1\nepoch"), "missing or damaged"),
        (lambda folder: (folder / "sluice.lease").write_text(LEASE.replace("ctl1", "ctl2")), "held by ctl2"),
        (lambda folder: (folder / "heartbeat").write_bytes(struct.pack(">QQ", 5, 0)), "no controller leads"),
        (lambda folder: (folder / "heartbeat").write_bytes(b"x"), "no controller leads: there is no heartbeat"),
        (lambda folder: write(folder, "ctl1", counters={"journal.open": 1, "journal.error": 28}), "No space left"),
        (lambda folder: write(folder, "ctl1", counters={"journal.open": 1, "journal.lag_ms": 4000}), "4000 ms behind"),
    ],
)
def test_each_problem_is_found(cluster: shared.Cluster, hurt: Any, words: str) -> None:
    hurt(cluster.folder)
    assert any(words in finding.what for finding in look(cluster).problems), look(cluster).problems


def test_jobs_that_would_be_held(cluster: shared.Cluster, tmp_path: Path) -> None:
    def remarks() -> list[str]:
        read = shared.read_cluster(tmp_path / "slurm.conf")
        return [one.what for one in look(read).findings if one.what.startswith("jobs are held")]

    assert len(remarks()) == 1
    with (tmp_path / "slurm.conf").open("a") as conf:
        conf.write("SchedulerParameters=defer,NoHold_on_prolog_fail\n")
    assert remarks() == []


def test_a_new_cluster_whose_backup_would_end(cluster: shared.Cluster, tmp_path: Path) -> None:
    with (tmp_path / "slurm.conf").open("a") as conf:
        conf.write("AccountingStorageType=accounting_storage/slurmdbd\n")
    read = shared.read_cluster(tmp_path / "slurm.conf")

    def problems(slurm: SlurmVersion, cluster: shared.Cluster = read) -> list[str]:
        return [one.what for one in status.look(cluster, cast(SlurmClient, Client(slurm))).problems]

    assert problems((26, 5, 0)) == [f"{read.folder}/assoc_usage: not saved yet; a backup would end at once"]
    assert problems((24, 11, 5)) == problems((26, 5, 0), cluster) == []
    (read.folder / "assoc_usage").touch()
    assert problems((26, 5, 0)) == []


def test_a_controller_that_is_down(cluster: shared.Cluster) -> None:
    assert any("ctl2: slurmctld does not answer" in one.what for one in look(cluster, ctl2=False).problems)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema_version": 2}', "[" * 100_000, "\x00\xff"])
def test_damaged_files_are_left_out(cluster: shared.Cluster, text: str) -> None:
    for name in ("sluice.supervise.ctl1", "sluice.status.ctl2", "sluice.lease"):
        (cluster.folder / name).write_text(text)
    look(cluster)
    assert shared.member(cluster.folder, "ctl1").supervisor == {}


def test_a_folder_that_is_shut(cluster: shared.Cluster, tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="No such file"):
        look(shared.Cluster(cluster.hosts, tmp_path / "none", 6))
    (tmp_path / "empty.conf").write_text("ClusterName=x\n")
    with pytest.raises(SluiceError, match="no SlurmctldHost"):
        shared.read_cluster(tmp_path / "empty.conf")


def site(cluster: shared.Cluster, tmp_path: Path, host: str) -> Site:
    """The daemon's, on a controller that leads."""
    (tmp_path / host / "failover").mkdir(parents=True, exist_ok=True)
    made = SimpleNamespace(
        host=host, conf_folder=tmp_path, state=tmp_path / host, events=tmp_path / f"{host}.events", leads=lambda: True
    )
    return cast(Site, made)


def kinds(path: Path) -> list[str]:
    """Of all events."""
    return [event.kind for event in events.read(path)]


def test_takeovers_become_events_once(cluster: shared.Cluster, tmp_path: Path) -> None:
    one, two = site(cluster, tmp_path, "ctl1"), site(cluster, tmp_path, "ctl2")
    old = {"host": "ctl1", "why": "long ago"}
    history = cluster.folder / "sluice.failover.ctl1.jsonl"
    events.append(history, "fenced", **old)
    duty.report(one)
    duty.report(one)
    assert kinds(one.events) == []  # the first leader took nothing over, and old events are not reported
    events.append(history, "fenced", host="ctl1", why="it has not run")
    events.append(history, "lease.released", host="ctl1", epoch=7)
    duty.report(two)
    assert kinds(two.events) == ["takeover"]
    assert events.read(two.events)[0].fields == {"leader": "ctl2", "before": "ctl1", "epoch": 7}
    duty.report(one)
    duty.report(one)
    reported = events.read(one.events)
    assert [event.kind for event in reported] == ["takeover", "controller.fenced"]
    assert reported[1].fields["why"] == "it has not run"
    file = one.state / "failover/reported.json"
    file.rename(file.with_name("told.json"))  # its name until 0.1.0
    events.append(history, "fenced", host="ctl1", why="again")
    list(duty.duties(one))
    duty.report(one)
    assert events.read(one.events)[-1].fields["why"] == "again" and not file.with_name("told.json").exists()


def test_reports_of_drills_are_kept(tmp_path: Path) -> None:
    good = Report(1763740000.0, legs=[Leg("ctl2", 3.0), Leg("ctl1", 2.0)])
    assert good.good
    keep(good, tmp_path / "drills", tmp_path / "events")
    bad = Report(1763740001.0, legs=[Leg("ctl2", missing=["7"]), Leg("ctl1")])
    assert not bad.good
    assert not Report(0.0, aborted="x").good
    keep(bad, tmp_path / "drills", tmp_path / "events")
    (tmp_path / "drills/broken.json").write_text("{")
    assert [document["good"] for document in kept(tmp_path / "drills")] == [True, False]
    assert kinds(tmp_path / "events") == ["drill", "drill"]
