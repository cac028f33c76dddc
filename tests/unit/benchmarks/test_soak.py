"""benchmarks.soak: the report of a file of samples, and which durations are refused."""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.soak import main, parse_duration, problems, report
from benchmarks.soak_samples import Process, programs, size
from benchmarks.trend import TooShortError
from dev_cluster.chaos.judge import Outcome
from sluice.base.errors import SluiceError, UsageError


def samples(
    file: Path, *, leak_kib: float = 0.0, job_kib: float = 0.0, count: int = 200, hours: float = 2.0, **outcome: int
) -> Path:
    """A run of two rounds: an agent that leaks so much an hour, decisions that grow so much a job; 1,000 jobs."""
    draw = random.Random(3)
    lines: list[dict[str, Any]] = [{"hours": 0.0, "about": {"rate": 0.5, "warm_up_s": 900, "machine": {}}}]
    for number in range(count):
        at = hours * number / count
        agent = {"pss_kib": 60000 + leak_kib * at + draw.gauss(0, 200), "descriptors": 30, "threads": 12}
        decisions = {"kib": job_kib * 500 * at, "files": 3}
        values = {"agent@n1": {"life": "7.1", **agent}, "decisions": {"life": "", **decisions}}
        lines.append({"hours": at, "sample": values})
    for at in (hours / 2, hours):
        told = asdict(Outcome(acknowledged=500, **outcome))
        lines.append({"hours": at, "outcome": told, "acts": {"takeover": 1}, "ended": []})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize(("text", "seconds"), [("72h", 259200), ("20m", 1200), ("150s", 150), ("0.5h", 1800)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(("text", "says"), [("72", "not a time"), ("1d", "not a time"), ("90s", "too short for a")])
def test_other_durations_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"duration '{text}': {says}"):
        parse_duration(text)


def test_a_quiet_run_has_no_problems(tmp_path: Path) -> None:
    document = report(samples(tmp_path / "samples"))
    assert problems(document) == []
    assert (document["rounds"], document["jobs"]["acknowledged"]) == (2, 1000)
    assert {(one["series"], one["kind"]) for one in document["series"]} == {
        *(("agent@n1", kind) for kind in ("pss_kib", "descriptors", "threads")),
        *(("decisions", kind) for kind in ("kib", "files")),
    }


def test_a_leak_is_named_with_its_slope(tmp_path: Path) -> None:
    document = report(samples(tmp_path / "samples", leak_kib=4000))
    assert problems(document) == ["leak: agent@n1 pss_kib"]
    (found,) = (one["trend"] for one in document["series"] if one["leaks"])
    assert abs(found["slope"] - 4000) < 4 * found["error"] and found["error"] < 100


@pytest.mark.parametrize(("job_kib", "leaks"), [(4, []), (100, ["decisions kib"])])
def test_history_may_grow_with_the_jobs(tmp_path: Path, job_kib: float, leaks: list[str]) -> None:
    assert report(samples(tmp_path / "samples", job_kib=job_kib))["leaks"] == leaks


def test_lost_jobs_and_ended_daemons_fail_a_run(tmp_path: Path) -> None:
    file = samples(tmp_path / "samples", lost=1)
    with file.open("a") as more:
        line = {"hours": 2.1, "outcome": asdict(Outcome()), "acts": {}, "ended": ["explaind@ctl1"]}
        more.write(json.dumps(line) + "\n")
    assert problems(report(file)) == ["lost = 2", "explaind@ctl1 ended by itself"]


def test_a_killed_run_is_reported_up_to_its_last_whole_line(tmp_path: Path) -> None:
    file = samples(tmp_path / "samples")
    text = "".join(line for line in file.read_text().splitlines(keepends=True) if "outcome" not in line)
    file.write_text(text[: len(text) - 20])
    document = report(file)
    assert (document["rounds"], document["jobs"]["acknowledged"], problems(document)) == (0, 0, [])


def test_a_run_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TooShortError, match="no series has enough readings after its warm-up; run for longer"):
        report(samples(tmp_path / "samples", count=20))


@pytest.mark.parametrize("text", ["", '{"hours": 0, "sample": {}}\n'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "samples").write_text(text)
    with pytest.raises(SluiceError, match="no samples of a soak"):
        report(tmp_path / "samples")


@pytest.mark.parametrize(("leak_kib", "status"), [(0, 0), (4000, 1)])
def test_the_command_reports_an_earlier_run(tmp_path: Path, leak_kib: float, status: int) -> None:
    file = samples(tmp_path / "samples", leak_kib=leak_kib)
    words = ["--report", "--samples", str(file), "--json", str(tmp_path / "json")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == status, done.output
    assert ("FAILED: leak: agent@n1 pss_kib" in done.output) == bool(status)
    assert json.loads((tmp_path / "json").read_text())["leaks"] == (["agent@n1 pss_kib"] if status else [])


def test_a_process_is_read() -> None:
    process = Process(os.getpid())
    with Path("/dev/null").open() as _:
        values = process.read()
    assert values["pss_kib"] > 1000 and values["threads"] >= 1 and values["descriptors"] >= 4
    assert process.inner_pid() > 0 and process.age_s > 0
    assert process.life == Process(os.getpid()).life
    assert programs("controllerd@ctl1", process).keys() <= {"controllerd@ctl1"}
    assert programs("munged", process) == {}


def test_the_size_of_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("folder/a", "folder/b", "c"):
        (tmp_path / name).write_bytes(b"x" * 512)
    assert size([tmp_path / "folder", tmp_path / "c", tmp_path / "gone"]) == {"kib": 1.5, "files": 3}
