"""Notes of batch jobs' ends, and how they are told to the controllers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from prolog_epilog.ends import Ends, Note, reports_itself, tell
from sluice_base.errors import SluiceError
from slurm_client.commands import Commands

ENDED = int(time.time()) - 100
NOTE = Note(job=42, restarts=1, uid=1000, status=256, ended=ENDED, stepd=4000000)


def write(folder: Path, note: Note, name: str = "") -> Path:
    """A note as the SPANK plugin writes it."""
    path = folder / (name or str(note.job))
    path.write_text(f"sluice-ended 1 {note.job} {note.restarts} {note.uid} {note.status} {note.ended} {note.stepd}\n")
    return path


class Controllers:
    """Who is told, and what they say: nothing, until they lead."""

    def __init__(self) -> None:
        self.told: list[tuple[Note, str]] = []
        self.lead = True
        self.refused: set[int] = set()  # jobs

    def take(self, note: Note, node: str) -> str:
        if not self.lead or note.job in self.refused:
            raise SluiceError("nobody leads")
        self.told.append((note, node))
        return ""


class Site:
    """The folder, a clock that stands, slurmstepds that live or not."""

    def __init__(self, place: Path) -> None:
        self.now = 1000.0
        self.alive: set[int] = set()
        self.controllers = Controllers()
        self.ends = Ends(
            place / "var/ended",
            lambda: "n1",
            give=self.controllers.take,
            alive=lambda note: note.job in self.alive,
            clock=lambda: self.now,
        )
        (place / "run").mkdir()
        self.ends.prepare(place / "run/ended")
        self.folder = place / "run/ended"

    def look(self, after: float = 0.0) -> float | None:
        self.now += after
        return self.ends.run()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_what_stays_behind_its_slurmstepd_is_told_once(site: Site) -> None:
    write(site.folder, NOTE)
    site.alive = {42}
    assert site.look() == 5.0
    assert not site.controllers.told
    site.alive = set()
    wait = site.look(5)
    assert wait is not None and wait <= 3.0  # the epilog may still come
    assert not site.controllers.told
    site.look(wait)
    assert site.controllers.told == [(NOTE, "n1")]
    assert not list(site.folder.iterdir())
    site.look(60)
    assert len(site.controllers.told) == 1


def test_what_the_epilog_removes_is_nobodys_business(site: Site) -> None:
    path = write(site.folder, NOTE)
    site.look()
    path.unlink()
    site.look(10)
    site.look(10)
    assert not site.controllers.told


def test_it_is_told_again_until_a_controller_answers_ever_more_seldom(site: Site) -> None:
    write(site.folder, NOTE)
    site.look()
    site.controllers.lead = False
    asked = []
    site.now += 5
    for _ in range(12):
        with pytest.raises(SluiceError, match="nobody leads"):
            site.look()
        wait = site.look()
        assert wait is not None
        asked.append(wait)
        site.now += wait
    assert 1.5 <= asked[0] <= 2.5
    assert all(6 <= wait <= 10 for wait in asked[3:])  # slurmctld asks nodes after 20 s what runs there
    site.controllers.lead = True
    site.look()
    assert site.controllers.told == [(NOTE, "n1")]


def test_one_that_is_not_taken_keeps_up_no_other(site: Site) -> None:
    site.controllers.refused = {1, 2}
    for job in range(1, 6):
        write(site.folder, replace(NOTE, job=job, ended=NOTE.ended + job))
    site.look()
    for _ in range(3):
        with pytest.raises(SluiceError):
            site.look(20)
    assert [note.job for note, _ in site.controllers.told] == [3, 4, 5]
    site.controllers.refused = set()
    site.look(20)
    assert sorted(note.job for note, _ in site.controllers.told) == [1, 2, 3, 4, 5]


def test_the_next_run_of_a_job_has_a_note_of_its_own(site: Site) -> None:
    """Its note takes the place of the first one's; an answer about the first does not remove it."""
    write(site.folder, NOTE)
    site.look()
    later = replace(NOTE, restarts=2, ended=NOTE.ended + 50)

    def take(note: Note, node: str) -> str:
        write(site.folder, later)
        return site.controllers.take(note, node)

    site.ends._give = take
    site.look(10)
    site.ends._give = site.controllers.take
    assert [note for note, _ in site.controllers.told] == [NOTE]
    site.look()
    site.look(3)
    assert [note for note, _ in site.controllers.told] == [NOTE, later]


def test_an_agent_that_starts_anew_tells_what_it_finds_also_from_before_a_boot(tmp_path: Path) -> None:
    first = Site(tmp_path)
    write(first.folder, NOTE)
    (tmp_path / "run/ended").unlink()
    (tmp_path / "run").rmdir()
    second = Site(tmp_path)
    second.look()
    second.look(3)
    assert second.controllers.told == [(NOTE, "n1")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sluice-ended 1 42 1 1000 256 1700000000 4000000",  # cut off
        "sluice-ended 1 43 1 1000 256 1700000000 4000000\n",  # of another job
        "sluice-ended 2 42 1 1000 256 1700000000 4000000\n",
        "sluice-ended 1 42 1 1000 256 1700000000 4000000 --uid=0\n",
        "x" * 100000,
        "\0" * 60,  # a power cut
    ],
)
def test_what_is_no_note_is_removed(site: Site, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (site.folder / "42").write_text(text)
    site.look()
    site.look(10)
    assert not site.controllers.told
    assert not list(site.folder.iterdir())
    assert "no note of a job's end" in capsys.readouterr().err


def test_a_note_that_nobody_took_for_weeks_is_removed(site: Site) -> None:
    write(site.folder, replace(NOTE, ended=ENDED - 31 * 86400))
    site.look()
    site.look(10)
    assert not site.controllers.told and not list(site.folder.iterdir())


def test_the_folder_is_roots_alone(site: Site) -> None:
    assert site.ends.folder.stat().st_mode & 0o777 == 0o700
    site.ends.folder.chmod(0o777)
    site.ends.prepare(site.folder)
    assert site.ends.folder.stat().st_mode & 0o777 == 0o700


def test_a_slurmstepd_is_known_by_its_job() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert not reports_itself(replace(NOTE, stepd=other.pid))
        other.kill()
    with subprocess.Popen(
        ["slurmstepd: [42.batch]", "-c", "import time; print(flush=True); time.sleep(60)"],
        executable=sys.executable,
        stdout=subprocess.PIPE,
    ) as stepd:
        assert stepd.stdout is not None
        stepd.stdout.readline()
        assert not reports_itself(replace(NOTE, job=43, stepd=stepd.pid))
        assert reports_itself(replace(NOTE, stepd=stepd.pid))
        stepd.kill()
    assert not reports_itself(replace(NOTE, stepd=stepd.pid))


@pytest.mark.parametrize(
    ("said", "status", "outcome"),
    [
        ("slurm_update error: Job/step already completing or completed", 1, ""),
        ("slurm_update error: Job has already finished", 1, ""),
        ("slurm_update error: Invalid job id specified", 1, ""),
        ("slurm_update error: Requested operation not supported on this system", 1, "the failover journal is off"),
        ("", 0, "job_submit/sluice is not loaded on the controllers"),
        ("slurm_update error: Unable to contact slurm controller (connect failure)", 1, None),
        ("slurm_update error: Slurm backup controller in standby mode", 1, None),
        ("slurm_update error: Job update not available right now, the DB index is being set", 1, None),
    ],
)
def test_what_controllers_answer(tmp_path: Path, said: str, status: int, outcome: str | None) -> None:
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/asked\necho "{said}" >&2\nexit {status}\n')
    scontrol.chmod(0o755)
    commands = Commands(prefix=tmp_path)
    if outcome is None:
        with pytest.raises(SluiceError, match="it is told again|no controller takes"):
            tell(NOTE, "n1", commands)
    else:
        assert tell(NOTE, "n1", commands) == outcome
    assert (tmp_path / "asked").read_text().splitlines() == [
        "update",
        "JobId=42",
        f"AdminComment=sluice-ended 1 42 1 1000 256 {ENDED} n1",
    ]


def test_the_epilog_removes_the_note(tmp_path: Path) -> None:
    """As root it has nothing else to do for a job without GPUs."""
    source = (Path(__file__).parents[3] / "prolog_epilog/programs/node_program.py").read_text()
    assert 'ENDED = "/run/sluice/ended"' in source
    (tmp_path / "sluice-epilog").write_text(source.replace("/run/sluice/ended", str(tmp_path)))
    write(tmp_path, NOTE)
    write(tmp_path, replace(NOTE, job=43))
    for _ in range(2):  # the second finds none
        environment = {"SLURM_JOB_ID": "42", "PATH": os.environ["PATH"]}
        subprocess.run([sys.executable, "-IS", tmp_path / "sluice-epilog"], env=environment, check=True)
        assert not (tmp_path / "42").exists()
    assert (tmp_path / "43").exists()
