"""Notes of batch jobs' ends, and how they are reported to the controllers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from prolog_epilog.end_notices import EndNotice, EndNotices, report, reports_itself
from sluice.base.errors import SluiceError
from sluice.slurm import job as slurm_job
from sluice.slurm.commands import Commands

ENDED = int(time.time()) - 100
NOTE = EndNotice(job=42, restarts=1, uid=1000, status=256, ended=ENDED, stepd=4000000)


def write(folder: Path, note: EndNotice, name: str = "") -> Path:
    """A note as the SPANK plugin writes it."""
    path = folder / (name or str(note.job))
    path.write_text(f"sluice-ended 1 {note.job} {note.restarts} {note.uid} {note.status} {note.ended} {note.stepd}\n")
    return path


class Controllers:
    """Who gets the reports, and their answers: none, until they lead."""

    def __init__(self) -> None:
        self.reported: list[tuple[EndNotice, str]] = []
        self.lead = True
        self.refused: set[int] = set()  # jobs

    def take(self, note: EndNotice, node: str) -> str:
        if not self.lead or note.job in self.refused:
            raise SluiceError("nobody leads")
        self.reported.append((note, node))
        return ""


class Site:
    """The folder, a clock that does not move, slurmstepds that run or not."""

    def __init__(self, place: Path) -> None:
        self.now = 1000.0
        self.alive: set[int] = set()
        self.controllers = Controllers()
        self.ends = EndNotices(
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


def test_what_stays_behind_its_slurmstepd_is_reported_once(site: Site) -> None:
    write(site.folder, NOTE)
    site.alive = {42}
    assert site.look() == 5.0
    assert not site.controllers.reported
    site.alive = set()
    wait = site.look(5)
    assert wait is not None and wait <= 3.0  # the epilog may still come
    assert not site.controllers.reported
    site.look(wait)
    assert site.controllers.reported == [(NOTE, "n1")]
    assert not list(site.folder.iterdir())
    site.look(60)
    assert len(site.controllers.reported) == 1


def test_what_the_epilog_removes_is_nobodys_business(site: Site) -> None:
    path = write(site.folder, NOTE)
    site.look()
    path.unlink()
    site.look(10)
    site.look(10)
    assert not site.controllers.reported


def test_it_is_reported_again_until_a_controller_answers_at_growing_intervals(site: Site) -> None:
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
    assert site.controllers.reported == [(NOTE, "n1")]


def test_one_that_is_not_taken_keeps_up_no_other(site: Site) -> None:
    site.controllers.refused = {1, 2}
    for job in range(1, 6):
        write(site.folder, replace(NOTE, job=job, ended=NOTE.ended + job))
    site.look()
    for _ in range(3):
        with pytest.raises(SluiceError):
            site.look(20)
    assert [note.job for note, _ in site.controllers.reported] == [3, 4, 5]
    site.controllers.refused = set()
    site.look(20)
    assert sorted(note.job for note, _ in site.controllers.reported) == [1, 2, 3, 4, 5]


def test_the_next_run_of_a_job_has_a_note_of_its_own(site: Site) -> None:
    """Its note takes the place of the first one's; an answer about the first does not remove it."""
    write(site.folder, NOTE)
    site.look()
    later = replace(NOTE, restarts=2, ended=NOTE.ended + 50)

    def take(note: EndNotice, node: str) -> str:
        write(site.folder, later)
        return site.controllers.take(note, node)

    site.ends._give = take
    site.look(10)
    site.ends._give = site.controllers.take
    assert [note for note, _ in site.controllers.reported] == [NOTE]
    site.look()
    site.look(3)
    assert [note for note, _ in site.controllers.reported] == [NOTE, later]


def test_an_agent_that_starts_again_reports_what_it_finds_also_from_before_a_boot(tmp_path: Path) -> None:
    first = Site(tmp_path)
    write(first.folder, NOTE)
    (tmp_path / "run/ended").unlink()
    (tmp_path / "run").rmdir()
    second = Site(tmp_path)
    second.look()
    second.look(3)
    assert second.controllers.reported == [(NOTE, "n1")]


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
    assert not site.controllers.reported
    assert not list(site.folder.iterdir())
    assert "not a notice of a job's end" in capsys.readouterr().err


def test_a_note_that_nobody_took_for_weeks_is_removed(site: Site) -> None:
    write(site.folder, replace(NOTE, ended=ENDED - 31 * 86400))
    site.look()
    site.look(10)
    assert not site.controllers.reported and not list(site.folder.iterdir())


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
    commands = slurm_with(
        tmp_path,
        squeue=f"cat <<'END'\n{task_of_array(42, 42, 2)}END\n",
        scontrol=f'printf "%s\\n" "$@" >{tmp_path}/asked\necho "{said}" >&2\nexit {status}\n',
    )
    if outcome is None:
        with pytest.raises(SluiceError, match="it is reported again|no controller accepts"):
            report(NOTE, "n1", commands)
    else:
        assert report(NOTE, "n1", commands) == outcome
    assert (tmp_path / "asked").read_text().splitlines() == [
        "update",
        "JobId=42_2",  # its number is the array's, too
        f"AdminComment=sluice-ended 1 42 1 1000 256 {ENDED} n1",
    ]


def slurm_with(folder: Path, **scripts: str) -> Commands:
    """Slurm's commands as these shell scripts."""
    (folder / "bin").mkdir()
    for name, script in scripts.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}")
        (folder / "bin" / name).chmod(0o755)
    return Commands(prefix=folder)


def task_of_array(job: int, array: int, task: int) -> str:
    """As squeue shows it to `read_job`."""
    values = {"JobID": str(job), "ArrayJobID": str(array), "ArrayTaskID": str(task), "State": "RUNNING"}
    return "".join(values.get(name, "1").ljust(width) for name, width in slurm_job._WIDTHS.items()) + "\n"


def test_a_job_that_no_controller_knows_any_more_needs_no_end(tmp_path: Path) -> None:
    commands = slurm_with(tmp_path, squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    assert report(NOTE, "n1", commands) == ""


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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user's process")
def test_a_users_process_with_that_name_and_number_keeps_no_end_back() -> None:
    with subprocess.Popen(
        ["slurmstepd: [42.batch]", "-c", "print(flush=True); import time; time.sleep(60)"],
        executable=sys.executable,
        stdout=subprocess.PIPE,
        user=48611,
        cwd="/",
    ) as forged:
        assert forged.stdout is not None
        forged.stdout.readline()
        assert not reports_itself(replace(NOTE, stepd=forged.pid))
        forged.kill()
