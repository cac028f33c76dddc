"""Once: the same key with the same request is done once, wherever the helper was killed."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sluice.actd import jobs as jobs_module
from sluice.actd import server
from sluice.actd.keys import Keys
from sluice.exchange.acts import ActError
from tests.unit.actd.world import World

SUBMIT = {"script": "#!/bin/sh\n"}


class Killed(BaseException):
    """As SIGKILL: nothing of the process goes on."""


def test_the_same_key_is_answered_as_before(world: World) -> None:
    first = world.ask("submit", key="k", **SUBMIT)
    assert world.ask("submit", key="k", **SUBMIT) == first
    world.begin()
    assert world.ask("submit", key="k", **SUBMIT) == first
    assert len(world.calls()) == 1
    assert world.ask("submit", "oper", key="k", **SUBMIT) != first, "a key is its user's"
    assert world.ask("submit", key="another", **SUBMIT) != first
    assert world.refusal("submit", key="k", script="#!/bin/sh\nother").status == 422
    assert world.refusal("cancel", key="k", job="100").status == 422


def test_without_a_key_each_is_done(world: World) -> None:
    assert world.ask("submit", **SUBMIT) != world.ask("submit", **SUBMIT)


def test_what_was_refused_may_be_asked_again(world: World) -> None:
    (world.seen / "refuse").write_text("sbatch: error: Batch job submission failed: Invalid qos specification\n")
    assert world.refusal("submit", key="k", **SUBMIT).status == 422
    (world.seen / "refuse").unlink()
    assert world.ask("submit", key="k", **SUBMIT)["job_id"] == 100


@pytest.mark.parametrize("place", ["before", "queued", "noted"])
def test_killed_anywhere_each_is_queued_once(world: World, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SETTLED_S", 0.3)
    jobs, keys = world.actd.jobs, world.actd.keys
    submit, end = jobs.submit, keys.end

    def killed_at(*words: Any) -> Any:
        if place == "before":
            raise Killed
        found = submit(*words)
        if place == "queued":
            raise Killed
        return found

    def killed_when_noted(*words: Any) -> None:
        end(*words)
        raise Killed

    monkeypatch.setattr(jobs, "submit", killed_at)
    if place == "noted":
        monkeypatch.setattr(keys, "end", killed_when_noted)
    with pytest.raises(Killed):
        world.ask("submit", key="k", **SUBMIT)
    world.begin().recover()
    if place == "before":
        error = world.refusal("submit", key="k", **SUBMIT)
        assert error.status == 503 and error.retry_after, "it might still be on its way to slurmctld"
        time.sleep(0.3)
    assert world.ask("submit", key="k", **SUBMIT)["job_id"] == 100
    assert world.read("jobs").split()[::2] == ["100"]


def test_a_job_that_is_queued_late_is_found(world: World) -> None:
    (world.seen / "refuse").write_text("sbatch: error: Batch job submission failed: Socket timed out on send/recv\n")
    assert world.refusal("submit", key="k", **SUBMIT).status == 503
    mark = world.read("script").split()[-1]
    (world.seen / "refuse").unlink()
    (world.seen / "job-77").write_text(f"#!/bin/sh\n# sluice request {mark}\n")
    (world.seen / "jobs").write_text(f"77 {int(time.time())}\n")
    assert world.ask("submit", key="k", **SUBMIT)["job_id"] == 77
    assert len(world.calls()) == 1


def test_looking_for_a_job_reads_each_script_once_and_none_that_is_anothers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_SLACK_S", 600.0)  # however slow this machine is
    for number in range(5):
        world.ask("submit", key=f"before {number}", **SUBMIT)
    for _ in range(5):
        world.ask("submit", **SUBMIT)
    (world.seen / "refuse").write_text("sbatch: error: Unable to contact slurm controller\n")
    assert world.refusal("submit", key="k", **SUBMIT).status == 503
    asked: list[int] = []
    jobs = world.actd.jobs
    mark_of = jobs._mark_of
    monkeypatch.setattr(jobs, "_mark_of", lambda number: asked.append(number) or mark_of(number))
    for _ in range(3):
        assert world.refusal("submit", key="k", **SUBMIT).status == 503
    assert sorted(asked) == [105, 106, 107, 108, 109]
    monkeypatch.setattr(jobs_module, "_SEARCH_S", -1.0)
    jobs._marks.clear()
    assert "looked for" in world.refusal("submit", key="k", **SUBMIT).what, "what was not looked at is not: not there"


def test_a_mark_of_another_is_no_mark(world: World) -> None:
    (world.seen / "refuse").write_text("sbatch: error: Unable to contact slurm controller\n")
    assert world.refusal("submit", key="k", **SUBMIT).status == 503
    (world.seen / "refuse").unlink()
    (world.seen / "job-77").write_text("#!/bin/sh\n# sluice request " + "0" * 32 + "\n")
    (world.seen / "jobs").write_text(f"77 {int(time.time())}\n")
    assert world.refusal("submit", key="k", **SUBMIT).status == 503


def test_while_it_is_being_done_it_is_not_done_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    submit = world.actd.jobs.submit

    def slow(*words: Any) -> Any:
        begun.set()
        go_on.wait(20)
        return submit(*words)

    monkeypatch.setattr(world.actd.jobs, "submit", slow)
    first = threading.Thread(target=world.ask, args=("submit",), kwargs={"key": "k", **SUBMIT})
    first.start()
    begun.wait(20)
    error = world.refusal("submit", key="k", **SUBMIT)
    assert error.status == 409 and error.retry_after == 1
    go_on.set()
    first.join()
    assert world.ask("submit", key="k", **SUBMIT)["job_id"] == 100 and len(world.calls()) == 1


def test_a_program_that_outlives_its_helper_is_waited_for(world: World) -> None:
    keys = world.actd.keys
    entry = keys.begin("alice", "k", "submit", SUBMIT)
    held = os.dup(entry.lock)  # sbatch has it, too
    keys.leave(entry)
    world.begin()
    assert world.refusal("submit", key="k", **SUBMIT).status == 409
    os.close(held)
    assert world.refusal("submit", key="k", **SUBMIT).status == 503, "not settled yet"
    assert not world.calls()


def test_keys_are_few_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(tmp_path, of_user=20, of_all=50)
    for user in ("a", "b", "c", "d"):
        for number in range(30):
            entry = keys.begin(user, str(number), "cancel", {})
            keys.end(entry, {})
            keys.leave(entry)
    files = list(tmp_path.glob("*/*.json"))
    assert len(files) <= 53 and all(len(list(tmp_path.glob(f"{user}/*.json"))) <= 21 for user in "abcd")
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    later = time.time() + 25 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    entry = keys.begin("d", "29", "submit", {})
    assert entry.answer is None and not entry.again, "a day is over"
    assert len(list(tmp_path.glob("*/*.json"))) == 1


@pytest.mark.parametrize("user", ["../x", "a/b", "", ".", "..", "-x", "a\0"])
def test_names_that_are_no_names_make_no_path(tmp_path: Path, user: str) -> None:
    with pytest.raises(ActError):
        Keys(tmp_path / "keys").begin(user, "k", "submit", {})
    assert not list(tmp_path.glob("keys/*"))


def test_a_damaged_file_is_not_taken_for_none(world: World) -> None:
    world.ask("submit", key="k", **SUBMIT)
    (path,) = world.folder.glob("lib/actd/keys/*/*.json")
    path.write_text("{")
    assert world.refusal("submit", key="k", **SUBMIT).status == 503
    assert len(world.calls()) == 1


def test_what_is_noted_is_on_disk_before_it_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    submit = world.actd.jobs.submit

    def look(who: Any, body: Any, mark: str, lock: int) -> Any:
        (path,) = world.folder.glob("lib/actd/keys/*/*.json")
        seen.append(json.loads(path.read_text()))
        with path.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return submit(who, body, mark, lock)

    monkeypatch.setattr(world.actd.jobs, "submit", look)
    world.ask("submit", key="k", **SUBMIT)
    assert seen[0]["answer"] is None and seen[0]["mark"] in world.read("script")
