"""Staging of models: one copy, whole and checked, or none."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from sluice.serve.replica.pieces import Pieces
from sluice.serve.replica.stage import StageError, find_staged, stage
from tests.unit.serve.replica_bed import ROOT, spec_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "deepseek"
    (folder / "part").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "part" / "weights").write_bytes(os.urandom(3 << 20))
    (tmp_path / "blob").write_bytes(b"linked")
    (folder / "link").symlink_to(tmp_path / "blob")  # as in a cache of Hugging Face's
    (tmp_path / "stage").mkdir()
    return folder


def digest_of(folder: Path) -> str:
    """By the programs that the documents name."""
    done = subprocess.run(
        "find -L . -type f -printf '%P\\n' | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum",
        shell=True, cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()[0]


def entries(stage_folder: Path) -> list[str]:
    return sorted(one.name for one in (stage_folder / f"sluice-{os.geteuid()}").iterdir() if one.suffix != ".lock")


def test_a_folder_is_copied_once_and_found_then(tmp_path: Path, model: Path) -> None:
    spec = spec_of(model, stage=str(tmp_path / "stage"), sha256=digest_of(model))
    assert find_staged(spec) is None
    staged = stage(spec)
    assert staged.path.is_relative_to(tmp_path / "stage") and staged.copied == (3 << 20) + 2 + 6
    assert (staged.path / "link").read_bytes() == b"linked" and not (staged.path / "link").is_symlink()
    assert digest_of(staged.path) == spec.sha256
    assert staged.path.stat().st_uid == os.geteuid() and staged.path.parent.stat().st_mode & 0o077 == 0
    again = find_staged(spec)
    assert again is not None and again.path == staged.path and len(entries(tmp_path / "stage")) == 1


def test_one_file_is_hashed_as_sha256sum_does(tmp_path: Path, model: Path) -> None:
    weights = model / "part" / "weights"
    spec = spec_of(weights, stage=str(tmp_path / "stage"), sha256=hashlib.sha256(weights.read_bytes()).hexdigest())
    assert stage(spec).path.read_bytes() == weights.read_bytes()
    assert stage(spec_of(weights, sha256=spec.sha256)).path == weights


@pytest.mark.parametrize("staged", [True, False])
def test_another_hash_is_refused_and_nothing_stays(tmp_path: Path, model: Path, staged: bool) -> None:
    spec = spec_of(model, stage=str(tmp_path / "stage") if staged else None, sha256="0" * 64)
    with pytest.raises(StageError, match=f"its SHA-256 is {digest_of(model)}, and not 0000"):
        stage(spec)
    if staged:
        assert entries(tmp_path / "stage") == []


def test_a_model_that_changes_while_it_is_copied_is_not_used(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Pieces.read_source

    def read(pieces: Pieces, number: int) -> bytes:
        data = real(pieces, number)
        with (model / "config.json").open("ab") as other:
            other.write(b"x")
        return data

    monkeypatch.setattr(Pieces, "read_source", read)
    with pytest.raises(StageError, match="changed while it was copied"):
        stage(spec_of(model, stage=str(tmp_path / "stage")))
    assert not entries(tmp_path / "stage")


def test_a_copy_that_is_stopped_leaves_nothing(tmp_path: Path, model: Path) -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(StageError, match="not staged any more"):
        stage(spec_of(model, stage=str(tmp_path / "stage")), stopped)
    assert not entries(tmp_path / "stage")


def test_a_model_that_is_replaced_is_staged_again(tmp_path: Path, model: Path) -> None:
    spec = spec_of(model, stage=str(tmp_path / "stage"))
    first = stage(spec)
    (model / "config.json").write_text('{"new": 1}')
    assert find_staged(spec) is None
    second = stage(spec)
    assert second.path != first.path and (second.path / "config.json").read_text() == '{"new": 1}'


@pytest.mark.parametrize("what", ["missing", "empty", "link to a folder", "fifo"])
def test_what_is_no_model_is_named(tmp_path: Path, model: Path, what: str) -> None:
    bad = tmp_path / "bad"
    if what != "missing":
        bad.mkdir()
    if what == "link to a folder":
        (bad / "to").symlink_to(model)
    if what == "fifo":
        os.mkfifo(bad / "pipe")
    with pytest.raises(StageError, match=str(bad)):
        stage(spec_of(bad, stage=str(tmp_path / "stage")))


@pytest.mark.parametrize("trap", ["link", "open folder", "folder of others"])
def test_nothing_of_others_is_used(tmp_path: Path, model: Path, trap: str) -> None:
    """Another user can make what is in the way, and gets nothing of the model."""
    place, theirs = tmp_path / "stage", tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    mine = place / f"sluice-{os.geteuid()}"
    if trap == "link":
        mine.symlink_to(theirs)
    elif trap == "open folder":
        mine.mkdir()
        mine.chmod(0o777)
    else:
        place.chmod(0o777)  # without the sticky bit: others can rename what is in it
    with pytest.raises(StageError, match="stage"):
        stage(spec_of(model, stage=str(place)))
    assert list(theirs.iterdir()) == []


STAGE = """
import json, os, sys, time
from sluice.exchange.serving import ReplicaSpec
from sluice.serve.replica.stage import stage
given = json.loads(sys.argv[1])
staged = stage(ReplicaSpec(**given))
print(staged.path, staged.copied)
"""


def test_eight_replicas_at_once_make_one_copy(tmp_path: Path, model: Path) -> None:
    (model / "large").write_bytes(os.urandom(40 << 20))
    spec = spec_of(model, stage=str(tmp_path / "stage"), sha256=digest_of(model))
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", STAGE, json.dumps(asdict(spec))],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(8)
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0].split() for process in started]
    assert len({path for path, _ in said}) == 1
    assert sorted(copied != "0" for _, copied in said) == [False] * 7 + [True]
    assert len(entries(tmp_path / "stage")) == 1 and digest_of(Path(said[0][0])) == spec.sha256


def test_what_a_killed_replica_left_is_removed(tmp_path: Path, model: Path) -> None:
    spec = spec_of(model, stage=str(tmp_path / "stage"))
    stage(spec).release()
    folder = tmp_path / "stage" / f"sluice-{os.geteuid()}"
    left = folder / f".part.other.{'0' * 32}"
    left.mkdir()
    (left / "model").write_bytes(b"half")
    (model / "config.json").write_text("[]")
    stage(spec).release()
    assert not left.exists() and len(entries(tmp_path / "stage")) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a disk of 16 MiB")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def make(folder: Path, name: str, mib: int) -> Path:
    path = folder / name
    path.write_bytes(os.urandom(mib << 20))
    return path


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, small_disk: Path) -> None:
    with pytest.raises(StageError, match=r"the model needs 20M, and 15M are free; free room there"):
        stage(spec_of(make(tmp_path, "weights", 20), stage=str(small_disk)))
    assert entries(small_disk) == []


def test_a_disk_that_others_fill_meanwhile(tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room was there when it was looked for."""
    monkeypatch.setattr("sluice.serve.replica.stage._make_room", lambda *_: None)
    with pytest.raises(StageError, match="the model needs 20M"):
        stage(spec_of(make(tmp_path, "weights", 20), stage=str(small_disk)))
    assert entries(small_disk) == []


def test_the_least_recently_used_gives_way_and_what_is_used_does_not(tmp_path: Path, small_disk: Path) -> None:
    models = {name: spec_of(make(tmp_path, name, 6), stage=str(small_disk)) for name in ("a", "b", "c")}
    for age, name in ((300, "a"), (200, "b")):
        staged = stage(models[name])
        assert staged.lock is not None
        os.utime(staged.lock, (1_700_000_000 - age,) * 2)
        staged.release()
    used = find_staged(models["a"])  # again: now "b" is the one that was used longest ago
    assert used is not None
    stage(models["c"]).release()
    assert [name[0] for name in entries(small_disk)] == ["a", "c"]
    kept = find_staged(models["c"])
    with pytest.raises(StageError, match="needs 12M"):
        stage(spec_of(make(tmp_path, "d", 12), stage=str(small_disk)))
    assert [name[0] for name in entries(small_disk)] == ["a", "c"] and kept is not None
    used.release()
    kept.release()
    stage(spec_of(tmp_path / "d", stage=str(small_disk))).release()
    assert [name[0] for name in entries(small_disk)] == ["d"]


def test_the_copy_does_not_change_with_the_model(tmp_path: Path, model: Path) -> None:
    staged = stage(spec_of(model, stage=str(tmp_path / "stage")))
    shutil.rmtree(model)
    assert (staged.path / "link").read_bytes() == b"linked"
