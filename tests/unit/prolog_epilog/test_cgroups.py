"""Whose a process is, by Slurm's own cgroups; trees of /proc and /sys/fs/cgroup as Slurm 22.05 and 24.11 make them."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from prolog_epilog import cgroups
from prolog_epilog.cgroups import Place, freezable, jobs_here, parse_place, place_of

JOB_1 = "slurm_n1/uid_1000/job_12"
JOB_2 = "system.slice/n1_slurmstepd.scope/job_12"
STEP_1 = f"9:freezer:/{JOB_1}/step_0\n5:devices:/{JOB_1}/step_0/task_0\n0::/\n"
STEP_2 = f"0::/{JOB_2}/step_0/user/task_0\n"
EXITED_1 = "9:freezer:/\n5:devices:/\n0::/\n"
EXITING = 0x4


def process(
    proc: Path, pid: int, text: str, *, flags: int = 0, threads: dict[int, tuple[str, int]] | None = None
) -> None:
    """A process, and its other threads: what their cgroup files say, and their flags."""
    for folder, (said, of) in {
        proc / str(pid): (text, flags),
        **{proc / str(pid) / "task" / str(tid): one for tid, one in {pid: (text, flags), **(threads or {})}.items()},
    }.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup").write_text(said)
        (folder / "stat").write_text(f"{folder.name} (a) b) S 1 1 1 0 -1 {of} 0 0\n")


@pytest.mark.parametrize(
    "path",
    [
        "/user.slice/user-1001.slice/user@1001.service/job_33/step_0",
        "/user.slice/user-1001.slice/system.slice/slurmstepd.scope/job_33/step_0/user/task_0",
        "/user.slice/slurm/uid_1000/job_33/step_0",
        "/slurm/uid_1000x/job_33/step_0",
        "/slurmy/uid_1000/job_33/step_0",
        "/docker/1234/slurm/uid_1000/job_33/step_0",
        "/../system.slice/slurmstepd.scope/job_33/step_0/user",
        "/system.slice/slurmstepd.scope/system/job_33/step_0",
        "/system.slice/slurmstepd.scopes/job_33/step_0",
        "/job_33/step_0",
    ],
)
def test_a_cgroup_that_only_bears_a_jobs_name_is_none(path: str) -> None:
    assert parse_place(f"9:freezer:{path}\n") is None and parse_place(f"0::{path}\n") is None


def test_what_a_user_makes_in_a_jobs_cgroup_is_that_jobs() -> None:
    assert parse_place(STEP_2.replace("task_0", "task_0/job_33/step_1")) == Place(12, "0")
    assert parse_place(STEP_1.replace("step_0\n", "step_0/job_33/step_1\n")) == Place(12, "0")


def test_long_paths_that_a_user_makes_are_not_kept_in_memory() -> None:
    tracemalloc.start()
    try:
        for number in range(64):
            assert parse_place(f"5:devices:/{number:04000}\n4:memory:/{number:04000}\n{STEP_1}") == Place(12, "0")
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 128 << 10


def test_slurmstepd_is_distinguished_from_the_processes_of_its_step() -> None:
    assert not any(place and place.stepd for place in map(parse_place, (STEP_1, STEP_2)))
    for text in (f"0::/{JOB_2}/step_0/slurm\n", f"9:freezer:/\n5:devices:/{JOB_1}/step_0\n"):
        place = parse_place(text)
        assert place == Place(12, "0") and place.stepd


def test_version_1_tells_the_user_and_a_removed_cgroup_still_tells_its_job() -> None:
    place = parse_place(STEP_1)
    assert place is not None and place.uid == 1000
    gone = parse_place(STEP_2.replace("task_0", "task_0 (deleted)"))
    assert gone == Place(12, "0") and gone.uid is None


def test_where_the_leader_has_exited_its_first_living_thread_tells(tmp_path: Path) -> None:
    process(tmp_path, 50, EXITED_1, flags=EXITING, threads={51: (EXITED_1, EXITING), 52: (STEP_1, 0)})
    assert place_of(50, tmp_path) == Place(12, "0")
    process(tmp_path, 60, EXITED_1, flags=EXITING, threads={61: (EXITED_1, EXITING)})
    assert place_of(60, tmp_path) is None and cgroups.threads_of(60, tmp_path).ending
    process(tmp_path, 70, EXITED_1, threads={71: (STEP_1, 0)})  # its leader lives, and is in no job
    assert place_of(70, tmp_path) is None and not cgroups.has_exited(70, tmp_path)


def test_only_so_many_threads_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    honest = cgroups.read
    monkeypatch.setattr(cgroups, "read", lambda path: read.append(path) or honest(path))
    process(tmp_path, 1, EXITED_1, flags=EXITING, threads={tid: (EXITED_1, EXITING) for tid in range(2, 500)})
    assert place_of(1, tmp_path) is None and not cgroups.threads_of(1, tmp_path).ending  # nobody knows
    assert len(read) < 100


@pytest.mark.parametrize(
    ("text", "folder", "file"),
    [
        (STEP_1, f"freezer/{JOB_1}", "freezer.state"),
        (STEP_2, JOB_2, "cgroup.freeze"),
        (STEP_2, f"unified/{JOB_2}", "cgroup.freeze"),
    ],
)
def test_the_folder_by_which_a_whole_job_can_be_frozen(tmp_path: Path, text: str, folder: str, file: str) -> None:
    proc, root = tmp_path / "proc", tmp_path / "root"
    process(proc, 5, text)
    assert freezable(5, proc, root) is None
    (root / folder).mkdir(parents=True)
    (root / folder / "cgroup.procs").touch()
    assert freezable(5, proc, root) is None  # nothing to freeze it by
    (root / folder / file).touch()
    assert freezable(5, proc, root) == root / folder
    process(proc, 6, STEP_2.replace("user/task_0", "slurm"))
    process(proc, 7, "0::/user.slice/job_12/step_0\n")
    in_version_2 = "system.slice" in str(folder)
    assert freezable(6, proc, root) == (root / folder if in_version_2 else None)  # a task that is being prepared
    assert freezable(7, proc, root) is None and freezable(8, proc, root) is None


def test_the_jobs_of_a_node_are_those_whose_cgroups_have_a_process(tmp_path: Path) -> None:
    assert jobs_here(tmp_path) == set()
    for folder, pids in ((f"freezer/{JOB_1}/step_0", "5\n"), ("freezer/slurm/uid_1/job_13/step_batch", "")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "cgroup.procs").write_text(pids)
    for job, populated in ((14, 1), (15, 0)):
        folder = tmp_path / f"system.slice/slurmstepd.scope/job_{job}"
        folder.mkdir(parents=True)
        (folder / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
    (tmp_path / "user.slice/job_16").mkdir(parents=True)
    assert jobs_here(tmp_path) == {12, 14}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_steps_folders_of_version_1_become_roots(tmp_path: Path) -> None:
    """Slurm gives them to the user, who could freeze there what is to be ended."""
    job = tmp_path / "freezer" / JOB_1
    for step in ("step_0", "step_extern"):
        (job / step).mkdir(parents=True)
        os.chown(job / step, 1000, 1000)
    (job / "cgroup.procs").touch()
    place = parse_place(STEP_1)
    assert place is not None
    cgroups.take_steps(place, tmp_path)
    assert [(job / step).stat().st_uid for step in ("step_0", "step_extern")] == [0, 0]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "9:freezer:/slurm_n1/uid_1000/job_12/step_0\n5:devices:/slurm_n1/uid_1000/job_12/step_0/task_3\n",
            Place(12, "0"),
        ),
        ("5:devices:/slurm/uid_1000/job_12/step_batch/task_0\n0::/\n", Place(12, "batch")),
        ("0::/system.slice/n1_slurmstepd.scope/job_12/step_extern/user/task_special\n", Place(12, "extern")),
        ("4:cpu,cpuacct:/slurm/uid_1/job_3/step_0\n", Place(3, "0")),
        ("9:freezer:/slurm/uid_1000/job_12\n", Place(12, "")),
        ("0::/user.slice/user-1000.slice/session-1.scope\n", None),
        ("1:name=x:/my_job_12/step_0\n0::/\n", None),  # not Slurm's, and not a hierarchy that it uses
        ("0::/x/job_99999999999/step_0\n", None),
        ("", None),
        ("nonsense", None),
    ],
)
def test_a_process_is_placed_by_its_cgroup(text: str, place: Place | None) -> None:
    assert parse_place(text) == place


def test_proctracks_own_hierarchy_decides() -> None:
    """The others are joined late, or moved by somebody else."""
    assert parse_place("5:devices:/slurm/uid_1/job_1/step_0\n9:freezer:/slurm/uid_1/job_2/step_1\n") == Place(2, "1")
