"""What goes around a change of a node's partitions, with a scontrol that answers what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from prolog_epilog.relayout import REASON, Relayout, _plain
from sluice_base.errors import SluiceError
from slurm_client.commands import Commands

SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/asked
case "$1" in
update)
  case "$*" in *state=drain*) echo IDLE+DRAIN > {folder}/state; echo "{reason}" > {folder}/reason;; esac
  case "$*" in *state=resume*) echo IDLE > {folder}/state; : > {folder}/reason;; esac ;;
show) echo "NodeName=n1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=$(cat {folder}/alloc) CPUTot=2 Gres=gpu:h100:8 \
NodeAddr=n1 NodeHostName=n1 RealMemory=10 AllocMem=0 FreeMem=1 Sockets=2 Boards=1 State=$(cat {folder}/state) \
ThreadsPerCore=1 Weight=1 Partitions=main Reason=$(cat {folder}/reason)" ;;
esac
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        (bin_folder / "scontrol").write_text(SCONTROL.format(folder=folder, reason=REASON))
        (bin_folder / "scontrol").chmod(0o755)
        (folder / "asked").touch()
        self.set("IDLE")
        self.told: list[str] = []
        self.relayout = Relayout(
            "n1", Commands(prefix=folder), self.told.append, agent=str(folder / "none"), period=0.01
        )

    def set(self, state: str, reason: str = "", alloc: int = 0) -> None:
        for name, text in (("state", state), ("reason", reason), ("alloc", str(alloc))):
            (self.folder / name).write_text(text)

    def updates(self) -> list[str]:
        return [line for line in (self.folder / "asked").read_text().splitlines() if line.startswith("update")]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def test_a_node_is_drained_once_and_resumed_by_who_drained_it(slurm: Slurm) -> None:
    slurm.relayout.drain(0)
    slurm.relayout.drain(0)  # as after a kill
    assert len(slurm.updates()) == 1 and slurm.relayout.drained_by_us()
    slurm.relayout.resume()
    slurm.relayout.resume()
    assert [line.split()[2] for line in slurm.updates()] == ["state=drain", "state=resume"]


def test_who_else_drained_it_keeps_it_drained(slurm: Slurm) -> None:
    slurm.set("IDLE+DRAIN", "fan")
    slurm.relayout.drain(0)
    slurm.relayout.resume()
    assert slurm.updates() == [] and "was drained already (fan" in slurm.told[0]


@pytest.mark.parametrize(
    ("state", "alloc"), [("MIXED", 1), ("ALLOCATED", 2), ("IDLE+DRAIN+COMPLETING", 0), ("IDLE", 1)]
)
def test_nothing_is_touched_while_jobs_or_their_epilogs_run(slurm: Slurm, state: str, alloc: int) -> None:
    slurm.set(state if "DRAIN" in state else f"{state}+DRAIN", REASON, alloc)
    with pytest.raises(SluiceError, match=r"jobs are on it .*; it is drained, and no GPU was touched"):
        slurm.relayout.drain(0.05)


def test_without_an_agent_there_is_nothing_to_tell(slurm: Slurm) -> None:
    slurm.relayout.pause_agent()
    slurm.relayout.refresh_agent()


def test_a_node_that_slurm_does_not_have(tmp_path: Path) -> None:
    other = Slurm(tmp_path).relayout
    other.name = "n9"
    with pytest.raises(SluiceError, match="node 'n9': Slurm has none of that name; name it with --node"):
        other.node()


def test_gres_as_slurm_writes_it() -> None:
    slurms = "gpu:h100_3g.40gb:2(S:0),gpu:h100:7(S:0-1),shard:h100_3g.40gb:79K(S:0),shard:h100:567056(S:0-1)"
    assert _plain(slurms) == _plain("gpu:h100_3g.40gb:2,gpu:h100:7,shard:647952")
    assert _plain("gpu:h100:8") != _plain("gpu:h100:7") and _plain("(null)") == _plain("") == {}
