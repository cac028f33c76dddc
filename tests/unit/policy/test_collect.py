"""Events of jobs, from accounting into the audit log: each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy.audit import AuditLog
from policy.collect import collect, refusals
from sluice.base.errors import SluiceError
from sluice.slurm.answers import AccountingJob


def job(number: int, submit: int, start: int | None, end: int | None, gpus: int = 2) -> AccountingJob:
    return AccountingJob(
        id=number, label=str(number), user="alice", account="red", qos="red", partition="main",
        state="COMPLETED", exit_code=0, exit_signal=0, nodes="n1", node_count=1, cpus=1, submit_time=submit,
        eligible_time=submit, start_time=start, end_time=end, elapsed_s=1, time_limit_s=None,
        tres_requested={"cpu": 1, "gres/gpu": gpus}, tres_allocated={"cpu": 1, "gres/gpu": gpus}, reservation="",
    )  # fmt: skip


class FakeClient:
    def __init__(self, jobs: list[AccountingJob]) -> None:
        self.jobs = jobs

    def accounting_jobs(self, **window: Any) -> list[AccountingJob]:
        return self.jobs


def test_each_event_is_recorded_once_and_in_order(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    jobs = [job(1, 1000, 1010, 1030), job(2, 1005, 1031, None), job(3, 1006, 1007, 1008, gpus=0)]
    client: Any = FakeClient(jobs)
    assert collect(log, client, user="root", delay_s=0, now=1020) == 4
    assert collect(log, client, user="root", delay_s=0, now=1020) == 0
    assert collect(log, client, user="root", delay_s=0, now=1040) == 2
    assert collect(log, client, user="root", delay_s=0, now=1050) == 0
    found = [(entry.action, entry.subject) for entry in log.entries() if entry.action != "collect"]
    assert found == [("submit", "1"), ("submit", "2"), ("submit", "3"), ("grant", "1"), ("return", "1"), ("grant", "2")]
    assert [entry.detail["gpus"] for entry in log.entries() if entry.action == "grant"] == [2, 2]
    assert log.verify()[1] == []


def test_young_events_are_left_to_the_next_time(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    client: Any = FakeClient([job(1, 1000, 1010, 1030)])
    assert collect(log, client, user="root", delay_s=25, now=1030) == 1
    assert collect(log, client, user="root", delay_s=0, now=1030) == 2


def test_the_last_collection_is_found_behind_a_rotation(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, rotate_bytes=600)
    client: Any = FakeClient([job(1, 1000, 1010, 1030)])
    assert collect(log, client, user="root", delay_s=0, now=1020) == 2
    for number in range(4):
        log.append("root", "apply", str(number))
    assert collect(log, client, user="root", delay_s=0, now=1040) == 1


def test_nothing_is_collected_where_nothing_can_be_recorded(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("")
    client: Any = FakeClient([])
    with pytest.raises(SluiceError, match="recorded"):
        collect(AuditLog(tmp_path / "audit"), client, user="root")


REFUSALS = """\
[2026-11-21T19:13:33.123] debug:  job_submit/sluice: refused nothing
[2026-11-21T19:13:34.500] job_submit/sluice: refused job of user 0, account red: too many GPUs: 9
[2026-11-21T19:13:35.000] sched: name=[2026-11-21T19:13:34.500] job_submit/sluice: refused job of user 0, account x: y
[2026-11-21T19:13:36.000] job_submit/sluice: refused change of a job of user 4000000000, account -: no
"""


def test_refusals_come_from_the_log_of_slurmctld_each_once(tmp_path: Path) -> None:
    path = tmp_path / "slurmctld.log"
    path.write_text(REFUSALS)
    first, second = refusals(path)
    assert (first.user, first.action, first.subject) == ("root", "refuse", "red")
    assert first.detail == {"account": "red", "what": "job", "why": "too many GPUs: 9"}
    assert (second.user, second.detail["what"]) == ("4000000000", "change of a job")
    assert second.time == pytest.approx(first.time + 1.5)
    log = AuditLog(tmp_path / "audit")
    client: Any = FakeClient([])
    now = first.time + 1
    assert collect(log, client, user="root", delay_s=0, now=now, slurmctld_logs=[path]) == 1
    assert collect(log, client, user="root", delay_s=0, now=now, slurmctld_logs=[path]) == 0
    assert collect(log, client, user="root", delay_s=0, now=now + 9, slurmctld_logs=[path]) == 1
    assert [entry.subject for entry in log.entries() if entry.action == "refuse"] == ["red", "-"]


SAID = REFUSALS.splitlines()[1].partition("] ")[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), ("[Nov 21 19:13:34 2026] " + SAID, "ISO"), ("slurmctld: " + SAID, "ISO")],
)
def test_a_log_that_cannot_be_read_is_named_and_nothing_recorded(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "slurmctld.log"
    if text is not None:
        path.write_text(text)
    client: Any = FakeClient([job(1, 1000, None, None)])
    log = AuditLog(tmp_path / "audit")
    with pytest.raises(SluiceError, match=said):
        collect(log, client, user="root", delay_s=0, now=1020, slurmctld_logs=[path])
    assert list(log.entries()) == []


@pytest.mark.parametrize(
    "forged",
    [
        "[x] job_submit/sluice: refused job of user 1, account red: no time",
        "[0001-01-01T00:00:00] job_submit/sluice: refused job of user 1, account red: before all times",
        "slurmctld: job_submit/sluice: refused job of user 1, account red: without a time",
        f"[2026-11-21T19:13:34] job_submit/sluice: refused job of user {'9' * 5000}, account red: a long number",
    ],
)
def test_no_line_that_a_user_adds_to_the_log_stops_the_collection(tmp_path: Path, forged: str) -> None:
    """Slurm's "invalid partition specified: %s" repeats line breaks."""
    path = tmp_path / "slurmctld.log"
    path.write_text(f"[2026-11-21T19:13:33.000] invalid partition specified: x\n{forged}\n{REFUSALS}")
    log = AuditLog(tmp_path / "audit")
    client: Any = FakeClient([])
    collect(log, client, user="root", delay_s=0, now=1795290000, slurmctld_logs=[path])
    assert {"red", "-"} == {entry.subject for entry in log.entries() if entry.action == "refuse"}
