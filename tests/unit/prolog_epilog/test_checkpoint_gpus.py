"""Which GPUs a saved job can go on with, what is known before it is saved, and that nothing is lost where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policy.checkpoint import NodeSystem
from prolog_epilog.cgroups import memory_room
from prolog_epilog.checkpoint.gpus import Amd, Gpu, Gpus, NeverError, Pairs, from_facts, to_facts
from prolog_epilog.checkpoint.images import Run
from prolog_epilog.checkpoint.saver import Saver
from prolog_epilog.server import Peer
from sluice.base.errors import SluiceError
from tests.unit.prolog_epilog.saved_images import fake_criu

A, B, C = (Gpu(f"GPU-{name * 4}", "nvidia", "H100", 81559, "580.65.06") for name in "abc")
ROOT = Peer(1, 0)


class Driver:
    """One that notes what is asked of it."""

    def __init__(self, *, new: bool = True, why: str = "") -> None:
        self.new, self.why = new, why
        self.asked: list[Any] = []
        self.refuses: set[str] = set()
        self.kind: type[SluiceError] = SluiceError

    def problem(self) -> str:
        return self.why

    def remaps(self) -> bool:
        return self.new

    def suspend(self, init: int, pids: Iterable[int], seconds: float, lock: int) -> None:
        self._do("suspend", list(pids))

    def resume(self, pids: Iterable[int], pairs: Pairs, lock: int) -> None:
        self._do("resume", pairs)

    def _do(self, act: str, what: Any) -> None:
        self.asked.append((act, what))
        if act in self.refuses:
            raise self.kind(f"cannot {act}")


def gpus_with(driver: Driver, given: list[Gpu], held: int = 0) -> Gpus:
    made = Gpus(lambda _: given, lambda _: held)
    made._vendors["nvidia"] = driver
    return made


@pytest.mark.parametrize(
    ("had", "has", "pairs"),
    [
        ([], [], []),
        ([A], [A], []),
        ([A, B], [B, A], []),  # the same ones: each is known by its UUID
        ([A], [B], [(A, B)]),
        ([A, B], [B, C], [(A, C), (B, B)]),  # one that is there stays
        ([A, B], [C, A], [(A, A), (B, C)]),
    ],
)
def test_which_gpu_takes_whose_place(had: list[Gpu], has: list[Gpu], pairs: list[tuple[Gpu, Gpu]]) -> None:
    gpus = gpus_with(Driver(), has)
    assert gpus.pairs(from_facts(to_facts(had)), has) == [(old.uuid, new.uuid) for old, new in pairs]


@pytest.mark.parametrize(
    ("had", "has", "new", "why"),
    [
        ([A], [], True, "had 1 GPUs, and has 0"),
        ([A], [replace(B, model="A100")], True, "model was H100, and is A100"),
        ([A], [replace(B, memory_mib=40960)], True, "memory in MiB was 81559"),
        ([A], [replace(A, driver="580.95.05")], True, "driver was 580.65.06, and is 580.95.05"),
        ([A], [B], False, "580 or later"),
    ],
)
def test_where_it_cannot_go_on(had: list[Gpu], has: list[Gpu], new: bool, why: str) -> None:
    with pytest.raises(SluiceError, match=why):
        gpus_with(Driver(new=new), has).pairs(had, has)


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        (A, ""),
        (replace(A, part="1g.10gb"), "a part of a GPU"),
        (replace(A, vendor="intel"), "GPUs of intel"),
        (replace(A, vendor="amd"), "amdgpu"),
    ],
)
def test_what_is_known_before(gpu: Gpu, why: str) -> None:
    found = gpus_with(Driver(), []).problem([gpu])
    assert why in found and bool(why) == bool(found)
    assert gpus_with(Driver(why="too old"), []).problem([A]) == "too old"
    assert Amd().problem()


# ---- saving ----


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """The first process of a job, and one below it."""
    words = "import subprocess, time; subprocess.Popen(['sleep', '600']); print(flush=True); time.sleep(600)"
    made = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, start_new_session=True)
    assert made.stdout is not None and made.stdout.readline()
    yield made
    subprocess.run(["kill", "-9", "--", f"-{made.pid}"], check=False)
    made.wait()


def saver_of(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: Gpus, act: str) -> tuple[Saver, list[Any]]:
    program = fake_criu(folder / "criu", act)
    ordered: list[Any] = []
    system = NodeSystem(criu=str(program))
    saver = Saver(folder / "made", lambda: system, folder / "ready", lambda *run: ordered.append(run), gpus)
    saver.images.prepare()
    monkeypatch.setattr(saver, "_cannot_return", lambda run: "")
    return saver, ordered


def save(saver: Saver, process: subprocess.Popen[bytes]) -> None:
    saver.save(peer=ROOT, job=7, uid=65534, restarts=0, init=process.pid)


WORKS = 'printf magicmag >"$2/files.img"'


def test_it_is_off_its_gpus_before_criu_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    driver = Driver()
    saver, ordered = saver_of(tmp_path, monkeypatch, gpus_with(driver, [A]), WORKS)
    monkeypatch.setattr("prolog_epilog.checkpoint.opened.rights", lambda init, uid: set())
    save(saver, process)
    assert [act for act, _ in driver.asked] == ["suspend"] and len(driver.asked[0][1]) == 1
    assert ordered == [(7, 0)] and process.wait(10) == -9
    assert from_facts(saver.images.facts(Run(7, 65534, 0))["gpus"]) == [A]


def test_where_criu_cannot_it_is_on_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    driver = Driver()
    saver, ordered = saver_of(tmp_path, monkeypatch, gpus_with(driver, [A]), "exit 1")
    with pytest.raises(SluiceError, match="ended with 1"):
        save(saver, process)
    assert [act for act, _ in driver.asked] == ["suspend", "resume"] and driver.asked[1][1] == []
    assert ordered == [] and process.poll() is None


def test_a_state_that_is_lost_costs_the_run_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    driver = Driver()
    told: list[str] = []
    driver.refuses = {"resume"}
    saver, ordered = saver_of(tmp_path, monkeypatch, gpus_with(driver, [A]), "exit 1")
    saver.told = lambda job, words: told.append(words)
    with pytest.raises(SluiceError):
        save(saver, process)
    assert ordered == [(7, 0)] and process.wait(10) == -9 and "begins again from its start" in told[0]


def test_a_run_that_cannot_go_on_is_ended_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    """Its calls to the GPU would wait for ever."""

    def full(job: int, restarts: int) -> None:
        raise OSError(28, "No space left on device")

    driver = Driver()
    driver.refuses = {"resume"}
    saver, _ = saver_of(tmp_path, monkeypatch, gpus_with(driver, [A]), "exit 1")
    monkeypatch.setattr(saver, "_requeue", full)
    with pytest.raises(OSError, match="No space"):
        save(saver, process)
    assert process.wait(10) == -9


def left_by_a_killed_agent(saver: Saver, process: subprocess.Popen[bytes], wrong: int = 0) -> Path:
    note = saver.images.folder / "work/.7.saving"
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()[19])
    note.write_text(json.dumps({"uid": 65534, "restarts": 0, "init": process.pid, "started": started + wrong}))
    return note


def test_what_a_killed_agent_left_off_its_gpus_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    driver = Driver()
    saver, ordered = saver_of(tmp_path, monkeypatch, gpus_with(driver, [A]), WORKS)
    note = left_by_a_killed_agent(saver, process, wrong=1)
    saver.settle()
    assert driver.asked == [] and not note.exists()  # the number is another process's now
    note = left_by_a_killed_agent(saver, process)
    monkeypatch.setattr(saver, "_is_saved", lambda run, init: True)
    saver.settle()
    assert driver.asked == [] and note.exists()  # its helper asks again
    monkeypatch.setattr(saver, "_is_saved", lambda run, init: False)
    with saver._alone(7):
        saver.settle()
    assert driver.asked == []
    saver.settle()
    assert driver.asked == [("resume", [])] and not note.exists() and process.poll() is None and ordered == []


def test_files_that_a_killed_agent_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, _ = saver_of(tmp_path, monkeypatch, gpus_with(Driver(), [A]), WORKS)
    old, new = saver.images.work(7), saver.images.work(8)
    for work in (old, new):
        work.mkdir()
        (work / "pages-1.img").write_text("secret")
    os.utime(old, (1, 1))
    saver.prune()
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("kind", [SluiceError, NeverError])
def test_what_the_driver_cannot_save_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes], kind: type[SluiceError]
) -> None:
    """Not a driver that was late or killed once."""
    driver = Driver()
    driver.kind = kind
    found: dict[int, str] = {}
    driver.refuses = {"suspend"}
    saver, _ = saver_of(tmp_path, monkeypatch, gpus_with(driver, [A]), WORKS)
    saver.found_unsaved = found.__setitem__
    with pytest.raises(SluiceError, match="cannot suspend"):
        save(saver, process)
    assert found == ({7: "cannot suspend"} if kind is NeverError else {}) and process.poll() is None


def test_what_does_not_fit_into_the_jobs_memory_stays_on_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    driver = Driver()
    saver, _ = saver_of(tmp_path, monkeypatch, gpus_with(driver, [A], 8 << 20), WORKS)
    monkeypatch.setattr("prolog_epilog.checkpoint.saver.memory_room", lambda init: 4 << 20)
    with pytest.raises(SluiceError, match="8 MiB on its GPUs do not fit into the rest of its memory, 4 MiB"):
        save(saver, process)
    assert ("suspend", [process.pid]) not in driver.asked and process.poll() is None


@pytest.mark.parametrize("version", [1, 2])
def test_the_room_that_a_cgroup_leaves(tmp_path: Path, version: int) -> None:
    """The least of it and those above."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    base = tmp_path / "cgroup" / ("" if version == 2 else "memory")
    task = base / "job_7/step_batch"
    task.mkdir(parents=True)
    (tmp_path / "proc/9").mkdir(parents=True)
    line = "0::" if version == 2 else "4:cpu,memory:"
    (tmp_path / "proc/9/cgroup").write_text(f"3:freezer:/elsewhere\n{line}/job_7/step_batch\n")

    def room() -> int:
        return memory_room(9, tmp_path / "proc", tmp_path / "cgroup")

    assert room() == 1 << 62
    for name, text in zip(names, ("max" if version == 2 else str(1 << 62), "100"), strict=True):
        (task / name).write_text(text)
    assert room() >= (1 << 62) - 100
    for name, text in zip(names, ("1000", "400"), strict=True):
        (task.parent / name).write_text(text)
    assert room() == 600
    (task / names[0]).write_text("500")
    assert room() == 400
    (task / names[1]).write_text("700")
    assert room() == 0
    total = "total_" if version == 1 else ""
    more = "" if version == 2 else "inactive_file 1\n"
    (task / "memory.stat").write_text(f"anon 9\n{more}{total}inactive_file 200\n{total}active_file 60\n")
    assert room() == 60  # files in the page cache give way
