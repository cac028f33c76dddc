"""The demonstration says what it could not show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dev_cluster.demo import __main__ as demo
from dev_cluster.demo.stage import Stage
from sluice.plugin.sources import SourcesUnavailableError


def test_without_slurms_sources_it_shows_the_rest_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    class Cluster:
        """A cluster whose plugins cannot be built."""

        layout = SimpleNamespace(slurm=tmp_path)

        def __init__(self, folder: Path) -> None:
            pass

        def up(self, description: SimpleNamespace, **_: object) -> None:
            if description.sluice is not None:
                raise SourcesUnavailableError("apt-get update: no network", remedy="connect this machine")
            shown.append("up")

        def down(self) -> None:
            shown.append("down")

    monkeypatch.setattr(demo, "DevCluster", Cluster)
    monkeypatch.setattr(demo, "require_root", lambda _: None)
    for chapter in ("discover", "submit", "enforce", "schedule", "health", "failover", "usage", "page"):
        monkeypatch.setattr(demo, chapter, lambda _, chapter=chapter, **__: shown.append(chapter))
    assert demo.main() == 1
    assert shown == ["up", "discover", "submit", "usage", "page", "down"]
    said = capsys.readouterr().err
    assert "not shown" in said
    assert "scheduling, health and failover (apt-get update: no network); connect this machine" in said


@pytest.mark.parametrize(
    ("shown", "gpus"),
    [
        ("     Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:h100:2(IDX:0,3)", "0,3"),
        ("     Nodes=n1 CPU_IDs=0 Mem=0 GRES=shard:h100:19456(4)", "4"),
        ("     Nodes=n1 CPU_IDs=0 Mem=0 GRES=shard:h100:19456(0/81008,0/81008,19456/81008)", "2"),
        ("     Nodes=n1 CPU_IDs=0 Mem=0 GRES=", "?"),
    ],
)
def test_the_gpus_of_a_job_as_either_slurm_shows_them(shown: str, gpus: str) -> None:
    cluster = SimpleNamespace(run=lambda _: SimpleNamespace(stdout=shown))
    assert Stage(cluster).gpus("1") == gpus  # type: ignore[arg-type]
