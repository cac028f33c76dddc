"""What is read from a state folder, complete or damaged."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.handle import default_folder
from sluice.base.errors import SluiceError, UsageError


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "no cluster here; bring one up with: sluice cluster up --dir"),
        ("", "cluster.json: Expecting value"),
        ("[]", "schema version None, this is 1"),
        ('{"schema_version": 7}', "schema version 7, this is 1"),
        ('{"schema_version": 1, "state": "starting"}', "has only begun to start; wait for"),
    ],
)
def test_facts_that_do_not_make_a_cluster(text: str | None, what: str, tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path)
    if text is not None:
        cluster.layout.facts.write_text(text)
    for use in (lambda: cluster.nodes, lambda: cluster.run(["true"]), lambda: cluster.start_daemon("slurmdbd")):
        with pytest.raises(SluiceError, match=what):
            use()
    assert not cluster.is_up


def test_a_cluster_whose_processes_are_gone(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="the cluster does not run .*; remove it with: sluice cluster down"):
        DevCluster(tmp_path).daemons()


def test_a_full_disk_ends_up_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dev_cluster.cluster.require_root", lambda verb: None)
    monkeypatch.setattr("dev_cluster.cluster.SlurmTree.check", lambda tree, accounting: None)
    monkeypatch.setattr("dev_cluster.boot.Boot.run", full)
    folder = tmp_path / "c"
    with pytest.raises(SluiceError, match=f"^{folder}: No space left on device"):
        DevCluster(folder).up("demo")
    assert not folder.exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dev_cluster.cluster.require_root", lambda verb: None)
    monkeypatch.setattr("dev_cluster.cluster.SlurmTree.check", lambda tree, accounting: None)
    monkeypatch.setattr("dev_cluster.boot.Boot.run", lambda *_, **__: pytest.fail("booted"))
    tmp_path.chmod(0o700)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="nor empty; name another"):
        DevCluster(tmp_path).up("demo")
    with pytest.raises(UsageError, match="holds no cluster"):
        DevCluster(tmp_path).down()
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_where_a_cluster_is_when_nobody_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLUICE_CLUSTER_DIR", str(tmp_path))
    assert DevCluster().folder == tmp_path
    monkeypatch.delenv("SLUICE_CLUSTER_DIR")
    assert default_folder() == Path("/run/sluice-cluster")
    monkeypatch.chdir(tmp_path)
    assert DevCluster(Path("x")).folder == tmp_path / "x"
