"""Folders for profiles: a job's own, whatever its user leaves there."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prolog_epilog import profiles
from prolog_epilog.cgroups import Place
from prolog_epilog.profiles import LIBRARY, PRELOAD, Profiles
from sluice.exchange.record import Grant, JobRecord

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to users")
BATCH = Place(7, "batch")


def a_record(vendor: str = "nvidia") -> JobRecord:
    record = JobRecord(7, 2001, "alice", "physics", "main", "n1", 0.0)
    record.grants.append(Grant(0, "GPU-0", vendor, "H100", 80 << 30))
    return record


ALL = {0: True}
"""Whether the policy has `profiles: all`."""


@pytest.fixture
def made(tmp_path: Path) -> Profiles:
    (tmp_path / "run").mkdir()
    for path in (tmp_path, *tmp_path.parents):  # pytest's own are closed to other users
        if path.stat().st_uid == os.geteuid() and len(path.parts) > 2:
            path.chmod(0o755)
    (tmp_path / LIBRARY).touch()
    found = Profiles(tmp_path / "profiles", tmp_path / "run/profile", tmp_path / LIBRARY, lambda: ALL[0])
    found.prepare({})
    found.prepare({})  # an agent that starts again
    return found


@needs_root
def test_a_folder_is_its_users_and_goes_with_the_job(
    made: Profiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = a_record()
    made.make(record)
    folder = tmp_path / "run/profile/7"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (2001, 0o700)
    found = made.exports(record, BATCH)
    assert found == {
        "SLUICE_PROFILE_FOLDER": str(folder / "batch"),
        "SLUICE_CHECKPOINT_FILE": str(folder / "checkpoint.saved"),
        "CUDA_INJECTION64_PATH": str(tmp_path / LIBRARY),
        "NCCL_PROFILER_PLUGIN": str(tmp_path / LIBRARY),
    }
    own_folder = ["SLUICE_PROFILE_FOLDER", "SLUICE_CHECKPOINT_FILE"]
    assert list(made.exports(a_record("amd"), BATCH)) == own_folder  # AMD's has a price also where nobody traces
    of_amd = made.exports(a_record("amd"), BATCH, asked=True)
    assert list(of_amd) == [*own_folder, "ROCP_TOOL_LIBRARIES"]
    assert of_amd["ROCP_TOOL_LIBRARIES"] == str(tmp_path / LIBRARY)
    assert list(made.exports(a_record("intel"), BATCH)) == own_folder
    of_intel = made.exports(a_record("intel"), BATCH, asked=True)
    assert {name: of_intel[name] for name in of_intel.keys() - set(own_folder)} == {
        "LD_PRELOAD": str(tmp_path / PRELOAD),
        "ZE_ENABLE_TRACING_LAYER": "1",
    }
    monkeypatch.setitem(ALL, 0, False)
    assert list(made.exports(record, BATCH)) == own_folder
    assert made.exports(record, BATCH, asked=True) == found
    woken: list[bool] = []
    made.on_retired = lambda: woken.append(True)
    made.retire(record)
    made.retire(record)
    assert woken == [True] and made.exports(record, BATCH) == {}
    made.sweep()
    assert list((tmp_path / "profiles").iterdir()) == []


@needs_root
def test_a_job_says_when_it_has_saved_and_cannot_say_another_time(made: Profiles, tmp_path: Path) -> None:
    record = a_record()
    assert made.saved(record) is None
    made.make(record)
    assert made.saved(record) is None
    file = tmp_path / "profiles/7/checkpoint.saved"
    before = time.time() - 1
    file.touch()
    os.utime(file, (1.0, 1.0))
    first = made.saved(record)
    assert first is not None and before < first < time.time() + 1
    file.unlink()
    file.symlink_to("/etc")  # nothing is followed
    again = made.saved(record)
    assert again is not None and again >= first
    made.make(record)  # it runs again
    assert made.saved(record) is None


@pytest.fixture
def mount() -> Iterator[Callable[[Path, Path], None]]:
    """A user may do so with FUSE, on what is the user's own; who asks such a file system may wait without an end."""
    made: list[Path] = []

    def bind(source: Path, over: Path) -> None:
        if subprocess.run(["mount", "--bind", source, over], check=False, capture_output=True).returncode:
            pytest.skip("mounting is not permitted here")
        made.append(over)

    yield bind
    for over in made:
        subprocess.run(["umount", "--lazy", over], check=True)


@needs_root
@pytest.mark.parametrize("over", ["7", "7/checkpoint.saved"])
def test_what_a_user_mounted_is_not_asked(
    made: Profiles, tmp_path: Path, mount: Callable[[Path, Path], None], over: str
) -> None:
    record, foreign = a_record(), tmp_path / "foreign"
    made.make(record)
    (tmp_path / "profiles/7/checkpoint.saved").touch()
    assert made.saved(record) is not None
    foreign.mkdir()
    (foreign / "checkpoint.saved").touch()
    mount(foreign if over == "7" else foreign / "checkpoint.saved", tmp_path / "profiles" / over)
    assert made.saved(record) is None
    assert bool(made.exports(record, BATCH)) == (over != "7")


@needs_root
def test_what_a_user_mounted_over_an_ended_folder_is_neither_opened_nor_emptied(
    made: Profiles, tmp_path: Path, mount: Callable[[Path, Path], None]
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o755)
    ended = tmp_path / "profiles/.ended-7-1"
    ended.mkdir()
    mount(foreign, ended)
    with pytest.raises(OSError, match="mounted"):
        made.sweep()
    assert foreign.stat().st_mode & 0o777 == 0o755


@needs_root
def test_what_a_user_left_is_removed_as_that_user(made: Profiles, tmp_path: Path) -> None:
    """A link leads nowhere, and what is not the user's stays."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    record = a_record()
    made.make(record)
    folder = tmp_path / "profiles/7"
    (folder / "0").mkdir()
    os.chown(folder / "0", 2001, 2001)
    (folder / "0/link").symlink_to(other)
    (folder / "roots").mkdir()
    (folder / "roots/file").touch()
    made.make(record)  # it runs again, with a folder of its own
    with pytest.raises(OSError, match="not empty"):
        made.sweep()
    assert (other / "file").exists() and list((tmp_path / "profiles/7").iterdir()) == []
    (left,) = (tmp_path / "profiles").glob(".ended-*")
    assert [path.name for path in left.rglob("*")] == ["roots", "file"]


@needs_root
def test_folders_that_a_user_closed_are_removed(made: Profiles, tmp_path: Path) -> None:
    record = a_record()
    made.make(record)
    folder = tmp_path / "profiles/7"
    script = "mkdir -p a/b/c && touch a/b/c/file && chmod 0 a/b/c && chmod 2500 a/b && chmod 0 a ."
    subprocess.run(["/bin/sh", "-c", script], cwd=folder, user=2001, group=2001, extra_groups=[], check=True)
    made.retire(record)
    made.sweep()
    assert list((tmp_path / "profiles").iterdir()) == []


@needs_root
def test_one_that_cannot_be_removed_keeps_no_other(made: Profiles, tmp_path: Path) -> None:
    for number in range(8):
        name = tmp_path / f"profiles/.ended-{number}-1"
        name.touch() if number in (3, 4) else name.mkdir()
    with pytest.raises(NotADirectoryError):
        made.sweep()
    assert {path.name for path in (tmp_path / "profiles").iterdir()} == {".ended-3-1", ".ended-4-1"}


def test_folders_of_jobs_that_ended_with_the_node_are_removed(made: Profiles, tmp_path: Path) -> None:
    """A reboot takes the records of running jobs, and nobody returns them."""
    for name in ("7", "8", "lost+found"):
        (tmp_path / "profiles" / name).mkdir()
    made.prepare({8: a_record()})
    made.sweep()
    assert {path.name for path in (tmp_path / "profiles").iterdir()} == {"8", "lost+found"}


def test_a_folder_that_stays_fails_no_job(made: Profiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    made.make(a_record())
    monkeypatch.setattr(Path, "rename", fails)
    made.make(a_record())
    made.retire(a_record())


@needs_root
def test_a_crowd_of_files_takes_root_no_longer_than_a_bound(
    made: Profiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "_REMOVE", ("/bin/sleep", "60"))
    monkeypatch.setattr(profiles, "_REMOVE_S", 0.2)
    record = a_record()
    made.make(record)
    (tmp_path / "profiles/7/file").touch()
    made.retire(record)
    begin = time.monotonic()
    with pytest.raises(OSError, match="not empty"):
        made.sweep()
    assert time.monotonic() - begin < 10
    made.make(record)
