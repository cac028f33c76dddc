"""What slurmctld's side writes of jobs that changed, read as it grows, is cut off, or is not continued."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.slurm.job_changes import FOLLOWED_S, WANTED, JobChanges, user_name
from sluice.slurm.text import _JOB_FIELDS


def a_line(number: int, **fields: Any) -> list[str]:
    values = dict.fromkeys(_JOB_FIELDS, "") | {"JobID": number, "State": "PENDING", "UserID": 1000} | fields
    return ["job", *map(str, (values[name] for name in _JOB_FIELDS))]


def put(folder: Path, number: int, *lines: list[Any]) -> None:
    with (folder / f"changes.{number:012}").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def look(at: float = 0.0) -> list[Any]:
    return ["look", at or time.time(), 3]


@pytest.fixture
def changes(tmp_path: Path) -> JobChanges:
    return JobChanges(tmp_path, lambda uid: f"user{uid}")


def test_what_changes_after_a_listing_began(tmp_path: Path, changes: JobChanges) -> None:
    assert not changes.begin() and changes.read() is None, "nothing is written"
    put(tmp_path, 3, ["begin", "x"], a_line(1), look())
    assert changes.begin()
    found = changes.read()
    assert found is not None and not found.jobs and time.time() - found.at < 5
    put(tmp_path, 3, a_line(2, Comment='né\n\x1f"', Name="x"), ["gone", 7], look(time.time() + 1))
    found = changes.read()
    assert found is not None and found.at > time.time() and found.jobs[7] is None
    job = found.jobs[2]
    assert job is not None
    assert (job.comment, job.user, job.uid, job.state) == ('né\n\x1f"', "user1000", 1000, "PENDING")
    found = changes.read()
    assert found is not None and not found.jobs


def test_a_look_that_is_not_all_there_is_read_later(tmp_path: Path, changes: JobChanges) -> None:
    put(tmp_path, 1, ["begin", "x"], look())
    assert changes.begin()
    whole = "".join(json.dumps(line) + "\n" for line in (a_line(5), look(), a_line(6), look()))
    seen: list[int] = []
    for place in range(0, len(whole), 7):
        with (tmp_path / "changes.000000000001").open("a") as file:
            file.write(whole[place : place + 7])
        found = changes.read()
        assert found is not None
        seen += found.jobs
    assert seen == [5, 6]


def test_the_next_file_is_read_after_the_end_of_one(tmp_path: Path, changes: JobChanges) -> None:
    put(tmp_path, 1, ["begin", "x"], look())
    assert changes.begin()
    put(tmp_path, 1, a_line(5), look())
    put(tmp_path, 2, ["on", "x"], a_line(6), look())
    seen = [found.jobs.keys() for _ in range(3) if (found := changes.read()) is not None]
    assert [list(one) for one in seen] == [[5], [6], []]


UNUSABLE: list[list[Any]] = [[["lost"]], [["begin", "y"]], [["job", "1"]], [["what"]], [[]], [7], [["look", "x"]]]


@pytest.mark.parametrize("lines", UNUSABLE)
def test_what_is_not_continued_or_not_understood_ends_it(tmp_path: Path, changes: JobChanges, lines: Any) -> None:
    put(tmp_path, 1, ["begin", "x"], look())
    assert changes.begin()
    put(tmp_path, 1, *lines, look())
    assert changes.read() is None and changes.read() is None
    assert changes.begin(), "after another listing"
    assert changes.read() is not None


def test_files_that_go_or_shrink_and_old_looks(tmp_path: Path, changes: JobChanges) -> None:
    put(tmp_path, 1, ["begin", "x"], look(time.time() - FOLLOWED_S - 1))
    assert not changes.begin(), "slurmctld was killed"
    put(tmp_path, 1, look())
    assert changes.begin()
    (tmp_path / "changes.000000000001").write_bytes(b"")
    assert changes.read() is None
    put(tmp_path, 1, look())
    assert changes.begin()
    (tmp_path / "changes.000000000001").unlink()
    assert changes.read() is None


def test_readers_are_noticed(tmp_path: Path, changes: JobChanges) -> None:
    changes.want()
    wanted = tmp_path / WANTED
    assert wanted.stat().st_mode & 0o777 == 0o600
    os.utime(wanted, (1, 1))
    changes.want()
    assert wanted.stat().st_mtime == 1, "within ten seconds"
    JobChanges(tmp_path).want()
    assert time.time() - wanted.stat().st_mtime < 60
    JobChanges(tmp_path / "not there").want()


def test_names_of_users() -> None:
    assert user_name(0) == "root" and user_name(3_999_999_999) == "3999999999"


@given(st.binary(max_size=300))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("changes")
    put(folder, 1, ["begin", "x"], look())
    changes = JobChanges(folder)
    assert changes.begin()
    with (folder / "changes.000000000001").open("ab") as file:
        file.write(data + b'\n["look", 5, 1]\n')
    changes.read()
