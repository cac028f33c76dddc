"""The steps around a change of a node's partitions, with a scontrol whose answers a test sets."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gres_probe.inventory import Problem, Vendor
from prolog_epilog import relayout
from prolog_epilog.relayout import NOT_RESTORED, REASON, Relayout, _plain
from sluice.base.errors import SluiceError
from sluice.base.slurm_version import OLDEST
from sluice.slurm.commands import Commands
from tests.unit.gres_probe.machines import mig

SCONTROL = """#!/bin/sh
echo "$@" >> {folder}/asked
left=$(cat {folder}/away)
if [ "$left" -gt 0 ]; then echo $((left - 1)) > {folder}/away; echo "Unable to contact slurm controller" >&2; exit 1; fi
case "$1" in
update)
  case "$3" in state=drain) echo IDLE+DRAIN > {folder}/state; echo "${{4#reason=}} [root@now]" > {folder}/reason;; esac
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
        (bin_folder / "scontrol").write_text(SCONTROL.format(folder=folder))
        (bin_folder / "scontrol").chmod(0o755)
        (folder / "asked").touch()
        (folder / "away").write_text("0")
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


def refuse() -> None:
    raise SluiceError("GPU 3 (H100): processes use it", remedy="see: nvidia-smi")


def fail() -> None:
    raise RuntimeError("what\nnobody expected")


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    time.sleep(600)


def test_what_a_start_has_undone_is_laid_out_without_a_word_to_slurm(slurm: Slurm) -> None:
    slurm.relayout.restore(lambda: (slurm.folder / "laid out").touch(), limit=60, wait=0)
    assert (slurm.folder / "laid out").exists() and (slurm.folder / "asked").read_text() == "" and slurm.told == []


@pytest.mark.parametrize(
    ("work", "limit", "why"),
    [
        (refuse, 60, r"GPU 3 \(H100\): processes use it"),
        (fail, 60, "RuntimeError: what nobody expected"),
        (crash, 60, r"a driver's library crashed \(-11\)"),
        (hang, 0.2, "a driver gave no answer for 0 s"),
    ],
)
def test_where_it_cannot_be_the_node_is_drained_and_says_why(
    slurm: Slurm, work: Callable[[], None], limit: float, why: str
) -> None:
    with pytest.raises(SluiceError, match=why):
        slurm.relayout.restore(work, limit=limit, wait=0)
    [update] = slurm.updates()
    assert re.search(f"state=drain reason={NOT_RESTORED}: {why}", update)
    assert slurm.relayout.drained_by_us()
    slurm.relayout.drain(0)  # by `sluice mig apply`, once it is mended
    slurm.relayout.resume()
    assert [line.split()[2] for line in slurm.updates()] == ["state=drain", "state=resume"]


def test_a_controller_that_is_not_up_yet_is_waited_for(slurm: Slurm) -> None:
    (slurm.folder / "away").write_text("3")
    with pytest.raises(SluiceError, match="processes use it"):
        slurm.relayout.restore(refuse, limit=60, wait=60)
    assert slurm.relayout.drained_by_us()


def test_without_a_controller_the_failure_is_still_reported(slurm: Slurm) -> None:
    (slurm.folder / "away").write_text("1000000")
    with pytest.raises(SluiceError, match="processes use it"):
        slurm.relayout.restore(refuse, limit=60, wait=0.05)
    assert slurm.updates() == [] and "could not be drained" in slurm.told[0]


def test_a_node_that_was_drained_keeps_its_reason_when_it_starts(slurm: Slurm) -> None:
    slurm.set("DOWN+DRAIN", "fan")
    with pytest.raises(SluiceError, match="processes use it"):
        slurm.relayout.restore(refuse, limit=60, wait=0)
    assert slurm.updates() == [] and "was drained already (fan" in slurm.told[0]


def test_a_node_in_service_is_not_laid_out_as_one_that_starts(slurm: Slurm) -> None:
    (slurm.folder / "agent").mkdir()
    (slurm.folder / "agent/lock").touch()
    with pytest.raises(SluiceError, match="its agent has run since it started.*sluice mig apply"):
        slurm.relayout.restore(fail, limit=60, wait=0)
    assert (slurm.folder / "asked").read_text() == ""


def test_a_node_that_slurm_does_not_have(tmp_path: Path) -> None:
    other = Slurm(tmp_path).relayout
    other.name = "n9"
    with pytest.raises(SluiceError, match="node 'n9': not in Slurm's configuration; name it with --node"):
        other.node()


def test_gres_is_not_written_without_what_was_laid_out(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm leaves GPUs that gres.conf does not name open to every job, so the node stays drained."""
    inventory, conf = mig("n1"), slurm.folder / "slurm.conf"
    conf.touch()
    monkeypatch.setattr(relayout, "probe_node", lambda node, timeout: inventory)
    slurm.relayout.drain(0)

    def write(what: str, index: int | None, why: str) -> None:
        inventory.problems = [Problem(Vendor.NVIDIA, what, "make the files", index)]
        with pytest.raises(SluiceError, match=why):
            slurm.relayout.write_gres(conf, slurm.folder / "inventory", OLDEST, {"nvidia"})

    write("no file for gpu0/gi2", 0, "not written: no file for gpu0/gi2; make the files; then run: sluice mig apply")
    gpus, inventory.gpus = inventory.gpus, []
    write("no answer", None, "not written: no answer; see: sluice probe, dmesg; then run: sluice mig apply")
    assert not list(slurm.folder.rglob("*.sluice.conf")) and not (slurm.folder / "inventory").exists()
    inventory.gpus = gpus
    write("the driver lists 2 of 3 GPUs", None, "Slurm still has gpu:h100:8; it stays drained")
    assert slurm.told[0] == "left out of GRES: the driver lists 2 of 3 GPUs" and slurm.relayout.drained_by_us()


def test_gres_as_slurm_writes_it() -> None:
    slurms = "gpu:h100_3g.40gb:2(S:0),gpu:h100:7(S:0-1),shard:h100_3g.40gb:79K(S:0),shard:h100:567056(S:0-1)"
    assert _plain(slurms) == _plain("gpu:h100_3g.40gb:2,gpu:h100:7,shard:647952")
    assert _plain("gpu:h100:8") != _plain("gpu:h100:7") and _plain("(null)") == _plain("") == {}
