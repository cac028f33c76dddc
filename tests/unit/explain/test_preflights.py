"""What is kept and shown of jobs' preflights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sluice.base.errors import SluiceError
from sluice.cli.explain import render
from sluice.client.models import Explanation
from sluice.exchange.preflight_jobs import (
    FILE_NAME,
    AtFault,
    JobPreflight,
    keep_preflight,
    read_preflights,
    write_preflights,
)
from sluice.explain import preflights
from sluice.explain.preflights import SitePreflights, shown

WORDS = "preflight: 4 rounds, 2.1 s by perftest, node n7's link mlx5_0 to leaf l1 slow: 11 of 48 GB/s"
FAULT = JobPreflight("ann", 1e9, "n[5-8]", 4, 2.1, "perftest", "fault", WORDS, [AtFault("n7", "link slow")])
GOOD = JobPreflight("ann", 1e9 + 20, "n[5-6,8-9]", 3, 1.9, "perftest", "good", "preflight: 4 nodes are good")


def test_each_start_of_a_job_has_its_own_and_what_came_of_it_replaces_it(tmp_path: Path) -> None:
    jobs: dict[int, list[JobPreflight]] = {}
    for one in (FAULT, replace(FAULT, requeued=1e9 + 3), GOOD):
        keep_preflight(jobs, 17, one)
    write_preflights(tmp_path / FILE_NAME, jobs)
    assert read_preflights(tmp_path / FILE_NAME) == {17: [replace(FAULT, requeued=1e9 + 3), GOOD]}
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_number_that_is_used_again_shows_nothing_of_the_user_before(tmp_path: Path) -> None:
    write_preflights(tmp_path / FILE_NAME, {17: [FAULT]})
    site = SitePreflights({"StateSaveLocation": str(tmp_path)})
    assert len(site.of(17, "ann")) == 1
    assert site.of(17, "bob") == site.of(18, "ann") == []
    jobs = read_preflights(tmp_path / FILE_NAME)
    keep_preflight(jobs, 17, replace(GOOD, user="bob"))
    assert [one.user for one in jobs[17]] == ["bob"]


def test_the_oldest_are_dropped(tmp_path: Path) -> None:
    jobs: dict[int, list[JobPreflight]] = {}
    for job in range(1500):
        keep_preflight(jobs, job, FAULT)
    for turn in range(9):
        keep_preflight(jobs, 600, replace(GOOD, time=2e9 + turn))
    write_preflights(tmp_path / FILE_NAME, jobs)
    kept = read_preflights(tmp_path / FILE_NAME)
    assert len(kept) == 1024 and 1499 in kept and 100 not in kept
    assert [one.time for one in kept[600]] == [2e9 + turn for turn in (5, 6, 7, 8)]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert read_preflights(tmp_path / FILE_NAME) == {}
    (tmp_path / FILE_NAME).write_text('{"jobs": {"17": [{"user": 3')
    with pytest.raises(SluiceError, match=FILE_NAME):
        read_preflights(tmp_path / FILE_NAME)


@pytest.mark.parametrize("version", ["2", '"x"', "null"])
def test_a_file_of_another_version_is_named_with_both(tmp_path: Path, version: str) -> None:
    (tmp_path / FILE_NAME).write_text(f'{{"schema_version": {version}, "jobs": [{{"of": "later"}}]}}')
    for _ in range(2):
        with pytest.raises(SluiceError, match=f"{FILE_NAME}: schema .*, this Sluice reads 1; remove it"):
            SitePreflights({"StateSaveLocation": str(tmp_path)}).of(17, "ann")


def test_many_questions_read_the_file_once_until_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(preflights, "read_preflights", lambda path: read.append(path) or read_preflights(path))
    site = SitePreflights({"StateSaveLocation": str(tmp_path)})
    assert site.of(17, "ann") == site.of(17, "ann") == []
    assert len(read) == 1
    for count in (1, 2):
        write_preflights(tmp_path / FILE_NAME, {17: [FAULT, GOOD][:count]})
        assert [len(site.of(job, "ann")) for job in (17, 18, 17)] == [count, 0, count]
        assert len(read) == 1 + count
    (tmp_path / FILE_NAME).write_text("{")
    for _ in range(2):
        with pytest.raises(SluiceError, match=FILE_NAME):
            site.of(17, "ann")
    (tmp_path / FILE_NAME).unlink()
    assert site.of(17, "ann") == []


@pytest.mark.parametrize("seconds", ["1e300", "-1", "NaN", "Infinity"])
def test_a_moment_that_is_none_is_damage(tmp_path: Path, seconds: str) -> None:
    write_preflights(tmp_path / FILE_NAME, {17: [FAULT]})
    text = (tmp_path / FILE_NAME).read_text()
    (tmp_path / FILE_NAME).write_text(text.replace("1000000000.0", seconds))
    with pytest.raises(SluiceError, match=FILE_NAME):
        SitePreflights({"StateSaveLocation": str(tmp_path)}).of(17, "ann")


def test_the_user_sees_why_the_job_was_requeued() -> None:
    found, requeued, restarts = shown(
        [FAULT, replace(FAULT, requeued=1e9 + 3), replace(FAULT, requeued=1e9 + 3, released=1e9 + 5)]
    )
    assert found["text"].endswith("link mlx5_0 to leaf l1 slow: 11 of 48 GB/s")
    assert "; requeued at 2001-09-" in requeued["text"] and "other nodes" not in requeued["text"]
    assert restarts["text"].endswith("starts on other nodes than n7")
    assert (found["verdict"], found["at_fault"]) == ("fault", [{"node": "n7", "what": "link slow"}])


def test_what_came_of_it_is_shown_however_much_was_found() -> None:
    long = replace(FAULT, words=WORDS + "; more" * 150, requeued=1e9 + 3, released=1e9 + 5)
    document = {"schema_version": 1, "job": "17", "preflights": shown([long])}
    assert render(document)[-1].endswith("starts on other nodes than n7")


def test_the_model_of_the_rest_api_is_the_same() -> None:
    document = {"schema_version": 1, "job": "17", "preflights": shown([FAULT, GOOD])}
    assert Explanation.model_validate(document).model_dump(exclude_unset=True) == document
