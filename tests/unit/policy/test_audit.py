"""The audit log: an unbroken chain, also when writers are killed; every forgery is found."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from policy.audit import AuditLog, syslog_line
from sluice.base.errors import SluiceError, UsageError


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    log = AuditLog(tmp_path / "audit")
    for number in range(5):
        log.append("alice", "apply", f"cluster{number}", {"changes": number}, version="sha256:x")
    return log


def test_entries_are_chained_and_read_back(log: AuditLog) -> None:
    entries = list(log.entries())
    assert [entry.seq for entry in entries] == [1, 2, 3, 4, 5]
    assert all(after.prev == before.hash for before, after in itertools.pairwise(entries))
    assert entries[3].detail == {"changes": 3}
    assert log.verify() == (5, [])


def change_word(text: str) -> str:
    return text.replace("cluster2", "cluster9")


def leave_one_out(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(lines[:2] + lines[3:])


def swap(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:1], lines[2], lines[1], *lines[3:]])


def cut_off(text: str) -> str:
    return "".join(text.splitlines(keepends=True)[:-1])


def put_in(text: str) -> str:
    lines = text.splitlines(keepends=True)
    forged = json.loads(lines[1]) | {"user": "mallory"}
    return "".join([*lines[:2], json.dumps(forged) + "\n", *lines[2:]])


@pytest.mark.parametrize("forge", [change_word, leave_one_out, swap, cut_off, put_in], ids=lambda one: one.__name__)
def test_every_forgery_shows(log: AuditLog, forge: Callable[[str], str]) -> None:
    path = log.folder / "audit.log"
    path.write_text(forge(path.read_text()))
    assert log.verify()[1]


def test_a_log_that_was_cut_off_takes_no_more(log: AuditLog) -> None:
    path = log.folder / "audit.log"
    path.write_text(cut_off(path.read_text()))
    with pytest.raises(SluiceError, match="cut off"):
        log.append("alice", "apply", "x")


@pytest.mark.parametrize("kept", [0, 10, 100])
def test_half_an_entry_of_a_killed_writer_is_overwritten(log: AuditLog, kept: int) -> None:
    path = log.folder / "audit.log"
    with path.open("a") as file:
        file.write('{"seq":6,"time":1.0,"user":"x","action":"apply"'[:kept])
    log.append("bob", "apply", "y")
    assert log.verify() == (6, [])


def test_a_whole_entry_of_a_writer_killed_before_the_head_stays(log: AuditLog) -> None:
    head = (log.folder / "head").read_text()
    log.append("bob", "apply", "y")
    (log.folder / "head").write_text(head)
    log.append("carol", "apply", "z")
    assert [entry.user for entry in log.entries()][-2:] == ["bob", "carol"]
    assert log.verify() == (7, [])


def test_rotation_keeps_the_chain(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, rotate_bytes=1500)
    for number in range(20):
        log.append("alice", "apply", str(number))
    assert len(log.files()) > 3
    assert [entry.subject for entry in log.entries()] == [str(number) for number in range(20)]
    assert log.verify() == (20, [])
    log.files()[0].unlink()
    assert log.verify()[1]


def test_many_writers_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from policy.audit import AuditLog\n"
        "for n in range(20): AuditLog(Path(sys.argv[1])).append('u', 'apply', str(n))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, tmp_path]) for _ in range(4)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    assert AuditLog(tmp_path).verify() == (80, [])


def test_others_append_what_is_theirs_and_nothing_else(log: AuditLog) -> None:
    good = {"time": 1.5, "user": "bob", "action": "grant", "subject": "17", "detail": {"gpus": 2}}
    assert log.append_events([json.dumps(good), ""]) == 1
    for bad in (
        {**good, "action": "apply"},
        {**good, "seq": 3},
        {**good, "time": "now"},
        {**good, "detail": {"a": [1]}},
        {"user": "bob"},
    ):
        with pytest.raises(UsageError, match="line 2"):
            log.append_events([json.dumps(good), json.dumps(bad)])
    with pytest.raises(UsageError):
        log.append_events(["not json"])
    assert log.verify() == (6, [])


def test_syslog_is_one_line_an_entry(log: AuditLog) -> None:
    log.append("eve\n<0>1 forged", "apply", "x\ny", {"a": "b\nc"})
    for entry in log.entries():
        line = syslog_line(entry)
        assert "\n" not in line
        assert line.startswith("<85>1 ")


def test_what_cannot_be_recorded_is_not_done(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("a file")
    with pytest.raises(SluiceError, match="nothing is changed"):
        AuditLog(tmp_path / "audit").refuse_unwritable()


@pytest.mark.parametrize(
    "words",
    [["collect", "--delay", "99999999999d"], ["list", "--since", "99999999999d"], ["list", "--until", "0001-01-01"]],
)
def test_times_that_are_none(words: list[str], tmp_path: Path) -> None:
    line = [sys.executable, "-m", "sluice.main", "audit", *words, "--state-dir", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)
